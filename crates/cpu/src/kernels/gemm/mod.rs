//! Matrix products.
//!
//! [`gemm`] follows the BLIS scheme (Van Zee and van de Geijn, "BLIS: a framework
//! for rapidly instantiating BLAS functionality", 2015): blocks of A and B are
//! packed into panels that stay in cache, and a register tile multiplies them.
//! [`linear_skinny`] reads the weight once, in place, for the few rows of decoding.

mod micro;
mod pack;
mod skinny;

#[cfg(target_arch = "x86_64")]
pub use micro::{Avx2, Avx512};
pub use micro::{Portable, Tile, tile_column, tile_rows};
pub use pack::{pack_panel, pack_panels, unpack_panel};
pub(crate) use skinny::dots;
pub use skinny::{SKINNY_ROWS, linear_skinny, linear_skinny_workspace};

use super::elem::Elem;
use super::parallel::{Shared, for_each};

/// A read-only matrix: element (i, j) is `data[i * row_stride + j * col_stride]`.
#[derive(Clone, Copy, Debug)]
pub struct Mat<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T> Mat<'a, T> {
    /// Rows one after another. Panics if `data` is shorter than `rows * cols`.
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols, 1)
    }

    /// Any strides. Panics if an element lies outside `data`.
    pub fn strided(
        data: &'a [T],
        rows: usize,
        cols: usize,
        row_stride: usize,
        col_stride: usize,
    ) -> Self {
        if rows > 0 && cols > 0 {
            let last = (rows - 1) * row_stride + (cols - 1) * col_stride;
            assert!(
                last < data.len(),
                "a {rows} x {cols} matrix with strides {row_stride}, {col_stride} needs {} elements, not {}",
                last + 1,
                data.len()
            );
        }
        Self { data, rows, cols, row_stride, col_stride }
    }

    /// The transposed view.
    pub fn t(self) -> Self {
        Self {
            data: self.data,
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }
}

// Most rows, columns and summands of one packed block: A and B together take
// 5.25 MiB, within the last-level cache; a column panel of B (16 or 32 wide)
// and the rows of A that one task multiplies fit the first two levels.
const BLOCK_M: usize = 1536;
const BLOCK_N: usize = 2048;
const BLOCK_K: usize = 384;
// A task's part of the block.
const TASK_M: usize = 192;
const TASK_N: usize = 256;
// Rows of A or columns of B that one task packs: whole panels of every tile.
const PACK: usize = 96;
// Below this many multiply-adds a product is not worth sharing.
const SERIAL: usize = 32 * 32 * 32;
// The widest tile of any instruction set: sizes must not depend on the machine.
const MAX_MR: usize = 12;
const MAX_NR: usize = 32;

/// Length of the blocks that `n` is cut into: as equal as multiples of `step` allow.
fn block(n: usize, most: usize, step: usize) -> usize {
    n.div_ceil(n.div_ceil(most).max(1)).next_multiple_of(step).max(step)
}

/// `f32` elements of workspace of [`gemm`] for C(m, n) summed over k.
/// `c_is_f32` is false where C is stored in a narrower type.
pub fn gemm_workspace(m: usize, n: usize, k: usize, c_is_f32: bool) -> usize {
    // Rounding to a smaller step never gives more, so this bounds every machine.
    let (mb, nb) = (block(m, BLOCK_M, MAX_MR), block(n, BLOCK_N, MAX_NR));
    let kb = block(k, BLOCK_K, 1);
    let sums = if c_is_f32 || kb >= k { 0 } else { mb * nb };
    (mb + nb) * kb + sums
}

/// C = A B, or C += A B where `accumulate`, plus `bias` in every row.
///
/// A is (M, K), B is (K, N), C is (M, N) with rows `ldc` elements apart, `bias` is
/// (N). Each element of C is summed in `f32` over K in ascending order within
/// blocks of at most 384, the blocks in ascending order too, and is rounded to its
/// storage type once.
///
/// The three products of a linear layer y = x wᵀ with x (M, K) and w (N, K):
/// * `gemm(Mat::new(x, m, k), Mat::new(w, n, k).t(), y, n, ..)`
/// * `gemm(Mat::new(d_y, m, n), Mat::new(w, n, k), d_x, k, ..)`
/// * `gemm(Mat::new(d_y, m, n).t(), Mat::new(x, m, k), d_w, k, ..)`
///
/// Panics if the shapes disagree or `ws` is shorter than [`gemm_workspace`].
pub fn gemm<A: Elem, B: Elem, C: Elem>(
    a: Mat<A>,
    b: Mat<B>,
    c: &mut [C],
    ldc: usize,
    bias: Option<&[B]>,
    accumulate: bool,
    ws: &mut [f32],
) {
    let (m, k, n) = (a.rows, a.cols, b.cols);
    assert_eq!(k, b.rows, "A has {k} columns, B has {} rows", b.rows);
    assert!(n <= ldc, "rows of C are {ldc} apart and {n} long");
    if m == 0 || n == 0 {
        return;
    }
    assert!((m - 1) * ldc + n <= c.len(), "C is too short");
    if let Some(bias) = bias {
        assert_eq!(bias.len(), n, "bias has {} elements, C has {n} columns", bias.len());
    }
    let need = gemm_workspace(m, n, k, C::IS_F32);
    assert!(ws.len() >= need, "workspace of {} floats, {need} needed", ws.len());

    #[cfg(target_arch = "x86_64")]
    match super::simd::isa() {
        super::simd::Isa::Avx512 => {
            return gemm_with::<Avx512, 12, 32, A, B, C>(a, b, c, ldc, bias, accumulate, ws);
        }
        super::simd::Isa::Avx2 => {
            return gemm_with::<Avx2, 6, 16, A, B, C>(a, b, c, ldc, bias, accumulate, ws);
        }
        super::simd::Isa::Portable => {}
    }
    gemm_with::<Portable, 6, 16, A, B, C>(a, b, c, ldc, bias, accumulate, ws)
}

fn gemm_with<T: Tile, const MR: usize, const NR: usize, A: Elem, B: Elem, C: Elem>(
    a: Mat<A>,
    b: Mat<B>,
    c: &mut [C],
    ldc: usize,
    bias: Option<&[B]>,
    accumulate: bool,
    ws: &mut [f32],
) {
    let (m, k, n) = (a.rows, a.cols, b.cols);
    let (mb, nb, kb) = (block(m, BLOCK_M, MR), block(n, BLOCK_N, NR), block(k, BLOCK_K, 1));
    let (a_pack, ws) = ws.split_at_mut(mb * kb);
    let (b_pack, sums) = ws.split_at_mut(nb * kb);
    let (a_pack, b_pack, sums) = (Shared::new(a_pack), Shared::new(b_pack), Shared::new(sums));
    let c = Shared::new(c);
    let parallel = m * n * k.max(1) > SERIAL;

    for n0 in (0..n).step_by(nb) {
        let nw = nb.min(n - n0);
        for m0 in (0..m).step_by(mb) {
            let mw = mb.min(m - m0);
            let (task_m, task_n) = (block(mw, TASK_M, MR), block(nw, TASK_N, NR));
            let (tasks_m, tasks_n) = (mw.div_ceil(task_m), nw.div_ceil(task_n));
            // At least one round, so that K = 0 still writes C.
            for (round, k0) in (0..k.max(1)).step_by(kb).enumerate() {
                let kw = kb.min(k - k0);
                let (first, last) = (round == 0, k0 + kb >= k);

                // Where K is one block, the packed B serves every block of rows, and
                // the packed A every block of columns if it is the only one.
                let a_packed = kb >= k && mb >= m && n0 > 0;
                let a_groups = if a_packed { 0 } else { mw.div_ceil(PACK) };
                let b_packed = kb >= k && m0 > 0;
                let b_groups = if b_packed { 0 } else { nw.div_ceil(PACK) };
                for_each(a_groups + b_groups, parallel, |group| {
                    // SAFETY: each panel is one task's; reads are inside the views.
                    unsafe {
                        if group < a_groups {
                            let i = group * PACK;
                            let at = (m0 + i) * a.row_stride + k0 * a.col_stride;
                            let strides = (a.row_stride, a.col_stride);
                            let (to, from) = (a_pack.at(i * kw), a.data.as_ptr().add(at));
                            pack_panels::<MR, A>(to, from, PACK.min(mw - i), kw, strides);
                        } else {
                            let j = (group - a_groups) * PACK;
                            let at = k0 * b.row_stride + (n0 + j) * b.col_stride;
                            let strides = (b.col_stride, b.row_stride);
                            let (to, from) = (b_pack.at(j * kw), b.data.as_ptr().add(at));
                            pack_panels::<NR, B>(to, from, PACK.min(nw - j), kw, strides);
                        }
                    }
                });

                for_each(tasks_m * tasks_n, parallel, |task| {
                    let (ti, tj) = (task % tasks_m * task_m, task / tasks_m * task_n);
                    for j in (tj..(tj + task_n).min(nw)).step_by(NR) {
                        let cols = NR.min(nw - j);
                        let bias = bias.map(|bias| &bias[n0 + j..n0 + j + cols]);
                        for i in (ti..(ti + task_m).min(mw)).step_by(MR) {
                            let rows = MR.min(mw - i);
                            // SAFETY: tiles of C are disjoint; panels are `kw` long.
                            unsafe {
                                let (pa, pb) = (a_pack.at(i * kw), b_pack.at(j * kw));
                                let out = c.at((m0 + i) * ldc + n0 + j);
                                if C::IS_F32 {
                                    let out = out.cast::<f32>();
                                    let add = accumulate || !first;
                                    if rows == MR && cols == NR {
                                        T::packed_tile(kw, pa, pb, out, ldc, add);
                                    } else {
                                        let mut tile = [0.0f32; MAX_MR * MAX_NR];
                                        T::packed_tile(kw, pa, pb, tile.as_mut_ptr(), NR, false);
                                        store(&tile, NR, out, ldc, rows, cols, add, None::<&[f32]>);
                                    }
                                    if last && let Some(bias) = bias {
                                        add_bias(out, ldc, rows, bias);
                                    }
                                } else if first && last {
                                    let mut tile = [0.0f32; MAX_MR * MAX_NR];
                                    T::packed_tile(kw, pa, pb, tile.as_mut_ptr(), NR, false);
                                    store(&tile, NR, out, ldc, rows, cols, accumulate, bias);
                                } else {
                                    let tile = sums.at(i * nb + j * MR);
                                    T::packed_tile(kw, pa, pb, tile, NR, !first);
                                    if last {
                                        let tile = std::slice::from_raw_parts(tile, MR * NR);
                                        store(tile, NR, out, ldc, rows, cols, accumulate, bias);
                                    }
                                }
                            }
                        }
                    }
                });
            }
        }
    }
}

/// Writes a tile (rows `NR` apart) to C.
#[inline(always)]
unsafe fn store<C: Elem, B: Elem>(
    tile: &[f32],
    nr: usize,
    c: *mut C,
    ldc: usize,
    rows: usize,
    cols: usize,
    accumulate: bool,
    bias: Option<&[B]>,
) {
    for i in 0..rows {
        let tile = &tile[i * nr..i * nr + cols];
        let out = unsafe { std::slice::from_raw_parts_mut(c.add(i * ldc), cols) };
        for (j, (out, &x)) in out.iter_mut().zip(tile).enumerate() {
            let mut x = if accumulate { out.to_f32() + x } else { x };
            if let Some(bias) = bias {
                x += bias[j].to_f32();
            }
            *out = C::from_f32(x);
        }
    }
}

#[inline(always)]
unsafe fn add_bias<B: Elem>(c: *mut f32, ldc: usize, rows: usize, bias: &[B]) {
    for i in 0..rows {
        let out = unsafe { std::slice::from_raw_parts_mut(c.add(i * ldc), bias.len()) };
        for (out, b) in out.iter_mut().zip(bias) {
            *out += b.to_f32();
        }
    }
}

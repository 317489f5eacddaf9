//! The linear layer of decoding: a handful of rows, bound by the bandwidth with
//! which the weight streams in.

use crate::kernels::elem::Elem;
use crate::kernels::parallel::{Shared, for_each};
use crate::kernels::simd::{fma, simd_fn, sum_lanes};

/// Most rows of x that [`linear_skinny`] takes.
pub const SKINNY_ROWS: usize = 8;

// Bytes of the weight that one task reads.
const TASK_BYTES: usize = 128 * 1024;

/// `f32` elements of workspace of [`linear_skinny`].
pub fn linear_skinny_workspace(m: usize, k: usize) -> usize {
    m * k
}

/// y = x wᵀ, or y += x wᵀ where `accumulate`, plus `bias`: x (M, K) with M at most
/// [`SKINNY_ROWS`], w (N, K), y (M, N), bias (N), all without gaps.
///
/// The weight is read once, in place.
pub fn linear_skinny<X: Elem, W: Elem, Y: Elem>(
    x: &[X],
    w: &[W],
    bias: Option<&[W]>,
    y: &mut [Y],
    (m, n, k): (usize, usize, usize),
    accumulate: bool,
    ws: &mut [f32],
) {
    assert!(m <= SKINNY_ROWS, "{m} rows, at most {SKINNY_ROWS}");
    assert_eq!(x.len(), m * k, "x");
    assert_eq!(w.len(), n * k, "w");
    assert_eq!(y.len(), m * n, "y");
    if let Some(bias) = bias {
        assert_eq!(bias.len(), n, "bias");
    }
    let xs = &mut ws[..m * k];
    for (to, from) in xs.iter_mut().zip(x) {
        *to = from.to_f32();
    }
    let (xs, y) = (&*xs, Shared::new(y));
    let rows = (TASK_BYTES / (k * size_of::<W>()).max(1)).max(1).next_multiple_of(4);
    for_each(n.div_ceil(rows), m * n * k > 32 * 1024, |task| {
        let range = task * rows..n.min((task + 1) * rows);
        match m {
            0 => {}
            1 => columns::<_, _, 1, 4, 16>(xs, w, bias, y, n, k, range, accumulate),
            2 => columns::<_, _, 2, 2, 16>(xs, w, bias, y, n, k, range, accumulate),
            3 => columns::<_, _, 3, 2, 16>(xs, w, bias, y, n, k, range, accumulate),
            4 => columns::<_, _, 4, 2, 8>(xs, w, bias, y, n, k, range, accumulate),
            5 => columns::<_, _, 5, 2, 8>(xs, w, bias, y, n, k, range, accumulate),
            6 => columns::<_, _, 6, 1, 16>(xs, w, bias, y, n, k, range, accumulate),
            7 => columns::<_, _, 7, 1, 8>(xs, w, bias, y, n, k, range, accumulate),
            _ => columns::<_, _, 8, 1, 8>(xs, w, bias, y, n, k, range, accumulate),
        }
    });
}

/// The columns `range` of y, `R` rows of w at a time.
fn columns<W: Elem, Y: Elem, const M: usize, const R: usize, const L: usize>(
    xs: &[f32],
    w: &[W],
    bias: Option<&[W]>,
    y: Shared<Y>,
    n: usize,
    k: usize,
    range: std::ops::Range<usize>,
    accumulate: bool,
) {
    let mut j = range.start;
    while j < range.end {
        let rows = R.min(range.end - j);
        let mut out = [[0.0; R]; M];
        if rows == R {
            out = dots::<W, M, R, L>(xs, &w[j * k..(j + R) * k], k, k);
        } else {
            for r in 0..rows {
                let one = dots::<W, M, 1, L>(xs, &w[(j + r) * k..(j + r + 1) * k], k, k);
                for i in 0..M {
                    out[i][r] = one[i][0];
                }
            }
        }
        for (i, out) in out.iter().enumerate() {
            // SAFETY: this task owns these columns.
            let y = unsafe { y.slice(i * n + j, rows) };
            for (r, y) in y.iter_mut().enumerate() {
                let mut sum = out[r];
                if accumulate {
                    sum += y.to_f32();
                }
                if let Some(bias) = bias {
                    sum += bias[j + r].to_f32();
                }
                *y = Y::from_f32(sum);
            }
        }
        j += rows;
    }
}

simd_fn! {
    /// Dot products of `M` rows of xs (`k` apart) with `R` rows of w (`stride` apart).
    pub fn dots<W: Elem; const M: usize, const R: usize, const L: usize>(
        xs: &[f32],
        w: &[W],
        stride: usize,
        k: usize,
    ) -> [[f32; R]; M] {
        let mut acc = [[[0.0f32; L]; R]; M];
        let whole = k / L * L;
        for p in (0..whole).step_by(L) {
            for r in 0..R {
                let w: &[W; L] = w[r * stride + p..][..L].try_into().unwrap();
                for i in 0..M {
                    let x: &[f32; L] = xs[i * k + p..][..L].try_into().unwrap();
                    for l in 0..L {
                        acc[i][r][l] = fma::<FMA>(w[l].to_f32(), x[l], acc[i][r][l]);
                    }
                }
            }
        }
        let mut out = [[0.0; R]; M];
        for i in 0..M {
            for r in 0..R {
                let mut sum = sum_lanes(acc[i][r]);
                for p in whole..k {
                    sum = fma::<FMA>(w[r * stride + p].to_f32(), xs[i * k + p], sum);
                }
                out[i][r] = sum;
            }
        }
        out
    }
}

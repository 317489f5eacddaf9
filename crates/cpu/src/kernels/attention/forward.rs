//! The forward pass, over fused rows or over a cache.

use super::{AttentionShape, BLOCK_K, BLOCK_Q, KeysValues, MAX_MR, MAX_NR, Mask};
use super::{copy_rows, prefetch, spread};
use crate::kernels::elem::Elem;
#[cfg(target_arch = "x86_64")]
use crate::kernels::gemm::{Avx2, Avx512};
use crate::kernels::gemm::{Portable, Tile, pack_panel, pack_panels, tile_column, unpack_panel};
use crate::kernels::parallel::{Shared, for_each, thread_index, threads};
#[cfg(target_arch = "x86_64")]
use crate::kernels::simd::{Isa, isa};
use crate::kernels::simd::{exp, simd_fn};

// Floats of queries and outputs that a task keeps in the second-level cache.
const TASK_FLOATS: usize = 48 * 1024;

/// Query heads of one task: as many of a group as fit the cache, in equal shares.
fn heads_per_task(shape: &AttentionShape) -> usize {
    let fit = (TASK_FLOATS / (2 * BLOCK_Q * shape.head_dim.max(1))).max(1);
    let group = shape.group().max(1);
    group.div_ceil(group.div_ceil(fit))
}

/// `f32` elements that one thread needs.
fn per_thread(shape: &AttentionShape) -> usize {
    let (d, whole) = (shape.head_dim, shape.head_dim.next_multiple_of(MAX_MR));
    let lanes = BLOCK_Q * heads_per_task(shape);
    lanes * (d + whole + 2) + BLOCK_K * (MAX_NR + spread(d) + whole)
}

/// `f32` elements of workspace of [`attention_forward`] on a pool of `threads`.
pub fn attention_forward_workspace(shape: &AttentionShape, threads: usize) -> usize {
    per_thread(shape) * threads
}

/// out = softmax(scale q kᵀ, masked) v.
///
/// qkv (B, T, (H + 2 Hkv) D) after the rotary embedding, out (B, T, H D), lse
/// (B, T, H) receives the logarithm of the sum of exponentials for the backward
/// pass, doc_start (B, T) is the position in its row at which a token's document
/// starts: it sees the keys from there (and within the window) to itself.
pub fn attention_forward<X: Elem, Y: Elem>(
    qkv: &[X],
    out: &mut [Y],
    lse: &mut [f32],
    doc_start: &[i32],
    shape: &AttentionShape,
    ws: &mut [f32],
) {
    let t = shape.tokens;
    assert_eq!(lse.len(), shape.rows() * shape.heads, "lse");
    assert_eq!(doc_start.len(), shape.rows(), "doc_start");
    let visible = |b: usize, i: usize| shape.visible(i, doc_start[b * t + i].max(0) as usize);
    flash(qkv, KeysValues::fused(qkv, shape), out, Some(lse), shape, visible, ws);
}

/// The forward pass over any keys: query i of batch row b sees the keys
/// `visible(b, i)`.
pub(super) fn flash<X: Elem, C: Elem, Y: Elem>(
    qkv: &[X],
    kv: KeysValues<C>,
    out: &mut [Y],
    lse: Option<&mut [f32]>,
    shape: &AttentionShape,
    visible: impl Fn(usize, usize) -> (usize, usize) + Send + Sync,
    ws: &mut [f32],
) {
    shape.check();
    assert_eq!(qkv.len(), shape.rows() * shape.qkv_width(), "qkv");
    assert_eq!(out.len(), shape.rows() * shape.heads * shape.head_dim, "out");
    #[cfg(target_arch = "x86_64")]
    match isa() {
        Isa::Avx512 => {
            return tasks::<Avx512, 12, 32, _, _, _>(qkv, kv, out, lse, shape, visible, ws);
        }
        Isa::Avx2 => return tasks::<Avx2, 6, 16, _, _, _>(qkv, kv, out, lse, shape, visible, ws),
        Isa::Portable => {}
    }
    tasks::<Portable, 6, 16, _, _, _>(qkv, kv, out, lse, shape, visible, ws)
}

fn tasks<K: Tile, const MR: usize, const NR: usize, X: Elem, C: Elem, Y: Elem>(
    qkv: &[X],
    kv: KeysValues<C>,
    out: &mut [Y],
    lse: Option<&mut [f32]>,
    shape: &AttentionShape,
    visible: impl Fn(usize, usize) -> (usize, usize) + Send + Sync,
    ws: &mut [f32],
) {
    let AttentionShape { batch, tokens, heads, kv_heads, head_dim: d, scale, .. } = *shape;
    let (width, group, share) = (shape.qkv_width(), shape.group(), heads_per_task(shape));
    if shape.rows() * heads * d == 0 {
        return;
    }
    // Outputs and values are padded to whole tiles of MR dimensions.
    let (whole, ld) = (d.next_multiple_of(MR), spread(d));
    let slot = per_thread(shape);
    assert!(ws.len() >= slot * threads(), "workspace of {} floats", ws.len());
    let (out, lse) = (Shared::new(out), lse.map(Shared::new));
    let ws = Shared::new(ws);
    let (blocks, shares) = (tokens.div_ceil(BLOCK_Q), group.div_ceil(share));
    let count = batch * kv_heads * shares * blocks;
    for_each(count, shape.rows() * heads * d > 4096, |task| {
        // The last block of queries sees the most keys: start with it.
        let block = blocks - 1 - task / (batch * kv_heads * shares);
        let task = task % (batch * kv_heads * shares);
        let (b, task) = (task / (kv_heads * shares), task % (kv_heads * shares));
        let (kv_head, first_head) = (task / shares, task % shares * share);
        let heads_here = share.min(group - first_head);
        let t0 = block * BLOCK_Q;
        let queries = BLOCK_Q.min(tokens - t0);
        let strips = queries.div_ceil(NR);

        // SAFETY: the slot is this thread's, and tasks do not nest.
        let ws = unsafe { ws.slice(thread_index() * slot, slot) };
        let (q_t, ws) = ws.split_at_mut(share * BLOCK_Q * d);
        let (o_t, ws) = ws.split_at_mut(share * BLOCK_Q * whole);
        let (max, ws) = ws.split_at_mut(share * BLOCK_Q);
        let (sum, ws) = ws.split_at_mut(share * BLOCK_Q);
        let (scores, ws) = ws.split_at_mut(BLOCK_K * MAX_NR);
        let (k_tile, v_panels) = ws.split_at_mut(BLOCK_K * ld);

        let head = |h: usize| kv_head * group + first_head + h;
        for h in 0..heads_here {
            for s in 0..strips {
                let at = h * strips + s;
                let n = NR.min(queries - s * NR);
                let from = &qkv[(b * tokens + t0 + s * NR) * width + head(h) * d..];
                let to = &mut q_t[at * d * NR..(at + 1) * d * NR];
                assert!(from.len() >= (n - 1) * width + d);
                // SAFETY: asserted.
                unsafe {
                    pack_panel::<NR, X>(to.as_mut_ptr(), from.as_ptr(), n, d, (width, 1));
                }
                super::super::elementwise::scale_slice(to, scale);
            }
        }
        o_t.fill(0.0);
        max.fill(f32::NEG_INFINITY);
        sum.fill(0.0);

        let mut masks = [Mask::<NR>::new(0, |_| (0, 0)); BLOCK_Q / 16];
        let mut any = (usize::MAX, 0);
        for (s, mask) in masks.iter_mut().enumerate().take(strips) {
            *mask = Mask::new(NR.min(queries - s * NR), |i| visible(b, t0 + s * NR + i));
            any = (any.0.min(mask.any.0), any.1.max(mask.any.1));
        }
        // Blocks of keys start at multiples of their size, whoever looks at them.
        for key in (any.0 / BLOCK_K * BLOCK_K..any.1).step_by(BLOCK_K) {
            let n = BLOCK_K.min(any.1 - key);
            let first = any.0.saturating_sub(key);
            let at = b * kv.batch_stride + (key + first) * kv.row_stride + kv_head * d;
            let rows = n - first;
            copy_rows(&kv.keys[at..], kv.row_stride, rows, d, ld, 1.0, k_tile);
            // The product with the values reads them down the keys: in panels, so
            // that it stays within a few cache lines.
            let v = &kv.values[at..];
            assert!(v.len() >= (rows - 1) * kv.row_stride + d && v_panels.len() >= rows * whole);
            // SAFETY: asserted.
            unsafe {
                let to = v_panels.as_mut_ptr();
                pack_panels::<MR, C>(to, v.as_ptr(), d, rows, (1, kv.row_stride));
            }
            let next = at + rows * kv.row_stride;
            let next_rows = BLOCK_K.min(any.1 - (key + n));
            let (mut strip, all_strips) = (0, heads_here * strips);
            for h in 0..heads_here {
                for (s, mask) in masks.iter().enumerate().take(strips) {
                    // The next block comes in while this one is multiplied.
                    let part = |strip: usize| strip * next_rows / all_strips;
                    for j in part(strip)..part(strip + 1) {
                        let row = next + j * kv.row_stride;
                        prefetch(&kv.keys[row..row + d]);
                        prefetch(&kv.values[row..row + d]);
                    }
                    strip += 1;

                    let (r0, r1) = mask.rows(key, n);
                    if r0 == r1 {
                        continue;
                    }
                    let (at, rows_here) = (h * strips + s, r1 - r0);
                    let q_t = &q_t[at * d * NR..(at + 1) * d * NR];
                    let o_t = &mut o_t[at * whole * NR..(at + 1) * whole * NR];
                    let p = &mut scores[..rows_here * NR];
                    // SAFETY: rows r0..r1 of the block are filled, from `first` on.
                    unsafe {
                        let k = k_tile.as_ptr().add((r0 - first) * ld);
                        let (q, p) = (q_t.as_ptr(), p.as_mut_ptr());
                        tile_column::<K>(rows_here, d, k, (ld, 1), q, NR, p, NR, false);
                    }
                    let (first_key, end) = (key + r0, key + r1);
                    if first_key < mask.all.0 {
                        apply_mask::<NR>(p, first_key as i32, &mask.lo, &mask.hi);
                    } else if end > mask.all.1 {
                        // Only the keys near the queries are cut.
                        let cut = mask.all.1.max(first_key);
                        let p = &mut p[(cut - first_key) * NR..];
                        apply_mask::<NR>(p, cut as i32, &mask.lo, &mask.hi);
                    }
                    let lanes = at * NR..(at + 1) * NR;
                    let (max, sum) = (&mut max[lanes.clone()], &mut sum[lanes]);
                    update_softmax::<NR>(p, max, sum, o_t);
                    for i in (0..whole).step_by(MR) {
                        // SAFETY: a panel is MR wide and `rows` long.
                        unsafe {
                            let v = v_panels.as_ptr().add(i * rows + (r0 - first) * MR);
                            let o = o_t[i * NR..(i + MR) * NR].as_mut_ptr();
                            K::packed_tile(rows_here, v, p.as_ptr(), o, NR, true);
                        }
                    }
                }
            }
        }

        for h in 0..heads_here {
            for s in 0..strips {
                let (at, n) = (h * strips + s, NR.min(queries - s * NR));
                let (max, sum) = (&max[at * NR..][..n], &sum[at * NR..][..n]);
                let mut inverse = [0.0; NR];
                for (inverse, sum) in inverse.iter_mut().zip(sum) {
                    *inverse = 1.0 / sum;
                }
                let row = (b * tokens + t0 + s * NR) * heads + head(h);
                // SAFETY: one task a query and head.
                unsafe {
                    let o_t = o_t[at * whole * NR..(at + 1) * whole * NR].as_ptr();
                    unpack_panel::<NR, Y>(o_t, out.at(row * d), n, d, heads * d, &inverse);
                    if let Some(lse) = lse {
                        for i in 0..n {
                            *lse.at(row + i * heads) = max[i] + sum[i].ln();
                        }
                    }
                }
            }
        }
    });
}

simd_fn! {
    /// Scores that a lane does not see become minus infinity.
    fn apply_mask<; const NR: usize>(
        scores: &mut [f32],
        first_key: i32,
        lo: &[i32; NR],
        hi: &[i32; NR],
    ) {
        let (rows, _) = scores.as_chunks_mut::<NR>();
        for (r, row) in rows.iter_mut().enumerate() {
            let key = first_key + r as i32;
            for l in 0..NR {
                let seen = (lo[l] <= key) & (key < hi[l]);
                row[l] = if seen { row[l] } else { f32::NEG_INFINITY };
            }
        }
    }
}

simd_fn! {
    /// Replaces the scores of a block by e^(score - maximum so far) and corrects
    /// what was summed under the old maximum.
    fn update_softmax<; const NR: usize>(
        scores: &mut [f32],
        max: &mut [f32],
        sum: &mut [f32],
        o_t: &mut [f32],
    ) {
        let (rows, _) = scores.as_chunks_mut::<NR>();
        let max: &mut [f32; NR] = max.try_into().unwrap();
        let sum: &mut [f32; NR] = sum.try_into().unwrap();
        let mut top = *max;
        for row in rows.iter() {
            for l in 0..NR {
                top[l] = if row[l] > top[l] { row[l] } else { top[l] };
            }
        }
        let mut base = [0.0f32; NR];
        let mut factor = [0.0f32; NR];
        for l in 0..NR {
            // A lane that has seen nothing keeps minus infinity and sums zeros.
            base[l] = if top[l] == f32::NEG_INFINITY { 0.0 } else { top[l] };
            factor[l] = exp::<FMA>(max[l] - base[l]);
        }
        let mut total = [0.0f32; NR];
        for row in rows.iter_mut() {
            for l in 0..NR {
                row[l] = exp::<FMA>(row[l] - base[l]);
            }
            for l in 0..NR {
                total[l] += row[l];
            }
        }
        for l in 0..NR {
            sum[l] = sum[l] * factor[l] + total[l];
        }
        if factor.iter().any(|f| *f != 1.0) {
            for row in o_t.as_chunks_mut::<NR>().0 {
                for l in 0..NR {
                    row[l] *= factor[l];
                }
            }
        }
        *max = top;
    }
}

//! The backward pass: FlashAttention-2's five products a block, summed in one
//! order whatever the number of threads.

use super::{AttentionShape, BLOCK_K, BLOCK_Q, KeysValues, MAX_MR, MAX_NR, Mask};
use super::{copy_rows, spread};
use crate::kernels::elem::Elem;
#[cfg(target_arch = "x86_64")]
use crate::kernels::gemm::{Avx2, Avx512};
use crate::kernels::gemm::{
    Portable, Tile, pack_panel, pack_panels, tile_column, tile_rows, unpack_panel,
};
use crate::kernels::parallel::{Shared, for_each, thread_index, threads};
#[cfg(target_arch = "x86_64")]
use crate::kernels::simd::{Isa, isa};
use crate::kernels::simd::{LANES, exp, fma, simd_fn, sum_lanes};

// Keys of a task that computes only d_k and d_v: enough to share the packing of
// the queries.
const CHUNK_K: usize = 4 * BLOCK_K;
// Queries of a task that computes only d_q.
const CHUNK_Q: usize = 4 * BLOCK_Q;

/// How the work is cut. Both ways add the same numbers in the same order.
#[derive(Clone, Copy, PartialEq)]
enum Pass {
    /// One task a batch row and key head: five products.
    Whole,
    /// d_q by blocks of queries, then d_k and d_v by chunks of keys: seven
    /// products, but as many tasks as the sequence is long.
    Queries,
    Keys,
}

fn one_pass(shape: &AttentionShape, threads: usize) -> bool {
    let tasks = shape.batch * shape.kv_heads;
    // 5 units of work a task in rounds of `threads`, or 7 evenly shared.
    tasks.div_ceil(threads.max(1)) * 5 * threads <= tasks * 7
}

fn padded(d: usize) -> usize {
    d.next_multiple_of(MAX_NR)
}

// Distance between the rows of a block of scores: see `spread`.
const SCORES: usize = BLOCK_Q + 16;

/// `f32` elements that one thread needs: keys and values, their gradients, the
/// block of queries in both orders, d_q, two blocks of scores, lse and delta.
fn per_thread(shape: &AttentionShape, threads: usize) -> usize {
    let (t, d, wide) = (shape.tokens, shape.head_dim, padded(shape.head_dim));
    let whole = one_pass(shape, threads);
    let sums = if whole { t } else { t.min(CHUNK_K) };
    let kv = 2 * t * spread(d) + 2 * sums * spread(wide);
    let whole = d.next_multiple_of(MAX_MR);
    kv + t * whole + BLOCK_Q * (2 * d + whole + 2 * wide + 2) + 2 * BLOCK_K * SCORES
}

/// `f32` elements of workspace of [`attention_backward`] on a pool of `threads`.
pub fn attention_backward_workspace(shape: &AttentionShape, threads: usize) -> usize {
    per_thread(shape, threads) * threads
}

/// Gradient of [`super::attention_forward`]: d_qkv (B, T, (H + 2 Hkv) D),
/// overwritten, from d_out (B, T, H D) and what the forward pass read and wrote.
pub fn attention_backward<X: Elem, Y: Elem, G: Elem>(
    qkv: &[X],
    out: &[Y],
    d_out: &[Y],
    lse: &[f32],
    doc_start: &[i32],
    d_qkv: &mut [G],
    shape: &AttentionShape,
    ws: &mut [f32],
) {
    shape.check();
    let (rows, wide) = (shape.rows(), shape.heads * shape.head_dim);
    assert_eq!(qkv.len(), rows * shape.qkv_width(), "qkv");
    assert_eq!(d_qkv.len(), qkv.len(), "d_qkv");
    assert_eq!(out.len(), rows * wide, "out");
    assert_eq!(d_out.len(), rows * wide, "d_out");
    assert_eq!(lse.len(), rows * shape.heads, "lse");
    assert_eq!(doc_start.len(), rows, "doc_start");
    if rows * wide == 0 {
        return;
    }
    let slot = per_thread(shape, threads());
    assert!(ws.len() >= slot * threads(), "workspace of {} floats", ws.len());
    let job = Job {
        qkv,
        out,
        d_out,
        lse,
        doc_start,
        d_qkv: Shared::new(d_qkv),
        shape: *shape,
        ws: Shared::new(ws),
        slot,
    };
    #[cfg(target_arch = "x86_64")]
    match isa() {
        Isa::Avx512 => return job.run::<Avx512, 12, 32>(),
        Isa::Avx2 => return job.run::<Avx2, 6, 16>(),
        Isa::Portable => {}
    }
    job.run::<Portable, 6, 16>()
}

struct Job<'a, X, Y, G> {
    qkv: &'a [X],
    out: &'a [Y],
    d_out: &'a [Y],
    lse: &'a [f32],
    doc_start: &'a [i32],
    d_qkv: Shared<G>,
    shape: AttentionShape,
    ws: Shared<f32>,
    slot: usize,
}

impl<X: Elem, Y: Elem, G: Elem> Job<'_, X, Y, G> {
    fn run<K: Tile, const MR: usize, const NR: usize>(&self) {
        let AttentionShape { batch, tokens, kv_heads, .. } = self.shape;
        let pairs = batch * kv_heads;
        let pair = |task: usize| (task % pairs / kv_heads, task % kv_heads);
        if one_pass(&self.shape, threads()) {
            for_each(pairs, true, |task| {
                self.task::<K, MR, NR>(Pass::Whole, pair(task), (0, tokens), (0, tokens));
            });
        } else {
            // The last queries see the most keys, the first keys are seen most.
            let chunks = tokens.div_ceil(CHUNK_Q);
            for_each(pairs * chunks, true, |task| {
                let t = (chunks - 1 - task / pairs) * CHUNK_Q;
                let queries = (t, tokens.min(t + CHUNK_Q));
                self.task::<K, MR, NR>(Pass::Queries, pair(task), queries, (0, tokens));
            });
            for_each(pairs * tokens.div_ceil(CHUNK_K), true, |task| {
                let key = task / pairs * CHUNK_K;
                let keys = (key, tokens.min(key + CHUNK_K));
                self.task::<K, MR, NR>(Pass::Keys, pair(task), (0, tokens), keys);
            });
        }
    }

    /// The gradients of `pass` for the queries and keys of two ranges (multiples
    /// of their blocks) of one batch row and key head.
    fn task<K: Tile, const MR: usize, const NR: usize>(
        &self,
        pass: Pass,
        (b, kv_head): (usize, usize),
        (t_begin, t_end): (usize, usize),
        (key_begin, key_end): (usize, usize),
    ) {
        let AttentionShape { tokens, heads, kv_heads, head_dim: d, scale, .. } = self.shape;
        let (width, group, wide) = (self.shape.qkv_width(), self.shape.group(), padded(d));
        let visible =
            |t: usize| self.shape.visible(t, self.doc_start[b * tokens + t].max(0) as usize);
        let (whole, ld, ldw) = (d.next_multiple_of(MR), spread(d), spread(wide));
        // No query sees a key after itself.
        let key_end = if pass == Pass::Queries { key_end.min(t_end) } else { key_end };
        let n_keys = key_end - key_begin;

        // SAFETY: the slot is this thread's, and tasks do not nest.
        let ws = unsafe { self.ws.slice(thread_index() * self.slot, self.slot) };
        let (k, ws) = ws.split_at_mut(n_keys * ld);
        let (v, ws) = ws.split_at_mut(n_keys * ld);
        let n_sums = if pass == Pass::Queries { 0 } else { n_keys * ldw };
        let n_panels = if pass == Pass::Keys { 0 } else { n_keys * whole };
        let (k_panels, ws) = ws.split_at_mut(n_panels);
        let (d_k, ws) = ws.split_at_mut(n_sums);
        let (d_v, ws) = ws.split_at_mut(n_sums);
        let (q_t, ws) = ws.split_at_mut(BLOCK_Q * d);
        let (d_out_t, ws) = ws.split_at_mut(BLOCK_Q * d);
        let (d_q_t, ws) = ws.split_at_mut(BLOCK_Q * whole);
        let (q, ws) = ws.split_at_mut(BLOCK_Q * wide);
        let (d_out, ws) = ws.split_at_mut(BLOCK_Q * wide);
        let (p, ws) = ws.split_at_mut(BLOCK_K * SCORES);
        let (d_s, ws) = ws.split_at_mut(BLOCK_K * SCORES);
        let (lse, ws) = ws.split_at_mut(BLOCK_Q);
        let (delta, _) = ws.split_at_mut(BLOCK_Q);

        let kv = KeysValues::fused(self.qkv, &self.shape);
        let at = b * kv.batch_stride + key_begin * kv.row_stride + kv_head * d;
        copy_rows(&kv.keys[at..], width, n_keys, d, ld, 1.0, k);
        copy_rows(&kv.values[at..], width, n_keys, d, ld, 1.0, v);
        if pass != Pass::Keys {
            // The gradient of the queries reads the keys down a block.
            for key in (0..n_keys).step_by(BLOCK_K) {
                let rows = BLOCK_K.min(n_keys - key);
                let to = &mut k_panels[key * whole..(key + rows) * whole];
                let from = &k[key * ld..(key + rows) * ld];
                // SAFETY: rows of d floats, and panels of MR of them.
                unsafe {
                    pack_panels::<MR, f32>(to.as_mut_ptr(), from.as_ptr(), d, rows, (1, ld));
                }
            }
        }
        d_k.fill(0.0);
        d_v.fill(0.0);

        for head in kv_head * group..(kv_head + 1) * group {
            for t0 in (t_begin..t_end).step_by(BLOCK_Q) {
                let n = BLOCK_Q.min(t_end - t0);
                let strips = n.div_ceil(NR);
                let mut masks = [Mask::<NR>::new(0, |_| (0, 0)); BLOCK_Q / 16];
                let mut any = (usize::MAX, 0);
                for (s, mask) in masks.iter_mut().enumerate().take(strips) {
                    *mask = Mask::new(NR.min(n - s * NR), |i| visible(t0 + s * NR + i));
                    any = (any.0.min(mask.any.0), any.1.max(mask.any.1));
                }
                let any = (any.0.max(key_begin), any.1.min(key_end));
                if any.0 >= any.1 {
                    continue;
                }

                let row = b * tokens + t0;
                let q_rows = &self.qkv[row * width + head * d..];
                let (stride, from) = (heads * d, (row * heads + head) * d);
                let d_out_rows = &self.d_out[from..];
                for s in 0..strips {
                    let lanes = NR.min(n - s * NR);
                    let (q, g) = (&q_rows[s * NR * width..], &d_out_rows[s * NR * stride..]);
                    assert!(q.len() >= (lanes - 1) * width + d);
                    assert!(g.len() >= (lanes - 1) * stride + d);
                    let to = s * NR * d;
                    // SAFETY: asserted.
                    unsafe {
                        let q_t = q_t[to..to + NR * d].as_mut_ptr();
                        pack_panel::<NR, X>(q_t, q.as_ptr(), lanes, d, (width, 1));
                        let g_t = d_out_t[to..to + NR * d].as_mut_ptr();
                        pack_panel::<NR, Y>(g_t, g.as_ptr(), lanes, d, (stride, 1));
                    }
                }
                super::super::elementwise::scale_slice(&mut q_t[..strips * NR * d], scale);
                if pass != Pass::Queries {
                    copy_panels::<X, NR>(q_rows, width, n, d, scale, q);
                    copy_panels::<Y, NR>(d_out_rows, stride, n, d, 1.0, d_out);
                }
                lse.fill(0.0);
                delta.fill(0.0);
                for i in 0..n {
                    let at = from + i * stride;
                    lse[i] = self.lse[(row + i) * heads + head];
                    delta[i] = dot(&self.d_out[at..at + d], &self.out[at..at + d]);
                }
                d_q_t.fill(0.0);

                for key in (any.0 / BLOCK_K * BLOCK_K..any.1).step_by(BLOCK_K) {
                    let in_block = BLOCK_K.min(key_end - key);
                    // Rows of the block that any query of these sees.
                    let first = any.0.saturating_sub(key);
                    let last = in_block.min(any.1 - key);
                    let tile = (key - key_begin) * ld;
                    for (s, mask) in masks.iter().enumerate().take(strips) {
                        let (r0, r1) = mask.rows(key, in_block);
                        let column = s * NR;
                        for r in (first..r0.max(first)).chain(r1.max(r0.max(first))..last) {
                            p[r * SCORES + column..][..NR].fill(0.0);
                            d_s[r * SCORES + column..][..NR].fill(0.0);
                        }
                        if r0 >= r1 {
                            continue;
                        }
                        let (rows, at) = (r1 - r0, r0 * SCORES + column);
                        let strip = column * d..(column + NR) * d;
                        // SAFETY: rows r0..r1 lie inside k, v and the blocks.
                        unsafe {
                            let (p, d_s) = (p.as_mut_ptr().add(at), d_s.as_mut_ptr().add(at));
                            let q = q_t[strip.clone()].as_ptr();
                            let k = k.as_ptr().add(tile + r0 * ld);
                            tile_column::<K>(rows, d, k, (ld, 1), q, NR, p, SCORES, false);
                            let g = d_out_t[strip.clone()].as_ptr();
                            let v = v.as_ptr().add(tile + r0 * ld);
                            tile_column::<K>(rows, d, v, (ld, 1), g, NR, d_s, SCORES, false);
                        }
                        let lanes = column..column + NR;
                        let cut = mask.cuts(key + r0, key + r1);
                        let (lo, hi) =
                            if cut { (mask.lo, mask.hi) } else { ([0; NR], [i32::MAX; NR]) };
                        score_gradient::<NR>(
                            &mut p[at..],
                            &mut d_s[at..],
                            rows,
                            (key + r0) as i32,
                            &lo,
                            &hi,
                            &lse[lanes.clone()],
                            &delta[lanes],
                        );
                        if pass != Pass::Keys {
                            let panels = &k_panels[(key - key_begin) * whole..];
                            let d_q = &mut d_q_t[column * whole..(column + NR) * whole];
                            for i in (0..whole).step_by(MR) {
                                // SAFETY: a panel is MR wide and the block long.
                                unsafe {
                                    let k = panels.as_ptr().add(i * in_block + r0 * MR);
                                    let d_s = d_s.as_ptr().add(at);
                                    let d_q = d_q[i * NR..(i + MR) * NR].as_mut_ptr();
                                    let a = (1, MR);
                                    K::tile::<MR>(rows, k, a, d_s, SCORES, d_q, NR, true);
                                }
                            }
                        }
                    }
                    if pass != Pass::Queries {
                        for j in (0..d).step_by(NR) {
                            for r in (first..last).step_by(MR) {
                                let rows = MR.min(last - r);
                                // The queries before these keys do not see them.
                                let i = (key + r).saturating_sub(t0);
                                let from = r * SCORES + i;
                                let panel = (j * BLOCK_Q + i * NR)..(j + NR) * BLOCK_Q;
                                let to = (key - key_begin + r) * ldw + j;
                                for (a, b, c) in [
                                    (&p[from..], &d_out[panel.clone()], &mut d_v[to..]),
                                    (&d_s[from..], &q[panel.clone()], &mut d_k[to..]),
                                ] {
                                    let (a, b, c) = (a.as_ptr(), b.as_ptr(), c.as_mut_ptr());
                                    let strides = (SCORES, 1);
                                    // SAFETY: `wide` is a multiple of NR, so that the
                                    // columns beyond d are there too.
                                    unsafe {
                                        tile_rows::<K>(
                                            rows,
                                            n - i,
                                            a,
                                            strides,
                                            b,
                                            NR,
                                            c,
                                            ldw,
                                            true,
                                        );
                                    }
                                }
                            }
                        }
                    }
                }

                if pass != Pass::Keys {
                    for s in 0..strips {
                        let lanes = NR.min(n - s * NR);
                        let to = (row + s * NR) * width + head * d;
                        // SAFETY: one task a query and head.
                        unsafe {
                            let from = d_q_t[s * NR * whole..(s + 1) * NR * whole].as_ptr();
                            let to = self.d_qkv.at(to);
                            unpack_panel::<NR, G>(from, to, lanes, d, width, &[scale; NR]);
                        }
                    }
                }
            }
        }

        if pass != Pass::Queries {
            for j in 0..n_keys {
                let row = (b * tokens + key_begin + j) * width + (heads + kv_head) * d;
                // SAFETY: one task a key and head.
                let (to_k, to_v) =
                    unsafe { (self.d_qkv.slice(row, d), self.d_qkv.slice(row + kv_heads * d, d)) };
                for i in 0..d {
                    to_k[i] = G::from_f32(d_k[j * ldw + i]);
                    to_v[i] = G::from_f32(d_v[j * ldw + i]);
                }
            }
        }
    }
}

simd_fn! {
    /// Turns scores into probabilities, and the gradient of the probabilities into
    /// that of the scores: p = e^(s - lse), d_s = p (d_p - delta), both zero where a
    /// lane does not see the key.
    fn score_gradient<; const NR: usize>(
        p: &mut [f32],
        d_s: &mut [f32],
        rows: usize,
        first_key: i32,
        lo: &[i32; NR],
        hi: &[i32; NR],
        lse: &[f32],
        delta: &[f32],
    ) {
        let lse: &[f32; NR] = lse.try_into().unwrap();
        let delta: &[f32; NR] = delta.try_into().unwrap();
        for r in 0..rows {
            let p: &mut [f32; NR] = (&mut p[r * SCORES..r * SCORES + NR]).try_into().unwrap();
            let d_s: &mut [f32; NR] =
                (&mut d_s[r * SCORES..r * SCORES + NR]).try_into().unwrap();
            let key = first_key + r as i32;
            for l in 0..NR {
                let seen = (lo[l] <= key) & (key < hi[l]);
                let e = exp::<FMA>(p[l] - lse[l]);
                let e = if seen { e } else { 0.0 };
                p[l] = e;
                d_s[l] = e * (d_s[l] - delta[l]);
            }
        }
    }
}

simd_fn! {
    /// Copies `n` rows of `d` elements, `stride` apart, times `factor`, to panels
    /// (BLOCK_Q, NR) of their columns; the columns beyond d become zero.
    fn copy_panels<T: Elem; const NR: usize>(
        from: &[T],
        stride: usize,
        n: usize,
        d: usize,
        factor: f32,
        to: &mut [f32],
    ) {
        for j in (0..d).step_by(NR) {
            let columns = NR.min(d - j);
            let panel = &mut to[j * BLOCK_Q..(j + NR) * BLOCK_Q];
            for (i, to) in panel.as_chunks_mut::<NR>().0.iter_mut().enumerate().take(n) {
                let from = &from[i * stride + j..][..columns];
                if let Ok(from) = <&[T; NR]>::try_from(from) {
                    for l in 0..NR {
                        to[l] = from[l].to_f32() * factor;
                    }
                } else {
                    to.fill(0.0);
                    for l in 0..columns {
                        to[l] = from[l].to_f32() * factor;
                    }
                }
            }
        }
    }
}

simd_fn! {
    fn dot<A: Elem, B: Elem>(a: &[A], b: &[B]) -> f32 {
        let mut acc = [0.0f32; LANES];
        let whole = a.len() / LANES * LANES;
        for i in (0..whole).step_by(LANES) {
            for l in 0..LANES {
                acc[l] = fma::<FMA>(a[i + l].to_f32(), b[i + l].to_f32(), acc[l]);
            }
        }
        let mut sum = sum_lanes(acc);
        for i in whole..a.len() {
            sum += a[i].to_f32() * b[i].to_f32();
        }
        sum
    }
}

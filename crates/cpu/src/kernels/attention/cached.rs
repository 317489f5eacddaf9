//! Attention over a key and value cache: prefill and decoding.

use super::forward::flash;
use super::{AttentionShape, KeysValues, MAX_HEAD_DIM};
use crate::kernels::elem::Elem;
use crate::kernels::gemm::dots;
use crate::kernels::parallel::{Shared, for_each};
use crate::kernels::simd::{LANES, exp, fma, simd_fn, sum_lanes};

// Up to this many new tokens each one's keys stream by once, as dot products.
const STREAMED_TOKENS: usize = 4;
// Keys of one task of decoding: fixed, so that the sum's order is.
const CHUNK: usize = 512;
// Query heads that a task holds at a time.
const HEADS: usize = 8;

/// `f32` elements of workspace of [`attention_cached`] with a cache of `capacity`
/// positions, on a pool of `threads`.
pub fn attention_cached_workspace(
    shape: &AttentionShape,
    capacity: usize,
    threads: usize,
) -> usize {
    if shape.tokens > STREAMED_TOKENS {
        return super::attention_forward_workspace(shape, threads);
    }
    shape.rows() * shape.heads * capacity.div_ceil(CHUNK) * (shape.head_dim + 2)
}

/// Appends the keys and values of qkv (B, T, (H + 2 Hkv) D) to the caches
/// (B, S, Hkv D) at positions start[b] .. start[b] + T, then attends: out
/// (B, T, H D), each query over the cached keys up to itself, within the window.
///
/// Panics if a position lies outside the cache.
pub fn attention_cached<X: Elem, C: Elem, Y: Elem>(
    qkv: &[X],
    k_cache: &mut [C],
    v_cache: &mut [C],
    start: &[i32],
    out: &mut [Y],
    shape: &AttentionShape,
    ws: &mut [f32],
) {
    shape.check();
    let AttentionShape { batch, tokens, heads, kv_heads, head_dim: d, .. } = *shape;
    let (width, row) = (shape.qkv_width(), kv_heads * d);
    assert_eq!(start.len(), batch, "start");
    assert_eq!(qkv.len(), shape.rows() * width, "qkv");
    assert_eq!(out.len(), shape.rows() * heads * d, "out");
    assert_eq!(k_cache.len(), v_cache.len(), "caches");
    if shape.rows() * heads * d == 0 {
        return;
    }
    let capacity = k_cache.len() / (batch * row);
    assert_eq!(k_cache.len(), batch * capacity * row, "k_cache");
    for (b, &start) in start.iter().enumerate() {
        let fits = start >= 0 && start as usize + tokens <= capacity;
        assert!(fits, "row {b}: {tokens} tokens at {start} in a cache of {capacity}");
        for t in 0..tokens {
            let from = &qkv[(b * tokens + t) * width + heads * d..][..2 * row];
            let to = (b * capacity + start as usize + t) * row;
            for (cache, from) in [(&mut *k_cache, &from[..row]), (&mut *v_cache, &from[row..])] {
                for (to, from) in cache[to..to + row].iter_mut().zip(from) {
                    *to = C::from_f32(from.to_f32());
                }
            }
        }
    }
    let kv = KeysValues {
        keys: &*k_cache,
        values: &*v_cache,
        batch_stride: capacity * row,
        row_stride: row,
    };
    let visible = |b: usize, t: usize| shape.visible(start[b] as usize + t, 0);
    if tokens > STREAMED_TOKENS {
        flash(qkv, kv, out, None, shape, visible, ws);
    } else {
        decode(qkv, kv, out, shape, capacity, visible, ws);
    }
}

fn decode<X: Elem, C: Elem, Y: Elem>(
    qkv: &[X],
    kv: KeysValues<C>,
    out: &mut [Y],
    shape: &AttentionShape,
    capacity: usize,
    visible: impl Fn(usize, usize) -> (usize, usize) + Send + Sync,
    ws: &mut [f32],
) {
    let AttentionShape { tokens, heads, kv_heads, head_dim: d, scale, .. } = *shape;
    let (width, group, rows) = (shape.qkv_width(), shape.group(), shape.rows());
    // Only the chunks that some query sees become tasks.
    let (mut first, mut last, mut work) = (usize::MAX, 0, 0);
    for r in 0..rows {
        let (lo, hi) = visible(r / tokens, r % tokens);
        (first, last) = (first.min(lo / CHUNK), last.max(hi.div_ceil(CHUNK)));
        work += (hi - lo) * heads * d;
    }
    let (chunks, slot) = (last - first, d + 2);
    let need = rows * heads * capacity.div_ceil(CHUNK) * slot;
    assert!(ws.len() >= need, "workspace of {} floats, {need} needed", ws.len());
    let parts = Shared::new(ws);
    // Parts of one query and head, chunk after chunk: output, maximum, sum.
    let part = |r: usize, head: usize, chunk: usize| ((r * heads + head) * chunks + chunk) * slot;

    for_each(rows * kv_heads * chunks, work > 32 * 1024, |task| {
        let (r, task) = (task / (kv_heads * chunks), task % (kv_heads * chunks));
        let (kv_head, chunk) = (task / chunks, task % chunks);
        let (b, t) = (r / tokens, r % tokens);
        let (lo, hi) = visible(b, t);
        let begin = (first + chunk) * CHUNK;
        let (lo, hi) = (lo.max(begin), hi.min(begin + CHUNK).max(lo.max(begin)));
        let n = hi - lo;
        let at = b * kv.batch_stride + lo * kv.row_stride + kv_head * d;
        for g in (0..group).step_by(HEADS) {
            let m = HEADS.min(group - g);
            let head = kv_head * group + g;
            if n == 0 {
                for h in head..head + m {
                    // SAFETY: one task a part.
                    let part = unsafe { parts.slice(part(r, h, chunk), slot) };
                    part.fill(0.0);
                    part[d] = f32::NEG_INFINITY;
                }
                continue;
            }
            let mut q = [0.0f32; HEADS * MAX_HEAD_DIM];
            let from = &qkv[r * width + head * d..][..m * d];
            for (q, x) in q.iter_mut().zip(from) {
                *q = x.to_f32() * scale;
            }
            let mut scores = [[0.0f32; CHUNK]; HEADS];
            let (keys, stride) = (&kv.keys[at..], kv.row_stride);
            match m {
                1 => score::<C, 1, 4>(&q, keys, stride, n, d, &mut scores),
                2 => score::<C, 2, 4>(&q, keys, stride, n, d, &mut scores),
                3 => score::<C, 3, 4>(&q, keys, stride, n, d, &mut scores),
                4 => score::<C, 4, 2>(&q, keys, stride, n, d, &mut scores),
                5 => score::<C, 5, 2>(&q, keys, stride, n, d, &mut scores),
                6 => score::<C, 6, 2>(&q, keys, stride, n, d, &mut scores),
                7 => score::<C, 7, 1>(&q, keys, stride, n, d, &mut scores),
                _ => score::<C, 8, 1>(&q, keys, stride, n, d, &mut scores),
            }
            let mut o = [0.0f32; HEADS * MAX_HEAD_DIM];
            let mut statistics = [(0.0, 0.0); HEADS];
            for (scores, statistics) in scores.iter_mut().zip(&mut statistics).take(m) {
                *statistics = softmax(&mut scores[..n]);
            }
            weigh_values(&kv.values[at..], stride, n, d, &scores[..m], &mut o[..m * d]);
            for (i, (max, sum)) in statistics.into_iter().enumerate().take(m) {
                // SAFETY: one task a part.
                let part = unsafe { parts.slice(part(r, head + i, chunk), slot) };
                part[..d].copy_from_slice(&o[i * d..(i + 1) * d]);
                part[d] = max;
                part[d + 1] = sum;
            }
        }
    });

    for (i, out) in out.chunks_exact_mut(d).enumerate() {
        // SAFETY: the tasks are done.
        let parts = unsafe { &*parts.slice(i * chunks * slot, chunks * slot) };
        combine(parts, out);
    }
}

/// Scores of `n` keys for `M` heads, `R` keys at a time.
fn score<C: Elem, const M: usize, const R: usize>(
    q: &[f32],
    keys: &[C],
    stride: usize,
    n: usize,
    d: usize,
    scores: &mut [[f32; CHUNK]; HEADS],
) {
    for j in (0..n / R * R).step_by(R) {
        let s = dots::<C, M, R>(q, &keys[j * stride..], stride, d);
        for h in 0..M {
            scores[h][j..j + R].copy_from_slice(&s[h]);
        }
    }
    for j in n / R * R..n {
        let s = dots::<C, M, 1>(q, &keys[j * stride..], stride, d);
        for h in 0..M {
            scores[h][j] = s[h][0];
        }
    }
}

simd_fn! {
    /// Replaces scores by e^(score - maximum); the maximum and the sum.
    fn softmax(scores: &mut [f32]) -> (f32, f32) {
        let mut max = f32::NEG_INFINITY;
        for s in scores.iter() {
            max = if *s > max { *s } else { max };
        }
        let mut acc = [0.0f32; LANES];
        let (head, tail) = scores.as_chunks_mut::<LANES>();
        for s in head {
            for l in 0..LANES {
                s[l] = exp::<FMA>(s[l] - max);
                acc[l] += s[l];
            }
        }
        let mut sum = sum_lanes(acc);
        for s in tail {
            *s = exp::<FMA>(*s - max);
            sum += *s;
        }
        (max, sum)
    }
}

simd_fn! {
    /// o (heads, D) += probabilities (heads, n) values (n, D), four rows at a time.
    fn weigh_values<C: Elem>(
        values: &[C],
        stride: usize,
        n: usize,
        d: usize,
        p: &[[f32; CHUNK]],
        o: &mut [f32],
    ) {
        let mut j = 0;
        while j + 4 <= n {
            let v0 = &values[j * stride..][..d];
            let v1 = &values[(j + 1) * stride..][..d];
            let v2 = &values[(j + 2) * stride..][..d];
            let v3 = &values[(j + 3) * stride..][..d];
            for (p, o) in p.iter().zip(o.chunks_exact_mut(d)) {
                let p: &[f32; 4] = p[j..j + 4].try_into().unwrap();
                for i in 0..d {
                    let a = fma::<FMA>(p[0], v0[i].to_f32(), o[i]);
                    let a = fma::<FMA>(p[1], v1[i].to_f32(), a);
                    let a = fma::<FMA>(p[2], v2[i].to_f32(), a);
                    o[i] = fma::<FMA>(p[3], v3[i].to_f32(), a);
                }
            }
            j += 4;
        }
        while j < n {
            let v = &values[j * stride..][..d];
            for (p, o) in p.iter().zip(o.chunks_exact_mut(d)) {
                for i in 0..d {
                    o[i] = fma::<FMA>(p[j], v[i].to_f32(), o[i]);
                }
            }
            j += 1;
        }
    }
}

simd_fn! {
    /// The softmax over all chunks from the parts (output, maximum, sum).
    fn combine<Y: Elem>(parts: &[f32], out: &mut [Y]) {
        let d = out.len();
        let mut max = f32::NEG_INFINITY;
        for part in parts.chunks_exact(d + 2) {
            max = if part[d] > max { part[d] } else { max };
        }
        let mut o = [0.0f32; MAX_HEAD_DIM];
        let mut sum = 0.0;
        for part in parts.chunks_exact(d + 2) {
            let factor = exp::<FMA>(part[d] - max);
            sum += part[d + 1] * factor;
            for i in 0..d {
                o[i] += part[i] * factor;
            }
        }
        for i in 0..d {
            out[i] = Y::from_f32(o[i] / sum);
        }
    }
}

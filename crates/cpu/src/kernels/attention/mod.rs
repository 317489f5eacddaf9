//! Causal grouped-query attention without a T x T matrix, over fused rows
//! [query heads | key heads | value heads].
//!
//! The scheme is FlashAttention-2's (Dao, 2023): blocks of keys pass by a block of
//! queries, whose softmax is corrected as its maximum grows. Scores lie transposed
//! (keys down, queries across), so that every vector lane is one query: maximum,
//! exponential and sum are vertical, and all five products read their operands
//! where they lie.

mod backward;
mod cached;
mod forward;

pub use backward::{attention_backward, attention_backward_workspace};
pub use cached::{attention_cached, attention_cached_workspace};
pub use forward::{attention_forward, attention_forward_workspace};

use super::elem::Elem;

/// Largest head dimension.
pub const MAX_HEAD_DIM: usize = 256;

// Keys of a block: a multiple of every tile's rows.
const BLOCK_K: usize = 96;
// Queries of a block: a multiple of every tile's columns.
const BLOCK_Q: usize = 64;
const MAX_MR: usize = 12;
const MAX_NR: usize = 32;

/// Shapes of one attention call.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// B: rows of the batch.
    pub batch: usize,
    /// T: tokens of each row in this call.
    pub tokens: usize,
    /// H: query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Hkv: key and value heads.
    pub kv_heads: usize,
    /// D, at most [`MAX_HEAD_DIM`].
    pub head_dim: usize,
    /// A query at t sees the keys after t - window; all where absent.
    pub window: Option<usize>,
    /// Factor of the scores, mostly 1 / sqrt(D).
    pub scale: f32,
}

impl AttentionShape {
    /// Elements of a row of qkv.
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Query heads that share a key head.
    fn group(&self) -> usize {
        self.heads / self.kv_heads.max(1)
    }

    fn rows(&self) -> usize {
        self.batch * self.tokens
    }

    fn check(&self) {
        assert!(self.head_dim <= MAX_HEAD_DIM, "head dimension {} above 256", self.head_dim);
        assert_eq!(self.group() * self.kv_heads, self.heads, "heads per key head");
    }

    /// Keys `lo..hi` that the query at `position` sees.
    fn visible(&self, position: usize, doc_start: usize) -> (usize, usize) {
        let hi = position + 1;
        let lo = self.window.map_or(0, |window| hi.saturating_sub(window));
        (lo.max(doc_start).min(position), hi)
    }
}

/// Keys and values as the loops read them: key j of batch row b and key head h
/// starts at `b * batch_stride + j * row_stride + h * D`.
#[derive(Clone, Copy)]
struct KeysValues<'a, C> {
    keys: &'a [C],
    values: &'a [C],
    batch_stride: usize,
    row_stride: usize,
}

impl<'a, C: Elem> KeysValues<'a, C> {
    /// The key and value parts of fused rows.
    fn fused(qkv: &'a [C], shape: &AttentionShape) -> Self {
        let (width, d) = (shape.qkv_width(), shape.head_dim);
        Self {
            keys: qkv.get(shape.heads * d..).unwrap_or_default(),
            values: qkv.get((shape.heads + shape.kv_heads) * d..).unwrap_or_default(),
            batch_stride: shape.tokens * width,
            row_stride: width,
        }
    }
}

/// Distance between rows of `n` floats that are read column by column: an odd number
/// of cache lines, because powers of two would share a few sets of the cache.
fn spread(n: usize) -> usize {
    if n.is_multiple_of(32) { n + 16 } else { n }
}

super::simd::simd_fn! {
    /// Copies `n` rows of `d` elements, `stride` apart, to rows of `width` floats,
    /// the rest of which becomes zero; times `factor`.
    fn copy_rows<C: Elem>(
        from: &[C],
        stride: usize,
        n: usize,
        d: usize,
        width: usize,
        factor: f32,
        to: &mut [f32],
    ) {
        for (j, to) in to.chunks_exact_mut(width).take(n).enumerate() {
            let from = &from[j * stride..j * stride + d];
            let (to, rest) = to.split_at_mut(d);
            for (to, from) in to.iter_mut().zip(from) {
                *to = from.to_f32() * factor;
            }
            rest.fill(0.0);
        }
    }
}

/// Asks for the cache lines of `row`.
#[inline(always)]
fn prefetch<C>(row: &[C]) {
    #[cfg(target_arch = "x86_64")]
    for at in row.chunks(64 / size_of::<C>()) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: every x86-64 processor has the instruction, which never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = row;
}

/// Visible keys of each lane of a strip of queries, and their hull.
#[derive(Clone, Copy)]
struct Mask<const NR: usize> {
    lo: [i32; NR],
    hi: [i32; NR],
    /// Keys that any lane sees.
    any: (usize, usize),
    /// Keys that every lane sees.
    all: (usize, usize),
}

impl<const NR: usize> Mask<NR> {
    /// Of `n` queries; the lanes beyond see nothing.
    fn new(n: usize, visible: impl Fn(usize) -> (usize, usize)) -> Self {
        let mut mask = Self { lo: [0; NR], hi: [0; NR], any: (usize::MAX, 0), all: (0, 0) };
        let mut all = (0, usize::MAX);
        for i in 0..n {
            let (lo, hi) = visible(i);
            (mask.lo[i], mask.hi[i]) = (lo as i32, hi as i32);
            mask.any = (mask.any.0.min(lo), mask.any.1.max(hi));
            all = (all.0.max(lo), all.1.min(hi));
        }
        if n == NR {
            mask.all = all;
        }
        mask
    }

    /// Rows of a block of keys that any lane sees, counted from its first.
    fn rows(&self, key: usize, n: usize) -> (usize, usize) {
        let lo = self.any.0.saturating_sub(key).min(n);
        (lo, self.any.1.saturating_sub(key).clamp(lo, n))
    }

    /// Whether some lane does not see some key of `lo..hi`.
    fn cuts(&self, lo: usize, hi: usize) -> bool {
        lo < self.all.0 || hi > self.all.1
    }
}

//! Element by element: fill, copy and convert, scale, add; and the sums over
//! whole tensors and columns.

use super::elem::Elem;
use super::parallel::{GRAIN, Shared, for_each};
use super::simd::{LANES, fma, simd_fn, sum_lanes};

/// Runs `f(offset, length)` over pieces of `0..n`.
fn pieces(n: usize, f: impl Fn(usize, usize) + Send + Sync) {
    for_each(n.div_ceil(GRAIN), true, |i| f(i * GRAIN, GRAIN.min(n - i * GRAIN)));
}

/// x = value.
pub fn fill<T: Elem>(x: &mut [T], value: f32) {
    let n = x.len();
    let value = T::from_f32(value);
    let x = Shared::new(x);
    // SAFETY: pieces are disjoint.
    pieces(n, |at, len| unsafe { x.slice(at, len) }.fill(value));
}

/// to = from, converted where the types differ.
pub fn convert<A: Elem, B: Elem>(from: &[A], to: &mut [B]) {
    assert_eq!(from.len(), to.len(), "lengths");
    let n = to.len();
    let to = Shared::new(to);
    // SAFETY: pieces are disjoint.
    pieces(n, |at, len| convert_slices(&from[at..at + len], unsafe { to.slice(at, len) }));
}

/// x *= factor.
pub fn scale<T: Elem>(x: &mut [T], factor: f32) {
    let n = x.len();
    let x = Shared::new(x);
    // SAFETY: pieces are disjoint.
    pieces(n, |at, len| scale_slice(unsafe { x.slice(at, len) }, factor));
}

/// out = a + b.
pub fn add<A: Elem, B: Elem, C: Elem>(a: &[A], b: &[B], out: &mut [C]) {
    assert_eq!(a.len(), out.len(), "a");
    assert_eq!(b.len(), out.len(), "b");
    let n = out.len();
    let out = Shared::new(out);
    pieces(n, |at, len| {
        // SAFETY: pieces are disjoint.
        add_slices(&a[at..at + len], &b[at..at + len], unsafe { out.slice(at, len) })
    });
}

/// x += b.
pub fn add_assign<A: Elem, B: Elem>(x: &mut [A], b: &[B]) {
    assert_eq!(b.len(), x.len(), "b");
    let n = x.len();
    let x = Shared::new(x);
    pieces(n, |at, len| {
        // SAFETY: pieces are disjoint.
        add_assign_slices(unsafe { x.slice(at, len) }, &b[at..at + len])
    });
}

/// Sum of x^2: in `f32` within pieces of 1024, in `f64` over them. For the norm of
/// all gradients, add up the tensors' sums in a fixed order.
pub fn sum_of_squares<T: Elem>(x: &[T]) -> f64 {
    // Few parts, cut by the length alone, added up in their order.
    let mut parts = [0.0f64; PARTS];
    let part = x.len().div_ceil(PARTS).next_multiple_of(1024);
    let sums = Shared::new(&mut parts);
    for_each(PARTS, x.len() > GRAIN, |i| {
        let x = &x[(i * part).min(x.len())..((i + 1) * part).min(x.len())];
        // SAFETY: one task a part.
        let sum = unsafe { &mut sums.slice(i, 1)[0] };
        *sum = x.chunks(1024).map(|x| sum_of_squares_piece(x) as f64).sum();
    });
    parts.iter().sum()
}

const PARTS: usize = 64;

// As in the norms: few partial sums, fixed by the shape.
fn chunk_rows(rows: usize) -> usize {
    rows.div_ceil(32).max(16)
}

/// `f32` elements of workspace of [`bias_backward`].
pub fn bias_backward_workspace(rows: usize, n: usize) -> usize {
    rows.div_ceil(chunk_rows(rows)) * n
}

/// d_bias (N) = [d_bias +] column sums of d_out (rows, N).
pub fn bias_backward<T: Elem, D: Elem>(
    d_out: &[T],
    d_bias: &mut [D],
    accumulate: bool,
    ws: &mut [f32],
) {
    let n = d_bias.len();
    let count = d_out.len() / n.max(1);
    assert_eq!(d_out.len(), count * n, "d_out");
    let rows = chunk_rows(count);
    let chunks = count.div_ceil(rows);
    let partial = Shared::new(&mut ws[..chunks * n]);
    for_each(chunks, d_out.len() > GRAIN, |chunk| {
        // SAFETY: one task a chunk.
        let sums = unsafe { partial.slice(chunk * n, n) };
        sums.fill(0.0);
        for row in d_out[chunk * rows * n..count.min((chunk + 1) * rows) * n].chunks_exact(n) {
            add_assign_slices(sums, row);
        }
    });
    super::norm::sum_partials(&ws[..chunks * n], d_bias, accumulate);
}

simd_fn! {
    fn convert_slices<A: Elem, B: Elem>(from: &[A], to: &mut [B]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = B::from_f32(from.to_f32());
        }
    }
}

simd_fn! {
    pub(super) fn scale_slice<A: Elem>(x: &mut [A], factor: f32) {
        for x in x {
            *x = A::from_f32(x.to_f32() * factor);
        }
    }
}

simd_fn! {
    pub(super) fn add_slices<A: Elem, B: Elem, C: Elem>(a: &[A], b: &[B], out: &mut [C]) {
        for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
            *out = C::from_f32(a.to_f32() + b.to_f32());
        }
    }
}

simd_fn! {
    pub(super) fn add_assign_slices<A: Elem, B: Elem>(x: &mut [A], b: &[B]) {
        for (x, b) in x.iter_mut().zip(b) {
            *x = A::from_f32(x.to_f32() + b.to_f32());
        }
    }
}

simd_fn! {
    fn sum_of_squares_piece<T: Elem>(x: &[T]) -> f32 {
        let mut acc = [[0.0f32; LANES]; 2];
        let (head, tail) = x.as_chunks::<{ 2 * LANES }>();
        for x in head {
            for l in 0..LANES {
                let (a, b) = (x[l].to_f32(), x[LANES + l].to_f32());
                acc[0][l] = fma::<FMA>(a, a, acc[0][l]);
                acc[1][l] = fma::<FMA>(b, b, acc[1][l]);
            }
        }
        let mut sum = sum_lanes(acc[0]) + sum_lanes(acc[1]);
        for x in tail {
            sum += x.to_f32() * x.to_f32();
        }
        sum
    }
}

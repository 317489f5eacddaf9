//! Cross-entropy over the vocabulary, with its gradient in the place of the logits.

use super::elem::Elem;
use super::parallel::{Shared, for_each, rows_per_task};
use super::simd::{LANES, exp, simd_fn, sum_lanes};

/// The label of a position that does not count.
pub const IGNORED: i32 = -100;

/// losses (rows) = -log softmax(logits)[label], and logits (rows, V) become
/// (softmax - onehot(label)) * scale. Rows labelled [`IGNORED`] get loss 0 and
/// gradient 0. `scale` is 1 / (valid tokens of the whole step).
///
/// Panics on any other label outside 0 .. V.
pub fn cross_entropy<T: Elem>(
    logits: &mut [T],
    labels: &[i32],
    losses: &mut [f32],
    scale: f32,
    vocab: usize,
) {
    let n = labels.len();
    assert_eq!(logits.len(), n * vocab, "logits");
    assert_eq!(losses.len(), n, "losses");
    let rows = rows_per_task(vocab);
    let (logits, losses) = (Shared::new(logits), Shared::new(losses));
    for_each(n.div_ceil(rows), true, |task| {
        for r in task * rows..n.min((task + 1) * rows) {
            // SAFETY: one task a row.
            let row = unsafe { logits.slice(r * vocab, vocab) };
            let loss = unsafe { &mut losses.slice(r, 1)[0] };
            if labels[r] == IGNORED {
                *loss = 0.0;
                row.fill(T::default());
                continue;
            }
            let label = labels[r] as usize;
            let (max, sum, at_label) = statistics(row, label);
            *loss = sum.ln() + max - at_label;
            softmax_gradient(row, max, scale / sum);
            // Not by subtraction from the stored, rounded softmax.
            let p = scalar_exp(at_label - max) / sum;
            row[label] = T::from_f32((p - 1.0) * scale);
        }
    });
}

/// The losses of [`cross_entropy`] alone; the logits stay.
pub fn cross_entropy_loss<T: Elem>(logits: &[T], labels: &[i32], losses: &mut [f32], vocab: usize) {
    let n = labels.len();
    assert_eq!(logits.len(), n * vocab, "logits");
    assert_eq!(losses.len(), n, "losses");
    let rows = rows_per_task(vocab);
    let losses = Shared::new(losses);
    for_each(n.div_ceil(rows), true, |task| {
        for r in task * rows..n.min((task + 1) * rows) {
            // SAFETY: one task a row.
            let loss = unsafe { &mut losses.slice(r, 1)[0] };
            *loss = 0.0;
            if labels[r] != IGNORED {
                let row = &logits[r * vocab..(r + 1) * vocab];
                let (max, sum, at_label) = statistics(row, labels[r] as usize);
                *loss = sum.ln() + max - at_label;
            }
        }
    });
}

/// Largest logit, sum of e^(logit - largest), and the label's logit.
fn statistics<T: Elem>(row: &[T], label: usize) -> (f32, f32, f32) {
    let max = row_max(row);
    (max, sum_exp(row, max), row[label].to_f32())
}

simd_fn! {
    fn row_max<T: Elem>(row: &[T]) -> f32 {
        let mut acc = [f32::NEG_INFINITY; 2 * LANES];
        let (head, tail) = row.as_chunks::<{ 2 * LANES }>();
        for x in head {
            for l in 0..2 * LANES {
                let x = x[l].to_f32();
                acc[l] = if x > acc[l] { x } else { acc[l] };
            }
        }
        let mut max = f32::NEG_INFINITY;
        for x in acc.into_iter().chain(tail.iter().map(|x| x.to_f32())) {
            if x > max {
                max = x;
            }
        }
        max
    }
}

simd_fn! {
    fn sum_exp<T: Elem>(row: &[T], max: f32) -> f32 {
        let mut acc = [0.0f32; LANES];
        let (head, tail) = row.as_chunks::<LANES>();
        for x in head {
            for l in 0..LANES {
                acc[l] += exp::<FMA>(x[l].to_f32() - max);
            }
        }
        let mut sum = sum_lanes(acc);
        for x in tail {
            sum += exp::<FMA>(x.to_f32() - max);
        }
        sum
    }
}

simd_fn! {
    fn softmax_gradient<T: Elem>(row: &mut [T], max: f32, factor: f32) {
        for x in row {
            *x = T::from_f32(exp::<FMA>(x.to_f32() - max) * factor);
        }
    }
}

simd_fn! {
    fn scalar_exp(x: f32) -> f32 {
        exp::<FMA>(x)
    }
}

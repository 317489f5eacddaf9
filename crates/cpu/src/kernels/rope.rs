//! Rotary position embedding (Su et al., "RoFormer", 2021) in the half-rotation
//! convention of transformers: element i of a head turns with element i + D/2.

use super::elem::Elem;
use super::parallel::{Shared, for_each, rows_per_task};
use super::simd::{fma, simd_fn};

/// Turns the query and key heads of qkv (rows, (H + 2 Hkv) D) in place by the
/// angles of `positions` (rows), looked up in `table` (positions, 2, D/2): cos, then
/// sin. `inverse` turns back: the gradient of the forward rotation.
///
/// Panics if a position lies outside the table.
pub fn rope<T: Elem>(
    qkv: &mut [T],
    positions: &[i32],
    table: &[f32],
    (h, hkv, d): (usize, usize, usize),
    inverse: bool,
) {
    let width = (h + 2 * hkv) * d;
    let n = positions.len();
    assert_eq!(qkv.len(), n * width, "qkv");
    assert_eq!(d % 2, 0, "head dimension {d} is odd");
    let rows = rows_per_task(width);
    let qkv = Shared::new(qkv);
    for_each(n.div_ceil(rows), true, |task| {
        for r in task * rows..n.min((task + 1) * rows) {
            // SAFETY: one task a row.
            let heads = unsafe { qkv.slice(r * width, (h + hkv) * d) };
            let at = positions[r] as usize * d;
            let (cos, sin) = table[at..at + d].split_at(d / 2);
            rotate_heads(heads, cos, sin, if inverse { -1.0 } else { 1.0 });
        }
    });
}

simd_fn! {
    fn rotate_heads<T: Elem>(heads: &mut [T], cos: &[f32], sin: &[f32], sign: f32) {
        let half = cos.len();
        for head in heads.chunks_exact_mut(2 * half) {
            let (a, b) = head.split_at_mut(half);
            for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
                let (x, y, sin) = (a.to_f32(), b.to_f32(), sign * sin);
                *a = T::from_f32(fma::<FMA>(x, *cos, -(y * sin)));
                *b = T::from_f32(fma::<FMA>(y, *cos, x * sin));
            }
        }
    }
}

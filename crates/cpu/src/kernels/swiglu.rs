//! SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020):
//! silu(gate) * up.

use super::elem::Elem;
use super::parallel::{Shared, for_each, rows_per_task};
use super::simd::{fma, sigmoid, simd_fn};

/// out (rows, I) = silu(gate) * up, gate_up (rows, 2 I) with rows [gate | up].
pub fn swiglu_forward<X: Elem, Y: Elem>(gate_up: &[X], out: &mut [Y], intermediate: usize) {
    let i = intermediate;
    let n = out.len() / i.max(1);
    assert_eq!(out.len(), n * i, "out");
    assert_eq!(gate_up.len(), 2 * n * i, "gate_up");
    let rows = rows_per_task(2 * i);
    let out = Shared::new(out);
    for_each(n.div_ceil(rows), true, |task| {
        for r in task * rows..n.min((task + 1) * rows) {
            let (gate, up) = gate_up[2 * r * i..2 * (r + 1) * i].split_at(i);
            // SAFETY: one task a row.
            forward_row(gate, up, unsafe { out.slice(r * i, i) });
        }
    });
}

/// Gradient of [`swiglu_forward`]: d_gate_up (rows, 2 I) from d_out (rows, I).
pub fn swiglu_backward<X: Elem, G: Elem>(
    gate_up: &[X],
    d_out: &[G],
    d_gate_up: &mut [X],
    intermediate: usize,
) {
    let i = intermediate;
    let n = d_out.len() / i.max(1);
    assert_eq!(d_out.len(), n * i, "d_out");
    assert_eq!(gate_up.len(), 2 * n * i, "gate_up");
    assert_eq!(d_gate_up.len(), 2 * n * i, "d_gate_up");
    let rows = rows_per_task(2 * i);
    let d_gate_up = Shared::new(d_gate_up);
    for_each(n.div_ceil(rows), true, |task| {
        for r in task * rows..n.min((task + 1) * rows) {
            let (gate, up) = gate_up[2 * r * i..2 * (r + 1) * i].split_at(i);
            // SAFETY: one task a row.
            let (d_gate, d_up) = unsafe { d_gate_up.slice(2 * r * i, 2 * i) }.split_at_mut(i);
            backward_row(gate, up, &d_out[r * i..(r + 1) * i], d_gate, d_up);
        }
    });
}

/// [`swiglu_backward`] where the gradient replaces gate_up.
pub fn swiglu_backward_in_place<X: Elem, G: Elem>(
    gate_up: &mut [X],
    d_out: &[G],
    intermediate: usize,
) {
    let i = intermediate;
    let n = d_out.len() / i.max(1);
    assert_eq!(d_out.len(), n * i, "d_out");
    assert_eq!(gate_up.len(), 2 * n * i, "gate_up");
    let rows = rows_per_task(2 * i);
    let gate_up = Shared::new(gate_up);
    for_each(n.div_ceil(rows), true, |task| {
        for r in task * rows..n.min((task + 1) * rows) {
            // SAFETY: one task a row.
            let (gate, up) = unsafe { gate_up.slice(2 * r * i, 2 * i) }.split_at_mut(i);
            backward_row_in_place(gate, up, &d_out[r * i..(r + 1) * i]);
        }
    });
}

/// Gradients of gate and up.
#[inline(always)]
fn derivatives<const FMA: bool>(gate: f32, up: f32, d_out: f32) -> (f32, f32) {
    let s = sigmoid::<FMA>(gate);
    let silu = gate * s;
    // silu' = s + silu (1 - s)
    let slope = fma::<FMA>(silu, 1.0 - s, s);
    (d_out * up * slope, d_out * silu)
}

simd_fn! {
    fn forward_row<X: Elem, Y: Elem>(gate: &[X], up: &[X], out: &mut [Y]) {
        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
            let gate = gate.to_f32();
            *out = Y::from_f32(gate * sigmoid::<FMA>(gate) * up.to_f32());
        }
    }
}

simd_fn! {
    fn backward_row<X: Elem, G: Elem>(
        gate: &[X],
        up: &[X],
        d_out: &[G],
        d_gate: &mut [X],
        d_up: &mut [X],
    ) {
        let n = d_out.len();
        let (gate, up, d_gate, d_up) = (&gate[..n], &up[..n], &mut d_gate[..n], &mut d_up[..n]);
        for i in 0..n {
            let d = derivatives::<FMA>(gate[i].to_f32(), up[i].to_f32(), d_out[i].to_f32());
            d_gate[i] = X::from_f32(d.0);
            d_up[i] = X::from_f32(d.1);
        }
    }
}

simd_fn! {
    fn backward_row_in_place<X: Elem, G: Elem>(gate: &mut [X], up: &mut [X], d_out: &[G]) {
        for ((gate, up), d_out) in gate.iter_mut().zip(up).zip(d_out) {
            let d = derivatives::<FMA>(gate.to_f32(), up.to_f32(), d_out.to_f32());
            *gate = X::from_f32(d.0);
            *up = X::from_f32(d.1);
        }
    }
}

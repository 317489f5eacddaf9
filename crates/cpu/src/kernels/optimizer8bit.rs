//! AdamW with both moments in eight bits: `plimsoll_quant::adamw8bit`, bit for bit,
//! in loops that vectorize.

use plimsoll_quant::{AdamW8bit, Cells, DynamicMap, STATE_BLOCK, State8bit};

use super::elem::Elem;
use super::optimizer::{Rounding, random};
use super::parallel::{GRAIN, Shared, for_each};
use super::simd::simd_fn;

/// One step of 8-bit AdamW over a tensor of n elements; the state is (n) codes and
/// one scale for each block of 256. `bf16` parameters are rounded stochastically.
pub fn adamw8bit<P: Elem, G: Elem>(
    param: &mut [P],
    grad: &[G],
    state: State8bit<'_>,
    hyper: &AdamW8bit,
    rounding: Rounding,
) {
    const BLOCKS: usize = GRAIN / STATE_BLOCK;
    let n = param.len();
    let blocks = n.div_ceil(STATE_BLOCK);
    assert_eq!([grad.len(), state.m.len(), state.v.len()], [n; 3], "elements");
    assert_eq!([state.m_absmax.len(), state.v_absmax.len()], [blocks; 2], "blocks");
    let (param, m, v) = (Shared::new(param), Shared::new(state.m), Shared::new(state.v));
    let (m_absmax, v_absmax) = (Shared::new(state.m_absmax), Shared::new(state.v_absmax));
    for_each(n.div_ceil(GRAIN), true, |task| {
        let (at, block) = (task * GRAIN, task * BLOCKS);
        let (len, blocks) = (GRAIN.min(n - at), BLOCKS.min(blocks - block));
        // SAFETY: pieces are disjoint, and whole blocks.
        let (param, state) = unsafe {
            let state = State8bit {
                m: m.slice(at, len),
                v: v.slice(at, len),
                m_absmax: m_absmax.slice(block, blocks),
                v_absmax: v_absmax.slice(block, blocks),
            };
            (param.slice(at, len), state)
        };
        piece(param, &grad[at..at + len], state, hyper, rounding.piece(at));
    });
}

simd_fn! {
    pub(super) fn piece<P: Elem, G: Elem>(
        param: &mut [P],
        grad: &[G],
        state: State8bit<'_>,
        hyper: &AdamW8bit,
        seed: [u32; 2],
    ) {
        let AdamW8bit { lr, beta1, beta2, eps, weight_decay, grad_scale, .. } = *hyper;
        let (rest1, rest2) = (1.0 - beta1, 1.0 - beta2);
        let correction2 = hyper.bias_correction2.sqrt();
        let (step, eps) = (-lr * correction2 / hyper.bias_correction1, correction2 * eps);
        let decay = 1.0 - lr * weight_decay;
        let (signed, unsigned) = (DynamicMap::signed().values(), DynamicMap::unsigned().values());
        let (cells_m, cells_v) = (Cells::signed(), Cells::unsigned());
        let blocks = param.chunks_mut(STATE_BLOCK).zip(grad.chunks(STATE_BLOCK));
        let codes = state.m.chunks_mut(STATE_BLOCK).zip(state.v.chunks_mut(STATE_BLOCK));
        let scales = state.m_absmax.iter_mut().zip(state.v_absmax.iter_mut());
        for (n, (((param, grad), (m, v)), (m_absmax, v_absmax))) in
            blocks.zip(codes).zip(scales).enumerate()
        {
            // A tensor's last block may be shorter: the rest of these stays zero.
            let (mut all_m, mut all_v) = ([0.0f32; STATE_BLOCK], [0.0f32; STATE_BLOCK]);
            let len = param.len();
            let (grad, m, v) = (&grad[..len], &mut m[..len], &mut v[..len]);
            let (m1, v1) = (&mut all_m[..len], &mut all_v[..len]);
            for i in 0..len {
                m1[i] = signed[m[i] as usize] * *m_absmax;
                v1[i] = unsigned[v[i] as usize] * *v_absmax;
            }
            let first = (n * STATE_BLOCK) as u32;
            for i in 0..len {
                // Always fused: codes must not depend on the processor.
                let g = grad[i].to_f32();
                let scaled = g * grad_scale;
                let new_m = rest1.mul_add(scaled, m1[i] * beta1);
                let new_v = (rest2 * scaled).mul_add(scaled, v1[i] * beta2);
                let p = param[i].to_f32();
                let updated = step.mul_add(new_m / (new_v.sqrt() + eps), p) * decay;
                let finite = g.abs() < f32::INFINITY;
                m1[i] = if finite { new_m } else { 0.0 };
                v1[i] = if finite { new_v } else { 0.0 };
                let bits = random(seed, first.wrapping_add(i as u32));
                param[i] = P::from_f32_stochastic(if finite { updated } else { p }, bits);
            }
            let (new_m, new_v) = (largest(&all_m), largest(&all_v));
            (*m_absmax, *v_absmax) = (new_m, new_v);
            let (scale_m, scale_v) = (inverse(new_m), inverse(new_v));
            let mut signs = [0u32; STATE_BLOCK];
            for i in 0..STATE_BLOCK {
                signs[i] = all_m[i].to_bits() >> 31;
                all_m[i] = all_m[i].abs() * scale_m;
                all_v[i] *= scale_v;
            }
            let mut positions = [0u32; STATE_BLOCK];
            cells_m.positions(&all_m, &mut positions);
            for ((m, sign), position) in m.iter_mut().zip(&signs).zip(&positions) {
                // The sign of a moment survives rounding to zero; there is no -1.
                let below = 127u32.wrapping_sub((*position).clamp(1, 127));
                *m = if *sign == 1 { below } else { position.wrapping_add(127) } as u8;
            }
            cells_v.positions(&all_v, &mut positions);
            for (v, position) in v.iter_mut().zip(&positions) {
                *v = *position as u8;
            }
        }
    }
}

/// NaN is passed over.
#[inline(always)]
fn largest(x: &[f32; STATE_BLOCK]) -> f32 {
    let mut lanes = [0.0f32; 16];
    for x in x.chunks_exact(16) {
        for (lane, x) in lanes.iter_mut().zip(x) {
            *lane = if x.abs() > *lane { x.abs() } else { *lane };
        }
    }
    lanes.iter().fold(0.0, |a, x| a.max(*x))
}

#[inline(always)]
fn inverse(absmax: f32) -> f32 {
    if absmax >= f32::MIN_POSITIVE { 1.0 / absmax } else { 0.0 }
}

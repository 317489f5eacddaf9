//! AdamW with both moments in eight bits (Dettmers et al., "8-bit Optimizers via
//! Block-wise Quantization", arXiv 2110.02861): the reference that devices are
//! tested against, equal to bitsandbytes 0.49 `AdamW8bit` (block 256).

use crate::DynamicMap;

/// Elements of one block of optimizer state.
pub const STATE_BLOCK: usize = 256;

/// Tensors with fewer elements keep their state in float32 (`min_8bit_size` of
/// bitsandbytes).
pub const MIN_8BIT_ELEMENTS: usize = 4096;

/// Hyper-parameters of one step.
#[derive(Clone, Copy, Debug)]
pub struct AdamW8bit {
    pub lr: f32,
    pub beta1: f32,
    pub beta2: f32,
    pub eps: f32,
    pub weight_decay: f32,
    /// 1 - beta1^step, step counted from 1.
    pub bias_correction1: f32,
    /// 1 - beta2^step.
    pub bias_correction2: f32,
    /// Multiplies the gradient: the clipping factor.
    pub grad_scale: f32,
}

/// State of n elements: codes (n), and the largest magnitude of each block of
/// [`STATE_BLOCK`]. All zero at the start.
pub struct State8bit<'a> {
    pub m: &'a mut [u8],
    pub v: &'a mut [u8],
    pub m_absmax: &'a mut [f32],
    pub v_absmax: &'a mut [f32],
}

/// One step: p = (p - lr m^ / (sqrt(v^) + eps)) (1 - lr wd), where the moments that
/// were just updated are used before they are rounded.
///
/// An element whose gradient is not finite keeps its parameter and forgets its
/// moments, as in bitsandbytes. A block of zeros has m codes of 127; bitsandbytes
/// leaves 255 there, which reads back as the same zero.
///
/// # Panics
/// The lengths do not go together.
pub fn adamw8bit(param: &mut [f32], grad: &[f32], state: State8bit, hyper: &AdamW8bit) {
    let n = param.len();
    let blocks = n.div_ceil(STATE_BLOCK);
    assert_eq!([grad.len(), state.m.len(), state.v.len()], [n; 3], "elements");
    assert_eq!([state.m_absmax.len(), state.v_absmax.len()], [blocks; 2], "blocks");
    let (signed, unsigned) = (DynamicMap::signed(), DynamicMap::unsigned());
    let AdamW8bit { lr, beta1, beta2, eps, weight_decay, grad_scale, .. } = *hyper;
    let (rest1, rest2) = (1.0 - beta1, 1.0 - beta2);
    let correction2 = hyper.bias_correction2.sqrt();
    let step = -lr * correction2 / hyper.bias_correction1;
    let decay = 1.0 - lr * weight_decay;
    for block in 0..blocks {
        let range = block * STATE_BLOCK..n.min((block + 1) * STATE_BLOCK);
        let (old_m, old_v) = (state.m_absmax[block], state.v_absmax[block]);
        let (mut m, mut v) = ([0.0f32; STATE_BLOCK], [0.0f32; STATE_BLOCK]);
        for (j, i) in range.clone().enumerate() {
            if grad[i].is_finite() {
                let g = grad[i] * grad_scale;
                m[j] = rest1.mul_add(g, signed.value(state.m[i]) * old_m * beta1);
                v[j] = (rest2 * g).mul_add(g, unsigned.value(state.v[i]) * old_v * beta2);
                let update = m[j] / (v[j].sqrt() + correction2 * eps);
                param[i] = step.mul_add(update, param[i]) * decay;
            }
        }
        let largest = |x: &[f32]| x.iter().fold(0.0f32, |a, x| a.max(x.abs()));
        let (new_m, new_v) = (largest(&m), largest(&v));
        (state.m_absmax[block], state.v_absmax[block]) = (new_m, new_v);
        let (scale_m, scale_v) = (inverse(new_m), inverse(new_v));
        for (j, i) in range.enumerate() {
            let code = signed.nearest(m[j] * scale_m);
            // The sign of a moment survives rounding to zero.
            state.m[i] = if code == 127 && m[j].is_sign_negative() { 126 } else { code };
            state.v[i] = unsigned.nearest(v[j] * scale_v);
        }
    }
}

/// One over the largest magnitude of a block; 0 where that is too small to divide
/// by, so that all of the block becomes zero.
fn inverse(absmax: f32) -> f32 {
    if absmax >= f32::MIN_POSITIVE { 1.0 / absmax } else { 0.0 }
}

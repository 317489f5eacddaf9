//! AdamW and SGD over one tensor, with stochastic rounding of what is stored
//! in bfloat16.

use super::elem::Elem;
use super::parallel::{GRAIN, Shared, for_each};
use super::simd::{fma, simd_fn};

/// Hyper-parameters of one AdamW step.
#[derive(Clone, Copy, Debug)]
pub struct AdamW {
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

/// Random bits for stochastic rounding: a hash of the seed and of the element's
/// index, so that neither threads nor chunks matter. Mix the step and the tensor
/// into the seed.
#[derive(Clone, Copy, Debug)]
pub struct Rounding {
    seed: [u32; 2],
    /// Place in its tensor of the first element at hand.
    first: usize,
}

impl Rounding {
    pub fn new(seed: u64) -> Self {
        // The finalizer of SplitMix64 spreads close seeds apart.
        let mut x = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^= x >> 31;
        Self { seed: [x as u32, (x >> 32) as u32], first: 0 }
    }

    /// For a part of the tensor that starts at its element `first`.
    pub fn starting_at(self, first: usize) -> Self {
        Self { first, ..self }
    }

    /// Bits for the piece of elements that starts at `offset`.
    pub(super) fn piece(self, offset: usize) -> [u32; 2] {
        let offset = self.first + offset;
        let high = ((offset as u64) >> 32) as u32;
        [self.seed[0] ^ high.wrapping_mul(0x9e37_79b9), self.seed[1].wrapping_add(offset as u32)]
    }
}

/// 32 random bits of a counter: two rounds of multiply and xor-shift, keyed.
#[inline(always)]
pub(super) fn random(seed: [u32; 2], i: u32) -> u32 {
    let mut x = i.wrapping_add(seed[1]);
    x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d) ^ seed[0];
    x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

/// One step of AdamW (Loshchilov and Hutter, 2019) as `torch.optim.AdamW` computes
/// it: p -= lr wd p; m, v moving averages; p -= lr / bc1 * m / (sqrt(v / bc2) + eps).
///
/// All of param, grad, m, v have one length. `bf16` parameters and moments are
/// rounded stochastically with `rounding`, `f32` ones are exact.
pub fn adamw<P: Elem, G: Elem, M: Elem, V: Elem>(
    param: &mut [P],
    grad: &[G],
    m: &mut [M],
    v: &mut [V],
    hyper: &AdamW,
    rounding: Rounding,
) {
    let n = param.len();
    assert_eq!(grad.len(), n, "grad");
    assert_eq!(m.len(), n, "m");
    assert_eq!(v.len(), n, "v");
    let (param, m, v) = (Shared::new(param), Shared::new(m), Shared::new(v));
    for_each(n.div_ceil(GRAIN), true, |task| {
        let at = task * GRAIN;
        let len = GRAIN.min(n - at);
        // SAFETY: pieces are disjoint.
        let (param, m, v) = unsafe { (param.slice(at, len), m.slice(at, len), v.slice(at, len)) };
        adamw_piece(param, &grad[at..at + len], m, v, hyper, rounding.piece(at));
    });
}

/// One step of SGD as `torch.optim.SGD` computes it: g = grad_scale grad + wd p;
/// with momentum, buffer = momentum buffer + g (`first` starts it as g) and g =
/// buffer; p -= lr g.
pub fn sgd<P: Elem, G: Elem, M: Elem>(
    param: &mut [P],
    grad: &[G],
    momentum: Option<(&mut [M], f32, bool)>,
    (lr, weight_decay, grad_scale): (f32, f32, f32),
    rounding: Rounding,
) {
    let n = param.len();
    assert_eq!(grad.len(), n, "grad");
    let param = Shared::new(param);
    let momentum = momentum.map(|(buffer, factor, first)| {
        assert_eq!(buffer.len(), n, "momentum");
        (Shared::new(buffer), if first { 0.0 } else { factor })
    });
    for_each(n.div_ceil(GRAIN), true, |task| {
        let at = task * GRAIN;
        let len = GRAIN.min(n - at);
        let grad = &grad[at..at + len];
        let seed = rounding.piece(at);
        // SAFETY: pieces are disjoint.
        let param = unsafe { param.slice(at, len) };
        match momentum {
            Some((buffer, factor)) => {
                let buffer = unsafe { buffer.slice(at, len) };
                if factor == 0.0 {
                    // Whatever the buffer holds, NaN included, is not read.
                    buffer.fill(M::default());
                }
                momentum_piece(param, grad, buffer, [lr, weight_decay, grad_scale, factor], seed);
            }
            None => sgd_piece(param, grad, [lr, weight_decay, grad_scale], seed),
        }
    });
}

simd_fn! {
    pub(super) fn adamw_piece<P: Elem, G: Elem, M: Elem, V: Elem>(
        param: &mut [P],
        grad: &[G],
        m: &mut [M],
        v: &mut [V],
        hyper: &AdamW,
        seed: [u32; 2],
    ) {
        let n = param.len();
        let (grad, m, v) = (&grad[..n], &mut m[..n], &mut v[..n]);
        let AdamW { lr, beta1, beta2, eps, weight_decay, grad_scale, .. } = *hyper;
        let decay = 1.0 - lr * weight_decay;
        let step = lr / hyper.bias_correction1;
        let inverse_sqrt_bc2 = 1.0 / hyper.bias_correction2.sqrt();
        let (rest1, rest2) = (1.0 - beta1, 1.0 - beta2);
        for i in 0..n {
            let g = grad[i].to_f32() * grad_scale;
            let m1 = fma::<FMA>(beta1, m[i].to_f32(), rest1 * g);
            let v1 = fma::<FMA>(beta2, v[i].to_f32(), rest2 * g * g);
            let denominator = fma::<FMA>(v1.sqrt(), inverse_sqrt_bc2, eps);
            let p = fma::<FMA>(param[i].to_f32(), decay, -(step * m1 / denominator));
            // One hash rounds two numbers. Unused where all are f32.
            let bits = random(seed, i as u32);
            param[i] = P::from_f32_stochastic(p, bits);
            m[i] = M::from_f32_stochastic(m1, bits >> 16);
            v[i] = V::from_f32_stochastic(v1, random([seed[0] ^ 0x5bd1_e995, seed[1]], i as u32));
        }
    }
}

simd_fn! {
    pub(super) fn sgd_piece<P: Elem, G: Elem>(
        param: &mut [P],
        grad: &[G],
        hyper: [f32; 3],
        seed: [u32; 2],
    ) {
        let [lr, weight_decay, grad_scale] = hyper;
        let n = param.len();
        let grad = &grad[..n];
        for i in 0..n {
            let p = param[i].to_f32();
            let g = fma::<FMA>(weight_decay, p, grad[i].to_f32() * grad_scale);
            param[i] = P::from_f32_stochastic(fma::<FMA>(-lr, g, p), random(seed, i as u32));
        }
    }
}

simd_fn! {
    pub(super) fn momentum_piece<P: Elem, G: Elem, M: Elem>(
        param: &mut [P],
        grad: &[G],
        buffer: &mut [M],
        hyper: [f32; 4],
        seed: [u32; 2],
    ) {
        let [lr, weight_decay, grad_scale, momentum] = hyper;
        let n = param.len();
        let (grad, buffer) = (&grad[..n], &mut buffer[..n]);
        for i in 0..n {
            let p = param[i].to_f32();
            let g = fma::<FMA>(weight_decay, p, grad[i].to_f32() * grad_scale);
            let b = fma::<FMA>(momentum, buffer[i].to_f32(), g);
            let bits = random(seed, i as u32);
            buffer[i] = M::from_f32_stochastic(b, bits >> 16);
            param[i] = P::from_f32_stochastic(fma::<FMA>(-lr, b, p), bits);
        }
    }
}

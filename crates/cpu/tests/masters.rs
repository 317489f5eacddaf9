//! bf16 parameters with float32 masters against float32 parameters, bit for bit.

mod support;

use half::bf16;
use plimsoll_cpu::kernels::simd::{Isa, isa};
use plimsoll_cpu::kernels::*;
use plimsoll_quant::{AdamW8bit, STATE_BLOCK, State8bit, join_master, split_master};
use support::*;

const BETAS: (f32, f32) = (0.9, 0.95);

fn hyper(step: i32) -> AdamW {
    let (beta1, beta2) = BETAS;
    AdamW {
        lr: 1e-2,
        beta1,
        beta2,
        eps: 1e-8,
        weight_decay: 0.1,
        bias_correction1: 1.0 - beta1.powi(step),
        bias_correction2: 1.0 - beta2.powi(step),
        grad_scale: 0.5,
    }
}

/// bf16 weights and lower halves, which start at zero.
#[derive(Clone)]
struct Masters {
    weight: Vec<bf16>,
    low: Vec<i16>,
}

impl Masters {
    fn new(n: usize) -> Masters {
        Masters { weight: random(n, 1), low: vec![0; n] }
    }

    /// The float32 numbers, of which the weights must be the nearest in bf16.
    fn values(&self) -> Vec<f32> {
        let pairs = self.weight.iter().zip(&self.low);
        let joined = pairs.map(|(weight, low)| {
            let x = join_master(weight.to_bits(), *low);
            let nearest = bf16::from_f32(x);
            assert!(*weight == nearest || *low == i16::MIN, "{weight} is not nearest to {x:e}");
            x
        });
        joined.collect()
    }
}

fn assert_bits(found: &[f32], expected: &[f32], what: &str) {
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        assert_eq!(a.to_bits(), b.to_bits(), "{what}: element {i} is {a:e}, expected {b:e}");
    }
}

/// a b + c, rounded as the kernels of this processor do.
fn fma(a: f32, b: f32, c: f32) -> f32 {
    let fused = isa() != Isa::Portable || cfg!(target_arch = "aarch64");
    if fused { a.mul_add(b, c) } else { a * b + c }
}

/// AdamW over float32 parameters, written down once more.
fn reference(p: &mut [f32], g: &[bf16], m: &mut [f32], v: &mut [f32], h: &AdamW) {
    for i in 0..p.len() {
        let g = g[i].to_f32() * h.grad_scale;
        m[i] = fma(h.beta1, m[i], (1.0 - h.beta1) * g);
        v[i] = fma(h.beta2, v[i], (1.0 - h.beta2) * g * g);
        let denominator = fma(v[i].sqrt(), 1.0 / h.bias_correction2.sqrt(), h.eps);
        let step = h.lr / h.bias_correction1 * m[i] / denominator;
        p[i] = fma(p[i], 1.0 - h.lr * h.weight_decay, -step);
    }
}

#[test]
fn adamw_is_that_of_float32_parameters() {
    for n in [1, 255, 1000, 40_000] {
        let steps = if n > 1000 { 12 } else { 300 };
        let gradient = |step: i32| random::<bf16>(n, 10 + step as u64);
        let (mut p, mut m, mut v) = (Masters::new(n).values(), vec![0.0; n], vec![0.0; n]);
        for step in 1..=steps {
            reference(&mut p, &gradient(step), &mut m, &mut v, &hyper(step));
        }
        let results = in_pools(|| {
            let (mut x, mut m, mut v) = (Masters::new(n), vec![0.0f32; n], vec![0.0f32; n]);
            for step in 1..=steps {
                let (g, rounding) = (gradient(step), Rounding::new(step as u64));
                let Masters { weight, low } = &mut x;
                adamw_masters(weight, low, &g, (&mut m, &mut v), &hyper(step), rounding);
            }
            (x.values(), m, v)
        });
        for result in results {
            assert_bits(&result.0, &p, "parameters");
            assert_bits(&result.1, &m, "m");
            assert_bits(&result.2, &v, "v");
        }
    }
}

/// Moments in bf16 have the random bits that they have without masters.
#[test]
fn bf16_moments_are_rounded_by_place() {
    let n = 50_000;
    let (mut p, mut m, mut v) =
        (Masters::new(n).values(), vec![bf16::ZERO; n], vec![bf16::ZERO; n]);
    let (mut x, mut m1, mut v1) = (Masters::new(n), m.clone(), v.clone());
    for step in 1..=4 {
        let g = random::<bf16>(n, 10 + step as u64);
        // A part of a tensor, which starts somewhere.
        let rounding = Rounding::new(step as u64).starting_at(12_800);
        adamw(&mut p, &g, &mut m, &mut v, &hyper(step), rounding);
        let Masters { weight, low } = &mut x;
        adamw_masters(weight, low, &g, (&mut m1, &mut v1), &hyper(step), rounding);
    }
    assert_bits(&x.values(), &p, "parameters");
    assert!(m == m1 && v == v1);
}

#[test]
fn adamw8bit_is_that_of_float32_parameters() {
    let (beta1, beta2) = BETAS;
    let hyper = |step: i32| AdamW8bit {
        lr: 1e-2,
        beta1,
        beta2,
        eps: 1e-8,
        weight_decay: 0.1,
        bias_correction1: 1.0 - beta1.powi(step),
        bias_correction2: 1.0 - beta2.powi(step),
        grad_scale: 0.5,
    };
    for n in [1usize, 255, 256, 1000, 50_000] {
        let blocks = n.div_ceil(STATE_BLOCK);
        let state = || (vec![0u8; n], vec![0u8; n], vec![0.0f32; blocks], vec![0.0f32; blocks]);
        let gradient = |step: i32| {
            let mut g = random::<bf16>(n, 10 + step as u64);
            g.chunks_mut(STATE_BLOCK).step_by(3).for_each(|block| block.fill(bf16::ZERO));
            g[n / 2] = if step == 2 { bf16::INFINITY } else { bf16::from_f32(1e-3) };
            g
        };
        let (mut p, mut expected) = (Masters::new(n).values(), state());
        let (mut x, mut found) = (Masters::new(n), state());
        fn slices(s: &mut (Vec<u8>, Vec<u8>, Vec<f32>, Vec<f32>)) -> State8bit<'_> {
            State8bit { m: &mut s.0, v: &mut s.1, m_absmax: &mut s.2, v_absmax: &mut s.3 }
        }
        for step in 1..=20 {
            let g = gradient(step);
            let wide: Vec<f32> = g.iter().map(|g| g.to_f32()).collect();
            plimsoll_quant::adamw8bit(&mut p, &wide, slices(&mut expected), &hyper(step));
            let Masters { weight, low } = &mut x;
            let (state, rounding) = (slices(&mut found), Rounding::new(3));
            adamw8bit_masters(weight, low, &g, state, &hyper(step), rounding);
        }
        assert_bits(&x.values(), &p, "parameters");
        assert!(found == expected, "{n} elements: other state");
    }
}

#[test]
fn sgd_is_that_of_float32_parameters() {
    let (n, rates) = (30_000, (0.1, 0.01, 0.5));
    let start = Masters::new(n);
    let (mut plain, mut p, mut buffer) = (start.values(), start.values(), vec![0.0f32; n]);
    let (mut plain_masters, mut masters, mut velocity) = (start.clone(), start, vec![0.0f32; n]);
    for step in 0..10 {
        let (g, rounding) = (random::<bf16>(n, 10 + step), Rounding::new(step));
        sgd::<_, _, f32>(&mut plain, &g, None, rates, rounding);
        sgd(&mut p, &g, Some((&mut buffer, 0.9, false)), rates, rounding);
        let Masters { weight, low } = &mut plain_masters;
        sgd_masters::<_, f32>(weight, low, &g, None, rates, rounding);
        let Masters { weight, low } = &mut masters;
        sgd_masters(weight, low, &g, Some((&mut velocity, 0.9)), rates, rounding);
    }
    assert_bits(&plain_masters.values(), &plain, "plain");
    assert_bits(&masters.values(), &p, "momentum");
    assert_bits(&velocity, &buffer, "velocity");
}

/// Thousands of steps of which rounding to bf16 would lose every one add up exactly.
#[test]
fn tiny_updates_are_not_lost() {
    let (n, steps) = (200, 4000);
    let (rate, g) = (2f32.powi(-20), vec![bf16::ONE; n]);
    let (mut weight, mut low) = (vec![bf16::ONE; n], vec![0; n]);
    for step in 1..=steps {
        let (rates, rounding) = ((rate, 0.0, 1.0), Rounding::new(step));
        sgd_masters::<_, f32>(&mut weight, &mut low, &g, None, rates, rounding);
        let exact = 1.0 - step as f32 * rate;
        assert_eq!(join_master(weight[0].to_bits(), low[0]), exact);
        assert_eq!(bf16::from_f32(weight[0].to_f32() - rate), weight[0], "a step shows by itself");
    }
    let end = bf16::from_f32(1.0 - steps as f32 * rate);
    assert!(end < bf16::ONE && weight.iter().all(|w| *w == end));
}

#[test]
fn what_is_no_number_stays_none() {
    let (mut weight, mut low) = (vec![bf16::ONE; 4], vec![0; 4]);
    let g = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0].map(bf16::from_f32);
    let (rates, rounding) = ((0.1, 0.0, 1.0), Rounding::new(1));
    sgd_masters::<_, f32>(&mut weight, &mut low, &g, None, rates, rounding);
    assert!(weight[0].is_nan() && low[0] == 0);
    assert_eq!(weight[1..], [bf16::NEG_INFINITY, bf16::INFINITY, bf16::ONE]);
    // The largest float32 number is nearer to infinity than to the largest bf16 number.
    let (weight, low) = split_master(f32::MAX);
    assert_eq!(bf16::from_bits(weight), bf16::INFINITY);
    assert_eq!(join_master(weight, low), f32::MAX);
}

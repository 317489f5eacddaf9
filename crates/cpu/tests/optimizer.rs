//! Optimizer steps against float64, and the fairness of stochastic rounding.

mod support;

use half::bf16;
use plimsoll_cpu::kernels::*;
use support::*;

fn hyper(step: i32) -> AdamW {
    let (beta1, beta2) = (0.9f32, 0.95f32);
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

fn reference(p: &mut [f64], g: &[f64], m: &mut [f64], v: &mut [f64], h: &AdamW) {
    let f = |x: f32| x as f64;
    for i in 0..p.len() {
        let g = g[i] * f(h.grad_scale);
        p[i] *= 1.0 - f(h.lr) * f(h.weight_decay);
        m[i] = f(h.beta1) * m[i] + (1.0 - f(h.beta1)) * g;
        v[i] = f(h.beta2) * v[i] + (1.0 - f(h.beta2)) * g * g;
        let denominator = v[i].sqrt() / f(h.bias_correction2).sqrt() + f(h.eps);
        p[i] -= f(h.lr) / f(h.bias_correction1) * m[i] / denominator;
    }
}

fn steps<P: Elem, M: Elem>(n: usize) {
    let start: Vec<P> = random(n, 1);
    let (mut p64, mut m64, mut v64) = (to_f64(&start), vec![0.0; n], vec![0.0; n]);
    for step in 1..=3 {
        let g: Vec<f32> = random(n, 10 + step as u64);
        reference(&mut p64, &to_f64(&g), &mut m64, &mut v64, &hyper(step));
    }
    let results = in_pools(|| {
        let (mut p, mut m, mut v) = (start.clone(), vec![M::default(); n], vec![M::default(); n]);
        for step in 1..=3 {
            let g: Vec<f32> = random(n, 10 + step as u64);
            adamw(&mut p, &g, &mut m, &mut v, &hyper(step), Rounding::new(step as u64));
        }
        p
    });
    assert_same_bits(&results);
    let tolerance = if P::IS_F32 && M::IS_F32 { 1e-6 } else { 3e-2 };
    assert_close(&results[0], &p64, tolerance, "adamw");
}

#[test]
fn adamw_matches() {
    for n in [1, 15, 1000, 40_000] {
        steps::<f32, f32>(n);
        steps::<f32, bf16>(n);
        steps::<bf16, f32>(n);
        steps::<bf16, bf16>(n);
    }
}

#[test]
fn sgd_matches() {
    let n = 20_000;
    let start: Vec<f32> = random(n, 1);
    let (lr, wd, scale, momentum) = (0.1f32, 0.01f32, 0.5f32, 0.9f32);
    let (mut p, mut plain, mut buffer) = (start.clone(), start.clone(), vec![NAN; n]);
    let (mut p64, mut plain64, mut b64) = (to_f64(&start), to_f64(&start), vec![0.0; n]);
    for step in 0..3 {
        let g: Vec<f32> = random(n, 10 + step);
        let rounding = Rounding::new(step);
        sgd(&mut p, &g, Some((&mut buffer, momentum, step == 0)), (lr, wd, scale), rounding);
        sgd::<_, _, f32>(&mut plain, &g, None, (lr, wd, scale), rounding);
        for i in 0..n {
            let g = g[i] as f64 * scale as f64;
            plain64[i] -= lr as f64 * (g + wd as f64 * plain64[i]);
            let g = g + wd as f64 * p64[i];
            b64[i] = if step == 0 { g } else { momentum as f64 * b64[i] + g };
            p64[i] -= lr as f64 * b64[i];
        }
    }
    assert_close(&p, &p64, 1e-6, "momentum");
    assert_close(&plain, &plain64, 1e-6, "sgd");
}

#[test]
fn stochastic_rounding_is_unbiased() {
    // A step far below the spacing of bf16 around 1 (2^-7 above, 2^-8 below) must
    // move the mean by itself.
    let n = 200_000;
    let step = 3e-4f32;
    let mut p = vec![bf16::ONE; n];
    let g = vec![1.0f32; n];
    let mut moved = 0.0;
    for seed in 0..10 {
        sgd::<_, _, f32>(&mut p, &g, None, (step, 0.0, 1.0), Rounding::new(seed));
        moved = 1.0 - to_f64(&p).iter().sum::<f64>() / n as f64;
        let expected = (seed + 1) as f64 * step as f64;
        // Standard error of the mean: below 2^-8 / 2 * sqrt(steps / n).
        let sigma = 2f64.powi(-9) * ((seed + 1) as f64 / n as f64).sqrt();
        assert!((moved - expected).abs() < 5.0 * sigma, "{moved} {expected} {sigma}");
    }
    assert!(moved > 2.9e-3);
    // Neighbours and seeds are independent: two streams agree half of the time.
    let round = |seed: u64| -> Vec<bool> {
        let mut p = vec![bf16::ONE; n];
        let half = 2f32.powi(-9);
        sgd::<_, _, f32>(&mut p, &g, None, (half, 0.0, 1.0), Rounding::new(seed));
        p.iter().map(|p| *p == bf16::ONE).collect()
    };
    let (a, b) = (round(1), round(2));
    assert_eq!(a, round(1));
    for agree in [
        a.iter().zip(&b).filter(|(a, b)| a == b).count(),
        a.iter().zip(&a[1..]).filter(|(a, b)| a == b).count(),
        a.iter().zip(&a[64..]).filter(|(a, b)| a == b).count(),
        a.iter().filter(|a| **a).count(),
    ] {
        assert!((agree as f64 / n as f64 - 0.5).abs() < 0.006, "{agree} of {n}");
    }
}

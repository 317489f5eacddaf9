//! 8-bit AdamW against the reference of `plimsoll-quant`, bit for bit.

mod support;

use half::bf16;
use plimsoll_cpu::kernels::{Elem, Rounding, adamw8bit};
use plimsoll_quant::{AdamW8bit, STATE_BLOCK, State8bit};
use support::*;

fn hyper(step: i32) -> AdamW8bit {
    let (beta1, beta2) = (0.9f32, 0.95f32);
    AdamW8bit {
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

/// A step over p with gradient g: the kernel or the reference.
type Step<'a, P, G> = &'a (dyn Fn(&mut [P], &[G], State8bit<'_>, i32) + Sync);

/// Bits of everything after four steps over n elements; gradients have blocks of
/// zeros, magnitudes over many decades, and one that is not finite.
fn run<P: Elem, G: Elem>(n: usize, update: Step<P, G>) -> (Vec<u32>, Vec<u8>, Vec<u32>) {
    let blocks = n.div_ceil(STATE_BLOCK);
    let mut p: Vec<P> = random(n, 1);
    let (mut m, mut v) = (vec![0u8; n], vec![0u8; n]);
    let (mut m_absmax, mut v_absmax) = (vec![0.0f32; blocks], vec![0.0f32; blocks]);
    for step in 1..=4 {
        let raw: Vec<f32> = random(n, 10 + step as u64);
        let mut g: Vec<G> = raw.iter().map(|x| G::from_f32(x * x * x)).collect();
        g.chunks_mut(STATE_BLOCK).step_by(3).for_each(|block| block.fill(G::from_f32(0.0)));
        g[n / 2] = G::from_f32(if step == 2 { f32::INFINITY } else { 1e-3 });
        let state =
            State8bit { m: &mut m, v: &mut v, m_absmax: &mut m_absmax, v_absmax: &mut v_absmax };
        update(&mut p, &g, state, step);
    }
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
    let p: Vec<f32> = p.iter().map(|p| p.to_f32()).collect();
    let scales = [bits(&m_absmax), bits(&v_absmax)].concat();
    (bits(&p), [m, v].concat(), scales)
}

#[test]
fn the_kernel_is_the_reference() {
    for n in [1, 255, 256, 1000, 50_000] {
        let expected = run::<f32, f32>(n, &|p, g, state, step| {
            plimsoll_quant::adamw8bit(p, g, state, &hyper(step));
        });
        let results = in_pools(|| {
            run::<f32, f32>(n, &|p, g, state, step| {
                adamw8bit(p, g, state, &hyper(step), Rounding::new(3));
            })
        });
        for result in results {
            assert!(result == expected, "{n} elements");
        }
    }
}

#[test]
fn bf16_parameters_are_rounded_by_place() {
    let n = 40_000;
    let step = |p: &mut [bf16], g: &[bf16], state: State8bit<'_>, step: i32| {
        adamw8bit(p, g, state, &hyper(step), Rounding::new(step as u64));
    };
    let results = in_pools(|| run::<bf16, bf16>(n, &step));
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
    // The state is that of the same gradients with float32 parameters.
    let f32_state = run::<f32, bf16>(n, &|p, g, state, step| {
        adamw8bit(p, g, state, &hyper(step), Rounding::new(0));
    });
    assert!(results[0].1 == f32_state.1 && results[0].2 == f32_state.2);
    let float = |bits: &[u32]| bits.iter().map(|b| f32::from_bits(*b)).collect::<Vec<f32>>();
    let expected: Vec<f64> = float(&f32_state.0).iter().map(|x| f64::from(*x)).collect();
    assert_close(&float(&results[0].0), &expected, 3e-2, "parameters");
}

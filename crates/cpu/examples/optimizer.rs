//! Speed of the updates on tensors that no cache holds:
//! `cargo run --release -p plimsoll-cpu --example optimizer [ELEMENTS [THREADS [RUNS]]]`.
//! One line for each type of weights and state: the best and the median of some runs,
//! in GB/s of the bytes that an update moves.

use half::bf16;
use plimsoll_cpu::kernels::*;
use plimsoll_cpu::pool::{self, Pool};
use plimsoll_quant::{AdamW8bit, State8bit};
use std::time::Instant;

fn values<T: Elem>(n: usize) -> Vec<T> {
    (0..n).map(|i| T::from_f32(((i * 37 % 101) as f32 - 50.0) * 0.02)).collect()
}

fn line(name: &str, elements: usize, bytes: usize, runs: usize, mut f: impl FnMut()) {
    f();
    let mut seconds: Vec<f64> = (0..runs.max(1))
        .map(|_| {
            let started = Instant::now();
            f();
            started.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    let moved = (elements * bytes) as f64;
    let (best, median) = (seconds[0], seconds[seconds.len() / 2]);
    println!(
        "{name:<28} {bytes:>3} B  best {:>7.2} ms {:>6.1} GB/s  median {:>7.2} ms {:>6.1} GB/s",
        best * 1e3,
        moved / best * 1e-9,
        median * 1e3,
        moved / median * 1e-9
    );
}

fn adamw_line<P: Elem, S: Elem>(name: &str, n: usize, runs: usize) {
    let hyper = AdamW {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.01,
        bias_correction1: 0.1,
        bias_correction2: 0.001,
        grad_scale: 0.5,
    };
    let (mut param, grad) = (values::<P>(n), values::<P>(n));
    let (mut m, mut v) = (vec![S::default(); n], vec![S::default(); n]);
    let bytes = 3 * size_of::<P>() + 4 * size_of::<S>();
    line(name, n, bytes, runs, || {
        adamw(&mut param, &grad, &mut m, &mut v, &hyper, Rounding::new(1));
    });
}

fn adamw8bit_line<P: Elem>(name: &str, n: usize, runs: usize) {
    let hyper = AdamW8bit {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.01,
        bias_correction1: 0.1,
        bias_correction2: 0.001,
        grad_scale: 0.5,
    };
    let (mut param, grad) = (values::<P>(n), values::<P>(n));
    let (mut m, mut v) = (vec![0u8; n], vec![0u8; n]);
    let blocks = n.div_ceil(256);
    let (mut m_absmax, mut v_absmax) = (vec![0.0f32; blocks], vec![0.0f32; blocks]);
    line(name, n, 3 * size_of::<P>() + 4, runs, || {
        let state =
            State8bit { m: &mut m, v: &mut v, m_absmax: &mut m_absmax, v_absmax: &mut v_absmax };
        adamw8bit(&mut param, &grad, state, &hyper, Rounding::new(1));
    });
}

fn sgd_line<P: Elem>(name: &str, n: usize, runs: usize) {
    let (mut param, grad, mut velocity) = (values::<P>(n), values::<P>(n), vec![0.0f32; n]);
    line(name, n, 3 * size_of::<P>() + 8, runs, || {
        let velocity = Some((&mut velocity[..], 0.9, false));
        sgd(&mut param, &grad, velocity, (1e-3, 0.01, 0.5), Rounding::new(1));
    });
}

fn main() {
    let mut args = std::env::args().skip(1).map(|a| a.parse().ok());
    let n = args.next().flatten().unwrap_or(50_000_000);
    let threads = args.next().flatten().unwrap_or_else(pool::threads);
    let runs = args.next().flatten().unwrap_or(10);
    println!("{:?}, {threads} threads, {n} elements, {runs} runs", simd::isa());
    Pool::new(threads).expect("threads").install(|| {
        adamw_line::<f32, f32>("adamw f32, f32 state", n, runs);
        adamw_line::<bf16, f32>("adamw bf16, f32 state", n, runs);
        adamw_line::<bf16, bf16>("adamw bf16, bf16 state", n, runs);
        adamw8bit_line::<bf16>("adamw8bit bf16", n, runs);
        sgd_line::<bf16>("sgd bf16, f32 momentum", n, runs);
    });
}

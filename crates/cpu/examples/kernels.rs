//! Speed of every kernel at the shapes of SmolLM2-135M (1024 tokens):
//! `cargo run --release -p plimsoll-cpu --example kernels [FILTER [wall|cpu [THREADS]]]`.
//! Prints the best of several runs, in GFLOP/s where arithmetic binds and in GB/s
//! of the bytes that must move where memory does.

use half::bf16;
use plimsoll_cpu::kernels::*;
use plimsoll_cpu::pool::{self, Pool};
use plimsoll_quant::{AdamW8bit, State8bit};
use std::time::Duration;

/// Wall time, or CPU time of this process: with one thread, `cpu` leaves out what
/// other processes take.
fn now(cpu: bool) -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let clock = if cpu { libc::CLOCK_PROCESS_CPUTIME_ID } else { libc::CLOCK_MONOTONIC };
    // SAFETY: `time` is a valid timespec.
    unsafe { libc::clock_gettime(clock, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32).as_secs_f64()
}

struct Bench {
    filter: String,
    cpu: bool,
}

impl Bench {
    fn line(&self, name: &str, amount: f64, unit: &str, mut f: impl FnMut()) {
        if name.contains(&self.filter) {
            // The best of several runs, for about half a second.
            let (start, mut seconds) = (now(false), f64::INFINITY);
            while now(false) - start < 0.5 {
                let once = now(self.cpu);
                f();
                seconds = seconds.min(now(self.cpu) - once);
            }
            let rate = amount / seconds * 1e-9;
            println!("{name:<44} {:>9.1} us {rate:>8.1} {unit}", seconds * 1e6);
        }
    }
}

fn values<T: Elem>(n: usize) -> Vec<T> {
    (0..n).map(|i| T::from_f32(((i * 37 % 101) as f32 - 50.0) * 0.02)).collect()
}

fn main() {
    let mut args = std::env::args().skip(1);
    let bench = Bench {
        filter: args.next().unwrap_or_default(),
        cpu: args.next().as_deref() == Some("cpu"),
    };
    let threads = args.next().and_then(|x| x.parse().ok()).unwrap_or_else(pool::threads);
    println!("{:?}, {threads} threads", simd::isa());
    Pool::new(threads).expect("threads").install(|| {
        skinny(&bench);
        attention::<f32>(&bench, "f32", threads);
        attention::<bf16>(&bench, "bf16", threads);
        rows::<f32>(&bench, "f32");
        rows::<bf16>(&bench, "bf16");
        products(&bench);
    });
}

fn products(bench: &Bench) {
    for (m, n, k) in [(1024, 960, 576), (1024, 3072, 576), (1024, 576, 1536), (16, 3072, 576)] {
        let (x, w): (Vec<bf16>, Vec<bf16>) = (values(m * k), values(n * k));
        let mut y = vec![bf16::ZERO; m * n];
        let mut ws = vec![0.0; gemm_workspace(m, n, k, false)];
        bench.line(&format!("gemm bf16 {m} {n} {k}"), 2.0 * (m * n * k) as f64, "GFLOP/s", || {
            gemm(Mat::new(&x, m, k), Mat::new(&w, n, k).t(), &mut y, n, None, false, &mut ws);
        });
        let (x, w): (Vec<f32>, Vec<f32>) = (values(m * k), values(n * k));
        let mut y = vec![0.0f32; m * n];
        let mut ws = vec![0.0; gemm_workspace(m, n, k, true)];
        bench.line(&format!("gemm f32 {m} {n} {k}"), 2.0 * (m * n * k) as f64, "GFLOP/s", || {
            gemm(Mat::new(&x, m, k), Mat::new(&w, n, k).t(), &mut y, n, None, false, &mut ws);
        });
    }
}

fn skinny(bench: &Bench) {
    let (n, k) = (49152, 576);
    let w: Vec<f32> = values(n * k);
    let bytes = (n * k * 4) as f64;
    let mut total = 0.0;
    bench.line("read (sum of squares)", bytes, "GB/s", || total += sum_of_squares(&w));
    let narrow: Vec<bf16> = values(n * k);
    for m in [1, 2, 4, 8] {
        let x: Vec<f32> = values(m * k);
        let mut y = vec![0.0f32; m * n];
        let mut ws = vec![0.0; m * k];
        bench.line(&format!("linear_skinny f32 {m} x {n} x {k}"), bytes, "GB/s", || {
            linear_skinny(&x, &w, None, &mut y, (m, n, k), false, &mut ws);
        });
        bench.line(&format!("linear_skinny bf16 {m} x {n} x {k}"), bytes / 2.0, "GB/s", || {
            linear_skinny(&x, &narrow, None, &mut y, (m, n, k), false, &mut ws);
        });
    }
    for (n, k) in [(960, 576), (576, 576), (3072, 576), (576, 1536)] {
        let (x, mut y): (Vec<f32>, Vec<f32>) = (values(k), values(n));
        let mut ws = vec![0.0; k];
        let w = &w[..n * k];
        bench.line(&format!("linear_skinny f32 1 x {n} x {k}"), (n * k * 4) as f64, "GB/s", || {
            linear_skinny(&x, w, None, &mut y, (1, n, k), false, &mut ws);
        });
    }
}

fn attention<T: Elem>(bench: &Bench, dtype: &str, threads: usize) {
    for (batch, tokens, heads, kv_heads, head_dim) in
        [(4, 256, 9, 3, 64), (1, 2048, 9, 3, 64), (1, 1024, 8, 2, 128)]
    {
        let scale = 1.0 / (head_dim as f32).sqrt();
        let shape =
            AttentionShape { batch, tokens, heads, kv_heads, head_dim, window: None, scale };
        let rows = batch * tokens;
        let qkv: Vec<T> = values(rows * shape.qkv_width());
        let mut d_qkv = qkv.clone();
        let d_out: Vec<T> = values(rows * heads * head_dim);
        let mut out = d_out.clone();
        let mut lse = vec![0.0; rows * heads];
        let starts = vec![0; rows];
        // Two products forward, five backward, of which causality leaves half.
        let flops = 2.0 * (rows * heads * head_dim * (tokens + 1)) as f64 / 2.0;
        let what = format!("{dtype} {batch} x {tokens} x {heads}/{kv_heads} x {head_dim}");
        let mut ws = vec![0.0; attention_forward_workspace(&shape, threads)];
        bench.line(&format!("attention_forward {what}"), 2.0 * flops, "GFLOP/s", || {
            attention_forward(&qkv, &mut out, &mut lse, &starts, &shape, &mut ws);
        });
        let mut ws = vec![0.0; attention_backward_workspace(&shape, threads)];
        bench.line(&format!("attention_backward {what}"), 5.0 * flops, "GFLOP/s", || {
            attention_backward(&qkv, &out, &d_out, &lse, &starts, &mut d_qkv, &shape, &mut ws);
        });
        let call = AttentionShape { batch: 1, tokens: 1, ..shape };
        for length in [200, 2000] {
            let capacity = 2048;
            let mut k: Vec<T> = values(capacity * kv_heads * head_dim);
            let mut v = k.clone();
            let mut ws = vec![0.0; attention_cached_workspace(&call, capacity, threads)];
            let bytes = (2 * length * kv_heads * head_dim * size_of::<T>()) as f64;
            let qkv = &qkv[..shape.qkv_width()];
            let out = &mut out[..heads * head_dim];
            let what = format!("{dtype} {length} keys x {heads}/{kv_heads} x {head_dim}");
            bench.line(&format!("attention_cached {what}"), bytes, "GB/s", || {
                let start = [length as i32 - 1];
                attention_cached(qkv, &mut k, &mut v, &start, out, &call, &mut ws);
            });
        }
    }
}

fn rows<T: Elem>(bench: &Bench, dtype: &str) {
    let (n, c, i, vocab) = (1024, 576, 1536, 49152);
    let size = size_of::<T>() as f64;
    let gb = |elements: usize| elements as f64 * size;
    let (x, g, w): (Vec<T>, Vec<T>, Vec<T>) = (values(n * c), values(n * c), values(c));
    let (mut out, mut sum, mut rstd) = (x.clone(), x.clone(), vec![1.0; n]);
    let mut d_w = vec![0.0f32; c];
    let mut ws = vec![0.0; rms_norm_backward_workspace(n, c).max(bias_backward_workspace(n, c))];
    bench.line(&format!("rms_norm_forward {dtype}"), gb(2 * n * c), "GB/s", || {
        rms_norm_forward(&x, &w, &mut out, &mut rstd, 1e-5);
    });
    bench.line(&format!("add_rms_norm_forward {dtype}"), gb(4 * n * c), "GB/s", || {
        add_rms_norm_forward(&x, &g, &mut sum, &w, &mut out, &mut rstd, 1e-5);
    });
    bench.line(&format!("rms_norm_backward {dtype}"), gb(4 * n * c), "GB/s", || {
        let d_w = Some(&mut d_w[..]);
        rms_norm_backward(&g, &x, &w, &rstd, &mut out, true, d_w, true, &mut ws);
    });
    bench.line(&format!("bias_backward {dtype}"), gb(n * c), "GB/s", || {
        bias_backward(&g, &mut d_w, false, &mut ws);
    });
    let heads = (9, 3, 64);
    let raw: Vec<T> = values(n * 960);
    let mut qkv = raw.clone();
    let mut head_rstd = vec![1.0; n * 12];
    let (q, k) = (&w[..64], &w[64..128]);
    let mut ws = vec![0.0; head_norm_backward_workspace(n, 64)];
    bench.line(&format!("head_norm_forward {dtype}"), gb(2 * n * 960), "GB/s", || {
        head_norm_forward(&raw, q, k, &mut qkv, &mut head_rstd, heads, 1e-6);
    });
    bench.line(&format!("head_norm_backward {dtype}"), gb(3 * n * 960), "GB/s", || {
        let d_q = Some(&mut d_w[..64]);
        head_norm_backward(&mut qkv, &raw, q, k, &head_rstd, d_q, None, false, heads, &mut ws);
    });
    let mut table = vec![0.0; n * 64];
    // Any angle costs the same.
    table.fill(0.7);
    let positions: Vec<i32> = (0..n as i32).collect();
    bench.line(&format!("rope {dtype}"), gb(2 * n * 768), "GB/s", || {
        rope(&mut qkv, &positions, &table, heads, false);
    });
    let mut gate_up: Vec<T> = values(n * 2 * i);
    let mut gated: Vec<T> = values(n * i);
    bench.line(&format!("swiglu_forward {dtype}"), gb(3 * n * i), "GB/s", || {
        swiglu_forward(&gate_up, &mut gated, i);
    });
    bench.line(&format!("swiglu_backward_in_place {dtype}"), gb(5 * n * i), "GB/s", || {
        swiglu_backward_in_place(&mut gate_up, &gated, i);
    });
    let mut logits: Vec<T> = values(n / 4 * vocab);
    let (labels, mut losses) = (vec![7; n / 4], vec![0.0; n / 4]);
    bench.line(&format!("cross_entropy {dtype}"), gb(2 * n / 4 * vocab), "GB/s", || {
        cross_entropy(&mut logits, &labels, &mut losses, 1.0, vocab);
    });
    bench.line(&format!("cross_entropy_loss {dtype}"), gb(n / 4 * vocab), "GB/s", || {
        cross_entropy_loss(&logits, &labels, &mut losses, vocab);
    });
    let ids: Vec<i32> = (0..n as i32).map(|i| i * 31 % 1000).collect();
    bench.line(&format!("embed {dtype}"), gb(2 * n * c), "GB/s", || {
        embed(&ids, &logits[..1000 * c], &mut out, c);
    });
    let mut d_table = vec![0.0f32; 1000 * c];
    bench.line(&format!("embed_backward {dtype}"), gb(n * c), "GB/s", || {
        embed_backward(&ids, &g, &mut d_table, c, false);
    });
    let p = 16 << 20;
    let hyper = AdamW {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.99,
        eps: 1e-8,
        weight_decay: 0.1,
        bias_correction1: 0.1,
        bias_correction2: 0.01,
        grad_scale: 1.0,
    };
    let (mut param, grad): (Vec<T>, Vec<T>) = (values(p), values(p));
    let (mut m, mut v): (Vec<T>, Vec<T>) = (values(p), vec![T::from_f32(0.1); p]);
    bench.line(&format!("adamw {dtype}"), gb(7 * p), "GB/s", || {
        adamw(&mut param, &grad, &mut m, &mut v, &hyper, Rounding::new(1));
    });
    if !T::IS_F32 {
        let (mut weight, mut low): (Vec<bf16>, _) = (values(p), vec![0i16; p]);
        bench.line("adamw bf16 with masters", gb(9 * p), "GB/s", || {
            let state = (&mut m[..], &mut v[..]);
            adamw_masters(&mut weight, &mut low, &grad, state, &hyper, Rounding::new(1));
        });
    }
    let (mut m8, mut v8) = (vec![0u8; p], vec![0u8; p]);
    let (mut m_absmax, mut v_absmax) = (vec![0.0f32; p / 256], vec![0.0f32; p / 256]);
    let hyper8 = AdamW8bit {
        lr: hyper.lr,
        beta1: hyper.beta1,
        beta2: hyper.beta2,
        eps: hyper.eps,
        weight_decay: hyper.weight_decay,
        bias_correction1: hyper.bias_correction1,
        bias_correction2: hyper.bias_correction2,
        grad_scale: hyper.grad_scale,
    };
    let bytes = (3 * size_of::<T>() + 4) * p;
    bench.line(&format!("adamw8bit {dtype}"), bytes as f64, "GB/s", || {
        let state =
            State8bit { m: &mut m8, v: &mut v8, m_absmax: &mut m_absmax, v_absmax: &mut v_absmax };
        adamw8bit(&mut param, &grad, state, &hyper8, Rounding::new(1));
    });
    bench.line(&format!("sgd {dtype}"), gb(3 * p), "GB/s", || {
        sgd::<_, _, f32>(&mut param, &grad, None, (0.1, 0.0, 1.0), Rounding::new(1));
    });
    bench.line(&format!("add {dtype}"), gb(3 * p), "GB/s", || add(&param, &grad, &mut m));
    bench.line(&format!("scale {dtype}"), gb(2 * p), "GB/s", || scale(&mut m, 0.999));
    bench.line(&format!("fill {dtype}"), gb(p), "GB/s", || fill(&mut m, 0.5));
    bench.line(&format!("convert {dtype}"), gb(2 * p), "GB/s", || convert(&param, &mut m));
    let mut total = 0.0;
    bench.line(&format!("sum_of_squares {dtype}"), gb(p), "GB/s", || {
        total += sum_of_squares(&grad);
    });
    assert!(total >= 0.0);
}

//! No kernel allocates: a counting allocator watches every thread.

mod support;

use half::bf16;
use plimsoll_cpu::kernels::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use support::random;

struct Counting;

static COUNT: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        unsafe { System.dealloc(pointer, layout) }
    }
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs `f` a few times to warm the pool, then counts.
fn silent(what: &str, mut f: impl FnMut()) {
    for _ in 0..2 {
        f();
    }
    let before = COUNT.load(Ordering::Relaxed);
    for _ in 0..5 {
        f();
    }
    let count = COUNT.load(Ordering::Relaxed) - before;
    assert_eq!(count, 0, "{what} allocated {count} times");
}

fn products<T: Elem>() {
    let (m, n, k) = (300, 500, 800);
    let (x, w, d_y): (Vec<T>, Vec<T>, Vec<T>) =
        (random(m * k, 1), random(n * k, 2), random(m * n, 3));
    let bias: Vec<T> = random(n, 4);
    let size =
        [(m, n, k), (m, k, n), (n, k, m)].map(|(m, n, k)| gemm_workspace(m, n, k, T::IS_F32));
    let mut ws = vec![0.0; size.into_iter().max().unwrap()];
    let (mut y, mut d_x, mut d_w) = (d_y.clone(), x.clone(), w.clone());
    let (xm, wm, gm) = (Mat::new(&x, m, k), Mat::new(&w, n, k), Mat::new(&d_y, m, n));
    silent("gemm", || {
        gemm(xm, wm.t(), &mut y, n, Some(&bias), false, &mut ws);
        gemm(gm, wm, &mut d_x, k, None, false, &mut ws);
        gemm(gm.t(), xm, &mut d_w, k, None, true, &mut ws);
    });
    for m in [1, 8] {
        silent("linear_skinny", || {
            let (x, y) = (&x[..m * k], &mut y[..m * n]);
            linear_skinny(x, &w, Some(&bias), y, (m, n, k), false, &mut ws);
        });
    }
    let k = 768;
    let (codes, absmax) = (vec![0x5a; n * k / 2], vec![0.5f32; n * k / 64]);
    let codebook = plimsoll_program::Codebook::Nf4.values();
    let slice = QuantizedSlice { codebook, codes: &codes, scales: Scales::Plain(&absmax) };
    for m in [1, QUANTIZED_ROWS] {
        silent("linear_quantized", || {
            let (x, y) = ((&x[..m * k], k), (&mut y[..m * n], n));
            let parts = [(slice, n)];
            linear_quantized(x, &parts, Some(&bias), y, (m, n, k), false, &mut ws);
        });
    }
}

fn attention<T: Elem>(threads: usize) {
    for (batch, kv_heads) in [(1, 1), (4, 3)] {
        let shape = AttentionShape {
            batch,
            tokens: 300,
            heads: 3 * kv_heads,
            kv_heads,
            head_dim: 64,
            window: None,
            scale: 0.125,
        };
        let rows = batch * 300;
        let qkv: Vec<T> = random(rows * shape.qkv_width(), 1);
        let d_out: Vec<T> = random(rows * shape.heads * 64, 2);
        let (mut out, mut lse) = (d_out.clone(), vec![0.0; rows * shape.heads]);
        let (mut d_qkv, doc_start) = (qkv.clone(), vec![0; rows]);
        let mut ws = vec![0.0; attention_forward_workspace(&shape, threads)];
        silent("attention_forward", || {
            attention_forward(&qkv, &mut out, &mut lse, &doc_start, &shape, &mut ws);
        });
        let mut ws = vec![0.0; attention_backward_workspace(&shape, threads)];
        silent("attention_backward", || {
            let ws = &mut ws;
            attention_backward(&qkv, &out, &d_out, &lse, &doc_start, &mut d_qkv, &shape, ws);
        });
        for tokens in [1, 50] {
            let call = AttentionShape { tokens, ..shape };
            let capacity = 1500;
            let mut k: Vec<T> = random(batch * capacity * kv_heads * 64, 3);
            let mut v = k.clone();
            let mut ws = vec![0.0; attention_cached_workspace(&call, capacity, threads)];
            let qkv = &qkv[..batch * tokens * shape.qkv_width()];
            let out = &mut out[..batch * tokens * shape.heads * 64];
            let start = vec![1400; batch];
            silent("attention_cached", || {
                attention_cached(qkv, &mut k, &mut v, &start, out, &call, &mut ws);
            });
        }
    }
}

fn rows<T: Elem>() {
    let (n, c) = (200, 576);
    let x: Vec<T> = random(n * c, 1);
    let g: Vec<T> = random(n * c, 2);
    let w: Vec<T> = random(c, 3);
    let (mut out, mut sum, mut rstd) = (x.clone(), x.clone(), vec![0.0; n]);
    let mut d_w = vec![0.0f32; c];
    let mut ws = vec![0.0; rms_norm_backward_workspace(n, c).max(bias_backward_workspace(n, c))];
    silent("rms_norm", || {
        rms_norm_forward(&x, &w, &mut out, &mut rstd, 1e-5);
        add_rms_norm_forward(&x, &g, &mut sum, &w, &mut out, &mut rstd, 1e-5);
        let (d_x, d_w) = (&mut out, Some(&mut d_w[..]));
        rms_norm_backward(&g, &x, &w, &rstd, d_x, true, d_w, true, &mut ws);
        bias_backward(&g, &mut d_w_of(c), false, &mut ws);
    });
    let heads = (4, 2, 72);
    let mut rstd = vec![0.0; n * 6];
    let (q_norm, k_norm) = (&w[..72], &w[72..144]);
    let mut ws = vec![0.0; head_norm_backward_workspace(n, 72)];
    silent("head_norm", || {
        head_norm_forward(&x, q_norm, k_norm, &mut out, &mut rstd, heads, 1e-6);
        let d_q = Some(&mut d_w[..72]);
        head_norm_backward(&mut out, &x, q_norm, k_norm, &rstd, d_q, None, false, heads, &mut ws);
    });
    let mut table = vec![0.0; 72 * n];
    let positions: Vec<i32> = (0..n as i32).collect();
    silent("rope", || {
        support::rope_table(&[0.1; 36], 1.0, &mut table);
        rope(&mut out, &positions, &table, heads, true);
    });
    let half = c / 2;
    let mut gated: Vec<T> = random(n * half, 4);
    silent("swiglu", || {
        swiglu_forward(&x, &mut gated, half);
        swiglu_backward(&x, &gated, &mut out, half);
        swiglu_backward_in_place(&mut out, &gated, half);
    });
    let (labels, mut losses) = (vec![5; n], vec![0.0; n]);
    silent("cross_entropy", || {
        cross_entropy_loss(&x, &labels, &mut losses, c);
        cross_entropy(&mut out, &labels, &mut losses, 0.1, c);
    });
    silent("embed", || {
        embed(&labels, &x, &mut out, c);
        embed_backward(&labels, &g, &mut sum, c, true);
    });
    silent("elementwise", || {
        fill(&mut out, 1.0);
        add(&x, &g, &mut out);
        add_assign(&mut out, &x);
        scale(&mut out, 0.5);
        convert(&out, &mut sum);
        assert!(sum_of_squares(&out) > 0.0);
    });
    let (mut p, mut m, mut v) = (x.clone(), x.clone(), vec![T::from_f32(1.0); n * c]);
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
    silent("optimizers", || {
        adamw(&mut p, &g, &mut m, &mut v, &hyper, Rounding::new(1));
        sgd(&mut p, &g, Some((&mut m, 0.9, false)), (1e-3, 0.0, 1.0), Rounding::new(1));
    });
    let (mut p, mut low) = (vec![bf16::ONE; n * c], vec![0; n * c]);
    silent("optimizers with masters", || {
        adamw_masters(&mut p, &mut low, &g, (&mut m, &mut v), &hyper, Rounding::new(1));
        let momentum = Some((&mut m[..], 0.9));
        sgd_masters(&mut p, &mut low, &g, momentum, (1e-3, 0.0, 1.0), Rounding::new(1));
    });
}

fn d_w_of(c: usize) -> [f32; 576] {
    assert_eq!(c, 576);
    [0.0; 576]
}

#[test]
fn kernels_never_allocate() {
    for threads in [1, 2, 3] {
        let pool = plimsoll_cpu::pool::Pool::new(threads).unwrap();
        pool.install(|| {
            products::<f32>();
            products::<bf16>();
            attention::<f32>(threads);
            attention::<bf16>(threads);
            rows::<f32>();
            rows::<bf16>();
        });
    }
}

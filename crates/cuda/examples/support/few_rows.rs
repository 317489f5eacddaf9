//! Products of few rows, and what shares their launch.

use plimsoll_arch::DType::{self, Bf16, F32, I32};
use plimsoll_program::{Codebook, OpKind, TensorId, View};

use super::ops::{Case, limit, quantized, shape};
use super::{Report, random};

/// (rows of x, parts of w, columns).
type Sizes = (usize, &'static [usize], usize);

pub fn check(report: &mut Report) {
    dense(report);
    adapters(report);
    four_bits(report);
    around(report);
    token(report);
    argmax(report);
}

fn linear(x: View, w: View, y: View) -> OpKind {
    OpKind::Linear { x, w, bias: None, add: None, y, scale: 1.0 }
}

fn dense(report: &mut Report) {
    let sizes = [
        (1, 4096, 4096),
        (1, 2560, 2048),
        (2, 100, 64),
        (3, 33, 2048),
        (4, 48, 5632),
        (5, 257, 1536),
        (8, 515, 576),
        (7, 130, 14_336),
        (8, 64, 4096),
        (1, 3, 16),
        (2, 40, 24),
        (6, 9001, 8),
        (8, 128, 40),
    ];
    for (m, n, k) in sizes {
        for (bias, add, scale, out) in
            [(false, false, 0.5, Bf16), (true, true, 1.0, Bf16), (false, false, 1.0, F32)]
        {
            let mut c = Case::default();
            let (x, w) = (c.random(&[m, k], Bf16), c.random(&[n, k], Bf16));
            let bias = bias.then(|| c.random(&[n], Bf16));
            let add = add.then(|| c.random(&[m, n], Bf16)).map(|t| c.view(t));
            let y = c.out(&[m, n], out);
            let what = format!("few rows {m}x{n}x{k} bias, add {} to {out}", add.is_some());
            let (x, w, y) = (c.view(x), c.view(w), c.view(y));
            c.compare(report, &what, limit(Bf16), &[OpKind::Linear { x, w, bias, add, y, scale }]);
        }
    }
}

/// Columns of something wider, added to in place.
fn adapters(report: &mut Report) {
    for (m, n, rank) in [(1, 256, 16), (8, 1024, 16), (3, 72, 8), (2, 64, 4)] {
        let mut c = Case::default();
        let (low, b) = (c.random(&[m, 3 * rank], Bf16), c.random(&[n, rank], Bf16));
        let y = c.random(&[m, 2 * n], Bf16);
        let part = c.view(y).cols_at(n, n);
        let x = c.view(low).cols_at(rank, rank);
        let kind =
            OpKind::Linear { x, w: c.view(b), bias: None, add: Some(part), y: part, scale: 1.0 };
        c.compare(report, &format!("few rows, adapter {m}x{n} rank {rank}"), limit(Bf16), &[kind]);
    }
}

fn four_bits(report: &mut Report) {
    let sizes: [Sizes; 14] = [
        (1, &[4096, 1024, 1024], 4096),
        (1, &[2048, 256, 256], 2048),
        (2, &[48, 16, 16], 64),
        (3, &[33, 7], 128),
        (4, &[576, 192, 192], 576),
        (8, &[1536], 576),
        (5, &[257], 1536),
        (6, &[2048], 2048),
        (7, &[100, 90, 80], 4096),
        (8, &[256], 4096),
        (1, &[2048], 5632),
        (8, &[65], 14_336),
        (1, &[4096], 14_336),
        // Blocks that cross rows: through memory.
        (4, &[40, 24], 100),
    ];
    for dtype in [F32, Bf16] {
        for (m, rows, k) in sizes {
            for (codebook, nested, bias, add) in [
                (Codebook::Nf4, true, false, true),
                (Codebook::Nf4, false, true, false),
                (Codebook::Fp4, true, true, true),
                (Codebook::Fp4, false, false, false),
            ] {
                if dtype == F32 && (rows[0] * k > 1 << 20 || nested == bias) {
                    continue;
                }
                let mut c = Case::default();
                let w = quantized(&mut c, codebook, nested, rows, k);
                let n = w.rows;
                let x = c.random(&[m, k], dtype);
                let bias = bias.then(|| c.random(&[n], dtype));
                let add = add.then(|| c.random(&[m, n], dtype)).map(|t| c.view(t));
                let y = c.out(&[m, n], dtype);
                let what = format!("four bits {dtype} {m}x{rows:?}x{k} {codebook:?} {nested}");
                let (x, y) = (c.view(x), c.view(y));
                let kind = OpKind::LinearQuantized { x, w, bias, add, y };
                c.compare(report, &what, limit(dtype), &[kind]);
            }
        }
    }
}

/// RMSNorm before and SwiGLU behind a product: one launch.
fn around(report: &mut Report) {
    for (m, n, k) in [
        (1, 14_336, 4096),
        (1, 5632, 2048),
        (3, 100, 64),
        (8, 1536, 576),
        (2, 77, 1536),
        (8, 40, 4096),
    ] {
        for four_bits in [false, true] {
            for (norm, gated) in [(true, false), (false, true), (true, true)] {
                let mut c = Case::default();
                let x = c.random(&[m, k], Bf16);
                let weight = c.random(&[k], Bf16);
                let normed = c.between(&[m, k], Bf16);
                let rstd = c.between(&[m, 1], F32);
                let width = if gated { 2 * n } else { n };
                let y = if gated { c.between(&[m, width], Bf16) } else { c.out(&[m, width], Bf16) };
                let act = c.out(&[m, n], Bf16);
                let from = c.view(if norm { normed } else { x });
                let parts = [n; 2];
                let product = if four_bits {
                    let parts = &parts[..if gated { 2 } else { 1 }];
                    let w = quantized(&mut c, Codebook::Nf4, m % 2 == 1, parts, k);
                    OpKind::LinearQuantized { x: from, w, bias: None, add: None, y: c.view(y) }
                } else {
                    let values = random(5, width * k, 1.0 / (k as f32).sqrt());
                    let w = c.tensor(&[width, k], Bf16, values);
                    linear(from, c.view(w), c.view(y))
                };
                let mut kinds = Vec::new();
                if norm {
                    kinds.push(OpKind::RmsNorm { x, weight, out: normed, rstd, eps: 1e-5 });
                }
                kinds.push(product);
                if gated {
                    kinds.push(OpKind::SwiGlu { gate_up: y, act });
                }
                let what = format!("{m}x{n}x{k} four bits {four_bits} norm {norm} gated {gated}");
                // The CPU rounds gate and up, and its matrix, to bf16 on the way.
                c.compare_fused(report, &what, 2.0 * limit(Bf16), &kinds, 1);
            }
        }
    }
}

/// RoPE, append and attention of one token: one launch.
fn token(report: &mut Report) {
    for (batch, start, capacity, (h, k), d, window) in [
        (1, 150, 256, (32, 8), 128, None),
        (1, 2500, 3000, (32, 8), 128, None),
        (1, 2999, 3000, (32, 4), 64, None),
        (3, 700, 1000, (9, 3), 64, Some(300)),
        (2, 0, 64, (4, 4), 96, None),
        (8, 511, 512, (24, 2), 64, None),
    ] {
        let shape = shape(batch, 1, (h, k), d, window);
        let width = (h + 2 * k) * d;
        let mut c = Case::default();
        let source = c.random(&[batch, width], Bf16);
        let rows = c.tensor(&[batch], I32, (0..batch).rev().map(|r| r as f32).collect());
        let qkv = c.between(&[batch, 1, width], Bf16);
        let at = |b: usize| (start / (b + 1)) as f32;
        let positions = c.tensor(&[batch, 1], I32, (0..batch).map(at).collect());
        let starts = c.tensor(&[batch], I32, (0..batch).map(at).collect());
        let angle = |i: usize| (i / d) as f32 / 1e4f32.powf((i % (d / 2)) as f32 / d as f32 * 2.0);
        let turn = |i: usize| if i % d < d / 2 { angle(i).cos() } else { angle(i).sin() };
        let table = c.tensor(&[capacity, 2, d / 2], F32, (0..capacity * d).map(turn).collect());
        let cache = |c: &mut Case, seed| -> TensorId {
            let values = random(seed, batch * capacity * k * d, 1.0);
            c.tensor(&[batch, capacity, k * d], DType::Bf16, values)
        };
        let (k_cache, v_cache) = (cache(&mut c, 1), cache(&mut c, 2));
        let out = c.out(&[batch, 1, h * d], Bf16);
        let kinds = [
            OpKind::GatherRows { x: source, rows, out: qkv },
            OpKind::Rope { qkv, positions, table, shape, inverse: false },
            OpKind::AttentionCached { qkv, start: starts, k_cache, v_cache, out, shape, capacity },
        ];
        let what = format!("one token at {start} of {capacity}, {shape:?}");
        c.compare_fused(report, &what, limit(Bf16), &kinds, 2);
    }
}

fn argmax(report: &mut Report) {
    for (rows, columns) in [(1, 128_256), (3, 1003), (8, 32_000), (2, 7)] {
        let mut c = Case::default();
        let mut values = random(3, rows * columns, 1.0);
        // Ties, and what is no number.
        for row in values.chunks_mut(columns) {
            (row[1], row[columns / 2], row[columns - 1]) = (f32::NAN, 9.0, 9.0);
        }
        let x = c.tensor(&[rows, columns], F32, values);
        let out = c.tensor(&[rows], I32, vec![-1.0; rows]);
        c.compare(report, &format!("argmax {rows}x{columns}"), 0.0, &[OpKind::Argmax { x, out }]);
    }
}

//! Matrix products against a float64 reference, for every storage type, layout
//! and tile edge.

mod support;

use half::bf16;
use plimsoll_cpu::kernels::{Elem, Mat, gemm, gemm_workspace, linear_skinny};
use plimsoll_cpu::kernels::{linear_skinny_workspace, simd};
use support::{NAN, assert_close, assert_same_bits, in_pools, random};

const SHAPES: [(usize, usize, usize); 14] = [
    (1, 1, 1),
    (1, 17, 3),
    (5, 15, 7),
    (6, 16, 8),
    (7, 33, 40),
    (13, 31, 385),
    (64, 48, 576),
    (130, 257, 100),
    (145, 300, 900),
    (3, 4100, 20),
    (1600, 70, 33),
    (1537, 2049, 5),
    (40, 40, 0),
    (0, 5, 5),
];

fn reference<A: Elem, B: Elem>(
    (m, n, k): (usize, usize, usize),
    a: impl Fn(usize, usize) -> A,
    b: impl Fn(usize, usize) -> B,
    c: impl Fn(usize, usize) -> f32,
    bias: impl Fn(usize) -> f32,
) -> Vec<f64> {
    let mut out = Vec::with_capacity(m * n);
    for i in 0..m {
        for j in 0..n {
            let mut sum = c(i, j) as f64 + bias(j) as f64;
            for p in 0..k {
                sum += a(i, p).to_f32() as f64 * b(p, j).to_f32() as f64;
            }
            out.push(sum);
        }
    }
    out
}

fn check<A: Elem, B: Elem, C: Elem>(shape: (usize, usize, usize), form: usize, extra: bool) {
    let (m, n, k) = shape;
    let a: Vec<A> = random(m * k, 1);
    let b: Vec<B> = random(k * n, 2);
    let ldc = n + 3 * form;
    let c: Vec<C> = random((m * ldc).max(1), 3);
    let bias: Vec<B> = random(n, 4);
    // Form 0: y = x wᵀ; 1: d_x = d_y w; 2: d_w = d_yᵀ x.
    let av = if form == 2 { Mat::new(&a, k, m).t() } else { Mat::new(&a, m, k) };
    let bv = if form == 0 { Mat::new(&b, n, k).t() } else { Mat::new(&b, k, n) };
    let bias = (extra && form == 0).then_some(&bias[..]);
    let expected = reference(
        shape,
        |i, p| if form == 2 { a[p * m + i] } else { a[i * k + p] },
        |p, j| if form == 0 { b[j * k + p] } else { b[p * n + j] },
        |i, j| if extra { c[i * ldc + j].to_f32() } else { 0.0 },
        |j| bias.map_or(0.0, |bias| bias[j].to_f32()),
    );
    let results = in_pools(|| {
        let mut out = c.clone();
        let mut ws = vec![NAN; gemm_workspace(m, n, k, C::IS_F32)];
        gemm(av, bv, &mut out, ldc, bias, extra, &mut ws);
        out
    });
    assert_same_bits(&results);
    let out = &results[0];
    let mut dense = Vec::new();
    for i in 0..m {
        dense.extend_from_slice(&out[i * ldc..i * ldc + n]);
        assert_eq!(&out[i * ldc + n..(i + 1) * ldc], &c[i * ldc + n..(i + 1) * ldc], "gap");
    }
    let tolerance = if C::IS_F32 { 2e-6 } else { 4e-3 };
    assert_close(&dense, &expected, tolerance, &format!("gemm {shape:?} form {form}"));
}

fn check_all() {
    for shape in SHAPES {
        for form in 0..3 {
            for extra in [false, true] {
                check::<f32, f32, f32>(shape, form, extra);
                if shape.0 * shape.1 * shape.2 < 20_000_000 {
                    check::<bf16, bf16, bf16>(shape, form, extra);
                    check::<f32, bf16, f32>(shape, form, extra);
                    check::<bf16, f32, bf16>(shape, form, extra);
                    check::<bf16, bf16, f32>(shape, form, extra);
                }
            }
        }
    }
}

// One test for all instruction sets: the limit holds for the whole process.
#[test]
fn products_match_float64_on_every_instruction_set() {
    for isa in [simd::Isa::Portable, simd::Isa::Avx2, simd::Isa::Avx512] {
        simd::limit_isa(isa);
        check_all();
        for m in 1..=8 {
            for (n, k) in [(1, 1), (5, 15), (33, 64), (130, 577), (2000, 40)] {
                skinny::<f32, f32, f32>(m, n, k);
                skinny::<f32, bf16, f32>(m, n, k);
                skinny::<bf16, bf16, bf16>(m, n, k);
            }
        }
    }
}

fn skinny<X: Elem, W: Elem, Y: Elem>(m: usize, n: usize, k: usize) {
    let x: Vec<X> = random(m * k, 1);
    let w: Vec<W> = random(n * k, 2);
    let bias: Vec<W> = random(n, 3);
    let y: Vec<Y> = random(m * n, 4);
    for extra in [false, true] {
        let bias = extra.then_some(&bias[..]);
        let expected = reference(
            (m, n, k),
            |i, p| x[i * k + p],
            |p, j| w[j * k + p],
            |i, j| if extra { y[i * n + j].to_f32() } else { 0.0 },
            |j| bias.map_or(0.0, |bias| bias[j].to_f32()),
        );
        let results = in_pools(|| {
            let mut out = y.clone();
            let mut ws = vec![NAN; linear_skinny_workspace(m, k)];
            linear_skinny(&x, &w, bias, &mut out, (m, n, k), extra, &mut ws);
            out
        });
        assert_same_bits(&results);
        let tolerance = if Y::IS_F32 { 2e-6 } else { 4e-3 };
        assert_close(&results[0], &expected, tolerance, &format!("skinny {m} {n} {k}"));
    }
}

//! Attention against a float64 reference that builds the whole score matrix.

mod support;

use half::bf16;
use plimsoll_cpu::kernels::*;
use support::*;

#[derive(Clone, Copy, Debug)]
enum Documents {
    One,
    /// A new document every so many tokens, offset by the batch row.
    Every(usize),
}

fn starts(shape: &AttentionShape, documents: Documents) -> Vec<i32> {
    (0..shape.batch)
        .flat_map(|b| {
            (0..shape.tokens).map(move |t| match documents {
                Documents::One => 0,
                Documents::Every(n) => ((t + b) / n * n).saturating_sub(b).min(t) as i32,
            })
        })
        .collect()
}

/// Output, lse and the gradient of qkv for `d_out`.
struct Reference {
    out: Vec<f64>,
    lse: Vec<f64>,
    d_qkv: Vec<f64>,
}

fn reference(qkv: &[f64], d_out: &[f64], doc_start: &[i32], s: &AttentionShape) -> Reference {
    let (t_len, h_len, d, width) = (s.tokens, s.heads, s.head_dim, s.qkv_width());
    let rows = s.batch * t_len;
    let mut out = vec![0.0; rows * h_len * d];
    let mut lse = vec![0.0; rows * h_len];
    let mut d_qkv = vec![0.0; qkv.len()];
    let scale = s.scale as f64;
    for b in 0..s.batch {
        for h in 0..h_len {
            let k_at = (h_len + h / (h_len / s.kv_heads)) * d;
            let v_at = k_at + s.kv_heads * d;
            for t in 0..t_len {
                let row = b * t_len + t;
                let lo = (doc_start[row] as usize)
                    .max(s.window.map_or(0, |w| (t + 1).saturating_sub(w)));
                let at = |j: usize, part: usize| (b * t_len + j) * width + part;
                let q = &qkv[row * width + h * d..][..d];
                let scores: Vec<f64> =
                    (lo..=t).map(|j| scale * dot(q, &qkv[at(j, k_at)..][..d])).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|x| (x - max).exp()).sum();
                lse[row * h_len + h] = max + sum.ln();
                let o = (row * h_len + h) * d;
                let p: Vec<f64> = scores.iter().map(|x| (x - max).exp() / sum).collect();
                for (j, p) in (lo..=t).zip(&p) {
                    for i in 0..d {
                        out[o + i] += p * qkv[at(j, v_at) + i];
                    }
                }
                let g = &d_out[o..o + d];
                let delta = dot(g, &out[o..o + d]);
                for (j, p) in (lo..=t).zip(&p) {
                    let d_s = p * (dot(g, &qkv[at(j, v_at)..][..d]) - delta) * scale;
                    for i in 0..d {
                        d_qkv[at(j, v_at) + i] += p * g[i];
                        d_qkv[row * width + h * d + i] += d_s * qkv[at(j, k_at) + i];
                        d_qkv[at(j, k_at) + i] += d_s * qkv[row * width + h * d + i];
                    }
                }
            }
        }
    }
    Reference { out, lse, d_qkv }
}

fn check<X: Elem>(shape: &AttentionShape, documents: Documents) {
    let rows = shape.batch * shape.tokens;
    let qkv: Vec<X> = random::<f32>(rows * shape.qkv_width(), 1)
        .into_iter()
        .map(|x| X::from_f32(2.0 * x))
        .collect();
    let d_out: Vec<X> = random(rows * shape.heads * shape.head_dim, 2);
    let doc_start = starts(shape, documents);
    let expected = reference(&to_f64(&qkv), &to_f64(&d_out), &doc_start, shape);
    let results = in_pools(|| {
        let threads = plimsoll_cpu::pool::threads();
        let mut out = vec![X::from_f32(NAN); d_out.len()];
        let mut lse = vec![NAN; rows * shape.heads];
        let mut ws = vec![NAN; attention_forward_workspace(shape, threads)];
        attention_forward(&qkv, &mut out, &mut lse, &doc_start, shape, &mut ws);
        let mut d_qkv = vec![X::from_f32(NAN); qkv.len()];
        let mut ws = vec![NAN; attention_backward_workspace(shape, threads)];
        attention_backward(&qkv, &out, &d_out, &lse, &doc_start, &mut d_qkv, shape, &mut ws);
        (out, lse, d_qkv)
    });
    let what = format!("{shape:?} {documents:?}");
    assert_same_bits(&results.iter().map(|r| r.0.clone()).collect::<Vec<_>>());
    assert_same_bits(&results.iter().map(|r| r.1.clone()).collect::<Vec<_>>());
    assert_same_bits(&results.iter().map(|r| r.2.clone()).collect::<Vec<_>>());
    let (out, lse, d_qkv) = &results[0];
    assert_close(out, &expected.out, tolerance::<X>(1e-5), &format!("out {what}"));
    assert_close(lse, &expected.lse, 1e-5, &format!("lse {what}"));
    // The rounding of a bf16 output enters its gradient once more.
    let loose = if X::IS_F32 { 3e-5 } else { 3e-2 };
    assert_close(d_qkv, &expected.d_qkv, loose, &format!("d_qkv {what}"));
}

fn shape(
    (batch, tokens, heads, kv_heads, head_dim): (usize, usize, usize, usize, usize),
    window: Option<usize>,
) -> AttentionShape {
    let scale = 1.0 / (head_dim as f32).sqrt();
    AttentionShape { batch, tokens, heads, kv_heads, head_dim, window, scale }
}

#[test]
fn matches_float64_on_every_instruction_set() {
    for isa in [simd::Isa::Portable, simd::Isa::Avx2, simd::Isa::Avx512] {
        simd::limit_isa(isa);
        for d in [8, 16, 24, 64, 80, 128] {
            for t in [1, 3, 40, 130] {
                for (window, documents) in [
                    (None, Documents::One),
                    (None, Documents::Every(7)),
                    (None, Documents::Every(50)),
                    (Some(1), Documents::One),
                    (Some(33), Documents::Every(60)),
                ] {
                    check::<f32>(&shape((2, t, 3, 1, d), window), documents);
                }
                check::<bf16>(&shape((2, t, 4, 2, d), None), Documents::Every(50));
            }
        }
        // Several blocks of keys, several chunks of two-pass work, many heads a group.
        check::<f32>(&shape((1, 430, 1, 1, 16), None), Documents::One);
        check::<f32>(&shape((1, 401, 14, 2, 64), Some(150)), Documents::One);
        check::<f32>(&shape((3, 65, 2, 2, 256), None), Documents::Every(64));
        decode_matches();
    }
}

#[test]
fn reference_gradient_matches_finite_differences() {
    let shape = shape((1, 5, 4, 2, 4), Some(3));
    let qkv = to_f64(&random::<f32>(5 * shape.qkv_width(), 1));
    let d_out = to_f64(&random::<f32>(5 * 16, 2));
    let doc_start = [0, 0, 2, 2, 2];
    let analytic = reference(&qkv, &d_out, &doc_start, &shape).d_qkv;
    let numeric = differences(&qkv, |x| dot(&reference(x, &d_out, &doc_start, &shape).out, &d_out));
    for (a, n) in analytic.iter().zip(&numeric) {
        assert!((a - n).abs() < 1e-8, "{a} {n}");
    }
}

/// A sequence attended in pieces over a cache equals the sequence attended whole.
fn decode_matches() {
    for (heads, kv_heads, d, window, total) in [
        (3, 1, 64, None, 140),
        (12, 1, 16, Some(20), 60),
        (4, 4, 128, None, 30),
        (2, 1, 8, Some(600), 1100),
    ] {
        cached::<f32, f32>(heads, kv_heads, d, window, total);
        cached::<bf16, bf16>(heads, kv_heads, d, window, total);
        cached::<f32, bf16>(heads, kv_heads, d, window, total);
    }
}

fn cached<X: Elem, C: Elem>(
    heads: usize,
    kv_heads: usize,
    d: usize,
    window: Option<usize>,
    total: usize,
) {
    let whole = shape((2, total, heads, kv_heads, d), window);
    let width = whole.qkv_width();
    // Numbers that every storage type holds exactly.
    let qkv: Vec<X> =
        random::<bf16>(2 * total * width, 1).into_iter().map(|x| X::from_f32(x.to_f32())).collect();
    let zeros = vec![0.0; 2 * total * heads * d];
    let expected = reference(&to_f64(&qkv), &zeros, &vec![0; 2 * total], &whole).out;
    let capacity = total + 5;
    let results = in_pools(|| {
        let threads = plimsoll_cpu::pool::threads();
        let mut k = vec![C::from_f32(NAN); 2 * capacity * kv_heads * d];
        let mut v = k.clone();
        let mut outs = vec![X::from_f32(NAN); 2 * total * heads * d];
        // Prefill, a few tokens at a time, then one by one; row 1 lags behind.
        let prompt = total - 12;
        let mut at = [0, 0];
        for step in [prompt, 1, 2, 1, 5, 1, 1] {
            let call = AttentionShape { tokens: step, ..whole };
            let mut piece = Vec::new();
            for (b, at) in at.iter().enumerate() {
                piece.extend_from_slice(&qkv[(b * total + at) * width..][..step * width]);
            }
            let mut out = vec![X::from_f32(NAN); 2 * step * heads * d];
            let mut ws = vec![NAN; attention_cached_workspace(&call, capacity, threads)];
            let start = at.map(|at| at as i32);
            attention_cached(&piece, &mut k, &mut v, &start, &mut out, &call, &mut ws);
            let size = heads * d;
            for (b, at) in at.iter_mut().enumerate() {
                outs[(b * total + *at) * size..][..step * size]
                    .copy_from_slice(&out[b * step * size..][..step * size]);
                // Row 1 stays one behind from the first single token on.
                if !(b == 1 && step == 1 && *at == prompt) {
                    *at += step;
                }
            }
        }
        for (b, at) in at.into_iter().enumerate() {
            assert!(at >= total - 3 && b < 2);
        }
        outs
    });
    assert_same_bits(&results);
    let (mut actual, mut wanted) = (Vec::new(), Vec::new());
    for (a, e) in results[0].iter().zip(&expected) {
        // The tokens that row 1 did not reach.
        if !a.to_f32().is_nan() {
            actual.push(*a);
            wanted.push(*e);
        }
    }
    assert!(actual.len() > expected.len() - 8 * heads * d);
    let what = format!("cached {heads} {kv_heads} {d} {window:?} {total}");
    assert_close(&actual, &wanted, tolerance::<X>(1e-5), &what);
}

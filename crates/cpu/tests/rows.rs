//! Norms, rotary embedding, SwiGLU, loss, embedding and elementwise kernels against
//! float64 references; backward passes against finite differences.

mod support;

use half::bf16;
use plimsoll_cpu::kernels::*;
use support::*;

const EPS: f64 = 1e-5;

fn norm(x: &[f64], w: &[f64]) -> Vec<f64> {
    let c = w.len();
    x.chunks(c)
        .flat_map(|x| {
            let r = 1.0 / (dot(x, x) / c as f64 + EPS).sqrt();
            x.iter().zip(w).map(move |(x, w)| x * r * w)
        })
        .collect()
}

fn norms<X: Elem, W: Elem>(rows: usize, c: usize) {
    let x: Vec<X> = random(rows * c, 1);
    let w: Vec<W> = random(c, 2);
    let d_out: Vec<X> = random(rows * c, 3);
    let before: Vec<X> = random(rows * c, 4);
    let d_w_before: Vec<f32> = random(c, 5);
    let (x64, w64, g64) = (to_f64(&x), to_f64(&w), to_f64(&d_out));
    for accumulate in [false, true] {
        let results = in_pools(|| {
            let mut out = vec![X::from_f32(NAN); rows * c];
            let mut rstd = vec![NAN; rows];
            rms_norm_forward(&x, &w, &mut out, &mut rstd, EPS as f32);
            let mut d_x =
                if accumulate { before.clone() } else { vec![X::from_f32(NAN); rows * c] };
            let mut d_w = if accumulate { d_w_before.clone() } else { vec![NAN; c] };
            let mut ws = vec![NAN; rms_norm_backward_workspace(rows, c)];
            rms_norm_backward(
                &d_out,
                &x,
                &w,
                &rstd,
                &mut d_x,
                accumulate,
                Some(&mut d_w),
                accumulate,
                &mut ws,
            );
            (out, d_x, d_w)
        });
        assert_same_bits(&results.iter().map(|r| r.0.clone()).collect::<Vec<_>>());
        assert_same_bits(&results.iter().map(|r| r.1.clone()).collect::<Vec<_>>());
        assert_same_bits(&results.iter().map(|r| r.2.clone()).collect::<Vec<_>>());
        let (out, d_x, d_w) = &results[0];
        let what = format!("norm {rows} {c} {accumulate}");
        assert_close(out, &norm(&x64, &w64), tolerance::<X>(1e-6), &what);
        if rows * c > 3000 {
            continue;
        }
        let mut e_x = differences(&x64, |x| dot(&norm(x, &w64), &g64));
        let mut e_w = differences(&w64, |w| dot(&norm(&x64, w), &g64));
        if accumulate {
            e_x.iter_mut().zip(to_f64(&before)).for_each(|(e, b)| *e += b);
            e_w.iter_mut().zip(to_f64(&d_w_before)).for_each(|(e, b)| *e += b);
        }
        assert_close(d_x, &e_x, tolerance::<X>(3e-6), &format!("d_x {what}"));
        assert_close(d_w, &e_w, 3e-6, &format!("d_w {what}"));
    }
    // The fused addition equals the two steps.
    let (mut sum, mut out, mut rstd) = (x.clone(), x.clone(), vec![NAN; rows]);
    add_rms_norm_forward(&x, &d_out, &mut sum, &w, &mut out, &mut rstd, EPS as f32);
    let (mut sum2, mut out2, mut rstd2) = (x.clone(), x.clone(), vec![NAN; rows]);
    add(&x, &d_out, &mut sum2);
    rms_norm_forward(&sum2, &w, &mut out2, &mut rstd2, EPS as f32);
    assert_eq!((sum, out, rstd), (sum2, out2, rstd2));
}

#[test]
fn norms_match() {
    for (rows, c) in [(1, 3), (3, 7), (33, 64), (17, 129), (200, 576)] {
        norms::<f32, f32>(rows, c);
        norms::<f32, bf16>(rows, c);
        norms::<bf16, bf16>(rows, c);
    }
}

#[test]
fn head_norms_match() {
    let (rows, h, hkv, d) = (19, 4, 2, 24);
    let width = (h + 2 * hkv) * d;
    let x: Vec<f32> = random(rows * width, 1);
    let (wq, wk): (Vec<f32>, Vec<f32>) = (random(d, 2), random(d, 3));
    let g: Vec<f32> = random(rows * width, 4);
    let (x64, g64) = (to_f64(&x), to_f64(&g));
    let forward = |x: &[f64], wq: &[f64], wk: &[f64]| -> Vec<f64> {
        x.chunks(width)
            .flat_map(|row| {
                let mut out = norm(&row[..h * d], wq);
                out.extend(norm(&row[h * d..(h + hkv) * d], wk));
                out.extend_from_slice(&row[(h + hkv) * d..]);
                out
            })
            .collect()
    };
    let (q64, k64) = (to_f64(&wq), to_f64(&wk));
    let results = in_pools(|| {
        let (mut out, mut rstd) = (vec![NAN; x.len()], vec![NAN; rows * (h + hkv)]);
        head_norm_forward(&x, &wq, &wk, &mut out, &mut rstd, (h, hkv, d), EPS as f32);
        let mut d_x = g.clone();
        let (mut d_q, mut d_k) = (vec![NAN; d], vec![NAN; d]);
        let mut ws = vec![NAN; head_norm_backward_workspace(rows, d)];
        head_norm_backward(
            &mut d_x,
            &x,
            &wq,
            &wk,
            &rstd,
            Some(&mut d_q),
            Some(&mut d_k),
            false,
            (h, hkv, d),
            &mut ws,
        );
        [out, d_x, d_q, d_k].concat()
    });
    assert_same_bits(&results);
    let all = &results[0];
    let (out, rest) = all.split_at(x.len());
    let (d_x, rest) = rest.split_at(x.len());
    assert_close(out, &forward(&x64, &q64, &k64), 1e-6, "head norm");
    assert_close(d_x, &differences(&x64, |x| dot(&forward(x, &q64, &k64), &g64)), 3e-6, "d_x");
    let d_q = differences(&q64, |w| dot(&forward(&x64, w, &k64), &g64));
    let d_k = differences(&k64, |w| dot(&forward(&x64, &q64, w), &g64));
    assert_close(&rest[..d], &d_q, 3e-6, "d_q_norm");
    assert_close(&rest[d..], &d_k, 3e-6, "d_k_norm");
}

fn rotary<T: Elem>(rows: usize, (h, hkv, d): (usize, usize, usize)) {
    let width = (h + 2 * hkv) * d;
    let inv_freq: Vec<f64> =
        (0..d / 2).map(|i| 10_000f64.powf(-2.0 * i as f64 / d as f64)).collect();
    let mut table = vec![NAN; 50 * d];
    rope_table(&inv_freq, 1.0, &mut table);
    let x: Vec<T> = random(rows * width, 1);
    let positions: Vec<i32> = (0..rows).map(|r| (r * 7 % 50) as i32).collect();
    let mut expected = to_f64(&x);
    for (r, position) in positions.iter().enumerate() {
        for head in 0..h + hkv {
            let at = r * width + head * d;
            for i in 0..d / 2 {
                let (s, c) = (*position as f64 * inv_freq[i]).sin_cos();
                let (a, b) = (expected[at + i], expected[at + i + d / 2]);
                expected[at + i] = a * c - b * s;
                expected[at + i + d / 2] = b * c + a * s;
            }
        }
    }
    let results = in_pools(|| {
        let mut x = x.clone();
        rope(&mut x, &positions, &table, (h, hkv, d), false);
        x
    });
    assert_same_bits(&results);
    assert_close(&results[0], &expected, tolerance::<T>(1e-6), "rope");
    let mut back = results[0].clone();
    rope(&mut back, &positions, &table, (h, hkv, d), true);
    assert_close(&back, &to_f64(&x), tolerance::<T>(1e-6) * 2.0, "inverse rope");
}

#[test]
fn rope_matches() {
    rotary::<f32>(1, (1, 1, 2));
    rotary::<f32>(200, (9, 3, 64));
    rotary::<bf16>(40, (4, 2, 80));
}

fn gated<T: Elem>(rows: usize, i: usize) {
    let x: Vec<T> =
        random::<f32>(rows * 2 * i, 1).into_iter().map(|x| T::from_f32(8.0 * x)).collect();
    let g: Vec<T> = random(rows * i, 2);
    let (x64, g64) = (to_f64(&x), to_f64(&g));
    let forward = |x: &[f64]| -> Vec<f64> {
        x.chunks(2 * i)
            .flat_map(|row| {
                let (gate, up) = row.split_at(i);
                gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect::<Vec<_>>()
            })
            .collect()
    };
    let mut expected = vec![0.0; x.len()];
    for r in 0..rows {
        for j in 0..i {
            let (at, up) = (2 * r * i + j, 2 * r * i + i + j);
            let s = 1.0 / (1.0 + (-x64[at]).exp());
            expected[at] = g64[r * i + j] * x64[up] * s * (1.0 + x64[at] * (1.0 - s));
            expected[up] = g64[r * i + j] * x64[at] * s;
        }
    }
    if x.len() < 500 {
        let numeric = differences(&x64, |x| dot(&forward(x), &g64));
        for (a, n) in expected.iter().zip(&numeric) {
            assert!((a - n).abs() < 1e-8);
        }
    }
    let results = in_pools(|| {
        let mut out = vec![T::from_f32(NAN); rows * i];
        swiglu_forward(&x, &mut out, i);
        let mut d_x = vec![T::from_f32(NAN); x.len()];
        swiglu_backward(&x, &g, &mut d_x, i);
        let mut in_place = x.clone();
        swiglu_backward_in_place(&mut in_place, &g, i);
        assert_eq!(d_x, in_place);
        [out, d_x].concat()
    });
    assert_same_bits(&results);
    let (out, d_x) = results[0].split_at(rows * i);
    assert_close(out, &forward(&x64), tolerance::<T>(1e-6), "swiglu");
    assert_close(d_x, &expected, tolerance::<T>(1e-6), "swiglu backward");
}

#[test]
fn swiglu_matches() {
    for (rows, i) in [(1, 1), (3, 37), (100, 1536)] {
        gated::<f32>(rows, i);
        gated::<bf16>(rows, i);
    }
}

fn loss<T: Elem>(rows: usize, vocab: usize) {
    let logits: Vec<T> =
        random::<f32>(rows * vocab, 1).into_iter().map(|x| T::from_f32(20.0 * x)).collect();
    let labels: Vec<i32> =
        (0..rows).map(|r| if r % 3 == 1 { IGNORED } else { (r * 31 % vocab) as i32 }).collect();
    let scale = 0.37;
    let (mut losses, mut grads) = (vec![0.0; rows], vec![0.0; rows * vocab]);
    for r in (0..rows).filter(|r| labels[*r] != IGNORED) {
        let row = to_f64(&logits[r * vocab..(r + 1) * vocab]);
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|x| (x - max).exp()).sum();
        losses[r] = max + sum.ln() - row[labels[r] as usize];
        for j in 0..vocab {
            let hot = (j as i32 == labels[r]) as u32 as f64;
            grads[r * vocab + j] = ((row[j] - max).exp() / sum - hot) * scale as f64;
        }
    }
    let results = in_pools(|| {
        let mut x = logits.clone();
        let (mut a, mut b) = (vec![NAN; rows], vec![NAN; rows]);
        cross_entropy_loss(&x, &labels, &mut a, vocab);
        cross_entropy(&mut x, &labels, &mut b, scale, vocab);
        assert_eq!(a, b);
        (x, a)
    });
    assert_same_bits(&results.iter().map(|r| r.0.clone()).collect::<Vec<_>>());
    assert_close(&results[0].1, &losses, 1e-6, "losses");
    assert_close(&results[0].0, &grads, tolerance::<T>(2e-6), "d_logits");
}

#[test]
fn cross_entropy_matches() {
    for (rows, vocab) in [(1, 1), (5, 7), (7, 100), (9, 5003)] {
        loss::<f32>(rows, vocab);
        loss::<bf16>(rows, vocab);
    }
}

#[test]
fn exp_is_accurate() {
    let mut worst = 0.0f64;
    for i in 0..2_000_000 {
        let x = -87.0 + i as f32 * (175.0 / 2_000_000.0);
        let exact = (x as f64).exp();
        worst = worst.max((simd::exp::<true>(x) as f64 / exact - 1.0).abs());
        worst = worst.max((simd::exp::<false>(x) as f64 / exact - 1.0).abs());
    }
    assert!(worst < 2e-7, "{worst:e}");
    assert_eq!(simd::exp::<true>(0.0), 1.0);
    assert_eq!(simd::exp::<true>(f32::NEG_INFINITY), 0.0);
    assert_eq!(simd::exp::<true>(-1e30), 0.0);
    assert!(simd::exp::<true>(f32::NAN).is_nan());
    assert!(simd::exp::<true>(f32::INFINITY) > 1e38);
}

fn embedding<T: Elem>() {
    let (v, c) = (11, 150);
    let table: Vec<T> = random(v * c, 1);
    let ids: Vec<i32> = (0..300).map(|i| (i * i % v as i32).min(7)).collect();
    let g: Vec<T> = random(ids.len() * c, 2);
    let before: Vec<f32> = random(v * c, 3);
    let mut expected = to_f64(&before);
    for (id, g) in ids.iter().zip(g.chunks(c)) {
        for (i, g) in g.iter().enumerate() {
            expected[*id as usize * c + i] += g.to_f32() as f64;
        }
    }
    let results = in_pools(|| {
        let mut out = vec![T::from_f32(NAN); ids.len() * c];
        embed(&ids, &table, &mut out, c);
        for (id, row) in ids.iter().zip(out.chunks(c)) {
            assert_eq!(row, &table[*id as usize * c..][..c]);
        }
        let mut d_table = before.clone();
        embed_backward(&ids, &g, &mut d_table, c, false);
        d_table
    });
    assert_same_bits(&results);
    assert_close(&results[0], &expected, 1e-6, "d_table");
    let mut zeroed = vec![NAN; v * c];
    embed_backward(&ids, &g, &mut zeroed, c, true);
    expected.iter_mut().zip(to_f64(&before)).for_each(|(e, b)| *e -= b);
    assert_close(&zeroed, &expected, 1e-6, "d_table from zero");
}

#[test]
fn embedding_matches() {
    embedding::<f32>();
    embedding::<bf16>();
}

#[test]
fn elementwise_matches() {
    for n in [0, 1, 17, 16 * 1024, 100_003] {
        let (a, b): (Vec<f32>, Vec<bf16>) = (random(n, 1), random(n, 2));
        let mut out = vec![NAN; n];
        add(&a, &b, &mut out);
        assert!(out.iter().zip(&a).zip(&b).all(|((o, a), b)| *o == a + b.to_f32()));
        let mut x = a.clone();
        add_assign(&mut x, &b);
        assert_eq!(x, out);
        scale(&mut x, 0.5);
        assert!(x.iter().zip(&out).all(|(x, o)| *x == o * 0.5));
        let mut narrow = vec![bf16::ZERO; n];
        convert(&a, &mut narrow);
        assert!(narrow.iter().zip(&a).all(|(n, a)| *n == bf16::from_f32(*a)));
        fill(&mut narrow, 3.0);
        assert!(narrow.iter().all(|x| x.to_f32() == 3.0));
        let exact: f64 = a.iter().map(|x| (*x as f64).powi(2)).sum();
        let sums = in_pools(|| vec![sum_of_squares(&a) as f32]);
        assert_same_bits(&sums);
        assert!((sum_of_squares(&a) - exact).abs() <= 1e-6 * exact);
    }
    for (rows, n) in [(1, 1), (3, 70), (1000, 33)] {
        let g: Vec<f32> = random(rows * n, 1);
        let mut exact = vec![1.0; n];
        for row in g.chunks(n) {
            exact.iter_mut().zip(row).for_each(|(e, g)| *e += *g as f64);
        }
        let results = in_pools(|| {
            let mut d_bias = vec![1.0f32; n];
            let mut ws = vec![NAN; bias_backward_workspace(rows, n)];
            bias_backward(&g, &mut d_bias, true, &mut ws);
            d_bias
        });
        assert_same_bits(&results);
        assert_close(&results[0], &exact, 1e-5, "d_bias");
    }
}

#[test]
fn bf16_conversion_rounds_as_half_does() {
    for i in 0..2_000_000u32 {
        let x = f32::from_bits(i.wrapping_mul(2_654_435_761));
        let (ours, theirs) = (<bf16 as Elem>::from_f32(x), bf16::from_f32(x));
        assert!(ours.to_bits() == theirs.to_bits() || (x.is_nan() && ours.is_nan()), "{x:e}");
    }
}

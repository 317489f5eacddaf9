//! Three steps of bitsandbytes' AdamW8bit: codes and scales to the bit.

mod golden;

use golden::Golden;
use plimsoll_quant::{AdamW8bit, DynamicMap, State8bit, adamw8bit};

#[test]
fn maps_are_those_of_bitsandbytes() {
    let Some(golden) = Golden::open() else { return };
    for (map, name) in [(DynamicMap::signed(), "qmap1"), (DynamicMap::unsigned(), "qmap2")] {
        assert_eq!(map.values()[..], golden.f32(&format!("adam8.state.{name}")), "{name}");
    }
}

#[test]
fn three_steps_are_those_of_bitsandbytes() {
    let Some(golden) = Golden::open() else { return };
    let mut param = golden.f32("adam8.p0");
    let n = param.len();
    let (mut m, mut v) = (vec![0; n], vec![0; n]);
    let (mut m_absmax, mut v_absmax) = (vec![0.0; n / 256], vec![0.0; n / 256]);
    let (beta1, beta2) = (0.9f32, 0.95f32);
    for step in 1..=3 {
        let correction = |beta: f32| (1.0 - f64::from(beta).powi(step)) as f32;
        let hyper = AdamW8bit {
            lr: 1e-3,
            beta1,
            beta2,
            eps: 1e-8,
            weight_decay: 0.1,
            bias_correction1: correction(beta1),
            bias_correction2: correction(beta2),
            grad_scale: 1.0,
        };
        let state =
            State8bit { m: &mut m, v: &mut v, m_absmax: &mut m_absmax, v_absmax: &mut v_absmax };
        adamw8bit(&mut param, &golden.f32(&format!("adam8.g{}", step - 1)), state, &hyper);
        // The reference is compiled with fast division and powers.
        let expected = golden.f32(&format!("adam8.p{step}"));
        let differ = param.iter().zip(&expected).filter(|(a, e)| a != e).count();
        assert!(differ < n / 100, "step {step}: {differ} of {n} parameters differ");
        for (a, e) in param.iter().zip(&expected) {
            assert!((a - e).abs() <= 2e-7 * e.abs().max(0.1), "step {step}: {a} is not {e}");
        }
    }
    assert_eq!(m_absmax, golden.f32("adam8.state.absmax1"));
    assert_eq!(v_absmax, golden.f32("adam8.state.absmax2"));
    assert!(m == golden.u8("adam8.state.state1"));
    assert!(v == golden.u8("adam8.state.state2"));
}

#[test]
fn a_gradient_that_is_not_finite_is_skipped_and_zeros_stay_zeros() {
    let n = 300;
    let hyper = AdamW8bit {
        lr: 0.1,
        beta1: 0.9,
        beta2: 0.99,
        eps: 1e-8,
        weight_decay: 0.0,
        bias_correction1: 0.1,
        bias_correction2: 0.01,
        grad_scale: 1.0,
    };
    let (mut param, mut grad) = (vec![1.0f32; n], vec![0.0f32; n]);
    for (i, g) in grad[..256].iter_mut().enumerate() {
        *g = if i % 2 == 0 { 0.5 } else { -0.5 };
    }
    (grad[3], grad[4]) = (f32::NAN, f32::INFINITY);
    let (mut m, mut v, mut m_absmax, mut v_absmax) =
        (vec![0; n], vec![0; n], vec![0.0; 2], vec![0.0; 2]);
    let state =
        State8bit { m: &mut m, v: &mut v, m_absmax: &mut m_absmax, v_absmax: &mut v_absmax };
    adamw8bit(&mut param, &grad, state, &hyper);
    assert_eq!((param[3], param[4], m[3], m[4], v[3], v[4]), (1.0, 1.0, 127, 127, 0, 0));
    assert!((param[0] - 0.9).abs() < 1e-6 && (param[1] - 1.1).abs() < 1e-6);
    assert_eq!((m[0], m[1], v[0]), (255, 0, 255));
    assert!(m[256..].iter().all(|c| *c == 127) && v[256..].iter().all(|c| *c == 0));
    assert!(param[256..].iter().all(|p| *p == 1.0));
    assert_eq!((m_absmax[1], v_absmax[1]), (0.0, 0.0));
}

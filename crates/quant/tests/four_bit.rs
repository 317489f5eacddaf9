//! Every 4-bit case of bitsandbytes, bit for bit.

mod golden;

use golden::Golden;
use half::bf16;
use plimsoll_quant::*;

/// Bits of numbers, so that zeros keep their sign.
fn bits<T: Element>(x: &[T]) -> Vec<u32> {
    x.iter().map(|x| x.to_f32().to_bits()).collect()
}

fn check<T: Element>(golden: &Golden, case: &str, weight: &[T], expected: impl Fn(&str) -> Vec<T>) {
    let (n, values) = (weight.len(), weight);
    for format in Format4bit::ALL {
        let key = format!("{case}.{format}");
        let (mut codes, mut absmax) = (vec![0; packed_bytes(n)], vec![0.0; blocks(n)]);
        quantize_4bit(format.codebook, values, &mut codes, &mut absmax).unwrap();
        assert!(codes == golden.u8(&format!("{key}.packed")), "{key}: codes");
        if format.double {
            let (mut nested, mut scales) = (vec![0; blocks(n)], vec![0.0; nested_blocks(n)]);
            let offset = quantize_absmax(&mut absmax, &mut nested, &mut scales);
            assert_eq!(offset, golden.offset(&key), "{key}: offset");
            assert!(bits(&scales) == bits(&golden.f32(&format!("{key}.nested_absmax"))), "{key}");
            assert!(nested == golden.u8(&format!("{key}.absmax")), "{key}: nested codes");
            let map = golden.f32(&format!("{key}.nested_quant_map"));
            assert_eq!(DynamicMap::signed().values()[..], map, "{key}: map");
            let map = DynamicMap::signed().values();
            dequantize_absmax(&nested, &scales, offset, map, &mut absmax);
        } else {
            assert!(bits(&absmax) == bits(&golden.f32(&format!("{key}.absmax"))), "{key}: absmax");
        }
        let mut out = vec![T::from_f32(9.0); n];
        dequantize_4bit(format.codebook, &codes, &absmax, &mut out);
        let expected = expected(&format!("{key}.dequantized"));
        let wrong = bits(&out).iter().zip(bits(&expected)).position(|(a, b)| *a != b);
        assert_eq!(wrong, None, "{key}: dequantized");
    }
}

#[test]
fn every_case_is_that_of_bitsandbytes() {
    let Some(golden) = Golden::open() else { return };
    for case in ["normal", "heavy", "zero_block", "tiny"] {
        let name = format!("{case}.f32");
        check(&golden, &name, &golden.f32(&format!("{name}.weight")), |key| golden.f32(key));
        let name = format!("{case}.bf16");
        check(&golden, &name, &golden.bf16(&format!("{name}.weight")), |key| golden.bf16(key));
    }
}

#[test]
fn pieces_make_the_whole_and_tails_are_filled() {
    let x: Vec<f32> = (0..1003).map(|i| ((i * 7919) % 1000) as f32 * 0.013 - 5.0).collect();
    for codebook in [Codebook::Nf4, Codebook::Fp4] {
        let (mut codes, mut absmax) = (vec![0; 502], vec![0.0; 16]);
        quantize_4bit(codebook, &x, &mut codes, &mut absmax).unwrap();
        let mut pieces = (Vec::new(), Vec::new());
        for piece in x.chunks(3 * BLOCK) {
            let n = piece.len();
            let (mut c, mut a) = (vec![0; packed_bytes(n)], vec![0.0; blocks(n)]);
            quantize_4bit(codebook, piece, &mut c, &mut a).unwrap();
            pieces.0.extend(c);
            pieces.1.extend(a);
        }
        assert!(pieces == (codes.clone(), absmax.clone()));
        // The code of zero fills the last byte.
        let zero = if codebook == Codebook::Nf4 { 7 } else { 0 };
        assert_eq!(codes[501] & 15, zero);
        let mut out = vec![0.0f32; x.len()];
        dequantize_4bit(codebook, &codes, &absmax, &mut out);
        for (i, (a, b)) in x.iter().zip(&out).enumerate() {
            assert!((a - b).abs() <= 0.17 * absmax[i / BLOCK], "{i}: {a} {b}");
        }
    }
}

#[test]
fn what_is_not_finite_is_named() {
    for (index, value) in [(0, f32::NAN), (70, f32::INFINITY), (99, f32::NEG_INFINITY)] {
        let mut x = vec![1.0f32; 100];
        x[index] = value;
        let error =
            quantize_4bit(Codebook::Nf4, &x, &mut [0; 50], &mut [0.0; 2]).expect_err("not finite");
        assert_eq!(error.index, index);
        assert!(error.to_string().contains(&format!("element {index} is")), "{error}");
        let x: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
        assert!(quantize_4bit(Codebook::Fp4, &x, &mut [0; 50], &mut [0.0; 2]).is_err());
    }
    assert_eq!("nf4-dq".parse(), Ok(Format4bit { codebook: Codebook::Nf4, double: true }));
    let error = "int4".parse::<Format4bit>().unwrap_err();
    assert!(error.to_string().contains("int4") && error.to_string().contains("nf4-dq"));
}

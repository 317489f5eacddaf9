//! Halves of float32 numbers: all that are finite come back to the bit.

use half::bf16;
use plimsoll_quant::{join_master, split_master};

/// One of these many of all 2^32 numbers, from each residue once in a while: an odd
/// number, so that every lower half meets every kind of upper half.
const STRIDE: usize = 7;

#[test]
fn halves_are_the_number_to_the_bit() {
    for bits in (0..=u32::MAX).step_by(STRIDE) {
        let x = f32::from_bits(bits);
        let (weight, low) = split_master(x);
        if x.is_nan() {
            assert!(bf16::from_bits(weight).is_nan() && join_master(weight, low).is_nan());
            assert_eq!(weight >> 15 != 0, x.is_sign_negative());
            continue;
        }
        assert_eq!(join_master(weight, low).to_bits(), bits, "{x:e}");
    }
}

/// Every lower half, beside upper halves where something could go wrong: zeros,
/// subnormal numbers, powers of two, the largest numbers, odd and even.
#[test]
fn the_weight_is_the_nearest() {
    let uppers =
        [0x0000u16, 0x0001, 0x007f, 0x0080, 0x3f7f, 0x3f80, 0x3f81, 0x4000, 0x7f7e, 0x7f7f];
    for upper in uppers.iter().flat_map(|u| [*u, *u | 0x8000]) {
        for lower in 0..=u16::MAX {
            let bits = u32::from(upper) << 16 | u32::from(lower);
            let x = f32::from_bits(bits);
            let (weight, low) = split_master(x);
            assert_eq!(join_master(weight, low).to_bits(), bits);
            let weight = bf16::from_bits(weight);
            assert_eq!(weight.is_sign_negative(), x.is_sign_negative());
            if lower == 0x8000 {
                // A tie: either neighbour, here always the larger one.
                assert_eq!(weight.to_bits(), upper + 1, "{x:e}");
            } else {
                assert_eq!(weight, bf16::from_f32(x), "{x:e}");
            }
        }
    }
}

#[test]
fn special_numbers_stay_what_they_are() {
    for x in [0.0, -0.0, 1.0, -1.5, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN] {
        let (weight, low) = split_master(x);
        assert_eq!(join_master(weight, low).to_bits(), x.to_bits());
        assert_eq!(bf16::from_bits(weight), bf16::from_f32(x));
    }
    // Loaded weights are their own masters, whatever they are.
    for bits in 0..=u16::MAX {
        let weight = bf16::from_bits(bits);
        let x = join_master(bits, 0);
        assert_eq!(x.to_bits(), u32::from(bits) << 16);
        if !weight.is_nan() {
            assert_eq!(split_master(x), (bits, 0));
        }
    }
    // NaNs whose payload lies in the lower half, or would carry.
    for bits in [0x7f80_0001, 0x7fff_ffff, 0xffff_8000, 0xffff_ffff, 0xff80_7fff] {
        let (weight, low) = split_master(f32::from_bits(bits));
        assert!(bf16::from_bits(weight).is_nan() && join_master(weight, low).is_nan());
    }
}

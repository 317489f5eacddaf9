//! A float32 master weight as the bf16 weight that a model computes with and the 16
//! bits that are not in it.
//!
//! On bit patterns, a float32 number is `weight * 2^16 + low`, with `low` signed: where
//! the number is nearer to the bf16 above, the weight is that one and `low` is negative.
//! Neighbours in magnitude are neighbours as integers whatever their exponents, so the
//! carry of rounding up into the next power of two, or from the largest number to
//! infinity, is that of one integer addition. Both halves together are the float32 number
//! to the bit, and the weight is the nearest bf16 number.
//!
//! Of two that are equally near it is the one larger in magnitude. Ties to even would
//! need 2^15 in `low` beside an even weight, which 16 bits that hold -2^15 do not.

/// The bits of the bf16 weight and what `x` has beside them. A NaN becomes a quiet one.
#[inline(always)]
pub const fn split_master(x: f32) -> (u16, i16) {
    let bits = x.to_bits();
    // The payload of a NaN could carry into the sign, or lie in the lower half alone.
    let is_nan = (bits & 0x7fff_ffff) > 0x7f80_0000;
    let (weight, low) = (bits.wrapping_add(0x8000) >> 16, bits);
    let quiet = (bits >> 16) | 0x7fc0;
    if is_nan { (quiet as u16, 0) } else { (weight as u16, low as u16 as i16) }
}

/// The float32 number of [`split_master`]'s halves. A weight with `low` zero is its own
/// master.
#[inline(always)]
pub const fn join_master(weight: u16, low: i16) -> f32 {
    f32::from_bits(((weight as u32) << 16).wrapping_add(low as u32))
}

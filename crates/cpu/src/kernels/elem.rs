//! Storage types of tensors. Every kernel computes in `f32`.

use half::bf16;

/// A tensor element as it lies in memory.
pub trait Elem: Copy + Send + Sync + Default + PartialEq + std::fmt::Debug + 'static {
    /// True for `f32`: loads and stores need no conversion.
    const IS_F32: bool;
    fn to_f32(self) -> f32;
    /// Rounds to nearest, ties to even.
    fn from_f32(x: f32) -> Self;
    /// Rounds up or down with probabilities that make the expectation exact;
    /// `random` is a uniform 16-bit number. `f32` is stored as it is.
    fn from_f32_stochastic(x: f32, random: u32) -> Self;
}

impl Elem for f32 {
    const IS_F32: bool = true;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }
    #[inline(always)]
    fn from_f32_stochastic(x: f32, _random: u32) -> Self {
        x
    }
}

impl Elem for bf16 {
    const IS_F32: bool = false;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits((self.to_bits() as u32) << 16)
    }
    // Branch-free, unlike `half`'s own conversion, so that loops over it vectorize.
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        // Rounding could carry a NaN's payload into infinity: keep it a quiet NaN.
        let nan = (bits >> 16) | 0x40;
        let is_nan = (bits & 0x7fff_ffff) > 0x7f80_0000;
        bf16::from_bits((if is_nan { nan } else { rounded }) as u16)
    }
    #[inline(always)]
    fn from_f32_stochastic(x: f32, random: u32) -> Self {
        let bits = x.to_bits();
        // Adding a uniform 16-bit number carries into the kept half with a
        // probability equal to the dropped fraction.
        let rounded = bits.wrapping_add(random & 0xffff) >> 16;
        let special = (bits & 0x7fff_ffff) >= 0x7f80_0000;
        let kept = (bits >> 16) | (((bits & 0x7fff_ffff) > 0x7f80_0000) as u32) << 6;
        bf16::from_bits((if special { kept } else { rounded }) as u16)
    }
}

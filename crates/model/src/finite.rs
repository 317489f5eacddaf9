//! NaN and infinity in weights.

use half::bf16;

/// The index of the first NaN or infinity.
pub fn first_non_finite(values: &[f32]) -> Option<usize> {
    first(values)
}

/// As [`first_non_finite`], for bf16.
pub fn first_non_finite_bf16(values: &[bf16]) -> Option<usize> {
    first(values)
}

pub(crate) fn first<T: Weight>(values: &[T]) -> Option<usize> {
    // Counting a block without leaving early is a loop that the compiler
    // vectorizes; the search runs only where it must find something.
    const BLOCK: usize = 1024;
    for (i, block) in values.chunks(BLOCK).enumerate() {
        if block.iter().map(|x| u32::from(!x.finite())).sum::<u32>() > 0 {
            return block.iter().position(|x| !x.finite()).map(|j| i * BLOCK + j);
        }
    }
    None
}

/// An element that weights can be read into.
pub(crate) trait Weight: Copy {
    /// Rounds to nearest, ties to even.
    fn of(x: f32) -> Self;
    fn finite(self) -> bool;
    fn to_f32(self) -> f32;
}

impl Weight for f32 {
    #[inline(always)]
    fn of(x: f32) -> f32 {
        x
    }

    #[inline(always)]
    fn finite(self) -> bool {
        self.to_bits() & 0x7f80_0000 != 0x7f80_0000
    }

    fn to_f32(self) -> f32 {
        self
    }
}

impl Weight for bf16 {
    // `bf16::from_f32` does the same with branches, which keep a loop scalar.
    #[inline(always)]
    fn of(x: f32) -> bf16 {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet = (bits >> 16) | 0x40;
        let nan = bits & 0x7fff_ffff > 0x7f80_0000;
        bf16::from_bits(if nan { quiet } else { rounded } as u16)
    }

    #[inline(always)]
    fn finite(self) -> bool {
        self.to_bits() & 0x7f80 != 0x7f80
    }

    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
}

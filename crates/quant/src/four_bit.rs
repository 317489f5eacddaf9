//! Weights in four bits (bitsandbytes 0.49 `quantize_4bit`, `dequantize_4bit`).
//!
//! A tensor is read row by row as one list; each 64 elements are divided by their
//! largest magnitude and become the nearest of sixteen numbers. Byte i holds
//! element 2i in its high half and 2i + 1 in its low one.
//!
//! All functions work on pieces: a piece begins at a multiple of [`BLOCK`]
//! elements and ends at one or at the end of the tensor. Pieces are independent,
//! so that threads can share a tensor.

use half::bf16;

use crate::format::{BLOCK, Codebook, blocks, packed_bytes};

/// A number that has no code.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("element {index} is {value}, which has no place in 4 bits")]
pub struct NotFinite {
    /// Place in the piece.
    pub index: usize,
    pub value: f32,
}

/// An element of a tensor outside of its 4-bit form.
pub trait Element: Copy {
    fn to_f32(self) -> f32;
    /// Rounds to nearest, ties to even.
    fn from_f32(x: f32) -> Self;
}

impl Element for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(x: f32) -> f32 {
        x
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    // What is stored is finite: no branch for NaN, so that loops vectorize.
    #[inline(always)]
    fn from_f32(x: f32) -> bf16 {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        bf16::from_bits(rounded as u16)
    }
}

/// A number becomes the code with as many limits below it; a number on a limit
/// goes down. As in `dQuantizeNF4`.
const NF4_LIMITS: [f32; 15] = [
    -0.848_096_4,
    -0.610_632_96,
    -0.459_995_27,
    -0.339_679_43,
    -0.234_607_41,
    -0.137_911_73,
    -0.045_525_018,
    0.039_790_15,
    0.120_255_25,
    0.203_521_25,
    0.292_013_77,
    0.389_312_54,
    0.501_663_45,
    0.642_786_9,
    0.861_478_4,
];

/// The same for the magnitudes of FP4 in ascending order (`dQuantizeFP4`).
const FP4_LIMITS: [f32; 7] =
    [0.002_604_17, 0.085_937_5, 0.208_333_33, 0.291_666_67, 0.416_666_7, 0.583_333, 0.833_333_3];

impl Codebook {
    /// The limits between neighbouring numbers, ascending: a number becomes the code
    /// whose rank is how many of them are below it. Those of FP4 are for magnitudes,
    /// whose codes by rank are 0, 1, 6, 7, 4, 5, 2 and 3; its sign is the bit above.
    pub fn limits(self) -> &'static [f32] {
        match self {
            Codebook::Nf4 => &NF4_LIMITS,
            Codebook::Fp4 => &FP4_LIMITS,
        }
    }
}

/// Which scales of eight significant bits, (128 + i) / 128 times a power of two,
/// have a `rcp.approx.ftz.f32` one unit below the nearest float32, by bit i; read
/// off an H200.
///
/// bitsandbytes is compiled with fast division. Scales of bf16 weights are such
/// numbers, and FP4 has limits at 5/24, 7/24 and their doubles, which quotients of
/// bf16 numbers meet often: there one unit decides about a code.
pub const LOW_RECIPROCALS: u128 = 0x8000_0000_0000_0000_0000_0000_0050_0810;
/// Those that have it one unit above.
pub const HIGH_RECIPROCALS: u128 = 0x0258_2000_0802_0006_2008_0060_0000_2040;

/// One over a scale, as a GPU with fast division has it.
#[inline(always)]
fn reciprocal(absmax: f32) -> f32 {
    let (bits, inverse) = (absmax.to_bits(), 1.0 / absmax);
    // The tables are by the significand of a normal number.
    if bits & 0xffff != 0 || !absmax.is_normal() || !inverse.is_normal() {
        return inverse;
    }
    let holds = |mask: u128| (mask >> ((bits >> 16) & 0x7f) & 1) as u32;
    f32::from_bits(inverse.to_bits() - holds(LOW_RECIPROCALS) + holds(HIGH_RECIPROCALS))
}

/// Quantizes a piece: codes for its elements and the largest magnitude of each
/// block. A block of zeros gets codes of 0. An odd last byte is filled with the code of
/// zero.
///
/// # Errors
/// An element is NaN or infinite; the outputs are then unspecified.
///
/// # Panics
/// `codes` or `absmax` has another length than the elements need.
pub fn quantize_4bit<T: Element>(
    codebook: Codebook,
    values: &[T],
    codes: &mut [u8],
    absmax: &mut [f32],
) -> Result<(), NotFinite> {
    assert_eq!(codes.len(), packed_bytes(values.len()), "codes");
    assert_eq!(absmax.len(), blocks(values.len()), "absmax");
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn wide<T: Element>(
            codebook: Codebook,
            values: &[T],
            codes: &mut [u8],
            absmax: &mut [f32],
        ) -> bool {
            quantize_blocks(codebook, values, codes, absmax)
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has it.
            let finite = unsafe { wide(codebook, values, codes, absmax) };
            return checked(finite, values);
        }
    }
    checked(quantize_blocks(codebook, values, codes, absmax), values)
}

/// Finds the number that made `finite` false.
fn checked<T: Element>(finite: bool, values: &[T]) -> Result<(), NotFinite> {
    if finite {
        return Ok(());
    }
    let found = values.iter().map(|x| x.to_f32()).enumerate().find(|(_, x)| !x.is_finite());
    let (index, value) = found.expect("a number was not finite");
    Err(NotFinite { index, value })
}

/// Returns whether all numbers were finite.
#[inline(always)]
fn quantize_blocks<T: Element>(
    codebook: Codebook,
    values: &[T],
    codes: &mut [u8],
    absmax: &mut [f32],
) -> bool {
    let mut finite = true;
    let blocks = values.chunks(BLOCK).zip(codes.chunks_mut(BLOCK / 2));
    for ((values, codes), absmax) in blocks.zip(absmax) {
        let mut x = [0.0f32; BLOCK];
        for (x, value) in x.iter_mut().zip(values) {
            *x = value.to_f32();
        }
        // Magnitudes compare as their bits do; NaN and infinity are above all.
        let largest = x.iter().fold(0u32, |a, x| a.max(x.to_bits() & 0x7fff_ffff));
        finite &= largest < 0x7f80_0000;
        *absmax = f32::from_bits(largest);
        // Zeros times infinity are NaN, which is above no limit: code 0.
        let inverse = reciprocal(*absmax);
        x.iter_mut().for_each(|x| *x *= inverse);
        let code = match codebook {
            Codebook::Nf4 => limits_below(&x, &NF4_LIMITS),
            Codebook::Fp4 => {
                let mut code = limits_below(&x.map(f32::abs), &FP4_LIMITS);
                for (code, x) in code.iter_mut().zip(&x) {
                    // By rank the codes are 0, 1, 6, 7, 4, 5, 2, 3.
                    *code = *code ^ (*code & 2) << 1 | u32::from(*x < 0.0) << 3;
                }
                code
            }
        };
        for (byte, pair) in codes.iter_mut().zip(code.as_chunks::<2>().0) {
            *byte = (pair[0] << 4 | pair[1]) as u8;
        }
    }
    finite
}

/// How many limits are below each number.
#[inline(always)]
fn limits_below<const N: usize>(x: &[f32; BLOCK], limits: &[f32; N]) -> [u32; BLOCK] {
    let mut below = [0u32; BLOCK];
    // As many numbers at a time as registers hold.
    for (below, x) in below.as_chunks_mut::<8>().0.iter_mut().zip(x.as_chunks::<8>().0) {
        for limit in limits {
            for (below, x) in below.iter_mut().zip(x) {
                *below += u32::from(x > limit);
            }
        }
    }
    below
}

/// The elements of a piece: the number of each code times the scale of its block,
/// in float32, then rounded.
///
/// # Panics
/// `codes` or `absmax` has another length than the elements need.
pub fn dequantize_4bit<T: Element>(
    codebook: Codebook,
    codes: &[u8],
    absmax: &[f32],
    out: &mut [T],
) {
    assert_eq!(codes.len(), packed_bytes(out.len()), "codes");
    assert_eq!(absmax.len(), blocks(out.len()), "absmax");
    let table = codebook.values();
    let blocks = out.chunks_mut(BLOCK).zip(codes.chunks(BLOCK / 2));
    for ((out, codes), absmax) in blocks.zip(absmax) {
        let value = |code: u8| T::from_f32(table[code as usize & 15] * absmax);
        for (pair, byte) in out.chunks_mut(2).zip(codes) {
            pair[0] = value(byte >> 4);
            if let Some(second) = pair.get_mut(1) {
                *second = value(*byte);
            }
        }
    }
}

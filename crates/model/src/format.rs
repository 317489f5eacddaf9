//! How elements are stored: plain floats and ggml's quantized blocks.
//!
//! Layouts and arithmetic are those of ggml (`ggml-common.h`,
//! `ggml-quants.c`); every value equals what the `gguf` package 0.19 computes,
//! to the bit. A block holds 32 elements, or 256 in the K types, in the order
//! of a row of the matrix; a row is a whole number of blocks.

use crate::finite::Weight;

/// A type of elements in a file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Format {
    /// As safetensors or ggml call it.
    pub name: &'static str,
    /// Elements of one block; 1 for plain types.
    pub block: usize,
    /// Bytes of one block.
    pub bytes: usize,
    /// How to read it; `None` for types that are known only by their size.
    pub codec: Option<Codec>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types)]
pub(crate) enum Codec {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
}

const fn known(name: &'static str, block: usize, bytes: usize, codec: Codec) -> Format {
    Format { name, block, bytes, codec: Some(codec) }
}

const fn sized(name: &'static str, block: usize, bytes: usize) -> Format {
    Format { name, block, bytes, codec: None }
}

/// The types of safetensors whose elements are whole bytes.
static SAFETENSORS: [Format; 16] = [
    known("F32", 1, 4, Codec::F32),
    known("F16", 1, 2, Codec::F16),
    known("BF16", 1, 2, Codec::Bf16),
    sized("F64", 1, 8),
    sized("I64", 1, 8),
    sized("U64", 1, 8),
    sized("C64", 1, 8),
    sized("I32", 1, 4),
    sized("U32", 1, 4),
    sized("I16", 1, 2),
    sized("U16", 1, 2),
    sized("I8", 1, 1),
    sized("U8", 1, 1),
    sized("BOOL", 1, 1),
    sized("F8_E4M3", 1, 1),
    sized("F8_E5M2", 1, 1),
];

/// The types of ggml by their number.
static GGML: [(u32, Format); 32] = [
    (0, known("F32", 1, 4, Codec::F32)),
    (1, known("F16", 1, 2, Codec::F16)),
    (2, known("Q4_0", 32, 18, Codec::Q4_0)),
    (3, known("Q4_1", 32, 20, Codec::Q4_1)),
    (6, known("Q5_0", 32, 22, Codec::Q5_0)),
    (7, known("Q5_1", 32, 24, Codec::Q5_1)),
    (8, known("Q8_0", 32, 34, Codec::Q8_0)),
    (10, known("Q2_K", 256, 84, Codec::Q2_K)),
    (11, known("Q3_K", 256, 110, Codec::Q3_K)),
    (12, known("Q4_K", 256, 144, Codec::Q4_K)),
    (13, known("Q5_K", 256, 176, Codec::Q5_K)),
    (14, known("Q6_K", 256, 210, Codec::Q6_K)),
    (16, sized("IQ2_XXS", 256, 66)),
    (17, sized("IQ2_XS", 256, 74)),
    (18, sized("IQ3_XXS", 256, 98)),
    (19, sized("IQ1_S", 256, 50)),
    (20, sized("IQ4_NL", 32, 18)),
    (21, sized("IQ3_S", 256, 110)),
    (22, sized("IQ2_S", 256, 82)),
    (23, sized("IQ4_XS", 256, 136)),
    (24, sized("I8", 1, 1)),
    (25, sized("I16", 1, 2)),
    (26, sized("I32", 1, 4)),
    (27, sized("I64", 1, 8)),
    (28, sized("F64", 1, 8)),
    (29, sized("IQ1_M", 256, 56)),
    (30, known("BF16", 1, 2, Codec::Bf16)),
    (34, sized("TQ1_0", 256, 54)),
    (35, sized("TQ2_0", 256, 66)),
    (39, sized("MXFP4", 32, 17)),
    (40, sized("NVFP4", 64, 36)),
    (41, sized("Q1_0", 128, 18)),
];

impl Format {
    pub fn safetensors(name: &str) -> Option<&'static Format> {
        SAFETENSORS.iter().find(|f| f.name == name)
    }

    pub fn ggml(number: u32) -> Option<&'static Format> {
        GGML.iter().find(|(n, _)| *n == number).map(|(_, f)| f)
    }

    /// Bytes of a tensor, or `None` if its rows are no whole number of blocks
    /// or the size is above 2^64. `shape` is (rows, ..., columns).
    pub fn size(&self, shape: &[usize]) -> Option<usize> {
        let columns = shape.last().copied().unwrap_or(1);
        if !columns.is_multiple_of(self.block) {
            return None;
        }
        let elements = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d))?;
        (elements / self.block).checked_mul(self.bytes)
    }
}

/// Reads whole blocks: `out.len()` elements from exactly their bytes.
pub(crate) fn decode<T: Weight>(codec: Codec, bytes: &[u8], out: &mut [T]) {
    match codec {
        Codec::F32 => blocks::<4, 1, T>(bytes, out, |b, y| y[0] = f32::from_le_bytes(*b)),
        Codec::F16 => blocks::<2, 1, T>(bytes, out, |b, y| y[0] = f16_at(b, 0)),
        Codec::Bf16 => blocks::<2, 1, T>(bytes, out, |b, y| {
            y[0] = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
        }),
        Codec::Q4_0 => blocks::<18, 32, T>(bytes, out, q4_0),
        Codec::Q4_1 => blocks::<20, 32, T>(bytes, out, q4_1),
        Codec::Q5_0 => blocks::<22, 32, T>(bytes, out, q5_0),
        Codec::Q5_1 => blocks::<24, 32, T>(bytes, out, q5_1),
        Codec::Q8_0 => blocks::<34, 32, T>(bytes, out, q8_0),
        Codec::Q2_K => blocks::<84, 256, T>(bytes, out, q2_k),
        Codec::Q3_K => blocks::<110, 256, T>(bytes, out, q3_k),
        Codec::Q4_K => blocks::<144, 256, T>(bytes, out, q4_k),
        Codec::Q5_K => blocks::<176, 256, T>(bytes, out, q5_k),
        Codec::Q6_K => blocks::<210, 256, T>(bytes, out, q6_k),
    }
}

/// Calls `block` on each B bytes, which are N elements.
#[inline(always)]
fn blocks<const B: usize, const N: usize, T: Weight>(
    bytes: &[u8],
    out: &mut [T],
    block: impl Fn(&[u8; B], &mut [f32; N]),
) {
    let (source, rest) = bytes.as_chunks::<B>();
    let (target, over) = out.as_chunks_mut::<N>();
    assert!(rest.is_empty() && over.is_empty() && source.len() == target.len(), "whole blocks");
    for (b, y) in source.iter().zip(target) {
        let mut values = [0f32; N];
        block(b, &mut values);
        for (y, x) in y.iter_mut().zip(values) {
            *y = T::of(x);
        }
    }
}

/// The half-precision number at a byte offset. Exact, and without the branches
/// that keep a loop from being vectorized.
#[inline(always)]
fn f16_at(bytes: &[u8], at: usize) -> f32 {
    let bits = u32::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    let magnitude = (bits & 0x7fff) << 13;
    // The exponent is biased by 15 there and by 127 here.
    let normal = magnitude + (112 << 23);
    let infinite = magnitude + (224 << 23);
    // A subnormal's mantissa beside the exponent of 2^-14, less that power.
    let power = f32::from_bits(113 << 23);
    let subnormal = (f32::from_bits(magnitude + (113 << 23)) - power).to_bits();
    let value = match magnitude >> 23 {
        0 => subnormal,
        31 => infinite,
        _ => normal,
    };
    f32::from_bits(value | (bits & 0x8000) << 16)
}

/// The low and high four bits of 16 bytes: elements j and j + 16.
#[inline(always)]
fn nibbles(qs: &[u8]) -> [u8; 32] {
    let mut q = [0; 32];
    for (j, b) in qs[..16].iter().enumerate() {
        q[j] = b & 15;
        q[j + 16] = b >> 4;
    }
    q
}

/// d: f16, 16 bytes of nibbles.  x = (q - 8) d
fn q4_0(b: &[u8; 18], y: &mut [f32; 32]) {
    let d = f16_at(b, 0);
    for (y, q) in y.iter_mut().zip(nibbles(&b[2..])) {
        *y = f32::from(q as i8 - 8) * d;
    }
}

/// d, m: f16, 16 bytes of nibbles.  x = q d + m
fn q4_1(b: &[u8; 20], y: &mut [f32; 32]) {
    let (d, m) = (f16_at(b, 0), f16_at(b, 2));
    for (y, q) in y.iter_mut().zip(nibbles(&b[4..])) {
        *y = f32::from(q) * d + m;
    }
}

/// Nibbles with a fifth bit from 4 bytes, one bit an element.
#[inline(always)]
fn five_bits(high: &[u8], qs: &[u8]) -> [u8; 32] {
    let mut q = nibbles(qs);
    for (j, q) in q.iter_mut().enumerate() {
        *q |= (high[j / 8] >> (j % 8) & 1) << 4;
    }
    q
}

/// d: f16, 4 bytes of fifth bits, 16 bytes of nibbles.  x = (q - 16) d
fn q5_0(b: &[u8; 22], y: &mut [f32; 32]) {
    let d = f16_at(b, 0);
    for (y, q) in y.iter_mut().zip(five_bits(&b[2..6], &b[6..])) {
        *y = f32::from(q as i8 - 16) * d;
    }
}

/// d, m: f16, 4 bytes of fifth bits, 16 bytes of nibbles.  x = q d + m
fn q5_1(b: &[u8; 24], y: &mut [f32; 32]) {
    let (d, m) = (f16_at(b, 0), f16_at(b, 2));
    for (y, q) in y.iter_mut().zip(five_bits(&b[4..8], &b[8..])) {
        *y = f32::from(q) * d + m;
    }
}

/// d: f16, 32 signed bytes.  x = q d
fn q8_0(b: &[u8; 34], y: &mut [f32; 32]) {
    let d = f16_at(b, 0);
    for (y, q) in y.iter_mut().zip(&b[2..]) {
        *y = f32::from(*q as i8) * d;
    }
}

/// 16 bytes of scales (low) and minima (high), 64 bytes of two-bit codes,
/// d, dmin: f16.  x = (d scale) q - (dmin min), 16 elements a scale.
///
/// The 32 bytes of each half hold four runs of 32 elements, two bits apart.
fn q2_k(b: &[u8; 84], y: &mut [f32; 256]) {
    let (d, dmin) = (f16_at(b, 80), f16_at(b, 82));
    for (group, y) in y.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let (scale, min) = (d * f32::from(b[group] & 15), dmin * f32::from(b[group] >> 4));
        let (half, shift, at) = (group / 8, group % 8 / 2 * 2, group % 2 * 16);
        let qs = &b[16 + 32 * half + at..][..16];
        for (y, q) in y.iter_mut().zip(qs) {
            *y = scale * f32::from(q >> shift & 3) - min;
        }
    }
}

/// 32 bytes of third bits, 64 bytes of two-bit codes, 12 bytes of six-bit
/// scales, d: f16.  x = d (scale - 32) (q - 4 where the third bit is clear)
fn q3_k(b: &[u8; 110], y: &mut [f32; 256]) {
    let d = f16_at(b, 108);
    let scales = &b[96..108];
    for (group, y) in y.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        // Four bits from the first 8 bytes, two from the last 4.
        let low = scales[group % 8] >> (group / 8 * 4) & 15;
        let high = scales[8 + group % 4] >> (group / 4 * 2) & 3;
        let scale = d * f32::from((low | high << 4) as i8 - 32);
        let (half, shift, at) = (group / 8, group % 8 / 2 * 2, group % 2 * 16);
        let (qs, masks) = (&b[32 + 32 * half + at..][..16], &b[at..][..16]);
        for ((y, q), mask) in y.iter_mut().zip(qs).zip(masks) {
            let absent = (!mask >> (group / 2)) & 1;
            *y = scale * f32::from((q >> shift & 3) as i8 - (absent << 2) as i8);
        }
    }
}

/// The six-bit scale and minimum of run `j` of 8, packed in 12 bytes.
#[inline(always)]
fn scale_and_min(s: &[u8], j: usize) -> (f32, f32) {
    let (scale, min) = match j {
        0..4 => (s[j] & 63, s[j + 4] & 63),
        _ => (s[j + 4] & 15 | s[j - 4] >> 6 << 4, s[j + 4] >> 4 | s[j] >> 6 << 4),
    };
    (f32::from(scale), f32::from(min))
}

/// d, dmin: f16, 12 bytes of scales and minima, 128 bytes of nibbles.
/// x = (d scale) q - (dmin min), 32 elements a scale.
fn q4_k(b: &[u8; 144], y: &mut [f32; 256]) {
    let (d, dmin) = (f16_at(b, 0), f16_at(b, 2));
    for (run, y) in y.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, min) = scale_and_min(&b[4..16], run);
        let (scale, min) = (d * scale, dmin * min);
        let (qs, shift) = (&b[16 + run / 2 * 32..][..32], run % 2 * 4);
        for (y, q) in y.iter_mut().zip(qs) {
            *y = scale * f32::from(q >> shift & 15) - min;
        }
    }
}

/// As Q4_K, with 32 bytes of fifth bits (bit `run`) before the nibbles.
fn q5_k(b: &[u8; 176], y: &mut [f32; 256]) {
    let (d, dmin) = (f16_at(b, 0), f16_at(b, 2));
    for (run, y) in y.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, min) = scale_and_min(&b[4..16], run);
        let (scale, min) = (d * scale, dmin * min);
        let (qs, shift) = (&b[48 + run / 2 * 32..][..32], run % 2 * 4);
        for ((y, q), high) in y.iter_mut().zip(qs).zip(&b[16..48]) {
            let q = q >> shift & 15 | (high >> run & 1) << 4;
            *y = scale * f32::from(q) - min;
        }
    }
}

/// 128 bytes of nibbles, 64 bytes of the two bits above, 16 signed scales,
/// d: f16.  x = (d scale) (q - 32), 16 elements a scale.
///
/// Each half of 128 elements takes 64 bytes of nibbles (two runs of 32 in the
/// low bits, two in the high) and 32 bytes of high bits (four runs).
fn q6_k(b: &[u8; 210], y: &mut [f32; 256]) {
    let d = f16_at(b, 208);
    for (run, y) in y.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (half, run) = (run / 4, run % 4);
        let low = &b[half * 64 + run % 2 * 32..][..32];
        let high = &b[128 + half * 32..][..32];
        let scales = &b[192 + half * 8 + run * 2..][..2];
        for (j, y) in y.iter_mut().enumerate() {
            let q = low[j] >> (run / 2 * 4) & 15 | (high[j] >> (run * 2) & 3) << 4;
            let scale = d * f32::from(scales[j / 16] as i8);
            *y = scale * f32::from(q as i8 - 32);
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn halves_are_exact() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) =
                (f16_at(&bits.to_le_bytes(), 0), half::f16::from_bits(bits).to_f32());
            let same = ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan();
            assert!(same, "{bits:#x}: {ours} {theirs}");
        }
    }

    #[test]
    fn rounding_to_bf16_is_that_of_half() {
        let mut bits = 1u32;
        for _ in 0..1_000_000 {
            bits = bits.wrapping_mul(1664525).wrapping_add(1013904223);
            let x = f32::from_bits(bits);
            assert_eq!(bf16::of(x).to_bits(), bf16::from_f32(x).to_bits(), "{x}");
        }
        for x in [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN] {
            assert_eq!(bf16::of(x).to_bits(), bf16::from_f32(x).to_bits(), "{x}");
        }
    }
}

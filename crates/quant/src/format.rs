//! The 4-bit formats by name, and how large their parts are.

use std::fmt;
use std::str::FromStr;

/// Elements that share one scale (`blocksize` of bitsandbytes).
pub const BLOCK: usize = 64;

/// Scales that share one scale of their own, under double quantization.
pub const NESTED_BLOCK: usize = 256;

/// The sixteen numbers that a 4-bit code stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codebook {
    /// 4-bit NormalFloat: quantiles of a normal distribution (Dettmers et al.,
    /// "QLoRA", arXiv 2305.14314).
    Nf4,
    /// A sign bit and three bits for a magnitude.
    Fp4,
}

const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

const FP4: [f32; 16] = [
    0.0,
    0.0625 / 12.0,
    8.0 / 12.0,
    1.0,
    4.0 / 12.0,
    6.0 / 12.0,
    2.0 / 12.0,
    3.0 / 12.0,
    -0.0,
    -0.0625 / 12.0,
    -8.0 / 12.0,
    -1.0,
    -4.0 / 12.0,
    -6.0 / 12.0,
    -2.0 / 12.0,
    -3.0 / 12.0,
];

impl Codebook {
    /// The number of each code.
    pub fn values(self) -> &'static [f32; 16] {
        match self {
            Codebook::Nf4 => &NF4,
            Codebook::Fp4 => &FP4,
        }
    }

    /// `quant_type` of bitsandbytes.
    pub fn name(self) -> &'static str {
        match self {
            Codebook::Nf4 => "nf4",
            Codebook::Fp4 => "fp4",
        }
    }
}

/// A way to store weights in four bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Format4bit {
    pub codebook: Codebook,
    /// Double quantization: the scales are in eight bits.
    pub double: bool,
}

impl Format4bit {
    pub const ALL: [Format4bit; 4] = [
        Format4bit { codebook: Codebook::Nf4, double: false },
        Format4bit { codebook: Codebook::Nf4, double: true },
        Format4bit { codebook: Codebook::Fp4, double: false },
        Format4bit { codebook: Codebook::Fp4, double: true },
    ];

    /// `nf4`, `nf4-dq`, `fp4` or `fp4-dq`.
    pub fn name(self) -> &'static str {
        match (self.codebook, self.double) {
            (Codebook::Nf4, false) => "nf4",
            (Codebook::Nf4, true) => "nf4-dq",
            (Codebook::Fp4, false) => "fp4",
            (Codebook::Fp4, true) => "fp4-dq",
        }
    }

    /// Bytes of codes and scales of a tensor; code tables and the offset are not
    /// counted.
    pub fn bytes(self, elements: usize) -> usize {
        let scales = if self.double {
            blocks(elements) + 4 * nested_blocks(elements)
        } else {
            4 * blocks(elements)
        };
        packed_bytes(elements) + scales
    }
}

/// Bytes of the codes of a tensor, two in each.
pub fn packed_bytes(elements: usize) -> usize {
    elements.div_ceil(2)
}

/// Scales of a tensor.
pub fn blocks(elements: usize) -> usize {
    elements.div_ceil(BLOCK)
}

/// Scales of the scales of a tensor.
pub fn nested_blocks(elements: usize) -> usize {
    blocks(elements).div_ceil(NESTED_BLOCK)
}

/// No 4-bit format has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a 4-bit format: use nf4, nf4-dq, fp4 or fp4-dq")]
pub struct UnknownFormat(pub String);

impl FromStr for Format4bit {
    type Err = UnknownFormat;

    fn from_str(text: &str) -> Result<Format4bit, UnknownFormat> {
        let found = Format4bit::ALL.into_iter().find(|f| f.name() == text);
        found.ok_or_else(|| UnknownFormat(text.to_owned()))
    }
}

impl fmt::Display for Format4bit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

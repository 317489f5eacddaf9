//! Weights in four bits (Dettmers et al. 2023, arXiv 2305.14314), in the layout of
//! bitsandbytes 0.50: blocks of 64 neighbours share a scale.

use serde::Serialize;

use crate::{TensorId, WeightPart};

/// Elements that share a scale.
pub const QUANT_BLOCK: usize = 64;
/// Scales that share a scale of their own, with double quantization.
pub const NESTED_BLOCK: usize = 256;

/// What the sixteen codes stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Codebook {
    Fp4,
    Nf4,
}

impl Codebook {
    /// What each code stands for, relative to its block's scale (bitsandbytes 0.50
    /// `get_4bit_type`). Bit 3 of an FP4 code is its sign.
    pub const fn values(self) -> &'static [f32; 16] {
        match self {
            Codebook::Nf4 => &NF4,
            Codebook::Fp4 => &FP4,
        }
    }
}

#[rustfmt::skip]
const NF4: [f32; 16] = [
    -1.0, -0.696_192_8, -0.525_073_05, -0.394_917_5, -0.284_441_38, -0.184_773_43, -0.091_050_036, 0.0,
    0.079_580_3, 0.160_930_2, 0.246_112_3, 0.337_915_24, 0.440_709_83, 0.562_617, 0.722_956_84, 1.0,
];

#[rustfmt::skip]
const FP4: [f32; 16] = [
    0.0, 0.005_208_333_3, 0.666_666_7, 1.0, 0.333_333_34, 0.5, 0.166_666_67, 0.25,
    -0.0, -0.005_208_333_3, -0.666_666_7, -1.0, -0.333_333_34, -0.5, -0.166_666_67, -0.25,
];

/// How frozen matrices are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Quant {
    pub codebook: Codebook,
    /// The scales are quantized too (double quantization).
    pub double: bool,
    /// The head is quantized as well.
    pub head: bool,
}

impl Quant {
    /// `nf4-dq`.
    pub fn name(self) -> &'static str {
        match (self.codebook, self.double) {
            (Codebook::Fp4, false) => "fp4",
            (Codebook::Fp4, true) => "fp4-dq",
            (Codebook::Nf4, false) => "nf4",
            (Codebook::Nf4, true) => "nf4-dq",
        }
    }
}

/// A matrix (rows, cols) in four bits: tensors of a checkpoint one below the other,
/// each quantized on its own.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizedMatrix {
    pub codebook: Codebook,
    pub parts: Vec<QuantizedPart>,
    pub rows: usize,
    pub cols: usize,
}

/// One tensor of a checkpoint in four bits.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizedPart {
    pub rows: usize,
    /// (n / 2) bytes: element 2 i in the high half of byte i.
    pub codes: TensorId,
    /// (n / 64) scales: f32, or codes of the signed dynamic map.
    pub absmax: TensorId,
    pub nested: Option<Nested>,
}

/// Scales of the scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nested {
    /// (n / 64 / 256) f32.
    pub absmax: TensorId,
    /// (1) f32: what was taken off every scale before it was quantized.
    pub offset: TensorId,
}

impl QuantizedMatrix {
    pub fn for_each_tensor(&self, mut f: impl FnMut(TensorId)) {
        for part in &self.parts {
            f(part.codes);
            f(part.absmax);
            if let Some(nested) = part.nested {
                f(nested.absmax);
                f(nested.offset);
            }
        }
    }
}

/// Name of a part's tensors in a program, before `.codes`, `.absmax`,
/// `.nested_absmax` and `.offset`: `layers.3.attn.qkv.k_proj`.
pub fn quantized_name(part: &WeightPart) -> String {
    let module = part.source.strip_suffix(".weight").unwrap_or(&part.source);
    format!("{}.{}", part.tensor, module.rsplit('.').next().unwrap_or(module))
}

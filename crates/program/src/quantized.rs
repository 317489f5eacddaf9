//! Weights in four bits (Dettmers et al. 2023, arXiv 2305.14314), in the layout of
//! bitsandbytes 0.50: blocks of 64 neighbours share a scale.

use plimsoll_quant::{Codebook, Format4bit};
use serde::{Serialize, Serializer};

use crate::{TensorId, WeightPart};

/// How frozen matrices are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Quant {
    #[serde(serialize_with = "codebook_name")]
    pub codebook: Codebook,
    /// The scales are quantized too (double quantization).
    pub double: bool,
    /// The head is quantized as well.
    pub head: bool,
}

impl Quant {
    /// `nf4-dq`.
    pub fn name(self) -> &'static str {
        self.format().name()
    }

    pub fn format(self) -> Format4bit {
        Format4bit { codebook: self.codebook, double: self.double }
    }
}

fn codebook_name<S: Serializer>(codebook: &Codebook, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(codebook.name())
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

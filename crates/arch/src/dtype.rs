//! Element types of tensors in memory.

use serde::{Deserialize, Serialize};

/// The type of one element. Sizes are exact: no type here is smaller than a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    F32,
    Bf16,
    /// Token ids, labels, positions.
    I32,
    /// The lower half of a float32 number whose upper half is a bf16 one.
    I16,
    /// Opaque bytes: workspaces, packed 4-bit codes.
    U8,
}

impl DType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            DType::F32 | DType::I32 => 4,
            DType::Bf16 | DType::I16 => 2,
            DType::U8 => 1,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::I32 => "i32",
            DType::I16 => "i16",
            DType::U8 => "u8",
        }
    }

    /// The name that PyTorch and `config.json` use.
    pub const fn torch_name(self) -> &'static str {
        match self {
            DType::F32 => "float32",
            DType::Bf16 => "bfloat16",
            DType::I32 => "int32",
            DType::I16 => "int16",
            DType::U8 => "uint8",
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

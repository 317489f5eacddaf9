//! What bitsandbytes computed, from `PLIMSOLL_SHARED/golden`.
#![allow(dead_code)] // Each test file uses its part.

use std::path::{Path, PathBuf};

use half::bf16;
use safetensors::{Dtype, SafeTensors};

pub struct Golden {
    bytes: Vec<u8>,
    meta: serde_json::Value,
}

impl Golden {
    /// None, with a note, where the file is not at hand.
    pub fn open() -> Option<Golden> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared");
        let shared = std::env::var_os("PLIMSOLL_SHARED").map_or(root, PathBuf::from);
        let path = shared.join("golden/bnb.safetensors");
        let text = std::fs::read_to_string(path.with_extension("json"));
        match (std::fs::read(&path), text) {
            (Ok(bytes), Ok(text)) => {
                Some(Golden { bytes, meta: serde_json::from_str(&text).unwrap() })
            }
            _ => {
                eprintln!("skipped: {} is not there", path.display());
                None
            }
        }
    }

    /// The offset of the scales of a case.
    pub fn offset(&self, case: &str) -> f32 {
        self.meta[format!("{case}.offset")].as_f64().unwrap() as f32
    }

    pub fn bf16(&self, name: &str) -> Vec<bf16> {
        let words = self.tensor(name, Dtype::BF16);
        words.chunks_exact(2).map(|w| bf16::from_bits(u16::from_le_bytes([w[0], w[1]]))).collect()
    }

    fn tensor(&self, name: &str, dtype: Dtype) -> Vec<u8> {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let view = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(view.dtype(), dtype, "{name}");
        view.data().to_vec()
    }

    pub fn f32(&self, name: &str) -> Vec<f32> {
        let words = self.tensor(name, Dtype::F32);
        words.chunks_exact(4).map(|w| f32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect()
    }

    pub fn u8(&self, name: &str) -> Vec<u8> {
        self.tensor(name, Dtype::U8)
    }
}

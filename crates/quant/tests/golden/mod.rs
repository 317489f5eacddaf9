//! What bitsandbytes computed, from `PLIMSOLL_SHARED/golden`.
#![allow(dead_code)] // Each test file uses its part.

use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};

pub struct Golden {
    bytes: Vec<u8>,
}

impl Golden {
    /// None, with a note, where the file is not at hand.
    pub fn open() -> Option<Golden> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared");
        let shared = std::env::var_os("PLIMSOLL_SHARED").map_or(root, PathBuf::from);
        let path = shared.join("golden/bnb.safetensors");
        match std::fs::read(&path) {
            Ok(bytes) => Some(Golden { bytes }),
            Err(e) => {
                eprintln!("skipped: {}: {e}", path.display());
                None
            }
        }
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

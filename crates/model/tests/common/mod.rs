//! Files that tests write themselves, down to the byte.
#![allow(dead_code)] // Each test uses its part.

use std::path::{Path, PathBuf};

use plimsoll_arch::Architecture;
use serde_json::{Map, Value, json};

/// A Llama of 1 block: C 4, I 6, 2 heads of 2, V 5, untied.
pub fn tiny() -> Architecture {
    Architecture::from_config_json(TINY, "tiny").unwrap()
}

pub const TINY: &str = r#"{"model_type": "llama", "hidden_size": 4, "intermediate_size": 6,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 5,
    "max_position_embeddings": 8, "rms_norm_eps": 1e-5}"#;

/// A safetensors file: header length, header, data.
pub fn safetensors(header: &Value, data: &[u8]) -> Vec<u8> {
    let header = header.to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    file
}

/// The header and data of f32 tensors.
pub fn f32_tensors(tensors: &[(String, Vec<usize>, Vec<f32>)]) -> (Value, Vec<u8>) {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, shape, values) in tensors {
        let start = data.len();
        data.extend(values.iter().flat_map(|x| x.to_le_bytes()));
        let offsets = [start, data.len()];
        let info = json!({"dtype": "F32", "shape": shape, "data_offsets": offsets});
        header.insert(name.clone(), info);
    }
    (Value::Object(header), data)
}

/// All tensors of a model, with values that tell them apart.
pub fn weights(arch: &Architecture) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let mut count = 0;
    let fill = |(name, shape): (String, Vec<usize>)| {
        let n: usize = shape.iter().product();
        let values = (count..count + n).map(|i| i as f32 * 0.25 - 3.0).collect();
        count += n;
        (name, shape, values)
    };
    plimsoll_model::expected_tensors(arch).into_iter().map(fill).collect()
}

/// Writes a folder with a config and one safetensors file.
pub fn folder(config: &str, file: &[u8]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
    dir
}

/// A GGUF file under construction.
pub struct Gguf {
    pub version: u32,
    pub keys: Vec<(String, Vec<u8>)>,
    /// Name, shape with rows first, ggml type, data.
    pub tensors: Vec<(String, Vec<usize>, u32, Vec<u8>)>,
}

fn string(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

impl Gguf {
    pub fn u32(mut self, key: &str, value: u32) -> Self {
        let bytes = [4u32.to_le_bytes(), value.to_le_bytes()].concat();
        self.keys.push((key.into(), bytes));
        self
    }

    pub fn f32(mut self, key: &str, value: f32) -> Self {
        let bytes = [6u32.to_le_bytes(), value.to_le_bytes()].concat();
        self.keys.push((key.into(), bytes));
        self
    }

    pub fn string(mut self, key: &str, value: &str) -> Self {
        let bytes = [8u32.to_le_bytes().to_vec(), string(value)].concat();
        self.keys.push((key.into(), bytes));
        self
    }

    pub fn strings(mut self, key: &str, values: &[&str]) -> Self {
        let mut bytes = [9u32.to_le_bytes(), 8u32.to_le_bytes()].concat();
        bytes.extend((values.len() as u64).to_le_bytes());
        bytes.extend(values.iter().flat_map(|v| string(v)));
        self.keys.push((key.into(), bytes));
        self
    }

    pub fn set(mut self, key: &str, value: u32) -> Self {
        self.keys.retain(|(k, _)| k != key);
        self.u32(key, value)
    }

    /// The tiny Llama; `head_dim` 2, so that a head is one pair of rows.
    pub fn tiny() -> Gguf {
        let gguf = Gguf { version: 3, keys: Vec::new(), tensors: Vec::new() };
        let mut gguf = gguf
            .string("general.architecture", "llama")
            .u32("llama.context_length", 8)
            .u32("llama.embedding_length", 4)
            .u32("llama.block_count", 1)
            .u32("llama.feed_forward_length", 6)
            .u32("llama.attention.head_count", 2)
            .u32("llama.attention.head_count_kv", 1)
            .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
            .strings("tokenizer.ggml.tokens", &["a", "b", "c", "d", "\u{e9}"])
            .u32("tokenizer.ggml.eos_token_id", 2);
        for (name, shape, values) in weights(&tiny()) {
            let name = name
                .replace("model.embed_tokens", "token_embd")
                .replace("model.norm", "output_norm")
                .replace("lm_head", "output")
                .replace("model.layers", "blk")
                .replace("input_layernorm", "attn_norm")
                .replace("post_attention_layernorm", "ffn_norm")
                .replace("self_attn.o_proj", "attn_output")
                .replace("self_attn.", "attn_")
                .replace("mlp.", "ffn_")
                .replace("_proj", "");
            let data = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            gguf.tensors.push((name, shape, 0, data));
        }
        gguf
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(self.version.to_le_bytes());
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend((self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            file.extend(string(key));
            file.extend(value);
        }
        let mut offset = 0;
        for (name, shape, kind, data) in &self.tensors {
            file.extend(string(name));
            file.extend((shape.len() as u32).to_le_bytes());
            file.extend(shape.iter().rev().flat_map(|d| (*d as u64).to_le_bytes()));
            file.extend(kind.to_le_bytes());
            file.extend((offset as u64).to_le_bytes());
            offset += data.len().next_multiple_of(32);
        }
        for (_, _, _, data) in &self.tensors {
            file.resize(file.len().next_multiple_of(32), 0);
            file.extend(data);
        }
        file
    }

    pub fn write(&self, dir: &Path) -> PathBuf {
        let path = dir.join("model.gguf");
        std::fs::write(&path, self.bytes()).unwrap();
        path
    }
}

/// The folder of shared fixtures, if there is one.
pub fn shared() -> Option<PathBuf> {
    let fixed = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared");
    let path = PathBuf::from(std::env::var_os("PLIMSOLL_SHARED").unwrap_or_else(|| fixed.into()));
    if !path.is_dir() {
        eprintln!("skipped: no shared fixtures at {}", path.display());
        return None;
    }
    Some(path)
}

/// Reads a tensor, its length taken from its shape; and parts of it, which begin and end
/// anywhere and have the same bits.
pub fn read(checkpoint: &plimsoll_model::Checkpoint, name: &str) -> Vec<f32> {
    let n: usize = checkpoint.shape(name).unwrap().iter().product();
    let mut values = vec![0.0; n];
    checkpoint.read_f32(name, &mut values).unwrap();
    for (first, end) in [(0, n / 2), (n / 3, n), (n / 2 + 1, n / 2 + 2), (n / 7, n / 5), (n, n)] {
        let (first, end) = (first.min(n), end.min(n).max(first.min(n)));
        let mut part = vec![0.0; end - first];
        checkpoint.read_f32_from(name, first, &mut part).unwrap();
        let same = part.iter().zip(&values[first..end]).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "{name} from {first} to {end}");
    }
    values
}

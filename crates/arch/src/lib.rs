//! What a model is, before anyone looks at its weights: the hyper-parameters
//! of the Llama family, read from a Hugging Face `config.json`, from a preset,
//! or from the metadata of a GGUF file.
//!
//! This crate is the bottom of the house. It depends on nothing but serde and
//! runs anywhere.

mod config;
mod dtype;
mod presets;
mod rope;

pub use config::{ConfigError, MAX_DIMENSION, MAX_LAYERS, MAX_PARAMETERS};
pub use dtype::DType;
pub use presets::{preset, preset_hub_id, preset_names};

use serde::{Deserialize, Serialize};

/// The model families whose blocks the builders know how to write.
///
/// All of them are pre-norm decoders with RMSNorm, rotary positions and a
/// SwiGLU MLP. They differ in the switches of [`Architecture`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// Llama 1, 2, 3, 3.x, TinyLlama, SmolLM2.
    Llama,
    /// Mistral: Llama with a sliding attention window.
    Mistral,
    /// Qwen1.5, Qwen2 and Qwen2.5: Llama with a bias on the QKV projection.
    Qwen2,
    /// Qwen3: RMSNorm over each query and key head, explicit `head_dim`.
    Qwen3,
}

/// How rotary frequencies are stretched beyond the trained context.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
pub enum RopeScaling {
    /// Every position divided by `factor`.
    Linear { factor: f64 },
    /// Llama 3.1: low frequencies divided by `factor`, high ones kept, a
    /// smooth ramp between (transformers 5.17 `_compute_llama3_parameters`).
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position_embeddings: usize,
    },
}

/// Hyper-parameters of one model, named as in Hugging Face `config.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Architecture {
    /// What to call it in messages: the preset, the directory or the file.
    pub name: String,
    pub family: Family,
    /// C: width of the residual stream.
    pub hidden_size: usize,
    /// I: width of the MLP.
    pub intermediate_size: usize,
    /// L: number of blocks.
    pub num_hidden_layers: usize,
    /// H: number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads; divides `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// D: width of one head; even, and not always C / H.
    pub head_dim: usize,
    /// V: rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Longest sequence the model was made for.
    pub max_position_embeddings: usize,
    pub rope_theta: f64,
    pub rope_scaling: Option<RopeScaling>,
    pub rms_norm_eps: f64,
    /// The head shares the embedding's weight.
    pub tie_word_embeddings: bool,
    /// The query, key and value projections carry a bias.
    pub attention_bias: bool,
    /// RMSNorm over each query and key head before the rotation (Qwen3).
    pub qk_norm: bool,
    /// A query sees at most this many positions, itself included.
    pub sliding_window: Option<usize>,
    /// With a window: the first layer it applies to (Qwen2 `max_window_layers`).
    pub first_windowed_layer: usize,
    pub bos_token_id: Option<u32>,
    /// Any of these ends a generation.
    pub eos_token_ids: Vec<u32>,
}

impl Architecture {
    /// Columns of the fused query-key-value projection: (H + 2 H_kv) D.
    pub fn qkv_width(&self) -> usize {
        self.q_width() + 2 * self.kv_width()
    }

    /// Columns of all query heads: H D.
    pub fn q_width(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Columns of all key heads: H_kv D.
    pub fn kv_width(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// The attention window of one layer, if it has one.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.sliding_window.filter(|_| layer >= self.first_windowed_layer)
    }

    /// Number of parameters of one block.
    pub fn block_parameters(&self) -> usize {
        let (c, i) = (self.hidden_size, self.intermediate_size);
        let bias = if self.attention_bias { self.qkv_width() } else { 0 };
        let qk_norm = if self.qk_norm { 2 * self.head_dim } else { 0 };
        self.qkv_width() * c + bias + qk_norm + c * self.q_width() + 3 * i * c + 2 * c
    }

    /// Number of parameters, a tied head counted once.
    pub fn parameters(&self) -> usize {
        let table = self.vocab_size * self.hidden_size;
        let tables = if self.tie_word_embeddings { table } else { 2 * table };
        tables + self.num_hidden_layers * self.block_parameters() + self.hidden_size
    }
}

//! How the tensors of a checkpoint lie in the tensors of a program.
//!
//! Projections that read the same input are one matrix here, so that each is
//! one product: query, key and value; gate and up. A checkpoint keeps them apart.

use plimsoll_arch::Architecture;

/// One tensor of a checkpoint, and the rows of the program's tensor it fills.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightPart {
    /// Name in the program: `layers.3.attn.qkv`.
    pub tensor: String,
    /// Name in a Hugging Face checkpoint.
    pub source: String,
    /// First row of the program's tensor; for a vector, its first element.
    pub row: usize,
    /// Shape in the checkpoint: (rows, cols), or (elements).
    pub shape: Vec<usize>,
}

/// Name of the lower half of a weight's float32 master: `master.layers.3.attn.qkv`.
pub fn master_name(tensor: &str) -> String {
    format!("master.{tensor}")
}

/// Every tensor of a checkpoint of this architecture, in the order of the
/// forward pass. A tied head has no part of its own.
pub fn weight_parts(arch: &Architecture) -> Vec<WeightPart> {
    let (c, i, v) = (arch.hidden_size, arch.intermediate_size, arch.vocab_size);
    let (q, kv, d) = (arch.q_width(), arch.kv_width(), arch.head_dim);
    let mut parts = Vec::new();
    let mut part = |tensor: String, source: String, row: usize, shape: &[usize]| {
        parts.push(WeightPart { tensor, source, row, shape: shape.to_vec() });
    };
    part("embed_tokens".into(), "model.embed_tokens.weight".into(), 0, &[v, c]);
    for l in 0..arch.num_hidden_layers {
        let (to, from) = (format!("layers.{l}"), format!("model.layers.{l}"));
        part(format!("{to}.input_norm"), format!("{from}.input_layernorm.weight"), 0, &[c]);
        for (name, row, rows) in [("q", 0, q), ("k", q, kv), ("v", q + kv, kv)] {
            let source = format!("{from}.self_attn.{name}_proj");
            part(format!("{to}.attn.qkv"), format!("{source}.weight"), row, &[rows, c]);
            if arch.attention_bias {
                part(format!("{to}.attn.qkv_bias"), format!("{source}.bias"), row, &[rows]);
            }
        }
        if arch.qk_norm {
            for name in ["q", "k"] {
                let source = format!("{from}.self_attn.{name}_norm.weight");
                part(format!("{to}.attn.{name}_norm"), source, 0, &[d]);
            }
        }
        part(format!("{to}.attn.o"), format!("{from}.self_attn.o_proj.weight"), 0, &[c, q]);
        let norm = format!("{from}.post_attention_layernorm.weight");
        part(format!("{to}.post_norm"), norm, 0, &[c]);
        part(format!("{to}.mlp.gate_up"), format!("{from}.mlp.gate_proj.weight"), 0, &[i, c]);
        part(format!("{to}.mlp.gate_up"), format!("{from}.mlp.up_proj.weight"), i, &[i, c]);
        part(format!("{to}.mlp.down"), format!("{from}.mlp.down_proj.weight"), 0, &[c, i]);
    }
    part("norm".into(), "model.norm.weight".into(), 0, &[c]);
    if !arch.tie_word_embeddings {
        part("lm_head".into(), "lm_head.weight".into(), 0, &[v, c]);
    }
    parts
}

//! The tensors of a model, by their Hugging Face names.

use plimsoll_arch::Architecture;

/// Every tensor that a checkpoint of this architecture holds, in the order of
/// the forward pass, with its shape: (rows, columns) = (outputs, inputs) for a
/// projection, (V, C) for the embedding and the head. A tied head is not
/// stored. As transformers 5.24 names them.
pub fn expected_tensors(arch: &Architecture) -> Vec<(String, Vec<usize>)> {
    let (c, i, d) = (arch.hidden_size, arch.intermediate_size, arch.head_dim);
    let (q, kv) = (arch.q_width(), arch.kv_width());
    let table = vec![arch.vocab_size, c];

    let mut tensors = vec![("model.embed_tokens.weight".to_string(), table.clone())];
    for layer in 0..arch.num_hidden_layers {
        let mut push = |name: &str, shape: &[usize]| {
            tensors.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
        };
        push("input_layernorm.weight", &[c]);
        for (name, width) in [("q_proj", q), ("k_proj", kv), ("v_proj", kv)] {
            push(&format!("self_attn.{name}.weight"), &[width, c]);
            if arch.attention_bias {
                push(&format!("self_attn.{name}.bias"), &[width]);
            }
        }
        if arch.qk_norm {
            push("self_attn.q_norm.weight", &[d]);
            push("self_attn.k_norm.weight", &[d]);
        }
        push("self_attn.o_proj.weight", &[c, q]);
        push("post_attention_layernorm.weight", &[c]);
        push("mlp.gate_proj.weight", &[i, c]);
        push("mlp.up_proj.weight", &[i, c]);
        push("mlp.down_proj.weight", &[c, i]);
    }
    tensors.push(("model.norm.weight".to_string(), vec![c]));
    if !arch.tie_word_embeddings {
        tensors.push(("lm_head.weight".to_string(), table));
    }
    tensors
}

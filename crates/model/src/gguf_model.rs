//! What GGUF calls things: tensors to their Hugging Face names, metadata to an
//! [`Architecture`]. The conventions are those of llama.cpp's converter.

use plimsoll_arch::{Architecture, ConfigError, Family, RopeScaling};

use crate::ModelError;
use crate::gguf::GgufMetadata;
use crate::safetensors::RawTensor;

/// The Hugging Face name of a tensor, or `None` if it has none.
pub(crate) fn hugging_face_name(gguf: &str) -> Option<String> {
    let fixed = match gguf {
        "token_embd.weight" => "model.embed_tokens.weight",
        "output_norm.weight" => "model.norm.weight",
        "output.weight" => "lm_head.weight",
        _ => {
            let (layer, rest) = gguf.strip_prefix("blk.")?.split_once('.')?;
            let layer: usize = layer.parse().ok()?;
            let (module, kind) = rest.rsplit_once('.')?;
            if !matches!(kind, "weight" | "bias") {
                return None;
            }
            let module = match module {
                "attn_norm" => "input_layernorm",
                "attn_q" => "self_attn.q_proj",
                "attn_k" => "self_attn.k_proj",
                "attn_v" => "self_attn.v_proj",
                "attn_output" => "self_attn.o_proj",
                "attn_q_norm" => "self_attn.q_norm",
                "attn_k_norm" => "self_attn.k_norm",
                "ffn_norm" => "post_attention_layernorm",
                "ffn_gate" => "mlp.gate_proj",
                "ffn_up" => "mlp.up_proj",
                "ffn_down" => "mlp.down_proj",
                _ => return None,
            };
            return Some(format!("model.layers.{layer}.{module}.{kind}"));
        }
    };
    Some(fixed.to_string())
}

/// The width of a head if the rows of this tensor are stored in pairs.
///
/// Llama's own code, and so GGUF files of the `llama` kind, rotate neighbouring
/// elements (2i, 2i + 1) of a query or key head; Hugging Face rotates element i
/// with i + D/2. The converter reorders the rows accordingly, and reading
/// reorders them back: row a D/2 + i of a head is row 2i + a in the file.
pub(crate) fn paired_rows(arch: &Architecture, name: &str) -> Option<usize> {
    let projection = name.starts_with("model.layers.")
        && (name.ends_with(".self_attn.q_proj.weight")
            || name.ends_with(".self_attn.k_proj.weight"));
    (matches!(arch.family, Family::Llama | Family::Mistral) && projection).then_some(arch.head_dim)
}

/// The metadata of one architecture, `llama.block_count` and so on.
struct Keys<'a> {
    metadata: &'a GgufMetadata,
    kind: &'a str,
}

impl Keys<'_> {
    fn key(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.kind)
    }

    /// A size; a list is accepted if its values, one a layer, are all equal.
    fn size(&self, suffix: &str) -> Result<Option<usize>, ModelError> {
        let key = self.key(suffix);
        let value = match self.metadata.unsigned(&key) {
            Err(single) => {
                let Ok(Some(list)) = self.metadata.integers(&key) else { return Err(single) };
                match list.as_slice() {
                    [first, rest @ ..] if rest.iter().all(|n| n == first) => Some(*first as u64),
                    _ => {
                        let reason = "it differs between layers, which is not supported";
                        return Err(self.metadata.error(&key, reason.into()));
                    }
                }
            }
            Ok(value) => value,
        };
        Ok(value.map(|n| usize::try_from(n).unwrap_or(usize::MAX)))
    }

    fn required(&self, suffix: &str) -> Result<usize, ModelError> {
        self.size(suffix)?.ok_or_else(|| self.missing(suffix))
    }

    fn missing(&self, suffix: &str) -> ModelError {
        self.metadata.error(&self.key(suffix), "it is missing".into())
    }

    fn refuse(&self, suffix: &str, reason: String) -> ModelError {
        self.metadata.error(&self.key(suffix), reason)
    }
}

/// The architecture that the metadata describe. `tensors` still have the names
/// of the file; `rope_freqs` reads the values of the tensor of that name.
pub(crate) fn architecture(
    metadata: &GgufMetadata,
    tensors: &[RawTensor],
    name: &str,
    rope_freqs: impl FnOnce(&RawTensor) -> Result<Vec<f32>, ModelError>,
) -> Result<Architecture, ModelError> {
    let key = "general.architecture";
    let kind = metadata.string(key)?;
    let kind = kind.ok_or_else(|| metadata.error(key, "it is missing".into()))?;
    let keys = Keys { metadata, kind };
    let window = || keys.size("attention.sliding_window").map(|w| w.filter(|w| *w > 0));
    let (family, sliding_window) = match kind {
        "llama" => match window()? {
            None => (Family::Llama, None),
            some => (Family::Mistral, some),
        },
        "qwen2" => (Family::Qwen2, None),
        "qwen3" => (Family::Qwen3, None),
        other => {
            return Err(ModelError::Config(ConfigError::Architecture {
                name: name.to_string(),
                architecture: other.chars().take(80).collect(),
                supported: "llama, qwen2, qwen3".into(),
            }));
        }
    };
    if let Some(n) = keys.size("expert_count")?.filter(|n| *n > 0) {
        let reason = format!("a mixture of {n} experts is not supported");
        return Err(keys.refuse("expert_count", reason));
    }

    let hidden_size = keys.required("embedding_length")?;
    let num_attention_heads = keys.required("attention.head_count")?;
    let head_dim = match keys.size("attention.key_length")? {
        Some(d) => d,
        None if num_attention_heads > 0 && hidden_size.is_multiple_of(num_attention_heads) => {
            hidden_size / num_attention_heads
        }
        None => {
            let reason = format!("{num_attention_heads} does not divide {hidden_size}");
            return Err(keys.refuse("attention.head_count", reason));
        }
    };
    for suffix in ["attention.value_length", "rope.dimension_count"] {
        if let Some(n) = keys.size(suffix)?.filter(|n| *n != head_dim) {
            let reason = format!("{n} is not the width of a head, {head_dim}");
            return Err(keys.refuse(suffix, reason));
        }
    }
    let max_position_embeddings = keys.required("context_length")?;
    let rope_theta = metadata.float(&keys.key("rope.freq_base"))?.unwrap_or(1e4);
    let table = "token_embd.weight";
    let embedding = tensors.iter().find(|t| t.name == table && t.shape.len() == 2);
    let embedding =
        embedding.ok_or_else(|| metadata.error(table, "the file has no such matrix".into()))?;

    let mut arch = Architecture {
        name: name.to_string(),
        family,
        hidden_size,
        intermediate_size: keys.required("feed_forward_length")?,
        num_hidden_layers: keys.required("block_count")?,
        num_attention_heads,
        num_key_value_heads: keys.size("attention.head_count_kv")?.unwrap_or(num_attention_heads),
        head_dim,
        vocab_size: embedding.shape[0],
        max_position_embeddings,
        rope_theta,
        rope_scaling: None,
        rms_norm_eps: {
            let suffix = "attention.layer_norm_rms_epsilon";
            metadata.float(&keys.key(suffix))?.ok_or_else(|| keys.missing(suffix))?
        },
        tie_word_embeddings: !tensors.iter().any(|t| t.name == "output.weight"),
        attention_bias: family == Family::Qwen2,
        qk_norm: family == Family::Qwen3,
        sliding_window,
        first_windowed_layer: 0,
        bos_token_id: token(metadata, "tokenizer.ggml.bos_token_id")?,
        eos_token_ids: Vec::new(),
    };
    for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"] {
        if let Some(id) = token(metadata, key)?.filter(|id| !arch.eos_token_ids.contains(id)) {
            arch.eos_token_ids.push(id);
        }
    }
    // The sizes must be sound before the frequencies are computed from them.
    arch.validate()?;
    arch.rope_scaling = scaling(&keys)?;
    if let Some(tensor) = tensors.iter().find(|t| t.name == "rope_freqs.weight") {
        let factors = rope_freqs(tensor)?;
        arch.rope_scaling = llama3_scaling(&keys, &arch, &factors)?;
    }
    arch.validate()?;
    Ok(arch)
}

fn token(metadata: &GgufMetadata, key: &str) -> Result<Option<u32>, ModelError> {
    let Some(id) = metadata.unsigned(key)? else { return Ok(None) };
    let id = u32::try_from(id).map_err(|_| metadata.error(key, format!("{id} is no token id")))?;
    // llama.cpp writes 2^32 - 1 for none.
    Ok(Some(id).filter(|id| *id != u32::MAX))
}

/// `rope.scaling.type` and `rope.scaling.factor`.
fn scaling(keys: &Keys) -> Result<Option<RopeScaling>, ModelError> {
    let kind = keys.metadata.string(&keys.key("rope.scaling.type"))?;
    let factor = keys.metadata.float(&keys.key("rope.scaling.factor"))?;
    // The key of older files, which know only this kind.
    let old = keys.metadata.float(&keys.key("rope.scale_linear"))?;
    match (kind, factor.or(old)) {
        (Some("none"), _) | (None, None) => Ok(None),
        // llama.cpp takes a factor of 0 for none.
        (Some("linear") | None, Some(factor)) if factor == 0.0 || factor == 1.0 => Ok(None),
        (Some("linear") | None, Some(factor)) => Ok(Some(RopeScaling::Linear { factor })),
        (Some("linear"), None) => Err(keys.missing("rope.scaling.factor")),
        (Some(other), _) => {
            let reason = format!("`{other}` is not supported; supported: none, linear");
            Err(keys.refuse("rope.scaling.type", reason))
        }
    }
}

/// Finds the Llama 3.1 parameters behind a `rope_freqs.weight`, which holds
/// the number that divides each of the D/2 frequencies.
///
/// The low frequencies show the factor. The other parameters are those of all
/// published models (1, 4 and 8192 positions); that they explain every number
/// is checked.
fn llama3_scaling(
    keys: &Keys,
    arch: &Architecture,
    factors: &[f32],
) -> Result<Option<RopeScaling>, ModelError> {
    let tensor = "rope_freqs.weight";
    let half = arch.head_dim / 2;
    if factors.len() != half {
        let reason = format!("it has {} values, expected {half}", factors.len());
        return Err(keys.metadata.error(tensor, reason));
    }
    if factors.iter().all(|f| *f == 1.0) {
        return Ok(None);
    }
    let factor = f64::from(factors.iter().copied().fold(1.0, f32::max));
    let (low, high) = (1.0, 4.0);
    let original = keys.size("rope.scaling.original_context_length")?.unwrap_or(8192);
    for (i, found) in factors.iter().enumerate() {
        let exponent = (2 * i) as f64 / arch.head_dim as f64;
        let wavelength = 2.0 * std::f64::consts::PI * arch.rope_theta.powf(exponent);
        let turns = original as f64 / wavelength;
        let smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0);
        let expected = 1.0 / ((1.0 - smooth) / factor + smooth);
        // The converter computed in float32.
        if !found.is_finite() || (f64::from(*found) - expected).abs() > 1e-3 * expected {
            let reason = format!(
                "value {i} is {found}, but Llama 3 scaling by {factor} from {original} positions \
                 has {expected}; other scalings are not supported"
            );
            return Err(keys.metadata.error(tensor, reason));
        }
    }
    Ok(Some(RopeScaling::Llama3 {
        factor,
        low_freq_factor: low,
        high_freq_factor: high,
        original_max_position_embeddings: original,
    }))
}

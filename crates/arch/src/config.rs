//! Hugging Face `config.json`, in and out.
//!
//! Read as transformers 5.24 reads it, both in the form that versions 4 wrote
//! (`rope_theta`, `rope_scaling`) and in the form of versions 5
//! (`rope_parameters`). What the builders cannot compute is refused here by
//! name, so that nothing later runs a model that is almost the one asked for.

use serde_json::{Map, Value, json};

use crate::{Architecture, DType, Family, RopeScaling};

/// Largest size of one dimension (vocabulary, widths, positions): 2^24.
///
/// With the bounds on layers and parameters it keeps every product of
/// dimensions that a plan forms far from 2^64.
pub const MAX_DIMENSION: usize = 1 << 24;
/// Most blocks of one model.
pub const MAX_LAYERS: usize = 4096;
/// Most parameters of one model: 2^44, 17.6 trillion.
pub const MAX_PARAMETERS: usize = 1 << 44;

/// Why a configuration was refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ConfigError {
    #[error("{name}: config is not a JSON object: {reason}")]
    Json { name: String, reason: String },
    #[error("{name}: config lacks `{key}`, {allowed}")]
    Missing { name: String, key: String, allowed: String },
    #[error("{name}: config has `{key}` = {value}, expected {allowed}")]
    Value { name: String, key: String, value: String, allowed: String },
    #[error("{name}: architecture `{architecture}` is not supported; supported: {supported}")]
    Architecture { name: String, architecture: String, supported: String },
    #[error("`{name}` is not a preset; the closest are {}", closest.join(", "))]
    UnknownPreset { name: String, closest: Vec<&'static str> },
}

impl Family {
    /// All families, in the order in which messages list them.
    pub const ALL: [Family; 4] = [Family::Llama, Family::Mistral, Family::Qwen2, Family::Qwen3];

    /// `model_type` in `config.json`; also `general.architecture` of a GGUF
    /// file, except that GGUF files of Mistral models say `llama`.
    pub const fn model_type(self) -> &'static str {
        match self {
            Family::Llama => "llama",
            Family::Mistral => "mistral",
            Family::Qwen2 => "qwen2",
            Family::Qwen3 => "qwen3",
        }
    }

    /// The class of transformers that holds this model.
    pub const fn class_name(self) -> &'static str {
        match self {
            Family::Llama => "LlamaForCausalLM",
            Family::Mistral => "MistralForCausalLM",
            Family::Qwen2 => "Qwen2ForCausalLM",
            Family::Qwen3 => "Qwen3ForCausalLM",
        }
    }
}

/// The keys of one JSON object, read with the name of the model at hand.
struct Keys<'a> {
    name: &'a str,
    map: &'a Map<String, Value>,
    /// Prefix of the keys in messages, such as `rope_scaling.`.
    within: &'a str,
}

impl<'a> Keys<'a> {
    /// A key's value; `null` is the same as absent.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    fn wrong(&self, key: &str, value: impl ToString, allowed: &str) -> ConfigError {
        let value = shorten(value.to_string());
        let key = format!("{}{key}", self.within);
        ConfigError::Value { name: self.name.to_string(), key, value, allowed: allowed.to_string() }
    }

    fn missing(&self, key: &str, allowed: &str) -> ConfigError {
        let key = format!("{}{key}", self.within);
        ConfigError::Missing { name: self.name.to_string(), key, allowed: allowed.to_string() }
    }

    /// A size: an integer of 1 to `most`.
    fn size_to(&self, key: &str, most: usize) -> Result<Option<usize>, ConfigError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match value.as_u64().and_then(|n| usize::try_from(n).ok()) {
            Some(n) if (1..=most).contains(&n) => Ok(Some(n)),
            _ => Err(self.wrong(key, value, &format!("an integer of 1 to {most}"))),
        }
    }

    fn size(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        self.size_to(key, MAX_DIMENSION)
    }

    fn required(&self, key: &str) -> Result<usize, ConfigError> {
        self.size(key)?.ok_or_else(|| self.missing(key, "an integer of at least 1"))
    }

    fn positive(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match value.as_f64() {
            Some(x) if x.is_finite() && x > 0.0 => Ok(Some(x)),
            _ => Err(self.wrong(key, value, "a finite number above 0")),
        }
    }

    fn required_positive(&self, key: &str) -> Result<f64, ConfigError> {
        self.positive(key)?.ok_or_else(|| self.missing(key, "a finite number above 0"))
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        value.as_bool().map(Some).ok_or_else(|| self.wrong(key, value, "true or false"))
    }

    /// Refuses a value other than the one that is computed here.
    fn only(&self, key: &str, allowed: Value, why: &str) -> Result<(), ConfigError> {
        match self.get(key) {
            Some(v)
                if *v != allowed && !(v.as_f64().is_some() && v.as_f64() == allowed.as_f64()) =>
            {
                Err(self.wrong(key, v, &format!("{allowed}: {why}")))
            }
            _ => Ok(()),
        }
    }

    fn object(&self, key: &str) -> Result<Option<&'a Map<String, Value>>, ConfigError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        value.as_object().map(Some).ok_or_else(|| self.wrong(key, value, "an object or null"))
    }
}

/// A value as a message shows it.
fn shorten(text: String) -> String {
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// The family, from `architectures` and `model_type`.
fn family(keys: &Keys) -> Result<Family, ConfigError> {
    let unsupported = |what: &str| ConfigError::Architecture {
        name: keys.name.to_string(),
        architecture: shorten(what.to_string()),
        supported: Family::ALL.map(Family::class_name).join(", "),
    };
    let model_type = match keys.get("model_type") {
        None => None,
        Some(Value::String(t)) => Some(t.as_str()),
        Some(other) => return Err(keys.wrong("model_type", other, "a string such as \"llama\"")),
    };
    let class = match keys.get("architectures") {
        None => None,
        Some(Value::Array(list)) if list.is_empty() => None,
        Some(Value::Array(list)) if list[0].is_string() => list[0].as_str(),
        Some(other) => return Err(keys.wrong("architectures", other, "a list of class names")),
    };
    let by_class = match class {
        // Older conversions spell it `LLaMAForCausalLM`.
        Some(c) => Some(
            Family::ALL
                .into_iter()
                .find(|f| f.class_name().eq_ignore_ascii_case(c))
                .ok_or_else(|| unsupported(c))?,
        ),
        None => None,
    };
    let by_type = match model_type {
        Some(t) => {
            let found = Family::ALL.into_iter().find(|f| f.model_type() == t);
            Some(found.ok_or_else(|| unsupported(t))?)
        }
        None => None,
    };
    match (by_class, by_type) {
        (Some(c), Some(t)) if c != t => Err(keys.wrong(
            "model_type",
            json!(t.model_type()),
            &format!("{:?} to go with architecture {}", c.model_type(), c.class_name()),
        )),
        (Some(f), _) | (None, Some(f)) => Ok(f),
        (None, None) => Err(keys.missing("model_type", "one of llama, mistral, qwen2, qwen3")),
    }
}

/// `rope_theta` and the scaling, from either form.
fn rope(keys: &Keys, positions: usize) -> Result<(f64, Option<RopeScaling>), ConfigError> {
    const ROTARY: &str = "every dimension of a head must be rotated";
    keys.only("partial_rotary_factor", json!(1.0), ROTARY)?;
    // An empty `rope_scaling` gives way to `rope_parameters`.
    let old = keys.object("rope_scaling")?.filter(|m| !m.is_empty());
    let (map, within) = match old {
        Some(map) => (Some(map), "rope_scaling."),
        None => (keys.object("rope_parameters")?, "rope_parameters."),
    };
    let theta = keys.positive("rope_theta")?;
    let Some(map) = map else {
        return Ok((theta.unwrap_or(1e4), None));
    };
    let inner = Keys { name: keys.name, map, within };
    inner.only("partial_rotary_factor", json!(1.0), ROTARY)?;
    let theta = inner.positive("rope_theta")?.or(theta).unwrap_or(1e4);

    const TYPES: &str = "one of \"default\", \"linear\", \"llama3\"";
    let key = if inner.get("rope_type").is_some() { "rope_type" } else { "type" };
    let kind = match inner.get(key) {
        None => "default",
        Some(Value::String(kind)) => kind,
        Some(other) => return Err(inner.wrong(key, other, TYPES)),
    };
    let scaling = match kind {
        "default" => {
            // Parameters for each kind of layer hide one level down.
            if let Some((k, v)) = map.iter().find(|(_, v)| v.is_object()) {
                return Err(inner.wrong(k, v, "one set of rope parameters for all layers"));
            }
            None
        }
        "linear" => Some(RopeScaling::Linear { factor: inner.required_positive("factor")? }),
        "llama3" => Some(RopeScaling::Llama3 {
            factor: inner.required_positive("factor")?,
            low_freq_factor: inner.required_positive("low_freq_factor")?,
            high_freq_factor: inner.required_positive("high_freq_factor")?,
            original_max_position_embeddings: inner
                .size("original_max_position_embeddings")?
                .unwrap_or(positions),
        }),
        other => return Err(inner.wrong(key, json!(other), TYPES)),
    };
    Ok((theta, scaling))
}

/// The attention window and the first layer that has it.
fn window(
    keys: &Keys,
    family: Family,
    layers: usize,
) -> Result<(Option<usize>, usize), ConfigError> {
    const DEFAULT: usize = 4096;
    let present = |key: &str, default| match keys.map.get(key) {
        None => Ok(Some(default)),
        Some(_) => keys.size(key),
    };
    match family {
        Family::Llama => return Ok((None, 0)),
        Family::Mistral => return Ok((present("sliding_window", DEFAULT)?, 0)),
        Family::Qwen2 | Family::Qwen3 => {}
    }
    if !keys.flag("use_sliding_window")?.unwrap_or(false) {
        return Ok((None, 0));
    }
    let Some(size) = present("sliding_window", DEFAULT)? else {
        return Ok((None, 0));
    };
    let first = match keys.get("layer_types") {
        Some(types) => {
            const ALLOWED: &str = "one entry a layer: \"full_attention\" for the first layers, \
                                   then \"sliding_attention\" for the others";
            let list = types.as_array().filter(|l| l.len() == layers);
            let list = list.ok_or_else(|| keys.wrong("layer_types", types, ALLOWED))?;
            let full = list.iter().take_while(|t| *t == "full_attention").count();
            if list[full..].iter().any(|t| t != "sliding_attention") {
                return Err(keys.wrong("layer_types", types, ALLOWED));
            }
            full
        }
        None => match keys.get("max_window_layers") {
            None => 28,
            Some(v) => v
                .as_u64()
                .and_then(|n| usize::try_from(n).ok())
                .ok_or_else(|| keys.wrong("max_window_layers", v, "an integer of at least 0"))?,
        },
    };
    // No layer has the window: the same as none.
    Ok(if first >= layers { (None, 0) } else { (Some(size), first) })
}

/// Token ids: an integer, a list of them, or null.
fn token_ids(keys: &Keys, key: &str, default: &[u32]) -> Result<Vec<u32>, ConfigError> {
    let id = |v: &Value| {
        v.as_u64()
            .and_then(|n| u32::try_from(n).ok())
            .ok_or_else(|| keys.wrong(key, v, "a token id, a list of token ids, or null"))
    };
    match keys.map.get(key) {
        None => Ok(default.to_vec()),
        Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(id).collect(),
        Some(v) => Ok(vec![id(v)?]),
    }
}

impl Architecture {
    /// Reads the text of a `config.json`. `name` is what messages call the
    /// model: the directory, the file or the hub id.
    ///
    /// # Errors
    /// Names the key, its value and what is allowed.
    pub fn from_config_json(text: &str, name: &str) -> Result<Architecture, ConfigError> {
        let json_error = |reason| ConfigError::Json { name: name.to_string(), reason };
        let value: Value = serde_json::from_str(text).map_err(|e| json_error(e.to_string()))?;
        let map = value.as_object().ok_or_else(|| json_error("it is another value".into()))?;
        Self::from_config(map, name)
    }

    /// As [`Architecture::from_config_json`], from the parsed object.
    ///
    /// # Errors
    /// Names the key, its value and what is allowed.
    pub fn from_config(
        config: &Map<String, Value>,
        name: &str,
    ) -> Result<Architecture, ConfigError> {
        let keys = Keys { name, map: config, within: "" };
        let family = family(&keys)?;

        keys.only("hidden_act", json!("silu"), "the MLP is SwiGLU")?;
        keys.only("mlp_bias", json!(false), "a bias on the MLP projections is not supported")?;
        keys.only("attention_dropout", json!(0.0), "dropout is not supported")?;
        if family != Family::Qwen2 {
            keys.only(
                "attention_bias",
                json!(false),
                "it would put a bias on o_proj as well, which is not supported",
            )?;
        }

        let hidden_size = keys.required("hidden_size")?;
        let num_hidden_layers = keys
            .size_to("num_hidden_layers", MAX_LAYERS)?
            .ok_or_else(|| keys.missing("num_hidden_layers", "an integer of at least 1"))?;
        let num_attention_heads = keys.required("num_attention_heads")?;
        let num_key_value_heads = match (keys.map.get("num_key_value_heads"), family) {
            (Some(_), _) => keys.size("num_key_value_heads")?.unwrap_or(num_attention_heads),
            (None, Family::Llama) => num_attention_heads,
            // transformers fills in a constant that need not divide the heads.
            (None, _) => keys.required("num_key_value_heads")?,
        };
        let head_dim = match (keys.map.get("head_dim"), keys.size("head_dim")?) {
            (_, Some(d)) => d,
            (None, None) if family == Family::Qwen3 => 128,
            _ if !hidden_size.is_multiple_of(num_attention_heads) => {
                return Err(keys.wrong(
                    "num_attention_heads",
                    num_attention_heads,
                    &format!(
                        "a divisor of hidden_size = {hidden_size}, as `head_dim` is not given"
                    ),
                ));
            }
            _ => hidden_size / num_attention_heads,
        };
        let max_position_embeddings = keys.required("max_position_embeddings")?;
        let (rope_theta, rope_scaling) = rope(&keys, max_position_embeddings)?;
        let (sliding_window, first_windowed_layer) = window(&keys, family, num_hidden_layers)?;
        let (bos, eos): (&[u32], &[u32]) = match family {
            Family::Llama | Family::Mistral => (&[1], &[2]),
            Family::Qwen2 | Family::Qwen3 => (&[], &[]),
        };

        let architecture = Architecture {
            name: name.to_string(),
            family,
            hidden_size,
            intermediate_size: keys.required("intermediate_size")?,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            vocab_size: keys.required("vocab_size")?,
            max_position_embeddings,
            rope_theta,
            rope_scaling,
            rms_norm_eps: keys.positive("rms_norm_eps")?.unwrap_or(1e-6),
            tie_word_embeddings: keys.flag("tie_word_embeddings")?.unwrap_or(false),
            attention_bias: family == Family::Qwen2,
            qk_norm: family == Family::Qwen3,
            sliding_window,
            first_windowed_layer,
            bos_token_id: token_ids(&keys, "bos_token_id", bos)?.first().copied(),
            eos_token_ids: token_ids(&keys, "eos_token_id", eos)?,
        };
        architecture.validate()?;
        Ok(architecture)
    }

    /// Checks the sizes against each other and against the limits
    /// ([`MAX_DIMENSION`], [`MAX_LAYERS`], [`MAX_PARAMETERS`]). Every reader
    /// calls it; after it [`Architecture::parameters`] cannot overflow.
    ///
    /// # Errors
    /// Names the key, its value and what is allowed.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let wrong = |key: &str, value: String, allowed: String| {
            Err(ConfigError::Value { name: self.name.clone(), key: key.into(), value, allowed })
        };
        for (key, n, most) in [
            ("hidden_size", self.hidden_size, MAX_DIMENSION),
            ("intermediate_size", self.intermediate_size, MAX_DIMENSION),
            ("num_hidden_layers", self.num_hidden_layers, MAX_LAYERS),
            ("num_attention_heads", self.num_attention_heads, MAX_DIMENSION),
            ("num_key_value_heads", self.num_key_value_heads, MAX_DIMENSION),
            ("head_dim", self.head_dim, MAX_DIMENSION),
            ("vocab_size", self.vocab_size, MAX_DIMENSION),
            ("max_position_embeddings", self.max_position_embeddings, MAX_DIMENSION),
            ("sliding_window", self.sliding_window.unwrap_or(1), MAX_DIMENSION),
        ] {
            if !(1..=most).contains(&n) {
                return wrong(key, n.to_string(), format!("an integer of 1 to {most}"));
            }
        }
        let heads = self.num_attention_heads;
        if !heads.is_multiple_of(self.num_key_value_heads) {
            let allowed = format!("a divisor of num_attention_heads = {heads}");
            return wrong("num_key_value_heads", self.num_key_value_heads.to_string(), allowed);
        }
        if !self.head_dim.is_multiple_of(2) {
            let allowed = "an even number: rotary positions turn pairs".to_string();
            return wrong("head_dim", self.head_dim.to_string(), allowed);
        }
        // Both factors are at most 2^24, so that the product is exact.
        if heads * self.head_dim > MAX_DIMENSION {
            let allowed = format!("num_attention_heads * head_dim of at most {MAX_DIMENSION}");
            return wrong("head_dim", self.head_dim.to_string(), allowed);
        }
        for (key, x) in [("rope_theta", self.rope_theta), ("rms_norm_eps", self.rms_norm_eps)] {
            if !(x.is_finite() && x > 0.0) {
                return wrong(key, x.to_string(), "a finite number above 0".into());
            }
        }
        self.validate_scaling()?;
        let switches = (self.attention_bias, self.qk_norm);
        if switches != (self.family == Family::Qwen2, self.family == Family::Qwen3) {
            let allowed = format!("what {} has", self.family.class_name());
            return wrong("attention_bias, qk_norm", format!("{switches:?}"), allowed);
        }
        let first = self.first_windowed_layer;
        let fits = match (self.family, self.sliding_window) {
            (_, None) => first == 0,
            (Family::Llama, Some(_)) => false,
            (Family::Mistral, Some(_)) => first == 0,
            (_, Some(_)) => first < self.num_hidden_layers,
        };
        if !fits {
            let value = format!("{:?} from layer {first}", self.sliding_window);
            return wrong(
                "sliding_window",
                value,
                format!("what {} has", self.family.class_name()),
            );
        }
        // Each dimension is at most 2^24 and each width at most 3 * 2^24: a
        // block is below 2^51 and all of them below 2^63.
        let parameters = self.parameters();
        if parameters > MAX_PARAMETERS {
            let allowed = format!("sizes that make at most {MAX_PARAMETERS} parameters");
            return wrong("parameters", parameters.to_string(), allowed);
        }
        Ok(())
    }

    fn validate_scaling(&self) -> Result<(), ConfigError> {
        let wrong = |key: &str, value: String, allowed: &str| {
            let key = format!("rope_scaling.{key}");
            Err(ConfigError::Value { name: self.name.clone(), key, value, allowed: allowed.into() })
        };
        match self.rope_scaling {
            None => Ok(()),
            Some(RopeScaling::Linear { factor } | RopeScaling::Llama3 { factor, .. })
                if !(factor.is_finite() && factor >= 1.0) =>
            {
                wrong("factor", factor.to_string(), "a finite number of at least 1")
            }
            Some(RopeScaling::Linear { .. }) => Ok(()),
            Some(RopeScaling::Llama3 {
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
                ..
            }) => {
                if !(low.is_finite() && low > 0.0) {
                    return wrong("low_freq_factor", low.to_string(), "a finite number above 0");
                }
                // The ramp between them divides by their difference.
                if !(high.is_finite() && high > low) {
                    let allowed = "a finite number above low_freq_factor";
                    return wrong("high_freq_factor", high.to_string(), allowed);
                }
                if !(1..=MAX_DIMENSION).contains(&original) {
                    let key = "original_max_position_embeddings";
                    return wrong(key, original.to_string(), "an integer of 1 to 16777216");
                }
                Ok(())
            }
        }
    }

    /// A `config.json` that transformers 4 and 5 load; `dtype` is the type of
    /// the weights beside it.
    pub fn to_config_json(&self, dtype: DType) -> String {
        let scaling = match &self.rope_scaling {
            None => Value::Null,
            Some(RopeScaling::Linear { factor }) => {
                json!({"rope_type": "linear", "factor": factor})
            }
            Some(RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            }) => json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_max_position_embeddings,
            }),
        };
        let eos = match self.eos_token_ids.as_slice() {
            [] => Value::Null,
            [one] => json!(one),
            more => json!(more),
        };
        let mut config = json!({
            "architectures": [self.family.class_name()],
            "model_type": self.family.model_type(),
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos,
            "torch_dtype": dtype.torch_name(),
            "use_cache": true,
        });
        match self.family {
            Family::Llama => {
                config["attention_bias"] = json!(false);
                config["mlp_bias"] = json!(false);
            }
            Family::Mistral => config["sliding_window"] = json!(self.sliding_window),
            Family::Qwen2 | Family::Qwen3 => {
                // transformers applies the window from this layer on.
                let first = match self.sliding_window {
                    Some(_) => self.first_windowed_layer,
                    None => self.num_hidden_layers,
                };
                config["use_sliding_window"] = json!(self.sliding_window.is_some());
                config["sliding_window"] = json!(self.sliding_window);
                config["max_window_layers"] = json!(first);
                if self.family == Family::Qwen3 {
                    config["attention_bias"] = json!(false);
                }
            }
        }
        let mut text = serde_json::to_string_pretty(&config).expect("plain values");
        text.push('\n');
        text
    }
}

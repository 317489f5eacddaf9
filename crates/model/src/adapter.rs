//! Adapters on disk, as PEFT 0.21 saves and loads them: `adapter_config.json` and
//! `adapter_model.safetensors`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use plimsoll_arch::{Architecture, DType};
use plimsoll_program::{Lora, Projection, Quant};
use serde_json::{Map, Value, json};

use crate::config_files::{model_name, read_text};
use crate::error::TensorProblem;
use crate::safetensors::metadata;
use crate::{Checkpoint, ModelError, SafetensorsWriter, TensorSpec};

pub(crate) const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";

/// The four bits of the base that an adapter was trained beside, in the metadata of its
/// tensors: PEFT reads none of that, while its configuration is for PEFT's own keys.
const BASE_QUANT: &str = "base_quant";

/// A LoRA adapter on disk that fits a model.
pub struct Adapter {
    lora: Lora,
    base: Option<String>,
    base_quant: Option<String>,
    tensors: Checkpoint,
}

/// Settings that make another function of an adapter than B A x beside W x, or put
/// it elsewhere. Each is an error where it is set.
const UNSUPPORTED: [&str; 18] = [
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
    "lora_ga_config",
    "megatron_config",
];

/// Initializations that change the weights of the base as well.
const CHANGES_BASE: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];

impl Adapter {
    /// Opens the adapter in a folder and compares it with the model it is put on.
    ///
    /// # Errors
    /// A file is missing or damaged; the configuration asks for something that is not
    /// supported, which it names; or a tensor has no place in the model, is missing,
    /// or has another shape.
    pub fn open(dir: &Path, arch: &Architecture) -> Result<Adapter, ModelError> {
        let path = dir.join(CONFIG);
        if !path.is_file() {
            let reason = format!("the folder has no {CONFIG}: it holds no adapter");
            return Err(ModelError::not_a_model(dir, reason));
        }
        let config = read_json(&path)?;
        let weights = dir.join(WEIGHTS);
        if !weights.is_file() {
            let reason = format!("the folder has no {WEIGHTS}");
            return Err(ModelError::not_a_model(dir, reason));
        }
        let tensors = Checkpoint::from_safetensors(dir, arch.clone(), &[weights])?;
        let base = config["base_model_name_or_path"].as_str().map(str::to_owned);
        let refuse = |reason: String| ModelError::not_a_model(&path, reason);
        let lora = lora(&config, &tensors, arch).map_err(refuse)?;
        lora.check(arch).map_err(|e| refuse(e.to_string()))?;
        let base_quant = tensors.files.iter().find_map(|file| metadata(file, BASE_QUANT));
        let adapter = Adapter { lora, base, base_quant, tensors };
        adapter.validate(arch)?;
        Ok(adapter)
    }

    /// What the adapter is.
    pub fn lora(&self) -> &Lora {
        &self.lora
    }

    /// `base_model_name_or_path`: what the adapter was trained on.
    pub fn base(&self) -> Option<&str> {
        self.base.as_deref()
    }

    /// In which four bits its base was held in training, as [`base_quant_name`] has it; none
    /// where the adapter does not say, as PEFT's do not.
    pub fn base_quant(&self) -> Option<&str> {
        self.base_quant.as_deref()
    }

    /// The adapter's folder.
    pub fn path(&self) -> &Path {
        self.tensors.path()
    }

    /// A hash of its file of tensors (FNV-1a, 64 bits, over words): a resumed run goes by
    /// it to know again what it began with.
    pub fn checksum(&self) -> u64 {
        let bytes = self.tensors.files.iter().flat_map(|file| file.bytes().chunks(8));
        bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, word| {
            let mut padded = [0; 8];
            padded[..word.len()].copy_from_slice(word);
            (hash ^ u64::from_le_bytes(padded)).wrapping_mul(0x0100_0000_01b3)
        })
    }

    pub(crate) fn tensors(&self) -> &Checkpoint {
        &self.tensors
    }

    fn validate(&self, arch: &Architecture) -> Result<(), ModelError> {
        let expected: HashMap<String, Vec<usize>> =
            self.lora.parts(arch).into_iter().map(|p| (p.source, p.shape)).collect();
        let mut problems = Vec::new();
        for name in self.tensors.tensor_names() {
            let tensor = name.to_owned();
            let found = self.tensors.shape(name).unwrap_or_default();
            match expected.get(name) {
                None => problems.push(TensorProblem::Unused { tensor }),
                Some(expected) if found != expected => {
                    let (found, expected) = (found.to_vec(), expected.clone());
                    problems.push(TensorProblem::Shape { tensor, found, expected });
                }
                Some(_) => {}
            }
        }
        for part in self.lora.parts(arch) {
            if self.tensors.shape(&part.source).is_none() {
                let (tensor, expected) = (part.source, part.shape);
                problems.push(TensorProblem::Missing { tensor, expected });
            }
        }
        if problems.is_empty() {
            return Ok(());
        }
        Err(ModelError::AdapterMismatch {
            path: self.path().to_path_buf(),
            base: self.base.clone().unwrap_or_else(|| "another model".into()),
            model: arch.name.clone(),
            problems,
        })
    }
}

/// The recipe of an adapter from its configuration and the names of its tensors,
/// which say what a pattern of modules means.
fn lora(config: &Value, tensors: &Checkpoint, arch: &Architecture) -> Result<Lora, String> {
    let kind = &config["peft_type"];
    if kind.as_str() != Some("LORA") {
        return Err(format!("peft_type is {kind}: only LORA adapters can be used"));
    }
    let set = |value: &Value| match value {
        Value::Null | Value::Bool(false) => false,
        Value::Array(list) => !list.is_empty(),
        Value::Object(map) => !map.is_empty(),
        _ => true,
    };
    if let Some(key) = UNSUPPORTED.iter().find(|key| set(&config[**key])) {
        return Err(format!("{key} is {}, which is not supported", config[*key]));
    }
    if let Some(bias) = config["bias"].as_str().filter(|b| *b != "none") {
        return Err(format!("bias is \"{bias}\": only \"none\" is supported"));
    }
    if let Some(init) = config["init_lora_weights"].as_str()
        && CHANGES_BASE.iter().any(|c| init.starts_with(c))
    {
        return Err(format!(
            "init_lora_weights is \"{init}\", which changes the base model as well: convert the \
             adapter to a plain one (PEFT's path_initial_model_for_weight_conversion)"
        ));
    }
    let rank = config["r"].as_u64().ok_or_else(|| format!("r is {}, no rank", config["r"]))?;
    let alpha = config["lora_alpha"].as_f64();
    let alpha =
        alpha.ok_or_else(|| format!("lora_alpha is {}, no number", config["lora_alpha"]))?;
    let mut lora = Lora {
        rank: usize::try_from(rank).unwrap_or(usize::MAX),
        alpha: alpha as f32,
        rslora: config["use_rslora"].as_bool().unwrap_or(false),
        // PEFT drops nothing outside of training.
        dropout: config["lora_dropout"].as_f64().unwrap_or(0.0) as f32,
        targets: targets(&config["target_modules"], tensors)?,
        save_embed_tokens: false,
        save_lm_head: false,
    };
    let tied = config["ensure_weight_tying"].as_bool().unwrap_or(false);
    let saved = config["modules_to_save"].as_array().cloned().unwrap_or_default();
    for module in &saved {
        match module.as_str() {
            Some("embed_tokens" | "model.embed_tokens") => lora.save_embed_tokens = true,
            Some("lm_head") if arch.tie_word_embeddings && tied => lora.save_embed_tokens = true,
            Some("lm_head") => lora.save_lm_head = true,
            _ => {
                return Err(format!(
                    "modules_to_save names {module}: only embed_tokens and lm_head can be"
                ));
            }
        }
    }
    if lora.save_embed_tokens && arch.tie_word_embeddings && !tied {
        return Err("embed_tokens was trained apart from the head, which this model ties to it \
                    (ensure_weight_tying is not set)"
            .into());
    }
    Ok(lora)
}

/// The projections that carry adapters. A list names modules by their ends; a string
/// is a regular expression or `all-linear`; either way the tensors show what came of
/// it.
fn targets(modules: &Value, tensors: &Checkpoint) -> Result<Vec<Projection>, String> {
    if let Some(list) = modules.as_array() {
        for module in list {
            let name = module.as_str().unwrap_or_default();
            let last = name.rsplit('.').next().unwrap_or_default();
            if !Projection::ALL.iter().any(|p| p.name() == last) {
                let all = Projection::ALL.map(Projection::name).join(", ");
                return Err(format!("target_modules names {module}: adapters can be on {all}"));
            }
        }
    } else if !modules.is_string() && !modules.is_null() {
        return Err(format!("target_modules is {modules}, neither a list nor a pattern"));
    }
    let has = |p: &Projection| {
        let end = format!(".{}.lora_A.weight", p.path());
        tensors.tensor_names().any(|name| name.ends_with(&end))
    };
    Ok(Projection::ALL.into_iter().filter(has).collect())
}

/// `adapter_config.json` for adapters that were trained on `base`.
fn config(lora: &Lora, base: &str, arch: &Architecture) -> String {
    let mut modules = Vec::new();
    if lora.save_embed_tokens {
        modules.push("embed_tokens");
    }
    if lora.save_lm_head {
        modules.push("lm_head");
    }
    let number = |x: f32| match x.fract() == 0.0 && x.abs() < 1e9 {
        true => json!(x as i64),
        // The shortest decimal that is this number.
        false => x.to_string().parse::<f64>().map_or(json!(x), |x| json!(x)),
    };
    let mut config = Map::new();
    let mut set = |key: &str, value: Value| config.insert(key.to_owned(), value);
    set("alpha_pattern", json!({}));
    set("auto_mapping", Value::Null);
    set("base_model_name_or_path", json!(base));
    set("bias", json!("none"));
    // Where embedding and head are one, they are trained as one.
    set("ensure_weight_tying", json!(lora.save_embed_tokens && arch.tie_word_embeddings));
    set("fan_in_fan_out", json!(false));
    set("inference_mode", json!(true));
    set("init_lora_weights", json!(true));
    set("layer_replication", Value::Null);
    set("layers_pattern", Value::Null);
    set("layers_to_transform", Value::Null);
    set("lora_alpha", number(lora.alpha));
    set("lora_bias", json!(false));
    set("lora_dropout", number(lora.dropout));
    set("modules_to_save", if modules.is_empty() { Value::Null } else { json!(modules) });
    set("peft_type", json!("LORA"));
    set("r", json!(lora.rank));
    set("rank_pattern", json!({}));
    set("revision", Value::Null);
    let targets: Vec<&str> = lora.targets.iter().map(|p| p.name()).collect();
    set("target_modules", json!(targets));
    set("task_type", json!("CAUSAL_LM"));
    set("use_dora", json!(false));
    set("use_rslora", json!(lora.rslora));
    format!("{:#}\n", Value::Object(config))
}

impl SafetensorsWriter {
    /// Prepares to write an adapter as PEFT loads it: its configuration, and the tensors
    /// of [`Lora::parts`] as `dtype`. `base` is what it was trained on, `quant` in which
    /// four bits that was.
    ///
    /// # Errors
    /// As [`SafetensorsWriter::create`].
    pub fn adapter(
        dir: &Path,
        lora: &Lora,
        (base, quant): (&str, Option<Quant>),
        arch: &Architecture,
        dtype: DType,
    ) -> Result<SafetensorsWriter, ModelError> {
        let spec =
            |p: plimsoll_program::WeightPart| TensorSpec { name: p.source, shape: p.shape, dtype };
        let tensors: Vec<TensorSpec> = lora.parts(arch).into_iter().map(spec).collect();
        let config = config(lora, base, arch);
        let names = ["adapter_model", CONFIG];
        let metadata = [(BASE_QUANT, base_quant_name(quant))];
        SafetensorsWriter::named(dir, names, config, &metadata, &tensors, u64::MAX)
    }
}

/// What a base is held in: `nf4-dq`, `nf4-dq with the head`, or `none` for no four bits.
pub fn base_quant_name(quant: Option<Quant>) -> String {
    match quant {
        None => "none".to_owned(),
        Some(quant) if quant.head => format!("{} with the head", quant.name()),
        Some(quant) => quant.name().to_owned(),
    }
}

/// What the adapter in a folder was trained on; none where there is no adapter.
///
/// # Errors
/// The adapter's configuration cannot be read or names no base.
pub fn adapter_base(dir: &Path) -> Result<Option<String>, ModelError> {
    let path = dir.join(CONFIG);
    if !path.is_file() {
        return Ok(None);
    }
    let config = read_json(&path)?;
    match config["base_model_name_or_path"].as_str() {
        Some(base) if !base.is_empty() => Ok(Some(base.to_owned())),
        _ => {
            let reason = "base_model_name_or_path names no model: give --model and --adapter";
            Err(ModelError::not_a_model(&path, reason))
        }
    }
}

fn read_json(path: &Path) -> Result<Value, ModelError> {
    serde_json::from_str(&read_text(path)?)
        .map_err(|e| ModelError::not_a_model(path, format!("not JSON: {e}")))
}

/// The name under which a base is noted in an adapter, and compared by.
pub fn base_name(path: &str) -> String {
    model_name(&PathBuf::from(path.trim_end_matches('/')))
}

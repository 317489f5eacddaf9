//! Configurations of other trainers, read as they are.

mod deepspeed;
mod trainers;
mod yaml;

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use thiserror::Error;

use crate::allocator::AllocatorConfig;
use crate::recipe::{RecipeError, TorchRecipe};

pub use yaml::YamlError;

#[derive(Debug, Error)]
pub enum ConfigError {
    #[error("cannot read {path}: {error}")]
    Read { path: PathBuf, error: std::io::Error },
    #[error("{path}: {error}")]
    Yaml { path: PathBuf, error: YamlError },
    #[error("{path}: {error}")]
    Json { path: PathBuf, error: serde_json::Error },
    #[error("{path} is no map of keys and values")]
    NoMap { path: PathBuf },
    #[error(
        "{path} is no configuration that is known here: an axolotl YAML has `base_model`, a \
         LLaMA-Factory YAML `model_name_or_path`, a DeepSpeed JSON `zero_optimization` or \
         `train_micro_batch_size_per_gpu`, TrainingArguments `per_device_train_batch_size`"
    )]
    Unknown { path: PathBuf },
    #[error("{path}: `{key}` is {value}: {expected}")]
    Value { path: PathBuf, key: String, value: String, expected: &'static str },
    #[error("{path}: {error}")]
    Recipe { path: PathBuf, error: RecipeError },
}

/// Whose file it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Axolotl,
    LlamaFactory,
    DeepSpeed,
    TrainingArguments,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Kind::Axolotl => "an axolotl configuration",
            Kind::LlamaFactory => "a LLaMA-Factory configuration",
            Kind::DeepSpeed => "a DeepSpeed configuration",
            Kind::TrainingArguments => "TrainingArguments",
        }
    }
}

/// What a file says about a run.
#[derive(Clone, Debug)]
pub struct Config {
    pub kind: Kind,
    pub model: Option<String>,
    /// `seq` is 0 where the file names no length.
    pub recipe: TorchRecipe,
    pub allocator: AllocatorConfig,
    /// Keys that nobody here knows: they may change the memory.
    pub unknown: Vec<String>,
    /// Keys that are known not to change it.
    pub without_effect: Vec<String>,
    path: PathBuf,
}

impl Config {
    /// Reads a file of any of the kinds.
    ///
    /// # Errors
    /// It cannot be read, is of no known kind, or has a value that makes no sense.
    pub fn read(path: &Path) -> Result<Config, ConfigError> {
        let map = read_map(path)?;
        let kind = kind_of(&map).ok_or_else(|| ConfigError::Unknown { path: path.into() })?;
        let mut keys = Keys::new(path, map);
        let mut config = Config {
            kind,
            model: None,
            recipe: TorchRecipe::new(1, 0),
            allocator: AllocatorConfig::default(),
            unknown: Vec::new(),
            without_effect: Vec::new(),
            path: path.into(),
        };
        match kind {
            Kind::DeepSpeed => deepspeed::apply(&mut keys, &mut config)?,
            Kind::Axolotl => trainers::axolotl(&mut keys, &mut config)?,
            Kind::LlamaFactory => trainers::llama_factory(&mut keys, &mut config)?,
            Kind::TrainingArguments => trainers::training_arguments(&mut keys, &mut config)?,
        }
        keys.rest(&mut config);
        Ok(config)
    }

    /// What the user should know about the keys.
    pub fn remarks(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if !self.unknown.is_empty() {
            lines.push(format!(
                "warning: {} ({}): not understood, and not in the plan: {}",
                self.path.display(),
                self.kind.name(),
                self.unknown.join(", ")
            ));
        }
        lines
    }
}

fn read_map(path: &Path) -> Result<Map<String, Value>, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| ConfigError::Read { path: path.into(), error })?;
    let yaml = path.extension().is_some_and(|e| e == "yaml" || e == "yml")
        || !text.trim_start().starts_with('{');
    let value = if yaml {
        yaml::parse(&text).map_err(|error| ConfigError::Yaml { path: path.into(), error })?
    } else {
        serde_json::from_str(&text)
            .map_err(|error| ConfigError::Json { path: path.into(), error })?
    };
    match value {
        Value::Object(map) => Ok(map),
        _ => Err(ConfigError::NoMap { path: path.into() }),
    }
}

fn kind_of(map: &Map<String, Value>) -> Option<Kind> {
    let has = |key: &str| map.contains_key(key);
    if has("base_model") {
        Some(Kind::Axolotl)
    } else if has("finetuning_type") || has("model_name_or_path") {
        Some(Kind::LlamaFactory)
    } else if has("zero_optimization")
        || has("train_micro_batch_size_per_gpu")
        || map.get("fp16").or(map.get("bf16")).is_some_and(Value::is_object)
    {
        Some(Kind::DeepSpeed)
    } else if [
        "per_device_train_batch_size",
        "output_dir",
        "gradient_accumulation_steps",
        "optim",
        "num_train_epochs",
    ]
    .iter()
    .any(|k| has(k))
    {
        Some(Kind::TrainingArguments)
    } else {
        None
    }
}

/// Keys that are taken one by one, so that what is left is known.
struct Keys {
    path: PathBuf,
    /// Of a map inside the file: its key and a dot.
    prefix: String,
    map: Map<String, Value>,
    ignored: Vec<String>,
}

impl Keys {
    fn new(path: &Path, map: Map<String, Value>) -> Keys {
        Keys { path: path.into(), prefix: String::new(), map, ignored: Vec::new() }
    }

    /// The value of a key; none where it is missing, null or "auto".
    fn take(&mut self, key: &str) -> Option<Value> {
        self.map.remove(key).filter(|v| !v.is_null() && v.as_str() != Some("auto"))
    }

    fn error(&self, key: &str, value: &Value, expected: &'static str) -> ConfigError {
        let mut value = value.to_string();
        if value.chars().count() > 60 {
            value = value.chars().take(57).chain("...".chars()).collect();
        }
        ConfigError::Value {
            path: self.path.clone(),
            key: format!("{}{key}", self.prefix),
            value,
            expected,
        }
    }

    fn flag(&mut self, key: &str) -> Result<Option<bool>, ConfigError> {
        let Some(value) = self.take(key) else { return Ok(None) };
        match &value {
            Value::Bool(b) => Ok(Some(*b)),
            Value::String(s) if s == "true" || s == "True" => Ok(Some(true)),
            Value::String(s) if s == "false" || s == "False" || s.is_empty() => Ok(Some(false)),
            _ => Err(self.error(key, &value, "give true or false")),
        }
    }

    fn number(&mut self, key: &str) -> Result<Option<u64>, ConfigError> {
        let Some(value) = self.take(key) else { return Ok(None) };
        let number = match &value {
            Value::Number(n) => n.as_u64().or_else(|| {
                let real = n.as_f64().filter(|r| *r >= 0.0 && r.fract() == 0.0 && *r < 9e15)?;
                Some(real as u64)
            }),
            Value::String(s) => s.parse().ok(),
            _ => None,
        };
        number.map(Some).ok_or_else(|| self.error(key, &value, "give a whole number of 0 or more"))
    }

    fn real(&mut self, key: &str) -> Result<Option<f64>, ConfigError> {
        let Some(value) = self.take(key) else { return Ok(None) };
        let number = value.as_f64().or_else(|| value.as_str()?.parse().ok());
        number.map(Some).ok_or_else(|| self.error(key, &value, "give a number"))
    }

    fn text(&mut self, key: &str) -> Result<Option<String>, ConfigError> {
        let Some(value) = self.take(key) else { return Ok(None) };
        match &value {
            Value::String(s) => Ok(Some(s.clone())),
            Value::Bool(false) => Ok(None),
            _ => Err(self.error(key, &value, "give a name")),
        }
    }

    fn inner(&mut self, key: &str) -> Result<Option<Keys>, ConfigError> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Keys {
                path: self.path.clone(),
                prefix: format!("{}{key}.", self.prefix),
                map,
                ignored: Vec::new(),
            })),
            Some(value) => Err(self.error(key, &value, "give a map")),
        }
    }

    /// Keys that change no memory.
    fn ignore(&mut self, keys: &[&str]) {
        for key in keys {
            if self.map.remove(*key).is_some() {
                self.ignored.push(format!("{}{key}", self.prefix));
            }
        }
    }

    /// What nobody took is unknown.
    fn rest(mut self, config: &mut Config) {
        config.without_effect.append(&mut self.ignored);
        let prefix = &self.prefix;
        config.unknown.extend(self.map.keys().map(|k| format!("{prefix}{k}")));
    }
}

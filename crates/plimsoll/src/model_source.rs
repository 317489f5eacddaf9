//! What `--model` names: a preset, a directory, a GGUF file, or a hub id.

use std::path::{Path, PathBuf};

use plimsoll_arch::{Architecture, preset};
use plimsoll_model::{Checkpoint, GgufMetadata, read_architecture};
use plimsoll_program::Quant;
use plimsoll_quant::Format4bit;
use plimsoll_text::{
    FoundTemplate, GgufVocab, TemplateSource, Tokenizer, chatml, find_template, gguf_template,
};
use plimsoll_train::ExtraFile;

use crate::exit::Stop;
use crate::hub;

/// A model as far as it exists on this machine.
pub struct ModelSource {
    pub arch: Architecture,
    /// None for a preset, whose weights are random.
    pub checkpoint: Option<Checkpoint>,
    pub tokenizer: Tokenizer,
    /// Where the tokenizer came from, for the log.
    pub tokenizer_from: String,
    pub template: FoundTemplate,
    /// The folder of the tokenizer's own files, if it has any.
    tokenizer_folder: Option<PathBuf>,
}

/// The hyper-parameters alone: no weights are touched.
///
/// # Errors
/// Nothing of that name, or what is there cannot be read.
pub fn open_architecture(model: &str) -> Result<Architecture, Stop> {
    match locate(model)? {
        Some(path) => read_architecture(&path).map_err(Stop::input),
        None => preset(model).map_err(Stop::input),
    }
}

/// How the files of a model have their matrices: four bits of a kind, or none where they
/// are in another form or not there.
pub fn stored_quant(model: &str) -> Option<Quant> {
    let path = locate(model).ok()??;
    Checkpoint::open(&path).ok().as_ref().and_then(quant_of)
}

fn quant_of(checkpoint: &Checkpoint) -> Option<Quant> {
    let head = checkpoint.format_4bit("lm_head.weight").is_some();
    let Format4bit { codebook, double } =
        checkpoint.tensor_names().find_map(|name| checkpoint.format_4bit(name))?;
    Some(Quant { codebook, double, head })
}

/// The model with its weights, tokenizer and chat template.
///
/// # Errors
/// As [`open_architecture`]; a file that lies, or a tensor that is missing.
pub fn open_model(model: &str) -> Result<ModelSource, Stop> {
    match locate(model)? {
        Some(path) => open_path(&path),
        None => {
            let arch = preset(model).map_err(Stop::input)?;
            byte_level_model(arch, None, format!("bytes: preset {model} has no files"))
        }
    }
}

/// A path that exists, or a hub id in the local cache; none for a preset.
fn locate(model: &str) -> Result<Option<PathBuf>, Stop> {
    let path = Path::new(model);
    if path.exists() {
        return Ok(Some(path.to_path_buf()));
    }
    if let Some(found) = hub::cached(model) {
        return Ok(Some(found));
    }
    let looks_like_a_path = model.ends_with(".gguf") || model.starts_with(['.', '/', '~']);
    if looks_like_a_path {
        return Err(Stop::Input(format!("--model {model}: no such file or directory")));
    }
    Ok(None)
}

fn open_path(path: &Path) -> Result<ModelSource, Stop> {
    let checkpoint = Checkpoint::open(path).map_err(Stop::input)?;
    let validation = checkpoint.validate().map_err(Stop::input)?;
    for tensor in &validation.unexpected {
        note!("warning: {}: no place for tensor `{tensor}`, ignored", path.display());
    }
    let arch = checkpoint.architecture().clone();
    let (tokenizer, template, tokenizer_from, tokenizer_folder);
    if let Some(metadata) = checkpoint.gguf_metadata() {
        let vocab = gguf_vocab(metadata).map_err(Stop::input)?;
        let named = |e| Stop::Input(format!("{}: {e}", path.display()));
        tokenizer = Tokenizer::from_gguf(vocab).map_err(named)?;
        let source = metadata.string("tokenizer.chat_template").map_err(Stop::input)?;
        template = gguf_template(source, &tokenizer).map_err(named)?;
        tokenizer_from = "the GGUF file".to_owned();
        tokenizer_folder = None;
    } else if path.join("tokenizer.json").exists() {
        tokenizer = Tokenizer::from_dir(path).map_err(Stop::input)?;
        template = find_template(path, &tokenizer).map_err(Stop::input)?;
        tokenizer_from = "tokenizer.json".to_owned();
        tokenizer_folder = Some(path.to_path_buf());
    } else {
        let from = format!("bytes: {} has no tokenizer.json", path.display());
        return byte_level_model(arch, Some(checkpoint), from);
    }
    Ok(ModelSource {
        arch,
        checkpoint: Some(checkpoint),
        tokenizer,
        tokenizer_from,
        template,
        tokenizer_folder,
    })
}

const GENERATION_CONFIG: &str = "generation_config.json";

const TOKENIZER_FILES: [&str; 5] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    GENERATION_CONFIG,
];

fn byte_level_model(
    arch: Architecture,
    checkpoint: Option<Checkpoint>,
    tokenizer_from: String,
) -> Result<ModelSource, Stop> {
    let tokenizer = Tokenizer::byte_level();
    let template = chatml(&tokenizer).map_err(Stop::input)?;
    Ok(ModelSource {
        arch,
        checkpoint,
        tokenizer,
        tokenizer_from,
        template,
        tokenizer_folder: None,
    })
}

fn gguf_vocab(m: &GgufMetadata) -> Result<GgufVocab, plimsoll_model::ModelError> {
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let strings = |name: &str| -> Result<Vec<String>, plimsoll_model::ModelError> {
        let found = m.strings(&key(name))?.unwrap_or_default();
        Ok(found.into_iter().map(str::to_owned).collect())
    };
    let id = |name: &str| -> Result<Option<u32>, plimsoll_model::ModelError> {
        Ok(m.unsigned(&key(name))?.and_then(|id| u32::try_from(id).ok()))
    };
    let types = m.integers(&key("token_type"))?.unwrap_or_default();
    let mut end_of_turn = Vec::new();
    for name in ["eot_token_id", "eom_token_id"] {
        end_of_turn.extend(id(name)?);
    }
    Ok(GgufVocab {
        model: m.string(&key("model"))?.unwrap_or_default().to_owned(),
        pre: m.string(&key("pre"))?.map(str::to_owned),
        tokens: strings("tokens")?,
        token_types: types.into_iter().map(|t| i32::try_from(t).unwrap_or(0)).collect(),
        merges: strings("merges")?,
        scores: m.floats(&key("scores"))?.unwrap_or_default(),
        bos: id("bos_token_id")?,
        eos: id("eos_token_id")?,
        unk: id("unknown_token_id")?,
        pad: id("padding_token_id")?,
        end_of_turn,
        add_bos: m.boolean(&key("add_bos_token"))?,
        add_eos: m.boolean(&key("add_eos_token"))?,
        add_space_prefix: m.boolean(&key("add_space_prefix"))?,
    })
}

impl ModelSource {
    /// What is laid beside every model that is trained from this one: the
    /// files of its tokenizer, or, where it came from elsewhere, new ones.
    ///
    /// # Errors
    /// A file cannot be read, or the tokenizer has no form in such files.
    pub fn tokenizer_files(&self) -> Result<Vec<ExtraFile>, Stop> {
        let Some(folder) = &self.tokenizer_folder else {
            let source = (self.template.source != TemplateSource::BuiltIn)
                .then(|| self.template.template.source());
            return self.tokenizer.to_files(source).map_err(Stop::input);
        };
        let mut files = Vec::new();
        for name in TOKENIZER_FILES {
            let path = folder.join(name);
            match std::fs::read(&path) {
                Ok(bytes) => files.push((name.to_owned(), bytes)),
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                Err(e) => {
                    return Err(Stop::Input(format!("cannot read {}: {e}", path.display())));
                }
            }
        }
        Ok(files)
    }

    /// The files of the tokenizer, if the model brought one of its own, and what
    /// else lies beside its weights.
    ///
    /// # Errors
    /// As [`ModelSource::tokenizer_files`].
    pub fn files_beside(&self) -> Result<Vec<ExtraFile>, Stop> {
        let own = self.tokenizer_folder.is_some();
        let in_gguf = self.checkpoint.as_ref().is_some_and(|c| c.gguf_metadata().is_some());
        if own || in_gguf {
            return self.tokenizer_files();
        }
        let Some(checkpoint) = &self.checkpoint else { return Ok(Vec::new()) };
        let path = checkpoint.path().join(GENERATION_CONFIG);
        match std::fs::read(&path) {
            Ok(bytes) => Ok(vec![(GENERATION_CONFIG.to_owned(), bytes)]),
            Err(_) => Ok(Vec::new()),
        }
    }

    /// As [`stored_quant`].
    pub fn stored_quant(&self) -> Option<Quant> {
        self.checkpoint.as_ref().and_then(quant_of)
    }

    /// Says which matrices of a checkpoint in four bits are not in four bits there
    /// (bitsandbytes' `llm_int8_skip_modules`): they will be, like their neighbours.
    pub fn note_what_is_quantized_too(&self) {
        let Some(checkpoint) = self.checkpoint.as_ref().filter(|c| quant_of(c).is_some()) else {
            return;
        };
        let dense: Vec<&str> = checkpoint
            .tensor_names()
            .filter(|name| name.ends_with("_proj.weight") && checkpoint.format_4bit(name).is_none())
            .collect();
        if let Some(first) = dense.first() {
            note!(
                "warning: {} matrices of {} are not in four bits there ({first}, ...): they are \
                 quantized as they are loaded, where transformers leaves them as they are; --quant \
                 none works with all matrices multiplied out",
                dense.len(),
                checkpoint.path().display()
            );
        }
    }

    /// Weights to run with, or the reason why there are none.
    ///
    /// # Errors
    /// A preset: its weights would be random.
    pub fn weights(&self) -> Result<&Checkpoint, Stop> {
        self.checkpoint.as_ref().ok_or_else(|| {
            Stop::Input(format!(
                "{} is a preset: it has hyper-parameters but no weights; give --model a directory \
                 or a .gguf file",
                self.arch.name
            ))
        })
    }

    /// Tokens that end a generation.
    pub fn stop_ids(&self) -> Vec<u32> {
        let mut ids = self.arch.eos_token_ids.clone();
        ids.extend(self.tokenizer.stop_ids());
        ids.sort_unstable();
        ids.dedup();
        ids
    }
}

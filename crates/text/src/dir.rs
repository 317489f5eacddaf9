//! The tokenizer of a Hugging Face model directory.

use crate::{TextError, Tokenizer};
use serde_json::Value;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use tokenizers::{AddedToken, PostProcessorWrapper, Tokenizer as HfTokenizer};

/// A JSON object in the model directory; absent files are empty objects.
pub(crate) struct JsonFile {
    pub path: PathBuf,
    pub value: Value,
}

impl JsonFile {
    pub fn read(path: PathBuf) -> Result<JsonFile, TextError> {
        let value = match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map_err(|source| TextError::Json { path: path.clone(), source })?,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Value::Null,
            Err(source) => return Err(TextError::Io { path, source }),
        };
        Ok(JsonFile { path, value })
    }

    pub fn error(&self, field: &str, detail: impl Into<String>) -> TextError {
        TextError::Field {
            path: self.path.clone(),
            field: field.to_string(),
            detail: detail.into(),
        }
    }

    /// A token given as its text or as an object with `content`.
    pub fn token(&self, field: &str) -> Result<Option<&str>, TextError> {
        match &self.value[field] {
            Value::Null => Ok(None),
            Value::String(text) => Ok(Some(text)),
            Value::Object(token) => match token.get("content") {
                Some(Value::String(text)) => Ok(Some(text)),
                _ => Err(self.error(field, "is an object without a `content` string")),
            },
            other => Err(self.error(field, format!("must be a token, found {other}"))),
        }
    }

    /// One id or a list of ids.
    fn ids(&self, field: &str) -> Result<Vec<u32>, TextError> {
        let id = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids = match &self.value[field] {
            Value::Null => Some(Vec::new()),
            Value::Array(list) => list.iter().map(id).collect(),
            one => id(one).map(|id| vec![id]),
        };
        ids.ok_or_else(|| {
            let found = &self.value[field];
            self.error(field, format!("must be a token id or a list of them, found {found}"))
        })
    }
}

pub(crate) fn from_dir(dir: &Path) -> Result<Tokenizer, TextError> {
    let path = dir.join("tokenizer.json");
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return Err(TextError::NoTokenizer { dir: dir.into() });
        }
        Err(source) => return Err(TextError::Io { path, source }),
    };
    let config = JsonFile::read(dir.join("tokenizer_config.json"))?;
    let special_map = JsonFile::read(dir.join("special_tokens_map.json"))?;
    let generation = JsonFile::read(dir.join("generation_config.json"))?;
    let model = JsonFile::read(dir.join("config.json"))?;

    let mut inner = parse(&path, &bytes)?;
    add_declared_tokens(&mut inner, &config)?;

    let id_of = |field: &str| -> Result<Option<u32>, TextError> {
        for file in [&config, &special_map] {
            if let Some(token) = file.token(field)? {
                let id = inner.token_to_id(token);
                return id.map(Some).ok_or_else(|| {
                    file.error(field, format!("is {token:?}, which tokenizer.json does not hold"))
                });
            }
        }
        // The key is there and null: the model has no such token, whatever config.json says.
        if config.value.get(field).is_some() {
            return Ok(None);
        }
        let field = format!("{field}_id");
        for file in [&generation, &model] {
            let ids = file.ids(&field)?;
            if let Some(id) = ids.iter().find(|&&id| inner.id_to_token(id).is_some()) {
                return Ok(Some(*id));
            }
        }
        Ok(None)
    };
    let bos = id_of("bos_token")?;
    let eos = id_of("eos_token")?;
    let pad = id_of("pad_token")?;
    let mut stop = generation.ids("eos_token_id")?;
    if !stop.is_empty() {
        stop.extend(eos);
    }

    let vocab_size = inner.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
    let around = match declared_specials(&config)? {
        Some((add_bos, add_eos)) => {
            (Vec::from_iter(bos.filter(|_| add_bos)), Vec::from_iter(eos.filter(|_| add_eos)))
        }
        None => processed_specials(&inner).map_err(|e| TextError::Tokenizer {
            path,
            detail: format!("its post-processor fails: {e}"),
        })?,
    };
    // Its work is in `around` now. What else it does is shorten the offsets of
    // tokens by their spaces, which would blur where an assistant's turn starts.
    inner.with_post_processor(None::<PostProcessorWrapper>);
    Ok(Tokenizer::new(inner, vocab_size, bos, eos, pad, stop, around))
}

fn parse(path: &Path, bytes: &[u8]) -> Result<HfTokenizer, TextError> {
    let fail = |detail: String| TextError::Tokenizer { path: path.into(), detail };
    // The crate indexes without checks in a few places (a merge longer than any
    // token, for one), so a malformed file could panic there.
    let parsed = catch_unwind(AssertUnwindSafe(|| HfTokenizer::from_bytes(bytes)))
        .map_err(|_| fail("is malformed: the tokenizers crate panicked on it".into()))?;
    let mut inner = parsed.map_err(|e| fail(format!("is not a tokenizer: {e}")))?;
    // Some files carry the truncation of the run that saved them; transformers
    // resets both for every call.
    inner.with_truncation(None).map_err(|e| fail(e.to_string()))?.with_padding(None);
    Ok(inner)
}

/// Tokens that `tokenizer_config.json` declares and `tokenizer.json` lacks, in
/// the order of their ids, as transformers adds them.
fn add_declared_tokens(inner: &mut HfTokenizer, config: &JsonFile) -> Result<(), TextError> {
    const FIELD: &str = "added_tokens_decoder";
    let Value::Object(declared) = &config.value[FIELD] else {
        return Ok(());
    };
    let known = inner.get_added_tokens_decoder();
    let mut missing = Vec::new();
    for (key, token) in declared {
        let id: u32 = key
            .parse()
            .map_err(|_| config.error(FIELD, format!("has the key {key:?}, which is no id")))?;
        let token: DeclaredToken = serde_json::from_value(token.clone())
            .map_err(|e| config.error(FIELD, format!("entry {key}: {e}")))?;
        if !known.contains_key(&id) {
            missing.push((id, token));
        }
    }
    missing.sort_by_key(|(id, _)| *id);
    let fail = |e: tokenizers::Error| config.error(FIELD, e.to_string());
    for (id, token) in missing {
        let content = token.content.clone();
        let added = AddedToken::from(token.content, token.special)
            .single_word(token.single_word)
            .lstrip(token.lstrip)
            .rstrip(token.rstrip)
            .normalized(token.normalized.unwrap_or(!token.special));
        inner.add_tokens([added]).map_err(fail)?;
        let got = inner.token_to_id(&content);
        if got != Some(id) {
            let detail =
                format!("gives {content:?} the id {id}, but tokenizer.json makes it {got:?}");
            return Err(config.error(FIELD, detail));
        }
    }
    Ok(())
}

#[derive(serde::Deserialize)]
struct DeclaredToken {
    content: String,
    #[serde(default)]
    special: bool,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    normalized: Option<bool>,
}

/// The ids that the post-processor of `tokenizer.json` puts before and after a text.
fn processed_specials(inner: &HfTokenizer) -> tokenizers::Result<(Vec<u32>, Vec<u32>)> {
    let encoding = inner.encode_fast("a", true)?;
    let added = encoding.get_special_tokens_mask();
    let ids = encoding.get_ids();
    let before = added.iter().take_while(|&&m| m == 1).count();
    let after = added[before..].iter().rev().take_while(|&&m| m == 1).count();
    Ok((ids[..before].to_vec(), ids[ids.len() - after..].to_vec()))
}

/// `add_bos_token`/`add_eos_token` govern the classes that rebuild their
/// post-processor from them (Llama, Gemma and their kin in transformers);
/// everywhere else the post-processor in `tokenizer.json` does.
fn declared_specials(config: &JsonFile) -> Result<Option<(bool, bool)>, TextError> {
    let flag = |field: &str| match &config.value[field] {
        Value::Null => Ok(None),
        Value::Bool(on) => Ok(Some(*on)),
        other => Err(config.error(field, format!("must be true or false, found {other}"))),
    };
    let (bos, eos) = (flag("add_bos_token")?, flag("add_eos_token")?);
    let class = config.value["tokenizer_class"].as_str().unwrap_or_default();
    let rebuilds =
        ["Llama", "CodeLlama", "Gemma", "Cohere"].iter().any(|family| class.starts_with(family));
    if rebuilds && (bos.is_some() || eos.is_some()) {
        return Ok(Some((bos.unwrap_or(true), eos.unwrap_or(false))));
    }
    Ok(None)
}

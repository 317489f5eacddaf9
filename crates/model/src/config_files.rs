//! The small JSON files beside the weights.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use plimsoll_arch::Architecture;
use serde_json::Value;

use crate::ModelError;

/// No `config.json` is longer; an index of 2^18 tensors is shorter.
const MAX_JSON: u64 = 64 << 20;

/// Text of a file of bounded size.
pub(crate) fn read_text(path: &Path) -> Result<String, ModelError> {
    let file = File::open(path).map_err(ModelError::io(path, "open"))?;
    let mut text = String::new();
    let read = file.take(MAX_JSON + 1).read_to_string(&mut text);
    read.map_err(ModelError::io(path, "read"))?;
    if text.len() as u64 > MAX_JSON {
        return Err(ModelError::not_a_model(path, format!("longer than {MAX_JSON} bytes")));
    }
    Ok(text)
}

/// What messages call the model in a directory or a file.
pub(crate) fn model_name(path: &Path) -> String {
    match path.file_name() {
        Some(name) => name.to_string_lossy().into_owned(),
        None => path.display().to_string(),
    }
}

/// Refuses weights in a form that cannot be read, before they look as if they were
/// missing.
fn check_quantization(path: &Path, config: &str) -> Result<(), ModelError> {
    let json: Value = serde_json::from_str(config)
        .map_err(|e| ModelError::not_a_model(path, format!("not JSON: {e}")))?;
    let Some(quantization) = json.get("quantization_config").filter(|q| !q.is_null()) else {
        return Ok(());
    };
    let method = quantization.get("quant_method").and_then(Value::as_str);
    let in_8_bits = quantization.get("load_in_8bit").and_then(Value::as_bool) == Some(true);
    match method {
        // Older files name no method.
        None | Some("bitsandbytes") if !in_8_bits => Ok(()),
        _ => {
            let method = if in_8_bits { "8-bit bitsandbytes" } else { method.unwrap_or("?") };
            let reason = format!(
                "quantization_config is that of {method}; only 4-bit bitsandbytes can be read"
            );
            Err(ModelError::not_a_model(path, reason))
        }
    }
}

/// The architecture of a directory. Where `generation_config.json` names the
/// tokens that end a generation, they replace those of `config.json`, as in
/// transformers.
pub(crate) fn read_config(dir: &Path, name: &str) -> Result<Architecture, ModelError> {
    let path = dir.join("config.json");
    if !path.is_file() {
        return Err(ModelError::not_a_model(dir, "the folder has no config.json"));
    }
    let text = read_text(&path)?;
    let mut arch = Architecture::from_config_json(&text, name)?;
    check_quantization(&path, &text)?;
    let path = dir.join("generation_config.json");
    if path.is_file() {
        let json: Value = serde_json::from_str(&read_text(&path)?)
            .map_err(|e| ModelError::not_a_model(&path, format!("not JSON: {e}")))?;
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        let ids = match json.get("eos_token_id") {
            None | Some(Value::Null) => None,
            Some(Value::Array(list)) => Some(list.iter().map(id).collect::<Option<Vec<_>>>()),
            Some(one) => Some(id(one).map(|n| vec![n])),
        };
        if let Some(ids) = ids {
            let reason = "eos_token_id is neither a token id nor a list of token ids";
            arch.eos_token_ids = ids.ok_or_else(|| ModelError::not_a_model(&path, reason))?;
        }
    }
    Ok(arch)
}

//! Which chat template a model uses, and why.

use crate::dir::JsonFile;
use crate::{ChatTemplate, TextError, Tokenizer};
use serde_json::Value;
use std::path::Path;

/// Where a chat template came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TemplateSource {
    /// The file `chat_template.jinja` of the model directory.
    JinjaFile,
    /// `chat_template` in `tokenizer_config.json`.
    TokenizerConfig,
    /// `tokenizer.chat_template` in the GGUF metadata.
    Gguf,
    /// The model has none: the built-in ChatML.
    BuiltIn,
}

/// A chat template, where it came from and the sentence that says so.
#[derive(Debug, Clone)]
pub struct FoundTemplate {
    pub template: ChatTemplate,
    pub source: TemplateSource,
    /// For the log: "chat template: " + reason.
    pub reason: String,
}

/// The ChatML format (OpenAI, 2023), tools written as Hermes and Qwen models
/// expect them. `eos_token` stands for the end of a turn.
const CHATML: &str = r"{{- bos_token }}
{%- set system = messages[0].content if messages and messages[0].role == 'system' else none %}
{%- if tools %}
    {{- '<|im_start|>system\n' + (system + '\n\n' if system else '') }}
    {{- 'You can call these functions:\n<tools>' }}
    {%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}
    {{- '\n</tools>\nTo call one, write its name and arguments as JSON:\n<tool_call>\n' }}
    {{- '{\x22name\x22: ..., \x22arguments\x22: {...}}\n</tool_call>' + eos_token + '\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and system is not none) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n' if message.content or not loop.first }}
            {{- '<tool_call>\n' + (call.function or call) | tojson + '\n</tool_call>' }}
        {%- endfor %}
        {{- eos_token + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
";

/// The template of a Hugging Face directory: `chat_template.jinja`, else
/// `chat_template` of `tokenizer_config.json` (of a list of named templates the
/// one named `default`), else the built-in ChatML.
///
/// # Errors
/// A file that cannot be read, a field of the wrong type, or a template that
/// does not parse.
pub fn find_template(dir: &Path, tokenizer: &Tokenizer) -> Result<FoundTemplate, TextError> {
    let own =
        |source: &str| ChatTemplate::new(source, &tokenizer.bos_token(), &tokenizer.eos_token());
    let path = dir.join("chat_template.jinja");
    match std::fs::read_to_string(&path) {
        Ok(source) => {
            return Ok(FoundTemplate {
                template: own(&source)?,
                source: TemplateSource::JinjaFile,
                reason: "the model's chat_template.jinja".into(),
            });
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
        Err(source) => return Err(TextError::Io { path, source }),
    }
    let config = JsonFile::read(dir.join("tokenizer_config.json"))?;
    let (source, reason) = match &config.value["chat_template"] {
        Value::Null => return chatml(tokenizer),
        Value::String(source) => (source.as_str(), "the model's tokenizer_config.json".to_string()),
        Value::Array(named) => {
            let (name, source) = choose(named).ok_or_else(|| {
                config.error("chat_template", "must be a list of {\"name\", \"template\"} objects")
            })?;
            (source, format!("`{name}` of the model's tokenizer_config.json"))
        }
        other => {
            let detail = format!("must be a string or a list, found {other}");
            return Err(config.error("chat_template", detail));
        }
    };
    Ok(FoundTemplate { template: own(source)?, source: TemplateSource::TokenizerConfig, reason })
}

fn choose(named: &[Value]) -> Option<(&str, &str)> {
    let all: Option<Vec<(&str, &str)>> =
        named.iter().map(|t| Some((t["name"].as_str()?, t["template"].as_str()?))).collect();
    let all = all?;
    all.iter().find(|(name, _)| *name == "default").or(all.first()).copied()
}

/// The template of a GGUF file (`tokenizer.chat_template`), else the built-in ChatML.
///
/// # Errors
/// A template that does not parse.
pub fn gguf_template(
    template: Option<&str>,
    tokenizer: &Tokenizer,
) -> Result<FoundTemplate, TextError> {
    let Some(source) = template else {
        return chatml(tokenizer);
    };
    Ok(FoundTemplate {
        template: ChatTemplate::new(source, &tokenizer.bos_token(), &tokenizer.eos_token())?,
        source: TemplateSource::Gguf,
        reason: "tokenizer.chat_template of the GGUF file".into(),
    })
}

/// The built-in ChatML for a model without a template. Turns end with
/// `<|im_end|>` where the vocabulary has that token, else with the end-of-sequence
/// token, so that the model can learn to stop with one token.
///
/// # Errors
/// None in practice: the template is built in.
pub fn chatml(tokenizer: &Tokenizer) -> Result<FoundTemplate, TextError> {
    const END: &str = "<|im_end|>";
    let has_end = tokenizer.token_to_id(END).is_some_and(|id| tokenizer.is_special(id));
    let eos = tokenizer.eos_token();
    let end = if has_end || eos.is_empty() { END } else { &eos };
    let bos = tokenizer.bos_token();
    let bos = if tokenizer.adds_bos() { bos.as_str() } else { "" };
    Ok(FoundTemplate {
        template: ChatTemplate::new(CHATML, bos, end)?,
        source: TemplateSource::BuiltIn,
        reason: format!("built-in ChatML, turns end with {end} (the model has no template)"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Message;
    use serde_json::json;

    #[test]
    fn chatml_renders_tools_and_calls() {
        let found = chatml(&Tokenizer::byte_level()).unwrap();
        let mut call = Message::assistant("");
        call.tool_calls =
            Some(json!([{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]));
        let messages =
            [Message::system("Be brief."), Message::user("Hi"), call, Message::new("tool", "2")];
        let text = found.template.render(&messages, true).unwrap();
        assert_eq!(
            text,
            "<|begin_of_text|><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n\
             <|im_start|>assistant\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call><|im_end|>\n\
             <|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
        );
        let extra = json!({"tools": [{"name": "f"}]}).as_object().cloned().unwrap();
        let text = found.template.render_with(&messages[..2], false, &extra).unwrap();
        assert!(
            text.starts_with("<|begin_of_text|><|im_start|>system\nBe brief.\n\nYou can call"),
            "{text}"
        );
        assert!(text.contains("<tools>\n{\"name\": \"f\"}\n</tools>"), "{text}");
        assert!(text.contains("{\"name\": ..., \"arguments\": {...}}"), "{text}");
        assert_eq!(text.matches("Be brief.").count(), 1);
    }

    #[test]
    fn order_of_lookup() {
        let tok = Tokenizer::byte_level();
        let dir = tempfile::tempdir().unwrap();
        let find = || find_template(dir.path(), &tok).unwrap();
        assert_eq!(find().source, TemplateSource::BuiltIn);
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        write(
            "tokenizer_config.json",
            r#"{"chat_template": [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]}"#,
        );
        assert_eq!(find().template.source(), "D");
        write("tokenizer_config.json", r#"{"chat_template": "S"}"#);
        assert_eq!(find().template.source(), "S");
        write("chat_template.jinja", "J");
        assert_eq!(find().source, TemplateSource::JinjaFile);
        write("chat_template.jinja", "{% if %}");
        assert!(find_template(dir.path(), &tok).is_err());
        assert_eq!(gguf_template(Some("G"), &tok).unwrap().source, TemplateSource::Gguf);
    }
}

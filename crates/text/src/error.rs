//! Everything that can go wrong between text and tokens.

use std::path::PathBuf;

/// Errors of tokenizers and chat templates.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// A file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    /// A JSON file does not parse.
    #[error("{} is not valid JSON: {source}", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    /// The directory holds no `tokenizer.json`.
    #[error(
        "{} has no tokenizer.json; write one with transformers: \
         AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
        dir.display()
    )]
    NoTokenizer { dir: PathBuf },
    /// `tokenizer.json` is not a tokenizer that the `tokenizers` crate accepts.
    #[error("{}: {detail}", path.display())]
    Tokenizer { path: PathBuf, detail: String },
    /// A field of a configuration file has the wrong type or names an unknown token.
    #[error("{}: `{field}` {detail}", path.display())]
    Field { path: PathBuf, field: String, detail: String },
    /// The vocabulary in a GGUF file contradicts itself.
    #[error("GGUF vocabulary: {0}")]
    GgufVocab(String),
    /// `tokenizer.ggml.model` names an algorithm that is not implemented.
    #[error(
        "GGUF tokenizer model `{0}` is not supported (supported: gpt2, llama); use the model's Hugging Face directory instead"
    )]
    GgufModel(String),
    /// `tokenizer.ggml.pre` names an unknown pre-tokenizer.
    #[error(
        "GGUF pre-tokenizer `{0}` is not known, so ids could differ from those the model was trained on; use the model's Hugging Face directory instead (known: {known})",
        known = crate::SUPPORTED_PRE.join(", ")
    )]
    GgufPre(String),
    /// The tokenizer cannot be written as `tokenizer.json`.
    #[error("cannot write the tokenizer as tokenizer.json: {detail}")]
    Save { detail: String },
    /// The tokenizer refused a text.
    #[error("cannot encode the text {text:?}: {detail}")]
    Encode { text: String, detail: String },
    /// A chat template does not parse.
    #[error("chat template does not parse, line {line}: {detail}")]
    TemplateSyntax { line: usize, detail: String },
    /// A chat template refused a conversation by calling `raise_exception`.
    #[error("the chat template refuses this conversation: {message}")]
    TemplateRaised { message: String },
    /// A chat template failed while rendering.
    #[error("chat template failed, line {line}: {detail}")]
    TemplateRender { line: usize, detail: String },
    /// The text of an assistant turn cannot be located in the rendered conversation.
    #[error("message {message}: {detail}")]
    AssistantSpan { message: usize, detail: String },
}

/// The first characters of a text, for an error message.
pub(crate) fn excerpt(text: &str) -> String {
    const CHARS: usize = 60;
    let mut short: String = text.chars().take(CHARS).collect();
    if text.chars().nth(CHARS).is_some() {
        short.push_str("...");
    }
    short
}

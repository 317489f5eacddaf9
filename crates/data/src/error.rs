//! Everything that can be wrong with training data.

use crate::Format;
use plimsoll_text::TextError;
use std::path::PathBuf;

/// Errors of reading, tokenizing and packing data.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    /// No file was given.
    #[error("no data: name at least one file")]
    NoFiles,
    /// A file holds no example.
    #[error("{} holds no example{hint}", path.display())]
    Empty { path: PathBuf, hint: String },
    /// A line or record is not what the format says.
    #[error("{}:{line}: {detail}", path.display())]
    Bad { path: PathBuf, line: usize, detail: String },
    /// The format of a file cannot be told from its first record.
    #[error(
        "{}:{line}: cannot tell the format from the keys {keys}; expected one of {formats}, or name it",
        path.display(),
        formats = Format::KEYS
    )]
    UnknownFormat { path: PathBuf, line: usize, keys: String },
    /// An example cannot be turned into tokens.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The tokenizer made an id that the model has no embedding for.
    #[error(
        "token id {id} ({token:?}, in {text:?}) is outside the model's vocabulary of {vocab_size}: the tokenizer does not belong to this model"
    )]
    TokenOutOfVocabulary { id: u32, token: String, text: String, vocab_size: usize },
    /// [`DataError`] of one example, with its place.
    #[error("{}:{line}: {source}", path.display())]
    Example { path: PathBuf, line: usize, source: Box<DataError> },
    /// A document does not fit a row and may not be cut.
    #[error(
        "document {document} has {tokens} tokens, more than the sequence length {seq_len}: raise the sequence length or allow cutting"
    )]
    TooLong { document: usize, tokens: usize, seq_len: usize },
    /// A sequence length, batch size or fraction that makes no sense.
    #[error("{name} is {value}; {expected}")]
    Setting { name: &'static str, value: String, expected: &'static str },
    /// Nothing is left to train on.
    #[error("no token to train on: {0}")]
    NothingToTrain(String),
    /// A saved position does not fit the data.
    #[error(
        "cannot resume at row {index} of epoch {epoch}: the data has {len} rows; it is not the data of that run"
    )]
    Resume { epoch: u64, index: usize, len: usize },
}

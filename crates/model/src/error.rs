//! What can be wrong with a model's files.

use std::io;
use std::path::{Path, PathBuf};

use plimsoll_arch::ConfigError;
use plimsoll_plan::DeviceError;

/// Why weights could not be read or written. Every message names the file, and
/// the tensor and the number where there is one.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error("cannot {doing} {}: {source}", path.display())]
    Io { path: PathBuf, doing: &'static str, source: io::Error },
    #[error(
        "no space in {}: {needed} bytes are needed{}; free some or choose another folder",
        path.display(),
        free.map(|n| format!(" and {n} are free")).unwrap_or_default()
    )]
    NoSpace { path: PathBuf, needed: u64, free: Option<u64> },
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("{}: {reason}", path.display())]
    NotAModel { path: PathBuf, reason: String },
    #[error("{}: not a valid safetensors file: {reason}", path.display())]
    Safetensors { path: PathBuf, reason: String },
    #[error("{}: not a valid GGUF file: {reason}", path.display())]
    Gguf { path: PathBuf, reason: String },
    #[error("{}: GGUF metadata `{key}`: {reason}", path.display())]
    GgufKey { path: PathBuf, key: String, reason: String },
    #[error("{}: tensor `{tensor}` is not in the file", path.display())]
    NoSuchTensor { path: PathBuf, tensor: String },
    #[error(
        "{}: tensor `{tensor}` has type {dtype}, which cannot be read; \
         supported: F32, F16, BF16 and the GGUF types Q2_K to Q8_0",
        path.display()
    )]
    UnsupportedDtype { path: PathBuf, tensor: String, dtype: String },
    #[error("tensor `{tensor}` has {elements} elements, but the destination has {given}")]
    WrongLength { tensor: String, elements: usize, given: usize },
    #[error("{}: weights do not fit the config: {}", path.display(), list(problems))]
    Mismatch { path: PathBuf, problems: Vec<TensorProblem> },
    #[error(
        "{}: the adapter, which was trained on {base}, does not fit {model}: {}",
        path.display(),
        list(problems)
    )]
    AdapterMismatch { path: PathBuf, base: String, model: String, problems: Vec<TensorProblem> },
    #[error(
        "{}: tensor `{tensor}` holds {value} at element {index}; the file is damaged \
         or the training that wrote it diverged",
        path.display()
    )]
    NonFinite { path: PathBuf, tensor: String, index: usize, value: f32 },
    #[error("{}: 4-bit tensor `{tensor}`: {reason}", path.display())]
    Packed { path: PathBuf, tensor: String, reason: String },
    #[error(transparent)]
    Device(DeviceError),
    #[error("{}: cannot write tensor `{tensor}`: {reason}", path.display())]
    Write { path: PathBuf, tensor: String, reason: String },
}

/// One tensor that a model lacks or has in another shape or type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TensorProblem {
    #[error("`{tensor}` {expected:?} is missing")]
    Missing { tensor: String, expected: Vec<usize> },
    #[error("`{tensor}` has shape {found:?}, expected {expected:?}")]
    Shape { tensor: String, found: Vec<usize>, expected: Vec<usize> },
    #[error("`{tensor}` has type {dtype}, which cannot be read")]
    Dtype { tensor: String, dtype: String },
    #[error("`{tensor}` is no part of this architecture")]
    Unused { tensor: String },
}

/// The first few of many.
fn list<T: ToString>(items: &[T]) -> String {
    const SHOWN: usize = 5;
    let mut text = items.iter().take(SHOWN).map(T::to_string).collect::<Vec<_>>().join("; ");
    if items.len() > SHOWN {
        text += &format!("; and {} more", items.len() - SHOWN);
    }
    text
}

impl ModelError {
    /// What the file system said while `doing` something with a file.
    pub fn io(path: &Path, doing: &'static str) -> impl FnOnce(io::Error) -> ModelError {
        let path = path.to_path_buf();
        move |source| ModelError::Io { path, doing, source }
    }

    pub(crate) fn not_a_model(path: &Path, reason: impl Into<String>) -> ModelError {
        ModelError::NotAModel { path: path.to_path_buf(), reason: reason.into() }
    }
}

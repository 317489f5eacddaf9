//! Weights in: a directory of safetensors or a GGUF file.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use plimsoll_arch::Architecture;
use plimsoll_quant::Format4bit;
use serde::Deserialize;

use crate::ModelError;
use crate::config_files::{model_name, read_config, read_text};
use crate::error::TensorProblem;
use crate::format::{Format, decode};
use crate::gguf::{self, GgufMetadata};
use crate::gguf_model;
use crate::map::MappedFile;
use crate::names::expected_tensors;
use crate::packed::{self, Packed};
use crate::safetensors::{self, RawTensor};

/// The weights of a model on disk, mapped into memory.
///
/// Tensors have their Hugging Face names and shapes whatever the file is.
/// Reading converts from the mapped file straight into the destination, a few
/// MiB at a time, and then lets the file's pages go: neither a second copy nor
/// the file itself stays resident. All methods may be called from several
/// threads at once.
pub struct Checkpoint {
    pub(crate) path: PathBuf,
    architecture: Architecture,
    pub(crate) files: Vec<Arc<MappedFile>>,
    /// Sorted by name.
    tensors: Vec<Stored>,
    /// Names and files of the tensors that are parts of 4-bit ones.
    parts: Vec<(String, usize)>,
    metadata: Option<GgufMetadata>,
}

/// Where a tensor is.
pub(crate) struct Stored {
    pub name: String,
    pub shape: Vec<usize>,
    pub format: &'static Format,
    /// Index of the file, and the bytes there.
    pub file: usize,
    pub range: Range<usize>,
    /// Rows of each head of this width are stored in pairs (GGUF, llama).
    pub paired: Option<usize>,
    /// The tensor is in four bits; `range` holds the codes.
    pub packed: Option<Box<Packed>>,
}

/// What [`Checkpoint::validate`] has to say about a sound checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Validation {
    /// Tensors that the model has no place for.
    pub unexpected: Vec<String>,
}

/// The architecture at a path, without looking at weights: a directory with
/// `config.json`, or a GGUF file.
///
/// # Errors
/// As [`Checkpoint::open`], less what concerns weights.
pub fn read_architecture(path: &Path) -> Result<Architecture, ModelError> {
    if path.is_dir() {
        return read_config(path, &model_name(path));
    }
    Checkpoint::open(path).map(|c| c.architecture)
}

impl Checkpoint {
    /// Opens a directory with `config.json` and `model.safetensors`, or shards
    /// with `model.safetensors.index.json`, or any single `*.safetensors`; one
    /// such file (its directory has the `config.json`); or a `.gguf` file.
    ///
    /// Headers are read and checked here; [`Checkpoint::validate`] compares
    /// them with the architecture.
    ///
    /// # Errors
    /// Names the file and what is wrong with it. Allocates at most a small
    /// multiple of the headers' length.
    pub fn open(path: &Path) -> Result<Checkpoint, ModelError> {
        let metadata = path.metadata().map_err(ModelError::io(path, "open"))?;
        if metadata.is_dir() {
            return Self::open_directory(path);
        }
        match path.extension().and_then(|e| e.to_str()) {
            Some("gguf") => Self::open_gguf(path),
            Some("safetensors") => {
                let dir = match path.parent() {
                    Some(dir) if !dir.as_os_str().is_empty() => dir,
                    _ => Path::new("."),
                };
                let architecture = read_config(dir, &model_name(path))?;
                Self::from_safetensors(path, architecture, &[path.to_path_buf()])
            }
            _ => {
                let reason = "expected a folder, a .safetensors file or a .gguf file";
                Err(ModelError::not_a_model(path, reason))
            }
        }
    }

    fn open_directory(dir: &Path) -> Result<Checkpoint, ModelError> {
        let architecture = read_config(dir, &model_name(dir))?;
        let single = dir.join("model.safetensors");
        if single.is_file() {
            return Self::from_safetensors(dir, architecture, &[single]);
        }
        let index = dir.join("model.safetensors.index.json");
        if index.is_file() {
            let placed = read_index(&index)?;
            let mut files: Vec<&String> = placed.values().collect();
            files.sort();
            files.dedup();
            let files: Vec<PathBuf> = files.into_iter().map(|f| dir.join(f)).collect();
            let checkpoint = Self::from_safetensors(dir, architecture, &files)?;
            return match placed.iter().find(|(name, file)| !checkpoint.is_in(name, file)) {
                None => Ok(checkpoint),
                Some((tensor, file)) => {
                    let (path, tensor) = (dir.join(file), tensor.clone());
                    Err(ModelError::NoSuchTensor { path, tensor })
                }
            };
        }
        let mut found = Vec::new();
        for entry in dir.read_dir().map_err(ModelError::io(dir, "list"))? {
            let path = entry.map_err(ModelError::io(dir, "list"))?.path();
            if path.extension().is_some_and(|e| e == "safetensors") {
                found.push(path);
            }
        }
        found.sort();
        match found.as_slice() {
            [one] => Self::from_safetensors(dir, architecture, std::slice::from_ref(one)),
            [] => Err(ModelError::not_a_model(
                dir,
                "the folder has no *.safetensors (weights in PyTorch's .bin or .pt form must be \
                 converted first)",
            )),
            several => Err(ModelError::not_a_model(
                dir,
                format!(
                    "the folder has {} *.safetensors but neither model.safetensors nor \
                     model.safetensors.index.json",
                    several.len()
                ),
            )),
        }
    }

    pub(crate) fn from_safetensors(
        path: &Path,
        architecture: Architecture,
        files: &[PathBuf],
    ) -> Result<Checkpoint, ModelError> {
        let mut maps = Vec::with_capacity(files.len());
        let mut tensors = Vec::new();
        for (file, path) in files.iter().enumerate() {
            let map = MappedFile::open(path)?;
            for RawTensor { name, shape, format, range } in safetensors::tensors(&map)? {
                let (paired, packed) = (None, None);
                tensors.push(Stored { name, shape, format, file, range, paired, packed });
            }
            maps.push(Arc::new(map));
        }
        let parts = packed::gather(path, &maps, &mut tensors)?;
        let checkpoint = Self::new(path, architecture, maps, tensors, None)?;
        Ok(Checkpoint { parts, ..checkpoint })
    }

    fn open_gguf(path: &Path) -> Result<Checkpoint, ModelError> {
        let file = Arc::new(MappedFile::open(path)?);
        let (metadata, raw) = gguf::parse(file.clone())?;
        let name = model_name(path);
        let architecture = gguf_model::architecture(&metadata, &raw, &name, |tensor| {
            let mut values = vec![0f32; tensor.shape.iter().product()];
            let Some(codec) = tensor.format.codec else {
                return Err(unsupported(path, &tensor.name, tensor.format));
            };
            decode(codec, &file.bytes()[tensor.range.clone()], &mut values);
            Ok(values)
        })?;
        let mut tensors = Vec::with_capacity(raw.len());
        for RawTensor { name, shape, format, range } in raw {
            let name = gguf_model::hugging_face_name(&name).unwrap_or(name);
            let paired = gguf_model::paired_rows(&architecture, &name)
                .filter(|d| shape.len() == 2 && shape[0].is_multiple_of(*d));
            tensors.push(Stored { name, shape, format, file: 0, range, paired, packed: None });
        }
        Self::new(path, architecture, vec![file], tensors, Some(metadata))
    }

    fn new(
        path: &Path,
        architecture: Architecture,
        files: Vec<Arc<MappedFile>>,
        mut tensors: Vec<Stored>,
        metadata: Option<GgufMetadata>,
    ) -> Result<Checkpoint, ModelError> {
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        if let Some(pair) = tensors.windows(2).find(|w| w[0].name == w[1].name) {
            let files = [&files[pair[0].file].path, &files[pair[1].file].path];
            let reason = format!(
                "tensor `{}` is there twice, in {} and in {}",
                pair[0].name,
                files[0].display(),
                files[1].display()
            );
            return Err(ModelError::not_a_model(path, reason));
        }
        let (path, parts) = (path.to_path_buf(), Vec::new());
        Ok(Checkpoint { path, architecture, files, tensors, parts, metadata })
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn architecture(&self) -> &Architecture {
        &self.architecture
    }

    /// Names of all tensors, sorted.
    pub fn tensor_names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.tensors.iter().map(|t| t.name.as_str())
    }

    /// The shape of a tensor, rows first; `None` if there is no such tensor.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.find(name).map(|t| t.shape.as_slice())
    }

    /// The type of a tensor as safetensors (`BF16`), ggml (`Q4_K`) or, in four
    /// bits, this program (`nf4-dq`) names it.
    pub fn dtype(&self, name: &str) -> Option<&'static str> {
        let name_of = |t: &Stored| t.packed.as_ref().map_or(t.format.name, |p| p.format.name());
        self.find(name).map(name_of)
    }

    /// The 4-bit format of a tensor; none for one in another type.
    pub fn format_4bit(&self, name: &str) -> Option<Format4bit> {
        self.find(name)?.packed.as_ref().map(|p| p.format)
    }

    /// Bytes of all tensors in the files, without the tables of 4-bit ones.
    pub fn total_bytes(&self) -> u64 {
        let scales = |t: &Stored| t.packed.as_ref().map_or(0, |p| p.scale_bytes());
        self.tensors.iter().map(|t| (t.range.len() + scales(t)) as u64).sum()
    }

    /// The metadata of a GGUF file, tokenizer and chat template among them.
    pub fn gguf_metadata(&self) -> Option<&GgufMetadata> {
        self.metadata.as_ref()
    }

    /// Compares the tensors with what the architecture needs.
    ///
    /// Left-overs of older conversions (`rotary_emb.inv_freq`), the head of a
    /// tied model and the `rope_freqs.weight` of GGUF are passed over in
    /// silence; other tensors that the model has no place for are returned, to
    /// be shown as a warning. A weight or bias inside a block is not one of
    /// them: leaving it out would compute another model, and is an error.
    ///
    /// # Errors
    /// [`ModelError::Mismatch`] with all tensors that are missing, have
    /// another shape, a type that cannot be read, or no place.
    pub fn validate(&self) -> Result<Validation, ModelError> {
        let expected: BTreeMap<_, _> = expected_tensors(&self.architecture).into_iter().collect();
        let mut problems = Vec::new();
        for (tensor, expected) in &expected {
            let (tensor, expected) = (tensor.clone(), expected.clone());
            match self.find(&tensor) {
                None => problems.push(TensorProblem::Missing { tensor, expected }),
                Some(t) if t.format.codec.is_none() && t.packed.is_none() => {
                    let dtype = t.format.name.to_string();
                    problems.push(TensorProblem::Dtype { tensor, dtype });
                }
                Some(t) if t.shape != expected => {
                    let found = t.shape.clone();
                    problems.push(TensorProblem::Shape { tensor, found, expected });
                }
                Some(_) => {}
            }
        }
        let mut unexpected = Vec::new();
        for name in self.tensor_names().filter(|n| !expected.contains_key(*n)) {
            let tied = self.architecture.tie_word_embeddings && name == "lm_head.weight";
            if tied || name.ends_with("rotary_emb.inv_freq") || name == "rope_freqs.weight" {
                continue;
            }
            if self.is_in_block(name) {
                problems.push(TensorProblem::Unused { tensor: name.to_string() });
            } else {
                unexpected.push(name.to_string());
            }
        }
        match problems.is_empty() {
            true => Ok(Validation { unexpected }),
            false => Err(ModelError::Mismatch { path: self.path.clone(), problems }),
        }
    }

    /// Whether the name is that of a weight or bias of one of the blocks.
    fn is_in_block(&self, name: &str) -> bool {
        let in_layers = |rest: &str| {
            let layer = rest.split('.').next().and_then(|n| n.parse::<usize>().ok());
            layer.is_some_and(|n| n < self.architecture.num_hidden_layers)
        };
        let rest = name.strip_prefix("model.layers.").or(name.strip_prefix("blk."));
        rest.is_some_and(in_layers) && (name.ends_with(".weight") || name.ends_with(".bias"))
    }

    pub(crate) fn find(&self, name: &str) -> Option<&Stored> {
        let i = self.tensors.binary_search_by(|t| t.name.as_str().cmp(name)).ok()?;
        Some(&self.tensors[i])
    }

    fn is_in(&self, tensor: &str, file: &str) -> bool {
        let part = || self.parts.iter().find(|(name, _)| name == tensor).map(|(_, file)| *file);
        let place = self.find(tensor).map(|t| t.file).or_else(part);
        place.and_then(|place| self.files[place].path.file_name()).is_some_and(|name| name == file)
    }
}

pub(crate) fn unsupported(path: &Path, tensor: &str, format: &Format) -> ModelError {
    let (tensor, dtype) = (tensor.to_string(), format.name.to_string());
    ModelError::UnsupportedDtype { path: path.to_path_buf(), tensor, dtype }
}

/// `model.safetensors.index.json`: from tensors to the names of shards.
fn read_index(path: &Path) -> Result<BTreeMap<String, String>, ModelError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index: Index = serde_json::from_str(&read_text(path)?)
        .map_err(|e| ModelError::not_a_model(path, format!("not an index: {e}")))?;
    for (tensor, file) in &index.weight_map {
        // Shards lie beside their index.
        let mut parts = Path::new(file).components();
        let plain = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
        if !plain {
            let reason =
                format!("tensor `{tensor}` is in `{file}`, which is not a plain file name");
            return Err(ModelError::not_a_model(path, reason));
        }
    }
    Ok(index.weight_map)
}

//! Weights out: safetensors, an index where there are several files, and
//! `config.json`, as transformers loads them.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use half::bf16;
use plimsoll_arch::{Architecture, DType};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::ModelError;
use crate::finite::Weight;

/// Bytes of data in one file, at most, unless a single tensor is larger: 5 GB,
/// as transformers 4 and huggingface_hub split.
pub const DEFAULT_SHARD_BYTES: u64 = 5_000_000_000;

const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";

/// Writes a model tensor by tensor, in the order given at the start.
///
/// Everything goes to temporary files in the folder. [`finish`] flushes them to
/// the disk and gives them their names; until then, and after an error, the
/// files that were there are as they were. A writer that is dropped removes
/// its temporary files. One file replaces another in one step of the file
/// system; several do so one after the other: to replace a sharded model
/// atomically, write a new folder and rename that.
///
/// [`finish`]: SafetensorsWriter::finish
pub struct SafetensorsWriter {
    dir: PathBuf,
    config: String,
    config_name: &'static str,
    tensors: Vec<Planned>,
    /// Index of the tensor that comes next.
    next: usize,
    shards: Vec<Shard>,
    /// The shard that is being written; `None` after a failure, which left it
    /// incomplete.
    open: Option<File>,
    /// Temporary files that exist.
    temporary: Vec<PathBuf>,
}

/// A tensor that is going to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    pub name: String,
    /// Rows first.
    pub shape: Vec<usize>,
    /// f32, bf16 or u8.
    pub dtype: DType,
}

/// Where a tensor lies while its file is being written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilePlace {
    pub name: String,
    pub path: PathBuf,
    /// Of its first byte.
    pub offset: u64,
}

struct Planned {
    name: String,
    dtype: DType,
    elements: usize,
    shard: usize,
}

struct Shard {
    name: String,
    /// The length of the JSON and the JSON.
    header: Vec<u8>,
}

impl SafetensorsWriter {
    /// Prepares to write `tensors` (names and shapes, rows first) as `dtype`,
    /// f32 or bf16, into `dir`, which is created if it is not there.
    ///
    /// # Errors
    /// A type other than f32 and bf16, a repeated name, a folder that cannot
    /// be created or written, or one with too little space.
    pub fn create(
        dir: &Path,
        architecture: &Architecture,
        dtype: DType,
        tensors: &[(String, Vec<usize>)],
    ) -> Result<SafetensorsWriter, ModelError> {
        Self::with_shard_bytes(dir, architecture, dtype, tensors, DEFAULT_SHARD_BYTES)
    }

    /// As [`SafetensorsWriter::create`], with another limit on the data of one
    /// file.
    ///
    /// # Errors
    /// As [`SafetensorsWriter::create`].
    pub fn with_shard_bytes(
        dir: &Path,
        architecture: &Architecture,
        dtype: DType,
        tensors: &[(String, Vec<usize>)],
        shard_bytes: u64,
    ) -> Result<SafetensorsWriter, ModelError> {
        if !matches!(dtype, DType::F32 | DType::Bf16) {
            return Err(ModelError::Write {
                path: dir.to_path_buf(),
                tensor: String::new(),
                reason: format!("weights are f32 or bf16, not {dtype}"),
            });
        }
        let spec = |(name, shape): &(String, Vec<usize>)| TensorSpec {
            name: name.clone(),
            shape: shape.clone(),
            dtype,
        };
        let tensors: Vec<TensorSpec> = tensors.iter().map(spec).collect();
        Self::with_config(dir, architecture.to_config_json(dtype), &tensors, shard_bytes)
    }

    /// As [`SafetensorsWriter::with_shard_bytes`], for tensors of several types
    /// and a `config.json` that the caller has made.
    ///
    /// # Errors
    /// As [`SafetensorsWriter::create`].
    pub fn with_config(
        dir: &Path,
        config: String,
        tensors: &[TensorSpec],
        shard_bytes: u64,
    ) -> Result<SafetensorsWriter, ModelError> {
        Self::named(dir, ["model", CONFIG], config, &[], tensors, shard_bytes)
    }

    /// As [`SafetensorsWriter::with_config`], with other names: that of the weights,
    /// without `.safetensors`, and that of the configuration; and with more metadata in
    /// every file.
    pub(crate) fn named(
        dir: &Path,
        [stem, config_name]: [&'static str; 2],
        config: String,
        metadata: &[(&str, String)],
        tensors: &[TensorSpec],
        shard_bytes: u64,
    ) -> Result<SafetensorsWriter, ModelError> {
        let refuse = |tensor: &str, reason: String| ModelError::Write {
            path: dir.to_path_buf(),
            tensor: tensor.to_string(),
            reason,
        };
        let mut planned = Vec::with_capacity(tensors.len());
        let mut contents = vec![Map::new()];
        let (mut filled, mut total) = (0u64, 0u64);
        let mut names = std::collections::HashSet::new();
        for TensorSpec { name, shape, dtype } in tensors {
            let (name, dtype) = (name, *dtype);
            let code = match dtype {
                DType::F32 => "F32",
                DType::Bf16 => "BF16",
                DType::U8 => "U8",
                other => return Err(refuse(name, format!("it cannot be written as {other}"))),
            };
            if !names.insert(name) || name == "__metadata__" {
                return Err(refuse(name, "the name is taken".into()));
            }
            let elements = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
            let elements = elements.filter(|n| *n < 1 << 60);
            let too_large = || refuse(name, format!("shape {shape:?} is too large"));
            let elements = elements.ok_or_else(too_large)?;
            let bytes = (elements * dtype.bytes()) as u64;
            if filled > 0 && filled.saturating_add(bytes) > shard_bytes {
                contents.push(Map::new());
                filled = 0;
            }
            let offsets = [filled, filled.checked_add(bytes).ok_or_else(too_large)?];
            let shard = contents.len() - 1;
            let info = json!({"dtype": code, "shape": shape, "data_offsets": offsets});
            contents[shard].insert(name.clone(), info);
            planned.push(Planned { name: name.clone(), dtype, elements, shard });
            filled = offsets[1];
            total = total.checked_add(bytes).ok_or_else(too_large)?;
        }
        let count = contents.len();
        let shards: Vec<Shard> = contents
            .into_iter()
            .enumerate()
            .map(|(i, content)| Shard {
                name: match count {
                    1 => format!("{stem}.safetensors"),
                    _ => format!("{stem}-{:05}-of-{count:05}.safetensors", i + 1),
                },
                header: header(metadata, content),
            })
            .collect();

        fs::create_dir_all(dir).map_err(ModelError::io(dir, "create the folder"))?;
        remove_abandoned(dir);
        let needed = total + shards.iter().map(|s| s.header.len() as u64).sum::<u64>();
        if let Some(free) = free_bytes(dir)
            && needed > free
        {
            return Err(ModelError::NoSpace { path: dir.to_path_buf(), needed, free: Some(free) });
        }
        let mut writer = SafetensorsWriter {
            dir: dir.to_path_buf(),
            config,
            config_name,
            tensors: planned,
            next: 0,
            shards,
            open: None,
            temporary: Vec::new(),
        };
        // An unwritable folder shows now, not after the first tensor is ready.
        writer.start_shard(0)?;
        Ok(writer)
    }

    /// Makes every file in its full length, for several writers that each fill ranges of
    /// it; says where each tensor lies. Each flushes what it wrote; [`finish`] comes after all.
    ///
    /// [`finish`]: SafetensorsWriter::finish
    ///
    /// # Errors
    /// The disk refuses.
    pub fn open_to_all(&mut self) -> Result<Vec<FilePlace>, ModelError> {
        let mut places = Vec::with_capacity(self.tensors.len());
        let mut end = self.shards.first().map_or(0, |s| s.header.len() as u64);
        for index in 0..self.tensors.len() {
            let shard = self.tensors[index].shard;
            if self.temporary.len() == shard {
                self.set_length(end)?;
                self.close_shard()?;
                self.start_shard(shard)?;
                end = self.shards[shard].header.len() as u64;
            }
            let tensor = &self.tensors[index];
            let (name, path) = (tensor.name.clone(), self.temporary[shard].clone());
            places.push(FilePlace { name, path, offset: end });
            end += (tensor.elements * tensor.dtype.bytes()) as u64;
        }
        self.set_length(end)?;
        self.next = self.tensors.len();
        Ok(places)
    }

    fn set_length(&self, length: u64) -> Result<(), ModelError> {
        let Some(file) = &self.open else { return Ok(()) };
        let path = &self.temporary[self.temporary.len() - 1];
        file.set_len(length).map_err(|e| failed(path, length as usize, e))
    }

    /// Writes the next tensor from float32, rounded (to nearest, ties to even)
    /// if the file is bf16.
    ///
    /// # Errors
    /// It is not `name`'s turn, the length is another, or the disk refuses.
    pub fn write_f32(&mut self, name: &str, values: &[f32]) -> Result<(), ModelError> {
        self.write(name, values)
    }

    /// As [`SafetensorsWriter::write_f32`], from bf16; exact.
    ///
    /// # Errors
    /// As [`SafetensorsWriter::write_f32`].
    pub fn write_bf16(&mut self, name: &str, values: &[bf16]) -> Result<(), ModelError> {
        self.write(name, values)
    }

    /// Writes the next tensor, which is in bytes, as it is.
    ///
    /// # Errors
    /// As [`SafetensorsWriter::write_f32`].
    pub fn write_u8(&mut self, name: &str, bytes: &[u8]) -> Result<(), ModelError> {
        let (_, mut file) = self.begin(name, bytes.len(), |dtype| dtype == DType::U8)?;
        let path = &self.temporary[self.temporary.len() - 1];
        file.write_all(bytes).map_err(|e| failed(path, bytes.len(), e))?;
        self.open = Some(file);
        self.next += 1;
        Ok(())
    }

    /// The type and the file of the next tensor, which must be `name`; the
    /// caller puts the file back once the tensor is whole.
    fn begin(
        &mut self,
        name: &str,
        elements: usize,
        accepts: impl Fn(DType) -> bool,
    ) -> Result<(DType, File), ModelError> {
        let refuse = |dir: &Path, reason| {
            Err(ModelError::Write { path: dir.to_path_buf(), tensor: name.to_string(), reason })
        };
        let Some(planned) = self.tensors.get(self.next) else {
            return refuse(&self.dir, "all tensors are written".into());
        };
        if planned.name != name {
            return refuse(&self.dir, format!("the turn is that of `{}`", planned.name));
        }
        if planned.elements != elements {
            let needed = planned.elements;
            return refuse(&self.dir, format!("it needs {needed} elements, not {elements}"));
        }
        let (shard, dtype) = (planned.shard, planned.dtype);
        if !accepts(dtype) {
            return refuse(&self.dir, format!("it is {dtype}"));
        }
        if self.temporary.len() == shard {
            self.close_shard()?;
            self.start_shard(shard)?;
        }
        match self.open.take() {
            Some(file) => Ok((dtype, file)),
            None => refuse(&self.dir, "an earlier tensor could not be written".into()),
        }
    }

    fn write<T: Weight>(&mut self, name: &str, values: &[T]) -> Result<(), ModelError> {
        let (dtype, mut file) = self.begin(name, values.len(), |dtype| dtype != DType::U8)?;
        let path = &self.temporary[self.temporary.len() - 1];
        // A few pages at a time: a tensor is never there a second time.
        for values in values.chunks(16 << 10) {
            let written = match dtype {
                DType::F32 => {
                    let bits: Vec<u32> =
                        values.iter().map(|x| x.to_f32().to_bits().to_le()).collect();
                    file.write_all(bytemuck::cast_slice(&bits))
                }
                _ => {
                    let round = |x: &T| bf16::of(x.to_f32()).to_bits().to_le();
                    let bits: Vec<u16> = values.iter().map(round).collect();
                    file.write_all(bytemuck::cast_slice(&bits))
                }
            };
            written.map_err(|e| failed(path, values.len() * dtype.bytes(), e))?;
        }
        self.open = Some(file);
        self.next += 1;
        Ok(())
    }

    /// Flushes everything to the disk and gives the files their names. Files
    /// of a model that was in the folder and are not replaced are removed, so
    /// that no reader mixes the two.
    ///
    /// # Errors
    /// A tensor is missing, or the disk refuses; before the first file is
    /// renamed nothing is lost.
    pub fn finish(mut self) -> Result<(), ModelError> {
        if let Some(missing) = self.tensors.get(self.next) {
            return Err(ModelError::Write {
                path: self.dir.clone(),
                tensor: missing.name.clone(),
                reason: "it was not given before the end".into(),
            });
        }
        if self.open.is_none() {
            let (path, tensor) = (self.dir.clone(), String::new());
            let reason = "an earlier tensor could not be written".into();
            return Err(ModelError::Write { path, tensor, reason });
        }
        self.close_shard()?;
        let mut names: Vec<String> = self.shards.iter().map(|s| s.name.clone()).collect();
        if names.len() > 1 {
            let index = self.index();
            self.small_file(INDEX, &index)?;
            names.push(INDEX.into());
        }
        let config = self.config.clone();
        self.small_file(self.config_name, &config)?;
        names.push(self.config_name.into());

        for (temporary, name) in self.temporary.iter().zip(&names) {
            let path = self.dir.join(name);
            fs::rename(temporary, &path).map_err(ModelError::io(&path, "replace"))?;
        }
        self.temporary.clear();
        if self.config_name == CONFIG {
            self.remove_old(&names)?;
        }
        // The directory holds the new names only once it is on the disk too.
        let dir = File::open(&self.dir).and_then(|d| d.sync_all());
        dir.map_err(ModelError::io(&self.dir, "flush the folder"))
    }

    fn start_shard(&mut self, shard: usize) -> Result<(), ModelError> {
        let (mut file, path) = self.temporary_file(&self.shards[shard].name.clone())?;
        let header = &self.shards[shard].header;
        file.write_all(header).map_err(|e| failed(&path, header.len(), e))?;
        self.open = Some(file);
        Ok(())
    }

    /// Flushes the open shard; its header is not needed any more.
    fn close_shard(&mut self) -> Result<(), ModelError> {
        let Some(file) = self.open.take() else { return Ok(()) };
        let path = &self.temporary[self.temporary.len() - 1];
        file.sync_all().map_err(|e| failed(path, 0, e))
    }

    fn small_file(&mut self, name: &str, text: &str) -> Result<(), ModelError> {
        let (mut file, path) = self.temporary_file(name)?;
        let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
        written.map_err(|e| failed(&path, text.len(), e))
    }

    /// A new file in the folder under a name that no other writer uses.
    fn temporary_file(&mut self, name: &str) -> Result<(File, PathBuf), ModelError> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = self.dir.join(format!(".{name}.{}.{count}.tmp", std::process::id()));
        let file = File::create(&path).map_err(|e| failed(&path, 0, e))?;
        self.temporary.push(path.clone());
        Ok((file, path))
    }

    fn index(&self) -> String {
        let place = |t: &Planned| (t.name.clone(), json!(self.shards[t.shard].name));
        let weight_map: Map<String, Value> = self.tensors.iter().map(place).collect();
        let total_size: usize = self.tensors.iter().map(|t| t.elements * t.dtype.bytes()).sum();
        let index = json!({"metadata": {"total_size": total_size}, "weight_map": weight_map});
        format!("{index:#}\n")
    }

    fn remove_old(&self, written: &[String]) -> Result<(), ModelError> {
        for entry in self.dir.read_dir().map_err(ModelError::io(&self.dir, "list"))? {
            let entry = entry.map_err(ModelError::io(&self.dir, "list"))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let shard = name.starts_with("model-") && name.ends_with(".safetensors");
            let ours =
                shard && name.contains("-of-") || name == INDEX || name == "model.safetensors";
            if ours && !written.contains(&name) {
                let path = entry.path();
                fs::remove_file(&path).map_err(ModelError::io(&path, "remove"))?;
            }
        }
        Ok(())
    }
}

impl Drop for SafetensorsWriter {
    fn drop(&mut self) {
        for path in &self.temporary {
            // Nothing more can be done, and the files that count are whole.
            let _ = fs::remove_file(path);
        }
    }
}

/// The header of one file, with its length before it and spaces behind it, so
/// that the data begin at a multiple of eight bytes.
fn header(metadata: &[(&str, String)], tensors: Map<String, Value>) -> Vec<u8> {
    let mut object = Map::new();
    // transformers refuses files that do not say where they come from.
    let mut about = Map::from_iter([("format".to_owned(), json!("pt"))]);
    about.extend(metadata.iter().map(|(key, value)| ((*key).to_owned(), json!(value))));
    object.insert("__metadata__".into(), about.into());
    object.extend(tensors);
    let mut text = Value::Object(object).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    header
}

/// Removes the temporary files of writers that were killed: those whose name
/// holds the number of a process that is no more. What cannot be removed stays.
fn remove_abandoned(dir: &Path) {
    for entry in dir.read_dir().into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(stem) = name.strip_suffix(".tmp") else { continue };
        let mut parts = stem.rsplit('.');
        let (count, process, of) = (parts.next(), parts.next(), parts.next());
        let number = |part: Option<&str>| part.and_then(|p| p.parse::<i32>().ok());
        let weights = name.starts_with(".model") && of == Some("safetensors");
        if let (true, Some(_), Some(pid)) = (weights, number(count), number(process))
            && pid > 0
        {
            // SAFETY: signal 0 is not sent, only whether it could be.
            let result = unsafe { libc::kill(pid, 0) };
            let gone = io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH);
            if result != 0 && gone {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

/// An error of writing; a full disk has its own.
fn failed(path: &Path, bytes: usize, error: io::Error) -> ModelError {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            ModelError::NoSpace { path: path.to_path_buf(), needed: bytes as u64, free: None }
        }
        _ => ModelError::io(path, "write")(error),
    }
}

/// Bytes that this process may still write there, if the file system says.
fn free_bytes(dir: &Path) -> Option<u64> {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(dir.as_os_str().as_bytes()).ok()?;
    let mut stat = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: `path` is a C string and `stat` is written before it is read.
    let stat = unsafe {
        if libc::statvfs(path.as_ptr(), stat.as_mut_ptr()) != 0 {
            return None;
        }
        stat.assume_init()
    };
    // Some network file systems report a size of nothing.
    (stat.f_blocks > 0).then(|| stat.f_bavail.saturating_mul(stat.f_frsize))
}

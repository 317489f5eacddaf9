//! Checkpoints: everything a run needs to go on as if it had never stopped.
//!
//! ```text
//! OUT/checkpoint-00000120/model.safetensors, config.json   the weights, as any tool reads them
//!                         (adapter_model.safetensors, adapter_config.json: adapters alone)
//!                         optimizer.safetensors            moments and halves of masters, bit for bit
//!                         trainer.json                     step, place in the data, best so far
//! ```
//! A checkpoint is written under another name, flushed, and renamed: at any
//! moment the newest folder of that form is complete.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use plimsoll_arch::DType;
use plimsoll_model::{
    Adapter, Checkpoint, FilePlace, ModelError, SafetensorsWriter, first_non_finite,
    first_non_finite_bf16, load_adapter, load_weights, save_parts,
};
use plimsoll_plan::DeviceError;
use plimsoll_program::{Class, Shard, Tensor, TensorId, WeightPart, weight_parts};
use serde::{Deserialize, Serialize};
use serde_json::{Map, json};

use crate::{EarlyStop, Session};

const OPTIMIZER: &str = "optimizer.safetensors";
const TRAINER: &str = "trainer.json";

/// Name and contents of a file that is laid beside a model: the tokenizer's.
pub type ExtraFile = (String, Vec<u8>);

/// What goes with every model that is written.
#[derive(Clone, Debug, Default)]
pub struct ModelFiles {
    /// What adapters were trained on, as a tool would find it: a path or a name.
    pub base: String,
    /// Laid beside the weights.
    pub extra: Vec<ExtraFile>,
}

/// Where a run stands, beside its tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// Optimizer steps done.
    pub step: u64,
    /// Micro-batches taken from the data, from the first epoch on.
    pub batches: u64,
    pub trained_tokens: u64,
    /// Of the last step, and of the last evaluation.
    pub loss: Option<f32>,
    pub validation_loss: Option<f64>,
    pub early_stop: EarlyStop,
    /// The options that decide the numbers; a resumed run must have the same.
    pub fingerprint: serde_json::Value,
}

/// Why a checkpoint was not written or read.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("cannot {action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("tensor `{tensor}` is no longer finite at element {index}: it is not written")]
    NotFinite { tensor: String, index: usize },
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("{} is damaged: {reason}; remove {} to go on from the one before it", path.display(), folder.display())]
    Damaged { path: PathBuf, folder: PathBuf, reason: String },
    #[error(
        "the run in {} was started with other settings ({key}: {was}, now {now}): give the same ones, or another --out",
        path.display()
    )]
    OtherRun { path: PathBuf, key: String, was: String, now: String },
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_path_buf();
    move |source| CheckpointError::Io { action, path, source }
}

fn folder_name(step: u64) -> String {
    format!("checkpoint-{step:08}")
}

/// Complete checkpoints of a run, oldest first.
///
/// # Errors
/// The folder cannot be listed; one that does not exist has none.
pub fn checkpoints(out: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let entries = match fs::read_dir(out) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(io_error("list", out)(e)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(io_error("list", out))?.path();
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        let digits = name.strip_prefix("checkpoint-").unwrap_or_default();
        let numbered = digits.len() == 8 && digits.bytes().all(|b| b.is_ascii_digit());
        if numbered && path.join(TRAINER).exists() {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Removes what a killed run left half written in its folder, and gives back
/// its name to a folder that was about to be replaced.
///
/// # Errors
/// The folder cannot be listed, or something in it not removed.
pub(crate) fn remove_abandoned(out: &Path) -> Result<(), CheckpointError> {
    let entries = match fs::read_dir(out) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(io_error("list", out)(e)),
    };
    for entry in entries {
        let path = entry.map_err(io_error("list", out))?.path();
        let stem = path.file_stem().and_then(|n| n.to_str()).unwrap_or_default();
        let kind = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
        let ours = stem == "best" || stem.starts_with("checkpoint-");
        if !ours || !["partial", "old"].contains(&kind) {
            continue;
        }
        let replaced = path.with_extension("");
        if stem == "best" && kind == "old" && !replaced.exists() {
            fs::rename(&path, &replaced).map_err(io_error("rename", &path))?;
        } else {
            fs::remove_dir_all(&path).map_err(io_error("remove", &path))?;
        }
    }
    Ok(())
}

impl Session<'_> {
    /// Writes a checkpoint and, once it is safe, removes all but the newest `keep`.
    ///
    /// # Errors
    /// The disk refuses; the checkpoints that were there are untouched.
    pub fn save_checkpoint(
        &mut self,
        out: &Path,
        state: &TrainerState,
        files: &ModelFiles,
        keep: usize,
    ) -> Result<PathBuf, CheckpointError> {
        let path = out.join(folder_name(state.step));
        self.replace_folder(&path, |session, folder| {
            session.save_model(folder, files)?;
            session.save_optimizer(&folder.join(OPTIMIZER))?;
            if !session.leads() {
                return Ok(());
            }
            let text = serde_json::to_string_pretty(state)
                .map_err(|e| io_error("write", folder)(e.into()))?;
            write_and_flush(&folder.join(TRAINER), text.as_bytes())
        })?;
        if !self.leads() {
            return Ok(path);
        }
        let all = checkpoints(out)?;
        for old in &all[..all.len().saturating_sub(keep.max(1))] {
            // Renamed first: a folder half removed must not look like a checkpoint.
            let gone = old.with_extension("old");
            fs::rename(old, &gone).map_err(io_error("rename", old))?;
            fs::remove_dir_all(&gone).map_err(io_error("remove", &gone))?;
        }
        Ok(path)
    }

    /// Fills a folder under another name, then swaps it in for `path`. All ranks fill
    /// it together; they must see the same file system.
    ///
    /// # Errors
    /// Whatever `fill` reports, or the disk refuses.
    pub fn replace_folder(
        &mut self,
        path: &Path,
        fill: impl FnOnce(&mut Self, &Path) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let (partial, old) = (path.with_extension("partial"), path.with_extension("old"));
        if !self.leads() {
            self.barrier()?;
            fill(self, &partial)?;
            self.barrier()?;
            return Ok(self.barrier()?);
        }
        for left in [&partial, &old] {
            if left.exists() {
                fs::remove_dir_all(left).map_err(io_error("remove", left))?;
            }
        }
        fs::create_dir_all(&partial).map_err(io_error("create", &partial))?;
        let filled = self.barrier().map_err(CheckpointError::from).and_then(|()| {
            fill(self, &partial)?;
            self.barrier()?;
            flush_folder(&partial)
        });
        if let Err(error) = filled {
            // On a full disk its space is needed; the error counts, not this one.
            let _ = fs::remove_dir_all(&partial);
            return Err(error);
        }
        if path.exists() {
            fs::rename(path, &old).map_err(io_error("rename", path))?;
        }
        fs::rename(&partial, path).map_err(io_error("rename", &partial))?;
        if let Some(parent) = path.parent() {
            flush_folder(parent)?;
        }
        if old.exists() {
            fs::remove_dir_all(&old).map_err(io_error("remove", &old))?;
        }
        // Nobody goes on, and perhaps ends, before the checkpoint is there.
        Ok(self.barrier()?)
    }

    /// What is trained, as tensors of a checkpoint: adapters, or all weights.
    fn trained_parts(&self) -> Vec<WeightPart> {
        let plan = self.plan;
        let lora = plan.recipe.lora.as_ref();
        lora.map_or_else(|| weight_parts(&plan.arch), |lora| lora.parts(&plan.arch))
    }

    /// Writes what was trained: the weights as a model directory (safetensors and
    /// config.json), or adapters as PEFT has them; and the extra files.
    ///
    /// # Errors
    /// A weight is not finite, or the disk refuses.
    pub fn save_model(&mut self, folder: &Path, files: &ModelFiles) -> Result<(), CheckpointError> {
        self.check_finite()?;
        if !self.leads() {
            return self.fill_files(Vec::new());
        }
        for (name, bytes) in &files.extra {
            write_and_flush(&folder.join(name), bytes)?;
        }
        let (plan, parts) = (self.plan, self.trained_parts());
        let (arch, precision) = (&plan.arch, plan.recipe.precision);
        let mut writer = match &plan.recipe.lora {
            Some(lora) => {
                let base = (files.base.as_str(), plan.recipe.quant);
                SafetensorsWriter::adapter(folder, lora, base, arch, precision)?
            }
            None => {
                let tensors: Vec<(String, Vec<usize>)> =
                    parts.iter().map(|p| (p.source.clone(), p.shape.clone())).collect();
                SafetensorsWriter::create(folder, arch, precision, &tensors)?
            }
        };
        if self.ranks() > 1 {
            let places = writer.open_to_all()?;
            self.fill_files(places)?;
            return Ok(writer.finish()?);
        }
        let (program, layout) = (&plan.train, &plan.train_layout);
        save_parts(self.device, program, layout, &parts, |name, dtype, _, bytes| match dtype {
            DType::Bf16 => writer.write_bf16(name, bytemuck::cast_slice(bytes)),
            _ => writer.write_f32(name, bytemuck::cast_slice(bytes)),
        })?;
        Ok(writer.finish()?)
    }

    /// Every rank writes the elements that it answers for to the files that rank 0 has
    /// made. Afterwards all of them are on the disk.
    fn fill_files(&mut self, places: Vec<FilePlace>) -> Result<(), CheckpointError> {
        let text = serde_json::to_vec(&places).unwrap_or_default();
        let text = self.leaders_bytes(text)?;
        let places: Vec<FilePlace> = serde_json::from_slice(&text)
            .map_err(|e| io_error("read", Path::new("rank 0"))(e.into()))?;
        let by_name: HashMap<&str, &FilePlace> =
            places.iter().map(|p| (p.name.as_str(), p)).collect();
        let mut files: HashMap<&Path, File> = HashMap::new();
        let (plan, parts) = (self.plan, self.trained_parts());
        let (program, layout) = (&plan.train, &plan.train_layout);
        save_parts(self.device, program, layout, &parts, |name, dtype, elements, bytes| {
            let place = by_name[name];
            let file = match files.entry(&place.path) {
                Entry::Occupied(file) => file.into_mut(),
                Entry::Vacant(vacant) => vacant.insert(open_to_write(&place.path)?),
            };
            let at = place.offset + (elements.start * dtype.bytes()) as u64;
            file.write_all_at(bytes, at).map_err(ModelError::io(&place.path, "write"))
        })?;
        for (path, file) in files {
            file.sync_all().map_err(io_error("flush", path))?;
        }
        Ok(self.barrier()?)
    }

    /// A model with a NaN must not take the place of one without.
    fn check_finite(&mut self) -> Result<(), CheckpointError> {
        let mut found = None;
        let (program, layout) = (&self.plan.train, &self.plan.train_layout);
        let parts = self.trained_parts();
        save_parts(self.device, program, layout, &parts, |name, dtype, elements, bytes| {
            let index = match dtype {
                DType::Bf16 => first_non_finite_bf16(bytemuck::cast_slice(bytes)),
                _ => first_non_finite(bytemuck::cast_slice(bytes)),
            };
            let index = index.map(|index| (name.to_owned(), elements.start + index));
            found = found.take().or(index);
            Ok(())
        })?;
        match found {
            None => Ok(()),
            Some((tensor, index)) => Err(CheckpointError::NotFinite { tensor, index }),
        }
    }

    /// Optimizer state in the order of the program.
    fn optimizer_tensors(&self) -> Vec<TensorId> {
        let tensors = self.plan.train.tensors.iter().enumerate();
        tensors
            .filter(|(_, t)| t.class == Class::OptimizerState)
            .map(|(index, _)| TensorId::new(index))
            .collect()
    }

    /// The safetensors header of the optimizer's state, its length before it.
    fn optimizer_header(&self) -> Vec<u8> {
        let mut entries = Map::new();
        let mut end = 0;
        for id in self.optimizer_tensors() {
            let t = self.plan.train.tensor(id);
            let dtype = match t.dtype {
                DType::Bf16 => "BF16",
                DType::U8 => "U8",
                DType::I16 => "I16",
                DType::F32 | DType::I32 => "F32",
            };
            let offsets = [end, end + whole_bytes(t)];
            end = offsets[1];
            let entry = json!({"dtype": dtype, "shape": t.shape, "data_offsets": offsets});
            entries.insert(t.name.clone(), entry);
        }
        let mut text = serde_json::Value::Object(entries).to_string().into_bytes();
        text.resize(text.len().next_multiple_of(8), b' ');
        let mut header = (text.len() as u64).to_le_bytes().to_vec();
        header.append(&mut text);
        header
    }

    fn save_optimizer(&mut self, path: &Path) -> Result<(), CheckpointError> {
        let header = self.optimizer_header();
        if self.leads() {
            let file = File::create(path).map_err(io_error("create", path))?;
            file.write_all_at(&header, 0).map_err(io_error("write", path))?;
        }
        self.barrier()?;
        let file = open_to_write(path)?;
        let (plan, rank) = (self.plan, self.rank());
        let mut at = header.len() as u64;
        for id in self.optimizer_tensors() {
            let t = plan.train.tensor(id);
            // What all ranks have alike is written by the first.
            let own = if t.shard == Shard::Whole && rank > 0 { 0..0 } else { t.part(rank) };
            let first = at + (own.start * t.dtype.bytes()) as u64;
            at += whole_bytes(t);
            if own.is_empty() {
                continue;
            }
            let (offset, bytes) = (plan.train_layout.offset(id), own.len() * t.dtype.bytes());
            self.device.download(t.home, offset, bytes, &mut |data| {
                file.write_all_at(data, first)
                    .map_err(|e| DeviceError::Source(Box::new(io_error("write", path)(e))))
            })?;
        }
        file.sync_all().map_err(io_error("flush", path))?;
        Ok(self.barrier()?)
    }

    /// Fills the slab from a checkpoint and says where the run stood. Weights that
    /// are frozen are not in a checkpoint and must be there already.
    ///
    /// # Errors
    /// A file is damaged, or belongs to a run with other settings.
    pub fn load_checkpoint(
        &mut self,
        folder: &Path,
        fingerprint: &serde_json::Value,
    ) -> Result<TrainerState, CheckpointError> {
        let path = folder.join(TRAINER);
        let damaged = |path: &Path, reason: String| CheckpointError::Damaged {
            path: path.to_path_buf(),
            folder: folder.to_path_buf(),
            reason,
        };
        let text = fs::read_to_string(&path).map_err(io_error("read", &path))?;
        let state: TrainerState =
            serde_json::from_str(&text).map_err(|e| damaged(&path, e.to_string()))?;
        if let Some((key, was, now)) = first_difference(&state.fingerprint, fingerprint) {
            return Err(CheckpointError::OtherRun { path: folder.to_path_buf(), key, was, now });
        }
        let plan = self.plan;
        let (program, layout) = (&plan.train, &plan.train_layout);
        if let Some(lora) = &plan.recipe.lora {
            let adapter = Adapter::open(folder, &plan.arch)?;
            if adapter.lora() != lora {
                let reason = "its adapters are not those of this run".to_owned();
                return Err(damaged(folder, reason));
            }
            load_adapter(self.device, program, layout, &plan.arch, &adapter)?;
        } else {
            let checkpoint = Checkpoint::open(folder)?;
            checkpoint.validate()?;
            load_weights(self.device, program, layout, &plan.arch, &checkpoint)?;
        }

        let path = folder.join(OPTIMIZER);
        let file = File::open(&path).map_err(io_error("open", &path))?;
        let expected = self.optimizer_header();
        let mut header = vec![0; expected.len()];
        let read = file.read_exact_at(&mut header, 0);
        if read.is_err() || header != expected {
            let reason = "its header is not that of this model and optimizer".to_owned();
            return Err(damaged(&path, reason));
        }
        let mut at = expected.len() as u64;
        for id in self.optimizer_tensors() {
            let t = program.tensor(id);
            let held = t.held(self.device.rank());
            let first = at + (held.start * t.dtype.bytes()) as u64;
            at += whole_bytes(t);
            if held.is_empty() {
                continue;
            }
            let bytes = held.len() * t.dtype.bytes();
            self.device.upload_pieces(t.home, layout.offset(id), bytes, &mut |at, out| {
                file.read_exact_at(out, first + at as u64).map_err(|e| {
                    let reason = format!("it ends inside `{}` ({e})", t.name);
                    DeviceError::Source(Box::new(damaged(&path, reason)))
                })
            })?;
        }
        Ok(state)
    }
}

/// Bytes of a tensor, the parts of all ranks together.
fn whole_bytes(tensor: &Tensor) -> u64 {
    (tensor.elements() * tensor.dtype.bytes()) as u64
}

fn open_to_write(path: &Path) -> Result<File, ModelError> {
    OpenOptions::new().write(true).open(path).map_err(ModelError::io(path, "open"))
}

/// The first key whose value differs between two settings.
fn first_difference(
    was: &serde_json::Value,
    now: &serde_json::Value,
) -> Option<(String, String, String)> {
    let empty = Map::new();
    let (a, b) = (was.as_object().unwrap_or(&empty), now.as_object().unwrap_or(&empty));
    let keys = a.keys().chain(b.keys());
    let differing = keys.into_iter().find(|k| a.get(*k) != b.get(*k))?;
    let show = |m: &Map<String, serde_json::Value>| {
        m.get(differing).map_or("absent".to_owned(), |v| v.to_string())
    };
    Some((differing.clone(), show(a), show(b)))
}

fn write_and_flush(path: &Path, data: &[u8]) -> Result<(), CheckpointError> {
    let mut file = File::create(path).map_err(io_error("create", path))?;
    file.write_all(data).map_err(io_error("write", path))?;
    file.sync_all().map_err(io_error("flush", path))
}

/// Makes the names in a folder durable.
fn flush_folder(path: &Path) -> Result<(), CheckpointError> {
    File::open(path).and_then(|d| d.sync_all()).map_err(io_error("flush", path))
}

//! What a device is and how fast: the file that `plimsoll calibrate` writes and
//! that every plan's seconds come from.
//!
//! Times are microseconds of one op inside of a captured step, from the end of
//! the op before it to its own end, at the clocks of a long run.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use plimsoll_arch::DType;
use serde::{Deserialize, Serialize};

use crate::interpolate::{interpolate, make_monotone};
use crate::{Host, Peers, TokenTimes};

/// The version of the file's layout.
pub const PROFILE_FORMAT: u32 = 1;

/// Which programs a device runs, and with whose kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    Cpu,
    Cuda,
}

/// A device, measured or guessed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceProfile {
    /// [`PROFILE_FORMAT`].
    pub format: u32,
    pub kind: DeviceKind,
    /// A name of the catalogue, or what the driver calls it.
    pub name: String,
    /// Threads that the CPU device was measured with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Version of the driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Where the figures come from, in words.
    pub source: String,
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// What context, modules and libraries take outside the slab.
    pub overhead_bytes: u64,
    /// Bytes read plus written a second, by the best streaming op.
    pub copy_bytes_per_second: f64,
    /// From page-locked host memory to the device, bytes a second.
    pub to_device_bytes_per_second: f64,
    /// The other way.
    pub to_host_bytes_per_second: f64,
    /// An op that does nothing.
    pub launch_us: f64,
    /// What a step costs besides its ops: starting it and reading its loss.
    pub step_us: f64,
    pub products: PerType<Products>,
    pub attention: PerType<Vec<Attention>>,
    pub streams: PerType<BTreeMap<String, Stream>>,
    /// Token steps; profiles of before have none, and plan them as training.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<TokenTimes>,
    /// The devices that train one model with this one; none where it is alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peers: Option<Peers>,
    /// The machine that it hangs on; none is one that bounds nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<Host>,
    /// A training step that was timed when everything else was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub check: Option<Check>,
}

/// One for each type of weights.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PerType<T> {
    pub bf16: T,
    pub f32: T,
}

impl<T> PerType<T> {
    /// That of a type; opaque types count as float32.
    pub fn of(&self, dtype: DType) -> &T {
        match dtype {
            DType::Bf16 => &self.bf16,
            _ => &self.f32,
        }
    }

    /// To write to.
    pub fn of_mut(&mut self, dtype: DType) -> &mut T {
        match dtype {
            DType::Bf16 => &mut self.bf16,
            _ => &mut self.f32,
        }
    }
}

/// Times of matrix products over a grid: the shorter and the longer side of the
/// result, and the dimension that is summed over. `table[(s L + l) K + k]`.
///
/// A product and its transpose are one point: libraries treat them alike.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Products {
    pub short: Vec<f64>,
    pub long: Vec<f64>,
    pub inner: Vec<f64>,
    /// y = x w^T
    pub forward_us: Vec<f64>,
    /// d_x = d_y w
    pub backward_input_us: Vec<f64>,
    /// d_w = d_y^T x
    pub backward_weight_us: Vec<f64>,
}

/// Which operands of a product are stored transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Orientation {
    Forward,
    BackwardInput,
    BackwardWeight,
}

impl Orientation {
    pub const ALL: [Orientation; 3] =
        [Orientation::Forward, Orientation::BackwardInput, Orientation::BackwardWeight];
}

impl Products {
    fn table(&self, orientation: Orientation) -> &[f64] {
        match orientation {
            Orientation::Forward => &self.forward_us,
            Orientation::BackwardInput => &self.backward_input_us,
            Orientation::BackwardWeight => &self.backward_weight_us,
        }
    }

    /// The table of an orientation, to write to.
    pub fn table_mut(&mut self, orientation: Orientation) -> &mut Vec<f64> {
        match orientation {
            Orientation::Forward => &mut self.forward_us,
            Orientation::BackwardInput => &mut self.backward_input_us,
            Orientation::BackwardWeight => &mut self.backward_weight_us,
        }
    }

    /// Seconds of a product with a (rows, cols) result summed over `inner`.
    pub fn seconds(&self, orientation: Orientation, rows: usize, cols: usize, inner: usize) -> f64 {
        let axes: [&[f64]; 3] = [&self.short, &self.long, &self.inner];
        let sizes = [rows.min(cols), rows.max(cols), inner].map(|n| n as f64);
        1e-6 * interpolate(axes, self.table(orientation), sizes)
    }

    /// The best rate of any point, FLOP/s.
    pub fn best_rate(&self) -> f64 {
        let mut best = 0.0f64;
        for (s, short) in self.short.iter().enumerate() {
            for (l, long) in self.long.iter().enumerate() {
                for (k, inner) in self.inner.iter().enumerate() {
                    let at = (s * self.long.len() + l) * self.inner.len() + k;
                    best = best.max(2e6 * short * long * inner / self.forward_us[at]);
                }
            }
        }
        best
    }
}

/// Times of causal attention with one head size over sequence lengths and
/// heads (B H: those of all rows together). `table[t H + h]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attention {
    pub head_dim: usize,
    /// Its kernels take every size, not this one alone.
    pub any_size: bool,
    pub seqs: Vec<f64>,
    pub heads: Vec<f64>,
    pub forward_us: Vec<f64>,
    pub backward_us: Vec<f64>,
}

impl Attention {
    /// Seconds of one causal attention with this head size. Beyond the longest
    /// sequence that was timed it grows with the square, as the pairs do.
    pub fn seconds(&self, backward: bool, seq: f64, heads: f64) -> f64 {
        let table = if backward { &self.backward_us } else { &self.forward_us };
        let longest = self.seqs.last().copied().unwrap_or(seq);
        let beyond = (seq / longest).max(1.0);
        let within = interpolate([&self.seqs, &self.heads], table, [seq.min(longest), heads]);
        1e-6 * within * beyond * beyond
    }
}

/// Times of an op that memory bounds, over the bytes that it moves (each operand
/// once, as in `Program::work`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stream {
    pub bytes: Vec<f64>,
    pub us: Vec<f64>,
}

impl Stream {
    pub fn seconds(&self, bytes: f64) -> f64 {
        1e-6 * interpolate([&self.bytes], &self.us, [bytes])
    }

    /// Bytes a second at the largest size.
    pub fn rate(&self) -> f64 {
        match (self.bytes.last(), self.us.last()) {
            (Some(bytes), Some(us)) => 1e6 * bytes / us,
            _ => 0.0,
        }
    }
}

/// One training step of a preset, timed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Check {
    pub model: String,
    pub precision: DType,
    pub batch: usize,
    pub seq: usize,
    pub seconds: f64,
}

/// Why a profile cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    #[error("cannot read the profile {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("cannot write the profile {}: {source}", path.display())]
    Write { path: PathBuf, source: std::io::Error },
    #[error(
        "{}: not a profile ({source}); write one with `plimsoll calibrate --out FILE`",
        path.display()
    )]
    Json { path: PathBuf, source: serde_json::Error },
    #[error(
        "{}: profile format {found}, this version reads {PROFILE_FORMAT}; run `plimsoll calibrate` again",
        path.display()
    )]
    Format { path: PathBuf, found: u64 },
    #[error("{}: {field} {what}; run `plimsoll calibrate` again", path.display())]
    Field { path: PathBuf, field: String, what: String },
}

/// What page-locked host memory costs on the device: page tables of the mapping, in
/// thousandths of its bytes, and the streams and events of the copy lanes. Measured on an
/// H200 (driver 580): 15 MB beside 1.2 GB, 113 to 116 beside 30 GB, 151 beside 46 GB.
const MAPPED_PER_MILLE: u64 = 3;
const COPY_LANES_BYTES: u64 = 12_000_000;

impl DeviceProfile {
    /// What the driver takes outside of the slab where so much host memory is page-locked.
    pub fn overhead_beside(&self, host_bytes: u64) -> u64 {
        if self.kind == DeviceKind::Cpu || host_bytes == 0 {
            return self.overhead_bytes;
        }
        self.overhead_bytes + COPY_LANES_BYTES + host_bytes / 1000 * MAPPED_PER_MILLE
    }

    /// What slabs of so many bytes take of the device's memory, with the driver's share. On
    /// the CPU both slabs are in one memory.
    pub fn needed_bytes(&self, slab_bytes: u64, host_bytes: u64) -> u64 {
        let beside = if self.kind == DeviceKind::Cpu { host_bytes } else { 0 };
        slab_bytes + self.overhead_beside(host_bytes) + beside
    }

    /// Reads a profile.
    ///
    /// # Errors
    /// The file cannot be read, is no profile, or has a figure that nothing can be
    /// computed with.
    pub fn read(path: &Path) -> Result<DeviceProfile, ProfileError> {
        let named = || path.to_owned();
        let text = fs::read_to_string(path)
            .map_err(|source| ProfileError::Read { path: named(), source })?;
        DeviceProfile::parse(&text, path)
    }

    /// A profile from its text; `path` is for messages.
    ///
    /// # Errors
    /// As [`DeviceProfile::read`].
    pub fn parse(text: &str, path: &Path) -> Result<DeviceProfile, ProfileError> {
        let json = |source| ProfileError::Json { path: path.to_owned(), source };
        // The format is looked at first: other fields may be others there.
        let value: serde_json::Value = serde_json::from_str(text).map_err(json)?;
        if let Some(found) = value.get("format").and_then(serde_json::Value::as_u64)
            && found != u64::from(PROFILE_FORMAT)
        {
            return Err(ProfileError::Format { path: path.to_owned(), found });
        }
        let profile: DeviceProfile = serde_json::from_value(value).map_err(json)?;
        profile.settled().map_err(|(field, what)| ProfileError::Field {
            path: path.to_owned(),
            field,
            what,
        })
    }

    /// Writes the profile, whole or not at all, and its folder.
    ///
    /// # Errors
    /// The file system's own.
    pub fn write(&self, path: &Path) -> Result<(), ProfileError> {
        let error = |source| ProfileError::Write { path: path.to_owned(), source };
        let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
        let written = path
            .parent()
            .map_or(Ok(()), fs::create_dir_all)
            .and_then(|()| fs::write(&temporary, self.to_json()))
            .and_then(|()| fs::rename(&temporary, path));
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written.map_err(error)
    }

    /// The text of the file: one line a table.
    pub fn to_json(&self) -> String {
        let value = serde_json::to_value(self).unwrap_or_default();
        let mut text = String::new();
        write_value(&mut text, &value, 0);
        text.push('\n');
        text
    }

    /// Checked, and with tables that never fall.
    ///
    /// # Errors
    /// The field that is wrong, and what is wrong with it.
    pub fn settled(mut self) -> Result<DeviceProfile, (String, String)> {
        let numbers = [
            ("memory_bytes", self.memory_bytes as f64),
            ("copy_bytes_per_second", self.copy_bytes_per_second),
            ("to_device_bytes_per_second", self.to_device_bytes_per_second),
            ("to_host_bytes_per_second", self.to_host_bytes_per_second),
            ("launch_us", self.launch_us),
        ];
        for (field, number) in numbers {
            positive(field, &[number])?;
        }
        if let Some(host) = &self.host {
            positive("host", &[host.cores, host.bytes_per_second])?;
        }
        if !(self.step_us.is_finite() && self.step_us >= 0.0) {
            return Err(("step_us".into(), format!("is {}, not a time", self.step_us)));
        }
        for dtype in [DType::Bf16, DType::F32] {
            let products = self.products.of_mut(dtype);
            let lengths = [
                axis(&format!("products.{dtype}.short"), &products.short)?,
                axis(&format!("products.{dtype}.long"), &products.long)?,
                axis(&format!("products.{dtype}.inner"), &products.inner)?,
            ];
            let tables = [
                ("forward_us", &mut products.forward_us),
                ("backward_input_us", &mut products.backward_input_us),
                ("backward_weight_us", &mut products.backward_weight_us),
            ];
            for (field, values) in tables {
                table(&format!("products.{dtype}.{field}"), &lengths, values)?;
            }
            let entries = self.attention.of_mut(dtype);
            if entries.is_empty() {
                return Err((format!("attention.{dtype}"), "has no head size".into()));
            }
            for entry in entries {
                let name = format!("attention.{dtype} of head size {}", entry.head_dim);
                if entry.head_dim == 0 {
                    return Err((name, "makes no sense".into()));
                }
                let lengths = [
                    axis(&format!("{name}: seqs"), &entry.seqs)?,
                    axis(&format!("{name}: heads"), &entry.heads)?,
                ];
                table(&format!("{name}: forward_us"), &lengths, &mut entry.forward_us)?;
                table(&format!("{name}: backward_us"), &lengths, &mut entry.backward_us)?;
            }
            for (family, stream) in self.streams.of_mut(dtype) {
                let name = format!("streams.{dtype}.{family}");
                let lengths = [axis(&format!("{name}.bytes"), &stream.bytes)?];
                table(&format!("{name}.us"), &lengths, &mut stream.us)?;
            }
        }
        for (form, products) in self.token.iter_mut().flat_map(TokenTimes::all_mut) {
            let name = format!("token.{form}");
            let lengths = [
                axis(&format!("{name}.rows"), &products.rows)?,
                axis(&format!("{name}.bytes"), &products.bytes)?,
            ];
            table(&format!("{name}.us"), &lengths, &mut products.us)?;
        }
        Ok(self)
    }
}

type Fault = (String, String);

fn positive(field: &str, numbers: &[f64]) -> Result<(), Fault> {
    match numbers.iter().find(|n| !(n.is_finite() && **n > 0.0)) {
        Some(n) => Err((field.to_owned(), format!("holds {n}, which is not above 0"))),
        None => Ok(()),
    }
}

/// Length of an axis of a table.
fn axis(field: &str, points: &[f64]) -> Result<usize, Fault> {
    positive(field, points)?;
    if points.is_empty() {
        return Err((field.to_owned(), "is empty".into()));
    }
    if let Some(pair) = points.windows(2).find(|pair| pair[0] >= pair[1]) {
        return Err((field.to_owned(), format!("does not ascend: {} before {}", pair[0], pair[1])));
    }
    Ok(points.len())
}

fn table(field: &str, lengths: &[usize], values: &mut [f64]) -> Result<(), Fault> {
    positive(field, values)?;
    let expected: usize = lengths.iter().product();
    if values.len() != expected {
        let what = format!("has {} values, its axes have {expected} points", values.len());
        return Err((field.to_owned(), what));
    }
    make_monotone(lengths, values);
    Ok(())
}

/// Indented JSON in which an array of numbers is one line.
fn write_value(text: &mut String, value: &serde_json::Value, depth: usize) {
    use serde_json::Value;
    let indent = |text: &mut String, depth: usize| {
        text.push('\n');
        text.push_str(&" ".repeat(2 * depth));
    };
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            text.push('{');
            for (i, (name, field)) in fields.iter().enumerate() {
                text.push_str(if i > 0 { "," } else { "" });
                indent(text, depth + 1);
                text.push_str(&format!("{}: ", Value::from(name.as_str())));
                write_value(text, field, depth + 1);
            }
            indent(text, depth);
            text.push('}');
        }
        Value::Array(items) if items.iter().any(Value::is_object) => {
            text.push('[');
            for (i, item) in items.iter().enumerate() {
                text.push_str(if i > 0 { "," } else { "" });
                indent(text, depth + 1);
                write_value(text, item, depth + 1);
            }
            indent(text, depth);
            text.push(']');
        }
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(Value::to_string).collect();
            text.push_str(&format!("[{}]", items.join(", ")));
        }
        other => text.push_str(&other.to_string()),
    }
}

//! The header of a GGUF file (versions 2 and 3, little-endian): typed
//! metadata and the table of tensors.
//!
//! Format: `docs/gguf.md` of ggml. Lists stay in the mapped file and are
//! decoded when asked for, so that opening a file allocates little.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use crate::ModelError;
use crate::format::Format;
use crate::map::MappedFile;
use crate::safetensors::RawTensor;

const MAX_KEYS: u64 = 1 << 16;
const MAX_TENSORS: u64 = 1 << 18;
const MAX_RANK: u32 = 4;
/// Lists of lists are allowed; nobody writes them deeper than this.
const MAX_DEPTH: usize = 4;

/// Numbers of the value types.
const UINT8: u32 = 0;
const INT8: u32 = 1;
const UINT16: u32 = 2;
const INT16: u32 = 3;
const UINT32: u32 = 4;
const INT32: u32 = 5;
const FLOAT32: u32 = 6;
const BOOL: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;
const UINT64: u32 = 10;
const INT64: u32 = 11;
const FLOAT64: u32 = 12;

/// Bytes of a value of fixed size.
fn width(kind: u32) -> Option<usize> {
    match kind {
        UINT8 | INT8 | BOOL => Some(1),
        UINT16 | INT16 => Some(2),
        UINT32 | INT32 | FLOAT32 => Some(4),
        UINT64 | INT64 | FLOAT64 => Some(8),
        _ => None,
    }
}

fn kind_name(kind: u32) -> &'static str {
    match kind {
        UINT8 => "uint8",
        INT8 => "int8",
        UINT16 => "uint16",
        INT16 => "int16",
        UINT32 => "uint32",
        INT32 => "int32",
        FLOAT32 => "float32",
        BOOL => "bool",
        STRING => "string",
        ARRAY => "array",
        UINT64 => "uint64",
        INT64 => "int64",
        FLOAT64 => "float64",
        _ => "unknown",
    }
}

/// Where a value lies in the file.
struct Field {
    key: Range<usize>,
    /// Of the value, or of the elements of a list.
    kind: u32,
    /// `None` for a single value.
    count: Option<usize>,
    /// The value without the length of a string or the head of a list.
    range: Range<usize>,
}

/// The typed keys and values of a GGUF file.
///
/// A getter returns `None` for an absent key and an error for a key of another
/// type, so that a damaged file is not taken for one without the key.
pub struct GgufMetadata {
    file: Arc<MappedFile>,
    fields: Vec<Field>,
}

impl GgufMetadata {
    /// All keys, in the order of the file.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        // Checked when the header was read.
        self.fields.iter().map(|f| self.text_at(f.key.clone()).unwrap_or_default())
    }

    pub fn contains(&self, key: &str) -> bool {
        self.field(key).is_some()
    }

    /// A string, such as `tokenizer.chat_template`.
    ///
    /// # Errors
    /// The value has another type or is not UTF-8.
    pub fn string(&self, key: &str) -> Result<Option<&str>, ModelError> {
        let Some(field) = self.single(key, "a string")? else { return Ok(None) };
        if field.kind != STRING {
            return Err(self.wrong_type(key, field, "a string"));
        }
        match self.text_at(field.range.clone()) {
            Some(text) => Ok(Some(text)),
            None => Err(self.error(key, "the string is not UTF-8".into())),
        }
    }

    /// An integer of any width that is not negative.
    ///
    /// # Errors
    /// The value has another type or is negative.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>, ModelError> {
        const ALLOWED: &str = "an integer of at least 0";
        let Some(field) = self.single(key, ALLOWED)? else { return Ok(None) };
        let value = integer(field.kind, &self.file.bytes()[field.range.clone()]);
        let value = value.ok_or_else(|| self.wrong_type(key, field, ALLOWED))?;
        let negative = |_| self.error(key, format!("{value} is not {ALLOWED}"));
        u64::try_from(value).map(Some).map_err(negative)
    }

    /// A floating-point number. A float32 becomes the shortest decimal that
    /// names it, so that 1e-5 is the 1e-5 of a `config.json`.
    ///
    /// # Errors
    /// The value has another type.
    pub fn float(&self, key: &str) -> Result<Option<f64>, ModelError> {
        const ALLOWED: &str = "a floating-point number";
        let Some(field) = self.single(key, ALLOWED)? else { return Ok(None) };
        let value = float(field.kind, &self.file.bytes()[field.range.clone()]);
        value.map(Some).ok_or_else(|| self.wrong_type(key, field, ALLOWED))
    }

    /// A boolean.
    ///
    /// # Errors
    /// The value has another type.
    pub fn boolean(&self, key: &str) -> Result<Option<bool>, ModelError> {
        let Some(field) = self.single(key, "a bool")? else { return Ok(None) };
        match field.kind {
            BOOL => Ok(Some(self.file.bytes()[field.range.start] != 0)),
            _ => Err(self.wrong_type(key, field, "a bool")),
        }
    }

    /// A list of strings, such as `tokenizer.ggml.tokens`, borrowed from the
    /// file.
    ///
    /// # Errors
    /// The value has another type, or a string is not UTF-8.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&str>>, ModelError> {
        let Some((field, count)) = self.list(key, "a list of strings")? else { return Ok(None) };
        if field.kind != STRING {
            return Err(self.wrong_type(key, field, "a list of strings"));
        }
        let mut cursor = Cursor { bytes: self.file.bytes(), at: field.range.start };
        let mut strings = Vec::with_capacity(count);
        for i in 0..count {
            let range = cursor.string().map_err(|reason| self.error(key, reason))?;
            let text = self.text_at(range);
            let wrong = || self.error(key, format!("string {i} of the list is not UTF-8"));
            strings.push(text.ok_or_else(wrong)?);
        }
        Ok(Some(strings))
    }

    /// A list of integers of any width, such as `tokenizer.ggml.token_type`.
    ///
    /// # Errors
    /// The value has another type, or a number is above 2^63 - 1.
    pub fn integers(&self, key: &str) -> Result<Option<Vec<i64>>, ModelError> {
        let read = |kind, bytes: &[u8]| i64::try_from(integer(kind, bytes)?).ok();
        self.numbers(key, "a list of integers", read)
    }

    /// A list of floats, such as `tokenizer.ggml.scores`.
    ///
    /// # Errors
    /// The value has another type.
    pub fn floats(&self, key: &str) -> Result<Option<Vec<f32>>, ModelError> {
        self.numbers(key, "a list of floats", |kind, bytes| match (kind, bytes) {
            (FLOAT32, &[a, b, c, d]) => Some(f32::from_le_bytes([a, b, c, d])),
            _ => float(kind, bytes).map(|x| x as f32),
        })
    }

    fn numbers<T>(
        &self,
        key: &str,
        allowed: &str,
        read: impl Fn(u32, &[u8]) -> Option<T>,
    ) -> Result<Option<Vec<T>>, ModelError> {
        let Some((field, _)) = self.list(key, allowed)? else { return Ok(None) };
        let wrong = || self.wrong_type(key, field, allowed);
        let size = width(field.kind).ok_or_else(wrong)?;
        let bytes = &self.file.bytes()[field.range.clone()];
        let values = bytes.chunks_exact(size).map(|b| read(field.kind, b).ok_or_else(wrong));
        values.collect::<Result<_, _>>().map(Some)
    }

    fn field(&self, key: &str) -> Option<&Field> {
        let bytes = self.file.bytes();
        self.fields.iter().find(|f| &bytes[f.key.clone()] == key.as_bytes())
    }

    fn single(&self, key: &str, allowed: &str) -> Result<Option<&Field>, ModelError> {
        match self.field(key) {
            Some(field) if field.count.is_some() => Err(self.wrong_type(key, field, allowed)),
            field => Ok(field),
        }
    }

    fn list(&self, key: &str, allowed: &str) -> Result<Option<(&Field, usize)>, ModelError> {
        match self.field(key) {
            Some(field) => match field.count {
                Some(count) => Ok(Some((field, count))),
                None => Err(self.wrong_type(key, field, allowed)),
            },
            None => Ok(None),
        }
    }

    fn text_at(&self, range: Range<usize>) -> Option<&str> {
        std::str::from_utf8(&self.file.bytes()[range]).ok()
    }

    pub(crate) fn error(&self, key: &str, reason: String) -> ModelError {
        ModelError::GgufKey { path: self.file.path.clone(), key: key.to_string(), reason }
    }

    fn wrong_type(&self, key: &str, field: &Field, allowed: &str) -> ModelError {
        let list = if field.count.is_some() { "a list of " } else { "" };
        self.error(key, format!("it is {list}{}, expected {allowed}", kind_name(field.kind)))
    }
}

/// An integer of `kind` from its bytes; `None` for other kinds.
fn integer(kind: u32, bytes: &[u8]) -> Option<i128> {
    let mut low = [0u8; 8];
    let n = width(kind)?;
    low[..n].copy_from_slice(bytes.get(..n)?);
    let unsigned = u64::from_le_bytes(low);
    match kind {
        UINT8 | UINT16 | UINT32 | UINT64 => Some(i128::from(unsigned)),
        INT8 => Some(i128::from(unsigned as i8)),
        INT16 => Some(i128::from(unsigned as i16)),
        INT32 => Some(i128::from(unsigned as i32)),
        INT64 => Some(i128::from(unsigned as i64)),
        _ => None,
    }
}

/// A float of `kind` from its bytes; `None` for other kinds.
fn float(kind: u32, bytes: &[u8]) -> Option<f64> {
    match (kind, bytes) {
        (FLOAT32, &[a, b, c, d]) => {
            let x = f32::from_le_bytes([a, b, c, d]);
            x.to_string().parse().ok()
        }
        (FLOAT64, bytes) => Some(f64::from_le_bytes(bytes.try_into().ok()?)),
        _ => None,
    }
}

/// Reads and checks the header: the metadata, and the tensors with the names
/// that the file gives them and their shapes as (rows, columns).
pub(crate) fn parse(file: Arc<MappedFile>) -> Result<(GgufMetadata, Vec<RawTensor>), ModelError> {
    let path = file.path.clone();
    match header(&file) {
        Ok((fields, tensors)) => Ok((GgufMetadata { file, fields }, tensors)),
        Err(reason) => Err(ModelError::Gguf { path, reason }),
    }
}

fn header(file: &MappedFile) -> Result<(Vec<Field>, Vec<RawTensor>), String> {
    let bytes = file.bytes();
    let mut cursor = Cursor { bytes, at: 0 };
    if cursor.take(4)? != b"GGUF" {
        return Err("it does not begin with `GGUF`".into());
    }
    match cursor.u32()? {
        2 | 3 => {}
        v if matches!(v.swap_bytes(), 1..=3) => {
            return Err("it is big-endian, which is not supported".into());
        }
        v => return Err(format!("version {v} is not supported; supported: 2, 3")),
    }
    let (tensor_count, key_count) = (cursor.u64()?, cursor.u64()?);
    if tensor_count > MAX_TENSORS || key_count > MAX_KEYS {
        return Err(format!(
            "it says that it has {tensor_count} tensors and {key_count} keys; \
             at most {MAX_TENSORS} and {MAX_KEYS} are allowed"
        ));
    }

    let mut fields: Vec<Field> = Vec::new();
    let mut seen = HashSet::new();
    for _ in 0..key_count {
        let key = cursor.string()?;
        let name = cursor.text(&key, "a key")?;
        if !seen.insert(name) {
            return Err(format!("key `{name}` is there twice"));
        }
        fields.push(cursor.field(key).map_err(|reason| format!("key `{name}`: {reason}"))?);
    }
    let alignment = match fields.iter().find(|f| &bytes[f.key.clone()] == b"general.alignment") {
        None => 32,
        Some(f) if f.kind == UINT32 && f.count.is_none() => {
            let n = integer(UINT32, &bytes[f.range.clone()]).unwrap_or(0) as usize;
            if !n.is_power_of_two() || n > 1 << 20 {
                return Err(format!("alignment {n} is not a power of two of at most 2^20"));
            }
            n
        }
        Some(f) => return Err(format!("the alignment is a {}", kind_name(f.kind))),
    };

    let mut tensors = Vec::new();
    let mut seen = HashSet::new();
    for _ in 0..tensor_count {
        let name = cursor.string()?;
        let name = cursor.text(&name, "the name of a tensor")?;
        if !seen.insert(name) {
            return Err(format!("tensor `{name}` is there twice"));
        }
        tensors.push(cursor.tensor(name).map_err(|reason| format!("tensor `{name}`: {reason}"))?);
    }

    // The data begin at the next aligned byte; so does every tensor.
    let align = |n: usize| n.checked_next_multiple_of(alignment).unwrap_or(usize::MAX);
    let start = align(cursor.at);
    for t in &mut tensors {
        let (offset, end) = (t.range.start, t.range.end);
        let place = (start.checked_add(offset), start.checked_add(end));
        match place {
            (Some(from), Some(to)) if to <= bytes.len() && offset.is_multiple_of(alignment) => {
                t.range = from..to;
            }
            (_, Some(to)) if to <= bytes.len() => {
                return Err(format!(
                    "tensor `{}` is at {offset}, not aligned to {alignment}",
                    t.name
                ));
            }
            _ => {
                return Err(format!(
                    "tensor `{}` is at bytes {offset} to {end} of {}; is the file complete?",
                    t.name,
                    bytes.len().saturating_sub(start),
                ));
            }
        }
    }
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|&i| (tensors[i].range.start, tensors[i].range.end));
    let mut end = start.min(bytes.len());
    for &i in &order {
        let t = &tensors[i];
        if t.range.start != align(end) {
            let what = if t.range.start < end { "overlaps" } else { "leaves a gap after" };
            return Err(format!("tensor `{}` {what} the one before it", t.name));
        }
        end = t.range.end;
    }
    if bytes.len() > align(end) {
        return Err(format!("{} bytes follow the last tensor", bytes.len() - align(end)));
    }
    Ok((fields, tensors))
}

/// A place in the bytes of a header; each step checks that they suffice.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], String> {
        let rest = &self.bytes[self.at..];
        match rest.get(..n) {
            Some(taken) => {
                self.at += n;
                Ok(taken)
            }
            None => Err(format!(
                "it ends at byte {}, where {n} more are needed at {}",
                self.bytes.len(),
                self.at
            )),
        }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn u32(&mut self) -> Result<u32, String> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, String> {
        self.array().map(u64::from_le_bytes)
    }

    /// A length in bytes or elements, which on any machine fits its usize.
    fn length(&mut self) -> Result<usize, String> {
        let n = self.u64()?;
        usize::try_from(n).map_err(|_| format!("a length of {n} is too large"))
    }

    /// A length and as many bytes; returns where they are.
    fn string(&mut self) -> Result<Range<usize>, String> {
        let n = self.length()?;
        let start = self.at;
        self.take(n)?;
        Ok(start..self.at)
    }

    fn text(&self, range: &Range<usize>, what: &str) -> Result<&'a str, String> {
        let bytes = &self.bytes[range.clone()];
        std::str::from_utf8(bytes)
            .map_err(|_| format!("{what} at byte {} is not UTF-8", range.start))
    }

    /// The type and the value that follow a key.
    fn field(&mut self, key: Range<usize>) -> Result<Field, String> {
        let kind = self.u32()?;
        match kind {
            STRING => Ok(Field { key, kind, count: None, range: self.string()? }),
            ARRAY => {
                let (kind, count) = (self.u32()?, self.length()?);
                let start = self.at;
                self.skip(kind, count, 1)?;
                Ok(Field { key, kind, count: Some(count), range: start..self.at })
            }
            _ => {
                let start = self.at;
                self.skip(kind, 1, 0)?;
                Ok(Field { key, kind, count: None, range: start..self.at })
            }
        }
    }

    /// Steps over `count` values. Each takes at least a byte, so that a lying
    /// count ends at the end of the file.
    fn skip(&mut self, kind: u32, count: usize, depth: usize) -> Result<(), String> {
        if let Some(width) = width(kind) {
            let bytes = count.checked_mul(width);
            let bytes = bytes.ok_or_else(|| format!("{count} values are too many"))?;
            return self.take(bytes).map(|_| ());
        }
        for _ in 0..count {
            match kind {
                STRING => {
                    self.string()?;
                }
                ARRAY if depth < MAX_DEPTH => {
                    let (kind, count) = (self.u32()?, self.length()?);
                    self.skip(kind, count, depth + 1)?;
                }
                ARRAY => return Err(format!("lists are nested deeper than {MAX_DEPTH}")),
                _ => return Err(format!("type {kind} is unknown")),
            }
        }
        Ok(())
    }

    /// What follows a tensor's name; its range begins at the data section.
    fn tensor(&mut self, name: &str) -> Result<RawTensor, String> {
        let rank = self.u32()?;
        if rank > MAX_RANK {
            return Err(format!("{rank} dimensions; at most {MAX_RANK} are allowed"));
        }
        // The file names the fastest dimension first.
        let mut shape = (0..rank).map(|_| self.length()).collect::<Result<Vec<_>, _>>()?;
        shape.reverse();
        let number = self.u32()?;
        let format =
            Format::ggml(number).ok_or_else(|| format!("ggml type {number} is unknown"))?;
        let offset = self.length()?;
        let size = format.size(&shape).ok_or_else(|| {
            format!("shape {shape:?} is too large or no whole number of {} blocks", format.name)
        })?;
        let end = offset.checked_add(size);
        let end = end.ok_or_else(|| format!("offset {offset} is too large"))?;
        Ok(RawTensor { name: name.to_string(), shape, format, range: offset..end })
    }
}

//! Data files to examples.

use crate::format::{DETECT_RECORDS, keys, kind};
use crate::{DataError, Example, Format};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// How records lie in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Container {
    /// One JSON object a line.
    JsonLines,
    /// One JSON list of objects, or objects one after the other over many lines.
    Json,
    /// Not JSON: one running text.
    PlainText,
}

impl std::fmt::Display for Container {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Container::JsonLines => "JSON lines",
            Container::Json => "JSON",
            Container::PlainText => "plain text",
        })
    }
}

/// Choices in reading.
#[derive(Debug, Clone, Copy, Default)]
pub struct ReadOptions {
    /// Overrides detection, for every file.
    pub format: Option<Format>,
    /// Count records that cannot be read instead of stopping at the first.
    pub skip_bad: bool,
}

/// What was found in one file.
#[derive(Debug, Clone)]
pub struct FileReport {
    pub path: PathBuf,
    pub container: Container,
    pub format: Format,
    /// Whether the format was detected rather than given.
    pub detected: bool,
    pub examples: usize,
    /// Records left out, and the messages of the first few.
    pub bad: usize,
    pub first_bad: Vec<String>,
}

/// Messages kept of the records that `skip_bad` leaves out.
const BAD_KEPT: usize = 5;

impl std::fmt::Display for FileReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let how = if self.detected { "detected" } else { "as given" };
        write!(
            f,
            "{}: {} ({}, {how}), {} example{}",
            self.path.display(),
            self.format,
            self.container,
            self.examples,
            if self.examples == 1 { "" } else { "s" },
        )?;
        if self.bad > 0 {
            write!(f, ", {} bad left out; first: {}", self.bad, self.first_bad.join("; "))?;
        }
        Ok(())
    }
}

/// The examples of all files in order.
#[derive(Debug, Clone, Default)]
pub struct Dataset {
    pub examples: Vec<Example>,
    /// For each example its file (an index into `files`) and its line, from 1.
    pub places: Vec<(usize, usize)>,
    pub files: Vec<FileReport>,
}

/// Reads data files. Each file's format is detected from its first records
/// unless it is given.
///
/// # Errors
/// A file that is missing, not UTF-8 or without examples; a bad record, with file
/// and line, unless `skip_bad` (a whole JSON list that breaks off is an error
/// even then: what follows cannot be found).
pub fn read_files<P: AsRef<Path>>(
    paths: &[P],
    options: &ReadOptions,
) -> Result<Dataset, DataError> {
    if paths.is_empty() {
        return Err(DataError::NoFiles);
    }
    let mut data = Dataset::default();
    for path in paths {
        let path = path.as_ref();
        let bytes =
            std::fs::read(path).map_err(|source| DataError::Io { path: path.into(), source })?;
        data.add(path, &bytes, options)?;
    }
    Ok(data)
}

/// Reads data that is already in memory; `name` stands for the file.
///
/// # Errors
/// As [`read_files`].
pub fn read_bytes(name: &Path, bytes: &[u8], options: &ReadOptions) -> Result<Dataset, DataError> {
    let mut data = Dataset::default();
    data.add(name, bytes, options)?;
    Ok(data)
}

impl Dataset {
    /// File and line of an example.
    pub fn place(&self, example: usize) -> Option<(&Path, usize)> {
        let &(file, line) = self.places.get(example)?;
        Some((&self.files.get(file)?.path, line))
    }

    fn add(&mut self, path: &Path, bytes: &[u8], options: &ReadOptions) -> Result<(), DataError> {
        let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
        if bytes.trim_ascii().is_empty() {
            let path = path.into();
            let hint = if bytes.is_empty() { ": it is empty" } else { ": it is blank" };
            return Err(DataError::Empty { path, hint: hint.into() });
        }
        let mut file = File { path, options, bad: 0, first_bad: Vec::new() };
        let container = match options.format {
            Some(Format::Raw) => Container::PlainText,
            _ => container(path, bytes),
        };
        let records = match container {
            Container::JsonLines => file.lines(bytes)?,
            Container::Json => file.values(bytes)?,
            Container::PlainText => Vec::new(),
        };
        let start = self.examples.len();
        let format = match container {
            Container::PlainText => {
                self.examples.push(file.running_text(bytes)?);
                self.places.push((self.files.len(), 1));
                Format::Raw
            }
            _ => {
                let format = file.format(&records)?;
                for (line, record) in records {
                    let Some(examples) = file.keep(line, format.read(&record))? else {
                        continue;
                    };
                    self.places
                        .extend(std::iter::repeat_n((self.files.len(), line), examples.len()));
                    self.examples.extend(examples);
                }
                format
            }
        };
        let examples = self.examples.len() - start;
        if examples == 0 {
            return Err(DataError::Empty {
                path: path.into(),
                hint: match file.first_bad.first() {
                    Some(first) => format!(": {} records are bad; the first: {first}", file.bad),
                    None => String::new(),
                },
            });
        }
        self.files.push(FileReport {
            path: path.into(),
            container,
            format,
            detected: options.format.is_none_or(|given| given != format),
            examples,
            bad: file.bad,
            first_bad: file.first_bad,
        });
        Ok(())
    }
}

/// The name decides where it says what the content is, else the first character.
fn container(path: &Path, bytes: &[u8]) -> Container {
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or("");
    match extension.to_ascii_lowercase().as_str() {
        "txt" | "text" | "md" => return Container::PlainText,
        "jsonl" | "ndjson" => return Container::JsonLines,
        _ => {}
    }
    let content = bytes.trim_ascii_start();
    let first_line = content.split(|&b| b == b'\n').next().unwrap_or_default();
    let is_object = |line: &[u8]| serde_json::from_slice::<Map<String, Value>>(line).is_ok();
    match (content.first(), extension) {
        (Some(b'['), "json") => Container::Json,
        // A list of objects; prose may start with a bracket too.
        (Some(b'['), _) if content[1..].trim_ascii_start().starts_with(b"{") => Container::Json,
        (Some(b'{'), _) if is_object(first_line) => Container::JsonLines,
        (Some(b'{'), _) => Container::Json,
        (_, "json") => Container::Json,
        _ => Container::PlainText,
    }
}

/// A record and its line.
type Record = (usize, Map<String, Value>);

struct File<'a> {
    path: &'a Path,
    options: &'a ReadOptions,
    bad: usize,
    first_bad: Vec<String>,
}

impl File<'_> {
    fn error(&self, line: usize, detail: String) -> DataError {
        DataError::Bad { path: self.path.into(), line, detail }
    }

    /// Passes a good value on; a bad one is the error, or counted.
    fn keep<T>(&mut self, line: usize, read: Result<T, String>) -> Result<Option<T>, DataError> {
        match read {
            Ok(value) => Ok(Some(value)),
            Err(detail) if self.options.skip_bad => {
                self.bad += 1;
                if self.first_bad.len() < BAD_KEPT {
                    self.first_bad.push(format!("line {line}: {detail}"));
                }
                Ok(None)
            }
            Err(detail) => Err(self.error(line, detail)),
        }
    }

    fn lines(&mut self, bytes: &[u8]) -> Result<Vec<Record>, DataError> {
        let mut records = Vec::new();
        for (i, line) in bytes.split(|&b| b == b'\n').enumerate() {
            if line.trim_ascii().is_empty() {
                continue;
            }
            let record = json(line).and_then(object);
            if let Some(record) = self.keep(i + 1, record)? {
                records.push((i + 1, record));
            }
        }
        Ok(records)
    }

    /// Reads a list one element at a time (so that an element's line is known),
    /// or values one after the other.
    fn values(&mut self, bytes: &[u8]) -> Result<Vec<Record>, DataError> {
        let mut records = Vec::new();
        let mut lines = LineCounter::new(bytes);
        let space = |at: usize| at + (bytes[at..].len() - bytes[at..].trim_ascii_start().len());
        let list = bytes[space(0)..].first() == Some(&b'[');
        let mut at = if list { space(space(0) + 1) } else { space(0) };
        if list && bytes.get(at) == Some(&b']') {
            return Ok(records);
        }
        while at < bytes.len() {
            let line = lines.line(at);
            let mut stream =
                serde_json::Deserializer::from_slice(&bytes[at..]).into_iter::<Value>();
            let value = match stream.next() {
                Some(Ok(value)) => value,
                Some(Err(e)) => {
                    // serde_json counts from where it was started.
                    let line = line + e.line().saturating_sub(1);
                    return Err(self.error(line, explain(&e, &bytes[at..])));
                }
                None => return Err(self.error(line, "the list breaks off".into())),
            };
            at = space(at + stream.byte_offset());
            if let Some(record) = self.keep(line, object(value))? {
                records.push((line, record));
            }
            if !list {
                continue;
            }
            match bytes.get(at) {
                Some(b',') => at = space(at + 1),
                Some(b']') => {
                    let rest = space(at + 1);
                    if rest < bytes.len() {
                        let detail = "something follows the list".to_string();
                        return Err(self.error(lines.line(rest), detail));
                    }
                    return Ok(records);
                }
                Some(_) => {
                    let detail = "expected `,` or `]` after an element".to_string();
                    return Err(self.error(lines.line(at), detail));
                }
                None => break,
            }
        }
        match list {
            true => Err(self.error(
                lines.line(bytes.len()),
                format!("the file breaks off inside the list, after {} records", records.len()),
            )),
            false => Ok(records),
        }
    }

    fn running_text(&self, bytes: &[u8]) -> Result<Example, DataError> {
        let text = std::str::from_utf8(bytes).map_err(|e| {
            let at = e.valid_up_to();
            let line = LineCounter::new(bytes).line(at);
            self.error(line, not_utf8(bytes, at))
        })?;
        Ok(Example::Text { text: text.to_string(), running: true })
    }

    fn format(&self, records: &[Record]) -> Result<Format, DataError> {
        if let Some(format) = self.options.format {
            return Ok(format);
        }
        let Some((line, first)) = records.first() else {
            return Ok(Format::Text);
        };
        let sample: Vec<Map<String, Value>> =
            records.iter().take(DETECT_RECORDS).map(|(_, record)| record.clone()).collect();
        Format::detect(&sample).ok_or_else(|| DataError::UnknownFormat {
            path: self.path.into(),
            line: *line,
            keys: keys(first),
        })
    }
}

fn json(line: &[u8]) -> Result<Value, String> {
    serde_json::from_slice(line).map_err(|e| explain(&e, line))
}

fn object(value: Value) -> Result<Map<String, Value>, String> {
    match value {
        Value::Object(record) => Ok(record),
        other => Err(format!("expected an object, found {}", kind(&other))),
    }
}

/// serde_json's message without its own position, or that the bytes are no text.
fn explain(error: &serde_json::Error, bytes: &[u8]) -> String {
    if let Err(e) = std::str::from_utf8(bytes)
        && !error.is_eof()
    {
        return not_utf8(bytes, e.valid_up_to());
    }
    let text = error.to_string();
    let text = text.split(" at line ").next().unwrap_or(&text);
    match error.is_eof() {
        true => format!("the JSON breaks off: {text}"),
        false => format!("not JSON: {text} (column {})", error.column()),
    }
}

fn not_utf8(bytes: &[u8], at: usize) -> String {
    let byte = bytes.get(at).copied().unwrap_or_default();
    format!("not UTF-8: byte 0x{byte:02x} at offset {at}; convert the file (iconv -t utf-8)")
}

/// Line numbers of rising offsets, counted once.
struct LineCounter<'a> {
    bytes: &'a [u8],
    at: usize,
    line: usize,
}

impl<'a> LineCounter<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        LineCounter { bytes, at: 0, line: 1 }
    }

    fn line(&mut self, at: usize) -> usize {
        let passed = &self.bytes[self.at.min(at)..at];
        self.line += passed.iter().filter(|&&b| b == b'\n').count();
        self.at = at;
        self.line
    }
}

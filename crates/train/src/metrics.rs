//! `metrics.jsonl`: what a run logged, one JSON object a line.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

/// A metrics file that cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    #[error("cannot {action} {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error(
        "{path}, line {line}: not a JSON object ({reason}); repair or move the file, then resume"
    )]
    BadLine { path: PathBuf, line: usize, reason: String },
    #[error("a record for {path} cannot be written as a JSON object: {reason}")]
    Record { path: PathBuf, reason: String },
}

/// Appends records to a `metrics.jsonl`. Every record reaches the operating
/// system, whole, before the call returns.
#[derive(Debug)]
pub struct MetricsLog {
    file: File,
    path: PathBuf,
    dropped: usize,
}

impl MetricsLog {
    /// Starts an empty log, in place of whatever the file held.
    pub fn create(path: &Path) -> Result<Self, MetricsError> {
        File::create(path).map_err(io_error("create", path))?;
        Self::append_to(path, 0)
    }

    /// Continues the log of a run resumed from the checkpoint of step `step`.
    ///
    /// The resumed run logs every later step again, so everything from the
    /// first record with a larger `step` on is cut off, as is a last line that
    /// a crash left unfinished. The shorter log is written beside the old one
    /// and renamed over it. A missing file is an empty log. Memory: one line.
    pub fn resume(path: &Path, step: u64) -> Result<Self, MetricsError> {
        let old = match File::open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Self::create(path),
            Err(e) => return Err(io_error("open", path)(e)),
        };
        let mut lines = BufReader::new(old);
        let (mut line, mut number, mut kept, mut dropped) = (Vec::new(), 0, 0u64, 0);
        loop {
            line.clear();
            let length = lines.read_until(b'\n', &mut line).map_err(io_error("read", path))?;
            if length == 0 {
                break;
            }
            number += 1;
            // Past the cut, records are only counted.
            if dropped > 0 {
                dropped += 1;
                continue;
            }
            match parse(&line) {
                _ if line.last() != Some(&b'\n') => dropped += 1,
                Ok(Some(at)) if at > step => dropped += 1,
                Ok(_) => kept += length as u64,
                Err(reason) => {
                    return Err(MetricsError::BadLine {
                        path: path.to_owned(),
                        line: number,
                        reason,
                    });
                }
            }
        }
        if dropped > 0 {
            keep_prefix(path, kept)?;
        }
        Self::append_to(path, dropped)
    }

    fn append_to(path: &Path, dropped: usize) -> Result<Self, MetricsError> {
        let file = OpenOptions::new().append(true).open(path).map_err(io_error("open", path))?;
        Ok(Self { file, path: path.to_owned(), dropped })
    }

    /// How many records [`MetricsLog::resume`] cut off.
    pub fn dropped(&self) -> usize {
        self.dropped
    }

    /// The file being written.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends one record, a struct or map. Give it an integer field `step`:
    /// that is what a resume goes by. NaN and infinities become `null`.
    pub fn append(&mut self, record: &impl Serialize) -> Result<(), MetricsError> {
        let bad = |reason: String| MetricsError::Record { path: self.path.clone(), reason };
        let mut line = serde_json::to_vec(record).map_err(|e| bad(e.to_string()))?;
        if line.first() != Some(&b'{') {
            return Err(bad("it is not a struct or map".to_owned()));
        }
        line.push(b'\n');
        self.file.write_all(&line).map_err(io_error("write to", &self.path))
    }
}

/// The `step` of a line, if it has one.
fn parse(line: &[u8]) -> Result<Option<u64>, String> {
    let value: Value = serde_json::from_slice(line).map_err(|e| e.to_string())?;
    let object = value.as_object().ok_or("another JSON value")?;
    Ok(object.get("step").and_then(Value::as_u64))
}

/// Replaces a file with its first `length` bytes, at once or not at all.
fn keep_prefix(path: &Path, length: u64) -> Result<(), MetricsError> {
    let mut name = path.as_os_str().to_owned();
    name.push(".tmp");
    let shorter = PathBuf::from(name);
    let copy = || -> io::Result<()> {
        let mut out = BufWriter::new(File::create(&shorter)?);
        io::copy(&mut io::Read::take(File::open(path)?, length), &mut out)?;
        out.flush()?;
        out.get_ref().sync_all()
    };
    copy().map_err(io_error("write", &shorter))?;
    std::fs::rename(&shorter, path).map_err(io_error("replace", path))
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> MetricsError {
    let path = path.to_owned();
    move |source| MetricsError::Io { action, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn text(path: &Path) -> String {
        std::fs::read_to_string(path).unwrap()
    }

    #[test]
    fn resume_cuts_what_will_be_logged_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut log = MetricsLog::create(&path).unwrap();
        log.append(&json!({"run": "a"})).unwrap();
        for step in 1..=5u64 {
            log.append(&json!({"step": step, "loss": 1.0 / step as f64})).unwrap();
        }
        log.append(&json!({"step": 5, "eval_loss": f64::NAN})).unwrap();
        log.append(&json!({"done": true})).unwrap();

        let mut log = MetricsLog::resume(&path, 3).unwrap();
        assert_eq!(log.dropped(), 4);
        log.append(&json!({"step": 4, "loss": 9})).unwrap();
        let lines: Vec<_> = text(&path).lines().map(str::to_owned).collect();
        assert_eq!(lines.len(), 5);
        assert_eq!(lines[0], r#"{"run":"a"}"#);
        assert_eq!(lines[4], r#"{"step":4,"loss":9}"#);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file stays");

        // Nothing to cut: the file is not touched.
        assert_eq!(MetricsLog::resume(&path, 4).unwrap().dropped(), 0);
        assert_eq!(text(&path).lines().count(), 5);
    }

    #[test]
    fn torn_line_is_cut_and_bad_line_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        std::fs::write(&path, "{\"step\":1}\n{\"step\":2}\n{\"ste").unwrap();
        assert_eq!(MetricsLog::resume(&path, 9).unwrap().dropped(), 1);
        assert_eq!(text(&path), "{\"step\":1}\n{\"step\":2}\n");

        for bad in ["hello", "[1]", "", "\u{0}\u{0}"] {
            std::fs::write(&path, format!("{{\"step\":1}}\n{bad}\n{{\"step\":2}}\n")).unwrap();
            let error = MetricsLog::resume(&path, 9).unwrap_err().to_string();
            assert!(error.contains("line 2"), "{error}");
        }
    }

    #[test]
    fn missing_file_unwritable_folder_and_odd_records() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut log = MetricsLog::resume(&path, 7).unwrap();
        assert!(matches!(log.append(&3), Err(MetricsError::Record { .. })));
        assert_eq!(text(&path), "");
        let error = MetricsLog::create(&path.join("x")).unwrap_err();
        assert!(error.to_string().contains("metrics.jsonl"), "{error}");
    }
}

//! TensorBoard event files: scalars that `tensorboard --logdir` draws.
//!
//! An event file is a TFRecord stream (TensorFlow `lib/io/record_writer`) of
//! `Event` messages (TensorFlow `core/util/event.proto`). Only the few fields
//! that scalars need are encoded, by hand.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// An event file that cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum TensorBoardError {
    #[error("cannot create the TensorBoard event file {path}: {source}")]
    Create { path: PathBuf, source: io::Error },
    #[error("cannot write to the TensorBoard event file {path}: {source}")]
    Write { path: PathBuf, source: io::Error },
}

/// Appends scalars to one event file. Every call reaches the operating system
/// before it returns, so a killed run loses nothing that it logged.
#[derive(Debug)]
pub struct EventWriter {
    file: File,
    path: PathBuf,
    record: Vec<u8>,
}

impl EventWriter {
    /// Starts the event file of a new run in `dir`, which is created.
    pub fn create(dir: &Path) -> Result<Self, TensorBoardError> {
        Self::open(dir, SystemTime::now())
    }

    /// Starts the next event file of a run that continues at `first_step`.
    ///
    /// Event files are never appended to: TensorBoard reads all of a directory
    /// in the order of their names. The session mark written here makes it
    /// forget what earlier files hold from `first_step` on, so steps that were
    /// logged after the last checkpoint are not drawn twice.
    pub fn resume(dir: &Path, first_step: u64) -> Result<Self, TensorBoardError> {
        let mut writer = Self::open(dir, SystemTime::now())?;
        let mut event = Vec::new();
        put_double(&mut event, 1, unix_seconds(SystemTime::now()));
        put_varint_field(&mut event, 2, first_step);
        // session_log { status: START }
        put_bytes(&mut event, 7, &[0x08, 0x01]);
        writer.write(&event)?;
        Ok(writer)
    }

    fn open(dir: &Path, now: SystemTime) -> Result<Self, TensorBoardError> {
        let failed =
            |path: &Path, source| TensorBoardError::Create { path: path.to_owned(), source };
        std::fs::create_dir_all(dir).map_err(|e| failed(dir, e))?;
        let seconds = unix_seconds(now) as u64;
        let (host, process) = (host_name(), std::process::id());
        let mut number = 0u32;
        let (file, path) = loop {
            // Names sort by time, then by the number of the file in this second.
            let name = format!("events.out.tfevents.{seconds:010}.{host}.{process}.{number}");
            let path = dir.join(name);
            match OpenOptions::new().append(true).create_new(true).open(&path) {
                Ok(file) => break (file, path),
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists && number < u32::MAX => {
                    number += 1;
                }
                Err(e) => return Err(failed(&path, e)),
            }
        };
        let mut writer = Self { file, path, record: Vec::new() };
        let mut event = Vec::new();
        put_double(&mut event, 1, unix_seconds(now));
        put_bytes(&mut event, 3, b"brain.Event:2");
        writer.write(&event)?;
        Ok(writer)
    }

    /// The file being written.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Logs `(tag, value)` pairs at an optimizer step, with the time of now.
    /// TensorBoard keeps scalars as float32, and shows NaN as such.
    pub fn scalars(&mut self, step: u64, values: &[(&str, f64)]) -> Result<(), TensorBoardError> {
        let mut event = Vec::new();
        put_double(&mut event, 1, unix_seconds(SystemTime::now()));
        encode_scalars(&mut event, step, values);
        self.write(&event)
    }

    fn write(&mut self, event: &[u8]) -> Result<(), TensorBoardError> {
        self.record.clear();
        frame(&mut self.record, event);
        // One call for the whole record: a reader sees it entirely or not yet.
        self.file
            .write_all(&self.record)
            .map_err(|source| TensorBoardError::Write { path: self.path.clone(), source })
    }
}

fn unix_seconds(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// The machine's name, reduced to what is safe in a file name.
fn host_name() -> String {
    let mut buffer = [0u8; 256];
    #[cfg(unix)]
    // SAFETY: the buffer is writable for the length that is passed; the last
    // byte stays zero whatever the call does.
    unsafe {
        libc::gethostname(buffer.as_mut_ptr().cast(), buffer.len() - 1);
    }
    let length = buffer.iter().position(|&b| b == 0).unwrap_or(0);
    if length == 0 {
        return "localhost".to_owned();
    }
    buffer[..length]
        .iter()
        .map(|&b| match b {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' => char::from(b),
            _ => '_',
        })
        .collect()
}

/// `Event { step, summary { value { tag, simple_value } ... } }` without time.
fn encode_scalars(event: &mut Vec<u8>, step: u64, values: &[(&str, f64)]) {
    put_varint_field(event, 2, step);
    let mut summary = Vec::new();
    for (tag, value) in values {
        let mut entry = Vec::new();
        put_bytes(&mut entry, 1, tag.as_bytes());
        put_key(&mut entry, 2, 5);
        entry.extend_from_slice(&(*value as f32).to_le_bytes());
        put_bytes(&mut summary, 1, &entry);
    }
    put_bytes(event, 5, &summary);
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn put_key(out: &mut Vec<u8>, field: u64, wire_type: u64) {
    put_varint(out, field << 3 | wire_type);
}

fn put_varint_field(out: &mut Vec<u8>, field: u64, value: u64) {
    put_key(out, field, 0);
    put_varint(out, value);
}

fn put_double(out: &mut Vec<u8>, field: u64, value: f64) {
    put_key(out, field, 1);
    out.extend_from_slice(&value.to_le_bytes());
}

fn put_bytes(out: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    put_key(out, field, 2);
    put_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// TFRecord: length, its checksum, the data, its checksum; little-endian.
fn frame(out: &mut Vec<u8>, data: &[u8]) {
    let length = (data.len() as u64).to_le_bytes();
    out.extend_from_slice(&length);
    out.extend_from_slice(&masked_crc32c(&length).to_le_bytes());
    out.extend_from_slice(data);
    out.extend_from_slice(&masked_crc32c(data).to_le_bytes());
}

/// CRC-32C (Castagnoli, reflected polynomial), rotated and offset as TFRecord
/// wants it so that checksums of data that holds checksums stay sound.
fn masked_crc32c(data: &[u8]) -> u32 {
    crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn crc32c(data: &[u8]) -> u32 {
    !data.iter().fold(!0u32, |crc, &byte| CRC_TABLE[usize::from(crc as u8 ^ byte)] ^ (crc >> 8))
}

const CRC_TABLE: [u32; 256] = {
    let mut table = [0u32; 256];
    let mut i = 0;
    while i < 256 {
        let mut crc = i as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
            bit += 1;
        }
        table[i] = crc;
        i += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_vectors() {
        // RFC 3720, appendix B.4.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn scalar_event_bytes() {
        let mut event = Vec::new();
        put_double(&mut event, 1, 1.5);
        encode_scalars(&mut event, 300, &[("loss", 0.5)]);
        #[rustfmt::skip]
        let expected = [
            0x09, 0, 0, 0, 0, 0, 0, 0xf8, 0x3f, // wall_time: 1.5
            0x10, 0xac, 0x02, // step: 300
            0x2a, 13, // summary
            0x0a, 11, // value
            0x0a, 4, b'l', b'o', b's', b's', // tag
            0x15, 0, 0, 0, 0x3f, // simple_value: 0.5
        ];
        assert_eq!(event, expected);
    }

    /// Splits a file into its records, checking every checksum.
    fn records(path: &Path) -> Vec<Vec<u8>> {
        let bytes = std::fs::read(path).unwrap();
        let mut rest = &bytes[..];
        let mut out = Vec::new();
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            let sum = u32::from_le_bytes(rest[8..12].try_into().unwrap());
            assert_eq!(sum, masked_crc32c(&rest[..8]));
            let data = &rest[12..12 + length];
            let sum = u32::from_le_bytes(rest[12 + length..16 + length].try_into().unwrap());
            assert_eq!(sum, masked_crc32c(data));
            out.push(data.to_vec());
            rest = &rest[16 + length..];
        }
        out
    }

    #[test]
    fn a_resumed_run_starts_a_new_file_with_a_session_mark() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = EventWriter::create(dir.path()).unwrap();
        first.scalars(1, &[("loss", 3.0), ("lr", 1e-4)]).unwrap();
        first.scalars(2, &[("loss", f64::NAN)]).unwrap();
        let mut second = EventWriter::resume(dir.path(), 2).unwrap();
        second.scalars(2, &[("loss", 2.0)]).unwrap();
        assert!(first.path() < second.path());

        let one = records(first.path());
        assert_eq!(one.len(), 3);
        // Version first, after the nine bytes of the time.
        assert_eq!(&one[0][9..], b"\x1a\x0dbrain.Event:2");
        let two = records(second.path());
        assert_eq!(two.len(), 3);
        assert_eq!(&two[1][9..], [0x10, 2, 0x3a, 2, 0x08, 1]);
    }

    #[test]
    fn an_unwritable_folder_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = EventWriter::create(&file.path().join("runs")).unwrap_err();
        assert!(error.to_string().contains("runs"), "{error}");
    }
}

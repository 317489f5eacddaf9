//! Damaged and lying files: a named error, no panic, and no more memory than
//! a small multiple of the file.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::{Gguf, TINY, f32_tensors, safetensors, tiny, weights};
use plimsoll_arch::DType;
use plimsoll_model::{Checkpoint, quantize_model};
use proptest::prelude::*;

/// Counts what the current thread has allocated at most at one time.
struct Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    let live = LIVE.get() + bytes;
    LIVE.set(live);
    PEAK.set(PEAK.get().max(live));
}

// SAFETY: the system's allocator does the work; counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's contract is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's contract is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Opens the bytes as a file and asks everything of it. Returns the error.
fn open(dir: &tempfile::TempDir, name: &str, bytes: &[u8]) -> Result<(), String> {
    let path = dir.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    let start = LIVE.get();
    PEAK.set(start);
    let result = exercise(&path);
    let used = PEAK.get() - start;
    // Messages, paths and the tables of a few entries are the constant part.
    let allowed = 64 * 1024 + 16 * bytes.len() as isize;
    assert!(used <= allowed, "{used} bytes for a file of {}", bytes.len());
    result
}

fn exercise(path: &std::path::Path) -> Result<(), String> {
    let checkpoint = Checkpoint::open(path).map_err(|e| e.to_string())?;
    let names: Vec<String> = checkpoint.tensor_names().map(str::to_string).collect();
    for name in &names {
        // Quantized types hold up to 7 elements a byte.
        let elements: usize = checkpoint.shape(name).unwrap_or_default().iter().product();
        if elements < 1 << 16 {
            let _ = checkpoint.read_f32(name, &mut vec![0.0; elements]);
        }
    }
    if let Some(metadata) = checkpoint.gguf_metadata() {
        for key in metadata.keys() {
            let _ = metadata.string(key);
            let _ = metadata.unsigned(key);
            let _ = metadata.float(key);
            let _ = metadata.boolean(key);
            let _ = metadata.strings(key);
            let _ = metadata.integers(key);
            let _ = metadata.floats(key);
        }
    }
    checkpoint.validate().map(|_| ()).map_err(|e| e.to_string())
}

fn valid_safetensors() -> Vec<u8> {
    let (header, data) = f32_tensors(&weights(&tiny()));
    safetensors(&header, &data)
}

/// The same model with its projections in four bits.
fn quantized_safetensors() -> Vec<u8> {
    static FILE: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
    let make = || {
        let dir = folder();
        std::fs::write(dir.path().join("model.safetensors"), valid_safetensors()).unwrap();
        let (checkpoint, out) = (Checkpoint::open(dir.path()).unwrap(), dir.path().join("out"));
        let format = "nf4-dq".parse().unwrap();
        quantize_model(&checkpoint, &out, format, DType::F32, false, None).unwrap();
        std::fs::read(out.join("model.safetensors")).unwrap()
    };
    FILE.get_or_init(make).clone()
}

fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), TINY).unwrap();
    dir
}

#[test]
fn every_truncation_is_refused() {
    let dir = folder();
    for (name, file) in
        [("model.safetensors", valid_safetensors()), ("model.gguf", Gguf::tiny().bytes())]
    {
        open(&dir, name, &file).unwrap();
        for length in 0..file.len() {
            let error = open(&dir, name, &file[..length]).expect_err("truncated");
            assert!(error.contains(name), "{error}");
        }
    }
}

#[test]
fn huge_counts_and_lengths_are_refused() {
    let dir = folder();
    let file = Gguf::tiny().bytes();
    // Every 4 and 8 bytes in turn, as if any of them were a count.
    for at in 8..file.len() - 8 {
        for value in [u64::MAX, 1 << 60, 1 << 40, (1 << 32) - 1] {
            let mut lying = file.clone();
            lying[at..at + 8].copy_from_slice(&value.to_le_bytes());
            let _ = open(&dir, "model.gguf", &lying);
        }
    }
}

fn config() -> ProptestConfig {
    ProptestConfig { failure_persistence: None, ..ProptestConfig::default() }
}

/// A valid file with a few bytes changed, and perhaps cut off.
fn damaged(file: Vec<u8>) -> impl Strategy<Value = Vec<u8>> {
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8);
    (changes, prop::option::of(any::<prop::sample::Index>())).prop_map(move |(changes, cut)| {
        let mut file = file.clone();
        for (at, byte) in changes {
            let at = at.index(file.len());
            file[at] = byte;
        }
        if let Some(cut) = cut {
            file.truncate(cut.index(file.len()));
        }
        file
    })
}

/// Pieces of JSON where the header has a value.
fn json_header() -> impl Strategy<Value = String> {
    let number = prop_oneof![
        Just("0".to_string()),
        (0u64..64).prop_map(|n| n.to_string()),
        any::<u64>().prop_map(|n| n.to_string()),
        any::<i64>().prop_map(|n| n.to_string()),
        Just("1e999".to_string()),
        Just("18446744073709551616".to_string()),
        Just("[[[[]]]]".to_string()),
    ];
    let dtype = prop::sample::select(vec!["F32", "BF16", "U8", "F64", "", "X"]);
    let shape = prop::collection::vec(number.clone(), 0..10);
    let tensor = ("[abc]{1,2}", dtype, shape, number.clone(), number).prop_map(
        |(name, dtype, shape, from, to)| {
            let shape = shape.join(",");
            format!(
                r#""{name}":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{from},{to}]}}"#
            )
        },
    );
    prop::collection::vec(tensor, 0..5).prop_map(|tensors| format!("{{{}}}", tensors.join(",")))
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        let dir = folder();
        let _ = open(&dir, "model.safetensors", &bytes);
        let _ = open(&dir, "model.gguf", &bytes);
        let gguf = [b"GGUF\x03\0\0\0", bytes.as_slice()].concat();
        let _ = open(&dir, "model.gguf", &gguf);
    }

    #[test]
    fn damaged_safetensors(file in damaged(valid_safetensors())) {
        let _ = open(&folder(), "model.safetensors", &file);
    }

    #[test]
    fn damaged_4bit(file in damaged(quantized_safetensors())) {
        let _ = open(&folder(), "model.safetensors", &file);
    }

    #[test]
    fn damaged_gguf(file in damaged(Gguf::tiny().bytes())) {
        let _ = open(&folder(), "model.gguf", &file);
    }

    #[test]
    fn any_header(header in json_header(), data in 0usize..100) {
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.resize(file.len() + data, 0);
        let _ = open(&folder(), "model.safetensors", &file);
    }
}

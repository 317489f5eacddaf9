//! Writing: what is written reads back, and nothing is lost on the way.

mod common;

use std::path::Path;

use common::{read, tiny, weights};
use half::bf16;
use plimsoll_arch::DType;
use plimsoll_model::{Checkpoint, ModelError, SafetensorsWriter, expected_tensors};

fn names(dir: &Path) -> Vec<String> {
    let name = |e: std::io::Result<std::fs::DirEntry>| e.unwrap().file_name();
    let mut names: Vec<String> =
        dir.read_dir().unwrap().map(|e| name(e).to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Writes the tiny model with `add` added to every weight.
fn write(dir: &Path, dtype: DType, shard_bytes: u64, add: f32) {
    let arch = tiny();
    let tensors = expected_tensors(&arch);
    let mut writer =
        SafetensorsWriter::with_shard_bytes(dir, &arch, dtype, &tensors, shard_bytes).unwrap();
    for (name, _, values) in weights(&arch) {
        let values: Vec<f32> = values.iter().map(|x| x + add).collect();
        writer.write_f32(&name, &values).unwrap();
    }
    writer.finish().unwrap();
}

#[test]
fn round_trips() {
    for (dtype, shard_bytes, files) in
        [(DType::F32, u64::MAX, 2), (DType::Bf16, u64::MAX, 2), (DType::F32, 100, 10)]
    {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), dtype, shard_bytes, 0.0);
        assert_eq!(names(dir.path()).len(), files, "{:?}", names(dir.path()));
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        assert!(checkpoint.validate().unwrap().unexpected.is_empty());
        let arch = plimsoll_arch::Architecture {
            name: "tiny".into(),
            ..checkpoint.architecture().clone()
        };
        assert_eq!(arch, tiny());
        for (name, _, values) in weights(&tiny()) {
            assert_eq!(read(&checkpoint, &name), values, "{name}: exact in bf16 too");
        }
    }
}

#[test]
fn bf16_in_and_out() {
    let dir = tempfile::tempdir().unwrap();
    let arch = tiny();
    let tensors = expected_tensors(&arch);
    let mut writer = SafetensorsWriter::create(dir.path(), &arch, DType::Bf16, &tensors).unwrap();
    for (name, _, values) in weights(&arch) {
        let values: Vec<bf16> = values.iter().map(|x| bf16::from_f32(x * 1.001)).collect();
        writer.write_bf16(&name, &values).unwrap();
    }
    writer.finish().unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.dtype("lm_head.weight"), Some("BF16"));
    for (name, _, values) in weights(&arch) {
        let mut back = vec![bf16::ZERO; values.len()];
        checkpoint.read_bf16(&name, &mut back).unwrap();
        assert!(back.iter().zip(&values).all(|(a, b)| *a == bf16::from_f32(b * 1.001)), "{name}");
    }
}

#[test]
fn a_model_replaces_another_whole() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    write(dir.path(), DType::F32, u64::MAX, 0.0);
    write(dir.path(), DType::F32, 300, 1.0);
    assert!(!names(dir.path()).contains(&"model.safetensors".into()));
    write(dir.path(), DType::F32, u64::MAX, 2.0);
    assert_eq!(names(dir.path()), ["config.json", "model.safetensors", "tokenizer.json"]);
    let (name, _, values) = &weights(&tiny())[0];
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(read(&checkpoint, name)[0], values[0] + 2.0);
}

#[test]
fn an_unfinished_write_leaves_the_old_files() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), DType::F32, u64::MAX, 0.0);
    let before = std::fs::read(dir.path().join("model.safetensors")).unwrap();
    let arch = tiny();
    let tensors = expected_tensors(&arch);
    let mut writer = SafetensorsWriter::create(dir.path(), &arch, DType::Bf16, &tensors).unwrap();
    let (name, shape) = &tensors[0];
    let error = writer.write_f32(&tensors[1].0, &[0.0; 4]).unwrap_err().to_string();
    assert!(error.contains("the turn is that of `model.embed_tokens.weight`"), "{error}");
    let error = writer.write_f32(name, &[0.0; 3]).unwrap_err().to_string();
    assert!(error.contains("needs 20 elements, not 3"), "{error}");
    writer.write_f32(name, &vec![0.0; shape.iter().product()]).unwrap();
    assert_eq!(names(dir.path()).len(), 3, "a temporary file");
    let error = writer.finish().unwrap_err().to_string();
    assert!(error.contains("not given before the end"), "{error}");
    assert_eq!(names(dir.path()), ["config.json", "model.safetensors"]);
    assert_eq!(std::fs::read(dir.path().join("model.safetensors")).unwrap(), before);
}

#[test]
fn files_of_a_killed_writer_go() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = std::process::Command::new("true").spawn().unwrap();
    let dead = child.id();
    child.wait().unwrap();
    let ours = std::process::id();
    for pid in [dead, ours] {
        let name = format!(".model-00001-of-00002.safetensors.{pid}.77.tmp");
        std::fs::write(dir.path().join(name), "part").unwrap();
    }
    write(dir.path(), DType::F32, u64::MAX, 0.0);
    let left: Vec<String> = names(dir.path()).into_iter().filter(|n| n.ends_with(".tmp")).collect();
    assert_eq!(left, [format!(".model-00001-of-00002.safetensors.{ours}.77.tmp")]);
}

#[test]
fn no_space_and_no_folder_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let arch = tiny();
    // 2 EiB: more than any disk has.
    let tensors = [("huge".to_string(), vec![1 << 30, 1 << 29])];
    let error = SafetensorsWriter::create(dir.path(), &arch, DType::F32, &tensors).err().unwrap();
    assert!(matches!(error, ModelError::NoSpace { .. }), "{error}");
    assert!(names(dir.path()).is_empty());
    let tensors = [("huge".to_string(), vec![1 << 40, 1 << 40])];
    let error = SafetensorsWriter::create(dir.path(), &arch, DType::F32, &tensors).err().unwrap();
    assert!(error.to_string().contains("is too large"), "{error}");

    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let tensors = expected_tensors(&arch);
    let error = SafetensorsWriter::create(&file, &arch, DType::F32, &tensors).err().unwrap();
    assert!(error.to_string().contains("cannot create the folder"), "{error}");
    let error = SafetensorsWriter::create(dir.path(), &arch, DType::I32, &tensors).err().unwrap();
    assert!(error.to_string().contains("f32 or bf16, not i32"), "{error}");
    // The kernel lets nobody create files there, root included.
    let proc = Path::new("/proc/self");
    if proc.is_dir() {
        let error = SafetensorsWriter::create(proc, &arch, DType::F32, &tensors).err().unwrap();
        assert!(error.to_string().contains("/proc/self"), "{error}");
    }
}

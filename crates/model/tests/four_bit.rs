//! 4-bit checkpoints: those of transformers are read, and written the same; a
//! missing or lying part is refused by name.

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use common::{read, shared};
use plimsoll_arch::DType;
use plimsoll_model::{Checkpoint, Packed4bit, Scales, expected_tensors, quantize_model};
use plimsoll_quant::{Codebook, Format4bit, blocks, nested_blocks, packed_bytes};
use serde_json::{Value, json};

const NF4_DQ: Format4bit = Format4bit { codebook: Codebook::Nf4, double: true };

/// Type, shape and bytes of every tensor of a file.
type File = BTreeMap<String, (String, Value, Vec<u8>)>;

fn parse(path: &Path) -> File {
    let bytes = std::fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let mut file = File::new();
    for (name, info) in header.as_object().unwrap().iter().filter(|(n, _)| *n != "__metadata__") {
        let at = |i: usize| 8 + length + info["data_offsets"][i].as_u64().unwrap() as usize;
        let dtype = info["dtype"].as_str().unwrap().to_owned();
        file.insert(name.clone(), (dtype, info["shape"].clone(), bytes[at(0)..at(1)].to_vec()));
    }
    file
}

fn write(path: &Path, file: &File) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, (dtype, shape, bytes)) in file {
        let offsets = [data.len(), data.len() + bytes.len()];
        let info = json!({"dtype": dtype, "shape": shape, "data_offsets": offsets});
        header.insert(name.clone(), info);
        data.extend(bytes);
    }
    std::fs::write(path, common::safetensors(&Value::Object(header), &data)).unwrap();
}

/// A random Llama that transformers wrote.
fn micro() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/llama-micro")
}

fn state_of(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap()
}

#[test]
fn quantizing_is_what_transformers_does() {
    let Some(theirs) = shared().map(|root| root.join("golden/qlora/quantized")) else { return };
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&micro()).unwrap();
    let done = quantize_model(&checkpoint, dir.path(), NF4_DQ, DType::F32, false, None).unwrap();
    assert_eq!((done.quantized, done.kept), (14, 7));
    let ours = parse(&dir.path().join("model.safetensors"));
    let expected = parse(&theirs.join("model.safetensors"));
    assert!(ours.keys().eq(expected.keys()));
    for (name, (dtype, shape, bytes)) in &expected {
        let (our_dtype, our_shape, our_bytes) = &ours[name];
        assert_eq!(dtype, our_dtype, "{name}");
        if name.contains("quant_state") {
            // Ours has spaces at its end.
            assert_eq!(state_of(bytes), state_of(our_bytes), "{name}");
            continue;
        }
        assert_eq!(shape, our_shape, "{name}");
        assert!(bytes == our_bytes, "{name}");
    }
    let config = |dir: &Path| -> Value {
        serde_json::from_str(&std::fs::read_to_string(dir.join("config.json")).unwrap()).unwrap()
    };
    assert_eq!(config(dir.path())["quantization_config"], config(&theirs)["quantization_config"]);
}

#[test]
fn every_format_reads_back() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&micro()).unwrap();
    for format in Format4bit::ALL {
        for precision in [DType::F32, DType::Bf16] {
            let out = dir.path().join(format!("{format}-{precision}"));
            let head = precision == DType::F32;
            let done = quantize_model(&checkpoint, &out, format, precision, head, None).unwrap();
            let back = Checkpoint::open(&out).unwrap();
            assert!(back.validate().unwrap().unexpected.is_empty());
            assert_eq!(back.format_4bit("lm_head.weight"), head.then_some(format));
            assert!(back.total_bytes() <= done.bytes);
            for (name, shape) in expected_tensors(checkpoint.architecture()) {
                assert_eq!(back.shape(&name), Some(&shape[..]));
                let (original, read_back) = (read(&checkpoint, &name), read(&back, &name));
                let Some(stored) = back.format_4bit(&name) else {
                    assert!(original.iter().zip(&read_back).all(|(a, b)| (a - b).abs() < 0.02));
                    continue;
                };
                assert_eq!((stored, back.dtype(&name)), (format, Some(format.name())));
                let largest = original.iter().fold(0.0f32, |a, x| a.max(x.abs()));
                let far =
                    original.iter().zip(&read_back).find(|(a, b)| (*a - *b).abs() > 0.2 * largest);
                assert_eq!(far, None, "{name} in {format}");
                // The same codes by both ways.
                let n = original.len();
                assert!(
                    codes(&back, &name, format, n) == codes(&checkpoint, &name, format, n)
                        || precision == DType::Bf16
                );
                let other = Format4bit { double: !format.double, ..format };
                assert!(codes(&back, &name, other, n).0 == codes(&back, &name, format, n).0);
            }
        }
    }
    // What is in four bits already is not quantized again.
    let again = Checkpoint::open(&dir.path().join("nf4-f32")).unwrap();
    let error = quantize_model(&again, &dir.path().join("x"), NF4_DQ, DType::F32, false, None)
        .unwrap_err()
        .to_string();
    assert!(error.contains("nf4 already"), "{error}");
}

/// Codes, and everything that scales them.
fn codes(
    checkpoint: &Checkpoint,
    name: &str,
    format: Format4bit,
    n: usize,
) -> (Vec<u8>, Vec<u8>, Vec<f32>, f32) {
    let (mut codes, mut offset) = (vec![0; packed_bytes(n)], 0.0);
    let (mut nested, mut absmax) = (Vec::new(), vec![0.0; blocks(n)]);
    let scales = if format.double {
        (nested, absmax) = (vec![0; blocks(n)], vec![0.0; nested_blocks(n)]);
        Scales::Nested { codes: &mut nested, absmax: &mut absmax, offset: &mut offset }
    } else {
        Scales::Plain(&mut absmax)
    };
    let out = Packed4bit { codes: &mut codes, scales };
    checkpoint.read_4bit(name, format, DType::F32, out).unwrap();
    (codes, nested, absmax, offset)
}

/// Opens the file with one change and asks for a tensor.
fn refusal(change: impl FnOnce(&mut File)) -> String {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    quantize_model(&Checkpoint::open(&micro()).unwrap(), &out, NF4_DQ, DType::F32, false, None)
        .unwrap();
    let path = out.join("model.safetensors");
    let mut file = parse(&path);
    change(&mut file);
    write(&path, &file);
    let name = format!("{LAYER}.weight");
    let ask = || -> Result<(), plimsoll_model::ModelError> {
        let checkpoint = Checkpoint::open(&out)?;
        checkpoint.validate()?;
        let n = checkpoint.shape(&name).unwrap_or_default().iter().product();
        checkpoint.read_f32(&name, &mut vec![0.0; n])
    };
    let error = ask().expect_err("a lie").to_string();
    assert!(error.contains(LAYER), "{error}");
    error
}

const LAYER: &str = "model.layers.0.mlp.up_proj";

#[test]
fn missing_and_lying_parts_are_named() {
    let key = |suffix: &str| format!("{LAYER}.weight{suffix}");
    let state = key(".quant_state.bitsandbytes__nf4");
    for suffix in [
        ".absmax",
        ".quant_map",
        ".nested_absmax",
        ".nested_quant_map",
        ".quant_state.bitsandbytes__nf4",
    ] {
        let error = refusal(|file| {
            file.remove(&key(suffix)).unwrap();
        });
        assert!(error.contains(suffix.trim_end_matches("nf4")), "{suffix}: {error}");
    }
    let error = refusal(|file| {
        file.remove(&key("")).unwrap();
    });
    assert!(error.contains("codes are missing"), "{error}");

    let with_state = |edit: &dyn Fn(&mut Value)| {
        refusal(|file| {
            let (_, shape, bytes) = file.get_mut(&state).unwrap();
            let mut value = state_of(bytes);
            edit(&mut value);
            *bytes = value.to_string().into_bytes();
            *shape = json!([bytes.len()]);
        })
    };
    for (field, value, word) in [
        ("shape", json!([64, 65]), "takes"),
        ("shape", json!([0, 64]), "shape [0, 64]"),
        ("shape", json!([u64::MAX, 64]), "shape"),
        ("shape", json!("x"), "quant_state"),
        ("quant_type", json!("fp4"), "says \"fp4\""),
        ("blocksize", json!(128), "blocksize 128"),
        ("nested_blocksize", json!(64), "nested_blocksize"),
        ("nested_offset", json!(1e300), "nested_offset"),
        ("nested_offset", Value::Null, "nested_offset"),
    ] {
        let error = with_state(&|state| state[field] = value.clone());
        assert!(error.contains(word), "{field} {value}: {error}");
    }
    let error = refusal(|file| file.get_mut(&state).unwrap().2.fill(b'x'));
    assert!(error.contains("quant_state"), "{error}");
    let error = refusal(|file| file.get_mut(&key(".quant_map")).unwrap().2[3] ^= 0x40);
    assert!(error.contains(".quant_map has"), "{error}");
    let error = refusal(|file| {
        let bytes = &mut file.get_mut(&key(".nested_absmax")).unwrap().2;
        bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    assert!(error.contains("scale 0 of a block is NaN"), "{error}");
    let error = refusal(|file| {
        let (_, shape, bytes) = file.get_mut(&key(".absmax")).unwrap();
        bytes.pop();
        *shape = json!([bytes.len()]);
    });
    assert!(error.contains(".absmax is U8"), "{error}");
    // Another shape with as many elements fits the codes, but not the model.
    let error = with_state(&|state| {
        let (rows, cols) = (state["shape"][0].clone(), state["shape"][1].clone());
        state["shape"] = json!([cols, rows]);
    });
    assert!(error.contains("has shape"), "{error}");
}

#[test]
fn a_value_that_is_not_finite_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let model = micro();
    let bad = dir.path().join("bad");
    std::fs::create_dir_all(&bad).unwrap();
    std::fs::copy(model.join("config.json"), bad.join("config.json")).unwrap();
    let mut file = parse(&model.join("model.safetensors"));
    let name = format!("{LAYER}.weight");
    file.get_mut(&name).unwrap().2[40..44].copy_from_slice(&f32::INFINITY.to_le_bytes());
    write(&bad.join("model.safetensors"), &file);
    let checkpoint = Checkpoint::open(&bad).unwrap();
    let out = dir.path().join("out");
    let error =
        quantize_model(&checkpoint, &out, NF4_DQ, DType::F32, false, None).unwrap_err().to_string();
    assert!(error.contains(&name) && error.contains("element 10"), "{error}");
    // Nothing is left behind.
    assert_eq!(out.read_dir().unwrap().count(), 0);
}

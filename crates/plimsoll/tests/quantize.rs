//! `quantize`: a model in four bits that every command runs, and every refusal.

mod common;

use std::path::Path;

use common::*;
use serde_json::{Value, json};

fn quantize(model: &Path, out: &Path, options: &str) -> Ran {
    plimsoll(&format!("quantize --model {} --out {} {options}", model.display(), out.display()))
}

#[test]
fn a_quantized_model_runs_everywhere() {
    let dir = tempfile::tempdir().unwrap();
    let model = nano(dir.path());
    for quant in ["nf4", "nf4-dq", "fp4", "fp4-dq"] {
        let out = dir.path().join(quant);
        let result = quantize(&model, &out, &format!("--quant {quant} --format json")).ok().json();
        assert_eq!((&result["quant"], &result["quantized_tensors"]), (&json!(quant), &json!(14)));
        assert_eq!(result["precision"], "f32");
        assert!(result["bytes"].as_u64() < result["source_bytes"].as_u64());
        let config = std::fs::read_to_string(out.join("config.json")).unwrap();
        let config: Value = serde_json::from_str(&config).unwrap();
        let config = &config["quantization_config"];
        assert_eq!(config["quant_method"], "bitsandbytes");
        assert_eq!(config["bnb_4bit_quant_type"], quant[..3]);
        assert_eq!(config["bnb_4bit_use_double_quant"], quant.ends_with("-dq"));
        let line = |path: &Path| {
            format!(
                "generate --model {} --prompt-ids 5,6,7 --max-new-tokens 4 --greedy --format json",
                path.display()
            )
        };
        let ids = plimsoll(&line(&out)).ok().json()["ids"].clone();
        assert_eq!(ids.as_array().unwrap().len(), 7);
        assert_eq!(ids, plimsoll(&line(&out)).ok().json()["ids"]);
    }
    // A person reads one line.
    let ran = quantize(&model, &dir.path().join("table"), "--quant nf4 --precision bf16").ok();
    assert!(ran.stdout.contains("14 tensors quantized, 6 kept in bf16"), "{ran:?}");
}

#[test]
fn what_cannot_be_quantized_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let model = nano(dir.path());
    let out = dir.path().join("out");
    quantize(&model, &out, "--quant int4").refused(&["int4", "nf4-dq"]);
    quantize(&model, &model, "--quant nf4").refused(&["folder of the model itself"]);
    quantize(&model, &out, "--quant nf4 --quant-head").refused(&["embedding", "--quant-head"]);
    quantize(Path::new("plimsoll-tiny"), &out, "--quant nf4").refused(&["preset", "no weights"]);
    quantize(&model, &out, "--quant nf4").ok();
    quantize(&out, &dir.path().join("again"), "--quant fp4").refused(&["in nf4 already"]);

    // A NaN, with its name and place.
    let mut tensors = nano_weights(&nano_config());
    let (name, _, values) =
        tensors.iter_mut().find(|(name, _, _)| name.ends_with("k_proj.weight")).unwrap();
    values[9] = f32::NAN;
    let name = name.clone();
    let bad = dir.path().join("bad");
    write_model(&bad, &nano_config(), &tensors);
    quantize(&bad, &dir.path().join("x"), "--quant nf4").refused(&[&name, "element 9", "NaN"]);

    // Weights of another method, and a state that lies.
    let mut config = nano_config();
    config["quantization_config"] = json!({"quant_method": "gptq", "bits": 4});
    write_model(&bad, &config, &nano_weights(&nano_config()));
    quantize(&bad, &out, "--quant nf4").refused(&["gptq", "4-bit bitsandbytes"]);
    let path = out.join("model.safetensors");
    let mut file = std::fs::read(&path).unwrap();
    let word = b"\"blocksize\": 64";
    let at = file.windows(word.len()).position(|w| w == word).unwrap();
    file[at + word.len() - 2] = b'3';
    std::fs::write(&path, &file).unwrap();
    let line = format!("generate --model {} --prompt-ids 5 --max-new-tokens 1", out.display());
    plimsoll(&line).refused(&["4-bit tensor", "blocksize 34"]);
}

/// A head of its own may be quantized.
#[test]
fn the_head_is_a_choice() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = nano_config();
    config["tie_word_embeddings"] = json!(false);
    let model = dir.path().join("untied");
    write_model(&model, &config, &nano_weights(&config));
    let count = |options: &str, name: &str| {
        let out = dir.path().join(name);
        let line = format!("--quant nf4-dq --format json {options}");
        let result = quantize(&model, &out, &line).ok().json();
        result["quantized_tensors"].as_u64().unwrap()
    };
    assert_eq!((count("", "without"), count("--quant-head", "with")), (14, 15));
}

#[test]
fn matrices_that_a_checkpoint_left_dense_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let model = nano(dir.path());
    let out = dir.path().join("nf4");
    let run = || {
        let line = format!(
            "generate --model {} --prompt-ids 5,6,7 --max-new-tokens 4 --greedy --format json",
            out.display()
        );
        plimsoll(&line).ok()
    };
    quantize(&model, &out, "--quant nf4").ok();
    let plain = run();
    assert!(!plain.stderr.contains("not in four bits"), "{plain:?}");

    // One module as it was before.
    let name = "model.layers.0.mlp.up_proj.weight";
    let (dense, dense_data) = safetensors_parts(&nano_weights(&nano_config()));
    let file = out.join("model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: serde_json::Map<String, Value> =
        serde_json::from_slice(&bytes[8..start]).unwrap();
    header.retain(|key, _| !key.starts_with(name));
    let mut data = bytes[start..].to_vec();
    let range: Vec<usize> = serde_json::from_value(dense[name]["data_offsets"].clone()).unwrap();
    let mut entry = dense[name].clone();
    // What the module took is left as a gap that nothing names; so all data is written anew.
    let mut packed = Vec::new();
    for value in header.values_mut().filter(|v| v.get("data_offsets").is_some()) {
        let old: Vec<usize> = serde_json::from_value(value["data_offsets"].clone()).unwrap();
        let first = packed.len();
        packed.extend_from_slice(&data[old[0]..old[1]]);
        value["data_offsets"] = json!([first, packed.len()]);
    }
    data = packed;
    entry["data_offsets"] = json!([data.len(), data.len() + range[1] - range[0]]);
    data.extend_from_slice(&dense_data[range[0]..range[1]]);
    header.insert(name.into(), entry);
    std::fs::write(&file, safetensors(&Value::Object(header).to_string(), &data)).unwrap();

    let mixed = run();
    assert!(mixed.stderr.contains("1 matrices"), "{mixed:?}");
    assert!(mixed.stderr.contains(name), "{mixed:?}");
    // Quantized from the same values, it is the same model.
    assert_eq!(plain.json()["ids"], mixed.json()["ids"]);
}

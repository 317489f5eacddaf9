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

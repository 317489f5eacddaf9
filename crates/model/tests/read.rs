//! Reading: values, names, shapes, and every refusal by name.

mod common;

use common::{Gguf, TINY, f32_tensors, folder, read, safetensors, shared, tiny, weights};
use half::{bf16, f16};
use plimsoll_arch::{ConfigError, Family, RopeScaling};
use plimsoll_model::{Checkpoint, ModelError, TensorProblem, expected_tensors};
use serde_json::json;

fn blocks() -> Checkpoint {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/blocks.gguf");
    Checkpoint::open(path.as_ref()).unwrap()
}

/// Every ggml type, and the rows of query and key heads, to the bit.
#[test]
fn gguf_values_are_those_of_the_reference() {
    let checkpoint = blocks();
    let mut compared = 0;
    for name in checkpoint.tensor_names() {
        if let Some(tested) = name.strip_prefix("expected.") {
            let (ours, theirs) = (read(&checkpoint, tested), read(&checkpoint, name));
            let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert!(bits(&ours) == bits(&theirs), "{tested}: {ours:?} is not {theirs:?}");
            let mut rounded = vec![bf16::ZERO; ours.len()];
            checkpoint.read_bf16(tested, &mut rounded).unwrap();
            assert!(rounded.iter().zip(&ours).all(|(a, b)| *a == bf16::from_f32(*b)), "{tested}");
            compared += 1;
        }
    }
    assert_eq!(compared, 21);
}

#[test]
fn gguf_metadata_and_architecture() {
    let checkpoint = blocks();
    let arch = checkpoint.architecture();
    assert_eq!(arch.family, Family::Llama);
    assert_eq!((arch.rms_norm_eps, arch.rope_theta), (1e-5, 5e5), "decimals, not their float32");
    assert!(arch.tie_word_embeddings);
    assert_eq!(
        arch.rope_scaling,
        Some(RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        })
    );
    let warnings = checkpoint.validate().unwrap().unexpected;
    assert!(warnings.iter().all(|n| n.starts_with("expected.") || n.starts_with("random.")));

    let metadata = checkpoint.gguf_metadata().unwrap();
    assert_eq!(metadata.string("tokenizer.ggml.model").unwrap(), Some("gpt2"));
    assert_eq!(metadata.string("tokenizer.chat_template").unwrap(), Some("{{ messages }}"));
    assert_eq!(metadata.boolean("tokenizer.ggml.add_bos_token").unwrap(), Some(true));
    let tokens = metadata.strings("tokenizer.ggml.tokens").unwrap().unwrap();
    assert_eq!((tokens.len(), tokens[0], tokens[39]), (40, "t0", "\u{e9}"));
    assert_eq!(metadata.floats("tokenizer.ggml.scores").unwrap().unwrap()[3], 1.5);
    assert_eq!(metadata.integers("tokenizer.ggml.token_type").unwrap().unwrap(), [1; 40]);
    assert_eq!(metadata.strings("nothing").unwrap(), None);
    assert!(metadata.keys().any(|k| k == "llama.block_count"));
    let error = metadata.string("tokenizer.ggml.tokens").unwrap_err().to_string();
    assert!(error.contains("a list of string, expected a string"), "{error}");
}

#[test]
fn gguf_heads_of_one_pair_keep_their_order() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&Gguf::tiny().write(dir.path())).unwrap();
    checkpoint.validate().unwrap();
    for (name, shape, values) in weights(&tiny()) {
        assert_eq!(checkpoint.shape(&name), Some(shape.as_slice()), "{name}");
        assert_eq!(read(&checkpoint, &name), values, "{name}");
    }
}

#[test]
fn gguf_refusals() {
    let dir = tempfile::tempdir().unwrap();
    let open = |gguf: Gguf| Checkpoint::open(&gguf.write(dir.path())).err().expect("refused");
    let mut other = Gguf::tiny();
    other.keys[0] = Gguf::tiny().string("general.architecture", "gpt2").keys.pop().unwrap();
    other.keys[0].0 = "general.architecture".into();
    let error = open(other);
    assert!(matches!(error, ModelError::Config(ConfigError::Architecture { .. })), "{error}");
    assert!(error.to_string().contains("`gpt2` is not supported; supported: llama"), "{error}");
    for (gguf, part) in [
        (Gguf::tiny().u32("llama.expert_count", 8), "mixture of 8 experts"),
        (Gguf::tiny().u32("llama.rope.dimension_count", 1), "1 is not the width of a head, 2"),
        (Gguf::tiny().string("llama.rope.scaling.type", "yarn"), "`yarn` is not supported"),
        (Gguf::tiny().set("llama.block_count", 0), "num_hidden_layers"),
        (Gguf::tiny().set("llama.attention.head_count", 3), "3 does not divide 4"),
        (Gguf::tiny().string("llama.context_length", "x"), "is there twice"),
        (Gguf { version: 1, ..Gguf::tiny() }, "version 1"),
        (Gguf { version: 3u32.swap_bytes(), ..Gguf::tiny() }, "big-endian"),
        (Gguf::tiny().u32("general.alignment", 48), "alignment 48"),
    ] {
        let error = open(gguf).to_string();
        assert!(error.contains(part), "{part}: {error}");
    }
    for factor in [3.0, f32::NAN, f32::INFINITY] {
        let mut frequencies = Gguf::tiny();
        let data = factor.to_le_bytes().to_vec();
        frequencies.tensors.push(("rope_freqs.weight".into(), vec![1], 0, data));
        let error = open(frequencies).to_string();
        assert!(error.contains("other scalings are not supported"), "{error}");
    }

    let mut garbage = Gguf::tiny().bytes();
    garbage.extend([0; 64]);
    let path = dir.path().join("garbage.gguf");
    std::fs::write(&path, garbage).unwrap();
    let error = Checkpoint::open(&path).err().unwrap().to_string();
    assert!(error.contains("bytes follow the last tensor"), "{error}");
}

#[test]
fn half_precision_files() {
    let values: Vec<f32> = (0..7).map(|i| i as f32 * 0.3 - 1.0).collect();
    let half: Vec<u8> = values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect();
    let brain: Vec<u8> = values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
    let header = json!({
        "h": {"dtype": "F16", "shape": [7], "data_offsets": [0, 14]},
        "b": {"dtype": "BF16", "shape": [1, 7], "data_offsets": [14, 28]},
        "u": {"dtype": "U8", "shape": [2], "data_offsets": [28, 30]},
        "e": {"dtype": "F32", "shape": [0, 3], "data_offsets": [30, 30]},
    });
    let dir = folder(TINY, &safetensors(&header, &[half, brain, vec![1, 2]].concat()));
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.dtype("h"), Some("F16"));
    assert_eq!(checkpoint.total_bytes(), 30);
    let of = |f: fn(f32) -> f32| values.iter().map(|x| f(*x)).collect::<Vec<_>>();
    assert_eq!(read(&checkpoint, "h"), of(|x| f16::from_f32(x).to_f32()));
    assert_eq!(read(&checkpoint, "b"), of(|x| bf16::from_f32(x).to_f32()));
    assert!(read(&checkpoint, "e").is_empty());
    let error = checkpoint.read_f32("u", &mut [0.0; 2]).unwrap_err();
    assert!(matches!(error, ModelError::UnsupportedDtype { .. }), "{error}");
    let error = checkpoint.read_f32("h", &mut [0.0; 6]).unwrap_err();
    assert!(matches!(error, ModelError::WrongLength { elements: 7, given: 6, .. }), "{error}");
    let error = checkpoint.read_f32("x", &mut []).unwrap_err();
    assert!(matches!(error, ModelError::NoSuchTensor { .. }), "{error}");
}

/// A tensor that several threads read at a time.
#[test]
fn large_tensors_are_read_in_order() {
    let n = (1 << 20) + 5;
    let mut data: Vec<u8> = (0..n).flat_map(|i| bf16::from_f32(i as f32).to_le_bytes()).collect();
    let header = json!({"b": {"dtype": "BF16", "shape": [n], "data_offsets": [0, 2 * n]}});
    let open = |data: &[u8]| {
        let dir = folder(TINY, &safetensors(&header, data));
        (Checkpoint::open(dir.path()).unwrap(), dir)
    };
    let (checkpoint, _dir) = open(&data);
    let exact = |(i, x): (usize, &f32)| *x == bf16::from_f32(i as f32).to_f32();
    assert!(read(&checkpoint, "b").iter().enumerate().all(exact));
    let mut beyond = [0.0; 2];
    let error = checkpoint.read_f32_from("b", n - 1, &mut beyond).unwrap_err();
    assert!(matches!(error, ModelError::WrongLength { .. }), "{error}");
    // Of several, the first is named.
    for place in [n - 1, n - 2, 700_000] {
        data[2 * place..2 * place + 2].copy_from_slice(&bf16::NAN.to_le_bytes());
        let (checkpoint, _dir) = open(&data);
        let error = checkpoint.read_bf16("b", &mut vec![bf16::ZERO; n]).unwrap_err();
        let named = matches!(error, ModelError::NonFinite { index, .. } if index == place);
        assert!(named, "{error}");
    }
}

#[test]
fn nan_is_named_with_its_place() {
    let mut tensors = weights(&tiny());
    let (name, _, values) = &mut tensors[2];
    let name = name.clone();
    values[5] = f32::NAN;
    let (header, data) = f32_tensors(&tensors);
    let dir = folder(TINY, &safetensors(&header, &data));
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let mut out = vec![0.0; tensors[2].2.len()];
    let error = checkpoint.read_f32(&name, &mut out).unwrap_err();
    assert!(matches!(error, ModelError::NonFinite { index: 5, .. }), "{error}");
    let mut out = vec![bf16::ZERO; out.len()];
    let error = checkpoint.read_bf16(&name, &mut out).unwrap_err();
    assert!(error.to_string().contains(&format!("`{name}` holds NaN at element 5")), "{error}");
    assert_eq!(plimsoll_model::first_non_finite(&[1.0, f32::INFINITY]), Some(1));
    assert_eq!(plimsoll_model::first_non_finite(&[f32::MAX; 5000]), None);
    assert_eq!(plimsoll_model::first_non_finite_bf16(&[bf16::MAX, bf16::NAN]), Some(1));
}

#[test]
fn validation_names_every_problem() {
    let mut tensors = weights(&tiny());
    tensors.retain(|t| t.0 != "model.norm.weight");
    for (name, shape, _) in &mut tensors {
        if name.ends_with("q_proj.weight") {
            *shape = vec![2, 8];
        }
    }
    let zeros = |n: usize| vec![0.0; n];
    tensors.push(("model.layers.0.self_attn.q_proj.bias".into(), vec![4], zeros(4)));
    let (header, data) = f32_tensors(&tensors);
    let dir = folder(TINY, &safetensors(&header, &data));
    let error = Checkpoint::open(dir.path()).unwrap().validate().unwrap_err();
    let ModelError::Mismatch { problems, .. } = &error else { panic!("{error}") };
    assert_eq!(problems.len(), 3, "{error}");
    let shape = TensorProblem::Shape {
        tensor: "model.layers.0.self_attn.q_proj.weight".into(),
        found: vec![2, 8],
        expected: vec![4, 4],
    };
    assert!(problems.contains(&shape));
    let text = error.to_string();
    assert!(text.contains("`model.norm.weight` [4] is missing"), "{text}");
    assert!(text.contains("q_proj.bias` is no part of this architecture"), "{text}");

    let mut tensors = weights(&tiny());
    tensors.push(("model.layers.0.self_attn.rotary_emb.inv_freq".into(), vec![1], zeros(1)));
    tensors.push(("value_head.weight".into(), vec![4], zeros(4)));
    let (header, data) = f32_tensors(&tensors);
    let dir = folder(TINY, &safetensors(&header, &data));
    let validation = Checkpoint::open(dir.path()).unwrap().validate().unwrap();
    assert_eq!(validation.unexpected, ["value_head.weight"]);
}

#[test]
fn lying_headers_are_refused() {
    let info = |dtype: &str, shape: serde_json::Value, offsets: serde_json::Value| json!({"dtype": dtype, "shape": shape, "data_offsets": offsets});
    let good = || info("F32", json!([2]), json!([0, 8]));
    for (header, data, part) in [
        (json!({"a": info("F32", json!([2]), json!([0, 16]))}), 16, "needs 8"),
        (json!({"a": info("F32", json!([2]), json!([8, 16]))}), 8, "bytes 8 to 16 of 8"),
        (json!({"a": info("F32", json!([2]), json!([8, 0]))}), 8, "bytes 8 to 0"),
        (json!({"a": info("F32", json!([1u64 << 60, 1 << 20]), json!([0, 8]))}), 8, "too large"),
        (json!({"a": info("F32", json!([1u64 << 60]), json!([0, 8]))}), 8, "needs 46116860184"),
        (json!({"a": info("F32", json!([-2]), json!([0, 8]))}), 8, "header"),
        (json!({"a": info("Q9", json!([2]), json!([0, 8]))}), 8, "unknown type `Q9`"),
        (json!({"a": good(), "b": info("F32", json!([2]), json!([4, 12]))}), 12, "overlaps"),
        (json!({"a": good(), "b": info("F32", json!([2]), json!([12, 20]))}), 20, "gap"),
        (json!({"a": good()}), 9, "1 bytes follow"),
        (
            json!({"a": info("F32", json!([1, 1, 1, 1, 1, 1, 1, 1, 1]), json!([0, 4]))}),
            4,
            "at most 8",
        ),
        (json!([]), 0, "header"),
    ] {
        let dir = folder(TINY, &safetensors(&header, &vec![0; data]));
        let error = Checkpoint::open(dir.path()).err().expect("refused").to_string();
        assert!(error.contains(part), "{header}: {error}");
    }
    let twice = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},
        "a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#;
    let mut file = (twice.len() as u64).to_le_bytes().to_vec();
    file.extend(twice.as_bytes());
    file.extend([0; 8]);
    let dir = folder(TINY, &file);
    let error = Checkpoint::open(dir.path()).err().unwrap().to_string();
    assert!(error.contains("`a` is there twice"), "{error}");
    let dir = folder(TINY, &(1u64 << 60).to_le_bytes());
    assert!(
        Checkpoint::open(dir.path()).err().unwrap().to_string().contains("1152921504606846976")
    );
}

#[test]
fn folders() {
    let dir = tempfile::tempdir().unwrap();
    let refused = || Checkpoint::open(dir.path()).err().expect("refused").to_string();
    assert!(refused().contains("no config.json"));
    std::fs::write(dir.path().join("config.json"), TINY).unwrap();
    assert!(refused().contains("no *.safetensors"));
    let (header, data) = f32_tensors(&weights(&tiny()));
    let file = safetensors(&header, &data);
    std::fs::write(dir.path().join("weights.safetensors"), &file).unwrap();
    Checkpoint::open(dir.path()).unwrap().validate().unwrap();
    Checkpoint::open(&dir.path().join("weights.safetensors")).unwrap().validate().unwrap();
    std::fs::write(dir.path().join("more.safetensors"), &file).unwrap();
    assert!(refused().contains("2 *.safetensors"));

    let index = dir.path().join("model.safetensors.index.json");
    let place = |shard: &str| {
        let map: serde_json::Map<_, _> =
            weights(&tiny()).into_iter().map(|(name, _, _)| (name, json!(shard))).collect();
        std::fs::write(&index, json!({"metadata": {}, "weight_map": map}).to_string()).unwrap();
    };
    place("weights.safetensors");
    Checkpoint::open(dir.path()).unwrap().validate().unwrap();
    place("absent.safetensors");
    assert!(refused().contains("absent.safetensors"));
    place("../weights.safetensors");
    assert!(refused().contains("not a plain file name"));
    std::fs::write(&index, r#"{"weight_map": {"x": "weights.safetensors"}}"#).unwrap();
    assert!(refused().contains("tensor `x` is not in the file"));
    let both = r#"{"weight_map": {"lm_head.weight": "weights.safetensors",
        "model.norm.weight": "more.safetensors"}}"#;
    std::fs::write(&index, both).unwrap();
    assert!(refused().contains("is there twice"));

    std::fs::write(dir.path().join("model.safetensors"), b"").unwrap();
    assert!(refused().contains("the file is empty"));
    let error = Checkpoint::open(&dir.path().join("nothing")).err().unwrap();
    assert!(matches!(error, ModelError::Io { .. }), "{error}");
}

#[test]
fn published_models() {
    let Some(shared) = shared() else { return };
    for folder in [
        "golden/llama-micro",
        "golden/qwen2-micro-tied",
        "golden/qlora/quantized",
        "models/stories260K-hf",
    ] {
        let checkpoint = Checkpoint::open(&shared.join(folder)).unwrap();
        assert!(checkpoint.validate().unwrap().unexpected.is_empty(), "{folder}");
        let arch = checkpoint.architecture();
        let mut elements = 0;
        for (name, _) in expected_tensors(arch) {
            elements += read(&checkpoint, &name).len();
        }
        assert_eq!(elements, arch.parameters(), "{folder}");
    }
    let stories = Checkpoint::open(&shared.join("models/stories260K-hf")).unwrap();
    assert_eq!(stories.architecture().eos_token_ids, [1, 2], "of generation_config.json");
}

//! `config.json`: both forms, the four families, and every refusal by name.

use plimsoll_arch::{Architecture, ConfigError, DType, Family, RopeScaling};
use proptest::prelude::*;
use serde_json::{Value, json};

fn llama() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
        "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    })
}

fn of(family: Family) -> Value {
    let mut config = llama();
    config["architectures"] = json!([family.class_name()]);
    config["model_type"] = json!(family.model_type());
    config
}

fn read(config: &Value) -> Result<Architecture, ConfigError> {
    Architecture::from_config_json(&config.to_string(), "test")
}

/// The message of the refusal after setting `key` to `value`.
fn refusal(mut config: Value, key: &str, value: Value) -> String {
    config[key] = value;
    read(&config).expect_err(key).to_string()
}

#[test]
fn both_forms_of_rope() {
    let scaling = json!({"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64, "rope_type": "llama3"});
    let mut old = llama();
    old["rope_theta"] = json!(500000.0);
    old["rope_scaling"] = scaling.clone();
    let mut new = llama();
    new.as_object_mut().unwrap().remove("rope_theta");
    new["rope_parameters"] = scaling;
    new["rope_parameters"]["rope_theta"] = json!(500000);
    let arch = read(&old).unwrap();
    assert_eq!(arch, read(&new).unwrap());
    assert_eq!(arch.rope_theta, 5e5);
    assert!(matches!(
        arch.rope_scaling,
        Some(RopeScaling::Llama3 { original_max_position_embeddings: 64, .. })
    ));

    let mut linear = llama();
    linear["rope_scaling"] = json!({"type": "linear", "factor": 2.0});
    assert_eq!(read(&linear).unwrap().rope_scaling, Some(RopeScaling::Linear { factor: 2.0 }));
    linear["rope_scaling"] = json!({"rope_type": "default"});
    assert_eq!(read(&linear).unwrap().rope_scaling, None);
}

#[test]
fn defaults_are_those_of_transformers() {
    let arch = read(&llama()).unwrap();
    assert_eq!((arch.head_dim, arch.bos_token_id), (16, Some(1)));
    assert_eq!(arch.eos_token_ids, [2]);
    assert!(!arch.tie_word_embeddings && !arch.attention_bias && !arch.qk_norm);
    let mistral = read(&of(Family::Mistral)).unwrap();
    assert_eq!((mistral.sliding_window, mistral.window(0)), (Some(4096), Some(4096)));
    let mut none = of(Family::Mistral);
    none["sliding_window"] = Value::Null;
    assert_eq!(read(&none).unwrap().sliding_window, None);
    let qwen2 = read(&of(Family::Qwen2)).unwrap();
    assert!(qwen2.attention_bias && qwen2.eos_token_ids.is_empty());
    let qwen3 = read(&of(Family::Qwen3)).unwrap();
    assert!(qwen3.qk_norm && qwen3.head_dim == 128);
}

#[test]
fn windows_of_qwen() {
    let mut config = of(Family::Qwen2);
    config["sliding_window"] = json!(32);
    config["max_window_layers"] = json!(1);
    assert_eq!(read(&config).unwrap().sliding_window, None, "not used");
    config["use_sliding_window"] = json!(true);
    let arch = read(&config).unwrap();
    assert_eq!((arch.window(0), arch.window(1)), (None, Some(32)));
    let again = Architecture::from_config_json(&arch.to_config_json(DType::F32), "test").unwrap();
    assert_eq!(again, arch);
    config["max_window_layers"] = json!(28);
    assert_eq!(read(&config).unwrap().sliding_window, None, "no layer has it");
    config["layer_types"] = json!(["full_attention", "sliding_attention"]);
    assert_eq!(read(&config).unwrap().first_windowed_layer, 1);
    let types = json!(["sliding_attention", "full_attention"]);
    assert!(refusal(config, "layer_types", types).contains("layer_types"));
}

#[test]
fn end_tokens() {
    for (value, ids) in [(json!(7), vec![7]), (json!([1, 2]), vec![1, 2]), (Value::Null, vec![])] {
        let mut config = llama();
        config["eos_token_id"] = value;
        let arch = read(&config).unwrap();
        assert_eq!(arch.eos_token_ids, ids);
        let text = arch.to_config_json(DType::F32);
        assert_eq!(Architecture::from_config_json(&text, "test").unwrap(), arch);
    }
    assert!(refusal(llama(), "eos_token_id", json!(-1)).contains("eos_token_id"));
}

#[test]
fn refusals_name_the_key_and_the_value() {
    let gpt2 = refusal(llama(), "architectures", json!(["GPT2LMHeadModel"]));
    assert!(gpt2.contains("architecture `GPT2LMHeadModel` is not supported"), "{gpt2}");
    assert!(gpt2.contains("LlamaForCausalLM, MistralForCausalLM"), "{gpt2}");
    for (key, value) in [
        ("model_type", json!("qwen2")),
        ("model_type", json!(3)),
        ("hidden_size", json!(0)),
        ("hidden_size", json!(-64)),
        ("hidden_size", json!(64.5)),
        ("hidden_size", json!(1u64 << 60)),
        ("num_hidden_layers", json!(4097)),
        ("num_attention_heads", json!(0)),
        ("num_attention_heads", json!(5)),
        ("num_key_value_heads", json!(3)),
        ("num_key_value_heads", json!(8)),
        ("head_dim", json!(15)),
        ("head_dim", json!(1 << 23)),
        ("vocab_size", json!("256")),
        ("rms_norm_eps", json!(0)),
        ("rope_theta", json!(-1.0)),
        ("hidden_act", json!("gelu")),
        ("mlp_bias", json!(true)),
        ("attention_bias", json!(true)),
        ("attention_dropout", json!(0.1)),
        ("partial_rotary_factor", json!(0.5)),
        ("tie_word_embeddings", json!("yes")),
    ] {
        let message = refusal(llama(), key, value);
        assert!(message.contains(&format!("`{key}` = ")), "{key}: {message}");
    }
    for kind in ["yarn", "dynamic", "longrope"] {
        let scaling = json!({"rope_type": kind, "factor": 4.0});
        let message = refusal(llama(), "rope_scaling", scaling);
        assert!(message.contains("rope_scaling.rope_type"), "{message}");
        assert!(message.contains(kind), "{message}");
    }
    let ramp = json!({"rope_type": "llama3", "factor": 8, "low_freq_factor": 4,
        "high_freq_factor": 4, "original_max_position_embeddings": 8192});
    assert!(refusal(llama(), "rope_scaling", ramp).contains("high_freq_factor"));
    let mut config = llama();
    config.as_object_mut().unwrap().remove("vocab_size");
    assert!(read(&config).unwrap_err().to_string().contains("lacks `vocab_size`"));
    assert!(matches!(read(&json!([1])), Err(ConfigError::Json { .. })));
}

#[test]
fn the_largest_sizes_do_not_overflow() {
    let mut config = llama();
    for key in ["hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"] {
        config[key] = json!(1 << 24);
    }
    config["num_hidden_layers"] = json!(4096);
    config["num_attention_heads"] = json!(1 << 12);
    config["num_key_value_heads"] = json!(1 << 12);
    assert!(read(&config).unwrap_err().to_string().contains("`parameters`"));
}

fn shared() -> Option<std::path::PathBuf> {
    let fixed = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared");
    let path = std::env::var_os("PLIMSOLL_SHARED").unwrap_or_else(|| fixed.into());
    let path = std::path::PathBuf::from(path);
    path.is_dir().then_some(path)
}

#[test]
fn files_that_transformers_wrote() {
    let Some(shared) = shared() else {
        eprintln!("skipped: no shared fixtures");
        return;
    };
    for (file, family, parameters) in [
        ("golden/llama-micro", Family::Llama, 131_392),
        ("golden/llama3-rope-micro", Family::Llama, 131_392),
        ("golden/qwen2-micro-tied", Family::Qwen2, 115_264),
        ("models/smollm2-135m-instruct", Family::Llama, 134_515_008),
        ("models/stories260K-hf", Family::Llama, 260_032),
    ] {
        let text = std::fs::read_to_string(shared.join(file).join("config.json")).unwrap();
        let arch = Architecture::from_config_json(&text, file).unwrap();
        assert_eq!((arch.family, arch.parameters()), (family, parameters), "{file}");
    }
}

fn any_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<i64>().prop_map(|n| json!(n)),
        any::<u64>().prop_map(|n| json!(n)),
        any::<f64>().prop_map(|x| json!(x)),
        (0u64..300).prop_map(|n| json!(n)),
        any::<bool>().prop_map(|b| json!(b)),
        ".{0,8}".prop_map(|s| json!(s)),
        Just(Value::Null),
        Just(json!([])),
        Just(json!({"rope_type": "llama3", "factor": 2})),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever is accepted is within the limits and survives a round trip.
    #[test]
    fn mutated_configs(
        family in prop::sample::select(Family::ALL.to_vec()),
        changes in prop::collection::vec((0usize..24, any_value()), 0..4),
    ) {
        const KEYS: [&str; 24] = ["hidden_size", "intermediate_size", "num_hidden_layers",
            "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
            "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling",
            "rope_parameters", "sliding_window", "use_sliding_window", "max_window_layers",
            "layer_types", "bos_token_id", "eos_token_id", "tie_word_embeddings", "hidden_act",
            "mlp_bias", "attention_bias", "architectures", "model_type"];
        let mut config = of(family);
        for (key, value) in changes {
            config[KEYS[key]] = value;
        }
        if let Ok(arch) = read(&config) {
            prop_assert!(arch.parameters() <= plimsoll_arch::MAX_PARAMETERS);
            let text = arch.to_config_json(DType::F32);
            prop_assert_eq!(Architecture::from_config_json(&text, "test").unwrap(), arch);
        }
    }

    #[test]
    fn any_text(text in ".{0,200}") {
        let _ = Architecture::from_config_json(&text, "test");
    }
}

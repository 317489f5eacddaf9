//! Presets: known sizes, names in every spelling, the time of a lookup.

use plimsoll_arch::{Architecture, ConfigError, DType, preset, preset_hub_id, preset_names};

/// Parameters of the published checkpoints, a tied head counted once.
const PARAMETERS: &[(&str, usize)] = &[
    ("qwen1.5-0.5b", 463_987_712),
    ("llama-2-7b", 6_738_415_616),
    ("llama-3-8b", 8_030_261_248),
    ("llama-3-8b-instruct", 8_030_261_248),
    ("llama-3-70b", 70_553_706_496),
    ("llama-3.1-8b", 8_030_261_248),
    ("llama-3.1-70b", 70_553_706_496),
    ("llama-3.2-1b", 1_235_814_400),
    ("llama-3.2-1b-instruct", 1_235_814_400),
    ("llama-3.2-3b", 3_212_749_824),
    ("llama-3.3-70b-instruct", 70_553_706_496),
    ("tinyllama-1.1b", 1_100_048_384),
    ("tinyllama-1.1b-chat", 1_100_048_384),
    ("mistral-7b-v0.1", 7_241_732_096),
    ("mistral-7b-v0.3", 7_248_023_552),
    ("mistral-7b-instruct-v0.2", 7_241_732_096),
    ("qwen2.5-0.5b", 494_032_768),
    ("qwen2.5-1.5b", 1_543_714_304),
    ("qwen2.5-1.5b-instruct", 1_543_714_304),
    ("qwen2.5-3b", 3_085_938_688),
    ("qwen2.5-7b", 7_615_616_512),
    ("qwen2.5-7b-instruct", 7_615_616_512),
    ("qwen2.5-14b", 14_770_033_664),
    ("qwen2.5-14b-instruct", 14_770_033_664),
    ("qwen2.5-32b", 32_763_876_352),
    ("qwen2.5-32b-instruct", 32_763_876_352),
    ("qwen2.5-72b", 72_706_203_648),
    ("qwen2.5-72b-instruct", 72_706_203_648),
    ("qwen3-0.6b", 596_049_920),
    ("qwen3-1.7b", 1_720_574_976),
    ("qwen3-4b", 4_022_468_096),
    ("qwen3-8b", 8_190_735_360),
    ("qwen3-14b", 14_768_307_200),
    ("qwen3-32b", 32_762_123_264),
    ("smollm2-135m", 134_515_008),
    ("smollm2-135m-instruct", 134_515_008),
    ("smollm2-360m", 361_821_120),
    ("smollm2-1.7b", 1_711_376_384),
    ("plimsoll-tiny", 4_558_080),
];

#[test]
fn parameters_are_those_of_the_published_models() {
    assert_eq!(preset_names().len(), PARAMETERS.len());
    for &(name, parameters) in PARAMETERS {
        let arch = preset(name).unwrap();
        assert_eq!(arch.name, name);
        assert_eq!(arch.parameters(), parameters, "{name}");
        let text = arch.to_config_json(DType::Bf16);
        assert_eq!(Architecture::from_config_json(&text, name).unwrap(), arch);
    }
}

#[test]
fn names_in_any_spelling() {
    for (given, canonical) in [
        ("Llama-3-8B", "llama-3-8b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("Meta-Llama-3-8B", "llama-3-8b"),
        ("llama_3_8b", "llama-3-8b"),
        ("meta-llama/llama-3.1-8b", "llama-3.1-8b"),
        ("Llama-2-7b-hf", "llama-2-7b"),
        ("TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b-chat"),
        ("tiny-llama-1.1b", "tinyllama-1.1b"),
        ("mistral-7b", "mistral-7b-v0.1"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b-instruct"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m-instruct"),
    ] {
        assert_eq!(preset(given).unwrap().name, canonical, "{given}");
    }
    assert_eq!(preset_hub_id("qwen3-8b"), Some("Qwen/Qwen3-8B"));
    assert_eq!(preset_hub_id("plimsoll-tiny"), None);
    assert!(preset("somebody/llama-3-8b").is_err(), "an owner must match");
}

#[test]
fn aliases_are_unambiguous() {
    let names = preset_names();
    for name in &names {
        assert_eq!(preset(name).unwrap().name, *name);
        if let Some(hub) = preset_hub_id(name) {
            assert_eq!(preset(hub).unwrap().name, *name);
        }
    }
}

#[test]
fn unknown_names_get_the_closest() {
    let Err(ConfigError::UnknownPreset { closest, .. }) = preset("lama-3-8b") else { panic!() };
    assert_eq!(closest[0], "llama-3-8b");
    let message = preset("qwen-2.5-7b").unwrap_err().to_string();
    assert!(message.contains("qwen2.5-7b"), "{message}");
    assert!(preset("").is_err());
    assert!(preset(&"x/".repeat(1 << 20)).is_err());
}

#[test]
fn lookup_is_fast() {
    preset("llama-3-8b").unwrap();
    let start = std::time::Instant::now();
    for _ in 0..100 {
        preset("meta-llama/Llama-3.3-70B-Instruct").unwrap();
    }
    let each = start.elapsed() / 100;
    assert!(each < std::time::Duration::from_millis(1), "{each:?}");
}

//! `plimsoll inspect`: what a model is.

use clap::Args;
use plimsoll_arch::{Architecture, DType};
use serde_json::{Value, json};

use crate::exit::{Outcome, Stop};
use crate::model_source::open_architecture;
use crate::{Format, units};

#[derive(Debug, Args)]
pub struct InspectArgs {
    /// A preset (llama-3-8b), a model directory, a .gguf file, or org/name.
    #[arg(long)]
    pub model: String,
    #[arg(long, value_enum, default_value = "table")]
    pub format: Format,
}

pub fn run(args: &InspectArgs) -> Outcome {
    let arch = open_architecture(&args.model)?;
    match args.format {
        Format::Json => {
            let text = serde_json::to_string_pretty(&describe(&arch));
            outln!("{}", text.map_err(|e| Stop::Failed(e.to_string()))?);
        }
        Format::Table => out!("{}", table(&arch)),
    }
    Ok(())
}

fn loaded_bytes(arch: &Architecture, dtype: DType) -> u64 {
    arch.parameters() as u64 * dtype.bytes() as u64
}

/// Keys and values of one token in all layers.
fn kv_bytes(arch: &Architecture, dtype: DType) -> u64 {
    (2 * arch.num_hidden_layers * arch.kv_width() * dtype.bytes()) as u64
}

fn describe(arch: &Architecture) -> Value {
    let by = |f: fn(&Architecture, DType) -> u64| json!({ "f32": f(arch, DType::F32), "bf16": f(arch, DType::Bf16) });
    let mut value = json!({
        "model": arch.name,
        "architecture": arch.family,
        "parameters": arch.parameters(),
        "bytes": by(loaded_bytes),
        "kv_cache_bytes_per_token": by(kv_bytes),
    });
    if let (Some(out), Ok(Value::Object(fields))) =
        (value.as_object_mut(), serde_json::to_value(arch))
    {
        for (key, field) in fields {
            if !["name", "family"].contains(&key.as_str()) {
                out.insert(key, field);
            }
        }
    }
    value
}

fn table(arch: &Architecture) -> String {
    let mut text = format!("{}\n", arch.name);
    let mut row = |name: &str, value: String| text.push_str(&format!("  {name:<26}{value}\n"));
    row("architecture", format!("{:?}", arch.family).to_lowercase());
    row(
        "parameters",
        format!("{} ({})", arch.parameters(), units::count(arch.parameters() as u64)),
    );
    row("hidden_size", arch.hidden_size.to_string());
    row("intermediate_size", arch.intermediate_size.to_string());
    row("num_hidden_layers", arch.num_hidden_layers.to_string());
    row(
        "heads (query, key-value)",
        format!("{}, {} of {}", arch.num_attention_heads, arch.num_key_value_heads, arch.head_dim),
    );
    row("vocab_size", arch.vocab_size.to_string());
    row("max_position_embeddings", arch.max_position_embeddings.to_string());
    row("rope_theta", arch.rope_theta.to_string());
    if let Some(scaling) = &arch.rope_scaling {
        row("rope_scaling", format!("{scaling:?}"));
    }
    if let Some(window) = arch.sliding_window {
        row("sliding_window", window.to_string());
    }
    row("rms_norm_eps", format!("{:e}", arch.rms_norm_eps));
    row("tie_word_embeddings", arch.tie_word_embeddings.to_string());
    row("attention_bias", arch.attention_bias.to_string());
    row("qk_norm", arch.qk_norm.to_string());
    for dtype in [DType::F32, DType::Bf16] {
        row(&format!("weights in {dtype}"), units::bytes(loaded_bytes(arch, dtype)));
    }
    for dtype in [DType::F32, DType::Bf16] {
        row(&format!("KV cache a token in {dtype}"), units::bytes(kv_bytes(arch, dtype)));
    }
    text
}

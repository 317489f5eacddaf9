//! `plimsoll inspect`: what a model is.

use clap::Args;
use plimsoll_arch::{Architecture, DType};
use plimsoll_cuda::CudaTarget;
use plimsoll_infer::InferPlan;
use plimsoll_program::{
    AdamW, AdamW8bit, Class, Lora, Method, Optimizer, Quant, Recipe, RecipeError, Sgd,
};
use plimsoll_quant::Format4bit;
use plimsoll_train::TrainPlan;
use serde_json::{Value, json};

use crate::exit::{Outcome, Stop};
use crate::model_source::open_architecture;
use crate::{Format, units};

#[derive(Debug, Args)]
pub struct InspectArgs {
    /// A preset (llama-3-8b), a model directory, a .gguf file, or org/name.
    #[arg(long)]
    pub model: String,
    /// Positions of the KV cache and tokens of a training sequence [default: 2048, or what
    /// the model was made for]
    #[arg(long)]
    pub seq: Option<usize>,
    /// Rank of the adapters of a fine-tune.
    #[arg(long, default_value_t = 16)]
    pub lora_rank: usize,
    #[arg(long, value_enum, default_value = "table")]
    pub format: Format,
}

/// Tokens where the user names none.
const DEFAULT_SEQ: usize = 2048;

pub fn run(args: &InspectArgs) -> Outcome {
    let arch = open_architecture(&args.model)?;
    let seq = args.seq.unwrap_or(arch.max_position_embeddings.min(DEFAULT_SEQ));
    let generating = generating(&arch, seq)?;
    let training = training(&arch, seq, args.lora_rank)?;
    match args.format {
        Format::Json => {
            let mut value = describe(&arch);
            value["seq"] = json!(seq);
            value["generate"] = Value::Array(generating.iter().map(Generating::json).collect());
            value["fine_tune"] = Value::Array(training.iter().map(Training::json).collect());
            let text = serde_json::to_string_pretty(&value);
            outln!("{}", text.map_err(|e| Stop::Failed(e.to_string()))?);
        }
        Format::Table => {
            out!("{}", table(&arch));
            outln!("\nOn a GPU, one sequence of {seq} positions:\n");
            outln!("  {:<12}{:>14}{:>18}", "weights", "loaded", "peak, generating");
            for g in &generating {
                let (loaded, peak) = (units::bytes(g.loaded), units::bytes(g.peak));
                outln!("  {:<12}{loaded:>14}{peak:>18}", g.name);
            }
            outln!(
                "\nFine-tuning in bf16, one sequence of {seq} tokens, adapters of rank {}:\n",
                args.lora_rank
            );
            outln!("  {:<12}{:>14}{:>14}{:>14}", "method", "adamw", "adamw8bit", "sgd");
            for methods in training.chunks(OPTIMIZERS.len()) {
                out!("  {:<12}", methods[0].method);
                for t in methods {
                    out!("{:>14}", units::bytes(t.peak));
                }
                outln!("");
            }
        }
    }
    Ok(())
}

/// The memory of a model that generates, in bytes.
struct Generating {
    name: &'static str,
    /// Weights, scales and all.
    loaded: u64,
    /// Weights, KV cache and activations: the slab.
    peak: u64,
}

impl Generating {
    fn json(&self) -> Value {
        json!({ "weights": self.name, "loaded_bytes": self.loaded, "peak_bytes": self.peak })
    }
}

/// For every form of the weights.
fn generating(arch: &Architecture, seq: usize) -> Result<Vec<Generating>, Stop> {
    let four_bits = |format: Format4bit| {
        let quant = Quant { codebook: format.codebook, double: format.double, head: false };
        (format.name(), DType::Bf16, Some(quant))
    };
    let mut forms = vec![("fp32", DType::F32, None), ("bf16", DType::Bf16, None)];
    forms.extend(
        ["fp4", "fp4-dq", "nf4", "nf4-dq"]
            .map(|name| four_bits(name.parse().expect("these are formats"))),
    );
    let mut rows = Vec::new();
    for (name, precision, quant) in forms {
        let recipe = Recipe { quant, ..Recipe::infer(precision, 1, seq) };
        let plan = InferPlan::new(arch, &recipe, &CudaTarget).map_err(Stop::input)?;
        let tensors = plan.decode.0.tensors.iter();
        let loaded = tensors.filter(|t| t.class == Class::Weight).map(|t| t.bytes()).sum();
        rows.push(Generating { name, loaded, peak: plan.slab_bytes() });
    }
    Ok(rows)
}

/// The memory of a fine-tune, in bytes.
struct Training {
    method: &'static str,
    optimizer: &'static str,
    peak: u64,
}

impl Training {
    fn json(&self) -> Value {
        json!({
            "method": self.method,
            "optimizer": self.optimizer,
            "peak_bytes": self.peak,
        })
    }
}

const OPTIMIZERS: [&str; 3] = ["adamw", "adamw8bit", "sgd"];

/// For every method and optimizer, optimizers fastest.
fn training(arch: &Architecture, seq: usize, rank: usize) -> Result<Vec<Training>, Stop> {
    let nf4_dq: Format4bit = "nf4-dq".parse().map_err(Stop::input)?;
    let quant = Quant { codebook: nf4_dq.codebook, double: nf4_dq.double, head: false };
    let methods = [
        ("full", Method::Full, None),
        ("lora", Method::Lora, None),
        ("qlora", Method::Lora, Some(quant)),
    ];
    let mut rows = Vec::new();
    for (method, kind, quant) in methods {
        for optimizer in OPTIMIZERS {
            let lora = Lora { rank, alpha: 2.0 * rank as f32, ..Lora::default() };
            let recipe = Recipe {
                method: kind,
                lora: (kind == Method::Lora).then_some(lora),
                quant,
                optimizer: match optimizer {
                    "adamw" => Optimizer::AdamW(AdamW::default()),
                    "adamw8bit" => Optimizer::AdamW8bit(AdamW8bit::default()),
                    _ => {
                        Optimizer::Sgd(Sgd { momentum: 0.0, weight_decay: 0.0, state: DType::F32 })
                    }
                },
                ..Recipe::full(DType::Bf16, 1, seq)
            };
            match TrainPlan::new(arch, &recipe, &CudaTarget) {
                Ok(plan) => rows.push(Training { method, optimizer, peak: plan.slab_bytes() }),
                // A tiny model has no room for the rank: its table ends at full.
                Err(plimsoll_train::PlanError::Recipe(RecipeError::Rank { .. })) => {}
                Err(e) => return Err(Stop::input(e)),
            }
        }
    }
    Ok(rows)
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

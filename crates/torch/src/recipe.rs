//! What decides the memory of a run in the PyTorch stack, in the stack's own words.

use std::fmt;
use std::str::FromStr;

use plimsoll_arch::Architecture;
use serde::Serialize;
use thiserror::Error;

/// A combination that the stack refuses, or a value that is no value.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RecipeError {
    #[error("{what} must be at least 1")]
    Zero { what: &'static str },
    #[error("--{option} {value}: {problem}")]
    Value { option: &'static str, value: String, problem: String },
    #[error("{a} and {b} do not go together: {why}")]
    Conflict { a: String, b: String, why: &'static str },
}

/// A version such as 4.40.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

impl Serialize for Version {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for Version {
    type Err = String;

    fn from_str(text: &str) -> Result<Version, String> {
        let mut parts = text.trim().trim_start_matches('v').split('.');
        let mut number = || {
            let digits = parts.next().unwrap_or("0");
            digits.parse().map_err(|_| format!("`{text}` is no version: give one such as 4.40"))
        };
        Ok(Version(number()?, number()?))
    }
}

/// Which parameters are trained.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    Full,
    Lora(Lora),
    /// Forward only, with a KV cache: `generate`.
    Infer,
}

/// `peft.LoraConfig`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Lora {
    pub r: u64,
    pub target_modules: Vec<String>,
    pub lora_dropout: bool,
    /// Adapters in float32 whatever the model is in (`autocast_adapter_dtype`).
    pub float32: bool,
    /// Trained in full beside the adapters.
    pub modules_to_save: Vec<String>,
}

/// `BitsAndBytesConfig(load_in_4bit=True)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Bnb4bit {
    pub double_quant: bool,
    /// `prepare_model_for_kbit_training`: what is not quantized goes to float32.
    pub prepare: bool,
}

/// Types of weights and of compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    Float32,
    /// Weights, gradients and optimizer state in 16 bits.
    Pure16,
    /// Weights in float32 (or, with `weights16`, in 16 bits), products under `torch.autocast`.
    Autocast16 {
        weights16: bool,
    },
}

/// `TrainingArguments.optim`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Optim {
    /// One parameter at a time (`foreach=False`).
    AdamW,
    /// `adamw_torch`: `_foreach_` kernels on lists of all parameters.
    AdamWForeach,
    /// `adamw_torch_fused`, and DeepSpeed's FusedAdam.
    AdamWFused,
    AdamW8bit,
    /// State in managed memory, which the driver moves.
    PagedAdamW,
    PagedAdamW8bit,
    Sgd,
}

impl Optim {
    /// An optimizer by the name that `TrainingArguments.optim` has for it.
    ///
    /// # Errors
    /// No name of an optimizer whose memory is known.
    pub fn named(name: &str) -> Result<Optim, RecipeError> {
        Ok(match name.to_lowercase().as_str() {
            "adamw_torch" | "adamw_hf_foreach" => Optim::AdamWForeach,
            "adamw_torch_fused" | "adamw_apex_fused" => Optim::AdamWFused,
            "adamw_hf" | "adamw" => Optim::AdamW,
            "adamw_8bit" | "adamw_bnb_8bit" | "adamw8bit" => Optim::AdamW8bit,
            "paged_adamw_32bit" | "paged_adamw" => Optim::PagedAdamW,
            "paged_adamw_8bit" => Optim::PagedAdamW8bit,
            "sgd" => Optim::Sgd,
            _ => {
                return Err(RecipeError::Value {
                    option: "optim",
                    value: name.to_owned(),
                    problem: "known are adamw_torch, adamw_torch_fused, adamw_hf, adamw_8bit, \
                              adamw_bnb_8bit, paged_adamw_32bit, paged_adamw_8bit and sgd"
                        .into(),
                });
            }
        })
    }
}

/// `attn_implementation`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Attention {
    Sdpa,
    FlashAttention2,
    Eager,
}

/// `gradient_checkpointing_kwargs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Checkpointing {
    pub use_reentrant: bool,
}

/// DeepSpeed's `zero_optimization`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Zero {
    pub stage: u8,
    pub offload_optimizer: bool,
    pub offload_param: bool,
    /// Elements.
    pub reduce_bucket_size: u64,
    pub prefetch_bucket_size: u64,
    pub param_persistence_threshold: u64,
    pub overlap_comm: bool,
    /// The model was built inside `zero.Init` (transformers does so when the Trainer's
    /// arguments exist before `from_pretrained`): partitioned from the start, and linear
    /// layers do not keep gathered weights in the graph.
    pub zero_init: bool,
}

impl Zero {
    /// DeepSpeed 0.14's defaults.
    pub fn stage(stage: u8) -> Zero {
        Zero {
            stage,
            offload_optimizer: false,
            offload_param: false,
            reduce_bucket_size: 500_000_000,
            prefetch_bucket_size: 50_000_000,
            param_persistence_threshold: 100_000,
            overlap_comm: stage == 3,
            zero_init: false,
        }
    }
}

/// FSDP2's `fully_shard` on each decoder layer and on the root.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Fsdp {
    pub reshard_after_forward: bool,
    pub cpu_offload: bool,
}

/// Which of Liger's kernels are in place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Liger {
    pub rms_norm: bool,
    pub rope: bool,
    pub swiglu: bool,
    pub fused_linear_cross_entropy: bool,
}

impl Liger {
    /// `apply_liger_kernel_to_llama(model=model)`.
    pub const ALL: Liger =
        Liger { rms_norm: true, rope: true, swiglu: true, fused_linear_cross_entropy: true };
    /// Applied to classes after the model was built: its norms and MLPs are instances of
    /// the old ones, while the functions of rotation and loss are replaced.
    pub const FUNCTIONS: Liger =
        Liger { rms_norm: false, rope: true, swiglu: false, fused_linear_cross_entropy: true };
    pub const NONE: Liger =
        Liger { rms_norm: false, rope: false, swiglu: false, fused_linear_cross_entropy: false };
}

/// Whose loss it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Modules {
    Transformers,
    /// fms-acceleration: a fused cross entropy on float32 logits.
    Fms,
    /// litgpt: cross entropy on 16-bit logits; its layers save what transformers' do.
    Litgpt,
}

/// A run of the PyTorch stack.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TorchRecipe {
    pub method: Method,
    pub batch: u64,
    pub seq: u64,
    pub accumulate: u64,
    pub precision: Precision,
    pub quant: Option<Bnb4bit>,
    pub optim: Optim,
    pub gradient_checkpointing: Option<Checkpointing>,
    pub liger: Liger,
    pub attention: Attention,
    /// The batch has padding, so attention gets a mask.
    pub padded: bool,
    pub compile: bool,
    pub zero: Option<Zero>,
    pub fsdp: Option<Fsdp>,
    pub gpus: u64,
    /// Which rank is planned; the last by default, which updates the head's weights.
    pub rank: Option<u64>,
    pub max_grad_norm: bool,
    pub transformers: Version,
    pub torch: Version,
    pub liger_version: Version,
    pub modules: Modules,
}

impl TorchRecipe {
    /// A full fine-tune in pure bf16 with today's stack.
    pub fn new(batch: u64, seq: u64) -> TorchRecipe {
        TorchRecipe {
            method: Method::Full,
            batch,
            seq,
            accumulate: 1,
            precision: Precision::Pure16,
            quant: None,
            optim: Optim::AdamWFused,
            gradient_checkpointing: None,
            liger: Liger::NONE,
            attention: Attention::Sdpa,
            padded: false,
            compile: false,
            zero: None,
            fsdp: None,
            gpus: 1,
            rank: None,
            max_grad_norm: true,
            transformers: Version(5, 17),
            torch: Version(2, 11),
            liger_version: Version(0, 8),
            modules: Modules::Transformers,
        }
    }

    /// Whether weights rest in 16 bits.
    pub fn weights16(&self) -> bool {
        match self.precision {
            Precision::Float32 => false,
            Precision::Pure16 => true,
            Precision::Autocast16 { weights16 } => weights16,
        }
    }

    /// Refuses what the stack refuses.
    ///
    /// # Errors
    /// A size of zero, or options that do not go together.
    pub fn check(&self, arch: &Architecture) -> Result<(), RecipeError> {
        for (what, value) in [
            ("--batch", self.batch),
            ("--seq", self.seq),
            ("--accumulate", self.accumulate),
            ("--gpus", self.gpus),
        ] {
            if value == 0 {
                return Err(RecipeError::Zero { what });
            }
        }
        let too_long = |option, value: u64, most: u64| RecipeError::Value {
            option,
            value: value.to_string(),
            problem: format!("the most is {most}"),
        };
        if self.batch > 1 << 20 {
            return Err(too_long("batch", self.batch, 1 << 20));
        }
        if self.seq > 1 << 24 {
            return Err(too_long("seq", self.seq, 1 << 24));
        }
        if self.gpus > 1 << 20 {
            return Err(too_long("gpus", self.gpus, 1 << 20));
        }
        // What is beyond any machine is refused before byte counts outgrow 64 bits.
        let tokens = self.batch.saturating_mul(self.seq);
        if tokens > 1 << 32 {
            return Err(RecipeError::Value {
                option: "batch",
                value: self.batch.to_string(),
                problem: format!("{tokens} tokens at once; the most is {}", 1u64 << 32),
            });
        }
        let quadratic = self.padded || self.attention == Attention::Eager;
        let scores = tokens.saturating_mul(self.seq) as u128 * arch.num_attention_heads as u128;
        if quadratic && scores > 1 << 46 {
            return Err(RecipeError::Value {
                option: "seq",
                value: self.seq.to_string(),
                problem: "too long for attention whose scores or masks exist as tensors".into(),
            });
        }
        let conflict = |a: &str, b: &str, why| {
            Err(RecipeError::Conflict { a: a.to_owned(), b: b.to_owned(), why })
        };
        if self.zero.is_some() && self.fsdp.is_some() {
            return conflict("--zero", "--fsdp", "a model is sharded by one engine");
        }
        if self.quant.is_some() && self.method == Method::Full {
            return conflict(
                "four-bit weights",
                "--method full",
                "bitsandbytes' 4-bit weights cannot be trained; use --method qlora",
            );
        }
        if let Some(zero) = &self.zero {
            if zero.stage > 3 {
                return Err(RecipeError::Value {
                    option: "zero",
                    value: zero.stage.to_string(),
                    problem: "stages are 0, 1, 2 and 3".into(),
                });
            }
            if zero.offload_param && zero.stage < 3 {
                return conflict(
                    "offload_param",
                    &format!("ZeRO stage {}", zero.stage),
                    "only stage 3 partitions parameters",
                );
            }
            if zero.offload_optimizer && zero.stage == 0 {
                return conflict("offload_optimizer", "ZeRO stage 0", "stage 0 partitions nothing");
            }
            if zero.reduce_bucket_size > 1 << 40 {
                return Err(too_long("reduce-bucket-size", zero.reduce_bucket_size, 1 << 40));
            }
            if zero.stage == 3 && self.quant.is_some() {
                return conflict(
                    "ZeRO stage 3",
                    "four-bit weights",
                    "DeepSpeed cannot partition bitsandbytes' packed weights",
                );
            }
            if self.compile {
                return conflict("torch.compile", "DeepSpeed", "the hooks of ZeRO break the graph");
            }
        }
        if let Method::Lora(lora) = &self.method {
            if lora.r == 0 {
                return Err(RecipeError::Zero { what: "--lora-rank" });
            }
            if lora.r > arch.hidden_size as u64 {
                return Err(too_long("lora-rank", lora.r, arch.hidden_size as u64));
            }
        }
        if self.modules == Modules::Litgpt && self.liger != Liger::NONE {
            return conflict("--liger", "this trainer", "it has losses and norms of its own");
        }
        Ok(())
    }
}

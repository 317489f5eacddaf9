//! Options of the PyTorch stack, under the names that it has for them.

use clap::{Args, ValueEnum};
use plimsoll_arch::Architecture;
use plimsoll_torch::{
    AllocatorConfig, Attention, Bnb4bit, Checkpointing, Config, Fsdp, Liger, Lora, Method, Optim,
    Precision, TorchRecipe, Version, Zero,
};

use crate::exit::Stop;
use crate::recipe_args::{MethodArg, OptimizerArg, Precision as Dtype, QuantArg, RecipeArgs};

/// Whose run is planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Stack {
    /// This program's own.
    Native,
    /// transformers, PEFT, bitsandbytes, DeepSpeed and FSDP2 on PyTorch.
    Torch,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AttentionArg {
    Sdpa,
    #[value(name = "flash_attention_2", alias = "flash-attention-2", alias = "flash")]
    FlashAttention2,
    Eager,
}

/// How the run is divided, from whichever options say it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Division {
    ranks: Option<u64>,
    stage: Option<u8>,
    /// Optimizer, weights.
    offload: Option<(bool, bool)>,
}

#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "The PyTorch stack (--stack torch)")]
pub struct TorchArgs {
    /// Whose run is planned [default: native]
    #[arg(long, value_enum)]
    pub stack: Option<Stack>,
    /// Weights, gradients and activations in bf16; with --weights-dtype f32 or --autocast,
    /// mixed precision.
    #[arg(long, conflicts_with = "fp16")]
    pub bf16: bool,
    /// Mixed precision: float32 weights under autocast, or DeepSpeed's fp16 engine.
    #[arg(long)]
    pub fp16: bool,
    /// Products run under `torch.autocast`, as in the Trainer with bf16 or fp16.
    #[arg(long)]
    pub autocast: bool,
    /// Type in which the model is loaded (`torch_dtype`).
    #[arg(long, value_enum)]
    pub weights_dtype: Option<Dtype>,
    /// `TrainingArguments.optim`: adamw_torch (foreach), adamw_torch_fused, adamw_8bit,
    /// paged_adamw_32bit, paged_adamw_8bit, sgd, ...
    #[arg(long)]
    pub optim: Option<String>,
    /// Recompute each layer in backward.
    #[arg(long)]
    pub gradient_checkpointing: bool,
    /// `use_reentrant` of checkpointing.
    #[arg(long)]
    pub use_reentrant: bool,
    /// Liger's kernels for norms, rotation, SwiGLU and the loss.
    #[arg(long)]
    pub liger: bool,
    /// `attn_implementation` [default: sdpa]
    #[arg(long, value_enum)]
    pub attn: Option<AttentionArg>,
    /// Rows are padded, so attention gets a mask.
    #[arg(long)]
    pub padded: bool,
    /// `torch.compile`.
    #[arg(long)]
    pub compile: bool,
    /// FSDP2 on each layer and on the root; --zero is DeepSpeed's.
    #[arg(long)]
    pub fsdp: bool,
    /// FSDP: keep layers gathered between forward and backward.
    #[arg(long)]
    pub no_reshard_after_forward: bool,
    /// ZeRO: elements of `reduce_bucket_size` [default: 500000000]
    #[arg(long)]
    pub reduce_bucket_size: Option<u64>,
    /// ZeRO 3: the model was built inside `zero.Init`.
    #[arg(long)]
    pub zero_init: bool,
    /// `prepare_model_for_kbit_training`: what is not quantized goes to float32.
    #[arg(long)]
    pub prepare_kbit: bool,
    /// `expandable_segments:True` of the allocator.
    #[arg(long)]
    pub expandable_segments: bool,
    /// `roundup_power2_divisions` of the allocator.
    #[arg(long)]
    pub roundup_power2_divisions: Option<u64>,
    /// `max_split_size_mb` of the allocator.
    #[arg(long)]
    pub max_split_size_mb: Option<u64>,
    /// Version of transformers, such as 4.40 [default: 5.17]
    #[arg(long)]
    pub transformers: Option<Version>,
    /// Version of PyTorch [default: 2.11]
    #[arg(long)]
    pub torch: Option<Version>,
    /// Version of liger-kernel [default: 0.8]
    #[arg(long)]
    pub liger_version: Option<Version>,
}

impl TorchArgs {
    /// An option that means nothing to the native stack.
    pub fn first_given(&self) -> Option<&'static str> {
        let given = [
            ("--bf16", self.bf16),
            ("--fp16", self.fp16),
            ("--autocast", self.autocast),
            ("--weights-dtype", self.weights_dtype.is_some()),
            ("--optim", self.optim.is_some()),
            ("--gradient-checkpointing", self.gradient_checkpointing),
            ("--use-reentrant", self.use_reentrant),
            ("--liger", self.liger),
            ("--attn", self.attn.is_some()),
            ("--padded", self.padded),
            ("--compile", self.compile),
            ("--fsdp", self.fsdp),
            ("--no-reshard-after-forward", self.no_reshard_after_forward),
            ("--reduce-bucket-size", self.reduce_bucket_size.is_some()),
            ("--zero-init", self.zero_init),
            ("--prepare-kbit", self.prepare_kbit),
            ("--expandable-segments", self.expandable_segments),
            ("--roundup-power2-divisions", self.roundup_power2_divisions.is_some()),
            ("--max-split-size-mb", self.max_split_size_mb.is_some()),
            ("--transformers", self.transformers.is_some()),
            ("--torch", self.torch.is_some()),
            ("--liger-version", self.liger_version.is_some()),
        ];
        given.into_iter().find(|g| g.1).map(|g| g.0)
    }

    /// What the common options say; 1 and 0 are not said.
    fn division(common: &RecipeArgs) -> Result<Division, Stop> {
        if common.offload.any_activations() {
            return Err(Stop::Input(format!(
                "--offload {}: this stack keeps activations on the device: give optimizer or \
                 optimizer+weights",
                common.offload
            )));
        }
        let offload = &common.offload;
        let offload = offload.optimizer.then_some((true, offload.weights));
        Ok(Division {
            ranks: (common.gpus > 1).then_some(common.gpus as u64),
            stage: (common.zero > 0).then_some(common.zero),
            offload,
        })
    }

    /// What a configuration file says, then what the command line says.
    ///
    /// # Errors
    /// A value that the stack does not know, or two that do not go together.
    pub fn configure(
        &self,
        arch: &Architecture,
        common: &RecipeArgs,
        from: Option<Config>,
    ) -> Result<(TorchRecipe, AllocatorConfig), Stop> {
        let from_file = from.is_some();
        let (mut recipe, mut allocator) = match from {
            Some(config) => (config.recipe, config.allocator),
            None => {
                let seq = common.seq.unwrap_or(arch.max_position_embeddings.min(2048));
                let mut recipe = TorchRecipe::new(common.batch as u64, seq as u64);
                recipe.accumulate = common.accumulate as u64;
                recipe.max_grad_norm = common.max_grad_norm > 0.0;
                self.method(&mut recipe, common)?;
                (recipe, AllocatorConfig::default())
            }
        };
        if from_file {
            if common.batch != 1 {
                recipe.batch = common.batch as u64;
            }
            recipe.seq = common.seq.map_or(recipe.seq, |s| s as u64);
        }
        if recipe.seq == 0 {
            // The file names no length.
            recipe.seq = arch.max_position_embeddings.min(2048) as u64;
        }
        self.precision(&mut recipe, common, from_file)?;
        if let Some(name) = &self.optim {
            recipe.optim = Optim::named(name).map_err(Stop::input)?;
        } else if !from_file {
            match common.optimizer {
                OptimizerArg::Adamw => {}
                OptimizerArg::Adamw8bit => recipe.optim = Optim::AdamW8bit,
                OptimizerArg::Sgd => recipe.optim = Optim::Sgd,
            }
        }
        let recompute = common.recompute == "block";
        if self.gradient_checkpointing || recompute && !from_file {
            recipe.gradient_checkpointing =
                Some(Checkpointing { use_reentrant: self.use_reentrant });
        } else if self.use_reentrant && recipe.gradient_checkpointing.is_none() {
            return Err(Stop::Input("--use-reentrant needs --gradient-checkpointing".into()));
        }
        if self.liger {
            recipe.liger = Liger::ALL;
        }
        if let Some(attention) = self.attn {
            recipe.attention = match attention {
                AttentionArg::Sdpa => Attention::Sdpa,
                AttentionArg::FlashAttention2 => Attention::FlashAttention2,
                AttentionArg::Eager => Attention::Eager,
            };
        }
        recipe.padded |= self.padded;
        recipe.compile |= self.compile;
        let division = Self::division(common)?;
        recipe.gpus = division.ranks.unwrap_or(recipe.gpus);
        self.sharding(&mut recipe, division)?;
        if self.prepare_kbit {
            let Some(quant) = &mut recipe.quant else {
                return Err(Stop::Input(
                    "--prepare-kbit: nothing is in four bits here: use --method qlora".into(),
                ));
            };
            quant.prepare = true;
        }
        recipe.transformers = self.transformers.unwrap_or(recipe.transformers);
        recipe.torch = self.torch.unwrap_or(recipe.torch);
        recipe.liger_version = self.liger_version.unwrap_or(recipe.liger_version);
        allocator.expandable_segments |= self.expandable_segments;
        if let Some(divisions) = self.roundup_power2_divisions {
            allocator.roundup_power2_divisions = divisions;
        }
        if let Some(mib) = self.max_split_size_mb {
            // PyTorch refuses less than its large segment.
            if !(21..=1 << 20).contains(&mib) {
                return Err(Stop::Input(format!(
                    "--max-split-size-mb {mib}: give more than 20 (PyTorch's large segment)"
                )));
            }
            allocator.max_split_size = Some(mib << 20);
        }
        recipe.check(arch).map_err(Stop::input)?;
        Ok((recipe, allocator))
    }

    fn method(&self, recipe: &mut TorchRecipe, common: &RecipeArgs) -> Result<(), Stop> {
        let four_bit = |double_quant| Some(Bnb4bit { double_quant, prepare: false });
        recipe.quant = match common.quant.quant {
            None if common.method == MethodArg::Qlora => four_bit(true),
            None | Some(QuantArg::None) => None,
            Some(QuantArg::Nf4 | QuantArg::Fp4) => four_bit(false),
            Some(QuantArg::Nf4Dq | QuantArg::Fp4Dq) => four_bit(true),
        };
        if common.method == MethodArg::Qlora && recipe.quant.is_none() {
            return Err(Stop::Input("--method qlora needs four bits: use --method lora".into()));
        }
        recipe.method = match common.method {
            MethodArg::Full => Method::Full,
            MethodArg::Infer => Method::Infer,
            MethodArg::Lora | MethodArg::Qlora => {
                let lora = common.lora.lora()?;
                Method::Lora(Lora {
                    r: lora.rank as u64,
                    target_modules: lora.targets.iter().map(|p| p.name().to_owned()).collect(),
                    lora_dropout: lora.dropout > 0.0,
                    float32: true,
                    modules_to_save: common.lora.modules_to_save.clone(),
                })
            }
        };
        Ok(())
    }

    fn precision(
        &self,
        recipe: &mut TorchRecipe,
        common: &RecipeArgs,
        from_file: bool,
    ) -> Result<(), Stop> {
        let sharded_half = Self::division(common)?.stage.is_some() || recipe.zero.is_some();
        let float32 = self.weights_dtype == Some(Dtype::F32);
        if self.bf16 || self.fp16 || self.autocast {
            let weights16 = match self.weights_dtype {
                Some(dtype) => dtype == Dtype::Bf16,
                // fp16 gradients need a scaler, which needs float32 weights.
                None => !self.fp16 || recipe.quant.is_some(),
            };
            recipe.precision = if sharded_half {
                // DeepSpeed's engine keeps 16-bit weights and float32 masters itself.
                Precision::Pure16
            } else if self.autocast || self.fp16 || !weights16 {
                Precision::Autocast16 { weights16 }
            } else {
                Precision::Pure16
            };
        } else if common.precision == Some(Dtype::F32) || float32 {
            if common.precision == Some(Dtype::Bf16) {
                recipe.precision = Precision::Autocast16 { weights16: false };
            } else {
                recipe.precision = Precision::Float32;
            }
        } else if !from_file {
            recipe.precision = Precision::Pure16;
        }
        if recipe.precision == Precision::Float32 && sharded_half {
            return Err(Stop::Input(
                "--zero with products in float32 is not planned: give --bf16 or --fp16".into(),
            ));
        }
        Ok(())
    }

    fn sharding(&self, recipe: &mut TorchRecipe, division: Division) -> Result<(), Stop> {
        if self.fsdp && division.stage.is_some() {
            return Err(Stop::Input("--fsdp and --zero are two engines: give one of them".into()));
        }
        if let Some(stage) = division.stage {
            recipe.zero = Some(Zero::stage(stage));
        }
        if self.fsdp || self.no_reshard_after_forward {
            recipe.fsdp = Some(Fsdp {
                reshard_after_forward: !self.no_reshard_after_forward,
                cpu_offload: false,
            });
        }
        let wants = |what: &str| {
            Err(Stop::Input(format!(
                "{what} belongs to an engine that shards: give --zero or --fsdp"
            )))
        };
        if let Some((optimizer, weights)) = division.offload {
            match (&mut recipe.zero, &mut recipe.fsdp) {
                (Some(zero), _) => {
                    zero.offload_optimizer = optimizer;
                    zero.offload_param = weights;
                }
                (_, Some(fsdp)) => fsdp.cpu_offload = true,
                _ => return wants("--offload"),
            }
        }
        let (bucket, init) = (self.reduce_bucket_size, self.zero_init);
        match &mut recipe.zero {
            Some(zero) => {
                zero.reduce_bucket_size = bucket.unwrap_or(zero.reduce_bucket_size);
                zero.zero_init |= init;
            }
            None if bucket.is_some() => return wants("--reduce-bucket-size"),
            None if init => return wants("--zero-init"),
            None => {}
        }
        Ok(())
    }
}

//! The options that describe a recipe, shared by every command that plans.

use clap::{Args, ValueEnum};
use plimsoll_arch::{Architecture, DType};
use plimsoll_program::{
    AdamW, AdamW8bit, Decay, Method, Optimizer, Recipe, Recompute, RecomputePlan, Sgd,
};

use crate::exit::Stop;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MethodArg {
    Full,
    Infer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Precision {
    F32,
    Bf16,
}

impl Precision {
    pub fn dtype(self) -> DType {
        match self {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::Bf16,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OptimizerArg {
    Adamw,
    /// AdamW with its state in eight bits, as bitsandbytes has it.
    Adamw8bit,
    Sgd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DecayArg {
    /// Matrices and embeddings, not norms and biases.
    Matrices,
    All,
}

/// Everything about a run that decides its memory and its time.
#[derive(Clone, Debug, Args)]
pub struct RecipeArgs {
    /// Which parameters are trained.
    #[arg(long, value_enum, default_value = "full")]
    pub method: MethodArg,
    /// Sequences in a micro-batch.
    #[arg(long, default_value_t = 1)]
    pub batch: usize,
    /// Tokens in a sequence [default: 2048, or what the model was made for]
    #[arg(long)]
    pub seq: Option<usize>,
    /// Type of weights, gradients and activations [default: bf16 on a GPU, f32 on the CPU]
    #[arg(long, value_enum)]
    pub precision: Option<Precision>,
    /// Micro-batches in an optimizer step.
    #[arg(long, default_value_t = 1)]
    pub accumulate: usize,
    #[arg(long, value_enum, default_value = "adamw")]
    pub optimizer: OptimizerArg,
    /// Type of the optimizer's state.
    #[arg(long, value_enum, default_value = "f32")]
    pub optimizer_dtype: Precision,
    #[arg(long, default_value_t = 0.9)]
    pub beta1: f32,
    #[arg(long, default_value_t = 0.999)]
    pub beta2: f32,
    #[arg(long, default_value_t = 1e-8)]
    pub eps: f32,
    /// Momentum of sgd.
    #[arg(long, default_value_t = 0.0)]
    pub momentum: f32,
    #[arg(long, default_value_t = 0.01)]
    pub weight_decay: f32,
    /// Which parameters weight decay pulls on.
    #[arg(long, value_enum, default_value = "matrices")]
    pub decay: DecayArg,
    /// Clip gradients to this global norm; 0 turns clipping off.
    #[arg(long, default_value_t = 1.0)]
    pub max_grad_norm: f32,
    /// Activations that backward computes again: none, norms, mlp, block, a list by
    /// layers such as block:0-15,norms, or auto: the least that fits.
    #[arg(long, default_value = "none")]
    pub recompute: String,
    /// Update each parameter as soon as its gradient is complete, so that gradients
    /// take no memory; needs --max-grad-norm 0 and no accumulation.
    #[arg(long)]
    pub optimizer_in_backward: bool,
    /// Rows of logits that exist at a time [default: as many as cost no memory]
    #[arg(long)]
    pub loss_rows: Option<usize>,
}

/// Sequence length where the user names none.
const DEFAULT_SEQ: usize = 2048;

impl RecipeArgs {
    /// The recipe for a model; `auto` recompute stays `none` here and is
    /// resolved by whoever knows the memory.
    ///
    /// # Errors
    /// A value is out of range, or two do not go together.
    pub fn recipe(&self, arch: &Architecture, default: Precision) -> Result<Recipe, Stop> {
        let state = self.optimizer_dtype.dtype();
        self.check_numbers()?;
        let optimizer = match self.optimizer {
            OptimizerArg::Adamw => Optimizer::AdamW(AdamW {
                beta1: self.beta1,
                beta2: self.beta2,
                eps: self.eps,
                weight_decay: self.weight_decay,
                state,
            }),
            OptimizerArg::Adamw8bit => Optimizer::AdamW8bit(AdamW8bit {
                beta1: self.beta1,
                beta2: self.beta2,
                eps: self.eps,
                weight_decay: self.weight_decay,
            }),
            OptimizerArg::Sgd => Optimizer::Sgd(Sgd {
                momentum: self.momentum,
                weight_decay: self.weight_decay,
                state,
            }),
        };
        let recompute = if self.recompute_is_auto() {
            RecomputePlan::uniform(Recompute::None)
        } else {
            self.recompute.parse().map_err(Stop::input)?
        };
        let recipe = Recipe {
            method: match self.method {
                MethodArg::Full => Method::Full,
                MethodArg::Infer => Method::Infer,
            },
            precision: self.precision.unwrap_or(default).dtype(),
            batch: self.batch,
            seq: self.seq.unwrap_or(arch.max_position_embeddings.min(DEFAULT_SEQ)),
            accumulate: self.accumulate,
            optimizer,
            decay: match self.decay {
                DecayArg::Matrices => Decay::Matrices,
                DecayArg::All => Decay::All,
            },
            max_grad_norm: (self.max_grad_norm > 0.0).then_some(self.max_grad_norm),
            recompute,
            optimizer_in_backward: self.optimizer_in_backward,
            loss_rows: self.loss_rows,
        };
        recipe.check(arch).map_err(Stop::input)?;
        Ok(recipe)
    }

    pub fn recompute_is_auto(&self) -> bool {
        self.recompute == "auto"
    }

    fn check_numbers(&self) -> Result<(), Stop> {
        let beta = |b: f32| (0.0..1.0).contains(&b);
        let checks = [
            ("beta1", self.beta1, beta(self.beta1), "0 to below 1"),
            ("beta2", self.beta2, beta(self.beta2), "0 to below 1"),
            ("eps", self.eps, self.eps > 0.0 && self.eps.is_finite(), "a small number above 0"),
            ("momentum", self.momentum, beta(self.momentum), "0 to below 1"),
            ("weight-decay", self.weight_decay, (0.0..=1.0).contains(&self.weight_decay), "0 to 1"),
            (
                "max-grad-norm",
                self.max_grad_norm,
                self.max_grad_norm >= 0.0 && self.max_grad_norm.is_finite(),
                "0 (off) or above",
            ),
        ];
        for (option, value, ok, allowed) in checks {
            if !ok {
                return Err(Stop::Input(format!(
                    "--{option} {value} is out of range: give {allowed}"
                )));
            }
        }
        let wide = self.optimizer_dtype != Precision::F32;
        if self.optimizer == OptimizerArg::Adamw8bit && wide {
            return Err(Stop::Input(
                "--optimizer adamw8bit has a type of its own for its state: drop --optimizer-dtype"
                    .into(),
            ));
        }
        if self.loss_rows == Some(0) {
            return Err(Stop::Input("--loss-rows 0 is out of range: give at least 1".into()));
        }
        Ok(())
    }
}

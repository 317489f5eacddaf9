//! The options that describe a recipe, shared by every command that plans.

use clap::{Args, ValueEnum};
use plimsoll_arch::{Architecture, DType};
use plimsoll_program::{
    AdamW, AdamW8bit, Codebook, Decay, Lora, MasterWeights, Method, Offload, Optimizer, Projection,
    Quant, Recipe, Recompute, RecomputePlan, Sgd, Sharding, UpdateOn,
};

use crate::collectives::CollectivesArg;
use crate::exit::Stop;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MethodArg {
    /// Every parameter.
    Full,
    /// Adapters beside frozen weights.
    Lora,
    /// Adapters beside frozen weights in four bits.
    Qlora,
    Infer,
}

/// How frozen matrices are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum QuantArg {
    None,
    Nf4,
    /// NF4 with its scales quantized too.
    Nf4Dq,
    Fp4,
    Fp4Dq,
}

impl QuantArg {
    pub fn quant(self, head: bool) -> Option<Quant> {
        let (codebook, double) = match self {
            QuantArg::None => return None,
            QuantArg::Nf4 => (Codebook::Nf4, false),
            QuantArg::Nf4Dq => (Codebook::Nf4, true),
            QuantArg::Fp4 => (Codebook::Fp4, false),
            QuantArg::Fp4Dq => (Codebook::Fp4, true),
        };
        Some(Quant { codebook, double, head })
    }
}

/// How frozen matrices are stored, shared by every command that runs a model.
#[derive(Clone, Debug, Default, Args)]
pub struct QuantArgs {
    /// How frozen matrices are stored [default: as the model's files have them; nf4-dq for
    /// --method qlora]
    #[arg(long, value_enum)]
    pub quant: Option<QuantArg>,
    /// Store the head in four bits as well.
    #[arg(long)]
    pub quant_head: bool,
}

impl QuantArgs {
    /// What is wanted, given how the model's files have them: `stored`, or where they
    /// are in no four bits, `default`.
    ///
    /// # Errors
    /// Four bits of another kind than the files'.
    pub fn quant(
        &self,
        default: Option<Quant>,
        stored: Option<Quant>,
    ) -> Result<Option<Quant>, Stop> {
        let head = self.quant_head || stored.is_some_and(|s| s.head);
        let chosen = match self.quant {
            None => stored.or(default),
            Some(arg) => arg.quant(false),
        };
        match (chosen, stored) {
            (Some(quant), Some(stored)) if quant.format() != stored.format() => {
                Err(Stop::Input(format!(
                    "--quant {}: the weights of this model are in {} already: give --quant {}, or \
                     --quant none to work with them multiplied out",
                    quant.name(),
                    stored.name(),
                    stored.name()
                )))
            }
            (None, _) if self.quant_head => Err(Stop::Input(
                "--quant-head: nothing is in four bits here: give --quant as well".into(),
            )),
            (chosen, _) => Ok(chosen.map(|quant| Quant { head, ..quant })),
        }
    }
}

/// Adapters, as PEFT's `LoraConfig` names them.
#[derive(Clone, Debug, Args)]
pub struct LoraArgs {
    /// Rank of the adapters [default: 16]
    #[arg(long)]
    pub lora_rank: Option<usize>,
    /// Adapters are scaled by alpha / rank [default: twice the rank]
    #[arg(long)]
    pub lora_alpha: Option<f32>,
    /// Scale by alpha / sqrt(rank) instead.
    #[arg(long)]
    pub rslora: bool,
    /// Probability with which an adapter's input is dropped in training [default: 0]
    #[arg(long)]
    pub lora_dropout: Option<f32>,
    /// Projections that carry adapters: all, or a list such as q_proj,v_proj [default: all]
    #[arg(long)]
    pub lora_targets: Option<String>,
    /// Trained in full beside the adapters: embed_tokens, lm_head.
    #[arg(long, value_delimiter = ',')]
    pub modules_to_save: Vec<String>,
}

impl LoraArgs {
    pub fn rank(&self) -> usize {
        self.lora_rank.unwrap_or(16)
    }

    pub fn dropout(&self) -> f32 {
        self.lora_dropout.unwrap_or(0.0)
    }

    pub fn targets(&self) -> &str {
        self.lora_targets.as_deref().unwrap_or("all")
    }

    /// The options of a run that goes on from adapters: what those are, for nothing else
    /// can be gone on from, and another dropout where one is given.
    ///
    /// # Errors
    /// An option asks for other adapters.
    pub fn going_on_from(&self, adapter: &Lora) -> Result<LoraArgs, Stop> {
        let names = |l: &Lora| l.targets.iter().map(|p| p.name()).collect::<Vec<_>>().join(",");
        let modules = |l: &Lora| {
            let saved = [(l.save_embed_tokens, "embed_tokens"), (l.save_lm_head, "lm_head")];
            saved.iter().filter(|s| s.0).map(|s| s.1.to_owned()).collect::<Vec<_>>()
        };
        let asked = self.lora()?;
        let other = |given: bool, option: &str, value: String, found: String| {
            if !given || value == found {
                return Ok(());
            }
            Err(Stop::Input(format!(
                "--{option} {value}: the adapter to go on from has {found}: leave the option out, \
                 or train new adapters on its base"
            )))
        };
        let number = |x: f32| x.to_string();
        let (rank, alpha) = (adapter.rank.to_string(), number(adapter.alpha));
        other(self.lora_rank.is_some(), "lora-rank", asked.rank.to_string(), rank)?;
        other(self.lora_alpha.is_some(), "lora-alpha", number(asked.alpha), alpha)?;
        other(self.lora_targets.is_some(), "lora-targets", names(&asked), names(adapter))?;
        let saved = |l: &Lora| match modules(l).join(",") {
            none if none.is_empty() => "none".to_owned(),
            some => some,
        };
        let given = !self.modules_to_save.is_empty();
        other(given, "modules-to-save", saved(&asked), saved(adapter))?;
        if self.rslora && !adapter.rslora {
            return Err(Stop::Input(
                "--rslora: the adapter to go on from is scaled by alpha / rank: leave the option \
                 out, or train new adapters on its base"
                    .into(),
            ));
        }
        Ok(LoraArgs {
            lora_rank: Some(adapter.rank),
            lora_alpha: Some(adapter.alpha),
            rslora: adapter.rslora,
            lora_dropout: Some(self.lora_dropout.unwrap_or(adapter.dropout)),
            lora_targets: Some(names(adapter)),
            modules_to_save: modules(adapter),
        })
    }

    /// # Errors
    /// A module is unknown.
    pub fn lora(&self) -> Result<Lora, Stop> {
        let mut targets = Vec::new();
        for name in self.targets().split(',').map(str::trim).filter(|n| !n.is_empty()) {
            if matches!(name, "all" | "all-linear") {
                targets.extend(Projection::ALL);
                continue;
            }
            let known = Projection::ALL.into_iter().find(|p| p.name() == name);
            targets.push(known.ok_or_else(|| {
                let all = Projection::ALL.map(Projection::name).join(", ");
                Stop::Input(format!("--lora-targets {name}: the projections are {all}, or all"))
            })?);
        }
        targets.sort();
        targets.dedup();
        for name in &self.modules_to_save {
            if !["embed_tokens", "lm_head"].contains(&name.as_str()) {
                return Err(Stop::Input(format!(
                    "--modules-to-save {name}: only embed_tokens and lm_head can be"
                )));
            }
        }
        let saves = |name: &str| self.modules_to_save.iter().any(|m| m == name);
        Ok(Lora {
            rank: self.rank(),
            alpha: self.lora_alpha.unwrap_or(2.0 * self.rank() as f32),
            rslora: self.rslora,
            dropout: self.dropout(),
            targets,
            save_embed_tokens: saves("embed_tokens"),
            save_lm_head: saves("lm_head"),
        })
    }
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

/// Where updates run whose state is in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum UpdateOnArg {
    /// On the GPU, unless the plan's step is clearly shorter with the CPU or fits only so.
    Auto,
    /// State visits the GPU.
    Gpu,
    /// Gradients come to the host's cores, and weights go back.
    Cpu,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MasterWeightsArg {
    /// Updates of bf16 weights are rounded stochastically.
    None,
    /// Float32: the half that is not in the bf16 weight takes two bytes a parameter.
    F32,
}

impl MasterWeightsArg {
    pub fn master_weights(self) -> MasterWeights {
        match self {
            MasterWeightsArg::None => MasterWeights::None,
            MasterWeightsArg::F32 => MasterWeights::F32,
        }
    }
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
    /// What the optimizer updates where weights are bf16.
    #[arg(long, value_enum, default_value = "none")]
    pub master_weights: MasterWeightsArg,
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
    /// layers such as block:0-15,norms or block:0-30/2,norms, or auto: the least that
    /// fits, or with --offload activations the fastest that does.
    #[arg(long, default_value = "none")]
    pub recompute: String,
    /// Update each parameter as soon as its gradient is complete, so that gradients
    /// take no memory; needs --max-grad-norm 0 and no accumulation.
    #[arg(long)]
    pub optimizer_in_backward: bool,
    /// What lives in page-locked host memory and is copied in and out beside the
    /// computation: none, optimizer (its state), optimizer+weights (and those of the
    /// blocks), and alone or behind a + activations: all that blocks keep from forward to
    /// backward, or those of some layers, as in activations:0-30/2 (every second).
    /// Optimizer state costs least with --optimizer-in-backward; activations where
    /// --recompute keeps more in some layers than in others.
    #[arg(long, default_value = "none")]
    pub offload: Offload,
    /// Where the optimizer runs with --offload optimizer [default: auto]
    #[arg(long, value_enum)]
    pub update_on: Option<UpdateOnArg>,
    /// Cores of a machine for updates on the host, in a plan [default: of the machine that
    /// runs this, its own; else what machines with such a GPU have]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub host_cores: Option<u32>,
    /// What the memory of a machine reads and writes for offload, GB/s, in a plan [default:
    /// what machines with such a GPU have]
    #[arg(long, value_name = "GB_PER_SECOND", value_parser = crate::units::parse_rate)]
    pub host_bandwidth: Option<f64>,
    /// Host memory that offload may take, all ranks of a machine together [default: the
    /// machine's, as it is now; for a plan and on the CPU no limit of its own]
    #[arg(long, value_parser = crate::units::parse_bytes)]
    pub host_memory: Option<u64>,
    /// Rows of logits that exist at a time [default: as many as cost no memory]
    #[arg(long)]
    pub loss_rows: Option<usize>,
    /// Ranks that train one model, each on a device and with batches of its own: GPUs of
    /// this machine, or with --device cpu threads.
    #[arg(long, default_value_t = 1)]
    pub gpus: usize,
    /// What is divided over the ranks: 1 optimizer state, 2 and gradients, 3 and weights.
    #[arg(long, default_value_t = 0)]
    pub zero: u8,
    /// Type in which gradients are summed over the ranks [default: that of the weights]
    #[arg(long, value_enum)]
    pub reduce_dtype: Option<Precision>,
    /// What carries tensors between GPUs
    #[arg(long, value_enum, default_value = "auto")]
    pub collectives: CollectivesArg,
    #[command(flatten)]
    pub lora: LoraArgs,
    #[command(flatten)]
    pub quant: QuantArgs,
}

/// Sequence length where the user names none.
const DEFAULT_SEQ: usize = 2048;

impl RecipeArgs {
    /// The recipe for a model whose files have their matrices as `stored`; `auto` recompute stays `none` here and
    /// `auto` updates on the device: [`crate::planning::Planner::settle`] resolves both.
    ///
    /// # Errors
    /// A value is out of range, or two do not go together.
    pub fn recipe(
        &self,
        arch: &Architecture,
        stored: Option<Quant>,
        default: Precision,
    ) -> Result<Recipe, Stop> {
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
        let default_quant = match self.method {
            MethodArg::Qlora => QuantArg::Nf4Dq,
            _ => QuantArg::None,
        };
        let quant = self.quant.quant(default_quant.quant(false), stored)?;
        if self.method == MethodArg::Qlora && quant.is_none() {
            return Err(Stop::Input("--method qlora needs four bits: use --method lora".into()));
        }
        let adapts = matches!(self.method, MethodArg::Lora | MethodArg::Qlora);
        let lora = if adapts { Some(self.lora.lora()?) } else { None };
        let precision = self.precision.unwrap_or(default);
        let recipe = Recipe {
            method: match self.method {
                MethodArg::Full => Method::Full,
                MethodArg::Lora | MethodArg::Qlora => Method::Lora,
                MethodArg::Infer => Method::Infer,
            },
            precision: precision.dtype(),
            batch: self.batch,
            seq: self.seq.unwrap_or(arch.max_position_embeddings.min(DEFAULT_SEQ)),
            accumulate: self.accumulate,
            optimizer,
            master_weights: self.master_weights.master_weights(),
            decay: match self.decay {
                DecayArg::Matrices => Decay::Matrices,
                DecayArg::All => Decay::All,
            },
            max_grad_norm: (self.max_grad_norm > 0.0).then_some(self.max_grad_norm),
            recompute,
            optimizer_in_backward: self.optimizer_in_backward,
            loss_rows: self.loss_rows,
            offload: self.offload.clone(),
            update_on: match self.update_on {
                // A search takes it for what it offloads itself.
                Some(UpdateOnArg::Cpu) if self.offload.optimizer => UpdateOn::Host,
                _ => UpdateOn::Device,
            },
            lora,
            quant,
            sharding: Sharding {
                ranks: self.gpus,
                zero: self.zero,
                reduce: self.reduce_dtype.unwrap_or(precision).dtype(),
            },
        };
        recipe.check(arch).map_err(Stop::input)?;
        Ok(recipe)
    }

    /// # Errors
    /// The recipe is not one that trains.
    pub fn must_train(&self) -> Result<(), Stop> {
        match self.method {
            MethodArg::Infer => Err(Stop::Input(
                "--method infer trains nothing: give full, lora or qlora, or time tokens with \
                 `plimsoll bench --method infer`"
                    .into(),
            )),
            _ => Ok(()),
        }
    }

    /// Whether the plan says where updates run.
    pub fn update_on_is_auto(&self) -> bool {
        self.offload.optimizer && matches!(self.update_on, None | Some(UpdateOnArg::Auto))
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

//! Everything that the user chooses about a run.

use std::fmt;
use std::str::FromStr;

use plimsoll_arch::{Architecture, DType};
use plimsoll_quant::STATE_BLOCK;
use serde::Serialize;

use crate::{LayerRange, Lora, Offload, Quant};

/// Which parameters are trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// All of them.
    Full,
    /// Adapters beside frozen weights.
    Lora,
    /// None: prefill and decode.
    Infer,
}

/// Activations that are not kept from forward to backward, but computed again.
/// Each level drops what the one before it drops, and more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Keep everything.
    None,
    /// Norm outputs and the SwiGLU product: no matrix product is repeated.
    Norms,
    /// And the gate and up projections.
    Mlp,
    /// Keep only the input of the block.
    Block,
}

impl Recompute {
    pub const ALL: [Recompute; 4] =
        [Recompute::None, Recompute::Norms, Recompute::Mlp, Recompute::Block];

    pub fn name(self) -> &'static str {
        match self {
            Recompute::None => "none",
            Recompute::Norms => "norms",
            Recompute::Mlp => "mlp",
            Recompute::Block => "block",
        }
    }
}

/// A recompute level for every layer: one level for all, or levels for ranges.
///
/// Written `mlp`, or `block:0-15,norms` (layers 0 to 15 and the rest), with steps as in
/// `block:0-30/2,norms` (every second layer); an entry without a range fills every layer
/// that no range names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecomputePlan {
    default: Recompute,
    /// Later entries win.
    ranges: Vec<(LayerRange, Recompute)>,
}

impl RecomputePlan {
    pub fn uniform(level: Recompute) -> RecomputePlan {
        RecomputePlan { default: level, ranges: Vec::new() }
    }

    /// `level` on the first `layers` layers, `rest` on the others.
    pub fn first_layers(layers: usize, level: Recompute, rest: Recompute) -> RecomputePlan {
        let range = |last| (LayerRange { first: 0, last, step: 1 }, level);
        RecomputePlan {
            default: rest,
            ranges: layers.checked_sub(1).map(range).into_iter().collect(),
        }
    }

    /// `level` on the first of some layers and on every `step`-th behind it, `rest` on the
    /// others.
    pub fn every(layers: usize, step: usize, level: Recompute, rest: Recompute) -> RecomputePlan {
        let range = LayerRange { first: 0, last: layers.saturating_sub(1), step: step.max(1) };
        RecomputePlan { default: rest, ranges: vec![(range, level)] }
    }

    pub fn level(&self, layer: usize) -> Recompute {
        let range = self.ranges.iter().rev().find(|(range, _)| range.contains(layer));
        range.map_or(self.default, |(_, level)| *level)
    }
}

impl fmt::Display for RecomputePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (range, level) in &self.ranges {
            write!(f, "{}:{range},", level.name())?;
        }
        f.write_str(self.default.name())
    }
}

impl Serialize for RecomputePlan {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl FromStr for Recompute {
    type Err = RecipeError;

    fn from_str(text: &str) -> Result<Recompute, RecipeError> {
        Recompute::ALL
            .into_iter()
            .find(|level| level.name() == text)
            .ok_or_else(|| RecipeError::Recompute { text: text.to_owned() })
    }
}

impl FromStr for RecomputePlan {
    type Err = RecipeError;

    fn from_str(text: &str) -> Result<RecomputePlan, RecipeError> {
        let bad = || RecipeError::Recompute { text: text.to_owned() };
        let mut plan = RecomputePlan::uniform(Recompute::None);
        for entry in text.split(',') {
            match entry.split_once(':') {
                None => plan.default = entry.parse()?,
                Some((level, range)) => {
                    plan.ranges.push((range.parse().map_err(|_| bad())?, level.parse()?));
                }
            }
        }
        Ok(plan)
    }
}

/// Which parameters weight decay pulls on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// Matrices and embeddings, not norms and biases.
    Matrices,
    All,
}

/// AdamW (Loshchilov and Hutter, arXiv 1711.05101).
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct AdamW {
    pub beta1: f32,
    pub beta2: f32,
    pub eps: f32,
    pub weight_decay: f32,
    /// Type of both moments; bf16 moments are rounded stochastically.
    pub state: DType,
}

impl Default for AdamW {
    fn default() -> AdamW {
        AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01, state: DType::F32 }
    }
}

/// AdamW with both moments in eight bits, blocks of 256 (bitsandbytes 0.49
/// `AdamW8bit`). Tensors below 4096 elements keep float32 moments.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct AdamW8bit {
    pub beta1: f32,
    pub beta2: f32,
    pub eps: f32,
    pub weight_decay: f32,
}

impl Default for AdamW8bit {
    fn default() -> AdamW8bit {
        let AdamW { beta1, beta2, eps, weight_decay, .. } = AdamW::default();
        AdamW8bit { beta1, beta2, eps, weight_decay }
    }
}

/// Gradient descent.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Sgd {
    /// 0 keeps no velocity.
    pub momentum: f32,
    pub weight_decay: f32,
    /// Type of the velocity.
    pub state: DType,
}

/// How parameters are updated.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "name", rename_all = "lowercase")]
pub enum Optimizer {
    AdamW(AdamW),
    AdamW8bit(AdamW8bit),
    Sgd(Sgd),
}

/// What a bf16 parameter is beside its bf16 weight ("Mixed Precision Training",
/// Micikevicius et al. 2018, arXiv 1710.03740).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MasterWeights {
    /// Nothing: updates are rounded stochastically.
    #[default]
    None,
    /// A float32 number, of which the weight is the nearest bf16 one. The half that is not
    /// in the weight takes two bytes more.
    F32,
}

impl MasterWeights {
    pub fn name(self) -> &'static str {
        match self {
            MasterWeights::None => "none",
            MasterWeights::F32 => "f32",
        }
    }

    /// Whether there are none. Recipes without say nothing about them.
    pub fn is_none(&self) -> bool {
        *self == MasterWeights::None
    }
}

/// Where parameters are updated whose optimizer state is in host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub enum UpdateOn {
    /// On the device: state visits it. `gpu` to users.
    #[default]
    #[serde(rename = "gpu")]
    Device,
    /// On the host's cores: gradients come to it, and weights go back. `cpu` to users.
    #[serde(rename = "cpu")]
    Host,
}

/// What is divided over the ranks that train one model (ZeRO, Rajbhandari et al.
/// 2020, arXiv 1910.02054).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Sharding {
    /// Ranks, one device each; every one has batches of its own.
    pub ranks: usize,
    /// 0: nothing is divided; 1: optimizer state; 2: and gradients; 3: and weights.
    pub zero: u8,
    /// Type in which gradients of matrices are summed over the ranks.
    pub reduce: DType,
}

impl Sharding {
    /// One rank.
    pub fn none(precision: DType) -> Sharding {
        Sharding { ranks: 1, zero: 0, reduce: precision }
    }

    /// Elements of every rank's part of a tensor, or none where it is not divided.
    /// Vectors and tensors with less than a block of 8-bit state for each rank are
    /// not; parts are whole blocks.
    pub fn part(&self, shape: &[usize]) -> Option<usize> {
        let elements: usize = shape.iter().product();
        let divided = self.zero > 0 && shape.len() > 1 && elements >= self.ranks * STATE_BLOCK;
        let part = elements.div_ceil(self.ranks).next_multiple_of(STATE_BLOCK);
        (self.ranks > 1 && divided).then_some(part)
    }
}

/// Everything that the user chooses.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recipe {
    pub method: Method,
    /// Type of weights, gradients and activations.
    pub precision: DType,
    /// B: sequences in a micro-batch.
    pub batch: usize,
    /// T: tokens in a sequence; for inference, positions of the KV cache.
    pub seq: usize,
    /// Micro-batches in an optimizer step.
    pub accumulate: usize,
    pub optimizer: Optimizer,
    #[serde(skip_serializing_if = "MasterWeights::is_none")]
    pub master_weights: MasterWeights,
    pub decay: Decay,
    /// Global-norm clipping; none computes no norm at all.
    pub max_grad_norm: Option<f32>,
    pub recompute: RecomputePlan,
    /// Update each parameter as soon as its gradient is complete, so that no
    /// gradient outlives its layer. Forbids accumulation and clipping.
    pub optimizer_in_backward: bool,
    /// Rows of logits that exist at a time; none lets the builder choose.
    pub loss_rows: Option<usize>,
    pub offload: Offload,
    /// Where the optimizer runs on state that is offloaded.
    pub update_on: UpdateOn,
    /// Adapters: trained, or applied in inference.
    pub lora: Option<Lora>,
    /// Frozen matrices in four bits.
    pub quant: Option<Quant>,
    pub sharding: Sharding,
}

impl Recipe {
    /// A full fine-tune with the defaults of the command line.
    pub fn full(precision: DType, batch: usize, seq: usize) -> Recipe {
        Recipe {
            method: Method::Full,
            precision,
            batch,
            seq,
            accumulate: 1,
            optimizer: Optimizer::AdamW(AdamW::default()),
            master_weights: MasterWeights::None,
            decay: Decay::Matrices,
            max_grad_norm: Some(1.0),
            recompute: RecomputePlan::uniform(Recompute::None),
            optimizer_in_backward: false,
            loss_rows: None,
            offload: Offload::NONE,
            update_on: UpdateOn::Device,
            lora: None,
            quant: None,
            sharding: Sharding::none(precision),
        }
    }

    /// Adapters on a frozen model, with the defaults of the command line.
    pub fn lora(precision: DType, batch: usize, seq: usize, lora: Lora) -> Recipe {
        let lora = Some(lora);
        Recipe { method: Method::Lora, lora, ..Recipe::full(precision, batch, seq) }
    }

    /// Inference with room for `seq` positions.
    pub fn infer(precision: DType, batch: usize, seq: usize) -> Recipe {
        Recipe { method: Method::Infer, ..Recipe::full(precision, batch, seq) }
    }

    /// Rejects what no program can be built for.
    pub fn check(&self, arch: &Architecture) -> Result<(), RecipeError> {
        let positive = [("batch", self.batch), ("seq", self.seq), ("accumulate", self.accumulate)];
        for (option, value) in positive {
            if value == 0 || value > MAX_COUNT {
                return Err(RecipeError::OutOfRange { option, value, max: MAX_COUNT });
            }
        }
        if self.batch.saturating_mul(self.seq) > MAX_TOKENS {
            return Err(RecipeError::TooManyTokens {
                tokens: self.batch as u128 * self.seq as u128,
                max: MAX_TOKENS,
            });
        }
        if self.seq > arch.max_position_embeddings {
            return Err(RecipeError::SequenceTooLong {
                seq: self.seq,
                max: arch.max_position_embeddings,
                model: arch.name.clone(),
            });
        }
        if !matches!(self.precision, DType::F32 | DType::Bf16) {
            return Err(RecipeError::Precision { precision: self.precision });
        }
        if !self.master_weights.is_none() {
            let why = match (self.method, self.precision) {
                (Method::Infer, _) => "inference updates no weights",
                (_, DType::F32) => "with --precision f32 the weights are float32 themselves",
                _ => "",
            };
            if !why.is_empty() {
                let masters = self.master_weights.name();
                return Err(RecipeError::MasterWeights { masters, why });
            }
        }
        match (self.method, &self.lora) {
            (Method::Lora, None) => return Err(RecipeError::NoTargets),
            (Method::Full, Some(_)) => return Err(RecipeError::FullAdapters),
            (_, Some(lora)) => lora.check(arch)?,
            _ => {}
        }
        if let Some(quant) = self.quant {
            if self.method == Method::Full {
                return Err(RecipeError::FullQuantized { quant: quant.name() });
            }
            let saved = self.lora.as_ref().is_some_and(|l| l.save_lm_head);
            if quant.head && (arch.tie_word_embeddings || saved) {
                return Err(RecipeError::QuantizedHead);
            }
        }
        let Sharding { ranks, zero, reduce } = self.sharding;
        if ranks == 0 || ranks > MAX_RANKS {
            return Err(RecipeError::OutOfRange { option: "gpus", value: ranks, max: MAX_RANKS });
        }
        if zero > 3 {
            return Err(RecipeError::Zero { zero });
        }
        if !matches!(reduce, DType::F32 | DType::Bf16) {
            return Err(RecipeError::Reduce { reduce });
        }
        if ranks > 1 && self.method == Method::Infer {
            return Err(RecipeError::InferRanks { ranks });
        }
        if !self.offload.is_none() && self.method == Method::Infer {
            return Err(self.no_offload("inference has no optimizer and keeps no activations"));
        }
        if self.offload.optimizer && self.method != Method::Full {
            let why =
                "the optimizer state of adapters is small, activations alone can be offloaded";
            return Err(self.no_offload(why));
        }
        if self.update_on == UpdateOn::Host {
            let stateless = matches!(self.optimizer, Optimizer::Sgd(o) if o.momentum == 0.0)
                && self.master_weights.is_none();
            let why = match (self.offload.optimizer, stateless) {
                (false, _) => Some("nothing of the optimizer is in host memory"),
                (_, true) => Some("gradient descent without momentum and masters has no state"),
                _ => None,
            };
            if let Some(why) = why {
                return Err(RecipeError::UpdateOn { why });
            }
        }
        let mut layers = 0..arch.num_hidden_layers;
        let named = layers.any(|layer| self.offload.activations.contains(layer));
        if self.offload.any_activations() && !named {
            return Err(self.no_offload("the model has no such layer"));
        }
        let ranges = self.recompute.ranges.iter().map(|(range, _)| *range);
        if let Some(range) = ranges.into_iter().find(|r| r.first >= arch.num_hidden_layers) {
            let layers = arch.num_hidden_layers;
            return Err(RecipeError::RecomputeLayers { range, layers, model: arch.name.clone() });
        }
        if self.optimizer_in_backward && self.accumulate > 1 {
            return Err(RecipeError::FusedOptimizer { with: "gradient accumulation" });
        }
        if self.optimizer_in_backward && self.max_grad_norm.is_some() {
            return Err(RecipeError::FusedOptimizer { with: "gradient clipping" });
        }
        Ok(())
    }

    fn no_offload(&self, why: &'static str) -> RecipeError {
        RecipeError::Offload { offload: self.offload.clone(), why }
    }
}

/// More than any machine holds, and small enough that no product overflows.
const MAX_COUNT: usize = 1 << 24;
const MAX_TOKENS: usize = 1 << 30;
const MAX_RANKS: usize = 1 << 14;

/// Why a recipe was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RecipeError {
    #[error("--{option} {value} is out of range: give a number from 1 to {max}")]
    OutOfRange { option: &'static str, value: usize, max: usize },
    #[error("batch times sequence is {tokens} tokens, more than {max}: lower one of them")]
    TooManyTokens { tokens: u128, max: usize },
    #[error(
        "--seq {seq} is longer than the {max} positions that {model} was made for: use at most {max}"
    )]
    SequenceTooLong { seq: usize, max: usize, model: String },
    #[error("there is nothing to train: name at least one target module")]
    NoTargets,
    #[error(
        "rank {rank} does not suit {target}, which is {outputs} x {inputs}: give a rank from 1 to the smaller of the two"
    )]
    Rank { rank: usize, target: &'static str, outputs: usize, inputs: usize },
    #[error("lora alpha {alpha} is out of range: give a finite number above 0")]
    Alpha { alpha: f32 },
    #[error("lora dropout {dropout} is out of range: give 0 to below 1")]
    Dropout { dropout: f32 },
    #[error("lm_head cannot be trained alone: it is the embedding; train embed_tokens instead")]
    TiedHead,
    #[error("a full fine-tune has no adapters: use method lora")]
    FullAdapters,
    #[error(
        "{quant} weights cannot be trained: use method lora, which trains adapters beside them"
    )]
    FullQuantized { quant: &'static str },
    #[error("the head cannot be quantized: it is the embedding, or it is trained")]
    QuantizedHead,
    #[error("ZeRO has stages 0 to 3, and --zero is {zero}")]
    Zero { zero: u8 },
    #[error("gradients cannot be summed in {reduce}: use f32 or bf16")]
    Reduce { reduce: DType },
    #[error("inference runs on one device, and {ranks} are asked for: drop --gpus")]
    InferRanks { ranks: usize },
    #[error("precision {precision} cannot hold weights: use f32 or bf16")]
    Precision { precision: DType },
    #[error(
        "--master-weights {masters} stand beside bf16 weights that are trained, and {why}: leave the option out"
    )]
    MasterWeights { masters: &'static str, why: &'static str },
    #[error(
        "the optimizer cannot run inside backward together with {with}: every gradient is needed at the end; drop one of the two"
    )]
    FusedOptimizer { with: &'static str },
    #[error("--offload {offload} cannot be done here: {why}; use --offload none")]
    Offload { offload: Offload, why: &'static str },
    #[error(
        "--update-on cpu cannot be done here: {why}; use it with --offload optimizer, or drop it"
    )]
    UpdateOn { why: &'static str },
    #[error(
        "--offload {text} is not understood: give none, optimizer, optimizer+weights, optimizer+activations or activations, or activations of some layers such as activations:0-30/2"
    )]
    OffloadText { text: String },
    #[error(
        "recompute `{text}` is not understood: use none, norms, mlp or block, or ranges of layers such as block:0-15,norms or block:0-30/2,norms"
    )]
    Recompute { text: String },
    #[error(
        "--recompute names layers {range}, and {model} has {layers}, counted from 0: name some of those"
    )]
    RecomputeLayers { range: LayerRange, layers: usize, model: String },
}

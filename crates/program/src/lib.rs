//! One optimizer step, one prefill or one decoded token, as a program: an
//! ordered list of ops over named tensors. Nothing that a device does or
//! remembers hides outside it.
//!
//! Read [`build`] first: [`build::train`] writes a training step in the order
//! in which it happens. The planner gives every tensor of the result an
//! address, and a device runs the ops at those addresses.

pub mod build;
mod cost;
mod lane;
mod layers;
mod lora;
mod offload;
mod op;
mod quantized;
mod recipe;
mod replace;
mod tensor;
mod verify;
mod weights;

pub use cost::Work;
pub use lane::Lane;
pub use layers::{LayerRange, Layers};
pub use lora::{Lora, PRODUCTS, Projection};
pub use offload::Offload;
pub use op::{Access, AttentionShape, Op, OpKind, Phase};
pub use plimsoll_quant::{BLOCK as QUANT_BLOCK, Codebook, NESTED_BLOCK};
pub use quantized::{Nested, Quant, QuantizedMatrix, QuantizedPart, quantized_name};
pub use recipe::{
    AdamW, AdamW8bit, Decay, MasterWeights, Method, Optimizer, Recipe, RecipeError, Recompute,
    RecomputePlan, Sgd, Sharding, UpdateOn,
};
pub use tensor::{Class, Home, Shard, Tensor, TensorId, View};
pub use verify::ProgramError;
pub use weights::{WeightPart, master_name, weight_parts};

/// Scratch memory and alignment of a device, as far as a program depends on it.
///
/// Implemented beside each device, so that a plan for a GPU needs no GPU.
pub trait Target: Sync {
    /// Scratch bytes that this op needs while it runs.
    fn workspace_bytes(&self, op: &OpKind, program: &Program) -> u64;
}

/// A target that needs no scratch memory; for tests and for counting.
pub struct NoWorkspace;

impl Target for NoWorkspace {
    fn workspace_bytes(&self, _: &OpKind, _: &Program) -> u64 {
        0
    }
}

/// A run of ops that a device executes `repeat` times in a row.
///
/// With gradient accumulation a step is: the first micro-batch (gradients are
/// overwritten), the others (gradients are added to), and the update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    pub name: &'static str,
    pub ops: std::ops::Range<usize>,
    pub repeat: usize,
}

/// An ordered list of ops over named tensors.
#[derive(Clone, Debug, Default)]
pub struct Program {
    pub tensors: Vec<Tensor>,
    pub ops: Vec<Op>,
    pub sections: Vec<Section>,
}

impl Program {
    pub fn tensor(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.index()]
    }

    /// Finds a tensor by name. Linear; for set-up and tests, not for a step.
    pub fn find(&self, name: &str) -> Option<TensorId> {
        self.tensors.iter().position(|t| t.name == name).map(TensorId::new)
    }

    /// What an op is called in a ledger: `backward layers.3.mlp.d_act (swiglu)`.
    pub fn op_name(&self, op: usize) -> String {
        let op = &self.ops[op];
        let subject = op.kind.subject().map_or("", |t| self.tensor(t).name.as_str());
        format!("{} {subject} ({})", op.phase.name(), op.kind.name())
    }

    /// Finds a section by name.
    pub fn section(&self, name: &str) -> Option<usize> {
        self.sections.iter().position(|s| s.name == name)
    }

    /// Bytes of all tensors that survive from step to step.
    pub fn resident_bytes(&self) -> u64 {
        self.tensors.iter().filter(|t| t.resident).map(Tensor::bytes).sum()
    }

    /// Floating-point operations of the whole step, repeats included.
    pub fn flops(&self) -> f64 {
        self.sections
            .iter()
            .map(|s| {
                s.repeat as f64
                    * self.ops[s.ops.clone()].iter().map(|o| self.work(o).flops).sum::<f64>()
            })
            .sum()
    }
}

/// The scalars that change from step to step, in a tensor named `step` so that
/// a captured step can be replayed without touching its ops.
///
/// Layout: eight float32 words; the seed is stored as bits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepScalars {
    pub learning_rate: f32,
    /// 1 - beta1^t of AdamW, t counted from 1.
    pub bias_correction1: f32,
    /// 1 - beta2^t of AdamW.
    pub bias_correction2: f32,
    /// One over the number of trained tokens of the whole step.
    pub loss_scale: f32,
    /// Seed of stochastic rounding; different for every step.
    pub seed: u64,
}

impl StepScalars {
    pub const WORDS: usize = 8;

    pub fn to_words(self) -> [f32; Self::WORDS] {
        let (lo, hi) = (self.seed as u32, (self.seed >> 32) as u32);
        [
            self.learning_rate,
            self.bias_correction1,
            self.bias_correction2,
            self.loss_scale,
            f32::from_bits(lo),
            f32::from_bits(hi),
            0.0,
            0.0,
        ]
    }

    pub fn from_words(w: &[f32]) -> StepScalars {
        StepScalars {
            learning_rate: w[0],
            bias_correction1: w[1],
            bias_correction2: w[2],
            loss_scale: w[3],
            seed: u64::from(w[4].to_bits()) | u64::from(w[5].to_bits()) << 32,
        }
    }
}

//! One optimizer step from the host's side: inputs in, loss out.

use plimsoll_arch::Architecture;
use plimsoll_plan::{
    Device, DeviceError, Layout, LayoutError, SlabSizes, lay_out, lay_out_together,
};
use plimsoll_program::{Home, Optimizer, Program, Recipe, RecipeError, StepScalars, Target, build};

/// The programs of a training run and their common slab.
pub struct TrainPlan {
    pub arch: Architecture,
    pub recipe: Recipe,
    pub train: Program,
    pub train_layout: Layout,
    pub evaluate: Program,
    pub evaluate_layout: Layout,
}

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

impl TrainPlan {
    /// Plans training and evaluation in one slab.
    ///
    /// # Errors
    /// The recipe is impossible.
    pub fn new(
        arch: &Architecture,
        recipe: &Recipe,
        target: &dyn Target,
    ) -> Result<TrainPlan, PlanError> {
        let train = build::train(arch, recipe, target)?;
        let evaluate = build::evaluate(arch, recipe, target)?;
        let mut layouts = lay_out_together(&[&train, &evaluate])?;
        let (Some(evaluate_layout), Some(train_layout)) = (layouts.pop(), layouts.pop()) else {
            unreachable!("two programs have two layouts");
        };
        let (arch, recipe) = (arch.clone(), recipe.clone());
        Ok(TrainPlan { arch, recipe, train, train_layout, evaluate, evaluate_layout })
    }

    /// A plan whose slab holds evaluation alone; there is nothing to train with.
    ///
    /// # Errors
    /// The recipe is impossible.
    pub fn for_evaluation(
        arch: &Architecture,
        recipe: &Recipe,
        target: &dyn Target,
    ) -> Result<TrainPlan, PlanError> {
        let evaluate = build::evaluate(arch, recipe, target)?;
        let evaluate_layout = lay_out(&evaluate);
        let train_layout = lay_out(&Program::default());
        let train_layout = Layout { slab_bytes: evaluate_layout.slab_bytes, ..train_layout };
        let (arch, recipe) = (arch.clone(), recipe.clone());
        let train = Program::default();
        Ok(TrainPlan { arch, recipe, train, train_layout, evaluate, evaluate_layout })
    }

    pub fn slab_bytes(&self) -> u64 {
        self.train_layout.slab_bytes
    }

    /// What a device must reserve.
    pub fn slabs(&self) -> SlabSizes {
        self.train_layout.slabs()
    }
}

/// Inputs of one micro-batch, each (B, T).
#[derive(Clone, Copy, Debug)]
pub struct MicroBatch<'a> {
    pub ids: &'a [i32],
    /// The token to predict at each place; -100 trains nothing.
    pub labels: &'a [i32],
    pub positions: &'a [i32],
    /// Index in its row of the first token of each token's document.
    pub doc_start: &'a [i32],
}

impl MicroBatch<'_> {
    pub fn trained_tokens(&self) -> usize {
        self.labels.iter().filter(|l| **l >= 0).count()
    }
}

impl<'a> From<&'a plimsoll_data::Batch> for MicroBatch<'a> {
    fn from(batch: &'a plimsoll_data::Batch) -> MicroBatch<'a> {
        MicroBatch {
            ids: &batch.ids,
            labels: &batch.labels,
            positions: &batch.positions,
            doc_start: &batch.doc_start,
        }
    }
}

/// What a step reports.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepResult {
    /// Mean loss over the trained tokens of the step, all ranks together.
    pub loss: f32,
    /// Of all micro-batches of all ranks.
    pub trained_tokens: u64,
    /// Global gradient norm before clipping; none when nothing is clipped.
    pub grad_norm: Option<f32>,
}

/// A device that holds a training plan's slab, filled.
pub struct Session<'a> {
    pub plan: &'a TrainPlan,
    pub device: &'a mut dyn Device,
}

impl Session<'_> {
    /// Runs one optimizer step; `step` counts from 1. A step in which no token
    /// is trained still decays weights, as in torch.
    ///
    /// # Errors
    /// The device's own.
    ///
    /// # Panics
    /// There are not as many micro-batches as the recipe accumulates.
    pub fn train(
        &mut self,
        batches: &[MicroBatch],
        learning_rate: f32,
        step: u64,
        seed: u64,
    ) -> Result<StepResult, DeviceError> {
        let trained_tokens = self.forward_backward(batches, learning_rate, step, seed)?;
        self.update()?;
        let (program, layout) = (&self.plan.train, &self.plan.train_layout);
        let grad_norm = match self.plan.recipe.max_grad_norm {
            Some(_) => Some(self.scalar(program, layout, "grad_norm")?),
            None => None,
        };
        let loss = self.scalar(program, layout, "loss")?;
        Ok(StepResult { loss, trained_tokens, grad_norm })
    }

    /// The first half of [`Session::train`]: loss and gradients. Returns the number of
    /// trained tokens of all ranks.
    ///
    /// # Errors
    /// The device's own.
    ///
    /// # Panics
    /// There are not as many micro-batches as the recipe accumulates.
    pub fn forward_backward(
        &mut self,
        batches: &[MicroBatch],
        learning_rate: f32,
        step: u64,
        seed: u64,
    ) -> Result<u64, DeviceError> {
        assert_eq!(batches.len(), self.plan.recipe.accumulate, "one micro-batch for each");
        let trained: usize = batches.iter().map(MicroBatch::trained_tokens).sum();
        let trained = self.total(trained as u64)?;
        let (rank, ranks) = (self.rank(), self.ranks());
        let correction = |beta: f32| (1.0 - f64::from(beta).powf(step as f64)) as f32;
        let (c1, c2) = match self.plan.recipe.optimizer {
            Optimizer::AdamW(o) => (correction(o.beta1), correction(o.beta2)),
            Optimizer::AdamW8bit(o) => (correction(o.beta1), correction(o.beta2)),
            Optimizer::Sgd(_) => (1.0, 1.0),
        };
        let scalars = StepScalars {
            learning_rate,
            bias_correction1: c1,
            bias_correction2: c2,
            loss_scale: 1.0 / trained.max(1) as f32,
            seed: seed.wrapping_add(step.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
        };
        let (program, layout) = (&self.plan.train, &self.plan.train_layout);
        for (n, batch) in batches.iter().enumerate() {
            // Each micro-batch drops other activations, whichever rank computes it.
            let number = n * ranks + rank;
            let seed = scalars.seed ^ (number as u64).wrapping_mul(0xa076_1d64_78bd_642f);
            self.write_scalars(program, layout, StepScalars { seed, ..scalars })?;
            self.write_batch(program, layout, batch)?;
            let name = if n == 0 { build::FIRST_MICRO_BATCH } else { build::OTHER_MICRO_BATCHES };
            let section = program.section(name).expect("a training step has it");
            self.device.run(program, layout, section)?;
        }
        if batches.len() * ranks > 1 {
            self.write_scalars(program, layout, scalars)?;
        }
        Ok(trained)
    }

    /// The second half of [`Session::train`]: clipping and the optimizer.
    ///
    /// # Errors
    /// The device's own.
    pub fn update(&mut self) -> Result<(), DeviceError> {
        let (program, layout) = (&self.plan.train, &self.plan.train_layout);
        let section = program.section(build::UPDATE).expect("a training step has it");
        self.device.run(program, layout, section)
    }

    /// Sum of the losses of one batch of every rank, and their number of trained tokens.
    ///
    /// # Errors
    /// The device's own.
    pub fn evaluate(&mut self, batch: &MicroBatch) -> Result<(f64, usize), DeviceError> {
        let plan = self.plan;
        let (program, layout) = (&plan.evaluate, &plan.evaluate_layout);
        let scalars = StepScalars {
            learning_rate: 0.0,
            bias_correction1: 1.0,
            bias_correction2: 1.0,
            loss_scale: 1.0,
            seed: 0,
        };
        self.write_scalars(program, layout, scalars)?;
        self.write_batch(program, layout, batch)?;
        self.device.run(program, layout, 0)?;
        let loss = f64::from(self.scalar(program, layout, "loss")?);
        Ok((loss, self.total(batch.trained_tokens() as u64)? as usize))
    }

    fn write_scalars(
        &mut self,
        program: &Program,
        layout: &Layout,
        scalars: StepScalars,
    ) -> Result<(), DeviceError> {
        let words = scalars.to_words();
        self.write(program, layout, "step", bytemuck::cast_slice(&words))
    }

    fn write_batch(
        &mut self,
        program: &Program,
        layout: &Layout,
        batch: &MicroBatch,
    ) -> Result<(), DeviceError> {
        self.write(program, layout, "ids", bytemuck::cast_slice(batch.ids))?;
        self.write(program, layout, "labels", bytemuck::cast_slice(batch.labels))?;
        self.write(program, layout, "positions", bytemuck::cast_slice(batch.positions))?;
        self.write(program, layout, "doc_start", bytemuck::cast_slice(batch.doc_start))
    }

    fn write(
        &mut self,
        program: &Program,
        layout: &Layout,
        name: &str,
        data: &[u8],
    ) -> Result<(), DeviceError> {
        let id = program.find(name).expect("every program has the inputs");
        self.device.upload(Home::Device, layout.offset(id), data.len(), &mut |bytes| {
            bytes.copy_from_slice(data);
            Ok(())
        })
    }

    fn scalar(
        &mut self,
        program: &Program,
        layout: &Layout,
        name: &str,
    ) -> Result<f32, DeviceError> {
        let id = program.find(name).expect("every program has it");
        let mut value = 0.0;
        self.device.download(Home::Device, layout.offset(id), 4, &mut |bytes| {
            value = bytemuck::pod_read_unaligned(bytes);
            Ok(())
        })?;
        Ok(value)
    }
}

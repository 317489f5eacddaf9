//! The loop: steps, evaluations, checkpoints, until the end or Ctrl-C.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use plimsoll_data::{Batch, BatchOrder, DataError, OrderState, Packed};
use plimsoll_plan::DeviceError;
use serde::Serialize;

use crate::checkpoint::{CheckpointError, ModelFiles, TrainerState, remove_abandoned};
use crate::{
    EventWriter, MetricsError, MetricsLog, MicroBatch, Schedule, Session, StepResult,
    TensorBoardError,
};

/// Where micro-batches come from, those of all ranks in one order: a function of their number alone, so that a
/// resumed run sees what the uninterrupted one would.
pub trait Batches {
    /// Micro-batch `number`, counted from the start of the first epoch.
    fn batch(&self, number: u64) -> Batch;

    /// Micro-batches in an epoch, at least one.
    fn per_epoch(&self) -> u64;
}

/// Packed rows in the order that a seed gives each epoch.
#[derive(Clone)]
pub struct PackedBatches {
    packed: Arc<Packed>,
    batch: usize,
    seed: Option<u64>,
    /// The order at the batch that comes next, and that batch's number.
    next: RefCell<(BatchOrder, u64)>,
}

impl PackedBatches {
    /// Shuffled by a seed, or in order without one (for evaluation).
    ///
    /// # Errors
    /// There are no rows.
    pub fn new(packed: Packed, batch: usize, seed: Option<u64>) -> Result<Self, DataError> {
        let order = PackedBatches::order_at(&packed, batch, seed, 0)?;
        let packed = Arc::new(packed);
        Ok(PackedBatches { packed, batch, seed, next: RefCell::new((order, 0)) })
    }

    fn order_at(
        packed: &Packed,
        batch: usize,
        seed: Option<u64>,
        number: u64,
    ) -> Result<BatchOrder, DataError> {
        let Some(seed) = seed else { return BatchOrder::sequential(packed.rows(), batch) };
        let per_epoch = packed.rows().div_ceil(batch.max(1)).max(1) as u64;
        let index = (number % per_epoch) as usize * batch;
        BatchOrder::resume(
            packed.rows(),
            batch,
            OrderState { epoch: number / per_epoch, index, seed },
        )
    }

    pub fn packed(&self) -> &Packed {
        &self.packed
    }
}

impl Batches for PackedBatches {
    fn batch(&self, number: u64) -> Batch {
        let mut batch = Batch::new(self.batch, self.packed.seq_len);
        let mut rows = Vec::with_capacity(self.batch);
        if self.seed.is_none() {
            // In order: the rows of a batch follow from its number.
            let first = (number % self.per_epoch()) as usize * self.batch;
            rows.extend(first..self.packed.rows().min(first + self.batch));
        } else {
            let mut next = self.next.borrow_mut();
            if next.1 != number {
                next.0 = PackedBatches::order_at(&self.packed, self.batch, self.seed, number)
                    .expect("the same rows gave an order before");
            }
            next.0.next_rows(&mut rows);
            next.1 = number + 1;
        }
        batch.fill(&self.packed, &rows);
        batch
    }

    fn per_epoch(&self) -> u64 {
        self.packed.rows().div_ceil(self.batch) as u64
    }
}

/// What the loop is told.
#[derive(Clone, Debug)]
pub struct RunOptions {
    pub total_steps: u64,
    pub schedule: Schedule,
    pub seed: u64,
    /// Folder of checkpoints and metrics.
    pub out: PathBuf,
    /// Evaluate every so many steps; always at the end.
    pub evaluate_every: u64,
    /// Write a checkpoint every so many steps; always at the end.
    pub save_every: u64,
    /// Checkpoints that are kept.
    pub keep: usize,
    /// What goes with every model that is written.
    pub files: ModelFiles,
}

/// Why the loop ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    Finished,
    EarlyStop,
    /// Ctrl-C: a checkpoint was written.
    Interrupted,
}

/// What the loop achieved.
#[derive(Clone, Debug, Serialize)]
pub struct RunSummary {
    pub ended: Ended,
    pub steps: u64,
    /// Of the last step of the run, which a resumed run may not have made itself.
    pub loss: f32,
    pub validation_loss: Option<f64>,
    pub best_validation_loss: Option<f64>,
    pub best_step: Option<u64>,
    /// Tokens of all sequences, padding included, over the time of the steps.
    pub tokens_per_second: f64,
    pub trained_tokens: u64,
    pub seconds: f64,
}

/// A line of `metrics.jsonl`.
#[derive(Clone, Debug, Serialize)]
pub struct StepMetrics {
    pub step: u64,
    pub epoch: f64,
    pub loss: f32,
    pub learning_rate: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grad_norm: Option<f32>,
    pub trained_tokens: u64,
    pub tokens_per_second: f64,
    pub seconds: f64,
}

#[derive(Serialize)]
struct ValidationMetrics {
    step: u64,
    validation_loss: f64,
    perplexity: f64,
    validation_tokens: usize,
}

/// What happens while the loop runs, for a progress bar.
pub enum Event<'a> {
    Step(&'a StepMetrics),
    Validation { step: u64, loss: f64, improved: bool },
    Saved(&'a Path),
}

/// Why the loop broke.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    #[error(transparent)]
    TensorBoard(#[from] TensorBoardError),
    #[error(
        "{what} at step {step} (learning rate {learning_rate:.2e}): lower --lr or raise --warmup; the last checkpoint is kept"
    )]
    Diverged { step: u64, what: String, learning_rate: f64 },
}

/// Trains from `state` to the end. The slab is filled already.
///
/// # Errors
/// The device, the disk, or a loss, gradient or weight that is no number.
pub fn run(
    session: &mut Session,
    train: &dyn Batches,
    validation: Option<&dyn Batches>,
    options: &RunOptions,
    mut state: TrainerState,
    stop: &AtomicBool,
    on_event: &mut dyn FnMut(Event),
) -> Result<RunSummary, RunError> {
    let recipe = &session.plan.recipe;
    let ranks = session.ranks();
    let micro_batches = (recipe.accumulate * ranks) as u64;
    let step_tokens = (recipe.batch * recipe.seq) as f64 * micro_batches as f64;
    // What there is one of is written by rank 0.
    let mut log = None;
    if session.leads() {
        remove_abandoned(&options.out)?;
        let metrics = MetricsLog::resume(&options.out.join("metrics.jsonl"), state.step)?;
        log = Some((metrics, EventWriter::resume(&options.out.join("runs"), state.step + 1)?));
    }
    let started = Instant::now();
    let mut summary = RunSummary {
        ended: Ended::Finished,
        steps: state.step,
        loss: state.loss.unwrap_or(f32::NAN),
        validation_loss: state.validation_loss,
        best_validation_loss: None,
        best_step: None,
        tokens_per_second: 0.0,
        trained_tokens: state.trained_tokens,
        seconds: 0.0,
    };
    let (mut training_seconds, mut steps_run) = (0.0, 0u64);
    if state.early_stop.is_over() {
        summary.ended = Ended::EarlyStop;
    }
    while state.step < options.total_steps && summary.ended == Ended::Finished {
        let step = state.step + 1;
        let learning_rate = options.schedule.lr(step - 1);
        let clock = Instant::now();
        let result = one_step(session, train, state.batches, learning_rate, step, options.seed)?;
        let seconds = clock.elapsed().as_secs_f64();
        let diverged = |what: String| RunError::Diverged { step, what, learning_rate };
        if !result.loss.is_finite() {
            return Err(diverged(format!("the loss became {}", result.loss)));
        }
        if let Some(norm) = result.grad_norm.filter(|n| !n.is_finite()) {
            return Err(diverged(format!("the norm of the gradient became {norm}")));
        }
        let saving = |error: CheckpointError| match error {
            CheckpointError::NotFinite { tensor, index } => {
                diverged(format!("element {index} of `{tensor}` is no longer finite"))
            }
            other => other.into(),
        };
        training_seconds += seconds;
        steps_run += 1;
        state.step = step;
        state.batches += micro_batches;
        state.trained_tokens += result.trained_tokens;
        state.loss = Some(result.loss);
        let line = StepMetrics {
            step,
            epoch: state.batches as f64 / train.per_epoch() as f64,
            loss: result.loss,
            learning_rate,
            grad_norm: result.grad_norm,
            trained_tokens: state.trained_tokens,
            tokens_per_second: step_tokens / seconds,
            seconds,
        };
        if let Some((metrics, board)) = &mut log {
            metrics.append(&line)?;
            let mut scalars = vec![
                ("train/loss", f64::from(result.loss)),
                ("train/learning_rate", learning_rate),
                ("train/tokens_per_second", line.tokens_per_second),
            ];
            scalars.extend(result.grad_norm.map(|n| ("train/grad_norm", f64::from(n))));
            board.scalars(step, &scalars)?;
        }
        on_event(Event::Step(&line));
        summary.loss = result.loss;

        let last = step == options.total_steps;
        // A signal may come between two looks at it: all ranks stop where one has seen it.
        let asked = session.total(stop.load(Ordering::SeqCst).into())? > 0;
        let mut patience_over = false;
        if let Some(validation) = validation
            && (last || step.is_multiple_of(options.evaluate_every))
        {
            let (loss, tokens) = evaluate(session, validation)?;
            state.validation_loss = Some(loss);
            let verdict = state.early_stop.update(step, loss);
            let line = ValidationMetrics {
                step,
                validation_loss: loss,
                perplexity: loss.exp(),
                validation_tokens: tokens,
            };
            if let Some((metrics, board)) = &mut log {
                metrics.append(&line)?;
                board.scalars(
                    step,
                    &[("validation/loss", loss), ("validation/perplexity", loss.exp())],
                )?;
            }
            on_event(Event::Validation { step, loss, improved: verdict.improved });
            summary.validation_loss = Some(loss);
            if verdict.improved {
                let best = options.out.join("best");
                session
                    .replace_folder(&best, |s, folder| s.save_model(folder, &options.files))
                    .map_err(saving)?;
            }
            patience_over = verdict.stop;
        }
        if last || patience_over || asked || step.is_multiple_of(options.save_every) {
            let path = session
                .save_checkpoint(&options.out, &state, &options.files, options.keep)
                .map_err(saving)?;
            on_event(Event::Saved(&path));
        }
        if patience_over {
            summary.ended = Ended::EarlyStop;
        } else if asked && !last {
            summary.ended = Ended::Interrupted;
        }
    }
    if summary.ended != Ended::Interrupted {
        session.save_model(&options.out, &options.files)?;
    }
    let best = state.early_stop.best();
    summary.steps = state.step;
    summary.trained_tokens = state.trained_tokens;
    summary.best_validation_loss = best.map(|b| b.value);
    summary.best_step = best.map(|b| b.step);
    summary.tokens_per_second = steps_run as f64 * step_tokens / f64::max(training_seconds, 1e-9);
    summary.seconds = started.elapsed().as_secs_f64();
    Ok(summary)
}

/// One optimizer step over the micro-batches from `first` on; ranks take them in turn.
fn one_step(
    session: &mut Session,
    train: &dyn Batches,
    first: u64,
    learning_rate: f64,
    step: u64,
    seed: u64,
) -> Result<StepResult, DeviceError> {
    let (rank, ranks) = (session.rank() as u64, session.ranks() as u64);
    let accumulate = session.plan.recipe.accumulate as u64;
    let owned: Vec<Batch> =
        (0..accumulate).map(|n| train.batch(first + n * ranks + rank)).collect();
    let micro: Vec<MicroBatch> = owned.iter().map(MicroBatch::from).collect();
    session.train(&micro, learning_rate as f32, step, seed)
}

/// The label of a token that is not counted.
const IGNORED: i32 = -100;

/// Mean loss over all trained tokens of an epoch, and their number.
///
/// # Errors
/// The device's own.
pub fn evaluate(session: &mut Session, batches: &dyn Batches) -> Result<(f64, usize), DeviceError> {
    let (mut sum, mut tokens) = (0.0, 0);
    let (rank, ranks) = (session.rank() as u64, session.ranks() as u64);
    for round in 0..batches.per_epoch().div_ceil(ranks) {
        let number = round * ranks + rank;
        let mut batch = batches.batch(number.min(batches.per_epoch() - 1));
        if number >= batches.per_epoch() {
            // Nothing is left for this rank, but the others need it.
            batch.labels.fill(IGNORED);
        }
        let (loss, count) = session.evaluate(&MicroBatch::from(&batch))?;
        sum += loss;
        tokens += count;
    }
    Ok((sum / tokens.max(1) as f64, tokens))
}

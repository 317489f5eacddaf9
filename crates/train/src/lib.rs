//! Fine-tuning: data in, checkpoints and metrics out.
//!
//! [`TrainPlan`] lays a training step and its evaluation out in one slab,
//! [`Session`] runs them on a device, [`run`] is the loop over the data.

mod checkpoint;
mod early_stop;
mod metrics;
mod ranks;
mod run;
mod schedule;
mod step;
mod tensorboard;

pub use checkpoint::{CheckpointError, ExtraFile, ModelFiles, TrainerState, checkpoints};
pub use early_stop::{Best, EarlyStop, EarlyStopError, Verdict};
pub use metrics::{MetricsError, MetricsLog};
pub use run::{
    Batches, Ended, Event, PackedBatches, RunError, RunOptions, RunSummary, StepMetrics, evaluate,
    run,
};
pub use schedule::{Decay, Schedule, ScheduleError, Warmup};
pub use step::{MicroBatch, PlanError, Session, StepResult, TrainPlan};
pub use tensorboard::{EventWriter, TensorBoardError};

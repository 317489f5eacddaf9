//! One point of a sweep: plan, refuse or run, and say what the kernel saw.
//!
//! Hidden from the help: `plimsoll sweep` starts it in a fresh process.

use std::time::Instant;

use clap::Args;
use plimsoll_measure::Resident;
use plimsoll_model::{init_state, init_weights, load_weights};
use plimsoll_plan::schedule;
use plimsoll_train::{Batches, MicroBatch, PackedBatches, Session, TrainPlan};
use serde_json::{Value, json};

use crate::data_args::DataArgs;
use crate::devices::DeviceArg;
use crate::exit::{Outcome, Stop};
use crate::measuring::Growth;
use crate::model_source::open_model;
use crate::planning::Planner;
use crate::recipe_args::RecipeArgs;
use crate::units;

#[derive(Clone, Debug, Args)]
pub struct PointArgs {
    /// A preset, a model directory, a .gguf file, or org/name.
    #[arg(long, default_value = "plimsoll-tiny")]
    pub model: String,
    #[command(flatten)]
    pub recipe: RecipeArgs,
    #[command(flatten)]
    pub data: DataArgs,
    /// Timed optimizer steps at each point.
    #[arg(long, default_value_t = 30)]
    pub iterations: usize,
    /// Steps before the clock starts.
    #[arg(long, default_value_t = 2)]
    pub warmup: usize,
    /// Memory that a point may take [default: the machine's]
    #[arg(long, value_parser = units::parse_bytes)]
    pub memory_limit: Option<u64>,
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Where to run [default: cuda where a GPU is usable, else cpu]
    #[arg(long, value_enum)]
    pub device: Option<DeviceArg>,
}

pub fn run(args: &PointArgs) -> Outcome {
    let model = open_model(&args.model)?;
    let kind = DeviceArg::resolve(args.device);
    let recipe = args.recipe.recipe(&model.arch, kind.default_precision())?;
    let planner = Planner::device(kind, args.memory_limit)?;
    let plan = TrainPlan::new(&model.arch, &recipe, &*planner.target).map_err(Stop::input)?;
    let rows = args.data.rows(&model, recipe.batch, recipe.seq, args.seed)?.train;
    let planned = plan.slab_bytes() + planner.device.overhead_bytes;
    let documents = document_tokens(&rows);
    let planned_seconds = schedule(&plan.train, &planner.device, Some(documents)).step_seconds;

    let limit = planner.memory.unwrap_or(u64::MAX);
    // On the CPU the process itself lives in the same memory.
    let process = match kind {
        DeviceArg::Cpu => Resident::now().map_err(Stop::input)?.rss,
        DeviceArg::Cuda => 0,
    };
    if planned.saturating_add(process) > limit {
        outln!("{}", json!({ "planned_bytes": planned, "planned_seconds": planned_seconds }));
        return Err(Stop::DoesNotFit(format!(
            "the plan needs {} and the process {}, of {}",
            units::bytes(planned),
            units::bytes(process),
            units::bytes(limit)
        )));
    }

    let growth = Growth::start()?;
    let mut device = kind.reserve(plan.slab_bytes())?;
    let (program, layout) = (&plan.train, &plan.train_layout);
    init_state(&mut *device, program, layout, &model.arch)?;
    match &model.checkpoint {
        Some(checkpoint) => load_weights(&mut *device, program, layout, &model.arch, checkpoint)?,
        None => init_weights(&mut *device, program, layout, &model.arch, args.seed)?,
    }
    let mut session = Session { plan: &plan, device: &mut *device };
    let (loss, times) = measure(&mut session, &rows, args)?;
    let taken = device.taken_bytes()?;
    let measured = match taken {
        Some(taken) => taken.total,
        None => growth.most()?,
    };

    let median = times[times.len() / 2];
    let tokens = (recipe.batch * recipe.seq * recipe.accumulate) as f64;
    let result: Value = json!({
        "planned_bytes": planned,
        "measured_bytes": measured,
        "peak_allocated_bytes": plan.train_layout.lower_bound,
        "peak_reserved_bytes": plan.slab_bytes(),
        "overhead_bytes": taken.map(|t| t.overhead),
        "iterations_per_second": 1.0 / median,
        "tokens_per_second": tokens / median,
        "seconds_per_iteration": median,
        "planned_seconds": planned_seconds,
        "memory_limit_bytes": limit,
        "loss": loss,
    });
    outln!("{result}");
    Ok(())
}

/// The length of a token's own document, over the tokens of the first batches.
fn document_tokens(rows: &PackedBatches) -> f64 {
    let (mut tokens, mut before) = (0u64, 0u64);
    for n in 0..16 {
        let batch = rows.batch(n);
        for (start, position) in batch
            .doc_start
            .chunks(batch.seq_len)
            .flat_map(|row| row.iter().enumerate().map(|(i, start)| (*start as u64, i as u64)))
        {
            tokens += 1;
            before += position.saturating_sub(start) + 1;
        }
    }
    // A document of n tokens has n (n + 1) / 2 pairs.
    (2.0 * before as f64 / tokens.max(1) as f64 - 1.0).max(1.0)
}

/// Runs the warm-up and the timed steps; the last loss, and sorted seconds.
fn measure(
    session: &mut Session,
    rows: &PackedBatches,
    args: &PointArgs,
) -> Result<(f32, Vec<f64>), Stop> {
    let accumulate = session.plan.recipe.accumulate as u64;
    let mut times = Vec::with_capacity(args.iterations.max(1));
    let mut loss = f32::NAN;
    for step in 0..(args.warmup + args.iterations.max(1)) as u64 {
        let first = step * accumulate;
        let batches: Vec<_> = (first..first + accumulate).map(|n| rows.batch(n)).collect();
        let micro: Vec<_> = batches.iter().map(MicroBatch::from).collect();
        let started = Instant::now();
        loss = session.train(&micro, 1e-4, step + 1, args.seed)?.loss;
        if step >= args.warmup as u64 {
            times.push(started.elapsed().as_secs_f64());
        }
    }
    times.sort_by(f64::total_cmp);
    Ok((loss, times))
}

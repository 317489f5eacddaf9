//! One point of a sweep: plan, refuse or run, and say what the kernel saw.
//!
//! Hidden from the help: `plimsoll sweep` starts it in a fresh process.

use std::time::Instant;

use clap::Args;
use plimsoll_data::Batch;
use plimsoll_measure::Resident;
use plimsoll_model::{init_adapter, init_state, init_weights, load_weights};
use plimsoll_plan::{Device, Layout, Taken, Updates, schedule};
use plimsoll_program::Program;
use plimsoll_train::{Batches, MicroBatch, PackedBatches, Session, TrainPlan};
use serde_json::{Value, json};

use crate::data_args::DataArgs;
use crate::devices::DeviceArg;
use crate::exit::{Outcome, Stop};
use crate::measuring::Growth;
use crate::model_source::{ModelSource, open_model};
use crate::planning::{Planner, Settled};
use crate::ranks::Team;
use crate::recipe_args::RecipeArgs;
use crate::units;
use crate::without_effect::Setting;

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
    #[arg(long, default_value_t = 30, value_parser = units::parse_count)]
    pub iterations: usize,
    /// Steps before the clock starts.
    #[arg(long, default_value_t = 2, value_parser = units::parse_count_or_none)]
    pub warmup: usize,
    /// Memory that a point may take [default: the machine's]
    #[arg(long, value_parser = units::parse_bytes)]
    pub memory_limit: Option<u64>,
    /// Rows of random tokens, one document each, instead of data: no other rows of
    /// this length give attention more to do.
    #[arg(long, conflicts_with = "files")]
    pub full_rows: bool,
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Where to run [default: cuda where a GPU is usable, else cpu]
    #[arg(long, value_enum)]
    pub device: Option<DeviceArg>,
}

pub fn run(args: &PointArgs) -> Outcome {
    let point = PlannedPoint::new(args)?;
    if let Err(stop) = point.must_fit() {
        outln!("{}", json!({ "planned_bytes": point.bytes(), "planned_seconds": point.seconds }));
        return Err(stop);
    }
    let ranks = point.plan.recipe.sharding.ranks;
    if ranks == 1 {
        outln!("{}", point.reserve(args)?.measure(args)?.json());
        return Ok(());
    }
    outln!("{}", json_of_ranks(&point.measure_ranks(args)?));
    Ok(())
}

/// A recipe with its plan, before anything is reserved.
pub struct PlannedPoint {
    pub model: ModelSource,
    pub plan: TrainPlan,
    pub planner: Planner,
    pub kind: DeviceArg,
    /// Planned, of a step.
    pub seconds: f64,
    /// Where updates run, where their state is offloaded.
    updates: Option<Updates>,
    host_memory: Option<u64>,
    rows: Rows,
}

/// Where a point's batches come from.
#[derive(Clone)]
enum Rows {
    Full(FullRows),
    Packed(PackedBatches),
}

impl Batches for Rows {
    fn batch(&self, number: u64) -> Batch {
        match self {
            Rows::Full(rows) => rows.batch(number),
            Rows::Packed(rows) => rows.batch(number),
        }
    }

    fn per_epoch(&self) -> u64 {
        match self {
            Rows::Full(rows) => rows.per_epoch(),
            Rows::Packed(rows) => rows.per_epoch(),
        }
    }
}

/// A planned recipe on a device that holds its weights.
pub struct Ready {
    pub point: PlannedPoint,
    pub device: Box<dyn Device>,
    growth: Growth,
}

/// What a run of [`Ready`] showed.
pub struct Measured {
    pub planned_bytes: u64,
    pub measured_bytes: u64,
    /// Outside the slab, where a driver counts it.
    pub overhead_bytes: Option<u64>,
    /// Slab in page-locked host memory: planned, and as the kernel counts it.
    pub host_bytes: u64,
    pub measured_host_bytes: Option<u64>,
    pub lower_bound_bytes: u64,
    pub slab_bytes: u64,
    pub memory_limit_bytes: u64,
    pub planned_seconds: f64,
    pub updates: Option<Updates>,
    /// Of every timed step, sorted.
    pub seconds: Vec<f64>,
    pub tokens: f64,
    pub loss: f32,
}

impl Measured {
    pub fn median(&self) -> f64 {
        self.seconds[self.seconds.len() / 2]
    }

    pub fn json(&self) -> Value {
        let median = self.median();
        let mut value = json!({
            "planned_bytes": self.planned_bytes,
            "measured_bytes": self.measured_bytes,
            "peak_allocated_bytes": self.lower_bound_bytes,
            "peak_reserved_bytes": self.slab_bytes,
            "overhead_bytes": self.overhead_bytes,
            "host_bytes": self.host_bytes,
            "measured_host_bytes": self.measured_host_bytes,
            "iterations_per_second": 1.0 / median,
            "tokens_per_second": self.tokens / median,
            "seconds_per_iteration": median,
            "planned_seconds": self.planned_seconds,
            "memory_limit_bytes": self.memory_limit_bytes,
            "loss": self.loss,
        });
        if let (Some(updates), Value::Object(fields)) = (&self.updates, &mut value) {
            fields.insert("updates".into(), json!(updates));
        }
        value
    }
}

impl PlannedPoint {
    /// # Errors
    /// The model, the data or the recipe is not usable.
    pub fn new(args: &PointArgs) -> Result<PlannedPoint, Stop> {
        args.recipe.must_train()?;
        let model = open_model(&args.model)?;
        let kind = DeviceArg::resolve(args.device);
        let recipe =
            args.recipe.recipe(&model.arch, model.stored_quant(), kind.default_precision())?;
        let ranks = recipe.sharding.ranks;
        Setting::of(&args.recipe, kind.kind(), ranks).refuse_without_effect(&args.recipe)?;
        let transport = args.recipe.collectives.here(kind, ranks, ranks)?;
        let planner = Planner::device(kind, args.memory_limit)?
            .for_ranks(ranks, 1, None, transport)
            .with_host_memory(args.recipe.host_memory, ranks)
            .with_host(&args.recipe, ranks);
        let Settled { recipe, updates } = planner.settle(&model.arch, recipe, &args.recipe)?;
        let plan = TrainPlan::new(&model.arch, &recipe, &*planner.target).map_err(Stop::input)?;
        let (batch, seq) = (recipe.batch, recipe.seq);
        let rows = if args.full_rows {
            Rows::Full(FullRows { batch, seq, vocab: model.arch.vocab_size, seed: args.seed })
        } else {
            Rows::Packed(args.data.rows(&model, batch, seq, args.seed)?.train)
        };
        let documents = if args.full_rows { seq as f64 } else { document_tokens(&rows) };
        let seconds = schedule(&plan.train, &plan.train_layout, &planner.device, Some(documents))
            .step_seconds;
        let host_memory = args.recipe.host_memory;
        Ok(PlannedPoint { model, plan, planner, kind, seconds, updates, host_memory, rows })
    }

    /// Slab and what the driver takes beside it.
    pub fn bytes(&self) -> u64 {
        let slabs = self.plan.slabs();
        self.planner.device.needed_bytes(slabs.device, slabs.host)
    }

    fn memory_limit(&self) -> u64 {
        self.planner.memory.unwrap_or(u64::MAX)
    }

    /// # Errors
    /// Status 3.
    pub fn must_fit(&self) -> Outcome {
        // On the CPU the process itself lives in the same memory.
        let process = match self.kind {
            DeviceArg::Cpu => Resident::now().map_err(Stop::input)?.rss,
            DeviceArg::Cuda => 0,
        };
        if self.bytes().saturating_add(process) <= self.memory_limit() {
            let ranks = self.plan.recipe.sharding.ranks;
            return self.kind.host_must_fit(self.plan.slabs(), ranks, self.host_memory);
        }
        Err(Stop::DoesNotFit(format!(
            "the plan needs {} and the process {}, of {}",
            units::bytes(self.bytes()),
            units::bytes(process),
            units::bytes(self.memory_limit())
        )))
    }

    /// Reserves the slab and fills it: weights of the checkpoint, or random ones.
    ///
    /// # Errors
    /// The device's own, or the checkpoint cannot be read.
    pub fn reserve(self, args: &PointArgs) -> Result<Ready, Stop> {
        let growth = Growth::start()?;
        let mut device = self.kind.reserve(self.plan.slabs())?;
        fill(&self.plan, &self.model, &mut *device, args.seed)?;
        Ok(Ready { point: self, device, growth })
    }

    /// Runs the warm-up and the timed steps on all ranks; what each showed.
    ///
    /// # Errors
    /// The device's own, or the checkpoint cannot be read.
    fn measure_ranks(&self, args: &PointArgs) -> Result<Vec<Measured>, Stop> {
        let growth = Growth::start()?;
        let ranks = self.plan.recipe.sharding.ranks;
        let (plan, model, kind) = (&self.plan, &self.model, self.kind);
        let transport = self.planner.transport();
        let inputs = vec![self.rows.clone(); ranks];
        let all = Team::threads(ranks).run(inputs, |member, rows| {
            let mut device = kind.reserve_in(plan.slabs(), member, transport)?;
            fill(plan, model, &mut *device, args.seed)?;
            let mut session = Session { plan, device: &mut *device };
            let (loss, seconds) = steps(&mut session, &rows, args)?;
            Ok((loss, seconds, device.taken_bytes()?))
        })?;
        // The kernel counts all ranks of a process together.
        let share = growth.most()? / ranks as u64;
        let measured = all.into_iter().map(|(loss, seconds, taken)| {
            let bytes = taken.map_or(share, |t| t.total);
            self.measured(bytes, taken, loss, seconds)
        });
        Ok(measured.collect())
    }

    fn measured(
        &self,
        measured_bytes: u64,
        taken: Option<Taken>,
        loss: f32,
        seconds: Vec<f64>,
    ) -> Measured {
        let recipe = &self.plan.recipe;
        let rows = recipe.batch * recipe.accumulate * recipe.sharding.ranks;
        Measured {
            planned_bytes: self.bytes(),
            measured_bytes,
            overhead_bytes: taken.map(|t| t.overhead),
            host_bytes: self.plan.slabs().host,
            measured_host_bytes: taken.map(|t| t.host),
            lower_bound_bytes: self.plan.train_layout.lower_bound,
            slab_bytes: self.plan.slab_bytes(),
            memory_limit_bytes: self.memory_limit(),
            planned_seconds: self.seconds,
            updates: self.updates.clone(),
            seconds,
            tokens: (rows * recipe.seq) as f64,
            loss,
        }
    }
}

/// Everything that a plan starts from: state, weights, and new adapters.
fn fill(
    plan: &TrainPlan,
    model: &ModelSource,
    device: &mut dyn Device,
    seed: u64,
) -> Result<(), Stop> {
    let (program, layout, arch) = (&plan.train, &plan.train_layout, &model.arch);
    fill_base(device, (program, layout), model, seed)?;
    if let Some(lora) = &plan.recipe.lora {
        init_adapter(device, program, layout, arch, lora, seed)?;
    }
    Ok(())
}

/// State as it starts, and weights of the checkpoint, or random ones.
///
/// # Errors
/// The device's own, or the checkpoint cannot be read.
pub fn fill_base(
    device: &mut dyn Device,
    (program, layout): (&Program, &Layout),
    model: &ModelSource,
    seed: u64,
) -> Result<(), Stop> {
    init_state(device, program, layout, &model.arch)?;
    match &model.checkpoint {
        Some(checkpoint) => load_weights(device, program, layout, &model.arch, checkpoint)?,
        None => init_weights(device, program, layout, &model.arch, seed)?,
    }
    Ok(())
}

/// The slowest rank's figures, the most memory of any, and lists over all.
fn json_of_ranks(ranks: &[Measured]) -> Value {
    let list = |f: &dyn Fn(&Measured) -> Value| ranks.iter().map(f).collect::<Vec<Value>>();
    let slowest = ranks.iter().max_by(|a, b| a.median().total_cmp(&b.median()));
    let mut value = slowest.map_or(Value::Null, Measured::json);
    if let Value::Object(fields) = &mut value {
        let most = ranks.iter().map(|m| m.measured_bytes).max();
        fields.insert("measured_bytes".into(), most.into());
        fields.insert("ranks".into(), ranks.len().into());
        fields.insert("rank_planned_bytes".into(), list(&|m| m.planned_bytes.into()).into());
        fields.insert("rank_measured_bytes".into(), list(&|m| m.measured_bytes.into()).into());
        fields.insert("rank_seconds".into(), list(&|m| m.median().into()).into());
    }
    value
}

impl Ready {
    /// Runs the warm-up and the timed steps.
    ///
    /// # Errors
    /// The device's own.
    pub fn measure(&mut self, args: &PointArgs) -> Result<Measured, Stop> {
        let PlannedPoint { plan, rows, .. } = &self.point;
        let mut session = Session { plan, device: &mut *self.device };
        let (loss, seconds) = steps(&mut session, rows, args)?;
        let taken = self.device.taken_bytes()?;
        let measured_bytes = match taken {
            Some(taken) => taken.total,
            None => self.growth.most()?,
        };
        Ok(self.point.measured(measured_bytes, taken, loss, seconds))
    }
}

/// Batches of random tokens in which every row is one document.
#[derive(Clone)]
struct FullRows {
    batch: usize,
    seq: usize,
    vocab: usize,
    seed: u64,
}

impl Batches for FullRows {
    fn batch(&self, number: u64) -> Batch {
        let mut batch = Batch::new(self.batch, self.seq);
        let mut state = self.seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        for (i, id) in batch.ids.iter_mut().enumerate() {
            // Xorshift (Marsaglia 2003).
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            *id = (state % self.vocab as u64) as i32;
            batch.positions[i] = (i % self.seq) as i32;
            batch.doc_start[i] = 0;
        }
        for row in 0..self.batch {
            let (first, last) = (row * self.seq, (row + 1) * self.seq - 1);
            batch.labels[first..last].copy_from_slice(&batch.ids[first + 1..=last]);
        }
        batch.trained = self.batch * (self.seq - 1);
        batch.tokens = self.batch * self.seq;
        batch
    }

    fn per_epoch(&self) -> u64 {
        u64::MAX
    }
}

/// The length of a token's own document, over the tokens of the first batches.
fn document_tokens(rows: &dyn Batches) -> f64 {
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
fn steps(
    session: &mut Session,
    rows: &dyn Batches,
    args: &PointArgs,
) -> Result<(f32, Vec<f64>), Stop> {
    let accumulate = session.plan.recipe.accumulate as u64;
    let (rank, ranks) = (session.rank() as u64, session.ranks() as u64);
    let mut times = Vec::with_capacity(args.iterations.min(1 << 16));
    let mut loss = f32::NAN;
    for step in 0..(args.warmup + args.iterations) as u64 {
        let first = step * accumulate * ranks;
        let batches: Vec<_> =
            (0..accumulate).map(|n| rows.batch(first + n * ranks + rank)).collect();
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

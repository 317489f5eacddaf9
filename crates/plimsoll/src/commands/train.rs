//! `plimsoll train`: plan, refuse or run, in exactly the planned memory.

use std::fs::{File, TryLockError};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use plimsoll_model::{Adapter, init_adapter, init_state, init_weights, load_adapter, load_weights};
use plimsoll_plan::Device;
use plimsoll_program::Recipe;
use plimsoll_train::{
    Batches, CheckpointError, Decay, EarlyStop, Ended, Event, ModelFiles, RunError, RunOptions,
    Schedule, Session, StepMetrics, TrainPlan, TrainerState, Warmup, checkpoints, run as run_loop,
};
use serde_json::{Value, json};

use crate::commands::plan::table;
use crate::data_args::{DataArgs, Rows};
use crate::devices::DeviceArg;
use crate::exit::{Outcome, Stop};
use crate::measuring::Growth;
use crate::model_source::{ModelSource, open_model};
use crate::planning::{Planner, Settled};
use crate::ranks::Team;
use crate::recipe_args::{MethodArg, RecipeArgs};
use crate::weights::{note_other_quant, open_adapter, resolve};
use crate::without_effect::Setting;
use crate::{Format, interrupt, output, units};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ScheduleArg {
    Cosine,
    Linear,
    Constant,
}

#[derive(Debug, Args)]
pub struct TrainArgs {
    /// A model directory, a .gguf file, or a preset (which starts from random weights)
    /// [default: what --adapter names as its base]
    #[arg(long, required_unless_present = "adapter")]
    pub model: Option<String>,
    /// Folder of an adapter to go on from, as `train` or PEFT writes it: rank, alpha,
    /// targets and modules are its own.
    #[arg(long)]
    pub adapter: Option<PathBuf>,
    #[command(flatten)]
    pub recipe: RecipeArgs,
    #[command(flatten)]
    pub data: DataArgs,
    /// Passes over the data.
    #[arg(long, default_value_t = 1.0)]
    pub epochs: f64,
    /// Optimizer steps, instead of epochs.
    #[arg(long)]
    pub steps: Option<u64>,
    /// Learning rate at its highest.
    #[arg(long, default_value_t = 2e-5)]
    pub lr: f64,
    #[arg(long, value_enum, default_value = "cosine")]
    pub schedule: ScheduleArg,
    /// Steps of warm-up; below 1, a part of all steps.
    #[arg(long, default_value_t = 0.03)]
    pub warmup: f64,
    /// Evaluate every so many steps [default: every epoch]
    #[arg(long)]
    pub eval_every: Option<u64>,
    /// Write a checkpoint every so many steps [default: every epoch]
    #[arg(long)]
    pub save_every: Option<u64>,
    /// Checkpoints that are kept.
    #[arg(long, default_value_t = 2)]
    pub keep: usize,
    /// Stop after so many evaluations without a better validation loss.
    #[arg(long)]
    pub patience: Option<u32>,
    /// What counts as better.
    #[arg(long, default_value_t = 0.0)]
    pub min_delta: f64,
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Memory to stay in [default: the machine's]
    #[arg(long, value_parser = units::parse_bytes)]
    pub memory_limit: Option<u64>,
    /// Where to run [default: cuda where a GPU is usable, else cpu]
    #[arg(long, value_enum)]
    pub device: Option<DeviceArg>,
    /// Folder of the model or adapter, its checkpoints and its metrics.
    #[arg(long)]
    pub out: PathBuf,
    /// Go on from the newest checkpoint in --out.
    #[arg(long)]
    pub resume: bool,
}

pub fn run(args: &TrainArgs) -> Outcome {
    let (format, _) = args.data.formats()?;
    check(args)?;
    let (name, adapter) = match (&args.model, &args.adapter) {
        (None, Some(adapter)) => resolve(&adapter.display().to_string(), None)?,
        (model, adapter) => resolve(model.as_deref().unwrap_or_default(), adapter.as_deref())?,
    };
    let model = open_model(&name)?;
    let adapter = match adapter {
        Some(path) => Some(adapter_to_go_on_from(args, &path, &model)?),
        None => None,
    };
    let recipe_args = match &adapter {
        Some(adapter) => {
            let lora = args.recipe.lora.going_on_from(adapter.lora())?;
            let mut method = args.recipe.method;
            if method == MethodArg::Full {
                method = MethodArg::Lora;
                note!(
                    "--method lora: the base keeps its type; --method qlora puts it in four bits"
                );
            }
            RecipeArgs { method, lora, ..args.recipe.clone() }
        }
        None => args.recipe.clone(),
    };
    // Before signals ask for an orderly end: who waits for the others can just end.
    let mut team = Team::open(args.recipe.gpus)?;
    let stop = interrupt::flag();
    let kind = DeviceArg::resolve(args.device);
    let stored = model.stored_quant();
    let mut recipe = recipe_args.recipe(&model.arch, stored, kind.default_precision())?;
    if recipe.quant.is_some() {
        model.note_what_is_quantized_too();
    }
    adapter.iter().for_each(|adapter| note_other_quant(adapter, recipe.quant));
    recipe.sharding.ranks = team.ranks();
    recipe.check(&model.arch).map_err(Stop::input)?;
    Setting::of(&args.recipe, kind.kind(), team.ranks()).refuse_without_effect(&args.recipe)?;
    let transport = args.recipe.collectives.here(kind, team.ranks(), team.local())?;
    let ranks_here = team.ranks().div_ceil(team.nodes());
    let planner = Planner::device(kind, args.memory_limit)?
        .for_ranks(team.ranks(), team.nodes(), None, transport)
        .with_host_memory(args.recipe.host_memory, ranks_here)
        .with_host(&args.recipe, ranks_here);
    let Settled { recipe, updates } = planner.settle(&model.arch, recipe, &args.recipe)?;
    if args.recipe.recompute_is_auto() {
        note!("recompute: {}", recipe.recompute);
    }
    let mut planned = planner.plan(&model.arch, &recipe)?;
    planned.report.updates = updates;
    planned.must_fit(&planner, &model.arch, &recipe)?;
    kind.host_must_fit(planned.slabs(), ranks_here, args.recipe.host_memory)?;

    note!("tokenizer: {}", model.tokenizer_from);
    note!("chat template: {}", model.template.reason);
    let rows = args.data.rows(&model, recipe.batch, recipe.seq, args.seed)?;
    let plan = TrainPlan::new(&model.arch, &recipe, &*planner.target).map_err(Stop::input)?;
    let micro_batches = (recipe.accumulate * team.ranks()) as u64;
    let options = options(args, &rows, micro_batches, (&name, &model))?;
    let mut lock = None;
    let old = team.lead(|| {
        let (old, held) = prepare_folder(args)?;
        lock = Some(held);
        Ok(old.map_or(String::new(), |path| path.display().to_string()))
    })?;
    let old = (!old.is_empty()).then(|| PathBuf::from(old));
    output::note(format_args!("{}", table(&planned.report)));

    let planned_bytes = kind.slab_bytes(plan.slabs());
    let growth = Growth::start()?;
    let start = Start { model: &model, adapter: adapter.as_ref() };
    let fingerprint = fingerprint(args, &start, &recipe, &rows, &options);
    let mut settings = fingerprint.clone();
    if let Some(fields) = settings.as_object_mut() {
        fields.insert("steps".into(), options.total_steps.into());
        fields.insert("zero".into(), recipe.sharding.zero.into());
        fields.insert("reduce_dtype".into(), format!("{:?}", recipe.sharding.reduce).into());
    }
    team.agree(&settings)?;
    let (local, leads) = (team.local(), team.leads());
    let inputs = vec![(rows.train, rows.validation); local];
    let results = team.run(inputs, |member, (train, validation)| {
        let rank = member.rank;
        let mut device = kind.reserve_in(plan.slabs(), member, planner.transport())?;
        let state = fill(args, &start, &plan, &mut *device, old.as_ref(), &fingerprint)?;
        let mut session = Session { plan: &plan, device: &mut *device };
        let (total, first) = (options.total_steps, state.step);
        let mut progress = (rank == 0).then(|| Progress::new(total, first, planned_bytes));
        let summary = run_loop(
            &mut session,
            &train,
            validation.as_ref().map(|v| v as &dyn Batches),
            &options,
            state,
            stop,
            &mut |event| progress.iter_mut().for_each(|p| p.show(&event)),
        );
        progress.iter().for_each(Progress::finish);
        Ok((summary.map_err(of_run)?, device.taken_bytes()?))
    })?;
    let Some((summary, taken)) = results.into_iter().next() else {
        return Err(Stop::Failed("there is no rank in this process".into()));
    };
    let measured = match taken {
        Some(taken) => taken.total,
        // The kernel counts all ranks of a process together.
        None => growth.most()? / local as u64,
    };
    drop(lock);
    if !leads {
        return Ok(());
    }
    match format {
        Format::Json => {
            let mut value =
                serde_json::to_value(&summary).map_err(|e| Stop::Failed(e.to_string()))?;
            if let Value::Object(fields) = &mut value {
                fields.insert("planned_bytes".into(), planned_bytes.into());
                fields.insert("host_bytes".into(), plan.slabs().host.into());
                fields.insert("measured_bytes".into(), measured.into());
                if let Some(updates) = &planned.report.updates {
                    let json = serde_json::to_value(updates);
                    fields.insert("updates".into(), json.unwrap_or(Value::Null));
                }
                fields.insert("out".into(), args.out.display().to_string().into());
            }
            outln!("{value}");
        }
        Format::Table => {
            outln!(
                "{} steps in {}: loss {:.4}, {:.0} tokens/s; planned {}, measured {}",
                summary.steps,
                units::seconds(summary.seconds),
                summary.loss,
                summary.tokens_per_second,
                units::bytes(planned_bytes),
                units::bytes(measured)
            );
            if let (Some(best), Some(step)) = (summary.best_validation_loss, summary.best_step) {
                outln!(
                    "best validation loss {best:.4} at step {step}: {}",
                    args.out.join("best").display()
                );
            }
            match summary.ended {
                Ended::Interrupted => {
                    outln!("interrupted; the same command with --resume goes on")
                }
                Ended::EarlyStop => outln!("stopped early: no better validation loss"),
                Ended::Finished if recipe.lora.is_some() => {
                    outln!("adapter: {} (chat --model {0} talks to it)", args.out.display());
                }
                Ended::Finished => outln!("model: {}", args.out.display()),
            }
        }
    }
    Ok(())
}

fn of_run(error: RunError) -> Stop {
    match error {
        RunError::Diverged { .. } => Stop::Failed(error.to_string()),
        RunError::Checkpoint(CheckpointError::NotFinite { .. }) => Stop::Failed(error.to_string()),
        RunError::Checkpoint(CheckpointError::Device(e)) | RunError::Device(e) => e.into(),
        other => Stop::input(other),
    }
}

/// Refuses options that need neither model nor data to be seen as wrong.
fn check(args: &TrainArgs) -> Outcome {
    args.recipe.must_train()?;
    if !(args.epochs > 0.0 && args.epochs <= 1e6) {
        return Err(Stop::Input(format!(
            "--epochs {}: give a number above 0, up to a million",
            args.epochs
        )));
    }
    let counts =
        [("steps", args.steps), ("eval-every", args.eval_every), ("save-every", args.save_every)];
    for (option, value) in counts {
        if value == Some(0) {
            return Err(Stop::Input(format!("--{option} 0: give at least 1 step")));
        }
    }
    // What is trained from must stay as it is: its files would be overwritten.
    let real = |path: &Path| std::fs::canonicalize(path).ok();
    let model = args.model.as_deref().and_then(|model| real(model.as_ref()));
    if model.is_some() && model == real(&args.out) {
        return Err(Stop::Input(format!(
            "--out {} is the folder of --model, whose files it would overwrite: give another",
            args.out.display()
        )));
    }
    EarlyStop::new(args.patience, args.min_delta).map(|_| ()).map_err(Stop::input)
}

/// The folder exists, can be written and is no other process's at this time; the
/// newest checkpoint, if there is one to go on from, and the lock to hold.
fn prepare_folder(args: &TrainArgs) -> Result<(Option<PathBuf>, File), Stop> {
    let out = &args.out;
    std::fs::create_dir_all(out)
        .map_err(|e| Stop::Input(format!("--out {}: cannot create it: {e}", out.display())))?;
    let lock = File::open(out)
        .map_err(|e| Stop::Input(format!("--out {}: cannot open it: {e}", out.display())))?;
    // Some network file systems have no locks; the run goes on without.
    if let Err(TryLockError::WouldBlock) = lock.try_lock() {
        return Err(Stop::Input(format!(
            "--out {}: another process is training into it",
            out.display()
        )));
    }
    let probe = out.join(".writable");
    std::fs::write(&probe, b"")
        .and_then(|()| std::fs::remove_file(&probe))
        .map_err(|e| Stop::Input(format!("--out {}: cannot write to it: {e}", out.display())))?;
    let newest = checkpoints(out).map_err(Stop::input)?.pop();
    match (&newest, args.resume) {
        (Some(path), false) => Err(Stop::Input(format!(
            "--out {} holds a run ({}): add --resume to go on, or give another folder",
            out.display(),
            path.file_name().unwrap_or_default().display()
        ))),
        (None, true) => {
            note!("no checkpoint in {} yet: starting from the beginning", out.display());
            Ok((None, lock))
        }
        _ => Ok((newest, lock)),
    }
}

fn options(
    args: &TrainArgs,
    rows: &Rows,
    micro_batches: u64,
    (name, model): (&str, &ModelSource),
) -> Result<RunOptions, Stop> {
    let epoch_steps = rows.train.per_epoch().div_ceil(micro_batches).max(1);
    let by_epochs = (rows.train.per_epoch() as f64 * args.epochs / micro_batches as f64).ceil();
    let total_steps = args.steps.unwrap_or(by_epochs as u64).max(1);
    let warmup = if args.warmup >= 1.0 {
        Warmup::Steps(args.warmup as u64)
    } else {
        Warmup::Ratio(args.warmup)
    };
    let decay = match args.schedule {
        ScheduleArg::Cosine => Decay::Cosine,
        ScheduleArg::Linear => Decay::Linear,
        ScheduleArg::Constant => Decay::Constant,
    };
    Ok(RunOptions {
        total_steps,
        schedule: Schedule::new(args.lr, decay, warmup, total_steps).map_err(Stop::input)?,
        seed: args.seed,
        out: args.out.clone(),
        evaluate_every: args.eval_every.unwrap_or(epoch_steps),
        save_every: args.save_every.unwrap_or(epoch_steps),
        keep: args.keep,
        files: ModelFiles { base: base(name), extra: model.tokenizer_files()? },
    })
}

/// What a run begins with.
struct Start<'a> {
    model: &'a ModelSource,
    adapter: Option<&'a Adapter>,
}

/// # Errors
/// The method trains no adapters, the model has no weights, or the adapter does not fit.
fn adapter_to_go_on_from(
    args: &TrainArgs,
    path: &Path,
    model: &ModelSource,
) -> Result<Adapter, Stop> {
    model.weights()?;
    let adapter = open_adapter(path, model)?;
    if crate::given("--method") && args.recipe.method == MethodArg::Full {
        return Err(Stop::Input(format!(
            "--method full trains no adapter, and {} is one: give --method lora or qlora to go \
             on from it, or `merge` it first",
            path.display()
        )));
    }
    let real = |path: &Path| std::fs::canonicalize(path).ok();
    if real(path).is_some() && real(path) == real(&args.out) {
        return Err(Stop::Input(format!(
            "--out {} is the folder of the adapter to go on from, whose files it would \
             overwrite: give another",
            args.out.display()
        )));
    }
    note!("going on from the adapter in {}", path.display());
    Ok(adapter)
}

/// Fills the slab: from a checkpoint, from the model's files and the adapter's, or at
/// random.
fn fill(
    args: &TrainArgs,
    start: &Start,
    plan: &TrainPlan,
    device: &mut dyn Device,
    checkpoint: Option<&PathBuf>,
    fingerprint: &Value,
) -> Result<TrainerState, Stop> {
    let (program, layout) = (&plan.train, &plan.train_layout);
    init_state(device, program, layout, &plan.arch)?;
    let early_stop = EarlyStop::new(args.patience, args.min_delta).map_err(Stop::input)?;
    let frozen = plan.recipe.lora.is_some();
    if checkpoint.is_none() || frozen {
        match &start.model.checkpoint {
            Some(checkpoint) => load_weights(device, program, layout, &plan.arch, checkpoint)?,
            None => init_weights(device, program, layout, &plan.arch, args.seed)?,
        }
    }
    if let Some(path) = checkpoint {
        if device.rank() == 0 {
            note!("resuming from {}", path.display());
        }
        let mut session = Session { plan, device };
        let mut state = session.load_checkpoint(path, fingerprint).map_err(Stop::input)?;
        let history = state.early_stop.with_settings(args.patience, args.min_delta);
        state.early_stop = history.map_err(Stop::input)?;
        return Ok(state);
    }
    if let Some(lora) = &plan.recipe.lora {
        match start.adapter {
            Some(adapter) => load_adapter(device, program, layout, &plan.arch, adapter)?,
            None => init_adapter(device, program, layout, &plan.arch, lora, args.seed)?,
        }
    }
    Ok(TrainerState {
        step: 0,
        batches: 0,
        trained_tokens: 0,
        loss: None,
        validation_loss: None,
        early_stop,
        fingerprint: fingerprint.clone(),
    })
}

/// What an adapter names as its base, so that it is found from anywhere.
fn base(model: &str) -> String {
    let path = std::fs::canonicalize(model).ok();
    path.map_or_else(|| model.to_owned(), |p| p.display().to_string())
}

/// The settings that decide the numbers of a run. The number of steps is one of
/// them only where the schedule depends on it.
fn fingerprint(
    args: &TrainArgs,
    start: &Start,
    recipe: &Recipe,
    rows: &Rows,
    options: &RunOptions,
) -> Value {
    let r = &args.recipe;
    let packed = rows.train.packed();
    let mut schedule = serde_json::to_value(options.schedule).unwrap_or(Value::Null);
    if let (ScheduleArg::Constant, Some(fields)) = (args.schedule, schedule.as_object_mut()) {
        fields.remove("total_steps");
    }
    let mut value = json!({
        "model": start.model.arch.name,
        "parameters": start.model.arch.parameters(),
        "batch": r.batch,
        "seq": packed.seq_len,
        "rows": packed.rows(),
        // A step of two ranks is one of one rank with twice the micro-batches.
        "accumulate": recipe.accumulate * recipe.sharding.ranks,
        "precision": r.precision.map(|p| format!("{p:?}")),
        "optimizer": format!("{:?}", r.optimizer),
        "optimizer_dtype": format!("{:?}", r.optimizer_dtype),
        "beta1": r.beta1,
        "beta2": r.beta2,
        "eps": r.eps,
        "momentum": r.momentum,
        "weight_decay": r.weight_decay,
        "decay": format!("{:?}", r.decay),
        "max_grad_norm": r.max_grad_norm,
        "optimizer_in_backward": r.optimizer_in_backward,
        "schedule": schedule,
        "seed": args.seed,
        "train_on": format!("{:?}", args.data.train_on),
        "style": format!("{:?}", args.data.style),
        "pad": args.data.pad,
        "data": format!("{:016x}", packed.checksum()),
    });
    if let (false, Some(fields)) = (recipe.master_weights.is_none(), value.as_object_mut()) {
        fields.insert("master_weights".into(), recipe.master_weights.name().into());
    }
    if let (Some(lora), Some(fields)) = (&recipe.lora, value.as_object_mut()) {
        fields.insert("lora".into(), json!(lora));
        fields.insert("quant".into(), json!(recipe.quant));
        if let Some(adapter) = start.adapter {
            fields.insert("adapter".into(), format!("{:016x}", adapter.checksum()).into());
        }
    }
    value
}

/// A bar on a terminal, a line now and then elsewhere.
struct Progress {
    bar: Option<ProgressBar>,
    total: u64,
    last_line: Option<Instant>,
    planned: u64,
}

/// Between two lines where there is no terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

impl Progress {
    fn new(total: u64, done: u64, planned: u64) -> Progress {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(total).with_position(done);
            let style = ProgressStyle::with_template(
                "{bar:30} {pos}/{len} {msg}, {elapsed} gone, {eta} left",
            );
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        Progress { bar, total, last_line: None, planned }
    }

    fn show(&mut self, event: &Event) {
        match *event {
            Event::Step(m) => self.step(m),
            Event::Validation { step, loss, improved } => {
                let word = if improved { ", the best so far" } else { "" };
                self.line(format!(
                    "step {step}: validation loss {loss:.4}, perplexity {:.2}{word}",
                    loss.exp()
                ));
            }
            Event::Saved(path) => self.line(format!("saved {}", path.display())),
        }
    }

    fn step(&mut self, m: &StepMetrics) {
        let text = format!(
            "loss {:.4}, lr {:.2e}, {:.0} tokens/s, {}",
            m.loss,
            m.learning_rate,
            m.tokens_per_second,
            units::bytes(self.planned)
        );
        if let Some(bar) = &self.bar {
            bar.set_message(text);
            bar.set_position(m.step);
            return;
        }
        let due = self.last_line.is_none_or(|t| t.elapsed() >= LINE_INTERVAL);
        if due || m.step == self.total {
            self.last_line = Some(Instant::now());
            let left = (self.total - m.step) as f64 * m.seconds;
            note!("step {}/{}: {text}, {} left", m.step, self.total, units::seconds(left));
        }
    }

    fn line(&self, text: String) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => note!("{text}"),
        }
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

//! `plimsoll sweep`: planned beside measured, point by point.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use plimsoll_measure::{Launch, Point, RunError, Status, Sweep, Vary, run_point};
use plimsoll_report::{Level, Options, Report, Series, Theme, Timeline, render};
use serde_json::{Map, Value, json};

use crate::commands::point::PointArgs;
use crate::commands::trainer::{Trainer, TrainerArgs};
use crate::devices::DeviceArg;
use crate::exit::{Outcome, Stop};
use crate::model_source::{open_architecture, stored_quant};
use crate::planning::Planner;
use crate::recipe_args::{MasterWeightsArg, MethodArg};
use crate::without_effect::Setting;
use crate::{Format, interrupt};

#[derive(Debug, Args)]
pub struct SweepArgs {
    /// What changes from point to point: batch=1.. , batch=1,2,4 or seq=128..2048:128.
    #[arg(long, default_value = "batch=1..6")]
    pub vary: Vec<String>,
    /// Folder of points.jsonl, the logs and report.html; the same command continues there.
    #[arg(long, default_value = "out/sweep")]
    pub out: PathBuf,
    /// Seconds after which a point is given up.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub timeout: Option<u64>,
    #[command(flatten)]
    pub point: PointArgs,
    #[command(flatten)]
    pub trainer: TrainerArgs,
}

/// Options of this command that a point does not know.
const OWN_OPTIONS: [&str; 3] = ["--vary", "--out", "--timeout"];

pub fn run(args: &SweepArgs) -> Outcome {
    let (format, _) = args.point.data.formats()?;
    args.point.recipe.must_train()?;
    let mut axes = Vec::new();
    for text in &args.vary {
        axes.push(Vary::parse(text).map_err(Stop::input)?);
    }
    let trainer = args.trainer.trainer(&args.point, &axes)?;
    let known = |axis: &&Vary| ["batch", "seq", "accumulate"].contains(&axis.name());
    if let (None, Some(axis)) = (&trainer, axes.iter().find(|axis| !known(axis))) {
        return Err(Stop::Input(format!(
            "--vary {}: a sweep can vary batch, seq or accumulate",
            axis.name()
        )));
    }
    if trainer.is_none() {
        let recipe = &args.point.recipe;
        let kind = DeviceArg::resolve(args.point.device).kind();
        Setting::of(recipe, kind, recipe.gpus).refuse_without_effect(recipe)?;
    }
    let settings = trainer.as_ref().map_or_else(|| settings(args), Trainer::settings);
    let mut sweep = Sweep::open(&args.out, &settings, axes).map_err(Stop::input)?;
    if let Some(torn) = sweep.repaired() {
        note!("{torn}");
    }
    let stop = interrupt::flag();
    let table = format == Format::Table;
    if table {
        outln!("{}", header());
        for point in sweep.points() {
            outln!("{}", line(point));
        }
    }
    let program = std::env::current_exe()
        .map_err(|e| Stop::Failed(format!("cannot find this program's own file: {e}")))?;
    while let Some(point) = sweep.next_point() {
        let log = sweep.log_path(&point);
        let mut launch = match &trainer {
            Some(trainer) => trainer.launch(&point, log)?,
            None => Launch { args: point_arguments(&point), ..Launch::new(program.clone(), log) },
        };
        launch.timeout = args.timeout.map(Duration::from_secs);
        launch.memory_limit = args.point.memory_limit;
        let outcome = match run_point(&launch, stop) {
            Ok(outcome) => outcome,
            Err(error @ RunError::Interrupted) => return Err(Stop::Failed(error.to_string())),
            Err(error) => return Err(Stop::input(error)),
        };
        let bad_input =
            trainer.is_none() && outcome.status == Status::Failed && sweep.points().is_empty();
        let message = outcome.message.clone().unwrap_or_default();
        if bad_input {
            // The first point shows whether the recipe makes sense at all.
            return Err(Stop::Input(message));
        }
        let mut point = outcome.into_point(point);
        if let Some(trainer) = &trainer {
            trainer.add_throughput(&mut point);
        }
        sweep.record(point).map_err(Stop::input)?;
        if let (true, Some(point)) = (table, sweep.points().last()) {
            outln!("{}", line(point));
        }
    }
    let report = write_report(args, trainer.as_ref(), sweep.points())?;
    match format {
        Format::Json => {
            outln!("{}", json!({ "points": sweep.points(), "conclusions": report.conclusions }));
        }
        Format::Table => {
            outln!("");
            for sentence in &report.conclusions {
                outln!("{sentence}");
            }
            outln!("{}", args.out.join("report.html").display());
        }
    }
    match sweep.points().last() {
        Some(last) if sweep.points().iter().all(|p| p.status == Status::Failed) => {
            let said = last.message().unwrap_or_default();
            Err(Stop::Failed(format!("no point ran: {said}")))
        }
        _ => Ok(()),
    }
}

fn write_report(
    args: &SweepArgs,
    trainer: Option<&Trainer>,
    points: &[Point],
) -> Result<Report, Stop> {
    let series = Series::read(&args.out).map_err(Stop::input)?;
    let (title, timelines) = match trainer {
        Some(trainer) => (format!("{}: measured from outside", trainer.name()), Vec::new()),
        None => {
            let title = format!("{}: planned and measured", args.point.model);
            (title, timeline(args, points).into_iter().collect())
        }
    };
    let options = Options { title: Some(title), timelines, ..Options::default() };
    let report = render(&[series], &options).map_err(Stop::input)?;
    report.write(&args.out.join("report.html"), Theme::Light).map_err(Stop::input)?;
    Ok(report)
}

/// The plan of the last point that ran, op by op; none where none ran.
fn timeline(args: &SweepArgs, points: &[Point]) -> Option<Timeline> {
    let point = points.iter().rfind(|p| p.status == Status::Ok)?;
    let mut recipe = args.point.recipe.clone();
    for (name, value) in &point.point {
        let value = value.as_u64()? as usize;
        match name.as_str() {
            "batch" => recipe.batch = value,
            "seq" => recipe.seq = Some(value),
            _ => recipe.accumulate = value,
        }
    }
    let arch = open_architecture(&args.point.model).ok()?;
    let stored = stored_quant(&args.point.model);
    let kind = DeviceArg::resolve(args.point.device);
    let planner = Planner::device(kind, args.point.memory_limit).ok()?;
    let planner =
        planner.with_host_memory(recipe.host_memory, recipe.gpus).with_host(&recipe, recipe.gpus);
    let settled = recipe.recipe(&arch, stored, kind.default_precision()).ok()?;
    let recipe = planner.settle(&arch, settled, &recipe).ok()?.recipe;
    let planned = planner.plan(&arch, &recipe).ok()?;
    let title = format!("Live bytes over one step: batch {}, seq {}", recipe.batch, recipe.seq);
    let mut timeline = planned.timeline(title);
    let measured = point.measured_bytes.map(|bytes| Level { name: "measured".to_owned(), bytes });
    timeline.levels.extend(measured);
    Some(timeline)
}

/// Everything that must be the same for points to be comparable.
fn settings(args: &SweepArgs) -> Value {
    let point = &args.point;
    let r = &point.recipe;
    let mut settings = json!({
        "device": DeviceArg::resolve(point.device).name(),
        "threads": crate::threads(),
        "model": point.model,
        "data": point.data.files,
        "iterations": point.iterations,
        "warmup": point.warmup,
        "seed": point.seed,
        "batch": r.batch,
        "seq": r.seq,
        "accumulate": r.accumulate,
        "method": format!("{:?}", r.method).to_lowercase(),
        "precision": r.precision.map(|p| format!("{p:?}").to_lowercase()),
        "optimizer": format!("{:?}", r.optimizer).to_lowercase(),
        "optimizer_dtype": format!("{:?}", r.optimizer_dtype).to_lowercase(),
        "recompute": r.recompute,
        "optimizer_in_backward": r.optimizer_in_backward,
        "max_grad_norm": r.max_grad_norm,
        "loss_rows": r.loss_rows,
        "offload": r.offload,
    });
    if r.master_weights != MasterWeightsArg::None {
        settings["master_weights"] = r.master_weights.master_weights().name().into();
    }
    if let Some(on) = r.update_on {
        settings["update_on"] = format!("{on:?}").to_lowercase().into();
    }
    if r.gpus > 1 {
        settings["gpus"] = r.gpus.into();
        settings["zero"] = r.zero.into();
        settings["collectives"] = format!("{:?}", r.collectives).to_lowercase().into();
        settings["reduce_dtype"] = json!(r.reduce_dtype.map(|p| format!("{p:?}").to_lowercase()));
    }
    if r.method != MethodArg::Full {
        settings["lora"] = json!({
            "rank": r.lora.rank(),
            "dropout": r.lora.dropout(),
            "targets": r.lora.targets(),
            "modules_to_save": r.lora.modules_to_save,
            "quant": r.quant.quant.map(|q| format!("{q:?}").to_lowercase()),
            "quant_head": r.quant.quant_head,
        });
    }
    settings
}

/// The command line of a point: this one's, without what only a sweep knows,
/// and with the varied values.
fn point_arguments(point: &Map<String, Value>) -> Vec<OsString> {
    let mut arguments = vec![OsString::from("point")];
    let varied: Vec<String> = point.keys().map(|k| format!("--{k}")).collect();
    let mut given = std::env::args_os().skip(2);
    while let Some(argument) = given.next() {
        let text = argument.to_string_lossy();
        let name = text.split('=').next().unwrap_or_default().to_owned();
        if OWN_OPTIONS.contains(&name.as_str()) || varied.contains(&name) {
            if !text.contains('=') {
                given.next();
            }
            continue;
        }
        arguments.push(argument);
    }
    for (name, value) in point {
        arguments.push(format!("--{name}={value}").into());
    }
    arguments
}

fn header() -> String {
    format!(
        "{:<16}{:<9}{:>14}{:>14}{:>9}{:>12}{:>12}",
        "point", "status", "planned MiB", "measured MiB", "diff %", "s/iter", "tokens/s"
    )
}

fn line(point: &Point) -> String {
    let name: Vec<String> = point.point.iter().map(|(k, v)| format!("{k}={v}")).collect();
    let mib = |bytes: Option<u64>| {
        bytes.map_or("-".to_owned(), |b| format!("{:.1}", b as f64 / (1u64 << 20) as f64))
    };
    let number = |value: Option<f64>, digits: usize| {
        value.map_or("-".to_owned(), |v| format!("{v:.digits$}"))
    };
    let difference = match (point.planned_bytes, point.measured_bytes) {
        (Some(planned), Some(measured)) => {
            format!("{:+.2}", (measured as f64 / planned as f64 - 1.0) * 100.0)
        }
        _ => "-".to_owned(),
    };
    let mut text = format!(
        "{:<16}{:<9}{:>14}{:>14}{:>9}{:>12}{:>12}",
        name.join(" "),
        point.status.to_string(),
        mib(point.planned_bytes),
        mib(point.measured_bytes),
        difference,
        number(point.seconds_per_iteration, 3),
        number(point.tokens_per_second, 0)
    );
    if let (true, Some(message)) = (point.status != Status::Ok, point.message()) {
        text.push_str("  ");
        text.push_str(message.lines().next().unwrap_or_default());
    }
    text
}

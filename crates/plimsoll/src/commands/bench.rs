//! `plimsoll bench`: how fast a recipe trains, how far that is from what the
//! hardware allows, and where the time goes.

use std::collections::BTreeMap;

use clap::Args;
use plimsoll_arch::DType;
use plimsoll_plan::{Device, DeviceProfile, LaunchTime, Layout};
use plimsoll_program::{OpKind, Program, Work};
use serde_json::{Value, json};

use crate::Format;
use crate::commands::bench_infer;
use crate::commands::point::{Measured, PlannedPoint, PointArgs};
use crate::exit::{Outcome, Stop};
use crate::recipe_args::MethodArg;
use crate::units;

#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(flatten)]
    pub point: PointArgs,
    /// Set every matrix shape and every kind of op on a line of its own.
    #[arg(long)]
    pub shapes: bool,
    /// Only the whole step: no times of single ops.
    #[arg(long)]
    pub no_ops: bool,
}

pub fn run(args: &BenchArgs) -> Outcome {
    let (format, _) = args.point.data.formats()?;
    if args.point.recipe.gpus > 1 {
        return Err(Stop::Input(format!(
            "--gpus {}: bench looks into a step of one device; `plimsoll sweep` and `train` time \
             several",
            args.point.recipe.gpus
        )));
    }
    if args.point.recipe.method == MethodArg::Infer {
        return bench_infer::run(args, format);
    }
    let full_rows = args.point.full_rows || args.point.data.files.is_empty();
    let options = PointArgs { full_rows, ..args.point.clone() };
    let point = PlannedPoint::new(&options)?;
    point.must_fit()?;
    let mut ready = point.reserve(&options)?;
    let measured = ready.measure(&options)?;
    let (program, layout) = (&ready.point.plan.train, &ready.point.plan.train_layout);
    let lines = match args.no_ops {
        true => Vec::new(),
        false => profile(&mut *ready.device, program, layout, args.shapes)?,
    };
    let floors = Floors::new(&ready.point.plan.train, &ready.point.planner.device, &ready.point);
    match format {
        Format::Json => {
            let mut value = measured.json();
            value["model"] = json!(ready.point.model.arch.name);
            value["device"] = json!(ready.point.planner.device.name);
            value["floor_seconds"] = json!({ "products": floors.products, "bytes": floors.bytes });
            value["ops"] = lines.iter().map(Line::json).collect();
            outln!("{value}");
        }
        Format::Table => out!("{}", table(&ready.point, &measured, &floors, &lines)),
    }
    Ok(())
}

/// The least seconds that a step can take: all matrix arithmetic at the rate of the
/// fastest product of the profile, and all other ops' bytes at the rate of a copy.
struct Floors {
    products: f64,
    bytes: f64,
}

impl Floors {
    fn new(program: &Program, device: &DeviceProfile, point: &PlannedPoint) -> Floors {
        let rate = device.products.of(point.plan.recipe.precision).best_rate();
        let mut floors = Floors { products: 0.0, bytes: 0.0 };
        for section in &program.sections {
            let times = section.repeat as f64;
            for op in &program.ops[section.ops.clone()] {
                let work = program.work(op);
                if work.matmul_flops > 0.0 {
                    floors.products += times * work.matmul_flops / rate;
                } else {
                    floors.bytes += times * work.bytes / device.copy_bytes_per_second;
                }
            }
        }
        floors
    }
}

/// Launches of one kind, together.
#[derive(Default)]
pub struct Line {
    name: String,
    launches: usize,
    seconds: f64,
    work: Work,
}

impl Line {
    pub fn json(&self) -> Value {
        json!({
            "op": self.name,
            "launches": self.launches,
            "seconds": self.seconds,
            "flops": self.work.flops,
            "bytes": self.work.bytes,
        })
    }
}

/// Times of a whole step by family, slowest first.
///
/// # Errors
/// The device's own.
pub fn profile(
    device: &mut dyn Device,
    program: &Program,
    layout: &Layout,
    shapes: bool,
) -> Result<Vec<Line>, Stop> {
    let mut lines: BTreeMap<String, Line> = BTreeMap::new();
    for (index, section) in program.sections.iter().enumerate() {
        if section.ops.is_empty() {
            continue;
        }
        for LaunchTime { ops, seconds } in device.profile(program, layout, index)? {
            let first = &program.ops[ops.start].kind;
            let name = if shapes { with_shape(first) } else { first.name().to_owned() };
            let line = lines.entry(name.clone()).or_default();
            line.name = name;
            line.launches += section.repeat;
            line.seconds += seconds * section.repeat as f64;
            for op in &program.ops[ops] {
                let work = program.work(op);
                line.work.flops += work.flops * section.repeat as f64;
                line.work.matmul_flops += work.matmul_flops * section.repeat as f64;
                line.work.bytes += work.bytes * section.repeat as f64;
            }
        }
    }
    let mut lines: Vec<Line> = lines.into_values().collect();
    lines.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    Ok(lines)
}

/// `linear 8192 x 28672 x 4096` (rows, outputs, inputs); other ops by name.
fn with_shape(op: &OpKind) -> String {
    let [m, n, k] = match op {
        OpKind::Linear { x, y, .. } => [y.rows, y.cols, x.cols],
        OpKind::LinearBackwardInput { d_y, d_x, .. } => [d_y.rows, d_y.cols, d_x.cols],
        OpKind::LinearBackwardWeight { d_y, x, .. } => [d_y.rows, d_y.cols, x.cols],
        _ => return op.name().to_owned(),
    };
    format!("{} {m} x {n} x {k}", op.name())
}

fn table(point: &PlannedPoint, measured: &Measured, floors: &Floors, lines: &[Line]) -> String {
    let recipe = &point.plan.recipe;
    let median = measured.median();
    let (first, last) = (measured.seconds[0], measured.seconds[measured.seconds.len() - 1]);
    let mut text = format!(
        "{} on {}: batch {}, seq {}, {}, recompute {}\n\n  {:.0} tokens/s; {} a step ({} to {} of {}); planned {} ({:+.1} %)\n",
        point.model.arch.name,
        point.planner.device.name,
        recipe.batch,
        recipe.seq,
        recipe.precision,
        recipe.recompute,
        measured.tokens / median,
        units::seconds(median),
        units::seconds(first),
        units::seconds(last),
        measured.seconds.len(),
        units::seconds(measured.planned_seconds),
        (measured.planned_seconds / median - 1.0) * 100.0,
    );
    text.push_str(&format!(
        "  memory {} planned, {} measured ({:+.2} %)\n",
        units::bytes(measured.planned_bytes),
        units::bytes(measured.measured_bytes),
        (measured.measured_bytes as f64 / measured.planned_bytes as f64 - 1.0) * 100.0,
    ));
    text.push_str(&format!(
        "  floors: matrix arithmetic {}, bytes of all other ops {}; together {:.0} % of the step\n",
        units::seconds(floors.products),
        units::seconds(floors.bytes),
        (floors.products + floors.bytes) / median * 100.0,
    ));
    text.push_str(&profile_table(&point.planner.device, recipe.precision, lines));
    text
}

/// The lines with their rates, and how long each would take at the device's best; nothing
/// where there are none.
pub fn profile_table(device: &DeviceProfile, precision: DType, lines: &[Line]) -> String {
    let mut text = String::new();
    if lines.is_empty() {
        return text;
    }
    let rate = device.products.of(precision).best_rate();
    let memory = device.copy_bytes_per_second;
    let total: f64 = lines.iter().map(|l| l.seconds).sum();
    // A CPU's rates are a thousandth of a GPU's.
    let (unit, flops, bytes) =
        if rate < 5e12 { (1e9, "GFLOP/s", "GB/s") } else { (1e12, "TFLOP/s", "TB/s") };
    text.push_str(&format!(
        "\n  {:<44}{:>7}{:>10}{:>7}{:>10}{:>8}{:>10}\n",
        "op", "times", "ms", "%", flops, bytes, "floor ms"
    ));
    for line in lines {
        let floor = (line.work.matmul_flops / rate).max(line.work.bytes / memory);
        text.push_str(&format!(
            "  {:<44}{:>7}{:>10.3}{:>7.1}{:>10.1}{:>8.2}{:>10.3}\n",
            line.name,
            line.launches,
            line.seconds * 1e3,
            line.seconds / total * 100.0,
            line.work.flops / line.seconds / unit,
            line.work.bytes / line.seconds / unit,
            floor * 1e3,
        ));
    }
    text.push_str(&format!("  {:<44}{:>7}{:>10.3}\n", "all, launched one by one", "", total * 1e3));
    text
}

//! `plimsoll plan`: the ledger, before anything runs.

use std::path::PathBuf;

use clap::Args;
use plimsoll_arch::Architecture;
use plimsoll_plan::{DeviceKind, PlanReport, Transport, gpu};
use plimsoll_program::{Class, Method, PRODUCTS, Recipe};

use crate::commands::plan_torch;
use crate::commands::search::{self, SearchArgs};
use crate::devices::DeviceArg;
use crate::exit::{Outcome, Stop};
use crate::model_source::{open_architecture, stored_quant};
use crate::planning::{Planner, Settled, updates_line};
use crate::recipe_args::{Precision, RecipeArgs};
use crate::torch_args::{Stack, TorchArgs};
use crate::without_effect::Setting;
use crate::{Format, units};

#[derive(Debug, Args)]
pub struct PlanArgs {
    /// A preset (llama-3-8b), a model directory, a .gguf file, or org/name.
    #[arg(long, required_unless_present = "from")]
    pub model: Option<String>,
    #[command(flatten)]
    pub recipe: RecipeArgs,
    #[command(flatten)]
    pub torch: TorchArgs,
    /// Plan what this file configures: an axolotl or LLaMA-Factory YAML, a DeepSpeed JSON or
    /// the TrainingArguments of transformers as JSON (implies --stack torch).
    #[arg(long, value_name = "FILE")]
    pub from: Option<PathBuf>,
    /// A GPU of the catalogue (h200, a100-80, rtx-4090) or a calibrated one; without
    /// one, this machine's CPU.
    #[arg(long)]
    pub gpu: Option<String>,
    /// The CPU or the GPU of this machine.
    #[arg(long, value_enum, conflicts_with = "gpu")]
    pub device: Option<DeviceArg>,
    /// Another device: a profile that `plimsoll calibrate` wrote.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["gpu", "device"])]
    pub profile: Option<PathBuf>,
    /// Length of the documents that share a row, for the seconds of attention: the
    /// mean, over all tokens, of that of a token's own document [default: the row's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub document_tokens: Option<u64>,
    /// What the device costs an hour [default: of a GPU, a list price of the catalogue]
    #[arg(long, value_name = "USD_PER_HOUR", value_parser = units::parse_price)]
    pub price: Option<f64>,
    /// Machines, with --gpus devices each.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=4096))]
    pub nodes: u64,
    /// What a machine sends to the next over all of its network, GB/s [default: 50]
    #[arg(long, value_name = "GB_PER_SECOND", value_parser = units::parse_rate)]
    pub link: Option<f64>,
    /// Memory to fit in: bytes, or with a unit such as 80GiB.
    #[arg(long, value_parser = units::parse_bytes)]
    pub memory: Option<u64>,
    #[arg(long, value_enum, default_value = "table")]
    pub format: Format,
    /// Draw the live bytes over the ops of a step into this SVG file, or write them
    /// into a .json file, for `report`.
    #[arg(long, value_name = "FILE")]
    pub timeline: Option<PathBuf>,
    #[command(flatten)]
    pub search: SearchArgs,
}

pub fn run(args: &PlanArgs) -> Outcome {
    if args.from.is_some() && args.torch.stack == Some(Stack::Native) {
        return Err(Stop::Input("--from reads configurations of --stack torch".into()));
    }
    if args.from.is_some() || args.torch.stack == Some(Stack::Torch) {
        return plan_torch::run(args);
    }
    if let Some(option) = args.torch.first_given() {
        return Err(Stop::Input(format!("{option} is an option of --stack torch: give that too")));
    }
    let model = args.model.as_deref().unwrap_or_default();
    if args.search.search {
        return search::run(args);
    }
    let arch = open_architecture(model)?;
    let mut planner = match (&args.gpu, &args.profile, args.device) {
        (Some(name), ..) => Planner::gpu(name, args.memory)?,
        (_, Some(path), _) => Planner::profile(path, args.memory)?,
        (.., Some(device)) => Planner::device(device, args.memory)?,
        _ => Planner::cpu(crate::threads(), args.memory)?,
    };
    planner.document_tokens = args.document_tokens.map(|n| n as f64);
    let default = match planner.device.kind {
        DeviceKind::Cuda => Precision::Bf16,
        DeviceKind::Cpu => Precision::F32,
    };
    let mut recipe = args.recipe.recipe(&arch, stored_quant(model), default)?;
    recipe.sharding.ranks *= args.nodes as usize;
    recipe.check(&arch).map_err(Stop::input)?;
    Setting::of(&args.recipe, planner.device.kind, recipe.sharding.ranks)
        .refuse_without_effect(&args.recipe)?;
    let link = args.link.map(|g| g * 1e9);
    let transport = args.recipe.collectives.planned(args.nodes as usize, &planner.device.name)?;
    let planner = planner
        .for_ranks(recipe.sharding.ranks, args.nodes as usize, link, transport)
        .with_host_memory(args.recipe.host_memory, args.recipe.gpus)
        .with_host(&args.recipe, args.recipe.gpus);
    let Settled { recipe, updates } = planner.settle(&arch, recipe, &args.recipe)?;
    let mut planned = planner.plan(&arch, &recipe)?;
    planned.report.updates = updates;
    if let Some((usd, source)) = price(args, &planner) {
        planned.report = planned.report.with_price(usd, source);
    }
    if let Some(path) = &args.timeline {
        let title = format!("{}, batch {}, seq {}", arch.name, recipe.batch, recipe.seq);
        let timeline = planned.timeline(title);
        let text = if path.extension().is_some_and(|e| e == "json") {
            serde_json::to_string(&timeline).map_err(|e| Stop::Failed(e.to_string()))?
        } else {
            timeline.svg().map_err(Stop::input)?
        };
        std::fs::write(path, text)
            .map_err(|e| Stop::Input(format!("--timeline {}: {e}", path.display())))?;
    }
    match args.format {
        Format::Json => {
            let json = serde_json::to_string_pretty(&planned.report);
            outln!("{}", json.map_err(|e| Stop::Failed(e.to_string()))?);
        }
        Format::Table => {
            out!("{}", table(&planned.report));
            let context = if recipe.method == Method::Infer { "context" } else { "seq" };
            outln!(
                "batch {}, {context} {}, {}, recompute {}, offload {}",
                recipe.batch,
                recipe.seq,
                recipe.precision,
                recipe.recompute,
                recipe.offload
            );
            if let Some(line) = more_than_dense(&planner, &arch, &recipe, &planned.report)? {
                outln!("{line}");
            }
        }
    }
    planned.must_fit(&planner, &arch, &recipe)
}

/// Dollars an hour: the user's word, or a default for a GPU of the catalogue.
fn price(args: &PlanArgs, planner: &Planner) -> Option<(f64, String)> {
    let default = || {
        let gpu = gpu(&planner.device.name)?;
        Some((gpu.price.usd_per_hour, gpu.price.source()))
    };
    args.price.map(|usd| (usd, "as given".to_owned())).or_else(default)
}

/// Why four bits need more memory than none, where they do.
fn more_than_dense(
    planner: &Planner,
    arch: &Architecture,
    recipe: &Recipe,
    report: &PlanReport,
) -> Result<Option<String>, Stop> {
    let Some(quant) = recipe.quant else { return Ok(None) };
    let dense = planner.plan(arch, &Recipe { quant: None, ..recipe.clone() })?.report;
    if report.peak_bytes <= dense.peak_bytes {
        return Ok(None);
    }
    let products = PRODUCTS
        .iter()
        .map(|(_, all)| all.iter().map(|p| p.shape(arch)).map(|(n, k)| n * k).sum::<usize>());
    let head = if quant.head { arch.vocab_size * arch.hidden_size } else { 0 };
    let matrix = products.max().unwrap_or(0).max(head) * recipe.precision.bytes();
    Ok(Some(format!(
        "{} needs {} more than {} weights here: to multiply with more than a few rows, one matrix \
         at a time is multiplied out (up to {}), and that is more than four bits save on a model \
         of this size",
        quant.name(),
        units::bytes(report.peak_bytes - dense.peak_bytes),
        recipe.precision,
        units::bytes(matrix as u64)
    )))
}

/// The ledger as a table; GiB and MiB are binary.
pub fn table(report: &PlanReport) -> String {
    let mut text = format!(
        "{}: {} parameters, {} trained\n\n",
        report.model,
        units::count(report.parameters),
        units::count(report.trainable_parameters)
    );
    let mut row = |name: &str, bytes: u64| {
        text.push_str(&format!("  {name:<28}{:>14}\n", units::bytes(bytes)));
    };
    let mut alive = 0;
    for (class, bytes) in &report.by_class {
        let bytes = bytes.as_u64().unwrap_or(0);
        alive += bytes;
        row(&class.replace('_', " "), bytes);
        if class == Class::OptimizerState.name() && report.master_bytes > 0 {
            row("  of it, f32 master weights", report.master_bytes);
        }
    }
    row("layout gaps", report.peak_bytes - alive.min(report.peak_bytes));
    row("= slab", report.peak_bytes);
    let between = report.communication.as_ref();
    let apart = between.map_or(0, |c| c.transport_bytes);
    if report.overhead_bytes > apart {
        row("driver, outside the slab", report.overhead_bytes - apart);
    }
    match between.map(|c| c.transport) {
        Some(Transport::Nccl) => row("NCCL, outside the slab", apart),
        Some(Transport::Copies) => row("copies between GPUs", apart),
        Some(Transport::Host) | None => {}
    }
    if report.host_bytes > 0 {
        row("pinned host memory", report.host_bytes);
        if report.master_host_bytes > 0 {
            row("  of it, f32 master weights", report.master_host_bytes);
        }
    }
    if let (Some(memory), Some(free)) = (report.memory_bytes, report.free_bytes) {
        row("memory", memory);
        let word = if free < 0 { "missing" } else { "free" };
        row(word, free.unsigned_abs());
    }
    text.push_str(&format!(
        "\nThe most is alive at `{}`; the slab is {:.2} % above it. Largest there:\n",
        report.peak_at,
        report.fragmentation * 100.0
    ));
    for live in report.largest.iter().take(6) {
        text.push_str(&format!("  {:<28}{:>14}\n", live.name, units::bytes(live.bytes)));
    }
    text.push_str(&format!(
        "\n{} a step on {}, {:.0} tokens/s, {:.2} TFLOP a step, bound by {}\n",
        units::seconds(report.step_seconds),
        report.device,
        report.tokens_per_second,
        report.flops_per_step / 1e12,
        report.bottleneck
    ));
    for (lane, seconds) in &report.lane_seconds {
        let (lane, seconds) = (lane.replace('_', " "), seconds.as_f64().unwrap_or(0.0));
        text.push_str(&format!("  {lane:<16} busy for {}\n", units::seconds(seconds)));
    }
    text.push_str(&format!("  seconds: {}\n", report.device_source));
    if let Some(updates) = &report.updates {
        text.push_str(&format!("  {}\n", updates_line(updates)));
    }
    if let Some(c) = &report.communication {
        text.push_str(&format!(
            "\n{} ranks on {} {}, ZeRO {}, gradients summed in {}; bytes above are those of one rank\n               communication {} a step, of which {} nothing else runs ({})\n",
            c.ranks,
            c.nodes,
            if c.nodes == 1 { "machine" } else { "machines" },
            c.zero,
            c.reduce_dtype,
            units::seconds(c.seconds),
            units::seconds(c.exposed_seconds),
            c.source
        ));
    }
    if let Some(cost) = &report.cost {
        text.push_str(&format!(
            "  USD {} a step, {:.4} a million tokens, at USD {:.2} an hour ({})\n",
            units::small(cost.usd_per_step),
            cost.usd_per_million_tokens,
            cost.price_usd_per_hour,
            cost.price_source
        ));
    }
    text
}

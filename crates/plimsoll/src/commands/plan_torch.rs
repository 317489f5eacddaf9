//! `plimsoll plan --stack torch`: the memory of somebody else's stack.

use plimsoll_arch::Architecture;
use plimsoll_plan::gpu;
use plimsoll_program::Projection;
use plimsoll_report::{Timeline, TimelineOp};
use plimsoll_torch::{
    AllocatorConfig, Bnb4bit, Checkpointing, Config, CudaDevice, Liger, Lora, Method, Optim, Room,
    TorchRecipe, TorchReport, plan,
};
use serde_json::Value;

use crate::collectives::CollectivesArg;
use crate::commands::plan::PlanArgs;
use crate::exit::{Outcome, Stop};
use crate::model_source::open_architecture;
use crate::profiles;
use crate::recipe_args::MasterWeightsArg;
use crate::{Format, units};

/// Largest batch that advice looks for.
const MOST: u64 = 4096;

pub fn run(args: &PlanArgs) -> Outcome {
    let config = args.from.as_deref().map(Config::read).transpose().map_err(Stop::input)?;
    for warning in config.iter().flat_map(|c| c.remarks()) {
        note!("{warning}");
    }
    let named = args.model.clone().or_else(|| config.as_ref().and_then(|c| c.model.clone()));
    let Some(model) = named else {
        return Err(Stop::Input("the file names no model: give --model".into()));
    };
    let arch = open_architecture(&model)?;
    let unknown = config.as_ref().map(|c| c.unknown.clone());
    let ignored = config.as_ref().map(|c| c.without_effect.clone());
    refuse_native_options(args)?;
    let (recipe, allocator) = args.torch.configure(&arch, &args.recipe, config)?;
    let room = room(args)?;
    let report = plan(&arch, &recipe, &allocator, room).map_err(Stop::input)?;
    if let Some(path) = &args.timeline {
        let title = format!("{} on PyTorch, batch {}, seq {}", arch.name, recipe.batch, recipe.seq);
        let svg = timeline(&report, title).svg().map_err(Stop::input)?;
        std::fs::write(path, svg)
            .map_err(|e| Stop::Input(format!("--timeline {}: {e}", path.display())))?;
    }
    match args.format {
        Format::Json => {
            let failed = |e: serde_json::Error| Stop::Failed(e.to_string());
            let mut value = serde_json::to_value(&report).map_err(failed)?;
            if let (Value::Object(map), Some(unknown)) = (&mut value, unknown) {
                map.insert("unknown_keys".into(), unknown.into());
                map.insert("keys_without_effect".into(), ignored.unwrap_or_default().into());
            }
            outln!("{}", serde_json::to_string_pretty(&value).map_err(failed)?);
        }
        Format::Table => out!("{}", table(&report)),
    }
    must_fit(&arch, &recipe, &allocator, room, &report)
}

/// Options that mean nothing to this stack are not dropped in silence.
fn refuse_native_options(args: &PlanArgs) -> Result<(), Stop> {
    let recipe = &args.recipe;
    let recompute = !matches!(recipe.recompute.as_str(), "none" | "block");
    let given = [
        ("--device", args.device.is_some(), "--gpu or --memory say what it is planned for"),
        ("--profile", args.profile.is_some(), "--gpu or --memory say what it is planned for"),
        ("--document-tokens", args.document_tokens.is_some(), "this plan has no seconds"),
        ("--price", args.price.is_some(), "this plan has no seconds"),
        ("--search", args.search.search, "only recipes of this program are searched"),
        ("--nodes", args.nodes > 1, "--gpus counts the ranks of all machines"),
        ("--link", args.link.is_some(), "this plan has no seconds"),
        ("--reduce-dtype", recipe.reduce_dtype.is_some(), "its engines sum in the type they have"),
        (
            "--update-on",
            recipe.update_on.is_some(),
            "its engines update offloaded state on the CPU",
        ),
        ("--host-cores", recipe.host_cores.is_some(), "this plan has no seconds"),
        ("--host-bandwidth", recipe.host_bandwidth.is_some(), "this plan has no seconds"),
        (
            "--host-memory",
            recipe.host_memory.is_some(),
            "the plan says how much host memory is needed, and keeps to no limit",
        ),
        (
            "--collectives",
            recipe.collectives != CollectivesArg::Auto,
            "what it talks through is NCCL",
        ),
        ("--recompute", recompute, "layers are recomputed whole: --gradient-checkpointing"),
        ("--optimizer-in-backward", recipe.optimizer_in_backward, "the stack has no such step"),
        (
            "--master-weights",
            recipe.master_weights != MasterWeightsArg::None,
            "--weights-dtype f32 is how it has float32 weights",
        ),
        ("--loss-rows", recipe.loss_rows.is_some(), "--liger has rows of its own"),
        ("--quant-head", recipe.quant.quant_head, "bitsandbytes leaves the head as it is"),
    ];
    match given.into_iter().find(|g| g.1) {
        Some((option, _, why)) => {
            Err(Stop::Input(format!("{option} means nothing with --stack torch: {why}; drop it")))
        }
        None => Ok(()),
    }
}

/// The device, and how much of it there is.
fn room(args: &PlanArgs) -> Result<Room, Stop> {
    let name = args.gpu.as_deref();
    let device = match name {
        Some(name) => {
            let known = gpu(name);
            let profile = profiles::named_gpu(name)?;
            let capability = known.map_or((9, 0), |g| g.compute_capability);
            let device = CudaDevice::new(known.map_or(name, |g| g.name), capability);
            return Ok(Room { device, memory: args.memory.or(Some(profile.memory_bytes)) });
        }
        None => CudaDevice::new("h200", (9, 0)),
    };
    Ok(Room { device, memory: args.memory })
}

fn timeline(report: &TorchReport, title: String) -> Timeline {
    let Some(step) = &report.timeline else { return Timeline::default() };
    let op = |p: &plimsoll_torch::TimelinePoint| TimelineOp {
        name: p.name.clone(),
        bytes: p.bytes.clone(),
    };
    Timeline {
        title,
        classes: step.classes.iter().map(|c| c.replace('_', " ")).collect(),
        ops: step.ops.iter().map(op).collect(),
        ..Timeline::default()
    }
}

/// The ledger; GiB and MiB are binary.
fn table(report: &TorchReport) -> String {
    let mut text = format!(
        "{} on the PyTorch stack: {} parameters, {} trained\n\n",
        report.model,
        units::count(report.parameters),
        units::count(report.trainable_parameters)
    );
    let mut row = |name: &str, bytes: u64| {
        text.push_str(&format!("  {name:<32}{:>14}\n", units::bytes(bytes)));
    };
    for (class, bytes) in &report.by_class {
        row(&class.replace('_', " "), bytes.as_u64().unwrap_or(0));
    }
    row("= peak allocated", report.peak_allocated_bytes);
    row("peak active", report.peak_active_bytes);
    row("peak reserved", report.peak_reserved_bytes);
    row("reserved after forced release", report.reserved_after_release_bytes);
    row("CUDA context and kernels", report.overhead_bytes);
    row("device memory used", report.device_used_bytes);
    for (name, bytes) in
        [("host memory", report.host_bytes), ("managed (paged) memory", report.paged_bytes)]
    {
        if bytes > 0 {
            row(name, bytes);
        }
    }
    if let (Some(memory), Some(free)) = (report.memory_bytes, report.free_bytes) {
        row("memory", memory);
        row(if free < 0 { "missing" } else { "free" }, free.unsigned_abs());
    }
    text.push_str(&format!("\nThe most is alive at `{}`. Largest there:\n", report.peak_at));
    for live in report.largest.iter().take(6) {
        text.push_str(&format!("  {:<48}{:>14}\n", live.name, units::bytes(live.bytes)));
    }
    if report.alloc_retries > 0 {
        text.push_str(&format!(
            "\nThe allocator has to release its cache {} times in three steps: slow, and a sign \
             of too little memory\n",
            report.alloc_retries
        ));
    }
    text
}

fn must_fit(
    arch: &Architecture,
    recipe: &TorchRecipe,
    allocator: &AllocatorConfig,
    room: Room,
    report: &TorchReport,
) -> Outcome {
    let (Some(oom), Some(memory)) = (&report.out_of_memory, report.memory_bytes) else {
        return Ok(());
    };
    let mut text = format!(
        "{} at batch {} and seq {} runs out of memory at `{}`: it needs {} of {}, context included",
        arch.name,
        recipe.batch,
        recipe.seq,
        oom.op,
        units::bytes(report.reserved_after_release_bytes + report.overhead_bytes),
        units::bytes(memory)
    );
    let mut nothing = true;
    for (name, changed) in levers(recipe) {
        if let Some((batch, used)) = largest_batch(arch, &changed, allocator, room) {
            nothing = false;
            text.push_str(&format!("\n  {name} fits batch {batch} ({})", units::bytes(used)));
        }
    }
    if nothing {
        text.push_str("\n  nothing fits: use a smaller model, a shorter --seq or more memory");
    }
    Err(Stop::DoesNotFit(text))
}

/// What could be changed, one thing at a time.
fn levers(recipe: &TorchRecipe) -> Vec<(&'static str, TorchRecipe)> {
    let mut levers = vec![("a smaller batch", recipe.clone())];
    let trains = recipe.method != Method::Infer;
    if trains && recipe.gradient_checkpointing.is_none() {
        let gradient_checkpointing = Some(Checkpointing { use_reentrant: false });
        levers.push((
            "--gradient-checkpointing",
            TorchRecipe { gradient_checkpointing, ..recipe.clone() },
        ));
        levers.push((
            "--gradient-checkpointing --liger",
            TorchRecipe { gradient_checkpointing, liger: Liger::ALL, ..recipe.clone() },
        ));
    }
    if trains && recipe.liger == Liger::NONE {
        levers.push(("--liger", TorchRecipe { liger: Liger::ALL, ..recipe.clone() }));
    }
    if trains && recipe.optim != Optim::AdamW8bit && recipe.zero.is_none() {
        levers.push((
            "--optim adamw_8bit --gradient-checkpointing --liger",
            TorchRecipe {
                optim: Optim::AdamW8bit,
                gradient_checkpointing: Some(Checkpointing { use_reentrant: false }),
                liger: Liger::ALL,
                ..recipe.clone()
            },
        ));
    }
    if trains && recipe.quant.is_none() && recipe.zero.is_none() && recipe.fsdp.is_none() {
        let all = Projection::ALL.map(|p| p.name().to_owned()).to_vec();
        let lora = Lora {
            r: 16,
            target_modules: all,
            lora_dropout: false,
            float32: true,
            modules_to_save: Vec::new(),
        };
        levers.push((
            "--method qlora --gradient-checkpointing --liger",
            TorchRecipe {
                method: Method::Lora(lora),
                quant: Some(Bnb4bit { double_quant: true, prepare: false }),
                gradient_checkpointing: Some(Checkpointing { use_reentrant: false }),
                liger: Liger::ALL,
                ..recipe.clone()
            },
        ));
    }
    levers
}

/// The largest batch that fits, and the device memory that it uses.
fn largest_batch(
    arch: &Architecture,
    recipe: &TorchRecipe,
    allocator: &AllocatorConfig,
    room: Room,
) -> Option<(u64, u64)> {
    let used = |batch: u64| {
        let report = plan(arch, &TorchRecipe { batch, ..recipe.clone() }, allocator, room).ok()?;
        report.fits.unwrap_or(true).then_some(report.device_used_bytes)
    };
    let mut best = (1, used(1)?);
    let (mut low, mut high) = (2, (2 * recipe.batch).min(MOST));
    while low <= high {
        let middle = (low + high) / 2;
        match used(middle) {
            Some(bytes) => {
                best = (middle, bytes);
                low = middle + 1;
            }
            None => high = middle - 1,
        }
    }
    Some(best)
}

//! `plimsoll plan --search`: recipes that fit, ranked by time and money.

use std::time::Instant;

use clap::Args;
use plimsoll_arch::Architecture;
use plimsoll_plan::{DeviceKind, PlanReport, gpu, gpu_names};
use plimsoll_program::{Lora, MasterWeights, Method, Optimizer, Recipe, UpdateOn};
use plimsoll_search::{Candidate, Fixed, Found, Lever, Space, first_lever, search};
use serde_json::Value;

use crate::collectives::CollectivesArg;
use crate::commands::plan::PlanArgs;
use crate::exit::{Outcome, Stop};
use crate::model_source::{open_architecture, stored_quant};
use crate::planning::{Planner, host_words};
use crate::recipe_args::{MethodArg, Precision, UpdateOnArg};
use crate::without_effect::Setting;
use crate::{Format, units};

#[derive(Debug, Args)]
pub struct SearchArgs {
    /// Rank what fits by time and money: method, batch, recompute, optimizer and, on one
    /// GPU, offload or, with --gpus, ZeRO are searched, but for those that are given.
    /// Several kinds: --gpu h100,a100-80,4090.
    #[arg(long)]
    pub search: bool,
    /// Samples of the whole run, each a row of --seq tokens.
    #[arg(long, value_name = "N", requires = "search", conflicts_with = "tokens",
          value_parser = clap::value_parser!(u64).range(1..))]
    pub samples: Option<u64>,
    /// Tokens of the whole run.
    #[arg(long, value_name = "N", requires = "search", value_parser = clap::value_parser!(u64).range(1..))]
    pub tokens: Option<u64>,
    /// Recipes to print.
    #[arg(long, value_name = "N", default_value_t = 20, requires = "search", value_parser = units::parse_count)]
    pub limit: usize,
}

/// A kind of device with its name and price.
struct Place {
    name: String,
    /// How many of them train one model.
    ranks: usize,
    planner: Planner,
    /// Of one device.
    usd_per_hour: Option<(f64, String)>,
}

/// Time and money of a candidate.
struct Run {
    /// Of the whole run, where its size is known.
    seconds: Option<f64>,
    usd: Option<f64>,
    usd_per_million_tokens: Option<f64>,
}

/// # Errors
/// Nothing fits (status 3), or the question makes no sense.
pub fn run(args: &PlanArgs) -> Outcome {
    if args.recipe.method == MethodArg::Infer {
        return Err(Stop::Input("--search ranks fine-tunes, not --method infer".into()));
    }
    if args.timeline.is_some() {
        return Err(Stop::Input("--search plans thousands of recipes: drop --timeline".into()));
    }
    let started = Instant::now();
    let model = args.model.as_deref().unwrap_or_default();
    let arch = open_architecture(model)?;
    let mut base = args.recipe.recipe(&arch, stored_quant(model), Precision::Bf16)?;
    base.sharding.ranks *= args.nodes as usize;
    base.check(&arch).map_err(Stop::input)?;
    let places = places(args, base.sharding.ranks)?;
    let lora = match &base.lora {
        Some(lora) => lora.clone(),
        None => args.recipe.lora.lora()?,
    };
    let fixed = fixed(args);
    refuse_without_effect(args, fixed, base.sharding.ranks)?;
    let mut space = Space::of(&base, &lora, arch.num_hidden_layers, fixed);
    // A rank's share of its machine's.
    space.host_memory = args.recipe.host_memory.map(|bytes| bytes / args.recipe.gpus.max(1) as u64);
    let plan = |recipe: &Recipe| reports(&places, &arch, recipe);
    let found = search(&space, places.len(), crate::threads(), plan);
    let took = started.elapsed().as_secs_f64();

    let tokens = args.search.tokens.or(args.search.samples.map(|n| n * base.seq as u64));
    if found.fitting.is_empty() {
        return Err(nothing_fits(&places, &arch, &lora, &found, &space));
    }
    let rows = choose(&found, &places, tokens, args.search.limit);
    match args.format {
        Format::Json => {
            let all: Vec<Value> = rows
                .iter()
                .map(|(candidate, best)| object(candidate, best, &places, tokens))
                .collect();
            let json = serde_json::to_string_pretty(&all);
            outln!("{}", json.map_err(|e| Stop::Failed(e.to_string()))?);
        }
        Format::Table => {
            out!("{}", table(&rows, &places, &base, tokens));
            let best = &rows[0].0;
            outln!("\nthe fastest: {}", command_line(args, best, &places));
        }
    }
    note!(
        "searched {} recipes in {took:.1} s ({} laid out, the others follow from them); {} fit, \
         without {} that take what a simpler one takes",
        space.size() * places.len(),
        found.planned,
        found.fitting.len(),
        found.alike
    );
    if let Some(line) = about_the_base(&places, &arch, &base, &lora, space.host_memory) {
        note!("{line}");
    }
    Ok(())
}

/// As for one plan; what is not given is tried: on one GPU all of offload, for adapters that of
/// activations.
fn refuse_without_effect(args: &PlanArgs, fixed: Fixed, ranks: usize) -> Outcome {
    let as_given = Setting::of(&args.recipe, DeviceKind::Cuda, ranks);
    let tries = !fixed.offload && ranks == 1;
    let full = !fixed.method || args.recipe.method == MethodArg::Full;
    let setting = Setting {
        moves_state: as_given.moves_state || (tries && full),
        moves_anything: as_given.moves_anything || tries,
        ..as_given
    };
    setting.refuse_without_effect(&args.recipe)
}

/// What the user gave is not searched.
fn fixed(args: &PlanArgs) -> Fixed {
    let has = |names: &[&str]| names.iter().any(|name| crate::given(name));
    Fixed {
        method: has(&["--method", "--quant"]),
        batch: has(&["--batch"]),
        recompute: has(&["--recompute"]) && !has(&["auto"]),
        optimizer: has(&["--optimizer", "--optimizer-dtype"]),
        optimizer_in_backward: has(&["--optimizer-in-backward"]),
        max_grad_norm: has(&["--max-grad-norm"]),
        offload: has(&["--offload"]),
        update_on: match args.recipe.update_on {
            Some(UpdateOnArg::Gpu) => Some(UpdateOn::Device),
            Some(UpdateOnArg::Cpu) => Some(UpdateOn::Host),
            Some(UpdateOnArg::Auto) | None => None,
        },
        zero: has(&["--zero"]),
    }
}

fn places(args: &PlanArgs, ranks: usize) -> Result<Vec<Place>, Stop> {
    let names = args.gpu.as_deref().ok_or_else(|| {
        Stop::Input("--search needs --gpu: one or several such as h100,a100-80,4090".into())
    })?;
    let mut places: Vec<Place> = Vec::new();
    for name in names.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        let planner = Planner::gpu(name, args.memory)?;
        let link = args.link.map(|g| g * 1e9);
        let transport =
            args.recipe.collectives.planned(args.nodes as usize, &planner.device.name)?;
        let mut planner = planner
            .for_ranks(ranks, args.nodes as usize, link, transport)
            .with_host(&args.recipe, args.recipe.gpus);
        planner.document_tokens = args.document_tokens.map(|n| n as f64);
        let listed =
            gpu(&planner.device.name).map(|gpu| (gpu.price.usd_per_hour, gpu.price.source()));
        let usd_per_hour = args.price.map(|usd| (usd, "as given".to_owned())).or(listed);
        if places.iter().any(|known| known.planner.device.name == planner.device.name) {
            return Err(Stop::Input(format!("--gpu {names}: {name} is there twice")));
        }
        let name = planner.device.name.clone();
        places.push(Place { name, ranks, planner, usd_per_hour });
    }
    match places.len() {
        0 => Err(Stop::Input(format!("--gpu {names}: there is no name in it"))),
        1 => Ok(places),
        _ if args.price.is_some() => Err(Stop::Input(
            "--price is for one GPU; several kinds have the prices of the catalogue".into(),
        )),
        _ => Ok(places),
    }
}

/// A plan of a recipe for every device: one layout, several schedules.
fn reports(places: &[Place], arch: &Architecture, recipe: &Recipe) -> Option<Vec<PlanReport>> {
    let (first, others) = places.split_first()?;
    let others: Vec<&Planner> = others.iter().map(|place| &place.planner).collect();
    first.planner.reports(&others, arch, recipe).ok()
}

impl Place {
    /// The first lever here; one that takes more host memory than there is, is none.
    fn first_lever(
        &self,
        arch: &Architecture,
        recipe: &Recipe,
        lora: &Lora,
        host_memory: Option<u64>,
    ) -> Option<Lever> {
        let plan = |recipe: &Recipe| {
            let report = self.planner.plan(arch, recipe).ok()?.report;
            (report.host_bytes <= host_memory.unwrap_or(u64::MAX)).then_some(report)
        };
        first_lever(recipe, lora, plan)
    }

    fn run(&self, report: &PlanReport, tokens: Option<u64>) -> Run {
        let seconds = tokens.map(|tokens| tokens as f64 / report.tokens_per_second);
        let a_second = self.usd_per_hour.as_ref().map(|(usd, _)| self.ranks as f64 * usd / 3600.0);
        Run {
            seconds,
            usd: seconds.zip(a_second).map(|(seconds, usd)| seconds * usd),
            usd_per_million_tokens: a_second.map(|usd| 1e6 * usd / report.tokens_per_second),
        }
    }
}

/// The first of the ranking, and the best in each respect with its titles.
fn choose<'a>(
    found: &'a Found,
    places: &[Place],
    tokens: Option<u64>,
    limit: usize,
) -> Vec<(&'a Candidate, Vec<&'static str>)> {
    let all = &found.fitting;
    let price = |c: &Candidate| {
        let run = places[c.device].run(&c.report, tokens);
        run.usd_per_million_tokens.unwrap_or(f64::INFINITY)
    };
    let cheapest =
        (0..all.len()).reduce(|a, b| if price(&all[b]) < price(&all[a]) { b } else { a });
    // Of equals the first, which is the fastest.
    let smallest =
        (0..all.len()).reduce(|a, b| if all[b].bytes() < all[a].bytes() { b } else { a });
    let cheapest = cheapest.filter(|&c| price(&all[c]).is_finite());
    let titles = |index: usize| {
        let titles = [(Some(0), "fastest"), (cheapest, "cheapest"), (smallest, "smallest")];
        titles.into_iter().filter(|t| t.0 == Some(index)).map(|t| t.1).collect::<Vec<_>>()
    };
    (0..all.len())
        .map(|index| (index, titles(index)))
        .filter(|(index, titles)| *index < limit || !titles.is_empty())
        .map(|(index, titles)| (&all[index], titles))
        .collect()
}

/// A plan with its recipe, and what the whole run takes.
fn object(
    candidate: &Candidate,
    best: &[&'static str],
    places: &[Place],
    tokens: Option<u64>,
) -> Value {
    let place = &places[candidate.device];
    let report = match &place.usd_per_hour {
        Some((usd, source)) => candidate.report.clone().with_price(*usd, source.clone()),
        None => candidate.report.clone(),
    };
    let run = place.run(&report, tokens);
    let mut value = serde_json::to_value(&report).unwrap_or(Value::Null);
    value["gpu"] = place.name.clone().into();
    value["best"] = best.to_vec().into();
    if let Some(seconds) = run.seconds {
        value["run_tokens"] = tokens.into();
        value["run_seconds"] = seconds.into();
        value["run_usd"] = run.usd.into();
    }
    value
}

fn method_name(recipe: &Recipe) -> &'static str {
    match (recipe.method, recipe.quant) {
        (Method::Full, _) => "full",
        (Method::Lora, None) => "lora",
        (Method::Lora, Some(_)) => "qlora",
        (Method::Infer, _) => "infer",
    }
}

fn optimizer_name(recipe: &Recipe) -> &'static str {
    match recipe.optimizer {
        Optimizer::AdamW(adamw) if adamw.state == plimsoll_arch::DType::F32 => "adamw",
        Optimizer::AdamW(_) => "adamw bf16",
        Optimizer::AdamW8bit(_) => "adamw8bit",
        Optimizer::Sgd(_) => "sgd",
    }
}

/// The master weights that all recipes of a search have, behind a comma.
fn masters_name(recipe: &Recipe) -> String {
    match recipe.master_weights {
        MasterWeights::None => String::new(),
        masters => format!(", {} master weights", masters.name()),
    }
}

/// What is not on the device, for the end of a list in words.
fn moved_name(recipe: &Recipe) -> String {
    match (&recipe.offload, recipe.sharding.ranks) {
        (offload, 1) if offload.is_none() => String::new(),
        (offload, 1) => format!(", offload {offload}"),
        (offload, ranks) => {
            let zero = recipe.sharding.zero;
            let offload =
                if offload.is_none() { String::new() } else { format!(", offload {offload}") };
            format!(", ZeRO {zero} over {ranks} GPUs{offload}")
        }
    }
}

fn table(
    rows: &[(&Candidate, Vec<&'static str>)],
    places: &[Place],
    base: &Recipe,
    tokens: Option<u64>,
) -> String {
    let mut text = match tokens {
        Some(tokens) => format!("{} tokens at seq {}", units::count(tokens), base.seq),
        None => format!("seq {}", base.seq),
    };
    text.push_str(&masters_name(base));
    let ranks = base.sharding.ranks;
    if ranks > 1 {
        text.push_str(&format!(", {ranks} GPUs: GiB of each, tokens and USD of all"));
    }
    text.push_str(&format!(
        "\n\n{:<11}{:<7}{:>6}  {:<18}{:<12}{:<12}{:<24}{:>7}{:>9}{:>9}{:>10}{:>10}{:>9}\n",
        "gpu",
        "method",
        "batch",
        "recompute",
        "optimizer",
        "at",
        if ranks > 1 { "ZeRO" } else { "offload" },
        "GiB",
        "of GiB",
        if ranks > 1 { "" } else { "host GiB" },
        "tokens/s",
        if tokens.is_some() { "hours" } else { "" },
        if tokens.is_some() { "USD" } else { "USD/Mtok" },
    ));
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    for (candidate, best) in rows {
        let place = &places[candidate.device];
        let (recipe, report) = (&candidate.recipe, &candidate.report);
        let run = place.run(report, tokens);
        let number = |value: Option<f64>, digits: usize| {
            value.map_or(String::new(), |v| format!("{v:.digits$}"))
        };
        text.push_str(&format!(
            "{:<11}{:<7}{:>6}  {:<18}{:<12}{:<12}{:<24}{:>7.1}{:>9.1}{:>9}{:>10.0}{:>10}{:>9}{}{}\n",
            place.name,
            method_name(recipe),
            recipe.batch,
            recipe.recompute.to_string(),
            optimizer_name(recipe),
            if recipe.optimizer_in_backward { "in backward" } else { "end of step" },
            match ranks {
                1 => offload_name(recipe),
                _ if recipe.offload.is_none() => recipe.sharding.zero.to_string(),
                _ => format!("{}, {}", recipe.sharding.zero, offload_name(recipe)),
            },
            gib(candidate.bytes()),
            gib(report.memory_bytes.unwrap_or(0)),
            number((report.host_bytes > 0).then(|| gib(report.host_bytes)), 1),
            report.tokens_per_second,
            number(run.seconds.map(|s| s / 3600.0), 2),
            number(if tokens.is_some() { run.usd } else { run.usd_per_million_tokens }, 3),
            if best.is_empty() { "" } else { "  " },
            best.join(", "),
        ));
    }
    // Where state visits or updates run depends on it.
    for (device, place) in places.iter().enumerate() {
        let offloads =
            |(c, _): &(&Candidate, Vec<&str>)| c.device == device && c.recipe.offload.optimizer;
        if let (true, Some(host)) = (rows.iter().any(offloads), &place.planner.device.host) {
            let words = host_words(host.cores, host.bytes_per_second, &host.source);
            text.push_str(&format!("{}: {words}\n", place.name));
        }
    }
    text
}

/// What is offloaded, and where updates run if not on the GPU.
fn offload_name(recipe: &Recipe) -> String {
    let place = if recipe.update_on == UpdateOn::Host { ", cpu" } else { "" };
    format!("{}{place}", recipe.offload)
}

/// The command that plans exactly this.
fn command_line(args: &PlanArgs, candidate: &Candidate, places: &[Place]) -> String {
    let recipe = &candidate.recipe;
    let mut words = vec![
        format!(
            "plimsoll plan --model {} --gpu {}",
            args.model.as_deref().unwrap_or_default(),
            places[candidate.device].name
        ),
        format!("--method {} --batch {}", method_name(recipe), recipe.batch),
        format!("--seq {} --recompute {}", recipe.seq, recipe.recompute),
    ];
    match optimizer_name(recipe) {
        "adamw bf16" => words.push("--optimizer adamw --optimizer-dtype bf16".to_owned()),
        name => words.push(format!("--optimizer {name}")),
    }
    if !recipe.master_weights.is_none() {
        words.push(format!("--master-weights {}", recipe.master_weights.name()));
    }
    if recipe.optimizer_in_backward {
        words.push("--optimizer-in-backward --max-grad-norm 0".to_owned());
    }
    if !recipe.offload.is_none() {
        words.push(format!("--offload {}", recipe.offload));
    }
    if recipe.offload.optimizer {
        let on = if recipe.update_on == UpdateOn::Host { "cpu" } else { "gpu" };
        words.push(format!("--update-on {on}"));
    }
    if recipe.sharding.ranks > 1 {
        words.push(format!("--gpus {} --zero {}", args.recipe.gpus, recipe.sharding.zero));
        if args.nodes > 1 {
            words.push(format!("--nodes {}", args.nodes));
        }
        words.extend(args.link.map(|rate| format!("--link {rate}")));
        match args.recipe.collectives {
            CollectivesArg::Auto => {}
            CollectivesArg::Nccl => words.push("--collectives nccl".to_owned()),
            CollectivesArg::Copies => words.push("--collectives copies".to_owned()),
        }
    }
    words.join(" ")
}

/// What to do first about the recipe as it was given, where it does not fit.
fn about_the_base(
    places: &[Place],
    arch: &Architecture,
    base: &Recipe,
    lora: &Lora,
    host_memory: Option<u64>,
) -> Option<String> {
    let place = places.first()?;
    let report = place.planner.plan(arch, base).ok()?.report;
    if report.fits != Some(false) {
        return None;
    }
    let lever = place.first_lever(arch, base, lora, host_memory)?;
    Some(format!(
        "as given ({}, batch {}, recompute {}) it needs {} of {} on {}; the first lever: {} ({})",
        method_name(base),
        base.batch,
        base.recompute,
        units::bytes(report.peak_bytes + report.overhead_bytes),
        units::bytes(report.memory_bytes.unwrap_or(0)),
        place.name,
        lever.change,
        effect(&lever.report, &report)
    ))
}

fn effect(report: &PlanReport, before: &PlanReport) -> String {
    let mut needs = units::bytes(report.peak_bytes + report.overhead_bytes);
    if report.host_bytes > 0 {
        needs.push_str(&format!(" and {} of host memory", units::bytes(report.host_bytes)));
    }
    let speed = (report.tokens_per_second / before.tokens_per_second - 1.0) * 100.0;
    match report.fits {
        Some(false) => format!("{needs}, which is not enough by itself"),
        _ => format!("{needs}, {speed:+.0} % tokens/s"),
    }
}

/// Of everything the smallest, and what to do about it.
fn nothing_fits(
    places: &[Place],
    arch: &Architecture,
    lora: &Lora,
    found: &Found,
    space: &Space,
) -> Stop {
    let mut text = format!("none of {} recipes fits", space.size());
    for (place, smallest) in places.iter().zip(&found.smallest) {
        let Some(least) = smallest else { continue };
        let recipe = &least.recipe;
        text.push_str(&format!(
            "\n  {}: the smallest ({}, batch {}, recompute {}, {}{}{}) needs {} of {}",
            place.name,
            method_name(recipe),
            recipe.batch,
            recipe.recompute,
            optimizer_name(recipe),
            masters_name(recipe),
            moved_name(recipe),
            units::bytes(least.bytes()),
            units::bytes(least.report.memory_bytes.unwrap_or(0))
        ));
        if let Some(lever) = place.first_lever(arch, recipe, lora, space.host_memory) {
            let effect = effect(&lever.report, &least.report);
            text.push_str(&format!("; the first lever: {} ({effect})", lever.change));
        }
    }
    let least = found.smallest.iter().flatten().min_by_key(|c| c.bytes());
    let larger = least.and_then(|least| {
        let gpus = gpu_names().into_iter().filter_map(gpu);
        gpus.filter(|g| g.memory_bytes() > least.bytes()).min_by_key(|g| g.memory_bytes())
    });
    if let Some(gpu) = larger {
        let memory = units::bytes(gpu.memory_bytes());
        text.push_str(&format!("\n  the smallest GPU that holds it: {} ({memory})", gpu.name));
    }
    Stop::DoesNotFit(text)
}

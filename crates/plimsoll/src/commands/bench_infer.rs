//! `plimsoll bench --method infer`: how fast tokens come, one after the other, and how far
//! that is from what the bytes of the weights allow.

use std::time::Instant;

use plimsoll_infer::{Generator, InferPlan, Sampler, Sampling};
use plimsoll_plan::{Device, schedule};
use plimsoll_program::{Class, OpKind, Program, Recipe};
use serde_json::json;

use crate::Format;
use crate::commands::bench::{BenchArgs, Line, profile, profile_table};
use crate::commands::point::fill_base;
use crate::devices::DeviceArg;
use crate::exit::{Outcome, Stop};
use crate::measuring::Growth;
use crate::model_source::open_model;
use crate::planning::Planner;
use crate::units;
use crate::without_effect::Setting;

/// Tokens of the prompt of each sequence, where the context has room for them.
const PROMPT: usize = 64;

/// What a run showed.
struct Measured {
    /// Of every timed token step, sorted.
    seconds: Vec<f64>,
    prefill_seconds: f64,
    bytes: u64,
}

impl Measured {
    fn median(&self) -> f64 {
        self.seconds[self.seconds.len() / 2]
    }
}

pub fn run(args: &BenchArgs, format: Format) -> Outcome {
    let options = &args.point;
    let model = open_model(&options.model)?;
    let kind = DeviceArg::resolve(options.device);
    let recipe =
        options.recipe.recipe(&model.arch, model.stored_quant(), kind.default_precision())?;
    Setting::of(&options.recipe, kind.kind(), recipe.sharding.ranks)
        .refuse_without_effect(&options.recipe)?;
    let (batch, context) = (recipe.batch, recipe.seq);
    let steps = options.warmup + options.iterations;
    // The last token that is timed is at position prompt + steps, and needs one of its own.
    let prompt = PROMPT.min(context.saturating_sub(steps.saturating_add(1)));
    if prompt == 0 {
        return Err(Stop::Input(format!(
            "a token and {steps} more (--warmup, --iterations) do not fit in a context of \
             {context}: raise --seq or lower --iterations"
        )));
    }
    let planner = Planner::device(kind, options.memory_limit)?;
    let plan = InferPlan::new(&model.arch, &recipe, &*planner.target).map_err(Stop::input)?;
    let planned_bytes = planner.device.needed_bytes(plan.slab_bytes(), 0);
    if let Some(limit) = planner.memory.filter(|limit| planned_bytes > *limit) {
        return Err(Stop::DoesNotFit(format!(
            "{} with a context of {context} needs {} of {}: lower --batch, --seq or --precision, \
             or give --quant nf4-dq",
            model.arch.name,
            units::bytes(planned_bytes),
            units::bytes(limit)
        )));
    }
    let (program, layout) = &plan.decode;
    // Attention reads what the cache holds: planned for as much as it holds half way.
    let half_way = Recipe { seq: prompt + steps / 2 + 1, ..recipe.clone() };
    let timed = InferPlan::new(&model.arch, &half_way, &*planner.target).map_err(Stop::input)?;
    let (token, places) = &timed.decode;
    let planned_seconds = schedule(token, places, &planner.device, None).step_seconds;

    let growth = Growth::start()?;
    let mut device = kind.reserve(plan.slab_bytes())?;
    fill_base(&mut *device, (&plan.prefill.0, &plan.prefill.1), &model, options.seed)?;
    let (seconds, prefill_seconds) =
        time_tokens(&plan, &mut *device, &planner, prompt, options.warmup, steps)?;
    let bytes = match device.taken_bytes()? {
        Some(taken) => taken.total,
        None => growth.most()?,
    };
    let measured = Measured { seconds, prefill_seconds, bytes };
    let lines = match args.no_ops {
        true => Vec::new(),
        false => profile(&mut *device, program, layout, args.shapes)?,
    };
    let median = measured.median();
    // Every token reads all weights but the embedding, of which a row is enough.
    let floor = read_bytes(program) / planner.device.copy_bytes_per_second;
    match format {
        Format::Json => outln!(
            "{}",
            json!({
                "model": model.arch.name,
                "device": planner.device.name,
                "method": "infer",
                "batch": batch,
                "context": context,
                "prompt_tokens": prompt,
                "planned_context": half_way.seq,
                "weight_bytes": weight_bytes(program),
                "planned_bytes": planned_bytes,
                "measured_bytes": measured.bytes,
                "slab_bytes": plan.slab_bytes(),
                "prefill_seconds": measured.prefill_seconds,
                "tokens_per_second": batch as f64 / median,
                "seconds_per_iteration": median,
                "planned_seconds": planned_seconds,
                "floor_seconds": { "bytes": floor },
                "ops": lines.iter().map(Line::json).collect::<Vec<_>>(),
            })
        ),
        Format::Table => {
            out!(
                "{} on {}: {batch} sequence{}, context {context}, {}{}\n\n",
                model.arch.name,
                planner.device.name,
                if batch == 1 { "" } else { "s" },
                recipe.precision,
                recipe.quant.map_or(String::new(), |q| format!(", {}", q.name())),
            );
            out!(
                "  {:.0} tokens/s; {} a token step ({} to {} of {}); planned at position {} {} ({:+.1} %)\n",
                batch as f64 / median,
                units::seconds(median),
                units::seconds(measured.seconds[0]),
                units::seconds(measured.seconds[measured.seconds.len() - 1]),
                measured.seconds.len(),
                half_way.seq,
                units::seconds(planned_seconds),
                (planned_seconds / median - 1.0) * 100.0,
            );
            out!(
                "  prompt of {prompt}: {}\n  memory {} planned, {} measured ({:+.2} %); weights {}\n",
                units::seconds(measured.prefill_seconds),
                units::bytes(planned_bytes),
                units::bytes(measured.bytes),
                (measured.bytes as f64 / planned_bytes as f64 - 1.0) * 100.0,
                units::bytes(weight_bytes(program)),
            );
            out!(
                "  floor: weights at the rate of memory {}, {:.0} % of the step\n",
                units::seconds(floor),
                floor / median * 100.0
            );
            out!("{}", profile_table(&planner.device, recipe.precision, &lines));
        }
    }
    Ok(())
}

/// Seconds of each token step behind the first `warmup`, sorted, and of the prompt.
fn time_tokens(
    plan: &InferPlan,
    device: &mut dyn Device,
    planner: &Planner,
    prompt: usize,
    warmup: usize,
    steps: usize,
) -> Result<(Vec<f64>, f64), Stop> {
    let batch = plan.recipe.batch;
    let token = |i: usize| (i * 7919 % plan.arch.vocab_size) as u32;
    let prompts: Vec<Vec<u32>> =
        (0..batch).map(|row| (0..prompt).map(|i| token(row + batch * i)).collect()).collect();
    let sampler = |_| Sampler::new(Sampling::greedy()).map_err(Stop::input);
    let mut samplers = (0..batch).map(sampler).collect::<Result<Vec<_>, _>>()?;
    let mut moments: Vec<Instant> = Vec::with_capacity(steps + 1);
    let mut generator = Generator::new(plan, device, &*planner.target);
    let generations = generator
        .generate_all(&prompts, steps + 1, &[], &mut samplers, |sequence, _| {
            if sequence == 0 {
                moments.push(Instant::now());
            }
            true
        })
        .map_err(Stop::input)?;
    let between = moments.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64());
    let mut seconds: Vec<f64> = between.skip(warmup).collect();
    seconds.sort_by(f64::total_cmp);
    Ok((seconds, generations[0].prefill_seconds))
}

fn weight_bytes(program: &Program) -> u64 {
    program.tensors.iter().filter(|t| t.class == Class::Weight).map(|t| t.bytes()).sum()
}

/// Bytes of weights that a token step reads.
fn read_bytes(program: &Program) -> f64 {
    let mut looked_up = 0;
    let mut multiplied = std::collections::BTreeSet::new();
    for op in &program.ops {
        match &op.kind {
            OpKind::Embed { table, .. } => looked_up = table.index(),
            kind => kind.for_each_operand(|t, _| {
                multiplied.insert(t.index());
            }),
        }
    }
    // A tied head reads the embedding after all.
    let unread = match multiplied.contains(&looked_up) {
        true => 0,
        false => program.tensors.get(looked_up).map_or(0, |t| t.bytes()),
    };
    (weight_bytes(program) - unread) as f64
}

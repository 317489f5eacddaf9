//! `plimsoll generate`: continue a prompt.

use clap::Args;
use plimsoll_infer::{Generator, InferPlan, Sampler, Sampling, StopReason};
use plimsoll_model::init_state;
use plimsoll_plan::Device;
use plimsoll_program::{Recipe, Target};
use serde_json::json;

use crate::devices::DeviceArg;
use crate::exit::{Outcome, Stop};
use crate::model_source::ModelSource;
use crate::recipe_args::Precision;
use crate::weights::{Weights, WeightsArgs};
use crate::{Format, output, units};

/// How tokens are chosen, shared with `chat`.
#[derive(Clone, Debug, Args)]
pub struct SamplingArgs {
    /// Always take the likeliest token.
    #[arg(long)]
    pub greedy: bool,
    #[arg(long, default_value_t = 0.8)]
    pub temperature: f32,
    /// Keep this many of the likeliest tokens; 0 keeps all.
    #[arg(long, default_value_t = 0)]
    pub top_k: usize,
    /// Keep the likeliest tokens whose probabilities reach this sum.
    #[arg(long, default_value_t = 0.95)]
    pub top_p: f32,
    /// Keep tokens at least this likely, relative to the likeliest.
    #[arg(long, default_value_t = 0.0)]
    pub min_p: f32,
    /// Above 1: tokens that were seen become less likely.
    #[arg(long, default_value_t = 1.0)]
    pub repetition_penalty: f32,
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    #[arg(long, default_value_t = 256)]
    pub max_new_tokens: usize,
    /// Positions of the KV cache [default: prompt and new tokens, or 4096 in a chat]
    #[arg(long)]
    pub context: Option<usize>,
    /// Type of weights and KV cache [default: bf16 on a GPU, f32 on the CPU]
    #[arg(long, value_enum)]
    pub precision: Option<Precision>,
    /// Where to run [default: cuda where a GPU is usable, else cpu]
    #[arg(long, value_enum)]
    pub device: Option<DeviceArg>,
}

impl SamplingArgs {
    /// # Errors
    /// A setting is out of its range.
    pub fn sampler(&self) -> Result<Sampler, Stop> {
        let sampling = Sampling {
            repetition_penalty: self.repetition_penalty,
            temperature: if self.greedy { 0.0 } else { self.temperature },
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            seed: self.seed,
        };
        Sampler::new(sampling).map_err(|e| Stop::Input(format!("--{e}")))
    }
}

#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// A model directory, a .gguf file, or org/name in the local hub cache.
    #[arg(long)]
    pub model: String,
    #[command(flatten)]
    pub weights: WeightsArgs,
    /// Text to continue, as it is: no chat template is applied.
    #[arg(long, conflicts_with = "prompt_ids")]
    pub prompt: Option<String>,
    /// Token ids to continue: 5,17,9.
    #[arg(long, value_delimiter = ',')]
    pub prompt_ids: Vec<u32>,
    /// Apply the model's chat template to the prompt, as the user's message.
    #[arg(long, conflicts_with = "prompt_ids")]
    pub chat: bool,
    /// Go on after the model's end token.
    #[arg(long)]
    pub ignore_eos: bool,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[arg(long, value_enum, default_value = "table")]
    pub format: Format,
}

pub fn run(args: &GenerateArgs) -> Outcome {
    let weights = Weights::open(&args.model, &args.weights)?;
    let model = &weights.model;
    let prompt = prompt_ids(args, model)?;
    // A prompt needs one position more than its own, even if nothing is to follow.
    let wanted = prompt.len().saturating_add(args.sampling.max_new_tokens.max(1));
    let context = args.sampling.context.unwrap_or(wanted.min(model.arch.max_position_embeddings));
    let mut loaded = Loaded::new(&weights, context, &args.sampling)?;
    let peak_bytes = loaded.plan.slab_bytes();
    let mut sampler = args.sampling.sampler()?;
    let stop_ids = if args.ignore_eos { Vec::new() } else { model.stop_ids() };

    let stream = args.format == Format::Table;
    let mut decoder = model.tokenizer.stream_after(&prompt, true);
    let mut generator = loaded.generator();
    let generation = generator
        .generate(&prompt, args.sampling.max_new_tokens, &stop_ids, &mut sampler, |id| {
            !stream || output::stream(&decoder.push(id))
        })
        .map_err(Stop::input)?;
    if stream {
        outln!("{}", decoder.finish());
        note!(
            "{} tokens, {:.1} tokens/s, prompt of {} in {}, {} planned",
            generation.new_ids.len(),
            generation.tokens_per_second(),
            prompt.len(),
            units::seconds(generation.prefill_seconds),
            units::bytes(peak_bytes)
        );
        return Ok(());
    }
    let ids: Vec<u32> = prompt.iter().chain(&generation.new_ids).copied().collect();
    let result = json!({
        "ids": ids,
        "text": model.tokenizer.decode(&generation.new_ids, true),
        "full_text": model.tokenizer.decode(&ids, true),
        "new_tokens": generation.new_ids.len(),
        "tokens_per_second": generation.tokens_per_second(),
        "prefill_seconds": generation.prefill_seconds,
        "peak_bytes": peak_bytes,
        "stopped_by": match generation.stop {
            StopReason::EndToken => "end_token",
            StopReason::Length => "length",
            StopReason::Callback => "callback",
        },
    });
    outln!("{result}");
    Ok(())
}

fn prompt_ids(args: &GenerateArgs, model: &ModelSource) -> Result<Vec<u32>, Stop> {
    if !args.prompt_ids.is_empty() {
        return Ok(args.prompt_ids.clone());
    }
    let Some(prompt) = &args.prompt else {
        return Err(Stop::Input("give --prompt TEXT or --prompt-ids 5,17,9".into()));
    };
    if args.chat {
        let message = plimsoll_text::Message::user(prompt);
        let text = model.template.template.render(&[message], true).map_err(Stop::input)?;
        return model.tokenizer.encode(&text, false).map_err(Stop::input);
    }
    model.tokenizer.encode(prompt, true).map_err(Stop::input)
}

/// A model in its slab, ready to generate.
pub struct Loaded {
    pub plan: InferPlan,
    device: Box<dyn Device>,
    target: Box<dyn Target>,
}

impl Loaded {
    /// Plans, reserves, and reads the weights.
    ///
    /// # Errors
    /// The model has no weights or does not fit.
    pub fn new(weights: &Weights, context: usize, args: &SamplingArgs) -> Result<Loaded, Stop> {
        let model = &weights.model;
        let most = model.arch.max_position_embeddings;
        if !(1..=most).contains(&context) {
            return Err(Stop::Input(format!(
                "--context {context} is out of range: {} was made for 1 to {most} positions",
                model.arch.name
            )));
        }
        let kind = DeviceArg::resolve(args.device);
        let target = kind.target();
        let precision = args.precision.unwrap_or(kind.default_precision());
        let recipe = weights.recipe(Recipe::infer(precision.dtype(), 1, context));
        let plan = InferPlan::new(&model.arch, &recipe, &*target).map_err(Stop::input)?;
        let limit = kind.memory_bytes()?;
        if plan.slab_bytes() > limit {
            return Err(Stop::DoesNotFit(format!(
                "{} with a context of {context} needs {} of {}: lower --context or use \
                 --precision bf16",
                model.arch.name,
                units::bytes(plan.slab_bytes()),
                units::bytes(limit)
            )));
        }
        let mut device = kind.reserve(plan.slab_bytes())?;
        let (program, layout) = &plan.prefill;
        init_state(&mut *device, program, layout, &plan.arch)?;
        weights.load(&mut *device, program, layout)?;
        Ok(Loaded { plan, device, target })
    }

    pub fn generator(&mut self) -> Generator<'_> {
        Generator::new(&self.plan, &mut *self.device, &*self.target)
    }
}

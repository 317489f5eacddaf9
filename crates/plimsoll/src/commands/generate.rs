//! `plimsoll generate`: continue a prompt, or several at a time.

use clap::Args;
use plimsoll_infer::{Generation, Generator, InferPlan, Sampler, Sampling, StopReason};
use plimsoll_model::init_state;
use plimsoll_plan::Device;
use plimsoll_program::{Recipe, Target};
use serde_json::json;

use crate::devices::DeviceArg;
use crate::exit::{Outcome, Stop};
use crate::model_source::ModelSource;
use crate::recipe_args::Precision;
use crate::stop_text::StopText;
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
    /// Of several prompts, the second draws with the next seed, and so on.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// End the text where this begins; may be given several times.
    #[arg(long)]
    pub stop: Vec<String>,
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
    pub fn sampler(&self, sequence: usize) -> Result<Sampler, Stop> {
        let sampling = Sampling {
            repetition_penalty: self.repetition_penalty,
            temperature: if self.greedy { 0.0 } else { self.temperature },
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            seed: self.seed.wrapping_add(sequence as u64),
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
    /// Text to continue, as it is: no chat template is applied. Several are continued
    /// together.
    #[arg(long, conflicts_with = "prompt_ids")]
    pub prompt: Vec<String>,
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
    /// The same as --format json.
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &GenerateArgs) -> Outcome {
    let weights = Weights::open(&args.model, &args.weights)?;
    let model = &weights.model;
    let prompts = prompt_ids(args, model)?;
    // A prompt needs one position more than its own, even if nothing is to follow.
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    let wanted = longest.saturating_add(args.sampling.max_new_tokens.max(1));
    let context = args.sampling.context.unwrap_or(wanted.min(model.arch.max_position_embeddings));
    let mut loaded = Loaded::new(&weights, prompts.len(), context, &args.sampling)?;
    let peak_bytes = loaded.plan.slab_bytes();
    let mut samplers =
        (0..prompts.len()).map(|i| args.sampling.sampler(i)).collect::<Result<Vec<_>, _>>()?;
    let stop_ids = if args.ignore_eos { Vec::new() } else { model.stop_ids() };

    let json = args.json || args.format == Format::Json;
    // One text is printed as it comes; several, when all are there.
    let stream = !json && prompts.len() == 1;
    let mut texts: Vec<_> = prompts
        .iter()
        .map(|p| {
            (
                model.tokenizer.stream_after(p, true),
                StopText::new(&args.sampling.stop),
                String::new(),
            )
        })
        .collect();
    let mut generator = loaded.generator();
    let generations = generator
        .generate_all(&prompts, args.sampling.max_new_tokens, &stop_ids, &mut samplers, |i, id| {
            let (decoder, stop, text) = &mut texts[i];
            let piece = stop.push(&decoder.push(id));
            text.push_str(&piece);
            (!stream || output::stream(&piece)) && !stop.found()
        })
        .map_err(Stop::input)?;
    let mut results = Vec::new();
    for ((prompt, generation), (decoder, mut stop, mut text)) in
        prompts.iter().zip(&generations).zip(texts)
    {
        let end = stop.push(&decoder.finish()) + &stop.finish();
        text.push_str(&end);
        if stream {
            outln!("{end}");
        }
        results.push(Continued { prompt, generation, stopped: stop.found(), text });
    }
    if json {
        let mut values: Vec<_> = results.iter().map(|r| r.json(model, peak_bytes)).collect();
        let value = if values.len() == 1 {
            values.remove(0)
        } else {
            json!({
                "sequences": values,
                "tokens_per_second": tokens_per_second(&generations),
                "peak_bytes": peak_bytes,
            })
        };
        outln!("{value}");
        return Ok(());
    }
    if !stream {
        for (i, result) in results.iter().enumerate() {
            outln!("[{}] {}", i + 1, result.text);
        }
    }
    note!(
        "{} tokens, {:.1} tokens/s, prompt of {longest} in {}, {} planned",
        generations.iter().map(|g| g.new_ids.len()).sum::<usize>(),
        tokens_per_second(&generations),
        units::seconds(generations[0].prefill_seconds),
        units::bytes(peak_bytes)
    );
    Ok(())
}

/// Decoded tokens a second, of all sequences together.
fn tokens_per_second(generations: &[Generation]) -> f64 {
    generations.iter().map(Generation::tokens_per_second).sum()
}

/// One prompt and what followed it.
struct Continued<'a> {
    prompt: &'a [u32],
    generation: &'a Generation,
    /// Ended by one of the strings of `--stop`.
    stopped: bool,
    /// Up to that string.
    text: String,
}

impl Continued<'_> {
    fn json(&self, model: &ModelSource, peak_bytes: u64) -> serde_json::Value {
        let generation = self.generation;
        let ids: Vec<u32> = self.prompt.iter().chain(&generation.new_ids).copied().collect();
        json!({
            "ids": ids,
            "text": self.text,
            "full_text": model.tokenizer.decode(self.prompt, true) + &self.text,
            "new_tokens": generation.new_ids.len(),
            "tokens_per_second": generation.tokens_per_second(),
            "prefill_seconds": generation.prefill_seconds,
            "peak_bytes": peak_bytes,
            "stopped_by": match generation.stop {
                _ if self.stopped => "stop_string",
                StopReason::EndToken => "end_token",
                StopReason::Length => "length",
                StopReason::Callback => "callback",
            },
        })
    }
}

fn prompt_ids(args: &GenerateArgs, model: &ModelSource) -> Result<Vec<Vec<u32>>, Stop> {
    if !args.prompt_ids.is_empty() {
        return Ok(vec![args.prompt_ids.clone()]);
    }
    if args.prompt.is_empty() {
        return Err(Stop::Input("give --prompt TEXT or --prompt-ids 5,17,9".into()));
    }
    let ids = |prompt: &String| {
        if args.chat {
            let message = plimsoll_text::Message::user(prompt);
            let text = model.template.template.render(&[message], true).map_err(Stop::input)?;
            return model.tokenizer.encode(&text, false).map_err(Stop::input);
        }
        model.tokenizer.encode(prompt, true).map_err(Stop::input)
    };
    args.prompt.iter().map(ids).collect()
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
    pub fn new(
        weights: &Weights,
        batch: usize,
        context: usize,
        args: &SamplingArgs,
    ) -> Result<Loaded, Stop> {
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
        let recipe = weights.recipe(Recipe::infer(precision.dtype(), batch, context));
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

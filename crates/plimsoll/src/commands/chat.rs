//! `plimsoll chat`: talk to a model.

use std::io::BufRead;

use clap::Args;
use plimsoll_text::Message;

use crate::commands::generate::{Loaded, SamplingArgs};
use crate::exit::{Outcome, Stop};
use crate::stop_text::StopText;
use crate::weights::{Weights, WeightsArgs};
use crate::{output, units};

#[derive(Debug, Args)]
pub struct ChatArgs {
    /// A model directory, a .gguf file, or org/name in the local hub cache.
    #[arg(long)]
    pub model: String,
    #[command(flatten)]
    pub weights: WeightsArgs,
    /// What the model is told before the conversation.
    #[arg(long)]
    pub system: Option<String>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// Positions of the KV cache where the user names none.
const CONTEXT: usize = 4096;

pub fn run(args: &ChatArgs) -> Outcome {
    let weights = Weights::open(&args.model, &args.weights)?;
    let model = &weights.model;
    let context = args.sampling.context.unwrap_or(CONTEXT.min(model.arch.max_position_embeddings));
    let mut loaded = Loaded::new(&weights, 1, context, &args.sampling)?;
    note!(
        "{}: {} in memory, context of {context} tokens; chat template: {}. An empty line or \
         Ctrl-D ends.",
        model.arch.name,
        units::bytes(loaded.plan.slab_bytes()),
        model.template.reason
    );
    let mut sampler = args.sampling.sampler(0)?;
    let stop_ids = model.stop_ids();
    let mut messages: Vec<Message> = args.system.iter().map(Message::system).collect();
    let mut generator = loaded.generator();
    let mut lines = std::io::stdin().lock().lines();
    loop {
        output::note(format_args!("> "));
        let line = match lines.next() {
            Some(Ok(line)) if !line.trim().is_empty() => line,
            Some(Err(error)) => return Err(Stop::Input(format!("standard input: {error}"))),
            _ => return Ok(()),
        };
        messages.push(Message::user(line));
        let text = model.template.template.render(&messages, true).map_err(Stop::input)?;
        let prompt = model.tokenizer.encode(&text, false).map_err(Stop::input)?;
        let mut decoder = model.tokenizer.stream_after(&prompt, true);
        let mut stop = StopText::new(&args.sampling.stop);
        let mut answer = String::new();
        let generated = generator.generate(
            &prompt,
            args.sampling.max_new_tokens,
            &stop_ids,
            &mut sampler,
            |id| {
                let piece = stop.push(&decoder.push(id));
                answer.push_str(&piece);
                output::stream(&piece) && !stop.found()
            },
        );
        let generation = generated.map_err(Stop::input)?;
        let rest = stop.push(&decoder.finish()) + &stop.finish();
        outln!("{rest}");
        answer.push_str(&rest);
        messages.push(Message::assistant(answer));
        note!(
            "[{} tokens, {:.1} tokens/s]",
            generation.new_ids.len(),
            generation.tokens_per_second()
        );
    }
}

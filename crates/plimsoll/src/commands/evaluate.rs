//! `plimsoll evaluate`: loss and perplexity of a model on data.

use clap::Args;
use plimsoll_model::init_state;
use plimsoll_program::Recipe;
use plimsoll_train::{Session, TrainPlan, evaluate};
use serde_json::json;

use crate::data_args::DataArgs;
use crate::devices::DeviceArg;
use crate::exit::{Outcome, Stop};
use crate::recipe_args::Precision;
use crate::weights::{Weights, WeightsArgs};
use crate::{Format, units};

#[derive(Debug, Args)]
pub struct EvaluateArgs {
    /// A model directory, a .gguf file, or org/name in the local hub cache.
    #[arg(long)]
    pub model: String,
    #[command(flatten)]
    pub weights: WeightsArgs,
    #[command(flatten)]
    pub data: DataArgs,
    #[arg(long, default_value_t = 1)]
    pub batch: usize,
    /// Tokens in a sequence [default: 1024, or what the model was made for]
    #[arg(long)]
    pub seq: Option<usize>,
    /// Type of weights and activations [default: bf16 on a GPU, f32 on the CPU]
    #[arg(long, value_enum)]
    pub precision: Option<Precision>,
    /// Where to run [default: cuda where a GPU is usable, else cpu]
    #[arg(long, value_enum)]
    pub device: Option<DeviceArg>,
}

pub fn run(args: &EvaluateArgs) -> Outcome {
    let (format, _) = args.data.formats()?;
    let weights = Weights::open(&args.model, &args.weights)?;
    let model = &weights.model;
    let seq = args.seq.unwrap_or(model.arch.max_position_embeddings.min(1024));
    let kind = DeviceArg::resolve(args.device);
    let precision = args.precision.unwrap_or(kind.default_precision());
    let recipe = Recipe::infer(precision.dtype(), args.batch, seq);
    let recipe = weights.recipe(recipe);
    let target = kind.target();
    let plan = TrainPlan::for_evaluation(&model.arch, &recipe, &*target).map_err(Stop::input)?;
    let limit = kind.memory_bytes()?;
    if plan.slab_bytes() > limit {
        return Err(Stop::DoesNotFit(format!(
            "evaluating {} at batch {} and seq {seq} needs {} of {}: lower --batch or --seq, or \
             use --precision bf16",
            model.arch.name,
            args.batch,
            units::bytes(plan.slab_bytes()),
            units::bytes(limit)
        )));
    }
    let rows = args.data.rows(model, args.batch, seq, 0)?.train;
    let mut device = kind.reserve(plan.slabs())?;
    let (program, layout) = (&plan.evaluate, &plan.evaluate_layout);
    init_state(&mut *device, program, layout, &model.arch)?;
    weights.load(&mut *device, program, layout)?;
    let mut session = Session { plan: &plan, device: &mut *device };
    let (loss, tokens) = evaluate(&mut session, &rows)?;
    match format {
        Format::Json => outln!(
            "{}",
            json!({
                "loss": loss,
                "perplexity": loss.exp(),
                "tokens": tokens,
                "peak_bytes": plan.slab_bytes(),
            })
        ),
        Format::Table => outln!(
            "loss {loss:.4}, perplexity {:.3} over {tokens} tokens, in {}",
            loss.exp(),
            units::bytes(plan.slab_bytes())
        ),
    }
    Ok(())
}

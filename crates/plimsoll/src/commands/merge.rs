//! `plimsoll merge`: a model and its adapter as one model.

use std::path::PathBuf;

use clap::Args;
use plimsoll_model::{ModelError, merge_adapter};
use serde_json::json;

use crate::Format;
use crate::commands::quantize::{refuse_same_folder, stored_precision};
use crate::exit::{Outcome, Stop};
use crate::model_source::open_model;
use crate::recipe_args::{Precision, QuantArg};
use crate::weights::{note_other_quant, open_adapter, resolve};

#[derive(Debug, Args)]
pub struct MergeArgs {
    /// What the adapter was trained on: a model directory, a .gguf file, or org/name; or the
    /// folder of the adapter, which names it.
    #[arg(long)]
    pub model: String,
    /// Folder of the adapter.
    #[arg(long)]
    pub adapter: Option<PathBuf>,
    /// Merge into what the model is in these four bits, as a QLoRA run had it
    /// [default: into the weights as they are stored]
    #[arg(long, value_enum)]
    pub quant: Option<QuantArg>,
    /// Type of the new model [default: f32 where the model is stored so, else bf16]
    #[arg(long, value_enum)]
    pub precision: Option<Precision>,
    /// Folder of the new model.
    #[arg(long)]
    pub out: PathBuf,
    #[arg(long, value_enum, default_value = "table")]
    pub format: Format,
}

pub fn run(args: &MergeArgs) -> Outcome {
    let (model, adapter) = resolve(&args.model, args.adapter.as_deref())?;
    let Some(adapter) = adapter else {
        return Err(Stop::Input("give --adapter, the folder of the adapter".into()));
    };
    let model = open_model(&model)?;
    let checkpoint = model.weights()?;
    let adapter = open_adapter(&adapter, &model)?;
    refuse_same_folder(checkpoint, &args.out)?;
    let precision = args.precision.map_or_else(|| stored_precision(checkpoint), Precision::dtype);
    let quant = args.quant.and_then(|q| q.quant(false));
    note_other_quant(&adapter, quant.or(model.stored_quant()));
    let quant = quant.map(|q| q.format());
    if let (Some(quant), Some(stored)) = (quant, model.stored_quant())
        && quant != stored.format()
    {
        return Err(Stop::Input(format!(
            "--quant {quant}: the weights of this model are in {} already, which is what the \
             adapter is merged into: leave --quant out",
            stored.name()
        )));
    }
    let beside = model.files_beside()?;
    let done =
        merge_adapter(checkpoint, &adapter, &args.out, precision, quant).map_err(|e| match e {
            ModelError::Io { .. } | ModelError::NoSpace { .. } => Stop::Failed(e.to_string()),
            other => Stop::input(other),
        })?;
    for (name, bytes) in beside {
        let path = args.out.join(name);
        std::fs::write(&path, bytes)
            .map_err(|e| Stop::Failed(format!("cannot write {}: {e}", path.display())))?;
    }
    match args.format {
        Format::Json => outln!(
            "{}",
            json!({
                "model": model.arch.name,
                "out": args.out,
                "merged_tensors": done.merged,
                "replaced_tensors": done.replaced,
                "precision": precision,
                "into": done.quant.map_or("stored weights", |q| q.name()),
            })
        ),
        Format::Table => {
            let into = match done.quant {
                Some(quant) => format!("the {quant} weights multiplied out"),
                None => "the weights as they are stored".to_owned(),
            };
            outln!(
                "{}: {} matrices merged into {into}, written in {precision}",
                args.out.display(),
                done.merged
            );
        }
    }
    Ok(())
}

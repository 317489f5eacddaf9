//! `plimsoll quantize`: a model in four bits, as transformers loads it.

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use plimsoll_arch::DType;
use plimsoll_model::{Checkpoint, ModelError, expected_tensors, quantize_model, quantizing_bytes};
use plimsoll_plan::Device;
use plimsoll_quant::Format4bit;
use serde_json::json;

use crate::devices::DeviceArg;
use crate::exit::{Outcome, Stop};
use crate::model_source::open_model;
use crate::recipe_args::Precision;
use crate::{Format, units};

#[derive(Debug, Args)]
pub struct QuantizeArgs {
    /// A model directory, a .gguf file, or org/name.
    #[arg(long)]
    pub model: String,
    /// The 4-bit format: nf4, nf4-dq, fp4 or fp4-dq (dq: the scales in eight bits).
    #[arg(long)]
    pub quant: Format4bit,
    /// Quantize the output head too, which stays as it is otherwise.
    #[arg(long)]
    pub quant_head: bool,
    /// Type of what is not quantized, and of the weights before they are
    /// [default: f32 where the model is stored so, else bf16]
    #[arg(long, value_enum)]
    pub precision: Option<Precision>,
    /// Who quantizes; the bits are the same.
    #[arg(long, value_enum, default_value = "cpu")]
    pub device: DeviceArg,
    /// Folder of the new model.
    #[arg(long)]
    pub out: PathBuf,
    #[arg(long, value_enum, default_value = "table")]
    pub format: Format,
}

pub fn run(args: &QuantizeArgs) -> Outcome {
    let start = Instant::now();
    let model = open_model(&args.model)?;
    let checkpoint = model.weights()?;
    refuse_same_folder(checkpoint, &args.out)?;
    let precision = args.precision.map_or_else(|| stored_precision(checkpoint), Precision::dtype);
    let beside = model.files_beside()?;
    let (format, head) = (args.quant, args.quant_head);
    let mut device = match args.device {
        DeviceArg::Cpu => None,
        gpu => Some(gpu.reserve(quantizing_bytes(&model.arch, format, head))?),
    };
    let device = device.as_mut().map(|d| &mut **d as &mut dyn Device);
    let done = quantize_model(checkpoint, &args.out, format, precision, head, device).map_err(
        |e| match e {
            ModelError::Io { .. } | ModelError::NoSpace { .. } => Stop::Failed(e.to_string()),
            ModelError::Device(e) => Stop::Failed(e.to_string()),
            other => Stop::input(other),
        },
    )?;
    for (name, bytes) in beside {
        let path = args.out.join(name);
        std::fs::write(&path, bytes)
            .map_err(|e| Stop::Failed(format!("cannot write {}: {e}", path.display())))?;
    }
    let (source, seconds) = (checkpoint.total_bytes(), start.elapsed().as_secs_f64());
    match args.format {
        Format::Json => {
            let value = json!({
                "model": model.arch.name,
                "quant": args.quant.name(),
                "out": args.out,
                "quantized_tensors": done.quantized,
                "kept_tensors": done.kept,
                "precision": precision,
                "source_bytes": source,
                "bytes": done.bytes,
                "seconds": seconds,
            });
            outln!("{value:#}");
        }
        Format::Table => {
            outln!(
                "{}: {} -> {} in {} ({} tensors quantized, {} kept in {precision}, {seconds:.1} s)",
                args.out.display(),
                units::bytes(source),
                units::bytes(done.bytes),
                args.quant,
                done.quantized,
                done.kept,
            );
        }
    }
    Ok(())
}

/// A model must not be replaced by its own quantization.
pub fn refuse_same_folder(checkpoint: &Checkpoint, out: &Path) -> Outcome {
    let path = checkpoint.path();
    let source = if path.is_dir() { Some(path) } else { path.parent() };
    let real = |p: &Path| p.canonicalize().ok();
    match (source.and_then(real), real(out)) {
        (Some(a), Some(b)) if a == b && path.is_dir() => Err(Stop::Input(format!(
            "--out {} is the folder of the model itself: give another one",
            out.display()
        ))),
        _ => Ok(()),
    }
}

/// f32 where everything is stored so, else bf16.
pub fn stored_precision(checkpoint: &Checkpoint) -> DType {
    let tensors = expected_tensors(checkpoint.architecture());
    let all_f32 = tensors.iter().all(|(name, _)| checkpoint.dtype(name) == Some("F32"));
    if all_f32 { DType::F32 } else { DType::Bf16 }
}

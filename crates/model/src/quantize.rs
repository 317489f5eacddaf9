//! A checkpoint in four bits, in the form that transformers and bitsandbytes
//! load.

use std::path::Path;

use half::bf16;
use plimsoll_arch::DType;
use plimsoll_plan::Device;
use plimsoll_quant::{
    BLOCK, DynamicMap, Format4bit, NESTED_BLOCK, blocks, nested_blocks, packed_bytes,
};
use serde_json::{Value, json};

use crate::on_device::read_4bit_on;
use crate::read::{Packed4bit, Scales};
use crate::{
    Checkpoint, DEFAULT_SHARD_BYTES, ModelError, SafetensorsWriter, TensorSpec, expected_tensors,
};

/// What [`quantize_model`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantized {
    /// Tensors of the model that are in four bits now, and those that are not.
    pub quantized: usize,
    pub kept: usize,
    /// Bytes of all tensors that were written.
    pub bytes: u64,
}

/// Writes a checkpoint with its projections in four bits into `dir`, one tensor at
/// a time. Embeddings, norms and biases, and the head unless `head`, are written
/// as `precision` (f32 or bf16), to which everything is rounded before it is
/// quantized. A device with a slab of [`crate::quantizing_bytes`] does it where one is
/// given and can, else the CPU, with the same bits.
///
/// # Errors
/// The checkpoint lacks a tensor, is in four bits already, or has no head of its
/// own to quantize; a value is not finite; the device fails; or the disk refuses, and
/// then nothing that was in `dir` is lost.
pub fn quantize_model(
    checkpoint: &Checkpoint,
    dir: &Path,
    format: Format4bit,
    precision: DType,
    head: bool,
    mut device: Option<&mut dyn Device>,
) -> Result<Quantized, ModelError> {
    checkpoint.validate()?;
    let arch = checkpoint.architecture();
    if head && arch.tie_word_embeddings {
        let reason = "its head is the embedding, which stays as it is: leave --quant-head out";
        return Err(ModelError::not_a_model(checkpoint.path(), reason));
    }
    let tensors = expected_tensors(arch);
    if let Some((name, stored)) =
        tensors.iter().find_map(|(name, _)| Some((name, checkpoint.format_4bit(name)?)))
    {
        let reason = format!("tensor `{name}` is in {stored} already: give the original model");
        return Err(ModelError::not_a_model(checkpoint.path(), reason));
    }
    let mut specs = Vec::new();
    for (name, shape) in &tensors {
        if quantizes(name, head) {
            specs.extend(parts(name, shape, format, precision));
        } else {
            specs.push(TensorSpec { name: name.clone(), shape: shape.clone(), dtype: precision });
        }
    }
    let size = |s: &TensorSpec| (s.shape.iter().product::<usize>() * s.dtype.bytes()) as u64;
    let mut done = Quantized { quantized: 0, kept: 0, bytes: specs.iter().map(size).sum() };
    let config = config(&arch.to_config_json(precision), format, precision, head)?;
    let mut writer = SafetensorsWriter::with_config(dir, config, &specs, DEFAULT_SHARD_BYTES)?;
    for (name, shape) in &tensors {
        let elements = shape.iter().product();
        if quantizes(name, head) {
            let read = &mut |out: Packed4bit| match &mut device {
                Some(device) => read_4bit_on(*device, checkpoint, name, format, precision, out),
                None => checkpoint.read_4bit(name, format, precision, out),
            };
            write_packed(read, &mut writer, name, shape, format, precision)?;
            done.quantized += 1;
            continue;
        }
        if precision == DType::F32 {
            let mut values = vec![0.0; elements];
            checkpoint.read_f32(name, &mut values)?;
            writer.write_f32(name, &values)?;
        } else {
            let mut values = vec![bf16::ZERO; elements];
            checkpoint.read_bf16(name, &mut values)?;
            writer.write_bf16(name, &values)?;
        }
        done.kept += 1;
    }
    writer.finish()?;
    Ok(done)
}

/// What transformers makes a `Linear4bit` of: every projection of a block; and the head,
/// if that is wanted.
pub(crate) fn quantizes(name: &str, head: bool) -> bool {
    name.ends_with("_proj.weight") || head && name == "lm_head.weight"
}

/// Length of a `quant_state`, spaces at its end included: it is fixed before the
/// offset is known.
fn state_bytes(shape: &[usize], format: Format4bit, precision: DType) -> usize {
    state(shape, format, precision, 0.0).len() + 24
}

/// `quant_state` as Python writes it.
fn state(shape: &[usize], format: Format4bit, precision: DType, offset: f32) -> String {
    let nested = if format.double {
        // The shortest decimals of the float32 as a float64.
        let offset = json!(f64::from(offset));
        format!(
            ", \"nested_blocksize\": {NESTED_BLOCK}, \"nested_dtype\": \"float32\", \
             \"nested_offset\": {offset}"
        )
    } else {
        String::new()
    };
    let (kind, dtype) = (format.codebook.name(), precision.torch_name());
    format!(
        "{{\"quant_type\": \"{kind}\", \"blocksize\": {BLOCK}, \"dtype\": \"{dtype}\", \
         \"shape\": {shape:?}{nested}}}"
    )
}

fn state_name(name: &str, format: Format4bit) -> String {
    format!("{name}.quant_state.bitsandbytes__{}", format.codebook.name())
}

/// The tensors of one quantized weight, in the order in which they are written.
fn parts(name: &str, shape: &[usize], format: Format4bit, precision: DType) -> Vec<TensorSpec> {
    let n = shape.iter().product();
    let part = |suffix: &str, shape: Vec<usize>, dtype| TensorSpec {
        name: format!("{name}{suffix}"),
        shape,
        dtype,
    };
    let scale = if format.double { DType::U8 } else { DType::F32 };
    let mut parts = vec![
        part("", vec![packed_bytes(n), 1], DType::U8),
        part(".absmax", vec![blocks(n)], scale),
        part(".quant_map", vec![16], DType::F32),
    ];
    if format.double {
        parts.push(part(".nested_absmax", vec![nested_blocks(n)], DType::F32));
        parts.push(part(".nested_quant_map", vec![256], DType::F32));
    }
    parts.push(TensorSpec {
        name: state_name(name, format),
        shape: vec![state_bytes(shape, format, precision)],
        dtype: DType::U8,
    });
    parts
}

fn write_packed(
    read: &mut dyn FnMut(Packed4bit) -> Result<(), ModelError>,
    writer: &mut SafetensorsWriter,
    name: &str,
    shape: &[usize],
    format: Format4bit,
    precision: DType,
) -> Result<(), ModelError> {
    let n = shape.iter().product();
    let mut codes = vec![0u8; packed_bytes(n)];
    let table = |name: &str| format!("{name}.quant_map");
    let mut offset = 0.0;
    if format.double {
        let (mut scales, mut absmax) = (vec![0u8; blocks(n)], vec![0.0f32; nested_blocks(n)]);
        let nested =
            Scales::Nested { codes: &mut scales, absmax: &mut absmax, offset: &mut offset };
        let out = Packed4bit { codes: &mut codes, scales: nested };
        read(out)?;
        writer.write_u8(name, &codes)?;
        writer.write_u8(&format!("{name}.absmax"), &scales)?;
        writer.write_f32(&table(name), format.codebook.values())?;
        writer.write_f32(&format!("{name}.nested_absmax"), &absmax)?;
        let map = DynamicMap::signed().values();
        writer.write_f32(&format!("{name}.nested_quant_map"), map)?;
    } else {
        let mut absmax = vec![0.0f32; blocks(n)];
        let out = Packed4bit { codes: &mut codes, scales: Scales::Plain(&mut absmax) };
        read(out)?;
        writer.write_u8(name, &codes)?;
        writer.write_f32(&format!("{name}.absmax"), &absmax)?;
        writer.write_f32(&table(name), format.codebook.values())?;
    }
    let mut state = state(shape, format, precision, offset).into_bytes();
    state.resize(state_bytes(shape, format, precision), b' ');
    writer.write_u8(&state_name(name, format), &state)
}

/// `config.json` with what transformers needs to load the weights.
fn config(
    config: &str,
    format: Format4bit,
    precision: DType,
    head: bool,
) -> Result<String, ModelError> {
    let json_error = |e: serde_json::Error| {
        ModelError::not_a_model(Path::new("config.json"), format!("cannot be written: {e}"))
    };
    let mut value: Value = serde_json::from_str(config).map_err(json_error)?;
    // Without a list transformers leaves the head out by itself.
    let skipped = if head { json!([]) } else { Value::Null };
    value["quantization_config"] = json!({
        "_load_in_4bit": true,
        "_load_in_8bit": false,
        "bnb_4bit_compute_dtype": precision.torch_name(),
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": format.codebook.name(),
        "bnb_4bit_use_double_quant": format.double,
        "llm_int8_enable_fp32_cpu_offload": false,
        "llm_int8_has_fp16_weight": false,
        "llm_int8_skip_modules": skipped,
        "llm_int8_threshold": 6.0,
        "load_in_4bit": true,
        "load_in_8bit": false,
        "quant_method": "bitsandbytes",
    });
    let text = serde_json::to_string_pretty(&value).map_err(json_error)?;
    Ok(text + "\n")
}

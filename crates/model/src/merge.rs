//! An adapter and its base as one model.

use std::path::Path;

use half::bf16;
use plimsoll_arch::DType;
use plimsoll_quant::{
    Format4bit, blocks, dequantize_4bit, dequantize_absmax, nested_blocks, packed_bytes,
};

use crate::read::{Packed4bit, Scales};
use crate::{Adapter, Checkpoint, ModelError, SafetensorsWriter, expected_tensors};

/// What [`merge_adapter`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merged {
    /// Matrices that became W + scale B A.
    pub merged: usize,
    /// Tensors that the adapter brought along in full.
    pub replaced: usize,
    /// The four bits that the matrices of the base went through before; none where they
    /// were merged as they are.
    pub quant: Option<Format4bit>,
}

/// Writes the base with its adapter merged in into `dir`, as `precision` (f32 or bf16),
/// one tensor at a time: W + scale B A in float32, rounded once.
///
/// An adapter that was trained beside four bits belongs to what those stand for: with
/// `quant` the projections of the base are quantized and multiplied out first. A base
/// that is stored in four bits is multiplied out in any case.
///
/// # Errors
/// A tensor of the base cannot be read, is in other four bits than `quant`, or the sum
/// is not finite; or the disk refuses.
pub fn merge_adapter(
    checkpoint: &Checkpoint,
    adapter: &Adapter,
    dir: &Path,
    precision: DType,
    quant: Option<Format4bit>,
) -> Result<Merged, ModelError> {
    checkpoint.validate()?;
    let arch = checkpoint.architecture();
    let tensors = expected_tensors(arch);
    let mut writer = SafetensorsWriter::create(dir, arch, precision, &tensors)?;
    let scale = adapter.lora().scale();
    let mut done = Merged { merged: 0, replaced: 0, quant };
    for (name, shape) in &tensors {
        let elements = shape.iter().product();
        let mut values = vec![0.0f32; elements];
        let module = format!("base_model.model.{}", name.strip_suffix(".weight").unwrap_or(name));
        let saved = format!("base_model.model.{name}");
        let (a, b) = (format!("{module}.lora_A.weight"), format!("{module}.lora_B.weight"));
        if adapter.tensors().shape(&saved).is_some() {
            adapter.tensors().read_f32(&saved, &mut values)?;
            done.replaced += 1;
        } else {
            match quant.filter(|_| name.ends_with("_proj.weight")) {
                Some(format) => through_4bit(checkpoint, name, format, precision, &mut values)?,
                None => checkpoint.read_f32(name, &mut values)?,
            }
            done.quant = done.quant.or(checkpoint.format_4bit(name));
        }
        if let (Some(&[rank, inputs]), Some(_)) =
            (adapter.tensors().shape(&a), adapter.tensors().shape(&b))
        {
            let (mut low, mut high) = (vec![0.0; rank * inputs], vec![0.0; shape[0] * rank]);
            adapter.tensors().read_f32(&a, &mut low)?;
            adapter.tensors().read_f32(&b, &mut high)?;
            add_product(&mut values, &high, &low, rank, inputs, scale);
            done.merged += 1;
        }
        if let Some(index) = crate::first_non_finite(&values) {
            let (path, tensor) = (adapter.path().to_path_buf(), name.clone());
            return Err(ModelError::NonFinite { path, tensor, index, value: values[index] });
        }
        writer.write_f32(name, &values)?;
    }
    writer.finish()?;
    Ok(done)
}

/// What a tensor is after it was in four bits, in the numbers of `precision`.
fn through_4bit(
    checkpoint: &Checkpoint,
    name: &str,
    format: Format4bit,
    precision: DType,
    out: &mut [f32],
) -> Result<(), ModelError> {
    let n = out.len();
    let (mut packed, mut absmax) = (vec![0; packed_bytes(n)], vec![0.0; blocks(n)]);
    if format.double {
        let (mut codes, mut nested) = (vec![0; blocks(n)], vec![0.0; nested_blocks(n)]);
        let mut offset = 0.0;
        let scales = Scales::Nested { codes: &mut codes, absmax: &mut nested, offset: &mut offset };
        checkpoint.read_4bit(name, format, precision, Packed4bit { codes: &mut packed, scales })?;
        let map = plimsoll_quant::DynamicMap::signed().values();
        dequantize_absmax(&codes, &nested, offset, map, &mut absmax);
    } else {
        let scales = Scales::Plain(&mut absmax);
        checkpoint.read_4bit(name, format, precision, Packed4bit { codes: &mut packed, scales })?;
    }
    dequantize_4bit(format.codebook, &packed, &absmax, out);
    if precision == DType::Bf16 {
        // As it is multiplied out in training.
        out.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
    }
    Ok(())
}

/// w (N, K) += scale b (N, rank) a (rank, K), on all cores.
fn add_product(w: &mut [f32], b: &[f32], a: &[f32], rank: usize, inputs: usize, scale: f32) {
    let rows = w.len() / inputs;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let share = rows.div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        let shares = w.chunks_mut(share * inputs).zip(b.chunks(share * rank));
        for (w, b) in shares {
            scope.spawn(move || {
                let mut sum = vec![0.0f32; inputs];
                for (w, b) in w.chunks_exact_mut(inputs).zip(b.chunks_exact(rank)) {
                    sum.fill(0.0);
                    for (b, a) in b.iter().zip(a.chunks_exact(inputs)) {
                        sum.iter_mut().zip(a).for_each(|(sum, a)| *sum += b * a);
                    }
                    w.iter_mut().zip(&sum).for_each(|(w, sum)| *w += scale * sum);
                }
            });
        }
    });
}

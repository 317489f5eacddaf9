//! Weights between a checkpoint and the slab of a device.
//!
//! Each tensor goes straight to its place: there is never a second copy of the
//! model, not even of one tensor on a CPU.

use half::bf16;
use plimsoll_arch::{Architecture, DType};
use plimsoll_plan::{Device, DeviceError, Layout};
use plimsoll_program::{Program, WeightPart, weight_parts};

use crate::{Checkpoint, ModelError};

/// The bytes of one checkpoint tensor inside the slab.
struct Place {
    offset: u64,
    len: usize,
    dtype: DType,
}

fn place(program: &Program, layout: &Layout, part: &WeightPart) -> Place {
    let id = program.find(&part.tensor).expect("the program has every weight");
    let tensor = program.tensor(id);
    let cols = if part.shape.len() > 1 { tensor.cols() } else { 1 };
    let bytes = tensor.dtype.bytes();
    Place {
        offset: layout.offset(id) + (part.row * cols * bytes) as u64,
        len: part.shape.iter().product::<usize>() * bytes,
        dtype: tensor.dtype,
    }
}

/// Fills every weight of a program from a checkpoint.
///
/// # Errors
/// A tensor is missing, has another shape, or holds a value that is not
/// finite: the error names it.
pub fn load_weights(
    device: &mut dyn Device,
    program: &Program,
    layout: &Layout,
    arch: &Architecture,
    checkpoint: &Checkpoint,
) -> Result<(), DeviceError> {
    for part in weight_parts(arch) {
        let place = place(program, layout, &part);
        device.upload(place.offset, place.len, &mut |bytes| {
            read_part(checkpoint, &part.source, place.dtype, bytes)
                .map_err(|e| DeviceError::Source(Box::new(e)))
        })?;
    }
    Ok(())
}

fn read_part(
    checkpoint: &Checkpoint,
    name: &str,
    dtype: DType,
    bytes: &mut [u8],
) -> Result<(), ModelError> {
    match dtype {
        DType::Bf16 => checkpoint.read_bf16(name, bytemuck::cast_slice_mut(bytes)),
        _ => checkpoint.read_f32(name, bytemuck::cast_slice_mut(bytes)),
    }
}

/// Fills every weight with random values: normal with a deviation of 0.02
/// (`initializer_range` of the Llama family), norms with one, biases with zero.
/// The same seed gives the same weights in every precision up to rounding.
///
/// # Errors
/// The device's own.
pub fn init_weights(
    device: &mut dyn Device,
    program: &Program,
    layout: &Layout,
    arch: &Architecture,
    seed: u64,
) -> Result<(), DeviceError> {
    for (stream, part) in weight_parts(arch).iter().enumerate() {
        let place = place(program, layout, part);
        let constant = match part.shape.len() {
            1 if part.source.ends_with("bias") => Some(0.0),
            1 => Some(1.0),
            _ => None,
        };
        let value = |i: usize| constant.unwrap_or_else(|| 0.02 * normal(seed, stream as u64, i));
        device.upload(place.offset, place.len, &mut |bytes| {
            match place.dtype {
                DType::Bf16 => fill(bytemuck::cast_slice_mut(bytes), |i| bf16::from_f32(value(i))),
                _ => fill(bytemuck::cast_slice_mut::<u8, f32>(bytes), value),
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Fills on all cores: eight billion normal values take a while.
fn fill<T: Send>(out: &mut [T], value: impl Fn(usize) -> T + Sync) {
    const PIECE: usize = 1 << 18;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let piece = out.len().div_ceil(threads).max(PIECE);
    let alone = out.len() <= piece;
    std::thread::scope(|scope| {
        for (n, piece_out) in out.chunks_mut(piece).enumerate() {
            let value = &value;
            let mut work = move || {
                for (i, x) in piece_out.iter_mut().enumerate() {
                    *x = value(n * piece + i);
                }
            };
            if alone {
                work();
            } else {
                scope.spawn(work);
            }
        }
    });
}

/// A standard normal value by its place (Box-Muller over a counter), so that
/// neither order nor threads matter.
fn normal(seed: u64, stream: u64, index: usize) -> f32 {
    let bits = mix(mix(seed ^ stream.wrapping_mul(0x9e37_79b9_7f4a_7c15)) ^ index as u64);
    let u = ((bits >> 40) as f32 + 0.5) / (1u64 << 24) as f32;
    let v = (bits & 0xff_ffff) as f32 / (1u64 << 24) as f32;
    (-2.0 * u.ln()).sqrt() * (2.0 * std::f32::consts::PI * v).cos()
}

/// The finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Fills what survives a step, is no weight, and does not start at zero: the
/// rotary table. Optimizer state and KV caches are as the slab was reserved, zero.
///
/// # Errors
/// The device's own.
pub fn init_state(
    device: &mut dyn Device,
    program: &Program,
    layout: &Layout,
    arch: &Architecture,
) -> Result<(), DeviceError> {
    let Some(id) = program.find("rope") else { return Ok(()) };
    let bytes = program.tensor(id).bytes() as usize;
    device.upload(layout.offset(id), bytes, &mut |bytes| {
        arch.fill_rope_table(bytemuck::cast_slice_mut(bytes));
        Ok(())
    })
}

/// Hands every tensor of a checkpoint to `write`, in the order of
/// [`weight_parts`]: name, type, bytes.
///
/// # Errors
/// The device's own, or what `write` reports.
pub fn save_weights(
    device: &mut dyn Device,
    program: &Program,
    layout: &Layout,
    arch: &Architecture,
    mut write: impl FnMut(&str, DType, &[u8]) -> Result<(), ModelError>,
) -> Result<(), DeviceError> {
    for part in weight_parts(arch) {
        let place = place(program, layout, &part);
        device.download(place.offset, place.len, &mut |bytes| {
            write(&part.source, place.dtype, bytes).map_err(|e| DeviceError::Source(Box::new(e)))
        })?;
    }
    Ok(())
}

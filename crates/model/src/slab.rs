//! Weights between a checkpoint and the slab of a device.
//!
//! Each tensor goes straight to its place: there is never a second copy of the
//! model, not even of one tensor on a CPU. What the program wants in four bits is
//! quantized piece by piece on the way, by the device itself where it does that. A bf16
//! weight with a float32 master gets what the checkpoint has, piece by piece as well.

use std::collections::HashMap;
use std::ops::Range;

use half::bf16;
use plimsoll_arch::{Architecture, DType};
use plimsoll_plan::{Device, DeviceError, Layout, Quantize, QuantizeNested, UPLOAD_PIECE};
use plimsoll_program::{
    Class, Home, Lora, OpKind, Program, QuantizedPart, Shard, TensorId, WeightPart, master_name,
    quantized_name, weight_parts,
};
use plimsoll_quant::{
    BLOCK, Codebook, Format4bit, blocks, nested_blocks, quantize_4bit, quantize_absmax,
    split_master,
};

use crate::finite::Weight;
use crate::random::{TILE, normals, uniforms};
use crate::{Adapter, Checkpoint, ModelError, Packed4bit, Scales};

/// Where the tensors of a checkpoint lie in the slab.
struct Places<'a> {
    program: &'a Program,
    layout: &'a Layout,
    by_name: HashMap<&'a str, TensorId>,
    /// Optimizer state, among which are the lower halves of master weights.
    state: HashMap<&'a str, TensorId>,
    /// By their codes.
    quantized: HashMap<TensorId, (Codebook, QuantizedPart)>,
    rank: usize,
}

/// The bytes of one checkpoint tensor inside the slab.
struct Place {
    home: Home,
    offset: u64,
    len: usize,
    dtype: DType,
    /// Which of its elements these are: all, or those that this rank has.
    elements: Range<usize>,
    /// Which of them this rank answers for, among all ranks that have them.
    own: Range<usize>,
    total: usize,
}

/// The part of `tensor` elements `range` that lies in a checkpoint tensor, counted
/// from that one's first element.
fn inside(range: Range<usize>, first: usize, total: usize) -> Range<usize> {
    let at = |i: usize| i.clamp(first, first + total) - first;
    at(range.start)..at(range.end)
}

enum Stored {
    Dense(Place),
    Quantized(Codebook, QuantizedPart),
}

impl<'a> Places<'a> {
    fn new(device: &dyn Device, program: &'a Program, layout: &'a Layout) -> Places<'a> {
        // A product's output may have the name of its weight.
        let all = program.tensors.iter().enumerate();
        let weights = all.filter(|(_, t)| t.class == Class::Weight);
        let by_name = weights.map(|(i, t)| (t.name.as_str(), TensorId::new(i))).collect();
        let state = program.tensors.iter().enumerate();
        let state = state.filter(|(_, t)| t.class == Class::OptimizerState);
        let state = state.map(|(i, t)| (t.name.as_str(), TensorId::new(i))).collect();
        // Ops read gathered codes where a rank has only its part.
        let mut parts = HashMap::new();
        for op in &program.ops {
            if let OpKind::AllGather { from, to } = &op.kind {
                parts.extend(to.iter().copied().zip(from.iter().copied()));
            }
        }
        let mut quantized = HashMap::new();
        for matrix in program.ops.iter().filter_map(|op| op.kind.quantized()) {
            for part in &matrix.parts {
                let codes = parts.get(&part.codes).copied().unwrap_or(part.codes);
                let part = QuantizedPart { codes, ..part.clone() };
                quantized.insert(codes, (matrix.codebook, part));
            }
        }
        Places { program, layout, by_name, state, quantized, rank: device.rank() }
    }

    fn of(&self, part: &WeightPart) -> Stored {
        if let Some(id) = self.by_name.get(part.tensor.as_str()) {
            return Stored::Dense(self.dense(*id, part));
        }
        let codes = format!("{}.codes", quantized_name(part));
        let id = self.by_name.get(codes.as_str()).expect("the program has every weight");
        let (codebook, quantized) = self.quantized.get(id).expect("the program reads it");
        Stored::Quantized(*codebook, quantized.clone())
    }

    /// Where the lower half of the master of a weight lies, if it has one.
    fn master(&self, part: &WeightPart) -> Option<Place> {
        let id = self.state.get(master_name(&part.tensor).as_str())?;
        Some(self.dense(*id, part))
    }

    fn dense(&self, id: TensorId, part: &WeightPart) -> Place {
        let tensor = self.program.tensor(id);
        let cols = if part.shape.len() > 1 { tensor.cols() } else { 1 };
        let bytes = tensor.dtype.bytes();
        let (first, total) = (part.row * cols, part.shape.iter().product::<usize>());
        let held = tensor.held(self.rank);
        let elements = inside(held.clone(), first, total);
        let own = match tensor.shard {
            Shard::Whole if self.rank > 0 => 0..0,
            _ => inside(tensor.part(self.rank), first, total),
        };
        let at = (first + elements.start).saturating_sub(held.start);
        Place {
            home: tensor.home,
            offset: self.layout.offset(id) + (at * bytes) as u64,
            len: elements.len() * bytes,
            dtype: tensor.dtype,
            elements,
            own,
            total,
        }
    }

    /// Lets `make` fill a tensor in four bits: its codes where the device wants them,
    /// its scales, a few per cent of that, on the way there.
    fn upload_4bit(
        &self,
        device: &mut dyn Device,
        (codebook, part): (Codebook, &QuantizedPart),
        elements: usize,
        make: &mut dyn FnMut(Format4bit, Packed4bit) -> Result<(), ModelError>,
    ) -> Result<(), DeviceError> {
        let format = Format4bit { codebook, double: part.nested.is_some() };
        let home = |id: TensorId| self.program.tensor(id).home;
        let at = |id: TensorId| self.layout.offset(id);
        let (mut plain, mut codes, mut absmax, mut offset) = match format.double {
            true => (vec![], vec![0; blocks(elements)], vec![0.0; nested_blocks(elements)], 0.0),
            false => (vec![0.0; blocks(elements)], vec![], vec![], 0.0),
        };
        let all = elements.div_ceil(2);
        let held = self.program.tensor(part.codes).held(self.rank);
        device.upload(home(part.codes), at(part.codes), held.len(), &mut |bytes| {
            // Scales follow from all elements, of which this rank may have a part.
            let mut whole = if held.len() < all { vec![0; all] } else { Vec::new() };
            let to = if held.len() < all { &mut whole[..] } else { &mut bytes[..] };
            let scales = match format.double {
                true => {
                    let (codes, absmax, offset) = (&mut codes[..], &mut absmax[..], &mut offset);
                    Scales::Nested { codes, absmax, offset }
                }
                false => Scales::Plain(&mut plain),
            };
            make(format, Packed4bit { codes: to, scales }).map_err(source)?;
            if held.len() < all {
                bytes.copy_from_slice(&whole[held.clone()]);
            }
            Ok(())
        })?;
        let mut put = |id: TensorId, data: &[u8]| {
            device.upload(home(id), at(id), data.len(), &mut |bytes| {
                bytes.copy_from_slice(data);
                Ok(())
            })
        };
        match part.nested {
            None => put(part.absmax, bytemuck::cast_slice(&plain)),
            Some(nested) => {
                put(part.absmax, &codes)?;
                put(nested.absmax, bytemuck::cast_slice(&absmax))?;
                put(nested.offset, bytemuck::bytes_of(&offset))
            }
        }
    }

    /// Lets the device quantize a tensor by itself. Returns false where that is left to
    /// [`Places::upload_4bit`]: the device does not, its parts lie elsewhere, or the
    /// tensor is in four bits already or of another size.
    fn quantize_there(
        &self,
        device: &mut dyn Device,
        (codebook, part): (Codebook, &QuantizedPart),
        elements: usize,
        (checkpoint, name): (&Checkpoint, &str),
    ) -> Result<bool, DeviceError> {
        let Some(device) = device.quantizer() else { return Ok(false) };
        let dtype = self.precision();
        let Some(pieces) = checkpoint.pieces(name, dtype).map_err(source)? else {
            return Ok(false);
        };
        let Some(piece) = pieces.size(device.piece_bytes()) else { return Ok(false) };
        let nested = part.nested.map(|n| [n.absmax, n.offset]);
        let mut parts = [part.codes, part.absmax].into_iter().chain(nested.into_iter().flatten());
        if elements != pieces.elements()
            || elements == 0
            || parts.any(|id| self.program.tensor(id).home != Home::Device)
        {
            return Ok(false);
        }
        let at = |id: TensorId| self.layout.offset(id);
        let what = Quantize {
            codebook,
            dtype,
            elements,
            piece,
            codes: at(part.codes),
            kept: self.program.tensor(part.codes).held(self.rank),
            absmax: at(part.absmax),
            nested: part
                .nested
                .map(|n| QuantizeNested { absmax: at(n.absmax), offset: at(n.offset) }),
        };
        let finite = device
            .quantize(&what, &mut |first, bytes| pieces.read(first, bytes).map_err(source))?;
        if finite { Ok(true) } else { Err(source(pieces.not_finite())) }
    }

    /// Type of the weights that are not in four bits.
    fn precision(&self) -> DType {
        self.by_name.get("norm").map_or(DType::F32, |id| self.program.tensor(*id).dtype)
    }
}

fn source(error: ModelError) -> DeviceError {
    DeviceError::Source(Box::new(error))
}

/// Fills every weight of a program from a checkpoint.
///
/// A matrix that the program has in four bits is taken as it is from a checkpoint in
/// the same format, and quantized from any other, rounded to the type of the other
/// weights before: the device does it ([`Device::quantizer`]), else the CPU, with the
/// same bits.
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
    let places = Places::new(device, program, layout);
    let precision = places.precision();
    for part in weight_parts(arch) {
        match places.of(&part) {
            Stored::Dense(place) => {
                let master = places.master(&part);
                read_dense(device, &place, master.as_ref(), checkpoint, &part.source)?;
            }
            Stored::Quantized(codebook, quantized) => {
                let elements = part.shape.iter().product();
                let what = (codebook, &quantized);
                if places.quantize_there(device, what, elements, (checkpoint, &part.source))? {
                    continue;
                }
                places.upload_4bit(device, what, elements, &mut |format, out| {
                    checkpoint.read_4bit(&part.source, format, precision, out)
                })?;
            }
        }
    }
    Ok(())
}

fn read_dense(
    device: &mut dyn Device,
    place: &Place,
    master: Option<&Place>,
    checkpoint: &Checkpoint,
    name: &str,
) -> Result<(), DeviceError> {
    if let Some(master) = master {
        if checkpoint.dtype(name) != Some("BF16") {
            return read_master(device, place, master, checkpoint, name);
        }
        // A bf16 weight is its own master, whatever was here before.
        device.upload_pieces(master.home, master.offset, master.len, &mut |_, bytes| {
            bytes.fill(0);
            Ok(())
        })?;
    }
    checkpoint.expect_elements(name, place.total).map_err(source)?;
    let bytes = place.dtype.bytes();
    device.upload_pieces(place.home, place.offset, place.len, &mut |at, out| {
        let first = place.elements.start + at / bytes;
        match place.dtype {
            DType::Bf16 => checkpoint.read_bf16_from(name, first, bytemuck::cast_slice_mut(out)),
            _ => checkpoint.read_f32_from(name, first, bytemuck::cast_slice_mut(out)),
        }
        .map_err(source)
    })
}

/// A weight and the lower half of its master, together what the checkpoint has.
fn read_master(
    device: &mut dyn Device,
    place: &Place,
    master: &Place,
    checkpoint: &Checkpoint,
    name: &str,
) -> Result<(), DeviceError> {
    checkpoint.expect_elements(name, place.total).map_err(source)?;
    let held = [place, master].into_iter().filter(|p| p.len > 0);
    let first = held.clone().map(|p| p.elements.start).min().unwrap_or(0);
    let end = held.map(|p| p.elements.end).max().unwrap_or(0);
    let mut values = vec![0.0f32; (end - first).min(UPLOAD_PIECE / 2)];
    for first in (first..end).step_by(UPLOAD_PIECE / 2) {
        let n = (end - first).min(values.len());
        let values = &mut values[..n];
        checkpoint.read_f32_from(name, first, values).map_err(source)?;
        put_halves(device, place, (first, values), |x| split_master(x).0)?;
        put_halves(device, master, (first, values), |x| split_master(x).1)?;
    }
    Ok(())
}

/// Puts two bytes that follow from each of the numbers, which are a tensor's from
/// `first` on, where that place has them.
fn put_halves<T: bytemuck::Pod>(
    device: &mut dyn Device,
    place: &Place,
    (first, values): (usize, &[f32]),
    half: impl Fn(f32) -> T,
) -> Result<(), DeviceError> {
    let here = inside(place.elements.clone(), first, values.len());
    if here.is_empty() {
        return Ok(());
    }
    let skipped = (first + here.start - place.elements.start) * size_of::<T>();
    let (offset, values) = (place.offset + skipped as u64, &values[here]);
    device.upload(place.home, offset, size_of_val(values) / 2, &mut |out| {
        let out = bytemuck::cast_slice_mut::<u8, T>(out);
        out.iter_mut().zip(values).for_each(|(out, x)| *out = half(*x));
        Ok(())
    })
}

/// `initializer_range` of the Llama family.
const DEVIATION: f32 = 0.02;

/// Fills every weight with random values: normal with a deviation of 0.02, norms with one,
/// biases with zero.
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
    let places = Places::new(device, program, layout);
    for (stream, part) in weight_parts(arch).iter().enumerate() {
        let constant = match part.shape.len() {
            1 if part.source.ends_with("bias") => Some(0.0),
            1 => Some(1.0),
            _ => None,
        };
        let values = |first: usize, out: &mut [f32]| match constant {
            Some(x) => out.fill(x),
            None => {
                normals(seed, stream as u64, first, out);
                out.iter_mut().for_each(|x| *x *= DEVIATION);
            }
        };
        match places.of(part) {
            Stored::Dense(place) => fill_dense(device, &place, values)?,
            Stored::Quantized(codebook, quantized) => {
                let elements = part.shape.iter().product();
                let what = (codebook, &quantized);
                places.upload_4bit(device, what, elements, &mut |format, out| {
                    match places.precision() {
                        DType::Bf16 => quantize_values(format, elements, out, |first, out| {
                            values(first, out);
                            out.iter_mut().for_each(|x| *x = Weight::to_f32(bf16::of(*x)));
                        }),
                        _ => quantize_values(format, elements, out, values),
                    }
                    Ok(())
                })?;
            }
        }
    }
    Ok(())
}

fn fill_dense(
    device: &mut dyn Device,
    place: &Place,
    values: impl Fn(usize, &mut [f32]) + Sync,
) -> Result<(), DeviceError> {
    let bytes = place.dtype.bytes();
    device.upload_pieces(place.home, place.offset, place.len, &mut |at, out| {
        let first = place.elements.start + at / bytes;
        match place.dtype {
            DType::Bf16 => fill(bytemuck::cast_slice_mut::<u8, bf16>(out), first, &values),
            _ => fill(bytemuck::cast_slice_mut::<u8, f32>(out), first, &values),
        }
        Ok(())
    })
}

/// Fills elements from `first` of their tensor on, on all cores.
fn fill<T: Weight + Send>(
    out: &mut [T],
    first: usize,
    values: &(impl Fn(usize, &mut [f32]) + Sync),
) {
    // What a thread is worth starting for.
    const LEAST: usize = 64 << 10;
    let share = out.len().div_ceil(threads()).next_multiple_of(TILE).max(LEAST);
    let work = |first: usize, out: &mut [T]| {
        let mut tile = [0.0; TILE];
        for (n, out) in out.chunks_mut(TILE).enumerate() {
            let tile = &mut tile[..out.len()];
            values(first + n * TILE, tile);
            out.iter_mut().zip(tile).for_each(|(to, x)| *to = T::of(*x));
        }
    };
    if out.len() <= share {
        return work(first, out);
    }
    std::thread::scope(|scope| {
        for (n, out) in out.chunks_mut(share).enumerate() {
            scope.spawn(move || work(first + n * share, out));
        }
    });
}

/// Quantizes `elements` values, which are finite, on all cores.
fn quantize_values(
    format: Format4bit,
    elements: usize,
    out: Packed4bit,
    values: impl Fn(usize, &mut [f32]) + Sync,
) {
    /// Elements whose values exist at a time, on each core.
    const PIECE: usize = 1 << 16;
    let codebook = format.codebook;
    let quantize = |codes: &mut [u8], absmax: &mut [f32]| {
        let share = (elements.div_ceil(threads())).next_multiple_of(PIECE);
        std::thread::scope(|scope| {
            let shares = codes.chunks_mut(share / 2).zip(absmax.chunks_mut(share / BLOCK));
            for (n, (codes, absmax)) in shares.enumerate() {
                let values = &values;
                scope.spawn(move || {
                    let mut x = vec![0.0; PIECE.min(elements)];
                    let pieces = codes.chunks_mut(PIECE / 2).zip(absmax.chunks_mut(PIECE / BLOCK));
                    for (m, (codes, absmax)) in pieces.enumerate() {
                        let first = n * share + m * PIECE;
                        let x = &mut x[..PIECE.min(elements - first)];
                        values(first, x);
                        quantize_4bit(codebook, x, codes, absmax).expect("values are finite");
                    }
                });
            }
        });
    };
    match out.scales {
        Scales::Plain(absmax) => quantize(out.codes, absmax),
        Scales::Nested { codes, absmax, offset } => {
            let mut plain = vec![0.0; codes.len()];
            quantize(out.codes, &mut plain);
            *offset = quantize_absmax(&mut plain, codes, absmax);
        }
    }
}

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Fills every adapter and every module that is trained in full beside them.
///
/// # Errors
/// As [`load_weights`].
pub fn load_adapter(
    device: &mut dyn Device,
    program: &Program,
    layout: &Layout,
    arch: &Architecture,
    adapter: &Adapter,
) -> Result<(), DeviceError> {
    let places = Places::new(device, program, layout);
    for part in adapter.lora().parts(arch) {
        if let Stored::Dense(place) = places.of(&part) {
            let master = places.master(&part);
            read_dense(device, &place, master.as_ref(), adapter.tensors(), &part.source)?;
        }
    }
    Ok(())
}

/// New adapters as PEFT 0.21 starts them: A uniform within 1 / sqrt(K) (Kaiming with
/// a = sqrt 5), B zero. Modules that are trained in full start at the base's weights,
/// which must be there already.
///
/// # Errors
/// The device's own.
pub fn init_adapter(
    device: &mut dyn Device,
    program: &Program,
    layout: &Layout,
    arch: &Architecture,
    lora: &Lora,
    seed: u64,
) -> Result<(), DeviceError> {
    let places = Places::new(device, program, layout);
    for (stream, part) in lora.parts(arch).iter().enumerate() {
        let Stored::Dense(place) = places.of(part) else { continue };
        if part.tensor.ends_with(".lora_b") {
            fill_dense(device, &place, |_, out| out.fill(0.0))?;
        } else if part.tensor.ends_with(".lora_a") {
            let bound = 1.0 / (part.shape[1] as f32).sqrt();
            fill_dense(device, &place, |first, out| {
                uniforms(seed ^ ADAPTER_STREAMS, stream as u64, first, out);
                out.iter_mut().for_each(|x| *x *= bound);
            })?;
        }
    }
    Ok(())
}

/// Adapters of a seed have other random numbers than the weights of that seed.
const ADAPTER_STREAMS: u64 = 0x6c6f_7261_0000_0000;

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
    device.upload(Home::Device, layout.offset(id), bytes, &mut |bytes| {
        arch.fill_rope_table(bytemuck::cast_slice_mut(bytes));
        Ok(())
    })
}

/// Hands tensors of the slab to `write`, in the order of `parts` ([`weight_parts`] or
/// [`Lora::parts`]): name, type, the elements that this rank answers for, their bytes.
/// A rank alone answers for all; of several, each for its own and none for another's.
///
/// # Errors
/// The device's own, or what `write` reports.
///
/// # Panics
/// A part is in four bits.
pub fn save_parts(
    device: &mut dyn Device,
    program: &Program,
    layout: &Layout,
    parts: &[WeightPart],
    mut write: impl FnMut(&str, DType, Range<usize>, &[u8]) -> Result<(), ModelError>,
) -> Result<(), DeviceError> {
    let places = Places::new(device, program, layout);
    for part in parts {
        let Stored::Dense(place) = places.of(part) else {
            panic!("`{}` is in four bits", part.source)
        };
        let skipped = place.own.start.saturating_sub(place.elements.start) as u64;
        let (bytes, own) = (place.dtype.bytes(), place.own.clone());
        let offset = place.offset + skipped * bytes as u64;
        if own.is_empty() {
            continue;
        }
        device.download(place.home, offset, own.len() * bytes, &mut |bytes| {
            write(&part.source, place.dtype, own.clone(), bytes).map_err(source)
        })?;
    }
    Ok(())
}

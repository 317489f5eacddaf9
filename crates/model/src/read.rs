//! Tensors of a checkpoint as numbers, or as 4-bit codes.

use std::ops::Range;
use std::sync::Mutex;

use half::bf16;
use plimsoll_arch::DType;
use plimsoll_quant::{
    BLOCK, Element, Format4bit, NESTED_BLOCK, dequantize_4bit, dequantize_absmax, quantize_4bit,
    quantize_absmax,
};

use crate::checkpoint::{Checkpoint, Stored, unsupported};
use crate::finite::{self, Weight};
use crate::format::decode;
use crate::packed::{Packed, Part};
use crate::{ModelError, first_non_finite};

/// Bytes of a file that are resident at a time while a tensor is read.
const CHUNK: usize = 2 << 20;

/// Elements that a thread reads or quantizes at a time.
const PIECE: usize = 256 << 10;

/// Elements in four bits under one scale of scales.
const SPAN: usize = BLOCK * NESTED_BLOCK;

/// Where a 4-bit tensor of n elements goes.
pub struct Packed4bit<'a> {
    /// Two elements a byte: `packed_bytes(n)`.
    pub codes: &'a mut [u8],
    pub scales: Scales<'a>,
}

/// Scales of a 4-bit tensor, one for each block of 64 elements.
pub enum Scales<'a> {
    /// `blocks(n)` of them.
    Plain(&'a mut [f32]),
    /// Under double quantization: their codes (`blocks(n)`), scales
    /// (`nested_blocks(n)`), and what is added to all.
    Nested { codes: &'a mut [u8], absmax: &'a mut [f32], offset: &'a mut f32 },
}

impl Checkpoint {
    /// Reads a whole tensor as float32, rows first; one in four bits is
    /// dequantized.
    ///
    /// # Errors
    /// No such tensor, a type that cannot be read, a destination of another
    /// length, or a NaN or infinity (the destination's content is then
    /// unspecified).
    pub fn read_f32(&self, name: &str, out: &mut [f32]) -> Result<(), ModelError> {
        self.read(name, out)
    }

    /// As [`Checkpoint::read_f32`], rounded to bf16 (to nearest, ties to
    /// even); a tensor stored as bf16 is copied.
    ///
    /// # Errors
    /// As [`Checkpoint::read_f32`].
    pub fn read_bf16(&self, name: &str, out: &mut [bf16]) -> Result<(), ModelError> {
        self.read(name, out)
    }

    /// Reads a whole tensor in four bits. One that is stored so is copied, its
    /// scales converted where only they differ; any other is quantized piece by
    /// piece on all cores, after rounding to `precision` (f32 or bf16), and never exists
    /// as a whole in another form.
    ///
    /// # Errors
    /// As [`Checkpoint::read_f32`]; or the tensor is in four bits of another kind.
    pub fn read_4bit(
        &self,
        name: &str,
        format: Format4bit,
        precision: DType,
        out: Packed4bit,
    ) -> Result<(), ModelError> {
        let tensor = self.tensor(name)?;
        let elements = elements(tensor);
        let (blocks, nested) =
            (plimsoll_quant::blocks(elements), plimsoll_quant::nested_blocks(elements));
        let fits = match &out.scales {
            Scales::Plain(absmax) => !format.double && absmax.len() == blocks,
            Scales::Nested { codes, absmax, .. } => {
                format.double && codes.len() == blocks && absmax.len() == nested
            }
        };
        if !fits || out.codes.len() != plimsoll_quant::packed_bytes(elements) {
            let (tensor, given) = (name.to_string(), 2 * out.codes.len());
            return Err(ModelError::WrongLength { tensor, elements, given });
        }
        if let Some(packed) = &tensor.packed {
            if packed.format.codebook != format.codebook {
                let reason = format!("it is in {}, not in {format}", packed.format);
                return Err(self.packed_error(tensor, reason));
            }
            let codes = Part { file: tensor.file, range: tensor.range.clone() };
            self.copy(&codes, out.codes);
            return self.read_scales(tensor, packed, out.scales);
        }
        let mut quantize = |absmax: &mut [f32]| match precision {
            DType::Bf16 => self.quantize::<bf16>(tensor, format, out.codes, absmax),
            _ => self.quantize::<f32>(tensor, format, out.codes, absmax),
        };
        match out.scales {
            Scales::Plain(absmax) => quantize(absmax),
            Scales::Nested { codes, absmax, offset } => {
                let mut plain = vec![0.0; blocks];
                quantize(&mut plain)?;
                *offset = quantize_absmax(&mut plain, codes, absmax);
                Ok(())
            }
        }
    }

    /// A tensor for a device that quantizes it by itself, rounded to `dtype` (f32 or
    /// bf16) before; none for one that is stored in four bits.
    ///
    /// # Errors
    /// No such tensor, or a type that cannot be read.
    pub fn pieces(&self, name: &str, dtype: DType) -> Result<Option<Pieces<'_>>, ModelError> {
        let tensor = self.tensor(name)?;
        Ok(tensor.packed.is_none().then_some(Pieces { checkpoint: self, tensor, dtype }))
    }

    fn tensor(&self, name: &str) -> Result<&Stored, ModelError> {
        self.find(name).ok_or_else(|| {
            let (path, tensor) = (self.path.clone(), name.to_string());
            ModelError::NoSuchTensor { path, tensor }
        })
    }

    /// Reads a part of a tensor as [`Checkpoint::read_f32`] reads all of it: elements from
    /// `first` on, as many as `out` holds, on all cores.
    ///
    /// # Errors
    /// As [`Checkpoint::read_f32`]; the tensor ends before.
    pub fn read_f32_from(
        &self,
        name: &str,
        first: usize,
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        self.read_from(name, first, out)
    }

    /// As [`Checkpoint::read_f32_from`], rounded to bf16.
    ///
    /// # Errors
    /// As [`Checkpoint::read_f32_from`].
    pub fn read_bf16_from(
        &self,
        name: &str,
        first: usize,
        out: &mut [bf16],
    ) -> Result<(), ModelError> {
        self.read_from(name, first, out)
    }

    /// That a tensor has so many elements.
    ///
    /// # Errors
    /// No such tensor, or another number.
    pub fn expect_elements(&self, name: &str, expected: usize) -> Result<(), ModelError> {
        let elements = elements(self.tensor(name)?);
        if elements == expected {
            return Ok(());
        }
        Err(ModelError::WrongLength { tensor: name.to_string(), elements, given: expected })
    }

    fn read<T: Weight + Element + Send>(
        &self,
        name: &str,
        out: &mut [T],
    ) -> Result<(), ModelError> {
        self.expect_elements(name, out.len())?;
        self.read_from(name, 0, out)
    }

    fn read_from<T: Weight + Element + Send>(
        &self,
        name: &str,
        first: usize,
        out: &mut [T],
    ) -> Result<(), ModelError> {
        let tensor = self.tensor(name)?;
        let (all, end) = (elements(tensor), first + out.len());
        if end > all {
            let tensor = name.to_string();
            return Err(ModelError::WrongLength { tensor, elements: all, given: end });
        }
        // Only whole units can be read: where the part begins or ends inside of one,
        // what is around it is read as well.
        let unit = unit(tensor).max(1);
        let start = first / unit * unit;
        let stop = end.next_multiple_of(unit).min(all);
        if (start, stop) == (first, end) {
            return self.read_units(tensor, first, out, true);
        }
        let mut around = vec![T::of(0.0); stop - start];
        self.read_units(tensor, start, &mut around, true)?;
        out.copy_from_slice(&around[first - start..][..out.len()]);
        Ok(())
    }

    /// Reads whole [`unit`]s, or to the end of the tensor, on all cores. NaN and infinity in
    /// what is not in four bits are an error only if `checked`.
    fn read_units<T: Weight + Element + Send>(
        &self,
        tensor: &Stored,
        first: usize,
        out: &mut [T],
        checked: bool,
    ) -> Result<(), ModelError> {
        let piece = whole_units(tensor, PIECE);
        on_all_cores(
            out.chunks_mut(piece),
            || (),
            |(), i, out| {
                let first = first + i * piece;
                match &tensor.packed {
                    Some(packed) => self.dequantize(tensor, packed, first, out),
                    None => self.decode_checked(tensor, first, out, checked),
                }
            },
        )
    }

    /// Reads elements from `start` on, a multiple of [`unit`], as many as `out`
    /// holds: whole units, or to the end of the tensor.
    fn decode<T: Weight>(
        &self,
        tensor: &Stored,
        start: usize,
        out: &mut [T],
    ) -> Result<(), ModelError> {
        self.decode_checked(tensor, start, out, true)
    }

    /// As [`Checkpoint::decode`]; NaN and infinity are an error only if `checked`.
    fn decode_checked<T: Weight>(
        &self,
        tensor: &Stored,
        start: usize,
        out: &mut [T],
        checked: bool,
    ) -> Result<(), ModelError> {
        let file = &self.files[tensor.file];
        let format = tensor.format;
        let codec = format.codec.ok_or_else(|| unsupported(&file.path, &tensor.name, format))?;
        if out.is_empty() {
            return Ok(());
        }
        // Whole blocks, and whole heads where rows change places in a head.
        let columns = elements(tensor) / tensor.shape.first().unwrap_or(&1);
        let piece = match tensor.paired {
            Some(head_dim) => head_dim * columns,
            None => (CHUNK / format.bytes * format.block).min(out.len()),
        };
        for (i, out) in out.chunks_mut(piece).enumerate() {
            let first = start + i * piece;
            let from = tensor.range.start + first / format.block * format.bytes;
            let range = from..from + out.len() / format.block * format.bytes;
            file.fetch(range.clone());
            let bytes = &file.bytes()[range.clone()];
            match tensor.paired {
                None => decode(codec, bytes, out),
                Some(head_dim) => {
                    let rows = bytes.chunks_exact(columns / format.block * format.bytes);
                    for (r, row) in rows.enumerate() {
                        let place = r % 2 * (head_dim / 2) + r / 2;
                        decode(codec, row, &mut out[place * columns..][..columns]);
                    }
                }
            }
            file.release(range);
            if checked && let Some(j) = finite::first(out) {
                return Err(ModelError::NonFinite {
                    path: file.path.clone(),
                    tensor: tensor.name.clone(),
                    index: first + j,
                    value: Weight::to_f32(out[j]),
                });
            }
        }
        Ok(())
    }

    /// Quantizes a tensor that is stored in another type, on all cores.
    fn quantize<T: Weight + Element + Send>(
        &self,
        tensor: &Stored,
        format: Format4bit,
        codes: &mut [u8],
        absmax: &mut [f32],
    ) -> Result<(), ModelError> {
        let elements = elements(tensor);
        if elements == 0 {
            return Ok(());
        }
        let piece = whole_units(tensor, PIECE).min(elements.next_multiple_of(BLOCK));
        let pieces = codes.chunks_mut(piece / 2).zip(absmax.chunks_mut(piece / BLOCK));
        let buffer = || vec![T::of(0.0); piece.min(elements)];
        on_all_cores(pieces, buffer, |values, i, (codes, absmax)| {
            let first = i * piece;
            let values = &mut values[..piece.min(elements - first)];
            self.decode(tensor, first, values)?;
            quantize_4bit(format.codebook, values, codes, absmax)
                .map_err(|e| self.packed_error(tensor, e.to_string()))
        })
    }

    /// Elements from `start` on, a multiple of [`SPAN`].
    fn dequantize<T: Weight + Element>(
        &self,
        tensor: &Stored,
        packed: &Packed,
        start: usize,
        out: &mut [T],
    ) -> Result<(), ModelError> {
        let piece = CHUNK.min(out.len().next_multiple_of(SPAN));
        let mut absmax = vec![0.0f32; plimsoll_quant::blocks(piece)];
        for (i, out) in out.chunks_mut(piece).enumerate() {
            let first = start + i * piece;
            let absmax = &mut absmax[..plimsoll_quant::blocks(out.len())];
            self.scales(tensor, packed, first / BLOCK, absmax)?;
            let from = tensor.range.start + first / 2;
            let range = from..from + plimsoll_quant::packed_bytes(out.len());
            let file = &self.files[tensor.file];
            file.fetch(range.clone());
            dequantize_4bit(packed.format.codebook, &file.bytes()[range.clone()], absmax, out);
            file.release(range);
        }
        Ok(())
    }

    fn read_scales(&self, tensor: &Stored, packed: &Packed, out: Scales) -> Result<(), ModelError> {
        match (out, &packed.nested) {
            (Scales::Plain(absmax), _) => self.scales(tensor, packed, 0, absmax),
            (Scales::Nested { codes, absmax, offset }, Some(nested)) => {
                self.copy(&packed.absmax, codes);
                self.floats(tensor, &nested.absmax, 0, absmax)?;
                *offset = nested.offset;
                Ok(())
            }
            (Scales::Nested { codes, absmax, offset }, None) => {
                let mut plain = vec![0.0; codes.len()];
                self.scales(tensor, packed, 0, &mut plain)?;
                *offset = quantize_absmax(&mut plain, codes, absmax);
                Ok(())
            }
        }
    }

    /// Scales in float32 from `first` on, a multiple of [`NESTED_BLOCK`].
    fn scales(
        &self,
        tensor: &Stored,
        packed: &Packed,
        first: usize,
        absmax: &mut [f32],
    ) -> Result<(), ModelError> {
        let Some(nested) = &packed.nested else {
            return self.floats(tensor, &packed.absmax, first, absmax);
        };
        let mut scales = vec![0.0; absmax.len().div_ceil(NESTED_BLOCK)];
        self.floats(tensor, &nested.absmax, first / NESTED_BLOCK, &mut scales)?;
        let codes = &self.bytes(&packed.absmax)[first..first + absmax.len()];
        dequantize_absmax(codes, &scales, nested.offset, &nested.map, absmax);
        Ok(())
    }

    /// Float32 scales from element `first` on: finite, and not below zero.
    fn floats(
        &self,
        tensor: &Stored,
        part: &Part,
        first: usize,
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        let words = self.bytes(part).as_chunks::<4>().0;
        for (out, word) in out.iter_mut().zip(&words[first..]) {
            *out = f32::from_le_bytes(*word);
        }
        let bad = first_non_finite(out).or_else(|| out.iter().position(|x| *x < 0.0));
        match bad {
            None => Ok(()),
            Some(i) => {
                let reason = format!("scale {} of a block is {}", first + i, out[i]);
                Err(self.packed_error(tensor, reason))
            }
        }
    }

    fn bytes(&self, part: &Part) -> &[u8] {
        &self.files[part.file].bytes()[part.range.clone()]
    }

    /// Copies the bytes of a part, a few MiB resident at a time.
    fn copy(&self, part: &Part, out: &mut [u8]) {
        let file = &self.files[part.file];
        for (i, out) in out.chunks_mut(CHUNK).enumerate() {
            let from = part.range.start + i * CHUNK;
            let range: Range<usize> = from..from + out.len();
            file.fetch(range.clone());
            out.copy_from_slice(&file.bytes()[range.clone()]);
            file.release(range);
        }
    }

    fn packed_error(&self, tensor: &Stored, reason: String) -> ModelError {
        let path = self.files[tensor.file].path.clone();
        ModelError::Packed { path, tensor: tensor.name.clone(), reason }
    }
}

/// A tensor that is read piece by piece; see [`Checkpoint::pieces`].
pub struct Pieces<'a> {
    checkpoint: &'a Checkpoint,
    tensor: &'a Stored,
    dtype: DType,
}

impl Pieces<'_> {
    pub fn elements(&self) -> usize {
        elements(self.tensor)
    }

    /// Elements of the largest piece that `bytes` hold: whole blocks of four-bit codes
    /// and of the stored type. None where not one of them fits.
    pub fn size(&self, bytes: usize) -> Option<usize> {
        let most = bytes / self.dtype.bytes();
        Some(whole_units(self.tensor, most)).filter(|size| *size <= most)
    }

    /// Reads elements from `first` on, a multiple of a [`Pieces::size`], as many as
    /// `out` holds, on all cores. NaN and infinity are left for the one who quantizes
    /// to find.
    ///
    /// # Errors
    /// A type that cannot be read.
    pub fn read(&self, first: usize, out: &mut [u8]) -> Result<(), ModelError> {
        let (checkpoint, tensor) = (self.checkpoint, self.tensor);
        match self.dtype {
            DType::Bf16 => {
                let out = bytemuck::cast_slice_mut::<u8, bf16>(out);
                checkpoint.read_units(tensor, first, out, false)
            }
            _ => {
                let out = bytemuck::cast_slice_mut::<u8, f32>(out);
                checkpoint.read_units(tensor, first, out, false)
            }
        }
    }

    /// The error of the tensor's first number that is not finite, which there is.
    pub fn not_finite(&self) -> ModelError {
        let found = match self.dtype {
            DType::Bf16 => self.find::<bf16>(),
            _ => self.find::<f32>(),
        };
        found.err().unwrap_or_else(|| {
            let reason = "the device found a number in it that is not finite, and the file has \
                          none: the device or its memory is damaged";
            self.checkpoint.packed_error(self.tensor, reason.into())
        })
    }

    fn find<T: Weight>(&self) -> Result<(), ModelError> {
        let (piece, elements) = (whole_units(self.tensor, PIECE), self.elements());
        let mut values = vec![T::of(0.0); piece.min(elements)];
        for first in (0..elements).step_by(piece) {
            let values = &mut values[..piece.min(elements - first)];
            self.checkpoint.decode(self.tensor, first, values)?;
        }
        Ok(())
    }
}

/// Works pieces off on all cores, each with a state of its own. Of several errors the
/// first piece's is told.
fn on_all_cores<P: Send, S>(
    pieces: impl ExactSizeIterator<Item = P> + Send,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize, P) -> Result<(), ModelError> + Sync,
) -> Result<(), ModelError> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(pieces.len());
    let pieces = Mutex::new(pieces.enumerate());
    let failed: Mutex<Option<(usize, ModelError)>> = Mutex::new(None);
    let share = || {
        let mut state = state();
        loop {
            let next = pieces.lock().map(|mut p| p.next()).unwrap_or_default();
            let Some((i, piece)) = next else { return };
            let Err(error) = work(&mut state, i, piece) else { continue };
            if let Ok(mut failed) = failed.lock()
                && failed.as_ref().is_none_or(|(at, _)| *at > i)
            {
                *failed = Some((i, error));
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(share);
        }
        share();
    });
    match failed.into_inner() {
        Ok(Some((_, error))) => Err(error),
        _ => Ok(()),
    }
}

/// Elements, about as many as asked for: whole blocks of four-bit codes, and whole
/// [`unit`]s.
fn whole_units(tensor: &Stored, about: usize) -> usize {
    let unit = unit(tensor).max(1);
    let unit = if unit.is_multiple_of(BLOCK) { unit } else { unit.saturating_mul(BLOCK) };
    (about / unit).max(1).saturating_mul(unit)
}

/// Elements of a tensor; checked against its bytes when the file was opened.
fn elements(tensor: &Stored) -> usize {
    tensor.shape.iter().product()
}

/// Elements that are stored together.
fn unit(tensor: &Stored) -> usize {
    match tensor.paired {
        _ if tensor.packed.is_some() => SPAN,
        Some(head_dim) => head_dim * (elements(tensor) / tensor.shape[0].max(1)),
        None => tensor.format.block,
    }
}

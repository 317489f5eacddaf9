//! Four bits for a file, made by a device: a tensor at a time in its slab.

use plimsoll_arch::{Architecture, DType};
use plimsoll_plan::{Device, DeviceError, Quantize, QuantizeNested};
use plimsoll_program::Home;
use plimsoll_quant::{Format4bit, blocks, nested_blocks, packed_bytes};

use crate::quantize::quantizes;
use crate::{Checkpoint, ModelError, Packed4bit, Scales, expected_tensors};

/// Between the parts of a tensor.
const ALIGNMENT: u64 = 256;

/// Where the parts of one tensor lie in a slab.
struct Parts {
    codes: u64,
    absmax: u64,
    nested: Option<QuantizeNested>,
    end: u64,
}

impl Parts {
    fn of(format: Format4bit, elements: usize) -> Parts {
        let mut end = 0;
        let mut place = |bytes: usize| {
            let at = end;
            end += (bytes as u64).next_multiple_of(ALIGNMENT);
            at
        };
        let codes = place(packed_bytes(elements));
        let absmax = place(blocks(elements) * if format.double { 1 } else { 4 });
        let nested = format.double.then(|| QuantizeNested {
            absmax: place(4 * nested_blocks(elements)),
            offset: place(4),
        });
        Parts { codes, absmax, nested, end }
    }
}

/// Bytes of a slab in which every tensor that [`crate::quantize_model`] puts in four
/// bits has room, one at a time.
pub fn quantizing_bytes(arch: &Architecture, format: Format4bit, head: bool) -> u64 {
    let tensors = expected_tensors(arch);
    let quantized = tensors.iter().filter(|(name, _)| quantizes(name, head));
    let bytes = quantized.map(|(_, shape)| Parts::of(format, shape.iter().product()).end);
    bytes.max().unwrap_or(0)
}

/// As [`Checkpoint::read_4bit`], quantized by the device, if it does that, in its slab
/// of [`quantizing_bytes`].
pub(crate) fn read_4bit_on(
    device: &mut dyn Device,
    checkpoint: &Checkpoint,
    name: &str,
    format: Format4bit,
    precision: DType,
    out: Packed4bit,
) -> Result<(), ModelError> {
    let pieces = checkpoint.pieces(name, precision)?;
    let piece = device.quantizer().zip(pieces.as_ref()).and_then(|(d, p)| p.size(d.piece_bytes()));
    let (Some(pieces), Some(piece)) = (pieces, piece) else {
        return checkpoint.read_4bit(name, format, precision, out);
    };
    let elements = pieces.elements();
    if elements == 0 {
        return checkpoint.read_4bit(name, format, precision, out);
    }
    let parts = Parts::of(format, elements);
    let what = Quantize {
        codebook: format.codebook,
        dtype: precision,
        elements,
        piece,
        codes: parts.codes,
        kept: 0..packed_bytes(elements),
        absmax: parts.absmax,
        nested: parts.nested,
    };
    let mut fill = |first: usize, bytes: &mut [u8]| {
        pieces.read(first, bytes).map_err(|e| DeviceError::Source(Box::new(e)))
    };
    let quantizer = device.quantizer().expect("it was there");
    if !quantizer.quantize(&what, &mut fill).map_err(unwrapped)? {
        return Err(pieces.not_finite());
    }
    let mut read = |at: u64, to: &mut [u8]| {
        let len = to.len();
        let copy = &mut |bytes: &[u8]| {
            to.copy_from_slice(bytes);
            Ok(())
        };
        device.download(Home::Device, at, len, copy).map_err(unwrapped)
    };
    read(parts.codes, out.codes)?;
    match (out.scales, parts.nested) {
        (Scales::Nested { codes, absmax, offset }, Some(nested)) => {
            read(parts.absmax, codes)?;
            read(nested.absmax, bytemuck::cast_slice_mut(absmax))?;
            read(nested.offset, bytemuck::bytes_of_mut(offset))
        }
        (Scales::Plain(absmax), _) => read(parts.absmax, bytemuck::cast_slice_mut(absmax)),
        (Scales::Nested { .. }, None) => unreachable!("scales are of the format"),
    }
}

/// What reading a file said comes back as it was.
fn unwrapped(error: DeviceError) -> ModelError {
    match error {
        DeviceError::Source(source) => match source.downcast::<ModelError>() {
            Ok(error) => *error,
            Err(other) => ModelError::Device(DeviceError::Source(other)),
        },
        other => ModelError::Device(other),
    }
}

//! What a device may be able to do with numbers that are sent to it: put them in
//! four bits.

use std::ops::Range;

use plimsoll_arch::DType;
use plimsoll_program::Codebook;

use crate::DeviceError;

/// A tensor on its way into four bits, and where its parts go: offsets in the slab
/// of the device.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantize {
    pub codebook: Codebook,
    /// Type of the numbers, float32 or bf16, and how many they are: one at least.
    pub dtype: DType,
    pub elements: usize,
    /// Elements that are sent at a time, but for the last: whole blocks, of
    /// [`Quantizer::piece_bytes`] at most.
    pub piece: usize,
    /// (elements / 2) bytes, of which those in `kept` are written: the first of them
    /// to `codes`.
    pub codes: u64,
    pub kept: Range<usize>,
    /// (elements / 64) scales: float32, or codes of the signed map.
    pub absmax: u64,
    pub nested: Option<QuantizeNested>,
}

/// Where the scales of the scales go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantizeNested {
    /// (elements / 64 / 256) float32.
    pub absmax: u64,
    /// One float32.
    pub offset: u64,
}

/// What writes a piece of a tensor: given where it begins (its first element; of what goes
/// up as bytes, the bytes before it), and memory for it.
pub type FillPiece<'a> = dyn FnMut(usize, &mut [u8]) -> Result<(), DeviceError> + 'a;

/// A device that quantizes by itself, with the bits of `plimsoll_quant`.
pub trait Quantizer {
    /// Most bytes that are sent at a time.
    fn piece_bytes(&self) -> usize;

    /// Quantizes a tensor. `fill` is called for its pieces in order. Nothing is taken of
    /// the device beside the slab.
    ///
    /// Returns whether all numbers were finite; if not, what was written means
    /// nothing.
    ///
    /// # Errors
    /// The device's own; or whatever `fill` reports, passed through.
    fn quantize(&mut self, what: &Quantize, fill: &mut FillPiece) -> Result<bool, DeviceError>;
}

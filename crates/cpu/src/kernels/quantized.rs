//! Matrices in four bits, multiplied out.

use plimsoll_program::{NESTED_BLOCK, QUANT_BLOCK};

use super::Elem;
use super::parallel::{Shared, for_each};

/// One part of a matrix in four bits.
#[derive(Clone, Copy)]
pub struct QuantizedSlice<'a> {
    pub codebook: &'a [f32; 16],
    /// Element 2 i in the high half of byte i.
    pub codes: &'a [u8],
    pub scales: Scales<'a>,
}

/// A scale for every 64 elements.
#[derive(Clone, Copy)]
pub enum Scales<'a> {
    Plain(&'a [f32]),
    /// map[code] * absmax + offset, an absmax for every 256 codes.
    Nested {
        codes: &'a [u8],
        absmax: &'a [f32],
        offset: f32,
        map: &'a [f32; 256],
    },
}

impl Scales<'_> {
    #[inline(always)]
    fn of(&self, block: usize) -> f32 {
        match self {
            Scales::Plain(scales) => scales[block],
            Scales::Nested { codes, absmax, offset, map } => {
                map[codes[block] as usize] * absmax[block / NESTED_BLOCK] + offset
            }
        }
    }
}

/// Blocks of one task.
const PIECE: usize = 64;

/// out (n) = the elements of a part.
pub fn dequantize<E: Elem>(w: &QuantizedSlice, out: &mut [E]) {
    let n = out.len();
    assert_eq!(w.codes.len(), n.div_ceil(2), "codes");
    let blocks = n.div_ceil(QUANT_BLOCK);
    let out = Shared::new(out);
    for_each(blocks.div_ceil(PIECE), n > super::parallel::GRAIN, |piece| {
        for block in piece * PIECE..blocks.min((piece + 1) * PIECE) {
            let first = block * QUANT_BLOCK;
            let len = QUANT_BLOCK.min(n - first);
            let scale = w.scales.of(block);
            // SAFETY: one task a piece.
            let out = unsafe { out.slice(first, len) };
            let codes = &w.codes[first / 2..];
            for (pair, byte) in out.chunks_mut(2).zip(codes) {
                pair[0] = E::from_f32(w.codebook[(byte >> 4) as usize] * scale);
                if let Some(second) = pair.get_mut(1) {
                    *second = E::from_f32(w.codebook[(byte & 15) as usize] * scale);
                }
            }
        }
    });
}

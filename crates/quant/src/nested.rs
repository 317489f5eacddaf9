//! Double quantization: the scales of a tensor in eight bits, less their mean
//! (bitsandbytes 0.49 `quantize_4bit(compress_statistics=True)`).

use crate::DynamicMap;
use crate::format::NESTED_BLOCK;
use crate::mean::mean;

/// Replaces scales by codes of the signed dynamic map, and a scale for each
/// [`NESTED_BLOCK`] of them; returns the offset, the mean that was taken away.
/// `absmax` holds what is left of the scales after that.
///
/// # Panics
/// `codes` or `nested_absmax` has another length than the scales need.
pub fn quantize_absmax(absmax: &mut [f32], codes: &mut [u8], nested_absmax: &mut [f32]) -> f32 {
    assert_eq!(codes.len(), absmax.len(), "codes");
    assert_eq!(nested_absmax.len(), absmax.len().div_ceil(NESTED_BLOCK), "nested_absmax");
    let offset = mean(absmax);
    let map = DynamicMap::signed();
    let blocks = absmax.chunks_mut(NESTED_BLOCK).zip(codes.chunks_mut(NESTED_BLOCK));
    for ((absmax, codes), largest) in blocks.zip(nested_absmax) {
        absmax.iter_mut().for_each(|x| *x -= offset);
        *largest = absmax.iter().fold(0.0, |a, x| x.abs().max(a));
        let inverse = 1.0 / *largest;
        for (code, x) in codes.iter_mut().zip(absmax) {
            *code = map.nearest(*x * inverse);
        }
    }
    offset
}

/// The scales that [`quantize_absmax`] stored, through the 256 numbers of `map`:
/// those of [`DynamicMap::signed`], or what a file brings along. `absmax` may be
/// a piece that begins at a multiple of [`NESTED_BLOCK`].
///
/// # Panics
/// `codes` or `nested_absmax` has another length than the scales need.
pub fn dequantize_absmax(
    codes: &[u8],
    nested_absmax: &[f32],
    offset: f32,
    map: &[f32; 256],
    absmax: &mut [f32],
) {
    assert_eq!(codes.len(), absmax.len(), "codes");
    assert_eq!(nested_absmax.len(), absmax.len().div_ceil(NESTED_BLOCK), "nested_absmax");
    let blocks = absmax.chunks_mut(NESTED_BLOCK).zip(codes.chunks(NESTED_BLOCK));
    for ((absmax, codes), scale) in blocks.zip(nested_absmax) {
        for (x, code) in absmax.iter_mut().zip(codes) {
            *x = map[*code as usize] * scale + offset;
        }
    }
}

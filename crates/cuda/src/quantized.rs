//! Products with matrices in four bits.

use plimsoll_arch::DType;
use plimsoll_program::{Codebook, QuantizedMatrix, QuantizedPart};

use crate::error::CudaError;
use crate::kernels::{Grid, argument, suffix};
use crate::launch::Launcher;

/// Mirrors `Quantized` of quantized.cu: one part of a matrix.
#[repr(C)]
pub(crate) struct PartArgument {
    codes: u64,
    absmax: u64,
    /// Zero where the scales are float32.
    nested_absmax: u64,
    offset: u64,
    elements: i64,
    codebook: [f32; 16],
}

impl PartArgument {
    fn new(l: &Launcher, codebook: Codebook, part: &QuantizedPart, cols: usize) -> PartArgument {
        PartArgument {
            codes: l.at(part.codes),
            absmax: l.at(part.absmax),
            nested_absmax: part.nested.map_or(0, |n| l.at(n.absmax)),
            offset: part.nested.map_or(0, |n| l.at(n.offset)),
            elements: (part.rows * cols) as i64,
            codebook: *codebook.values(),
        }
    }
}

/// Elements of one block of threads.
const CHUNK: usize = 8192;

/// (N, K) at address `to` = every part of a matrix, multiplied out.
pub(crate) fn dequantize(
    l: &Launcher,
    w: &QuantizedMatrix,
    dtype: DType,
    mut to: u64,
) -> Result<(), CudaError> {
    let name = format!("dequantize_{}", suffix(dtype));
    for part in &w.parts {
        let table = PartArgument::new(l, w.codebook, part, w.cols);
        let elements = part.rows * w.cols;
        let mut pointers = [argument(&table), argument(&to)];
        let grid = Grid::line(elements.div_ceil(CHUNK), 256);
        l.kernels.launch_pointers(("quantized", &name), l.stream, grid, &mut pointers)?;
        to += (elements * dtype.bytes()) as u64;
    }
    Ok(())
}

//! Numbers into four bits on the GPU, as they come up.
//!
//! Kernels read the numbers where they were put, in page-locked memory of the host,
//! and write codes and scales to their places in the slab. Scales that are to be
//! quantized themselves wait in page-locked memory as well: the GPU holds what the
//! plan says and nothing else.

use plimsoll_plan::{DeviceError, FillPiece, Quantize, Quantizer, UPLOAD_PIECE};
use plimsoll_program::Home;
use plimsoll_quant::{
    BLOCK, DynamicMap, HIGH_RECIPROCALS, LOW_RECIPROCALS, MeanOrder, NESTED_BLOCK, blocks,
    nested_blocks, packed_bytes,
};

use crate::device::CudaDevice;
use crate::driver::Pinned;
use crate::error::CudaError;
use crate::kernels::{Arg, Grid, argument, suffix};

/// Mirrors `Quantizer` of quantize.cu.
#[repr(C)]
struct QuantizerArgument {
    codes: u64,
    absmax: u64,
    found: u64,
    elements: i64,
    begin: i64,
    end: i64,
    low: [u32; 4],
    high: [u32; 4],
    limits: [f32; 15],
}

/// Mirrors `MapLimits`.
#[repr(C)]
struct MapArgument([f32; 255]);

/// Elements of one block of 256 threads.
const CHUNK: usize = 2048;
/// Bytes before the scales, for what the kernels found.
const FOUND: usize = 256;

fn words(x: u128) -> [u32; 4] {
    [x as u32, (x >> 32) as u32, (x >> 64) as u32, (x >> 96) as u32]
}

impl Quantizer for CudaDevice {
    /// The other half of the buffer is read by the GPU meanwhile.
    fn piece_bytes(&self) -> usize {
        UPLOAD_PIECE
    }

    fn quantize(&mut self, what: &Quantize, fill: &mut FillPiece) -> Result<bool, DeviceError> {
        self.context.bind()?;
        let scales = blocks(what.elements);
        self.check_range(Home::Device, what.codes, what.kept.len())?;
        match what.nested {
            None => self.check_range(Home::Device, what.absmax, 4 * scales)?,
            Some(nested) => {
                self.check_range(Home::Device, what.absmax, scales)?;
                let bytes = 4 * nested_blocks(what.elements);
                self.check_range(Home::Device, nested.absmax, bytes)?;
                self.check_range(Home::Device, nested.offset, 4)?;
            }
        }
        // The scales, and the sums of the blocks that add them.
        let scratch = match what.nested {
            None => FOUND,
            Some(_) => FOUND + 4 * (scales.next_multiple_of(4) + MeanOrder::of(scales).blocks),
        };
        if self.scales.as_ref().is_none_or(|s| s.len() < scratch) {
            self.scales = None;
            self.scales = Some(Pinned::new(scratch)?);
        }
        let scratch = self.scales.as_mut().expect("made just now");
        scratch.slice(0, FOUND).fill(0);
        let scratch = scratch.address();
        let sent = self.send_pieces(what, scratch, fill);
        let sent = sent.and_then(|()| Ok(self.nest_scales(what, scratch)?));
        // Nothing reads or writes host memory any more when this returns.
        let waited = self.wait();
        self.staged = 0;
        sent?;
        waited?;
        let found = self.scales.as_mut().expect("it is there").slice(0, 1)[0];
        Ok(found == 0)
    }
}

impl CudaDevice {
    fn send_pieces(
        &mut self,
        what: &Quantize,
        scratch: u64,
        fill: &mut FillPiece,
    ) -> Result<(), DeviceError> {
        let bytes = what.dtype.bytes();
        assert!(
            what.piece > 0
                && what.piece.is_multiple_of(BLOCK)
                && what.piece * bytes <= self.piece_bytes(),
            "a piece of {} elements",
            what.piece
        );
        let name = format!("quantize_{}_{}", what.codebook.name(), suffix(what.dtype));
        let limits = what.codebook.limits();
        let absmax = match what.nested {
            None => self.slab.address + what.absmax,
            Some(_) => scratch + FOUND as u64,
        };
        let mut table = QuantizerArgument {
            codes: 0,
            absmax: 0,
            found: scratch,
            elements: 0,
            begin: 0,
            end: 0,
            low: words(LOW_RECIPROCALS),
            high: words(HIGH_RECIPROCALS),
            limits: std::array::from_fn(|i| limits.get(i).copied().unwrap_or(0.0)),
        };
        for first in (0..what.elements).step_by(what.piece) {
            let elements = what.piece.min(what.elements - first);
            let at = self.stage(elements * bytes)?;
            let piece = self.staging.slice(at, elements * bytes);
            fill(first, piece)?;
            let from = piece.as_ptr() as u64;
            // Codes of the piece that are kept, and where its first would be.
            let byte = first / 2;
            let kept = |at: usize| at.clamp(byte, byte + packed_bytes(elements)) - byte;
            let codes =
                (self.slab.address + what.codes + byte as u64).wrapping_sub(what.kept.start as u64);
            table = QuantizerArgument {
                codes,
                absmax: absmax + 4 * (first / BLOCK) as u64,
                elements: elements as i64,
                begin: kept(what.kept.start) as i64,
                end: kept(what.kept.end) as i64,
                ..table
            };
            let mut pointers = [argument(&table), argument(&from)];
            let grid = Grid::line(elements.div_ceil(CHUNK), 256);
            let stream = self.context.stream;
            self.kernels.launch_pointers(("quantize", &name), stream, grid, &mut pointers)?;
        }
        Ok(())
    }

    /// Double quantization: the scales of all pieces, less their mean.
    fn nest_scales(&self, what: &Quantize, scratch: u64) -> Result<(), CudaError> {
        let Some(nested) = what.nested else { return Ok(()) };
        let n = blocks(what.elements);
        let order = MeanOrder::of(n);
        let scales = scratch + FOUND as u64;
        let sums = scales + 4 * n.next_multiple_of(4) as u64;
        let offset = self.slab.address + nested.offset;
        let launch = |name: &str, grid: Grid, args: &[Arg]| {
            self.kernels.launch(("quantize", name), self.context.stream, grid, args)
        };
        let threads = order.width as u32;
        launch(
            "sum_scales",
            Grid::line(order.blocks, threads),
            &[Arg::Ptr(scales), Arg::Long(n as i64), Arg::Int(order.wide.into()), Arg::Ptr(sums)],
        )?;
        launch(
            "mean_scales",
            Grid::line(1, threads),
            &[
                Arg::Ptr(sums),
                Arg::Int(order.blocks as i32),
                Arg::Float(1.0 / n as f32),
                Arg::Ptr(offset),
            ],
        )?;
        let map = MapArgument(*DynamicMap::signed().limits());
        let (codes, absmax) = (self.slab.address + what.absmax, self.slab.address + nested.absmax);
        let count = n as i64;
        let mut pointers = [
            argument(&map),
            argument(&scales),
            argument(&count),
            argument(&offset),
            argument(&codes),
            argument(&absmax),
        ];
        let grid = Grid::line(n.div_ceil(NESTED_BLOCK), NESTED_BLOCK as u32);
        let stream = self.context.stream;
        self.kernels.launch_pointers(("quantize", "quantize_scales"), stream, grid, &mut pointers)
    }
}

// The kernels have room for the limits of either.
const _: () = assert!(size_of::<MapArgument>() <= 4096);

#[cfg(test)]
mod tests {
    use plimsoll_program::Codebook;

    use super::*;

    #[test]
    fn limits_fit_their_argument() {
        assert_eq!(Codebook::Nf4.limits().len(), 15);
        assert_eq!(Codebook::Fp4.limits().len(), 7);
        let all = words(1 << 127 | 1 << 33 | 1);
        assert_eq!(all, [1, 2, 0, 1 << 31]);
    }
}

//! Scratch memory of the ops: formulas of shapes alone, so that a plan for a GPU
//! needs no GPU.

use plimsoll_program::{OpKind, Program, Target};

use crate::{attention, decode, optimizer};

/// Scratch memory of the CUDA kernels.
#[derive(Clone, Copy, Debug, Default)]
pub struct CudaTarget;

/// What cuBLASLt may use for one product: NVIDIA's recommendation for Hopper.
pub(crate) const PRODUCT_WORKSPACE: u64 = 32 << 20;

/// Blocks that share a row of an argmax.
pub(crate) const ARGMAX_SPANS: usize = 32;

/// Rows that a block of a norm's backward takes at least, and about how many
/// floats all partial sums are together: narrow rows need many blocks to fill a chip.
const NORM_ROWS: usize = 4;
const NORM_PARTIALS: usize = 3 << 19;

/// Blocks, and partial sums, of a norm's backward over (rows, cols).
pub(crate) fn norm_blocks(rows: usize, cols: usize) -> usize {
    let most = (NORM_PARTIALS / cols.max(1)).clamp(128, 512);
    rows.div_ceil(NORM_ROWS).clamp(1, most)
}

/// The same of a head norm's backward, whose blocks are wide whatever the head.
pub(crate) fn head_norm_blocks(rows: usize) -> usize {
    rows.div_ceil(NORM_ROWS).clamp(1, 512)
}

/// Rows of one partial sum of a bias' gradient, and how many there are.
pub(crate) fn bias_spans(rows: usize) -> (usize, usize) {
    let span = rows.div_ceil(512).max(16);
    (span, rows.div_ceil(span))
}

impl Target for CudaTarget {
    fn workspace_bytes(&self, op: &OpKind, program: &Program) -> u64 {
        let rows = |t| program.tensor(t).rows();
        let cols = |t| program.tensor(t).cols();
        let floats = |n: usize| 4 * n as u64;
        match op {
            OpKind::Linear { .. } | OpKind::LinearQuantized { .. }
                if decode::takes(program, op) =>
            {
                0
            }
            // The matrix itself lies behind what the product needs.
            OpKind::LinearQuantized { x, w, .. } => {
                let bytes = program.tensor(x.tensor).dtype.bytes();
                PRODUCT_WORKSPACE + (w.rows * w.cols * bytes) as u64
            }
            OpKind::Linear { .. }
            | OpKind::LinearBackwardInput { .. }
            | OpKind::LinearBackwardWeight { .. } => PRODUCT_WORKSPACE,
            // The first row and the number of rows of every token.
            OpKind::EmbedBackward { d_table, .. } => floats(2 * rows(*d_table)),
            OpKind::RmsNormBackward { x, .. } => floats(norm_blocks(rows(*x), cols(*x)) * cols(*x)),
            OpKind::HeadNormBackward { d_qkv, shape, .. } => {
                floats(2 * head_norm_blocks(rows(*d_qkv)) * shape.head_dim)
            }
            OpKind::BiasBackward { d_y, .. } => floats(bias_spans(rows(*d_y)).1 * cols(*d_y)),
            OpKind::GradNorm { grads, .. } | OpKind::GradSquares { grads, .. } => {
                let elements = grads.iter().map(|g| program.tensor(*g).part_stored());
                8 * optimizer::square_blocks(elements) as u64
            }
            OpKind::AttentionBackward { shape, .. } => attention::backward_workspace(shape),
            OpKind::AttentionCached { qkv, shape, capacity, .. } => {
                attention::cached_workspace(shape, *capacity, program.tensor(*qkv).dtype)
            }
            OpKind::Argmax { x, .. } => 8 * (rows(*x) * ARGMAX_SPANS) as u64,
            _ => 0,
        }
    }
}

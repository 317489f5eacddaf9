//! Training and decoding kernels over plain slices.
//!
//! Three rules hold for all of them:
//! * nothing allocates: scratch memory comes in as `ws`, at least as long as the
//!   matching `*_workspace` function says;
//! * arithmetic is `f32` whatever the storage type ([`Elem`]);
//! * results do not depend on the number of threads: work is cut by shape alone
//!   and every sum has one order.
//!
//! Arguments of the wrong length panic: shapes are the caller's to check.
//! Kernels share their work through the pool that calls them (`crate::pool`).

// Loops over lanes and rows index several arrays at once.
#![allow(clippy::needless_range_loop)]

mod argmax;
mod attention;
mod dropout;
mod elem;
mod elementwise;
mod embed;
pub mod gemm;
mod loss;
mod masters;
mod norm;
mod optimizer;
mod optimizer8bit;
mod parallel;
mod quantized;
mod rope;
pub mod simd;
mod swiglu;

pub use argmax::argmax;
pub use attention::{
    AttentionShape, MAX_HEAD_DIM, attention_backward, attention_backward_workspace,
    attention_cached, attention_cached_workspace, attention_forward, attention_forward_workspace,
};
pub use dropout::Dropout;
pub use elem::Elem;
pub use elementwise::{
    add, add_assign, bias_backward, bias_backward_workspace, convert, fill, scale, sum_of_squares,
};
pub use embed::{embed, embed_backward};
pub use gemm::{Mat, SKINNY_ROWS, gemm, gemm_workspace, linear_skinny, linear_skinny_workspace};
pub use loss::{IGNORED, cross_entropy, cross_entropy_loss};
pub use masters::{adamw_masters, adamw8bit_masters, sgd_masters};
pub use norm::{
    add_rms_norm_forward, head_norm_backward, head_norm_backward_workspace, head_norm_forward,
    rms_norm_backward, rms_norm_backward_workspace, rms_norm_forward,
};
pub use optimizer::{AdamW, Rounding, adamw, sgd};
pub use optimizer8bit::adamw8bit;
pub use quantized::{
    MAX_PARTS, QUANTIZED_ROWS, QuantizedSlice, Scales, dequantize, linear_quantized,
    linear_quantized_workspace,
};
pub use rope::rope;
pub use swiglu::{swiglu_backward, swiglu_backward_in_place, swiglu_forward};

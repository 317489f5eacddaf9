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
//! Kernels share their work through the rayon pool that calls them.

mod elem;
pub mod gemm;
mod parallel;
pub mod simd;

pub use elem::Elem;
pub use gemm::{Mat, gemm, gemm_workspace, linear_skinny, linear_skinny_workspace};

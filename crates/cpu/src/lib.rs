//! The CPU device: kernels, threads, the slab, and the executor that runs a
//! program with them.

mod device;
mod host;
pub mod kernels;
pub mod pool;
mod slab;

pub use device::{CpuDevice, CpuTarget};
pub use host::HostOps;

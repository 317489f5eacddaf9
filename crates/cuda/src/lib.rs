//! The CUDA device: runs a program at its layout on an NVIDIA GPU (Ampere or
//! newer), from a binary that is built and started without CUDA.
//!
//! [`CudaDevice`] holds one reservation of exactly the planned bytes. Each section
//! of a program becomes one CUDA graph at its first run and is replayed after
//! that: no allocation, no synchronization and no host work inside a step. Copies
//! between the slabs of the two homes run beside computation (`lanes`). Read
//! `launch` for the list of ops and what they launch, `products` for matrix
//! products, `decode` for those of few rows and what shares their launch, `attention` for the
//! choice of attention kernels, `updates` for those on the host, `collectives` for several GPUs, and `kernels/*.cu` for the
//! kernels, one file a family.

mod attention;
mod collectives;
mod decode;
mod device;
mod driver;
mod error;
mod host;
mod kernels;
mod lanes;
mod launch;
mod library;
mod memory;
mod nvml;
mod optimizer;
mod optimizer8bit;
mod peers;
mod products;
mod quantize;
mod quantized;
mod target;
mod updates;

pub use device::CudaDevice;
pub use driver::{DeviceInfo, device_info};
pub use error::CudaError;
pub use peers::reach_each_other;
pub use target::CudaTarget;

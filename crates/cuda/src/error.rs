//! What can go wrong between this program and a GPU.

use plimsoll_comm::CommError;
use plimsoll_plan::DeviceError;

/// Why the CUDA device could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    #[error(
        "no NVIDIA driver here (libcuda.so.1 was not found): install driver 580 or newer, or use --device cpu"
    )]
    NoDriver,
    #[error(
        "the NVIDIA driver sees no GPU ({cause}): check nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device cpu"
    )]
    NoDevice { cause: String },
    #[error("GPU {ordinal} does not exist: this machine has {count}, numbered from 0")]
    Ordinal { ordinal: usize, count: usize },
    #[error(
        "the NVIDIA driver supports CUDA {}.{} and this program needs 13.0: install driver 580 or newer",
        found / 1000, found % 1000 / 10
    )]
    OldDriver { found: i32 },
    #[error(
        "{name} has compute capability {major}.{minor} and the kernels need 8.0 (Ampere) or newer: use --device cpu"
    )]
    OldDevice { name: String, major: i32, minor: i32 },
    #[error(
        "{library} ({file}) was not found: install the CUDA 13 toolkit, or `pip install {wheel}` and activate that Python environment, or name its folder in LD_LIBRARY_PATH"
    )]
    MissingLibrary { library: &'static str, file: &'static str, wheel: &'static str },
    #[error("CUDA call {call} failed: {name} ({what})")]
    Driver { call: &'static str, name: String, what: String },
    #[error("cuBLASLt failed with {status} on the product {product}")]
    Product { status: String, product: String },
    #[error("cuBLASLt call {call} failed: {status}")]
    Blas { call: &'static str, status: String },
    #[error(
        "cuBLASLt knows no way to compute the product {product} with {workspace} bytes of workspace"
    )]
    NoAlgorithm { product: String, workspace: u64 },
    #[error("NVRTC could not compile {file} for {arch}: {log}")]
    Compile { file: String, arch: String, log: String },
    #[error("kernel {name} is missing from {family}.cu")]
    MissingKernel { family: String, name: String },
    #[error("an update on the host failed: {what}: use --update-on gpu")]
    Host { what: String },
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error("GPU {from} does not reach the memory of GPU {to}: use --collectives nccl")]
    NoPeerAccess { from: i32, to: i32 },
    #[error("op {op}: {what}, which the CUDA device has no kernel for")]
    Unsupported { op: String, what: String },
    #[error(
        "the layout needs {needed} bytes and the slab has {slab}: make the device with the slab_bytes of the layout"
    )]
    SlabTooSmall { needed: u64, slab: u64 },
    #[error("{len} bytes at {offset} lie outside the slab of {slab} bytes")]
    OutsideSlab { offset: u64, len: usize, slab: u64 },
}

impl From<CudaError> for DeviceError {
    fn from(error: CudaError) -> DeviceError {
        match error {
            // Another rank's failure looks the same on every device.
            CudaError::Comm(error) => DeviceError::Source(Box::new(error)),
            other => DeviceError::Source(Box::new(other)),
        }
    }
}

//! What a GPU and its driver take before the allocator gets anything.

use crate::simulate::CudaDevice;

const MIB: u64 = 1 << 20;

/// Multiprocessors of GPUs that people use; the A100's where unknown.
const MULTIPROCESSORS: [(&str, u64); 14] = [
    ("a100", 108),
    ("h100-pcie", 114),
    ("h100", 132),
    ("h200", 132),
    ("b200", 148),
    ("l40s", 142),
    ("l4", 58),
    ("a6000", 84),
    ("a10", 72),
    ("rtx-3090", 82),
    ("rtx-4090", 128),
    ("rtx-5090", 170),
    ("v100", 80),
    ("t4", 40),
];

impl CudaDevice {
    /// A device by its catalogue name and compute capability.
    pub fn new(name: &str, compute_capability: (i32, i32)) -> CudaDevice {
        let known = MULTIPROCESSORS.iter().find(|(n, _)| name.starts_with(n));
        CudaDevice { compute_capability, multiprocessors: known.map_or(108, |k| k.1) }
    }

    /// The CUDA context, the kernels that PyTorch loads, and cuBLAS's and cuDNN's own.
    ///
    /// Measured on an H200 (PyTorch 2.11, CUDA 13.0): 804,061,184 bytes. Earlier
    /// architectures load fewer kernels: 376 MiB were seen on 24 GB GeForce cards, about
    /// 500 MiB on A100s.
    pub fn context_bytes(&self) -> u64 {
        match self.compute_capability {
            capability if capability >= (9, 0) => 804_061_184,
            (8, 0) => 500 * MIB,
            _ => 376 * MIB,
        }
    }

    /// What CUDA sees of the memory that `nvidia-smi` shows: 81,050 of 81,920 MiB on an
    /// A100, 24,259 of 24,576 on an RTX 3090; all of it on an H200.
    pub fn visible_bytes(&self, memory: u64) -> u64 {
        match self.compute_capability {
            capability if capability >= (9, 0) => memory,
            (8, 0) => memory - memory / 1000 * 10,
            _ => memory - memory / 1000 * 13,
        }
    }
}

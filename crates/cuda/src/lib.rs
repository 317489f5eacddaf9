//! The CUDA device.

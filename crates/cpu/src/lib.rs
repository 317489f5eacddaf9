//! The CPU device: kernels, and the executor that runs a program with them.

pub mod kernels;

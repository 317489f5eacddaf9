//! Prefill, decoding and sampling.

mod generate;
mod sample;

pub use generate::{GenerateError, Generation, Generator, InferPlan, StopReason};
pub use sample::{Sampler, SamplerError, Sampling};

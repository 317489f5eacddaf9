//! Weights in and out: safetensors, with 4-bit weights as bitsandbytes stores
//! them, and GGUF, under the names that Hugging Face gives them.

mod adapter;
mod checkpoint;
mod config_files;
mod error;
mod finite;
mod format;
mod gguf;
mod gguf_model;
mod map;
mod merge;
mod names;
mod on_device;
mod packed;
mod quantize;
mod random;
mod read;
mod safetensors;
mod slab;
mod writer;

pub use adapter::{Adapter, adapter_base, base_name, base_quant_name};
pub use checkpoint::{Checkpoint, Validation, read_architecture};
pub use error::{ModelError, TensorProblem};
pub use finite::{first_non_finite, first_non_finite_bf16};
pub use gguf::GgufMetadata;
pub use merge::{Merged, merge_adapter};
pub use names::expected_tensors;
pub use on_device::quantizing_bytes;
pub use quantize::{Quantized, quantize_model};
pub use read::{Packed4bit, Pieces, Scales};
pub use slab::{init_adapter, init_state, init_weights, load_adapter, load_weights, save_parts};
pub use writer::{DEFAULT_SHARD_BYTES, FilePlace, SafetensorsWriter, TensorSpec};

//! The memory of the PyTorch stack, predicted: transformers, PEFT, bitsandbytes, Liger,
//! DeepSpeed and FSDP2 over PyTorch's caching allocator.
//!
//! [`simulate`] writes a run as a [`Trace`] of allocations and frees; [`Trace::replay`] runs
//! it through the [`CachingAllocator`]; [`plan`] puts both into a report. No figure is
//! fitted to a measurement: every term is something that the stack's source allocates.

mod allocator;
mod config;
mod deepspeed;
mod device;
mod fsdp;
mod head;
mod model;
mod nn;
mod optimizer;
mod plan;
mod recipe;
mod simulate;
mod tape;
mod trace;

pub use allocator::{AllocatorConfig, BlockId, CachingAllocator, OutOfMemory, Stat, Stats};
pub use config::{Config, ConfigError, Kind, YamlError};
pub use plan::{OutOfMemoryAt, Room, StepTimeline, TorchReport, plan};
pub use recipe::{
    Attention, Bnb4bit, Checkpointing, Fsdp, Liger, Lora, Method, Modules, Optim, Precision,
    RecipeError, TorchRecipe, Version, Zero,
};
pub use simulate::{CudaDevice, Run, simulate};
pub use trace::{Event, LiveTensor, Replay, TimelinePoint, Trace, TraceTensor};

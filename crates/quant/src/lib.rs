//! Numbers in few bits, as bitsandbytes 0.49 stores them: weights in four,
//! optimizer state in eight; and float32 numbers as bf16 ones and the rest.
//!
//! A tensor is cut into blocks of consecutive elements; each block is scaled by
//! its largest magnitude (`absmax`, float32) and every element becomes the index
//! of the nearest entry of a small table. All of that is equal to the
//! reference bit for bit, on plain slices, and allocates nothing.

mod adamw8bit;
mod dynamic;
mod format;
mod four_bit;
mod master;
mod mean;
mod nested;

pub use adamw8bit::{AdamW8bit, MIN_8BIT_ELEMENTS, STATE_BLOCK, State8bit, adamw8bit};
pub use dynamic::{Cells, DynamicMap};
pub use format::{
    BLOCK, Codebook, Format4bit, NESTED_BLOCK, UnknownFormat, blocks, nested_blocks, packed_bytes,
};
pub use four_bit::{
    Element, HIGH_RECIPROCALS, LOW_RECIPROCALS, NotFinite, dequantize_4bit, quantize_4bit,
};
pub use master::{join_master, split_master};
pub use mean::MeanOrder;
pub use nested::{dequantize_absmax, quantize_absmax};

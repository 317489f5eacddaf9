//! One file a command.

pub mod bench;
pub mod bench_infer;
pub mod calibrate;
pub mod chat;
pub mod evaluate;
pub mod generate;
pub mod inspect;
pub mod merge;
pub mod plan;
pub mod plan_torch;
pub mod point;
pub mod quantize;
pub mod report;
pub mod search;
pub mod sweep;
pub mod train;
pub mod trainer;

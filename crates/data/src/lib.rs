//! Fine-tuning data: files to rows of tokens.
//!
//! ```text
//! files --read_files--> Dataset of Examples --tokenize_all--> Samples
//!       --split--> train, validation --pack--> Packed rows --BatchOrder--> batches
//! ```
//!
//! Every stage counts what it leaves out and says so; nothing is dropped silently.

mod batch;
mod error;
mod example;
mod format;
mod order;
mod pack;
mod reader;
mod sharegpt;
mod split;
mod tokenize;

pub use batch::{Batch, BatchOrder};
pub use error::DataError;
pub use example::{Conversation, Example};
pub use format::Format;
pub use order::{EpochOrder, OrderState};
pub use pack::{LongDocuments, PackMode, PackOptions, PackStats, Packed, Row, pack};
pub use reader::{Container, Dataset, FileReport, ReadOptions, read_bytes, read_files};
pub use split::split;
pub use tokenize::{Sample, Style, TokenizeOptions, Tokenized, TrainOn, tokenize, tokenize_all};

/// The label of a position that is not trained, as PyTorch's `ignore_index`.
pub const IGNORE: i32 = -100;

/// The data of the first run: true questions and answers about memory, units and
/// fine-tuning, in the `messages` format.
pub const SAMPLE: &str = include_str!("../../../samples/memory-qa.jsonl");

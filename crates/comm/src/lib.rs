//! What ranks say to each other: collectives over memory of the host, between
//! threads of one process.
//!
//! All implementations add in the order of the ranks, each element in float32
//! and rounded once: the same bits whoever carries them.

mod communicator;
mod error;
mod nccl;
mod sum;
mod threads;

pub use communicator::{AbortHandle, Communicator};
pub use error::CommError;
pub use nccl::{Nccl, Stream};
pub use threads::{ThreadGroup, threads};

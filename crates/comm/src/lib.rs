//! What ranks say to each other: collectives over memory of the host, between
//! threads ([`threads`]) and between processes ([`Tcp`]), and over memory of GPUs
//! ([`Nccl`]); and who the ranks are ([`Launch`]).
//!
//! What runs on the host adds in the order of the ranks, each element in float32 and
//! rounded once: the same bits whoever carries them.

mod communicator;
mod error;
mod launch;
#[cfg(feature = "mpi")]
mod mpi;
mod nccl;
mod node_list;
mod sum;
mod tcp;
mod threads;

pub use communicator::{AbortHandle, Communicator};
pub use error::CommError;
pub use launch::{Launch, LaunchError, Launcher};
#[cfg(feature = "mpi")]
pub use mpi::{Mpi, MpiSession};
pub use nccl::{Nccl, Stream};
pub use node_list::{NodeListError, expand_node_list};
pub use tcp::Tcp;
pub use threads::{ThreadGroup, threads};

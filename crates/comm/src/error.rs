//! Why ranks could not talk to each other.

use std::io;

/// A collective that did not happen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommError {
    #[error("rank {rank} ended: {cause}")]
    Aborted { rank: usize, cause: String },
    #[error(
        "rank {rank} is gone ({cause}): the last checkpoint is kept; start again with --resume"
    )]
    Lost { rank: usize, cause: String },
    #[error(
        "rank {rank} was not reached at {address} within {seconds} s ({cause}): check that all ranks were started and that the address is that of rank 0"
    )]
    Unreachable { rank: usize, address: String, seconds: u64, cause: String },
    #[error("{missing} of {ranks} ranks did not come within {seconds} s: {list}")]
    Missing { missing: usize, ranks: usize, seconds: u64, list: String },
    #[error("rank {rank} of {ranks} came twice: every process needs a rank of its own")]
    Twice { rank: usize, ranks: usize },
    #[error("a rank has {theirs} ranks to talk to and this one {ours}: start all of them alike")]
    Size { ours: usize, theirs: usize },
    #[error(
        "ranks disagree on what comes next: this one has {ours} bytes, rank {rank} sent {theirs}"
    )]
    Length { rank: usize, ours: usize, theirs: usize },
    #[error(
        "NCCL ({file}) was not found, and several GPUs talk through it: install it (Debian: libnccl2; or `pip install nvidia-nccl-cu13` in the active Python environment), or name its folder in LD_LIBRARY_PATH"
    )]
    NoNccl { file: &'static str },
    #[error("NCCL: {call} failed: {cause}")]
    Nccl { call: &'static str, cause: String },
    #[error("cannot {action}: {cause}")]
    Io { action: &'static str, cause: String },
}

impl CommError {
    pub(crate) fn io(action: &'static str) -> impl Fn(io::Error) -> CommError {
        move |e| CommError::Io { action, cause: e.to_string() }
    }
}

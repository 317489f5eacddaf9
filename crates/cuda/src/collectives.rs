//! Collectives of a program over whatever leads to the other GPUs.

use std::time::{Duration, Instant};

use plimsoll_comm::{CommError, Nccl};
use plimsoll_program::{Lane, OpKind, Shard, TensorId};

use crate::driver::Context;
use crate::error::CudaError;
use crate::launch::Launcher;
use crate::peers::{Gathered, Parts, Peers, Scattered, Summed};

/// What leads to the other ranks.
pub(crate) enum Link {
    Nccl(Nccl),
    Peers(Peers),
}

/// How long a GPU may take to come to an end of what was queued once nothing waits any more.
const PATIENCE: Duration = Duration::from_secs(10);

impl Link {
    /// Errors of what was queued.
    pub fn check(&self) -> Result<(), CommError> {
        match self {
            Link::Nccl(nccl) => nccl.check(),
            // Copies that fail are errors of the stream.
            Link::Peers(_) => Ok(()),
        }
    }

    /// Ends what is queued, whatever other ranks do.
    pub fn abort(&self, context: &Context) {
        match self {
            Link::Nccl(nccl) => nccl.abort(),
            Link::Peers(peers) => {
                let start = Instant::now();
                while matches!(context.is_idle(), Ok(false)) && start.elapsed() < PATIENCE {
                    peers.release();
                    std::thread::sleep(Duration::from_micros(20));
                }
            }
        }
    }
}

/// Puts a collective on its lane's stream.
pub(crate) fn run(l: &Launcher, op: &OpKind) -> Result<(), CudaError> {
    match l.link {
        Some(Link::Nccl(nccl)) => over_nccl(l, nccl, op),
        Some(Link::Peers(peers)) => over_peers(l, peers, op),
        None => {
            let what = "the ranks of a group, and this device has none".to_owned();
            Err(CudaError::Unsupported { op: l.op_name(), what })
        }
    }
}

/// One NCCL group for all tensors of a collective.
fn over_nccl(l: &Launcher, nccl: &Nccl, op: &OpKind) -> Result<(), CudaError> {
    let stream = l.lanes[Lane::Communication.index()].cast();
    let elements = |t: &TensorId| l.program.tensor(*t).part_stored();
    // SAFETY: addresses are of this program's slab, which lives as long as the
    // stream; the layout gives each tensor room for what is written.
    let result = unsafe {
        nccl.group(|nccl| {
            match op {
                OpKind::AllGather { from, to } => {
                    for (from, to) in from.iter().zip(to) {
                        let (part, dtype) = (l.part(*from), l.dtype(*to));
                        nccl.all_gather(part, l.at(*to), elements(to), dtype, stream)?;
                    }
                }
                OpKind::ReduceScatter { from, to } => {
                    for (from, to) in from.iter().zip(to) {
                        let (part, dtype) = (l.part(*to), l.dtype(*from));
                        nccl.reduce_scatter(l.at(*from), part, elements(from), dtype, stream)?;
                    }
                }
                OpKind::AllReduce { tensors } => {
                    for t in tensors {
                        let all = l.program.tensor(*t).stored();
                        nccl.all_reduce(l.at(*t), all, l.dtype(*t), stream)?;
                    }
                }
                _ => unreachable!("called for collectives"),
            }
            Ok(())
        })
    };
    result.map_err(CudaError::from)
}

fn over_peers(l: &Launcher, peers: &Peers, op: &OpKind) -> Result<(), CudaError> {
    let stream = l.lanes[Lane::Communication.index()];
    let part_bytes = |t: TensorId| {
        let t = l.program.tensor(t);
        (t.part_stored() * t.dtype.bytes()) as u64
    };
    // Where the parts of a tensor lie, each in the slab of its own rank.
    let parts = |t: TensorId| {
        let step = match l.program.tensor(t).shard {
            Shard::Padded { .. } => part_bytes(t),
            Shard::Whole | Shard::Part { .. } => 0,
        };
        Parts { offset: l.layout.offset(t), step }
    };
    match op {
        OpKind::AllGather { from, to } => {
            let tensor = |(from, to): (&TensorId, &TensorId)| Gathered {
                from: parts(*from),
                to: l.layout.offset(*to),
                bytes: part_bytes(*to),
            };
            let tensors: Vec<Gathered> = from.iter().zip(to).map(tensor).collect();
            peers.all_gather(&tensors, stream)
        }
        OpKind::ReduceScatter { from, to } => {
            let tensor = |(from, to): (&TensorId, &TensorId)| Scattered {
                from: l.layout.offset(*from),
                to: parts(*to),
                bytes: part_bytes(*from),
                dtype: l.dtype(*from),
            };
            let tensors: Vec<Scattered> = from.iter().zip(to).map(tensor).collect();
            peers.reduce_scatter(&tensors, l.kernels, stream)
        }
        OpKind::AllReduce { tensors } => {
            let tensor = |t: &TensorId| Summed {
                offset: l.layout.offset(*t),
                bytes: l.program.tensor(*t).bytes(),
                dtype: l.dtype(*t),
            };
            let tensors: Vec<Summed> = tensors.iter().map(tensor).collect();
            peers.all_reduce(&tensors, l.kernels, stream)
        }
        _ => unreachable!("called for collectives"),
    }
}

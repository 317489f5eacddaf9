//! The links between the devices that train one model, and what their collectives cost.

use plimsoll_program::{OpKind, Program, TensorId};
use serde::{Deserialize, Serialize};

use crate::{Staging, Transport, gpu};

/// How the ranks of a run reach each other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peers {
    pub ranks: usize,
    pub nodes: usize,
    /// What one device sends to its neighbour in a ring while it receives as much.
    pub peer_bytes_per_second: f64,
    /// What one node sends to the next, over all of its network; with one node, unused.
    pub node_bytes_per_second: f64,
    /// What a collective costs besides its bytes.
    pub latency_us: f64,
    pub transport: Transport,
    /// What the transport takes of every device, outside the slab.
    pub transport_bytes: u64,
    /// Where these figures come from, in words.
    pub source: String,
}

/// One direction of a GPU's links to its neighbours, GB/s, by the data sheet; none where
/// they talk over PCI Express.
fn nvlink(name: &str) -> Option<f64> {
    Some(match name {
        "b200" => 900.0,
        "h100" | "h200" => 450.0,
        "a100-40" | "a100-80" => 300.0,
        "v100" | "v100-16" => 150.0,
        _ => return None,
    })
}

/// Whether GPUs of this kind have links to each other besides PCI Express.
pub fn has_nvlink(name: &str) -> bool {
    gpu(name).is_some_and(|gpu| nvlink(gpu.name).is_some())
}

/// The part of a link's rate that rings reach.
const NVLINK_SHARE: f64 = 0.8;
const PCIE_SHARE: f64 = 0.7;
/// Measured on two H200s with NVLink (the NCCL that torch 2.11 brings): 962 to 967 MB,
/// for every stage of ZeRO.
const NCCL_BYTES: u64 = 962_500_000;

/// Of copies, measured on two H200s with NVLink, both pulling from the other at once: 371
/// GB/s in pieces of 64 MiB, 383 in pieces of 256 MiB.
const COPY_SHARE: f64 = 0.84;
/// Meeting before and after, starting the copies and waiting for them: an op of nothing.
const COPIES_LATENCY_US: f64 = 30.0;
/// One more copy in an op.
const COPY_US: f64 = 3.0;

impl Peers {
    /// GPUs of a kind: `ranks` on `nodes` alike, which send each other
    /// `node_bytes_per_second`. Between GPUs without NVLink everything goes over the
    /// host link at `link_bytes_per_second`.
    pub fn gpus(
        name: &str,
        link_bytes_per_second: f64,
        ranks: usize,
        nodes: usize,
        node_bytes_per_second: f64,
        transport: Transport,
    ) -> Peers {
        let copies = transport == Transport::Copies;
        let (rate, words) = match nvlink(name) {
            Some(gigabytes) if copies => {
                (gigabytes * 1e9 * COPY_SHARE, "copies over NVLink: data sheet x 0.84")
            }
            Some(gigabytes) => {
                (gigabytes * 1e9 * NVLINK_SHARE, "NCCL over NVLink: data sheet x 0.8")
            }
            None if copies => (link_bytes_per_second * PCIE_SHARE, "copies over PCI Express x 0.7"),
            None => (link_bytes_per_second * PCIE_SHARE, "NCCL over PCI Express x 0.7"),
        };
        let source = match nodes {
            1 => words.to_owned(),
            _ => format!("{words}; {:.0} GB/s a node", node_bytes_per_second / 1e9),
        };
        let (latency_us, transport_bytes) = match transport {
            Transport::Copies => (COPIES_LATENCY_US, Staging::of(ranks).bytes),
            _ => (if nodes > 1 { 40.0 } else { 15.0 }, NCCL_BYTES),
        };
        Peers {
            ranks,
            nodes,
            peer_bytes_per_second: rate,
            node_bytes_per_second,
            latency_us,
            transport,
            transport_bytes,
            source,
        }
    }

    /// Threads of one CPU: collectives are copies in its memory.
    pub fn threads(ranks: usize, copy_bytes_per_second: f64) -> Peers {
        Peers {
            ranks,
            nodes: 1,
            peer_bytes_per_second: copy_bytes_per_second / (4 * ranks.max(1)) as f64,
            node_bytes_per_second: copy_bytes_per_second,
            latency_us: 20.0,
            transport: Transport::Host,
            transport_bytes: 0,
            source: "copies in main memory".to_owned(),
        }
    }

    /// Bytes a second with which a ring turns. Over several nodes each byte leaves a
    /// node once, whichever of its devices sends it.
    fn ring_bytes_per_second(&self) -> f64 {
        match self.nodes {
            0 | 1 => self.peer_bytes_per_second,
            _ => self.peer_bytes_per_second.min(self.node_bytes_per_second),
        }
    }

    /// Seconds of a collective; none for another op. A ring sends all bytes but a
    /// rank's own part past each rank, once to gather or to reduce, twice for both
    /// (Patarasuk and Yuan 2009). Copies move as many; what they brought last is summed when
    /// all else has been, by a kernel that moves `memory_bytes_per_second`.
    pub fn seconds(
        &self,
        program: &Program,
        op: &OpKind,
        memory_bytes_per_second: f64,
    ) -> Option<f64> {
        let (tensors, turns, sums) = match op {
            OpKind::AllGather { to, .. } => (to, 1.0, false),
            OpKind::ReduceScatter { from, .. } => (from, 1.0, true),
            OpKind::AllReduce { tensors } => (tensors, 2.0, true),
            _ => return None,
        };
        let bytes_of = |t: &TensorId| program.tensor(*t).bytes();
        let bytes: u64 = tensors.iter().map(bytes_of).sum();
        let ranks = self.ranks.max(1) as f64;
        let others = (ranks - 1.0) / ranks;
        let sent = turns * others * bytes as f64;
        let mut seconds = 1e-6 * self.latency_us + sent / self.ring_bytes_per_second();
        if self.transport == Transport::Copies {
            let copies = (tensors.len() - 1) as f64 * (ranks - 1.0);
            seconds += 1e-6 * COPY_US * copies;
            if sums {
                let last = tensors.last().map_or(0, bytes_of) as f64 / ranks;
                let slice = last.min(Staging::of(self.ranks).slice as f64);
                seconds += (ranks + 1.0) * slice / memory_bytes_per_second;
            }
        }
        Some(seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peers(name: &str, ranks: usize, nodes: usize, transport: Transport) -> Peers {
        Peers::gpus(name, 50e9, ranks, nodes, 50e9, transport)
    }

    #[test]
    fn each_transport_takes_what_it_takes() {
        let copies = peers("h200", 2, 1, Transport::Copies);
        assert_eq!(copies.transport_bytes, Staging::of(2).bytes);
        let nccl = peers("h200", 2, 1, Transport::Nccl);
        assert_eq!(nccl.transport_bytes, NCCL_BYTES);
        assert_eq!(Peers::threads(2, 1e9).transport_bytes, 0);
    }
}

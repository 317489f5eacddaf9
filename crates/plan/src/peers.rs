//! The links between the devices that train one model, and what their collectives cost.

use plimsoll_program::{OpKind, Program};
use serde::{Deserialize, Serialize};

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
    /// What NCCL takes of every device, outside the slab.
    pub nccl_bytes: u64,
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

/// The part of a link's rate that rings reach.
const NVLINK_SHARE: f64 = 0.8;
const PCIE_SHARE: f64 = 0.7;
/// Measured on two H200s with NVLink (the NCCL that torch 2.11 brings): 962 to 967 MB,
/// for every stage of ZeRO.
const NCCL_BYTES: u64 = 962_500_000;

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
    ) -> Peers {
        let (rate, words) = match nvlink(name) {
            Some(gigabytes) => (gigabytes * 1e9 * NVLINK_SHARE, "NVLink of the data sheet x 0.8"),
            None => (link_bytes_per_second * PCIE_SHARE, "PCI Express x 0.7"),
        };
        let source = match nodes {
            1 => words.to_owned(),
            _ => format!("{words}; {:.0} GB/s a node", node_bytes_per_second / 1e9),
        };
        Peers {
            ranks,
            nodes,
            peer_bytes_per_second: rate,
            node_bytes_per_second,
            latency_us: if nodes > 1 { 40.0 } else { 15.0 },
            nccl_bytes: NCCL_BYTES,
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
            nccl_bytes: 0,
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
    /// (Patarasuk and Yuan 2009).
    pub fn seconds(&self, program: &Program, op: &OpKind) -> Option<f64> {
        let (tensors, turns) = match op {
            OpKind::AllGather { to, .. } => (to, 1.0),
            OpKind::ReduceScatter { from, .. } => (from, 1.0),
            OpKind::AllReduce { tensors } => (tensors, 2.0),
            _ => return None,
        };
        let bytes: u64 = tensors.iter().map(|t| program.tensor(*t).bytes()).sum();
        let others = (self.ranks.max(1) - 1) as f64 / self.ranks.max(1) as f64;
        let sent = turns * others * bytes as f64;
        Some(1e-6 * self.latency_us + sent / self.ring_bytes_per_second())
    }
}

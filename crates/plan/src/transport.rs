//! What carries the collectives of a run between its devices.

use serde::{Deserialize, Serialize};

/// How tensors of one rank reach the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// The copy engines of GPUs that reach each other's memory, all of them in one process:
    /// bytes move beside computation without a multiprocessor, and only sums take some.
    Copies,
    /// NVIDIA's library: any number of processes and machines.
    Nccl,
    /// Memory of the host.
    Host,
}

/// Device memory in which the slices of other ranks wait to be summed, by
/// [`Transport::Copies`]: two halves, of which one is filled while the other is summed, each
/// with room for one slice of every other rank; and room for whole small tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Staging {
    /// Bytes of one slice.
    pub slice: u64,
    /// Bytes of small tensors, of one rank.
    pub small: u64,
    /// All of it.
    pub bytes: u64,
}

/// Both halves of the slices.
const SLICES: u64 = 128 << 20;
/// The driver gives memory out in pieces of as much.
const PIECE: u64 = 2 << 20;
const SMALL: u64 = 1 << 20;

impl Staging {
    /// For so many ranks.
    pub fn of(ranks: usize) -> Staging {
        let others = ranks.saturating_sub(1).max(1) as u64;
        let slice = (SLICES / 2 / others / 256 * 256).max(256);
        let bytes = (others * (2 * slice + SMALL)).next_multiple_of(PIECE);
        Staging { slice, small: SMALL, bytes }
    }
}

impl Transport {
    pub fn name(self) -> &'static str {
        match self {
            Transport::Copies => "copies",
            Transport::Nccl => "nccl",
            Transport::Host => "host",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn staging_holds_two_slices_of_every_other_rank_and_stays_bounded() {
        for ranks in 2..=64 {
            let s = Staging::of(ranks);
            let others = ranks as u64 - 1;
            assert!(s.bytes >= others * (2 * s.slice + s.small), "{ranks}");
            assert!(s.bytes <= SLICES + others * SMALL + PIECE, "{ranks}");
            assert_eq!((s.slice % 256, s.bytes % PIECE), (0, 0), "{ranks}");
        }
        assert_eq!(Staging::of(2).slice, 64 << 20);
    }
}

//! Ranks that `mpirun` has started, over MPI: what clusters without GPUs have fast
//! networks for. Bytes travel through MPI, sums are ours, so the bits are those of the
//! other ways.
//!
//! A rank that fails ends all with `MPI_Abort`; one that is killed is seen by `mpirun`,
//! which ends the others.

use std::ops::Range;
use std::sync::Arc;

use mpi::datatype::{Partition, PartitionMut};
use mpi::environment::Universe;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator as _, CommunicatorCollectives, Root};
use mpi::{Count, Threading};
use plimsoll_arch::DType;

use crate::sum::sum;
use crate::{AbortHandle, CommError, Communicator};

/// One rank of all that `mpirun` has started.
pub struct Mpi {
    world: SimpleCommunicator,
}

/// Keeps MPI running; to be dropped by the thread that started it, at the very end.
pub struct MpiSession {
    _universe: Universe,
}

// SAFETY: MPI is started with one caller at a time allowed from any thread, and
// `&mut self` lets nobody else call.
unsafe impl Send for Mpi {}

/// Bytes of a share that travel at a time: MPI counts in 32 bits.
const PIECE: usize = 1 << 24;

impl Mpi {
    /// Joins the other processes.
    ///
    /// # Errors
    /// MPI was started before, or allows calls from one thread alone.
    pub fn start() -> Result<(Mpi, MpiSession), CommError> {
        let refused = |cause: &str| CommError::Io { action: "start MPI", cause: cause.to_owned() };
        let started = mpi::initialize_with_threading(Threading::Serialized);
        let (universe, threading) = started.ok_or_else(|| refused("it runs already"))?;
        if threading < Threading::Serialized {
            return Err(refused("this library takes calls from one thread alone"));
        }
        Ok((Mpi { world: universe.world() }, MpiSession { _universe: universe }))
    }

    /// The pieces of all shares, until the longest is through.
    fn pieces(
        &self,
        share: impl Fn(usize) -> Range<usize>,
    ) -> impl Iterator<Item = Vec<Range<usize>>> {
        let shares: Vec<Range<usize>> = (0..self.ranks()).map(share).collect();
        let longest = shares.iter().map(Range::len).max().unwrap_or(0);
        (0..longest.div_ceil(PIECE)).map(move |n| {
            let piece = |s: &Range<usize>| {
                let start = (s.start + n * PIECE).min(s.end);
                start..(start + PIECE).min(s.end)
            };
            shares.iter().map(piece).collect()
        })
    }

    fn reduce_shares(&self, data: &mut [u8], dtype: DType, share: impl Fn(usize) -> Range<usize>) {
        let (rank, ranks) = (self.rank(), self.ranks());
        for pieces in self.pieces(share) {
            // Never empty: the address of an empty vector is `MPI_IN_PLACE`.
            let mut sent = Vec::with_capacity(pieces.iter().map(Range::len).sum::<usize>() + 1);
            pieces.iter().for_each(|p| sent.extend_from_slice(&data[p.clone()]));
            let (counts, places) = layout(pieces.iter().map(Range::len));
            let own = pieces[rank].len();
            let mut arrived = vec![0u8; own * ranks + 1];
            let (own_counts, own_places) = layout(std::iter::repeat_n(own, ranks));
            self.world.all_to_all_varcount_into(
                &Partition::new(&sent[..], &counts[..], &places[..]),
                &mut PartitionMut::new(&mut arrived[..], &own_counts[..], &own_places[..]),
            );
            if own > 0 {
                let parts: Vec<&[u8]> = arrived.chunks_exact(own).take(ranks).collect();
                sum(&mut data[pieces[rank].clone()], &parts, dtype);
            }
        }
    }

    fn gather_shares(&self, data: &mut [u8], share: impl Fn(usize) -> Range<usize>) {
        let rank = self.rank();
        for pieces in self.pieces(share) {
            let (counts, places) = layout(pieces.iter().map(Range::len));
            let mut arrived = vec![0u8; pieces.iter().map(Range::len).sum::<usize>() + 1];
            self.world.all_gather_varcount_into(
                &data[pieces[rank].clone()],
                &mut PartitionMut::new(&mut arrived[..], &counts[..], &places[..]),
            );
            let mut rest = &arrived[..];
            for piece in pieces {
                let (now, later) = rest.split_at(piece.len());
                data[piece].copy_from_slice(now);
                rest = later;
            }
        }
    }

    /// Bytes of a rank's share of all elements, whole elements and about alike.
    fn share(&self, bytes: usize, rank: usize, dtype: DType) -> Range<usize> {
        let elements = bytes / dtype.bytes();
        let per_rank = elements.div_ceil(self.ranks());
        let at = |rank: usize| (rank * per_rank).min(elements) * dtype.bytes();
        at(rank)..at(rank + 1)
    }
}

/// Counts and places of parts that lie one behind the other.
fn layout(lengths: impl Iterator<Item = usize>) -> (Vec<Count>, Vec<Count>) {
    let counts: Vec<Count> = lengths.map(|n| n as Count).collect();
    let places = counts
        .iter()
        .scan(0, |at, n| {
            let place = *at;
            *at += n;
            Some(place)
        })
        .collect();
    (counts, places)
}

impl Communicator for Mpi {
    fn rank(&self) -> usize {
        self.world.rank() as usize
    }

    fn ranks(&self) -> usize {
        self.world.size() as usize
    }

    fn all_gather(&mut self, data: &mut [u8]) -> Result<(), CommError> {
        let part = data.len() / self.ranks();
        self.gather_shares(data, |rank| rank * part..(rank + 1) * part);
        Ok(())
    }

    fn reduce_scatter(&mut self, data: &mut [u8], dtype: DType) -> Result<(), CommError> {
        let part = data.len() / self.ranks();
        self.reduce_shares(data, dtype, |rank| rank * part..(rank + 1) * part);
        Ok(())
    }

    fn all_reduce(&mut self, data: &mut [u8], dtype: DType) -> Result<(), CommError> {
        let len = data.len();
        self.reduce_shares(data, dtype, |rank| self.share(len, rank, dtype));
        self.gather_shares(data, |rank| self.share(len, rank, dtype));
        Ok(())
    }

    fn broadcast(&mut self, data: &mut [u8], root: usize) -> Result<(), CommError> {
        for piece in data.chunks_mut(PIECE) {
            self.world.process_at_rank(root as i32).broadcast_into(piece);
        }
        Ok(())
    }

    fn barrier(&mut self) -> Result<(), CommError> {
        CommunicatorCollectives::barrier(&self.world);
        Ok(())
    }

    /// MPI ends the process where a rank is lost.
    fn check(&self) -> Result<(), CommError> {
        Ok(())
    }

    fn abort_handle(&self) -> AbortHandle {
        let rank = self.rank();
        Arc::new(move |cause| {
            eprintln!("error: rank {rank} ended: {cause}");
            // SAFETY: ends the processes of the world, this one included.
            unsafe { mpi::ffi::MPI_Abort(mpi::ffi::RSMPI_COMM_WORLD, 1) };
        })
    }
}

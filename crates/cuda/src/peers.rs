//! Collectives of GPUs that reach each other's memory, the ranks being threads of one process:
//! bytes are moved by copy engines, which take no multiprocessor from what computes beside
//! them, and summed by a kernel.
//!
//! Every rank pulls what it needs out of the slabs of the others; as all ranks run one
//! program at one layout, a tensor has the same offset in each. Ranks meet before, when what
//! will be read is written, and after, when it has been read ([`Phase`]). Meeting is left to
//! the front end of the streams: each writes a word for every other rank and waits for theirs
//! (memory operations of streams, CUDA driver API 12). Words go back to zero as soon as they
//! were seen, so that a captured section can be replayed.
//!
//! Sums are made in the order of the ranks, in float32, and rounded once: the same bits on
//! every rank and in every run.

use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUstreamBatchMemOpType_enum as MemOp};
use plimsoll_arch::DType;
use plimsoll_comm::Communicator;
use plimsoll_plan::Staging;

use crate::driver::{Context, Event, cuda, device};
use crate::error::CudaError;
use crate::kernels::{Arg, Grid, Kernels, suffix, width};
use crate::lanes::Stream;
use crate::memory::Memory;

/// Streams that copy: the two halves of the staging memory take turns.
const STREAMS: usize = 2;
/// Bytes of the largest tensor that every rank sums by itself.
const SMALL: u64 = 256 << 10;
/// Words are so far apart, in bytes.
const WORD: u64 = 64;

/// Where ranks meet. The same phase never comes twice in a row: whoever has seen all others in
/// one phase knows that their words of the phase before it are zero again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// What others will read is there.
    Ready,
    /// Between the halves of an all-reduce.
    Summed,
    /// What others had to read has been read.
    Read,
}

const PHASES: u64 = 3;

/// The parts of a tensor: `bytes` each, that of rank r at `offset + r step` in its slab.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts {
    pub offset: u64,
    pub step: u64,
}

impl Parts {
    fn of(self, rank: usize) -> u64 {
        self.offset + rank as u64 * self.step
    }
}

/// A tensor whose parts go to all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gathered {
    pub from: Parts,
    /// Offset of the whole.
    pub to: u64,
    /// Bytes of a part.
    pub bytes: u64,
}

/// A tensor of whose sum a rank gets its part.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scattered {
    /// Offset of the whole.
    pub from: u64,
    pub to: Parts,
    /// Bytes of a part.
    pub bytes: u64,
    pub dtype: DType,
}

/// A tensor that becomes its sum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Summed {
    pub offset: u64,
    pub bytes: u64,
    pub dtype: DType,
}

/// `to` = the sum over all ranks of the `bytes` at `from`, which have the same offset in every
/// slab.
struct Slices {
    from: u64,
    to: u64,
    bytes: u64,
    dtype: DType,
}

/// What a sum is made of: addresses on this GPU, and bytes.
struct Sum {
    own: u64,
    staged: u64,
    /// From the slice of one rank to that of the next.
    stride: u64,
    out: u64,
    bytes: u64,
    dtype: DType,
}

/// One rank's end of a group of GPUs.
pub(crate) struct Peers {
    rank: usize,
    /// Slabs of all ranks, as any of these GPUs addresses them. All of them stay until the
    /// last rank is gone: a copy out of one may be under way when its rank has failed.
    slabs: Vec<Arc<Memory>>,
    staging: Memory,
    sizes: Staging,
    streams: [Stream; STREAMS],
    /// Streams that copy start at this.
    fork: Event,
    /// By stream: what was copied last is there.
    copied: [Event; STREAMS],
    /// By half of the staging memory: it may be written again.
    summed: [Event; STREAMS],
    /// Page-locked words of all ranks: by rank, phase and the rank that writes.
    words: u64,
}

impl Peers {
    /// The ranks of `group`, threads of one process, meet; each has made its own GPU current
    /// and has a slab there that the others reach.
    ///
    /// # Errors
    /// There is no memory left, or a rank is gone.
    pub fn new(
        context: &Context,
        kernels: &Kernels,
        slab: &Arc<Memory>,
        group: &mut dyn Communicator,
    ) -> Result<Peers, CudaError> {
        let (rank, ranks) = (group.rank(), group.ranks());
        let words = if rank == 0 { words(ranks)? } else { 0 };
        let mut all = vec![[0u64; 2]; ranks];
        // One count for each rank, which it takes over. Those of ranks that never come to it
        // are lost, and the process ends with them.
        let shared = Arc::into_raw(Arc::clone(slab));
        for _ in 1..ranks {
            // SAFETY: made by `into_raw`, and `slab` lives.
            unsafe { Arc::increment_strong_count(shared) };
        }
        all[rank] = [shared as u64, words];
        group.all_gather(bytemuck::cast_slice_mut(&mut all))?;
        let take = |[shared, _]: &[u64; 2]| {
            // SAFETY: a rank of this process counted this one's when it made the pointer.
            unsafe { Arc::from_raw(*shared as *const Memory) }
        };
        let slabs = all.iter().map(take).collect();
        let sizes = Staging::of(ranks);
        let staging = Memory::shared(sizes.bytes as usize, context.device, &[])?;
        let peers = Peers {
            rank,
            slabs,
            staging,
            sizes,
            streams: [Stream::new()?, Stream::new()?],
            fork: context.mark()?,
            copied: [context.mark()?, context.mark()?],
            summed: [context.mark()?, context.mark()?],
            words: all[0][1],
        };
        // Loading one later may wait for streams that wait for other ranks.
        for name in ["sum_ranks_bf16", "sum_ranks_f32"] {
            kernels.function("peers", name)?;
        }
        group.barrier()?;
        Ok(peers)
    }

    fn ranks(&self) -> usize {
        self.slabs.len()
    }

    /// The other ranks, each GPU beginning with another one.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, ranks) = (self.rank, self.ranks());
        (1..ranks).map(move |n| (rank + n) % ranks)
    }

    /// The place of a rank among the others.
    fn place(&self, other: usize) -> u64 {
        if other < self.rank { other as u64 } else { other as u64 - 1 }
    }

    fn slab(&self) -> u64 {
        self.slabs[self.rank].address
    }

    /// The word that `writer` writes for `reader`.
    fn word(&self, reader: usize, phase: Phase, writer: usize) -> u64 {
        self.words + word(self.ranks(), reader, phase, writer)
    }

    /// Holds a stream until all ranks have come to this phase.
    fn meet(&self, phase: Phase, stream: sys::CUstream) -> Result<(), CudaError> {
        let mut ops: Vec<sys::CUstreamBatchMemOpParams> = Vec::new();
        for other in self.others() {
            ops.push(write(self.word(other, phase, self.rank), 1));
        }
        for other in self.others() {
            ops.push(wait(self.word(self.rank, phase, other), 1));
        }
        for other in self.others() {
            ops.push(write(self.word(self.rank, phase, other), 0));
        }
        cuda!(cuStreamBatchMemOp_v2(stream, ops.len() as u32, ops.as_mut_ptr(), 0))
    }

    /// Lets this rank's streams go on, whatever others do: what it waits for is as if it had
    /// come. Called again and again until the streams are empty.
    pub fn release(&self) {
        for phase in [Phase::Ready, Phase::Summed, Phase::Read] {
            for other in self.others() {
                let word = self.word(self.rank, phase, other) as *mut u32;
                // SAFETY: page-locked memory that is never given back, and which devices
                // write at the same time: a volatile store of one word.
                unsafe { ptr::write_volatile(word, 1) };
            }
        }
    }

    fn pull(&self, to: u64, other: usize, from: u64, len: u64, n: usize) -> Result<(), CudaError> {
        let from = self.slabs[other].address + from;
        cuda!(cuMemcpyDtoDAsync_v2(to, from, len as usize, self.streams[n].0))
    }

    /// Lets the streams that copy start where `stream` stands.
    fn fork(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        self.fork.record(stream)?;
        self.streams.iter().try_for_each(|s| self.fork.hold(s.0))
    }

    /// Lets `stream` go on when the streams that copy are here.
    fn join(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        for (copies, copied) in self.streams.iter().zip(&self.copied) {
            copied.record(copies.0)?;
            copied.hold(stream)?;
        }
        Ok(())
    }

    /// Every tensor's parts to all ranks.
    pub fn all_gather(&self, tensors: &[Gathered], stream: sys::CUstream) -> Result<(), CudaError> {
        self.meet(Phase::Ready, stream)?;
        self.fork(stream)?;
        for t in tensors {
            let (own, to) = (t.from.of(self.rank), t.to + self.rank as u64 * t.bytes);
            if own != to {
                let (from, to) = (self.slab() + own, self.slab() + to);
                cuda!(cuMemcpyDtoDAsync_v2(to, from, t.bytes as usize, stream))?;
            }
        }
        let parts = tensors.iter().flat_map(|t| {
            self.others().map(move |q| (q, t.from.of(q), t.to + q as u64 * t.bytes, t.bytes))
        });
        self.pull_all(parts)?;
        self.join(stream)?;
        self.meet(Phase::Read, stream)
    }

    /// Pulls (rank, offset there, offset here, bytes), over all streams alike.
    fn pull_all(
        &self,
        parts: impl Iterator<Item = (usize, u64, u64, u64)>,
    ) -> Result<(), CudaError> {
        for (other, from, to, bytes) in parts {
            let half = (bytes / STREAMS as u64).next_multiple_of(4096);
            for n in 0..STREAMS {
                let (start, end) =
                    ((n as u64 * half).min(bytes), ((n as u64 + 1) * half).min(bytes));
                if start < end {
                    self.pull(self.slab() + to + start, other, from + start, end - start, n)?;
                }
            }
        }
        Ok(())
    }

    /// This rank's part of every tensor's sum.
    pub fn reduce_scatter(
        &self,
        tensors: &[Scattered],
        kernels: &Kernels,
        stream: sys::CUstream,
    ) -> Result<(), CudaError> {
        self.meet(Phase::Ready, stream)?;
        self.fork(stream)?;
        let mut turn = 0;
        for t in tensors {
            let from = t.from + self.rank as u64 * t.bytes;
            let to = t.to.of(self.rank);
            let slices = Slices { from, to, bytes: t.bytes, dtype: t.dtype };
            self.sum_slices(&mut turn, slices, kernels, stream)?;
        }
        self.join(stream)?;
        self.meet(Phase::Read, stream)
    }

    /// Piece by piece, one half of the staging memory being filled while the other is summed.
    /// `turn` counts the pieces of a collective.
    fn sum_slices(
        &self,
        turn: &mut usize,
        slices: Slices,
        kernels: &Kernels,
        stream: sys::CUstream,
    ) -> Result<(), CudaError> {
        let Slices { from, to, bytes, dtype } = slices;
        let others = self.ranks() as u64 - 1;
        let slice = self.sizes.slice;
        for at in (0..bytes).step_by(slice as usize) {
            let len = slice.min(bytes - at);
            let n = *turn % STREAMS;
            let half = self.staging.address + n as u64 * others * slice;
            if *turn >= STREAMS {
                self.summed[n].hold(self.streams[n].0)?;
            }
            for other in self.others() {
                self.pull(half + self.place(other) * slice, other, from + at, len, n)?;
            }
            self.copied[n].record(self.streams[n].0)?;
            self.copied[n].hold(stream)?;
            let sum = Sum {
                own: self.slab() + from + at,
                staged: half,
                stride: slice,
                out: self.slab() + to + at,
                bytes: len,
                dtype,
            };
            self.sum(&sum, kernels, stream)?;
            self.summed[n].record(stream)?;
            *turn += 1;
        }
        Ok(())
    }

    fn sum(&self, sum: &Sum, kernels: &Kernels, stream: sys::CUstream) -> Result<(), CudaError> {
        let size = sum.dtype.bytes() as u64;
        let elements = sum.bytes / size;
        let args = [
            Arg::Ptr(sum.own),
            Arg::Ptr(sum.staged),
            Arg::Ptr(sum.out),
            Arg::Long(elements as i64),
            Arg::Long((sum.stride / size) as i64),
            Arg::Int(self.ranks() as i32),
            Arg::Int(self.rank as i32),
        ];
        let blocks = (elements as usize).div_ceil(256 * width(sum.dtype));
        let name = format!("sum_ranks_{}", suffix(sum.dtype));
        kernels.launch(("peers", &name), stream, Grid::line(blocks, 256), &args)
    }

    /// Every tensor becomes its sum over all ranks. Large ones are divided: each rank sums its
    /// slice, and gets those of the others. Small ones are summed by all.
    pub fn all_reduce(
        &self,
        tensors: &[Summed],
        kernels: &Kernels,
        stream: sys::CUstream,
    ) -> Result<(), CudaError> {
        let (mut small, mut large, mut used) = (Vec::new(), Vec::new(), 0);
        for t in tensors {
            let room = t.bytes.next_multiple_of(256);
            if t.bytes <= SMALL && used + room <= self.sizes.small {
                small.push((*t, used));
                used += room;
            } else {
                large.push(*t);
            }
        }
        let slice = |t: &Summed, q: usize| {
            let range = share(t.bytes, self.ranks(), q);
            (t.offset + range.start, range.end - range.start)
        };
        let others = self.ranks() as u64 - 1;
        let apart = self.staging.address + 2 * others * self.sizes.slice;

        self.meet(Phase::Ready, stream)?;
        self.fork(stream)?;
        for (i, (t, at)) in small.iter().enumerate() {
            for other in self.others() {
                let to = apart + self.place(other) * self.sizes.small + at;
                self.pull(to, other, t.offset, t.bytes, i % STREAMS)?;
            }
        }
        let mut turn = 0;
        for t in &large {
            let (from, bytes) = slice(t, self.rank);
            let slices = Slices { from, to: from, bytes, dtype: t.dtype };
            self.sum_slices(&mut turn, slices, kernels, stream)?;
        }
        self.join(stream)?;
        self.meet(Phase::Summed, stream)?;
        for (t, at) in &small {
            let own = self.slab() + t.offset;
            let (stride, staged) = (self.sizes.small, apart + at);
            let sum = Sum { own, staged, stride, out: own, bytes: t.bytes, dtype: t.dtype };
            self.sum(&sum, kernels, stream)?;
        }
        if large.is_empty() {
            return Ok(());
        }
        self.fork(stream)?;
        let parts = large.iter().flat_map(|t| {
            self.others().map(move |q| {
                let (offset, len) = slice(t, q);
                (q, offset, offset, len)
            })
        });
        self.pull_all(parts)?;
        self.join(stream)?;
        self.meet(Phase::Read, stream)
    }
}

/// Where the word that `writer` writes for `reader` lies among all.
fn word(ranks: usize, reader: usize, phase: Phase, writer: usize) -> u64 {
    WORD * ((reader as u64 * PHASES + phase as u64) * ranks as u64 + writer as u64)
}

/// The bytes of a tensor that rank `q` sums: shares that begin at multiples of 256.
fn share(bytes: u64, ranks: usize, q: usize) -> Range<u64> {
    let all = bytes.div_ceil(ranks as u64).next_multiple_of(256);
    let at = |q: usize| (q as u64 * all).min(bytes);
    at(q)..at(q + 1)
}

/// Zeroed page-locked words for a group. They stay until the process ends: another GPU may
/// still write one when the rank that it is for has gone.
fn words(ranks: usize) -> Result<u64, CudaError> {
    let bytes = PHASES as usize * ranks * ranks * WORD as usize;
    let mut base = ptr::null_mut();
    let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
    cuda!(cuMemHostAlloc(&mut base, bytes, flags))?;
    // SAFETY: that many bytes, just allocated.
    unsafe { ptr::write_bytes(base.cast::<u8>(), 0, bytes) };
    // The context that they belong to stays with them.
    let (mut device, mut context) = (0, ptr::null_mut());
    cuda!(cuCtxGetDevice(&mut device))?;
    cuda!(cuDevicePrimaryCtxRetain(&mut context, device))?;
    Ok(base as u64)
}

fn write(address: u64, value: u32) -> sys::CUstreamBatchMemOpParams {
    operation(MemOp::CU_STREAM_MEM_OP_WRITE_VALUE_32, address, value, 0)
}

fn wait(address: u64, value: u32) -> sys::CUstreamBatchMemOpParams {
    let equal = sys::CUstreamWaitValue_flags_enum::CU_STREAM_WAIT_VALUE_EQ as u32;
    operation(MemOp::CU_STREAM_MEM_OP_WAIT_VALUE_32, address, value, equal)
}

fn operation(
    operation: MemOp,
    address: u64,
    value: u32,
    flags: u32,
) -> sys::CUstreamBatchMemOpParams {
    // SAFETY: plain words, all of them valid as zero. Waiting and writing are told apart by
    // `operation`; their fields lie in the same places (cuda.h).
    let mut params: sys::CUstreamBatchMemOpParams = unsafe { std::mem::zeroed() };
    params.writeValue.operation = operation;
    params.writeValue.address = address;
    params.writeValue.__bindgen_anon_1.value = value;
    params.writeValue.flags = flags;
    params
}

/// The GPUs of the other ranks, each of which reaches this one's memory.
///
/// # Errors
/// One does not.
pub(crate) fn readers(
    ordinal: usize,
    group: &mut dyn Communicator,
) -> Result<Vec<sys::CUdevice>, CudaError> {
    let (rank, mine) = (group.rank(), device(ordinal)?);
    let mut all = vec![0i32; group.ranks()];
    all[rank] = mine;
    group.all_gather(bytemuck::cast_slice_mut(&mut all))?;
    // Ranks may share a GPU.
    all.retain(|other| *other != mine);
    all.sort_unstable();
    all.dedup();
    for other in &all {
        if !reaches(*other, mine)? {
            return Err(CudaError::NoPeerAccess { from: *other, to: mine });
        }
    }
    Ok(all)
}

fn reaches(device: sys::CUdevice, other: sys::CUdevice) -> Result<bool, CudaError> {
    let mut can = 0;
    cuda!(cuDeviceCanAccessPeer(&mut can, device, other))?;
    Ok(can == 1)
}

/// Whether the first `count` GPUs all reach each other's memory. Takes none of it.
pub fn reach_each_other(count: usize) -> bool {
    let devices: Result<Vec<_>, CudaError> = (0..count).map(device).collect();
    let Ok(devices) = devices else { return false };
    let pairs = devices.iter().flat_map(|a| devices.iter().map(move |b| (*a, *b)));
    pairs.filter(|(a, b)| a != b).all(|(a, b)| reaches(a, b).unwrap_or(false))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_has_a_place_of_its_own() {
        for ranks in [2, 3, 8] {
            let mut places = std::collections::BTreeSet::new();
            for reader in 0..ranks {
                for phase in [Phase::Ready, Phase::Summed, Phase::Read] {
                    (0..ranks).for_each(|w| assert!(places.insert(word(ranks, reader, phase, w))));
                }
            }
            let last = PHASES * (ranks * ranks) as u64 * WORD - WORD;
            assert_eq!(places.last(), Some(&last));
        }
    }

    #[test]
    fn shares_are_all_of_a_tensor_once() {
        for bytes in [4, 1020, 262_148, 6 << 20] {
            for ranks in [2, 3, 8] {
                let mut end = 0;
                for q in 0..ranks {
                    let range = share(bytes, ranks, q);
                    assert_eq!(range.start, end, "{bytes} bytes, {ranks} ranks");
                    assert!(range.start.is_multiple_of(256) || range.is_empty());
                    end = range.end;
                }
                assert_eq!(end, bytes);
            }
        }
    }
}

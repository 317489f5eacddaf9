//! PyTorch's CUDA caching allocator, rule by rule, without a GPU.
//!
//! Follows `c10/cuda/CUDACachingAllocator.cpp` of PyTorch 2.2 to 2.11. Addresses are
//! made up (segments follow each other), everything else is what the allocator does:
//! rounding, a small and a large pool for each stream, segments of 2 and 20 MiB,
//! best fit, splitting, merging, expandable segments, and the release of cached
//! segments when the driver has no more.

use std::collections::{BTreeSet, HashMap};

use thiserror::Error;

pub const MIB: u64 = 1 << 20;
/// Every size is a multiple of this.
const MIN_BLOCK: u64 = 512;
/// Rounded sizes up to this live in the small pool.
const SMALL_SIZE: u64 = MIB;
/// Segment of the small pool, and page of a small expandable segment.
const SMALL_SEGMENT: u64 = 2 * MIB;
/// Requests of the large pool below this share a segment.
const MIN_LARGE_SEGMENT: u64 = 10 * MIB;
/// Larger requests get a segment of their own, rounded up to this.
const ROUND_LARGE: u64 = 2 * MIB;
/// Address space between two made-up segments: nothing merges across.
const GUARD: u64 = 1 << 42;

/// What `PYTORCH_ALLOC_CONF` says, and how much the device has.
#[derive(Clone, Debug, PartialEq)]
pub struct AllocatorConfig {
    /// `expandable_segments:True`.
    pub expandable_segments: bool,
    /// `roundup_power2_divisions`: sizes above 512 times this many are rounded up to
    /// a fraction of their power of two. 0 or 1 is off.
    pub roundup_power2_divisions: u64,
    /// `max_split_size_mb`, in bytes: larger blocks are never split.
    pub max_split_size: Option<u64>,
    /// `large_segment_size_mb`, in bytes (20 MiB unless a distribution changed it).
    pub large_segment: u64,
    /// Bytes that the driver can hand out; none for a device without end.
    pub limit: Option<u64>,
}

impl Default for AllocatorConfig {
    fn default() -> AllocatorConfig {
        AllocatorConfig {
            expandable_segments: false,
            roundup_power2_divisions: 0,
            max_split_size: None,
            large_segment: 20 * MIB,
            limit: None,
        }
    }
}

/// `torch.cuda.OutOfMemoryError`: nothing left after every cached segment was released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("out of memory: tried to allocate {requested} bytes with {reserved} reserved of {limit}")]
pub struct OutOfMemory {
    pub requested: u64,
    pub reserved: u64,
    pub limit: u64,
}

/// Current value and the most it has been, as `torch.cuda.memory_stats` has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    pub current: u64,
    pub peak: u64,
}

impl Stat {
    fn add(&mut self, bytes: u64) {
        self.current += bytes;
        self.peak = self.peak.max(self.current);
    }

    fn sub(&mut self, bytes: u64) {
        self.current -= bytes;
    }
}

/// Counters of the allocator, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// `allocated_bytes.all`: blocks in use, remainders that were not split off included.
    pub allocated: Stat,
    /// `active_bytes.all`: as above, and blocks that another stream may still read.
    pub active: Stat,
    /// `requested_bytes.all`: what was asked for.
    pub requested: Stat,
    /// `reserved_bytes.all`: what the driver has given.
    pub reserved: Stat,
    /// Bytes of segments (or pages) that hold a live block: what would stay reserved
    /// if all that is cached were released.
    pub pinned: Stat,
    /// Times that cached segments were released because the driver had no more.
    pub retries: u64,
}

/// A block that `allocate` returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockId(usize);

/// A stream; blocks never move between streams.
pub type Stream = u8;

#[derive(Clone, Debug)]
struct Block {
    address: u64,
    size: u64,
    requested: u64,
    segment: usize,
    stream: Stream,
    small: bool,
    /// Expandable segments have blocks without physical pages.
    mapped: bool,
    allocated: bool,
    /// Freed, but recorded on another stream that has not come so far.
    pending: bool,
    previous: Option<usize>,
    next: Option<usize>,
}

#[derive(Clone, Debug)]
struct Segment {
    /// Live blocks of an ordinary segment.
    live: u64,
    size: u64,
    /// Live blocks that begin or end in a page of an expandable segment.
    ends: HashMap<u64, u32>,
    start: u64,
    expandable: bool,
}

/// Key of a free block: stream, size, address, index.
type FreeKey = (Stream, u64, u64, usize);

/// The allocator of one device.
#[derive(Clone, Debug)]
pub struct CachingAllocator {
    config: AllocatorConfig,
    blocks: Vec<Block>,
    unused: Vec<usize>,
    segments: Vec<Segment>,
    /// Free blocks of the large pool, then of the small one.
    free: [BTreeSet<FreeKey>; 2],
    /// Blocks without pages: (stream, address, index), by pool.
    unmapped: [BTreeSet<(Stream, u64, usize)>; 2],
    next_address: u64,
    stats: Stats,
}

impl CachingAllocator {
    pub fn new(config: AllocatorConfig) -> CachingAllocator {
        CachingAllocator {
            config,
            blocks: Vec::new(),
            unused: Vec::new(),
            segments: Vec::new(),
            free: Default::default(),
            unmapped: Default::default(),
            next_address: GUARD,
            stats: Stats::default(),
        }
    }

    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// `torch.cuda.reset_peak_memory_stats()`.
    pub fn reset_peaks(&mut self) {
        let s = &mut self.stats;
        for stat in
            [&mut s.allocated, &mut s.active, &mut s.requested, &mut s.reserved, &mut s.pinned]
        {
            stat.peak = stat.current;
        }
    }

    /// The size that a request is rounded up to.
    pub fn round(&self, bytes: u64) -> u64 {
        if bytes < MIN_BLOCK {
            return MIN_BLOCK;
        }
        let divisions = self.config.roundup_power2_divisions;
        if divisions > 1 && bytes > MIN_BLOCK * divisions {
            if bytes.is_power_of_two() {
                return bytes;
            }
            let floor = 1u64 << bytes.ilog2();
            let step = (floor / divisions).max(1);
            return bytes.next_multiple_of(step);
        }
        bytes.next_multiple_of(MIN_BLOCK)
    }

    /// Size of the segment that the driver is asked for.
    fn segment_size(&self, rounded: u64) -> u64 {
        if rounded <= SMALL_SIZE {
            SMALL_SEGMENT
        } else if rounded < MIN_LARGE_SEGMENT {
            self.config.large_segment
        } else {
            rounded.next_multiple_of(ROUND_LARGE)
        }
    }

    /// Memory for `bytes` on a stream.
    ///
    /// # Errors
    /// The driver has no more, and what is cached was released in vain.
    pub fn allocate(&mut self, bytes: u64, stream: Stream) -> Result<BlockId, OutOfMemory> {
        let size = self.round(bytes);
        let small = size <= SMALL_SIZE;
        let index = match self.best_fit(size, small, stream) {
            Some(index) => index,
            None => match self.grow(size, small, stream) {
                Some(index) => index,
                None => {
                    // Everything cached goes back to the driver, then once more.
                    self.empty_cache();
                    self.stats.retries += 1;
                    self.grow(size, small, stream).ok_or(OutOfMemory {
                        requested: bytes,
                        reserved: self.stats.reserved.current,
                        limit: self.config.limit.unwrap_or(u64::MAX),
                    })?
                }
            },
        };
        self.remove_free(index);
        let rest = self.blocks[index].size - size;
        let split = if small || self.config.expandable_segments {
            rest >= MIN_BLOCK
        } else {
            rest > SMALL_SIZE && self.config.max_split_size.is_none_or(|most| size < most)
        };
        if split {
            let tail = self.split(index, size);
            self.insert_free(tail);
        }
        let block = &mut self.blocks[index];
        block.allocated = true;
        block.requested = bytes;
        let taken = block.size;
        self.stats.allocated.add(taken);
        self.stats.active.add(taken);
        self.stats.requested.add(bytes);
        self.pin(index, true);
        Ok(BlockId(index))
    }

    /// Gives a block back to its pool.
    pub fn free(&mut self, id: BlockId) {
        self.release_use(id);
        self.finish(id);
    }

    /// Frees a block that another stream has been told of: it stops counting as
    /// allocated, and stays active until [`CachingAllocator::finish`].
    pub fn free_recorded(&mut self, id: BlockId) {
        self.release_use(id);
        self.blocks[id.0].pending = true;
    }

    fn release_use(&mut self, id: BlockId) {
        let block = &self.blocks[id.0];
        debug_assert!(block.allocated);
        self.stats.allocated.sub(block.size);
        self.stats.requested.sub(block.requested);
    }

    /// The other stream has come past the block: it can be used again.
    pub fn finish(&mut self, id: BlockId) {
        let index = id.0;
        self.pin(index, false);
        let block = &mut self.blocks[index];
        block.allocated = false;
        block.pending = false;
        self.stats.active.sub(block.size);
        let merged = self.merge_neighbours(index);
        self.insert_free(merged);
    }

    /// `torch.cuda.empty_cache()`: whole free segments, and whole free pages, go back.
    pub fn empty_cache(&mut self) {
        for pool in 0..2 {
            let free: Vec<FreeKey> = self.free[pool].iter().copied().collect();
            for (_, _, _, index) in free {
                if self.segments[self.blocks[index].segment].expandable {
                    self.unmap_pages(index);
                } else if self.blocks[index].previous.is_none() && self.blocks[index].next.is_none()
                {
                    self.remove_free(index);
                    self.stats.reserved.sub(self.blocks[index].size);
                    self.unused.push(index);
                }
            }
        }
    }

    /// The smallest free block that is large enough, lowest address first.
    fn best_fit(&self, size: u64, small: bool, stream: Stream) -> Option<usize> {
        let pool = usize::from(small);
        let mut fitting = self.free[pool].range((stream, size, 0, 0)..(stream + 1, 0, 0, 0));
        let &(_, mut found_size, _, mut found) = fitting.next()?;
        if self.segments[self.blocks[found].segment].expandable {
            // A block at the edge counts as large as it could become.
            for &(_, next_size, _, next) in fitting {
                if self.expandable_size(next) >= self.expandable_size(found) {
                    break;
                }
                (found, found_size) = (next, next_size);
            }
        }
        if let Some(most) = self.config.max_split_size {
            let oversize = size < most && found_size >= most;
            // `max_non_split_rounding_mb` is 20 MiB.
            let wasteful = size >= most && found_size >= size + 20 * MIB;
            if oversize || wasteful {
                return None;
            }
        }
        Some(found)
    }

    fn expandable_size(&self, index: usize) -> u64 {
        let block = &self.blocks[index];
        let beyond = block.next.map(|n| &self.blocks[n]).filter(|n| !n.mapped);
        block.size + beyond.map_or(0, |n| n.size)
    }

    /// A free block of at least `size` from the driver.
    fn grow(&mut self, size: u64, small: bool, stream: Stream) -> Option<usize> {
        if self.config.expandable_segments {
            return self.expand(size, small, stream);
        }
        let bytes = self.segment_size(size);
        if !self.has_room(bytes) {
            return None;
        }
        let segment = self.segments.len();
        self.segments.push(Segment {
            live: 0,
            size: bytes,
            ends: HashMap::new(),
            start: self.next_address,
            expandable: false,
        });
        let block = Block {
            address: self.next_address,
            size: bytes,
            requested: 0,
            segment,
            stream,
            small,
            mapped: true,
            allocated: false,
            pending: false,
            previous: None,
            next: None,
        };
        self.next_address += bytes + GUARD;
        self.stats.reserved.add(bytes);
        let index = self.new_block(block);
        self.insert_free(index);
        Some(index)
    }

    fn has_room(&self, bytes: u64) -> bool {
        self.config.limit.is_none_or(|limit| self.stats.reserved.current + bytes <= limit)
    }

    fn page(&self, small: bool) -> u64 {
        if small { SMALL_SEGMENT } else { self.config.large_segment }
    }

    /// Maps pages at the lowest address that has room for `size`, together with a
    /// free block right before it.
    fn expand(&mut self, size: u64, small: bool, stream: Stream) -> Option<usize> {
        let mut candidate = self.expandable_candidate(size, small, stream);
        if !self.blocks[candidate].mapped {
            let wanted = size.min(self.blocks[candidate].size);
            candidate = self.map(candidate, wanted)?;
        }
        while self.blocks[candidate].size < size {
            let next = self.blocks[candidate].next?;
            let wanted = (size - self.blocks[candidate].size).min(self.blocks[next].size);
            candidate = self.map(next, wanted)?;
        }
        Some(candidate)
    }

    fn expandable_candidate(&mut self, size: u64, small: bool, stream: Stream) -> usize {
        let pool = usize::from(small);
        let holes = self.unmapped[pool].range((stream, 0, 0)..(stream + 1, 0, 0));
        for &(_, _, hole) in holes {
            let before = self.blocks[hole].previous.filter(|&p| {
                let block = &self.blocks[p];
                !block.allocated && !block.pending
            });
            let first = before.unwrap_or(hole);
            let (mut room, mut at) = (0, Some(first));
            while let Some(index) = at {
                let block = &self.blocks[index];
                if block.allocated || block.pending || room >= size {
                    break;
                }
                room += block.size;
                at = block.next;
            }
            if room >= size {
                return first;
            }
        }
        // A new range of addresses, larger than any device.
        let segment = self.segments.len();
        let bytes = (GUARD / 2).max(size.next_multiple_of(self.page(small)));
        self.segments.push(Segment {
            live: 0,
            size: bytes,
            ends: HashMap::new(),
            start: self.next_address,
            expandable: true,
        });
        let block = Block {
            address: self.next_address,
            size: bytes,
            requested: 0,
            segment,
            stream,
            small,
            mapped: false,
            allocated: false,
            pending: false,
            previous: None,
            next: None,
        };
        self.next_address += bytes + GUARD;
        let index = self.new_block(block);
        self.unmapped[pool].insert((stream, self.blocks[index].address, index));
        index
    }

    /// Gives pages to the first `wanted` bytes of an unmapped block; returns the free
    /// block that they became part of.
    fn map(&mut self, index: usize, wanted: u64) -> Option<usize> {
        let small = self.blocks[index].small;
        let bytes = wanted.next_multiple_of(self.page(small)).min(self.blocks[index].size);
        if !self.has_room(bytes) {
            return None;
        }
        let pool = usize::from(small);
        let (stream, address) = (self.blocks[index].stream, self.blocks[index].address);
        self.unmapped[pool].remove(&(stream, address, index));
        if self.blocks[index].size > bytes {
            let tail = self.split(index, bytes);
            self.blocks[tail].mapped = false;
            self.unmapped[pool].insert((stream, self.blocks[tail].address, tail));
        }
        self.blocks[index].mapped = true;
        self.stats.reserved.add(bytes);
        let merged = self.merge_neighbours(index);
        self.insert_free(merged);
        Some(merged)
    }

    /// Takes the pages that lie wholly inside a free block.
    fn unmap_pages(&mut self, index: usize) {
        let small = self.blocks[index].small;
        let page = self.page(small);
        let start = self.segments[self.blocks[index].segment].start;
        let (address, size) = (self.blocks[index].address, self.blocks[index].size);
        let first = start + (address - start).next_multiple_of(page);
        let end = start + (address + size - start) / page * page;
        if end <= first {
            return;
        }
        self.remove_free(index);
        let mut middle = index;
        if first > address {
            middle = self.split(index, first - address);
            self.insert_free(index);
        }
        if address + size > end {
            let tail = self.split(middle, end - first);
            self.insert_free(tail);
        }
        self.stats.reserved.sub(end - first);
        self.blocks[middle].mapped = false;
        let merged = self.merge_neighbours(middle);
        let block = &self.blocks[merged];
        self.unmapped[usize::from(small)].insert((block.stream, block.address, merged));
    }

    /// Counts the segment, or the pages, of a live block.
    fn pin(&mut self, index: usize, live: bool) {
        let block = &self.blocks[index];
        let page = self.page(block.small);
        let (address, size) = (block.address, block.size);
        let segment = &mut self.segments[block.segment];
        if !segment.expandable {
            if live {
                if segment.live == 0 {
                    self.stats.pinned.add(segment.size);
                }
                segment.live += 1;
            } else {
                segment.live -= 1;
                if segment.live == 0 {
                    self.stats.pinned.sub(segment.size);
                }
            }
            return;
        }
        let first = (address - segment.start) / page;
        let last = (address + size - 1 - segment.start) / page;
        // Pages in the middle are this block's alone; those at its ends may be shared.
        let mut changed = (last - first).saturating_sub(1);
        let ends = [Some(first), Some(last).filter(|l| *l != first)];
        for end in ends.into_iter().flatten() {
            let count = segment.ends.entry(end).or_insert(0);
            if live {
                changed += u64::from(*count == 0);
                *count += 1;
            } else {
                *count -= 1;
                changed += u64::from(*count == 0);
            }
        }
        if live {
            self.stats.pinned.add(changed * page);
        } else {
            self.stats.pinned.sub(changed * page);
        }
    }

    /// Merges a block with the neighbours that are in the same state.
    fn merge_neighbours(&mut self, index: usize) -> usize {
        let mut index = index;
        for forward in [false, true] {
            let block = &self.blocks[index];
            let Some(other) = (if forward { block.next } else { block.previous }) else {
                continue;
            };
            let neighbour = &self.blocks[other];
            if neighbour.allocated || neighbour.pending || neighbour.mapped != block.mapped {
                continue;
            }
            if neighbour.mapped {
                self.remove_free(other);
            } else {
                let key = (neighbour.stream, neighbour.address, other);
                self.unmapped[usize::from(neighbour.small)].remove(&key);
            }
            let (left, right) = if forward { (index, other) } else { (other, index) };
            let (size, next) = (self.blocks[right].size, self.blocks[right].next);
            self.blocks[left].size += size;
            self.blocks[left].next = next;
            if let Some(next) = next {
                self.blocks[next].previous = Some(left);
            }
            self.unused.push(right);
            index = left;
        }
        index
    }

    /// Cuts a block after `size` bytes; returns the rest.
    fn split(&mut self, index: usize, size: u64) -> usize {
        let mut tail = self.blocks[index].clone();
        tail.address += size;
        tail.size -= size;
        tail.previous = Some(index);
        let next = tail.next;
        let tail = self.new_block(tail);
        if let Some(next) = next {
            self.blocks[next].previous = Some(tail);
        }
        let block = &mut self.blocks[index];
        block.size = size;
        block.next = Some(tail);
        tail
    }

    fn new_block(&mut self, block: Block) -> usize {
        match self.unused.pop() {
            Some(index) => {
                self.blocks[index] = block;
                index
            }
            None => {
                self.blocks.push(block);
                self.blocks.len() - 1
            }
        }
    }

    fn key(&self, index: usize) -> (usize, FreeKey) {
        let block = &self.blocks[index];
        (usize::from(block.small), (block.stream, block.size, block.address, index))
    }

    fn insert_free(&mut self, index: usize) {
        let (pool, key) = self.key(index);
        self.free[pool].insert(key);
    }

    fn remove_free(&mut self, index: usize) {
        let (pool, key) = self.key(index);
        self.free[pool].remove(&key);
    }
}

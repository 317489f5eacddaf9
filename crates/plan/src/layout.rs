//! An offset in its slab for every tensor, ahead of time.
//!
//! Placing intervals in as little memory as possible is NP-hard in general,
//! but a training step is nearly a stack: activations are made in order and
//! used up in reverse. Greedy best fit over the known lifetimes, tried in a few
//! orders, meets the lower bound exactly or to a fraction of a percent.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use plimsoll_program::{Class, Home, Program, TensorId};

use crate::SlabSizes;
use crate::lifetime::{Lifetime, lifetimes};

/// Every offset is a multiple of this: wide enough for any vector load of a
/// GPU and for a cache line of a CPU.
pub const ALIGNMENT: u64 = 256;

/// Where a tensor lies in the slab of its home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    pub offset: u64,
    pub bytes: u64,
}

/// Addresses for all tensors of one program.
#[derive(Clone, Debug)]
pub struct Layout {
    /// By tensor; `None` for a tensor that no op touches.
    pub placements: Vec<Option<Placement>>,
    pub lifetimes: Vec<Option<Lifetime>>,
    /// Bytes of the device slab: what is asked of the driver.
    pub slab_bytes: u64,
    /// Bytes of the slab in page-locked host memory.
    pub host_bytes: u64,
    /// The most device bytes that are ever alive at once.
    pub lower_bound: u64,
    /// The op at which they are.
    pub peak_op: usize,
}

/// Why two programs cannot share a slab.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    #[error(
        "tensor `{tensor}` has {found} bytes in one program and {expected} in another, so they cannot share it"
    )]
    Shared { tensor: String, found: u64, expected: u64 },
}

/// A tensor to be placed.
#[derive(Clone, Copy)]
struct Block {
    tensor: TensorId,
    bytes: u64,
    life: Lifetime,
}

/// Lays one program out.
pub fn lay_out(program: &Program) -> Layout {
    let mut layouts = lay_out_together(&[program]).expect("one program shares nothing");
    layouts.pop().expect("one layout for one program")
}

/// Lays out programs that run in the same slab one after the other (training
/// and evaluation, prefill and decode): resident tensors of the same name are
/// the same bytes, everything else is reused.
///
/// # Errors
/// A resident tensor has different sizes in two programs.
pub fn lay_out_together(programs: &[&Program]) -> Result<Vec<Layout>, LayoutError> {
    let mut sizes: HashMap<&str, u64> = HashMap::new();
    for tensor in programs.iter().flat_map(|p| &p.tensors).filter(|t| t.resident) {
        let size = sizes.entry(&tensor.name).or_insert(tensor.bytes());
        // Inputs are written before every run: the widest program decides.
        if tensor.class != Class::Input && *size != tensor.bytes() {
            return Err(LayoutError::Shared {
                tensor: tensor.name.clone(),
                found: tensor.bytes(),
                expected: *size,
            });
        }
        *size = tensor.bytes().max(*size);
    }
    let mut shared: HashMap<&str, u64> = HashMap::new();
    let mut ends = [0u64; 2];
    for tensor in programs.iter().flat_map(|p| &p.tensors).filter(|t| t.resident) {
        if let Entry::Vacant(vacant) = shared.entry(&tensor.name) {
            let end = &mut ends[home_index(tensor.home)];
            vacant.insert(*end);
            *end += align(sizes[tensor.name.as_str()]);
        }
    }
    let mut layouts: Vec<Layout> =
        programs.iter().map(|p| lay_out_above(p, &shared, ends)).collect();
    let slab_bytes = layouts.iter().map(|l| l.slab_bytes).max().unwrap_or(0);
    let host_bytes = layouts.iter().map(|l| l.host_bytes).max().unwrap_or(0);
    for layout in &mut layouts {
        (layout.slab_bytes, layout.host_bytes) = (slab_bytes, host_bytes);
    }
    Ok(layouts)
}

pub(crate) fn home_index(home: Home) -> usize {
    match home {
        Home::Device => 0,
        Home::Host => 1,
    }
}

fn align(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGNMENT)
}

/// Resident tensors lie where `shared` says, the others above `ends`.
fn lay_out_above(program: &Program, shared: &HashMap<&str, u64>, ends: [u64; 2]) -> Layout {
    let lives = lifetimes(program);
    let mut placements: Vec<Option<Placement>> = program
        .tensors
        .iter()
        .map(|t| {
            let offset = *shared.get(t.name.as_str()).filter(|_| t.resident)?;
            Some(Placement { offset, bytes: t.bytes() })
        })
        .collect();
    let mut sizes = ends;
    for home in [Home::Device, Home::Host] {
        let blocks: Vec<Block> = lives
            .iter()
            .enumerate()
            .filter_map(|(index, life)| {
                let tensor = &program.tensors[index];
                let life = (*life)?;
                let wanted = !tensor.resident && tensor.home == home;
                let bytes = align(tensor.bytes());
                wanted.then_some(Block { tensor: TensorId::new(index), bytes, life })
            })
            .collect();
        let base = ends[home_index(home)];
        let (offsets, height) = place(&blocks, program.ops.len());
        for (block, offset) in blocks.iter().zip(offsets) {
            let bytes = program.tensor(block.tensor).bytes();
            placements[block.tensor.index()] = Some(Placement { offset: base + offset, bytes });
        }
        sizes[home_index(home)] += height;
    }
    let (lower_bound, peak_op) = most_alive(program, &lives);
    Layout {
        placements,
        lifetimes: lives,
        slab_bytes: sizes[0],
        host_bytes: sizes[1],
        lower_bound,
        peak_op,
    }
}

/// The most bytes alive on the device at one op, and that op.
fn most_alive(program: &Program, lives: &[Option<Lifetime>]) -> (u64, usize) {
    let mut change = vec![0i64; program.ops.len() + 1];
    let mut always = 0u64;
    for (tensor, life) in program.tensors.iter().zip(lives) {
        match life {
            _ if tensor.home != Home::Device => {}
            _ if tensor.resident => always += tensor.bytes(),
            Some(life) => {
                change[life.first] += tensor.bytes() as i64;
                change[life.last + 1] -= tensor.bytes() as i64;
            }
            None => {}
        }
    }
    let (mut now, mut best, mut at) = (0i64, 0i64, 0);
    for (op, delta) in change.iter().enumerate().take(program.ops.len()) {
        now += delta;
        if now > best {
            (best, at) = (now, op);
        }
    }
    (always + best as u64, at)
}

/// Offsets of all blocks and the height of the highest; the best of a few orders.
fn place(blocks: &[Block], ops: usize) -> (Vec<u64>, u64) {
    let bound = bound(blocks, ops);
    let mut best: Option<(Vec<u64>, u64)> = None;
    for order in Order::ALL {
        let lowest = best.as_ref().map_or(u64::MAX, |(_, height)| *height);
        let Some((offsets, height)) = place_in_order(blocks, order, lowest) else { continue };
        best = Some((offsets, height));
        if height <= bound + bound / 500 {
            break;
        }
    }
    best.unwrap_or_default()
}

fn bound(blocks: &[Block], ops: usize) -> u64 {
    let mut change = vec![0i64; ops + 1];
    for block in blocks {
        change[block.life.first] += block.bytes as i64;
        change[block.life.last + 1] -= block.bytes as i64;
    }
    let mut now = 0;
    change.iter().fold(0, |most: i64, delta| {
        now += delta;
        most.max(now)
    }) as u64
}

/// Which block is placed next.
#[derive(Clone, Copy)]
enum Order {
    /// Longest life first: kept activations form the floor, scratch lies above.
    Longest,
    /// Largest first.
    Largest,
    /// Largest size times life first.
    Area,
    /// As the step makes them.
    Birth,
}

impl Order {
    const ALL: [Order; 4] = [Order::Longest, Order::Largest, Order::Area, Order::Birth];

    fn key(self, block: &Block) -> u128 {
        let length = (block.life.last - block.life.first + 1) as u128;
        let bytes = u128::from(block.bytes);
        match self {
            Order::Longest => length << 64 | bytes,
            Order::Largest => bytes << 64 | length,
            Order::Area => bytes * length,
            Order::Birth => u128::from(u64::MAX - block.life.first as u64) << 64 | bytes,
        }
    }
}

/// Gives each block the lowest gap, among those of blocks alive at the same
/// time, that wastes least. None as soon as it is as high as `lowest`.
fn place_in_order(blocks: &[Block], order: Order, lowest: u64) -> Option<(Vec<u64>, u64)> {
    let mut sequence: Vec<usize> = (0..blocks.len()).collect();
    sequence.sort_by_key(|&i| (std::cmp::Reverse(order.key(&blocks[i])), i));
    let mut offsets = vec![0u64; blocks.len()];
    let mut height = 0;
    let mut placed = Placed::new(blocks);
    for i in sequence {
        let block = &blocks[i];
        let mut floor = 0;
        let mut best: Option<(u64, u64)> = None; // (waste, offset)
        for &(offset, end, life) in placed.near(block.life) {
            if !life.overlaps(block.life) {
                continue;
            }
            if offset >= floor + block.bytes {
                let waste = offset - floor - block.bytes;
                if best.is_none_or(|(w, _)| waste < w) {
                    best = Some((waste, floor));
                    if waste == 0 {
                        break;
                    }
                }
            }
            floor = floor.max(end);
        }
        let offset = best.map_or(floor, |(_, offset)| offset);
        let end = offset + block.bytes;
        placed.insert((offset, end, block.life));
        offsets[i] = offset;
        height = height.max(end);
        if height >= lowest {
            return None;
        }
    }
    Some((offsets, height))
}

/// Offset, end and life of a block that has its place.
type Place = (u64, u64, Lifetime);

/// Placed blocks, by offset: all of them, and those alive in each window of the
/// program. Most blocks live for a few ops, and need not look at the others.
struct Placed {
    all: Vec<Place>,
    /// Of each part of the program those alive in it or in the next part.
    windows: Vec<Vec<Place>>,
    /// Ops in a part.
    part: usize,
}

/// Parts of a program.
const PARTS: usize = 32;

impl Placed {
    fn new(blocks: &[Block]) -> Placed {
        let ops = blocks.iter().map(|b| b.life.last + 1).max().unwrap_or(0);
        let part = ops.div_ceil(PARTS).max(1);
        Placed { all: Vec::new(), windows: vec![Vec::new(); PARTS], part }
    }

    /// Everything that may be alive together with a block, by offset.
    fn near(&self, life: Lifetime) -> &[Place] {
        let (first, last) = (life.first / self.part, life.last / self.part);
        if last <= first + 1 { &self.windows[first] } else { &self.all }
    }

    fn insert(&mut self, place: Place) {
        let (first, last) = (place.2.first / self.part, place.2.last / self.part);
        let windows = &mut self.windows[first.saturating_sub(1)..=last];
        for list in windows.iter_mut().chain([&mut self.all]) {
            let at = list.partition_point(|p| p.0 <= place.0);
            list.insert(at, place);
        }
    }
}

impl Layout {
    /// Offset of a tensor in the slab of its home.
    ///
    /// # Panics
    /// No op touches the tensor: a fault of whoever asks.
    pub fn offset(&self, tensor: TensorId) -> u64 {
        self.placements[tensor.index()].expect("a tensor that ops touch has a place").offset
    }

    /// Bytes of the slab of each home.
    pub fn slabs(&self) -> SlabSizes {
        SlabSizes { device: self.slab_bytes, host: self.host_bytes }
    }

    /// Slab bytes above the lower bound, as a fraction of it.
    pub fn fragmentation(&self) -> f64 {
        self.slab_bytes as f64 / self.lower_bound.max(1) as f64 - 1.0
    }

    /// Checks that no two tensors alive at the same op share a byte.
    ///
    /// # Errors
    /// The names of the first two that do.
    pub fn verify(&self, program: &Program) -> Result<(), (String, String)> {
        let mut blocks: Vec<(u64, u64, Lifetime, usize)> = Vec::new();
        for (index, placement) in self.placements.iter().enumerate() {
            if let (Some(p), Some(life)) = (placement, self.lifetimes[index]) {
                let home = home_index(program.tensors[index].home) as u64;
                let start = p.offset + (home << 62);
                blocks.push((start, start + p.bytes, life, index));
            }
        }
        blocks.sort_by_key(|b| b.0);
        for (n, a) in blocks.iter().enumerate() {
            for b in blocks[n + 1..].iter().take_while(|b| b.0 < a.1) {
                if a.2.overlaps(b.2) && b.1 > b.0 {
                    let name = |i: usize| program.tensors[i].name.clone();
                    return Err((name(a.3), name(b.3)));
                }
            }
        }
        Ok(())
    }
}

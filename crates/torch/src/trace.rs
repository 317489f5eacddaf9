//! What a step allocates and frees, in order, and its replay through an allocator.
//!
//! The native `Program` has ops whose operands have an address for as long as the plan
//! says. PyTorch has neither: storages are reference-counted, autograd decides what
//! lives, and the allocator decides where. So this crate has an op form of its own over
//! the same classes: named tensors, and events that allocate and free them.

use plimsoll_program::Class;
use serde::Serialize;

use crate::allocator::{AllocatorConfig, BlockId, CachingAllocator, OutOfMemory, Stats, Stream};

/// A tensor that the stack allocates.
#[derive(Clone, Debug)]
pub struct TraceTensor {
    /// What it is: the op or role that made it.
    pub label: &'static str,
    /// Index of the module in [`Trace::scopes`].
    pub scope: u32,
    pub bytes: u64,
    pub class: Class,
    pub stream: Stream,
}

/// Something that happens, in the order in which the process does it.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A module or an op of backward begins.
    Op {
        label: &'static str,
        scope: u32,
    },
    Alloc(u32),
    Free(u32),
    /// Freed, but recorded on another stream: active until [`Event::Free`].
    FreeRecorded(u32),
    /// `torch.cuda.empty_cache()`.
    EmptyCache,
    /// `torch.cuda.reset_peak_memory_stats()`.
    ResetPeaks,
    /// A named moment whose live bytes are kept.
    Mark(&'static str),
}

/// All steps that are simulated, model construction included.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    pub scopes: Vec<String>,
    pub tensors: Vec<TraceTensor>,
    pub events: Vec<Event>,
}

/// Live bytes by class while one op ran.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TimelinePoint {
    pub name: String,
    pub bytes: Vec<u64>,
}

/// A tensor that is alive at the peak.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LiveTensor {
    pub name: String,
    pub class: Class,
    pub bytes: u64,
}

/// What a replay saw.
#[derive(Clone, Debug, Default)]
pub struct Replay {
    pub stats: Stats,
    /// Allocated bytes at each [`Event::Mark`].
    pub marks: Vec<(&'static str, u64)>,
    /// Where and why it ran out of memory.
    pub out_of_memory: Option<(String, OutOfMemory)>,
    /// Index of the event at which the most bytes were allocated.
    peak_event: usize,
}

impl Replay {
    /// Allocated bytes at a mark, the last of that name.
    pub fn mark(&self, name: &str) -> Option<u64> {
        self.marks.iter().rev().find(|(n, _)| *n == name).map(|m| m.1)
    }
}

impl Trace {
    fn op_name(&self, label: &str, scope: u32) -> String {
        let scope = self.scopes.get(scope as usize).map_or("", String::as_str);
        match (scope, label) {
            ("", label) => label.to_owned(),
            (scope, "") => scope.to_owned(),
            (scope, label) => format!("{scope}: {label}"),
        }
    }

    fn tensor_name(&self, id: u32) -> String {
        let tensor = &self.tensors[id as usize];
        let scope = self.scopes.get(tensor.scope as usize).map_or("", String::as_str);
        match (scope, tensor.label) {
            ("", label) => label.to_owned(),
            (scope, "") => scope.to_owned(),
            (scope, label) => format!("{scope}.{label}"),
        }
    }

    /// Runs the events through an allocator; stops where it runs out of memory.
    pub fn replay(&self, config: &AllocatorConfig) -> Replay {
        let mut allocator = CachingAllocator::new(config.clone());
        let mut blocks: Vec<Option<BlockId>> = vec![None; self.tensors.len()];
        let mut recorded = vec![false; self.tensors.len()];
        let mut replay = Replay::default();
        let (mut label, mut scope) = ("", u32::MAX);
        let mut peak = 0;
        for (index, event) in self.events.iter().enumerate() {
            match *event {
                Event::Op { label: l, scope: s } => (label, scope) = (l, s),
                Event::Alloc(id) => {
                    let tensor = &self.tensors[id as usize];
                    match allocator.allocate(tensor.bytes, tensor.stream) {
                        Ok(block) => blocks[id as usize] = Some(block),
                        Err(error) => {
                            let at = self.op_name(label, scope);
                            replay.out_of_memory = Some((at, error));
                            break;
                        }
                    }
                    let now = allocator.stats().allocated.current;
                    if now > peak {
                        (peak, replay.peak_event) = (now, index);
                    }
                }
                Event::Free(id) => {
                    if let Some(block) = blocks[id as usize].take() {
                        if recorded[id as usize] {
                            allocator.finish(block);
                        } else {
                            allocator.free(block);
                        }
                    }
                }
                Event::FreeRecorded(id) => {
                    if let Some(block) = blocks[id as usize] {
                        recorded[id as usize] = true;
                        allocator.free_recorded(block);
                    }
                }
                Event::EmptyCache => allocator.empty_cache(),
                Event::ResetPeaks => {
                    allocator.reset_peaks();
                    peak = allocator.stats().allocated.current;
                    replay.peak_event = index;
                }
                Event::Mark(name) => {
                    replay.marks.push((name, allocator.stats().allocated.current));
                }
            }
        }
        replay.stats = allocator.stats();
        replay
    }

    /// The op during which the peak of a replay was, and what was alive then, largest first.
    pub fn at_peak(&self, replay: &Replay) -> (String, Vec<LiveTensor>) {
        let mut alive = vec![false; self.tensors.len()];
        let (mut label, mut scope) = ("", u32::MAX);
        for event in &self.events[..self.events.len().min(replay.peak_event + 1)] {
            match *event {
                Event::Op { label: l, scope: s } => (label, scope) = (l, s),
                Event::Alloc(id) => alive[id as usize] = true,
                Event::Free(id) => alive[id as usize] = false,
                _ => {}
            }
        }
        let live = |(id, tensor): (usize, &TraceTensor)| {
            let name = self.tensor_name(id as u32);
            alive[id].then_some(LiveTensor { name, class: tensor.class, bytes: tensor.bytes })
        };
        let mut live: Vec<LiveTensor> = self.tensors.iter().enumerate().filter_map(live).collect();
        live.sort_by_key(|l| std::cmp::Reverse(l.bytes));
        (self.op_name(label, scope), live)
    }

    /// Live bytes by class over the ops after the last [`Event::Mark`] of this name: each op
    /// with the most that was alive during it.
    pub fn timeline(&self, from: &'static str) -> Vec<TimelinePoint> {
        let start = self.events.iter().rposition(|e| *e == Event::Mark(from)).unwrap_or(0);
        let mut now = [0u64; Class::ALL.len()];
        let class = |id: u32| {
            let class = self.tensors[id as usize].class;
            Class::ALL.iter().position(|c| *c == class).unwrap_or(0)
        };
        let mut points: Vec<TimelinePoint> = Vec::new();
        let mut best = 0;
        for (index, event) in self.events.iter().enumerate() {
            match *event {
                Event::Alloc(id) => now[class(id)] += self.tensors[id as usize].bytes,
                Event::Free(id) => now[class(id)] -= self.tensors[id as usize].bytes,
                Event::Op { label, scope } if index > start => {
                    let name = self.op_name(label, scope);
                    points.push(TimelinePoint { name, bytes: now.to_vec() });
                    best = now.iter().sum();
                }
                _ => {}
            }
            if index > start
                && let Some(point) = points.last_mut()
                && now.iter().sum::<u64>() > best
            {
                best = now.iter().sum();
                point.bytes = now.to_vec();
            }
        }
        points
    }
}

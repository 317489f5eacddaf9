//! Activations that spend the time between forward and backward in host memory.
//!
//! A rewrite of the program as it is without. What a block keeps is sent off when it is
//! written, and what its backward reads is another tensor, which comes back in time. The
//! lives of both are planned like those of all others, so a copy is an op whose place in
//! the program says how long its memory is kept, and not when it runs: that is as soon
//! as its lane and what it reads are ready. A store stands where a nominal link would
//! have ended it, and a load where it must begin, so that computation waits for neither
//! and memory is held no longer than that.

use std::collections::{HashMap, VecDeque};

use super::offload::whole;
use crate::{Access, Class, Home, Lane, Op, OpKind, Phase, Program, Section, TensorId, View};

/// What a device does while its link moves a byte: on an H200 670 TFLOP/s and 3.6 TB/s
/// beside 50 GB/s. Where the link is faster than that, memory is held a little longer
/// than need be; where it is slower, computation waits, which the schedule sees.
const FLOPS_PER_BYTE: f64 = 13_400.0;
const MEMORY_PER_BYTE: f64 = 72.0;
/// Layers whose activations may be on their way in one direction at once. Beyond that
/// computation waits: the link cannot follow, and memory is what was asked for.
const LAYERS_UNDER_WAY: f64 = 2.0;

/// Moves what blocks keep to host memory, but what backward wants before it would be
/// gone.
pub(super) fn offload(mut program: Program, kept: &[Vec<TensorId>]) -> Program {
    let mut added = Added::new(&program);
    for section in program.sections.clone() {
        let stays = Stays::new(&program, &section, kept);
        let mut again: HashMap<TensorId, TensorId> = HashMap::new();
        for (stay, trip) in stays.trips() {
            let host = twin(&mut program, stay.tensor, "host", Home::Host);
            let back = twin(&mut program, stay.tensor, "back", Home::Device);
            again.insert(stay.tensor, back);
            let view = |t: TensorId| View { tensor: t, ..whole(&program, stay.tensor) };
            let (from, to) = (view(stay.tensor), view(host));
            let store = OpKind::ToHost { from, to };
            added.stores[trip.stored].push((stay.written, copy(store, Phase::Forward)));
            let (from, to) = (view(host), view(back));
            let load = OpKind::ToDevice { from, to };
            added.loads[trip.fetched].push((stay.needed, copy(load, Phase::Backward)));
        }
        let later = program.ops[section.ops].iter_mut().filter(|op| op.phase != Phase::Forward);
        later.for_each(|op| op.kind.replace(|t| again.get(&t).copied().unwrap_or(t)));
    }
    added.insert(program)
}

fn copy(kind: OpKind, phase: Phase) -> Op {
    Op { kind, phase, workspace: None }
}

/// A tensor like another, elsewhere.
fn twin(program: &mut Program, of: TensorId, place: &str, home: Home) -> TensorId {
    let mut tensor = program.tensor(of).clone();
    tensor.name = format!("{}.{place}", tensor.name);
    tensor.home = home;
    program.tensors.push(tensor);
    TensorId::new(program.tensors.len() - 1)
}

/// A tensor between its last write in forward and its first use after it.
#[derive(Clone, Copy)]
struct Stay {
    tensor: TensorId,
    bytes: f64,
    written: usize,
    needed: usize,
}

/// When a tensor is away: stored behind one op, fetched before another.
#[derive(Clone, Copy)]
struct Trip {
    stored: usize,
    fetched: usize,
}

/// What is kept in one section, and what moves beside.
struct Stays {
    stays: Vec<Stay>,
    first: usize,
    /// By op, in bytes that the link could move meanwhile.
    compute: Vec<f64>,
    /// Other copies to the host.
    stores: Vec<usize>,
    /// Other copies to the device, each with the op that wants what it brings.
    loads: Vec<(usize, usize)>,
    /// Bytes that may be on their way.
    most: f64,
}

impl Stays {
    fn new(program: &Program, section: &Section, kept: &[Vec<TensorId>]) -> Stays {
        let ops = &program.ops[section.ops.clone()];
        let mut uses: HashMap<TensorId, (Option<usize>, Option<usize>)> = HashMap::new();
        for (at, op) in section.ops.clone().zip(ops) {
            op.kind.for_each_operand(|t, access| {
                let (written, needed) = uses.entry(t).or_default();
                if op.phase != Phase::Forward {
                    needed.get_or_insert(at);
                } else if access != Access::Read {
                    *written = Some(at);
                }
            });
        }
        let (mut stores, mut loads) = (Vec::new(), Vec::new());
        let mut wanted: HashMap<TensorId, usize> = HashMap::new();
        for (at, op) in section.ops.clone().zip(ops).rev() {
            match &op.kind {
                OpKind::ToHost { .. } => stores.push(at),
                OpKind::ToDevice { to, .. } => {
                    loads.push((at, wanted.get(&to.tensor).copied().unwrap_or(section.ops.end)));
                }
                kind => kind.for_each_operand(|t, _| {
                    wanted.insert(t, at);
                }),
            }
        }
        let mut stays = Vec::new();
        let mut largest = 0.0f64;
        for layer in kept {
            let mut bytes_of_layer = 0.0;
            for tensor in layer {
                let t = program.tensor(*tensor);
                let ends = uses.get(tensor).copied().unwrap_or_default();
                let activation = t.class == Class::Activation && t.home == Home::Device;
                let (true, (Some(written), Some(needed))) = (activation, ends) else { continue };
                let bytes = t.bytes() as f64;
                bytes_of_layer += bytes;
                stays.push(Stay { tensor: *tensor, bytes, written, needed });
            }
            largest = largest.max(bytes_of_layer);
        }
        stays.sort_by_key(|stay| stay.written);
        Stays {
            stays,
            first: section.ops.start,
            compute: ops.iter().map(|op| link_bytes(program, op)).collect(),
            stores,
            loads,
            most: LAYERS_UNDER_WAY * largest,
        }
    }

    /// What leaves, and when. What the last blocks keep, backward wants before it would be
    /// gone: it stays, as long as that is no more than may be under way. Beyond that it is
    /// stored before backward begins and fetched after that, and computation waits.
    fn trips(mut self) -> Vec<(Stay, Trip)> {
        let backward = self.stays.iter().map(|stay| stay.needed).min().unwrap_or(0);
        let mut room = self.most;
        loop {
            let mut trips = self.plan();
            let hasty = |trip: &Trip| trip.stored + 1 >= trip.fetched;
            if let Some(last) = trips.iter().rposition(hasty)
                && self.stays[last].bytes <= room
            {
                room -= self.stays.remove(last).bytes;
                continue;
            }
            for (trip, stay) in trips.iter_mut().zip(&self.stays).filter(|(trip, _)| hasty(trip)) {
                trip.stored = trip.stored.min(backward.saturating_sub(2)).max(stay.written);
                trip.fetched = trip.fetched.max(backward).min(stay.needed);
            }
            return self.stays.into_iter().zip(trips).collect();
        }
    }

    /// Trips of all stays. Backward is forward from its end: what is fetched first was
    /// stored last, and begins as long before it is needed as the link takes.
    fn plan(&self) -> Vec<Trip> {
        let last = self.compute.len().saturating_sub(1);
        let out = self.stays.iter().map(|s| (s.written - self.first, s.bytes));
        let stored = under_way(&self.compute, out.collect(), self.most);
        let reversed: Vec<f64> = self.compute.iter().rev().copied().collect();
        let back = self.stays.iter().map(|s| (last - (s.needed - self.first), s.bytes));
        let fetched = under_way(&reversed, back.collect(), self.most);
        let ends = stored.into_iter().zip(fetched);
        let trips =
            ends.map(|(s, f)| Trip { stored: self.first + s, fetched: self.first + last - f });
        trips.zip(&self.stays).map(|(trip, stay)| self.in_order(*stay, trip)).collect()
    }

    /// A lane keeps its order: other copies that are ready later, or wanted later, are not
    /// waited for.
    fn in_order(&self, stay: Stay, trip: Trip) -> Trip {
        let later = self.stores.iter().copied().filter(|at| *at > stay.written);
        let stored = later.map(|at| at - 1).fold(trip.stored, usize::min);
        let later = self.loads.iter().filter(|(at, by)| *at > stored && *by > stay.needed);
        Trip { stored, fetched: later.map(|(at, _)| *at).fold(trip.fetched, usize::min) }
    }
}

/// For transfers (the op behind which each can begin, its bytes), the op behind which
/// each has ended: one after the other, beside what computes.
fn under_way(compute: &[f64], transfers: Vec<(usize, f64)>, most: f64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..transfers.len()).collect();
    order.sort_by_key(|n| transfers[*n].0);
    let mut waiting = order.into_iter().peekable();
    let mut ended = vec![compute.len().saturating_sub(1); transfers.len()];
    // Transfer and the time of its end.
    let mut queue: VecDeque<(usize, f64)> = VecDeque::new();
    let (mut now, mut link, mut bytes) = (0.0f64, 0.0f64, 0.0f64);
    for (at, meanwhile) in compute.iter().enumerate() {
        while bytes > most
            && let Some((transfer, end)) = queue.pop_front()
        {
            now = now.max(end);
            bytes -= transfers[transfer].1;
            ended[transfer] = at.saturating_sub(1);
        }
        now += meanwhile;
        while let Some(transfer) = waiting.next_if(|n| transfers[*n].0 == at) {
            link = link.max(now) + transfers[transfer].1;
            bytes += transfers[transfer].1;
            queue.push_back((transfer, link));
        }
        while let Some((transfer, _)) = queue.pop_front_if(|(_, end)| *end <= now) {
            bytes -= transfers[transfer].1;
            ended[transfer] = at;
        }
    }
    ended
}

/// Bytes that a nominal link moves while an op computes.
fn link_bytes(program: &Program, op: &Op) -> f64 {
    if program.lane(&op.kind) != Lane::Compute {
        return 0.0;
    }
    let work = program.work(op);
    (work.matmul_flops / FLOPS_PER_BYTE).max(work.bytes / MEMORY_PER_BYTE)
}

/// Copies to add, by op, each with the op that it is for: those with the earliest go
/// first.
struct Added {
    /// Behind an op.
    stores: Vec<Vec<(usize, Op)>>,
    /// Before an op.
    loads: Vec<Vec<(usize, Op)>>,
}

impl Added {
    fn new(program: &Program) -> Added {
        let none = || vec![Vec::new(); program.ops.len()];
        Added { stores: none(), loads: none() }
    }

    fn insert(mut self, program: Program) -> Program {
        let Program { tensors, ops: old, sections } = program;
        let mut old: Vec<Option<Op>> = old.into_iter().map(Some).collect();
        let mut ops = Vec::with_capacity(old.len());
        let take = |ops: &mut Vec<Op>, copies: &mut Vec<(usize, Op)>| {
            copies.sort_by_key(|(at, _)| *at);
            ops.extend(copies.drain(..).map(|(_, op)| op));
        };
        let mut all = Vec::with_capacity(sections.len());
        for section in sections {
            let start = ops.len();
            for at in section.ops.clone() {
                take(&mut ops, &mut self.loads[at]);
                ops.extend(old[at].take());
                take(&mut ops, &mut self.stores[at]);
            }
            all.push(Section { ops: start..ops.len(), ..section });
        }
        Program { tensors, ops, sections: all }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_end_one_after_the_other() {
        let compute = [1.0; 10];
        // The second waits for the first; the third has the link to itself.
        let transfers = vec![(0, 2.5), (1, 1.0), (6, 0.5)];
        assert_eq!(under_way(&compute, transfers.clone(), 100.0), [3, 4, 7]);
        // Whatever their order in the list.
        let reversed = transfers.into_iter().rev().collect();
        assert_eq!(under_way(&compute, reversed, 100.0), [7, 4, 3]);
        // What outlasts the program ends with it.
        assert_eq!(under_way(&compute, vec![(8, 50.0)], 100.0), [9]);
    }

    #[test]
    fn computation_waits_where_too_much_is_under_way() {
        let compute = [1.0; 6];
        let transfers: Vec<(usize, f64)> = (0..4).map(|at| (at, 10.0)).collect();
        // With room for two, the third makes computation wait for the first.
        assert_eq!(under_way(&compute, transfers.clone(), 20.0)[..2], [2, 3]);
        assert_eq!(under_way(&compute, transfers, 100.0), [5; 4]);
    }
}

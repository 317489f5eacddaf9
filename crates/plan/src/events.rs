//! What each op waits for on the other lanes.
//!
//! Two ops conflict where they touch the same bytes of a slab and one of them
//! writes: by address, not by tensor, so that memory which one tensor hands on to
//! the next is safe as well. An op waits for the latest op of each other lane
//! that it conflicts with, unless something it waits for anyway is behind that.

use std::ops::Range;

use plimsoll_program::{Access, Lane, Op, OpKind, Program, Shard, TensorId, View};

use crate::Layout;

const LANES: usize = Lane::ALL.len();

/// For each op, the ops on other lanes that must have ended before it starts.
///
/// Within a section alone: all lanes join at its end. Both waits and lanes are as
/// few as can be: none is implied by another, or by what ran before on the lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waits {
    lists: Vec<Vec<usize>>,
}

impl Waits {
    /// The waits of a whole program at its layout.
    pub fn new(program: &Program, layout: &Layout) -> Waits {
        let mut lists = vec![Vec::new(); program.ops.len()];
        for section in &program.sections {
            section_waits(program, layout, section.ops.clone(), &mut lists);
        }
        Waits { lists }
    }

    /// What op `at` waits for, in program order.
    pub fn of(&self, at: usize) -> &[usize] {
        &self.lists[at]
    }

    /// The first op behind `at` and before `end` that cannot share a launch with
    /// it: one of another lane, or one that waits for such.
    pub fn launch_end(&self, program: &Program, at: usize, end: usize) -> usize {
        let lane_of = |at: usize| program.lane(&program.ops[at].kind);
        let lane = lane_of(at);
        let apart = |next: &usize| lane_of(*next) != lane || !self.of(*next).is_empty();
        (at + 1..end).find(apart).unwrap_or(end)
    }

    /// Whether anybody waits for each op.
    pub fn awaited(&self) -> Vec<bool> {
        let mut awaited = vec![false; self.lists.len()];
        self.lists.iter().flatten().for_each(|op| awaited[*op] = true);
        awaited
    }
}

/// Bytes that an op touches: slab, first, end, and whether it writes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Touch {
    start: u64,
    end: u64,
    writes: bool,
    /// Of a tensor that every rank has in full the bytes of a piece of the rank's own
    /// part, counted from where that begins: which rank it is, nobody knows here.
    piece: Option<(u64, u64)>,
}

impl Touch {
    fn conflicts(&self, other: &Touch) -> bool {
        let meet = self.start < other.end && other.start < self.end;
        let apart = match (self.piece, other.piece) {
            (Some(a), Some(b)) if (self.start, self.end) == (other.start, other.end) => {
                a.0 >= b.1 || b.0 >= a.1
            }
            _ => false,
        };
        (self.writes || other.writes) && meet && !apart
    }
}

/// What an op touches; the slabs of the two homes lie far apart.
fn touches(program: &Program, layout: &Layout, op: &Op) -> Vec<Touch> {
    let base = |t: TensorId| {
        layout.offset(t) + ((crate::layout::home_index(program.tensor(t).home) as u64) << 62)
    };
    if let OpKind::ToDevice { from, to } | OpKind::ToHost { from, to } = &op.kind {
        let piece = |view: &View, writes| {
            let t = program.tensor(view.tensor);
            let size = t.dtype.bytes();
            let (first, bytes) = ((view.first() * size) as u64, (view.elements() * size) as u64);
            let start = base(view.tensor);
            if t.is_piece(view) && matches!(t.shard, Shard::Padded { .. }) {
                let piece = Some((first, first + bytes));
                return Touch { start, end: start + t.bytes(), writes, piece };
            }
            Touch { start: start + first, end: start + first + bytes, writes, piece: None }
        };
        return vec![piece(from, false), piece(to, true)];
    }
    let mut touches = Vec::new();
    op.for_each_tensor(|t, access| {
        let (start, bytes) = (base(t), program.tensor(t).bytes());
        let writes = access != Access::Read;
        touches.push(Touch { start, end: start + bytes, writes, piece: None });
    });
    touches
}

fn section_waits(program: &Program, layout: &Layout, ops: Range<usize>, lists: &mut [Vec<usize>]) {
    let lane = |at: usize| program.lane(&program.ops[at].kind).index();
    let mut by_lane: [Vec<usize>; LANES] = Default::default();
    ops.clone().for_each(|at| by_lane[lane(at)].push(at));
    if by_lane.iter().filter(|ops| !ops.is_empty()).count() < 2 {
        return;
    }
    let first = ops.start;
    let touched: Vec<Vec<Touch>> =
        program.ops[ops.clone()].iter().map(|op| touches(program, layout, op)).collect();
    let conflict = |a: usize, b: usize| {
        let (a, b) = (&touched[a - first], &touched[b - first]);
        a.iter().any(|x| b.iter().any(|y| x.conflicts(y)))
    };
    // How far each lane is known to have come, as one past an op: when the next op
    // of a lane starts, and when an op has ended.
    let mut known = [[first; LANES]; LANES];
    let mut ended: Vec<[usize; LANES]> = Vec::with_capacity(ops.len());
    for at in ops {
        let mine = lane(at);
        let mut candidates = Vec::new();
        for other in (0..LANES).filter(|other| *other != mine) {
            let before = by_lane[other].partition_point(|op| *op < at);
            // Anything that is known to be over needs no look.
            let open = by_lane[other][..before].iter().rev();
            let open = open.take_while(|op| **op >= known[mine][other]);
            candidates.extend(open.copied().find(|op| conflict(*op, at)));
        }
        let implied =
            |op: &usize| candidates.iter().any(|by| by != op && ended[by - first][lane(*op)] > *op);
        let mut waits: Vec<usize> = candidates.iter().copied().filter(|op| !implied(op)).collect();
        waits.sort_unstable();
        for op in &waits {
            for (mine, other) in known[mine].iter_mut().zip(ended[op - first]) {
                *mine = other.max(*mine);
            }
        }
        let mut end = known[mine];
        end[mine] = at + 1;
        ended.push(end);
        known[mine] = end;
        lists[at] = waits;
    }
}

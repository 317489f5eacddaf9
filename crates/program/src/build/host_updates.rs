//! Updates on the host: optimizer state stays where it lives, in host memory, and the
//! device sends gradients and weights and gets weights back.
//!
//! Piece by piece through a ring of staging tensors in host memory, each step of the way
//! on a lane of its own: gradient and weight come, the host's cores update, the weight
//! goes back. A weight that lives in host memory is updated in place.

use std::collections::VecDeque;
use std::ops::Range;

use plimsoll_arch::{Architecture, DType};

use super::offload::{cutter, offloaded_updates, ring_slots, row_pieces, staging, state_of, whole};
use crate::{Access, Home, Op, OpKind, Phase, Program, Recipe, Section, Shard, TensorId, View};

/// Moves the state of updates to host memory, and the updates to the host.
pub(super) fn offload(mut program: Program, arch: &Architecture, recipe: &Recipe) -> Program {
    let (updates, most) = offloaded_updates(&program, recipe);
    let mut rings: Vec<Ring> = Vec::new();
    // By op, where it is an update on the host.
    let mut pieces: Vec<Option<Update>> = program.ops.iter().map(|_| None).collect();
    for update in &updates {
        for (view, _) in &update.state {
            program.tensors[view.tensor.index()].home = Home::Host;
        }
        let form = Form::of(&program, &program.ops[update.op].kind);
        let ring = rings.iter().position(|r| r.form == form).unwrap_or_else(|| {
            rings.push(Ring { form, pieces: 0, largest: 0, slots: Vec::new() });
            rings.len() - 1
        });
        let rows = row_pieces(&update.param, most);
        let largest = rows.iter().map(Range::len).max().unwrap_or(0) * update.param.cols;
        rings[ring].pieces += rows.len();
        rings[ring].largest = rings[ring].largest.max(largest);
        pieces[update.op] = Some(Update { ring, rows });
    }
    for (n, ring) in rings.iter_mut().enumerate() {
        ring.reserve(&mut program, n, arch.num_hidden_layers);
    }
    let scalars = Scalars::new(&mut program, &updates.iter().map(|u| u.op).collect::<Vec<_>>());
    let sections = std::mem::take(&mut program.sections);
    let old = std::mem::take(&mut program.ops);
    for section in sections {
        let start = program.ops.len();
        let queues = rings.iter().map(|_| 0).collect();
        let mut writer = Writer {
            program,
            rings: &rings,
            scalars: &scalars,
            scalars_sent: false,
            next: queues,
            waiting: None,
            returns: VecDeque::new(),
        };
        for at in section.ops.clone() {
            match &pieces[at] {
                // A gradient leaves while the next one is computed: not into its memory.
                Some(update) => {
                    let before = writer.waiting.replace((&old[at], update));
                    writer.update(before);
                }
                None => writer.other(&old[at]),
            }
        }
        program = writer.finish();
        program.sections.push(Section { ops: start..program.ops.len(), ..section });
    }
    program
}

/// An update in pieces: rows of its parameter, or elements of a rank's part of it.
struct Update {
    ring: usize,
    rows: Vec<Range<usize>>,
}

/// What comes to the host for an update.
#[derive(Clone, Copy, PartialEq)]
struct Form {
    grad: DType,
    /// None where the parameter lives there.
    param: Option<DType>,
}

impl Form {
    fn of(program: &Program, update: &OpKind) -> Form {
        let Some((param, grad, _)) = update.update_operands() else {
            unreachable!("pieces are of updates")
        };
        let (param, grad) = (program.tensor(param.tensor), program.tensor(grad.tensor));
        let param = (param.home == Home::Device).then_some(param.dtype);
        Form { grad: grad.dtype, param }
    }
}

/// Staging tensors for pieces of one form, which take turns in them.
struct Ring {
    form: Form,
    pieces: usize,
    /// Elements of the largest piece.
    largest: usize,
    slots: Vec<Slot>,
}

#[derive(Clone, Copy)]
struct Slot {
    grad: TensorId,
    param: Option<TensorId>,
}

impl Ring {
    fn reserve(&mut self, program: &mut Program, number: usize, layers: usize) {
        for slot in 0..ring_slots(self.pieces, layers) {
            let mut room = |what: &str, dtype: DType| {
                let name = format!("staging.{slot}.{what}.{number}");
                let shape = vec![1, self.largest];
                staging(program, (name, Home::Host), shape, dtype, Shard::Whole)
            };
            let grad = room("grad", self.form.grad);
            self.slots.push(Slot { grad, param: self.form.param.map(|t| room("param", t)) });
        }
    }
}

/// Inputs of all updates: what changes from step to step, and the clipping factor; each
/// on the device, and where the host reads it.
struct Scalars {
    step: Option<(TensorId, TensorId)>,
    norm: Option<(TensorId, TensorId)>,
}

impl Scalars {
    fn new(program: &mut Program, updates: &[usize]) -> Scalars {
        let first = updates.first().map(|at| program.ops[*at].kind.clone());
        let (step, norm) = match first {
            Some(
                OpKind::AdamW { step, norm, .. }
                | OpKind::AdamW8bit { step, norm, .. }
                | OpKind::Sgd { step, norm, .. },
            ) => (Some(step), norm),
            _ => (None, None),
        };
        let mut twin = |tensor: TensorId| {
            let t = program.tensor(tensor).clone();
            let name = (format!("staging.{}", t.name), Home::Host);
            (tensor, staging(program, name, t.shape, t.dtype, Shard::Whole))
        };
        Scalars { step: step.map(&mut twin), norm: norm.map(&mut twin) }
    }

    fn pairs(&self) -> impl Iterator<Item = (TensorId, TensorId)> {
        self.step.into_iter().chain(self.norm)
    }

    /// Where the host reads a tensor.
    fn there(&self, tensor: TensorId) -> TensorId {
        self.pairs().find(|(here, _)| *here == tensor).map_or(tensor, |(_, there)| there)
    }
}

/// A weight on its way back to the device, and the place in a ring that it comes from.
struct Return {
    ring: usize,
    slot: usize,
    op: Op,
}

/// Writes one section.
struct Writer<'a> {
    program: Program,
    rings: &'a [Ring],
    scalars: &'a Scalars,
    scalars_sent: bool,
    /// By ring, the number of the next piece.
    next: Vec<usize>,
    /// The update that is to be written next.
    waiting: Option<(&'a Op, &'a Update)>,
    /// Sent back only when somebody wants the weight or the place: a lane keeps its order,
    /// and what else comes to the device need not wait for the host.
    returns: VecDeque<Return>,
}

impl<'a> Writer<'a> {
    /// An op that stays on the device, behind all that it must find done.
    fn other(&mut self, op: &Op) {
        let mut touched: Vec<(TensorId, Access)> = Vec::new();
        op.for_each_tensor(|t, access| touched.push((t, access)));
        if let Some((update, _)) = self.waiting
            && let Some((param, grad, _)) = update.kind.update_operands()
        {
            let clash = |(t, access): &(TensorId, Access)| {
                *t == param.tensor || (*t == grad.tensor && *access != Access::Read)
            };
            if touched.iter().any(clash) {
                let before = self.waiting.take();
                self.update(before);
            }
        }
        let wanted = |r: &Return| match &r.op.kind {
            OpKind::ToDevice { to, .. } => touched.iter().any(|(t, _)| *t == to.tensor),
            _ => false,
        };
        if let Some(last) = self.returns.iter().rposition(wanted) {
            self.send_back(last + 1);
        }
        self.program.ops.push(op.clone());
    }

    fn send_back(&mut self, count: usize) {
        self.program.ops.extend(self.returns.drain(..count).map(|r| r.op));
    }

    /// All pieces of an update.
    fn update(&mut self, update: Option<(&'a Op, &'a Update)>) {
        let Some((op, update)) = update else { return };
        if !std::mem::replace(&mut self.scalars_sent, true) {
            for (here, there) in self.scalars.pairs() {
                let (from, to) = (whole(&self.program, here), whole(&self.program, there));
                self.program.ops.push(copy(OpKind::ToHost { from, to }, op.phase));
            }
        }
        update.rows.iter().for_each(|rows| self.piece(op, update.ring, rows));
    }

    fn piece(&mut self, op: &Op, ring: usize, rows: &Range<usize>) {
        let slots = &self.rings[ring].slots;
        let slot = self.next[ring] % slots.len();
        self.next[ring] += 1;
        if let Some(guest) = self.returns.iter().rposition(|r| (r.ring, r.slot) == (ring, slot)) {
            self.send_back(guest + 1);
        }
        let Slot { grad, param } = slots[slot];
        let mut update = op.clone();
        let (mut operand, mut copies) = (0, Vec::new());
        let mut origin = None;
        {
            let program = &self.program;
            let cut = cutter(program, &op.kind, rows);
            let state = state_of(&op.kind);
            update.kind.map_update(|view| {
                // Parameter and gradient come first.
                let scales = operand >= 2 && state[operand - 2].1;
                let piece = cut(view, scales);
                operand += 1;
                let there = match operand {
                    1 => param,
                    2 => Some(grad),
                    _ => None,
                };
                let Some(there) = there else { return piece };
                let staged = View { rows: 1, cols: piece.elements(), ..whole(program, there) };
                if operand == 1 {
                    origin = Some(piece);
                }
                copies.push((piece, staged));
                staged
            });
        }
        update.kind.map_scalars(|t| self.scalars.there(t));
        update.kind.set_origin(origin);
        // The gradient first: it is what waits for memory.
        for (from, to) in copies.iter().rev() {
            self.program.ops.push(copy(OpKind::ToHost { from: *from, to: *to }, op.phase));
        }
        self.program.ops.push(update);
        if let Some((to, from)) = copies.first().filter(|_| param.is_some()) {
            let op = copy(OpKind::ToDevice { from: *from, to: *to }, op.phase);
            self.returns.push_back(Return { ring, slot, op });
        }
    }

    fn finish(mut self) -> Program {
        let last = self.waiting.take();
        self.update(last);
        self.send_back(self.returns.len());
        self.program
    }
}

fn copy(kind: OpKind, phase: Phase) -> Op {
    Op { kind, phase, workspace: None }
}

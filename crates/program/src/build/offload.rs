//! Offload: a program whose weights or optimizer state live in host memory and visit
//! the device when they are used; [`super::activations`] does the like for activations.
//!
//! A rewrite of the program as it is without: the same ops in the same order, on
//! staging tensors, with copies between them. Staging tensors have places of their
//! own, so that what is computed beside never waits for the link: a copy waits for
//! the staging tensor's last guest alone. Bits do not change.

use plimsoll_arch::{Architecture, DType};
use plimsoll_quant::STATE_BLOCK;

use super::builder::Builder;
use super::{activations, host_updates};
use crate::op::SCALES;
use crate::{
    Access, Class, Home, Op, OpKind, Phase, Program, Recipe, Section, Shard, Tensor, TensorId,
    UpdateOn, View,
};

/// Layers whose weights are on the device at once.
const WEIGHT_SLOTS: usize = 2;
/// Layers whose optimizer state fits in its staging tensors.
const STATE_LAYERS: usize = 2;
/// Elements of one piece of state: 16 MiB where they take a byte each. Smaller
/// models have smaller pieces, so that there are a few of them.
const MOST_ELEMENTS: usize = 1 << 24;
const LEAST_ELEMENTS: usize = 4096;
/// Pieces begin at multiples of this: whole blocks of state and wide accesses.
const PIECE_ALIGNMENT: usize = 2048;

/// Moves what the recipe wants to host memory.
pub(super) fn offload(b: Builder) -> Program {
    let (arch, recipe) = (b.arch, b.recipe);
    let (mut program, kept) = b.finish();
    if recipe.offload.weights {
        let groups = weight_groups(&mut program, arch);
        program = visit(program, &groups, recipe.update_on);
    }
    if recipe.offload.optimizer {
        program = match recipe.update_on {
            UpdateOn::Device => stream_state(program, arch, recipe),
            UpdateOn::Host => host_updates::offload(program, arch, recipe),
        };
    }
    if !kept.is_empty() {
        program = activations::offload(program, &kept);
    }
    program
}

/// Tensors that take turns in a few staging tensors of their shape.
struct Group {
    slots: Vec<TensorId>,
    /// Member n is a guest of slot n modulo their number.
    members: Vec<TensorId>,
}

impl Group {
    fn slot(&self, tensor: TensorId) -> Option<usize> {
        self.members.iter().position(|m| *m == tensor).map(|n| n % self.slots.len())
    }
}

/// A tensor that holds one guest after the other, by its name, shape, type and part.
pub(super) fn staging(
    program: &mut Program,
    (name, home): (String, Home),
    shape: Vec<usize>,
    dtype: DType,
    shard: Shard,
) -> TensorId {
    let (class, resident) = (Class::Staging, true);
    program.tensors.push(Tensor { name, shape, dtype, class, home, shard, resident });
    TensorId::new(program.tensors.len() - 1)
}

fn find(program: &Program, class: Class, name: &str) -> Vec<TensorId> {
    let all = program.tensors.iter().enumerate();
    all.filter(|(_, t)| t.class == class && t.name == name).map(|(n, _)| TensorId::new(n)).collect()
}

/// The matrices of all blocks, those of one kind in one group. Norms and biases stay
/// on the device, and so do the embedding and the head, of which nothing is alike.
fn weight_groups(program: &mut Program, arch: &Architecture) -> Vec<Group> {
    let mut groups = Vec::new();
    for kind in ["attn.qkv", "attn.o", "mlp.gate_up", "mlp.down"] {
        let names = (0..arch.num_hidden_layers).map(|l| format!("layers.{l}.{kind}"));
        let members: Vec<TensorId> =
            names.flat_map(|name| find(program, Class::Weight, &name)).collect();
        let Some(first) = members.first() else { continue };
        let Tensor { shape, dtype, shard, .. } = program.tensor(*first).clone();
        let slot = |n| {
            let name = (format!("staging.{n}.{kind}"), Home::Device);
            staging(program, name, shape.clone(), dtype, shard)
        };
        let slots = (0..WEIGHT_SLOTS.min(members.len())).map(slot).collect();
        groups.push(Group { slots, members });
    }
    groups
}

/// A stay of one tensor in a staging tensor, from its first op to its last.
struct Visit {
    tensor: TensorId,
    first: usize,
    last: usize,
    /// It comes with what it holds.
    loaded: bool,
    last_write: Option<usize>,
}

/// Ops to add behind others, stores before loads: a load may take the place of what
/// is stored.
struct Additions {
    /// By section, before its first op.
    start: Vec<Vec<Op>>,
    /// By op.
    stores: Vec<Vec<Op>>,
    loads: Vec<Vec<Op>>,
}

impl Additions {
    fn new(program: &Program) -> Additions {
        let none = || vec![Vec::new(); program.ops.len()];
        Additions { start: vec![Vec::new(); program.sections.len()], stores: none(), loads: none() }
    }

    fn apply(mut self, program: Program) -> Program {
        let Program { tensors, ops, sections } = program;
        let mut old: Vec<Option<Op>> = ops.into_iter().map(Some).collect();
        let (mut ops, mut new_sections) = (Vec::with_capacity(old.len()), Vec::new());
        for (n, section) in sections.into_iter().enumerate() {
            let start = ops.len();
            ops.append(&mut self.start[n]);
            for at in section.ops.clone() {
                ops.extend(old[at].take());
                ops.append(&mut self.stores[at]);
                ops.append(&mut self.loads[at]);
            }
            new_sections.push(Section { ops: start..ops.len(), ..section });
        }
        Program { tensors, ops, sections: new_sections }
    }
}

/// Moves all members of the groups to host memory, but those that never leave their
/// staging tensor between their first use and their last.
///
/// A guest comes as soon as the one before it is done: while that one's neighbours
/// are at work; and where it is updated on the host, behind that.
fn visit(mut program: Program, groups: &[Group], update_on: UpdateOn) -> Program {
    let mut additions = Additions::new(&program);
    let sections: Vec<Section> = program.sections.clone();
    for group in groups {
        let mut stays: Vec<Vec<Vec<Visit>>> = Vec::new();
        for section in &sections {
            stays.push(visits(&program, group, section, update_on));
        }
        for (section, slots) in stays.iter().enumerate() {
            for (slot, visits) in slots.iter().enumerate() {
                for (n, visit) in visits.iter().enumerate() {
                    let resident = program.tensor(visit.tensor).resident;
                    let again = visits[n + 1..].iter().any(|v| v.tensor == visit.tensor);
                    let [host, here] =
                        [visit.tensor, group.slots[slot]].map(|t| whole(&program, t));
                    if let (Some(at), true) = (visit.last_write, resident || again) {
                        let phase = program.ops[at].phase;
                        let kind = OpKind::ToHost { from: here, to: host };
                        additions.stores[at].push(Op { kind, phase, workspace: None });
                    }
                    if visit.loaded {
                        let phase = program.ops[visit.first].phase;
                        let kind = OpKind::ToDevice { from: host, to: here };
                        let before = n.checked_sub(1).map(|n| visits[n].last);
                        let changed = (sections[section].ops.start..visit.first).rfind(|at| {
                            changes_at_home(&program.ops[*at], visit.tensor, update_on)
                        });
                        let list = match before.max(changed) {
                            Some(at) => &mut additions.loads[at],
                            None => &mut additions.start[section],
                        };
                        list.push(Op { kind, phase, workspace: None });
                    }
                    if resident || again || visit.loaded {
                        program.tensors[visit.tensor.index()].home = Home::Host;
                    }
                }
            }
        }
        for op in &mut program.ops {
            let at_home = |t: &TensorId| changes_at_home(op, *t, update_on);
            let stays = op.kind.subject().filter(at_home);
            let slot = |t| group.slot(t).filter(|_| Some(t) != stays);
            op.kind.replace(|t| slot(t).map_or(t, |slot| group.slots[slot]));
        }
    }
    additions.apply(program)
}

/// Whether an op is the update of a parameter in host memory, which is no visit.
fn changes_at_home(op: &Op, param: TensorId, update_on: UpdateOn) -> bool {
    let updated = op.kind.updated_parameter();
    update_on == UpdateOn::Host && updated.is_some_and(|view| view.tensor == param)
}

/// The stays in each slot of a group during one section.
fn visits(
    program: &Program,
    group: &Group,
    section: &Section,
    update_on: UpdateOn,
) -> Vec<Vec<Visit>> {
    let mut slots: Vec<Vec<Visit>> = group.slots.iter().map(|_| Vec::new()).collect();
    // What the last guest of a slot is a copy of was updated at home: it comes again.
    let mut changed = vec![false; slots.len()];
    for at in section.ops.clone() {
        program.ops[at].kind.for_each_operand(|tensor, access| {
            let Some(slot) = group.slot(tensor) else { return };
            let visits = &mut slots[slot];
            if changes_at_home(&program.ops[at], tensor, update_on) {
                changed[slot] |= visits.last().is_some_and(|v| v.tensor == tensor);
                return;
            }
            if visits.last().is_none_or(|v| v.tensor != tensor || changed[slot]) {
                changed[slot] = false;
                let loaded = access != Access::Write;
                visits.push(Visit { tensor, first: at, last: at, loaded, last_write: None });
            }
            if let Some(visit) = visits.last_mut() {
                visit.last = at;
                if access != Access::Read {
                    visit.last_write = Some(at);
                }
            }
        });
    }
    slots
}

/// What a rank has of a tensor.
pub(super) fn whole(program: &Program, tensor: TensorId) -> View {
    let t = program.tensor(tensor);
    if let Shard::Part { part, .. } = t.shard {
        return View::of_part(tensor, part, 0, part);
    }
    View { tensor, row: 0, col: 0, rows: t.rows(), cols: t.cols(), stride: t.cols() }
}

/// Staging tensors for pieces of state of one form, in a ring.
struct Ring {
    /// Types of the state's tensors, and whether they are scales of blocks.
    form: Vec<(DType, bool)>,
    slots: Vec<Vec<TensorId>>,
}

/// Some rows of a parameter, or elements of a rank's part of it, with its state.
struct Piece {
    /// The update that it is a part of.
    op: usize,
    rows: std::ops::Range<usize>,
    ring: usize,
}

/// A parameter as what its pieces are cut from: its rows, or the elements of a part.
pub(super) fn sliced(program: &Program, param: View) -> View {
    match program.tensor(param.tensor).shard {
        Shard::Whole => param,
        Shard::Padded { part, .. } | Shard::Part { part, .. } => {
            View { row: 0, col: 0, rows: part, cols: 1, stride: 1, ..param }
        }
    }
}

/// A tensor of an update's state, and whether it holds scales of blocks.
pub(super) type StateView = (View, bool);

/// The state of an update, in the order of its operands.
pub(super) fn state_of(update: &OpKind) -> Vec<StateView> {
    let state = update.update_operands().map(|(.., state)| state);
    let state = state.into_iter().flatten().enumerate();
    state.filter_map(|(n, view)| Some((view?, SCALES.contains(&n)))).collect()
}

/// An update whose state is in host memory: its op, its parameter as pieces are cut from
/// it, and its state.
pub(super) struct Offloaded {
    pub op: usize,
    pub param: View,
    pub state: Vec<StateView>,
}

/// The updates whose state lives in host memory: those of matrices. That of norms and
/// biases, a few thousandths of all, stays. So does the embedding's where updates run
/// inside backward and memory does not matter most: its gradient is complete last, and
/// nothing would be left to hide its way behind.
///
/// And the elements of a piece of them, at most.
pub(super) fn offloaded_updates(program: &Program, recipe: &Recipe) -> (Vec<Offloaded>, usize) {
    let keep_embedding = recipe.optimizer_in_backward && !recipe.offload.weights;
    let offloaded = |(at, op): (usize, &Op)| {
        let (param, ..) = op.kind.update_operands()?;
        let t = program.tensor(param.tensor);
        let stays = t.shape.len() < 2 || (keep_embedding && t.name == "embed_tokens");
        let state = state_of(&op.kind);
        let param = sliced(program, param);
        (!stays && !state.is_empty()).then_some(Offloaded { op: at, param, state })
    };
    let updates: Vec<Offloaded> = program.ops.iter().enumerate().filter_map(offloaded).collect();
    let total: usize = updates.iter().map(|update| update.param.elements()).sum();
    (updates, (total / 32).clamp(LEAST_ELEMENTS, MOST_ELEMENTS))
}

/// Staging tensors in a ring of `pieces` of all layers.
pub(super) fn ring_slots(pieces: usize, layers: usize) -> usize {
    let count = (STATE_LAYERS.min(layers) * pieces).div_ceil(layers).max(4);
    count.min(pieces)
}

/// Moves the state of [`offloaded_updates`] to host memory.
///
/// Piece by piece, in the order of the updates: state comes in, the update works on
/// it, it goes out, and what comes a ring later takes its place.
fn stream_state(mut program: Program, arch: &Architecture, recipe: &Recipe) -> Program {
    let (updates, most) = offloaded_updates(&program, recipe);
    let mut rings: Vec<Ring> = Vec::new();
    let mut pieces: Vec<Piece> = Vec::new();
    for Offloaded { op, param, state } in &updates {
        let dtype = |view: &View| program.tensor(view.tensor).dtype;
        let form: Vec<_> = state.iter().map(|(view, scales)| (dtype(view), *scales)).collect();
        let ring = rings.iter().position(|r| r.form == form).unwrap_or_else(|| {
            rings.push(Ring { form, slots: Vec::new() });
            rings.len() - 1
        });
        for rows in row_pieces(param, most) {
            pieces.push(Piece { op: *op, rows, ring });
        }
        for (view, _) in state {
            program.tensors[view.tensor.index()].home = Home::Host;
        }
    }
    for (n, ring) in rings.iter_mut().enumerate() {
        let mine = || pieces.iter().filter(|p| p.ring == n);
        let cols = |op: usize| updates.iter().find(|u| u.op == op).map_or(0, |u| u.param.cols);
        let largest = mine().map(|p| p.rows.len() * cols(p.op)).max().unwrap_or(0);
        for slot in 0..ring_slots(mine().count(), arch.num_hidden_layers) {
            let form = ring.form.clone().into_iter().enumerate();
            let tensors = form.map(|(part, (dtype, scales))| {
                let cols = if scales { largest.div_ceil(STATE_BLOCK) } else { largest };
                let name = (format!("staging.{slot}.state.{n}.{part}"), Home::Device);
                staging(&mut program, name, vec![1, cols], dtype, Shard::Whole)
            });
            ring.slots.push(tensors.collect());
        }
    }
    let sections = std::mem::take(&mut program.sections);
    let old = std::mem::take(&mut program.ops);
    for section in sections {
        let start = program.ops.len();
        let mine = pieces.iter().filter(|p| section.ops.contains(&p.op));
        let mut queues: Vec<Vec<Staged>> = rings.iter().map(|_| Vec::new()).collect();
        for piece in mine {
            let queue = &mut queues[piece.ring];
            let ring = &rings[piece.ring];
            let slot = queue.len() % ring.slots.len();
            queue.push(Staged::new(&program, &old[piece.op], piece, ring, slot));
        }
        let first_loads: Vec<Op> = queues
            .iter()
            .zip(&rings)
            .flat_map(|(queue, ring)| queue.iter().take(ring.slots.len()))
            .flat_map(Staged::loads)
            .collect();
        let first_loads_at = first_loads_at(&old, &section, &pieces);
        let mut next: Vec<usize> = vec![0; rings.len()];
        for at in section.ops.clone() {
            if at == first_loads_at {
                program.ops.extend(first_loads.iter().cloned());
            }
            let here = pieces.iter().position(|p| p.op == at);
            let Some(ring) = here.map(|n| pieces[n].ring) else {
                program.ops.push(old[at].clone());
                continue;
            };
            let (queue, slots) = (&queues[ring], rings[ring].slots.len());
            while let Some(staged) = queue.get(next[ring]).filter(|s| s.op == at) {
                program.ops.push(staged.update.clone());
                program.ops.extend(staged.stores());
                if let Some(later) = queue.get(next[ring] + slots) {
                    program.ops.extend(later.loads());
                }
                next[ring] += 1;
            }
        }
        program.sections.push(Section { ops: start..program.ops.len(), ..section });
    }
    program
}

/// Where the first state is sent for: at the start of a section, but behind weights
/// that the forward pass waits for.
fn first_loads_at(ops: &[Op], section: &Section, pieces: &[Piece]) -> usize {
    let first = pieces.iter().map(|p| p.op).find(|op| section.ops.contains(op));
    let before = section.ops.start..first.unwrap_or(section.ops.start);
    let weights = before.rev().find(|at| matches!(ops[*at].kind, OpKind::ToDevice { .. }));
    weights.map_or(section.ops.start, |at| at + 1)
}

/// Rows of a parameter in pieces of about the same size, of at most about `most`
/// elements.
pub(super) fn row_pieces(param: &View, most: usize) -> Vec<std::ops::Range<usize>> {
    let count = param.elements().div_ceil(most).max(1);
    let step = PIECE_ALIGNMENT / gcd(param.cols.max(1), PIECE_ALIGNMENT);
    let rows = param.rows.div_ceil(count).next_multiple_of(step);
    (0..param.rows).step_by(rows).map(|row| row..param.rows.min(row + rows)).collect()
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The update of one piece on its staging tensors.
struct Staged {
    op: usize,
    update: Op,
    /// In host memory, and where it is staged.
    state: Vec<(View, View)>,
    phase: Phase,
}

impl Staged {
    fn new(program: &Program, op: &Op, piece: &Piece, ring: &Ring, slot: usize) -> Staged {
        let mut update = op.clone();
        let mut state = Vec::new();
        let mut operand = 0;
        let cut = cutter(program, &op.kind, &piece.rows);
        update.kind.map_update(|view| {
            operand += 1;
            match operand - 1 {
                // Parameter and gradient are where they were.
                0 | 1 => cut(view, false),
                n => {
                    let (_, scales) = ring.form[n - 2];
                    let host = cut(view, scales);
                    let here = whole(program, ring.slots[slot][n - 2]);
                    let here = View { rows: 1, cols: host.elements(), ..here };
                    state.push((host, here));
                    here
                }
            }
        });
        Staged { op: piece.op, update, state, phase: op.phase }
    }

    fn loads(&self) -> impl Iterator<Item = Op> + '_ {
        self.state.iter().map(|(host, here)| Op {
            kind: OpKind::ToDevice { from: *host, to: *here },
            phase: self.phase,
            workspace: None,
        })
    }

    fn stores(&self) -> impl Iterator<Item = Op> + '_ {
        self.state.iter().map(|(host, here)| Op {
            kind: OpKind::ToHost { from: *here, to: *host },
            phase: self.phase,
            workspace: None,
        })
    }
}

/// Of an operand of an update, the piece that belongs to `rows` of the [`sliced`]
/// parameter; of scales, those of its blocks.
pub(super) fn cutter(
    program: &Program,
    update: &OpKind,
    rows: &std::ops::Range<usize>,
) -> impl Fn(View, bool) -> View {
    let Some((param, ..)) = update.update_operands() else { unreachable!("pieces are of updates") };
    let all = sliced(program, param);
    let part = all.rows_at(rows.start, rows.len());
    let (first, elements) = (part.first() - all.first(), part.elements());
    let blocks = (first / STATE_BLOCK, elements.div_ceil(STATE_BLOCK));
    let rows = rows.clone();
    move |view, scales| match program.tensor(view.tensor).shard {
        Shard::Whole if scales => view.cols_at(blocks.0, blocks.1),
        Shard::Whole => view.rows_at(rows.start, rows.len()),
        Shard::Padded { part, .. } | Shard::Part { part, .. } => {
            let (first, elements) = if scales { blocks } else { (first, elements) };
            View::of_part(view.tensor, part, first, elements)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_all_rows_and_begin_at_whole_blocks() {
        let view = |rows: usize, cols: usize| View {
            tensor: TensorId::new(0),
            row: 0,
            col: 0,
            rows,
            cols,
            stride: cols,
        };
        for (rows, cols, most) in [
            (28672, 4096, MOST_ELEMENTS),
            (4096, 14336, MOST_ELEMENTS),
            (128_256, 4096, MOST_ELEMENTS),
            (6144, 4096, MOST_ELEMENTS),
            (151_936, 896, MOST_ELEMENTS),
            (300, 96, LEAST_ELEMENTS),
            (17, 7, LEAST_ELEMENTS),
            (1, 1, LEAST_ELEMENTS),
        ] {
            let pieces = row_pieces(&view(rows, cols), most);
            assert_eq!((pieces[0].start, pieces.last().unwrap().end), (0, rows));
            for pair in pieces.windows(2) {
                assert_eq!(pair[0].end, pair[1].start);
                assert!((pair[0].end * cols).is_multiple_of(PIECE_ALIGNMENT));
            }
            // Alignment makes a piece a little larger where rows are odd.
            let largest = pieces.iter().map(|p| p.len() * cols).max().unwrap();
            assert!(largest <= most + cols * PIECE_ALIGNMENT, "{largest}");
            if rows * cols > 4 * MOST_ELEMENTS {
                assert!(largest > most / 2 && largest <= most + most / 8, "{largest}");
            }
        }
    }
}

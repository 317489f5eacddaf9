//! What the ranks of a step say to each other.
//!
//! A unit is what travels together: the embedding, a block, or the head. With
//! ZeRO-3 a unit's weights are gathered while the one before it computes, and are
//! gone after it; gradients of a unit are reduced while the next one's backward
//! runs. To that end a gather is written one unit early, and what a reduction reads is
//! held for one unit more: in between, both units have memory of their own, and the
//! lanes are free to overlap.

use plimsoll_arch::DType;

use super::builder::{Builder, Layer, Linear, Model, Param, Weight};
use crate::{Class, OpKind, QuantizedMatrix, QuantizedPart, Shard, TensorId};

/// Weights that travel together.
pub(super) struct Unit {
    pub params: Vec<Param>,
    /// Weights of which a rank has its part alone.
    divided: Vec<TensorId>,
}

/// The units of a model, in the order of the forward pass.
pub(super) struct Units {
    pub embed: Unit,
    pub layers: Vec<Unit>,
    /// The last norm and the head; with a tied head, its weight is that of `embed`.
    pub head: Unit,
}

impl Units {
    pub fn new(b: &Builder, model: &Model) -> Units {
        let mut head = vec![model.norm];
        let mut head_codes = Vec::new();
        match &model.lm_head {
            Some(linear) => {
                linear.for_each(&mut |p| head.push(p));
                codes(linear, &mut head_codes);
            }
            None => head_codes.push(model.embed_tokens.value),
        }
        Units {
            embed: Unit::new(b, vec![model.embed_tokens], Vec::new()),
            layers: model.layers.iter().map(|l| Unit::of_layer(b, l)).collect(),
            head: Unit::new(b, head, head_codes),
        }
    }

    /// All units, in the order of the forward pass.
    pub fn all(&self) -> impl DoubleEndedIterator<Item = &Unit> {
        [&self.embed].into_iter().chain(&self.layers).chain([&self.head])
    }
}

/// Gradients of a unit on their way.
#[must_use]
pub(super) struct Reduction {
    /// What other ranks may still be reading.
    held: Vec<TensorId>,
    /// Sums, and the gradients that they become.
    sums: Vec<(TensorId, TensorId)>,
    /// They are added to those of earlier micro-batches.
    add: bool,
}

impl Unit {
    fn new(b: &Builder, params: Vec<Param>, others: Vec<TensorId>) -> Unit {
        let weights = params.iter().map(|p| p.value).chain(others);
        let divided = weights.filter(|w| b.is_part(*w)).collect();
        Unit { params, divided }
    }

    fn of_layer(b: &Builder, layer: &Layer) -> Unit {
        let (mut params, mut others) = (Vec::new(), Vec::new());
        layer.for_each(&mut |p| params.push(p));
        for linear in [&layer.qkv, &layer.o, &layer.gate_up, &layer.down] {
            codes(linear, &mut others);
        }
        Unit::new(b, params, others)
    }
}

/// The codes of a matrix in four bits; its scales, a few per cent of them, are on every rank.
fn codes(linear: &Linear, all: &mut Vec<TensorId>) {
    if let Weight::Quantized(w) = &linear.weight {
        all.extend(w.parts.iter().map(|p| p.codes));
    }
}

impl Builder<'_> {
    fn is_part(&self, tensor: TensorId) -> bool {
        matches!(self.shard(tensor), Shard::Part { .. })
    }

    /// The weight of a parameter: the gathered one while there is one.
    pub fn value(&self, param: Param) -> TensorId {
        self.gathered.get(&param.value).copied().unwrap_or(param.value)
    }

    /// A matrix in four bits, with its codes gathered.
    pub fn quantized_value(&self, w: &QuantizedMatrix) -> QuantizedMatrix {
        let codes = |t: TensorId| self.gathered.get(&t).copied().unwrap_or(t);
        let part = |p: &QuantizedPart| QuantizedPart { codes: codes(p.codes), ..p.clone() };
        QuantizedMatrix { parts: w.parts.iter().map(part).collect(), ..w.clone() }
    }

    /// Gathers the weights of a unit of which this rank has a part.
    pub fn gather(&mut self, unit: &Unit) {
        let from: Vec<TensorId> =
            unit.divided.iter().copied().filter(|t| !self.gathered.contains_key(t)).collect();
        if from.is_empty() {
            return;
        }
        let to: Vec<TensorId> = from.iter().map(|t| self.whole_of(*t)).collect();
        self.gathered.extend(from.iter().copied().zip(to.iter().copied()));
        self.op(OpKind::AllGather { from, to });
    }

    /// A tensor with room for all parts of one.
    fn whole_of(&mut self, part: TensorId) -> TensorId {
        let Shard::Part { ranks, part: elements } = self.shard(part) else {
            unreachable!("only parts are gathered")
        };
        let (name, shape) = (format!("{}.gathered", self.name(part)), self.shape(part));
        let (dtype, shard) = (self.dtype(part), Shard::Padded { ranks, part: elements });
        self.divided(name, &shape, dtype, Class::Weight, shard)
    }

    /// Forgets the gathered weights of a unit.
    pub fn release(&mut self, unit: &Unit) {
        for tensor in &unit.divided {
            self.gathered.remove(tensor);
        }
    }

    /// New tensors for the gradients of which only parts outlive their unit.
    pub fn begin_micro_batch(&mut self) {
        for index in 0..self.training.len() {
            let Some(training) = &self.training[index] else { continue };
            let reduced = training.reduced;
            let Shard::Part { ranks, part } = self.shard(reduced) else { continue };
            let name = self.name(reduced).trim_end_matches(".part").to_owned();
            let (shape, dtype) = (self.shape(reduced), self.dtype(reduced));
            let shard = Shard::Padded { ranks, part };
            let gradient = self.divided(name, &shape, dtype, Class::Gradient, shard);
            if let Some(training) = &mut self.training[index] {
                training.gradient = gradient;
            }
        }
    }

    /// Whether the gradient of a parameter is added to what an earlier micro-batch left.
    pub fn accumulates(&self, param: Param) -> bool {
        let whole = self.training(param).is_some_and(|t| t.gradient == t.reduced);
        self.accumulate && whole
    }

    /// Whether gradients are reduced inside every micro-batch: where only parts are
    /// kept, and where there is only one.
    pub fn reduces_in_backward(&self) -> bool {
        let s = self.recipe.sharding;
        s.ranks > 1 && (s.zero > 1 || self.recipe.accumulate == 1)
    }

    /// Whether the gradient of a parameter is reduced with its unit, and not with all
    /// other small ones at the end.
    pub fn reduced_with_unit(&self, param: Param) -> bool {
        let shape = self.shape(param.value);
        let s = self.recipe.sharding;
        self.trains(param) && (s.part(&shape).is_some() || (s.zero == 0 && shape.len() > 1))
    }

    /// Sums the gradients of a unit over the ranks; they are there when that is finished.
    pub fn reduce(&mut self, unit: &Unit) -> Reduction {
        let s = self.recipe.sharding;
        let trained = unit.params.iter().filter(|p| self.reduced_with_unit(**p));
        let pairs: Vec<(TensorId, TensorId)> =
            trained.filter_map(|p| self.training(*p).map(|t| (t.gradient, t.reduced))).collect();
        let mut reduction = Reduction { held: Vec::new(), sums: Vec::new(), add: false };
        if s.ranks == 1 || pairs.is_empty() {
            return reduction;
        }
        let wide = s.reduce != self.recipe.precision;
        let from: Vec<TensorId> =
            pairs.iter().map(|(g, _)| if wide { self.converted(*g) } else { *g }).collect();
        if s.zero == 0 {
            self.op(OpKind::AllReduce { tensors: from.clone() });
            if wide {
                reduction.sums = from.into_iter().zip(pairs.into_iter().map(|(g, _)| g)).collect();
            }
            return reduction;
        }
        let add = s.zero > 1 && self.accumulate;
        let to: Vec<TensorId> = if wide || add {
            from.iter().map(|t| self.part_of(*t)).collect()
        } else {
            // With ZeRO-1 that is the gradient itself, in place.
            pairs.iter().map(|(_, reduced)| *reduced).collect()
        };
        self.op(OpKind::ReduceScatter { from: from.clone(), to: to.clone() });
        if from != to {
            reduction.held = from;
        }
        if wide || add {
            reduction.sums = to.into_iter().zip(pairs.into_iter().map(|(_, r)| r)).collect();
            reduction.add = add;
        }
        reduction
    }

    /// Puts what was summed in its place, and lets go of what it was summed from.
    pub fn finish_reduction(&mut self, reduction: Reduction) {
        if !reduction.held.is_empty() {
            self.op(OpKind::Hold { tensors: reduction.held });
        }
        for (x, out) in reduction.sums {
            self.op(OpKind::Convert { x, out, accumulate: reduction.add });
        }
    }

    /// A gradient in the type in which it is summed.
    fn converted(&mut self, x: TensorId) -> TensorId {
        let name = format!("{}.wide", self.name(x));
        let (shape, shard) = (self.shape(x), self.shard(x));
        let out = self.divided(name, &shape, self.recipe.sharding.reduce, Class::Gradient, shard);
        self.op(OpKind::Convert { x, out, accumulate: false });
        out
    }

    /// A tensor with room for this rank's part of one.
    fn part_of(&mut self, whole: TensorId) -> TensorId {
        let Shard::Padded { ranks, part } = self.shard(whole) else {
            unreachable!("only padded tensors are scattered")
        };
        let (name, shape) = (format!("{}.sum", self.name(whole)), self.shape(whole));
        let (dtype, shard) = (self.dtype(whole), Shard::Part { ranks, part });
        self.divided(name, &shape, dtype, Class::Gradient, shard)
    }

    /// Sums what is left over the ranks: gradients of vectors, and the loss.
    pub fn reduce_rest(&mut self, model: &Model) {
        if self.recipe.sharding.ranks == 1 {
            return;
        }
        let mut tensors = Vec::new();
        model.for_each(|p| {
            if !self.reduced_with_unit(p) {
                tensors.extend(self.gradient(p));
            }
        });
        tensors.push(self.loss);
        self.op(OpKind::AllReduce { tensors });
    }

    /// The norm of all gradients, wherever they are.
    pub fn grad_norm(&mut self) {
        let (grads, norm, max_norm) = (self.gradients(), self.grad_norm, self.recipe.max_grad_norm);
        if self.recipe.sharding.ranks == 1 || self.recipe.sharding.zero == 0 {
            self.op(OpKind::GradNorm { grads, norm, max_norm });
            return;
        }
        let squares = self.matrix("grad_squares".to_owned(), 1, 1, DType::F32);
        self.op(OpKind::GradSquares { grads, squares });
        self.op(OpKind::AllReduce { tensors: vec![squares] });
        self.op(OpKind::ClipFactor { squares, norm, max_norm });
    }

    /// Updated parts of a unit's weights to all ranks.
    pub fn gather_updated(&mut self, unit: &Unit) {
        let padded = |p: &&Param| matches!(self.shard(p.value), Shard::Padded { .. });
        let to: Vec<TensorId> = unit.params.iter().filter(padded).map(|p| p.value).collect();
        if !to.is_empty() {
            self.op(OpKind::AllGather { from: to.clone(), to });
        }
    }
}

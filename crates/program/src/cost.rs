//! How much work an op is: floating-point operations, and the fewest bytes
//! that it must move to and from memory (each operand once).

use crate::op::{Access, Op, OpKind};
use crate::{Program, Shard, TensorId, View};

/// Work of one op.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Floating-point operations; a multiply-add counts two.
    pub flops: f64,
    /// Those of `flops` that run on matrix units.
    pub matmul_flops: f64,
    /// Bytes read plus bytes written.
    pub bytes: f64,
}

impl Program {
    /// Whether a rank has a part of a tensor alone.
    pub fn is_part(&self, tensor: TensorId) -> bool {
        matches!(self.tensor(tensor).shard, Shard::Part { .. })
    }

    /// Elements of an operand that an update touches: of what is divided over the ranks,
    /// one rank's part or a piece of it.
    fn updated(&self, view: &View) -> usize {
        let t = self.tensor(view.tensor);
        let all = t.shard == Shard::Whole || t.is_piece(view);
        if all { view.elements() } else { t.part_stored() }
    }

    /// The work of one op of this program.
    pub fn work(&self, op: &Op) -> Work {
        let elements = |t: TensorId| self.tensor(t).elements() as f64;
        // Of what one rank answers for.
        let part = |t: TensorId| self.tensor(t).part_stored() as f64;
        let matmul = |flops: f64| (flops, flops);
        let plain = |flops: f64| (flops, 0.0);
        let (flops, matmul_flops) = match &op.kind {
            OpKind::Linear { x, y, .. } => matmul(2.0 * (y.rows * y.cols * x.cols) as f64),
            OpKind::LinearQuantized { x, y, .. } => matmul(2.0 * (y.rows * y.cols * x.cols) as f64),
            // A lookup and a product each.
            OpKind::Dequantize { out, .. } => plain(2.0 * elements(*out)),
            OpKind::Dropout { x, .. } => plain(4.0 * elements(*x)),
            OpKind::LinearBackwardInput { d_y, d_x, .. } => {
                matmul(2.0 * (d_y.rows * d_y.cols * d_x.cols) as f64)
            }
            OpKind::LinearBackwardWeight { d_y, x, .. } => {
                matmul(2.0 * (d_y.rows * d_y.cols * x.cols) as f64)
            }
            // Two products over the visible pairs forward, five backward.
            OpKind::Attention { shape, .. } => {
                matmul(4.0 * shape.pairs() * (shape.heads * shape.head_dim) as f64)
            }
            OpKind::AttentionBackward { shape, .. } => {
                matmul(10.0 * shape.pairs() * (shape.heads * shape.head_dim) as f64)
            }
            OpKind::AttentionCached { shape, capacity, .. } => {
                let rows = (shape.batch * shape.seq * shape.heads * shape.head_dim) as f64;
                matmul(4.0 * rows * *capacity as f64)
            }
            OpKind::RmsNorm { x, .. } => plain(4.0 * elements(*x)),
            OpKind::RmsNormBackward { x, .. } => plain(8.0 * elements(*x)),
            OpKind::HeadNorm { qkv, .. } => plain(4.0 * elements(*qkv)),
            OpKind::HeadNormBackward { d_qkv, .. } => plain(8.0 * elements(*d_qkv)),
            OpKind::Rope { qkv, .. } => plain(3.0 * elements(*qkv)),
            OpKind::SwiGlu { act, .. } => plain(5.0 * elements(*act)),
            OpKind::SwiGluBackward { d_act, .. } => plain(10.0 * elements(*d_act)),
            OpKind::CrossEntropy { logits, .. } => plain(5.0 * elements(*logits)),
            OpKind::BiasBackward { d_y, .. } => plain(elements(*d_y)),
            OpKind::Argmax { x, .. } => plain(elements(*x)),
            OpKind::EmbedBackward { d_x, .. } => plain(elements(*d_x)),
            OpKind::SumLosses { losses, .. } => plain(elements(*losses)),
            OpKind::GradNorm { grads, .. } => plain(grads.iter().map(|g| 2.0 * elements(*g)).sum()),
            OpKind::AdamW { param, .. } => plain(14.0 * self.updated(param) as f64),
            OpKind::AdamW8bit { param, .. } => plain(50.0 * self.updated(param) as f64),
            OpKind::Sgd { param, .. } => plain(4.0 * self.updated(param) as f64),
            OpKind::GradSquares { grads, .. } => plain(grads.iter().map(|g| 2.0 * part(*g)).sum()),
            OpKind::Convert { x, .. } => plain(self.tensor(*x).stored() as f64),
            OpKind::Embed { .. }
            | OpKind::GatherRows { .. }
            | OpKind::AllGather { .. }
            | OpKind::ReduceScatter { .. }
            | OpKind::AllReduce { .. }
            | OpKind::Hold { .. }
            | OpKind::ClipFactor { .. }
            | OpKind::ToDevice { .. }
            | OpKind::ToHost { .. } => plain(0.0),
        };
        Work { flops, matmul_flops, bytes: self.bytes_moved(&op.kind) }
    }

    fn bytes_moved(&self, kind: &OpKind) -> f64 {
        let bytes = |t: TensorId| self.tensor(t).bytes() as f64;
        let part = |t: TensorId| {
            let tensor = self.tensor(t);
            (tensor.part_stored() * tensor.dtype.bytes()) as f64
        };
        let view = |v: &View| (v.elements() * self.tensor(v.tensor).dtype.bytes()) as f64;
        let sum = |accumulate: bool| if accumulate { 2.0 } else { 1.0 };
        match kind {
            OpKind::Linear { x, w, bias, add, y, .. } => {
                view(x)
                    + view(w)
                    + view(y)
                    + bias.map_or(0.0, bytes)
                    + add.as_ref().map_or(0.0, view)
            }
            OpKind::LinearBackwardInput { d_y, w, d_x, accumulate, .. } => {
                view(d_y) + view(w) + sum(*accumulate) * view(d_x)
            }
            OpKind::LinearBackwardWeight { d_y, x, d_w, accumulate } => {
                view(d_y) + view(x) + sum(*accumulate) * view(d_w)
            }
            OpKind::LinearQuantized { x, w, bias, add, y } => {
                let mut weights = 0.0;
                w.for_each_tensor(|t| weights += bytes(t));
                view(x)
                    + weights
                    + view(y)
                    + bias.map_or(0.0, bytes)
                    + add.as_ref().map_or(0.0, view)
            }
            // A lookup reads only the rows it wants.
            OpKind::Embed { ids, out, .. } => bytes(*ids) + 2.0 * bytes(*out),
            OpKind::EmbedBackward { ids, d_x, d_table, accumulate } => {
                let rows = if *accumulate { 2.0 * bytes(*d_x) } else { bytes(*d_table) };
                bytes(*ids) + bytes(*d_x) + rows
            }
            OpKind::GatherRows { rows, out, .. } => bytes(*rows) + 2.0 * bytes(*out),
            OpKind::CrossEntropy { logits, backward, .. } => sum(*backward) * bytes(*logits),
            OpKind::AdamW { step, .. }
            | OpKind::AdamW8bit { step, .. }
            | OpKind::Sgd { step, .. } => {
                let view =
                    |v: &View| (self.updated(v) * self.tensor(v.tensor).dtype.bytes()) as f64;
                let update = kind.update_operands();
                let moved = update.map_or(0.0, |(param, grad, state)| {
                    2.0 * view(&param)
                        + view(&grad)
                        + 2.0 * state.iter().flatten().map(view).sum::<f64>()
                });
                moved + bytes(*step)
            }
            OpKind::GradSquares { grads, squares } => {
                grads.iter().map(|g| part(*g)).sum::<f64>() + bytes(*squares)
            }
            OpKind::Hold { .. } => 0.0,
            OpKind::Convert { x, out, accumulate } => {
                let parts = [x, out].iter().any(|t| self.is_part(**t));
                let bytes = |t: TensorId| if parts { part(t) } else { bytes(t) };
                bytes(*x) + sum(*accumulate) * bytes(*out)
            }
            // Once over the link.
            OpKind::ToDevice { from, .. } | OpKind::ToHost { from, .. } => view(from),
            _ => {
                let mut total = 0.0;
                kind.for_each_operand(|t, access| {
                    total += bytes(t) * if access == Access::Update { 2.0 } else { 1.0 };
                });
                total
            }
        }
    }
}

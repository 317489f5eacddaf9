//! Programs of one family of ops: several copies of an op, each with operands of
//! its own.

use plimsoll_arch::DType::{self, Bf16, F32, I32};
use plimsoll_plan::Orientation;
use plimsoll_program::{
    AttentionShape, Class, Codebook, Home, NESTED_BLOCK, Nested, Op, OpKind, Phase, Program,
    QUANT_BLOCK, QuantizedMatrix, QuantizedPart, Section, Shard, StepScalars, Target, Tensor,
    TensorId, View,
};

use crate::grid::Grid;

/// What a tensor holds before the ops run.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Fill {
    /// Random numbers that nothing overwrites.
    Source,
    /// Whatever: it is written before it is read.
    Result,
    /// Random numbers that the op changes.
    Changing,
    /// Random numbers from 0 on, that the op changes.
    Positive,
    /// Random integers from 0 to below.
    Below(usize),
    /// These words.
    Words(Vec<u32>),
}

/// A program in the making.
#[derive(Default)]
pub(crate) struct Case {
    pub program: Program,
    pub fills: Vec<Fill>,
}

impl Case {
    /// The op that `make` adds, `copies` times.
    pub fn repeat(
        target: &dyn Target,
        copies: usize,
        make: &mut dyn FnMut(&mut Case) -> OpKind,
    ) -> Case {
        let mut case = Case::default();
        for _ in 0..copies {
            let kind = make(&mut case);
            let bytes = target.workspace_bytes(&kind, &case.program);
            let workspace = (bytes > 0).then(|| {
                case.add("workspace", &[bytes as usize], DType::U8, Class::Workspace, Fill::Result)
            });
            case.program.ops.push(Op { kind, phase: Phase::Forward, workspace });
        }
        case.program.sections = vec![Section { name: "case", ops: 0..copies, repeat: 1 }];
        case
    }

    fn add(
        &mut self,
        name: &str,
        shape: &[usize],
        dtype: DType,
        class: Class,
        fill: Fill,
    ) -> TensorId {
        let id = TensorId::new(self.program.tensors.len());
        self.program.tensors.push(Tensor {
            name: format!("{name}.{}", id.index()),
            shape: shape.to_vec(),
            dtype,
            class,
            home: Home::Device,
            shard: Shard::Whole,
            resident: fill != Fill::Result,
        });
        self.fills.push(fill);
        id
    }

    fn with(&mut self, shape: &[usize], dtype: DType, fill: Fill) -> TensorId {
        self.add("operand", shape, dtype, Class::Activation, fill)
    }

    fn source(&mut self, shape: &[usize], dtype: DType) -> TensorId {
        self.with(shape, dtype, Fill::Source)
    }

    fn result(&mut self, shape: &[usize], dtype: DType) -> TensorId {
        self.with(shape, dtype, Fill::Result)
    }

    fn changing(&mut self, shape: &[usize], dtype: DType) -> TensorId {
        self.with(shape, dtype, Fill::Changing)
    }

    fn below(&mut self, shape: &[usize], limit: usize) -> TensorId {
        self.with(shape, I32, Fill::Below(limit))
    }

    fn step(&mut self) -> TensorId {
        self.with(&[StepScalars::WORDS], F32, Fill::Words(step_words()))
    }

    fn view(&self, tensor: TensorId) -> View {
        let t = self.program.tensor(tensor);
        View { tensor, row: 0, col: 0, rows: t.rows(), cols: t.cols(), stride: t.cols() }
    }
}

/// The scalars of some step.
pub(crate) fn step_words() -> Vec<u32> {
    let scalars = StepScalars {
        learning_rate: 1e-5,
        bias_correction1: 0.1,
        bias_correction2: 0.001,
        loss_scale: 1e-3,
        seed: 7,
    };
    scalars.to_words().iter().map(|w| w.to_bits()).collect()
}

/// A product with a (rows, cols) result summed over `inner`.
pub(crate) fn product(
    c: &mut Case,
    orientation: Orientation,
    dtype: DType,
    (rows, cols, inner): (usize, usize, usize),
) -> OpKind {
    match orientation {
        Orientation::Forward => {
            let (x, w) = (c.source(&[rows, inner], dtype), c.source(&[cols, inner], dtype));
            let y = c.result(&[rows, cols], dtype);
            let (x, w, y) = (c.view(x), c.view(w), c.view(y));
            OpKind::Linear { x, w, bias: None, add: None, y, scale: 1.0 }
        }
        Orientation::BackwardInput => {
            let (d_y, w) = (c.source(&[rows, inner], dtype), c.source(&[inner, cols], dtype));
            let d_x = c.result(&[rows, cols], dtype);
            let (d_y, w, d_x) = (c.view(d_y), c.view(w), c.view(d_x));
            OpKind::LinearBackwardInput { d_y, w, d_x, accumulate: false, scale: 1.0 }
        }
        Orientation::BackwardWeight => {
            let (d_y, x) = (c.source(&[inner, rows], dtype), c.source(&[inner, cols], dtype));
            let d_w = c.result(&[rows, cols], dtype);
            let (d_y, x, d_w) = (c.view(d_y), c.view(x), c.view(d_w));
            OpKind::LinearBackwardWeight { d_y, x, d_w, accumulate: false }
        }
    }
}

/// Causal attention of whole rows; a key-value head for four query heads.
pub(crate) fn attention(
    c: &mut Case,
    dtype: DType,
    backward: bool,
    head_dim: usize,
    (seq, heads): (usize, usize),
) -> OpKind {
    // Rows of up to 32 heads, as models have.
    let batch = heads.div_ceil(32).min(heads);
    let heads = heads / batch;
    let kv_heads = (heads / 4).max(1);
    let shape = AttentionShape { batch, seq, heads, kv_heads, head_dim, window: None };
    let width = (heads + 2 * kv_heads) * head_dim;
    let qkv = c.source(&[batch, seq, width], dtype);
    let doc_start = c.below(&[batch, seq], 1);
    let (out_shape, lse_shape) = ([batch, seq, heads * head_dim], [batch, seq, heads]);
    if backward {
        let (out, lse) = (c.source(&out_shape, dtype), c.source(&lse_shape, F32));
        let d_out = c.source(&out_shape, dtype);
        let d_qkv = c.result(&[batch, seq, width], dtype);
        OpKind::AttentionBackward { qkv, doc_start, out, lse, d_out, d_qkv, shape }
    } else {
        let (out, lse) = (c.result(&out_shape, dtype), c.result(&lse_shape, F32));
        OpKind::Attention { qkv, doc_start, out, lse, shape }
    }
}

/// Makes one op of a streaming family.
pub(crate) type Make = fn(&mut Case, DType, usize, usize) -> OpKind;

/// Every family that has a curve, and one op of it over (rows, C), with the sizes
/// around it that models have.
pub(crate) const STREAMS: [Make; 23] = [
    |c, dtype, rows, cols| {
        let (x, weight) = (c.source(&[rows, cols], dtype), c.source(&[cols], dtype));
        let (out, rstd) = (c.result(&[rows, cols], dtype), c.result(&[rows, 1], F32));
        OpKind::RmsNorm { x, weight, out, rstd, eps: 1e-5 }
    },
    |c, dtype, rows, cols| {
        let (x, weight) = (c.source(&[rows, cols], dtype), c.source(&[cols], dtype));
        let (d_out, rstd) = (c.source(&[rows, cols], dtype), c.source(&[rows, 1], F32));
        let (d_x, d_weight) = (c.changing(&[rows, cols], dtype), c.result(&[cols], dtype));
        let (overwrite, accumulate) = (false, false);
        let d_weight = Some(d_weight);
        OpKind::RmsNormBackward { d_out, x, weight, rstd, d_x, overwrite, d_weight, accumulate }
    },
    |c, dtype, rows, cols| {
        let (shape, width) = heads(rows, cols);
        let qkv_raw = c.source(&[1, rows, width], dtype);
        let (q_weight, k_weight) = (c.source(&[64], dtype), c.source(&[64], dtype));
        let qkv = c.result(&[1, rows, width], dtype);
        let rstd = c.result(&[1, rows, shape.heads + shape.kv_heads], F32);
        OpKind::HeadNorm { qkv_raw, q_weight, k_weight, qkv, rstd, shape, eps: 1e-6 }
    },
    |c, dtype, rows, cols| {
        let (shape, width) = heads(rows, cols);
        let qkv_raw = c.source(&[1, rows, width], dtype);
        let (q_weight, k_weight) = (c.source(&[64], dtype), c.source(&[64], dtype));
        let rstd = c.source(&[1, rows, shape.heads + shape.kv_heads], F32);
        let d_qkv = c.changing(&[1, rows, width], dtype);
        let (d_q_weight, d_k_weight) = (c.result(&[64], dtype), c.result(&[64], dtype));
        OpKind::HeadNormBackward {
            d_qkv,
            qkv_raw,
            q_weight,
            k_weight,
            rstd,
            d_q_weight: Some(d_q_weight),
            d_k_weight: Some(d_k_weight),
            shape,
            accumulate: false,
        }
    },
    |c, dtype, rows, cols| {
        let (shape, width) = heads(rows, cols);
        let qkv = c.changing(&[1, rows, width], dtype);
        let positions = c.below(&[1, rows], rows);
        let table = c.source(&[rows, 2, shape.head_dim / 2], F32);
        OpKind::Rope { qkv, positions, table, shape, inverse: false }
    },
    |c, dtype, rows, cols| {
        let gate_up = c.source(&[rows, 6 * cols], dtype);
        OpKind::SwiGlu { gate_up, act: c.result(&[rows, 3 * cols], dtype) }
    },
    |c, dtype, rows, cols| {
        let gate_up = c.changing(&[rows, 6 * cols], dtype);
        OpKind::SwiGluBackward { gate_up, d_act: c.source(&[rows, 3 * cols], dtype) }
    },
    |c, dtype, rows, cols| cross_entropy(c, dtype, rows, cols, true),
    |c, dtype, rows, cols| cross_entropy(c, dtype, rows, cols, false),
    |c, _, rows, _| {
        let losses = c.source(&[1, rows, 1], F32);
        let step = c.step();
        OpKind::SumLosses { losses, step, total: c.result(&[1], F32), accumulate: false }
    },
    |c, dtype, rows, cols| {
        let (ids, table) = (c.below(&[rows, 1], 8 * cols), c.source(&[8 * cols, cols], dtype));
        OpKind::Embed { ids, table, out: c.result(&[rows, cols], dtype) }
    },
    |c, dtype, rows, cols| {
        let (ids, d_x) = (c.below(&[rows, 1], 8 * cols), c.source(&[rows, cols], dtype));
        let d_table = c.result(&[8 * cols, cols], dtype);
        OpKind::EmbedBackward { ids, d_x, d_table, accumulate: false }
    },
    |c, dtype, rows, cols| {
        let x = c.source(&[rows, cols], dtype);
        let rows_wanted = c.below(&[rows], rows);
        OpKind::GatherRows { x, rows: rows_wanted, out: c.result(&[rows, cols], dtype) }
    },
    |c, dtype, rows, cols| {
        let d_y = c.source(&[rows, cols], dtype);
        OpKind::BiasBackward { d_y, d_bias: c.result(&[cols], dtype), accumulate: false }
    },
    |c, dtype, rows, cols| {
        let grads = (0..4).map(|_| c.source(&[rows, cols], dtype)).collect();
        OpKind::GradNorm { grads, norm: c.result(&[2], F32), max_norm: Some(1.0) }
    },
    |c, dtype, rows, cols| adamw(c, dtype, rows, cols, F32),
    |c, dtype, rows, cols| adamw(c, dtype, rows, cols, Bf16),
    |c, dtype, rows, cols| {
        let shape = [rows, cols];
        let blocks = [(rows * cols).div_ceil(256)];
        let (param, grad) = (c.changing(&shape, dtype), c.source(&shape, dtype));
        let (m, v) = (c.changing(&shape, DType::U8), c.changing(&shape, DType::U8));
        let m_absmax = c.with(&blocks, F32, Fill::Positive);
        let v_absmax = c.with(&blocks, F32, Fill::Positive);
        OpKind::AdamW8bit {
            param: c.view(param),
            grad: c.view(grad),
            m: c.view(m),
            v: c.view(v),
            m_absmax: c.view(m_absmax),
            v_absmax: c.view(v_absmax),
            master: None,
            step: c.step(),
            norm: None,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
            stream: 0,
            origin: None,
        }
    },
    |c, dtype, rows, cols| {
        let blocks = (rows * cols).div_ceil(QUANT_BLOCK);
        let part = QuantizedPart {
            rows,
            codes: c.source(&[(rows * cols).div_ceil(2)], DType::U8),
            absmax: c.source(&[blocks], DType::U8),
            nested: Some(Nested {
                absmax: c.source(&[blocks.div_ceil(NESTED_BLOCK)], F32),
                offset: c.source(&[1], F32),
            }),
        };
        let w = QuantizedMatrix { codebook: Codebook::Nf4, parts: vec![part], rows, cols };
        OpKind::Dequantize { w, out: c.result(&[rows, cols], dtype) }
    },
    |c, dtype, rows, cols| {
        let (x, out) = (c.source(&[rows, cols], dtype), c.result(&[rows, cols], dtype));
        let step = c.step();
        OpKind::Dropout { x, out, step, probability: 0.1, stream: 0, accumulate: false }
    },
    |c, dtype, rows, cols| sgd(c, dtype, rows, cols, false),
    |c, dtype, rows, cols| sgd(c, dtype, rows, cols, true),
    |c, dtype, rows, cols| {
        // One new token of each of 4 rows against `rows` positions.
        let (shape, width) = heads(1, cols);
        let shape = AttentionShape { batch: 4, seq: 1, ..shape };
        let kv = [4, rows, shape.kv_heads * shape.head_dim];
        let qkv = c.source(&[4, 1, width], dtype);
        let last = vec![rows as u32 - 1; 4];
        let start = c.with(&[4], I32, Fill::Words(last));
        let (k_cache, v_cache) = (c.changing(&kv, dtype), c.changing(&kv, dtype));
        let out = c.result(&[4, 1, shape.heads * shape.head_dim], dtype);
        OpKind::AttentionCached { qkv, start, k_cache, v_cache, out, shape, capacity: rows }
    },
];

/// Adds one op, with operands of its own, to a case.
pub(crate) type MakeOne<'a> = dyn FnMut(&mut Case) -> OpKind + 'a;

/// Calls `f` with every op that a grid times.
pub(crate) fn each_op(grid: &Grid, f: &mut dyn FnMut(&mut MakeOne)) {
    for dtype in [Bf16, F32] {
        for make in STREAMS {
            for (rows, cols) in &grid.streams {
                f(&mut |c| make(c, dtype, *rows, *cols));
            }
        }
        for part in grid.attention.of(dtype) {
            for (head_dim, _) in &part.head_dims {
                for (seq, heads) in
                    part.seqs.iter().flat_map(|t| part.heads.iter().map(move |h| (*t, *h)))
                {
                    f(&mut |c| attention(c, dtype, false, *head_dim, (seq, heads)));
                    f(&mut |c| attention(c, dtype, true, *head_dim, (seq, heads)));
                }
            }
        }
        let products = grid.products.of(dtype);
        for orientation in Orientation::ALL {
            for short in &products.short {
                for long in &products.long {
                    for inner in &products.inner {
                        let shape = (*short.min(long), *short.max(long), *inner);
                        f(&mut |c| product(c, orientation, dtype, shape));
                    }
                }
            }
        }
    }
}

/// Heads of 64 that are C wide together, and the columns of their qkv.
fn heads(rows: usize, cols: usize) -> (AttentionShape, usize) {
    let heads = (cols / 64).max(1);
    let kv_heads = (heads / 4).max(1);
    let shape = AttentionShape { batch: 1, seq: rows, heads, kv_heads, head_dim: 64, window: None };
    (shape, (heads + 2 * kv_heads) * 64)
}

/// A chunk of logits: an eighth of the rows, 32 C of vocabulary.
fn cross_entropy(c: &mut Case, dtype: DType, rows: usize, cols: usize, backward: bool) -> OpKind {
    let (rows, vocab) = (rows.div_ceil(8), 32 * cols);
    let fill = if backward { Fill::Changing } else { Fill::Source };
    let logits = c.with(&[rows, vocab], dtype, fill);
    let labels = c.below(&[1, rows], vocab);
    let losses = c.changing(&[1, rows, 1], F32);
    let step = c.step();
    OpKind::CrossEntropy { logits, labels, losses, step, row: 0, backward }
}

/// `step` is a tensor of its own for every op, so that no two share a launch.
fn adamw(c: &mut Case, dtype: DType, rows: usize, cols: usize, state: DType) -> OpKind {
    let shape = [rows, cols];
    let (param, grad) = (c.changing(&shape, dtype), c.source(&shape, dtype));
    let (m, v) = (c.changing(&shape, state), c.with(&shape, state, Fill::Positive));
    let [param, grad, m, v] = [param, grad, m, v].map(|t| c.view(t));
    let (beta1, beta2, eps, weight_decay, stream) = (0.9, 0.999, 1e-8, 0.01, 0);
    let (step, norm, master) = (c.step(), None, None);
    OpKind::AdamW {
        param,
        grad,
        m,
        v,
        master,
        step,
        norm,
        beta1,
        beta2,
        eps,
        weight_decay,
        stream,
        origin: None,
    }
}

fn sgd(c: &mut Case, dtype: DType, rows: usize, cols: usize, momentum: bool) -> OpKind {
    let shape = [rows, cols];
    let (param, grad) = (c.changing(&shape, dtype), c.source(&shape, dtype));
    let velocity = momentum.then(|| c.changing(&shape, F32));
    let (momentum, weight_decay, stream) = (if momentum { 0.9 } else { 0.0 }, 0.01, 0);
    OpKind::Sgd {
        param: c.view(param),
        grad: c.view(grad),
        velocity: velocity.map(|t| c.view(t)),
        master: None,
        step: c.step(),
        norm: None,
        momentum,
        weight_decay,
        stream,
        origin: None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use plimsoll_plan::stream_family;
    use plimsoll_program::NoWorkspace;

    use super::*;

    #[test]
    fn every_family_has_its_case_and_every_case_is_a_program() {
        for dtype in [F32, Bf16] {
            let mut families = BTreeSet::new();
            for make in STREAMS {
                let case = Case::repeat(&NoWorkspace, 2, &mut |c| make(c, dtype, 16, 64));
                case.program.verify().unwrap();
                let (family, _) = stream_family(&case.program, &case.program.ops[0].kind).unwrap();
                assert!(families.insert(family), "{family} twice");
            }
            assert_eq!(families.len(), STREAMS.len());
        }
        for orientation in Orientation::ALL {
            let case =
                Case::repeat(&NoWorkspace, 3, &mut |c| product(c, orientation, F32, (4, 8, 16)));
            case.program.verify().unwrap();
            let work = case.program.work(&case.program.ops[0]);
            assert_eq!(work.flops, 2.0 * 4.0 * 8.0 * 16.0);
        }
        for (backward, heads) in [(false, 4), (true, 128)] {
            let case = Case::repeat(&NoWorkspace, 1, &mut |c| {
                attention(c, Bf16, backward, 64, (8, heads))
            });
            case.program.verify().unwrap();
        }
    }
}

//! The ops that programs are made of.
//!
//! Shapes are written with the letters of the field: B batch, T sequence, C
//! hidden size, H query heads, K key-value heads, D head size, I intermediate
//! size, V vocabulary. `(B, T)` pairs are one row index in memory.

use crate::QuantizedMatrix;
use crate::tensor::{TensorId, View};

/// Heads and sizes of an attention op.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    pub batch: usize,
    pub seq: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// A query sees at most this many keys, its own included.
    pub window: Option<usize>,
}

impl AttentionShape {
    /// The factor before the softmax: 1 / sqrt(D).
    pub fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// Query-key pairs of one head that a causal mask lets through, all batch
    /// rows together, one document a row.
    pub fn pairs(&self) -> f64 {
        let (t, w) = (self.seq as f64, self.window.unwrap_or(self.seq).min(self.seq) as f64);
        self.batch as f64 * (w * (w + 1.0) / 2.0 + (t - w) * w)
    }
}

/// What one op does. `d_x` is the gradient of the loss by `x`.
#[derive(Clone, Debug, PartialEq)]
pub enum OpKind {
    /// out (B, T, C) = table (V, C) at ids (B, T).
    Embed { ids: TensorId, table: TensorId, out: TensorId },
    /// d_table (V, C) += d_x (B, T, C) at ids; zeroed first unless `accumulate`.
    EmbedBackward { ids: TensorId, d_x: TensorId, d_table: TensorId, accumulate: bool },
    /// out = x / rms(x) * weight over rows of C; rstd (B, T) f32 is kept.
    RmsNorm { x: TensorId, weight: TensorId, out: TensorId, rstd: TensorId, eps: f32 },
    /// d_x (B, T, C) += gradient through the norm; d_weight (C).
    RmsNormBackward {
        d_out: TensorId,
        x: TensorId,
        weight: TensorId,
        rstd: TensorId,
        d_x: TensorId,
        /// d_x is overwritten instead of added to.
        overwrite: bool,
        /// None where the weight is frozen.
        d_weight: Option<TensorId>,
        accumulate: bool,
    },
    /// y (M, N) = scale x (M, K) w (N, K)^T [+ bias (N)] [+ add (M, N)]; `add` may be
    /// y itself.
    Linear { x: View, w: View, bias: Option<TensorId>, add: Option<View>, y: View, scale: f32 },
    /// d_x (M, K) = scale d_y (M, N) w (N, K) [+ d_x].
    LinearBackwardInput { d_y: View, w: View, d_x: View, accumulate: bool, scale: f32 },
    /// out (N, K) = a matrix in four bits, multiplied out.
    Dequantize { w: QuantizedMatrix, out: TensorId },
    /// y (M, N) = x (M, K) w (N, K)^T [+ bias (N)] [+ add (M, N)] with w in four bits,
    /// for few rows: the matrix is never multiplied out in memory.
    LinearQuantized {
        x: View,
        w: QuantizedMatrix,
        bias: Option<TensorId>,
        add: Option<View>,
        y: View,
    },
    /// out = [out +] x where a hash of seed, stream and element keeps it, over
    /// 1 - probability; zero elsewhere. The same mask forward and backward.
    Dropout {
        x: TensorId,
        out: TensorId,
        step: TensorId,
        probability: f32,
        stream: u32,
        accumulate: bool,
    },
    /// d_w (N, K) = d_y (M, N)^T x (M, K) [+ d_w].
    LinearBackwardWeight { d_y: View, x: View, d_w: View, accumulate: bool },
    /// d_bias (N) = column sums of d_y (M, N) [+ d_bias].
    BiasBackward { d_y: TensorId, d_bias: TensorId, accumulate: bool },
    /// RMSNorm of every query and key head: qkv_raw -> qkv; values are copied.
    /// rstd (B, T, H + K) f32 is kept.
    HeadNorm {
        qkv_raw: TensorId,
        q_weight: TensorId,
        k_weight: TensorId,
        qkv: TensorId,
        rstd: TensorId,
        shape: AttentionShape,
        eps: f32,
    },
    /// d_qkv (B, T, (H + 2K) D) in place; d_q_weight (D), d_k_weight (D).
    HeadNormBackward {
        d_qkv: TensorId,
        qkv_raw: TensorId,
        q_weight: TensorId,
        k_weight: TensorId,
        rstd: TensorId,
        /// None where the weights are frozen.
        d_q_weight: Option<TensorId>,
        d_k_weight: Option<TensorId>,
        shape: AttentionShape,
        accumulate: bool,
    },
    /// Rotates query and key heads in place by the angle of their position
    /// (backwards when `inverse`); table (positions, 2, D/2) holds
    /// cos, then sin.
    Rope {
        qkv: TensorId,
        positions: TensorId,
        table: TensorId,
        shape: AttentionShape,
        inverse: bool,
    },
    /// Causal attention inside each document: qkv (B, T, (H + 2K) D) ->
    /// out (B, T, H D), and lse (B, T, H) f32, the log of each softmax sum.
    Attention {
        qkv: TensorId,
        doc_start: TensorId,
        out: TensorId,
        lse: TensorId,
        shape: AttentionShape,
    },
    /// d_qkv from d_out (B, T, H D), probabilities recomputed from lse.
    AttentionBackward {
        qkv: TensorId,
        doc_start: TensorId,
        out: TensorId,
        lse: TensorId,
        d_out: TensorId,
        d_qkv: TensorId,
        shape: AttentionShape,
    },
    /// Appends keys and values at `start` (B) of the caches (B, S, K D), then
    /// attends over all that the caches hold up to each query.
    AttentionCached {
        qkv: TensorId,
        start: TensorId,
        k_cache: TensorId,
        v_cache: TensorId,
        out: TensorId,
        shape: AttentionShape,
        /// S: positions that a cache can hold.
        capacity: usize,
    },
    /// act (B, T, I) = silu(gate) * up, from gate_up (B, T, 2 I).
    SwiGlu { gate_up: TensorId, act: TensorId },
    /// gate_up becomes its own gradient, given d_act (B, T, I).
    SwiGluBackward { gate_up: TensorId, d_act: TensorId },
    /// logits (rows, V) become their gradient; losses at [row, row + rows) of
    /// (B, T) f32. Labels of -100 count nothing. With `backward` false the
    /// logits stay as they are.
    CrossEntropy {
        logits: TensorId,
        labels: TensorId,
        losses: TensorId,
        step: TensorId,
        row: usize,
        backward: bool,
    },
    /// total (1) f32 = sum of losses (B, T) * loss_scale [+ total].
    SumLosses { losses: TensorId, step: TensorId, total: TensorId, accumulate: bool },
    /// out (R, C) = the rows of x named by rows (R).
    GatherRows { x: TensorId, rows: TensorId, out: TensorId },
    /// out (R) i32 = the column of the largest element of each row of x (R, V) f32: the
    /// first of several; NaN is passed over.
    Argmax { x: TensorId, out: TensorId },
    /// norm (2) f32 = the global L2 norm of all gradients, and the factor that
    /// brings it to at most `max_norm` (torch 2.11 `clip_grad_norm_`).
    GradNorm { grads: Vec<TensorId>, norm: TensorId, max_norm: Option<f32> },
    /// Decoupled weight decay Adam (torch 2.11 `torch.optim.AdamW`); bf16
    /// values are rounded stochastically. As every update, of a whole parameter or
    /// of some of its rows: each operand is one piece of memory, and the place in
    /// the parameter decides the random bits.
    ///
    /// With a `master` (i16, beside a bf16 parameter) the parameter is updated in float32:
    /// the two together are its bits ([`plimsoll_quant::join_master`]), and the parameter
    /// is the nearest bf16 number.
    AdamW {
        param: View,
        grad: View,
        m: View,
        v: View,
        master: Option<View>,
        step: TensorId,
        /// Where the clipping factor is; none when nothing is clipped.
        norm: Option<TensorId>,
        beta1: f32,
        beta2: f32,
        eps: f32,
        weight_decay: f32,
        /// Number of this parameter: separates the random streams.
        stream: u32,
        /// The elements of the parameter that `param` is a copy of; none where it is
        /// the parameter itself. Not an operand.
        origin: Option<View>,
    },
    /// AdamW with moments in eight bits (bitsandbytes 0.49 `AdamW8bit`): m and v
    /// are codes of the signed and the unsigned dynamic map, m_absmax and
    /// v_absmax f32 hold the scale of every 256 of them. bf16 parameters without a
    /// `master` are rounded stochastically.
    AdamW8bit {
        param: View,
        grad: View,
        m: View,
        v: View,
        m_absmax: View,
        v_absmax: View,
        master: Option<View>,
        step: TensorId,
        norm: Option<TensorId>,
        beta1: f32,
        beta2: f32,
        eps: f32,
        weight_decay: f32,
        stream: u32,
        origin: Option<View>,
    },
    /// Every rank's part of each tensor to all ranks: `to` (padded) from the parts
    /// `from`, or in place where both are the same.
    AllGather { from: Vec<TensorId>, to: Vec<TensorId> },
    /// Each rank's part of the sum of `from` (padded) over all ranks: into the parts
    /// `to`, or in place where both are the same. What `from` holds besides means
    /// nothing afterwards.
    ReduceScatter { from: Vec<TensorId>, to: Vec<TensorId> },
    /// Each tensor becomes its sum over all ranks.
    AllReduce { tensors: Vec<TensorId> },
    /// Nothing happens, but these tensors keep their memory up to here: what another
    /// lane may still be reading.
    Hold { tensors: Vec<TensorId> },
    /// out = x in the type of out [+ out]. Where one of them is a rank's part, so is
    /// what is touched of the other.
    Convert { x: TensorId, out: TensorId, accumulate: bool },
    /// squares (1) f32 = the sum of squares of the gradients that this rank answers
    /// for: its parts; and on rank 0 those that are not divided.
    GradSquares { grads: Vec<TensorId>, squares: TensorId },
    /// norm (2) as [`OpKind::GradNorm`] leaves it, from the sum of squares of all ranks.
    ClipFactor { squares: TensorId, norm: TensorId, max_norm: Option<f32> },
    /// Gradient descent with optional momentum (torch 2.11 `torch.optim.SGD`).
    Sgd {
        param: View,
        grad: View,
        velocity: Option<View>,
        master: Option<View>,
        step: TensorId,
        norm: Option<TensorId>,
        momentum: f32,
        weight_decay: f32,
        stream: u32,
        origin: Option<View>,
    },
    /// to = from, whole rows: from page-locked host memory to the device.
    ToDevice { from: View, to: View },
    /// to = from, whole rows: from the device to page-locked host memory.
    ToHost { from: View, to: View },
}

/// Which of the state of [`OpKind::update_operands`] has an element for every block.
pub(crate) const SCALES: std::ops::Range<usize> = 2..4;

/// Which of it is the lower half of the master weight.
pub(crate) const MASTER: usize = 4;

/// How an op touches an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    /// Every byte is overwritten before any is read.
    Write,
    /// Read and written in place.
    Update,
}

impl OpKind {
    /// Calls `f` with every operand and how it is touched.
    pub fn for_each_operand(&self, mut f: impl FnMut(TensorId, Access)) {
        use Access::{Read, Update, Write};
        let sum = |accumulate: bool| if accumulate { Update } else { Write };
        match self {
            OpKind::Embed { ids, table, out } => {
                f(*ids, Read);
                f(*table, Read);
                f(*out, Write);
            }
            OpKind::EmbedBackward { ids, d_x, d_table, accumulate } => {
                f(*ids, Read);
                f(*d_x, Read);
                f(*d_table, sum(*accumulate));
            }
            OpKind::RmsNorm { x, weight, out, rstd, .. } => {
                f(*x, Read);
                f(*weight, Read);
                f(*out, Write);
                f(*rstd, Write);
            }
            OpKind::RmsNormBackward {
                d_out,
                x,
                weight,
                rstd,
                d_x,
                overwrite,
                d_weight,
                accumulate,
            } => {
                f(*d_out, Read);
                f(*x, Read);
                f(*weight, Read);
                f(*rstd, Read);
                f(*d_x, sum(!*overwrite));
                if let Some(d_weight) = d_weight {
                    f(*d_weight, sum(*accumulate));
                }
            }
            OpKind::Linear { x, w, bias, add, y, .. } => {
                f(x.tensor, Read);
                f(w.tensor, Read);
                if let Some(bias) = bias {
                    f(*bias, Read);
                }
                match add {
                    Some(add) if add == y => f(y.tensor, Update),
                    Some(add) => {
                        f(add.tensor, Read);
                        f(y.tensor, Write);
                    }
                    None => f(y.tensor, Write),
                }
            }
            OpKind::LinearQuantized { x, w, bias, add, y } => {
                f(x.tensor, Read);
                w.for_each_tensor(|t| f(t, Read));
                if let Some(bias) = bias {
                    f(*bias, Read);
                }
                if let Some(add) = add {
                    f(add.tensor, Read);
                }
                f(y.tensor, Write);
            }
            OpKind::Dequantize { w, out } => {
                w.for_each_tensor(|t| f(t, Read));
                f(*out, Write);
            }
            OpKind::Dropout { x, out, step, accumulate, .. } => {
                f(*x, Read);
                f(*step, Read);
                f(*out, sum(*accumulate));
            }
            OpKind::LinearBackwardInput { d_y, w, d_x, accumulate, .. } => {
                f(d_y.tensor, Read);
                f(w.tensor, Read);
                f(d_x.tensor, sum(*accumulate));
            }
            OpKind::LinearBackwardWeight { d_y, x, d_w, accumulate } => {
                f(d_y.tensor, Read);
                f(x.tensor, Read);
                f(d_w.tensor, sum(*accumulate));
            }
            OpKind::BiasBackward { d_y, d_bias, accumulate } => {
                f(*d_y, Read);
                f(*d_bias, sum(*accumulate));
            }
            OpKind::HeadNorm { qkv_raw, q_weight, k_weight, qkv, rstd, .. } => {
                f(*qkv_raw, Read);
                f(*q_weight, Read);
                f(*k_weight, Read);
                f(*qkv, Write);
                f(*rstd, Write);
            }
            OpKind::HeadNormBackward {
                d_qkv,
                qkv_raw,
                q_weight,
                k_weight,
                rstd,
                d_q_weight,
                d_k_weight,
                accumulate,
                ..
            } => {
                f(*d_qkv, Update);
                f(*qkv_raw, Read);
                f(*q_weight, Read);
                f(*k_weight, Read);
                f(*rstd, Read);
                for d_weight in [d_q_weight, d_k_weight].into_iter().flatten() {
                    f(*d_weight, sum(*accumulate));
                }
            }
            OpKind::Rope { qkv, positions, table, .. } => {
                f(*qkv, Update);
                f(*positions, Read);
                f(*table, Read);
            }
            OpKind::Attention { qkv, doc_start, out, lse, .. } => {
                f(*qkv, Read);
                f(*doc_start, Read);
                f(*out, Write);
                f(*lse, Write);
            }
            OpKind::AttentionBackward { qkv, doc_start, out, lse, d_out, d_qkv, .. } => {
                f(*qkv, Read);
                f(*doc_start, Read);
                f(*out, Read);
                f(*lse, Read);
                f(*d_out, Read);
                f(*d_qkv, Write);
            }
            OpKind::AttentionCached { qkv, start, k_cache, v_cache, out, .. } => {
                f(*qkv, Read);
                f(*start, Read);
                f(*k_cache, Update);
                f(*v_cache, Update);
                f(*out, Write);
            }
            OpKind::SwiGlu { gate_up, act } => {
                f(*gate_up, Read);
                f(*act, Write);
            }
            OpKind::SwiGluBackward { gate_up, d_act } => {
                f(*gate_up, Update);
                f(*d_act, Read);
            }
            OpKind::CrossEntropy { logits, labels, losses, step, backward, .. } => {
                f(*logits, if *backward { Update } else { Read });
                f(*labels, Read);
                // A chunk writes its own rows of the losses.
                f(*losses, Write);
                f(*step, Read);
            }
            OpKind::SumLosses { losses, step, total, accumulate } => {
                f(*losses, Read);
                f(*step, Read);
                f(*total, sum(*accumulate));
            }
            OpKind::Argmax { x, out } => {
                f(*x, Read);
                f(*out, Write);
            }
            OpKind::GatherRows { x, rows, out } => {
                f(*x, Read);
                f(*rows, Read);
                f(*out, Write);
            }
            OpKind::GradNorm { grads, norm, .. } => {
                for g in grads {
                    f(*g, Read);
                }
                f(*norm, Write);
            }
            OpKind::AllGather { from, to } => {
                for (from, to) in from.iter().zip(to) {
                    if from == to {
                        f(*to, Update);
                    } else {
                        f(*from, Read);
                        f(*to, Write);
                    }
                }
            }
            OpKind::ReduceScatter { from, to } => {
                for (from, to) in from.iter().zip(to) {
                    f(*from, Update);
                    if from != to {
                        f(*to, Write);
                    }
                }
            }
            OpKind::AllReduce { tensors } => tensors.iter().for_each(|t| f(*t, Update)),
            OpKind::Hold { tensors } => tensors.iter().for_each(|t| f(*t, Read)),
            OpKind::Convert { x, out, accumulate } => {
                f(*x, Read);
                f(*out, sum(*accumulate));
            }
            OpKind::GradSquares { grads, squares } => {
                grads.iter().for_each(|g| f(*g, Read));
                f(*squares, Write);
            }
            OpKind::ClipFactor { squares, norm, .. } => {
                f(*squares, Read);
                f(*norm, Write);
            }
            OpKind::AdamW { step, norm, .. }
            | OpKind::AdamW8bit { step, norm, .. }
            | OpKind::Sgd { step, norm, .. } => {
                if let Some((param, grad, state)) = self.update_operands() {
                    f(param.tensor, Update);
                    f(grad.tensor, Read);
                    state.into_iter().flatten().for_each(|view| f(view.tensor, Update));
                }
                f(*step, Read);
                if let Some(norm) = norm {
                    f(*norm, Read);
                }
            }
            OpKind::ToDevice { from, to } | OpKind::ToHost { from, to } => {
                f(from.tensor, Read);
                f(to.tensor, Write);
            }
        }
    }

    /// Parameter, gradient and state of an update: two moments, the scales of their
    /// blocks ([`SCALES`]), and the lower half of the master weight ([`MASTER`]).
    pub fn update_operands(&self) -> Option<(View, View, [Option<View>; 5])> {
        Some(match self {
            OpKind::AdamW { param, grad, m, v, master, .. } => {
                (*param, *grad, [Some(*m), Some(*v), None, None, *master])
            }
            OpKind::AdamW8bit { param, grad, m, v, m_absmax, v_absmax, master, .. } => {
                let [m, v, m_absmax, v_absmax] = [*m, *v, *m_absmax, *v_absmax].map(Some);
                (*param, *grad, [m, v, m_absmax, v_absmax, *master])
            }
            OpKind::Sgd { param, grad, velocity, master, .. } => {
                (*param, *grad, [*velocity, None, None, None, *master])
            }
            _ => return None,
        })
    }

    /// The elements of the parameter that an update changes, wherever it finds them.
    pub fn updated_parameter(&self) -> Option<View> {
        match self {
            OpKind::AdamW { param, origin, .. }
            | OpKind::AdamW8bit { param, origin, .. }
            | OpKind::Sgd { param, origin, .. } => Some(origin.unwrap_or(*param)),
            _ => None,
        }
    }

    /// The same update of other memory: `f` is given parameter, gradient and state, in
    /// the order of [`OpKind::update_operands`].
    pub(crate) fn map_update(&mut self, mut f: impl FnMut(View) -> View) {
        let mut each = |view: &mut View| *view = f(*view);
        match self {
            OpKind::AdamW { param, grad, m, v, master, .. } => {
                [param, grad, m, v].into_iter().chain(master).for_each(&mut each);
            }
            OpKind::AdamW8bit { param, grad, m, v, m_absmax, v_absmax, master, .. } => {
                let always = [param, grad, m, v, m_absmax, v_absmax];
                always.into_iter().chain(master).for_each(&mut each);
            }
            OpKind::Sgd { param, grad, velocity, master, .. } => {
                [param, grad].into_iter().chain(velocity).chain(master).for_each(&mut each);
            }
            _ => {}
        }
    }

    /// The same update with `f` of the tensors that hold the step's scalars and the
    /// clipping factor.
    pub(crate) fn map_scalars(&mut self, mut f: impl FnMut(TensorId) -> TensorId) {
        if let OpKind::AdamW { step, norm, .. }
        | OpKind::AdamW8bit { step, norm, .. }
        | OpKind::Sgd { step, norm, .. } = self
        {
            [step].into_iter().chain(norm).for_each(|t| *t = f(*t));
        }
    }

    /// Says of which elements of the parameter an update's is a copy.
    pub(crate) fn set_origin(&mut self, of: Option<View>) {
        if let OpKind::AdamW { origin, .. }
        | OpKind::AdamW8bit { origin, .. }
        | OpKind::Sgd { origin, .. } = self
        {
            *origin = of;
        }
    }

    /// The matrix in four bits that an op reads.
    pub fn quantized(&self) -> Option<&QuantizedMatrix> {
        match self {
            OpKind::LinearQuantized { w, .. } | OpKind::Dequantize { w, .. } => Some(w),
            _ => None,
        }
    }

    /// The name of the op's family, as in a table of times.
    pub fn name(&self) -> &'static str {
        match self {
            OpKind::Embed { .. } => "embed",
            OpKind::EmbedBackward { .. } => "embed_backward",
            OpKind::RmsNorm { .. } => "rms_norm",
            OpKind::RmsNormBackward { .. } => "rms_norm_backward",
            OpKind::Linear { .. } => "linear",
            OpKind::LinearBackwardInput { .. } => "linear_backward_input",
            OpKind::LinearBackwardWeight { .. } => "linear_backward_weight",
            OpKind::LinearQuantized { .. } => "linear_quantized",
            OpKind::Dequantize { .. } => "dequantize",
            OpKind::Dropout { .. } => "dropout",
            OpKind::BiasBackward { .. } => "bias_backward",
            OpKind::HeadNorm { .. } => "head_norm",
            OpKind::HeadNormBackward { .. } => "head_norm_backward",
            OpKind::Rope { .. } => "rope",
            OpKind::Attention { .. } => "attention",
            OpKind::AttentionBackward { .. } => "attention_backward",
            OpKind::AttentionCached { .. } => "attention_cached",
            OpKind::SwiGlu { .. } => "swiglu",
            OpKind::SwiGluBackward { .. } => "swiglu_backward",
            OpKind::CrossEntropy { .. } => "cross_entropy",
            OpKind::SumLosses { .. } => "sum_losses",
            OpKind::GatherRows { .. } => "gather_rows",
            OpKind::Argmax { .. } => "argmax",
            OpKind::GradNorm { .. } => "grad_norm",
            OpKind::AllGather { .. } => "all_gather",
            OpKind::ReduceScatter { .. } => "reduce_scatter",
            OpKind::AllReduce { .. } => "all_reduce",
            OpKind::Hold { .. } => "hold",
            OpKind::Convert { .. } => "convert",
            OpKind::GradSquares { .. } => "grad_squares",
            OpKind::ClipFactor { .. } => "clip_factor",
            OpKind::AdamW { .. } => "adamw",
            OpKind::AdamW8bit { .. } => "adamw8bit",
            OpKind::Sgd { .. } => "sgd",
            OpKind::ToDevice { .. } => "to_device",
            OpKind::ToHost { .. } => "to_host",
        }
    }

    /// The operand that an op is about: what it writes first.
    pub fn subject(&self) -> Option<TensorId> {
        let mut subject = None;
        self.for_each_operand(|t, access| {
            if subject.is_none() && access != Access::Read {
                subject = Some(t);
            }
        });
        subject
    }
}

/// Which part of the step an op belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    Forward,
    /// Forward work done again because its result was not kept.
    Recompute,
    Backward,
    Optimizer,
}

impl Phase {
    pub fn name(self) -> &'static str {
        match self {
            Phase::Forward => "forward",
            Phase::Recompute => "recompute",
            Phase::Backward => "backward",
            Phase::Optimizer => "optimizer",
        }
    }
}

/// One op of a program.
#[derive(Clone, Debug, PartialEq)]
pub struct Op {
    pub kind: OpKind,
    pub phase: Phase,
    /// Scratch memory while the op runs; its contents mean nothing before or after.
    pub workspace: Option<TensorId>,
}

impl Op {
    /// Every operand, the scratch memory included.
    pub fn for_each_tensor(&self, mut f: impl FnMut(TensorId, Access)) {
        self.kind.for_each_operand(&mut f);
        if let Some(workspace) = self.workspace {
            f(workspace, Access::Write);
        }
    }
}

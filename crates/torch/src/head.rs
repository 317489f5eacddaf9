//! From the last hidden states to the loss, by version of the stack.

use std::rc::Rc;

use plimsoll_program::Class;

use crate::nn::{F32, Linear, Types, cast, contiguous, linear};
use crate::tape::{Edge, Mem, Tape, Var};

/// The way from logits to loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossPath {
    /// transformers up to 4.45: `logits.float()`, then the shifted logits as a copy.
    /// The float32 logits belong to the outputs and live until the loss is taken.
    FloatLogits,
    /// transformers 4.46 to 4.49: the float32 copy and the shifted copy are made inside
    /// the loss function, beside the logits of the outputs.
    FloatInLoss,
    /// transformers 4.50 on: the labels are shifted, not the logits.
    ShiftLabels,
    /// A float32 loss kernel that writes gradients over its logits (unsloth's, which
    /// fms-acceleration ships): float32 logits, one copy.
    FusedCrossEntropy,
    /// Cross entropy on the logits as they are, in 16 bits (litgpt).
    NativeLogits,
    /// `torch.compile`: the 16-bit logits are kept, and backward computes the softmax
    /// again into float32 gradients.
    Compiled,
    /// `LigerFusedLinearCrossEntropy`; `in_place` from liger-kernel 0.5 on, which adds to
    /// the weight's gradient without copies of a chunk.
    Liger { in_place: bool },
}

/// What a loss needs to know.
#[derive(Clone, Copy, Debug)]
pub struct LossShape {
    pub batch: u64,
    pub tokens: u64,
    pub vocabulary: u64,
    pub hidden: u64,
}

/// The loss, and what the outputs keep alive until the caller has taken it.
pub fn head_and_loss(
    t: &Tape,
    types: Types,
    hidden: Var,
    head: &Linear,
    path: LossPath,
    shape: LossShape,
) -> (Var, Vec<Var>) {
    let rows = shape.batch * shape.tokens;
    let v = shape.vocabulary;
    match path {
        LossPath::Liger { in_place } => {
            (liger(t, types, hidden, head, shape, in_place), Vec::new())
        }
        LossPath::Compiled => {
            let logits = linear(t, types, &hidden, head, "logits");
            drop(hidden);
            let loss = t.activation("loss", F32);
            let lse = t.activation("logsumexp", rows * F32);
            let saved = (logits.mem.clone(), lse);
            let (n, width) = (logits.elements, logits.width);
            let inputs = vec![logits.edge.clone()];
            let loss = t.result("cross entropy", (loss, 1, F32), inputs, move |t, g| {
                let wide = t.scratch("logits gradient in float32", n * F32);
                drop(saved);
                let g_x = t.activation("logits gradient", n * width);
                drop((wide, g));
                vec![Some(g_x)]
            });
            (loss, vec![logits])
        }
        LossPath::FloatLogits => {
            let logits = linear(t, types, &hidden, head, "logits");
            drop(hidden);
            let wide = cast(t, &logits, F32, "logits.float()");
            drop(logits);
            let shifted = shift(t, &wide, shape);
            (cross_entropy(t, shifted, (rows - shape.batch).max(1), v), vec![wide])
        }
        LossPath::FloatInLoss => {
            let logits = linear(t, types, &hidden, head, "logits");
            drop(hidden);
            let wide = cast(t, &logits, F32, "logits.float()");
            let shifted = shift(t, &wide, shape);
            let loss = cross_entropy(t, shifted, (rows - shape.batch).max(1), v);
            drop(wide);
            (loss, vec![logits])
        }
        LossPath::ShiftLabels => {
            let logits = linear(t, types, &hidden, head, "logits");
            drop(hidden);
            let wide = cast(t, &logits, F32, "logits.float()");
            let labels = t.activation("padded labels", shape.batch * (shape.tokens + 1) * 8);
            let shifted = t.activation("shifted labels", rows * 8);
            drop(labels);
            let loss = cross_entropy(t, wide, rows, v);
            drop(shifted);
            (loss, vec![logits])
        }
        LossPath::FusedCrossEntropy => {
            let logits = linear(t, types, &hidden, head, "logits");
            drop(hidden);
            let wide = cast(t, &logits, F32, "logits.float()");
            drop(logits);
            let shifted = shift(t, &wide, shape);
            let loss = t.activation("loss", rows * F32);
            let lse = t.activation("logsumexp", rows * F32);
            let saved = (shifted.mem.clone(), lse);
            let inputs = vec![shifted.edge.clone()];
            drop(shifted);
            let loss = t.result("cross entropy", (loss, rows, F32), inputs, move |_, g| {
                let (logits, _) = saved;
                drop(g);
                vec![Some(logits)]
            });
            (loss, vec![wide])
        }
        LossPath::NativeLogits => {
            let logits = linear(t, types, &hidden, head, "logits");
            drop(hidden);
            (cross_entropy(t, logits.clone(), rows, v), vec![logits])
        }
    }
}

/// `logits[..., :-1, :].contiguous()`: a copy unless there is one sequence only; its
/// backward is zeros of the whole, filled.
fn shift(t: &Tape, logits: &Var, shape: LossShape) -> Var {
    let LossShape { batch, tokens, vocabulary, .. } = shape;
    let n = (batch * (tokens - 1).max(1)) * vocabulary;
    let whole = logits.bytes();
    let view = (logits.mem.clone(), n, logits.width);
    let view = t.result("shift", view, vec![logits.edge.clone()], move |t, g| {
        let g_x = t.activation("shift", whole);
        drop(g);
        vec![Some(g_x)]
    });
    if batch == 1 { view } else { contiguous(t, view, "shifted logits") }
}

/// `F.cross_entropy`: log-softmax saves its result, which the loss saves too.
fn cross_entropy(t: &Tape, logits: Var, rows: u64, vocabulary: u64) -> Var {
    let (n, width) = (rows * vocabulary, logits.width);
    let soft = t.activation("log_softmax", n * width);
    let saved = soft.clone();
    let inputs = vec![logits.edge.clone()];
    let soft = t.result("log_softmax", (soft, n, width), inputs, move |t, g| {
        let g_x = t.activation("log_softmax", n * width);
        drop((saved, g));
        vec![Some(g_x)]
    });
    let loss = t.activation("loss", F32);
    let saved = soft.mem.clone();
    let inputs = vec![soft.edge.clone()];
    drop((soft, logits));
    t.result("nll_loss", (loss, 1, F32), inputs, move |t, g| {
        let g_x = t.activation("nll_loss", n * width);
        drop((saved, g));
        vec![Some(g_x)]
    })
}

/// Rows of logits that exist at a time (`fused_linear_cross_entropy_forward`).
pub fn liger_chunk_rows(rows: u64, vocabulary: u64, hidden: u64) -> u64 {
    let factor = vocabulary.div_ceil(hidden);
    rows.div_ceil(factor).next_power_of_two().min(rows.max(1))
}

/// Liger's fused linear cross entropy: both gradients are computed in forward.
fn liger(
    t: &Tape,
    types: Types,
    hidden: Var,
    head: &Linear,
    shape: LossShape,
    in_place: bool,
) -> Var {
    let engine = t.engine.clone();
    let params = [head.weight.clone()];
    engine.fetch(t, &params, true);
    let rows = shape.batch * shape.tokens;
    let v = shape.vocabulary;
    // Older versions shift the hidden states, newer ones the labels.
    let hidden = if in_place {
        hidden
    } else {
        let shape = (hidden.mem.clone(), hidden.elements, hidden.width);
        let bytes = hidden.bytes();
        let view = t.result("shift", shape, vec![hidden.edge.clone()], move |t, g| {
            let g_x = t.activation("shift", bytes);
            drop(g);
            vec![Some(g_x)]
        });
        contiguous(t, view, "shifted hidden states")
    };
    let width = types.autocast.unwrap_or(hidden.width).min(hidden.width);
    let weight = head.weight.clone();
    let (trained, weight_elements) = (weight.trained, weight.elements);
    // The function's inputs are not autocast; its products are.
    let gradient_width = weight.width;

    let g_x = t.activation("hidden gradient", hidden.bytes());
    let gradient = || t.alloc("head gradient", weight_elements * gradient_width, Class::Gradient);
    let g_w: Option<Mem> = trained.then(gradient);
    let losses = t.activation("loss by token", rows * F32);
    let targets = t.activation("target mask", rows);
    let chunk = liger_chunk_rows(rows, v, shape.hidden);
    let casts = types.autocast.is_some() && weight.width > width;
    let cast_weight = casts.then(|| t.activation("weight cast", weight_elements * width));
    let storage = in_place.then(|| t.scratch("logits of a chunk", chunk * v * width));
    for _ in 0..rows.div_ceil(chunk).min(3) {
        if storage.is_some() {
            if trained && casts {
                // `mm(...).float()` in a type of its own, then added.
                let product = t.scratch("head gradient of a chunk", weight_elements * width);
                let wide = t.scratch("head gradient of a chunk", weight_elements * F32);
                drop((product, wide));
            }
            continue;
        }
        let logits = t.scratch("logits of a chunk", chunk * v * width);
        let wide = t.scratch("logits.float() of a chunk", chunk * v * F32);
        drop(logits);
        let narrow = t.scratch("logits gradient", chunk * v * width);
        drop(wide);
        let scaled = t.scratch("scaled logits gradient", chunk * v * width);
        let part = t.scratch("hidden gradient of a chunk", chunk * shape.hidden * width);
        drop((narrow, scaled, part));
    }
    drop((storage, cast_weight, targets));
    let loss = t.activation("loss", F32);
    drop(losses);
    let weight_edge = if trained { Edge::Param(weight.clone()) } else { Edge::None };
    let inputs = vec![hidden.edge.clone(), weight_edge];
    drop(hidden);
    let saved = (g_x, g_w);
    let module: Rc<_> = weight;
    let result = t.result("liger cross entropy", (loss, 1, F32), inputs, move |t, g| {
        t.engine.clone().fetch(t, std::slice::from_ref(&module), false);
        let (g_x, g_w) = saved;
        t.engine.clone().release(t, std::slice::from_ref(&module), false);
        drop(g);
        vec![Some(g_x), g_w]
    });
    engine.release(t, &params, true);
    result
}

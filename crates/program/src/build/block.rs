//! One transformer block: forward, backward, and what lies between.
//!
//! The residual stream is added inside the products that end each half
//! (`add`), so that no op exists for it.

use super::builder::{Builder, Layer, Param};
use super::optimizer::gradient_complete;
use crate::{Class, OpKind, Phase, Recompute, TensorId};

/// A normalized activation and the statistic its backward needs.
#[derive(Clone, Copy)]
struct Normed {
    out: TensorId,  // (B, T, C)
    rstd: TensorId, // (B, T)
}

/// Queries, keys and values before the per-head norm (Qwen3).
#[derive(Clone, Copy)]
struct RawHeads {
    qkv_raw: TensorId, // (B, T, (H + 2K) D)
    rstd: TensorId,    // (B, T, H + K)
}

/// What the attention half keeps for its backward.
struct SavedAttention {
    normed: Option<Normed>,
    raw: Option<RawHeads>,
    qkv: Option<TensorId>, // (B, T, (H + 2K) D), rotated
    out: TensorId,         // (B, T, H D)
    lse: TensorId,         // (B, T, H)
}

/// What the MLP half keeps for its backward.
struct SavedMlp {
    normed: Option<Normed>,
    gate_up: Option<TensorId>, // (B, T, 2 I)
    act: Option<TensorId>,     // (B, T, I)
}

/// What a block keeps from forward to backward; `None` is computed again.
pub(super) struct SavedBlock {
    x: TensorId, // (B, T, C), the block's input
    attention: Option<SavedAttention>,
    mid: Option<TensorId>, // (B, T, C), the residual stream between the halves
    mlp: SavedMlp,
}

/// Forward pass of one block: x (B, T, C) -> out (B, T, C).
pub(super) fn forward_block(b: &mut Builder, layer: &Layer, x: TensorId) -> (TensorId, SavedBlock) {
    let attention = forward_attention(b, layer, x);
    let mid = project_out(b, layer, attention.out, x); // (B, T, C)
    let mlp = forward_mlp(b, layer, mid);
    let out = b.activation(format!("layers.{}.out", layer.index), b.arch.hidden_size);
    let act = mlp.act.expect("the forward pass made it");
    linear(b, act, layer.down, None, Some(mid), out);
    let saved = SavedBlock { x, attention: Some(attention), mid: Some(mid), mlp };
    let level = b.recompute_level(layer.index);
    (out, saved.keep(level))
}

impl SavedBlock {
    /// Forgets what this level computes again.
    fn keep(mut self, level: Recompute) -> SavedBlock {
        if level >= Recompute::Norms {
            if let Some(attention) = &mut self.attention {
                attention.normed = None;
                if attention.raw.is_some() {
                    attention.qkv = None;
                }
            }
            self.mlp.normed = None;
            self.mlp.act = None;
        }
        if level >= Recompute::Mlp {
            self.mlp.gate_up = None;
        }
        if level >= Recompute::Block {
            self.attention = None;
            self.mid = None;
        }
        self
    }
}

/// Backward pass of one block. d_x (B, T, C) comes in as the gradient of the
/// block's output and leaves as that of its input.
pub(super) fn backward_block(b: &mut Builder, layer: &Layer, saved: SavedBlock, d_x: TensorId) {
    let (attention, mid) = match (saved.attention, saved.mid) {
        (Some(attention), Some(mid)) => (attention, mid),
        _ => recompute(b, |b| {
            let mut attention = forward_attention(b, layer, saved.x);
            // Cheaper to normalize once more below than to keep it through the MLP.
            attention.normed = None;
            let mid = project_out(b, layer, attention.out, saved.x);
            (attention, mid)
        }),
    };
    backward_mlp(b, layer, mid, saved.mlp, d_x);
    backward_attention(b, layer, saved.x, attention, d_x);
}

fn forward_attention(b: &mut Builder, layer: &Layer, x: TensorId) -> SavedAttention {
    let l = layer.index;
    let normed = norm(b, format!("layers.{l}.input_norm"), x, layer.input_norm);
    let projected = b.activation(format!("layers.{l}.attn.qkv"), b.arch.qkv_width());
    linear(b, normed.out, layer.qkv, layer.qkv_bias, None, projected);
    let (raw, qkv) = head_norm(b, layer, projected);
    rope(b, layer, qkv, false);
    let shape = b.attention_shape(l);
    let out = b.activation(format!("layers.{l}.attn.out"), b.arch.q_width());
    let lse = b.statistic(format!("layers.{l}.attn.lse"), shape.heads);
    b.op(OpKind::Attention { qkv, doc_start: b.inputs.doc_start, out, lse, shape });
    SavedAttention { normed: Some(normed), raw, qkv: Some(qkv), out, lse }
}

fn forward_mlp(b: &mut Builder, layer: &Layer, mid: TensorId) -> SavedMlp {
    let l = layer.index;
    let normed = norm(b, format!("layers.{l}.post_norm"), mid, layer.post_norm);
    let gate_up = gate_up(b, layer, normed);
    let act = swiglu(b, layer, gate_up);
    SavedMlp { normed: Some(normed), gate_up: Some(gate_up), act: Some(act) }
}

fn backward_mlp(b: &mut Builder, layer: &Layer, mid: TensorId, saved: SavedMlp, d_x: TensorId) {
    let (l, i, c) = (layer.index, b.arch.intermediate_size, b.arch.hidden_size);
    let mut normed = saved.normed;
    let gate_up = saved.gate_up.unwrap_or_else(|| {
        recompute(b, |b| {
            let again = norm(b, format!("layers.{l}.post_norm"), mid, layer.post_norm);
            normed = Some(again);
            gate_up(b, layer, again)
        })
    });
    let act = saved.act.unwrap_or_else(|| recompute(b, |b| swiglu(b, layer, gate_up)));

    linear_backward_weight(b, d_x, act, layer.down);
    let d_act = b.activation(format!("layers.{l}.mlp.d_act"), i);
    linear_backward_input(b, d_x, layer.down, d_act);
    // From here on gate_up holds its own gradient.
    b.op(OpKind::SwiGluBackward { gate_up, d_act });
    let normed = normed.unwrap_or_else(|| {
        recompute(b, |b| norm(b, format!("layers.{l}.post_norm"), mid, layer.post_norm))
    });
    linear_backward_weight(b, gate_up, normed.out, layer.gate_up);
    let d_normed = b.activation(format!("layers.{l}.post_norm.d_out"), c);
    linear_backward_input(b, gate_up, layer.gate_up, d_normed);
    norm_backward(b, d_normed, mid, normed.rstd, layer.post_norm, d_x, false);
}

fn backward_attention(
    b: &mut Builder,
    layer: &Layer,
    x: TensorId,
    saved: SavedAttention,
    d_x: TensorId,
) {
    let (l, shape) = (layer.index, b.attention_shape(layer.index));
    let qkv = saved.qkv.unwrap_or_else(|| {
        recompute(b, |b| {
            let raw = saved.raw.expect("kept wherever qkv is not");
            let (_, qkv) = head_norm(b, layer, raw.qkv_raw);
            rope(b, layer, qkv, false);
            qkv
        })
    });
    linear_backward_weight(b, d_x, saved.out, layer.o);
    let d_out = b.activation(format!("layers.{l}.attn.d_out"), b.arch.q_width());
    linear_backward_input(b, d_x, layer.o, d_out);
    let d_qkv = b.activation(format!("layers.{l}.attn.d_qkv"), b.arch.qkv_width());
    b.op(OpKind::AttentionBackward {
        qkv,
        doc_start: b.inputs.doc_start,
        out: saved.out,
        lse: saved.lse,
        d_out,
        d_qkv,
        shape,
    });
    rope(b, layer, d_qkv, true);
    if let (Some(raw), Some(q), Some(k)) = (saved.raw, layer.q_norm, layer.k_norm) {
        b.op(OpKind::HeadNormBackward {
            d_qkv,
            qkv_raw: raw.qkv_raw,
            q_weight: q.value,
            k_weight: k.value,
            rstd: raw.rstd,
            d_q_weight: b.gradient(q),
            d_k_weight: b.gradient(k),
            shape,
            accumulate: b.accumulate,
        });
        gradient_complete(b, q);
        gradient_complete(b, k);
    }
    if let Some(bias) = layer.qkv_bias {
        let d_bias = b.gradient(bias);
        b.op(OpKind::BiasBackward { d_y: d_qkv, d_bias, accumulate: b.accumulate });
        gradient_complete(b, bias);
    }
    let normed = saved.normed.unwrap_or_else(|| {
        recompute(b, |b| norm(b, format!("layers.{l}.input_norm"), x, layer.input_norm))
    });
    linear_backward_weight(b, d_qkv, normed.out, layer.qkv);
    let d_normed = b.activation(format!("layers.{l}.input_norm.d_out"), b.arch.hidden_size);
    linear_backward_input(b, d_qkv, layer.qkv, d_normed);
    norm_backward(b, d_normed, x, normed.rstd, layer.input_norm, d_x, false);
}

/// One block of inference: keys and values go to the layer's caches.
pub(super) fn infer_block(b: &mut Builder, layer: &Layer, x: TensorId) -> TensorId {
    let (l, shape) = (layer.index, b.attention_shape(layer.index));
    let normed = norm(b, format!("layers.{l}.input_norm"), x, layer.input_norm);
    let projected = b.activation(format!("layers.{l}.attn.qkv"), b.arch.qkv_width());
    linear(b, normed.out, layer.qkv, layer.qkv_bias, None, projected);
    let (_, qkv) = head_norm(b, layer, projected);
    rope(b, layer, qkv, false);
    let capacity = b.recipe.seq;
    let cache = [b.recipe.batch, capacity, b.arch.kv_width()];
    let dtype = b.recipe.precision;
    let k_cache = b.resident(format!("layers.{l}.k_cache"), &cache, dtype, Class::KvCache);
    let v_cache = b.resident(format!("layers.{l}.v_cache"), &cache, dtype, Class::KvCache);
    let out = b.activation(format!("layers.{l}.attn.out"), b.arch.q_width());
    let start = b.inputs.start;
    b.op(OpKind::AttentionCached { qkv, start, k_cache, v_cache, out, shape, capacity });
    let mid = project_out(b, layer, out, x);
    let mlp = forward_mlp(b, layer, mid);
    let out = b.activation(format!("layers.{l}.out"), b.arch.hidden_size);
    linear(b, mlp.act.expect("the forward pass made it"), layer.down, None, Some(mid), out);
    out
}

/// mid (B, T, C) = attention output (B, T, H D) W_o^T + x.
fn project_out(b: &mut Builder, layer: &Layer, out: TensorId, x: TensorId) -> TensorId {
    let mid = b.activation(format!("layers.{}.mid", layer.index), b.arch.hidden_size);
    linear(b, out, layer.o, None, Some(x), mid);
    mid
}

/// The per-head norm of Qwen3; without it, qkv is what was projected.
fn head_norm(b: &mut Builder, layer: &Layer, projected: TensorId) -> (Option<RawHeads>, TensorId) {
    let (Some(q), Some(k)) = (layer.q_norm, layer.k_norm) else {
        return (None, projected);
    };
    let (l, shape) = (layer.index, b.attention_shape(layer.index));
    let qkv = b.activation(format!("layers.{l}.attn.qkv_normed"), b.arch.qkv_width());
    let rstd = b.statistic(format!("layers.{l}.attn.head_rstd"), shape.heads + shape.kv_heads);
    b.op(OpKind::HeadNorm {
        qkv_raw: projected,
        q_weight: q.value,
        k_weight: k.value,
        qkv,
        rstd,
        shape,
        eps: b.arch.rms_norm_eps as f32,
    });
    (Some(RawHeads { qkv_raw: projected, rstd }), qkv)
}

fn rope(b: &mut Builder, layer: &Layer, qkv: TensorId, inverse: bool) {
    let shape = b.attention_shape(layer.index);
    let (positions, table) = (b.inputs.positions, b.inputs.rope);
    b.op(OpKind::Rope { qkv, positions, table, shape, inverse });
}

fn gate_up(b: &mut Builder, layer: &Layer, normed: Normed) -> TensorId {
    let cols = 2 * b.arch.intermediate_size;
    let out = b.activation(format!("layers.{}.mlp.gate_up", layer.index), cols);
    linear(b, normed.out, layer.gate_up, None, None, out);
    out
}

fn swiglu(b: &mut Builder, layer: &Layer, gate_up: TensorId) -> TensorId {
    let act = b.activation(format!("layers.{}.mlp.act", layer.index), b.arch.intermediate_size);
    b.op(OpKind::SwiGlu { gate_up, act });
    act
}

fn norm(b: &mut Builder, name: String, x: TensorId, weight: Param) -> Normed {
    let out = b.activation(format!("{name}.out"), b.arch.hidden_size);
    let rstd = b.statistic(format!("{name}.rstd"), 1);
    let eps = b.arch.rms_norm_eps as f32;
    b.op(OpKind::RmsNorm { x, weight: weight.value, out, rstd, eps });
    Normed { out, rstd }
}

/// The final norm, for the head: out (B, T, C) and rstd (B, T).
pub(super) fn final_norm(b: &mut Builder, x: TensorId, weight: Param) -> (TensorId, TensorId) {
    let normed = norm(b, "norm".to_owned(), x, weight);
    (normed.out, normed.rstd)
}

/// d_x += (or =) the gradient through a norm; completes the weight's gradient.
pub(super) fn norm_backward(
    b: &mut Builder,
    d_out: TensorId,
    x: TensorId,
    rstd: TensorId,
    weight: Param,
    d_x: TensorId,
    overwrite: bool,
) {
    let d_weight = b.gradient(weight);
    b.op(OpKind::RmsNormBackward {
        d_out,
        x,
        weight: weight.value,
        rstd,
        d_x,
        overwrite,
        d_weight,
        accumulate: b.accumulate,
    });
    gradient_complete(b, weight);
}

/// y (B, T, N) = x (B, T, K) w (N, K)^T [+ bias] [+ add].
fn linear(
    b: &mut Builder,
    x: TensorId,
    w: Param,
    bias: Option<Param>,
    add: Option<TensorId>,
    y: TensorId,
) {
    b.op(OpKind::Linear {
        x: b.view(x),
        w: b.view(w.value),
        bias: bias.map(|p| p.value),
        add: add.map(|t| b.view(t)),
        y: b.view(y),
    });
}

/// d_x (B, T, K) = d_y (B, T, N) w (N, K); the last use of w in this step.
fn linear_backward_input(b: &mut Builder, d_y: TensorId, w: Param, d_x: TensorId) {
    let (d_y, wv, d_x) = (b.view(d_y), b.view(w.value), b.view(d_x));
    b.op(OpKind::LinearBackwardInput { d_y, w: wv, d_x, accumulate: false });
    gradient_complete(b, w);
}

/// d_w (N, K) = d_y (B, T, N)^T x (B, T, K); comes before the input's gradient,
/// which may reuse the memory of x.
fn linear_backward_weight(b: &mut Builder, d_y: TensorId, x: TensorId, w: Param) {
    let d_w = b.gradient(w);
    let (d_y, x, d_w) = (b.view(d_y), b.view(x), b.view(d_w));
    b.op(OpKind::LinearBackwardWeight { d_y, x, d_w, accumulate: b.accumulate });
}

/// Runs `f` with its ops marked as recomputation.
fn recompute<T>(b: &mut Builder, f: impl FnOnce(&mut Builder) -> T) -> T {
    let phase = std::mem::replace(&mut b.phase, Phase::Recompute);
    let result = f(b);
    b.phase = phase;
    result
}

impl Builder<'_> {
    fn recompute_level(&self, layer: usize) -> Recompute {
        self.recipe.recompute.level(layer)
    }

    pub(super) fn gradient(&self, param: Param) -> TensorId {
        self.training[param.index].gradient
    }
}

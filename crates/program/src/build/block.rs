//! One transformer block: forward, backward, and what lies between.
//!
//! The residual stream is added inside the products that end each half
//! (`add`), so that no op exists for it.

use super::builder::{Builder, Layer, Param};
use super::linear::{linear, linear_backward, recompute};
use super::optimizer::gradient_complete;
use crate::{Class, OpKind, Recompute, TensorId};

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
    qkv: Option<TensorId>,     // (B, T, (H + 2K) D), rotated
    out: TensorId,             // (B, T, H D)
    lse: TensorId,             // (B, T, H)
    low_qkv: Option<TensorId>, // (B, T, adapters * rank)
}

/// What the MLP half keeps for its backward.
struct SavedMlp {
    normed: Option<Normed>,
    gate_up: Option<TensorId>, // (B, T, 2 I)
    act: Option<TensorId>,     // (B, T, I)
    /// (B, T, adapters * rank); small, and kept at every level.
    low_gate_up: Option<TensorId>,
    low_down: Option<TensorId>,
}

/// What a block keeps from forward to backward; `None` is computed again.
pub(super) struct SavedBlock {
    x: TensorId, // (B, T, C), the block's input
    attention: Option<SavedAttention>,
    mid: Option<TensorId>, // (B, T, C), the residual stream between the halves
    low_o: Option<TensorId>, // (B, T, rank)
    mlp: SavedMlp,
}

/// Forward pass of one block: x (B, T, C) -> out (B, T, C).
pub(super) fn forward_block(b: &mut Builder, layer: &Layer, x: TensorId) -> (TensorId, SavedBlock) {
    let attention = forward_attention(b, layer, x);
    let (mid, low_o) = project_out(b, layer, attention.out, x, None); // (B, T, C)
    let mut mlp = forward_mlp(b, layer, mid);
    let out = b.activation(format!("layers.{}.out", layer.index), b.arch.hidden_size);
    let act = mlp.act.expect("the forward pass made it");
    mlp.low_down = linear(b, act, &layer.down, None, Some(mid), out, None);
    let saved = SavedBlock { x, attention: Some(attention), mid: Some(mid), low_o, mlp };
    let level = b.recompute_level(layer.index);
    (out, saved.keep(level))
}

impl SavedBlock {
    /// Everything that is kept.
    pub(super) fn tensors(&self) -> Vec<TensorId> {
        let SavedBlock { x, attention, mid, low_o, mlp } = self;
        let mut all = vec![*x];
        let normed = |n: &Option<Normed>| n.map(|n| [n.out, n.rstd]).into_iter().flatten();
        if let Some(SavedAttention { normed: input, raw, qkv, out, lse, low_qkv }) = attention {
            all.extend(normed(input));
            all.extend(raw.iter().flat_map(|raw| [raw.qkv_raw, raw.rstd]));
            all.extend([*out, *lse].into_iter().chain(*qkv).chain(*low_qkv));
        }
        all.extend([*mid, *low_o].into_iter().flatten());
        let SavedMlp { normed: post, gate_up, act, low_gate_up, low_down } = mlp;
        all.extend(normed(post));
        all.extend([*gate_up, *act, *low_gate_up, *low_down].into_iter().flatten());
        all
    }

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
/// block's output and leaves as that of its input, where anything `below` is
/// trained.
pub(super) fn backward_block(
    b: &mut Builder,
    layer: &Layer,
    saved: SavedBlock,
    d_x: TensorId,
    below: bool,
) {
    let (attention, mid) = match (saved.attention, saved.mid) {
        (Some(attention), Some(mid)) => (attention, mid),
        _ => recompute(b, |b| {
            let mut attention = forward_attention(b, layer, saved.x);
            // Cheaper to normalize once more below than to keep it through the MLP.
            attention.normed = None;
            let (mid, _) = project_out(b, layer, attention.out, saved.x, saved.low_o);
            (attention, mid)
        }),
    };
    let below_o = below || trains_qkv(b, layer);
    let below_mlp = below_o || b.trains_linear(&layer.o);
    backward_mlp(b, layer, mid, saved.mlp, d_x, below_mlp);
    if below_mlp {
        backward_attention(b, layer, saved.x, attention, saved.low_o, d_x, [below_o, below]);
    }
}

/// Whether a block trains anything before its attention.
fn trains_qkv(b: &Builder, layer: &Layer) -> bool {
    let params = [Some(layer.input_norm), layer.qkv_bias, layer.q_norm, layer.k_norm];
    b.trains_linear(&layer.qkv) || params.into_iter().flatten().any(|p| b.trains(p))
}

fn forward_attention(b: &mut Builder, layer: &Layer, x: TensorId) -> SavedAttention {
    let l = layer.index;
    let normed = norm(b, format!("layers.{l}.input_norm"), x, layer.input_norm);
    let projected = b.activation(format!("layers.{l}.attn.qkv"), b.arch.qkv_width());
    let low_qkv = linear(b, normed.out, &layer.qkv, layer.qkv_bias, None, projected, None);
    let (raw, qkv) = head_norm(b, layer, projected);
    rope(b, layer, qkv, false);
    let shape = b.attention_shape(l);
    let out = b.activation(format!("layers.{l}.attn.out"), b.arch.q_width());
    let lse = b.statistic(format!("layers.{l}.attn.lse"), shape.heads);
    b.op(OpKind::Attention { qkv, doc_start: b.inputs.doc_start, out, lse, shape });
    SavedAttention { normed: Some(normed), raw, qkv: Some(qkv), out, lse, low_qkv }
}

fn forward_mlp(b: &mut Builder, layer: &Layer, mid: TensorId) -> SavedMlp {
    let l = layer.index;
    let normed = norm(b, format!("layers.{l}.post_norm"), mid, layer.post_norm);
    let (gate_up, low_gate_up) = gate_up(b, layer, normed, None);
    let act = swiglu(b, layer, gate_up);
    SavedMlp {
        normed: Some(normed),
        gate_up: Some(gate_up),
        act: Some(act),
        low_gate_up,
        low_down: None,
    }
}

fn backward_mlp(
    b: &mut Builder,
    layer: &Layer,
    mid: TensorId,
    saved: SavedMlp,
    d_x: TensorId,
    below: bool,
) {
    let (l, i, c) = (layer.index, b.arch.intermediate_size, b.arch.hidden_size);
    let below_act = below || b.trains_linear(&layer.gate_up) || b.trains(layer.post_norm);
    if !below_act && !b.trains_linear(&layer.down) {
        return;
    }
    let mut normed = saved.normed;
    let gate_up = saved.gate_up.unwrap_or_else(|| {
        recompute(b, |b| {
            let again = norm(b, format!("layers.{l}.post_norm"), mid, layer.post_norm);
            normed = Some(again);
            gate_up(b, layer, again, saved.low_gate_up).0
        })
    });
    // The gradient of a frozen matrix, and with it its input, nobody needs.
    let act = match saved.act {
        Some(act) => act,
        None if b.trains_linear(&layer.down) => recompute(b, |b| swiglu(b, layer, gate_up)),
        None => gate_up,
    };
    let d_act = below_act.then(|| b.activation(format!("layers.{l}.mlp.d_act"), i));
    linear_backward(b, d_x, act, &layer.down, saved.low_down, d_act);
    let Some(d_act) = d_act else { return };
    // From here on gate_up holds its own gradient.
    b.op(OpKind::SwiGluBackward { gate_up, d_act });
    let normed = normed.unwrap_or_else(|| {
        recompute(b, |b| norm(b, format!("layers.{l}.post_norm"), mid, layer.post_norm))
    });
    let below_norm = below || b.trains(layer.post_norm);
    let d_normed = below_norm.then(|| b.activation(format!("layers.{l}.post_norm.d_out"), c));
    linear_backward(b, gate_up, normed.out, &layer.gate_up, saved.low_gate_up, d_normed);
    if let Some(d_normed) = d_normed {
        norm_backward(b, d_normed, mid, normed.rstd, layer.post_norm, d_x, false);
    }
}

/// `below_o` and `below`: whether anything before the output projection, and
/// before the block, is trained.
fn backward_attention(
    b: &mut Builder,
    layer: &Layer,
    x: TensorId,
    saved: SavedAttention,
    low_o: Option<TensorId>,
    d_x: TensorId,
    [below_o, below]: [bool; 2],
) {
    let (l, shape) = (layer.index, b.attention_shape(layer.index));
    let d_out = below_o.then(|| b.activation(format!("layers.{l}.attn.d_out"), b.arch.q_width()));
    linear_backward(b, d_x, saved.out, &layer.o, low_o, d_out);
    let Some(d_out) = d_out else { return };
    let qkv = saved.qkv.unwrap_or_else(|| {
        recompute(b, |b| {
            let raw = saved.raw.expect("kept wherever qkv is not");
            let (_, qkv) = head_norm(b, layer, raw.qkv_raw);
            rope(b, layer, qkv, false);
            qkv
        })
    });
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
            q_weight: b.value(q),
            k_weight: b.value(k),
            rstd: raw.rstd,
            d_q_weight: b.gradient(q),
            d_k_weight: b.gradient(k),
            shape,
            accumulate: b.accumulate,
        });
        gradient_complete(b, q);
        gradient_complete(b, k);
    }
    if let Some(bias) = layer.qkv_bias
        && let Some(d_bias) = b.gradient(bias)
    {
        b.op(OpKind::BiasBackward { d_y: d_qkv, d_bias, accumulate: b.accumulate });
        gradient_complete(b, bias);
    }
    let below_norm = below || b.trains(layer.input_norm);
    if !below_norm && !b.trains_linear(&layer.qkv) {
        return;
    }
    let normed = saved.normed.unwrap_or_else(|| {
        recompute(b, |b| norm(b, format!("layers.{l}.input_norm"), x, layer.input_norm))
    });
    let c = b.arch.hidden_size;
    let d_normed = below_norm.then(|| b.activation(format!("layers.{l}.input_norm.d_out"), c));
    linear_backward(b, d_qkv, normed.out, &layer.qkv, saved.low_qkv, d_normed);
    if let Some(d_normed) = d_normed {
        norm_backward(b, d_normed, x, normed.rstd, layer.input_norm, d_x, false);
    }
}

/// One block of inference: keys and values go to the layer's caches.
pub(super) fn infer_block(b: &mut Builder, layer: &Layer, x: TensorId) -> TensorId {
    let (l, shape) = (layer.index, b.attention_shape(layer.index));
    let normed = norm(b, format!("layers.{l}.input_norm"), x, layer.input_norm);
    let projected = b.activation(format!("layers.{l}.attn.qkv"), b.arch.qkv_width());
    linear(b, normed.out, &layer.qkv, layer.qkv_bias, None, projected, None);
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
    let (mid, _) = project_out(b, layer, out, x, None);
    let mlp = forward_mlp(b, layer, mid);
    let out = b.activation(format!("layers.{l}.out"), b.arch.hidden_size);
    linear(b, mlp.act.expect("the forward pass made it"), &layer.down, None, Some(mid), out, None);
    out
}

/// mid (B, T, C) = attention output (B, T, H D) W_o^T + x.
fn project_out(
    b: &mut Builder,
    layer: &Layer,
    out: TensorId,
    x: TensorId,
    low: Option<TensorId>,
) -> (TensorId, Option<TensorId>) {
    let mid = b.activation(format!("layers.{}.mid", layer.index), b.arch.hidden_size);
    let low = linear(b, out, &layer.o, None, Some(x), mid, low);
    (mid, low)
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
        q_weight: b.value(q),
        k_weight: b.value(k),
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

fn gate_up(
    b: &mut Builder,
    layer: &Layer,
    normed: Normed,
    low: Option<TensorId>,
) -> (TensorId, Option<TensorId>) {
    let cols = 2 * b.arch.intermediate_size;
    let out = b.activation(format!("layers.{}.mlp.gate_up", layer.index), cols);
    let low = linear(b, normed.out, &layer.gate_up, None, None, out, low);
    (out, low)
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
    b.op(OpKind::RmsNorm { x, weight: b.value(weight), out, rstd, eps });
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
        weight: b.value(weight),
        rstd,
        d_x,
        overwrite,
        d_weight,
        accumulate: b.accumulate,
    });
    gradient_complete(b, weight);
}

impl Builder<'_> {
    fn recompute_level(&self, layer: usize) -> Recompute {
        self.recipe.recompute.level(layer)
    }
}

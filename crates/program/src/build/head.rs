//! The two ends of the model: the embedding, and the head with its loss.
//!
//! Logits exist for a few rows at a time (chunked linear + cross entropy, as in
//! Liger Kernel 0.8 `fused_linear_cross_entropy`): each chunk becomes its own
//! gradient in place and is gone before the next.

use plimsoll_arch::DType;

use super::block::{final_norm, norm_backward};
use super::builder::{Builder, Linear, Model, Param};
use super::linear::{dense, product};
use super::optimizer::gradient_complete;
use crate::{OpKind, Phase, TensorId, View};

/// x (B, T, C) = rows of the embedding.
pub(super) fn embed(b: &mut Builder, model: &Model) -> TensorId {
    let out = b.activation("embed".to_owned(), b.arch.hidden_size);
    let table = b.value(model.embed_tokens);
    b.op(OpKind::Embed { ids: b.inputs.ids, table, out });
    out
}

pub(super) fn embed_backward(b: &mut Builder, model: &Model, d_x: TensorId) {
    let param = model.embed_tokens;
    let Some(d_table) = b.gradient(param) else { return };
    // A tied head has written its share already.
    let accumulate = b.accumulates(param) || model.lm_head.is_none();
    b.op(OpKind::EmbedBackward { ids: b.inputs.ids, d_x, d_table, accumulate });
    gradient_complete(b, param);
}

/// Loss of x (B, T, C), and d_x (B, T, C): forward and backward of the head,
/// chunk by chunk.
pub(super) fn loss_and_gradient(b: &mut Builder, model: &Model, x: TensorId) -> TensorId {
    let (normed, rstd) = final_norm(b, x, model.norm);
    let losses = b.statistic("losses".to_owned(), 1); // (B, T)
    let head = head(b, model); // (V, C)
    let d_head = head_param(model).and_then(|p| Some((b.gradient(p)?, b.accumulates(p))));
    for (row, rows) in chunks(b.rows(), loss_rows(b)) {
        let hidden = b.view(normed).rows_at(row, rows); // (rows, C)
        let logits = chunk_logits(b, head, normed, row, rows); // (rows, V)
        cross_entropy(b, logits, losses, row, true);
        let d_logits = b.view(logits);
        b.phase = Phase::Backward;
        if let Some((d_head, accumulate)) = d_head {
            b.op(OpKind::LinearBackwardWeight {
                d_y: d_logits,
                x: hidden,
                d_w: b.view(d_head),
                accumulate: accumulate || row > 0,
            });
        }
        // These rows of the norm's output were read for the last time just now:
        // from here on they hold their gradient.
        b.op(OpKind::LinearBackwardInput {
            d_y: d_logits,
            w: head,
            d_x: hidden,
            accumulate: false,
            scale: 1.0,
        });
        b.phase = Phase::Forward;
    }
    sum_losses(b, losses);
    b.phase = Phase::Backward;
    if let Some(param) = model.lm_head.as_ref().and_then(Linear::param) {
        gradient_complete(b, param);
    }
    let d_x = b.activation("d_x".to_owned(), b.arch.hidden_size);
    norm_backward(b, normed, x, rstd, model.norm, d_x, true);
    d_x
}

/// The loss alone, chunk by chunk.
pub(super) fn loss(b: &mut Builder, model: &Model, x: TensorId) {
    let (normed, _) = final_norm(b, x, model.norm);
    let losses = b.statistic("losses".to_owned(), 1);
    let head = head(b, model);
    for (row, rows) in chunks(b.rows(), loss_rows(b)) {
        let logits = chunk_logits(b, head, normed, row, rows);
        cross_entropy(b, logits, losses, row, false);
    }
    sum_losses(b, losses);
}

/// All logits (B T, V) in float32, for whoever asks for them.
pub(super) fn all_logits(b: &mut Builder, model: &Model, x: TensorId) {
    let (normed, _) = final_norm(b, x, model.norm);
    logits_of(b, model, normed, b.rows());
}

/// Logits (B, V) in float32 of the rows named by `last_rows`, and the most likely
/// tokens `next` (B).
pub(super) fn last_logits(b: &mut Builder, model: &Model, x: TensorId) {
    let (batch, c, dtype) = (b.recipe.batch, b.arch.hidden_size, b.recipe.precision);
    let mut x = x;
    if b.seq > 1 {
        let last = b.matrix("last".to_owned(), batch, c, dtype);
        b.op(OpKind::GatherRows { x, rows: b.inputs.last_rows, out: last });
        x = last;
    }
    let rows = if b.seq > 1 { batch } else { b.rows() };
    let out = b.matrix("norm.out".to_owned(), rows, c, dtype);
    let rstd = b.matrix("norm.rstd".to_owned(), rows, 1, DType::F32);
    let eps = b.arch.rms_norm_eps as f32;
    // (B, 1, C) and (B, C) are the same rows.
    b.op(OpKind::RmsNorm { x, weight: b.value(model.norm), out, rstd, eps });
    let logits = logits_of(b, model, out, rows);
    let next = b.resident("next".to_owned(), &[rows], DType::I32, crate::Class::Activation);
    b.op(OpKind::Argmax { x: logits, out: next });
}

fn logits_of(b: &mut Builder, model: &Model, normed: TensorId, rows: usize) -> TensorId {
    let shape = [rows, b.arch.vocab_size];
    let logits = b.resident("logits".to_owned(), &shape, DType::F32, crate::Class::Activation);
    let (x, y) = (b.view(normed), b.view(logits));
    match &model.lm_head {
        Some(linear) => product(b, x, linear, None, None, y),
        None => {
            let w = b.view(b.value(model.embed_tokens));
            b.op(OpKind::Linear { x, w, bias: None, add: None, y, scale: 1.0 });
        }
    }
    logits
}

/// The matrix of the head (V, C): the embedding where they are tied.
fn head(b: &mut Builder, model: &Model) -> View {
    match &model.lm_head {
        Some(linear) => dense(b, linear),
        None => b.view(b.value(model.embed_tokens)),
    }
}

fn head_param(model: &Model) -> Option<Param> {
    model.lm_head.as_ref().map_or(Some(model.embed_tokens), Linear::param)
}

fn chunk_logits(b: &mut Builder, w: View, normed: TensorId, row: usize, rows: usize) -> TensorId {
    let (v, dtype) = (b.arch.vocab_size, b.recipe.precision);
    let logits = b.matrix(format!("logits.{row}"), rows, v, dtype);
    let (x, y) = (b.view(normed).rows_at(row, rows), b.view(logits));
    b.op(OpKind::Linear { x, w, bias: None, add: None, y, scale: 1.0 });
    logits
}

fn cross_entropy(b: &mut Builder, logits: TensorId, losses: TensorId, row: usize, backward: bool) {
    let (labels, step) = (b.inputs.labels, b.inputs.step);
    b.op(OpKind::CrossEntropy { logits, labels, losses, step, row, backward });
}

fn sum_losses(b: &mut Builder, losses: TensorId) {
    let (step, total) = (b.inputs.step, b.loss);
    b.op(OpKind::SumLosses { losses, step, total, accumulate: b.accumulate });
}

/// Rows of logits at a time: as many as fit in the memory that the last
/// block's backward needs anyway (B T (I + C) elements), but at least C, up to
/// 1024. Every chunk reads and writes the head's gradient (V, C) once: with
/// fewer rows than C that would be more traffic than the logits (rows, V) are.
fn loss_rows(b: &Builder) -> usize {
    let rows = b.rows();
    let free = rows * (b.arch.intermediate_size + b.arch.hidden_size) / b.arch.vocab_size;
    let free = (free + 1).next_power_of_two() / 2;
    let least = b.arch.hidden_size.next_power_of_two().clamp(256, 1024);
    b.recipe.loss_rows.unwrap_or(free.max(least)).clamp(1, rows)
}

/// (first row, number of rows) of each chunk.
fn chunks(rows: usize, chunk: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).step_by(chunk).map(move |row| (row, chunk.min(rows - row)))
}

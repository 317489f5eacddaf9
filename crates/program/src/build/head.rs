//! The two ends of the model: the embedding, and the head with its loss.
//!
//! Logits exist for a few rows at a time (chunked linear + cross entropy, as in
//! Liger Kernel 0.8 `fused_linear_cross_entropy`): each chunk becomes its own
//! gradient in place and is gone before the next.

use plimsoll_arch::DType;

use super::block::{final_norm, norm_backward};
use super::builder::{Builder, Model};
use super::optimizer::gradient_complete;
use crate::{OpKind, Phase, TensorId};

/// x (B, T, C) = rows of the embedding.
pub(super) fn embed(b: &mut Builder, model: &Model) -> TensorId {
    let out = b.activation("embed".to_owned(), b.arch.hidden_size);
    b.op(OpKind::Embed { ids: b.inputs.ids, table: model.embed_tokens.value, out });
    out
}

pub(super) fn embed_backward(b: &mut Builder, model: &Model, d_x: TensorId) {
    let param = model.embed_tokens;
    let tied = model.lm_head.value == param.value;
    b.op(OpKind::EmbedBackward {
        ids: b.inputs.ids,
        d_x,
        d_table: b.gradient(param),
        // A tied head has written its share already.
        accumulate: b.accumulate || tied,
    });
    gradient_complete(b, param);
}

/// Loss of x (B, T, C), and d_x (B, T, C): forward and backward of the head,
/// chunk by chunk.
pub(super) fn loss_and_gradient(b: &mut Builder, model: &Model, x: TensorId) -> TensorId {
    let (normed, rstd) = final_norm(b, x, model.norm);
    let losses = b.statistic("losses".to_owned(), 1); // (B, T)
    let d_head = b.gradient(model.lm_head);
    let head = b.view(model.lm_head.value); // (V, C)
    for (row, rows) in chunks(b.rows(), loss_rows(b)) {
        let hidden = b.view(normed).rows_at(row, rows); // (rows, C)
        let logits = chunk_logits(b, model, normed, row, rows); // (rows, V)
        cross_entropy(b, logits, losses, row, true);
        let d_logits = b.view(logits);
        b.phase = Phase::Backward;
        b.op(OpKind::LinearBackwardWeight {
            d_y: d_logits,
            x: hidden,
            d_w: b.view(d_head),
            accumulate: b.accumulate || row > 0,
        });
        // These rows of the norm's output were read for the last time just now:
        // from here on they hold their gradient.
        b.op(OpKind::LinearBackwardInput {
            d_y: d_logits,
            w: head,
            d_x: hidden,
            accumulate: false,
        });
        b.phase = Phase::Forward;
    }
    sum_losses(b, losses);
    b.phase = Phase::Backward;
    if model.lm_head.value != model.embed_tokens.value {
        gradient_complete(b, model.lm_head);
    }
    let d_x = b.activation("d_x".to_owned(), b.arch.hidden_size);
    norm_backward(b, normed, x, rstd, model.norm, d_x, true);
    d_x
}

/// The loss alone, chunk by chunk.
pub(super) fn loss(b: &mut Builder, model: &Model, x: TensorId) {
    let (normed, _) = final_norm(b, x, model.norm);
    let losses = b.statistic("losses".to_owned(), 1);
    for (row, rows) in chunks(b.rows(), loss_rows(b)) {
        let logits = chunk_logits(b, model, normed, row, rows);
        cross_entropy(b, logits, losses, row, false);
    }
    sum_losses(b, losses);
}

/// All logits (B T, V) in float32, for whoever asks for them.
pub(super) fn all_logits(b: &mut Builder, model: &Model, x: TensorId) {
    let (normed, _) = final_norm(b, x, model.norm);
    logits_of(b, model, normed, b.rows());
}

/// Logits (B, V) in float32 of the rows named by `last_rows`.
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
    b.op(OpKind::RmsNorm { x, weight: model.norm.value, out, rstd, eps });
    logits_of(b, model, out, rows);
}

fn logits_of(b: &mut Builder, model: &Model, normed: TensorId, rows: usize) {
    let shape = [rows, b.arch.vocab_size];
    let logits = b.resident("logits".to_owned(), &shape, DType::F32, crate::Class::Activation);
    b.op(OpKind::Linear {
        x: b.view(normed),
        w: b.view(model.lm_head.value),
        bias: None,
        add: None,
        y: b.view(logits),
    });
}

fn chunk_logits(
    b: &mut Builder,
    model: &Model,
    normed: TensorId,
    row: usize,
    rows: usize,
) -> TensorId {
    let (v, dtype) = (b.arch.vocab_size, b.recipe.precision);
    let logits = b.matrix(format!("logits.{row}"), rows, v, dtype);
    b.op(OpKind::Linear {
        x: b.view(normed).rows_at(row, rows),
        w: b.view(model.lm_head.value),
        bias: None,
        add: None,
        y: b.view(logits),
    });
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

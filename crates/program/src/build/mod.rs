//! A step, from top to bottom.
//!
//! [`train`] is one optimizer step, [`evaluate`] the loss of one batch,
//! [`logits`] all logits of one batch, [`infer`] some new tokens against a KV
//! cache. All of them are written with the same blocks.

mod activations;
mod block;
mod builder;
mod head;
mod host_updates;
mod linear;
mod offload;
mod optimizer;
mod shard;

use plimsoll_arch::Architecture;

use crate::{OpKind, Phase, Program, Recipe, RecipeError, Target, TensorId};
use block::{backward_block, forward_block, infer_block};
use builder::{Builder, Model};
use shard::{Reduction, Unit, Units};

/// Names of the sections of a training step.
pub const FIRST_MICRO_BATCH: &str = "first micro-batch";
pub const OTHER_MICRO_BATCHES: &str = "other micro-batches";
pub const UPDATE: &str = "update";

/// One optimizer step.
///
/// The device is given `ids`, `labels`, `positions` and `doc_start` (B, T)
/// before every micro-batch and `step` before the first one; it leaves `loss`
/// and, with clipping, `grad_norm`.
///
/// # Errors
/// The recipe asks for something impossible; see [`Recipe::check`].
pub fn train(
    arch: &Architecture,
    recipe: &Recipe,
    target: &dyn Target,
) -> Result<Program, RecipeError> {
    recipe.check(arch)?;
    let mut b = Builder::new(arch, recipe, recipe.seq, target);
    let model = b.model();
    let units = Units::new(&b, &model);
    b.begin_section(FIRST_MICRO_BATCH, 1);
    micro_batch(&mut b, &model, &units, false);
    if recipe.accumulate > 1 {
        b.begin_section(OTHER_MICRO_BATCHES, recipe.accumulate - 1);
        micro_batch(&mut b, &model, &units, true);
    }
    b.begin_section(UPDATE, 1);
    if !recipe.optimizer_in_backward {
        optimizer::update_all(&mut b, &model, &units);
    } else if recipe.sharding.ranks > 1 {
        optimizer::update_rest(&mut b, &model);
    }
    Ok(offload::offload(b))
}

/// Forward and backward of one micro-batch.
fn micro_batch(b: &mut Builder, model: &Model, units: &Units, accumulate: bool) {
    b.accumulate = accumulate;
    b.phase = Phase::Forward;
    b.begin_micro_batch();
    let mut x = embed(b, model, units); // (B, T, C)
    let mut kept = Vec::with_capacity(model.layers.len());
    let last = model.layers.len() - 1;
    for layer in &model.layers {
        b.gather(units.layers.get(layer.index + 1).unwrap_or(&units.head));
        let (out, saved) = forward_block(b, layer, x);
        if b.recipe.offload.activations.contains(layer.index) {
            b.kept.push(saved.tensors());
        }
        // Backward begins with the last block.
        if layer.index < last {
            b.release(&units.layers[layer.index]);
        }
        kept.push(saved);
        x = out;
    }
    let d_x = head::loss_and_gradient(b, model, x); // (B, T, C)
    b.release(&units.head);
    b.phase = Phase::Backward;
    let embed = b.trains(model.embed_tokens);
    let mut under_way = reduce(b, &units.head);
    for (layer, saved) in model.layers.iter().zip(kept).rev() {
        if layer.index > 0 {
            b.gather(&units.layers[layer.index - 1]);
        }
        // Every block trains the same: below the first nothing but the embedding is.
        backward_block(b, layer, saved, d_x, embed || layer.index > 0);
        let unit = &units.layers[layer.index];
        b.release(unit);
        finish(b, under_way);
        under_way = reduce(b, unit);
    }
    if embed {
        head::embed_backward(b, model, d_x);
    }
    finish(b, under_way);
    let last = reduce(b, &units.embed);
    finish(b, last);
}

/// x (B, T, C), while the first block is gathered.
fn embed(b: &mut Builder, model: &Model, units: &Units) -> TensorId {
    b.gather(&units.embed);
    b.gather(&units.layers[0]);
    let x = head::embed(b, model);
    b.release(&units.embed);
    x
}

/// A unit whose gradients are on their way to the other ranks.
type UnderWay<'a> = (Reduction, &'a Unit);

/// Sums the gradients of a unit over the ranks, where that is done in backward.
fn reduce<'a>(b: &mut Builder, unit: &'a Unit) -> Option<UnderWay<'a>> {
    b.reduces_in_backward().then(|| (b.reduce(unit), unit))
}

fn finish(b: &mut Builder, under_way: Option<UnderWay>) {
    if let Some((reduction, unit)) = under_way {
        b.finish_reduction(reduction);
        optimizer::unit_complete(b, unit);
    }
}

/// The loss of one batch: `loss` is the sum over its trained tokens times
/// `step.loss_scale`.
///
/// # Errors
/// See [`train`].
pub fn evaluate(
    arch: &Architecture,
    recipe: &Recipe,
    target: &dyn Target,
) -> Result<Program, RecipeError> {
    forward_only(arch, recipe, target, "evaluate", |b, model, x| {
        head::loss(b, model, x);
        if b.recipe.sharding.ranks > 1 {
            b.op(OpKind::AllReduce { tensors: vec![b.loss] });
        }
    })
}

/// All logits (B, T, V) of one batch, in the tensor `logits` (f32).
///
/// # Errors
/// See [`train`].
pub fn logits(
    arch: &Architecture,
    recipe: &Recipe,
    target: &dyn Target,
) -> Result<Program, RecipeError> {
    forward_only(arch, recipe, target, "logits", head::all_logits)
}

/// The forward pass of a frozen model, and what `head` makes of its end.
fn forward_only(
    arch: &Architecture,
    recipe: &Recipe,
    target: &dyn Target,
    section: &'static str,
    head: fn(&mut Builder, &Model, TensorId),
) -> Result<Program, RecipeError> {
    recipe.check(arch)?;
    let mut b = Builder::new(arch, recipe, recipe.seq, target);
    let model = b.model_frozen();
    b.begin_section(section, 1);
    let units = Units::new(&b, &model);
    let mut x = embed(&mut b, &model, &units); // (B, T, C)
    for layer in &model.layers {
        b.gather(units.layers.get(layer.index + 1).unwrap_or(&units.head));
        (x, _) = forward_block(&mut b, layer, x);
        b.release(&units.layers[layer.index]);
    }
    head(&mut b, &model, x);
    Ok(offload::offload(b))
}

/// `tokens` new tokens of every sequence against a KV cache of `recipe.seq`
/// positions: prefill with many tokens, decoding with one.
///
/// The device is given `ids` and `positions` (B, tokens), `start` (B), the
/// position of each sequence's first new token, and `last_rows` (B), the rows
/// of (B, tokens) whose logits are wanted; it leaves `logits` (B, V) f32 and their
/// largest columns `next` (B) i32.
///
/// # Errors
/// See [`train`].
pub fn infer(
    arch: &Architecture,
    recipe: &Recipe,
    tokens: usize,
    target: &dyn Target,
) -> Result<Program, RecipeError> {
    recipe.check(arch)?;
    if tokens == 0 || tokens > recipe.seq {
        return Err(RecipeError::OutOfRange { option: "tokens", value: tokens, max: recipe.seq });
    }
    let mut b = Builder::new(arch, recipe, tokens, target);
    let model = b.model_frozen();
    b.begin_section("infer", 1);
    let mut x = head::embed(&mut b, &model); // (B, tokens, C)
    for layer in &model.layers {
        x = infer_block(&mut b, layer, x);
    }
    head::last_logits(&mut b, &model, x);
    Ok(b.finish().0)
}

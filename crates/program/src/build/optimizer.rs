//! Updates of the parameters: all at the end, or each inside backward.

use super::builder::{Builder, Model, Param};
use super::shard::{Unit, Units};
use crate::{AdamW, AdamW8bit, Decay, OpKind, Optimizer, Phase, View};

/// Clips by the global norm where the recipe says so, then updates everything.
pub(super) fn update_all(b: &mut Builder, model: &Model, units: &Units) {
    b.phase = Phase::Optimizer;
    if !b.reduces_in_backward() {
        for unit in units.all().rev() {
            let reduction = b.reduce(unit);
            b.finish_reduction(reduction);
        }
    }
    b.reduce_rest(model);
    if b.recipe.max_grad_norm.is_some() {
        b.grad_norm();
    }
    for unit in units.all() {
        unit.params.iter().for_each(|param| update(b, *param));
        b.gather_updated(unit);
    }
}

/// Called where the last use of a parameter and of its gradient in backward is
/// behind: with the optimizer in backward, here is where it runs on one rank.
pub(super) fn gradient_complete(b: &mut Builder, param: Param) {
    if b.recipe.optimizer_in_backward && b.recipe.sharding.ranks == 1 {
        let phase = std::mem::replace(&mut b.phase, Phase::Optimizer);
        update(b, param);
        b.phase = phase;
    }
}

/// Called where the gradients of a unit are summed over the ranks: with the optimizer in
/// backward, here is where it runs on several.
pub(super) fn unit_complete(b: &mut Builder, unit: &Unit) {
    if b.recipe.optimizer_in_backward {
        let phase = std::mem::replace(&mut b.phase, Phase::Optimizer);
        for param in
            unit.params.iter().filter(|p| b.reduced_with_unit(**p)).copied().collect::<Vec<_>>()
        {
            update(b, param);
        }
        b.gather_updated(unit);
        b.phase = phase;
    }
}

/// With the optimizer in backward on several ranks: what is summed with no unit, the
/// vectors.
pub(super) fn update_rest(b: &mut Builder, model: &Model) {
    b.phase = Phase::Optimizer;
    b.reduce_rest(model);
    let mut rest = Vec::new();
    model.for_each(|p| rest.extend((!b.reduced_with_unit(p)).then_some(p)));
    rest.into_iter().for_each(|param| update(b, param));
}

fn update(b: &mut Builder, param: Param) {
    let decayed = b.recipe.decay == Decay::All || b.shape(param.value).len() > 1;
    let decay = |weight_decay: f32| if decayed { weight_decay } else { 0.0 };
    let Some(training) = b.training(param) else { return };
    let (param, grad, stream) = (b.view(param.value), b.view(training.reduced), param.index as u32);
    let state: Vec<View> = training.state.iter().map(|t| b.view(*t)).collect();
    let master = training.master.map(|t| b.view(t));
    let (step, norm) = (b.inputs.step, b.recipe.max_grad_norm.map(|_| b.grad_norm));
    let kind = match (b.recipe.optimizer, &*state) {
        (Optimizer::AdamW8bit(o), &[m, v, m_absmax, v_absmax]) => OpKind::AdamW8bit {
            param,
            grad,
            m,
            v,
            m_absmax,
            v_absmax,
            master,
            step,
            norm,
            beta1: o.beta1,
            beta2: o.beta2,
            eps: o.eps,
            weight_decay: decay(o.weight_decay),
            stream,
            origin: None,
        },
        (
            Optimizer::AdamW(AdamW { beta1, beta2, eps, weight_decay, .. })
            | Optimizer::AdamW8bit(AdamW8bit { beta1, beta2, eps, weight_decay }),
            state,
        ) => OpKind::AdamW {
            param,
            grad,
            m: state[0],
            v: state[1],
            master,
            step,
            norm,
            beta1,
            beta2,
            eps,
            weight_decay: decay(weight_decay),
            stream,
            origin: None,
        },
        (Optimizer::Sgd(o), state) => OpKind::Sgd {
            param,
            grad,
            velocity: state.first().copied(),
            master,
            step,
            norm,
            momentum: o.momentum,
            weight_decay: decay(o.weight_decay),
            stream,
            origin: None,
        },
    };
    b.op(kind);
}

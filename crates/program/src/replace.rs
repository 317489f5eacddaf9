//! The same op on other tensors.

use crate::{OpKind, QuantizedMatrix, TensorId};

impl OpKind {
    /// Puts `f` of each operand in its place: tensors of the same shape and type.
    pub(crate) fn replace(&mut self, mut f: impl FnMut(TensorId) -> TensorId) {
        self.for_each_operand_mut(|t| *t = f(*t));
    }

    /// Every operand of [`OpKind::for_each_operand`]; those that an op reads and writes
    /// in place more than once.
    fn for_each_operand_mut(&mut self, mut f: impl FnMut(&mut TensorId)) {
        match self {
            OpKind::Embed { ids, table, out } => [ids, table, out].into_iter().for_each(f),
            OpKind::EmbedBackward { ids, d_x, d_table, .. } => {
                [ids, d_x, d_table].into_iter().for_each(f);
            }
            OpKind::RmsNorm { x, weight, out, rstd, .. } => {
                [x, weight, out, rstd].into_iter().for_each(f);
            }
            OpKind::RmsNormBackward { d_out, x, weight, rstd, d_x, d_weight, .. } => {
                [d_out, x, weight, rstd, d_x].into_iter().chain(d_weight).for_each(f);
            }
            OpKind::Linear { x, w, bias, add, y, .. } => {
                let views = [x, w, y].into_iter().chain(add);
                views.map(|view| &mut view.tensor).chain(bias).for_each(f);
            }
            OpKind::LinearQuantized { x, w, bias, add, y } => {
                quantized(w, &mut f);
                let views = [x, y].into_iter().chain(add);
                views.map(|view| &mut view.tensor).chain(bias).for_each(f);
            }
            OpKind::Dequantize { w, out } => {
                quantized(w, &mut f);
                f(out);
            }
            OpKind::Dropout { x, out, step, .. } => [x, out, step].into_iter().for_each(f),
            OpKind::LinearBackwardInput { d_y, w, d_x, .. } => {
                [d_y, w, d_x].into_iter().for_each(|view| f(&mut view.tensor));
            }
            OpKind::LinearBackwardWeight { d_y, x, d_w, .. } => {
                [d_y, x, d_w].into_iter().for_each(|view| f(&mut view.tensor));
            }
            OpKind::BiasBackward { d_y, d_bias, .. } => [d_y, d_bias].into_iter().for_each(f),
            OpKind::HeadNorm { qkv_raw, q_weight, k_weight, qkv, rstd, .. } => {
                [qkv_raw, q_weight, k_weight, qkv, rstd].into_iter().for_each(f);
            }
            OpKind::HeadNormBackward {
                d_qkv,
                qkv_raw,
                q_weight,
                k_weight,
                rstd,
                d_q_weight,
                d_k_weight,
                ..
            } => {
                let always = [d_qkv, qkv_raw, q_weight, k_weight, rstd];
                always.into_iter().chain(d_q_weight).chain(d_k_weight).for_each(f);
            }
            OpKind::Rope { qkv, positions, table, .. } => {
                [qkv, positions, table].into_iter().for_each(f);
            }
            OpKind::Attention { qkv, doc_start, out, lse, .. } => {
                [qkv, doc_start, out, lse].into_iter().for_each(f);
            }
            OpKind::AttentionBackward { qkv, doc_start, out, lse, d_out, d_qkv, .. } => {
                [qkv, doc_start, out, lse, d_out, d_qkv].into_iter().for_each(f);
            }
            OpKind::AttentionCached { qkv, start, k_cache, v_cache, out, .. } => {
                [qkv, start, k_cache, v_cache, out].into_iter().for_each(f);
            }
            OpKind::SwiGlu { gate_up, act } => [gate_up, act].into_iter().for_each(f),
            OpKind::SwiGluBackward { gate_up, d_act } => [gate_up, d_act].into_iter().for_each(f),
            OpKind::CrossEntropy { logits, labels, losses, step, .. } => {
                [logits, labels, losses, step].into_iter().for_each(f);
            }
            OpKind::SumLosses { losses, step, total, .. } => {
                [losses, step, total].into_iter().for_each(f);
            }
            OpKind::Argmax { x, out } => [x, out].into_iter().for_each(f),
            OpKind::GatherRows { x, rows, out } => [x, rows, out].into_iter().for_each(f),
            OpKind::GradNorm { grads, norm, .. } => grads.iter_mut().chain([norm]).for_each(f),
            OpKind::AllGather { from, to } | OpKind::ReduceScatter { from, to } => {
                from.iter_mut().chain(to).for_each(f);
            }
            OpKind::AllReduce { tensors } | OpKind::Hold { tensors } => {
                tensors.iter_mut().for_each(f);
            }
            OpKind::Convert { x, out, .. } => [x, out].into_iter().for_each(f),
            OpKind::GradSquares { grads, squares } => grads.iter_mut().chain([squares]).for_each(f),
            OpKind::ClipFactor { squares, norm, .. } => [squares, norm].into_iter().for_each(f),
            OpKind::AdamW { .. } | OpKind::AdamW8bit { .. } | OpKind::Sgd { .. } => {
                self.map_update(|mut view| {
                    f(&mut view.tensor);
                    view
                });
                if let OpKind::AdamW { step, norm, .. }
                | OpKind::AdamW8bit { step, norm, .. }
                | OpKind::Sgd { step, norm, .. } = self
                {
                    [step].into_iter().chain(norm).for_each(f);
                }
            }
            OpKind::ToDevice { from, to } | OpKind::ToHost { from, to } => {
                [from, to].into_iter().for_each(|view| f(&mut view.tensor));
            }
        }
    }
}

fn quantized(w: &mut QuantizedMatrix, f: &mut impl FnMut(&mut TensorId)) {
    for part in &mut w.parts {
        f(&mut part.codes);
        f(&mut part.absmax);
        if let Some(nested) = &mut part.nested {
            f(&mut nested.absmax);
            f(&mut nested.offset);
        }
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_arch::{DType, preset};

    use super::*;
    use crate::{
        AdamW8bit, Codebook, Lora, MasterWeights, NoWorkspace, Optimizer, Program, Quant, Recipe,
        Sgd, Sharding, build,
    };

    /// Every operand becomes another tensor, and none of the old is left.
    fn moves_every_operand(program: &Program) {
        for op in &program.ops {
            let other = |t: TensorId| TensorId::new(t.index() + program.tensors.len());
            let (mut expected, mut found) = (Vec::new(), Vec::new());
            op.kind.for_each_operand(|t, access| expected.push((other(t), access)));
            let mut moved = op.kind.clone();
            moved.replace(other);
            moved.for_each_operand(|t, access| found.push((t, access)));
            assert_eq!(found, expected, "{}", op.kind.name());
        }
    }

    #[test]
    fn every_operand_of_every_op_is_replaced() {
        let lora = Lora { dropout: 0.1, ..Lora::default() };
        let quant = Some(Quant { codebook: Codebook::Nf4, double: true, head: false });
        for name in ["plimsoll-tiny", "qwen3-0.6b", "qwen1.5-0.5b"] {
            let arch = preset(name).unwrap();
            let full = Recipe { accumulate: 2, ..Recipe::full(DType::Bf16, 1, 64) };
            let eight = Optimizer::AdamW8bit(AdamW8bit::default());
            let sgd = Optimizer::Sgd(Sgd { momentum: 0.9, weight_decay: 0.0, state: DType::F32 });
            let ranks = |zero| Sharding { ranks: 2, zero, reduce: DType::F32 };
            for recipe in [
                full.clone(),
                Recipe { optimizer: eight, sharding: ranks(0), ..full.clone() },
                Recipe { optimizer: sgd, sharding: ranks(3), ..full.clone() },
                Recipe { master_weights: MasterWeights::F32, ..full.clone() },
                Recipe { optimizer: eight, master_weights: MasterWeights::F32, ..full.clone() },
                Recipe { quant, ..Recipe::lora(DType::Bf16, 1, 64, lora.clone()) },
            ] {
                moves_every_operand(&build::train(&arch, &recipe, &NoWorkspace).unwrap());
                moves_every_operand(&build::evaluate(&arch, &recipe, &NoWorkspace).unwrap());
            }
            for quant in [None, quant] {
                let infer = Recipe { quant, ..Recipe::infer(DType::Bf16, 1, 64) };
                for tokens in [1, 32] {
                    let program = build::infer(&arch, &infer, tokens, &NoWorkspace).unwrap();
                    moves_every_operand(&program);
                }
            }
        }
    }
}

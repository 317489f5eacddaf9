//! Programs with frozen weights do no work that nobody needs, and keep nothing for it.

use std::collections::HashSet;

use plimsoll_arch::{Architecture, DType, preset};
use plimsoll_program::{
    Access, Class, Codebook, Lora, NoWorkspace, OpKind, Optimizer, Phase, Program, Projection,
    Quant, Recipe, Recompute, RecomputePlan, Sgd, TensorId, build,
};

/// A model with everything that a block can have.
fn architecture(tied: bool) -> Architecture {
    let llama = preset("llama-3-8b").unwrap();
    Architecture {
        hidden_size: 64,
        intermediate_size: 192,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 16,
        vocab_size: 256,
        tie_word_embeddings: tied,
        attention_bias: true,
        qk_norm: true,
        ..llama
    }
}

fn recipe(targets: &[Projection]) -> Recipe {
    let lora = Lora { rank: 4, targets: targets.to_vec(), ..Lora::default() };
    Recipe::lora(DType::F32, 2, 32, lora)
}

const QUANT: Quant = Quant { codebook: Codebook::Nf4, double: true, head: false };

/// Every subset of the projections that is of a kind of its own, and what can be
/// trained in full beside them.
fn recipes(tied: bool) -> Vec<Recipe> {
    let mut all = Vec::new();
    for subset in 1..1usize << Projection::ALL.len() {
        let chosen = |(i, _): &(usize, &Projection)| subset >> i & 1 == 1;
        let targets: Vec<Projection> =
            Projection::ALL.iter().enumerate().filter(chosen).map(|(_, p)| *p).collect();
        let base = recipe(&targets);
        for level in Recompute::ALL {
            for (quant, dropout) in [(None, 0.0), (Some(QUANT), 0.0), (None, 0.1)] {
                let recompute = RecomputePlan::uniform(level);
                let lora = Lora { dropout, ..base.lora.clone().unwrap() };
                all.push(Recipe { recompute, quant, lora: Some(lora), ..base.clone() });
            }
        }
        let lora = Lora { save_embed_tokens: true, ..base.lora.clone().unwrap() };
        all.push(Recipe { lora: Some(lora), ..base.clone() });
        if !tied {
            let lora = Lora { save_lm_head: true, ..base.lora.clone().unwrap() };
            all.push(Recipe { lora: Some(lora), ..base.clone() });
        }
        all.push(Recipe { accumulate: 3, ..base.clone() });
        let in_backward = Recipe { optimizer_in_backward: true, max_grad_norm: None, ..base };
        all.push(in_backward);
    }
    all
}

/// Ops all of whose results are overwritten or forgotten before anybody reads them.
fn dead_ops(program: &Program) -> Vec<String> {
    let kept = |t: &TensorId| {
        let t = program.tensor(*t);
        let result = ["loss", "grad_norm", "logits", "next"].contains(&t.name.as_str());
        result || (t.resident && matches!(t.class, Class::Weight | Class::OptimizerState))
    };
    let all = (0..program.tensors.len()).map(TensorId::new);
    let mut live: HashSet<TensorId> = all.filter(kept).collect();
    let mut dead = Vec::new();
    for (index, op) in program.ops.iter().enumerate().rev() {
        let mut useful = false;
        op.kind.for_each_operand(|t, access| useful |= access != Access::Read && live.contains(&t));
        if !useful {
            dead.push(program.op_name(index));
            continue;
        }
        // A product may fill a part of a tensor only, a chunk of losses always does.
        let partial = match &op.kind {
            OpKind::Linear { y: v, .. }
            | OpKind::LinearQuantized { y: v, .. }
            | OpKind::LinearBackwardInput { d_x: v, .. }
            | OpKind::LinearBackwardWeight { d_w: v, .. } => {
                v.elements() < program.tensor(v.tensor).elements()
            }
            OpKind::CrossEntropy { .. } => true,
            _ => false,
        };
        op.kind.for_each_operand(|t, access| {
            if access == Access::Write && !partial && !kept(&t) {
                live.remove(&t);
            }
        });
        op.kind.for_each_operand(|t, access| {
            if access != Access::Write {
                live.insert(t);
            }
        });
    }
    dead
}

#[test]
fn no_op_computes_what_nobody_reads() {
    for tied in [false, true] {
        let arch = architecture(tied);
        let mut full = Recipe::full(DType::F32, 2, 32);
        for level in Recompute::ALL {
            full.recompute = RecomputePlan::uniform(level);
            let program = build::train(&arch, &full, &NoWorkspace).unwrap();
            assert_eq!(dead_ops(&program), [] as [String; 0], "full, {level:?}");
        }
        for recipe in recipes(tied) {
            let program = build::train(&arch, &recipe, &NoWorkspace).unwrap();
            program.verify().unwrap();
            assert_eq!(dead_ops(&program), [] as [String; 0], "{recipe:?}");
            let evaluate = build::evaluate(&arch, &recipe, &NoWorkspace).unwrap();
            evaluate.verify().unwrap();
            assert_eq!(dead_ops(&evaluate), [] as [String; 0], "{recipe:?}");
            for tokens in [1, 4, 16] {
                let infer = build::infer(&arch, &recipe, tokens, &NoWorkspace).unwrap();
                infer.verify().unwrap();
                assert_eq!(dead_ops(&infer), [] as [String; 0], "{recipe:?}");
            }
        }
    }
}

fn is_adapter(name: &str) -> bool {
    name.ends_with(".lora_a") || name.ends_with(".lora_b")
}

#[test]
fn only_adapters_have_gradients_and_optimizer_state() {
    let arch = architecture(false);
    for recipe in recipes(false) {
        let program = build::train(&arch, &recipe, &NoWorkspace).unwrap();
        let lora = recipe.lora.as_ref().unwrap();
        let trained = |name: &str| {
            is_adapter(name)
                || (lora.save_embed_tokens && name == "embed_tokens")
                || (lora.save_lm_head && name == "lm_head")
        };
        let mut gradients = 0;
        for t in &program.tensors {
            let owner = match t.class {
                Class::Gradient => t.name.strip_prefix("d_"),
                Class::OptimizerState => t.name.split_once('.').map(|(_, name)| name),
                _ => continue,
            };
            assert!(trained(owner.unwrap()), "{} in {recipe:?}", t.name);
            gradients += if t.class == Class::Gradient { t.elements() } else { 0 };
        }
        // Every element of the adapter has a gradient, once.
        let parts = lora.parts(&arch);
        let expected: usize = parts.iter().map(|p| p.shape.iter().product::<usize>()).sum();
        assert_eq!(gradients, expected);
        for op in &program.ops {
            if let OpKind::LinearBackwardWeight { d_w, .. } = &op.kind {
                let name = &program.tensor(d_w.tensor).name;
                assert!(trained(name.strip_prefix("d_").unwrap()), "{name}");
            }
        }
    }
}

/// Names of the tensors that forward makes and backward reads.
fn saved(program: &Program) -> HashSet<String> {
    let mut made = HashSet::new();
    let mut saved = HashSet::new();
    for op in &program.ops {
        op.kind.for_each_operand(|t, access| {
            let tensor = program.tensor(t);
            if tensor.resident {
                return;
            }
            match (op.phase, access) {
                (Phase::Forward, Access::Write) => {
                    made.insert(t);
                }
                (Phase::Backward | Phase::Recompute, _) if made.contains(&t) => {
                    saved.insert(tensor.name.clone());
                }
                _ => {}
            }
        });
    }
    saved
}

#[test]
fn inputs_of_frozen_matrices_are_not_kept() {
    let arch = architecture(false);
    let kept = |targets: &[Projection]| {
        saved(&build::train(&arch, &recipe(targets), &NoWorkspace).unwrap())
    };
    // Queries alone: neither the MLP's product nor the input of its first half.
    let q = kept(&[Projection::Q]);
    for layer in 0..3 {
        assert!(!q.contains(&format!("layers.{layer}.mlp.act")), "{q:?}");
        assert!(!q.contains(&format!("layers.{layer}.post_norm.out")), "{q:?}");
        assert!(q.contains(&format!("layers.{layer}.input_norm.out")), "{q:?}");
    }
    // The last projection alone: in the first layer nothing but its input.
    let down = kept(&[Projection::Down]);
    assert!(down.contains("layers.0.mlp.act") && down.contains("layers.1.input_norm.rstd"));
    for name in ["mlp.gate_up", "post_norm.out", "post_norm.rstd", "attn.out", "mid", "attn.lse"] {
        assert!(!down.contains(&format!("layers.0.{name}")), "{name} {down:?}");
    }
}

#[test]
fn nothing_goes_below_the_first_adapter() {
    let arch = architecture(false);
    let written = |targets: &[Projection]| {
        let program = build::train(&arch, &recipe(targets), &NoWorkspace).unwrap();
        let names = program.ops.iter().filter_map(|op| op.kind.subject());
        names.map(|t| program.tensor(t).name.clone()).collect::<HashSet<String>>()
    };
    let all = written(&Projection::ALL);
    assert!(
        !all.contains("layers.0.input_norm.d_out") && all.contains("layers.1.input_norm.d_out")
    );
    let down = written(&[Projection::Down]);
    assert!(!down.contains("layers.0.mlp.d_act") && down.contains("layers.1.mlp.d_act"));
    let o = written(&[Projection::O]);
    assert!(!o.contains("layers.0.attn.d_out") && o.contains("layers.0.mlp.d_act"));
}

#[test]
fn an_adapter_without_optimizer_state_has_none() {
    let sgd = Optimizer::Sgd(Sgd { momentum: 0.0, weight_decay: 0.0, state: DType::F32 });
    let recipe = Recipe { optimizer: sgd, ..recipe(&Projection::ALL) };
    let program = build::train(&architecture(false), &recipe, &NoWorkspace).unwrap();
    assert!(program.tensors.iter().all(|t| t.class != Class::OptimizerState));
}

#[test]
fn four_bits_are_what_they_weigh() {
    let arch = preset("llama-3-8b").unwrap();
    let recipe = Recipe { quant: Some(QUANT), ..Recipe::infer(DType::Bf16, 1, 128) };
    let program = build::infer(&arch, &recipe, 1, &NoWorkspace).unwrap();
    program.verify().unwrap();
    let weights = program.tensors.iter().filter(|t| t.class == Class::Weight);
    let bytes: u64 = weights.map(|t| t.bytes()).sum();
    // 6.98e9 elements of half a byte and 1/64 of a scale of one byte, 1.05e9 of two bytes.
    assert!((5.69e9..5.72e9).contains(&(bytes as f64)), "{bytes}");
}

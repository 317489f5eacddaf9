//! Offload changes where bytes live, and no bit of what is computed.

use std::path::PathBuf;

use plimsoll_arch::{Architecture, DType, preset};
use plimsoll_cpu::{CpuDevice, CpuTarget};
use plimsoll_model::{init_adapter, init_state, init_weights};
use plimsoll_plan::{Device, lay_out};
use plimsoll_program::{
    AdamW, AdamW8bit, Class, Codebook, Home, Lane, Lora, MasterWeights, Offload, Optimizer,
    Program, Quant, Recipe, RecomputePlan, Sgd, TensorId, UpdateOn,
};
use plimsoll_train::{EarlyStop, MicroBatch, ModelFiles, Session, TrainPlan, TrainerState};

const TARGET: CpuTarget = CpuTarget { threads: 2 };

/// Six layers of several sizes; every matrix has a few pieces of state.
fn arch(tied: bool) -> Architecture {
    Architecture {
        num_hidden_layers: 6,
        hidden_size: 96,
        intermediate_size: 224,
        num_attention_heads: 6,
        num_key_value_heads: 2,
        head_dim: 16,
        vocab_size: 300,
        max_position_embeddings: 64,
        attention_bias: tied,
        tie_word_embeddings: tied,
        ..preset("plimsoll-tiny").unwrap()
    }
}

struct Run {
    plan: TrainPlan,
    device: CpuDevice,
}

impl Run {
    fn new(arch: &Architecture, recipe: &Recipe) -> Run {
        let plan = TrainPlan::new(arch, recipe, &TARGET).unwrap();
        for (program, layout) in
            [(&plan.train, &plan.train_layout), (&plan.evaluate, &plan.evaluate_layout)]
        {
            program.verify().unwrap();
            layout.verify(program).unwrap();
        }
        let mut device = CpuDevice::new(plan.slabs(), TARGET.threads).unwrap();
        init_state(&mut device, &plan.train, &plan.train_layout, arch).unwrap();
        init_weights(&mut device, &plan.train, &plan.train_layout, arch, 7).unwrap();
        if let Some(lora) = &recipe.lora {
            init_adapter(&mut device, &plan.train, &plan.train_layout, arch, lora, 5).unwrap();
        }
        Run { plan, device }
    }

    fn session(&mut self) -> Session<'_> {
        Session { plan: &self.plan, device: &mut self.device }
    }

    /// Bits of the losses and gradient norms of some steps and of one evaluation.
    fn steps(&mut self, steps: std::ops::Range<u64>) -> Vec<u64> {
        let recipe = self.plan.recipe.clone();
        let mut seen = Vec::new();
        for step in steps {
            let batches: Vec<Inputs> = (0..recipe.accumulate as u64)
                .map(|n| Inputs::new(recipe.batch, recipe.seq, 10 * step + n))
                .collect();
            let micro: Vec<MicroBatch> = batches.iter().map(Inputs::batch).collect();
            let result = self.session().train(&micro, 1e-2, step + 1, 3).unwrap();
            seen.push(u64::from(result.loss.to_bits()));
            seen.extend(result.grad_norm.map(|n| u64::from(n.to_bits())));
        }
        let held_out = Inputs::new(recipe.batch, recipe.seq, 999);
        seen.push(self.session().evaluate(&held_out.batch()).unwrap().0.to_bits());
        seen
    }

    /// Bytes of all weights and all optimizer state, by name.
    fn state(&mut self) -> Vec<(String, Vec<u8>)> {
        let (program, layout) = (&self.plan.train, &self.plan.train_layout);
        let mut all = Vec::new();
        for (n, t) in program.tensors.iter().enumerate() {
            if !matches!(t.class, Class::Weight | Class::OptimizerState) {
                continue;
            }
            let offset = layout.offset(TensorId::new(n));
            let mut keep = Vec::new();
            self.device
                .download(t.home, offset, t.bytes() as usize, &mut |bytes| {
                    keep.extend_from_slice(bytes);
                    Ok(())
                })
                .unwrap();
            all.push((t.name.clone(), keep));
        }
        all.sort();
        all
    }
}

struct Inputs {
    ids: Vec<i32>,
    labels: Vec<i32>,
    positions: Vec<i32>,
    doc_start: Vec<i32>,
}

impl Inputs {
    fn new(batch: usize, seq: usize, seed: u64) -> Inputs {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state % 300) as i32
        };
        let ids: Vec<i32> = (0..batch * seq).map(|_| next()).collect();
        let labels = ids[1..].iter().copied().chain([-100]).collect();
        let positions = (0..batch * seq).map(|i| (i % seq) as i32).collect();
        Inputs { ids, labels, positions, doc_start: vec![0; batch * seq] }
    }

    fn batch(&self) -> MicroBatch<'_> {
        MicroBatch {
            ids: &self.ids,
            labels: &self.labels,
            positions: &self.positions,
            doc_start: &self.doc_start,
        }
    }
}

fn optimizers() -> [(&'static str, Optimizer); 4] {
    [
        ("adamw", Optimizer::AdamW(AdamW::default())),
        ("adamw bf16", Optimizer::AdamW(AdamW { state: DType::Bf16, ..AdamW::default() })),
        ("adamw8bit", Optimizer::AdamW8bit(AdamW8bit::default())),
        ("sgd", Optimizer::Sgd(Sgd { momentum: 0.9, weight_decay: 0.01, state: DType::F32 })),
    ]
}

fn recipe(precision: DType, optimizer: Optimizer, fused: bool, recompute: &str) -> Recipe {
    let recompute: RecomputePlan = recompute.parse().unwrap();
    Recipe {
        optimizer,
        recompute,
        optimizer_in_backward: fused,
        accumulate: if fused { 1 } else { 3 },
        max_grad_norm: if fused { None } else { Some(0.5) },
        ..Recipe::full(precision, 2, 32)
    }
}

fn copies(program: &Program, lane: Lane) -> usize {
    program.ops.iter().filter(|op| program.lane(&op.kind) == lane).count()
}

#[test]
fn training_is_the_same_to_the_bit() {
    for (name, optimizer) in optimizers() {
        for (fused, recompute, tied) in
            [(true, "block", false), (false, "norms", true), (true, "none", true)]
        {
            let arch = arch(tied);
            let precision = if fused { DType::Bf16 } else { DType::F32 };
            let plain = recipe(precision, optimizer, fused, recompute);
            same_with_offload(name, &arch, &plain);
            if precision == DType::Bf16 && recompute == "block" {
                let masters = Recipe { master_weights: MasterWeights::F32, ..plain };
                same_with_offload(&format!("{name}, masters"), &arch, &masters);
            }
        }
    }
}

/// Three steps with every offload are those without.
fn same_with_offload(name: &str, arch: &Architecture, plain: &Recipe) {
    let (fused, recompute) = (plain.optimizer_in_backward, &plain.recompute);
    let mut reference = Run::new(arch, plain);
    let (losses, state) = (reference.steps(0..3), reference.state());
    let offloads = [Offload::OPTIMIZER, Offload::OPTIMIZER_WEIGHTS, Offload::OPTIMIZER_ACTIVATIONS];
    let places = [UpdateOn::Device, UpdateOn::Host];
    let all = offloads.iter().flat_map(|o| places.map(|update_on| (o.clone(), update_on)));
    for (offload, update_on) in all {
        let what = format!("{name}, in backward {fused}, {recompute}, {offload}, on {update_on:?}");
        let mut run = Run::new(arch, &Recipe { offload, update_on, ..plain.clone() });
        let on_host = copies(&run.plan.train, Lane::Host);
        assert_eq!(on_host > 20, update_on == UpdateOn::Host, "{what}: {on_host}");
        assert!(copies(&run.plan.train, Lane::HostToDevice) > 20, "{what}");
        assert!(copies(&run.plan.train, Lane::DeviceToHost) > 20, "{what}");
        assert!(run.plan.slabs().host > 0, "{what}");
        assert_eq!(run.steps(0..3), losses, "{what}");
        for (a, b) in run.state().iter().zip(&state) {
            assert!(a == b, "{what}: `{}` differs", a.0);
        }
    }
}

/// Full, LoRA and QLoRA, with what each has beside the others.
fn methods() -> [(&'static str, Recipe); 4] {
    let adamw = Optimizer::AdamW(AdamW::default());
    let lora = Lora { rank: 4, alpha: 8.0, dropout: 0.1, ..Lora::default() };
    let four = Quant { codebook: Codebook::Nf4, double: true, head: false };
    let full = recipe(DType::F32, adamw, false, "none");
    let adapters = |precision, quant| Recipe {
        accumulate: 2,
        quant,
        ..Recipe::lora(precision, 2, 32, lora.clone())
    };
    [
        ("full", Recipe { accumulate: 2, ..full }),
        ("full in backward", recipe(DType::Bf16, adamw, true, "none")),
        ("lora", adapters(DType::F32, None)),
        ("qlora", adapters(DType::Bf16, Some(four))),
    ]
}

#[test]
fn activations_that_were_away_are_the_same_to_the_bit() {
    let normed = Architecture { qk_norm: true, ..arch(false) };
    for (name, plain) in methods() {
        for (recompute, arch) in
            [("none", &arch(false)), ("norms", &normed), ("mlp", &arch(true)), ("block", &normed)]
        {
            let recompute: RecomputePlan = recompute.parse().unwrap();
            let plain = Recipe { recompute, ..plain.clone() };
            let mut reference = Run::new(arch, &plain);
            let (losses, state) = (reference.steps(0..2), reference.state());
            for offload in ["activations", "activations:0-2/2,3", "optimizer+weights+activations"] {
                let offload: Offload = offload.parse().unwrap();
                if offload.optimizer && !name.starts_with("full") {
                    continue;
                }
                let what = format!("{name}, recompute {}, {offload}", plain.recompute);
                let mut run = Run::new(arch, &Recipe { offload: offload.clone(), ..plain.clone() });
                let program = &run.plan.train;
                let away = |t: &&plimsoll_program::Tensor| {
                    t.home == Home::Host && t.class == Class::Activation
                };
                let away: Vec<&str> =
                    program.tensors.iter().filter(away).map(|t| t.name.as_str()).collect();
                assert!(away.len() > 1, "{what}: {away:?}");
                for n in (0..6).filter(|n| !offload.activations.contains(*n)) {
                    let here = format!("layers.{n}.mlp");
                    assert!(!away.iter().any(|name| name.starts_with(&here)), "{what}: {away:?}");
                }
                assert!(run.plan.slabs().host > 0, "{what}");
                assert_eq!(run.steps(0..2), losses, "{what}");
                for (a, b) in run.state().iter().zip(&state) {
                    assert!(a == b, "{what}: `{}` differs", a.0);
                }
            }
        }
    }
}

#[test]
fn a_run_goes_on_with_another_offload() {
    let folder = |name: &str| -> PathBuf {
        std::env::temp_dir().join(format!("plimsoll-offload-{}-{name}", std::process::id()))
    };
    let arch = arch(false);
    let plain = Recipe {
        master_weights: MasterWeights::F32,
        ..recipe(DType::Bf16, optimizers()[1].1, true, "block")
    };
    let mut reference = Run::new(&arch, &plain);
    reference.steps(0..2);
    let expected = (reference.steps(2..4), reference.state());
    let all = [
        (Offload::NONE, UpdateOn::Device),
        (Offload::OPTIMIZER, UpdateOn::Device),
        (Offload::OPTIMIZER_WEIGHTS, UpdateOn::Host),
        (Offload::OPTIMIZER_ACTIVATIONS, UpdateOn::Device),
        (Offload::OPTIMIZER, UpdateOn::Host),
        (Offload::ACTIVATIONS, UpdateOn::Device),
    ];
    for (n, (offload, update_on)) in all.iter().cloned().enumerate() {
        let (before, update_before) = all[(n + 1) % all.len()].clone();
        let what = format!("{offload} on {update_on:?} after {before} on {update_before:?}");
        let out = folder(&format!("{n}"));
        let first = Recipe { offload: before, update_on: update_before, ..plain.clone() };
        let mut first = Run::new(&arch, &first);
        first.steps(0..2);
        let state = TrainerState {
            step: 2,
            batches: 2,
            trained_tokens: 0,
            loss: None,
            validation_loss: None,
            early_stop: EarlyStop::new(None, 0.0).unwrap(),
            fingerprint: serde_json::Value::Null,
        };
        let files = ModelFiles::default();
        let path = first.session().save_checkpoint(&out, &state, &files, 1).unwrap();
        let mut second = Run::new(&arch, &Recipe { offload, update_on, ..plain.clone() });
        second.session().load_checkpoint(&path, &state.fingerprint).unwrap();
        let seen = (second.steps(2..4), second.state());
        assert!(seen == expected, "{what}");
        std::fs::remove_dir_all(&out).unwrap();
    }
}

#[test]
fn the_device_holds_what_is_in_use() {
    let arch = preset("llama-3-8b").unwrap();
    let state = Optimizer::AdamW(AdamW { state: DType::Bf16, ..AdamW::default() });
    let plan = |offload| {
        let recipe =
            Recipe { offload, batch: 4, seq: 2048, ..recipe(DType::Bf16, state, true, "block") };
        TrainPlan::new(&arch, &recipe, &TARGET).unwrap()
    };
    let slabs = |offload| plan(offload).slabs();
    let none = slabs(Offload::NONE);
    assert_eq!(none.host, 0);
    let parameters = arch.parameters() as u64;
    let embedding = (arch.vocab_size * arch.hidden_size) as u64;
    let optimizer = slabs(Offload::OPTIMIZER);
    // Two moments of two bytes; those of the norms and of the embedding stay.
    let norms = (2 * arch.num_hidden_layers as u64 + 1) * arch.hidden_size as u64;
    assert_eq!(optimizer.host, 4 * (parameters - embedding - norms));
    assert!(optimizer.device < 30_000_000_000, "{}", optimizer.device);
    // Updates on the host: no state on the device but the embedding's and the norms'; beside
    // the state two layers' worth of gradients and weights, in whole pieces.
    let on_host = |offload| {
        let recipe = Recipe { offload, update_on: UpdateOn::Host, ..plan(Offload::NONE).recipe };
        TrainPlan::new(&arch, &recipe, &TARGET).unwrap().slabs()
    };
    let updates = on_host(Offload::OPTIMIZER);
    assert!(updates.device < optimizer.device, "{} {}", updates.device, optimizer.device);
    let layer = 2 * (parameters - 2 * embedding) / arch.num_hidden_layers as u64;
    let ring = updates.host - optimizer.host;
    assert!((4 * layer..5 * layer).contains(&ring), "{ring}, a layer has {layer}");
    let weights = slabs(Offload::OPTIMIZER_WEIGHTS);
    assert!(weights.device < 16_000_000_000, "{}", weights.device);
    let blocks = parameters - 2 * embedding - norms;
    assert_eq!(weights.host, 4 * (parameters - norms) + 2 * blocks);
    let updates = on_host(Offload::OPTIMIZER_WEIGHTS);
    assert!(updates.device < weights.device, "{} {}", updates.device, weights.device);
    let activations = slabs(Offload::OPTIMIZER_ACTIVATIONS);
    assert!(activations.device < optimizer.device);
    assert!(activations.host > optimizer.host);
    // Large copies: nothing of the state below 8 MiB.
    let program = plan(Offload::OPTIMIZER).train;
    for op in program.ops.iter().filter(|op| program.lane(&op.kind) == Lane::HostToDevice) {
        let bytes = program.work(op).bytes;
        assert!(bytes >= f64::from(16 << 20), "{bytes}");
    }
    let layout = lay_out(&program);
    let far = program.tensors.iter().zip(&layout.placements);
    let far = far.filter(|(t, _)| t.home == Home::Host).filter_map(|(_, p)| p.as_ref());
    assert!(far.clone().count() > 250);
    assert!(far.map(|p| p.offset + p.bytes).max().unwrap() <= layout.host_bytes);
}

//! Several ranks against one: the same losses, norms and weights, whatever is
//! divided over them.

use std::collections::BTreeMap;
use std::path::Path;

use half::bf16;
use plimsoll_arch::{Architecture, DType};
use plimsoll_comm::{Communicator, threads};
use plimsoll_cpu::{CpuDevice, CpuTarget};
use plimsoll_model::{init_adapter, init_state, init_weights, read_architecture};
use plimsoll_plan::Device;
use plimsoll_program::{
    AdamW8bit, Codebook, Home, Lora, MasterWeights, Offload, Optimizer, Projection, Quant, Recipe,
    Recompute, RecomputePlan, Sgd, Sharding, UpdateOn, master_name, weight_parts,
};
use plimsoll_quant::join_master;
use plimsoll_train::{
    EarlyStop, MicroBatch, ModelFiles, Session, TrainPlan, TrainerState, checkpoints,
};
use safetensors::{Dtype, SafeTensors};
use tempfile::TempDir;

const TARGET: CpuTarget = CpuTarget { threads: 1 };
const SEED: u64 = 11;

/// A model of the fixtures, with a vocabulary that no number of ranks divides.
fn architecture(name: &str) -> Architecture {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
    Architecture { vocab_size: 251, ..read_architecture(&root.join(name)).unwrap() }
}

/// Micro-batches of (batch, seq), the same for any number of ranks.
struct Data {
    ids: Vec<i32>,
    labels: Vec<i32>,
    positions: Vec<i32>,
    doc_start: Vec<i32>,
}

impl Data {
    fn new(number: u64, batch: usize, seq: usize) -> Data {
        let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state % 251) as i32
        };
        let ids: Vec<i32> = (0..batch * seq).map(|_| next()).collect();
        let mut labels = ids.clone();
        labels.rotate_left(1);
        // Batches of unlike numbers of trained tokens.
        labels.truncate(batch * seq - number as usize % 7);
        labels.resize(batch * seq, -100);
        let positions = (0..batch * seq).map(|i| (i % seq) as i32).collect();
        Data { ids, labels, positions, doc_start: vec![0; batch * seq] }
    }

    fn micro(&self) -> MicroBatch<'_> {
        MicroBatch {
            ids: &self.ids,
            labels: &self.labels,
            positions: &self.positions,
            doc_start: &self.doc_start,
        }
    }
}

/// What a run leaves: loss and norm of each step, the mean loss of two batches, and
/// the trained tensors as they lie on the disk.
#[derive(Debug)]
struct Outcome {
    steps: Vec<(f32, f32)>,
    evaluated: f64,
    tensors: BTreeMap<String, Vec<f32>>,
}

/// Steps `from..to`, from the newest checkpoint in `out` on; it leaves one there.
fn train(arch: &Architecture, recipe: &Recipe, out: &Path, from: u64, to: u64) -> Outcome {
    let plan = TrainPlan::new(arch, recipe, &TARGET).unwrap();
    plan.train.verify().unwrap();
    plan.train_layout.verify(&plan.train).unwrap();
    plan.evaluate.verify().unwrap();
    let ranks = recipe.sharding.ranks;
    let mut outcomes: Vec<Outcome> = std::thread::scope(|scope| {
        let all: Vec<_> = threads(ranks)
            .into_iter()
            .map(|group| {
                let plan = &plan;
                scope.spawn(move || one_rank(plan, Box::new(group), out, from, to))
            })
            .collect();
        all.into_iter().map(|t| t.join().unwrap()).collect()
    });
    for other in &outcomes[1..] {
        assert_eq!(other.steps, outcomes[0].steps, "ranks disagree");
        assert_eq!(other.evaluated, outcomes[0].evaluated, "ranks disagree");
    }
    outcomes.swap_remove(0)
}

fn one_rank(
    plan: &TrainPlan,
    group: Box<dyn Communicator>,
    out: &Path,
    from: u64,
    to: u64,
) -> Outcome {
    let mut device = CpuDevice::in_group(plan.slabs(), 1, group).unwrap();
    let (program, layout, arch) = (&plan.train, &plan.train_layout, &plan.arch);
    init_state(&mut device, program, layout, arch).unwrap();
    init_weights(&mut device, program, layout, arch, SEED).unwrap();
    if let Some(lora) = &plan.recipe.lora {
        init_adapter(&mut device, program, layout, arch, lora, SEED).unwrap();
    }
    let mut session = Session { plan, device: &mut device };
    let (rank, ranks) = (session.rank() as u64, session.ranks() as u64);
    let fingerprint = serde_json::json!({});
    if from > 0 {
        let path = checkpoints(out).unwrap().pop().unwrap();
        let state = session.load_checkpoint(&path, &fingerprint).unwrap();
        assert_eq!(state.step, from);
    }
    let recipe = &plan.recipe;
    let (batch, seq, accumulate) = (recipe.batch, recipe.seq, recipe.accumulate as u64);
    let mut steps = Vec::new();
    for step in from..to {
        let first = step * accumulate * ranks;
        let data: Vec<Data> =
            (0..accumulate).map(|n| Data::new(first + n * ranks + rank, batch, seq)).collect();
        let micro: Vec<MicroBatch> = data.iter().map(Data::micro).collect();
        let result = session.train(&micro, 1e-3, step + 1, SEED).unwrap();
        steps.push((result.loss, result.grad_norm.unwrap_or(0.0)));
    }
    let (mut sum, mut tokens) = (0.0, 0);
    for round in 0..4 / ranks {
        let data = Data::new(1000 + round * ranks + rank, batch, seq);
        let (loss, count) = session.evaluate(&data.micro()).unwrap();
        sum += loss;
        tokens += count;
    }
    let path = session.save_checkpoint(out, &state_at(to), &ModelFiles::default(), 9).unwrap();
    Outcome { steps, evaluated: sum / tokens as f64, tensors: tensors(&path) }
}

fn state_at(step: u64) -> TrainerState {
    TrainerState {
        step,
        batches: 0,
        trained_tokens: 0,
        loss: None,
        validation_loss: None,
        early_stop: EarlyStop::new(None, 0.0).unwrap(),
        fingerprint: serde_json::json!({}),
    }
}

fn tensors(folder: &Path) -> BTreeMap<String, Vec<f32>> {
    let mut all = BTreeMap::new();
    for name in ["model.safetensors", "adapter_model.safetensors", "optimizer.safetensors"] {
        let Ok(bytes) = std::fs::read(folder.join(name)) else { continue };
        for (name, t) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let data = t.data();
            let values = match t.dtype() {
                Dtype::F32 => {
                    data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
                }
                Dtype::BF16 => data
                    .as_chunks::<2>()
                    .0
                    .iter()
                    .map(|b| bf16::from_le_bytes(*b).to_f32())
                    .collect(),
                Dtype::I16 => {
                    data.as_chunks::<2>().0.iter().map(|b| i16::from_le_bytes(*b).into()).collect()
                }
                _ => data.iter().map(|b| f32::from(*b)).collect(),
            };
            all.insert(name, values);
        }
    }
    assert!(!all.is_empty());
    all
}

/// The norm of the difference over the norm of the reference.
fn relative(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let squares = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>();
    let difference = squares(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b)));
    (difference / squares(&mut b.iter().map(|b| f64::from(*b))).max(1e-30)).sqrt()
}

/// Losses, norms and tensors agree to `tolerance`.
fn check(name: &str, found: &Outcome, expected: &Outcome, tolerance: f64) {
    let mut worst = (0.0f64, String::new());
    let mut note = |error: f64, what: &str| {
        if error > worst.0 || error.is_nan() {
            worst = (error, what.to_owned());
        }
    };
    assert_eq!(found.steps.len(), expected.steps.len());
    for (step, (a, b)) in found.steps.iter().zip(&expected.steps).enumerate() {
        note(f64::from((a.0 - b.0) / b.0).abs(), &format!("loss of step {step}"));
        note(f64::from((a.1 - b.1) / b.1.max(1e-9)).abs(), &format!("norm of step {step}"));
    }
    note(((found.evaluated - expected.evaluated) / expected.evaluated).abs(), "evaluation");
    assert!(found.tensors.keys().eq(expected.tensors.keys()), "{name}: other tensors");
    for (tensor, values) in &found.tensors {
        // A key's bias moves all scores of a query nearly alike, so that its gradient is
        // nearly none, of which AdamW makes steps as large as any.
        let noise = if tensor.ends_with("k_proj.bias") { 0.01 } else { 1.0 };
        note(noise * relative(values, &expected.tensors[tensor]), tensor);
    }
    println!("{name}: worst {:.1e} ({})", worst.0, worst.1);
    assert!(worst.0 < tolerance, "{name}: {:.2e} ({})", worst.0, worst.1);
}

fn with_ranks(recipe: &Recipe, ranks: usize, zero: u8) -> Recipe {
    assert_eq!(recipe.accumulate % ranks, 0);
    let sharding = Sharding { ranks, zero, ..recipe.sharding };
    Recipe { accumulate: recipe.accumulate / ranks, sharding, ..recipe.clone() }
}

/// A recipe on one rank, and on 2 and 4 with every stage.
fn compare(arch: &Architecture, recipe: &Recipe, what: &str, tolerance: f64) {
    let out = TempDir::new().unwrap();
    let one = train(arch, recipe, out.path(), 0, 3);
    for ranks in [2, 4] {
        for zero in 0..4 {
            let out = TempDir::new().unwrap();
            let many = train(arch, &with_ranks(recipe, ranks, zero), out.path(), 0, 3);
            check(&format!("{what}, {ranks} ranks, zero {zero}"), &many, &one, tolerance);
        }
    }
}

/// Eight micro-batches of two rows a step on one rank.
fn full(precision: DType) -> Recipe {
    Recipe { accumulate: 8, max_grad_norm: Some(0.5), ..Recipe::full(precision, 2, 24) }
}

fn lora() -> Lora {
    Lora {
        rank: 8,
        alpha: 16.0,
        rslora: false,
        dropout: 0.1,
        targets: Projection::ALL.to_vec(),
        save_embed_tokens: false,
        save_lm_head: false,
    }
}

#[test]
fn full_fine_tunes_are_those_of_one_rank() {
    for model in ["llama-micro", "qwen2-micro-tied"] {
        let recompute = RecomputePlan::uniform(Recompute::Norms);
        let recipe = Recipe { recompute, ..full(DType::F32) };
        compare(&architecture(model), &recipe, model, 1e-5);
    }
}

#[test]
fn one_micro_batch_a_rank_reduces_in_backward() {
    let arch = architecture("llama-micro");
    for ranks in [2, 4] {
        let recipe = Recipe { accumulate: ranks, ..full(DType::F32) };
        let out = TempDir::new().unwrap();
        let one = train(&arch, &recipe, out.path(), 0, 3);
        for zero in 0..4 {
            let out = TempDir::new().unwrap();
            let many = train(&arch, &with_ranks(&recipe, ranks, zero), out.path(), 0, 3);
            check(&format!("{ranks} ranks at once, zero {zero}"), &many, &one, 1e-5);
        }
    }
}

#[test]
fn updates_inside_backward_are_those_at_the_end() {
    for model in ["llama-micro", "qwen2-micro-tied"] {
        let arch = architecture(model);
        for ranks in [2, 4] {
            let recipe = Recipe { accumulate: ranks, max_grad_norm: None, ..full(DType::F32) };
            let out = TempDir::new().unwrap();
            let one = train(&arch, &recipe, out.path(), 0, 3);
            for (zero, reduce) in
                [(0, DType::F32), (1, DType::F32), (2, DType::F32), (3, DType::F32)]
            {
                let out = TempDir::new().unwrap();
                let many = with_ranks(&recipe, ranks, zero);
                let sharding = Sharding { reduce, ..many.sharding };
                let many = Recipe { optimizer_in_backward: true, sharding, ..many };
                let many = train(&arch, &many, out.path(), 0, 3);
                let what = format!("{model}, {ranks} ranks, zero {zero}, updates in backward");
                check(&what, &many, &one, 1e-5);
            }
        }
    }
}

/// Every kind of state; the same bits with and without offload.
#[test]
fn offload_changes_no_bit_on_several_ranks() {
    let eight = Optimizer::AdamW8bit(AdamW8bit::default());
    let sgd = Optimizer::Sgd(Sgd { momentum: 0.9, weight_decay: 0.1, state: DType::F32 });
    for (model, optimizer, precision, fused) in [
        ("llama-micro", Recipe::full(DType::F32, 1, 1).optimizer, DType::F32, true),
        ("llama-micro", eight, DType::Bf16, true),
        ("qwen2-micro-tied", eight, DType::F32, false),
        ("qwen2-micro-tied", sgd, DType::Bf16, false),
    ] {
        let arch = architecture(model);
        for (ranks, zero) in [(2, 0), (2, 1), (4, 2), (3, 3), (4, 3)] {
            let clip = if fused { None } else { Some(0.5) };
            let sharding = Sharding { ranks, zero, reduce: DType::F32 };
            let recipe = Recipe {
                optimizer,
                sharding,
                accumulate: if fused { 1 } else { 2 },
                optimizer_in_backward: fused,
                max_grad_norm: clip,
                master_weights: match (precision, zero) {
                    (DType::Bf16, 1..) => MasterWeights::F32,
                    _ => MasterWeights::None,
                },
                ..full(precision)
            };
            let out = TempDir::new().unwrap();
            let without = train(&arch, &recipe, out.path(), 0, 3);
            for (offload, update_on) in [
                ("optimizer", UpdateOn::Device),
                ("optimizer+weights", UpdateOn::Device),
                ("optimizer+activations", UpdateOn::Device),
                ("optimizer", UpdateOn::Host),
                ("optimizer+weights", UpdateOn::Host),
            ] {
                let offload: Offload = offload.parse().unwrap();
                let what = format!(
                    "{model}, {ranks} ranks, zero {zero}, {fused}, {offload} on {update_on:?}"
                );
                let recipe = Recipe { offload, update_on, ..recipe.clone() };
                let plan = TrainPlan::new(&arch, &recipe, &TARGET).unwrap();
                // The host holds what it was meant to, of each rank its part.
                let far = plan.train.tensors.iter().filter(|t| t.home == Home::Host && t.resident);
                let far: u64 = far.map(|t| t.bytes()).sum();
                assert!(far > 0 && plan.slabs().host >= far, "{what}");
                let out = TempDir::new().unwrap();
                let with = train(&arch, &recipe, out.path(), 0, 3);
                check(&what, &with, &without, f64::MIN_POSITIVE);
            }
        }
    }
}

#[test]
fn adapters_are_those_of_one_rank() {
    let arch = architecture("qwen2-micro-tied");
    let recipe =
        Recipe { method: plimsoll_program::Method::Lora, lora: Some(lora()), ..full(DType::F32) };
    compare(&arch, &recipe, "lora", 1e-5);
    let quant = Some(Quant { codebook: Codebook::Nf4, double: true, head: false });
    compare(&arch, &Recipe { quant, ..recipe }, "qlora", 1e-5);
}

#[test]
fn other_optimizers_are_those_of_one_rank() {
    let arch = architecture("llama-micro");
    let sgd = Sgd { momentum: 0.9, weight_decay: 0.1, state: DType::F32 };
    compare(&arch, &Recipe { optimizer: Optimizer::Sgd(sgd), ..full(DType::F32) }, "sgd", 1e-5);
    let plain = Sgd { momentum: 0.0, ..sgd };
    let recipe =
        Recipe { optimizer: Optimizer::Sgd(plain), max_grad_norm: None, ..full(DType::F32) };
    compare(&arch, &recipe, "plain sgd", 1e-5);
    // A gradient that differs in its last bit may have another code.
    let optimizer = Optimizer::AdamW8bit(AdamW8bit::default());
    compare(&arch, &Recipe { optimizer, ..full(DType::F32) }, "8 bit", 2e-2);
}

#[test]
fn rounding_does_not_know_the_ranks() {
    bits_do_not_know_the_ranks(MasterWeights::None);
}

#[test]
fn masters_do_not_know_the_ranks() {
    bits_do_not_know_the_ranks(MasterWeights::F32);
}

/// One micro-batch: the sums over ranks add zeros, so that bits can be compared.
fn bits_do_not_know_the_ranks(master_weights: MasterWeights) {
    let arch = architecture("llama-micro");
    let recipe = Recipe { accumulate: 1, max_grad_norm: None, master_weights, ..full(DType::Bf16) };
    let out = TempDir::new().unwrap();
    let one = train(&arch, &recipe, out.path(), 0, 1);
    for (ranks, zero, reduce) in [(2, 1, DType::Bf16), (2, 2, DType::F32), (4, 3, DType::F32)] {
        let sharding = Sharding { ranks, zero, reduce };
        let out = TempDir::new().unwrap();
        let many = idle_others(&arch, &Recipe { sharding, ..recipe.clone() }, out.path());
        for (tensor, values) in &many {
            assert_eq!(values, &one.tensors[tensor], "{tensor}, {ranks} ranks, zero {zero}");
        }
    }
}

/// A step in which rank 0 alone has tokens to train.
fn idle_others(arch: &Architecture, recipe: &Recipe, out: &Path) -> BTreeMap<String, Vec<f32>> {
    let plan = TrainPlan::new(arch, recipe, &TARGET).unwrap();
    std::thread::scope(|scope| {
        for group in threads(recipe.sharding.ranks) {
            let plan = &plan;
            scope.spawn(move || {
                let rank = group.rank();
                let mut device = CpuDevice::in_group(plan.slabs(), 1, Box::new(group)).unwrap();
                let (program, layout) = (&plan.train, &plan.train_layout);
                init_state(&mut device, program, layout, arch).unwrap();
                init_weights(&mut device, program, layout, arch, SEED).unwrap();
                let mut session = Session { plan, device: &mut device };
                let mut data = Data::new(0, recipe.batch, recipe.seq);
                if rank > 0 {
                    data.labels.fill(-100);
                }
                session.train(&[data.micro()], 1e-3, 1, SEED).unwrap();
                let files = ModelFiles::default();
                session.save_checkpoint(out, &state_at(1), &files, 1).unwrap();
            });
        }
    });
    tensors(&checkpoints(out).unwrap()[0])
}

/// A run of one rank and of several, each after a step: what is loaded by another number
/// of ranks is what was saved.
#[test]
fn masters_are_loaded_by_any_number_of_ranks() {
    let arch = architecture("llama-micro");
    let masters = Recipe { master_weights: MasterWeights::F32, ..full(DType::Bf16) };
    for optimizer in [
        masters.optimizer,
        Optimizer::AdamW8bit(AdamW8bit::default()),
        Optimizer::Sgd(Sgd { momentum: 0.0, weight_decay: 0.1, state: DType::F32 }),
    ] {
        let recipe = Recipe { optimizer, ..masters.clone() };
        let out = TempDir::new().unwrap();
        let (mut before, mut at) = (None, 0);
        for (ranks, zero) in [(1, 0), (2, 1), (4, 3), (2, 2), (1, 0)] {
            // The first makes two steps, the others none: they load and save.
            let to = if at == 0 { 2 } else { at };
            let found = train(&arch, &with_ranks(&recipe, ranks, zero), out.path(), at, to);
            let part = &weight_parts(&arch)[1];
            assert!(found.tensors[&master_name(&part.tensor)].iter().any(|low| *low != 0.0));
            assert!(before.replace(found.tensors.clone()).is_none_or(|b| b == found.tensors));
            at = 2;
        }
    }
}

#[test]
fn masters_are_those_of_one_rank() {
    let arch = architecture("llama-micro");
    // Gradients differ in their last bits, of which AdamW makes whole steps.
    let sgd = Sgd { momentum: 0.9, weight_decay: 0.1, state: DType::F32 };
    let recipe = Recipe {
        optimizer: Optimizer::Sgd(sgd),
        master_weights: MasterWeights::F32,
        ..full(DType::Bf16)
    };
    let out = TempDir::new().unwrap();
    let one = masters(&train(&arch, &recipe, out.path(), 0, 3));
    for zero in 0..4 {
        let mut many = with_ranks(&recipe, 2, zero);
        many.sharding.reduce = DType::F32;
        let out = TempDir::new().unwrap();
        let many = masters(&train(&arch, &many, out.path(), 0, 3));
        for (name, values) in &many {
            let error = relative(values, &one[name]);
            assert!(error < 1e-4, "{name}, zero {zero}: {error:e}");
        }
    }
}

/// The float32 weights of a checkpoint that holds their halves.
fn masters(run: &Outcome) -> BTreeMap<String, Vec<f32>> {
    let arch = architecture("llama-micro");
    let parts = weight_parts(&arch).into_iter().map(|part| {
        let weights = &run.tensors[&part.source];
        let low = &run.tensors[&master_name(&part.tensor)];
        let cols = part.shape.get(1).copied().unwrap_or(1);
        let low = &low[part.row * cols..][..weights.len()];
        let join =
            |(weight, low): (&f32, &f32)| join_master((weight.to_bits() >> 16) as u16, *low as i16);
        (part.source, weights.iter().zip(low).map(join).collect())
    });
    parts.collect()
}

#[test]
fn a_run_goes_on_with_another_number_of_ranks() {
    let arch = architecture("llama-micro");
    let recipe = full(DType::F32);
    let straight = TempDir::new().unwrap();
    let expected = train(&arch, &recipe, straight.path(), 0, 6);
    let out = TempDir::new().unwrap();
    let mut steps = Vec::new();
    let mut last = None;
    for (ranks, zero, from, to) in [(4, 3, 0, 2), (2, 1, 2, 4), (1, 0, 4, 6)] {
        let found = train(&arch, &with_ranks(&recipe, ranks, zero), out.path(), from, to);
        steps.extend(found.steps.clone());
        last = Some(found);
    }
    let found = Outcome { steps, ..last.unwrap() };
    check("4, then 2, then 1 rank", &found, &expected, 1e-5);
    assert_eq!(checkpoints(out.path()).unwrap().len(), 3);
}

#[test]
fn the_slab_of_a_rank_shrinks_with_every_stage() {
    let arch = Architecture { vocab_size: 4096, ..architecture("llama-micro") };
    let bytes = |zero: u8| -> u64 {
        let recipe = with_ranks(&Recipe { accumulate: 4, ..full(DType::F32) }, 4, zero);
        TrainPlan::new(&arch, &recipe, &TARGET).unwrap().slab_bytes()
    };
    let all: Vec<u64> = (0..4).map(bytes).collect();
    println!("{all:?}");
    assert!(all.is_sorted_by(|a, b| a > b), "{all:?}");
}

#[test]
fn a_device_of_another_group_is_refused() {
    let arch = architecture("llama-micro");
    let plan = TrainPlan::new(&arch, &with_ranks(&full(DType::F32), 4, 3), &TARGET).unwrap();
    let mut device = CpuDevice::new(plan.slab_bytes(), 1).unwrap();
    let error = device.run(&plan.train, &plan.train_layout, 0).unwrap_err().to_string();
    assert!(error.contains("one of 4 ranks"), "{error}");
}

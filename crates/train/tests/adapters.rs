//! Adapters beside frozen weights: against what PEFT and bitsandbytes compute, and
//! against dense models with the same weights.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use plimsoll_arch::{Architecture, DType};
use plimsoll_cpu::{CpuDevice, CpuTarget};
use plimsoll_model::{
    Adapter, Checkpoint, init_adapter, init_state, init_weights, load_adapter, load_weights,
};
use plimsoll_plan::{Device, Layout, lay_out};
use plimsoll_program::{
    Codebook, Lora, Program, Projection, Quant, Recipe, Recompute, RecomputePlan, WeightPart,
    build, weight_parts,
};
use plimsoll_train::{MicroBatch, Session, TrainPlan};
use safetensors::{Dtype, SafeTensors};

const TOLERANCE: f64 = 1e-4;
const THREADS: usize = 2;
const TARGET: CpuTarget = CpuTarget { threads: THREADS };
const QUANT: Quant = Quant { codebook: Codebook::Nf4, double: true, head: false };

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The norm of the difference over the norm of the reference.
fn relative(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let (mut difference, mut norm) = (0.0, 0.0);
    for (a, b) in a.iter().zip(b) {
        difference += f64::from(a - b).powi(2);
        norm += f64::from(*b).powi(2);
    }
    let error = (difference / norm.max(1e-30)).sqrt();
    assert!(!error.is_nan());
    error
}

fn read(device: &mut dyn Device, program: &Program, layout: &Layout, name: &str) -> Vec<f32> {
    let id = program.find(name).unwrap_or_else(|| panic!("no tensor {name}"));
    let mut out = Vec::new();
    let len = program.tensor(id).bytes() as usize;
    let mut take = |bytes: &[u8]| {
        out.extend_from_slice(bytemuck::cast_slice(bytes));
        Ok(())
    };
    device.download(program.tensor(id).home, layout.offset(id), len, &mut take).unwrap();
    out
}

fn write<T: bytemuck::Pod>(
    device: &mut dyn Device,
    program: &Program,
    layout: &Layout,
    name: &str,
    data: &[T],
) {
    let id = program.find(name).unwrap_or_else(|| panic!("no tensor {name}"));
    let bytes: &[u8] = bytemuck::cast_slice(data);
    let mut fill = |out: &mut [u8]| {
        out.copy_from_slice(bytes);
        Ok(())
    };
    device.upload(program.tensor(id).home, layout.offset(id), bytes.len(), &mut fill).unwrap();
}

/// The rows of a part of a checkpoint in the tensor that holds it.
fn part(
    device: &mut dyn Device,
    program: &Program,
    layout: &Layout,
    prefix: &str,
    part: &WeightPart,
) -> Vec<f32> {
    let whole = read(device, program, layout, &format!("{prefix}{}", part.tensor));
    let cols = part.shape.get(1).copied().unwrap_or(1);
    whole[part.row * cols..][..part.shape.iter().product()].to_vec()
}

struct Batch {
    ids: Vec<i32>,
    labels: Vec<i32>,
    positions: Vec<i32>,
    doc_start: Vec<i32>,
    rows: usize,
    seq: usize,
}

impl Batch {
    /// Every token is learnt from those before it.
    fn new(ids: Vec<i32>, rows: usize) -> Batch {
        let seq = ids.len() / rows;
        let mut labels = Vec::new();
        for row in ids.chunks(seq) {
            labels.extend_from_slice(&row[1..]);
            labels.push(-100);
        }
        let positions = (0..rows).flat_map(|_| 0..seq as i32).collect();
        let doc_start = vec![0; ids.len()];
        Batch { ids, labels, positions, doc_start, rows, seq }
    }

    fn random(arch: &Architecture, rows: usize, seq: usize) -> Batch {
        let id = |i: usize| ((i * 7919 + i * i * 31) % arch.vocab_size) as i32;
        Batch::new((0..rows * seq).map(id).collect(), rows)
    }

    /// As one micro-batch, or a row each.
    fn micro(&self, accumulate: usize) -> Vec<MicroBatch<'_>> {
        let len = self.ids.len() / accumulate;
        let slice = |n: usize| MicroBatch {
            ids: &self.ids[n * len..][..len],
            labels: &self.labels[n * len..][..len],
            positions: &self.positions[n * len..][..len],
            doc_start: &self.doc_start[n * len..][..len],
        };
        (0..accumulate).map(slice).collect()
    }
}

/// Where weights and adapters come from.
enum Weights<'a> {
    Files(&'a Checkpoint, &'a Adapter),
    Random,
}

impl Weights<'_> {
    fn fill(&self, device: &mut dyn Device, program: &Program, layout: &Layout, plan: &Setup) {
        init_state(device, program, layout, &plan.arch).unwrap();
        match self {
            Weights::Files(checkpoint, adapter) => {
                load_weights(device, program, layout, &plan.arch, checkpoint).unwrap();
                load_adapter(device, program, layout, &plan.arch, adapter).unwrap();
            }
            Weights::Random => {
                init_weights(device, program, layout, &plan.arch, 3).unwrap();
                let Some(lora) = &plan.recipe.lora else { return };
                init_adapter(device, program, layout, &plan.arch, lora, 5).unwrap();
                // B as well: at zero A has no gradient.
                for p in lora.parts(&plan.arch).iter().filter(|p| p.tensor.ends_with("lora_b")) {
                    let value = |i: usize| 0.05 * ((i * 37 + p.tensor.len() * 11) as f32).sin();
                    let b: Vec<f32> = (0..p.shape[0] * p.shape[1]).map(value).collect();
                    write(device, program, layout, &p.tensor, &b);
                }
            }
        }
    }
}

struct Setup {
    arch: Architecture,
    recipe: Recipe,
}

impl Setup {
    fn logits(&self, weights: &Weights, batch: &Batch) -> Vec<f32> {
        let recipe = Recipe { batch: batch.rows, accumulate: 1, ..self.recipe.clone() };
        let program = build::logits(&self.arch, &recipe, &TARGET).unwrap();
        program.verify().unwrap();
        let layout = lay_out(&program);
        let mut device = CpuDevice::new(layout.slab_bytes, THREADS).unwrap();
        weights.fill(&mut device, &program, &layout, self);
        write(&mut device, &program, &layout, "ids", &batch.ids);
        write(&mut device, &program, &layout, "positions", &batch.positions);
        write(&mut device, &program, &layout, "doc_start", &batch.doc_start);
        device.run(&program, &layout, 0).unwrap();
        read(&mut device, &program, &layout, "logits")
    }

    fn plan(&self) -> TrainPlan {
        let plan = TrainPlan::new(&self.arch, &self.recipe, &TARGET).unwrap();
        plan.train.verify().unwrap();
        plan.train_layout.verify(&plan.train).unwrap();
        plan
    }

    fn device(&self, plan: &TrainPlan, weights: &Weights) -> CpuDevice {
        let mut device = CpuDevice::new(plan.slab_bytes(), THREADS).unwrap();
        weights.fill(&mut device, &plan.train, &plan.train_layout, self);
        device
    }

    /// Loss and the gradient of every tensor of the adapter, by its name on disk.
    fn gradients(&self, weights: &Weights, batch: &Batch) -> (f32, HashMap<String, Vec<f32>>) {
        let plan = self.plan();
        let mut device = self.device(&plan, weights);
        let mut session = Session { plan: &plan, device: &mut device };
        let micro = batch.micro(self.recipe.accumulate);
        session.forward_backward(&micro, 0.0, 1, 9).unwrap();
        let (program, layout) = (&plan.train, &plan.train_layout);
        let loss = read(&mut device, program, layout, "loss")[0];
        let parts = self.recipe.lora.as_ref().unwrap().parts(&self.arch);
        // A tied head is the embedding once more.
        let once = |p: &WeightPart| !(p.tensor == "embed_tokens" && p.source.contains("lm_head"));
        let parts = parts.into_iter().filter(once);
        let gradient = |p: WeightPart| {
            let d = part(&mut device, program, layout, "d_", &p);
            (p.source, d)
        };
        (loss, parts.map(gradient).collect())
    }
}

/// Recipes that must all give the same numbers.
fn variants(base: &Recipe) -> Vec<(String, Recipe)> {
    let mut all = Vec::new();
    for level in Recompute::ALL {
        for loss_rows in [None, Some(7)] {
            let recompute = RecomputePlan::uniform(level);
            let recipe = Recipe { recompute, loss_rows, ..base.clone() };
            all.push((format!("recompute {}, loss rows {loss_rows:?}", level.name()), recipe));
        }
    }
    let accumulate = base.batch;
    all.push(("accumulated".into(), Recipe { batch: 1, accumulate, ..base.clone() }));
    all
}

#[test]
fn logits_and_gradients_are_those_of_peft_on_four_bits() {
    let golden = root().join("fixtures/qlora");
    let bytes = std::fs::read(golden.join("golden.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let floats = |name: &str| {
        let t = tensors.tensor(name).unwrap();
        assert_eq!(t.dtype(), Dtype::F32);
        bytemuck::pod_collect_to_vec::<u8, f32>(t.data())
    };
    let ids = bytemuck::pod_collect_to_vec(tensors.tensor("input_ids").unwrap().data());
    let batch = Batch::new(ids, 2);
    let text = std::fs::read_to_string(golden.join("golden.json")).unwrap();
    let meta: serde_json::Value = serde_json::from_str(&text).unwrap();
    let expected_loss = meta["loss"].as_f64().unwrap();

    // Quantized while it is loaded, and as transformers quantized it.
    let mut bases = vec![root().join("fixtures/llama-micro")];
    let shared =
        std::env::var_os("PLIMSOLL_SHARED").map_or(root().join("../shared"), PathBuf::from);
    let quantized = shared.join("golden/qlora/quantized");
    match quantized.exists() {
        true => bases.push(quantized),
        false => eprintln!("skipped: {} is not there", quantized.display()),
    }
    for base in bases {
        let checkpoint = Checkpoint::open(&base).unwrap();
        let arch = checkpoint.architecture().clone();
        let adapter = Adapter::open(&golden.join("adapter"), &arch).unwrap();
        assert_eq!(adapter.base(), Some("../llama-micro"));
        let weights = Weights::Files(&checkpoint, &adapter);
        let recipe = Recipe::lora(DType::F32, 2, batch.seq, adapter.lora().clone());
        let recipe = Recipe { quant: Some(QUANT), ..recipe };
        let setup = |recipe: Recipe| Setup { arch: arch.clone(), recipe };
        let error = relative(&setup(recipe.clone()).logits(&weights, &batch), &floats("logits"));
        println!("{}: logits {error:.1e}", base.display());
        assert!(error < TOLERANCE, "{}: logits {error:.2e}", base.display());
        for (name, recipe) in variants(&recipe) {
            let (loss, gradients) = setup(recipe).gradients(&weights, &batch);
            let error = (f64::from(loss) - expected_loss).abs() / expected_loss;
            assert!(error < 1e-5, "{name}: loss {loss} {expected_loss}");
            let mut worst = 0f64;
            for (tensor, gradient) in &gradients {
                let peft = format!("grad.{}", tensor.replace(".weight", ".default.weight"));
                let error = relative(gradient, &floats(&peft));
                worst = worst.max(error);
                assert!(error < TOLERANCE, "{name}: gradient of {tensor} {error:.2e}");
            }
            assert_eq!(gradients.len(), 28);
            println!("{}, {name}: 28 gradients, worst {worst:.1e}", base.display());
        }
    }
}

/// Small models of both kinds: bare, and with biases, head norms and a tied head.
fn architectures() -> Vec<Architecture> {
    let path = root().join("fixtures/llama-micro");
    let bare = Checkpoint::open(&path).unwrap().architecture().clone();
    let full = Architecture {
        attention_bias: true,
        qk_norm: true,
        tie_word_embeddings: true,
        ..bare.clone()
    };
    vec![bare, full]
}

/// (rows of a, columns of b) = a b.
fn product(a: &[f32], b: &[f32], inner: usize) -> Vec<f32> {
    let (m, n) = (a.len() / inner, b.len() / inner);
    let mut out = vec![0.0f64; m * n];
    for i in 0..m {
        for k in 0..inner {
            let x = f64::from(a[i * inner + k]);
            for j in 0..n {
                out[i * n + j] += x * f64::from(b[k * n + j]);
            }
        }
    }
    out.into_iter().map(|x| x as f32).collect()
}

fn transposed(a: &[f32], cols: usize) -> Vec<f32> {
    let rows = a.len() / cols;
    (0..a.len()).map(|i| a[i % rows * cols + i / rows]).collect()
}

/// The dense model W + scale B A has the same loss, and its gradients dW give
/// dB = scale dW A^T and dA = scale B^T dW.
#[test]
fn adapters_are_the_dense_model_that_they_merge_into() {
    let (q, k, v, o) = (Projection::Q, Projection::K, Projection::V, Projection::O);
    let (gate, up, down) = (Projection::Gate, Projection::Up, Projection::Down);
    let subsets: [&[Projection]; 9] = [
        &Projection::ALL,
        &[q, v],
        &[k],
        &[q, k],
        &[o],
        &[up],
        &[gate, down],
        &[v, o, up],
        &[down],
    ];
    for arch in architectures() {
        for (n, targets) in subsets.into_iter().enumerate() {
            let lora = Lora {
                rank: 5,
                alpha: 7.0,
                rslora: n % 2 == 1,
                targets: targets.to_vec(),
                save_embed_tokens: n % 3 == 1,
                save_lm_head: n % 3 == 2 && !arch.tie_word_embeddings,
                ..Lora::default()
            };
            let batch = Batch::random(&arch, 2, 24);
            let base = Recipe::lora(DType::F32, 2, 24, lora.clone());
            let setup = Setup { arch: arch.clone(), recipe: base.clone() };
            let (loss, expected) = dense_gradients(&setup, &lora, &batch);
            for (name, recipe) in variants(&base) {
                let setup = Setup { arch: arch.clone(), recipe };
                let (found, gradients) = setup.gradients(&Weights::Random, &batch);
                let what = format!("{targets:?}, {name}, tied {}", arch.tie_word_embeddings);
                assert!((found - loss).abs() < 1e-5 * loss, "{what}: loss {found} {loss}");
                for (tensor, gradient) in &gradients {
                    let error = relative(gradient, &expected[tensor]);
                    assert!(error < TOLERANCE, "{what}: {tensor} {error:.2e}");
                }
            }
        }
    }
}

fn dense_gradients(setup: &Setup, lora: &Lora, batch: &Batch) -> (f32, HashMap<String, Vec<f32>>) {
    let arch = &setup.arch;
    let plan = setup.plan();
    let mut device = setup.device(&plan, &Weights::Random);
    let (program, layout) = (&plan.train, &plan.train_layout);
    let parts = lora.parts(arch);
    let mut adapter: HashMap<String, Vec<f32>> = HashMap::new();
    for p in &parts {
        adapter.insert(p.source.clone(), part(&mut device, program, layout, "", p));
    }

    let recipe = Recipe::full(DType::F32, batch.rows, batch.seq);
    let dense = Setup { arch: arch.clone(), recipe };
    let plan = dense.plan();
    let mut device = dense.device(&plan, &Weights::Random);
    let (program, layout) = (&plan.train, &plan.train_layout);
    let (rank, scale) = (lora.rank, lora.scale());
    let pair = |p: &WeightPart| {
        let module = format!("base_model.model.{}", p.source.strip_suffix(".weight")?);
        let a = adapter.get(&format!("{module}.lora_A.weight"))?;
        let b = adapter.get(&format!("{module}.lora_B.weight"))?;
        Some((module, a, b))
    };
    for p in weight_parts(arch) {
        let Some((_, a, b)) = pair(&p) else { continue };
        let mut whole = read(&mut device, program, layout, &p.tensor);
        let first = p.row * p.shape[1];
        for (w, x) in whole[first..].iter_mut().zip(product(b, a, rank)) {
            *w += scale * x;
        }
        write(&mut device, program, layout, &p.tensor, &whole);
    }
    let mut session = Session { plan: &plan, device: &mut device };
    session.forward_backward(&batch.micro(1), 0.0, 1, 9).unwrap();
    let loss = read(&mut device, program, layout, "loss")[0];
    let mut expected = HashMap::new();
    for p in weight_parts(arch) {
        let saved = format!("base_model.model.{}", p.source);
        let d_w = part(&mut device, program, layout, "d_", &p);
        if parts.iter().any(|p| p.source == saved) {
            expected.insert(saved, d_w.clone());
        }
        let Some((module, a, b)) = pair(&p) else { continue };
        let scaled = |x: Vec<f32>| x.into_iter().map(|x| scale * x).collect::<Vec<f32>>();
        let d_b = scaled(product(&d_w, &transposed(a, p.shape[1]), p.shape[1]));
        let d_a = scaled(product(&transposed(b, rank), &d_w, p.shape[0]));
        expected.insert(format!("{module}.lora_A.weight"), d_a);
        expected.insert(format!("{module}.lora_B.weight"), d_b);
    }
    (loss, expected)
}

/// The slope of the loss along a direction, by a central difference, with the masks
/// of one seed. Forward and backward must drop the same.
#[test]
fn gradients_with_dropout_are_the_slope_of_the_loss() {
    for arch in architectures() {
        // Norms over heads of near zero bend the loss too much for differences.
        let arch = Architecture { qk_norm: false, ..arch };
        let batch = Batch::random(&arch, 2, 24);
        for level in [Recompute::None, Recompute::Block] {
            let lora = Lora { rank: 4, dropout: 0.3, ..Lora::default() };
            let recipe = Recipe {
                recompute: RecomputePlan::uniform(level),
                ..Recipe::lora(DType::F32, 2, 24, lora.clone())
            };
            let setup = Setup { arch: arch.clone(), recipe };
            let plan = setup.plan();
            let (program, layout) = (&plan.train, &plan.train_layout);
            for kind in ["lora_a", "lora_b"] {
                for layer in 0..2 {
                    let mut device = setup.device(&plan, &Weights::Random);
                    let run = |device: &mut CpuDevice| {
                        let mut session = Session { plan: &plan, device };
                        session.forward_backward(&batch.micro(1), 0.0, 1, 9).unwrap();
                        f64::from(read(device, program, layout, "loss")[0])
                    };
                    run(&mut device);
                    let prefix = format!("layers.{layer}.");
                    let chosen = program.tensors.iter().map(|t| &t.name);
                    let chosen: Vec<&String> =
                        chosen.filter(|n| n.starts_with(&prefix) && n.ends_with(kind)).collect();
                    assert!(!chosen.is_empty());
                    // Along the gradient itself, where the slope is its norm.
                    let mut gradients = Vec::new();
                    for name in &chosen {
                        let value = read(&mut device, program, layout, name);
                        let d = read(&mut device, program, layout, &format!("d_{name}"));
                        gradients.push((*name, value, d));
                    }
                    let all = gradients.iter().flat_map(|g| &g.2);
                    let norm = all.map(|d| f64::from(*d).powi(2)).sum::<f64>().sqrt();
                    let step = 0.001;
                    let mut at = |sign: f64| {
                        for (name, value, d) in &gradients {
                            let x = value.iter().zip(d);
                            let moved = |(x, d): (&f32, &f32)| {
                                x + (sign * step / norm * f64::from(*d)) as f32
                            };
                            let moved: Vec<f32> = x.map(moved).collect();
                            write(&mut device, program, layout, name, &moved);
                        }
                        run(&mut device)
                    };
                    let slope = (at(1.0) - at(-1.0)) / (2.0 * step);
                    let error = (slope - norm).abs() / norm;
                    assert!(error < 0.02, "{level:?} {kind} {layer}: {slope} {norm}");
                }
            }
        }
    }
}

/// Each micro-batch of a step drops other activations.
#[test]
fn dropout_differs_between_micro_batches() {
    let arch = architectures().remove(0);
    let row = Batch::random(&arch, 1, 24);
    let twice = Batch::new([&row.ids[..], &row.ids[..]].concat(), 2);
    let lora = Lora { rank: 4, dropout: 0.3, ..Lora::default() };
    let recipe = Recipe::lora(DType::F32, 1, 24, lora);
    let losses = |accumulate: usize, batch: &Batch| {
        let setup = Setup { arch: arch.clone(), recipe: Recipe { accumulate, ..recipe.clone() } };
        setup.gradients(&Weights::Random, batch).0
    };
    let (one, two) = (losses(1, &row), losses(2, &twice));
    assert!((one - two).abs() > 1e-6, "{one} {two}");
    assert!((one - two).abs() < 0.1 * one, "{one} {two}");
}

#[test]
fn updating_inside_backward_gives_the_same_adapters() {
    let arch = architectures().remove(1);
    let batch = Batch::random(&arch, 2, 24);
    let lora = Lora { rank: 4, dropout: 0.1, save_embed_tokens: true, ..Lora::default() };
    for quant in [None, Some(QUANT)] {
        let base =
            Recipe { max_grad_norm: None, quant, ..Recipe::lora(DType::F32, 2, 24, lora.clone()) };
        let after = |optimizer_in_backward: bool| {
            let recipe = Recipe { optimizer_in_backward, ..base.clone() };
            let setup = Setup { arch: arch.clone(), recipe };
            let plan = setup.plan();
            let mut device = setup.device(&plan, &Weights::Random);
            let mut session = Session { plan: &plan, device: &mut device };
            for step in 1..=3 {
                session.train(&batch.micro(1), 1e-3, step, 4).unwrap();
            }
            let parts = lora.parts(&arch);
            let (program, layout) = (&plan.train, &plan.train_layout);
            let value = |p: &WeightPart| part(&mut device, program, layout, "", p);
            parts.iter().map(value).collect::<Vec<_>>()
        };
        assert_eq!(after(false), after(true));
    }
}

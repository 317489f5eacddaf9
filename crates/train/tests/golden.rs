//! The whole step against what PyTorch and transformers compute (torch 2.11,
//! transformers 5.17, float32, eager attention): logits, loss, every gradient,
//! the parameters after three clipped AdamW steps, greedy tokens, and packed
//! documents.
//!
//! Two models travel with the project in `fixtures`; more are looked for in
//! `PLIMSOLL_SHARED/golden`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use plimsoll_arch::{Architecture, DType};
use plimsoll_cpu::{CpuDevice, CpuTarget};
use plimsoll_infer::{Generator, InferPlan, Sampler, Sampling};
use plimsoll_model::{Checkpoint, init_state, load_weights};
use plimsoll_plan::{Device, Layout, lay_out};
use plimsoll_program::{
    AdamW, Decay, Optimizer, Program, Recipe, Recompute, RecomputePlan, build, weight_parts,
};
use plimsoll_train::{MicroBatch, Session, TrainPlan};
use safetensors::{Dtype, SafeTensors};

const TOLERANCE: f64 = 1e-4;

struct Golden {
    dir: PathBuf,
    arch: Architecture,
    checkpoint: Checkpoint,
    floats: HashMap<String, Vec<f32>>,
    ints: HashMap<String, Vec<i32>>,
    meta: serde_json::Value,
}

/// Folders of golden models: those of the project, and others if they are there.
fn folders() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut all: Vec<PathBuf> =
        ["llama-micro", "qwen2-micro-tied"].map(|m| root.join("fixtures").join(m)).to_vec();
    let shared = std::env::var_os("PLIMSOLL_SHARED").map_or(root.join("../shared"), PathBuf::from);
    match std::fs::read_dir(shared.join("golden")) {
        Ok(entries) => {
            let more = entries.flatten().map(|e| e.path());
            all.extend(more.filter(|p| {
                p.join("golden.safetensors").exists() && p.join("config.json").exists()
            }));
        }
        Err(_) => eprintln!("skipped: the golden models outside of the project are not there"),
    }
    all
}

fn golden(dir: &Path) -> Golden {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let bytes = std::fs::read(dir.join("golden.safetensors")).unwrap();
    let (mut floats, mut ints) = (HashMap::new(), HashMap::new());
    for (name, t) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
        let words = t.data().chunks_exact(4).map(|w| [w[0], w[1], w[2], w[3]]);
        match t.dtype() {
            Dtype::F32 => {
                floats.insert(name, words.map(f32::from_le_bytes).collect());
            }
            Dtype::I32 => {
                ints.insert(name, words.map(i32::from_le_bytes).collect());
            }
            other => panic!("{name} is {other:?}"),
        }
    }
    let meta = std::fs::read_to_string(dir.join("golden.json")).unwrap();
    Golden {
        dir: dir.to_path_buf(),
        arch: checkpoint.architecture().clone(),
        checkpoint,
        floats,
        ints,
        meta: serde_json::from_str(&meta).unwrap(),
    }
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
    device
        .download(layout.offset(id), len, &mut |bytes| {
            out.extend_from_slice(bytemuck::cast_slice(bytes));
            Ok(())
        })
        .unwrap();
    out
}

fn write(device: &mut dyn Device, program: &Program, layout: &Layout, name: &str, data: &[i32]) {
    let id = program.find(name).unwrap();
    device
        .upload(layout.offset(id), data.len() * 4, &mut |bytes| {
            bytes.copy_from_slice(bytemuck::cast_slice(data));
            Ok(())
        })
        .unwrap();
}

/// Every checkpoint tensor of `prefix` + program tensor, by its name in the checkpoint.
fn parts(
    device: &mut dyn Device,
    program: &Program,
    layout: &Layout,
    arch: &Architecture,
    prefix: &str,
) -> Vec<(String, Vec<f32>)> {
    let mut all = Vec::new();
    for part in weight_parts(arch) {
        let whole = read(device, program, layout, &format!("{prefix}{}", part.tensor));
        let cols = part.shape.get(1).copied().unwrap_or(1);
        let len: usize = part.shape.iter().product();
        all.push((part.source, whole[part.row * cols..][..len].to_vec()));
    }
    all
}

struct Batch {
    ids: Vec<i32>,
    labels: Vec<i32>,
    positions: Vec<i32>,
    doc_start: Vec<i32>,
    rows: usize,
    seq: usize,
}

impl Golden {
    fn batch(&self) -> Batch {
        let ids = self.ints["input_ids"].clone();
        let (rows, seq) = (3, ids.len() / 3);
        let mut labels = Vec::new();
        for row in self.ints["labels"].chunks(seq) {
            labels.extend_from_slice(&row[1..]);
            labels.push(-100);
        }
        let positions = (0..rows).flat_map(|_| 0..seq as i32).collect();
        Batch { ids, labels, positions, doc_start: vec![0; rows * seq], rows, seq }
    }

    fn recipe(&self, batch: &Batch) -> Recipe {
        let o = &self.meta["optimizer"];
        let number = |v: &serde_json::Value| v.as_f64().unwrap() as f32;
        Recipe {
            optimizer: Optimizer::AdamW(AdamW {
                beta1: number(&o["betas"][0]),
                beta2: number(&o["betas"][1]),
                eps: number(&o["eps"]),
                weight_decay: number(&o["weight_decay"]),
                state: DType::F32,
            }),
            decay: Decay::All,
            max_grad_norm: Some(number(&o["clip_global_norm"])),
            ..Recipe::full(DType::F32, batch.rows, batch.seq)
        }
    }

    fn device(&self, program: &Program, layout: &Layout) -> CpuDevice {
        let mut device = CpuDevice::new(layout.slab_bytes, THREADS).unwrap();
        init_state(&mut device, program, layout, &self.arch).unwrap();
        load_weights(&mut device, program, layout, &self.arch, &self.checkpoint).unwrap();
        device
    }
}

const THREADS: usize = 2;

impl Batch {
    fn micro(&self) -> MicroBatch<'_> {
        MicroBatch {
            ids: &self.ids,
            labels: &self.labels,
            positions: &self.positions,
            doc_start: &self.doc_start,
        }
    }
}

fn logits(g: &Golden, batch: &Batch) -> Vec<f32> {
    let recipe = Recipe::full(DType::F32, batch.rows, batch.seq);
    let program = build::logits(&g.arch, &recipe, &CpuTarget { threads: THREADS }).unwrap();
    program.verify().unwrap();
    let layout = lay_out(&program);
    let mut device = g.device(&program, &layout);
    write(&mut device, &program, &layout, "ids", &batch.ids);
    write(&mut device, &program, &layout, "positions", &batch.positions);
    write(&mut device, &program, &layout, "doc_start", &batch.doc_start);
    device.run(&program, &layout, 0).unwrap();
    read(&mut device, &program, &layout, "logits")
}

#[test]
fn logits_are_those_of_transformers() {
    for dir in folders() {
        let g = golden(&dir);
        let error = relative(&logits(&g, &g.batch()), &g.floats["logits"]);
        println!("{}: logits {error:.1e}", dir.display());
        assert!(error < TOLERANCE, "{}: {error}", dir.display());
    }
}

#[test]
fn packed_documents_do_not_see_each_other() {
    for dir in folders() {
        let g = golden(&dir);
        let all = g.batch();
        let row = g.meta["packed_row"].as_u64().unwrap() as usize;
        let lengths = g.meta["packed_lengths"].as_array().unwrap();
        let mut batch = Batch {
            ids: all.ids[row * all.seq..][..all.seq].to_vec(),
            labels: vec![-100; all.seq],
            positions: Vec::new(),
            doc_start: Vec::new(),
            rows: 1,
            seq: all.seq,
        };
        for length in lengths.iter().map(|l| l.as_i64().unwrap() as i32) {
            let start = batch.positions.len() as i32;
            batch.positions.extend(0..length);
            batch.doc_start.extend(std::iter::repeat_n(start, length as usize));
        }
        let error = relative(&logits(&g, &batch), &g.floats["packed_logits"]);
        println!("{}: packed logits {error:.1e}", dir.display());
        assert!(error < TOLERANCE, "{}: {error}", dir.display());
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
    let recompute = "block:0-0,norms".parse().unwrap();
    all.push(("recompute by layer".into(), Recipe { recompute, ..base.clone() }));
    // The three rows as three micro-batches.
    all.push(("accumulated".into(), Recipe { batch: 1, accumulate: 3, ..base.clone() }));
    all
}

#[test]
fn loss_gradients_and_three_steps_are_those_of_torch() {
    for dir in folders() {
        let g = golden(&dir);
        let batch = g.batch();
        for (name, recipe) in variants(&g.recipe(&batch)) {
            check_steps(&g, &batch, &name, &recipe);
        }
    }
}

fn check_steps(g: &Golden, batch: &Batch, name: &str, recipe: &Recipe) {
    let name = format!("{}, {name}", g.dir.display());
    let plan = TrainPlan::new(&g.arch, recipe, &CpuTarget { threads: THREADS }).unwrap();
    plan.train.verify().unwrap();
    plan.train_layout.verify(&plan.train).unwrap();
    let mut device = g.device(&plan.train, &plan.train_layout);
    let mut session = Session { plan: &plan, device: &mut device };
    let rows: Vec<MicroBatch> = if recipe.accumulate == 1 {
        vec![batch.micro()]
    } else {
        let row = |r: usize| r * batch.seq..(r + 1) * batch.seq;
        (0..batch.rows)
            .map(|r| MicroBatch {
                ids: &batch.ids[row(r)],
                labels: &batch.labels[row(r)],
                positions: &batch.positions[row(r)],
                doc_start: &batch.doc_start[row(r)],
            })
            .collect()
    };
    let learning_rate = g.meta["optimizer"]["lr"].as_f64().unwrap() as f32;

    session.forward_backward(&rows, learning_rate, 1, 0).unwrap();
    let found = parts(session.device, &plan.train, &plan.train_layout, &g.arch, "d_");
    let mut worst = 0f64;
    for (tensor, gradient) in &found {
        let error = relative(gradient, &g.floats[&format!("grad.{tensor}")]);
        worst = worst.max(error);
        assert!(error < TOLERANCE, "{name}: gradient of {tensor} {error:.2e}");
    }
    println!("{name}: {} gradients, worst {worst:.1e}", found.len());
    session.update().unwrap();

    for step in 1..=3u64 {
        let expected = &g.meta["steps"][step as usize - 1];
        let result = if step == 1 {
            // The first step is done: evaluate what it left behind.
            let (program, layout) = (&plan.train, &plan.train_layout);
            plimsoll_train::StepResult {
                loss: read(session.device, program, layout, "loss")[0],
                grad_norm: Some(read(session.device, program, layout, "grad_norm")[0]),
            }
        } else {
            session.train(&rows, learning_rate, step, 0).unwrap()
        };
        let check = |what: &str, found: f32| {
            let expected = expected[what].as_f64().unwrap();
            let error = (f64::from(found) - expected).abs() / expected;
            assert!(error < TOLERANCE, "{name}: step {step} {what} {found} {expected}");
        };
        check("loss", result.loss);
        check("grad_norm", result.grad_norm.unwrap());
    }
    let mut worst = 0f64;
    for (tensor, value) in parts(session.device, &plan.train, &plan.train_layout, &g.arch, "") {
        let error = relative(&value, &g.floats[&format!("after3.{tensor}")]);
        worst = worst.max(error);
        assert!(error < TOLERANCE, "{name}: {tensor} after three steps {error:.2e}");
    }
    println!("{name}: parameters after three steps, worst {worst:.1e}");
}

#[test]
fn greedy_tokens_are_those_of_transformers() {
    for dir in folders() {
        let g = golden(&dir);
        let expected: Vec<u32> = g.ints["greedy_ids"].iter().map(|t| *t as u32).collect();
        let target = CpuTarget { threads: THREADS };
        let recipe = Recipe::infer(DType::F32, 1, 64.min(g.arch.max_position_embeddings));
        let plan = InferPlan::new(&g.arch, &recipe, &target).unwrap();
        let mut device = g.device(&plan.prefill.0, &plan.prefill.1);
        let mut generator = Generator::new(&plan, &mut device, &target);
        let mut sampler = Sampler::new(Sampling::greedy()).unwrap();
        let generation =
            generator.generate(&expected[..12], 20, &[], &mut sampler, |_| true).unwrap();
        assert_eq!(generation.new_ids, expected[12..], "{}", dir.display());
    }
}

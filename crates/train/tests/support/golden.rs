//! Golden models: what PyTorch and transformers computed for tiny models (torch
//! 2.11, transformers 5.17, float32, eager attention), and the same numbers from a
//! device.
//!
//! Shared by `tests/golden.rs`, which holds the CPU against them, and by the
//! example `gpu_check` of `plimsoll-cuda`, which holds a GPU against both.

use std::collections::HashMap;
use std::path::Path;

use half::bf16;
use plimsoll_arch::{Architecture, DType};
use plimsoll_infer::{Generator, InferPlan, Sampler, Sampling};
use plimsoll_model::{Checkpoint, init_state, load_weights};
use plimsoll_plan::{Device, Layout, lay_out};
use plimsoll_program::{
    AdamW, Decay, Optimizer, Program, Recipe, Target, TensorId, build, weight_parts,
};
use plimsoll_train::{MicroBatch, Session, StepResult, TrainPlan};
use safetensors::{Dtype, SafeTensors};

/// A kind of device: its scratch memory, and how a slab of it is reserved.
pub struct On<'a> {
    pub target: &'a dyn Target,
    pub reserve: &'a dyn Fn(u64) -> Box<dyn Device>,
}

/// A tiny model and what is known of it.
pub struct Golden {
    pub checkpoint: Checkpoint,
    pub floats: HashMap<String, Vec<f32>>,
    ints: HashMap<String, Vec<i32>>,
    /// `golden.json`: settings of the optimizer, loss and norm of every step.
    pub meta: serde_json::Value,
}

impl Golden {
    pub fn open(dir: &Path) -> Golden {
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
        let meta = serde_json::from_str(&meta).unwrap();
        Golden { checkpoint: Checkpoint::open(dir).unwrap(), floats, ints, meta }
    }

    /// Three rows of one document each, some labels ignored.
    pub fn batch(&self) -> Batch {
        let ids = self.ints["input_ids"].clone();
        let seq = ids.len() / 3;
        let labels = self.ints["labels"].chunks(seq).flat_map(shifted).collect();
        Batch { labels, ..Batch::of_rows(ids, seq) }
    }

    /// One of the rows, as several documents.
    pub fn packed(&self) -> Batch {
        let all = self.batch();
        let row = self.meta["packed_row"].as_u64().unwrap() as usize;
        let mut batch = Batch::of_rows(all.ids[row * all.seq..][..all.seq].to_vec(), all.seq);
        (batch.positions, batch.doc_start) = (Vec::new(), Vec::new());
        for length in self.meta["packed_lengths"].as_array().unwrap() {
            let (start, length) = (batch.positions.len() as i32, length.as_i64().unwrap() as i32);
            batch.positions.extend(0..length);
            batch.doc_start.extend(std::iter::repeat_n(start, length as usize));
        }
        batch
    }

    /// The training step that was computed: all rows at once, clipped AdamW.
    pub fn recipe(&self, precision: DType) -> Recipe {
        let o = &self.meta["optimizer"];
        let number = |v: &serde_json::Value| v.as_f64().unwrap() as f32;
        let batch = self.batch();
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
            ..Recipe::full(precision, batch.rows(), batch.seq)
        }
    }

    pub fn learning_rate(&self) -> f32 {
        self.meta["optimizer"]["lr"].as_f64().unwrap() as f32
    }

    /// A prompt, and its greedy continuation.
    pub fn greedy(&self) -> (Vec<u32>, Vec<u32>) {
        let mut prompt: Vec<u32> = self.ints["greedy_ids"].iter().map(|t| *t as u32).collect();
        let new = prompt.split_off(12);
        (prompt, new)
    }
}

/// Inputs of a step, each (rows, seq).
pub struct Batch {
    pub ids: Vec<i32>,
    pub labels: Vec<i32>,
    pub positions: Vec<i32>,
    pub doc_start: Vec<i32>,
    pub seq: usize,
}

/// The token to predict at each place of a row.
fn shifted(row: &[i32]) -> impl Iterator<Item = i32> {
    row[1..].iter().copied().chain([-100])
}

impl Batch {
    /// Every row one document, all of it trained.
    pub fn of_rows(ids: Vec<i32>, seq: usize) -> Batch {
        let labels = ids.chunks(seq).flat_map(shifted).collect();
        let positions = (0..ids.len()).map(|i| (i % seq) as i32).collect();
        let doc_start = vec![0; ids.len()];
        Batch { ids, labels, positions, doc_start, seq }
    }

    pub fn rows(&self) -> usize {
        self.ids.len() / self.seq
    }

    /// Micro-batches of so many rows.
    fn micro(&self, rows: usize) -> Vec<MicroBatch<'_>> {
        let tokens = rows * self.seq;
        (0..self.rows() / rows)
            .map(|n| n * tokens..(n + 1) * tokens)
            .map(|range| MicroBatch {
                ids: &self.ids[range.clone()],
                labels: &self.labels[range.clone()],
                positions: &self.positions[range.clone()],
                doc_start: &self.doc_start[range],
            })
            .collect()
    }
}

/// ||a - b|| / ||b||
pub fn relative(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let (mut difference, mut norm) = (0.0, 0.0);
    for (a, b) in a.iter().zip(b) {
        difference += (f64::from(*a) - f64::from(*b)).powi(2);
        norm += f64::from(*b).powi(2);
    }
    (difference / norm.max(1e-30)).sqrt()
}

fn floats(
    device: &mut dyn Device,
    program: &Program,
    layout: &Layout,
    tensor: TensorId,
) -> Vec<f32> {
    let (dtype, len) = (program.tensor(tensor).dtype, program.tensor(tensor).bytes() as usize);
    let mut out = Vec::new();
    device
        .download(program.tensor(tensor).home, layout.offset(tensor), len, &mut |bytes| {
            if dtype == DType::Bf16 {
                out.extend(bytemuck::cast_slice::<u8, bf16>(bytes).iter().map(|x| x.to_f32()));
            } else {
                out.extend_from_slice(bytemuck::cast_slice(bytes));
            }
            Ok(())
        })
        .unwrap();
    out
}

fn read(device: &mut dyn Device, program: &Program, layout: &Layout, name: &str) -> Vec<f32> {
    let tensor = program.find(name).unwrap_or_else(|| panic!("no tensor {name}"));
    floats(device, program, layout, tensor)
}

fn write(device: &mut dyn Device, program: &Program, layout: &Layout, name: &str, data: &[i32]) {
    let tensor = program.find(name).unwrap();
    device
        .upload(program.tensor(tensor).home, layout.offset(tensor), data.len() * 4, &mut |bytes| {
            bytes.copy_from_slice(bytemuck::cast_slice(data));
            Ok(())
        })
        .unwrap();
}

/// A tensor by its name in a checkpoint.
pub type Named = (String, Vec<f32>);

/// Every checkpoint tensor of `prefix` + program tensor.
fn parts(
    device: &mut dyn Device,
    program: &Program,
    layout: &Layout,
    arch: &Architecture,
    prefix: &str,
) -> Vec<Named> {
    let mut all = Vec::new();
    for part in weight_parts(arch) {
        let whole = read(device, program, layout, &format!("{prefix}{}", part.tensor));
        let cols = part.shape.get(1).copied().unwrap_or(1);
        let len: usize = part.shape.iter().product();
        all.push((part.source, whole[part.row * cols..][..len].to_vec()));
    }
    all
}

fn filled(on: &On, model: &Checkpoint, program: &Program, layout: &Layout) -> Box<dyn Device> {
    program.verify().unwrap();
    layout.verify(program).unwrap();
    let mut device = (on.reserve)(layout.slab_bytes);
    init_state(&mut *device, program, layout, model.architecture()).unwrap();
    load_weights(&mut *device, program, layout, model.architecture(), model).unwrap();
    device
}

/// Logits of every token of a batch.
pub fn logits(model: &Checkpoint, batch: &Batch, precision: DType, on: &On) -> Vec<f32> {
    let recipe = Recipe::full(precision, batch.rows(), batch.seq);
    let program = build::logits(model.architecture(), &recipe, on.target).unwrap();
    let layout = lay_out(&program);
    let mut device = filled(on, model, &program, &layout);
    write(&mut *device, &program, &layout, "ids", &batch.ids);
    write(&mut *device, &program, &layout, "positions", &batch.positions);
    write(&mut *device, &program, &layout, "doc_start", &batch.doc_start);
    device.run(&program, &layout, 0).unwrap();
    read(&mut *device, &program, &layout, "logits")
}

/// What optimizer steps on one batch gave.
pub struct Trained {
    /// Of the first step, before clipping.
    pub gradients: Vec<Named>,
    pub steps: Vec<StepResult>,
    /// After the last step.
    pub parameters: Vec<Named>,
}

/// Takes `steps` optimizer steps on one batch; without any, the gradients are
/// computed and nothing is updated.
pub fn train(
    model: &Checkpoint,
    batch: &Batch,
    recipe: &Recipe,
    learning_rate: f32,
    steps: u64,
    on: &On,
) -> Trained {
    let arch = model.architecture();
    let plan = TrainPlan::new(arch, recipe, on.target).unwrap();
    let (program, layout) = (&plan.train, &plan.train_layout);
    let mut device = filled(on, model, program, layout);
    let mut session = Session { plan: &plan, device: &mut *device };
    let micro = batch.micro(recipe.batch);
    let trained_tokens = session.forward_backward(&micro, learning_rate, 1, 0).unwrap();
    let gradients = parts(session.device, program, layout, arch, "d_");
    let mut results = Vec::new();
    for step in 1..=steps {
        results.push(if step == 1 {
            session.update().unwrap();
            let norm = recipe.max_grad_norm.map(|_| "grad_norm");
            StepResult {
                trained_tokens,
                loss: read(session.device, program, layout, "loss")[0],
                grad_norm: norm.map(|name| read(session.device, program, layout, name)[0]),
            }
        } else {
            session.train(&micro, learning_rate, step, 0).unwrap()
        });
    }
    let parameters =
        if steps == 0 { Vec::new() } else { parts(session.device, program, layout, arch, "") };
    Trained { gradients, steps: results, parameters }
}

/// The likeliest tokens after a prompt.
pub fn greedy(
    model: &Checkpoint,
    prompt: &[u32],
    new: usize,
    precision: DType,
    on: &On,
) -> Vec<u32> {
    let arch = model.architecture();
    let context = (prompt.len() + new).min(arch.max_position_embeddings);
    let plan = InferPlan::new(arch, &Recipe::infer(precision, 1, context), on.target).unwrap();
    let mut device = filled(on, model, &plan.prefill.0, &plan.prefill.1);
    let mut generator = Generator::new(&plan, &mut *device, on.target);
    let mut sampler = Sampler::new(Sampling::greedy()).unwrap();
    generator.generate(prompt, new, &[], &mut sampler, |_| true).unwrap().new_ids
}

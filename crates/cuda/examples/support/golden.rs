//! The golden models (PyTorch's numbers) and real models on the GPU.
//!
//! They are looked for in the folder that `scripts/gpu-check build` fills, else
//! among the project's own `fixtures`.

#[path = "../../../train/tests/support/golden.rs"]
mod numbers;

use std::path::{Path, PathBuf};

use numbers::{Batch, Golden, Named, On, Trained, greedy, logits, relative, train};
use plimsoll_arch::DType::{self, Bf16, F32};
use plimsoll_cpu::{CpuDevice, CpuTarget};
use plimsoll_cuda::{CudaDevice, CudaTarget};
use plimsoll_model::Checkpoint;
use plimsoll_plan::Device;
use plimsoll_program::{Recipe, Recompute, RecomputePlan};

use super::{Report, cpu_threads};

/// Of float32, whose sums differ in their order alone.
const EXACT: f64 = 1e-4;
/// Of a key's bias after three steps of AdamW: softmax cancels most of its gradient, and
/// the optimizer makes steps of full size out of what rounding leaves.
const EXACT_BIAS: f64 = 1e-3;
/// The same of a real model's gradients, which amplify rounding: PyTorch's own float32
/// gradients of SmolLM2-135M are up to 5.9e-4 from its float64 ones (torch 2.15).
const EXACT_REAL: f64 = 2e-3;
/// Of bf16 against float32.
const ROUNDED: f64 = 1e-2;
/// How much further from float32 than the CPU's bf16 a GPU's may be, where that is
/// already beyond [`ROUNDED`]: the error is that of activations in bf16, layer upon
/// layer, whatever computes them. All gradients together, and any single tensor,
/// whose few elements may happen to round worse.
const OF_TYPE: f64 = 1.2;
const OF_TYPE_ALONE: f64 = 4.0;

const GPU: On = On { target: &CudaTarget, reserve: &reserve_gpu };

fn reserve_gpu(bytes: u64) -> Box<dyn Device> {
    Box::new(CudaDevice::new(bytes, 0).unwrap_or_else(|e| panic!("{e}")))
}

fn reserve_cpu(bytes: u64) -> Box<dyn Device> {
    Box::new(CpuDevice::new(bytes, cpu_threads()).unwrap_or_else(|e| panic!("{e}")))
}

/// Folders and files in the first of these places that exists.
pub fn entries(places: &[&str]) -> Vec<PathBuf> {
    let found = places.iter().find_map(|place| std::fs::read_dir(place).ok());
    let mut paths: Vec<PathBuf> = found.into_iter().flatten().flatten().map(|e| e.path()).collect();
    paths.sort();
    paths
}

fn name(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

pub fn check(report: &mut Report) {
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures");
    let mut folders = entries(&[".gpu/golden", "fixtures", fixtures]);
    folders.retain(|path| path.join("golden.safetensors").is_file());
    report.holds("golden models are there", !folders.is_empty());
    for folder in folders {
        let (name, golden) = (name(&folder), Golden::open(&folder));
        against_torch(report, &name, &golden);
        let recipe = golden.recipe(F32);
        against_cpu(report, &name, &golden.checkpoint, &golden.batch(), &recipe, false);
    }
}

/// Float32 on the GPU against the golden numbers.
fn against_torch(report: &mut Report, name: &str, g: &Golden) {
    for (key, batch) in [("logits", g.batch()), ("packed_logits", g.packed())] {
        let error = relative(&logits(&g.checkpoint, &batch, F32, &GPU), &g.floats[key]);
        println!("{error:9.2e}  {name} f32 {key}, against torch");
        report.error(&format!("{name} f32 {key}"), error, EXACT);
    }
    let base = g.recipe(F32);
    let recompute = RecomputePlan::uniform(Recompute::Block);
    let variants = [
        ("", base.clone()),
        (", accumulated", Recipe { batch: 1, accumulate: 3, ..base.clone() }),
        (", recomputed, 7 loss rows", Recipe { recompute, loss_rows: Some(7), ..base }),
    ];
    for (variant, recipe) in variants {
        let found = train(&g.checkpoint, &g.batch(), &recipe, g.learning_rate(), 3, &GPU);
        steps_of_torch(report, &format!("{name} f32{variant}"), g, &found);
    }
    let (prompt, expected) = g.greedy();
    let found = greedy(&g.checkpoint, &prompt, expected.len(), F32, &GPU);
    report.holds(&format!("{name} f32: greedy tokens are torch's"), found == expected);
}

fn steps_of_torch(report: &mut Report, what: &str, g: &Golden, found: &Trained) {
    for (prefix, tensors) in [("grad", &found.gradients), ("after3", &found.parameters)] {
        let mut worst = (0.0f64, "");
        for (tensor, values) in tensors {
            let error = relative(values, &g.floats[&format!("{prefix}.{tensor}")]);
            let limit = match prefix {
                "after3" if tensor.ends_with("k_proj.bias") => EXACT_BIAS,
                _ => EXACT,
            };
            report.error(&format!("{what} {prefix} {tensor}"), error, limit);
            if error.is_nan() || error > worst.0 {
                worst = (error, tensor);
            }
        }
        let count = tensors.len();
        println!("{:9.2e}  {what} {prefix} of {count} tensors, worst {}", worst.0, worst.1);
    }
    for (step, result) in found.steps.iter().enumerate() {
        let expected = &g.meta["steps"][step];
        for (key, found) in [("loss", Some(result.loss)), ("grad_norm", result.grad_norm)] {
            let expected = expected[key].as_f64().unwrap_or(f64::NAN);
            let error = (f64::from(found.unwrap_or(f32::NAN)) / expected - 1.0).abs();
            report.error(&format!("{what} step {} {key}", step + 1), error, EXACT);
        }
    }
}

/// Both types on the GPU against float32 on the CPU: logits and every gradient.
fn against_cpu(
    report: &mut Report,
    name: &str,
    model: &Checkpoint,
    batch: &Batch,
    recipe: &Recipe,
    real: bool,
) {
    let target = CpuTarget { threads: cpu_threads() };
    let cpu = On { target: &target, reserve: &reserve_cpu };
    let all = |precision: DType, on: &On| -> Vec<Named> {
        let recipe = Recipe { precision, ..recipe.clone() };
        let mut tensors = train(model, batch, &recipe, 0.0, 0, on).gradients;
        tensors.insert(0, ("logits".into(), logits(model, batch, precision, on)));
        tensors
    };
    let truth = all(F32, &cpu);
    let errors = |found: &[Named]| -> Vec<f64> {
        found.iter().zip(&truth).map(|((_, a), (_, b))| relative(a, b)).collect()
    };
    // Behind the logits lie the gradients.
    let together = |found: &[Named]| -> f64 {
        let (mut difference, mut size) = (0.0, 0.0);
        for ((_, a), (_, b)) in found.iter().zip(&truth).skip(1) {
            for (a, b) in a.iter().zip(b) {
                difference += f64::from(a - b).powi(2);
                size += f64::from(*b).powi(2);
            }
        }
        (difference / size).sqrt()
    };
    let (exact, rounded, of_type) = (all(F32, &GPU), all(Bf16, &GPU), all(Bf16, &cpu));
    let (whole, whole_of_type) = (together(&rounded), together(&of_type));
    let what = format!("{name} bf16 all gradients, against the CPU's f32");
    report.error(&what, whole, ROUNDED.max(OF_TYPE * whole_of_type));
    println!(
        "{whole:9.2e}  {name} bf16 all gradients together (the CPU's bf16: {whole_of_type:.2e})"
    );
    let (exact, rounded, of_type) = (errors(&exact), errors(&rounded), errors(&of_type));
    // Tensors whose error is that of the type, by how the GPU's compares to the CPU's.
    let mut beyond = Vec::new();
    for (i, (tensor, _)) in truth.iter().enumerate() {
        let limit = if real && i > 0 { EXACT_REAL } else { EXACT };
        report.error(&format!("{name} f32 {tensor}, against the CPU"), exact[i], limit);
        let limit = ROUNDED.max(OF_TYPE_ALONE * of_type[i]);
        let what = format!("{name} bf16 {tensor}, against the CPU's f32");
        report.error(&what, rounded[i], limit);
        if of_type[i] > ROUNDED {
            beyond.push((rounded[i] / of_type[i], i));
        }
    }
    let worst = |errors: &[f64]| errors.iter().copied().fold(0.0, f64::max);
    println!(
        "{:9.2e}  {name} f32 logits, gradients {:.2e}, against the CPU",
        exact[0],
        worst(&exact[1..])
    );
    println!(
        "{:9.2e}  {name} bf16 logits, gradients {:.2e}, against the CPU's f32 (the CPU's bf16: {:.2e}, {:.2e})",
        rounded[0],
        worst(&rounded[1..]),
        of_type[0],
        worst(&of_type[1..]),
    );
    beyond.sort_by(|a, b| b.0.total_cmp(&a.0));
    if !beyond.is_empty() {
        println!(
            "           {} of {} tensors are beyond {ROUNDED:.0e} in the CPU's own bf16 and held to {OF_TYPE_ALONE} times that; the GPU's furthest:",
            beyond.len(),
            truth.len()
        );
    }
    for (ratio, i) in beyond.into_iter().take(3) {
        let (tensor, gpu, cpu) = (&truth[i].0, rounded[i], of_type[i]);
        println!("{gpu:9.2e}  {name} bf16 {tensor}: the CPU's bf16 {cpu:.2e}, ratio {ratio:.2}");
    }
}

/// Tokens of every row of a real text.
const REAL_SEQ: usize = 256;

/// Models with real weights on real text: `.gpu/models/NAME` (a folder or a GGUF
/// file) and `.gpu/text/NAME.jsonl`, on each line the `ids` of one row.
pub fn check_real(report: &mut Report) {
    for path in entries(&[".gpu/models"]) {
        let name = name(&path);
        let rows = text(&Path::new(".gpu/text").join(format!("{name}.jsonl")));
        report.holds(&format!("{name}: a text is there"), !rows.is_empty());
        if rows.is_empty() {
            continue;
        }
        let model = Checkpoint::open(&path).unwrap_or_else(|e| panic!("{e}"));
        let batch = Batch::of_rows(rows, REAL_SEQ);
        let recipe = Recipe::full(F32, batch.rows(), REAL_SEQ);
        against_cpu(report, &name, &model, &batch, &recipe, true);
    }
}

/// The first tokens of every line that has enough.
fn text(path: &Path) -> Vec<i32> {
    let mut rows = Vec::new();
    for line in std::fs::read_to_string(path).unwrap_or_default().lines() {
        let value: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
        let ids = value["ids"].as_array().into_iter().flatten();
        let ids: Vec<i32> = ids.filter_map(|id| i32::try_from(id.as_i64()?).ok()).collect();
        rows.extend_from_slice(ids.get(..REAL_SEQ).unwrap_or_default());
    }
    rows
}

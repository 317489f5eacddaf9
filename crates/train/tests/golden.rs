//! The whole step against what PyTorch and transformers compute (torch 2.11,
//! transformers 5.17, float32, eager attention): logits, loss, every gradient,
//! the parameters after three clipped AdamW steps, greedy tokens, and packed
//! documents.
//!
//! Two models travel with the project in `fixtures`; more are looked for in
//! `PLIMSOLL_SHARED/golden`.

#[path = "support/golden.rs"]
mod support;

use std::path::{Path, PathBuf};

use plimsoll_arch::DType;
use plimsoll_cpu::{CpuDevice, CpuTarget};
use plimsoll_plan::Device;
use plimsoll_program::{Recipe, Recompute, RecomputePlan};
use support::{Golden, On, Trained, greedy, logits, relative, train};

const TOLERANCE: f64 = 1e-4;
const THREADS: usize = 2;

fn reserve(bytes: u64) -> Box<dyn Device> {
    Box::new(CpuDevice::new(bytes, THREADS).unwrap())
}

const CPU: On = On { target: &CpuTarget { threads: THREADS }, reserve: &reserve };

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

#[test]
fn logits_are_those_of_transformers() {
    for dir in folders() {
        let g = Golden::open(&dir);
        let found = logits(&g.checkpoint, &g.batch(), DType::F32, &CPU);
        let error = relative(&found, &g.floats["logits"]);
        println!("{}: logits {error:.1e}", dir.display());
        assert!(error < TOLERANCE, "{}: {error}", dir.display());
    }
}

#[test]
fn packed_documents_do_not_see_each_other() {
    for dir in folders() {
        let g = Golden::open(&dir);
        let found = logits(&g.checkpoint, &g.packed(), DType::F32, &CPU);
        let error = relative(&found, &g.floats["packed_logits"]);
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
        let g = Golden::open(&dir);
        for (name, recipe) in variants(&g.recipe(DType::F32)) {
            let found = train(&g.checkpoint, &g.batch(), &recipe, g.learning_rate(), 3, &CPU);
            check_steps(&g, &format!("{}, {name}", dir.display()), &found);
        }
    }
}

fn check_steps(g: &Golden, name: &str, found: &Trained) {
    for (prefix, tensors) in [("grad", &found.gradients), ("after3", &found.parameters)] {
        let mut worst = 0f64;
        for (tensor, values) in tensors {
            let error = relative(values, &g.floats[&format!("{prefix}.{tensor}")]);
            worst = worst.max(error);
            assert!(error < TOLERANCE, "{name}: {prefix} of {tensor} {error:.2e}");
        }
        println!("{name}: {prefix} of {} tensors, worst {worst:.1e}", tensors.len());
    }
    assert_eq!(found.steps.len(), 3);
    for (step, result) in found.steps.iter().enumerate() {
        let expected = &g.meta["steps"][step];
        let pairs = [("loss", Some(result.loss)), ("grad_norm", result.grad_norm)];
        for (what, found) in pairs {
            let (found, expected) = (f64::from(found.unwrap()), expected[what].as_f64().unwrap());
            let error = (found - expected).abs() / expected;
            assert!(error < TOLERANCE, "{name}: step {} {what} {found} {expected}", step + 1);
        }
    }
}

#[test]
fn greedy_tokens_are_those_of_transformers() {
    for dir in folders() {
        let g = Golden::open(&dir);
        let (prompt, expected) = g.greedy();
        let found = greedy(&g.checkpoint, &prompt, expected.len(), DType::F32, &CPU);
        assert_eq!(found, expected, "{}", dir.display());
    }
}

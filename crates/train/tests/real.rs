//! Real models against what transformers computed from the same weights in
//! float32 (the `golden.json` beside each model): logits, chats, perplexity.
//!
//! Neither is part of this repository: `PLIMSOLL_SHARED` names a folder with
//! `models/stories260K-hf` and `models/smollm2-135m-instruct`, `PLIMSOLL_SMOLLM2`
//! the file that `scripts/fetch-smollm2` fetches.

use std::path::{Path, PathBuf};

use plimsoll_arch::DType;
use plimsoll_cpu::{CpuDevice, CpuTarget};
use plimsoll_infer::{Generator, InferPlan, Sampler, Sampling};
use plimsoll_model::{Checkpoint, init_state, load_weights};
use plimsoll_plan::Device;
use plimsoll_program::Recipe;
use plimsoll_text::{Message, Tokenizer, find_template};
use plimsoll_train::{MicroBatch, Session, TrainPlan};
use serde_json::Value;

const TARGET: CpuTarget = CpuTarget { threads: 2 };

fn shared(path: &str) -> Option<PathBuf> {
    let root = std::env::var_os("PLIMSOLL_SHARED").map_or_else(
        || Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared")).to_path_buf(),
        PathBuf::from,
    );
    let path = root.join(path);
    if !path.exists() {
        eprintln!("skipped: {} does not exist", path.display());
        return None;
    }
    Some(path)
}

fn smollm2() -> Option<(PathBuf, PathBuf)> {
    let path = std::env::var_os("PLIMSOLL_SMOLLM2").map_or_else(
        || Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/smollm2.gguf")).into(),
        PathBuf::from,
    );
    if !path.exists() {
        eprintln!("skipped: {} does not exist; scripts/fetch-smollm2 fetches it", path.display());
        return None;
    }
    Some((path, shared("models/smollm2-135m-instruct")?))
}

fn golden(dir: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(dir.join("golden.json")).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn generation(checkpoint: &Checkpoint, context: usize) -> (InferPlan, CpuDevice) {
    let arch = checkpoint.architecture();
    let plan = InferPlan::new(arch, &Recipe::infer(DType::F32, 1, context), &TARGET).unwrap();
    let mut device = CpuDevice::new(plan.slab_bytes(), TARGET.threads).unwrap();
    let (program, layout) = &plan.prefill;
    init_state(&mut device, program, layout, arch).unwrap();
    load_weights(&mut device, program, layout, arch, checkpoint).unwrap();
    (plan, device)
}

/// exp of the mean loss of predicting each id after the first.
fn perplexity(checkpoint: &Checkpoint, ids: &[u32]) -> f64 {
    let arch = checkpoint.architecture();
    let recipe = Recipe::full(DType::F32, 1, ids.len());
    let plan = TrainPlan::for_evaluation(arch, &recipe, &TARGET).unwrap();
    let mut device = CpuDevice::new(plan.slab_bytes(), TARGET.threads).unwrap();
    let (program, layout) = (&plan.evaluate, &plan.evaluate_layout);
    init_state(&mut device, program, layout, arch).unwrap();
    load_weights(&mut device, program, layout, arch, checkpoint).unwrap();
    let inputs: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
    let mut labels = inputs[1..].to_vec();
    labels.push(-100);
    let positions: Vec<i32> = (0..ids.len() as i32).collect();
    let doc_start = vec![0; ids.len()];
    let batch =
        MicroBatch { ids: &inputs, labels: &labels, positions: &positions, doc_start: &doc_start };
    let mut session = Session { plan: &plan, device: &mut device as &mut dyn Device };
    let (sum, count) = session.evaluate(&batch).unwrap();
    assert_eq!(count, ids.len() - 1);
    (sum / count as f64).exp()
}

#[test]
fn stories260k_has_the_logits_of_transformers() {
    let Some(dir) = shared("models/stories260K-hf") else { return };
    let golden = golden(&dir);
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let prompt = ids(&golden["prompt_ids"]);
    let argmax = ids(&golden["argmax_per_pos"]);
    let (plan, mut device) = generation(&checkpoint, 64);
    let mut generator = Generator::new(&plan, &mut device, &TARGET);
    let mut sampler = Sampler::new(Sampling::greedy()).unwrap();
    // Shorter prompts first, so that the cache takes part.
    for length in 1..=prompt.len() {
        let new = generator.generate(&prompt[..length], 1, &[], &mut sampler, |_| true).unwrap();
        assert_eq!(new.new_ids, [argmax[length - 1]]);
    }
    let expected = golden["last_logits_first8"].as_array().unwrap();
    for (found, expected) in generator.logits().unwrap().iter().zip(expected) {
        let expected = expected.as_f64().unwrap();
        assert!((f64::from(*found) - expected).abs() < 1e-3, "{found} {expected}");
    }
}

/// The context of 512 filled to the last position by a cache that was built in
/// chunks equals one pass over everything.
#[test]
fn a_full_context_has_the_logits_of_a_fresh_prefill() {
    let Some(dir) = shared("models/stories260K-hf") else { return };
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let (plan, mut device) = generation(&checkpoint, 512);
    let mut sampler = Sampler::new(Sampling::greedy()).unwrap();
    let (all, decoded) = {
        let mut generator = Generator::new(&plan, &mut device, &TARGET);
        let new = generator.generate(&[1], 511, &[], &mut sampler, |_| true).unwrap();
        assert_eq!(new.new_ids.len(), 511);
        ([vec![1], new.new_ids].concat(), generator.logits().unwrap().to_vec())
    };
    // The last token that was run is the one before the last that was drawn.
    let mut generator = Generator::new(&plan, &mut device, &TARGET);
    generator.generate(&all[..511], 1, &[], &mut sampler, |_| true).unwrap();
    let logits = generator.logits().unwrap();
    let most = decoded.iter().zip(logits).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(most < 1e-3, "{most}");
}

#[test]
fn smollm2_from_gguf_chats_as_in_transformers() {
    let Some((gguf, folder)) = smollm2() else { return };
    let golden = golden(&folder);
    let checkpoint = Checkpoint::open(&gguf).unwrap();
    let tokenizer = Tokenizer::from_dir(&folder).unwrap();
    let template = find_template(&folder, &tokenizer).unwrap().template;
    let (plan, mut device) = generation(&checkpoint, 128);
    let mut generator = Generator::new(&plan, &mut device, &TARGET);
    let mut sampler = Sampler::new(Sampling::greedy()).unwrap();
    for chat in golden["chat"].as_array().unwrap() {
        let user = chat["user"].as_str().unwrap();
        let rendered = template.render(&[Message::user(user)], true).unwrap();
        assert_eq!(rendered, chat["rendered_prompt"]);
        let prompt = tokenizer.encode(&rendered, false).unwrap();
        assert_eq!(prompt, ids(&chat["prompt_ids"]), "{user}");
        let expected = ids(&chat["greedy_ids"]);
        let found = generator
            .generate(&prompt, expected.len(), tokenizer.stop_ids(), &mut sampler, |_| true)
            .unwrap();
        assert_eq!(found.new_ids, expected, "{user}");
        assert_eq!(tokenizer.decode(&found.new_ids, true), chat["greedy_text"]);
    }
}

#[test]
fn smollm2_from_gguf_has_the_perplexity_of_transformers() {
    let Some((gguf, folder)) = smollm2() else { return };
    let golden = golden(&folder);
    let checkpoint = Checkpoint::open(&gguf).unwrap();
    let check = |ids: &[u32], expected: &Value| {
        let (found, expected) = (perplexity(&checkpoint, ids), expected.as_f64().unwrap());
        eprintln!("perplexity {found}, expected {expected}");
        assert!((found / expected - 1.0).abs() < 1e-3, "{found} {expected}");
    };
    let tokenizer = Tokenizer::from_dir(&folder).unwrap();
    let short = &golden["ppl"][0];
    let text = short["text"].as_str().unwrap();
    let short_ids = tokenizer.encode(text, false).unwrap();
    assert_eq!(short_ids, ids(&short["ids"]));
    check(&short_ids, &short["ppl"]);

    let Some(shakespeare) = shared("data/tinyshakespeare.txt") else { return };
    let text = std::fs::read_to_string(shakespeare).unwrap();
    let text: String = text.chars().take(4000).collect();
    let long_ids = tokenizer.encode(&text, false).unwrap();
    check(&long_ids[..1024], &golden["ppl"][1]["ppl"]);
}

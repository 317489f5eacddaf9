//! Models that people have, from the command line. They are not part of this
//! repository: `PLIMSOLL_SHARED` names a folder with `models/stories260K-hf`,
//! `PLIMSOLL_SMOLLM2` the file that `scripts/fetch-smollm2` fetches.

mod common;

use std::path::{Path, PathBuf};

use common::*;
use serde_json::Value;

fn smollm2() -> Option<PathBuf> {
    let path = std::env::var_os("PLIMSOLL_SMOLLM2").map_or_else(
        || Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/smollm2.gguf")).into(),
        PathBuf::from,
    );
    if !path.exists() {
        eprintln!("skipped: {} does not exist; scripts/fetch-smollm2 fetches it", path.display());
        return None;
    }
    Some(path)
}

fn read_json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The program with all cores.
fn run(line: &str, more: &[&str]) -> Ran {
    let mut command = command(line);
    command.env_remove("PLIMSOLL_THREADS");
    finished(line, command.args(more).output().unwrap())
}

#[test]
fn stories260k_tells_its_story() {
    let Some(model) = shared("models/stories260K-hf") else { return };
    let golden = read_json(&model.join("golden.json"));
    let expected = golden["greedy_ids_from_bos"].as_array().unwrap();
    let line = format!(
        "generate --model {} --prompt-ids 1 --greedy --max-new-tokens {} --format json",
        model.display(),
        expected.len()
    );
    let result = plimsoll(&line).ok().json();
    assert_eq!(&result["ids"].as_array().unwrap()[1..], expected.as_slice());
    // The recorded text has no space in front of its first word.
    let text = |value: &Value| value.as_str().unwrap().trim_start().to_owned();
    assert_eq!(text(&result["text"]), text(&golden["greedy_text"]));
    let prompt = golden["prompt_ids"].as_array().unwrap();
    let text = plimsoll(&format!(
        "generate --model {} --greedy --max-new-tokens 1 --format json --prompt Once",
        model.display()
    ));
    assert_eq!(text.ok().json()["ids"].as_array().unwrap()[..2], prompt[..2]);
}

/// A fine-tune of a real model on real data, as a user runs it.
#[test]
fn stories260k_learns_from_instructions() {
    let Some(model) = shared("models/stories260K-hf") else { return };
    let Some(data) = shared("data/self_instruct_guanaco_style.jsonl") else { return };
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let ran = run(
        &format!(
            "train --model {} --data {} --seq 128 --batch 4 --steps 40 --lr 2e-3 \
             --validation-split 0.05 --format json --out {}",
            model.display(),
            data.display(),
            out.display()
        ),
        &[],
    )
    .ok();
    let all = lines(&out.join("metrics.jsonl"));
    let loss = field(&all, "loss");
    assert!(mean(&loss[30..]) < mean(&loss[..5]) - 0.5, "{loss:?}");
    assert!(ran.stderr.contains("guanaco (JSON lines, detected), 427 examples"), "{ran:#?}");
    plimsoll(&format!("generate --model {} --prompt Once --max-new-tokens 4", out.display())).ok();
}

/// The whole way from a GGUF file with a tokenizer and a template of its own:
/// chat, a few steps of training, and a chat with what came out.
#[test]
fn smollm2_chats_and_learns() {
    let Some(gguf) = smollm2() else { return };
    let Some(folder) = shared("models/smollm2-135m-instruct") else { return };
    let golden = read_json(&folder.join("golden.json"));
    let chat = &golden["chat"][0];
    let question = chat["user"].as_str().unwrap();
    let answer = |model: &Path, precision: &str| {
        let line = format!(
            "generate --model {} --precision {precision} --chat --greedy --max-new-tokens 16 \
             --format json --prompt",
            model.display()
        );
        run(&line, &[question]).ok().json()
    };
    let result = answer(&gguf, "f32");
    let ids = |value: &Value| value.as_array().unwrap().clone();
    assert_eq!(ids(&result["ids"]), [ids(&chat["prompt_ids"]), ids(&chat["greedy_ids"])].concat());
    assert_eq!(result["text"], chat["greedy_text"]);
    assert_eq!(result["stopped_by"], "end_token");

    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data.jsonl");
    let text = "The Plimsoll line is a mark on a ship's hull: it shows how far she may be loaded.";
    std::fs::write(&data, serde_json::json!({ "text": text }).to_string()).unwrap();
    let out = dir.path().join("out");
    let line = format!(
        "train --model {} --data {} --seq 64 --steps 5 --lr 1e-4 --schedule constant --warmup 1 \
         --optimizer-dtype bf16 --save-every 1000 --keep 1 --format json --out {}",
        gguf.display(),
        data.display(),
        out.display()
    );
    let result = run(&line, &[]).ok().json();
    let loss = field(&lines(&out.join("metrics.jsonl")), "loss");
    assert!(loss[4] < loss[0] - 0.5, "{loss:?}");
    let (planned, measured) = (&result["planned_bytes"], &result["measured_bytes"]);
    let ratio = measured.as_f64().unwrap() / planned.as_f64().unwrap();
    assert!((ratio - 1.0).abs() < 0.02, "planned {planned}, measured {measured}");
    // What came out has the tokenizer and the template of the GGUF file.
    let after = answer(&out, "f32");
    assert_eq!(ids(&after["ids"])[..37], ids(&chat["prompt_ids"])[..]);
}

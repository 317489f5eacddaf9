//! Real data files, real tokenizers. The files are not in this repository;
//! without them the tests say so and pass.

use plimsoll_data::*;
use plimsoll_text::{FoundTemplate, TemplateSource, Tokenizer, chatml, find_template};
use std::path::{Path, PathBuf};

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

fn model(name: &str) -> Option<(Tokenizer, FoundTemplate)> {
    let dir = shared(&format!("models/{name}"))?;
    let tokenizer = Tokenizer::from_dir(&dir).unwrap();
    let template = find_template(&dir, &tokenizer).unwrap();
    Some((tokenizer, template))
}

fn file(name: &str) -> Option<Dataset> {
    Some(read_files(&[shared(&format!("data/{name}"))?], &ReadOptions::default()).unwrap())
}

/// What the model learns to say, by decoding the trained tokens.
fn learned(tokenizer: &Tokenizer, sample: &Sample) -> String {
    let ids = sample.ids.iter().zip(&sample.trained);
    let ids: Vec<u32> = ids.filter(|(_, trained)| **trained).map(|(id, _)| *id).collect();
    tokenizer.decode(&ids, false)
}

#[test]
fn real_files_are_detected_and_read_whole() {
    for (name, format, container, examples) in [
        ("seed_tasks.jsonl", Format::SelfInstruct, Container::JsonLines, 175),
        ("self_instruct_guanaco_style.jsonl", Format::Guanaco, Container::JsonLines, 427),
        ("sharegpt_toolcall.json", Format::ShareGpt, Container::Json, 300),
        ("tinyshakespeare.txt", Format::Raw, Container::PlainText, 1),
        ("user_oriented_instructions.jsonl", Format::SelfInstruct, Container::JsonLines, 252),
    ] {
        let Some(data) = file(name) else { return };
        let report = &data.files[0];
        assert_eq!((report.format, report.container, report.bad), (format, container, 0), "{name}");
        assert_eq!(data.examples.len(), examples, "{name}");
        eprintln!("{report}");
    }
}

#[test]
fn every_real_example_becomes_tokens_and_rows() {
    for model_name in ["smollm2-135m-instruct", "stories260K-hf"] {
        let Some((tokenizer, template)) = model(model_name) else { return };
        for name in [
            "seed_tasks.jsonl",
            "self_instruct_guanaco_style.jsonl",
            "sharegpt_toolcall.json",
            "tinyshakespeare.txt",
            "user_oriented_instructions.jsonl",
        ] {
            let Some(data) = file(name) else { return };
            let options = TokenizeOptions {
                vocab_size: Some(tokenizer.vocab_size()),
                ..TokenizeOptions::default()
            };
            let out = tokenize_all(&data, &tokenizer, &template, &options).unwrap();
            assert_eq!(out.samples.len(), data.examples.len());
            for (example, sample) in data.examples.iter().zip(&out.samples) {
                let Example::Conversation(c) = example else { continue };
                let text = learned(&tokenizer, sample);
                // Every answer is learned, and nothing of the questions.
                for m in c.messages.iter().filter(|m| m.role == "assistant") {
                    let spoken = m.content.trim();
                    if !spoken.contains('\u{fffd}') {
                        assert!(
                            text.contains(spoken),
                            "{model_name} {name}: {spoken:?} not in {text:?}"
                        );
                    }
                }
                assert!(
                    !text.contains("### Human") && !text.contains("<|im_start|>user"),
                    "{text}"
                );
            }
            let pack_options = PackOptions {
                seq_len: 512,
                mode: PackMode::Pack,
                long: LongDocuments::Cut,
                pad_id: 0,
                seed: 0,
            };
            let packed = pack(&out.samples, &pack_options).unwrap();
            eprintln!("{model_name} {name}: {}", packed.stats);
            assert!(packed.stats.trained > 5_000);
            assert!(packed.stats.wasted * 20 < packed.ids.len(), "more than 5 % wasted");
        }
    }
}

#[test]
fn guanaco_is_plain_without_a_template_and_chat_with_one() {
    let Some(data) = file("self_instruct_guanaco_style.jsonl") else { return };
    let (Some((smol, smol_template)), Some((stories, built_in))) =
        (model("smollm2-135m-instruct"), model("stories260K-hf"))
    else {
        return;
    };
    assert_eq!(built_in.source, TemplateSource::BuiltIn);
    let options = TokenizeOptions::default();
    let second = &data.examples[1];
    let chat = tokenize(second, &smol, &smol_template, &options).unwrap();
    assert!(smol.decode(&chat.ids, false).contains("<|im_start|>user\nWhat is the relation"));
    assert_eq!(
        learned(&smol, &chat),
        "The relation between the given pairs is that they are opposites.<|im_end|>"
    );
    let plain = tokenize(second, &stories, &built_in, &options).unwrap();
    assert_eq!(
        stories.decode(&plain.ids, false).replace("<s>", "").trim(),
        "### Human: What is the relation between the given pairs?\n\nNight : Day :: Right : Left### Assistant: The relation between the given pairs is that they are opposites.</s>"
    );
    assert_eq!(
        learned(&stories, &plain).trim(),
        "The relation between the given pairs is that they are opposites.</s>"
    );
    assert_eq!((plain.ids[0], plain.trained[0]), (1, false));
    let style = TokenizeOptions { style: Style::Template, ..options };
    let asked = tokenize(second, &stories, &built_in, &style).unwrap();
    assert!(stories.decode(&asked.ids, false).contains("<|im_start|>"));
    let all = TokenizeOptions { train_on: TrainOn::All, ..options };
    let all = tokenize(second, &stories, &built_in, &all).unwrap();
    assert!(all.trained.iter().all(|&t| t));
}

#[test]
fn a_foreign_vocabulary_is_refused() {
    let Some((smol, template)) = model("smollm2-135m-instruct") else { return };
    let data =
        read_bytes(Path::new("qa.jsonl"), SAMPLE.as_bytes(), &ReadOptions::default()).unwrap();
    let options = TokenizeOptions { vocab_size: Some(512), ..TokenizeOptions::default() };
    let error = tokenize_all(&data, &smol, &template, &options).unwrap_err().to_string();
    assert!(
        error.starts_with("qa.jsonl:1: token id ") && error.contains("vocabulary of 512"),
        "{error}"
    );
}

#[test]
fn the_sample_is_whole_and_fits_the_byte_vocabulary() {
    let data = read_bytes(Path::new("memory-qa.jsonl"), SAMPLE.as_bytes(), &ReadOptions::default())
        .unwrap();
    assert_eq!((data.files[0].format, data.files[0].bad), (Format::Messages, 0));
    assert!(data.examples.len() >= 120);
    let tokenizer = Tokenizer::byte_level();
    let template = chatml(&tokenizer).unwrap();
    let options = TokenizeOptions { vocab_size: Some(512), ..TokenizeOptions::default() };
    let out = tokenize_all(&data, &tokenizer, &template, &options).unwrap();
    for (example, sample) in data.examples.iter().zip(&out.samples) {
        let Example::Conversation(c) = example else { panic!("not a conversation") };
        assert_eq!(learned(&tokenizer, sample), format!("{}<|im_end|>", c.messages[1].content));
    }
    let longest = out.samples.iter().map(|s| s.ids.len()).max().unwrap();
    assert!(longest < 512, "{longest}");
}

//! `generate` and `chat`: sampling, seeds, ends, limits, and what they print.

mod common;

use std::io::Write;
use std::process::Stdio;

use common::*;
use serde_json::Value;

fn ids(value: &Value) -> Vec<u64> {
    value["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
}

#[test]
fn json_has_the_promised_fields_and_nothing_else_is_printed() {
    let dir = tempfile::tempdir().unwrap();
    let model = nano(dir.path());
    let line = format!(
        "generate --model {} --prompt-ids 5,17,9 --max-new-tokens 12 --ignore-eos --greedy \
         --format json",
        model.display()
    );
    let result = plimsoll(&line).ok().json();
    let all = ids(&result);
    assert_eq!(all.len(), 3 + 12);
    assert_eq!(&all[..3], [5, 17, 9]);
    assert!(all.iter().all(|id| *id < 272));
    assert!(result["text"].is_string());
    assert!(result["tokens_per_second"].as_f64().unwrap() > 0.0);
    let weights = std::fs::metadata(model.join("model.safetensors")).unwrap().len();
    assert!(result["peak_bytes"].as_u64().unwrap() > weights / 2);
    assert_eq!(result["stopped_by"], "length");

    // The table is the text alone; what it says about itself goes to standard error.
    let table = plimsoll(&line.replace("--format json", "")).ok();
    assert_eq!(table.stdout.trim_end_matches('\n'), result["text"].as_str().unwrap());
    assert!(table.stderr.contains("12 tokens"), "{table:#?}");
}

#[test]
fn text_and_its_ids_are_the_same_prompt() {
    let dir = tempfile::tempdir().unwrap();
    let model = nano(dir.path());
    let line =
        format!("generate --model {} --max-new-tokens 8 --greedy --format json", model.display());
    let from_text = plimsoll(&format!("{line} --prompt hi")).ok().json();
    let from_ids = plimsoll(&format!("{line} --prompt-ids 256,104,105")).ok().json();
    assert_eq!(ids(&from_text), ids(&from_ids));
}

#[test]
fn seeds_repeat_and_differ_and_thread_counts_do_not_matter() {
    let dir = tempfile::tempdir().unwrap();
    let model = nano(dir.path());
    let line = |options: &str| {
        format!(
            "generate --model {} --prompt abc --max-new-tokens 24 --ignore-eos --format json \
             {options}",
            model.display()
        )
    };
    let drawn = |options: &str| ids(&plimsoll(&line(options)).ok().json());
    let first = drawn("--seed 1");
    assert_eq!(first, drawn("--seed 1"));
    assert_ne!(first, drawn("--seed 2"));
    let threads = |n: &str| {
        let line = line("--seed 1");
        let output = command(&line).env("PLIMSOLL_THREADS", n).output().unwrap();
        ids(&finished(&line, output).ok().json())
    };
    assert_eq!(first, threads("2"));
    assert_eq!(first, threads("3"));

    // Options that leave one candidate are all the greedy choice.
    let greedy = drawn("--greedy");
    assert_eq!(greedy, drawn("--temperature 0"));
    assert_eq!(greedy, drawn("--top-k 1 --seed 5"));
    assert_eq!(greedy, drawn("--top-p 0.000001 --seed 6"));
    assert_eq!(greedy, drawn("--min-p 0.999999 --seed 7"));
    assert_eq!(drawn("--precision bf16 --greedy"), drawn("--precision bf16 --greedy"));
    let penalized = drawn("--greedy --repetition-penalty 100");
    let mut new = penalized[4..].to_vec();
    new.sort_unstable();
    new.dedup();
    assert_eq!(new.len(), 24, "a large penalty forbids repetition: {penalized:?}");
}

#[test]
fn prompts_together_get_what_each_gets_alone() {
    let dir = tempfile::tempdir().unwrap();
    let model = nano(dir.path());
    let run = |prompts: &[&str], options: &str| {
        let line = format!(
            "generate --model {} --max-new-tokens 11 --ignore-eos --json {options}",
            model.display()
        );
        let mut command = command(&line);
        for prompt in prompts {
            command.args(["--prompt", prompt]);
        }
        finished(&line, command.output().unwrap()).ok().json()
    };
    let prompts = ["a", "longer than the others", "abc"];
    for (options, seeds) in [("--greedy", [""; 3]), ("--seed 4", ["4", "5", "6"])] {
        let together = run(&prompts, options);
        let sequences = together["sequences"].as_array().unwrap();
        assert_eq!(sequences.len(), 3);
        for ((prompt, seed), sequence) in prompts.iter().zip(seeds).zip(sequences) {
            let options = if seed.is_empty() { options.into() } else { format!("--seed {seed}") };
            let alone = run(&[prompt], &options);
            assert_eq!(ids(&alone), ids(sequence), "{prompt} {options}");
            assert_eq!(alone["text"], sequence["text"]);
            assert_eq!(sequence["new_tokens"], 11);
        }
        assert!(together["tokens_per_second"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn a_stop_string_ends_the_text_before_it() {
    let dir = tempfile::tempdir().unwrap();
    let model = nano(dir.path());
    let line = format!(
        "generate --model {} --prompt abc --max-new-tokens 40 --ignore-eos --seed 3",
        model.display()
    );
    let whole = plimsoll(&format!("{line} --json")).ok().json();
    let text = whole["text"].as_str().unwrap();
    let letters: Vec<char> = text.chars().filter(char::is_ascii_alphanumeric).collect();
    let stop = letters[letters.len() / 2];
    let stopped = plimsoll(&format!("{line} --json --stop {stop}")).ok().json();
    let expected = &text[..text.find(stop).unwrap()];
    assert_eq!(stopped["text"], expected);
    assert_eq!(stopped["stopped_by"], "stop_string");
    let table = plimsoll(&format!("{line} --stop {stop}")).ok();
    assert_eq!(table.stdout, format!("{expected}\n"));
}

#[test]
fn an_end_token_ends_it() {
    let dir = tempfile::tempdir().unwrap();
    let model = nano(dir.path());
    let line = |model: &std::path::Path, options: &str| {
        format!(
            "generate --model {} --prompt-ids 70,71 --greedy --max-new-tokens 20 \
             --format json {options}",
            model.display()
        )
    };
    let all = ids(&plimsoll(&line(&model, "--ignore-eos")).ok().json());
    // The token that comes third is made the end token.
    let mut config = nano_config();
    config["eos_token_id"] = all[4].into();
    let ending = dir.path().join("ending");
    write_model(&ending, &config, &nano_weights(&nano_config()));
    let stopped = plimsoll(&line(&ending, "")).ok().json();
    let first = all[2..].iter().position(|id| *id == all[4]).unwrap();
    assert_eq!(ids(&stopped), all[..=2 + first]);
    assert_eq!(stopped["stopped_by"], "end_token");
}

#[test]
fn lengths_at_and_beyond_the_context() {
    let dir = tempfile::tempdir().unwrap();
    let model = nano(dir.path());
    let generate = |options: &str| {
        let line = format!("generate --model {} --greedy --format json {options}", model.display());
        plimsoll(&line)
    };
    let prompt = |n: usize| {
        let ids: Vec<String> = (0..n).map(|i| (i % 200).to_string()).collect();
        format!("--prompt-ids {}", ids.join(","))
    };
    // The model was made for 128 positions.
    let filled = generate(&format!("{} --ignore-eos --max-new-tokens 100", prompt(120))).ok();
    assert_eq!(ids(&filled.json()).len(), 128);
    assert_eq!(filled.json()["stopped_by"], "length");
    generate(&format!("{} --max-new-tokens 1", prompt(127))).ok();
    generate(&format!("{} --max-new-tokens 1", prompt(128))).refused(&["129", "128"]);
    generate(&prompt(300)).refused(&["301", "128"]);
    generate(&format!("{} --context 10", prompt(30))).refused(&["31", "10", "--context"]);
    generate(&format!("{} --context 1000", prompt(3))).refused(&["1000", "128"]);
    generate(&format!("{} --context 0", prompt(3))).refused(&["0"]);
    let none = generate(&format!("{} --max-new-tokens 0", prompt(3))).ok().json();
    assert_eq!(ids(&none), [0, 1, 2]);
    let many = format!("{} --ignore-eos --max-new-tokens {}", prompt(3), usize::MAX);
    assert_eq!(ids(&generate(&many).ok().json()).len(), 128);
}

#[test]
fn bad_prompts_and_options_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let model = nano(dir.path());
    let generate =
        |options: &str| plimsoll(&format!("generate --model {} {options}", model.display()));
    generate("--prompt-ids 5,272").refused(&["272", "vocabulary"]);
    generate("--prompt-ids 4294967295").refused(&["4294967295", "272"]);
    generate("--prompt-ids 5,x").refused(&["x"]);
    generate("").refused(&["--prompt"]);
    generate("--prompt a --prompt-ids 1").refused(&["--prompt-ids"]);
    generate("--prompt a --temperature=-1").refused(&["--temperature"]);
    generate("--prompt a --top-p 0").refused(&["--top-p", "0"]);
    generate("--prompt a --top-p 1.5").refused(&["--top-p", "1.5"]);
    generate("--prompt a --min-p 1").refused(&["--min-p", "1"]);
    generate("--prompt a --temperature NaN").refused(&["--temperature"]);
    generate("--prompt a --repetition-penalty 0").refused(&["--repetition-penalty"]);
    plimsoll("generate --model llama-3-8b --prompt a").refused(&["preset", "no weights"]);
}

#[test]
fn an_empty_prompt_is_the_begin_token_or_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let model = nano(dir.path());
    let line = format!("generate --model {} --max-new-tokens 2 --format json", model.display());
    let output = command(&line).args(["--prompt", ""]).output().unwrap();
    let ran = finished(&line, output).ok();
    assert_eq!(ids(&ran.json())[0], 256);
}

/// A hub id is looked for where `huggingface_hub` keeps what it fetched.
#[test]
fn models_are_found_in_the_cache_of_the_hub() {
    let dir = tempfile::tempdir().unwrap();
    let repo = dir.path().join("hub/models--someone--nano");
    std::fs::create_dir_all(repo.join("refs")).unwrap();
    std::fs::write(repo.join("refs/main"), "0123abc").unwrap();
    write_model(&repo.join("snapshots/0123abc"), &nano_config(), &nano_weights(&nano_config()));
    let line = "generate --model someone/nano --prompt-ids 1 --max-new-tokens 3 --format json";
    for (variable, path) in
        [("HF_HOME", dir.path().to_owned()), ("HF_HUB_CACHE", dir.path().join("hub"))]
    {
        let output = command(line).env(variable, path).output().unwrap();
        assert_eq!(ids(&finished(line, output).ok().json()).len(), 4);
    }
    plimsoll(line).refused(&["someone/nano"]);
}

/// Runs `chat` with these lines on standard input.
fn chat(model: &std::path::Path, options: &str, input: &[u8]) -> Ran {
    let line = format!("chat --model {} --max-new-tokens 6 {options}", model.display());
    let mut child = command(&line)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // It may have ended before it read everything.
    let _ = child.stdin.take().unwrap().write_all(input);
    finished(&line, child.wait_with_output().unwrap())
}

#[test]
fn chat_answers_each_line_and_ends_with_its_input() {
    let dir = tempfile::tempdir().unwrap();
    let model = nano(dir.path());
    let ran = chat(&model, "--greedy --system brief", b"a\nb\n").ok();
    assert_eq!(ran.stderr.matches("tokens/s]").count(), 2, "{ran:#?}");
    let again = chat(&model, "--greedy --system brief", b"a\nb\n").ok();
    assert_eq!(ran.stdout, again.stdout);
    // A line cut off by the end of the input is a line.
    let cut = chat(&model, "--greedy", b"a").ok();
    assert_eq!(cut.stderr.matches("tokens/s]").count(), 1, "{cut:#?}");
    assert_eq!(chat(&model, "", b"").ok().stdout, "");
    assert_eq!(chat(&model, "", b"\nnot read\n").ok().stdout, "");
    chat(&model, "", b"a\n\xff\xfe\n").refused(&["standard input"]);
    // The conversation outgrows the 128 positions.
    let long = [b"x".repeat(200), b"\n".to_vec()].concat();
    chat(&model, "", &long).refused(&["128"]);
}

/// What a chat says is what `generate --chat` says: the cache that a chat keeps
/// from turn to turn changes nothing.
#[test]
fn chat_equals_generate_with_the_template() {
    let dir = tempfile::tempdir().unwrap();
    let model = nano(dir.path());
    let said = chat(&model, "--greedy", b"hello\n").ok().stdout;
    let line = format!(
        "generate --chat --model {} --prompt hello --greedy --max-new-tokens 6",
        model.display()
    );
    assert_eq!(plimsoll(&line).ok().stdout, said);
}

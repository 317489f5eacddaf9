//! `train`: the loss falls, what is written is complete, and no interruption
//! changes a bit of the result.

mod common;

use std::path::{Path, PathBuf};

use common::events::scalars;
use common::process::*;
use common::*;
use serde_json::Value;

/// A nano model and conversations in a folder that goes away with this.
struct Bench {
    dir: tempfile::TempDir,
    model: PathBuf,
    data: PathBuf,
}

impl Bench {
    fn new(conversation_count: usize) -> Bench {
        let dir = tempfile::tempdir().unwrap();
        let model = nano(dir.path());
        let data = conversations(dir.path(), conversation_count);
        Bench { dir, model, data }
    }

    fn out(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn line(&self, out: &Path, options: &str) -> String {
        let mut line = format!("train --out {} --format json {options}", out.display());
        for (option, value) in [
            ("--model", &*self.model.to_string_lossy()),
            ("--data", &*self.data.to_string_lossy()),
            ("--seq", "48"),
            ("--batch", "2"),
            ("--lr", "3e-3"),
        ] {
            if !options.split_whitespace().any(|word| word == option) {
                line += &format!(" {option} {value}");
            }
        }
        line
    }

    fn train(&self, out: &Path, options: &str) -> Ran {
        plimsoll(&self.line(out, options))
    }
}

/// The bytes of every tensor that a run leaves.
fn weights(out: &Path) -> Vec<u8> {
    std::fs::read(out.join("model.safetensors")).unwrap()
}

/// Steps and losses in metrics.jsonl, which must count every step once.
fn losses(out: &Path) -> Vec<f64> {
    let lines = lines(&out.join("metrics.jsonl"));
    let steps: Vec<&Value> = lines.iter().filter(|l| l.get("loss").is_some()).collect();
    for (i, step) in steps.iter().enumerate() {
        assert_eq!(step["step"], i + 1, "{step}");
    }
    field(&lines, "loss")
}

fn validation_losses(out: &Path) -> Vec<f64> {
    field(&lines(&out.join("metrics.jsonl")), "validation_loss")
}

/// Makes a finished run look like one that was killed after the checkpoint of
/// this step was written.
fn cut_back(out: &Path, step: u64) {
    for name in names(out) {
        let path = out.join(&name);
        let number = name.strip_prefix("checkpoint-").and_then(|n| n.parse::<u64>().ok());
        if number.is_some_and(|n| n > step) {
            std::fs::remove_dir_all(path).unwrap();
        } else if name == "model.safetensors" || name == "config.json" {
            std::fs::remove_file(path).unwrap();
        }
    }
}

fn no_temporary_files(out: &Path) {
    for name in names(out) {
        let ok = !name.starts_with('.')
            && ![".partial", ".old", ".tmp"].iter().any(|end| name.ends_with(end));
        assert!(ok, "{name} was left behind");
    }
}

/// The first run of a new user: a preset on the built-in sample.
#[test]
fn the_built_in_sample_trains_a_preset() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let line = format!(
        "train --model plimsoll-tiny --seq 64 --batch 4 --steps 20 --lr 1e-3 --warmup 2 \
         --out {} --format json",
        out.display()
    );
    let ran = plimsoll(&line).ok();
    let result = ran.json();
    let loss = losses(&out);
    assert_eq!(loss.len(), 20);
    assert!((loss[0] - 512f64.ln()).abs() < 0.7, "random weights know nothing: {loss:?}");
    assert!(mean(&loss[15..]) < loss[0] - 1.0, "{loss:?}");

    assert_eq!(result["steps"], 20);
    assert!((result["loss"].as_f64().unwrap() - loss[19]).abs() < 1e-5);
    assert!(result["tokens_per_second"].as_f64().unwrap() > 0.0);
    let planned = result["planned_bytes"].as_u64().unwrap() as f64;
    let measured = result["measured_bytes"].as_u64().unwrap() as f64;
    assert!(planned >= (64 << 20) as f64);
    assert!((measured / planned - 1.0).abs() < 0.02, "planned {planned}, measured {measured}");
    let plan = line.replace("train", "plan").replace("--steps 20 --lr 1e-3 --warmup 2", "");
    let plan = plan.split(" --out").next().unwrap().to_owned() + " --format json";
    assert_eq!(plimsoll(&plan).ok().json()["peak_bytes"].as_f64().unwrap(), planned);
    // The data set is described: format, rows, tokens.
    for word in ["messages", "180 examples", "rows of 64 tokens", "wasted"] {
        assert!(ran.stderr.contains(word), "`{word}`: {}", ran.stderr);
    }
    no_temporary_files(&out);
}

#[test]
fn metrics_and_tensorboard_agree() {
    let bench = Bench::new(40);
    let out = bench.out("out");
    bench.train(&out, "--steps 12 --validation-split 0.2 --eval-every 4").ok();
    let lines = lines(&out.join("metrics.jsonl"));
    let shown = scalars(&out.join("runs"));
    let on_board = |tag: &str| -> Vec<(u64, f32)> {
        shown.iter().filter(|s| s.tag == tag).map(|s| (s.step, s.value)).collect()
    };
    let logged = |name: &str| -> Vec<(u64, f32)> {
        let found = lines.iter().filter_map(|l| Some((l["step"].as_u64()?, l[name].as_f64()?)));
        found.map(|(step, value)| (step, value as f32)).collect()
    };
    for (tag, name, count) in [
        ("train/loss", "loss", 12),
        ("train/learning_rate", "learning_rate", 12),
        ("train/grad_norm", "grad_norm", 12),
        ("train/tokens_per_second", "tokens_per_second", 12),
        ("validation/loss", "validation_loss", 3),
        ("validation/perplexity", "perplexity", 3),
    ] {
        assert_eq!(on_board(tag).len(), count, "{tag}");
        assert_eq!(on_board(tag), logged(name), "{tag}");
    }
    for line in &lines {
        let loss = line.get("validation_loss").and_then(Value::as_f64);
        if let Some(loss) = loss {
            assert!((line["perplexity"].as_f64().unwrap() - loss.exp()).abs() < 1e-6);
        }
    }
}

#[test]
fn order_and_result_are_functions_of_the_seed() {
    let bench = Bench::new(40);
    let run = |name: &str, seed: u64| {
        let out = bench.out(name);
        bench.train(&out, &format!("--steps 6 --seed {seed}")).ok();
        (losses(&out), weights(&out))
    };
    let (a, b, c) = (run("a", 1), run("b", 1), run("c", 2));
    assert!(a == b);
    assert_ne!(a.0[0], c.0[0], "another order begins with another batch");

    // Threads change nothing.
    let out = bench.out("threads");
    let line = bench.line(&out, "--steps 6 --seed 1");
    let output = command(&line).env("PLIMSOLL_THREADS", "3").output().unwrap();
    finished(&line, output).ok();
    assert!((losses(&out), weights(&out)) == a);

    // One epoch sees every row once, two see them in two orders.
    let epochs = bench.out("epochs");
    bench.train(&epochs, "--epochs 2 --lr 0 --batch 1").ok();
    let loss = losses(&epochs);
    let (mut first, mut second) =
        (loss[..loss.len() / 2].to_vec(), loss[loss.len() / 2..].to_vec());
    assert_ne!(first, second);
    first.sort_by(f64::total_cmp);
    second.sort_by(f64::total_cmp);
    assert_eq!(first, second);
}

/// How a step is cut into pieces changes its memory, not its result.
#[test]
fn accumulation_recomputation_and_chunks_change_no_loss() {
    let bench = Bench::new(40);
    let run = |name: &str, options: &str| {
        let out = bench.out(name);
        bench.train(&out, &format!("--steps 5 {options}")).ok();
        losses(&out)
    };
    let expected = run("whole", "--batch 4");
    for (i, options) in [
        "--batch 2 --accumulate 2",
        "--batch 1 --accumulate 4",
        "--batch 4 --recompute norms",
        "--batch 4 --recompute mlp",
        "--batch 4 --recompute block",
        "--batch 4 --recompute block:0-0,norms",
        "--batch 4 --loss-rows 7",
        "--batch 4 --loss-rows 1000",
        "--batch 4 --recompute auto",
    ]
    .into_iter()
    .enumerate()
    {
        let found = run(&format!("cut{i}"), options);
        for (a, b) in expected.iter().zip(&found) {
            assert!((a - b).abs() < 1e-4 * a, "{options}: {found:?} {expected:?}");
        }
    }
    // Without clipping, the optimizer may run inside backward.
    let apart = run("apart", "--max-grad-norm 0");
    let inside = run("inside", "--max-grad-norm 0 --optimizer-in-backward");
    for (a, b) in apart.iter().zip(&inside) {
        assert!((a - b).abs() < 1e-4 * a, "{apart:?} {inside:?}");
    }
}

/// Runs to the end; then again from a checkpoint in the middle, and compares.
fn resume_equals(options: &str, from: u64) {
    resume_with_equals(options, "", "", from);
}

/// The same with other options for the first and for the resumed run.
fn resume_with_equals(options: &str, first: &str, resumed: &str, from: u64) {
    let bench = Bench::new(60);
    let options = format!("{options} --save-every 1 --keep 99");
    let whole = bench.out("whole");
    bench.train(&whole, &format!("{options} {first}")).ok();
    let expected = (losses(&whole), validation_losses(&whole), weights(&whole));
    let best = || std::fs::read(whole.join("best/model.safetensors")).ok();
    let expected_best = best();
    let tags = |out: &Path| {
        let shown = scalars(&out.join("runs"));
        let losses = shown.into_iter().filter(|s| s.tag.ends_with("/loss"));
        losses.map(|s| (s.step, s.tag, s.value.to_bits())).collect::<Vec<_>>()
    };
    let board = tags(&whole);
    cut_back(&whole, from);
    // Another number of threads makes no difference either.
    let line = bench.line(&whole, &format!("{options} {resumed} --resume"));
    finished(&line, command(&line).env("PLIMSOLL_THREADS", "2").output().unwrap()).ok();
    assert!((losses(&whole), validation_losses(&whole), weights(&whole)) == expected);
    assert!(best() == expected_best);
    assert_eq!(tags(&whole), board);
    no_temporary_files(&whole);
}

#[test]
fn resume_is_bitwise_in_f32_within_an_epoch() {
    resume_equals("--steps 9", 4);
}

#[test]
fn resume_is_bitwise_with_accumulation_over_epochs() {
    resume_equals("--epochs 2 --accumulate 3 --optimizer-dtype bf16", 3);
}

#[test]
fn resume_is_bitwise_in_bf16_with_stochastic_rounding() {
    resume_equals("--steps 8 --precision bf16 --optimizer-dtype bf16 --accumulate 2", 5);
}

#[test]
fn resume_is_bitwise_with_master_weights() {
    let masters = "--precision bf16 --master-weights f32";
    resume_equals(&format!("--steps 8 --accumulate 2 {masters}"), 5);
    let inside = "--steps 5 --optimizer adamw8bit --optimizer-in-backward --max-grad-norm 0";
    resume_with_equals(&format!("{inside} {masters}"), "--offload optimizer", "", 3);
    // A run without them does not go on with them.
    let bench = Bench::new(30);
    let out = bench.out("out");
    bench.train(&out, "--steps 2 --precision bf16").ok();
    bench.train(&out, &format!("--steps 2 {masters} --resume")).refused(&["master_weights"]);
}

/// The ledger has two bytes a parameter more and says what they are.
#[test]
fn master_weights_are_two_bytes_a_parameter() {
    let plan = |masters: &str, options: &str| {
        let line = format!("plan --model plimsoll-tiny --gpu h200 --seq 64 {options}");
        let line = format!("{line} --master-weights {masters}");
        let table = plimsoll(&line).ok().stdout;
        (plimsoll(&format!("{line} --format json")).ok().json(), table)
    };
    for optimizer in ["adamw", "adamw8bit", "sgd"] {
        let options = format!("--optimizer {optimizer}");
        let ((without, _), (with, table)) = (plan("none", &options), plan("f32", &options));
        let bytes = |plan: &Value| plan["by_class"]["optimizer_state"].as_u64().unwrap_or(0);
        let two = 2 * with["parameters"].as_u64().unwrap();
        assert_eq!(bytes(&with) - bytes(&without), two);
        assert_eq!(with["master_bytes"], two);
        assert_eq!(with["recipe"]["master_weights"], "f32");
        assert!(without.get("master_bytes").is_none());
        assert!(without["recipe"].get("master_weights").is_none());
        assert!(table.contains("of it, f32 master weights"), "{table}");
        let (away, _) = plan("f32", &format!("{options} --offload optimizer"));
        let halves = ["master_bytes", "master_host_bytes"].map(|key| away[key].as_u64().unwrap());
        assert_eq!(halves.iter().sum::<u64>(), two);
    }
}

#[test]
fn resume_is_bitwise_with_validation_and_other_options() {
    resume_equals(
        "--steps 8 --validation-split 0.2 --eval-every 2 --recompute block --schedule linear \
         --optimizer sgd --momentum 0.9 --lr 0.05 --pad",
        3,
    );
    resume_equals("--steps 5 --optimizer-in-backward --max-grad-norm 0 --train-on all", 2);
}

#[test]
fn resume_is_bitwise_with_8bit_state() {
    resume_equals("--steps 8 --optimizer adamw8bit --precision bf16", 4);
    let inside = "--optimizer-in-backward --max-grad-norm 0";
    resume_equals(&format!("--steps 6 --optimizer adamw8bit {inside}"), 3);
}

#[test]
fn resume_is_bitwise_with_offload_and_with_another() {
    let inside = "--steps 6 --optimizer-in-backward --max-grad-norm 0 --precision bf16";
    let weights = "--offload optimizer+weights --recompute block";
    resume_with_equals(inside, weights, weights, 3);
    resume_with_equals(inside, "", "--offload optimizer+activations --recompute block", 2);
    resume_with_equals("--steps 5 --accumulate 2", "--offload optimizer", "", 2);
}

/// Moments in eight bits train as well, and the plan knows what they save.
#[test]
fn adamw8bit_follows_adamw_in_a_quarter_of_its_state() {
    let dir = tempfile::tempdir().unwrap();
    let run = |name: &str| {
        let out = dir.path().join(name);
        let recipe = format!("--model plimsoll-tiny --seq 64 --batch 4 --optimizer {name}");
        let line = format!(
            "train {recipe} --steps 20 --lr 1e-3 --warmup 2 --out {} --format json",
            out.display()
        );
        let result = plimsoll(&line).ok().json();
        let planned = result["planned_bytes"].as_f64().unwrap();
        assert!((result["measured_bytes"].as_f64().unwrap() / planned - 1.0).abs() < 0.02);
        let plan = plimsoll(&format!("plan {recipe} --precision f32 --format json")).ok().json();
        let state = plan["by_class"]["optimizer_state"].as_f64().unwrap();
        (losses(&out), state, plan["parameters"].as_f64().unwrap())
    };
    let (wide, wide_state, parameters) = run("adamw");
    let (narrow, narrow_state, _) = run("adamw8bit");
    assert_eq!(wide[0], narrow[0]);
    assert!((mean(&wide[15..]) - mean(&narrow[15..])).abs() < 0.05, "{wide:?} {narrow:?}");
    assert_eq!(wide_state, 8.0 * parameters);
    // Two bytes, two scales for 256, and norms in float32.
    assert!((2.03..2.1).contains(&(narrow_state / parameters)), "{narrow_state} {parameters}");
}

#[test]
fn a_resumed_run_must_be_the_same_run() {
    let bench = Bench::new(30);
    let out = bench.out("out");
    bench.train(&out, "--steps 4 --save-every 2 --keep 9").ok();
    bench.train(&out, "--steps 4").refused(&["--resume", "checkpoint-00000004"]);
    for (options, key) in [
        ("--seed 3", "seed"),
        ("--batch 1", "batch"),
        ("--accumulate 2", "accumulate"),
        ("--precision bf16", "precision"),
        ("--optimizer sgd", "optimizer"),
        ("--weight-decay 0.2", "weight_decay"),
        ("--lr 1e-5", "schedule"),
        ("--steps 9", "schedule"),
        ("--seq 40", "seq"),
        ("--model plimsoll-tiny", "model"),
    ] {
        let steps = if options.contains("--steps") { "" } else { "--steps 4" };
        bench.train(&out, &format!("{steps} {options} --resume")).refused(&["other settings", key]);
    }
    // Other data of the same shape.
    let text = std::fs::read_to_string(&bench.data).unwrap();
    std::fs::write(&bench.data, text.replace("It is", "Is it")).unwrap();
    bench.train(&out, "--steps 4 --resume").refused(&["other settings", "data"]);
    std::fs::write(&bench.data, text).unwrap();

    // A finished run that is resumed says again how it ended.
    let before = (weights(&out), losses(&out));
    let again = bench.train(&out, "--steps 4 --save-every 2 --resume").ok().json();
    assert_eq!(again["steps"], 4);
    assert!((again["loss"].as_f64().unwrap() - before.1[3]).abs() < 1e-5, "{again}");
    assert!((weights(&out), losses(&out)) == before);
    // Where there is nothing yet, --resume is a start.
    bench.train(&bench.out("new"), "--steps 1 --resume").ok();
}

#[test]
fn a_constant_schedule_can_be_made_longer() {
    let bench = Bench::new(30);
    let (long, grown) = (bench.out("long"), bench.out("grown"));
    let constant = "--schedule constant --warmup 2";
    bench.train(&long, &format!("--steps 7 {constant}")).ok();
    bench.train(&grown, &format!("--steps 3 {constant}")).ok();
    bench.train(&grown, &format!("--steps 7 {constant} --resume")).ok();
    assert!((losses(&grown), weights(&grown)) == (losses(&long), weights(&long)));
}

#[test]
fn a_damaged_checkpoint_is_named_and_the_one_before_it_serves() {
    let bench = Bench::new(30);
    let out = bench.out("out");
    let options = "--steps 4 --save-every 1 --keep 9";
    bench.train(&out, options).ok();
    let expected = weights(&out);
    for file in ["trainer.json", "optimizer.safetensors", "model.safetensors", "config.json"] {
        let path = out.join("checkpoint-00000004").join(file);
        let bytes = std::fs::read(&path).unwrap();
        for damaged in [&bytes[..bytes.len() / 2], &[]] {
            std::fs::write(&path, damaged).unwrap();
            let named = if file == "config.json" { "config" } else { file };
            bench
                .train(&out, &format!("{options} --resume"))
                .refused(&["checkpoint-00000004", named]);
        }
        std::fs::remove_file(&path).unwrap();
        let ran = bench.train(&out, &format!("{options} --resume"));
        // Without trainer.json it is no checkpoint at all.
        if file == "trainer.json" {
            ran.ok();
        } else {
            ran.refused(&["checkpoint-00000004"]);
        }
        std::fs::write(&path, &bytes).unwrap();
    }
    let folder = out.join("checkpoint-00000004");
    std::fs::write(folder.join("model.safetensors"), b"damaged").unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    bench.train(&out, &format!("{options} --resume")).ok();
    assert!(weights(&out) == expected);
}

/// Killed at arbitrary moments, again and again: the newest checkpoint can be
/// loaded each time, and the end is that of the uninterrupted run.
#[test]
fn kills_at_random_moments_lose_nothing() {
    let bench = Bench::new(60);
    let options = "--steps 40 --save-every 1 --validation-split 0.2 --eval-every 3";
    let whole = bench.out("whole");
    bench.train(&whole, options).ok();
    let out = bench.out("killed");
    let mut random = 12345u64;
    let mut killed = 0;
    for round in 0..12 {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let line = bench.line(&out, &format!("{options} --resume"));
        let mut child = start(&line);
        let have = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap_or_default();
        let more = (random >> 60) as usize % 4;
        wait_for_lines(&mut child, &out.join("metrics.jsonl"), have.lines().count() + more);
        std::thread::sleep(std::time::Duration::from_micros((random >> 33) % 12_000));
        signal(&child, SIGKILL);
        let output = end(child);
        if output.status.success() {
            break;
        }
        assert_eq!(output.status.code(), None, "round {round}: {output:?}");
        killed += 1;
        let newest = names(&out)
            .into_iter()
            .rfind(|n| n.starts_with("checkpoint-") && n.len() == "checkpoint-00000000".len());
        if let Some(newest) = newest {
            let model = out.join(newest);
            let line =
                format!("generate --model {} --prompt-ids 1 --max-new-tokens 1", model.display());
            plimsoll(&line).ok();
        }
    }
    eprintln!("killed {killed} times");
    bench.train(&out, &format!("{options} --resume")).ok();
    assert_eq!(losses(&out), losses(&whole));
    assert_eq!(validation_losses(&out), validation_losses(&whole));
    assert!(weights(&out) == weights(&whole));
    let best = |out: &Path| weights(&out.join("best"));
    assert!(best(&out) == best(&whole));
    no_temporary_files(&out);
    let kept: Vec<String> =
        names(&out).into_iter().filter(|n| n.starts_with("checkpoint-")).collect();
    assert_eq!(kept, ["checkpoint-00000039", "checkpoint-00000040"]);
}

#[test]
fn an_interrupted_run_saves_and_goes_on() {
    for sent in [SIGINT, SIGTERM] {
        let bench = Bench::new(60);
        let out = bench.out("out");
        // So long that it cannot have ended by itself.
        let constant = "--schedule constant --warmup 2 --save-every 1000000";
        let line = bench.line(&out, &format!("--steps 1000000 {constant}"));
        let mut child = start(&line);
        wait_for_lines(&mut child, &out.join("metrics.jsonl"), 3);
        signal(&child, sent);
        let ran = finished(&line, end(child)).ok();
        let result = ran.json();
        assert_eq!(result["ended"], "interrupted");
        let steps = result["steps"].as_u64().unwrap();
        assert!(steps >= 3);
        assert_eq!(losses(&out).len() as u64, steps);
        assert!(out.join(format!("checkpoint-{steps:08}/trainer.json")).exists());

        let more = steps + 3;
        let resumed = format!("--steps {more} {constant} --resume");
        assert_eq!(bench.train(&out, &resumed).ok().json()["ended"], "finished");
        let whole = bench.out("whole");
        bench.train(&whole, &format!("--steps {more} {constant}")).ok();
        assert!((losses(&out), weights(&out)) == (losses(&whole), weights(&whole)));
    }
}

/// Two runs into one folder would mix their files.
#[test]
fn a_folder_takes_one_run_at_a_time() {
    let bench = Bench::new(20);
    let out = bench.out("out");
    let line = bench.line(&out, "--steps 1000000 --save-every 1000000");
    let mut child = start(&line);
    wait_for_lines(&mut child, &out.join("metrics.jsonl"), 1);
    bench.train(&out, "--steps 1").refused(&["another process"]);
    bench.train(&out, "--steps 1 --resume").refused(&["another process"]);
    signal(&child, SIGINT);
    let steps = finished(&line, end(child)).ok().json()["steps"].as_u64().unwrap();
    assert_eq!(losses(&out).len() as u64, steps);
}

#[test]
fn early_stopping_keeps_the_best_model() {
    let bench = Bench::new(40);
    // Without learning no evaluation is better than the first.
    let out = bench.out("still");
    let options = "--steps 50 --validation-split 0.25 --eval-every 2 --patience 3 --lr 0";
    let result = bench.train(&out, options).ok().json();
    assert_eq!(result["ended"], "early_stop");
    assert_eq!((result["steps"].as_u64(), result["best_step"].as_u64()), (Some(8), Some(2)));
    assert_eq!(validation_losses(&out).len(), 4);
    assert_eq!(result["best_validation_loss"], result["validation_loss"]);

    // A run that overfits: the best model is kept, and it is the best.
    let out = bench.out("overfit");
    let validation = bench.out("validation.jsonl");
    let other = std::fs::read_to_string(&bench.data).unwrap();
    let other: Vec<&str> = other.lines().rev().take(8).collect();
    std::fs::write(&validation, other.join("\n").replace("It is", "Hmm,")).unwrap();
    let options = format!(
        "--epochs 30 --eval-every 5 --patience 2 --schedule constant --lr 1e-2 --validation {}",
        validation.display()
    );
    let result = bench.train(&out, &options).ok().json();
    assert_eq!(result["ended"], "early_stop", "{result}");
    let best = result["best_validation_loss"].as_f64().unwrap();
    let all = validation_losses(&out);
    assert!(all.iter().all(|loss| *loss >= best) && all.contains(&best), "{all:?} {best}");
    let evaluate = |model: &Path| {
        let line = format!(
            "evaluate --model {} --data {} --seq 48 --batch 2 --format json",
            model.display(),
            validation.display()
        );
        plimsoll(&line).ok().json()["loss"].as_f64().unwrap()
    };
    assert!((evaluate(&out.join("best")) - best).abs() < 1e-6);
    assert!((evaluate(&out) - all[all.len() - 1]).abs() < 1e-6);
    // What stopped early is over: to resume it trains no further.
    let before = (weights(&out), losses(&out));
    let again = bench.train(&out, &format!("{options} --resume")).ok().json();
    assert_eq!(again["ended"], "early_stop");
    assert!((weights(&out), losses(&out)) == before);
    // With more patience it goes on.
    let patient = options.replace("--patience 2", "--patience 4");
    let on = bench.train(&out, &format!("{patient} --resume")).ok().json();
    assert!(on["steps"].as_u64() > result["steps"].as_u64(), "{on}");
}

#[test]
fn validation_data_is_not_trained_on() {
    let bench = Bench::new(40);
    let out = bench.out("out");
    let ran = bench.train(&out, "--epochs 1 --validation-split 0.25 --format messages").ok();
    let documents = |name: &str| -> usize {
        let line = ran.stderr.lines().find(|l| l.starts_with(&format!("{name}: "))).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    assert_eq!((documents("train"), documents("validation")), (30, 10));
}

/// What training leaves is a model like any other: for every command, in both
/// precisions, and from the best and every checkpoint as well.
#[test]
fn a_trained_model_is_a_model() {
    let bench = Bench::new(40);
    for precision in ["f32", "bf16"] {
        let out = bench.out(precision);
        let options =
            format!("--steps 4 --save-every 2 --precision {precision} --validation-split 0.2");
        bench.train(&out, &options).ok();
        for model in [out.clone(), out.join("best"), out.join("checkpoint-00000002")] {
            let model = model.display();
            let options = format!("--precision {precision} --greedy --max-new-tokens 4");
            plimsoll(&format!("inspect --model {model}")).ok();
            plimsoll(&format!("generate --model {model} --prompt hi {options}")).ok();
            plimsoll(&format!("chat --model {model} {options}")).ok();
            let data = bench.data.display();
            let evaluate = format!(
                "evaluate --model {model} --data {data} --seq 48 --precision {precision} \
                 --format json"
            );
            assert!(plimsoll(&evaluate).ok().json()["loss"].as_f64().unwrap() < 6.0);
        }
        // Further training goes on where this ended.
        let further = bench.out(&format!("{precision}-further"));
        let last = losses(&out)[3];
        let model = out.display();
        let options = format!("--steps 2 --precision {precision} --model {model}");
        bench.train(&further, &options).ok();
        assert!((losses(&further)[0] - last).abs() < 0.7);
    }
}

/// The files of a tokenizer go where the model goes.
#[test]
fn a_trained_model_keeps_its_tokenizer() {
    let Some(stories) = shared("models/stories260K-hf") else { return };
    let dir = tempfile::tempdir().unwrap();
    let data = conversations(dir.path(), 20);
    let out = dir.path().join("out");
    let line = format!(
        "train --model {} --data {} --seq 64 --steps 2 --save-every 1 --validation-split 0.2 \
         --lr 0 --out {}",
        stories.display(),
        data.display(),
        out.display()
    );
    plimsoll(&line).ok();
    let text = |model: &Path| {
        let line = format!(
            "generate --model {} --prompt Once --greedy --max-new-tokens 8",
            model.display()
        );
        plimsoll(&line).ok().stdout
    };
    let expected = text(&stories);
    for model in [out.clone(), out.join("best"), out.join("checkpoint-00000001")] {
        assert_eq!(text(&model), expected, "{}", model.display());
    }
}

#[test]
fn a_loss_that_is_no_number_stops_the_run_and_keeps_the_last_checkpoint() {
    let bench = Bench::new(40);
    let out = bench.out("out");
    let options = "--steps 60 --save-every 1 --schedule constant --max-grad-norm 0 \
        --optimizer sgd --lr 1e6";
    let ran = bench.train(&out, options).fails(1, &["lower --lr", "step"]);
    assert!(ran.stdout.is_empty());
    assert!(!out.join("model.safetensors").exists());
    // Every checkpoint that is left holds numbers.
    for name in names(&out).into_iter().filter(|n| n.starts_with("checkpoint-")) {
        let model = out.join(name);
        plimsoll(&format!(
            "generate --model {} --prompt-ids 1 --max-new-tokens 1",
            model.display()
        ))
        .ok();
    }
}

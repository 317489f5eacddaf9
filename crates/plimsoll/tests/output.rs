//! What goes to standard output and standard error, and what happens when
//! nobody takes it.

mod common;

use std::process::Stdio;

use common::*;
use serde_json::Value;

/// Where the optimizer runs on offloaded state follows from the schedule, and is said.
#[test]
fn updates_go_where_the_step_is_shorter() {
    let plan = |options: &str| {
        let line = format!(
            "plan --model smollm2-135m --gpu a100-80 --seq 512 --offload optimizer {options}"
        );
        plimsoll(&line).ok()
    };
    let json = |options: &str| plan(&format!("{options} --format json")).json();
    let fast = "--host-cores 96 --host-bandwidth 500";
    let slow = "--host-cores 2 --host-bandwidth 20";
    for (host, on) in [(fast, "cpu"), (slow, "gpu")] {
        let chosen = json(host);
        let seconds = |plan: &Value, name: &str| plan["updates"][name].as_f64().unwrap();
        let (cpu, gpu) =
            (seconds(&chosen, "cpu_step_seconds"), seconds(&chosen, "gpu_step_seconds"));
        assert_eq!(on == "cpu", cpu < gpu, "{chosen}");
        assert_eq!(chosen["updates"]["on"], on);
        assert_eq!(chosen["updates"]["host_source"], "as given");
        assert_eq!(chosen["recipe"]["update_on"], on);
        assert_eq!(chosen["step_seconds"].as_f64().unwrap(), cpu.min(gpu));
        // What was compared is what each is on its own.
        for (option, expected) in [("cpu", cpu), ("gpu", gpu)] {
            let one = json(&format!("{host} --update-on {option}"));
            assert_eq!(one["step_seconds"].as_f64().unwrap(), expected);
            assert_eq!(one["updates"]["on"], option);
        }
        let table = plan(host).stdout;
        let word = if on == "cpu" { "CPU" } else { "GPU" };
        assert!(table.contains(&format!("updates on the {word}: ")), "{table}");
    }
    let default = json("");
    assert!(default["updates"]["host_source"].as_str().unwrap().starts_with("default: a guess"));
    let none = plimsoll("plan --model smollm2-135m --gpu a100-80 --format json").ok().json();
    assert!(none.get("updates").is_none());
}

/// Every command whose result is for a program prints JSON and nothing else.
#[test]
fn json_is_alone_on_standard_output() {
    let dir = tempfile::tempdir().unwrap();
    let model = nano(dir.path());
    let data = conversations(dir.path(), 12);
    let (model, data, dir) = (model.display(), data.display(), dir.path().display());
    let run = |line: &str| plimsoll(line).ok().json();

    let inspected = run("inspect --model qwen2.5-0.5b --format json");
    assert_eq!(inspected["architecture"], "qwen2");
    let parameters = inspected["parameters"].as_u64().unwrap();
    assert_eq!(parameters, 494_032_768);
    assert_eq!(inspected["bytes"]["bf16"].as_u64().unwrap(), 2 * parameters);
    assert_eq!(inspected["hidden_size"], 896);

    let plan = run("plan --model llama-3-8b --gpu h200 --batch 4 --seq 2048 --format json");
    let bytes = |name: &str| plan[name].as_u64().unwrap_or_else(|| panic!("{name}: {plan}"));
    assert_eq!(bytes("parameters"), 8_030_261_248);
    assert_eq!(bytes("trainable_parameters"), bytes("parameters"));
    assert!(bytes("peak_bytes") >= bytes("lower_bound_bytes"));
    assert!(bytes("peak_bytes") as f64 <= bytes("lower_bound_bytes") as f64 * 1.02);
    let classes = plan["by_class"].as_object().unwrap();
    let alive: u64 = classes.values().map(|v| v.as_u64().unwrap()).sum();
    assert_eq!(alive, bytes("lower_bound_bytes"));
    for name in ["overhead_bytes", "host_bytes"] {
        bytes(name);
    }
    let total = bytes("peak_bytes") + bytes("overhead_bytes");
    assert_eq!(plan["fits"].as_bool(), Some(plan["free_bytes"].as_i64().unwrap() >= 0));
    assert_eq!(
        plan["free_bytes"].as_i64().unwrap(),
        plan["memory_bytes"].as_i64().unwrap() - total as i64
    );
    for name in ["step_seconds", "tokens_per_second", "flops_per_step"] {
        assert!(plan[name].as_f64().unwrap() > 0.0, "{name}");
    }
    for name in ["model", "peak_at", "bottleneck"] {
        assert!(!plan[name].as_str().unwrap().is_empty(), "{name}");
    }
    // Without a memory size there is nothing to fit in.
    assert_eq!(run("plan --model plimsoll-tiny --format json")["fits"], Value::Null);

    let out = format!("{dir}/out");
    let trained = run(&format!(
        "train --model {model} --data {data} --seq 32 --steps 2 --format json --out {out}"
    ));
    for name in ["loss", "steps", "tokens_per_second", "planned_bytes", "measured_bytes"] {
        assert!(trained[name].is_number(), "{name}: {trained}");
    }
    let evaluated = run(&format!("evaluate --model {out} --data {data} --seq 32 --format json"));
    let loss = evaluated["loss"].as_f64().unwrap();
    assert!((evaluated["perplexity"].as_f64().unwrap() - loss.exp()).abs() < 1e-9);
    let swept = run(&format!(
        "sweep --model {model} --data {data} --vary batch=1..2 --seq 32 --iterations 1 \
         --format json --out {dir}/sweep"
    ));
    assert_eq!(swept["points"].as_array().unwrap().len(), 2);
    assert!(swept["conclusions"].is_array());
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let dir = tempfile::tempdir().unwrap();
    let model = nano(dir.path());
    let model = model.display();
    for line in [
        "inspect --model llama-3-8b".to_owned(),
        "plan --model plimsoll-tiny --format json".to_owned(),
        format!("generate --model {model} --prompt a --ignore-eos --max-new-tokens 100"),
        format!("generate --model {model} --prompt a --format json"),
    ] {
        let mut child =
            command(&line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        finished(&line, child.wait_with_output().unwrap()).ok();
    }
}

#[test]
fn results_that_cannot_be_written_are_an_error() {
    let full = || std::fs::File::options().write(true).open("/dev/full");
    if full().is_err() {
        eprintln!("skipped: there is no /dev/full");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let model = nano(dir.path());
    let data = conversations(dir.path(), 12);
    let (model, data) = (model.display(), data.display());
    for line in [
        "inspect --model llama-3-8b".to_owned(),
        "plan --model plimsoll-tiny".to_owned(),
        format!("generate --model {model} --prompt a"),
        format!("evaluate --model {model} --data {data} --seq 32"),
    ] {
        let output = command(&line).stdout(full().unwrap()).output().unwrap();
        finished(&line, output).refused(&["standard output"]);
    }
    // A log that is lost is no reason to lose a training run.
    let out = dir.path().join("out");
    let line = format!(
        "train --model {model} --data {data} --seq 32 --steps 3 --format json --out {}",
        out.display()
    );
    let output = command(&line).stderr(full().unwrap()).output().unwrap();
    assert_eq!(finished(&line, output).ok().json()["steps"], 3);
}

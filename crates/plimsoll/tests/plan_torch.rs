//! `plimsoll plan --stack torch` and `--from`, as a user calls them.

use std::fs;
use std::process::{Command, Output};

use serde_json::Value;

fn plan(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    command.arg("plan").args(args).env("HF_HUB_OFFLINE", "1");
    command.output().expect("the program starts")
}

fn json(args: &[&str]) -> Value {
    let output = plan(&[args, &["--format", "json"]].concat());
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{error}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn refused(args: &[&str], status: i32, names: &str) {
    let output = plan(args);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(status), "{args:?}: {error}");
    assert!(error.contains(names), "{args:?}: {error}");
}

const LLAMA: [&str; 6] = ["--stack", "torch", "--model", "llama-3-8b", "--seq", "2048"];

#[test]
fn the_fields_of_a_plan() {
    let args = [&LLAMA[..], &["--bf16", "--batch", "4", "--liger", "--optim", "adamw_torch_fused"]];
    let plan = json(&args.concat());
    let peak = plan["peak_allocated_bytes"].as_u64().unwrap();
    // Measured: 86,263,156,736.
    assert!((peak as f64 / 86_263_156_736.0 - 1.0).abs() < 0.001, "{peak}");
    let [active, reserved, released, used] = [
        "peak_active_bytes",
        "peak_reserved_bytes",
        "reserved_after_release_bytes",
        "device_used_bytes",
    ]
    .map(|k| plan[k].as_u64().expect(k));
    assert!(peak <= active && active <= released && released <= reserved && reserved < used);
    let ops = plan["timeline"]["ops"].as_array().unwrap();
    let most = ops.iter().map(|o| o["bytes"].as_array().unwrap());
    let most = most.map(|b| b.iter().filter_map(Value::as_u64).sum::<u64>()).max().unwrap();
    assert!(most <= peak && most > peak / 100 * 98, "{most} of {peak}");
    assert_eq!(plan["trainable_parameters"], plan["parameters"]);
    assert!(plan.get("fits").is_none());
}

#[test]
fn what_does_not_fit_exits_with_3_and_says_what_to_change() {
    let args = [&LLAMA[..], &["--bf16", "--batch", "8", "--gpu", "a100-80"]].concat();
    refused(&args, 3, "runs out of memory at");
    let small = ["--bf16", "--gpu", "rtx-4090"];
    refused(&[&LLAMA[..], &small].concat(), 3, "--method qlora");
    refused(&[&LLAMA[..], &["--memory", "1GiB"]].concat(), 3, "nothing fits");
    let lora = ["--method", "lora", "--batch", "64", "--gpu", "h100", "--bf16"];
    refused(&[&LLAMA[..], &lora].concat(), 3, "--gradient-checkpointing --liger fits batch");
}

#[test]
fn impossible_combinations_are_named() {
    let with = |more: &[&'static str]| [&LLAMA[..], more].concat();
    refused(&["--model", "llama-3-8b", "--bf16"], 2, "--stack torch");
    refused(&with(&["--bf16", "--fp16"]), 2, "--fp16");
    refused(&with(&["--optim", "lion"]), 2, "adamw_torch_fused");
    refused(&with(&["--zero", "4"]), 2, "4");
    refused(&with(&["--zero", "2", "--fsdp"]), 2, "--fsdp");
    refused(&with(&["--offload", "optimizer"]), 2, "--zero");
    refused(&with(&["--prepare-kbit"]), 2, "qlora");
    refused(&with(&["--quant", "nf4"]), 2, "qlora");
    refused(&with(&["--transformers", "new"]), 2, "version");
    refused(&with(&["--max-split-size-mb", "8"]), 2, "20");
    refused(&with(&["--batch", "0"]), 2, "--batch");
    refused(&with(&["--recompute", "mlp"]), 2, "--gradient-checkpointing");
    refused(&with(&["--loss-rows", "128"]), 2, "--loss-rows");
}

#[test]
fn configurations_are_read_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let axolotl = write(
        "axolotl.yml",
        "base_model: meta-llama/Meta-Llama-3-8B\nload_in_4bit: true\nadapter: qlora\n\
         sequence_len: 2048\nmicro_batch_size: 2\nlora_r: 16\nlora_target_linear: true\n\
         optimizer: paged_adamw_8bit\nbf16: auto\ngradient_checkpointing: true\n\
         flash_attention: true\ndatasets:\n  - path: a/b\n    type: alpaca\nfrobnicate: 3\n",
    );
    let plan = json(&["--from", &axolotl, "--model", "llama-3-8b"]);
    assert_eq!(plan["unknown_keys"], serde_json::json!(["frobnicate"]));
    assert_eq!(plan["recipe"]["batch"], 2);
    assert_eq!(plan["recipe"]["quant"]["prepare"], true);
    assert_eq!(plan["recipe"]["optim"], "paged_adam_w8bit");
    assert!(plan["trainable_parameters"].as_u64() == Some(41_943_040));

    let factory = write(
        "factory.yaml",
        "model_name_or_path: meta-llama/Meta-Llama-3-8B\nstage: sft\ndo_train: true\n\
         finetuning_type: lora\nlora_target: all\nlora_rank: 8\ncutoff_len: 1024\n\
         per_device_train_batch_size: 1\nbf16: true\n",
    );
    let plan = json(&["--from", &factory, "--model", "llama-3-8b"]);
    assert_eq!(plan["recipe"]["seq"], 1024);
    assert_eq!(plan["unknown_keys"], serde_json::json!([]));

    let deepspeed = write(
        "ds.json",
        r#"{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "fp16": {"enabled": true}, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
            "train_micro_batch_size_per_gpu": "auto", "novelty": 1}"#,
    );
    let args = ["--from", &deepspeed, "--model", "llama-3-8b", "--gpus", "8", "--batch", "3"];
    let plan = json(&[&args[..], &["--seq", "2048", "--gradient-checkpointing"]].concat());
    assert_eq!(plan["recipe"]["zero"]["offload_optimizer"], true);
    assert_eq!(plan["recipe"]["batch"], 3);
    assert_eq!(plan["unknown_keys"], serde_json::json!(["novelty"]));
    assert!(plan["host_bytes"].as_u64().unwrap() > 0);

    let arguments = write(
        "args.json",
        r#"{"output_dir": "out", "per_device_train_batch_size": 4, "bf16": true,
            "gradient_checkpointing": true, "optim": "adamw_torch", "deepspeed": "ds.json",
            "learning_rate": 1e-5}"#,
    );
    let plan = json(&["--from", &arguments, "--model", "qwen1.5-0.5b", "--seq", "512"]);
    assert_eq!(plan["recipe"]["zero"]["stage"], 2);
    assert_eq!(plan["unknown_keys"], serde_json::json!(["ds.json: novelty"]));

    let bad = write("bad.yaml", "base_model: x\n  - y\n");
    refused(&["--from", &bad], 2, "line 2");
    let other = write("other.json", r#"{"a": 1}"#);
    refused(&["--from", &other, "--model", "llama-3-8b"], 2, "no configuration");
    let odd = write("odd.yaml", "base_model: x\nmicro_batch_size: many\n");
    refused(&["--from", &odd], 2, "micro_batch_size");
    refused(&["--from", "/nowhere.yaml"], 2, "/nowhere.yaml");
    refused(&["--from", &arguments], 2, "--model");
    let both = write("both.json", r#"{"output_dir": "o", "bf16": true, "fp16": true}"#);
    refused(&["--from", &both, "--model", "llama-3-8b"], 2, "exclude");
}

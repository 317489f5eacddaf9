//! Options that would change nothing are refused, with or without `=`; what they are
//! defaults for, and limits that are kept, are not.

mod common;

use common::*;

/// Refused with the option, and with all of `words`.
fn refused(line: &str, option: &str, words: &[&str]) {
    plimsoll(line).refused(&[option]).refused(words);
}

const PLAN: &str = "plan --model plimsoll-tiny --seq 64";

#[test]
fn options_about_the_host_need_something_there() {
    let gpu = format!("{PLAN} --gpu h200");
    for option in ["--update-on auto", "--update-on=gpu", "--update-on cpu", "--host-cores 4"] {
        let name = option.split(['=', ' ']).next().unwrap();
        for offload in ["none", "activations"] {
            let line = format!("{gpu} {option} --offload {offload}");
            refused(&line, name, &["--offload optimizer", "drop", &format!("--offload {offload}")]);
        }
        plimsoll(&format!("{gpu} {option} --offload optimizer")).ok();
    }
    for search in ["", "--search"] {
        let line = format!("{gpu} {search} --method lora --update-on gpu");
        refused(&line, "--update-on", &["adapters", "drop it"]);
    }
    refused(&format!("{gpu} --host-bandwidth=50"), "--host-bandwidth", &["activations", "drop"]);
    plimsoll(&format!("{gpu} --host-bandwidth 50 --offload activations")).ok();
    // The CPU is no host of itself; where updates run is the program's, also there.
    for option in ["--host-cores 4", "--host-bandwidth=50"] {
        let line = format!("{PLAN} --offload optimizer {option}");
        refused(&line, option.split(['=', ' ']).next().unwrap(), &["CPU is the device", "drop"]);
    }
    plimsoll(&format!("{PLAN} --offload optimizer --update-on cpu")).ok();
    // A limit is kept by what takes nothing.
    plimsoll(&format!("{gpu} --host-memory 1MiB")).ok();
}

#[test]
fn host_memory_is_a_limit_on_the_cpu_too() {
    let dir = tempfile::tempdir().unwrap();
    let options = "--model plimsoll-tiny --seq 64 --offload optimizer --host-memory";
    let words = ["of host memory of 8.0 MiB (--host-memory", "offload=none fits batch 1"];
    for command in ["plan", "plan --device cpu"] {
        plimsoll(&format!("{command} {options} 8MiB")).fails(3, &words);
        plimsoll(&format!("{command} {options} 64MiB")).ok();
    }
    let out = dir.path().join("out");
    let train = format!("train --device cpu --steps 1 --out {}", out.display());
    plimsoll(&format!("{train} {options} 8MiB")).fails(3, &words);
    assert!(!out.exists());
    let point = "point --device cpu --iterations 1 --warmup 0";
    plimsoll(&format!("{point} {options} 8MiB")).fails(3, &["of page-locked host memory"]);
}

#[test]
fn options_between_ranks_need_gpus_and_several_of_them() {
    let gpu = format!("{PLAN} --gpu h200");
    for name in ["nccl", "copies"] {
        let option = format!("--collectives {name}");
        refused(&format!("{gpu} {option}"), &option, &["there is one", "--gpus 2", "drop it"]);
        refused(&format!("{gpu} --search {option}"), &option, &["there is one"]);
        refused(&format!("{PLAN} --gpus 2 {option}"), &option, &["about GPUs", "drop it"]);
        plimsoll(&format!("{gpu} --gpus 2 {option}")).ok();
    }
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let out = out.display();
    for command in [
        format!("train --device cpu --model plimsoll-tiny --seq 32 --out {out}"),
        format!("sweep --device cpu --seq 32 --out {out}"),
        "bench --device cpu --seq 32".to_owned(),
        "point --device cpu --seq 32".to_owned(),
    ] {
        refused(&format!("{command} --collectives=nccl"), "--collectives nccl", &["there is one"]);
        refused(&format!("{command} --update-on=auto"), "--update-on", &["--offload none"]);
    }
    // Its default may be written anywhere.
    for line in [PLAN, &gpu, &format!("{PLAN} --gpus 2"), &format!("{PLAN} --method infer")] {
        plimsoll(&format!("{line} --collectives auto --zero 0 --offload none")).ok();
    }
}

#[test]
fn inference_and_the_pytorch_stack_have_neither() {
    let options = [
        "--update-on cpu",
        "--host-cores 4",
        "--host-bandwidth 50",
        "--host-memory=4GiB",
        "--collectives nccl",
    ];
    for option in options {
        let name = option.split(['=', ' ']).next().unwrap();
        for command in [
            format!("{PLAN} --method infer"),
            format!("{PLAN} --gpu h200 --method infer"),
            "bench --device cpu --seq 96 --method infer".to_owned(),
        ] {
            refused(&format!("{command} {option}"), name, &["--method infer", "drop it"]);
        }
        refused(&format!("{PLAN} --stack torch {option}"), name, &["--stack torch", "drop it"]);
    }
    for option in ["--search", "--nodes 2", "--link 50", "--reduce-dtype f32"] {
        let name = option.split(' ').next().unwrap();
        refused(&format!("{PLAN} --stack torch {option}"), name, &["--stack torch"]);
    }
    plimsoll(&format!("{PLAN} --stack torch --collectives auto")).ok();
}

/// What belongs to our own recipes has no effect on somebody else's trainer.
#[test]
fn a_trainer_has_its_own_options() {
    let dir = tempfile::tempdir().unwrap();
    let sweep = |options: &str| {
        let out = dir.path().join("out");
        plimsoll(&format!("sweep --out {} {options}", out.display()))
    };
    for option in ["--host-memory 4GiB", "--recompute block", "--update-on=cpu", "--gpus 2"] {
        let name = option.split(['=', ' ']).next().unwrap();
        sweep(&format!("{option} -- echo {{batch}}")).refused(&[name, "COMMAND"]);
    }
    for option in ["--iterations 3", "--batch=3"] {
        let name = option.split(['=', ' ']).next().unwrap();
        let words = [name, "the command has no {"];
        sweep(&format!("{option} --vary seq=1..1 -- echo {{seq}}")).refused(&words);
    }
    let own = "-- echo {batch} {iterations} --recompute --update-on cpu";
    sweep(&format!("--vary batch=1,2 --iterations 3 --seq 8 {own}")).ok();
}

#[test]
fn counts_that_are_nothing_are_refused() {
    for command in ["bench", "point", "sweep", "bench --method infer"] {
        for count in ["0", "-1", "1.5", "99999999999999999999", "18446744073709551615"] {
            refused(&format!("{command} --iterations={count}"), "--iterations", &["1 to"]);
        }
        refused(&format!("{command} --warmup=18446744073709551615"), "--warmup", &["0 to"]);
    }
    refused(&format!("{PLAN} --gpu 4090 --search --limit 0"), "--limit", &["1 to"]);
    let ran = plimsoll("point --device cpu --seq 32 --iterations 1 --warmup 0").ok();
    assert!(ran.json()["seconds_per_iteration"].as_f64().unwrap() > 0.0);
}

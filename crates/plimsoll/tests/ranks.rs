//! Several ranks from the command line: threads of one process, processes that a
//! launcher has started, and what happens when one of them dies.

mod common;

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Ran, command, finished, nano, plimsoll};
use serde_json::Value;
use tempfile::TempDir;

/// Sixteen rows a step, on however many ranks.
fn line(model: &Path, out: &Path, more: &str) -> String {
    format!(
        "train --device cpu --model {} --seq 32 --batch 2 --lr 1e-3 --warmup 0 --schedule constant \
         --format json --out {} {more}",
        model.display(),
        out.display()
    )
}

fn losses(out: &Path) -> Vec<f64> {
    let text = fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let rows = text.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
    rows.filter_map(|row| row["loss"].as_f64()).collect()
}

fn close(a: &[f64], b: &[f64]) {
    assert_eq!(a.len(), b.len(), "{a:?} {b:?}");
    for (a, b) in a.iter().zip(b) {
        assert!((a - b).abs() / b < 1e-5, "{a} {b}");
    }
}

/// One process of a run, as torchrun starts it.
fn torchrun(line: &str, rank: usize, ranks: usize, port: u16) -> Command {
    let mut command = command(line);
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string());
    command.env("LOCAL_RANK", rank.to_string()).env("LOCAL_WORLD_SIZE", ranks.to_string());
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn wait(line: &str, children: Vec<Child>) -> Vec<Ran> {
    children.into_iter().map(|c| finished(line, c.wait_with_output().unwrap())).collect()
}

#[test]
fn threads_and_processes_train_as_one_rank_does() {
    let folder = TempDir::new().unwrap();
    let model = nano(folder.path());
    let one = folder.path().join("one");
    plimsoll(&line(&model, &one, "--accumulate 4 --steps 4")).ok();
    let expected = losses(&one);
    for zero in 0..4 {
        let out = folder.path().join(format!("threads{zero}"));
        let more = format!("--gpus 4 --zero {zero} --steps 4");
        let ran = plimsoll(&line(&model, &out, &more)).ok();
        assert_eq!(ran.json()["steps"], 4);
        close(&losses(&out), &expected);
    }
    let out = folder.path().join("processes");
    let text = line(&model, &out, "--zero 3 --accumulate 2 --steps 4");
    let port = free_port();
    let children = (0..2).map(|rank| torchrun(&text, rank, 2, port).spawn().unwrap()).collect();
    let ran = wait(&text, children);
    ran.iter().for_each(|r| assert_eq!(r.status, Some(0), "{r:#?}"));
    assert_eq!(ran[0].json()["steps"], 4);
    assert_eq!(ran[1].stdout, "", "rank 0 speaks for all");
    close(&losses(&out), &expected);
    // All have written parts of one model, which any tool reads.
    let weights = |out: &Path| fs::read(out.join("model.safetensors")).unwrap().len();
    assert_eq!(weights(&out), weights(&one));
    plimsoll(&format!("inspect --model {}", out.display())).ok();
}

#[test]
fn two_nodes_of_slurm_train_as_one_rank_does() {
    let folder = TempDir::new().unwrap();
    let model = nano(folder.path());
    let one = folder.path().join("one");
    plimsoll(&line(&model, &one, "--accumulate 4 --steps 3")).ok();
    let out = folder.path().join("nodes");
    let text = line(&model, &out, "--zero 2 --steps 3");
    let port = free_port().to_string();
    // As srun sets them for four tasks on two nodes; both are this machine, whose
    // address is given because their names mean nothing here.
    let children = (0..4).map(|task| {
        let mut command = command(&text);
        command.env("SLURM_JOB_ID", "77").env("SLURM_STEP_ID", "0");
        command.env("SLURM_STEP_NUM_TASKS", "4").env("SLURM_PROCID", task.to_string());
        command.env("SLURM_LOCALID", (task % 2).to_string());
        command.env("SLURM_STEP_NODELIST", "n[1-2]").env("SLURM_NODEID", (task / 2).to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    });
    let ran = wait(&text, children.collect());
    ran.iter().for_each(|r| assert_eq!(r.status, Some(0), "{r:#?}"));
    close(&losses(&out), &losses(&one));
}

#[test]
fn a_killed_rank_ends_the_others_and_resume_goes_on() {
    let folder = TempDir::new().unwrap();
    let model = nano(folder.path());
    let straight = folder.path().join("straight");
    plimsoll(&line(&model, &straight, "--accumulate 4 --steps 300 --save-every 400")).ok();

    let out = folder.path().join("killed");
    let text = line(&model, &out, "--zero 3 --accumulate 2 --steps 300 --save-every 5");
    let port = free_port();
    let mut children: Vec<Child> =
        (0..2).map(|rank| torchrun(&text, rank, 2, port).spawn().unwrap()).collect();
    let deadline = Instant::now() + Duration::from_secs(120);
    while !out.join("checkpoint-00000005").exists() && !out.join("checkpoint-00000010").exists() {
        assert!(Instant::now() < deadline, "no checkpoint was written");
        std::thread::sleep(Duration::from_millis(5));
    }
    children[1].kill().unwrap();
    let killed = Instant::now();
    let ran = wait(&text, children);
    assert!(killed.elapsed() < Duration::from_secs(30), "{:?}", killed.elapsed());
    ran.into_iter().next().unwrap().fails(1, &["rank 1 is gone", "--resume"]);

    // On another number of ranks, from threads now.
    let more = "--gpus 4 --zero 1 --steps 300 --save-every 100 --resume";
    let ran = plimsoll(&line(&model, &out, more)).ok();
    assert!(ran.stderr.contains("resuming from"), "{ran:#?}");
    let (found, expected) = (losses(&out), losses(&straight));
    assert_eq!(found.len(), 300);
    // Rounding grows over so many steps.
    let last = (found[299] - expected[299]).abs() / expected[299];
    assert!(last < 1e-3, "{} {}", found[299], expected[299]);
    close(&found[..20], &expected[..20]);
}

#[test]
fn what_does_not_go_together_is_refused() {
    let folder = TempDir::new().unwrap();
    let model = nano(folder.path());
    let out = folder.path().join("out");
    plimsoll(&line(&model, &out, "--gpus 2 --zero 4")).refused(&["0 to 3", "4"]);
    plimsoll(&line(&model, &out, "--gpus 0")).refused(&["gpus", "0"]);
    let fused = "--gpus 2 --optimizer-in-backward --max-grad-norm 0 --accumulate 2";
    plimsoll(&line(&model, &out, fused)).refused(&["gradient accumulation"]);
    let mut command = torchrun(&line(&model, &out, "--gpus 3"), 0, 2, free_port());
    finished("torchrun", command.output().unwrap()).refused(&["--gpus 3", "2 ranks"]);
    let mut command = torchrun(&line(&model, &out, ""), 5, 2, free_port());
    finished("torchrun", command.output().unwrap()).refused(&["RANK=5"]);
}

#[test]
fn ranks_with_other_settings_are_refused() {
    let folder = TempDir::new().unwrap();
    let model = nano(folder.path());
    for (other, words) in [
        ("--steps 3 --seed 7", "seed"),
        ("--steps 3 --zero 1", "zero"),
        ("--steps 4", "steps"),
        ("--steps 3 --method lora", "lora"),
    ] {
        let out = folder.path().join("out");
        let texts = [line(&model, &out, "--steps 3"), line(&model, &out, other)];
        let port = free_port();
        let start = |rank: usize| torchrun(&texts[rank], rank, 2, port).spawn().unwrap();
        let ran = wait(&texts[1], vec![start(0), start(1)]);
        assert_eq!(ran[1].status, Some(2), "{:#?}", ran[1]);
        assert!(ran[1].stderr.contains("rank 0 has"), "{:#?}", ran[1]);
        assert!(ran[1].stderr.contains(words), "{:#?}", ran[1]);
        assert_ne!(ran[0].status, Some(0), "{:#?}", ran[0]);
        assert!(ran[0].stderr.contains("rank 1 has"), "{:#?}", ran[0]);
        let _ = fs::remove_dir_all(&out);
    }
}

#[test]
fn a_plan_says_what_goes_between_ranks() {
    let plan = |more: &str| {
        plimsoll(&format!("plan --model llama-3-8b --gpu h200 --batch 4 --format json {more}"))
            .ok()
            .json()
    };
    let number = |v: &Value| v.as_f64().unwrap();
    let one = plan("");
    assert!(one["communication"].is_null());
    let mut last = f64::INFINITY;
    for zero in [1, 3] {
        let two = plan(&format!("--gpus 2 --zero {zero}"));
        let c = &two["communication"];
        assert_eq!((c["ranks"].as_u64(), c["zero"].as_u64()), (Some(2), Some(zero)));
        assert!(number(&two["peak_bytes"]) < last.min(number(&one["peak_bytes"])));
        last = number(&two["peak_bytes"]);
        // Nearly all of it beside the arithmetic.
        assert!(number(&c["exposed_seconds"]) < 0.02 * number(&two["step_seconds"]), "{c}");
        assert!(number(&two["tokens_per_second"]) > 1.9 * number(&one["tokens_per_second"]));
    }
    let slow = plan("--gpus 8 --nodes 4 --link 1 --zero 3");
    assert_eq!(slow["communication"]["ranks"], 32);
    assert_eq!(slow["bottleneck"], "communication");
    let fast = plan("--gpus 8 --nodes 4 --link 400 --zero 3");
    assert!(number(&fast["step_seconds"]) < number(&slow["step_seconds"]));
    let table = "plan --model llama-3-8b --gpu h200 --gpus 2 --zero 3 --batch 1";
    for (more, line) in
        [("", "copies between GPUs"), (" --collectives nccl", "NCCL, outside the slab")]
    {
        let ran = plimsoll(&format!("{table}{more}")).ok();
        assert!(ran.stdout.contains(line), "{}", ran.stdout);
    }
    let transport = |more: &str| plan(more)["communication"]["transport"].clone();
    assert_eq!(transport("--gpus 2"), "copies");
    assert_eq!(transport("--gpus 2 --collectives nccl"), "nccl");
    assert_eq!(transport("--gpus 8 --nodes 2"), "nccl");
    let bytes = |more: &str| plan(more)["overhead_bytes"].as_u64().unwrap();
    assert!(bytes("--gpus 2") < bytes("--gpus 2 --collectives nccl"));
    plimsoll("plan --model llama-3-8b --gpu h200 --gpus 8 --nodes 2 --collectives copies")
        .refused(&["--collectives copies", "2 machines"]);
}

#[test]
fn a_sweep_measures_every_rank() {
    let folder = TempDir::new().unwrap();
    let model = nano(folder.path());
    let out = folder.path().join("sweep");
    let text = format!(
        "sweep --device cpu --model {} --gpus 2 --zero 3 --seq 32 --vary batch=1,2 --iterations 2 \
         --warmup 1 --out {} --format json",
        model.display(),
        out.display()
    );
    let ran = plimsoll(&text).ok().json();
    for point in ran["points"].as_array().unwrap() {
        assert_eq!(point["status"], "ok", "{point}");
        assert_eq!(point["rank_measured_bytes"].as_array().unwrap().len(), 2, "{point}");
    }
}

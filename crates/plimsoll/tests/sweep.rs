//! `sweep` and `report`: planned beside measured, point by point, whatever
//! interrupts it.

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use common::process::*;
use common::*;
use serde_json::{Value, json};

fn points(out: &Path) -> Vec<Value> {
    lines(&out.join("points.jsonl"))
}

/// A process that has this word in its command line.
fn process_with(word: &str) -> Option<String> {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|p| std::fs::read_to_string(p.path().join("cmdline")).ok())
        .find(|line| line.contains(word))
}

/// A page that needs nothing else: no address but the name space of SVG.
fn self_contained(path: &Path) {
    let page = std::fs::read_to_string(path).unwrap();
    assert!(page.contains("<svg") && page.len() > 2000);
    let bare = page.replace("http://www.w3.org/2000/svg", "");
    for word in ["http://", "https://", "src=", "<link", "@import", "url("] {
        assert!(!bare.contains(word), "{word} in {}", path.display());
    }
}

#[test]
fn points_have_the_promised_fields_and_the_page_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let line = format!(
        "sweep --vary batch=1..3 --seq 64 --iterations 2 --warmup 1 --out {}",
        out.display()
    );
    let ran = plimsoll(&line).ok();
    let all = points(&out);
    assert_eq!(all.len(), 3);
    for (i, point) in all.iter().enumerate() {
        assert_eq!(point["point"], json!({"batch": i + 1}));
        assert_eq!(point["status"], "ok");
        let bytes = |name: &str| point[name].as_u64().unwrap_or_else(|| panic!("{name}: {point}"));
        let (planned, measured) = (bytes("planned_bytes"), bytes("measured_bytes"));
        assert!(planned >= 64 << 20);
        let difference = measured as f64 / planned as f64 - 1.0;
        assert!(difference.abs() < 0.02, "{difference}: {point}");
        assert!(bytes("peak_allocated_bytes") <= bytes("peak_reserved_bytes"));
        let rate = |name: &str| point[name].as_f64().unwrap();
        assert!((rate("iterations_per_second") * rate("seconds_per_iteration") - 1.0).abs() < 1e-6);
        let tokens = rate("tokens_per_second") * rate("seconds_per_iteration");
        assert!((tokens - (i + 1) as f64 * 64.0).abs() < 1e-6);
        // The plan of the point is the plan of the command `plan`.
        let plan = format!("plan --model plimsoll-tiny --seq 64 --batch {} --format json", i + 1);
        assert_eq!(plimsoll(&plan).ok().json()["peak_bytes"], point["planned_bytes"]);
    }
    for word in ["planned", "measured", "batch=3", "ok", "report.html"] {
        assert!(ran.stdout.contains(word), "{word}: {ran:#?}");
    }
    self_contained(&out.join("report.html"));

    // The same command finds everything done.
    let again = plimsoll(&format!("{line} --format json")).ok().json();
    assert_eq!(again["points"].as_array().unwrap().len(), 3);
    assert_eq!(points(&out), all);
    // A further end continues; another recipe is refused by name.
    plimsoll(&line.replace("1..3", "1..4")).ok();
    assert_eq!(points(&out)[..3], all[..]);
    assert_eq!(points(&out).len(), 4);
    plimsoll(&line.replace("--seq 64", "--seq 32")).refused(&["another recipe", "seq"]);
    plimsoll(&line.replace("batch=1..3", "seq=32..64:32")).refused(&["another recipe"]);

    let page = dir.path().join("page.html");
    plimsoll(&format!("report {} --out {}", out.display(), page.display())).ok();
    self_contained(&page);
    plimsoll(&format!("report {} --out {}", dir.path().display(), page.display()))
        .refused(&["points.jsonl"]);
    plimsoll(&format!("report {} --out /proc/no/page.html", out.display())).refused(&["/proc/no"]);
}

#[test]
fn a_sweep_stops_at_the_memory_limit() {
    let dir = tempfile::tempdir().unwrap();
    let model = nano(dir.path());
    let data = conversations(dir.path(), 20);
    let out = dir.path().join("out");
    let line = format!(
        "sweep --model {} --data {} --vary batch=1..:40 --seq 64 --iterations 1 --warmup 0 \
         --memory-limit 64MiB --out {}",
        model.display(),
        data.display(),
        out.display()
    );
    plimsoll(&line).ok();
    let all = points(&out);
    let (last, before) = all.split_last().unwrap();
    assert!(!before.is_empty() && before.iter().all(|p| p["status"] == "ok"), "{all:?}");
    assert_eq!(last["status"], "refused");
    assert!(last["planned_bytes"].as_u64().unwrap() > 0, "{last}");
    assert!(last["message"].as_str().unwrap().contains("64.0 MiB"), "{last}");
    assert_eq!(last["measured_bytes"], Value::Null);
    // The end stays the end.
    plimsoll(&line).ok();
    assert_eq!(points(&out), all);

    // A grid: each sequence length has an end of its own.
    let grid = dir.path().join("grid");
    let line = line.replace(&out.display().to_string(), &grid.display().to_string());
    let line = line.replace("--vary batch=1..:40", "--vary seq=32,64 --vary batch=1..:60");
    plimsoll(&line.replace("--seq 64", "")).ok();
    let refused: Vec<Value> =
        points(&grid).into_iter().filter(|p| p["status"] == "refused").collect();
    assert_eq!(refused.len(), 2, "{refused:?}");
    let largest = |seq: u64| {
        let ran = points(&grid).into_iter().filter(|p| p["status"] == "ok");
        let batches = ran.filter(|p| p["point"]["seq"] == seq);
        batches.filter_map(|p| p["point"]["batch"].as_u64()).max().unwrap()
    };
    assert!(largest(32) > largest(64));
}

#[test]
fn an_interrupted_sweep_goes_on_where_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let model = nano(dir.path());
    let data = conversations(dir.path(), 20);
    for sent in [SIGINT, SIGKILL] {
        let out = dir.path().join(format!("out{sent}"));
        let line = |vary: &str| {
            format!(
                "sweep --model {} --data {} --vary {vary} --seq 32 --iterations 3 --out {}",
                model.display(),
                data.display(),
                out.display()
            )
        };
        let mut child = start(&line("batch=1.."));
        wait_for_lines(&mut child, &out.join("points.jsonl"), 2);
        signal(&child, sent);
        let ended = finished("sweep", end(child));
        // Nothing of it goes on in the background.
        let started = Instant::now();
        while let Some(process) = process_with(&data.to_string_lossy()) {
            assert!(started.elapsed() < Duration::from_secs(60), "{process} goes on");
            std::thread::sleep(Duration::from_millis(20));
        }
        if sent == SIGINT {
            ended.fails(1, &["interrupted", "continues"]);
        }
        let done = points(&out);
        assert!(done.len() >= 2 && done.iter().all(|p| p["status"] == "ok"), "{done:?}");
        let more = done.len() + 2;
        plimsoll(&line(&format!("batch=1..{more}"))).ok();
        let all = points(&out);
        assert_eq!(all[..done.len()], done[..], "what was finished is not run again");
        let batches: Vec<u64> = all.iter().map(|p| p["point"]["batch"].as_u64().unwrap()).collect();
        assert_eq!(batches, (1..=more as u64).collect::<Vec<_>>());
        self_contained(&out.join("report.html"));
    }
}

/// A crash in the middle of a line.
#[test]
fn a_torn_line_is_set_aside() {
    let dir = tempfile::tempdir().unwrap();
    let model = nano(dir.path());
    let data = conversations(dir.path(), 20);
    let out = dir.path().join("out");
    let line = format!(
        "sweep --model {} --data {} --vary batch=1..2 --seq 32 --iterations 1 --out {}",
        model.display(),
        data.display(),
        out.display()
    );
    plimsoll(&line).ok();
    let path = out.join("points.jsonl");
    let text = std::fs::read(&path).unwrap();
    std::fs::write(&path, &text[..text.len() - 40]).unwrap();
    let ran = plimsoll(&line).ok();
    assert!(ran.stderr.contains("line 2"), "{ran:#?}");
    assert_eq!(points(&out).len(), 2);
    assert!(out.join("points.jsonl.torn").exists());
    // A damaged line before the last is not guessed at.
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replacen("{\"point\"", "{point", 1)).unwrap();
    plimsoll(&line).refused(&["points.jsonl", "line 1"]);
}

#[test]
fn options_reach_the_points_and_points_that_fail_say_why() {
    let dir = tempfile::tempdir().unwrap();
    let model = nano(dir.path());
    let data = conversations(dir.path(), 20);
    let base = format!("sweep --model {} --data {}", model.display(), data.display());
    let out = dir.path().join("out");
    let line = format!(
        "{base} --vary=seq=16,32 --batch=2 --accumulate 2 --precision=bf16 --format=json \
         --recompute block --iterations=1 --warmup=0 --out={}",
        out.display()
    );
    let result = plimsoll(&line).ok().json();
    let all = result["points"].as_array().unwrap();
    assert_eq!(all.len(), 2);
    for point in all {
        let seq = point["point"]["seq"].as_u64().unwrap();
        let plan = format!(
            "plan --model {} --batch 2 --accumulate 2 --precision bf16 --recompute block \
             --seq {seq} --format json",
            model.display()
        );
        assert_eq!(plimsoll(&plan).ok().json()["peak_bytes"], point["planned_bytes"]);
    }
    // Longer than the model was made for: the first points run, then a failure.
    let out = dir.path().join("long");
    let line = format!("{base} --vary seq=64..256:64 --iterations 1 --out {}", out.display());
    plimsoll(&line).ok();
    let statuses: Vec<Value> = points(&out).into_iter().map(|p| p["status"].clone()).collect();
    assert_eq!(statuses, ["ok", "ok", "failed", "failed"]);
    assert!(points(&out)[2]["message"].as_str().unwrap().contains("192"));
    // The first point decides whether there is a sweep at all.
    let out = dir.path().join("none");
    let line = format!("{base} --vary seq=256..512:256 --iterations 1 --out {}", out.display());
    plimsoll(&line).refused(&["256", "128"]);
    assert_eq!(points(&out).len(), 0);
}

//! `report`: other people's CSV, whole runs, timelines, and what cannot be read.

mod common;

use std::path::Path;

use common::*;

fn write(dir: &Path, name: &str, text: &str) -> String {
    let path = dir.join(name);
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}

/// A page that needs nothing else: no address but the name space of SVG.
fn self_contained(path: &Path) -> String {
    let page = std::fs::read_to_string(path).unwrap();
    let bare = page.replace("http://www.w3.org/2000/svg", "");
    for word in ["http://", "https://", "src=", "<link", "@import", "url("] {
        assert!(!bare.contains(word), "{word} in {}", path.display());
    }
    page
}

/// Sweeps that others published, as they are.
#[test]
fn the_seed_sweeps() {
    let Some(seed) = shared("measured/seed") else { return };
    let dir = tempfile::tempdir().unwrap();
    let page = dir.path().join("page.html");
    let ran = plimsoll(&format!(
        "report {} --samples 19692 --price 14.32 --out {}",
        seed.display(),
        page.display()
    ))
    .ok();
    for said in [
        "zero3: The largest batch that ran is 2 per GPU (16 overall)",
        "zero3: 19,692 samples take 28.8 minutes at best, at batch 2 per GPU (16 overall), 6.87 USD",
        "zero2 offload: The largest batch that ran is 17 per GPU (136 overall)",
        "zero2 offload: 19,692 samples take 38.5 minutes at best, at batch 16 per GPU (128 overall)",
        "with a kink at 17: 17.79 s where the line says 15.64 s (+13.8 %)",
        "zero3 liger: The largest batch that ran is 3 per GPU",
        "zero2 offload liger: The largest batch that ran is 41 per GPU",
        "Offload (zero2 offload): the largest batch is 17 instead of 2, but it never overtakes",
        "Offload (zero2 offload liger): the largest batch is 41 instead of 3, but it never overtakes",
        "qwen0.5b: zero3: 19,692 samples take 69.3 minutes at best, at batch 2, 2.07 USD",
        "qwen0.5b: Offload (zero2 offload): the largest batch is 5 instead of 2, but it never",
    ] {
        assert!(ran.stdout.contains(said), "{said}\n---\n{}", ran.stdout);
    }
    let html = self_contained(&page);
    assert!(html.contains("kink at 17") && html.contains("best: zero3 liger, batch 2 per GPU"));
    let written = names(dir.path());
    for chart in ["memory", "seconds", "samples", "cost", "tokens"] {
        for kind in ["svg", "png"] {
            let name = format!("page-llama8b-x8-batch-{chart}.{kind}");
            assert!(written.contains(&name), "{name}: {written:?}");
        }
    }
    let picture = std::fs::read(dir.path().join("page-llama8b-x8-batch-memory.png")).unwrap();
    assert!(picture.starts_with(b"\x89PNG") && picture.len() > 30_000);
    let table = std::fs::read_to_string(dir.path().join("page.md")).unwrap();
    assert!(table.contains("## llama8b x8, zero2 offload\n"));
    assert!(table.contains("reserved, ranks min / mean / max (GiB)"));
}

#[test]
fn what_cannot_be_read_is_named_and_the_rest_is_drawn() {
    let dir = tempfile::tempdir().unwrap();
    let page = dir.path().join("page.html");
    let report = |inputs: &[&str]| {
        let _ = std::fs::remove_file(&page);
        plimsoll(&format!("report {} --out {}", inputs.join(" "), page.display()))
    };
    let good = write(dir.path(), "a_batch_b.csv", "1, 100, 150, 4\n2, 200, 260, 2\n3, OOM\n");
    report(&[&good]).ok();

    let missing = write(dir.path(), "missing.csv", "batch,color\n1,red\n");
    report(&[&missing]).refused(&["missing", "a figure", "batch, color"]);
    assert!(!page.exists());
    let axis = write(dir.path(), "axis.csv", "status,measured_gib\nok,1\n");
    report(&[&axis]).refused(&["axis", "a varied number"]);
    let empty = write(dir.path(), "empty.csv", "");
    report(&[&empty]).refused(&["empty", "no row"]);
    report(&["/no/such/file.csv"]).refused(&["/no/such/file.csv"]);

    // One that is good beside one that is not.
    report(&[&good, &missing]).refused(&["missing", "left out of"]);
    assert!(self_contained(&page).contains("missing has no column for a figure"));

    let bad = "1, 100, 150, 4\n2, -200, 260, 2\n3, NaN, 300, 1\n4, 400\n-5, 1, 1, 1\n";
    let bad = write(dir.path(), "bad_batch_x.csv", bad);
    report(&[&bad]).refused(&["line 2", "`-200`", "line 3", "`NaN`", "line 4", "`-5`"]);
    assert!(self_contained(&page).contains("The largest batch that ran is 3"));

    let only = write(dir.path(), "only_batch_oom.csv", "1, OOM\n1, OOM\n");
    let ran = report(&[&only]).ok();
    assert!(
        ran.stdout.contains("No batch ran") && ran.stdout.contains("Batch 1 ran out of memory")
    );
    self_contained(&page);
    let one = write(dir.path(), "one_batch_x.csv", "4, 100, 150, 2\n");
    assert!(report(&[&one]).ok().stdout.contains("too few for a line"));
    assert!(dir.path().join("page-memory.png").exists());

    plimsoll(&format!("report {good} --price 2")).refused(&["--samples"]);
    report(&[&good, "--samples 0"]).refused(&["--samples"]);
    report(&[&good, "--samples 10 --price=-1"]).refused(&["price"]);
    report(&[&good, "--axis rank"]).refused(&["`rank`", "`batch`"]);
}

#[test]
fn timelines_of_plans_are_part_of_a_report() {
    let dir = tempfile::tempdir().unwrap();
    let step = dir.path().join("step.json");
    let plan = format!(
        "plan --model plimsoll-tiny --batch 2 --seq 64 --timeline {} --format json",
        step.display()
    );
    let planned = plimsoll(&plan).ok().json();
    let page = dir.path().join("page.html");
    let ran = plimsoll(&format!("report {} --out {}", step.display(), page.display())).ok();
    let html = self_contained(&page);
    assert!(ran.stdout.contains("peak ") && ran.stdout.contains("slab "), "{ran:#?}");
    let peak_at = planned["peak_at"].as_str().unwrap();
    assert!(html.contains(peak_at), "{peak_at}");
    // Under the pointer: tensors by name.
    let largest = planned["largest"][0]["name"].as_str().unwrap();
    assert!(html.contains(largest), "{largest}");
    assert!(dir.path().join("page-timeline-1.png").exists());

    let bad = write(dir.path(), "bad.json", "{\"ops\": 3}");
    plimsoll(&format!("report {bad}")).refused(&["bad.json", "ops"]);
    let bad = write(dir.path(), "worse.json", "{\"title\": \"a\", \"classes\": [], \"ops\": []}");
    plimsoll(&format!("report {bad}")).refused(&["worse.json", "ops"]);
}

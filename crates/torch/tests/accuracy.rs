//! The predictions against every measured row. The rows lie outside the repository: without
//! them the test says that it skips.

#[path = "support/rows.rs"]
mod rows;

use rows::{Means, all_rows, means, predict_all, shared};

/// Mean absolute errors that the project promises.
const ACTIVE: f64 = 0.03;
const RESERVED: f64 = 0.06;
const VERDICTS: f64 = 0.97;

#[test]
fn means_over_the_measured_rows() {
    let Some(measured) = shared() else {
        eprintln!("skipped: no measurements beside the checkout; PLIMSOLL_SHARED names them");
        return;
    };
    let (rows, left_out) = all_rows(&measured);
    assert!(rows.len() > 2800 && left_out.len() < 20, "{} rows", rows.len());
    let outcomes = predict_all(&rows);
    let (sets, all) = means(&outcomes);
    for outcome in outcomes.iter().filter(|o| !o.verdict_is_right()) {
        eprintln!("wrong verdict: {} {}", outcome.set, outcome.name);
    }
    let check = |name: &str, m: &Means, active: f64, reserved: f64| {
        assert!(m.active_mean() <= active, "{name}: active off by {:.4}", m.active_mean());
        assert!(m.reserved_mean() <= reserved, "{name}: reserved off by {:.4}", m.reserved_mean());
    };
    check("all rows", &all, ACTIVE, RESERVED);
    assert!(all.verdict_share() >= VERDICTS, "{:.4} of the verdicts", all.verdict_share());
    // One large file must not hide the others: the mean over files holds too.
    let over_files = |mean: fn(&Means) -> f64, measured: fn(&Means) -> bool| {
        let means: Vec<f64> = sets.values().filter(|m| measured(m)).map(mean).collect();
        means.iter().sum::<f64>() / means.len() as f64
    };
    let active = over_files(Means::active_mean, |m| m.active.1 > 0);
    let reserved = over_files(Means::reserved_mean, |m| m.reserved.1 > 0);
    eprintln!("means over files: active {active:.4}, reserved {reserved:.4}");
    assert!(active <= ACTIVE, "mean over files: active off by {active:.4}");
    assert!(reserved <= RESERVED, "mean over files: reserved off by {reserved:.4}");
    // Rows without timing of streams in them are exact.
    for name in ["qwen0.5b_seq_zero3", "qwen0.5b_batch_zero3", "qwen0.5b_batch_zero2_offload"] {
        check(name, &sets[name], 0.001, RESERVED);
    }
}

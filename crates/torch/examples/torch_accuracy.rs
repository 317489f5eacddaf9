//! Predicted beside measured, row by row: `scripts/torch-accuracy`.

#[path = "../tests/support/rows.rs"]
mod rows;

use rows::{all_rows, means, predict_all, shared};

fn main() {
    let Some(measured) = shared() else {
        eprintln!("no measurements: set PLIMSOLL_SHARED to the folder that holds measured/");
        std::process::exit(2);
    };
    let brief = std::env::args().any(|a| a == "--means");
    let only = std::env::args().skip(1).find(|a| !a.starts_with("--"));
    let (mut rows, left_out) = all_rows(&measured);
    if let Some(only) = &only {
        rows.retain(|r| r.set.contains(only.as_str()));
    }
    let start = std::time::Instant::now();
    let outcomes = predict_all(&rows);
    let seconds = start.elapsed().as_secs_f64();
    let cell = |v: Option<f64>| v.map_or("-".to_owned(), |b| format!("{:.0}", b / 1048576.0));
    let error = |v: Option<f64>| v.map_or("-".to_owned(), |e| format!("{:+.2}", e * 100.0));
    if !brief {
        println!(
            "{:<38}{:<52}{:>9}{:>9}{:>8}{:>9}{:>9}{:>8}  verdict",
            "set", "row", "active", "planned", "%", "reserved", "planned", "%"
        );
    }
    for o in outcomes.iter().filter(|_| !brief) {
        println!(
            "{:<38}{:<52}{:>9}{:>9}{:>8}{:>9}{:>9}{:>8}  {}",
            o.set,
            o.name,
            cell(o.measured.0),
            cell(Some(o.predicted.0)),
            error(o.active_error()),
            cell(o.measured.1),
            cell(Some(o.predicted.1)),
            error(o.reserved_error()),
            match (o.measured.2, o.verdict_is_right()) {
                (true, true) => "fits",
                (false, true) => "oom",
                (true, false) => "fits, planned oom",
                (false, false) => "oom, planned fits",
            }
        );
    }
    let (sets, all) = means(&outcomes);
    println!(
        "\nmean absolute errors, %\n{:<38}{:>8}{:>10}{:>10}{:>8}",
        "set", "active", "reserved", "verdicts", "rows"
    );
    for (name, m) in sets.iter().chain([(&"all rows", &all)]) {
        println!(
            "{name:<38}{:>8.2}{:>10.2}{:>10.1}{:>8}",
            m.active_mean() * 100.0,
            m.reserved_mean() * 100.0,
            m.verdict_share() * 100.0,
            m.verdicts.1
        );
    }
    println!("{} plans in {seconds:.2} s", outcomes.len());
    for line in left_out.iter().filter(|_| only.is_none()) {
        println!("left out: {line}");
    }
}

//! Holds the CUDA device against the CPU: every op, whole training steps, prefill
//! and decoding, exactness from run to run, and memory.
//!
//! `cargo run --release -p plimsoll-cuda --example gpu_check [ops] [few] [train] [infer]
//! [memory] [decode]`, on a machine with a GPU; without words, everything. `few` holds
//! products of few rows and what shares their launch, `decode` times token steps.

mod support;

use std::process::ExitCode;

use plimsoll_cuda::device_info;

type Part = fn(&mut support::Report);

fn main() -> ExitCode {
    let info = match device_info(0) {
        Ok(info) => info,
        Err(error) => {
            eprintln!("skipped: {error}");
            return ExitCode::SUCCESS;
        }
    };
    println!("{info:?}");
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let parts: [(&str, Part); 6] = [
        ("ops", support::ops::check),
        ("few", support::few_rows::check),
        ("train", support::steps::train),
        ("infer", support::steps::infer),
        ("memory", support::steps::memory),
        ("decode", support::token::time),
    ];
    let mut report = support::Report::default();
    for (name, part) in parts {
        if wanted.is_empty() || wanted.iter().any(|w| w == name) {
            let start = std::time::Instant::now();
            part(&mut report);
            println!("-- {name}: {:.1} s", start.elapsed().as_secs_f32());
        }
    }
    report.finish()
}

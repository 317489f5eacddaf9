//! Holds the CUDA device against the CPU: every op, whole training steps, prefill
//! and decoding, exactness from run to run, and memory; and against PyTorch's
//! numbers of the golden models.
//!
//! `cargo run --release -p plimsoll-cuda --example gpu_check [ops] [few] [attention]
//! [train] [infer] [quantize] [offload] [memory] [ranks] [golden] [real] [decode]`, on a machine
//! with a GPU; without words, everything. `attention` is the part of `ops` that `PLIMSOLL_ATTENTION` changes,
//! `few` holds products of few rows and what shares their launch, `decode` times token
//! steps. `scripts/gpu-check` runs this and the program itself.

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
    let parts: [(&str, Part); 12] = [
        ("ops", support::ops::check),
        ("few", support::few_rows::check),
        ("attention", support::ops::check_attention),
        ("train", support::steps::train),
        ("infer", support::steps::infer),
        ("quantize", support::quantize::check),
        ("offload", support::offload::check),
        ("memory", memory),
        ("ranks", support::ranks::check),
        ("golden", support::golden::check),
        ("real", support::golden::check_real),
        ("decode", support::token::time),
    ];
    let mut report = support::Report::default();
    for (name, part) in parts {
        let all = wanted.is_empty() && name != "attention";
        if all || wanted.iter().any(|w| w == name) {
            let start = std::time::Instant::now();
            part(&mut report);
            println!("-- {name}: {:.1} s", start.elapsed().as_secs_f32());
        }
    }
    report.finish()
}

fn memory(report: &mut support::Report) {
    support::steps::memory(report);
    support::offload::settled(report);
}

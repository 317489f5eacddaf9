//! Matrix products side by side with the `gemm` crate, in GFLOP/s:
//! `cargo run --release -p plimsoll-cpu --example gemm [ROUNDS [wall|cpu [THREADS]]]`.
//! Rounds are interleaved, so that a busy machine slows both alike; `cpu 1` counts
//! the time of one core without what other processes take.

use plimsoll_cpu::kernels::{Mat, gemm, gemm_workspace};
use plimsoll_cpu::pool::{Pool, threads};
use std::time::Duration;

/// Wall time, or CPU time of this process.
fn now(cpu: bool) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let clock = if cpu { libc::CLOCK_PROCESS_CPUTIME_ID } else { libc::CLOCK_MONOTONIC };
    // SAFETY: `time` is a valid timespec.
    unsafe { libc::clock_gettime(clock, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn main() {
    let shapes = [
        (1024, 960, 576),
        (1024, 576, 576),
        (1024, 3072, 576),
        (1024, 576, 1536),
        (1024, 49152, 576),
    ];
    let rounds: usize = std::env::args().nth(1).and_then(|x| x.parse().ok()).unwrap_or(9);
    let cpu = std::env::args().nth(2).as_deref() == Some("cpu");
    let threads = std::env::args().nth(3).and_then(|x| x.parse().ok()).unwrap_or_else(threads);
    let pool = Pool::new(threads).expect("threads");
    let parallelism =
        if threads == 1 { ::gemm::Parallelism::None } else { ::gemm::Parallelism::Rayon(threads) };
    println!("{:>22} {:>6} {:>9} {:>9}  (best, median)", "M N K", "form", "ours", "gemm");
    for (m, n, k) in shapes {
        let x = vec![0.5f32; m * k];
        let w = vec![0.25f32; n * k];
        let d_y = vec![0.125f32; m * n];
        let flops = 2.0 * (m * n * k) as f64;
        for form in ["y", "d_x", "d_w"] {
            let (a, b, c, (cm, cn, ck)) = match form {
                "y" => (Mat::new(&x, m, k), Mat::new(&w, n, k).t(), m * n, (m, n, k)),
                "d_x" => (Mat::new(&d_y, m, n), Mat::new(&w, n, k), m * k, (m, k, n)),
                _ => (Mat::new(&d_y, m, n).t(), Mat::new(&x, m, k), n * k, (n, k, m)),
            };
            let mut out = vec![0.0f32; c];
            let mut ws = vec![0.0f32; gemm_workspace(cm, cn, ck, true)];
            let (mut ours, mut theirs) = (Vec::new(), Vec::new());
            for _ in 0..rounds {
                let start = now(cpu);
                pool.install(|| gemm(a, b, &mut out, cn, None, false, &mut ws));
                ours.push(flops / (now(cpu) - start).as_secs_f64() * 1e-9);
                let start = now(cpu);
                // SAFETY: the buffers have these shapes.
                unsafe {
                    let (lhs, ls, rhs, rs) = match form {
                        "y" => (x.as_ptr(), (1, k), w.as_ptr(), (k, 1)),
                        "d_x" => (d_y.as_ptr(), (1, n), w.as_ptr(), (1, k)),
                        _ => (d_y.as_ptr(), (n, 1), x.as_ptr(), (1, k)),
                    };
                    ::gemm::gemm(
                        cm,
                        cn,
                        ck,
                        out.as_mut_ptr(),
                        1,
                        cn as isize,
                        false,
                        lhs,
                        ls.0 as isize,
                        ls.1 as isize,
                        rhs,
                        rs.0 as isize,
                        rs.1 as isize,
                        0.0,
                        1.0,
                        false,
                        false,
                        false,
                        parallelism,
                    );
                }
                theirs.push(flops / (now(cpu) - start).as_secs_f64() * 1e-9);
            }
            println!(
                "{:>22} {form:>6} {} {}",
                format!("{m} {n} {k}"),
                summary(&mut ours),
                summary(&mut theirs)
            );
        }
    }
}

fn summary(x: &mut [f64]) -> String {
    x.sort_by(f64::total_cmp);
    format!("{:>5.0} {:>5.0}", x[x.len() - 1], x[x.len() / 2])
}

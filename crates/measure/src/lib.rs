//! Measurement that survives crashes: every point of a sweep runs in a process
//! of its own, what it says is on disk before the next one starts, and memory
//! is what the kernel says it is.
//!
//! ```text
//! Vary        "batch=1.."  ->  the values to try
//! Sweep       DIR/points.jsonl: which point is next, what is finished
//! run_point   one point in a fresh process: ok, oom, refused, failed, timeout
//! Pattern     where the figures of somebody else's trainer are in its output
//! Resident    memory of a process;  machine_memory: what the machine grants
//! ```
//!
//! This crate knows nothing about models. A sweep is a loop of the caller's:
//!
//! ```no_run
//! # use plimsoll_measure::*;
//! # use std::{path::Path, sync::atomic::AtomicBool};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let stop = AtomicBool::new(false); // set by the handler of Ctrl-C
//! let axes = vec![Vary::parse("batch=1..")?];
//! let recipe = serde_json::json!({"model": "llama-3-8b", "seq": 2048});
//! let mut sweep = Sweep::open(Path::new("runs/a"), &recipe, axes)?;
//! while let Some(point) = sweep.next_point() {
//!     let mut launch = Launch::new("trainer", sweep.log_path(&point));
//!     launch.args = vec![format!("--batch={}", point["batch"]).into()];
//!     let outcome = run_point(&launch, &stop)?;
//!     sweep.record(outcome.into_point(point))?;
//! }
//! # Ok(())
//! # }
//! ```

mod family;
mod machine;
mod nvml;
mod output;
mod point;
mod process;
mod resident;
mod sweep;
mod vary;

pub use machine::{MachineMemory, machine_memory, machine_memory_limit};
pub use output::{OutputRules, Pattern, PatternError, fill_in};
pub use point::{Point, Status};
pub use process::{Launch, Outcome, Reads, RunError, run_point};
pub use resident::{Resident, ResidentError, peak, reset_peak};
pub use sweep::{Sweep, SweepError};
pub use vary::{Vary, VaryError};

/// Bytes as people read them: three to four digits and a binary unit.
pub(crate) fn human_bytes(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    if bytes < 1024 {
        return format!("{bytes} bytes");
    }
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.2} {}", units[unit])
}

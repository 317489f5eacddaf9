//! Programs that are interrupted while they run.

use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

/// Starts the program with its output caught.
pub fn start(line: &str) -> Child {
    let mut command = super::command(line);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits until the file has this many lines, or the program has ended.
pub fn wait_for_lines(child: &mut Child, path: &Path, lines: usize) {
    let started = Instant::now();
    while child.try_wait().unwrap().is_none() {
        let text = std::fs::read(path).unwrap_or_default();
        if text.iter().filter(|b| **b == b'\n').count() >= lines {
            return;
        }
        assert!(started.elapsed() < Duration::from_secs(300), "{}", path.display());
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub const SIGINT: i32 = 2;
pub const SIGKILL: i32 = 9;
pub const SIGTERM: i32 = 15;

/// Sends a signal; the program may have ended already.
pub fn signal(child: &Child, signal: i32) {
    // SAFETY: the child has not been waited for, so the number is still its own.
    unsafe { libc::kill(child.id() as i32, signal) };
}

/// Waits for the end.
pub fn end(child: Child) -> Output {
    child.wait_with_output().unwrap()
}

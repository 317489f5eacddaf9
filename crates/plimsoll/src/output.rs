//! Standard output and standard error, without the panics of `println!`.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::exit::{Outcome, Stop};

/// As `println!`; what cannot be written ends the command with an error.
macro_rules! outln {
    ($($format:tt)*) => {
        $crate::output::write(format_args!("{}\n", format_args!($($format)*)))?
    };
}

/// As `print!`; what cannot be written ends the command with an error.
macro_rules! out {
    ($($format:tt)*) => {
        $crate::output::write(format_args!($($format)*))?
    };
}

/// As `eprintln!`, but a log that nobody can read ends no training.
macro_rules! note {
    ($($format:tt)*) => {
        $crate::output::note(format_args!("{}\n", format_args!($($format)*)))
    };
}

/// Writes results. A reader that has gone has seen what it wanted.
///
/// # Errors
/// Standard output refuses, as a file on a full disk does.
pub fn write(text: Arguments) -> Outcome {
    match flushed(text) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            Err(Stop::Input(format!("cannot write to standard output: {e}")))
        }
        _ => Ok(()),
    }
}

/// Writes results as they come; false once nobody takes them.
pub fn stream(text: &str) -> bool {
    flushed(format_args!("{text}")).is_ok()
}

fn flushed(text: Arguments) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_fmt(text)?;
    out.flush()
}

/// Writes to the log.
pub fn note(text: Arguments) {
    if RANK.load(Ordering::Relaxed) == 0 {
        error(text);
    }
}

/// Writes to the log, whatever rank this process is.
pub fn error(text: Arguments) {
    let mut out = io::stderr().lock();
    let rank = RANK.load(Ordering::Relaxed);
    // There is nobody left to tell.
    let _ = match rank {
        0 => out.write_fmt(text),
        _ => out.write_fmt(format_args!("rank {rank}: {text}")),
    };
}

/// Rank of this process, where there are others: only the first one keeps a log.
static RANK: AtomicUsize = AtomicUsize::new(0);

/// From now on this process writes what others do not.
pub fn set_rank(rank: usize) {
    RANK.store(rank, Ordering::Relaxed);
}

//! Standard output and standard error, without the panics of `println!`.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write};

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
    // There is nobody left to tell.
    let _ = io::stderr().lock().write_fmt(text);
}

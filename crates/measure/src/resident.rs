//! Memory of a process as the Linux kernel counts it.

use std::path::Path;

/// The kernel did not say.
#[derive(Debug, thiserror::Error)]
pub enum ResidentError {
    #[error("memory of processes is read from /proc, which only Linux has")]
    Unsupported,
    #[error("cannot {action} {path}: {source}")]
    Io { action: &'static str, path: String, source: std::io::Error },
    #[error("{path} has no line {field}")]
    Missing { path: String, field: &'static str },
}

/// Resident memory of one process, in bytes (`/proc/PID/status`, proc(5)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resident {
    /// All of it (VmRSS): `anon + file + shmem`.
    pub rss: u64,
    /// Heap, stacks, private copies (RssAnon): what no file can give back.
    pub anon: u64,
    /// Mapped files (RssFile), weights read through a memory map among them.
    pub file: u64,
    /// Shared memory (RssShmem).
    pub shmem: u64,
    /// The largest `rss` ever, or since [`reset_peak`] (VmHWM).
    pub peak: u64,
}

impl Resident {
    /// This process, now.
    pub fn now() -> Result<Self, ResidentError> {
        Self::read("/proc/self/status")
    }

    /// Another process. A process that has ended, a zombie too, is an error.
    pub fn of(pid: u32) -> Result<Self, ResidentError> {
        Self::read(&format!("/proc/{pid}/status"))
    }

    fn read(path: &str) -> Result<Self, ResidentError> {
        if !cfg!(target_os = "linux") {
            return Err(ResidentError::Unsupported);
        }
        let text = std::fs::read_to_string(path).map_err(|source| ResidentError::Io {
            action: "read",
            path: path.to_owned(),
            source,
        })?;
        let missing = |field| ResidentError::Missing { path: path.to_owned(), field };
        // The parts of RSS came with Linux 4.5; the sum is always there.
        let rss = kib_field(&text, "VmRSS").ok_or_else(|| missing("VmRSS"))?;
        Ok(Self {
            rss,
            anon: kib_field(&text, "RssAnon").ok_or_else(|| missing("RssAnon"))?,
            file: kib_field(&text, "RssFile").unwrap_or(0),
            shmem: kib_field(&text, "RssShmem").unwrap_or(0),
            peak: kib_field(&text, "VmHWM").unwrap_or(rss),
        })
    }
}

/// Makes [`peak`] forget: from now on it is the peak from here
/// (`/proc/self/clear_refs`, value 5).
pub fn reset_peak() -> Result<(), ResidentError> {
    if !cfg!(target_os = "linux") {
        return Err(ResidentError::Unsupported);
    }
    let path = "/proc/self/clear_refs";
    std::fs::write(Path::new(path), "5").map_err(|source| ResidentError::Io {
        action: "write to",
        path: path.to_owned(),
        source,
    })
}

/// The largest resident memory of this process since it started or since
/// [`reset_peak`], in bytes. The kernel keeps it, so no peak between two looks
/// is missed.
pub fn peak() -> Result<u64, ResidentError> {
    Ok(Resident::now()?.peak)
}

/// The value of `NAME:   123 kB` in bytes.
pub(crate) fn kib_field(text: &str, name: &str) -> Option<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?
        .trim()
        .strip_suffix("kB")?
        .trim()
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn peak_follows_memory_that_is_gone_again() {
        const SIZE: usize = 96 << 20;
        if let Err(e) = reset_peak() {
            eprintln!("skipped: {e}");
            return;
        }
        let before = Resident::now().unwrap();
        let block = vec![1u8; SIZE];
        let during = Resident::now().unwrap();
        assert_eq!(block.iter().map(|&b| b as usize).sum::<usize>(), SIZE);
        drop(block);
        let growth = peak().unwrap() - before.rss;
        let off = (growth as f64 / SIZE as f64 - 1.0).abs();
        assert!(off < 0.02, "grew by {growth} of {SIZE}");
        assert!(during.anon >= before.anon + SIZE as u64 / 100 * 98);
        assert_eq!(during.rss, during.anon + during.file + during.shmem);

        reset_peak().unwrap();
        assert!(peak().unwrap() < before.rss + SIZE as u64 / 2);
    }

    #[test]
    fn a_process_that_is_not_there() {
        let error = Resident::of(u32::MAX).unwrap_err();
        assert!(error.to_string().contains("4294967295"), "{error}");
    }

    #[test]
    fn fields() {
        let text = "Name:\tx\nVmRSS:\t   12 kB\nVmRSSX:\t 3 kB\nBad: 99999999999999999999 kB\n";
        assert_eq!(kib_field(text, "VmRSS"), Some(12 << 10));
        assert_eq!(kib_field(text, "Bad"), None);
        assert_eq!(kib_field(text, "Vm"), None);
    }
}

//! What a run took, as the kernel counts it.

use plimsoll_measure::{Resident, peak, reset_peak};

use crate::exit::Stop;

/// Resident memory from a moment on.
pub struct Growth {
    /// Bytes that were resident at the start.
    pub before: u64,
}

impl Growth {
    /// Starts here, just before the slab is reserved.
    ///
    /// What is not the run's own is settled first: freed heap goes back to the
    /// kernel, or the run would find it there and look smaller; the code of
    /// this program is read in, or its pages, which come as its functions are
    /// called for the first time, would make the run look larger.
    ///
    /// # Errors
    /// The kernel does not say what is resident.
    pub fn start() -> Result<Growth, Stop> {
        return_free_memory();
        read_code();
        reset_peak().map_err(Stop::input)?;
        Ok(Growth { before: Resident::now().map_err(Stop::input)?.rss })
    }

    /// The most that was resident since, in bytes beyond what was before.
    ///
    /// # Errors
    /// As [`Growth::start`].
    pub fn most(&self) -> Result<u64, Stop> {
        Ok(peak().map_err(Stop::input)?.saturating_sub(self.before))
    }
}

fn return_free_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: no preconditions.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Makes the executable pages of this process resident. Where the kernel
/// cannot (before Linux 5.14) the figures are a little larger.
fn read_code() {
    #[cfg(target_os = "linux")]
    for line in std::fs::read_to_string("/proc/self/maps").unwrap_or_default().lines() {
        let mut words = line.split_whitespace();
        let (Some(range), Some("r-xp")) = (words.next(), words.next()) else { continue };
        let from_file = words.nth(3).is_some_and(|path| path.starts_with('/'));
        let hex = |text| usize::from_str_radix(text, 16).ok();
        let ends = range.split_once('-').and_then(|(a, b)| Some((hex(a)?, hex(b)?)));
        if let (true, Some((start, end))) = (from_file, ends) {
            // SAFETY: reading pages in changes nothing; a range that is no
            // longer mapped is an error, which does not matter.
            unsafe {
                libc::madvise(start as *mut _, end - start, libc::MADV_POPULATE_READ);
            }
        }
    }
}

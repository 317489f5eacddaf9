//! The slab in host memory that a GPU's copy engines reach: page-locked.

use std::ffi::c_void;
use std::io;
use std::ptr;

use plimsoll_plan::DeviceError;

use crate::driver::cuda;

/// Threads that touch the pages of a new slab.
const THREADS: usize = 8;

/// Zeroed page-locked memory of exactly the planned size.
///
/// Pages are made one by one before they are locked: a machine whose memory grows
/// with its use would refuse to lock tens of gigabytes at once.
pub(crate) struct HostSlab {
    base: *mut u8,
    len: usize,
    locked: bool,
    /// Bytes that this process has more since it is there, as the kernel counts them.
    pub resident: u64,
}

impl HostSlab {
    pub fn empty() -> HostSlab {
        HostSlab { base: ptr::null_mut(), len: 0, locked: false, resident: 0 }
    }

    /// # Errors
    /// The system has not that much memory, or does not let this process lock it.
    pub fn reserve(bytes: u64) -> Result<HostSlab, DeviceError> {
        let refused = |cause| DeviceError::ReserveHost { bytes, cause };
        let len = usize::try_from(bytes)
            .map_err(|_| refused(io::Error::from(io::ErrorKind::OutOfMemory)))?;
        if len == 0 {
            return Ok(HostSlab::empty());
        }
        let before = resident();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: an anonymous private mapping at an address of the kernel's choice.
        let base = unsafe { libc::mmap(ptr::null_mut(), len, access, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(refused(io::Error::last_os_error()));
        }
        // SAFETY: the mapping just made; advice that is not taken does no harm.
        unsafe { libc::madvise(base, len, libc::MADV_HUGEPAGE) };
        let mut slab = HostSlab { base: base.cast(), len, locked: false, resident: 0 };
        slab.touch();
        // Every context may use it: 1 is CU_MEMHOSTREGISTER_PORTABLE.
        cuda!(cuMemHostRegister_v2(slab.base.cast::<c_void>(), len, 1))
            .map_err(|e| refused(io::Error::other(e.to_string())))?;
        slab.locked = true;
        slab.resident = resident().saturating_sub(before);
        Ok(slab)
    }

    /// Makes every page.
    fn touch(&mut self) {
        const PAGE: usize = 4096;
        let bytes = self.slice(0, self.len);
        let share = bytes.len().div_ceil(THREADS).next_multiple_of(PAGE);
        std::thread::scope(|scope| {
            for share in bytes.chunks_mut(share) {
                scope.spawn(|| {
                    for page in share.chunks_mut(PAGE) {
                        // SAFETY: a byte of this thread's share; a plain write of a zero
                        // over a zero could be left out.
                        unsafe { ptr::write_volatile(&mut page[0], 0) };
                    }
                });
            }
        });
    }

    /// Where it begins; null where it is empty.
    pub fn address(&self) -> u64 {
        self.base as u64
    }

    /// # Panics
    /// The range lies outside.
    pub fn slice(&mut self, at: usize, len: usize) -> &mut [u8] {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len));
        if len == 0 {
            return &mut [];
        }
        // SAFETY: checked, owned, and borrowed as long as the slice.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(at), len) }
    }
}

/// Resident bytes of this process (proc(5), `statm`); 0 where nobody says.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text.split_whitespace().nth(1).and_then(|n| n.parse::<u64>().ok());
    // SAFETY: no preconditions.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    pages.unwrap_or(0) * page.max(0) as u64
}

impl Drop for HostSlab {
    fn drop(&mut self) {
        if self.locked {
            let _ = cuda!(cuMemHostUnregister(self.base.cast::<c_void>()));
        }
        if !self.base.is_null() {
            // SAFETY: the mapping made by `reserve`, unmapped once.
            unsafe { libc::munmap(self.base.cast(), self.len) };
        }
    }
}

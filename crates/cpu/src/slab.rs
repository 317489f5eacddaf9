//! One reservation of memory, asked of the kernel directly, so that the planned
//! bytes are the bytes that the process has.

use std::io;

use plimsoll_plan::DeviceError;

/// Zeroed, page-aligned memory of exactly the planned size.
pub struct Slab {
    base: *mut u8,
    len: usize,
    /// Somebody else's, who gives it back.
    lent: bool,
}

// SAFETY: the slab owns its mapping; who may touch what is the device's business.
unsafe impl Send for Slab {}
unsafe impl Sync for Slab {}

impl Slab {
    /// # Errors
    /// The kernel refuses that much address space.
    pub fn reserve(bytes: u64) -> Result<Slab, DeviceError> {
        let refused = |cause| DeviceError::Reserve { bytes, cause };
        let len = usize::try_from(bytes.max(1))
            .map_err(|_| refused(io::Error::from(io::ErrorKind::OutOfMemory)))?;
        // SAFETY: an anonymous private mapping at an address of the kernel's choice.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(refused(io::Error::last_os_error()));
        }
        // Large pages spare the TLB; a kernel without them says no, and that is fine.
        #[cfg(target_os = "linux")]
        // SAFETY: the range is the mapping just made.
        unsafe {
            libc::madvise(base, len, libc::MADV_HUGEPAGE);
        }
        Ok(Slab { base: base.cast(), len, lent: false })
    }

    /// Memory of somebody else as a slab.
    ///
    /// # Safety
    /// `len` bytes at `base` can be read and written as long as the slab is used.
    pub unsafe fn lent(base: *mut u8, len: usize) -> Slab {
        Slab { base, len, lent: true }
    }

    /// Elements of a range of the slab.
    ///
    /// # Panics
    /// The range leaves the slab: a fault of the layout.
    ///
    /// # Safety
    /// No other reference to these bytes may be used while this one is, unless
    /// both are only read.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice<T: bytemuck::Pod>(&self, offset: u64, elements: usize) -> &mut [T] {
        let bytes = elements.checked_mul(size_of::<T>()).expect("a tensor in memory");
        let end = (offset as usize).checked_add(bytes).expect("a tensor in memory");
        assert!(end <= self.len, "bytes {offset}..{end} of a slab of {}", self.len);
        assert_eq!(offset as usize % align_of::<T>(), 0, "misaligned tensor at {offset}");
        // SAFETY: in bounds and aligned (checked); every bit pattern is a T; the
        // caller sees to aliasing.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(offset as usize).cast(), elements) }
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        if self.lent {
            return;
        }
        // SAFETY: the mapping made by `reserve`, unmapped once.
        unsafe {
            libc::munmap(self.base.cast(), self.len);
        }
    }
}

//! The driver's own account of memory (NVML), by device and by process: what a
//! plan is held against. Optional: without the library there are no figures.

use std::ffi::{CStr, c_char, c_uint, c_void};

type Handle = *mut c_void;

#[repr(C)]
#[derive(Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Process {
    pid: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// One GPU as NVML knows it.
pub(crate) struct Nvml {
    device: Handle,
    memory: unsafe extern "C" fn(Handle, *mut Memory) -> c_uint,
    processes: Option<unsafe extern "C" fn(Handle, *mut c_uint, *mut Process) -> c_uint>,
}

/// A function of an open library.
///
/// # Safety
/// `F` is a function pointer of the symbol's type.
unsafe fn symbol<F: Copy>(library: *mut c_void, name: &CStr) -> Option<F> {
    // SAFETY: the caller's promise; dlsym accepts any name.
    unsafe {
        let found = libc::dlsym(library, name.as_ptr());
        (!found.is_null()).then(|| std::mem::transmute_copy::<*mut c_void, F>(&found))
    }
}

impl Nvml {
    /// The GPU with this PCI bus id.
    pub fn open(pci_bus_id: &CStr) -> Option<Nvml> {
        // SAFETY: the signatures are those of nvml.h (CUDA 13.0).
        unsafe {
            let library = libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_NOW);
            if library.is_null() {
                return None;
            }
            let init: unsafe extern "C" fn() -> c_uint = symbol(library, c"nvmlInit_v2")?;
            let find: unsafe extern "C" fn(*const c_char, *mut Handle) -> c_uint =
                symbol(library, c"nvmlDeviceGetHandleByPciBusId_v2")?;
            let memory = symbol(library, c"nvmlDeviceGetMemoryInfo")?;
            let processes = symbol(library, c"nvmlDeviceGetComputeRunningProcesses_v3");
            let mut device = std::ptr::null_mut();
            if init() != 0 || find(pci_bus_id.as_ptr(), &mut device) != 0 {
                return None;
            }
            Some(Nvml { device, memory, processes })
        }
    }

    /// Free bytes of the device, whoever took the others.
    pub fn free_bytes(&self) -> Option<u64> {
        let mut memory = Memory::default();
        // SAFETY: the handle is live as long as the library, which is never closed.
        (unsafe { (self.memory)(self.device, &mut memory) } == 0).then_some(memory.free)
    }

    /// Bytes that the driver counts for this process; none where it does not tell
    /// (in some containers and virtual machines).
    pub fn process_bytes(&self) -> Option<u64> {
        let mut list = [Process::default(); 256];
        let mut count = list.len() as c_uint;
        // SAFETY: as above; the list holds `count` entries.
        if unsafe { self.processes?(self.device, &mut count, list.as_mut_ptr()) } != 0 {
            return None;
        }
        let own = list.iter().take(count as usize).find(|p| p.pid == std::process::id())?;
        // All ones: not available.
        (own.used != u64::MAX).then_some(own.used)
    }
}

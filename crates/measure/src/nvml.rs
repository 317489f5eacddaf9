//! Device memory of other processes, as the NVIDIA driver counts it.
//!
//! The library is looked for when a point of somebody else's trainer starts;
//! without it there are no figures and nothing fails.

use std::ffi::{CStr, c_uint, c_void};
use std::sync::OnceLock;

type Handle = *mut c_void;

#[repr(C)]
#[derive(Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_t` of version 2 of the struct, which
/// `nvmlDeviceGetComputeRunningProcesses_v3` fills (nvml.h, CUDA 13.0).
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Process {
    pid: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

type GetMemory = unsafe extern "C" fn(Handle, *mut Memory) -> c_uint;
type GetProcesses = unsafe extern "C" fn(Handle, *mut c_uint, *mut Process) -> c_uint;

/// Every GPU that the driver shows.
struct Gpus {
    devices: Vec<Handle>,
    memory: GetMemory,
    processes: GetProcesses,
}

// SAFETY: NVML's functions may be called from any thread, and device handles
// are names, not state.
unsafe impl Send for Gpus {}
// SAFETY: as above.
unsafe impl Sync for Gpus {}

/// A function of an open library.
///
/// # Safety
/// `F` is a function pointer of the symbol's type.
#[cfg(unix)]
unsafe fn symbol<F: Copy>(library: *mut c_void, name: &CStr) -> Option<F> {
    // SAFETY: the caller's promise; dlsym accepts any name.
    unsafe {
        let found = libc::dlsym(library, name.as_ptr());
        (!found.is_null()).then(|| std::mem::transmute_copy::<*mut c_void, F>(&found))
    }
}

#[cfg(unix)]
fn open() -> Option<Gpus> {
    // SAFETY: the signatures are those of nvml.h (CUDA 13.0); the library stays
    // open for good.
    unsafe {
        let library = libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_NOW);
        if library.is_null() {
            return None;
        }
        let init: unsafe extern "C" fn() -> c_uint = symbol(library, c"nvmlInit_v2")?;
        let count: unsafe extern "C" fn(*mut c_uint) -> c_uint =
            symbol(library, c"nvmlDeviceGetCount_v2")?;
        let device: unsafe extern "C" fn(c_uint, *mut Handle) -> c_uint =
            symbol(library, c"nvmlDeviceGetHandleByIndex_v2")?;
        let memory = symbol(library, c"nvmlDeviceGetMemoryInfo")?;
        let processes = symbol(library, c"nvmlDeviceGetComputeRunningProcesses_v3")?;
        let mut number = 0;
        if init() != 0 || count(&mut number) != 0 {
            return None;
        }
        let mut devices = Vec::new();
        for index in 0..number {
            let mut handle = std::ptr::null_mut();
            if device(index, &mut handle) == 0 {
                devices.push(handle);
            }
        }
        (!devices.is_empty()).then_some(Gpus { devices, memory, processes })
    }
}

#[cfg(not(unix))]
fn open() -> Option<Gpus> {
    None
}

impl Gpus {
    fn used(&self, device: Handle) -> Option<u64> {
        let mut memory = Memory::default();
        // SAFETY: the handle came from this library, which is never closed.
        (unsafe { (self.memory)(device, &mut memory) } == 0).then_some(memory.used)
    }

    /// Processes that compute on a device, with their bytes; `None` where the
    /// driver does not tell.
    fn processes(&self, device: Handle) -> Option<Vec<(u32, u64)>> {
        let mut list = [Process::default(); 256];
        let mut count = list.len() as c_uint;
        // SAFETY: as above; the list holds `count` entries.
        if unsafe { (self.processes)(device, &mut count, list.as_mut_ptr()) } != 0 {
            return None;
        }
        Some(list[..(count as usize).min(list.len())].iter().map(|p| (p.pid, p.used)).collect())
    }
}

/// The most that a family of processes held on each GPU.
pub(crate) struct DeviceMemory {
    gpus: &'static Gpus,
    /// Bytes in use on each GPU before the family started.
    before: Vec<u64>,
    peaks: Vec<u64>,
    /// A process of the family was on a list of the driver's.
    named: bool,
}

impl DeviceMemory {
    /// To be called before the family starts. `None` without a GPU.
    pub fn watch() -> Option<Self> {
        static GPUS: OnceLock<Option<Gpus>> = OnceLock::new();
        let gpus = GPUS.get_or_init(open).as_ref()?;
        let before: Vec<u64> =
            gpus.devices.iter().map(|&device| gpus.used(device).unwrap_or(u64::MAX)).collect();
        Some(Self { gpus, peaks: vec![0; before.len()], before, named: false })
    }

    /// Looks once at every GPU.
    ///
    /// In a container with process numbers of its own the driver's list has
    /// numbers that nobody here knows, or is empty. Then what the device has in
    /// use beyond the start counts.
    pub fn look(&mut self, is_member: impl Fn(u32) -> bool, is_known: impl Fn(u32) -> bool) {
        for (index, &device) in self.gpus.devices.iter().enumerate() {
            let list = self.gpus.processes(device).unwrap_or_default();
            let own: Vec<u64> = list
                .iter()
                // All ones: the driver does not tell.
                .filter(|(pid, used)| *used != u64::MAX && is_member(*pid))
                .map(|(_, used)| *used)
                .collect();
            let held = if !own.is_empty() {
                if !self.named {
                    // What was guessed before the driver named a process.
                    self.peaks.fill(0);
                }
                self.named = true;
                own.iter().sum()
            } else if !self.named && !list.iter().any(|(pid, _)| is_known(*pid)) {
                self.gpus.used(device).map_or(0, |used| used.saturating_sub(self.before[index]))
            } else {
                0
            };
            self.peaks[index] = self.peaks[index].max(held);
        }
    }

    /// Peaks of the GPUs that were used, in the driver's order, and how they
    /// were told; `None` if none was.
    pub fn peaks(&self) -> Option<(Vec<u64>, &'static str)> {
        let used: Vec<u64> = self.peaks.iter().copied().filter(|&peak| peak > 0).collect();
        let by = if self.named { "nvml-process" } else { "nvml-device" };
        (!used.is_empty()).then_some((used, by))
    }
}

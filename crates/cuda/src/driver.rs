//! The little of the CUDA driver's interface that is needed, with checked calls.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::Mutex;

use cudarc::driver::sys::{self, CUresult};

use crate::error::CudaError;
use crate::library;
use crate::nvml::Nvml;

/// Turns a driver's status into a typed error.
pub(crate) fn check(call: &'static str, status: CUresult) -> Result<(), CudaError> {
    if status == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let text = |f: unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut text = ptr::null();
        // SAFETY: the driver hands out a static string, or leaves the null.
        unsafe {
            f(status, &mut text);
            if text.is_null() {
                return format!("status {}", status as u32);
            }
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    };
    Err(CudaError::Driver {
        call,
        name: text(sys::cuGetErrorName),
        what: text(sys::cuGetErrorString),
    })
}

/// Calls a driver function and checks its status.
macro_rules! cuda {
    ($function:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: arguments are live handles and pointers to memory of the right size;
        // each call site passes only what it owns.
        $crate::driver::check(stringify!($function), unsafe {
            cudarc::driver::sys::$function($($argument),*)
        })
    };
}
pub(crate) use cuda;

/// A GPU that this program can run on.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceInfo {
    pub name: String,
    /// Bytes of its memory.
    pub memory_bytes: u64,
    pub compute_capability: (i32, i32),
    pub multiprocessors: i32,
    /// Bytes of shared memory that one block can have.
    pub shared_bytes: i32,
    /// CUDA version of the driver: 1000 major + 10 minor.
    pub driver: i32,
}

/// Looks at GPU `ordinal` without taking any of its memory.
///
/// # Errors
/// No driver, no such GPU, or one that is too old.
pub fn device_info(ordinal: usize) -> Result<DeviceInfo, CudaError> {
    Ok(find(ordinal)?.1)
}

/// The driver's handle of GPU `ordinal`; nothing of it is taken.
pub(crate) fn device(ordinal: usize) -> Result<sys::CUdevice, CudaError> {
    library::need_driver()?;
    cuda!(cuInit(0)).map_err(|e| CudaError::NoDevice { cause: e.to_string() })?;
    let mut count = 0;
    cuda!(cuDeviceGetCount(&mut count))?;
    if count == 0 {
        return Err(CudaError::NoDevice { cause: "a count of zero".into() });
    }
    if ordinal >= count as usize {
        return Err(CudaError::Ordinal { ordinal, count: count as usize });
    }
    let mut device = 0;
    cuda!(cuDeviceGet(&mut device, ordinal as c_int))?;
    Ok(device)
}

fn find(ordinal: usize) -> Result<(sys::CUdevice, DeviceInfo), CudaError> {
    let device = device(ordinal)?;
    let mut driver = 0;
    cuda!(cuDriverGetVersion(&mut driver))?;
    if driver < 13_000 {
        return Err(CudaError::OldDriver { found: driver });
    }
    let mut name = [0; 128];
    cuda!(cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int, device))?;
    // SAFETY: the driver ends the name with a zero.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let mut memory = 0usize;
    cuda!(cuDeviceTotalMem_v2(&mut memory, device))?;
    use sys::CUdevice_attribute_enum as Attribute;
    let attribute = |which: Attribute| -> Result<i32, CudaError> {
        let mut value = 0;
        cuda!(cuDeviceGetAttribute(&mut value, which, device))?;
        Ok(value)
    };
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    if major < 8 {
        return Err(CudaError::OldDevice { name, major, minor });
    }
    let info = DeviceInfo {
        name,
        memory_bytes: memory as u64,
        compute_capability: (major, minor),
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        driver,
    };
    Ok((device, info))
}

/// Free bytes of each GPU before this process first touched it. cuBLASLt keeps the
/// context alive once it has one, so a later device cannot measure this again.
static FREE_BEFORE: Mutex<BTreeMap<usize, u64>> = Mutex::new(BTreeMap::new());

/// The primary context of one GPU and a stream in it.
pub(crate) struct Context {
    pub device: sys::CUdevice,
    context: sys::CUcontext,
    pub stream: sys::CUstream,
    pub info: DeviceInfo,
    pub nvml: Option<Nvml>,
    /// Free bytes of the GPU before this process touched it; by NVML where it is there.
    pub free_before: u64,
}

impl Context {
    pub fn new(ordinal: usize) -> Result<Context, CudaError> {
        let (device, info) = find(ordinal)?;
        let mut bus_id = [0; 32];
        cuda!(cuDeviceGetPCIBusId(bus_id.as_mut_ptr(), bus_id.len() as c_int, device))?;
        // SAFETY: the driver ends the id with a zero.
        let nvml = Nvml::open(unsafe { CStr::from_ptr(bus_id.as_ptr()) });
        let before = nvml.as_ref().and_then(Nvml::free_bytes);
        let mut context = ptr::null_mut();
        cuda!(cuDevicePrimaryCtxRetain(&mut context, device))?;
        let mut this =
            Context { device, context, stream: ptr::null_mut(), info, nvml, free_before: 0 };
        this.bind()?;
        this.stream = stream()?;
        let free = match before {
            Some(free) => free,
            None => this.memory()?.0,
        };
        let mut known = FREE_BEFORE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        this.free_before = *known.entry(ordinal).or_insert(free);
        Ok(this)
    }

    /// Makes this the context of the calling thread.
    pub fn bind(&self) -> Result<(), CudaError> {
        cuda!(cuCtxSetCurrent(self.context))
    }

    /// Free and total bytes of the GPU.
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        let (mut free, mut total) = (0, 0);
        cuda!(cuMemGetInfo_v2(&mut free, &mut total))?;
        Ok((free as u64, total as u64))
    }

    /// Bytes of the GPU that were free before this process and are not now.
    pub fn taken(&self) -> Result<u64, CudaError> {
        let free = match self.nvml.as_ref().and_then(Nvml::free_bytes) {
            Some(free) => free,
            None => self.memory()?.0,
        };
        Ok(self.free_before.saturating_sub(free))
    }

    /// Waits until the stream is empty; errors of earlier launches surface here.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        cuda!(cuStreamSynchronize(self.stream))
    }

    /// Whether the stream is empty; errors of earlier launches surface here.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        // SAFETY: a live stream of the current context.
        let status = unsafe { sys::cuStreamQuery(self.stream) };
        match status {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => check("cuStreamQuery", other).map(|()| true),
        }
    }

    /// An event that knows when it happened.
    pub fn event(&self) -> Result<Event, CudaError> {
        Event::new(0)
    }

    /// An event for other streams to wait for.
    pub fn mark(&self) -> Result<Event, CudaError> {
        Event::new(sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let _ = self.bind();
        if !self.stream.is_null() {
            destroy(self.stream);
        }
        let _ = cuda!(cuDevicePrimaryCtxRelease_v2(self.device));
    }
}

/// A stream of the current context.
pub(crate) fn stream() -> Result<sys::CUstream, CudaError> {
    let mut stream = ptr::null_mut();
    let non_blocking = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
    cuda!(cuStreamCreate(&mut stream, non_blocking))?;
    Ok(stream)
}

/// Gives a stream back.
pub(crate) fn destroy(stream: sys::CUstream) {
    let _ = cuda!(cuStreamDestroy_v2(stream));
}

/// A point in a stream.
pub(crate) struct Event(sys::CUevent);

impl Event {
    fn new(flags: u32) -> Result<Event, CudaError> {
        let mut event = ptr::null_mut();
        cuda!(cuEventCreate(&mut event, flags))?;
        Ok(Event(event))
    }

    /// Holds a stream up until this has happened.
    pub fn hold(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        cuda!(cuStreamWaitEvent(stream, self.0, 0))
    }

    pub fn record(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        cuda!(cuEventRecord(self.0, stream))
    }

    pub fn wait(&self) -> Result<(), CudaError> {
        cuda!(cuEventSynchronize(self.0))
    }

    /// Milliseconds from this event to `end`; both have happened.
    pub fn until(&self, end: &Event) -> Result<f32, CudaError> {
        let mut milliseconds = 0.0;
        cuda!(cuEventElapsedTime_v2(&mut milliseconds, self.0, end.0))?;
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = cuda!(cuEventDestroy_v2(self.0));
    }
}

/// Page-locked host memory.
pub(crate) struct Pinned {
    base: *mut u8,
    len: usize,
}

impl Pinned {
    pub fn new(len: usize) -> Result<Pinned, CudaError> {
        let mut base: *mut c_void = ptr::null_mut();
        cuda!(cuMemHostAlloc(&mut base, len, 0))?;
        Ok(Pinned { base: base.cast(), len })
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// The same on the host and, under unified addressing, on the device.
    pub fn address(&self) -> u64 {
        self.base as u64
    }

    /// # Panics
    /// The range lies outside.
    pub fn slice(&mut self, at: usize, len: usize) -> &mut [u8] {
        assert!(at + len <= self.len);
        // SAFETY: checked, owned, and borrowed as long as the slice.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(at), len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = cuda!(cuMemFreeHost(self.base.cast()));
    }
}

/// A captured section, ready to be replayed.
pub(crate) struct Graph(sys::CUgraphExec);

impl Graph {
    /// Records what `launch` puts on the stream; nothing of it runs. What it returns
    /// lives until the capture has ended.
    pub fn capture<T>(
        stream: sys::CUstream,
        launch: impl FnOnce() -> Result<T, CudaError>,
    ) -> Result<Graph, CudaError> {
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        cuda!(cuStreamBeginCapture_v2(stream, mode))?;
        let launched = launch();
        let mut graph = ptr::null_mut();
        // Capture is ended in any case: the stream is unusable before.
        let ended = cuda!(cuStreamEndCapture(stream, &mut graph));
        let _kept = launched?;
        ended?;
        let mut exec = ptr::null_mut();
        let instantiated = cuda!(cuGraphInstantiateWithFlags(&mut exec, graph, 0));
        let _ = cuda!(cuGraphDestroy(graph));
        instantiated?;
        let graph = Graph(exec);
        // Its memory on the device is taken now, not at the first replay.
        cuda!(cuGraphUpload(graph.0, stream))?;
        Ok(graph)
    }

    pub fn launch(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        cuda!(cuGraphLaunch(self.0, stream))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = cuda!(cuGraphExecDestroy(self.0));
    }
}

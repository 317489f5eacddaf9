//! Ops of the host's lane: functions that a stream calls when it has come to them, which
//! run the kernels of the CPU device on the page-locked slab. They call nothing of CUDA,
//! and what goes wrong in them is found when the device is waited for next.

use std::ffi::c_void;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, OnceLock};

use cudarc::driver::sys;
use plimsoll_cpu::HostOps;
use plimsoll_cpu::pool::Pool;
use plimsoll_plan::Layout;
use plimsoll_program::{Lane, Program};

use crate::driver::cuda;
use crate::error::CudaError;

/// What went wrong on the host since somebody last looked: only the first is kept, and
/// nothing runs behind it.
#[derive(Clone, Default)]
pub(crate) struct Failure(Arc<Mutex<Option<String>>>);

impl Failure {
    fn set(&self, text: String) {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(text);
    }

    fn is_set(&self) -> bool {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).is_some()
    }

    /// # Errors
    /// What went wrong; nothing has, afterwards.
    pub fn check(&self) -> Result<(), CudaError> {
        match self.0.lock().unwrap_or_else(|e| e.into_inner()).take() {
            Some(what) => Err(CudaError::Host { what }),
            None => Ok(()),
        }
    }
}

/// The host's threads of one device, started when a program first wants them.
pub(crate) struct HostThreads {
    count: usize,
    pool: OnceLock<Arc<Pool>>,
    pub failure: Failure,
}

impl HostThreads {
    pub fn new(count: usize) -> HostThreads {
        HostThreads { count: count.max(1), pool: OnceLock::new(), failure: Failure::default() }
    }

    fn pool(&self) -> Result<Arc<Pool>, CudaError> {
        if let Some(pool) = self.pool.get() {
            return Ok(Arc::clone(pool));
        }
        let pool = Pool::new(self.count).map_err(|e| CudaError::Host {
            what: format!("the system refuses {} threads: {e}", self.count),
        })?;
        Ok(Arc::clone(self.pool.get_or_init(|| Arc::new(pool))))
    }

    /// The calls of a section; none where nothing of it runs on the host.
    ///
    /// # Safety
    /// As for [`HostOps::new`].
    pub unsafe fn calls(
        &self,
        program: &Program,
        layout: &Layout,
        ops: &Range<usize>,
        host: (*mut u8, usize),
        rank: usize,
    ) -> Result<Option<HostCalls>, CudaError> {
        let on_host = |at: &usize| program.lane(&program.ops[*at].kind) == Lane::Host;
        if !ops.clone().any(|at| on_host(&at)) {
            return Ok(None);
        }
        // SAFETY: the caller's word.
        let all = Arc::new(unsafe { HostOps::new(program, layout, host, rank, self.pool()?) });
        let call = |at| HostCall { at, ops: Arc::clone(&all), failure: self.failure.clone() };
        Ok(Some(HostCalls(ops.clone().filter(on_host).map(call).collect())))
    }
}

/// What the calls of one section find when the stream has come to them: it must live as
/// long as they may come.
pub(crate) struct HostCalls(Box<[HostCall]>);

struct HostCall {
    at: usize,
    ops: Arc<HostOps>,
    failure: Failure,
}

impl HostCalls {
    /// Puts the call of op `at` on a stream.
    pub fn launch(&self, at: usize, stream: sys::CUstream) -> Result<(), CudaError> {
        let found = self.0.binary_search_by_key(&at, |call| call.at);
        let call = found
            .map(|n| &self.0[n])
            .map_err(|_| CudaError::Host { what: format!("op {at} was not prepared") })?;
        let data = std::ptr::from_ref(call).cast_mut().cast::<c_void>();
        cuda!(cuLaunchHostFunc(stream, Some(run), data))
    }
}

unsafe extern "C" fn run(data: *mut c_void) {
    // SAFETY: a call of a section whose `HostCalls` live, and which only reads them.
    let call = unsafe { &*data.cast::<HostCall>() };
    // Nothing may unwind into the driver, a poisoned lock's panic included.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        if call.failure.is_set() {
            return;
        }
        if let Err(what) = call.ops.run(call.at) {
            call.failure.set(format!("{}: {what}", call.ops.name(call.at)));
        }
    }));
}

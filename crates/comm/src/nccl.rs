//! NVIDIA's collectives over memory of GPUs, from a library that is found at run time
//! (NCCL 2.18 or newer; the C interface is stable since 2.10).

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::OnceLock;

use plimsoll_arch::DType;

use crate::{CommError, Communicator};

type Status = c_int;
const SUCCESS: Status = 0;
const IN_PROGRESS: Status = 7;
/// `ncclSum` of `ncclRedOp_t`.
const SUM: c_int = 0;

/// `ncclUniqueId`: where the ranks of a communicator meet.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

type Handle = *mut c_void;
/// A CUDA stream.
pub type Stream = *mut c_void;

/// The functions of the library that are called.
struct Library {
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> Status,
    comm_init_rank: unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int) -> Status,
    comm_abort: unsafe extern "C" fn(Handle) -> Status,
    comm_destroy: unsafe extern "C" fn(Handle) -> Status,
    comm_get_async_error: unsafe extern "C" fn(Handle, *mut Status) -> Status,
    get_error_string: unsafe extern "C" fn(Status) -> *const c_char,
    group_start: unsafe extern "C" fn() -> Status,
    group_end: unsafe extern "C" fn() -> Status,
    all_gather:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Handle, Stream) -> Status,
    reduce_scatter: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        Handle,
        Stream,
    ) -> Status,
    all_reduce: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        Handle,
        Stream,
    ) -> Status,
}

const FILE: &str = "libnccl.so.2";

/// Opens the library: by the loader's own path, then in `folders`. Once opened it stays.
fn library(folders: &[PathBuf]) -> Result<&'static Library, CommError> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    let open = || {
        let named = [FILE, "libnccl.so"].map(PathBuf::from);
        let found = folders.iter().map(|f| f.join(FILE)).filter(|f| f.is_file());
        named.into_iter().chain(found).find_map(|path| {
            let path = CString::new(path.as_os_str().as_bytes()).ok()?;
            // SAFETY: loading NVIDIA's library runs its initializers and no more.
            let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            // SAFETY: a handle that was just opened and is never closed.
            if handle.is_null() { None } else { unsafe { Library::of(handle) } }
        })
    };
    LIBRARY.get_or_init(open).as_ref().ok_or(CommError::NoNccl { file: FILE })
}

impl Library {
    /// # Safety
    /// `handle` is that of NCCL, and stays open.
    unsafe fn of(handle: *mut c_void) -> Option<Library> {
        macro_rules! function {
            ($name:literal) => {{
                // SAFETY: the name is a C string.
                let symbol = unsafe { libc::dlsym(handle, $name.as_ptr()) };
                if symbol.is_null() {
                    return None;
                }
                // SAFETY: nccl.h declares this symbol with the type of the field.
                unsafe { std::mem::transmute_copy(&symbol) }
            }};
        }
        Some(Library {
            get_unique_id: function!(c"ncclGetUniqueId"),
            comm_init_rank: function!(c"ncclCommInitRank"),
            comm_abort: function!(c"ncclCommAbort"),
            comm_destroy: function!(c"ncclCommDestroy"),
            comm_get_async_error: function!(c"ncclCommGetAsyncError"),
            get_error_string: function!(c"ncclGetErrorString"),
            group_start: function!(c"ncclGroupStart"),
            group_end: function!(c"ncclGroupEnd"),
            all_gather: function!(c"ncclAllGather"),
            reduce_scatter: function!(c"ncclReduceScatter"),
            all_reduce: function!(c"ncclAllReduce"),
        })
    }

    fn check(&self, call: &'static str, status: Status) -> Result<(), CommError> {
        if status == SUCCESS || status == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: the library hands out a static string.
        let text = unsafe { CStr::from_ptr((self.get_error_string)(status)) };
        Err(CommError::Nccl { call, cause: text.to_string_lossy().into_owned() })
    }
}

/// One GPU's end of a communicator. Everything is queued on a stream; the caller waits
/// for that, and looks at [`Nccl::check`] while it does.
pub struct Nccl {
    library: &'static Library,
    /// Null once it was given back.
    handle: Cell<Handle>,
}

// SAFETY: calls are the caller's to keep apart; the handle belongs to no thread.
unsafe impl Send for Nccl {}

impl Nccl {
    /// The ranks of `group` meet; each has made its own GPU current in its thread.
    /// `folders` may hold the library where the loader does not find it.
    ///
    /// # Errors
    /// There is no such library, or NCCL's own.
    pub fn new(group: &mut dyn Communicator, folders: &[PathBuf]) -> Result<Nccl, CommError> {
        let library = library(folders)?;
        let mut id = UniqueId([0; 128]);
        if group.rank() == 0 {
            // SAFETY: a place for the result.
            library.check("ncclGetUniqueId", unsafe { (library.get_unique_id)(&mut id) })?;
        }
        group.broadcast(&mut id.0, 0)?;
        // From here on ranks wait for each other inside of NCCL: a rank that has failed
        // before, for want of memory or of this library, must not be waited for there.
        group.barrier()?;
        let mut handle = std::ptr::null_mut();
        let (ranks, rank) = (group.ranks() as c_int, group.rank() as c_int);
        // SAFETY: as above; blocks until all ranks are here.
        let status = unsafe { (library.comm_init_rank)(&mut handle, ranks, id, rank) };
        library.check("ncclCommInitRank", status)?;
        Ok(Nccl { library, handle: Cell::new(handle) })
    }

    fn handle(&self) -> Result<Handle, CommError> {
        let handle = self.handle.get();
        match handle.is_null() {
            true => Err(CommError::Nccl { call: "a collective", cause: "it was aborted".into() }),
            false => Ok(handle),
        }
    }

    /// Errors of what was queued: a network or a GPU that failed.
    ///
    /// # Errors
    /// NCCL's own.
    pub fn check(&self) -> Result<(), CommError> {
        let handle = self.handle()?;
        let mut status = SUCCESS;
        // SAFETY: a live handle and a place for the result.
        let call = unsafe { (self.library.comm_get_async_error)(handle, &mut status) };
        self.library.check("ncclCommGetAsyncError", call)?;
        self.library.check("a collective", status)
    }

    /// Ends what is queued, whatever other ranks do.
    pub fn abort(&self) {
        let handle = self.handle.replace(std::ptr::null_mut());
        if !handle.is_null() {
            // SAFETY: a live handle, not used again.
            unsafe { (self.library.comm_abort)(handle) };
        }
    }

    /// Runs `calls` as one group: one launch for all of them.
    ///
    /// # Safety
    /// As for the calls.
    ///
    /// # Errors
    /// NCCL's own.
    pub unsafe fn group(
        &self,
        calls: impl FnOnce(&Nccl) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        // SAFETY: no preconditions.
        self.library.check("ncclGroupStart", unsafe { (self.library.group_start)() })?;
        let called = calls(self);
        // SAFETY: ends what was started, also where a call failed.
        let ended = self.library.check("ncclGroupEnd", unsafe { (self.library.group_end)() });
        called.and(ended)
    }

    /// `to` = the parts of all ranks, `elements` each.
    ///
    /// # Safety
    /// Addresses of this GPU with that much room, in use by nothing else on other
    /// streams; they stay until the stream has come past.
    ///
    /// # Errors
    /// NCCL's own.
    pub unsafe fn all_gather(
        &self,
        part: u64,
        to: u64,
        elements: usize,
        dtype: DType,
        stream: Stream,
    ) -> Result<(), CommError> {
        let (handle, code) = (self.handle()?, code(dtype));
        // SAFETY: the caller's.
        let status = unsafe {
            (self.library.all_gather)(part as _, to as _, elements, code, handle, stream)
        };
        self.library.check("ncclAllGather", status)
    }

    /// `part` (`elements`) = this rank's part of the sum of `from` over all ranks.
    ///
    /// # Safety
    /// As for [`Nccl::all_gather`].
    ///
    /// # Errors
    /// NCCL's own.
    pub unsafe fn reduce_scatter(
        &self,
        from: u64,
        part: u64,
        elements: usize,
        dtype: DType,
        stream: Stream,
    ) -> Result<(), CommError> {
        let (handle, code) = (self.handle()?, code(dtype));
        // SAFETY: the caller's.
        let status = unsafe {
            (self.library.reduce_scatter)(from as _, part as _, elements, code, SUM, handle, stream)
        };
        self.library.check("ncclReduceScatter", status)
    }

    /// `data` becomes its sum over all ranks.
    ///
    /// # Safety
    /// As for [`Nccl::all_gather`].
    ///
    /// # Errors
    /// NCCL's own.
    pub unsafe fn all_reduce(
        &self,
        data: u64,
        elements: usize,
        dtype: DType,
        stream: Stream,
    ) -> Result<(), CommError> {
        let (handle, code) = (self.handle()?, code(dtype));
        // SAFETY: the caller's.
        let status = unsafe {
            (self.library.all_reduce)(data as _, data as _, elements, code, SUM, handle, stream)
        };
        self.library.check("ncclAllReduce", status)
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        let handle = self.handle.replace(std::ptr::null_mut());
        if handle.is_null() {
            return;
        }
        // A rank that failed must not wait for the others here.
        let end = match std::thread::panicking() {
            true => self.library.comm_abort,
            false => self.library.comm_destroy,
        };
        // SAFETY: a live handle, not used again.
        unsafe { end(handle) };
    }
}

/// `ncclDataType_t`. NCCL has no 16-bit integers and refuses -1; state is never sent.
fn code(dtype: DType) -> c_int {
    match dtype {
        DType::I16 => -1,
        DType::U8 => 1,
        DType::I32 => 2,
        DType::F32 => 7,
        DType::Bf16 => 9,
    }
}

//! Kernels by name: loaded from the embedded machine code, or compiled by NVRTC
//! at the first run and kept in a disk cache.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::fs;
use std::ptr;

use cudarc::driver::sys::{self, CUfunction_attribute_enum as FunctionAttribute};
use cudarc::nvrtc::sys as nvrtc;
use plimsoll_arch::DType;

use crate::driver::{Context, cuda};
use crate::error::CudaError;
use crate::library;

/// One file of kernels.
struct Family {
    name: &'static str,
    source: &'static str,
    /// A fat binary, where nvcc was at hand when this program was built.
    binary: Option<&'static [u8]>,
}

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// A pointer to an argument, as the driver wants it.
pub(crate) fn argument<T>(value: &T) -> *mut c_void {
    ptr::from_ref(value).cast_mut().cast()
}

/// Pointers to arguments.
fn pointers(name: &str, args: &[Arg]) -> [*mut c_void; 24] {
    let mut pointers = [ptr::null_mut::<c_void>(); 24];
    debug_assert!(args.len() <= pointers.len(), "{name}");
    for (pointer, arg) in pointers.iter_mut().zip(args) {
        *pointer = match arg {
            Arg::Ptr(x) => argument(x),
            Arg::Int(x) => argument(x),
            Arg::Long(x) => argument(x),
            Arg::Float(x) => argument(x),
        };
    }
    pointers
}

/// A kernel argument.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arg {
    Ptr(u64),
    Int(i32),
    Long(i64),
    Float(f32),
}

/// Shape of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub blocks: (u64, u64, u64),
    pub threads: (u32, u32),
    /// Bytes of dynamic shared memory.
    pub shared: u32,
}

impl Grid {
    pub fn line(blocks: usize, threads: u32) -> Grid {
        Grid { blocks: (blocks as u64, 1, 1), threads: (threads, 1), shared: 0 }
    }
}

/// The modules and functions that were needed so far.
pub(crate) struct Kernels {
    compute_capability: (i32, i32),
    modules: RefCell<HashMap<&'static str, sys::CUmodule>>,
    functions: RefCell<HashMap<String, sys::CUfunction>>,
}

/// The suffix of a type in a kernel's name.
pub(crate) fn suffix(dtype: DType) -> &'static str {
    match dtype {
        DType::Bf16 => "bf16",
        _ => "f32",
    }
}

/// Elements of a 16-byte access.
pub(crate) fn width(dtype: DType) -> usize {
    16 / dtype.bytes()
}

impl Kernels {
    pub fn new(context: &Context) -> Kernels {
        Kernels {
            compute_capability: context.info.compute_capability,
            modules: RefCell::default(),
            functions: RefCell::default(),
        }
    }

    /// Whether this program was built with such a family.
    pub fn has(family: &str) -> bool {
        FAMILIES.iter().any(|f| f.name == family)
    }

    /// Launches a kernel of a family on a stream.
    pub fn launch(
        &self,
        (family, name): (&'static str, &str),
        stream: sys::CUstream,
        grid: Grid,
        args: &[Arg],
    ) -> Result<(), CudaError> {
        let mut pointers = pointers(name, args);
        self.launch_pointers((family, name), stream, grid, &mut pointers)
    }

    /// As [`Kernels::launch`], for a kernel that waits itself for those before it
    /// (dependent.cuh): it may start while they still run.
    pub fn launch_waiting(
        &self,
        (family, name): (&'static str, &str),
        stream: sys::CUstream,
        grid: Grid,
        args: &[Arg],
    ) -> Result<(), CudaError> {
        let mut pointers = pointers(name, args);
        self.launch_early((family, name), stream, grid, &mut pointers)
    }

    /// As [`Kernels::launch_waiting`], with one struct as the only argument.
    pub fn launch_struct<T>(
        &self,
        (family, name): (&'static str, &str),
        stream: sys::CUstream,
        grid: Grid,
        value: &T,
    ) -> Result<(), CudaError> {
        let mut pointers = [argument(value)];
        self.launch_early((family, name), stream, grid, &mut pointers)
    }

    fn launch_early(
        &self,
        (family, name): (&'static str, &str),
        stream: sys::CUstream,
        grid: Grid,
        pointers: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        // Only the machine code for this chip has the instruction to wait.
        if self.compute_capability != (9, 0) {
            return self.launch_pointers((family, name), stream, grid, pointers);
        }
        let function = self.function(family, name)?;
        self.allow_shared(function, grid.shared)?;
        // Kernels that cut the first level of cache differently cannot run side by side.
        let carveout = FunctionAttribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        cuda!(cuFuncSetAttribute(function, carveout, 100))?;
        // SAFETY: plain bytes, all of them valid as zero.
        let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        attribute.id =
            sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute.value.programmaticStreamSerializationAllowed = 1;
        let (x, y, z) = grid.blocks;
        let config = sys::CUlaunchConfig {
            gridDimX: x as u32,
            gridDimY: y as u32,
            gridDimZ: z as u32,
            blockDimX: grid.threads.0,
            blockDimY: grid.threads.1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared,
            hStream: stream,
            attrs: &mut attribute,
            numAttrs: 1,
        };
        cuda!(cuLaunchKernelEx(&config, function, pointers.as_mut_ptr(), ptr::null_mut()))
    }

    /// As [`Kernels::launch`], with pointers to the arguments themselves.
    pub fn launch_pointers(
        &self,
        (family, name): (&'static str, &str),
        stream: sys::CUstream,
        grid: Grid,
        pointers: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let (x, y, z) = grid.blocks;
        if x == 0 || y == 0 || z == 0 {
            return Ok(());
        }
        if x > 0x7fff_ffff || y > 65_535 || z > 65_535 {
            let what = format!("a launch of {x} x {y} x {z} blocks is too large");
            return Err(CudaError::Unsupported { op: name.to_owned(), what });
        }
        let function = self.function(family, name)?;
        self.allow_shared(function, grid.shared)?;
        cuda!(cuLaunchKernel(
            function,
            x as u32,
            y as u32,
            z as u32,
            grid.threads.0,
            grid.threads.1,
            1,
            grid.shared,
            stream,
            pointers.as_mut_ptr(),
            ptr::null_mut(),
        ))
    }

    /// Dynamic shared memory above 48 KiB must be asked for.
    fn allow_shared(&self, function: sys::CUfunction, bytes: u32) -> Result<(), CudaError> {
        if bytes <= 48 * 1024 {
            return Ok(());
        }
        let attribute = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        cuda!(cuFuncSetAttribute(function, attribute, bytes as c_int))
    }

    pub fn function(&self, family: &'static str, name: &str) -> Result<sys::CUfunction, CudaError> {
        if let Some(function) = self.functions.borrow().get(name) {
            return Ok(*function);
        }
        let module = self.module(family)?;
        let missing =
            || CudaError::MissingKernel { family: family.to_owned(), name: name.to_owned() };
        let symbol = CString::new(name).map_err(|_| missing())?;
        let mut function = ptr::null_mut();
        cuda!(cuModuleGetFunction(&mut function, module, symbol.as_ptr()))
            .map_err(|_| missing())?;
        self.functions.borrow_mut().insert(name.to_owned(), function);
        Ok(function)
    }

    fn module(&self, family: &'static str) -> Result<sys::CUmodule, CudaError> {
        if let Some(module) = self.modules.borrow().get(family) {
            return Ok(*module);
        }
        let missing = || CudaError::MissingKernel { family: family.to_owned(), name: "*".into() };
        let entry = FAMILIES.iter().find(|f| f.name == family).ok_or_else(missing)?;
        // For tests of the second way.
        let forced = std::env::var_os("PLIMSOLL_NVRTC").is_some_and(|v| !v.is_empty());
        let mut module = ptr::null_mut();
        match entry.binary {
            Some(binary) if !forced => {
                cuda!(cuModuleLoadData(&mut module, binary.as_ptr().cast()))?;
            }
            _ => {
                let binary = compiled(entry, self.compute_capability)?;
                cuda!(cuModuleLoadData(&mut module, binary.as_ptr().cast()))?;
            }
        }
        self.modules.borrow_mut().insert(family, module);
        Ok(module)
    }

    /// Unloads everything; the context is current.
    pub fn unload(&self) {
        self.functions.borrow_mut().clear();
        for (_, module) in self.modules.borrow_mut().drain() {
            let _ = cuda!(cuModuleUnload(module));
        }
    }
}

/// Machine code of a family for one chip, from the disk cache or from NVRTC.
fn compiled(family: &Family, compute_capability: (i32, i32)) -> Result<Vec<u8>, CudaError> {
    library::need_nvrtc()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: two integers to write to; the library is there.
    unsafe { nvrtc::nvrtcVersion(&mut major, &mut minor) };
    let arch = architecture(compute_capability);
    let mut hash = Fnv::new();
    hash.write(family.source.as_bytes());
    HEADERS.iter().for_each(|(_, text)| hash.write(text.as_bytes()));
    hash.write(format!("{arch} {major}.{minor} {OPTIONS:?}").as_bytes());
    let path = library::cache_folder()
        .map(|f| f.join("kernels").join(format!("{}-{arch}-{:016x}.cubin", family.name, hash.0)));
    if let Some(binary) = path.as_ref().and_then(|p| fs::read(p).ok()).filter(|b| is_elf(b)) {
        return Ok(binary);
    }
    let binary = compile(family, &arch)?;
    if let Some(path) = path {
        library::write_cache(&path, &binary);
    }
    Ok(binary)
}

/// A damaged file would be a strange error of the driver.
fn is_elf(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x7fELF")
}

const OPTIONS: [&str; 1] = ["--std=c++17"];

/// `sm_90a` has Hopper's own instructions, later chips run code of their own.
fn architecture((major, minor): (i32, i32)) -> String {
    if (major, minor) == (9, 0) { "sm_90a".to_owned() } else { format!("sm_{major}{minor}") }
}

fn compile(family: &Family, arch: &str) -> Result<Vec<u8>, CudaError> {
    let file = format!("{}.cu", family.name);
    let text = |s: &str| CString::new(s).expect("sources and names hold no zero byte");
    let failed =
        |log: String| CudaError::Compile { file: file.clone(), arch: arch.to_owned(), log };
    let source = text(family.source);
    let name = text(&file);
    let headers: Vec<(CString, CString)> =
        HEADERS.iter().map(|(name, source)| (text(name), text(source))).collect();
    let header_names: Vec<_> = headers.iter().map(|h| h.0.as_ptr()).collect();
    let header_sources: Vec<_> = headers.iter().map(|h| h.1.as_ptr()).collect();
    let mut options: Vec<CString> = OPTIONS.iter().map(|o| text(o)).collect();
    options.push(text(&format!("--gpu-architecture={arch}")));
    let options: Vec<_> = options.iter().map(|o| o.as_ptr()).collect();
    // SAFETY: all strings live until the program is destroyed; buffers have the
    // sizes that NVRTC asks for.
    unsafe {
        let mut program = ptr::null_mut();
        let ok = nvrtc::nvrtcResult::NVRTC_SUCCESS;
        let created = nvrtc::nvrtcCreateProgram(
            &mut program,
            source.as_ptr(),
            name.as_ptr(),
            headers.len() as c_int,
            header_sources.as_ptr(),
            header_names.as_ptr(),
        );
        if created != ok {
            return Err(failed(format!("{created:?}")));
        }
        let status = nvrtc::nvrtcCompileProgram(program, options.len() as c_int, options.as_ptr());
        let result = if status == ok {
            let mut size = 0;
            nvrtc::nvrtcGetCUBINSize(program, &mut size);
            let mut binary = vec![0u8; size];
            match nvrtc::nvrtcGetCUBIN(program, binary.as_mut_ptr().cast()) {
                status if status == ok && size > 0 => Ok(binary),
                status => Err(failed(format!("no machine code ({status:?})"))),
            }
        } else {
            let mut size = 0;
            nvrtc::nvrtcGetProgramLogSize(program, &mut size);
            let mut log = vec![0u8; size];
            nvrtc::nvrtcGetProgramLog(program, log.as_mut_ptr().cast());
            let log = String::from_utf8_lossy(&log);
            Err(failed(format!("{status:?}\n{}", log.trim_end_matches('\0'))))
        };
        nvrtc::nvrtcDestroyProgram(&mut program);
        result
    }
}

/// The FNV-1a hash: stable from build to build, unlike the standard library's.
struct Fnv(u64);

impl Fnv {
    fn new() -> Fnv {
        Fnv(0xcbf2_9ce4_8422_2325)
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// NVRTC needs no GPU: every kernel compiles for the oldest chip that it is for.
    #[test]
    fn every_family_compiles_with_nvrtc() {
        if let Err(missing) = library::need_nvrtc() {
            eprintln!("skipped: {missing}");
            return;
        }
        for family in FAMILIES {
            let arch = if family.name.ends_with("_sm90") { "sm_90a" } else { "sm_80" };
            let start = std::time::Instant::now();
            let binary = compile(family, arch).unwrap_or_else(|e| panic!("{e}"));
            assert!(is_elf(&binary), "{} {arch}", family.name);
            println!("{} {arch}: {:.1} s", family.name, start.elapsed().as_secs_f32());
        }
    }
}

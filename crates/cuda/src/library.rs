//! Finding NVIDIA's libraries, so that one binary starts with and without them.
//!
//! The loader's own path comes first (a toolkit, LD_LIBRARY_PATH). What is not
//! there is looked for where PyTorch users already have it: in the `nvidia-*`
//! wheels of an active Python environment. A library opened by its absolute path
//! satisfies every later look-up by name, so cudarc then finds it.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{env, fs};

use cudarc::{cublaslt, driver, nvrtc};

use crate::error::CudaError;

/// Makes the driver's library usable.
pub(crate) fn need_driver() -> Result<(), CudaError> {
    // SAFETY: opens a library and closes it again.
    let present = unsafe { driver::sys::is_culib_present() }
        || (preload("libcuda.so.1", &["/usr/local/nvidia/lib64".into()])
            // SAFETY: as above.
            && unsafe { driver::sys::is_culib_present() });
    if present { Ok(()) } else { Err(CudaError::NoDriver) }
}

/// Makes cuBLASLt usable.
pub(crate) fn need_cublaslt() -> Result<(), CudaError> {
    // SAFETY: opens a library and closes it again.
    let look = || unsafe { cublaslt::sys::is_culib_present() };
    let found = look()
        || ["libcublasLt.so.13", "libcublasLt.so.12"]
            .iter()
            .any(|file| preload(file, &library_folders()) && look());
    found.then_some(()).ok_or(CudaError::MissingLibrary {
        library: "cuBLASLt",
        file: "libcublasLt.so.13",
        wheel: "nvidia-cublas",
    })
}

/// Makes NVRTC usable.
pub(crate) fn need_nvrtc() -> Result<(), CudaError> {
    // SAFETY: opens a library and closes it again.
    let look = || unsafe { nvrtc::sys::is_culib_present() };
    let found = look()
        || ["libnvrtc.so.13", "libnvrtc.so.12"]
            .iter()
            .any(|file| preload(file, &library_folders()) && look());
    found.then_some(()).ok_or(CudaError::MissingLibrary {
        library: "NVRTC",
        file: "libnvrtc.so.13",
        wheel: "nvidia-cuda-nvrtc",
    })
}

/// Opens a file of that name in the first folder that has one, for good.
pub(crate) fn preload(file: &str, folders: &[PathBuf]) -> bool {
    folders.iter().map(|folder| folder.join(file)).any(|path| {
        path.is_file()
            && CString::new(path.as_os_str().as_bytes()).is_ok_and(|path| {
                // SAFETY: loading NVIDIA's library runs its initializers and no more.
                !unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) }
                    .is_null()
            })
    })
}

/// Folders that may hold NVIDIA's libraries, most specific first.
pub(crate) fn library_folders() -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        if let Some(root) = env::var_os(name) {
            folders.push(Path::new(&root).join("lib64"));
            folders.push(Path::new(&root).join("lib"));
        }
    }
    for prefix in python_prefixes() {
        for packages in package_folders(&prefix) {
            let nvidia = packages.join("nvidia");
            for part in ["cu13", "cublas", "cuda_nvrtc", "cudnn", "nccl"] {
                folders.push(nvidia.join(part).join("lib"));
            }
        }
        // Conda keeps libraries beside the interpreter's own.
        folders.push(prefix.join("lib"));
        folders.push(prefix.join("targets/x86_64-linux/lib"));
    }
    folders.push("/usr/local/cuda/lib64".into());
    folders.push("/usr/local/cuda-13.0/targets/x86_64-linux/lib".into());
    folders.retain(|folder| folder.is_dir());
    folders
}

/// Roots of the Python environments that are active: by variable, and around the
/// `python3` on PATH (a virtual environment's interpreter is a link, so both the
/// place of the link and the place that it names count).
fn python_prefixes() -> Vec<PathBuf> {
    let mut prefixes: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(env::var_os).map(Into::into).collect();
    let path = env::var_os("PATH").unwrap_or_default();
    for folder in env::split_paths(&path) {
        let python = folder.join("python3");
        if !python.is_file() {
            continue;
        }
        prefixes.extend(folder.parent().map(Into::into));
        if let Ok(real) = fs::canonicalize(&python) {
            prefixes.extend(real.parent().and_then(Path::parent).map(Into::into));
        }
        break;
    }
    prefixes
}

/// `lib/python3.x/site-packages` (and Debian's `dist-packages`) of a prefix.
fn package_folders(prefix: &Path) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for lib in ["lib", "lib64", "local/lib"] {
        let Ok(entries) = fs::read_dir(prefix.join(lib)) else { continue };
        for entry in entries.flatten() {
            if entry.file_name().as_bytes().starts_with(b"python3") {
                folders.push(entry.path().join("site-packages"));
                folders.push(entry.path().join("dist-packages"));
            }
        }
    }
    folders
}

/// Where this program keeps what it may delete: `$XDG_CACHE_HOME/plimsoll`.
pub(crate) fn cache_folder() -> Option<PathBuf> {
    let base = env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|p| p.is_absolute());
    let base = base.or_else(|| env::var_os("HOME").map(|home| Path::new(&home).join(".cache")))?;
    Some(base.join("plimsoll"))
}

/// Writes a file whole or not at all: others may read it meanwhile. A cache that
/// cannot be written is no error.
pub(crate) fn write_cache(path: &Path, bytes: &[u8]) {
    // Ranks that are threads of this process may write the same file.
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let Some(folder) = path.parent() else { return };
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let temporary = path.with_extension(format!("{}.{count}.tmp", std::process::id()));
    let written = fs::create_dir_all(folder)
        .and_then(|()| fs::write(&temporary, bytes))
        .and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
}

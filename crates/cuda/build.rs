//! Embeds the kernels: as machine code when `nvcc` is at hand, always as source.
//!
//! nvcc is looked for in `CUDA_HOME`, `CUDA_PATH`, on `PATH` and in the PyPI
//! wheels of an active Python environment. Without it nothing is lost but the
//! first start: the device compiles the sources with NVRTC then.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-changed=kernels");
    println!("cargo::rerun-if-changed=build.rs");
    for name in ["CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "PLIMSOLL_NVCC"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let kernels = fs::canonicalize("kernels").expect("the kernels are part of the crate");
    let mut files: Vec<PathBuf> = fs::read_dir(&kernels)
        .expect("a folder")
        .map(|entry| entry.expect("a readable folder").path())
        .collect();
    files.sort();
    let nvcc = find_nvcc();
    let mut list = String::from("static FAMILIES: &[Family] = &[\n");
    let mut headers = String::from("static HEADERS: &[(&str, &str)] = &[\n");
    for file in &files {
        let name = file.file_stem().and_then(|s| s.to_str()).expect("names are ASCII");
        match file.extension().and_then(|e| e.to_str()) {
            Some("cuh") => {
                writeln!(headers, "    ({:?}, include_str!({file:?})),", format!("{name}.cuh"))
                    .expect("a string");
            }
            Some("cu") => {
                let fatbin = nvcc.as_deref().and_then(|nvcc| compile(nvcc, file, name, &out));
                let binary = fatbin
                    .map_or("None".to_owned(), |path| format!("Some(include_bytes!({path:?}))"));
                writeln!(
                    list,
                    "    Family {{ name: {name:?}, source: include_str!({file:?}), binary: {binary} }},"
                )
                .expect("a string");
            }
            _ => {}
        }
    }
    fs::write(out.join("kernels.rs"), format!("{list}];\n{headers}];\n")).expect("OUT_DIR");
}

/// A fat binary of one file, or none with a warning that says why.
fn compile(nvcc: &Path, file: &Path, name: &str, out: &Path) -> Option<PathBuf> {
    let target = out.join(format!("{name}.fatbin"));
    // A file for one chip alone says so in its name.
    let codes: &[&str] = if name.ends_with("_sm90") {
        &["arch=compute_90a,code=sm_90a"]
    } else {
        &[
            "arch=compute_80,code=sm_80",
            "arch=compute_90a,code=sm_90a",
            "arch=compute_80,code=compute_80",
        ]
    };
    // Compiling all families takes a minute: only what changed is compiled again.
    let stamp = target.with_extension("stamp");
    let now = format!("{nvcc:?} {codes:?}\n{}", sources(file));
    if target.is_file() && fs::read_to_string(&stamp).is_ok_and(|then| then == now) {
        return Some(target);
    }
    let mut command = Command::new(nvcc);
    command.args(["-fatbin", "-std=c++17", "-O3", "--threads", "3", "-o"]).arg(&target).arg(file);
    for code in codes {
        command.args(["-gencode", code]);
    }
    match command.output() {
        Ok(output) if output.status.success() => {
            let _ = fs::write(stamp, now);
            Some(target)
        }
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stderr);
            let line = text.lines().find(|l| l.contains("error")).unwrap_or("no message");
            println!("cargo::warning=nvcc: {name}.cu: {line}; it is compiled at first run instead");
            None
        }
        Err(cause) => {
            println!("cargo::warning=nvcc did not start: {cause}");
            None
        }
    }
}

/// A kernel file and every header beside it.
fn sources(file: &Path) -> String {
    let mut text = fs::read_to_string(file).unwrap_or_default();
    let beside = file.parent().and_then(|folder| fs::read_dir(folder).ok());
    let mut headers: Vec<PathBuf> = beside
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|e| e == "cuh"))
        .collect();
    headers.sort();
    headers.iter().for_each(|h| text += &fs::read_to_string(h).unwrap_or_default());
    text
}

fn find_nvcc() -> Option<PathBuf> {
    if let Some(path) = env::var_os("PLIMSOLL_NVCC") {
        // Empty: build without, whatever is installed.
        return (!path.is_empty()).then(|| PathBuf::from(path));
    }
    let mut places: Vec<PathBuf> = Vec::new();
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        places.extend(env::var_os(name).map(|d| PathBuf::from(d).join("bin")));
    }
    if let Some(path) = env::var_os("PATH") {
        places.extend(env::split_paths(&path));
    }
    for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        let Some(root) = env::var_os(name) else { continue };
        let Ok(lib) = fs::read_dir(PathBuf::from(root).join("lib")) else { continue };
        places.extend(
            lib.flatten().map(|python| python.path().join("site-packages/nvidia/cu13/bin")),
        );
    }
    places.into_iter().map(|dir| dir.join("nvcc")).find(|nvcc| nvcc.is_file())
}

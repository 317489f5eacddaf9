//! Where profiles come from: the user's folder, which `plimsoll calibrate`
//! writes, before what this program brings along.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use plimsoll_cuda::{DeviceInfo, device_info};
use plimsoll_plan::{DeviceKind, DeviceProfile, closest_gpu, cpu_profile, gpu, gpu_names};

use crate::exit::Stop;

/// The file of a device's profile: `$XDG_CONFIG_HOME/plimsoll/profiles/NAME.json`,
/// below `~/.config` where that is not set; none without a home.
pub fn path_of(name: &str) -> Option<PathBuf> {
    let base = env::var_os("XDG_CONFIG_HOME").map(PathBuf::from).filter(|p| p.is_absolute());
    let base = base.or_else(|| env::var_os("HOME").map(|home| Path::new(&home).join(".config")))?;
    Some(base.join("plimsoll").join("profiles").join(format!("{}.json", slug(name))))
}

/// Letters, digits and single dashes.
fn slug(name: &str) -> String {
    let words = name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|w| !w.is_empty());
    words.map(str::to_lowercase).collect::<Vec<_>>().join("-")
}

/// What the user's folder has for a device; none where it has nothing.
///
/// # Errors
/// There is a file, and it is no profile.
fn users(name: &str) -> Result<Option<DeviceProfile>, Stop> {
    match path_of(name).filter(|path| path.exists()) {
        Some(path) => DeviceProfile::read(&path).map(Some).map_err(Stop::input),
        None => Ok(None),
    }
}

/// The name under which the catalogue, or else the driver, knows a GPU.
pub fn gpu_name(info: &DeviceInfo) -> String {
    gpu(&info.name).map_or_else(|| info.name.clone(), |g| g.name.to_owned())
}

/// This machine's CPU with so many threads.
pub fn cpu_name(threads: usize) -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == "model name").then(|| value.trim().to_owned())
    });
    format!("{}, {threads} threads", model.as_deref().unwrap_or("cpu"))
}

/// Version of the NVIDIA driver.
pub fn driver_version(info: &DeviceInfo) -> String {
    let text = fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    // NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build ...
    let version = text
        .split_whitespace()
        .find(|word| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.'));
    let cuda = format!("CUDA {}.{}", info.driver / 1000, info.driver % 1000 / 10);
    version.map_or(cuda.clone(), |version| format!("{version} ({cuda})"))
}

/// A GPU that the user names: calibrated, in the catalogue, or the one that this
/// machine has.
///
/// # Errors
/// Nobody knows it, or its file is no profile.
pub fn named_gpu(name: &str) -> Result<DeviceProfile, Stop> {
    let known = gpu(name);
    if let Some(profile) = users(known.map_or(name, |g| g.name))? {
        return match profile.kind {
            DeviceKind::Cuda => Ok(profile),
            DeviceKind::Cpu => Err(Stop::Input(format!("--gpu {name}: its profile is a CPU's"))),
        };
    }
    if let Some(gpu) = known {
        return Ok(gpu.profile());
    }
    match device_info(0) {
        Ok(info) if slug(&info.name) == slug(name) => present_gpu(&info),
        _ => Err(Stop::Input(format!(
            "GPU `{name}` is not in the catalogue; it knows {}; `plimsoll calibrate` on a machine \
             that has this GPU writes a profile for --profile FILE",
            gpu_names().join(", ")
        ))),
    }
}

/// The GPU of this machine: calibrated, in the catalogue, or scaled from the one of
/// the catalogue that is closest.
///
/// # Errors
/// Its file is no profile.
pub fn present_gpu(info: &DeviceInfo) -> Result<DeviceProfile, Stop> {
    if let Some(profile) = users(&gpu_name(info))? {
        return Ok(profile);
    }
    Ok(match gpu(&info.name) {
        Some(gpu) => gpu.profile(),
        None => closest_gpu(info.compute_capability, info.memory_bytes)
            .stand_in(&info.name, info.memory_bytes),
    })
}

/// This machine's CPU: calibrated, or a guess.
///
/// # Errors
/// Its file is no profile.
pub fn cpu(threads: usize) -> Result<DeviceProfile, Stop> {
    let memory = plimsoll_measure::machine_memory_limit().unwrap_or(0);
    let measured = users(&cpu_name(threads))?;
    Ok(measured.unwrap_or_else(|| cpu_profile(threads, memory)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_file_names() {
        assert_eq!(slug("NVIDIA RTX 6000 Ada Generation"), "nvidia-rtx-6000-ada-generation");
        assert_eq!(
            slug("AMD EPYC 7763 64-Core Processor, 2 threads"),
            "amd-epyc-7763-64-core-processor-2-threads"
        );
        assert_eq!(slug("../../etc/passwd"), "etc-passwd");
    }
}

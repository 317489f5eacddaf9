//! What devices are and how fast: memory, rates, and what the driver keeps.
//!
//! Rates are what a program gets, not what a sheet of paper promises. Those
//! marked `measured` were; the others are the maker's dense figures for the
//! SXM or desktop part times the fraction that was measured on the H200.

use plimsoll_arch::DType;
use serde::Serialize;

/// A kind of device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceProfile {
    pub name: String,
    pub memory_bytes: u64,
    /// Matrix products in bf16 with float32 accumulation, FLOP/s.
    pub bf16_flops: f64,
    /// Matrix products in float32, FLOP/s.
    pub f32_flops: f64,
    /// Everything that is no matrix product, FLOP/s.
    pub vector_flops: f64,
    /// Bytes read plus written, a second.
    pub memory_bytes_per_second: f64,
    /// Between host and device, one way, bytes a second.
    pub link_bytes_per_second: f64,
    /// From the end of one op to the start of the next.
    pub op_overhead_seconds: f64,
    /// What context, modules and libraries take outside the slab.
    pub overhead_bytes: u64,
    /// Where the figures come from.
    pub source: &'static str,
}

impl DeviceProfile {
    /// Matrix products of operands in this type, FLOP/s.
    pub fn matmul_rate(&self, dtype: DType) -> f64 {
        match dtype {
            DType::Bf16 => self.bf16_flops,
            _ => self.f32_flops,
        }
    }
}

/// A row of the catalogue: name, GiB, dense bf16 (fp16 where there is no bf16)
/// and float32 TFLOP/s, memory and link GB/s.
struct Sheet(&'static str, f64, f64, f64, f64, f64);

#[rustfmt::skip]
const SHEETS: [Sheet; 15] = [
    Sheet("a100-40",  40.0,  312.0, 19.5, 1555.0,  32.0),
    Sheet("a100-80",  80.0,  312.0, 19.5, 2039.0,  32.0),
    Sheet("h100",     80.0,  989.4, 66.9, 3350.0,  64.0),
    Sheet("h200",    141.0,  989.4, 66.9, 4800.0,  64.0),
    Sheet("b200",    180.0, 2250.0, 75.0, 8000.0,  64.0),
    Sheet("l4",       24.0,  121.0, 30.3,  300.0,  32.0),
    Sheet("l40s",     48.0,  362.0, 91.6,  864.0,  32.0),
    Sheet("a6000",    48.0,  154.8, 38.7,  768.0,  32.0),
    Sheet("rtx-3090", 24.0,   71.0, 35.6,  936.0,  32.0),
    Sheet("rtx-4090", 24.0,  165.2, 82.6, 1008.0,  32.0),
    Sheet("rtx-5090", 32.0,  209.5, 104.8, 1792.0, 64.0),
    Sheet("t4",       16.0,   65.0,  8.1,  320.0,  16.0),
    Sheet("v100",     32.0,  125.0, 15.7,  900.0,  16.0),
    Sheet("v100-16",  16.0,  125.0, 15.7,  900.0,  16.0),
    Sheet("a10",      24.0,  125.0, 31.2,  600.0,  32.0),
];

/// Fraction of the dense rate that a large product reached on the H200
/// (793 of 989.4 TFLOP/s, torch 2.11, 8192^3 bf16).
const MATMUL_FRACTION: f64 = 793.0 / 989.4;
/// Fraction of the memory rate that a copy reached there (4.28 of 4.8 TB/s).
const MEMORY_FRACTION: f64 = 4.28 / 4.8;
/// Fraction of the link's rate that a pinned copy reached there (55 of 64 GB/s).
const LINK_FRACTION: f64 = 55.4 / 64.0;
/// What the driver took outside the slab on an H200 (driver 580.159, CUDA 13.0):
/// context, modules, cuBLASLt and captured sections, 557 to 560 MB over nine
/// recipes of 0.5 to 8 billion parameters.
const OVERHEAD_BYTES: u64 = 558_000_000;

/// Names that [`gpu`] knows.
pub fn gpu_names() -> Vec<&'static str> {
    SHEETS.iter().map(|s| s.0).collect()
}

/// A GPU by name; spelling with or without dashes, `rtx`, or `-80gb`.
pub fn gpu(name: &str) -> Option<DeviceProfile> {
    let plain = |s: &str| s.to_lowercase().replace(['-', ' ', '_'], "").replace("nvidia", "");
    let wanted = plain(name).replace("gb", "");
    let alias = match wanted.as_str() {
        "a100" => "a10080",
        "h10080" => "h100",
        "h200141" => "h200",
        "3090" => "rtx3090",
        "4090" => "rtx4090",
        "5090" => "rtx5090",
        "rtxa6000" => "a6000",
        "v10032" => "v100",
        other => other,
    };
    let Sheet(name, gib, bf16, f32, memory, link) = SHEETS.iter().find(|s| plain(s.0) == alias)?;
    let h200 = *name == "h200";
    Some(DeviceProfile {
        name: (*name).to_owned(),
        // What the driver reports is a little less than what the box says.
        memory_bytes: if h200 { 143_771 << 20 } else { (gib * (1u64 << 30) as f64) as u64 },
        bf16_flops: bf16 * 1e12 * MATMUL_FRACTION,
        f32_flops: f32 * 1e12 * MATMUL_FRACTION,
        vector_flops: f32 * 1e12 * 0.5,
        memory_bytes_per_second: memory * 1e9 * MEMORY_FRACTION,
        link_bytes_per_second: link * 1e9 * LINK_FRACTION,
        op_overhead_seconds: 2e-6,
        overhead_bytes: OVERHEAD_BYTES,
        source: if h200 {
            "measured on an H200, torch 2.11, November 2026"
        } else {
            "data sheet times the fractions measured on an H200"
        },
    })
}

/// The CPU of this machine, from its number of cores: a guess to within a
/// factor of two, until it is calibrated.
pub fn cpu_profile(cores: usize, memory_bytes: u64) -> DeviceProfile {
    let cores = cores as f64;
    DeviceProfile {
        name: "cpu".to_owned(),
        memory_bytes,
        bf16_flops: 70e9 * cores,
        f32_flops: 80e9 * cores,
        vector_flops: 6e9 * cores,
        memory_bytes_per_second: 12e9 * cores.min(16.0),
        link_bytes_per_second: 12e9,
        op_overhead_seconds: 5e-6,
        overhead_bytes: 0,
        source: "a guess from the number of cores",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_has_many_spellings() {
        for name in ["H200", "h200", "NVIDIA H200", "a100-80gb", "A100 80GB", "4090", "RTX 4090"] {
            assert!(gpu(name).is_some(), "{name}");
        }
        assert!(gpu("voodoo2").is_none());
        for name in gpu_names() {
            assert_eq!(gpu(name).map(|g| g.name).as_deref(), Some(name));
        }
    }
}

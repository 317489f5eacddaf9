//! GPUs that people rent or own, from their makers' data sheets.
//!
//! The H200's profile is measured and shipped; any other GPU takes that profile
//! scaled by its data sheet, until `plimsoll calibrate` has measured it.

use std::path::Path;
use std::sync::OnceLock;

use plimsoll_arch::DType;

use crate::TokenTimes;
use crate::profile::{DeviceKind, DeviceProfile, Orientation};

/// The shipped profile; replace the file by what `plimsoll calibrate` writes.
const H200: &str = include_str!("../profiles/h200.json");

/// A GPU of the catalogue, as its data sheet has it: dense rates, no sparsity.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gpu {
    pub name: &'static str,
    /// MiB as `nvidia-smi` shows them: a little less than what the box says.
    memory_mib: u64,
    /// TFLOP/s of the tensor cores in bf16 (fp16 before Ampere) with float32
    /// accumulation: on GeForce parts half of the figure with fp16 accumulation.
    bf16_tflops: f64,
    /// TFLOP/s in float32, without tensor cores.
    f32_tflops: f64,
    /// Memory, GB/s.
    memory_rate: f64,
    /// Host link, GB/s one way.
    link_rate: f64,
    pub compute_capability: (i32, i32),
    pub price: Price,
}

/// What a GPU costs where the user does not say.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Price {
    pub usd_per_hour: f64,
    /// When clouds asked that much; none for a guess.
    pub date: Option<&'static str>,
}

impl Price {
    /// `default: on-demand list price, March 2026`.
    pub fn source(&self) -> String {
        match self.date {
            Some(date) => format!("default: an on-demand list price of {date}"),
            None => "default: a guess without a date".to_owned(),
        }
    }
}

const fn row(
    name: &'static str,
    memory_mib: u64,
    [bf16_tflops, f32_tflops, memory_rate, link_rate]: [f64; 4],
    compute_capability: (i32, i32),
    (usd_per_hour, date): (f64, Option<&'static str>),
) -> Gpu {
    let price = Price { usd_per_hour, date };
    Gpu {
        name,
        memory_mib,
        bf16_tflops,
        f32_tflops,
        memory_rate,
        link_rate,
        compute_capability,
        price,
    }
}

const MARCH: Option<&str> = Some("March 2026");

//   name       MiB       bf16    f32   memory   link   capability   price
#[rustfmt::skip]
const GPUS: [Gpu; 16] = [
    row("a100-40",    40960, [312.0,   19.5, 1555.0, 32.0], (8, 0),  (1.29, None)),
    // A published sweep of 2024 paid 14.32 an hour for eight.
    row("a100-80",    81920, [312.0,   19.5, 2039.0, 32.0], (8, 0),  (1.79, Some("April 2024"))),
    row("h100",       81559, [989.4,   66.9, 3350.0, 64.0], (9, 0),  (2.69, MARCH)),
    row("h100-pcie",  81559, [756.0,   51.2, 2039.0, 64.0], (9, 0),  (1.99, MARCH)),
    row("h200",      143771, [989.4,   66.9, 4800.0, 64.0], (9, 0),  (3.59, MARCH)),
    row("b200",      183359, [2250.0,  75.0, 8000.0, 64.0], (10, 0), (5.98, MARCH)),
    row("l4",         23034, [121.0,   30.3,  300.0, 32.0], (8, 9),  (0.44, MARCH)),
    row("l40s",       46068, [362.0,   91.6,  864.0, 32.0], (8, 9),  (0.79, MARCH)),
    row("a6000",      49140, [154.8,   38.7,  768.0, 32.0], (8, 6),  (0.50, None)),
    row("rtx-3090",   24576, [71.0,    35.6,  936.0, 32.0], (8, 6),  (0.22, MARCH)),
    row("rtx-4090",   24564, [165.2,   82.6, 1008.0, 32.0], (8, 9),  (0.34, MARCH)),
    row("rtx-5090",   32607, [209.5,  104.8, 1792.0, 64.0], (12, 0), (0.69, MARCH)),
    row("t4",         15360, [65.0,     8.1,  320.0, 16.0], (7, 5),  (0.35, None)),
    row("v100",       32768, [125.0,   15.7,  900.0, 16.0], (7, 0),  (0.55, None)),
    row("v100-16",    16384, [125.0,   15.7,  900.0, 16.0], (7, 0),  (0.55, None)),
    row("a10",        23028, [125.0,   31.2,  600.0, 32.0], (8, 6),  (0.75, None)),
];

/// Names that [`gpu`] knows.
pub fn gpu_names() -> Vec<&'static str> {
    GPUS.iter().map(|g| g.name).collect()
}

/// A GPU by a name that people use, or by what its driver calls it.
pub fn gpu(name: &str) -> Option<&'static Gpu> {
    let mut plain = name.to_lowercase();
    for noise in ["nvidia", "geforce", "tesla", "sxm2", "sxm4", "sxm5", "hbm3e", "hbm3", "gb"] {
        plain = plain.replace(noise, "");
    }
    plain.retain(|c| c.is_ascii_alphanumeric());
    let known = match plain.as_str() {
        "a100" | "a10080" | "a10080pcie" | "a100pcie80" => "a100-80",
        "a10040" | "a100pcie40" | "a10040pcie" => "a100-40",
        "h100" | "h10080" => "h100",
        "h100pcie" | "h10080pcie" => "h100-pcie",
        "h200" | "h200141" => "h200",
        "b200" | "b200180" => "b200",
        "a6000" | "rtxa6000" => "a6000",
        "3090" | "rtx3090" => "rtx-3090",
        "4090" | "rtx4090" => "rtx-4090",
        "5090" | "rtx5090" => "rtx-5090",
        "v100" | "v10032" => "v100",
        "v10016" => "v100-16",
        other => other,
    };
    GPUS.iter().find(|g| g.name == known)
}

/// The GPU of the catalogue that is most like one that it does not have: the
/// nearest compute capability, then the nearest memory size.
pub fn closest_gpu(compute_capability: (i32, i32), memory_bytes: u64) -> &'static Gpu {
    let distance = |gpu: &&Gpu| {
        let (major, minor) = gpu.compute_capability;
        let generation = (10 * (major - compute_capability.0) + minor - compute_capability.1).abs();
        let memory = (gpu.memory_bytes() as f64 / memory_bytes.max(1) as f64).ln().abs();
        (generation, (memory * 1e6) as u64)
    };
    GPUS.iter().min_by_key(distance).expect("the catalogue is not empty")
}

/// The shipped profile of the H200.
pub fn h200_profile() -> &'static DeviceProfile {
    static PROFILE: OnceLock<DeviceProfile> = OnceLock::new();
    PROFILE.get_or_init(|| {
        DeviceProfile::parse(H200, Path::new("crates/plan/profiles/h200.json"))
            .expect("the shipped profile is valid, as a test shows")
    })
}

impl Gpu {
    /// Bytes of its memory.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_mib << 20
    }

    /// Whether the CUDA device runs on it; without, a plan is only a plan.
    fn is_supported(&self) -> bool {
        self.compute_capability >= (8, 0)
    }

    fn flops(&self, dtype: DType) -> f64 {
        match dtype {
            DType::Bf16 => self.bf16_tflops * 1e12,
            _ => self.f32_tflops * 1e12,
        }
    }

    /// The shipped profile, if this is the GPU that it was measured on; else that
    /// profile with every time at the same fraction of what the data sheet allows.
    pub fn profile(&self) -> DeviceProfile {
        let measured = h200_profile();
        if self.name == "h200" {
            return measured.clone();
        }
        let h200 = gpu("h200").expect("the catalogue has it");
        let mut profile = self.scaled_from(h200, measured);
        profile.source = format!(
            "the data sheet of the {} times the fractions that an H200 reaches{}",
            self.name,
            if self.is_supported() {
                ""
            } else {
                "; this GPU is older than what plimsoll runs on (compute capability 8.0)"
            }
        );
        profile
    }

    /// The profile of another GPU of the catalogue, scaled to this one. What a
    /// launch costs stays; the rest scales with the rate that bounds it.
    fn scaled_from(&self, other: &Gpu, profile: &DeviceProfile) -> DeviceProfile {
        let mut p = profile.clone();
        let memory = self.memory_rate / other.memory_rate;
        let link = self.link_rate / other.link_rate;
        p.name = self.name.to_owned();
        (p.driver, p.host, p.check) = (None, None, None);
        p.memory_bytes = self.memory_bytes();
        p.copy_bytes_per_second *= memory;
        p.to_device_bytes_per_second *= link;
        p.to_host_bytes_per_second *= link;
        let launch = p.launch_us;
        // Seconds that the sheet allows for so much work.
        let bound = |gpu: &Gpu, dtype, flops: f64, bytes: f64| {
            (flops / gpu.flops(dtype)).max(bytes / (gpu.memory_rate * 1e9))
        };
        let scale = |us: &mut f64, ratio: f64| *us = launch + (*us - launch).max(0.0) * ratio;
        for dtype in [DType::Bf16, DType::F32] {
            let size = dtype.bytes() as f64;
            let products = p.products.of_mut(dtype);
            let (short, long, inner) =
                (products.short.clone(), products.long.clone(), products.inner.clone());
            for orientation in Orientation::ALL {
                let table = products.table_mut(orientation);
                for (at, us) in table.iter_mut().enumerate() {
                    let k = inner[at % inner.len()];
                    let b = long[at / inner.len() % long.len()];
                    let a = short[at / inner.len() / long.len()];
                    let (flops, bytes) = (2.0 * a * b * k, size * (a * b + a * k + b * k));
                    let ratio =
                        bound(self, dtype, flops, bytes) / bound(other, dtype, flops, bytes);
                    scale(us, ratio);
                }
            }
            let arithmetic = other.flops(dtype) / self.flops(dtype);
            for entry in p.attention.of_mut(dtype) {
                entry.forward_us.iter_mut().for_each(|us| scale(us, arithmetic));
                entry.backward_us.iter_mut().for_each(|us| scale(us, arithmetic));
            }
            for stream in p.streams.of_mut(dtype).values_mut() {
                stream.us.iter_mut().for_each(|us| scale(us, 1.0 / memory));
            }
        }
        for (_, products) in p.token.iter_mut().flat_map(TokenTimes::all_mut) {
            products.scale_bytes(1.0 / memory);
        }
        p.settled().unwrap_or_else(|(field, what)| unreachable!("{field} {what} after scaling"))
    }

    /// The profile of a GPU that the catalogue does not have, of which this one is
    /// the [`closest_gpu`].
    pub fn stand_in(&self, name: &str, memory_bytes: u64) -> DeviceProfile {
        let (major, minor) = self.compute_capability;
        DeviceProfile {
            name: name.to_owned(),
            memory_bytes,
            driver: None,
            check: None,
            kind: DeviceKind::Cuda,
            source: format!(
                "no profile of {name}: scaled from the closest data sheet, {} (compute capability \
                 {major}.{minor}); `plimsoll calibrate` measures this GPU",
                self.name
            ),
            ..self.profile()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_has_many_spellings() {
        let spellings = [
            ("H200", "h200"),
            ("NVIDIA H200", "h200"),
            ("a100-80gb", "a100-80"),
            ("A100 80GB", "a100-80"),
            ("NVIDIA A100-SXM4-80GB", "a100-80"),
            ("NVIDIA A100 80GB PCIe", "a100-80"),
            ("NVIDIA A100-PCIE-40GB", "a100-40"),
            ("NVIDIA H100 80GB HBM3", "h100"),
            ("NVIDIA H100 PCIe", "h100-pcie"),
            ("NVIDIA RTX A6000", "a6000"),
            ("NVIDIA GeForce RTX 4090", "rtx-4090"),
            ("4090", "rtx-4090"),
            ("Tesla T4", "t4"),
            ("Tesla V100-SXM2-16GB", "v100-16"),
            ("Tesla V100-SXM2-32GB", "v100"),
        ];
        for (spelling, name) in spellings {
            assert_eq!(gpu(spelling).map(|g| g.name), Some(name), "{spelling}");
        }
        for other in ["voodoo2", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA H200 NVL", "A10G", ""] {
            assert!(gpu(other).is_none(), "{other}");
        }
        for name in gpu_names() {
            assert_eq!(gpu(name).map(|g| g.name), Some(name));
        }
    }

    #[test]
    fn every_gpu_has_a_profile_and_a_faster_sheet_is_never_slower() {
        let h100 = gpu("h100").unwrap().profile();
        let b200 = gpu("b200").unwrap().profile();
        let h200 = gpu("h200").unwrap().profile();
        assert_eq!(&h200, h200_profile());
        for name in gpu_names() {
            let gpu = gpu(name).unwrap();
            let profile = gpu.profile();
            assert_eq!(profile.name, name);
            // What the driver hands out is a little less than what it lists.
            let share = profile.memory_bytes as f64 / gpu.memory_bytes() as f64;
            assert!((0.99..=1.0).contains(&share), "{name}: {share}");
            assert!(gpu.price.usd_per_hour > 0.0);
            profile.settled().unwrap();
        }
        for shape in [(1, 4096, 4096), (8192, 4096, 4096), (300, 700, 64)] {
            let seconds = |p: &DeviceProfile| {
                p.products.bf16.seconds(Orientation::Forward, shape.0, shape.1, shape.2)
            };
            // The same arithmetic, and less bandwidth.
            assert!(seconds(&h100) >= seconds(&h200) && seconds(&h200) > seconds(&b200));
        }
        // Large products follow the arithmetic.
        let large = |name: &str| {
            gpu(name).unwrap().profile().products.bf16.seconds(
                Orientation::Forward,
                8192,
                8192,
                8192,
            )
        };
        let ratio = large("a100-80") / large("h200");
        assert!((ratio / (989.4 / 312.0) - 1.0).abs() < 0.02, "{ratio}");
    }

    #[test]
    fn an_unknown_gpu_says_what_it_is_scaled_from() {
        let gpu = closest_gpu((8, 9), 48 << 30);
        assert_eq!(gpu.name, "l40s");
        assert_eq!(closest_gpu((8, 9), 20 << 30).name, "l4");
        assert_eq!(closest_gpu((8, 6), 12 << 30).name, "a10");
        assert_eq!(closest_gpu((12, 1), 128 << 30).name, "rtx-5090");
        let profile = gpu.stand_in("NVIDIA RTX 6000 Ada Generation", 48 << 30);
        assert_eq!(profile.memory_bytes, 48 << 30);
        assert_eq!(profile.name, "NVIDIA RTX 6000 Ada Generation");
        for word in ["NVIDIA RTX 6000 Ada Generation", "l40s", "calibrate"] {
            assert!(profile.source.contains(word), "{}", profile.source);
        }
    }
}

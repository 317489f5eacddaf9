//! A profile from a few rates, for a device that nobody has measured.

use std::collections::BTreeMap;

use plimsoll_arch::DType;

use crate::profile::{
    Attention, DeviceKind, DeviceProfile, Orientation, PROFILE_FORMAT, PerType, Products,
};

/// The CPU of this machine, from its number of threads: a guess to within a
/// factor of two, until it is calibrated.
pub fn cpu_profile(threads: usize, memory_bytes: u64) -> DeviceProfile {
    let cores = threads as f64;
    let memory = 12e9 * cores.min(16.0);
    let launch = 5e-6;
    let rate = |dtype| match dtype {
        DType::Bf16 => 70e9 * cores,
        _ => 80e9 * cores,
    };
    let products = |dtype: DType| {
        let (short, long, inner) =
            (vec![1.0, 64.0, 1024.0], vec![16.0, 256.0, 4096.0], vec![16.0, 256.0, 4096.0]);
        let mut products = Products { short, long, inner, ..Products::default() };
        let mut table = Vec::new();
        let size = dtype.bytes() as f64;
        for a in &products.short {
            for b in &products.long {
                for k in &products.inner {
                    let bytes = size * (a * b + a * k + b * k);
                    let work = (2.0 * a * b * k / rate(dtype)).max(bytes / memory);
                    table.push(1e6 * (work + launch));
                }
            }
        }
        for orientation in Orientation::ALL {
            *products.table_mut(orientation) = table.clone();
        }
        products
    };
    let attention = |dtype| {
        let head_dim = 64;
        let (seqs, heads) = (vec![1.0, 256.0, 4096.0], vec![1.0, 64.0]);
        let mut forward_us = Vec::new();
        for t in &seqs {
            for h in &heads {
                let flops = 2.0 * t * (t + 1.0) * h * head_dim as f64;
                // Softmax and short rows: about half of what a product reaches.
                forward_us.push(1e6 * (2.0 * flops / rate(dtype) + launch));
            }
        }
        let backward_us = forward_us.iter().map(|us| 2.5 * us).collect();
        vec![Attention { head_dim, any_size: true, seqs, heads, forward_us, backward_us }]
    };
    let profile = DeviceProfile {
        format: PROFILE_FORMAT,
        kind: DeviceKind::Cpu,
        name: "cpu".to_owned(),
        threads: Some(threads),
        driver: None,
        source: format!(
            "a guess from {threads} threads; `plimsoll calibrate` measures this machine"
        ),
        memory_bytes: memory_bytes.max(1),
        overhead_bytes: 0,
        copy_bytes_per_second: memory,
        to_device_bytes_per_second: memory,
        to_host_bytes_per_second: memory,
        launch_us: 1e6 * launch,
        step_us: 0.0,
        products: PerType { bf16: products(DType::Bf16), f32: products(DType::F32) },
        attention: PerType { bf16: attention(DType::Bf16), f32: attention(DType::F32) },
        streams: PerType { bf16: BTreeMap::new(), f32: BTreeMap::new() },
        token: None,
        peers: None,
        host: None,
        check: None,
    };
    profile.settled().unwrap_or_else(|(field, what)| unreachable!("{field} {what} of a guess"))
}

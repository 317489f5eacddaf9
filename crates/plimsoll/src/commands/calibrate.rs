//! `plimsoll calibrate`: measures a device into a profile.

use std::path::PathBuf;
use std::time::Instant;

use clap::{Args, ValueEnum};
use plimsoll_arch::preset;
use plimsoll_calibrate::{Facts, Grid, calibrate, slab_bytes};
use plimsoll_cpu::kernels::{AdamW, Rounding, adamw};
use plimsoll_cpu::pool::Pool;
use plimsoll_cuda::device_info;
use plimsoll_plan::{DeviceKind, DeviceProfile, Host, lay_out, schedule};
use plimsoll_program::{Recipe, build};

use crate::devices::DeviceArg;
use crate::exit::{Outcome, Stop};
use crate::{profiles, units};

/// How much is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GridArg {
    Full,
    /// A few points of a CPU, in seconds: for tests.
    Small,
}

#[derive(Debug, Args)]
pub struct CalibrateArgs {
    /// What to measure [default: cuda where a GPU is usable, else cpu]
    #[arg(long, value_enum)]
    pub device: Option<DeviceArg>,
    /// The profile to write [default: where every plan for this device looks:
    /// $XDG_CONFIG_HOME/plimsoll/profiles/NAME.json]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    #[arg(long, value_enum, default_value = "full", hide = true)]
    pub grid: GridArg,
}

pub fn run(args: &CalibrateArgs) -> Outcome {
    let kind = DeviceArg::resolve(args.device);
    let facts = facts(kind)?;
    let path = match &args.out {
        Some(path) => path.clone(),
        None => profiles::path_of(&facts.name).ok_or_else(|| {
            Stop::Input("there is no home folder to keep the profile in: give --out FILE".into())
        })?,
    };
    let grid = match args.grid {
        GridArg::Full => Grid::of(facts.kind),
        GridArg::Small => Grid::small(),
    };
    let target = kind.target();
    let start = Instant::now();
    let failed = |e: plimsoll_calibrate::CalibrateError| match e {
        plimsoll_calibrate::CalibrateError::Device(error) => Stop::from(error),
        other => Stop::Failed(other.to_string()),
    };
    let bytes = slab_bytes(&grid, facts.kind, &*target).map_err(failed)?;
    let mut device = kind.reserve(bytes)?;
    let mut progress = |what: &str| note!("{:5.1} s  {what}", start.elapsed().as_secs_f64());
    let mut profile =
        calibrate(&mut *device, &*target, &facts, &grid, &mut progress).map_err(failed)?;
    if profile.kind == DeviceKind::Cuda {
        drop(device);
        progress("updates on the host");
        profile.host = Some(host(&profile)?);
    }
    profile.write(&path).map_err(Stop::input)?;
    out!("{}", summary(&profile)?);
    outln!("{}", path.display());
    Ok(())
}

/// The machine that a GPU hangs on: its cores, and what its memory was seen to move, under
/// updates on all cores or under the link's copies both ways.
fn host(gpu: &DeviceProfile) -> Result<Host, Stop> {
    // No cache holds half a gigabyte.
    const ELEMENTS: usize = 1 << 25;
    let hyper = AdamW {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.01,
        bias_correction1: 0.1,
        bias_correction2: 0.001,
        grad_scale: 1.0,
    };
    let threads = crate::threads();
    let pool = Pool::new(threads).map_err(|e| Stop::Failed(format!("{threads} threads: {e}")))?;
    let [mut param, grad, mut m, mut v] = [1.0f32, 0.01, 0.0, 0.0].map(|x| vec![x; ELEMENTS]);
    let mut seconds = f64::INFINITY;
    for _ in 0..8 {
        let started = Instant::now();
        pool.install(|| adamw(&mut param, &grad, &mut m, &mut v, &hyper, Rounding::new(1)));
        seconds = seconds.min(started.elapsed().as_secs_f64());
    }
    // Three are read and written, the gradient is read.
    let updates = (7 * size_of::<f32>() * ELEMENTS) as f64 / seconds;
    let copies = gpu.to_device_bytes_per_second + gpu.to_host_bytes_per_second;
    Ok(Host {
        cores: threads as f64,
        bytes_per_second: updates.max(copies).round(),
        ranks: 1,
        source: gpu.source.clone().into(),
    })
}

/// What is known without measuring.
fn facts(kind: DeviceArg) -> Result<Facts, Stop> {
    let source =
        format!("measured by plimsoll {} calibrate, {}", env!("CARGO_PKG_VERSION"), today());
    let memory_bytes = kind.memory_bytes()?;
    Ok(match kind {
        DeviceArg::Cpu => {
            let threads = crate::threads();
            Facts {
                kind: DeviceKind::Cpu,
                name: profiles::cpu_name(threads),
                threads: Some(threads),
                driver: None,
                memory_bytes,
                source,
            }
        }
        DeviceArg::Cuda => {
            let info = device_info(0).map_err(Stop::input)?;
            Facts {
                kind: DeviceKind::Cuda,
                name: profiles::gpu_name(&info),
                threads: None,
                driver: Some(profiles::driver_version(&info)),
                memory_bytes,
                source: format!("{source}, on {}", info.name),
            }
        }
    })
}

/// The best of everything, and the training step that was timed beside its plan.
fn summary(profile: &DeviceProfile) -> Result<String, Stop> {
    let mut text = format!("{}: {}\n", profile.name, profile.source);
    let mut row = |name: &str, value: String| text.push_str(&format!("  {name:<36}{value}\n"));
    let tera = |rate: f64| format!("{:.3} TFLOP/s", rate / 1e12);
    row("best product, bf16", tera(profile.products.bf16.best_rate()));
    row("best product, f32", tera(profile.products.f32.best_rate()));
    let giga = |rate: f64| format!("{:.1} GB/s", rate / 1e9);
    row("memory, best streaming op", giga(profile.copy_bytes_per_second));
    row("host to device", giga(profile.to_device_bytes_per_second));
    row("device to host", giga(profile.to_host_bytes_per_second));
    row("an op that does nothing", format!("{:.2} us", profile.launch_us));
    row("starting and ending a step", format!("{:.1} us", profile.step_us));
    if profile.kind == DeviceKind::Cuda {
        row("driver, outside the slab", units::bytes(profile.overhead_bytes));
        if let Some(host) = &profile.host {
            let value = format!("{:.0} cores, {}", host.cores, giga(host.bytes_per_second));
            row("the host", value);
        }
    }
    if let Some(check) = &profile.check {
        let arch = preset(&check.model).map_err(Stop::input)?;
        let recipe = Recipe::full(check.precision, check.batch, check.seq);
        let target = match profile.kind {
            DeviceKind::Cpu => DeviceArg::Cpu.target(),
            DeviceKind::Cuda => DeviceArg::Cuda.target(),
        };
        let program = build::train(&arch, &recipe, &*target).map_err(Stop::input)?;
        let planned = schedule(&program, &lay_out(&program), profile, None).step_seconds;
        row(
            "a training step, planned, measured",
            format!(
                "{}, {} ({:+.1} %): {} {}, batch {}, seq {}",
                units::seconds(planned),
                units::seconds(check.seconds),
                100.0 * (planned / check.seconds - 1.0),
                check.model,
                check.precision,
                check.batch,
                check.seq
            ),
        );
    }
    Ok(text)
}

/// The date in UTC, `2026-11-30`.
fn today() -> String {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    date(since.map_or(0, |d| d.as_secs() / 86_400) as i64)
}

/// The date so many days after 1970-01-01.
fn date(days: i64) -> String {
    // Days to a civil date, with years that begin in March (Hinnant's algorithm).
    let z = days + 719_468;
    let (era, day_of_era) = (z.div_euclid(146_097), z.rem_euclid(146_097));
    let year = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + i64::from(month <= 2);
    format!("{year}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_dates() {
        assert_eq!(date(0), "1970-01-01");
        assert_eq!(date(11_016), "2000-02-29");
        assert_eq!(date(20_787), "2026-11-30");
    }
}

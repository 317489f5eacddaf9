//! All families of ops, one after the other.

use std::collections::{BTreeMap, HashMap};

use plimsoll_arch::DType;
use plimsoll_plan::{
    Attention, Device, DeviceError, DeviceKind, DeviceProfile, Orientation, PROFILE_FORMAT,
    PerType, Products, Stream, stream_family,
};
use plimsoll_program::Target;

use crate::bed::{Bed, Parts};
use crate::case::{self, Case, STREAMS};
use crate::grid::{AttentionGrid, Grid, ProductGrid};
use crate::step::CheckStep;
use crate::token;

/// What is known about a device without measuring it.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    pub kind: DeviceKind,
    pub name: String,
    pub threads: Option<usize>,
    pub driver: Option<String>,
    pub memory_bytes: u64,
    /// Who measured, with which version and when.
    pub source: String,
}

/// Why a device could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum CalibrateError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("the step of {model} cannot be built: {what}")]
    Check { model: &'static str, what: String },
    #[error("the measured {field} {what}: is the device doing something else?")]
    Figure { field: String, what: String },
}

/// Below this many rows only forward products occur: nothing trains so little.
const SKINNY: usize = 64;

/// Bytes of the slab that [`calibrate`] wants.
///
/// # Errors
/// The step that checks the result cannot be built.
pub fn slab_bytes(
    grid: &Grid,
    kind: DeviceKind,
    target: &dyn Target,
) -> Result<u64, CalibrateError> {
    let step = CheckStep::new(grid, kind, target)?;
    let steps = token::steps(grid, target)?;
    let largest = steps.iter().map(|s| s.layout.slab_bytes).max().unwrap_or(0);
    Ok(Parts::of(grid, target).slab_bytes().max(step.layout.slab_bytes).max(largest))
}

/// Measures a device that has reserved [`slab_bytes`], freshly: what its driver
/// takes is asked after a training step, before anything else was run.
/// `progress` is told what is being measured.
///
/// # Errors
/// The device's own; or a figure is none.
pub fn calibrate(
    device: &mut dyn Device,
    target: &dyn Target,
    facts: &Facts,
    grid: &Grid,
    progress: &mut dyn FnMut(&str),
) -> Result<DeviceProfile, CalibrateError> {
    progress("a training step");
    let step = CheckStep::new(grid, facts.kind, target)?;
    let mut bed = Bed::new(device, target, grid, facts.kind);
    let check = step.run(&mut bed)?;
    let overhead_bytes = bed.device.taken_bytes()?.map_or(0, |taken| taken.overhead);
    bed.fill_sources()?;

    progress("the host link");
    let (to_device, to_host) = bed.link()?;
    let mut streams: PerType<BTreeMap<String, Stream>> = PerType::default();
    let mut products: PerType<Products> = PerType::default();
    let mut attention: PerType<Vec<Attention>> = PerType::default();
    for dtype in [DType::Bf16, DType::F32] {
        progress(&format!("streaming ops in {dtype}"));
        *streams.of_mut(dtype) = measure_streams(&mut bed, dtype)?;
        progress(&format!("attention in {dtype}"));
        *attention.of_mut(dtype) = measure_attention(&mut bed, dtype, grid.attention.of(dtype))?;
        progress(&format!("matrix products in {dtype}"));
        *products.of_mut(dtype) = measure_products(&mut bed, dtype, grid.products.of(dtype))?;
    }

    progress("token steps");
    let token = token::measure(&mut bed)?;

    // Ops that do little besides moving the bytes that are counted for them.
    let plain = ["rms_norm", "swiglu", "gather_rows", "adamw"];
    let plain = plain.iter().flat_map(|f| [streams.bf16.get(*f), streams.f32.get(*f)]).flatten();
    let copy = plain.map(Stream::rate).fold(0.0, f64::max);
    let all = || streams.bf16.values().chain(streams.f32.values());
    let launch_us = all().filter_map(|s| s.us.first()).fold(f64::INFINITY, |a, b| a.min(*b));
    let step_us = (1e6 * bed.start_and_end()? - launch_us).max(0.0);
    let profile = DeviceProfile {
        format: PROFILE_FORMAT,
        kind: facts.kind,
        name: facts.name.clone(),
        threads: facts.threads,
        driver: facts.driver.clone(),
        source: facts.source.clone(),
        memory_bytes: facts.memory_bytes,
        overhead_bytes,
        copy_bytes_per_second: rounded(copy),
        to_device_bytes_per_second: rounded(to_device),
        to_host_bytes_per_second: rounded(to_host),
        launch_us,
        step_us: rounded(step_us),
        products,
        attention,
        streams,
        token: Some(token),
        peers: None,
        host: None,
        check: Some(check),
    };
    profile.settled().map_err(|(field, what)| CalibrateError::Figure { field, what })
}

/// Four digits: no measurement has more.
fn rounded(x: f64) -> f64 {
    format!("{x:.3e}").parse().unwrap_or(x)
}

pub(crate) fn microseconds(seconds: f64) -> f64 {
    rounded(1e6 * seconds)
}

fn measure_streams(bed: &mut Bed, dtype: DType) -> Result<BTreeMap<String, Stream>, DeviceError> {
    let mut streams = BTreeMap::new();
    for make in STREAMS {
        let example = Case::repeat(bed.target, 1, &mut |c| make(c, dtype, 16, 64));
        let op = &example.program.ops[0].kind;
        let Some((family, own)) = stream_family(&example.program, op) else { continue };
        // Losses are float32 whatever the weights are.
        if own != dtype {
            continue;
        }
        let mut stream = Stream { bytes: Vec::new(), us: Vec::new() };
        for (rows, cols) in bed.grid.streams.clone() {
            let (seconds, bytes) = bed.time(&mut |c| make(c, dtype, rows, cols))?;
            stream.bytes.push(bytes);
            stream.us.push(microseconds(seconds));
        }
        streams.insert(family.to_owned(), stream);
    }
    Ok(streams)
}

fn measure_attention(
    bed: &mut Bed,
    dtype: DType,
    grid: &[AttentionGrid],
) -> Result<Vec<Attention>, DeviceError> {
    let axis = |points: &[usize]| points.iter().map(|n| *n as f64).collect::<Vec<_>>();
    let mut entries = Vec::new();
    let sizes = grid.iter().flat_map(|g| g.head_dims.iter().map(move |d| (g, d)));
    for (grid, (head_dim, any_size)) in sizes {
        let mut tables = [Vec::new(), Vec::new()];
        for (backward, table) in tables.iter_mut().enumerate() {
            for seq in &grid.seqs {
                for heads in &grid.heads {
                    let (seconds, _) = bed.time(&mut |c| {
                        case::attention(c, dtype, backward == 1, *head_dim, (*seq, *heads))
                    })?;
                    table.push(microseconds(seconds));
                }
            }
        }
        let [forward_us, backward_us] = tables;
        entries.push(Attention {
            head_dim: *head_dim,
            any_size: *any_size,
            seqs: axis(&grid.seqs),
            heads: axis(&grid.heads),
            forward_us,
            backward_us,
        });
    }
    Ok(entries)
}

fn measure_products(
    bed: &mut Bed,
    dtype: DType,
    grid: &ProductGrid,
) -> Result<Products, DeviceError> {
    let axis = |points: &[usize]| points.iter().map(|n| *n as f64).collect::<Vec<_>>();
    let mut products = Products {
        short: axis(&grid.short),
        long: axis(&grid.long),
        inner: axis(&grid.inner),
        ..Products::default()
    };
    let mut known: HashMap<(Orientation, usize, usize, usize), f64> = HashMap::new();
    for orientation in Orientation::ALL {
        for short in &grid.short {
            for long in &grid.long {
                for inner in &grid.inner {
                    let (rows, cols) = (*short.min(long), *short.max(long));
                    let timed = if rows < SKINNY { Orientation::Forward } else { orientation };
                    let key = (timed, rows, cols, *inner);
                    let us = match known.get(&key) {
                        Some(us) => *us,
                        None => {
                            let shape = (rows, cols, *inner);
                            let (seconds, _) =
                                bed.time(&mut |c| case::product(c, timed, dtype, shape))?;
                            known.insert(key, microseconds(seconds));
                            microseconds(seconds)
                        }
                    };
                    products.table_mut(orientation).push(us);
                }
            }
        }
    }
    Ok(products)
}

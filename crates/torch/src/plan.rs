//! The answer of `plimsoll plan --stack torch`.

use std::collections::BTreeMap;

use plimsoll_arch::Architecture;
use plimsoll_program::Class;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::allocator::AllocatorConfig;
use crate::recipe::{RecipeError, TorchRecipe};
use crate::simulate::{CudaDevice, simulate};
use crate::trace::{LiveTensor, TimelinePoint};

/// Points of a timeline in JSON; of more ops, each point is the highest of its neighbours.
const TIMELINE_POINTS: usize = 2000;

/// Live bytes over the ops of a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepTimeline {
    pub classes: Vec<&'static str>,
    pub ops: Vec<TimelinePoint>,
}

/// Where the run ran out of memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OutOfMemoryAt {
    pub op: String,
    pub requested_bytes: u64,
    pub reserved_bytes: u64,
}

/// A planned run of the PyTorch stack; bytes.
#[derive(Clone, Debug, Serialize)]
pub struct TorchReport {
    pub stack: &'static str,
    pub model: String,
    pub parameters: u64,
    pub trainable_parameters: u64,
    /// `torch.cuda.max_memory_allocated()`.
    pub peak_allocated_bytes: u64,
    /// `active_bytes.all.peak`: as above, and blocks that another stream may still read.
    pub peak_active_bytes: u64,
    /// `torch.cuda.max_memory_reserved()`.
    pub peak_reserved_bytes: u64,
    /// What would be reserved at most if the allocator had to give back what it caches.
    pub reserved_after_release_bytes: u64,
    /// What `nvidia-smi` shows: reserved, and the CUDA context.
    pub device_used_bytes: u64,
    /// The same as `peak_reserved_bytes`, under the name that every plan has.
    pub peak_bytes: u64,
    /// The most bytes alive at once.
    pub lower_bound_bytes: u64,
    /// CUDA context and kernels, outside the allocator.
    pub overhead_bytes: u64,
    /// Host memory for what was offloaded.
    pub host_bytes: u64,
    /// Optimizer state in managed memory.
    pub paged_bytes: u64,
    /// Allocated after loading, and at the ends of the phases of a step.
    pub loaded_bytes: u64,
    pub after_forward_bytes: u64,
    pub after_backward_bytes: u64,
    pub after_step_bytes: u64,
    /// Bytes by class at the peak.
    pub by_class: Map<String, Value>,
    pub peak_at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fits: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free_bytes: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub out_of_memory: Option<OutOfMemoryAt>,
    /// Times that the allocator had to release its cache to go on.
    pub alloc_retries: u64,
    pub largest: Vec<LiveTensor>,
    pub recipe: TorchRecipe,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeline: Option<StepTimeline>,
}

/// Where a plan must fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    pub device: CudaDevice,
    /// Memory of the device, or the share of it that the process may take.
    pub memory: Option<u64>,
}

/// Plans a run.
///
/// # Errors
/// The recipe is one that the stack refuses.
pub fn plan(
    arch: &Architecture,
    recipe: &TorchRecipe,
    allocator: &AllocatorConfig,
    room: Room,
) -> Result<TorchReport, RecipeError> {
    let run = simulate(arch, recipe, room.device)?;
    let context = room.device.context_bytes();
    let limit = room.memory.map(|m| room.device.visible_bytes(m).saturating_sub(context));
    let limited = AllocatorConfig { limit, ..allocator.clone() };
    let mut replay = run.trace.replay(&limited);
    let out_of_memory = replay.out_of_memory.take().map(|(op, error)| OutOfMemoryAt {
        op,
        requested_bytes: error.requested,
        reserved_bytes: error.reserved,
    });
    if out_of_memory.is_some() {
        // What it would need if it could have it.
        replay = run.trace.replay(&AllocatorConfig { limit: None, ..allocator.clone() });
    }
    let stats = replay.stats;
    let (peak_at, live) = run.trace.at_peak(&replay);
    let mut by_class: BTreeMap<Class, u64> = BTreeMap::new();
    for tensor in &live {
        *by_class.entry(tensor.class).or_default() += tensor.bytes;
    }
    let device_used = stats.reserved.peak + context;
    let needed = stats.pinned.peak + context;
    let mark = |name| replay.mark(name).unwrap_or(0);
    Ok(TorchReport {
        stack: "torch",
        model: arch.name.clone(),
        parameters: run.parameters,
        trainable_parameters: run.trainable_parameters,
        peak_allocated_bytes: stats.allocated.peak,
        peak_active_bytes: stats.active.peak,
        peak_reserved_bytes: stats.reserved.peak,
        reserved_after_release_bytes: stats.pinned.peak,
        device_used_bytes: device_used,
        peak_bytes: stats.reserved.peak,
        lower_bound_bytes: stats.allocated.peak,
        overhead_bytes: context,
        host_bytes: run.host_bytes,
        paged_bytes: run.paged_bytes,
        loaded_bytes: mark("loaded"),
        after_forward_bytes: mark("after_forward"),
        after_backward_bytes: mark("after_backward"),
        after_step_bytes: mark("after_step"),
        by_class: by_class.into_iter().map(|(c, b)| (c.name().to_owned(), b.into())).collect(),
        peak_at,
        fits: room.memory.map(|_| out_of_memory.is_none()),
        free_bytes: room.memory.map(|m| m as i64 - needed as i64),
        memory_bytes: room.memory,
        out_of_memory,
        alloc_retries: stats.retries,
        largest: live.into_iter().take(12).collect(),
        recipe: recipe.clone(),
        timeline: Some(StepTimeline {
            classes: Class::ALL.map(Class::name).to_vec(),
            ops: thin(run.trace.timeline("step")),
        }),
    })
}

/// At most so many points, each the highest of those that it stands for.
fn thin(points: Vec<TimelinePoint>) -> Vec<TimelinePoint> {
    let n = points.len();
    if n <= TIMELINE_POINTS {
        return points;
    }
    let total = |p: &TimelinePoint| p.bytes.iter().sum::<u64>();
    (0..TIMELINE_POINTS)
        .filter_map(|i| {
            let range = i * n / TIMELINE_POINTS..(i + 1) * n / TIMELINE_POINTS;
            points[range].iter().max_by_key(|p| total(p)).cloned()
        })
        .collect()
}

//! The ledger: where the bytes are, and what a plan prints.

use std::collections::{BTreeMap, HashSet};

use plimsoll_arch::{Architecture, DType};
use plimsoll_program::{Class, Home, Lane, Method, OpKind, Program, Recipe, Tensor};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::schedule::schedule_with;
use crate::{DeviceKind, DeviceProfile, Layout, Peers, Schedule, Transport, Waits};

/// A tensor that is alive at the peak.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Live {
    pub name: String,
    pub class: Class,
    pub bytes: u64,
}

/// The answer of `plimsoll plan`, as its JSON prints it. Bytes and seconds.
#[derive(Clone, Debug, Default, Serialize)]
pub struct PlanReport {
    pub model: String,
    pub parameters: u64,
    pub trainable_parameters: u64,
    /// Device slab: what is asked of the driver.
    pub peak_bytes: u64,
    /// The most bytes alive at once.
    pub lower_bound_bytes: u64,
    /// Driver memory outside the slab: context, modules, libraries.
    pub overhead_bytes: u64,
    pub host_bytes: u64,
    /// Bytes by class at the peak.
    pub by_class: Map<String, Value>,
    /// Of the optimizer's state on the device, the lower halves of master weights.
    #[serde(skip_serializing_if = "is_zero")]
    pub master_bytes: u64,
    /// The same of what is in host memory.
    #[serde(skip_serializing_if = "is_zero")]
    pub master_host_bytes: u64,
    /// The op at which the most bytes are alive.
    pub peak_at: String,
    /// Whether slab and overhead fit in the memory that was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fits: Option<bool>,
    /// Memory left; negative when it does not fit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free_bytes: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Page-locked host memory that a rank may take, where that was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_memory_bytes: Option<u64>,
    pub step_seconds: f64,
    /// Of all ranks together.
    pub tokens_per_second: f64,
    /// Of one rank.
    pub flops_per_step: f64,
    pub bottleneck: &'static str,
    /// Seconds in which each lane is busy, where there is more than one.
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub lane_seconds: Map<String, Value>,
    /// The device that the seconds are for.
    pub device: String,
    /// Where its figures come from.
    pub device_source: String,
    /// Where updates run on state that is offloaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub updates: Option<Updates>,
    /// What the step costs, where a price is known.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub cost: Option<Cost>,
    /// What goes between the ranks, where there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub communication: Option<Communication>,
    pub fragmentation: f64,
    pub tensors: usize,
    pub ops: usize,
    /// The largest tensors alive at the peak, largest first.
    pub largest: Vec<Live>,
    pub recipe: Value,
}

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

/// Ranks, and what their collectives cost one of them in a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Communication {
    pub ranks: usize,
    pub nodes: usize,
    pub zero: u8,
    /// Type in which gradients are summed.
    pub reduce_dtype: String,
    /// What a rank hands to collectives and gets from them, in a step.
    pub bytes: u64,
    /// In which the communication lane is busy, and in which nothing else is.
    pub seconds: f64,
    pub exposed_seconds: f64,
    /// What carries collectives.
    pub transport: Transport,
    /// What that takes of every device, outside the slab; part of `overhead_bytes`.
    pub transport_bytes: u64,
    /// Where the rates of the links come from.
    pub source: String,
}

/// Where updates run whose state is in host memory, and what was compared: seconds of a
/// step, of what was planned.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Updates {
    /// `cpu` or `gpu`.
    pub on: &'static str,
    /// What `gpu` is: on the CPU device both are the same cores.
    #[serde(skip)]
    pub device: DeviceKind,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_step_seconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_step_seconds: Option<f64>,
    /// Whether the other side was planned and does not fit in memory.
    pub other_does_not_fit: bool,
    /// Cores and bytes a second of the host, for all ranks on it, and who says so.
    pub host_cores: f64,
    pub host_bytes_per_second: f64,
    pub host_source: String,
}

/// Money, in US dollars.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cost {
    pub price_usd_per_hour: f64,
    /// The user's word for it, or which default it is.
    pub price_source: String,
    pub usd_per_step: f64,
    pub usd_per_million_tokens: f64,
}

impl PlanReport {
    /// The same memory, and the time of another step: of a token, where the prompt decides
    /// the memory.
    pub fn with_times_of(self, step: PlanReport) -> PlanReport {
        PlanReport {
            step_seconds: step.step_seconds,
            tokens_per_second: step.tokens_per_second,
            flops_per_step: step.flops_per_step,
            bottleneck: step.bottleneck,
            lane_seconds: step.lane_seconds,
            ..self
        }
    }

    /// Adds what a step costs at a price of one device.
    pub fn with_price(mut self, usd_per_hour: f64, source: String) -> PlanReport {
        let ranks = self.communication.as_ref().map_or(1, |c| c.ranks);
        let usd_per_second = ranks as f64 * usd_per_hour / 3600.0;
        self.cost = Some(Cost {
            price_usd_per_hour: usd_per_hour,
            price_source: source,
            usd_per_step: usd_per_second * self.step_seconds,
            usd_per_million_tokens: 1e6 * usd_per_second / self.tokens_per_second,
        });
        self
    }
}

/// Bytes of every class alive at each op of the device; the data of a timeline.
pub fn live_bytes(program: &Program, layout: &Layout) -> Vec<[u64; Class::ALL.len()]> {
    let mut change = vec![[0i64; Class::ALL.len()]; program.ops.len() + 1];
    for (tensor, life) in program.tensors.iter().zip(&layout.lifetimes) {
        if let (Some(life), Home::Device) = (life, tensor.home) {
            let class = class_index(tensor.class);
            change[life.first][class] += tensor.bytes() as i64;
            change[life.last + 1][class] -= tensor.bytes() as i64;
        }
    }
    let mut now = [0i64; Class::ALL.len()];
    change[..program.ops.len()]
        .iter()
        .map(|delta| {
            for (n, d) in now.iter_mut().zip(delta) {
                *n += d;
            }
            now.map(|n| n as u64)
        })
        .collect()
}

fn class_index(class: Class) -> usize {
    Class::ALL.iter().position(|c| *c == class).expect("ALL has every class")
}

fn communication(
    recipe: &Recipe,
    program: &Program,
    peers: &Peers,
    schedule: &Schedule,
) -> Communication {
    let mut bytes = 0.0;
    for section in &program.sections {
        let ops = &program.ops[section.ops.clone()];
        let collectives = ops.iter().filter(|op| program.lane(&op.kind) == Lane::Communication);
        bytes += section.repeat as f64 * collectives.map(|op| program.work(op).bytes).sum::<f64>();
    }
    Communication {
        ranks: peers.ranks,
        nodes: peers.nodes,
        zero: recipe.sharding.zero,
        reduce_dtype: recipe.sharding.reduce.to_string(),
        bytes: bytes as u64,
        seconds: schedule.lane_seconds[Lane::Communication.index()],
        exposed_seconds: schedule.exposed_seconds,
        transport: peers.transport,
        transport_bytes: peers.transport_bytes,
        source: peers.source.clone(),
    }
}

/// The busy lanes by name; nothing where there is only one.
fn lane_seconds(schedule: &Schedule) -> Map<String, Value> {
    let busy: Map<String, Value> = Lane::ALL
        .into_iter()
        .map(|lane| (lane.name().replace(' ', "_"), schedule.lane_seconds[lane.index()]))
        .filter(|(_, seconds)| *seconds > 0.0)
        .map(|(name, seconds)| (name, seconds.into()))
        .collect();
    if busy.len() > 1 { busy } else { Map::new() }
}

/// Puts a plan into words and numbers; `document_tokens` as in [`schedule`].
///
/// [`schedule`]: crate::schedule
pub fn plan_report(
    arch: &Architecture,
    recipe: &Recipe,
    program: &Program,
    layout: &Layout,
    device: &DeviceProfile,
    memory_bytes: Option<u64>,
    document_tokens: Option<f64>,
) -> PlanReport {
    let place = ReportFor { device, memory_bytes };
    let mut reports = plan_reports(arch, recipe, program, layout, &[place], document_tokens);
    reports.pop().expect("one report for one device")
}

/// A device that a plan is for.
#[derive(Clone, Copy, Debug)]
pub struct ReportFor<'a> {
    pub device: &'a DeviceProfile,
    /// What slab and overhead must fit in, where that is asked.
    pub memory_bytes: Option<u64>,
}

/// Of one layout a report for each device, in their order: what does not depend on
/// how fast a device is, is worked out once. As [`plan_report`].
pub fn plan_reports(
    arch: &Architecture,
    recipe: &Recipe,
    program: &Program,
    layout: &Layout,
    places: &[ReportFor<'_>],
    document_tokens: Option<f64>,
) -> Vec<PlanReport> {
    let waits = Waits::new(program, layout);
    let mut by_class: BTreeMap<Class, u64> = BTreeMap::new();
    let mut largest: Vec<&Tensor> = Vec::new();
    for (tensor, life) in program.tensors.iter().zip(&layout.lifetimes) {
        let alive = life.is_some_and(|l| (l.first..=l.last).contains(&layout.peak_op));
        if (alive || tensor.resident) && tensor.home == Home::Device {
            *by_class.entry(tensor.class).or_default() += tensor.bytes();
            largest.push(tensor);
        }
    }
    largest.sort_by_key(|tensor| std::cmp::Reverse(tensor.bytes()));
    largest.truncate(12);
    let live = |t: &&Tensor| Live { name: t.name.clone(), class: t.class, bytes: t.bytes() };
    let largest = largest.iter().map(live).collect();
    // A step of inference is a token of each sequence.
    let tokens = match recipe.method {
        Method::Infer => recipe.batch as f64,
        _ => (recipe.batch * recipe.accumulate * recipe.sharding.ranks * recipe.seq) as f64,
    };
    let parameters = arch.parameters() as u64;
    // Pieces of a parameter are updated one by one; each parameter is counted once.
    let mut updated = HashSet::new();
    let mut trainable = 0;
    for op in &program.ops {
        let stream = match &op.kind {
            OpKind::AdamW { stream, .. }
            | OpKind::AdamW8bit { stream, .. }
            | OpKind::Sgd { stream, .. } => *stream,
            _ => continue,
        };
        if let Some(param) = op.kind.updated_parameter()
            && updated.insert(stream)
        {
            trainable += program.tensor(param.tensor).elements() as u64;
        }
    }
    let masters = |home: Home| {
        let state = program.tensors.iter().filter(|t| t.class == Class::OptimizerState);
        let masters = state.filter(|t| t.dtype == DType::I16 && t.home == home);
        masters.map(Tensor::bytes).sum()
    };
    let common = PlanReport {
        model: arch.name.clone(),
        parameters,
        trainable_parameters: trainable,
        peak_bytes: layout.slab_bytes,
        lower_bound_bytes: layout.lower_bound,
        host_bytes: layout.host_bytes,
        master_bytes: masters(Home::Device),
        master_host_bytes: masters(Home::Host),
        by_class: by_class.into_iter().map(|(c, b)| (c.name().to_owned(), b.into())).collect(),
        peak_at: if program.ops.is_empty() {
            String::new()
        } else {
            program.op_name(layout.peak_op)
        },
        flops_per_step: program.flops(),
        fragmentation: layout.fragmentation(),
        tensors: program.tensors.len(),
        ops: program.ops.len(),
        largest,
        recipe: serde_json::to_value(recipe).unwrap_or(Value::Null),
        ..PlanReport::default()
    };
    let report = |&ReportFor { device, memory_bytes }: &ReportFor<'_>| {
        let schedule = schedule_with(program, &waits, device, document_tokens);
        let needed = device.needed_bytes(layout.slab_bytes, layout.host_bytes);
        let peers = device.peers.as_ref().filter(|_| recipe.sharding.ranks > 1);
        PlanReport {
            overhead_bytes: device.overhead_beside(layout.host_bytes),
            fits: memory_bytes.map(|m| needed <= m),
            free_bytes: memory_bytes.map(|m| m as i64 - needed as i64),
            memory_bytes,
            step_seconds: schedule.step_seconds,
            tokens_per_second: tokens / schedule.step_seconds,
            bottleneck: schedule.bottleneck,
            lane_seconds: lane_seconds(&schedule),
            device: device.name.clone(),
            device_source: device.source.clone(),
            communication: peers.map(|peers| communication(recipe, program, peers, &schedule)),
            ..common.clone()
        }
    };
    places.iter().map(report).collect()
}

//! Seconds: what each op costs on a device, how the lanes overlap, and what bounds
//! the step.

use std::collections::VecDeque;

use plimsoll_arch::DType;
use plimsoll_program::{Lane, OpKind, Program, Section};

use crate::profile::{DeviceProfile, PerType};
use crate::{Layout, Waits};

/// Planned time of one op.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OpTime {
    pub seconds: f64,
    /// The op waits for memory rather than for arithmetic.
    pub memory_bound: bool,
    pub lane: Lane,
    /// When the op starts, in seconds since its section did.
    pub start: f64,
}

/// Planned time of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    pub step_seconds: f64,
    /// Seconds of the compute lane that arithmetic bounds.
    pub arithmetic_seconds: f64,
    /// Seconds of the compute lane that memory traffic bounds.
    pub memory_seconds: f64,
    /// Seconds in which each lane has something to do, by [`Lane::index`].
    pub lane_seconds: [f64; Lane::ALL.len()],
    /// Seconds in which the communication lane works and the compute lane does not.
    pub exposed_seconds: f64,
    /// What to speed up first: `arithmetic`, `memory`, `link` (between host and
    /// device), `communication`, or `host` (updates on its cores).
    pub bottleneck: &'static str,
    /// One execution of each op.
    pub ops: Vec<OpTime>,
}

/// Simulates one step on a device: lanes run beside each other, ops wait for what
/// [`Waits`] says, and all lanes join at the end of each run of a section.
///
/// `document_tokens` is how long the documents of a row are, where attention stays
/// within them: the mean over all tokens of the length of a token's own document.
/// None is one document a row, the most that attention can cost.
pub fn schedule(
    program: &Program,
    layout: &Layout,
    device: &DeviceProfile,
    document_tokens: Option<f64>,
) -> Schedule {
    schedule_with(program, &Waits::new(program, layout), device, document_tokens)
}

/// [`schedule`] for waits that are known: they are the same on every device.
pub(crate) fn schedule_with(
    program: &Program,
    waits: &Waits,
    device: &DeviceProfile,
    document_tokens: Option<f64>,
) -> Schedule {
    let mut ops = Vec::with_capacity(program.ops.len());
    let mut step_seconds = 1e-6 * device.step_us;
    let (mut arithmetic_seconds, mut memory_seconds) = (0.0, 0.0);
    let mut lane_seconds = [0.0; Lane::ALL.len()];
    let mut exposed_seconds = 0.0;
    for section in &program.sections {
        time_ops(program, section, waits, device, document_tokens, &mut ops);
        let repeat = section.repeat as f64;
        step_seconds += repeat * overlap(section, waits, device.both_ways(), &mut ops);
        exposed_seconds += repeat * exposed(&ops[section.ops.clone()]);
        for op in &ops[section.ops.clone()] {
            lane_seconds[op.lane.index()] += repeat * op.seconds;
            match (op.lane, op.memory_bound) {
                (Lane::Compute, true) => memory_seconds += repeat * op.seconds,
                (Lane::Compute, false) => arithmetic_seconds += repeat * op.seconds,
                _ => {}
            }
        }
    }
    let lane = |lane: Lane| lane_seconds[lane.index()];
    let link = lane(Lane::HostToDevice) + lane(Lane::DeviceToHost);
    let host = lane(Lane::Host);
    let others = [Lane::HostToDevice, Lane::DeviceToHost, Lane::Communication].map(lane);
    // What computation waits for, where it waits: a lane that is busy beside it bounds nothing.
    let waits = step_seconds - lane(Lane::Compute) > BOUND_BY_WAITING * step_seconds;
    let bottleneck = match waits {
        true if others.iter().all(|other| host > *other) => "host",
        true if link > lane(Lane::Communication) => "link",
        true if lane(Lane::Communication) > 0.0 => "communication",
        _ if memory_seconds > arithmetic_seconds => "memory",
        _ => "arithmetic",
    };
    Schedule {
        step_seconds,
        arithmetic_seconds,
        memory_seconds,
        lane_seconds,
        exposed_seconds,
        bottleneck,
        ops,
    }
}

/// Part of a step that computation waits, from which on that is what bounds it.
const BOUND_BY_WAITING: f64 = 0.1;

/// Appends the seconds of a section's ops, each on its own.
fn time_ops(
    program: &Program,
    section: &Section,
    waits: &Waits,
    device: &DeviceProfile,
    document_tokens: Option<f64>,
    ops: &mut Vec<OpTime>,
) {
    let peak =
        PerType { bf16: device.products.bf16.best_rate(), f32: device.products.f32.best_rate() };
    let mut at = section.ops.start;
    // Ops up to it may share a launch with the one at hand; so may those between.
    let mut apart = at;
    while at < section.ops.end {
        if at >= apart {
            apart = waits.launch_end(program, at, section.ops.end);
        }
        let rest = &program.ops[at..apart];
        let (count, seconds) = device.launch_seconds(program, rest, document_tokens);
        let now = &rest[..count];
        let total: f64 = now.iter().map(|op| program.work(op).bytes).sum();
        for op in now {
            let work = program.work(op);
            let arithmetic = work.matmul_flops / peak.of(operand_type(program, &op.kind));
            let memory_bound = work.bytes / device.copy_bytes_per_second > arithmetic;
            // One launch is shared out by the bytes that each op moves.
            let share = if total > 0.0 { work.bytes / total } else { 1.0 / count as f64 };
            let lane = program.lane(&op.kind);
            ops.push(OpTime { seconds: seconds * share, memory_bound, lane, start: 0.0 });
        }
        at += count;
    }
}

/// Starts each op of a section when its lane and what it waits for are ready; the
/// seconds until the last lane is. While copies go both ways, each keeps `both_ways` of
/// its rate, and takes so much longer.
fn overlap(section: &Section, waits: &Waits, both_ways: f64, ops: &mut [OpTime]) -> f64 {
    const LANES: usize = Lane::ALL.len();
    let first = section.ops.start;
    let mut queues: [VecDeque<usize>; LANES] = Default::default();
    section.ops.clone().for_each(|at| queues[ops[at].lane.index()].push_back(at));
    let mut done = vec![false; section.ops.len()];
    // What each lane works at, and seconds of it that are left at full rate.
    let mut works: [Option<(usize, f64)>; LANES] = [None; LANES];
    let mut now = 0.0;
    loop {
        for lane in 0..LANES {
            if works[lane].is_none()
                && let Some(at) = queues[lane].front().copied()
                && waits.of(at).iter().all(|op| *op < first || done[*op - first])
            {
                queues[lane].pop_front();
                ops[at].start = now;
                works[lane] = Some((at, ops[at].seconds));
            }
        }
        let busy = |lane: Lane| works[lane.index()].is_some();
        let crowded = busy(Lane::HostToDevice) && busy(Lane::DeviceToHost);
        let rate = |lane| if crowded && is_copy(lane) { both_ways } else { 1.0 };
        let rates = Lane::ALL.map(rate);
        let left = |(work, rate): (&Option<(usize, f64)>, f64)| work.map(|(_, left)| left / rate);
        let Some(next) = works.iter().zip(rates).filter_map(left).reduce(f64::min) else {
            return now;
        };
        now += next;
        for (work, rate) in works.iter_mut().zip(rates) {
            let Some((at, left)) = work else { continue };
            // To a picosecond: what rounding leaves of an op is none.
            if *left / rate <= next + 1e-12 {
                if is_copy(ops[*at].lane) {
                    ops[*at].seconds = now - ops[*at].start;
                }
                done[*at - first] = true;
                *work = None;
            } else {
                *left -= next * rate;
            }
        }
    }
}

fn is_copy(lane: Lane) -> bool {
    matches!(lane, Lane::HostToDevice | Lane::DeviceToHost)
}

/// Seconds of a section in which the communication lane works and the compute lane
/// does not.
fn exposed(ops: &[OpTime]) -> f64 {
    let on = |lane: Lane| ops.iter().filter(move |op| op.lane == lane);
    let mut compute = on(Lane::Compute).peekable();
    let mut seconds = 0.0;
    for op in on(Lane::Communication) {
        let (mut at, end) = (op.start, op.start + op.seconds);
        // Both lanes are in order of time: what ended before `at` is of no use later.
        while compute.next_if(|c| c.start + c.seconds <= at).is_some() {}
        let mut busy = compute.clone();
        while at < end {
            match busy.next() {
                Some(c) if c.start < end => {
                    seconds += (c.start - at).max(0.0);
                    at = at.max(c.start + c.seconds);
                }
                _ => {
                    seconds += end - at;
                    at = end;
                }
            }
        }
    }
    seconds
}

/// Type of the first operand that an op has: what its arithmetic reads.
fn operand_type(program: &Program, kind: &OpKind) -> DType {
    let mut first = None;
    kind.for_each_operand(|t, _| {
        first.get_or_insert(program.tensor(t).dtype);
    });
    first.unwrap_or(DType::F32)
}

//! Seconds: what each op costs on a device, and what bounds the step.

use plimsoll_arch::DType;
use plimsoll_program::{OpKind, Program};

use crate::profile::{DeviceProfile, PerType};

/// Planned time of one op.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OpTime {
    pub seconds: f64,
    /// The op waits for memory rather than for arithmetic.
    pub memory_bound: bool,
}

/// Planned time of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    pub step_seconds: f64,
    /// Seconds of the compute lane that arithmetic bounds.
    pub arithmetic_seconds: f64,
    /// Seconds of the compute lane that memory traffic bounds.
    pub memory_seconds: f64,
    /// What to speed up first: `arithmetic` or `memory`.
    pub bottleneck: &'static str,
    /// One execution of each op.
    pub ops: Vec<OpTime>,
}

/// Simulates one step on a device. Every op of today's programs runs on the
/// compute lane, one after the other.
///
/// `document_tokens` is how long the documents of a row are, where attention stays
/// within them: the mean over all tokens of the length of a token's own document.
/// None is one document a row, the most that attention can cost.
pub fn schedule(
    program: &Program,
    device: &DeviceProfile,
    document_tokens: Option<f64>,
) -> Schedule {
    let mut ops = Vec::with_capacity(program.ops.len());
    let (mut arithmetic_seconds, mut memory_seconds) = (0.0, 0.0);
    let peak =
        PerType { bf16: device.products.bf16.best_rate(), f32: device.products.f32.best_rate() };
    for section in &program.sections {
        let mut rest = &program.ops[section.ops.clone()];
        while !rest.is_empty() {
            let (count, seconds) = device.launch_seconds(program, rest, document_tokens);
            let (now, later) = rest.split_at(count);
            let total: f64 = now.iter().map(|op| program.work(op).bytes).sum();
            for op in now {
                let work = program.work(op);
                let arithmetic = work.matmul_flops / peak.of(operand_type(program, &op.kind));
                let memory_bound = work.bytes / device.copy_bytes_per_second > arithmetic;
                // One launch is shared out by the bytes that each op moves.
                let share = if total > 0.0 { work.bytes / total } else { 1.0 / count as f64 };
                let seconds = seconds * share;
                let lane = if memory_bound { &mut memory_seconds } else { &mut arithmetic_seconds };
                *lane += seconds * section.repeat as f64;
                ops.push(OpTime { seconds, memory_bound });
            }
            rest = later;
        }
    }
    Schedule {
        step_seconds: arithmetic_seconds + memory_seconds + 1e-6 * device.step_us,
        bottleneck: if memory_seconds > arithmetic_seconds { "memory" } else { "arithmetic" },
        arithmetic_seconds,
        memory_seconds,
        ops,
    }
}

/// Type of the first operand that an op has: what its arithmetic reads.
fn operand_type(program: &Program, kind: &OpKind) -> DType {
    let mut first = None;
    kind.for_each_operand(|t, _| {
        first.get_or_insert(program.tensor(t).dtype);
    });
    first.unwrap_or(DType::F32)
}

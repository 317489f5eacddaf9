//! Seconds: what each op costs on a device, and when each lane is busy.

use plimsoll_arch::DType;
use plimsoll_program::Program;

use crate::catalogue::DeviceProfile;

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
pub fn schedule(program: &Program, precision: DType, device: &DeviceProfile) -> Schedule {
    let matmul_rate = device.matmul_rate(precision);
    let mut ops = Vec::with_capacity(program.ops.len());
    let (mut arithmetic_seconds, mut memory_seconds) = (0.0, 0.0);
    for section in &program.sections {
        for op in &program.ops[section.ops.clone()] {
            let work = program.work(op);
            let arithmetic = work.matmul_flops / matmul_rate
                + (work.flops - work.matmul_flops) / device.vector_flops;
            let memory = work.bytes / device.memory_bytes_per_second;
            let seconds = arithmetic.max(memory) + device.op_overhead_seconds;
            let memory_bound = memory > arithmetic;
            let lane = if memory_bound { &mut memory_seconds } else { &mut arithmetic_seconds };
            *lane += seconds * section.repeat as f64;
            ops.push(OpTime { seconds, memory_bound });
        }
    }
    Schedule {
        step_seconds: arithmetic_seconds + memory_seconds,
        bottleneck: if memory_seconds > arithmetic_seconds { "memory" } else { "arithmetic" },
        arithmetic_seconds,
        memory_seconds,
        ops,
    }
}

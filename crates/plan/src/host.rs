//! The machine that a device hangs on: its cores, where updates run there, and its
//! memory, which copies of all its devices share.

use std::borrow::Cow;

use plimsoll_arch::DType;
use plimsoll_program::{Class, Op, OpKind, Program, View};
use serde::{Deserialize, Serialize};

use crate::gpu;

/// What one machine gives to the ranks on it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Cores for updates, of all ranks together.
    pub cores: f64,
    /// Bytes that its memory reads plus writes a second, for cores and copies together.
    pub bytes_per_second: f64,
    /// Ranks that share both.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub ranks: usize,
    /// Where the figures come from, in words.
    pub source: Cow<'static, str>,
}

fn one() -> usize {
    1
}

fn is_one(ranks: &usize) -> bool {
    *ranks == 1
}

/// Machines as they are built and rented: cores and GB/s for each GPU.
struct Machine {
    cores: f64,
    rate: f64,
    source: &'static str,
}

/// Two H200 of one machine with 16 cores each, streaming optimizer state both ways at
/// once: 37 GB/s each way and GPU.
const HOPPER: Machine = Machine {
    cores: 16.0,
    rate: 75.0,
    source: "default: 16 cores and 75 GB/s a GPU, measured beside two H200; one alone has two shares",
};
/// As a DGX A100 has them: two sockets with eight channels of DDR4-3200 each (410 GB/s)
/// and 128 cores for eight GPUs; four fifths of the channels' rate are reached.
const SERVER: Machine = Machine {
    cores: 16.0,
    rate: 41.0,
    source: "default: a guess of 16 cores and 41 GB/s a GPU, an eighth of a server with two \
             sockets of eight DDR4-3200 channels; one alone has two shares",
};
/// Two channels of DDR5-5600 (90 GB/s) for one or two GPUs, likewise.
const DESKTOP: Machine = Machine {
    cores: 16.0,
    rate: 36.0,
    source: "default: a guess of 16 cores and 72 GB/s, a desktop with two channels of DDR5-5600",
};

/// A GPU alone in its machine, or with its neighbours idle, has this many shares.
const SHARES_OF_ONE: usize = 2;

/// Nanoseconds of one core for an element of an update, with all operands in memory that
/// no cache holds: `examples/optimizer.rs` of `plimsoll-cpu` on a Zen 3 core (AVX2).
const ADAMW_NS: f64 = 1.0;
const ADAMW_BF16_STATE_NS: f64 = 1.5;
const ADAMW_8BIT_NS: f64 = 4.5;
const SGD_NS: f64 = 1.0;

/// Seconds until a stream has called a function on the host and its threads are awake.
const CALL_SECONDS: f64 = 30e-6;

impl Host {
    /// What a machine with `ranks` GPUs of a name usually has.
    pub fn of_gpu(name: &str, ranks: usize) -> Host {
        let name = gpu(name).map_or(name, |g| g.name);
        let class = match name {
            "h100" | "h200" | "b200" => HOPPER,
            "rtx-3090" | "rtx-4090" | "rtx-5090" => DESKTOP,
            _ => SERVER,
        };
        let ranks = ranks.max(1);
        Host {
            cores: class.cores * ranks as f64,
            bytes_per_second: 1e9 * class.rate * ranks.max(SHARES_OF_ONE) as f64,
            ranks,
            source: class.source.into(),
        }
    }

    /// Bytes a second that one rank's copies reach in each direction, with both at work
    /// on all ranks.
    pub fn copy_bytes_per_second(&self) -> f64 {
        self.share() / 2.0
    }

    fn share(&self) -> f64 {
        self.bytes_per_second / self.ranks.max(1) as f64
    }

    /// Seconds of an update on the host, beside those of the other ranks.
    ///
    /// What is staged goes through memory once more for each time that the update reads
    /// or writes it: the copies that bring and fetch it.
    pub fn update_seconds(&self, program: &Program, op: &Op) -> f64 {
        let Some((param, grad, state)) = op.kind.update_operands() else { return 0.0 };
        let bytes =
            |view: &View| (view.elements() * program.tensor(view.tensor).dtype.bytes()) as f64;
        let staged = |view: &View| program.tensor(view.tensor).class == Class::Staging;
        let mut moved = program.work(op).bytes;
        moved += if staged(&param) { 2.0 * bytes(&param) } else { 0.0 };
        moved += if staged(&grad) { bytes(&grad) } else { 0.0 };
        let wide = state[0].is_none_or(|m| program.tensor(m.tensor).dtype != DType::Bf16);
        let ns = match op.kind {
            OpKind::AdamW8bit { .. } => ADAMW_8BIT_NS,
            OpKind::Sgd { .. } => SGD_NS,
            _ if wide => ADAMW_NS,
            _ => ADAMW_BF16_STATE_NS,
        };
        let cores = (self.cores / self.ranks.max(1) as f64).max(1.0);
        let arithmetic = 1e-9 * ns * param.elements() as f64 / cores;
        CALL_SECONDS + arithmetic.max(moved / self.share())
    }
}

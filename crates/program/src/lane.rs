//! Which of a device's engines runs an op.

use crate::{Home, OpKind, Program};

/// A queue of a device. Each runs its ops in program order, beside the others.
///
/// Program order is the order in which ops are issued. An op waits for every
/// earlier op on another lane that touches the same bytes where one of the two
/// writes, so a program means what it means when its ops run one after the other.
/// All lanes join at the end of a section.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lane {
    Compute,
    /// From page-locked host memory to the device.
    HostToDevice,
    DeviceToHost,
    /// Between devices.
    Communication,
    /// The host's cores, on host memory.
    Host,
}

impl Lane {
    pub const ALL: [Lane; 5] =
        [Lane::Compute, Lane::HostToDevice, Lane::DeviceToHost, Lane::Communication, Lane::Host];

    pub fn name(self) -> &'static str {
        match self {
            Lane::Compute => "compute",
            Lane::HostToDevice => "host to device",
            Lane::DeviceToHost => "device to host",
            Lane::Communication => "communication",
            Lane::Host => "host",
        }
    }

    /// Its place in [`Lane::ALL`].
    pub fn index(self) -> usize {
        self as usize
    }
}

impl Program {
    /// The lane that an op of this program runs on: an update runs where its parameter
    /// is.
    pub fn lane(&self, kind: &OpKind) -> Lane {
        match kind {
            OpKind::ToDevice { .. } => Lane::HostToDevice,
            OpKind::ToHost { .. } => Lane::DeviceToHost,
            OpKind::AllGather { .. }
            | OpKind::ReduceScatter { .. }
            | OpKind::AllReduce { .. }
            | OpKind::Hold { .. } => Lane::Communication,
            kind => match kind.update_operands() {
                Some((param, ..)) if self.tensor(param.tensor).home == Home::Host => Lane::Host,
                _ => Lane::Compute,
            },
        }
    }
}

//! Which of a device's engines runs an op.

use crate::OpKind;

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
}

impl Lane {
    pub const ALL: [Lane; 4] =
        [Lane::Compute, Lane::HostToDevice, Lane::DeviceToHost, Lane::Communication];

    pub fn name(self) -> &'static str {
        match self {
            Lane::Compute => "compute",
            Lane::HostToDevice => "host to device",
            Lane::DeviceToHost => "device to host",
            Lane::Communication => "communication",
        }
    }

    /// Its place in [`Lane::ALL`].
    pub fn index(self) -> usize {
        self as usize
    }
}

impl OpKind {
    /// The lane that this op runs on.
    pub fn lane(&self) -> Lane {
        match self {
            OpKind::ToDevice { .. } => Lane::HostToDevice,
            OpKind::ToHost { .. } => Lane::DeviceToHost,
            OpKind::AllGather { .. }
            | OpKind::ReduceScatter { .. }
            | OpKind::AllReduce { .. }
            | OpKind::Hold { .. } => Lane::Communication,
            _ => Lane::Compute,
        }
    }
}

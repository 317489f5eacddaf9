//! Which device a command runs on.

use clap::ValueEnum;
use plimsoll_cpu::{CpuDevice, CpuTarget};
use plimsoll_cuda::{CudaDevice, CudaTarget, device_info};
use plimsoll_plan::{Device, DeviceKind, SlabSizes, Transport};
use plimsoll_program::Target;

use crate::exit::Stop;
use crate::ranks::Member;
use crate::recipe_args::Precision;
use crate::units;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceArg {
    Cpu,
    Cuda,
}

impl DeviceArg {
    /// The device that the user asked for, or the one there is: a usable GPU,
    /// else the CPU.
    pub fn resolve(asked: Option<DeviceArg>) -> DeviceArg {
        let found = || match device_info(0) {
            Ok(_) => DeviceArg::Cuda,
            Err(_) => DeviceArg::Cpu,
        };
        asked.unwrap_or_else(found)
    }

    pub fn name(self) -> &'static str {
        match self {
            DeviceArg::Cpu => "cpu",
            DeviceArg::Cuda => "cuda",
        }
    }

    /// What a profile calls it.
    pub fn kind(self) -> DeviceKind {
        match self {
            DeviceArg::Cpu => DeviceKind::Cpu,
            DeviceArg::Cuda => DeviceKind::Cuda,
        }
    }

    /// Type of weights where the user names none.
    pub fn default_precision(self) -> Precision {
        match self {
            DeviceArg::Cpu => Precision::F32,
            DeviceArg::Cuda => Precision::Bf16,
        }
    }

    /// How much scratch memory its ops want.
    pub fn target(self) -> Box<dyn Target> {
        match self {
            DeviceArg::Cpu => Box::new(CpuTarget { threads: crate::threads() }),
            DeviceArg::Cuda => Box::new(CudaTarget),
        }
    }

    /// Bytes of its memory.
    ///
    /// # Errors
    /// There is no such device.
    pub fn memory_bytes(self) -> Result<u64, Stop> {
        match self {
            DeviceArg::Cpu => plimsoll_measure::machine_memory_limit().map_err(Stop::input),
            DeviceArg::Cuda => Ok(device_info(0).map_err(Stop::input)?.memory_bytes),
        }
    }

    /// Reserves the slabs for one rank of a group.
    ///
    /// # Errors
    /// There is no such device, or not that much memory.
    pub fn reserve_in(
        self,
        slabs: impl Into<SlabSizes>,
        member: Member,
        transport: Transport,
    ) -> Result<Box<dyn Device>, Stop> {
        let Some(group) = member.group else { return self.reserve(slabs) };
        Ok(match self {
            DeviceArg::Cpu => Box::new(CpuDevice::in_group(slabs, member.threads, group)?),
            DeviceArg::Cuda => {
                let device = CudaDevice::in_group(slabs, member.ordinal, group, transport)?;
                Box::new(device.with_host_threads(member.threads))
            }
        })
    }

    /// Bytes that both slabs take of the memory of the device: on the CPU all of it.
    pub fn slab_bytes(self, slabs: SlabSizes) -> u64 {
        match self {
            DeviceArg::Cpu => slabs.device + slabs.host,
            DeviceArg::Cuda => slabs.device,
        }
    }

    /// Refuses slabs in host memory, one for each of `ranks` on this machine, that are
    /// larger than the host's: `given`, or what the kernel says. (What is locked cannot be
    /// swapped out.)
    ///
    /// # Errors
    /// Status 3.
    pub fn host_must_fit(
        self,
        slabs: SlabSizes,
        ranks: usize,
        given: Option<u64>,
    ) -> Result<(), Stop> {
        let limit = match (given, self) {
            _ if slabs.host == 0 => return Ok(()),
            (Some(given), _) => given,
            // What both slabs take together is held against the machine's memory.
            (None, DeviceArg::Cpu) => return Ok(()),
            (None, DeviceArg::Cuda) => {
                plimsoll_measure::machine_memory_limit().map_err(Stop::input)?
            }
        };
        let needed = slabs.host.saturating_mul(ranks as u64);
        if needed <= limit {
            return Ok(());
        }
        Err(Stop::DoesNotFit(format!(
            "offload needs {} of page-locked host memory, of {}: offload less, use \
             --optimizer-dtype bf16 or --optimizer adamw8bit, or, where the machine's memory grows \
             with its use, say how far with --host-memory",
            units::bytes(needed),
            units::bytes(limit)
        )))
    }

    /// Reserves the slabs.
    ///
    /// # Errors
    /// There is no such device, or not that much memory.
    pub fn reserve(self, slabs: impl Into<SlabSizes>) -> Result<Box<dyn Device>, Stop> {
        Ok(match self {
            DeviceArg::Cpu => Box::new(CpuDevice::new(slabs, crate::threads())?),
            DeviceArg::Cuda => {
                Box::new(CudaDevice::new(slabs, 0)?.with_host_threads(crate::threads()))
            }
        })
    }
}

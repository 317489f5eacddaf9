//! Which of the ways between GPUs a run takes.

use clap::ValueEnum;
use plimsoll_cuda::reach_each_other;
use plimsoll_plan::Transport;

use crate::devices::DeviceArg;
use crate::exit::Stop;

/// What carries tensors between GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CollectivesArg {
    Auto,
    /// Their copy engines.
    Copies,
    /// NVIDIA's library.
    Nccl,
}

impl CollectivesArg {
    /// For a plan: none where that is the devices' to say.
    ///
    /// # Errors
    /// Copies do not go from one machine to another.
    pub fn planned(self, nodes: usize) -> Result<Option<Transport>, Stop> {
        match self {
            CollectivesArg::Auto => Ok(None),
            CollectivesArg::Nccl => Ok(Some(Transport::Nccl)),
            CollectivesArg::Copies if nodes <= 1 => Ok(Some(Transport::Copies)),
            CollectivesArg::Copies => Err(Stop::Input(format!(
                "--collectives copies, but GPUs of {nodes} machines do not reach each other's \
                 memory: use nccl, or auto"
            ))),
        }
    }

    /// For a run of so many ranks on devices of this kind, `local` of them in this process.
    ///
    /// # Errors
    /// Copies are asked for, and not all ranks are in this process or a GPU does not reach
    /// the memory of another.
    pub fn here(
        self,
        kind: DeviceArg,
        ranks: usize,
        local: usize,
    ) -> Result<Option<Transport>, Stop> {
        if kind == DeviceArg::Cpu || ranks <= 1 {
            return Ok(Some(Transport::Host));
        }
        let transport = match self {
            CollectivesArg::Auto if local == ranks && reach_each_other(ranks) => Transport::Copies,
            CollectivesArg::Auto | CollectivesArg::Nccl => Transport::Nccl,
            CollectivesArg::Copies if local < ranks => {
                return Err(Stop::Input(format!(
                    "--collectives copies, but of {ranks} ranks {local} are in this process: \
                     start one process with --gpus {ranks}, or use nccl"
                )));
            }
            CollectivesArg::Copies => Transport::Copies,
        };
        Ok(Some(transport))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_stay_in_one_process_on_one_machine() {
        let copies = CollectivesArg::Copies;
        assert_eq!(copies.planned(1).unwrap(), Some(Transport::Copies));
        assert!(copies.planned(2).unwrap_err().to_string().contains("2 machines"));
        assert_eq!(copies.here(DeviceArg::Cuda, 2, 2).unwrap(), Some(Transport::Copies));
        let apart = copies.here(DeviceArg::Cuda, 2, 1).unwrap_err();
        assert!(apart.to_string().contains("--gpus 2"), "{apart}");
    }

    #[test]
    fn processes_take_nccl_and_cpus_their_memory() {
        let auto = CollectivesArg::Auto;
        assert_eq!(auto.here(DeviceArg::Cuda, 2, 1).unwrap(), Some(Transport::Nccl));
        assert_eq!(auto.here(DeviceArg::Cpu, 2, 2).unwrap(), Some(Transport::Host));
        assert_eq!(auto.planned(4).unwrap(), None);
    }
}

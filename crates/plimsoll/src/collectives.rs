//! Which of the ways between GPUs a run takes.

use clap::ValueEnum;
use plimsoll_cuda::{device_info, reach_each_other};
use plimsoll_plan::{Transport, has_nvlink};

use crate::devices::DeviceArg;
use crate::exit::Stop;

/// What carries tensors between GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CollectivesArg {
    /// Copies where all ranks are in one process and their GPUs have NVLink, else NCCL.
    Auto,
    /// NVIDIA's library.
    Nccl,
    /// Their copy engines; for ranks of one process whose GPUs reach each other's memory.
    Copies,
}

impl CollectivesArg {
    /// For a plan of one process a machine with GPUs of this kind.
    ///
    /// # Errors
    /// Copies do not go from one machine to another.
    pub fn planned(self, nodes: usize, gpu: &str) -> Result<Transport, Stop> {
        match self {
            CollectivesArg::Auto if nodes <= 1 && has_nvlink(gpu) => Ok(Transport::Copies),
            CollectivesArg::Auto | CollectivesArg::Nccl => Ok(Transport::Nccl),
            CollectivesArg::Copies if nodes <= 1 => Ok(Transport::Copies),
            CollectivesArg::Copies => Err(Stop::Input(format!(
                "--collectives copies, but GPUs of {nodes} machines do not reach each other's \
                 memory: use nccl"
            ))),
        }
    }

    /// For a run of so many ranks on devices of this kind, `local` of them in this process.
    ///
    /// # Errors
    /// Copies are asked for, and not all ranks are in this process or a GPU does not reach
    /// the memory of another.
    pub fn here(self, kind: DeviceArg, ranks: usize, local: usize) -> Result<Transport, Stop> {
        match self {
            _ if kind == DeviceArg::Cpu || ranks <= 1 => Ok(Transport::Host),
            CollectivesArg::Auto if local == ranks && linked(ranks) => Ok(Transport::Copies),
            CollectivesArg::Auto | CollectivesArg::Nccl => Ok(Transport::Nccl),
            CollectivesArg::Copies if local < ranks => Err(Stop::Input(format!(
                "--collectives copies, but of {ranks} ranks {local} are in this process: \
                     start one process with --gpus {ranks}, or use nccl"
            ))),
            CollectivesArg::Copies => {
                // Without a driver that is what is to be said.
                device_info(0).map_err(Stop::input)?;
                match reach_each_other(ranks) {
                    true => Ok(Transport::Copies),
                    false => Err(Stop::Input(
                        "--collectives copies, but a GPU does not reach the memory of another: \
                         use nccl"
                            .to_owned(),
                    )),
                }
            }
        }
    }
}

/// Whether the GPUs here are of a kind with NVLink and reach each other's memory.
fn linked(ranks: usize) -> bool {
    device_info(0).is_ok_and(|info| has_nvlink(&info.name)) && reach_each_other(ranks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_stay_in_one_process_on_one_machine() {
        let copies = CollectivesArg::Copies;
        assert_eq!(copies.planned(1, "l40s").unwrap(), Transport::Copies);
        assert!(copies.planned(2, "h200").unwrap_err().to_string().contains("2 machines"));
        let apart = copies.here(DeviceArg::Cuda, 2, 1).unwrap_err();
        assert!(apart.to_string().contains("--gpus 2"), "{apart}");
    }

    #[test]
    fn processes_take_nccl_and_cpus_their_memory() {
        let nccl = CollectivesArg::Nccl;
        assert_eq!(nccl.here(DeviceArg::Cuda, 2, 1).unwrap(), Transport::Nccl);
        assert_eq!(nccl.here(DeviceArg::Cpu, 2, 2).unwrap(), Transport::Host);
        assert_eq!(nccl.planned(4, "h200").unwrap(), Transport::Nccl);
    }

    #[test]
    fn gpus_with_links_of_their_own_copy() {
        let auto = CollectivesArg::Auto;
        assert_eq!(auto.planned(1, "NVIDIA H200").unwrap(), Transport::Copies);
        assert_eq!(auto.planned(2, "h200").unwrap(), Transport::Nccl);
        assert_eq!(auto.planned(1, "rtx-4090").unwrap(), Transport::Nccl);
        assert_eq!(auto.here(DeviceArg::Cuda, 2, 1).unwrap(), Transport::Nccl);
    }
}

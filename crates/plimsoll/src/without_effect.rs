//! Options that would change nothing are refused: whoever writes one expects an effect.

use plimsoll_plan::DeviceKind;

use crate::collectives::CollectivesArg;
use crate::exit::Stop;
use crate::recipe_args::{MethodArg, RecipeArgs};

/// What decides whether the options about the host and between ranks have an effect.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    pub device: DeviceKind,
    /// That train one model, on all machines together.
    pub ranks: usize,
    /// Optimizer state is in host memory, or a search tries that.
    pub moves_state: bool,
    /// Anything is in host memory, or a search tries that.
    pub moves_anything: bool,
}

impl Setting {
    /// Of a recipe as it is given.
    pub fn of(args: &RecipeArgs, device: DeviceKind, ranks: usize) -> Setting {
        let offload = &args.offload;
        let (moves_state, moves_anything) = (offload.optimizer, !offload.is_none());
        Setting { device, ranks, moves_state, moves_anything }
    }

    /// Refuses what was written and means nothing here. `--host-memory` is a limit, which
    /// a recipe that offloads nothing keeps; `--collectives auto` leaves the choice.
    ///
    /// # Errors
    /// The first such option, why, and what to do.
    pub fn refuse_without_effect(self, args: &RecipeArgs) -> Result<(), Stop> {
        let refuse = |option: &str, why: &str| Err(Stop::Input(format!("{option} {why}")));
        let host = [
            ("--update-on", args.update_on.is_some()),
            ("--host-cores", args.host_cores.is_some()),
            ("--host-bandwidth", args.host_bandwidth.is_some()),
            ("--host-memory", args.host_memory.is_some()),
        ];
        let collectives = match args.collectives {
            CollectivesArg::Auto => None,
            CollectivesArg::Nccl => Some("--collectives nccl"),
            CollectivesArg::Copies => Some("--collectives copies"),
        };
        if args.method == MethodArg::Infer {
            let given = host.iter().filter(|(_, given)| *given).map(|(option, _)| *option);
            return match given.chain(collectives).next() {
                Some(option) => refuse(
                    option,
                    "means nothing with --method infer, which runs on one device and offloads \
                     nothing: drop it",
                ),
                None => Ok(()),
            };
        }
        for (option, given) in host {
            let needed = match option {
                "--update-on" | "--host-cores" if !self.moves_state => "optimizer",
                "--host-bandwidth" if !self.moves_anything => "optimizer or activations",
                _ => "",
            };
            if given && needed == "optimizer" && args.method != MethodArg::Full {
                return refuse(
                    option,
                    "means nothing with adapters, whose optimizer state is small and stays on the \
                     device: drop it",
                );
            }
            if given && !needed.is_empty() {
                return refuse(
                    option,
                    &format!(
                        "is about what is in host memory, and --offload {} leaves it on the \
                         device: give --offload {needed} as well, or drop {option}",
                        args.offload
                    ),
                );
            }
            let speed = ["--host-cores", "--host-bandwidth"].contains(&option);
            if given && speed && self.device == DeviceKind::Cpu {
                return refuse(
                    option,
                    "describes the host of a GPU, and here the CPU is the device, whose speed is \
                     that of its profile: drop it, give --gpu to a plan, or measure the CPU with \
                     `plimsoll calibrate`",
                );
            }
        }
        match collectives {
            Some(option) if self.ranks <= 1 => refuse(
                option,
                "is about what several ranks say to each other, and there is one: give --gpus 2 \
                 or more, or drop it",
            ),
            Some(option) if self.device == DeviceKind::Cpu => refuse(
                option,
                "is about GPUs, and ranks on the CPU talk through its memory, or over TCP or MPI: \
                 drop it",
            ),
            _ => Ok(()),
        }
    }
}

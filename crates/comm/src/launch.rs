//! Which rank this process is, as the program that started it says: torchrun, Slurm's
//! `srun`, Open MPI's `mpirun`.

use crate::expand_node_list;

/// Who started the processes of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    Torchrun,
    Slurm,
    Mpi,
}

impl Launcher {
    pub fn name(self) -> &'static str {
        match self {
            Launcher::Torchrun => "torchrun",
            Launcher::Slurm => "srun",
            Launcher::Mpi => "mpirun",
        }
    }
}

/// This process among those of its run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    pub launcher: Launcher,
    pub rank: usize,
    pub ranks: usize,
    /// Among the processes of this machine: the number of its GPU.
    pub local_rank: usize,
    /// Processes on this machine.
    pub local_ranks: usize,
    /// Where rank 0 listens: host and port.
    pub address: String,
}

/// Variables that do not go together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    #[error("{launcher} set {variable}={value}, which is no number below {below}")]
    Value { launcher: &'static str, variable: &'static str, value: String, below: usize },
    #[error("{launcher} did not set {variable}: start all ranks the same way")]
    Missing { launcher: &'static str, variable: &'static str },
    #[error("{launcher} set {variable}={value}: {reason}")]
    Nodes { launcher: &'static str, variable: &'static str, value: String, reason: String },
}

/// Where rank 0 listens if nobody says otherwise.
const PORT: u16 = 29477;
/// More processes than any run has.
const MAX_RANKS: usize = 1 << 20;

impl Launch {
    /// What the environment of this process says; none for a process on its own. Where
    /// several programs have set variables, the innermost counts: torchrun inside of a
    /// Slurm job starts its own processes.
    ///
    /// # Errors
    /// Variables are missing or make no sense.
    pub fn discover() -> Result<Option<Launch>, LaunchError> {
        Launch::from_variables(&|name| std::env::var(name).ok())
    }

    /// As [`Launch::discover`], from other variables.
    ///
    /// # Errors
    /// See there.
    pub fn from_variables(
        get: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Option<Launch>, LaunchError> {
        let found = if get("RANK").is_some() && get("WORLD_SIZE").is_some() {
            Some(torchrun(get)?)
        } else if get("OMPI_COMM_WORLD_RANK").is_some() {
            Some(mpi(get)?)
        } else if get("SLURM_STEP_NUM_TASKS").is_some() && get("SLURM_PROCID").is_some() {
            // Set by srun alone: a batch script is one process, whatever its job asks for.
            Some(slurm(get)?)
        } else {
            None
        };
        Ok(found.filter(|launch| launch.ranks > 1))
    }
}

struct Variables<'a> {
    launcher: Launcher,
    get: &'a dyn Fn(&str) -> Option<String>,
}

impl Variables<'_> {
    fn text(&self, variable: &'static str) -> Result<String, LaunchError> {
        let launcher = self.launcher.name();
        (self.get)(variable).ok_or(LaunchError::Missing { launcher, variable })
    }

    fn number(&self, variable: &'static str, below: usize) -> Result<usize, LaunchError> {
        let value = self.text(variable)?;
        let number = value.trim().parse::<usize>().ok().filter(|n| *n < below);
        let launcher = self.launcher.name();
        number.ok_or(LaunchError::Value { launcher, variable, value, below })
    }

    /// Host and port of rank 0, from MASTER_ADDR and MASTER_PORT where they are set.
    fn address(&self, host: Option<String>) -> Result<String, LaunchError> {
        let host = match (self.get)("MASTER_ADDR").or(host) {
            Some(host) => host,
            None => self.text("MASTER_ADDR")?,
        };
        let mut port = match (self.get)("MASTER_PORT") {
            Some(_) => self.number("MASTER_PORT", 1 << 16)?,
            None => PORT.into(),
        };
        // torchrun itself listens at that port, for its own store.
        if (self.get)("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|v| v == "True") {
            port = if port == 0xffff { port - 1 } else { port + 1 };
        }
        Ok(match host.contains(':') {
            true => format!("[{host}]:{port}"),
            false => format!("{host}:{port}"),
        })
    }
}

fn torchrun(get: &dyn Fn(&str) -> Option<String>) -> Result<Launch, LaunchError> {
    let v = Variables { launcher: Launcher::Torchrun, get };
    let ranks = v.number("WORLD_SIZE", MAX_RANKS)?;
    let local = |name, or: usize| match get(name) {
        Some(_) => v.number(name, MAX_RANKS),
        None => Ok(or),
    };
    let rank = v.number("RANK", ranks)?;
    Ok(Launch {
        launcher: v.launcher,
        rank,
        ranks,
        local_rank: local("LOCAL_RANK", rank)?,
        local_ranks: local("LOCAL_WORLD_SIZE", ranks)?,
        address: v.address(None)?,
    })
}

fn mpi(get: &dyn Fn(&str) -> Option<String>) -> Result<Launch, LaunchError> {
    let v = Variables { launcher: Launcher::Mpi, get };
    let ranks = v.number("OMPI_COMM_WORLD_SIZE", MAX_RANKS)?;
    let local_ranks = v.number("OMPI_COMM_WORLD_LOCAL_SIZE", MAX_RANKS)?;
    // mpirun does not say where rank 0 is; on one machine that is no question.
    let host = (local_ranks == ranks).then(|| "127.0.0.1".to_owned());
    Ok(Launch {
        launcher: v.launcher,
        rank: v.number("OMPI_COMM_WORLD_RANK", ranks)?,
        ranks,
        local_rank: v.number("OMPI_COMM_WORLD_LOCAL_RANK", local_ranks.max(1))?,
        local_ranks,
        // Over MPI nobody needs it.
        address: match v.address(host) {
            Err(_) if cfg!(feature = "mpi") => String::new(),
            address => address?,
        },
    })
}

fn slurm(get: &dyn Fn(&str) -> Option<String>) -> Result<Launch, LaunchError> {
    let v = Variables { launcher: Launcher::Slurm, get };
    let ranks = v.number("SLURM_STEP_NUM_TASKS", MAX_RANKS)?;
    let variable = match get("SLURM_STEP_NODELIST") {
        Some(_) => "SLURM_STEP_NODELIST",
        None => "SLURM_JOB_NODELIST",
    };
    let list = v.text(variable)?;
    let nodes = expand_node_list(&list).map_err(|e| LaunchError::Nodes {
        launcher: v.launcher.name(),
        variable,
        value: list.clone(),
        reason: e.reason.to_owned(),
    })?;
    // The first task runs on the first node of its step.
    let host = nodes.first().cloned();
    let local_ranks = ranks.div_ceil(nodes.len().max(1));
    // Several steps of a job may share a machine: each has a port of its own.
    let step = get("SLURM_JOB_ID").and_then(|id| id.parse::<u64>().ok()).unwrap_or(0) * 7
        + get("SLURM_STEP_ID").and_then(|id| id.parse::<u64>().ok()).unwrap_or(0);
    let mut address = v.address(host)?;
    if get("MASTER_PORT").is_none()
        && let Some((host, _)) = address.rsplit_once(':')
    {
        address = format!("{host}:{}", PORT as u64 + step % 1000);
    }
    Ok(Launch {
        launcher: v.launcher,
        rank: v.number("SLURM_PROCID", ranks)?,
        ranks,
        local_rank: v.number("SLURM_LOCALID", MAX_RANKS)?,
        local_ranks,
        address,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(variables: &[(&str, &str)]) -> Result<Option<Launch>, LaunchError> {
        Launch::from_variables(&|name| {
            variables.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned())
        })
    }

    #[test]
    fn each_launcher_says_who_a_process_is() {
        let torchrun = [
            ("RANK", "5"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "4"),
            ("MASTER_ADDR", "node7"),
            ("MASTER_PORT", "1234"),
        ];
        let expected = Launch {
            launcher: Launcher::Torchrun,
            rank: 5,
            ranks: 8,
            local_rank: 1,
            local_ranks: 4,
            address: "node7:1234".into(),
        };
        assert_eq!(launch(&torchrun), Ok(Some(expected.clone())));
        let mut elastic = torchrun.to_vec();
        elastic.push(("TORCHELASTIC_USE_AGENT_STORE", "True"));
        let found = launch(&elastic).unwrap().unwrap();
        assert_eq!(found.address, "node7:1235", "torchrun is at 1234");

        let slurm = [
            ("SLURM_STEP_NUM_TASKS", "8"),
            ("SLURM_PROCID", "5"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_JOB_ID", "10"),
            ("SLURM_STEP_ID", "2"),
            ("SLURM_STEP_NODELIST", "node[07-08]"),
        ];
        let address = format!("node07:{}", PORT + 72);
        let found = Launch { launcher: Launcher::Slurm, address, ..expected.clone() };
        assert_eq!(launch(&slurm), Ok(Some(found)));

        let mpi = [
            ("OMPI_COMM_WORLD_RANK", "5"),
            ("OMPI_COMM_WORLD_SIZE", "8"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "5"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "8"),
        ];
        let address = format!("127.0.0.1:{PORT}");
        let found =
            Launch { launcher: Launcher::Mpi, local_rank: 5, local_ranks: 8, address, ..expected };
        assert_eq!(launch(&mpi), Ok(Some(found)));
    }

    #[test]
    fn a_process_on_its_own_is_none_of_many() {
        assert_eq!(launch(&[]), Ok(None));
        assert_eq!(launch(&[("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "x")]), Ok(None));
        // A batch script: its job has tasks, but it is none of them.
        assert_eq!(launch(&[("SLURM_NTASKS", "8"), ("SLURM_PROCID", "0")]), Ok(None));
    }

    #[test]
    fn what_does_not_fit_together_is_named() {
        let error = launch(&[("RANK", "8"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "x")]);
        assert!(error.unwrap_err().to_string().contains("RANK=8"));
        let error = launch(&[("RANK", "1"), ("WORLD_SIZE", "8")]);
        assert!(error.unwrap_err().to_string().contains("MASTER_ADDR"));
        let nodes = [
            ("SLURM_STEP_NUM_TASKS", "8"),
            ("SLURM_PROCID", "5"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_STEP_NODELIST", "node[7"),
        ];
        assert!(launch(&nodes).unwrap_err().to_string().contains("node[7"));
    }
}

//! The ranks that train one model: threads of this process, one for each device; or
//! processes, one for each rank, that torchrun, srun or mpirun has started.

use std::any::Any;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use plimsoll_comm::{AbortHandle, Communicator, Launch, Launcher, Tcp, threads};
use serde_json::{Map, Value};

use crate::exit::Stop;
use crate::output;

/// One rank, for the thread that runs it.
pub struct Member {
    pub rank: usize,
    /// Number of its GPU on this machine.
    pub ordinal: usize,
    /// Threads of the CPU device.
    pub threads: usize,
    /// None for a rank alone.
    pub group: Option<Box<dyn Communicator>>,
}

/// The ranks of this process.
pub struct Team {
    ranks: usize,
    /// Machines.
    nodes: usize,
    members: Vec<Member>,
    /// What must outlive all members, and end in this thread.
    _session: Option<Box<dyn Any>>,
}

/// How long ranks wait for each other at the start.
const PATIENCE: Duration = Duration::from_secs(120);

/// After one rank has failed, how long the others may take to notice.
const GRACE: Duration = Duration::from_secs(20);

impl Team {
    /// The ranks that a launcher has started, which meet here; else as many threads as
    /// the user wants devices.
    ///
    /// # Errors
    /// The launcher's variables make no sense or contradict `gpus`, or a rank does not
    /// come.
    pub fn open(gpus: usize) -> Result<Team, Stop> {
        let Some(launch) = Launch::discover().map_err(Stop::input)? else {
            return Ok(Team::threads(gpus));
        };
        if gpus > 1 && gpus != launch.ranks && gpus != launch.local_ranks {
            return Err(Stop::Input(format!(
                "--gpus {gpus}, but {} has started {} ranks, {} on this machine: every rank has \
                 one device; drop --gpus",
                launch.launcher.name(),
                launch.ranks,
                launch.local_ranks
            )));
        }
        let Launch { rank, ranks, local_rank, local_ranks, address, .. } = launch;
        output::set_rank(rank);
        let (group, session) = meet(launch.launcher, rank, ranks, &address)?;
        let threads = (crate::threads() / local_ranks.max(1)).max(1);
        let members = vec![Member { rank, ordinal: local_rank, threads, group: Some(group) }];
        let nodes = ranks.div_ceil(local_ranks.max(1));
        Ok(Team { ranks, nodes, members, _session: session })
    }

    /// As many threads as there are ranks.
    pub fn threads(ranks: usize) -> Team {
        let alone = ranks <= 1;
        let share = (crate::threads() / ranks.max(1)).max(1);
        let members = threads(ranks.max(1)).into_iter().enumerate().map(|(rank, group)| Member {
            rank,
            ordinal: rank,
            threads: share,
            group: (!alone).then(|| Box::new(group) as Box<dyn Communicator>),
        });
        Team { ranks: ranks.max(1), nodes: 1, members: members.collect(), _session: None }
    }

    /// All ranks, those of other processes included.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Ranks in this process.
    pub fn local(&self) -> usize {
        self.members.len()
    }

    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Whether rank 0 is in this process: it speaks for all.
    pub fn leads(&self) -> bool {
        self.members.iter().any(|m| m.rank == 0)
    }

    /// Runs `work` in the process of rank 0 and tells all others its result.
    ///
    /// # Errors
    /// That of `work`, everywhere; or a rank is gone.
    pub fn lead(&mut self, work: impl FnOnce() -> Result<String, Stop>) -> Result<String, Stop> {
        let leads = self.leads();
        let several = self.members.len() < self.ranks;
        let group = self.members.first_mut().and_then(|m| m.group.as_mut()).filter(|_| several);
        let Some(group) = group else { return work() };
        let failed = |e: plimsoll_comm::CommError| Stop::Failed(e.to_string());
        let mut text = Vec::new();
        if leads {
            text = work().inspect_err(|stop| group.abort(&stop.to_string()))?.into_bytes();
        }
        let mut length = (text.len() as u64).to_le_bytes();
        group.broadcast(&mut length, 0).map_err(failed)?;
        text.resize(u64::from_le_bytes(length) as usize, 0);
        group.broadcast(&mut text, 0).map_err(failed)?;
        String::from_utf8(text).map_err(|e| Stop::Failed(format!("rank 0 sent no text: {e}")))
    }

    /// Refuses settings that are not those of rank 0: ranks of one run would train apart.
    ///
    /// # Errors
    /// The first that differs, or a rank is gone.
    pub fn agree(&mut self, settings: &Value) -> Result<(), Stop> {
        let first: Value = serde_json::from_str(&self.lead(|| Ok(settings.to_string()))?)
            .map_err(|e| Stop::Failed(format!("rank 0 sent no settings: {e}")))?;
        let (Some(ours), Some(theirs)) = (settings.as_object(), first.as_object()) else {
            return Ok(());
        };
        let names = ours.keys().chain(theirs.keys());
        let Some(name) = names.into_iter().find(|name| ours.get(*name) != theirs.get(*name)) else {
            return Ok(());
        };
        let said = |all: &Map<String, Value>| all.get(name).map_or("none".into(), Value::to_string);
        let member = self.members.first();
        let text = format!(
            "rank {} has {name} {}, and rank 0 has {}: start all ranks of a run with the same \
             options, model, data and adapter",
            member.map_or(0, |m| m.rank),
            said(ours),
            said(theirs)
        );
        if let Some(group) = member.and_then(|m| m.group.as_ref()) {
            group.abort(&text);
        }
        Err(Stop::Input(text))
    }

    /// Runs `work` for every rank of this process, each in a thread of its own and with
    /// its own of `inputs`; the results, by rank. Where one fails all end, with its cause.
    ///
    /// # Errors
    /// That of the rank that failed first.
    pub fn run<I: Send, T: Send>(
        mut self,
        mut inputs: Vec<I>,
        work: impl Fn(Member, I) -> Result<T, Stop> + Sync,
    ) -> Result<Vec<T>, Stop> {
        let count = self.members.len();
        if count == 1
            && let (Some(member), Some(input)) = (self.members.pop(), inputs.pop())
        {
            // No thread beside this one.
            let abort = member.group.as_ref().map(|g| g.abort_handle());
            let result = work(member, input);
            if let (Err(stop), Some(abort)) = (&result, abort) {
                abort(&stop.to_string());
            }
            return Ok(vec![result?]);
        }
        let (done, results) = mpsc::channel();
        std::thread::scope(|scope| {
            for (place, (member, input)) in self.members.into_iter().zip(inputs).enumerate() {
                let (work, done) = (&work, done.clone());
                let abort = member.group.as_ref().map(|g| g.abort_handle());
                scope.spawn(move || {
                    let mut guard = Guard { abort, done, place, failed: true };
                    let result = work(member, input);
                    if let (Err(stop), Some(abort)) = (&result, &guard.abort) {
                        abort(&stop.to_string());
                    }
                    guard.failed = false;
                    let _ = guard.done.send((place, Some(result)));
                });
            }
            collect(count, &results)
        })
    }
}

type Met = (Box<dyn Communicator>, Option<Box<dyn Any>>);

/// The other ranks: over MPI where mpirun has started them and this program was built
/// with it, else over TCP.
fn meet(launcher: Launcher, rank: usize, ranks: usize, address: &str) -> Result<Met, Stop> {
    #[cfg(feature = "mpi")]
    if launcher == Launcher::Mpi {
        let (group, session) =
            plimsoll_comm::Mpi::start().map_err(|e| Stop::Failed(e.to_string()))?;
        note!("{ranks} ranks meet over MPI");
        return Ok((Box::new(group), Some(Box::new(session))));
    }
    note!("{ranks} ranks, started by {}, meet at {address}", launcher.name());
    let group =
        Tcp::connect(rank, ranks, address, PATIENCE).map_err(|e| Stop::Failed(e.to_string()))?;
    Ok((Box::new(group), None))
}

/// Says that a rank is over, also where it panics.
struct Guard<T> {
    abort: Option<AbortHandle>,
    done: mpsc::Sender<(usize, Option<Result<T, Stop>>)>,
    place: usize,
    failed: bool,
}

impl<T> Drop for Guard<T> {
    fn drop(&mut self) {
        if self.failed {
            if let Some(abort) = &self.abort {
                abort("it panicked");
            }
            let _ = self.done.send((self.place, None));
        }
    }
}

fn collect<T>(
    count: usize,
    results: &mpsc::Receiver<(usize, Option<Result<T, Stop>>)>,
) -> Result<Vec<T>, Stop> {
    let mut all: Vec<Option<T>> = (0..count).map(|_| None).collect();
    let mut first: Option<(Stop, Instant)> = None;
    for _ in 0..count {
        let next = match &first {
            None => results.recv().ok(),
            Some((_, since)) => results.recv_timeout(GRACE.saturating_sub(since.elapsed())).ok(),
        };
        match (next, &first) {
            (Some((place, Some(Ok(result)))), _) => all[place] = Some(result),
            (Some((_, Some(Err(stop)))), None) => first = Some((stop, Instant::now())),
            (Some((place, None)), None) => {
                let stop = Stop::Failed(format!("rank {place} panicked: this is a fault of ours"));
                first = Some((stop, Instant::now()));
            }
            (Some(_), Some(_)) => {}
            (None, Some((stop, _))) => {
                // A rank hangs in a device that waits for one that is gone.
                output::error(format_args!("error: {stop}\n"));
                std::process::exit(stop.status().into());
            }
            (None, None) => return Err(Stop::Failed("a rank ended without a word".into())),
        }
    }
    match first {
        Some((stop, _)) => Err(stop),
        None => Ok(all.into_iter().flatten().collect()),
    }
}

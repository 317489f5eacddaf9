//! The ranks that train one model: threads of this process, one for each device.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use plimsoll_comm::{AbortHandle, Communicator, threads};

use crate::exit::Stop;

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
    members: Vec<Member>,
}

/// After one rank has failed, how long the others may take to notice.
const GRACE: Duration = Duration::from_secs(20);

impl Team {
    /// As many ranks as the user wants devices.
    pub fn new(ranks: usize) -> Team {
        let alone = ranks <= 1;
        let share = (crate::threads() / ranks.max(1)).max(1);
        let members = threads(ranks.max(1)).into_iter().enumerate().map(|(rank, group)| Member {
            rank,
            ordinal: rank,
            threads: share,
            group: (!alone).then(|| Box::new(group) as Box<dyn Communicator>),
        });
        Team { ranks: ranks.max(1), members: members.collect() }
    }

    /// All ranks, those of other processes included.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Ranks that share the memory of this machine with each other, in this process.
    pub fn local(&self) -> usize {
        self.members.len()
    }

    /// Machines, or processes, that as many ranks share each.
    pub fn nodes(&self) -> usize {
        self.ranks.div_ceil(self.members.len().max(1))
    }

    /// Runs `work` for every rank of this process, each in a thread of its own and with
    /// its own of `inputs`; the results, by rank. Where one fails all end, with its cause.
    ///
    /// # Errors
    /// That of the rank that failed first.
    pub fn run<I: Send, T: Send>(
        self,
        inputs: Vec<I>,
        work: impl Fn(Member, I) -> Result<T, Stop> + Sync,
    ) -> Result<Vec<T>, Stop> {
        let count = self.members.len();
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
            Some((_, since)) => {
                results.recv_timeout(GRACE.saturating_sub(since.elapsed())).ok()
            }
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
                note!("error: {stop}");
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

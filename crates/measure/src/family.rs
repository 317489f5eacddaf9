//! A process and everything that it started: how much memory they hold
//! together, and their end.

use std::collections::HashSet;
use std::io;
use std::time::{Duration, Instant};

use crate::resident::Resident;

/// How often the process is looked at. A process that fills memory at 4 GB/s
/// passes its limit by 80 MB before it is seen.
pub const LOOK: Duration = Duration::from_millis(20);
/// How often new descendants are searched for in all of `/proc`.
const SEARCH: Duration = Duration::from_millis(200);
/// Time to end by itself after a polite signal.
pub const GRACE: Duration = Duration::from_secs(5);
// Numbers that all Unix systems share (POSIX `kill`).
pub const SIGINT: i32 = 2;
pub const SIGKILL: i32 = 9;
pub const SIGTERM: i32 = 15;

/// Whether the child has ended, without taking its exit status.
#[cfg(unix)]
pub fn has_ended(pid: u32) -> io::Result<bool> {
    // SAFETY: `info` is plain data, for which zero is valid, and outlives the call.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        match libc::waitid(libc::P_PID, pid, &mut info, flags) {
            0 => Ok(info.si_signo != 0),
            _ => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => Ok(false),
                e => Err(e),
            },
        }
    }
}

#[cfg(not(unix))]
pub fn has_ended(_: u32) -> io::Result<bool> {
    Ok(true)
}

/// A negative number means the whole group. A target that is gone is fine.
#[cfg(unix)]
fn send(target: i32, signal: i32) {
    // SAFETY: no memory is involved; the targets are the child's group and
    // processes that were seen to descend from it.
    unsafe {
        libc::kill(target, signal);
    }
}

#[cfg(not(unix))]
fn send(_: i32, _: i32) {}

/// The environment variable by which a family is known: what a process starts
/// has it too, whichever session and parent it ends up with.
pub const MARK: &str = "PLIMSOLL_POINT_FAMILY";

/// The child and everything that it started.
pub struct Family {
    leader: u32,
    /// `MARK=value`.
    mark: Vec<u8>,
    /// Process number and start time, which together name a process for good.
    members: Vec<(u32, u64)>,
    /// Processes that were found to be somebody else's.
    strangers: HashSet<(u32, u64)>,
    searched: Instant,
    last_end: Option<Instant>,
}

impl Family {
    /// The family of a child that was started with this value of [`MARK`].
    pub fn new(leader: u32, mark: &str) -> Self {
        let mut family = Self {
            leader,
            mark: format!("{MARK}={mark}").into_bytes(),
            members: Vec::new(),
            strangers: HashSet::new(),
            searched: Instant::now(),
            last_end: None,
        };
        family.search();
        family
    }

    /// When a member was last missed.
    pub fn last_end(&self) -> Option<Instant> {
        self.last_end
    }

    pub fn has(&self, pid: u32) -> bool {
        self.members.iter().any(|member| member.0 == pid)
    }

    /// Finds members by session, by descent, by having been one before, and by
    /// their mark: launchers give ranks sessions of their own, and orphans lose
    /// their parent.
    fn search(&mut self) {
        self.searched = Instant::now();
        let all = processes();
        let known = std::mem::take(&mut self.members);
        let mut marked: HashSet<(u32, u64)> = HashSet::new();
        for p in &all {
            let name = (p.pid, p.start);
            if known.contains(&name) || self.strangers.contains(&name) {
                continue;
            }
            // A process's environment is read once: it does not change.
            match std::fs::read(format!("/proc/{}/environ", p.pid)) {
                Ok(environ) if environ.split(|&b| b == 0).any(|v| v == self.mark) => {
                    marked.insert(name);
                }
                // Between fork and exec it may be empty still.
                Ok(environ) if environ.is_empty() => {}
                _ => {
                    self.strangers.insert(name);
                }
            }
        }
        let mut found: Vec<&Process> = all
            .iter()
            .filter(|p| {
                p.pid == self.leader
                    || p.session == self.leader
                    || known.contains(&(p.pid, p.start))
                    || marked.contains(&(p.pid, p.start))
            })
            .collect();
        let mut next = 0;
        while next < found.len() {
            let parent = found[next].pid;
            for p in &all {
                if p.parent == parent && !found.iter().any(|f| f.pid == p.pid) {
                    found.push(p);
                }
            }
            next += 1;
        }
        self.members = found.iter().map(|p| (p.pid, p.start)).collect();
        if known.iter().any(|member| !self.members.contains(member)) {
            self.last_end = Some(Instant::now());
        }
    }

    /// Bytes that only the family holds, and its resident memory or peak.
    pub fn memory(&mut self) -> (u64, Option<u64>) {
        if self.searched.elapsed() >= SEARCH {
            self.search();
        }
        let (mut anon, mut shared, mut resident) = (0, 0, None);
        // The kernel keeps the peak of each process; of all together it is what
        // was seen.
        let mut largest = None;
        for &(pid, _) in &self.members {
            // One that has just ended holds nothing.
            if let Ok(memory) = Resident::of(pid) {
                anon += memory.anon;
                shared = memory.shmem.max(shared);
                resident = Some(resident.unwrap_or(0) + memory.rss);
                largest = largest.max(Some(memory.peak));
            }
        }
        (anon + shared, resident.max(largest))
    }

    /// A polite signal, and time to follow it.
    pub fn ask(&mut self, signal: i32, pid: u32) {
        self.end(signal);
        let asked = Instant::now();
        while asked.elapsed() < GRACE && !has_ended(pid).unwrap_or(true) {
            std::thread::sleep(LOOK);
        }
    }

    /// Sends a signal to every member; with SIGKILL, until none is left that
    /// could have started another meanwhile.
    pub fn end(&mut self, signal: i32) {
        for _ in 0..10 {
            send(-(self.leader as i32), signal);
            self.search();
            let others = self.members.iter().filter(|(pid, _)| *pid != self.leader);
            let mut left = false;
            for &(pid, _) in others {
                left = true;
                // Members of the leader's group have the signal already; a
                // second SIGKILL changes nothing, a second SIGINT might.
                if signal == SIGKILL || !in_group(pid, self.leader) {
                    send(pid as i32, signal);
                }
            }
            if signal != SIGKILL || !left {
                return;
            }
            std::thread::sleep(LOOK);
        }
    }
}

/// One line of `/proc/PID/stat`.
pub struct Process {
    pub pid: u32,
    parent: u32,
    group: u32,
    session: u32,
    /// Clock ticks after boot.
    start: u64,
}

/// Every process that has not ended; nothing where there is no `/proc`.
fn processes() -> Vec<Process> {
    let Ok(dir) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    dir.flatten().filter_map(|entry| process(entry.file_name().to_str()?.parse().ok()?)).collect()
}

pub fn process(pid: u32) -> Option<Process> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // `PID (NAME) STATE PARENT GROUP SESSION ...`; the name may hold anything.
    let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    let mut number = |skip: usize| fields.nth(skip)?.parse::<u64>().ok();
    Some(Process {
        pid,
        parent: number(0)? as u32,
        group: number(0)? as u32,
        session: number(0)? as u32,
        start: number(15)?,
    })
}

fn in_group(pid: u32, group: u32) -> bool {
    process(pid).is_some_and(|p| p.group == group)
}

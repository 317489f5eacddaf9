//! One point in a fresh process, and the end of everything it started.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value};

use crate::family::{Family, LOOK, MARK, SIGINT, SIGKILL, SIGTERM, has_ended, process};
use crate::human_bytes;
use crate::machine::oom_kills;
use crate::nvml::DeviceMemory;
use crate::output::{Follower, OutputRules, means_out_of_memory, result_file};
use crate::point::{Point, Status};

/// Longest line of output that is kept whole.
const LINE: u64 = 1 << 20;
/// How much of the end of a log is read for the reason of a failure.
const TAIL: u64 = 16 << 10;

/// The process to run for one point.
#[derive(Clone, Debug)]
pub struct Launch {
    pub program: OsString,
    pub args: Vec<OsString>,
    /// Set on top of this process's environment.
    pub env: Vec<(OsString, OsString)>,
    /// Ends the point as [`Status::Timeout`].
    pub timeout: Option<Duration>,
    /// Bytes of resident memory, all processes of the point together, beyond
    /// which the point is ended as [`Status::Oom`].
    ///
    /// The kernel's own per-process limits do not say this: RLIMIT_AS counts
    /// address space, of which a CUDA context alone reserves more than the
    /// machine has; RLIMIT_DATA counts every private writable mapping, touched
    /// or not, and each process by itself; RLIMIT_RSS does nothing since Linux
    /// 2.4.30. So the processes' resident memory is looked at every 20 ms:
    /// what only they hold (RssAnon) summed, and the largest RssShmem, which
    /// they may share. Mapped files do not count: the kernel takes them back.
    pub memory_limit: Option<u64>,
    /// Where the output goes: standard error, and of standard output all but
    /// the result. An existing log is appended to.
    pub log: PathBuf,
    /// Where the figures are.
    pub reads: Reads,
}

/// Where a process leaves its figures.
#[derive(Clone, Debug)]
pub enum Reads {
    /// The last line of standard output must be a JSON object, the result.
    LastLine,
    /// It is somebody else's: its output is searched, and its memory is what
    /// the driver and the kernel say.
    Output(Box<OutputRules>),
}

impl Launch {
    /// A process without arguments and limits, whose result is expected.
    pub fn new(program: impl Into<OsString>, log: PathBuf) -> Self {
        Self {
            program: program.into(),
            args: Vec::new(),
            env: Vec::new(),
            timeout: None,
            memory_limit: None,
            log,
            reads: Reads::LastLine,
        }
    }
}

/// How a process ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    pub status: Status,
    /// The last line of standard output, if it is a JSON object; of somebody
    /// else's process what was found and measured.
    pub result: Map<String, Value>,
    /// Why the status is not `ok`.
    pub message: Option<String>,
    /// The most resident memory seen, all processes of the point together, in
    /// bytes. Of a single process it is the kernel's own peak at the last look
    /// before the end. `None` where `/proc` does not say.
    pub peak_resident_bytes: Option<u64>,
    /// From start to end, imports and loading included.
    pub wall: Duration,
}

impl Outcome {
    /// The line of `points.jsonl`.
    pub fn into_point(self, point: Map<String, Value>) -> Point {
        let mut point = Point::from_result(point, self.status, self.result);
        if let Some(message) = self.message {
            point.extra.insert("message".to_owned(), message.into());
        }
        if let Some(peak) = self.peak_resident_bytes {
            point.extra.insert("peak_resident_bytes".to_owned(), peak.into());
        }
        point.extra.insert("wall_seconds".to_owned(), self.wall.as_secs_f64().into());
        point
    }
}

/// A point that came to no end of its own.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("cannot start {program}: {source}")]
    Start { program: String, source: io::Error },
    #[error("cannot write the log {path}: {source}")]
    Log { path: PathBuf, source: io::Error },
    #[error("cannot watch process {pid}: {source}")]
    Watch { pid: u32, source: io::Error },
    #[error("interrupted; finished points are kept, the same command continues")]
    Interrupted,
    #[error("a memory limit for a point needs /proc, which only Linux has")]
    LimitUnsupported,
    #[error("points are run in processes of their own on Unix only")]
    Unsupported,
}

/// Why a process was ended from here.
enum Ended {
    Itself,
    Timeout,
    Memory(u64),
    /// Memory ran out in one process and the others went on without it.
    OutOfMemory,
    Stop,
}

/// How often the driver is asked.
const ASK_DRIVER: Duration = Duration::from_millis(100);
/// After memory ran out and a process ended, the others have this long to end.
const AFTER_DEATH: Duration = Duration::from_secs(5);

/// Runs one point to its end and leaves none of its processes behind.
///
/// The process gets a session of its own, so the terminal's Ctrl-C reaches
/// only this one: set `stop` from the handler, and the point is interrupted
/// politely (SIGINT, five seconds later SIGKILL) and reported as
/// [`RunError::Interrupted`]. If this process dies, the kernel ends the child
/// with it (the child only: what it started in turn must look after itself).
///
/// The status, first that fits: over the limit `oom`; too late `timeout`; exit
/// status 0 `ok` (or the `status` that the result itself states); exit status
/// 3 `refused`; SIGKILL from elsewhere, the kernel's counter of out-of-memory
/// kills moved, or a last word on standard error that is known to mean it
/// `oom`; anything else `failed` with the last lines of its log.
pub fn run_point(launch: &Launch, stop: &AtomicBool) -> Result<Outcome, RunError> {
    if launch.memory_limit.is_some() && !cfg!(target_os = "linux") {
        return Err(RunError::LimitUnsupported);
    }
    if !cfg!(unix) {
        return Err(RunError::Unsupported);
    }
    if stop.load(Ordering::Relaxed) {
        return Err(RunError::Interrupted);
    }
    let (mut log, log_start) = open_log(&launch.log)?;
    let kills_before = oom_kills();
    let start = Instant::now();
    let mut devices = match &launch.reads {
        Reads::LastLine => None,
        Reads::Output(rules) => {
            // What an earlier run of this point left must not count for this one.
            match std::fs::remove_file(&rules.result) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(RunError::Log { path: rules.result.clone(), source: e });
                }
                _ => DeviceMemory::watch(),
            }
        }
    };
    let mark = mark();
    let mut child = spawn(launch, &mark, &mut log)?;
    let pid = child.id();

    // The reader ends when every holder of the pipe has; one that escaped the
    // search below must not hang the sweep, hence a channel and not a join.
    let (sender, last_line) = mpsc::channel();
    if let Some(stdout) = child.stdout.take() {
        std::thread::spawn(move || sender.send(copy_all_but_last_line(stdout, log)));
    }

    let mut family = Family::new(pid, &mark);
    let mut follower = match &launch.reads {
        Reads::LastLine => None,
        Reads::Output(rules) => Some(Follower::new(&launch.log, log_start, rules.pattern.clone())),
    };
    let (mut asked, mut died, mut killed): (Option<Instant>, Option<Instant>, Option<Instant>) =
        (None, None, None);
    let mut peak = None;
    let ended = loop {
        match has_ended(pid) {
            Ok(true) => break Ended::Itself,
            Ok(false) => {}
            Err(source) => {
                family.end(SIGKILL);
                // The child may be a zombie still; nothing to learn from it.
                let _ = child.wait();
                return Err(RunError::Watch { pid, source });
            }
        }
        let (held, resident) = family.memory();
        peak = peak.max(resident);
        if let Some(limit) = launch.memory_limit
            && held > limit
        {
            break Ended::Memory(held);
        }
        if let Some(devices) = &mut devices
            && asked.is_none_or(|asked| asked.elapsed() >= ASK_DRIVER)
        {
            asked = Some(Instant::now());
            devices.look(|pid| family.has(pid), |pid| process(pid).is_some());
        }
        if let (Some(follower), Reads::Output(rules)) = (&mut follower, &launch.reads) {
            follower.read();
            // The word may be read some moments after its process ended.
            let said = follower.oom.as_ref().map(|oom| oom.0 - Duration::from_secs(1));
            if killed.is_none() && is_more(kills_before, oom_kills()) {
                killed = Some(Instant::now());
            }
            if died.is_none() && said.is_some_and(|said| family.last_end() >= Some(said)) {
                died = family.last_end();
            }
            if hangs(follower, died, killed, rules.oom_grace) {
                break Ended::OutOfMemory;
            }
        }
        if stop.load(Ordering::Relaxed) {
            break Ended::Stop;
        }
        let left = match launch.timeout.map(|t| t.checked_sub(start.elapsed())) {
            Some(None) => break Ended::Timeout,
            Some(Some(left)) => left,
            None => LOOK,
        };
        std::thread::sleep(LOOK.min(left));
    };
    match ended {
        Ended::Stop => family.ask(SIGINT, pid),
        Ended::Timeout => family.ask(SIGTERM, pid),
        Ended::Itself | Ended::Memory(_) | Ended::OutOfMemory => {}
    }
    // The leader is not waited for yet: while it is a zombie its number, and
    // with it that of the group, cannot go to anybody else.
    family.end(SIGKILL);
    let exit = child.wait().map_err(|source| RunError::Watch { pid, source })?;
    let wall = start.elapsed();
    if matches!(ended, Ended::Stop) {
        return Err(RunError::Interrupted);
    }
    let killed = is_more(kills_before, oom_kills());
    let tail = log_tail(&launch.log, log_start);
    if let (Some(mut follower), Reads::Output(rules)) = (follower, &launch.reads) {
        follower.finish();
        let (mut result, bad) = figures(&follower, rules);
        add_memory(&mut result, devices.as_ref(), peak);
        let (status, message) =
            judge(&ended, exit, launch, &follower, bad, &result, &tail, killed, wall);
        return Ok(Outcome { status, result, message, peak_resident_bytes: peak, wall });
    }
    let line = last_line.recv_timeout(Duration::from_secs(2)).unwrap_or_default();

    let result = serde_json::from_slice::<Value>(&line).ok();
    let mut result = match result {
        Some(Value::Object(object)) => Some(object),
        _ => None,
    };
    let (status, message) = match ended {
        Ended::Memory(held) => (Status::Oom, Some(over_limit(held, launch))),
        Ended::Timeout => (Status::Timeout, Some(too_late(wall))),
        Ended::Itself | Ended::OutOfMemory | Ended::Stop => {
            classify(exit, result.as_mut(), &line, &tail, killed)
        }
    };
    Ok(Outcome {
        status,
        result: result.unwrap_or_default(),
        message,
        peak_resident_bytes: peak,
        wall,
    })
}

fn over_limit(held: u64, launch: &Launch) -> String {
    format!(
        "ended at {} of resident memory, over the limit of {}",
        human_bytes(held),
        human_bytes(launch.memory_limit.unwrap_or(0))
    )
}

fn too_late(wall: Duration) -> String {
    format!("not finished after {:.1} s", wall.as_secs_f64())
}

fn is_more(before: Option<u64>, after: Option<u64>) -> bool {
    matches!((before, after), (Some(before), Some(after)) if after > before)
}

/// Whether a trainer goes on that has run out of memory: one of its processes
/// is gone and the others wait for it, or nothing has come of it for `grace`.
fn hangs(
    follower: &Follower,
    died: Option<Instant>,
    killed: Option<Instant>,
    grace: Duration,
) -> bool {
    let Some(stuck) = follower.stuck_for() else {
        // The kernel's killer says nothing in the log.
        return killed.is_some_and(|killed| killed.elapsed() >= grace);
    };
    let dead_for = died.map_or(Duration::ZERO, |died| died.elapsed()).min(stuck);
    !follower.recovered() && (stuck >= grace || dead_for >= AFTER_DEATH)
}

/// What a process of somebody else's said about its speed, and what was wrong
/// with it.
fn figures(follower: &Follower, rules: &OutputRules) -> (Map<String, Value>, Option<String>) {
    let (from_file, bad_file) = match result_file(&rules.result) {
        Ok(object) => (object, None),
        Err(reason) => (None, Some(reason)),
    };
    let (mut out, bad_output) = match follower.figures() {
        Ok(figures) => (figures, None),
        // A file says it as well.
        Err(_) if from_file.is_some() => (Map::new(), None),
        Err(reason) => (Map::new(), Some(reason)),
    };
    if let Some(object) = from_file {
        if object.contains_key("iterations_per_second")
            || object.contains_key("seconds_per_iteration")
        {
            out.retain(|name, _| {
                name != "iterations_per_second" && name != "seconds_per_iteration"
            });
        }
        out.extend(object);
    }
    // One says the other.
    for (known, wanted) in [
        ("iterations_per_second", "seconds_per_iteration"),
        ("seconds_per_iteration", "iterations_per_second"),
    ] {
        if let Some(x) = out.get(known).and_then(Value::as_f64).filter(|&x| x > 0.0)
            && !out.contains_key(wanted)
        {
            out.insert(wanted.to_owned(), (1.0 / x).into());
        }
    }
    (out, bad_file.or(bad_output))
}

/// Adds what the driver or the kernel saw; what the process says about that
/// itself does not count.
fn add_memory(
    result: &mut Map<String, Value>,
    devices: Option<&DeviceMemory>,
    resident: Option<u64>,
) {
    result.remove("measured_bytes");
    match (devices.and_then(DeviceMemory::peaks), resident) {
        (Some((peaks, by)), _) => {
            let largest = peaks.iter().copied().max().unwrap_or(0);
            result.insert("measured_bytes".to_owned(), largest.into());
            result.insert("measured_by".to_owned(), by.into());
            if peaks.len() > 1 {
                result.insert("measured_bytes_per_rank".to_owned(), peaks.into());
            }
        }
        (None, Some(resident)) => {
            result.insert("measured_bytes".to_owned(), resident.into());
            result.insert("measured_by".to_owned(), "resident".into());
        }
        (None, None) => {}
    }
}

/// The status of a process of somebody else's.
fn judge(
    ended: &Ended,
    exit: ExitStatus,
    launch: &Launch,
    follower: &Follower,
    bad: Option<String>,
    result: &Map<String, Value>,
    tail: &[String],
    killed: bool,
    wall: Duration,
) -> (Status, Option<String>) {
    let said = follower.oom.as_ref().map(|(_, line)| line.clone());
    match ended {
        Ended::Memory(held) => return (Status::Oom, Some(over_limit(*held, launch))),
        Ended::OutOfMemory => {
            let line = said.unwrap_or_else(|| KILLED.to_owned());
            return (Status::Oom, Some(format!("{line} (what went on without it was ended)")));
        }
        Ended::Timeout => {
            return match said.filter(|_| !follower.recovered()) {
                Some(line) => (Status::Oom, Some(format!("{line} ({})", too_late(wall)))),
                None => (Status::Timeout, Some(too_late(wall))),
            };
        }
        Ended::Itself | Ended::Stop => {}
    }
    let stated = result.get("status").cloned();
    if !exit.success() {
        let (status, message) = classify(exit, None, &[], tail, killed);
        return match said {
            Some(line) if status == Status::Failed => (Status::Oom, Some(line)),
            // Status 3 is this program's word for it, not everybody's.
            None if status == Status::Refused => (Status::Failed, Some(last_words(exit, tail))),
            _ => (status, message),
        };
    }
    if let Some(stated) = stated {
        let message = result.get("message").and_then(Value::as_str).map(str::to_owned);
        return match serde_json::from_value(stated) {
            Ok(status) => (status, message),
            Err(e) => (Status::Failed, Some(format!("its result's status: {e}"))),
        };
    }
    let has_rate = result.contains_key("iterations_per_second");
    match (bad, said) {
        // A script that ends well whatever becomes of the trainer in it.
        (_, Some(line)) if !has_rate || !follower.recovered() => (Status::Oom, Some(line)),
        (Some(reason), _) => (Status::Failed, Some(format!("exit status 0, but {reason}"))),
        (None, _) if !has_rate => {
            let message = "no rate: its output has no it/s, s/it or train_steps_per_second; give                            --pattern, or write the file {result}";
            (Status::Ok, Some(message.to_owned()))
        }
        (None, _) => (Status::Ok, None),
    }
}

const KILLED: &str = "the kernel's out-of-memory killer ended it or one of its processes";

fn last_words(exit: ExitStatus, tail: &[String]) -> String {
    match tail {
        [] => format!("{exit}, without a word"),
        _ => format!("{exit}: {}", tail[tail.len().saturating_sub(5)..].join("\n")),
    }
}

fn classify(
    exit: ExitStatus,
    result: Option<&mut Map<String, Value>>,
    line: &[u8],
    tail: &[String],
    killed_by_kernel: bool,
) -> (Status, Option<String>) {
    let has_result = result.is_some();
    let (stated, said) = result.map_or((None, None), |result| {
        let stated = result.remove("status");
        let said = result.get("message").and_then(Value::as_str);
        (stated, said.map(str::to_owned))
    });
    if exit.success() {
        if !has_result {
            let shown = String::from_utf8_lossy(&line[..line.len().min(200)]);
            let message = format!(
                "exit status 0, but the last line of its output is not a JSON object: `{shown}`"
            );
            return (Status::Failed, Some(message));
        }
        let status = match stated.map(serde_json::from_value) {
            None => Status::Ok,
            Some(Ok(status)) => status,
            Some(Err(e)) => return (Status::Failed, Some(format!("its result's status: {e}"))),
        };
        return (status, said);
    }
    if exit.code() == Some(3) {
        return (
            Status::Refused,
            Some(said.unwrap_or_else(|| match tail {
                [] => "exit status 3: does not fit".to_owned(),
                _ => tail[tail.len().saturating_sub(5)..].join("\n"),
            })),
        );
    }
    if killed_by_kernel {
        return (Status::Oom, Some(KILLED.to_owned()));
    }
    // 128 + 9 is how a shell passes on that its command was killed.
    if signal(exit) == Some(SIGKILL) || exit.code() == Some(137) {
        let message = "killed (SIGKILL), as the kernel's out-of-memory killer does";
        return (Status::Oom, Some(message.to_owned()));
    }
    if let Some(line) = tail.iter().rev().find(|line| means_out_of_memory(line)) {
        return (Status::Oom, Some(line.clone()));
    }
    (Status::Failed, Some(said.unwrap_or_else(|| last_words(exit, tail))))
}

fn open_log(path: &Path) -> Result<(File, u64), RunError> {
    let open = || {
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir)?;
        }
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let length = file.metadata()?.len();
        Ok((file, length))
    };
    open().map_err(|source| RunError::Log { path: path.to_owned(), source })
}

/// A value of [`MARK`] that no other family has.
fn mark() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_nanos());
    format!("{}-{time}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

fn spawn(launch: &Launch, mark: &str, log: &mut File) -> Result<Child, RunError> {
    let copy = |log: &File| {
        log.try_clone().map_err(|source| RunError::Log { path: launch.log.clone(), source })
    };
    let stdout = match launch.reads {
        Reads::LastLine => Stdio::piped(),
        Reads::Output(_) => copy(log)?.into(),
    };
    let mut command = Command::new(&launch.program);
    command
        .args(&launch.args)
        .envs(launch.env.iter().map(|(name, value)| (name, value)))
        .env(MARK, mark)
        .stdin(Stdio::null())
        .stdout(stdout)
        .stderr(copy(log)?);
    own_session(&mut command);
    command.spawn().map_err(|source| RunError::Start {
        program: launch.program.to_string_lossy().into_owned(),
        source,
    })
}

/// Between fork and exec: a session (hence a process group) of its own, an
/// interrupt that can be handled even where this process was started in the
/// background with interrupts ignored, an end when this process ends, and first in line for the out-of-memory killer, so
/// that the sweep itself survives.
#[cfg(unix)]
fn own_session(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    #[cfg(target_os = "linux")]
    let parent = std::process::id();
    let setup = move || {
        // SAFETY: setsid, signal, prctl, getppid, open, write and close are
        // async-signal-safe; pointers are to constants that end in zero.
        unsafe {
            if libc::setsid() == -1 {
                return Err(io::Error::last_os_error());
            }
            if libc::signal(libc::SIGINT, libc::SIG_DFL) == libc::SIG_ERR {
                return Err(io::Error::last_os_error());
            }
            #[cfg(target_os = "linux")]
            {
                if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) == -1 {
                    return Err(io::Error::last_os_error());
                }
                // The parent may have ended before the line above.
                if libc::getppid() as u32 != parent {
                    return Err(io::Error::from_raw_os_error(libc::ESRCH));
                }
                let file = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY);
                if file >= 0 {
                    // Best effort: without it the sweep runs all the same.
                    libc::write(file, c"1000".as_ptr().cast(), 4);
                    libc::close(file);
                }
            }
        }
        Ok(())
    };
    // SAFETY: the closure allocates nothing and calls what the comment above
    // lists.
    unsafe {
        command.pre_exec(setup);
    }
}

#[cfg(not(unix))]
fn own_session(_: &mut Command) {}

#[cfg(unix)]
fn signal(exit: ExitStatus) -> Option<i32> {
    std::os::unix::process::ExitStatusExt::signal(&exit)
}

#[cfg(not(unix))]
fn signal(_: ExitStatus) -> Option<i32> {
    None
}

/// Reads to the end; every line but the last that is not blank goes to the
/// log. The last one is returned, and logged too unless it is JSON.
fn copy_all_but_last_line(stdout: ChildStdout, mut log: File) -> Vec<u8> {
    let mut reader = BufReader::new(stdout);
    let (mut last, mut line) = (Vec::new(), Vec::new());
    loop {
        line.clear();
        // A line beyond the bound comes in pieces: memory stays bounded.
        match reader.by_ref().take(LINE).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => break,
            Ok(_) => {}
        }
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        // A full disk costs lines of the log, not the point: the record that
        // follows will fail by name.
        let _ = log.write_all(&last);
        std::mem::swap(&mut last, &mut line);
    }
    if !last.trim_ascii_start().starts_with(b"{") {
        let _ = log.write_all(&last);
    }
    last.trim_ascii().to_vec()
}

/// The last lines that were logged since `start`, blank ones left out. Of a
/// progress bar that overwrites itself only the last state is kept.
fn log_tail(path: &Path, start: u64) -> Vec<String> {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(start.max(length.saturating_sub(TAIL))))?;
        let mut bytes = Vec::new();
        file.take(TAIL).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().unwrap_or_default();
    String::from_utf8_lossy(&bytes)
        .lines()
        .filter_map(|line| {
            let line = line.trim_end();
            let line = line.rsplit('\r').next()?.trim_end();
            (!line.is_empty()).then(|| line.to_owned())
        })
        .collect()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::family::GRACE;
    use crate::output::Pattern;

    struct Run {
        dir: tempfile::TempDir,
        launch: Launch,
    }

    fn shell(script: &str) -> Run {
        let dir = tempfile::tempdir().unwrap();
        let mut launch = Launch::new("sh", dir.path().join("logs/point.log"));
        launch.args = vec!["-c".into(), script.into()];
        Run { dir, launch }
    }

    impl Run {
        fn outcome(&self) -> Outcome {
            run_point(&self.launch, &AtomicBool::new(false)).unwrap()
        }

        fn log(&self) -> String {
            std::fs::read_to_string(&self.launch.log).unwrap()
        }
    }

    fn status_and_message(script: &str) -> (Status, String) {
        let outcome = shell(script).outcome();
        (outcome.status, outcome.message.unwrap_or_default())
    }

    #[test]
    fn the_last_line_is_the_result_and_the_rest_is_logged() {
        let run = shell(
            r#"echo one; echo warning >&2; echo; echo '{"tokens_per_second": 7, "b": 1}'; echo"#,
        );
        let outcome = run.outcome();
        assert_eq!(outcome.status, Status::Ok);
        assert_eq!(outcome.result["tokens_per_second"], 7);
        assert_eq!(outcome.message, None);
        let log = run.log();
        assert!(log.contains("one\n") && log.contains("warning\n") && !log.contains("tokens"));
        let point = outcome.into_point(Map::new());
        assert_eq!(point.tokens_per_second, Some(7.0));
        assert_eq!(point.extra["b"], 1);
        assert!(point.extra["wall_seconds"].as_f64().unwrap() > 0.0);
    }

    #[test]
    fn statuses() {
        let (status, message) = status_and_message("echo not json");
        assert_eq!(status, Status::Failed);
        assert!(message.contains("`not json`"), "{message}");

        let (status, message) = status_and_message("echo 'needs 25 GiB of 23' >&2; exit 3");
        assert_eq!((status, message.as_str()), (Status::Refused, "needs 25 GiB of 23"));

        let run = shell(r#"echo '{"planned_bytes": 9, "message": "too big"}'; exit 3"#);
        let outcome = run.outcome();
        assert_eq!(outcome.status, Status::Refused);
        assert_eq!(outcome.result["planned_bytes"], 9);
        assert_eq!(outcome.message.as_deref(), Some("too big"));

        let (status, message) =
            status_and_message("for i in 1 2 3 4 5 6 7; do echo line $i >&2; done; exit 1");
        assert_eq!(status, Status::Failed);
        assert!(message.contains("exit status: 1") && message.ends_with("line 6\nline 7"));
        assert!(!message.contains("line 2"), "{message}");

        let (status, message) = status_and_message("kill -9 $$");
        assert_eq!(status, Status::Oom);
        assert!(message.contains("SIGKILL"), "{message}");
        assert_eq!(status_and_message("sh -c 'kill -9 $$'; exit $?").0, Status::Oom);
        assert_eq!(status_and_message("kill -6 $$").0, Status::Failed);
        let abort = "echo 'memory allocation of 1099511627776 bytes failed' >&2; kill -6 $$";
        assert_eq!(status_and_message(abort).0, Status::Oom);
        let torch = "echo 'torch.OutOfMemoryError: CUDA out of memory. Tried' >&2; exit 1";
        assert_eq!(status_and_message(torch).0, Status::Oom);

        let stated = r#"echo '{"status": "oom"}'"#;
        assert_eq!(status_and_message(stated).0, Status::Oom);
        assert_eq!(status_and_message(r#"echo '{"status": "fine"}'"#).0, Status::Failed);
    }

    /// Somebody else's trainer.
    fn trainer(script: &str) -> Run {
        let mut run = shell(script);
        let result = run.dir.path().join("result.json");
        run.launch.env.push(("RESULT".into(), result.clone().into()));
        run.launch.timeout = Some(Duration::from_secs(60));
        let oom_grace = Duration::from_secs(2);
        let pattern = Pattern::common();
        run.launch.reads = Reads::Output(Box::new(OutputRules { pattern, result, oom_grace }));
        run
    }

    #[test]
    fn somebody_elses_output_and_result() {
        let run = trainer("echo '30/30 [00:20, 1.50it/s]' >&2; echo done; sleep 0.2");
        let outcome = run.outcome();
        assert_eq!((outcome.status, outcome.message.clone()), (Status::Ok, None));
        assert!(run.log().contains("done"));
        let point = outcome.into_point(Map::new());
        assert_eq!(point.iterations_per_second, Some(1.5));
        assert_eq!(point.seconds_per_iteration, Some(1.0 / 1.5));
        assert!(point.measured_bytes.unwrap() > 100_000);
        assert_eq!(point.extra["measured_by"], "resident");

        let line = r#"{"iterations_per_second": 3, "measured_bytes": 1, "loss": 2.5}"#;
        let point = trainer(&format!("echo '{line}' > $RESULT; echo 9it/s")).outcome();
        assert_eq!(point.result["iterations_per_second"], 3);
        assert_ne!(point.result.get("measured_bytes"), Some(&1.into()));

        let outcome = trainer("echo hello").outcome();
        assert_eq!(outcome.status, Status::Ok);
        assert!(outcome.message.unwrap().contains("--pattern"));
        let outcome = trainer("echo garbage > $RESULT").outcome();
        assert_eq!(outcome.status, Status::Failed);
        assert!(outcome.message.unwrap().contains("`garbage`"));
        let outcome = trainer("head -c 3000000 /dev/urandom; exit 5").outcome();
        assert_eq!(outcome.status, Status::Failed);
        let outcome = trainer("exit 3").outcome();
        assert_eq!(outcome.status, Status::Failed);
        assert!(outcome.message.unwrap().contains("without a word"));
    }

    #[test]
    fn somebody_elses_out_of_memory() {
        let oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB";
        // Long before the end of the log.
        let run = trainer(&format!("echo '{oom}' >&2; yes ranks wait | head -n 9999; exit 1"));
        let outcome = run.outcome();
        assert_eq!((outcome.status, outcome.message.as_deref()), (Status::Oom, Some(oom)));
        let swallowed = trainer(&format!("(echo '{oom}'; exit 1) || true")).outcome();
        assert_eq!(swallowed.status, Status::Oom);
        // Caught, and then it went on.
        let went_on = "for i in 1 2 3 4; do echo 2it/s; sleep 0.1; done";
        let run = trainer(&format!("echo '{oom}'; sleep 1; {went_on}; sleep 3; {went_on}"));
        assert_eq!(run.outcome().status, Status::Ok);
        // The word and then silence, until the timeout.
        let mut run = trainer(&format!("echo '{oom}'; sleep 100"));
        run.launch.timeout = Some(Duration::from_secs(1));
        assert_eq!(run.outcome().status, Status::Oom);
    }

    #[test]
    fn ranks_that_spin_without_the_one_that_ran_out_of_memory_are_ended() {
        // One rank in a session of its own without a parent, as launchers do it.
        let script = r#"cd "$DIR"
            rank() { echo $(exec sh -c 'echo $PPID') >> pids; }
            (rank; while :; do :; done) &
            (rank; while sleep 0.1; do echo waiting; done) &
            (setsid sh -c 'echo $$ >> pids; trap "" TERM; sleep 100' &)
            (sleep 0.5; echo 'RuntimeError: CUDA error: out of memory'; exit 1) &
            wait"#;
        let mut run = trainer(script);
        run.launch.env.push(("DIR".into(), run.dir.path().into()));
        let start = Instant::now();
        let outcome = run.outcome();
        assert_eq!(outcome.status, Status::Oom, "{outcome:?}");
        assert!(outcome.message.unwrap().starts_with("RuntimeError: CUDA error: out of memory"));
        assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
        let pids = pids(&run.dir.path().join("pids"));
        assert_eq!(pids.len(), 3);
        for pid in pids {
            assert!(process(pid).is_none(), "{pid} is still there");
        }
    }

    #[test]
    fn a_missing_program_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let launch = Launch::new("/no/such/program", dir.path().join("a.log"));
        let error = run_point(&launch, &AtomicBool::new(false)).unwrap_err();
        assert!(error.to_string().contains("/no/such/program"), "{error}");
        let launch = Launch::new("true", dir.path().join("a.log/b.log"));
        let error = run_point(&launch, &AtomicBool::new(false)).unwrap_err();
        assert!(error.to_string().contains("a.log"), "{error}");
    }

    /// Numbers that a script wrote to a file, one a line.
    fn pids(path: &Path) -> Vec<u32> {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines().map(|line| line.parse().unwrap()).collect()
    }

    #[test]
    fn a_timeout_ends_children_in_other_sessions_too() {
        // The inner processes ignore polite signals and one leaves the session.
        let script = r#"trap '' TERM
            (echo $(exec sh -c 'echo $PPID') >> pids; exec sleep 100) &
            setsid sh -c 'trap "" TERM; echo $$ >> pids; sleep 100; sleep 100' &
            sleep 100"#;
        let mut run = shell(&format!("cd \"$DIR\"; {script}"));
        run.launch.env = vec![("DIR".into(), run.dir.path().into())];
        run.launch.timeout = Some(Duration::from_millis(600));
        let start = Instant::now();
        let outcome = run.outcome();
        assert_eq!(outcome.status, Status::Timeout);
        assert!(start.elapsed() < GRACE + Duration::from_secs(3));
        let pids = pids(&run.dir.path().join("pids"));
        assert_eq!(pids.len(), 2);
        for pid in pids {
            assert!(process(pid).is_none(), "{pid} is still there");
        }
    }

    #[test]
    fn what_a_finished_point_left_running_is_ended() {
        let mut run = shell("sleep 100 & echo $! > \"$DIR\"/pids; echo '{}'");
        run.launch.env = vec![("DIR".into(), run.dir.path().into())];
        let start = Instant::now();
        assert_eq!(run.outcome().status, Status::Ok);
        assert!(start.elapsed() < Duration::from_secs(10));
        assert!(process(pids(&run.dir.path().join("pids"))[0]).is_none());
    }

    #[test]
    fn the_memory_limit_counts_the_whole_family() {
        // Each tail holds its one endless line: together they pass the limit.
        let grow = "head -c 100000000 /dev/zero | tail -n 1 | sleep 100";
        let mut run = shell(&format!("({grow}) & ({grow}) & sleep 100"));
        run.launch.memory_limit = Some(150 << 20);
        run.launch.timeout = Some(Duration::from_secs(60));
        let outcome = run.outcome();
        assert_eq!(outcome.status, Status::Oom, "{outcome:?}");
        assert!(outcome.message.unwrap().contains("limit of 150.00 MiB"));
        assert!(outcome.peak_resident_bytes.unwrap() > 150 << 20);
    }

    #[test]
    fn an_interrupt_is_passed_on() {
        let run =
            shell("trap 'echo saved >&2; exit 0' INT; echo ready >&2; while :; do sleep 0.1; done");
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !std::fs::read_to_string(&run.launch.log)
                    .is_ok_and(|log| log.contains("ready"))
                {
                    std::thread::sleep(LOOK);
                }
                stop.store(true, Ordering::Relaxed);
            });
            let end = run_point(&run.launch, &stop);
            assert!(matches!(end, Err(RunError::Interrupted)), "{end:?}");
        });
        assert!(run.log().contains("saved"));
    }

    #[test]
    fn endless_output_without_a_line_break_stays_bounded() {
        let run = shell("head -c 20000000 /dev/zero; printf '\\n{\"a\": 1}'");
        let outcome = run.outcome();
        assert_eq!((outcome.status, outcome.result.len()), (Status::Ok, 1));
    }

    #[test]
    fn tails_keep_the_last_state_of_a_progress_bar() {
        let run = shell("printf ' 1%%\\r 50%%\\r 99%%\\nboom\\n' >&2; exit 1");
        let message = run.outcome().message.unwrap();
        assert_eq!(message, "exit status: 1:  99%\nboom");
    }
}

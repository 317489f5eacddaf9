//! Ranks that are processes, on one machine or many: every rank is linked to every
//! other. Rank 0 is the one whose address all know; it tells each where the others are.
//!
//! A thread for each link reads all the time. So a rank that dies, whose system closes
//! its connections, is noticed at once, whatever this rank is doing; a machine that
//! vanishes is noticed by the keep-alive probes within half a minute.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use plimsoll_arch::DType;

use crate::sum::sum;
use crate::{AbortHandle, CommError, Communicator};

/// What a connection of ours begins with.
const MAGIC: u64 = u64::from_le_bytes(*b"plimsol1");
/// No message is longer.
const MAX_FRAME: u64 = 1 << 40;
const DATA: u8 = 0;
/// The sender ends the group; the cause follows.
const ABORT: u8 = 1;
/// The sender has ended, and nothing is missing.
const GOODBYE: u8 = 2;

/// One rank of a group of processes.
pub struct Tcp {
    rank: usize,
    ranks: usize,
    links: Arc<Links>,
}

/// The connections of a rank. They are closed when the last handle to them is gone, so
/// that an abort still gets through after the rank's device is.
struct Links {
    rank: usize,
    shared: Arc<Shared>,
    /// By rank; none to itself.
    senders: Vec<Option<Mutex<Sender<Frame>>>>,
    writers: Vec<JoinHandle<()>>,
}

struct Frame {
    kind: u8,
    data: Vec<u8>,
}

struct Shared {
    state: Mutex<State>,
    wake: Condvar,
}

struct State {
    /// What came from each rank and was not asked for yet.
    arrived: Vec<VecDeque<Vec<u8>>>,
    /// Ranks that have ended in an orderly way.
    gone: Vec<bool>,
    broken: Option<CommError>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn fail(&self, error: CommError) {
        self.lock().broken.get_or_insert(error);
        self.wake.notify_all();
    }
}

/// Who connects: how many ranks it expects, which it is, and where it listens itself.
struct Hello {
    ranks: u32,
    rank: u32,
    port: u16,
}

impl Hello {
    const BYTES: usize = 18;

    fn write(&self, stream: &mut TcpStream) -> io::Result<()> {
        let mut bytes = [0; Hello::BYTES];
        bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.ranks.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.rank.to_le_bytes());
        bytes[16..].copy_from_slice(&self.port.to_le_bytes());
        stream.write_all(&bytes)
    }

    /// None from a stranger.
    fn read(stream: &mut TcpStream) -> io::Result<Option<Hello>> {
        let mut bytes = [0; Hello::BYTES];
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        stream.read_exact(&mut bytes)?;
        stream.set_read_timeout(None)?;
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| bytes[at + i]));
        let magic = u64::from(word(0)) | u64::from(word(4)) << 32;
        let port = u16::from_le_bytes([bytes[16], bytes[17]]);
        Ok((magic == MAGIC).then_some(Hello { ranks: word(8), rank: word(12), port }))
    }
}

impl Tcp {
    /// Meets the other ranks: rank 0 listens at `address` (host:port), all others come
    /// there.
    ///
    /// # Errors
    /// Somebody does not come within `patience`, comes twice, or expects another number
    /// of ranks; or the address cannot be listened at.
    pub fn connect(
        rank: usize,
        ranks: usize,
        address: &str,
        patience: Duration,
    ) -> Result<Tcp, CommError> {
        let deadline = Instant::now() + patience;
        let streams = match rank {
            0 => host(ranks, address, deadline, patience)?,
            _ => join(rank, ranks, address, deadline, patience)?,
        };
        Tcp::over(rank, ranks, streams)
    }

    /// Starts the threads of all links.
    fn over(rank: usize, ranks: usize, streams: Vec<Option<TcpStream>>) -> Result<Tcp, CommError> {
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                arrived: (0..ranks).map(|_| VecDeque::new()).collect(),
                gone: vec![false; ranks],
                broken: None,
            }),
            wake: Condvar::new(),
        });
        let (mut senders, mut writers) = (Vec::new(), Vec::new());
        for (peer, stream) in streams.into_iter().enumerate() {
            let Some(stream) = stream else {
                senders.push(None);
                continue;
            };
            prepare(&stream).map_err(CommError::io("set up a connection"))?;
            let reading = stream.try_clone().map_err(CommError::io("share a connection"))?;
            let (sender, frames) = mpsc::channel::<Frame>();
            let for_reader = Arc::clone(&shared);
            let start = CommError::io("start a thread");
            std::thread::Builder::new()
                .name(format!("from rank {peer}"))
                .spawn(move || read_frames(reading, peer, &for_reader))
                .map_err(&start)?;
            let for_writer = Arc::clone(&shared);
            let writer = std::thread::Builder::new()
                .name(format!("to rank {peer}"))
                .spawn(move || write_frames(stream, peer, &frames, &for_writer))
                .map_err(&start)?;
            senders.push(Some(Mutex::new(sender)));
            writers.push(writer);
        }
        let links = Arc::new(Links { rank, shared, senders, writers });
        Ok(Tcp { rank, ranks, links })
    }

    fn send(&self, to: usize, data: &[u8]) -> Result<(), CommError> {
        self.check()?;
        self.links.send(to, Frame { kind: DATA, data: data.to_vec() });
        Ok(())
    }

    /// The next message of a rank, which must have this length.
    fn receive(&self, from: usize, length: usize) -> Result<Vec<u8>, CommError> {
        let shared = &self.links.shared;
        let mut state = shared.lock();
        loop {
            if let Some(data) = state.arrived[from].pop_front() {
                if data.len() != length {
                    drop(state);
                    let error = CommError::Length { rank: from, ours: length, theirs: data.len() };
                    self.abort(&error.to_string());
                    return Err(error);
                }
                return Ok(data);
            }
            if let Some(error) = &state.broken {
                return Err(error.clone());
            }
            if state.gone[from] {
                let cause = "it ended before the others".to_owned();
                return Err(CommError::Lost { rank: from, cause });
            }
            state = shared.wake.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank;
        (0..self.ranks).filter(move |r| *r != rank)
    }

    /// Bytes of a rank's share of all elements, whole elements and about alike.
    fn share(&self, bytes: usize, rank: usize, dtype: DType) -> std::ops::Range<usize> {
        let elements = bytes / dtype.bytes();
        let per_rank = elements.div_ceil(self.ranks);
        let at = |rank: usize| (rank * per_rank).min(elements) * dtype.bytes();
        at(rank)..at(rank + 1)
    }

    /// Share `r` of `data` goes to rank r; this rank's becomes its sum over all.
    fn reduce_shares(
        &self,
        data: &mut [u8],
        dtype: DType,
        share: impl Fn(usize) -> std::ops::Range<usize>,
    ) -> Result<(), CommError> {
        for peer in self.others() {
            self.send(peer, &data[share(peer)])?;
        }
        let own = share(self.rank);
        let mut parts: Vec<Vec<u8>> = Vec::with_capacity(self.ranks);
        for rank in 0..self.ranks {
            parts.push(match rank == self.rank {
                true => data[own.clone()].to_vec(),
                false => self.receive(rank, own.len())?,
            });
        }
        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        sum(&mut data[own], &parts, dtype);
        Ok(())
    }

    /// Every rank's share of `data` to all.
    fn gather_shares(
        &self,
        data: &mut [u8],
        share: impl Fn(usize) -> std::ops::Range<usize>,
    ) -> Result<(), CommError> {
        for peer in self.others() {
            self.send(peer, &data[share(self.rank)])?;
        }
        for peer in self.others() {
            let range = share(peer);
            data[range.clone()].copy_from_slice(&self.receive(peer, range.len())?);
        }
        Ok(())
    }
}

impl Communicator for Tcp {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn all_gather(&mut self, data: &mut [u8]) -> Result<(), CommError> {
        let part = data.len() / self.ranks;
        self.gather_shares(data, |rank| rank * part..(rank + 1) * part)
    }

    fn reduce_scatter(&mut self, data: &mut [u8], dtype: DType) -> Result<(), CommError> {
        let part = data.len() / self.ranks;
        self.reduce_shares(data, dtype, |rank| rank * part..(rank + 1) * part)
    }

    fn all_reduce(&mut self, data: &mut [u8], dtype: DType) -> Result<(), CommError> {
        let len = data.len();
        self.reduce_shares(data, dtype, |rank| self.share(len, rank, dtype))?;
        self.gather_shares(data, |rank| self.share(len, rank, dtype))
    }

    fn broadcast(&mut self, data: &mut [u8], root: usize) -> Result<(), CommError> {
        if self.rank == root {
            return self.others().try_for_each(|peer| self.send(peer, data));
        }
        data.copy_from_slice(&self.receive(root, data.len())?);
        Ok(())
    }

    fn barrier(&mut self) -> Result<(), CommError> {
        let mut all = vec![0u8; self.ranks];
        self.all_gather(&mut all)
    }

    fn check(&self) -> Result<(), CommError> {
        match &self.links.shared.lock().broken {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    fn abort_handle(&self) -> AbortHandle {
        let links = Arc::clone(&self.links);
        Arc::new(move |cause| {
            let (rank, cause) = (links.rank, cause.to_owned());
            links.shared.fail(CommError::Aborted { rank, cause: cause.clone() });
            for peer in 0..links.senders.len() {
                links.send(peer, Frame { kind: ABORT, data: cause.clone().into_bytes() });
            }
        })
    }
}

impl Links {
    /// A link whose writer has ended is noticed by its reader.
    fn send(&self, to: usize, frame: Frame) {
        if let Some(sender) = &self.senders[to] {
            let sender = sender.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            let _ = sender.send(frame);
        }
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The others must not take this for an orderly end.
            for peer in 0..self.senders.len() {
                self.send(peer, Frame { kind: ABORT, data: b"it panicked".to_vec() });
            }
        }
        for peer in 0..self.senders.len() {
            self.send(peer, Frame { kind: GOODBYE, data: Vec::new() });
        }
        self.senders.clear();
        for writer in self.writers.drain(..) {
            let _ = writer.join();
        }
    }
}

fn write_frames(
    mut stream: TcpStream,
    peer: usize,
    frames: &mpsc::Receiver<Frame>,
    shared: &Shared,
) {
    for frame in frames {
        let mut head = [0; 9];
        head[0] = frame.kind;
        head[1..].copy_from_slice(&(frame.data.len() as u64).to_le_bytes());
        let written = stream.write_all(&head).and_then(|()| stream.write_all(&frame.data));
        if let Err(error) = written {
            // A rank that ends while this one says goodbye is no loss.
            if frame.kind == DATA {
                shared.fail(CommError::Lost { rank: peer, cause: error.to_string() });
            }
            return;
        }
    }
    let _ = stream.shutdown(std::net::Shutdown::Write);
}

fn read_frames(mut stream: TcpStream, peer: usize, shared: &Shared) {
    loop {
        match read_frame(&mut stream) {
            Ok(Frame { kind: DATA, data }) => {
                shared.lock().arrived[peer].push_back(data);
                shared.wake.notify_all();
            }
            Ok(Frame { kind: GOODBYE, .. }) => {
                shared.lock().gone[peer] = true;
                shared.wake.notify_all();
                return;
            }
            Ok(Frame { data, .. }) => {
                let cause = String::from_utf8_lossy(&data).into_owned();
                shared.fail(CommError::Aborted { rank: peer, cause });
                return;
            }
            Err(error) => {
                let cause = match error.kind() {
                    io::ErrorKind::UnexpectedEof => "its connection closed".to_owned(),
                    _ => error.to_string(),
                };
                shared.fail(CommError::Lost { rank: peer, cause });
                return;
            }
        }
    }
}

fn read_frame(stream: &mut TcpStream) -> io::Result<Frame> {
    let mut head = [0; 9];
    stream.read_exact(&mut head)?;
    let length = u64::from_le_bytes([1, 2, 3, 4, 5, 6, 7, 8].map(|i| head[i]));
    if length > MAX_FRAME {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it sent no message of ours"));
    }
    let mut data = vec![0; length as usize];
    stream.read_exact(&mut data)?;
    Ok(Frame { kind: head[0], data })
}

/// Rank 0: waits for all others, then tells each where they are.
fn host(
    ranks: usize,
    address: &str,
    deadline: Instant,
    patience: Duration,
) -> Result<Vec<Option<TcpStream>>, CommError> {
    let port = address.rsplit_once(':').and_then(|(_, p)| p.parse::<u16>().ok());
    let port = port.ok_or(CommError::Io {
        action: "listen",
        cause: format!("`{address}` is not host:port"),
    })?;
    let listener = listen(port).map_err(|e| CommError::Io {
        action: "listen for the other ranks",
        cause: format!("port {port}: {e}; set MASTER_PORT to another one"),
    })?;
    let mut streams: Vec<Option<TcpStream>> = (0..ranks).map(|_| None).collect();
    let mut places = vec![String::new(); ranks];
    accept(&listener, 0, 1, &mut streams, deadline, patience, |rank, place| {
        places[rank] = place.to_string();
    })?;
    let table = places.join("\n");
    for stream in streams.iter_mut().flatten() {
        let send = |stream: &mut TcpStream| {
            stream.write_all(&(table.len() as u32).to_le_bytes())?;
            stream.write_all(table.as_bytes())
        };
        send(stream).map_err(CommError::io("tell the ranks of each other"))?;
    }
    Ok(streams)
}

/// Another rank: comes to rank 0, learns where the others are, goes to those before it
/// and waits for those behind.
fn join(
    rank: usize,
    ranks: usize,
    address: &str,
    deadline: Instant,
    patience: Duration,
) -> Result<Vec<Option<TcpStream>>, CommError> {
    let listener = listen(0).map_err(CommError::io("listen for the other ranks"))?;
    let port = listener.local_addr().map_err(CommError::io("listen for the other ranks"))?.port();
    let hello = Hello { ranks: ranks as u32, rank: rank as u32, port };
    let mut first = reach(0, address, deadline, patience)?;
    hello.write(&mut first).map_err(CommError::io("greet rank 0"))?;
    let host = first.peer_addr().map_err(CommError::io("greet rank 0"))?.ip();
    let table = read_table(&mut first, deadline).map_err(|e| match e.kind() {
        // Rank 0 has more ranks to wait for than there is time.
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => CommError::Missing {
            missing: 1,
            ranks,
            seconds: patience.as_secs(),
            list: "rank 0 still waits for others".into(),
        },
        _ => CommError::Lost { rank: 0, cause: "it did not accept this rank".into() },
    })?;
    let places: Vec<&str> = table.lines().collect();
    let mut streams: Vec<Option<TcpStream>> = (0..ranks).map(|_| None).collect();
    streams[0] = Some(first);
    for (peer, link) in streams.iter_mut().enumerate().take(rank).skip(1) {
        let place = places.get(peer).and_then(|p| p.parse::<SocketAddr>().ok());
        let mut place =
            place.ok_or(CommError::Size { ours: ranks, theirs: places.len().max(1) })?;
        if place.ip().is_loopback() {
            // It came to rank 0 from the same machine.
            place.set_ip(host);
        }
        let mut stream = reach(peer, &place.to_string(), deadline, patience)?;
        hello.write(&mut stream).map_err(CommError::io("greet a rank"))?;
        *link = Some(stream);
    }
    accept(&listener, rank, rank + 1, &mut streams, deadline, patience, |_, _| {})?;
    Ok(streams)
}

fn listen(port: u16) -> io::Result<TcpListener> {
    TcpListener::bind((IpAddr::from([0, 0, 0, 0]), port))
}

fn read_table(stream: &mut TcpStream, deadline: Instant) -> io::Result<String> {
    stream.set_read_timeout(Some(remaining(deadline)))?;
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let mut table = vec![0; (u32::from_le_bytes(length) as usize).min(1 << 24)];
    stream.read_exact(&mut table)?;
    stream.set_read_timeout(None)?;
    String::from_utf8(table).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Accepts ranks from `first` on until all are there.
fn accept(
    listener: &TcpListener,
    rank: usize,
    first: usize,
    streams: &mut [Option<TcpStream>],
    deadline: Instant,
    patience: Duration,
    mut found: impl FnMut(usize, SocketAddr),
) -> Result<(), CommError> {
    let ranks = streams.len();
    listener.set_nonblocking(true).map_err(CommError::io("listen for the other ranks"))?;
    while let Some(missing) = (first..ranks).find(|r| streams[*r].is_none()) {
        let (mut stream, from) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                if Instant::now() >= deadline {
                    let absent: Vec<String> = (missing..ranks)
                        .filter(|r| streams[*r].is_none())
                        .map(|r| r.to_string())
                        .collect();
                    return Err(CommError::Missing {
                        missing: absent.len(),
                        ranks,
                        seconds: patience.as_secs(),
                        list: format!("rank {} (waited for by rank {rank})", absent.join(", ")),
                    });
                }
                std::thread::sleep(Duration::from_millis(10));
                continue;
            }
            Err(e) => return Err(CommError::io("accept a rank")(e)),
        };
        let greeted = stream.set_nonblocking(false).and_then(|()| Hello::read(&mut stream));
        // A port scanner, or a rank that died meanwhile and is found missing below.
        let Ok(Some(hello)) = greeted else { continue };
        let peer = hello.rank as usize;
        if hello.ranks as usize != ranks || peer >= ranks {
            return Err(CommError::Size { ours: ranks, theirs: hello.ranks as usize });
        }
        if peer < first || streams[peer].is_some() {
            return Err(CommError::Twice { rank: peer, ranks });
        }
        found(peer, SocketAddr::new(from.ip(), hello.port));
        streams[peer] = Some(stream);
    }
    Ok(())
}

fn remaining(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(10))
}

/// Connects as soon as somebody listens.
fn reach(
    rank: usize,
    address: &str,
    deadline: Instant,
    patience: Duration,
) -> Result<TcpStream, CommError> {
    let mut cause = String::new();
    loop {
        match address.to_socket_addrs() {
            Ok(places) => {
                for place in places {
                    let wait = remaining(deadline).min(Duration::from_secs(5));
                    match TcpStream::connect_timeout(&place, wait) {
                        Ok(stream) => return Ok(stream),
                        Err(e) => cause = e.to_string(),
                    }
                }
            }
            Err(e) => cause = e.to_string(),
        }
        if Instant::now() >= deadline {
            return Err(CommError::Unreachable {
                rank,
                address: address.to_owned(),
                seconds: patience.as_secs(),
                cause,
            });
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Small messages go at once; a machine that vanished is noticed within 20 seconds.
fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = stream.as_raw_fd();
    let set = |level: libc::c_int, name: libc::c_int, value: libc::c_int| {
        // SAFETY: an open socket and an option of an int.
        let status = unsafe {
            libc::setsockopt(
                socket,
                level,
                name,
                (&raw const value).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
        if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    set(libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
    #[cfg(target_os = "linux")]
    for (name, value) in [
        (libc::TCP_KEEPIDLE, 5),
        (libc::TCP_KEEPINTVL, 5),
        (libc::TCP_KEEPCNT, 3),
        (libc::TCP_USER_TIMEOUT, 20_000),
    ] {
        // Probes are a safety net: a system without them has the others.
        let _ = set(libc::IPPROTO_TCP, name, value);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// A free port of this machine.
    fn address() -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().to_string()
    }

    fn run<T: Send>(ranks: usize, work: impl Fn(Tcp) -> T + Sync) -> Vec<T> {
        let address = address();
        std::thread::scope(|scope| {
            let (work, address) = (&work, &address);
            let all: Vec<_> = (0..ranks)
                .map(|rank| {
                    scope.spawn(move || work(Tcp::connect(rank, ranks, address, PATIENCE).unwrap()))
                })
                .collect();
            all.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    /// What every rank has after a few collectives.
    fn collectives(group: &mut dyn Communicator) -> Vec<Vec<u8>> {
        let (rank, ranks) = (group.rank(), group.ranks());
        let value = |i: usize| ((i * 37 + rank * 11) % 101) as f32 * 0.37 - 9.0;
        let mut x: Vec<f32> = (0..ranks * 7).map(value).collect();
        let mut y: Vec<half::bf16> = x.iter().map(|x| half::bf16::from_f32(*x)).collect();
        group.all_reduce(bytemuck::cast_slice_mut(&mut x), DType::F32).unwrap();
        group.all_reduce(bytemuck::cast_slice_mut(&mut y), DType::Bf16).unwrap();
        let mut z: Vec<f32> = (0..ranks * 7).map(value).collect();
        group.reduce_scatter(bytemuck::cast_slice_mut(&mut z), DType::F32).unwrap();
        group.all_gather(bytemuck::cast_slice_mut(&mut z)).unwrap();
        assert_eq!(x, z);
        let mut root = vec![rank as u8; 3];
        group.broadcast(&mut root, ranks - 1).unwrap();
        group.barrier().unwrap();
        vec![bytemuck::cast_slice(&x).to_vec(), bytemuck::cast_slice(&y).to_vec(), root]
    }

    #[test]
    fn processes_and_threads_have_the_same_bits() {
        for ranks in [2, 3, 5] {
            let over_tcp = run(ranks, |mut group| collectives(&mut group));
            let in_threads: Vec<_> = std::thread::scope(|scope| {
                let all: Vec<_> = crate::threads(ranks)
                    .into_iter()
                    .map(|mut group| scope.spawn(move || collectives(&mut group)))
                    .collect();
                all.into_iter().map(|t| t.join().unwrap()).collect()
            });
            assert_eq!(over_tcp, in_threads);
        }
    }

    #[test]
    fn an_abort_reaches_every_rank_with_its_cause() {
        let results = run(3, |mut group| {
            if group.rank() == 2 {
                let abort = group.abort_handle();
                drop(group);
                abort("the disk is full");
                return Ok(());
            }
            group.barrier()
        });
        let expected = CommError::Aborted { rank: 2, cause: "the disk is full".into() };
        assert_eq!(results[0], Err(expected.clone()));
        assert_eq!(results[1], Err(expected));
    }

    #[test]
    fn a_rank_that_ends_early_is_named() {
        let results = run(2, |mut group| {
            if group.rank() == 1 {
                return Ok(());
            }
            group.barrier()
        });
        assert!(matches!(results[0], Err(CommError::Lost { rank: 1, .. })), "{results:?}");
    }

    #[test]
    fn ranks_that_do_not_come_are_named() {
        let patience = Duration::from_millis(300);
        let error = Tcp::connect(0, 3, &address(), patience).err().unwrap().to_string();
        assert!(error.contains("2 of 3 ranks") && error.contains("rank 1, 2"), "{error}");
        let error = Tcp::connect(1, 2, &address(), patience).err().unwrap().to_string();
        assert!(error.contains("rank 0 was not reached"), "{error}");
    }
}

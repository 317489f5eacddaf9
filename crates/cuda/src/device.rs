//! Runs a program at its layout on a GPU: a slab for each home, a stream for each
//! lane, and each section of a program as one CUDA graph.

use std::cell::{Cell, RefCell};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys;
use plimsoll_comm::{Communicator, Nccl};
use plimsoll_plan::{
    Device, DeviceError, LaunchTime, Layout, Placement, Quantizer, SlabSizes, Taken, Transport,
    UPLOAD_PIECE, Waits,
};
use plimsoll_program::{Access, Home, Lane, Op, Program, Shard, Tensor};

use crate::collectives::Link;
use crate::driver::{Context, DeviceInfo, Graph, Pinned, cuda};
use crate::error::CudaError;
use crate::host::HostSlab;
use crate::kernels::Kernels;
use crate::lanes::{Streams, run_section};
use crate::launch::Launcher;
use crate::library::library_folders;
use crate::memory::Memory;
use crate::nvml::Nvml;
use crate::peers::{Peers, readers};
use crate::products::Products;
use crate::updates::{HostCalls, HostThreads};

/// Page-locked memory through which everything goes up and down: half of it fills while
/// the other half goes.
pub(crate) const STAGING: usize = 2 * UPLOAD_PIECE;
/// Sections whose graphs are kept; the least recently used goes first.
const MAX_GRAPHS: usize = 32;

/// A slab in the memory of a GPU, and what runs programs in it.
pub struct CudaDevice {
    /// The other ranks; none for one alone.
    group: Option<RefCell<Box<dyn Communicator>>>,
    // Declared in the order in which they must go.
    link: Option<Link>,
    graphs: Vec<Section>,
    products: Products,
    pub(crate) kernels: Kernels,
    pub(crate) staging: Pinned,
    /// Bytes of `staging` that copies in flight may still read.
    pub(crate) staged: usize,
    /// Scales of a tensor on its way into four bits, until a program runs.
    pub(crate) scales: Option<Pinned>,
    pub(crate) slab: Arc<Memory>,
    host: HostSlab,
    /// What runs ops of the host's lane.
    host_threads: HostThreads,
    sizes: SlabSizes,
    streams: Streams,
    /// Runs so far: the clock of the graph cache.
    runs: u64,
    pub(crate) context: Context,
}

// SAFETY: every public call makes the context current first, and `&mut self`
// keeps two threads apart.
unsafe impl Send for CudaDevice {}

/// A section that ran before, as it was then.
struct Section {
    key: Key,
    graph: Graph,
    /// What the graph calls on the host: it must outlive it.
    _calls: Option<HostCalls>,
    used: u64,
}

/// All that a captured section depends on. Compared in full before each replay: a
/// program at the same address may be another one, and comparing a few thousand
/// words costs microseconds.
#[derive(PartialEq)]
struct Key {
    ops: Vec<Op>,
    placements: Vec<Option<Placement>>,
    shapes: Vec<(plimsoll_arch::DType, Home, Shard, usize, usize)>,
}

impl Key {
    fn new(program: &Program, layout: &Layout, section: usize) -> Key {
        Key {
            ops: program.ops[program.sections[section].ops.clone()].to_vec(),
            placements: layout.placements.clone(),
            shapes: program.tensors.iter().map(shape).collect(),
        }
    }

    fn matches(&self, program: &Program, layout: &Layout, section: usize) -> bool {
        self.ops == program.ops[program.sections[section].ops.clone()]
            && self.placements == layout.placements
            && self.shapes.len() == program.tensors.len()
            && self.shapes.iter().zip(&program.tensors).all(|(s, t)| *s == shape(t))
    }
}

fn shape(t: &Tensor) -> (plimsoll_arch::DType, Home, Shard, usize, usize) {
    (t.dtype, t.home, t.shard, t.rows(), t.cols())
}

impl CudaDevice {
    /// Takes GPU `ordinal`, then reserves and clears the slabs.
    ///
    /// # Errors
    /// [`DeviceError::Reserve`] when the GPU has not that much free memory,
    /// [`DeviceError::ReserveHost`] when the system does not lock that much; else a
    /// [`CudaError`]: no driver, no GPU, a missing library (with how to get it).
    pub fn new(sizes: impl Into<SlabSizes>, ordinal: usize) -> Result<CudaDevice, DeviceError> {
        CudaDevice::reserve(sizes.into(), ordinal, None)
    }

    /// As [`CudaDevice::new`], with a slab that GPUs `readers` reach as well.
    fn reserve(
        sizes: SlabSizes,
        ordinal: usize,
        readers: Option<&[sys::CUdevice]>,
    ) -> Result<CudaDevice, DeviceError> {
        let slab_bytes = sizes.device;
        let context = Context::new(ordinal)?;
        let products = Products::new(&context)?;
        let kernels = Kernels::new(&context);
        let staging = Pinned::new(STAGING)?;
        let (free, total) = context.memory()?;
        let bytes = usize::try_from(slab_bytes.max(1)).unwrap_or(usize::MAX);
        let slab = match readers {
            None => Memory::new(bytes),
            Some(readers) => Memory::shared(bytes, context.device, readers),
        };
        let slab = slab.map_err(|cause| {
            let text = format!("{} has {free} bytes free of {total}; {cause}", context.info.name);
            DeviceError::Reserve {
                bytes: slab_bytes,
                cause: io::Error::new(io::ErrorKind::OutOfMemory, text),
            }
        })?;
        let mut device = CudaDevice {
            group: None,
            link: None,
            graphs: Vec::new(),
            products,
            kernels,
            staging,
            staged: 0,
            scales: None,
            slab: Arc::new(slab),
            host: HostSlab::empty(),
            host_threads: HostThreads::new(cores()),
            sizes,
            streams: Streams::default(),
            runs: 0,
            context,
        };
        cuda!(cuMemsetD8Async(device.slab.address, 0, bytes, device.context.stream))?;
        device.context.synchronize()?;
        device.host = HostSlab::reserve(sizes.host)?;
        Ok(device)
    }

    /// As [`CudaDevice::new`], for one rank of a group: each has a GPU of its own.
    ///
    /// # Errors
    /// As [`CudaDevice::new`]; NCCL is missing, a GPU does not reach the memory of another
    /// where collectives are copies, or the ranks do not find each other.
    pub fn in_group(
        sizes: impl Into<SlabSizes>,
        ordinal: usize,
        mut group: Box<dyn Communicator>,
        transport: Transport,
    ) -> Result<CudaDevice, DeviceError> {
        let readers = match transport {
            Transport::Copies => Some(readers(ordinal, &mut *group)?),
            Transport::Nccl | Transport::Host => None,
        };
        let mut device = CudaDevice::reserve(sizes.into(), ordinal, readers.as_deref())?;
        // NCCL asks for the device of the current context.
        device.context.bind()?;
        let link = match transport {
            Transport::Copies => {
                let (context, kernels) = (&device.context, &device.kernels);
                Link::Peers(Peers::new(context, kernels, &device.slab, &mut *group)?)
            }
            Transport::Nccl | Transport::Host => {
                let nccl = Nccl::new(&mut *group, &library_folders());
                Link::Nccl(nccl.map_err(CudaError::from)?)
            }
        };
        device.host_threads = HostThreads::new(cores() / group.ranks().max(1));
        (device.link, device.group) = (Some(link), Some(RefCell::new(group)));
        Ok(device)
    }

    /// With so many threads of the host for what runs there [default: the machine's, or of
    /// several ranks a share]. Ranks of one process have threads of their own, so that
    /// none waits for another's update.
    pub fn with_host_threads(mut self, threads: usize) -> CudaDevice {
        self.host_threads = HostThreads::new(threads);
        self
    }

    /// Waits until the compute lane's stream is empty. Of several ranks one may wait in
    /// vain for another that has ended: it looks now and then, and gives up.
    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        let (Some(link), Some(group)) = (&self.link, &self.group) else {
            self.context.synchronize()?;
            return self.host_threads.failure.check();
        };
        let mut pause = Duration::from_micros(20);
        while !self.context.is_idle()? {
            if let Err(error) = group.borrow().check().and_then(|()| link.check()) {
                link.abort(&self.context);
                return Err(error.into());
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_micros(500));
        }
        // Copies may have ended because other ranks let them go: then for nothing.
        if let Link::Peers(_) = link {
            group.borrow().check().map_err(CudaError::from)?;
        }
        self.host_threads.failure.check()
    }

    pub fn info(&self) -> &DeviceInfo {
        &self.context.info
    }

    /// Bytes of the GPU that are gone since before this process took it, the slab
    /// not counted: context, kernels, cuBLASLt and graphs. Exact where no other
    /// process takes or frees memory meanwhile.
    ///
    /// # Errors
    /// The driver's own.
    pub fn overhead_bytes(&self) -> Result<u64, DeviceError> {
        self.context.bind()?;
        Ok(self.context.taken()?.saturating_sub(self.sizes.device))
    }

    /// Bytes that the driver (NVML) counts for this process, slab included; none
    /// where it does not tell.
    pub fn process_bytes(&self) -> Option<u64> {
        self.context.nvml.as_ref().and_then(Nvml::process_bytes)
    }

    /// Waits until everything has run; errors of earlier runs surface here.
    ///
    /// # Errors
    /// The driver's own.
    pub fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.context.bind()?;
        self.wait()?;
        self.staged = 0;
        Ok(())
    }

    /// With streams for the lanes that a section uses.
    fn launcher<'a>(
        &'a self,
        program: &'a Program,
        layout: &'a Layout,
        section: usize,
    ) -> Result<Launcher<'a>, CudaError> {
        let ops = &program.ops[program.sections[section].ops.clone()];
        let used = |lane: Lane| ops.iter().any(|op| program.lane(&op.kind) == lane);
        Ok(Launcher {
            lanes: self.streams.of(&self.context, used)?,
            context: &self.context,
            kernels: &self.kernels,
            products: &self.products,
            stream: self.context.stream,
            program,
            layout,
            slab: self.slab.address,
            host: self.host.address(),
            calls: None,
            rank: self.rank(),
            link: self.link.as_ref(),
            current: Cell::new(0),
        })
    }

    fn check(&self, layout: &Layout) -> Result<(), CudaError> {
        for home in [Home::Device, Home::Host] {
            let (needed, slab) = (layout.slabs().of(home), self.sizes.of(home));
            if needed > slab {
                return Err(CudaError::SlabTooSmall { needed, slab });
            }
        }
        Ok(())
    }

    pub(crate) fn check_range(&self, home: Home, offset: u64, len: usize) -> Result<(), CudaError> {
        let slab = self.sizes.of(home);
        match offset.checked_add(len as u64) {
            Some(end) if end <= slab => Ok(()),
            _ => Err(CudaError::OutsideSlab { offset, len, slab }),
        }
    }

    /// Measures the products of the whole program that are new. That overwrites
    /// what they write, which means nothing before the program's first section.
    fn tune(&self, launcher: &Launcher, section: usize) -> Result<(), CudaError> {
        if section != 0 {
            return Ok(());
        }
        for op in &launcher.program.ops {
            if let Some((product, operands)) = launcher.product(op)
                && !self.products.is_tuned(&product)
                && !adds_to_resident(launcher.program, op)
            {
                launcher.fill_operands(op)?;
                self.products.tune(&product, &operands, &self.context)?;
            }
        }
        self.products.save();
        Ok(())
    }

    /// The first run: launches the ops one by one, which loads every kernel, then
    /// captures them for all later runs.
    fn first_run(
        &mut self,
        program: &Program,
        layout: &Layout,
        section: usize,
    ) -> Result<(), CudaError> {
        let ops = program.sections[section].ops.clone();
        self.scales = None;
        // Loading a kernel may wait for the whole GPU: nothing must be in flight that waits
        // for another rank.
        self.wait()?;
        self.meet()?;
        // Nor may a graph that goes.
        if self.graphs.len() >= MAX_GRAPHS {
            let oldest = (0..self.graphs.len()).min_by_key(|i| self.graphs[*i].used);
            oldest.map(|i| self.graphs.swap_remove(i));
        }
        let calls = self.calls(program, layout, &ops)?;
        let mut launcher = self.launcher(program, layout, section)?;
        launcher.calls = calls.as_ref();
        self.tune(&launcher, section)?;
        let waits = Waits::new(program, layout);
        let ran = if self.link.is_some() {
            let lanes = [self.context.stream; Lane::ALL.len()];
            let launcher = self.launcher(program, layout, section)?;
            self.run_apart(&Launcher { lanes, calls: calls.as_ref(), ..launcher }, &ops)
        } else {
            run_section(&launcher, &waits, ops.clone()).map(|_| ())
        };
        let launch = || run_section(&launcher, &waits, ops.clone());
        let captured = ran.and_then(|()| Graph::capture(self.context.stream, launch));
        if captured.is_err() && calls.is_some() {
            // What was launched may still call what is given back here.
            let _ = self.context.synchronize();
        }
        let graph = captured?;
        let key = Key::new(program, layout, section);
        self.graphs.push(Section { key, graph, _calls: calls, used: self.runs });
        Ok(())
    }

    /// What a section calls on the host.
    fn calls(
        &mut self,
        program: &Program,
        layout: &Layout,
        ops: &Range<usize>,
    ) -> Result<Option<HostCalls>, CudaError> {
        let len = self.sizes.host as usize;
        let host = (self.host.slice(0, len).as_mut_ptr(), len);
        // SAFETY: the slab lives as long as graphs and streams do; lanes wait for each
        // other, and for everything before anybody else has the slab.
        unsafe { self.host_threads.calls(program, layout, ops, host, self.rank()) }
    }

    /// Runs ops one by one, with nothing in flight around a collective. Loading a kernel
    /// may wait for the whole GPU, and while it does keep other threads of this process
    /// from theirs: a collective that waits for one of them would never end.
    fn run_apart(&self, launcher: &Launcher, ops: &Range<usize>) -> Result<(), CudaError> {
        let program = launcher.program;
        let waits = Waits::new(program, launcher.layout);
        let mut at = ops.start;
        while at < ops.end {
            let apart = program.lane(&program.ops[at].kind) == Lane::Communication;
            if apart {
                self.wait()?;
                self.meet()?;
            }
            at = launcher.run(at, waits.launch_end(program, at, ops.end))?;
            if apart {
                self.wait()?;
            }
        }
        self.wait()?;
        self.meet()
    }

    /// Waits for all ranks to come here.
    fn meet(&self) -> Result<(), CudaError> {
        match &self.group {
            Some(group) => Ok(group.borrow_mut().barrier()?),
            None => Ok(()),
        }
    }

    /// A piece of the staging buffer that no copy in flight reads.
    pub(crate) fn stage(&mut self, len: usize) -> Result<usize, CudaError> {
        if self.staged + len > self.staging.len() {
            self.wait()?;
            self.staged = 0;
        }
        let at = self.staged;
        self.staged += len.next_multiple_of(256);
        Ok(at)
    }

    fn send(&mut self, offset: u64, at: usize, len: usize) -> Result<(), CudaError> {
        let from = self.staging.slice(at, len).as_ptr();
        cuda!(cuMemcpyHtoDAsync_v2(
            self.slab.address + offset,
            from.cast(),
            len,
            self.context.stream
        ))
    }

    fn fetch(&mut self, offset: u64, len: usize) -> Result<&[u8], CudaError> {
        let at = self.stage(len)?;
        let to = self.staging.slice(at, len).as_mut_ptr();
        cuda!(cuMemcpyDtoHAsync_v2(
            to.cast(),
            self.slab.address + offset,
            len,
            self.context.stream
        ))?;
        self.wait()?;
        self.staged = 0;
        Ok(self.staging.slice(at, len))
    }
}

impl Device for CudaDevice {
    fn slabs(&self) -> SlabSizes {
        self.sizes
    }

    fn rank(&self) -> usize {
        self.group.as_ref().map_or(0, |g| g.borrow().rank())
    }

    fn group(&mut self) -> Option<&mut dyn Communicator> {
        match &mut self.group {
            Some(group) => Some(&mut **group.get_mut()),
            None => None,
        }
    }

    fn quantizer(&mut self) -> Option<&mut dyn Quantizer> {
        Some(self)
    }

    /// Small pieces go without waiting for what runs; `fill` writes to page-locked
    /// memory. Large ones are filled in ordinary memory and go up in pieces.
    fn upload(
        &mut self,
        home: Home,
        offset: u64,
        len: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        self.context.bind()?;
        self.check_range(home, offset, len)?;
        if home == Home::Host {
            self.wait()?;
            return fill(self.host.slice(offset as usize, len));
        }
        if len <= STAGING {
            let at = self.stage(len)?;
            fill(self.staging.slice(at, len))?;
            if len > 0 {
                self.send(offset, at, len)?;
            }
            return Ok(());
        }
        let mut bytes = aligned(len);
        fill(&mut bytemuck::cast_slice_mut(&mut bytes)[..len])?;
        let bytes = &bytemuck::cast_slice::<u64, u8>(&bytes)[..len];
        for (i, piece) in bytes.chunks(UPLOAD_PIECE).enumerate() {
            let at = self.stage(piece.len())?;
            self.staging.slice(at, piece.len()).copy_from_slice(piece);
            self.send(offset + (i * UPLOAD_PIECE) as u64, at, piece.len())?;
        }
        Ok(())
    }

    fn download(
        &mut self,
        home: Home,
        offset: u64,
        len: usize,
        read: &mut dyn FnMut(&[u8]) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        self.context.bind()?;
        self.check_range(home, offset, len)?;
        if len == 0 {
            return read(&[]);
        }
        if home == Home::Host {
            self.wait()?;
            return read(self.host.slice(offset as usize, len));
        }
        if len <= STAGING {
            return read(self.fetch(offset, len)?);
        }
        let mut bytes = aligned(len);
        let all = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut bytes)[..len];
        for (i, piece) in all.chunks_mut(STAGING).enumerate() {
            piece.copy_from_slice(self.fetch(offset + (i * STAGING) as u64, piece.len())?);
        }
        read(all)
    }

    fn taken_bytes(&mut self) -> Result<Option<Taken>, DeviceError> {
        let overhead = self.overhead_bytes()?;
        let (total, host) = (self.sizes.device + overhead, self.host.resident);
        Ok(Some(Taken { total, overhead, host }))
    }

    /// Returns as soon as the work is queued; [`Device::download`] waits for it.
    fn run(
        &mut self,
        program: &Program,
        layout: &Layout,
        section: usize,
    ) -> Result<(), DeviceError> {
        if program.sections[section].ops.is_empty() {
            return Ok(());
        }
        self.context.bind()?;
        self.check(layout)?;
        self.runs += 1;
        let known = self.graphs.iter_mut().find(|s| s.key.matches(program, layout, section));
        match known {
            Some(section) => {
                section.used = self.runs;
                section.graph.launch(self.context.stream)?;
            }
            None => self.first_run(program, layout, section)?,
        }
        Ok(())
    }

    fn profile(
        &mut self,
        program: &Program,
        layout: &Layout,
        section: usize,
    ) -> Result<Vec<LaunchTime>, DeviceError> {
        self.context.bind()?;
        self.check(layout)?;
        let ops = program.sections[section].ops.clone();
        let calls = self.calls(program, layout, &ops)?;
        let mut launcher = self.launcher(program, layout, section)?;
        launcher.calls = calls.as_ref();
        self.tune(&launcher, section)?;
        // One after the other, so that each has its own time.
        let stream = self.context.stream;
        launcher.lanes = [stream; Lane::ALL.len()];
        let waits = Waits::new(program, layout);
        let (mut at, mut marks) = (ops.start, vec![(ops.start, self.context.event()?)]);
        marks[0].1.record(stream)?;
        let mut launch_all = || {
            while at < ops.end {
                let next = launcher.run(at, waits.launch_end(program, at, ops.end))?;
                let event = self.context.event()?;
                event.record(stream)?;
                marks.push((next, event));
                at = next;
            }
            Ok::<(), CudaError>(())
        };
        let launched = launch_all();
        self.wait()?;
        launched?;
        let times = marks.windows(2).map(|pair| {
            let [(from, start), (to, end)] = pair else { unreachable!("windows of two") };
            let seconds = f64::from(start.until(end)?) * 1e-3;
            Ok(LaunchTime { ops: *from..*to, seconds })
        });
        Ok(times.collect::<Result<_, CudaError>>()?)
    }
}

/// Cores of this machine that this process may use.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Whether a product adds to a tensor that holds something before the program runs:
/// measuring it would count it in more than once.
fn adds_to_resident(program: &Program, op: &Op) -> bool {
    let mut adds = false;
    op.kind.for_each_operand(|t, access| {
        adds |= access == Access::Update && program.tensor(t).resident;
    });
    adds
}

/// Memory for `len` bytes, aligned for any element.
fn aligned(len: usize) -> Vec<u64> {
    vec![0; len.div_ceil(8)]
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        let _ = self.context.bind();
        let _ = self.wait();
        // NCCL waits for graphs that hold its collectives.
        self.graphs.clear();
        self.link = None;
        self.host = HostSlab::empty();
        self.streams = Streams::default();
        self.kernels.unload();
    }
}

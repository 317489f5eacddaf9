//! A device with random bytes and a clock.

use std::time::{Duration, Instant};

use plimsoll_arch::DType;
use plimsoll_plan::{ALIGNMENT, Device, DeviceError, DeviceKind, Layout, Placement};
use plimsoll_program::{Class, Home, OpKind, Program, Target};

use crate::case::{Case, Fill, STREAMS, each_op, step_words};
use crate::grid::Grid;

/// Pieces in which random bytes go up: they fit a device's staging buffer.
const PIECE: usize = 16 << 20;

/// Which random numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Random {
    /// Of deviation 0.6.
    Signed,
    /// Their absolute values.
    Positive,
    /// A sixteenth of them, as weights are.
    Small,
}

/// Where ops are timed.
///
/// Operands that are only read lie in one part of the slab, whose random numbers
/// nothing ever overwrites; results in another; behind both scratch memory, and
/// indices, which a stray result would turn into wild addresses.
pub(crate) struct Bed<'a> {
    pub device: &'a mut dyn Device,
    pub target: &'a dyn Target,
    pub grid: &'a Grid,
    kind: DeviceKind,
    parts: Parts,
    /// bf16 numbers; as float32, each pair is one number with more digits.
    random: Vec<u16>,
}

/// How large the parts of the slab are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Parts {
    source: u64,
    sink: u64,
    workspace: u64,
    indices: u64,
}

impl Parts {
    /// What every op of a grid finds room in.
    pub fn of(grid: &Grid, target: &dyn Target) -> Parts {
        let mut parts =
            Parts { source: grid.source_bytes, sink: grid.sink_bytes, ..Parts::default() };
        each_op(grid, &mut |make| {
            let one = Case::repeat(target, 1, make);
            let copies = grid.copies_of(&one) as u64;
            let need = one.needs();
            parts.source = parts.source.max(need.source);
            parts.sink = parts.sink.max(need.sink);
            parts.workspace = parts.workspace.max(need.workspace);
            // Those of one copy must survive the results of the others.
            parts.indices = parts.indices.max(copies * need.indices);
        });
        parts
    }

    pub fn slab_bytes(self) -> u64 {
        self.source + self.sink + self.workspace + self.indices
    }
}

impl Case {
    /// Bytes of the operands, by part.
    fn needs(&self) -> Parts {
        let mut needs = Parts::default();
        for (tensor, fill) in self.program.tensors.iter().zip(&self.fills) {
            let part = match (tensor.class, region(fill)) {
                (Class::Workspace, _) => &mut needs.workspace,
                (_, Region::Source) => &mut needs.source,
                (_, Region::Sink) => &mut needs.sink,
                (_, Region::Indices) => &mut needs.indices,
            };
            *part += tensor.bytes().next_multiple_of(ALIGNMENT);
        }
        needs
    }
}

impl Grid {
    /// How many copies of an op make a section: so many that no cache holds the
    /// operands of one until they are read again, and that launching costs little.
    fn copies_of(&self, one: &Case) -> usize {
        let needs = one.needs();
        let wanted = self.rotation / (needs.source + needs.sink).max(1);
        (wanted as usize).clamp(self.least_copies, self.copies)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Region {
    Source,
    Sink,
    Indices,
}

fn region(fill: &Fill) -> Region {
    match fill {
        Fill::Source => Region::Source,
        Fill::Result | Fill::Changing | Fill::Positive => Region::Sink,
        Fill::Below(_) | Fill::Words(_) => Region::Indices,
    }
}

/// The next free place of a part of the slab.
struct Part {
    start: u64,
    bytes: u64,
    used: u64,
}

impl Part {
    fn take(&mut self, bytes: u64) -> Placement {
        let offset = self.start + self.used;
        self.used += bytes.next_multiple_of(ALIGNMENT);
        Placement { offset, bytes }
    }

    /// Starts over where what comes does not fit behind what was.
    fn make_room(&mut self, bytes: u64) {
        if self.used + bytes > self.bytes {
            self.used = 0;
        }
    }
}

impl<'a> Bed<'a> {
    /// Nothing is filled yet.
    pub fn new(
        device: &'a mut dyn Device,
        target: &'a dyn Target,
        grid: &'a Grid,
        kind: DeviceKind,
    ) -> Bed<'a> {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        // Normal-ish numbers of deviation 0.6: a sum of four uniform ones.
        let mut number = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let sum: f32 = (0..4).map(|i| (state >> (16 * i) & 0xffff) as f32).sum();
            let x = (sum / 65536.0 - 2.0).to_bits();
            ((x + 0x8000) >> 16) as u16
        };
        let random = (0..PIECE / 2).map(|_| number()).collect();
        Bed { device, target, grid, kind, parts: Parts::of(grid, target), random }
    }

    /// Random numbers.
    pub fn fill(&mut self, offset: u64, bytes: u64, which: Random) -> Result<(), DeviceError> {
        let random: &[u8] = bytemuck::cast_slice(&self.random);
        let mut at = 0;
        while at < bytes {
            let len = (bytes - at).min(PIECE as u64) as usize;
            self.device.upload(Home::Device, offset + at, len, &mut |to| {
                to.copy_from_slice(&random[..len]);
                // Sign and most of the exponent of a bf16, and of a float32, are in every
                // second byte.
                let tops = to.iter_mut().skip(1).step_by(2);
                match which {
                    Random::Signed => {}
                    Random::Positive => tops.for_each(|b| *b &= 0x7f),
                    Random::Small => tops.for_each(|b| {
                        if *b & 0x7f > 8 {
                            *b -= 2;
                        }
                    }),
                }
                Ok(())
            })?;
            at += len as u64;
        }
        Ok(())
    }

    /// Fills the part that is only read.
    pub fn fill_sources(&mut self) -> Result<(), DeviceError> {
        self.fill(0, self.parts.source, Random::Signed)
    }

    /// Seconds from writing a step's scalars to having read its loss, around one
    /// small op.
    pub fn start_and_end(&mut self) -> Result<f64, DeviceError> {
        let make = STREAMS[0];
        let case = Case::repeat(self.target, 1, &mut |c| make(c, DType::F32, 16, 64));
        let layout = self.place(&case);
        let mut times = Vec::new();
        for _ in 0..64 {
            let start = Instant::now();
            self.words(self.parts.source, &step_words())?;
            self.device.run(&case.program, &layout, 0)?;
            self.wait()?;
            times.push(start.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }

    /// Waits for all that runs.
    pub fn wait(&mut self) -> Result<(), DeviceError> {
        self.device.download(Home::Device, 0, 4, &mut |_| Ok(()))
    }

    /// Seconds of one op, and the bytes that it moves by the count of
    /// `Program::work`.
    pub fn time(
        &mut self,
        make: &mut dyn FnMut(&mut Case) -> OpKind,
    ) -> Result<(f64, f64), DeviceError> {
        let one = Case::repeat(self.target, 1, make);
        let work = one.program.work(&one.program.ops[0]);
        let copies = self.grid.copies_of(&one);
        let case = Case::repeat(self.target, copies, make);
        let layout = self.place(&case);
        self.prepare(&case, &layout, false)?;
        let busy = work.matmul_flops >= self.grid.busy_flops;
        let window = if busy { self.grid.busy_window } else { self.grid.window };
        let seconds = match self.kind {
            DeviceKind::Cuda => self.sustained(&case.program, &layout, window)?,
            DeviceKind::Cpu => self.median(&case.program, &layout, window.1, |bed| {
                bed.prepare(&case, &layout, true)
            })?,
        };
        Ok((seconds / copies as f64, work.bytes))
    }

    /// Mean of a stretch without pause, after one that lets the clocks settle.
    fn sustained(
        &mut self,
        program: &Program,
        layout: &Layout,
        (warm, window): (f64, f64),
    ) -> Result<f64, DeviceError> {
        // The first run chooses algorithms, loads kernels and captures.
        self.device.run(program, layout, 0)?;
        self.device.run(program, layout, 0)?;
        self.wait()?;
        let estimate = self.stretch(program, layout, 2)?;
        let runs = |seconds: f64| (seconds / estimate.max(1e-7)).ceil().clamp(1.0, 1e5) as usize;
        if warm > 0.0 {
            for _ in 0..runs(warm) {
                self.device.run(program, layout, 0)?;
            }
        }
        self.stretch(program, layout, runs(window).max(3))
    }

    /// Seconds of a token step, one behind the other. What it reads is there already.
    pub fn time_program(&mut self, program: &Program, layout: &Layout) -> Result<f64, DeviceError> {
        let (warm, window) = self.grid.window;
        match self.kind {
            DeviceKind::Cuda => self.sustained(program, layout, (warm, 4.0 * window)),
            DeviceKind::Cpu => self.median(program, layout, window, |_| Ok(())),
        }
    }

    /// Seconds of one run out of `runs` without pause.
    fn stretch(
        &mut self,
        program: &Program,
        layout: &Layout,
        runs: usize,
    ) -> Result<f64, DeviceError> {
        self.wait()?;
        let start = Instant::now();
        for _ in 0..runs {
            self.device.run(program, layout, 0)?;
        }
        self.wait()?;
        Ok(start.elapsed().as_secs_f64() / runs as f64)
    }

    /// Median of single runs, each behind `prepare`, which makes operands fresh: a machine
    /// that does other things too disturbs some of them, and numbers that shrink run after
    /// run would become denormal, which a CPU is slow at.
    fn median(
        &mut self,
        program: &Program,
        layout: &Layout,
        window: f64,
        mut prepare: impl FnMut(&mut Self) -> Result<(), DeviceError>,
    ) -> Result<f64, DeviceError> {
        self.device.run(program, layout, 0)?;
        let (mut times, mut total) = (Vec::new(), 0.0);
        while times.len() < 3 || (total < window && times.len() < 1000) {
            prepare(self)?;
            let start = Instant::now();
            self.device.run(program, layout, 0)?;
            let seconds = start.elapsed().as_secs_f64();
            times.push(seconds);
            total += seconds;
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }

    /// An address for every tensor. Copies that find no room share that of earlier
    /// ones, which nothing waits for any more.
    fn place(&self, case: &Case) -> Layout {
        let parts = self.parts;
        let part = |start, bytes| Part { start, bytes, used: 0 };
        let mut source = part(0, parts.source);
        let mut sink = part(parts.source, parts.sink);
        let scratch = parts.source + parts.sink;
        let mut indices = part(scratch + parts.workspace, parts.indices);
        let tensors = &case.program.tensors;
        let mut placements = vec![None; tensors.len()];
        for op in &case.program.ops {
            let mut operands: Vec<usize> = Vec::new();
            op.kind.for_each_operand(|t, _| {
                if placements[t.index()].is_none() && !operands.contains(&t.index()) {
                    operands.push(t.index());
                }
            });
            let size = |home: Region| -> u64 {
                let of = operands.iter().filter(|t| region(&case.fills[**t]) == home);
                of.map(|t| tensors[*t].bytes().next_multiple_of(ALIGNMENT)).sum()
            };
            source.make_room(size(Region::Source));
            sink.make_room(size(Region::Sink));
            for t in operands {
                let part = match region(&case.fills[t]) {
                    Region::Source => &mut source,
                    Region::Sink => &mut sink,
                    Region::Indices => &mut indices,
                };
                placements[t] = Some(part.take(tensors[t].bytes()));
            }
            if let Some(workspace) = op.workspace {
                let bytes = tensors[workspace.index()].bytes();
                placements[workspace.index()] = Some(Placement { offset: scratch, bytes });
            }
        }
        Layout {
            lifetimes: vec![None; tensors.len()],
            placements,
            slab_bytes: parts.slab_bytes(),
            host_bytes: 0,
            lower_bound: 0,
            peak_op: 0,
        }
    }

    /// Writes what the ops need; `again`: only what they changed.
    fn prepare(&mut self, case: &Case, layout: &Layout, again: bool) -> Result<(), DeviceError> {
        for (t, fill) in case.fills.iter().enumerate() {
            let Some(Placement { offset, bytes }) = layout.placements[t] else { continue };
            match fill {
                Fill::Source | Fill::Result => {}
                Fill::Changing | Fill::Positive => {
                    let positive = *fill == Fill::Positive;
                    let which = if positive { Random::Positive } else { Random::Signed };
                    self.fill(offset, bytes, which)?;
                }
                Fill::Below(limit) if !again => self.integers(offset, bytes, *limit)?,
                Fill::Words(words) if !again => self.words(offset, words)?,
                Fill::Below(_) | Fill::Words(_) => {}
            }
        }
        Ok(())
    }

    /// Random integers from 0 to below `limit`.
    fn integers(&mut self, offset: u64, bytes: u64, limit: usize) -> Result<(), DeviceError> {
        let random = &self.random;
        let mut at = 0;
        while at < bytes {
            let len = (bytes - at).min(PIECE as u64 / 2) as usize;
            self.device.upload(Home::Device, offset + at, len, &mut |to| {
                for (to, x) in to.chunks_exact_mut(4).zip(random.chunks_exact(2)) {
                    let word = u32::from(x[0]) << 16 | u32::from(x[1]);
                    let spread = word.wrapping_mul(0x9e37_79b1) >> 4;
                    to.copy_from_slice(&(spread as usize % limit).to_le_bytes()[..4]);
                }
                Ok(())
            })?;
            at += len as u64;
        }
        Ok(())
    }

    fn words(&mut self, offset: u64, words: &[u32]) -> Result<(), DeviceError> {
        let words: &[u8] = bytemuck::cast_slice(words);
        self.device.upload(Home::Device, offset, words.len(), &mut |to| {
            to.copy_from_slice(words);
            Ok(())
        })
    }

    /// Fills the tensors of a training step: small weights, random tokens, one
    /// document a row.
    pub fn fill_step(
        &mut self,
        program: &Program,
        layout: &Layout,
        (vocab, seq): (usize, usize),
    ) -> Result<(), DeviceError> {
        for (tensor, placement) in program.tensors.iter().zip(&layout.placements) {
            let Some(Placement { offset, bytes }) = *placement else { continue };
            match (tensor.class, tensor.name.as_str()) {
                // Scales of four bits are positive.
                (Class::Weight, name) if name.contains("absmax") => {
                    self.fill(offset, bytes, Random::Positive)?
                }
                (Class::Weight, _) => self.fill(offset, bytes, Random::Small)?,
                (Class::KvCache, _) => self.fill(offset, bytes, Random::Signed)?,
                (Class::OptimizerState, _) => self.fill(offset, bytes, Random::Positive)?,
                (Class::Input, "ids" | "labels") => self.integers(offset, bytes, vocab)?,
                (Class::Input, "positions") => self.integers(offset, bytes, seq)?,
                (Class::Input, "start") => {
                    self.words(offset, &vec![seq as u32 / 2; bytes as usize / 4])?
                }
                (Class::Input, "last_rows") => {
                    self.words(offset, &(0..bytes as u32 / 4).collect::<Vec<_>>())?
                }
                (Class::Input, "doc_start") => self.integers(offset, bytes, 1)?,
                (Class::Input, "rope") => self.fill(offset, bytes, Random::Signed)?,
                (Class::Input, "step") => self.words(offset, &step_words())?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Bytes a second of pieces that go up, and of pieces that come down.
    pub fn link(&mut self) -> Result<(f64, f64), DeviceError> {
        let offset = self.parts.source;
        let pieces = (self.parts.sink as usize / PIECE).clamp(1, 32);
        let limit = Duration::from_millis(400);
        // Memory that was never written is slow to write.
        self.fill(offset, (pieces * PIECE) as u64, Random::Signed)?;
        let mut rates = [0.0; 2];
        for (direction, rate) in rates.iter_mut().enumerate() {
            self.wait()?;
            let (start, mut bytes) = (Instant::now(), 0usize);
            let mut keep = 0u8;
            'time: loop {
                for piece in 0..pieces {
                    let at = offset + (piece * PIECE) as u64;
                    match direction {
                        // On the CPU the memory itself is written and read.
                        0 if self.kind == DeviceKind::Cpu => {
                            let random: &[u8] = bytemuck::cast_slice(&self.random);
                            self.device.upload(Home::Device, at, PIECE, &mut |to| {
                                to.copy_from_slice(random);
                                Ok(())
                            })?;
                        }
                        0 => self.device.upload(Home::Device, at, PIECE, &mut |_| Ok(()))?,
                        _ if self.kind == DeviceKind::Cpu => {
                            self.device.download(Home::Device, at, PIECE, &mut |from| {
                                keep = from.iter().fold(keep, |k, b| k ^ b);
                                Ok(())
                            })?;
                        }
                        _ => self.device.download(Home::Device, at, PIECE, &mut |_| Ok(()))?,
                    }
                    bytes += PIECE;
                    if start.elapsed() > limit {
                        break 'time;
                    }
                }
            }
            self.wait()?;
            std::hint::black_box(keep);
            *rate = bytes as f64 / start.elapsed().as_secs_f64();
        }
        Ok((rates[0], rates[1]))
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_cpu::{CpuDevice, CpuTarget};
    use plimsoll_cuda::CudaTarget;

    use super::*;

    /// Every tensor of every case lies in its part, and those of one op are apart.
    fn check(grid: &Grid, target: &dyn Target, kind: DeviceKind) -> usize {
        let mut device = CpuDevice::new(4096, 1).unwrap();
        let bed = Bed::new(&mut device, target, grid, kind);
        let mut ops = 0;
        each_op(grid, &mut |make| {
            let one = Case::repeat(target, 1, make);
            let copies = grid.copies_of(&one);
            let case = Case::repeat(target, copies, make);
            case.program.verify().unwrap();
            let layout = bed.place(&case);
            let Parts { source, sink, workspace, .. } = bed.parts;
            for (t, placement) in layout.placements.iter().enumerate() {
                let Placement { offset, bytes } = placement.unwrap();
                let (start, end) = match (case.program.tensors[t].class, region(&case.fills[t])) {
                    (Class::Workspace, _) => (source + sink, source + sink + workspace),
                    (_, Region::Source) => (0, source),
                    (_, Region::Sink) => (source, source + sink),
                    (_, Region::Indices) => (source + sink + workspace, layout.slab_bytes),
                };
                assert!(start <= offset && offset + bytes <= end, "{:?}", case.program.tensors[t]);
            }
            for op in &case.program.ops {
                let mut places = Vec::new();
                op.for_each_tensor(|t, _| places.push(layout.placements[t.index()].unwrap()));
                places.sort_by_key(|p| p.offset);
                assert!(places.windows(2).all(|p| p[0].offset + p[0].bytes <= p[1].offset));
            }
            ops += 1;
        });
        ops
    }

    #[test]
    fn every_op_finds_its_place() {
        let gpu = Grid::of(DeviceKind::Cuda);
        assert!(check(&gpu, &CudaTarget, DeviceKind::Cuda) > 500);
        // A calibration must run on the smallest GPU that trains at all.
        assert!(Parts::of(&gpu, &CudaTarget).slab_bytes() < 5 << 30);
        for threads in [1, 64] {
            check(&Grid::of(DeviceKind::Cpu), &CpuTarget { threads }, DeviceKind::Cpu);
            check(&Grid::small(), &CpuTarget { threads }, DeviceKind::Cpu);
        }
    }
}

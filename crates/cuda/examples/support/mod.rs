//! Two devices side by side, and how far apart their tensors are.

pub mod few_rows;
pub mod golden;
pub mod offload;
pub mod ops;
pub mod quantize;
pub mod ranks;
pub mod steps;
pub mod token;

use std::process::ExitCode;

use half::bf16;
use plimsoll_arch::DType;
use plimsoll_plan::{Device, Layout, SlabSizes, lay_out};
use plimsoll_program::{Class, Home, Op, OpKind, Program, Shard, Target, Tensor, TensorId, View};
use plimsoll_quant::join_master;

/// What was compared so far.
#[derive(Default)]
pub struct Report {
    checks: usize,
    failures: Vec<String>,
}

impl Report {
    /// Notes an error against its limit; NaN fails.
    pub fn error(&mut self, what: &str, error: f64, limit: f64) {
        self.checks += 1;
        if error.is_nan() || error > limit {
            let line = format!("FAILED {what}: {error:.3e} above {limit:.1e}");
            println!("{line}");
            self.failures.push(line);
        }
    }

    pub fn holds(&mut self, what: &str, holds: bool) {
        self.error(what, if holds { 0.0 } else { 1.0 }, 0.0);
    }

    pub fn finish(&self) -> ExitCode {
        println!("{} checks, {} failures", self.checks, self.failures.len());
        self.failures.iter().for_each(|line| println!("{line}"));
        if self.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

/// Threads of the CPU's side.
pub fn cpu_threads() -> usize {
    std::thread::available_parallelism().map_or(4, |n| n.get()).min(8)
}

/// ||a - b|| / ||b||; the plain norm of a where b is zero.
pub fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let (mut difference, mut size) = (0.0f64, 0.0f64);
    for (a, b) in a.iter().zip(b) {
        difference += (f64::from(*a) - f64::from(*b)).powi(2);
        size += f64::from(*b).powi(2);
    }
    if size == 0.0 { difference.sqrt() } else { (difference / size).sqrt() }
}

/// A program, its layout, and a device that holds it.
pub struct Bench<D> {
    pub device: D,
    pub program: Program,
    pub layout: Layout,
}

impl<D: Device> Bench<D> {
    /// `make` is given the bytes of the slabs.
    pub fn new(program: Program, make: impl FnOnce(SlabSizes) -> D) -> Bench<D> {
        program.verify().unwrap_or_else(|e| panic!("{e}"));
        let layout = lay_out(&program);
        let device = make(layout.slabs());
        Bench { device, program, layout }
    }

    pub fn write(&mut self, tensor: TensorId, values: &[f32]) {
        let t = self.program.tensor(tensor);
        let (home, dtype, len) = (t.home, t.dtype, t.bytes() as usize);
        assert_eq!(values.len(), t.elements(), "{}", t.name);
        let offset = self.layout.offset(tensor);
        self.device
            .upload(home, offset, len, &mut |bytes| {
                match dtype {
                    DType::Bf16 => fill(bytemuck::cast_slice_mut(bytes), values, bf16::from_f32),
                    DType::I32 => fill(bytemuck::cast_slice_mut(bytes), values, |x| x as i32),
                    DType::I16 => fill(bytemuck::cast_slice_mut(bytes), values, |x| x as i16),
                    DType::U8 => fill(bytes, values, |x| x as u8),
                    _ => fill(bytemuck::cast_slice_mut(bytes), values, |x| x),
                }
                Ok(())
            })
            .expect("upload");
    }

    pub fn read(&mut self, tensor: TensorId) -> Vec<f32> {
        let t = self.program.tensor(tensor);
        let (home, dtype, len) = (t.home, t.dtype, t.bytes() as usize);
        let offset = self.layout.offset(tensor);
        let mut values = Vec::new();
        self.device
            .download(home, offset, len, &mut |bytes| {
                values = match dtype {
                    DType::Bf16 => {
                        bytemuck::cast_slice::<u8, bf16>(bytes).iter().map(|x| x.to_f32()).collect()
                    }
                    DType::I32 => {
                        bytemuck::cast_slice::<u8, i32>(bytes).iter().map(|x| *x as f32).collect()
                    }
                    DType::I16 => bytemuck::cast_slice::<u8, i16>(bytes)
                        .iter()
                        .map(|x| f32::from(*x))
                        .collect(),
                    DType::U8 => bytes.iter().map(|x| f32::from(*x)).collect(),
                    DType::F32 => bytemuck::cast_slice::<u8, f32>(bytes).to_vec(),
                };
                Ok(())
            })
            .unwrap_or_else(|e| panic!("download: {e}"));
        values
    }

    /// A bf16 weight and the lower half of its master, as the float32 numbers they are.
    pub fn read_master(&mut self, weight: TensorId, low: TensorId) -> Vec<f32> {
        let (weight, low) = (self.read(weight), self.read(low));
        let join = |(w, l): (&f32, &f32)| join_master((w.to_bits() >> 16) as u16, *l as i16);
        weight.iter().zip(&low).map(join).collect()
    }

    pub fn find(&self, name: &str) -> TensorId {
        self.program.find(name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    pub fn run(&mut self, section: usize) {
        self.device
            .run(&self.program, &self.layout, section)
            .unwrap_or_else(|e| panic!("section {section}: {e}"));
    }
}

fn fill<T>(to: &mut [T], from: &[f32], convert: impl Fn(f32) -> T) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = convert(*from);
    }
}

/// Normal-ish values (a sum of four uniform ones) from a seed.
pub fn random(seed: u64, n: usize, deviation: f32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..n).map(|_| (uniform() + uniform() + uniform() + uniform()) * 1.732 * deviation).collect()
}

/// Integers below `limit`.
pub fn integers(seed: u64, n: usize, limit: usize) -> Vec<f32> {
    let spread = |x: &f32| ((x.to_bits() >> 3) as usize % limit) as f32;
    random(seed, n, 1.0).iter().map(spread).collect()
}

/// The same program without products of matrices in four bits: each is multiplied out
/// first. What the CPU takes as the truth about them.
pub fn multiplied_out(mut program: Program, target: &dyn Target) -> Program {
    let mut ops = Vec::with_capacity(program.ops.len());
    for op in std::mem::take(&mut program.ops) {
        let OpKind::LinearQuantized { x, w, bias, add, y } = op.kind else {
            ops.push(op);
            continue;
        };
        let (rows, cols) = (w.rows, w.cols);
        let dtype = program.tensor(x.tensor).dtype;
        let out = scratch(&mut program, "dequantized", &[rows, cols], dtype, Class::Activation);
        let w_out = View { tensor: out, row: 0, col: 0, rows, cols, stride: cols };
        for kind in [
            OpKind::Dequantize { w, out },
            OpKind::Linear { x, w: w_out, bias, add, y, scale: 1.0 },
        ] {
            let bytes = target.workspace_bytes(&kind, &program) as usize;
            let workspace = (bytes > 0)
                .then(|| scratch(&mut program, "workspace", &[bytes], DType::U8, Class::Workspace));
            ops.push(Op { kind, phase: op.phase, workspace });
        }
    }
    program.ops = ops;
    assert_eq!(program.sections.len(), 1, "sections would have to move");
    program.sections[0].ops = 0..program.ops.len();
    program
}

fn scratch(
    program: &mut Program,
    name: &str,
    shape: &[usize],
    dtype: DType,
    class: Class,
) -> TensorId {
    let id = TensorId::new(program.tensors.len());
    program.tensors.push(Tensor {
        name: format!("{name}.{}", id.index()),
        shape: shape.to_vec(),
        dtype,
        class,
        home: Home::Device,
        shard: Shard::Whole,
        resident: false,
    });
    id
}

/// Weights of any recipe, by their names: norms near one, scales of four-bit blocks
/// small, everything else normal.
pub fn random_weights<D: Device>(bench: &mut Bench<D>) {
    for i in 0..bench.program.tensors.len() {
        let t = &bench.program.tensors[i];
        if t.class != Class::Weight || bench.layout.placements[i].is_none() {
            continue;
        }
        let seed = t.name.bytes().fold(11u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0193));
        let n = t.elements();
        let near = |center: f32, by: f32| -> Vec<f32> {
            random(seed, n, by).iter().map(|x| center + x).collect()
        };
        let values = match t.dtype {
            DType::U8 => integers(seed, n, 256),
            _ if t.name.ends_with("norm") => near(1.0, 0.1),
            _ if t.name.ends_with("absmax") => near(0.05, 0.005),
            _ if t.name.ends_with("offset") => vec![0.03; n],
            _ => near(0.0, 0.03),
        };
        bench.write(TensorId::new(i), &values);
    }
}

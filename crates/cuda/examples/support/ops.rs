//! Every op by itself, on sizes that fit vectors and on sizes that do not.

use plimsoll_arch::DType::{self, Bf16, F32, I16, I32, U8};
use plimsoll_cpu::{CpuDevice, CpuTarget};
use plimsoll_cuda::{CudaDevice, CudaTarget};
use plimsoll_plan::Device;
use plimsoll_program::{
    Access, AttentionShape, Class, Codebook, Home, Nested, Op, OpKind, Phase, Program,
    QuantizedMatrix, QuantizedPart, Section, Shard, Target, Tensor, TensorId, View,
};

use super::{Bench, Report, distance, integers, multiplied_out, random};

/// A program of one op, and what its tensors hold at the start.
#[derive(Default)]
pub(super) struct Case {
    program: Program,
    values: Vec<Vec<f32>>,
}

impl Case {
    pub fn tensor(&mut self, shape: &[usize], dtype: DType, values: Vec<f32>) -> TensorId {
        let id = TensorId::new(self.program.tensors.len());
        self.program.tensors.push(Tensor {
            name: format!("t{}", id.index()),
            shape: shape.to_vec(),
            dtype,
            class: Class::Activation,
            home: Home::Device,
            shard: Shard::Whole,
            resident: true,
        });
        self.values.push(values);
        id
    }

    pub fn random(&mut self, shape: &[usize], dtype: DType) -> TensorId {
        let n = shape.iter().product();
        let seed = 77 + self.values.len() as u64;
        self.tensor(shape, dtype, random(seed, n, 1.0))
    }

    /// Poison: whatever is not written shows.
    pub fn out(&mut self, shape: &[usize], dtype: DType) -> TensorId {
        let n = shape.iter().product();
        self.tensor(shape, dtype, vec![f32::NAN; n])
    }

    /// What lies between two ops, and nobody reads after them.
    pub fn between(&mut self, shape: &[usize], dtype: DType) -> TensorId {
        let id = self.out(shape, dtype);
        self.program.tensors[id.index()].resident = false;
        id
    }

    /// An operand that is added to, or one that is overwritten.
    fn sum(&mut self, shape: &[usize], dtype: DType, accumulate: bool) -> TensorId {
        if accumulate { self.random(shape, dtype) } else { self.out(shape, dtype) }
    }

    fn integers(&mut self, shape: &[usize], limit: usize) -> TensorId {
        let n = shape.iter().product();
        let seed = 99 + self.values.len() as u64;
        self.tensor(shape, I32, integers(seed, n, limit))
    }

    /// Lower halves of masters, of every kind.
    fn low_half(&mut self, shape: &[usize]) -> View {
        let n = shape.iter().product();
        let seed = 55 + self.values.len() as u64;
        let values = integers(seed, n, 1 << 16).iter().map(|x| x - 32768.0).collect();
        let low = self.tensor(shape, I16, values);
        self.view(low)
    }

    /// rate, bias corrections, loss scale, seed
    fn step(&mut self) -> TensorId {
        let values =
            vec![1e-2, 0.19, 0.002, 0.25, f32::from_bits(1234), f32::from_bits(99), 0.0, 0.0];
        self.tensor(&[8], F32, values)
    }

    pub fn view(&self, tensor: TensorId) -> View {
        let t = self.program.tensor(tensor);
        View { tensor, row: 0, col: 0, rows: t.rows(), cols: t.cols(), stride: t.cols() }
    }

    fn with(&self, kinds: &[OpKind], target: &dyn Target) -> Program {
        let mut program = self.program.clone();
        for kind in kinds {
            let bytes = target.workspace_bytes(kind, &program);
            let workspace = (bytes > 0).then(|| {
                let id = TensorId::new(program.tensors.len());
                program.tensors.push(Tensor {
                    name: format!("workspace{}", id.index()),
                    shape: vec![bytes as usize],
                    dtype: DType::U8,
                    class: Class::Workspace,
                    home: Home::Device,
                    shard: Shard::Whole,
                    resident: false,
                });
                id
            });
            program.ops.push(Op { kind: kind.clone(), phase: Phase::Forward, workspace });
        }
        program.sections = vec![Section { name: "op", ops: 0..kinds.len(), repeat: 1 }];
        program
    }

    /// Runs the ops on both devices and compares everything that they wrote.
    pub fn compare(&self, report: &mut Report, what: &str, limit: f64, kinds: &[OpKind]) {
        let (errors, _) = self.run(kinds);
        self.judge(report, what, limit, &errors);
    }

    /// As [`Case::compare`], for ops of which `launches` are to be made.
    pub fn compare_fused(
        &self,
        report: &mut Report,
        what: &str,
        limit: f64,
        kinds: &[OpKind],
        launches: usize,
    ) {
        let (errors, found) = self.run(kinds);
        self.judge(report, what, limit, &errors);
        report.holds(&format!("{what}: {found} launches, not {launches}"), found == launches);
    }

    fn judge(&self, report: &mut Report, what: &str, limit: f64, errors: &[(TensorId, f64)]) {
        let worse = |a: f64, b: f64| if b.is_nan() || b > a { b } else { a };
        let worst = errors.iter().fold(0.0, |worst, (_, error)| worse(worst, *error));
        println!("{worst:9.2e}  {what}");
        report.error(what, worst, limit);
    }

    /// How far apart both devices leave each tensor that the ops write.
    fn errors(&self, kinds: &[OpKind]) -> Vec<(TensorId, f64)> {
        self.run(kinds).0
    }

    /// The same, and the launches of the GPU. What lies between ops may never exist. Weights
    /// with masters are compared as those, once.
    fn run(&self, kinds: &[OpKind]) -> (Vec<(TensorId, f64)>, usize) {
        let target = CpuTarget { threads: 4 };
        let cpu = multiplied_out(self.with(kinds, &target), &target);
        let gpu = self.with(kinds, &CudaTarget);
        let mut cpu = Bench::new(cpu, |bytes| CpuDevice::new(bytes, 4).expect("memory"));
        let mut gpu =
            Bench::new(gpu, |bytes| CudaDevice::new(bytes, 0).unwrap_or_else(|e| panic!("{e}")));
        for (i, values) in self.values.iter().enumerate() {
            let t = TensorId::new(i);
            if cpu.layout.placements[i].is_some() {
                cpu.write(t, values);
                gpu.write(t, values);
            }
        }
        cpu.run(0);
        gpu.run(0);
        let mut written = Vec::new();
        for kind in kinds {
            kind.for_each_operand(|t, access| {
                let kept = self.program.tensor(t).resident;
                if access != Access::Read && kept && !written.contains(&t) {
                    written.push(t);
                }
            });
        }
        let updates = kinds.iter().filter_map(OpKind::update_operands);
        let masters: Vec<(TensorId, TensorId)> = updates
            .filter_map(|(param, _, [.., master])| Some((param.tensor, master?.tensor)))
            .collect();
        written.retain(|t| masters.iter().all(|(_, low)| low != t));
        let mut error = |t: TensorId| match masters.iter().find(|(weight, _)| *weight == t) {
            Some((weight, low)) => {
                distance(&gpu.read_master(*weight, *low), &cpu.read_master(*weight, *low))
            }
            None => distance(&gpu.read(t), &cpu.read(t)),
        };
        let errors = written.into_iter().map(|t| (t, error(t))).collect();
        let Bench { device, program, layout } = &mut gpu;
        let launches = device.profile(program, layout, 0).unwrap_or_else(|e| panic!("{e}"));
        (errors, launches.len())
    }
}

/// Limit of one op: float32 sums differ in their order, bf16 in its last bit.
pub(super) fn limit(dtype: DType) -> f64 {
    if dtype == Bf16 { 6e-3 } else { 2e-5 }
}

pub fn check(report: &mut Report) {
    for dtype in [F32, Bf16] {
        products(report, dtype);
        adapters(report, dtype);
        four_bits(report, dtype);
        rows(report, dtype);
        heads(report, dtype);
        attention(report, dtype);
        loss(report, dtype);
        updates(report, dtype);
        shares(report, dtype);
        updates_8bit(report, dtype);
    }
}

/// Attention alone.
pub fn check_attention(report: &mut Report) {
    for dtype in [F32, Bf16] {
        attention(report, dtype);
    }
}

fn products(report: &mut Report, dtype: DType) {
    for (m, n, k) in [(24, 40, 9000), (96, 160, 64), (257, 72, 40), (1, 512, 256), (33, 130, 66)] {
        for (bias, add) in [(false, false), (true, false), (false, true)] {
            let mut c = Case::default();
            let (x, w) = (c.random(&[m, k], dtype), c.random(&[n, k], dtype));
            let bias = bias.then(|| c.random(&[n], dtype));
            let add = add.then(|| c.random(&[m, n], dtype));
            let y = c.out(&[m, n], dtype);
            let (bias_name, add_name) = (bias.is_some(), add.is_some());
            let kind = OpKind::Linear {
                x: c.view(x),
                w: c.view(w),
                bias,
                add: add.map(|t| c.view(t)),
                y: c.view(y),
                scale: if bias_name || add_name { 1.0 } else { 0.5 },
            };
            let what = format!("linear {dtype} {m}x{n}x{k} bias {bias_name} add {add_name}");
            c.compare(report, &what, limit(dtype), &[kind]);
        }
        for accumulate in [false, true] {
            let mut c = Case::default();
            let (d_y, w) = (c.random(&[m, n], dtype), c.random(&[n, k], dtype));
            let x = c.random(&[m, k], dtype);
            let d_x = c.sum(&[m, k], dtype, accumulate);
            let d_w = c.sum(&[n, k], dtype, accumulate);
            let input = OpKind::LinearBackwardInput {
                d_y: c.view(d_y),
                w: c.view(w),
                d_x: c.view(d_x),
                accumulate,
                scale: if accumulate { 1.0 } else { 0.5 },
            };
            let weight = OpKind::LinearBackwardWeight {
                d_y: c.view(d_y),
                x: c.view(x),
                d_w: c.view(d_w),
                accumulate,
            };
            let what = format!("linear backward {dtype} {m}x{n}x{k} add {accumulate}");
            c.compare(report, &what, limit(dtype), &[input, weight]);
        }
    }
    let mut c = Case::default();
    let (x, w) = (c.random(&[64, 128], dtype), c.random(&[300, 128], dtype));
    let y = c.out(&[32, 300], F32);
    let x = c.view(x).rows_at(32, 32);
    let kind = OpKind::Linear { x, w: c.view(w), bias: None, add: None, y: c.view(y), scale: 1.0 };
    c.compare(report, &format!("linear {dtype} to f32, rows of a view"), limit(F32), &[kind]);
}

fn rows(report: &mut Report, dtype: DType) {
    for (r, c) in [(37, 64), (300, 1000), (40, 4096), (9, 12_304), (21, 50), (3, 20_000)] {
        let mut case = Case::default();
        let (x, weight) = (case.random(&[r, c], dtype), case.random(&[c], dtype));
        let (out, rstd) = (case.out(&[r, c], dtype), case.out(&[r, 1], F32));
        let norm = OpKind::RmsNorm { x, weight, out, rstd, eps: 1e-5 };
        let what = format!("rms_norm {dtype} {r}x{c}");
        case.compare(report, &what, limit(dtype), std::slice::from_ref(&norm));
        for accumulate in [false, true] {
            let mut case = Case::default();
            let (x, weight) = (case.random(&[r, c], dtype), case.random(&[c], dtype));
            let (out, rstd) = (case.out(&[r, c], dtype), case.out(&[r, 1], F32));
            let norm = OpKind::RmsNorm { x, weight, out, rstd, eps: 1e-5 };
            let d_out = case.random(&[r, c], dtype);
            let d_x = case.sum(&[r, c], dtype, accumulate);
            let d_weight = case.sum(&[c], dtype, accumulate);
            let back = OpKind::RmsNormBackward {
                d_out,
                x,
                weight,
                rstd,
                d_x,
                overwrite: !accumulate,
                d_weight: Some(d_weight),
                accumulate,
            };
            let what = format!("rms_norm_backward {dtype} {r}x{c} add {accumulate}");
            case.compare(report, &what, limit(dtype), &[norm, back]);
        }
    }
    for (r, i) in [(50, 64), (33, 1028), (7, 35), (3, 4800)] {
        let mut c = Case::default();
        let (gate_up, act) = (c.random(&[r, 2 * i], dtype), c.out(&[r, i], dtype));
        let what = format!("swiglu {dtype} {r}x{i}");
        c.compare(report, &what, limit(dtype), &[OpKind::SwiGlu { gate_up, act }]);
        let mut c = Case::default();
        let (gate_up, d_act) = (c.random(&[r, 2 * i], dtype), c.random(&[r, i], dtype));
        let what = format!("swiglu_backward {dtype} {r}x{i}");
        c.compare(report, &what, limit(dtype), &[OpKind::SwiGluBackward { gate_up, d_act }]);
        let mut c = Case::default();
        let (d_y, d_bias) = (c.random(&[r, i], dtype), c.random(&[i], dtype));
        let what = format!("bias_backward {dtype} {r}x{i}");
        let kind = OpKind::BiasBackward { d_y, d_bias, accumulate: true };
        c.compare(report, &what, limit(dtype), &[kind]);
    }
    for (v, c, n) in [(50, 64, 700), (1000, 2050, 37), (300, 33, 64)] {
        let mut case = Case::default();
        let (ids, table) = (case.integers(&[n, 1], v), case.random(&[v, c], dtype));
        let out = case.out(&[n, c], dtype);
        let what = format!("embed and gather {dtype} {v}x{c} {n}");
        let again = case.out(&[n, c], dtype);
        let rows = case.integers(&[n], n);
        let kinds =
            [OpKind::Embed { ids, table, out }, OpKind::GatherRows { x: out, rows, out: again }];
        case.compare(report, &what, 0.0, &kinds);
        for accumulate in [false, true] {
            let mut case = Case::default();
            let (ids, d_x) = (case.integers(&[n, 1], v), case.random(&[n, c], dtype));
            let d_table = case.sum(&[v, c], dtype, accumulate);
            let what = format!("embed_backward {dtype} {v}x{c} {n} add {accumulate}");
            let kind = OpKind::EmbedBackward { ids, d_x, d_table, accumulate };
            // The CPU rounds bf16 after every row, the GPU once.
            let limit = if dtype == Bf16 { 2e-2 } else { 2e-5 };
            case.compare(report, &what, limit, &[kind]);
        }
    }
}

pub(super) fn shape(
    b: usize,
    t: usize,
    (h, k): (usize, usize),
    d: usize,
    w: Option<usize>,
) -> AttentionShape {
    AttentionShape { batch: b, seq: t, heads: h, kv_heads: k, head_dim: d, window: w }
}

fn heads(report: &mut Report, dtype: DType) {
    for shape in [
        shape(2, 9, (4, 2), 64, None),
        shape(3, 70, (6, 2), 20, None),
        shape(1, 5, (2, 2), 256, None),
    ] {
        let (h, k, d) = (shape.heads, shape.kv_heads, shape.head_dim);
        let (width, rows) = ((h + 2 * k) * d, [shape.batch, shape.seq]);
        let full = [rows[0], rows[1], width];
        let mut c = Case::default();
        let positions = c.integers(&rows, 128);
        let half = random(5, d / 2, 2.0);
        let row = || half.iter().map(|a| a.cos()).chain(half.iter().map(|a| a.sin()));
        let angles =
            (0..128).flat_map(|p| row().map(move |x| x * (1.0 + p as f32 / 64.0))).collect();
        let table = c.tensor(&[128, 2, d / 2], F32, angles);
        let qkv = c.random(&full, dtype);
        let turn = |inverse| OpKind::Rope { qkv, positions, table, shape, inverse };
        c.compare(report, &format!("rope {dtype} {shape:?}"), limit(dtype), &[turn(false)]);
        c.compare(report, &format!("rope back {dtype}"), limit(dtype), &[turn(true)]);
        let mut c = Case::default();
        let qkv_raw = c.random(&full, dtype);
        let (q_weight, k_weight) = (c.random(&[d], dtype), c.random(&[d], dtype));
        let (qkv, rstd) = (c.out(&full, dtype), c.out(&[rows[0], rows[1], h + k], F32));
        let d_qkv = c.random(&full, dtype);
        let (d_q_weight, d_k_weight) = (c.random(&[d], dtype), c.random(&[d], dtype));
        let kinds = [
            OpKind::HeadNorm { qkv_raw, q_weight, k_weight, qkv, rstd, shape, eps: 1e-6 },
            OpKind::HeadNormBackward {
                d_qkv,
                qkv_raw,
                q_weight,
                k_weight,
                rstd,
                d_q_weight: Some(d_q_weight),
                d_k_weight: Some(d_k_weight),
                shape,
                accumulate: true,
            },
        ];
        c.compare(report, &format!("head_norm both ways {dtype}"), limit(dtype), &kinds);
    }
}

/// Documents of uneven lengths in every row.
fn doc_starts(shape: &AttentionShape, documents: bool) -> Vec<f32> {
    let start = |t: usize| {
        if documents { [0, 3, 40, 41, 100].into_iter().filter(|s| *s <= t).max() } else { None }
    };
    (0..shape.batch * shape.seq).map(|i| start(i % shape.seq).unwrap_or(0) as f32).collect()
}

fn attention(report: &mut Report, dtype: DType) {
    let shapes = [
        (shape(2, 70, (4, 2), 64, None), false),
        (shape(1, 200, (6, 3), 64, Some(33)), true),
        (shape(1, 129, (4, 1), 128, None), true),
        (shape(1, 150, (2, 2), 96, None), true),
        (shape(2, 45, (3, 1), 20, Some(7)), true),
        (shape(1, 40, (2, 1), 256, None), false),
        (shape(1, 1, (2, 1), 128, None), false),
    ];
    for (shape, documents) in shapes {
        let (h, k, d) = (shape.heads, shape.kv_heads, shape.head_dim);
        let rows = [shape.batch, shape.seq];
        let of = |cols: usize| [rows[0], rows[1], cols];
        let mut c = Case::default();
        let qkv = c.random(&of((h + 2 * k) * d), dtype);
        let doc_start = c.tensor(&rows, I32, doc_starts(&shape, documents));
        let (out, lse) = (c.out(&of(h * d), dtype), c.out(&of(h), F32));
        let d_out = c.random(&of(h * d), dtype);
        let d_qkv = c.out(&of((h + 2 * k) * d), dtype);
        let kinds = [
            OpKind::Attention { qkv, doc_start, out, lse, shape },
            OpKind::AttentionBackward { qkv, doc_start, out, lse, d_out, d_qkv, shape },
        ];
        c.compare(
            report,
            &format!("attention both ways {dtype} {shape:?}"),
            2.0 * limit(dtype),
            &kinds,
        );
    }
    for (tokens, start, (h, k), d, window) in [
        (1, 300, (6, 2), 64, None),
        (1, 129, (6, 2), 128, Some(50)),
        (1, 0, (4, 4), 128, None),
        (1, 399, (32, 4), 64, None),
        (1, 63, (20, 2), 64, None),
        (1, 64, (9, 3), 64, None),
        (1, 277, (5, 5), 96, Some(100)),
        (3, 0, (6, 2), 20, None),
        (2, 31, (6, 2), 64, None),
        (40, 17, (6, 2), 64, None),
        (33, 0, (6, 2), 128, Some(9)),
        (129, 63, (4, 1), 128, None),
        (128, 128, (2, 2), 96, Some(70)),
        (200, 200, (4, 2), 64, None),
    ] {
        let shape = shape(2, tokens, (h, k), d, window);
        let capacity = 400;
        let mut c = Case::default();
        let qkv = c.random(&[2, tokens, (h + 2 * k) * d], dtype);
        let start = c.tensor(&[2], I32, vec![start as f32, (start / 2) as f32]);
        let (k_cache, v_cache) =
            (c.random(&[2, capacity, k * d], dtype), c.random(&[2, capacity, k * d], dtype));
        let out = c.out(&[2, tokens, h * d], dtype);
        let kind = OpKind::AttentionCached { qkv, start, k_cache, v_cache, out, shape, capacity };
        c.compare(report, &format!("attention_cached {dtype} {shape:?}"), limit(dtype), &[kind]);
    }
}

fn loss(report: &mut Report, dtype: DType) {
    for (n, v) in [(20, 1000), (5, 151_936), (11, 1003)] {
        for backward in [true, false] {
            let mut c = Case::default();
            let logits = c.random(&[n, v], dtype);
            let mut labels = integers(3, 2 * n, v);
            labels[n + 2] = -100.0;
            let labels = c.tensor(&[1, 2 * n], I32, labels);
            let losses = c.tensor(&[1, 2 * n, 1], F32, vec![0.5; 2 * n]);
            let (step, total) = (c.step(), c.random(&[1], F32));
            let kinds = [
                OpKind::CrossEntropy { logits, labels, losses, step, row: n, backward },
                OpKind::SumLosses { losses, step, total, accumulate: true },
            ];
            let what = format!("cross_entropy {dtype} {n}x{v} backward {backward}");
            c.compare(report, &what, limit(dtype), &kinds);
        }
    }
}

fn updates(report: &mut Report, dtype: DType) {
    let sizes = [[64, 300], [1, 17], [333, 1000], [1, 64]];
    let cases = [(F32, false), (Bf16, false), (F32, true), (Bf16, true)];
    for (state, masters) in cases.into_iter().filter(|(_, masters)| !masters || dtype == Bf16) {
        let mut c = Case::default();
        let step = c.step();
        let norm = c.out(&[2], F32);
        let mut kinds = Vec::new();
        let (mut grads, mut adamw, mut sgd) = (Vec::new(), Vec::new(), Vec::new());
        for (stream, size) in sizes.iter().enumerate() {
            let (param, grad) = (c.random(size, dtype), c.random(size, dtype));
            let m = c.random(size, state);
            let squares = random(9, size[0] * size[1], 0.1).iter().map(|x| x * x).collect();
            let v = c.tensor(size, state, squares);
            grads.push(grad);
            let norm = Some(norm);
            let stream = stream as u32;
            adamw.push(OpKind::AdamW {
                param: c.view(param),
                grad: c.view(grad),
                m: c.view(m),
                v: c.view(v),
                master: masters.then(|| c.low_half(size)),
                step,
                norm,
                beta1: 0.9,
                beta2: 0.999,
                eps: 1e-8,
                weight_decay: 0.1 * stream as f32,
                stream,
                origin: None,
            });
            let (param, velocity) = (c.random(size, dtype), Some(c.random(size, state)));
            sgd.push(OpKind::Sgd {
                param: c.view(param),
                grad: c.view(grad),
                velocity: velocity.filter(|_| stream != 1).map(|t| c.view(t)),
                master: masters.then(|| c.low_half(size)),
                step,
                norm,
                momentum: 0.9,
                weight_decay: 0.01,
                stream,
                origin: None,
            });
        }
        kinds.push(OpKind::GradNorm { grads, norm, max_norm: Some(1.0) });
        kinds.extend(adamw);
        kinds.extend(sgd);
        // Rounded stochastically, each with random bits of its own: last bits differ.
        let limit = |rounded: bool| if rounded { 8e-3 } else { 1e-6 };
        let what = format!("grad_norm, adamw, sgd {dtype} state {state}");
        if !masters {
            let limit = limit(dtype == Bf16 || state == Bf16);
            c.compare(report, &what, limit, &kinds);
            continue;
        }
        let errors = c.errors(&kinds);
        let is_master =
            |t| kinds.iter().any(|k| k.update_operands().is_some_and(|u| u.0.tensor == t));
        let (weights, others): (Vec<_>, Vec<_>) =
            errors.into_iter().partition(|(t, _)| is_master(*t));
        c.judge(report, &format!("{what}: masters"), limit(false), &weights);
        c.judge(report, &format!("{what} beside masters"), limit(state == Bf16), &others);
    }
}

/// What several ranks need on each of them: conversions, the norm of a share of the
/// gradients, and updates of the first rank's part of what is divided.
fn shares(report: &mut Report, dtype: DType) {
    for (other, elements) in [(F32, 5000), (Bf16, 4096), (F32, 77)] {
        for accumulate in [false, true] {
            let mut c = Case::default();
            let x = c.random(&[1, elements], dtype);
            let out = c.sum(&[1, elements], other, accumulate);
            let what = format!("convert {dtype} to {other} {elements} add {accumulate}");
            c.compare(report, &what, limit(other), &[OpKind::Convert { x, out, accumulate }]);
        }
    }
    for masters in [false, true].into_iter().filter(|masters| !masters || dtype == Bf16) {
        share_of_updates(report, dtype, masters);
    }
}

fn share_of_updates(report: &mut Report, dtype: DType, masters: bool) {
    let mut c = Case::default();
    let (step, norm, squares) = (c.step(), c.out(&[2], F32), c.out(&[1, 1], F32));
    let (mut grads, mut kinds) = (Vec::new(), Vec::new());
    for (stream, rows) in [8usize, 64].into_iter().enumerate() {
        let part = rows * 64;
        let (param, grad) = (c.random(&[rows, 128], dtype), c.random(&[rows, 128], dtype));
        let (m, v) =
            (c.random(&[rows, 128], F32), c.tensor(&[rows, 128], F32, vec![0.3; 2 * part]));
        let low = c.low_half(&[rows, 128]).tensor;
        for tensor in [param, grad, m, v, low] {
            c.program.tensors[tensor.index()].shard = Shard::Padded { ranks: 2, part };
        }
        grads.push(grad);
        kinds.push(OpKind::AdamW {
            param: c.view(param),
            grad: c.view(grad),
            m: c.view(m),
            v: c.view(v),
            master: masters.then(|| c.view(low)),
            step,
            norm: Some(norm),
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.1,
            stream: stream as u32,
            origin: None,
        });
    }
    grads.push(c.random(&[100], dtype));
    let mut all = vec![
        OpKind::GradSquares { grads, squares },
        OpKind::ClipFactor { squares, norm, max_norm: Some(1.0) },
    ];
    all.extend(kinds);
    let limit = if dtype == Bf16 && !masters { 8e-3 } else { 1e-6 };
    let what = format!("a rank's share: norm, adamw {dtype} masters {masters}");
    c.compare(report, &what, limit, &all);
}

/// What adapters need: products added in place to some columns, and dropout.
fn adapters(report: &mut Report, dtype: DType) {
    for (m, n, k, rank) in [(96, 256, 128, 16), (50, 60, 40, 3)] {
        let mut c = Case::default();
        let (low, b) = (c.random(&[m, 2 * rank], dtype), c.random(&[n, rank], dtype));
        let y = c.random(&[m, n + k], dtype);
        let d_low = c.random(&[m, 2 * rank], dtype);
        let part = c.view(y).cols_at(k, n);
        let add = OpKind::Linear {
            x: c.view(low).cols_at(rank, rank),
            w: c.view(b),
            bias: None,
            add: Some(part),
            y: part,
            scale: 1.0,
        };
        let input = OpKind::LinearBackwardInput {
            d_y: part,
            w: c.view(b),
            d_x: c.view(d_low).cols_at(0, rank),
            accumulate: false,
            scale: 2.0,
        };
        let d_b = c.out(&[n, rank], dtype);
        let weight = OpKind::LinearBackwardWeight {
            d_y: part,
            x: c.view(low).cols_at(rank, rank),
            d_w: c.view(d_b),
            accumulate: false,
        };
        let what = format!("adapter {dtype} {m}x{n} rank {rank}");
        c.compare(report, &what, limit(dtype), &[add, input, weight]);
        for accumulate in [false, true] {
            let mut c = Case::default();
            let (x, out) = (c.random(&[m, n], dtype), c.sum(&[m, n], dtype, accumulate));
            let step = c.step();
            let kind = OpKind::Dropout { x, out, step, probability: 0.3, stream: 5, accumulate };
            let what = format!("dropout {dtype} {m}x{n} add {accumulate}");
            c.compare(report, &what, limit(dtype), &[kind]);
        }
    }
}

/// A matrix in four bits of several parts, with random codes and scales.
pub(super) fn quantized(
    c: &mut Case,
    codebook: Codebook,
    nested: bool,
    rows: &[usize],
    cols: usize,
) -> QuantizedMatrix {
    let mut parts = Vec::new();
    for (seed, &rows) in (41..).step_by(7).zip(rows) {
        let n: usize = rows * cols;
        let blocks = n.div_ceil(64);
        let codes = integers(seed, n.div_ceil(2), 256);
        let codes = c.tensor(&[n.div_ceil(2)], U8, codes);
        let scales: Vec<f32> = random(seed + 1, blocks, 0.1).iter().map(|x| x.abs()).collect();
        let absmax = if nested {
            let codes = integers(seed + 2, blocks, 256);
            c.tensor(&[blocks], U8, codes)
        } else {
            c.tensor(&[blocks], F32, scales.clone())
        };
        let groups = blocks.div_ceil(256);
        let nested = nested.then(|| Nested {
            absmax: c.tensor(&[groups], F32, scales[..groups].to_vec()),
            offset: c.tensor(&[1], F32, vec![0.07]),
        });
        parts.push(QuantizedPart { rows, codes, absmax, nested });
    }
    QuantizedMatrix { codebook, parts, rows: rows.iter().sum(), cols }
}

/// Matrices in four bits, of several parts, multiplied out: equal to the bit.
fn four_bits(report: &mut Report, dtype: DType) {
    for codebook in [Codebook::Nf4, Codebook::Fp4] {
        for (nested, cols) in [(false, 128), (true, 128), (true, 100), (true, 4096)] {
            let mut c = Case::default();
            let w = quantized(&mut c, codebook, nested, &[40, 24, 9], cols);
            let rows = w.rows;
            let out = c.out(&[rows, cols], dtype);
            let what = format!("dequantize {codebook:?} {dtype} nested {nested} {rows}x{cols}");
            c.compare(report, &what, 0.0, &[OpKind::Dequantize { w, out }]);
        }
    }
}

/// 8-bit AdamW: codes and scales to the bit, over gradients of many magnitudes with
/// blocks of zeros, from a state that has some.
fn updates_8bit(report: &mut Report, dtype: DType) {
    let sizes = [[64, 300], [1, 17], [333, 1000], [1, 64], [16, 256]];
    let cases = [(false, false), (true, false), (true, true)];
    for (clip, masters) in cases.into_iter().filter(|(_, masters)| !masters || dtype == Bf16) {
        let mut c = Case::default();
        let step = c.step();
        let norm = c.tensor(&[2], F32, vec![2.0, 0.5]);
        let mut kinds = Vec::new();
        for (stream, size) in sizes.iter().enumerate() {
            let n = size[0] * size[1];
            let param = c.random(size, dtype);
            let mut values: Vec<f32> = random(31, n, 1.0).iter().map(|x| x * x * x).collect();
            values.chunks_mut(256).step_by(3).for_each(|block| block.fill(0.0));
            values[n / 2] = f32::INFINITY;
            let grad = c.tensor(size, dtype, values);
            let (m, v) = (integers(32, n, 256), integers(33, n, 256));
            let (m, v) = (c.tensor(size, U8, m), c.tensor(size, U8, v));
            let blocks = n.div_ceil(256);
            let mut scales = random(34, blocks, 1e-2);
            scales.iter_mut().step_by(2).for_each(|s| *s = 0.0);
            let scales: Vec<f32> = scales.iter().map(|s| s.abs()).collect();
            let m_absmax = c.tensor(&[blocks], F32, scales.clone());
            let v_absmax = c.tensor(&[blocks], F32, scales);
            kinds.push(OpKind::AdamW8bit {
                param: c.view(param),
                grad: c.view(grad),
                m: c.view(m),
                v: c.view(v),
                m_absmax: c.view(m_absmax),
                v_absmax: c.view(v_absmax),
                master: masters.then(|| c.low_half(size)),
                step,
                norm: clip.then_some(norm),
                beta1: 0.9,
                beta2: 0.999,
                eps: 1e-8,
                weight_decay: 0.1 * stream as f32,
                stream: stream as u32,
                origin: None,
            });
        }
        let what = format!("adamw8bit {dtype} clip {clip} masters {masters}");
        let errors = c.errors(&kinds);
        for kind in &kinds {
            let OpKind::AdamW8bit { param, m, v, m_absmax, v_absmax, .. } = kind else {
                unreachable!("made above")
            };
            let of =
                |view: &View| errors.iter().find(|(t, _)| *t == view.tensor).expect("written").1;
            for (part, tensor) in
                [("m", m), ("v", v), ("scale of m", m_absmax), ("scale of v", v_absmax)]
            {
                report.error(&format!("{what}: {part}"), of(tensor), 0.0);
            }
            let limit = if dtype == Bf16 && !masters { 8e-3 } else { 1e-6 };
            println!("{:9.2e}  {what}", of(param));
            report.error(&what, of(param), limit);
        }
    }
}

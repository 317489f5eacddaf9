//! Runs a program at its layout on the CPU.
//!
//! [`CpuDevice::run`] is a list of calls: one op, one kernel. Tensors are
//! ranges of the slab; the checks of `Program::verify` and `Layout::verify`
//! are what makes handing them out as slices sound.

use std::time::Instant;

use half::bf16;
use plimsoll_arch::DType;
use plimsoll_comm::{CommError, Communicator};
use plimsoll_plan::{Device, DeviceError, LaunchTime, Layout, SlabSizes};
use plimsoll_program::{
    AttentionShape, Codebook, Home, Op, OpKind, Program, QuantizedPart, Shard, StepScalars, Target,
    TensorId, View,
};
use plimsoll_quant::{AdamW8bit, DynamicMap, STATE_BLOCK, State8bit};

use crate::kernels::{self, Elem, Mat, QuantizedSlice, Scales};
use crate::pool::Pool;
use crate::slab::Slab;

/// Scratch memory of the kernels, a function of shapes and threads alone.
pub struct CpuTarget {
    pub threads: usize,
}

/// Slabs in main memory and the threads that work on them.
pub struct CpuDevice {
    slabs: Slabs,
    sizes: SlabSizes,
    pool: Pool,
    /// The other ranks; none for one alone.
    group: Option<Box<dyn Communicator>>,
}

/// The memory of both homes: here they are alike.
pub(crate) struct Slabs {
    pub device: Slab,
    pub host: Slab,
}

impl Slabs {
    fn of(&self, home: Home) -> &Slab {
        match home {
            Home::Device => &self.device,
            Home::Host => &self.host,
        }
    }
}

impl CpuDevice {
    /// Starts the threads, then reserves the slabs.
    ///
    /// # Errors
    /// The system refuses threads or memory.
    pub fn new(sizes: impl Into<SlabSizes>, threads: usize) -> Result<CpuDevice, DeviceError> {
        let sizes = sizes.into();
        let pool = Pool::new(threads).map_err(|cause| DeviceError::Source(Box::new(cause)))?;
        let slabs =
            Slabs { device: Slab::reserve(sizes.device)?, host: Slab::reserve(sizes.host)? };
        Ok(CpuDevice { slabs, sizes, pool, group: None })
    }

    /// As [`CpuDevice::new`], for one rank of a group.
    ///
    /// # Errors
    /// The system refuses threads or memory.
    pub fn in_group(
        sizes: impl Into<SlabSizes>,
        threads: usize,
        group: Box<dyn Communicator>,
    ) -> Result<CpuDevice, DeviceError> {
        Ok(CpuDevice { group: Some(group), ..CpuDevice::new(sizes, threads)? })
    }

    pub fn threads(&self) -> usize {
        self.pool.threads()
    }
}

impl Device for CpuDevice {
    fn slabs(&self) -> SlabSizes {
        self.sizes
    }

    fn upload(
        &mut self,
        home: Home,
        offset: u64,
        len: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        // SAFETY: `&mut self` excludes a running program.
        fill(unsafe { self.slabs.of(home).slice(offset, len) })
    }

    fn download(
        &mut self,
        home: Home,
        offset: u64,
        len: usize,
        read: &mut dyn FnMut(&[u8]) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        // SAFETY: as above.
        read(unsafe { self.slabs.of(home).slice(offset, len) })
    }

    fn rank(&self) -> usize {
        self.group.as_ref().map_or(0, |g| g.rank())
    }

    fn group(&mut self) -> Option<&mut dyn Communicator> {
        match &mut self.group {
            Some(group) => Some(&mut **group),
            None => None,
        }
    }

    fn run(
        &mut self,
        program: &Program,
        layout: &Layout,
        section: usize,
    ) -> Result<(), DeviceError> {
        let (memory, group) = memory(&self.slabs, program, layout, &mut self.group);
        let ops = program.sections[section].ops.clone();
        self.pool.install(|| {
            for op in &program.ops[ops] {
                memory.run_in(op, group)?;
            }
            Ok(())
        })
    }

    fn profile(
        &mut self,
        program: &Program,
        layout: &Layout,
        section: usize,
    ) -> Result<Vec<LaunchTime>, DeviceError> {
        let (memory, group) = memory(&self.slabs, program, layout, &mut self.group);
        let ops = program.sections[section].ops.clone();
        self.pool.install(|| {
            let time = |at: usize| {
                let started = Instant::now();
                memory.run_in(&program.ops[at], group)?;
                Ok(LaunchTime { ops: at..at + 1, seconds: started.elapsed().as_secs_f64() })
            };
            ops.map(time).collect()
        })
    }
}

fn memory<'a, 'g>(
    slabs: &'a Slabs,
    program: &'a Program,
    layout: &'a Layout,
    group: &'g mut Option<Box<dyn Communicator>>,
) -> (Memory<'a>, &'g mut Option<Box<dyn Communicator>>) {
    let rank = group.as_ref().map_or(0, |g| g.rank());
    (Memory { slabs, program, layout, rank }, group)
}

/// The tensors of one program, as slices of the slabs.
pub(crate) struct Memory<'a> {
    pub slabs: &'a Slabs,
    pub program: &'a Program,
    pub layout: &'a Layout,
    pub rank: usize,
}

/// Calls `$body` with `$E` as the element type of the tensor.
macro_rules! with_elem {
    ($dtype:expr, $E:ident, $body:expr) => {
        match $dtype {
            DType::Bf16 => {
                type $E = bf16;
                $body
            }
            _ => {
                type $E = f32;
                $body
            }
        }
    };
}

impl<'a> Memory<'a> {
    /// All elements of a tensor.
    ///
    /// Programs are verified: no op reads what it writes except in place, and
    /// the layout never gives two live tensors the same byte.
    fn all<T: bytemuck::Pod>(&self, tensor: TensorId) -> &'a mut [T] {
        let t = self.program.tensor(tensor);
        debug_assert_eq!(size_of::<T>(), t.dtype.bytes(), "{}", t.name);
        let (slab, elements) = (self.slabs.of(t.home), t.held(self.rank).len());
        // SAFETY: see above; one op runs at a time.
        unsafe { slab.slice(self.layout.offset(tensor), elements) }
    }

    /// The elements of a tensor that this rank answers for.
    fn part<T: bytemuck::Pod>(&self, tensor: TensorId) -> &'a mut [T] {
        let t = self.program.tensor(tensor);
        match t.shard {
            Shard::Padded { .. } => &mut self.all::<T>(tensor)[t.part(self.rank)],
            Shard::Whole | Shard::Part { .. } => self.all::<T>(tensor),
        }
    }

    /// An operand of an update: of what is divided over the ranks, this one's part or a
    /// piece of it.
    fn updated<T: bytemuck::Pod>(&self, view: &View) -> &'a mut [T] {
        let elements = self.program.tensor(view.tensor).updated(view, self.rank);
        &mut self.part(view.tensor)[elements]
    }

    /// All bytes of a tensor, padding included.
    fn bytes(&self, tensor: TensorId) -> &'a mut [u8] {
        let t = self.program.tensor(tensor);
        // SAFETY: as for `all`.
        unsafe { self.slabs.of(t.home).slice(self.layout.offset(tensor), t.bytes() as usize) }
    }

    /// The elements from the first to the last of a view.
    fn view<T: bytemuck::Pod>(&self, view: &View) -> &'a mut [T] {
        let len = (view.rows - 1) * view.stride + view.cols;
        &mut self.all::<T>(view.tensor)[view.first()..view.first() + len]
    }

    fn matrix<T: bytemuck::Pod + Elem>(&self, view: &View) -> Mat<'a, T> {
        Mat::strided(self.view::<T>(view), view.rows, view.cols, view.stride, 1)
    }

    fn dtype(&self, tensor: TensorId) -> DType {
        self.program.tensor(tensor).dtype
    }

    fn cols(&self, tensor: TensorId) -> usize {
        self.program.tensor(tensor).cols()
    }

    fn scalars(&self, step: TensorId) -> StepScalars {
        StepScalars::from_words(self.all::<f32>(step))
    }

    /// Second word of a gradient norm: what every gradient is multiplied with.
    fn clip(&self, norm: Option<TensorId>) -> f32 {
        norm.map_or(1.0, |n| self.all::<f32>(n)[1])
    }

    pub(crate) fn run(&self, op: &Op) {
        let ws: &mut [f32] = match op.workspace {
            Some(w) => bytemuck::cast_slice_mut(self.all::<u8>(w)),
            None => &mut [],
        };
        let subject = op.kind.subject().expect("every op writes something");
        match &op.kind {
            // The optimizer has types of its own for its state.
            OpKind::AdamW { param, .. }
            | OpKind::AdamW8bit { param, .. }
            | OpKind::Sgd { param, .. } => {
                with_elem!(self.dtype(param.tensor), E, self.update::<E>(&op.kind));
            }
            // Logits are float32 whatever the weights are.
            OpKind::Linear { w, y, .. } => {
                let types = (self.dtype(w.tensor), self.dtype(y.tensor));
                match types {
                    (DType::Bf16, DType::Bf16) => self.linear::<bf16, bf16>(&op.kind, ws),
                    (DType::Bf16, _) => self.linear::<bf16, f32>(&op.kind, ws),
                    _ => self.linear::<f32, f32>(&op.kind, ws),
                }
            }
            OpKind::LinearQuantized { x, y, .. } => {
                let types = (self.dtype(x.tensor), self.dtype(y.tensor));
                match types {
                    (DType::Bf16, DType::Bf16) => self.linear_quantized::<bf16, bf16>(&op.kind, ws),
                    (DType::Bf16, _) => self.linear_quantized::<bf16, f32>(&op.kind, ws),
                    _ => self.linear_quantized::<f32, f32>(&op.kind, ws),
                }
            }
            OpKind::GradNorm { grads, norm, max_norm } => {
                self.clip_factor(self.squares(grads), *norm, *max_norm);
            }
            OpKind::GradSquares { grads, squares } => {
                let whole = |g: &TensorId| self.program.tensor(*g).shard == Shard::Whole;
                // What every rank has alike is counted once.
                let counted = grads.iter().filter(|g| self.rank == 0 || !whole(g));
                self.all::<f32>(*squares)[0] = self.squares(counted) as f32;
            }
            OpKind::ClipFactor { squares, norm, max_norm } => {
                let total = f64::from(self.all::<f32>(*squares)[0]);
                self.clip_factor(total, *norm, *max_norm);
            }
            OpKind::Convert { x, out, accumulate } => {
                with_elem!(self.dtype(*x), X, {
                    with_elem!(self.dtype(*out), Y, self.convert::<X, Y>(*x, *out, *accumulate));
                });
            }
            OpKind::SumLosses { losses, step, total, accumulate } => {
                let sum: f64 = self.all::<f32>(*losses).iter().map(|x| f64::from(*x)).sum();
                let total = &mut self.all::<f32>(*total)[0];
                let scaled = (sum * f64::from(self.scalars(*step).loss_scale)) as f32;
                *total = if *accumulate { *total + scaled } else { scaled };
            }
            OpKind::Argmax { x, out } => {
                let rows = self.all::<f32>(*x).chunks_exact(self.cols(*x));
                for (out, row) in self.all::<i32>(*out).iter_mut().zip(rows) {
                    *out = kernels::argmax(row);
                }
            }
            OpKind::ToDevice { from, to } | OpKind::ToHost { from, to } => self.copy(from, to),
            OpKind::CrossEntropy { logits, .. } => {
                with_elem!(self.dtype(*logits), E, self.model_op::<E>(&op.kind, ws));
            }
            kind => with_elem!(self.dtype(subject), E, self.model_op::<E>(kind, ws)),
        }
    }
}

impl Memory<'_> {
    /// y, holding what a product is added to.
    fn sum<Y: Elem + bytemuck::Pod>(&self, y: &View, add: Option<&View>) -> &mut [Y] {
        let out = self.view::<Y>(y);
        if let Some(add) = add.filter(|add| *add != y) {
            copy_rows(self.view::<Y>(add), add.stride, out, y);
        }
        out
    }

    /// y = x w^T, on its own or onto `add`.
    fn linear<E: Elem + bytemuck::Pod, Y: Elem + bytemuck::Pod>(
        &self,
        op: &OpKind,
        ws: &mut [f32],
    ) {
        let OpKind::Linear { x, w, bias, add, y, scale } = op else {
            unreachable!("called for Linear")
        };
        let out = self.sum::<Y>(y, add.as_ref());
        let bias = bias.map(|b| &*self.all::<E>(b));
        let dense = x.stride == x.cols && w.stride == w.cols && y.stride == y.cols;
        if y.rows <= kernels::SKINNY_ROWS && dense {
            let sizes = (y.rows, y.cols, x.cols);
            let (x, w) = (self.view::<E>(x), self.view::<E>(w));
            kernels::linear_skinny(x, w, bias, out, sizes, add.is_some(), ws);
        } else {
            let (x, w) = (self.matrix::<E>(x), self.matrix::<E>(w));
            kernels::gemm(x, w.t(), out, y.stride, bias, add.is_some(), ws);
        }
        self.multiply::<Y>(y, *scale);
    }

    /// y = x w^T with w in four bits, on its own or onto `add`.
    fn linear_quantized<E: Elem + bytemuck::Pod, Y: Elem + bytemuck::Pod>(
        &self,
        op: &OpKind,
        ws: &mut [f32],
    ) {
        let OpKind::LinearQuantized { x, w, bias, add, y } = op else {
            unreachable!("called for LinearQuantized")
        };
        let out = self.sum::<Y>(y, add.as_ref());
        let bias = bias.map(|b| &*self.all::<E>(b));
        let part = |part: &QuantizedPart| (self.quantized(w.codebook, part), part.rows);
        let mut parts = [part(&w.parts[0]); kernels::MAX_PARTS];
        for (slice, quantized) in parts.iter_mut().zip(&w.parts) {
            *slice = part(quantized);
        }
        let (x_stride, x) = (x.stride, self.view::<E>(x));
        kernels::linear_quantized(
            (x, x_stride),
            &parts[..w.parts.len()],
            bias,
            (out, y.stride),
            (y.rows, y.cols, w.cols),
            add.is_some(),
            ws,
        );
    }

    /// y = factor y, for the small products whose result is scaled.
    fn multiply<Y: Elem + bytemuck::Pod>(&self, y: &View, factor: f32) {
        if factor == 1.0 {
            return;
        }
        for row in self.view::<Y>(y).chunks_mut(y.stride) {
            for x in &mut row[..y.cols] {
                *x = Y::from_f32(x.to_f32() * factor);
            }
        }
    }

    /// Everything whose operands all have the type of the weights.
    fn model_op<E: Elem + bytemuck::Pod>(&self, op: &OpKind, ws: &mut [f32]) {
        match op {
            OpKind::Embed { ids, table, out } => {
                let c = self.cols(*table);
                kernels::embed(self.all(*ids), self.all::<E>(*table), self.all::<E>(*out), c);
            }
            OpKind::EmbedBackward { ids, d_x, d_table, accumulate } => {
                let (d_x, c) = (self.all::<E>(*d_x), self.cols(*d_table));
                kernels::embed_backward(
                    self.all(*ids),
                    d_x,
                    self.all::<E>(*d_table),
                    c,
                    !accumulate,
                );
            }
            OpKind::RmsNorm { x, weight, out, rstd, eps } => {
                let (x, weight) = (self.all::<E>(*x), self.all::<E>(*weight));
                kernels::rms_norm_forward(x, weight, self.all::<E>(*out), self.all(*rstd), *eps);
            }
            OpKind::RmsNormBackward {
                d_out,
                x,
                weight,
                rstd,
                d_x,
                overwrite,
                d_weight,
                accumulate,
            } => kernels::rms_norm_backward(
                self.all::<E>(*d_out),
                self.all::<E>(*x),
                self.all::<E>(*weight),
                self.all(*rstd),
                self.all::<E>(*d_x),
                !overwrite,
                d_weight.map(|d_weight| self.all::<E>(d_weight)),
                *accumulate,
                ws,
            ),
            OpKind::LinearBackwardInput { d_y, w, d_x, accumulate, scale } => {
                let (d_y, w) = (self.matrix::<E>(d_y), self.matrix::<E>(w));
                kernels::gemm(d_y, w, self.view::<E>(d_x), d_x.stride, None, *accumulate, ws);
                self.multiply::<E>(d_x, *scale);
            }
            OpKind::Dequantize { w, out } => {
                let mut out = self.all::<E>(*out);
                for part in &w.parts {
                    let (now, rest) = out.split_at_mut(part.rows * w.cols);
                    kernels::dequantize(&self.quantized(w.codebook, part), now);
                    out = rest;
                }
            }
            OpKind::Dropout { x, out, step, probability, stream, accumulate } => {
                let seed = self.scalars(*step).seed;
                let mask = kernels::Dropout::new(seed, *stream, *probability);
                mask.apply(self.all::<E>(*x), self.all::<E>(*out), *accumulate);
            }
            OpKind::LinearBackwardWeight { d_y, x, d_w, accumulate } => {
                let (d_y, x) = (self.matrix::<E>(d_y), self.matrix::<E>(x));
                kernels::gemm(d_y.t(), x, self.view::<E>(d_w), d_w.stride, None, *accumulate, ws);
            }
            OpKind::BiasBackward { d_y, d_bias, accumulate } => {
                kernels::bias_backward(
                    self.all::<E>(*d_y),
                    self.all::<E>(*d_bias),
                    *accumulate,
                    ws,
                );
            }
            OpKind::HeadNorm { qkv_raw, q_weight, k_weight, qkv, rstd, shape, eps } => {
                kernels::head_norm_forward(
                    self.all::<E>(*qkv_raw),
                    self.all::<E>(*q_weight),
                    self.all::<E>(*k_weight),
                    self.all::<E>(*qkv),
                    self.all(*rstd),
                    (shape.heads, shape.kv_heads, shape.head_dim),
                    *eps,
                );
            }
            OpKind::HeadNormBackward {
                d_qkv,
                qkv_raw,
                q_weight,
                k_weight,
                rstd,
                d_q_weight,
                d_k_weight,
                shape,
                accumulate,
            } => kernels::head_norm_backward(
                self.all::<E>(*d_qkv),
                self.all::<E>(*qkv_raw),
                self.all::<E>(*q_weight),
                self.all::<E>(*k_weight),
                self.all(*rstd),
                d_q_weight.map(|d_weight| self.all::<E>(d_weight)),
                d_k_weight.map(|d_weight| self.all::<E>(d_weight)),
                *accumulate,
                (shape.heads, shape.kv_heads, shape.head_dim),
                ws,
            ),
            OpKind::Rope { qkv, positions, table, shape, inverse } => {
                let heads = (shape.heads, shape.kv_heads, shape.head_dim);
                let (positions, table) = (self.all(*positions), self.all(*table));
                kernels::rope(self.all::<E>(*qkv), positions, table, heads, *inverse);
            }
            OpKind::Attention { qkv, doc_start, out, lse, shape } => kernels::attention_forward(
                self.all::<E>(*qkv),
                self.all::<E>(*out),
                self.all(*lse),
                self.all(*doc_start),
                &heads(shape),
                ws,
            ),
            OpKind::AttentionBackward { qkv, doc_start, out, lse, d_out, d_qkv, shape } => {
                kernels::attention_backward(
                    self.all::<E>(*qkv),
                    self.all::<E>(*out),
                    self.all::<E>(*d_out),
                    self.all(*lse),
                    self.all(*doc_start),
                    self.all::<E>(*d_qkv),
                    &heads(shape),
                    ws,
                );
            }
            OpKind::AttentionCached { qkv, start, k_cache, v_cache, out, shape, .. } => {
                kernels::attention_cached(
                    self.all::<E>(*qkv),
                    self.all::<E>(*k_cache),
                    self.all::<E>(*v_cache),
                    self.all(*start),
                    self.all::<E>(*out),
                    &heads(shape),
                    ws,
                );
            }
            OpKind::SwiGlu { gate_up, act } => {
                let i = self.cols(*act);
                kernels::swiglu_forward(self.all::<E>(*gate_up), self.all::<E>(*act), i);
            }
            OpKind::SwiGluBackward { gate_up, d_act } => {
                let i = self.cols(*d_act);
                kernels::swiglu_backward_in_place(
                    self.all::<E>(*gate_up),
                    self.all::<E>(*d_act),
                    i,
                );
            }
            OpKind::CrossEntropy { logits, labels, losses, step, row, backward } => {
                let t = self.program.tensor(*logits);
                let (rows, vocab) = (t.rows(), t.cols());
                let labels = &self.all::<i32>(*labels)[*row..row + rows];
                let losses = &mut self.all::<f32>(*losses)[*row..row + rows];
                let logits = self.all::<E>(*logits);
                if *backward {
                    let scale = self.scalars(*step).loss_scale;
                    kernels::cross_entropy(logits, labels, losses, scale, vocab);
                } else {
                    kernels::cross_entropy_loss(logits, labels, losses, vocab);
                }
            }
            OpKind::GatherRows { x, rows, out } => {
                let (c, x) = (self.cols(*x), self.all::<E>(*x));
                let rows = self.all::<i32>(*rows);
                for (out, row) in self.all::<E>(*out).chunks_exact_mut(c).zip(rows) {
                    out.copy_from_slice(&x[*row as usize * c..][..c]);
                }
            }
            OpKind::AllGather { .. }
            | OpKind::ReduceScatter { .. }
            | OpKind::AllReduce { .. }
            | OpKind::Hold { .. }
            | OpKind::Convert { .. }
            | OpKind::GradSquares { .. }
            | OpKind::ClipFactor { .. }
            | OpKind::Linear { .. }
            | OpKind::LinearQuantized { .. }
            | OpKind::Argmax { .. }
            | OpKind::SumLosses { .. }
            | OpKind::GradNorm { .. }
            | OpKind::AdamW { .. }
            | OpKind::AdamW8bit { .. }
            | OpKind::Sgd { .. }
            | OpKind::ToDevice { .. }
            | OpKind::ToHost { .. } => unreachable!("handled by `run`"),
        }
    }

    fn quantized(&self, codebook: Codebook, part: &QuantizedPart) -> QuantizedSlice<'_> {
        let scales = match part.nested {
            None => Scales::Plain(self.all(part.absmax)),
            Some(nested) => Scales::Nested {
                codes: self.all(part.absmax),
                absmax: self.all(nested.absmax),
                offset: self.all::<f32>(nested.offset)[0],
                map: DynamicMap::signed().values(),
            },
        };
        QuantizedSlice { codebook: codebook.values(), codes: self.all(part.codes), scales }
    }

    /// to = from: bytes that lie together on both sides.
    fn copy(&self, from: &View, to: &View) {
        let bytes = |view: &View| {
            let t = self.program.tensor(view.tensor);
            let size = t.dtype.bytes();
            let at = self.layout.offset(view.tensor) + (t.begin(view, self.rank) * size) as u64;
            // SAFETY: as in `all`; source and target lie in different slabs.
            unsafe { self.slabs.of(t.home).slice::<u8>(at, view.elements() * size) }
        };
        bytes(to).copy_from_slice(bytes(from));
    }

    /// The sum of squares of the parts that this rank answers for.
    fn squares<'g>(&self, grads: impl IntoIterator<Item = &'g TensorId>) -> f64 {
        let of = |grad: &TensorId| {
            with_elem!(self.dtype(*grad), E, kernels::sum_of_squares(self.part::<E>(*grad)))
        };
        grads.into_iter().map(of).sum()
    }

    /// out = x [+ out], or of the parts of both where one is a part.
    fn convert<X: Elem + bytemuck::Pod, Y: Elem + bytemuck::Pod>(
        &self,
        x: TensorId,
        out: TensorId,
        accumulate: bool,
    ) {
        let parts = self.program.is_part(x) || self.program.is_part(out);
        let (x, out) = match parts {
            true => (self.part::<X>(x), self.part::<Y>(out)),
            false => (self.all::<X>(x), self.all::<Y>(out)),
        };
        if accumulate {
            kernels::add_assign(out, x);
        } else {
            kernels::convert(x, out);
        }
    }

    /// norm[0] = the global norm, norm[1] = the factor that clips to `max_norm`.
    fn clip_factor(&self, squares: f64, norm: TensorId, max_norm: Option<f32>) {
        let total = squares.sqrt();
        let norm = self.all::<f32>(norm);
        norm[0] = total as f32;
        // torch's `clip_grad_norm_` adds 1e-6 to the norm before it divides.
        norm[1] = max_norm.map_or(1.0, |max| (f64::from(max) / (total + 1e-6)).min(1.0)) as f32;
    }

    fn update<P: Elem + bytemuck::Pod>(&self, op: &OpKind) {
        let Some(place) = op.updated_parameter() else { unreachable!("called for optimizers") };
        // A piece of the last rank's part may be longer than what is left of it.
        let n = self.program.tensor(place.tensor).updated(&place, self.rank).len();
        match op {
            OpKind::AdamW {
                param,
                grad,
                m,
                v,
                master,
                step,
                norm,
                beta1,
                beta2,
                eps,
                weight_decay,
                stream,
                ..
            } => {
                let scalars = self.scalars(*step);
                let hyper = kernels::AdamW {
                    lr: scalars.learning_rate,
                    beta1: *beta1,
                    beta2: *beta2,
                    eps: *eps,
                    weight_decay: *weight_decay,
                    bias_correction1: scalars.bias_correction1,
                    bias_correction2: scalars.bias_correction2,
                    grad_scale: self.clip(*norm),
                };
                let rounding = self.rounding(&scalars, *stream, &place);
                let (p, g) = (self.updated::<P>(param), self.updated::<P>(grad));
                let (p, g) = (&mut p[..n], &g[..n]);
                with_elem!(self.dtype(m.tensor), S, {
                    let (m, v) = (self.updated::<S>(m), self.updated::<S>(v));
                    let (m, v) = (&mut m[..n], &mut v[..n]);
                    match master {
                        Some(master) => {
                            let (p, low) = self.masters(param, master, n);
                            kernels::adamw_masters(p, low, g, (m, v), &hyper, rounding);
                        }
                        None => kernels::adamw(p, g, m, v, &hyper, rounding),
                    }
                });
            }
            OpKind::AdamW8bit {
                param,
                grad,
                m,
                v,
                m_absmax,
                v_absmax,
                master,
                step,
                norm,
                beta1,
                beta2,
                eps,
                weight_decay,
                stream,
                ..
            } => {
                let scalars = self.scalars(*step);
                let hyper = AdamW8bit {
                    lr: scalars.learning_rate,
                    beta1: *beta1,
                    beta2: *beta2,
                    eps: *eps,
                    weight_decay: *weight_decay,
                    bias_correction1: scalars.bias_correction1,
                    bias_correction2: scalars.bias_correction2,
                    grad_scale: self.clip(*norm),
                };
                let (p, g) = (self.updated::<P>(param), self.updated::<P>(grad));
                let (p, g, blocks) = (&mut p[..n], &g[..n], n.div_ceil(STATE_BLOCK));
                let state = State8bit {
                    m: &mut self.updated(m)[..n],
                    v: &mut self.updated(v)[..n],
                    m_absmax: &mut self.updated(m_absmax)[..blocks],
                    v_absmax: &mut self.updated(v_absmax)[..blocks],
                };
                let rounding = self.rounding(&scalars, *stream, &place);
                match master {
                    Some(master) => {
                        let (p, low) = self.masters(param, master, n);
                        kernels::adamw8bit_masters(p, low, g, state, &hyper, rounding);
                    }
                    None => kernels::adamw8bit(p, g, state, &hyper, rounding),
                }
            }
            OpKind::Sgd {
                param,
                grad,
                velocity,
                master,
                step,
                norm,
                momentum,
                weight_decay,
                stream,
                ..
            } => {
                let scalars = self.scalars(*step);
                let rates = (scalars.learning_rate, *weight_decay, self.clip(*norm));
                let rounding = self.rounding(&scalars, *stream, &place);
                let (p, g) = (self.updated::<P>(param), self.updated::<P>(grad));
                let (p, g) = (&mut p[..n], &g[..n]);
                let dtype = velocity.map_or(DType::F32, |v| self.dtype(v.tensor));
                with_elem!(dtype, S, {
                    // A velocity starts at zero, so the first step needs no case of its own.
                    let state = |v: View| &mut self.updated::<S>(&v)[..n];
                    match master {
                        Some(master) => {
                            let velocity = velocity.map(|v| (state(v), *momentum));
                            let (p, low) = self.masters(param, master, n);
                            kernels::sgd_masters(p, low, g, velocity, rates, rounding);
                        }
                        None => {
                            let velocity = velocity.map(|v| (state(v), *momentum, false));
                            kernels::sgd(p, g, velocity, rates, rounding);
                        }
                    }
                });
            }
            _ => unreachable!("called for optimizers"),
        }
    }

    /// The first `n` elements of a bf16 parameter of an update, and the lower halves of
    /// their masters.
    fn masters(&self, param: &View, master: &View, n: usize) -> (&mut [bf16], &mut [i16]) {
        (&mut self.updated::<bf16>(param)[..n], &mut self.updated::<i16>(master)[..n])
    }

    /// Random bits of one parameter in one step: those of its elements, whichever
    /// rank updates them.
    fn rounding(&self, scalars: &StepScalars, stream: u32, param: &View) -> kernels::Rounding {
        let seed = scalars.seed ^ u64::from(stream).wrapping_mul(0xd1b5_4a32_d192_ed03);
        let t = self.program.tensor(param.tensor);
        let first = t.part(self.rank).start + t.updated(param, self.rank).start;
        kernels::Rounding::new(seed).starting_at(first)
    }

    /// Runs an op with the other ranks, or on its own.
    fn run_in(
        &self,
        op: &Op,
        group: &mut Option<Box<dyn Communicator>>,
    ) -> Result<(), DeviceError> {
        let ranks = |t: &TensorId| match self.program.tensor(*t).shard {
            Shard::Padded { ranks, .. } | Shard::Part { ranks, .. } => Some(ranks),
            Shard::Whole => None,
        };
        let tensors = match &op.kind {
            OpKind::AllGather { to: tensors, .. }
            | OpKind::ReduceScatter { from: tensors, .. }
            | OpKind::AllReduce { tensors } => tensors,
            OpKind::Hold { .. } => return Ok(()),
            _ => {
                self.run(op);
                return Ok(());
            }
        };
        let found = group.as_ref().map_or(1, |g| g.ranks());
        let ranks = tensors.iter().find_map(ranks).unwrap_or(found);
        match group {
            Some(group) if ranks == found => self
                .collective(&op.kind, &mut **group)
                .map_err(|e| DeviceError::Source(Box::new(e))),
            _ => Err(DeviceError::Ranks { ranks, found }),
        }
    }

    fn collective(&self, op: &OpKind, group: &mut dyn Communicator) -> Result<(), CommError> {
        // The part of a rank among all bytes of a tensor.
        let mine = |t: TensorId| {
            let t = self.program.tensor(t);
            let bytes = t.part_stored() * t.dtype.bytes();
            self.rank * bytes..(self.rank + 1) * bytes
        };
        match op {
            OpKind::AllGather { from, to } => {
                for (from, to) in from.iter().zip(to) {
                    if from != to {
                        self.bytes(*to)[mine(*to)].copy_from_slice(self.bytes(*from));
                    }
                    group.all_gather(self.bytes(*to))?;
                }
            }
            OpKind::ReduceScatter { from, to } => {
                for (from, to) in from.iter().zip(to) {
                    group.reduce_scatter(self.bytes(*from), self.dtype(*from))?;
                    if from != to {
                        self.bytes(*to).copy_from_slice(&self.bytes(*from)[mine(*from)]);
                    }
                }
            }
            OpKind::AllReduce { tensors } => {
                for t in tensors {
                    group.all_reduce(self.bytes(*t), self.dtype(*t))?;
                }
            }
            _ => unreachable!("called for collectives"),
        }
        Ok(())
    }
}

fn heads(shape: &AttentionShape) -> kernels::AttentionShape {
    kernels::AttentionShape {
        batch: shape.batch,
        tokens: shape.seq,
        heads: shape.heads,
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        window: shape.window,
        scale: shape.scale(),
    }
}

/// Copies the rows of a view into another of the same size.
fn copy_rows<T: Copy>(from: &[T], from_stride: usize, to: &mut [T], view: &View) {
    if from_stride == view.cols && view.stride == view.cols {
        to.copy_from_slice(from);
        return;
    }
    for (to, from) in to.chunks_mut(view.stride).zip(from.chunks(from_stride)) {
        to[..view.cols].copy_from_slice(&from[..view.cols]);
    }
}

impl Target for CpuTarget {
    fn workspace_bytes(&self, op: &OpKind, program: &Program) -> u64 {
        let t = |id: &TensorId| program.tensor(*id);
        let is_f32 = |v: &View| program.tensor(v.tensor).dtype == DType::F32;
        let product = |m, n, k, c: &View| kernels::gemm_workspace(m, n, k, is_f32(c));
        let floats = match op {
            OpKind::Linear { x, w, y, .. } => {
                let dense = x.stride == x.cols && w.stride == w.cols && y.stride == y.cols;
                if y.rows <= kernels::SKINNY_ROWS && dense {
                    kernels::linear_skinny_workspace(y.rows, x.cols)
                } else {
                    product(y.rows, y.cols, x.cols, y)
                }
            }
            OpKind::LinearQuantized { x, .. } => {
                kernels::linear_quantized_workspace(x.rows, x.cols)
            }
            OpKind::LinearBackwardInput { d_y, d_x, .. } => {
                product(d_x.rows, d_x.cols, d_y.cols, d_x)
            }
            OpKind::LinearBackwardWeight { d_y, x, d_w, .. } => {
                product(d_y.cols, x.cols, x.rows, d_w)
            }
            OpKind::BiasBackward { d_y, d_bias, .. } => {
                kernels::bias_backward_workspace(t(d_y).rows(), t(d_bias).elements())
            }
            OpKind::RmsNormBackward { x, .. } => {
                kernels::rms_norm_backward_workspace(t(x).rows(), t(x).cols())
            }
            OpKind::HeadNormBackward { d_qkv, shape, .. } => {
                kernels::head_norm_backward_workspace(t(d_qkv).rows(), shape.head_dim)
            }
            OpKind::Attention { shape, .. } => {
                kernels::attention_forward_workspace(&heads(shape), self.threads)
            }
            OpKind::AttentionBackward { shape, .. } => {
                kernels::attention_backward_workspace(&heads(shape), self.threads)
            }
            OpKind::AttentionCached { shape, capacity, .. } => {
                kernels::attention_cached_workspace(&heads(shape), *capacity, self.threads)
            }
            _ => 0,
        };
        (floats * size_of::<f32>()) as u64
    }
}

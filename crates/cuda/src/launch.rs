//! One op, one or a few launches: the counterpart of `plimsoll_cpu`'s list of calls.

use cudarc::driver::sys;
use plimsoll_arch::DType;
use plimsoll_plan::Layout;
use plimsoll_program::{Access, Class, Home, Lane, Op, OpKind, Program, Shard, TensorId, View};

use crate::collectives::Link;
use crate::driver::{Context, cuda};
use crate::error::CudaError;
use crate::kernels::{Arg, Grid, Kernels, suffix, width};
use crate::products::{Operands, Product, Products};
use crate::target::{ARGMAX_SPANS, PRODUCT_WORKSPACE, bias_spans, head_norm_blocks, norm_blocks};
use crate::updates::HostCalls;
use crate::{attention, collectives, decode, optimizer, optimizer8bit, quantized};

/// Puts the ops of one program on a stream.
pub(crate) struct Launcher<'a> {
    pub context: &'a Context,
    pub kernels: &'a Kernels,
    pub products: &'a Products,
    /// The compute lane's.
    pub stream: sys::CUstream,
    /// By lane.
    pub lanes: [sys::CUstream; Lane::ALL.len()],
    pub program: &'a Program,
    pub layout: &'a Layout,
    /// Addresses of the slabs.
    pub slab: u64,
    pub host: u64,
    pub rank: usize,
    /// What runs on the host; none where nothing of the section does.
    pub calls: Option<&'a HostCalls>,
    /// What leads to the other ranks; none for one alone.
    pub link: Option<&'a Link>,
    /// The op in hand, for messages.
    pub current: std::cell::Cell<usize>,
}

fn int(n: usize) -> Arg {
    Arg::Int(n as i32)
}

fn flag(on: bool) -> Arg {
    Arg::Int(i32::from(on))
}

/// Suffix and threads of a norm over rows of `c`: as many 16-byte pieces a thread
/// as 256 threads need, or the kernel for any row.
fn norm_variant(c: usize, dtype: DType) -> (String, u32) {
    let n = width(dtype);
    let pieces = c.div_ceil(256 * n).next_power_of_two();
    if !c.is_multiple_of(n) || pieces > 4 {
        return (format!("{}_wide", suffix(dtype)), 256);
    }
    let threads = c.div_ceil(n * pieces).next_multiple_of(32);
    (format!("{}_p{pieces}", suffix(dtype)), threads as u32)
}

impl Launcher<'_> {
    /// Address of a tensor.
    pub fn at(&self, tensor: TensorId) -> u64 {
        let slab = match self.program.tensor(tensor).home {
            Home::Device => self.slab,
            Home::Host => self.host,
        };
        slab + self.layout.offset(tensor)
    }

    /// Address of the part of a tensor that this rank answers for.
    pub fn part(&self, tensor: TensorId) -> u64 {
        let t = self.program.tensor(tensor);
        match t.shard {
            Shard::Padded { part, .. } => {
                self.at(tensor) + (self.rank * part * t.dtype.bytes()) as u64
            }
            Shard::Whole | Shard::Part { .. } => self.at(tensor),
        }
    }

    /// An operand of an update, its elements, and the place of the first of them in the
    /// whole tensor: of what is divided over the ranks, this one's part or a piece of it.
    pub fn updated(&self, view: &View) -> (u64, usize, usize) {
        let t = self.program.tensor(view.tensor);
        let elements = t.updated(view, self.rank);
        let address = self.part(view.tensor) + (elements.start * t.dtype.bytes()) as u64;
        (address, elements.len(), t.part(self.rank).start + elements.start)
    }

    pub fn dtype(&self, tensor: TensorId) -> DType {
        self.program.tensor(tensor).dtype
    }

    pub fn op_name(&self) -> String {
        self.program.op_name(self.current.get())
    }

    fn rows(&self, tensor: TensorId) -> usize {
        self.program.tensor(tensor).rows()
    }

    fn cols(&self, tensor: TensorId) -> usize {
        self.program.tensor(tensor).cols()
    }

    fn ptr(&self, tensor: TensorId) -> Arg {
        Arg::Ptr(self.at(tensor))
    }

    pub fn view(&self, view: &View) -> u64 {
        let t = self.program.tensor(view.tensor);
        self.at(view.tensor) + (t.begin(view, self.rank) * t.dtype.bytes()) as u64
    }

    fn bytes(&self, view: &View) -> usize {
        view.elements() * self.dtype(view.tensor).bytes()
    }

    /// `_bf16_v8` where all these row lengths are whole vectors, else `_bf16_v1`.
    fn vectors(&self, dtype: DType, lengths: &[usize]) -> (String, usize) {
        let wide = lengths.iter().all(|n| n.is_multiple_of(width(dtype)));
        let n = if wide { width(dtype) } else { 1 };
        (format!("{}_v{n}", suffix(dtype)), n)
    }

    fn launch(
        &self,
        family: &'static str,
        name: &str,
        grid: Grid,
        args: &[Arg],
    ) -> Result<(), CudaError> {
        self.kernels.launch((family, name), self.stream, grid, args)
    }

    /// As [`Launcher::launch`], for a kernel that waits itself for the one before it.
    fn launch_waiting(
        &self,
        family: &'static str,
        name: &str,
        grid: Grid,
        args: &[Arg],
    ) -> Result<(), CudaError> {
        self.kernels.launch_waiting((family, name), self.stream, grid, args)
    }

    /// Launches op `at` and whatever behind it (before `end`) shares its launch;
    /// returns the first op that it did not.
    pub fn run(&self, at: usize, end: usize) -> Result<usize, CudaError> {
        self.current.set(at);
        let op = &self.program.ops[at];
        if let (Some(calls), Lane::Host) = (self.calls, self.program.lane(&op.kind)) {
            calls.launch(at, self.lanes[Lane::Host.index()])?;
            return Ok(at + 1);
        }
        if matches!(op.kind, OpKind::AdamW { .. } | OpKind::Sgd { .. }) {
            return Ok(at + optimizer::updates(self, &self.program.ops[at..end])?);
        }
        if matches!(op.kind, OpKind::AdamW8bit { .. }) {
            return Ok(at + optimizer8bit::updates(self, &self.program.ops[at..end])?);
        }
        if let Some(next) = decode::fused(self, at, end)? {
            return Ok(next);
        }
        if attention::fused(self, at, end)? {
            return Ok(at + 2);
        }
        self.op(op)?;
        Ok(at + 1)
    }

    fn op(&self, op: &Op) -> Result<(), CudaError> {
        let workspace = op.workspace.map_or(0, |w| self.at(w));
        match &op.kind {
            OpKind::Linear { .. } | OpKind::LinearQuantized { .. }
                if decode::takes(self.program, &op.kind) =>
            {
                decode::run(self, &op.kind)
            }
            OpKind::Linear { .. }
            | OpKind::LinearQuantized { .. }
            | OpKind::LinearBackwardInput { .. }
            | OpKind::LinearBackwardWeight { .. } => {
                if let OpKind::LinearQuantized { x, w, .. } = &op.kind {
                    let to = workspace + PRODUCT_WORKSPACE;
                    quantized::dequantize(self, w, self.dtype(x.tensor), to)?;
                }
                let (product, operands) = self.product(op).expect("a product");
                self.products.run(&product, &operands, self.stream)
            }
            OpKind::Embed { ids, table, out } => self.gather(*table, *ids, *out),
            OpKind::GatherRows { x, rows, out } => self.gather(*x, *rows, *out),
            OpKind::EmbedBackward { ids, d_x, d_table, accumulate } => {
                self.embed_backward(*ids, *d_x, *d_table, *accumulate, workspace)
            }
            OpKind::RmsNorm { x, weight, out, rstd, eps } => {
                let c = self.cols(*x);
                let (variant, threads) = norm_variant(c, self.dtype(*x));
                let grid = Grid::line(self.rows(*x), threads);
                let args = [
                    self.ptr(*x),
                    self.ptr(*weight),
                    self.ptr(*out),
                    self.ptr(*rstd),
                    int(c),
                    Arg::Float(*eps),
                ];
                self.launch("norm", &format!("rms_norm_{variant}"), grid, &args)
            }
            OpKind::RmsNormBackward { .. } => self.rms_norm_backward(&op.kind, workspace),
            OpKind::HeadNorm { qkv_raw, q_weight, k_weight, qkv, rstd, shape, eps } => {
                self.check_head_dim(shape.head_dim)?;
                let heads = self.rows(*qkv) * (shape.heads + 2 * shape.kv_heads);
                let args = [
                    self.ptr(*qkv_raw),
                    self.ptr(*q_weight),
                    self.ptr(*k_weight),
                    self.ptr(*qkv),
                    self.ptr(*rstd),
                    Arg::Long(heads as i64),
                    int(shape.heads),
                    int(shape.kv_heads),
                    int(shape.head_dim),
                    Arg::Float(*eps),
                ];
                let name = format!("head_norm_{}", suffix(self.dtype(*qkv)));
                self.launch("norm", &name, Grid::line(heads.div_ceil(8), 256), &args)
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
            } => {
                self.check_head_dim(shape.head_dim)?;
                let (rows, d) = (self.rows(*d_qkv), shape.head_dim);
                let blocks = head_norm_blocks(rows);
                let args = [
                    self.ptr(*d_qkv),
                    self.ptr(*qkv_raw),
                    self.ptr(*q_weight),
                    self.ptr(*k_weight),
                    self.ptr(*rstd),
                    Arg::Ptr(workspace),
                    int(rows),
                    int(shape.heads),
                    int(shape.kv_heads),
                    int(d),
                ];
                let name = format!("head_norm_backward_{}", suffix(self.dtype(*d_qkv)));
                self.launch("norm", &name, Grid::line(blocks, 256), &args)?;
                for (n, d_weight) in [d_q_weight, d_k_weight].into_iter().enumerate() {
                    if let Some(d_weight) = d_weight {
                        let partial = workspace + 4 * (n * blocks * d) as u64;
                        self.sum_partials(partial, *d_weight, blocks, *accumulate)?;
                    }
                }
                Ok(())
            }
            OpKind::Rope { qkv, positions, table, shape, inverse } => {
                let (half, dtype) = (shape.head_dim / 2, self.dtype(*qkv));
                let (name, n) = self.vectors(dtype, &[half]);
                let heads = shape.heads + shape.kv_heads;
                let pieces = self.rows(*qkv) * heads * (half / n);
                let args = [
                    self.ptr(*qkv),
                    self.ptr(*positions),
                    self.ptr(*table),
                    Arg::Long(pieces as i64),
                    int(heads),
                    int(self.cols(*qkv)),
                    int(half),
                    int(self.program.tensor(*table).shape[0]),
                    Arg::Float(if *inverse { -1.0 } else { 1.0 }),
                ];
                let grid = Grid::line(pieces.div_ceil(256), 256);
                self.launch("rope", &format!("rope_{name}"), grid, &args)
            }
            OpKind::Attention { .. } => attention::forward(self, &op.kind),
            OpKind::AttentionBackward { .. } => attention::backward(self, &op.kind, workspace),
            OpKind::AttentionCached { .. } => attention::cached(self, &op.kind, workspace),
            OpKind::SwiGlu { gate_up, act } => self.swiglu("swiglu", *gate_up, *act),
            OpKind::SwiGluBackward { gate_up, d_act } => {
                self.swiglu("swiglu_backward", *gate_up, *d_act)
            }
            OpKind::CrossEntropy { logits, labels, losses, step, row, backward } => {
                let (rows, vocab) = (self.rows(*logits), self.cols(*logits));
                let (name, _) = self.vectors(self.dtype(*logits), &[vocab]);
                let skipped = 4 * *row as u64;
                let args = [
                    self.ptr(*logits),
                    Arg::Ptr(self.at(*labels) + skipped),
                    Arg::Ptr(self.at(*losses) + skipped),
                    self.ptr(*step),
                    int(vocab),
                    flag(*backward),
                ];
                let grid = Grid::line(rows, 1024);
                self.launch("loss", &format!("cross_entropy_{name}"), grid, &args)
            }
            OpKind::SumLosses { losses, step, total, accumulate } => {
                let args = [
                    self.ptr(*losses),
                    self.ptr(*step),
                    self.ptr(*total),
                    Arg::Long(self.program.tensor(*losses).elements() as i64),
                    flag(*accumulate),
                ];
                self.launch("loss", "sum_losses", Grid::line(1, 1024), &args)
            }
            OpKind::BiasBackward { d_y, d_bias, accumulate } => {
                let (rows, n) = (self.rows(*d_y), self.cols(*d_y));
                let (span, spans) = bias_spans(rows);
                let args = [self.ptr(*d_y), Arg::Ptr(workspace), int(rows), int(n), int(span)];
                let (name, width) = self.vectors(self.dtype(*d_y), &[n]);
                let threads = n.div_ceil(width).next_multiple_of(32).min(256);
                let blocks = (n.div_ceil(threads * width) as u64, spans as u64, 1);
                let grid = Grid { blocks, threads: (threads as u32, 1), shared: 0 };
                self.launch("reduce", &format!("sum_rows_{name}"), grid, &args)?;
                self.sum_partials(workspace, *d_bias, spans, *accumulate)
            }
            OpKind::Dequantize { w, out } => {
                quantized::dequantize(self, w, self.dtype(*out), self.at(*out))
            }
            OpKind::Argmax { x, out } => self.argmax(*x, *out, workspace),
            OpKind::Dropout { x, out, step, probability, stream, accumulate } => {
                let t = self.program.tensor(*x);
                let args = [
                    self.ptr(*x),
                    self.ptr(*out),
                    self.ptr(*step),
                    Arg::Long(t.elements() as i64),
                    Arg::Float(*probability),
                    Arg::Int(*stream as i32),
                    flag(*accumulate),
                ];
                let grid = Grid::line(t.elements().div_ceil(1024), 256);
                self.launch("dropout", &format!("dropout_{}", suffix(t.dtype)), grid, &args)
            }
            OpKind::ToDevice { from, to } => {
                let (from, to, len) = (self.view(from), self.view(to), self.bytes(from));
                let stream = self.lanes[Lane::HostToDevice.index()];
                cuda!(cuMemcpyHtoDAsync_v2(to, from as *const _, len, stream))
            }
            OpKind::ToHost { from, to } => {
                let (from, to, len) = (self.view(from), self.view(to), self.bytes(from));
                let stream = self.lanes[Lane::DeviceToHost.index()];
                cuda!(cuMemcpyDtoHAsync_v2(to as *mut _, from, len, stream))
            }
            OpKind::GradNorm { grads, norm, max_norm } => {
                optimizer::grad_norm(self, grads, *norm, *max_norm, workspace)
            }
            OpKind::GradSquares { grads, squares } => {
                optimizer::grad_squares(self, grads, *squares, workspace)
            }
            OpKind::ClipFactor { squares, norm, max_norm } => {
                let max_norm = Arg::Float(max_norm.unwrap_or(0.0));
                let args = [self.ptr(*squares), self.ptr(*norm), max_norm];
                self.launch("reduce", "clip_factor", Grid::line(1, 32), &args)
            }
            OpKind::Convert { x, out, accumulate } => self.convert(*x, *out, *accumulate),
            OpKind::AllGather { .. } | OpKind::ReduceScatter { .. } | OpKind::AllReduce { .. } => {
                collectives::run(self, &op.kind)
            }
            OpKind::Hold { .. } => Ok(()),
            OpKind::AdamW { .. } | OpKind::Sgd { .. } => {
                optimizer::updates(self, std::slice::from_ref(op)).map(|_| ())
            }
            OpKind::AdamW8bit { .. } => {
                optimizer8bit::updates(self, std::slice::from_ref(op)).map(|_| ())
            }
        }
    }

    /// out = x [+ out], or of the parts of both where one is a part.
    fn convert(&self, x: TensorId, out: TensorId, accumulate: bool) -> Result<(), CudaError> {
        let parts = self.program.is_part(x) || self.program.is_part(out);
        let t = self.program.tensor(x);
        let (from, to, n) = match parts {
            true => (self.part(x), self.part(out), t.part(self.rank).len()),
            false => (self.at(x), self.at(out), t.elements()),
        };
        if n == 0 {
            return Ok(());
        }
        let args = [Arg::Ptr(from), Arg::Ptr(to), Arg::Long(n as i64), flag(accumulate)];
        let name = format!("convert_{}_{}", suffix(t.dtype), suffix(self.dtype(out)));
        self.launch("convert", &name, Grid::line(n.div_ceil(2048), 256), &args)
    }

    fn check_head_dim(&self, d: usize) -> Result<(), CudaError> {
        if d <= 256 {
            return Ok(());
        }
        let what = format!("head size {d} is above 256");
        Err(CudaError::Unsupported { op: self.op_name(), what })
    }

    /// out (n) = [out +] column sums of `count` rows of partial sums.
    fn sum_partials(
        &self,
        partial: u64,
        out: TensorId,
        count: usize,
        accumulate: bool,
    ) -> Result<(), CudaError> {
        let n = self.program.tensor(out).elements();
        let args = [Arg::Ptr(partial), self.ptr(out), int(count), int(n), flag(accumulate)];
        let grid = Grid { threads: (32, 32), ..Grid::line(n.div_ceil(32), 32) };
        let name = format!("sum_partials_{}", suffix(self.dtype(out)));
        self.launch("reduce", &name, grid, &args)
    }

    /// out row r = x row rows[r].
    fn gather(&self, x: TensorId, rows: TensorId, out: TensorId) -> Result<(), CudaError> {
        let bytes = self.cols(x) * self.dtype(x).bytes();
        let (name, word) =
            if bytes.is_multiple_of(16) { ("gather_16", 16) } else { ("gather_2", 2) };
        let words = bytes / word;
        let args = [self.ptr(x), self.ptr(rows), self.ptr(out), int(words), int(self.rows(x))];
        let threads = words.next_multiple_of(32).clamp(32, 256) as u32;
        self.launch("embed", name, Grid::line(self.rows(out), threads), &args)
    }

    fn embed_backward(
        &self,
        ids: TensorId,
        d_x: TensorId,
        d_table: TensorId,
        accumulate: bool,
        workspace: u64,
    ) -> Result<(), CudaError> {
        let table = self.program.tensor(d_table);
        let (vocab, c) = (table.rows(), table.cols());
        let rows = self.rows(d_x);
        if !accumulate {
            let bytes = table.bytes() as usize;
            cuda!(cuMemsetD8Async(self.at(d_table), 0, bytes, self.stream))?;
        }
        cuda!(cuMemsetD8Async(workspace, 0xff, 8 * vocab, self.stream))?;
        let count = workspace + 4 * vocab as u64;
        let args = [self.ptr(ids), Arg::Ptr(workspace), Arg::Ptr(count), int(rows), int(vocab)];
        self.launch("embed", "embed_index", Grid::line(rows.div_ceil(256), 256), &args)?;
        let (name, n) = self.vectors(self.dtype(d_x), &[c]);
        let args = [
            self.ptr(ids),
            self.ptr(d_x),
            self.ptr(d_table),
            Arg::Ptr(workspace),
            Arg::Ptr(count),
            int(rows),
            int(c),
            int(vocab),
        ];
        let blocks = (rows as u64, c.div_ceil(256 * n) as u64, 1);
        let grid = Grid { blocks, threads: (256, 1), shared: 0 };
        self.launch("embed", &format!("embed_backward_{name}"), grid, &args)
    }

    fn rms_norm_backward(&self, op: &OpKind, workspace: u64) -> Result<(), CudaError> {
        let OpKind::RmsNormBackward {
            d_out,
            x,
            weight,
            rstd,
            d_x,
            overwrite,
            d_weight,
            accumulate,
        } = op
        else {
            return Ok(());
        };
        let (rows, c, dtype) = (self.rows(*x), self.cols(*x), self.dtype(*x));
        let blocks = norm_blocks(rows, c);
        // Without a place for them no partial sums are kept.
        let partial = if d_weight.is_some() { workspace } else { 0 };
        let args = [
            self.ptr(*d_out),
            self.ptr(*x),
            self.ptr(*weight),
            self.ptr(*rstd),
            self.ptr(*d_x),
            flag(!overwrite),
            Arg::Ptr(partial),
            int(rows),
            int(c),
        ];
        let (variant, threads) = norm_variant(c, dtype);
        let name = format!("rms_norm_backward_{variant}");
        self.launch("norm", &name, Grid::line(blocks, threads), &args)?;
        match d_weight {
            Some(d_weight) => self.sum_partials(workspace, *d_weight, blocks, *accumulate),
            None => Ok(()),
        }
    }

    /// out (R) = the column of the largest element of each row of x.
    fn argmax(&self, x: TensorId, out: TensorId, workspace: u64) -> Result<(), CudaError> {
        let (rows, columns) = (self.rows(x), self.cols(x));
        let span = columns.div_ceil(ARGMAX_SPANS);
        let grid = Grid { blocks: (ARGMAX_SPANS as u64, rows as u64, 1), ..Grid::line(1, 256) };
        let args = [self.ptr(x), Arg::Ptr(workspace), int(columns), int(span)];
        self.launch_waiting("argmax", "argmax_spans", grid, &args)?;
        let args = [Arg::Ptr(workspace), self.ptr(out), int(ARGMAX_SPANS)];
        self.launch_waiting("argmax", "argmax_rows", Grid::line(rows, 256), &args)
    }

    fn swiglu(&self, kernel: &str, gate_up: TensorId, act: TensorId) -> Result<(), CudaError> {
        let (rows, columns) = (self.rows(act), self.cols(act));
        let (name, n) = self.vectors(self.dtype(act), &[columns]);
        let tiles = columns.div_ceil(256 * n);
        let args = [self.ptr(gate_up), self.ptr(act), int(columns), int(tiles)];
        let grid = Grid::line(rows * tiles, 256);
        self.launch("swiglu", &format!("{kernel}_{name}"), grid, &args)
    }

    /// Random numbers in what a product reads and this program will write.
    pub fn fill_operands(&self, op: &Op) -> Result<(), CudaError> {
        let mut filled = Ok(());
        op.kind.for_each_operand(|t, access| {
            let tensor = self.program.tensor(t);
            let written = !tensor.resident || tensor.class == Class::Staging;
            if filled.is_ok() && access == Access::Read && written {
                let args = [self.ptr(t), Arg::Long(tensor.elements() as i64)];
                let name = format!("fill_random_{}", suffix(tensor.dtype));
                filled = self.launch("fill", &name, Grid::line(1024, 256), &args);
            }
        });
        filled
    }

    /// The matrix product of an op, as cuBLASLt sees it: column-major, so that every
    /// row-major matrix is its own transpose.
    pub fn product(&self, op: &Op) -> Option<(Product, Operands)> {
        if decode::takes(self.program, &op.kind) {
            return None;
        }
        let workspace = op.workspace.map_or(0, |w| self.at(w));
        let workspace_bytes = if workspace > 0 { PRODUCT_WORKSPACE } else { 0 };
        let mut multiplied_out = None;
        let (a, b, d, sizes, transposed, bias, add, scale) = match &op.kind {
            // The same, of the matrix that lies in the workspace then.
            OpKind::LinearQuantized { x, w, bias, add, y } => {
                multiplied_out = Some(workspace + PRODUCT_WORKSPACE);
                let View { tensor, .. } = *x;
                let (rows, cols) = (w.rows, w.cols);
                let w = View { tensor, row: 0, col: 0, rows, cols, stride: cols };
                (w, *x, *y, (y.cols, y.rows, x.cols), (true, false), *bias, *add, 1.0)
            }
            // y^T (N, M) = w (N, K) x^T (K, M)
            OpKind::Linear { x, w, bias, add, y, scale } => {
                (*w, *x, *y, (y.cols, y.rows, x.cols), (true, false), *bias, *add, *scale)
            }
            // d_x^T (K, M) = w^T (K, N) d_y^T (N, M)
            OpKind::LinearBackwardInput { d_y, w, d_x, accumulate, scale } => {
                let add = accumulate.then_some(*d_x);
                (*w, *d_y, *d_x, (d_x.cols, d_x.rows, d_y.cols), (false, false), None, add, *scale)
            }
            // d_w^T (K, N) = x^T (K, M) d_y (M, N)
            OpKind::LinearBackwardWeight { d_y, x, d_w, accumulate } => {
                let add = accumulate.then_some(*d_w);
                (*x, *d_y, *d_w, (d_w.cols, d_w.rows, x.rows), (false, true), None, add, 1.0)
            }
            _ => return None,
        };
        let c = add.unwrap_or(d);
        let operands = Operands {
            a: multiplied_out.unwrap_or_else(|| self.view(&a)),
            b: self.view(&b),
            c: self.view(&c),
            d: self.view(&d),
            bias: bias.map_or(0, |b| self.at(b)),
            scale,
            workspace,
            workspace_bytes,
        };
        let alignment = |address: u64| 1u32 << address.trailing_zeros().min(8);
        let product = Product {
            m: sizes.0 as u64,
            n: sizes.1 as u64,
            k: sizes.2 as u64,
            transposed,
            strides: [a.stride, b.stride, c.stride, d.stride].map(|s| s as u64),
            input: self.dtype(a.tensor),
            output: self.dtype(d.tensor),
            bias: bias.is_some(),
            add: add.is_some(),
            alignment: [operands.a, operands.b, operands.c, operands.d].map(alignment),
            workspace: workspace_bytes,
        };
        Some((product, operands))
    }
}

//! Seconds of one op on a device.
//!
//! Products and attention have tables over their shapes, everything else has a
//! curve over the bytes that it moves, one for each family of ops.

use plimsoll_arch::DType;
use plimsoll_program::{AttentionShape, Lane, Op, OpKind, Program, TensorId, View};

use crate::Host;
use crate::profile::{DeviceKind, DeviceProfile, Orientation};

/// Updates that one launch takes together (as `plimsoll_cuda` does).
pub(crate) const UPDATES_A_LAUNCH: usize = 56;

/// Tokens that an attention kernel takes at once.
const TILE: f64 = 128.0;

/// The family of an op that has a curve, and the type of its elements; none for
/// products and attention.
pub fn stream_family(program: &Program, kind: &OpKind) -> Option<(&'static str, DType)> {
    let dtype = |t: &TensorId| program.tensor(*t).dtype;
    Some(match kind {
        OpKind::Linear { .. }
        | OpKind::LinearBackwardInput { .. }
        | OpKind::LinearBackwardWeight { .. }
        | OpKind::Attention { .. }
        | OpKind::AttentionBackward { .. } => return None,
        OpKind::ToDevice { to: piece, .. } | OpKind::ToHost { from: piece, .. } => {
            (kind.name(), dtype(&piece.tensor))
        }
        OpKind::AttentionCached { qkv, .. } => (kind.name(), dtype(qkv)),
        OpKind::Embed { table, .. } => (kind.name(), dtype(table)),
        OpKind::EmbedBackward { d_x, .. } => (kind.name(), dtype(d_x)),
        OpKind::GatherRows { x, .. } => (kind.name(), dtype(x)),
        OpKind::RmsNorm { x, .. } | OpKind::RmsNormBackward { x, .. } => (kind.name(), dtype(x)),
        OpKind::BiasBackward { d_y, .. } => (kind.name(), dtype(d_y)),
        OpKind::HeadNorm { qkv, .. } | OpKind::Rope { qkv, .. } => (kind.name(), dtype(qkv)),
        OpKind::HeadNormBackward { d_qkv, .. } => (kind.name(), dtype(d_qkv)),
        OpKind::SwiGlu { act, .. } => (kind.name(), dtype(act)),
        OpKind::SwiGluBackward { d_act, .. } => (kind.name(), dtype(d_act)),
        OpKind::CrossEntropy { logits, backward: true, .. } => ("cross_entropy", dtype(logits)),
        OpKind::CrossEntropy { logits, .. } => ("cross_entropy_loss", dtype(logits)),
        OpKind::SumLosses { .. } => (kind.name(), DType::F32),
        OpKind::GradNorm { grads, .. } => (kind.name(), grads.first().map_or(DType::F32, dtype)),
        OpKind::GradSquares { grads, .. } => ("grad_norm", grads.first().map_or(DType::F32, dtype)),
        OpKind::ClipFactor { .. }
        | OpKind::AllGather { .. }
        | OpKind::ReduceScatter { .. }
        | OpKind::AllReduce { .. }
        | OpKind::Hold { .. } => (kind.name(), DType::F32),
        OpKind::Convert { out, .. } => (kind.name(), dtype(out)),
        OpKind::AdamW { param, m, .. } => match dtype(&m.tensor) {
            DType::Bf16 => ("adamw_bf16_state", dtype(&param.tensor)),
            _ => ("adamw", dtype(&param.tensor)),
        },
        OpKind::AdamW8bit { param, .. } => (kind.name(), dtype(&param.tensor)),
        OpKind::Dequantize { out, .. } => (kind.name(), dtype(out)),
        OpKind::Argmax { x, .. } => (kind.name(), dtype(x)),
        OpKind::LinearQuantized { x, .. } => (kind.name(), dtype(&x.tensor)),
        OpKind::Dropout { x, .. } => (kind.name(), dtype(x)),
        OpKind::Sgd { param, velocity: Some(_), .. } => ("sgd_momentum", dtype(&param.tensor)),
        OpKind::Sgd { param, .. } => ("sgd", dtype(&param.tensor)),
    })
}

/// Of the rate of PCIe in one direction, what is left of it while the other one works too,
/// whose packets are acknowledged in between. Measured on an H200 (54 GB/s one way, 49 to 51
/// each both ways; pieces of 16 and 128 MiB of 1 and 8 GiB).
const BOTH_WAYS: f64 = 0.93;

impl DeviceProfile {
    /// Seconds of the ops `ops` begins with that share one launch, and how many
    /// they are: consecutive updates go together, everything else goes alone.
    ///
    /// # Panics
    /// `ops` is empty.
    pub(crate) fn launch_seconds(
        &self,
        program: &Program,
        ops: &[Op],
        document_tokens: Option<f64>,
    ) -> (usize, f64) {
        let is_update = |op: &Op| {
            matches!(op.kind, OpKind::AdamW { .. } | OpKind::AdamW8bit { .. } | OpKind::Sgd { .. })
        };
        if !is_update(&ops[0]) || program.lane(&ops[0].kind) == Lane::Host {
            return (1, self.op_seconds(program, &ops[0], document_tokens));
        }
        let family = stream_family(program, &ops[0].kind);
        let together = ops
            .iter()
            .take(UPDATES_A_LAUNCH)
            .take_while(|op| is_update(op) && stream_family(program, &op.kind) == family)
            .count();
        let bytes = ops[..together].iter().map(|op| program.work(op).bytes).sum();
        (together, self.stream_seconds(family, bytes))
    }

    /// Seconds of one op; `document_tokens` as in [`crate::schedule`].
    pub fn op_seconds(&self, program: &Program, op: &Op, document_tokens: Option<f64>) -> f64 {
        let dtype = |v: &View| program.tensor(v.tensor).dtype;
        let view_bytes = |v: &View| (v.elements() * dtype(v).bytes()) as f64;
        // An operand that the product adds to its result is one more to read.
        if let Some(seconds) = self.token_seconds(program, &op.kind) {
            return seconds;
        }
        let added = |v: Option<&View>| v.map_or(0.0, view_bytes) / self.copy_bytes_per_second;
        match &op.kind {
            OpKind::Linear { x, w, add, y, .. } => {
                let products = self.products.of(dtype(w));
                products.seconds(Orientation::Forward, y.rows, y.cols, x.cols) + added(add.as_ref())
            }
            OpKind::LinearBackwardInput { d_y, w, d_x, accumulate, .. } => {
                let products = self.products.of(dtype(w));
                products.seconds(Orientation::BackwardInput, d_x.rows, d_x.cols, d_y.cols)
                    + added(accumulate.then_some(d_x))
            }
            OpKind::LinearBackwardWeight { d_y, x, d_w, accumulate } => {
                let products = self.products.of(dtype(x));
                products.seconds(Orientation::BackwardWeight, d_w.rows, d_w.cols, d_y.rows)
                    + added(accumulate.then_some(d_w))
            }
            OpKind::Attention { qkv, shape, .. } => {
                let dtype = program.tensor(*qkv).dtype;
                self.attention_seconds(dtype, shape, document_tokens, false)
            }
            OpKind::AttentionBackward { qkv, shape, .. } => {
                let dtype = program.tensor(*qkv).dtype;
                self.attention_seconds(dtype, shape, document_tokens, true)
            }
            OpKind::ToDevice { from, .. } => {
                1e-6 * self.launch_us
                    + view_bytes(from) / self.shared(self.to_device_bytes_per_second)
            }
            OpKind::ToHost { from, .. } => {
                1e-6 * self.launch_us
                    + view_bytes(from) / self.shared(self.to_host_bytes_per_second)
            }
            OpKind::Hold { .. } => 0.0,
            kind if program.lane(kind) == Lane::Host && self.kind == DeviceKind::Cuda => {
                let host = self.host.clone();
                host.unwrap_or_else(|| Host::of_gpu(&self.name, 1)).update_seconds(program, op)
            }
            kind => {
                let collective = self
                    .peers
                    .as_ref()
                    .and_then(|p| p.seconds(program, kind, self.copy_bytes_per_second));
                collective.unwrap_or_else(|| {
                    self.stream_seconds(stream_family(program, kind), program.work(op).bytes)
                })
            }
        }
    }

    /// What a copy over the link keeps of its rate while one of the other direction runs.
    pub(crate) fn both_ways(&self) -> f64 {
        if self.kind == DeviceKind::Cpu {
            return 1.0;
        }
        let link = self.to_device_bytes_per_second.min(self.to_host_bytes_per_second);
        self.shared(BOTH_WAYS * link) / self.shared(link)
    }

    /// The rate of a link, where ranks share the memory of their host.
    fn shared(&self, link: f64) -> f64 {
        self.host.as_ref().map_or(link, |host| link.min(host.copy_bytes_per_second()))
    }

    fn stream_seconds(&self, family: Option<(&'static str, DType)>, bytes: f64) -> f64 {
        let known = family.and_then(|(name, dtype)| self.streams.of(dtype).get(name));
        match known {
            Some(stream) => stream.seconds(bytes),
            None => 1e-6 * self.launch_us + bytes / self.copy_bytes_per_second,
        }
    }

    /// Causal attention: the table of its head size, or of the kernels that take
    /// every size. A window takes its share of the pairs; rows of documents are as
    /// many rows of their length, which kernels see in tiles.
    fn attention_seconds(
        &self,
        dtype: DType,
        shape: &AttentionShape,
        document_tokens: Option<f64>,
        backward: bool,
    ) -> f64 {
        let entries = self.attention.of(dtype);
        let distance = |d: usize| (d as f64 / shape.head_dim as f64).ln().abs();
        let nearest = |any_size: bool| {
            entries
                .iter()
                .filter(|e| !any_size || e.any_size)
                .min_by(|a, b| distance(a.head_dim).total_cmp(&distance(b.head_dim)))
        };
        let entry = entries
            .iter()
            .find(|e| e.head_dim == shape.head_dim)
            .or_else(|| nearest(true))
            .or_else(|| nearest(false))
            .expect("a settled profile has attention");
        let row = shape.seq as f64;
        let seq = document_tokens.unwrap_or(row).max(TILE).min(row);
        let heads = (shape.batch * shape.heads) as f64 * row / seq;
        let window = shape.window.map_or(seq, |w| (w as f64).min(seq));
        let pairs =
            (window * (window + 1.0) / 2.0 + (seq - window) * window) / (seq * (seq + 1.0) / 2.0);
        let width = shape.head_dim as f64 / entry.head_dim as f64;
        let launch = 1e-6 * self.launch_us;
        let whole = entry.seconds(backward, seq, heads);
        launch.min(whole) + (whole - launch).max(0.0) * pairs * width
    }
}

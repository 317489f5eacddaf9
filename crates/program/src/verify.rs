//! Checks that hold for every program, run on each one that is built in tests
//! and on each one that a device is given.

use plimsoll_arch::DType;
use plimsoll_quant::STATE_BLOCK;

use crate::op::{MASTER, SCALES};
use crate::{
    Access, Home, Lane, NESTED_BLOCK, OpKind, Program, QUANT_BLOCK, QuantizedMatrix, TensorId, View,
};

/// What is wrong with a program; always a fault of a builder, never of a user.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    #[error("op {op} ({name}) reads `{tensor}` before anything wrote it")]
    ReadBeforeWrite { op: usize, name: &'static str, tensor: String },
    #[error("op {op} ({name}): {what}")]
    Shape { op: usize, name: &'static str, what: String },
    #[error("op {op} ({name}) reads and writes `{tensor}`, which it cannot do in place")]
    InPlace { op: usize, name: &'static str, tensor: String },
    #[error("op {op} ({name}) works on `{tensor}`, which is in {home:?} memory")]
    Far { op: usize, name: &'static str, tensor: String, home: Home },
    #[error("sections cover ops {covered}, the program has {ops}")]
    Sections { covered: usize, ops: usize },
}

impl Program {
    /// Every tensor is written before it is read, every product fits, and no
    /// op overwrites what it still reads.
    pub fn verify(&self) -> Result<(), ProgramError> {
        let covered =
            self.sections.iter().fold(0, |at, s| if s.ops.start == at { s.ops.end } else { 0 });
        if covered != self.ops.len() {
            return Err(ProgramError::Sections { covered, ops: self.ops.len() });
        }
        let mut written: Vec<bool> = self.tensors.iter().map(|t| t.resident).collect();
        for (op, entry) in self.ops.iter().enumerate() {
            let name = entry.kind.name();
            let label = |t: TensorId| self.tensor(t).name.clone();
            let mut operands: Vec<(TensorId, Access)> = Vec::new();
            entry.kind.for_each_operand(|t, access| operands.push((t, access)));
            for (n, (t, access)) in operands.iter().enumerate() {
                if *access != Access::Write && !written[t.index()] {
                    return Err(ProgramError::ReadBeforeWrite { op, name, tensor: label(*t) });
                }
                let clash = |(u, other): &(TensorId, Access)| {
                    u == t && (*access != Access::Read || *other != Access::Read)
                };
                if operands[..n].iter().any(clash) {
                    return Err(ProgramError::InPlace { op, name, tensor: label(*t) });
                }
            }
            // Engines that compute see no host memory, and the host's cores no other.
            let foreign = match self.lane(&entry.kind) {
                Lane::HostToDevice | Lane::DeviceToHost => None,
                Lane::Host => Some(Home::Device),
                Lane::Compute | Lane::Communication => Some(Home::Host),
            };
            let far = |(t, _): &&(TensorId, Access)| Some(self.tensor(*t).home) == foreign;
            if let Some((t, _)) = operands.iter().find(far) {
                let (tensor, home) = (label(*t), self.tensor(*t).home);
                return Err(ProgramError::Far { op, name, tensor, home });
            }
            for (t, access) in operands {
                written[t.index()] |= access != Access::Read;
            }
            self.check_shapes(&entry.kind).map_err(|what| ProgramError::Shape {
                op,
                name,
                what,
            })?;
        }
        Ok(())
    }

    fn check_shapes(&self, kind: &OpKind) -> Result<(), String> {
        // The same rows and columns; (B, 1, C) and (B, C) are alike.
        let same = |a: TensorId, b: TensorId| {
            let (a, b) = (self.tensor(a), self.tensor(b));
            if (a.rows(), a.cols()) == (b.rows(), b.cols()) {
                return Ok(());
            }
            Err(format!("`{}` is {:?}, `{}` is {:?}", a.name, a.shape, b.name, b.shape))
        };
        let width = |t: TensorId, cols: usize| {
            let tensor = self.tensor(t);
            if tensor.cols() == cols {
                return Ok(());
            }
            Err(format!("`{}` is {:?}, expected {cols} columns", tensor.name, tensor.shape))
        };
        let inside = |v: &View| {
            let t = self.tensor(v.tensor);
            let fits = v.row + v.rows <= t.rows() && v.col + v.cols <= t.cols();
            if fits && v.stride == t.cols() && matches!(t.dtype, DType::F32 | DType::Bf16) {
                return Ok(());
            }
            Err(format!("{v:?} does not lie in `{}` {:?}", t.name, t.shape))
        };
        // (M, N) = (M, K) x (N, K)
        let product = |y: &View, x: &View, w: &View| {
            inside(y)?;
            inside(x)?;
            inside(w)?;
            if x.cols == w.cols && y.rows == x.rows && y.cols == w.rows {
                return Ok(());
            }
            let dims = [x.rows, x.cols, w.rows, w.cols, y.rows, y.cols];
            Err(format!("product of {dims:?} (x rows, cols, w rows, cols, y rows, cols)"))
        };
        match kind {
            OpKind::Linear { x, w, bias, add, y, scale } => {
                if *scale != 1.0 && (bias.is_some() || add.is_some()) {
                    return Err(format!("a product scaled by {scale} is added to something"));
                }
                product(y, x, w)?;
                if let Some(bias) = bias {
                    width(*bias, y.cols)?;
                }
                if let Some(add) = add {
                    inside(add)?;
                    if (add.rows, add.cols) != (y.rows, y.cols) {
                        return Err("`add` has another shape than y".into());
                    }
                }
                Ok(())
            }
            OpKind::LinearBackwardInput { d_y, w, d_x, accumulate, scale } => {
                if *scale != 1.0 && *accumulate {
                    return Err(format!("a product scaled by {scale} is added to something"));
                }
                product(d_y, d_x, w)
            }
            OpKind::LinearBackwardWeight { d_y, x, d_w, .. } => product(d_y, x, d_w),
            OpKind::RmsNorm { x, weight, out, .. } => {
                same(*x, *out)?;
                width(*weight, self.tensor(*x).cols())
            }
            OpKind::RmsNormBackward { d_out, x, d_x, weight, d_weight, .. } => {
                same(*d_out, *x)?;
                same(*d_x, *x)?;
                d_weight.map_or(Ok(()), |d_weight| same(*weight, d_weight))
            }
            OpKind::Dequantize { w, out } => self.check_quantized(w).and_then(|()| {
                let t = self.tensor(*out);
                if (t.rows(), t.cols()) == (w.rows, w.cols) {
                    return Ok(());
                }
                Err(format!("`{}` is {:?}, expected {} x {}", t.name, t.shape, w.rows, w.cols))
            }),
            OpKind::LinearQuantized { x, w, add, y, .. } => {
                self.check_quantized(w)?;
                inside(x)?;
                inside(y)?;
                add.as_ref().map_or(Ok(()), inside)?;
                if x.cols == w.cols && y.rows == x.rows && y.cols == w.rows {
                    return Ok(());
                }
                let dims = [x.rows, x.cols, w.rows, w.cols, y.rows, y.cols];
                Err(format!("product of {dims:?} (x rows, cols, w rows, cols, y rows, cols)"))
            }
            OpKind::Argmax { x, out } => {
                let (rows, out) = (self.tensor(*x).rows(), self.tensor(*out));
                if out.elements() == rows && out.dtype == DType::I32 {
                    return Ok(());
                }
                Err(format!("`{}` is {:?} {}, expected {rows} i32", out.name, out.shape, out.dtype))
            }
            OpKind::Dropout { x, out, .. } => same(*x, *out),
            OpKind::SwiGlu { gate_up, act } | OpKind::SwiGluBackward { gate_up, d_act: act } => {
                width(*gate_up, 2 * self.tensor(*act).cols())
            }
            OpKind::Attention { qkv, out, shape, .. }
            | OpKind::AttentionBackward { qkv, out, shape, .. }
            | OpKind::AttentionCached { qkv, out, shape, .. } => {
                width(*qkv, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)?;
                width(*out, shape.heads * shape.head_dim)
            }
            OpKind::AdamW { .. } | OpKind::AdamW8bit { .. } | OpKind::Sgd { .. } => {
                self.check_update(kind)
            }
            OpKind::ToDevice { from, to } => self.check_copy(from, to, [Home::Host, Home::Device]),
            OpKind::ToHost { from, to } => self.check_copy(from, to, [Home::Device, Home::Host]),
            _ => Ok(()),
        }
    }

    /// Every operand is one piece of memory of as many elements as the parameter, its
    /// scales one for each block.
    fn check_update(&self, kind: &OpKind) -> Result<(), String> {
        let Some((param, grad, state)) = kind.update_operands() else { return Ok(()) };
        let (elements, blocks) = (param.elements(), param.elements().div_ceil(STATE_BLOCK));
        let scaled = state[3].is_some();
        let operands = [Some(param), Some(grad)].into_iter().chain(state);
        for (n, view) in operands.enumerate().filter_map(|(n, view)| Some((n, view?))) {
            let t = self.tensor(view.tensor);
            let scales = n >= 2 && SCALES.contains(&(n - 2));
            let expected = if scales { blocks } else { elements };
            let whole = t.holds(&view) && view.is_contiguous();
            if !whole || view.elements() != expected {
                return Err(format!("{view:?} of `{}` is no piece of {expected}", t.name));
            }
        }
        if let Some(master) = state[MASTER] {
            let types = [param, master].map(|view| self.tensor(view.tensor).dtype);
            if types != [DType::Bf16, DType::I16] {
                return Err(format!("a master of a {} weight in {}", types[0], types[1]));
            }
        }
        let origin = kind.updated_parameter().unwrap_or(param);
        if !self.tensor(origin.tensor).holds(&origin) || origin.elements() != elements {
            return Err(format!("{origin:?} is not what {param:?} is a copy of"));
        }
        // Blocks of state are those of the whole parameter.
        if scaled && !origin.first().is_multiple_of(STATE_BLOCK) {
            return Err(format!("a piece from {} on splits a block of state", origin.first()));
        }
        Ok(())
    }

    /// Bytes of one length that lie together, each side at its home.
    fn check_copy(&self, from: &View, to: &View, homes: [Home; 2]) -> Result<(), String> {
        for (view, home) in [from, to].into_iter().zip(homes) {
            let t = self.tensor(view.tensor);
            if t.home != home || !t.holds(view) || !view.is_contiguous() {
                return Err(format!("{view:?} of `{}` is no piece of {home:?} memory", t.name));
            }
        }
        let (a, b) = (self.tensor(from.tensor), self.tensor(to.tensor));
        if a.dtype != b.dtype || from.elements() != to.elements() {
            return Err(format!("`{}` and `{}` are not alike", a.name, b.name));
        }
        Ok(())
    }

    fn check_quantized(&self, w: &QuantizedMatrix) -> Result<(), String> {
        let elements = |t: TensorId, n: usize| {
            let tensor = self.tensor(t);
            if tensor.elements() == n {
                return Ok(());
            }
            Err(format!("`{}` has {} elements, expected {n}", tensor.name, tensor.elements()))
        };
        let rows: usize = w.parts.iter().map(|p| p.rows).sum();
        if rows != w.rows {
            return Err(format!("parts of {rows} rows in a matrix of {}", w.rows));
        }
        for part in &w.parts {
            let n = part.rows * w.cols;
            let blocks = n.div_ceil(QUANT_BLOCK);
            elements(part.codes, n.div_ceil(2))?;
            elements(part.absmax, blocks)?;
            if let Some(nested) = part.nested {
                elements(nested.absmax, blocks.div_ceil(NESTED_BLOCK))?;
                elements(nested.offset, 1)?;
            }
        }
        Ok(())
    }
}

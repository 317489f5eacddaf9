//! Products of a few rows (decode.cu; of one row on Hopper, decode_chain.cu): which ones
//! there are, and which ops before and after share their launch.

mod chain;

use plimsoll_arch::DType;
use plimsoll_plan::Layout;
use plimsoll_program::{OpKind, Program, QUANT_BLOCK, QuantizedMatrix, TensorId, View};

use crate::error::CudaError;
use crate::kernels::Grid;
use crate::launch::Launcher;

/// Rows of x that one launch takes.
const COLUMNS: usize = 8;
/// Rows of x with which a matrix that is not in four bits runs here. From the second on
/// cuBLASLt is faster: it takes as long for 2 rows as for 16 (H200, Llama-3-8B: a step of 9
/// sequences 4.6 ms, here 5.7 ms of 2 and 8.2 of 8).
const DENSE_COLUMNS: usize = 1;
const WARPS: usize = 8;
/// Rows of w that a warp takes at a time; half as many with SwiGLU.
const TILE: usize = 16;
const PARTS: usize = 3;
/// Blocks of a multiprocessor: what the kernels' registers allow.
const RESIDENT: usize = 3;
/// Shared memory that every supported chip gives one block.
const SHARED: usize = 99 * 1024;

/// A part of a matrix in four bits; mirrors `Part` of decode.cu.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Part {
    codes: u64,
    absmax: u64,
    nested_absmax: u64,
    offset: u64,
    rows: i32,
    first_row: i32,
    first_tile: i32,
    unused: i32,
}

/// The kernels' argument; mirrors `Product` of decode.cu.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Argument {
    x: u64,
    norm: u64,
    w: u64,
    bias: u64,
    add: u64,
    y: u64,
    x_stride: i64,
    w_stride: i64,
    add_stride: i64,
    y_stride: i64,
    rows: i32,
    k: i32,
    n: i32,
    tiles: i32,
    splits: i32,
    pitch: i32,
    gated: i32,
    y_f32: i32,
    early: i32,
    eps: f32,
    scale: f32,
    unused: i32,
    parts: [Part; PARTS],
    codebook: [f32; 16],
}

/// The matrix of a product.
#[derive(Clone, Copy)]
enum Matrix<'a> {
    Dense(View),
    Quantized(&'a QuantizedMatrix),
}

/// y = scale x w^T [+ bias] [+ add].
#[derive(Clone, Copy)]
struct Product<'a> {
    x: View,
    w: Matrix<'a>,
    bias: Option<TensorId>,
    add: Option<View>,
    y: View,
    scale: f32,
}

/// What shares the launch of a product.
#[derive(Clone, Copy, Default)]
struct Around {
    /// Weight and epsilon of an RMSNorm of x.
    norm: Option<(TensorId, f32)>,
    /// Where SwiGLU of the product goes.
    act: Option<TensorId>,
}

impl<'a> Product<'a> {
    fn of(kind: &'a OpKind) -> Option<Product<'a>> {
        match kind {
            OpKind::Linear { x, w, bias, add, y, scale } => Some(Product {
                x: *x,
                w: Matrix::Dense(*w),
                bias: *bias,
                add: *add,
                y: *y,
                scale: *scale,
            }),
            OpKind::LinearQuantized { x, w, bias, add, y } => Some(Product {
                x: *x,
                w: Matrix::Quantized(w),
                bias: *bias,
                add: *add,
                y: *y,
                scale: 1.0,
            }),
            _ => None,
        }
    }

    fn is_quantized(&self) -> bool {
        matches!(self.w, Matrix::Quantized(_))
    }

    /// Elements of K that a warp takes at a time.
    fn unit(&self) -> usize {
        if self.is_quantized() { QUANT_BLOCK } else { 32 }
    }

    /// Bytes from row to row of x in shared memory: rows side by side do not collide.
    fn pitch(&self) -> usize {
        let bytes = 2 * self.x.cols.next_multiple_of(self.unit());
        if self.is_quantized() { bytes + 16 } else { bytes.next_multiple_of(128) + 64 }
    }

    /// Shared memory of a block that holds `rows` of x.
    fn shared(&self, rows: usize, norm: bool) -> usize {
        let sums = WARPS * 32 * 16 + WARPS * COLUMNS * 4;
        let tables = if self.is_quantized() { 256 * 32 * 4 + 256 * 4 + WARPS * 512 } else { 0 };
        let norm = if norm { 2 * self.x.cols } else { 0 };
        tables + sums + norm + rows * self.pitch()
    }

    fn fits(&self, program: &Program) -> bool {
        let dtype = |t: TensorId| program.tensor(t).dtype;
        let bf16 = |t: TensorId| dtype(t) == DType::Bf16;
        let whole = |v: &View| v.stride.is_multiple_of(8) && v.first().is_multiple_of(8);
        let sums = match dtype(self.y.tensor) {
            DType::Bf16 => self.bias.is_none_or(bf16) && self.add.is_none_or(|v| bf16(v.tensor)),
            _ => self.bias.is_none() && self.add.is_none(),
        };
        let matrix = match self.w {
            Matrix::Dense(w) => bf16(w.tensor) && whole(&w) && w.cols.is_multiple_of(8),
            Matrix::Quantized(w) => {
                w.cols.is_multiple_of(QUANT_BLOCK)
                    && w.parts.len() <= PARTS
                    && w.parts.iter().all(|p| p.rows > 0)
            }
        };
        let most = if self.is_quantized() { COLUMNS } else { DENSE_COLUMNS };
        (1..=most).contains(&self.x.rows)
            && bf16(self.x.tensor)
            && whole(&self.x)
            && sums
            && matrix
            && self.shared(1, false) <= SHARED
    }
}

/// Whether a product runs here; the others go through cuBLASLt, after the matrix is
/// multiplied out if it is in four bits.
pub(crate) fn takes(program: &Program, kind: &OpKind) -> bool {
    Product::of(kind).is_some_and(|p| p.fits(program))
}

/// A product by itself.
pub(crate) fn run(l: &Launcher, kind: &OpKind) -> Result<(), CudaError> {
    match Product::of(kind) {
        Some(product) => launch(l, &product, Around::default()),
        None => Ok(()),
    }
}

/// Launches the product at `at` or after it with the ops around it, where they are
/// a pattern that shares a launch; returns the first op behind.
pub(crate) fn fused(l: &Launcher, at: usize, end: usize) -> Result<Option<usize>, CudaError> {
    if l.context.info.compute_capability == (9, 0)
        && let Some(next) = chain::launch(l, at, end)?
    {
        return Ok(Some(next));
    }
    match piece(l.program, l.layout, at, end) {
        Some((product, around, next)) if next > at + 1 => {
            launch(l, &product, around).map(|()| Some(next))
        }
        _ => Ok(None),
    }
}

/// A product with the ops around it, if any, and the first op behind them.
fn piece<'a>(
    program: &'a Program,
    layout: &Layout,
    at: usize,
    end: usize,
) -> Option<(Product<'a>, Around, usize)> {
    let ops = &program.ops[..end];
    let mut around = Around::default();
    let mut next = at;
    let mut normed = None;
    if let OpKind::RmsNorm { x, weight, out, rstd, eps } = &ops.get(at)?.kind {
        let unread = [*out, *rstd].iter().all(|t| is_forgotten(program, *t, at + 1));
        if !unread || program.tensor(*weight).dtype != DType::Bf16 {
            return None;
        }
        (around.norm, normed) = (Some((*weight, *eps)), Some((*x, *out)));
        next += 1;
    }
    let mut product = Product::of(&ops.get(next)?.kind).filter(|p| p.fits(program))?;
    next += 1;
    if let Some((x, out)) = normed {
        let (t, v) = (program.tensor(x), product.x);
        let whole = v.tensor == out && v.first() == 0 && (v.rows, v.cols) == (t.rows(), t.cols());
        if !whole || t.dtype != DType::Bf16 || product.shared(1, true) > SHARED {
            return None;
        }
        product.x = View { tensor: x, row: 0, col: 0, stride: t.cols(), ..v };
    }
    if let Some(OpKind::SwiGlu { gate_up, act }) = ops.get(next).map(|op| &op.kind)
        && product.y.tensor == *gate_up
        && is_gated(program, &product, *act)
        && is_forgotten(program, *gate_up, next)
    {
        around.act = Some(*act);
        next += 1;
    }
    // The last op's result may take the memory of what an earlier one read last.
    let out = around.act.unwrap_or(product.y.tensor);
    (next == at + 1 || disjoint(program, layout, product.x.tensor, out))
        .then_some((product, around, next))
}

/// Whether nothing reads a tensor behind op `at`.
pub(crate) fn is_forgotten(program: &Program, tensor: TensorId, at: usize) -> bool {
    let read = program.ops.iter().skip(at + 1).any(|op| {
        let mut reads = false;
        op.for_each_tensor(|t, access| {
            reads |= t == tensor && access != plimsoll_program::Access::Write;
        });
        reads
    });
    !read && !program.tensor(tensor).resident
}

/// Whether SwiGLU of all of a product's columns is `act`.
fn is_gated(program: &Program, product: &Product, act: TensorId) -> bool {
    let (act, y) = (program.tensor(act), product.y);
    let halves = match product.w {
        Matrix::Dense(w) => w.rows == 2 * act.cols(),
        Matrix::Quantized(w) => w.parts.len() == 2 && w.parts.iter().all(|p| p.rows == act.cols()),
    };
    halves
        && product.bias.is_none()
        && product.add.is_none()
        && act.dtype == DType::Bf16
        && (y.first(), y.rows, y.cols) == (0, act.rows(), 2 * act.cols())
}

fn disjoint(program: &Program, layout: &Layout, a: TensorId, b: TensorId) -> bool {
    let place = |t: TensorId| {
        let start = layout.offset(t);
        (start, start + program.tensor(t).bytes())
    };
    let (a, b) = (place(a), place(b));
    a.1 <= b.0 || b.1 <= a.0
}

/// Warps that share a tile: all of a block where tiles are few; where there are
/// plenty, few enough that each keeps a chunk of loads in flight.
fn splits(units: usize, chunk: usize, tiles: usize, multiprocessors: usize) -> usize {
    let mut splits = WARPS;
    while splits > 1
        && (splits > units
            || (units.div_ceil(splits) < chunk
                && tiles >= 2 * multiprocessors * (WARPS / (splits / 2))))
    {
        splits /= 2;
    }
    splits
}

/// The kernels' argument for the first row of a product, which one warp takes a tile of;
/// `early` where its matrix is there before the program begins.
fn describe(l: &Launcher, product: &Product, around: Around) -> Argument {
    let Product { x, bias, add, y, scale, .. } = *product;
    let gated = around.act.is_some();
    let mut resident = around.norm.is_none_or(|(w, _)| l.program.tensor(w).resident);
    let mut parts = [Part::default(); PARTS];
    let mut codebook = [0.0; 16];
    let (mut w_at, mut w_stride) = (0, 0);
    let (mut n, mut tiles): (usize, usize) = (0, 0);
    match product.w {
        Matrix::Dense(w) => {
            (w_at, w_stride) = (l.view(&w), w.stride as i64);
            n = if gated { w.rows / 2 } else { w.rows };
            tiles = n.div_ceil(TILE);
            resident &= l.program.tensor(w.tensor).resident;
        }
        Matrix::Quantized(w) => {
            codebook = *w.codebook.values();
            for (to, part) in parts.iter_mut().zip(&w.parts) {
                *to = Part {
                    codes: l.at(part.codes),
                    absmax: l.at(part.absmax),
                    nested_absmax: part.nested.map_or(0, |n| l.at(n.absmax)),
                    offset: part.nested.map_or(0, |n| l.at(n.offset)),
                    rows: part.rows as i32,
                    first_row: n as i32,
                    first_tile: tiles as i32,
                    unused: 0,
                };
                n += part.rows;
                tiles += part.rows.div_ceil(TILE);
            }
            n = if gated { n / 2 } else { n };
            w.for_each_tensor(|t| resident &= l.program.tensor(t).resident);
        }
    }
    if gated {
        tiles = n.div_ceil(TILE / 2);
    }
    let (y_tensor, y_at, y_stride) = match around.act {
        Some(act) => (act, l.at(act), n),
        None => (y.tensor, l.view(&y), y.stride),
    };
    Argument {
        x: l.view(&x),
        norm: around.norm.map_or(0, |(w, _)| l.at(w)),
        w: w_at,
        bias: bias.map_or(0, |b| l.at(b)),
        add: add.map_or(0, |v| l.view(&v)),
        y: y_at,
        x_stride: x.stride as i64,
        w_stride,
        add_stride: add.map_or(0, |v| v.stride as i64),
        y_stride: y_stride as i64,
        rows: 1,
        k: x.cols as i32,
        n: n as i32,
        tiles: tiles as i32,
        splits: 1,
        pitch: product.pitch() as i32,
        gated: i32::from(gated),
        y_f32: i32::from(l.dtype(y_tensor) == DType::F32),
        early: i32::from(resident),
        eps: around.norm.map_or(0.0, |(_, eps)| eps),
        scale,
        unused: 0,
        parts,
        codebook,
    }
}

fn launch(l: &Launcher, product: &Product, around: Around) -> Result<(), CudaError> {
    let first = describe(l, product, around);
    let (rows, tiles) = (product.x.rows, first.tiles as usize);
    let multiprocessors = l.context.info.multiprocessors as usize;
    let chunk = if product.is_quantized() { 8 } else { 4 };
    let splits = splits(product.x.cols.div_ceil(product.unit()), chunk, tiles, multiprocessors);

    // As many rows at a time as shared memory holds.
    let limit = l.context.info.shared_bytes as usize;
    let norm = around.norm.is_some();
    let most = (1..=rows).rev().find(|r| product.shared(*r, norm) <= limit).unwrap_or(1);
    let step = rows.div_ceil(rows.div_ceil(most));
    let shared = product.shared(step, norm);
    let resident_blocks = (limit / (shared + 1024)).clamp(1, RESIDENT);
    let slots = tiles.div_ceil(WARPS / splits);
    let rounds = slots.div_ceil(resident_blocks * multiprocessors);
    let blocks = slots.div_ceil(rounds.max(1));

    let name = if product.is_quantized() { "decode_product_4bit" } else { "decode_product_bf16" };
    let grid = Grid { shared: shared as u32, ..Grid::line(blocks, 32 * WARPS as u32) };
    for row in (0..rows).step_by(step) {
        let at = |base: u64, stride: i64, bytes: u64| base + row as u64 * stride as u64 * bytes;
        let argument = Argument {
            x: at(first.x, first.x_stride, 2),
            add: at(first.add, first.add_stride, 2),
            y: at(first.y, first.y_stride, if first.y_f32 == 1 { 4 } else { 2 }),
            rows: step.min(rows - row) as i32,
            splits: splits as i32,
            ..first
        };
        l.kernels.launch_struct(("decode", name), l.stream, grid, &argument)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use plimsoll_arch::preset;
    use plimsoll_plan::lay_out;
    use plimsoll_program::{Codebook, Lora, Quant, Recipe, build};

    use super::*;
    use crate::CudaTarget;

    /// Launches of products in a token step of three layers: alone, and with others.
    fn products(model: &str, recipe: &Recipe) -> (usize, usize) {
        let mut arch = preset(model).unwrap();
        arch.num_hidden_layers = 3;
        let program = build::infer(&arch, recipe, 1, &CudaTarget).unwrap();
        let layout = lay_out(&program);
        let (mut alone, mut fused, mut at) = (0, 0, 0);
        while at < program.ops.len() {
            at = match piece(&program, &layout, at, program.ops.len()) {
                Some((_, _, next)) => {
                    *if next > at + 1 { &mut fused } else { &mut alone } += 1;
                    next
                }
                None => at + 1,
            };
        }
        (alone, fused)
    }

    #[test]
    fn a_token_step_is_few_launches() {
        let quant = Some(Quant { codebook: Codebook::Nf4, double: true, head: true });
        for model in ["llama-3-8b", "tinyllama-1.1b"] {
            for batch in [1, 8] {
                let plain = Recipe::infer(DType::Bf16, batch, 512);
                let four_bits = Recipe { quant, ..plain.clone() };
                // Per layer: o and down alone; norm with qkv, norm with gate, up and
                // SwiGLU. Then norm and head.
                let dense = if batch == 1 { (6, 7) } else { (0, 0) };
                assert_eq!(products(model, &plain), dense, "{model} {batch}");
                assert_eq!(products(model, &four_bits), (6, 7), "{model} {batch}");
            }
            // Adapters read what the norm wrote, and add to what SwiGLU reads.
            let lora = Some(Lora::default());
            let adapted = Recipe { lora, ..Recipe::infer(DType::Bf16, 1, 512) };
            // Four products of a layer, four to their ranks and seven back.
            assert_eq!(products(model, &adapted), (3 * (4 + 4 + 7), 1), "{model}");
            let exact = Recipe::infer(DType::F32, 1, 512);
            assert_eq!(products(model, &exact), (0, 0), "{model}");
            assert_eq!(products(model, &Recipe::infer(DType::Bf16, 9, 512)), (0, 0), "{model}");
        }
    }

    #[test]
    fn blocks_cut_k_by_how_many_tiles_there_are() {
        // (units of K, chunk, tiles): llama-3-8b in four bits and bf16, small ones.
        for (units, chunk, tiles, expected) in [
            (64, 8, 384, 8),
            (224, 8, 256, 8),
            (128, 4, 1792, 8),
            (32, 8, 8016, 4),
            (9, 8, 60, 8),
            (1, 8, 3000, 1),
            (3, 4, 8, 2),
        ] {
            assert_eq!(splits(units, chunk, tiles, 132), expected, "{units} {tiles}");
        }
    }
}

//! Updates and the gradient norm over many tensors in few launches: their
//! addresses travel as a kernel parameter, so that nothing has to be uploaded.

use plimsoll_arch::DType;
use plimsoll_program::{Op, OpKind, Shard, TensorId, View};

use crate::error::CudaError;
use crate::kernels::{Arg, Grid, argument, suffix};
use crate::launch::Launcher;

/// Tensors, and elements of one block, of a launch of `sum_of_squares`.
const SQUARE_TENSORS: usize = 128;
const SQUARE_CHUNK: usize = 1 << 16;
/// The same of an update.
const TENSORS: usize = 56;
const CHUNK: usize = 8192;

/// Mirrors `SquareTable` of reduce.cu.
#[repr(C)]
struct SquareTable {
    data: [u64; SQUARE_TENSORS],
    elements: [i64; SQUARE_TENSORS],
    first_block: [i32; SQUARE_TENSORS + 1],
    count: i32,
}

/// Mirrors `UpdateTable` of optimizer.cu.
#[repr(C)]
struct UpdateTable {
    param: [u64; TENSORS],
    grad: [u64; TENSORS],
    m: [u64; TENSORS],
    v: [u64; TENSORS],
    master: [u64; TENSORS],
    elements: [i64; TENSORS],
    first: [i64; TENSORS],
    first_block: [i32; TENSORS + 1],
    stream: [u32; TENSORS],
    weight_decay: [f32; TENSORS],
    count: i32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    step: u64,
    norm: u64,
}

// A kernel parameter is at most 4 KB.
const _: () = assert!(size_of::<SquareTable>() <= 4096 && size_of::<UpdateTable>() <= 4096);

/// Blocks, and partial sums, over all gradients.
pub(crate) fn square_blocks(elements: impl Iterator<Item = usize>) -> usize {
    elements.map(|n| n.div_ceil(SQUARE_CHUNK)).sum()
}

/// norm (2) = the global norm of all gradients and the clipping factor.
pub(crate) fn grad_norm(
    l: &Launcher,
    grads: &[TensorId],
    norm: TensorId,
    max_norm: Option<f32>,
    workspace: u64,
) -> Result<(), CudaError> {
    let count = partial_squares(l, grads, workspace)?;
    let args = [
        Arg::Ptr(workspace),
        Arg::Ptr(l.at(norm)),
        Arg::Int(count as i32),
        Arg::Float(max_norm.unwrap_or(0.0)),
    ];
    l.kernels.launch(("reduce", "grad_norm"), l.stream, Grid::line(1, 1024), &args)
}

/// squares (1) = the sum of squares of the gradients that this rank answers for.
pub(crate) fn grad_squares(
    l: &Launcher,
    grads: &[TensorId],
    squares: TensorId,
    workspace: u64,
) -> Result<(), CudaError> {
    // What every rank has alike is counted once.
    let counted = |g: &&TensorId| l.rank == 0 || l.program.tensor(**g).shard != Shard::Whole;
    let grads: Vec<TensorId> = grads.iter().filter(counted).copied().collect();
    let count = partial_squares(l, &grads, workspace)?;
    let args = [Arg::Ptr(workspace), Arg::Ptr(l.at(squares)), Arg::Int(count as i32)];
    l.kernels.launch(("reduce", "grad_squares"), l.stream, Grid::line(1, 1024), &args)
}

/// Sums of squares of pieces of what this rank answers for; how many there are.
fn partial_squares(l: &Launcher, grads: &[TensorId], workspace: u64) -> Result<usize, CudaError> {
    let mut done = 0usize;
    let mut rest = grads;
    while let Some(first) = rest.first() {
        let dtype = l.dtype(*first);
        let same = rest.iter().take(SQUARE_TENSORS).take_while(|g| l.dtype(**g) == dtype).count();
        let (now, later) = rest.split_at(same);
        let mut table = SquareTable {
            data: [0; SQUARE_TENSORS],
            elements: [0; SQUARE_TENSORS],
            first_block: [0; SQUARE_TENSORS + 1],
            count: now.len() as i32,
        };
        let mut blocks = 0;
        for (i, grad) in now.iter().enumerate() {
            let elements = l.program.tensor(*grad).part(l.rank).len();
            (table.data[i], table.elements[i]) = (l.part(*grad), elements as i64);
            blocks += elements.div_ceil(SQUARE_CHUNK);
            table.first_block[i + 1] = blocks as i32;
        }
        rest = later;
        if blocks == 0 {
            continue;
        }
        let partial = workspace + 8 * done as u64;
        let mut pointers = [argument(&table), argument(&partial)];
        let name = format!("sum_of_squares_{}", suffix(dtype));
        l.kernels.launch_pointers(
            ("reduce", &name),
            l.stream,
            Grid::line(blocks, 512),
            &mut pointers,
        )?;
        done += blocks;
    }
    Ok(done)
}

/// What the updates of one launch must agree in.
#[derive(PartialEq)]
struct Shared {
    kernel: String,
    betas: [f32; 3],
    step: TensorId,
    norm: Option<TensorId>,
}

/// One parameter of a launch.
struct Update {
    param: View,
    grad: View,
    m: Option<View>,
    v: Option<View>,
    master: Option<View>,
    weight_decay: f32,
    stream: u32,
}

fn update_of(l: &Launcher, op: &OpKind) -> Option<(Shared, Update)> {
    let name = |family: &str, param: View, state: DType, master: Option<View>| {
        let masters = if master.is_some() { "_masters" } else { "" };
        format!("{family}_{}_{}{masters}", suffix(l.dtype(param.tensor)), suffix(state))
    };
    match *op {
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
            let kernel = name("adamw", param, l.dtype(m.tensor), master);
            let (m, v) = (Some(m), Some(v));
            let update = Update { param, grad, m, v, master, weight_decay, stream };
            Some((Shared { kernel, betas: [beta1, beta2, eps], step, norm }, update))
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
            let state = velocity.map_or(DType::F32, |v| l.dtype(v.tensor));
            let kernel = name("sgd", param, state, master);
            let update = Update { param, grad, m: velocity, v: None, master, weight_decay, stream };
            Some((Shared { kernel, betas: [momentum, 0.0, 0.0], step, norm }, update))
        }
        _ => None,
    }
}

/// Launches the update that `ops` begin with and those behind it that can share
/// its launch; returns how many that are. They touch disjoint tensors.
pub(crate) fn updates(l: &Launcher, ops: &[Op]) -> Result<usize, CudaError> {
    let Some((shared, _)) = ops.first().and_then(|op| update_of(l, &op.kind)) else {
        return Ok(0);
    };
    let mut table = UpdateTable {
        param: [0; TENSORS],
        grad: [0; TENSORS],
        m: [0; TENSORS],
        v: [0; TENSORS],
        master: [0; TENSORS],
        elements: [0; TENSORS],
        first: [0; TENSORS],
        first_block: [0; TENSORS + 1],
        stream: [0; TENSORS],
        weight_decay: [0.0; TENSORS],
        count: 0,
        beta1: shared.betas[0],
        beta2: shared.betas[1],
        eps: shared.betas[2],
        step: l.at(shared.step),
        norm: shared.norm.map_or(0, |n| l.at(n)),
    };
    let (mut taken, mut blocks) = (0usize, 0usize);
    for op in ops.iter().take(TENSORS) {
        let Some((other, update)) = update_of(l, &op.kind) else { break };
        if other != shared {
            break;
        }
        let at = |view: &View| l.updated(view).0;
        let (param, elements, first) = l.updated(&update.param);
        table.param[taken] = param;
        table.grad[taken] = at(&update.grad);
        table.m[taken] = update.m.as_ref().map_or(0, at);
        table.v[taken] = update.v.as_ref().map_or(0, at);
        table.master[taken] = update.master.as_ref().map_or(0, at);
        table.elements[taken] = elements as i64;
        table.first[taken] = first as i64;
        table.stream[taken] = update.stream;
        table.weight_decay[taken] = update.weight_decay;
        blocks += elements.div_ceil(CHUNK);
        taken += 1;
        table.first_block[taken] = blocks as i32;
    }
    table.count = taken as i32;
    if blocks == 0 {
        return Ok(taken);
    }
    let mut pointers = [argument(&table)];
    l.kernels.launch_pointers(
        ("optimizer", &shared.kernel),
        l.stream,
        Grid::line(blocks, 256),
        &mut pointers,
    )?;
    Ok(taken)
}

//! 8-bit AdamW over many tensors in few launches; see `optimizer.rs`.

use plimsoll_program::{Op, OpKind, TensorId, View};

use crate::error::CudaError;
use crate::kernels::{Grid, argument, suffix};
use crate::launch::Launcher;

/// Tensors, and elements of one block, of a launch.
const TENSORS: usize = 48;
const CHUNK: usize = 32768;

/// Mirrors `Update8bitTable` of optimizer8bit.cu.
#[repr(C)]
struct Update8bitTable {
    param: [u64; TENSORS],
    grad: [u64; TENSORS],
    m: [u64; TENSORS],
    v: [u64; TENSORS],
    m_absmax: [u64; TENSORS],
    v_absmax: [u64; TENSORS],
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
const _: () = assert!(size_of::<Update8bitTable>() <= 4096);

/// What the updates of one launch must agree in.
#[derive(PartialEq)]
struct Shared {
    kernel: String,
    betas: [f32; 3],
    step: TensorId,
    norm: Option<TensorId>,
}

fn shared_of(l: &Launcher, op: &OpKind) -> Option<Shared> {
    let OpKind::AdamW8bit { param, master, step, norm, beta1, beta2, eps, .. } = *op else {
        return None;
    };
    let masters = if master.is_some() { "_masters" } else { "" };
    let kernel = format!("adamw8bit_{}{masters}", suffix(l.dtype(param.tensor)));
    Some(Shared { kernel, betas: [beta1, beta2, eps], step, norm })
}

/// Launches the update that `ops` begin with and those behind it that can share
/// its launch; returns how many that are. They touch disjoint tensors.
pub(crate) fn updates(l: &Launcher, ops: &[Op]) -> Result<usize, CudaError> {
    let Some(shared) = ops.first().and_then(|op| shared_of(l, &op.kind)) else { return Ok(0) };
    let none = [0; TENSORS];
    let mut table = Update8bitTable {
        param: none,
        grad: none,
        m: none,
        v: none,
        m_absmax: none,
        v_absmax: none,
        master: none,
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
        if shared_of(l, &op.kind).is_none_or(|other| other != shared) {
            break;
        }
        let OpKind::AdamW8bit {
            param,
            grad,
            m,
            v,
            m_absmax,
            v_absmax,
            master,
            weight_decay,
            stream,
            ..
        } = op.kind
        else {
            unreachable!("it has a launch to share")
        };
        let at = |view: &View| l.updated(view).0;
        let (place, elements, first) = l.updated(&param);
        table.param[taken] = place;
        table.grad[taken] = at(&grad);
        table.m[taken] = at(&m);
        table.v[taken] = at(&v);
        table.m_absmax[taken] = at(&m_absmax);
        table.v_absmax[taken] = at(&v_absmax);
        table.master[taken] = master.as_ref().map_or(0, at);
        table.elements[taken] = elements as i64;
        table.first[taken] = first as i64;
        table.stream[taken] = stream;
        table.weight_decay[taken] = weight_decay;
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
        ("optimizer8bit", &shared.kernel),
        l.stream,
        Grid::line(blocks, 256),
        &mut pointers,
    )?;
    Ok(taken)
}

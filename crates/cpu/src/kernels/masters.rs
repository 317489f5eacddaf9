//! Updates of bf16 parameters in float32: a parameter and the lower half of its master
//! weight are joined, updated as a float32 parameter is, and split again, a few
//! elements at a time. Bits are those of a float32 parameter; see
//! [`plimsoll_quant::split_master`].

use half::bf16;
use plimsoll_quant::{AdamW8bit, STATE_BLOCK, State8bit, join_master, split_master};

use super::elem::Elem;
use super::optimizer::{AdamW, Rounding, adamw_piece, momentum_piece, sgd_piece};
use super::optimizer8bit;
use super::parallel::{GRAIN, Shared, for_each};
use super::simd::simd_fn;

/// Elements that are float32 at a time: they stay in the first cache. Whole blocks of
/// 8-bit state.
const CHUNK: usize = 4 * STATE_BLOCK;

/// [`super::adamw`] of bf16 parameters with the lower halves of their masters: the
/// parameter is not rounded stochastically, bf16 moments are.
pub fn adamw_masters<G: Elem, M: Elem, V: Elem>(
    param: &mut [bf16],
    master: &mut [i16],
    grad: &[G],
    (m, v): (&mut [M], &mut [V]),
    hyper: &AdamW,
    rounding: Rounding,
) {
    let n = param.len();
    assert_eq!([grad.len(), m.len(), v.len()], [n; 3], "elements");
    let (m, v) = (Shared::new(m), Shared::new(v));
    for_each_chunk(param, master, |param, at| {
        let len = param.len();
        // SAFETY: chunks are disjoint.
        let (m, v) = unsafe { (m.slice(at, len), v.slice(at, len)) };
        adamw_piece(param, &grad[at..at + len], m, v, hyper, rounding.piece(at));
    });
}

/// [`super::adamw8bit`] of bf16 parameters with the lower halves of their masters.
pub fn adamw8bit_masters<G: Elem>(
    param: &mut [bf16],
    master: &mut [i16],
    grad: &[G],
    state: State8bit<'_>,
    hyper: &AdamW8bit,
    rounding: Rounding,
) {
    let (n, blocks) = (param.len(), param.len().div_ceil(STATE_BLOCK));
    assert_eq!([grad.len(), state.m.len(), state.v.len()], [n; 3], "elements");
    assert_eq!([state.m_absmax.len(), state.v_absmax.len()], [blocks; 2], "blocks");
    let (m, v) = (Shared::new(state.m), Shared::new(state.v));
    let (m_absmax, v_absmax) = (Shared::new(state.m_absmax), Shared::new(state.v_absmax));
    for_each_chunk(param, master, |param, at| {
        let (len, block, blocks) =
            (param.len(), at / STATE_BLOCK, param.len().div_ceil(STATE_BLOCK));
        // SAFETY: chunks are disjoint, and whole blocks.
        let state = unsafe {
            State8bit {
                m: m.slice(at, len),
                v: v.slice(at, len),
                m_absmax: m_absmax.slice(block, blocks),
                v_absmax: v_absmax.slice(block, blocks),
            }
        };
        optimizer8bit::piece(param, &grad[at..at + len], state, hyper, rounding.piece(at));
    });
}

/// [`super::sgd`] of bf16 parameters with the lower halves of their masters; `momentum` is
/// its buffer, which has started, and its factor.
pub fn sgd_masters<G: Elem, M: Elem>(
    param: &mut [bf16],
    master: &mut [i16],
    grad: &[G],
    momentum: Option<(&mut [M], f32)>,
    (lr, weight_decay, grad_scale): (f32, f32, f32),
    rounding: Rounding,
) {
    let n = param.len();
    assert_eq!(grad.len(), n, "grad");
    let momentum = momentum.map(|(buffer, factor)| {
        assert_eq!(buffer.len(), n, "momentum");
        (Shared::new(buffer), factor)
    });
    for_each_chunk(param, master, |param, at| {
        let len = param.len();
        let (grad, seed) = (&grad[at..at + len], rounding.piece(at));
        match momentum {
            Some((buffer, factor)) => {
                // SAFETY: chunks are disjoint.
                let buffer = unsafe { buffer.slice(at, len) };
                momentum_piece(param, grad, buffer, [lr, weight_decay, grad_scale, factor], seed);
            }
            None => sgd_piece(param, grad, [lr, weight_decay, grad_scale], seed),
        }
    });
}

/// Calls `update` with the masters of some elements and the place of the first, on all
/// threads, and keeps what it makes of them.
fn for_each_chunk(
    param: &mut [bf16],
    master: &mut [i16],
    update: impl Fn(&mut [f32], usize) + Send + Sync,
) {
    let n = param.len();
    assert_eq!(master.len(), n, "master");
    let (param, master) = (Shared::new(param), Shared::new(master));
    for_each(n.div_ceil(GRAIN), true, |task| {
        let end = n.min((task + 1) * GRAIN);
        let mut whole = [0.0f32; CHUNK];
        for at in (task * GRAIN..end).step_by(CHUNK) {
            let len = CHUNK.min(end - at);
            // SAFETY: chunks are disjoint.
            let (param, master) = unsafe { (param.slice(at, len), master.slice(at, len)) };
            let whole = &mut whole[..len];
            join(param, master, whole);
            update(whole, at);
            split(whole, param, master);
        }
    });
}

simd_fn! {
    fn join(param: &[bf16], master: &[i16], whole: &mut [f32]) {
        for ((whole, param), master) in whole.iter_mut().zip(param).zip(master) {
            *whole = join_master(param.to_bits(), *master);
        }
    }
}

simd_fn! {
    fn split(whole: &[f32], param: &mut [bf16], master: &mut [i16]) {
        for ((whole, param), master) in whole.iter().zip(param).zip(master) {
            let (weight, low) = split_master(*whole);
            (*param, *master) = (bf16::from_bits(weight), low);
        }
    }
}

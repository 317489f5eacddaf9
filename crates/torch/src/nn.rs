//! The modules of transformers, PEFT, bitsandbytes and Liger as far as memory goes:
//! what each allocates, what autograd saves, what its backward allocates.
//!
//! Shapes in comments: B batch, T tokens, C hidden, I intermediate, H heads, D head
//! width, V vocabulary; `n` is the number of elements of the tensor at hand.

use std::rc::Rc;

use plimsoll_program::Class;

use crate::tape::{Edge, Mem, Param, Tape, Var};

/// Bytes of a float32.
pub const F32: u64 = 4;

/// How ops choose their types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Types {
    /// Bytes of the type that `torch.autocast` casts to; none without autocast.
    pub autocast: Option<u64>,
}

/// A weight in four bits, as bitsandbytes' `Linear4bit` has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FourBit;

/// The low-rank pair beside a projection.
#[derive(Clone)]
pub struct LoraPair {
    pub a: Rc<Param>,
    pub b: Rc<Param>,
    pub rank: u64,
    /// The adapter's input goes through dropout, which keeps a mask and a copy.
    pub dropout: bool,
}

/// `nn.Linear`, `bnb.nn.Linear4bit`, or either inside `peft`'s `lora.Linear`.
#[derive(Clone)]
pub struct Linear {
    pub weight: Rc<Param>,
    pub bias: Option<Rc<Param>>,
    pub outputs: u64,
    pub inputs: u64,
    pub four_bit: Option<FourBit>,
    pub lora: Option<LoraPair>,
}

impl Linear {
    /// The parameters that a sharding engine must gather for this module.
    fn params(&self) -> Vec<Rc<Param>> {
        let mut params = vec![self.weight.clone()];
        params.extend(self.bias.clone());
        params
    }
}

fn edge_of(param: &Rc<Param>) -> Edge {
    if param.trained { Edge::Param(param.clone()) } else { Edge::None }
}

/// `x.to(dtype)`: a copy unless the type is the same; its backward casts back.
pub fn cast(t: &Tape, x: &Var, width: u64, label: &'static str) -> Var {
    if x.width == width {
        return x.clone();
    }
    let out = t.activation(label, x.elements * width);
    let (elements, before) = (x.elements, x.width);
    t.result(label, (out, elements, width), vec![x.edge.clone()], move |t, g| {
        let cast = t.activation(label, elements * before);
        drop(g);
        vec![Some(cast)]
    })
}

/// A weight as a product reads it: cast under autocast, where the cast of a trained
/// leaf is kept until the context ends. Returns its storage and bytes an element.
fn weight_operand(t: &Tape, types: Types, param: &Rc<Param>) -> (Mem, u64) {
    let data = param.data.borrow().clone();
    let own = || data.clone().expect("the engine gathers a parameter before it is used");
    match types.autocast {
        Some(width) if param.width > width => {
            if param.trained
                && let Some(kept) = t.autocast_cache.borrow().get(&param.index)
            {
                return (kept.clone(), width);
            }
            let copy = t.activation("weight cast", param.elements * width);
            if param.trained {
                t.autocast_cache.borrow_mut().insert(param.index, copy.clone());
            }
            (copy, width)
        }
        _ => (own(), param.width),
    }
}

/// `F.linear` (mm or addmm): saves the input if the weight is trained, the weight if
/// the input wants a gradient.
fn dense(t: &Tape, types: Types, x: &Var, linear: &Linear, label: &'static str) -> Var {
    let engine = t.engine.clone();
    engine.fetch(t, &linear.params(), true);
    let rows = x.elements / linear.inputs;
    let x = match types.autocast {
        Some(width) if x.width > width => cast(t, x, width, "input cast"),
        _ => x.clone(),
    };
    let (weight, width) = weight_operand(t, types, &linear.weight);
    let width = x.width.min(width);
    let out = t.activation(label, rows * linear.outputs * width);
    let trained = linear.weight.trained;
    let saved_x = trained.then(|| x.mem.clone());
    let x_wanted = x.edge.wanted();
    let saved_weight = (x_wanted && engine.saved_weight_stays()).then_some(weight);
    let module = linear.clone();
    let mut inputs = vec![x.edge.clone(), edge_of(&linear.weight)];
    inputs.extend(linear.bias.iter().map(edge_of));
    let n_x = x.elements;
    let result = t.result(label, (out, rows * linear.outputs, width), inputs, move |t, g| {
        t.engine.clone().fetch(t, &module.params(), false);
        let g_x = x_wanted.then(|| t.activation(label, n_x * width));
        let g_w = trained.then(|| {
            let w = &module.weight;
            let half = t.alloc("weight gradient", w.elements * width, Class::Gradient);
            if w.width == width {
                return half;
            }
            // The cast's backward: the gradient in the parameter's own type.
            t.alloc("weight gradient", w.bytes(), Class::Gradient)
        });
        drop((saved_x, saved_weight));
        let mut gradients = vec![g_x, g_w];
        if let Some(bias) = &module.bias {
            let g_b = || t.alloc("bias gradient", bias.bytes(), Class::Gradient);
            gradients.push(bias.trained.then(g_b));
        }
        t.engine.clone().release(t, &module.params(), false);
        drop(g);
        gradients
    });
    engine.release(t, &linear.params(), true);
    result
}

/// bitsandbytes' `MatMul4Bit`: the matrix is multiplied out for each product, forward
/// and backward; nothing of the input is saved, because the weight has no gradient.
fn four_bit(t: &Tape, types: Types, x: &Var, linear: &Linear, label: &'static str) -> Var {
    let width = types.autocast.unwrap_or(2);
    let x16 = cast(t, x, width, "input cast");
    let rows = x.elements / linear.inputs;
    let matrix = linear.inputs * linear.outputs * width;
    let out = t.activation(label, rows * linear.outputs * width);
    drop(t.scratch("dequantized", matrix));
    let n_x = x16.elements;
    let result = t.result(
        label,
        (out, rows * linear.outputs, width),
        vec![x16.edge.clone()],
        move |t, g| {
            let matrix = t.scratch("dequantized", matrix);
            let g_x = t.activation(label, n_x * width);
            drop((matrix, g));
            vec![Some(g_x)]
        },
    );
    cast(t, &result, x.width, "output cast")
}

/// A projection with whatever hangs on it. PEFT casts the input to the adapter's type
/// (float32 unless told otherwise) where autocast is off, and adds in that type.
pub fn linear(t: &Tape, types: Types, x: &Var, module: &Linear, label: &'static str) -> Var {
    let base = match module.four_bit {
        Some(_) => four_bit(t, types, x, module, label),
        None => dense(t, types, x, module, label),
    };
    let Some(lora) = &module.lora else { return base };
    let base = match module.four_bit {
        // `result = result.clone()`: a 4-bit result is a view in some versions.
        Some(_) => {
            let clone = same_size(t, &base, "lora.base clone");
            drop(base);
            clone
        }
        None => base,
    };
    let width = base.width;
    let side = |a: &Rc<Param>, inputs, outputs| Linear {
        weight: a.clone(),
        bias: None,
        outputs,
        inputs,
        four_bit: None,
        lora: None,
    };
    let x_cast = match types.autocast {
        Some(_) => x.clone(),
        None => cast(t, x, lora.a.width, "lora input cast"),
    };
    let x_in = if lora.dropout { dropout(t, &x_cast) } else { x_cast };
    let low = dense(t, types, &x_in, &side(&lora.a, module.inputs, lora.rank), "lora_A");
    drop(x_in);
    let high = dense(t, types, &low, &side(&lora.b, lora.rank, module.outputs), "lora_B");
    drop(low);
    // `* scaling`: a product with a number saves nothing.
    let scaled = same_size(t, &high, "lora scaled");
    drop(high);
    let scaled = match module.four_bit {
        // The 4-bit layer casts the adapter's share back before it adds.
        Some(_) => {
            let narrow = cast(t, &scaled, width, "lora output cast");
            drop(scaled);
            narrow
        }
        None => scaled,
    };
    let sum = add(t, &base, &scaled, "lora sum");
    drop((base, scaled));
    cast(t, &sum, width, "lora result cast")
}

/// An op whose backward is one new tensor of the same size: scaling, neg, clone.
fn same_size(t: &Tape, x: &Var, label: &'static str) -> Var {
    let out = t.activation(label, x.bytes());
    let bytes = x.bytes();
    t.result(label, (out, x.elements, x.width), vec![x.edge.clone()], move |t, g| {
        let g_x = t.activation(label, bytes);
        drop(g);
        vec![Some(g_x)]
    })
}

/// `nn.Dropout` on the adapter's input: saves a mask of one byte an element.
fn dropout(t: &Tape, x: &Var) -> Var {
    let out = t.activation("dropout", x.bytes());
    let mask = t.activation("dropout mask", x.elements);
    let bytes = x.bytes();
    t.result("dropout", (out, x.elements, x.width), vec![x.edge.clone()], move |t, g| {
        let g_x = t.activation("dropout", bytes);
        drop((mask, g));
        vec![Some(g_x)]
    })
}

/// `a + b`: nothing is saved, the gradient goes to both (cast where types differ).
pub fn add(t: &Tape, a: &Var, b: &Var, label: &'static str) -> Var {
    let width = a.width.max(b.width);
    let out = t.activation(label, a.elements * width);
    let (n, widths) = (a.elements, [a.width, b.width]);
    let wanted = [a.edge.wanted(), b.edge.wanted()];
    let inputs = vec![a.edge.clone(), b.edge.clone()];
    t.result(label, (out, n, width), inputs, move |t, g| {
        let gradient = |i: usize| {
            wanted[i].then(|| {
                if widths[i] == width { g.clone() } else { t.activation(label, n * widths[i]) }
            })
        };
        let both = vec![gradient(0), gradient(1)];
        drop(g);
        both
    })
}

/// `nn.Embedding`: saves the ids; backward is a dense table of zeros, filled.
pub fn embedding(t: &Tape, ids: &Mem, tokens: u64, width: u64, table: &Rc<Param>) -> Var {
    let engine = t.engine.clone();
    let params = [table.clone()];
    engine.fetch(t, &params, true);
    let columns = width;
    let out = t.activation("embed_tokens", tokens * columns * table.width);
    let (ids, bytes) = (ids.clone(), table.bytes());
    let rows = tokens;
    let result = t.result(
        "embed_tokens",
        (out, tokens * columns, table.width),
        vec![edge_of(table)],
        move |t, g| {
            let gradient = t.alloc("embed_tokens gradient", bytes, Class::Gradient);
            // The kernel sorts ids: keys and positions, and what the sort needs.
            drop(t.scratch("sorted ids", 4 * rows * 8));
            drop((ids, g));
            vec![Some(gradient)]
        },
    );
    engine.release(t, &params, true);
    result
}

/// `LlamaRMSNorm`: in float32, op by op.
pub fn rms_norm(t: &Tape, x: &Var, weight: &Rc<Param>, columns: u64) -> Var {
    let engine = t.engine.clone();
    let params = [weight.clone()];
    engine.fetch(t, &params, true);
    let (n, rows, width) = (x.elements, x.elements / columns, x.width);
    let x32 = cast(t, x, F32, "norm input in float32");
    let traced = t.traces(&[&x32.edge]);

    // x.pow(2).mean(-1): pow saves x.
    let squares = t.activation("pow", n * F32);
    let saved = traced.then(|| x32.mem.clone());
    let square = t.result("pow", (squares, n, F32), vec![x32.edge.clone()], move |t, g| {
        // grad * (2 * x.pow(1))
        let power = t.scratch("pow", n * F32);
        let twice = t.scratch("pow", n * F32);
        drop(power);
        let g_x = t.activation("pow", n * F32);
        drop((twice, saved, g));
        vec![Some(g_x)]
    });
    let mean = t.activation("variance", rows * F32);
    let mean = t.result("mean", (mean, rows, F32), vec![square.edge.clone()], move |t, g| {
        let g_x = t.activation("mean", n * F32);
        drop(g);
        vec![Some(g_x)]
    });
    drop(square);
    let shifted = same_size(t, &mean, "variance");
    drop(mean);
    let root = t.activation("rsqrt", rows * F32);
    let saved = traced.then(|| root.clone());
    let root = t.result("rsqrt", (root, rows, F32), vec![shifted.edge.clone()], move |t, g| {
        let g_x = t.activation("rsqrt", rows * F32);
        drop((saved, g));
        vec![Some(g_x)]
    });
    drop(shifted);

    // x * rsqrt: saves both.
    let normed = t.activation("normed in float32", n * F32);
    let saved = traced.then(|| (x32.mem.clone(), root.mem.clone()));
    let inputs = vec![x32.edge.clone(), root.edge.clone()];
    drop((x32, root));
    let normed = t.result("norm", (normed, n, F32), inputs, move |t, g| {
        let g_x = t.activation("norm", n * F32);
        let product = t.scratch("norm", n * F32);
        let g_root = t.activation("norm", rows * F32);
        drop((product, saved, g));
        vec![Some(g_x), Some(g_root)]
    });
    let normed = cast(t, &normed, width, "normed");

    // weight * x: saves x only where the weight is trained.
    let out_width = width.max(weight.width);
    let out = t.activation("norm output", n * out_width);
    let trained = weight.trained;
    let saved = trained.then(|| normed.mem.clone());
    let x_wanted = normed.edge.wanted();
    let module = weight.clone();
    let inputs = vec![edge_of(weight), normed.edge.clone()];
    drop(normed);
    let result = t.result("norm weight", (out, n, out_width), inputs, move |t, g| {
        let params = [module.clone()];
        t.engine.clone().fetch(t, &params, false);
        let g_w = trained.then(|| {
            let product = t.scratch("norm weight", n * out_width);
            let sum = t.alloc("norm weight gradient", module.bytes(), Class::Gradient);
            drop(product);
            sum
        });
        let g_x = x_wanted.then(|| t.activation("norm weight", n * width));
        drop((saved, g));
        t.engine.clone().release(t, &params, false);
        vec![g_w, g_x]
    });
    engine.release(t, &params, true);
    result
}

/// `LigerRMSNormFunction` (liger-kernel 0.8.5): saves the input and one number a row;
/// backward writes over its incoming gradient. `programs` is the number of partial sums
/// of the weight's gradient: one for each multiprocessor.
pub fn liger_rms_norm(t: &Tape, x: &Var, weight: &Rc<Param>, columns: u64, programs: u64) -> Var {
    let engine = t.engine.clone();
    let params = [weight.clone()];
    engine.fetch(t, &params, true);
    let (n, rows, width) = (x.elements, x.elements / columns, x.width);
    let out = t.activation("norm output", n * width);
    let root = t.activation("rstd", rows * F32);
    let saved = (x.mem.clone(), root);
    let (trained, module) = (weight.trained, weight.clone());
    let inputs = vec![x.edge.clone(), edge_of(weight)];
    let result = t.result("liger norm", (out, n, width), inputs, move |t, g| {
        let params = [module.clone()];
        t.engine.clone().fetch(t, &params, false);
        let g_w = trained.then(|| {
            let partial = t.scratch("norm partial sums", programs * columns * F32);
            let sum = t.scratch("norm weight gradient", columns * F32);
            drop(partial);
            let g_w = t.alloc("norm weight gradient", module.bytes(), Class::Gradient);
            drop(sum);
            g_w
        });
        drop(saved);
        t.engine.clone().release(t, &params, false);
        vec![Some(g), g_w]
    });
    engine.release(t, &params, true);
    result
}

/// `apply_rotary_pos_emb` on queries or keys: `x * cos + rotate_half(x) * sin`.
pub fn rotary(t: &Tape, x: Var, tables: &[Mem], table_width: u64) -> Var {
    let (n, width) = (x.elements, x.width.max(table_width));
    let direct = t.activation("x * cos", n * width);
    let negated = t.scratch("-x2", n / 2 * x.width);
    let turned = t.scratch("rotate_half", n * x.width);
    drop(negated);
    let rotated = t.activation("rotate_half * sin", n * width);
    drop(turned);
    let out = t.activation("rotary", n * width);
    drop((direct, rotated));
    let saved = tables.to_vec();
    let narrow = x.width;
    t.result("rotary", (out, n, width), vec![x.edge.clone()], move |t, g| {
        let by_sin = t.activation("rotary", n * narrow);
        let negated = t.activation("rotary", n / 2 * narrow);
        // Each half comes back as zeros of the whole, then both are added.
        let half = t.activation("rotary", n * narrow);
        drop(negated);
        let other = t.scratch("rotary", n * narrow);
        drop((by_sin, other));
        let by_cos = t.activation("rotary", n * narrow);
        drop((by_cos, saved, g));
        vec![Some(half)]
    })
}

/// Liger's rotary kernel: in place, forward and backward.
pub fn liger_rotary(t: &Tape, x: Var, tables: &[Mem]) -> Var {
    let saved = tables.to_vec();
    let shape = (x.mem.clone(), x.elements, x.width);
    t.result("liger rotary", shape, vec![x.edge.clone()], move |_, g| {
        drop(saved);
        vec![Some(g)]
    })
}

/// `.contiguous()` of a transposed tensor.
pub fn contiguous(t: &Tape, x: Var, label: &'static str) -> Var {
    let out = t.activation(label, x.bytes());
    t.result(label, (out, x.elements, x.width), vec![x.edge.clone()], |_, g| vec![Some(g)])
}

/// `repeat_kv`: expand and reshape, which copies; backward sums over the repeats.
pub fn repeat_kv(t: &Tape, x: Var, times: u64) -> Var {
    if times == 1 {
        return x;
    }
    let n = x.elements * times;
    let out = t.activation("repeat_kv", n * x.width);
    let bytes = x.bytes();
    t.result("repeat_kv", (out, n, x.width), vec![x.edge.clone()], move |t, g| {
        let g_x = t.activation("repeat_kv", bytes);
        drop(g);
        vec![Some(g_x)]
    })
}

/// Shape of one attention call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    pub batch: u64,
    pub tokens: u64,
    pub heads: u64,
    pub kv_heads: u64,
    pub head_dim: u64,
}

/// Which kernel `scaled_dot_product_attention` ends in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// FlashAttention-2: no mask; keys and values as they are under `enable_gqa`.
    Flash,
    /// CUTLASS memory-efficient attention: what a mask leads to.
    Efficient,
}

/// Fused attention: saves queries, keys, values, the output and a logarithm for each row.
pub fn fused_attention(
    t: &Tape,
    [q, k, v]: [&Var; 3],
    shape: AttentionShape,
    kernel: Kernel,
    mask: Option<Mem>,
) -> Var {
    let AttentionShape { batch, tokens, heads, kv_heads, head_dim } = shape;
    let (n, n_kv, width) = (q.elements, k.elements, q.width);
    let out = t.activation("attention", n * width);
    // The efficient kernel pads its rows to 32.
    let rows = if kernel == Kernel::Efficient { tokens.next_multiple_of(32) } else { tokens };
    let lse = t.activation("logsumexp", batch * heads * rows * F32);
    // A mask whose rows are not 16 bytes apart is copied with padding, and the copy saved.
    let mask = mask.map(|mask| {
        if (tokens * width) % 16 == 0 {
            return mask;
        }
        let padded = tokens.next_multiple_of(8);
        t.activation("padded mask", batch * tokens * padded * width)
    });
    let saved = (q.mem.clone(), k.mem.clone(), v.mem.clone(), out.clone(), lse, mask);
    let inputs = vec![q.edge.clone(), k.edge.clone(), v.edge.clone()];
    t.result("attention", (out, n, width), inputs, move |t, g| {
        // Row sums of gradient times output, and float32 sums of the query gradient.
        let rounded = tokens.next_multiple_of(128);
        let delta = t.scratch("attention delta", batch * heads * rounded * F32);
        let sums = t.scratch("attention dq in float32", batch * rounded * heads * head_dim * F32);
        let g_q = t.activation("attention dq", n * width);
        let g_k = t.activation("attention dk", n_kv * width);
        let g_v = t.activation("attention dv", n_kv * width);
        if kernel == Kernel::Flash && kv_heads < heads {
            // Gradients for each query head, summed over the group afterwards.
            let expanded = [(); 2].map(|()| t.scratch("attention dk, dv by head", n * width));
            drop(expanded);
        }
        drop((delta, sums, saved, g));
        vec![Some(g_q), Some(g_k), Some(g_v)]
    })
}

/// `eager_attention_forward`: scores and probabilities exist, (B, H, T, T).
pub fn eager_attention(t: &Tape, types: Types, [q, k, v]: [&Var; 3], shape: AttentionShape) -> Var {
    let AttentionShape { batch, tokens, heads, .. } = shape;
    let scores = batch * heads * tokens * tokens;
    let width = types.autocast.unwrap_or(q.width).min(q.width);
    let (q, k, v) = (cast(t, q, width, "q"), cast(t, k, width, "k"), cast(t, v, width, "v"));
    let (n_q, n_k) = (q.elements, k.elements);

    // matmul(q, k^T) saves both; scaling and the mask save nothing.
    let product = t.activation("scores", scores * width);
    let saved = (q.mem.clone(), k.mem.clone());
    let inputs = vec![q.edge.clone(), k.edge.clone()];
    drop((q, k));
    let product = t.result("scores", (product, scores, width), inputs, move |t, g| {
        let g_q = t.activation("scores", n_q * width);
        let g_k = t.activation("scores", n_k * width);
        drop((saved, g));
        vec![Some(g_q), Some(g_k)]
    });
    let scaled = same_size(t, &product, "scores");
    drop(product);
    let masked = t.activation("masked scores", scaled.bytes());
    let shape = (masked, scores, width);
    let masked = t.result("mask", shape, vec![scaled.edge.clone()], |_, g| vec![Some(g)]);
    drop(scaled);

    // softmax in float32 saves its result.
    let soft = t.activation("softmax", scores * F32);
    let saved = soft.clone();
    let inputs = vec![masked.edge.clone()];
    drop(masked);
    let soft = t.result("softmax", (soft, scores, F32), inputs, move |t, g| {
        let g_32 = t.scratch("softmax", scores * F32);
        let g_x = t.activation("softmax", scores * width);
        drop((g_32, saved, g));
        vec![Some(g_x)]
    });
    let weights = cast(t, &soft, width, "attention weights");
    drop(soft);

    let out = t.activation("attention", n_q * width);
    let saved = (weights.mem.clone(), v.mem.clone());
    let inputs = vec![weights.edge.clone(), v.edge.clone()];
    let n_v = v.elements;
    drop((weights, v));
    let out = t.result("attention", (out, n_q, width), inputs, move |t, g| {
        let g_w = t.activation("attention", scores * width);
        let g_v = t.activation("attention", n_v * width);
        drop((saved, g));
        vec![Some(g_w), Some(g_v)]
    });
    contiguous(t, out, "attention output")
}

/// `act_fn(gate) * up`: silu saves its input, the product both factors.
pub fn swiglu(t: &Tape, gate: Var, up: Var) -> Var {
    let (n, width) = (gate.elements, gate.width);
    let silu = t.activation("silu", n * width);
    let saved = gate.mem.clone();
    let inputs = vec![gate.edge.clone()];
    drop(gate);
    let silu = t.result("silu", (silu, n, width), inputs, move |t, g| {
        let g_x = t.activation("silu", n * width);
        drop((saved, g));
        vec![Some(g_x)]
    });
    let out = t.activation("silu * up", n * width);
    let saved = (silu.mem.clone(), up.mem.clone());
    let inputs = vec![silu.edge.clone(), up.edge.clone()];
    drop((silu, up));
    t.result("silu * up", (out, n, width), inputs, move |t, g| {
        let g_silu = t.activation("silu * up", n * width);
        let g_up = t.activation("silu * up", n * width);
        drop((saved, g));
        vec![Some(g_silu), Some(g_up)]
    })
}

/// `LigerSiLUMulFunction`: saves gate and up, and backward writes over both.
pub fn liger_swiglu(t: &Tape, gate: Var, up: Var) -> Var {
    let (n, width) = (gate.elements, gate.width);
    let out = t.activation("silu * up", n * width);
    let saved = (gate.mem.clone(), up.mem.clone());
    let inputs = vec![gate.edge.clone(), up.edge.clone()];
    drop((gate, up));
    t.result("liger swiglu", (out, n, width), inputs, move |_, g| {
        let (gate, up) = saved;
        drop(g);
        vec![Some(gate), Some(up)]
    })
}

//! The decoder as transformers builds it: parameters in their order of creation, and
//! the forward pass whose graph the backward pass walks.

use std::cell::RefCell;
use std::rc::Rc;

use plimsoll_arch::{Architecture, Family};
use plimsoll_program::Class;

use crate::head::{LossPath, LossShape, head_and_loss};
use crate::nn::{
    AttentionShape, F32, FourBit, Kernel, Linear, LoraPair, Types, add, cast, contiguous,
    eager_attention, embedding, fused_attention, liger_rms_norm, liger_rotary, liger_swiglu,
    linear, repeat_kv, rms_norm, rotary, swiglu,
};
use crate::recipe::{Attention, Method, Modules, Precision, TorchRecipe, Version};
use crate::tape::{Edge, Mem, Param, Tape, Var};

/// One decoder layer.
pub struct Layer {
    input_norm: Rc<Param>,
    post_norm: Rc<Param>,
    q_norm: Option<Rc<Param>>,
    k_norm: Option<Rc<Param>>,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// The whole model.
pub struct Net {
    pub arch: Architecture,
    pub recipe: TorchRecipe,
    types: Types,
    embed: Rc<Param>,
    layers: Vec<Layer>,
    norm: Rc<Param>,
    head: Linear,
    /// In the order of creation, adapters last.
    pub params: Vec<Rc<Param>>,
    /// Multiprocessors of the device: partial sums of Liger's norms.
    programs: u64,
}

/// What every layer of one forward pass shares.
#[derive(Clone)]
struct Shared {
    /// Rotary tables, where one pair serves all layers.
    tables: Option<Vec<Mem>>,
    mask: Option<Mem>,
    /// Keys and values that a `DynamicCache` keeps until the outputs are dropped.
    cache: Option<Rc<RefCell<Vec<Var>>>>,
}

/// Makes parameters in order.
struct Maker<'a> {
    recipe: &'a TorchRecipe,
    params: Vec<Rc<Param>>,
}

impl Maker<'_> {
    fn param(&mut self, name: String, elements: usize, width: u64, trained: bool) -> Rc<Param> {
        let param = Rc::new(Param {
            name,
            elements: elements as u64,
            width,
            packed: None,
            trained,
            data: RefCell::default(),
            grad: RefCell::default(),
            index: self.params.len(),
        });
        self.params.push(param.clone());
        param
    }

    fn width(&self) -> u64 {
        if self.recipe.weights16() { 2 } else { F32 }
    }

    /// The type of what is not quantized: float32 after `prepare_model_for_kbit_training`.
    fn outer_width(&self) -> u64 {
        if self.recipe.quant.is_some_and(|q| q.prepare) { F32 } else { self.width() }
    }

    fn full(&self) -> bool {
        self.recipe.method == Method::Full
    }

    fn saves(&self, module: &str) -> bool {
        match &self.recipe.method {
            Method::Lora(lora) => lora.modules_to_save.iter().any(|m| m == module),
            _ => false,
        }
    }

    fn linear(
        &mut self,
        layer: usize,
        name: &str,
        outputs: usize,
        inputs: usize,
        bias: bool,
    ) -> Linear {
        let full_name = format!("layers.{layer}.{name}");
        let four_bit = self.recipe.quant.map(|_| FourBit);
        let (width, trained) = (self.width(), self.full());
        let elements = outputs * inputs;
        let weight = match self.recipe.quant {
            None => self.param(format!("{full_name}.weight"), elements, width, trained),
            Some(quant) => {
                let packed = four_bit_bytes(elements as u64, quant.double_quant);
                let index = self.params.len();
                let param = Rc::new(Param {
                    name: format!("{full_name}.weight"),
                    elements: elements as u64,
                    width,
                    packed: Some(packed),
                    trained: false,
                    data: RefCell::default(),
                    grad: RefCell::default(),
                    index,
                });
                self.params.push(param.clone());
                param
            }
        };
        let bias = bias.then(|| self.param(format!("{full_name}.bias"), outputs, width, trained));
        Linear {
            weight,
            bias,
            outputs: outputs as u64,
            inputs: inputs as u64,
            four_bit,
            lora: None,
        }
    }
}

/// Bytes of a matrix in four bits with its scales: blocks of 64, whose float32 scales are
/// one byte each under double quantization, with blocks of 256 of their own.
fn four_bit_bytes(elements: u64, double_quant: bool) -> u64 {
    let blocks = elements.div_ceil(64);
    let scales = if double_quant { blocks + blocks.div_ceil(256) * F32 } else { blocks * F32 };
    elements.div_ceil(2) + scales
}

impl Net {
    pub fn new(arch: &Architecture, recipe: &TorchRecipe, programs: u64) -> Net {
        let mut make = Maker { recipe, params: Vec::new() };
        let (c, i, v) = (arch.hidden_size, arch.intermediate_size, arch.vocab_size);
        let full = make.full();
        let (outer, saved) = (make.outer_width(), make.saves("embed_tokens"));
        let embed = make.param("embed_tokens.weight".into(), v * c, outer, full || saved);
        let mut layers: Vec<Layer> = (0..arch.num_hidden_layers)
            .map(|l| {
                let bias = arch.attention_bias;
                let (q_width, kv_width) = (arch.q_width(), arch.kv_width());
                let q = make.linear(l, "self_attn.q_proj", q_width, c, bias);
                let k = make.linear(l, "self_attn.k_proj", kv_width, c, bias);
                let v = make.linear(l, "self_attn.v_proj", kv_width, c, bias);
                let o = make.linear(l, "self_attn.o_proj", c, q_width, false);
                let mut norm = |name: &str, elements| {
                    make.param(format!("layers.{l}.{name}.weight"), elements, outer, full)
                };
                let q_norm = arch.qk_norm.then(|| norm("self_attn.q_norm", arch.head_dim));
                let k_norm = arch.qk_norm.then(|| norm("self_attn.k_norm", arch.head_dim));
                let gate = make.linear(l, "mlp.gate_proj", i, c, false);
                let up = make.linear(l, "mlp.up_proj", i, c, false);
                let down = make.linear(l, "mlp.down_proj", c, i, false);
                let mut norm =
                    |name: &str| make.param(format!("layers.{l}.{name}.weight"), c, outer, full);
                let input_norm = norm("input_layernorm");
                let post_norm = norm("post_attention_layernorm");
                Layer { input_norm, post_norm, q_norm, k_norm, q, k, v, o, gate, up, down }
            })
            .collect();
        let norm = make.param("norm.weight".into(), c, outer, full);
        let head_weight = if arch.tie_word_embeddings {
            embed.clone()
        } else {
            let saved = make.saves("lm_head");
            make.param("lm_head.weight".into(), v * c, outer, full || saved)
        };
        let head = Linear {
            weight: head_weight,
            bias: None,
            outputs: v as u64,
            inputs: c as u64,
            four_bit: None,
            lora: None,
        };
        if let Method::Lora(lora) = &recipe.method {
            let width = if lora.float32 { F32 } else { make.width() };
            for (l, layer) in layers.iter_mut().enumerate() {
                let Layer { q, k, v, o, gate, up, down, .. } = layer;
                let modules = [
                    ("q_proj", q),
                    ("k_proj", k),
                    ("v_proj", v),
                    ("o_proj", o),
                    ("gate_proj", gate),
                    ("up_proj", up),
                    ("down_proj", down),
                ];
                for (name, module) in modules {
                    if !lora.target_modules.iter().any(|m| m == name) {
                        continue;
                    }
                    let mut side = |side: &str, columns: u64| {
                        let elements = (lora.r * columns) as usize;
                        make.param(format!("layers.{l}.{name}.lora_{side}"), elements, width, true)
                    };
                    let (a, b) = (side("A", module.inputs), side("B", module.outputs));
                    let (rank, dropout) = (lora.r, lora.lora_dropout);
                    module.lora = Some(LoraPair { a, b, rank, dropout });
                }
            }
        }
        let autocast = matches!(recipe.precision, Precision::Autocast16 { .. }).then_some(2);
        Net {
            arch: arch.clone(),
            recipe: recipe.clone(),
            types: Types { autocast },
            embed,
            layers,
            norm,
            head,
            params: make.params,
            programs,
        }
    }

    /// Puts all parameters and buffers on the device, one by one.
    pub fn load(&self, t: &Tape) -> Vec<Mem> {
        t.enter("load".into());
        for param in &self.params {
            t.enter(param.name.clone());
            if param.packed.is_some() {
                // bitsandbytes quantizes on the device: the 16-bit matrix is there first.
                let dense = t.scratch("weight before quantization", param.elements * 2);
                *param.data.borrow_mut() = Some(t.alloc("", param.bytes(), Class::Weight));
                drop(dense);
                continue;
            }
            *param.data.borrow_mut() = Some(t.alloc("", param.bytes(), Class::Weight));
        }
        t.enter("rotary_emb".into());
        self.buffers(t)
    }

    /// Buffers of the rotary modules.
    pub fn buffers(&self, t: &Tape) -> Vec<Mem> {
        let inverse = || t.alloc("inv_freq", self.arch.head_dim as u64 / 2 * F32, Class::Weight);
        // One module for the model; earlier one for each layer, with tables of cosines
        // and sines up to max_position_embeddings.
        let last = if self.arch.family == Family::Llama { Version(4, 42) } else { Version(4, 44) };
        if self.recipe.transformers > last {
            return vec![inverse(), inverse()];
        }
        let width = if self.recipe.weights16() { 2 } else { F32 };
        let table = (self.arch.max_position_embeddings * self.arch.head_dim) as u64 * width;
        let mut buffers = Vec::new();
        for _ in 0..self.arch.num_hidden_layers {
            buffers.push(inverse());
            buffers.push(t.alloc("cos_cached", table, Class::Weight));
            buffers.push(t.alloc("sin_cached", table, Class::Weight));
        }
        buffers
    }

    fn loss_path(&self) -> LossPath {
        let recipe = &self.recipe;
        if recipe.liger.fused_linear_cross_entropy {
            return LossPath::Liger { in_place: recipe.liger_version >= Version(0, 5) };
        }
        if recipe.compile {
            return LossPath::Compiled;
        }
        match recipe.modules {
            Modules::Fms => LossPath::FusedCrossEntropy,
            Modules::Litgpt => LossPath::NativeLogits,
            Modules::Transformers => match recipe.transformers {
                v if v <= Version(4, 45) => LossPath::FloatLogits,
                v if v < Version(4, 50) => LossPath::FloatInLoss,
                _ => LossPath::ShiftLabels,
            },
        }
    }

    /// Whether a chain of element-wise ops is one kernel that saves its inputs only: Liger
    /// has such kernels, and Inductor makes them. (What Inductor's partitioner keeps of a
    /// layer is what these save: the 16-bit inputs of norms, products and attention.)
    fn fused(&self, liger: bool) -> bool {
        liger || self.recipe.compile
    }

    fn norm(&self, t: &Tape, x: &Var, weight: &Rc<Param>, columns: u64) -> Var {
        if self.fused(self.recipe.liger.rms_norm) {
            liger_rms_norm(t, x, weight, columns, self.programs)
        } else {
            rms_norm(t, x, weight, columns)
        }
    }

    /// Forward to the loss of one micro-batch; beside it what the outputs keep alive.
    pub fn forward(self: &Rc<Net>, t: &Tape, ids: &Mem) -> (Var, Vec<Var>) {
        let (batch, tokens) = (self.recipe.batch, self.recipe.seq);
        let c = self.arch.hidden_size as u64;
        t.enter("embed_tokens".into());
        let mut x = embedding(t, ids, batch * tokens, c, &self.embed);
        if !x.edge.wanted() && self.recipe.gradient_checkpointing.is_some() {
            // `enable_input_require_grads`: frozen embeddings still start a graph.
            x.edge = Edge::Capture(Rc::default());
        }
        let width = x.width;
        let masked = self.recipe.padded && self.recipe.attention != Attention::FlashAttention2;
        let mask = (masked && tokens > 1).then(|| {
            // Causal and padding masks are combined out of place.
            let causal = t.scratch("causal mask", batch * tokens * tokens * width);
            let padding = t.scratch("padding mask", batch * tokens * tokens);
            let mask = t.activation("attention mask", batch * tokens * tokens * width);
            drop((causal, padding));
            mask
        });
        let old = self.recipe.transformers < Version(4, 45);
        let cache = self.recipe.gradient_checkpointing.is_none()
            && self.recipe.transformers < Version(5, 0);
        let shared = Shared {
            tables: (!old).then(|| self.rotary_tables(t, width)),
            mask,
            cache: cache.then(Rc::default),
        };
        for layer in 0..self.layers.len() {
            t.enter(format!("layers.{layer}"));
            let net = self.clone();
            let env = shared.clone();
            x = unit_boundary(t, x, layer, true);
            let block = move |t: &Tape, x: Var| net.block(t, x, layer, &env);
            x = match self.recipe.gradient_checkpointing {
                Some(how) => t.checkpoint(x, how.use_reentrant, Rc::new(block)),
                None => block(t, x),
            };
            x = unit_boundary(t, x, layer, false);
        }
        t.enter("norm".into());
        let hidden = self.norm(t, &x, &self.norm, c);
        drop(x);
        t.enter("lm_head".into());
        let shape = LossShape { batch, tokens, vocabulary: self.arch.vocab_size as u64, hidden: c };
        let (loss, mut kept) =
            head_and_loss(t, self.types, hidden, &self.head, self.loss_path(), shape);
        if let Some(cache) = &shared.cache {
            kept.append(&mut cache.borrow_mut());
        }
        (loss, kept)
    }

    /// Forward over a prompt without a graph; returns keys and values layer by layer.
    pub fn prefill(self: &Rc<Net>, t: &Tape, ids: &Mem) -> Vec<Mem> {
        let c = self.arch.hidden_size as u64;
        let (batch, tokens) = (self.recipe.batch, self.recipe.seq);
        t.enter("embed_tokens".into());
        let mut x = embedding(t, ids, batch * tokens, c, &self.embed);
        let cache = Rc::new(RefCell::new(Vec::new()));
        let shared = Shared {
            tables: Some(self.rotary_tables(t, x.width)),
            mask: None,
            cache: Some(cache.clone()),
        };
        for layer in 0..self.layers.len() {
            t.enter(format!("layers.{layer}"));
            x = self.block(t, x, layer, &shared);
        }
        t.enter("lm_head".into());
        let last = Var { elements: batch * c, ..self.norm(t, &x, &self.norm, c) };
        let logits = linear(t, self.types, &last, &self.head, "logits");
        drop(cast(t, &logits, F32, "logits.float()"));
        cache.take().into_iter().map(|v: Var| v.mem).collect()
    }

    /// Cosines and sines in the type of the hidden states, (1, T, D) each.
    fn rotary_tables(&self, t: &Tape, width: u64) -> Vec<Mem> {
        let n = self.recipe.seq * self.arch.head_dim as u64;
        let wide = [(); 2].map(|()| t.scratch("rotary angles", n * F32));
        let tables = [(); 2].map(|()| t.activation("rotary tables", n * width)).to_vec();
        drop(wide);
        tables
    }

    fn block(&self, t: &Tape, x: Var, index: usize, shared: &Shared) -> Var {
        let layer = &self.layers[index];
        let c = self.arch.hidden_size as u64;
        let types = self.types;
        let normed = self.norm(t, &x, &layer.input_norm, c);
        let attended = self.attention(t, normed, layer, shared);
        let residual = add(t, &x, &attended, "residual");
        drop((x, attended));
        let normed = self.norm(t, &residual, &layer.post_norm, c);
        let gate = linear(t, types, &normed, &layer.gate, "gate_proj");
        let up = linear(t, types, &normed, &layer.up, "up_proj");
        let product = if self.fused(self.recipe.liger.swiglu) {
            liger_swiglu(t, gate, up)
        } else {
            swiglu(t, gate, up)
        };
        let down = linear(t, types, &product, &layer.down, "down_proj");
        // `hidden_states` names the normed input until the MLP returns.
        drop((product, normed));
        add(t, &residual, &down, "residual")
    }

    fn attention(&self, t: &Tape, x: Var, layer: &Layer, shared: &Shared) -> Var {
        let arch = &self.arch;
        let types = self.types;
        let recipe = &self.recipe;
        let width = x.width;
        let q = linear(t, types, &x, &layer.q, "q_proj");
        let k = linear(t, types, &x, &layer.k, "k_proj");
        let v = linear(t, types, &x, &layer.v, "v_proj");
        drop(x);
        let head = arch.head_dim as u64;
        let head_norm = |x: Var, weight: &Option<Rc<Param>>| match weight {
            Some(weight) => self.norm(t, &x, weight, head),
            None => x,
        };
        let (q, k) = (head_norm(q, &layer.q_norm), head_norm(k, &layer.k_norm));
        let tables = match &shared.tables {
            Some(tables) => tables.clone(),
            None => self.rotary_tables(t, width),
        };
        let rotated = |x: Var| {
            if self.fused(recipe.liger.rope) {
                liger_rotary(t, x, &tables)
            } else {
                rotary(t, x, &tables, width)
            }
        };
        let (q, k) = (rotated(q), rotated(k));
        drop(tables);
        if let Some(cache) = &shared.cache {
            cache.borrow_mut().extend([k.clone(), v.clone()]);
        }
        let shape = AttentionShape {
            batch: recipe.batch,
            tokens: recipe.seq,
            heads: arch.num_attention_heads as u64,
            kv_heads: arch.num_key_value_heads as u64,
            head_dim: head,
        };
        let groups = shape.heads / shape.kv_heads;
        let grouped = match recipe.attention {
            Attention::FlashAttention2 => true,
            Attention::Eager => false,
            Attention::Sdpa => {
                shared.mask.is_none()
                    && recipe.transformers >= Version(4, 50)
                    && recipe.torch >= Version(2, 5)
                    && !recipe.compile
            }
        };
        let (k, v) =
            if grouped { (k, v) } else { (repeat_kv(t, k, groups), repeat_kv(t, v, groups)) };
        let out = if recipe.attention == Attention::Eager {
            let out = eager_attention(t, types, [&q, &k, &v], shape);
            drop((q, k, v));
            out
        } else {
            // Masked attention first makes its operands contiguous (transformers < 4.48).
            let copies = shared.mask.is_some() && recipe.transformers < Version(4, 48);
            let operand = |x: Var, copied: bool| {
                let x = if copied { contiguous(t, x, "contiguous") } else { x };
                let half = types.autocast.filter(|w| *w < x.width);
                half.map_or(x.clone(), |w| cast(t, &x, w, "attention input cast"))
            };
            let repeated = groups > 1 && !grouped;
            let (q, k, v) = (
                operand(q, copies),
                operand(k, copies && !repeated),
                operand(v, copies && !repeated),
            );
            let kernel = if shared.mask.is_some() || q.width > 2 {
                Kernel::Efficient
            } else {
                Kernel::Flash
            };
            fused_attention(t, [&q, &k, &v], shape, kernel, shared.mask.clone())
        };
        linear(t, types, &out, &layer.o, "o_proj")
    }

    /// The parameters of each layer, and of what is around them, for engines that shard by
    /// layer.
    pub fn units(&self) -> (Vec<Vec<Rc<Param>>>, Vec<Rc<Param>>) {
        let mut layers: Vec<Vec<Rc<Param>>> = vec![Vec::new(); self.layers.len()];
        let mut root = Vec::new();
        for param in &self.params {
            let index = param.name.strip_prefix("layers.").and_then(|rest| {
                let (index, _) = rest.split_once('.')?;
                index.parse::<usize>().ok()
            });
            match index {
                Some(index) => layers[index].push(param.clone()),
                None => root.push(param.clone()),
            }
        }
        (layers, root)
    }
}

/// Where a layer begins or ends: engines that gather whole layers act here, in both
/// directions.
fn unit_boundary(t: &Tape, x: Var, unit: usize, begins: bool) -> Var {
    let engine = t.engine.clone();
    if !engine.by_layer() {
        return x;
    }
    if begins {
        engine.before_layer(t, unit, true);
    } else {
        engine.after_layer(t, unit, true);
    }
    let shape = (x.mem.clone(), x.elements, x.width);
    t.result("layer", shape, vec![x.edge.clone()], move |t, g| {
        let engine = t.engine.clone();
        if begins {
            engine.after_layer(t, unit, false);
        } else {
            engine.before_layer(t, unit, false);
        }
        vec![Some(g)]
    })
}

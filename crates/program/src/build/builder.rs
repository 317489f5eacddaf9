//! The pen that programs are written with: it makes tensors and appends ops.

use std::collections::HashMap;

use plimsoll_arch::{Architecture, DType};
use plimsoll_quant::{MIN_8BIT_ELEMENTS, STATE_BLOCK};

use crate::{
    AttentionShape, Class, Home, Method, NESTED_BLOCK, Nested, Op, OpKind, Optimizer, PRODUCTS,
    Phase, Program, QUANT_BLOCK, Quant, QuantizedMatrix, QuantizedPart, Recipe, Section, Shard,
    Sharding, StepScalars, Target, Tensor, TensorId, View, WeightPart, master_name, quantized_name,
    weight_parts,
};

/// A tensor that can be trained.
#[derive(Clone, Copy, Debug)]
pub(super) struct Param {
    pub value: TensorId,
    /// Position among all parameters.
    pub index: usize,
}

/// The matrix of a product, with what is beside it.
pub(super) struct Linear {
    /// `layers.3.attn.qkv`
    pub name: String,
    pub weight: Weight, // (N, K)
    pub adapters: Option<Adapters>,
}

/// How a matrix is stored.
pub(super) enum Weight {
    Dense(Param),
    Quantized(QuantizedMatrix),
}

/// The adapters of one product: y += scale B (A x) for some of its outputs.
pub(super) struct Adapters {
    pub a: Param, // (adapters * rank, K), one below the other
    pub b: Vec<Output>,
}

/// One adapter's share of a product's outputs.
pub(super) struct Output {
    pub b: Param, // (cols, rank)
    /// First output.
    pub col: usize,
    pub cols: usize,
}

/// The parameters of one block.
pub(super) struct Layer {
    pub index: usize,
    pub input_norm: Param,       // (C)
    pub qkv: Linear,             // ((H + 2K) D, C)
    pub qkv_bias: Option<Param>, // ((H + 2K) D)
    pub q_norm: Option<Param>,   // (D)
    pub k_norm: Option<Param>,   // (D)
    pub o: Linear,               // (C, H D)
    pub post_norm: Param,        // (C)
    pub gate_up: Linear,         // (2 I, C)
    pub down: Linear,            // (C, I)
}

/// The parameters of a model.
pub(super) struct Model {
    pub embed_tokens: Param, // (V, C)
    pub layers: Vec<Layer>,
    pub norm: Param, // (C)
    /// (V, C); None when it is `embed_tokens`.
    pub lm_head: Option<Linear>,
}

/// Input tensors of a step.
#[derive(Clone, Copy)]
pub(super) struct Inputs {
    pub ids: TensorId,       // (B, T)
    pub labels: TensorId,    // (B, T)
    pub positions: TensorId, // (B, T)
    pub doc_start: TensorId, // (B, T)
    pub start: TensorId,     // (B)
    pub last_rows: TensorId, // (B)
    pub rope: TensorId,      // (positions, 2, D/2)
    pub step: TensorId,      // (8)
}

/// Gradient and optimizer state of one parameter.
pub(super) struct Training {
    /// What backward writes.
    pub gradient: TensorId,
    /// What the update reads: the same, or this rank's part of its sum over all ranks.
    pub reduced: TensorId,
    /// Moments of AdamW, with their scales where they are in eight bits; or the
    /// velocity of gradient descent.
    pub state: Vec<TensorId>,
    /// The lower half of the float32 master weight, where there is one.
    pub master: Option<TensorId>,
}

pub(super) struct Builder<'a> {
    pub arch: &'a Architecture,
    pub recipe: &'a Recipe,
    target: &'a dyn Target,
    program: Program,
    pub phase: Phase,
    /// Gradients are added to, because an earlier micro-batch wrote them.
    pub accumulate: bool,
    /// T of this program's activations.
    pub seq: usize,
    pub inputs: Inputs,
    /// Gathered weights, by the parts that they are gathered from.
    pub(super) gathered: HashMap<TensorId, TensorId>,
    /// Gradient and optimizer state by parameter; none for a frozen one.
    pub(super) training: Vec<Option<Training>>,
    /// What blocks keep for their backward, of those whose activations are offloaded.
    pub(super) kept: Vec<Vec<TensorId>>,
    params: usize,
    pub loss: TensorId,      // (1)
    pub grad_norm: TensorId, // (2)
}

impl<'a> Builder<'a> {
    /// A pen for a program whose activations have `seq` tokens in a sequence.
    pub fn new(
        arch: &'a Architecture,
        recipe: &'a Recipe,
        seq: usize,
        target: &'a dyn Target,
    ) -> Self {
        let mut program = Program::default();
        let mut resident = |name: &str, shape: &[usize], dtype: DType| {
            program.tensors.push(Tensor {
                name: name.to_owned(),
                shape: shape.to_vec(),
                dtype,
                class: Class::Input,
                home: Home::Device,
                shard: Shard::Whole,
                resident: true,
            });
            TensorId::new(program.tensors.len() - 1)
        };
        let batch = recipe.batch;
        let inputs = Inputs {
            ids: resident("ids", &[batch, seq], DType::I32),
            labels: resident("labels", &[batch, seq], DType::I32),
            positions: resident("positions", &[batch, seq], DType::I32),
            doc_start: resident("doc_start", &[batch, seq], DType::I32),
            start: resident("start", &[batch], DType::I32),
            last_rows: resident("last_rows", &[batch], DType::I32),
            rope: resident("rope", &[recipe.seq, 2, arch.head_dim / 2], DType::F32),
            step: resident("step", &[StepScalars::WORDS], DType::F32),
        };
        let loss = resident("loss", &[1], DType::F32);
        let grad_norm = resident("grad_norm", &[2], DType::F32);
        Builder {
            arch,
            recipe,
            target,
            program,
            phase: Phase::Forward,
            accumulate: false,
            seq,
            inputs,
            gathered: HashMap::new(),
            training: Vec::new(),
            kept: Vec::new(),
            params: 0,
            loss,
            grad_norm,
        }
    }

    /// Rows of every activation: B T.
    pub fn rows(&self) -> usize {
        self.recipe.batch * self.seq
    }

    pub fn attention_shape(&self, layer: usize) -> AttentionShape {
        AttentionShape {
            batch: self.recipe.batch,
            seq: self.seq,
            heads: self.arch.num_attention_heads,
            kv_heads: self.arch.num_key_value_heads,
            head_dim: self.arch.head_dim,
            window: self.arch.window(layer),
        }
    }

    fn tensor(&mut self, name: String, shape: &[usize], dtype: DType, class: Class) -> TensorId {
        self.divided(name, shape, dtype, class, Shard::Whole)
    }

    /// A tensor that is divided over the ranks.
    pub fn divided(
        &mut self,
        name: String,
        shape: &[usize],
        dtype: DType,
        class: Class,
        shard: Shard,
    ) -> TensorId {
        self.program.tensors.push(Tensor {
            name,
            shape: shape.to_vec(),
            dtype,
            class,
            home: Home::Device,
            shard,
            resident: false,
        });
        TensorId::new(self.program.tensors.len() - 1)
    }

    /// An activation (B, T, cols) in the precision of the recipe.
    pub fn activation(&mut self, name: String, cols: usize) -> TensorId {
        let shape = [self.recipe.batch, self.seq, cols];
        self.tensor(name, &shape, self.recipe.precision, Class::Activation)
    }

    /// A statistic (B, T, cols) in float32.
    pub fn statistic(&mut self, name: String, cols: usize) -> TensorId {
        let shape = [self.recipe.batch, self.seq, cols];
        self.tensor(name, &shape, DType::F32, Class::Activation)
    }

    /// A matrix (rows, cols) that lives as long as it is used.
    pub fn matrix(&mut self, name: String, rows: usize, cols: usize, dtype: DType) -> TensorId {
        self.tensor(name, &[rows, cols], dtype, Class::Activation)
    }

    /// A tensor that keeps its bytes from step to step.
    pub fn resident(
        &mut self,
        name: String,
        shape: &[usize],
        dtype: DType,
        class: Class,
    ) -> TensorId {
        self.resident_divided(name, shape, dtype, class, Shard::Whole)
    }

    fn resident_divided(
        &mut self,
        name: String,
        shape: &[usize],
        dtype: DType,
        class: Class,
        shard: Shard,
    ) -> TensorId {
        let id = self.divided(name, shape, dtype, class, shard);
        self.program.tensors[id.index()].resident = true;
        id
    }

    pub fn shard(&self, tensor: TensorId) -> Shard {
        self.program.tensor(tensor).shard
    }

    pub fn dtype(&self, tensor: TensorId) -> DType {
        self.program.tensor(tensor).dtype
    }

    /// A whole tensor as a matrix.
    pub fn view(&self, tensor: TensorId) -> View {
        let t = self.program.tensor(tensor);
        let (rows, cols) = (t.rows(), t.cols());
        View { tensor, row: 0, col: 0, rows, cols, stride: cols }
    }

    pub fn shape(&self, tensor: TensorId) -> Vec<usize> {
        self.program.tensor(tensor).shape.clone()
    }

    pub fn name(&self, tensor: TensorId) -> &str {
        &self.program.tensor(tensor).name
    }

    /// Appends an op, with the scratch memory that the target wants for it.
    pub fn op(&mut self, kind: OpKind) {
        let bytes = self.target.workspace_bytes(&kind, &self.program);
        let workspace = (bytes > 0).then(|| {
            let name = format!("workspace.{}", kind.name());
            self.tensor(name, &[bytes as usize], DType::U8, Class::Workspace)
        });
        self.program.ops.push(Op { kind, phase: self.phase, workspace });
        if let Some(section) = self.program.sections.last_mut() {
            section.ops.end = self.program.ops.len();
        }
    }

    pub fn begin_section(&mut self, name: &'static str, repeat: usize) {
        let at = self.program.ops.len();
        self.program.sections.push(Section { name, ops: at..at, repeat });
    }

    /// The program, and what its blocks keep that is to be offloaded.
    pub fn finish(self) -> (Program, Vec<Vec<TensorId>>) {
        (self.program, self.kept)
    }

    /// The parameters, with a gradient and optimizer state for each that the recipe
    /// trains.
    pub fn model(&mut self) -> Model {
        let model = self.model_frozen();
        let mut params: Vec<Param> = Vec::with_capacity(self.params);
        model.for_each(|p| params.push(p));
        for param in params {
            if !self.is_trained(self.name(param.value)) {
                self.training.push(None);
                continue;
            }
            let shape = self.shape(param.value);
            let name = self.name(param.value).to_owned();
            let Sharding { ranks, zero, .. } = self.recipe.sharding;
            let part = self.recipe.sharding.part(&shape);
            let (name_of, shard) = match part {
                None => (format!("d_{name}"), Shard::Whole),
                Some(part) if zero == 1 => (format!("d_{name}"), Shard::Padded { ranks, part }),
                Some(part) => (format!("d_{name}.part"), Shard::Part { ranks, part }),
            };
            let dtype = self.recipe.precision;
            let reduced = self.divided(name_of, &shape, dtype, Class::Gradient, shard);
            let state = self.optimizer_state(&name, &shape);
            let master = self.master(&name, &shape);
            self.training.push(Some(Training { gradient: reduced, reduced, state, master }));
        }
        model
    }

    fn is_trained(&self, name: &str) -> bool {
        let Some(lora) = self.recipe.lora.as_ref() else { return true };
        name.ends_with(".lora_a")
            || name.ends_with(".lora_b")
            || (lora.save_embed_tokens && name == "embed_tokens")
            || (lora.save_lm_head && name == "lm_head")
    }

    /// Whether a parameter has a gradient.
    pub fn trains(&self, param: Param) -> bool {
        self.training.get(param.index).is_some_and(Option::is_some)
    }

    /// Whether a product has anything to train.
    pub fn trains_linear(&self, linear: &Linear) -> bool {
        let adapters = linear.adapters.as_ref().is_some_and(|a| self.trains(a.a));
        adapters || linear.param().is_some_and(|p| self.trains(p))
    }

    /// Gradient and optimizer state of a parameter that is trained.
    pub fn training(&self, param: Param) -> Option<&Training> {
        self.training.get(param.index).and_then(Option::as_ref)
    }

    pub fn gradient(&self, param: Param) -> Option<TensorId> {
        self.training(param).map(|t| t.gradient)
    }

    /// Gradients of everything that is trained, as the update reads them.
    pub fn gradients(&self) -> Vec<TensorId> {
        self.training.iter().flatten().map(|t| t.reduced).collect()
    }

    /// Elements of the smallest tensor of a checkpoint that lies in a parameter:
    /// bitsandbytes, which sees those, keeps at least that one's state in float32.
    fn smallest_part(&self, name: &str, shape: &[usize]) -> usize {
        let parts = parts_of(self.arch, name).map(|p| p.shape.iter().product());
        let adapter = || match (&self.recipe.lora, shape) {
            (Some(lora), &[_, inputs]) if name.ends_with(".lora_a") => lora.rank * inputs,
            _ => shape.iter().product(),
        };
        parts.min().unwrap_or_else(adapter)
    }

    fn optimizer_state(&mut self, name: &str, shape: &[usize]) -> Vec<TensorId> {
        let blocks = [shape.iter().product::<usize>().div_ceil(STATE_BLOCK)];
        let tensors: Vec<(&str, &[usize], DType)> = match &self.recipe.optimizer {
            Optimizer::AdamW(o) => vec![("m", shape, o.state), ("v", shape, o.state)],
            Optimizer::AdamW8bit(_) if self.smallest_part(name, shape) < MIN_8BIT_ELEMENTS => {
                vec![("m", shape, DType::F32), ("v", shape, DType::F32)]
            }
            Optimizer::AdamW8bit(_) => vec![
                ("m", shape, DType::U8),
                ("v", shape, DType::U8),
                ("m_absmax", &blocks, DType::F32),
                ("v_absmax", &blocks, DType::F32),
            ],
            Optimizer::Sgd(o) if o.momentum != 0.0 => vec![("velocity", shape, o.state)],
            Optimizer::Sgd(_) => Vec::new(),
        };
        let class = Class::OptimizerState;
        let mut state = Vec::with_capacity(tensors.len());
        let part = self.recipe.sharding.part(shape);
        let ranks = self.recipe.sharding.ranks;
        for (kind, shape, dtype) in tensors {
            // Parts are whole blocks of 8-bit state.
            let of_blocks = if kind.ends_with("absmax") { STATE_BLOCK } else { 1 };
            let shard = match part {
                Some(part) => Shard::Part { ranks, part: part / of_blocks },
                None => Shard::Whole,
            };
            let name = format!("{kind}.{name}");
            state.push(self.resident_divided(name, shape, dtype, class, shard));
        }
        state
    }

    /// The lower half of a master weight, divided as the moments are. Zero, as all state
    /// starts, is that of a weight that is its own master.
    fn master(&mut self, name: &str, shape: &[usize]) -> Option<TensorId> {
        if self.recipe.master_weights.is_none() {
            return None;
        }
        let ranks = self.recipe.sharding.ranks;
        let part = self.recipe.sharding.part(shape);
        let shard = part.map_or(Shard::Whole, |part| Shard::Part { ranks, part });
        let (name, class) = (master_name(name), Class::OptimizerState);
        Some(self.resident_divided(name, shape, DType::I16, class, shard))
    }

    /// The parameters alone.
    pub fn model_frozen(&mut self) -> Model {
        let arch = self.arch;
        let embed_tokens = self.param("embed_tokens".into());
        let layers = (0..arch.num_hidden_layers)
            .map(|index| {
                let name = |s: &str| format!("layers.{index}.{s}");
                Layer {
                    index,
                    input_norm: self.param(name("input_norm")),
                    qkv: self.linear(name("attn.qkv")),
                    qkv_bias: arch.attention_bias.then(|| self.param(name("attn.qkv_bias"))),
                    q_norm: arch.qk_norm.then(|| self.param(name("attn.q_norm"))),
                    k_norm: arch.qk_norm.then(|| self.param(name("attn.k_norm"))),
                    o: self.linear(name("attn.o")),
                    post_norm: self.param(name("post_norm")),
                    gate_up: self.linear(name("mlp.gate_up")),
                    down: self.linear(name("mlp.down")),
                }
            })
            .collect();
        let norm = self.param("norm".into());
        let lm_head = (!arch.tie_word_embeddings).then(|| self.linear("lm_head".into()));
        Model { embed_tokens, layers, norm, lm_head }
    }

    fn param(&mut self, name: String) -> Param {
        let shape = param_shape(self.arch, &name);
        self.param_of_shape(name, &shape)
    }

    fn param_of_shape(&mut self, name: String, shape: &[usize]) -> Param {
        let Sharding { ranks, zero, .. } = self.recipe.sharding;
        let trained = self.recipe.method != Method::Infer && self.is_trained(&name);
        let shard = match self.recipe.sharding.part(shape) {
            Some(part) if zero == 3 => Shard::Part { ranks, part },
            // Gathered in place after every update.
            Some(part) if trained => Shard::Padded { ranks, part },
            _ => Shard::Whole,
        };
        let dtype = self.recipe.precision;
        let value = self.resident_divided(name, shape, dtype, Class::Weight, shard);
        self.params += 1;
        Param { value, index: self.params - 1 }
    }

    /// The matrix of a product, in four bits or not, and its adapters.
    fn linear(&mut self, name: String) -> Linear {
        let quant = self.recipe.quant.filter(|q| q.head || name != "lm_head");
        let weight = match quant {
            Some(quant) => Weight::Quantized(self.quantized(&name, quant)),
            None => Weight::Dense(self.param(name.clone())),
        };
        let adapters = self.adapters(&name);
        Linear { name, weight, adapters }
    }

    fn quantized(&mut self, name: &str, quant: Quant) -> QuantizedMatrix {
        let mut parts = Vec::new();
        let (mut rows, mut cols) = (0, 0);
        for part in parts_of(self.arch, name) {
            let [part_rows, part_cols] = part.shape[..] else { continue };
            let module = quantized_name(&part);
            let module = module.rsplit('.').next().unwrap_or(&module);
            let blocks = (part_rows * part_cols).div_ceil(QUANT_BLOCK);
            let bytes = (part_rows * part_cols).div_ceil(2);
            let Sharding { ranks, zero, .. } = self.recipe.sharding;
            let shard = match self.recipe.sharding.part(&[bytes, 1]) {
                Some(part) if zero == 3 => Shard::Part { ranks, part },
                _ => Shard::Whole,
            };
            let codes = format!("{name}.{module}.codes");
            let codes = self.resident_divided(codes, &[bytes], DType::U8, Class::Weight, shard);
            let mut make = |kind: &str, n: usize, dtype: DType| {
                self.resident(format!("{name}.{module}.{kind}"), &[n], dtype, Class::Weight)
            };
            let absmax = make("absmax", blocks, if quant.double { DType::U8 } else { DType::F32 });
            let nested = quant.double.then(|| Nested {
                absmax: make("nested_absmax", blocks.div_ceil(NESTED_BLOCK), DType::F32),
                offset: make("offset", 1, DType::F32),
            });
            parts.push(QuantizedPart { rows: part_rows, codes, absmax, nested });
            (rows, cols) = (rows + part_rows, part_cols);
        }
        QuantizedMatrix { codebook: quant.codebook, parts, rows, cols }
    }

    fn adapters(&mut self, name: &str) -> Option<Adapters> {
        let lora = self.recipe.lora.as_ref()?;
        let product = name.strip_prefix("layers.").and_then(|s| s.split_once('.'))?.1;
        let projections = PRODUCTS.iter().find(|(p, _)| *p == product)?.1;
        let adapted = lora.of_product(projections);
        let first = adapted.first()?;
        let inputs = first.shape(self.arch).1;
        let a = self.param_of_shape(format!("{name}.lora_a"), &[adapted.len() * lora.rank, inputs]);
        let mut b = Vec::with_capacity(adapted.len());
        let mut col = 0;
        for projection in projections {
            let cols = projection.shape(self.arch).0;
            if adapted.contains(projection) {
                let name = format!("{name}.{}.lora_b", projection.name());
                b.push(Output { b: self.param_of_shape(name, &[cols, lora.rank]), col, cols });
            }
            col += cols;
        }
        Some(Adapters { a, b })
    }
}

impl Linear {
    /// The matrix as a parameter; none when it is in four bits.
    pub fn param(&self) -> Option<Param> {
        match self.weight {
            Weight::Dense(param) => Some(param),
            Weight::Quantized(_) => None,
        }
    }

    pub fn for_each(&self, f: &mut impl FnMut(Param)) {
        self.param().map(&mut *f);
        if let Some(adapters) = &self.adapters {
            f(adapters.a);
            adapters.b.iter().for_each(|output| f(output.b));
        }
    }
}

/// The parts of a checkpoint that fill a parameter of the program.
fn parts_of(arch: &Architecture, name: &str) -> impl Iterator<Item = WeightPart> {
    // Layers are alike: look at the first.
    let suffix = name.strip_prefix("layers.").and_then(|s| s.split_once('.'));
    let first = suffix.map_or(name.to_owned(), |(_, rest)| format!("layers.0.{rest}"));
    let one_layer = Architecture { num_hidden_layers: 1, ..arch.clone() };
    weight_parts(&one_layer).into_iter().filter(move |part| part.tensor == first)
}

/// Shape of a parameter of the program: its parts, laid one below the other.
fn param_shape(arch: &Architecture, name: &str) -> Vec<usize> {
    let mut shape: Vec<usize> = Vec::new();
    for part in parts_of(arch, name) {
        if shape.is_empty() {
            shape = part.shape;
        } else {
            shape[0] += part.shape[0];
        }
    }
    shape
}

impl Layer {
    /// Every parameter once, in the order of the forward pass.
    pub fn for_each(&self, f: &mut impl FnMut(Param)) {
        f(self.input_norm);
        self.qkv.for_each(f);
        self.qkv_bias.map(&mut *f);
        self.q_norm.map(&mut *f);
        self.k_norm.map(&mut *f);
        self.o.for_each(f);
        f(self.post_norm);
        self.gate_up.for_each(f);
        self.down.for_each(f);
    }
}

impl Model {
    /// Every parameter once, in the order of the forward pass.
    pub fn for_each(&self, mut f: impl FnMut(Param)) {
        f(self.embed_tokens);
        for l in &self.layers {
            l.for_each(&mut f);
        }
        f(self.norm);
        if let Some(head) = &self.lm_head {
            head.for_each(&mut f);
        }
    }
}

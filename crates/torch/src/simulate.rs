//! A run of the stack from loading to its third step, as a trace.

use std::rc::Rc;

use plimsoll_arch::Architecture;
use plimsoll_program::Class;

use crate::allocator::MIB;
use crate::deepspeed::DeepSpeed;
use crate::fsdp::FullyShard;
use crate::model::Net;
use crate::optimizer::{Optimizer, Target};
use crate::recipe::{Method, RecipeError, TorchRecipe};
use crate::tape::{Mem, OneDevice, Tape};
use crate::trace::{Event, Trace};

/// What the device decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaDevice {
    pub compute_capability: (i32, i32),
    /// Streaming multiprocessors.
    pub multiprocessors: u64,
}

impl CudaDevice {
    /// `getChosenWorkspaceSize`: cuBLAS's workspace of a thread (`:4096:2:16:8`, or 32 MiB
    /// from Hopper on).
    pub fn cublas_workspace(&self) -> u64 {
        if self.compute_capability >= (9, 0) { 32 * MIB } else { 8_519_680 }
    }
}

/// A simulated run.
pub struct Run {
    pub trace: Trace,
    pub parameters: u64,
    pub trainable_parameters: u64,
    /// Pinned or pageable memory of the host that holds what was offloaded.
    pub host_bytes: u64,
    /// Optimizer state in managed memory.
    pub paged_bytes: u64,
}

/// Tokens of prompt and of answer in an inference plan.
const PROMPT: u64 = 64;

/// Steps: the first makes optimizer state, the second is the first of all that follow.
const STEPS: usize = 3;

/// Simulates a run.
///
/// # Errors
/// The recipe is one that the stack refuses.
pub fn simulate(
    arch: &Architecture,
    recipe: &TorchRecipe,
    device: CudaDevice,
) -> Result<Run, RecipeError> {
    recipe.check(arch)?;
    if recipe.method == Method::Infer {
        return Ok(generate(arch, recipe, device));
    }
    let mut recipe = recipe.clone();
    if let (Some(_), Method::Lora(lora)) = (&recipe.zero, &mut recipe.method) {
        // The engine turns the whole module into 16 bits.
        lora.float32 = false;
    }
    let recipe = &recipe;
    let net = Rc::new(Net::new(arch, recipe, device.multiprocessors));
    let parameters = arch.parameters() as u64;
    let trainable = net.params.iter().filter(|p| p.trained).map(|p| p.elements).sum();
    let mut run = Run {
        trace: Trace::default(),
        parameters,
        trainable_parameters: trainable,
        host_bytes: 0,
        paged_bytes: 0,
    };
    match (&recipe.zero, &recipe.fsdp) {
        (Some(zero), _) => {
            // Stage 0 has the engine's float32 copies, and shares nothing.
            let ranks = if zero.stage == 0 { 1 } else { recipe.gpus };
            let rank = recipe.rank.unwrap_or(ranks - 1).min(ranks - 1);
            let mut engine = DeepSpeed::new(*zero, ranks, rank);
            engine.measure(&net.params);
            let engine = Rc::new(engine);
            let t = Tape::new(engine.clone());
            let buffers = {
                engine.initialize(&t, &net.params, recipe.optim);
                net.buffers(&t)
            };
            let hooks = Hooks {
                before_forward: &|_| {},
                after_forward: &|_| {},
                before_backward: &|t| engine.before_backward(t),
                after_backward: &|t| engine.after_backward(t),
                step: &|t| engine.step(t, &net.params),
            };
            steps(&t, &net, device, &hooks);
            drop(buffers);
            run.host_bytes = engine.host_bytes.get();
            run.trace = t.into_trace();
        }
        (_, Some(how)) => {
            let engine = Rc::new(FullyShard::new(*how, recipe.gpus, net.units()));
            let t = Tape::new(engine.clone());
            engine.load(&t);
            let buffers = net.buffers(&t);
            let target = |(elements, width)| Target { elements, width };
            let targets = engine.shard_elements().into_iter().map(target).collect();
            let optimizer = Optimizer::new(recipe.optim, targets);
            t.record(Event::EmptyCache);
            t.record(Event::ResetPeaks);
            let hooks = Hooks {
                before_forward: &|t| engine.before_forward(t),
                after_forward: &|_| engine.after_forward(),
                before_backward: &|t| engine.before_backward(t),
                after_backward: &|t| engine.after_backward(t),
                step: &|t| {
                    if !how.cpu_offload {
                        optimizer.step(t);
                    }
                    engine.zero_grad();
                },
            };
            steps(&t, &net, device, &hooks);
            drop(buffers);
            run.host_bytes = engine.host_bytes();
            run.trace = t.into_trace();
        }
        _ => {
            let t = Tape::new(Rc::new(OneDevice));
            let buffers = net.load(&t);
            let optimizer = Optimizer::for_params(recipe.optim, &net.params);
            t.record(Event::EmptyCache);
            t.record(Event::ResetPeaks);
            // Every rank reduces gradients in buckets of its own (DistributedDataParallel).
            let trained = net.params.iter().filter(|p| p.trained);
            let bytes: u64 = trained.map(|p| p.bytes()).sum();
            let buckets = (recipe.gpus > 1).then(|| t.alloc("DDP buckets", bytes, Class::Gradient));
            let hooks = Hooks {
                before_forward: &|_| {},
                after_forward: &|_| {},
                before_backward: &|_| {},
                after_backward: &|_| {},
                step: &|t| {
                    optimizer.step(t);
                    for p in &net.params {
                        *p.grad.borrow_mut() = None;
                    }
                },
            };
            steps(&t, &net, device, &hooks);
            drop((buffers, buckets));
            run.paged_bytes = optimizer.paged_bytes();
            run.trace = t.into_trace();
        }
    }
    Ok(run)
}

/// What an engine does between the phases of a step.
struct Hooks<'a> {
    before_forward: &'a dyn Fn(&Tape),
    after_forward: &'a dyn Fn(&Tape),
    before_backward: &'a dyn Fn(&Tape),
    after_backward: &'a dyn Fn(&Tape),
    step: &'a dyn Fn(&Tape),
}

fn steps(t: &Tape, net: &Rc<Net>, device: CudaDevice, hooks: &Hooks) {
    t.record(Event::Mark("loaded"));
    let recipe = &net.recipe;
    let tokens = recipe.batch * recipe.seq;
    let workspace = || t.alloc("cuBLAS workspace", device.cublas_workspace(), Class::Workspace);
    // One for the thread that runs forward, one for autograd's.
    let mut workspaces: Vec<Mem> = Vec::new();
    for step in 0..STEPS {
        t.record(Event::Mark("step"));
        for micro in 0..recipe.accumulate.min(2) {
            t.enter("inputs".into());
            let inputs = ["input_ids", "labels", "attention_mask"]
                .map(|label| t.alloc(label, tokens * 8, Class::Input));
            if workspaces.is_empty() {
                workspaces.push(workspace());
            }
            (hooks.before_forward)(t);
            let (loss, kept) = net.forward(t, &inputs[0]);
            t.autocast_cache.borrow_mut().clear();
            drop(kept);
            (hooks.after_forward)(t);
            t.record(Event::Mark("after_forward"));
            if workspaces.len() == 1 {
                workspaces.push(workspace());
            }
            (hooks.before_backward)(t);
            let gradient = t.activation("loss gradient", 4);
            t.backward(loss, gradient);
            t.enter("after backward".into());
            (hooks.after_backward)(t);
            if step == STEPS - 1 && micro == 0 {
                t.record(Event::Mark("after_backward"));
            }
        }
        (hooks.step)(t);
        t.record(Event::Mark("after_step"));
    }
}

/// `model.generate`: prefill, then a cache that each token copies and extends.
fn generate(arch: &Architecture, recipe: &TorchRecipe, device: CudaDevice) -> Run {
    let prompt = PROMPT.min(recipe.seq);
    let prefill = TorchRecipe { seq: prompt, gradient_checkpointing: None, ..recipe.clone() };
    let net = Rc::new(Net::new(arch, &prefill, device.multiprocessors));
    let t = Tape::new(Rc::new(OneDevice));
    let buffers = net.load(&t);
    t.record(Event::EmptyCache);
    t.record(Event::ResetPeaks);
    t.record(Event::Mark("loaded"));
    t.record(Event::Mark("step"));
    let workspace = t.alloc("cuBLAS workspace", device.cublas_workspace(), Class::Workspace);
    let width = if recipe.weights16() { 2 } else { 4 };
    let row = recipe.batch * arch.kv_width() as u64 * width;
    let ids = t.alloc("input_ids", recipe.batch * prompt * 8, Class::Input);
    let mut cache: Vec<Mem> = t.no_grad(|| net.prefill(&t, &ids));
    for length in prompt + 1..=recipe.seq {
        t.enter(format!("token {length}"));
        for tensor in &mut cache {
            // `torch.cat([old, new])`
            *tensor = t.alloc("kv cache", row * length, Class::KvCache);
        }
        drop(t.activation("logits", recipe.batch * arch.vocab_size as u64 * 4));
    }
    drop((cache, workspace, buffers, ids));
    Run {
        trace: t.into_trace(),
        parameters: arch.parameters() as u64,
        trainable_parameters: 0,
        host_bytes: 0,
        paged_bytes: 0,
    }
}

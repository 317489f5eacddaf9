//! A small autograd that counts bytes: forward code is written as the Python is, and
//! what is allocated, saved for backward and freed follows from it.
//!
//! A [`Mem`] is a reference-counted storage; dropping the last reference records the
//! free, as CPython and the autograd graph do. A [`Node`] holds what PyTorch's node of
//! the same op saves and says what its backward allocates.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use plimsoll_program::Class;

use crate::allocator::Stream;
use crate::trace::{Event, Trace, TraceTensor};

/// A storage on the device; the last reference frees it.
pub struct Storage {
    pub bytes: u64,
    id: u32,
    recorder: Rc<RefCell<Trace>>,
}

pub type Mem = Rc<Storage>;

impl Drop for Storage {
    fn drop(&mut self) {
        // A graph may outlive the step that a builder ends by taking the trace.
        if let Ok(mut trace) = self.recorder.try_borrow_mut() {
            trace.events.push(Event::Free(self.id));
        }
    }
}

/// A parameter (or buffer) of the model.
pub struct Param {
    pub name: String,
    pub elements: u64,
    /// Bytes of one element.
    pub width: u64,
    /// Bytes where they are no multiple of `elements`: packed four bits.
    pub packed: Option<u64>,
    pub trained: bool,
    /// Where its values are now; none while a sharded parameter is not gathered.
    pub data: RefCell<Option<Mem>>,
    pub grad: RefCell<Option<Mem>>,
    /// Position in the order of creation.
    pub index: usize,
}

impl Param {
    pub fn bytes(&self) -> u64 {
        self.packed.unwrap_or(self.elements * self.width)
    }
}

/// Where a gradient goes.
#[derive(Clone)]
pub enum Edge {
    None,
    Param(Rc<Param>),
    Node(Rc<Node>),
    /// The detached input of a checkpointed block.
    Capture(Rc<RefCell<Option<Mem>>>),
}

impl Edge {
    pub fn wanted(&self) -> bool {
        !matches!(self, Edge::None)
    }
}

/// Forward of a block that is run again in backward.
pub type Block = Rc<dyn Fn(&Tape, Var) -> Var>;

type Backward = Box<dyn FnOnce(&Tape, Mem) -> Vec<Option<Mem>>>;

/// A node of the graph; its backward returns one gradient for each input.
pub struct Node {
    sequence: u64,
    inputs: Vec<Edge>,
    backward: RefCell<Option<Backward>>,
    /// Op and module, for the timeline.
    label: &'static str,
    scope: u32,
}

/// A tensor: its storage, its shape as far as memory asks, and its gradient's way.
#[derive(Clone)]
pub struct Var {
    pub mem: Mem,
    pub elements: u64,
    pub width: u64,
    pub edge: Edge,
}

impl Var {
    pub fn bytes(&self) -> u64 {
        self.elements * self.width
    }
}

/// What a sharding engine does around the use of parameters and with gradients.
/// The default is a single device: nothing, and gradients accumulate in `grad`.
pub trait Engine {
    /// Before a module (or layer) uses these parameters.
    fn fetch(&self, _tape: &Tape, _params: &[Rc<Param>], _forward: bool) {}
    /// After it has used them.
    fn release(&self, _tape: &Tape, _params: &[Rc<Param>], _forward: bool) {}
    /// Whether the graph's reference to a weight keeps its gathered values alive.
    fn saved_weight_stays(&self) -> bool {
        true
    }
    /// A gradient is complete in `param.grad`.
    fn gradient_ready(&self, _tape: &Tape, _param: &Rc<Param>) {}
    /// Whether whole layers are gathered at a time.
    fn by_layer(&self) -> bool {
        false
    }
    fn before_layer(&self, _tape: &Tape, _layer: usize, _forward: bool) {}
    fn after_layer(&self, _tape: &Tape, _layer: usize, _forward: bool) {}
}

/// Everything on one device.
pub struct OneDevice;

impl Engine for OneDevice {}

/// Records allocations and frees while forward and backward code runs.
pub struct Tape {
    recorder: Rc<RefCell<Trace>>,
    sequence: Cell<u64>,
    grad_enabled: Cell<bool>,
    scope: Cell<u32>,
    /// Numbers of the scopes in the trace.
    scopes: RefCell<HashMap<String, u32>>,
    pub stream: Cell<Stream>,
    /// Casts of parameters that autocast keeps until its context ends.
    pub autocast_cache: RefCell<HashMap<usize, Mem>>,
    pub engine: Rc<dyn Engine>,
}

impl Tape {
    pub fn new(engine: Rc<dyn Engine>) -> Tape {
        Tape {
            recorder: Rc::default(),
            sequence: Cell::new(0),
            grad_enabled: Cell::new(true),
            scope: Cell::new(0),
            scopes: RefCell::default(),
            stream: Cell::new(0),
            autocast_cache: RefCell::default(),
            engine,
        }
    }

    /// The record, once everything that should be freed is.
    pub fn into_trace(self) -> Trace {
        std::mem::take(&mut self.recorder.borrow_mut())
    }

    /// Memory for a tensor of the op that was named last.
    pub fn alloc(&self, label: &'static str, bytes: u64, class: Class) -> Mem {
        let mut trace = self.recorder.borrow_mut();
        let id = trace.tensors.len() as u32;
        let (scope, stream) = (self.scope.get(), self.stream.get());
        trace.tensors.push(TraceTensor { label, scope, bytes, class, stream });
        trace.events.push(Event::Alloc(id));
        Rc::new(Storage { bytes, id, recorder: self.recorder.clone() })
    }

    pub fn activation(&self, label: &'static str, bytes: u64) -> Mem {
        self.alloc(label, bytes, Class::Activation)
    }

    /// Memory that lives through one op.
    pub fn scratch(&self, label: &'static str, bytes: u64) -> Mem {
        self.alloc(label, bytes, Class::Workspace)
    }

    /// `tensor.record_stream(...)` on the last reference: the bytes stop counting as
    /// allocated, and stay active until the reference is dropped.
    pub fn record_stream(&self, mem: &Mem) {
        self.record(Event::FreeRecorded(mem.id));
    }

    pub fn record(&self, event: Event) {
        self.recorder.borrow_mut().events.push(event);
    }

    /// Begins a module, such as `layers.3.mlp`.
    pub fn enter(&self, scope: String) {
        let mut trace = self.recorder.borrow_mut();
        let known = self.scopes.borrow().get(&scope).copied();
        let index = known.unwrap_or_else(|| {
            let index = trace.scopes.len() as u32;
            trace.scopes.push(scope.clone());
            self.scopes.borrow_mut().insert(scope, index);
            index
        });
        self.scope.set(index);
        let op = Event::Op { label: "", scope: index };
        trace.events.push(op);
    }

    fn op(&self, label: &'static str) {
        self.record(Event::Op { label, scope: self.scope.get() });
    }

    /// Runs code without a graph.
    pub fn no_grad<T>(&self, code: impl FnOnce() -> T) -> T {
        let before = self.grad_enabled.replace(false);
        let result = code();
        self.grad_enabled.set(before);
        result
    }

    pub fn with_grad<T>(&self, code: impl FnOnce() -> T) -> T {
        let before = self.grad_enabled.replace(true);
        let result = code();
        self.grad_enabled.set(before);
        result
    }

    /// Runs code on another stream: what it allocates belongs to that stream's pool.
    pub fn on_stream<T>(&self, stream: Stream, code: impl FnOnce() -> T) -> T {
        let before = self.stream.replace(stream);
        let result = code();
        self.stream.set(before);
        result
    }

    /// Whether an op on these inputs makes a node.
    pub fn traces(&self, inputs: &[&Edge]) -> bool {
        self.grad_enabled.get() && inputs.iter().any(|e| e.wanted())
    }

    /// The result of an op: with a node if the graph is recorded and an input wants a
    /// gradient, without one otherwise (then `backward` and what it saved are dropped).
    pub fn result(
        &self,
        label: &'static str,
        (mem, elements, width): (Mem, u64, u64),
        inputs: Vec<Edge>,
        backward: impl FnOnce(&Tape, Mem) -> Vec<Option<Mem>> + 'static,
    ) -> Var {
        let traced = self.grad_enabled.get() && inputs.iter().any(Edge::wanted);
        let edge = if traced {
            let sequence = self.sequence.get() + 1;
            self.sequence.set(sequence);
            Edge::Node(Rc::new(Node {
                sequence,
                inputs,
                backward: RefCell::new(Some(Box::new(backward))),
                label,
                scope: self.scope.get(),
            }))
        } else {
            Edge::None
        };
        Var { mem, elements, width, edge }
    }

    /// Runs backward from a tensor: the newest node first, as the engine's queue does.
    pub fn backward(&self, from: Var, gradient: Mem) {
        let Var { edge: Edge::Node(root), mem, .. } = from else { return };
        drop(mem);
        // Gradients that wait for their node, by its number in the order of forward.
        let mut waiting: BTreeMap<u64, (Rc<Node>, Mem)> = BTreeMap::new();
        waiting.insert(root.sequence, (root, gradient));
        self.no_grad(|| {
            while let Some((_, (node, gradient))) = waiting.pop_last() {
                let backward = node.backward.borrow_mut().take();
                let Some(backward) = backward else { continue };
                self.scope.set(node.scope);
                self.op(node.label);
                let gradients = backward(self, gradient);
                for (edge, gradient) in node.inputs.iter().zip(gradients) {
                    let Some(gradient) = gradient else { continue };
                    match edge {
                        Edge::None => {}
                        Edge::Param(param) => self.accumulate(param, gradient),
                        Edge::Capture(slot) => {
                            let mut slot = slot.borrow_mut();
                            *slot = Some(match slot.take() {
                                Some(before) => self.sum(before, gradient),
                                None => gradient,
                            });
                        }
                        Edge::Node(next) => {
                            let total = match waiting.remove(&next.sequence) {
                                Some((_, before)) => self.sum(before, gradient),
                                None => gradient,
                            };
                            waiting.insert(next.sequence, (next.clone(), total));
                        }
                    }
                }
            }
        });
    }

    /// Adds two gradients of one tensor: in place where nobody else holds one.
    fn sum(&self, before: Mem, new: Mem) -> Mem {
        if Rc::strong_count(&before) == 1 {
            before
        } else if Rc::strong_count(&new) == 1 {
            new
        } else {
            self.activation("gradient sum", before.bytes)
        }
    }

    /// `AccumulateGrad`: the first gradient is taken as it is, others are added.
    fn accumulate(&self, param: &Rc<Param>, gradient: Mem) {
        {
            let mut slot = param.grad.borrow_mut();
            if slot.is_none() {
                *slot = Some(gradient);
            }
        }
        self.engine.clone().gradient_ready(self, param);
    }

    /// `torch.utils.checkpoint`: forward without a graph, again with one in backward.
    pub fn checkpoint(&self, x: Var, reentrant: bool, block: Block) -> Var {
        if !self.traces(&[&x.edge]) {
            return block(self, x);
        }
        let input = Var { edge: Edge::None, ..x.clone() };
        let y = self.no_grad(|| block(self, input.clone()));
        let edge = x.edge;
        self.result("checkpoint", (y.mem, y.elements, y.width), vec![edge], move |tape, g| {
            let slot = Rc::new(RefCell::new(None));
            let again = Var { edge: Edge::Capture(slot.clone()), ..input };
            let y = tape.with_grad(|| block(tape, again));
            // The recomputation has an autocast context of its own.
            tape.autocast_cache.borrow_mut().clear();
            if reentrant {
                // The outputs, and the gradient that came in, are locals of
                // `CheckpointFunction.backward` until the inner backward returns.
                let locals = (y.mem.clone(), g.clone());
                tape.backward(y, g);
                drop(locals);
            } else {
                tape.backward(y, g);
            }
            let gradient = slot.borrow_mut().take();
            vec![gradient]
        })
    }
}

//! DeepSpeed ZeRO 1 to 3 (0.14): who holds what of parameters, gradients and state, and
//! the buffers in between.
//!
//! Its fp16 (or bf16) engine keeps 16-bit parameters and float32 copies of a rank's share;
//! no autocast. Figures below: P parameters, N ranks.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use plimsoll_program::Class;

use crate::optimizer::{Optimizer, Target};
use crate::recipe::{Optim, Zero};
use crate::tape::{Engine, Mem, Param, Tape};
use crate::trace::Event;

/// Streams with pools of their own.
const GATHER: u8 = 1;
const REDUCE: u8 = 2;
/// Bytes of the engine's 16-bit type.
const HALF: u64 = 2;
const F32: u64 = 4;
/// `stage3_max_live_parameters` and `stage3_max_reuse_distance`, elements.
const MAX_LIVE: u64 = 1_000_000_000;
/// `sub_group_size`, elements of a rank's share that are updated at a time.
const SUB_GROUP: u64 = 1_000_000_000;

/// The ZeRO engine of one rank.
pub struct DeepSpeed {
    zero: Zero,
    ranks: u64,
    rank: u64,
    /// Parameter by parameter, whether it is gathered for good.
    total: u64,
    trained: u64,
    largest: u64,
    params: Vec<Rc<Param>>,
    /// Uses of parameters in the order of the first step, which the prefetcher follows.
    order: RefCell<Vec<usize>>,
    /// The first step has been recorded.
    traced: Cell<bool>,
    /// The next use that is neither in progress nor prefetched.
    queue: Cell<usize>,
    /// The use that is in progress.
    position: Cell<usize>,
    /// Gathered elements.
    available: Cell<u64>,
    /// Released, but recorded on the compute stream, which the host is ahead of.
    pending: RefCell<VecDeque<(Mem, u64)>>,
    bucket: Cell<u64>,
    /// What is in the bucket.
    in_bucket: RefCell<Vec<Rc<Param>>>,
    /// Where each parameter begins in the flat tensor of stages 1 and 2.
    starts: Vec<u64>,
    /// Gradients too large for the bucket that wait for their turn.
    waiting: RefCell<Vec<Rc<Param>>>,
    /// Reduced and given up, but recorded on NCCL's stream.
    reducing: RefCell<Vec<Mem>>,
    buffers: RefCell<Vec<Mem>>,
    /// Averaged gradients of stages 1 and 2.
    share: RefCell<Vec<Mem>>,
    optimizer: RefCell<Option<Optimizer>>,
    sub_groups: RefCell<Vec<u64>>,
    backward_buffers: RefCell<Vec<Mem>>,
    /// Bytes of the float32 share in host memory.
    pub host_bytes: Cell<u64>,
}

impl DeepSpeed {
    pub fn new(zero: Zero, ranks: u64, rank: u64) -> DeepSpeed {
        DeepSpeed {
            zero,
            ranks,
            rank,
            total: 0,
            trained: 0,
            largest: 0,
            params: Vec::new(),
            order: RefCell::default(),
            traced: Cell::new(false),
            queue: Cell::new(0),
            position: Cell::new(0),
            available: Cell::new(0),
            pending: RefCell::default(),
            bucket: Cell::new(0),
            in_bucket: RefCell::default(),
            starts: Vec::new(),
            waiting: RefCell::default(),
            reducing: RefCell::default(),
            buffers: RefCell::default(),
            share: RefCell::default(),
            optimizer: RefCell::default(),
            sub_groups: RefCell::default(),
            backward_buffers: RefCell::default(),
            host_bytes: Cell::new(0),
        }
    }

    /// Takes the sizes of the model.
    pub fn measure(&mut self, params: &[Rc<Param>]) {
        self.total = params.iter().map(|p| p.elements).sum();
        self.trained = params.iter().filter(|p| p.trained).map(|p| p.elements).sum();
        self.largest = params.iter().map(|p| p.elements).max().unwrap_or(0);
        self.params = params.to_vec();
        let mut start = 0;
        for p in params {
            self.starts.push(start);
            start += if p.trained { p.elements } else { 0 };
        }
    }

    fn persists(&self, param: &Param) -> bool {
        param.elements <= self.zero.param_persistence_threshold
    }

    fn share_of(&self, elements: u64) -> u64 {
        elements.div_ceil(self.ranks)
    }

    /// Elements of a gradient that this rank updates (stages 1 and 2).
    fn owned(&self, p: &Param) -> u64 {
        let share = self.share_of(self.trained);
        let (start, end) = (self.starts[p.index], self.starts[p.index] + p.elements);
        let own = self.rank * share..(self.rank + 1) * share;
        end.min(own.end).saturating_sub(start.max(own.start))
    }

    /// A gradient whose optimizer is on the host: its norm in float64, the search for
    /// overflow (float32, `isinf`, `isnan`, either, and that in float32), the copy that is
    /// sent.
    fn send_to_host(&self, t: &Tape, p: &Param) {
        let owned = self.owned(p);
        if owned == 0 {
            return;
        }
        drop(t.scratch("gradient in float64", owned * 8));
        let wide = t.scratch("gradient in float32", p.elements * F32);
        let magnitude = t.scratch("isinf", p.elements * F32);
        let infinite = t.scratch("isinf", p.elements);
        drop(magnitude);
        let nan = t.scratch("isnan", p.elements);
        let either = t.scratch("isinf or isnan", p.elements);
        let as_float = t.scratch("isinf or isnan", p.elements * F32);
        drop((wide, infinite, nan, either, as_float));
        drop(t.scratch("float32 gradient", owned * F32));
    }

    fn keep(&self, mem: Mem) {
        self.buffers.borrow_mut().push(mem);
    }

    /// `deepspeed.initialize`: from a model to partitions, masters, state and buffers.
    pub fn initialize(&self, t: &Tape, params: &[Rc<Param>], optim: Optim) {
        t.enter("deepspeed.initialize".into());
        match self.zero.stage {
            3 => self.initialize_3(t, params, optim),
            _ => self.initialize_12(t, params, optim),
        }
    }

    fn initialize_3(&self, t: &Tape, params: &[Rc<Param>], optim: Optim) {
        if !self.zero.zero_init {
            // `module.to(device)`: the whole 16-bit model, before it is partitioned.
            for p in params {
                let whole = t.alloc("weight", p.elements * HALF, Class::Weight);
                *p.data.borrow_mut() = Some(whole);
            }
        }
        let mut partitions = Vec::new();
        for p in params {
            let bytes = self.share_of(p.elements) * HALF;
            partitions.push(t.alloc("partition", bytes, Class::Weight));
            *p.data.borrow_mut() = None;
        }
        // Defragmentation goes through host memory.
        drop(partitions);
        t.record(Event::EmptyCache);
        let share: u64 = params.iter().map(|p| self.share_of(p.elements)).sum();
        if !self.zero.offload_param {
            let flat = t.alloc("partitions", share * HALF, Class::Weight);
            if self.ranks == 1 {
                // Nothing to gather: parameters are views.
                for p in params {
                    *p.data.borrow_mut() = Some(flat.clone());
                }
            }
            self.keep(flat);
        }
        if self.ranks > 1 {
            for p in params.iter().filter(|p| self.persists(p)) {
                *p.data.borrow_mut() = Some(t.alloc("weight", p.bytes(), Class::Weight));
            }
        }
        let trained: u64 =
            params.iter().filter(|p| p.trained).map(|p| self.share_of(p.elements)).sum();
        self.make_sub_groups(params);
        let host = self.zero.offload_optimizer;
        if host {
            self.host_bytes.set(trained * (3 * F32 + HALF));
        } else {
            for group in self.sub_groups.borrow().iter() {
                self.keep(t.alloc("float32 weights", group * F32, Class::OptimizerState));
            }
            // `initialize_optimizer_states` takes a float32 gradient and makes no state yet.
            let largest = self.sub_groups.borrow().iter().copied().max().unwrap_or(0);
            drop(t.scratch("float32 gradient", largest * F32));
        }
        self.keep(t.alloc("reduce bucket", self.zero.reduce_bucket_size * HALF, Class::Workspace));
        if !host {
            self.keep(t.alloc("gradient partitions", trained * HALF, Class::Gradient));
        }
        self.set_optimizer(optim);
    }

    fn make_sub_groups(&self, params: &[Rc<Param>]) {
        let mut groups = self.sub_groups.borrow_mut();
        let mut open = 0;
        for p in params.iter().filter(|p| p.trained) {
            open += self.share_of(p.elements);
            if open >= SUB_GROUP {
                groups.push(open);
                open = 0;
            }
        }
        if open > 0 {
            groups.push(open);
        }
    }

    fn initialize_12(&self, t: &Tape, params: &[Rc<Param>], optim: Optim) {
        for p in params {
            let whole = t.alloc("weight", p.elements * HALF, Class::Weight);
            *p.data.borrow_mut() = Some(whole);
        }
        // Parameters go to the host and come back as one flat tensor.
        for p in params.iter().filter(|p| p.trained) {
            *p.data.borrow_mut() = None;
        }
        t.record(Event::EmptyCache);
        let flat = t.alloc("flat weights", self.trained * HALF, Class::Weight);
        for p in params.iter().filter(|p| p.trained) {
            *p.data.borrow_mut() = Some(flat.clone());
        }
        self.keep(flat);
        let share = self.share_of(self.trained);
        self.sub_groups.borrow_mut().push(share);
        if self.zero.offload_optimizer {
            // `.to(device).clone().float()` before it is pinned on the host.
            let clone = t.scratch("share of weights", share * HALF);
            let wide = t.scratch("share of weights", share * F32);
            drop((clone, wide));
            self.host_bytes.set(share * 4 * F32);
            let largest = self.largest * HALF;
            self.keep(t.alloc("gradient on its way to the host", largest, Class::Workspace));
        } else {
            let clone = t.scratch("share of weights", share * HALF);
            self.keep(t.alloc("float32 weights", share * F32, Class::OptimizerState));
            drop(clone);
        }
        self.set_optimizer(optim);
        if !self.zero.offload_optimizer {
            // Stages 1 and 2 run the optimizer once on zeros, so state exists from here.
            let zeros = t.scratch("float32 gradient", share * F32);
            self.update(t);
            drop(zeros);
        }
    }

    fn set_optimizer(&self, optim: Optim) {
        if self.zero.offload_optimizer {
            return;
        }
        let groups = self.sub_groups.borrow();
        let targets = groups.iter().map(|&elements| Target { elements, width: F32 }).collect();
        *self.optimizer.borrow_mut() = Some(Optimizer::new(optim, targets));
    }

    fn update(&self, t: &Tape) {
        if let Some(optimizer) = &*self.optimizer.borrow() {
            optimizer.step(t);
        }
    }

    /// Before backward: stages 1 and 2 take their buckets anew each time.
    pub fn before_backward(&self, t: &Tape) {
        if self.zero.stage == 3 || self.zero.stage == 0 {
            return;
        }
        let count = if self.zero.overlap_comm { 2 } else { 1 };
        let bytes = self.zero.reduce_bucket_size * HALF;
        let bucket = || t.alloc("reduce bucket", bytes, Class::Workspace);
        *self.backward_buffers.borrow_mut() = (0..count).map(|_| bucket()).collect();
    }

    /// After backward: what is in the bucket is reduced, buffers go.
    pub fn after_backward(&self, t: &Tape) {
        self.flush(t);
        self.reducing.borrow_mut().clear();
        self.backward_buffers.borrow_mut().clear();
    }

    /// Reduces what is in the bucket, and gradients that did not fit into it.
    fn flush(&self, t: &Tape) {
        let elements = self.bucket.replace(0);
        let waiting: Vec<Rc<Param>> = self.waiting.borrow_mut().drain(..).collect();
        if self.zero.stage == 3 && elements > 0 {
            // `reduce_scatter_coalesced` concatenates the partitions rank by rank, unless
            // there is one tensor that needs no padding.
            let bytes = elements * HALF;
            t.on_stream(REDUCE, || drop(t.scratch("reduce-scatter input", bytes)));
        }
        let in_bucket: Vec<Rc<Param>> = self.in_bucket.borrow_mut().drain(..).collect();
        let to_host = self.zero.stage < 3 && self.zero.offload_optimizer;
        for param in in_bucket.iter().chain(&waiting).filter(|_| to_host) {
            self.send_to_host(t, param);
        }
        self.reducing.borrow_mut().clear();
        for param in waiting {
            let Some(gradient) = param.grad.borrow_mut().take() else { continue };
            // The owner's search for overflow waits for the reduction; other ranks go on
            // while NCCL still holds the gradient.
            let waits = !to_host || self.owned(&param) > 0 || self.ranks == 1;
            if !waits && Rc::strong_count(&gradient) == 1 {
                t.record_stream(&gradient);
                self.reducing.borrow_mut().push(gradient);
            }
        }
    }

    /// `optimizer.step()` of the wrapped optimizer.
    pub fn step(&self, t: &Tape, params: &[Rc<Param>]) {
        t.enter("optimizer".into());
        // `_partition_all_parameters`; reading the overflow flag waits for the device.
        for p in self.params.iter().filter(|p| self.gathers() && !self.persists(p)) {
            *p.data.borrow_mut() = None;
        }
        self.pending.borrow_mut().clear();
        self.available.set(0);
        self.position.set(0);
        self.queue.set(0);
        let groups = self.sub_groups.borrow().clone();
        let share: u64 = groups.iter().sum();
        if !self.zero.offload_optimizer {
            if self.zero.stage == 3 {
                // Overflow is looked for in all gradients at once: abs, then equal.
                t.on_stream(REDUCE, || {
                    for _ in 0..2 {
                        let magnitude = t.scratch("isinf", share * HALF);
                        let mask = t.scratch("isinf", share);
                        drop((magnitude, mask));
                    }
                });
            }
            // The norm of a gradient is taken in float64.
            let largest = params.iter().filter(|p| p.trained).map(|p| self.share_of(p.elements));
            drop(t.scratch("gradient in float64", largest.max().unwrap_or(0) * 8));
            for group in &groups {
                let flat = t.scratch("flat gradient", group * HALF);
                let wide = t.alloc("float32 gradient", group * F32, Class::Gradient);
                drop(flat);
                self.share.borrow_mut().clear();
                if group == groups.last().unwrap_or(&0) {
                    self.update(t);
                }
                drop(wide);
            }
        }
        self.share.borrow_mut().clear();
        for p in params {
            *p.grad.borrow_mut() = None;
        }
        self.traced.set(true);
    }
}

impl DeepSpeed {
    /// Whether parameters come and go.
    fn gathers(&self) -> bool {
        self.zero.stage == 3 && (self.ranks > 1 || self.zero.offload_param)
    }

    fn gather(&self, t: &Tape, p: &Param) {
        let bytes = self.share_of(p.elements) * self.ranks * HALF;
        let gather = || t.alloc("gathered weight", bytes, Class::Weight);
        *p.data.borrow_mut() = Some(t.on_stream(GATHER, gather));
        self.available.set(self.available.get() + p.elements);
    }

    /// Gathers what comes next: at least a bucket for each module, until as much is live as
    /// `stage3_max_live_parameters` allows. Modules are called faster than they use up a
    /// bucket each, so the limit is where it settles.
    fn prefetch(&self, t: &Tape) {
        let order = self.order.borrow();
        let room = MAX_LIVE.saturating_sub(self.available.get());
        let wanted = room.min(self.zero.prefetch_bucket_size);
        let mut fetched = 0;
        while fetched < wanted && self.queue.get() < order.len() {
            let p = &self.params[order[self.queue.get()]];
            self.queue.set(self.queue.get() + 1);
            if p.data.borrow().is_none() {
                self.gather(t, p);
                fetched += p.elements;
            }
        }
    }

    /// Whether a parameter is used again within `stage3_max_reuse_distance`, or was passed
    /// by the prefetcher because it was there.
    fn used_soon(&self, p: &Param) -> bool {
        let order = self.order.borrow();
        let mut passed = 0;
        for (at, &index) in order.iter().enumerate().skip(self.position.get()) {
            if passed >= MAX_LIVE && at >= self.queue.get() {
                return false;
            }
            if index == p.index {
                return true;
            }
            passed += self.params[index].elements;
        }
        false
    }
}

impl Engine for DeepSpeed {
    fn fetch(&self, t: &Tape, params: &[Rc<Param>], _forward: bool) {
        if !self.gathers() {
            return;
        }
        for p in params.iter().filter(|p| !self.persists(p)) {
            if p.data.borrow().is_none() {
                self.gather(t, p);
            }
            if !self.traced.get() {
                self.order.borrow_mut().push(p.index);
                continue;
            }
            self.position.set(self.position.get() + 1);
            self.queue.set(self.queue.get().max(self.position.get()));
        }
        if self.traced.get() {
            self.prefetch(t);
        }
    }

    fn release(&self, t: &Tape, params: &[Rc<Param>], _forward: bool) {
        if !self.gathers() {
            return;
        }
        for p in params.iter().filter(|p| !self.persists(p)) {
            if self.traced.get() && self.used_soon(p) {
                continue;
            }
            let Some(mem) = p.data.borrow_mut().take() else { continue };
            self.available.set(self.available.get() - p.elements);
            // `record_stream`: nothing waits for the compute stream but the allocator,
            // and the host is as far ahead of it as the prefetcher is allowed to be.
            if Rc::strong_count(&mem) == 1 {
                t.record_stream(&mem);
                let mut pending = self.pending.borrow_mut();
                pending.push_back((mem, p.elements));
                let mut total: u64 = pending.iter().map(|p| p.1).sum();
                while total > MAX_LIVE {
                    total -= pending.pop_front().map_or(0, |p| p.1);
                }
            }
        }
    }

    fn saved_weight_stays(&self) -> bool {
        !(self.zero.stage == 3 && self.zero.zero_init)
    }

    fn gradient_ready(&self, t: &Tape, param: &Rc<Param>) {
        let elements = param.elements;
        match self.zero.stage {
            3 => {
                if self.bucket.get() + elements > self.zero.reduce_bucket_size
                    || !self.waiting.borrow().is_empty()
                {
                    self.flush(t);
                }
                if elements > self.zero.reduce_bucket_size {
                    self.waiting.borrow_mut().push(param.clone());
                } else {
                    self.bucket.set(self.bucket.get() + elements);
                    *param.grad.borrow_mut() = None;
                }
            }
            2 => {
                if self.bucket.get() + elements > self.zero.reduce_bucket_size
                    || !self.waiting.borrow().is_empty()
                {
                    self.flush(t);
                }
                if self.share.borrow().is_empty() && !self.zero.offload_optimizer {
                    let bytes = self.share_of(self.trained) * HALF;
                    let share = t.alloc("gradient share", bytes, Class::Gradient);
                    self.share.borrow_mut().push(share);
                }
                if elements > self.zero.reduce_bucket_size {
                    self.waiting.borrow_mut().push(param.clone());
                } else {
                    self.bucket.set(self.bucket.get() + elements);
                    self.in_bucket.borrow_mut().push(param.clone());
                    *param.grad.borrow_mut() = None;
                }
            }
            // Stages 0 and 1 keep whole gradients until the step.
            _ => {}
        }
    }
}

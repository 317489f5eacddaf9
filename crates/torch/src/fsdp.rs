//! FSDP2 (`torch.distributed.fsdp.fully_shard`) on each layer and on the root.

use std::cell::RefCell;
use std::rc::Rc;

use plimsoll_program::Class;

use crate::recipe::Fsdp;
use crate::tape::{Engine, Mem, Param, Tape};

const GATHER: u8 = 1;
const REDUCE: u8 = 2;

/// Parameters that are gathered together.
struct Unit {
    params: Vec<Rc<Param>>,
    /// Bytes of the whole unit, padded to the ranks.
    bytes: u64,
}

/// The sharding of one rank.
pub struct FullyShard {
    how: Fsdp,
    ranks: u64,
    layers: Vec<Unit>,
    root: Unit,
    /// Sharded parameters (on the device unless offloaded).
    shards: RefCell<Vec<Mem>>,
    gradients: RefCell<Vec<Mem>>,
    /// Flat buffers of collectives that are still in use by the one after.
    gathering: RefCell<Vec<(usize, Mem)>>,
    copied: RefCell<Option<Mem>>,
    reducing: RefCell<Option<Mem>>,
}

impl FullyShard {
    pub fn new(how: Fsdp, ranks: u64, units: (Vec<Vec<Rc<Param>>>, Vec<Rc<Param>>)) -> FullyShard {
        let unit = |params: Vec<Rc<Param>>| {
            let shard = |p: &Rc<Param>| p.bytes().div_ceil(ranks) * ranks;
            Unit { bytes: params.iter().map(shard).sum(), params }
        };
        FullyShard {
            how,
            ranks,
            layers: units.0.into_iter().map(unit).collect(),
            root: unit(units.1),
            shards: RefCell::default(),
            gradients: RefCell::default(),
            gathering: RefCell::default(),
            copied: RefCell::default(),
            reducing: RefCell::default(),
        }
    }

    /// Sizes of the tensors that the optimizer sees.
    pub fn shard_elements(&self) -> Vec<(u64, u64)> {
        let units = self.layers.iter().chain([&self.root]);
        let trained = units.flat_map(|u| &u.params).filter(|p| p.trained);
        trained.map(|p| (p.elements.div_ceil(self.ranks), p.width)).collect()
    }

    pub fn load(&self, t: &Tape) {
        t.enter("load".into());
        if self.how.cpu_offload {
            return;
        }
        for p in self.layers.iter().chain([&self.root]).flat_map(|u| &u.params) {
            let bytes = p.bytes().div_ceil(self.ranks);
            self.shards.borrow_mut().push(t.alloc("shard", bytes, Class::Weight));
        }
    }

    pub fn host_bytes(&self) -> u64 {
        let all = self.layers.iter().chain([&self.root]).flat_map(|u| &u.params);
        let bytes: u64 = all.map(|p| p.bytes().div_ceil(self.ranks)).sum();
        if self.how.cpu_offload { 4 * bytes } else { 0 }
    }

    fn unit(&self, layer: Option<usize>) -> &Unit {
        layer.map_or(&self.root, |l| &self.layers[l])
    }

    /// The all-gather's flat output (and, offloaded, the shard on its way).
    fn start_gather(&self, t: &Tape, layer: Option<usize>) {
        let unit = self.unit(layer);
        let key = layer.unwrap_or(usize::MAX);
        let gathered = unit.params.iter().all(|p| p.data.borrow().is_some());
        if gathered || self.gathering.borrow().iter().any(|(k, _)| *k == key) {
            return;
        }
        let flat = t.on_stream(GATHER, || t.alloc("all-gather", unit.bytes, Class::Weight));
        self.gathering.borrow_mut().push((key, flat));
    }

    /// Copies the flat output into parameters. In forward the flat output is kept until the
    /// copy of the next unit, so that collectives overlap; in backward it goes at once.
    fn finish_gather(&self, t: &Tape, layer: Option<usize>, forward: bool) {
        let unit = self.unit(layer);
        let mut copied = false;
        for p in &unit.params {
            if p.data.borrow().is_none() {
                copied = true;
                *p.data.borrow_mut() = Some(t.alloc("unsharded weight", p.bytes(), Class::Weight));
            }
        }
        if !copied {
            return;
        }
        let key = layer.unwrap_or(usize::MAX);
        let mut gathering = self.gathering.borrow_mut();
        if let Some(at) = gathering.iter().position(|(k, _)| *k == key) {
            let flat = gathering.remove(at).1;
            *self.copied.borrow_mut() = forward.then_some(flat);
        }
    }

    fn reshard(&self, layer: Option<usize>) {
        for p in &self.unit(layer).params {
            *p.data.borrow_mut() = None;
        }
    }

    /// Reduce-scatter of a unit's gradients into this rank's shard.
    fn reduce(&self, t: &Tape, layer: Option<usize>) {
        let unit = self.unit(layer);
        let trained = unit.params.iter().filter(|p| p.grad.borrow().is_some());
        let bytes: u64 = trained.map(|p| p.bytes().div_ceil(self.ranks) * self.ranks).sum();
        if bytes == 0 {
            return;
        }
        // The input of the unit before is given up first.
        *self.reducing.borrow_mut() = None;
        let input = t.on_stream(REDUCE, || t.scratch("reduce-scatter input", bytes));
        for p in &unit.params {
            *p.grad.borrow_mut() = None;
        }
        let share = || t.alloc("gradient shard", bytes / self.ranks, Class::Gradient);
        let output = t.on_stream(REDUCE, share);
        if !self.how.cpu_offload {
            self.gradients.borrow_mut().push(output);
        }
        // It lives until the next unit reduces.
        *self.reducing.borrow_mut() = Some(input);
    }

    pub fn before_forward(&self, t: &Tape) {
        self.start_gather(t, None);
        self.finish_gather(t, None, true);
    }

    pub fn after_forward(&self) {
        if self.how.reshard_after_forward {
            self.reshard(None);
        }
    }

    pub fn before_backward(&self, t: &Tape) {
        *self.copied.borrow_mut() = None;
        self.start_gather(t, None);
        self.finish_gather(t, None, false);
    }

    pub fn after_backward(&self, t: &Tape) {
        self.reshard(None);
        self.reduce(t, None);
        *self.reducing.borrow_mut() = None;
        self.gathering.borrow_mut().clear();
        *self.copied.borrow_mut() = None;
    }

    pub fn zero_grad(&self) {
        self.gradients.borrow_mut().clear();
    }
}

impl Engine for FullyShard {
    fn by_layer(&self) -> bool {
        true
    }

    fn saved_weight_stays(&self) -> bool {
        // Storages are resized to nothing, so the graph's references hold no bytes.
        false
    }

    fn before_layer(&self, t: &Tape, layer: usize, forward: bool) {
        self.start_gather(t, Some(layer));
        self.finish_gather(t, Some(layer), forward);
        // Backward knows who comes next, and starts its collective now.
        if let Some(next) = layer.checked_sub(1).filter(|_| !forward) {
            self.start_gather(t, Some(next));
        }
    }

    fn after_layer(&self, t: &Tape, layer: usize, forward: bool) {
        if forward {
            if self.how.reshard_after_forward {
                self.reshard(Some(layer));
            }
        } else {
            self.reshard(Some(layer));
            self.reduce(t, Some(layer));
        }
    }
}

//! What optimizers allocate: state at the first step, temporaries at each.

use std::cell::RefCell;
use std::rc::Rc;

use plimsoll_program::Class;

use crate::recipe::Optim;
use crate::tape::{Mem, Param, Tape};

/// Elements below which bitsandbytes keeps 32-bit state.
const SMALL_TENSOR: u64 = 4096;
/// Elements that share a scale of 8-bit state.
const BLOCK: u64 = 256;

/// A flat tensor that an optimizer updates.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    pub elements: u64,
    /// Bytes of one element.
    pub width: u64,
}

/// State of an optimizer over its tensors.
pub struct Optimizer {
    kind: Optim,
    targets: Vec<Target>,
    /// Names of the parameters, where the optimizer sees them one by one.
    names: Vec<String>,
    state: RefCell<Vec<Mem>>,
}

impl Optimizer {
    pub fn new(kind: Optim, targets: Vec<Target>) -> Optimizer {
        Optimizer { kind, targets, names: Vec::new(), state: RefCell::default() }
    }

    pub fn for_params(kind: Optim, params: &[Rc<Param>]) -> Optimizer {
        let trained: Vec<&Rc<Param>> = params.iter().filter(|p| p.trained).collect();
        let target = |p: &&Rc<Param>| Target { elements: p.elements, width: p.width };
        Optimizer {
            names: trained.iter().map(|p| p.name.clone()).collect(),
            ..Optimizer::new(kind, trained.iter().map(target).collect())
        }
    }

    /// `optimizer.step()`.
    pub fn step(&self, t: &Tape) {
        t.enter("optimizer".into());
        if self.state.borrow().is_empty() {
            self.create(t);
            t.enter("optimizer".into());
        }
        match self.kind {
            Optim::AdamWForeach => {
                // `_foreach_sqrt(exp_avg_sqs)`: a list as large as all parameters.
                let roots: Vec<Mem> = self
                    .targets
                    .iter()
                    .map(|p| t.scratch("sqrt of exp_avg_sq", p.elements * p.width))
                    .collect();
                drop(roots);
            }
            Optim::AdamW => {
                for p in &self.targets {
                    // `(exp_avg_sq.sqrt() / bias_correction2_sqrt).add_(eps)`
                    let root = t.scratch("sqrt of exp_avg_sq", p.elements * p.width);
                    let denominator = t.scratch("denominator", p.elements * p.width);
                    drop((root, denominator));
                }
            }
            // One kernel, in place.
            Optim::AdamWFused
            | Optim::AdamW8bit
            | Optim::PagedAdamW
            | Optim::PagedAdamW8bit
            | Optim::Sgd => {}
        }
    }

    fn create(&self, t: &Tape) {
        let mut state = self.state.borrow_mut();
        let mut new = |label, bytes| state.push(t.alloc(label, bytes, Class::OptimizerState));
        for (index, p) in self.targets.iter().enumerate() {
            if let Some(name) = self.names.get(index) {
                t.enter(name.clone());
            }
            match self.kind {
                Optim::AdamW | Optim::AdamWForeach | Optim::AdamWFused => {
                    if self.kind == Optim::AdamWFused {
                        // `step` is a tensor on the device; otherwise it is on the host.
                        new("step", 4);
                    }
                    new("exp_avg", p.elements * p.width);
                    new("exp_avg_sq", p.elements * p.width);
                }
                Optim::AdamW8bit | Optim::PagedAdamW8bit if p.elements < SMALL_TENSOR => {
                    new("state1", p.elements * 4);
                    new("state2", p.elements * 4);
                }
                Optim::AdamW8bit => {
                    new("state1", p.elements);
                    new("state2", p.elements);
                    new("absmax1", p.elements.div_ceil(BLOCK) * 4);
                    new("absmax2", p.elements.div_ceil(BLOCK) * 4);
                }
                // Paged state is managed memory, outside the allocator; scales are not.
                Optim::PagedAdamW8bit => {
                    new("absmax1", p.elements.div_ceil(BLOCK) * 4);
                    new("absmax2", p.elements.div_ceil(BLOCK) * 4);
                }
                Optim::PagedAdamW | Optim::Sgd => {}
            }
        }
    }

    /// Bytes in managed memory.
    pub fn paged_bytes(&self) -> u64 {
        let of = |p: &Target| match self.kind {
            Optim::PagedAdamW => 2 * p.elements * p.width,
            Optim::PagedAdamW8bit if p.elements >= SMALL_TENSOR => 2 * p.elements,
            _ => 0,
        };
        self.targets.iter().map(of).sum()
    }
}

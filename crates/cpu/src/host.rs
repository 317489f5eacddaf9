//! Ops of the host's lane for a device of another kind: on its page-locked memory, by
//! the kernels of this one.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use plimsoll_plan::Layout;
use plimsoll_program::{Lane, Op, Program};

use crate::device::{Memory, Slabs};
use crate::pool::Pool;
use crate::slab::Slab;

/// The ops of a program that run on the host, with all that they need, so that they can
/// be called from wherever the device's stream has come to them.
pub struct HostOps {
    program: Program,
    layout: Layout,
    slabs: Slabs,
    rank: usize,
    pool: Arc<Pool>,
}

impl HostOps {
    /// Those of a program at its layout, in a host slab of `len` bytes at `base`, with the
    /// threads of a pool. The program is kept: what is captured may outlive it.
    ///
    /// # Safety
    /// The memory can be read and written as long as ops run. Nobody else touches what an
    /// op touches while it runs, and of ops that touch the same bytes one runs at a time.
    pub unsafe fn new(
        program: &Program,
        layout: &Layout,
        (base, len): (*mut u8, usize),
        rank: usize,
        pool: Arc<Pool>,
    ) -> HostOps {
        // SAFETY: the caller's word for the host's slab; nothing is ever in the other.
        let slabs = unsafe {
            Slabs {
                device: Slab::lent(std::ptr::dangling_mut::<u64>().cast(), 0),
                host: Slab::lent(base, len),
            }
        };
        HostOps { program: program.clone(), layout: layout.clone(), slabs, rank, pool }
    }

    /// Runs op `at` of the program.
    ///
    /// # Errors
    /// In words: the op is none of the host's, or its kernel panicked.
    pub fn run(&self, at: usize) -> Result<(), String> {
        let op: &Op = &self.program.ops[at];
        if self.program.lane(&op.kind) != Lane::Host {
            return Err("it does not run on the host".to_owned());
        }
        let memory = Memory {
            slabs: &self.slabs,
            program: &self.program,
            layout: &self.layout,
            rank: self.rank,
        };
        let run = AssertUnwindSafe(|| self.pool.install(|| memory.run(op)));
        catch_unwind(run).map_err(|panic| {
            let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
            text.or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_else(|| "a kernel panicked".to_owned())
        })
    }

    /// What an op is called in messages.
    pub fn name(&self, at: usize) -> String {
        self.program.op_name(at)
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_arch::{DType, preset};
    use plimsoll_plan::lay_out;
    use plimsoll_program::{NoWorkspace, Offload, Recipe, UpdateOn, build};

    use super::*;

    #[test]
    fn what_is_not_the_hosts_is_refused_and_a_panic_is_an_error() {
        let arch = preset("plimsoll-tiny").unwrap();
        let recipe = Recipe {
            offload: Offload::OPTIMIZER,
            update_on: UpdateOn::Host,
            ..Recipe::full(DType::Bf16, 1, 16)
        };
        let program = build::train(&arch, &recipe, &NoWorkspace).unwrap();
        let layout = lay_out(&program);
        let mut memory = vec![0u64; layout.host_bytes.div_ceil(8) as usize];
        let base: *mut u8 = memory.as_mut_ptr().cast();
        let pool = Arc::new(Pool::new(2).unwrap());
        let ops =
            |len| unsafe { HostOps::new(&program, &layout, (base, len), 0, Arc::clone(&pool)) };
        let all = ops(layout.host_bytes as usize);
        let on_host = |op: &Op| program.lane(&op.kind) == Lane::Host;
        let update = program.ops.iter().position(on_host).unwrap();
        all.run(update).unwrap();
        assert!(all.name(update).contains("adamw"), "{}", all.name(update));
        assert!(all.run(0).unwrap_err().contains("host"));
        // A slab that ends before its tensors.
        let error = ops(8).run(update).unwrap_err();
        assert!(error.contains("slab of 8"), "{error}");
        all.run(update).unwrap();
    }
}

//! Work sharing over the pool that calls a kernel.

use crate::pool;
pub use crate::pool::{thread_index, threads};

/// Elements below which sharing costs more than it saves.
pub const GRAIN: usize = 16 * 1024;

/// A pointer that tasks share; each task touches its own elements only.
#[derive(Clone, Copy)]
pub struct Shared<T>(*mut T);

// SAFETY: every use derives disjoint ranges per task.
unsafe impl<T: Send> Send for Shared<T> {}
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub fn new(data: &mut [T]) -> Self {
        Self(data.as_mut_ptr())
    }

    #[inline(always)]
    pub fn at(self, offset: usize) -> *mut T {
        self.0.wrapping_add(offset)
    }

    /// # Safety
    /// In bounds, and no other task holds an overlapping range.
    #[inline(always)]
    pub unsafe fn slice<'a>(self, offset: usize, len: usize) -> &'a mut [T] {
        unsafe { std::slice::from_raw_parts_mut(self.0.add(offset), len) }
    }
}

/// Runs `task(0..n)`, shared among the threads of the current pool when
/// `parallel`. Which thread runs which task never changes a result: tasks write
/// disjoint data.
#[inline]
pub fn for_each(n: usize, parallel: bool, task: impl Fn(usize) + Send + Sync) {
    if parallel && n > 1 {
        pool::for_each(n, task);
    } else {
        (0..n).for_each(task);
    }
}

/// Rows of a task, for rows of `width` elements.
pub fn rows_per_task(width: usize) -> usize {
    (GRAIN / width.max(1)).max(1)
}

//! Work sharing over rayon's pool without allocating.

use rayon::prelude::*;

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
        (0..n).into_par_iter().for_each(task);
    } else {
        (0..n).for_each(task);
    }
}

/// Rows of a task, for rows of `width` elements.
pub fn rows_per_task(width: usize) -> usize {
    (GRAIN / width.max(1)).max(1)
}

/// Number of the calling thread in its pool, below [`threads`].
pub fn thread_index() -> usize {
    rayon::current_thread_index().unwrap_or(0)
}

/// Threads of the pool that runs this, at least 1.
pub fn threads() -> usize {
    rayon::current_num_threads().max(1)
}

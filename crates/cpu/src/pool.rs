//! Threads that share the loop of one kernel at a time.
//!
//! A step is some hundred kernels with a barrier after each, and decoding runs
//! several thousand kernels a second. This pool publishes a loop, lets every
//! thread take iterations from a common counter, and waits for all: no queue,
//! no allocation, no lock while threads are awake.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread::JoinHandle;

/// How often an idle thread looks for work before it sleeps: some ten
/// microseconds, longer than the gap between two kernels of a step.
const SPINS: usize = 4_000;

thread_local! {
    /// Number of this thread in the pool that it works for; `None` outside.
    static INDEX: Cell<Option<usize>> = const { Cell::new(None) };
    /// The pool that the running closure of [`Pool::install`] belongs to.
    static CURRENT: Cell<*const State> = const { Cell::new(std::ptr::null()) };
}

/// A loop that all threads share.
struct Loop {
    /// Calls the closure behind `data` with an iteration.
    call: unsafe fn(*const (), usize),
    data: *const (),
    iterations: usize,
}

struct State {
    threads: usize,
    /// Counts loops; a thread that sees a new number joins.
    generation: AtomicUsize,
    current: AtomicPtr<Loop>,
    next: AtomicUsize,
    /// The current loop may be joined. Whoever joins counts itself `inside`
    /// first and looks here second; whoever ends a loop closes it first and
    /// waits for `inside` second. So nobody waits for a thread that sleeps.
    open: AtomicBool,
    inside: AtomicUsize,
    /// Helpers that have come up.
    started: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    sleeping: Mutex<usize>,
    wake: Condvar,
}

/// A fixed number of threads; the one that calls [`Pool::install`] is one of them.
pub struct Pool {
    state: Arc<State>,
    helpers: Vec<JoinHandle<()>>,
    /// One user at a time.
    user: Mutex<()>,
}

impl Pool {
    /// A pool of `threads` (at least one), the caller's own included.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn new(threads: usize) -> std::io::Result<Pool> {
        let threads = threads.max(1);
        let state = Arc::new(State {
            threads,
            generation: AtomicUsize::new(0),
            current: AtomicPtr::new(std::ptr::null_mut()),
            next: AtomicUsize::new(0),
            open: AtomicBool::new(false),
            inside: AtomicUsize::new(0),
            started: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleeping: Mutex::new(0),
            wake: Condvar::new(),
        });
        let helpers = (1..threads)
            .map(|index| {
                let state = Arc::clone(&state);
                std::thread::Builder::new()
                    .name(format!("plimsoll-{index}"))
                    .spawn(move || state.help(index))
            })
            .collect::<std::io::Result<Vec<_>>>()?;
        // A thread that comes up takes memory: not in the middle of a step.
        while state.started.load(Ordering::Acquire) < helpers.len() {
            std::thread::yield_now();
        }
        Ok(Pool { state, helpers, user: Mutex::new(()) })
    }

    pub fn threads(&self) -> usize {
        self.state.threads
    }

    /// Runs `f`; the loops of kernels inside it are shared by the pool.
    pub fn install<R>(&self, f: impl FnOnce() -> R) -> R {
        let _user = self.user.lock().unwrap_or_else(|e| e.into_inner());
        struct Restore(Option<usize>, *const State);
        impl Drop for Restore {
            fn drop(&mut self) {
                INDEX.set(self.0);
                CURRENT.set(self.1);
            }
        }
        let _restore = Restore(INDEX.replace(Some(0)), CURRENT.replace(&*self.state));
        f()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::SeqCst);
        self.state.publish();
        for helper in self.helpers.drain(..) {
            // A helper that panicked has been reported by the loop it ran.
            let _ = helper.join();
        }
    }
}

/// Number of the calling thread in its pool; 0 outside of one.
pub fn thread_index() -> usize {
    INDEX.get().unwrap_or(0)
}

/// Threads of the pool that runs this, or of the process's own pool; 1 inside
/// of a task.
pub fn threads() -> usize {
    let state = CURRENT.get();
    if !state.is_null() {
        // SAFETY: set by `install`, which outlives the closure that asks.
        unsafe { (*state).threads }
    } else if INDEX.get().is_some() {
        1
    } else {
        process_pool().threads()
    }
}

/// The pool of whoever has none: a thread a core, started at first use.
fn process_pool() -> &'static Pool {
    static POOL: OnceLock<Pool> = OnceLock::new();
    POOL.get_or_init(|| {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Pool::new(cores).or_else(|_| Pool::new(1)).expect("a pool of one starts no thread")
    })
}

/// Runs `task(0..iterations)` on all threads of the current pool, each
/// iteration once, and returns when all are done. Inside of a task the loop
/// runs on the calling thread.
pub fn for_each<F: Fn(usize) + Sync>(iterations: usize, task: F) {
    let state = CURRENT.get();
    if iterations < 2 || (state.is_null() && INDEX.get().is_some()) {
        return (0..iterations).for_each(task);
    }
    if state.is_null() {
        return process_pool().install(|| for_each(iterations, task));
    }
    // SAFETY: as above.
    unsafe { &*state }.run(iterations, &task);
}

impl State {
    fn run<F: Fn(usize) + Sync>(&self, iterations: usize, task: &F) {
        unsafe fn call<F: Fn(usize)>(data: *const (), iteration: usize) {
            // SAFETY: `data` is the `&F` of `run`, which waits for all calls.
            unsafe { (*data.cast::<F>())(iteration) }
        }
        let mut shared =
            Loop { call: call::<F>, data: std::ptr::from_ref(task).cast(), iterations };
        if self.threads == 1 {
            return self.work(&shared);
        }
        self.next.store(0, Ordering::Relaxed);
        self.current.store(&mut shared, Ordering::Release);
        self.open.store(true, Ordering::SeqCst);
        self.publish();
        // A loop inside a task stays on its thread.
        let outer = CURRENT.replace(std::ptr::null());
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.work(&shared)));
        CURRENT.set(outer);
        self.open.store(false, Ordering::SeqCst);
        let mut spins = 0;
        while self.inside.load(Ordering::SeqCst) > 0 {
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        if let Err(panic) = result {
            std::panic::resume_unwind(panic);
        }
        if self.panicked.swap(false, Ordering::Relaxed) {
            panic!("a kernel panicked on another thread");
        }
    }

    fn work(&self, shared: &Loop) {
        if self.threads == 1 {
            // SAFETY: the caller keeps the closure alive.
            return (0..shared.iterations).for_each(|i| unsafe { (shared.call)(shared.data, i) });
        }
        loop {
            let i = self.next.fetch_add(1, Ordering::Relaxed);
            if i >= shared.iterations {
                return;
            }
            // SAFETY: `run` does not return before every helper has left.
            unsafe { (shared.call)(shared.data, i) };
        }
    }

    /// Announces a loop, or the end, and wakes whoever sleeps.
    fn publish(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
        let sleeping = self.sleeping.lock().unwrap_or_else(|e| e.into_inner());
        if *sleeping > 0 {
            self.wake.notify_all();
        }
    }

    fn help(&self, index: usize) {
        INDEX.set(Some(index));
        self.started.fetch_add(1, Ordering::Release);
        let mut seen = 0;
        loop {
            seen = self.wait_for_loop(seen);
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            self.inside.fetch_add(1, Ordering::SeqCst);
            if self.open.load(Ordering::SeqCst) {
                // SAFETY: an open loop is alive until nobody is inside.
                let shared = unsafe { &*self.current.load(Ordering::Acquire) };
                let work = std::panic::AssertUnwindSafe(|| self.work(shared));
                if std::panic::catch_unwind(work).is_err() {
                    self.panicked.store(true, Ordering::Relaxed);
                }
            }
            self.inside.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Waits until the generation is no longer `seen`, and returns it.
    fn wait_for_loop(&self, seen: usize) -> usize {
        for _ in 0..SPINS {
            let now = self.generation.load(Ordering::Acquire);
            if now != seen {
                return now;
            }
            std::hint::spin_loop();
        }
        let mut sleeping = self.sleeping.lock().unwrap_or_else(|e| e.into_inner());
        *sleeping += 1;
        loop {
            // Read under the lock: `publish` takes it after it has counted.
            let now = self.generation.load(Ordering::SeqCst);
            if now != seen {
                *sleeping -= 1;
                return now;
            }
            sleeping = self.wake.wait(sleeping).unwrap_or_else(|e| e.into_inner());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn every_iteration_runs_once_and_the_caller_waits() {
        for threads in [1, 2, 3, 7] {
            let pool = Pool::new(threads).unwrap();
            for round in 0..300usize {
                let n = round % 17;
                let counts: Vec<AtomicU64> = (0..n).map(|_| AtomicU64::new(0)).collect();
                pool.install(|| {
                    assert_eq!(super::threads(), threads);
                    for_each(n, |i| {
                        assert!(thread_index() < threads);
                        counts[i].fetch_add(1, Ordering::Relaxed);
                        // Nested loops run where they are.
                        for_each(3, |_| {
                            counts[i].fetch_add(1, Ordering::Relaxed);
                        });
                    });
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 4));
            }
        }
    }

    #[test]
    fn sleeping_threads_wake_up() {
        let pool = Pool::new(3).unwrap();
        for _ in 0..20 {
            std::thread::sleep(std::time::Duration::from_millis(3));
            let sum = AtomicU64::new(0);
            pool.install(|| {
                for_each(100, |i| {
                    sum.fetch_add(i as u64, Ordering::Relaxed);
                })
            });
            assert_eq!(sum.load(Ordering::Relaxed), 4950);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_survives() {
        let pool = Pool::new(2).unwrap();
        for bad in [0, 63] {
            let run = || pool.install(|| for_each(64, |i| assert_ne!(i, bad)));
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
            assert!(result.is_err());
        }
        pool.install(|| for_each(8, |_| {}));
    }
}

//! Ranks that are threads of one process: each reads what the others show it.

use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use plimsoll_arch::DType;

use crate::sum::sum;
use crate::{AbortHandle, CommError, Communicator};

/// One rank of a group of threads.
pub struct ThreadGroup {
    rank: usize,
    shared: Arc<Shared>,
}

struct Shared {
    ranks: usize,
    state: Mutex<State>,
    wake: Condvar,
}

struct State {
    /// Counts barriers.
    generation: u64,
    arrived: usize,
    /// What each rank shows in the collective that is under way.
    shown: Vec<Shown>,
    ended: Option<(usize, String)>,
}

/// Memory of a rank that waits until all are done with it.
#[derive(Clone, Copy)]
struct Shown {
    data: *mut u8,
    len: usize,
}

// SAFETY: used between two barriers only, while its owner waits in the collective.
unsafe impl Send for Shown {}

/// The ranks of a new group, one for each thread.
pub fn threads(ranks: usize) -> Vec<ThreadGroup> {
    let shown = vec![Shown { data: std::ptr::null_mut(), len: 0 }; ranks];
    let state = Mutex::new(State { generation: 0, arrived: 0, shown, ended: None });
    let shared = Arc::new(Shared { ranks, state, wake: Condvar::new() });
    (0..ranks).map(|rank| ThreadGroup { rank, shared: Arc::clone(&shared) }).collect()
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl State {
    fn check(&self) -> Result<(), CommError> {
        match &self.ended {
            Some((rank, cause)) => Err(CommError::Aborted { rank: *rank, cause: cause.clone() }),
            None => Ok(()),
        }
    }
}

impl ThreadGroup {
    fn wait(&self, show: impl FnOnce(&mut State)) -> Result<(), CommError> {
        let mut state = self.shared.lock();
        state.check()?;
        show(&mut state);
        self.meet(state, true)
    }

    /// Waits until all ranks are here; an abort ends it early where it is `breakable`.
    fn meet(&self, mut state: MutexGuard<'_, State>, breakable: bool) -> Result<(), CommError> {
        state.arrived += 1;
        if state.arrived == self.shared.ranks {
            state.arrived = 0;
            state.generation += 1;
            self.shared.wake.notify_all();
            return Ok(());
        }
        let generation = state.generation;
        while state.generation == generation {
            if breakable {
                state.check()?;
            }
            state = self.shared.wake.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        Ok(())
    }

    /// Shows `data` to all ranks, and runs `work` on what all show. Nobody leaves
    /// before everybody's work is done.
    fn together(&self, data: &mut [u8], work: impl FnOnce(&[Shown])) -> Result<(), CommError> {
        let mine = Shown { data: data.as_mut_ptr(), len: data.len() };
        self.wait(|state| state.shown[self.rank] = mine)?;
        let shown = self.shared.lock().shown.clone();
        if let Some(rank) = shown.iter().position(|s| s.len != mine.len) {
            let error = CommError::Length { rank, ours: mine.len, theirs: shown[rank].len };
            self.abort(&error.to_string());
            return Err(error);
        }
        work(&shown);
        // An abort must not let a rank go whose memory others read: they are at work
        // between the barriers, never blocked, so all arrive here.
        self.finish()
    }

    /// A barrier that an abort does not break.
    fn finish(&self) -> Result<(), CommError> {
        self.meet(self.shared.lock(), false)
    }

    /// Copies part `rank` of what that rank shows to the same place of this rank's.
    ///
    /// # Safety
    /// Between the barriers of a collective in which nobody writes these parts.
    unsafe fn copy_part(&self, shown: &[Shown], rank: usize, range: std::ops::Range<usize>) {
        if rank != self.rank {
            // SAFETY: both ranges are in bounds, as all show the same length, and of
            // different buffers.
            unsafe {
                let from = shown[rank].data.add(range.start);
                let to = shown[self.rank].data.add(range.start);
                std::ptr::copy_nonoverlapping(from, to, range.len());
            }
        }
    }

    /// This rank's share of `shown` becomes its sum over all ranks.
    ///
    /// # Safety
    /// Between the barriers of a collective in which nobody else touches this share.
    unsafe fn sum_share(&self, shown: &[Shown], range: std::ops::Range<usize>, dtype: DType) {
        let mut result = vec![0u8; range.len().min(SHARE)];
        for start in range.clone().step_by(SHARE) {
            let len = SHARE.min(range.end - start);
            // SAFETY: in bounds; each rank reads its own share of every buffer only.
            let parts: Vec<&[u8]> = shown
                .iter()
                .map(|s| unsafe { std::slice::from_raw_parts(s.data.add(start), len) })
                .collect();
            sum(&mut result[..len], &parts, dtype);
            // SAFETY: as above; the parts are not read any more.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    result.as_ptr(),
                    shown[self.rank].data.add(start),
                    len,
                );
            }
        }
    }

    /// Bytes of a share of all elements, whole elements and about alike.
    fn share(&self, bytes: usize, rank: usize, dtype: DType) -> std::ops::Range<usize> {
        let elements = bytes / dtype.bytes();
        let per_rank = elements.div_ceil(self.shared.ranks);
        let at = |rank: usize| (rank * per_rank).min(elements) * dtype.bytes();
        at(rank)..at(rank + 1)
    }
}

/// Bytes that are summed at a time.
const SHARE: usize = 1 << 16;

impl Communicator for ThreadGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.shared.ranks
    }

    fn all_gather(&mut self, data: &mut [u8]) -> Result<(), CommError> {
        let part = data.len() / self.shared.ranks;
        self.together(data, |shown| {
            for rank in 0..shown.len() {
                // SAFETY: a rank writes the parts of others, which those only read.
                unsafe { self.copy_part(shown, rank, rank * part..(rank + 1) * part) };
            }
        })
    }

    fn reduce_scatter(&mut self, data: &mut [u8], dtype: DType) -> Result<(), CommError> {
        let part = data.len() / self.shared.ranks;
        self.together(data, |shown| {
            // SAFETY: a rank reads and writes its own part only.
            unsafe { self.sum_share(shown, self.rank * part..(self.rank + 1) * part, dtype) };
        })
    }

    fn all_reduce(&mut self, data: &mut [u8], dtype: DType) -> Result<(), CommError> {
        let len = data.len();
        self.together(data, |shown| {
            // SAFETY: a rank reads and writes its own share only.
            unsafe { self.sum_share(shown, self.share(len, self.rank, dtype), dtype) };
        })?;
        self.together(data, |shown| {
            for rank in 0..shown.len() {
                // SAFETY: a rank writes the shares of others, which those only read.
                unsafe { self.copy_part(shown, rank, self.share(len, rank, dtype)) };
            }
        })
    }

    fn broadcast(&mut self, data: &mut [u8], root: usize) -> Result<(), CommError> {
        let len = data.len();
        self.together(data, |shown| {
            // SAFETY: the root's is only read.
            unsafe { self.copy_part(shown, root, 0..len) };
        })
    }

    fn barrier(&mut self) -> Result<(), CommError> {
        self.wait(|_| {})
    }

    fn check(&self) -> Result<(), CommError> {
        self.shared.lock().check()
    }

    fn abort_handle(&self) -> AbortHandle {
        let (shared, rank) = (Arc::clone(&self.shared), self.rank);
        Arc::new(move |cause| {
            shared.lock().ended.get_or_insert((rank, cause.to_owned()));
            shared.wake.notify_all();
        })
    }
}

impl Drop for ThreadGroup {
    /// A rank that panics must not leave the others waiting.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abort("it panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run<T: Send>(ranks: usize, work: impl Fn(ThreadGroup) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let work = &work;
            let all: Vec<_> =
                threads(ranks).into_iter().map(|g| scope.spawn(move || work(g))).collect();
            all.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    #[test]
    fn collectives_add_and_gather_in_the_order_of_ranks() {
        for ranks in [1, 2, 3, 4] {
            let results = run(ranks, |mut group| {
                let rank = group.rank();
                let mut x: Vec<f32> = (0..ranks * 5).map(|i| (i * (rank + 1)) as f32).collect();
                group.all_reduce(bytemuck::cast_slice_mut(&mut x), DType::F32).unwrap();
                let mut y = x.clone();
                group.reduce_scatter(bytemuck::cast_slice_mut(&mut y), DType::F32).unwrap();
                let mut z = vec![0.0f32; ranks * 5];
                z[rank * 5..][..5].copy_from_slice(&y[rank * 5..][..5]);
                group.all_gather(bytemuck::cast_slice_mut(&mut z)).unwrap();
                let mut root = [rank as u8];
                group.broadcast(&mut root, ranks - 1).unwrap();
                assert_eq!(root, [(ranks - 1) as u8]);
                (x, z)
            });
            let factor = (1..=ranks).sum::<usize>();
            for (x, z) in results {
                for i in 0..ranks * 5 {
                    assert_eq!(x[i], (i * factor) as f32);
                    assert_eq!(z[i], (i * factor * ranks) as f32);
                }
            }
        }
    }

    #[test]
    fn a_rank_that_ends_ends_the_others_with_its_cause() {
        let results = run(3, |mut group| {
            if group.rank() == 1 {
                group.abort("the disk is full");
                return Ok(());
            }
            let mut data = [0u8; 12];
            group.all_reduce(&mut data, DType::F32).and_then(|()| group.barrier())
        });
        let expected = CommError::Aborted { rank: 1, cause: "the disk is full".into() };
        assert_eq!(results[0], Err(expected.clone()));
        assert_eq!(results[2], Err(expected));
    }

    #[test]
    fn a_rank_that_panics_ends_the_others() {
        let mut groups = threads(2);
        let (b, mut a) = (groups.pop().unwrap(), groups.pop().unwrap());
        let thread = std::thread::spawn(move || {
            let _b = b;
            panic!("on purpose");
        });
        let error = a.barrier().unwrap_err();
        assert!(matches!(error, CommError::Aborted { rank: 1, .. }), "{error}");
        assert!(thread.join().is_err());
    }
}

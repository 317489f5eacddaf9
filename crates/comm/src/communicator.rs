//! The collectives that a step is made of.

use std::sync::Arc;

use plimsoll_arch::DType;

use crate::CommError;

/// One rank of a group. All ranks call the same collectives in the same order; a
/// call blocks, without spinning, until this rank's share is done.
pub trait Communicator: Send {
    fn rank(&self) -> usize;

    fn ranks(&self) -> usize;

    /// `data` is as many equal parts as there are ranks, and holds this rank's; it
    /// leaves with all of them.
    ///
    /// # Errors
    /// A rank ended or is gone.
    fn all_gather(&mut self, data: &mut [u8]) -> Result<(), CommError>;

    /// This rank's part of `data` becomes its sum over all ranks; the others are
    /// left with anything. Elements are f32 or bf16.
    ///
    /// # Errors
    /// A rank ended or is gone.
    fn reduce_scatter(&mut self, data: &mut [u8], dtype: DType) -> Result<(), CommError>;

    /// `data` becomes its sum over all ranks, the same bits on each. Elements are
    /// f32 or bf16.
    ///
    /// # Errors
    /// A rank ended or is gone.
    fn all_reduce(&mut self, data: &mut [u8], dtype: DType) -> Result<(), CommError>;

    /// `data` becomes that of rank `root`.
    ///
    /// # Errors
    /// A rank ended or is gone.
    fn broadcast(&mut self, data: &mut [u8], root: usize) -> Result<(), CommError>;

    /// Waits for all ranks.
    ///
    /// # Errors
    /// A rank ended or is gone.
    fn barrier(&mut self) -> Result<(), CommError>;

    /// Whether the group is whole still; for who waits for something else meanwhile.
    ///
    /// # Errors
    /// A rank ended or is gone.
    fn check(&self) -> Result<(), CommError>;

    /// What ends the group, from any thread: whatever any rank waits for or calls from
    /// then on fails with the cause that it is given.
    fn abort_handle(&self) -> AbortHandle;

    /// Ends the group with a cause.
    fn abort(&self, cause: &str) {
        (self.abort_handle())(cause);
    }
}

/// Ends a group of ranks with a cause.
pub type AbortHandle = Arc<dyn Fn(&str) + Send + Sync>;

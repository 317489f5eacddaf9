//! What ranks agree on outside of a step's program.

use plimsoll_comm::CommError;
use plimsoll_plan::DeviceError;

use crate::Session;

pub(crate) fn broken(error: CommError) -> DeviceError {
    DeviceError::Source(Box::new(error))
}

impl Session<'_> {
    /// Ranks that train this model, one device each.
    pub fn ranks(&mut self) -> usize {
        self.device.group().map_or(1, |g| g.ranks())
    }

    pub fn rank(&self) -> usize {
        self.device.rank()
    }

    /// Rank 0 writes what there is one of.
    pub(crate) fn leads(&self) -> bool {
        self.rank() == 0
    }

    pub(crate) fn barrier(&mut self) -> Result<(), DeviceError> {
        match self.device.group() {
            Some(group) => group.barrier().map_err(broken),
            None => Ok(()),
        }
    }

    /// The sum of a number over all ranks.
    pub(crate) fn total(&mut self, value: u64) -> Result<u64, DeviceError> {
        let rank = self.rank();
        let Some(group) = self.device.group() else { return Ok(value) };
        let mut values = vec![0u64; group.ranks()];
        values[rank] = value;
        group.all_gather(bytemuck::cast_slice_mut(&mut values)).map_err(broken)?;
        Ok(values.iter().sum())
    }

    /// Bytes of rank 0, on all ranks.
    pub(crate) fn leaders_bytes(&mut self, bytes: Vec<u8>) -> Result<Vec<u8>, DeviceError> {
        let Some(group) = self.device.group() else { return Ok(bytes) };
        let mut length = (bytes.len() as u64).to_le_bytes();
        group.broadcast(&mut length, 0).map_err(broken)?;
        let mut bytes = bytes;
        bytes.resize(u64::from_le_bytes(length) as usize, 0);
        group.broadcast(&mut bytes, 0).map_err(broken)?;
        Ok(bytes)
    }
}

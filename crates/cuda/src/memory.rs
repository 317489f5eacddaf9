//! Memory of a GPU, for itself or for other GPUs to read as well.

use cudarc::driver::sys;

use crate::driver::cuda;
use crate::error::CudaError;

/// A piece of a GPU's memory.
pub(crate) struct Memory {
    pub address: u64,
    /// Of memory that was mapped: its bytes and what they are a mapping of.
    mapped: Option<(usize, sys::CUmemGenericAllocationHandle)>,
}

impl Memory {
    /// On the GPU of the current context.
    pub fn new(bytes: usize) -> Result<Memory, CudaError> {
        let mut address = 0;
        cuda!(cuMemAlloc_v2(&mut address, bytes.max(1)))?;
        Ok(Memory { address, mapped: None })
    }

    /// On `device`, with `readers` that reach it at the same address.
    ///
    /// Memory that is mapped belongs to no context. Of a context's memory a captured copy
    /// runs in that context: it would wait there behind what itself waits for this GPU (seen
    /// with driver 580).
    pub fn shared(
        bytes: usize,
        device: sys::CUdevice,
        readers: &[sys::CUdevice],
    ) -> Result<Memory, CudaError> {
        // SAFETY: plain words, all of them valid as zero.
        let mut kind: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        kind.type_ = sys::CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED;
        kind.location = location(device);
        let minimum = sys::CUmemAllocationGranularity_flags_enum::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let mut piece = 0;
        cuda!(cuMemGetAllocationGranularity(&mut piece, &kind, minimum))?;
        let len = bytes.max(1).checked_next_multiple_of(piece.max(1)).unwrap_or(usize::MAX);
        let (mut address, mut handle) = (0, 0);
        cuda!(cuMemCreate(&mut handle, len, &kind, 0))?;
        // From here on whatever was made is given back, also where the next call fails.
        let reserved = cuda!(cuMemAddressReserve(&mut address, len, 0, 0, 0));
        let mut memory = Memory { address, mapped: Some((len, handle)) };
        reserved?;
        if let Err(error) = cuda!(cuMemMap(address, len, 0, handle, 0)) {
            let _ = cuda!(cuMemAddressFree(address, len));
            memory.address = 0;
            return Err(error);
        }
        let access: Vec<sys::CUmemAccessDesc> = [&device]
            .into_iter()
            .chain(readers)
            .map(|device| sys::CUmemAccessDesc {
                location: location(*device),
                flags: sys::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            })
            .collect();
        cuda!(cuMemSetAccess(address, len, access.as_ptr(), access.len()))?;
        Ok(memory)
    }
}

fn location(device: sys::CUdevice) -> sys::CUmemLocation {
    // SAFETY: plain words, all of them valid as zero.
    let mut location: sys::CUmemLocation = unsafe { std::mem::zeroed() };
    location.type_ = sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE;
    location.id = device;
    location
}

impl Drop for Memory {
    fn drop(&mut self) {
        match self.mapped {
            None => {
                let _ = cuda!(cuMemFree_v2(self.address));
            }
            Some((len, handle)) => {
                if self.address != 0 {
                    let _ = cuda!(cuMemUnmap(self.address, len));
                    let _ = cuda!(cuMemAddressFree(self.address, len));
                }
                let _ = cuda!(cuMemRelease(handle));
            }
        }
    }
}

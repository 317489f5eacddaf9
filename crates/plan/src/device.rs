//! What a device must be able to do: hold one slab and run programs in it.

use std::ops::Range;

use plimsoll_comm::Communicator;
use plimsoll_program::{Home, Program};

use crate::{FillPiece, Layout, Quantizer};

/// Bytes of the slab of each home.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlabSizes {
    pub device: u64,
    /// Page-locked where the device is not the CPU itself.
    pub host: u64,
}

impl From<u64> for SlabSizes {
    /// Everything is on the device.
    fn from(device: u64) -> SlabSizes {
        SlabSizes { device, host: 0 }
    }
}

impl SlabSizes {
    pub fn of(self, home: Home) -> u64 {
        match home {
            Home::Device => self.device,
            Home::Host => self.host,
        }
    }
}

/// Bytes that any device takes at a time without a copy of them in between; a multiple
/// of the size of every element.
pub const UPLOAD_PIECE: usize = 16 << 20;

/// A device with its memory reserved.
///
/// A slab for each home is reserved once, at exactly the planned size, and is zero
/// then; nothing is allocated while a program runs.
pub trait Device {
    /// Bytes of the slabs.
    fn slabs(&self) -> SlabSizes;

    /// Fills `len` bytes at `offset` of the slab of a home. `fill` is given memory
    /// of that length to write to; on the CPU that is the slab itself.
    ///
    /// # Errors
    /// The device's own; or whatever `fill` reports, passed through.
    fn upload(
        &mut self,
        home: Home,
        offset: u64,
        len: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError>;

    /// As [`Device::upload`], in pieces of [`UPLOAD_PIECE`] bytes: what is large is never
    /// in memory twice, and goes while the next piece is made. `fill` is also told how
    /// many bytes there are before its piece.
    ///
    /// # Errors
    /// As for [`Device::upload`].
    fn upload_pieces(
        &mut self,
        home: Home,
        offset: u64,
        len: usize,
        fill: &mut FillPiece,
    ) -> Result<(), DeviceError> {
        for at in (0..len).step_by(UPLOAD_PIECE) {
            let piece = UPLOAD_PIECE.min(len - at);
            self.upload(home, offset + at as u64, piece, &mut |bytes| fill(at, bytes))?;
        }
        Ok(())
    }

    /// Hands `len` bytes at `offset` of the slab of a home to `read`.
    ///
    /// # Errors
    /// As for [`Device::upload`].
    fn download(
        &mut self,
        home: Home,
        offset: u64,
        len: usize,
        read: &mut dyn FnMut(&[u8]) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError>;

    /// The device as one that puts numbers in four bits by itself; none where that is
    /// left to the one who sends them.
    fn quantizer(&mut self) -> Option<&mut dyn Quantizer> {
        None
    }

    /// Bytes that the driver says this device has taken, and those of them that
    /// lie outside of the slab. `None` where there is no driver to ask: memory
    /// of the CPU is counted by the kernel, for the whole process.
    ///
    /// # Errors
    /// The driver's own.
    fn taken_bytes(&mut self) -> Result<Option<Taken>, DeviceError> {
        Ok(None)
    }

    /// Rank of this device among those that train one model.
    fn rank(&self) -> usize {
        0
    }

    /// The ranks that train one model, for what they agree on outside of programs;
    /// none for a device alone.
    fn group(&mut self) -> Option<&mut dyn Communicator> {
        None
    }

    /// Runs one section of a program once.
    ///
    /// # Errors
    /// The device's own.
    fn run(
        &mut self,
        program: &Program,
        layout: &Layout,
        section: usize,
    ) -> Result<(), DeviceError>;

    /// Runs one section once, as [`Device::run`] does, and measures each launch.
    ///
    /// # Errors
    /// The device's own.
    fn profile(
        &mut self,
        program: &Program,
        layout: &Layout,
        section: usize,
    ) -> Result<Vec<LaunchTime>, DeviceError>;
}

/// The measured time of one launch.
#[derive(Clone, Debug, PartialEq)]
pub struct LaunchTime {
    /// The ops that it covers: one, or neighbours that share a launch.
    pub ops: Range<usize>,
    pub seconds: f64,
}

/// Memory of a device as its driver counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    pub total: u64,
    /// Context, modules, libraries and captured sections.
    pub overhead: u64,
    /// What the kernel made resident for the slab in host memory.
    pub host: u64,
}

/// Why a device could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    #[error(
        "the system refused {bytes} bytes for the slab ({cause}): lower --batch or --seq, or free memory"
    )]
    Reserve { bytes: u64, cause: std::io::Error },
    #[error(
        "this program is that of one of {ranks} ranks, and the device belongs to {found}: give it a group of {ranks}"
    )]
    Ranks { ranks: usize, found: usize },
    #[error(
        "the system refused {bytes} bytes of page-locked host memory ({cause}): offload less, or raise `ulimit -l`"
    )]
    ReserveHost { bytes: u64, cause: std::io::Error },
    #[error("{0}")]
    Source(#[source] Box<dyn std::error::Error + Send + Sync>),
}

//! Memory-mapped files whose pages do not stay.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::{Mmap, MmapOptions};

use crate::ModelError;

/// A file mapped for reading.
///
/// The mapping is private and read only. As with every mapping, the file must
/// not shrink while it is open: the kernel answers an access behind its new
/// end with SIGBUS.
pub(crate) struct MappedFile {
    pub path: PathBuf,
    map: Mmap,
}

impl MappedFile {
    pub fn open(path: &Path) -> Result<MappedFile, ModelError> {
        let file = File::open(path).map_err(ModelError::io(path, "open"))?;
        let metadata = file.metadata().map_err(ModelError::io(path, "inspect"))?;
        if !metadata.is_file() {
            return Err(ModelError::not_a_model(path, "not a regular file"));
        }
        if metadata.len() == 0 {
            return Err(ModelError::not_a_model(path, "the file is empty"));
        }
        // SAFETY: the mapping is read only; that the file keeps its length is
        // the documented condition of this type.
        let map = unsafe { MmapOptions::new().map(&file) };
        let map = map.map_err(ModelError::io(path, "map"))?;
        Ok(MappedFile { path: path.to_path_buf(), map })
    }

    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Asks for the pages of a range at once: one call in place of a fault for
    /// every few pages. Only a hint.
    pub fn fetch(&self, range: Range<usize>) {
        self.advise(range, libc::MADV_POPULATE_READ);
    }

    /// Lets go of the resident pages of a range, so that reading a model does
    /// not count its file a second time. They stay in the page cache, and a
    /// later access finds them again.
    pub fn release(&self, range: Range<usize>) {
        self.advise(range, libc::MADV_DONTNEED);
    }

    fn advise(&self, range: Range<usize>, advice: libc::c_int) {
        let range = range.start.min(self.map.len())..range.end.min(self.map.len());
        if range.is_empty() {
            return;
        }
        let start = range.start / PAGE * PAGE;
        // SAFETY: the range lies in the mapping, which begins on a page; both
        // pieces of advice leave the contents of a read-only file mapping as
        // they are. Failure only costs speed or resident pages.
        unsafe {
            let address = self.map.as_ptr().add(start) as *mut libc::c_void;
            libc::madvise(address, range.end - start, advice);
        }
    }
}

/// Rounding to a multiple of the largest common page size (64 KiB) is right
/// for all smaller ones.
const PAGE: usize = 64 << 10;

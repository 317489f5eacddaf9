//! Measures a device into the profile that plans are made from.
//!
//! Everything is timed as training runs it: ops of small programs, through the
//! same [`Device`], many of them in one captured section, on random data, over
//! enough memory that no cache holds it.
//!
//! ```text
//! Grid        which shapes are timed
//! case        programs of one family of ops
//! Bed         a device, random bytes, a clock
//! calibrate   all families -> DeviceProfile
//! ```

mod bed;
mod case;
mod grid;
mod measure;
mod step;
mod token;

pub use grid::Grid;
pub use measure::{CalibrateError, Facts, calibrate, slab_bytes};

//! Recipes that fit, ranked by time and money.
//!
//! ```text
//! Space    everything that may be chosen: lines of recipes, each over batches
//! search   plans what decides, in threads; the rest follows, for bytes grow with the batch
//! Found    fastest, cheapest, smallest; nothing that was not planned is in it
//! ```
//!
//! This crate chooses; the caller plans. One plan answers for several devices at
//! once, for addresses do not depend on how fast a device is.

mod distinct;
mod rank;
mod search;
mod space;

pub use rank::{Lever, first_lever};
pub use search::{Candidate, Found, search};
pub use space::{Fixed, Space};

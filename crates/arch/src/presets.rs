//! Models by name.

use crate::{Architecture, ConfigError};

/// The architecture of a preset.
pub fn preset(_name: &str) -> Option<Result<Architecture, ConfigError>> {
    None
}

/// Names accepted by [`preset`].
pub fn preset_names() -> Vec<&'static str> {
    Vec::new()
}

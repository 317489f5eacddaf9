//! Reading `config.json`.

/// Why a configuration was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {}

//! What may live in host memory during a step.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use crate::{LayerRange, Layers, RecipeError};

/// What lives in page-locked host memory and visits the device when it is used.
///
/// Written `none`, or parts joined by `+`: `optimizer`, `weights` (only together with
/// it), and `activations`, which may name layers: `activations:0-30/2,31`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Offload {
    /// Optimizer state.
    pub optimizer: bool,
    /// The weights of the blocks.
    pub weights: bool,
    /// Blocks of which everything that is kept from forward to backward is in host
    /// memory in between. How much that is, recomputation decides.
    pub activations: Layers,
}

impl Offload {
    pub const NONE: Offload = Offload::of(false, false, Layers::NONE);
    pub const OPTIMIZER: Offload = Offload::of(true, false, Layers::NONE);
    pub const OPTIMIZER_WEIGHTS: Offload = Offload::of(true, true, Layers::NONE);
    pub const OPTIMIZER_ACTIVATIONS: Offload = Offload::of(true, false, Layers::All);
    pub const ACTIVATIONS: Offload = Offload::of(false, false, Layers::All);

    const fn of(optimizer: bool, weights: bool, activations: Layers) -> Offload {
        Offload { optimizer, weights, activations }
    }

    pub fn is_none(&self) -> bool {
        *self == Offload::NONE
    }

    /// Whether activations of any block are offloaded.
    pub fn any_activations(&self) -> bool {
        self.activations != Layers::NONE
    }
}

impl fmt::Display for Offload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts: Vec<String> = Vec::new();
        parts.extend(self.optimizer.then(|| "optimizer".to_owned()));
        parts.extend(self.weights.then(|| "weights".to_owned()));
        match &self.activations {
            Layers::All => parts.push("activations".to_owned()),
            Layers::Listed(ranges) if ranges.is_empty() => {}
            Layers::Listed(ranges) => {
                let ranges: Vec<String> = ranges.iter().map(LayerRange::to_string).collect();
                parts.push(format!("activations:{}", ranges.join(",")));
            }
        }
        f.write_str(if parts.is_empty() { "none" } else { "" })?;
        f.write_str(&parts.join("+"))
    }
}

impl Serialize for Offload {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl FromStr for Offload {
    type Err = RecipeError;

    fn from_str(text: &str) -> Result<Offload, RecipeError> {
        let bad = || RecipeError::OffloadText { text: text.to_owned() };
        let mut offload = Offload::NONE;
        if text == "none" {
            return Ok(offload);
        }
        for part in text.split('+') {
            let again = match part.split_once(':') {
                None if part == "optimizer" => std::mem::replace(&mut offload.optimizer, true),
                None if part == "weights" => std::mem::replace(&mut offload.weights, true),
                None if part == "activations" => {
                    std::mem::replace(&mut offload.activations, Layers::All) != Layers::NONE
                }
                Some(("activations", ranges)) => {
                    let ranges = ranges.split(',').map(str::parse).collect::<Result<_, _>>();
                    let layers = Layers::Listed(ranges.map_err(|_| bad())?);
                    std::mem::replace(&mut offload.activations, layers) != Layers::NONE
                }
                _ => return Err(bad()),
            };
            if again {
                return Err(bad());
            }
        }
        // What is frozen or updated elsewhere has no use for weights alone.
        if offload.weights && !offload.optimizer { Err(bad()) } else { Ok(offload) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offload_reads_what_it_writes() {
        for text in [
            "none",
            "optimizer",
            "optimizer+weights",
            "optimizer+activations",
            "activations",
            "activations:0-30/2,31",
            "optimizer+weights+activations:4",
        ] {
            let offload: Offload = text.parse().unwrap();
            assert_eq!(offload.to_string(), text);
            assert_eq!(offload.is_none(), text == "none");
            assert_eq!(offload.any_activations(), text.contains("activations"));
        }
        let some: Offload = "activations:0-30/2,31".parse().unwrap();
        let named: Vec<usize> = (0..40).filter(|l| some.activations.contains(*l)).collect();
        assert_eq!(named.len(), 17);
        for text in [
            "",
            "state",
            "weights",
            "none+optimizer",
            "optimizer+",
            "optimizer+optimizer",
            "activations:",
            "activations:3-1",
            "activations:1+activations",
            "optimizer:3",
        ] {
            assert!(text.parse::<Offload>().is_err(), "{text}");
        }
    }
}

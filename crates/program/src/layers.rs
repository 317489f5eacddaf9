//! Some layers of a model, as options name them.

use std::fmt;
use std::str::FromStr;

/// Layers `first` to `last`, every `step`-th of them: `0-15`, `0-30/2`, or one, `7`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerRange {
    pub first: usize,
    /// Inclusive; may lie beyond the model's last.
    pub last: usize,
    /// At least 1.
    pub step: usize,
}

impl LayerRange {
    pub fn contains(&self, layer: usize) -> bool {
        (self.first..=self.last).contains(&layer) && (layer - self.first).is_multiple_of(self.step)
    }
}

impl fmt::Display for LayerRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.first, self.last, self.step) {
            (first, last, _) if first == last => write!(f, "{first}"),
            (first, last, 1) => write!(f, "{first}-{last}"),
            (first, last, step) => write!(f, "{first}-{last}/{step}"),
        }
    }
}

/// Text is no range of layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRange;

impl FromStr for LayerRange {
    type Err = NoRange;

    fn from_str(text: &str) -> Result<LayerRange, NoRange> {
        let number = |text: &str| text.parse::<usize>().map_err(|_| NoRange);
        let (range, step) = match text.split_once('/') {
            Some((range, step)) => (range, number(step)?),
            None => (text, 1),
        };
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let range = LayerRange { first: number(first)?, last: number(last)?, step };
        if range.last < range.first || step == 0 { Err(NoRange) } else { Ok(range) }
    }
}

/// A choice of layers: all, or those that any of some ranges names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layers {
    All,
    Listed(Vec<LayerRange>),
}

impl Layers {
    pub const NONE: Layers = Layers::Listed(Vec::new());

    pub fn contains(&self, layer: usize) -> bool {
        match self {
            Layers::All => true,
            Layers::Listed(ranges) => ranges.iter().any(|range| range.contains(layer)),
        }
    }
}

impl Default for Layers {
    fn default() -> Layers {
        Layers::NONE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_read_what_they_write() {
        let cases: [(&str, &[usize]); 5] = [
            ("7", &[7]),
            ("0-3", &[0, 1, 2, 3]),
            ("1-9/3", &[1, 4, 7]),
            ("0-30/10", &[0, 10, 20, 30]),
            ("4-5/4", &[4]),
        ];
        for (text, layers) in cases {
            let range: LayerRange = text.parse().unwrap();
            assert_eq!(range.to_string(), text);
            let named: Vec<usize> = (0..40).filter(|layer| range.contains(*layer)).collect();
            assert_eq!(named, layers, "{text}");
        }
        for text in ["", "-", "3-1", "1-", "-1", "0-4/0", "0-4/", "/2", "a", "1-2-3", "1/2/3"] {
            assert_eq!(text.parse::<LayerRange>(), Err(NoRange), "{text}");
        }
    }
}

//! Where the ticks of an axis go.

use crate::format::{decimals_of, tick};

/// Values to pixels, with labelled ticks.
#[derive(Clone, Debug)]
pub struct Scale {
    pub low: f64,
    pub high: f64,
    /// Pixels of `low` and `high`.
    pub from: f64,
    pub to: f64,
    pub ticks: Vec<(f64, String)>,
}

impl Scale {
    pub fn pixel(&self, value: f64) -> f64 {
        self.from + (value - self.low) / (self.high - self.low) * (self.to - self.from)
    }

    /// An axis that shows `values` with about `count` round ticks, from zero
    /// if all are on one side of it. `size` is what a unit holds.
    pub fn linear(values: &[f64], size: f64, count: usize, from: f64, to: f64) -> Self {
        let fold = |f: fn(f64, f64) -> f64| values.iter().map(|v| v / size).fold(0.0, f);
        let (low, high): (f64, f64) = (fold(f64::min), fold(f64::max));
        let high = if high > low { high } else { low + 1.0 };
        let step = round_step((high - low) / count.max(1) as f64);
        let (first, last) = ((low / step).floor(), (high / step).ceil());
        let decimals = decimals_of(step);
        let ticks = (0..=(last - first) as usize)
            .map(|i| (first + i as f64) * step)
            .map(|v| (v * size, tick(v, decimals)))
            .collect();
        Self { low: first * step * size, high: last * step * size, from, to, ticks }
    }

    /// The axis of what was varied: ticks at the values themselves while they
    /// are few, at round multiples of their distance otherwise.
    pub fn varied(values: &[f64], from: f64, to: f64) -> Self {
        let mut xs = values.to_vec();
        xs.sort_by(f64::total_cmp);
        xs.dedup();
        let (min, max) = match (xs.first(), xs.last()) {
            (Some(&min), Some(&max)) => (min, max),
            _ => (0.0, 1.0),
        };
        // Room left and right, so that no marker sits on the frame.
        let pad = if max > min { (max - min) * 0.04 } else { 1.0 };
        let gap = xs.windows(2).map(|w| w[1] - w[0]).fold(f64::INFINITY, f64::min);
        let at: Vec<f64> = if xs.len() <= 20 || !gap.is_finite() {
            xs.clone()
        } else {
            let mut step = gap;
            let count = |step: f64| (max / step).floor() - (min / step).ceil();
            if gap == gap.round() && (gap as u64).is_power_of_two() && gap > 1.0 {
                while count(step) > 12.0 {
                    step *= 2.0;
                }
            } else {
                step = round_step((max - min) / 12.0).max(gap);
            }
            let first = (min / step).ceil();
            let last = (max / step).floor();
            (0..=(last - first).max(0.0) as usize).map(|i| (first + i as f64) * step).collect()
        };
        let decimals = at.iter().map(|&v| decimals_of(v)).max().unwrap_or(0);
        let mut scale = Self { low: min - pad, high: max + pad, from, to, ticks: Vec::new() };
        // From the right, where values that double are far apart, drop labels
        // that would touch.
        let mut edge = f64::INFINITY;
        for &value in at.iter().rev() {
            let label = tick(value, decimals);
            let half = label.len() as f64 * 3.6;
            let middle = scale.pixel(value);
            if middle + half + 8.0 <= edge {
                edge = middle - half;
                scale.ticks.push((value, label));
            }
        }
        scale.ticks.reverse();
        scale
    }
}

/// The smallest of 1, 2, 5 times a power of ten that is not below `step`.
fn round_step(step: f64) -> f64 {
    if !(step > 0.0 && step.is_finite()) {
        return 1.0;
    }
    let power = 10f64.powf(step.log10().floor());
    let factors = [1.0, 2.0, 5.0, 10.0];
    let enough = |f: &&f64| **f * power >= step * (1.0 - 1e-9);
    factors.iter().find(enough).unwrap_or(&10.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(scale: &Scale) -> Vec<&str> {
        scale.ticks.iter().map(|t| t.1.as_str()).collect()
    }

    #[test]
    fn from_zero_in_round_steps() {
        let scale = Scale::linear(&[3.4e9, 1e9], 1e9, 4, 100.0, 0.0);
        assert_eq!(labels(&scale), ["0", "1", "2", "3", "4"]);
        assert_eq!((scale.pixel(0.0), scale.pixel(4e9)), (100.0, 0.0));
        let signed = Scale::linear(&[-0.4, 0.9], 1.0, 3, 0.0, 1.0);
        assert_eq!(labels(&signed), ["-0.5", "0.0", "0.5", "1.0"]);
        assert_eq!(labels(&Scale::linear(&[], 1.0, 1, 0.0, 1.0)), ["0", "1"]);
    }

    #[test]
    fn varied_values() {
        let of = |values: &[f64]| Scale::varied(values, 0.0, 600.0);
        let few: Vec<f64> = (1..=9).map(f64::from).collect();
        assert_eq!(labels(&of(&few)).len(), 9);
        let many: Vec<f64> = (1..=41).map(f64::from).collect();
        assert_eq!(labels(&of(&many)), ["5", "10", "15", "20", "25", "30", "35", "40"]);
        let seq: Vec<f64> = (1..=32).map(|i| f64::from(i) * 64.0).collect();
        assert_eq!(labels(&of(&seq))[..2], ["256", "512"]);
        let doubling: Vec<f64> = (0..11).map(|i| 2f64.powi(i)).collect();
        let shown = of(&doubling);
        assert!(labels(&shown).contains(&"1,024") && labels(&shown).len() < 8);
        assert_eq!(labels(&of(&[7.0])), ["7"]);
        assert_eq!(of(&[]).ticks.len(), 0);
    }
}

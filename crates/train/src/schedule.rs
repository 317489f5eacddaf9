//! The learning rate of each optimizer step: a warm-up from zero, then a
//! cosine, linear or constant course.
//!
//! The multipliers are those of transformers 5.24 (`optimization.py`:
//! `get_cosine_schedule_with_warmup` with half a cycle,
//! `get_linear_schedule_with_warmup`, `get_constant_schedule_with_warmup`).

use std::f64::consts::PI;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What the rate does once the warm-up is over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// Half a cosine down to zero at the last step.
    #[default]
    Cosine,
    /// A straight line down to zero at the last step.
    Linear,
    /// The peak rate until the end.
    Constant,
}

impl FromStr for Decay {
    type Err = ScheduleError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "cosine" => Ok(Self::Cosine),
            "linear" => Ok(Self::Linear),
            "constant" => Ok(Self::Constant),
            _ => Err(ScheduleError::UnknownDecay(name.to_owned())),
        }
    }
}

/// Length of the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Warmup {
    /// Optimizer steps.
    Steps(u64),
    /// Share of all steps, 0 to 1; a fraction of a step counts as a whole one.
    Ratio(f64),
}

/// A schedule that cannot be followed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ScheduleError {
    /// Not a name of [`Decay`].
    #[error("unknown learning rate schedule `{0}`: choose cosine, linear or constant")]
    UnknownDecay(String),
    /// Negative, infinite or NaN.
    #[error("learning rate {0}: must be a finite number, zero or more")]
    PeakRate(f64),
    /// Outside 0 to 1.
    #[error("warm-up ratio {0}: must be between 0 and 1 (for a number of steps, give steps)")]
    WarmupRatio(f64),
}

/// The learning rate as a function of the step alone, so that a resumed run
/// needs nothing but its step number.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Schedule {
    peak: f64,
    decay: Decay,
    warmup_steps: u64,
    total_steps: u64,
}

impl Schedule {
    /// `peak` is the rate at the end of the warm-up and `total_steps` the
    /// number of optimizer steps of the whole run. A warm-up longer than the
    /// run is legal: the rate then only rises.
    pub fn new(
        peak: f64,
        decay: Decay,
        warmup: Warmup,
        total_steps: u64,
    ) -> Result<Self, ScheduleError> {
        if !peak.is_finite() || peak < 0.0 {
            return Err(ScheduleError::PeakRate(peak));
        }
        let warmup_steps = match warmup {
            Warmup::Steps(steps) => steps,
            Warmup::Ratio(ratio) if (0.0..=1.0).contains(&ratio) => {
                (total_steps as f64 * ratio).ceil() as u64
            }
            Warmup::Ratio(ratio) => return Err(ScheduleError::WarmupRatio(ratio)),
        };
        Ok(Self { peak, decay, warmup_steps, total_steps })
    }

    /// Number of optimizer steps before the peak rate.
    pub fn warmup_steps(&self) -> u64 {
        self.warmup_steps
    }

    /// The rate of the optimizer step with index `step`, counted from 0. As in
    /// transformers, step 0 of a warm-up has rate 0, and every step from
    /// `total_steps` on has rate 0 unless the course is constant.
    pub fn lr(&self, step: u64) -> f64 {
        self.peak * self.multiplier(step)
    }

    fn multiplier(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return step as f64 / self.warmup_steps as f64;
        }
        let course = self.total_steps.saturating_sub(self.warmup_steps).max(1) as f64;
        match self.decay {
            Decay::Constant => 1.0,
            Decay::Linear => self.total_steps.saturating_sub(step) as f64 / course,
            Decay::Cosine => {
                // Beyond the last step half a cosine would rise again; stay at its foot.
                let progress = ((step - self.warmup_steps) as f64 / course).min(1.0);
                0.5 * (1.0 + (PI * progress).cos())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(decay: Decay, warmup: Warmup, total: u64) -> Vec<f64> {
        let schedule = Schedule::new(1.0, decay, warmup, total).unwrap();
        (0..=total).map(|step| schedule.lr(step)).collect()
    }

    // From transformers 5.24 on a `LambdaLR` with rate 1, 3 warm-up steps of 10.
    #[test]
    fn equals_transformers() {
        let expected: [(Decay, [f64; 11]); 3] =
            [(Decay::Cosine, COSINE), (Decay::Linear, LINEAR), (Decay::Constant, CONSTANT)];
        for (decay, expected) in expected {
            let ours = rates(decay, Warmup::Steps(3), 10);
            for (step, (a, b)) in ours.iter().zip(expected).enumerate() {
                assert!((a - b).abs() < 1e-15, "{decay:?} step {step}: {a} vs {b}");
            }
        }
    }

    #[rustfmt::skip]
    const COSINE: [f64; 11] = [0.0, 0.3333333333333333, 0.6666666666666666, 1.0, 0.9504844339512095, 0.8117449009293668, 0.6112604669781572, 0.38873953302184283, 0.18825509907063326, 0.04951556604879048, 0.0];
    #[rustfmt::skip]
    const LINEAR: [f64; 11] = [0.0, 0.3333333333333333, 0.6666666666666666, 1.0, 0.8571428571428571, 0.7142857142857143, 0.5714285714285714, 0.42857142857142855, 0.2857142857142857, 0.14285714285714285, 0.0];
    #[rustfmt::skip]
    const CONSTANT: [f64; 11] = [0.0, 0.3333333333333333, 0.6666666666666666, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];

    #[test]
    fn ratio_rounds_up() {
        let ratio = rates(Decay::Linear, Warmup::Ratio(0.21), 10);
        assert_eq!(ratio, rates(Decay::Linear, Warmup::Steps(3), 10));
        let none = rates(Decay::Cosine, Warmup::Ratio(0.0), 4);
        assert_eq!(none[0], 1.0);
        let all = rates(Decay::Linear, Warmup::Ratio(1.0), 4);
        assert_eq!(all, [0.0, 0.25, 0.5, 0.75, 0.0]);
    }

    #[test]
    fn past_the_end_and_degenerate_lengths() {
        for total in [0, 1, 10] {
            for warmup in [0, 1, 20] {
                for decay in [Decay::Cosine, Decay::Linear, Decay::Constant] {
                    let s = Schedule::new(3e-4, decay, Warmup::Steps(warmup), total).unwrap();
                    for step in [0, 1, 5, 10, 19, 20, 1000, u64::MAX] {
                        let lr = s.lr(step);
                        assert!((0.0..=3e-4).contains(&lr), "{s:?} at {step}: {lr}");
                    }
                }
            }
        }
        let s = Schedule::new(1.0, Decay::Cosine, Warmup::Steps(0), 10).unwrap();
        assert_eq!(s.lr(15), 0.0);
    }

    #[test]
    fn refuses_nonsense() {
        let new = |peak, warmup| Schedule::new(peak, Decay::Cosine, warmup, 10);
        assert_eq!(new(-1.0, Warmup::Steps(0)), Err(ScheduleError::PeakRate(-1.0)));
        assert!(new(f64::NAN, Warmup::Steps(0)).is_err());
        assert!(new(f64::INFINITY, Warmup::Steps(0)).is_err());
        assert!(new(1.0, Warmup::Ratio(1.5)).is_err());
        assert!(new(1.0, Warmup::Ratio(f64::NAN)).is_err());
        assert!("cosin".parse::<Decay>().is_err());
        assert_eq!("linear".parse(), Ok(Decay::Linear));
    }
}

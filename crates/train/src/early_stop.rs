//! When to stop because the validation loss no longer falls, and which
//! checkpoint was the best one.

use serde::{Deserialize, Serialize};

/// Counts evaluations without progress. Stored inside a checkpoint, so that a
/// resumed run stops where the uninterrupted one would.
///
/// Two values are followed. `best` is the lowest loss seen: its checkpoint is
/// the one to keep. `reference` is what patience is measured against, and
/// moves only by improvements larger than `min_delta`; that many tiny steps
/// still add up to progress (Keras 3 `EarlyStopping`, Lightning 2 alike).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EarlyStop {
    /// Evaluations without progress after which to stop; `None` never stops,
    /// the best is followed all the same.
    patience: Option<u32>,
    min_delta: f64,
    reference: Option<f64>,
    waited: u32,
    best: Option<Best>,
}

/// The lowest loss so far and the optimizer step it was seen at.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    pub value: f64,
    pub step: u64,
}

/// What one evaluation means for the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// A new best: keep this checkpoint.
    pub improved: bool,
    /// Patience is used up.
    pub stop: bool,
}

/// Settings that make no sense.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum EarlyStopError {
    #[error("patience 0 would stop at the first evaluation: give 1 or more, or leave it out")]
    Patience,
    #[error("minimal improvement {0}: must be a finite number, zero or more")]
    MinDelta(f64),
}

impl EarlyStop {
    /// `patience` counts evaluations, not steps or epochs.
    pub fn new(patience: Option<u32>, min_delta: f64) -> Result<Self, EarlyStopError> {
        let new = Self { patience: None, min_delta: 0.0, reference: None, waited: 0, best: None };
        new.with_settings(patience, min_delta)
    }

    /// The same history under other settings: a resumed run may be given more
    /// patience than it was started with.
    ///
    /// # Errors
    /// As [`EarlyStop::new`].
    pub fn with_settings(
        self,
        patience: Option<u32>,
        min_delta: f64,
    ) -> Result<Self, EarlyStopError> {
        if patience == Some(0) {
            return Err(EarlyStopError::Patience);
        }
        if !min_delta.is_finite() || min_delta < 0.0 {
            return Err(EarlyStopError::MinDelta(min_delta));
        }
        Ok(Self { patience, min_delta, ..self })
    }

    /// Patience is used up: the run that this belongs to has ended.
    pub fn is_over(&self) -> bool {
        self.patience.is_some_and(|patience| self.waited >= patience)
    }

    /// Takes the validation loss at `step`. NaN and infinities are no progress.
    pub fn update(&mut self, step: u64, value: f64) -> Verdict {
        let improved = value.is_finite() && self.best.is_none_or(|best| value < best.value);
        if improved {
            self.best = Some(Best { value, step });
        }
        let progress = value.is_finite()
            && self.reference.is_none_or(|reference| value < reference - self.min_delta);
        if progress {
            self.reference = Some(value);
            self.waited = 0;
        } else {
            self.waited = self.waited.saturating_add(1);
        }
        Verdict { improved, stop: self.is_over() }
    }

    /// The lowest loss so far; `None` before the first finite one.
    pub fn best(&self) -> Option<Best> {
        self.best
    }

    /// Evaluations since the last progress.
    pub fn waited(&self) -> u32 {
        self.waited
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stops_at(patience: u32, min_delta: f64, losses: &[f64]) -> Option<usize> {
        let mut early = EarlyStop::new(Some(patience), min_delta).unwrap();
        losses.iter().enumerate().position(|(step, &loss)| early.update(step as u64, loss).stop)
    }

    #[test]
    fn patience_and_delta() {
        assert_eq!(stops_at(2, 0.0, &[3.0, 2.0, 2.0, 2.1]), Some(3));
        assert_eq!(stops_at(2, 0.0, &[3.0, 2.0, 2.5, 1.9, 2.0, 2.0]), Some(5));
        // 0.06 a step is less than the delta, but two of them are more.
        assert_eq!(stops_at(2, 0.1, &[1.0, 0.94, 0.88, 0.82, 0.76]), None);
        assert_eq!(stops_at(2, 0.1, &[1.0, 0.96, 0.92]), Some(2));
        assert_eq!(stops_at(1, 0.0, &[f64::NAN]), Some(0));
        assert_eq!(stops_at(2, 0.0, &[1.0, f64::NAN, f64::INFINITY]), Some(2));
    }

    #[test]
    fn best_is_the_lowest_even_within_delta() {
        let mut early = EarlyStop::new(None, 0.5).unwrap();
        assert_eq!(early.best(), None);
        for (step, loss) in [(10, 2.0), (20, 1.9), (30, f64::NAN), (40, 1.95)] {
            assert!(!early.update(step, loss).stop);
        }
        assert_eq!(early.best(), Some(Best { value: 1.9, step: 20 }));
        assert_eq!(early.waited(), 3);
    }

    #[test]
    fn survives_a_resume() {
        let losses = [3.0, 2.5, 2.6, f64::NAN, 2.4, 2.45, 2.41, 2.42];
        let mut whole = EarlyStop::new(Some(3), 0.01).unwrap();
        let mut resumed = whole.clone();
        for (step, loss) in losses.into_iter().enumerate() {
            let json = serde_json::to_string(&resumed).unwrap();
            resumed = serde_json::from_str(&json).unwrap();
            assert_eq!(whole.update(step as u64, loss), resumed.update(step as u64, loss));
            assert_eq!(whole, resumed);
        }
    }

    #[test]
    fn refuses_nonsense() {
        assert_eq!(EarlyStop::new(Some(0), 0.0), Err(EarlyStopError::Patience));
        assert!(EarlyStop::new(Some(1), -0.1).is_err());
        assert!(EarlyStop::new(Some(1), f64::NAN).is_err());
    }
}

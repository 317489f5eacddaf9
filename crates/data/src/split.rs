//! Validation data from a fraction of the samples.

use crate::order::Random;
use crate::{DataError, Sample};

/// Splits samples into training and validation data. Whole examples go to one
/// side or the other, chosen by `seed` alone; of running text (a whole file) the
/// last part of its tokens is the validation text. Both sides keep their order.
///
/// # Errors
/// A fraction outside `[0, 1)`, or one that leaves a side empty.
pub fn split(
    samples: Vec<Sample>,
    fraction: f64,
    seed: u64,
) -> Result<(Vec<Sample>, Vec<Sample>), DataError> {
    let setting = |expected| DataError::Setting {
        name: "validation fraction",
        value: fraction.to_string(),
        expected,
    };
    if !(0.0..1.0).contains(&fraction) {
        return Err(setting("expected 0 or more and less than 1"));
    }
    if fraction == 0.0 {
        return Ok((samples, Vec::new()));
    }
    let whole = samples.iter().filter(|s| !s.running).count();
    let mut chosen: Vec<usize> = (0..whole).collect();
    Random::new(seed ^ 0x5eed_0f59_1170).shuffle(&mut chosen);
    // At least one example where there are two, so that a small set is not left without.
    let count = (whole as f64 * fraction).round() as usize;
    chosen.truncate(count.max(1).min(whole.saturating_sub(1)));
    chosen.sort_unstable();

    let mut chosen = chosen.into_iter().peekable();
    let mut position = 0;
    let (mut train, mut validation) = (Vec::new(), Vec::new());
    for mut sample in samples {
        if sample.running {
            let cut = sample.ids.len() - (sample.ids.len() as f64 * fraction).round() as usize;
            let tail = Sample {
                ids: sample.ids.split_off(cut),
                trained: sample.trained.split_off(cut),
                running: true,
            };
            train.extend((!sample.ids.is_empty()).then_some(sample));
            validation.extend((!tail.ids.is_empty()).then_some(tail));
            continue;
        }
        match chosen.next_if_eq(&position) {
            Some(_) => validation.push(sample),
            None => train.push(sample),
        }
        position += 1;
    }
    if train.is_empty() || validation.is_empty() {
        return Err(setting(
            "it leaves no example on one side; give a validation file or more data",
        ));
    }
    Ok((train, validation))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(id: u32, len: usize, running: bool) -> Sample {
        Sample { ids: vec![id; len], trained: vec![true; len], running }
    }

    #[test]
    fn examples_are_not_shared_and_the_choice_is_fixed() {
        let samples: Vec<Sample> = (0..50).map(|i| sample(i, 3, false)).collect();
        let (train, validation) = split(samples.clone(), 0.1, 1).unwrap();
        assert_eq!((train.len(), validation.len()), (45, 5));
        let mut all: Vec<u32> = train.iter().chain(&validation).map(|s| s.ids[0]).collect();
        all.sort_unstable();
        assert_eq!(all, (0..50).collect::<Vec<_>>());
        assert_eq!(split(samples.clone(), 0.1, 1).unwrap().1, validation);
        assert_ne!(split(samples.clone(), 0.1, 2).unwrap().1, validation);
        assert_eq!(split(samples.clone(), 0.0, 1).unwrap().1.len(), 0);
        assert_eq!(split(samples[..2].to_vec(), 0.01, 1).unwrap().1.len(), 1);
        assert!(split(samples[..1].to_vec(), 0.5, 1).is_err());
        assert!(split(samples, 1.0, 1).is_err());
        let (train, validation) = split(vec![sample(1, 100, true)], 0.1, 1).unwrap();
        assert_eq!((train[0].ids.len(), validation[0].ids.len()), (90, 10));
    }
}

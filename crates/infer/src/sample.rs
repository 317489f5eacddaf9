//! Choosing the next token from its logits.

/// How to sample. The filters apply in the order of the fields, as
/// transformers 5.17 orders its logits processors.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits of tokens already seen when they are positive,
    /// multiplies when negative (Keskar et al., arXiv 1909.05858); 1 is off.
    pub repetition_penalty: f32,
    /// 0 takes the most likely token.
    pub temperature: f32,
    /// Keep this many tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the fewest tokens whose probabilities reach this sum; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this likely, relative to the likeliest; 0 keeps all.
    pub min_p: f32,
    pub seed: u64,
}

impl Sampling {
    pub fn greedy() -> Sampling {
        Sampling {
            repetition_penalty: 1.0,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
        }
    }
}

/// A setting out of its range.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{option} {value} is out of range: {allowed}")]
pub struct SamplerError {
    pub option: &'static str,
    pub value: f32,
    pub allowed: &'static str,
}

/// Draws tokens; the same seed draws the same tokens.
pub struct Sampler {
    sampling: Sampling,
    state: u64,
    /// (probability or logit, token), reused from token to token.
    candidates: Vec<(f32, u32)>,
}

impl Sampler {
    /// # Errors
    /// A setting is out of range.
    pub fn new(sampling: Sampling) -> Result<Sampler, SamplerError> {
        let check = |option, value: f32, ok: bool, allowed| {
            if ok { Ok(()) } else { Err(SamplerError { option, value, allowed }) }
        };
        let s = &sampling;
        check("temperature", s.temperature, (0.0..=100.0).contains(&s.temperature), "0 to 100")?;
        check("top-p", s.top_p, s.top_p > 0.0 && s.top_p <= 1.0, "above 0, up to 1")?;
        check("min-p", s.min_p, (0.0..1.0).contains(&s.min_p), "0 to below 1")?;
        let penalty = s.repetition_penalty;
        check("repetition-penalty", penalty, penalty > 0.0 && penalty <= 100.0, "above 0")?;
        let state = s.seed ^ 0x2545_f491_4f6c_dd1d;
        Ok(Sampler { sampling, state, candidates: Vec::new() })
    }

    /// Whether the next token is the one of the largest logit, whatever came before.
    pub fn is_greedy(&self) -> bool {
        self.sampling.temperature == 0.0 && self.sampling.repetition_penalty == 1.0
    }

    /// The next token after `seen`, from its logits (V).
    pub fn next(&mut self, logits: &[f32], seen: &[u32]) -> u32 {
        if self.is_greedy() {
            return argmax(logits.iter().copied().zip(0..));
        }
        let s = &self.sampling;
        self.candidates.clear();
        self.candidates.extend(logits.iter().copied().zip(0..));
        if s.repetition_penalty != 1.0 {
            let mut seen = seen.to_vec();
            seen.sort_unstable();
            seen.dedup();
            for token in seen {
                if let Some((logit, _)) = self.candidates.get_mut(token as usize) {
                    let up = *logit > 0.0;
                    *logit = if up {
                        *logit / s.repetition_penalty
                    } else {
                        *logit * s.repetition_penalty
                    };
                }
            }
        }
        if s.temperature == 0.0 {
            return argmax(self.candidates.iter().copied());
        }
        // Likeliest first; ties by token, so that a seed means the same everywhere.
        self.candidates.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        if s.top_k > 0 {
            self.candidates.truncate(s.top_k);
        }
        let most = self.candidates[0].0;
        let mut total = 0.0;
        for (p, _) in &mut self.candidates {
            *p = ((*p - most) / s.temperature).exp();
            total += *p;
        }
        if s.top_p < 1.0 {
            let mut sum = 0.0;
            let keep = self.candidates.iter().position(|(p, _)| {
                sum += p;
                sum >= s.top_p * total
            });
            self.candidates.truncate(keep.map_or(usize::MAX, |k| k + 1));
        }
        if s.min_p > 0.0 {
            let floor = s.min_p * self.candidates[0].0;
            self.candidates.retain(|(p, _)| *p >= floor);
        }
        let total: f32 = self.candidates.iter().map(|c| c.0).sum();
        let mut draw = uniform(&mut self.state) * total;
        for (p, token) in &self.candidates {
            draw -= p;
            if draw < 0.0 {
                return *token;
            }
        }
        self.candidates[self.candidates.len() - 1].1
    }
}

fn argmax(logits: impl Iterator<Item = (f32, u32)>) -> u32 {
    let mut best = (f32::NEG_INFINITY, 0);
    for (logit, token) in logits {
        if logit > best.0 {
            best = (logit, token);
        }
    }
    best.1
}

/// Uniform in [0, 1), by SplitMix64.
fn uniform(state: &mut u64) -> f32 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x ^ (x >> 31)) >> 40) as f32 / (1u64 << 24) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(sampling: Sampling, n: usize) -> Vec<u32> {
        let logits = [1.0, 3.0, 2.0, -1.0, 2.9];
        let mut sampler = Sampler::new(sampling).unwrap();
        (0..n).map(|_| sampler.next(&logits, &[])).collect()
    }

    #[test]
    fn greedy_takes_the_likeliest() {
        assert_eq!(draw(Sampling::greedy(), 3), [1, 1, 1]);
    }

    #[test]
    fn filters_keep_the_head_of_the_distribution() {
        let base = Sampling { temperature: 1.0, ..Sampling::greedy() };
        for (sampling, allowed) in [
            (Sampling { top_k: 2, ..base.clone() }, vec![1, 4]),
            (Sampling { top_p: 0.5, ..base.clone() }, vec![1, 4]),
            (Sampling { min_p: 0.5, ..base.clone() }, vec![1, 4]),
            (Sampling { top_k: 1, ..base.clone() }, vec![1]),
        ] {
            let drawn = draw(sampling.clone(), 200);
            assert!(drawn.iter().all(|t| allowed.contains(t)), "{sampling:?}");
            assert!(allowed.iter().all(|t| drawn.contains(t)), "{sampling:?}");
        }
    }

    #[test]
    fn frequencies_follow_the_softmax_and_the_seed_repeats() {
        let sampling = Sampling { temperature: 1.0, seed: 7, ..Sampling::greedy() };
        let drawn = draw(sampling.clone(), 20_000);
        assert_eq!(drawn, draw(sampling, 20_000));
        let share = drawn.iter().filter(|t| **t == 1).count() as f64 / drawn.len() as f64;
        let expected = 3f64.exp() / [1f64, 3.0, 2.0, -1.0, 2.9].map(f64::exp).iter().sum::<f64>();
        assert!((share - expected).abs() < 0.01, "{share} {expected}");
    }

    #[test]
    fn a_penalty_turns_the_choice() {
        let mut sampler =
            Sampler::new(Sampling { repetition_penalty: 2.0, ..Sampling::greedy() }).unwrap();
        assert_eq!(sampler.next(&[1.0, 3.0, 2.0], &[1]), 2);
    }

    #[test]
    fn settings_out_of_range_are_named() {
        let bad = Sampler::new(Sampling { top_p: 0.0, ..Sampling::greedy() });
        assert_eq!(bad.err().map(|e| e.option), Some("top-p"));
        assert!(Sampler::new(Sampling { temperature: f32::NAN, ..Sampling::greedy() }).is_err());
    }
}

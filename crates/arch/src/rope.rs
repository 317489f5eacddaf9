//! Rotary position frequencies (Su et al., arXiv 2104.09864) and their tables.

use crate::{Architecture, RopeScaling};

impl Architecture {
    /// The angle a position adds in each of the D / 2 planes of a head.
    ///
    /// In float32 where transformers 5.17 rounds to float32, so that angles
    /// agree at far positions too.
    pub fn inverse_frequencies(&self) -> Vec<f32> {
        (0..self.head_dim / 2)
            .map(|i| {
                let exponent = (2 * i) as f32 / self.head_dim as f32;
                let plain = 1.0 / (self.rope_theta as f32).powf(exponent);
                self.rope_scaling.as_ref().map_or(plain, |s| s.apply(plain))
            })
            .collect()
    }

    /// Fills `table` (positions, 2, D/2) with cos and then sin of every angle, for
    /// positions from 0 on.
    pub fn fill_rope_table(&self, table: &mut [f32]) {
        let frequencies = self.inverse_frequencies();
        let half = frequencies.len();
        for (position, row) in table.chunks_exact_mut(2 * half).enumerate() {
            let (cos, sin) = row.split_at_mut(half);
            for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(&frequencies) {
                let angle = f64::from(position as f32 * frequency);
                (*cos, *sin) = (angle.cos() as f32, angle.sin() as f32);
            }
        }
    }
}

impl RopeScaling {
    fn apply(&self, frequency: f32) -> f32 {
        match *self {
            RopeScaling::Linear { factor } => frequency / factor as f32,
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                let (factor, low, high) =
                    (factor as f32, low_freq_factor as f32, high_freq_factor as f32);
                let context = original_max_position_embeddings as f32;
                let wavelength = 2.0 * std::f32::consts::PI / frequency;
                if wavelength > context / low {
                    frequency / factor
                } else if wavelength < context / high {
                    frequency
                } else {
                    let smooth = (context / wavelength - low) / (high - low);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            }
        }
    }
}

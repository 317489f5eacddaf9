//! Dropout (Srivastava et al. 2014) whose mask is a hash of seed, stream and
//! element: backward computes it again instead of keeping it.

use super::Elem;
use super::optimizer::random;
use super::parallel::{Shared, for_each};

/// A mask over the elements of a tensor.
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    seed: [u32; 2],
    probability: f32,
}

const PIECE: usize = 1 << 14;

impl Dropout {
    /// `probability` is that of being dropped, below 1.
    pub fn new(seed: u64, stream: u32, probability: f32) -> Dropout {
        let mut x = seed ^ u64::from(stream).wrapping_mul(0x9fb2_1c65_1e98_df25);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^= x >> 31;
        Dropout { seed: [x as u32, (x >> 32) as u32], probability }
    }

    fn keeps(self, i: usize) -> bool {
        let high = ((i as u64) >> 32) as u32;
        let seed = [self.seed[0] ^ high.wrapping_mul(0x9e37_79b9), self.seed[1]];
        let x = random(seed, i as u32);
        // 24 bits: exact in a float.
        (x >> 8) as f32 * (1.0 / 16_777_216.0) >= self.probability
    }

    /// out = [out +] x / (1 - probability) where the mask keeps an element, else zero.
    pub fn apply<E: Elem>(self, x: &[E], out: &mut [E], accumulate: bool) {
        assert_eq!(x.len(), out.len(), "out");
        let scale = 1.0 / (1.0 - self.probability);
        let n = x.len();
        let out = Shared::new(out);
        for_each(n.div_ceil(PIECE), n > super::parallel::GRAIN, |piece| {
            let first = piece * PIECE;
            let len = PIECE.min(n - first);
            // SAFETY: one task a piece.
            let out = unsafe { out.slice(first, len) };
            for (i, (out, x)) in out.iter_mut().zip(&x[first..first + len]).enumerate() {
                let v = if self.keeps(first + i) { x.to_f32() * scale } else { 0.0 };
                *out = E::from_f32(if accumulate { out.to_f32() + v } else { v });
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drops_as_many_as_it_should_and_the_same_again() {
        let x = vec![1.0f32; 100_000];
        let mask = Dropout::new(7, 3, 0.25);
        let (mut a, mut b) = (vec![9.0f32; x.len()], vec![1.0f32; x.len()]);
        mask.apply(&x, &mut a, false);
        mask.apply(&x, &mut b, true);
        let kept = a.iter().filter(|v| **v != 0.0).count() as f64 / x.len() as f64;
        assert!((kept - 0.75).abs() < 0.01, "{kept}");
        assert!(a.iter().zip(&b).all(|(a, b)| *b == a + 1.0));
        assert!(a.iter().all(|v| *v == 0.0 || (v - 1.0 / 0.75).abs() < 1e-6));
    }
}

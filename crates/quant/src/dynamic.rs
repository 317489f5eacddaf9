//! The dynamic maps: 256 numbers in [-1, 1], denser towards zero (Dettmers,
//! "8-Bit Approximations for Parallelism in Deep Learning", arXiv 1511.04561;
//! bitsandbytes 0.49 `create_dynamic_map`).
//!
//! Decade i (0..7) covers [10^(i-7), 10^(i-6)] with the midpoints of 2^i equal
//! intervals (2^(i+1) in the unsigned map), beside 0 and 1. The signed map has
//! them with both signs, but no -1.

use std::sync::LazyLock;

/// Powers of ten that scale the decades; float32, as torch multiplies them.
const SCALES: [f32; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];

/// End of interval `k` of `n`, as `torch.linspace(0.1, 1, n + 1)[k]` rounds it:
/// from the nearer end, with a fused multiply-add.
fn bound(k: usize, n: usize) -> f32 {
    let step = (1.0f32 - 0.1) / n as f32;
    if k < n.div_ceil(2) {
        step.mul_add(k as f32, 0.1)
    } else {
        (-step).mul_add((n - k) as f32, 1.0)
    }
}

/// The number that lies `position` places above zero, where decade 0 has
/// `first` numbers.
fn magnitude(position: usize, first: usize) -> f32 {
    if position == 0 {
        return 0.0;
    }
    let at = position - 1 + first;
    let octave = at.ilog2() as usize;
    let n = 1 << octave;
    let decade = octave - first.ilog2() as usize;
    if decade == SCALES.len() {
        return 1.0;
    }
    let k = at - n;
    SCALES[decade] * ((bound(k, n) + bound(k + 1, n)) / 2.0)
}

/// One of the two maps, with the way from a number to its nearest code.
pub struct DynamicMap {
    values: [f32; 256],
    /// Element c is the largest number whose code is at most c.
    limits: [f32; 255],
}

impl DynamicMap {
    /// The signed map: 127 numbers below zero, zero at 127, 1 at 255.
    pub fn signed() -> &'static DynamicMap {
        static MAP: LazyLock<DynamicMap> =
            LazyLock::new(|| {
                DynamicMap::new(|c| {
                    if c < 127 { -magnitude(127 - c, 1) } else { magnitude(c - 127, 1) }
                })
            });
        &MAP
    }

    /// The unsigned map: zero at 0, 1 at 255.
    pub fn unsigned() -> &'static DynamicMap {
        static MAP: LazyLock<DynamicMap> = LazyLock::new(|| DynamicMap::new(|c| magnitude(c, 2)));
        &MAP
    }

    fn new(value: impl Fn(usize) -> f32) -> DynamicMap {
        let values: [f32; 256] = std::array::from_fn(value);
        let limits = std::array::from_fn(|c| {
            let middle = (values[c] + values[c + 1]) * 0.5;
            // The reference gives a number in the middle to the even code.
            if c % 2 == 0 { middle } else { middle.next_down() }
        });
        DynamicMap { values, limits }
    }

    /// All numbers, ascending.
    pub fn values(&self) -> &[f32; 256] {
        &self.values
    }

    /// Element c is the largest number whose code is at most c.
    pub fn limits(&self) -> &[f32; 255] {
        &self.limits
    }

    /// The number of a code.
    #[inline(always)]
    pub fn value(&self, code: u8) -> f32 {
        self.values[code as usize]
    }

    /// The code whose number is nearest to `x`; 0 for NaN.
    pub fn nearest(&self, x: f32) -> u8 {
        self.limits.partition_point(|limit| x > *limit) as u8
    }
}

/// The way from a magnitude to its position above zero by arithmetic, for loops
/// that must vectorize: positions grow linearly inside a decade, and more slowly
/// in each decade than in the one before, so that the smallest of seven lines is
/// right to one position; one comparison settles it.
pub struct Cells {
    slopes: [f32; 7],
    offsets: [f32; 7],
    /// Element j is the largest magnitude whose position is at most j.
    limits: [f32; 256],
}

impl Cells {
    /// Positions above code 127 of the signed map, or as many below it.
    pub fn signed() -> &'static Cells {
        static CELLS: LazyLock<Cells> =
            LazyLock::new(|| Cells::new(1, &DynamicMap::signed().limits[127..]));
        &CELLS
    }

    /// Codes of the unsigned map.
    pub fn unsigned() -> &'static Cells {
        static CELLS: LazyLock<Cells> =
            LazyLock::new(|| Cells::new(2, &DynamicMap::unsigned().limits));
        &CELLS
    }

    fn new(first: usize, positive: &[f32]) -> Cells {
        let mut limits = [f32::INFINITY; 256];
        limits[..positive.len()].copy_from_slice(positive);
        // A position is exact at the ends of intervals, where the limits are, but
        // for the first limit of a decade, which lies 0.2 above its end. Half a
        // position less is therefore always the position or the one before.
        let line = |i: usize| {
            let n = (first << i) as f64;
            let slope = n / (0.9 * f64::from(SCALES[i]));
            (slope as f32, (1.0 + n - first as f64 - n / 9.0 - 0.5) as f32)
        };
        Cells {
            slopes: std::array::from_fn(|i| line(i).0),
            offsets: std::array::from_fn(|i| Cells::MAGIC + line(i).1),
            limits,
        }
    }

    /// Added to a number below 256, leaves it in sixteenths in the low bits.
    const MAGIC: f32 = (1 << 19) as f32;

    /// Positions of magnitudes between 0 and 1; any for NaN.
    #[inline(always)]
    pub fn positions<const N: usize>(&self, x: &[f32; N], out: &mut [u32; N]) {
        let (slopes, offsets) = (self.slopes, self.offsets);
        for (x, out) in x.iter().zip(out.iter_mut()) {
            let mut least = x.mul_add(slopes[0], offsets[0]);
            for i in 1..7 {
                let y = x.mul_add(slopes[i], offsets[i]);
                least = if y < least { y } else { least };
            }
            *out = (least.to_bits() >> 4) & 0xff;
        }
        for (x, out) in x.iter().zip(out) {
            *out = out.wrapping_add(u32::from(*x > self.limits[(*out & 0xff) as usize]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every limit and its neighbours, and numbers all over.
    fn probes(limits: &[f32]) -> impl Iterator<Item = f32> {
        let near = limits.iter().flat_map(|x| {
            [x.next_down().next_down(), x.next_down(), *x, x.next_up(), x.next_up().next_up()]
        });
        let spread = (0..0x3f80_0000u32).step_by(1013).map(f32::from_bits);
        let all: Vec<f32> = near.chain(spread).chain([0.0, 1.0]).collect();
        all.into_iter().filter(|x| (0.0..=1.0).contains(x))
    }

    fn position(cells: &Cells, x: f32) -> u32 {
        let mut out = [0];
        cells.positions(&[x], &mut out);
        out[0]
    }

    #[test]
    fn arithmetic_finds_the_nearest_code() {
        let (map, cells) = (DynamicMap::signed(), Cells::signed());
        for x in probes(&map.limits) {
            let position = position(cells, x);
            assert_eq!(map.nearest(x), 127 + position as u8, "{x:e}");
            assert_eq!(map.nearest(-x), 127 - position.min(127) as u8, "-{x:e}");
        }
        let (map, cells) = (DynamicMap::unsigned(), Cells::unsigned());
        for x in probes(&map.limits) {
            assert_eq!(u32::from(map.nearest(x)), position(cells, x), "{x:e}");
        }
    }

    #[test]
    fn maps_are_ascending_and_their_own_nearest() {
        for map in [DynamicMap::signed(), DynamicMap::unsigned()] {
            assert!(map.values.windows(2).all(|w| w[0] < w[1]));
            for code in 0..=255u8 {
                assert_eq!(map.nearest(map.value(code)), code);
            }
            assert_eq!(map.nearest(f32::NAN), 0);
            assert_eq!(map.value(255), 1.0);
        }
    }
}

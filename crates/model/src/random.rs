//! Random numbers that weights start from.
//!
//! A number follows from seed, stream and place alone, so that neither order nor
//! threads nor ranks matter; and from sums, products and square roots of float32, which
//! are exact to the last bit on every machine, not from a library's logarithm. Loops have
//! no branches: eight billion of these numbers are made before a model of that size takes
//! its first step.

use std::f32::consts::{FRAC_PI_2, LN_2};

/// Numbers that are made at a time.
pub(crate) const TILE: usize = 1024;

/// Standard normal values at the places from `first` on (Box and Muller, 1958: places
/// 2n and 2n + 1 share 48 random bits).
pub(crate) fn normals(seed: u64, stream: u64, first: usize, out: &mut [f32]) {
    let stream = stream_of(seed, stream);
    let mut tile = [0.0; TILE];
    let mut made = first / 2 * 2;
    let mut done = 0;
    while done < out.len() {
        pairs(stream, made / 2, &mut tile);
        let skipped = first + done - made;
        let n = (TILE - skipped).min(out.len() - done);
        out[done..][..n].copy_from_slice(&tile[skipped..][..n]);
        (made, done) = (made + TILE, done + n);
    }
}

/// Uniform values between -1 and 1 at the places from `first` on.
pub(crate) fn uniforms(seed: u64, stream: u64, first: usize, out: &mut [f32]) {
    let stream = stream_of(seed, stream);
    for (i, x) in out.iter_mut().enumerate() {
        *x = 2.0 * unit((counter(stream, first + i) >> 40) as u32) - 1.0;
    }
}

fn pairs(stream: u64, first: usize, out: &mut [f32; TILE]) {
    let mut bits = [[0u32; 2]; TILE / 2];
    for (i, bits) in bits.iter_mut().enumerate() {
        let word = counter(stream, first + i);
        *bits = [(word >> 40) as u32, word as u32 & 0xff_ffff];
    }
    for (out, [a, b]) in out.as_chunks_mut::<2>().0.iter_mut().zip(bits) {
        let radius = (-2.0 * ln(unit(a))).sqrt();
        let [x, y] = direction(b);
        *out = [radius * x, radius * y];
    }
}

/// 24 bits as a number above 0, and 1 at most.
#[inline(always)]
fn unit(bits: u32) -> f32 {
    (bits as i32 as f32 + 0.5) * (1.0 / (1u32 << 24) as f32)
}

/// The natural logarithm of a number above 0 that is not subnormal, within 2e-7 of it
/// or of one: the exponent, and twice the artanh of (m - 1) / (m + 1) as a series, for
/// m within a factor of the root of two of one.
#[inline(always)]
fn ln(x: f32) -> f32 {
    // Bits of the root of a half: what is above it goes with the next exponent.
    const HALF_ROOT: i32 = 0x3f35_04f3;
    let above = x.to_bits() as i32 - HALF_ROOT;
    let exponent = above >> 23;
    let m = f32::from_bits((above - (exponent << 23) + HALF_ROOT) as u32);
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let series = 1.0 + z * (1.0 / 3.0 + z * (1.0 / 5.0 + z * (1.0 / 7.0 + z * (1.0 / 9.0))));
    exponent as f32 * LN_2 + 2.0 * s * series
}

/// A point of the unit circle: 22 bits choose the angle within a quarter around an axis,
/// where the Taylor series of sine and cosine are short, and 2 the axis.
#[inline(always)]
fn direction(bits: u32) -> [f32; 2] {
    let within = (bits & 0x3f_ffff) as i32 as f32 + 0.5;
    let t = (within * (1.0 / (1u32 << 22) as f32) - 0.5) * FRAC_PI_2;
    let z = t * t;
    let sin = t * (1.0 - z * (1.0 / 6.0 - z * (1.0 / 120.0 - z * (1.0 / 5040.0))));
    let cos = 1.0 - z * (0.5 - z * (1.0 / 24.0 - z * (1.0 / 720.0 - z * (1.0 / 40320.0))));
    let (odd, turned) = ((bits >> 22) & 1, (bits >> 23) & 1);
    let swap = 0u32.wrapping_sub(odd);
    let (c, s) = (cos.to_bits(), sin.to_bits());
    let (x, y) = ((c & !swap) | (s & swap), (s & !swap) | (c & swap));
    // A quarter turn takes (c, s) to (-s, c), half a turn changes both signs.
    [f32::from_bits(x ^ ((odd ^ turned) << 31)), f32::from_bits(y ^ (turned << 31))]
}

/// Random bits of a stream by their place.
#[inline(always)]
fn counter(stream: u64, index: usize) -> u64 {
    mix(stream ^ index as u64)
}

fn stream_of(seed: u64, stream: u64) -> u64 {
    mix(seed ^ stream.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// The finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
#[inline(always)]
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithm_and_direction_are_those_of_float64() {
        for bits in (0..1u32 << 24).step_by(331).chain([0, 1, 2, (1 << 24) - 1]) {
            let x = unit(bits);
            let exact = f64::from(x).ln();
            let off = (f64::from(ln(x)) - exact).abs();
            assert!(off <= 2e-7 * exact.abs().max(1.0), "ln({x}): {} for {exact}", ln(x));
            let [x, y] = direction(bits).map(f64::from);
            let quarter = f64::from(bits >> 22);
            let within = (f64::from(bits & 0x3f_ffff) + 0.5) / f64::from(1 << 22) - 0.5;
            let angle = (quarter + within) * std::f64::consts::FRAC_PI_2;
            let off = (x - angle.cos()).hypot(y - angle.sin());
            assert!(off < 5e-7, "{bits}: ({x}, {y}), {off} from angle {angle}");
        }
    }

    #[test]
    fn places_do_not_depend_on_where_one_starts() {
        let mut all = vec![0.0; 5000];
        normals(7, 3, 0, &mut all);
        for (first, n) in [(0, 1), (1, 1), (1, 2), (999, 2050), (1024, 1024), (1023, 3), (4999, 1)]
        {
            let mut some = vec![0.0; n];
            normals(7, 3, first, &mut some);
            assert_eq!(some, all[first..first + n], "{n} from {first}");
        }
        let mut other = vec![0.0; 5000];
        normals(7, 4, 0, &mut other);
        assert_ne!(all, other);
    }

    /// A seed is a promise: these are the values of this machine, and of every other.
    #[test]
    fn a_seed_has_its_values() {
        let mut x = [0.0; 4];
        normals(42, 7, 1001, &mut x);
        assert_eq!(x.map(f32::to_bits), [0x389d_ad0f, 0x3f49_0e99, 0xbc84_506c, 0xbea4_d7c6]);
    }

    /// Moments of a million values, and the shares of tails, within five deviations of
    /// what a normal distribution has; neighbours do not go together.
    #[test]
    fn values_are_normal() {
        let n = 1 << 20;
        let mut x = vec![0.0f32; n];
        normals(1, 0, 0, &mut x);
        let mean =
            |f: &dyn Fn(f64) -> f64| x.iter().map(|x| f(f64::from(*x))).sum::<f64>() / n as f64;
        let near = |what: &str, found: f64, expected: f64, variance: f64| {
            let limit = 5.0 * (variance / n as f64).sqrt();
            assert!((found - expected).abs() < limit, "{what}: {found}, not {expected} to {limit}");
        };
        near("mean", mean(&|x| x), 0.0, 1.0);
        near("variance", mean(&|x| x * x), 1.0, 2.0);
        near("third moment", mean(&|x| x.powi(3)), 0.0, 15.0);
        near("fourth moment", mean(&|x| x.powi(4)), 3.0, 96.0);
        for (limit, share) in [(1.0, 0.317_310_5), (2.0, 0.045_500_3), (3.0, 0.002_699_8)] {
            let found = mean(&|x| f64::from(u8::from(x.abs() > limit)));
            near("tail", found, share, share);
        }
        let products = |of: &dyn Fn(usize) -> f64| (0..n - 2).map(of).sum::<f64>() / n as f64;
        for step in [1, 2] {
            near("neighbours", products(&|i| f64::from(x[i]) * f64::from(x[i + step])), 0.0, 1.0);
            let squares = |i: usize| f64::from(x[i] * x[i]) * f64::from(x[i + step] * x[i + step]);
            near("neighbours' squares", products(&squares), 1.0, 8.0);
        }
    }

    #[test]
    fn uniform_values_fill_their_range() {
        let mut x = vec![0.0f32; 1 << 16];
        uniforms(1, 0, 5, &mut x);
        assert!(x.iter().all(|x| x.abs() <= 1.0));
        let mean = x.iter().sum::<f32>() / x.len() as f32;
        let squares = x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32;
        assert!(mean.abs() < 0.012 && (squares - 1.0 / 3.0).abs() < 0.006, "{mean} {squares}");
    }
}

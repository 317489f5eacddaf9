//! What the kernel tests share.
#![allow(dead_code)]

use plimsoll_cpu::kernels::Elem;

/// Fills workspaces, so that reading one before writing it shows.
pub const NAN: f32 = f32::NAN;

/// Uniform numbers in [-1, 1), the same for the same seed.
pub fn random<T: Elem>(n: usize, seed: u64) -> Vec<T> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            T::from_f32((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
        })
        .collect()
}

pub fn to_f64<T: Elem>(x: &[T]) -> Vec<f64> {
    x.iter().map(|x| x.to_f32() as f64).collect()
}

/// Runs `f` in pools of 1, 2 and 3 threads.
pub fn in_pools<R: Send>(f: impl Fn() -> R + Send + Sync) -> Vec<R> {
    static POOLS: std::sync::OnceLock<Vec<plimsoll_cpu::pool::Pool>> = std::sync::OnceLock::new();
    let pools =
        POOLS.get_or_init(|| (1..=3).map(|n| plimsoll_cpu::pool::Pool::new(n).unwrap()).collect());
    pools.iter().map(|pool| pool.install(&f)).collect()
}

pub fn assert_same_bits<T: Elem>(results: &[Vec<T>]) {
    for result in &results[1..] {
        for (i, (a, b)) in results[0].iter().zip(result).enumerate() {
            let (a, b) = (a.to_f32().to_bits(), b.to_f32().to_bits());
            assert_eq!(a, b, "element {i} depends on the number of threads");
        }
    }
}

/// Largest error relative to the root mean square of the reference.
pub fn error<T: Elem>(actual: &[T], expected: &[f64]) -> (f64, usize) {
    assert_eq!(actual.len(), expected.len());
    let square: f64 = expected.iter().map(|x| x * x).sum::<f64>() / expected.len().max(1) as f64;
    let scale = square.sqrt().max(1e-30);
    let mut worst = (0.0, 0);
    for (i, (a, e)) in actual.iter().zip(expected).enumerate() {
        let d = (a.to_f32() as f64 - e).abs() / scale.max(e.abs());
        let d = if d.is_nan() { f64::INFINITY } else { d };
        if d > worst.0 {
            worst = (d, i);
        }
    }
    worst
}

pub fn assert_close<T: Elem>(actual: &[T], expected: &[f64], tolerance: f64, what: &str) {
    let (worst, i) = error(actual, expected);
    assert!(
        worst <= tolerance,
        "{what}: element {i} is {:?}, expected {}: error {worst:e} above {tolerance:e}",
        actual[i],
        expected[i]
    );
}

/// Gradient of `f` at `x` by central differences in `f64`.
pub fn differences(x: &[f64], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let mut x = x.to_vec();
    (0..x.len())
        .map(|i| {
            let (at, h) = (x[i], 1e-5);
            x[i] = at + h;
            let above = f(&x);
            x[i] = at - h;
            let below = f(&x);
            x[i] = at;
            (above - below) / (2.0 * h)
        })
        .collect()
}

pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Tolerance for results stored as `T`.
pub fn tolerance<T: Elem>(exact: f64) -> f64 {
    if T::IS_F32 { exact } else { 6e-3 }
}

/// Fills `table` (positions, 2, D/2) with cos and then sin of
/// position * inv_freq, for positions 0, 1, ...; the angle is taken in `f64`.
///
/// `inv_freq` (D/2) carries the model's scaling (none, linear, llama3), `factor`
/// multiplies both (1 except for YaRN's attention factor).
pub fn rope_table(inv_freq: &[f64], factor: f64, table: &mut [f32]) {
    let half = inv_freq.len();
    assert_eq!(table.len() % (2 * half).max(1), 0, "table");
    for (position, row) in table.chunks_exact_mut((2 * half).max(1)).enumerate() {
        let (cos, sin) = row.split_at_mut(half);
        for ((cos, sin), f) in cos.iter_mut().zip(sin).zip(inv_freq) {
            let (s, c) = (position as f64 * f).sin_cos();
            *cos = (c * factor) as f32;
            *sin = (s * factor) as f32;
        }
    }
}

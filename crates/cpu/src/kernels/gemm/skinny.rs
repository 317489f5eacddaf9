//! The linear layer of decoding: a handful of rows, bound by the bandwidth with
//! which the weight streams in.

use crate::kernels::elem::Elem;
use crate::kernels::parallel::{Shared, for_each};
#[cfg(target_arch = "x86_64")]
use crate::kernels::simd::{Isa, isa};
use crate::kernels::simd::{LANES, sum_lanes};

/// Most rows of x that [`linear_skinny`] takes.
pub const SKINNY_ROWS: usize = 8;

// Bytes of the weight that one task reads.
const TASK_BYTES: usize = 128 * 1024;

/// `f32` elements of workspace of [`linear_skinny`].
pub fn linear_skinny_workspace(m: usize, k: usize) -> usize {
    m * k
}

/// y = x wᵀ, or y += x wᵀ where `accumulate`, plus `bias`: x (M, K) with M at most
/// [`SKINNY_ROWS`], w (N, K), y (M, N), bias (N), all without gaps.
///
/// The weight is read once, in place.
pub fn linear_skinny<X: Elem, W: Elem, Y: Elem>(
    x: &[X],
    w: &[W],
    bias: Option<&[W]>,
    y: &mut [Y],
    (m, n, k): (usize, usize, usize),
    accumulate: bool,
    ws: &mut [f32],
) {
    assert!(m <= SKINNY_ROWS, "{m} rows, at most {SKINNY_ROWS}");
    assert_eq!(x.len(), m * k, "x");
    assert_eq!(w.len(), n * k, "w");
    assert_eq!(y.len(), m * n, "y");
    if let Some(bias) = bias {
        assert_eq!(bias.len(), n, "bias");
    }
    let xs = &mut ws[..m * k];
    for (to, from) in xs.iter_mut().zip(x) {
        *to = from.to_f32();
    }
    let (xs, y) = (&*xs, Shared::new(y));
    let rows = (TASK_BYTES / (k * size_of::<W>()).max(1)).max(1).next_multiple_of(4);
    for_each(n.div_ceil(rows), m * n * k > 32 * 1024, |task| {
        let range = task * rows..n.min((task + 1) * rows);
        match m {
            0 => {}
            1 => columns::<_, _, 1, 4>(xs, w, bias, y, n, k, range, accumulate),
            2 => columns::<_, _, 2, 4>(xs, w, bias, y, n, k, range, accumulate),
            3 => columns::<_, _, 3, 4>(xs, w, bias, y, n, k, range, accumulate),
            4 => columns::<_, _, 4, 2>(xs, w, bias, y, n, k, range, accumulate),
            5 => columns::<_, _, 5, 2>(xs, w, bias, y, n, k, range, accumulate),
            6 => columns::<_, _, 6, 2>(xs, w, bias, y, n, k, range, accumulate),
            7 => columns::<_, _, 7, 1>(xs, w, bias, y, n, k, range, accumulate),
            _ => columns::<_, _, 8, 1>(xs, w, bias, y, n, k, range, accumulate),
        }
    });
}

/// The columns `range` of y, `R` rows of w at a time.
fn columns<W: Elem, Y: Elem, const M: usize, const R: usize>(
    xs: &[f32],
    w: &[W],
    bias: Option<&[W]>,
    y: Shared<Y>,
    n: usize,
    k: usize,
    range: std::ops::Range<usize>,
    accumulate: bool,
) {
    let mut j = range.start;
    while j < range.end {
        let rows = R.min(range.end - j);
        let mut out = [[0.0; R]; M];
        if rows == R {
            out = dots::<W, M, R>(xs, &w[j * k..(j + R) * k], k, k);
        } else {
            for r in 0..rows {
                let one = dots::<W, M, 1>(xs, &w[(j + r) * k..(j + r + 1) * k], k, k);
                for i in 0..M {
                    out[i][r] = one[i][0];
                }
            }
        }
        for (i, out) in out.iter().enumerate() {
            // SAFETY: this task owns these columns.
            let y = unsafe { y.slice(i * n + j, rows) };
            for (r, y) in y.iter_mut().enumerate() {
                let mut sum = out[r];
                if accumulate {
                    sum += y.to_f32();
                }
                if let Some(bias) = bias {
                    sum += bias[j + r].to_f32();
                }
                *y = Y::from_f32(sum);
            }
        }
        j += rows;
    }
}

/// Dot products of `M` rows of xs (`k` apart) with `R` rows of w (`stride` apart).
#[inline]
pub fn dots<W: Elem, const M: usize, const R: usize>(
    xs: &[f32],
    w: &[W],
    stride: usize,
    k: usize,
) -> [[f32; R]; M] {
    assert!(xs.len() >= M * k && w.len() >= (R - 1) * stride + k);
    #[cfg(target_arch = "x86_64")]
    if isa() >= Isa::Avx2 {
        // SAFETY: the processor has the instructions, and the rows are in bounds.
        return unsafe { x86::dots(xs.as_ptr(), w.as_ptr(), stride, k) };
    }
    let mut out = [[0.0; R]; M];
    for i in 0..M {
        for r in 0..R {
            let (x, w) = (&xs[i * k..(i + 1) * k], &w[r * stride..r * stride + k]);
            let mut acc = [0.0f32; LANES];
            let whole = k / LANES * LANES;
            for p in (0..whole).step_by(LANES) {
                for l in 0..LANES {
                    acc[l] += w[p + l].to_f32() * x[p + l];
                }
            }
            out[i][r] = sum_lanes(acc);
            for p in whole..k {
                out[i][r] += w[p].to_f32() * x[p];
            }
        }
    }
    out
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use crate::kernels::elem::Elem;
    use crate::kernels::gemm::pack::load8;
    use std::arch::x86_64::*;

    /// [`super::dots`] with `M * R` accumulators, at most 12 of the 16 registers.
    #[target_feature(enable = "avx2,fma,bmi2")]
    pub unsafe fn dots<W: Elem, const M: usize, const R: usize>(
        xs: *const f32,
        w: *const W,
        stride: usize,
        k: usize,
    ) -> [[f32; R]; M] {
        unsafe {
            let mut acc = [[_mm256_setzero_ps(); R]; M];
            let mut more = [[_mm256_setzero_ps(); R]; M];
            let mut p = 0;
            if M == 1 {
                // Twice as many accumulators hide the latency of the addition.
                while p + 16 <= k {
                    let x0 = _mm256_loadu_ps(xs.add(p));
                    let x1 = _mm256_loadu_ps(xs.add(p + 8));
                    for r in 0..R {
                        let w = w.add(r * stride + p);
                        acc[0][r] = _mm256_fmadd_ps(load8(w), x0, acc[0][r]);
                        more[0][r] = _mm256_fmadd_ps(load8(w.add(8)), x1, more[0][r]);
                    }
                    p += 16;
                }
                for r in 0..R {
                    acc[0][r] = _mm256_add_ps(acc[0][r], more[0][r]);
                }
            }
            while p + 8 <= k {
                for r in 0..R {
                    let w = load8(w.add(r * stride + p));
                    for i in 0..M {
                        let x = _mm256_loadu_ps(xs.add(i * k + p));
                        acc[i][r] = _mm256_fmadd_ps(w, x, acc[i][r]);
                    }
                }
                p += 8;
            }
            let mut out = [[0.0; R]; M];
            for i in 0..M {
                out[i] = sums(&acc[i]);
                for q in p..k {
                    for r in 0..R {
                        let w = (*w.add(r * stride + q)).to_f32();
                        out[i][r] = w.mul_add(*xs.add(i * k + q), out[i][r]);
                    }
                }
            }
            out
        }
    }

    /// The sum of each vector's lanes.
    #[inline]
    #[target_feature(enable = "avx2,fma,bmi2")]
    fn sums<const R: usize>(x: &[__m256; R]) -> [f32; R] {
        let mut out = [0.0; R];
        for r in (0..R).step_by(4) {
            let at = |i: usize| x[(r + i).min(R - 1)];
            let low = _mm256_hadd_ps(at(0), at(1));
            let high = if R > 2 { _mm256_hadd_ps(at(2), at(3)) } else { low };
            let both = _mm256_hadd_ps(low, high);
            let sum = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps::<1>(both));
            let mut four = [0.0f32; 4];
            // SAFETY: four floats.
            unsafe { _mm_storeu_ps(four.as_mut_ptr(), sum) };
            let n = (R - r).min(4);
            out[r..r + n].copy_from_slice(&four[..n]);
        }
        out
    }
}

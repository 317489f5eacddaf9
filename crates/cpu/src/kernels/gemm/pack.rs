//! Copies of blocks of A and B in the order in which the register tiles read
//! them, converted to `f32`.

use crate::kernels::elem::Elem;
#[cfg(target_arch = "x86_64")]
pub use x86::load8;

/// Packs `width` x `k` elements `src[w * w_stride + p * k_stride]` as
/// `dst[p * W + w]`; the lanes from `width` to `W` become zero.
///
/// # Safety
/// `src` and `dst` (`k * W` elements) in bounds.
pub unsafe fn pack_panel<const W: usize, T: Elem>(
    dst: *mut f32,
    src: *const T,
    width: usize,
    k: usize,
    (w_stride, k_stride): (usize, usize),
) {
    unsafe {
        if w_stride == 1 && width == W {
            copy_rows::<T, W>(dst, src, 1, k, k_stride);
        } else if k_stride == 1 {
            transpose_rows::<W, T>(dst, src, width, k, w_stride);
        } else {
            for p in 0..k {
                for w in 0..W {
                    *dst.add(p * W + w) = if w < width {
                        (*src.add(w * w_stride + p * k_stride)).to_f32()
                    } else {
                        0.0
                    };
                }
            }
        }
    }
}

/// Packs panels of `W` until all of `width` is packed, one after another.
///
/// # Safety
/// As for [`pack_panel`]; `dst` holds `k` times `width`, rounded up to `W`.
pub unsafe fn pack_panels<const W: usize, T: Elem>(
    dst: *mut f32,
    src: *const T,
    width: usize,
    k: usize,
    (w_stride, k_stride): (usize, usize),
) {
    unsafe {
        let mut done = 0;
        if w_stride == 1 {
            // Rows of all panels together: a row may lie pages away from the next.
            done = width / W * W;
            copy_rows::<T, W>(dst, src, done / W, k, k_stride);
        }
        for w in (done..width).step_by(W) {
            let (dst, src) = (dst.add(w * k), src.add(w * w_stride));
            pack_panel::<W, T>(dst, src, W.min(width - w), k, (w_stride, k_stride));
        }
    }
}

crate::kernels::simd::simd_fn! {
    /// `k` rows of `panels` times `W` contiguous elements; in bounds.
    fn copy_rows<T: Elem; const W: usize>(
        dst: *mut f32,
        src: *const T,
        panels: usize,
        k: usize,
        stride: usize,
    ) {
        for p in 0..k {
            for panel in 0..panels {
                // SAFETY: the caller's.
                unsafe {
                    let from = &*src.add(p * stride + panel * W).cast::<[T; W]>();
                    let to = &mut *dst.add((panel * k + p) * W).cast::<[f32; W]>();
                    for w in 0..W {
                        to[w] = from[w].to_f32();
                    }
                }
            }
        }
    }
}

unsafe fn transpose_rows<const W: usize, T: Elem>(
    dst: *mut f32,
    src: *const T,
    width: usize,
    k: usize,
    stride: usize,
) {
    unsafe {
        let mut done = 0;
        #[cfg(target_arch = "x86_64")]
        if crate::kernels::simd::isa() >= crate::kernels::simd::Isa::Avx2 {
            done = k / 8 * 8;
            x86::transpose_rows::<W, T>(dst, src, width, done, stride);
        }
        for p in done..k {
            for w in 0..W {
                let x = if w < width { (*src.add(w * stride + p)).to_f32() } else { 0.0 };
                *dst.add(p * W + w) = x;
            }
        }
    }
}

/// The way back: `k` x `width` floats `src[p * W + w]`, times `factors[w]`, to
/// `dst[w * stride + p]`.
///
/// # Safety
/// All in bounds, `src` to `k * W` and `factors` to `W`.
pub unsafe fn unpack_panel<const W: usize, T: Elem>(
    src: *const f32,
    dst: *mut T,
    width: usize,
    k: usize,
    stride: usize,
    factors: &[f32; W],
) {
    unsafe {
        let mut done = 0;
        #[cfg(target_arch = "x86_64")]
        if crate::kernels::simd::isa() >= crate::kernels::simd::Isa::Avx2 {
            done = k / 8 * 8;
            x86::unpack_rows::<W, T>(src, dst, width, done, stride, factors);
        }
        for w in 0..width {
            for p in done..k {
                *dst.add(w * stride + p) = T::from_f32(*src.add(p * W + w) * factors[w]);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use crate::kernels::elem::Elem;
    use std::arch::x86_64::*;

    /// Eight elements as `f32`.
    #[inline]
    #[target_feature(enable = "avx2,fma,bmi2")]
    pub unsafe fn load8<T: Elem>(src: *const T) -> __m256 {
        unsafe {
            if T::IS_F32 {
                _mm256_loadu_ps(src.cast())
            } else {
                let half = _mm_loadu_si128(src.cast());
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(half)))
            }
        }
    }

    /// `k` is a multiple of 8.
    #[target_feature(enable = "avx2,fma,bmi2")]
    pub unsafe fn transpose_rows<const W: usize, T: Elem>(
        dst: *mut f32,
        src: *const T,
        width: usize,
        k: usize,
        stride: usize,
    ) {
        unsafe {
            for p in (0..k).step_by(8) {
                for w in (0..W).step_by(8) {
                    let mut x = [_mm256_setzero_ps(); 8];
                    let rows = width.saturating_sub(w).min(8);
                    let from = src.wrapping_add(w * stride + p);
                    if rows == 8 {
                        for i in 0..8 {
                            x[i] = load8(from.wrapping_add(i * stride));
                        }
                    } else {
                        for i in 0..8 {
                            if i < rows {
                                x[i] = load8(from.wrapping_add(i * stride));
                            }
                        }
                    }
                    let x = transpose(x);
                    let to = dst.add(p * W + w);
                    for (j, x) in x.into_iter().enumerate() {
                        let to = to.add(j * W);
                        match W - w {
                            4 => _mm_storeu_ps(to, _mm256_castps256_ps128(x)),
                            6 => {
                                _mm_storeu_ps(to, _mm256_castps256_ps128(x));
                                let high = _mm256_extractf128_ps::<1>(x);
                                _mm_storel_pd(to.add(4).cast(), _mm_castps_pd(high));
                            }
                            _ => _mm256_storeu_ps(to, x),
                        }
                    }
                }
            }
        }
    }

    /// `k` is a multiple of 8.
    #[target_feature(enable = "avx2,fma,bmi2")]
    pub unsafe fn unpack_rows<const W: usize, T: Elem>(
        src: *const f32,
        dst: *mut T,
        width: usize,
        k: usize,
        stride: usize,
        factors: &[f32; W],
    ) {
        unsafe {
            for w in (0..width).step_by(8) {
                let factors = _mm256_loadu_ps(factors.as_ptr().add(w));
                for p in (0..k).step_by(8) {
                    let mut x = [_mm256_setzero_ps(); 8];
                    for i in 0..8 {
                        let from = _mm256_loadu_ps(src.add((p + i) * W + w));
                        x[i] = _mm256_mul_ps(from, factors);
                    }
                    let x = transpose(x);
                    for (j, x) in x.into_iter().enumerate().take(width - w) {
                        let to = dst.add((w + j) * stride + p);
                        if T::IS_F32 {
                            _mm256_storeu_ps(to.cast(), x);
                        } else {
                            let mut floats = [0.0f32; 8];
                            _mm256_storeu_ps(floats.as_mut_ptr(), x);
                            *to.cast::<[T; 8]>() = floats.map(T::from_f32);
                        }
                    }
                }
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,bmi2")]
    fn transpose(x: [__m256; 8]) -> [__m256; 8] {
        // Pairs of rows, then quadruples, then the two halves.
        let mut y = x;
        for i in 0..4 {
            y[2 * i] = _mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]);
            y[2 * i + 1] = _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1]);
        }
        let mut z = y;
        for i in 0..2 {
            let y = &y[4 * i..4 * i + 4];
            z[4 * i] = _mm256_shuffle_ps::<0x44>(y[0], y[2]);
            z[4 * i + 1] = _mm256_shuffle_ps::<0xee>(y[0], y[2]);
            z[4 * i + 2] = _mm256_shuffle_ps::<0x44>(y[1], y[3]);
            z[4 * i + 3] = _mm256_shuffle_ps::<0xee>(y[1], y[3]);
        }
        let mut out = z;
        for i in 0..4 {
            out[i] = _mm256_permute2f128_ps::<0x20>(z[i], z[i + 4]);
            out[i + 4] = _mm256_permute2f128_ps::<0x31>(z[i], z[i + 4]);
        }
        out
    }
}

//! Register tiles: the innermost loops of every matrix product here, attention
//! included.

/// One instruction set's register tile of `M` (at most `MR`) x `NR`.
///
/// # Safety
/// The processor must have the instruction set.
pub unsafe trait Tile: Copy + Send + Sync + 'static {
    const MR: usize;
    const NR: usize;

    /// C(M, NR) = [C +] A(M, k) B(k, NR), summed over k in ascending order from
    /// zero. A is at `a[i * a_rs + p * a_cs]`, B at `b[p * b_rs + j]`, C at
    /// `c[i * c_rs + j]`.
    ///
    /// # Safety
    /// All of these lie in bounds.
    unsafe fn tile<const M: usize>(
        k: usize,
        a: *const f32,
        a_strides: (usize, usize),
        b: *const f32,
        b_rs: usize,
        c: *mut f32,
        c_rs: usize,
        accumulate: bool,
    );

    /// [`Tile::tile`] of a full tile with A in a packed panel: `a[p * MR + i]`,
    /// and B too: `b[p * NR + j]`.
    ///
    /// # Safety
    /// As for `tile`.
    unsafe fn packed_tile(
        k: usize,
        a: *const f32,
        b: *const f32,
        c: *mut f32,
        c_rs: usize,
        accumulate: bool,
    );
}

/// The tile that `rows` (1 ..= MR) rows need.
///
/// # Safety
/// As for [`Tile::tile`].
#[inline(always)]
pub unsafe fn tile_rows<K: Tile>(
    rows: usize,
    k: usize,
    a: *const f32,
    a_strides: (usize, usize),
    b: *const f32,
    b_rs: usize,
    c: *mut f32,
    c_rs: usize,
    accumulate: bool,
) {
    macro_rules! dispatch {
        ($($m:literal)*) => {
            match rows {
                $($m => unsafe {
                    K::tile::<$m>(k, a, a_strides, b, b_rs, c, c_rs, accumulate)
                },)*
                _ => unreachable!("a tile has 1 to 12 rows"),
            }
        };
    }
    dispatch!(1 2 3 4 5 6 7 8 9 10 11 12)
}

/// C(m, NR) = [C +] A(m, k) B(k, NR) for any m: tiles of MR rows, then the rest.
///
/// # Safety
/// As for [`Tile::tile`].
#[inline(always)]
pub unsafe fn tile_column<K: Tile>(
    m: usize,
    k: usize,
    a: *const f32,
    a_strides: (usize, usize),
    b: *const f32,
    b_rs: usize,
    c: *mut f32,
    c_rs: usize,
    accumulate: bool,
) {
    let mut i = 0;
    while i < m {
        let rows = (m - i).min(K::MR);
        unsafe {
            let (a, c) = (a.add(i * a_strides.0), c.add(i * c_rs));
            tile_rows::<K>(rows, k, a, a_strides, b, b_rs, c, c_rs, accumulate);
        }
        i += rows;
    }
}

/// The tile in portable code.
#[derive(Clone, Copy)]
pub struct Portable;

// SAFETY: needs no instruction set.
unsafe impl Tile for Portable {
    const MR: usize = 6;
    const NR: usize = 16;

    #[inline(never)]
    unsafe fn tile<const M: usize>(
        k: usize,
        a: *const f32,
        (a_rs, a_cs): (usize, usize),
        b: *const f32,
        b_rs: usize,
        c: *mut f32,
        c_rs: usize,
        accumulate: bool,
    ) {
        const FMA: bool = cfg!(target_arch = "aarch64");
        unsafe {
            let mut acc = [[0.0f32; 16]; M];
            for p in 0..k {
                let row = &*b.add(p * b_rs).cast::<[f32; 16]>();
                for i in 0..M {
                    let x = *a.add(i * a_rs + p * a_cs);
                    for j in 0..16 {
                        acc[i][j] = crate::kernels::simd::fma::<FMA>(x, row[j], acc[i][j]);
                    }
                }
            }
            for (i, acc) in acc.iter().enumerate() {
                let out = &mut *c.add(i * c_rs).cast::<[f32; 16]>();
                for j in 0..16 {
                    out[j] = if accumulate { out[j] + acc[j] } else { acc[j] };
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn packed_tile(
        k: usize,
        a: *const f32,
        b: *const f32,
        c: *mut f32,
        c_rs: usize,
        accumulate: bool,
    ) {
        unsafe { Self::tile::<6>(k, a, (1, Self::MR), b, Self::NR, c, c_rs, accumulate) }
    }
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Tile;

    macro_rules! tile_type {
        ($(#[$doc:meta])* $name:ident, $module:ident, $features:literal, $mr:literal, $lanes:literal,
         $v:ident, $zero:ident, $load:ident, $store:ident, $splat:ident, $fma:ident, $add:ident) => {
            $(#[$doc])*
            #[derive(Clone, Copy)]
            pub struct $name;

            mod $module {
                use std::arch::x86_64::*;

                #[target_feature(enable = $features)]
                pub unsafe fn tile<const M: usize>(
                    k: usize,
                    mut a: *const f32,
                    (a_rs, a_cs): (usize, usize),
                    mut b: *const f32,
                    b_rs: usize,
                    c: *mut f32,
                    c_rs: usize,
                    accumulate: bool,
                ) {
                    unsafe {
                        let mut acc = [[$zero(); 2]; M];
                        fetch(M, c, c_rs);
                        for _ in 0..k {
                            let b0 = $load(b);
                            let b1 = $load(b.add($lanes));
                            for i in 0..M {
                                let x = $splat(*a.add(i * a_rs));
                                acc[i][0] = $fma(x, b0, acc[i][0]);
                                acc[i][1] = $fma(x, b1, acc[i][1]);
                            }
                            a = a.wrapping_add(a_cs);
                            b = b.wrapping_add(b_rs);
                        }
                        write(&acc, c, c_rs, accumulate);
                    }
                }

                #[target_feature(enable = $features)]
                pub unsafe fn packed_tile(
                    k: usize,
                    mut a: *const f32,
                    mut b: *const f32,
                    c: *mut f32,
                    c_rs: usize,
                    accumulate: bool,
                ) {
                    const M: usize = $mr;
                    unsafe {
                        let mut acc = [[$zero(); 2]; M];
                        macro_rules! step {
                            ($u:literal) => {
                                let b0 = $load(b.add($u * 2 * $lanes));
                                let b1 = $load(b.add($u * 2 * $lanes + $lanes));
                                for i in 0..M {
                                    let x = $splat(*a.add($u * M + i));
                                    acc[i][0] = $fma(x, b0, acc[i][0]);
                                    acc[i][1] = $fma(x, b1, acc[i][1]);
                                }
                            };
                        }
                        fetch(M, c, c_rs);
                        for _ in 0..k / 4 {
                            step!(0);
                            step!(1);
                            step!(2);
                            step!(3);
                            a = a.wrapping_add(4 * M);
                            b = b.wrapping_add(4 * 2 * $lanes);
                        }
                        for _ in 0..k % 4 {
                            step!(0);
                            a = a.wrapping_add(M);
                            b = b.wrapping_add(2 * $lanes);
                        }
                        write(&acc, c, c_rs, accumulate);
                    }
                }

                /// C is needed last: it comes in while the sums run.
                #[inline]
                #[target_feature(enable = $features)]
                fn fetch(rows: usize, c: *mut f32, c_rs: usize) {
                    for i in 0..rows {
                        let row = c.wrapping_add(i * c_rs);
                        _mm_prefetch::<_MM_HINT_T0>(row.cast());
                        _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(2 * $lanes - 1).cast());
                    }
                }

                #[inline]
                #[target_feature(enable = $features)]
                unsafe fn write<const M: usize>(
                    acc: &[[$v; 2]; M],
                    c: *mut f32,
                    c_rs: usize,
                    accumulate: bool,
                ) {
                    unsafe {
                        for i in 0..M {
                            for j in 0..2 {
                                let out = c.add(i * c_rs + j * $lanes);
                                let x = acc[i][j];
                                $store(out, if accumulate { $add($load(out), x) } else { x });
                            }
                        }
                    }
                }
            }

            // SAFETY: whoever picks this type has checked the instruction set.
            unsafe impl Tile for $name {
                const MR: usize = $mr;
                const NR: usize = 2 * $lanes;

                #[inline(always)]
                unsafe fn tile<const M: usize>(
                    k: usize,
                    a: *const f32,
                    a_strides: (usize, usize),
                    b: *const f32,
                    b_rs: usize,
                    c: *mut f32,
                    c_rs: usize,
                    accumulate: bool,
                ) {
                    unsafe { $module::tile::<M>(k, a, a_strides, b, b_rs, c, c_rs, accumulate) }
                }

                #[inline(always)]
                unsafe fn packed_tile(
                    k: usize,
                    a: *const f32,
                    b: *const f32,
                    c: *mut f32,
                    c_rs: usize,
                    accumulate: bool,
                ) {
                    unsafe { $module::packed_tile(k, a, b, c, c_rs, accumulate) }
                }
            }
        };
    }

    tile_type!(
        /// 6 x 16 in twelve 256-bit accumulators.
        Avx2, avx2, "avx2,fma,bmi2", 6, 8,
        __m256, _mm256_setzero_ps, _mm256_loadu_ps, _mm256_storeu_ps,
        _mm256_set1_ps, _mm256_fmadd_ps, _mm256_add_ps
    );
    tile_type!(
        /// 12 x 32 in twenty-four 512-bit accumulators.
        Avx512, avx512, "avx2,fma,bmi2,avx512f,avx512bw,avx512dq,avx512vl", 12, 16,
        __m512, _mm512_setzero_ps, _mm512_loadu_ps, _mm512_storeu_ps,
        _mm512_set1_ps, _mm512_fmadd_ps, _mm512_add_ps
    );
}

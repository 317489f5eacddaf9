//! Choice of the instruction set at run time, and the scalar helpers that the
//! vectorized loops are made of.

use std::sync::atomic::{AtomicU8, Ordering};

/// Instruction sets that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Isa {
    /// What the target triple guarantees (SSE2, NEON, ...).
    Portable = 1,
    /// AVX2 with fused multiply-add: 256-bit vectors.
    Avx2 = 2,
    /// AVX-512 F, BW, DQ and VL: 512-bit vectors.
    Avx512 = 3,
}

static ISA: AtomicU8 = AtomicU8::new(0);

/// The best instruction set of this processor.
#[inline]
pub fn isa() -> Isa {
    match ISA.load(Ordering::Relaxed) {
        0 => {
            let isa = detect();
            ISA.store(isa as u8, Ordering::Relaxed);
            isa
        }
        1 => Isa::Portable,
        2 => Isa::Avx2,
        _ => Isa::Avx512,
    }
}

/// Uses at most `limit` from now on in the whole process: for tests of the
/// other code paths.
#[doc(hidden)]
pub fn limit_isa(limit: Isa) {
    ISA.store(detect().min(limit) as u8, Ordering::Relaxed);
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Isa {
    let avx2 = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("bmi2");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    match (avx2, avx512) {
        (true, true) => Isa::Avx512,
        (true, false) => Isa::Avx2,
        _ => Isa::Portable,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Isa {
    Isa::Portable
}

/// Compiles a function once for each instruction set and calls the one that
/// this processor has. The body sees the constant `FMA`: whether a fused
/// multiply-add is one instruction here.
macro_rules! simd_fn {
    (
        $(#[$attr:meta])*
        $vis:vis fn $name:ident
        $(<$($g:ident : $bound:path),* $(; $(const $c:ident : $ct:ty),+)?>)? (
            $($arg:ident : $ty:ty),* $(,)?
        ) $(-> $ret:ty)? $body:block
    ) => {
        $(#[$attr])*
        #[inline]
        $vis fn $name $(<$($g: $bound,)* $($(const $c: $ct),+)?>)? ($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::extra_unused_type_parameters)]
            fn body<const FMA: bool, $($($g: $bound,)* $($(const $c: $ct),+)?)?>(
                $($arg: $ty),*
            ) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma,bmi2")]
                fn avx2 $(<$($g: $bound,)* $($(const $c: $ct),+)?>)? (
                    $($arg: $ty),*
                ) $(-> $ret)? {
                    body::<true, $($($g,)* $($($c),+)?)?>($($arg),*)
                }
                #[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512dq,avx512vl")]
                fn avx512 $(<$($g: $bound,)* $($(const $c: $ct),+)?>)? (
                    $($arg: $ty),*
                ) $(-> $ret)? {
                    body::<true, $($($g,)* $($($c),+)?)?>($($arg),*)
                }
                // SAFETY: `isa` reports only what the processor has.
                match $crate::kernels::simd::isa() {
                    $crate::kernels::simd::Isa::Avx512 => {
                        return unsafe { avx512 $(::<$($g,)* $($($c),+)?>)? ($($arg),*) };
                    }
                    $crate::kernels::simd::Isa::Avx2 => {
                        return unsafe { avx2 $(::<$($g,)* $($($c),+)?>)? ($($arg),*) };
                    }
                    $crate::kernels::simd::Isa::Portable => {}
                }
            }
            body::<{ cfg!(target_arch = "aarch64") }, $($($g,)* $($($c),+)?)?>($($arg),*)
        }
    };
}
pub(crate) use simd_fn;

/// Partial sums that a vectorized reduction keeps.
pub const LANES: usize = 16;

/// `a * b + c`, fused where that is fast.
#[inline(always)]
pub fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// Sum of `L` (a power of two) partial sums, in one order.
#[inline(always)]
pub fn sum_lanes<const L: usize>(mut x: [f32; L]) -> f32 {
    let mut n = L / 2;
    while n > 0 {
        for i in 0..n {
            x[i] += x[i + n];
        }
        n /= 2;
    }
    x[0]
}

/// `e^x`, branch-free, relative error below 1e-7; 0 below -87, `e^88` above 88,
/// NaN for NaN.
///
/// Range reduction by two-part ln 2, then a degree-6 polynomial interpolated at
/// the Chebyshev nodes of |r| <= ln 2 / 2.
#[inline(always)]
pub fn exp<const FMA: bool>(x: f32) -> f32 {
    // Adding 1.5 * 2^23 leaves the nearest integer in the low mantissa bits.
    const MAGIC: f32 = 12_582_912.0;
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    let x0 = x;
    let x = if x > 88.0 { 88.0 } else { x };
    let t = fma::<FMA>(x, std::f32::consts::LOG2_E, MAGIC);
    let n = t - MAGIC;
    let r = fma::<FMA>(n, -LN2_HI, x);
    let r = fma::<FMA>(n, -LN2_LO, r);
    let p = fma::<FMA>(r, 0.001_392_621_3, 0.008_363_203);
    let p = fma::<FMA>(p, r, 0.041_666_556);
    let p = fma::<FMA>(p, r, 0.166_665_76);
    let p = fma::<FMA>(p, r, 0.5);
    let p = fma::<FMA>(p * r, r, r) + 1.0;
    let y = p * f32::from_bits(t.to_bits().wrapping_add(127) << 23);
    if x0 < -87.0 { 0.0 } else { y }
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub fn sigmoid<const FMA: bool>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<FMA>(-x))
}

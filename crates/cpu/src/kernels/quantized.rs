//! Matrices in four bits: multiplied out, or on the way through a product with a few
//! rows.

use plimsoll_program::{NESTED_BLOCK, QUANT_BLOCK};

use super::Elem;
use super::parallel::{Shared, for_each};
use super::simd::{Isa, LANES, isa, sum_lanes};

/// One part of a matrix in four bits.
#[derive(Clone, Copy)]
pub struct QuantizedSlice<'a> {
    pub codebook: &'a [f32; 16],
    /// Element 2 i in the high half of byte i.
    pub codes: &'a [u8],
    pub scales: Scales<'a>,
}

/// A scale for every 64 elements.
#[derive(Clone, Copy)]
pub enum Scales<'a> {
    Plain(&'a [f32]),
    /// map[code] * absmax + offset, an absmax for every 256 codes.
    Nested {
        codes: &'a [u8],
        absmax: &'a [f32],
        offset: f32,
        map: &'a [f32; 256],
    },
}

impl Scales<'_> {
    fn check(&self, blocks: usize) {
        let enough = match self {
            Scales::Plain(scales) => scales.len() >= blocks,
            Scales::Nested { codes, absmax, .. } => {
                codes.len() >= blocks && absmax.len() >= blocks.div_ceil(NESTED_BLOCK)
            }
        };
        assert!(enough, "scales of {blocks} blocks");
    }

    #[inline(always)]
    fn of(&self, block: usize) -> f32 {
        match self {
            Scales::Plain(scales) => scales[block],
            Scales::Nested { codes, absmax, offset, map } => {
                map[codes[block] as usize] * absmax[block / NESTED_BLOCK] + offset
            }
        }
    }
}

/// Blocks of one task.
const PIECE: usize = 64;

/// out (n) = the elements of a part.
pub fn dequantize<E: Elem>(w: &QuantizedSlice, out: &mut [E]) {
    let n = out.len();
    assert_eq!(w.codes.len(), n.div_ceil(2), "codes");
    let blocks = n.div_ceil(QUANT_BLOCK);
    let out = Shared::new(out);
    for_each(blocks.div_ceil(PIECE), n > super::parallel::GRAIN, |piece| {
        for block in piece * PIECE..blocks.min((piece + 1) * PIECE) {
            let first = block * QUANT_BLOCK;
            let len = QUANT_BLOCK.min(n - first);
            let scale = w.scales.of(block);
            // SAFETY: one task a piece.
            let out = unsafe { out.slice(first, len) };
            let codes = &w.codes[first / 2..];
            for (pair, byte) in out.chunks_mut(2).zip(codes) {
                pair[0] = E::from_f32(w.codebook[(byte >> 4) as usize] * scale);
                if let Some(second) = pair.get_mut(1) {
                    *second = E::from_f32(w.codebook[(byte & 15) as usize] * scale);
                }
            }
        }
    });
}

/// Parts of one matrix, at most.
pub const MAX_PARTS: usize = 4;

/// Most rows of x that [`linear_quantized`] takes.
pub const QUANTIZED_ROWS: usize = 8;

// Bytes of codes that one task reads.
const TASK_BYTES: usize = 32 * 1024;

/// `f32` elements of workspace of [`linear_quantized`].
pub fn linear_quantized_workspace(m: usize, k: usize) -> usize {
    m * k
}

/// y = x wᵀ, or y += x wᵀ where `accumulate`, plus `bias` (N): x (M, K) with M at most
/// [`QUANTIZED_ROWS`], w (N, K) in four bits of one codebook: `parts` one below the other,
/// each with its number of rows. Rows of x and y are `x_stride` and `y_stride` apart.
///
/// The codes are read once, in place: no more of the matrix than a few registers ever
/// exists in another form. Each element is a sum of blocks of 64, in a fixed order.
pub fn linear_quantized<X: Elem, Y: Elem>(
    (x, x_stride): (&[X], usize),
    parts: &[(QuantizedSlice, usize)],
    bias: Option<&[X]>,
    (y, y_stride): (&mut [Y], usize),
    (m, n, k): (usize, usize, usize),
    accumulate: bool,
    ws: &mut [f32],
) {
    assert!((1..=QUANTIZED_ROWS).contains(&m), "{m} rows, at most {QUANTIZED_ROWS}");
    assert!(x.len() >= (m - 1) * x_stride + k, "x");
    assert!(y.len() >= (m - 1) * y_stride + n, "y");
    assert_eq!(parts.iter().map(|p| p.1).sum::<usize>(), n, "rows of the parts");
    for (part, rows) in parts {
        assert!(part.codes.len() >= (rows * k).div_ceil(2), "codes");
        part.scales.check((rows * k).div_ceil(QUANT_BLOCK));
    }
    if let Some(bias) = bias {
        assert_eq!(bias.len(), n, "bias");
    }
    let whole = k.is_multiple_of(QUANT_BLOCK);
    let xs = &mut ws[..m * k];
    for (to, from) in xs.chunks_exact_mut(k).zip(x.chunks(x_stride)) {
        if whole {
            split(&from[..k], to);
        } else {
            to.iter_mut().zip(from).for_each(|(to, from)| *to = from.to_f32());
        }
    }
    let (xs, y) = (&*xs, Shared::new(y));
    let tables = byte_tables(parts[0].0.codebook);
    let rows = (2 * TASK_BYTES / k.max(1)).max(1);
    for_each(n.div_ceil(rows), m * n * k > 32 * 1024, |task| {
        let range = task * rows..n.min((task + 1) * rows);
        let out = Columns { parts, bias, y, stride: y_stride, accumulate, tables };
        match m {
            1 => out.fill::<1>(xs, k, range),
            2 => out.fill::<2>(xs, k, range),
            3 => out.fill::<3>(xs, k, range),
            4 => out.fill::<4>(xs, k, range),
            5 => out.fill::<5>(xs, k, range),
            6 => out.fill::<6>(xs, k, range),
            7 => out.fill::<7>(xs, k, range),
            _ => out.fill::<8>(xs, k, range),
        }
    });
}

/// Elements of x that lie together where [`split`] puts them.
const RUN: usize = 4;

/// The order in which the codes of a block are taken out of its 32 bytes with shuffles
/// inside of 128 bits: those in the high halves of bytes 0 to 3 and 16 to 19, of 4 to 7
/// and 20 to 23, and so on; then the same of the low halves.
fn split<X: Elem>(from: &[X], to: &mut [f32]) {
    const HALF: usize = QUANT_BLOCK / 2;
    for (from, to) in from.chunks_exact(QUANT_BLOCK).zip(to.chunks_exact_mut(QUANT_BLOCK)) {
        for i in 0..HALF {
            // Run 0, 2, 4, 6 of the first 16 bytes; run 1, 3, 5, 7 of the others.
            let run = i / RUN;
            let byte = (run / 2 + run % 2 * (HALF / 2 / RUN)) * RUN + i % RUN;
            to[i] = from[2 * byte].to_f32();
            to[HALF + i] = from[2 * byte + 1].to_f32();
        }
    }
}

/// Where the columns of y go.
struct Columns<'a, X, Y> {
    parts: &'a [(QuantizedSlice<'a>, usize)],
    bias: Option<&'a [X]>,
    y: Shared<Y>,
    stride: usize,
    accumulate: bool,
    /// The four bytes of each number of the codebook, a table each.
    tables: [[u8; 16]; 4],
}

fn byte_tables(codebook: &[f32; 16]) -> [[u8; 16]; 4] {
    let mut tables = [[0; 16]; 4];
    for (i, x) in codebook.iter().enumerate() {
        for (table, byte) in tables.iter_mut().zip(x.to_le_bytes()) {
            table[i] = byte;
        }
    }
    tables
}

impl<X: Elem, Y: Elem> Columns<'_, X, Y> {
    fn fill<const M: usize>(&self, xs: &[f32], k: usize, range: std::ops::Range<usize>) {
        let mut first = 0;
        for (part, rows) in self.parts {
            let end = range.end.min(first + rows);
            for j in range.start.max(first)..end {
                let sums = row_dots::<M>(part, &self.tables, j - first, xs, k);
                for (i, mut sum) in sums.into_iter().enumerate() {
                    // SAFETY: this task owns these columns.
                    let y = unsafe { &mut self.y.slice(i * self.stride + j, 1)[0] };
                    if self.accumulate {
                        sum += y.to_f32();
                    }
                    if let Some(bias) = self.bias {
                        sum += bias[j].to_f32();
                    }
                    *y = Y::from_f32(sum);
                }
            }
            first += rows;
        }
    }
}

/// Dot products of row `row` of w (.., K) with `M` rows of xs.
fn row_dots<const M: usize>(
    w: &QuantizedSlice,
    tables: &[[u8; 16]; 4],
    row: usize,
    xs: &[f32],
    k: usize,
) -> [f32; M] {
    if !k.is_multiple_of(QUANT_BLOCK) {
        return row_dots_anywhere(w, row, xs, k);
    }
    #[cfg(target_arch = "x86_64")]
    if isa() >= Isa::Avx2 {
        // SAFETY: the processor has the instructions; the caller checked the lengths.
        return unsafe { x86::row_dots(w, tables, row, xs.as_ptr(), k) };
    }
    let mut out = [0.0; M];
    for block in 0..k / QUANT_BLOCK {
        let index = row * (k / QUANT_BLOCK) + block;
        let codes = &w.codes[index * QUANT_BLOCK / 2..][..QUANT_BLOCK / 2];
        let mut values = [0.0f32; QUANT_BLOCK];
        for (pair, byte) in values.chunks_exact_mut(2).zip(codes) {
            pair[0] = w.codebook[(byte >> 4) as usize];
            pair[1] = w.codebook[(byte & 15) as usize];
        }
        let mut ordered = [0.0f32; QUANT_BLOCK];
        split(&values, &mut ordered);
        let values = ordered;
        let scale = w.scales.of(index);
        for (i, out) in out.iter_mut().enumerate() {
            let x = &xs[i * k + block * QUANT_BLOCK..][..QUANT_BLOCK];
            let mut acc = [0.0f32; LANES];
            for (values, x) in values.chunks_exact(LANES).zip(x.chunks_exact(LANES)) {
                for l in 0..LANES {
                    acc[l] += values[l] * x[l];
                }
            }
            *out += scale * sum_lanes(acc);
        }
    }
    out
}

/// As [`row_dots`] where rows do not begin with a block, and maybe within a byte.
fn row_dots_anywhere<const M: usize>(
    w: &QuantizedSlice,
    row: usize,
    xs: &[f32],
    k: usize,
) -> [f32; M] {
    let mut out = [0.0; M];
    let mut p = 0;
    while p < k {
        let element = row * k + p;
        let len = (QUANT_BLOCK - element % QUANT_BLOCK).min(k - p);
        let scale = w.scales.of(element / QUANT_BLOCK);
        for (i, out) in out.iter_mut().enumerate() {
            let mut sum = 0.0;
            for (e, x) in (element..).zip(&xs[i * k + p..][..len]) {
                let byte = w.codes[e / 2];
                let code = if e.is_multiple_of(2) { byte >> 4 } else { byte & 15 };
                sum += w.codebook[code as usize] * x;
            }
            *out += scale * sum;
        }
        p += len;
    }
    out
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{QUANT_BLOCK, QuantizedSlice};
    use std::arch::x86_64::*;

    /// The numbers of 32 codes, in the order of [`super::split`]: their bytes are looked
    /// up each on its own, and put together.
    #[inline]
    #[target_feature(enable = "avx2,fma,bmi2")]
    fn lookup(tables: &[__m256i; 4], codes: __m256i) -> [__m256; 4] {
        let [a, b, c, d] = tables.map(|table| _mm256_shuffle_epi8(table, codes));
        let (ab, cd) = (_mm256_unpacklo_epi8(a, b), _mm256_unpacklo_epi8(c, d));
        let (ab_high, cd_high) = (_mm256_unpackhi_epi8(a, b), _mm256_unpackhi_epi8(c, d));
        [
            _mm256_castsi256_ps(_mm256_unpacklo_epi16(ab, cd)),
            _mm256_castsi256_ps(_mm256_unpackhi_epi16(ab, cd)),
            _mm256_castsi256_ps(_mm256_unpacklo_epi16(ab_high, cd_high)),
            _mm256_castsi256_ps(_mm256_unpackhi_epi16(ab_high, cd_high)),
        ]
    }

    /// [`super::row_dots`] for rows of whole blocks.
    ///
    /// # Safety
    /// `xs` has M rows of k elements, `w` the row.
    #[target_feature(enable = "avx2,fma,bmi2")]
    pub unsafe fn row_dots<const M: usize>(
        w: &QuantizedSlice,
        tables: &[[u8; 16]; 4],
        row: usize,
        xs: *const f32,
        k: usize,
    ) -> [f32; M] {
        unsafe {
            let tables =
                tables.map(|t| _mm256_broadcastsi128_si256(_mm_loadu_si128(t.as_ptr().cast())));
            let low_half = _mm256_set1_epi8(15);
            let blocks = k / QUANT_BLOCK;
            let codes = w.codes.as_ptr().add(row * k / 2);
            let mut acc = [_mm256_setzero_ps(); M];
            for block in 0..blocks {
                let bytes = _mm256_loadu_si256(codes.add(block * QUANT_BLOCK / 2).cast());
                let high = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), low_half);
                let halves = [high, _mm256_and_si256(bytes, low_half)];
                let mut sums = [[_mm256_setzero_ps(); 2]; M];
                for (half, codes) in halves.into_iter().enumerate() {
                    let values = lookup(&tables, codes);
                    for i in 0..M {
                        let x = xs.add(i * k + block * QUANT_BLOCK + half * QUANT_BLOCK / 2);
                        for (v, value) in values.into_iter().enumerate() {
                            let x = _mm256_loadu_ps(x.add(8 * v));
                            sums[i][v % 2] = _mm256_fmadd_ps(value, x, sums[i][v % 2]);
                        }
                    }
                }
                let scale = _mm256_set1_ps(w.scales.of(row * blocks + block));
                for i in 0..M {
                    let sum = _mm256_add_ps(sums[i][0], sums[i][1]);
                    acc[i] = _mm256_fmadd_ps(scale, sum, acc[i]);
                }
            }
            acc.map(|acc| {
                let four = _mm_add_ps(_mm256_castps256_ps128(acc), _mm256_extractf128_ps::<1>(acc));
                let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_quant::{Codebook, DynamicMap, quantize_4bit, quantize_absmax};

    use super::*;
    use crate::kernels::simd::limit_isa;

    fn random(n: usize, seed: u32) -> Vec<f32> {
        let mut x = seed.wrapping_mul(2_654_435_761) | 1;
        let mut next = || {
            x ^= x << 13;
            x ^= x >> 17;
            x ^= x << 5;
            x as f32 / u32::MAX as f32 - 0.5
        };
        (0..n).map(|_| next()).collect()
    }

    struct Part {
        rows: usize,
        codes: Vec<u8>,
        plain: Vec<f32>,
        nested: (Vec<u8>, Vec<f32>, f32),
    }

    fn part(rows: usize, k: usize, seed: u32) -> Part {
        let n = rows * k;
        let blocks = n.div_ceil(QUANT_BLOCK);
        let (mut codes, mut plain) = (vec![0; n.div_ceil(2)], vec![0.0; blocks]);
        quantize_4bit(Codebook::Nf4, &random(n, seed), &mut codes, &mut plain).unwrap();
        let mut nested = (vec![0; blocks], vec![0.0; blocks.div_ceil(NESTED_BLOCK)], 0.0);
        nested.2 = quantize_absmax(&mut plain.clone(), &mut nested.0, &mut nested.1);
        Part { rows, codes, plain, nested }
    }

    impl Part {
        fn slice(&self, double: bool) -> (QuantizedSlice<'_>, usize) {
            let scales = if double {
                let (codes, absmax, offset) =
                    (&self.nested.0[..], &self.nested.1[..], self.nested.2);
                Scales::Nested { codes, absmax, offset, map: DynamicMap::signed().values() }
            } else {
                Scales::Plain(&self.plain)
            };
            let codebook = Codebook::Nf4.values();
            (QuantizedSlice { codebook, codes: &self.codes, scales }, self.rows)
        }
    }

    #[test]
    fn the_fused_product_is_that_of_the_matrix_multiplied_out() {
        for isa in [Isa::Portable, Isa::Avx512] {
            limit_isa(isa);
            for k in [1, 31, 64, 80, 192, 576] {
                let parts = [part(70, k, 1), part(5, k, 2), part(1, k, 3)];
                let n: usize = parts.iter().map(|p| p.rows).sum();
                for (m, double) in (1..=QUANTIZED_ROWS).flat_map(|m| [(m, false), (m, true)]) {
                    let slices: Vec<_> = parts.iter().map(|p| p.slice(double)).collect();
                    let mut w = Vec::new();
                    for (slice, rows) in &slices {
                        let mut out = vec![0.0f32; rows * k];
                        dequantize(slice, &mut out);
                        w.extend(out);
                    }
                    let (stride, y_stride) = (k + 3, n + 2);
                    let (x, bias) = (random(m * stride, 7), random(n, 8));
                    let before = random(m * y_stride, 9);
                    for accumulate in [false, true] {
                        let mut y = before.clone();
                        let mut ws = vec![f32::NAN; linear_quantized_workspace(m, k)];
                        linear_quantized(
                            (&x, stride),
                            &slices,
                            Some(&bias),
                            (&mut y, y_stride),
                            (m, n, k),
                            accumulate,
                            &mut ws,
                        );
                        for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                            let products = (0..k)
                                .map(|p| f64::from(x[i * stride + p]) * f64::from(w[j * k + p]));
                            let was = if accumulate { before[i * y_stride + j] } else { 0.0 };
                            let expected =
                                products.sum::<f64>() + f64::from(bias[j]) + f64::from(was);
                            let found = f64::from(y[i * y_stride + j]);
                            let error = (found - expected).abs();
                            assert!(error < 1e-5 * (1.0 + expected.abs()), "{m} {k} {i} {j}");
                        }
                    }
                }
            }
        }
        limit_isa(Isa::Avx512);
    }
}

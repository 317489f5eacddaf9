//! What a token step costs: a row or a few a sequence through every matrix, where the time
//! is that of the weights' bytes and of what lies between two products.

use plimsoll_arch::DType;
use plimsoll_program::{Class, OpKind, Program, View};
use serde::{Deserialize, Serialize};

use crate::DeviceProfile;

/// Times of token steps, by the form of the weights of the blocks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenTimes {
    pub bf16: TokenProducts,
    pub f32: TokenProducts,
    /// NF4 with double quantization, and everything like it.
    pub four_bits: TokenProducts,
}

/// A quarter of a block in a step of so many rows: one of its four products, with its share
/// of attention over a short context and of all that is small, over the bytes of the
/// product's weights. `us[r B + b]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenProducts {
    pub rows: Vec<f64>,
    pub bytes: Vec<f64>,
    pub us: Vec<f64>,
}

/// The point of an axis at which the stretch begins that a size lies on, or is beyond, and how
/// far it is along it.
fn stretch(axis: &[f64], size: f64) -> (usize, f64) {
    if axis.len() < 2 {
        return (0, 0.0);
    }
    let low = axis.partition_point(|a| *a <= size).clamp(1, axis.len() - 1) - 1;
    (low, (size - axis[low]) / (axis[low + 1] - axis[low]))
}

impl TokenProducts {
    /// Seconds of a product with its share. Straight lines between the points and beyond the
    /// last: a fixed part, and weights at the rate of memory. Never less than half of the
    /// smallest that was timed.
    fn seconds(&self, rows: f64, bytes: f64) -> f64 {
        let ((r, along), (b, far)) = (stretch(&self.rows, rows), stretch(&self.bytes, bytes));
        let at = |row: usize| {
            let us = |n: usize| self.us[row * self.bytes.len() + n.min(self.bytes.len() - 1)];
            us(b) + far * (us(b + 1) - us(b))
        };
        let next = (r + 1).min(self.rows.len() - 1);
        let us = at(r) + along.max(0.0) * (at(next) - at(r));
        1e-6 * us.max(self.us[0] / 2.0)
    }

    /// Most rows that were timed.
    fn most_rows(&self) -> usize {
        self.rows.last().map_or(0, |rows| *rows as usize)
    }

    /// The part that grows with bytes times `ratio`; what does not stays.
    pub(crate) fn scale_bytes(&mut self, ratio: f64) {
        let points = self.bytes.len();
        if points < 2 {
            return;
        }
        for us in self.us.chunks_mut(points) {
            let slope = (us[1] - us[0]) / (self.bytes[1] - self.bytes[0]);
            let fixed = (us[0] - slope * self.bytes[0]).clamp(0.0, us[0]);
            us.iter_mut().for_each(|us| *us = fixed + (*us - fixed) * ratio);
        }
    }
}

impl TokenTimes {
    pub(crate) fn all_mut(&mut self) -> [(&'static str, &mut TokenProducts); 3] {
        [("bf16", &mut self.bf16), ("f32", &mut self.f32), ("four_bits", &mut self.four_bits)]
    }
}

impl DeviceProfile {
    /// Seconds of an op of a token step; none where the device was not timed at one, or
    /// where the op has more rows than a token step has.
    ///
    /// What lies between the products is in their times. Attention adds the keys and values
    /// of its whole cache, at the rate of memory.
    pub(crate) fn token_seconds(&self, program: &Program, kind: &OpKind) -> Option<f64> {
        let times = self.token.as_ref()?;
        let most = times.bf16.most_rows();
        let dtype = |v: &View| program.tensor(v.tensor).dtype;
        match kind {
            OpKind::Linear { w, y, .. } if y.rows <= most => {
                let of = match dtype(w) {
                    DType::Bf16 => &times.bf16,
                    _ => &times.f32,
                };
                let bytes = (w.elements() * dtype(w).bytes()) as f64;
                Some(of.seconds(y.rows as f64, bytes))
            }
            OpKind::LinearQuantized { w, y, .. } if y.rows <= most => {
                let mut bytes = 0.0;
                w.for_each_tensor(|t| bytes += program.tensor(t).bytes() as f64);
                Some(times.four_bits.seconds(y.rows as f64, bytes))
            }
            OpKind::AttentionCached { shape, k_cache, v_cache, .. }
                if shape.batch * shape.seq <= most =>
            {
                let bytes = [k_cache, v_cache].map(|t| program.tensor(*t).bytes() as f64);
                Some(bytes.iter().sum::<f64>() / self.copy_bytes_per_second)
            }
            OpKind::RmsNorm { x, .. } | OpKind::SwiGlu { act: x, .. }
                if program.tensor(*x).rows() <= most && is_inference(program) =>
            {
                Some(0.0)
            }
            OpKind::HeadNorm { qkv, .. } | OpKind::Rope { qkv, .. }
                if program.tensor(*qkv).rows() <= most && is_inference(program) =>
            {
                Some(0.0)
            }
            _ => None,
        }
    }
}

/// Only then are small ops between products that were timed with them.
fn is_inference(program: &Program) -> bool {
    program.tensors.iter().any(|t| t.class == Class::KvCache)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn products() -> TokenProducts {
        // 5 us and a byte a picosecond; twice that with 8 rows.
        let us = |bytes: f64| 5.0 + bytes * 1e-6;
        let bytes = vec![1e6, 1e7, 1e8];
        let one: Vec<f64> = bytes.iter().map(|b| us(*b)).collect();
        let eight = one.iter().map(|us| 2.0 * us);
        TokenProducts {
            rows: vec![1.0, 8.0],
            us: one.iter().copied().chain(eight).collect(),
            bytes,
        }
    }

    #[test]
    fn a_fixed_part_and_a_rate_are_met_everywhere() {
        let products = products();
        for bytes in [1e6, 3e6, 1e7, 5e7, 1e8, 1e9] {
            let expected = 1e-6 * (5.0 + bytes * 1e-6);
            assert!((products.seconds(1.0, bytes) / expected - 1.0).abs() < 1e-9, "{bytes}");
            assert!((products.seconds(8.0, bytes) / expected - 2.0).abs() < 1e-9, "{bytes}");
            let between = products.seconds(4.5, bytes) / expected;
            assert!((between - 1.5).abs() < 1e-9, "{between}");
        }
        assert!(products.seconds(1.0, 1.0) >= 1e-6 * 2.5);
    }

    #[test]
    fn faster_memory_leaves_the_fixed_part() {
        let mut scaled = products();
        scaled.scale_bytes(0.5);
        let expected = 1e-6 * (5.0 + 0.5 * 1e9 * 1e-6);
        assert!((scaled.seconds(1.0, 1e9) / expected - 1.0).abs() < 1e-9);
    }
}

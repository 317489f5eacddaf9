//! The mean of a float32 tensor with the rounding of torch on a GPU: its sum in
//! the same order (torch 2.11 `Reduce.cuh`), times one over the count.

/// Most threads of one block of a reduction.
const THREADS: usize = 512;
/// Sums that each thread keeps apart.
const SUMS: usize = 4;
/// Blocks that run at one time on an H100 or H200: 4 on each of 132 processors.
/// Only means over more than four million numbers depend on it.
const RESIDENT_BLOCKS: usize = 528;

/// How many numbers are shared out among the threads that add them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeanOrder {
    /// Four neighbours are read at a time, each into a sum of its own.
    pub wide: bool,
    /// Threads of a block, a power of two.
    pub width: usize,
    pub blocks: usize,
}

impl MeanOrder {
    /// For `n` numbers, of which there is one at least.
    pub fn of(n: usize) -> MeanOrder {
        let wide = n > 128;
        let lanes = if wide { n / SUMS } else { n };
        let width = (1 << lanes.ilog2()).min(THREADS);
        let each = n.div_ceil(width);
        let blocks = if each >= 256 {
            each.div_ceil(16).min(RESIDENT_BLOCKS).max(each.div_ceil(256))
        } else {
            1
        };
        MeanOrder { wide, width, blocks }
    }
}

pub(crate) fn mean(x: &[f32]) -> f32 {
    sum(x) * (1.0 / x.len() as f32)
}

fn sum(x: &[f32]) -> f32 {
    if x.is_empty() {
        return 0.0;
    }
    let MeanOrder { wide, width, blocks } = MeanOrder::of(x.len());
    let stride = width * blocks;
    let partial = |block: usize| {
        let mut lanes = [0.0f32; THREADS];
        for (lane, total) in lanes[..width].iter_mut().enumerate() {
            let first = block * width + lane;
            let mut sums = [0.0f32; SUMS];
            if wide {
                let (fours, rest) = x.as_chunks::<SUMS>();
                for four in fours.iter().skip(first).step_by(stride) {
                    sums.iter_mut().zip(four).for_each(|(s, x)| *s += x);
                }
                // The first block takes what is left over.
                if let (0, Some(x)) = (block, rest.get(lane)) {
                    sums[0] += x;
                }
            } else {
                let all = x.iter().skip(first).step_by(stride);
                all.zip((0..SUMS).cycle()).for_each(|(x, i)| sums[i] += x);
            }
            *total = sums[0] + sums[1] + sums[2] + sums[3];
        }
        tree(&mut lanes[..width])
    };
    if blocks == 1 {
        return partial(0);
    }
    // The last block to end adds the sums of all.
    let mut lanes = [0.0f32; THREADS];
    for block in 0..blocks {
        lanes[block % width] += partial(block);
    }
    tree(&mut lanes[..width])
}

/// The sum of a block's lanes: the upper half onto the lower, down to one.
fn tree(lanes: &mut [f32]) -> f32 {
    let mut width = lanes.len();
    while width > 1 {
        width /= 2;
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_counted_once() {
        // Small integers: every order gives the same sum.
        for n in [1, 2, 3, 31, 33, 64, 127, 128, 129, 130, 131, 511, 2049, 20_001, 300_003] {
            let x: Vec<f32> = (0..n).map(|i| (i * 7 % 5) as f32).collect();
            let expected: f64 = x.iter().map(|x| f64::from(*x)).sum();
            assert_eq!(f64::from(sum(&x)), expected, "{n}");
        }
    }
}

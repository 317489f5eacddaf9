//! Sums over ranks: in the order of the ranks, in float32, rounded once.

use half::bf16;
use plimsoll_arch::DType;

/// Elements that are summed at a time.
const PIECE: usize = 4096;

/// out = the sum of `parts`, which are as long as it is; out may be none of them.
pub(crate) fn sum(out: &mut [u8], parts: &[&[u8]], dtype: DType) {
    match dtype {
        DType::Bf16 => sum_of::<bf16>(out, parts, bf16::to_f32, bf16::from_f32),
        _ => sum_of::<f32>(out, parts, |x| x, |x| x),
    }
}

fn sum_of<T: bytemuck::Pod>(
    out: &mut [u8],
    parts: &[&[u8]],
    wide: impl Fn(T) -> f32,
    narrow: impl Fn(f32) -> T,
) {
    let bytes = PIECE * size_of::<T>();
    let mut sums = [0.0f32; PIECE];
    for (n, out) in out.chunks_mut(bytes).enumerate() {
        let sums = &mut sums[..out.len() / size_of::<T>()];
        for (rank, part) in parts.iter().enumerate() {
            let part = &part[n * bytes..][..out.len()];
            let values = part.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned::<T>);
            if rank == 0 {
                sums.iter_mut().zip(values).for_each(|(sum, x)| *sum = wide(x));
            } else {
                sums.iter_mut().zip(values).for_each(|(sum, x)| *sum += wide(x));
            }
        }
        for (out, sum) in out.chunks_exact_mut(size_of::<T>()).zip(sums) {
            out.copy_from_slice(bytemuck::bytes_of(&narrow(*sum)));
        }
    }
}

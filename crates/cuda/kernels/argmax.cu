// The column of the largest element of each row of x (rows, columns): the first of
// several; NaN is passed over, and a row of nothing else gives 0. Two steps, so that
// many multiprocessors share a long row.

#include "dependent.cuh"

struct Best {
    float value;
    int column;
};

__device__ __forceinline__ void take(Best& best, Best other) {
    if (other.value > best.value || (other.value == best.value && other.column < best.column)) best = other;
}

// The best of the block, in thread 0. blockDim.x is 256.
__device__ __forceinline__ Best over_block(Best best) {
    __shared__ Best of_warp[8];
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) {
        Best other{__shfl_xor_sync(0xffffffffu, best.value, o), __shfl_xor_sync(0xffffffffu, best.column, o)};
        take(best, other);
    }
    if ((threadIdx.x & 31) == 0) of_warp[threadIdx.x >> 5] = best;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int w = 1; w < 8; ++w) take(best, of_warp[w]);
    return best;
}

// Grid (spans, rows): partial (rows, spans).
extern "C" __global__ void __launch_bounds__(256) argmax_spans(const float* x, Best* partial, int columns, int span) {
    let_next_start();
    wait_for_previous();
    const float* row = x + (long long)blockIdx.y * columns;
    int end = min(columns, ((int)blockIdx.x + 1) * span);
    Best best{negative_infinity(), 0};
#pragma unroll 4
    for (int i = blockIdx.x * span + threadIdx.x; i < end; i += 256) {
        float v = load_fresh(row + i);
        if (v > best.value) best = Best{v, i};
    }
    best = over_block(best);
    if (threadIdx.x == 0) partial[blockIdx.y * gridDim.x + blockIdx.x] = best;
}

// Grid (rows).
extern "C" __global__ void __launch_bounds__(256) argmax_rows(const float* partial, int* out, int spans) {
    let_next_start();
    wait_for_previous();
    Best best{negative_infinity(), 0};
    for (int i = threadIdx.x; i < spans; i += 256) {
        const float* from = partial + 2 * ((long long)blockIdx.x * spans + i);
        take(best, Best{load_fresh(from), __float_as_int(load_fresh(from + 1))});
    }
    best = over_block(best);
    if (threadIdx.x == 0) out[blockIdx.x] = best.column;
}

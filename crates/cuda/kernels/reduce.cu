// Sums over rows and over all gradients. Every sum is cut by shape alone and added
// up in one order, so that two runs agree to the bit.

#include "common.cuh"

// out (n) = [out +] the column sums of partial (count, n). Blocks of (32, 32): few
// columns must still keep many loads in flight.
template <class T> __device__ void sum_partials(const float* partial, T* out, int count, int n, int accumulate) {
    __shared__ float parts[32][33];
    int column = blockIdx.x * 32 + threadIdx.x;
    float sums[4] = {};
    if (column < n) {
        int r = threadIdx.y;
        for (; r + 96 < count; r += 128) {
#pragma unroll
            for (int k = 0; k < 4; ++k) sums[k] += partial[(long long)(r + 32 * k) * n + column];
        }
        for (; r < count; r += 32) sums[0] += partial[(long long)r * n + column];
    }
    parts[threadIdx.y][threadIdx.x] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    __syncthreads();
    if (threadIdx.y == 0 && column < n) {
        float sum = parts[0][threadIdx.x];
        for (int r = 1; r < 32; ++r) sum += parts[r][threadIdx.x];
        out[column] = from_float<T>(accumulate ? to_float(out[column]) + sum : sum);
    }
}

// partial (gridDim.y, n) = column sums of `span` rows each of x (rows, n), N
// neighbouring columns a thread.
template <class T, int N> __device__ void sum_rows(const T* x, float* partial, int rows, int n, int span) {
    int column = (blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (column >= n) return;
    int begin = blockIdx.y * span, end = min(rows, begin + span);
    float sum[N] = {};
#pragma unroll 4
    for (int r = begin; r < end; ++r) {
        float v[N];
        load(x + (long long)r * n + column, v);
#pragma unroll
        for (int k = 0; k < N; ++k) sum[k] += v[k];
    }
    float* to = partial + (long long)blockIdx.y * n + column;
#pragma unroll
    for (int k = 0; k < N; ++k) to[k] = sum[k];
}

constexpr int SQUARE_TENSORS = 128;   // of one launch
constexpr int SQUARE_CHUNK = 1 << 16; // elements of one block

// The tensors of one launch; `first_block` counts within the launch. Mirrored in
// src/optimizer.rs.
struct SquareTable {
    const void* data[SQUARE_TENSORS];
    long long elements[SQUARE_TENSORS];
    int first_block[SQUARE_TENSORS + 1];
    int count;
};

// partial[block] = the sum of squares of one chunk. Blocks of 512 threads.
template <class T, int N> __device__ void sum_of_squares(const SquareTable& table, double* partial) {
    int low = 0, high = table.count;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (table.first_block[middle] <= (int)blockIdx.x) low = middle;
        else high = middle;
    }
    const T* x = static_cast<const T*>(table.data[low]);
    long long begin = (long long)((int)blockIdx.x - table.first_block[low]) * SQUARE_CHUNK;
    long long end = min(table.elements[low], begin + SQUARE_CHUNK);
    float sum = 0.0f;
    for (long long i = begin + threadIdx.x * N; i < end; i += 512 * N) {
        if (i + N <= end) {
            float v[N];
            load(x + i, v);
#pragma unroll
            for (int n = 0; n < N; ++n) sum = fmaf(v[n], v[n], sum);
        } else {
            for (long long j = i; j < end; ++j) sum = fmaf(to_float(x[j]), to_float(x[j]), sum);
        }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = (double)sum;
}

// The sum of all partials, in thread 0 of a block of 1024.
__device__ __forceinline__ double sum_squares(const double* partial, int count) {
    __shared__ double parts[1024];
    double sum = 0.0;
    for (int i = threadIdx.x; i < count; i += 1024) sum += partial[i];
    parts[threadIdx.x] = sum;
    for (int o = 512; o > 0; o >>= 1) {
        __syncthreads();
        if (threadIdx.x < o) parts[threadIdx.x] += parts[threadIdx.x + o];
    }
    return parts[0];
}

// norm (2) = the root of a sum of squares, and the factor that brings it to max_norm
// (none when max_norm is 0): torch 2.11 `clip_grad_norm_`, whose 1e-6 it keeps.
__device__ __forceinline__ void clip(double squares, float* norm, float max_norm) {
    double total = sqrt(squares);
    norm[0] = (float)total;
    double factor = (double)max_norm / (total + 1e-6);
    // A NaN goes through to the parameters: it must not look like a step.
    norm[1] = max_norm > 0.0f && !(factor >= 1.0) ? (float)factor : 1.0f;
}

extern "C" __global__ void __launch_bounds__(1024) grad_norm(const double* partial, float* norm, int count,
                                                             float max_norm) {
    double squares = sum_squares(partial, count);
    if (threadIdx.x == 0) clip(squares, norm, max_norm);
}

// Of one rank's share of all gradients, and then of all ranks together.
extern "C" __global__ void __launch_bounds__(1024) grad_squares(const double* partial, float* squares, int count) {
    double sum = sum_squares(partial, count);
    if (threadIdx.x == 0) *squares = (float)sum;
}

extern "C" __global__ void __launch_bounds__(32) clip_factor(const float* squares, float* norm, float max_norm) {
    if (threadIdx.x == 0) clip((double)*squares, norm, max_norm);
}

#define REDUCE(NAME, T)                                                                                       \
    extern "C" __global__ void __launch_bounds__(1024)                                                        \
        sum_partials_##NAME(const float* partial, T* out, int count, int n, int accumulate) {                 \
        sum_partials<T>(partial, out, count, n, accumulate);                                                  \
    }
FOR_TYPES(REDUCE)

#define SUM_ROWS(NAME, T, N)                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                         \
        sum_rows_##NAME##_v##N(const T* x, float* partial, int rows, int n, int span) {                       \
        sum_rows<T, N>(x, partial, rows, n, span);                                                            \
    }
FOR_TYPES_AND_WIDTHS(SUM_ROWS)

extern "C" __global__ void __launch_bounds__(512)
    sum_of_squares_bf16(const __grid_constant__ SquareTable table, double* partial) {
    sum_of_squares<bf16, 8>(table, partial);
}
extern "C" __global__ void __launch_bounds__(512)
    sum_of_squares_f32(const __grid_constant__ SquareTable table, double* partial) {
    sum_of_squares<float, 4>(table, partial);
}

// Numbers into four bits, bit for bit as crates/quant does it: that is where every
// step is explained. Whatever decides about a bit comes from there as an argument
// (limits, order of sums), and no product may be fused with a sum.
//
// Numbers lie in page-locked memory of the host and are read there, once: a tensor
// is in the memory of the GPU in its final form alone.

#include "common.cuh"

// Mirrored in src/quantize.rs.
struct Quantizer {
    unsigned char* codes;  // of the piece: byte i holds elements 2 i and 2 i + 1
    float* absmax;         // of the piece: one for 64 elements
    u32* found;            // becomes 1 where a number is not finite
    long long elements;
    long long begin, end;  // bytes of the codes that are written
    u32 low[4], high[4];   // bit i: the reciprocal of (128 + i) / 128 is a unit lower, higher
    float limits[15];
};

// One over a scale as a GPU with fast division has it, from the table of crates/quant:
// so every GPU has the bits of an H200, and of the CPU.
__device__ __forceinline__ float reciprocal(const Quantizer& q, u32 absmax) {
    u32 inverse = __float_as_uint(__frcp_rn(__uint_as_float(absmax)));
    // Neither below the normal numbers nor above.
    bool normal = absmax - 0x00800000u < 0x7f000000u && inverse - 0x00800000u < 0x7f000000u;
    if ((absmax & 0xffffu) == 0 && normal) {
        u32 i = absmax >> 16 & 0x7f;
        inverse += (q.high[i >> 5] >> (i & 31) & 1) - (q.low[i >> 5] >> (i & 31) & 1);
    }
    return __uint_as_float(inverse);
}

// Of a number as a part of its scale. NaN, which a block of zeros has, is code 0.
template <bool FP4> __device__ __forceinline__ u32 code_of(const Quantizer& q, float x) {
    u32 below = 0;
    float y = FP4 ? fabsf(x) : x;
#pragma unroll
    for (int i = 0; i < (FP4 ? 7 : 15); ++i) below += y > q.limits[i];
    if (!FP4) return below;
    return below ^ (below & 2) << 1 | (x < 0.0f ? 8u : 0u);
}

// Eight elements a thread: eight threads have a block.
template <bool FP4, class T> __device__ void quantize(const Quantizer& q, const T* x) {
    long long i = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    float v[8];
    if (i + 8 <= q.elements) {
        load(x + i, v);
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = i + j < q.elements ? to_float(x[i + j]) : 0.0f;
    }
    // Magnitudes compare as their bits do; NaN and infinity are above all.
    u32 largest = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) largest = max(largest, __float_as_uint(v[j]) & 0x7fffffffu);
#pragma unroll
    for (int o = 4; o > 0; o >>= 1) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, o));
    if (i >= q.elements) return;
    if (largest >= 0x7f800000u) *q.found = 1;
    if ((threadIdx.x & 7) == 0) q.absmax[i >> 6] = __uint_as_float(largest);
    float inverse = reciprocal(q, largest);
    u32 codes = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) codes |= code_of<FP4>(q, __fmul_rn(v[j], inverse)) << (4 * (j ^ 1));
    long long first = i >> 1, last = min(first + 4, (q.elements + 1) >> 1);
    unsigned char* to = q.codes + first;
    if (first >= q.begin && first + 4 <= min(last, q.end) && (reinterpret_cast<u64>(to) & 3) == 0) {
        *reinterpret_cast<u32*>(to) = codes;
        return;
    }
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        if (first + b >= q.begin && first + b < min(last, q.end)) to[b] = (unsigned char)(codes >> (8 * b));
    }
}

#define INSTANCES(SUFFIX, T)                                                                                        \
    extern "C" __global__ void __launch_bounds__(256)                                                               \
        quantize_nf4_##SUFFIX(const __grid_constant__ Quantizer q, const T* x) {                                    \
        quantize<false>(q, x);                                                                                      \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                               \
        quantize_fp4_##SUFFIX(const __grid_constant__ Quantizer q, const T* x) {                                    \
        quantize<true>(q, x);                                                                                       \
    }
FOR_TYPES(INSTANCES)

// The sum of a block's lanes: the upper half onto the lower, down to one.
__device__ __forceinline__ float tree(float x) {
    __shared__ float lanes[512];
    lanes[threadIdx.x] = x;
    for (u32 width = blockDim.x >> 1; width > 0; width >>= 1) {
        __syncthreads();
        if (threadIdx.x < width) lanes[threadIdx.x] = __fadd_rn(lanes[threadIdx.x], lanes[threadIdx.x + width]);
    }
    __syncthreads();
    return lanes[0];
}

// partial (gridDim.x) = what each block adds of x (n), in the order of torch
// (crates/quant/src/mean.rs). blockDim.x is a power of two.
extern "C" __global__ void __launch_bounds__(512) sum_scales(const float* x, long long n, int wide, float* partial) {
    long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x, stride = (long long)gridDim.x * blockDim.x;
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (wide) {
        for (long long i = first; i < n >> 2; i += stride) {
            float4 four = reinterpret_cast<const float4*>(x)[i];
            sums[0] = __fadd_rn(sums[0], four.x), sums[1] = __fadd_rn(sums[1], four.y);
            sums[2] = __fadd_rn(sums[2], four.z), sums[3] = __fadd_rn(sums[3], four.w);
        }
        // The first block takes what is left over.
        if (blockIdx.x == 0 && threadIdx.x < (n & 3)) sums[0] = __fadd_rn(sums[0], x[(n & ~3ll) + threadIdx.x]);
    } else {
        // At most 128 numbers, of which the threads are more than half as many.
        for (int k = 0; k < 4; ++k) {
            long long i = first + k * stride;
            if (i < n) sums[k] = __fadd_rn(sums[k], x[i]);
        }
    }
    float total = __fadd_rn(__fadd_rn(__fadd_rn(sums[0], sums[1]), sums[2]), sums[3]);
    total = tree(total);
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

// mean = the sum of partial (blocks), by one block as wide as theirs, times 1 / n.
extern "C" __global__ void __launch_bounds__(512)
    mean_scales(const float* partial, int blocks, float inverse, float* mean) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < blocks; i += blockDim.x) sum = __fadd_rn(sum, partial[i]);
    sum = tree(sum);
    if (threadIdx.x == 0) *mean = __fmul_rn(sum, inverse);
}

struct MapLimits {
    float limit[255];
};

// codes (n), absmax (n / 256) = x (n) - offset in the signed map: a block of threads
// for each 256.
extern "C" __global__ void __launch_bounds__(256) quantize_scales(
    const __grid_constant__ MapLimits map, const float* x, long long n, const float* offset, unsigned char* codes,
    float* absmax) {
    __shared__ float limits[256];
    __shared__ u32 parts[8];
    if (threadIdx.x < 255) limits[threadIdx.x] = map.limit[threadIdx.x];
    long long i = (long long)blockIdx.x * 256 + threadIdx.x;
    float v = i < n ? __fsub_rn(x[i], *offset) : 0.0f;
    u32 largest = __float_as_uint(v) & 0x7fffffffu;
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, o));
    if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = largest;
    __syncthreads();
#pragma unroll
    for (int part = 0; part < 8; ++part) largest = max(largest, parts[part]);
    if (i >= n) return;
    if (threadIdx.x == 0) absmax[blockIdx.x] = __uint_as_float(largest);
    float y = __fmul_rn(v, __frcp_rn(__uint_as_float(largest)));
    // How many limits are below: none for NaN.
    int code = 0;
#pragma unroll
    for (int step = 128; step > 0; step >>= 1) code += y > limits[code + step - 1] ? step : 0;
    codes[i] = (unsigned char)code;
}

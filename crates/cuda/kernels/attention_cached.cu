// Decoding against a key and value cache: the cache is cut in chunks of 128 keys
// (fixed, so that the sums' order is), each block attends over one, and the parts
// are combined in order.

#include "common.cuh"

constexpr int CHUNK = 128;   // keys of one block of 128 threads
constexpr int HEADS = 8;     // query heads of a group at a time
constexpr int MAX_DIM = 256;

// Keys and values of qkv (B, T, (H + 2K) D) to the caches (B, S, K D) at start[b].
// One block a row; what lies beyond the cache is dropped.
template <class T>
__device__ void append(const T* qkv, const int* start, T* k_cache, T* v_cache, int tokens, int q_width, int kv_width,
                       int capacity) {
    int b = blockIdx.x / tokens, t = blockIdx.x % tokens;
    long long position = start[b] + t;
    if (position < 0 || position >= capacity) return;
    const T* from = qkv + (long long)blockIdx.x * (q_width + 2 * kv_width) + q_width;
    long long to = ((long long)b * capacity + position) * kv_width;
    for (int i = threadIdx.x; i < kv_width; i += blockDim.x) {
        k_cache[to + i] = from[i];
        v_cache[to + i] = from[kv_width + i];
    }
}

// Grid (chunks, K, B T). partial (B T, H, chunks, D + 2): sums, largest score, sum
// of weights.
template <class T>
__device__ void chunk(const T* qkv, const T* k_cache, const T* v_cache, const int* start, float* partial, int tokens,
                      int heads, int kv_heads, int d, int window, int capacity, float scale) {
    __shared__ float queries[HEADS][MAX_DIM], scores[HEADS][CHUNK], top_of[HEADS], sum_of[HEADS];
    int kv_head = blockIdx.y, row = blockIdx.z, b = row / tokens;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int group = heads / kv_heads, chunks = gridDim.x;
    int high = start[b] + row % tokens + 1;
    int low = max(0, high - window);
    int begin = max((int)blockIdx.x * CHUNK, low), end = min(min(high, capacity), ((int)blockIdx.x + 1) * CHUNK);
    long long kv_width = (long long)kv_heads * d;
    k_cache += (long long)b * capacity * kv_width + kv_head * d;
    v_cache += (long long)b * capacity * kv_width + kv_head * d;
    for (int g0 = 0; g0 < group; g0 += HEADS) {
        int n = min(HEADS, group - g0);
        long long first = (long long)row * heads + kv_head * group + g0;
        if (begin >= end) {
            if ((int)threadIdx.x < n) {
                float* to = partial + ((first + threadIdx.x) * chunks + blockIdx.x) * (d + 2);
                to[d] = negative_infinity();
            }
            continue;
        }
        const T* q = qkv + (long long)row * (heads + 2 * kv_heads) * d + (kv_head * group + g0) * d;
        for (int i = threadIdx.x; i < n * d; i += blockDim.x) queries[i / d][i % d] = scale * to_float(q[i]);
        __syncthreads();
        for (int j = begin + warp; j < end; j += 4) {
            float key[MAX_DIM / 32];
#pragma unroll
            for (int p = 0; p < MAX_DIM / 32; ++p) {
                int i = p * 32 + lane;
                key[p] = i < d ? to_float(k_cache[j * kv_width + i]) : 0.0f;
            }
            for (int g = 0; g < n; ++g) {
                float s = 0.0f;
#pragma unroll
                for (int p = 0; p < MAX_DIM / 32; ++p) {
                    int i = p * 32 + lane;
                    if (i < d) s = fmaf(key[p], queries[g][i], s);
                }
                s = warp_sum(s);
                if (lane == 0) scores[g][j - begin] = s;
            }
        }
        __syncthreads();
        for (int g = warp; g < n; g += 4) {
            float top = negative_infinity(), sum = 0.0f;
            for (int j = lane; j < end - begin; j += 32) top = fmaxf(top, scores[g][j]);
            top = warp_max(top);
            for (int j = lane; j < end - begin; j += 32) {
                float w = expf(scores[g][j] - top);
                scores[g][j] = w;
                sum += w;
            }
            sum = warp_sum(sum);
            if (lane == 0) top_of[g] = top, sum_of[g] = sum;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < d; i += blockDim.x) {
            float sums[HEADS] = {};
            for (int j = begin; j < end; ++j) {
                float v = to_float(v_cache[j * kv_width + i]);
#pragma unroll
                for (int g = 0; g < HEADS; ++g)
                    if (g < n) sums[g] = fmaf(scores[g][j - begin], v, sums[g]);
            }
#pragma unroll
            for (int g = 0; g < HEADS; ++g)
                if (g < n) partial[((first + g) * chunks + blockIdx.x) * (d + 2) + i] = sums[g];
        }
        if ((int)threadIdx.x < n) {
            float* to = partial + ((first + threadIdx.x) * chunks + blockIdx.x) * (d + 2);
            to[d] = top_of[threadIdx.x], to[d + 1] = sum_of[threadIdx.x];
        }
        __syncthreads();
    }
}

// out (B T, H D) from the parts. One block a row and head; a position beyond the
// cache gives NaN.
template <class T>
__device__ void combine(const float* partial, const int* start, T* out, int tokens, int heads, int chunks, int d,
                        int capacity) {
    long long at = blockIdx.x;
    long long row = at / heads;
    bool known = start[row / tokens] + (int)(row % tokens) < capacity;
    partial += at * chunks * (d + 2);
    float top = negative_infinity();
    for (int c = 0; c < chunks; ++c) top = fmaxf(top, partial[(long long)c * (d + 2) + d]);
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        float sum = 0.0f, weight = 0.0f;
        for (int c = 0; c < chunks; ++c) {
            const float* part = partial + (long long)c * (d + 2);
            if (part[d] == negative_infinity()) continue;
            float w = expf(part[d] - top);
            sum = fmaf(w, part[i], sum);
            weight = fmaf(w, part[d + 1], weight);
        }
        out[at * d + i] = from_float<T>(known ? sum / weight : not_a_number());
    }
}

#define CACHED(NAME, T)                                                                                              \
    extern "C" __global__ void __launch_bounds__(256)                                                                \
        cache_append_##NAME(const T* qkv, const int* start, T* k_cache, T* v_cache, int tokens, int q_width,         \
                            int kv_width, int capacity) {                                                            \
        append<T>(qkv, start, k_cache, v_cache, tokens, q_width, kv_width, capacity);                                \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(128)                                                                \
        cached_attention_##NAME(const T* qkv, const T* k_cache, const T* v_cache, const int* start, float* partial,  \
                                int tokens, int heads, int kv_heads, int d, int window, int capacity,                \
                                float scale) {                                                                       \
        chunk<T>(qkv, k_cache, v_cache, start, partial, tokens, heads, kv_heads, d, window, capacity, scale);        \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(128)                                                                \
        cached_attention_combine_##NAME(const float* partial, const int* start, T* out, int tokens, int heads,       \
                                        int chunks, int d, int capacity) {                                           \
        combine<T>(partial, start, out, tokens, heads, chunks, d, capacity);                                         \
    }
FOR_TYPES(CACHED)

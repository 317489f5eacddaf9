// Dropout (Srivastava et al. 2014) whose mask is a hash of seed, stream and element:
// backward computes it again instead of keeping it.

#include "rounding.cuh"

// Mirrors `Dropout` of plimsoll_cpu: the same bits on both devices.
// out = [out +] x / (1 - p) where a uniform number is at least p, else zero.
template <class T>
__device__ void dropout(const T* x, T* out, const float* step, long long n, float probability, u32 stream,
                        int accumulate) {
    u64 seed = (u64)__float_as_uint(step[4]) | (u64)__float_as_uint(step[5]) << 32;
    seed ^= (u64)stream * 0x9fb21c651e98df25ull;
    seed = (seed ^ (seed >> 30)) * 0xbf58476d1ce4e5b9ull;
    seed = (seed ^ (seed >> 27)) * 0x94d049bb133111ebull;
    seed ^= seed >> 31;
    float scale = 1.0f / (1.0f - probability);
    for (int k = 0; k < 4; ++k) {
        long long i = (long long)blockIdx.x * 1024 + k * 256 + threadIdx.x;
        if (i >= n) return;
        u32 bits = random_bits((u32)seed ^ (u32)(i >> 32) * 0x9e3779b9u, (u32)(seed >> 32), (u32)i);
        // 24 bits: exact in a float.
        bool keep = (float)(bits >> 8) * (1.0f / 16777216.0f) >= probability;
        float v = keep ? to_float(x[i]) * scale : 0.0f;
        out[i] = from_float<T>(accumulate ? to_float(out[i]) + v : v);
    }
}

#define DROPOUT(NAME, T)                                                                                         \
    extern "C" __global__ void __launch_bounds__(256)                                                            \
        dropout_##NAME(const T* x, T* out, const float* step, long long n, float probability, int stream,        \
                       int accumulate) {                                                                         \
        dropout<T>(x, out, step, n, probability, (u32)stream, accumulate);                                       \
    }
FOR_TYPES(DROPOUT)

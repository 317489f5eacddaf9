// Numbers to measure with: a product of zeros draws less power than one of real
// numbers, and a chip at its power limit then looks faster than it is.

#include "common.cuh"

// x (n): uniform with unit variance, from a hash of the index.
template <class T> __device__ void fill_random(T* x, long long n) {
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x) {
        u32 h = (u32)i * 0x9e3779b9u + (u32)(i >> 32);
        h = (h ^ (h >> 16)) * 0x7feb352du;
        h = (h ^ (h >> 15)) * 0x846ca68bu;
        h ^= h >> 16;
        x[i] = from_float<T>((float)(int)h * (1.7320508f / 2147483648.0f));
    }
}

extern "C" __global__ void __launch_bounds__(256) fill_random_bf16(bf16* x, long long n) { fill_random(x, n); }
extern "C" __global__ void __launch_bounds__(256) fill_random_f32(float* x, long long n) { fill_random(x, n); }

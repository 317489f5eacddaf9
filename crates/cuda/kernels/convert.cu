// Tensors in another type, and sums of them: gradients on their way through the ranks.

#include "common.cuh"

// out = x [+ out], eight neighbours a thread.
template <class X, class Y> __device__ void convert(const X* x, Y* out, long long n, int accumulate) {
    long long i = ((long long)blockIdx.x * 256 + threadIdx.x) * 8;
    if (i + 8 <= n) {
        float v[8];
        load(x + i, v);
        if (accumulate) {
            float old[8];
            load(out + i, old);
#pragma unroll
            for (int k = 0; k < 8; ++k) v[k] += old[k];
        }
        store(out + i, v);
        return;
    }
    for (; i < n; ++i) {
        float v = to_float(x[i]);
        out[i] = from_float<Y>(accumulate ? to_float(out[i]) + v : v);
    }
}

#define CONVERT(X_NAME, X, Y_NAME, Y)                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                             \
        convert_##X_NAME##_##Y_NAME(const X* x, Y* out, long long n, int accumulate) {            \
        convert<X, Y>(x, out, n, accumulate);                                                     \
    }
CONVERT(bf16, bf16, bf16, bf16)
CONVERT(bf16, bf16, f32, float)
CONVERT(f32, float, bf16, bf16)
CONVERT(f32, float, f32, float)

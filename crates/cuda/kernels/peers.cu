// Sums over ranks of what copy engines have brought together.

#include "common.cuh"

// out = the sum over all ranks, in their order, in float32 and rounded once. This rank's
// elements are `own`; those of the others lie in `staged`, `stride` elements apart, in the
// order of their ranks. `out` may be `own`. Addresses are multiples of 16 bytes.
template <class T, int N>
__device__ void sum_ranks(const T* own, const T* staged, T* out, long long n, long long stride, int ranks, int rank) {
    long long i = ((long long)blockIdx.x * 256 + threadIdx.x) * N;
    auto source = [&](int r) { return r == rank ? own : staged + (r < rank ? r : r - 1) * stride; };
    if (i + N <= n) {
        float sum[N], v[N];
        load(source(0) + i, sum);
#pragma unroll 2
        for (int r = 1; r < ranks; ++r) {
            load(source(r) + i, v);
#pragma unroll
            for (int k = 0; k < N; ++k) sum[k] += v[k];
        }
        store(out + i, sum);
        return;
    }
    for (; i < n; ++i) {
        float sum = to_float(source(0)[i]);
        for (int r = 1; r < ranks; ++r) sum += to_float(source(r)[i]);
        out[i] = from_float<T>(sum);
    }
}

#define SUM_RANKS(NAME, T)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256) sum_ranks_##NAME(                                        \
        const T* own, const T* staged, T* out, long long n, long long stride, int ranks, int rank) {           \
        sum_ranks<T, 16 / sizeof(T)>(own, staged, out, n, stride, ranks, rank);                                \
    }
FOR_TYPES(SUM_RANKS)

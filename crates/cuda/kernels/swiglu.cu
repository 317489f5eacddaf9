// SwiGLU (Shazeer 2020): silu(gate) * up, over rows [gate | up] of 2 I elements.

#include "common.cuh"

template <class T> __device__ __forceinline__ float sigmoid(float x) {
    return __fdividef(1.0f, 1.0f + exponential<T>(-x));
}

// Blocks lie row by row, `tiles` of them over the I columns.
template <class T, int N> __device__ void swiglu(const T* gate_up, T* act, int columns, int tiles) {
    long long row = blockIdx.x / tiles;
    int i = ((int)(blockIdx.x % tiles) * blockDim.x + threadIdx.x) * N;
    if (i >= columns) return;
    const T* from = gate_up + row * 2 * columns + i;
    float gate[N], up[N];
    load(from, gate);
    load(from + columns, up);
#pragma unroll
    for (int n = 0; n < N; ++n) gate[n] = gate[n] * sigmoid<T>(gate[n]) * up[n];
    store(act + row * columns + i, gate);
}

// The gradient takes the place of gate_up.
template <class T, int N> __device__ void swiglu_backward(T* gate_up, const T* d_act, int columns, int tiles) {
    long long row = blockIdx.x / tiles;
    int i = ((int)(blockIdx.x % tiles) * blockDim.x + threadIdx.x) * N;
    if (i >= columns) return;
    T* at = gate_up + row * 2 * columns + i;
    float gate[N], up[N], d[N];
    load(at, gate);
    load(at + columns, up);
    load(d_act + row * columns + i, d);
#pragma unroll
    for (int n = 0; n < N; ++n) {
        float s = sigmoid<T>(gate[n]);
        float silu = gate[n] * s;
        float slope = fmaf(silu, 1.0f - s, s);
        gate[n] = d[n] * up[n] * slope;
        up[n] = d[n] * silu;
    }
    store(at, gate);
    store(at + columns, up);
}

#define SWIGLU(NAME, T, N)                                                                          \
    extern "C" __global__ void __launch_bounds__(256)                                               \
        swiglu_##NAME##_v##N(const T* gate_up, T* act, int columns, int tiles) {                    \
        swiglu<T, N>(gate_up, act, columns, tiles);                                                 \
    }                                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                               \
        swiglu_backward_##NAME##_v##N(T* gate_up, const T* d_act, int columns, int tiles) {         \
        swiglu_backward<T, N>(gate_up, d_act, columns, tiles);                                      \
    }
FOR_TYPES_AND_WIDTHS(SWIGLU)

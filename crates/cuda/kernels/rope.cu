// Rotary position embedding (Su et al. 2021) in the half-rotation convention of
// transformers: element i of a head turns with element i + D/2.

#include "common.cuh"

// In place on the query and key heads of qkv (rows, (H + 2K) D). table
// (positions, 2, D/2) holds cosines, then sines; `sign` is -1 to turn back. A
// position outside the table gives NaN.
template <class T, int N>
__device__ void rope(T* qkv, const int* positions, const float* table, long long pieces, int heads, int width, int half,
                     int table_rows, float sign) {
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= pieces) return;
    int per_head = half / N;
    int i = (int)(at % per_head) * N;
    long long head_at = at / per_head;
    int head = (int)(head_at % heads);
    long long row = head_at / heads;
    int position = positions[row];
    bool known = position >= 0 && position < table_rows;
    T* a = qkv + row * width + head * 2 * half + i;
    const float* angles = table + (long long)(known ? position : 0) * 2 * half + i;
    float x[N], y[N], cosines[N], sines[N];
    load(a, x);
    load(a + half, y);
    load(angles, cosines);
    load(angles + half, sines);
#pragma unroll
    for (int n = 0; n < N; ++n) {
        float cosine = known ? cosines[n] : not_a_number(), sine = sign * sines[n];
        float turned = fmaf(x[n], cosine, -(y[n] * sine));
        y[n] = fmaf(y[n], cosine, x[n] * sine);
        x[n] = turned;
    }
    store(a, x);
    store(a + half, y);
}

#define ROPE(NAME, T, N)                                                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                                                \
        rope_##NAME##_v##N(T* qkv, const int* positions, const float* table, long long pieces, int heads, int width, \
                           int half, int table_rows, float sign) {                                                   \
        rope<T, N>(qkv, positions, table, pieces, heads, width, half, table_rows, sign);                             \
    }
FOR_TYPES_AND_WIDTHS(ROPE)

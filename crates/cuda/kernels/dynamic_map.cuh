// The signed dynamic map of bitsandbytes; crates/quant/src/dynamic.rs explains it.

#pragma once

#include "common.cuh"

__constant__ float MAP_SCALES[7] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};

__device__ __forceinline__ float map_bound(int k, int n) {
    float step = (1.0f - 0.1f) / (float)n;
    return k < (n + 1) / 2 ? fmaf(step, (float)k, 0.1f) : fmaf(-step, (float)(n - k), 1.0f);
}

// The number `position` places above zero, where decade 0 has FIRST numbers.
template <int FIRST> __device__ __forceinline__ float map_magnitude(int position) {
    if (position == 0) return 0.0f;
    int at = position - 1 + FIRST;
    int octave = 31 - __clz(at);
    int decade = octave - (FIRST - 1);
    if (decade >= 7) return 1.0f;
    int n = 1 << octave, k = at - n;
    return MAP_SCALES[decade] * ((map_bound(k, n) + map_bound(k + 1, n)) / 2.0f);
}

__device__ __forceinline__ float signed_map(int code) {
    return code < 127 ? -map_magnitude<1>(127 - code) : map_magnitude<1>(code - 127);
}

// Matrices in four bits (Dettmers et al. 2023), as bitsandbytes 0.50 lays them out:
// blocks of 64 neighbours share a scale, and with double quantization 256 scales
// share one of their own.

#include "dynamic_map.cuh"

// One part of a matrix. Mirrored in src/quantized.rs.
struct Quantized {
    const unsigned char* codes;  // element 2 i in the high half of byte i
    const void* absmax;          // float, or codes of the signed map
    const float* nested_absmax;  // null where the scales are float
    const float* offset;
    long long elements;
    float codebook[16];
};

constexpr int CHUNK = 8192;  // elements of one block of 256 threads

__device__ __forceinline__ float scale_of(const Quantized& q, const float* map, float offset, long long block) {
    if (!q.nested_absmax) return static_cast<const float*>(q.absmax)[block];
    // Two roundings, as the reference multiplies and adds.
    float scaled = __fmul_rn(map[static_cast<const unsigned char*>(q.absmax)[block]], q.nested_absmax[block >> 8]);
    return __fadd_rn(scaled, offset);
}

// out (n) = the elements of a part. Eight a thread: 4 bytes of codes make 16 or 32.
template <class T> __device__ void dequantize(const Quantized& q, T* out) {
    __shared__ float codebook[16], map[256];
    if (threadIdx.x < 16) codebook[threadIdx.x] = q.codebook[threadIdx.x];
    if (q.nested_absmax) map[threadIdx.x] = signed_map(threadIdx.x);
    float offset = q.nested_absmax ? *q.offset : 0.0f;
    __syncthreads();
    long long begin = (long long)blockIdx.x * CHUNK;
    long long end = min(q.elements, begin + CHUNK);
    // A part may begin anywhere in the matrix.
    bool wide = (reinterpret_cast<u64>(out) & 15) == 0;
#pragma unroll 4
    for (long long i = begin + threadIdx.x * 8; i < end; i += 256 * 8) {
        float scale = scale_of(q, map, offset, i >> 6);
        if (wide && i + 8 <= end) {
            u32 codes = *reinterpret_cast<const u32*>(q.codes + (i >> 1));
            float v[8];
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                v[2 * b] = codebook[codes >> (8 * b + 4) & 15] * scale;
                v[2 * b + 1] = codebook[codes >> (8 * b) & 15] * scale;
            }
            if constexpr (sizeof(T) == 2) {
                store(out + i, v);
            } else {
                float low[4] = {v[0], v[1], v[2], v[3]}, high[4] = {v[4], v[5], v[6], v[7]};
                store(out + i, low), store(out + i + 4, high);
            }
        } else {
            for (long long j = i; j < min(end, i + 8); ++j) {
                int code = q.codes[j >> 1] >> (j & 1 ? 0 : 4) & 15;
                out[j] = from_float<T>(codebook[code] * scale);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    dequantize_bf16(const __grid_constant__ Quantized q, bf16* out) {
    dequantize(q, out);
}
extern "C" __global__ void __launch_bounds__(256) dequantize_f32(const __grid_constant__ Quantized q, float* out) {
    dequantize(q, out);
}

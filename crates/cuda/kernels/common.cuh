// What every kernel file shares: bf16 without the toolkit's headers (NVRTC gets
// none), 16-byte loads and stores, and reductions with one fixed order.
//
// Arithmetic is float32 whatever the storage type. Instantiations carry the type
// and the number of elements of one access in their name: `_bf16_v8`, `_f32_v4`
// where rows are multiples of 16 bytes, `_bf16_v1`, `_f32_v1` where they are not.

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

struct bf16 {
    unsigned short bits;
};

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

template <class T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
    bf16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(x));
    return r;
}

__device__ __forceinline__ u32 pack_bf16(float lo, float hi) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

// Exponentials at the accuracy of what they are stored in: the fast one is off by
// about 1e-6, which bf16 cannot see; float32 mode takes the exact one.
template <class T> __device__ __forceinline__ float exponential(float x) {
    if constexpr (sizeof(T) == 2) return __expf(x);
    else return expf(x);
}

// The elements of 16 bytes that were loaded as such: registers hold them at their
// own width until they are needed.
__device__ __forceinline__ void unpack(uint4 u, float (&v)[4]) {
    v[0] = __uint_as_float(u.x), v[1] = __uint_as_float(u.y);
    v[2] = __uint_as_float(u.z), v[3] = __uint_as_float(u.w);
}
__device__ __forceinline__ void unpack(uint4 u, float (&v)[8]) {
    u32 w[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        v[2 * i] = __uint_as_float(w[i] << 16);
        v[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
    }
}

// N neighbouring elements as floats; N = 1, or enough for 16-byte accesses.
template <int N> __device__ __forceinline__ void load(const float* p, float (&v)[N]) {
    if constexpr (N == 1) {
        v[0] = *p;
    } else {
#pragma unroll
        for (int i = 0; i < N / 4; ++i) {
            float4 f = reinterpret_cast<const float4*>(p)[i];
            v[4 * i] = f.x, v[4 * i + 1] = f.y, v[4 * i + 2] = f.z, v[4 * i + 3] = f.w;
        }
    }
}

template <int N> __device__ __forceinline__ void load(const bf16* p, float (&v)[N]) {
    if constexpr (N == 1) {
        v[0] = to_float(*p);
    } else {
        static_assert(N == 8, "16 bytes");
        unpack(*reinterpret_cast<const uint4*>(p), v);
    }
}

template <int N> __device__ __forceinline__ void store(float* p, const float (&v)[N]) {
    if constexpr (N == 1) {
        *p = v[0];
    } else {
#pragma unroll
        for (int i = 0; i < N / 4; ++i) {
            reinterpret_cast<float4*>(p)[i] = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
        }
    }
}

template <int N> __device__ __forceinline__ void store(bf16* p, const float (&v)[N]) {
    if constexpr (N == 1) {
        *p = from_float<bf16>(v[0]);
    } else {
        static_assert(N == 8, "16 bytes");
        uint4 u;
        u.x = pack_bf16(v[0], v[1]), u.y = pack_bf16(v[2], v[3]);
        u.z = pack_bf16(v[4], v[5]), u.w = pack_bf16(v[6], v[7]);
        *reinterpret_cast<uint4*>(p) = u;
    }
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) x += __shfl_xor_sync(0xffffffffu, x, o);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
    return x;
}

// The sum over the block, in every thread. blockDim.x is a multiple of 32.
__device__ __forceinline__ float block_sum(float x) {
    __shared__ float parts[32];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    x = warp_sum(x);
    __syncthreads();  // the caller may be in a loop: parts is read until here
    if (lane == 0) parts[warp] = x;
    __syncthreads();
    return warp_sum(lane < (int)(blockDim.x >> 5) ? parts[lane] : 0.0f);
}

#define FOR_TYPES_AND_WIDTHS(M) M(bf16, bf16, 8) M(bf16, bf16, 1) M(f32, float, 4) M(f32, float, 1)
#define FOR_TYPES(M) M(bf16, bf16) M(f32, float)

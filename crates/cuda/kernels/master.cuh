// bf16 weights as float32 numbers, with the 16 bits of those that are not in them
// beside: crates/quant/src/master.rs, to the bit.

#pragma once

#include "common.cuh"

// A weight and the lower half of its master; a plain weight has no master.
template <class P, bool MASTER> struct Weights {
    P* weight;
    short* low;  // null without

    // Arithmetic is as exact as what it is kept in.
    typedef P Exact;

    // Eight neighbours from a multiple of eight on.
    __device__ __forceinline__ void load8(long long i, float (&x)[8]) const { load(weight + i, x); }
    __device__ __forceinline__ float load1(long long i) const { return to_float(weight[i]); }
    __device__ __forceinline__ void store8(long long i, const float (&x)[8]) const { store(weight + i, x); }
    __device__ __forceinline__ void store1(long long i, float x) const { weight[i] = from_float<P>(x); }
};

template <> struct Weights<bf16, true> {
    bf16* weight;
    short* low;

    typedef float Exact;

    // The bits of a number to be split; of NaNs those of one that splits into itself.
    __device__ __forceinline__ static u32 bits_of(float x) {
        u32 bits = __float_as_uint(x);
        return x == x ? bits : (bits | 0x7fc00000u) & 0xffff0000u;
    }

    __device__ __forceinline__ void load8(long long i, float (&x)[8]) const {
        uint4 u = *reinterpret_cast<const uint4*>(weight + i), v = *reinterpret_cast<const uint4*>(low + i);
        const u32 w[4] = {u.x, u.y, u.z, u.w}, l[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            x[2 * n] = __uint_as_float((w[n] << 16) + (u32)((int)(l[n] << 16) >> 16));
            x[2 * n + 1] = __uint_as_float((w[n] & 0xffff0000u) + (u32)((int)l[n] >> 16));
        }
    }

    __device__ __forceinline__ float load1(long long i) const {
        return __uint_as_float(((u32)weight[i].bits << 16) + (u32)(int)low[i]);
    }

    __device__ __forceinline__ void store8(long long i, const float (&x)[8]) const {
        u32 w[4], l[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            u32 a = bits_of(x[2 * n]), b = bits_of(x[2 * n + 1]);
            w[n] = __byte_perm(a + 0x8000u, b + 0x8000u, 0x7632);
            l[n] = __byte_perm(a, b, 0x5410);
        }
        *reinterpret_cast<uint4*>(weight + i) = make_uint4(w[0], w[1], w[2], w[3]);
        *reinterpret_cast<uint4*>(low + i) = make_uint4(l[0], l[1], l[2], l[3]);
    }

    __device__ __forceinline__ void store1(long long i, float x) const {
        u32 bits = bits_of(x);
        weight[i].bits = (unsigned short)((bits + 0x8000u) >> 16);
        low[i] = (short)bits;
    }
};

// Stochastic rounding to bf16, with bits that are a hash of seed, tensor and
// element: neither a launch's shape nor its order matters.

#pragma once

#include "common.cuh"

// The finalizer of SplitMix64 spreads close seeds apart.
__device__ __forceinline__ u64 spread(u64 x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// Of one tensor in one step; words 4 and 5 of StepScalars are the step's seed.
__device__ __forceinline__ u64 tensor_seed(const float* step, u32 stream) {
    u64 seed = (u64)__float_as_uint(step[4]) | (u64)__float_as_uint(step[5]) << 32;
    return spread(seed ^ ((u64)stream * 0xd1b54a32d192ed03ull));
}

// 32 random bits of element i: two rounds of multiply and xor-shift, keyed.
__device__ __forceinline__ u32 random_bits(u32 seed0, u32 seed1, u32 i) {
    u32 x = i + seed1;
    x = ((x ^ (x >> 16)) * 0x7feb352du) ^ seed0;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

template <class T> __device__ __forceinline__ float round_randomly(float x, u32 random);
template <> __device__ __forceinline__ float round_randomly<float>(float x, u32) { return x; }
// Adding a uniform 16-bit number carries into the kept half with a probability equal
// to the dropped fraction. The result is exact in bf16.
template <> __device__ __forceinline__ float round_randomly<bf16>(float x, u32 random) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) >= 0x7f800000u) return x;
    return __uint_as_float((bits + (random & 0xffffu)) & 0xffff0000u);
}

// Random bits of the eight elements from i on, a multiple of eight.
__device__ __forceinline__ u32 piece_bits(u32 seed0, u32 seed1, long long i) {
    return random_bits(seed0 ^ (u32)(i >> 35) * 0x9e3779b9u, seed1, (u32)(i >> 3));
}

// Eight neighbours to memory, rounded with the bits of their piece: one hash of the
// piece, spread by one more round over pairs of elements. None of them is a NaN:
// adding to its bits could make a number of it.
__device__ __forceinline__ void store_rounded(float* to, const float (&x)[8], u32, u32) { store(to, x); }
__device__ __forceinline__ void store_rounded(bf16* to, const float (&x)[8], u32 hash, u32 key) {
    u32 packed[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        u32 random = (hash ^ (key + 0x9e3779b9u * n)) * 0x846ca68bu;
        random ^= random >> 16;
        u32 low = __float_as_uint(x[2 * n]) + (random & 0xffffu);
        u32 high = __float_as_uint(x[2 * n + 1]) + (random >> 16);
        packed[n] = __byte_perm(low, high, 0x7632);
    }
    *reinterpret_cast<uint4*>(to) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
}

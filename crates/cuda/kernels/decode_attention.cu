// Attention of one new token in a launch of its own (decode_attention.cuh). On Hopper a
// single sequence's is part of decode_chain.cu.

#include "decode_attention.cuh"

constexpr int WARPS = 4;

// Grid (blocks of a sequence, B).
template <int D> __device__ __forceinline__ void decode(const Decode& p) {
    using Memory = AttentionMemory<D, WARPS, false>;
    __shared__ __align__(16) unsigned char shared[Memory::SMALL + Memory::SUMS];
    let_next_start();
    u32 at = (u32)__cvta_generic_to_shared(shared);
    attend<D, WARPS, 1>(p, Memory{at + Memory::SUMS, at}, blockIdx.x, blockIdx.y, wait_for_previous, [] { __syncthreads(); });
}

#define DECODE(D)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(128, 4) decode_attention_d##D(const __grid_constant__ Decode p) {    \
        decode<D>(p);                                                                                              \
    }
DECODE(64)
DECODE(96)
DECODE(128)

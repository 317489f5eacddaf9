// The argument of decode.cu and decode_chain.cu, and what both do with it.

#pragma once

#include "dependent.cuh"
#include "dynamic_map.cuh"

constexpr int PARTS = 3;

// Mirrored in src/decode.rs.
struct Part {
    const unsigned char* codes;  // element 2 i in the high half of byte i
    const void* absmax;          // float, or codes of the signed map
    const float* nested_absmax;  // null where the scales are float
    const float* offset;
    int rows;
    int first_row;
    int first_tile;
    int unused;
};

// Mirrored in src/decode.rs.
struct Product {
    const bf16* x;
    const bf16* norm;  // weight of an RMSNorm of x, or null
    const bf16* w;     // null in four bits
    const bf16* bias;  // or null
    const bf16* add;   // or null; may be y
    void* y;
    long long x_stride, w_stride, add_stride, y_stride;  // elements
    int rows, k, n;
    int tiles;
    int splits;   // spans of K: warps that share a tile
    int pitch;    // bytes from row to row of x in shared memory
    int gated;    // y = silu(first half of w's rows) * second half; n counts a half
    int y_f32;
    int early;    // w is there before the kernels before this one are done
    float eps, scale;
    int unused;
    Part parts[PARTS];
    float codebook[16];
};

__device__ __forceinline__ const Part& part_of(const Product& p, int tile) {
    int i = 0;
    while (i + 1 < PARTS && p.parts[i + 1].rows > 0 && tile >= p.parts[i + 1].first_tile) ++i;
    return p.parts[i];
}

// The bf16 pair of byte B of `codes`. `lane4` is this lane's column of the table.
template <int B> __device__ __forceinline__ u32 pair(const unsigned char* table, u32 codes, u32 lane4) {
    u32 at;
    // (row & 0x7f80) | lane4 in one instruction.
    asm("lop3.b32 %0, %1, 0x7f80, %2, 0xea;" : "=r"(at) : "r"(B == 0 ? codes << 7 : codes >> (8 * B - 7)), "r"(lane4));
    return *reinterpret_cast<const u32*>(table + at);
}

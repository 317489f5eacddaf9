// Programmatic dependent launch (sm_90): a kernel that was launched so may start
// while the one before it still runs, prepares what does not depend on it, and
// waits. On other chips kernels are launched one after the other and both are
// nothing.

#pragma once

#include "common.cuh"

// The next kernel of the stream may start; what this one writes it sees only after
// its own wait.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// All kernels before this one have finished and their writes are visible. Nothing
// may be written before, and nothing read that they write.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Loads past the first level of cache: of what other kernels wrote a moment ago.
__device__ __forceinline__ uint4 load_fresh16(const void* p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ float load_fresh(const float* p) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ bf16 load_fresh(const bf16* p) {
    bf16 v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v.bits) : "l"(p) : "memory");
    return v;
}

// Loads of what is read once: weights, and keys and values of earlier tokens.
__device__ __forceinline__ uint4 load_stream16(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
__device__ __forceinline__ uint2 load_stream8(const void* p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

// c (16, 8) += a (16, 16) b (16, 8). With g = lane / 4 and t = lane % 4: a holds rows
// g and g + 8 at columns 2 t, 2 t + 1 (first two words), then at 8 further; b the
// same columns of its column g; c rows g and g + 8 at columns 2 t, 2 t + 1.
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

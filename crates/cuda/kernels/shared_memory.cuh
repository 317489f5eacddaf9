// Shared memory by its 32-bit addresses.

#pragma once

#include "common.cuh"

__device__ __forceinline__ uint4 lds16(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
__device__ __forceinline__ u32 lds4(u32 at) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}
__device__ __forceinline__ float lds(u32 at) { return __uint_as_float(lds4(at)); }
__device__ __forceinline__ bf16 lds2(u32 at) {
    bf16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v.bits) : "r"(at));
    return v;
}
__device__ __forceinline__ void sts16(u32 at, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void sts8(u32 at, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(a), "f"(b) : "memory");
}
__device__ __forceinline__ void sts(u32 at, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory"); }
__device__ __forceinline__ void sts2(u32 at, bf16 v) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(v.bits) : "memory"); }

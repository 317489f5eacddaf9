// AdamW with both moments in eight bits (bitsandbytes 0.49 `AdamW8bit`) over many
// tensors in one launch. A warp owns a block of 256 elements, eight in each lane:
// it decodes the moments, updates, finds the new scales, and encodes. Codes and
// scales are those of crates/quant/src/adamw8bit.rs to the bit.

#include "dynamic_map.cuh"
#include "master.cuh"
#include "rounding.cuh"

constexpr int TENSORS = 48;       // of one launch: the table is a kernel parameter
constexpr int CHUNK = 32768;      // elements of one block of 256 threads
constexpr int COPIES = 8;         // of the tables, so that lanes seldom meet in a bank
constexpr int STATE_BLOCK = 256;  // elements that share a scale

typedef unsigned char u8;

// Mirrored in src/optimizer8bit.rs.
struct Update8bitTable {
    void* param[TENSORS];
    const void* grad[TENSORS];
    u8* m[TENSORS];
    u8* v[TENSORS];
    float* m_absmax[TENSORS];
    float* v_absmax[TENSORS];
    short* master[TENSORS];  // lower halves of master weights; not read without
    long long elements[TENSORS];
    long long first[TENSORS];  // place of element 0 in its parameter: it decides the random bits
    int first_block[TENSORS + 1];
    u32 stream[TENSORS];
    float weight_decay[TENSORS];
    int count;
    float beta1, beta2, eps;
    const float* step;  // StepScalars: rate, 1 - beta1^t, 1 - beta2^t, loss scale, seed
    const float* norm;  // [1] is the clipping factor; null clips nothing
};

// The dynamic maps; crates/quant/src/dynamic.rs explains them. Entry i of copy c is
// at i COPIES + c.
struct Maps {
    float m[256 * COPIES], v[256 * COPIES];
    // Element j is the largest magnitude that is at most j places above zero.
    float m_limits[256 * COPIES], v_limits[256 * COPIES];
};

// A number in the middle goes to the even code: `even` says whether the lower one is.
__device__ __forceinline__ float limit(float below, float above, bool even) {
    float middle = (below + above) * 0.5f;
    return even ? middle : __uint_as_float(__float_as_uint(middle) - 1);
}

// Thread t of 256 makes entry t.
__device__ __forceinline__ void fill(Maps& maps) {
    int t = threadIdx.x;
    const float none = -negative_infinity();
    float m = signed_map(t), v = map_magnitude<2>(t);
    float m_limit = t < 128 ? limit(map_magnitude<1>(t), map_magnitude<1>(t + 1), t % 2 == 1) : none;
    float v_limit = t < 255 ? limit(v, map_magnitude<2>(t + 1), t % 2 == 0) : none;
    for (int c = 0; c < COPIES; ++c) {
        maps.m[t * COPIES + c] = m, maps.v[t * COPIES + c] = v;
        maps.m_limits[t * COPIES + c] = m_limit, maps.v_limits[t * COPIES + c] = v_limit;
    }
}

// Places above zero of a magnitude between 0 and 1. Positions grow linearly inside a
// decade and more slowly in each than in the one before: the smallest of seven lines,
// less one half, is the position or the one before it. 2^19 leaves sixteenths in the
// low bits.
template <int FIRST> __device__ __forceinline__ u32 position(float x, const float* limits) {
    float least = -negative_infinity();
    double scale = 1e-6;
#pragma unroll
    for (int i = 0; i < 7; ++i) {
        const double n = (double)(FIRST << i);
        const float slope = (float)(n / (0.9 * scale));
        const float offset = (float)(524288.0 + 1.0 + n - (double)FIRST - n / 9.0 - 0.5);
        least = fminf(least, fmaf(x, slope, offset));
        scale *= 10.0;
    }
    u32 candidate = (__float_as_uint(least) >> 4) & 0xffu;
    return candidate + (x > limits[candidate * COPIES] ? 1u : 0u);
}

// bf16 alone cannot see the error of the fast ones.
template <class P> __device__ __forceinline__ float quotient(float m, float v, float eps) {
    if constexpr (sizeof(P) == 2) {
        float root;
        asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(v));
        return __fdividef(m, root + eps);
    } else {
        return m / (sqrtf(v) + eps);
    }
}

// Eight codes in one access where all are there.
__device__ __forceinline__ uint2 load_codes(const u8* codes, int count, u32 absent) {
    if (count == 8) return *reinterpret_cast<const uint2*>(codes);
    u32 word[2] = {absent, absent};
    for (int i = 0; i < count; ++i) {
        int shift = 8 * (i % 4);
        word[i / 4] = (word[i / 4] & ~(0xffu << shift)) | (u32)codes[i] << shift;
    }
    return make_uint2(word[0], word[1]);
}

__device__ __forceinline__ void store_codes(u8* codes, int count, uint2 words) {
    if (count == 8) {
        *reinterpret_cast<uint2*>(codes) = words;
        return;
    }
    for (int i = 0; i < count; ++i) codes[i] = (u8)((i < 4 ? words.x : words.y) >> (8 * (i % 4)));
}

__device__ __forceinline__ u32 code_at(uint2 words, int i) {
    return ((i < 4 ? words.x : words.y) >> (8 * (i % 4))) & 0xffu;
}

template <class T> __device__ __forceinline__ void load_some(const T* from, int count, float (&to)[8]) {
    if (count == 8) {
        load(from, to);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) to[i] = i < count ? to_float(from[i]) : 0.0f;
    }
}

// The largest over the warp of numbers that are not negative: their bits compare alike.
__device__ __forceinline__ float warp_largest(float x) {
    return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(x)));
}

// One over a scale; 0 where it is too small, so that all of the block becomes zero.
__device__ __forceinline__ float inverse(float absmax) {
    return absmax >= 1.17549435e-38f ? 1.0f / absmax : 0.0f;
}

template <class P, bool MASTER> __device__ void adamw8bit(const Update8bitTable& table) {
    __shared__ Maps maps;
    fill(maps);
    int low = 0, high = table.count;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (table.first_block[middle] <= (int)blockIdx.x) low = middle;
        else high = middle;
    }
    const int tensor = low;
    const long long n = table.elements[tensor];
    const long long begin = (long long)((int)blockIdx.x - table.first_block[tensor]) * CHUNK;
    const long long end = min(n, begin + CHUNK);
    P* param = static_cast<P*>(table.param[tensor]);
    const Weights<P, MASTER> weights = {param, table.master[tensor]};
    const P* grad = static_cast<const P*>(table.grad[tensor]);
    u8 *m_codes = table.m[tensor], *v_codes = table.v[tensor];
    float *m_absmax = table.m_absmax[tensor], *v_absmax = table.v_absmax[tensor];

    const u64 seed = tensor_seed(table.step, table.stream[tensor]);
    const float beta1 = table.beta1, beta2 = table.beta2;
    const float rest1 = 1.0f - beta1, rest2 = 1.0f - beta2;
    const float lr = table.step[0], correction2 = sqrtf(table.step[2]);
    const float step = -lr * correction2 / table.step[1];
    const float eps = correction2 * table.eps;
    const float decay = 1.0f - lr * table.weight_decay[tensor];
    const float grad_scale = table.norm ? table.norm[1] : 1.0f;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int copy = lane % COPIES;
    const float *map_m = maps.m + copy, *map_v = maps.v + copy;
    const float *m_limits = maps.m_limits + copy, *v_limits = maps.v_limits + copy;
    __syncthreads();

    for (long long first = begin + warp * STATE_BLOCK; first < end; first += 8 * STATE_BLOCK) {
        const long long i = first + lane * 8, block = first / STATE_BLOCK;
        const int count = (int)max(0ll, min(8ll, n - i));
        float p[8], g[8], m[8], v[8];
        load_some(grad + i, count, g);
        uint2 mc = load_codes(m_codes + i, count, 0x7f7f7f7fu);
        uint2 vc = load_codes(v_codes + i, count, 0u);
        const float old_m = m_absmax[block], old_v = v_absmax[block];
        if constexpr (MASTER) {
            if (count == 8) weights.load8(i, p);
            else
                for (int k = 0; k < 8; ++k) p[k] = k < count ? weights.load1(i + k) : 0.0f;
        } else {
            load_some(param + i, count, p);
        }
        float largest_m = 0.0f, largest_v = 0.0f;
        bool numbers = true;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            float scaled = g[k] * grad_scale;
            float new_m = fmaf(rest1, scaled, map_m[code_at(mc, k) * COPIES] * old_m * beta1);
            float new_v = fmaf(rest2 * scaled, scaled, map_v[code_at(vc, k) * COPIES] * old_v * beta2);
            float updated = fmaf(step, quotient<typename Weights<P, MASTER>::Exact>(new_m, new_v, eps), p[k]) * decay;
            bool finite = fabsf(g[k]) < -negative_infinity();
            m[k] = finite ? new_m : 0.0f;
            v[k] = finite ? new_v : 0.0f;
            p[k] = finite ? updated : p[k];
            numbers &= p[k] == p[k];
            largest_m = fmaxf(largest_m, fabsf(m[k]));
            largest_v = fmaxf(largest_v, fabsf(v[k]));
        }
        if constexpr (MASTER) {
            if (count == 8) weights.store8(i, p);
            else
                for (int k = 0; k < count; ++k) weights.store1(i + k, p[k]);
        } else {
            const u32 hash = piece_bits((u32)seed, (u32)(seed >> 32), table.first[tensor] + i);
            if (count == 8 && numbers) {
                store_rounded(param + i, p, hash, 0x243f6a88u);
            } else {
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    u32 bits = random_bits(hash, (u32)seed, (u32)k);
                    if (k < count) param[i + k] = from_float<P>(round_randomly<P>(p[k], bits));
                }
            }
        }
        largest_m = warp_largest(largest_m);
        largest_v = warp_largest(largest_v);
        if (lane == 0) m_absmax[block] = largest_m, v_absmax[block] = largest_v;
        const float scale_m = inverse(largest_m), scale_v = inverse(largest_v);
        u32 m_out[2] = {0, 0}, v_out[2] = {0, 0};
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            u32 at = position<1>(fabsf(m[k]) * scale_m, m_limits);
            // The sign of a moment survives rounding to zero; there is no -1.
            u32 code = __float_as_int(m[k]) < 0 ? 127u - min(max(at, 1u), 127u) : 127u + at;
            m_out[k / 4] |= (code & 0xffu) << (8 * (k % 4));
            v_out[k / 4] |= (position<2>(v[k] * scale_v, v_limits) & 0xffu) << (8 * (k % 4));
        }
        store_codes(m_codes + i, count, make_uint2(m_out[0], m_out[1]));
        store_codes(v_codes + i, count, make_uint2(v_out[0], v_out[1]));
    }
}

#define UPDATE_8BIT(NAME, P)                                                                                           \
    extern "C" __global__ void __launch_bounds__(256) adamw8bit_##NAME(const __grid_constant__ Update8bitTable table) { \
        adamw8bit<P, false>(table);                                                                                    \
    }
FOR_TYPES(UPDATE_8BIT)

extern "C" __global__ void __launch_bounds__(256)
    adamw8bit_bf16_masters(const __grid_constant__ Update8bitTable table) {
    adamw8bit<bf16, true>(table);
}

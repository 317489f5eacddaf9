// AdamW (Loshchilov and Hutter 2019, as torch 2.11 computes it) and SGD over many
// tensors in one launch. bf16 parameters and state are rounded stochastically.

#include "rounding.cuh"

constexpr int TENSORS = 64;       // of one launch: the table is a kernel parameter
constexpr int CHUNK = 8192;       // elements of one block of 256 threads

// Mirrored in src/optimizer.rs. For SGD `m` is the velocity or null, `v` unused,
// beta1 the momentum.
struct UpdateTable {
    void* param[TENSORS];
    const void* grad[TENSORS];
    void* m[TENSORS];
    void* v[TENSORS];
    long long elements[TENSORS];
    int first_block[TENSORS + 1];
    u32 stream[TENSORS];
    float weight_decay[TENSORS];
    int count;
    float beta1, beta2, eps;
    const float* step;  // StepScalars: rate, 1 - beta1^t, 1 - beta2^t, loss scale, seed
    const float* norm;  // [1] is the clipping factor; null clips nothing
};

struct Place {
    int tensor;
    long long begin, end;
};

__device__ __forceinline__ Place find_chunk(const UpdateTable& table) {
    int low = 0, high = table.count;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (table.first_block[middle] <= (int)blockIdx.x) low = middle;
        else high = middle;
    }
    long long begin = (long long)((int)blockIdx.x - table.first_block[low]) * CHUNK;
    return {low, begin, min(table.elements[low], begin + CHUNK)};
}

struct Hyper {
    float beta1, beta2, eps, decay, step, inverse_sqrt_bc2, grad_scale;
    u32 seed0, seed1;
};

template <class P, class S, int N>
__device__ __forceinline__ void adamw_elements(P* param, const P* grad, S* m, S* v, long long i, const Hyper& o) {
    float p[N], g[N], m1[N], v1[N];
    load(param + i, p);
    load(grad + i, g);
    load(m + i, m1);
    load(v + i, v1);
    u32 seed0 = o.seed0 ^ (u32)(i >> 32) * 0x9e3779b9u;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        float gn = g[n] * o.grad_scale;
        float mn = fmaf(o.beta1, m1[n], (1.0f - o.beta1) * gn);
        float vn = fmaf(o.beta2, v1[n], (1.0f - o.beta2) * gn * gn);
        float denominator = fmaf(sqrtf(vn), o.inverse_sqrt_bc2, o.eps);
        float pn = fmaf(p[n], o.decay, -(o.step * mn / denominator));
        // One hash rounds two numbers.
        u32 bits = random_bits(seed0, o.seed1, (u32)(i + n));
        p[n] = round_randomly<P>(pn, bits);
        m1[n] = round_randomly<S>(mn, bits >> 16);
        v1[n] = round_randomly<S>(vn, random_bits(seed0 ^ 0x5bd1e995u, o.seed1, (u32)(i + n)));
    }
    store(param + i, p);
    store(m + i, m1);
    store(v + i, v1);
}

// Elements in pieces of eight: wide accesses for every type.
template <class P, class S> __device__ void adamw(const UpdateTable& table) {
    Place at = find_chunk(table);
    u64 seed = tensor_seed(table.step, table.stream[at.tensor]);
    float lr = table.step[0];
    Hyper o;
    o.beta1 = table.beta1, o.beta2 = table.beta2, o.eps = table.eps;
    o.decay = 1.0f - lr * table.weight_decay[at.tensor];
    o.step = lr / table.step[1];
    o.inverse_sqrt_bc2 = 1.0f / sqrtf(table.step[2]);
    o.grad_scale = table.norm ? table.norm[1] : 1.0f;
    o.seed0 = (u32)seed, o.seed1 = (u32)(seed >> 32);
    P* param = static_cast<P*>(table.param[at.tensor]);
    const P* grad = static_cast<const P*>(table.grad[at.tensor]);
    S* m = static_cast<S*>(table.m[at.tensor]);
    S* v = static_cast<S*>(table.v[at.tensor]);
    for (long long i = at.begin + threadIdx.x * 8; i < at.end; i += 256 * 8) {
        if (i + 8 <= at.end) {
            adamw_elements<P, S, 8>(param, grad, m, v, i, o);
        } else {
            for (long long j = i; j < at.end; ++j) adamw_elements<P, S, 1>(param, grad, m, v, j, o);
        }
    }
}

// g = clip grad + wd p; b = momentum b + g; p -= lr b.
template <class P, class S> __device__ void sgd(const UpdateTable& table) {
    Place at = find_chunk(table);
    u64 seed = tensor_seed(table.step, table.stream[at.tensor]);
    u32 seed1 = (u32)(seed >> 32);
    float lr = table.step[0], decay = table.weight_decay[at.tensor];
    float grad_scale = table.norm ? table.norm[1] : 1.0f;
    P* param = static_cast<P*>(table.param[at.tensor]);
    const P* grad = static_cast<const P*>(table.grad[at.tensor]);
    S* velocity = static_cast<S*>(table.m[at.tensor]);
    for (long long i = at.begin + threadIdx.x; i < at.end; i += 256) {
        u32 seed0 = (u32)seed ^ (u32)(i >> 32) * 0x9e3779b9u;
        u32 bits = random_bits(seed0, seed1, (u32)i);
        float p = to_float(param[i]);
        float g = fmaf(decay, p, to_float(grad[i]) * grad_scale);
        if (velocity) {
            g = fmaf(table.beta1, to_float(velocity[i]), g);
            velocity[i] = from_float<S>(round_randomly<S>(g, bits >> 16));
        }
        param[i] = from_float<P>(round_randomly<P>(fmaf(-lr, g, p), bits));
    }
}

#define UPDATE(P_NAME, P, S_NAME, S)                                                                                   \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        adamw_##P_NAME##_##S_NAME(const __grid_constant__ UpdateTable table) {                                         \
        adamw<P, S>(table);                                                                                            \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        sgd_##P_NAME##_##S_NAME(const __grid_constant__ UpdateTable table) {                                           \
        sgd<P, S>(table);                                                                                              \
    }
UPDATE(bf16, bf16, f32, float)
UPDATE(bf16, bf16, bf16, bf16)
UPDATE(f32, float, f32, float)
UPDATE(f32, float, bf16, bf16)

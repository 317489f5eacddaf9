// AdamW (Loshchilov and Hutter 2019, as torch 2.11 computes it) and SGD over many
// tensors in one launch. bf16 state is rounded stochastically, and so are bf16
// parameters that have no master.

#include "master.cuh"
#include "rounding.cuh"

constexpr int TENSORS = 56;       // of one launch: the table is a kernel parameter
constexpr int CHUNK = 8192;       // elements of one block of 256 threads

// Mirrored in src/optimizer.rs. For SGD `m` is the velocity or null, `v` unused,
// beta1 the momentum.
struct UpdateTable {
    void* param[TENSORS];
    const void* grad[TENSORS];
    void* m[TENSORS];
    void* v[TENSORS];
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

// One element: m, v and p become what they are after the step, not yet rounded.
// Where p is stored in bf16 alone the fast root and quotient are exact enough: they are
// off by about 1e-7.
template <class P>
__device__ __forceinline__ void adamw_element(float& p, float g, float& m, float& v, const Hyper& o) {
    g *= o.grad_scale;
    m = fmaf(o.beta1, m, (1.0f - o.beta1) * g);
    v = fmaf(o.beta2, v, (1.0f - o.beta2) * g * g);
    float move;
    if constexpr (sizeof(P) == 2) {
        float root;
        asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(v));
        move = __fdividef(m, fmaf(root, o.inverse_sqrt_bc2, o.eps));
    } else {
        move = m / fmaf(sqrtf(v), o.inverse_sqrt_bc2, o.eps);
    }
    p = fmaf(p, o.decay, -(o.step * move));
}

// Eight neighbours from a multiple of eight on.
template <class P, class S, bool MASTER>
__device__ __forceinline__ void adamw_piece(Weights<P, MASTER> param, const P* grad, S* m, S* v, long long i,
                                            long long first, const Hyper& o) {
    float p[8], g[8], m1[8], v1[8];
    param.load8(i, p);
    load(grad + i, g);
    load(m + i, m1);
    load(v + i, v1);
    bool finite = true;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        adamw_element<typename Weights<P, MASTER>::Exact>(p[n], g[n], m1[n], v1[n], o);
        finite &= p[n] == p[n];
    }
    if (!finite) {
        // Adding to the bits of a NaN could make a number of it.
        param.store8(i, p), store(m + i, m1), store(v + i, v1);
        return;
    }
    u32 hash = piece_bits(o.seed0, o.seed1, first + i);
    if constexpr (MASTER) param.store8(i, p);
    else store_rounded(param.weight + i, p, hash, 0x243f6a88u);
    store_rounded(m + i, m1, hash, 0x85a308d3u);
    store_rounded(v + i, v1, hash, 0x13198a2eu);
}

// The elements behind the last whole piece.
template <class P, class S, bool MASTER>
__device__ void adamw_rest(Weights<P, MASTER> param, const P* grad, S* m, S* v, long long i, long long end,
                           long long first, const Hyper& o) {
    for (; i < end; ++i) {
        float p = param.load1(i), m1 = to_float(m[i]), v1 = to_float(v[i]);
        adamw_element<typename Weights<P, MASTER>::Exact>(p, to_float(grad[i]), m1, v1, o);
        u32 place = (u32)(first + i);
        u32 bits = random_bits(o.seed0, o.seed1, place);
        if constexpr (!MASTER) p = round_randomly<P>(p, bits);
        param.store1(i, p);
        m[i] = from_float<S>(round_randomly<S>(m1, bits >> 16));
        v[i] = from_float<S>(round_randomly<S>(v1, random_bits(o.seed0 ^ 0x5bd1e995u, o.seed1, place)));
    }
}

// Elements in pieces of eight: wide accesses for every type.
template <class P, class S, bool MASTER> __device__ void adamw(const UpdateTable& table) {
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
    Weights<P, MASTER> param = {static_cast<P*>(table.param[at.tensor]), table.master[at.tensor]};
    const P* grad = static_cast<const P*>(table.grad[at.tensor]);
    S* m = static_cast<S*>(table.m[at.tensor]);
    S* v = static_cast<S*>(table.v[at.tensor]);
    const long long first = table.first[at.tensor];
    for (long long i = at.begin + threadIdx.x * 8; i < at.end; i += 256 * 8) {
        if (i + 8 <= at.end) adamw_piece(param, grad, m, v, i, first, o);
        else adamw_rest(param, grad, m, v, i, at.end, first, o);
    }
}

// g = clip grad + wd p; b = momentum b + g; p -= lr b.
struct SgdHyper {
    float lr, decay, momentum, grad_scale;
    u32 seed0, seed1;
};

// One element of a parameter with a master; `velocity` holds b where there is one.
template <class S, bool VELOCITY>
__device__ __forceinline__ void sgd_element(float& p, float g, float& velocity, long long place, const SgdHyper& o) {
    g = fmaf(o.decay, p, g * o.grad_scale);
    if constexpr (VELOCITY) {
        g = fmaf(o.momentum, velocity, g);
        u32 seed0 = o.seed0 ^ (u32)(place >> 32) * 0x9e3779b9u;
        velocity = round_randomly<S>(g, random_bits(seed0, o.seed1, (u32)place) >> 16);
    }
    p = fmaf(-o.lr, g, p);
}

template <class S, bool VELOCITY>
__device__ __forceinline__ void sgd_chunk(Weights<bf16, true> param, const bf16* grad, S* velocity, const Place& at,
                                          long long first, const SgdHyper& o) {
    for (long long i = at.begin + threadIdx.x * 8; i < at.end; i += 256 * 8) {
        if (i + 8 <= at.end) {
            float p[8], g[8], b[8];
            param.load8(i, p);
            load(grad + i, g);
            if constexpr (VELOCITY) load(velocity + i, b);
#pragma unroll
            for (int n = 0; n < 8; ++n) sgd_element<S, VELOCITY>(p[n], g[n], b[n], first + i + n, o);
            param.store8(i, p);
            if constexpr (VELOCITY) store(velocity + i, b);
        } else {
            for (long long j = i; j < at.end; ++j) {
                float p = param.load1(j), b = 0.0f;
                if constexpr (VELOCITY) b = to_float(velocity[j]);
                sgd_element<S, VELOCITY>(p, to_float(grad[j]), b, first + j, o);
                param.store1(j, p);
                if constexpr (VELOCITY) velocity[j] = from_float<S>(b);
            }
        }
    }
}

// Parameters with masters, in pieces of eight.
template <class S> __device__ void sgd_masters(const UpdateTable& table) {
    Place at = find_chunk(table);
    u64 seed = tensor_seed(table.step, table.stream[at.tensor]);
    SgdHyper o;
    o.lr = table.step[0], o.decay = table.weight_decay[at.tensor], o.momentum = table.beta1;
    o.grad_scale = table.norm ? table.norm[1] : 1.0f;
    o.seed0 = (u32)seed, o.seed1 = (u32)(seed >> 32);
    Weights<bf16, true> param = {static_cast<bf16*>(table.param[at.tensor]), table.master[at.tensor]};
    const bf16* grad = static_cast<const bf16*>(table.grad[at.tensor]);
    S* velocity = static_cast<S*>(table.m[at.tensor]);
    const long long first = table.first[at.tensor];
    if (velocity) sgd_chunk<S, true>(param, grad, velocity, at, first, o);
    else sgd_chunk<S, false>(param, grad, velocity, at, first, o);
}

// Parameters that are all there is.
template <class P, class S> __device__ void sgd(const UpdateTable& table) {
    Place at = find_chunk(table);
    u64 seed = tensor_seed(table.step, table.stream[at.tensor]);
    u32 seed1 = (u32)(seed >> 32);
    float lr = table.step[0], decay = table.weight_decay[at.tensor];
    float grad_scale = table.norm ? table.norm[1] : 1.0f;
    P* param = static_cast<P*>(table.param[at.tensor]);
    const P* grad = static_cast<const P*>(table.grad[at.tensor]);
    S* velocity = static_cast<S*>(table.m[at.tensor]);
    const long long first = table.first[at.tensor];
    for (long long i = at.begin + threadIdx.x; i < at.end; i += 256) {
        long long place = first + i;
        u32 seed0 = (u32)seed ^ (u32)(place >> 32) * 0x9e3779b9u;
        u32 bits = random_bits(seed0, seed1, (u32)place);
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
        adamw<P, S, false>(table);                                                                                     \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        sgd_##P_NAME##_##S_NAME(const __grid_constant__ UpdateTable table) {                                           \
        sgd<P, S>(table);                                                                                              \
    }
UPDATE(bf16, bf16, f32, float)
UPDATE(bf16, bf16, bf16, bf16)
UPDATE(f32, float, f32, float)
UPDATE(f32, float, bf16, bf16)

#define UPDATE_MASTERS(S_NAME, S)                                                                                      \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        adamw_bf16_##S_NAME##_masters(const __grid_constant__ UpdateTable table) {                                     \
        adamw<bf16, S, true>(table);                                                                                   \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        sgd_bf16_##S_NAME##_masters(const __grid_constant__ UpdateTable table) {                                       \
        sgd_masters<S>(table);                                                                                         \
    }
UPDATE_MASTERS(f32, float)
UPDATE_MASTERS(bf16, bf16)

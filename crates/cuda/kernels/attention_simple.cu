// Attention that runs everywhere: float32 or bf16, any head size up to 256, packed
// documents, sliding window, grouped queries, forward (over the fused rows or over
// a cache) and deterministic backward. FlashAttention-2's scheme (Dao 2023) with
// plain float32 arithmetic: it serves float32 mode, unusual head sizes and long
// prompts; bf16 training at common head sizes has tensor-core kernels.
//
// Query t of batch row b stands at position start[b] + t (0 without `start`) and
// sees keys max(doc_start, position - window + 1) ..= position. A lane is a key (or
// a query) of a tile of 32; a warp owns two rows of the other side.

#include "common.cuh"

constexpr int OWN = 16;   // rows a block owns, two a warp
constexpr int PASS = 32;  // rows that pass by, one a lane
constexpr int WARPS = 8;

// Rows first .. first + count of a (rows, stride) matrix to shared memory, zero
// beyond `limit`.
template <class T>
__device__ __forceinline__ void stage(const T* from, long long stride, int first, int count, int limit, int d,
                                      float* to, int pitch) {
    for (int at = threadIdx.x; at < count * d; at += WARPS * 32) {
        int r = at / d, i = at % d;
        to[r * pitch + i] = first + r < limit ? to_float(from[(long long)(first + r) * stride + i]) : 0.0f;
    }
}

__device__ __forceinline__ float dot(const float* a, const float* b, int d) {
    float sum = 0.0f;
    for (int i = 0; i < d; ++i) sum = fmaf(a[i], b[i], sum);
    return sum;
}

__device__ __forceinline__ int first_key(const int* doc_start, int t, int position, int window) {
    int low = max(0, position - window + 1);
    if (doc_start) low = max(low, doc_start[t]);
    return min(low, position);
}

// Grid (ceil(T / 16), H, B). q, k, v are the first heads' elements of row 0.
template <class T, int PIECES>
__device__ void forward(const T* q, const T* k, const T* v, const int* doc_start, const int* start, T* out, float* lse,
                        long long q_stride, long long kv_stride, long long kv_batch, int tokens, int heads,
                        int kv_heads, int d, int window, int capacity, float scale) {
    extern __shared__ float shared[];
    int pitch = d + 1;
    float *keys = shared, *values = keys + PASS * pitch, *queries = values + PASS * pitch;
    int head = blockIdx.y, b = blockIdx.z, t0 = blockIdx.x * OWN;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int kv_head = head / (heads / kv_heads);
    int offset = start ? start[b] : 0;
    q += (long long)b * tokens * q_stride + head * d;
    k += b * kv_batch + kv_head * d;
    v += b * kv_batch + kv_head * d;
    if (doc_start) doc_start += (long long)b * tokens;
    stage(q, q_stride, t0, OWN, tokens, d, queries, d);

    int block_low = 0x7fffffff, block_high = min(capacity, offset + min(tokens, t0 + OWN));
    for (int i = 0; i < OWN && t0 + i < tokens; ++i)
        block_low = min(block_low, first_key(doc_start, t0 + i, offset + t0 + i, window));
    int low[2], high[2];
    float m[2], l[2], o[2][PIECES];
#pragma unroll
    for (int own = 0; own < 2; ++own) {
        int t = t0 + warp * 2 + own;
        bool live = t < tokens;
        low[own] = live ? first_key(doc_start, t, offset + t, window) : 0;
        high[own] = live ? min(capacity, offset + t + 1) : 0;
        m[own] = negative_infinity(), l[own] = 0.0f;
#pragma unroll
        for (int p = 0; p < PIECES; ++p) o[own][p] = 0.0f;
    }
    for (int base = block_low / PASS * PASS; base < block_high; base += PASS) {
        __syncthreads();
        stage(k, kv_stride, base, PASS, block_high, d, keys, pitch);
        stage(v, kv_stride, base, PASS, block_high, d, values, pitch);
        __syncthreads();
#pragma unroll
        for (int own = 0; own < 2; ++own) {
            int j = base + lane;
            bool visible = j >= low[own] && j < high[own];
            float s = negative_infinity();
            if (visible) s = scale * dot(queries + (warp * 2 + own) * d, keys + lane * pitch, d);
            float top = fmaxf(m[own], warp_max(s));
            if (top == negative_infinity()) continue;  // the same in all lanes
            float weight = expf(s - top), keep = expf(m[own] - top);
            m[own] = top;
            l[own] = l[own] * keep + warp_sum(weight);
#pragma unroll
            for (int p = 0; p < PIECES; ++p) o[own][p] *= keep;
            for (int key = 0; key < PASS; ++key) {
                float w = __shfl_sync(0xffffffffu, weight, key);
#pragma unroll
                for (int p = 0; p < PIECES; ++p) {
                    int i = p * 32 + lane;
                    if (i < d) o[own][p] = fmaf(w, values[key * pitch + i], o[own][p]);
                }
            }
        }
    }
#pragma unroll
    for (int own = 0; own < 2; ++own) {
        int t = t0 + warp * 2 + own;
        if (t >= tokens) continue;
        long long row = (long long)b * tokens + t;
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
            int i = p * 32 + lane;
            if (i < d) out[(row * heads + head) * d + i] = from_float<T>(o[own][p] / l[own]);
        }
        if (lse && lane == 0) lse[row * heads + head] = m[own] + logf(l[own]);
    }
}

// delta (rows, H) = sums of out * d_out over each head: a warp each.
template <class T>
__device__ void backward_delta(const T* out, const T* d_out, float* delta, long long heads, int d) {
    long long at = (long long)blockIdx.x * WARPS + (threadIdx.x >> 5);
    int lane = threadIdx.x & 31;
    if (at >= heads) return;
    float sum = 0.0f;
    for (int i = lane; i < d; i += 32) sum = fmaf(to_float(out[at * d + i]), to_float(d_out[at * d + i]), sum);
    sum = warp_sum(sum);
    if (lane == 0) delta[at] = sum;
}

// d_q of 16 queries. Grid (ceil(T / 16), H, B).
template <class T, int PIECES>
__device__ void backward_query(const T* qkv, const T* d_out, const float* lse, const float* delta,
                               const int* doc_start, T* d_qkv, int tokens, int heads, int kv_heads, int d, int window,
                               float scale) {
    extern __shared__ float shared[];
    int pitch = d + 1;
    float *keys = shared, *values = keys + PASS * pitch, *queries = values + PASS * pitch, *grads = queries + OWN * d;
    int head = blockIdx.y, b = blockIdx.z, t0 = blockIdx.x * OWN;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int kv_head = head / (heads / kv_heads);
    long long width = (long long)(heads + 2 * kv_heads) * d;
    long long row0 = (long long)b * tokens;
    qkv += row0 * width, d_qkv += row0 * width, d_out += row0 * heads * d, doc_start += row0;
    stage(qkv + head * d, width, t0, OWN, tokens, d, queries, d);
    stage(d_out + head * d, (long long)heads * d, t0, OWN, tokens, d, grads, d);

    int block_low = 0x7fffffff, block_high = min(tokens, t0 + OWN);
    for (int i = 0; i < OWN && t0 + i < tokens; ++i)
        block_low = min(block_low, first_key(doc_start, t0 + i, t0 + i, window));
    float d_q[2][PIECES] = {};
    for (int base = block_low / PASS * PASS; base < block_high; base += PASS) {
        __syncthreads();
        stage(qkv + (heads + kv_head) * d, width, base, PASS, block_high, d, keys, pitch);
        stage(qkv + (heads + kv_heads + kv_head) * d, width, base, PASS, block_high, d, values, pitch);
        __syncthreads();
#pragma unroll
        for (int own = 0; own < 2; ++own) {
            int t = t0 + warp * 2 + own, j = base + lane;
            if (t >= tokens) continue;
            float d_s = 0.0f;
            if (j <= t && j >= first_key(doc_start, t, t, window)) {
                long long at = (row0 + t) * heads + head;
                float s = dot(queries + (warp * 2 + own) * d, keys + lane * pitch, d);
                float probability = expf(scale * s - lse[at]);
                float d_p = dot(grads + (warp * 2 + own) * d, values + lane * pitch, d);
                d_s = probability * (d_p - delta[at]) * scale;
            }
            for (int key = 0; key < PASS; ++key) {
                float w = __shfl_sync(0xffffffffu, d_s, key);
#pragma unroll
                for (int p = 0; p < PIECES; ++p) {
                    int i = p * 32 + lane;
                    if (i < d) d_q[own][p] = fmaf(w, keys[key * pitch + i], d_q[own][p]);
                }
            }
        }
    }
#pragma unroll
    for (int own = 0; own < 2; ++own) {
        int t = t0 + warp * 2 + own;
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
            int i = p * 32 + lane;
            if (t < tokens && i < d) d_qkv[t * width + head * d + i] = from_float<T>(d_q[own][p]);
        }
    }
}

// d_k and d_v of 16 keys, over all query heads that share them. Grid
// (ceil(T / 16), K, B).
template <class T, int PIECES>
__device__ void backward_key(const T* qkv, const T* d_out, const float* lse, const float* delta, const int* doc_start,
                             T* d_qkv, int tokens, int heads, int kv_heads, int d, int window, float scale) {
    extern __shared__ float shared[];
    int pitch = d + 1;
    float *queries = shared, *grads = queries + PASS * pitch, *keys = grads + PASS * pitch, *values = keys + OWN * d;
    int kv_head = blockIdx.y, b = blockIdx.z, j0 = blockIdx.x * OWN;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int group = heads / kv_heads, last = min(tokens, j0 + OWN) - 1;
    long long width = (long long)(heads + 2 * kv_heads) * d;
    long long row0 = (long long)b * tokens;
    qkv += row0 * width, d_qkv += row0 * width, d_out += row0 * heads * d, doc_start += row0;
    int k_at = (heads + kv_head) * d, v_at = (heads + kv_heads + kv_head) * d;
    stage(qkv + k_at, width, j0, OWN, tokens, d, keys, d);
    stage(qkv + v_at, width, j0, OWN, tokens, d, values, d);

    float d_k[2][PIECES] = {}, d_v[2][PIECES] = {};
    for (int g = 0; g < group; ++g) {
        int head = kv_head * group + g;
        for (int base = j0 / PASS * PASS; base < tokens; base += PASS) {
            // Later queries see later keys only: no document and no window reaches back.
            if (first_key(doc_start, base, base, window) > last) break;
            __syncthreads();
            stage(qkv + head * d, width, base, PASS, tokens, d, queries, pitch);
            stage(d_out + head * d, (long long)heads * d, base, PASS, tokens, d, grads, pitch);
            __syncthreads();
            int t = base + lane;
            long long at = (row0 + t) * heads + head;
            int low = t < tokens ? first_key(doc_start, t, t, window) : 0x7fffffff;
#pragma unroll
            for (int own = 0; own < 2; ++own) {
                int j = j0 + warp * 2 + own;
                float probability = 0.0f, d_s = 0.0f;
                if (j >= low && j <= t) {
                    float s = dot(queries + lane * pitch, keys + (warp * 2 + own) * d, d);
                    probability = expf(scale * s - lse[at]);
                    float d_p = dot(grads + lane * pitch, values + (warp * 2 + own) * d, d);
                    d_s = probability * (d_p - delta[at]) * scale;
                }
                for (int r = 0; r < PASS; ++r) {
                    float wp = __shfl_sync(0xffffffffu, probability, r);
                    float ws = __shfl_sync(0xffffffffu, d_s, r);
#pragma unroll
                    for (int p = 0; p < PIECES; ++p) {
                        int i = p * 32 + lane;
                        if (i < d) {
                            d_v[own][p] = fmaf(wp, grads[r * pitch + i], d_v[own][p]);
                            d_k[own][p] = fmaf(ws, queries[r * pitch + i], d_k[own][p]);
                        }
                    }
                }
            }
        }
    }
#pragma unroll
    for (int own = 0; own < 2; ++own) {
        int j = j0 + warp * 2 + own;
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
            int i = p * 32 + lane;
            if (j < tokens && i < d) {
                d_qkv[j * width + k_at + i] = from_float<T>(d_k[own][p]);
                d_qkv[j * width + v_at + i] = from_float<T>(d_v[own][p]);
            }
        }
    }
}

#define SIMPLE(NAME, T, PIECES)                                                                                        \
    extern "C" __global__ void __launch_bounds__(256) simple_attention_##NAME##_p##PIECES(                             \
        const T* q, const T* k, const T* v, const int* doc_start, const int* start, T* out, float* lse,                \
        long long q_stride, long long kv_stride, long long kv_batch, int tokens, int heads, int kv_heads, int d,       \
        int window, int capacity, float scale) {                                                                       \
        forward<T, PIECES>(q, k, v, doc_start, start, out, lse, q_stride, kv_stride, kv_batch, tokens, heads,          \
                           kv_heads, d, window, capacity, scale);                                                      \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) simple_attention_query_##NAME##_p##PIECES(                       \
        const T* qkv, const T* d_out, const float* lse, const float* delta, const int* doc_start, T* d_qkv,            \
        int tokens, int heads, int kv_heads, int d, int window, float scale) {                                         \
        backward_query<T, PIECES>(qkv, d_out, lse, delta, doc_start, d_qkv, tokens, heads, kv_heads, d, window,        \
                                  scale);                                                                              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) simple_attention_key_##NAME##_p##PIECES(                         \
        const T* qkv, const T* d_out, const float* lse, const float* delta, const int* doc_start, T* d_qkv,            \
        int tokens, int heads, int kv_heads, int d, int window, float scale) {                                         \
        backward_key<T, PIECES>(qkv, d_out, lse, delta, doc_start, d_qkv, tokens, heads, kv_heads, d, window, scale);  \
    }
#define SIMPLE_TYPES(NAME, T)                                                                                          \
    SIMPLE(NAME, T, 2) SIMPLE(NAME, T, 4) SIMPLE(NAME, T, 8)                                                           \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        simple_attention_delta_##NAME(const T* out, const T* d_out, float* delta, long long heads, int d) {            \
        backward_delta<T>(out, d_out, delta, heads, d);                                                                \
    }
FOR_TYPES(SIMPLE_TYPES)

// RMSNorm (Zhang and Sennrich 2019), over rows and over the heads of a row:
// y = x * rstd * w with rstd = 1 / sqrt(mean(x^2) + eps).

#include "common.cuh"

// One block a row, a thread NV pieces of N columns in registers.
template <class T, int N, int NV>
__device__ void rms_norm(const T* x, const T* weight, T* out, float* rstd, int c, float eps) {
    long long row = blockIdx.x;
    x += row * c, out += row * c;
    float v[NV][N];
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < NV; ++k) {
        int i = (k * blockDim.x + threadIdx.x) * N;
        if (i < c) load(x + i, v[k]);
    }
#pragma unroll
    for (int k = 0; k < NV; ++k) {
        int i = (k * blockDim.x + threadIdx.x) * N;
        if (i < c) {
#pragma unroll
            for (int n = 0; n < N; ++n) sum = fmaf(v[k][n], v[k][n], sum);
        }
    }
    float r = 1.0f / sqrtf(block_sum(sum) / (float)c + eps);
    if (threadIdx.x == 0) rstd[row] = r;
#pragma unroll
    for (int k = 0; k < NV; ++k) {
        int i = (k * blockDim.x + threadIdx.x) * N;
        if (i < c) {
            float w[N];
            load(weight + i, w);
#pragma unroll
            for (int n = 0; n < N; ++n) v[k][n] = v[k][n] * r * w[n];
            store(out + i, v[k]);
        }
    }
}

// Rows that are wider, or no whole pieces: the second pass over the row comes out
// of the cache.
template <class T> __device__ void rms_norm_wide(const T* x, const T* weight, T* out, float* rstd, int c, float eps) {
    long long row = blockIdx.x;
    x += row * c, out += row * c;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < c; i += blockDim.x) sum = fmaf(to_float(x[i]), to_float(x[i]), sum);
    float r = 1.0f / sqrtf(block_sum(sum) / (float)c + eps);
    if (threadIdx.x == 0) rstd[row] = r;
    for (int i = threadIdx.x; i < c; i += blockDim.x) out[i] = from_float<T>(to_float(x[i]) * r * to_float(weight[i]));
}

// d_x = rstd (w d_out - x rstd^2 mean(w d_out x)) [+ d_x]. A block takes every
// gridDim.x-th row and keeps its share of d_weight = sum of d_out x rstd in
// registers: partial (gridDim.x, C). Thread t owns NV pieces of N columns. All that
// a row needs is asked for before the block meets.
template <class T, int N, int NV>
__device__ void rms_norm_backward(const T* d_out, const T* x, const T* weight, const float* rstd, T* d_x,
                                  int accumulate, float* partial, int rows, int c) {
    float d_weight[NV][N] = {};
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        float r = rstd[row];
        uint4 raw_g[NV], raw_x[NV], raw_d[NV];
#pragma unroll
        for (int k = 0; k < NV; ++k) {
            int i = (k * blockDim.x + threadIdx.x) * N;
            if (i < c) {
                raw_g[k] = *reinterpret_cast<const uint4*>(d_out + row * c + i);
                raw_x[k] = *reinterpret_cast<const uint4*>(x + row * c + i);
                if (accumulate) raw_d[k] = *reinterpret_cast<const uint4*>(d_x + row * c + i);
            }
        }
        float dot = 0.0f;
#pragma unroll
        for (int k = 0; k < NV; ++k) {
            int i = (k * blockDim.x + threadIdx.x) * N;
            if (i < c) {
                float w[N], g[N], v[N];
                load(weight + i, w);
                unpack(raw_g[k], g);
                unpack(raw_x[k], v);
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    float gx = g[n] * v[n];
                    dot = fmaf(gx, w[n], dot);
                    d_weight[k][n] = fmaf(gx, r, d_weight[k][n]);
                }
            }
        }
        float along = block_sum(dot) * r * r * r / (float)c;
#pragma unroll
        for (int k = 0; k < NV; ++k) {
            int i = (k * blockDim.x + threadIdx.x) * N;
            if (i < c) {
                float w[N], g[N], v[N], d[N] = {};
                load(weight + i, w);
                unpack(raw_g[k], g);
                unpack(raw_x[k], v);
                if (accumulate) unpack(raw_d[k], d);
#pragma unroll
                for (int n = 0; n < N; ++n) d[n] += fmaf(-along, v[n], r * (g[n] * w[n]));
                store(d_x + row * c + i, d);
            }
        }
    }
    if (!partial) return;  // a frozen weight
#pragma unroll
    for (int k = 0; k < NV; ++k) {
        int i = (k * blockDim.x + threadIdx.x) * N;
        if (i < c) {
#pragma unroll
            for (int n = 0; n < N; ++n) partial[(long long)blockIdx.x * c + i + n] = d_weight[k][n];
        }
    }
}

// Rows too wide for the registers of one block: the same with d_weight in
// `partial` from the start, which only its own thread touches.
template <class T>
__device__ void rms_norm_backward_wide(const T* d_out, const T* x, const T* weight, const float* rstd, T* d_x,
                                       int accumulate, float* partial, int rows, int c) {
    if (partial) {
        partial += (long long)blockIdx.x * c;
        for (int i = threadIdx.x; i < c; i += blockDim.x) partial[i] = 0.0f;
    }
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        float r = rstd[row];
        float dot = 0.0f;
        for (int i = threadIdx.x; i < c; i += blockDim.x) {
            float gx = to_float(d_out[row * c + i]) * to_float(x[row * c + i]);
            dot = fmaf(gx, to_float(weight[i]), dot);
            if (partial) partial[i] = fmaf(gx, r, partial[i]);
        }
        float along = block_sum(dot) * r * r * r / (float)c;
        for (int i = threadIdx.x; i < c; i += blockDim.x) {
            float g = to_float(d_out[row * c + i]) * to_float(weight[i]);
            float d = fmaf(-along, to_float(x[row * c + i]), r * g);
            T* to = d_x + row * c + i;
            *to = from_float<T>(accumulate ? to_float(*to) + d : d);
        }
    }
}

constexpr int HEAD_PIECES = 8;  // head size up to 256, a lane each 32nd element

// One warp a head of qkv (rows, (H + 2K) D): queries and keys are normalized,
// values copied. rstd (rows, H + K).
template <class T>
__device__ void head_norm(const T* qkv_raw, const T* q_weight, const T* k_weight, T* qkv, float* rstd, long long heads,
                          int h, int k, int d, float eps) {
    long long at = (long long)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    int lane = threadIdx.x & 31;
    if (at >= heads) return;
    int width = h + 2 * k;
    long long row = at / width;
    int head = (int)(at % width);
    const T* x = qkv_raw + at * d;
    T* out = qkv + at * d;
    if (head >= h + k) {
        for (int i = lane; i < d; i += 32) out[i] = x[i];
        return;
    }
    const T* w = head < h ? q_weight : k_weight;
    float v[HEAD_PIECES];
    float sum = 0.0f;
#pragma unroll
    for (int p = 0; p < HEAD_PIECES; ++p) {
        int i = p * 32 + lane;
        v[p] = i < d ? to_float(x[i]) : 0.0f;
        sum = fmaf(v[p], v[p], sum);
    }
    float r = 1.0f / sqrtf(warp_sum(sum) / (float)d + eps);
    if (lane == 0) rstd[row * (h + k) + head] = r;
#pragma unroll
    for (int p = 0; p < HEAD_PIECES; ++p) {
        int i = p * 32 + lane;
        if (i < d) out[i] = from_float<T>(v[p] * r * to_float(w[i]));
    }
}

// In place on d_qkv. Block b takes every gridDim.x-th row; a warp every eighth
// head of it. partial (2, gridDim.x, D): the sums for q's and for k's weight.
template <class T>
__device__ void head_norm_backward(T* d_qkv, const T* qkv_raw, const T* q_weight, const T* k_weight, const float* rstd,
                                   float* partial, int rows, int h, int k, int d) {
    __shared__ float sums[8][32 * HEAD_PIECES];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    float acc[2][HEAD_PIECES] = {};
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        for (int head = warp; head < h + k; head += 8) {
            bool is_key = head >= h;
            const T* w = is_key ? k_weight : q_weight;
            long long at = (row * (h + 2 * k) + head) * d;
            float r = rstd[row * (h + k) + head];
            float g[HEAD_PIECES], v[HEAD_PIECES];
            float dot = 0.0f;
#pragma unroll
            for (int p = 0; p < HEAD_PIECES; ++p) {
                int i = p * 32 + lane;
                g[p] = i < d ? to_float(d_qkv[at + i]) : 0.0f;
                v[p] = i < d ? to_float(qkv_raw[at + i]) : 0.0f;
                float gx = g[p] * v[p];
                acc[0][p] = fmaf(is_key ? 0.0f : gx, r, acc[0][p]);
                acc[1][p] = fmaf(is_key ? gx : 0.0f, r, acc[1][p]);
                float weight = i < d ? to_float(w[i]) : 0.0f;
                dot = fmaf(gx, weight, dot);
                g[p] *= weight;
            }
            float along = warp_sum(dot) * r * r * r / (float)d;
#pragma unroll
            for (int p = 0; p < HEAD_PIECES; ++p) {
                int i = p * 32 + lane;
                if (i < d) d_qkv[at + i] = from_float<T>(fmaf(-along, v[p], r * g[p]));
            }
        }
    }
#pragma unroll
    for (int s = 0; s < 2; ++s) {
        __syncthreads();
#pragma unroll
        for (int p = 0; p < HEAD_PIECES; ++p) sums[warp][p * 32 + lane] = acc[s][p];
        __syncthreads();
        for (int i = threadIdx.x; i < d; i += blockDim.x) {
            float sum = 0.0f;
            for (int w = 0; w < 8; ++w) sum += sums[w][i];
            partial[((long long)s * gridDim.x + blockIdx.x) * d + i] = sum;
        }
    }
}

#define NORM(NAME, T, N, NV)                                                                                          \
    extern "C" __global__ void __launch_bounds__(256)                                                                 \
        rms_norm_##NAME##_p##NV(const T* x, const T* weight, T* out, float* rstd, int c, float eps) {                 \
        rms_norm<T, N, NV>(x, weight, out, rstd, c, eps);                                                             \
    }
NORM(bf16, bf16, 8, 1)
NORM(bf16, bf16, 8, 2)
NORM(bf16, bf16, 8, 4)
NORM(f32, float, 4, 1)
NORM(f32, float, 4, 2)
NORM(f32, float, 4, 4)

// Few enough registers that the blocks of src/target.rs make one wave.
#define NORM_BACKWARD(NAME, T, N, NV, BLOCKS)                                                                         \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) rms_norm_backward_##NAME##_p##NV(                       \
        const T* d_out, const T* x, const T* weight, const float* rstd, T* d_x, int accumulate, float* partial,       \
        int rows, int c) {                                                                                            \
        rms_norm_backward<T, N, NV>(d_out, x, weight, rstd, d_x, accumulate, partial, rows, c);                       \
    }
NORM_BACKWARD(bf16, bf16, 8, 1, 4)
NORM_BACKWARD(bf16, bf16, 8, 2, 4)
NORM_BACKWARD(bf16, bf16, 8, 4, 2)
NORM_BACKWARD(f32, float, 4, 1, 4)
NORM_BACKWARD(f32, float, 4, 2, 4)
NORM_BACKWARD(f32, float, 4, 4, 3)

#define NORM_TYPES(NAME, T)                                                                                           \
    extern "C" __global__ void __launch_bounds__(256)                                                                 \
        rms_norm_##NAME##_wide(const T* x, const T* weight, T* out, float* rstd, int c, float eps) {                  \
        rms_norm_wide<T>(x, weight, out, rstd, c, eps);                                                               \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(512) rms_norm_backward_##NAME##_wide(                                \
        const T* d_out, const T* x, const T* weight, const float* rstd, T* d_x, int accumulate, float* partial,       \
        int rows, int c) {                                                                                            \
        rms_norm_backward_wide<T>(d_out, x, weight, rstd, d_x, accumulate, partial, rows, c);                         \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256)                                                                 \
        head_norm_##NAME(const T* qkv_raw, const T* q_weight, const T* k_weight, T* qkv, float* rstd,                 \
                         long long heads, int h, int k, int d, float eps) {                                           \
        head_norm<T>(qkv_raw, q_weight, k_weight, qkv, rstd, heads, h, k, d, eps);                                    \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256)                                                                 \
        head_norm_backward_##NAME(T* d_qkv, const T* qkv_raw, const T* q_weight, const T* k_weight,                   \
                                  const float* rstd, float* partial, int rows, int h, int k, int d) {                 \
        head_norm_backward<T>(d_qkv, qkv_raw, q_weight, k_weight, rstd, partial, rows, h, k, d);                      \
    }
FOR_TYPES(NORM_TYPES)

// Cross-entropy over the vocabulary with its gradient in the place of the logits
// (Hsu et al. 2024, Liger Kernel), and the sum of the losses.

#include "common.cuh"

constexpr int IGNORED = -100;

// e^x as 2^(x log2 e): one multiply-add where x is a difference.
constexpr float LOG2E = 1.44269504f;
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// e^(x - top), given top log2(e) for types that cannot see the difference.
template <class T> __device__ __forceinline__ float exp_below(float x, float top, float top_log2e) {
    if constexpr (sizeof(T) == 2) return exp2_fast(fmaf(x, LOG2E, -top_log2e));
    else return expf(x - top);
}

// One block of 1024 threads a row. losses = log(sum of exp) - logit of the label;
// with `backward` the logits become (softmax - onehot) * loss_scale, step[3]. A
// label outside the vocabulary gives a loss of NaN.
template <class T, int N>
__device__ void cross_entropy(T* logits, const int* labels, float* losses, const float* step, int vocab, int backward) {
    __shared__ float maxima[32], sums[32];
    T* row = logits + (long long)blockIdx.x * vocab;
    int label = labels[blockIdx.x];
    if (label < 0 || label >= vocab) {
        if (threadIdx.x == 0) losses[blockIdx.x] = label == IGNORED ? 0.0f : not_a_number();
        if (backward) {
            float zero[N] = {};
            for (int i = threadIdx.x * N; i < vocab; i += blockDim.x * N) store(row + i, zero);
        }
        return;
    }
    float at_label = to_float(row[label]);
    // A finite start: differences of infinities would be NaN.
    float largest = -3.0e38f, sum = 0.0f;
    for (int i = threadIdx.x * N; i < vocab; i += blockDim.x * N) {
        float v[N];
        load(row + i, v);
        float top = largest;
#pragma unroll
        for (int n = 0; n < N; ++n) top = fmaxf(top, v[n]);
        if (top > largest) sum *= exponential<T>(largest - top), largest = top;
        float top_log2e = largest * LOG2E;
#pragma unroll
        for (int n = 0; n < N; ++n) sum += exp_below<T>(v[n], largest, top_log2e);
    }
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    float top = warp_max(largest);
    sum = warp_sum(sum * expf(largest - top));
    if (lane == 0) maxima[warp] = top, sums[warp] = sum;
    __syncthreads();
    bool used = lane < (int)(blockDim.x >> 5);
    float part = used ? maxima[lane] : -3.0e38f;
    largest = warp_max(part);
    sum = warp_sum(used ? sums[lane] * expf(part - largest) : 0.0f);
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(sum) + largest - at_label;
    if (!backward) return;
    float scale = step[3];
    float factor = scale / sum, top_log2e = largest * LOG2E;
    for (int i = threadIdx.x * N; i < vocab; i += blockDim.x * N) {
        float v[N];
        load(row + i, v);
#pragma unroll
        for (int n = 0; n < N; ++n) v[n] = exp_below<T>(v[n], largest, top_log2e) * factor;
        store(row + i, v);
        // The thread that wrote the label's piece: not by subtraction from the rounded softmax.
        if ((u32)(label - i) < (u32)N) row[label] = from_float<T>((expf(at_label - largest) / sum - 1.0f) * scale);
    }
}

#define LOSS(NAME, T, N)                                                                                       \
    extern "C" __global__ void __launch_bounds__(1024)                                                         \
        cross_entropy_##NAME##_v##N(T* logits, const int* labels, float* losses, const float* step, int vocab, \
                                    int backward) {                                                            \
        cross_entropy<T, N>(logits, labels, losses, step, vocab, backward);                                    \
    }
FOR_TYPES_AND_WIDTHS(LOSS)

// total = [total +] sum of losses * loss_scale, in double and in one order. One
// block of 1024 threads.
extern "C" __global__ void __launch_bounds__(1024)
    sum_losses(const float* losses, const float* step, float* total, long long n, int accumulate) {
    __shared__ double parts[1024];
    double sum = 0.0;
    for (long long i = threadIdx.x; i < n; i += 1024) sum += (double)losses[i];
    parts[threadIdx.x] = sum;
    for (int o = 512; o > 0; o >>= 1) {
        __syncthreads();
        if (threadIdx.x < o) parts[threadIdx.x] += parts[threadIdx.x + o];
    }
    if (threadIdx.x == 0) {
        float scaled = (float)(parts[0] * (double)step[3]);
        total[0] = accumulate ? total[0] + scaled : scaled;
    }
}

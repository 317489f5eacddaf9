// One new token of each sequence against its cache, in one launch: RoPE, the append
// of its key and value, and split attention (Dao et al. 2023, "Flash-Decoding").
//
// A block takes one key-value head, up to 8 of the query heads that share it, and one
// span of the keys. A warp takes 16 keys at a time, which are the rows of an MMA, with
// the queries as its columns; keys and values go from memory to registers in 16-byte
// pieces, without shared memory between. For the second product the probabilities are
// turned by `movmatrix`, and pairs of values by byte permutations; which dimension a
// row of that product stands for is free. The last block of a head adds the spans up,
// in their order.

#include "dependent.cuh"

constexpr int WARPS = 4;
constexpr int COLUMNS = 8;   // query heads of a block
constexpr int TILE = 16;     // keys of a warp at a time
constexpr int LEAST = WARPS * TILE, ALONE = 4 * LEAST;  // keys of a block; of the only one
constexpr int HEADS = 1024;  // blocks' heads that can be counted

// Mirrored in src/attention.rs.
struct Decode {
    const bf16* qkv;       // (B, (H + 2 K) D)
    const int* start;      // (B)
    const int* positions;  // (B); null where queries and keys are rotated already
    const float* table;    // (table_rows, 2, D / 2)
    bf16 *k_cache, *v_cache;  // (B, capacity, K D)
    bf16* out;             // (B, H D)
    float* partial;        // (B, K, heads of a block, splits, D + 2)
    int table_rows, heads, kv_heads, window, capacity;
    float scale;
};

// How many blocks of a head have finished; zero between launches.
__device__ u32 finished[HEADS];

__device__ __forceinline__ float exp2_fast(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

__device__ __forceinline__ u32 transpose(u32 x) {
    u32 r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
    return r;
}

// Largest and sum over the lanes of one column pair.
__device__ __forceinline__ float over_rows_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 4));
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 8));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 16));
}
__device__ __forceinline__ float over_rows_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 4);
    x += __shfl_xor_sync(0xffffffffu, x, 8);
    return x + __shfl_xor_sync(0xffffffffu, x, 16);
}

// The pieces of a value row that a lane holds: 16 bytes where 8 lanes of them divide
// the head, else 8. Word m of them are dimensions dimension(m, g) and the next.
template <int D> struct Value {
    static constexpr int WORDS = D / 16;
    static constexpr int WIDE = D % 64 == 0 ? 4 : 2;  // words of a piece
    u32 words[WORDS];

    __device__ __forceinline__ static int dimension(int m, int g) {
        return (m / WIDE) * (16 * WIDE) + g * (2 * WIDE) + (m % WIDE) * 2;
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int m = 0; m < WORDS; ++m) words[m] = 0;
    }
    __device__ __forceinline__ void load(const bf16* row, int g) {
#pragma unroll
        for (int i = 0; i < WORDS / WIDE; ++i) {
            const bf16* from = row + dimension(i * WIDE, g);
            if constexpr (WIDE == 4) {
                uint4 v = load_stream16(from);
                words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
            } else {
                uint2 v = load_stream8(from);
                words[2 * i] = v.x, words[2 * i + 1] = v.y;
            }
        }
    }
    __device__ __forceinline__ void load_shared(const bf16* row, int g) {
#pragma unroll
        for (int m = 0; m < WORDS; ++m) words[m] = *reinterpret_cast<const u32*>(row + dimension(m, g));
    }
};

// Grid (splits, K * passes, B), a pass being up to 8 query heads of a key-value head.
template <int D> __device__ __forceinline__ void decode(const Decode& p) {
    constexpr int STEPS = D / 32;
    constexpr float LOG2E = 1.4426950408889634f;
    __shared__ __align__(16) bf16 queries[COLUMNS][D], new_key[D], new_value[D];
    __shared__ __align__(16) float outs[WARPS][COLUMNS][D];
    __shared__ float tops[WARPS][COLUMNS], weights[WARPS][COLUMNS], shares[32][COLUMNS], totals[COLUMNS];
    __shared__ bool is_last;

    let_next_start();
    int kv_head = blockIdx.y % p.kv_heads, pass = blockIdx.y / p.kv_heads, b = blockIdx.z;
    int group = p.heads / p.kv_heads, count = min(COLUMNS, group - pass * COLUMNS);
    int first_head = kv_head * group + pass * COLUMNS;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int width = (p.heads + 2 * p.kv_heads) * D;
    long long kv_width = (long long)p.kv_heads * D;
    bf16* out = p.out + ((long long)b * p.heads + first_head) * D;

    // The span: keys begin .. end, of which the new one, at `start`, is not cached yet.
    int start = p.start[b];
    if (start < 0 || start >= p.capacity) {
        // Beyond the cache: NaN, which nobody takes for an answer.
        wait_for_previous();
        if (blockIdx.x == 0)
            for (int i = threadIdx.x; i < count * D; i += WARPS * 32) out[i] = from_float<bf16>(not_a_number());
        return;
    }
    int low = max(0, start + 1 - p.window), splits = gridDim.x;
    // Few keys are not worth the adding up of spans.
    int seen = start + 1 - low;
    int span = seen <= ALONE ? ALONE : max(LEAST, ((seen + splits - 1) / splits + TILE - 1) / TILE * TILE);
    int active = (seen + span - 1) / span;
    if ((int)blockIdx.x >= active) return;  // the others of this head wait
    int begin = low + blockIdx.x * span, end = min(start + 1, begin + span);
    const bf16* keys = p.k_cache + (long long)b * p.capacity * kv_width + kv_head * D;
    const bf16* values = p.v_cache + (long long)b * p.capacity * kv_width + kv_head * D;

    // Of a tile at `at`, a lane holds keys at + g and at + g + 8 (8 t .. of every 32
    // dimensions), and values at + 2 t, + 1, + 8, + 9.
    uint4 key[2][STEPS];
    Value<D> value[4];
    auto value_row = [&](int at, int i) { return at + 2 * t + (i & 1) + (i >> 1) * 8; };
    auto load_tile = [&](int at) {
        int cached = min(end, start);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int j = at + g + 8 * h;
#pragma unroll
            for (int s = 0; s < STEPS; ++s)
                key[h][s] = j < cached ? load_stream16(keys + j * kv_width + s * 32 + t * 8) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int j = value_row(at, i);
            if (j < cached) value[i].load(values + j * kv_width, g);
            else value[i].clear();
        }
    };
    int at = begin + warp * TILE;
    // Written before this graph was launched.
    if (at < end) load_tile(at);

    wait_for_previous();

    // Rotated queries and the new key, rounded as an op of its own would.
    const bf16* qkv = p.qkv + (long long)b * width;
    int position = p.positions ? p.positions[b] : 0;
    bool known = position >= 0 && position < p.table_rows;
    const float* angles = p.table + (long long)(known ? position : 0) * D;
    for (int i = threadIdx.x; i < (COLUMNS + 1) * (D / 2); i += WARPS * 32) {
        int head = i / (D / 2), e = i % (D / 2);
        bf16* to = head < COLUMNS ? queries[head] : new_key;
        if (head < COLUMNS && head >= count) {
            to[e].bits = to[e + D / 2].bits = 0;
            continue;
        }
        const bf16* from = qkv + (head < COLUMNS ? first_head + head : p.heads + kv_head) * D + e;
        bf16 x = load_fresh(from), y = load_fresh(from + D / 2);
        if (p.positions) {
            float cosine = known ? angles[e] : not_a_number(), sine = angles[D / 2 + e];
            float fx = to_float(x), fy = to_float(y);
            x = from_float<bf16>(fmaf(fx, cosine, -(fy * sine)));
            y = from_float<bf16>(fmaf(fy, cosine, fx * sine));
        }
        to[e] = x, to[e + D / 2] = y;
    }
    for (int i = threadIdx.x; i < D; i += WARPS * 32)
        new_value[i] = load_fresh(qkv + (p.heads + p.kv_heads + kv_head) * D + i);
    __syncthreads();
    if (end == start + 1 && pass == 0) {
        long long to = ((long long)b * p.capacity + start) * kv_width + kv_head * D;
        for (int i = threadIdx.x; i < D; i += WARPS * 32) {
            p.k_cache[to + i] = new_key[i];
            p.v_cache[to + i] = new_value[i];
        }
    }
    uint4 query[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) query[s] = *reinterpret_cast<const uint4*>(&queries[g][s * 32 + t * 8]);

    // sums[m]: dimension(m, g) of query columns 2 t and 2 t + 1, then the next one.
    float sums[D / 16][4] = {}, top[2] = {negative_infinity(), negative_infinity()}, weight[2] = {};
    float scale = p.scale * LOG2E;
    while (at < end) {
        if (at + TILE > start) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (at + g + 8 * h == start) {
#pragma unroll
                    for (int s = 0; s < STEPS; ++s)
                        key[h][s] = *reinterpret_cast<const uint4*>(&new_key[s * 32 + t * 8]);
                }
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (value_row(at, i) == start) value[i].load_shared(new_value, g);
        }
        float score[4] = {};
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            uint4 a = key[0][s], c = key[1][s];
            multiply(score, a.x, c.x, a.y, c.y, query[s].x, query[s].y);
            multiply(score, a.z, c.z, a.w, c.w, query[s].z, query[s].w);
        }
        // score: keys at + g (first two) and at + g + 8, columns 2 t and 2 t + 1.
#pragma unroll
        for (int e = 0; e < 4; ++e) score[e] = at + g + 8 * (e >> 1) < end ? score[e] * scale : negative_infinity();
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            // A tile has a key: the largest is finite, or NaN through and through.
            float most = fmaxf(top[c], over_rows_max(fmaxf(score[c], score[c + 2])));
            float keep = exp2_fast(top[c] - most);
            top[c] = most;
            score[c] = exp2_fast(score[c] - most), score[c + 2] = exp2_fast(score[c + 2] - most);
            weight[c] = weight[c] * keep + score[c] + score[c + 2];
#pragma unroll
            for (int m = 0; m < D / 16; ++m) sums[m][c] *= keep, sums[m][c + 2] *= keep;
        }
        u32 b0 = transpose(pack_bf16(score[0], score[1])), b1 = transpose(pack_bf16(score[2], score[3]));
#pragma unroll
        for (int m = 0; m < D / 16; ++m) {
            u32 v0 = value[0].words[m], v1 = value[1].words[m], v2 = value[2].words[m], v3 = value[3].words[m];
            multiply(sums[m], __byte_perm(v0, v1, 0x5410), __byte_perm(v0, v1, 0x7632), __byte_perm(v2, v3, 0x5410),
                     __byte_perm(v2, v3, 0x7632), b0, b1);
        }
        at += WARPS * TILE;
        if (at < end) load_tile(at);
    }

    // The warps of this block: scaled to a common largest score.
#pragma unroll
    for (int c = 0; c < 2; ++c) weight[c] = over_rows_sum(weight[c]);
#pragma unroll
    for (int m = 0; m < D / 16; ++m)
#pragma unroll
        for (int c = 0; c < 2; ++c)
            *reinterpret_cast<float2*>(&outs[warp][2 * t + c][Value<D>::dimension(m, g)]) =
                make_float2(sums[m][c], sums[m][c + 2]);
    if (g == 0) {
#pragma unroll
        for (int c = 0; c < 2; ++c) tops[warp][2 * t + c] = top[c], weights[warp][2 * t + c] = weight[c];
    }
    __syncthreads();
    long long head = ((long long)b * gridDim.y + blockIdx.y) * COLUMNS;
    for (int i = threadIdx.x; i < count * D; i += WARPS * 32) {
        int column = i / D, e = i % D;
        float most = tops[0][column];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) most = fmaxf(most, tops[w][column]);
        float sum = 0.0f, all = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            float share = exp2_fast(tops[w][column] - most);
            sum = fmaf(share, outs[w][column][e], sum);
            all = fmaf(share, weights[w][column], all);
        }
        if (active == 1) {
            out[i] = from_float<bf16>(sum / all);
            continue;
        }
        float* to = p.partial + ((head + column) * splits + blockIdx.x) * (D + 2);
        to[e] = sum;
        if (e == 0) to[D] = most, to[D + 1] = all;
    }
    if (active == 1) return;

    __threadfence();
    __syncthreads();
    u32* counter = finished + b * gridDim.y + blockIdx.y;
    if (threadIdx.x == 0) is_last = atomicAdd(counter, 1u) == (u32)active - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    if (threadIdx.x == 0) *counter = 0;
    // shares[s][column]: the factor of span s.
    for (int column = warp; column < count; column += WARPS) {
        const float* from = p.partial + ((head + column) * splits + min(lane, active - 1)) * (D + 2);
        float mine = lane < active ? load_fresh(from + D) : negative_infinity();
        float share = exp2_fast(mine - warp_max(mine));
        float all = warp_sum(lane < active ? share * load_fresh(from + D + 1) : 0.0f);
        if (lane < active) shares[lane][column] = share;
        if (lane == 0) totals[column] = all;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count * D; i += WARPS * 32) {
        int column = i / D, e = i % D;
        const float* from = p.partial + (head + column) * splits * (D + 2) + e;
        float sum = 0.0f;
#pragma unroll 8
        for (int s = 0; s < active; ++s) sum = fmaf(shares[s][column], load_fresh(from + s * (D + 2)), sum);
        out[i] = from_float<bf16>(sum / totals[column]);
    }
}

#define DECODE(D)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(128, 4) decode_attention_d##D(const __grid_constant__ Decode p) {    \
        decode<D>(p);                                                                                              \
    }
DECODE(64)
DECODE(96)
DECODE(128)

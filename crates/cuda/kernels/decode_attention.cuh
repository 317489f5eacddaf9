// One new token of a sequence against its cache: RoPE, the append of its key and value,
// and split attention (Dao et al. 2023, "Flash-Decoding").
//
// A block takes one key-value head, up to 8 of the query heads that share it, and one
// span of the keys. A group of warps takes 16 keys at a time, which are the rows of an
// MMA, with the queries as its columns; keys and values go from memory to registers in 16-byte
// pieces, without shared memory between. For the second product the probabilities are
// turned by `movmatrix`, and pairs of values by byte permutations; which dimension a
// row of that product stands for is free. Of a group of two warps each has half of the
// dimensions, and they add up their parts of the scores. The last block of a head adds the
// spans up, in their order.

#pragma once

#include "dependent.cuh"
#include "shared_memory.cuh"

constexpr int ATTENTION_COLUMNS = 8;   // query heads of a block
constexpr int ATTENTION_TILE = 16;     // keys of a group at a time
constexpr int ATTENTION_LEAST = 64;    // keys of a block
constexpr int ATTENTION_ALONE = 256;   // and of the only one of a head
constexpr int ATTENTION_SPANS = 32;    // at most
constexpr int ATTENTION_HEADS = 1024;  // blocks' heads that can be counted

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
    int splits, blocks;    // spans of a head, and (span, head) pairs of one sequence
};

// How many blocks of a head have finished; zero between launches.
__device__ u32 finished[ATTENTION_HEADS];

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

// The two warps of a group; barriers 0 and 1 are others'.
__device__ __forceinline__ void sync_pair(int group) { asm volatile("bar.sync %0, 64;" ::"r"(2 + group) : "memory"); }

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

// The pieces of DIMS dimensions of a value row that a lane holds: 16 bytes where 8 lanes of
// them divide those, else 8. Word m of them are dimensions dimension(m, g) and the next.
template <int DIMS> struct Value {
    static constexpr int WORDS = DIMS / 16;
    static constexpr int WIDE = DIMS % 64 == 0 ? 4 : 2;  // words of a piece
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
    __device__ __forceinline__ void load_shared(u32 row, int g) {
#pragma unroll
        for (int m = 0; m < WORDS; ++m) words[m] = lds4(row + 2 * dimension(m, g));
    }
};

// Where a block keeps what its warps share: `small` bytes together, and the groups' sums,
// either in one piece or in pieces of 128 bytes, each with as much that is not theirs behind.
template <int D, int GROUPS, bool PIECES> struct AttentionMemory {
    u32 queries, sums;

    static constexpr int SMALL = (ATTENTION_COLUMNS + 2) * D * 2 + 2 * GROUPS * ATTENTION_COLUMNS * 4 +
                                 (ATTENTION_SPANS + 1) * ATTENTION_COLUMNS * 4 + 16;
    static constexpr int SUMS = GROUPS * ATTENTION_COLUMNS * D * 4;
    static_assert(ATTENTION_COLUMNS * D >= 4 * 128, "two warps' scores, twice, in the place of their sums");

    __device__ __forceinline__ u32 query(int column) const { return queries + column * D * 2; }
    __device__ __forceinline__ u32 key() const { return query(ATTENTION_COLUMNS); }
    __device__ __forceinline__ u32 value() const { return query(ATTENTION_COLUMNS + 1); }
    __device__ __forceinline__ u32 top(int group, int column) const {
        return query(ATTENTION_COLUMNS + 2) + (group * ATTENTION_COLUMNS + column) * 4;
    }
    __device__ __forceinline__ u32 weight(int group, int column) const { return top(GROUPS + group, column); }
    __device__ __forceinline__ u32 share(int span, int column) const { return top(2 * GROUPS + span, column); }
    __device__ __forceinline__ u32 total(int column) const { return share(ATTENTION_SPANS, column); }
    __device__ __forceinline__ u32 is_last() const { return share(ATTENTION_SPANS + 1, 0); }
    __device__ __forceinline__ u32 sum(int group, int column, int e) const {
        u32 i = (group * ATTENTION_COLUMNS + column) * D + e;
        return sums + (PIECES ? (i >> 5) * 256 + (i & 31) * 4 : i * 4);
    }
};

// What block `block` of p.blocks does for sequence b. A pass is up to 8 query heads of a
// key-value head. `wait` returns when p.qkv is there, and is called once; `sync` waits for all
// 32 * GROUPS * HALVES threads.
template <int D, int GROUPS, int HALVES, bool PIECES, class Wait, class Sync>
__device__ __forceinline__ void attend(const Decode& p, AttentionMemory<D, GROUPS, PIECES> m, int block, int b, Wait wait, Sync sync) {
    constexpr int DIMS = D / HALVES, STEPS = DIMS / 32, THREADS = 32 * GROUPS * HALVES;
    constexpr int COLUMNS = ATTENTION_COLUMNS, TILE = ATTENTION_TILE;
    constexpr bool LATE = HALVES > 1;
    constexpr float LOG2E = 1.4426950408889634f;

    int splits = p.splits, split = block % splits, head_block = block / splits, head_blocks = p.blocks / splits;
    int kv_head = head_block % p.kv_heads, pass = head_block / p.kv_heads;
    int heads = p.heads / p.kv_heads, count = min(COLUMNS, heads - pass * COLUMNS);
    int first_head = kv_head * heads + pass * COLUMNS;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int group = warp / HALVES, half = warp % HALVES, first_dim = half * DIMS;
    int width = (p.heads + 2 * p.kv_heads) * D;
    long long kv_width = (long long)p.kv_heads * D;
    bf16* out = p.out + ((long long)b * p.heads + first_head) * D;

    // The span: keys begin .. end, of which the new one, at `start`, is not cached yet.
    int start = p.start[b];
    bool inside = start >= 0 && start < p.capacity;
    int low = max(0, start + 1 - p.window);
    // Few keys are not worth the adding up of spans.
    int seen = inside ? start + 1 - low : 1;
    int span = seen <= ATTENTION_ALONE ? ATTENTION_ALONE
                                       : max(ATTENTION_LEAST, ((seen + splits - 1) / splits + TILE - 1) / TILE * TILE);
    int active = (seen + span - 1) / span;
    int begin = low + split * span, end = inside && split < active ? min(start + 1, begin + span) : begin;
    int cached = min(end, start);
    const bf16* keys = p.k_cache + (long long)b * p.capacity * kv_width + kv_head * D + first_dim;
    const bf16* values = p.v_cache + (long long)b * p.capacity * kv_width + kv_head * D + first_dim;

    // Of a tile at `at`, a lane holds keys at + g and at + g + 8 (8 t .. of every 32 of its
    // dimensions), and values at + 2 t, + 1, + 8, + 9.
    uint4 key[2][STEPS];
    Value<DIMS> value[4];
    auto value_row = [&](int at, int i) { return at + 2 * t + (i & 1) + (i >> 1) * 8; };
    auto load_keys = [&](int at) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int j = at + g + 8 * h;
#pragma unroll
            for (int s = 0; s < STEPS; ++s)
                key[h][s] = j < cached ? load_stream16(keys + j * kv_width + s * 32 + t * 8) : make_uint4(0, 0, 0, 0);
        }
        // With fewer registers values come when keys are done with.
        if (LATE && at + lane < cached && lane < TILE)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(values + (at + lane) * kv_width) : "memory");
    };
    auto load_values = [&](int at) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int j = value_row(at, i);
            if (j < cached) value[i].load(values + j * kv_width, g);
            else value[i].clear();
        }
    };
    int at = begin + group * TILE;
    // Written before this graph was launched.
    if (at < end) {
        load_keys(at);
        if constexpr (!LATE) load_values(at);
    }

    wait();

    if (begin >= end) {
        // Beyond the cache: NaN, which nobody takes for an answer. Else the others of this
        // head are enough.
        if (!inside && split == 0)
            for (int i = threadIdx.x; i < count * D; i += THREADS) out[i] = from_float<bf16>(not_a_number());
        return;
    }

    // Rotated queries and the new key, rounded as an op of its own would.
    const bf16* qkv = p.qkv + (long long)b * width;
    int position = p.positions ? p.positions[b] : 0;
    bool known = position >= 0 && position < p.table_rows;
    const float* angles = p.table + (long long)(known ? position : 0) * D;
#pragma unroll 1
    for (int i = threadIdx.x; i < (COLUMNS + 1) * (D / 2); i += THREADS) {
        int head = i / (D / 2), e = i % (D / 2);
        u32 to = (head < COLUMNS ? m.query(head) : m.key()) + 2 * e;
        bf16 x, y;
        x.bits = y.bits = 0;
        if (head >= COLUMNS || head < count) {
            const bf16* from = qkv + (head < COLUMNS ? first_head + head : p.heads + kv_head) * D + e;
            x = load_fresh(from), y = load_fresh(from + D / 2);
            if (p.positions) {
                float cosine = known ? angles[e] : not_a_number(), sine = angles[D / 2 + e];
                float fx = to_float(x), fy = to_float(y);
                x = from_float<bf16>(fmaf(fx, cosine, -(fy * sine)));
                y = from_float<bf16>(fmaf(fy, cosine, fx * sine));
            }
        }
        sts2(to, x), sts2(to + D, y);
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < D; i += THREADS)
        sts2(m.value() + 2 * i, load_fresh(qkv + (p.heads + p.kv_heads + kv_head) * D + i));
    sync();
    if (end == start + 1 && pass == 0) {
        long long to = ((long long)b * p.capacity + start) * kv_width + kv_head * D;
#pragma unroll 1
        for (int i = threadIdx.x; i < D; i += THREADS) {
            p.k_cache[to + i] = lds2(m.key() + 2 * i);
            p.v_cache[to + i] = lds2(m.value() + 2 * i);
        }
    }
    uint4 query[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) query[s] = lds16(m.query(g) + (first_dim + s * 32 + t * 8) * 2);

    // sums[m]: dimension(m, g) of query columns 2 t and 2 t + 1, then the next one.
    float sums[DIMS / 16][4] = {}, top[2] = {negative_infinity(), negative_infinity()}, weight[2] = {};
    float scale = p.scale * LOG2E;
    int turn = 0;
    while (at < end) {
        if (at + TILE > start) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (at + g + 8 * h == start) {
#pragma unroll
                    for (int s = 0; s < STEPS; ++s) key[h][s] = lds16(m.key() + (first_dim + s * 32 + t * 8) * 2);
                }
#pragma unroll
            for (int i = 0; i < 4 && !LATE; ++i)
                if (value_row(at, i) == start) value[i].load_shared(m.value() + 2 * first_dim, g);
        }
        float score[4] = {};
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            uint4 a = key[0][s], c = key[1][s];
            multiply(score, a.x, c.x, a.y, c.y, query[s].x, query[s].y);
            multiply(score, a.z, c.z, a.w, c.w, query[s].z, query[s].w);
        }
        if constexpr (LATE) {
            load_values(at);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (value_row(at, i) == start) value[i].load_shared(m.value() + 2 * first_dim, g);
            // Places change from tile to tile: the other warp may still read those of the last.
            auto place = [&](int half) { return m.sum(group, 0, (turn * 2 + half) * 128 + lane * 4); };
            sts16(place(half), make_uint4(__float_as_uint(score[0]), __float_as_uint(score[1]), __float_as_uint(score[2]), __float_as_uint(score[3])));
            sync_pair(group);
            float other[4];
            unpack(lds16(place(half ^ 1)), other);
#pragma unroll
            for (int e = 0; e < 4; ++e) score[e] += other[e];
            turn ^= 1;
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
            for (int i = 0; i < DIMS / 16; ++i) sums[i][c] *= keep, sums[i][c + 2] *= keep;
        }
        u32 b0 = transpose(pack_bf16(score[0], score[1])), b1 = transpose(pack_bf16(score[2], score[3]));
#pragma unroll
        for (int i = 0; i < DIMS / 16; ++i) {
            u32 v0 = value[0].words[i], v1 = value[1].words[i], v2 = value[2].words[i], v3 = value[3].words[i];
            multiply(sums[i], __byte_perm(v0, v1, 0x5410), __byte_perm(v0, v1, 0x7632), __byte_perm(v2, v3, 0x5410),
                     __byte_perm(v2, v3, 0x7632), b0, b1);
        }
        at += GROUPS * TILE;
        if (at < end) {
            load_keys(at);
            if constexpr (!LATE) load_values(at);
        }
    }

    // The groups of this block: scaled to a common largest score.
    if constexpr (HALVES == 2) sync_pair(group);
#pragma unroll
    for (int c = 0; c < 2; ++c) weight[c] = over_rows_sum(weight[c]);
#pragma unroll
    for (int i = 0; i < DIMS / 16; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c)
            sts8(m.sum(group, 2 * t + c, first_dim + Value<DIMS>::dimension(i, g)), sums[i][c], sums[i][c + 2]);
    if (g == 0 && half == 0) {
#pragma unroll
        for (int c = 0; c < 2; ++c) sts(m.top(group, 2 * t + c), top[c]), sts(m.weight(group, 2 * t + c), weight[c]);
    }
    sync();
    int groups = min(GROUPS, (end - begin + TILE - 1) / TILE);  // those that had keys
    long long head = ((long long)b * head_blocks + head_block) * COLUMNS;
#pragma unroll 1
    for (int i = threadIdx.x; i < count * D; i += THREADS) {
        int column = i / D, e = i % D;
        float most = negative_infinity(), sum = 0.0f, all = 0.0f;
#pragma unroll 1
        for (int w = 0; w < groups; ++w) most = fmaxf(most, lds(m.top(w, column)));
#pragma unroll 1
        for (int w = 0; w < groups; ++w) {
            float share = exp2_fast(lds(m.top(w, column)) - most);
            sum = fmaf(share, lds(m.sum(w, column, e)), sum);
            all = fmaf(share, lds(m.weight(w, column)), all);
        }
        if (active == 1) {
            out[i] = from_float<bf16>(sum / all);
            continue;
        }
        float* to = p.partial + ((head + column) * splits + split) * (D + 2);
        to[e] = sum;
        if (e == 0) to[D] = most, to[D + 1] = all;
    }
    if (active == 1) return;

    __threadfence();
    sync();
    u32* counter = finished + b * head_blocks + head_block;
    if (threadIdx.x == 0) sts(m.is_last(), atomicAdd(counter, 1u) == (u32)active - 1 ? 1.0f : 0.0f);
    sync();
    if (lds(m.is_last()) == 0.0f) return;
    __threadfence();
    if (threadIdx.x == 0) *counter = 0;
    // share(s, column): the factor of span s.
    for (int column = warp; column < count; column += GROUPS * HALVES) {
        const float* from = p.partial + ((head + column) * splits + min(lane, active - 1)) * (D + 2);
        float mine = lane < active ? load_fresh(from + D) : negative_infinity();
        float share = exp2_fast(mine - warp_max(mine));
        float all = warp_sum(lane < active ? share * load_fresh(from + D + 1) : 0.0f);
        if (lane < active) sts(m.share(lane, column), share);
        if (lane == 0) sts(m.total(column), all);
    }
    sync();
    for (int i = threadIdx.x; i < count * D; i += THREADS) {
        int column = i / D, e = i % D;
        const float* from = p.partial + (head + column) * splits * (D + 2) + e;
        float sum = 0.0f;
#pragma unroll 4
        for (int s = 0; s < active; ++s) sum = fmaf(lds(m.share(s, column)), load_fresh(from + s * (D + 2)), sum);
        out[i] = from_float<bf16>(sum / lds(m.total(column)));
    }
}

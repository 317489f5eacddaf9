// Causal attention for training, forward and backward, bf16 with float32 accumulation: the portable
// path (sm_80 and newer; mma.sync, ldmatrix, cp.async). `attention_sm90.cu` holds the Hopper path.
//
// The algorithms are FlashAttention-2's (Dao 2023, arXiv 2307.08691): an online softmax forward, and
// a backward that recomputes the probabilities from the saved log-sum-exp. The backward is split
// into a dK/dV kernel (one block per key tile, looping over queries) and a dQ kernel (one block per
// query tile, looping over keys): two products more than the one-pass form, but no atomics, no float32
// dQ buffer, and bitwise equal results from run to run.
//
// Shapes. A batch holds B rows of T tokens; H query heads, K key/value heads (H a multiple of K), head size D.
//   qkv, d_qkv   bf16 (B*T, (H + 2*K)*D): in each row H query heads, K key heads, K value heads
//   out, d_out   bf16 (B*T, H*D)
//   lse          f32  (B*T, H): natural logarithm of the sum of exp(scale * q.k) over the visible keys
//   doc_start    i32  (B*T): index, within its row of the batch, of the first token of the token's document;
//                never decreasing along a row, at most the token's own index
//   stats        f32  (B, H, 2, Tpad), Tpad = 128*ceil(T/128), scratch of the backward: lse*log2(e), then
//                delta = rowsum(out*d_out); written by `attention_bwd_stats_dD` and read by the other two
// Query t sees keys j with max(doc_start[t], t - window + 1) <= j <= t; window >= T means no window.
// `scale` is 1/sqrt(D) by convention. All pointers must be 16-byte aligned.
//
// Launches, for D = 64, 96, 128 (the suffix _dD); dynamic shared memory must be allowed with
// CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
//   attention_fwd_dD(qkv, doc_start, out, lse, B, T, H, K, window, scale)
//       grid (B*H, ceil(T/128), 1), block 128, shared 768*D bytes
//   attention_cached_fwd_dD(qkv, start, k_cache, v_cache, out, B, T, H, K, window, scale, capacity)
//       the same grid; T new tokens of each row of the batch at position start[b] of caches (B, capacity, K*D),
//       which hold their keys and values already
//   attention_bwd_stats_dD(out, d_out, lse, stats, B, T, H)
//       grid (ceil(B*Tpad*H/32), 1, 1), block 256, shared 0
//   attention_bwd_dkdv_dD(qkv, d_out, stats, doc_start, d_qkv, B, T, H, K, window, scale)
//       grid (B*K, ceil(T/64), 1), block 128, shared 768*D + 1024 bytes; writes the k and v parts of d_qkv
//   attention_bwd_dq_dD(qkv, d_out, stats, doc_start, d_qkv, B, T, H, K, window, scale)
//       grid (B*H, ceil(T/64), 1), block 128, shared 768*D bytes; writes the q part of d_qkv
// B, T, H, K and window are int, scale is float. Block rows in y are visited longest first.

typedef unsigned short u16;
typedef unsigned int u32;

namespace {

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr int THREADS = 128;

__device__ __forceinline__ float neg_inf() { return __int_as_float(0xff800000); }

__device__ __forceinline__ u32 pack_bf16(float lo, float hi) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
__device__ __forceinline__ float bf16_lo(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float bf16_hi(u32 v) { return __uint_as_float(v & 0xffff0000u); }

__device__ __forceinline__ float exp2_fast(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

__device__ __forceinline__ void cp_async16(u32 dst, const void* src, bool valid) {
    int bytes = valid ? 16 : 0;  // bytes beyond the source size are written as zeros
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}
__device__ __forceinline__ void ldmatrix_t(u32 (&r)[4], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}

__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Byte offset of 16-byte chunk `chunk` of row `row` in a tile of D-wide bf16 rows. The exclusive or spreads
// eight consecutive rows over all 32 banks, for rows of 128 and 256 bytes (D = 64, 128) and of 192 (D = 96).
template <int D>
__device__ __forceinline__ u32 tile_offset(int row, int chunk) {
    return row * (D * 2) + ((D == 96 ? chunk ^ ((row >> 1) & 3) : chunk ^ (row & 7)) << 4);
}

// Copies rows [row0, row0 + ROWS) of a (T, stride) matrix into a tile; rows at or past T become zeros.
template <int D, int ROWS>
__device__ __forceinline__ void load_tile(u32 dst, const u16* src, int row0, int T, size_t stride) {
    constexpr int CHUNKS = D / 8;
#pragma unroll
    for (int i = 0; i < ROWS * CHUNKS / THREADS; ++i) {
        int idx = i * THREADS + threadIdx.x;
        int r = idx / CHUNKS, c = idx % CHUNKS;
        bool valid = row0 + r < T;
        const u16* p = src + (valid ? (size_t)(row0 + r) * stride + c * 8 : 0);
        cp_async16(dst + tile_offset<D>(r, c), p, valid);
    }
}

// The three fragment addresses of a tile at `base`, for this lane.
// A operand, rows [row, row+16), columns [16k, 16k+16).
template <int D>
__device__ __forceinline__ u32 frag_a(u32 base, int row, int k) {
    int lane = threadIdx.x & 31;
    return base + tile_offset<D>(row + (lane & 15), 2 * k + (lane >> 4));
}
// B operand of a product with the tile's rows as output columns: rows [row, row+16), inner columns [16k, 16k+16).
template <int D>
__device__ __forceinline__ u32 frag_b(u32 base, int row, int k) {
    int lane = threadIdx.x & 31;
    return base + tile_offset<D>(row + (lane & 7) + ((lane >> 4) << 3), 2 * k + ((lane >> 3) & 1));
}
// B operand of a product with the tile's rows as the inner dimension (read transposed): inner rows
// [row, row+16), output columns [16n, 16n+16).
template <int D>
__device__ __forceinline__ u32 frag_bt(u32 base, int row, int n) {
    int lane = threadIdx.x & 31;
    return base + tile_offset<D>(row + (lane & 15), 2 * n + (lane >> 4));
}

// First visible key of query t of a row whose document starts are `doc`; at most t, so no row is ever empty.
__device__ __forceinline__ int first_key(const int* doc, int t, int window) {
    return min(max(max(doc[t], t - window + 1), 0), t);
}

// Where keys and values come from when they are not beside the queries.
struct Cache {
    const u16 *k, *v;
    const int* start;
    int capacity;
};

template <int D, bool CACHED>
__device__ __forceinline__ void forward(const u16* __restrict__ qkv, const int* __restrict__ doc_start,
                                        u16* __restrict__ out, float* __restrict__ lse, int T, int H, int K,
                                        int window, float scale, Cache cache) {
    constexpr int BM = 128, BN = 64, MT = 2, NT = BN / 8, DT = D / 8;
    extern __shared__ __align__(128) unsigned char smem[];
    u32 sQ = (u32)__cvta_generic_to_shared(smem);
    u32 sKV = sQ + BM * D * 2;  // two stages of {K, V}
    constexpr int TILE = BN * D * 2;

    int b = blockIdx.x / H, h = blockIdx.x % H, kv = h / (H / K);
    int m0 = (gridDim.y - 1 - blockIdx.y) * BM;
    size_t stride = (size_t)(H + 2 * K) * D;
    const u16* row = qkv + (size_t)b * T * stride;
    const u16 *q = row + h * D, *k = row + (H + kv) * D, *v = row + (H + K + kv) * D;
    const int* doc = CACHED ? nullptr : doc_start + (size_t)b * T;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    // Query t stands at position offset + t of `keys` keys.
    int offset = 0, keys = T;
    size_t kv_stride = stride;
    if constexpr (CACHED) {
        offset = max(cache.start[b], 0);
        keys = min(offset + T, cache.capacity);
        kv_stride = (size_t)K * D;
        k = cache.k + (size_t)b * cache.capacity * kv_stride + kv * D;
        v = cache.v + (size_t)b * cache.capacity * kv_stride + kv * D;
    }
    auto first = [&](int t) {
        if constexpr (CACHED) return max(offset + t - window + 1, 0);
        else return first_key(doc, t, window);
    };

    int m_last = min(m0 + BM, T) - 1;
    int n_begin = first(m0) / BN, n_end = min(offset + m_last, keys - 1) / BN;
    int lo_max = first(m_last);
    int lo[MT][2];
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int r = 0; r < 2; ++r) lo[mt][r] = first(min(m0 + warp * 32 + mt * 16 + r * 8 + lane / 4, T - 1));

    load_tile<D, BM>(sQ, q, m0, T, stride);
    load_tile<D, BN>(sKV, k, n_end * BN, keys, kv_stride);
    load_tile<D, BN>(sKV + TILE, v, n_end * BN, keys, kv_stride);
    cp_async_commit();

    float o[MT][DT][4], mx[MT][2], sum[MT][2];
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
        for (int i = 0; i < DT; ++i) o[mt][i][0] = o[mt][i][1] = o[mt][i][2] = o[mt][i][3] = 0.f;
        mx[mt][0] = mx[mt][1] = neg_inf();
        sum[mt][0] = sum[mt][1] = 0.f;
    }
    float scale_log2 = scale * LOG2E;

    int stage = 0;
    for (int n = n_end; n >= n_begin; --n, stage ^= 1) {
        if (n > n_begin) {
            u32 next = sKV + (stage ^ 1) * 2 * TILE;
            load_tile<D, BN>(next, k, (n - 1) * BN, keys, kv_stride);
            load_tile<D, BN>(next + TILE, v, (n - 1) * BN, keys, kv_stride);
            cp_async_commit();
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads();
        u32 sK = sKV + stage * 2 * TILE, sV = sK + TILE;

        float s[MT][NT][4];
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int i = 0; i < NT; ++i) s[mt][i][0] = s[mt][i][1] = s[mt][i][2] = s[mt][i][3] = 0.f;
#pragma unroll
        for (int kk = 0; kk < D / 16; ++kk) {
            u32 a[MT][4];
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) ldmatrix(a[mt], frag_a<D>(sQ, warp * 32 + mt * 16, kk));
#pragma unroll
            for (int np = 0; np < NT / 2; ++np) {
                u32 bb[4];
                ldmatrix(bb, frag_b<D>(sK, np * 16, kk));
#pragma unroll
                for (int mt = 0; mt < MT; ++mt) {
                    mma(s[mt][2 * np], a[mt], bb[0], bb[1]);
                    mma(s[mt][2 * np + 1], a[mt], bb[2], bb[3]);
                }
            }
        }
        int n0 = n * BN;
        if (n0 + BN - 1 > min(offset + m0, keys - 1) || n0 < lo_max) {
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int i = 0; i < NT; ++i)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        int t = min(offset + m0 + warp * 32 + mt * 16 + (e >> 1) * 8 + lane / 4, keys - 1);
                        int j = n0 + i * 8 + (lane & 3) * 2 + (e & 1);
                        if (j > t || j < lo[mt][e >> 1]) s[mt][i][e] = neg_inf();
                    }
        }
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float m = mx[mt][r];
#pragma unroll
                for (int i = 0; i < NT; ++i) m = fmaxf(m, fmaxf(s[mt][i][2 * r], s[mt][i][2 * r + 1]));
                m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
                m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
                float base = m == neg_inf() ? 0.f : m * scale_log2;  // no key seen yet: keep exp2 away from inf - inf
                float alpha = exp2_fast(mx[mt][r] * scale_log2 - base);
                mx[mt][r] = m;
                float part = 0.f;
#pragma unroll
                for (int i = 0; i < NT; ++i)
#pragma unroll
                    for (int e = 2 * r; e < 2 * r + 2; ++e) {
                        s[mt][i][e] = exp2_fast(fmaf(s[mt][i][e], scale_log2, -base));
                        part += s[mt][i][e];
                    }
                sum[mt][r] = sum[mt][r] * alpha + part;
#pragma unroll
                for (int i = 0; i < DT; ++i) {
                    o[mt][i][2 * r] *= alpha;
                    o[mt][i][2 * r + 1] *= alpha;
                }
            }
#pragma unroll
        for (int kk = 0; kk < BN / 16; ++kk) {
            u32 a[MT][4];
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float* c = s[mt][2 * kk + (e >> 1)];
                    a[mt][e] = pack_bf16(c[2 * (e & 1)], c[2 * (e & 1) + 1]);
                }
#pragma unroll
            for (int np = 0; np < DT / 2; ++np) {
                u32 bb[4];
                ldmatrix_t(bb, frag_bt<D>(sV, kk * 16, np));
#pragma unroll
                for (int mt = 0; mt < MT; ++mt) {
                    mma(o[mt][2 * np], a[mt], bb[0], bb[1]);
                    mma(o[mt][2 * np + 1], a[mt], bb[2], bb[3]);
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float l = sum[mt][r];
            l += __shfl_xor_sync(~0u, l, 1);
            l += __shfl_xor_sync(~0u, l, 2);
            int t = m0 + warp * 32 + mt * 16 + r * 8 + lane / 4;
            if (t >= T) continue;
            float inv = l > 0.f ? 1.f / l : 0.f;
            size_t token = (size_t)b * T + t;
            u16* dst = out + token * H * D + h * D + (lane & 3) * 2;
#pragma unroll
            for (int i = 0; i < DT; ++i)
                *(u32*)(dst + i * 8) = pack_bf16(o[mt][i][2 * r] * inv, o[mt][i][2 * r + 1] * inv);
            if (!CACHED && (lane & 3) == 0) lse[token * H + h] = mx[mt][r] * scale + __log2f(l) * LN2;
        }
}

template <int D>
__device__ __forceinline__ void backward_stats(const u16* __restrict__ out, const u16* __restrict__ d_out,
                                               const float* __restrict__ lse, float* __restrict__ stats, int B,
                                               int T, int H) {
    int Tpad = (T + 127) / 128 * 128;
    size_t id = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 8;  // eight lanes per (token, head)
    int part = threadIdx.x & 7;
    if (id >= (size_t)B * Tpad * H) return;  // whole groups of eight leave together
    int h = id % H, t = id / H % Tpad, b = id / H / Tpad;
    size_t token = (size_t)b * T + t;
    float acc = 0.f;
    if (t < T) {
        const uint4* po = (const uint4*)(out + (token * H + h) * D);
        const uint4* pd = (const uint4*)(d_out + (token * H + h) * D);
#pragma unroll
        for (int c = part; c < D / 8; c += 8) {
            uint4 x = po[c], y = pd[c];
            acc += bf16_lo(x.x) * bf16_lo(y.x) + bf16_hi(x.x) * bf16_hi(y.x);
            acc += bf16_lo(x.y) * bf16_lo(y.y) + bf16_hi(x.y) * bf16_hi(y.y);
            acc += bf16_lo(x.z) * bf16_lo(y.z) + bf16_hi(x.z) * bf16_hi(y.z);
            acc += bf16_lo(x.w) * bf16_lo(y.w) + bf16_hi(x.w) * bf16_hi(y.w);
        }
    }
    u32 group = 0xffu << (threadIdx.x & 24);
    acc += __shfl_xor_sync(group, acc, 1);
    acc += __shfl_xor_sync(group, acc, 2);
    acc += __shfl_xor_sync(group, acc, 4);
    if (part == 0) {
        float* row = stats + ((size_t)b * H + h) * 2 * Tpad + t;
        row[0] = t < T ? lse[token * H + h] * LOG2E : -neg_inf();  // infinity: a padding row's probabilities are zero
        row[Tpad] = acc;
    }
}

// Writes a warp's 16 x D accumulator, scaled, to rows t0 + lane/4 (+8) of a bf16 matrix.
template <int D>
__device__ __forceinline__ void store_rows(u16* dst, const float (&c)[D / 8][4], int t0, int T, size_t stride,
                                           float scale) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        int t = t0 + r * 8 + lane / 4;
        if (t >= T) continue;
        u16* p = dst + (size_t)t * stride + (lane & 3) * 2;
#pragma unroll
        for (int i = 0; i < D / 8; ++i) *(u32*)(p + i * 8) = pack_bf16(c[i][2 * r] * scale, c[i][2 * r + 1] * scale);
    }
}

// Each warp owns 16 keys and works on transposed tiles (keys x queries), so that the probabilities and their
// gradients are already in the A-operand layout of the two products that follow.
template <int D>
__device__ __forceinline__ void backward_dkdv(const u16* __restrict__ qkv, const u16* __restrict__ d_out,
                                              const float* __restrict__ stats, const int* __restrict__ doc_start,
                                              u16* __restrict__ d_qkv, int T, int H, int K, int window, float scale) {
    constexpr int BM = 64, BN = 64, MT = BM / 8, DT = D / 8, TILE = 64 * D * 2;
    extern __shared__ __align__(128) unsigned char smem[];
    u32 sK = (u32)__cvta_generic_to_shared(smem), sV = sK + TILE, sQO = sV + TILE;  // two stages of {Q, dO}
    u32 sStats = sQO + 4 * TILE;
    const float2* stats_tile = (const float2*)(smem + 6 * TILE);

    int b = blockIdx.x / K, kv = blockIdx.x % K, group = H / K, n0 = blockIdx.y * BN;
    int Tpad = (T + 127) / 128 * 128;
    size_t stride = (size_t)(H + 2 * K) * D, o_stride = (size_t)H * D;
    const u16* row = qkv + (size_t)b * T * stride;
    const u16* d_o = d_out + (size_t)b * T * o_stride;
    const int* doc = doc_start + (size_t)b * T;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

    // Query tiles that see a key of this tile: a prefix of those from the diagonal on, as first_key never decreases.
    int m_tiles = (T + BM - 1) / BM, m_begin = n0 / BM, count = 0;
    for (int m = m_begin; m < m_tiles; m += THREADS) {
        int mine = m + threadIdx.x;
        count += __syncthreads_count(mine < m_tiles && first_key(doc, mine * BM, window) < n0 + BN);
    }
    int total = count * group;

    load_tile<D, BN>(sK, row + (H + kv) * D, n0, T, stride);
    load_tile<D, BN>(sV, row + (H + K + kv) * D, n0, T, stride);
    auto load_stage = [&](int i, int stage) {
        int h = kv * group + i / count, m0 = (m_begin + i % count) * BM;
        load_tile<D, BM>(sQO + stage * 2 * TILE, row + h * D, m0, T, stride);
        load_tile<D, BM>(sQO + stage * 2 * TILE + TILE, d_o + h * D, m0, T, o_stride);
        if (threadIdx.x < BM / 2)
            cp_async16(sStats + stage * BM * 8 + threadIdx.x * 16,
                       stats + (((size_t)b * H + h) * 2 + threadIdx.x / (BM / 4)) * Tpad + m0 +
                           threadIdx.x % (BM / 4) * 4, true);
        cp_async_commit();
    };
    load_stage(0, 0);

    float dk[DT][4], dv[DT][4];
#pragma unroll
    for (int i = 0; i < DT; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) dk[i][e] = dv[i][e] = 0.f;
    float scale_log2 = scale * LOG2E;

    for (int i = 0; i < total; ++i) {
        int stage = i & 1;
        if (i + 1 < total) {
            load_stage(i + 1, stage ^ 1);
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads();
        u32 sQ = sQO + stage * 2 * TILE, sO = sQ + TILE;
        int m0 = (m_begin + i % count) * BM;

        float s[MT][4], dp[MT][4];
#pragma unroll
        for (int j = 0; j < MT; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[j][e] = dp[j][e] = 0.f;
#pragma unroll
        for (int kk = 0; kk < D / 16; ++kk) {
            u32 ak[4], av[4];
            ldmatrix(ak, frag_a<D>(sK, warp * 16, kk));
            ldmatrix(av, frag_a<D>(sV, warp * 16, kk));
#pragma unroll
            for (int mp = 0; mp < MT / 2; ++mp) {
                u32 bb[4];
                ldmatrix(bb, frag_b<D>(sQ, mp * 16, kk));
                mma(s[2 * mp], ak, bb[0], bb[1]);
                mma(s[2 * mp + 1], ak, bb[2], bb[3]);
                ldmatrix(bb, frag_b<D>(sO, mp * 16, kk));
                mma(dp[2 * mp], av, bb[0], bb[1]);
                mma(dp[2 * mp + 1], av, bb[2], bb[3]);
            }
        }
        if (m0 < n0 + BN || first_key(doc, min(m0 + BM, T) - 1, window) > n0) {
#pragma unroll
            for (int j = 0; j < MT; ++j)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    int t = m0 + j * 8 + (lane & 3) * 2 + c;
                    int lo = first_key(doc, min(t, T - 1), window);
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        int key = n0 + warp * 16 + r * 8 + lane / 4;
                        if (key > t || key < lo) s[j][2 * r + c] = neg_inf();
                    }
                }
        }
#pragma unroll
        for (int j = 0; j < MT; ++j) {
            const float2* st = stats_tile + stage * BM + j * 4 + (lane & 3);
            float2 lse2 = st[0], delta = st[BM / 2];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                s[j][e] = exp2_fast(fmaf(s[j][e], scale_log2, -(e & 1 ? lse2.y : lse2.x)));
                dp[j][e] = s[j][e] * (dp[j][e] - (e & 1 ? delta.y : delta.x));
            }
        }
#pragma unroll
        for (int kk = 0; kk < BM / 16; ++kk) {
            u32 ap[4], ad[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                int j = 2 * kk + (e >> 1), c = 2 * (e & 1);
                ap[e] = pack_bf16(s[j][c], s[j][c + 1]);
                ad[e] = pack_bf16(dp[j][c], dp[j][c + 1]);
            }
#pragma unroll
            for (int np = 0; np < DT / 2; ++np) {
                u32 bb[4];
                ldmatrix_t(bb, frag_bt<D>(sO, kk * 16, np));
                mma(dv[2 * np], ap, bb[0], bb[1]);
                mma(dv[2 * np + 1], ap, bb[2], bb[3]);
                ldmatrix_t(bb, frag_bt<D>(sQ, kk * 16, np));
                mma(dk[2 * np], ad, bb[0], bb[1]);
                mma(dk[2 * np + 1], ad, bb[2], bb[3]);
            }
        }
        __syncthreads();
    }
    u16* d_row = d_qkv + (size_t)b * T * stride;
    store_rows<D>(d_row + (H + kv) * D, dk, n0 + warp * 16, T, stride, scale);
    store_rows<D>(d_row + (H + K + kv) * D, dv, n0 + warp * 16, T, stride, 1.f);
}

template <int D>
__device__ __forceinline__ void backward_dq(const u16* __restrict__ qkv, const u16* __restrict__ d_out,
                                            const float* __restrict__ stats, const int* __restrict__ doc_start,
                                            u16* __restrict__ d_qkv, int T, int H, int K, int window, float scale) {
    constexpr int BM = 64, BN = 64, NT = BN / 8, DT = D / 8, TILE = 64 * D * 2;
    extern __shared__ __align__(128) unsigned char smem[];
    u32 sQ = (u32)__cvta_generic_to_shared(smem), sO = sQ + TILE, sKV = sO + TILE;  // two stages of {K, V}

    int b = blockIdx.x / H, h = blockIdx.x % H, kv = h / (H / K);
    int m0 = (gridDim.y - 1 - blockIdx.y) * BM;
    int Tpad = (T + 127) / 128 * 128;
    size_t stride = (size_t)(H + 2 * K) * D, o_stride = (size_t)H * D;
    const u16* row = qkv + (size_t)b * T * stride;
    const u16 *k = row + (H + kv) * D, *v = row + (H + K + kv) * D;
    const int* doc = doc_start + (size_t)b * T;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

    int m_last = min(m0 + BM, T) - 1;
    int n_begin = first_key(doc, m0, window) / BN, n_end = m_last / BN;
    int lo_max = first_key(doc, m_last, window);
    int lo[2];
    float2 st[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        int t = m0 + warp * 16 + r * 8 + lane / 4;
        lo[r] = first_key(doc, min(t, T - 1), window);
        const float* row_stats = stats + ((size_t)b * H + h) * 2 * Tpad + t;
        st[r] = make_float2(row_stats[0], row_stats[Tpad]);
    }
    load_tile<D, BM>(sQ, row + h * D, m0, T, stride);
    load_tile<D, BM>(sO, d_out + (size_t)b * T * o_stride + h * D, m0, T, o_stride);
    load_tile<D, BN>(sKV, k, n_end * BN, T, stride);
    load_tile<D, BN>(sKV + TILE, v, n_end * BN, T, stride);
    cp_async_commit();

    float dq[DT][4];
#pragma unroll
    for (int i = 0; i < DT; ++i) dq[i][0] = dq[i][1] = dq[i][2] = dq[i][3] = 0.f;
    float scale_log2 = scale * LOG2E;

    int stage = 0;
    for (int n = n_end; n >= n_begin; --n, stage ^= 1) {
        if (n > n_begin) {
            u32 next = sKV + (stage ^ 1) * 2 * TILE;
            load_tile<D, BN>(next, k, (n - 1) * BN, T, stride);
            load_tile<D, BN>(next + TILE, v, (n - 1) * BN, T, stride);
            cp_async_commit();
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads();
        u32 sK = sKV + stage * 2 * TILE, sV = sK + TILE;

        float s[NT][4], dp[NT][4];
#pragma unroll
        for (int j = 0; j < NT; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[j][e] = dp[j][e] = 0.f;
#pragma unroll
        for (int kk = 0; kk < D / 16; ++kk) {
            u32 aq[4], ao[4];
            ldmatrix(aq, frag_a<D>(sQ, warp * 16, kk));
            ldmatrix(ao, frag_a<D>(sO, warp * 16, kk));
#pragma unroll
            for (int np = 0; np < NT / 2; ++np) {
                u32 bb[4];
                ldmatrix(bb, frag_b<D>(sK, np * 16, kk));
                mma(s[2 * np], aq, bb[0], bb[1]);
                mma(s[2 * np + 1], aq, bb[2], bb[3]);
                ldmatrix(bb, frag_b<D>(sV, np * 16, kk));
                mma(dp[2 * np], ao, bb[0], bb[1]);
                mma(dp[2 * np + 1], ao, bb[2], bb[3]);
            }
        }
        int n0 = n * BN;
        if (n0 + BN - 1 > m0 || n0 < lo_max) {
#pragma unroll
            for (int j = 0; j < NT; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    int t = m0 + warp * 16 + (e >> 1) * 8 + lane / 4, key = n0 + j * 8 + (lane & 3) * 2 + (e & 1);
                    if (key > t || key < lo[e >> 1]) s[j][e] = neg_inf();
                }
        }
#pragma unroll
        for (int j = 0; j < NT; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                dp[j][e] = exp2_fast(fmaf(s[j][e], scale_log2, -st[e >> 1].x)) * (dp[j][e] - st[e >> 1].y);
#pragma unroll
        for (int kk = 0; kk < BN / 16; ++kk) {
            u32 a[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                int j = 2 * kk + (e >> 1), c = 2 * (e & 1);
                a[e] = pack_bf16(dp[j][c], dp[j][c + 1]);
            }
#pragma unroll
            for (int np = 0; np < DT / 2; ++np) {
                u32 bb[4];
                ldmatrix_t(bb, frag_bt<D>(sK, kk * 16, np));
                mma(dq[2 * np], a, bb[0], bb[1]);
                mma(dq[2 * np + 1], a, bb[2], bb[3]);
            }
        }
        __syncthreads();
    }
    store_rows<D>(d_qkv + (size_t)b * T * stride + h * D, dq, m0 + warp * 16, T, stride, scale);
}

}  // namespace

#define ATTENTION_KERNELS(D)                                                                                       \
    extern "C" __global__ void __launch_bounds__(128)                                                              \
        attention_fwd_d##D(const u16* qkv, const int* doc_start, u16* out, float* lse, int, int T, int H, int K,   \
                           int window, float scale) {                                                              \
        forward<D, false>(qkv, doc_start, out, lse, T, H, K, window, scale, Cache{});                              \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(128)                                                              \
        attention_cached_fwd_d##D(const u16* qkv, const int* start, const u16* k_cache, const u16* v_cache,        \
                                  u16* out, int, int T, int H, int K, int window, float scale, int capacity) {     \
        Cache cache{k_cache, v_cache, start, capacity};                                                            \
        forward<D, true>(qkv, nullptr, out, nullptr, T, H, K, window, scale, cache);                               \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(256)                                                              \
        attention_bwd_stats_d##D(const u16* out, const u16* d_out, const float* lse, float* stats, int B, int T,  \
                                 int H) {                                                                          \
        backward_stats<D>(out, d_out, lse, stats, B, T, H);                                                        \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(128)                                                              \
        attention_bwd_dkdv_d##D(const u16* qkv, const u16* d_out, const float* stats, const int* doc_start,       \
                                u16* d_qkv, int, int T, int H, int K, int window, float scale) {                   \
        backward_dkdv<D>(qkv, d_out, stats, doc_start, d_qkv, T, H, K, window, scale);                             \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(128)                                                              \
        attention_bwd_dq_d##D(const u16* qkv, const u16* d_out, const float* stats, const int* doc_start,         \
                              u16* d_qkv, int, int T, int H, int K, int window, float scale) {                     \
        backward_dq<D>(qkv, d_out, stats, doc_start, d_qkv, T, H, K, window, scale);                               \
    }

ATTENTION_KERNELS(64)
ATTENTION_KERNELS(96)
ATTENTION_KERNELS(128)

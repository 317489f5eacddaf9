// Causal attention for training, forward and backward, bf16 with float32 accumulation: the Hopper path
// (sm_90a only; wgmma fed by the bulk tensor copy engine through mbarrier rings).
//
// Same functions, tensors and masks as attention.cu, which documents them; `attention_bwd_stats_dD` of that
// file serves this path too. One warpgroup only issues copies; the others ("consumers") own 64 rows each of
// the output tile, hold its accumulators in registers, and overlap their exponentials with products in
// flight (FlashAttention-3, Shah et al. 2024, arXiv 2407.08608). The backward needs no shared-memory round trip:
// dK/dV work on transposed tiles, so that probabilities come out of one product in the A layout of the next.
//
// Tensor maps (cuTensorMapEncodeTiled, bf16, rank 4, box {64, 1, 64, 1}, element strides 1, no interleave,
// 128-byte swizzle, L2 promotion 256 B, out-of-bounds fill zero), passed by value as 128-byte parameters:
//   map_qkv    over qkv:   dims {D, H + 2*K, T, B}, byte strides {2*D, 2*D*(H + 2*K), 2*D*(H + 2*K)*T}
//   map_d_out  over d_out: dims {D, H, T, B},       byte strides {2*D, 2*D*H, 2*D*H*T}
//
// Launches, for D = 64, 96, 128 (the suffix _dD):
//   attention_fwd_sm90_dD(map_qkv, doc_start, out, lse, B, T, H, K, window, scale)
//       tiles = B*H*ceil(T/128), block 384, shared 83024 bytes for D = 64, 164944 for D = 96 and 128
//   attention_bwd_dkdv_sm90_dD(map_qkv, map_d_out, stats, doc_start, d_qkv, B, T, H, K, window, scale)
//       tiles = B*K*ceil(T/128), block 384, shared 101456 bytes for D = 64, 199760 for D = 96 and 128
//   attention_bwd_dq_sm90_dD(map_qkv, map_d_out, stats, doc_start, d_qkv, B, T, H, K, window, scale)
//       tiles = B*H*ceil(T/128), block 384, shared 99376 bytes for D = 64, 197712 for D = 96 and 128
// grid is (G, 1, 1) with any 1 <= G <= tiles: blocks stride over the tiles, longest first. G = tiles lets the
// hardware balance the load; G = number of multiprocessors overlaps the end of a tile with the next one's loads.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

namespace {

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr int BOX_BYTES = 64 * 128;  // one copy: 64 rows of 64 bf16

template <bool V>
struct Bool {
    static constexpr bool value = V;
};

__device__ __forceinline__ float neg_inf() { return __int_as_float(0xff800000); }

__device__ __forceinline__ u32 pack_bf16(float lo, float hi) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// ---- mbarriers and bulk copies ----

__device__ __forceinline__ void mbar_init(u32 bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void mbar_expect(u32 bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbar_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void mbar_wait(u32 bar, u32 parity) {
    asm volatile("{ .reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again; }" ::"r"(bar), "r"(parity) : "memory");
}

__device__ __forceinline__ void copy_box(u32 dst, const TensorMap* map, u32 bar, int column, int head, int t, int b) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];"
                 ::"r"(dst), "l"(map), "r"(bar), "r"(column), "r"(head), "r"(t), "r"(b) : "memory");
}
__device__ __forceinline__ void copy_bytes(u32 dst, const void* src, int bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(dst), "l"(src), "r"(bytes), "r"(bar) : "memory");
}

// A tile of ROWS rows and D columns is held as ceil(D/64) panels of ROWS x 64, each row 128 bytes, swizzled.
template <int D>
constexpr int PANELS = (D + 63) / 64;
template <int D, int ROWS>
constexpr int TILE_BYTES = PANELS<D> * ROWS * 128;

template <int D, int ROWS>
__device__ __forceinline__ void copy_tile(u32 dst, const TensorMap* map, u32 bar, int head, int t, int b) {
#pragma unroll
    for (int p = 0; p < PANELS<D>; ++p)
#pragma unroll
        for (int r = 0; r < ROWS / 64; ++r)
            copy_box(dst + p * ROWS * 128 + r * BOX_BYTES, map, bar, p * 64, head, t + r * 64, b);
}

// Position in a ring of STAGES buffers guarded by full/empty barrier pairs.
template <int STAGES>
struct Ring {
    int stage = 0;
    u32 parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

__device__ __forceinline__ void bar_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void bar_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
template <int REGISTERS>
__device__ __forceinline__ void registers_grow() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void registers_shrink() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- wgmma ----

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Keeps the compiler from moving uses of registers across this point.
template <int N>
__device__ __forceinline__ void pin(float (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
template <int N>
__device__ __forceinline__ void pin(u32 (&r)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(r[i][0]), "+r"(r[i][1]), "+r"(r[i][2]), "+r"(r[i][3])::"memory");
}

// Descriptor of a 128-byte-swizzled operand: groups of 8 rows 1024 bytes apart; `panel_bytes` between panels of 64
// columns matters only when the rows are the inner dimension (operand read transposed).
__device__ __forceinline__ u64 descriptor(u32 addr, int panel_bytes) {
    return (u64)((addr & 0x3ffff) >> 4) | (u64)(panel_bytes >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

#define ACC4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
// d (64 x N) = a b^T (+ d): both operands in shared memory, both with the inner dimension contiguous.
__device__ __forceinline__ void wgmma_ss(float (&d)[32], u64 a, u64 b, int accumulate) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
                 "}, %32, %33, p, 1, 1, 0, 0; }"
                 : ACC4(0), ACC4(4), ACC4(8), ACC4(12), ACC4(16), ACC4(20), ACC4(24), ACC4(28)
                 : "l"(a), "l"(b), "r"(accumulate));
}
__device__ __forceinline__ void wgmma_ss(float (&d)[64], u64 a, u64 b, int accumulate) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0;"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
                 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
                 "}, %64, %65, p, 1, 1, 0, 0; }"
                 : ACC4(0), ACC4(4), ACC4(8), ACC4(12), ACC4(16), ACC4(20), ACC4(24), ACC4(28),
                   ACC4(32), ACC4(36), ACC4(40), ACC4(44), ACC4(48), ACC4(52), ACC4(56), ACC4(60)
                 : "l"(a), "l"(b), "r"(accumulate));
}
// d (64 x N) += a b: a in registers, b in shared memory with its N columns contiguous.
__device__ __forceinline__ void wgmma_rs(float (&d)[32], const u32 (&a)[4], u64 b) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0;"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
                 "}, {%32,%33,%34,%35}, %36, p, 1, 1, 1; }"
                 : ACC4(0), ACC4(4), ACC4(8), ACC4(12), ACC4(16), ACC4(20), ACC4(24), ACC4(28)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_rs(float (&d)[48], const u32 (&a)[4], u64 b) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0;"
                 "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
                 "}, {%48,%49,%50,%51}, %52, p, 1, 1, 1; }"
                 : ACC4(0), ACC4(4), ACC4(8), ACC4(12), ACC4(16), ACC4(20), ACC4(24), ACC4(28),
                   ACC4(32), ACC4(36), ACC4(40), ACC4(44)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_rs(float (&d)[64], const u32 (&a)[4], u64 b) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0;"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
                 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
                 "}, {%64,%65,%66,%67}, %68, p, 1, 1, 1; }"
                 : ACC4(0), ACC4(4), ACC4(8), ACC4(12), ACC4(16), ACC4(20), ACC4(24), ACC4(28),
                   ACC4(32), ACC4(36), ACC4(40), ACC4(44), ACC4(48), ACC4(52), ACC4(56), ACC4(60)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef ACC4

// s (64 x N) = A B^T over D columns; A tile of A_ROWS rows, B tile of B_ROWS rows.
template <int D, int A_ROWS, int B_ROWS, int N>
__device__ __forceinline__ void product_nt(float (&s)[N], u64 a, u64 b) {
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
        wgmma_ss(s, a + ((k / 4 * A_ROWS * 128 + k % 4 * 32) >> 4), b + ((k / 4 * B_ROWS * 128 + k % 4 * 32) >> 4), k > 0);
}
// o (64 x N) += P B over the rows of B.
template <int N, int KSTEPS>
__device__ __forceinline__ void product_nn(float (&o)[N], const u32 (&p)[KSTEPS][4], u64 b) {
#pragma unroll
    for (int k = 0; k < KSTEPS; ++k) wgmma_rs(o, p[k], b + (k * 2048 >> 4));
}
// An accumulator of 64 x N as the A operand of a following product.
template <int N, int KSTEPS>
__device__ __forceinline__ void pack_operand(u32 (&p)[KSTEPS][4], const float (&s)[N]) {
    static_assert(KSTEPS * 8 == N, "one A fragment per 16 columns");
#pragma unroll
    for (int k = 0; k < KSTEPS; ++k)
#pragma unroll
        for (int e = 0; e < 4; ++e) p[k][e] = pack_bf16(s[k * 8 + e * 2], s[k * 8 + e * 2 + 1]);
}

// ---- shared pieces ----

// First visible key of query t of a row whose document starts are `doc`; at most t, so no row is ever empty.
__device__ __forceinline__ int first_key(const int* doc, int t, int window) {
    return min(max(max(doc[t], t - window + 1), 0), t);
}

// The i-th tile this block works on; odd rounds run backwards so that the lengths even out.
__device__ __forceinline__ int tile_of_round(int round) {
    return round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

// Sets s[..] = -inf where the column (of 64-row tile fragment) is above `hi` or below `lo`; both per row r,
// relative to the thread's first column.
template <int N>
__device__ __forceinline__ void mask_columns(float (&s)[N], const int (&lo)[2], const int (&hi)[2]) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            int c = i * 8 + (e & 1);
            if (c > hi[e >> 1] || c < lo[e >> 1]) s[i * 4 + e] = neg_inf();
        }
}

// Stores a 64 x D accumulator, scaled per row, to rows t0 + {0, 8} of a bf16 matrix.
template <int D>
__device__ __forceinline__ void store_rows(u16* dst, const float (&c)[D / 2], int t0, int T, size_t stride,
                                           float scale0, float scale1) {
    int quad = threadIdx.x & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        int t = t0 + r * 8;
        float scale = r ? scale1 : scale0;
        u16* p = dst + (size_t)t * stride + quad * 2;
        if (t < T)
#pragma unroll
            for (int i = 0; i < D / 8; ++i) *(u32*)(p + i * 8) = pack_bf16(c[i * 4 + 2 * r] * scale, c[i * 4 + 2 * r + 1] * scale);
    }
}

// ---- forward ----

#ifndef ATTN_PINGPONG
#define ATTN_PINGPONG 1
#endif

template <int D, int WARPGROUPS>
struct Forward {
    static constexpr int BM = 64 * WARPGROUPS, BN = 128, STAGES = 2;
    static constexpr int Q_BYTES = TILE_BYTES<D, BM>, KV_BYTES = TILE_BYTES<D, BN>;
    static constexpr int BARRIERS = Q_BYTES + 2 * STAGES * KV_BYTES;
    static_assert(BARRIERS + (2 + 4 * STAGES) * 8 + 1024 <= 232448, "shared memory of a block");

    // One online-softmax step over s; returns exp2(old max - new max) per row in alpha.
    static __device__ __forceinline__ void softmax(float (&s)[BN / 2], float (&mx)[2], float (&sum)[2], float (&alpha)[2],
                                                   float scale_log2) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float m = mx[r];
#pragma unroll
            for (int i = 0; i < BN / 8; ++i) m = fmaxf(m, fmaxf(s[i * 4 + 2 * r], s[i * 4 + 2 * r + 1]));
            m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
            m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
            float base = m == neg_inf() ? 0.f : m * scale_log2;  // no key seen yet: keep exp2 away from inf - inf
            alpha[r] = exp2_fast(fmaf(mx[r], scale_log2, -base));
            mx[r] = m;
            float part = 0.f;
#pragma unroll
            for (int i = 0; i < BN / 8; ++i)
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; ++e) {
                    s[i * 4 + e] = exp2_fast(fmaf(s[i * 4 + e], scale_log2, -base));
                    part += s[i * 4 + e];
                }
            sum[r] = sum[r] * alpha[r] + part;
        }
    }

    static __device__ __forceinline__ void run(const TensorMap* map, const int* __restrict__ doc_start,
                                               u16* __restrict__ out, float* __restrict__ lse, int B, int T, int H,
                                               int K, int window, float scale) {
        extern __shared__ unsigned char smem_raw[];
        u32 base = ((u32)__cvta_generic_to_shared(smem_raw) + 1023) & ~1023u;
        u32 sQ = base, sK = sQ + Q_BYTES, sV = sK + STAGES * KV_BYTES, bars = base + BARRIERS;
        u32 q_full = bars, q_empty = bars + 8, k_full = bars + 16, k_empty = k_full + STAGES * 8,
            v_full = k_empty + STAGES * 8, v_empty = v_full + STAGES * 8;
        if (threadIdx.x == 0) {
            mbar_init(q_full, 1);
            mbar_init(q_empty, 4 * WARPGROUPS);
            for (int i = 0; i < STAGES; ++i) {
                mbar_init(k_full + i * 8, 1);
                mbar_init(v_full + i * 8, 1);
                mbar_init(k_empty + i * 8, 4 * WARPGROUPS);
                mbar_init(v_empty + i * 8, 4 * WARPGROUPS);
            }
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncthreads();

        int heads = B * H, m_tiles = (T + BM - 1) / BM, tiles = heads * m_tiles;
        int wg = threadIdx.x / 128;
        if (wg == 0) {
            registers_shrink<WARPGROUPS == 3 ? 32 : 24>();
            if (threadIdx.x == 0) {
                Ring<STAGES> ring;
                u32 q_parity = 1;
                for (int round = 0; round * (int)gridDim.x < tiles; ++round) {
                    int tile = tile_of_round(round);
                    if (tile >= tiles) continue;
                    int b = tile % heads / H, h = tile % heads % H, kv = h / (H / K);
                    int m0 = (m_tiles - 1 - tile / heads) * BM;
                    const int* doc = doc_start + (size_t)b * T;
                    int n_begin = first_key(doc, m0, window) / BN, n_end = (min(m0 + BM, T) - 1) / BN;
                    mbar_wait(q_empty, q_parity);
                    q_parity ^= 1;
                    mbar_expect(q_full, Q_BYTES);
                    copy_tile<D, BM>(sQ, map, q_full, h, m0, b);
                    for (int n = n_end; n >= n_begin; --n, ring.advance()) {
                        int s = ring.stage;
                        mbar_wait(k_empty + s * 8, ring.parity ^ 1);
                        mbar_expect(k_full + s * 8, KV_BYTES);
                        copy_tile<D, BN>(sK + s * KV_BYTES, map, k_full + s * 8, H + kv, n * BN, b);
                        mbar_wait(v_empty + s * 8, ring.parity ^ 1);
                        mbar_expect(v_full + s * 8, KV_BYTES);
                        copy_tile<D, BN>(sV + s * KV_BYTES, map, v_full + s * 8, H + K + kv, n * BN, b);
                    }
                }
            }
            return;
        }
        registers_grow<WARPGROUPS == 3 ? 160 : 240>();
        --wg;
        int lane = threadIdx.x & 31, leader = lane == 0;
        float scale_log2 = scale * LOG2E;
        u64 q_desc = descriptor(sQ + wg * BOX_BYTES, BM * 128);
        u64 k_desc = descriptor(sK, BN * 128), v_desc = descriptor(sV, BN * 128);
        Ring<STAGES> ring;
        u32 q_parity = 0;
        // Consumers take turns to issue their products, so that one computes exponentials while another multiplies.
        int turn = 1 + wg, next_turn = 1 + (wg + 1) % WARPGROUPS;
        if (ATTN_PINGPONG && wg == WARPGROUPS - 1) bar_arrive(next_turn, 256);

        for (int round = 0; round * (int)gridDim.x < tiles; ++round) {
            int tile = tile_of_round(round);
            if (tile >= tiles) continue;
            int b = tile % heads / H, h = tile % heads % H;
            int m0 = (m_tiles - 1 - tile / heads) * BM;
            const int* doc = doc_start + (size_t)b * T;
            int n_begin = first_key(doc, m0, window) / BN, n_end = (min(m0 + BM, T) - 1) / BN;
            int t_first = m0 + wg * 64, t0 = t_first + (threadIdx.x / 32 & 3) * 16 + lane / 4;
            int lo_max = first_key(doc, min(t_first + 63, T - 1), window);
            int lo[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) lo[r] = first_key(doc, min(t0 + r * 8, T - 1), window) - (lane & 3) * 2;
            int hi0 = t0 - (lane & 3) * 2;

            float o[D / 2], mx[2] = {neg_inf(), neg_inf()}, sum[2] = {0.f, 0.f}, alpha[2];
            float s[BN / 2];
            u32 p[BN / 16][4];
#pragma unroll
            for (int i = 0; i < D / 2; ++i) o[i] = 0.f;
            auto mask = [&](int n) {
                int n0 = n * BN;
                if (n0 + BN - 1 > t_first || n0 < lo_max) {
                    int l[2] = {lo[0] - n0, lo[1] - n0}, u[2] = {hi0 - n0, hi0 + 8 - n0};
                    mask_columns(s, l, u);
                }
            };

            mbar_wait(q_full, q_parity);
            q_parity ^= 1;
            mbar_wait(k_full + ring.stage * 8, ring.parity);
            if (ATTN_PINGPONG) bar_sync(turn, 256);
            pin(s);
            wgmma_fence();
            product_nt<D, BM, BN>(s, q_desc, k_desc + (ring.stage * KV_BYTES >> 4));
            wgmma_commit();
            if (ATTN_PINGPONG) bar_arrive(next_turn, 256);
            wgmma_wait<0>();
            pin(s);
            if (leader) mbar_arrive(k_empty + ring.stage * 8);
            mask(n_end);
            softmax(s, mx, sum, alpha, scale_log2);
            pack_operand(p, s);

            for (int n = n_end - 1; n >= n_begin; --n) {
                Ring<STAGES> prev = ring;
                ring.advance();
                mbar_wait(k_full + ring.stage * 8, ring.parity);
                if (ATTN_PINGPONG) bar_sync(turn, 256);
                pin(s);
                pin(p);
                pin(o);
                wgmma_fence();
                product_nt<D, BM, BN>(s, q_desc, k_desc + (ring.stage * KV_BYTES >> 4));
                wgmma_commit();
                mbar_wait(v_full + prev.stage * 8, prev.parity);
                product_nn(o, p, v_desc + (prev.stage * KV_BYTES >> 4));
                wgmma_commit();
                if (ATTN_PINGPONG) bar_arrive(next_turn, 256);
                wgmma_wait<1>();
                pin(s);
                if (leader) mbar_arrive(k_empty + ring.stage * 8);
                mask(n);
                softmax(s, mx, sum, alpha, scale_log2);
                wgmma_wait<0>();
                pin(o);
                pin(p);
                if (leader) mbar_arrive(v_empty + prev.stage * 8);
#pragma unroll
                for (int i = 0; i < D / 2; ++i) o[i] *= alpha[i >> 1 & 1];
                pack_operand(p, s);
            }
            if (leader) mbar_arrive(q_empty);
            mbar_wait(v_full + ring.stage * 8, ring.parity);
            pin(p);
            pin(o);
            wgmma_fence();
            product_nn(o, p, v_desc + (ring.stage * KV_BYTES >> 4));
            wgmma_commit();
            float inv[2], log_sum[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float l = sum[r];
                l += __shfl_xor_sync(~0u, l, 1);
                l += __shfl_xor_sync(~0u, l, 2);
                inv[r] = l > 0.f ? 1.f / l : 0.f;
                log_sum[r] = mx[r] * scale + __log2f(l) * LN2;
            }
            wgmma_wait<0>();
            pin(o);
            if (leader) mbar_arrive(v_empty + ring.stage * 8);
            ring.advance();
            store_rows<D>(out + (size_t)b * T * H * D + h * D, o, t0, T, (size_t)H * D, inv[0], inv[1]);
            if ((lane & 3) == 0) {
                if (t0 < T) lse[((size_t)b * T + t0) * H + h] = log_sum[0];
                if (t0 + 8 < T) lse[((size_t)b * T + t0 + 8) * H + h] = log_sum[1];
            }
        }
    }
};

// ---- backward: dK and dV ----

template <int D, int BM, int STAGES>
struct BackwardKv {
    static constexpr int BN = 128, WARPGROUPS = 2;
    static constexpr int KV_BYTES = TILE_BYTES<D, BN>, QO_BYTES = TILE_BYTES<D, BM>, STATS_BYTES = BM * 8;
    static constexpr int STATS = 2 * KV_BYTES + 2 * STAGES * QO_BYTES;
    static constexpr int BARRIERS = STATS + STAGES * STATS_BYTES;
    static_assert(BARRIERS + (2 + 2 * STAGES) * 8 + 1024 <= 232448, "shared memory of a block");

    // Number of query tiles, from the one holding key n0 on, that see a key of [n0, n0 + BN).
    static __device__ __forceinline__ int query_tiles(const int* doc, int n0, int T, int window) {
        int first = n0 / BM, last = (T - 1) / BM;  // the last one whose first query sees a key before n0 + BN
        if (first_key(doc, last * BM, window) < n0 + BN) return last - first + 1;
        int lo = first, hi = last;
        while (hi - lo > 1) {
            int mid = (lo + hi) / 2;
            if (first_key(doc, mid * BM, window) < n0 + BN) lo = mid; else hi = mid;
        }
        return lo - first + 1;
    }
    // Last query that sees key j.
    static __device__ __forceinline__ int last_query(const int* doc, int j, int T, int window) {
        if (j >= T || first_key(doc, T - 1, window) <= j) return T - 1;
        int lo = j, hi = T - 1;
        while (hi - lo > 1) {
            int mid = (lo + hi) / 2;
            if (first_key(doc, mid, window) <= j) lo = mid; else hi = mid;
        }
        return lo;
    }

    static __device__ __forceinline__ void run(const TensorMap* map_qkv, const TensorMap* map_d_out,
                                               const float2* __restrict__ stats, const int* __restrict__ doc_start,
                                               u16* __restrict__ d_qkv, int B, int T, int H, int K, int window,
                                               float scale) {
        extern __shared__ unsigned char smem_raw[];
        u32 raw = (u32)__cvta_generic_to_shared(smem_raw), base = (raw + 1023) & ~1023u;
        u32 sK = base, sV = sK + KV_BYTES, sQ = sV + KV_BYTES, sO = sQ + STAGES * QO_BYTES, sStats = base + STATS;
        const float4* stats_tile = (const float4*)(smem_raw + (sStats - raw));
        u32 kv_full = base + BARRIERS, kv_empty = kv_full + 8, full = kv_full + 16, empty = full + STAGES * 8;
        if (threadIdx.x == 0) {
            mbar_init(kv_full, 1);
            mbar_init(kv_empty, 4 * WARPGROUPS);
            for (int i = 0; i < STAGES; ++i) {
                mbar_init(full + i * 8, 1);
                mbar_init(empty + i * 8, 4 * WARPGROUPS);
            }
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncthreads();

        int heads = B * K, group = H / K, n_tiles = (T + BN - 1) / BN, tiles = heads * n_tiles;
        int Tpad = (T + 127) / 128 * 128;
        int wg = threadIdx.x / 128;
        if (wg == 0) {
            registers_shrink<24>();
            if (threadIdx.x == 0) {
                Ring<STAGES> ring;
                u32 kv_parity = 1;
                for (int round = 0; round * (int)gridDim.x < tiles; ++round) {
                    int tile = tile_of_round(round);
                    if (tile >= tiles) continue;
                    int b = tile % heads / K, kv = tile % heads % K, n0 = tile / heads * BN;
                    int count = query_tiles(doc_start + (size_t)b * T, n0, T, window);
                    mbar_wait(kv_empty, kv_parity);
                    kv_parity ^= 1;
                    mbar_expect(kv_full, 2 * KV_BYTES);
                    copy_tile<D, BN>(sK, map_qkv, kv_full, H + kv, n0, b);
                    copy_tile<D, BN>(sV, map_qkv, kv_full, H + K + kv, n0, b);
                    for (int h = kv * group; h < (kv + 1) * group; ++h)
                        for (int i = 0; i < count; ++i, ring.advance()) {
                            int s = ring.stage, m0 = n0 + i * BM;
                            u32 bar = full + s * 8;
                            mbar_wait(empty + s * 8, ring.parity ^ 1);
                            mbar_expect(bar, 2 * QO_BYTES + STATS_BYTES);
                            copy_tile<D, BM>(sQ + s * QO_BYTES, map_qkv, bar, h, m0, b);
                            copy_tile<D, BM>(sO + s * QO_BYTES, map_d_out, bar, h, m0, b);
                            copy_bytes(sStats + s * STATS_BYTES, stats + ((size_t)b * H + h) * Tpad + m0, STATS_BYTES, bar);
                        }
                }
            }
            return;
        }
        registers_grow<240>();
        --wg;
        int lane = threadIdx.x & 31, leader = lane == 0, quad2 = (lane & 3) * 2;
        float scale_log2 = scale * LOG2E;
        u64 k_desc = descriptor(sK + wg * BOX_BYTES, BN * 128), v_desc = descriptor(sV + wg * BOX_BYTES, BN * 128);
        u64 q_desc = descriptor(sQ, BM * 128), o_desc = descriptor(sO, BM * 128);
        Ring<STAGES> ring;
        u32 kv_parity = 0;

        for (int round = 0; round * (int)gridDim.x < tiles; ++round) {
            int tile = tile_of_round(round);
            if (tile >= tiles) continue;
            int b = tile % heads / K, kv = tile % heads % K, n0 = tile / heads * BN;
            const int* doc = doc_start + (size_t)b * T;
            int count = query_tiles(doc, n0, T, window), total = count * group;
            int key_first = n0 + wg * 64, key0 = key_first + (threadIdx.x / 32 & 3) * 16 + lane / 4;
            int t_lo[2], t_hi[2], hi_min = last_query(doc, key_first, T, window);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                t_lo[r] = key0 + r * 8 - quad2;
                t_hi[r] = last_query(doc, key0 + r * 8, T, window) - quad2;
            }

            float dk[D / 2], dv[D / 2], s[BM / 2], dp[BM / 2];
            u32 p[BM / 16][4], ds[BM / 16][4];
#pragma unroll
            for (int i = 0; i < D / 2; ++i) dk[i] = dv[i] = 0.f;

            // At the top of a step S(i) is complete and nothing is in flight.
            mbar_wait(kv_full, kv_parity);
            kv_parity ^= 1;
            mbar_wait(full + ring.stage * 8, ring.parity);
            pin(s);
            pin(dp);
            wgmma_fence();
            product_nt<D, BN, BM>(s, k_desc, q_desc + (ring.stage * QO_BYTES >> 4));
            wgmma_commit();
            wgmma_wait<0>();
            pin(s);
            int m0 = n0, m_end = n0 + count * BM;
            auto step = [&](auto last) {
                int stage = ring.stage;
                pin(dp);
                wgmma_fence();
                product_nt<D, BN, BM>(dp, v_desc, o_desc + (stage * QO_BYTES >> 4));
                wgmma_commit();
                if (m0 < key_first + 64 || m0 + BM - 1 > hi_min) {
                    int l[2] = {t_lo[0] - m0, t_lo[1] - m0}, u[2] = {t_hi[0] - m0, t_hi[1] - m0};
                    mask_columns(s, l, u);
                }
                const float4* st = stats_tile + stage * (STATS_BYTES / 16) + (lane & 3);
#pragma unroll
                for (int i = 0; i < BM / 8; ++i) {
                    float4 v = st[i * 4];
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        s[i * 4 + e] = exp2_fast(fmaf(s[i * 4 + e], scale_log2, -(e & 1 ? v.z : v.x)));
                }
                pack_operand(p, s);
                wgmma_wait<0>();
                pin(p);
                pin(dv);
                wgmma_fence();
                product_nn(dv, p, o_desc + (stage * QO_BYTES >> 4));
                wgmma_commit();
                pin(dp);
                pin(ds);
                pin(dk);
#pragma unroll
                for (int i = 0; i < BM / 8; ++i) {
                    float4 v = st[i * 4];
#pragma unroll
                    for (int e = 0; e < 4; ++e) dp[i * 4 + e] = s[i * 4 + e] * (dp[i * 4 + e] - (e & 1 ? v.w : v.y));
                }
                pack_operand(ds, dp);
                ring.advance();
                if constexpr (!decltype(last)::value) {
                    mbar_wait(full + ring.stage * 8, ring.parity);
                    pin(s);
                    pin(ds);
                    wgmma_fence();
                    product_nt<D, BN, BM>(s, k_desc, q_desc + (ring.stage * QO_BYTES >> 4));
                    wgmma_commit();
                    product_nn(dk, ds, q_desc + (stage * QO_BYTES >> 4));
                    wgmma_commit();
                    wgmma_wait<0>();
                    pin(s);
                    pin(p);
                    pin(dk);
                    if (leader) mbar_arrive(empty + stage * 8);
                    pin(dv);
                    m0 += BM;
                    if (m0 == m_end) m0 = n0;
                } else {
                    pin(ds);
                    wgmma_fence();
                    product_nn(dk, ds, q_desc + (stage * QO_BYTES >> 4));
                    wgmma_commit();
                    wgmma_wait<0>();
                    pin(dk);
                    pin(dv);
                    if (leader) mbar_arrive(empty + stage * 8);
                }
            };
            for (int i = 1; i < total; ++i) step(Bool<false>());
            step(Bool<true>());
            if (leader) mbar_arrive(kv_empty);
            size_t stride = (size_t)(H + 2 * K) * D;
            u16* d_row = d_qkv + (size_t)b * T * stride;
            store_rows<D>(d_row + (H + kv) * D, dk, key0, T, stride, scale, scale);
            store_rows<D>(d_row + (H + K + kv) * D, dv, key0, T, stride, 1.f, 1.f);
        }
    }
};

// ---- backward: dQ ----

template <int D, int BN, int STAGES>
struct BackwardQ {
    static constexpr int WARPGROUPS = 2, BM = 64 * WARPGROUPS;
    static constexpr int Q_BYTES = TILE_BYTES<D, BM>, KV_BYTES = TILE_BYTES<D, BN>;
    static constexpr int BARRIERS = 2 * Q_BYTES + 2 * STAGES * KV_BYTES;
    static_assert(BARRIERS + (2 + 2 * STAGES) * 8 + 1024 <= 232448, "shared memory of a block");

    static __device__ __forceinline__ void run(const TensorMap* map_qkv, const TensorMap* map_d_out,
                                               const float2* __restrict__ stats, const int* __restrict__ doc_start,
                                               u16* __restrict__ d_qkv, int B, int T, int H, int K, int window,
                                               float scale) {
        extern __shared__ unsigned char smem_raw[];
        u32 base = ((u32)__cvta_generic_to_shared(smem_raw) + 1023) & ~1023u;
        u32 sQ = base, sO = sQ + Q_BYTES, sK = sO + Q_BYTES, sV = sK + STAGES * KV_BYTES;
        u32 q_full = base + BARRIERS, q_empty = q_full + 8, full = q_full + 16, empty = full + STAGES * 8;
        if (threadIdx.x == 0) {
            mbar_init(q_full, 1);
            mbar_init(q_empty, 4 * WARPGROUPS);
            for (int i = 0; i < STAGES; ++i) {
                mbar_init(full + i * 8, 1);
                mbar_init(empty + i * 8, 4 * WARPGROUPS);
            }
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncthreads();

        int heads = B * H, m_tiles = (T + BM - 1) / BM, tiles = heads * m_tiles;
        int Tpad = (T + 127) / 128 * 128;
        int wg = threadIdx.x / 128;
        if (wg == 0) {
            registers_shrink<24>();
            if (threadIdx.x == 0) {
                Ring<STAGES> ring;
                u32 q_parity = 1;
                for (int round = 0; round * (int)gridDim.x < tiles; ++round) {
                    int tile = tile_of_round(round);
                    if (tile >= tiles) continue;
                    int b = tile % heads / H, h = tile % heads % H, kv = h / (H / K);
                    int m0 = (m_tiles - 1 - tile / heads) * BM;
                    const int* doc = doc_start + (size_t)b * T;
                    int n_begin = first_key(doc, m0, window) / BN, n_end = (min(m0 + BM, T) - 1) / BN;
                    mbar_wait(q_empty, q_parity);
                    q_parity ^= 1;
                    mbar_expect(q_full, 2 * Q_BYTES);
                    copy_tile<D, BM>(sQ, map_qkv, q_full, h, m0, b);
                    copy_tile<D, BM>(sO, map_d_out, q_full, h, m0, b);
                    for (int n = n_end; n >= n_begin; --n, ring.advance()) {
                        int s = ring.stage;
                        mbar_wait(empty + s * 8, ring.parity ^ 1);
                        mbar_expect(full + s * 8, 2 * KV_BYTES);
                        copy_tile<D, BN>(sK + s * KV_BYTES, map_qkv, full + s * 8, H + kv, n * BN, b);
                        copy_tile<D, BN>(sV + s * KV_BYTES, map_qkv, full + s * 8, H + K + kv, n * BN, b);
                    }
                }
            }
            return;
        }
        registers_grow<240>();
        --wg;
        int lane = threadIdx.x & 31, leader = lane == 0, quad2 = (lane & 3) * 2;
        float scale_log2 = scale * LOG2E;
        u64 q_desc = descriptor(sQ + wg * BOX_BYTES, BM * 128), o_desc = descriptor(sO + wg * BOX_BYTES, BM * 128);
        u64 k_desc = descriptor(sK, BN * 128), v_desc = descriptor(sV, BN * 128);
        Ring<STAGES> ring;
        u32 q_parity = 0;

        for (int round = 0; round * (int)gridDim.x < tiles; ++round) {
            int tile = tile_of_round(round);
            if (tile >= tiles) continue;
            int b = tile % heads / H, h = tile % heads % H;
            int m0 = (m_tiles - 1 - tile / heads) * BM;
            const int* doc = doc_start + (size_t)b * T;
            int n_begin = first_key(doc, m0, window) / BN, n_end = (min(m0 + BM, T) - 1) / BN;
            int t_first = m0 + wg * 64, t0 = t_first + (threadIdx.x / 32 & 3) * 16 + lane / 4;
            int lo_max = first_key(doc, min(t_first + 63, T - 1), window);
            int lo[2];
            float2 st[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                lo[r] = first_key(doc, min(t0 + r * 8, T - 1), window) - quad2;
                st[r] = stats[((size_t)b * H + h) * Tpad + t0 + r * 8];
            }
            int hi0 = t0 - quad2;

            float dq[D / 2], s[BN / 2], dp[BN / 2];
            u32 ds[BN / 16][4];
#pragma unroll
            for (int i = 0; i < D / 2; ++i) dq[i] = 0.f;

            // At the top of a step S(n) is complete and dP(n) is in flight.
            mbar_wait(q_full, q_parity);
            q_parity ^= 1;
            mbar_wait(full + ring.stage * 8, ring.parity);
            pin(s);
            pin(dp);
            wgmma_fence();
            product_nt<D, BM, BN>(s, q_desc, k_desc + (ring.stage * KV_BYTES >> 4));
            wgmma_commit();
            product_nt<D, BM, BN>(dp, o_desc, v_desc + (ring.stage * KV_BYTES >> 4));
            wgmma_commit();
            wgmma_wait<1>(); pin(s);
            int n = n_end, prev_stage = -1;
            auto step = [&](auto last) {
                int stage = ring.stage, n0 = n * BN;
                if (n0 + BN - 1 > t_first || n0 < lo_max) {
                    int l[2] = {lo[0] - n0, lo[1] - n0}, u[2] = {hi0 - n0, hi0 + 8 - n0};
                    mask_columns(s, l, u);
                }
#pragma unroll
                for (int i = 0; i < BN / 2; ++i) s[i] = exp2_fast(fmaf(s[i], scale_log2, -st[i >> 1 & 1].x));
                wgmma_wait<0>();
                pin(dp);
                pin(ds);
                pin(dq);
                if (leader && prev_stage >= 0) mbar_arrive(empty + prev_stage * 8);
                prev_stage = stage;
#pragma unroll
                for (int i = 0; i < BN / 2; ++i) dp[i] = s[i] * (dp[i] - st[i >> 1 & 1].y);
                pack_operand(ds, dp);
                ring.advance();
                if constexpr (!decltype(last)::value) {
                    mbar_wait(full + ring.stage * 8, ring.parity);
                    pin(s);
                    pin(dp);
                    pin(ds);
                    pin(dq);
                    wgmma_fence();
                    product_nt<D, BM, BN>(s, q_desc, k_desc + (ring.stage * KV_BYTES >> 4));
                    wgmma_commit();
                    product_nn(dq, ds, k_desc + (stage * KV_BYTES >> 4));
                    wgmma_commit();
                    product_nt<D, BM, BN>(dp, o_desc, v_desc + (ring.stage * KV_BYTES >> 4));
                    wgmma_commit();
                    wgmma_wait<1>(); pin(s); pin(dq); pin(ds);
                } else {
                    pin(ds);
                    wgmma_fence();
                    product_nn(dq, ds, k_desc + (stage * KV_BYTES >> 4));
                    wgmma_commit();
                    if (leader) mbar_arrive(q_empty);
                    wgmma_wait<0>();
                    pin(dq);
                    if (leader) mbar_arrive(empty + stage * 8);
                }
            };
            for (; n > n_begin; --n) step(Bool<false>());
            step(Bool<true>());
            size_t stride = (size_t)(H + 2 * K) * D;
            store_rows<D>(d_qkv + (size_t)b * T * stride + h * D, dq, t0, T, stride, scale, scale);
        }
    }
};

}  // namespace

#define ATTENTION_KERNELS(D, FWD_WARPGROUPS, DKDV_ROWS, DKDV_STAGES, DQ_KEYS, DQ_STAGES)                              \
    extern "C" __global__ void __launch_bounds__(128 + 128 * FWD_WARPGROUPS, 1)                                     \
        attention_fwd_sm90_d##D(const __grid_constant__ TensorMap map_qkv, const int* doc_start, u16* out,         \
                                float* lse, int B, int T, int H, int K, int window, float scale) {                 \
        Forward<D, FWD_WARPGROUPS>::run(&map_qkv, doc_start, out, lse, B, T, H, K, window, scale);                 \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(384, 1)                                                           \
        attention_bwd_dkdv_sm90_d##D(const __grid_constant__ TensorMap map_qkv,                                    \
                                     const __grid_constant__ TensorMap map_d_out, const float2* stats,             \
                                     const int* doc_start, u16* d_qkv, int B, int T, int H, int K, int window,     \
                                     float scale) {                                                                \
        BackwardKv<D, DKDV_ROWS, DKDV_STAGES>::run(&map_qkv, &map_d_out, stats, doc_start, d_qkv, B, T, H, K,      \
                                                   window, scale);                                                 \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(384, 1)                                                           \
        attention_bwd_dq_sm90_d##D(const __grid_constant__ TensorMap map_qkv,                                      \
                                   const __grid_constant__ TensorMap map_d_out, const float2* stats,               \
                                   const int* doc_start, u16* d_qkv, int B, int T, int H, int K, int window,       \
                                   float scale) {                                                                  \
        BackwardQ<D, DQ_KEYS, DQ_STAGES>::run(&map_qkv, &map_d_out, stats, doc_start, d_qkv, B, T, H, K, window,   \
                                              scale);                                                              \
    }

ATTENTION_KERNELS(64, 2, 64, 4, 128, 2)
ATTENTION_KERNELS(96, 2, 64, 4, 64, 4)
ATTENTION_KERNELS(128, 2, 64, 4, 64, 4)

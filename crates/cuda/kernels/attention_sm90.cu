// Causal attention for training, forward and backward, bf16 with float32 accumulation: the Hopper path
// (sm_90a only; wgmma fed by the bulk tensor copy engine through mbarrier rings).
//
// Same functions, tensors and masks as attention.cu, which documents them. One warpgroup only issues copies; the
// others ("consumers") own 64 rows each of the output tile, hold its accumulators in registers, and overlap their
// exponentials with products in flight (FlashAttention-3, Shah et al. 2024, arXiv 2407.08608). The backward needs no
// round trip through shared memory: dK/dV work on transposed tiles, so that the probabilities that come out of one
// product are the A operand of the next. Every sum has a fixed order: results are bitwise equal from run to run.
//
// Tensor maps (cuTensorMapEncodeTiled, bf16, rank 4, box {64, 1, 64, 1}, element strides 1, no interleave,
// 128-byte swizzle, L2 promotion 256 B, out-of-bounds fill zero), passed by value as 128-byte parameters:
//   map_qkv    over qkv:   dims {D, H + 2*K, T, B}, byte strides {2*D, 2*D*(H + 2*K), 2*D*(H + 2*K)*T}
//   map_d_out  over d_out: dims {D, H, T, B},       byte strides {2*D, 2*D*H, 2*D*H*T}
//
// Launches, for D = 64, 96, 128 (the suffix _dD); shared memory is dynamic, in bytes, and must be allowed with
// CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES. The backward runs dq first: it fills `stats` for dkdv.
//   attention_fwd_sm90_dD(map_qkv, doc_start, out, lse, B, T, H, K, window, scale)
//       D = 64: tiles = B*H*ceil(T/192), block 512, shared 90192; else tiles = B*H*ceil(T/128), block 384, shared 163920
//   attention_bwd_dq_sm90_dD(map_qkv, map_d_out, out, d_out, lse, stats, doc_start, d_qkv, B, T, H, K, window, scale)
//       D = 64: tiles = B*H*ceil(T/192), block 512, shared 147568; else tiles = B*H*ceil(T/128), block 384, shared 196688
//   attention_bwd_dkdv_sm90_dD(map_qkv, map_d_out, stats, doc_start, d_qkv, B, T, H, K, window, scale)
//       tiles = B*K*ceil(T/128), block 384, shared 100432 for D = 64, else 198736
//   attention_bwd_dkdv_split_sm90_dD: the same arguments, block and shared memory; clusters of two blocks share a
//       tile (the cluster size is part of the kernel); faster where tiles < 1.5 * multiprocessors
// The grid is (G, 1, 1) with any 1 <= G <= tiles: blocks stride over the tiles, longest first. Best: G = min(tiles,
// multiprocessors) for fwd and dq (a tile's end overlaps the next one's loads), G = tiles for dkdv (the hardware evens
// out documents of different lengths). The split kernel needs G = 2 * tiles exactly.

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
        wgmma_ss(s, a + ((k / 4 * A_ROWS * 128 + k % 4 * 32) >> 4), b + ((k / 4 * B_ROWS * 128 + k % 4 * 32) >> 4),
                 k > 0);
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

// A value all threads of the warp share, in a form the compiler knows to be so (it then stays in uniform registers).
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// First visible key of query t of a row whose document starts are `doc`; at most t, so no row is ever empty.
__device__ __forceinline__ int first_key(const int* doc, int t, int window) {
    return min(max(max(doc[t], t - window + 1), 0), t);
}

// Dot product of two groups of eight bf16.
__device__ __forceinline__ float dot8(uint4 x, uint4 y) {
    auto dot2 = [](u32 a, u32 b) {
        return __uint_as_float(a << 16) * __uint_as_float(b << 16) +
               __uint_as_float(a & 0xffff0000u) * __uint_as_float(b & 0xffff0000u);
    };
    return dot2(x.x, y.x) + dot2(x.y, y.y) + dot2(x.z, y.z) + dot2(x.w, y.w);
}

// The i-th tile this block works on; odd rounds run backwards so that the lengths even out.
template <int SPLIT = 1>
__device__ __forceinline__ int tile_of_round(int round) {
    int blocks = gridDim.x / SPLIT, block = blockIdx.x / SPLIT;
    return round * blocks + (round & 1 ? blocks - 1 - block : block);
}

// s[..] = -inf where the column, relative to the thread's first one, is above `last` (or below `first`) of its row.
template <int N>
__device__ __forceinline__ void mask_after(float (&s)[N], int last0, int last1) {
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (i / 4 * 8 + (i & 1) > (i & 2 ? last1 : last0)) s[i] = neg_inf();
}
template <int N>
__device__ __forceinline__ void mask_before(float (&s)[N], int first0, int first1) {
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (i / 4 * 8 + (i & 1) < (i & 2 ? first1 : first0)) s[i] = neg_inf();
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
            for (int i = 0; i < D / 8; ++i)
                *(u32*)(p + i * 8) = pack_bf16(c[i * 4 + 2 * r] * scale, c[i * 4 + 2 * r + 1] * scale);
    }
}

// ---- forward ----

template <int D, int WARPGROUPS, int STAGES>
struct Forward {
    static constexpr int BM = 64 * WARPGROUPS, BN = 128;
    static constexpr int Q_BYTES = TILE_BYTES<D, BM>, KV_BYTES = TILE_BYTES<D, BN>;
    static constexpr int BARRIERS = Q_BYTES + 2 * STAGES * KV_BYTES;
    static_assert(BARRIERS + (2 + 4 * STAGES) * 8 <= 232448, "shared memory of a block");

    // One online-softmax step over s; returns exp2(old max - new max) per row in alpha.
    static __device__ __forceinline__ void softmax(float (&s)[BN / 2], float (&mx)[2], float (&sum)[2],
                                                   float (&alpha)[2], float scale_log2) {
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
        extern __shared__ __align__(1024) unsigned char smem_raw[];
        u32 base = (u32)__cvta_generic_to_shared(smem_raw);
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
        int wg = uniform(threadIdx.x / 128);
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
        if (wg == WARPGROUPS - 1) bar_arrive(next_turn, 256);

        for (int round = 0; round * (int)gridDim.x < tiles; ++round) {
            int tile = tile_of_round(round);
            if (tile >= tiles) continue;
            int b = tile % heads / H, h = tile % heads % H;
            int m0 = (m_tiles - 1 - tile / heads) * BM;
            const int* doc = doc_start + (size_t)b * T;
            int n_begin = uniform(first_key(doc, m0, window) / BN), n_end = (min(m0 + BM, T) - 1) / BN;
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
                if (n0 + BN - 1 > t_first) mask_after(s, hi0 - n0, hi0 + 8 - n0);
                if (n0 < lo_max) mask_before(s, lo[0] - n0, lo[1] - n0);
            };

            mbar_wait(q_full, q_parity);
            q_parity ^= 1;
            for (; n_end * BN > t_first + 63; --n_end, ring.advance()) {  // key tiles past all rows of this warpgroup
                mbar_wait(k_full + ring.stage * 8, ring.parity);
                if (leader) mbar_arrive(k_empty + ring.stage * 8);
                mbar_wait(v_full + ring.stage * 8, ring.parity);
                if (leader) mbar_arrive(v_empty + ring.stage * 8);
                bar_sync(turn, 256);
                bar_arrive(next_turn, 256);
            }
            mbar_wait(k_full + ring.stage * 8, ring.parity);
            bar_sync(turn, 256);
            pin(s);
            wgmma_fence();
            product_nt<D, BM, BN>(s, q_desc, k_desc + (ring.stage * KV_BYTES >> 4));
            wgmma_commit();
            bar_arrive(next_turn, 256);
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
                bar_sync(turn, 256);
                pin(s);
                pin(p);
                pin(o);
                wgmma_fence();
                product_nt<D, BM, BN>(s, q_desc, k_desc + (ring.stage * KV_BYTES >> 4));
                wgmma_commit();
                mbar_wait(v_full + prev.stage * 8, prev.parity);
                wgmma_fence();
                product_nn(o, p, v_desc + (prev.stage * KV_BYTES >> 4));
                wgmma_commit();
                bar_arrive(next_turn, 256);
                wgmma_wait<1>();
                pin(s);
                if (leader) mbar_arrive(k_empty + ring.stage * 8);
                mask(n);
                softmax(s, mx, sum, alpha, scale_log2);
                wgmma_wait<0>();
                pin(o);
                pin(p);
                if (leader) mbar_arrive(v_empty + prev.stage * 8);
                if (__any_sync(~0u, alpha[0] != 1.f || alpha[1] != 1.f))
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

// SPLIT = 2: a cluster of two blocks shares a tile, each taking half of its (query head, query tile) pairs; at the end
// the first adds up dK and the second dV, through distributed shared memory. Only with one round (grid of 2 * tiles).
template <int D, int BM, int STAGES, int SPLIT>
struct BackwardKv {
    static constexpr int BN = 128, WARPGROUPS = 2;
    static constexpr int KV_BYTES = TILE_BYTES<D, BN>, QO_BYTES = TILE_BYTES<D, BM>, STATS_BYTES = BM * 8;
    static constexpr int STATS = 2 * KV_BYTES + 2 * STAGES * QO_BYTES;
    static constexpr int BARRIERS = STATS + STAGES * STATS_BYTES;
    static_assert(BARRIERS + (2 + 2 * STAGES) * 8 <= 232448, "shared memory of a block");

    static __device__ __forceinline__ void cluster_sync() {
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
    // Writes an accumulator into the shared memory of the cluster's block `rank`; receive() adds what was written here.
    static __device__ __forceinline__ void send(u32 slot, int rank, const float (&c)[D / 2]) {
        u32 remote;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(slot), "r"(rank));
#pragma unroll
        for (int i = 0; i < D / 8; ++i)
            asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(remote + i * 4096), "f"(c[i * 4]),
                         "f"(c[i * 4 + 1]), "f"(c[i * 4 + 2]), "f"(c[i * 4 + 3]) : "memory");
    }
    static __device__ __forceinline__ void receive(u32 slot, float (&c)[D / 2]) {
#pragma unroll
        for (int i = 0; i < D / 8; ++i) {
            float x, y, z, w;
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(x), "=f"(y), "=f"(z), "=f"(w) : "r"(slot + i * 4096) : "memory");
            c[i * 4] += x, c[i * 4 + 1] += y, c[i * 4 + 2] += z, c[i * 4 + 3] += w;
        }
    }
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
                                               const float* __restrict__ stats, const int* __restrict__ doc_start,
                                               u16* __restrict__ d_qkv, int B, int T, int H, int K, int window,
                                               float scale) {
        extern __shared__ __align__(1024) unsigned char smem_raw[];
        u32 base = (u32)__cvta_generic_to_shared(smem_raw);
        u32 sK = base, sV = sK + KV_BYTES, sQ = sV + KV_BYTES, sO = sQ + STAGES * QO_BYTES, sStats = base + STATS;
        const float2* stats_tile = (const float2*)(smem_raw + STATS);
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
        int wg = uniform(threadIdx.x / 128), rank = SPLIT == 1 ? 0 : blockIdx.x % SPLIT;
        if (wg == 0) {
            registers_shrink<24>();
            if (threadIdx.x == 0) {
                Ring<STAGES> ring;
                u32 kv_parity = 1;
                for (int round = 0; round * (int)gridDim.x < tiles * SPLIT; ++round) {
                    int tile = tile_of_round<SPLIT>(round);
                    if (tile >= tiles) continue;
                    int b = tile % heads / K, kv = tile % heads % K, n0 = tile / heads * BN;
                    int count = query_tiles(doc_start + (size_t)b * T, n0, T, window);
                    mbar_wait(kv_empty, kv_parity);
                    kv_parity ^= 1;
                    mbar_expect(kv_full, 2 * KV_BYTES);
                    copy_tile<D, BN>(sK, map_qkv, kv_full, H + kv, n0, b);
                    copy_tile<D, BN>(sV, map_qkv, kv_full, H + K + kv, n0, b);
                    int i_end = count * group * (rank + 1) / SPLIT;
                    for (int i = count * group * rank / SPLIT; i < i_end; ++i, ring.advance()) {
                        int s = ring.stage, h = kv * group + i / count, m0 = n0 + i % count * BM;
                        u32 bar = full + s * 8;
                        mbar_wait(empty + s * 8, ring.parity ^ 1);
                        mbar_expect(bar, 2 * QO_BYTES + STATS_BYTES);
                        copy_tile<D, BM>(sQ + s * QO_BYTES, map_qkv, bar, h, m0, b);
                        copy_tile<D, BM>(sO + s * QO_BYTES, map_d_out, bar, h, m0, b);
                        const float* lse2 = stats + ((size_t)b * H + h) * 2 * Tpad + m0;
                        copy_bytes(sStats + s * STATS_BYTES, lse2, BM * 4, bar);
                        copy_bytes(sStats + s * STATS_BYTES + BM * 4, lse2 + Tpad, BM * 4, bar);
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

        for (int round = 0; round * (int)gridDim.x < tiles * SPLIT; ++round) {
            int tile = tile_of_round<SPLIT>(round);
            if (tile >= tiles) continue;
            int b = tile % heads / K, kv = tile % heads % K, n0 = tile / heads * BN;
            const int* doc = doc_start + (size_t)b * T;
            int count = uniform(query_tiles(doc, n0, T, window)), total = count * group;
            int key_first = n0 + wg * 64, key0 = key_first + (threadIdx.x / 32 & 3) * 16 + lane / 4;
            int t_lo = key0 - quad2, t_hi[2], hi_min = last_query(doc, key_first, T, window);
#pragma unroll
            for (int r = 0; r < 2; ++r) t_hi[r] = last_query(doc, key0 + r * 8, T, window) - quad2;

            float dk[D / 2], dv[D / 2], s[BM / 2], dp[BM / 2];
            u32 p[BM / 16][4], ds[BM / 16][4];
#pragma unroll
            for (int i = 0; i < D / 2; ++i) dk[i] = dv[i] = 0.f;

            // This block's pairs are [i, i_end) of the group * count. A warpgroup whose keys all come after a query
            // tile passes over it: the first tile of each head, for the second warpgroup.
            int i = total * rank / SPLIT, i_end = total * (rank + 1) / SPLIT;
            int m0 = n0 + i % count * BM, m_end = n0 + count * BM;
            int steps = i_end - i, trailing = 0;
            if (key_first >= n0 + BM) {
                steps -= (i_end + count - 1) / count - (i + count - 1) / count;
                trailing = steps == 0 ? i_end - i : (i_end - 1) % count == 0;
            }
            auto pass_over = [&] {
                mbar_wait(full + ring.stage * 8, ring.parity);
                if (leader) mbar_arrive(empty + ring.stage * 8);
                ring.advance();
            };
            auto advance = [&] {
                ring.advance();
                m0 += BM;
                if (m0 == m_end) m0 = n0;
            };
            auto pass_over_early = [&] {
                if (m0 + BM <= key_first) {
                    pass_over();
                    m0 += BM;
                }
            };

            mbar_wait(kv_full, kv_parity);
            kv_parity ^= 1;
            // At the top of a step S(i) is complete and nothing is in flight.
            auto step = [&](bool last) __attribute__((always_inline)) {
                int stage = ring.stage;
                wgmma_fence();
                product_nt<D, BN, BM>(dp, v_desc, o_desc + (stage * QO_BYTES >> 4));
                wgmma_commit();
                if (m0 < key_first + 64) mask_before(s, t_lo - m0, t_lo + 8 - m0);
                if (m0 + BM - 1 > hi_min) mask_after(s, t_hi[0] - m0, t_hi[1] - m0);
                const float2* st = stats_tile + stage * BM + (lane & 3);
#pragma unroll
                for (int j = 0; j < BM / 8; ++j) {
                    float2 lse2 = st[j * 4];
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        s[j * 4 + e] = exp2_fast(fmaf(s[j * 4 + e], scale_log2, -(e & 1 ? lse2.y : lse2.x)));
                }
                wgmma_wait<0>();
                pin(s);
                pack_operand(p, s);
                pin(p);
                pin(dv);
                wgmma_fence();
                product_nn(dv, p, o_desc + (stage * QO_BYTES >> 4));
                wgmma_commit();
                pin(dp);
#pragma unroll
                for (int j = 0; j < BM / 8; ++j) {
                    float2 delta = st[BM / 2 + j * 4];
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        dp[j * 4 + e] = s[j * 4 + e] * (dp[j * 4 + e] - (e & 1 ? delta.y : delta.x));
                }
                pack_operand(ds, dp);
                advance();
                if (!last) {
                    pass_over_early();
                    mbar_wait(full + ring.stage * 8, ring.parity);
                    pin(s);
                    pin(dp);
                    pin(ds);
                    pin(dk);
                    wgmma_fence();
                    product_nt<D, BN, BM>(s, k_desc, q_desc + (ring.stage * QO_BYTES >> 4));
                    wgmma_commit();
                    product_nn(dk, ds, q_desc + (stage * QO_BYTES >> 4));
                    wgmma_commit();
                    wgmma_wait<0>();
                    pin(s);
                    pin(p);
                    pin(dv);
                    pin(dk);
                    if (leader) mbar_arrive(empty + stage * 8);
                } else {
                    pin(ds);
                    pin(dk);
                    wgmma_fence();
                    product_nn(dk, ds, q_desc + (stage * QO_BYTES >> 4));
                    wgmma_commit();
                    wgmma_wait<0>();
                    pin(dk);
                    pin(dv);
                    if (leader) mbar_arrive(empty + stage * 8);
                }
            };
            if (steps > 0) {
                pass_over_early();
                mbar_wait(full + ring.stage * 8, ring.parity);
                pin(s);
                pin(dp);
                pin(dk);
                pin(dv);
                wgmma_fence();
                product_nt<D, BN, BM>(s, k_desc, q_desc + (ring.stage * QO_BYTES >> 4));
                wgmma_commit();
                wgmma_wait<0>();
                pin(s);
                for (int n = 1; n < steps; ++n) step(false);
                step(true);
            }
            for (; trailing > 0; --trailing) pass_over();
            if (leader) mbar_arrive(kv_empty);
            size_t stride = (size_t)(H + 2 * K) * D;
            u16 *d_k = d_qkv + (size_t)b * T * stride + (H + kv) * D, *d_v = d_k + K * D;
            if constexpr (SPLIT == 2) {
                u32 slot = base + (threadIdx.x - 128) * 16;
                cluster_sync();  // the other block no longer reads its tiles
                if (rank == 0) send(slot, 1, dv); else send(slot, 0, dk);
                cluster_sync();
                if (rank == 0) {
                    receive(slot, dk);
                    store_rows<D>(d_k, dk, key0, T, stride, scale, scale);
                } else {
                    receive(slot, dv);
                    store_rows<D>(d_v, dv, key0, T, stride, 1.f, 1.f);
                }
            } else {
                store_rows<D>(d_k, dk, key0, T, stride, scale, scale);
                store_rows<D>(d_v, dv, key0, T, stride, 1.f, 1.f);
            }
        }
    }
};

// ---- backward: dQ ----

template <int D, int WARPGROUPS, int BN, int STAGES>
struct BackwardQ {
    static constexpr int BM = 64 * WARPGROUPS;
    static constexpr int Q_BYTES = TILE_BYTES<D, BM>, KV_BYTES = TILE_BYTES<D, BN>;
    static constexpr int BARRIERS = 2 * Q_BYTES + 2 * STAGES * KV_BYTES;
    static_assert(BARRIERS + (2 + 2 * STAGES) * 8 <= 232448, "shared memory of a block");

    static __device__ __forceinline__ void run(const TensorMap* map_qkv, const TensorMap* map_d_out,
                                               const u16* __restrict__ out, const u16* __restrict__ d_out,
                                               const float* __restrict__ lse, float* __restrict__ stats,
                                               const int* __restrict__ doc_start, u16* __restrict__ d_qkv, int B,
                                               int T, int H, int K, int window, float scale) {
        extern __shared__ __align__(1024) unsigned char smem_raw[];
        u32 base = (u32)__cvta_generic_to_shared(smem_raw);
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
        int wg = uniform(threadIdx.x / 128);
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
        registers_grow<WARPGROUPS == 3 ? 160 : 240>();
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
            int n_begin = uniform(first_key(doc, m0, window) / BN), n_end = (min(m0 + BM, T) - 1) / BN;
            int t_first = m0 + wg * 64, t0 = t_first + (threadIdx.x / 32 & 3) * 16 + lane / 4;
            int lo_max = first_key(doc, min(t_first + 63, T - 1), window);
            int lo[2];
            float2 st[2];  // lse in base 2 and delta = rowsum(out * d_out), also kept for the dK/dV kernel
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                int t = t0 + r * 8;
                size_t at = ((size_t)b * T + t) * H + h;
                lo[r] = first_key(doc, min(t, T - 1), window) - quad2;
                float delta = 0.f;
                if (t < T)
#pragma unroll
                    for (int c = 0; c < D / 32; ++c) {
                        int chunk = c * 4 + (lane & 3);
                        delta += dot8(((const uint4*)(out + at * D))[chunk], ((const uint4*)(d_out + at * D))[chunk]);
                    }
                delta += __shfl_xor_sync(~0u, delta, 1);
                delta += __shfl_xor_sync(~0u, delta, 2);
                // Infinity makes every probability of a padding row zero.
                st[r] = make_float2(t < T ? lse[at] * LOG2E : -neg_inf(), delta);
                if ((lane & 3) == 0 && t < Tpad) {
                    float* row = stats + ((size_t)b * H + h) * 2 * Tpad + t;
                    row[0] = st[r].x;
                    row[Tpad] = st[r].y;
                }
            }
            int hi0 = t0 - quad2;

            float dq[D / 2], s[BN / 2], dp[BN / 2];
            u32 ds[BN / 16][4];
#pragma unroll
            for (int i = 0; i < D / 2; ++i) dq[i] = 0.f;

            // At the top of a step S(n) is complete and dP(n) is in flight.
            mbar_wait(q_full, q_parity);
            q_parity ^= 1;
            for (; n_end * BN > t_first + 63; --n_end, ring.advance()) {  // key tiles past all rows of this warpgroup
                mbar_wait(full + ring.stage * 8, ring.parity);
                if (leader) mbar_arrive(empty + ring.stage * 8);
            }
            mbar_wait(full + ring.stage * 8, ring.parity);
            pin(s);
            pin(dp);
            wgmma_fence();
            product_nt<D, BM, BN>(s, q_desc, k_desc + (ring.stage * KV_BYTES >> 4));
            wgmma_commit();
            product_nt<D, BM, BN>(dp, o_desc, v_desc + (ring.stage * KV_BYTES >> 4));
            wgmma_commit();
            wgmma_wait<1>();
            pin(s);
            int n = n_end, prev_stage = -1;
            auto step = [&](bool last) __attribute__((always_inline)) {
                int stage = ring.stage, n0 = n * BN;
                if (n0 + BN - 1 > t_first) mask_after(s, hi0 - n0, hi0 + 8 - n0);
                if (n0 < lo_max) mask_before(s, lo[0] - n0, lo[1] - n0);
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
                if (!last) {
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
                    wgmma_wait<1>();
                    pin(s);
                    pin(dq);
                    pin(ds);
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
            for (; n > n_begin; --n) step(false);
            step(true);
            size_t stride = (size_t)(H + 2 * K) * D;
            store_rows<D>(d_qkv + (size_t)b * T * stride + h * D, dq, t0, T, stride, scale, scale);
        }
    }
};

}  // namespace

#define ATTENTION_DKDV(NAME, ATTRIBUTES, D, ROWS, STAGES, SPLIT)                                                    \
    extern "C" __global__ void ATTRIBUTES __launch_bounds__(384, 1)                                                \
        NAME(const __grid_constant__ TensorMap map_qkv, const __grid_constant__ TensorMap map_d_out,               \
             const float* stats, const int* doc_start, u16* d_qkv, int B, int T, int H, int K, int window,         \
             float scale) {                                                                                        \
        BackwardKv<D, ROWS, STAGES, SPLIT>::run(&map_qkv, &map_d_out, stats, doc_start, d_qkv, B, T, H, K, window, \
                                                scale);                                                            \
    }
#define ATTENTION_KERNELS(D, FWD_WARPGROUPS, FWD_STAGES, DKDV_ROWS, DKDV_STAGES, DQ_WARPGROUPS, DQ_KEYS, DQ_STAGES)   \
    extern "C" __global__ void __launch_bounds__(128 + 128 * FWD_WARPGROUPS, 1)                                    \
        attention_fwd_sm90_d##D(const __grid_constant__ TensorMap map_qkv, const int* doc_start, u16* out,         \
                                float* lse, int B, int T, int H, int K, int window, float scale) {                 \
        Forward<D, FWD_WARPGROUPS, FWD_STAGES>::run(&map_qkv, doc_start, out, lse, B, T, H, K, window, scale);     \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(128 + 128 * DQ_WARPGROUPS, 1)                                     \
        attention_bwd_dq_sm90_d##D(const __grid_constant__ TensorMap map_qkv,                                      \
                                   const __grid_constant__ TensorMap map_d_out, const u16* out, const u16* d_out,  \
                                   const float* lse, float* stats, const int* doc_start, u16* d_qkv, int B, int T, \
                                   int H, int K, int window, float scale) {                                        \
        BackwardQ<D, DQ_WARPGROUPS, DQ_KEYS, DQ_STAGES>::run(&map_qkv, &map_d_out, out, d_out, lse, stats,         \
                                                             doc_start, d_qkv, B, T, H, K, window, scale);         \
    }                                                                                                              \
    ATTENTION_DKDV(attention_bwd_dkdv_sm90_d##D, , D, DKDV_ROWS, DKDV_STAGES, 1)                                   \
    ATTENTION_DKDV(attention_bwd_dkdv_split_sm90_d##D, __cluster_dims__(2, 1, 1), D, DKDV_ROWS, DKDV_STAGES, 2)

ATTENTION_KERNELS(64, 3, 2, 64, 4, 3, 64, 6)
ATTENTION_KERNELS(96, 2, 2, 64, 4, 2, 64, 4)
ATTENTION_KERNELS(128, 2, 2, 64, 4, 2, 64, 4)

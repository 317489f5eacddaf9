// Products of one row, one after the other in one launch, as decoding a single sequence
// makes them between two attentions: y (N) = w (N, K) x (K), bf16 in, float32 sums. w is
// bf16, or in four bits: then it is never multiplied out. decode.cu takes more rows,
// other shapes and other chips.
//
// One block a multiprocessor stays for all products. Its last warps do nothing but ask
// for weights: they run ahead through the tiles of all of them, as far as rings in
// shared memory reach, so that memory streams on while the others wait for each other
// between two products, or for the kernel before.
//
// A tile is 16 rows of w; two tiles are under way at a time, each with half of the warps.
// A stage of the ring is some KiB of each row of a tile, of which a warp takes steps of
// 64 bytes. An MMA takes the rows as its first operand. In bf16 all eight columns of the
// second are x. In four bits 64 bytes are two blocks of 64 codes: lanes t = 0, 1 hold
// one and t = 2, 3 the other (t = lane % 4), so x stands in two columns, each zero where
// the other block is, and the blocks' sums do not mix. A warp's steps of a stage use the
// columns in turn: afterwards lane t keeps the sums of step t, and multiplies each by
// its scale in float32. Only the codebook's sixteen values are rounded to bf16.
//
// A table turns a byte into the two bf16 values of an MMA operand; it exists once for
// every bank, so that lookups never collide, and lies at a multiple of 64 KiB, so that a
// byte becomes an address by one permutation of bytes. x lies in its gaps. Lookups are
// what bounds products in four bits: one in shared memory for two codes. Nothing else may
// cost much: what comes from memory is asked for a stage before, and without conditions,
// behind which the compiler waits for it; and local memory, for which shared memory
// leaves no cache, is as far away as the second level.
//
// RMSNorm of x and SwiGLU (gate and up are rows g and g + 8 of one tile) are part of a
// product.

#include "decode.cuh"

constexpr int PRODUCTS = 4;
constexpr int WARPS = 16, CONSUMERS = 32 * WARPS;
constexpr int TILES = 2, TEAM = WARPS / TILES;  // tiles under way, and warps of each
constexpr int ROW_BYTES = 2048, PITCH = ROW_BYTES + 64, STAGE_BYTES = 16 * PITCH;
constexpr int STEPS = ROW_BYTES / 64 / TEAM;  // of a warp in a stage
constexpr int STAGES = 2, STAGES_BELOW = 1;   // of a team's ring; of all, below the table
constexpr int FLUSH = 4;                      // rounds of tiles between two sums over warps
constexpr int LONGEST = 16384;                // K
static_assert(STEPS <= 4, "a step takes two of eight columns");

// Addresses in shared memory, of which the first KiB is the system's.
constexpr u32 TABLE = 0x10000, ABOVE = 0x20000;
constexpr u32 SUMS = 1024, SUM_BYTES = FLUSH * WARPS * 16 * 4;              // twice
constexpr u32 ADDED = SUMS + 2 * SUM_BYTES, ADDED_BYTES = 2 * FLUSH * TILES * 32;  // twice
constexpr u32 MAP = ADDED + 2 * ADDED_BYTES, SQUARES = MAP + 1024, BARRIERS = SQUARES + 64;
constexpr u32 BELOW = BARRIERS + 128;
static_assert(16 * TILES * STAGES <= 128 && BELOW % 16 == 0, "barriers");
static_assert(BELOW + STAGES_BELOW * STAGE_BYTES <= TABLE, "stages below the table");

// Mirrored in src/decode/chain.rs.
struct Chain {
    int products;
    int early;      // weights are there before the kernels before this one are done
    int four_bits;  // one more than a product whose codebook is everyone's; or 0
    int unused;
    int first[PRODUCTS];  // the block whose turn it is when a product begins
    Product product[PRODUCTS];
};

// Blocks that have arrived between two products, in all launches so far.
__device__ unsigned long long arrivals;

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ uint4 lds16(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
__device__ __forceinline__ float lds(u32 at) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at));
    return v;
}
__device__ __forceinline__ bf16 lds2(u32 at) {
    bf16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v.bits) : "r"(at));
    return v;
}
__device__ __forceinline__ void sts16(u32 at, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void sts(u32 at, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory"); }

// The bf16 pair of byte B of `codes`; `lane_at` is this lane's column of the table.
template <int B> __device__ __forceinline__ u32 look_up(u32 codes, u32 lane_at) {
    u32 value;
    asm("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(__byte_perm(lane_at, codes, 0x3200 | (4 + B) << 4)));
    return value;
}

// Where element k of x lies, k a multiple of 8: 64 of them in each gap of the table.
__device__ __forceinline__ u32 x_at(int k) { return TABLE + 128 + (k >> 6) * 256 + (k & 63) * 2; }

__device__ __forceinline__ u32 stage_at(int stage) {
    return stage < STAGES_BELOW ? BELOW + stage * STAGE_BYTES : ABOVE + (stage - STAGES_BELOW) * STAGE_BYTES;
}
__device__ __forceinline__ u32 full(int stage) { return BARRIERS + stage * 16; }
__device__ __forceinline__ u32 empty(int stage) { return BARRIERS + stage * 16 + 8; }

__device__ __forceinline__ void wait_phase(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra AGAIN;\n}" ::"r"(barrier), "r"(parity) : "memory");
}

// The stages of a team, one after the other. Teams do not share them: one could be two
// turns ahead of the other, which a barrier's parity does not tell from none.
struct Ring {
    int stage, last;
    u32 parity = 0;
    __device__ __forceinline__ explicit Ring(int team) : stage(team * STAGES), last(team * STAGES + STAGES - 1) {}
    __device__ __forceinline__ void next() {
        if (stage++ == last) stage -= STAGES, parity ^= 1;
    }
};

__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

__device__ __forceinline__ int first_tile(const Chain& c, int i) {
    int tile = (int)blockIdx.x - c.first[i];
    return tile < 0 ? tile + (int)gridDim.x : tile;
}

// Bytes of a step (64 of each row) hold this many elements.
__device__ __forceinline__ int unit_of(const Product& p) { return p.w ? 32 : 128; }

// The part and the row in it of row `row` (0 .. 15) of a tile, in four bits.
__device__ __forceinline__ const Part& locate(const Product& p, int tile, int row, int& at) {
    if (p.gated) {
        at = tile * 8 + (row & 7);
        return p.parts[row >> 3];
    }
    const Part& part = part_of(p, tile);
    at = (tile - part.first_tile) * 16 + row;
    return part;
}

// Sends the scales of a team's tiles to the second level of cache: one at a time, as they
// are read, they would queue behind weights.
__device__ __forceinline__ void prefetch_scales(const Chain& c, int product, int team, int lane) {
    if (product >= c.products || c.product[product].w) return;
    const Product& p = c.product[product];
    int halves = p.gated ? 2 : 1, stride = TILES * gridDim.x;
    u32 blocks = p.k / (p.gated ? 8 : 4);  // of those rows of a tile that are one part's
    for (int tile = first_tile(c, product) + team * gridDim.x + lane * stride; tile < p.tiles; tile += 32 * stride) {
        for (int half = 0; half < halves; ++half) {
            int row;
            const Part& part = locate(p, tile, 8 * half, row);
            u32 at = (u32)row * (p.k / 64), bytes = part.nested_absmax ? 1 : 4;
            const unsigned char* from = static_cast<const unsigned char*>(part.absmax) + (u64)at * bytes;
            asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(blocks * bytes) : "memory");
            if (bytes == 1) asm volatile("prefetch.global.L2 [%0];" ::"l"(part.nested_absmax + (at >> 8)) : "memory");
        }
    }
}

// The weights of a team, all of them in the order of their use. Tiles of a block begin at
// first_tile and are gridDim.x apart; teams take turns.
__device__ __forceinline__ void stream_weights(const Chain& c, int team, int lane) {
    Ring ring(team);
    int row = lane & 15;
    prefetch_scales(c, 0, team, lane);
    for (int i = 0; i < c.products; ++i) {
        const Product& p = c.product[i];
        prefetch_scales(c, i + 1, team, lane);
        __syncwarp();
        int units = p.k / unit_of(p);
        for (int tile = first_tile(c, i) + team * gridDim.x; tile < p.tiles; tile += TILES * gridDim.x) {
            const unsigned char* from;
            if (p.w) {
                int at = p.gated ? tile * 8 + (row & 7) + (row >> 3) * p.n : tile * 16 + row;
                from = reinterpret_cast<const unsigned char*>(p.w + at * p.w_stride);
            } else {
                int at;
                const Part& part = locate(p, tile, row, at);
                from = part.codes + at * (long long)(p.k / 2);
            }
            for (int unit = 0; unit < units; unit += ROW_BYTES / 64, from += ROW_BYTES, ring.next()) {
                u32 bytes = 64 * min(ROW_BYTES / 64, units - unit);
                wait_phase(empty(ring.stage), ring.parity ^ 1);
                if (lane == 0)
                    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full(ring.stage)), "r"(16 * bytes) : "memory");
                __syncwarp();
                if (lane < 16)
                    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                                 ::"r"(stage_at(ring.stage) + row * PITCH), "l"(from), "r"(bytes), "r"(full(ring.stage)) : "memory");
            }
        }
    }
}

// The scales of two blocks of rows g and g + 8 as they lie in memory: floats; or two
// codes of each row, and what those are multiplied by.
struct Scales {
    u32 raw[4];
};

// Where the scales of a warp's tiles lie.
struct ScaleCursor {
    const unsigned char* absmax[2];  // of rows g and g + 8
    const float* nested[2];
    float offset[2];
    u32 origin;  // of tile 0, if the part began there, in blocks
    int end;     // the part's tiles end there

    // Blocks from tile to tile.
    __device__ __forceinline__ static u32 step(const Product& p) { return p.k >> (p.gated ? 3 : 2); }

    __device__ __forceinline__ void enter(const Product& p, int tile, int g) {
        int row;
        const Part &low = locate(p, tile, g, row), &high = p.gated ? p.parts[1] : low;
        origin = (u32)row * (p.k / 64) - tile * step(p);
        end = p.gated ? p.tiles : low.first_tile + low.rows / 16;
        absmax[0] = static_cast<const unsigned char*>(low.absmax), absmax[1] = static_cast<const unsigned char*>(high.absmax);
        nested[0] = low.nested_absmax, nested[1] = high.nested_absmax;
        // Without nesting they are not used.
        const float* none = reinterpret_cast<const float*>(low.absmax);
        offset[0] = *(nested[0] ? low.offset : none), offset[1] = *(nested[0] ? high.offset : none);
    }
    template <bool NESTED> __device__ __forceinline__ Scales load(const Product& p, int tile, u32 column) const {
        u32 i = origin + tile * step(p) + column, j = i + (p.gated ? 0 : p.k / 8);
        Scales s;
        if constexpr (NESTED) {
            s.raw[0] = *reinterpret_cast<const unsigned short*>(absmax[0] + i);
            s.raw[1] = *reinterpret_cast<const unsigned short*>(absmax[1] + j);
            s.raw[2] = __float_as_uint(nested[0][i >> 8]), s.raw[3] = __float_as_uint(nested[1][j >> 8]);
        } else {
            uint2 a = *reinterpret_cast<const uint2*>(absmax[0] + 4ull * i), b = *reinterpret_cast<const uint2*>(absmax[1] + 4ull * j);
            s.raw[0] = a.x, s.raw[1] = a.y, s.raw[2] = b.x, s.raw[3] = b.y;
        }
        return s;
    }
    // Two of row g, two of row g + 8. Before another part is entered.
    template <bool NESTED> __device__ __forceinline__ float4 decode(const Scales& s) const {
        float f[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            f[n] = __uint_as_float(s.raw[n]);
            if constexpr (NESTED) {
                float inner = lds(MAP + (s.raw[n >> 1] >> (8 * (n & 1)) & 255u) * 4);
                // Two roundings, as the reference multiplies and adds.
                f[n] = __fadd_rn(__fmul_rn(inner, __uint_as_float(s.raw[2 + (n >> 1)])), offset[n >> 1]);
            }
        }
        return make_float4(f[0], f[1], f[2], f[3]);
    }
};

__device__ __forceinline__ unsigned long long arrivals_now() {
    unsigned long long now;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(&arrivals) : "memory");
    return now;
}

// Until all blocks have written what they computed, and what the others wrote is seen.
// All are there: one fits on a multiprocessor, and there are no more than those.
__device__ __forceinline__ void await_all(u64& goal) {
    sync_consumers();
    if (threadIdx.x == 0) {
        asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(&arrivals) : "memory");
        while (arrivals_now() < goal) {}
        goal += gridDim.x;
    }
    sync_consumers();
}

// x into the gaps of the table. With an RMSNorm x is multiplied by the weight alone: the
// rest of the norm is one factor of all sums, which is returned.
__device__ __forceinline__ float load_x(const Product& p, uint4 norm, int warp, int lane) {
    constexpr int PIECES = LONGEST / 8 / CONSUMERS;  // of eight values, for a thread
    int pieces = p.k / 8;
    if (!p.norm) {
#pragma unroll
        for (int n = 0; n < PIECES; ++n) {
            int i = threadIdx.x + n * CONSUMERS;
            if (i < pieces) sts16(x_at(8 * i), load_fresh16(p.x + 8 * i));
        }
        sync_consumers();
        return 1.0f;
    }
    float squared = 0.0f;
#pragma unroll 1
    for (int i = threadIdx.x; i < pieces; i += CONSUMERS) {
        float f[8], w[8];
        unpack(load_fresh16(p.x + 8 * i), f);
        unpack(norm, w);
        if (i + CONSUMERS < pieces) norm = reinterpret_cast<const uint4*>(p.norm)[i + CONSUMERS];
#pragma unroll
        for (int m = 0; m < 8; ++m) squared = fmaf(f[m], f[m], squared), f[m] *= w[m];
        uint4 v;
        v.x = pack_bf16(f[0], f[1]), v.y = pack_bf16(f[2], f[3]);
        v.z = pack_bf16(f[4], f[5]), v.w = pack_bf16(f[6], f[7]);
        sts16(x_at(8 * i), v);
    }
    squared = warp_sum(squared);
    if (lane == 0) sts(SQUARES + warp * 4, squared);
    sync_consumers();
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += lds(SQUARES + w * 4);
    return 1.0f / sqrtf(sum / (float)p.k + p.eps);
}

// The row of y that row `row` (0 .. 15) of a tile is.
__device__ __forceinline__ int output_row(const Product& p, int tile, int row) {
    if (p.gated) return tile * 8 + (row & 7);
    if (p.w) return tile * 16 + row;
    const Part& part = part_of(p, tile);
    return part.first_row + (tile - part.first_tile) * 16 + row;
}

// Sends for what is added to the sums of the rounds from `tile` on: 16 values for each
// tile, those of `add` before those of the bias.
__device__ __forceinline__ void fetch_added(const Product& p, u32 to, int tile) {
    int here = tile + (int)(threadIdx.x >> 1) * (int)gridDim.x;
    if (threadIdx.x >= 2 * FLUSH * TILES || here >= p.tiles) return;
    int row = output_row(p, here, 8 * (threadIdx.x & 1));
    auto fetch = [](u32 to, const bf16* from) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    };
    to += threadIdx.x * 16;
    if (p.add) fetch(to, p.add + row);
    if (p.bias) fetch(to + ADDED_BYTES / 2, p.bias + row);
}

// Sums over the warps of each tile of `kept` rounds, from tile `tile` on, and what is
// made of them.
__device__ __forceinline__ void flush(const Product& p, float factor, u32 added, u32 sums, int tile, int kept) {
    int done = threadIdx.x >> 4, row = threadIdx.x & 15, here = tile + done * gridDim.x;
    if (done >= kept * TILES || here >= p.tiles) return;
    u32 together = 0xffffu << (threadIdx.x & 16);
    float found = 0.0f;
#pragma unroll
    for (int w = 0; w < TEAM; ++w) found += lds(sums + ((done * TEAM + w) * 16 + row) * 4);
    added += threadIdx.x * 2;
    float more = p.bias ? to_float(lds2(added + ADDED_BYTES / 2)) : 0.0f;
    if (p.add) more += to_float(lds2(added));
    found = fmaf(factor, found, more);
    if (p.gated) {
        float up = __shfl_down_sync(together, found, 8);
        found *= __fdividef(1.0f, 1.0f + __expf(-found)) * up;
    }
    if (p.gated && row >= 8) return;
    int to = output_row(p, here, row);
    if (p.y_f32) static_cast<float*>(p.y)[to] = found;
    else static_cast<bf16*>(p.y)[to] = from_float<bf16>(found);
}

// What a warp that multiplies keeps from product to product.
struct Worker {
    int warp, lane, g, t, team, member;
    Ring ring;
    u32 sums = SUMS;
    float factor = 1.0f;  // of all sums of the product

    __device__ __forceinline__ Worker(int warp, int lane)
        : warp(warp), lane(lane), g(lane >> 2), t(lane & 3), team(warp / TEAM), member(warp % TEAM), ring(team) {}

    // The address of this lane's bytes of the stage's first step.
    __device__ __forceinline__ u32 await_stage() const {
        wait_phase(full(ring.stage), ring.parity);
        return stage_at(ring.stage) + g * PITCH + member * 64 + t * 16;
    }
    __device__ __forceinline__ void release_stage() {
        __syncwarp();
        if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty(ring.stage)) : "memory");
        ring.next();
    }
    __device__ __forceinline__ u32 added() const { return sums == SUMS ? ADDED : ADDED + ADDED_BYTES; }

    // Puts down this warp's sums of a tile; all of them are added up every FLUSH rounds.
    __device__ __forceinline__ void keep(const Product& p, float low, float high, int round, int& kept, bool last) {
        if (t == 0) {
            u32 to = sums + ((kept * WARPS + warp) * 16 + g) * 4;
            sts(to, low), sts(to + 32, high);
        }
        if (++kept < FLUSH && !last) return;
        asm volatile("cp.async.wait_all;" ::: "memory");
        sync_consumers();
        flush(p, factor, added(), sums, round - (kept - 1) * TILES * gridDim.x, kept);
        // Those that come next go elsewhere: these may still be read.
        sums = sums == SUMS ? SUMS + SUM_BYTES : SUMS;
        kept = 0;
    }
};

// x of the step whose sums this lane's column takes, of the stage that begins with step
// `first`; zero for other lanes.
__device__ __forceinline__ void load_own_x(u32 (&x)[16], const Worker& w, int first, int units) {
    int own = first + (w.g >> 1) * TEAM + w.member;
    bool has_x = (w.g & 1) == (w.t >> 1) && (w.g >> 1) < STEPS && own < units;
    u32 from = x_at(own * 128 + w.t * 32);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        uint4 v = has_x ? lds16(from + 16 * n) : make_uint4(0, 0, 0, 0);
        x[4 * n] = v.x, x[4 * n + 1] = v.y, x[4 * n + 2] = v.z, x[4 * n + 3] = v.w;
    }
}

// The sums of 64 bytes of two rows.
__device__ __forceinline__ void step_4bit(float (&sum)[4], uint4 a, uint4 b, const u32 (&x)[16], u32 lane_at) {
    auto word = [&](u32 d, u32 e, u32 x0, u32 x1, u32 x2, u32 x3) {
        multiply(sum, look_up<0>(d, lane_at), look_up<0>(e, lane_at), look_up<1>(d, lane_at), look_up<1>(e, lane_at), x0, x1);
        multiply(sum, look_up<2>(d, lane_at), look_up<2>(e, lane_at), look_up<3>(d, lane_at), look_up<3>(e, lane_at), x2, x3);
    };
    word(a.x, b.x, x[0], x[1], x[2], x[3]);
    word(a.y, b.y, x[4], x[5], x[6], x[7]);
    word(a.z, b.z, x[8], x[9], x[10], x[11]);
    word(a.w, b.w, x[12], x[13], x[14], x[15]);
}

// ONE: a stage holds whole rows, and a warp needs the same x for all of them. `ahead`: the
// scales of the first stage.
template <bool ONE, bool NESTED>
__device__ __forceinline__ void multiply_4bit(const Product& p, Worker& w, Scales ahead, ScaleCursor& cursor, int begin) {
    int stride = TILES * gridDim.x, tile = begin + w.team * gridDim.x, units = p.k / 128, kept = 0;
    int stages = ONE ? 1 : (units + STEPS * TEAM - 1) / (STEPS * TEAM);
    u32 lane_at = TABLE | w.lane * 4, x[16];
    auto column = [&](int first) { return 2 * min(first + w.t * TEAM + w.member, units - 1); };
    u32 first_column = column(0);
    if constexpr (ONE) load_own_x(x, w, 0, units);
#pragma unroll 1
    for (int round = begin; round < p.tiles; round += stride, tile += stride) {
        float low = 0.0f, high = 0.0f;
        if (kept == 0) fetch_added(p, w.added(), round);
        if (tile < p.tiles) {
#pragma unroll 1
            for (int s = 0, first = 0; s < stages; ++s, first += STEPS * TEAM) {
                float4 scale = cursor.decode<NESTED>(ahead);
                if (ONE || s + 1 == stages) {
                    // The last tile's are loaded again.
                    int next = tile + stride < p.tiles ? tile + stride : tile;
                    if (next >= cursor.end) cursor.enter(p, next, w.g);
                    ahead = cursor.load<NESTED>(p, next, first_column);
                } else {
                    ahead = cursor.load<NESTED>(p, tile, column(first + STEPS * TEAM));
                }
                if constexpr (!ONE) load_own_x(x, w, first, units);
                int count = (units - first - w.member + TEAM - 1) / TEAM;  // of this warp's steps
                float kept_sum[4] = {};
                u32 from = w.await_stage();
                auto step = [&](int n, bool last) {
                    uint4 a = lds16(from + n * TEAM * 64), b = lds16(from + n * TEAM * 64 + 8 * PITCH);
                    if (last) w.release_stage();
                    float sum[4] = {};
                    step_4bit(sum, a, b, x, lane_at);
#pragma unroll
                    for (int m = 0; m < 4; ++m) kept_sum[m] = w.t == n ? sum[m] : kept_sum[m];
                };
                if (count >= STEPS) {
#pragma unroll
                    for (int n = 0; n < STEPS; ++n) step(n, n + 1 == STEPS);
                } else {
#pragma unroll
                    for (int n = 0; n < STEPS - 1; ++n)
                        if (n < count) step(n, false);
                    w.release_stage();
                }
                low = fmaf(kept_sum[0], scale.x, fmaf(kept_sum[1], scale.y, low));
                high = fmaf(kept_sum[2], scale.z, fmaf(kept_sum[3], scale.w, high));
            }
#pragma unroll
            for (int n = 1; n < 4; n *= 2) {
                low += __shfl_xor_sync(0xffffffffu, low, n);
                high += __shfl_xor_sync(0xffffffffu, high, n);
            }
        }
        w.keep(p, low, high, round, kept, round + stride >= p.tiles);
    }
}

__device__ __forceinline__ void multiply_bf16(const Product& p, Worker& w, int begin) {
    int stride = TILES * gridDim.x, tile = begin + w.team * gridDim.x, units = p.k / 32, kept = 0;
    int stages = (units + STEPS * TEAM - 1) / (STEPS * TEAM);
#pragma unroll 1
    for (int round = begin; round < p.tiles; round += stride, tile += stride) {
        float even[4] = {}, odd[4] = {};
        if (kept == 0) fetch_added(p, w.added(), round);
        if (tile < p.tiles) {
#pragma unroll 1
            for (int s = 0, unit = w.member; s < stages; ++s) {
                u32 from = w.await_stage();
                uint4 a[STEPS], b[STEPS];
#pragma unroll
                for (int n = 0; n < STEPS; ++n) a[n] = lds16(from + n * TEAM * 64), b[n] = lds16(from + n * TEAM * 64 + 8 * PITCH);
                w.release_stage();
#pragma unroll
                for (int n = 0; n < STEPS; ++n, unit += TEAM) {
                    if (unit >= units) break;
                    uint4 x = lds16(x_at(unit * 32 + w.t * 8));
                    multiply(even, a[n].x, b[n].x, a[n].y, b[n].y, x.x, x.y);
                    multiply(odd, a[n].z, b[n].z, a[n].w, b[n].w, x.z, x.w);
                }
            }
        }
        w.keep(p, even[0] + odd[0], even[2] + odd[2], round, kept, round + stride >= p.tiles);
    }
}

__device__ __forceinline__ void multiply_all(const Chain& c, int warp, int lane) {
    Worker w(warp, lane);
    u64 goal = 0;
#pragma unroll 1
    for (int i = 0; i < c.products; ++i) {
        const Product& p = c.product[i];
        int begin = first_tile(c, i), tile = min(begin + w.team * (int)gridDim.x, p.tiles - 1);
        uint4 norm = {};
        if (p.norm && threadIdx.x < p.k / 8) norm = reinterpret_cast<const uint4*>(p.norm)[threadIdx.x];
        Scales ahead = {};
        ScaleCursor cursor;
        auto first_scales = [&]() {
            cursor.enter(p, tile, w.g);
            u32 column = 2 * min(w.t * TEAM + w.member, p.k / 128 - 1);
            if (cursor.nested[0]) ahead = cursor.load<true>(p, tile, column);
            else ahead = cursor.load<false>(p, tile, column);
        };
        if (!p.w && c.early) first_scales();
        if (i == 0) {
            wait_for_previous();
            // Others of this launch may have arrived, but not all of them.
            if (threadIdx.x == 0) goal = (arrivals_now() / gridDim.x + 1) * gridDim.x;
        } else {
            await_all(goal);
        }
        if (!p.w && !c.early) first_scales();
        w.factor = p.scale * load_x(p, norm, warp, lane);
        bool one = p.k <= 128 * STEPS * TEAM;
        if (p.w) multiply_bf16(p, w, begin);
        else if (one && cursor.nested[0]) multiply_4bit<true, true>(p, w, ahead, cursor, begin);
        else if (one) multiply_4bit<true, false>(p, w, ahead, cursor, begin);
        else if (cursor.nested[0]) multiply_4bit<false, true>(p, w, ahead, cursor, begin);
        else multiply_4bit<false, false>(p, w, ahead, cursor, begin);
    }
}

#endif

// 18 warps: five of them share a quarter of the registers.
extern "C" __global__ void __maxnreg__(96) decode_chain(const __grid_constant__ Chain c) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ unsigned char shared[];
    if ((u32)__cvta_generic_to_shared(shared) != SUMS) __trap();
    let_next_start();
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        for (int s = 0; s < TILES * STAGES; ++s) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full(s)) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty(s)), "r"(TEAM) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (warp >= WARPS) {
        if (!c.early) wait_for_previous();
        stream_weights(c, warp - WARPS, lane);
        return;
    }
    if (c.four_bits && threadIdx.x < 256) {
        const float* codebook = c.product[c.four_bits - 1].codebook;
        int byte = threadIdx.x;
        u32 v = pack_bf16(codebook[byte >> 4], codebook[byte & 15]);
        // Turned from lane to lane, so that stores do not collide either.
#pragma unroll
        for (int i = 0; i < 8; ++i) sts16(TABLE + byte * 256 + ((i + lane) & 7) * 16, make_uint4(v, v, v, v));
        sts(MAP + byte * 4, signed_map(byte));
    }
    multiply_all(c, warp, lane);
#endif
}

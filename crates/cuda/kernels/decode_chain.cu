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
// byte becomes an address by one permutation of bytes. x lies in its gaps.
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
constexpr u32 SUMS = 1024, SUM_BYTES = FLUSH * WARPS * 16 * 4;  // twice
constexpr u32 MAP = SUMS + 2 * SUM_BYTES, SQUARES = MAP + 1024, BARRIERS = SQUARES + 64;
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

// The weights of a team, all of them in the order of their use. Tiles of a block begin at
// first_tile and are gridDim.x apart; teams take turns.
__device__ __forceinline__ void stream_weights(const Chain& c, int team, int lane) {
    Ring ring(team);
    int row = lane & 15;
    for (int i = 0; i < c.products; ++i) {
        const Product& p = c.product[i];
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
// codes of each row, and the scales of those.
struct Scales {
    u32 raw[4];
};

// Of the blocks that lane t keeps the sums of, in a stage that begins with step `first`.
__device__ __forceinline__ Scales load_scales(const Product& p, int tile, int first, int member, int g, int t) {
    int units = p.k / 128, column = 2 * min(first + t * TEAM + member, units - 1), blocks = 2 * units, low_row, high_row;
    const Part &low = locate(p, tile, g, low_row), &high = locate(p, tile, g + 8, high_row);
    long long i = (long long)low_row * blocks + column, j = (long long)high_row * blocks + column;
    Scales s;
    if (low.nested_absmax) {
        s.raw[0] = *reinterpret_cast<const unsigned short*>(static_cast<const unsigned char*>(low.absmax) + i);
        s.raw[1] = *reinterpret_cast<const unsigned short*>(static_cast<const unsigned char*>(high.absmax) + j);
        s.raw[2] = __float_as_uint(low.nested_absmax[i >> 8]), s.raw[3] = __float_as_uint(high.nested_absmax[j >> 8]);
    } else {
        uint2 a = *reinterpret_cast<const uint2*>(static_cast<const float*>(low.absmax) + i);
        uint2 b = *reinterpret_cast<const uint2*>(static_cast<const float*>(high.absmax) + j);
        s.raw[0] = a.x, s.raw[1] = a.y, s.raw[2] = b.x, s.raw[3] = b.y;
    }
    return s;
}

__device__ __forceinline__ unsigned long long arrivals_now() {
    unsigned long long now;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(&arrivals) : "memory");
    return now;
}

// Until all blocks have written what they computed, and what the others wrote is seen.
// All are there: one fits on a multiprocessor, and there are no more than those.
__device__ __forceinline__ void await_all(unsigned long long& goal) {
    sync_consumers();
    if (threadIdx.x == 0) {
        asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(&arrivals) : "memory");
        while (arrivals_now() < goal) {}
        goal += gridDim.x;
    }
    sync_consumers();
}

// x into the gaps of the table, normed where the product says so.
__device__ __forceinline__ void load_x(const Product& p, uint4 norm, int warp, int lane) {
    constexpr int PIECES = LONGEST / 8 / CONSUMERS;  // of eight values, for a thread
    int pieces = p.k / 8;
#pragma unroll
    for (int n = 0; n < PIECES; ++n) {
        int i = threadIdx.x + n * CONSUMERS;
        if (i < pieces) sts16(x_at(8 * i), load_fresh16(p.x + 8 * i));
    }
    if (p.norm) {
        float squared = 0.0f;
#pragma unroll 1
        for (int i = threadIdx.x; i < pieces; i += CONSUMERS) {
            float f[8];
            unpack(lds16(x_at(8 * i)), f);
#pragma unroll
            for (int m = 0; m < 8; ++m) squared = fmaf(f[m], f[m], squared);
        }
        squared = warp_sum(squared);
        if (lane == 0) sts(SQUARES + warp * 4, squared);
        sync_consumers();
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += lds(SQUARES + w * 4);
        float rstd = 1.0f / sqrtf(sum / (float)p.k + p.eps);
#pragma unroll 1
        for (int i = threadIdx.x; i < pieces; i += CONSUMERS) {
            float f[8], w[8];
            unpack(lds16(x_at(8 * i)), f);
            unpack(norm, w);
            if (i + CONSUMERS < pieces) norm = reinterpret_cast<const uint4*>(p.norm)[i + CONSUMERS];
            uint4 v;
#pragma unroll
            for (int m = 0; m < 8; ++m) f[m] = f[m] * rstd * w[m];
            v.x = pack_bf16(f[0], f[1]), v.y = pack_bf16(f[2], f[3]);
            v.z = pack_bf16(f[4], f[5]), v.w = pack_bf16(f[6], f[7]);
            sts16(x_at(8 * i), v);
        }
    }
    sync_consumers();
}

// The row of y that row `row` (0 .. 15) of a tile is.
__device__ __forceinline__ int output_row(const Product& p, int tile, int row) {
    if (p.gated) return tile * 8 + (row & 7);
    if (p.w) return tile * 16 + row;
    const Part& part = part_of(p, tile);
    return part.first_row + (tile - part.first_tile) * 16 + row;
}

// What is added to the sums that this thread will flush, of the rounds from `tile` on.
__device__ __forceinline__ float load_added(const Product& p, int tile) {
    int here = tile + (threadIdx.x >> 4) * gridDim.x;
    if (threadIdx.x >= FLUSH * TILES * 16 || here >= p.tiles) return 0.0f;
    int row = output_row(p, here, threadIdx.x & 15);
    float added = p.bias ? to_float(p.bias[row]) : 0.0f;
    if (p.add) {
        added += to_float(load_fresh(p.add + row));
    }
    return added;
}

// Sums over the warps of each tile of `kept` rounds, from tile `tile` on, and what is
// made of them.
__device__ __forceinline__ void flush(const Product& p, float added, u32 sums, int tile, int kept) {
    int done = threadIdx.x >> 4, row = threadIdx.x & 15, here = tile + done * gridDim.x;
    if (done >= kept * TILES || here >= p.tiles) return;
    u32 together = 0xffffu << (threadIdx.x & 16);
    float found = 0.0f;
#pragma unroll
    for (int w = 0; w < TEAM; ++w) found += lds(sums + ((done * TEAM + w) * 16 + row) * 4);
    found = fmaf(p.scale, found, added);
    if (p.gated) {
        float up = __shfl_down_sync(together, found, 8);
        found *= __fdividef(1.0f, 1.0f + __expf(-found)) * up;
    }
    if (p.gated && row >= 8) return;
    int to = output_row(p, here, row);
    if (p.y_f32) static_cast<float*>(p.y)[to] = found;
    else static_cast<bf16*>(p.y)[to] = from_float<bf16>(found);
}

// The sums of 64 bytes of two rows.
__device__ __forceinline__ void step_4bit(float (&sum)[4], uint4 a, uint4 b, const u32 (&x)[16], u32 lane_at) {
    float odd[4] = {};
    auto word = [&](u32 d, u32 e, u32 x0, u32 x1, u32 x2, u32 x3) {
        multiply(sum, look_up<0>(d, lane_at), look_up<0>(e, lane_at), look_up<1>(d, lane_at), look_up<1>(e, lane_at), x0, x1);
        multiply(odd, look_up<2>(d, lane_at), look_up<2>(e, lane_at), look_up<3>(d, lane_at), look_up<3>(e, lane_at), x2, x3);
    };
    word(a.x, b.x, x[0], x[1], x[2], x[3]);
    word(a.y, b.y, x[4], x[5], x[6], x[7]);
    word(a.z, b.z, x[8], x[9], x[10], x[11]);
    word(a.w, b.w, x[12], x[13], x[14], x[15]);
#pragma unroll
    for (int n = 0; n < 4; ++n) sum[n] += odd[n];
}

__device__ __forceinline__ void multiply_all(const Chain& c, int warp, int lane) {
    int g = lane >> 2, t = lane & 3, team = warp / TEAM, member = warp % TEAM;
    u32 lane_at = TABLE | lane * 4, mine = g * PITCH + member * 64 + t * 16;
    bool has_x = (g & 1) == (t >> 1) && (g >> 1) < STEPS;
    auto release = [&](u32 barrier) {
        __syncwarp();
        if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
    };
    Ring ring(team);
    unsigned long long goal = 0;
    u32 sums = SUMS;
#pragma unroll 1
    for (int i = 0; i < c.products; ++i) {
        const Product& p = c.product[i];
        int begin = first_tile(c, i), tile = begin + team * gridDim.x, stride = TILES * gridDim.x;
        int units = p.k / unit_of(p), stages = (units + STEPS * TEAM - 1) / (STEPS * TEAM);
        uint4 norm = {};
        if (p.norm && threadIdx.x < p.k / 8) norm = reinterpret_cast<const uint4*>(p.norm)[threadIdx.x];
        Scales ahead = {};
        bool quantized = !p.w;
        if (quantized && tile < p.tiles && c.early) ahead = load_scales(p, tile, 0, member, g, t);
        if (i == 0) {
            wait_for_previous();
            // Others of this launch may have arrived, but not all of them.
            if (threadIdx.x == 0) goal = (arrivals_now() / gridDim.x + 1) * gridDim.x;
        } else {
            await_all(goal);
        }
        if (quantized && tile < p.tiles && !c.early) ahead = load_scales(p, tile, 0, member, g, t);
        load_x(p, norm, warp, lane);
        int kept = 0;
        float added = 0.0f;
#pragma unroll 1
        for (int round = begin; round < p.tiles; round += stride, tile += stride) {
            float low = 0.0f, high = 0.0f;
            if (kept == 0) added = load_added(p, round);
            if (tile < p.tiles && quantized) {
#pragma unroll 1
                for (int s = 0, first = 0; s < stages; ++s, first += STEPS * TEAM) {
                    Scales now = ahead;
                    bool last = s + 1 == stages;
                    if (!last || tile + stride < p.tiles)
                        ahead = load_scales(p, last ? tile + stride : tile, last ? 0 : first + STEPS * TEAM, member, g, t);
                    // x of the step whose sums this lane's column takes.
                    int own = first + (g >> 1) * TEAM + member;
                    u32 x[16] = {};
                    if (has_x && own < units) {
#pragma unroll
                        for (int n = 0; n < 4; ++n) {
                            uint4 v = lds16(x_at(own * 128 + t * 32) + 16 * n);
                            x[4 * n] = v.x, x[4 * n + 1] = v.y, x[4 * n + 2] = v.z, x[4 * n + 3] = v.w;
                        }
                    }
                    float offset[2] = {};
                    if (p.parts[0].nested_absmax) {
                        int row;
                        offset[0] = *locate(p, tile, 0, row).offset, offset[1] = *locate(p, tile, 8, row).offset;
                    }
                    int count = (units - first - member + TEAM - 1) / TEAM;  // of this warp's steps
                    float kept_sum[4] = {};
                    wait_phase(full(ring.stage), ring.parity);
                    u32 from = stage_at(ring.stage) + mine;
#pragma unroll
                    for (int n = 0; n < STEPS; ++n) {
                        uint4 a = lds16(from + n * TEAM * 64), b = lds16(from + n * TEAM * 64 + 8 * PITCH);
                        if (n + 1 == STEPS) release(empty(ring.stage));
                        if (n >= count) continue;
                        float sum[4] = {};
                        step_4bit(sum, a, b, x, lane_at);
#pragma unroll
                        for (int m = 0; m < 4; ++m) kept_sum[m] = t == n ? sum[m] : kept_sum[m];
                    }
                    ring.next();
                    float scale[4];
                    if (p.parts[0].nested_absmax) {
#pragma unroll
                        for (int n = 0; n < 4; ++n) {
                            float inner = lds(MAP + (now.raw[n >> 1] >> (8 * (n & 1)) & 255u) * 4);
                            // Two roundings, as the reference multiplies and adds.
                            scale[n] = __fadd_rn(__fmul_rn(inner, __uint_as_float(now.raw[2 + (n >> 1)])), offset[n >> 1]);
                        }
                    } else {
#pragma unroll
                        for (int n = 0; n < 4; ++n) scale[n] = __uint_as_float(now.raw[n]);
                    }
                    low = fmaf(kept_sum[0], scale[0], fmaf(kept_sum[1], scale[1], low));
                    high = fmaf(kept_sum[2], scale[2], fmaf(kept_sum[3], scale[3], high));
                }
#pragma unroll
                for (int n = 1; n < 4; n *= 2) {
                    low += __shfl_xor_sync(0xffffffffu, low, n);
                    high += __shfl_xor_sync(0xffffffffu, high, n);
                }
            } else if (tile < p.tiles) {
                float even[4] = {}, odd[4] = {};
#pragma unroll 1
                for (int s = 0, unit = member; s < stages; ++s) {
                    wait_phase(full(ring.stage), ring.parity);
                    u32 from = stage_at(ring.stage) + mine;
                    uint4 a[STEPS], b[STEPS];
#pragma unroll
                    for (int n = 0; n < STEPS; ++n) a[n] = lds16(from + n * TEAM * 64), b[n] = lds16(from + n * TEAM * 64 + 8 * PITCH);
                    release(empty(ring.stage));
                    ring.next();
#pragma unroll
                    for (int n = 0; n < STEPS; ++n, unit += TEAM) {
                        if (unit >= units) break;
                        uint4 x = lds16(x_at(unit * 32 + t * 8));
                        multiply(even, a[n].x, b[n].x, a[n].y, b[n].y, x.x, x.y);
                        multiply(odd, a[n].z, b[n].z, a[n].w, b[n].w, x.z, x.w);
                    }
                }
                low = even[0] + odd[0], high = even[2] + odd[2];
            }
            if (t == 0) {
                u32 to = sums + ((kept * WARPS + warp) * 16 + g) * 4;
                sts(to, low), sts(to + 32, high);
            }
            if (++kept < FLUSH && round + stride < p.tiles) continue;
            sync_consumers();
            flush(p, added, sums, round - (kept - 1) * stride, kept);
            // Those that come next go elsewhere: these may still be read.
            sums = sums == SUMS ? SUMS + SUM_BYTES : SUMS;
            kept = 0;
        }
    }
}

#endif

extern "C" __global__ void __maxnreg__(88) decode_chain(const __grid_constant__ Chain c) {
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

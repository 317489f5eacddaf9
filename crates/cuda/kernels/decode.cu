// Products of a few rows, as decoding makes them: y (M, N) = x (M, K) w (N, K)^T with
// M up to 8, bf16 in, float32 sums, as fast as w comes out of memory. w is bf16, or
// in four bits: then it is never multiplied out.
//
// An MMA takes 16 rows of w as its first operand and up to 8 rows of x as its second.
// Which element of K goes to which of its places is free as long as both operands
// agree: a lane loads neighbouring bytes of rows g and g + 8 (g = lane / 4), and x is
// read from shared memory to match. The warps of a block cut K into spans and add
// their sums up in a fixed order. Blocks stay for several tiles of 16 rows; the loads
// of the next chunk take the registers of each step as it is used up, so that memory
// never waits for arithmetic.
//
// In four bits a step is one block of 64 codes: eight bytes a lane. A table in shared
// memory turns a byte into the two bf16 values of an MMA operand; it exists once for
// every bank, so that lookups never collide. A step's sums are multiplied by the
// scales in float32: only the codebook's sixteen values are rounded to bf16.
//
// What comes before and after shares the launch: RMSNorm of x while it is loaded,
// SwiGLU where gate and up are rows g and g + 8 of one tile.

#include "decode.cuh"

constexpr int WARPS = 8;
constexpr int COLUMNS = 8;  // rows of x at most
constexpr int TABLE_BYTES = 256 * 32 * 4, MAP_BYTES = 256 * 4, SCALE_BYTES = WARPS * 128 * 4;
constexpr int SUM_BYTES = WARPS * 32 * 16, SQUARE_BYTES = WARPS * COLUMNS * 4;

template <bool FOUR_BITS> __device__ __forceinline__ void product(const Product& p) {
    constexpr int UNIT = FOUR_BITS ? 64 : 32;    // elements of K that a step takes
    constexpr int CHUNK = FOUR_BITS ? 8 : 4;     // steps that are in flight
    constexpr int BYTES = FOUR_BITS ? 32 : 64;   // of a row of w, per step
    extern __shared__ __align__(128) unsigned char shared[];
    unsigned char* table = shared;
    float* map = reinterpret_cast<float*>(shared + TABLE_BYTES);
    unsigned char* rest = shared + (FOUR_BITS ? TABLE_BYTES + MAP_BYTES + SCALE_BYTES : 0);
    float4* sums = reinterpret_cast<float4*>(rest);
    float* squares = reinterpret_cast<float*>(rest + SUM_BYTES);
    uint4* norm = reinterpret_cast<uint4*>(rest + SUM_BYTES + SQUARE_BYTES);
    unsigned char* xs = reinterpret_cast<unsigned char*>(norm) + (p.norm ? 2 * p.k : 0);
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float* scales = reinterpret_cast<float*>(shared + TABLE_BYTES + MAP_BYTES) + warp * 128;

    let_next_start();

    // This warp's span of K, in steps, and its tiles.
    int split = warp % p.splits, slot = warp / p.splits, per_block = WARPS / p.splits;
    int units = (p.k + UNIT - 1) / UNIT;
    int span = (units + p.splits - 1) / p.splits;
    bool aligned = FOUR_BITS && units % 4 == 0;  // scales are read four at a time
    if (aligned) span = (span + 3) & ~3;
    int begin = min(units, split * span), end = min(units, begin + span);
    int stride = gridDim.x * per_block;

    // What is fetched next: the chunk at `unit` of `tile`, rows `low` and `high`.
    int tile = blockIdx.x * per_block + slot, unit = begin;
    int stop = begin;  // nothing is fetched from here on
    const unsigned char *low = nullptr, *high = nullptr;
    const Part* scale_part = nullptr;
    long long scale_at = 0;

    auto locate = [&]() {
        stop = tile < p.tiles ? end : begin;
        if (tile >= p.tiles) return;
        if constexpr (FOUR_BITS) {
            const Part& part = part_of(p, p.gated ? 0 : tile);
            const Part& other = p.gated ? p.parts[1] : part;
            int row = p.gated ? tile * 8 : (tile - part.first_tile) * 16, beside = p.gated ? row : row + 8;
            long long row_bytes = p.k / 2;
            low = part.codes + min(row + g, part.rows - 1) * row_bytes + begin * BYTES + t * 8;
            high = other.codes + min(beside + g, other.rows - 1) * row_bytes + begin * BYTES + t * 8;
            // Two lanes a row, four scales a lane.
            scale_part = lane < 16 ? &part : &other;
            int scale_row = min((lane < 16 ? row : beside) + ((lane >> 1) & 7), scale_part->rows - 1);
            scale_at = (long long)scale_row * units + begin + (lane & 1) * 4;
        } else {
            int row = p.gated ? tile * 8 + g : tile * 16 + g;
            int other = p.gated ? p.n + min(row, p.n - 1) : min(row + 8, p.n - 1);
            const bf16* from = p.w + begin * UNIT + t * 8;
            low = reinterpret_cast<const unsigned char*>(from + min(row, p.n - 1) * p.w_stride);
            high = reinterpret_cast<const unsigned char*>(from + other * p.w_stride);
        }
    };
    auto advance = [&]() {
        unit += CHUNK, low += CHUNK * BYTES, high += CHUNK * BYTES, scale_at += CHUNK;
        if (unit >= end) tile += stride, unit = begin, locate();
    };

    uint2 codes[2][FOUR_BITS ? CHUNK : 1];
    uint4 values[2][FOUR_BITS ? 1 : CHUNK];
    auto fetch = [&](int u, int left) {
        if (u >= left) return;
        if constexpr (FOUR_BITS) {
            codes[0][u] = load_stream8(low + u * BYTES);
            codes[1][u] = load_stream8(high + u * BYTES);
        } else if ((unit + u) * UNIT + t * 8 < p.k) {
            values[0][u] = load_stream16(low + u * BYTES);
            values[1][u] = load_stream16(high + u * BYTES);
        } else {
            values[0][u] = values[1][u] = make_uint4(0, 0, 0, 0);
        }
    };

    // Four scales of this lane's row as they lie in memory: floats, or codes with the
    // two scales of scales that may apply to them, the offset, and where the second
    // one begins.
    u32 raw[4] = {};
    int turn = -1;
    auto fetch_scales = [&]() {
        int first = unit + (lane & 1) * 4;
        if (first >= stop) return;
        int count = min(4, stop - first);
        const Part& q = *scale_part;
        if (q.nested_absmax) {
            const unsigned char* from = static_cast<const unsigned char*>(q.absmax) + scale_at;
            if (aligned) {
                raw[0] = *reinterpret_cast<const u32*>(from);
            } else {
                raw[0] = 0;
                for (int i = 0; i < count; ++i) raw[0] |= (u32)from[i] << (8 * i);
            }
            raw[1] = __float_as_uint(q.nested_absmax[scale_at >> 8]);
            raw[2] = __float_as_uint(q.nested_absmax[(scale_at + count - 1) >> 8]);
            raw[3] = __float_as_uint(*q.offset);
            turn = 256 - (int)(scale_at & 255);
        } else {
            const float* from = static_cast<const float*>(q.absmax) + scale_at;
#pragma unroll
            for (int i = 0; i < 4; ++i) raw[i] = i < count ? __float_as_uint(from[i]) : 0u;
            turn = -1;
        }
    };
    // For step u, rows g and g + 8 lie beside each other.
    auto write_scales = [&]() {
        int row = lane >> 1;
        float* to = scales + (lane & 1) * 64 + (row & 7) * 2 + (row >> 3);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float scale = __uint_as_float(raw[i]);
            if (turn >= 0) {
                float outer = __uint_as_float(i < turn ? raw[1] : raw[2]);
                // Two roundings, as the reference multiplies and adds.
                scale = __fadd_rn(__fmul_rn(map[raw[0] >> (8 * i) & 255u], outer), __uint_as_float(raw[3]));
            }
            to[i * 16] = scale;
        }
    };
    locate();
    if (!p.early) wait_for_previous();
#pragma unroll
    for (int u = 0; u < CHUNK; ++u) fetch(u, stop - unit);
    if constexpr (FOUR_BITS) fetch_scales();
    if constexpr (FOUR_BITS) {
        int byte = threadIdx.x;
        u32 v = pack_bf16(p.codebook[byte >> 4], p.codebook[byte & 15]);
        uint4* row = reinterpret_cast<uint4*>(table + byte * 128);
        // Turned from lane to lane, so that stores do not collide either.
#pragma unroll
        for (int i = 0; i < 8; ++i) row[(i + lane) & 7] = make_uint4(v, v, v, v);
        map[byte] = signed_map(byte);
    }
    int pieces = p.k / 8, padded = units * UNIT / 8;
    if (p.norm) {
#pragma unroll 2
        for (int i = threadIdx.x; i < pieces; i += WARPS * 32) norm[i] = reinterpret_cast<const uint4*>(p.norm)[i];
    }

    wait_for_previous();
#pragma unroll 1
    for (int r = 0; r < p.rows; ++r) {
        const bf16* from = p.x + r * p.x_stride;
        uint4* to = reinterpret_cast<uint4*>(xs + r * p.pitch);
        float squared = 0.0f;
#pragma unroll 4
        for (int i = threadIdx.x; i < padded; i += WARPS * 32) {
            uint4 v = i < pieces ? load_fresh16(from + 8 * i) : make_uint4(0, 0, 0, 0);
            to[i] = v;
            if (!p.norm) continue;
            float f[8];
            unpack(v, f);
#pragma unroll
            for (int n = 0; n < 8; ++n) squared = fmaf(f[n], f[n], squared);
        }
        if (!p.norm) continue;
        squared = warp_sum(squared);
        if (lane == 0) squares[warp * COLUMNS + r] = squared;
    }
    if (p.norm) {
        __syncthreads();
#pragma unroll 1
        for (int r = 0; r < p.rows; ++r) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sum += squares[w * COLUMNS + r];
            float rstd = 1.0f / sqrtf(sum / (float)p.k + p.eps);
            uint4* row = reinterpret_cast<uint4*>(xs + r * p.pitch);
#pragma unroll 2
            for (int i = threadIdx.x; i < pieces; i += WARPS * 32) {
                float f[8], w[8];
                unpack(row[i], f);
                unpack(norm[i], w);
#pragma unroll
                for (int n = 0; n < 8; ++n) f[n] = f[n] * rstd * w[n];
                store(reinterpret_cast<bf16*>(row + i), f);
            }
        }
    }
    __syncthreads();

    // Columns without a row of x repeat one; nobody reads their sums.
    const unsigned char* x_lane = xs + min(g, p.rows - 1) * p.pitch + t * (FOUR_BITS ? 32 : 16);
    const float2* scale_lane = reinterpret_cast<const float2*>(scales) + g;
    u32 lane4 = lane * 4;
    int rounds = (p.tiles + stride - 1) / stride;
    for (int round = 0; round < rounds; ++round) {
        int here = (round * gridDim.x + blockIdx.x) * per_block + slot;
        int last = here < p.tiles ? end : begin;
        float total[4] = {};
        for (int at = begin;;) {
            if constexpr (FOUR_BITS) {
                __syncwarp();
                write_scales();
                __syncwarp();
            }
            advance();
            if constexpr (FOUR_BITS) fetch_scales();
            const unsigned char* x_at = x_lane + at * (UNIT * 2);
            int left = last - at, next_left = stop - unit;
#pragma unroll
            for (int u = 0; u < CHUNK; ++u) {
                if (u < left) {
                    const uint4* from = reinterpret_cast<const uint4*>(x_at + u * (UNIT * 2));
                    uint4 x0 = from[0];
                    if constexpr (FOUR_BITS) {
                        uint4 x1 = from[1];
                        uint2 a = codes[0][u], b = codes[1][u];
                        float sum[4] = {};
                        multiply(sum, pair<0>(table, a.x, lane4), pair<0>(table, b.x, lane4),
                                 pair<1>(table, a.x, lane4), pair<1>(table, b.x, lane4), x0.x, x0.y);
                        multiply(sum, pair<2>(table, a.x, lane4), pair<2>(table, b.x, lane4),
                                 pair<3>(table, a.x, lane4), pair<3>(table, b.x, lane4), x0.z, x0.w);
                        multiply(sum, pair<0>(table, a.y, lane4), pair<0>(table, b.y, lane4),
                                 pair<1>(table, a.y, lane4), pair<1>(table, b.y, lane4), x1.x, x1.y);
                        multiply(sum, pair<2>(table, a.y, lane4), pair<2>(table, b.y, lane4),
                                 pair<3>(table, a.y, lane4), pair<3>(table, b.y, lane4), x1.z, x1.w);
                        float2 scale = scale_lane[u * 8];
                        total[0] = fmaf(sum[0], scale.x, total[0]), total[1] = fmaf(sum[1], scale.x, total[1]);
                        total[2] = fmaf(sum[2], scale.y, total[2]), total[3] = fmaf(sum[3], scale.y, total[3]);
                    } else {
                        uint4 a = values[0][u], b = values[1][u];
                        multiply(total, a.x, b.x, a.y, b.y, x0.x, x0.y);
                        multiply(total, a.z, b.z, a.w, b.w, x0.z, x0.w);
                    }
                }
                fetch(u, next_left);
            }
            at += CHUNK;
            if (at >= end) break;
        }
        __syncthreads();  // those of the round before have been read
        sums[warp * 32 + lane] = make_float4(total[0], total[1], total[2], total[3]);
        __syncthreads();
        if (split != round % p.splits || here >= p.tiles) continue;
        float4 s = sums[slot * p.splits * 32 + lane];
        for (int i = 1; i < p.splits; ++i) {
            float4 more = sums[(slot * p.splits + i) * 32 + lane];
            s.x += more.x, s.y += more.y, s.z += more.z, s.w += more.w;
        }
        float found[2][2] = {{s.x, s.y}, {s.z, s.w}};
        if (p.gated) {
            int row = here * 8 + g;
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                int column = 2 * t + c;
                if (column >= p.rows || row >= p.n) continue;
                float gate = p.scale * found[0][c], up = p.scale * found[1][c];
                float act = gate * __fdividef(1.0f, 1.0f + __expf(-gate)) * up;
                static_cast<bf16*>(p.y)[column * p.y_stride + row] = from_float<bf16>(act);
            }
            continue;
        }
        int first = here * 16, bound = p.n;
        if constexpr (FOUR_BITS) {
            const Part& part = part_of(p, here);
            first = part.first_row + (here - part.first_tile) * 16;
            bound = part.first_row + part.rows;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int row = first + g + 8 * h;
            if (row >= bound) continue;
            float bias = p.bias ? to_float(p.bias[row]) : 0.0f;
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                int column = 2 * t + c;
                if (column >= p.rows) continue;
                float v = fmaf(p.scale, found[h][c], bias);
                if (p.add) v += to_float(load_fresh(p.add + column * p.add_stride + row));
                if (p.y_f32) static_cast<float*>(p.y)[column * p.y_stride + row] = v;
                else static_cast<bf16*>(p.y)[column * p.y_stride + row] = from_float<bf16>(v);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 3) decode_product_bf16(const __grid_constant__ Product p) {
    product<false>(p);
}
extern "C" __global__ void __launch_bounds__(256, 3) decode_product_4bit(const __grid_constant__ Product p) {
    product<true>(p);
}

// Rows of a table by index, and the gradient of the table.

#include "dependent.cuh"

// out row r = table row ids[r], as bytes; an index outside the table gives NaN,
// which no loss survives unnoticed. One block a row.
template <class W> __device__ void gather(const W* table, const int* ids, W* out, int words, int table_rows) {
    let_next_start();
    int id = ids[blockIdx.x];
    W* to = out + (long long)blockIdx.x * words;
    if (id < 0 || id >= table_rows) {
        for (int i = threadIdx.x; i < words; i += blockDim.x) {
            unsigned char* bytes = reinterpret_cast<unsigned char*>(to + i);
            for (int b = 0; b < (int)sizeof(W); ++b) bytes[b] = 0xff;
        }
        return;
    }
    const W* from = table + (long long)id * words;
    for (int i = threadIdx.x; i < words; i += blockDim.x) to[i] = from[i];
}

extern "C" __global__ void gather_16(const uint4* table, const int* ids, uint4* out, int words, int table_rows) {
    gather(table, ids, out, words, table_rows);
}
extern "C" __global__ void gather_2(const unsigned short* table, const int* ids, unsigned short* out, int words,
                                    int table_rows) {
    gather(table, ids, out, words, table_rows);
}

// first[id] = the first row that holds id, count[id] = how many do. Both come in
// as all ones (-1 as signed, the largest as unsigned). Integer atomics have one
// result whatever their order.
extern "C" __global__ void embed_index(const int* ids, u32* first, u32* count, int rows, int table_rows) {
    int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= rows) return;
    int id = ids[r];
    if (id < 0 || id >= table_rows) return;
    atomicMin(first + id, (u32)r);
    atomicAdd(count + id, 1u);
}

// d_table row id += the sum of the rows of d_x that hold id, in their order: the
// block of an id's first row looks for the others. Grid (rows, column tiles).
template <class T, int N>
__device__ void embed_backward(const int* ids, const T* d_x, T* d_table, const u32* first, const u32* count, int rows,
                               int c, int table_rows) {
    constexpr int LIST = 256;
    __shared__ int found[LIST];
    __shared__ int warp_counts[8];
    int row = blockIdx.x;
    int id = ids[row];
    if (id < 0 || id >= table_rows || first[id] != (u32)row) return;
    u32 total = count[id] + 1u;  // counted up from -1
    int column = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    bool active = column < c;
    T* to = d_table + (long long)id * c + column;
    float sum[N];
    if (active) load(to, sum);
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    u32 seen = 0;
    // blockDim.x is 256: each round looks at as many rows as the list can hold.
    for (int base = row; base < rows && seen < total; base += LIST) {
        int r = base + (int)threadIdx.x;
        bool hit = r < rows && ids[r] == id;
        u32 ballot = __ballot_sync(0xffffffffu, hit);
        if (lane == 0) warp_counts[warp] = __popc(ballot);
        __syncthreads();
        int before = 0, all = 0;
        for (int w = 0; w < 8; ++w) {
            if (w < warp) before += warp_counts[w];
            all += warp_counts[w];
        }
        if (hit) found[before + __popc(ballot & ((1u << lane) - 1u))] = r;
        __syncthreads();
        if (active) {
            int i = 0;
            for (; i + 4 <= all; i += 4) {
                float v[4][N];
#pragma unroll
                for (int k = 0; k < 4; ++k) load(d_x + (long long)found[i + k] * c + column, v[k]);
#pragma unroll
                for (int k = 0; k < 4; ++k)
#pragma unroll
                    for (int n = 0; n < N; ++n) sum[n] += v[k][n];
            }
            for (; i < all; ++i) {
                float v[N];
                load(d_x + (long long)found[i] * c + column, v);
#pragma unroll
                for (int n = 0; n < N; ++n) sum[n] += v[n];
            }
        }
        seen += all;
        __syncthreads();
    }
    if (active) store(to, sum);
}

#define EMBED(NAME, T, N)                                                                                           \
    extern "C" __global__ void __launch_bounds__(256)                                                               \
        embed_backward_##NAME##_v##N(const int* ids, const T* d_x, T* d_table, const u32* first, const u32* count,  \
                                     int rows, int c, int table_rows) {                                             \
        embed_backward<T, N>(ids, d_x, d_table, first, count, rows, c, table_rows);                                 \
    }
FOR_TYPES_AND_WIDTHS(EMBED)

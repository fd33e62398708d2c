// Attention over blocks of tokens that each row has chosen, on tensor cores: what `attend_chosen` of `attention.h` does, for keys
// and values in f16 that several heads share.
//
// A block takes up to 16 heads of one row, and its warps take 16 of the chosen keys by turns, each with sums of its own: no warp
// waits for another before the end.
#include "tensor_core.h"

const u32 QUERIES = 16;
const u32 PAGE_TOKENS = 64;
const u32 WARPS = 4;
// Keys that a warp takes at a time, and how often it has them in shared memory.
const u32 KEYS = 16;
const u32 STAGES = 3;

// Position of a row, and where its sequence's page numbers begin in `pages`.
struct Place {
    u32 position, first_page;
};

struct BlockAttentionConstants {
    // Query heads, key heads, heads that share a key head and a choice, and groups of at most QUERIES of these.
    u32 heads, kv_heads, share, chunks;
    // Factor on scores times log2(e).
    float scale;
    // Parts that each row's keys are divided into.
    u32 splits;
    // Whether `sinks` holds a logit for each head.
    u32 has_sinks;
    // See `AttendChosenConstants`.
    u32 groups, top_k, block, tail;
};

// The keys that a row sees: those of blocks of a list, then those of a block that is not complete.
struct Keys {
    const float* list;
    u32 tokens, tail, count;
    bool poisoned;
};

DEVICE Keys keys_of(const float* list, u32 position, const BlockAttentionConstants& c) {
    const u32 seen = position + 1;
    u32 listed = 0, most = c.top_k;
    while (listed < most) {
        const u32 middle = (listed + most) / 2;
        if (list[middle] >= 0.0f) listed = middle + 1;
        else most = middle;
    }
    // The last block may go beyond the row.
    const u32 last = listed == 0 ? 0 : ((u32)list[listed - 1] + 1) * c.block;
    Keys k;
    k.list = list;
    k.tokens = listed * c.block - (last > seen ? last - seen : 0);
    k.tail = seen / c.block * c.block;
    k.count = k.tokens + (c.tail ? seen - k.tail : 0);
    k.poisoned = list[0] != list[0];
    return k;
}

// q (rows, heads · DIM) f32; keys and values (pages, kv_heads, PAGE_TOKENS, DIM) f16 with those of the batch appended; lists (rows,
// groups · top_k): blocks, ascending, then −1. `out` and `stats` as those of `attend`. Shared memory: STAGES tiles of keys and
// values for each warp. Grid: (heads / share · chunks, splits, rows).
template <u32 DIM>
DEVICE void attend_blocks(const float* q, const u16* keys, const u16* values, const float* lists, const Place* places,
                          const u32* pages, const float* sinks, float* stats, float* out,
                          const BlockAttentionConstants& c) {
    constexpr float LOG2_E = 1.44269504f;
    constexpr u32 PIECES = DIM / 8, ROW_BYTES = DIM * 2, TILE_BYTES = KEYS * ROW_BYTES;
    // Copies of a lane of a tile, and rows between them.
    constexpr u32 COPIES = KEYS * PIECES / 32, STEP = 32 / PIECES;
    extern __shared__ __align__(128) u8 shared[];
    __shared__ float maxima[WARPS][QUERIES], sums[WARPS][QUERIES];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = blockIdx.z, split = blockIdx.y;
    const u32 part = blockIdx.x / c.chunks, head0 = part * c.share + blockIdx.x % c.chunks * QUERIES;
    const u32 queries = min(QUERIES, (part + 1) * c.share - head0);
    const u32 kv_head = head0 / (c.heads / c.kv_heads), choice = head0 / (c.heads / c.groups);
    after_previous();
    const Place at = places[row];
    const Keys k = keys_of(lists + ((u64)row * c.groups + choice) * c.top_k, at.position, c);
    const u32 each = (k.count + c.splits - 1) / c.splits, begin = min(split * each, k.count);
    const u32 end = min(begin + each, k.count);
    auto piece = [&](u32 r, u32 column_16) { return r * ROW_BYTES + ((column_16 ^ (r & 7)) << 4); };

    // Queries as f16, through shared memory; missing ones are zeros.
    const u32 memory = shared_address(shared);
    for (u32 i = threadIdx.x; i < QUERIES * PIECES; i += WARPS * 32) {
        const u32 h = i / PIECES, p = i % PIECES;
        float4 a = make_float4(0, 0, 0, 0), b = a;
        if (h < queries) {
            const float4* from = (const float4*)(q + ((u64)row * c.heads + head0 + h) * DIM + p * 8);
            a = from[0], b = from[1];
        }
        store_shared_16(memory + piece(h, p), h2_of(a.x, a.y), h2_of(a.z, a.w), h2_of(b.x, b.y), h2_of(b.z, b.w));
    }
    __syncthreads();
    u32 query[DIM / 16][4];
#pragma unroll
    for (u32 i = 0; i < DIM / 16; i++) ldmatrix_x4(query[i], memory + piece(lane & 15, 2 * i + (lane >> 4)));
    __syncthreads();

    const u32 own = memory + warp * STAGES * 2 * TILE_BYTES;
    auto bring = [&](u32 first, u32 stage) {
        // Where the key of a lane is.
        u64 start = 0;
        const u32 i = first + (lane & 15);
        if (i < end) {
            const u32 position = i < k.tokens ? (u32)k.list[i / c.block] * c.block + i % c.block : k.tail + i - k.tokens;
            const u32 page = pages[at.first_page + position / PAGE_TOKENS];
            start = (((u64)page * c.kv_heads + kv_head) * PAGE_TOKENS + position % PAGE_TOKENS) * DIM;
        }
        const u32 to = own + stage * 2 * TILE_BYTES;
#pragma unroll
        for (u32 n = 0; n < COPIES; n++) {
            const u32 r = n * STEP + lane / PIECES, p = lane % PIECES;
            const u64 from = __shfl_sync(0xffffffffu, start, r) + p * 8;
            const bool here = first + r < end;
            copy_async_16(to + piece(r, p), keys + (here ? from : 0), here);
            copy_async_16(to + TILE_BYTES + piece(r, p), values + (here ? from : 0), here);
        }
        copy_async_commit();
    };

    float o[DIM / 8][4];
#pragma unroll
    for (u32 n = 0; n < DIM / 8; n++) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
    float largest[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
    const u32 turn = WARPS * KEYS;
    u32 first = begin + warp * KEYS;
#pragma unroll
    for (u32 s = 0; s + 1 < STAGES; s++) bring(first + s * turn, s);
    for (u32 stage = 0; first < end; first += turn) {
        bring(first + (STAGES - 1) * turn, (stage + STAGES - 1) % STAGES);
        copy_async_wait<STAGES - 1>();
        __syncwarp();
        const u32 k_tile = own + stage * 2 * TILE_BYTES, v_tile = k_tile + TILE_BYTES;
        float score[2][4] = {};
#pragma unroll
        for (u32 i = 0; i < DIM / 16; i++) {
            u32 b[4];
            ldmatrix_x4(b, k_tile + piece((lane & 7) + ((lane & 16) >> 1), 2 * i + ((lane >> 3) & 1)));
            mma_16816(score[0], query[i], b[0], b[1]);
            mma_16816(score[1], query[i], b[2], b[3]);
        }
        float next[2] = {largest[0], largest[1]};
#pragma unroll
        for (u32 n = 0; n < 2; n++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const bool seen = first + n * 8 + 2 * (lane & 3) + (i & 1) < end;
                score[n][i] = seen ? score[n][i] * c.scale : -INFINITY;
                next[i / 2] = fmaxf(next[i / 2], score[n][i]);
            }
        float keep[2], base[2];
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            next[i] = fmaxf(next[i], __shfl_xor_sync(0xffffffffu, next[i], 1));
            next[i] = fmaxf(next[i], __shfl_xor_sync(0xffffffffu, next[i], 2));
            base[i] = next[i] == -INFINITY ? 0.0f : next[i];
            keep[i] = exp2f(largest[i] - base[i]);
            largest[i] = next[i];
            sum[i] *= keep[i];
        }
#pragma unroll
        for (u32 n = 0; n < 2; n++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                score[n][i] = exp2f(score[n][i] - base[i / 2]);
                sum[i / 2] += score[n][i];
            }
        const u32 a[4] = {h2_of(score[0][0], score[0][1]), h2_of(score[0][2], score[0][3]),
                          h2_of(score[1][0], score[1][1]), h2_of(score[1][2], score[1][3])};
#pragma unroll
        for (u32 n = 0; n < DIM / 16; n++) {
            u32 b[4];
            ldmatrix_x4_transposed(b, v_tile + piece(lane & 15, 2 * n + (lane >> 4)));
#pragma unroll
            for (u32 i = 0; i < 4; i++) o[2 * n][i] *= keep[i / 2], o[2 * n + 1][i] *= keep[i / 2];
            mma_16816(o[2 * n], a, b[0], b[1]);
            mma_16816(o[2 * n + 1], a, b[2], b[3]);
        }
        __syncwarp();
        stage = (stage + 1) % STAGES;
    }

    // The warps' sums together, with those of a split before the first one's sinks.
    copy_async_wait<0>();
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
        sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
        if ((lane & 3) != 0) continue;
        maxima[warp][lane / 4 + 8 * i] = largest[i];
        sums[warp][lane / 4 + 8 * i] = sum[i];
    }
    __syncthreads();
    float* const mixed = (float*)shared;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        const u32 h = lane / 4 + 8 * i;
        const bool sink = c.has_sinks && split == 0 && h < queries;
        float best = sink ? sinks[head0 + h] * LOG2_E : -INFINITY;
        for (u32 w = 0; w < WARPS; w++) best = fmaxf(best, maxima[w][h]);
        const float from = best == -INFINITY ? 0.0f : best;
        float all = sink ? exp2f(sinks[head0 + h] * LOG2_E - from) : 0.0f;
        for (u32 w = 0; w < WARPS; w++) all += sums[w][h] * exp2f(maxima[w][h] - from);
        // Of nothing, zeros.
        if (k.count == 0 && split == 0) all = 1.0f;
        if (k.poisoned) all = __int_as_float(0x7fc00000);
        const float factor = exp2f(largest[i] - from) / (c.splits == 1 ? all : 1.0f);
#pragma unroll
        for (u32 n = 0; n < DIM / 8; n++)
            *(float2*)(mixed + (warp * QUERIES + h) * DIM + n * 8 + 2 * (lane & 3)) =
                make_float2(o[n][2 * i] * factor, o[n][2 * i + 1] * factor);
        if (c.splits == 1 || warp != 0 || (lane & 3) != 0 || h >= queries) continue;
        float* const to = stats + (((u64)row * c.heads + head0 + h) * c.splits + split) * 2;
        to[0] = best / LOG2_E;
        to[1] = all;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < queries * DIM; i += WARPS * 32) {
        float v = 0.0f;
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) v += mixed[w * QUERIES * DIM + i];
        out[(((u64)row * c.heads + head0 + i / DIM) * c.splits + split) * DIM + i % DIM] = v;
    }
}

// clang-format off
#define BLOCK_ATTENTION(dim)                                                                                        \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 3)                                                     \
        block_attention_##dim(const float* q, const u16* keys, const u16* values, const float* lists,               \
                              const Place* places, const u32* pages, const float* sinks, float* stats, float* out,  \
                              const __grid_constant__ BlockAttentionConstants c) {                                  \
        attend_blocks<dim>(q, keys, values, lists, places, pages, sinks, stats, out, c);                            \
    }
// clang-format on

BLOCK_ATTENTION(64)
BLOCK_ATTENTION(128)

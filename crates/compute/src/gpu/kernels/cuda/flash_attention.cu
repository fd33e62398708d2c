// Causal attention of many tokens over key-value pages on tensor cores, without storing scores (Dao, FlashAttention-2,
// 2023): a block takes 64 tokens of one head through the pages, four warps of 16 tokens each.
//
// Pages are visited in order from the first visible one, and a page that a token does not see changes nothing of its
// sums: a token's result does not depend on how its sequence is cut into batches.
#include "tensor_core.h"

#include "seen.h"

const u32 QUERIES = 64;
const u32 PAGE_TOKENS = 64;
const u32 THREADS = 128;

// Consecutive rows of the batch that belong to one sequence; `start` is the position of the first.
struct Sequence {
    u32 first_row, rows, start, read_slot, written_slot;
};

// Position of a row, and where its sequence's page numbers begin in `pages`.
struct Place {
    u32 position, first_page;
};

struct AttentionConstants {
    u32 heads, kv_heads, sequences;
    // See `first_seen`.
    u32 window, chunk;
    // Factor on scores times log2(e).
    float scale;
    // Whether `sinks` holds a logit for each head.
    u32 has_sinks;
};

DEVICE bool finite_pair(u32 w) { return (w & 0x7c00) != 0x7c00 && (w & 0x7c000000) != 0x7c000000; }

// q (rows, heads · HEAD_DIM) f32; keys and values (pages, kv_heads, PAGE_TOKENS, HEAD_DIM) f16 with those of the batch
// appended; out as q. A block makes PART of the channels of results. Grid: (tiles of 64 rows, heads, HEAD_DIM / PART).
template <u32 HEAD_DIM, u32 PART>
DEVICE void flash_attention(const float* q, const u16* keys, const u16* values, const Sequence* sequences,
                            const Place* places, const u32* pages, const float* sinks, float* out,
                            const AttentionConstants& c) {
    constexpr u32 PIECES = HEAD_DIM / 8;
    constexpr u32 ROW_BYTES = HEAD_DIM * 2, VALUE_BYTES = PART * 2;
    constexpr bool Q_IN_REGISTERS = HEAD_DIM <= 128;
    extern __shared__ __align__(128) u8 shared[];
    __shared__ u32 spoiled[PAGE_TOKENS];
    const u32 k_tile = shared_address(shared), v_tile = k_tile + PAGE_TOKENS * ROW_BYTES;
    const u32 q_tile = Q_IN_REGISTERS ? k_tile : v_tile + PAGE_TOKENS * VALUE_BYTES;
    auto piece = [&](u32 row, u32 column_16) { return row * ROW_BYTES + ((column_16 ^ (row & 7)) << 4); };
    auto value_piece = [&](u32 row, u32 column_16) { return row * VALUE_BYTES + ((column_16 ^ (row & 7)) << 4); };

    // The last tiles have most pages: they go first.
    u32 tile = gridDim.x - 1 - blockIdx.x, s = 0;
    for (; s < c.sequences; s++) {
        const u32 tiles = (sequences[s].rows + QUERIES - 1) / QUERIES;
        if (tile < tiles) break;
        tile -= tiles;
    }
    if (s == c.sequences) return;
    const Sequence span = sequences[s];
    const u32* own_pages = pages + places[span.first_row].first_page;
    const u32 head = blockIdx.y, part = blockIdx.z * PART, kv_head = head / (c.heads / c.kv_heads);
    const u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const u32 first = tile * QUERIES, count = min(QUERIES, span.rows - first);
    const u32 first_position = span.start + first, last_position = first_position + count - 1;
    const u32 end = span.start + span.rows;
    const u32 first_page = first_seen(first_position, c.window, c.chunk) / PAGE_TOKENS;
    const u32 last_from = first_seen(last_position, c.window, c.chunk);
    const u32 end_page = last_position / PAGE_TOKENS + 1;

    // q as f16 in shared memory; missing rows are zeros.
    for (u32 i = thread; i < QUERIES * PIECES; i += THREADS) {
        const u32 row = i / PIECES, p = i % PIECES;
        float4 a = make_float4(0, 0, 0, 0), b = a;
        if (row < count) {
            const float4* from =
                (const float4*)(q + ((u64)(span.first_row + first + row) * c.heads + head) * HEAD_DIM + p * 8);
            a = from[0], b = from[1];
        }
        store_shared_16(q_tile + piece(row, p), h2_of(a.x, a.y), h2_of(a.z, a.w), h2_of(b.x, b.y), h2_of(b.z, b.w));
    }
    __syncthreads();
    u32 q_fragments[Q_IN_REGISTERS ? HEAD_DIM / 16 : 1][4];
    auto load_q = [&](u32(&a)[4], u32 k) {
        ldmatrix_x4(a, q_tile + piece(warp * 16 + (lane & 15), 2 * k + (lane >> 4)));
    };
    if (Q_IN_REGISTERS) {
#pragma unroll
        for (u32 k = 0; k < HEAD_DIM / 16; k++) load_q(q_fragments[Q_IN_REGISTERS ? k : 0], k);
        __syncthreads();
    }

    auto page_of = [&](const u16* pool, u32 page) {
        return pool + ((u64)own_pages[page] * c.kv_heads + kv_head) * PAGE_TOKENS * HEAD_DIM;
    };
    auto copy_keys = [&](u32 page) {
        const u16* from = page_of(keys, page);
        for (u32 i = thread; i < PAGE_TOKENS * PIECES; i += THREADS) {
            const u32 row = i / PIECES, p = i % PIECES;
            copy_async_16(k_tile + piece(row, p), from + row * HEAD_DIM + p * 8, page * PAGE_TOKENS + row < end);
        }
        copy_async_commit();
    };
    auto copy_values = [&](u32 page) {
        const u16* from = page_of(values, page) + part;
        for (u32 i = thread; i < PAGE_TOKENS * PART / 8; i += THREADS) {
            const u32 row = i / (PART / 8), p = i % (PART / 8);
            copy_async_16(v_tile + value_piece(row, p), from + row * HEAD_DIM + p * 8,
                          page * PAGE_TOKENS + row < end);
        }
        copy_async_commit();
    };

    float o[PART / 8][4];
#pragma unroll
    for (u32 n = 0; n < PART / 8; n++) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
    float largest[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
    const u32 position[2] = {first_position + warp * 16 + lane / 4, first_position + warp * 16 + lane / 4 + 8};

    auto visible = [&](u32 i, u32 key) {
        return key <= position[i] && key >= first_seen(position[i], c.window, c.chunk);
    };

    copy_keys(first_page);
    for (u32 page = first_page; page < end_page; page++) {
        copy_values(page);
        copy_async_wait<1>();
        __syncthreads();

        float score[PAGE_TOKENS / 8][4];
#pragma unroll
        for (u32 n = 0; n < PAGE_TOKENS / 8; n++) score[n][0] = score[n][1] = score[n][2] = score[n][3] = 0.0f;
#pragma unroll
        for (u32 k = 0; k < HEAD_DIM / 16; k++) {
            u32 a[4];
            if (Q_IN_REGISTERS) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) a[i] = q_fragments[Q_IN_REGISTERS ? k : 0][i];
            } else {
                load_q(a, k);
            }
#pragma unroll
            for (u32 n = 0; n < PAGE_TOKENS / 16; n++) {
                u32 b[4];
                ldmatrix_x4(b, k_tile + piece(n * 16 + (lane & 7) + ((lane & 16) >> 1), 2 * k + ((lane >> 3) & 1)));
                mma_16816(score[2 * n], a, b[0], b[1]);
                mma_16816(score[2 * n + 1], a, b[2], b[3]);
            }
        }

        // Some of the page's keys are not seen by some of the block's tokens.
        const u32 first_key = page * PAGE_TOKENS;
        const bool masked = first_key + PAGE_TOKENS - 1 > first_position || first_key < last_from;
        if (masked && thread < PAGE_TOKENS) spoiled[thread] = 0;
        __syncthreads();
        if (page + 1 < end_page) copy_keys(page + 1);
        else copy_async_commit();

        // Softmax, with sums and largest scores that run on from page to page.
        float next[2] = {largest[0], largest[1]};
#pragma unroll
        for (u32 n = 0; n < PAGE_TOKENS / 8; n++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                float v = score[n][i] * c.scale;
                if (masked && !visible(i / 2, first_key + n * 8 + 2 * (lane & 3) + (i & 1))) v = -INFINITY;
                score[n][i] = v;
                next[i / 2] = fmaxf(next[i / 2], v);
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
        for (u32 n = 0; n < PAGE_TOKENS / 8; n++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                score[n][i] = exp2f(score[n][i] - base[i / 2]);
                sum[i / 2] += score[n][i];
            }
#pragma unroll
        for (u32 n = 0; n < PART / 8; n++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) o[n][i] *= keep[i / 2];

        copy_async_wait<1>();
        __syncthreads();
        if (masked) {
            // Zero times a value that is not finite is not zero: such values are taken out, and the tokens that see
            // them get sums that are not numbers.
            bool found = false;
            for (u32 i = thread; i < PAGE_TOKENS * PART / 8; i += THREADS) {
                const u32 row = i / (PART / 8);
                uint4* at = (uint4*)(shared + PAGE_TOKENS * ROW_BYTES + value_piece(row, i % (PART / 8)));
                const uint4 v = *at;
                if (!(finite_pair(v.x) && finite_pair(v.y) && finite_pair(v.z) && finite_pair(v.w))) {
                    *at = make_uint4(0, 0, 0, 0);
                    spoiled[row] = 1;
                    found = true;
                }
            }
            if (__syncthreads_or(found)) {
                for (u32 key = 0; key < PAGE_TOKENS; key++)
                    for (u32 i = 0; i < 2; i++)
                        if (spoiled[key] && visible(i, first_key + key)) sum[i] = __int_as_float(0x7fc00000);
            }
        }

#pragma unroll
        for (u32 k = 0; k < PAGE_TOKENS / 16; k++) {
            const u32 a[4] = {h2_of(score[2 * k][0], score[2 * k][1]), h2_of(score[2 * k][2], score[2 * k][3]),
                              h2_of(score[2 * k + 1][0], score[2 * k + 1][1]),
                              h2_of(score[2 * k + 1][2], score[2 * k + 1][3])};
#pragma unroll
            for (u32 n = 0; n < PART / 16; n++) {
                u32 b[4];
                ldmatrix_x4_transposed(b, v_tile + value_piece(k * 16 + (lane & 15), 2 * n + (lane >> 4)));
                mma_16816(o[2 * n], a, b[0], b[1]);
                mma_16816(o[2 * n + 1], a, b[2], b[3]);
            }
        }
        __syncthreads();
    }

#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
        sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
        float factor = 1.0f;
        if (c.has_sinks) {
            const float sink = sinks[head] * 1.44269504f, base = fmaxf(largest[i], sink);
            factor = exp2f(largest[i] - base);
            sum[i] = sum[i] * factor + exp2f(sink - base);
        }
        factor /= sum[i];
        const u32 row = warp * 16 + lane / 4 + 8 * i;
        if (row >= count) continue;
        float* to = out + ((u64)(span.first_row + first + row) * c.heads + head) * HEAD_DIM + part + 2 * (lane & 3);
#pragma unroll
        for (u32 n = 0; n < PART / 8; n++)
            *(float2*)(to + n * 8) = make_float2(o[n][2 * i] * factor, o[n][2 * i + 1] * factor);
    }
}

// clang-format off
#define FLASH_ATTENTION(head_dim, part, blocks)                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, blocks)                                                   \
        tensor_attention_##head_dim(const float* q, const u16* keys, const u16* values, const Sequence* sequences,  \
                                    const Place* places, const u32* pages, const float* sinks, float* out,          \
                                    const __grid_constant__ AttentionConstants c) {                                 \
        flash_attention<head_dim, part>(q, keys, values, sequences, places, pages, sinks, out, c);                  \
    }
// clang-format on

FLASH_ATTENTION(64, 64, 4)
FLASH_ATTENTION(128, 128, 3)
FLASH_ATTENTION(256, 256, 2)
// Registers hold results of half a head.
FLASH_ATTENTION(512, 256, 1)

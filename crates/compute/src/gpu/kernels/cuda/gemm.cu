// Products of many tokens with weights of one encoding: DTYPE, with names that end in it: NAME(…).
//
// x comes as f16 rows that `to_f16` has scaled by a power of two each; `scale` undoes it.
#include "gemm.h"

// Calls each(token of the tile, weight row of the tile, value, value of the next weight row).
template <class Each>
DEVICE void for_results(const Acc& acc, u32 count, Each each) {
    const u32 lane = threadIdx.x & 31, half = (threadIdx.x >> 5) & 1, quarter = threadIdx.x >> 6;
#pragma unroll
    for (u32 m = 0; m < 4; m++)
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 token = (2 * m + half) * 16 + lane / 4 + 8 * i;
            if (token >= count) continue;
#pragma unroll
            for (u32 n = 0; n < 4; n++)
                each(token, quarter * 32 + n * 8 + 2 * (lane & 3), acc.v[m][n][2 * i], acc.v[m][n][2 * i + 1]);
        }
}

struct LinearConstants {
    u32 tokens, rows, cols;
    // f32 from one token's results to the next one's.
    u32 stride;
    u32 row_bytes[3];
    u32 traits;
    // Whether `bias` holds a value for each weight row.
    u32 biased;
};

// x (tokens, cols) → out (tokens, stride). Grid: (rows / 128, tokens / 128).
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    NAME(linear)(const u16* x, const float* scale, const u8* w0, const u8* w1, const u8* w2, const float* bias,
                 float* out, const __grid_constant__ LinearConstants c) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 first_row = blockIdx.x * WEIGHT_ROWS, first = blockIdx.y * TOKENS;
    const u32 count = min(TOKENS, c.tokens - first);
    const u32 row = min(first_row + threadIdx.x % 128, c.rows - 1);
    Acc acc;
    clear(acc);
    multiply(acc, shared, x, c.cols, count, [&](u32 i) { return first + i; },
             row_address(w0, w1, w2, c.row_bytes, row), c.traits);
    for_results(acc, count, [&](u32 token, u32 r, float v0, float v1) {
        r += first_row;
        const float factor = scale[first + token];
        float* to = out + (u64)(first + token) * c.stride + r;
        if (r < c.rows) to[0] = v0 * factor + (c.biased ? bias[r] : 0.0f);
        if (r + 1 < c.rows) to[1] = v1 * factor + (c.biased ? bias[r + 1] : 0.0f);
    });
}

// Where an expert's weights are: slot × slot_units × 256 bytes, then as many bytes to each plane.
struct ExpertMatrix {
    u32 plane[3];
    u32 row_bytes[3];
};

// Pairs of a token and one of its experts, sorted by expert: at most TOKENS of one expert.
struct Tile {
    u32 expert, first, count, unused;
};

struct GateUpConstants {
    u32 hidden, inner;
    u32 slot_units;
    ExpertMatrix gate, up;
    u32 traits;
    // Whether `gate_bias` and `up_bias` hold (experts, inner) values.
    u32 biased;
    // Clamped SwiGLU with `alpha` and `limit` if not zero.
    u32 clamped;
    float alpha, limit;
};

DEVICE float activation(float gate, float up, const GateUpConstants& c) {
    if (!c.clamped) return gate / (1.0f + __expf(-gate)) * up;
    // fminf would drop a NaN.
    const float g = gate > c.limit ? c.limit : gate;
    const float u = up > c.limit ? c.limit : up < -c.limit ? -c.limit : up;
    return (u + 1.0f) * g / (1.0f + __expf(-c.alpha * g));
}

DEVICE RowAddress expert_row(const u8* slots, u32 slot, u32 slot_units, const ExpertMatrix& m, u32 row) {
    const u8* base = slots + (u64)slot * slot_units * 256;
    return row_address(base + m.plane[0], base + m.plane[1], base + m.plane[2], m.row_bytes, row);
}

// x (tokens, hidden), pair_row (pairs): the token of each pair → out (pairs, inner): the product of gate and up.
// A tile's 128 weight rows are 64 of gate and the same of up, 16 of each in turn, so that a lane holds both
// of a column. Grid: (inner / 64, tiles).
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    NAME(moe_gate_up)(const u16* x, const float* scale, const u32* pair_row, const Tile* tiles, const u8* slots,
                      const u32* slot_of, const float* gate_bias, const float* up_bias, float* out,
                      const __grid_constant__ GateUpConstants c) {
    extern __shared__ __align__(128) u8 shared[];
    const Tile tile = tiles[blockIdx.y];
    if (tile.count == 0) return;
    const u32 first_row = blockIdx.x * 64, thread_row = threadIdx.x % 128;
    const u32 row = min(first_row + thread_row / 32 * 16 + thread_row % 16, c.inner - 1);
    const u32 slot = slot_of[tile.expert];
    Acc acc;
    clear(acc);
    multiply(acc, shared, x, c.hidden, tile.count, [&](u32 i) { return pair_row[tile.first + i]; },
             expert_row(slots, slot, c.slot_units, thread_row % 32 < 16 ? c.gate : c.up, row), c.traits);

    const u32 lane = threadIdx.x & 31, half = (threadIdx.x >> 5) & 1, quarter = threadIdx.x >> 6;
#pragma unroll
    for (u32 m = 0; m < 4; m++)
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 token = (2 * m + half) * 16 + lane / 4 + 8 * i;
            if (token >= tile.count) continue;
            const u32 pair = tile.first + token;
            const float factor = scale[pair_row[pair]];
#pragma unroll
            for (u32 n = 0; n < 2; n++)
#pragma unroll
                for (u32 j = 0; j < 2; j++) {
                    const u32 r = first_row + quarter * 16 + n * 8 + 2 * (lane & 3) + j;
                    if (r >= c.inner) continue;
                    float gate = acc.v[m][n][2 * i + j] * factor, up = acc.v[m][n + 2][2 * i + j] * factor;
                    if (c.biased) {
                        gate += gate_bias[(u64)tile.expert * c.inner + r];
                        up += up_bias[(u64)tile.expert * c.inner + r];
                    }
                    out[(u64)pair * c.inner + r] = activation(gate, up, c);
                }
        }
}

struct DownConstants {
    u32 hidden, inner;
    u32 slot_units;
    ExpertMatrix down;
    u32 traits;
    // Whether `bias` holds (experts, hidden) values.
    u32 biased;
};

// x (pairs, inner) → out (pairs, hidden). Grid: (hidden / 128, tiles).
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    NAME(moe_down)(const u16* x, const float* scale, const Tile* tiles, const u8* slots, const u32* slot_of,
                   const float* bias, float* out, const __grid_constant__ DownConstants c) {
    extern __shared__ __align__(128) u8 shared[];
    const Tile tile = tiles[blockIdx.y];
    if (tile.count == 0) return;
    const u32 first_row = blockIdx.x * WEIGHT_ROWS;
    const u32 row = min(first_row + threadIdx.x % 128, c.hidden - 1);
    Acc acc;
    clear(acc);
    multiply(acc, shared, x, c.inner, tile.count, [&](u32 i) { return tile.first + i; },
             expert_row(slots, slot_of[tile.expert], c.slot_units, c.down, row), c.traits);
    for_results(acc, tile.count, [&](u32 token, u32 r, float v0, float v1) {
        r += first_row;
        const u32 pair = tile.first + token;
        const float factor = scale[pair];
        const float* b = bias + (u64)tile.expert * c.hidden + r;
        float* to = out + (u64)pair * c.hidden + r;
        if (r < c.hidden) to[0] = v0 * factor + (c.biased ? b[0] : 0.0f);
        if (r + 1 < c.hidden) to[1] = v1 * factor + (c.biased ? b[1] : 0.0f);
    });
}

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
    Format weight;
    u32 rows, tokens;
    u32 has_bias, has_residual;
};

// x (tokens, cols) · weightᵀ + bias + residual → out (tokens, rows). Grid: (rows / 128, tokens / 128).
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    NAME(tensor_linear)(const u16* x, const float* scale, const u8* plane0, const u8* plane1, const u8* plane2,
                        const float* bias, const float* residual, float* out,
                        const __grid_constant__ LinearConstants c) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 first_row = blockIdx.x * WEIGHT_ROWS, first = blockIdx.y * TOKENS;
    const u32 count = min(TOKENS, c.tokens - first);
    const u32 row = min(first_row + threadIdx.x % 128, c.rows - 1);
    Acc acc;
    clear(acc);
    multiply(
        acc, shared, x, c.weight.cols, count, [&](u32 i) { return first + i; },
        row_address(plane0, plane1, plane2, c.weight, row), c.weight.kind);
    for_results(acc, count, [&](u32 token, u32 r, float v0, float v1) {
        r += first_row;
        const float factor = scale[first + token];
        const u64 at = (u64)(first + token) * c.rows + r;
        if (r < c.rows) out[at] = v0 * factor + (c.has_bias ? bias[r] : 0.0f) + (c.has_residual ? residual[at] : 0.0f);
        if (r + 1 < c.rows)
            out[at + 1] = v1 * factor + (c.has_bias ? bias[r + 1] : 0.0f) + (c.has_residual ? residual[at + 1] : 0.0f);
    });
}

// x (tokens, hidden), of which pair p takes row p / share → out (pairs, inner): the activated product of gate and up.
// A tile's 128 weight rows are 64 of gate and the same of up, 16 of each in turn, so that a lane holds both of a
// column; of experts without a gate, 128 of up. Grid: (inner / 64, or inner / 128 without a gate, tiles).
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    NAME(tensor_gate_up)(const u16* x, const float* scale, const u32* list, const Tile* tiles, const u8* slots,
                         const u32* table, const float* weights, const float* gate_bias, const float* up_bias,
                         float* out, const __grid_constant__ GateUpConstants c) {
    extern __shared__ __align__(128) u8 shared[];
    const Tile tile = tiles[blockIdx.y];
    if (tile.count == 0) return;
    const bool gated = c.activation != SQUARED_RELU;
    const u32 inner = c.up.rows, first_row = blockIdx.x * (gated ? 64 : 128), thread_row = threadIdx.x % 128;
    const u32 row = min(first_row + (gated ? thread_row / 32 * 16 + thread_row % 16 : thread_row), inner - 1);
    Acc acc;
    clear(acc);
    multiply(
        acc, shared, x, c.up.format.cols, tile.count, [&](u32 i) { return list[tile.first + i] / c.share; },
        expert_row(slots, table[tile.expert], gated && thread_row % 32 < 16 ? c.gate : c.up, row), c.up.format.kind);
    if (!gated) {
        for_results(acc, tile.count, [&](u32 token, u32 r, float v0, float v1) {
            r += first_row;
            const u32 pair = list[tile.first + token];
            const float factor = c.weighs ? scale[pair / c.share] * weights[pair] : scale[pair / c.share];
            const float* b = up_bias + (u64)tile.expert * inner + r;
            float* to = out + (u64)pair * inner + r;
            if (r < inner) to[0] = activation(0.0f, v0 * factor + (c.has_bias ? b[0] : 0.0f), c);
            if (r + 1 < inner) to[1] = activation(0.0f, v1 * factor + (c.has_bias ? b[1] : 0.0f), c);
        });
        return;
    }

    const u32 lane = threadIdx.x & 31, half = (threadIdx.x >> 5) & 1, quarter = threadIdx.x >> 6;
#pragma unroll
    for (u32 m = 0; m < 4; m++)
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 token = (2 * m + half) * 16 + lane / 4 + 8 * i;
            if (token >= tile.count) continue;
            const u32 pair = list[tile.first + token];
            const float factor = c.weighs ? scale[pair / c.share] * weights[pair] : scale[pair / c.share];
#pragma unroll
            for (u32 n = 0; n < 2; n++)
#pragma unroll
                for (u32 j = 0; j < 2; j++) {
                    const u32 r = first_row + quarter * 16 + n * 8 + 2 * (lane & 3) + j;
                    if (r >= inner) continue;
                    float gate = acc.v[m][n][2 * i + j] * factor, up = acc.v[m][n + 2][2 * i + j] * factor;
                    if (c.has_bias) {
                        gate += gate_bias[(u64)tile.expert * inner + r];
                        up += up_bias[(u64)tile.expert * inner + r];
                    }
                    out[(u64)pair * inner + r] = activation(gate, up, c);
                }
        }
}

struct DownConstants {
    Part part;
    u32 has_bias;
};

// x (pairs, inner) → out (pairs, hidden). Grid: (hidden / 128, tiles).
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    NAME(tensor_down)(const u16* x, const float* scale, const u32* list, const Tile* tiles, const u8* slots,
                      const u32* table, const float* bias, float* out, const __grid_constant__ DownConstants c) {
    extern __shared__ __align__(128) u8 shared[];
    const Tile tile = tiles[blockIdx.y];
    if (tile.count == 0) return;
    const u32 hidden = c.part.rows, first_row = blockIdx.x * WEIGHT_ROWS;
    const u32 row = min(first_row + threadIdx.x % 128, hidden - 1);
    Acc acc;
    clear(acc);
    multiply(
        acc, shared, x, c.part.format.cols, tile.count, [&](u32 i) { return list[tile.first + i]; },
        expert_row(slots, table[tile.expert], c.part, row), c.part.format.kind);
    for_results(acc, tile.count, [&](u32 token, u32 r, float v0, float v1) {
        r += first_row;
        const u32 pair = list[tile.first + token];
        const float factor = scale[pair];
        const float* b = bias + (u64)tile.expert * hidden + r;
        float* to = out + (u64)pair * hidden + r;
        if (r < hidden) to[0] = v0 * factor + (c.has_bias ? b[0] : 0.0f);
        if (r + 1 < hidden) to[1] = v1 * factor + (c.has_bias ? b[1] : 0.0f);
    });
}

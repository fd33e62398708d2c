// Products of some pairs with their experts' quantised weights on tensor cores (`panels.h`).
//
// Compiled once for each encoding: DTYPE, with names that end in it: NAME(…).
#include "panels.h"

const u32 THREADS = 256, WARPS = 8;
// Eights of tokens of a tile at most.
const u32 PARTS = 2;
// Groups of columns whose activations are in shared memory at once, twice.
const u32 CHUNK = 4;
// A panel of an encoding whose bytes take many registers is multiplied by itself, of others two are.
const int AT_ONCE = Weight::IS_LARGE ? 1 : 2;

// Activations of a tile: its first eight tokens' blocks, and how many eights there are.
struct Tokens {
    const uint4* x;
    u32 parts;
};

// Brings a chunk of groups of a tile's tokens to shared memory: (PARTS, CHUNK, 128) units.
DEVICE void copy_chunk(u32 to, const Tokens& tokens, u32 first, u32 groups) {
    const u32 count = min(CHUNK, groups - first) * GROUP_UNITS;
#pragma unroll
    for (u32 n = 0; n < PARTS; n++) {
        if (n >= tokens.parts) break;
        const uint4* from = tokens.x + ((u64)n * groups + first) * GROUP_UNITS;
        for (u32 i = threadIdx.x; i < count; i += THREADS) {
            const u32 place = i / GROUP_UNITS * GROUP_UNITS + place_of(i % GROUP_UNITS);
            copy_async_16(to + 16 * (n * CHUNK * GROUP_UNITS + place), from + i, true);
        }
    }
}

// Products with a group of columns, of which `x` are the activations of the first eight tokens.
template <int PANELS>
DEVICE void add_group(Sums<PANELS, PARTS>& sums, const Columns (&w)[PANELS][2], const uint4* x, u32 parts) {
    const u32 g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
    for (int quarter = 0; quarter < 4; quarter++) {
#pragma unroll
        for (u32 n = 0; n < PARTS; n++) {
            if (n >= parts) break;
            const uint4 b = x[n * CHUNK * GROUP_UNITS + place_of(g, t, quarter)];
#pragma unroll
            for (int m = 0; m < PANELS; m++) {
                u32 first[4], second[4];
                fragments(first, second, w, m, quarter);
                mma_16816(sums.v[m][n], first, b.x, b.y);
                mma_16816(sums.v[m][n], second, b.z, b.w);
            }
        }
    }
}

// Products of a warp's panels with a tile's tokens. All warps of the block come here with the same tokens.
template <int PANELS>
DEVICE void multiply(Sums<PANELS, PARTS>& sums, uint4* shared, const Rows<PANELS>& rows, const Format& f, const Tokens& tokens) {
    const u32 groups = (f.cols + GROUP - 1) / GROUP;
    constexpr u32 CHUNK_UNITS = PARTS * CHUNK * GROUP_UNITS;
    RawPanels<PANELS> raw;
    load_panels(raw, rows, 0, f);
    const u32 base = shared_address(shared);
    copy_chunk(base, tokens, 0, groups);
    copy_async_commit();
#pragma unroll 1
    for (u32 first = 0, half = 0; first < groups; first += CHUNK, half ^= 1) {
        if (first + CHUNK < groups) copy_chunk(base + 16 * (half ^ 1) * CHUNK_UNITS, tokens, first + CHUNK, groups);
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        const uint4* chunk = shared + half * CHUNK_UNITS;
        const u32 end = min(first + CHUNK, groups);
#pragma unroll 1
        for (u32 group = first; group < end; group++, chunk += GROUP_UNITS) {
            Columns w[PANELS][2];
            unpack_panels(w, raw, group, f);
            if (group + 1 < groups) load_panels(raw, rows, group + 1, f);
            add_group(sums, w, chunk, tokens.parts);
        }
        __syncthreads();
    }
}

// Products of gate and up of up to 16 pairs of an expert, activated: x by places of the list → out (places, inner). A warp
// has a panel of each, so that a lane holds both of a result; of experts without a gate, two of up.
// Grid: (inner / 128, or inner / 256 without a gate, tiles).
extern "C" __global__ void __launch_bounds__(THREADS, Weight::IS_LARGE ? 1 : 2)
    NAME(panel_gate_up)(const uint4* x, const float* scale, const u32* list, const Tile* tiles, const u8* slots,
                        const u32* table, const float* weights, const float* gate_bias, const float* up_bias, float* out,
                        const __grid_constant__ GateUpConstants c) {
    extern __shared__ uint4 shared[];
    after_previous();
    const Tile tile = tiles[blockIdx.y];
    if (tile.count == 0) return;
    const bool gated = c.activation != SQUARED_RELU;
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, inner = c.up.rows;
    const u32 first_row = (blockIdx.x * WARPS + warp) * (gated ? PANEL : 2 * PANEL), second_row = first_row + (gated ? 0 : PANEL);
    const u32 slot = table[tile.expert], groups = (c.up.format.cols + GROUP - 1) / GROUP;
    Rows<2> rows;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        rows.of[0][i] = expert_row(slots, slot, gated ? c.gate : c.up, min(first_row + 8 * i + lane / 4, inner - 1));
        rows.of[1][i] = expert_row(slots, slot, c.up, min(second_row + 8 * i + lane / 4, inner - 1));
    }
    Sums<2, PARTS> sums;
    clear(sums);
    multiply(sums, shared, rows, c.up.format,
             Tokens{x + (u64)(tile.first / EIGHT) * groups * GROUP_UNITS, (tile.count + EIGHT - 1) / EIGHT});
#pragma unroll
    for (u32 n = 0; n < PARTS; n++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 token = token_of(n, i), place = tile.first + token;
            if (token >= tile.count) continue;
            const float factor = c.weighs ? scale[place] * weights[list[place]] : scale[place];
            float* to = out + (u64)place * inner;
            auto bias = [&](const float* of, u32 row) { return c.has_bias ? of[(u64)tile.expert * inner + row] : 0.0f; };
            const u32 row = first_row + row_of(i), second = second_row + row_of(i);
            const float up = second < inner ? sums.v[1][n][i] * factor + bias(up_bias, second) : 0.0f;
            if (gated) {
                if (row < inner) to[row] = activation(sums.v[0][n][i] * factor + bias(gate_bias, row), up, c);
            } else {
                if (row < inner) to[row] = activation(0.0f, sums.v[0][n][i] * factor + bias(up_bias, row), c);
                if (second < inner) to[second] = activation(0.0f, up, c);
            }
        }
}

struct DownConstants {
    Part part;
    u32 has_bias;
};

// x by places of the list → out (pairs, hidden). Grid: (hidden / 256, tiles).
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    NAME(panel_down)(const uint4* x, const float* scale, const u32* list, const Tile* tiles, const u8* slots,
                     const u32* table, const float* bias, float* out, const __grid_constant__ DownConstants c) {
    extern __shared__ uint4 shared[];
    after_previous();
    const Tile tile = tiles[blockIdx.y];
    if (tile.count == 0) return;
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, hidden = c.part.rows, slot = table[tile.expert];
    const u32 groups = (c.part.format.cols + GROUP - 1) / GROUP;
#pragma unroll 1
    for (u32 turn = 0; turn < 2; turn += AT_ONCE) {
        const u32 first_row = (blockIdx.x * WARPS + warp) * 2 * PANEL + turn * PANEL;
        Rows<AT_ONCE> rows;
#pragma unroll
        for (u32 m = 0; m < AT_ONCE; m++)
#pragma unroll
            for (u32 i = 0; i < 2; i++)
                rows.of[m][i] = expert_row(slots, slot, c.part, min(first_row + PANEL * m + 8 * i + lane / 4, hidden - 1));
        Sums<AT_ONCE, PARTS> sums;
        clear(sums);
        multiply(sums, shared, rows, c.part.format,
                 Tokens{x + (u64)(tile.first / EIGHT) * groups * GROUP_UNITS, (tile.count + EIGHT - 1) / EIGHT});
#pragma unroll
        for (u32 m = 0; m < AT_ONCE; m++)
#pragma unroll
            for (u32 n = 0; n < PARTS; n++)
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    const u32 token = token_of(n, i), row = first_row + PANEL * m + row_of(i), place = tile.first + token;
                    if (token >= tile.count || row >= hidden) continue;
                    const float v = sums.v[m][n][i] * scale[place];
                    out[(u64)list[place] * hidden + row] = c.has_bias ? v + bias[(u64)tile.expert * hidden + row] : v;
                }
    }
}

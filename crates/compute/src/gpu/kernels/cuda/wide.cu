// Products of many tokens with weights of one encoding: DTYPE, with names that end in it: NAME(…).
//
// x comes as `wide_enter` writes it, each row times a power of two; `scale` undoes it. Grids are as many blocks as there are
// multiprocessors, at most as many as tiles; clusters are as many as tiles.
#include "wide.h"

struct WideLinearConstants {
    Format weight;
    u32 rows, tokens;
    // Tokens of a tile, a multiple of eight, as `wide_enter` was told.
    u32 width;
    // Blocks of a cluster, which have a slice of the columns of one tile each; 1 if there are none.
    u32 slices;
    u32 has_bias, has_residual;
};

struct WideGateUpConstants {
    GateUpConstants products;
    u32 tiles;
};

struct WideDownConstants {
    Part part;
    u32 has_bias;
    u32 tiles;
};

#if HAS_WARPGROUPS

DEVICE u32 filled_up(u32 cols) { return (cols + STEP - 1) / STEP * STEP; }

// Tiles in the order: rows of one tile of tokens, then the next. Those that the blocks of a cluster share have fewer tokens.
template <bool SLICED>
struct LinearJob {
    static const u32 MOST = SLICED ? 128 : 176;
    const u8 *x, *plane0, *plane1, *plane2;
    const float *scale, *bias, *residual;
    float* out;
    const WideLinearConstants& c;

    DEVICE u32 slices() const { return SLICED ? c.slices : 1; }
    DEVICE u32 most() const { return SLICED ? MOST : c.width > 160 ? MOST : 160; }
    DEVICE u32 row_tiles() const { return (c.rows + ROWS - 1) / ROWS; }
    DEVICE u32 first(u32 tile) const { return tile / row_tiles() * c.width; }
    DEVICE u32 row(u32 tile) const { return tile % row_tiles() * ROWS + threadIdx.x / 32 * 16; }
    DEVICE Tokens tokens(u32 tile) const {
        const u32 from = first(tile);
        return {x + (u64)from * filled_up(c.weight.cols) * 2, from < c.tokens ? min(c.width, c.tokens - from) : 0};
    }
    DEVICE void rows(u32 tile, RowAddress (&to)[2]) const {
        const u32 r = row(tile) + threadIdx.x % 32 / 4;
        to[0] = row_address(plane0, plane1, plane2, c.weight, min(r, c.rows - 1));
        to[1] = row_address(plane0, plane1, plane2, c.weight, min(r + 8, c.rows - 1));
    }
    template <int N>
    DEVICE void finish(u32 tile, const float (&d)[N / 2], u8* stored, Range of) const {
        const u32 from = first(tile), r = row(tile) + (threadIdx.x & 3) * 4, left = r < c.rows ? c.rows - r : 0;
        float more[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) more[i] = c.has_bias && i < left ? bias[r + i] : 0.0f;
        const auto result = [&](u32 token) { return Result{from + token, scale[from + token]}; };
        for_results<N>(d, stored, of, result, [&](const Result& own, const float* values) {
            const u64 at = (u64)own.row * c.rows + r;
            float v[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                v[i] = values[(threadIdx.x & 3) * 4 + i] * own.factor + more[i];
                if (c.has_residual && i < left) v[i] += residual[at + i];
            }
            store_4(out + at, v, left, c.rows % 4 == 0);
        });
    }
};

// Tiles of an expert's tokens: what both of its products have in common.
struct ExpertJob {
    static const u32 MOST = 160;
    const u8* x;
    const float* scale;
    const u32* list;
    const Tile* tiles;
    const u8* slots;
    const u32* table;
    u32 cols, row_tiles, count;

    DEVICE u32 slices() const { return 1; }
    DEVICE u32 most() const { return MOST; }
    DEVICE Tile tile_of(u32 tile) const { return tiles[tile / row_tiles]; }
    DEVICE Tokens tokens(u32 tile) const {
        if (tile / row_tiles >= count) return {x, 0};
        const Tile of = tile_of(tile);
        return {x + (u64)of.first * filled_up(cols) * 2, of.count};
    }
    DEVICE RowAddress row_of(u32 tile, const Part& part, u32 row) const {
        return expert_row(slots, table[tile_of(tile).expert], part, min(row, part.rows - 1));
    }
};

struct GateUpJob : ExpertJob {
    const float *weights, *gate_bias, *up_bias;
    float* out;
    const GateUpConstants& c;
    // Whether a warp's 16 rows are eight of gate and the same of up, so that a lane has both of a column.
    bool gated;

    DEVICE u32 row(u32 tile) const {
        return tile % row_tiles * (gated ? ROWS / 2 : ROWS) + threadIdx.x / 32 * (gated ? 8 : 16);
    }
    DEVICE void rows(u32 tile, RowAddress (&to)[2]) const {
        const u32 r = row(tile) + threadIdx.x % 32 / 4;
        to[0] = row_of(tile, gated ? c.gate : c.up, r);
        to[1] = row_of(tile, c.up, r + (gated ? 0 : 8));
    }
    template <int N>
    DEVICE void finish(u32 tile, const float (&d)[N / 2], u8* stored, Range of) const {
        const Tile from = tile_of(tile);
        // A lane takes two columns at a time: of gated ones once, of others twice.
        const u32 inner = c.up.rows, of_lane = gated ? 2 : 4;
        const auto result = [&](u32 token) {
            const u32 pair = list[from.first + token];
            return Result{pair, scale[from.first + token] * (c.weighs ? weights[pair] : 1.0f)};
        };
        for_results<N>(d, stored, of, result, [&](const Result& own, const float* values) {
#pragma unroll 1
            for (u32 at = (threadIdx.x & 3) * of_lane, end = at + of_lane; at < end; at += 2)
                two(from.expert, (u64)own.row * inner, row(tile) + at, values + at, own.factor);
        });
    }
    // Columns r and the next, of which `values` has gate and, eight further on, up; or up alone.
    DEVICE void two(u32 expert, u64 at, u32 r, const float* values, float factor) const {
        const u32 inner = c.up.rows;
        float v[2];
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            if (r + i >= inner) continue;
            float gate = gated ? values[i] * factor : 0.0f, up = values[gated ? 8 + i : i] * factor;
            if (c.has_bias) {
                gate += gated ? gate_bias[(u64)expert * inner + r + i] : 0.0f;
                up += up_bias[(u64)expert * inner + r + i];
            }
            v[i] = activation(gate, up, c);
        }
        if (r + 1 < inner && inner % 2 == 0) {
            *(float2*)(out + at + r) = make_float2(v[0], v[1]);
        } else {
            if (r < inner) out[at + r] = v[0];
            if (r + 1 < inner) out[at + r + 1] = v[1];
        }
    }
};

struct DownJob : ExpertJob {
    const float* bias;
    float* out;
    const WideDownConstants& c;

    DEVICE u32 row(u32 tile) const { return tile % row_tiles * ROWS + threadIdx.x / 32 * 16; }
    DEVICE void rows(u32 tile, RowAddress (&to)[2]) const {
        const u32 r = row(tile) + threadIdx.x % 32 / 4;
        to[0] = row_of(tile, c.part, r);
        to[1] = row_of(tile, c.part, r + 8);
    }
    template <int N>
    DEVICE void finish(u32 tile, const float (&d)[N / 2], u8* stored, Range of) const {
        const Tile from = tile_of(tile);
        const u32 hidden = c.part.rows, r = row(tile) + (threadIdx.x & 3) * 4, left = r < hidden ? hidden - r : 0;
        float more[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) more[i] = c.has_bias && i < left ? bias[(u64)from.expert * hidden + r + i] : 0.0f;
        const auto result = [&](u32 token) { return Result{list[from.first + token], scale[from.first + token]}; };
        for_results<N>(d, stored, of, result, [&](const Result& own, const float* values) {
            float v[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) v[i] = values[(threadIdx.x & 3) * 4 + i] * own.factor + more[i];
            store_4(out + (u64)own.row * hidden + r, v, left, hidden % 4 == 0);
        });
    }
};

#endif // HAS_WARPGROUPS

// x (tokens, cols) · weightᵀ + bias + residual → out (tokens, rows).
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    NAME(wide_linear)(const u8* x, const float* scale, const u8* plane0, const u8* plane1, const u8* plane2,
                      const float* bias, const float* residual, float* out,
                      const __grid_constant__ WideLinearConstants c) {
#if HAS_WARPGROUPS
    extern __shared__ u8 shared[];
    const LinearJob<false> job = {x, plane0, plane1, plane2, scale, bias, residual, out, c};
    multiply(job, shared, c.weight);
#endif
}

// The same where a cluster has a tile: its blocks `c.slices` slices of the columns.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    NAME(wide_linear_sliced)(const u8* x, const float* scale, const u8* plane0, const u8* plane1, const u8* plane2,
                             const float* bias, const float* residual, float* out,
                             const __grid_constant__ WideLinearConstants c) {
#if HAS_WARPGROUPS
    extern __shared__ u8 shared[];
    const LinearJob<true> job = {x, plane0, plane1, plane2, scale, bias, residual, out, c};
    multiply(job, shared, c.weight);
#endif
}

// x (places, hidden) → out (pairs, inner): the activated product of gate and up.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    NAME(wide_gate_up)(const u8* x, const float* scale, const u32* list, const Tile* tiles, const u8* slots,
                       const u32* table, const float* weights, const float* gate_bias, const float* up_bias, float* out,
                       const __grid_constant__ WideGateUpConstants c) {
#if HAS_WARPGROUPS
    extern __shared__ u8 shared[];
    const GateUpConstants& own = c.products;
    const bool gated = own.activation != SQUARED_RELU;
    const u32 row_tiles = (own.up.rows + (gated ? ROWS / 2 : ROWS) - 1) / (gated ? ROWS / 2 : ROWS);
    const GateUpJob job = {{x, scale, list, tiles, slots, table, own.up.format.cols, row_tiles, c.tiles},
                           weights, gate_bias, up_bias, out, own, gated};
    multiply(job, shared, own.up.format);
#endif
}

// x (places, inner) → out (pairs, hidden).
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    NAME(wide_down)(const u8* x, const float* scale, const u32* list, const Tile* tiles, const u8* slots,
                    const u32* table, const float* bias, float* out, const __grid_constant__ WideDownConstants c) {
#if HAS_WARPGROUPS
    extern __shared__ u8 shared[];
    const u32 row_tiles = (c.part.rows + ROWS - 1) / ROWS;
    const DownJob job = {{x, scale, list, tiles, slots, table, c.part.format.cols, row_tiles, c.tiles}, bias, out, c};
    multiply(job, shared, c.part.format);
#endif
}

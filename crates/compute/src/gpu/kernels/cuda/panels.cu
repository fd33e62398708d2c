// Products of some tokens with quantised weights on tensor cores, whose weights go from memory straight into registers: a
// warp multiplies panels of 16 weight rows by up to 16 tokens, which stand on the narrow side. Dense, or grouped by expert.
//
// Activations come as f16 in blocks of eight tokens × eight columns, 128 bytes each: (tokens / 8, columns / 8, 8, 8), with
// columns filled up with zeros to a multiple of 128; `blocks_of` has scaled each token by a power of two, and `scale` undoes
// it. Of 128 columns a lane unpacks 32 of both of its rows of a panel. In which order a product takes columns is free, as
// long as both sides agree.
//
// Compiled once for each encoding: DTYPE, with names that end in it: NAME(…).
#include "matrices.h"

const u32 THREADS = 256, WARPS = 8;
// Rows of a panel, and tokens that a product takes at once: a tile has up to PARTS times as many, 2 or 8.
const u32 PANEL = 16, EIGHT = 8, NARROW = 2, WIDE = 8;
// Columns that a warp takes at once, and units of 16 bytes that they are of eight tokens.
const u32 GROUP = 128, GROUP_UNITS = 128;
// Groups of columns whose activations are in shared memory at once, twice.
const u32 CHUNK = 4;
// A panel of an encoding whose bytes take many registers is multiplied by itself, of others two are.
const int AT_ONCE = Weight::IS_LARGE ? 1 : 2;

// Sums of panels: rows g and g + 8, g = lane / 4, of tokens 2t and 2t + 1, t = lane % 4, of each eight.
template <int PANELS, u32 PARTS>
struct Sums {
    float v[PANELS][PARTS][4];
};

// A lane's rows of panels.
template <int PANELS>
struct Rows {
    RowAddress of[PANELS][2];
};

template <int PANELS>
struct RawPanels {
    typename Weight::Raw of[PANELS][2];
};

// Activations of a tile: its first eight tokens' blocks, and how many eights there are.
struct Tokens {
    const uint4* x;
    u32 parts;
};

// Which eight columns of 128 a lane multiplies in a quarter.
DEVICE u32 eight_of(u32 t, u32 quarter) {
    return Weight::SPLIT ? 8 * (t >> 1) + 2 * (t & 1) + 4 * (quarter >> 1) + (quarter & 1) : 4 * t + quarter;
}

DEVICE bool is_there(u32 group, u32 t, u32 cols) {
    return Weight::SPLIT || GROUP * group + 32 * t < cols;
}

template <int PANELS>
DEVICE void load_panels(RawPanels<PANELS>& raw, const Rows<PANELS>& rows, u32 group, const Format& f) {
    const u32 t = threadIdx.x & 3, step = GROUP * group + 64 * (t >> 1);
    if (!is_there(group, t, f.cols)) return;
#pragma unroll
    for (int m = 0; m < PANELS; m++) {
        Weight::load(raw.of[m][0], rows.of[m][0], step, t & 1, f.kind);
        Weight::load(raw.of[m][1], rows.of[m][1], step, t & 1, f.kind);
    }
}

// Brings a chunk of groups of a tile's tokens to shared memory: (PARTS, CHUNK, 128) units.
template <u32 PARTS>
DEVICE void copy_chunk(u32 to, const Tokens& tokens, u32 first, u32 groups) {
    const u32 count = min(CHUNK, groups - first) * GROUP_UNITS;
#pragma unroll
    for (u32 n = 0; n < PARTS; n++) {
        if (n >= tokens.parts) break;
        const uint4* from = tokens.x + ((u64)n * groups + first) * GROUP_UNITS;
        for (u32 i = threadIdx.x; i < count; i += THREADS) copy_async_16(to + 16 * (n * CHUNK * GROUP_UNITS + i), from + i, true);
    }
}

// Products with a group of columns, of which `x` are the activations of the first eight tokens.
template <int PANELS, u32 PARTS>
DEVICE void add_group(Sums<PANELS, PARTS>& sums, const Columns (&w)[PANELS][2], const uint4* x, u32 parts) {
    const u32 t = threadIdx.x & 3;
#pragma unroll
    for (int quarter = 0; quarter < 4; quarter++) {
#pragma unroll
        for (u32 n = 0; n < PARTS; n++) {
            if (n >= parts) break;
            const uint4 b = x[n * CHUNK * GROUP_UNITS + EIGHT * eight_of(t, quarter)];
#pragma unroll
            for (int m = 0; m < PANELS; m++) {
                const u32(&low)[8] = quarter < 2 ? w[m][0].a : w[m][0].b;
                const u32(&high)[8] = quarter < 2 ? w[m][1].a : w[m][1].b;
                const int at = 4 * (quarter & 1);
                const u32 first[4] = {low[at], high[at], low[at + 1], high[at + 1]};
                const u32 second[4] = {low[at + 2], high[at + 2], low[at + 3], high[at + 3]};
                mma_16816(sums.v[m][n], first, b.x, b.y);
                mma_16816(sums.v[m][n], second, b.z, b.w);
            }
        }
    }
}

// Products of a warp's panels with a tile's tokens, of groups slice, slice + slices, … of columns. All warps of the block come
// here with the same tokens. `begin` is called when what follows needs the kernel in front.
template <int PANELS, u32 PARTS, class Begin>
DEVICE void multiply(Sums<PANELS, PARTS>& sums, uint4* shared, const Rows<PANELS>& rows, const Format& f, u32 slice, u32 slices,
                     Begin begin) {
    const u32 lane = threadIdx.x & 31, t = lane & 3, groups = (f.cols + GROUP - 1) / GROUP;
    constexpr u32 CHUNK_UNITS = PARTS * CHUNK * GROUP_UNITS;
    RawPanels<PANELS> raw;
    if (slice < groups) load_panels(raw, rows, slice, f);
    const Tokens tokens = begin();
    const u32 base = shared_address(shared);
    copy_chunk<PARTS>(base, tokens, 0, groups);
    copy_async_commit();
    u32 group = slice;
#pragma unroll 1
    for (u32 first = 0, half = 0; first < groups; first += CHUNK, half ^= 1) {
        if (first + CHUNK < groups) copy_chunk<PARTS>(base + 16 * (half ^ 1) * CHUNK_UNITS, tokens, first + CHUNK, groups);
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        const uint4* chunk = shared + half * CHUNK_UNITS + (lane >> 2);
        const u32 end = min(first + CHUNK, groups);
#pragma unroll 1
        for (; group < end; group += slices) {
            Columns w[PANELS][2];
            const bool present = is_there(group, t, f.cols);
#pragma unroll
            for (int m = 0; m < PANELS; m++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    if (present) {
                        Weight::unpack(raw.of[m][i], GROUP * group + 64 * (t >> 1), t & 1, w[m][i]);
                    } else {
#pragma unroll
                        for (int j = 0; j < 8; j++) w[m][i].a[j] = w[m][i].b[j] = 0;
                    }
                }
            if (group + slices < groups) load_panels(raw, rows, group + slices, f);
            add_group(sums, w, chunk + (group - first) * GROUP_UNITS, tokens.parts);
        }
        __syncthreads();
    }
}

template <int PANELS, u32 PARTS>
DEVICE void clear(Sums<PANELS, PARTS>& sums) {
#pragma unroll
    for (int m = 0; m < PANELS; m++)
#pragma unroll
        for (u32 n = 0; n < PARTS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums.v[m][n][i] = 0.0f;
}

// Of result i of a part n: which token of the tile, and which row of the panel.
DEVICE u32 token_of(u32 n, u32 i) { return EIGHT * n + 2 * (threadIdx.x & 3) + (i & 1); }
DEVICE u32 row_of(u32 i) { return 8 * (i >> 1) + ((threadIdx.x & 31) >> 2); }

// Products of one input that are one dispatch, as in `../few_rows.h`: `groups` blocks make each.
struct ProductPart {
    Format format;
    u32 planes[3];
    u32 bias;
    u32 rows;
    u32 groups, span;
};

const u32 WEIGHT_UNIT = 256, NONE = 0xffffffffu;

struct ProductsConstants {
    ProductPart parts[3];
    u32 tokens;
    // Warps that share a panel, each with a slice of its columns.
    u32 slices;
    u32 has_residual;
};

// Products of PANELS panels a warp with tiles of 8 · PARTS tokens: x (tokens, cols) · weightᵀ + bias + residual → out
// (tokens, rows), of up to three weights. Grid: (blocks of all parts, tiles).
template <int PANELS, u32 PARTS>
DEVICE void products(const u8* weights, const uint4* x, const float* scale, const float* residual, float* const (&outs)[3],
                     const ProductsConstants& c) {
    extern __shared__ uint4 shared[];
    u32 block = blockIdx.x, which = 0;
    while (which < 2 && block >= c.parts[which].groups) block -= c.parts[which++].groups;
    const ProductPart& part = c.parts[which];
    float* out = which == 0 ? outs[0] : which == 1 ? outs[1] : outs[2];
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, own = warp / c.slices, slice = warp % c.slices;
    const u32 first_row = (block * (WARPS / c.slices) + own) * PANEL * PANELS, first = blockIdx.y * EIGHT * PARTS;
    const u32 count = min(EIGHT * PARTS, c.tokens - first), groups = (part.format.cols + GROUP - 1) / GROUP;
    auto plane = [&](u32 at) { return weights + (u64)at * WEIGHT_UNIT; };
    Rows<PANELS> rows;
#pragma unroll
    for (u32 m = 0; m < PANELS; m++)
#pragma unroll
        for (u32 i = 0; i < 2; i++)
            rows.of[m][i] = row_address(plane(part.planes[0]), plane(part.planes[1]), plane(part.planes[2]), part.format,
                                        min(first_row + PANEL * m + 8 * i + lane / 4, part.rows - 1));
    Sums<PANELS, PARTS> sums;
    clear(sums);
    multiply(sums, shared, rows, part.format, slice, c.slices, [&] {
        after_previous();
        return Tokens{x + (u64)(first / EIGHT) * groups * GROUP_UNITS, (count + EIGHT - 1) / EIGHT};
    });
    auto store = [&](u32 m, u32 n, u32 i, float v) {
        const u32 token = token_of(n, i), row = first_row + PANEL * m + row_of(i);
        if (token >= count || row >= part.rows) return;
        const u64 at = (u64)(first + token) * part.rows + row;
        v *= scale[first + token];
        if (part.bias != NONE) v += ((const float*)plane(part.bias))[row];
        out[at] = c.has_residual ? v + residual[at] : v;
    };
    if (c.slices == 1) {
#pragma unroll
        for (u32 m = 0; m < PANELS; m++)
#pragma unroll
            for (u32 n = 0; n < PARTS; n++)
#pragma unroll
                for (u32 i = 0; i < 4; i++) store(m, n, i, sums.v[m][n][i]);
        return;
    }
    // (warps, results, lanes): a warp adds up some of what the slices of its panels have.
    constexpr u32 RESULTS = PANELS * PARTS * 4;
    float* kept = (float*)shared;
#pragma unroll
    for (u32 m = 0; m < PANELS; m++)
#pragma unroll
        for (u32 n = 0; n < PARTS; n++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) kept[(warp * RESULTS + (m * PARTS + n) * 4 + i) * 32 + lane] = sums.v[m][n][i];
    __syncthreads();
    for (u32 at = slice; at < RESULTS; at += c.slices) {
        float v = 0.0f;
        for (u32 s = 0; s < c.slices; s++) v += kept[((own * c.slices + s) * RESULTS + at) * 32 + lane];
        store(at / (4 * PARTS), at / 4 % PARTS, at % 4, v);
    }
}

// Two panels a warp, tiles of 16 tokens.
extern "C" __global__ void __launch_bounds__(THREADS, Weight::IS_LARGE ? 1 : 2)
    NAME(panel_products)(const u8* weights, const uint4* x, const float* scale, const float* residual, float* out0, float* out1,
                         float* out2, const __grid_constant__ ProductsConstants c) {
    products<2, NARROW>(weights, x, scale, residual, {out0, out1, out2}, c);
}

// Two panels a warp, tiles of 64 tokens: for more work than a device does at once.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    NAME(panel_products_wide)(const u8* weights, const uint4* x, const float* scale, const float* residual, float* out0,
                              float* out1, float* out2, const __grid_constant__ ProductsConstants c) {
    products<2, WIDE>(weights, x, scale, residual, {out0, out1, out2}, c);
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
    constexpr u32 PARTS = NARROW;
    Sums<2, PARTS> sums;
    clear(sums);
    multiply(sums, shared, rows, c.up.format, 0, 1, [&] {
        return Tokens{x + (u64)(tile.first / EIGHT) * groups * GROUP_UNITS, (tile.count + EIGHT - 1) / EIGHT};
    });
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
        Sums<AT_ONCE, NARROW> sums;
        clear(sums);
        multiply(sums, shared, rows, c.part.format, 0, 1, [&] {
            return Tokens{x + (u64)(tile.first / EIGHT) * groups * GROUP_UNITS, (tile.count + EIGHT - 1) / EIGHT};
        });
#pragma unroll
        for (u32 m = 0; m < AT_ONCE; m++)
#pragma unroll
            for (u32 n = 0; n < NARROW; n++)
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    const u32 token = token_of(n, i), row = first_row + PANEL * m + row_of(i), place = tile.first + token;
                    if (token >= tile.count || row >= hidden) continue;
                    const float v = sums.v[m][n][i] * scale[place];
                    out[(u64)list[place] * hidden + row] = c.has_bias ? v + bias[(u64)tile.expert * hidden + row] : v;
                }
    }
}

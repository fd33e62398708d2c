// Products of many rows on simdgroup matrices, for every encoding: what `matmul_any` and `moe_matmul_any` do, with their
// arguments and grids. A group of 256 threads makes a tile of 64 outputs of 64 rows of activations, in f32.
#include "tiles.h"

// Floats from a line of a tile to the next: weights (32 columns, 64 outputs), then activations (64 rows, 32 columns);
// at the end the results (64 rows, 64 outputs) in place of both.
CONSTANT uint W_LINE = 68, X_LINE = 36, TILES = 32 * 68 + 64 * 36;

// The product of the tile's weights with its activations → `tiles`. A thread brings 8 columns of a row of each: `w` and
// `x`, if there are such. A warp makes 32 outputs of 16 rows of activations.
template <uint D>
DEVICE void tile_product(CTX, const Format f, const Row w, bool has_w, GPTR(const float) x, bool has_x,
                         SPTR(float) tiles) {
    const SPTR(float) tile_x = tiles + 32 * W_LINE;
    const uint line = ctx.thread() / 4, part = ctx.thread() % 4;
    const uint first_w = ctx.warp() % 2 * 32, first_x = ctx.warp() / 2 * 16;
    simdgroup_float8x8 sums[2][4];
    for (uint a = 0; a < 2; ++a) {
        for (uint b = 0; b < 4; ++b) sums[a][b] = make_filled_simdgroup_matrix<float, 8>(0.0f);
    }
    for (uint col = 0; col < f.cols; col += 32) {
        const uint i = col / 8 + part;
        Float8 wv, xv;
        for (uint j = 0; j < 8; ++j) wv.v[j] = xv.v[j] = 0.0f;
        if (8 * i < f.cols) {
            if (has_w) wv = load8<D>(f, w, i);
            if (has_x) xv = activations8(x, f.cols, i);
        }
        for (uint j = 0; j < 8; ++j) {
            tiles[(8 * part + j) * W_LINE + line] = wv.v[j];
            tile_x[line * X_LINE + 8 * part + j] = xv.v[j];
        }
        barrier(ctx);
        for (uint k = 0; k < 32; k += 8) {
            simdgroup_float8x8 xs[2], ws[4];
            for (uint a = 0; a < 2; ++a) simdgroup_load(xs[a], tile_x + (first_x + 8 * a) * X_LINE + k, X_LINE);
            for (uint b = 0; b < 4; ++b) simdgroup_load(ws[b], tiles + k * W_LINE + first_w + 8 * b, W_LINE);
            for (uint a = 0; a < 2; ++a) {
                for (uint b = 0; b < 4; ++b) simdgroup_multiply_accumulate(sums[a][b], xs[a], ws[b], sums[a][b]);
            }
        }
        barrier(ctx);
    }
    for (uint a = 0; a < 2; ++a) {
        for (uint b = 0; b < 4; ++b) {
            simdgroup_store(sums[a][b], tiles + (first_x + 8 * a) * W_LINE + first_w + 8 * b, W_LINE);
        }
    }
    barrier(ctx);
}

template <uint D>
DEVICE void matmul(CTX, const LinearConstants c, const Row planes, GPTR(const float) x, GPTR(const float) bias,
                   GPTR(const float) residual, GPTR(float) out, SPTR(float) tiles) {
    const uint row0 = ctx.group_x() * 64, token0 = ctx.group_y() * 64, line = ctx.thread() / 4;
    const bool has_w = row0 + line < c.rows, has_x = token0 + line < c.tokens;
    const Row w = row_of(planes.plane0, planes.plane1, planes.plane2, c.weight, has_w ? row0 + line : 0);
    tile_product<D>(ctx, c.weight, w, has_w, x + (ulong)(has_x ? token0 + line : 0) * c.weight.cols, has_x, tiles);
    for (uint i = ctx.thread(); i < 64 * 64; i += ctx.threads()) {
        const uint row = row0 + i % 64, token = token0 + i / 64;
        if (row >= c.rows || token >= c.tokens) continue;
        const ulong at = (ulong)token * c.rows + row;
        float sum = tiles[i / 64 * W_LINE + i % 64];
        if (c.has_bias) sum += bias[row];
        if (c.has_residual) sum += residual[at];
        out[at] = sum;
    }
}

template <uint D>
DEVICE void moe_matmul(CTX, const ExpertConstants c, GPTR(const uchar) slots, GPTR(const uint) table,
                       GPTR(const uint) list,
                       const Block block, GPTR(const float) x, GPTR(const float) weights, GPTR(const float) bias,
                       GPTR(float) out, SPTR(float) tiles) {
    const uint row0 = ctx.group_x() * 64, line = ctx.thread() / 4;
    const bool has_w = row0 + line < c.part.rows, has_x = line < block.count;
    const Row w = expert_row(slots, table[block.expert], c.part, has_w ? row0 + line : 0);
    const uint own = list[block.start + (has_x ? line : 0)];
    tile_product<D>(ctx, c.part.format, w, has_w, x + (ulong)(own / c.share) * c.part.format.cols, has_x, tiles);
    for (uint i = ctx.thread(); i < block.count * 64; i += ctx.threads()) {
        const uint row = row0 + i % 64;
        if (row >= c.part.rows) continue;
        const uint pair = list[block.start + i / 64];
        float sum = tiles[i / 64 * W_LINE + i % 64];
        if (c.weighs) sum *= weights[pair];
        if (c.has_bias) sum += bias[block.expert * c.part.rows + row];
        out[(ulong)pair * c.part.rows + row] = sum;
    }
}

#define OF_ENCODING(name, D)                                                                                        \
    KERNEL(simdgroup_matmul_##name, LinearConstants, (const uchar, plane0), (const uchar, plane1),                  \
           (const uchar, plane2), (const float, x), (const float, bias), (const float, residual), (float, out)) {   \
        SHARED(float, tiles, TILES);                                                                                \
        const Row planes = {plane0, plane1, plane2};                                                                \
        matmul<D>(ctx, c, planes, x, bias, residual, out, tiles);                                                   \
    }                                                                                                               \
    KERNEL(simdgroup_moe_matmul_##name, ExpertConstants, (const uchar, slots), (const uint, table),                 \
           (const uint, list), (const Block, blocks), (const uint, grid), (const float, x), (const float, weights), \
           (const float, bias), (float, out)) {                                                                     \
        SHARED(float, tiles, TILES);                                                                                \
        if (ctx.group_y() >= grid[1]) return;                                                                       \
        moe_matmul<D>(ctx, c, slots, table, list, blocks[ctx.group_y()], x, weights, bias, out, tiles);             \
    }

OF_ENCODING(any, ANY)
#define OF_ONE(name, D, code, few, early, tensor, simdgroup) IF_##simdgroup(OF_ENCODING(name, D))
ENCODINGS(OF_ONE)

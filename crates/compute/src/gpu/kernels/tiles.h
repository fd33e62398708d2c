// Products of many rows in tiles of 64 outputs of 64 rows of activations: what kernels are told, and how the common ones
// make a tile.
#pragma once
#include "experts.h"

// A product with a resident weight.
struct LinearConstants {
    Format weight;
    // Output features.
    uint rows;
    // Rows of activations.
    uint tokens;
    // Whether `bias` and `residual` are added.
    uint has_bias, has_residual;
};

// A product with a matrix of each pair's expert.
struct ExpertConstants {
    Part part;
    // Pairs that share a row of x: top_k if x is (tokens, cols), 1 if it is (pairs, cols).
    uint share;
    // Whether `bias` (experts, rows) is added, and whether rows of x count as much as `weights` (pairs) says.
    uint has_bias, weighs;
};

CONSTANT uint BLOCK_PAIRS = 64;

// Up to BLOCK_PAIRS pairs of one expert: `list` from `start` on.
struct Block {
    uint expert, start, count;
};

// Floats from a column of a tile to the next, and of a tile of 32 columns.
CONSTANT uint TILE_LINE = 65, TILE_FLOATS = 32 * 65;

// Outputs thread % 16 + 16a of rows of activations thread / 16 + 16b.
struct TileSums {
    float v[4][4];
};

// The products of 64 rows of a weight with 64 rows of activations, by 256 threads; a thread loads 8 columns of one row of
// each, `w` and `x`, if there are such.
DEVICE TileSums tile_sums(CTX, const Format f, const Row w, bool has_w, GPTR(const float) x, bool has_x,
                          SPTR(float) tile_w, SPTR(float) tile_x) {
    const uint line = ctx.thread() / 4, part = ctx.thread() % 4;
    const uint my_row = ctx.thread() % 16, my_x = ctx.thread() / 16;
    TileSums sums;
    for (uint a = 0; a < 4; ++a)
        for (uint b = 0; b < 4; ++b) sums.v[a][b] = 0.0f;
    for (uint col = 0; col < f.cols; col += 32) {
        const uint i = col / 8 + part;
        Float8 wv, xv;
        for (uint j = 0; j < 8; ++j) wv.v[j] = xv.v[j] = 0.0f;
        if (8 * i < f.cols) {
            if (has_w) wv = load8<ANY>(f, w, i);
            if (has_x) xv = activations8(x, f.cols, i);
        }
        for (uint j = 0; j < 8; ++j) {
            tile_w[(8 * part + j) * TILE_LINE + line] = wv.v[j];
            tile_x[(8 * part + j) * TILE_LINE + line] = xv.v[j];
        }
        barrier(ctx);
        for (uint k = 0; k < 32; ++k) {
            float ws[4], xs[4];
            for (uint a = 0; a < 4; ++a) {
                ws[a] = tile_w[k * TILE_LINE + my_row + 16 * a];
                xs[a] = tile_x[k * TILE_LINE + my_x + 16 * a];
            }
            for (uint a = 0; a < 4; ++a)
                for (uint b = 0; b < 4; ++b) sums.v[a][b] += ws[a] * xs[b];
        }
        barrier(ctx);
    }
    return sums;
}

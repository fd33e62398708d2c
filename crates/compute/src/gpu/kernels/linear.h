// Products with one weight matrix, and rows of a table.
#include "tiles.h"

struct EmbedConstants {
    Format table;
};

// Rows of the table (vocab_size, cols) by token → out (rows, cols). A group copies one row.
KERNEL(embed, EmbedConstants, (const uchar, plane0), (const uchar, plane1), (const uchar, plane2), (const uint, tokens),
       (float, out)) {
    const uint r = ctx.group_x();
    const Row row = row_of(plane0, plane1, plane2, c.table, tokens[r]);
    for (uint i = ctx.thread(); 8 * i < c.table.cols; i += ctx.threads()) {
        const Float8 w = load8<ANY>(c.table, row, i);
        for (uint j = 0; j < 8 && 8 * i + j < c.table.cols; ++j) out[(ulong)r * c.table.cols + 8 * i + j] = w.v[j];
    }
}

// x (tokens, cols) · weightᵀ + bias + residual → out (tokens, rows), for few tokens: a warp makes one output of one
// token. Grid: (rows / warps of a group, tokens).
template <uint D>
DEVICE void matvec(CTX, const LinearConstants c, const Row weight, GPTR(const float) x, GPTR(const float) bias,
                   GPTR(const float) residual, GPTR(float) out) {
    const uint row = ctx.group_x() * ctx.warps() + ctx.warp(), token = ctx.group_y();
    if (row >= c.rows) return;
    const Row w = row_of(weight.plane0, weight.plane1, weight.plane2, c.weight, row);
    float sum = lane_sum(ctx, lane_dot<D>(ctx, c.weight, w, x + (ulong)token * c.weight.cols));
    if (ctx.lane() != 0) return;
    if (c.has_bias) sum += bias[row];
    const ulong at = (ulong)token * c.rows + row;
    if (c.has_residual) sum += residual[at];
    out[at] = sum;
}

#define MATVEC(name, D)                                                                                         \
    KERNEL(matvec_##name, LinearConstants, (const uchar, plane0), (const uchar, plane1), (const uchar, plane2), \
           (const float, x), (const float, bias), (const float, residual), (float, out)) {                      \
        const Row weight = {plane0, plane1, plane2};                                                            \
        matvec<D>(ctx, c, weight, x, bias, residual, out);                                                      \
    }
MATVEC(any, ANY)

// The same for weights of few rows: a group of 256 threads makes one output of one token. Grid: (rows, tokens).
KERNEL(matvec_group_any, LinearConstants, (const uchar, plane0), (const uchar, plane1), (const uchar, plane2),
       (const float, x), (const float, bias), (const float, residual), (float, out)) {
    SHARED(float, sums, 8);
    const uint row = ctx.group_x(), token = ctx.group_y();
    const Row w = row_of(plane0, plane1, plane2, c.weight, row);
    const GPTR(const float) from = x + (ulong)token * c.weight.cols;
    float sum = 0.0f;
    for (uint i = ctx.thread(); 8 * i < c.weight.cols; i += ctx.threads()) {
        const Float8 own = load8<ANY>(c.weight, w, i);
        for (uint j = 0; j < 8 && 8 * i + j < c.weight.cols; ++j) sum = fma_of(own.v[j], from[8 * i + j], sum);
    }
    sum = lane_sum(ctx, sum);
    if (ctx.lane() == 0) sums[ctx.warp()] = sum;
    barrier(ctx);
    if (ctx.thread() != 0) return;
    float all = 0.0f;
    for (uint i = 0; i < ctx.warps(); ++i) all += sums[i];
    if (c.has_bias) all += bias[row];
    const ulong at = (ulong)token * c.rows + row;
    if (c.has_residual) all += residual[at];
    out[at] = all;
}

struct UnpackConstants {
    Format weight;
    uint rows;
};

// A weight → (rows, cols), f32. A thread takes eight columns.
KERNEL(unpack, UnpackConstants, (const uchar, plane0), (const uchar, plane1), (const uchar, plane2), (float, out)) {
    const uint pieces = (c.weight.cols + 7) / 8, at = ctx.group_x() * ctx.threads() + ctx.thread();
    const uint row = at / pieces, i = at % pieces;
    if (row >= c.rows) return;
    const Float8 w = load8<ANY>(c.weight, row_of(plane0, plane1, plane2, c.weight, row), i);
    for (uint j = 0; j < 8 && 8 * i + j < c.weight.cols; ++j) out[(ulong)row * c.weight.cols + 8 * i + j] = w.v[j];
}

// The same for many tokens: a group of 256 threads makes a tile of 64 outputs of 64 tokens. Grid: (rows / 64,
// tokens / 64).
KERNEL(matmul_any, LinearConstants, (const uchar, plane0), (const uchar, plane1), (const uchar, plane2),
       (const float, x), (const float, bias), (const float, residual), (float, out)) {
    SHARED(float, tile_w, TILE_FLOATS);
    SHARED(float, tile_x, TILE_FLOATS);
    const uint row0 = ctx.group_x() * 64, token0 = ctx.group_y() * 64, line = ctx.thread() / 4;
    const bool has_row = row0 + line < c.rows, has_token = token0 + line < c.tokens;
    const Row w = row_of(plane0, plane1, plane2, c.weight, has_row ? row0 + line : 0);
    const GPTR(const float) from = x + (ulong)(has_token ? token0 + line : 0) * c.weight.cols;
    const TileSums sums = tile_sums(ctx, c.weight, w, has_row, from, has_token, tile_w, tile_x);
    for (uint a = 0; a < 4; ++a) {
        const uint row = row0 + ctx.thread() % 16 + 16 * a;
        for (uint b = 0; b < 4; ++b) {
            const uint token = token0 + ctx.thread() / 16 + 16 * b;
            if (row >= c.rows || token >= c.tokens) continue;
            const ulong to = (ulong)token * c.rows + row;
            float sum = sums.v[a][b];
            if (c.has_bias) sum += bias[row];
            if (c.has_residual) sum += residual[to];
            out[to] = sum;
        }
    }
}

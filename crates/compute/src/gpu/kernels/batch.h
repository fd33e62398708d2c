// What surrounds products of 9 to 256 rows: their activations in eight bits, pairs sorted by expert, and products with small
// weights of plain floats.
#define WITHOUT_KERNELS
#include "few_rows.h"
#include "experts.h"

struct BatchEnterConstants {
    NormConstants norm;
    uint cols;
};

// x (rows, cols), of x ⊙ weight if there is a norm → bytes (rows, cols), scale and scaled sum of each block (rows, cols / 32, 2),
// and the norm's factor (rows), by which products are to be multiplied. Grid: rows.
KERNEL_AHEAD(batch_enter, BatchEnterConstants, (const float, x), (const float, weight), (uchar, bytes), (float, scales),
             (float, factors)) {
    SHARED(uint, words, MOST_LINEAR_COLUMNS / 4);
    SHARED(float, own_scales, MOST_LINEAR_COLUMNS / 16);
    SHARED(float, scratch, 8);
    prefetch_norm(ctx, c.norm, weight, c.cols);
    after_previous(ctx);
    const uint row = ctx.group_x();
    const GPTR(const float) from = x + (ulong)row * c.cols;
    const float factor = enter_bytes(ctx, c.norm, from, weight, c.cols, words, own_scales, scratch,
                                     entering(ctx, c.norm, from, weight, c.cols));
    if (ctx.thread() == 0) factors[row] = factor;
    const GPTR(uchar) to = bytes + (ulong)row * c.cols;
    for (uint i = ctx.thread(); i < c.cols / 16; i += ctx.threads()) {
        store_u32x4(to, 16 * i, load_u32x4(words, quad_at(i) * 4));
    }
    for (uint i = ctx.thread(); i < c.cols / 16; i += ctx.threads()) scales[(ulong)row * (c.cols / 16) + i] = own_scales[i];
}

// Pairs and experts, at most.
CONSTANT uint BATCH_PAIRS = 8192, BATCH_EXPERTS = 1024;

struct BatchTilesConstants {
    uint pairs, experts;
    // Entries of `tiles`; those that are not needed get count 0.
    uint tiles;
    // Of the most pairs of a tile, a power of two, the logarithm.
    uint shift;
};

// Sorts pairs by expert, ids (pairs) → list, without those of absent experts, and cuts each expert's into tiles: expert, first
// and count of list, four words each. One group.
KERNEL_AHEAD(batch_tiles, BatchTilesConstants, (const uint, table), (const uint, ids), (uint, list), (uint, tiles)) {
    SHARED(uint, own, BATCH_PAIRS);
    SHARED(uint, counts, BATCH_EXPERTS);
    SHARED(uint, of_warps, 16);
    after_previous(ctx);
    const uint padded = (c.pairs + 3) & ~3u;
    for (uint p = ctx.thread(); p < padded; p += ctx.threads()) own[p] = p < c.pairs ? (uint)ids[p] : ABSENT;
    barrier(ctx);
    for (uint e = ctx.thread(); e < c.experts; e += ctx.threads()) {
        uint count = 0;
        if (table[e] != ABSENT) {
            for (uint p = 0; p < padded; p += 4) {
                const Word4 w = load_u32x4(own, p);
                count += (w.x == e ? 1 : 0) + (w.y == e ? 1 : 0) + (w.z == e ? 1 : 0) + (w.w == e ? 1 : 0);
            }
        }
        counts[e] = count;
    }
    barrier(ctx);
    // Pairs and tiles of the experts before, 256 experts at a time.
    uint first_pair = 0, first_tile = 0;
    for (uint base = 0; base < c.experts; base += ctx.threads()) {
        const uint e = base + ctx.thread(), count = e < c.experts ? (uint)counts[e] : 0;
        const uint own_tiles = (count + (1u << c.shift) - 1) >> c.shift;
        uint pair_end = count, tile_end = own_tiles;
        for (uint step = 1; step < 32; step *= 2) {
            const uint from = ctx.lane() >= step ? ctx.lane() - step : 0;
            const uint more_pairs = lane_read(ctx, pair_end, from), more_tiles = lane_read(ctx, tile_end, from);
            if (ctx.lane() >= step) {
                pair_end += more_pairs;
                tile_end += more_tiles;
            }
        }
        if (ctx.lane() == 31) {
            of_warps[2 * ctx.warp()] = pair_end;
            of_warps[2 * ctx.warp() + 1] = tile_end;
        }
        barrier(ctx);
        uint before_pairs = first_pair, before_tiles = first_tile;
        for (uint w = 0; w < ctx.warps(); ++w) {
            const uint pairs = of_warps[2 * w], more = of_warps[2 * w + 1];
            if (w < ctx.warp()) {
                before_pairs += pairs;
                before_tiles += more;
            }
            first_pair += pairs;
            first_tile += more;
        }
        uint to_pair = before_pairs + pair_end - count;
        const uint to_tile = before_tiles + tile_end - own_tiles;
        for (uint i = 0; i < own_tiles; ++i) {
            const uint left = count - (i << c.shift);
            const Word4 tile = {e, to_pair + (i << c.shift), left < 1u << c.shift ? left : 1u << c.shift, 0};
            store_u32x4(GCAST(uchar, tiles), 16 * (to_tile + i), tile);
        }
        for (uint p = 0; count > 0 && p < padded; p += 4) {
            const Word4 w = load_u32x4(own, p);
            if (w.x == e) list[to_pair++] = p;
            if (w.y == e) list[to_pair++] = p + 1;
            if (w.z == e) list[to_pair++] = p + 2;
            if (w.w == e) list[to_pair++] = p + 3;
        }
        barrier(ctx);
    }
    const Word4 none = {0, 0, 0, 0};
    for (uint i = first_tile + ctx.thread(); i < c.tiles; i += ctx.threads()) store_u32x4(GCAST(uchar, tiles), 16 * i, none);
}

struct BatchPlainConstants {
    ProductPart part;
    NormConstants norm;
    uint weight;
    uint tokens;
    uint has_residual;
};

// Outputs and tokens of a group.
CONSTANT uint OWN_ROWS = 4, OWN_TOKENS = 8;

// `product_plain` of several tokens, with its bits. Grid: (rows / 4, tokens / 8).
template <uint D>
DEVICE void batch_plain(CTX, const BatchPlainConstants c, GPTR(const uchar) weights, GPTR(const float) x,
                        GPTR(const float) residual, SPTR(float) squares, SPTR(float) shares, GPTR(float) out) {
    const uint row = ctx.group_x() * OWN_ROWS, token0 = ctx.group_y() * OWN_TOKENS;
    const uint cols = c.part.format.cols, pieces = cols / 8;
    const uint count = c.tokens - token0 < OWN_TOKENS ? c.tokens - token0 : OWN_TOKENS;
    prefetch_norm(ctx, c.norm, vector_at(weights, c.weight), cols);
    after_previous(ctx);
    const GPTR(const float) norm = vector_at(weights, c.weight);
    Sums<OWN_ROWS * OWN_TOKENS> sums;
    Sums<OWN_TOKENS> square;
#pragma unroll
    for (uint i = 0; i < OWN_ROWS * OWN_TOKENS; ++i) sums.v[i] = 0.0f;
#pragma unroll
    for (uint i = 0; i < OWN_TOKENS; ++i) square.v[i] = 0.0f;
    for (uint i = ctx.thread(); i < pieces; i += ctx.threads()) {
        const PlainRows<OWN_ROWS> w = plain_rows<D, OWN_ROWS>(c.part, weights, row, i);
#pragma unroll
        for (uint t = 0; t < OWN_TOKENS; ++t) {
            if (t >= count) break;
            const Entering e = entering_at(ctx, c.norm, x + (ulong)(token0 + t) * cols, norm, cols, i);
#pragma unroll
            for (uint j = 0; j < 8; ++j) {
                square.v[t] = fma_of(e.x.v[j], e.x.v[j], square.v[t]);
                const float v = product_of(e.x.v[j], e.weight.v[j]);
#pragma unroll
                for (uint r = 0; r < OWN_ROWS; ++r)
                    sums.v[t * OWN_ROWS + r] = fma_of(w.of[r].v[j], v, sums.v[t * OWN_ROWS + r]);
            }
        }
    }
    const float own_square = team_sums<OWN_TOKENS>(ctx, square, 32);
    if (ctx.lane() % 4 == 0) squares[ctx.lane() / 4 * 8 + ctx.warp()] = own_square;
    shares[ctx.lane() * 8 + ctx.warp()] = team_sums<OWN_ROWS * OWN_TOKENS>(ctx, sums, 32);
    barrier(ctx);
    const uint t = ctx.thread() / OWN_ROWS, own = row + ctx.thread() % OWN_ROWS;
    if (t >= count || own >= c.part.rows) return;
    float sum = 0.0f;
    for (uint i = 0; i < ctx.warps(); ++i) sum += shares[ctx.thread() * 8 + i];
    sum = product_of(sum, norm_factor(ctx, c.norm, cols, squares + 8 * t));
    const ulong at = (ulong)(token0 + t) * c.part.rows + own;
    if (c.part.bias != NONE) sum += vector_at(weights, c.part.bias)[own];
    if (c.has_residual) sum += residual[at];
    out[at] = sum;
}

#define BATCH_PLAIN(name, D)                                                                        \
    KERNEL_AHEAD(batch_plain_##name, BatchPlainConstants, (const uchar, weights), (const float, x), \
                 (const float, residual), (float, out)) {                                           \
        SHARED(float, squares, 8 * OWN_TOKENS);                                                   \
        SHARED(float, shares, 8 * OWN_ROWS * OWN_TOKENS);                                       \
        batch_plain<D>(ctx, c, weights, x, residual, squares, shares, out);                         \
    }
#define OF_PLAIN(name, D, code, few, ...) IF_PLAIN_##few(BATCH_PLAIN(name, D)) IF_1(IS_SMALL(name), BATCH_PLAIN(name, D))
ENCODINGS(OF_PLAIN)

// Products of few rows with resident weights: what decoding a token is made of beside attention and experts.
//
// A group brings the row into threadgroup memory itself, so that norm, rounding and product are one dispatch; what
// weights it will read is known before the row is, and is asked for ahead.
#include "activations.h"
#include "columns8.h"
#include "named.h"

// The widest rows of linear layers, in bytes.
CONSTANT uint MOST_LINEAR_COLUMNS = 24576;

// Encodings whose weights of few rows, as a router's, are made floats where activations are not rounded. Read as text by
// `gpu/encodings.rs`.
#define SMALL_affine4 ,
#define SMALL_affine8 ,
#define IS_SMALL(name) SECOND_OF(SMALL_##name 1, 0, )

// Where weights begin, in units of WEIGHT_UNIT bytes from the start of their buffer; NONE for what is not there.
CONSTANT uint WEIGHT_UNIT = 256, NONE = 0xffffffffu;
// Products of one input that are one dispatch, at most.
CONSTANT uint MOST_PARTS = 3;

struct ProductPart {
    Format format;
    uint planes[3];
    uint bias;
    uint rows;
    // Groups that make it, and rows that each of their warps makes.
    uint groups, span;
};

struct ProductsConstants {
    ProductPart parts[MOST_PARTS];
    NormConstants norm;
    // Of the norm.
    uint weight;
    uint has_residual;
};

DEVICE GPTR(const float) vector_at(GPTR(const uchar) weights, uint at) {
    return GCAST(const float, weights + (ulong)(at == NONE ? 0 : at) * WEIGHT_UNIT);
}

struct ProductBuffers {
    GPTR(const uchar) weights;
    GPTR(const float) x;
    GPTR(const float) residual;
    GPTR(float) out0;
    GPTR(float) out1;
    GPTR(float) out2;
};

struct ProductMemory {
    SPTR(uint) words;
    SPTR(float) scales;
    SPTR(float) scratch;
};

// A group's part of a dispatch: which product, where it goes, and the group's number among those that make it.
struct OwnPart {
    ProductPart part;
    GPTR(float) out;
    uint group;
};

DEVICE OwnPart own_part(CTX, const ProductsConstants c, const ProductBuffers b) {
    OwnPart own = {c.parts[0], b.out0, ctx.group_x()};
    if (own.group < own.part.groups) return own;
    own.group -= own.part.groups;
    own.part = c.parts[1];
    own.out = b.out1;
    if (own.group < own.part.groups) return own;
    own.group -= own.part.groups;
    own.part = c.parts[2];
    own.out = b.out2;
    return own;
}

// Rows row..row + N of a weight, the last one again beyond the end.
template <uint N>
DEVICE Rows<N> rows_at(const ProductPart part, GPTR(const uchar) weights, uint row) {
    Rows<N> rows;
#pragma unroll
    for (uint n = 0; n < N; ++n) {
        const uint own = row + n < part.rows ? row + n : part.rows - 1;
        rows.row[n] =
            row_of(weights + (ulong)part.planes[0] * WEIGHT_UNIT, weights + (ulong)part.planes[1] * WEIGHT_UNIT,
                   weights + (ulong)part.planes[2] * WEIGHT_UNIT, part.format, own);
    }
    return rows;
}

// A group's outputs of one token: a warp makes `span` of them, N at a time. What it reads first of S times N, P pieces a
// lane, it reads before the row is there. IS_SHORT: rows have no more pieces.
template <uint D, uint N, uint P, uint S, bool IS_SHORT>
DEVICE void product_rows(CTX, const ProductsConstants c, const OwnPart own, const ProductBuffers b,
                         const ProductMemory m) {
    const ProductPart part = own.part;
    const uint token = ctx.group_y(), cols = part.format.cols;
    const uint begin = (own.group * ctx.warps() + ctx.warp()) * part.span;
    const uint end = begin + part.span < part.rows ? begin + part.span : part.rows;
    Raws<N, P> raws[S];
#pragma unroll
    for (uint s = 0; s < S; ++s) {
        if (s * N < part.span)
            raws[s] = raws_of<D, N, P>(part.format, rows_at<N>(part, b.weights, begin + s * N), ctx.lane());
    }
    prefetch_norm(ctx, c.norm, vector_at(b.weights, c.weight), cols);
    after_previous(ctx);
    const GPTR(const float) from = b.x + (ulong)token * cols;
    const GPTR(const float) norm = vector_at(b.weights, c.weight);
    const float factor = enter_bytes(ctx, c.norm, from, norm, cols, m.words, m.scales, m.scratch,
                                     entering(ctx, c.norm, from, norm, cols));
    const LocalActivations x = {m.words, m.scales};
    constexpr uint LANES = 32 / N;
    const uint pieces = pieces_of<D>(part.format);
    Chunks<P> k;
    if (IS_SHORT) k = chunks_of<D, P>(x, ctx.lane(), pieces);
    for (uint base = begin; base < end; base += S * N) {
#pragma unroll
        for (uint s = 0; s < S; ++s) {
            const uint row = base + s * N;
            if (row >= end) break;
            const Rows<N> rows = rows_at<N>(part, b.weights, row);
            const Sums<N> dots = IS_SHORT ? short_dots<D, N, P>(raws[s], k, ctx.lane(), pieces)
                                          : lane_dots<D, N, P>(ctx, part.format, rows, raws[s], x);
            float sum = product_of(team_sums<N>(ctx, dots, 32), factor);
            // What is made next is read meanwhile.
            if (row + S * N < end)
                raws[s] = raws_of<D, N, P>(part.format, rows_at<N>(part, b.weights, row + S * N), ctx.lane());
            const uint to = row + ctx.lane() / LANES;
            if (ctx.lane() % LANES != 0 || to >= end) continue;
            const ulong at = (ulong)token * part.rows + to;
            if (part.bias != NONE) sum += vector_at(b.weights, part.bias)[to];
            if (c.has_residual) sum += b.residual[at];
            own.out[at] = sum;
        }
    }
}

// The same of rows of several turns of a lane's P pieces: those of the next turn are read before the ones in front are multiplied.
template <uint D, uint N, uint P>
DEVICE void product_turns(CTX, const ProductsConstants c, const OwnPart own, const ProductBuffers b, const ProductMemory m) {
    const ProductPart part = own.part;
    const uint token = ctx.group_y(), cols = part.format.cols;
    const uint begin = (own.group * ctx.warps() + ctx.warp()) * part.span;
    const uint end = begin + part.span < part.rows ? begin + part.span : part.rows;
    Raws<N, P> raws = raws_of<D, N, P>(part.format, rows_at<N>(part, b.weights, begin), ctx.lane());
    prefetch_norm(ctx, c.norm, vector_at(b.weights, c.weight), cols);
    after_previous(ctx);
    const GPTR(const float) from = b.x + (ulong)token * cols;
    const GPTR(const float) norm = vector_at(b.weights, c.weight);
    const float factor = enter_bytes(ctx, c.norm, from, norm, cols, m.words, m.scales, m.scratch,
                                     entering(ctx, c.norm, from, norm, cols));
    const LocalActivations x = {m.words, m.scales};
    constexpr uint LANES = 32 / N;
    const uint pieces = pieces_of<D>(part.format), turns = (pieces + 32 * P - 1) / (32 * P);
    for (uint row = begin; row < end; row += N) {
        Sums<N> sums;
#pragma unroll
        for (uint n = 0; n < N; ++n) sums.v[n] = 0.0f;
        for (uint turn = 0; turn < turns; ++turn) {
            const uint first = ctx.lane() + 32 * P * turn;
            const Raws<N, P> now = raws;
            const bool goes_on = turn + 1 < turns;
            if (goes_on || row + N < end) {
                const Rows<N> rows = rows_at<N>(part, b.weights, goes_on ? row : row + N);
                raws = raws_of<D, N, P>(part.format, rows, goes_on ? first + 32 * P : ctx.lane());
            }
#pragma unroll
            for (uint i = 0; i < P; ++i) {
                const uint p = first + 32 * i;
                if (p >= pieces) break;
                const Chunk k = chunk_of<D>(x, p);
#pragma unroll
                for (uint n = 0; n < N; ++n) sums.v[n] += piece_dot<D>(now.raw[n][i], k, p);
            }
        }
        float sum = product_of(team_sums<N>(ctx, sums, 32), factor);
        const uint to = row + ctx.lane() / LANES;
        if (ctx.lane() % LANES != 0 || to >= end) continue;
        const ulong at = (ulong)token * part.rows + to;
        if (part.bias != NONE) sum += vector_at(b.weights, part.bias)[to];
        if (c.has_residual) sum += b.residual[at];
        own.out[at] = sum;
    }
}

// Two rows at a time, or two to four pieces of one where a row has that many, or of both where they are short; few of them before
// they are needed where a piece is long, or there are many.
template <uint D>
DEVICE void product_part(CTX, const ProductsConstants c, const OwnPart own, const ProductBuffers b,
                         const ProductMemory m) {
    constexpr uint AHEAD = D == Q5_K || D == Q6_K ? 1 : 2;
    const uint pieces = pieces_of<D>(own.part.format);
    if (pieces <= 32) product_rows<D, 2, 1, AHEAD, true>(ctx, c, own, b, m);
    else if (takes_several<D>() && pieces <= 64)
        product_rows<D, 2, takes_several<D>() ? 2 : 1, AHEAD, true>(ctx, c, own, b, m);
    else if (takes_several<D>() && pieces > 96) product_turns<D, 1, takes_several<D>() ? 4 : 1>(ctx, c, own, b, m);
    else if (in_three_turns<D>(pieces)) product_rows<D, 1, 3, 1, false>(ctx, c, own, b, m);
    else product_rows<D, 1, 2, AHEAD, false>(ctx, c, own, b, m);
}

#ifndef WITHOUT_KERNELS
// x (tokens, cols), normalised if there is a norm, · weightᵀ + bias + residual → out (tokens, rows), of up to three
// weights of one width: a warp makes `span` outputs of one token. Grid: (groups of all parts, tokens).
#define PRODUCTS(name, ...)                                                                    \
    KERNEL_AHEAD(products_##name, ProductsConstants, (const uchar, weights), (const float, x), \
                 (const float, residual), (float, out0), (float, out1), (float, out2)) {       \
        SHARED(uint, words, MOST_LINEAR_COLUMNS / 4);                                          \
        SHARED(float, scales, MOST_LINEAR_COLUMNS / 16);                                       \
        SHARED(float, scratch, 8);                                                             \
        const ProductBuffers b = {weights, x, residual, out0, out1, out2};                     \
        const ProductMemory m = {words, scales, scratch};                                      \
        const OwnPart own = own_part(ctx, c, b);                                               \
        __VA_ARGS__                                                                            \
    }
#define OF_ONE(name, D, code, few, ...) IF_BYTES_##few(PRODUCTS(name, product_part<D>(ctx, c, own, b, m);))

ENCODINGS(OF_ONE)
// Of weights in several encodings: not all, so that a thread needs no more registers than the most common ones do.
PRODUCTS(mixed, {
    const uint bits = own.part.format.kind >> 16 & 15;
    switch (own.part.format.kind & 255) {
    case Q4_K: return product_part<Q4_K>(ctx, c, own, b, m);
    case Q5_K: return product_part<Q5_K>(ctx, c, own, b, m);
    case Q6_K: return product_part<Q6_K>(ctx, c, own, b, m);
    case Q8_0: return product_part<Q8_0>(ctx, c, own, b, m);
    }
    if (bits == 4) product_part<AFFINE4>(ctx, c, own, b, m);
    else product_part<AFFINE8>(ctx, c, own, b, m);
})
#endif

struct PlainConstants {
    ProductPart part;
    NormConstants norm;
    uint weight;
    uint has_residual;
};

// Eight 16-bit floats.
template <uint D>
DEVICE Float8 of_halves(const Word4 q) {
    const uint pairs[4] = {q.x, q.y, q.z, q.w};
    Float8 r;
#pragma unroll
    for (uint j = 0; j < 4; ++j) {
        r.v[2 * j] = D == F16 ? f16_to_f32((ushort)pairs[j]) : as_float(pairs[j] << 16);
        r.v[2 * j + 1] = D == F16 ? f16_to_f32((ushort)(pairs[j] >> 16)) : as_float(pairs[j] & 0xffff0000u);
    }
    return r;
}

// Columns 8i..8i + 8 of a row.
template <uint D>
DEVICE Float8 plain8(const Format f, const Row row, uint i) {
    if (D == F32) return floats8(GCAST(const float, row.plane0), i);
    return D == F16 || D == BF16 ? of_halves<D>(load_u32x4(row.plane0, 16 * i)) : columns8<D>(f, row, i);
}

template <uint R>
struct PlainRows {
    Float8 of[R];
};

template <uint D, uint R>
DEVICE PlainRows<R> plain_rows(const ProductPart part, GPTR(const uchar) weights, uint row, uint i) {
    const Rows<R> rows = rows_at<R>(part, weights, row);
    PlainRows<R> w;
#pragma unroll
    for (uint r = 0; r < R; ++r) w.of[r] = plain8<D>(part.format, rows.row[r], i);
    return w;
}

// The same with a weight of plain floats, or one that is made such, activations not rounded, cols a multiple of 8: a group makes R outputs of one
// token, each thread of the columns that it normalises itself. Grid: (rows / R, tokens).
template <uint D, uint R>
DEVICE void product_plain(CTX, const PlainConstants c, GPTR(const uchar) weights, GPTR(const float) x,
                          GPTR(const float) residual, SPTR(float) scratch, GPTR(float) out) {
    const uint row = ctx.group_x() * R, token = ctx.group_y(), cols = c.part.format.cols, pieces = cols / 8;
    const uint first = ctx.thread() < pieces ? ctx.thread() : 0;
    PlainRows<R> w = plain_rows<D, R>(c.part, weights, row, first);
    prefetch_norm(ctx, c.norm, vector_at(weights, c.weight), cols);
    after_previous(ctx);
    const GPTR(const float) from = x + (ulong)token * cols;
    const GPTR(const float) norm = vector_at(weights, c.weight);
    float squares = 0.0f;
    Sums<R> sums;
#pragma unroll
    for (uint r = 0; r < R; ++r) sums.v[r] = 0.0f;
    for (uint i = ctx.thread(); i < pieces; i += ctx.threads()) {
        const Entering e = entering_at(ctx, c.norm, from, norm, cols, i);
        if (i >= ctx.threads()) w = plain_rows<D, R>(c.part, weights, row, i);
#pragma unroll
        for (uint j = 0; j < 8; ++j) {
            squares = fma_of(e.x.v[j], e.x.v[j], squares);
            const float v = product_of(e.x.v[j], e.weight.v[j]);
#pragma unroll
            for (uint r = 0; r < R; ++r) sums.v[r] = fma_of(w.of[r].v[j], v, sums.v[r]);
        }
    }
    squares = lane_sum(ctx, squares);
    if (ctx.lane() == 0) scratch[ctx.warp()] = squares;
#pragma unroll
    for (uint r = 0; r < R; ++r) {
        const float sum = lane_sum(ctx, sums.v[r]);
        if (ctx.lane() == 0) scratch[(r + 1) * ctx.warps() + ctx.warp()] = sum;
    }
    barrier(ctx);
    const uint own = row + ctx.thread();
    if (ctx.thread() >= R || own >= c.part.rows) return;
    float sum = 0.0f;
    for (uint i = 0; i < ctx.warps(); ++i) sum += scratch[(ctx.thread() + 1) * ctx.warps() + i];
    sum = product_of(sum, norm_factor(ctx, c.norm, cols, scratch));
    const ulong at = (ulong)token * c.part.rows + own;
    if (c.part.bias != NONE) sum += vector_at(weights, c.part.bias)[own];
    if (c.has_residual) sum += residual[at];
    out[at] = sum;
}

#ifndef WITHOUT_KERNELS
// One row a group, for weights of few rows, and four.
#define PLAIN(name, D, R)                                                                                 \
    KERNEL_AHEAD(name, PlainConstants, (const uchar, weights), (const float, x), (const float, residual), \
                 (float, out)) {                                                                          \
        SHARED(float, scratch, 8 * (R + 1));                                                              \
        product_plain<D, R>(ctx, c, weights, x, residual, scratch, out);                                  \
    }

#define ONE_ROW(name, D, code, few, ...) \
    IF_PLAIN_##few(PLAIN(product_##name, D, 1)) IF_1(IS_SMALL(name), PLAIN(product_##name, D, 1))
#define FOUR_ROWS(name, D, code, few, ...) IF_PLAIN_##few(PLAIN(products_##name, D, 4))
ENCODINGS(ONE_ROW)
ENCODINGS(FOUR_ROWS)
#endif

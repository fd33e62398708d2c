// Products of few rows with resident weights: what decoding a token is made of beside attention and experts.
//
// A group brings the row into threadgroup memory itself, so that norm, rounding and product are one dispatch; what
// weights it will read is known before the row is, and is asked for ahead.
#include "activations.h"

// Where weights begin, in units of WEIGHT_UNIT bytes from the start of their buffer; NONE for what is not there.
CONSTANT uint WEIGHT_UNIT = 256, NONE = 0xffffffffu;
// Products of one input that are one dispatch, at most.
CONSTANT uint MOST_PARTS = 3;

struct ProductPart {
    Format format;
    uint planes[3];
    uint bias;
    uint rows;
    // Groups that make it.
    uint groups;
};

struct ProductsConstants {
    ProductPart parts[MOST_PARTS];
    NormConstants norm;
    // Of the norm.
    uint weight;
    // Rows of an output that a warp makes, one after the other.
    uint span;
    uint has_residual;
};

DEVICE GPTR(const float) vector_at(GPTR(const uchar) weights, uint at) {
    return GCAST(const float, weights + (ulong)(at == NONE ? 0 : at) * WEIGHT_UNIT);
}

// Rows row..row + N of a product, the last one again beyond the end.
template <uint D, uint N, class X>
DEVICE void product_rows(CTX, const ProductPart part, GPTR(const uchar) weights, const X x, float factor,
                         GPTR(const float) residual, uint has_residual, uint row, uint token, GPTR(float) out) {
    Rows<N> rows;
#pragma unroll
    for (uint n = 0; n < N; ++n) {
        const uint own = row + n < part.rows ? row + n : part.rows - 1;
        rows.row[n] = row_of(weights + (ulong)part.planes[0] * WEIGHT_UNIT, weights + (ulong)part.planes[1] * WEIGHT_UNIT,
                             weights + (ulong)part.planes[2] * WEIGHT_UNIT, part.format, own);
    }
    float sum = team_sums<N>(ctx, lane_dots<D, N>(ctx, part.format, rows, x), 32) * factor;
    const uint each = 32 / N, own = row + ctx.lane() / each;
    if (ctx.lane() % each != 0 || own >= part.rows) return;
    const ulong at = (ulong)token * part.rows + own;
    if (part.bias != NONE) sum += vector_at(weights, part.bias)[own];
    if (has_residual) sum += residual[at];
    out[at] = sum;
}

// x (tokens, cols), normalised if there is a norm, · weightᵀ + bias + residual → out (tokens, rows), of up to three
// weights of one width: a warp makes `span` outputs of one token. Grid: (groups of all parts, tokens).
KERNEL_AHEAD(products, ProductsConstants, (const uchar, weights), (const float, x), (const float, residual),
             (float, out0), (float, out1), (float, out2)) {
    SHARED(uint, words, MOST_COLUMNS / 4);
    SHARED(float, scales, MOST_COLUMNS / 16);
    SHARED(float, scratch, 8);
    uint group = ctx.group_x();
    ProductPart part = c.parts[0];
    GPTR(float) out = out0;
    if (group >= part.groups) {
        group -= part.groups;
        part = c.parts[1];
        out = out1;
        if (group >= part.groups) {
            group -= part.groups;
            part = c.parts[2];
            out = out2;
        }
    }
    const uint token = ctx.group_y(), cols = part.format.cols;
    const uint begin = (group * ctx.warps() + ctx.warp()) * c.span;
    const uint end = begin + c.span < part.rows ? begin + c.span : part.rows;
    const GPTR(const uchar) plane0 = weights + (ulong)part.planes[0] * WEIGHT_UNIT;
    // Of one step: where warps go through many rows, groups that come later read ahead for the others.
    if (begin < end && c.span == 2) {
        warp_prefetch(ctx, plane0 + (ulong)begin * part.format.strides[0], (end - begin) * part.format.strides[0]);
    }
    after_previous(ctx);
    const GPTR(const float) from = x + (ulong)token * cols;
    const GPTR(const float) norm = vector_at(weights, c.weight);
    const float factor = enter_bytes(ctx, c.norm, from, norm, cols, words, scales, scratch,
                                     entering(ctx, c.norm, from, norm, cols));
    const LocalActivations local = {words, scales};
    const uint kind = part.format.kind & 255, bits = part.format.kind >> 16 & 15;
    for (uint row = begin; row < end; row += 2) {
        switch (kind) {
        case Q4_K: product_rows<Q4_K, 2>(ctx, part, weights, local, factor, residual, c.has_residual, row, token, out); break;
        case Q5_K: product_rows<Q5_K, 2>(ctx, part, weights, local, factor, residual, c.has_residual, row, token, out); break;
        case Q6_K: product_rows<Q6_K, 2>(ctx, part, weights, local, factor, residual, c.has_residual, row, token, out); break;
        case Q8_0: product_rows<Q8_0, 2>(ctx, part, weights, local, factor, residual, c.has_residual, row, token, out); break;
        default:
            if (bits == 4) product_rows<AFFINE, 2>(ctx, part, weights, local, factor, residual, c.has_residual, row, token, out);
            else product_rows<AFFINE + 256, 2>(ctx, part, weights, local, factor, residual, c.has_residual, row, token, out);
        }
    }
}

struct PlainConstants {
    ProductPart part;
    NormConstants norm;
    uint weight;
    uint has_residual;
};

// The same with weights of plain floats, one of them, activations not rounded, cols a multiple of 8: a warp makes an
// output of one token. Grid: (rows / warps, tokens).
template <uint D>
DEVICE void product_plain(CTX, const PlainConstants c, GPTR(const uchar) weights, GPTR(const float) x,
                          GPTR(const float) residual, SPTR(float) values, SPTR(float) scratch, GPTR(float) out) {
    const uint row = ctx.group_x() * ctx.warps() + ctx.warp(), token = ctx.group_y(), cols = c.part.format.cols;
    const GPTR(const uchar) w = weights + (ulong)c.part.planes[0] * WEIGHT_UNIT + (ulong)row * c.part.format.strides[0];
    if (row < c.part.rows) warp_prefetch(ctx, w, c.part.format.strides[0]);
    after_previous(ctx);
    const float factor = enter_floats(ctx, c.norm, x + (ulong)token * cols, vector_at(weights, c.weight), cols, values,
                                      scratch);
    if (row >= c.part.rows) return;
    const uint pieces = cols / 8;
    float sum = 0.0f;
#pragma unroll 4
    for (uint p = ctx.lane(); p < pieces; p += 32) {
        const Float4 a = load_f32x4(values, 8 * p), b = load_f32x4(values, 8 * p + 4);
        const Word4 q = load_u32x4(w, (D == F32 ? 32 : 16) * p);
        if (D == F32) {
            const Word4 r = load_u32x4(w, 32 * p + 16);
            sum += as_float(q.x) * a.x + as_float(q.y) * a.y + as_float(q.z) * a.z + as_float(q.w) * a.w
                 + as_float(r.x) * b.x + as_float(r.y) * b.y + as_float(r.z) * b.z + as_float(r.w) * b.w;
            continue;
        }
        const uint pairs[4] = {q.x, q.y, q.z, q.w};
        const float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (uint i = 0; i < 4; ++i) {
            const float low = D == F16 ? f16_to_f32((ushort)pairs[i]) : as_float(pairs[i] << 16);
            const float high = D == F16 ? f16_to_f32((ushort)(pairs[i] >> 16)) : as_float(pairs[i] & 0xffff0000u);
            sum += low * v[2 * i] + high * v[2 * i + 1];
        }
    }
    sum = lane_sum(ctx, sum) * factor;
    if (ctx.lane() != 0) return;
    const ulong at = (ulong)token * c.part.rows + row;
    if (c.part.bias != NONE) sum += vector_at(weights, c.part.bias)[row];
    if (c.has_residual) sum += residual[at];
    out[at] = sum;
}

#define PLAIN(name, D)                                                                                         \
    KERNEL_AHEAD(product_##name, PlainConstants, (const uchar, weights), (const float, x),                     \
                 (const float, residual), (float, out)) {                                                      \
        SHARED(float, values, MOST_COLUMNS);                                                                   \
        SHARED(float, scratch, 8);                                                                             \
        product_plain<D>(ctx, c, weights, x, residual, values, scratch, out);                                  \
    }

PLAIN(f32, F32)
PLAIN(f16, F16)
PLAIN(bf16, BF16)

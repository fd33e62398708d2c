// The activations of a product, brought into threadgroup memory by every group for itself: normalised if that is asked
// for, and rounded to eight bits.
#pragma once
#include "row_dots.h"

// The widest rows of what routed experts take, in bytes.
CONSTANT uint MOST_COLUMNS = 8192;

struct NormConstants {
    // Root-mean-square norm before the product: whether there is one, and its epsilon.
    uint has_norm;
    float eps;
};

// Largest magnitude over four lanes.
DEVICE float quad_max(CTX, float v) {
    const float other = lane_xor(ctx, v, 1u);
    v = other > v ? other : v;
    const float third = lane_xor(ctx, v, 2u);
    return third > v ? third : v;
}

DEVICE uint quad_max(CTX, uint v) {
    const uint other = lane_xor(ctx, v, 1u);
    v = other > v ? other : v;
    const uint third = lane_xor(ctx, v, 2u);
    return third > v ? third : v;
}

DEVICE float quad_sum(CTX, float v) {
    v += lane_xor(ctx, v, 1u);
    return v + lane_xor(ctx, v, 2u);
}

DEVICE Float8 floats8(GPTR(const float) x, uint i) {
    const Word4 a = load_u32x4(GCAST(const uchar, x), 32 * i), b = load_u32x4(GCAST(const uchar, x), 32 * i + 16);
    Float8 r = {{as_float(a.x), as_float(a.y), as_float(a.z), as_float(a.w), as_float(b.x), as_float(b.y),
                 as_float(b.z), as_float(b.w)}};
    return r;
}

// Four numbers times a factor that makes them -127..127, rounded to bytes: adding 1.5 · 2²³ leaves the nearest integer in the lowest
// bits. Products are rounded by themselves, as those of `quantize_block` are.
DEVICE uint packed_codes(float a, float b, float d, float e, float factor) {
    const float magic = 12582912.0f;
    return (as_uint(product_of(a, factor) + magic) & 255) | (as_uint(product_of(b, factor) + magic) & 255) << 8
         | (as_uint(product_of(d, factor) + magic) & 255) << 16 | as_uint(product_of(e, factor) + magic) << 24;
}

// Brings a norm's weights nearer: one group does it for all.
DEVICE void prefetch_norm(CTX, const NormConstants c, GPTR(const float) weight, uint cols) {
    if (c.has_norm && ctx.group_x() == 0 && ctx.warp() == 0) warp_prefetch(ctx, GCAST(const uchar, weight), 4 * cols);
}

// Factor of a norm from the squares that each of eight warps has summed.
DEVICE float norm_factor(CTX, const NormConstants c, uint cols, SPTR(const float) scratch) {
    if (!c.has_norm) return 1.0f;
    const Float4 a = load_f32x4(scratch, 0), b = load_f32x4(scratch, 4);
    const float sum = a.x + a.y + a.z + a.w + b.x + b.y + b.z + b.w;
    return inverse_sqrt(quotient(sum, (float)cols) + c.eps);
}

// The first eight columns that a thread enters, and their weights in the norm: read before other work, so as not to wait
// for them after it.
struct Entering {
    Float8 x, weight;
};

DEVICE Entering entering_at(CTX, const NormConstants c, GPTR(const float) x,
                            GPTR(const float) weight, uint cols, uint i) {
    Entering e = {{{0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f}},
                  {{1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f}}};
    if (i >= cols / 8) return e;
    e.x = floats8(x, i);
    if (c.has_norm) e.weight = floats8(weight, i);
    return e;
}

DEVICE Entering entering(CTX, const NormConstants c, GPTR(const float) x, GPTR(const float) weight, uint cols) {
    return entering_at(ctx, c, x, weight, cols, ctx.thread());
}

DEVICE uint larger(uint a, uint b) { return a > b ? a : b; }
DEVICE uint magnitude_bits(float v) { return as_uint(v) & 0x7fffffffu; }

// Piece i of a row's columns, eight, as `enter_bytes` keeps them. Returns their squares without the norm's weights. All lanes
// of a warp take part.
DEVICE float enter_piece(CTX, const Entering e, uint i, uint pieces, SPTR(uint) words, SPTR(float) scales) {
    Float8 v = e.x;
    float squares = 0.0f;
#pragma unroll
    for (uint j = 0; j < 8; ++j) {
        squares = fma_of(v.v[j], v.v[j], squares);
        v.v[j] *= e.weight.v[j];
    }
    const uint low = larger(larger(magnitude_bits(v.v[0]), magnitude_bits(v.v[1])),
                            larger(magnitude_bits(v.v[2]), magnitude_bits(v.v[3])));
    const uint high = larger(larger(magnitude_bits(v.v[4]), magnitude_bits(v.v[5])),
                             larger(magnitude_bits(v.v[6]), magnitude_bits(v.v[7])));
    const uint most = quad_max(ctx, larger(low, high));
    // NaN if an element is not finite.
    const float d = most >= 0x7f800000u ? not_a_number() : as_float(most) * (1.0f / 127.0f);
    const float inverse = most > 0 ? quotient(127.0f, as_float(most)) : 0.0f;
    uint packed[2];
#pragma unroll
    for (uint j = 0; j < 2; ++j) {
        packed[j] = packed_codes(v.v[4 * j], v.v[4 * j + 1], v.v[4 * j + 2], v.v[4 * j + 3], inverse);
    }
    int total = dot4(packed[0], 0x01010101u, dot4(packed[1], 0x01010101u, 0));
    total += (int)lane_xor(ctx, (uint)total, 1u);
    total += (int)lane_xor(ctx, (uint)total, 2u);
    if (i < pieces) {
        const uint to = word_at(2 * i);
        words[to] = packed[0];
        words[to + 1] = packed[1];
        if (i % 4 == 0) {
            scales[i / 2] = d;
            scales[i / 2 + 1] = d * (float)total;
        }
    }
    return squares;
}

// A row x of `cols` columns, a multiple of 32, as bytes with scales, quads at `quad_at`: of x ⊙ weight if there is a norm. Products are to be
// multiplied by the result, the norm's factor, which all elements share. `scratch` holds a float a warp. `e` is what
// `entering` gave. All threads of the group take part.
DEVICE float enter_bytes(CTX, const NormConstants c, GPTR(const float) x, GPTR(const float) weight, uint cols,
                         SPTR(uint) words, SPTR(float) scales, SPTR(float) scratch, Entering e) {
    const uint pieces = cols / 8;
    float squares = 0.0f;
    if (pieces <= ctx.threads()) {
        // At once, with no branch in between.
        squares = enter_piece(ctx, e, ctx.thread(), pieces, words, scales);
    } else {
        for (uint base = ctx.warp() * 32; base < pieces; base += ctx.threads()) {
            const uint i = base + ctx.lane();
            const Entering own = e;
            e = entering_at(ctx, c, x, weight, cols, i + ctx.threads());
            squares += enter_piece(ctx, own, i, pieces, words, scales);
        }
    }
    squares = lane_sum(ctx, squares);
    if (ctx.lane() == 0) scratch[ctx.warp()] = squares;
    barrier(ctx);
    return norm_factor(ctx, c, cols, scratch);
}

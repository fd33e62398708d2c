// The activations of a product, brought into threadgroup memory by every group for itself: normalised if that is asked
// for, and rounded to eight bits.
#pragma once
#include "pieces.h"

// The widest rows, in bytes of a row that is rounded and of one that is not.
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

DEVICE float quad_sum(CTX, float v) {
    v += lane_xor(ctx, v, 1u);
    return v + lane_xor(ctx, v, 2u);
}

DEVICE Float8 floats8(GPTR(const float) x, uint i) {
    const Word4 a = load_u32x4(GCAST(const uchar, x), 32 * i), b = load_u32x4(GCAST(const uchar, x), 32 * i + 16);
    Float8 r = {{as_float(a.x), as_float(a.y), as_float(a.z), as_float(a.w), as_float(b.x), as_float(b.y), as_float(b.z),
                 as_float(b.w)}};
    return r;
}

// Four numbers of -127..127, rounded to bytes: adding 1.5 · 2²³ leaves the nearest integer in the lowest bits.
DEVICE uint packed_codes(float a, float b, float d, float e) {
    const float magic = 12582912.0f;
    return (as_uint(a + magic) & 255) | (as_uint(b + magic) & 255) << 8 | (as_uint(d + magic) & 255) << 16
         | as_uint(e + magic) << 24;
}

// Brings a norm's weights nearer: one group does it for all.
DEVICE void prefetch_norm(CTX, const NormConstants c, GPTR(const float) weight, uint cols) {
    if (c.has_norm && ctx.group_x() == 0 && ctx.warp() == 0) warp_prefetch(ctx, GCAST(const uchar, weight), 4 * cols);
}

// Factor of a norm from the squares that each warp has summed.
DEVICE float norm_factor(CTX, const NormConstants c, uint cols, SPTR(const float) scratch) {
    float sum = 0.0f;
    for (uint i = 0; i < ctx.warps(); ++i) sum += scratch[i];
    return c.has_norm ? 1.0f / sqrt_of(sum / (float)cols + c.eps) : 1.0f;
}

// The first eight columns that a thread enters, and their weights in the norm: read before other work, so as not to wait
// for them after it.
struct Entering {
    Float8 x, weight;
};

DEVICE Entering entering_at(CTX, const NormConstants c, GPTR(const float) x, GPTR(const float) weight, uint cols, uint i) {
    Entering e = {{{0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f}}, {{1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f}}};
    if (i >= cols / 8) return e;
    e.x = floats8(x, i);
    if (c.has_norm) e.weight = floats8(weight, i);
    return e;
}

DEVICE Entering entering(CTX, const NormConstants c, GPTR(const float) x, GPTR(const float) weight, uint cols) {
    return entering_at(ctx, c, x, weight, cols, ctx.thread());
}

// A row x of `cols` columns, a multiple of 32, as bytes with scales: of x ⊙ weight if there is a norm. Products are to be
// multiplied by the result, the norm's factor, which all elements share. `scratch` holds a float a warp. `e` is what
// `entering` gave. All threads of the group take part.
DEVICE float enter_bytes(CTX, const NormConstants c, GPTR(const float) x, GPTR(const float) weight, uint cols,
                         SPTR(uint) words, SPTR(float) scales, SPTR(float) scratch, Entering e) {
    const uint pieces = cols / 8;
    float squares = 0.0f;
    for (uint base = ctx.warp() * 32; base < pieces; base += ctx.threads()) {
        const uint i = base + ctx.lane();
        Float8 v = e.x;
        float own = 0.0f, most = 0.0f;
#pragma unroll
        for (uint j = 0; j < 8; ++j) {
            own = fma_of(v.v[j], v.v[j], own);
            v.v[j] *= e.weight.v[j];
            const float magnitude = abs_of(v.v[j]);
            most = magnitude > most ? magnitude : most;
        }
        squares += own;
        e = entering_at(ctx, c, x, weight, cols, i + ctx.threads());
        most = quad_max(ctx, most);
        // Zero, or NaN if an element is not finite.
        const float poison = quad_sum(ctx, own * 0.0f);
        const float d = most * (1.0f / 127.0f) + poison, inverse = most > 0.0f ? 127.0f / most : 0.0f;
        uint packed[2];
#pragma unroll
        for (uint j = 0; j < 2; ++j) {
            packed[j] = packed_codes(v.v[4 * j] * inverse, v.v[4 * j + 1] * inverse, v.v[4 * j + 2] * inverse,
                                     v.v[4 * j + 3] * inverse);
        }
        const float total = quad_sum(ctx, (float)dot4(packed[0], 0x01010101u, dot4(packed[1], 0x01010101u, 0)));
        if (i < pieces) {
            words[2 * i] = packed[0];
            words[2 * i + 1] = packed[1];
            if (i % 4 == 0) {
                scales[i / 2] = d;
                scales[i / 2 + 1] = d * total;
            }
        }
    }
    squares = lane_sum(ctx, squares);
    if (ctx.lane() == 0) scratch[ctx.warp()] = squares;
    barrier(ctx);
    return norm_factor(ctx, c, cols, scratch);
}

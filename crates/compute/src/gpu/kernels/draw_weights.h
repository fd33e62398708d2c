// What choosing tokens by rows of logits is made of, in the whole numbers of `draw.rs`, which says what halvings, weights and cuts
// are: their sums are the same in any order.
#pragma once
#include "dialect.h"

CONSTANT uint SEGMENTS = 512, BINS = 1024, LISTED = 2048;
CONSTANT uint FRACTION_BITS = 24, BIN_BITS = 20, DIGIT_BITS = 10, ID_BITS = 20;
// log₂ e.
CONSTANT float HALVINGS_A_NAT = 1.44269504f;
// What a forbidden token's logit is, and what is so low.
CONSTANT float FORBIDDEN = -3.4e38f, LOWEST = -3.0e38f;
// No token.
CONSTANT uint NONE = 0xffffffff;

// Words that say how a row's token is chosen.
CONSTANT uint HOW_WORDS = 8;
CONSTANT uint MODE = 0, SCALE = 1, TOP_K = 2, TOP_P = 3, MOST_HALVINGS = 5, RANDOM = 6;
// Modes: nothing is chosen; the most likely token; one is drawn, with the rules by which tokens are left out.
CONSTANT uint SKIPPED = 0, BEST = 1, DRAWN = 2, BY_COUNT = 4, BY_MASS = 8, BY_LEAST = 16;

struct DrawConstants {
    uint vocab, segments;
    // Elements of a segment, a multiple of 32.
    uint each;
    // Elements of a row that can be chosen; those after them are padding.
    uint tokens;
    // Of them, those that a group counts or lists.
    uint counted;
};

// The largest of a row's maxima, NaN if one is; in every thread.
DEVICE float best_of(CTX, GPTR(const float) maxima, uint segments, SPTR(float) scratch) {
    float best = -infinity(), bad = 0.0f;
    for (uint i = ctx.thread(); i < segments; i += ctx.threads()) {
        const float x = maxima[i];
        bad = x != x ? 1.0f : bad;
        best = x > best ? x : best;
    }
    best = group_max(ctx, best, scratch);
    return group_max(ctx, bad, scratch) > 0.0f ? not_a_number() : best;
}

DEVICE uint halvings_of(float logit, float best, float scale) {
    const float exact = (best - logit) * scale;
    return (uint)((exact < 62.0f ? exact : 62.0f) * 16777216.0f);
}

DEVICE ulong weight_of(uint halvings) {
    const ulong z = ~(halvings << (32 - FRACTION_BITS));
    // (ln 2)ᵏ / k! in units of 2⁻³².
    ulong sum = 437;
    sum = (sum * z >> 32) + 5676;
    sum = (sum * z >> 32) + 65509;
    sum = (sum * z >> 32) + 661576;
    sum = (sum * z >> 32) + 5726719;
    sum = (sum * z >> 32) + 41309549;
    sum = (sum * z >> 32) + 238388331;
    sum = (sum * z >> 32) + 1031764991;
    sum = (sum * z >> 32) + 2977044471;
    return (((ulong)1 << 32 | sum * z >> 32) << 7) >> (halvings >> FRACTION_BITS);
}

// Sums over lanes of numbers of 64 bits: those of the lanes before and its own.
DEVICE ulong lane_scan(CTX, ulong v) {
    for (uint step = 1; step < 32; step *= 2) {
        const uint from = ctx.lane() >= step ? ctx.lane() - step : 0;
        const uint low = lane_read(ctx, (uint)v, from), high = lane_read(ctx, (uint)(v >> 32), from);
        if (ctx.lane() >= step) v += (ulong)high << 32 | low;
    }
    return v;
}

// The sum over the threads before, and over all; `scratch` holds one number a warp.
struct Sums {
    ulong before, all;
};
DEVICE Sums group_scan(CTX, ulong v, SPTR(ulong) scratch) {
    const ulong upto = lane_scan(ctx, v);
    if (ctx.lane() == 31) scratch[ctx.warp()] = upto;
    barrier(ctx);
    Sums sums = {upto - v, 0};
    for (uint i = 0; i < ctx.warps(); ++i) {
        const ulong own = scratch[i];
        if (i < ctx.warp()) sums.before += own;
        sums.all += own;
    }
    barrier(ctx);
    return sums;
}

// `value` times so many units of 2⁻³², rounded up.
DEVICE ulong part_of(ulong value, ulong units) {
    return (value >> 32) * units + (((value & 0xffffffff) * units + 0xffffffff) >> 32);
}

// The upper 64 bits of the product.
DEVICE ulong high_product(ulong a, ulong b) {
    const ulong a0 = a & 0xffffffff, a1 = a >> 32, b0 = b & 0xffffffff, b1 = b >> 32;
    const ulong middle = a1 * b0 + (a0 * b0 >> 32);
    return a1 * b1 + (middle >> 32) + ((a0 * b1 + (middle & 0xffffffff)) >> 32);
}

DEVICE ulong two_words(GPTR(const uint) from) { return (ulong)from[1] << 32 | from[0]; }

// The least of a group's numbers; `scratch` holds one a warp.
DEVICE uint group_min(CTX, uint v, SPTR(uint) scratch) {
    v = lane_min(ctx, v);
    if (ctx.lane() == 0) scratch[ctx.warp()] = v;
    barrier(ctx);
    for (uint i = 0; i < ctx.warps(); ++i) v = scratch[i] < v ? (uint)scratch[i] : v;
    barrier(ctx);
    return v;
}

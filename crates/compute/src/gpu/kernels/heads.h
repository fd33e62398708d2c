// Heads of tokens that are each the newest of a sequence: what attention of decoding reads, and how a head is made ready.
#pragma once
#include "cache.h"
#include "pieces.h"

struct DecodeConstants {
    // Query and key heads, and groups that share a key head.
    uint heads, kv_heads, chunks;
    // Whether heads of queries and keys are normalised first.
    uint q_norm, k_norm;
    float q_eps, k_eps;
    // Pairs that rotate, and whether channels 2i and 2i + 1 form one; else i and i + pairs.
    uint pairs, interleaved;
    float scale;
    // Keys seen, at most: 0 for all.
    uint window;
    // Parts that each row's keys are divided into.
    uint splits;
    // Whether `sinks` holds a logit for each head.
    uint has_sinks;
};

// A head of DIM channels, normalised and rotated, by a warp.
template <uint DIM>
DEVICE void prepare_head(CTX, const DecodeConstants c, GPTR(const float) from, bool normed,
                         GPTR(const float) weight, float eps, GPTR(const float) angles, SPTR(float) to) {
    float factor = 1.0f;
    if (normed) {
        float squares = 0.0f;
#pragma unroll
        for (uint i = ctx.lane(); i < DIM; i += 32) squares += from[i] * from[i];
        factor = inverse_sqrt(lane_sum(ctx, squares) * (1.0f / (float)DIM) + eps);
    }
    for (uint i = ctx.lane(); i < c.pairs; i += 32) {
        const uint first = c.interleaved ? 2 * i : i, second = c.interleaved ? 2 * i + 1 : i + c.pairs;
        const float a = normed ? from[first] * factor * weight[first] : (float)from[first];
        const float b = normed ? from[second] * factor * weight[second] : (float)from[second];
        const float cosine = angles[2 * i], sine = angles[2 * i + 1];
        to[first] = a * cosine - b * sine;
        to[second] = b * cosine + a * sine;
    }
    for (uint i = 2 * c.pairs + ctx.lane(); i < DIM; i += 32) {
        to[i] = normed ? from[i] * factor * weight[i] : (float)from[i];
    }
}

struct DecodeBuffers {
    GPTR(const float) q;
    GPTR(const float) k;
    GPTR(const float) v;
    GPTR(const float) q_weight;
    GPTR(const float) k_weight;
    GPTR(const float) angles;
    GPTR(const Place) places;
    GPTR(const uint) pages;
    GPTR(const float) sinks;
    GPTR(uchar) keys;
    GPTR(uchar) values;
    GPTR(float) stats;
    GPTR(float) out;
};

DEVICE uint packed_halves(float a, float b) { return (uint)f32_to_f16(a) | (uint)f32_to_f16(b) << 16; }

DEVICE Word4 packed8(const Float8 f) {
    Word4 w = {packed_halves(f.v[0], f.v[1]), packed_halves(f.v[2], f.v[3]), packed_halves(f.v[4], f.v[5]),
               packed_halves(f.v[6], f.v[7])};
    return w;
}

// Heads of tokens that are each the newest of a sequence: what attention of decoding reads, and how a head is made ready.
#pragma once
#include "cache.h"
#include "row_dots.h"
#include "quads.h"
#include "seen.h"

struct DecodeConstants {
    // Query and key heads, and groups that share a key head.
    uint heads, kv_heads, chunks;
    // Whether heads of queries and keys are normalised first.
    uint q_norm, k_norm;
    float q_eps, k_eps;
    // Pairs that rotate, and whether channels 2i and 2i + 1 form one; else i and i + pairs.
    uint pairs, interleaved;
    float scale;
    // See `first_seen`.
    uint window, chunk;
    // Parts that each row's keys are divided into.
    uint splits;
    // Whether `sinks` holds a logit for each head.
    uint has_sinks;
    // Whether keys and values are appended to the cache, and whether queries attend. Rows of one sequence see each other's keys:
    // one dispatch appends all of them, and attends no query, before others attend.
    uint appends, attends;
    // Whether what comes out is rounded to eight bits too, where it is not in parts.
    uint rounds;
};

// A head of DIM channels, normalised and rotated, by a warp.
template <uint DIM>
DEVICE void prepare_head(CTX, const DecodeConstants c, GPTR(const float) from, bool normed,
                         GPTR(const float) weight, float eps, GPTR(const float) angles, SPTR(float) to) {
    // All that is read of pairs is under way together; beyond them, the first one.
    constexpr uint EACH = DIM / 64;
    float ones[EACH], others[EACH], one_weights[EACH], other_weights[EACH], cosines[EACH], sines[EACH];
#pragma unroll
    for (uint n = 0; n < EACH; ++n) {
        const uint own = ctx.lane() + 32 * n, i = own < c.pairs ? own : 0;
        const uint first = c.interleaved ? 2 * i : i, second = c.interleaved ? 2 * i + 1 : i + c.pairs;
        ones[n] = from[first];
        others[n] = from[second];
        one_weights[n] = normed ? (float)weight[first] : 1.0f;
        other_weights[n] = normed ? (float)weight[second] : 1.0f;
        cosines[n] = angles[2 * i];
        sines[n] = angles[2 * i + 1];
    }
    float factor = 1.0f;
    if (normed) {
        float squares = 0.0f;
#pragma unroll
        for (uint i = ctx.lane(); i < DIM; i += 32) squares += from[i] * from[i];
        factor = inverse_sqrt(lane_sum(ctx, squares) * (1.0f / (float)DIM) + eps);
    }
#pragma unroll
    for (uint n = 0; n < EACH; ++n) {
        const uint i = ctx.lane() + 32 * n;
        if (i >= c.pairs) continue;
        const uint first = c.interleaved ? 2 * i : i, second = c.interleaved ? 2 * i + 1 : i + c.pairs;
        const float a = ones[n] * factor * one_weights[n], b = others[n] * factor * other_weights[n];
        to[first] = a * cosines[n] - b * sines[n];
        to[second] = b * cosines[n] + a * sines[n];
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

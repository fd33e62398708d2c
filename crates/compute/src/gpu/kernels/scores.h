// Attention of up to QUERIES query heads that share a key head, a tile of 128 keys after the other, by 128 threads: scores of
// keys, and the softmax over all tiles (Milakov & Gimelshein, Online normalizer calculation for softmax, 2018).
#pragma once
#include "cache.h"

// Query heads that a group handles, the most channels of a key, and keys of a tile.
CONSTANT uint QUERIES = 8, MAX_DIM = 640, KEYS = 128;

// Threadgroup memory of a group.
struct ScoreMemory {
    // (QUERIES, dim), scaled.
    SPTR(float) query;
    // (QUERIES, KEYS): scores, then weights of the tile's keys.
    SPTR(float) scores;
    // (QUERIES): what earlier tiles count, largest scores, sums of weights.
    SPTR(float) factors;
    SPTR(float) maxima;
    SPTR(float) sums;
};

// clang-format off
#define SCORE_MEMORY(name)                    \
    SHARED(float, query, QUERIES * MAX_DIM);  \
    SHARED(float, scores, QUERIES * KEYS);    \
    SHARED(float, factors, QUERIES);          \
    SHARED(float, maxima, QUERIES);           \
    SHARED(float, sums, QUERIES);             \
    const ScoreMemory name = {query, scores, factors, maxima, sums}
// clang-format on

// Brings queries q (queries, dim) into threadgroup memory; `sinks` (queries) join the softmax if they are asked for. A
// barrier must follow.
DEVICE void begin_scores(CTX, const ScoreMemory m, GPTR(const float) q, uint queries, uint dim, float scale,
                         GPTR(const float) sinks, bool has_sinks) {
    for (uint i = ctx.thread(); i < queries * dim; i += ctx.threads()) m.query[i] = q[i] * scale;
    if (ctx.thread() < QUERIES) {
        const bool sink = has_sinks && ctx.thread() < queries;
        m.maxima[ctx.thread()] = sink ? (float)sinks[ctx.thread()] : -infinity();
        m.sums[ctx.thread()] = sink ? 1.0f : 0.0f;
    }
}

// Scores of a thread's key, which begins at element `key`; `wide` is whether it can be loaded eight elements at a time.
DEVICE void score_key(CTX, const ScoreMemory m, GPTR(const uchar) keys, ulong key, uint queries, uint dim, bool wide,
                      uint kv_type) {
    float dots[QUERIES];
#pragma unroll
    for (uint h = 0; h < QUERIES; ++h) dots[h] = 0.0f;
    if (wide) {
        const GPTR(const uchar) from = keys + key * 2;
        for (uint d = 0; d < dim; d += 8) {
            const Word4 w = load_u32x4(from, 2 * d);
            const float k0 = f16_to_f32((ushort)w.x), k1 = f16_to_f32((ushort)(w.x >> 16));
            const float k2 = f16_to_f32((ushort)w.y), k3 = f16_to_f32((ushort)(w.y >> 16));
            const float k4 = f16_to_f32((ushort)w.z), k5 = f16_to_f32((ushort)(w.z >> 16));
            const float k6 = f16_to_f32((ushort)w.w), k7 = f16_to_f32((ushort)(w.w >> 16));
#pragma unroll
            for (uint h = 0; h < QUERIES; ++h) {
                if (h >= queries) continue;
                const Float4 a = load_f32x4(m.query, h * dim + d);
                const Float4 b = load_f32x4(m.query, h * dim + d + 4);
                dots[h] += a.x * k0 + a.y * k1 + a.z * k2 + a.w * k3 + b.x * k4 + b.y * k5 + b.z * k6 + b.w * k7;
            }
        }
    } else if (kv_type == KV_Q8_0) {
        GPTR(const ushort) block = GCAST(const ushort, keys) + key / KV_BLOCK * KV_BLOCK_PAIRS;
        for (uint d = 0; d < dim; d += KV_BLOCK, block += KV_BLOCK_PAIRS) {
            const float scale = f16_to_f32(block[0]);
            for (uint i = 0; i < KV_BLOCK; i += 8) {
                float k[8];
#pragma unroll
                for (uint j = 0; j < 4; ++j) {
                    const uint pair = block[1 + i / 2 + j];
                    k[2 * j] = scale * (float)(signed char)(pair & 255u);
                    k[2 * j + 1] = scale * (float)(signed char)(pair >> 8);
                }
#pragma unroll
                for (uint h = 0; h < QUERIES; ++h) {
                    if (h >= queries) continue;
                    const Float4 a = load_f32x4(m.query, h * dim + d + i);
                    const Float4 b = load_f32x4(m.query, h * dim + d + i + 4);
                    dots[h] += a.x * k[0] + a.y * k[1] + a.z * k[2] + a.w * k[3] + b.x * k[4] + b.y * k[5]
                             + b.z * k[6] + b.w * k[7];
                }
            }
        }
    } else {
        for (uint d = 0; d < dim; ++d) {
            const float k = cached(keys, key + d, kv_type);
#pragma unroll
            for (uint h = 0; h < QUERIES; ++h) {
                if (h < queries) dots[h] += m.query[h * dim + d] * k;
            }
        }
    }
#pragma unroll
    for (uint h = 0; h < QUERIES; ++h) {
        if (h < queries) m.scores[h * KEYS + ctx.thread()] = dots[h];
    }
}

// Turns a tile's scores of `count` keys into weights: a warp those of every fourth query. Barriers must precede and follow.
DEVICE void weigh_keys(CTX, const ScoreMemory m, uint queries, uint count) {
    for (uint h = ctx.warp(); h < queries; h += 4) {
        float best = -infinity();
        bool poisoned = false;
        for (uint i = ctx.lane(); i < count; i += 32) {
            const float s = m.scores[h * KEYS + i];
            best = s > best ? s : best;
            poisoned = poisoned || s != s;
        }
        // Read by the lane that writes it.
        const float old = lane_read(ctx, ctx.lane() == 0 ? (float)m.maxima[h] : 0.0f, 0);
        best = lane_max(ctx, best > old ? best : old);
        float sum = poisoned ? not_a_number() : 0.0f;
        for (uint i = ctx.lane(); i < count; i += 32) {
            const float weight = exp_of(m.scores[h * KEYS + i] - best);
            m.scores[h * KEYS + i] = weight;
            sum += weight;
        }
        sum = lane_sum(ctx, sum);
        if (ctx.lane() == 0) {
            m.factors[h] = best > old ? exp_of(old - best) : 1.0f;
            m.sums[h] = m.sums[h] * m.factors[h] + sum;
            m.maxima[h] = best;
        }
    }
}

// Channels thread, thread + 128, … of each query's values.
struct Mixed {
    float v[QUERIES][4];
};

DEVICE Mixed no_values() {
    Mixed mixed;
#pragma unroll
    for (uint h = 0; h < QUERIES; ++h) {
#pragma unroll
        for (uint n = 0; n < 4; ++n) mixed.v[h][n] = 0.0f;
    }
    return mixed;
}

// What earlier tiles count beside the one just weighed.
DEVICE Mixed faded(const ScoreMemory m, Mixed mixed, uint queries) {
#pragma unroll
    for (uint h = 0; h < QUERIES; ++h) {
        if (h >= queries) continue;
        const float factor = m.factors[h];
#pragma unroll
        for (uint n = 0; n < 4; ++n) mixed.v[h][n] *= factor;
    }
    return mixed;
}

// Adds the value of the tile's key i; `value` is where the thread's first channel is.
DEVICE Mixed with_value(CTX, const ScoreMemory m, Mixed mixed,
                        GPTR(const uchar) values, ulong value, uint i, uint queries,
                        uint dim, uint kv_type) {
#pragma unroll
    for (uint n = 0; n < 4; ++n) {
        if (ctx.thread() + 128 * n >= dim) continue;
        const float v = cached(values, value + 128 * n, kv_type);
#pragma unroll
        for (uint h = 0; h < QUERIES; ++h) {
            if (h < queries) mixed.v[h][n] += m.scores[h * KEYS + i] * v;
        }
    }
    return mixed;
}

// With one split, the results → out (heads, dim). With more, the sums of values weighted by e^(score − max) → out (heads,
// splits, dim), and that max and the sums of weights → stats (heads, splits, 2). `head` is the first query's.
DEVICE void end_scores(CTX, const ScoreMemory m, const Mixed mixed, ulong head, uint queries, uint split, uint splits,
                       uint dim, GPTR(float) stats, GPTR(float) out) {
#pragma unroll
    for (uint h = 0; h < QUERIES; ++h) {
        if (h >= queries) continue;
        const ulong part = (head + h) * splits + split;
        const float divisor = splits == 1 ? (float)m.sums[h] : 1.0f;
#pragma unroll
        for (uint n = 0; n < 4; ++n) {
            const uint d = ctx.thread() + 128 * n;
            if (d < dim) out[part * dim + d] = mixed.v[h][n] / divisor;
        }
        if (splits > 1 && ctx.thread() == 0) {
            stats[part * 2] = m.maxima[h];
            stats[part * 2 + 1] = m.sums[h];
        }
    }
}

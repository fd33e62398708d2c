// The router: scores of all experts, the best of them, their weights.
#pragma once
#include "dialect.h"

CONSTANT uint MAX_EXPERTS = 1024, MAX_CHOSEN = 64;
// Scores.
CONSTANT uint SOFTMAX = 0, SIGMOID = 1, SOFTMAX_OF_CHOSEN = 2, SQRT_SOFTPLUS = 3, SPARSE_MIXER = 4,
              SIGMOID_OF_CHOSEN = 5;
// What ranks groups: their best expert, or the sum of their two best; and the same where experts of other groups are chosen by
// zero, and not left out.
CONSTANT uint BEST = 0, BEST_TWO = 1, BEST_TWO_ELSE_ZERO = 2;

struct RouteConstants {
    uint experts, top_k, score;
    // Groups of experts (0: none), groups kept, and what ranks them.
    uint groups, keep, rank;
    uint renormalize;
    // Added to the sum that weights are divided by, or of SparseMixer what is close; and the weights' factor.
    float epsilon, scale;
    uint has_bias;
};

// Threadgroup memory of a choice.
struct RouteMemory {
    // (MAX_EXPERTS), what experts are weighted by.
    SPTR(float) scores;
    // (MAX_EXPERTS), what they are chosen by; with groups, (MAX_EXPERTS) what these are chosen by.
    SPTR(uint) keys;
    SPTR(uint) group_keys;
    // (MAX_CHOSEN), best first.
    SPTR(uint) chosen;
};

// Whether experts are chosen by their logits as they are: softmax keeps their order, without its rounding.
DEVICE bool by_logits(const RouteConstants c) {
    return !c.has_bias && c.groups == 0
        && (c.score == SOFTMAX || c.score == SOFTMAX_OF_CHOSEN || c.score == SIGMOID_OF_CHOSEN);
}

// Orders as floats do, with NaN above all; 0 is below all keys.
DEVICE uint key_of(float v) {
    const uint bits = as_uint(v + 0.0f);
    return v != v ? 0xffffffffu : bits >> 31 ? ~bits : bits | 0x80000000u;
}

DEVICE uint precedes(uint key, uint i, uint own, uint own_index) {
    return key > own || (key == own && i < own_index) ? 1 : 0;
}

// Keys up to a multiple of four, which `keys_before` reads, are 0.
DEVICE void pad_keys(CTX, SPTR(uint) keys, uint count) {
    if (ctx.thread() < 4 && count + ctx.thread() < (count + 3) / 4 * 4) keys[count + ctx.thread()] = 0;
}

// How many of `count` keys come before that of index i: the larger, then the lower index.
DEVICE uint keys_before(SPTR(const uint) keys, uint count, uint i) {
    const uint own = keys[i];
    uint before = 0;
#pragma unroll 4
    for (uint other = 0; other < count; other += 4) {
        const Word4 k = load_u32x4(keys, other);
        before += precedes(k.x, other, own, i) + precedes(k.y, other + 1, own, i) + precedes(k.z, other + 2, own, i)
                + precedes(k.w, other + 3, own, i);
    }
    return before;
}

// Chooses experts by a row of logits: m.chosen. All threads of the group take part, and see the choice. With `weigh`, what
// weights are made of is in m.scores; the result is then zero, or NaN if a logit is not finite.
DEVICE float choose(CTX, const RouteConstants c, GPTR(const float) logits, GPTR(const float) bias, const RouteMemory m,
                    bool weigh) {
    const bool plain = by_logits(c);
    float best = -infinity(), poison = 0.0f, sum = 1.0f;
    // Every warp sums for itself.
    if (weigh || !plain) {
        for (uint e = ctx.lane(); e < c.experts; e += 32) {
            const float l = logits[e];
            best = l > best ? l : best;
            poison += l * 0.0f;
        }
        best = lane_max(ctx, best);
        poison = lane_sum(ctx, poison);
        if (c.score == SOFTMAX) {
            sum = 0.0f;
            for (uint e = ctx.lane(); e < c.experts; e += 32) sum += exp_of(logits[e] - best);
            sum = lane_sum(ctx, sum);
        }
    }
    for (uint e = ctx.thread(); e < c.experts; e += ctx.threads()) {
        const float l = logits[e];
        float score = l;
        if (weigh || !plain) {
            score = c.score == SOFTMAX       ? exp_of(l - best) / sum
                  : c.score == SIGMOID       ? sigmoid(l)
                  : c.score == SQRT_SOFTPLUS ? sqrt_of(softplus(l))
                                             : l;
            m.scores[e] = score;
        }
        m.keys[e] = key_of((plain ? l : score) + (c.has_bias ? (float)bias[e] : 0.0f));
    }
    pad_keys(ctx, m.keys, c.experts);
    if (c.groups != 0) pad_keys(ctx, m.group_keys, c.groups);
    barrier(ctx);
    if (c.groups != 0) {
        const uint size = c.experts / c.groups;
        for (uint g = ctx.thread(); g < c.groups; g += ctx.threads()) {
            float first = -infinity(), second = -infinity();
            for (uint i = 0; i < size; ++i) {
                const uint e = g * size + i;
                const float r = m.scores[e] + (c.has_bias ? (float)bias[e] : 0.0f);
                if (r > first) {
                    second = first;
                    first = r;
                } else if (r > second) {
                    second = r;
                }
            }
            m.group_keys[g] = key_of(c.rank != BEST && size > 1 ? first + second : first);
        }
        barrier(ctx);
        for (uint g = ctx.thread(); g < c.groups; g += ctx.threads()) {
            if (keys_before(m.group_keys, c.groups, g) < c.keep) continue;
            for (uint i = 0; i < size; ++i) m.keys[g * size + i] = c.rank == BEST_TWO_ELSE_ZERO ? key_of(0.0f) : 0;
        }
        barrier(ctx);
    }
    for (uint e = ctx.thread(); e < c.experts; e += ctx.threads()) {
        const uint before = keys_before(m.keys, c.experts, e);
        if (before < c.top_k) m.chosen[before] = e;
    }
    barrier(ctx);
    return poison;
}

// SparseMixer's weight of the n-th chosen expert: its part of a softmax over those that are close and not chosen before.
DEVICE float mixed_weight(const RouteConstants c, const RouteMemory m, uint n) {
    const float best = m.scores[m.chosen[n]];
    float sum = 0.0f;
    for (uint e = 0; e < c.experts; ++e) {
        const float l = m.scores[e], size = abs_of(l);
        bool taken = false;
        for (uint k = 0; k < n; ++k) taken = taken || m.chosen[k] == e;
        const bool far = quotient(best - l, size > best ? size : best) > 2.0f * c.epsilon;
        sum += far || taken ? 0.0f : exp_of(l - best);
    }
    return quotient(1.0f, sum);
}

// What a chosen expert counts by its score, before that is divided by a sum; `top` is the best one's.
DEVICE float chosen_weight(const RouteConstants c, float score, float top) {
    return c.score == SOFTMAX_OF_CHOSEN ? exp_of(score - top)
         : c.score == SIGMOID_OF_CHOSEN ? sigmoid(score)
                                        : score;
}

// Ids and weights (top_k) of what was chosen with `weigh`: few, so that one thread sums them, in order.
DEVICE void weigh_chosen(CTX, const RouteConstants c, const RouteMemory m, float poison, GPTR(uint) ids,
                         GPTR(float) weights) {
    if (c.score == SPARSE_MIXER) {
        for (uint k = 0; k < c.top_k; ++k) {
            ids[k] = m.chosen[k];
            weights[k] = mixed_weight(c, m, k) * c.scale + poison;
        }
        return;
    }
    const float top = m.scores[m.chosen[0]];
    float total = 0.0f;
    for (uint k = 0; k < c.top_k; ++k) total += chosen_weight(c, m.scores[m.chosen[k]], top);
    if (!c.renormalize) total = c.score == SOFTMAX_OF_CHOSEN ? total : 1.0f;
    else total = c.score == SOFTMAX_OF_CHOSEN ? total : total + c.epsilon;
    for (uint k = 0; k < c.top_k; ++k) {
        ids[k] = m.chosen[k];
        weights[k] = chosen_weight(c, m.scores[m.chosen[k]], top) / total * c.scale + poison;
    }
}

// The most experts that a warp chooses among by itself, and the most that it chooses.
CONSTANT uint WARP_EXPERTS = 128, WARP_CHOSEN = 32;

// Whether a warp can choose by itself: by the logits as they are.
DEVICE bool warp_chooses(const RouteConstants c) {
    return by_logits(c) && c.experts <= WARP_EXPERTS && c.top_k <= WARP_CHOSEN;
}

// The best `count` experts by a row of logits, the n-th of them in lane n and the last one in the lanes from there on: what
// `choose` chooses. Each warp for itself.
DEVICE uint warp_choose(CTX, const RouteConstants c, GPTR(const float) logits, uint count) {
    constexpr uint EACH = WARP_EXPERTS / 32;
    uint keys[EACH];
#pragma unroll
    for (uint i = 0; i < EACH; ++i) {
        const uint e = ctx.lane() + 32 * i;
        keys[i] = e < c.experts ? key_of(logits[e]) : 0;
    }
    uint mine = 0;
    for (uint n = 0; n < count; ++n) {
        uint best = keys[0], at = 0;
#pragma unroll
        for (uint i = 1; i < EACH; ++i) {
            at = keys[i] > best ? i : at;
            best = keys[i] > best ? keys[i] : best;
        }
        const uint top = lane_max(ctx, best);
        const uint expert = lane_min(ctx, best == top ? ctx.lane() + 32 * at : 0xffffffffu);
#pragma unroll
        for (uint i = 0; i < EACH; ++i) keys[i] = ctx.lane() + 32 * i == expert ? 0 : keys[i];
        mine = ctx.lane() >= n ? expert : mine;
    }
    return mine;
}

// Ids and weights (top_k) of a row whose experts `warp_choose` chooses, with the bits of `choose` and `weigh_chosen`.
DEVICE void warp_route(CTX, const RouteConstants c, GPTR(const float) logits, GPTR(uint) ids, GPTR(float) weights) {
    float best = -infinity(), poison = 0.0f, sum = 1.0f;
    for (uint e = ctx.lane(); e < c.experts; e += 32) {
        const float l = logits[e];
        best = l > best ? l : best;
        poison += l * 0.0f;
    }
    best = lane_max(ctx, best);
    poison = lane_sum(ctx, poison);
    if (c.score == SOFTMAX) {
        sum = 0.0f;
        for (uint e = ctx.lane(); e < c.experts; e += 32) sum += exp_of(logits[e] - best);
        sum = lane_sum(ctx, sum);
    }
    const uint chosen = warp_choose(ctx, c, logits, c.top_k);
    const float l = logits[chosen], score = c.score == SOFTMAX ? exp_of(l - best) / sum : l;
    const float counts = chosen_weight(c, score, lane_read(ctx, score, 0));
    float total = 0.0f;
    for (uint k = 0; k < c.top_k; ++k) total += lane_read(ctx, counts, k);
    if (!c.renormalize) total = c.score == SOFTMAX_OF_CHOSEN ? total : 1.0f;
    else total = c.score == SOFTMAX_OF_CHOSEN ? total : total + c.epsilon;
    if (ctx.lane() >= c.top_k) return;
    ids[ctx.lane()] = chosen;
    weights[ctx.lane()] = counts / total * c.scale + poison;
}

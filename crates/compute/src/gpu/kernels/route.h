// The router: scores of all experts, the best of them, their weights.
#include "dialect.h"

CONSTANT uint MAX_EXPERTS = 1024, MAX_CHOSEN = 64;
// Scores.
CONSTANT uint SOFTMAX = 0, SIGMOID = 1, SOFTMAX_OF_CHOSEN = 2;

struct RouteConstants {
    uint experts, top_k, score;
    // Groups of experts (0: none), groups kept, and how many of a group's best experts rank it.
    uint groups, keep, rank;
    uint renormalize;
    float scale;
    uint has_bias;
};

// Whether rank a of index i comes before rank b of index j: the larger, then the lower index; NaN before all.
DEVICE bool precedes(float a, uint i, float b, uint j) {
    if (a != a || b != b) return a != a && (b == b || i < j);
    return a > b || (a == b && i < j);
}

// The best of a warp's candidates, in every lane.
DEVICE uint best_of_lanes(CTX, float rank, uint index) {
    FOR_LANES(mask) {
        const float other = lane_xor(ctx, rank, mask);
        const uint other_index = lane_xor(ctx, index, mask);
        if (precedes(other, other_index, rank, index)) {
            rank = other;
            index = other_index;
        }
    }
    return index;
}

// Logits (rows, experts) → ids (rows, top_k), best first, and weights (rows, top_k). A group of 32 threads does a row.
KERNEL(route, RouteConstants, (const float, logits), (const float, bias), (uint, ids), (float, weights)) {
    SHARED(float, scores, MAX_EXPERTS);
    // What experts are chosen by; of those that cannot be chosen (again), `open` is 0.
    SHARED(float, ranks, MAX_EXPERTS);
    SHARED(uint, open, MAX_EXPERTS);
    SHARED(float, group_ranks, MAX_EXPERTS);
    SHARED(uint, chosen, MAX_CHOSEN);
    const uint row = ctx.group_x(), lane = ctx.lane();
    const GPTR(const float) own = logits + (ulong)row * c.experts;
    float best = -infinity(), poison = 0.0f;
    for (uint e = lane; e < c.experts; e += 32) {
        const float l = own[e];
        best = l > best ? l : best;
        poison += l * 0.0f;
    }
    best = lane_max(ctx, best);
    poison = lane_sum(ctx, poison);
    float sum = 0.0f;
    for (uint e = lane; e < c.experts; e += 32) {
        const float l = own[e];
        const float s = c.score == SOFTMAX ? exp_of(l - best) : c.score == SIGMOID ? sigmoid(l) : l;
        scores[e] = s;
        sum += s;
    }
    sum = lane_sum(ctx, sum);
    // Softmax keeps the order of the logits, without its rounding.
    const bool plain = !c.has_bias && c.groups == 0 && c.score != SIGMOID;
    for (uint e = lane; e < c.experts; e += 32) {
        if (c.score == SOFTMAX) scores[e] = scores[e] / sum;
        ranks[e] = (plain ? (float)own[e] : (float)scores[e]) + (c.has_bias ? (float)bias[e] : 0.0f);
        open[e] = c.groups == 0;
    }
    barrier(ctx);
    if (c.groups != 0) {
        const uint size = c.experts / c.groups;
        for (uint g = lane; g < c.groups; g += 32) {
            float first = -infinity(), second = -infinity();
            for (uint i = 0; i < size; ++i) {
                const float r = ranks[g * size + i];
                if (r > first) {
                    second = first;
                    first = r;
                } else if (r > second) {
                    second = r;
                }
            }
            group_ranks[g] = c.rank == 2 && size > 1 ? first + second : first;
        }
        barrier(ctx);
        for (uint g = lane; g < c.groups; g += 32) {
            uint before = 0;
            for (uint other = 0; other < c.groups; ++other) {
                before += precedes(group_ranks[other], other, group_ranks[g], g) ? 1 : 0;
            }
            for (uint i = 0; i < size; ++i) open[g * size + i] = before < c.keep;
        }
        barrier(ctx);
    }
    for (uint k = 0; k < c.top_k; ++k) {
        float rank = -infinity();
        uint index = c.experts;
        for (uint e = lane; e < c.experts; e += 32) {
            if (open[e] && (index == c.experts || precedes(ranks[e], e, rank, index))) {
                rank = ranks[e];
                index = e;
            }
        }
        index = best_of_lanes(ctx, rank, index);
        barrier(ctx);
        if (lane == 0) {
            open[index] = 0;
            chosen[k] = index;
        }
        barrier(ctx);
    }
    // The weights of the chosen, in order: few, so that one lane sums them.
    if (lane == 0) {
        const float top = scores[chosen[0]];
        float total = 0.0f;
        for (uint k = 0; k < c.top_k; ++k) {
            float w = scores[chosen[k]];
            if (c.score == SOFTMAX_OF_CHOSEN) w = exp_of(w - top);
            scores[chosen[k]] = w;
            total += w;
        }
        if (!c.renormalize) total = c.score == SOFTMAX_OF_CHOSEN ? total : 1.0f;
        else total = c.score == SOFTMAX_OF_CHOSEN ? total : total + 1e-20f;
        for (uint k = 0; k < c.top_k; ++k) {
            const ulong at = (ulong)row * c.top_k + k;
            ids[at] = chosen[k];
            weights[at] = scores[chosen[k]] / total * c.scale + poison;
        }
    }
}

// The router as a dispatch of its own: where the host or another kernel waits for the choice.
#include "routing.h"
#include "weights.h"

// Logits (rows, experts) → ids (rows, top_k), best first, and weights (rows, top_k). A group does a row.
KERNEL(route, RouteConstants, (const float, logits), (const float, bias), (uint, ids), (float, weights)) {
    SHARED(float, scores, MAX_EXPERTS);
    SHARED(uint, keys, MAX_EXPERTS);
    SHARED(uint, group_keys, MAX_EXPERTS);
    SHARED(uint, chosen, MAX_CHOSEN);
    const RouteMemory m = {scores, keys, group_keys, chosen};
    const ulong row = ctx.group_x();
    const float poison = choose(ctx, c, logits + row * c.experts, bias, m, true);
    if (ctx.thread() == 0) weigh_chosen(ctx, c, m, poison, ids + row * c.top_k, weights + row * c.top_k);
}

struct RouteRowsConstants {
    RouteConstants route;
    uint rows;
};

// The same where `warp_chooses`, with the same bits: a warp does a row, whose choice is in its lanes.
KERNEL(route_rows, RouteRowsConstants, (const float, logits), (uint, ids), (float, weights)) {
    const RouteConstants how = c.route;
    const uint row = ctx.group_x() * ctx.warps() + ctx.warp();
    if (row >= c.rows) return;
    const GPTR(const float) own = logits + (ulong)row * how.experts;
    float best = -infinity(), poison = 0.0f, sum = 1.0f;
    for (uint e = ctx.lane(); e < how.experts; e += 32) {
        const float l = own[e];
        best = l > best ? l : best;
        poison += l * 0.0f;
    }
    best = lane_max(ctx, best);
    poison = lane_sum(ctx, poison);
    if (how.score == SOFTMAX) {
        sum = 0.0f;
        for (uint e = ctx.lane(); e < how.experts; e += 32) sum += exp_of(own[e] - best);
        sum = lane_sum(ctx, sum);
    }
    const uint chosen = warp_choose(ctx, how, own, how.top_k);
    const float l = own[chosen], score = how.score == SOFTMAX ? exp_of(l - best) / sum : l;
    const float counts = chosen_weight(how, score, lane_read(ctx, score, 0));
    float total = 0.0f;
    for (uint k = 0; k < how.top_k; ++k) total += lane_read(ctx, counts, k);
    if (!how.renormalize) total = how.score == SOFTMAX_OF_CHOSEN ? total : 1.0f;
    else total = how.score == SOFTMAX_OF_CHOSEN ? total : total + how.epsilon;
    if (ctx.lane() >= how.top_k) return;
    ids[(ulong)row * how.top_k + ctx.lane()] = chosen;
    weights[(ulong)row * how.top_k + ctx.lane()] = counts / total * how.scale + poison;
}

struct ScaleChosenConstants {
    // Pairs of a row with an expert.
    uint count;
};

// weights (count) × the factor in scales (experts) of each one's expert in ids (count).
KERNEL(scale_chosen, ScaleChosenConstants, (const uint, ids), (const float, scales), (float, weights)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i < c.count) weights[i] *= scales[ids[i]];
}

struct TokenRouteConstants {
    RouteConstants route;
    // (vocab_size, top_k): ids.
    Format table;
};

// The same with the experts that a table has for a row's token.
KERNEL(route_by_token, TokenRouteConstants, (const float, logits), (const uint, tokens), (const uchar, plane0),
       (const uchar, plane1), (const uchar, plane2), (uint, ids), (float, weights)) {
    SHARED(float, scores, MAX_EXPERTS);
    SHARED(uint, keys, MAX_EXPERTS);
    SHARED(uint, group_keys, MAX_EXPERTS);
    SHARED(uint, chosen, MAX_CHOSEN);
    const RouteMemory m = {scores, keys, group_keys, chosen};
    const ulong row = ctx.group_x();
    // For the scores; the choice gives way.
    const float poison = choose(ctx, c.route, logits + row * c.route.experts, logits, m, true);
    const Row of = row_of(plane0, plane1, plane2, c.table, tokens[row]);
    for (uint i = ctx.thread(); 8 * i < c.route.top_k; i += ctx.threads()) {
        const Float8 own = load8<ANY>(c.table, of, i);
        for (uint j = 0; j < 8 && 8 * i + j < c.route.top_k; ++j) chosen[8 * i + j] = (uint)own.v[j];
    }
    barrier(ctx);
    if (ctx.thread() == 0) {
        weigh_chosen(ctx, c.route, m, poison, ids + row * c.route.top_k, weights + row * c.route.top_k);
    }
}

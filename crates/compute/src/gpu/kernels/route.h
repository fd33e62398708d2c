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

// The same where `warp_chooses`, with the same bits: a warp does a row.
KERNEL(route_rows, RouteRowsConstants, (const float, logits), (uint, ids), (float, weights)) {
    const uint row = ctx.group_x() * ctx.warps() + ctx.warp(), top_k = c.route.top_k;
    if (row >= c.rows) return;
    warp_route(ctx, c.route, logits + (ulong)row * c.route.experts, ids + (ulong)row * top_k, weights + (ulong)row * top_k);
}

// Logits (rows, experts) → out, the same shape: the softmax over the chosen ones, 0 for the others. A group does a row.
KERNEL(top_softmax, RouteConstants, (const float, logits), (float, out)) {
    SHARED(float, scores, MAX_EXPERTS);
    SHARED(uint, keys, MAX_EXPERTS);
    SHARED(uint, group_keys, MAX_EXPERTS);
    SHARED(uint, chosen, MAX_CHOSEN);
    const RouteMemory m = {scores, keys, group_keys, chosen};
    const ulong row = (ulong)ctx.group_x() * c.experts;
    const float poison = choose(ctx, c, logits + row, logits, m, true), best = scores[chosen[0]];
    float sum = 0.0f;
    for (uint i = 0; i < c.top_k; ++i) sum += exp_of(scores[chosen[i]] - best);
    for (uint e = ctx.thread(); e < c.experts; e += ctx.threads()) {
        float weight = 0.0f;
        for (uint i = 0; i < c.top_k; ++i) weight = chosen[i] == e ? exp_of(scores[e] - best) / sum + poison : weight;
        out[row + e] = weight;
    }
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

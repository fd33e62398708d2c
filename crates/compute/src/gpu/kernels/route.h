// The router as a dispatch of its own: where the host or another kernel waits for the choice.
#include "routing.h"

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

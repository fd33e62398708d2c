// Foreseeing what the next layer chooses: its router says so of this layer's residual stream, which differs little from its own.
// What misses comes over the bus while that is idle: from the end of this layer's products until the next layer chooses.
#include "placing.h"

struct ForeseeConstants {
    // The next layer's.
    Shelf shelf;
    WorthConstants worth;
    RouteConstants route;
    uint pairs;
    // How many experts, at most.
    uint count;
};

// How much must have come true of late for anything to be asked for: a slot is given up for it, and what follows waits for the end of
// its copy.
CONSTANT float LEAST_TRUST = 0.5f;

// Of the experts that the next layer's router prefers by logits (rows, experts), empties slots for the first few that have none:
// foreseen (1 + MOST_FORESEEN). What is of no use then is as if it had never come: the slot stays empty, as `owners` and `table`
// say, until `place` gives it away. Grid: (1).
KERNEL_AHEAD(foresee, ForeseeConstants, (const float, logits), (const float, bias), (uint, table), (uint, owners),
             (const float, worth), (uint, foreseen)) {
    SHARED(float, route_scores, MAX_EXPERTS);
    SHARED(uint, keys, MAX_EXPERTS);
    SHARED(uint, group_keys, MAX_EXPERTS);
    SHARED(uint, best, MAX_CHOSEN);
    SHARED(uint, chosen, MAX_PAIRS);
    SHARED(uint, ordered, MAX_PAIRS);
    SHARED(uint, wanted, MOST_FORESEEN);
    SHARED(uint, slots, MOST_FORESEEN);
    const RouteMemory r = {route_scores, keys, group_keys, best};
    const Shelf shelf = c.shelf;
    const bool trusts = as_float(foreseen[FORESEEN_TRUST]) >= LEAST_TRUST;
    uint held[PLACED_EACH];
#pragma unroll
    for (uint i = 0; i < PLACED_EACH; ++i) {
        const uint at = ctx.thread() + i * PLACERS;
        held[i] = at < shelf.slots ? (uint)owners[at] : ABSENT;
    }
    after_previous(ctx);
    choose_rows(ctx, c.route, c.pairs, logits, bias, r, chosen);
    if (ctx.thread() < MOST_FORESEEN) wanted[ctx.thread()] = slots[ctx.thread()] = ABSENT;
    // Every row's best, then every row's second.
    const uint top_k = c.route.top_k, rows = c.pairs / top_k;
    for (uint at = ctx.thread(); at < c.pairs; at += PLACERS) ordered[at] = chosen[at % rows * top_k + at / rows];
    barrier(ctx);
    for (uint at = ctx.thread(); at < c.pairs; at += PLACERS) {
        const bool is_absent = table[ordered[at]] == ABSENT;
        keys[at] = is_absent && !is_among(ordered, at, ordered[at]) ? c.pairs - at : 0;
    }
    pad_keys(ctx, keys, c.pairs);
    barrier(ctx);
    for (uint at = ctx.thread(); at < c.pairs; at += PLACERS) {
        if (keys[at] == 0) continue;
        const uint before = keys_before(keys, c.pairs, at);
        if (before < c.count) wanted[before] = ordered[at];
    }
    barrier(ctx);
    if (trusts) {
        // The least worthy first; none that is preferred.
#pragma unroll
        for (uint i = 0; i < PLACED_EACH; ++i) {
            const uint s = ctx.thread() + i * PLACERS;
            if (s >= shelf.slots) continue;
            const uint owner = held[i];
            if (owner == ABSENT) keys[s] = 0xffffffffu;
            else if (is_among(chosen, c.pairs, owner)) keys[s] = 0;
            else keys[s] = ~worth_key(c.worth, worth[2 * owner] * c.worth.long_decay, worth[2 * owner + 1] * c.worth.short_decay);
        }
        pad_keys(ctx, keys, shelf.slots);
        barrier(ctx);
#pragma unroll
        for (uint i = 0; i < PLACED_EACH; ++i) {
            const uint s = ctx.thread() + i * PLACERS;
            if (s >= shelf.slots || keys[s] == 0) continue;
            const uint before = keys_before(keys, shelf.slots, s);
            if (before >= c.count || wanted[before] == ABSENT) continue;
            if (held[i] != ABSENT) table[held[i]] = ABSENT;
            owners[s] = ABSENT;
            slots[before] = s;
        }
        barrier(ctx);
    }
    if (ctx.thread() >= c.count) return;
    const uint expert = wanted[ctx.thread()], slot = slots[ctx.thread()];
    foreseen[FORESEEN_LIST + ctx.thread()] =
        expert == ABSENT ? ABSENT : slot == ABSENT ? NOT_COMING | expert : fetch_of(expert, slot);
}

// What giving slots to experts and foreseeing the next ones have in common.
#pragma once
#include "fetch.h"
#include "routing.h"

// Threads of a group, experts and slots of each, and the most pairs.
CONSTANT uint PLACERS = 256, PLACED_EACH = MAX_EXPERTS / PLACERS, MAX_PAIRS = 8 * MAX_CHOSEN;

// What an expert is worth: how often tokens chose it, where earlier ones count less, over a long and a short while;
// factors by which a batch makes earlier tokens count less, and of both sums.
struct WorthConstants {
    float long_decay, short_decay, long_part, short_part;
};

DEVICE uint worth_key(const WorthConstants c, float of_long, float of_short) {
    return key_of(of_long * c.long_part + of_short * c.short_part);
}

// What a layer was foreseen to choose, in words: how much of that comes true, as a float, and the experts, as `fetch_of` says;
// with NOT_COMING an expert that was foreseen and not asked for.
CONSTANT uint FORESEEN_TRUST = 0, FORESEEN_LIST = 1, MOST_FORESEEN = 4;

// The experts of rows (pairs / top_k), best first: `chosen` (pairs), which all threads of the group then see.
DEVICE void choose_rows(CTX, const RouteConstants c, uint pairs, GPTR(const float) logits, GPTR(const float) bias,
                        const RouteMemory r, SPTR(uint) chosen) {
    const uint top_k = c.top_k, experts = c.experts;
    if (warp_chooses(c)) {
        // A warp a row.
        for (uint row = ctx.warp(); row * top_k < pairs; row += ctx.warps()) {
            const uint own = warp_choose(ctx, c, logits + row * experts, top_k);
            if (ctx.lane() < top_k) chosen[row * top_k + ctx.lane()] = own;
        }
    } else {
        for (uint row = 0; row * top_k < pairs; ++row) {
            choose(ctx, c, logits + row * experts, bias, r, false);
            for (uint k = ctx.thread(); k < top_k; k += ctx.threads()) chosen[row * top_k + k] = r.chosen[k];
            barrier(ctx);
        }
    }
    barrier(ctx);
}

DEVICE bool is_among(SPTR(const uint) chosen, uint pairs, uint expert) {
    bool found = false;
    for (uint p = 0; p < pairs; ++p) found = found || chosen[p] == expert;
    return found;
}

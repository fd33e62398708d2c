// Which experts have slots of the device, decided here for every token: the choice is known here, and the host is not
// waited for. A layer has slots of its own; all its experts lie in host memory, each in the form of a slot.
#include "routing.h"

CONSTANT uint ABSENT = 0xffffffffu, SLOT_UNIT = 256;

// A layer's experts and slots: how many there are, where the first is and how far apart they are, in units of SLOT_UNIT
// bytes.
struct Shelf {
    uint experts, slots;
    uint first_expert, first_slot, stride;
};

struct PlaceConstants {
    Shelf shelf;
    uint pairs;
    // What an expert is worth: how often tokens chose it, where earlier ones count less, over a long and a short while;
    // factors by which this batch makes earlier tokens count less, and of both sums.
    float long_decay, short_decay, long_part, short_part;
};

// Gives the chosen experts, ids (pairs), slots in place of the least worthy ones: no more distinct ones than there are
// slots. table (experts): where each expert's slot begins, or ABSENT. owners (slots): whose each is, or ABSENT. worth
// (experts, 2): frequencies. fetches: how many experts come from host memory, then expert and slot of each. totals: experts chosen so far, and fetched. One
// group.
KERNEL(place, PlaceConstants, (const uint, ids), (uint, table), (uint, owners), (float, worth), (uint, fetches),
       (uint, totals)) {
    SHARED(uint, counts, MAX_EXPERTS);
    SHARED(uint, scores, MAX_EXPERTS);
    SHARED(uint, keys, MAX_EXPERTS);
    SHARED(uint, missing, MAX_EXPERTS);
    SHARED(float, scratch, 8);
    const Shelf shelf = c.shelf;
    float absent = 0.0f, chosen = 0.0f;
    for (uint e = ctx.thread(); e < shelf.experts; e += ctx.threads()) {
        uint count = 0;
        for (uint p = 0; p < c.pairs; ++p) count += ids[p] == e ? 1 : 0;
        const float of_long = worth[2 * e] * c.long_decay + (float)count;
        const float of_short = worth[2 * e + 1] * c.short_decay + (float)count;
        worth[2 * e] = of_long;
        worth[2 * e + 1] = of_short;
        const bool misses = count != 0 && table[e] == ABSENT;
        const uint score = key_of(of_long * c.long_part + of_short * c.short_part);
        counts[e] = count;
        scores[e] = score;
        keys[e] = misses ? score : 0;
        absent += misses ? 1.0f : 0.0f;
        chosen += count != 0 ? 1.0f : 0.0f;
    }
    pad_keys(ctx, keys, shelf.experts);
    const uint wanted = (uint)group_sum(ctx, absent, scratch), all = (uint)group_sum(ctx, chosen, scratch);
    if (ctx.thread() == 0) {
        fetches[0] = wanted;
        totals[0] += all;
        totals[1] += wanted;
    }
    if (wanted == 0) return;
    for (uint e = ctx.thread(); e < shelf.experts; e += ctx.threads()) {
        if (keys[e] != 0) missing[keys_before(keys, shelf.experts, e)] = e;
    }
    barrier(ctx);
    // The least worthy first; none that is needed now.
    for (uint s = ctx.thread(); s < shelf.slots; s += ctx.threads()) {
        const uint owner = owners[s];
        keys[s] = owner == ABSENT ? 0xffffffffu : counts[owner] != 0 ? 0 : ~scores[owner];
    }
    pad_keys(ctx, keys, shelf.slots);
    barrier(ctx);
    for (uint s = ctx.thread(); s < shelf.slots; s += ctx.threads()) {
        if (keys[s] == 0) continue;
        const uint before = keys_before(keys, shelf.slots, s);
        if (before >= wanted) continue;
        const uint owner = owners[s], expert = missing[before];
        if (owner != ABSENT) table[owner] = ABSENT;
        table[expert] = shelf.first_slot + s * shelf.stride;
        owners[s] = expert;
        fetches[1 + 2 * before] = expert;
        fetches[2 + 2 * before] = s;
    }
}

struct FetchConstants {
    Shelf shelf;
    // Sixteen bytes each, of an expert.
    uint words;
};

// Copies what `place` says from host memory into slots. Grid: (any, most experts).
KERNEL(fetch, FetchConstants, (const uint, fetches), (const uchar, host), (uchar, slots)) {
    if (ctx.group_y() >= fetches[0]) return;
    const uint expert = fetches[1 + 2 * ctx.group_y()], slot = fetches[2 + 2 * ctx.group_y()];
    const GPTR(const uchar) from = host + (ulong)(c.shelf.first_expert + expert * c.shelf.stride) * SLOT_UNIT;
    const GPTR(uchar) to = slots + (ulong)(c.shelf.first_slot + slot * c.shelf.stride) * SLOT_UNIT;
    for (uint i = ctx.group_x() * 4 * ctx.threads() + ctx.thread(); i < c.words; i += ctx.groups_x() * 4 * ctx.threads()) {
        // Several reads under way at once; beyond the end, the last one again.
        Word4 v[4];
#pragma unroll
        for (uint n = 0; n < 4; ++n) {
            const uint at = i + n * ctx.threads();
            v[n] = load_u32x4(from, 16 * (at < c.words ? at : c.words - 1));
        }
#pragma unroll
        for (uint n = 0; n < 4; ++n) {
            const uint at = i + n * ctx.threads();
            if (at < c.words) store_u32x4(to, 16 * at, v[n]);
        }
    }
}

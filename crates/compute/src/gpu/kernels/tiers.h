// Which experts have slots of the device, decided here for every token: the choice is known here, and the host is not
// waited for. A layer has slots of its own. Of the experts that are missing some come over the bus, and the processor
// computes the others where they are: their rows go to the desk at once.
#include "handed.h"
#include "placing.h"

struct PlaceConstants {
    Shelf shelf;
    uint pairs;
    WorthConstants worth;
    // Whether the processor takes part, as `shares` says, how many rows there are, the number of the set, and the rows' form.
    uint hands, rows, set;
    DeskRows desk;
    // Whether this chooses the experts, and how; else `ids` says which they are.
    uint routes;
    RouteConstants route;
    // Experts that the layer before may have foreseen, and eighths of each that are still to come.
    uint foreseen, rest;
};

// Two counts of experts in one sum: the second is so many times as large.
CONSTANT uint SECOND_COUNT = 4096;
// How much the newest choice counts in how much comes true of what is foreseen.
CONSTANT float TRUST_STEP = 1.0f / 32.0f;
// In the count of an expert's pairs: the processor computes them.
CONSTANT uint IS_HANDED = 0x80000000u;
// Among groups that have done their part: there is something to ask the processor for.
CONSTANT uint ASKS = 256;

// A group has put its part of a question on the desk, with something that is `asked` or not: the last one asks.
DEVICE void arrive(CTX, const PlaceConstants c, bool asked, GPTR(uint) handed, GPTR(uint) desk) {
    publish(ctx);
    barrier(ctx);
    if (ctx.thread() != 0) return;
    const uint own = asked ? ASKS + 1 : 1, all = tally_device(handed + HANDED_ARRIVED, own) + own;
    if (all % ASKS != c.rows + 1 || all < ASKS) return;
    publish(ctx);
    tell(desk + DESK_ASKED);
}

// The experts of all pairs: `chosen`, which all threads of the group then see.
DEVICE void all_chosen(CTX, const PlaceConstants c, GPTR(const float) logits, GPTR(const float) bias,
                       GPTR(const uint) ids, const RouteMemory r, SPTR(uint) chosen) {
    if (c.routes) return choose_rows(ctx, c.route, c.pairs, logits, bias, r, chosen);
    for (uint p = ctx.thread(); p < c.pairs; p += ctx.threads()) chosen[p] = ids[p];
    barrier(ctx);
}

// Gives the chosen experts slots in place of the least worthy ones: no more distinct ones than there are slots, if the
// processor takes none. ids (pairs): which they are; where this chooses them by logits (rows, experts), groups beyond the first
// write ids and weights (rows, top_k). table (experts): where each expert's slot begins, or ABSENT. owners (slots): whose each is,
// or ABSENT. worth (experts, 2): frequencies. fetches (pairs, or experts if those are fewer): the experts to come from host memory,
// then those that were foreseen, then ABSENT. totals: experts chosen so far, fetched, handed over, asked for ahead, and of these
// chosen. shares (MOST_SHARED + 1): of so many missing experts, how many the processor computes; the least worthy. handed: which
// pairs have them. x (rows, cols): what it computes them of. foreseen (1 + MOST_FORESEEN): what `foresee` has left.
// Grid: (1, and one a row if it chooses or hands over).
KERNEL_AHEAD(place, PlaceConstants, (const float, logits), (const float, bias), (uint, ids), (float, weights),
             (uint, table), (uint, owners), (float, worth), (uint, fetches), (uint, totals), (const uint, shares),
             (uint, handed), (const float, x), (const float, norm), (uint, desk), (uint, foreseen)) {
    SHARED(uint, counts, MAX_EXPERTS);
    SHARED(uint, scores, MAX_EXPERTS);
    SHARED(uint, keys, MAX_EXPERTS);
    SHARED(uint, missing, MAX_EXPERTS);
    SHARED(float, route_scores, MAX_EXPERTS);
    SHARED(uint, best, MAX_CHOSEN);
    SHARED(uint, chosen, MAX_PAIRS);
    SHARED(float, scratch, 8);
    SHARED(uint, listed, 1);
    SHARED(uint, words, MOST_COLUMNS / 4);
    SHARED(float, scales, MOST_COLUMNS / 16);
    const RouteMemory r = {route_scores, keys, missing, best};
    const Shelf shelf = c.shelf;
    if (ctx.group_x() != 0) {
        after_previous(ctx);
        const uint row = ctx.group_x() - 1;
        if (c.hands) {
            hand_row(ctx, c.desk, row, x, norm, desk, words, scales, scratch);
            arrive(ctx, c, false, handed, desk);
        }
        if (!c.routes) return;
        const float poison = choose(ctx, c.route, logits + row * c.route.experts, bias, r, true);
        const uint first = row * c.route.top_k;
        if (ctx.thread() == 0) weigh_chosen(ctx, c.route, r, poison, ids + first, weights + first);
        return;
    }
    // What the layer's last batch left, before the logits are there.
    float of_long[PLACED_EACH], of_short[PLACED_EACH];
    uint entries[PLACED_EACH], held[PLACED_EACH];
#pragma unroll
    for (uint i = 0; i < PLACED_EACH; ++i) {
        const uint at = ctx.thread() + i * PLACERS;
        of_long[i] = at < shelf.experts ? worth[2 * at] * c.worth.long_decay : 0.0f;
        of_short[i] = at < shelf.experts ? worth[2 * at + 1] * c.worth.short_decay : 0.0f;
        entries[i] = at < shelf.experts ? (uint)table[at] : ABSENT;
        held[i] = at < shelf.slots ? (uint)owners[at] : ABSENT;
    }
    after_previous(ctx);
    all_chosen(ctx, c, logits, bias, ids, r, chosen);
    // What was foreseen and is chosen has its slot; the slots of the rest are empty.
    uint coming[MOST_FORESEEN], tried = 0, right = 0, asked = 0, useful = 0;
#pragma unroll
    for (uint f = 0; f < MOST_FORESEEN; ++f) {
        coming[f] = ABSENT;
        const uint fetch = f < c.foreseen ? (uint)foreseen[FORESEEN_LIST + f] : ABSENT;
        if (fetch == ABSENT) continue;
        const uint expert = fetched_expert(fetch), s = fetched_slot(fetch);
        const bool is_right = is_among(chosen, c.pairs, expert);
        ++tried;
        right += is_right ? 1 : 0;
        if (fetch & NOT_COMING) continue;
        ++asked;
        if (!is_right) continue;
        ++useful;
        if (c.rest != 0) coming[f] = fetch | IS_FORESEEN;
#pragma unroll
        for (uint i = 0; i < PLACED_EACH; ++i) {
            const uint own = ctx.thread() + i * PLACERS;
            if (own == expert) table[expert] = entries[i] = shelf.first_slot + s * shelf.stride;
            if (own == s) owners[s] = held[i] = expert;
        }
    }
    float both_counts = 0.0f;
#pragma unroll
    for (uint i = 0; i < PLACED_EACH; ++i) {
        const uint e = ctx.thread() + i * PLACERS;
        if (e >= shelf.experts) continue;
        uint count = 0;
        for (uint p = 0; p < c.pairs; ++p) count += chosen[p] == e ? 1 : 0;
        of_long[i] += (float)count;
        of_short[i] += (float)count;
        worth[2 * e] = of_long[i];
        worth[2 * e + 1] = of_short[i];
        const bool misses = count != 0 && entries[i] == ABSENT;
        const uint score = worth_key(c.worth, of_long[i], of_short[i]);
        counts[e] = count;
        scores[e] = score;
        keys[e] = misses ? score : 0;
        both_counts += (misses ? 1.0f : 0.0f) + (count != 0 ? (float)SECOND_COUNT : 0.0f);
    }
    pad_keys(ctx, keys, shelf.experts);
    const uint both = (uint)group_sum(ctx, both_counts, scratch), wanted = both % SECOND_COUNT;
    // What was foreseen keeps the bus busy too, as long as a part is missing.
    const uint lacking = wanted + (useful * c.rest + 4) / 8;
    const uint given = c.hands ? (uint)shares[lacking < MOST_SHARED ? lacking : MOST_SHARED] : 0;
    // Slots of experts that are chosen are not to be had: what finds none is the processor's, too.
    const uint free = shelf.slots + wanted - both / SECOND_COUNT, left = given < wanted ? wanted - given : 0;
    const uint fetched = left < free ? left : free;
    if (ctx.thread() == 0) {
        totals[0] += both / SECOND_COUNT;
        totals[1] += fetched + useful;
        totals[2] += wanted - fetched;
        totals[3] += asked;
        totals[4] += useful;
        if (tried != 0) {
            const float trust = as_float(foreseen[FORESEEN_TRUST]);
            foreseen[FORESEEN_TRUST] = as_uint(trust + TRUST_STEP * ((float)right / (float)tried - trust));
        }
        listed[0] = 0;
        if (c.hands) {
            handed[HANDED_PAIRS] = 0;
            handed[HANDED_EXPERTS] = wanted - fetched;
            handed[HANDED_FETCHED] = fetched;
            handed[HANDED_SINCE] = nanoseconds();
        }
    }
    const uint most = c.pairs < shelf.experts ? c.pairs : shelf.experts;
    const uint listed_to = fetched + (c.rest != 0 ? useful : 0);
    for (uint at = listed_to + ctx.thread(); at < most; at += PLACERS) fetches[at] = ABSENT;
    if (ctx.thread() == 0) {
        uint at = fetched;
#pragma unroll
        for (uint f = 0; f < MOST_FORESEEN; ++f) {
            if (coming[f] != ABSENT) fetches[at++] = coming[f];
        }
    }
    if (wanted == 0) {
        if (c.hands) arrive(ctx, c, false, handed, desk);
        return;
    }
    for (uint e = ctx.thread(); e < shelf.experts; e += PLACERS) {
        if (keys[e] != 0) missing[keys_before(keys, shelf.experts, e)] = e;
    }
    barrier(ctx);
    if (fetched < wanted) {
        for (uint i = fetched + ctx.thread(); i < wanted; i += PLACERS) {
            counts[missing[i]] = counts[missing[i]] | IS_HANDED;
        }
        barrier(ctx);
        for (uint p = ctx.thread(); p < c.pairs; p += PLACERS) {
            if (!(counts[chosen[p]] & IS_HANDED)) continue;
            const uint place = tally(listed, 1), pair = handed_pair(p, chosen[p]);
            handed[HANDED_LIST + place] = pair;
            desk[DESK_LIST + place] = pair;
        }
        barrier(ctx);
        if (ctx.thread() == 0) {
            handed[HANDED_PAIRS] = listed[0];
            desk[DESK_PAIRS] = listed[0];
            desk[DESK_SET] = c.set;
            desk[DESK_DONE] = 0;
        }
    }
    if (c.hands) arrive(ctx, c, fetched < wanted, handed, desk);
    // The least worthy first; none that is needed now.
#pragma unroll
    for (uint i = 0; i < PLACED_EACH; ++i) {
        const uint s = ctx.thread() + i * PLACERS;
        if (s >= shelf.slots) continue;
        const uint owner = held[i];
        keys[s] = owner == ABSENT ? 0xffffffffu : counts[owner] != 0 ? 0 : ~scores[owner];
    }
    pad_keys(ctx, keys, shelf.slots);
    barrier(ctx);
#pragma unroll
    for (uint i = 0; i < PLACED_EACH; ++i) {
        const uint s = ctx.thread() + i * PLACERS;
        if (s >= shelf.slots || keys[s] == 0) continue;
        const uint before = keys_before(keys, shelf.slots, s);
        if (before >= fetched) continue;
        const uint expert = missing[before];
        if (held[i] != ABSENT) table[held[i]] = ABSENT;
        table[expert] = shelf.first_slot + s * shelf.stride;
        owners[s] = expert;
        fetches[before] = fetch_of(expert, s);
    }
}

struct FetchConstants {
    Brought brought;
    // Words of sixteen bytes that are there of what was foreseen: no more than are brought.
    uint there;
};

// Brings what `place` says from host memory into slots, or what `foresee` says. Grid: (any, pairs or experts).
KERNEL(fetch, FetchConstants, (const uint, fetches), (const uchar, host), (uchar, slots)) {
    Brought part = c.brought;
    const uint at = ctx.group_y();
    if (at < part.shelf.experts && (fetches[at] & IS_FORESEEN)) {
        part.first += c.there;
        part.count -= c.there;
    }
    bring(ctx, part, fetches, host, slots, at, ctx.group_x(), ctx.groups_x());
}

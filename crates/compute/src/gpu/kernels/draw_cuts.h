// Which tokens of a row are left, the most likely ones: so many, or those that have a part of the weight together.
//
// Tokens are counted in bins of their halvings first, by which the bin of the last one that is left is known. Those up to there are
// listed if there is room, and the list is all that counts from then on (`choose_listed`). Else the last one is found by its digits:
// halvings, 30 bits, and id, 20 bits, ten bits at a time, each by a table of how many tokens have a digit, and how likely they are
// together.
#pragma once
#include "draw_weights.h"

// Words of what is known of a row's tokens: how many come before the bin, and their weight; the weight of all that are left so
// far; the bin; how many are in it, and in the list; then the last token that is left.
CONSTANT uint FOUND_WORDS = 10;
CONSTANT uint BEFORE = 0, MASS_BEFORE = 1, LEFT = 3, BIN = 5, IN_BIN = 6, IN_LIST = 7, CUT = 8;

// Whether tokens of a row are left out by rank.
DEVICE bool cuts(uint mode) { return (mode & (BY_COUNT | BY_MASS)) != 0; }

// Whether the list of such a row has all tokens that may be left.
DEVICE bool all_listed(GPTR(const uint) found) { return found[BEFORE] + found[IN_BIN] <= LISTED; }

// How a row's token is drawn.
struct Drawing {
    float best, scale;
    uint rules, halvings, id, most;
};
DEVICE Drawing drawing_of(GPTR(const uint) how, GPTR(const uint) found, float best) {
    const Drawing d = {best, as_float(how[SCALE]), how[MODE], found[CUT], found[CUT + 1], how[MOST_HALVINGS]};
    return d;
}
DEVICE ulong left_weight(const Drawing d, float logit, uint id) {
    if (d.rules > DRAWN) {
        const uint halvings = halvings_of(logit, d.best, HALVINGS_A_NAT);
        if (halvings > d.halvings || (halvings == d.halvings && id > d.id) || halvings > d.most) return 0;
    }
    return weight_of(halvings_of(logit, d.best, d.scale));
}

// A weight in two parts of 20 bits, whose sums over 4096 of them have 32: a group counts no more.
CONSTANT uint PART_BITS = 20, PART = (1 << 20) - 1;

// Adds tokens of rows to the bins of their halvings (rows, BINS, 4): how many, and their weight in three parts if no count says how
// many are left. Grid: (tokens / counted, rows).
KERNEL(count_bins, DrawConstants, (const float, logits), (const float, maxima), (const uint, how), (uint, bins)) {
    SHARED(uint, counts, BINS);
    SHARED(uint, low, BINS);
    SHARED(uint, high, BINS);
    SHARED(float, scratch, 8);
    const uint row = ctx.group_y(), mode = how[row * HOW_WORDS + MODE];
    if (!cuts(mode)) return;
    const bool weighs = (mode & BY_COUNT) == 0;
    for (uint i = ctx.thread(); i < BINS; i += ctx.threads()) {
        counts[i] = 0;
        low[i] = 0;
        high[i] = 0;
    }
    const float best = best_of(ctx, maxima + row * c.segments, c.segments, scratch);
    if (best != best) return;
    const GPTR(const float) from = logits + (ulong)row * c.vocab;
    for (uint i = ctx.group_x() * c.counted + ctx.thread(); i < (ctx.group_x() + 1) * c.counted; i += ctx.threads()) {
        if (i < c.tokens) {
            const uint halvings = halvings_of(from[i], best, HALVINGS_A_NAT), bin = halvings >> BIN_BITS;
            tally(counts + bin, 1);
            if (!weighs) continue;
            const ulong weight = weight_of(halvings);
            tally(low + bin, (uint)weight & PART);
            tally(high + bin, (uint)(weight >> PART_BITS));
        }
    }
    barrier(ctx);
    const GPTR(uint) to = bins + (ulong)row * 4 * BINS;
    for (uint i = ctx.thread(); i < BINS; i += ctx.threads()) {
        if (counts[i] > 0) {
            tally_device(to + 4 * i, counts[i]);
            if (!weighs) continue;
            const ulong mass = ((ulong)high[i] << PART_BITS) + low[i];
            tally_device(to + 4 * i + 1, (uint)mass & PART);
            tally_device(to + 4 * i + 2, (uint)(mass >> PART_BITS) & PART);
            tally_device(to + 4 * i + 3, (uint)(mass >> 2 * PART_BITS));
        }
    }
}

// What is looked for: so many tokens, or tokens of so much weight; and how many, of how much, come before.
struct Sought {
    bool by_count;
    ulong wanted, count, mass;
};

// Four bins that a thread has: how many tokens are in each, and their weight.
struct Four {
    uint counts[4];
    ulong mass[4];
};

// The bin with which there is enough: `place` gets its number, how many tokens and how much weight come before it, and how many
// are in it.
DEVICE void find_bin(CTX, const Sought s, const Four own, SPTR(ulong) place, SPTR(ulong) scratch) {
    ulong count = 0, mass = 0;
    for (uint i = 0; i < 4; ++i) {
        count += own.counts[i];
        mass += own.mass[i];
    }
    count = s.count + group_scan(ctx, count, scratch).before;
    mass = s.mass + group_scan(ctx, mass, scratch).before;
    for (uint i = 0; i < 4; ++i) {
        const ulong more = count + own.counts[i], heavier = mass + own.mass[i];
        if (s.by_count ? count < s.wanted && more >= s.wanted : mass < s.wanted && heavier >= s.wanted) {
            place[0] = 4 * ctx.thread() + i;
            place[1] = count;
            place[2] = mass;
            place[3] = own.counts[i];
        }
        count = more;
        mass = heavier;
    }
    barrier(ctx);
}

// What a rule looks for in a row of whose tokens those that are left weigh `left`.
DEVICE Sought sought(GPTR(const uint) how, bool by_count, ulong left) {
    Sought s = {by_count, how[TOP_K], 0, 0};
    if (!by_count) {
        const ulong wanted = part_of(left, two_words(how + TOP_P));
        s.wanted = wanted > 0 ? wanted : 1;
    }
    return s;
}

// Finds the bin of the last token that a row's first rule leaves, and lists halvings and ids (rows, LISTED, 2) in no order: of all
// tokens up to there, or of the bin's alone if that are too many, as many as there is room for. Grid: (tokens / counted, rows).
KERNEL(list_bin, DrawConstants, (const float, logits), (const float, maxima), (const uint, how), (const uint, bins),
       (uint, found), (uint, list)) {
    SHARED(ulong, place, 4);
    SHARED(ulong, sums, 8);
    SHARED(float, scratch, 8);
    const uint row = ctx.group_y(), mode = how[row * HOW_WORDS + MODE];
    if (!cuts(mode)) return;
    const float best = best_of(ctx, maxima + row * c.segments, c.segments, scratch);
    if (best != best) return;
    const GPTR(const uint) counted = bins + ((ulong)row * BINS + 4 * ctx.thread()) * 4;
    Four own;
    ulong all = 0;
    for (uint i = 0; i < 4; ++i) {
        own.counts[i] = counted[4 * i];
        own.mass[i] = counted[4 * i + 1] + ((ulong)counted[4 * i + 2] << PART_BITS) +
                      ((ulong)counted[4 * i + 3] << 2 * PART_BITS);
        all += own.mass[i];
    }
    all = group_scan(ctx, all, sums).all;
    find_bin(ctx, sought(how + row * HOW_WORDS, (mode & BY_COUNT) != 0, all), own, place, sums);
    const uint bin = (uint)place[0], before = (uint)place[1], in_bin = (uint)place[3];
    const GPTR(uint) to_found = found + row * FOUND_WORDS;
    if (ctx.group_x() == 0 && ctx.thread() == 0) {
        const ulong mass = place[2];
        to_found[BEFORE] = before;
        to_found[MASS_BEFORE] = (uint)mass;
        to_found[MASS_BEFORE + 1] = (uint)(mass >> 32);
        to_found[LEFT] = (uint)all;
        to_found[LEFT + 1] = (uint)(all >> 32);
        to_found[BIN] = bin;
        to_found[IN_BIN] = in_bin;
    }
    if (in_bin > LISTED) return;
    const uint least = before + in_bin <= LISTED ? 0 : bin;
    const GPTR(const float) from = logits + (ulong)row * c.vocab;
    const GPTR(uint) to = list + (ulong)row * 2 * LISTED;
    for (uint i = ctx.group_x() * c.counted + ctx.thread(); i < (ctx.group_x() + 1) * c.counted; i += ctx.threads()) {
        if (i < c.tokens) {
            const uint halvings = halvings_of(from[i], best, HALVINGS_A_NAT), in = halvings >> BIN_BITS;
            if (in >= least && in <= bin) {
                const uint at = tally_device(to_found + IN_LIST, 1);
                to[2 * at] = halvings;
                to[2 * at + 1] = i;
            }
        }
    }
}

// A weight in four parts of 12 bits, whose sums over 2²⁰ of them have 32.
CONSTANT uint QUARTERS = 4, QUARTER_BITS = 12, QUARTER = (1 << 12) - 1;

struct CutMemory {
    // (BINS), (QUARTERS, BINS).
    SPTR(uint) counts;
    SPTR(uint) quarters;
    SPTR(ulong) place;
    SPTR(ulong) scratch;
};

// Tokens to find the last one among: `count` listed ones, or of all so many, but none after `last`.
struct Among {
    GPTR(const float) logits;
    GPTR(const uint) list;
    uint count;
    bool listed;
    float best;
    ulong last;
};

// A token's number: its halvings, then its id.
DEVICE ulong number_of(const Among t, uint i) {
    const uint halvings = t.listed ? (uint)t.list[2 * i] : halvings_of(t.logits[i], t.best, HALVINGS_A_NAT);
    return (ulong)halvings << ID_BITS | (t.listed ? (uint)t.list[2 * i + 1] : i);
}

// The number of the last token that is left, of which all but so many digits are `known`.
DEVICE ulong last_left(CTX, const Among t, const CutMemory m, Sought s, ulong known, uint digits) {
    for (uint digit = digits; digit > 0; --digit) {
        const uint shift = (digit - 1) * DIGIT_BITS;
        for (uint i = ctx.thread(); i < BINS; i += ctx.threads()) {
            m.counts[i] = 0;
            for (uint part = 0; part < QUARTERS; ++part) m.quarters[part * BINS + i] = 0;
        }
        barrier(ctx);
        for (uint i = ctx.thread(); i < t.count; i += ctx.threads()) {
            const ulong number = number_of(t, i);
            if (number >> (shift + DIGIT_BITS) != known || number > t.last) continue;
            const uint bin = (uint)(number >> shift) % BINS;
            const ulong weight = weight_of((uint)(number >> ID_BITS));
            tally(m.counts + bin, 1);
            for (uint part = 0; part < QUARTERS; ++part) {
                tally(m.quarters + (part * BINS + bin), (uint)(weight >> part * QUARTER_BITS) & QUARTER);
            }
        }
        barrier(ctx);
        Four mine;
        for (uint i = 0; i < 4; ++i) {
            const uint bin = 4 * ctx.thread() + i;
            mine.counts[i] = m.counts[bin];
            mine.mass[i] = 0;
            for (uint part = 0; part < QUARTERS; ++part) {
                mine.mass[i] += (ulong)m.quarters[part * BINS + bin] << part * QUARTER_BITS;
            }
        }
        find_bin(ctx, s, mine, m.place, m.scratch);
        known = known << DIGIT_BITS | m.place[0];
        s.count = m.place[1];
        s.mass = m.place[2];
        barrier(ctx);
    }
    return known;
}

// Of rows whose list has not all that may be left: the last token that is. Grid: rows.
KERNEL(cut_rows, DrawConstants, (const float, logits), (const float, maxima), (const uint, how), (const uint, list), (uint, found)) {
    SHARED(uint, counts, BINS);
    SHARED(uint, quarters, QUARTERS * BINS);
    SHARED(ulong, place, 4);
    SHARED(ulong, scratch, 8);
    SHARED(float, maximum, 8);
    const uint row = ctx.group_x(), mode = how[row * HOW_WORDS + MODE];
    const GPTR(uint) own = found + row * FOUND_WORDS;
    if (!cuts(mode) || all_listed(own)) return;
    const float best = best_of(ctx, maxima + row * c.segments, c.segments, maximum);
    if (best != best) return;
    const CutMemory m = {counts, quarters, place, scratch};
    const GPTR(const uint) rules = how + row * HOW_WORDS;
    const bool by_count = (mode & BY_COUNT) != 0, listed = own[IN_BIN] <= LISTED;
    Among t = {logits + (ulong)row * c.vocab, list + (ulong)row * 2 * LISTED, listed ? (uint)own[IN_BIN] : c.tokens,
               listed, best, ~(ulong)0};
    Sought s = sought(rules, by_count, two_words(own + LEFT));
    s.count = own[BEFORE];
    s.mass = two_words(own + MASS_BEFORE);
    t.last = last_left(ctx, t, m, s, own[BIN], 4);
    if (by_count && (mode & BY_MASS)) {
        t.listed = false;
        t.count = c.tokens;
        ulong left = 0;
        for (uint i = ctx.thread(); i < t.count; i += ctx.threads()) {
            const ulong number = number_of(t, i);
            left += number <= t.last ? weight_of((uint)(number >> ID_BITS)) : 0;
        }
        left = group_scan(ctx, left, scratch).all;
        t.last = last_left(ctx, t, m, sought(rules, false, left), 0, 5);
    }
    if (ctx.thread() != 0) return;
    own[CUT] = (uint)(t.last >> ID_BITS);
    own[CUT + 1] = (uint)t.last % (1 << ID_BITS);
}

// Sorts `size` numbers, a power of two, by exchanging pairs ever closer to each other (Batcher, 1968).
DEVICE void sort_numbers(CTX, SPTR(ulong) v, uint size) {
    for (uint span = 2; span <= size; span *= 2) {
        for (uint step = span / 2; step > 0; step /= 2) {
            barrier(ctx);
            for (uint i = ctx.thread(); i < size / 2; i += ctx.threads()) {
                const uint a = 2 * i - (i & (step - 1)), b = a + step;
                const ulong x = v[a], y = v[b];
                if ((x > y) == ((a & span) == 0)) {
                    v[a] = y;
                    v[b] = x;
                }
            }
        }
    }
    barrier(ctx);
}

DEVICE uint power_of_two(uint least) {
    uint size = 1;
    while (size < least) size *= 2;
    return size;
}

// A weight has no more bits.
CONSTANT uint WEIGHT_BITS = 41;

// The token that is drawn of a row whose list has all that may be left; in every thread. `v` holds LISTED numbers, `place` one.
DEVICE uint choose_listed(CTX, GPTR(const float) logits, const Drawing d, GPTR(const uint) how, GPTR(const uint) found,
                          GPTR(const uint) list, SPTR(ulong) v, SPTR(ulong) scratch, SPTR(ulong) place) {
    const uint count = found[IN_LIST];
    uint size = power_of_two(count);
    for (uint i = ctx.thread(); i < size; i += ctx.threads()) {
        v[i] = i < count ? (ulong)list[2 * i] << ID_BITS | list[2 * i + 1] : ~(ulong)0;
    }
    sort_numbers(ctx, v, size);
    uint kept = (d.rules & BY_COUNT) && how[TOP_K] < count ? (uint)how[TOP_K] : count;
    uint each = (size + ctx.threads() - 1) / ctx.threads(), first = ctx.thread() * each;
    if (d.rules & BY_MASS) {
        ulong mine = 0;
        for (uint i = first; i < first + each && i < kept; ++i) mine += weight_of((uint)(v[i] >> ID_BITS));
        const Sums sums = group_scan(ctx, mine, scratch);
        const ulong left = d.rules & BY_COUNT ? sums.all : two_words(found + LEFT);
        const ulong wanted = sought(how, false, left).wanted;
        if (ctx.thread() == 0) place[0] = kept;
        barrier(ctx);
        ulong upto = sums.before;
        for (uint i = first; i < first + each && i < kept; ++i) {
            const ulong before = upto;
            upto += weight_of((uint)(v[i] >> ID_BITS));
            if (before < wanted && upto >= wanted) place[0] = i + 1;
        }
        barrier(ctx);
        kept = (uint)place[0];
    }
    // One is drawn in the order of ids.
    size = power_of_two(kept);
    for (uint i = ctx.thread(); i < size; i += ctx.threads()) {
        const uint id = (uint)v[i] % (1 << ID_BITS);
        const bool is_left = i < kept && (uint)(v[i] >> ID_BITS) <= d.most;
        const ulong weight = is_left ? weight_of(halvings_of(logits[id], d.best, d.scale)) : 0;
        v[i] = i < kept ? (ulong)id << WEIGHT_BITS | weight : ~(ulong)0;
    }
    sort_numbers(ctx, v, size);
    each = (size + ctx.threads() - 1) / ctx.threads();
    first = ctx.thread() * each;
    const ulong bits = ((ulong)1 << WEIGHT_BITS) - 1;
    ulong mine = 0;
    for (uint i = first; i < first + each && i < kept; ++i) mine += v[i] & bits;
    const Sums sums = group_scan(ctx, mine, scratch);
    const ulong drawn = high_product(two_words(how + RANDOM), sums.all);
    if (ctx.thread() == 0) place[0] = NONE;
    barrier(ctx);
    ulong upto = sums.before;
    for (uint i = first; i < first + each && i < kept; ++i) {
        const ulong weight = v[i] & bits;
        if (upto <= drawn && drawn - upto < weight) place[0] = v[i] >> WEIGHT_BITS;
        upto += weight;
    }
    barrier(ctx);
    return (uint)place[0];
}

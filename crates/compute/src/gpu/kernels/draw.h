// Choosing tokens by rows of logits, in the whole numbers of `draw.rs`, which says what halvings, weights and cuts are: their
// sums are the same in any order. A row is cut into segments, one a warp.
//
// Where tokens are left out by rank, the last one that is left is found by its digits: halvings, 30 bits, and id, 20 bits, ten
// bits at a time, each by a table of how many tokens have a digit, and how likely they are together.
#include "dialect.h"

CONSTANT uint SEGMENTS = 512, BINS = 1024, LISTED = 2048;
CONSTANT uint FRACTION_BITS = 24, BIN_BITS = 20, DIGIT_BITS = 10, ID_BITS = 20;
// log₂ e.
CONSTANT float HALVINGS_A_NAT = 1.44269504f;
// What a forbidden token's logit is, and what is so low.
CONSTANT float FORBIDDEN = -3.4e38f, LOWEST = -3.0e38f;
// No token.
CONSTANT uint NONE = 0xffffffff;

// Words that say how a row's token is chosen.
CONSTANT uint HOW_WORDS = 8;
CONSTANT uint MODE = 0, SCALE = 1, TOP_K = 2, TOP_P = 3, MOST_HALVINGS = 5, RANDOM = 6;
// Modes: nothing is chosen; the most likely token; one is drawn, with the rules by which tokens are left out.
CONSTANT uint SKIPPED = 0, BEST = 1, DRAWN = 2, BY_COUNT = 4, BY_MASS = 8, BY_LEAST = 16;

// Words of what is known of a row's tokens: how many come before the bin, and their weight; the weight of all that are left so
// far; the bin; how many are in it, and in the list; then the last token that is left.
CONSTANT uint FOUND_WORDS = 10;
CONSTANT uint BEFORE = 0, MASS_BEFORE = 1, LEFT = 3, BIN = 5, IN_BIN = 6, IN_LIST = 7, CUT = 8;

struct ChangeConstants {
    uint vocab, count;
};

// Words of a change: row, token, what is added, what positive logits are divided and others multiplied by, what is subtracted.
CONSTANT uint CHANGE_WORDS = 5;

// Changes logits, and keeps what they were (count).
KERNEL(change_logits, ChangeConstants, (const uint, changes), (float, logits), (float, raw)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i >= c.count) return;
    const GPTR(const uint) own = changes + i * CHANGE_WORDS;
    const ulong at = (ulong)own[0] * c.vocab + own[1];
    const float x = logits[at], repetition = as_float(own[3]);
    raw[i] = x;
    if (!is_finite(x)) return;
    const float biased = x + as_float(own[2]);
    const float repeated = biased > 0.0f ? biased / repetition : product_of(biased, repetition);
    const float changed = repeated - as_float(own[4]);
    logits[at] = changed < LOWEST ? FORBIDDEN : changed;
}

// Makes logits what they were.
KERNEL(restore_logits, ChangeConstants, (const uint, changes), (const float, raw), (float, logits)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i >= c.count) return;
    const GPTR(const uint) own = changes + i * CHANGE_WORDS;
    logits[(ulong)own[0] * c.vocab + own[1]] = raw[i];
}

struct ForbidConstants {
    uint vocab;
    // Of a set of tokens, a bit each.
    uint words;
};

// Forbids tokens that are not in the sets (count, words) of rows (count), and keeps what their logits were (count, vocab). Grid:
// (vocab / threads, count).
KERNEL(forbid_tokens, ForbidConstants, (const uint, rows), (const uint, sets), (float, logits), (float, raw)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread(), own = ctx.group_y();
    if (i >= c.vocab) return;
    const ulong at = (ulong)rows[own] * c.vocab + i;
    const uint word = i / 32 < c.words ? sets[own * c.words + i / 32] : 0;
    const float x = logits[at];
    raw[(ulong)own * c.vocab + i] = x;
    if (is_finite(x) && (word >> i % 32 & 1) == 0) logits[at] = FORBIDDEN;
}

// Makes logits what they were.
KERNEL(allow_tokens, ForbidConstants, (const uint, rows), (const float, raw), (float, logits)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread(), own = ctx.group_y();
    if (i < c.vocab) logits[(ulong)rows[own] * c.vocab + i] = raw[(ulong)own * c.vocab + i];
}

struct DrawConstants {
    uint vocab, segments;
    // Elements of a segment, a multiple of 32.
    uint each;
    // Elements of a row that can be chosen; those after them are padding.
    uint tokens;
    // By which of the modes' rules tokens are left out.
    uint rule;
};

// logits (rows, vocab) → the maximum of each segment's tokens (rows, segments), NaN if an element is not finite. Clears bins, and what
// is known of rows. Grid: (segments / 8, rows).
KERNEL(row_maxima, DrawConstants, (const float, logits), (float, maxima), (uint, bins), (uint, found)) {
    const uint segment = ctx.group_x() * ctx.warps() + ctx.warp(), row = ctx.group_y();
    const uint all = ctx.groups_x() * ctx.threads(), own = ctx.group_x() * ctx.threads() + ctx.thread();
    for (uint i = own; i < 4 * BINS; i += all) bins[(ulong)row * 4 * BINS + i] = 0;
    for (uint i = own; i < FOUND_WORDS; i += all) found[row * FOUND_WORDS + i] = i < CUT ? 0 : NONE;
    if (segment >= c.segments) return;
    const GPTR(const float) from = logits + (ulong)row * c.vocab;
    const uint end = (segment + 1) * c.each < c.vocab ? (segment + 1) * c.each : c.vocab;
    float best = -infinity();
    uint bad = 0;
    for (uint i = segment * c.each + ctx.lane(); i < end; i += 32) {
        const float x = from[i];
        bad |= is_finite(x) ? 0 : 1;
        best = i < c.tokens && x > best ? x : best;
    }
    best = lane_max(ctx, best);
    bad = lane_max(ctx, bad);
    if (ctx.lane() == 0) maxima[row * c.segments + segment] = bad ? not_a_number() : best;
}

// The largest of a row's maxima, NaN if one is; in every thread.
DEVICE float best_of(CTX, GPTR(const float) maxima, uint segments, SPTR(float) scratch) {
    float best = -infinity(), bad = 0.0f;
    for (uint i = ctx.thread(); i < segments; i += ctx.threads()) {
        const float x = maxima[i];
        bad = x != x ? 1.0f : bad;
        best = x > best ? x : best;
    }
    best = group_max(ctx, best, scratch);
    return group_max(ctx, bad, scratch) > 0.0f ? not_a_number() : best;
}

DEVICE uint halvings_of(float logit, float best, float scale) {
    const float exact = (best - logit) * scale;
    return (uint)((exact < 62.0f ? exact : 62.0f) * 16777216.0f);
}

DEVICE ulong weight_of(uint halvings) {
    const ulong z = ~(halvings << (32 - FRACTION_BITS));
    // (ln 2)ᵏ / k! in units of 2⁻³².
    ulong sum = 437;
    sum = (sum * z >> 32) + 5676;
    sum = (sum * z >> 32) + 65509;
    sum = (sum * z >> 32) + 661576;
    sum = (sum * z >> 32) + 5726719;
    sum = (sum * z >> 32) + 41309549;
    sum = (sum * z >> 32) + 238388331;
    sum = (sum * z >> 32) + 1031764991;
    sum = (sum * z >> 32) + 2977044471;
    return (((ulong)1 << 32 | sum * z >> 32) << 7) >> (halvings >> FRACTION_BITS);
}

// Sums over lanes of numbers of 64 bits: those of the lanes before and its own.
DEVICE ulong lane_scan(CTX, ulong v) {
    for (uint step = 1; step < 32; step *= 2) {
        const uint from = ctx.lane() >= step ? ctx.lane() - step : 0;
        const uint low = lane_read(ctx, (uint)v, from), high = lane_read(ctx, (uint)(v >> 32), from);
        if (ctx.lane() >= step) v += (ulong)high << 32 | low;
    }
    return v;
}
DEVICE ulong lane_get(CTX, ulong v, uint lane) {
    const uint low = lane_read(ctx, (uint)v, lane), high = lane_read(ctx, (uint)(v >> 32), lane);
    return (ulong)high << 32 | low;
}

// The sum over the threads before, and over all; `scratch` holds one number a warp.
struct Sums {
    ulong before, all;
};
DEVICE Sums group_scan(CTX, ulong v, SPTR(ulong) scratch) {
    const ulong upto = lane_scan(ctx, v);
    if (ctx.lane() == 31) scratch[ctx.warp()] = upto;
    barrier(ctx);
    Sums sums = {upto - v, 0};
    for (uint i = 0; i < ctx.warps(); ++i) {
        const ulong own = scratch[i];
        if (i < ctx.warp()) sums.before += own;
        sums.all += own;
    }
    barrier(ctx);
    return sums;
}

// A weight in two parts of 20 bits and some, whose sums over 2048 of them have 32.
CONSTANT uint PART_BITS = 20, PART = (1 << 20) - 1;

// Tokens that a group counts.
CONSTANT uint COUNTED = 2048;

// Adds tokens of rows to the bins of their halvings: how many, and their weight in three parts (rows, BINS, 4). Grid: (tokens / COUNTED,
// rows).
KERNEL(count_bins, DrawConstants, (const float, logits), (const float, maxima), (const uint, how), (uint, bins)) {
    SHARED(uint, counts, BINS);
    SHARED(uint, low, BINS);
    SHARED(uint, high, BINS);
    SHARED(float, scratch, 8);
    const uint row = ctx.group_y();
    if ((how[row * HOW_WORDS + MODE] & (BY_COUNT | BY_MASS)) == 0) return;
    for (uint i = ctx.thread(); i < BINS; i += ctx.threads()) {
        counts[i] = 0;
        low[i] = 0;
        high[i] = 0;
    }
    const float best = best_of(ctx, maxima + row * c.segments, c.segments, scratch);
    if (best != best) return;
    const GPTR(const float) from = logits + (ulong)row * c.vocab;
    for (uint i = ctx.group_x() * COUNTED + ctx.thread(); i < (ctx.group_x() + 1) * COUNTED; i += ctx.threads()) {
        if (i < c.tokens) {
            const uint halvings = halvings_of(from[i], best, HALVINGS_A_NAT), bin = halvings >> BIN_BITS;
            const ulong weight = weight_of(halvings);
            tally(counts + bin, 1);
            tally(low + bin, (uint)weight & PART);
            tally(high + bin, (uint)(weight >> PART_BITS));
        }
    }
    barrier(ctx);
    const GPTR(uint) to = bins + (ulong)row * 4 * BINS;
    for (uint i = ctx.thread(); i < BINS; i += ctx.threads()) {
        if (counts[i] > 0) {
            const ulong mass = ((ulong)high[i] << PART_BITS) + low[i];
            tally_device(to + 4 * i, counts[i]);
            tally_device(to + 4 * i + 1, (uint)mass & PART);
            tally_device(to + 4 * i + 2, (uint)(mass >> PART_BITS) & PART);
            tally_device(to + 4 * i + 3, (uint)(mass >> 2 * PART_BITS));
        }
    }
}

// `value` times so many units of 2⁻³², rounded up.
DEVICE ulong part_of(ulong value, ulong units) {
    return (value >> 32) * units + (((value & 0xffffffff) * units + 0xffffffff) >> 32);
}

// The upper 64 bits of the product.
DEVICE ulong high_product(ulong a, ulong b) {
    const ulong a0 = a & 0xffffffff, a1 = a >> 32, b0 = b & 0xffffffff, b1 = b >> 32;
    const ulong middle = a1 * b0 + (a0 * b0 >> 32);
    return a1 * b1 + (middle >> 32) + ((a0 * b1 + (middle & 0xffffffff)) >> 32);
}

DEVICE ulong two_words(GPTR(const uint) from) { return (ulong)from[1] << 32 | from[0]; }

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

// What the rule looks for in a row whose tokens' weight is `all`.
DEVICE Sought sought(GPTR(const uint) how, GPTR(const uint) found, uint rule, ulong all) {
    Sought s = {rule == BY_COUNT, how[TOP_K], 0, 0};
    if (!s.by_count) {
        // All are left, if none is left out by count before.
        const ulong left = found[CUT] == NONE ? all : two_words(found + LEFT);
        const ulong wanted = part_of(left, two_words(how + TOP_P));
        s.wanted = wanted > 0 ? wanted : 1;
    }
    return s;
}

// Of rows with the rule: the bin of the last token that it leaves. Grid: rows.
KERNEL(cut_bins, DrawConstants, (const uint, how), (const uint, bins), (uint, found)) {
    SHARED(ulong, place, 4);
    SHARED(ulong, scratch, 8);
    const uint row = ctx.group_x();
    if ((how[row * HOW_WORDS + MODE] & c.rule) == 0) return;
    // Of a row with an element that is not finite nothing is found.
    if (ctx.thread() < 4) place[ctx.thread()] = 0;
    const GPTR(const uint) from = bins + ((ulong)row * BINS + 4 * ctx.thread()) * 4;
    const GPTR(uint) to = found + row * FOUND_WORDS;
    Four own;
    ulong all = 0;
    for (uint i = 0; i < 4; ++i) {
        own.counts[i] = from[4 * i];
        own.mass[i] = from[4 * i + 1] + ((ulong)from[4 * i + 2] << PART_BITS) + ((ulong)from[4 * i + 3] << 2 * PART_BITS);
        all += own.mass[i];
    }
    all = group_scan(ctx, all, scratch).all;
    find_bin(ctx, sought(how + row * HOW_WORDS, to, c.rule, all), own, place, scratch);
    if (ctx.thread() != 0) return;
    if (to[CUT] == NONE) {
        to[LEFT] = (uint)all;
        to[LEFT + 1] = (uint)(all >> 32);
    }
    const ulong bin = place[0], before = place[1], mass = place[2], count = place[3];
    to[BIN] = (uint)bin;
    to[IN_BIN] = (uint)count;
    to[IN_LIST] = 0;
    to[BEFORE] = (uint)before;
    to[MASS_BEFORE] = (uint)mass;
    to[MASS_BEFORE + 1] = (uint)(mass >> 32);
}

// Lists the tokens of that bin, in no order: halvings and ids (rows, LISTED, 2), as many as there is room for. Grid: (tokens / COUNTED,
// rows).
KERNEL(list_bin, DrawConstants, (const float, logits), (const float, maxima), (const uint, how), (uint, found), (uint, list)) {
    SHARED(float, scratch, 8);
    const uint row = ctx.group_y();
    const GPTR(uint) own = found + row * FOUND_WORDS;
    if ((how[row * HOW_WORDS + MODE] & c.rule) == 0 || own[IN_BIN] > LISTED) return;
    const float best = best_of(ctx, maxima + row * c.segments, c.segments, scratch);
    if (best != best) return;
    const GPTR(const float) from = logits + (ulong)row * c.vocab;
    const GPTR(uint) to = list + (ulong)row * 2 * LISTED;
    const uint bin = own[BIN];
    for (uint i = ctx.group_x() * COUNTED + ctx.thread(); i < (ctx.group_x() + 1) * COUNTED; i += ctx.threads()) {
        if (i < c.tokens) {
            const uint halvings = halvings_of(from[i], best, HALVINGS_A_NAT);
            if (halvings >> BIN_BITS == bin) {
                const uint at = tally_device(own + IN_LIST, 1);
                to[2 * at] = halvings;
                to[2 * at + 1] = i;
            }
        }
    }
}

// A weight in four parts of 12 bits, whose sums over 2²⁰ of them have 32.
CONSTANT uint QUARTERS = 4, QUARTER_BITS = 12, QUARTER = (1 << 12) - 1;

// Of rows with the rule: the last token that it leaves, and the weight of all that are left, from the list, or from all tokens where
// the bin has more. Grid: rows.
KERNEL(cut_rows, DrawConstants, (const float, logits), (const float, maxima), (const uint, how), (const uint, list), (uint, found)) {
    SHARED(uint, counts, BINS);
    SHARED(uint, quarters, QUARTERS * BINS);
    SHARED(ulong, place, 4);
    SHARED(ulong, scratch, 8);
    SHARED(float, maximum, 8);
    const uint row = ctx.group_x();
    if ((how[row * HOW_WORDS + MODE] & c.rule) == 0) return;
    const GPTR(uint) own = found + row * FOUND_WORDS;
    const float best = best_of(ctx, maxima + row * c.segments, c.segments, maximum);
    if (best != best) return;
    const GPTR(const float) from = logits + (ulong)row * c.vocab;
    const GPTR(const uint) listed = list + (ulong)row * 2 * LISTED;
    const bool in_list = own[IN_BIN] <= LISTED;
    const uint tokens = in_list ? own[IN_BIN] : c.tokens;
    Sought s = sought(how + row * HOW_WORDS, own, c.rule, two_words(own + LEFT));
    s.count = own[BEFORE];
    s.mass = two_words(own + MASS_BEFORE);
    // A token's number is its halvings, then its id. Of that which is looked for these digits are known.
    ulong known = own[BIN];
    for (uint digit = 4; digit > 0; --digit) {
        const uint shift = (digit - 1) * DIGIT_BITS;
        for (uint i = ctx.thread(); i < BINS; i += ctx.threads()) {
            counts[i] = 0;
            for (uint part = 0; part < QUARTERS; ++part) quarters[part * BINS + i] = 0;
        }
        barrier(ctx);
        for (uint i = ctx.thread(); i < tokens; i += ctx.threads()) {
            const uint halvings = in_list ? listed[2 * i] : halvings_of(from[i], best, HALVINGS_A_NAT);
            const ulong number = (ulong)halvings << ID_BITS | (in_list ? listed[2 * i + 1] : i);
            if (number >> (shift + DIGIT_BITS) == known) {
                const uint bin = (uint)(number >> shift) % BINS;
                const ulong weight = weight_of(halvings);
                tally(counts + bin, 1);
                for (uint part = 0; part < QUARTERS; ++part) {
                    tally(quarters + (part * BINS + bin), (uint)(weight >> part * QUARTER_BITS) & QUARTER);
                }
            }
        }
        barrier(ctx);
        Four mine;
        for (uint i = 0; i < 4; ++i) {
            const uint bin = 4 * ctx.thread() + i;
            mine.counts[i] = counts[bin];
            mine.mass[i] = 0;
            for (uint part = 0; part < QUARTERS; ++part) {
                mine.mass[i] += (ulong)quarters[part * BINS + bin] << part * QUARTER_BITS;
            }
        }
        find_bin(ctx, s, mine, place, scratch);
        known = known << DIGIT_BITS | place[0];
        s.count = place[1];
        s.mass = place[2];
        barrier(ctx);
    }
    if (ctx.thread() != 0) return;
    const uint halvings = (uint)(known >> ID_BITS);
    const ulong left = s.mass + weight_of(halvings);
    own[LEFT] = (uint)left;
    own[LEFT + 1] = (uint)(left >> 32);
    own[CUT] = halvings;
    own[CUT + 1] = (uint)known % (1 << ID_BITS);
}

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

// The weights of each segment's tokens that are left, at the row's temperature (rows, segments). Grid: (segments / 8, rows).
KERNEL(weigh_segments, DrawConstants, (const float, logits), (const float, maxima), (const uint, how), (const uint, found), (ulong, sums)) {
    SHARED(float, scratch, 8);
    const uint segment = ctx.group_x() * ctx.warps() + ctx.warp(), row = ctx.group_y();
    if (how[row * HOW_WORDS + MODE] < DRAWN) return;
    const float best = best_of(ctx, maxima + row * c.segments, c.segments, scratch);
    if (segment >= c.segments || best != best) return;
    const Drawing d = drawing_of(how + row * HOW_WORDS, found + row * FOUND_WORDS, best);
    const GPTR(const float) from = logits + (ulong)row * c.vocab;
    const uint end = (segment + 1) * c.each < c.tokens ? (segment + 1) * c.each : c.tokens;
    ulong sum = 0;
    for (uint i = segment * c.each + ctx.lane(); i < end; i += 32) sum += left_weight(d, from[i], i);
    sum = lane_scan(ctx, sum);
    if (ctx.lane() == 31) sums[row * c.segments + segment] = sum;
}

// Segments of a thread.
CONSTANT uint MINE = SEGMENTS / 256;

// Of each row the token that is chosen (rows), NONE where there is none to choose or an element is not finite. Grid: rows.
KERNEL(choose_tokens, DrawConstants, (const float, logits), (const float, maxima), (const uint, how), (const uint, found),
       (const ulong, sums), (uint, out)) {
    SHARED(float, scratch, 8);
    SHARED(ulong, parts, 8);
    SHARED(uint, firsts, 8);
    SHARED(ulong, place, 2);
    const uint row = ctx.group_x(), mode = how[row * HOW_WORDS + MODE];
    if (mode == SKIPPED) {
        if (ctx.thread() == 0) out[row] = NONE;
        return;
    }
    const GPTR(const float) own = maxima + row * c.segments;
    const float best = best_of(ctx, own, c.segments, scratch);
    if (!(best > LOWEST)) {
        if (ctx.thread() == 0) out[row] = NONE;
        return;
    }
    if (ctx.thread() == 0) place[0] = c.segments;
    if (mode == BEST) {
        uint first = c.segments;
        for (uint i = ctx.thread(); i < c.segments; i += ctx.threads()) first = own[i] == best && i < first ? i : first;
        first = lane_min(ctx, first);
        if (ctx.lane() == 0) firsts[ctx.warp()] = first;
        barrier(ctx);
        if (ctx.thread() == 0) {
            for (uint i = 1; i < ctx.warps(); ++i) first = firsts[i] < first ? (uint)firsts[i] : first;
            place[0] = first;
        }
    } else {
        ulong weights[MINE], mine = 0;
        for (uint i = 0; i < MINE; ++i) {
            const uint segment = ctx.thread() * MINE + i;
            weights[i] = segment < c.segments ? (ulong)sums[row * c.segments + segment] : 0;
            mine += weights[i];
        }
        const Sums all = group_scan(ctx, mine, parts);
        const ulong drawn = high_product(two_words(how + (row * HOW_WORDS + RANDOM)), all.all);
        ulong before = all.before;
        for (uint i = 0; i < MINE; ++i) {
            if (before <= drawn && drawn - before < weights[i]) {
                place[0] = ctx.thread() * MINE + i;
                place[1] = drawn - before;
            }
            before += weights[i];
        }
    }
    barrier(ctx);
    if (ctx.warp() != 0) return;
    const Drawing d = drawing_of(how + row * HOW_WORDS, found + row * FOUND_WORDS, best);
    const GPTR(const float) from = logits + (ulong)row * c.vocab;
    const uint segment = (uint)place[0];
    ulong drawn = mode == BEST ? 0 : (ulong)place[1];
    uint chosen = NONE;
    for (uint base = segment * c.each; base < (segment + 1) * c.each && chosen == NONE; base += 32) {
        const uint i = base + ctx.lane();
        const float x = i < c.tokens ? (float)from[i] : FORBIDDEN;
        uint mine = NONE;
        if (mode == BEST) {
            mine = x == best ? i : NONE;
        } else {
            const ulong weight = i < c.tokens ? left_weight(d, x, i) : 0, upto = lane_scan(ctx, weight);
            mine = drawn < upto && drawn >= upto - weight ? i : NONE;
            const ulong all = lane_get(ctx, upto, 31);
            drawn -= drawn < all ? 0 : all;
        }
        chosen = lane_min(ctx, mine);
    }
    if (ctx.lane() == 0) out[row] = chosen;
}

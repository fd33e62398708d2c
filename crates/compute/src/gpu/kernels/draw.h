// Choosing tokens by rows of logits. A row is cut into segments, one a warp.
#include "draw_cuts.h"

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

// The weights of each segment's tokens that are left, at the row's temperature (rows, segments), unless all are listed. Grid:
// (segments / 8, rows).
KERNEL(weigh_segments, DrawConstants, (const float, logits), (const float, maxima), (const uint, how), (const uint, found), (ulong, sums)) {
    SHARED(float, scratch, 8);
    const uint segment = ctx.group_x() * ctx.warps() + ctx.warp(), row = ctx.group_y();
    const uint mode = how[row * HOW_WORDS + MODE];
    if (mode < DRAWN || (cuts(mode) && all_listed(found + row * FOUND_WORDS))) return;
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

// The segment that has the token which is drawn, and what of the weight drawn is left for that segment: `place` gets both.
DEVICE void draw_segment(CTX, const DrawConstants c, GPTR(const ulong) sums, GPTR(const uint) how, SPTR(ulong) place,
                         SPTR(ulong) scratch) {
    ulong weights[MINE], mine = 0;
    for (uint i = 0; i < MINE; ++i) {
        const uint segment = ctx.thread() * MINE + i;
        weights[i] = segment < c.segments ? (ulong)sums[segment] : 0;
        mine += weights[i];
    }
    const Sums all = group_scan(ctx, mine, scratch);
    const ulong drawn = high_product(two_words(how + RANDOM), all.all);
    if (ctx.thread() == 0) place[0] = c.segments;
    barrier(ctx);
    ulong before = all.before;
    for (uint i = 0; i < MINE; ++i) {
        if (before <= drawn && drawn - before < weights[i]) {
            place[0] = ctx.thread() * MINE + i;
            place[1] = drawn - before;
        }
        before += weights[i];
    }
    barrier(ctx);
}

// Of each row the token that is chosen (rows), NONE where there is none to choose or an element is not finite. Grid: rows.
KERNEL(choose_tokens, DrawConstants, (const float, logits), (const float, maxima), (const uint, how), (const uint, found),
       (const ulong, sums), (const uint, list), (uint, out)) {
    SHARED(float, scratch, 8);
    SHARED(ulong, parts, 8);
    SHARED(uint, firsts, 8);
    SHARED(ulong, place, 2);
    SHARED(ulong, numbers, LISTED);
    const uint row = ctx.group_x(), mode = how[row * HOW_WORDS + MODE];
    const GPTR(const float) own = maxima + row * c.segments, from = logits + (ulong)row * c.vocab;
    const float best = mode == SKIPPED ? not_a_number() : best_of(ctx, own, c.segments, scratch);
    if (!(best > LOWEST)) {
        if (ctx.thread() == 0) out[row] = NONE;
        return;
    }
    uint chosen = NONE;
    if (mode == BEST) {
        uint segment = c.segments;
        for (uint i = ctx.thread(); i < c.segments; i += ctx.threads()) segment = own[i] == best && i < segment ? i : segment;
        segment = group_min(ctx, segment, firsts);
        const uint first = segment * c.each, end = first + c.each < c.tokens ? first + c.each : c.tokens;
        for (uint i = first + ctx.thread(); i < end; i += ctx.threads()) chosen = from[i] == best && i < chosen ? i : chosen;
        chosen = group_min(ctx, chosen, firsts);
    } else {
        const GPTR(const uint) rules = how + row * HOW_WORDS, known = found + row * FOUND_WORDS;
        const Drawing d = drawing_of(rules, known, best);
        if (cuts(mode) && all_listed(known)) {
            chosen = choose_listed(ctx, from, d, rules, known, list + (ulong)row * 2 * LISTED, numbers, parts, place);
        } else {
            draw_segment(ctx, c, sums + row * c.segments, rules, place, parts);
            const uint first = (uint)place[0] * c.each, end = first + c.each < c.tokens ? first + c.each : c.tokens;
            ulong drawn = place[1];
            for (uint base = first; base < end && chosen == NONE; base += ctx.threads()) {
                const uint i = base + ctx.thread();
                const ulong weight = i < end ? left_weight(d, from[i], i) : 0;
                const Sums upto = group_scan(ctx, weight, parts);
                const bool is_own = drawn >= upto.before && drawn - upto.before < weight;
                chosen = group_min(ctx, is_own ? i : NONE, firsts);
                drawn -= drawn < upto.all ? 0 : upto.all;
            }
        }
    }
    if (ctx.thread() == 0) out[row] = chosen;
}

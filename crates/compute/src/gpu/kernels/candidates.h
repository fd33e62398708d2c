// What choosing a token needs of its logits: the largest ones, and how likely all are together.
//
// A row is cut into segments, one a warp. At least `least` elements are as large as the `least`-th largest of the segments'
// maxima: those are the row's candidates, with whatever else is as large.
#include "dialect.h"

// Segments of a row and candidates of one, at most.
CONSTANT uint MOST_SEGMENTS = 1024, MOST_CANDIDATES = 256;
// Words of a row's results before its candidates.
CONSTANT uint CANDIDATE_HEAD = 4;

struct SegmentConstants {
    uint vocab, segments;
    // Elements of a segment, a multiple of 32.
    uint each;
    // Elements of a row that can be chosen; those after them are padding.
    uint tokens;
};

// logits (rows, vocab) → of each segment the maximum of its tokens and the sum of exp(x - maximum) (rows, segments, 2); the
// maximum is NaN if an element is not finite. Grid: (segments / 8, rows).
KERNEL(segment_maxima, SegmentConstants, (const float, logits), (float, maxima)) {
    const uint segment = ctx.group_x() * ctx.warps() + ctx.warp(), row = ctx.group_y();
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
    float sum = 0.0f;
    for (uint i = segment * c.each + ctx.lane(); i < end && i < c.tokens; i += 32) sum += exp_of(from[i] - best);
    sum = lane_sum(ctx, sum);
    if (ctx.lane() == 0) {
        const ulong to = ((ulong)row * c.segments + segment) * 2;
        maxima[to] = bad ? not_a_number() : best;
        maxima[to + 1] = sum;
    }
}

struct CandidateConstants {
    uint vocab, segments, each, tokens;
    // Candidates that a row has at least, no more than segments.
    uint least;
};

// Of each row: its maximum, NaN if an element is not finite; the sum of exp(x - maximum) over all; the least candidate, all others
// being smaller; how many candidates there are, MOST_CANDIDATES + 1 for more than there is room for; then ids, and logits, of
// the candidates, as far as there are so many. Grid: rows.
KERNEL(candidates, CandidateConstants, (const float, logits), (const float, maxima), (uint, out)) {
    SHARED(float, own, MOST_SEGMENTS);
    SHARED(float, sums, MOST_SEGMENTS);
    SHARED(uint, chosen, MOST_SEGMENTS);
    SHARED(uint, counts, MOST_CANDIDATES);
    SHARED(float, scratch, 8);
    SHARED(float, bound, 1);
    const uint row = ctx.group_x();
    const GPTR(const float) from = logits + (ulong)row * c.vocab;
    const GPTR(const float) of = maxima + (ulong)row * c.segments * 2;
    float best = -infinity();
    uint bad = 0;
    for (uint i = ctx.thread(); i < c.segments; i += ctx.threads()) {
        const float x = of[2 * i];
        own[i] = x;
        sums[i] = of[2 * i + 1];
        bad |= x != x ? 1 : 0;
        best = x > best ? x : best;
    }
    if (ctx.thread() == 0) bound[0] = -infinity();
    best = group_max(ctx, best, scratch);
    bad = group_max(ctx, bad ? 1.0f : 0.0f, scratch) > 0.0f ? 1 : 0;
    const GPTR(uint) to = out + (ulong)row * (CANDIDATE_HEAD + 2 * MOST_CANDIDATES);
    if (bad) {
        if (ctx.thread() == 0) {
            to[0] = as_uint(not_a_number());
            to[1] = 0;
            to[2] = 0;
            to[3] = 0;
        }
        return;
    }
    // The maximum that `least` - 1 others come before, the earlier of equals first.
    for (uint i = ctx.thread(); i < c.segments; i += ctx.threads()) {
        const float x = own[i];
        uint before = 0;
        for (uint j = 0; j < c.segments; ++j) before += own[j] > x || (own[j] == x && j < i) ? 1 : 0;
        chosen[i] = before;
        if (before + 1 == c.least) bound[0] = x;
    }
    float total = 0.0f;
    for (uint i = ctx.thread(); i < c.segments; i += ctx.threads()) total += sums[i] == 0.0f ? 0.0f : sums[i] * exp_of(own[i] - best);
    total = group_sum(ctx, total, scratch);
    const float least = bound[0];
    barrier(ctx);
    // Segments by rank of their maxima: those at or above the bound come first. Of more than there is room for, all count.
    for (uint i = ctx.thread(); i < c.segments; i += ctx.threads()) {
        if (chosen[i] < MOST_CANDIDATES) counts[chosen[i]] = i;
    }
    barrier(ctx);
    const uint ranked = c.segments < MOST_CANDIDATES ? c.segments : MOST_CANDIDATES;
    for (uint r = ctx.warp(); r < ranked; r += ctx.warps()) {
        const uint segment = counts[r];
        uint count = 0;
        if (own[segment] >= least) {
            const uint end = (segment + 1) * c.each < c.tokens ? (segment + 1) * c.each : c.tokens;
            for (uint i = segment * c.each + ctx.lane(); i < end; i += 32) count += from[i] >= least ? 1 : 0;
        }
        count = (uint)lane_add(ctx, (int)count);
        if (ctx.lane() == 0) sums[r] = as_float(count);
    }
    barrier(ctx);
    uint all = 0;
    for (uint r = 0; r < ranked; ++r) all += as_uint(sums[r]);
    // A segment beyond the room whose maximum is as large.
    bool fits = all <= MOST_CANDIDATES;
    if (c.segments > MOST_CANDIDATES && own[counts[MOST_CANDIDATES - 1]] >= least) fits = false;
    if (ctx.thread() == 0) {
        to[0] = as_uint(best);
        to[1] = as_uint(total);
        to[2] = as_uint(least);
        to[3] = fits ? all : MOST_CANDIDATES + 1;
    }
    if (!fits) return;
    uint before = 0, done = 0;
    for (uint r = ctx.warp(); r < ranked; r += ctx.warps()) {
        for (; done < r; ++done) before += as_uint(sums[done]);
        const uint segment = counts[r];
        if (as_uint(sums[r]) == 0) continue;
        uint at = before;
        for (uint base = segment * c.each; base < (segment + 1) * c.each; base += 32) {
            const uint i = base + ctx.lane();
            const float x = i < c.tokens ? (float)from[i] : -infinity();
            const uint mine = i < c.tokens && x >= least ? 1 : 0;
            // Those of the lanes before.
            uint upto = mine;
            for (uint step = 1; step < 32; step *= 2) {
                const uint other = lane_read(ctx, upto, ctx.lane() >= step ? ctx.lane() - step : 0);
                if (ctx.lane() >= step) upto += other;
            }
            if (mine) {
                to[CANDIDATE_HEAD + at + upto - 1] = i;
                to[CANDIDATE_HEAD + MOST_CANDIDATES + at + upto - 1] = as_uint(x);
            }
            at += lane_read(ctx, upto, 31);
        }
    }
}

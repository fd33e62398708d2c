// Bringing experts from host memory, where all of a layer's lie, each in the form of a slot, to their slots.
#pragma once
#include "experts.h"

// A layer's experts and slots: how many there are, where the first is and how far apart they are, in units of SLOT_UNIT
// bytes.
struct Shelf {
    uint experts, slots;
    uint first_expert, first_slot, stride;
};

// What is brought of an expert: `count` words of sixteen bytes, from this one on.
struct Brought {
    Shelf shelf;
    uint first, count;
};

// An expert that is to come, with its slot, in one word. None comes with NOT_COMING, as in ABSENT; what has IS_FORESEEN is there
// in part, because the layer before has asked for it.
CONSTANT uint NOT_COMING = 0x80000000u, IS_FORESEEN = 0x8000u;
DEVICE uint fetch_of(uint expert, uint slot) { return slot << 16 | expert; }
DEVICE uint fetched_expert(uint fetch) { return fetch & (IS_FORESEEN - 1); }
DEVICE uint fetched_slot(uint fetch) { return fetch >> 16; }

// Of an expert's rest, the first group brings so many eighths.
CONSTANT uint EARLY_EIGHTHS = 3;

// Brings what `place` says at one place of its list, if there is such a place. `groups` groups do so, of which this one is
// number `own`.
DEVICE void bring(CTX, const Brought c, GPTR(const uint) fetches, GPTR(const uchar) host,
                  GPTR(uchar) slots, uint at, uint own,
                  uint groups) {
    const uint fetch = at < c.shelf.experts ? (uint)fetches[at] : ABSENT;
    if (fetch & NOT_COMING) return;
    const ulong skipped = (ulong)c.first * 16;
    const ulong expert = c.shelf.first_expert + fetched_expert(fetch) * c.shelf.stride;
    const ulong slot = c.shelf.first_slot + fetched_slot(fetch) * c.shelf.stride;
    const GPTR(const uchar) from = host + (expert * SLOT_UNIT + skipped);
    const GPTR(uchar) to = slots + (slot * SLOT_UNIT + skipped);
    for (uint i = own * 4 * ctx.threads() + ctx.thread(); i < c.count; i += groups * 4 * ctx.threads()) {
        // Several reads under way at once; beyond the end, the last one again.
        Word4 v[4];
#pragma unroll
        for (uint n = 0; n < 4; ++n) {
            const uint at_word = i + n * ctx.threads();
            v[n] = load_u32x4(from, 16 * (at_word < c.count ? at_word : c.count - 1));
        }
#pragma unroll
        for (uint n = 0; n < 4; ++n) {
            const uint at_word = i + n * ctx.threads();
            if (at_word < c.count) store_u32x4(to, 16 * at_word, v[n]);
        }
    }
}

// Brings what is left of an expert when `fetch`, the dispatch right before, has brought what is in front of it. One group
// begins while that one runs, so that the bus is not idle when it ends: slowly, not to be in its way. Where what is in front was
// foreseen, `fetch` has little to bring, and all groups come after it.
DEVICE void bring_rest(CTX, const Brought c, GPTR(const uint) fetches, GPTR(const uchar) host,
                       GPTR(uchar) slots, uint at, uint own,
                       uint groups) {
    const bool is_foreseen = at < c.shelf.experts && (fetches[at] & IS_FORESEEN);
    const uint early = is_foreseen ? 0 : c.count / 8 * EARLY_EIGHTHS;
    Brought part = c;
    if (own == 0 && !is_foreseen) {
        part.count = early;
        writes_apart(ctx);
        bring(ctx, part, fetches, host, slots, at, 0, 1);
    }
    after_previous(ctx);
    if (is_foreseen) return bring(ctx, part, fetches, host, slots, at, own, groups);
    if (own == 0) return;
    part.first += early;
    part.count -= early;
    bring(ctx, part, fetches, host, slots, at, own - 1, groups - 1);
}

// What the processor has computed of a batch's experts, where they are: in host memory. It and the device meet at a *desk*,
// memory of the host that both read and write; `place` asks (`tiers.h`).
#include "handed.h"

// The processor is waited for as many nanoseconds.
CONSTANT uint MOST_WAITED = 4000000000u;

struct CollectConstants {
    // Of an output.
    uint width;
    // Where outputs begin, in words of the desk.
    uint desk_outputs;
};

// What it took to bring experts, in sums: batches, experts, their squares, nanoseconds from the choice to here, the products of
// both. Then, where the processor was waited for: batches, experts that it computed, nanoseconds from the choice to their
// outputs.
CONSTANT uint TIMES = 8;
// Nanoseconds that count as waiting.
CONSTANT uint WAITING = 2000;

struct OfferConstants {
    DeskRows desk;
    uint rows, top_k;
};

// Puts rows of x (rows, cols) and the experts of their pairs, ids (rows, top_k), on the desk, and says when all are there.
// Grid: (rows).
KERNEL(offer, OfferConstants, (const uint, ids), (const float, x), (const float, norm), (uint, handed), (uint, desk)) {
    SHARED(uint, words, MOST_COLUMNS / 4);
    SHARED(float, scales, MOST_COLUMNS / 16);
    SHARED(float, scratch, 8);
    const uint row = ctx.group_x();
    for (uint k = ctx.thread(); k < c.top_k; k += ctx.threads()) {
        desk[DESK_LIST + row * c.top_k + k] = (uint)ids[row * c.top_k + k];
    }
    hand_row(ctx, c.desk, row, x, norm, desk, words, scales, scratch);
    publish(ctx);
    barrier(ctx);
    if (ctx.thread() != 0 || tally_device(handed + HANDED_ARRIVED, 1) + 1 != c.rows) return;
    publish(ctx);
    tell(desk + DESK_ASKED);
}

// The outputs of the pairs that the processor computes → out (pairs, width), once they are there. Grid: (pairs).
KERNEL(collect, CollectConstants, (const uint, table), (const uint, ids), (uint, handed), (float, times),
       (uint, desk), (float, out)) {
    SHARED(uint, in_time, 1);
    const uint pair = ctx.group_x();
    // For the next `place`.
    if (pair == 0 && ctx.thread() == 0) handed[HANDED_ARRIVED] = 0;
    if (handed[HANDED_PAIRS] == 0 || table[ids[pair]] != ABSENT) return;
    if (ctx.thread() == 0) {
        const uint here = nanoseconds();
        in_time[0] = told(desk + DESK_DONE, MOST_WAITED) ? 1 : 0;
        if (handed[HANDED_LIST] >> 16 == pair) {
            const float took = (float)(here - handed[HANDED_SINCE]), fetched = (float)(uint)handed[HANDED_FETCHED];
            if (in_time[0] == 0) desk[DESK_LATE] = 1;
            times[0] += 1.0f;
            times[1] += fetched;
            times[2] += fetched * fetched;
            times[3] += took;
            times[4] += fetched * took;
            const uint end = nanoseconds();
            if (end - here > WAITING) {
                times[5] += 1.0f;
                times[6] += (float)(uint)handed[HANDED_EXPERTS];
                times[7] += (float)(end - handed[HANDED_SINCE]);
            }
        }
    }
    barrier(ctx);
    const bool late = in_time[0] == 0;
    for (uint i = ctx.thread(); i < c.width / 4; i += ctx.threads()) {
        Word4 v = peek4(desk + (c.desk_outputs + pair * c.width + 4 * i));
        if (late) v.x = v.y = v.z = v.w = as_uint(not_a_number());
        store_u32x4(GCAST(uchar, out), 16 * (pair * (c.width / 4) + i), v);
    }
}

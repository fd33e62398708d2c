// Routed experts that the processor computes beside the device, where they are: in host memory. The two meet at a *desk*,
// memory of the host that both read and write.
#include "activations.h"
#include "handed.h"

// Words of the desk: whether pairs wait for the processor and whether it has computed them, each in a line of its own;
// whether it was waited for in vain; then the number of pairs, the set that their experts are of, and the pairs.
CONSTANT uint DESK_ASKED = 0, DESK_DONE = 64, DESK_LATE = 128, DESK_PAIRS = 192, DESK_SET = 193, DESK_LIST = 194;
// For so many nanoseconds.
CONSTANT uint MOST_WAITED = 4000000000u;

struct ShareConstants {
    Brought brought;
    NormConstants norm;
    // Of x.
    uint rows, cols;
    // Which set of experts.
    uint set;
    // Where rows of x begin, in words of the desk. A row: its bytes, its blocks' scales, its norm's factor, to a multiple
    // of four words.
    uint desk_rows;
};

DEVICE uint desk_row_words(uint cols) { return (cols / 4 + cols / 16 + 1 + 3) / 4 * 4; }

// Brings the first part of what `place` says, as `fetch` does, and the rows of the pairs that are handed over to the
// desk: x (rows, cols), normalised if there is a norm. Grid: (any, rows, then pairs or experts).
KERNEL(share, ShareConstants, (const uint, fetches), (const uchar, host), (uchar, slots), (uint, handed),
       (const float, x), (const float, norm), (uint, desk)) {
    SHARED(uint, words, MOST_COLUMNS / 4);
    SHARED(float, scales, MOST_COLUMNS / 16);
    SHARED(float, scratch, 8);
    const uint row = ctx.group_y(), cols = c.cols;
    if (row >= c.rows) {
        return bring(ctx, c.brought, fetches, host, slots, row - c.rows, ctx.group_x(), ctx.groups_x());
    }
    const uint pairs = handed[HANDED_PAIRS];
    if (pairs == 0 || ctx.group_x() != 0) return;
    const GPTR(const float) from = x + (ulong)row * cols;
    const float factor =
        enter_bytes(ctx, c.norm, from, norm, cols, words, scales, scratch, entering(ctx, c.norm, from, norm, cols));
    const GPTR(uint) to = desk + (c.desk_rows + row * desk_row_words(cols));
    for (uint i = ctx.thread(); i < cols / 4; i += ctx.threads()) to[i] = words[i];
    for (uint i = ctx.thread(); i < cols / 16; i += ctx.threads()) to[cols / 4 + i] = as_uint(scales[i]);
    if (row == 0) {
        for (uint i = ctx.thread(); i < pairs; i += ctx.threads()) desk[DESK_LIST + i] = handed[HANDED_LIST + i];
    }
    if (ctx.thread() == 0) {
        to[cols / 4 + cols / 16] = as_uint(factor);
        if (row == 0) {
            desk[DESK_PAIRS] = pairs;
            desk[DESK_SET] = c.set;
            desk[DESK_DONE] = 0;
        }
    }
    publish(ctx);
    barrier(ctx);
    if (ctx.thread() != 0 || tally_device(handed + HANDED_ARRIVED, 1) + 1 != c.rows) return;
    publish(ctx);
    tell(desk + DESK_ASKED);
}

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

// The outputs of the pairs that the processor computes → out (pairs, width), once they are there. Grid: (pairs).
KERNEL(collect, CollectConstants, (const uint, table), (const uint, ids), (const uint, handed), (float, times),
       (uint, desk), (float, out)) {
    SHARED(uint, in_time, 1);
    const uint pair = ctx.group_x();
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

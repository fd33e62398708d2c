// Moving rows and columns.
#include "dialect.h"

struct GatherConstants {
    uint width;
};

// Rows of x (·, width) by `rows` → out. A group copies one row.
KERNEL(gather_rows, GatherConstants, (const float, x), (const uint, rows), (float, out)) {
    const ulong from = (ulong)rows[ctx.group_x()] * c.width, to = (ulong)ctx.group_x() * c.width;
    for (uint i = ctx.thread(); i < c.width; i += ctx.threads()) out[to + i] = x[from + i];
}

struct SliceConstants {
    // Elements of the result in all.
    uint count;
    // Columns of a part of x, first column taken, columns taken.
    uint part, start, len;
};

// Columns start..start + len of every part of x → out.
KERNEL(slice, SliceConstants, (const float, x), (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i < c.count) out[i] = x[(ulong)(i / c.len) * c.part + c.start + i % c.len];
}

struct RopeConstants {
    // Heads of a row, channels of a head, pairs that rotate.
    uint heads, head_dim, pairs;
    // Whether channels 2i and 2i + 1 form a pair; else i and i + pairs.
    uint interleaved;
};

// Rotates heads of x (rows, heads · head_dim) → out. `angles` (rows, pairs, 2): cosine and sine. A group does one row.
KERNEL(rope, RopeConstants, (const float, x), (const float, angles), (float, out)) {
    const uint row = ctx.group_x(), width = c.heads * c.head_dim;
    for (uint i = ctx.thread(); i < width; i += ctx.threads()) {
        const uint channel = i % c.head_dim;
        const ulong at = (ulong)row * width + i;
        if (channel >= 2 * c.pairs) {
            out[at] = x[at];
            continue;
        }
        const uint pair = c.interleaved ? channel / 2 : channel % c.pairs;
        const bool second = c.interleaved ? channel % 2 == 1 : channel >= c.pairs;
        const uint step = c.interleaved ? 1 : c.pairs;
        const float cosine = angles[((ulong)row * c.pairs + pair) * 2], sine = angles[((ulong)row * c.pairs + pair) * 2 + 1];
        out[at] = second ? x[at] * cosine + x[at - step] * sine : x[at] * cosine - x[at + step] * sine;
    }
}

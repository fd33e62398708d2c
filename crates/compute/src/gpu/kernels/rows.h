// Moving rows and columns, and what depends on a row's position.
#include "cache.h"

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

struct GivenConstants {
    // Columns of a row of the result, of a row of what is put there, and the first of these that is taken.
    uint width, each, first;
    // Whether it is added to what is there.
    uint adds;
};

// Columns of `given` (·, each) in place of rows `rows` of out (·, width), or added to them. A group does one row.
KERNEL(put_rows, GivenConstants, (const float, given), (const uint, rows), (float, out)) {
    const ulong from = (ulong)ctx.group_x() * c.each + c.first, to = (ulong)rows[ctx.group_x()] * c.width;
    for (uint i = ctx.thread(); i < c.width; i += ctx.threads()) {
        out[to + i] = c.adds ? out[to + i] + given[from + i] : given[from + i];
    }
}

struct RopeConstants {
    // Heads of a row, channels of a head, pairs that rotate.
    uint heads, head_dim, pairs;
    // Whether channels 2i and 2i + 1 form a pair; else i and i + pairs.
    uint interleaved;
    // Channels of a head before the first one that rotates, and whether by the negative angle.
    uint first, inverse;
};

// Rotates heads of x (rows, heads · head_dim) → out. `angles` (rows, pairs, 2): cosine and sine. A group does one row.
KERNEL(rope, RopeConstants, (const float, x), (const float, angles), (float, out)) {
    const uint row = ctx.group_x(), width = c.heads * c.head_dim;
    for (uint i = ctx.thread(); i < width; i += ctx.threads()) {
        // Below zero for those before: large.
        const uint channel = i % c.head_dim - c.first;
        const ulong at = (ulong)row * width + i;
        if (channel >= 2 * c.pairs) {
            out[at] = x[at];
            continue;
        }
        const uint pair = c.interleaved ? channel / 2 : channel % c.pairs;
        const bool second = c.interleaved ? channel % 2 == 1 : channel >= c.pairs;
        const uint step = c.interleaved ? 1 : c.pairs;
        const ulong angle = ((ulong)row * c.pairs + pair) * 2;
        const float cosine = angles[angle], sine = c.inverse ? -angles[angle + 1] : angles[angle + 1];
        out[at] = second ? x[at] * cosine + x[at - step] * sine : x[at] * cosine - x[at + step] * sine;
    }
}

struct RepeatConstants {
    // Elements of the result in all, those of a row of x, copies of it.
    uint count, width, times;
};

// Copies of rows of x side by side → out.
KERNEL(repeat, RepeatConstants, (const float, x), (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i < c.count) out[i] = x[(ulong)(i / (c.width * c.times)) * c.width + i % c.width];
}

struct JoinConstants {
    // Elements of the result in all, and those of a row of each side.
    uint count, left, right;
};

// Rows of a (rows, left) and b (rows, right) side by side → out.
KERNEL(join, JoinConstants, (const float, a), (const float, b), (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread(), width = c.left + c.right;
    if (i >= c.count) return;
    const ulong row = i / width;
    const uint column = i % width;
    out[i] = column < c.left ? a[row * c.left + column] : b[row * c.right + column - c.left];
}

struct PositionScaleConstants {
    // Elements in all, and those of a row.
    uint count, width;
    float base, slope;
    // Added to positions, and positions that have the same factor.
    uint offset, period;
    // Whether factors are a power, and whether x has the rows `kept` of the batch, not all of them.
    uint power, gathered;
};

// Rows of x times base + slope · ln(1 + ⌊(position + offset) / period⌋), or base · (1 + (position + offset) / period)^slope
// → out.
KERNEL(position_scale, PositionScaleConstants, (const float, x), (const Place, places), (const uint, kept),
       (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i >= c.count) return;
    const uint row = c.gathered ? (uint)kept[i / c.width] : i / c.width;
    const ulong position = (ulong)places[row].position + c.offset;
    out[i] = x[i] * (c.power ? c.base * exp_of(c.slope * log1p_of(quotient((float)position, (float)c.period)))
                             : c.base + c.slope * log1p_of((float)(position / c.period)));
}

struct HeadScaleConstants {
    // Elements in all, those of a row, and those of a head.
    uint count, width, head_dim;
};

// Heads of rows of x times base + slope · ln(1 + position), with numbers of their head: base, slope (heads) → out.
KERNEL(head_scale, HeadScaleConstants, (const float, x), (const Place, places), (const float, base),
       (const float, slope), (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i >= c.count) return;
    const uint head = i % c.width / c.head_dim;
    out[i] = x[i] * (base[head] + slope[head] * log1p_of((float)places[i / c.width].position));
}

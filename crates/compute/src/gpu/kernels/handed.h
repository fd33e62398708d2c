// Pairs whose experts the processor computes.
#pragma once
#include "activations.h"
#include "fetch.h"

// What `place` writes of them, in words: how many pairs there are, of how many experts, how many come over the bus instead,
// groups that have done their part, when the choice was made, and the pairs.
CONSTANT uint HANDED_PAIRS = 0, HANDED_EXPERTS = 1, HANDED_FETCHED = 2, HANDED_ARRIVED = 3, HANDED_SINCE = 4;
CONSTANT uint HANDED_LIST = 5;
// Shares are known for so many missing experts, and for more.
CONSTANT uint MOST_SHARED = 64;

DEVICE uint handed_pair(uint pair, uint expert) { return pair << 16 | expert; }

// Words of the desk: whether pairs wait for the processor and whether it has computed them, each in a line of its own;
// whether it was waited for in vain; then the number of pairs, the set that their experts are of, and the pairs.
CONSTANT uint DESK_ASKED = 0, DESK_DONE = 64, DESK_LATE = 128, DESK_PAIRS = 192, DESK_SET = 193, DESK_LIST = 194;

// Words of a row on the desk: its bytes, its blocks' scales, its norm's factor, to a multiple of four.
DEVICE uint desk_row_words(uint cols) { return (cols / 4 + cols / 16 + 1 + 3) / 4 * 4; }

// Rows on the desk: their columns, in which word of it the first one begins, and the norm that they take.
struct DeskRows {
    uint cols, first;
    NormConstants norm;
};

// Puts a row of x on the desk. `words` and `scales` hold it meanwhile.
DEVICE void hand_row(CTX, const DeskRows c, uint row, GPTR(const float) x, GPTR(const float) norm, GPTR(uint) desk,
                     SPTR(uint) words, SPTR(float) scales, SPTR(float) scratch) {
    const uint cols = c.cols;
    const GPTR(const float) from = x + (ulong)row * cols;
    const float factor =
        enter_bytes(ctx, c.norm, from, norm, cols, words, scales, scratch, entering(ctx, c.norm, from, norm, cols));
    const GPTR(uint) to = desk + (c.first + row * desk_row_words(cols));
    for (uint i = ctx.thread(); i < cols / 4; i += ctx.threads()) to[i] = words[word_at(i)];
    for (uint i = ctx.thread(); i < cols / 16; i += ctx.threads()) to[cols / 4 + i] = as_uint(scales[i]);
    if (ctx.thread() == 0) to[cols / 4 + cols / 16] = as_uint(factor);
}

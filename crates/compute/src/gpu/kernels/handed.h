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

// Rows on the desk: their columns, in which word of it the first one begins, words from one to the next, whether they are f32 or
// bytes with their blocks' scales, and the norm that they take. After a row comes what its products are multiplied with.
struct DeskRows {
    uint cols, first, words, floats;
    NormConstants norm;
};

// Puts a row of x on the desk as `float_dots` of `floats.h` multiplies it, with the same sum of squares.
DEVICE void hand_floats(CTX, const DeskRows c, GPTR(const float) x, GPTR(const float) norm, GPTR(uint) to) {
    for (uint i = ctx.thread(); i < c.cols; i += ctx.threads())
        to[i] = as_uint(c.norm.has_norm ? product_of(x[i], norm[i]) : (float)x[i]);
    if (ctx.warp() != 0) return;
    float squares = 0.0f;
    for (uint i = ctx.lane(); c.norm.has_norm && i < c.cols / 8; i += 32) {
        const Float8 a = floats8(x, i);
#pragma unroll
        for (uint j = 0; j < 8; ++j) squares = fma_of(a.v[j], a.v[j], squares);
    }
    squares = lane_sum(ctx, squares);
    if (ctx.lane() != 0) return;
    to[c.cols] = as_uint(c.norm.has_norm ? inverse_sqrt(quotient(squares, (float)c.cols) + c.norm.eps) : 1.0f);
}

// Puts a row of x on the desk. `words` and `scales` hold it meanwhile.
DEVICE void hand_row(CTX, const DeskRows c, uint row, GPTR(const float) x, GPTR(const float) norm, GPTR(uint) desk,
                     SPTR(uint) words, SPTR(float) scales, SPTR(float) scratch) {
    const uint cols = c.cols;
    const GPTR(const float) from = x + (ulong)row * cols;
    const GPTR(uint) to = desk + (c.first + row * c.words);
    if (c.floats) return hand_floats(ctx, c, from, norm, to);
    const float factor =
        enter_bytes(ctx, c.norm, from, norm, cols, words, scales, scratch, entering(ctx, c.norm, from, norm, cols));
    for (uint i = ctx.thread(); i < cols / 4; i += ctx.threads()) to[i] = words[word_at(i)];
    for (uint i = ctx.thread(); i < cols / 16; i += ctx.threads()) to[cols / 4 + i] = as_uint(scales[i]);
    if (ctx.thread() == 0) to[cols / 4 + cols / 16] = as_uint(factor);
}

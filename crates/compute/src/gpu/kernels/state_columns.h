// States of a head (rows, columns) in registers from a batch's first token to its last, for recurrences whose tokens write an outer
// product and read a sum over rows: a thread has 16 rows of two columns, PARTS threads side by side all rows of these.
#pragma once
#include "sequences.h"

// Warps of a group; rows of the state that a thread holds, of two columns each; entries that a warp's lane brings of a few tokens'
// keys.
CONSTANT uint STATE_WARPS = 4, STATE_ROWS = 16, STATE_BROUGHT = 16;

// How a group's threads share its columns of a state: PARTS of them have rows of the same two, TOKENS tokens are brought at once, of
// which each warp normalises some.
template <uint PARTS>
struct StateShape {
    enum : uint {
        COLUMNS = 2 * 32 * STATE_WARPS / PARTS,
        ROWS = STATE_ROWS * PARTS,
        TOKENS = PARTS <= 8 ? 16 : 4,
        OF_LANE = ROWS / 32,
        OF_WARP = TOKENS / STATE_WARPS,
        VALUES = TOKENS * COLUMNS < 32 * STATE_WARPS ? 1 : TOKENS * COLUMNS / (32 * STATE_WARPS)
    };
};

// A thread's rows of a vector, or of a column of a state.
struct StateRows {
    float of[STATE_ROWS];
};

template <uint PARTS>
DEVICE StateRows state_rows(SPTR(const float) from, uint t, uint part) {
    StateRows r;
#pragma unroll
    for (uint j = 0; j < STATE_ROWS / 4; ++j) {
        const Float4 v = load_f32x4(from, t * StateShape<PARTS>::ROWS + (j * PARTS + part) * 4);
        r.of[4 * j] = v.x;
        r.of[4 * j + 1] = v.y;
        r.of[4 * j + 2] = v.z;
        r.of[4 * j + 3] = v.w;
    }
    return r;
}

// Σ a ⊙ b over all rows, in the same order whoever asks.
template <uint PARTS>
DEVICE float state_dot(CTX, const StateRows a, const StateRows b) {
    Float4 sums = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (uint j = 0; j < STATE_ROWS; j += 4) {
        sums.x = fma_of(a.of[j], b.of[j], sums.x);
        sums.y = fma_of(a.of[j + 1], b.of[j + 1], sums.y);
        sums.z = fma_of(a.of[j + 2], b.of[j + 2], sums.z);
        sums.w = fma_of(a.of[j + 3], b.of[j + 3], sums.w);
    }
    float sum = (sums.x + sums.y) + (sums.z + sums.w);
#pragma unroll
    for (uint mask = 1; mask < PARTS; mask *= 2) sum += lane_xor(ctx, sum, mask);
    return sum;
}

// A column after a token with this key has written a value to it.
DEVICE StateRows state_written(const StateRows before, const StateRows key, float value) {
    StateRows r;
#pragma unroll
    for (uint j = 0; j < STATE_ROWS; ++j) r.of[j] = fma_of(key.of[j], value, before.of[j]);
    return r;
}

// Row of a state that a thread has as its number j.
template <uint PARTS>
DEVICE uint state_row(uint j, uint part) {
    return (j / 4 * PARTS + part) * 4 + j % 4;
}

// A thread's rows of a column before a batch: zeros where a sequence begins, and beyond the state's rows and columns.
template <uint PARTS>
DEVICE StateRows state_before(const Sequence s, GPTR(const float) column, bool is_there, uint part, uint rows, uint columns) {
    StateRows r;
#pragma unroll
    for (uint j = 0; j < STATE_ROWS; ++j) {
        const uint i = state_row<PARTS>(j, part);
        r.of[j] = s.start != 0 && is_there && i < rows ? (float)column[(ulong)i * columns] : 0.0f;
    }
    return r;
}

template <uint PARTS>
DEVICE void store_state(const StateRows r, GPTR(float) column, bool is_there, uint part, uint rows, uint columns) {
#pragma unroll
    for (uint j = 0; j < STATE_ROWS; ++j) {
        const uint i = state_row<PARTS>(j, part);
        if (is_there && i < rows) column[(ulong)i * columns] = r.of[j];
    }
}

DEVICE StateRows state_kept(const StateRows r, float kept) {
    StateRows result;
#pragma unroll
    for (uint j = 0; j < STATE_ROWS; ++j) result.of[j] = r.of[j] * kept;
    return result;
}

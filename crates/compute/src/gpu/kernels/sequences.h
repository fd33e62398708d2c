// Sequences of a batch, and what they keep from one batch to the next: states (slots, elements), f32.
#pragma once
#include "dialect.h"

// A sequence's rows of the batch.
struct Sequence {
    uint first_row, rows;
    // Position of the first row: at 0 the state before is zeros.
    uint start;
    // State slots: read before, written after.
    uint read, write;
};

// Element `channel` of input `index` of a sequence, of `channels` elements each, counted from the oldest of the `held` ones
// that its state holds; x (rows, channels) are those of the batch.
DEVICE float held_input(GPTR(const float) x,
                        GPTR(const float) state, const Sequence s, uint channels, uint held, uint index,
                        uint channel) {
    if (index >= held) return x[((ulong)s.first_row + index - held) * channels + channel];
    if (s.start == 0) return 0.0f;
    return state[((ulong)s.read * held + index) * channels + channel];
}

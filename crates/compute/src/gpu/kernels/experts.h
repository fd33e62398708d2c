// Routed experts: where they lie, and what they do between their products. A *pair* is a token with one of its experts;
// pair p belongs to token p / top_k.
//
// Experts live in slots of one buffer. `table` says for each expert of the layer where its slot begins, in units of
// SLOT_UNIT bytes, or ABSENT. Pairs of absent experts are left alone.
#pragma once
#include "activate.h"
#include "weights.h"

CONSTANT uint ABSENT = 0xffffffffu, SLOT_UNIT = 256;

// Where one of an expert's matrices lies.
struct Part {
    Format format;
    // Bytes from the start of the slot to each plane.
    uint offsets[3];
    // Output features.
    uint rows;
};

DEVICE Row expert_row(GPTR(const uchar) slots, uint slot, const Part part, uint row) {
    const GPTR(const uchar) base = slots + (ulong)slot * SLOT_UNIT;
    return row_of(base + part.offsets[0], base + part.offsets[1], base + part.offsets[2], part.format, row);
}

// Where keys and values are.
//
// A cache is (pages, heads, PAGE, dim). A row of `places` says where a row of the batch is: its position, and where its
// sequence's page numbers begin in `pages`.
#pragma once
#include "dialect.h"

CONSTANT uint PAGE = 64;
// Parts that keys are divided into, at most.
CONSTANT uint MAX_SPLITS = 64;

struct Place {
    uint position, first_page;
};

DEVICE ulong place_of(GPTR(const uint) pages, const Place at, uint position, uint heads, uint head) {
    const ulong page = pages[at.first_page + position / PAGE];
    return (page * heads + head) * PAGE + position % PAGE;
}

DEVICE float cached(GPTR(const uchar) cache, ulong index, uint is_f32) {
    return is_f32 ? GCAST(const float, cache)[index] : f16_to_f32(GCAST(const ushort, cache)[index]);
}

DEVICE void store_cached(GPTR(uchar) cache, ulong index, float v, uint is_f32) {
    if (is_f32) GCAST(float, cache)[index] = v;
    else GCAST(ushort, cache)[index] = f32_to_f16(v);
}

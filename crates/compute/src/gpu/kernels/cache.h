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

// What a cache's elements are stored as: by `KvType` of the library. Q8_0 has blocks of 32: a scale in f16, then 32 signed
// bytes; everything that is stored and read begins with a block.
CONSTANT uint KV_F16 = 0, KV_F32 = 1, KV_Q8_0 = 2;
// Elements of a block, and its bytes in pairs.
CONSTANT uint KV_BLOCK = 32, KV_BLOCK_PAIRS = 17;

DEVICE float cached(GPTR(const uchar) cache, ulong index, uint kv_type) {
    if (kv_type == KV_F32) return GCAST(const float, cache)[index];
    if (kv_type == KV_F16) return f16_to_f32(GCAST(const ushort, cache)[index]);
    const ulong block = index / KV_BLOCK * KV_BLOCK_PAIRS;
    const float code = (float)(signed char)cache[2 * block + 2 + index % KV_BLOCK];
    return f16_to_f32(GCAST(const ushort, cache)[block]) * code;
}

DEVICE void store_half(GPTR(uchar) cache, ulong index, float v) { GCAST(ushort, cache)[index] = f32_to_f16(v); }

// A block's scale, of the bits of its largest magnitude: not a number if an element is not finite, or beyond what a scale can
// hold. As `Q8Block::of` of the library.
DEVICE ushort block_scale(uint most) {
    const ushort nearest = most >= 0x7f800000u ? (ushort)0x7c00u : f32_to_f16(quotient(as_float(most), 127.0f));
    return (nearest & 0x7c00u) == 0x7c00u ? (ushort)0x7e00u : nearest;
}

// The code of an element of a block.
DEVICE int block_code(float v, ushort scale) {
    const float step = f16_to_f32(scale);
    const bool fits = (scale & 0x7c00u) != 0x7c00u && step != 0.0f;
    return fits ? (int)clamped(round_of(quotient(v, step)), 127.0f) : 0;
}

// Stores a block, an element a lane.
DEVICE void store_block(CTX, GPTR(uchar) cache, ulong index, float v) {
    const ushort scale = block_scale(lane_max(ctx, as_uint(v) & 0x7fffffffu));
    const ulong block = index / KV_BLOCK * KV_BLOCK_PAIRS;
    cache[2 * block + 2 + index % KV_BLOCK] = (uchar)(signed char)block_code(v, scale);
    if (index % KV_BLOCK == 0) GCAST(ushort, cache)[block] = scale;
}

// Stores an element; of Q8_0 all lanes of a warp store theirs, one after the other from the first of a block on.
DEVICE void store_cached(CTX, GPTR(uchar) cache, ulong index, float v, uint kv_type) {
    if (kv_type == KV_F32) GCAST(float, cache)[index] = v;
    else if (kv_type == KV_F16) store_half(cache, index, v);
    else store_block(ctx, cache, index, v);
}

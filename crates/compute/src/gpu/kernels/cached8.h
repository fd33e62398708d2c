// Eight elements of a cache at a time.
#pragma once
#include "activations.h"
#include "cache.h"
#include "quads.h"

// Bytes of `count` elements of a cache, whole blocks of them.
template <uint KV>
DEVICE constexpr ulong cached_bytes(ulong count) {
    return KV == KV_Q8_0 ? count / KV_BLOCK * (2 * KV_BLOCK_PAIRS) : 2 * count;
}

// Elements index..index + 8 of a cache, index a multiple of 8: eight f16, or eight codes and their block's scale.
template <uint KV>
DEVICE Word4 load_cached8(GPTR(const uchar) cache, ulong index) {
    if (KV == KV_F16) return load_u32x4(cache + 2 * index, 0);
    const GPTR(const ushort) block = GCAST(const ushort, cache) + index / KV_BLOCK * KV_BLOCK_PAIRS;
    const uint at = 1 + (uint)(index % KV_BLOCK) / 2;
    const Word4 w = {(uint)block[at] | (uint)block[at + 1] << 16, (uint)block[at + 2] | (uint)block[at + 3] << 16,
                     block[0], 0};
    return w;
}

DEVICE Word4 packed8(const Float8 f) {
    Word4 w = {packed_halves(f.v[0], f.v[1]), packed_halves(f.v[2], f.v[3]), packed_halves(f.v[4], f.v[5]),
               packed_halves(f.v[6], f.v[7])};
    return w;
}

// Eight elements as they are read from a cache; of Q8_0 four lanes have a block.
template <uint KV>
DEVICE Word4 cached8_of(CTX, const Float8 f) {
    if (KV == KV_F16) return packed8(f);
    uint most = 0;
#pragma unroll
    for (uint j = 0; j < 8; ++j) most = larger(most, magnitude_bits(f.v[j]));
    const ushort scale = block_scale(quad_max(ctx, most));
    uint codes[8];
#pragma unroll
    for (uint j = 0; j < 8; ++j) codes[j] = (uint)block_code(f.v[j], scale) & 255u;
    const Word4 w = {codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24,
                     codes[4] | codes[5] << 8 | codes[6] << 16 | codes[7] << 24, scale, 0};
    return w;
}

// Stores eight elements, of which `cached8_of` has made w; of Q8_0 the lane with a block's first ones stores its scale.
template <uint KV>
DEVICE void store_cached8(GPTR(uchar) cache, ulong index, const Float8 f, const Word4 w) {
    if (KV == KV_F16) {
#pragma unroll
        for (uint j = 0; j < 8; ++j) store_half(cache, index + j, f.v[j]);
        return;
    }
    const GPTR(ushort) block = GCAST(ushort, cache) + index / KV_BLOCK * KV_BLOCK_PAIRS;
    const uint at = 1 + (uint)(index % KV_BLOCK) / 2;
    block[at] = (ushort)w.x;
    block[at + 1] = (ushort)(w.x >> 16);
    block[at + 2] = (ushort)w.y;
    block[at + 3] = (ushort)(w.y >> 16);
    if (at == 1) block[0] = (ushort)w.z;
}

// Eight f16 as floats.
DEVICE Float8 halves(const Word4 w) {
    Float8 r = {{f16_to_f32((ushort)w.x), f16_to_f32((ushort)(w.x >> 16)), f16_to_f32((ushort)w.y),
                 f16_to_f32((ushort)(w.y >> 16)), f16_to_f32((ushort)w.z), f16_to_f32((ushort)(w.z >> 16)),
                 f16_to_f32((ushort)w.w), f16_to_f32((ushort)(w.w >> 16))}};
    return r;
}

// What `load_cached8` has read, as floats.
template <uint KV>
DEVICE Float8 cached_floats(const Word4 w) {
    if (KV == KV_F16) return halves(w);
    const float scale = f16_to_f32((ushort)w.z);
    Float8 r;
#pragma unroll
    for (uint j = 0; j < 4; ++j) {
        r.v[j] = scale * (float)(signed char)(w.x >> 8 * j);
        r.v[4 + j] = scale * (float)(signed char)(w.y >> 8 * j);
    }
    return r;
}

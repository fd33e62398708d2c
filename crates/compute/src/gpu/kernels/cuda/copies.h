// Copies of weights to shared memory that are under way while a group does something else, and pieces of what was copied.
#pragma once
#include "../pieces.h"
#include "cuda/instructions.h"

// Starts to copy `bytes` bytes to shared memory, both a multiple of 16 as is where they come from. All lanes of a warp call
// this; it is one copy of those that `bar` counts.
DEVICE void copy_ahead(CTX, uchar* to, const uchar* from, uint bytes, ulong* bar) {
    if (!starts_copies(ctx)) return;
    expect_bytes(bar, bytes);
    copy_bulk(ctx, to, from, bytes, bar);
}

// What some rows of a weight have in its second and third plane: bytes, and the room that is kept for them.
struct FurtherPlanes {
    uint needs[2], rooms[2];
};

// Planes of an encoding that are copied with the first; of NVFP4 the third is a number, which is read where it is.
template <uint D>
DEVICE constexpr uint copied_planes() {
    return D == AFFINE4 || D == AFFINE8 ? 3 : D == NVFP4 ? 2 : 1;
}

// Starts to copy rows from `row` on: `bytes` of the first plane to `to`, and what they have in further planes behind them, from a
// multiple of 16 bytes to another. All lanes of a warp call this; it is one copy of those that `bar` counts.
template <uint D>
DEVICE void copy_rows_ahead(CTX, uchar* to, const Row& row, uint bytes, const FurtherPlanes& further, ulong* bar) {
    constexpr uint PLANES = copied_planes<D>();
    if (PLANES == 1) return copy_ahead(ctx, to, row.plane0, bytes, bar);
    // Of each further plane: where it begins, and how many bytes are copied.
    const uchar* from[2] = {row.plane1, row.plane2};
    uint all[2] = {0, 0};
#pragma unroll
    for (uint p = 1; p < PLANES; ++p) {
        if (further.needs[p - 1] == 0) continue;
        const uint before = (uint)(ulong)from[p - 1] % 16;
        from[p - 1] -= before;
        all[p - 1] = (before + further.needs[p - 1] + 15) / 16 * 16;
    }
    if (!starts_copies(ctx)) return;
    expect_bytes(bar, bytes + all[0] + all[1]);
    copy_bulk(ctx, to, row.plane0, bytes, bar);
    to += bytes;
#pragma unroll
    for (uint p = 1; p < PLANES; to += further.rooms[p - 1], ++p) {
        if (all[p - 1] > 0) copy_bulk(ctx, to, from[p - 1], all[p - 1], bar);
    }
}

// Rows that have been copied: where, how many bytes of the first plane, and where the first one begins in what has
// been copied of further planes.
struct CopiedRows {
    const uchar* at;
    uint bytes;
    uint before[2];
    // By how much words of zero points are to be shifted for the first one.
    uint zero;
    // Where planes that are not copied are.
    const uchar* third;
};

// Rows from `row` on, copied to `at`.
DEVICE CopiedRows copied_rows(const uchar* at, const Row& row, uint bytes) {
    return {at, bytes, {(uint)(ulong)row.plane1 % 16, (uint)(ulong)row.plane2 % 16}, row.zero, row.plane2};
}

// Row n of them.
template <uint D>
DEVICE Row copied_row(const Format& f, const FurtherPlanes& further, const CopiedRows& rows, uint n) {
    Row r = {rows.at + n * f.strides[0], nullptr, nullptr, 0};
    if (copied_planes<D>() == 1) return r;
    const uchar* const second = rows.at + rows.bytes;
    r.plane1 = second + rows.before[0] + n * f.strides[1];
    r.plane2 = rows.third;
    if (copied_planes<D>() == 3) {
        const uint zero = rows.zero + n * (f.kind >> 16 & 15);
        r.plane2 = second + further.rooms[0] + rows.before[1] + (has_zeros(f.kind) ? zero / 32 : n) * f.strides[2];
        r.zero = zero % 32;
    }
    return r;
}

// Words of a pair's activations in shared memory: `quad_at` keeps them within eight quads.
DEVICE uint pair_words(uint cols) { return (cols / 4 + 31) / 32 * 32; }

// Sixteen bytes in shared memory, `by` bits after a word: words are cheaper there than what aligned sixteen bytes take to be
// shifted. Reads up to the next word.
DEVICE Word4 loose_words(const uchar* from, uint by) {
    const uint* const w = (const uint*)from;
    return Word4{__funnelshift_r(w[0], w[1], by), __funnelshift_r(w[1], w[2], by), __funnelshift_r(w[2], w[3], by),
                 __funnelshift_r(w[3], w[4], by)};
}

// `raw_of` piece 4i + t of row `row` of those copied.
template <uint D>
DEVICE Raw copied_raw(const Format& f, const FurtherPlanes& further, const CopiedRows& rows, uint row, uint i, uint t) {
    if (D != Q6_K) return raw_of<D>(f, copied_row<D>(f, further, rows, row), 4 * i + t);
    Raw r;
    const uchar* const aligned = rows.at;
    const uint at = row * f.strides[0];
    const uint n = t / 2, half = t % 2, begin = at + 210 * i, by = begin & 3;
    const uchar* const words = aligned + (begin - by);
    const uchar* const low = words + (64 * n + 16 * half);
    r.a = loose_words(low, 8 * by);
    r.b = loose_words(low + 32, 8 * by);
    r.c = loose_words(words + (128 + 32 * n + 16 * half), 8 * by);
    const uchar* const b = aligned + begin;
    const uchar* const sc = b + (192 + 8 * n + half);
    r.bytes = (uint)sc[0] | (uint)sc[2] << 8 | (uint)sc[4] << 16 | (uint)sc[6] << 24;
    r.scale = half_at(b, 208);
    return r;
}

// A pair's activations in shared memory, where every 128 columns have 160 bytes: lanes with four pieces side by side then read
// different banks.
struct PaddedActivations {
    const uchar* bytes;
    const float* scales;
};
DEVICE uint padded_bytes(uint cols) { return (cols + 127) / 128 * 160; }
DEVICE uint padded_at(uint column) { return column / 128 * 160 + column % 128; }

DEVICE Word4 sixteen(const uchar* p) {
    const uint4 w = *(const uint4*)p;
    return Word4{w.x, w.y, w.z, w.w};
}
DEVICE Float4 four_floats(const float* p) {
    const float4 v = *(const float4*)p;
    return Float4{v.x, v.y, v.z, v.w};
}

// `chunk_of` piece 4i + t.
template <uint D>
DEVICE Chunk padded_chunk(const PaddedActivations& x, uint i, uint t) {
    Chunk k;
    if (D == Q4_K || D == Q5_K) {
        const uchar* const own = x.bytes + (320 * i + t / 2 * 160 + t % 2 * 64);
        k.a = sixteen(own);
        k.b = sixteen(own + 16);
        k.c = sixteen(own + 32);
        k.d = sixteen(own + 48);
        const Float4 both = four_floats(x.scales + (16 * i + 4 * t));
        k.of.scales[0] = both.x;
        k.of.sums[0] = both.y;
        k.of.scales[1] = both.z;
        k.of.sums[1] = both.w;
    } else if (is_quartered<D>()) {
        const uchar* const own = x.bytes + (320 * i + t / 2 * 160 + t % 2 * 16);
        k.a = sixteen(own);
        k.b = sixteen(own + 32);
        k.c = sixteen(own + 64);
        k.d = sixteen(own + 96);
        const float* const of = x.scales + (16 * i + t / 2 * 8);
        const Float4 low = four_floats(of), high = four_floats(of + 4);
        k.of.scales[0] = low.x;
        k.of.scales[1] = low.z;
        k.of.scales[2] = high.x;
        k.of.scales[3] = high.z;
    } else {
        const uchar* const own = x.bytes + (160 * i + 32 * t);
        k.a = sixteen(own);
        k.b = sixteen(own + 16);
        const float2 of = *(const float2*)(x.scales + (8 * i + 2 * t));
        k.of.scales[0] = of.x;
        k.of.sums[0] = of.y;
    }
    return completed<D>(k);
}

DEVICE int dot16(const Word4 a, const Word4 b, int sum) {
    return dot4(a.x, b.x, dot4(a.y, b.y, dot4(a.z, b.z, dot4(a.w, b.w, sum))));
}

// Low nibbles with bits 0 and 1 of each byte of `high`.
DEVICE Word4 sixes(const Word4 low, const Word4 high) {
    const Word4 h = and4(high, 0x03030303u);
    return Word4{low.x | h.x << 4, low.y | h.y << 4, low.z | h.z << 4, low.w | h.w << 4};
}

// What whole numbers of a piece begin with, of Q6_K: that its values are less 32 is the same for all rows.
template <uint D>
DEVICE PieceDots begun_dots(const Chunk x) {
    PieceDots d = {{EXACT, EXACT, EXACT, EXACT}};
    if (D == Q6_K) {
        const uint less = 0xe0e0e0e0u;
        const Word4 all = {less, less, less, less};
        d = {{dot16(all, x.a, EXACT), dot16(all, x.b, EXACT), dot16(all, x.c, EXACT), dot16(all, x.d, EXACT)}};
    }
    return d;
}

// `piece_dot`, with the same bits: whole numbers are exact in any order.
template <uint D>
DEVICE float copied_dot(const Raw r, const Chunk x, PieceDots dots, uint p) {
    if (D != Q6_K) return piece_dot<D>(r, x, p);
    dots.v[0] = dot16(sixes(and4(r.a, 0x0f0f0f0fu), r.c), x.a, dots.v[0]);
    dots.v[1] = dot16(sixes(and4(r.b, 0x0f0f0f0fu), shift4(r.c, 2)), x.b, dots.v[1]);
    dots.v[2] = dot16(sixes(and4(shift4(r.a, 4), 0x0f0f0f0fu), shift4(r.c, 4)), x.c, dots.v[2]);
    dots.v[3] = dot16(sixes(and4(shift4(r.b, 4), 0x0f0f0f0fu), shift4(r.c, 6)), x.d, dots.v[3]);
    return scaled_dots<D>(piece_scales<D>(r, p), x.of, dots);
}

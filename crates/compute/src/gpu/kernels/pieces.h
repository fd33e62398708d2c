// Pieces of rows of weights times activations of eight bits: what decoding spends its time on.
//
// Activations come in blocks of 32 columns: their bytes, and for each block its scale d and d · Σ q. A *piece* of a row
// is what a lane takes at once: 32 columns, of Q6_K 64.
#pragma once
#include "weights.h"

// Activations in device memory, and in threadgroup memory.
struct Activations {
    GPTR(const uchar) bytes;
    GPTR(const float) scales;
};

struct LocalActivations {
    SPTR(const uint) words;
    SPTR(const float) scales;
};

DEVICE Word4 columns16(const Activations x, uint column) { return load_u32x4(x.bytes, column); }
DEVICE Word4 columns16(const LocalActivations x, uint column) { return load_u32x4(x.words, column / 4); }

DEVICE int dot16(const Word4 a, const Word4 b) {
    return dot4(a.x, b.x, dot4(a.y, b.y, dot4(a.z, b.z, dot4(a.w, b.w, 0))));
}

DEVICE Word4 and4(const Word4 a, uint mask) {
    Word4 r = {a.x & mask, a.y & mask, a.z & mask, a.w & mask};
    return r;
}

DEVICE Word4 shift4(const Word4 a, uint by) {
    Word4 r = {a.x >> by, a.y >> by, a.z >> by, a.w >> by};
    return r;
}

// Bits `bit` of each byte of `high` become bits 4 of `low`.
DEVICE Word4 fifth_bits(const Word4 low, const Word4 high, uint bit) {
    const Word4 h = and4(shift4(high, bit), 0x01010101u);
    Word4 r = {low.x | h.x << 4, low.y | h.y << 4, low.z | h.z << 4, low.w | h.w << 4};
    return r;
}

// Bytes of 0..64, less 32.
DEVICE uint less_32(uint q) { return (q + 0x60606060u) ^ 0x80808080u; }

// Elements 0, 2, 4, 6 of the eight bytes a, b, or 1, 3, 5, 7.
DEVICE uint even_bytes(uint a, uint b) {
    return (a & 255) | (a >> 8 & 0xff00) | (b & 255) << 16 | (b << 8 & 0xff000000u);
}
DEVICE uint odd_bytes(uint a, uint b) { return even_bytes(a >> 8, b >> 8); }

// The activations of a piece: sixteen columns each, and what the encoding needs of their blocks.
struct Chunk {
    Word4 a, b, c, d;
    float scales[4], sums[2];
};

template <uint D> DEVICE uint pieces_of(const Format f) { return D == Q6_K ? f.cols / 64 : f.cols / 32; }

template <uint D, class X> DEVICE Chunk chunk_of(const X x, uint p) {
    Chunk k;
    if (D == Q4_K || D == Q5_K) {
        // Half of two sub-blocks that follow each other.
        const uint first = p / 2 * 2, column = first * 32 + 16 * (p % 2);
        k.a = columns16(x, column);
        k.b = columns16(x, column + 32);
        k.scales[0] = x.scales[2 * first];
        k.scales[1] = x.scales[2 * first + 2];
        k.sums[0] = x.scales[2 * first + 1];
        k.sums[1] = x.scales[2 * first + 3];
    } else if (D == Q6_K) {
        // Sixteen columns of each quarter of half a block.
        const uint first = p / 2 * 4, column = first * 32 + 16 * (p % 2);
        k.a = columns16(x, column);
        k.b = columns16(x, column + 32);
        k.c = columns16(x, column + 64);
        k.d = columns16(x, column + 96);
#pragma unroll
        for (uint i = 0; i < 4; ++i) k.scales[i] = x.scales[2 * (first + i)];
    } else {
        k.a = columns16(x, 32 * p);
        k.b = columns16(x, 32 * p + 16);
        k.scales[0] = x.scales[2 * p];
        k.sums[0] = x.scales[2 * p + 1];
    }
    return k;
}

// Six-bit values: low nibbles with bits 0 and 1 of each byte of `high`, less 32.
DEVICE Word4 six_bits(const Word4 low, const Word4 high) {
    const Word4 h = and4(high, 0x03030303u);
    Word4 r = {less_32(low.x | h.x << 4), less_32(low.y | h.y << 4), less_32(low.z | h.z << 4), less_32(low.w | h.w << 4)};
    return r;
}

// What is read of a row for a piece. Reading is apart from multiplying, so that many reads are under way at once.
struct Raw {
    Word4 a, b, c;
    // Four scales, a byte each.
    uint bytes;
    float scale, bias;
};

template <uint D> DEVICE Raw raw_of(const Format f, const Row row, uint p) {
    Raw r;
    if (D == Q4_K || D == Q5_K) {
        const uint head = D == Q4_K ? 16 : 48;
        const GPTR(const uchar) b = row.plane0 + (ulong)(p / 8) * (head + 128);
        r.a = load_u32x4(b, 0);
        r.b = load_u32x4(b, head + 16 * (p % 8));
        if (D == Q5_K) r.c = load_u32x4(b, 16 + 16 * (p % 2));
    } else if (D == Q6_K) {
        // Blocks of 210 bytes: every other one begins in the middle of a word.
        const GPTR(const uchar) b = row.plane0 + (ulong)(p / 4) * 210;
        const uint n = p % 4 / 2, part = p % 2;
        r.a = load_loose(b, 64 * n + 16 * part);
        r.b = load_loose(b, 64 * n + 32 + 16 * part);
        r.c = load_loose(b, 128 + 32 * n + 16 * part);
        const GPTR(const uchar) sc = b + (192 + 8 * n + part);
        r.bytes = (uint)sc[0] | (uint)sc[2] << 8 | (uint)sc[4] << 16 | (uint)sc[6] << 24;
        r.scale = half_at(b, 208);
    } else if (D == Q8_0) {
        const GPTR(const uchar) b = row.plane0 + (ulong)p * 34;
        r.a = load_loose(b, 2);
        r.b = load_loose(b, 18);
        r.scale = half_at(b, 0);
    } else {
        // Affine of 4 bits (AFFINE) or 8 (AFFINE + 256).
        const uint group = f.kind >> 8 & 255, at = 32 * p / group * 2;
        r.scale = scale_at(f.kind, row.plane1, at);
        r.bias = scale_at(f.kind, row.plane2, at);
        r.a = load_u32x4(row.plane0, (D == AFFINE ? 16 : 32) * p);
        if (D != AFFINE) r.b = load_u32x4(row.plane0, 32 * p + 16);
    }
    return r;
}

DEVICE Word4 flipped(const Word4 a) {
    Word4 r = {a.x ^ 0x80808080u, a.y ^ 0x80808080u, a.z ^ 0x80808080u, a.w ^ 0x80808080u};
    return r;
}

// Product of piece p of a row.
template <uint D> DEVICE float piece_dot(const Raw r, const Chunk x, uint p) {
    if (D == Q4_K || D == Q5_K) {
        // 16 bytes: sub-blocks s (low nibbles) and s + 1 (high ones), their first or second part.
        const uint s = p % 8 / 2 * 2;
        Word4 low = and4(r.b, 0x0f0f0f0fu), high = and4(shift4(r.b, 4), 0x0f0f0f0fu);
        if (D == Q5_K) {
            low = fifth_bits(low, r.c, s);
            high = fifth_bits(high, r.c, s + 1);
        }
        const float d = f16_to_f32((ushort)r.a.x), dmin = f16_to_f32((ushort)(r.a.x >> 16));
        const uint at = (s & 3) * 8;
        const uint u = r.a.y >> at & 0xffff, v = r.a.z >> at & 0xffff, w = r.a.w >> at & 0xffff;
        // Scales and minima of both sub-blocks, a byte each.
        const uint sc = s < 4 ? u & 0x3f3f : (w & 0x0f0f) | (u >> 2 & 0x3030);
        const uint m = s < 4 ? v & 0x3f3f : (w >> 4 & 0x0f0f) | (v >> 2 & 0x3030);
        const float dot0 = (float)dot16(low, x.a), dot1 = (float)dot16(high, x.b);
        const float sum = d * ((float)(sc & 255) * dot0 * x.scales[0] + (float)(sc >> 8) * dot1 * x.scales[1]);
        const float less = dmin * ((float)(m & 255) * x.sums[0] + (float)(m >> 8) * x.sums[1]);
        return p % 2 == 0 ? sum - less : sum;
    }
    if (D == Q6_K) {
        const int dots[4] = {dot16(six_bits(and4(r.a, 0x0f0f0f0fu), r.c), x.a),
                             dot16(six_bits(and4(r.b, 0x0f0f0f0fu), shift4(r.c, 2)), x.b),
                             dot16(six_bits(and4(shift4(r.a, 4), 0x0f0f0f0fu), shift4(r.c, 4)), x.c),
                             dot16(six_bits(and4(shift4(r.b, 4), 0x0f0f0f0fu), shift4(r.c, 6)), x.d)};
        float sum = 0.0f;
#pragma unroll
        for (uint k = 0; k < 4; ++k) sum += (float)(signed char)(r.bytes >> (8 * k)) * (float)dots[k] * x.scales[k];
        return r.scale * sum;
    }
    if (D == Q8_0) return r.scale * (float)(dot16(r.a, x.a) + dot16(r.b, x.b)) * x.scales[0];
    const float d = x.scales[0], total = x.sums[0];
    if (D == AFFINE) {
        const Word4 low = and4(r.a, 0x0f0f0f0fu), high = and4(shift4(r.a, 4), 0x0f0f0f0fu);
        const Word4 even = {even_bytes(x.a.x, x.a.y), even_bytes(x.a.z, x.a.w), even_bytes(x.b.x, x.b.y),
                            even_bytes(x.b.z, x.b.w)};
        const Word4 odd = {odd_bytes(x.a.x, x.a.y), odd_bytes(x.a.z, x.a.w), odd_bytes(x.b.x, x.b.y),
                           odd_bytes(x.b.z, x.b.w)};
        return r.scale * d * (float)(dot16(low, even) + dot16(high, odd)) + r.bias * total;
    }
    // Unsigned bytes less 128.
    const int dot = dot16(flipped(r.a), x.a) + dot16(flipped(r.b), x.b);
    return r.scale * (d * (float)dot + 128.0f * total) + r.bias * total;
}

// Rows that a warp multiplies at once, and a lane's shares of their products.
template <uint N> struct Rows {
    Row row[N];
};
template <uint N> struct Sums {
    float v[N];
};

// One piece after the other: for products whose many groups hide the reads of each.
template <uint D, uint N, class X> DEVICE Sums<N> lane_dots(CTX, const Format f, const Rows<N> rows, const X x) {
    const uint pieces = pieces_of<D>(f);
    Sums<N> sums;
#pragma unroll
    for (uint n = 0; n < N; ++n) sums.v[n] = 0.0f;
#pragma unroll 2
    for (uint p = ctx.lane(); p < pieces; p += 32) {
        const Chunk k = chunk_of<D>(x, p);
#pragma unroll
        for (uint n = 0; n < N; ++n) sums.v[n] += piece_dot<D>(raw_of<D>(f, rows.row[n], p), k, p);
    }
    return sums;
}

// The same with two pieces of every row under way at once: for few groups.
template <uint D, uint N, class X> DEVICE Sums<N> lane_dots_ahead(CTX, const Format f, const Rows<N> rows, const X x) {
    const uint pieces = pieces_of<D>(f);
    Sums<N> sums;
#pragma unroll
    for (uint n = 0; n < N; ++n) sums.v[n] = 0.0f;
    for (uint p = ctx.lane(); p < pieces; p += 64) {
        // Beyond the end, the first one again.
        const bool inside = p + 32 < pieces;
        const uint next = inside ? p + 32 : p;
        Raw first[N], second[N];
#pragma unroll
        for (uint n = 0; n < N; ++n) {
            first[n] = raw_of<D>(f, rows.row[n], p);
            second[n] = raw_of<D>(f, rows.row[n], next);
        }
        const Chunk a = chunk_of<D>(x, p), b = chunk_of<D>(x, next);
#pragma unroll
        for (uint n = 0; n < N; ++n) {
            const float one = piece_dot<D>(first[n], a, p), other = piece_dot<D>(second[n], b, next);
            sums.v[n] += inside ? one + other : one;
        }
    }
    return sums;
}

DEVICE float halved(CTX, const Sums<1> sums, uint mask) {
    float sum = sums.v[0];
    for (; mask > 0; mask /= 2) sum += lane_xor(ctx, sum, mask);
    return sum;
}

// Every lane keeps half of the values, and gets the other lane's share of them.
template <uint N> DEVICE float halved(CTX, const Sums<N> sums, uint mask) {
    const bool upper = ctx.lane() & mask;
    Sums<N / 2> kept;
#pragma unroll
    for (uint i = 0; i < N / 2; ++i) {
        const float given = upper ? sums.v[i] : sums.v[i + N / 2];
        kept.v[i] = (upper ? sums.v[i + N / 2] : sums.v[i]) + lane_xor(ctx, given, mask);
    }
    return halved(ctx, kept, mask / 2);
}

// Sums over `team` lanes, a power of two, of N values, a power of two, with fewer exchanges than N sums take one by one
// and the same bits. Lane (lane % team) has the sum of value `lane % team / (team / N)`.
template <uint N> DEVICE float team_sums(CTX, const Sums<N> sums, uint team) { return halved(ctx, sums, team / 2); }

// Asks for `bytes` bytes from p on.
DEVICE void warp_prefetch(CTX, GPTR(const uchar) p, uint bytes) {
    if (ctx.lane() == 0) prefetch(p, bytes);
}

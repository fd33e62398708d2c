// Pieces of rows of weights times activations of eight bits: what decoding spends its time on.
//
// Activations come in blocks of 32 columns: their bytes, and for each block its scale d and d · Σ q. A *piece* of a row
// is what a lane takes at once: 32 columns, of blocks of 256 columns but IQ4_XS' 64.
#pragma once
#include "weights.h"

// Activations in device memory, and in threadgroup memory.
struct Activations {
    GPTR(const uchar) bytes;
    GPTR(const float) scales;
};

// In threadgroup memory quads, sixteen columns, are not in order: lanes read quads of pieces side by side, which lie 32, 64
// or 128 bytes apart and would meet the same banks. Within eight quads, where quad q is depends on q / 8 alone.
struct LocalActivations {
    SPTR(const uint) words;
    SPTR(const float) scales;
};

DEVICE uint quad_at(uint quad) { return quad ^ ((quad >> 3 & 1) * 5 | (quad >> 3 & 2)); }
DEVICE uint word_at(uint word) { return quad_at(word / 4) * 4 + word % 4; }

DEVICE Word4 columns16(const Activations x, uint column) { return load_u32x4(x.bytes, column); }
DEVICE Word4 columns16(const LocalActivations x, uint column) {
    return load_u32x4(x.words, quad_at(column / 16) * 4);
}

// Scale and scaled sum of blocks b and b + 1; b is even.
DEVICE Float4 scales_of(const Activations x, uint b) {
    const Word4 w = load_u32x4(GCAST(const uchar, x.scales), 8 * b);
    Float4 r = {as_float(w.x), as_float(w.y), as_float(w.z), as_float(w.w)};
    return r;
}
DEVICE Float4 scales_of(const LocalActivations x, uint b) { return load_f32x4(x.scales, 2 * b); }

DEVICE int dot16(const Word4 a, const Word4 b) {
    return dot4(a.x, b.x, dot4(a.y, b.y, dot4(a.z, b.z, dot4(a.w, b.w, 0))));
}

// The same with a's bytes unsigned.
DEVICE int dot16_unsigned(const Word4 a, const Word4 b) {
    return dot4_unsigned(a.x, b.x, dot4_unsigned(a.y, b.y, dot4_unsigned(a.z, b.z, dot4_unsigned(a.w, b.w, 0))));
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

// Bytes of 0..8, less 4.
DEVICE uint less_4(uint q) { return (q + 0x7c7c7c7cu) ^ 0x80808080u; }

// Elements 0, 2, 4, 6 of the eight bytes a, b, or 1, 3, 5, 7.
DEVICE uint even_bytes(uint a, uint b) { return pick(a, b, 0x6420u); }
DEVICE uint odd_bytes(uint a, uint b) { return pick(a, b, 0x7531u); }
// The same from element `first` on, 0 or 1.
DEVICE uint every_other(uint a, uint b, uint first) { return first == 0 ? even_bytes(a, b) : odd_bytes(a, b); }

// Bytes of a and b by turns: the first two of each, or the last two.
DEVICE uint first_by_turns(uint a, uint b) { return pick(a, b, 0x5140u); }
DEVICE uint last_by_turns(uint a, uint b) { return pick(a, b, 0x7362u); }

// What an encoding needs of the blocks of a piece's activations: their scales and scaled sums, of Q2_K of sixteen columns each.
struct BlockScales {
    float scales[4], sums[4];
};

// The activations of a piece: sixteen columns each, and their blocks'.
struct Chunk {
    Word4 a, b, c, d;
    BlockScales of;
    // Of Q3_K: what whole numbers begin with, as codes are four more than values.
    int less[4];
};

// Whether pieces have 32 columns, so that a lane can have read several before it multiplies one.
template <uint D>
DEVICE constexpr bool small_pieces() {
    return D != Q2_K && D != Q3_K && D != Q4_K && D != Q5_K && D != Q6_K;
}

// Whether sixteen columns have a scale of their own, and a piece is sixteen columns of each quarter of half a block.
template <uint D>
DEVICE constexpr bool is_quartered() {
    return D == Q2_K || D == Q3_K || D == Q6_K;
}

// Whether a code of four bits names one of NON_LINEAR.
template <uint D>
DEVICE constexpr bool is_non_linear() {
    return D == IQ4_NL || D == IQ4_XS;
}

// Whether codes stand for several values of a codebook.
template <uint D>
DEVICE constexpr bool is_coded() {
    return D >= IQ2_XXS && D <= IQ1_M;
}

// Whether both halves of a piece of 32 columns have a scale of their own.
template <uint D>
DEVICE constexpr bool has_two_scales() {
    return D == NVFP4 || D == IQ2_XS || D == IQ2_S || D == IQ1_M;
}

// A whole number of less than 2²² as a float, from its sum with EXACT: exact, and cheaper than a conversion.
CONSTANT int EXACT = 0x4b400000;
DEVICE float exact_float(int v) { return as_float((uint)v) - 12582912.0f; }

template <uint D>
DEVICE uint pieces_of(const Format f) {
    return f.cols / (small_pieces<D>() ? 32 : 64);
}

// Whether pieces are so short that a lane can have read two of each of four rows, and two to four where a weight has many rows.
template <uint D>
DEVICE constexpr bool takes_two() {
    return D == AFFINE4 || D == NVFP4;
}
template <uint D>
DEVICE constexpr bool takes_several() {
    return D == AFFINE4;
}

// Whether a warp takes a row's pieces in three turns, of which a lane reads all three at once.
template <uint D>
DEVICE bool in_three_turns(uint pieces) {
    return small_pieces<D>() && pieces > 64 && pieces <= 96;
}

// What products make of a chunk before they multiply it by rows.
template <uint D>
DEVICE Chunk completed(Chunk k) {
    if (D == Q2_K || D == Q3_K) {
        const uint one = 0x01010101u;
        const Word4 ones = {one, one, one, one};
        const int sums[4] = {dot16(ones, k.a), dot16(ones, k.b), dot16(ones, k.c), dot16(ones, k.d)};
#pragma unroll
        for (uint i = 0; i < 4; ++i) {
            k.of.sums[i] = product_of(exact_float(sums[i] + EXACT), k.of.scales[i]);
            k.less[i] = -4 * sums[i];
        }
    } else if (D == AFFINE4) {
        // Columns of low nibbles, then of high ones.
        const Word4 low = k.a, high = k.b;
        k.a = {even_bytes(low.x, low.y), even_bytes(low.z, low.w), even_bytes(high.x, high.y), even_bytes(high.z, high.w)};
        k.b = {odd_bytes(low.x, low.y), odd_bytes(low.z, low.w), odd_bytes(high.x, high.y), odd_bytes(high.z, high.w)};
    } else if (D == MXFP4 || is_non_linear<D>()) {
        // In the order of nibbles.
        const Word4 low = k.a, high = k.b;
        k.a = {first_by_turns(low.x, high.x), last_by_turns(low.x, high.x), first_by_turns(low.y, high.y),
               last_by_turns(low.y, high.y)};
        k.b = {first_by_turns(low.z, high.z), last_by_turns(low.z, high.z), first_by_turns(low.w, high.w),
               last_by_turns(low.w, high.w)};
    }
    return k;
}

template <uint D, class X>
DEVICE Chunk chunk_of(const X x, uint p) {
    Chunk k;
    if (D == Q4_K || D == Q5_K) {
        // Two sub-blocks that follow each other.
        k.a = columns16(x, 64 * p);
        k.b = columns16(x, 64 * p + 16);
        k.c = columns16(x, 64 * p + 32);
        k.d = columns16(x, 64 * p + 48);
        const Float4 both = scales_of(x, 2 * p);
        k.of.scales[0] = both.x;
        k.of.sums[0] = both.y;
        k.of.scales[1] = both.z;
        k.of.sums[1] = both.w;
    } else if (is_quartered<D>()) {
        const uint first = p / 2 * 4, column = first * 32 + 16 * (p % 2);
        k.a = columns16(x, column);
        k.b = columns16(x, column + 32);
        k.c = columns16(x, column + 64);
        k.d = columns16(x, column + 96);
        const Float4 low = scales_of(x, first), high = scales_of(x, first + 2);
        k.of.scales[0] = low.x;
        k.of.scales[1] = low.z;
        k.of.scales[2] = high.x;
        k.of.scales[3] = high.z;
    } else {
        k.a = columns16(x, 32 * p);
        k.b = columns16(x, 32 * p + 16);
        k.of.scales[0] = x.scales[2 * p];
        k.of.sums[0] = x.scales[2 * p + 1];
    }
    return completed<D>(k);
}

// Bits of a nibble in the lowest bit of a byte each.
DEVICE uint spread_bits(uint nibble) { return nibble * 0x00204081u & 0x01010101u; }

// Sixteen nibbles, a byte each, with fifth bits: the lowest ones of `high`.
DEVICE Word4 with_fifths(const Word4 nibbles, uint high) {
    Word4 r = {nibbles.x | spread_bits(high & 15) << 4, nibbles.y | spread_bits(high >> 4 & 15) << 4,
               nibbles.z | spread_bits(high >> 8 & 15) << 4, nibbles.w | spread_bits(high >> 12 & 15) << 4};
    return r;
}

// Of a matrix in NVFP4.
DEVICE StoredScales stored_factor(uint kind, const Row row) {
    const StoredScales s = {load_u32(row.plane2, 0), 0, 0, kind};
    return s;
}
DEVICE float factor_of(const StoredScales s) { return nvfp4_factor(s.kind, s.scale); }

// What is read of a row for a piece. Reading is apart from multiplying, so that many reads are under way at once.
struct Raw {
    Word4 a, b, c, d, e;
    // Four scales, a byte each.
    uint bytes;
    float scale, bias;
    // Of encodings whose format says how scales are stored: that, and scales as they are.
    StoredScales stored;
};

// Twice the magnitudes of four-bit floats (E2M1), a byte each.
CONSTANT uint DOUBLED_LOW = 0x03020100u, DOUBLED_HIGH = 0x0c080604u;

// Sums of products with positive four-bit floats, and with the magnitudes of negative ones.
struct SignedSums {
    int plus, minus;
};

// Adds twice the four-bit floats of a word times the columns a and b, in the order of nibbles.
DEVICE SignedSums add_e2m1(uint w, uint a, uint b, const SignedSums sums) {
    const uint n = w ^ 0x88888888u;
    SignedSums r;
    r.plus = dot4(pick_positive(DOUBLED_LOW, DOUBLED_HIGH, w), a, sums.plus);
    r.plus = dot4(pick_positive(DOUBLED_LOW, DOUBLED_HIGH, w >> 16), b, r.plus);
    r.minus = dot4(pick_positive(DOUBLED_LOW, DOUBLED_HIGH, n), a, sums.minus);
    r.minus = dot4(pick_positive(DOUBLED_LOW, DOUBLED_HIGH, n >> 16), b, r.minus);
    return r;
}

// The same of two words times sixteen columns.
DEVICE SignedSums add_e2m1(uint v, uint w, const Word4 x, const SignedSums sums) {
    return add_e2m1(w, x.z, x.w, add_e2m1(v, x.x, x.y, sums));
}

// The values that the lowest four nibbles name, a byte each.
DEVICE uint non_linear(uint nibbles) {
    const uint negative = pick(0xbfad9881u, 0xf6eaddcfu, nibbles), positive = pick(0x26190d01u, 0x71594535u, nibbles);
    return pick(negative, positive, (nibbles >> 1 & 0x4444u) | 0x3210u);
}

// Adds the values of the codes of a word times the columns a and b, in the order of nibbles.
DEVICE int add_non_linear(uint w, uint a, uint b, int sum) {
    return dot4(non_linear(w >> 16), b, dot4(non_linear(w), a, sum));
}

// Eight values of a codebook, a signed byte each.
struct CodedBytes {
    uint low, high;
};

// Eight ranks of two bits, a nibble each.
DEVICE uint spread_ranks(uint ranks) {
    const uint bytes = (ranks | ranks << 8) & 0x00ff00ffu, nibbles = (bytes | bytes << 4) & 0x0f0f0f0fu;
    return (nibbles | nibbles << 2) & 0x33333333u;
}

// Bytes of 1..128, those negated whose bit says so.
DEVICE uint signed_bytes(uint magnitudes, uint signs) {
    const uint negative = spread_bits(signs & 15);
    return (magnitudes ^ negative * 255) + negative;
}

// Four magnitudes of IQ3's ranks, which have three bits.
template <uint D>
DEVICE uint four_of(uint ranks) {
    const uint nibbles = (ranks & 7) | (ranks & 0x38) << 1 | (ranks & 0x1c0) << 2 | (ranks & 0xe00) << 3;
    return D == IQ3_S ? pick(0x07050301u, 0x0f0d0b09u, nibbles) : pick(0x1c140c04u, 0x3e342c24u, nibbles);
}

// Values 8i..8i + 8 of a piece. Those of IQ1 are eight times as large, with what they are shifted by.
template <uint D>
DEVICE CodedBytes coded_bytes(const Raw r, uint i) {
    const uint code = r.a.x >> (8 * i) & 255;
    uint signs = 0;
    CodedBytes e;
    if (D == IQ1_S || D == IQ1_M) {
        const uint of = D == IQ1_S ? (r.a.y >> (3 * i) & 7) | (r.a.y >> 12 & 8) : r.a.y >> (4 * i) & 15;
        const uint nibbles = spread_ranks(CODEBOOKS[IQ1_BOOK + (code | (of & 7) << 8)]);
        const uint values = of & 8 ? 0x0007fff7u : 0x000901f9u;
        e.low = pick(values, 0, nibbles);
        e.high = pick(values, 0, nibbles >> 16);
        return e;
    }
    if (D == IQ3_XXS || D == IQ3_S) {
        const uint two = (i < 2 ? r.a.x : r.a.y) >> (16 * (i % 2));
        uint first = two & 255, second = two >> 8 & 255;
        if (D == IQ3_XXS) {
            signs = even_signs(r.a.z >> (7 * i));
            first += IQ3_XXS_BOOK;
            second += IQ3_XXS_BOOK;
        } else {
            const uint high = r.bytes >> (2 * i);
            signs = r.a.z >> (8 * i);
            first += IQ3_S_BOOK + (high & 1) * 256;
            second += IQ3_S_BOOK + (high >> 1 & 1) * 256;
        }
        e.low = four_of<D>(CODEBOOKS[first]);
        e.high = four_of<D>(CODEBOOKS[second]);
    } else {
        uint entry = 0;
        if (D == IQ2_XXS) {
            entry = IQ2_XXS_BOOK + code;
            signs = even_signs(r.a.y >> (7 * i));
        } else if (D == IQ2_XS) {
            const uint word = (i < 2 ? r.a.x : r.a.y) >> (16 * (i % 2));
            entry = IQ2_XS_BOOK + (word & 511);
            signs = even_signs(word >> 9);
        } else {
            entry = IQ2_S_BOOK + (code | (r.a.z >> (2 * i) & 3) << 8);
            signs = r.a.y >> (8 * i);
        }
        const uint nibbles = spread_ranks(CODEBOOKS[entry]);
        e.low = pick(0x002b1908u, 0, nibbles);
        e.high = pick(0x002b1908u, 0, nibbles >> 16);
    }
    e.low = signed_bytes(e.low, signs);
    e.high = signed_bytes(e.high, signs >> 4);
    return e;
}

// Adds values 8i..8i + 8 of a piece times their columns.
template <uint D>
DEVICE int add_coded(const Raw r, uint i, uint x, uint y, int sum) {
    const CodedBytes e = coded_bytes<D>(r, i);
    return dot4(e.high, y, dot4(e.low, x, sum));
}

// Codes of two bits, those `shift` bits on.
DEVICE Word4 two_bits(const Word4 a, uint shift) { return and4(shift4(a, shift), 0x03030303u); }
// The same with third bits: bits `bit` of each byte of `high`.
DEVICE Word4 three_bits(const Word4 a, const Word4 high, uint shift, uint bit) {
    const Word4 low = two_bits(a, shift), h = and4(shift4(high, bit), 0x01010101u);
    Word4 r = {low.x | h.x << 2, low.y | h.y << 2, low.z | h.z << 2, low.w | h.w << 2};
    return r;
}

// Six-bit values: low nibbles with bits 0 and 1 of each byte of `high`, less 32.
DEVICE Word4 six_bits(const Word4 low, const Word4 high) {
    const Word4 h = and4(high, 0x03030303u);
    Word4 r = {less_32(low.x | h.x << 4), less_32(low.y | h.y << 4), less_32(low.z | h.z << 4),
               less_32(low.w | h.w << 4)};
    return r;
}

// Scales of sixteen columns of each quarter of half `n` of a block of Q3_K, six bits each, from the two bytes before them, whatever
// they are, and themselves.
DEVICE uint q3_scales(const Word4 w, uint n, uint part) {
    const uint first = w.x >> 16 | w.y << 16, second = w.y >> 16 | w.z << 16, third = w.z >> 16 | w.w << 16;
    const uint low = every_other(first, second, part) >> (4 * n) & 0x0f0f0f0fu;
    // Bytes `part` and `part` + 2: bits 4n.. of both, then bits 4n + 2...
    const uint two = every_other(third, third >> 2, part) >> (4 * n) & 0x03030303u;
    return low | two << 4;
}

// The scale of columns 32i..32i + 32 of a block of IQ4_XS.
DEVICE float iq4_xs_scale(GPTR(const uchar) b, uint i) {
    const uint head = load_u32(b, 0), scale = (load_u32(b, 4) >> (4 * i) & 15) | (head >> (16 + 2 * i) & 3) << 4;
    return product_of(f16_to_f32((ushort)head), (float)((int)scale - 32));
}

// Four bytes from an even address on.
DEVICE uint load_two_u16(GPTR(const uchar) p, uint offset) { return load_u16(p, offset) | load_u16(p, offset + 2) << 16; }

// Columns 32i..32i + 32 of a block of 256 of an encoding with a codebook: codes, signs and bits of codes, and what odd whole numbers
// are multiplied by, or the only scale.
template <uint D>
DEVICE Raw coded_raw(GPTR(const uchar) b, uint i) {
    Raw r;
    const uint at = 2 + (D == IQ1_S || D == IQ2_S ? 4 : 8) * i;
    if (D == IQ1_M) {
        uint bits = 0;
        for (uint k = 0; k < 4; ++k) bits |= load_u16(b, 48 + 2 * k) >> 12 << (4 * k);
        r.scale = 0.125f * f16_to_f32((ushort)bits);
        r.a.x = load_two_u16(b, 4 * i);
        r.a.y = load_u16(b, 32 + 2 * i);
        r.bytes = load_u16(b, 48 + i / 2 * 2) >> (6 * (i % 2)) & 63;
        return r;
    }
    const float d = half_at(b, 0);
    r.a.x = load_two_u16(b, at);
    if (D == IQ1_S) {
        r.a.y = load_u16(b, 34 + 2 * i);
        r.scale = 0.125f * d * (float)(2 * (r.a.y >> 12 & 7) + 1);
        return r;
    }
    if (D != IQ2_S) r.a.y = load_two_u16(b, at + 4);
    if (D == IQ2_XXS) {
        r.scale = 0.125f * d * (float)(2 * (r.a.y >> 28) + 1);
    } else if (D == IQ2_XS) {
        r.scale = 0.125f * d;
        r.bytes = b[66 + i];
    } else if (D == IQ2_S) {
        r.a.y = load_two_u16(b, 34 + 4 * i);
        r.a.z = b[66 + i];
        r.scale = 0.125f * d;
        r.bytes = b[74 + i];
    } else if (D == IQ3_XXS) {
        r.a.z = load_two_u16(b, 66 + 4 * i);
        r.scale = 0.25f * d * (float)(2 * (r.a.z >> 28) + 1);
    } else {
        r.a.z = load_two_u16(b, 74 + 4 * i);
        r.bytes = b[66 + i];
        r.scale = d * (float)(2 * (b[106 + i / 2] >> (i % 2 * 4) & 15) + 1);
    }
    return r;
}

template <uint D>
DEVICE Raw raw_of(const Format f, const Row row, uint p) {
    Raw r;
    if (D == Q4_K || D == Q5_K) {
        const uint head = D == Q4_K ? 16 : 48;
        const GPTR(const uchar) b = row.plane0 + (ulong)(p / 4) * (head + 128);
        const GPTR(const uchar) nibbles = b + (head + 32 * (p % 4));
        r.a = load_u32x4(b, 0);
        r.b = load_u32x4(nibbles, 0);
        r.c = load_u32x4(nibbles, 16);
        if (D == Q5_K) {
            r.d = load_u32x4(b, 16);
            r.e = load_u32x4(b, 32);
        }
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
    } else if (D == Q2_K) {
        const GPTR(const uchar) b = row.plane0 + (ulong)(p / 4) * 84;
        const uint n = p % 4 / 2, part = p % 2;
        r.a = load_loose(b, 16 + 32 * n + 16 * part);
        r.bytes = every_other(load_u32(b, 8 * n), load_u32(b, 8 * n + 4), part);
        r.scale = half_at(b, 80);
        r.bias = half_at(b, 82);
    } else if (D == Q3_K) {
        // Blocks of 110 bytes.
        const GPTR(const uchar) b = row.plane0 + (ulong)(p / 4) * 110;
        const uint n = p % 4 / 2, part = p % 2;
        r.a = load_loose(b, 32 + 32 * n + 16 * part);
        r.b = load_loose(b, 16 * part);
        r.bytes = q3_scales(load_loose(b, 94), n, part);
        r.scale = half_at(b, 108);
    } else if (D == IQ4_XS) {
        const GPTR(const uchar) b = row.plane0 + (ulong)(p / 8) * 136;
        r.a = load_loose(b, 8 + 16 * (p % 8));
        r.scale = iq4_xs_scale(b, p % 8);
    } else if (D == IQ4_NL) {
        const GPTR(const uchar) b = row.plane0 + (ulong)p * 18;
        r.a = load_loose(b, 2);
        r.scale = half_at(b, 0);
    } else if (is_coded<D>()) {
        r = coded_raw<D>(row.plane0 + (ulong)(p / 8) * code_block(D), p % 8);
    } else if (D == Q8_0) {
        const GPTR(const uchar) b = row.plane0 + (ulong)p * 34;
        r.a = load_loose(b, 2);
        r.b = load_loose(b, 18);
        r.scale = half_at(b, 0);
    } else if (D == Q4_0 || D == Q5_0) {
        const uint head = D == Q4_0 ? 2 : 6;
        const GPTR(const uchar) b = row.plane0 + (ulong)p * (head + 16);
        r.a = load_loose(b, head);
        if (D == Q5_0) r.bytes = load_u16(b, 2) | load_u16(b, 4) << 16;
        r.scale = half_at(b, 0);
    } else if (D == MXFP4) {
        const GPTR(const uchar) b = row.plane0 + (ulong)p * 17;
        r.a = load_any(b, 1);
        r.scale = 0.5f * e8m0(b[0]);
    } else if (D == MXFP4_PLANES) {
        r.a = load_u32x4(row.plane0, 16 * p);
        r.scale = 0.5f * e8m0(row.plane1[p]);
    } else if (D == NVFP4) {
        r.a = load_u32x4(row.plane0, 16 * p);
        r.bytes = load_u16(row.plane1, 2 * p);
        r.stored = stored_factor(f.kind, row);
    } else {
        // Affine of 4 bits or 8.
        r.stored = stored_scales(f.kind, row, group_of_piece(f.kind, p));
        r.a = load_u32x4(row.plane0, (D == AFFINE4 ? 16 : 32) * p);
        if (D != AFFINE4) r.b = load_u32x4(row.plane0, 32 * p + 16);
    }
    return r;
}

DEVICE Word4 flipped(const Word4 a) {
    Word4 r = {a.x ^ 0x80808080u, a.y ^ 0x80808080u, a.z ^ 0x80808080u, a.w ^ 0x80808080u};
    return r;
}

// Products of a piece in whole numbers: of each run of columns with a scale of its own.
struct PieceDots {
    int v[4];
};

template <uint D>
DEVICE PieceDots piece_dots(const Raw r, const Chunk x, uint p) {
    PieceDots dots = {{0, 0, 0, 0}};
    if (D == Q4_K || D == Q5_K) {
        // 32 bytes: sub-blocks s (low nibbles) and s + 1 (high ones).
        const uint s = p % 4 * 2;
        Word4 low0 = and4(r.b, 0x0f0f0f0fu), low1 = and4(r.c, 0x0f0f0f0fu);
        if (D == Q5_K) {
            low0 = fifth_bits(low0, r.d, s);
            low1 = fifth_bits(low1, r.e, s);
            dots.v[1] = dot16(fifth_bits(and4(shift4(r.b, 4), 0x0f0f0f0fu), r.d, s + 1), x.c)
                      + dot16(fifth_bits(and4(shift4(r.c, 4), 0x0f0f0f0fu), r.e, s + 1), x.d);
        } else {
            // Sixteen times as much, where the nibbles are.
            dots.v[1] =
                (dot16_unsigned(and4(r.b, 0xf0f0f0f0u), x.c) + dot16_unsigned(and4(r.c, 0xf0f0f0f0u), x.d)) >> 4;
        }
        dots.v[0] = dot16(low0, x.a) + dot16(low1, x.b);
    } else if (D == Q6_K) {
        dots.v[0] = dot16(six_bits(and4(r.a, 0x0f0f0f0fu), r.c), x.a);
        dots.v[1] = dot16(six_bits(and4(r.b, 0x0f0f0f0fu), shift4(r.c, 2)), x.b);
        dots.v[2] = dot16(six_bits(and4(shift4(r.a, 4), 0x0f0f0f0fu), shift4(r.c, 4)), x.c);
        dots.v[3] = dot16(six_bits(and4(shift4(r.b, 4), 0x0f0f0f0fu), shift4(r.c, 6)), x.d);
    } else if (D == Q2_K) {
        dots.v[0] = dot16(two_bits(r.a, 0), x.a);
        dots.v[1] = dot16(two_bits(r.a, 2), x.b);
        dots.v[2] = dot16(two_bits(r.a, 4), x.c);
        dots.v[3] = dot16(two_bits(r.a, 6), x.d);
    } else if (D == Q3_K) {
        const uint bit = p % 4 / 2 * 4;
        dots.v[0] = x.less[0] + dot16(three_bits(r.a, r.b, 0, bit), x.a);
        dots.v[1] = x.less[1] + dot16(three_bits(r.a, r.b, 2, bit + 1), x.b);
        dots.v[2] = x.less[2] + dot16(three_bits(r.a, r.b, 4, bit + 2), x.c);
        dots.v[3] = x.less[3] + dot16(three_bits(r.a, r.b, 6, bit + 3), x.d);
    } else if (is_non_linear<D>()) {
        const int first = add_non_linear(r.a.y, x.a.z, x.a.w, add_non_linear(r.a.x, x.a.x, x.a.y, 0));
        dots.v[0] = add_non_linear(r.a.w, x.b.z, x.b.w, add_non_linear(r.a.z, x.b.x, x.b.y, first));
    } else if (is_coded<D>()) {
        const int first = add_coded<D>(r, 1, x.a.z, x.a.w, add_coded<D>(r, 0, x.a.x, x.a.y, 0));
        const int second = add_coded<D>(r, 3, x.b.z, x.b.w,
                                        add_coded<D>(r, 2, x.b.x, x.b.y, has_two_scales<D>() ? 0 : first));
        dots.v[0] = has_two_scales<D>() ? first : second;
        dots.v[1] = second;
    } else if (D == Q8_0) {
        dots.v[0] = dot16(r.a, x.a) + dot16(r.b, x.b);
    } else if (D == Q4_0) {
        // The high nibbles sixteen times as much, where they are.
        const int high = dot16_unsigned(and4(r.a, 0xf0f0f0f0u), x.b) >> 4;
        dots.v[0] = dot16(and4(r.a, 0x0f0f0f0fu), x.a) + high;
    } else if (D == Q5_0) {
        const Word4 low = with_fifths(and4(r.a, 0x0f0f0f0fu), r.bytes);
        const Word4 high = with_fifths(and4(shift4(r.a, 4), 0x0f0f0f0fu), r.bytes >> 16);
        dots.v[0] = dot16(low, x.a) + dot16(high, x.b);
    } else if (D == MXFP4 || D == MXFP4_PLANES || D == NVFP4) {
        const SignedSums none = {0, 0}, first = add_e2m1(r.a.x, r.a.y, x.a, none);
        const SignedSums second = add_e2m1(r.a.z, r.a.w, x.b, D == NVFP4 ? none : first);
        dots.v[0] = D == NVFP4 ? first.plus - first.minus : second.plus - second.minus;
        if (D == NVFP4) dots.v[1] = second.plus - second.minus;
    } else if (D == AFFINE4) {
        // The high nibbles sixteen times as much, where they are.
        const int high = dot16_unsigned(and4(r.a, 0xf0f0f0f0u), x.b) >> 4;
        dots.v[0] = dot16(and4(r.a, 0x0f0f0f0fu), x.a) + high;
    } else {
        // Unsigned bytes less 128.
        dots.v[0] = dot16(flipped(r.a), x.a) + dot16(flipped(r.b), x.b);
    }
    return dots;
}

// A byte as a float, 2²³ more and as it is; and times `scale`, which has no more than sixteen bits, so that nothing is rounded:
// `far` is -2²³ · scale.
DEVICE float far_byte(uint v) { return as_float(0x4b000000u | v); }
DEVICE float byte_float(uint v) { return far_byte(v) - 8388608.0f; }
DEVICE float scaled_byte(uint v, float scale, float far) { return fma_of(far_byte(v), scale, far); }

// Two floats of eight bits (E4M3).
struct E4m3Pair {
    float first, second;
};
DEVICE E4m3Pair e4m3_pair(uint codes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint two;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(two) : "h"((ushort)codes));
    const E4m3Pair r = {f16_to_f32((ushort)two), f16_to_f32((ushort)(two >> 16))};
#else
    const E4m3Pair r = {e4m3(codes & 255), e4m3(codes >> 8)};
#endif
    return r;
}

// What the whole numbers of a piece are multiplied by, and what the scaled sums of its activations: the same for all tokens.
struct PieceScales {
    float of[4], less[4];
};

// Of Raw only what scales it is read.
template <uint D>
DEVICE PieceScales piece_scales(const Raw r, uint p) {
    PieceScales k = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
    if (D == Q4_K || D == Q5_K) {
        const uint s = p % 4 * 2;
        const float d = f16_to_f32((ushort)r.a.x), dmin = f16_to_f32((ushort)(r.a.x >> 16));
        const uint at = (s & 3) * 8;
        const uint u = r.a.y >> at & 0xffff, v = r.a.z >> at & 0xffff, w = r.a.w >> at & 0xffff;
        // Scales and minima of both sub-blocks, a byte each.
        const uint sc = s < 4 ? u & 0x3f3f : (w & 0x0f0f) | (u >> 2 & 0x3030);
        const uint m = s < 4 ? v & 0x3f3f : (w >> 4 & 0x0f0f) | (v >> 2 & 0x3030);
        const float far = -8388608.0f * d, far_min = -8388608.0f * dmin;
        k.of[0] = scaled_byte(sc & 255, d, far);
        k.of[1] = scaled_byte(sc >> 8, d, far);
        k.less[0] = scaled_byte(m & 255, dmin, far_min);
        k.less[1] = scaled_byte(m >> 8, dmin, far_min);
    } else if (D == Q6_K) {
#pragma unroll
        for (uint i = 0; i < 4; ++i)
            k.of[i] = product_of(r.scale, far_byte((r.bytes >> (8 * i) & 255) ^ 128) - 8388736.0f);
    } else if (D == Q2_K) {
        const float far = -8388608.0f * r.scale, far_min = -8388608.0f * r.bias;
#pragma unroll
        for (uint i = 0; i < 4; ++i) {
            k.of[i] = scaled_byte(r.bytes >> (8 * i) & 15, r.scale, far);
            k.less[i] = scaled_byte(r.bytes >> (8 * i + 4) & 15, r.bias, far_min);
        }
    } else if (D == Q3_K) {
#pragma unroll
        for (uint i = 0; i < 4; ++i)
            k.of[i] = product_of(r.scale, far_byte(r.bytes >> (8 * i) & 255) - 8388640.0f);
    } else if (D == NVFP4) {
        const E4m3Pair two = e4m3_pair(r.bytes);
        const float half_factor = 0.5f * factor_of(r.stored);
        k.of[0] = product_of(half_factor, two.first);
        k.of[1] = product_of(half_factor, two.second);
    } else if (D == IQ2_XS || D == IQ2_S || D == IQ1_M) {
        const uint bits = D == IQ1_M ? 3 : 4, mask = (1u << bits) - 1;
        k.of[0] = product_of(r.scale, (float)(2 * (r.bytes & mask) + 1));
        k.of[1] = product_of(r.scale, (float)(2 * (r.bytes >> bits) + 1));
    } else if (D == AFFINE4 || D == AFFINE8) {
        const float scale = scale_of(r.stored), bias = bias_of(r.stored, scale);
        k.of[0] = scale;
        // Bytes are less 128.
        k.less[0] = D == AFFINE4 ? -bias : -fma_of(128.0f, scale, bias);
    } else {
        k.of[0] = r.scale;
        if (D == Q4_0) k.less[0] = product_of(8.0f, r.scale);
        if (D == Q5_0) k.less[0] = product_of(16.0f, r.scale);
    }
    return k;
}

// The product of a piece from its whole numbers + EXACT. Every rounding is written out, so that all kernels that multiply a
// piece give the same bits.
template <uint D>
DEVICE float scaled_dots(const PieceScales k, const BlockScales x, const PieceDots dots) {
    const float first = product_of(exact_float(dots.v[0]), x.scales[0]);
    if (D == Q4_K || D == Q5_K) {
        const float less = fma_of(k.less[0], x.sums[0], product_of(k.less[1], x.sums[1]));
        const float second = fma_of(k.of[1], product_of(exact_float(dots.v[1]), x.scales[1]), -less);
        return fma_of(k.of[0], first, second);
    }
    float sum = product_of(k.of[0], first);
    if (D == Q2_K) {
        float less = product_of(k.less[0], x.sums[0]);
#pragma unroll
        for (uint i = 1; i < 4; ++i) less = fma_of(k.less[i], x.sums[i], less);
        sum = fma_of(k.of[0], first, -less);
    }
    if (is_quartered<D>()) {
#pragma unroll
        for (uint i = 1; i < 4; ++i) sum = fma_of(k.of[i], product_of(exact_float(dots.v[i]), x.scales[i]), sum);
    }
    // Of the same block of activations.
    if (has_two_scales<D>()) return fma_of(k.of[1], product_of(exact_float(dots.v[1]), x.scales[0]), sum);
    if (D == Q4_0 || D == Q5_0 || D == AFFINE4 || D == AFFINE8) return fma_of(-k.less[0], x.sums[0], sum);
    return sum;
}

// Product of piece p of a row.
template <uint D>
DEVICE float piece_dot(const Raw r, const Chunk x, uint p) {
    PieceDots dots = piece_dots<D>(r, x, p);
#pragma unroll
    for (uint i = 0; i < 4; ++i) dots.v[i] += EXACT;
    return scaled_dots<D>(piece_scales<D>(r, p), x.of, dots);
}

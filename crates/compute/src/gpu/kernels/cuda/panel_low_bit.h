// `panel_columns.h` for k-quants of two and three bits and for codes of four bits that are looked up or have no minimum.
#pragma once
#include "panel_planes.h"

// Four columns of a token as a word of four has them: 0 and 2, 1 and 3.
DEVICE void in_order_of_bytes(u32 (&to)[2], const uint2& v) {
    to[0] = __byte_perm(v.x, v.y, 0x5410), to[1] = __byte_perm(v.x, v.y, 0x7632);
}

// Adds the products of N eights of tokens with 16 columns, scaled; `from` is what they begin with.
template <u32 N, class X, class From>
DEVICE void add_sixteen(Sums<N>& sums, const u32 (&a)[4], const float (&s)[2], const X& x, u32 block, u32 half,
                        From from) {
#pragma unroll
    for (u32 n = 0; n < N; n++) {
        const float2 z = from(n);
        const float begin[4] = {z.x, z.y, z.x, z.y};
        float r[4];
        mma_16816(r, a, x.b[n][block][half], begin);
#pragma unroll
        for (u32 i = 0; i < 4; i++) sums.v[n][i] += s[i / 2] * r[i];
    }
}

// Adds the sums of rows g and g + 8, `low` and `high` times.
template <u32 N>
DEVICE void add_rows(Sums<N>& sums, const Sums<N>& own, float low, float high) {
#pragma unroll
    for (u32 n = 0; n < N; n++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) sums.v[n][i] += (i < 2 ? low : high) * own.v[n][i];
}

// 4^-j as two f16: activations of columns whose codes are 4^j times too large are multiplied by it.
DEVICE u32 quarters(u32 j) { return 0x3c003c00 - j * 0x08000800; }
// Activations of half a block, 4^-j times.
template <class X>
DEVICE void enter_scaled(X& x, u32 n, u32 block, u32 half, const uint2& v, u32 j) {
    u32(&to)[2] = x.b[n][block][half];
    in_order_of_bytes(to, v);
    if (j != 0) to[0] = h2_mul(to[0], quarters(j)), to[1] = h2_mul(to[1], quarters(j));
}

template <>
struct Columns256<Q2_K> {
    // Blocks of 16 columns: 32 of a word's two bits, then 32 of the next ones.
    static const u32 PLANES = 1, BYTES = 84, SUMS = 0, APART = 1;
    static const bool LOOSE = false;
    template <u32 PARTS>
    struct X {
        // (part, 32 columns, half, register of b)
        u32 b[PARTS][8][2][2];
        // Negated sums of blocks 2t, 2t + 1 and 2t + 8, 2t + 9.
        u32 less[PARTS][2];
    };
    template <class X, class Load, class Half>
    static DEVICE void enter(X& x, u32 n, float*, Load, Half half_of, const Format&) {
        const u32 t = threadIdx.x & 3;
#pragma unroll
        for (u32 block = 0; block < 8; block++) {
            float sums[2];
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const uint2 v = half_of(8 * block + 4 * half + t);
                enter_scaled(x, n, block, half, v, block % 4);
                sums[half] = sum_of_quad(sum_of_4(v));
            }
            if (block % 4 == t) x.less[n][block / 4] = h2_of(-sums[0], -sums[1]);
        }
    }
    // Minima of blocks 2t and 2t + 1 of the eight whose scales are at `scales`, as whole numbers.
    static DEVICE u32 minima(const u8* scales) {
        const u32 two = *(const u16*)(scales + 2 * (threadIdx.x & 3));
        return (two >> 4 & 0x000f) | (two << 4 & 0x000f0000);
    }
    template <u32 N, class X>
    static DEVICE void multiply(Sums<N>& sums, const u8* low, const u8* high, const X& x, const float*, u32,
                                const Beside&) {
        const u32 t = threadIdx.x & 3;
        Sums<N> own = {};
#pragma unroll
        for (u32 eight = 0; eight < 2; eight++) {
            u32 scales[2][2];
#pragma unroll
            for (u32 w = 0; w < 2; w++) {
                scales[0][w] = *(const u32*)(low + 8 * eight + 4 * w) & 0x0f0f0f0f;
                scales[1][w] = *(const u32*)(high + 8 * eight + 4 * w) & 0x0f0f0f0f;
            }
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const u32 at = 16 + 32 * eight + 16 * half + 4 * t;
                const u32 l = *(const u32*)(low + at), h = *(const u32*)(high + at), l8 = l >> 8, h8 = h >> 8;
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    const u32 mask = 0x00030003 << (2 * j), block = 2 * j + half;
                    const u32 a[4] = {l & mask, h & mask, l8 & mask, h8 & mask};
                    const float s[2] = {unsigned_byte(scales[0][block / 4], block % 4),
                                        unsigned_byte(scales[1][block / 4], block % 4)};
                    add_sixteen<N>(own, a, s, x, 4 * eight + j, half, [](u32) { return make_float2(0.0f, 0.0f); });
                }
            }
        }
        const u32 a[4] = {minima(low), minima(high), minima(low + 8), minima(high + 8)};
        const u32 d[2] = {*(const u32*)(low + 80), *(const u32*)(high + 80)};
        const float none[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (u32 n = 0; n < N; n++) {
            float less[4];
            mma_16816(less, a, x.less[n], none);
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                sums.v[n][i] += TWO_24 * (f32_of_f16(d[i / 2]) * own.v[n][i] + f32_of_f16(d[i / 2] >> 16) * less[i]);
        }
    }
};

template <>
struct Columns256<Q3_K> {
    // (part, block of 16 columns, token): sums times −4 · 2^-24, in the order of columns.
    static const u32 PLANES = 1, BYTES = 110, SUMS = 16 * 8 * 4, APART = 1;
    static const bool LOOSE = false;
    template <u32 PARTS>
    using X = BlocksOfX<PARTS>;
    // Codes are so many times four too large.
    static DEVICE u32 fours(u32 j) { return j < 2 ? j : 2; }
    template <class X, class Load, class Half>
    static DEVICE void enter(X& x, u32 n, float* sums, Load, Half half_of, const Format&) {
        const u32 t = threadIdx.x & 3, g = threadIdx.x >> 2 & 7;
#pragma unroll
        for (u32 block = 0; block < 8; block++)
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const uint2 v = half_of(8 * block + 4 * half + t);
                enter_scaled(x, n, block, half, v, fours(block % 4));
                const float sum = sum_of_quad(sum_of_4(v));
                if (t == 0) sums[(n * 16 + 2 * block + half) * 8 + g] = sum * (-4.0f / TWO_24);
            }
    }
    // Four codes of two bits with their third one, which is bit i of a byte.
    static DEVICE u32 codes(u32 two, u32 thirds, u32 i) {
        const u32 j = i % 4, to = 2 * fours(j) + 2;
        return chosen_bits(0x01010101 << to, to >= i ? thirds << (to - i) : thirds >> (i - to),
                           j == 3 ? two >> 2 : two);
    }
    // Scales of blocks 4i to 4i + 4, as signed bytes.
    static DEVICE u32 scales_of(const u32 (&words)[3], u32 i) {
        const u32 low = (i < 2 ? words[i % 2] : words[i % 2] >> 4) & 0x0f0f0f0f;
        const u32 two = (i < 2 ? words[2] << (4 - 2 * i) : words[2] >> (2 * i - 4)) & 0x30303030;
        return ((low | two) + 0x60606060) ^ 0x80808080;
    }
    template <u32 N, class X>
    static DEVICE void multiply(Sums<N>& sums, const u8* low, const u8* high, const X& x, const float* less, u32,
                                const Beside&) {
        const u32 t = threadIdx.x & 3;
        const EvenRow row(low);
        auto words_of = [&](u32(&to)[2], u32 at) {
            to[0] = even_word(low - row.beside + at, row.selector),
            to[1] = even_word(high - row.beside + at, row.selector);
        };
        u32 scales[2][3], thirds[2][2];
#pragma unroll
        for (u32 w = 0; w < 3; w++) {
            u32 both[2];
            words_of(both, 96 + 4 * w);
            scales[0][w] = both[0], scales[1][w] = both[1];
        }
        words_of(thirds[0], 4 * t), words_of(thirds[1], 16 + 4 * t);
        Sums<N> own = {};
#pragma unroll
        for (u32 eight = 0; eight < 2; eight++) {
            u32 s_low[2], s_high[2];
#pragma unroll
            for (u32 w = 0; w < 2; w++)
                s_low[w] = scales_of(scales[0], 2 * eight + w), s_high[w] = scales_of(scales[1], 2 * eight + w);
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                u32 twos[2];
                words_of(twos, 32 + 32 * eight + 16 * half + 4 * t);
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    const u32 mask = 0x00070007 << (2 * fours(j)), block = 2 * j + half;
                    const u32 l = codes(twos[0], thirds[half][0], 4 * eight + j),
                              h = codes(twos[1], thirds[half][1], 4 * eight + j);
                    const u32 a[4] = {l & mask, h & mask, l >> 8 & mask, h >> 8 & mask};
                    const float s[2] = {signed_byte(s_low[block / 4], block % 4),
                                        signed_byte(s_high[block / 4], block % 4)};
                    add_sixteen<N>(own, a, s, x, 4 * eight + j, half,
                                   [&](u32 n) { return ((const float2*)less)[(n * 16 + 8 * eight + block) * 4 + t]; });
                }
            }
        }
        add_rows(sums, own, f32_of_f16(*(const u16*)(low + 108)) * TWO_24,
                 f32_of_f16(*(const u16*)(high + 108)) * TWO_24);
    }
};

// Blocks of 32 columns in codes of four bits, low ones of 16 columns and high ones of the next: `Codes` makes whole numbers of them,
// from which `Codes::LESS` is subtracted.
template <class Codes>
struct ColumnsOfHalves {
    // (part, block, token): sums times −LESS · 2^-24.
    static const u32 PLANES = 1, SUMS = 8 * 8 * 4, APART = 1;
    template <u32 PARTS>
    using X = BlocksOfX<PARTS>;
    template <class X, class Load, class Half>
    static DEVICE void enter(X& x, u32 n, float* sums, Load, Half half_of, const Format&) {
        const u32 t = threadIdx.x & 3, g = threadIdx.x >> 2 & 7;
#pragma unroll
        for (u32 block = 0; block < 8; block++) {
            float sum = 0.0f;
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const uint2 v = half_of(8 * block + 4 * half + t);
                Codes::enter(x.b[n][block][half], v, half);
                sum += sum_of_4(v);
            }
            sum = sum_of_quad(sum);
            if (t == 0) sums[(n * 8 + block) * 8 + g] = sum * (-Codes::LESS / TWO_24);
        }
    }
    // Adds the products with block k, of whose codes a lane has `low` and `high`.
    template <u32 N, class X>
    static DEVICE void add_block(Sums<N>& sums, u32 low, u32 high, const float (&s)[2], const X& x, const float* less,
                                 u32 k) {
        const typename Codes::Numbers l(low), h(high);
        const u32 a[2][4] = {{l.v[0], h.v[0], l.v[1], h.v[1]}, {l.v[2], h.v[2], l.v[3], h.v[3]}};
#pragma unroll
        for (u32 n = 0; n < N; n++) {
            const float2 z = ((const float2*)less)[(n * 8 + k) * 4 + (threadIdx.x & 3)];
            const float from[4] = {z.x, z.y, z.x, z.y};
            float r[4];
            mma_16816(r, a[0], x.b[n][k][0], from);
            mma_16816(r, a[1], x.b[n][k][1], r);
#pragma unroll
            for (u32 i = 0; i < 4; i++) sums.v[n][i] += s[i / 2] * r[i];
        }
    }
};

// The values of `IQ4_NL` and `IQ4_XS`, 128 more. Byte i of a word has the code of column i in its low bits, that of column 16 + i in its
// high ones: looked up by four bits one after the other, these values lie side by side.
struct LookedUp {
    static constexpr float LESS = 128.0f;
    static DEVICE void enter(u32 (&to)[2], const uint2& v, u32) { to[0] = v.x, to[1] = v.y; }
    struct Numbers {
        // Of low codes 0 and 1, 2 and 3, then of high ones.
        u32 v[4];
        DEVICE explicit Numbers(u32 w) {
            const u32 of_eight = w & 0x77777777, which = (w >> 1 & 0x44444444) | 0x32103210;
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const u32 first = __byte_perm(0x3f2d1801, 0x766a5d4f, of_eight >> (16 * i));
                const u32 last = __byte_perm(0xa6998d81, 0xf1d9c5b5, of_eight >> (16 * i));
                const u32 four = __byte_perm(first, last, which >> (16 * i));
                v[i] = four & 0x00ff00ff, v[2 + i] = __byte_perm(four, 0, 0x4341);
            }
        }
    };
};

// The values of `Q4_0`, 8 more; high ones are 16 times too large.
struct Nibbles {
    static constexpr float LESS = 8.0f;
    static DEVICE void enter(u32 (&to)[2], const uint2& v, u32 high) {
        in_order_of_bytes(to, v);
        if (high) to[0] = h2_mul(to[0], SIXTEENTH), to[1] = h2_mul(to[1], SIXTEENTH);
    }
    struct Numbers {
        // Of low codes 0 and 2, 1 and 3, then of high ones.
        u32 v[4];
        DEVICE explicit Numbers(u32 w) {
            v[0] = w & 0x000f000f, v[1] = w >> 8 & 0x000f000f, v[2] = w & 0x00f000f0, v[3] = w >> 8 & 0x00f000f0;
        }
    };
};

template <>
struct Columns256<IQ4_XS> : ColumnsOfHalves<LookedUp> {
    static const u32 BYTES = 136;
    static const bool LOOSE = false;
    // Scales of blocks 0, 2, 4 and 6, and of the others, as signed bytes.
    struct Scales {
        u32 even, odd;
        DEVICE explicit Scales(const u8* block) {
            const uint2 header = *(const uint2*)block;
            u32 top = header.x >> 16;
            top = (top | top << 8) & 0x00ff00ff, top = (top | top << 4) & 0x0f0f0f0f;
            even = (((header.y & 0x0f0f0f0f) | (top << 4 & 0x30303030)) + 0x60606060) ^ 0x80808080;
            odd = (((header.y >> 4 & 0x0f0f0f0f) | (top << 2 & 0x30303030)) + 0x60606060) ^ 0x80808080;
        }
        DEVICE float of(u32 k) const { return signed_byte(k % 2 ? odd : even, k / 2); }
    };
    template <u32 N, class X>
    static DEVICE void multiply(Sums<N>& sums, const u8* low, const u8* high, const X& x, const float* less, u32,
                                const Beside&) {
        const Scales of_low(low), of_high(high);
        Sums<N> own = {};
#pragma unroll
        for (u32 k = 0; k < 8; k++) {
            const u32 at = 8 + 16 * k + 4 * (threadIdx.x & 3);
            const float s[2] = {of_low.of(k), of_high.of(k)};
            add_block<N>(own, *(const u32*)(low + at), *(const u32*)(high + at), s, x, less, k);
        }
        add_rows(sums, own, f32_of_f16(*(const u16*)low) * TWO_24, f32_of_f16(*(const u16*)high) * TWO_24);
    }
};

// Blocks of 18 bytes, of which the scale is the first two.
template <class Codes>
struct ColumnsOfScaledHalves : ColumnsOfHalves<Codes> {
    static const u32 BYTES = 8 * 18;
    static const bool LOOSE = true;
    template <u32 N, class X>
    static DEVICE void multiply(Sums<N>& sums, const u8* low, const u8* high, const X& x, const float* less, u32 blocks,
                                const Beside&) {
        // Rows g and g + 8 begin equally far from a word.
        const Loose loose(low);
        Sums<N> own = {};
        for_blocks(blocks, [&](u32 k) {
            const float s[2] = {f32_of_f16(*(const u16*)(low + 18 * k)), f32_of_f16(*(const u16*)(high + 18 * k))};
            ColumnsOfHalves<Codes>::template add_block<N>(own, loose.word(low, 18 * k + 2),
                                                          loose.word(high, 18 * k + 2), s, x, less, k);
        });
        add_all(sums, own, TWO_24);
    }
};

template <>
struct Columns256<IQ4_NL> : ColumnsOfScaledHalves<LookedUp> {};
template <>
struct Columns256<Q4_0> : ColumnsOfScaledHalves<Nibbles> {};

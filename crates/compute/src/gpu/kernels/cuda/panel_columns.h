// 256 columns of experts' weights as they lie in shared memory, multiplied by activations in registers, for every encoding whose experts
// pass through it (`expert_panels.cu`).
//
// Integers enter products as they are: small ones are f16 without conversion (the bits of n are n · 2^-24), and sums of a block of
// columns are scaled in f32.
#pragma once
#include "matrices.h"
#include "panel_instructions.h"

const float TWO_24 = 16777216.0f;
const u32 SIXTEENTH = 0x2c002c00;

DEVICE float sum_of_4(const uint2& v) {
    return (f32_of_f16(v.x) + f32_of_f16(v.x >> 16)) + (f32_of_f16(v.y) + f32_of_f16(v.y >> 16));
}
DEVICE float sum_of_quad(float v) {
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}
// Sums of a panel and N eights of tokens: rows g and g + 8, g = lane / 4, of tokens 2t and 2t + 1, t = lane % 4, of each eight.
template <u32 N>
struct Sums {
    float v[N][4];
};

// 256 columns of weights in shared memory and of activations in registers. Columns c, c + 2 and c + 1, c + 3 of a word's four
// stand side by side, so that a mask makes two f16 of it.
//
// `enter` brings the activations of eight tokens: `load(e)` gives eight columns from 8e on as f16 of the token g, `half_of(e)` four
// from 4e on, and `sums` is memory of the warp's. `multiply` adds products with the rows g and g + 8 of a panel, of which the warp has
// `blocks` blocks of 32 columns. Encodings with several planes are in `panel_planes.h`.
template <int dtype>
struct Columns256;

// A panel's further planes in shared memory, and what a warp multiplies of them, from a column on: its row `row`, and `row + apart`
// `next` bytes further.
struct Beside {
    const Format& format;
    const u8* planes[2];
    u32 row, apart, next, column;
    // Where plane p has the first row or the second.
    DEVICE const u8* at(u32 p, u32 second) const {
        return planes[p - 1] + second * next + (row + second * apart) * format.strides[p];
    }
};

// Of Q4_K, and of Q5_K with fifth bits: `HEAD` bytes come before nibbles.
template <bool has_fifths>
struct ColumnsOfNibbles {
    static const u32 HEAD = has_fifths ? 48 : 16;
    // Planes of the encoding, bytes of 256 columns in the first one, and of a warp's `sums` of eight tokens.
    static const u32 PLANES = 1, BYTES = HEAD + 128, SUMS = 0;
    // Whether rows may have other columns than multiples of 256, and experts biases.
    static const bool LOOSE = false;
    // Within a piece of a panel, how many rows those of g and g + 1 are apart.
    static const u32 APART = 2;
    template <u32 PARTS>
    struct X {
        // (part, 64 columns, low or high nibbles, word, register of b); those of high nibbles, which are 16 times too large, a 16th.
        u32 b[PARTS][4][2][2][2];
        // Negated sums of blocks 2t and 2t + 1.
        u32 less[PARTS];
    };
    template <class X, class Load, class Half>
    static DEVICE void enter(X& x, u32 n, float*, Load load, Half, const Format&) {
        const u32 t = threadIdx.x & 3;
        float sums[8];
#pragma unroll
        for (u32 block = 0; block < 8; block++) {
            const u32 j = block / 2, high = block % 2;
            const uint4 all = load(4 * block + t);
            const uint2 v[2] = {make_uint2(all.x, all.y), make_uint2(all.z, all.w)};
#pragma unroll
            for (u32 w = 0; w < 2; w++) {
                const u32 first = __byte_perm(v[w].x, v[w].y, 0x5410), second = __byte_perm(v[w].x, v[w].y, 0x7632);
                x.b[n][j][high][w][0] = high ? h2_mul(first, SIXTEENTH) : first;
                x.b[n][j][high][w][1] = high ? h2_mul(second, SIXTEENTH) : second;
            }
            sums[block] = sum_of_quad(sum_of_4(v[0]) + sum_of_4(v[1]));
        }
        const float a = t & 2 ? (t & 1 ? sums[6] : sums[4]) : (t & 1 ? sums[2] : sums[0]);
        const float b = t & 2 ? (t & 1 ? sums[7] : sums[5]) : (t & 1 ? sums[3] : sums[1]);
        x.less[n] = h2_of(-a, -b);
    }
    // A row's scales: those of blocks 0..4 and 4..8.
    struct Scales {
        u32 first, last;
    };
    static DEVICE Scales scales_of(const uint4& header) {
        return {header.y & 0x3f3f3f3f, (header.w & 0x0f0f0f0f) | (header.y >> 2 & 0x30303030)};
    }
    template <u32 block>
    static DEVICE float scale(const Scales& s) { return unsigned_byte(block < 4 ? s.first : s.last, block % 4); }
    // Minima of blocks 2t and 2t + 1.
    static DEVICE u32 minima_of(const uint4& header, u32 t) {
        const u32 last = (header.w >> 4 & 0x0f0f0f0f) | (header.z >> 2 & 0x30303030);
        const u32 two = __byte_perm(t & 2 ? last : header.z & 0x3f3f3f3f, 0x64646464, t & 1 ? 0x4342 : 0x4140);
        return h2_mul(h2_sub(two, H1024), splat_high(header.x));
    }
    // Fifth bits of a row's bytes 8t..8t + 8 of all blocks: bit i of a byte is of block i.
    static DEVICE uint2 fifths_of(const u8* row) {
        return has_fifths ? *(const uint2*)(row + 16 + 8 * (threadIdx.x & 3)) : make_uint2(0, 0);
    }
    // Whole numbers of low nibbles, or sixteen times those of high ones, of block i.
    template <bool high, u32 i>
    static DEVICE u32 numbers(u32 nibbles, u32 fifths) {
        const u32 four = nibbles & (high ? 0x00f000f0 : 0x000f000f);
        if (!has_fifths) return four;
        constexpr u32 to = high ? 8 : 4;
        return chosen_bits(high ? 0x01000100 : 0x00100010, i < to ? fifths << (to - i) : fifths >> (i - to), four);
    }
    // Blocks 2j and 2j + 1 of N eights of tokens.
    template <u32 N, u32 j, class X>
    static DEVICE void add_blocks(Sums<N>& sums, const u8* low, const u8* high, const Scales& of_low, const Scales& of_high,
                                  const uint2& low_fifths, const uint2& high_fifths, const X& x) {
        const u32 at = HEAD + 32 * j + 8 * (threadIdx.x & 3);
        const uint2 l = *(const uint2*)(low + at), h = *(const uint2*)(high + at);
        u32 a[2][2][4];
#pragma unroll
        for (u32 w = 0; w < 2; w++) {
            const u32 own[2] = {w ? l.y : l.x, w ? h.y : h.x};
            const u32 fifths[2] = {w ? low_fifths.y : low_fifths.x, w ? high_fifths.y : high_fifths.x};
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 by = i / 2 * 8, of = fifths[i % 2] >> by, nibbles = own[i % 2] >> by;
                a[0][w][i] = numbers<false, 2 * j>(nibbles, of), a[1][w][i] = numbers<true, 2 * j + 1>(nibbles, of);
            }
        }
        const float s[2][2] = {{scale<2 * j>(of_low), scale<2 * j>(of_high)}, {scale<2 * j + 1>(of_low), scale<2 * j + 1>(of_high)}};
        const float none[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        float r[N][2][4];
#pragma unroll
        for (u32 n = 0; n < N; n++)
#pragma unroll
            for (u32 k = 0; k < 2; k++) {
                mma_16816(r[n][k], a[k][0], x.b[n][j][k][0], none);
                mma_16816(r[n][k], a[k][1], x.b[n][j][k][1], r[n][k]);
            }
#pragma unroll
        for (u32 n = 0; n < N; n++)
#pragma unroll
            for (u32 k = 0; k < 2; k++)
#pragma unroll
                for (u32 i = 0; i < 4; i++) sums.v[n][i] += s[k][i / 2] * r[n][k][i];
    }
    template <u32 N, class X>
    static DEVICE void multiply(Sums<N>& sums, const u8* low, const u8* high, const X& x, const float*, u32, const Beside&) {
        const u32 t = threadIdx.x & 3;
        const uint4 l = *(const uint4*)low, h = *(const uint4*)high;
        const Scales of_low = scales_of(l), of_high = scales_of(h);
        const uint2 fl = fifths_of(low), fh = fifths_of(high);
        Sums<N> own = {};
        add_blocks<N, 0>(own, low, high, of_low, of_high, fl, fh, x);
        add_blocks<N, 1>(own, low, high, of_low, of_high, fl, fh, x);
        add_blocks<N, 2>(own, low, high, of_low, of_high, fl, fh, x);
        add_blocks<N, 3>(own, low, high, of_low, of_high, fl, fh, x);
        const u32 minima[2] = {minima_of(l, t), minima_of(h, t)};
        const float d[2] = {f32_of_f16(l.x) * TWO_24, f32_of_f16(h.x) * TWO_24};
#pragma unroll
        for (u32 n = 0; n < N; n++) {
            mma_1688(sums.v[n], minima[0], minima[1], x.less[n]);
#pragma unroll
            for (u32 i = 0; i < 4; i++) sums.v[n][i] += d[i / 2] * own.v[n][i];
        }
    }
};

template <>
struct Columns256<Q4_K> : ColumnsOfNibbles<false> {};
template <>
struct Columns256<Q5_K> : ColumnsOfNibbles<true> {};

// How far behind a word a row begins that begins at an even address, and the selector of its words.
struct EvenRow {
    u32 beside, selector;
    DEVICE explicit EvenRow(const u8* row) : beside((u32)(u64)row & 2), selector(beside ? 0x5432 : 0x3210) {}
};

template <>
struct Columns256<Q6_K> {
    // (part, block of 16 columns, token): sums times −32 · 2^-24, in the order in which blocks are multiplied.
    static const u32 PLANES = 1, BYTES = 210, SUMS = 16 * 8 * 4;
    static const bool LOOSE = false;
    // Rows g and g + 8 of a panel are alike within a word.
    static const u32 APART = 1;
    template <u32 PARTS>
    struct X {
        // (part, half, 16 columns of each quarter of it, quarter, register of b)
        u32 b[PARTS][2][2][4][2];
    };
    template <class X, class Load, class Half>
    static DEVICE void enter(X& x, u32 n, float* sums, Load, Half half_of, const Format&) {
        const u32 t = threadIdx.x & 3, g = threadIdx.x >> 2 & 7;
#pragma unroll
        for (u32 i = 0; i < 16; i++) {
            const u32 half = i / 8, sixteen = i / 4 % 2, quarter = i % 4;
            const uint2 v = half_of(32 * half + 8 * quarter + 4 * sixteen + t);
            x.b[n][half][sixteen][quarter][0] = __byte_perm(v.x, v.y, 0x5410);
            x.b[n][half][sixteen][quarter][1] = __byte_perm(v.x, v.y, 0x7632);
            const float sum = sum_of_quad(sum_of_4(v));
            if (t == 0) sums[(n * 16 + i) * 8 + g] = sum * (-32.0f / TWO_24);
        }
    }
    // Integers of a quarter of half a block: `a`, `b` have the low bits of columns 0 and 32, `bits` the others.
    template <u32 quarter>
    static DEVICE u32 integers(u32 a, u32 b, u32 bits) {
        const u32 low = quarter % 2 ? b : a;
        const u32 top = quarter == 0 ? bits << 4 : quarter == 1 ? bits << 2 : quarter == 2 ? bits : bits >> 2;
        return chosen_bits(0x0f0f0f0f, quarter >= 2 ? low >> 4 : low, top);
    }
    template <u32 N, u32 half, u32 sixteen, u32 quarter, class X>
    static DEVICE void add_block(Sums<N>& sums, const u32 (&low)[3], const u32 (&high)[3], const u32 (&of_low)[2], const u32 (&of_high)[2],
                                 const X& x, const float* less) {
        const u32 l = integers<quarter>(low[0], low[1], low[2]), h = integers<quarter>(high[0], high[1], high[2]);
        const u32 a[4] = {l & 0x003f003f, h & 0x003f003f, l >> 8 & 0x003f003f, h >> 8 & 0x003f003f};
        const u32 block = 2 * quarter + sixteen;
        const float s[2] = {signed_byte(of_low[block / 4], block % 4), signed_byte(of_high[block / 4], block % 4)};
#pragma unroll
        for (u32 n = 0; n < N; n++) {
            const float2 z = ((const float2*)less)[(n * 16 + half * 8 + sixteen * 4 + quarter) * 4 + (threadIdx.x & 3)];
            const float from[4] = {z.x, z.y, z.x, z.y};
            float r[4];
            mma_16816(r, a, x.b[n][half][sixteen][quarter], from);
#pragma unroll
            for (u32 i = 0; i < 4; i++) sums.v[n][i] += s[i / 2] * r[i];
        }
    }
    template <u32 N, u32 half, class X>
    static DEVICE void add_half(Sums<N>& sums, const u8* low, const u8* high, u32 selector, const X& x, const float* less) {
        const u8 *of_l = low + 192 + 8 * half, *of_h = high + 192 + 8 * half;
        const u32 of_low[2] = {even_word(of_l, selector), even_word(of_l + 4, selector)};
        const u32 of_high[2] = {even_word(of_h, selector), even_word(of_h + 4, selector)};
        const u32 t = 4 * (threadIdx.x & 3);
#pragma unroll
        for (u32 sixteen = 0; sixteen < 2; sixteen++) {
            const u32 at = 64 * half + 16 * sixteen + t, bits = 128 + 32 * half + 16 * sixteen + t;
            const u32 l[3] = {even_word(low + at, selector), even_word(low + at + 32, selector), even_word(low + bits, selector)};
            const u32 h[3] = {even_word(high + at, selector), even_word(high + at + 32, selector), even_word(high + bits, selector)};
            if (sixteen == 0) {
                add_block<N, half, 0, 0>(sums, l, h, of_low, of_high, x, less);
                add_block<N, half, 0, 1>(sums, l, h, of_low, of_high, x, less);
                add_block<N, half, 0, 2>(sums, l, h, of_low, of_high, x, less);
                add_block<N, half, 0, 3>(sums, l, h, of_low, of_high, x, less);
            } else {
                add_block<N, half, 1, 0>(sums, l, h, of_low, of_high, x, less);
                add_block<N, half, 1, 1>(sums, l, h, of_low, of_high, x, less);
                add_block<N, half, 1, 2>(sums, l, h, of_low, of_high, x, less);
                add_block<N, half, 1, 3>(sums, l, h, of_low, of_high, x, less);
            }
        }
    }
    template <u32 N, class X>
    static DEVICE void multiply(Sums<N>& sums, const u8* low, const u8* high, const X& x, const float* less, u32, const Beside&) {
        const EvenRow row(low);
        Sums<N> own = {};
        add_half<N, 0>(own, low - row.beside, high - row.beside, row.selector, x, less);
        add_half<N, 1>(own, low - row.beside, high - row.beside, row.selector, x, less);
        const float d[2] = {f32_of_f16(*(const u16*)(low + 208)) * TWO_24, f32_of_f16(*(const u16*)(high + 208)) * TWO_24};
#pragma unroll
        for (u32 n = 0; n < N; n++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) sums.v[n][i] += d[i / 2] * own.v[n][i];
    }
};

// Where a warp's words of a row begin whose blocks are no multiple of four bytes. What is `c` bytes behind a word of the columns, and
// further by as much as the row itself begins behind one, lies in the words from `beside[c]` on, `by[c]` bits from the first's.
struct Loose {
    u32 beside[4], by[4];
    DEVICE explicit Loose(const u8* row) {
        const u32 apart = (u32)(u64)row & 3, t = 4 * (threadIdx.x & 3);
#pragma unroll
        for (u32 c = 0; c < 4; c++) beside[c] = (c + apart & 4) + t - apart, by[c] = 8 * (c + apart);
    }
    // A lane's four bytes of the sixteen that begin `begin` bytes behind `row`.
    DEVICE u32 word(const u8* row, u32 begin) const {
        const u32 c = begin & 3;
        const u32* const from = (const u32*)(row + (begin - c) + beside[c]);
        return __funnelshift_r(from[0], from[1], by[c]);
    }
};

// All of a warp's blocks of 32 columns by `add`: branches between them only where some are not there.
template <class Add>
DEVICE void for_blocks(u32 blocks, Add add) {
    if (blocks == 8) {
#pragma unroll
        for (u32 k = 0; k < 8; k++) add(k);
    } else {
#pragma unroll
        for (u32 k = 0; k < 7; k++) {
            if (k >= blocks) break;
            add(k);
        }
    }
}

template <>
struct Columns256<Q8_0> {
    // (part, block, token): sums times −128 · 2^-24.
    static const u32 PLANES = 1, BYTES = 8 * 34, SUMS = 8 * 8 * 4, APART = 1;
    static const bool LOOSE = true;
    template <u32 PARTS>
    struct X {
        // (part, block, half, register of b)
        u32 b[PARTS][8][2][2];
    };
    template <class X, class Load, class Half>
    static DEVICE void enter(X& x, u32 n, float* sums, Load, Half half_of, const Format&) {
        const u32 t = threadIdx.x & 3, g = threadIdx.x >> 2 & 7;
#pragma unroll
        for (u32 block = 0; block < 8; block++) {
            float sum = 0.0f;
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const uint2 v = half_of(8 * block + 4 * half + t);
                x.b[n][block][half][0] = __byte_perm(v.x, v.y, 0x5410);
                x.b[n][block][half][1] = __byte_perm(v.x, v.y, 0x7632);
                sum += sum_of_4(v);
            }
            sum = sum_of_quad(sum);
            if (t == 0) sums[(n * 8 + block) * 8 + g] = sum * (-128.0f / TWO_24);
        }
    }
    template <u32 N, class X>
    static DEVICE void multiply(Sums<N>& sums, const u8* low, const u8* high, const X& x, const float* less, u32 blocks,
                                const Beside&) {
        // Rows g and g + 8 begin equally far from a word.
        const Loose loose(low);
        Sums<N> own = {};
        for_blocks(blocks, [&](u32 k) {
            u32 a[2][4];
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                // 128 more, so that they are no less than 0.
                const u32 l = loose.word(low, 34 * k + 2 + 16 * half) ^ 0x80808080;
                const u32 h = loose.word(high, 34 * k + 2 + 16 * half) ^ 0x80808080;
                a[half][0] = l & 0x00ff00ff, a[half][1] = h & 0x00ff00ff;
                a[half][2] = l >> 8 & 0x00ff00ff, a[half][3] = h >> 8 & 0x00ff00ff;
            }
            const float s[2] = {f32_of_f16(*(const u16*)(low + 34 * k)), f32_of_f16(*(const u16*)(high + 34 * k))};
#pragma unroll
            for (u32 n = 0; n < N; n++) {
                const float2 z = ((const float2*)less)[(n * 8 + k) * 4 + (threadIdx.x & 3)];
                const float from[4] = {z.x, z.y, z.x, z.y};
                float r[4];
                mma_16816(r, a[0], x.b[n][k][0], from);
                mma_16816(r, a[1], x.b[n][k][1], r);
#pragma unroll
                for (u32 i = 0; i < 4; i++) own.v[n][i] += s[i / 2] * r[i];
            }
        });
#pragma unroll
        for (u32 n = 0; n < N; n++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) sums.v[n][i] += TWO_24 * own.v[n][i];
    }
};

template <>
struct Columns256<MXFP4> {
    static const u32 PLANES = 1, BYTES = 8 * 17, SUMS = 0, APART = 1;
    static const bool LOOSE = true;
    template <u32 PARTS>
    struct X {
        // (part, block, low or high nibbles, register of b)
        u32 b[PARTS][8][2][2];
    };
    template <class X, class Load, class Half>
    static DEVICE void enter(X& x, u32 n, float*, Load, Half half_of, const Format&) {
        const u32 t = threadIdx.x & 3;
#pragma unroll
        for (u32 i = 0; i < 16; i++) {
            const uint2 v = half_of(4 * i + t);
            x.b[n][i / 2][i % 2][0] = __byte_perm(v.x, v.y, 0x5410);
            x.b[n][i / 2][i % 2][1] = __byte_perm(v.x, v.y, 0x7632);
        }
    }
    // The four-bit floats of a word's low or high nibbles as f16 that are 2^14 times too small, of bytes 0 and 2, and of 1 and 3:
    // the first byte of such an f16 has all of its bits.
    struct Floats {
        u32 even, odd;
    };
    template <bool high>
    static DEVICE Floats floats(u32 w) {
        const u32 magnitudes = (high ? w >> 3 : w << 1) & 0x0e0e0e0e;
        const u32 bytes = chosen_bits(0x80808080, high ? w : w << 4, magnitudes);
        return {__byte_perm(bytes, 0, 0x2404), bytes & 0xff00ff00};
    }
    // The power of two of a block, which is infinite for what should be no number; the smallest is 0.
    static DEVICE float scale(const u8* p) { return __uint_as_float((u32)*p << 23); }
    template <u32 N, class X>
    static DEVICE void multiply(Sums<N>& sums, const u8* low, const u8* high, const X& x, const float*, u32 blocks, const Beside&) {
        // Rows g and g + 8 begin equally far from a word.
        const Loose loose(low);
        const float none[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        Sums<N> own = {};
        for_blocks(blocks, [&](u32 k) {
            const u32 l = loose.word(low, 17 * k + 1), h = loose.word(high, 17 * k + 1);
            const Floats of[2][2] = {{floats<false>(l), floats<false>(h)}, {floats<true>(l), floats<true>(h)}};
            u32 a[2][4];
#pragma unroll
            for (u32 i = 0; i < 2; i++)
                a[i][0] = of[i][0].even, a[i][1] = of[i][1].even, a[i][2] = of[i][0].odd, a[i][3] = of[i][1].odd;
            const float s[2] = {scale(low + 17 * k), scale(high + 17 * k)};
#pragma unroll
            for (u32 n = 0; n < N; n++) {
                float r[4];
                mma_16816(r, a[0], x.b[n][k][0], none);
                mma_16816(r, a[1], x.b[n][k][1], r);
#pragma unroll
                for (u32 i = 0; i < 4; i++) own.v[n][i] += s[i / 2] * r[i];
            }
        });
#pragma unroll
        for (u32 n = 0; n < N; n++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) sums.v[n][i] += 16384.0f * own.v[n][i];
    }
};

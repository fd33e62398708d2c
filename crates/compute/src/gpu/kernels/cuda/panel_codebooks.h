// `panel_columns.h` for encodings with codebooks, whose entries lie in shared memory.
#pragma once
#include "panel_low_bit.h"

// An encoding's codebook in shared memory, in words; nothing for those without.
template <int dtype>
struct Book {
    static DEVICE void fill() {}
};

// `entries` entries of `WORDS` words, each of which `make(entry, w)` makes.
template <u32 ENTRIES, u32 WORDS>
struct SharedBook {
    static DEVICE u32* words() {
        __shared__ __align__(8) u32 all[ENTRIES * WORDS];
        return all;
    }
    template <class Make>
    static DEVICE void fill_by(u32 first, Make make) {
        for (u32 i = threadIdx.x; i < ENTRIES * WORDS; i += blockDim.x)
            words()[i] = make(CODEBOOKS[first + i / WORDS], i % WORDS);
    }
};

// Four magnitudes of IQ2 by their ranks, of two bits each, as bytes.
DEVICE u32 iq2_bytes(u32 ranks) {
    return __byte_perm(0x002b1908, 0, (ranks & 0x03) | (ranks & 0x0c) << 2 | (ranks & 0x30) << 4 | (ranks & 0xc0) << 6);
}
template <u32 ENTRIES, u32 FIRST>
struct Iq2Book : SharedBook<ENTRIES, 2> {
    static DEVICE void fill() {
        SharedBook<ENTRIES, 2>::fill_by(FIRST, [](u32 entry, u32 w) { return iq2_bytes(entry >> (8 * w) & 255); });
    }
};
// Four magnitudes of IQ3, of `low` and `high` by three bits each.
template <u32 ENTRIES, u32 FIRST, u32 low, u32 high>
struct Iq3Book : SharedBook<ENTRIES, 1> {
    static DEVICE void fill() {
        SharedBook<ENTRIES, 1>::fill_by(FIRST, [](u32 e, u32) {
            return __byte_perm(low, high, (e & 7) | (e & 0x38) << 1 | (e & 0x1c0) << 2 | (e & 0xe00) << 3);
        });
    }
};
template <>
struct Book<IQ2_XXS> : Iq2Book<256, IQ2_XXS_BOOK> {};
template <>
struct Book<IQ2_XS> : Iq2Book<512, IQ2_XS_BOOK> {};
template <>
struct Book<IQ2_S> : Iq2Book<1024, IQ2_S_BOOK> {};
template <>
struct Book<IQ3_XXS> : Iq3Book<256, IQ3_XXS_BOOK, 0x1c140c04, 0x3e342c24> {};
template <>
struct Book<IQ3_S> : Iq3Book<512, IQ3_S_BOOK, 0x07050301, 0x0f0d0b09> {};

// Four magnitudes with their signs, the lowest bits, as f16: 0 and 2, 1 and 3.
DEVICE void signed_pairs(u32 (&to)[2], u32 bytes, u32 signs) {
    // Bits 0 and 2 where f16 have their signs, then 1 and 3.
    to[0] = (bytes & 0x00ff00ff) ^ (signs * 0x20008000u & 0x80008000);
    to[1] = (bytes >> 8 & 0x00ff00ff) ^ (signs * 0x10004000u & 0x80008000);
}

// What a lane has of a block of 32 columns: magnitudes of twice four columns, with their signs in the lowest bits, and scales.
struct BookLane {
    u32 bytes[2], signs[2];
    float scales[2];
};

// A lane has eight columns side by side where a block has one scale, else four of each half. `Block::lane(row, even, k, book)` is what it
// has of block k; the row's first two bytes are times `FACTOR` what scales are multiples of.
template <int dtype, class Block, bool by_halves>
struct ColumnsOfBook {
    static const u32 PLANES = 1, SUMS = 0, APART = 1;
    static const bool LOOSE = false;
    template <u32 PARTS>
    using X = BlocksOfX<PARTS>;
    template <class X, class Load, class Half>
    static DEVICE void enter(X& x, u32 n, float*, Load load, Half half_of, const Format&) {
        const u32 t = threadIdx.x & 3;
#pragma unroll
        for (u32 k = 0; k < 8; k++) {
            uint2 v[2];
            if (by_halves) {
                v[0] = half_of(8 * k + t), v[1] = half_of(8 * k + 4 + t);
            } else {
                const uint4 all = load(4 * k + t);
                v[0] = make_uint2(all.x, all.y), v[1] = make_uint2(all.z, all.w);
            }
            in_order_of_bytes(x.b[n][k][0], v[0]), in_order_of_bytes(x.b[n][k][1], v[1]);
        }
    }
    template <u32 N, class X>
    static DEVICE void multiply(Sums<N>& sums, const u8* low, const u8* high, const X& x, const float*, u32,
                                const Beside&) {
        // Behind the first two bytes.
        const EvenRow even(low + 2);
        const u32* const book = Book<dtype>::words();
        Sums<N> own = {};
#pragma unroll
        for (u32 k = 0; k < 8; k++) {
            const BookLane l = Block::lane(low, even, k, book), h = Block::lane(high, even, k, book);
            u32 a[2][4];
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                u32 of_low[2], of_high[2];
                signed_pairs(of_low, l.bytes[i], l.signs[i]), signed_pairs(of_high, h.bytes[i], h.signs[i]);
                a[i][0] = of_low[0], a[i][1] = of_high[0], a[i][2] = of_low[1], a[i][3] = of_high[1];
            }
            if (by_halves) {
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    const float s[2] = {l.scales[i], h.scales[i]};
                    add_sixteen<N>(own, a[i], s, x, k, i, [](u32) { return make_float2(0.0f, 0.0f); });
                }
            } else {
                const float s[2] = {l.scales[0], h.scales[0]};
                add_scaled<N>(own, a, s, x, k);
            }
        }
        add_rows(sums, own, f32_of_f16(*(const u16*)low) * Block::FACTOR,
                 f32_of_f16(*(const u16*)high) * Block::FACTOR);
    }
};

struct Iq2XxsBlock {
    static constexpr float FACTOR = 4194304.0f;
    static DEVICE BookLane lane(const u8* row, const EvenRow& even, u32 k, const u32* book) {
        const u32 t = threadIdx.x & 3, word = even_word(row + 2 - even.beside + 4 + 8 * k, even.selector);
        const uint2 entry = ((const uint2*)book)[row[2 + 8 * k + t]];
        const u32 signs = with_parity(word >> (7 * t));
        return {{entry.x, entry.y}, {signs, signs >> 4}, {0.5f + (float)(word >> 28)}};
    }
};
template <>
struct Columns256<IQ2_XXS> : ColumnsOfBook<IQ2_XXS, Iq2XxsBlock, false> {
    static const u32 BYTES = 66;
};

// Of IQ2 with two scales a lane has half of an entry for each half of a block.
DEVICE u32 half_of_entry(const u32* book, u32 code) { return book[2 * code + threadIdx.x % 2]; }
DEVICE float iq2_scale(u32 scales, u32 half) { return 0.5f + (float)(scales >> (4 * half) & 15); }

struct Iq2XsBlock {
    static constexpr float FACTOR = 4194304.0f;
    static DEVICE BookLane lane(const u8* row, const EvenRow&, u32 k, const u32* book) {
        const u32 t = threadIdx.x & 3, scales = row[66 + k];
        BookLane own;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 code = *(const u16*)(row + 2 + 8 * k + 4 * half + t / 2 * 2);
            own.bytes[half] = half_of_entry(book, code & 511);
            own.signs[half] = with_parity(code >> 9) >> (4 * (t % 2));
            own.scales[half] = iq2_scale(scales, half);
        }
        return own;
    }
};
template <>
struct Columns256<IQ2_XS> : ColumnsOfBook<IQ2_XS, Iq2XsBlock, true> {
    static const u32 BYTES = 74;
};

struct Iq2SBlock {
    static constexpr float FACTOR = 4194304.0f;
    static DEVICE BookLane lane(const u8* row, const EvenRow&, u32 k, const u32* book) {
        const u32 t = threadIdx.x & 3, top = row[66 + k], scales = row[74 + k];
        BookLane own;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 i = 2 * half + t / 2;
            own.bytes[half] = half_of_entry(book, row[2 + 4 * k + i] | (top >> (2 * i) & 3) << 8);
            own.signs[half] = row[34 + 4 * k + i] >> (4 * (t % 2));
            own.scales[half] = iq2_scale(scales, half);
        }
        return own;
    }
};
template <>
struct Columns256<IQ2_S> : ColumnsOfBook<IQ2_S, Iq2SBlock, true> {
    static const u32 BYTES = 82;
};

struct Iq3XxsBlock {
    static constexpr float FACTOR = 8388608.0f;
    static DEVICE BookLane lane(const u8* row, const EvenRow& even, u32 k, const u32* book) {
        const u32 t = threadIdx.x & 3, word = even_word(row + 2 - even.beside + 64 + 4 * k, even.selector);
        const u32 codes = *(const u16*)(row + 2 + 8 * k + 2 * t), signs = with_parity(word >> (7 * t));
        return {{book[codes & 255], book[codes >> 8]}, {signs, signs >> 4}, {0.5f + (float)(word >> 28)}};
    }
};
template <>
struct Columns256<IQ3_XXS> : ColumnsOfBook<IQ3_XXS, Iq3XxsBlock, false> {
    static const u32 BYTES = 98;
};

struct Iq3SBlock {
    static constexpr float FACTOR = 16777216.0f;
    static DEVICE BookLane lane(const u8* row, const EvenRow&, u32 k, const u32* book) {
        const u32 t = threadIdx.x & 3, codes = *(const u16*)(row + 2 + 8 * k + 2 * t), top = row[66 + k] >> (2 * t);
        const u32 signs = row[74 + 4 * k + t], scale = row[106 + k / 2] >> (k % 2 * 4) & 15;
        return {{book[(codes & 255) | (top & 1) << 8], book[codes >> 8 | (top & 2) << 7]},
                {signs, signs >> 4},
                {(float)(1 + 2 * scale)}};
    }
};
template <>
struct Columns256<IQ3_S> : ColumnsOfBook<IQ3_S, Iq3SBlock, false> {
    static const u32 BYTES = 110;
};

// Entries of IQ1: ranks of columns 0 to 4 in the lower half, of the others in the upper one.
struct Iq1Book : SharedBook<2048, 1> {
    static DEVICE void fill() {
        fill_by(IQ1_BOOK, [](u32 entry, u32) { return (entry & 255) | entry >> 8 << 16; });
    }
};
template <>
struct Book<IQ1_S> : Iq1Book {};
template <>
struct Book<IQ1_M> : Iq1Book {};
// What values of IQ1 are more than their ranks.
DEVICE float iq1_more(bool down) { return down ? -1.125f : -0.875f; }

template <>
struct Columns256<IQ1_S> {
    // (part, block, token): sums times 2^-24.
    static const u32 PLANES = 1, BYTES = 50, SUMS = 8 * 8 * 4, APART = 1;
    static const bool LOOSE = false;
    template <u32 PARTS>
    using X = BlocksOfX<PARTS>;
    template <class X, class Load, class Half>
    static DEVICE void enter(X& x, u32 n, float* sums, Load load, Half, const Format&) {
        const u32 t = threadIdx.x & 3, g = threadIdx.x >> 2 & 7;
#pragma unroll
        for (u32 k = 0; k < 8; k++) {
            const uint4 v = load(4 * k + t);
            u32(&to)[2][2] = x.b[n][k];
            in_order_of_nibbles(to, v);
            to[0][1] = h2_mul(to[0][1], quarters(1)), to[1][0] = h2_mul(to[1][0], quarters(2));
            to[1][1] = h2_mul(to[1][1], quarters(3));
            const float sum = sum_of_quad(sum_of_8(v));
            if (t == 0) sums[(n * 8 + k) * 8 + g] = sum * (1.0f / TWO_24);
        }
    }
    template <u32 N, class X>
    static DEVICE void multiply(Sums<N>& sums, const u8* low, const u8* high, const X& x, const float* all, u32,
                                const Beside&) {
        const u32 t = threadIdx.x & 3;
        const u32* const book = Book<IQ1_S>::words();
        Sums<N> own = {};
#pragma unroll
        for (u32 k = 0; k < 8; k++) {
            const u32 l = *(const u16*)(low + 34 + 2 * k), h = *(const u16*)(high + 34 + 2 * k);
            const u32 of_low = book[low[2 + 4 * k + t] | (l >> (3 * t) & 7) << 8];
            const u32 of_high = book[high[2 + 4 * k + t] | (h >> (3 * t) & 7) << 8];
            u32 a[2][4];
#pragma unroll
            for (u32 j = 0; j < 4; j++)
                a[j / 2][j % 2 * 2] = of_low & 0x00030003 << 2 * j,
                                 a[j / 2][j % 2 * 2 + 1] = of_high & 0x00030003 << 2 * j;
            const float s[2] = {(float)(2 * (l >> 12 & 7) + 1), (float)(2 * (h >> 12 & 7) + 1)};
            const float more[2] = {iq1_more(l >> 15), iq1_more(h >> 15)};
#pragma unroll
            for (u32 n = 0; n < N; n++) {
                const float2 z = ((const float2*)all)[(n * 8 + k) * 4 + t];
                const float from[4] = {more[0] * z.x, more[0] * z.y, more[1] * z.x, more[1] * z.y};
                float r[4];
                mma_16816(r, a[0], x.b[n][k][0], from);
                mma_16816(r, a[1], x.b[n][k][1], r);
#pragma unroll
                for (u32 i = 0; i < 4; i++) own.v[n][i] += s[i / 2] * r[i];
            }
        }
        add_rows(sums, own, f32_of_f16(*(const u16*)low) * TWO_24, f32_of_f16(*(const u16*)high) * TWO_24);
    }
};

template <>
struct Columns256<IQ1_M> {
    // (part, eight columns, token): sums times 2^-24.
    static const u32 PLANES = 1, BYTES = 56, SUMS = 32 * 8 * 4, APART = 1;
    static const bool LOOSE = false;
    template <u32 PARTS>
    using X = BlocksOfX<PARTS>;
    template <class X, class Load, class Half>
    static DEVICE void enter(X& x, u32 n, float* sums, Load, Half half_of, const Format&) {
        const u32 t = threadIdx.x & 3, g = threadIdx.x >> 2 & 7;
#pragma unroll
        for (u32 i = 0; i < 16; i++) {
            const uint2 v = half_of(4 * i + t);
            in_order_of_bytes(x.b[n][i / 2][i % 2], v);
            x.b[n][i / 2][i % 2][1] = h2_mul(x.b[n][i / 2][i % 2][1], quarters(1));
            float sum = sum_of_4(v);
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            if (t % 2 == 0) sums[(n * 32 + 2 * i + t / 2) * 8 + g] = sum * (1.0f / TWO_24);
        }
    }
    // A lane's ranks of half a block and both entries' nibbles: upper bits, and which way values are moved.
    struct Lane {
        u32 ranks, nibbles;
        DEVICE Lane(const u8* row, const u32* book, u32 k, u32 half) : nibbles(row[32 + 2 * k + half]) {
            const u32 t = threadIdx.x & 3, code = row[4 * k + 2 * half + t / 2] | (nibbles >> (t / 2 * 4) & 7) << 8;
            // Of columns 0 and 1 below, of 2 and 3 above.
            const u32 four = book[code] >> (t % 2 * 16) & 255;
            ranks = four | four << 12;
        }
    };
    static DEVICE float factor_of(const u32 (&scales)[4]) {
        return f32_of_f16(scales[0] >> 12 | scales[1] >> 12 << 4 | scales[2] >> 12 << 8 | scales[3] >> 12 << 12)
             * TWO_24;
    }
    template <u32 N, class X>
    static DEVICE void multiply(Sums<N>& sums, const u8* low, const u8* high, const X& x, const float* all, u32,
                                const Beside&) {
        const u32 t = threadIdx.x & 3;
        const u32* const book = Book<IQ1_M>::words();
        Sums<N> own = {};
        u32 of_low[4], of_high[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            of_low[i] = *(const u16*)(low + 48 + 2 * i), of_high[i] = *(const u16*)(high + 48 + 2 * i);
#pragma unroll
        for (u32 i = 0; i < 16; i++) {
            const Lane l(low, book, i / 2, i % 2), h(high, book, i / 2, i % 2);
            const u32 a[4] = {l.ranks & 0x00030003, h.ranks & 0x00030003, l.ranks & 0x000c000c, h.ranks & 0x000c000c};
            const u32 by = i % 4 * 3;
            const float s[2] = {(float)(2 * (of_low[i / 4] >> by & 7) + 1),
                                (float)(2 * (of_high[i / 4] >> by & 7) + 1)};
            const float first[2] = {iq1_more(l.nibbles & 8), iq1_more(h.nibbles & 8)};
            const float second[2] = {iq1_more(l.nibbles & 128), iq1_more(h.nibbles & 128)};
#pragma unroll
            for (u32 n = 0; n < N; n++) {
                const float2* const z = (const float2*)all + (n * 32 + 2 * i) * 4 + t;
                const float2 y = z[0], w = z[4];
                const float from[4] = {first[0] * y.x + second[0] * w.x, first[0] * y.y + second[0] * w.y,
                                       first[1] * y.x + second[1] * w.x, first[1] * y.y + second[1] * w.y};
                float r[4];
                mma_16816(r, a, x.b[n][i / 2][i % 2], from);
#pragma unroll
                for (u32 e = 0; e < 4; e++) own.v[n][e] += s[e / 2] * r[e];
            }
        }
        add_rows(sums, own, factor_of(of_low), factor_of(of_high));
    }
};

// Unpackers of ggml's encodings of one to three bits: the end of `unpack.h`.
#pragma once

typedef unsigned int uint;
typedef unsigned short ushort;
#define CONSTANT static __device__ constexpr
#include "../codebooks.h"

// Bytes of a super-block of 256 columns, and the 32 columns of it that a thread takes of a step.
DEVICE const u8* super_block(const RowAddress& row, u32 k, u32 bytes) { return row.plane[0] + (k / 256) * bytes; }
DEVICE u32 sub_block(u32 k, u32 h) { return (k % 256) / 32 + h; }

// Signs of eight values from seven bits: the eighth makes their number even.
DEVICE u32 with_parity(u32 bits) { return (bits & 127) | (__popc(bits & 127) & 1) << 7; }
// Signs 2j and 2j + 1 as those of two f16.
DEVICE u32 sign_pair(u32 signs, u32 j) { return (signs >> (2 * j) & 1) << 15 | (signs >> (2 * j) & 2) << 30; }

// Eight values of IQ2 by the ranks of an entry.
DEVICE void iq2_values(u32 (&out)[8], u32 at, u32 entry, u32 signs, u32 scale) {
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        const u32 ranks = entry >> (4 * j);
        // The value as the lower byte of what is 1024 more.
        const u32 value = __byte_perm(0x002b1908, 0x64646464, (ranks & 3) | (ranks & 12) << 6 | 0x4040);
        out[at + j] = h2_mul(h2_sub(value, H1024) ^ sign_pair(signs, j), scale);
    }
}

// Four values of IQ3 by the ranks of an entry, of `low` and `high`; their signs are the lowest.
DEVICE void iq3_values(u32 (&out)[8], u32 at, u32 low, u32 high, u32 entry, u32 signs, u32 scale) {
#pragma unroll
    for (u32 j = 0; j < 2; j++) {
        const u32 ranks = entry >> (6 * j);
        const u32 value = masked_1024<0x00ff00ff>(__byte_perm(low, high, (ranks & 7) | (ranks & 0x38) << 5));
        out[at + j] = h2_mul(h2_sub(value, H1024) ^ sign_pair(signs, j), scale);
    }
}

// Eight values of IQ1 by the ranks of an entry: −1, 0 or 1 and an eighth more or less.
DEVICE void iq1_values(u32 (&out)[8], u32 at, u32 entry, bool down, float factor) {
    const u32 scale = h2_splat(factor), less = h2_splat(factor * (down ? -1.125f : -0.875f));
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        const u32 ranks = entry >> (4 * j);
        out[at + j] = h2_fma(h2_sub((ranks & 3) | (ranks & 12) << 14 | H1024, H1024), scale, less);
    }
}

template <>
struct Encoding<Q2_K> {
    static const bool SPLIT = true;
    static const bool IS_LARGE = false;
    struct Raw {
        u32 qs[4];
        // Of both runs, a byte each: scale, then minimum.
        u32 scales, d;
    };
    static DEVICE void load(Raw& raw, const RowAddress& row, u32 k, u32 h, u32) {
        const u8* block = super_block(row, k, 84);
        const u8* scales = block + (k % 256) / 16 + h;
        load_unaligned(raw.qs, block + 16 + (k % 256) / 128 * 32 + 16 * h);
        raw.scales = __ldg(scales) | (u32)__ldg(scales + 2) << 8;
        raw.d = __ldg((const u32*)(block + 80));
    }
    static DEVICE void unpack(const Raw& raw, u32 k, u32, Columns& out) {
        const u32 shift = (k % 128) / 32 * 2;
        const u32 s = (raw.scales & 15) | (raw.scales & 0xf00) << 8 | H1024;
        const u32 m = (raw.scales >> 4 & 15) | (raw.scales >> 4 & 0xf00) << 8 | H1024;
        const u32 scale = h2_mul(h2_sub(s, H1024), splat_low(raw.d));
        const u32 min = h2_mul(h2_sub(m, H1024), splat_high(raw.d) ^ 0x80008000);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const u32 w = raw.qs[i / 2] >> shift, lanes = i & 1 ? bytes_23(w) : bytes_01(w);
            const u32 low = (lanes & 0x00030003) | H1024, high = (lanes >> 2 & 0x00030003) | H1024;
            out.a[i] = h2_fma(h2_sub(low, H1024), splat_low(scale), splat_low(min));
            out.b[i] = h2_fma(h2_sub(high, H1024), splat_high(scale), splat_high(min));
        }
    }
};

template <>
struct Encoding<Q3_K> {
    static const bool SPLIT = true;
    static const bool IS_LARGE = true;
    struct Raw {
        u32 qs[4], third[4];
        // Of both runs, a byte each, 32 more than they are.
        u32 scales, d;
    };
    static DEVICE void load(Raw& raw, const RowAddress& row, u32 k, u32 h, u32) {
        const u8* block = super_block(row, k, 110);
        const u32 within = k % 256, s = within / 16 + h;
        load_unaligned(raw.third, block + 16 * h);
        load_unaligned(raw.qs, block + 32 + within / 128 * 32 + 16 * h);
        auto scale = [&](u32 j) {
            const u32 low = __ldg(block + 96 + j % 8) >> (4 * (j / 8)) & 15;
            return low | (__ldg(block + 104 + j % 4) >> (2 * (j / 4)) & 3) << 4;
        };
        raw.scales = scale(s) | scale(s + 2) << 8;
        raw.d = load_u16(block + 108);
    }
    static DEVICE void unpack(const Raw& raw, u32 k, u32, Columns& out) {
        const u32 shift = (k % 128) / 32 * 2, bit = (k % 256) / 32;
        const u32 s = (raw.scales & 63) | (raw.scales & 0x3f00) << 8 | H1024;
        const u32 scale = h2_mul(h2_sub(s, 0x64206420 /* 1056 */), splat_low(raw.d));
        const u32 a_scale = splat_low(scale), b_scale = splat_high(scale);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 q = raw.qs[i] >> shift, third = raw.third[i] >> bit;
            const u32 a = (q & 0x03030303) | (third & 0x01010101) << 2;
            const u32 b = (q >> 2 & 0x03030303) | (third << 1 & 0x04040404);
            out.a[2 * i] = h2_mul(h2_sub(high_1024_01(a), 0x64046404 /* 1028 */), a_scale);
            out.a[2 * i + 1] = h2_mul(h2_sub(high_1024_23(a), 0x64046404), a_scale);
            out.b[2 * i] = h2_mul(h2_sub(high_1024_01(b), 0x64046404), b_scale);
            out.b[2 * i + 1] = h2_mul(h2_sub(high_1024_23(b), 0x64046404), b_scale);
        }
    }
};

template <>
struct Encoding<IQ2_XXS> {
    static const bool SPLIT = false;
    static const bool IS_LARGE = false;
    struct Raw {
        // Four codes, then signs and the scale.
        u32 words[2], d;
    };
    static DEVICE void load(Raw& raw, const RowAddress& row, u32 k, u32 h, u32) {
        const u8* block = super_block(row, k, 66);
        load_unaligned(raw.words, block + 2 + 8 * sub_block(k, h));
        raw.d = load_u16(block);
    }
    static DEVICE void unpack(const Raw& raw, u32, u32, Columns& out) {
        const u32 scale = h2_splat(f32_of_f16(raw.d) * (0.5f + (float)(raw.words[1] >> 28)) * 0.25f);
#pragma unroll
        for (u32 n = 0; n < 4; n++) {
            const u32 entry = CODEBOOKS[IQ2_XXS_BOOK + (raw.words[0] >> (8 * n) & 255)];
            iq2_values(n < 2 ? out.a : out.b, 4 * (n & 1), entry, with_parity(raw.words[1] >> (7 * n)), scale);
        }
    }
};

template <>
struct Encoding<IQ2_XS> {
    static const bool SPLIT = false;
    static const bool IS_LARGE = false;
    struct Raw {
        u32 codes[2], scales, d;
    };
    static DEVICE void load(Raw& raw, const RowAddress& row, u32 k, u32 h, u32) {
        const u8* block = super_block(row, k, 74);
        const u32 sub = sub_block(k, h);
        load_unaligned(raw.codes, block + 2 + 8 * sub);
        raw.scales = __ldg(block + 66 + sub);
        raw.d = load_u16(block);
    }
    static DEVICE void unpack(const Raw& raw, u32, u32, Columns& out) {
        const float d = f32_of_f16(raw.d) * 0.25f;
#pragma unroll
        for (u32 n = 0; n < 4; n++) {
            const u32 code = raw.codes[n / 2] >> (16 * (n & 1)), entry = CODEBOOKS[IQ2_XS_BOOK + (code & 511)];
            const u32 scale = h2_splat(d * (0.5f + (float)(raw.scales >> (n / 2 * 4) & 15)));
            iq2_values(n < 2 ? out.a : out.b, 4 * (n & 1), entry, with_parity(code >> 9), scale);
        }
    }
};

template <>
struct Encoding<IQ2_S> {
    static const bool SPLIT = false;
    static const bool IS_LARGE = false;
    struct Raw {
        u32 codes[1], signs[1];
        // Ninth and tenth bits of codes, then scales: a byte each.
        u32 high, d;
    };
    static DEVICE void load(Raw& raw, const RowAddress& row, u32 k, u32 h, u32) {
        const u8* block = super_block(row, k, 82);
        const u32 sub = sub_block(k, h);
        load_unaligned(raw.codes, block + 2 + 4 * sub);
        load_unaligned(raw.signs, block + 34 + 4 * sub);
        raw.high = __ldg(block + 66 + sub) | (u32)__ldg(block + 74 + sub) << 8;
        raw.d = load_u16(block);
    }
    static DEVICE void unpack(const Raw& raw, u32, u32, Columns& out) {
        const float d = f32_of_f16(raw.d) * 0.25f;
#pragma unroll
        for (u32 n = 0; n < 4; n++) {
            const u32 code = (raw.codes[0] >> (8 * n) & 255) | (raw.high >> (2 * n) & 3) << 8;
            const u32 scale = h2_splat(d * (0.5f + (float)(raw.high >> (8 + n / 2 * 4) & 15)));
            iq2_values(n < 2 ? out.a : out.b, 4 * (n & 1), CODEBOOKS[IQ2_S_BOOK + code], raw.signs[0] >> (8 * n), scale);
        }
    }
};

template <>
struct Encoding<IQ3_XXS> {
    static const bool SPLIT = false;
    static const bool IS_LARGE = false;
    struct Raw {
        // Eight codes; signs and the scale.
        u32 codes[2], word[1], d;
    };
    static DEVICE void load(Raw& raw, const RowAddress& row, u32 k, u32 h, u32) {
        const u8* block = super_block(row, k, 98);
        const u32 sub = sub_block(k, h);
        load_unaligned(raw.codes, block + 2 + 8 * sub);
        load_unaligned(raw.word, block + 66 + 4 * sub);
        raw.d = load_u16(block);
    }
    static DEVICE void unpack(const Raw& raw, u32, u32, Columns& out) {
        const u32 scale = h2_splat(f32_of_f16(raw.d) * (0.5f + (float)(raw.word[0] >> 28)) * 0.5f);
#pragma unroll
        for (u32 n = 0; n < 8; n++) {
            const u32 entry = CODEBOOKS[IQ3_XXS_BOOK + (raw.codes[n / 4] >> (8 * (n % 4)) & 255)];
            const u32 signs = with_parity(raw.word[0] >> (7 * (n / 2))) >> (4 * (n & 1));
            iq3_values(n < 4 ? out.a : out.b, 2 * (n & 3), 0x1c140c04, 0x3e342c24, entry, signs, scale);
        }
    }
};

template <>
struct Encoding<IQ3_S> {
    static const bool SPLIT = false;
    static const bool IS_LARGE = false;
    struct Raw {
        u32 codes[2], signs[1];
        // Ninth bits of codes, then the scale of this run.
        u32 high, scale, d;
    };
    static DEVICE void load(Raw& raw, const RowAddress& row, u32 k, u32 h, u32) {
        const u8* block = super_block(row, k, 110);
        const u32 sub = sub_block(k, h);
        load_unaligned(raw.codes, block + 2 + 8 * sub);
        load_unaligned(raw.signs, block + 74 + 4 * sub);
        raw.high = __ldg(block + 66 + sub);
        raw.scale = __ldg(block + 106 + sub / 2) >> (sub % 2 * 4) & 15;
        raw.d = load_u16(block);
    }
    static DEVICE void unpack(const Raw& raw, u32, u32, Columns& out) {
        const u32 scale = h2_splat(f32_of_f16(raw.d) * (float)(1 + 2 * raw.scale));
#pragma unroll
        for (u32 n = 0; n < 8; n++) {
            const u32 code = (raw.codes[n / 4] >> (8 * (n % 4)) & 255) | (raw.high >> n & 1) << 8;
            iq3_values(n < 4 ? out.a : out.b, 2 * (n & 3), 0x07050301, 0x0f0d0b09, CODEBOOKS[IQ3_S_BOOK + code],
                       raw.signs[0] >> (4 * n), scale);
        }
    }
};

template <>
struct Encoding<IQ1_S> {
    static const bool SPLIT = false;
    static const bool IS_LARGE = false;
    struct Raw {
        // Codes; their upper bits, the scale and which way values are moved.
        u32 codes[1], word, d;
    };
    static DEVICE void load(Raw& raw, const RowAddress& row, u32 k, u32 h, u32) {
        const u8* block = super_block(row, k, 50);
        const u32 sub = sub_block(k, h);
        load_unaligned(raw.codes, block + 2 + 4 * sub);
        raw.word = load_u16(block + 34 + 2 * sub);
        raw.d = load_u16(block);
    }
    static DEVICE void unpack(const Raw& raw, u32, u32, Columns& out) {
        const float factor = f32_of_f16(raw.d) * (float)(2 * (raw.word >> 12 & 7) + 1);
#pragma unroll
        for (u32 n = 0; n < 4; n++) {
            const u32 code = (raw.codes[0] >> (8 * n) & 255) | (raw.word >> (3 * n) & 7) << 8;
            iq1_values(n < 2 ? out.a : out.b, 4 * (n & 1), CODEBOOKS[IQ1_BOOK + code], raw.word >> 15, factor);
        }
    }
};

template <>
struct Encoding<IQ1_M> {
    static const bool SPLIT = false;
    static const bool IS_LARGE = false;
    struct Raw {
        // Codes; a nibble for each: upper bits and which way values are moved; two scales of three bits.
        u32 codes[1], high, scales;
        float d;
    };
    static DEVICE void load(Raw& raw, const RowAddress& row, u32 k, u32 h, u32) {
        const u8* block = super_block(row, k, 56);
        const u32 sub = sub_block(k, h);
        load_unaligned(raw.codes, block + 4 * sub);
        raw.high = load_u16(block + 32 + 2 * sub);
        raw.scales = load_u16(block + 48 + sub / 2 * 2) >> (sub % 2 * 6);
        u32 bits = 0;
#pragma unroll
        for (u32 i = 0; i < 4; i++) bits |= load_u16(block + 48 + 2 * i) >> 12 << (4 * i);
        raw.d = f32_of_f16(bits);
    }
    static DEVICE void unpack(const Raw& raw, u32, u32, Columns& out) {
#pragma unroll
        for (u32 n = 0; n < 4; n++) {
            const u32 nibble = raw.high >> (4 * n), code = (raw.codes[0] >> (8 * n) & 255) | (nibble & 7) << 8;
            const float factor = raw.d * (float)(2 * (raw.scales >> (n / 2 * 3) & 7) + 1);
            iq1_values(n < 2 ? out.a : out.b, 4 * (n & 1), CODEBOOKS[IQ1_BOOK + code], nibble & 8, factor);
        }
    }
};

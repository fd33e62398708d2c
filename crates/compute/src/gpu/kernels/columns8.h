// Eight columns of a row of any encoding as floats, by words where its blocks allow it: what products of few rows read that
// multiply weights as floats. The values are those of `load8` in `weights.h`, but for the rounding of what is added.
#pragma once
#include "pieces.h"

// Bytes at p + offset, a multiple of 2: four, or eight.
DEVICE uint word_from(GPTR(const uchar) p, uint offset) { return load_u16(p, offset) | load_u16(p, offset + 2) << 16; }

struct Word2 {
    uint x, y;
};

DEVICE Word2 words_from(GPTR(const uchar) p, uint offset) {
    Word2 r = {word_from(p, offset), word_from(p, offset + 4)};
    return r;
}

// Bits `shift` on of eight bytes, as many as `mask` has, as floats times `scale`, plus `bias`.
DEVICE Float8 scaled_bytes(const Word2 w, uint shift, uint mask, float scale, float bias) {
    const uint x = w.x >> shift & mask, y = w.y >> shift & mask;
    Float8 out;
#pragma unroll
    for (uint j = 0; j < 4; ++j) {
        out.v[j] = fma_of(byte_float(x >> (8 * j) & 255), scale, bias);
        out.v[4 + j] = fma_of(byte_float(y >> (8 * j) & 255), scale, bias);
    }
    return out;
}

// Eight magnitudes, a byte each, times `factor`, negative where a bit of `signs` is set.
DEVICE Float8 signed_bytes(const Word2 magnitudes, float factor, uint signs) {
    const Float8 all = scaled_bytes(magnitudes, 0, 0xffffffffu, factor, 0.0f);
    Float8 out;
#pragma unroll
    for (uint j = 0; j < 8; ++j) out.v[j] = as_float(as_uint(all.v[j]) ^ (signs >> j & 1) << 31);
    return out;
}

// The lowest four numbers of two bits, or of three, a nibble each.
DEVICE uint nibbles_of_2(uint ranks) {
    const uint pairs = (ranks & 255) | (ranks & 0xf0) << 4, halves = pairs & 0x0f0f;
    return (halves | halves << 2) & 0x3333;
}
DEVICE uint nibbles_of_3(uint ranks) {
    return (ranks & 7) | (ranks & 0x38) << 1 | (ranks & 0x1c0) << 2 | (ranks & 0xe00) << 3;
}

// The low nibbles of four bytes beside each other.
DEVICE uint nibbles_of_bytes(uint w) {
    const uint x = w & 0x0f0f0f0fu, y = (x | x >> 4) & 0x00ff00ffu;
    return (y | y >> 8) & 0xffff;
}

// The values of four nibbles by `NON_LINEAR`, and 128.
DEVICE uint non_linear_bytes(uint nibbles) {
    const uint below = pick(0xbfad9881u, 0xf6eaddcfu, nibbles), above = pick(0x26190d01u, 0x71594535u, nibbles);
    const uint bits = nibbles >> 3 & 0x1111u, pairs = (bits | bits << 8) & 0x00110011u;
    const uint chosen = ((pairs | pairs << 4) & 0x01010101u) * 255u;
    return ((above & chosen) | (below & ~chosen)) ^ 0x80808080u;
}

// What ranks of IQ2 stand for, of IQ3_XXS and of IQ3_S: a byte each.
DEVICE Word2 iq2_values(uint entry) {
    const Word2 r = {pick(0x002b1908u, 0, nibbles_of_2(entry)), pick(0x002b1908u, 0, nibbles_of_2(entry >> 8))};
    return r;
}
DEVICE Word2 iq3_xxs_values(uint first, uint second) {
    const Word2 r = {pick(0x1c140c04u, 0x3e342c24u, nibbles_of_3(first)), pick(0x1c140c04u, 0x3e342c24u, nibbles_of_3(second))};
    return r;
}
DEVICE Word2 iq3_s_values(uint first, uint second) {
    const Word2 r = {pick(0x07050301u, 0x0f0d0b09u, nibbles_of_3(first)), pick(0x07050301u, 0x0f0d0b09u, nibbles_of_3(second))};
    return r;
}

// Floats of eight bits (E4M3), which times E4M3_UNIT are what they stand for: where no instruction converts them, their bits are those
// of f16 that are 2⁸ times too small.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
CONSTANT float E4M3_UNIT = 1.0f;
#else
CONSTANT float E4M3_UNIT = 256.0f;
#endif
DEVICE Float8 e4m3_floats(const Word2 codes) {
    const uint words[2] = {codes.x, codes.y};
    Float8 r;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#pragma unroll
    for (uint j = 0; j < 4; ++j) {
        uint two;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(two) : "h"((ushort)(words[j / 2] >> 16 * (j % 2))));
        r.v[2 * j] = f16_to_f32((ushort)two);
        r.v[2 * j + 1] = f16_to_f32((ushort)(two >> 16));
    }
    return r;
#else
#pragma unroll
    for (uint j = 0; j < 2; ++j) {
        // Of each, the magnitude below what makes an exponent of ones if it is not a number.
        const uint w = words[j], own = w & 0x7f7f7f7fu, all = own | ((own + 0x01010101u) & 0x80808080u);
        const uint odd = (w & 0x80008000u) | (all >> 1 & 0x7f807f80u);
        const uint even = (w << 8 & 0x80008000u) | (all << 7 & 0x7f807f80u);
        r.v[4 * j] = f16_to_f32((ushort)even);
        r.v[4 * j + 1] = f16_to_f32((ushort)odd);
        r.v[4 * j + 2] = f16_to_f32((ushort)(even >> 16));
        r.v[4 * j + 3] = f16_to_f32((ushort)(odd >> 16));
    }
    return r;
#endif
}

// Bits 24 and 25 of a kind of FP8: how its scales are stored.
CONSTANT uint SCALES_F32 = 0, SCALES_BF16 = 1, SCALES_E8M0 = 2;

DEVICE uint scales_of(uint kind) { return kind >> 24 & 3; }

// Columns 8i..8i + 8 of a row of FP8 in E4M3_UNIT, and their scale times that.
DEVICE Float8 fp8_floats(const Row row, uint i) {
    const ulong w = *GCAST(const ulong, row.plane0 + 8 * i);
    const Word2 codes = {(uint)w, (uint)(w >> 32)};
    return e4m3_floats(codes);
}
template <uint S>
DEVICE float fp8_factor(const Format f, const Row row, uint i) {
    // Loops whose compiler knows these bits have no branches.
    const uint kind = (f.kind & ~(3u << 24)) | S << 24;
    return product_of(fp8_scale(kind, row, 8 * i), E4M3_UNIT);
}

// Columns 8i..8i + 8 of a row, all of which are there; not of FP8.
template <uint D>
DEVICE Float8 columns8(const Format f, const Row row, uint i) {
    const GPTR(const uchar) p = row.plane0;
    if (D == F32) {
        const Word4 a = load_u32x4(p, 32 * i), b = load_u32x4(p, 32 * i + 16);
        Float8 r = {{as_float(a.x), as_float(a.y), as_float(a.z), as_float(a.w), as_float(b.x), as_float(b.y),
                     as_float(b.z), as_float(b.w)}};
        return r;
    }
    if (D == F16 || D == BF16) {
        const Word4 q = load_u32x4(p, 16 * i);
        const uint pairs[4] = {q.x, q.y, q.z, q.w};
        Float8 r;
#pragma unroll
        for (uint j = 0; j < 4; ++j) {
            r.v[2 * j] = D == F16 ? f16_to_f32((ushort)pairs[j]) : as_float(pairs[j] << 16);
            r.v[2 * j + 1] = D == F16 ? f16_to_f32((ushort)(pairs[j] >> 16)) : as_float(pairs[j] & 0xffff0000u);
        }
        return r;
    }
    const uint part = i % 32, sub = part / 4;
    if (D == Q2_K) {
        const GPTR(const uchar) b = p + i / 32 * 84;
        const uint shift = sub % 4 * 2, at = 16 + part / 16 * 32 + part % 4 * 8, sc = b[part / 2], d = load_u32(b, 80);
        const Word2 w = {load_u32(b, at), load_u32(b, at + 4)};
        const float less = f16_to_f32((ushort)(d >> 16)) * (float)(sc >> 4);
        return scaled_bytes(w, shift, 0x03030303u, f16_to_f32((ushort)d) * (float)(sc & 15), -less);
    }
    if (D == Q3_K) {
        const GPTR(const uchar) b = p + i / 32 * 110;
        const uint shift = sub % 4 * 2, at = part % 4 * 8, s = part / 2;
        const uint low = b[96 + s % 8] >> (4 * (s / 8)) & 15, high = b[104 + s % 4] >> (2 * (s / 4)) & 3;
        const float d = half_at(b, 108) * (float)((int)(low | high << 4) - 32);
        const Word2 q = words_from(b, 32 + part / 16 * 32 + at), third = words_from(b, at);
        const Word2 w = {(q.x >> shift & 0x03030303u) | (third.x >> sub & 0x01010101u) << 2,
                         (q.y >> shift & 0x03030303u) | (third.y >> sub & 0x01010101u) << 2};
        return scaled_bytes(w, 0, 0x07070707u, d, -4.0f * d);
    }
    if (D == IQ2_XXS) {
        const GPTR(const uchar) b = p + i / 32 * 66;
        const uint at = 2 + 8 * sub, word = word_from(b, at + 4), n = part % 4;
        const float factor = half_at(b, 0) * (0.5f + (float)(word >> 28)) * 0.25f;
        return signed_bytes(iq2_values(CODEBOOKS[IQ2_XXS_BOOK + b[at + n]]), factor, even_signs(word >> (7 * n)));
    }
    if (D == IQ2_XS) {
        const GPTR(const uchar) b = p + i / 32 * 74;
        const uint word = load_u16(b, 2 + 2 * part), scale = b[66 + sub] >> (part / 2 % 2 * 4) & 15;
        const float factor = half_at(b, 0) * (0.5f + (float)scale) * 0.25f;
        return signed_bytes(iq2_values(CODEBOOKS[IQ2_XS_BOOK + (word & 511)]), factor, even_signs(word >> 9));
    }
    if (D == IQ2_S) {
        const GPTR(const uchar) b = p + i / 32 * 82;
        const uint code = b[2 + part] | (uint)(b[66 + sub] >> (part % 4 * 2) & 3) << 8;
        const uint scale = b[74 + sub] >> (part / 2 % 2 * 4) & 15;
        const float factor = half_at(b, 0) * (0.5f + (float)scale) * 0.25f;
        return signed_bytes(iq2_values(CODEBOOKS[IQ2_S_BOOK + code]), factor, b[34 + part]);
    }
    if (D == IQ3_XXS) {
        const GPTR(const uchar) b = p + i / 32 * 98;
        const uint codes = load_u16(b, 2 + 2 * part), word = word_from(b, 66 + 4 * sub);
        const Word2 values =
            iq3_xxs_values(CODEBOOKS[IQ3_XXS_BOOK + (codes & 255)], CODEBOOKS[IQ3_XXS_BOOK + (codes >> 8)]);
        const float factor = half_at(b, 0) * (0.5f + (float)(word >> 28)) * 0.5f;
        return signed_bytes(values, factor, even_signs(word >> (7 * (part % 4))));
    }
    if (D == IQ3_S) {
        const GPTR(const uchar) b = p + i / 32 * 110;
        const uint codes = load_u16(b, 2 + 2 * part), high = b[66 + sub] >> (part % 4 * 2);
        const uint first = (codes & 255) | (high & 1) << 8, second = codes >> 8 | (high & 2) << 7;
        const Word2 values = iq3_s_values(CODEBOOKS[IQ3_S_BOOK + first], CODEBOOKS[IQ3_S_BOOK + second]);
        const float factor = half_at(b, 0) * (float)(1 + 2 * (b[106 + sub / 2] >> (sub % 2 * 4) & 15));
        return signed_bytes(values, factor, b[74 + part]);
    }
    if (D == IQ1_S || D == IQ1_M) return load8_codes(D, p + i / 32 * code_block(D), part);
    // In blocks of 32, low nibbles are columns of the first half, high ones of the second.
    const uint nibble = part % 4 / 2 * 4, start = 8 * (part % 2);
    if (D == Q4_1 || D == Q5_1) {
        const uint head = D == Q4_1 ? 4 : 8;
        const GPTR(const uchar) b = p + i / 4 * (head + 16);
        const Word2 q = {load_u32(b, head + start), load_u32(b, head + start + 4)};
        const uint fifths = D == Q5_1 ? load_u32(b, 4) >> (8 * (part % 4)) : 0;
        const Word2 w = {(q.x >> nibble & 0x0f0f0f0fu) | spread_bits(fifths & 15) << 4,
                         (q.y >> nibble & 0x0f0f0f0fu) | spread_bits(fifths >> 4 & 15) << 4};
        return scaled_bytes(w, 0, 0x1f1f1f1fu, half_at(b, 0), half_at(b, 2));
    }
    if (D == IQ4_NL || D == IQ4_XS) {
        const GPTR(const uchar) b = D == IQ4_XS ? p + i / 32 * 136 : p + i / 4 * 18;
        float d = half_at(b, 0);
        if (D == IQ4_XS) {
            const uint low = b[4 + sub / 2] >> (sub % 2 * 4) & 15, high = load_u16(b, 2) >> (2 * sub) & 3;
            d *= (float)((int)(low | high << 4) - 32);
        }
        const Word2 q = words_from(b, (D == IQ4_XS ? 8 + 16 * sub : 2) + start);
        const Word2 w = {non_linear_bytes(nibbles_of_bytes(q.x >> nibble)), non_linear_bytes(nibbles_of_bytes(q.y >> nibble))};
        return scaled_bytes(w, 0, 0xffffffffu, d, -128.0f * d);
    }
    if (D == AFFINE4 || D == AFFINE8) {
        const StoredScales stored = stored_scales(f.kind, row, group_of_piece(f.kind, i / 4));
        const Word2 w = {load_u32(p, D == AFFINE8 ? 8 * i : 4 * i), D == AFFINE8 ? load_u32(p, 8 * i + 4) : 0};
        const float scale = scale_of(stored), bias = bias_of(stored, scale);
        if (D == AFFINE8) return scaled_bytes(w, 0, 0xffffffffu, scale, bias);
        Float8 r;
#pragma unroll
        for (uint j = 0; j < 8; ++j) r.v[j] = fma_of(byte_float(w.x >> (4 * j) & 15), scale, bias);
        return r;
    }
    return load8<D>(f, row, i);
}

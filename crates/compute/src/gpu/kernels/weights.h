// What the bytes of every weight encoding mean. Layouts and their sources: `quant/`.
#pragma once
#include "dialect.h"
#include "codebooks.h"
#include "encodings.h"

// Codes of encodings. ANY is decided at run time, by the format.
CONSTANT uint ANY = 0;
#define MF_CODE(name, NAME, code, ...) CONSTANT uint NAME = code;
ENCODINGS(MF_CODE)

// A matrix (rows, cols) without its bytes.
struct Format {
    // Bits 0..8 the encoding; affine: 8..16 the group, 0 for a whole row, 16..20 the bits; bit 24: scales are bfloat16 (else
    // f16; f32 for FP8). Affine: bit 27: integers less zero points, which bit 28 says are stored. FP8: bit 25: scales are
    // powers of two; bit 26: there is one for the whole matrix, 27: for a row, 28: for 32 columns of a row. NVFP4: bit 24:
    // the matrix's scale divides.
    uint kind;
    uint cols;
    // Bytes from a row to the next in each plane.
    uint strides[3];
};

// A row's bytes in each plane.
struct Row {
    GPTR(const uchar) plane0;
    GPTR(const uchar) plane1;
    GPTR(const uchar) plane2;
    // By how much words of zero points are to be shifted.
    uint zero;
};

// Words of zero points stand for several rows.
DEVICE bool has_zeros(uint kind) { return (kind & (1u << 28 | 255)) == (1u << 28 | AFFINE); }

// The row of FP8's scales for a row.
DEVICE uint fp8_scale_row(uint kind, uint row) { return kind >> 26 & 1 ? 0 : kind >> 27 & 3 ? row : row / 128; }

DEVICE Row row_of(GPTR(const uchar) plane0, GPTR(const uchar) plane1,
                  GPTR(const uchar) plane2, const Format f, uint row) {
    const uint scale_row = (f.kind & 255) == FP8 ? fp8_scale_row(f.kind, row) : row;
    const uint zero = row * (f.kind >> 16 & 15);
    Row r = {plane0 + (ulong)row * f.strides[0], plane1 + (ulong)scale_row * f.strides[1],
             plane2 + (ulong)(has_zeros(f.kind) ? zero / 32 : row) * f.strides[2], zero % 32};
    return r;
}

DEVICE float half_at(GPTR(const uchar) p, uint offset) { return f16_to_f32((ushort)load_u16(p, offset)); }

// The 16-bit float of a scale.
DEVICE float float16_of(uint kind, uint bits) { return kind >> 24 & 1 ? bf16_to_f32(bits) : f16_to_f32((ushort)bits); }
DEVICE float scale_at(uint kind, GPTR(const uchar) p, uint offset) { return float16_of(kind, load_u16(p, offset)); }

// The group of a column of an affine encoding.
DEVICE uint group_of(uint kind, uint column) {
    const uint group = kind >> 8 & 255;
    return group == 0 ? 0 : column / group;
}

// The group of columns 32p..32p + 32 of an affine encoding; groups have 32, 64 or 128 columns, or all.
DEVICE uint group_of_piece(uint kind, uint p) {
    const uint pieces = kind >> 13 & 7;
    return pieces == 0 ? 0 : p >> (pieces >> 1);
}

// What is added to the codes of a group times their scale: of integers, less zero point times scale, which is exact.
DEVICE float bias_of(uint kind, const Row row, uint group, float scale) {
    if (!(kind >> 27 & 1)) return scale_at(kind, row.plane2, 2 * group);
    const uint bits = kind >> 16 & 15, middle = 1u << (bits - 1);
    const uint zero = has_zeros(kind) ? load_u32(row.plane2, 4 * group) >> row.zero & (2 * middle - 1) : middle;
    return -(scale * (float)zero);
}

// Bits of a scale, and of its bias or the zero points with it, `shift` bits on. What they stand for is decided where it is needed: a
// branch between reads would wait for those in front.
struct StoredScales {
    uint scale, other, shift, kind;
};

// Of a group of an affine encoding.
DEVICE StoredScales stored_scales(uint kind, const Row row, uint group) {
    // Integers without zero points have no third plane.
    const bool has_other = !(kind >> 27 & 1) || has_zeros(kind);
    StoredScales s;
    s.scale = load_u16(row.plane1, 2 * group);
    s.other = load_u16(has_other ? row.plane2 : row.plane1, has_zeros(kind) ? 4 * group + row.zero / 16 * 2 : 2 * group);
    s.shift = row.zero % 16;
    s.kind = kind;
    return s;
}

DEVICE float scale_of(const StoredScales s) { return float16_of(s.kind, s.scale); }

// `bias_of` a group whose scale is known.
DEVICE float bias_of(const StoredScales s, float scale) {
    if (!(s.kind >> 27 & 1)) return float16_of(s.kind, s.other);
    const uint middle = 1u << ((s.kind >> 16 & 15) - 1);
    const uint zero = has_zeros(s.kind) ? s.other >> s.shift & (2 * middle - 1) : middle;
    return -(scale * (float)zero);
}

// Scale and minimum j of the twelve bytes s of Q4_K and Q5_K.
DEVICE uint k_scale(GPTR(const uchar) s, uint j) { return j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (uint)(s[j - 4] >> 6) << 4; }
DEVICE uint k_min(GPTR(const uchar) s, uint j) {
    return j < 4 ? s[j + 4] & 63 : (uint)(s[j + 4] >> 4) | (uint)(s[j] >> 6) << 4;
}

// A four-bit float (E2M1).
DEVICE float e2m1(uint code) {
    const uint magnitude = code & 7;
    const float value = magnitude < 2 ? 0.5f * (float)magnitude
                                      : (float)(2 + (magnitude & 1)) * 0.5f * (float)(1u << (magnitude / 2 - 1));
    return code & 8 ? -value : value;
}

// 2^(s − 127), subnormal ones included, but NaN for 255: the bits of infinity and one more.
DEVICE float e8m0(uint s) { return s == 0 ? as_float(0x00400000) : as_float(s << 23 | (s + 1 & 256) << 14); }

DEVICE float e4m3(uint code) {
    const uint exponent = code >> 3 & 15, mantissa = code & 7;
    float value = exponent == 0 ? (float)mantissa / 512.0f : as_float((exponent + 120) << 23 | mantissa << 20);
    if (exponent == 15 && mantissa == 7) value = not_a_number();
    return code & 128 ? -value : value;
}

// What the scales of a matrix of NVFP4 are multiplied by.
DEVICE float nvfp4_factor(uint kind, uint bits) {
    const float scale = as_float(bits);
    return kind >> 24 & 1 ? 1.0f / scale : scale;
}
DEVICE float nvfp4_factor(uint kind, const Row row) { return nvfp4_factor(kind, load_u32(row.plane2, 0)); }

// Values of four-bit codes.
CONSTANT signed char NON_LINEAR[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Signs of eight values from seven bits: the eighth makes their number even.
DEVICE uint even_signs(uint bits) {
    const uint seven = bits & 127, folded = seven ^ seven >> 4, pairs = folded ^ folded >> 2;
    return seven | ((pairs ^ pairs >> 1) & 1) << 7;
}

// Eight values of entries of a codebook of 2 bits a rank: those of IQ2, or −1, 0 and 1.
DEVICE float rank2(uint entry, uint j, bool ternary) {
    const uint rank = entry >> (2 * j) & 3;
    return ternary ? (float)((int)rank - 1) : rank == 0 ? 8.0f : rank == 1 ? 25.0f : 43.0f;
}

// Values 8n..8n + 8 of a super-block b of an encoding with a codebook.
DEVICE Float8 load8_codes(uint kind, GPTR(const uchar) b, uint n) {
    Float8 out;
    if (kind == IQ1_S || kind == IQ1_M) {
        float d = 0.0f;
        uint code = b[kind == IQ1_S ? 2 + n : n], scale = 0;
        bool down = false;
        if (kind == IQ1_S) {
            const uint word = load_u16(b, 34 + n / 4 * 2);
            d = half_at(b, 0);
            code |= (word >> (n % 4 * 3) & 7) << 8;
            scale = word >> 12 & 7;
            down = word >> 15;
        } else {
            const uint nibble = b[32 + n / 2] >> (n % 2 * 4) & 15;
            uint bits = 0;
            for (uint i = 0; i < 4; ++i) bits |= load_u16(b, 48 + 2 * i) >> 12 << (4 * i);
            d = f16_to_f32((ushort)bits);
            code |= (nibble & 7) << 8;
            scale = load_u16(b, 48 + n / 8 * 2) >> (n / 2 % 4 * 3) & 7;
            down = nibble & 8;
        }
        const uint entry = CODEBOOKS[IQ1_BOOK + code];
        const float factor = d * (float)(2 * scale + 1), shift = down ? -0.125f : 0.125f;
        for (uint j = 0; j < 8; ++j) out.v[j] = factor * (rank2(entry, j, true) + shift);
        return out;
    }
    const float d = half_at(b, 0);
    if (kind == IQ3_XXS || kind == IQ3_S) {
        uint first = b[2 + 2 * n], second = b[3 + 2 * n], signs = 0;
        float factor = 0.0f;
        if (kind == IQ3_XXS) {
            const uint at = 66 + n / 4 * 4, word = load_u16(b, at) | load_u16(b, at + 2) << 16;
            signs = even_signs(word >> (n % 4 * 7));
            factor = d * (0.5f + (float)(word >> 28)) * 0.5f;
            first += IQ3_XXS_BOOK;
            second += IQ3_XXS_BOOK;
        } else {
            const uint high = b[66 + n / 4] >> (n % 4 * 2);
            signs = b[74 + n];
            factor = d * (float)(1 + 2 * (b[106 + n / 8] >> (n / 4 % 2 * 4) & 15));
            first += IQ3_S_BOOK + (high & 1) * 256;
            second += IQ3_S_BOOK + (high >> 1 & 1) * 256;
        }
        const uint entries = CODEBOOKS[first] | (uint)CODEBOOKS[second] << 12;
        for (uint j = 0; j < 8; ++j) {
            const uint rank = entries >> (3 * j) & 7;
            const float magnitude = kind == IQ3_S ? (float)(2 * rank + 1) : rank == 7 ? 62.0f : (float)(4 + 8 * rank);
            out.v[j] = signs >> j & 1 ? -(factor * magnitude) : factor * magnitude;
        }
        return out;
    }
    uint entry = 0, signs = 0, scale = 0;
    if (kind == IQ2_XXS) {
        const uint at = 2 + n / 4 * 8, word = load_u16(b, at + 4) | load_u16(b, at + 6) << 16;
        entry = CODEBOOKS[IQ2_XXS_BOOK + b[at + n % 4]];
        signs = even_signs(word >> (n % 4 * 7));
        scale = word >> 28;
    } else if (kind == IQ2_XS) {
        const uint word = load_u16(b, 2 + 2 * n);
        entry = CODEBOOKS[IQ2_XS_BOOK + (word & 511)];
        signs = even_signs(word >> 9);
        scale = b[66 + n / 4] >> (n / 2 % 2 * 4) & 15;
    } else {
        entry = CODEBOOKS[IQ2_S_BOOK + (b[2 + n] | (uint)(b[66 + n / 4] >> (n % 4 * 2) & 3) << 8)];
        signs = b[34 + n];
        scale = b[74 + n / 4] >> (n / 2 % 2 * 4) & 15;
    }
    const float factor = d * (0.5f + (float)scale) * 0.25f;
    for (uint j = 0; j < 8; ++j) {
        const float value = factor * rank2(entry, j, false);
        out.v[j] = signs >> j & 1 ? -value : value;
    }
    return out;
}

// Bytes of a super-block of an encoding with a codebook.
DEVICE uint code_block(uint kind) {
    return kind == IQ2_XXS ? 66
         : kind == IQ2_XS  ? 74
         : kind == IQ2_S   ? 82
         : kind == IQ3_XXS ? 98
         : kind == IQ3_S   ? 110
         : kind == IQ1_S   ? 50
                           : 56;
}

// The scale of a column of FP8.
DEVICE float fp8_scale(uint kind, const Row row, uint column) {
    const uint block = kind >> 28 & 1 ? column / 32 : kind >> 26 & 3 ? 0 : column / 128;
    return kind >> 24 & 1 ? bf16_to_f32(load_u16(row.plane1, 2 * block))
         : kind >> 25 & 1 ? e8m0(row.plane1[block])
                          : as_float(load_u32(row.plane1, 4 * block));
}

// Columns 8i..8i + 8 of a row. Only rows of plain floats and FP8 may end within them: then zeros follow.
template <uint D>
DEVICE Float8 load8(const Format f, const Row row, uint i) {
    const uint kind = D == ANY ? f.kind & 255 : D;
    const GPTR(const uchar) p = row.plane0;
    Float8 out;
    if (kind == F32 || kind == F16 || kind == BF16) {
        for (uint j = 0; j < 8; ++j) {
            const uint col = 8 * i + j;
            out.v[j] = col >= f.cols ? 0.0f
                     : kind == F32   ? as_float(load_u32(p, 4 * col))
                     : kind == F16   ? half_at(p, 2 * col)
                                     : bf16_to_f32(load_u16(p, 2 * col));
        }
    } else if (kind == Q4_0) {
        // Elements 0..16 are low nibbles, 16..32 high ones.
        const GPTR(const uchar) b = p + i / 4 * 18;
        const float d = half_at(b, 0);
        const uint at = 2 + 8 * (i % 2), shift = i % 4 / 2 * 4;
        for (uint j = 0; j < 8; ++j) out.v[j] = d * (float)((int)(b[at + j] >> shift & 15) - 8);
    } else if (kind == Q5_0) {
        const GPTR(const uchar) b = p + i / 4 * 22;
        const float d = half_at(b, 0);
        const uint high = load_u16(b, 2) | load_u16(b, 4) << 16;
        const uint at = 6 + 8 * (i % 2), shift = i % 4 / 2 * 4;
        for (uint j = 0; j < 8; ++j) {
            const uint fifth = high >> (8 * (i % 4) + j) & 1;
            out.v[j] = d * (float)((int)((b[at + j] >> shift & 15) | fifth << 4) - 16);
        }
    } else if (kind == Q8_0) {
        const GPTR(const uchar) b = p + i / 4 * 34;
        const float d = half_at(b, 0);
        for (uint j = 0; j < 8; ++j) out.v[j] = d * (float)(signed char)b[2 + 8 * (i % 4) + j];
    } else if (kind == Q4_1 || kind == Q5_1) {
        const uint head = kind == Q4_1 ? 4 : 8;
        const GPTR(const uchar) b = p + i / 4 * (head + 16);
        const float d = half_at(b, 0), m = half_at(b, 2);
        const uint high = kind == Q5_1 ? load_u16(b, 4) | load_u16(b, 6) << 16 : 0;
        const uint at = head + 8 * (i % 2), shift = i % 4 / 2 * 4;
        for (uint j = 0; j < 8; ++j) {
            const uint fifth = high >> (8 * (i % 4) + j) & 1;
            out.v[j] = d * (float)((b[at + j] >> shift & 15) | fifth << 4) + m;
        }
    } else if (kind == IQ4_NL || kind == IQ4_XS) {
        const bool wide = kind == IQ4_XS;
        const uint sub = i % 32 / 4;
        const GPTR(const uchar) b = wide ? p + i / 32 * 136 : p + i / 4 * 18;
        float d = half_at(b, 0);
        if (wide)
            d *= (float)((int)((b[4 + sub / 2] >> (sub % 2 * 4) & 15) | (load_u16(b, 2) >> (2 * sub) & 3) << 4) - 32);
        const uint at = (wide ? 8 + 16 * sub : 2) + 8 * (i % 2), shift = i % 4 / 2 * 4;
        for (uint j = 0; j < 8; ++j) out.v[j] = d * (float)NON_LINEAR[b[at + j] >> shift & 15];
    } else if (D == ANY && kind >= IQ2_XXS && kind <= IQ1_M) {
        out = load8_codes(kind, p + i / 32 * code_block(kind), i % 32);
    } else if (kind == Q2_K) {
        // Element 128n + 32k + l is bits 2k of qs[32n + l]; scales of 16.
        const GPTR(const uchar) b = p + i / 32 * 84;
        const uint e = 8 * (i % 32), n = e / 128, k = e % 128 / 32, l = e % 32;
        const uint sc = b[e / 16];
        const float d = half_at(b, 80) * (float)(sc & 15), m = half_at(b, 82) * (float)(sc >> 4);
        for (uint j = 0; j < 8; ++j) out.v[j] = d * (float)(b[16 + 32 * n + l + j] >> (2 * k) & 3) - m;
    } else if (kind == Q3_K) {
        const GPTR(const uchar) b = p + i / 32 * 110;
        const uint e = 8 * (i % 32), n = e / 128, k = e % 128 / 32, l = e % 32, s = e / 16;
        const uint low = b[96 + s % 8] >> (4 * (s / 8)) & 15, high = b[104 + s % 4] >> (2 * (s / 4)) & 3;
        const float d = half_at(b, 108) * (float)((int)(low | high << 4) - 32);
        for (uint j = 0; j < 8; ++j) {
            const uint third = b[l + j] >> (4 * n + k) & 1;
            out.v[j] = d * (float)((int)((b[32 + 32 * n + l + j] >> (2 * k) & 3) | third << 2) - 4);
        }
    } else if (kind == Q4_K || kind == Q5_K) {
        const uint head = kind == Q4_K ? 16 : 48;
        const GPTR(const uchar) b = p + i / 32 * (head + 128);
        const uint e = 8 * (i % 32), s = e / 32, l = e % 32;
        const float d = half_at(b, 0) * (float)k_scale(b + 4, s), m = half_at(b, 2) * (float)k_min(b + 4, s);
        for (uint j = 0; j < 8; ++j) {
            uint q = b[head + 32 * (s / 2) + l + j] >> (s % 2 * 4) & 15;
            if (kind == Q5_K) q |= (uint)(b[16 + l + j] >> s & 1) << 4;
            out.v[j] = d * (float)q - m;
        }
    } else if (kind == Q6_K) {
        // Element 128n + 32k + l: low bits in nibble k / 2 of ql[64n + 32(k % 2) + l], high in bits 2k of qh[32n + l].
        const GPTR(const uchar) b = p + i / 32 * 210;
        const uint e = 8 * (i % 32), n = e / 128, k = e % 128 / 32, l = e % 32;
        const float d = half_at(b, 208) * (float)(signed char)b[192 + e / 16];
        for (uint j = 0; j < 8; ++j) {
            const uint low = b[64 * n + 32 * (k % 2) + l + j] >> (k / 2 * 4) & 15;
            const uint high = b[128 + 32 * n + l + j] >> (2 * k) & 3;
            out.v[j] = d * (float)((int)(low | high << 4) - 32);
        }
    } else if (kind == MXFP4) {
        const GPTR(const uchar) b = p + i / 4 * 17;
        const float d = e8m0(b[0]);
        const uint at = 1 + 8 * (i % 2), shift = i % 4 / 2 * 4;
        for (uint j = 0; j < 8; ++j) out.v[j] = d * e2m1(b[at + j] >> shift & 15);
    } else if (kind == MXFP4_PLANES) {
        const float d = e8m0(row.plane1[i / 4]);
        for (uint j = 0; j < 8; ++j) out.v[j] = d * e2m1(p[4 * i + j / 2] >> (j % 2 * 4) & 15);
    } else if (kind == NVFP4) {
        const float d = e4m3(row.plane1[i / 2]) * nvfp4_factor(f.kind, row);
        for (uint j = 0; j < 8; ++j) out.v[j] = d * e2m1(p[4 * i + j / 2] >> (j % 2 * 4) & 15);
    } else if (kind == AFFINE) {
        // Eight values fill `bits` bytes.
        const uint bits = f.kind >> 16 & 15, group = group_of(f.kind, 8 * i);
        const float scale = scale_at(f.kind, row.plane1, 2 * group), bias = bias_of(f.kind, row, group, scale);
        ulong word = 0;
        for (uint j = 0; j < bits; ++j) word |= (ulong)p[i * bits + j] << (8 * j);
        for (uint j = 0; j < 8; ++j) {
            out.v[j] = scale * (float)((uint)(word >> (j * bits)) & ((1u << bits) - 1)) + bias;
        }
    } else {
        const float scale = fp8_scale(f.kind, row, 8 * i);
        for (uint j = 0; j < 8; ++j) {
            const uint col = 8 * i + j;
            out.v[j] = col < f.cols ? e4m3(p[col]) * scale : 0.0f;
        }
    }
    return out;
}

// Elements 8i..8i + 8 of a row of `cols` activations, zeros from its end on.
DEVICE Float8 activations8(GPTR(const float) x, uint cols, uint i) {
    Float8 out;
    for (uint j = 0; j < 8; ++j) out.v[j] = 8 * i + j < cols ? (float)x[8 * i + j] : 0.0f;
    return out;
}

// One lane's share of the product of a row of FP8, four columns of each 128, with activations. Most codes are bits of a float
// whose exponent is 120 less; others are rare.
DEVICE float lane_dot_fp8(CTX, const Format f, const Row row, GPTR(const float) x) {
    float sum = 0.0f;
#pragma unroll 4
    for (uint column = 4 * ctx.lane(); column < f.cols; column += 128) {
        const uint w = load_u32(row.plane0, column);
        const Word4 a = load_u32x4(GCAST(const uchar, x), 4 * column);
        const uint words[4] = {a.x, a.y, a.z, a.w};
        // Bytes without an exponent, and NaN.
        const uint exponents = w & 0x78787878u;
        const uint others = ((exponents - 0x01010101u) & ~exponents) | ((w & 0x7f7f7f7fu) + 0x01010101u);
        float part = 0.0f;
        if ((others & 0x80808080u) != 0) {
            for (uint j = 0; j < 4; ++j) part = fma_of(e4m3(w >> (8 * j) & 255), as_float(words[j]), part);
        } else {
#pragma unroll
            for (uint j = 0; j < 4; ++j) {
                const uint code = w >> (8 * j);
                const float value = as_float(((code & 127) << 20) + (120u << 23) | (code & 128) << 24);
                part = fma_of(value, as_float(words[j]), part);
            }
        }
        sum = fma_of(part, fp8_scale(f.kind, row, column), sum);
    }
    return sum;
}

// One lane's share of the product of a row with activations.
template <uint D>
DEVICE float lane_dot(CTX, const Format f, const Row row, GPTR(const float) x) {
    if ((D == ANY ? f.kind & 255 : D) == FP8 && f.cols % 4 == 0) return lane_dot_fp8(ctx, f, row, x);
    float sum = 0.0f;
    for (uint i = ctx.lane(); 8 * i < f.cols; i += 32) {
        const Float8 w = load8<D>(f, row, i), a = activations8(x, f.cols, i);
        for (uint j = 0; j < 8; ++j) sum += w.v[j] * a.v[j];
    }
    return sum;
}

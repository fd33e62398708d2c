// Weights of every encoding as half floats, 32 columns a thread, for products on tensor cores.
//
// A tile's step is 64 columns. Two threads share a row of it; a `Columns` holds what one of them unpacks: two runs of
// 16 columns. Encodings whose low and high nibbles are 32 columns apart take columns 16h.. and 32 + 16h.. (`SPLIT`),
// the others 32h..32h + 32. Integer parts are exact; scales are rounded to f16 and products once more:
// a relative error of 2^-11, which is that of the activations.
#pragma once
#include "../encodings.h"
#include "tensor_core.h"

// 16 bytes from any address, by words: nothing outside the words that hold them is read.
template <int words>
DEVICE void load_unaligned(u32 (&to)[words], const u8* from) {
    u32 shift = ((u32)(u64)from & 3) * 8;
    const u32* aligned = (const u32*)(from - shift / 8);
    u32 low = __ldg(aligned);
#pragma unroll
    for (int i = 0; i < words; i++) {
        u32 high = (shift != 0 || i + 1 < words) ? __ldg(aligned + i + 1) : 0;
        to[i] = __funnelshift_r(low, high, shift);
        low = high;
    }
}
DEVICE u32 load_u16(const u8* p) { return __ldg((const u16*)p); }
DEVICE void load_16(u32 (&to)[4], const u8* from) {
    uint4 v = __ldg((const uint4*)from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

const u32 H1024 = 0x64006400;

// Bytes 0 and 1, or 2 and 3, of `w` in the low bytes of two 16-bit lanes.
DEVICE u32 bytes_01(u32 w) { return __byte_perm(w, 0, 0x4140); }
DEVICE u32 bytes_23(u32 w) { return __byte_perm(w, 0, 0x4342); }
// 1024 + n for each low nibble n of two lanes; 1024 + 16n for each high one.
template <u32 mask>
DEVICE u32 masked_1024(u32 lanes) {
    u32 d;
    // (lanes & mask) | H1024: the compiler makes two of it.
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(lanes), "n"(mask), "r"(H1024));
    return d;
}
DEVICE u32 low_nibbles(u32 lanes) { return masked_1024<0x000f000f>(lanes); }
DEVICE u32 high_nibbles(u32 lanes) { return masked_1024<0x00f000f0>(lanes); }

// 32 columns of a row as f16 pairs, in order within each run of 16.
struct Columns {
    u32 a[8], b[8];
};

// Where a row of a matrix is: its bytes in each plane.
struct RowAddress {
    const u8* plane[3];
    // By how much words of zero points are to be shifted.
    u32 zero;
};

// Bytes 0 and 1, or 2 and 3, of `w` as the integers that two f16 are 1024 more than.
DEVICE u32 high_1024_01(u32 w) { return __byte_perm(w, 0x64646464, 0x4140); }
DEVICE u32 high_1024_23(u32 w) { return __byte_perm(w, 0x64646464, 0x4342); }
DEVICE u32 splat_low(u32 w) { return __byte_perm(w, 0, 0x1010); }
DEVICE u32 splat_high(u32 w) { return __byte_perm(w, 0, 0x3232); }

// Scales and negated minima of two runs of 32 columns.
struct KScales {
    u32 scale[2], min[2];
};
// Those of runs j and j + 1, j even, of Q4_K and Q5_K: 6 bits each in 12 bytes, ggml's get_scale_min layout.
DEVICE KScales k_scales(const u32 (&header)[4], u32 j) {
    const u32 scales = j & 4 ? (header[3] & 0x0f0f0f0f) | (header[1] >> 2 & 0x30303030) : header[1] & 0x3f3f3f3f;
    const u32 mins = j & 4 ? (header[3] >> 4 & 0x0f0f0f0f) | (header[2] >> 2 & 0x30303030) : header[2] & 0x3f3f3f3f;
    const u32 chosen = j & 2 ? 0x4342 : 0x4140;
    const u32 s = h2_mul(h2_sub(__byte_perm(scales, 0x64646464, chosen), H1024), splat_low(header[0]));
    const u32 m = h2_mul(h2_sub(__byte_perm(mins, 0x64646464, chosen), H1024), splat_high(header[0]) ^ 0x80008000);
    return {{splat_low(s), splat_high(s)}, {splat_low(m), splat_high(m)}};
}

#define CODE(name, NAME, code, ...) const int NAME = code;
ENCODINGS(CODE)

template <int dtype>
struct Encoding;

struct KRaw {
    u32 header[4], qs[4];
};

template <>
struct Encoding<Q4_K> {
    static const bool SPLIT = true;
    static const bool IS_LARGE = false;
    typedef KRaw Raw;
    static DEVICE void load(Raw& raw, const RowAddress& row, u32 k, u32 h, u32) {
        const u8* block = row.plane[0] + (k / 256) * 144;
        load_16(raw.header, block);
        load_16(raw.qs, block + 16 + (k % 256) / 2 + 16 * h);
    }
    static DEVICE void unpack(const Raw& raw, u32 k, u32, Columns& out) {
        u32 j = (k % 256) / 32;
        const KScales s = k_scales(raw.header, j);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 lanes = i & 1 ? bytes_23(raw.qs[i / 2]) : bytes_01(raw.qs[i / 2]);
            u32 low = h2_sub(low_nibbles(lanes), H1024);
            u32 high = h2_fma(high_nibbles(lanes), 0x2c002c00 /* 1/16 */, 0xd400d400 /* -64 */);
            out.a[i] = h2_fma(low, s.scale[0], s.min[0]);
            out.b[i] = h2_fma(high, s.scale[1], s.min[1]);
        }
    }
};

template <>
struct Encoding<Q5_K> {
    static const bool SPLIT = true;
    static const bool IS_LARGE = true;
    struct Raw {
        u32 header[4], qs[4], qh[4];
    };
    static DEVICE void load(Raw& raw, const RowAddress& row, u32 k, u32 h, u32) {
        const u8* block = row.plane[0] + (k / 256) * 176;
        load_16(raw.header, block);
        load_16(raw.qh, block + 16 + 16 * h);
        load_16(raw.qs, block + 48 + (k % 256) / 2 + 16 * h);
    }
    static DEVICE void unpack(const Raw& raw, u32 k, u32, Columns& out) {
        u32 j = (k % 256) / 32;
        const KScales s = k_scales(raw.header, j);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 lanes = i & 1 ? bytes_23(raw.qs[i / 2]) : bytes_01(raw.qs[i / 2]);
            u32 bits = (i & 1 ? bytes_23(raw.qh[i / 2]) : bytes_01(raw.qh[i / 2])) >> j;
            u32 low = (lanes & 0x000f000f) | ((bits & 0x00010001) << 4) | H1024;
            u32 high = ((lanes >> 4) & 0x000f000f) | ((bits & 0x00020002) << 3) | H1024;
            out.a[i] = h2_fma(h2_sub(low, H1024), s.scale[0], s.min[0]);
            out.b[i] = h2_fma(h2_sub(high, H1024), s.scale[1], s.min[1]);
        }
    }
};

template <>
struct Encoding<Q6_K> {
    static const bool SPLIT = true;
    static const bool IS_LARGE = true;
    struct Raw {
        u32 a[4], b[4], qh[4];
        u32 scales[2], d;
    };
    static DEVICE void load(Raw& raw, const RowAddress& row, u32 k, u32 h, u32) {
        const u8* block = row.plane[0] + (k / 256) * 210;
        u32 half = (k % 256) / 128, quarter = (k / 64) % 2;
        load_unaligned(raw.a, block + 64 * half + 16 * h);
        load_unaligned(raw.b, block + 64 * half + 32 + 16 * h);
        load_unaligned(raw.qh, block + 128 + 32 * half + 16 * h);
        const u8* scales = block + 192 + 8 * half + 4 * quarter + h;
        raw.scales[0] = __ldg(scales);
        raw.scales[1] = __ldg(scales + 2);
        raw.d = load_u16(block + 208);
    }
    static DEVICE void unpack(const Raw& raw, u32 k, u32, Columns& out) {
        u32 shift = 4 * ((k / 64) % 2);
        // Signed bytes: 128 more is what two f16 are 1024 more than.
        const u32 both = (raw.scales[0] | raw.scales[1] << 16) ^ 0x64806480;
        const u32 s = h2_mul(h2_sub(both, 0x64806480 /* 1152 */), splat_low(raw.d));
        const u32 a_scale = splat_low(s), b_scale = splat_high(s);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 high = raw.qh[i] >> shift;
            const u32 a = (raw.a[i] >> shift & 0x0f0f0f0f) | (high << 4 & 0x30303030);
            const u32 b = (raw.b[i] >> shift & 0x0f0f0f0f) | (high << 2 & 0x30303030);
            out.a[2 * i] = h2_mul(h2_sub(high_1024_01(a), 0x64206420 /* 1056 */), a_scale);
            out.a[2 * i + 1] = h2_mul(h2_sub(high_1024_23(a), 0x64206420), a_scale);
            out.b[2 * i] = h2_mul(h2_sub(high_1024_01(b), 0x64206420), b_scale);
            out.b[2 * i + 1] = h2_mul(h2_sub(high_1024_23(b), 0x64206420), b_scale);
        }
    }
};

template <>
struct Encoding<Q8_0> {
    static const bool SPLIT = false;
    static const bool IS_LARGE = true;
    struct Raw {
        u32 qs[8], d;
    };
    static DEVICE void load(Raw& raw, const RowAddress& row, u32 k, u32 h, u32) {
        const u8* block = row.plane[0] + (k / 32 + h) * 34;
        raw.d = load_u16(block);
        load_unaligned(raw.qs, block + 2);
    }
    static DEVICE void unpack(const Raw& raw, u32, u32, Columns& out) {
        u32 scale = h2_splat(f32_of_f16(raw.d));
#pragma unroll
        for (int i = 0; i < 16; i++) {
            u32 w = raw.qs[i / 2] ^ 0x80808080;
            u32 q = (i & 1 ? bytes_23(w) : bytes_01(w)) | H1024;
            u32 value = h2_mul(h2_sub(q, 0x64806480 /* 1152 */), scale);
            if (i < 8) out.a[i] = value;
            else out.b[i - 8] = value;
        }
    }
};

template <>
struct Encoding<Q4_0> {
    static const bool SPLIT = false;
    static const bool IS_LARGE = false;
    struct Raw {
        u32 qs[4], d;
    };
    static DEVICE void load(Raw& raw, const RowAddress& row, u32 k, u32 h, u32) {
        const u8* block = row.plane[0] + (k / 32 + h) * 18;
        raw.d = load_u16(block);
        load_unaligned(raw.qs, block + 2);
    }
    static DEVICE void unpack(const Raw& raw, u32, u32, Columns& out) {
        u32 scale = h2_splat(f32_of_f16(raw.d));
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 lanes = i & 1 ? bytes_23(raw.qs[i / 2]) : bytes_01(raw.qs[i / 2]);
            out.a[i] = h2_mul(h2_sub(low_nibbles(lanes), 0x64086408 /* 1032 */), scale);
            out.b[i] = h2_mul(h2_fma(high_nibbles(lanes), 0x2c002c00, 0xd480d480 /* -72 */), scale);
        }
    }
};

template <>
struct Encoding<Q5_0> {
    static const bool SPLIT = false;
    static const bool IS_LARGE = false;
    struct Raw {
        u32 qs[4], qh[1], d;
    };
    static DEVICE void load(Raw& raw, const RowAddress& row, u32 k, u32 h, u32) {
        const u8* block = row.plane[0] + (k / 32 + h) * 22;
        raw.d = load_u16(block);
        load_unaligned(raw.qh, block + 2);
        load_unaligned(raw.qs, block + 6);
    }
    static DEVICE void unpack(const Raw& raw, u32, u32, Columns& out) {
        u32 scale = h2_splat(f32_of_f16(raw.d));
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 lanes = i & 1 ? bytes_23(raw.qs[i / 2]) : bytes_01(raw.qs[i / 2]);
            u32 low = raw.qh[0] >> (2 * i), high = raw.qh[0] >> (16 + 2 * i);
            u32 a = (lanes & 0x000f000f) | ((low & 1) << 4) | ((low & 2) << 19) | H1024;
            u32 b = ((lanes >> 4) & 0x000f000f) | ((high & 1) << 4) | ((high & 2) << 19) | H1024;
            out.a[i] = h2_mul(h2_sub(a, 0x64106410 /* 1040 */), scale);
            out.b[i] = h2_mul(h2_sub(b, 0x64106410), scale);
        }
    }
};

template <>
struct Encoding<Q4_1> {
    static const bool SPLIT = false;
    static const bool IS_LARGE = false;
    struct Raw {
        u32 qs[4], d, m;
    };
    static DEVICE void load(Raw& raw, const RowAddress& row, u32 k, u32 h, u32) {
        const u8* block = row.plane[0] + (k / 32 + h) * 20;
        raw.d = load_u16(block);
        raw.m = load_u16(block + 2);
        load_unaligned(raw.qs, block + 4);
    }
    static DEVICE void unpack(const Raw& raw, u32, u32, Columns& out) {
        u32 scale = h2_splat(f32_of_f16(raw.d)), min = h2_splat(f32_of_f16(raw.m));
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 lanes = i & 1 ? bytes_23(raw.qs[i / 2]) : bytes_01(raw.qs[i / 2]);
            u32 high = h2_fma(high_nibbles(lanes), 0x2c002c00 /* 1/16 */, 0xd400d400 /* -64 */);
            out.a[i] = h2_fma(h2_sub(low_nibbles(lanes), H1024), scale, min);
            out.b[i] = h2_fma(high, scale, min);
        }
    }
};

template <>
struct Encoding<Q5_1> {
    static const bool SPLIT = false;
    static const bool IS_LARGE = false;
    struct Raw {
        u32 qs[4], qh[1], d, m;
    };
    static DEVICE void load(Raw& raw, const RowAddress& row, u32 k, u32 h, u32) {
        const u8* block = row.plane[0] + (k / 32 + h) * 24;
        raw.d = load_u16(block);
        raw.m = load_u16(block + 2);
        load_unaligned(raw.qh, block + 4);
        load_unaligned(raw.qs, block + 8);
    }
    static DEVICE void unpack(const Raw& raw, u32, u32, Columns& out) {
        u32 scale = h2_splat(f32_of_f16(raw.d)), min = h2_splat(f32_of_f16(raw.m));
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 lanes = i & 1 ? bytes_23(raw.qs[i / 2]) : bytes_01(raw.qs[i / 2]);
            u32 low = raw.qh[0] >> (2 * i), high = raw.qh[0] >> (16 + 2 * i);
            u32 a = (lanes & 0x000f000f) | ((low & 1) << 4) | ((low & 2) << 19) | H1024;
            u32 b = ((lanes >> 4) & 0x000f000f) | ((high & 1) << 4) | ((high & 2) << 19) | H1024;
            out.a[i] = h2_fma(h2_sub(a, H1024), scale, min);
            out.b[i] = h2_fma(h2_sub(b, H1024), scale, min);
        }
    }
};

// The values of the lowest four nibbles by IQ4's table (`NON_LINEAR` of `../weights.h`), a signed byte each.
DEVICE u32 non_linear(u32 nibbles) {
    u32 below = __byte_perm(0xbfad9881, 0xf6eaddcf, nibbles & 0x7777);
    u32 above = __byte_perm(0x26190d01, 0x71594535, nibbles & 0x7777);
    // Bytes 0 to 3 of one of the two, by bit 3 of each nibble.
    return __byte_perm(below, above, 0x3210 + (nibbles >> 1 & 0x4444));
}

// Sixteen bytes of nibbles as IQ4 means them: low ones, then high ones.
DEVICE void unpack_non_linear(const u32 (&qs)[4], float d, Columns& out) {
    u32 scale = h2_splat(d);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        // Low nibbles in bytes 0 and 2, high ones in 1 and 3.
        u32 values = non_linear(i & 1 ? qs[i / 2] >> 16 : qs[i / 2]) ^ 0x80808080;
        out.a[i] = h2_mul(h2_sub(__byte_perm(values, 0, 0x4240) | H1024, 0x64806480 /* 1152 */), scale);
        out.b[i] = h2_mul(h2_sub(__byte_perm(values, 0, 0x4341) | H1024, 0x64806480), scale);
    }
}

template <>
struct Encoding<IQ4_NL> {
    static const bool SPLIT = false;
    static const bool IS_LARGE = false;
    struct Raw {
        u32 qs[4], d;
    };
    static DEVICE void load(Raw& raw, const RowAddress& row, u32 k, u32 h, u32) {
        const u8* block = row.plane[0] + (k / 32 + h) * 18;
        raw.d = load_u16(block);
        load_unaligned(raw.qs, block + 2);
    }
    static DEVICE void unpack(const Raw& raw, u32, u32, Columns& out) {
        unpack_non_linear(raw.qs, f32_of_f16(raw.d), out);
    }
};

template <>
struct Encoding<IQ4_XS> {
    static const bool SPLIT = false;
    static const bool IS_LARGE = false;
    struct Raw {
        u32 qs[4];
        float d;
    };
    static DEVICE void load(Raw& raw, const RowAddress& row, u32 k, u32 h, u32) {
        const u8* block = row.plane[0] + (k / 256) * 136;
        u32 sub = (k % 256) / 32 + h;
        u32 low = __ldg(block + 4 + sub / 2) >> (4 * (sub & 1)) & 15, high = load_u16(block + 2) >> (2 * sub) & 3;
        raw.d = f32_of_f16(load_u16(block)) * (float)((int)(low | high << 4) - 32);
        load_unaligned(raw.qs, block + 8 + 16 * sub);
    }
    static DEVICE void unpack(const Raw& raw, u32, u32, Columns& out) { unpack_non_linear(raw.qs, raw.d, out); }
};

// Two E2M1 values from bits 0..4 and 16..20: their bits are those of an f16 that is 2^14 times too small.
DEVICE u32 e2m1(u32 lanes) { return h2_mul(((lanes & 0x00080008) << 12) | ((lanes & 0x00070007) << 9), 0x74007400); }
DEVICE u32 e8m0(u32 e) { return h2_splat(__uint_as_float(e << 23 | (e + 1 & 256) << 14)); }

template <>
struct Encoding<MXFP4> {
    static const bool SPLIT = false;
    static const bool IS_LARGE = false;
    struct Raw {
        u32 qs[4], e;
    };
    static DEVICE void load(Raw& raw, const RowAddress& row, u32 k, u32 h, u32) {
        const u8* block = row.plane[0] + (k / 32 + h) * 17;
        raw.e = __ldg(block);
        load_unaligned(raw.qs, block + 1);
    }
    static DEVICE void unpack(const Raw& raw, u32, u32, Columns& out) {
        u32 scale = e8m0(raw.e);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 lanes = i & 1 ? bytes_23(raw.qs[i / 2]) : bytes_01(raw.qs[i / 2]);
            out.a[i] = h2_mul(e2m1(lanes), scale);
            out.b[i] = h2_mul(e2m1(lanes >> 4), scale);
        }
    }
};

// Nibbles 0..8 of a word in order: pairs (0, 1), (2, 3), (4, 5), (6, 7) in lanes, each nibble in bits 0..4.
DEVICE void ordered_nibbles(u32 w, u32 (&lanes)[4]) {
    u32 n04 = w & 0x000f000f, n15 = (w >> 4) & 0x000f000f;
    u32 n26 = (w >> 8) & 0x000f000f, n37 = (w >> 12) & 0x000f000f;
    lanes[0] = __byte_perm(n04, n15, 0x5410);
    lanes[1] = __byte_perm(n26, n37, 0x5410);
    lanes[2] = __byte_perm(n04, n15, 0x7632);
    lanes[3] = __byte_perm(n26, n37, 0x7632);
}

template <>
struct Encoding<MXFP4_PLANES> {
    static const bool SPLIT = false;
    static const bool IS_LARGE = false;
    struct Raw {
        u32 qs[4], e;
    };
    static DEVICE void load(Raw& raw, const RowAddress& row, u32 k, u32 h, u32) {
        raw.e = __ldg(row.plane[1] + k / 32 + h);
        load_16(raw.qs, row.plane[0] + k / 2 + 16 * h);
    }
    static DEVICE void unpack(const Raw& raw, u32, u32, Columns& out) {
        u32 scale = e8m0(raw.e);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 lanes[4];
            ordered_nibbles(raw.qs[i], lanes);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 value = h2_mul(e2m1(lanes[j]), scale);
                if (i < 2) out.a[4 * i + j] = value;
                else out.b[4 * i + j - 8] = value;
            }
        }
    }
};

// An e4m3 as f32; NaN (all ones) becomes 480.
DEVICE float f32_of_e4m3(u32 code) {
    return __uint_as_float((code & 128) << 24 | (code & 127) << 20) * __uint_as_float(247u << 23);
}

template <>
struct Encoding<NVFP4> {
    static const bool SPLIT = false;
    static const bool IS_LARGE = false;
    struct Raw {
        u32 qs[4], scales;
        // The matrix's scale, and whether it divides.
        float scale;
        u32 divides;
    };
    static DEVICE void load(Raw& raw, const RowAddress& row, u32 k, u32 h, u32 kind) {
        load_16(raw.qs, row.plane[0] + k / 2 + 16 * h);
        raw.scales = load_u16(row.plane[1] + k / 16 + 2 * h);
        raw.scale = __ldg((const float*)row.plane[2]);
        raw.divides = kind >> 24 & 1;
    }
    static DEVICE void unpack(const Raw& raw, u32, u32, Columns& out) {
        const float factor = raw.divides ? 1.0f / raw.scale : raw.scale;
        u32 scales[2] = {h2_splat(f32_of_e4m3(raw.scales & 255) * factor), h2_splat(f32_of_e4m3(raw.scales >> 8) * factor)};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 lanes[4];
            ordered_nibbles(raw.qs[i], lanes);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 value = h2_mul(e2m1(lanes[j]), scales[i / 2]);
                if (i < 2) out.a[4 * i + j] = value;
                else out.b[4 * i + j - 8] = value;
            }
        }
    }
};

struct FloatRaw {
    u32 words[4][4];
};
DEVICE void load_floats(FloatRaw& raw, const u8* from) {
#pragma unroll
    for (int i = 0; i < 4; i++) load_16(raw.words[i], from + 16 * i);
}

template <>
struct Encoding<F16> {
    static const bool SPLIT = false;
    static const bool IS_LARGE = true;
    typedef FloatRaw Raw;
    static DEVICE void load(Raw& raw, const RowAddress& row, u32 k, u32 h, u32) {
        load_floats(raw, row.plane[0] + 2 * (k + 32 * h));
    }
    static DEVICE void unpack(const Raw& raw, u32, u32, Columns& out) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out.a[i] = raw.words[i / 4][i % 4];
            out.b[i] = raw.words[2 + i / 4][i % 4];
        }
    }
};

// Magnitudes under 2^-14 lose bits; above 65504 they would become infinite.
template <>
struct Encoding<BF16> {
    static const bool SPLIT = false;
    static const bool IS_LARGE = true;
    typedef FloatRaw Raw;
    static DEVICE void load(Raw& raw, const RowAddress& row, u32 k, u32 h, u32) {
        load_floats(raw, row.plane[0] + 2 * (k + 32 * h));
    }
    static DEVICE u32 half_pair(u32 w) { return h2_of(__uint_as_float(w << 16), __uint_as_float(w & 0xffff0000)); }
    static DEVICE void unpack(const Raw& raw, u32, u32, Columns& out) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out.a[i] = half_pair(raw.words[i / 4][i % 4]);
            out.b[i] = half_pair(raw.words[2 + i / 4][i % 4]);
        }
    }
};

// `kind` is that of `Format` in `../weights.h`: bits 8..16 the columns of a group, or 0, bits 16..20 those of a code, bit 24
// whether scales are bfloat16, bit 27 whether there are zero points instead of biases, bit 28 whether those are stored.
DEVICE bool has_zeros(u32 kind) { return kind >> 28 & 1 && (kind & 255) == AFFINE; }

// What is stored of a group: its scale, and a bias or a word of zero points. What that stands for is decided when it is needed: a
// branch between loads would wait for those in front.
struct StoredAffine {
    u32 scale, other, zero, kind;
};
DEVICE StoredAffine load_affine(const RowAddress& row, u32 column, u32 kind) {
    // Groups have 32, 64 or 128 columns, or all.
    const u32 runs = kind >> 13 & 7, group = runs == 0 ? 0 : column / 32 >> (runs >> 1);
    // Integers without zero points have no third plane.
    const bool has_other = !(kind >> 27 & 1) || has_zeros(kind);
    const u8* const other = has_other ? row.plane[2] : row.plane[1];
    return {load_u16(row.plane[1] + 2 * group), load_u16(other + (has_zeros(kind) ? 4 * group + row.zero / 16 * 2 : 2 * group)),
            row.zero % 16, kind};
}

// A value is (1024 + code − less) · scale + bias, of two lanes.
struct AffineScale {
    float scale, bias;
    u32 less;
};
DEVICE AffineScale affine_scale(const StoredAffine& s) {
    const bool bf16 = s.kind >> 24 & 1;
    const float scale = bf16 ? f32_of_bf16(s.scale) : f32_of_f16(s.scale);
    if (s.kind >> 27 & 1) {
        const u32 middle = 1u << ((s.kind >> 16 & 15) - 1);
        const u32 zero = has_zeros(s.kind) ? s.other >> s.zero & (2 * middle - 1) : middle;
        return {scale, 0.0f, H1024 + zero * 0x00010001};
    }
    return {scale, bf16 ? f32_of_bf16(s.other) : f32_of_f16(s.other), H1024};
}

template <>
struct Encoding<AFFINE4> {
    static const bool SPLIT = false;
    static const bool IS_LARGE = false;
    struct Raw {
        u32 qs[4];
        StoredAffine stored;
    };
    static DEVICE void load(Raw& raw, const RowAddress& row, u32 k, u32 h, u32 kind) {
        load_16(raw.qs, row.plane[0] + k / 2 + 16 * h);
        raw.stored = load_affine(row, k + 32 * h, kind);
    }
    static DEVICE void unpack(const Raw& raw, u32, u32, Columns& out) {
        const AffineScale s = affine_scale(raw.stored);
        u32 scale = h2_splat(s.scale), bias = h2_splat(s.bias);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 lanes[4];
            ordered_nibbles(raw.qs[i], lanes);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 value = h2_fma(h2_sub(lanes[j] | H1024, s.less), scale, bias);
                if (i < 2) out.a[4 * i + j] = value;
                else out.b[4 * i + j - 8] = value;
            }
        }
    }
};

template <>
struct Encoding<AFFINE8> {
    static const bool SPLIT = false;
    static const bool IS_LARGE = true;
    struct Raw {
        u32 qs[2][4];
        StoredAffine stored;
    };
    static DEVICE void load(Raw& raw, const RowAddress& row, u32 k, u32 h, u32 kind) {
        load_16(raw.qs[0], row.plane[0] + k + 32 * h);
        load_16(raw.qs[1], row.plane[0] + k + 32 * h + 16);
        raw.stored = load_affine(row, k + 32 * h, kind);
    }
    static DEVICE void unpack(const Raw& raw, u32, u32, Columns& out) {
        const AffineScale s = affine_scale(raw.stored);
        u32 scale = h2_splat(s.scale), bias = h2_splat(s.bias);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            u32 q = (i & 1 ? bytes_23(raw.qs[i / 8][i / 2 % 4]) : bytes_01(raw.qs[i / 8][i / 2 % 4])) | H1024;
            u32 value = h2_fma(h2_sub(q, s.less), scale, bias);
            if (i < 8) out.a[i] = value;
            else out.b[i - 8] = value;
        }
    }
};

// plane[1] is the row of scales for the row, or for its block of 128 rows.
template <>
struct Encoding<FP8> {
    static const bool SPLIT = false;
    static const bool IS_LARGE = true;
    struct Raw {
        u32 qs[2][4];
        // The word that has the scale, by how much it is to be shifted, and what that stands for, as of affine encodings.
        u32 word, shift, kind;
    };
    static DEVICE void load(Raw& raw, const RowAddress& row, u32 k, u32 h, u32 kind) {
        u32 block = kind >> 28 & 1 ? k / 32 + h : kind >> 26 & 3 ? 0 : (k + 32 * h) / 128;
        load_16(raw.qs[0], row.plane[0] + k + 32 * h);
        load_16(raw.qs[1], row.plane[0] + k + 32 * h + 16);
        const u8* const at = row.plane[1] + (kind >> 24 & 1 ? 2 * block : kind >> 25 & 1 ? block : 4 * block);
        raw.shift = ((u32)(u64)at & 3) * 8;
        raw.word = __ldg((const u32*)(at - raw.shift / 8));
        raw.kind = kind;
    }
    static DEVICE float scale_of(const Raw& raw) {
        const u32 bits = raw.word >> raw.shift;
        return raw.kind >> 24 & 1 ? f32_of_bf16(bits & 0xffff) : __uint_as_float(raw.kind >> 25 & 1 ? (bits & 255) << 23 : bits);
    }
    // e4m3 bits are those of an f16 that is 2^8 times too small; NaN (all ones) becomes 480.
    static DEVICE void unpack(const Raw& raw, u32, u32, Columns& out) {
        u32 scale = h2_splat(scale_of(raw));
#pragma unroll
        for (int i = 0; i < 16; i++) {
            u32 q = i & 1 ? bytes_23(raw.qs[i / 8][i / 2 % 4]) : bytes_01(raw.qs[i / 8][i / 2 % 4]);
            u32 value = ((q & 0x00800080) << 8) | ((q & 0x007f007f) << 7);
            value = h2_mul(h2_mul(value, 0x5c005c00 /* 256 */), scale);
            if (i < 8) out.a[i] = value;
            else out.b[i - 8] = value;
        }
    }
};

#include "unpack_low_bit.h"

// `panel_columns.h` for encodings whose rows lie in planes: codes in the first one, scales and what else belongs to them in others,
// which are copied to shared memory behind a panel's codes.
//
// Blocks are of 32 columns that have a scale in common. Which columns of a row they are is free as long as that holds: a lane reads
// as many bytes at once as columns with one scale allow.
#pragma once
#include "panel_columns.h"

// How far behind a multiple of 16 bytes what a plane has of a panel begins, of which `row` is the first one: not at all where rows have
// scales of their own.
DEVICE u32 begin_of(const Format& f, u32 plane, u32 row) {
    if (DTYPE == FP8 && plane == 1) return f.kind >> 26 & 7 ? 0 : row / 128 * f.strides[1] & 15;
    if (DTYPE == AFFINE4 && plane == 2) return has_zeros(f.kind) ? row / 8 * f.strides[2] & 15 : 0;
    if (DTYPE == AFFINE8 && plane == 2) return has_zeros(f.kind) ? row / 4 * f.strides[2] & 15 : 0;
    return 0;
}

// The first or last four of a warp's blocks of 32 columns by `add`, as far as they are there.
template <u32 half, class Add>
DEVICE void for_half(u32 blocks, Add add) {
    if (blocks >= 4 * half + 4) {
#pragma unroll
        for (u32 k = 0; k < 4; k++) add(k);
    } else {
#pragma unroll
        for (u32 k = 0; k < 3; k++) {
            if (4 * half + k >= blocks) break;
            add(k);
        }
    }
}

// Bytes of four blocks.
DEVICE u32 bytes_of_4(const u8* p, u32 stride) {
    if (stride % 4 == 0) return *(const u32*)p;
    return p[0] | (u32)p[1] << 8 | (u32)p[2] << 16 | (u32)p[3] << 24;
}
// The power of two of byte i, which is infinite for what should be no number; the smallest is 0.
DEVICE float power_of_two(u32 bytes, u32 i) { return __uint_as_float((bytes >> (8 * i) & 255) << 23); }

// Eight columns of a token as codes of four bits in a word have them by masks: 0 and 4, 1 and 5, 2 and 6, 3 and 7.
DEVICE void in_order_of_nibbles(u32 (&to)[2][2], const uint4& v) {
    to[0][0] = __byte_perm(v.x, v.z, 0x5410), to[0][1] = __byte_perm(v.x, v.z, 0x7632);
    to[1][0] = __byte_perm(v.y, v.w, 0x5410), to[1][1] = __byte_perm(v.y, v.w, 0x7632);
}
DEVICE float sum_of_8(const uint4& v) { return sum_of_4(make_uint2(v.x, v.y)) + sum_of_4(make_uint2(v.z, v.w)); }

// A word's eight four-bit floats in that order, as f16 that are 2^14 times too small.
DEVICE void floats_of_word(u32 (&to)[4], u32 w) {
    const auto low = Columns256<MXFP4>::floats<false>(w), high = Columns256<MXFP4>::floats<true>(w);
    to[0] = low.even, to[1] = high.even, to[2] = low.odd, to[3] = high.odd;
}

// Activations of 256 columns: (part, block, product of 16 columns, register of b).
template <u32 PARTS>
struct BlocksOfX {
    u32 b[PARTS][8][2][2];
};

// Adds the products of N eights of tokens with block k of 32 columns, scaled.
template <u32 N, class X>
DEVICE void add_scaled(Sums<N>& sums, const u32 (&a)[2][4], const float (&s)[2], const X& x, u32 k) {
    const float none[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (u32 n = 0; n < N; n++) {
        float r[4];
        mma_16816(r, a[0], x.b[n][k][0], none);
        mma_16816(r, a[1], x.b[n][k][1], r);
#pragma unroll
        for (u32 i = 0; i < 4; i++) sums.v[n][i] += s[i / 2] * r[i];
    }
}

template <u32 N>
DEVICE void add_all(Sums<N>& sums, const Sums<N>& own, float factor) {
#pragma unroll
    for (u32 n = 0; n < N; n++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) sums.v[n][i] += factor * own.v[n][i];
}

// Codes of 4 or 8 bits with a scale and a bias or a zero point for each group of columns, or a scale for a row. Rows are multiples of
// 128 columns.
template <u32 bits>
struct ColumnsOfCodes {
    // (part, group, token): sums times 2^-24.
    static const u32 PLANES = 3, BYTES = 32 * bits, SUMS = 8 * 8 * 4, APART = 1;
    static const bool LOOSE = true;
    template <u32 PARTS>
    using X = BlocksOfX<PARTS>;
    // Blocks that have a scale in common, up to four.
    static DEVICE u32 run_of(u32 kind) {
        const u32 group = kind >> 8 & 255;
        return group == 32 ? 1 : group == 64 ? 2 : 4;
    }
    template <class X, class Load, class Half>
    static DEVICE void enter(X& x, u32 n, float* sums, Load load, Half, const Format& format) {
        const u32 t = threadIdx.x & 3, g = threadIdx.x >> 2 & 7, run = run_of(format.kind);
        // Of which a lane has the codes side by side.
        const u32 near = bits == 8 ? 1 : run;
        float sum = 0.0f;
#pragma unroll
        for (u32 k = 0; k < 8; k++) {
            const uint4 v = load((k & ~(near - 1)) * 4 + t * near + (k & (near - 1)));
            u32 (&to)[2][2] = x.b[n][k];
            if (bits == 4) {
                in_order_of_nibbles(to, v);
                // Codes of high nibbles are 16 times too large.
                to[0][1] = h2_mul(to[0][1], SIXTEENTH), to[1][1] = h2_mul(to[1][1], SIXTEENTH);
            } else {
                to[0][0] = __byte_perm(v.x, v.y, 0x5410), to[0][1] = __byte_perm(v.x, v.y, 0x7632);
                to[1][0] = __byte_perm(v.z, v.w, 0x5410), to[1][1] = __byte_perm(v.z, v.w, 0x7632);
            }
            sum = sum_of_quad(sum_of_8(v)) * (1.0f / TWO_24) + ((k & (run - 1)) != 0 ? sum : 0.0f);
            // The last one of a group stays.
            if (t == 0) sums[(n * 8 + (k >> run / 2)) * 8 + g] = sum;
        }
    }
    // A lane's codes of four blocks of a row.
    template <u32 run>
    static DEVICE void load_codes(u32 (&to)[bits], const u8* from) {
        const u32 t = threadIdx.x & 3;
        if (bits == 8) {
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                const uint2 v = *(const uint2*)(from + 32 * k + 8 * t);
                to[(2 * k) % bits] = v.x, to[(2 * k + 1) % bits] = v.y;
            }
        } else if (run == 4) {
            const uint4 v = *(const uint4*)(from + 16 * t);
            to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
        } else if (run == 2) {
            const uint2 v = *(const uint2*)(from + 8 * t), w = *(const uint2*)(from + 32 + 8 * t);
            to[0] = v.x, to[1] = v.y, to[2] = w.x, to[3] = w.y;
        } else {
#pragma unroll
            for (u32 k = 0; k < 4; k++) to[k] = *(const u32*)(from + 16 * k + 4 * t);
        }
    }
    // Block k of four as registers of a: pairs of codes that are as large as `enter` expects.
    static DEVICE void put_codes(u32 (&a)[2][4], const u32 (&codes)[bits], u32 k, u32 high_row) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 w = bits == 8 ? codes[(2 * k + i) % bits] : codes[k] >> (8 * i);
            a[i][high_row] = w & (bits == 8 ? 0x00ff00ff : 0x000f000f);
            a[i][high_row + 2] = bits == 8 ? w >> 8 & 0x00ff00ff : w & 0x00f000f0;
        }
    }
    // 16-bit floats of the groups of four blocks.
    template <u32 run>
    static DEVICE void halves(float (&to)[4 / run], const u8* p, bool bf16) {
        u32 w[2];
        if (run == 1) {
            const uint2 v = *(const uint2*)p;
            w[0] = v.x, w[1] = v.y;
        } else {
            w[0] = run == 2 ? *(const u32*)p : *(const u16*)p;
        }
#pragma unroll
        for (u32 j = 0; j < 4 / run; j++) {
            const u32 two = w[j / 2];
            const float wide = __uint_as_float(j % 2 ? two & 0xffff0000 : two << 16);
            to[j] = bf16 ? wide : f32_of_f16(j % 2 ? two >> 16 : two);
        }
    }
    // Four blocks of codes less zero points, or of codes to which biases are added.
    template <u32 N, u32 half, u32 run, bool has_biases, class X>
    static DEVICE void add_half(Sums<N>& sums, const u8* const (&rows)[2], const X& x, const float* of_x, bool bf16,
                                const Beside& beside) {
        // Groups, and how many sums there are of each, so that products do not wait for each other: as many for any number of tokens, for
        // the same bits.
        constexpr u32 GROUPS = 4 / run, APART_SUMS = run > 1 ? 2 : 1;
        const Format& f = beside.format;
        const u32 group = f.kind >> 8 & 255, first = group == 0 ? 0 : (beside.column + 128 * half) / (32 * run);
        const u32 middle = 1 << (bits - 1);
        u32 codes[2][bits];
        // Scales, and biases or negated zero points.
        float s[2][GROUPS], b[2][GROUPS];
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 row = beside.row + i * beside.apart;
            load_codes<run>(codes[i], rows[i] + half * (16 * bits));
            halves<run>(s[i], beside.at(1, i) + 2 * first, bf16);
            if (has_biases) {
                halves<run>(b[i], beside.at(2, i) + 2 * first, bf16);
            } else if (f.kind >> 28 & 1) {
                const u8* const of_rows = beside.planes[1] + i * beside.next + row * bits / 32 * f.strides[2];
                const u32* const words = (const u32*)of_rows + first;
#pragma unroll
                for (u32 j = 0; j < GROUPS; j++) b[i][j] = -(float)(words[j] >> row * bits % 32 & (2 * middle - 1));
            } else {
#pragma unroll
                for (u32 j = 0; j < GROUPS; j++) b[i][j] = -(float)middle;
            }
        }
#pragma unroll
        for (u32 j = 0; j < GROUPS; j++) {
            float r[N][APART_SUMS][4] = {};
#pragma unroll
            for (u32 k = j * run; k < (j + 1) * run; k++) {
                u32 a[2][4];
                put_codes(a, codes[0], k, 0);
                put_codes(a, codes[1], k, 1);
#pragma unroll
                for (u32 n = 0; n < N; n++)
#pragma unroll
                    for (u32 i = 0; i < 2; i++) {
                        float (&to)[4] = r[n][i % APART_SUMS];
                        mma_16816(to, a[i], x.b[n][4 * half + k][i], to);
                    }
            }
#pragma unroll
            for (u32 n = 0; n < N; n++) {
                const float2 z = ((const float2*)of_x)[(n * 8 + half * GROUPS + j) * 4 + (threadIdx.x & 3)];
                const float own[2] = {z.x, z.y};
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    const float product = APART_SUMS == 1 ? r[n][0][i] : r[n][0][i] + r[n][APART_SUMS - 1][i];
                    const float added = b[i / 2][j] * own[i & 1];
                    sums.v[n][i] += s[i / 2][j] * (has_biases ? product : product + added);
                    if (has_biases) sums.v[n][i] += added;
                }
            }
        }
    }
    template <u32 N, u32 run, bool has_biases, class X>
    static DEVICE void add(Sums<N>& sums, const u8* const (&rows)[2], const X& x, const float* of_x, u32 blocks, bool bf16,
                           const Beside& beside) {
        Sums<N> own = {};
        add_half<N, 0, run, has_biases>(own, rows, x, of_x, bf16, beside);
        if (blocks > 4) add_half<N, 1, run, has_biases>(own, rows, x, of_x, bf16, beside);
        add_all(sums, own, TWO_24);
    }
    template <u32 N, bool has_biases, class X>
    static DEVICE void add_runs(Sums<N>& sums, const u8* const (&rows)[2], const X& x, const float* of_x, u32 blocks,
                                const Beside& beside) {
        const u32 run = run_of(beside.format.kind);
        const bool bf16 = beside.format.kind >> 24 & 1;
        if (run == 4) add<N, 4, has_biases>(sums, rows, x, of_x, blocks, bf16, beside);
        else if (run == 2) add<N, 2, has_biases>(sums, rows, x, of_x, blocks, bf16, beside);
        // Which kind scales are is known where there are many.
        else if (bf16) add<N, 1, has_biases>(sums, rows, x, of_x, blocks, true, beside);
        else add<N, 1, has_biases>(sums, rows, x, of_x, blocks, false, beside);
    }
    template <u32 N, class X>
    static DEVICE void multiply(Sums<N>& sums, const u8* low, const u8* high, const X& x, const float* of_x, u32 blocks,
                                const Beside& beside) {
        const u8* const rows[2] = {low, high};
        if (beside.format.kind >> 27 & 1) add_runs<N, false>(sums, rows, x, of_x, blocks, beside);
        else add_runs<N, true>(sums, rows, x, of_x, blocks, beside);
    }
};

template <>
struct Columns256<AFFINE4> : ColumnsOfCodes<4> {};
template <>
struct Columns256<AFFINE8> : ColumnsOfCodes<8> {};

template <>
struct Columns256<FP8> {
    static const u32 PLANES = 2, BYTES = 256, SUMS = 0, APART = 1;
    static const bool LOOSE = true;
    template <u32 PARTS>
    using X = BlocksOfX<PARTS>;
    template <class X, class Load, class Half>
    static DEVICE void enter(X& x, u32 n, float*, Load load, Half, const Format&) {
        const u32 t = threadIdx.x & 3;
#pragma unroll
        for (u32 k = 0; k < 8; k++) {
            const uint4 v = load(4 * k + t);
            x.b[n][k][0][0] = v.x, x.b[n][k][0][1] = v.y;
            x.b[n][k][1][0] = v.z, x.b[n][k][1][1] = v.w;
        }
    }
    // Codes as pairs of f16, which are exact: two, and four.
    static DEVICE u32 floats(u32 codes) { return floats_of_2(codes); }
    static DEVICE void floats(u32& first, u32& second, u32 codes) { floats_of_4(first, second, codes); }
    static DEVICE void load_codes(u32 (&a)[2][4], const u8* const (&rows)[2], u32 k) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const uint2 v = *(const uint2*)(rows[i] + 32 * k + 8 * (threadIdx.x & 3));
            floats(a[0][i], a[0][i + 2], v.x);
            floats(a[1][i], a[1][i + 2], v.y);
        }
    }
    // A scale as it is stored.
    static DEVICE float scale_at(u32 kind, const u8* p, u32 i) {
        return kind >> 24 & 1 ? f32_of_bf16(((const u16*)p)[i])
             : kind >> 25 & 1 ? power_of_two(p[i], 0)
                              : ((const float*)p)[i];
    }
    // Four blocks that have a scale in common, as 128 columns do.
    template <u32 N, u32 half, class X>
    static DEVICE void add_same(Sums<N>& sums, const u8* const (&rows)[2], const float (&s)[2], const X& x, u32 blocks) {
        // Two sums, which do not wait for each other.
        float r[N][2][4] = {};
        for_half<half>(blocks, [&](u32 k) {
            u32 a[2][4];
            load_codes(a, rows, 4 * half + k);
#pragma unroll
            for (u32 n = 0; n < N; n++)
#pragma unroll
                for (u32 i = 0; i < 2; i++) mma_16816(r[n][i], a[i], x.b[n][4 * half + k][i], r[n][i]);
        });
#pragma unroll
        for (u32 n = 0; n < N; n++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) sums.v[n][i] += s[i / 2] * (r[n][0][i] + r[n][1][i]);
    }
    // Four blocks with powers of two of their own.
    template <u32 N, u32 half, class X>
    static DEVICE void add_powers(Sums<N>& sums, const u8* const (&rows)[2], const X& x, u32 blocks, const Beside& beside) {
        const u32 stride = beside.format.strides[1];
        const u32 from = beside.column / 32 + 4 * half;
        const u32 powers[2] = {bytes_of_4(beside.at(1, 0) + from, stride), bytes_of_4(beside.at(1, 1) + from, stride)};
        for_half<half>(blocks, [&](u32 k) {
            u32 a[2][4];
            load_codes(a, rows, 4 * half + k);
            add_scaled(sums, a, {power_of_two(powers[0], k), power_of_two(powers[1], k)}, x, 4 * half + k);
        });
    }
    template <u32 N, class X>
    static DEVICE void multiply(Sums<N>& sums, const u8* low, const u8* high, const X& x, const float*, u32 blocks,
                                const Beside& beside) {
        const u8* const rows[2] = {low, high};
        const u32 kind = beside.format.kind;
        if (kind >> 28 & 1) {
            add_powers<N, 0>(sums, rows, x, blocks, beside);
            if (blocks > 4) add_powers<N, 1>(sums, rows, x, blocks, beside);
            return;
        }
        const bool of_rows = kind >> 27 & 1, whole = kind >> 26 & 1;
        const u8* const first = of_rows ? beside.at(1, 0) : beside.planes[0];
        const u8* const second = of_rows ? beside.at(1, 1) : beside.planes[0] + beside.next;
        const u32 block = of_rows || whole ? 0 : beside.column / 128, next = of_rows || whole ? 0 : 1;
        const float s[2] = {scale_at(kind, first, block), scale_at(kind, second, block)};
        add_same<N, 0>(sums, rows, s, x, blocks);
        if (blocks <= 4) return;
        add_same<N, 1>(sums, rows, {scale_at(kind, first, block + next), scale_at(kind, second, block + next)}, x, blocks);
    }
};

template <>
struct Columns256<MXFP4_PLANES> {
    static const u32 PLANES = 2, BYTES = 128, SUMS = 0, APART = 1;
    static const bool LOOSE = true;
    template <u32 PARTS>
    using X = BlocksOfX<PARTS>;
    template <class X, class Load, class Half>
    static DEVICE void enter(X& x, u32 n, float*, Load load, Half, const Format&) {
#pragma unroll
        for (u32 k = 0; k < 8; k++) in_order_of_nibbles(x.b[n][k], load(4 * k + (threadIdx.x & 3)));
    }
    template <u32 N, u32 half, class X>
    static DEVICE void add_half(Sums<N>& sums, const u8* const (&rows)[2], const X& x, u32 blocks, const Beside& beside) {
        const u32 stride = beside.format.strides[1];
        const u32 from = beside.column / 32 + 4 * half;
        const u32 powers[2] = {bytes_of_4(beside.at(1, 0) + from, stride), bytes_of_4(beside.at(1, 1) + from, stride)};
        for_half<half>(blocks, [&](u32 k) {
            u32 a[2][4];
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                u32 four[4];
                floats_of_word(four, *(const u32*)(rows[i] + 64 * half + 16 * k + 4 * (threadIdx.x & 3)));
                a[0][i] = four[0], a[0][i + 2] = four[1], a[1][i] = four[2], a[1][i + 2] = four[3];
            }
            add_scaled(sums, a, {power_of_two(powers[0], k), power_of_two(powers[1], k)}, x, 4 * half + k);
        });
    }
    template <u32 N, class X>
    static DEVICE void multiply(Sums<N>& sums, const u8* low, const u8* high, const X& x, const float*, u32 blocks,
                                const Beside& beside) {
        const u8* const rows[2] = {low, high};
        Sums<N> own = {};
        add_half<N, 0>(own, rows, x, blocks, beside);
        if (blocks > 4) add_half<N, 1>(own, rows, x, blocks, beside);
        add_all(sums, own, 16384.0f);
    }
};

// A value times the scale of its 16 columns is an f16, exactly, so that a lane may have any columns: 64 of a row side by side.
template <>
struct Columns256<NVFP4> {
    static const u32 PLANES = 3, BYTES = 128, SUMS = 0, APART = 1;
    static const bool LOOSE = true;
    template <u32 PARTS>
    using X = BlocksOfX<PARTS>;
    template <class X, class Load, class Half>
    static DEVICE void enter(X& x, u32 n, float*, Load load, Half, const Format&) {
#pragma unroll
        for (u32 k = 0; k < 8; k++) in_order_of_nibbles(x.b[n][k], load(8 * (threadIdx.x & 3) + k));
    }
    // Two scales times 2^7, for which all values are normal numbers.
    static DEVICE u32 scales(u32 codes) { return h2_mul(Columns256<FP8>::floats(codes), 0x58005800); }
    template <u32 N, class X>
    static DEVICE void multiply(Sums<N>& sums, const u8* low, const u8* high, const X& x, const float*, u32 blocks,
                                const Beside& beside) {
        const Format& f = beside.format;
        const u32 t = threadIdx.x & 3;
        const u8* const rows[2] = {low + 32 * t, high + 32 * t};
        // Of columns that are not there, activations are zeros and scales are made so.
        const bool present = 2 * t < blocks;
        const u32 from = beside.column / 16 + 4 * t;
        u32 codes[2];
#pragma unroll
        for (u32 i = 0; i < 2; i++) codes[i] = present ? *(const u32*)(beside.at(1, i) + from) : 0;
        // Two sums, which do not wait for each other.
        Sums<N> own[2] = {};
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            uint4 words[2];
            u32 two[2];
#pragma unroll
            for (u32 i = 0; i < 2; i++)
                words[i] = *(const uint4*)(rows[i] + 16 * half), two[i] = scales(codes[i] >> (16 * half));
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                u32 a[2][4];
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    const u32 w = k == 0 ? words[i].x : k == 1 ? words[i].y : k == 2 ? words[i].z : words[i].w;
                    const u32 scale = k < 2 ? splat_low(two[i]) : splat_high(two[i]);
                    u32 four[4];
                    floats_of_word(four, w);
                    a[0][i] = h2_mul(four[0], scale), a[0][i + 2] = h2_mul(four[1], scale);
                    a[1][i] = h2_mul(four[2], scale), a[1][i + 2] = h2_mul(four[3], scale);
                }
#pragma unroll
                for (u32 n = 0; n < N; n++)
#pragma unroll
                    for (u32 i = 0; i < 2; i++) mma_16816(own[i].v[n], a[i], x.b[n][4 * half + k][i], own[i].v[n]);
            }
        }
        float factors[2];
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const float scale = *(const float*)(beside.planes[1] + i * beside.next);
            factors[i] = 128.0f * (f.kind >> 24 & 1 ? 1.0f / scale : scale);
        }
#pragma unroll
        for (u32 n = 0; n < N; n++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) sums.v[n][i] += factors[i / 2] * (own[0].v[n][i] + own[1].v[n][i]);
    }
};

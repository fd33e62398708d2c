// Products of some pairs with their experts on tensor cores, whose weights pass through shared memory (`ring.h`).
//
// A panel is 16 rows of a weight. A warp multiplies 256 of its columns by up to 16 tokens, whose activations it keeps in registers
// as long as the expert stays the same; sums of a panel's warps meet in shared memory. Integers enter products as they are: small
// ones are f16 without conversion (the bits of n are n · 2^-24), and sums of a block of columns are scaled in f32.
//
// Compiled once for each encoding: DTYPE, with names that end in it: NAME(…).
#include "matrices.h"
#include "ring.h"

const u32 PANEL = RING_PANEL, PANELS = RING_PANELS, EIGHT = 8, COLUMNS = 256;
// Results of a warp, a panel and eight tokens: (4 / PER, lane, PER), of which a warp that adds them up takes PER of a lane at once.
const u32 RESULTS = 4 * 32;
// Warps of a group: of the widest rows, of those of which a multiprocessor has two groups, and of those whose threads have more
// registers.
const u32 WIDE_WARPS = 16, MOST_WARPS = 8, FEW_WARPS = 6;
const float TWO_24 = 16777216.0f;
const u32 SIXTEENTH = 0x2c002c00;

// d = a · b + c: a (16, 16), b (16, 8).
DEVICE void mma_16816(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
// d += a · b: a (16, 8), b (8, 8).
DEVICE void mma_1688(float (&d)[4], u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b));
}

DEVICE float sum_of_4(const uint2& v) {
    return (f32_of_f16(v.x) + f32_of_f16(v.x >> 16)) + (f32_of_f16(v.y) + f32_of_f16(v.y >> 16));
}
DEVICE float sum_of_quad(float v) {
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}
// Bits of `a` where `mask` has ones, of `b` elsewhere.
DEVICE u32 chosen_bits(u32 mask, u32 a, u32 b) {
    u32 d;
    // The compiler makes two of it.
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(d) : "r"(mask), "r"(a), "r"(b));
    return d;
}
// Byte i of four as f32, by a conversion that takes any byte of a register.
DEVICE float signed_byte(u32 bytes, u32 i) {
    float f;
    asm("{ .reg .s32 byte; bfe.s32 byte, %1, %2, 8; cvt.rn.f32.s32 %0, byte; }" : "=f"(f) : "r"(bytes), "r"(8 * i));
    return f;
}
DEVICE float unsigned_byte(u32 bytes, u32 i) {
    float f;
    asm("{ .reg .u32 byte; bfe.u32 byte, %1, %2, 8; cvt.rn.f32.u32 %0, byte; }" : "=f"(f) : "r"(bytes), "r"(8 * i));
    return f;
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
// from 4e on, and `sums` is memory of the warp's. `multiply` adds products with the rows g and g + 8 of a panel.
template <int dtype>
struct Columns256;

template <>
struct Columns256<Q4_K> {
    // Bytes of 256 columns, and of a warp's `sums` of eight tokens.
    static const u32 BYTES = 144, SUMS = 0;
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
    static DEVICE void enter(X& x, u32 n, float*, Load load, Half) {
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
    // Blocks 2j and 2j + 1 of N eights of tokens.
    template <u32 N, u32 j, class X>
    static DEVICE void add_blocks(Sums<N>& sums, const u8* low, const u8* high, const Scales& of_low, const Scales& of_high,
                                  const X& x) {
        const u32 at = 16 + 32 * j + 8 * (threadIdx.x & 3);
        const uint2 l = *(const uint2*)(low + at), h = *(const uint2*)(high + at);
        u32 a[2][2][4];
#pragma unroll
        for (u32 w = 0; w < 2; w++) {
            const u32 own[4] = {w ? l.y : l.x, w ? h.y : h.x, (w ? l.y : l.x) >> 8, (w ? h.y : h.x) >> 8};
#pragma unroll
            for (u32 i = 0; i < 4; i++) a[0][w][i] = own[i] & 0x000f000f, a[1][w][i] = own[i] & 0x00f000f0;
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
    static DEVICE void multiply(Sums<N>& sums, const u8* low, const u8* high, const X& x, const float*) {
        const u32 t = threadIdx.x & 3;
        const uint4 l = *(const uint4*)low, h = *(const uint4*)high;
        const Scales of_low = scales_of(l), of_high = scales_of(h);
        Sums<N> own = {};
        add_blocks<N, 0>(own, low, high, of_low, of_high, x);
        add_blocks<N, 1>(own, low, high, of_low, of_high, x);
        add_blocks<N, 2>(own, low, high, of_low, of_high, x);
        add_blocks<N, 3>(own, low, high, of_low, of_high, x);
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
struct Columns256<Q6_K> {
    // (part, block of 16 columns, token): sums times −32 · 2^-24, in the order in which blocks are multiplied.
    static const u32 BYTES = 210, SUMS = 16 * 8 * 4;
    // Rows g and g + 8 of a panel are alike within a word.
    static const u32 APART = 1;
    template <u32 PARTS>
    struct X {
        // (part, half, 16 columns of each quarter of it, quarter, register of b)
        u32 b[PARTS][2][2][4][2];
    };
    template <class X, class Load, class Half>
    static DEVICE void enter(X& x, u32 n, float* sums, Load, Half half_of) {
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
    // Four bytes from an even address: `selector` is of the words that `p` and the next are in.
    static DEVICE u32 word(const u8* p, u32 selector) {
        return __byte_perm(*(const u32*)p, *(const u32*)(p + 4), selector);
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
        const u32 of_low[2] = {word(of_l, selector), word(of_l + 4, selector)};
        const u32 of_high[2] = {word(of_h, selector), word(of_h + 4, selector)};
        const u32 t = 4 * (threadIdx.x & 3);
#pragma unroll
        for (u32 sixteen = 0; sixteen < 2; sixteen++) {
            const u32 at = 64 * half + 16 * sixteen + t, bits = 128 + 32 * half + 16 * sixteen + t;
            const u32 l[3] = {word(low + at, selector), word(low + at + 32, selector), word(low + bits, selector)};
            const u32 h[3] = {word(high + at, selector), word(high + at + 32, selector), word(high + bits, selector)};
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
    static DEVICE void multiply(Sums<N>& sums, const u8* low, const u8* high, const X& x, const float* less) {
        const u32 beside = (u32)(u64)low & 2, selector = beside ? 0x5432 : 0x3210;
        Sums<N> own = {};
        add_half<N, 0>(own, low - beside, high - beside, selector, x, less);
        add_half<N, 1>(own, low - beside, high - beside, selector, x, less);
        const float d[2] = {f32_of_f16(*(const u16*)(low + 208)) * TWO_24, f32_of_f16(*(const u16*)(high + 208)) * TWO_24};
#pragma unroll
        for (u32 n = 0; n < N; n++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) sums.v[n][i] += d[i / 2] * own.v[n][i];
    }
};

typedef Columns256<DTYPE> Own;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Rows g of a panel go round its pieces, so that those that are read together meet different banks.
struct RowPlaces {
    u32 piece, of_piece, row;
};
DEVICE RowPlaces places_of(const RingConstants& s, u32 g) {
    const u32 piece = g & ((1 << s.halvings) - 1), of_piece = (g >> s.halvings) * Own::APART;
    return {piece, of_piece, piece * (PANEL >> s.halvings) + of_piece};
}
// How many rows those of g and g + 8 are apart, in the same piece.
DEVICE u32 rows_apart(const RingConstants& s) { return Own::APART == 2 ? 1 : EIGHT >> s.halvings; }

// Eights of tokens of a tile with up to `PARTS` of them.
template <u32 PARTS>
DEVICE u32 parts_of(const RingUnit& unit) {
    return PARTS == 2 && unit.count > EIGHT ? 2 : 1;
}

// A warp's part of a panel with N eights of tokens.
template <u32 N, u32 PARTS>
DEVICE void multiply_panel(float (&to)[PARTS * 4], const u8* low, u32 apart, const Own::X<PARTS>& x, const float (&scales)[PARTS][2],
                           const float* sums) {
    Sums<N> own = {};
    Own::multiply<N>(own, low, low + apart, x, sums);
#pragma unroll
    for (u32 n = 0; n < N; n++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) to[n * 4 + i] = own.v[n][i] * scales[n][i & 1];
}

// PER floats of a lane that lie side by side.
template <u32 PER>
struct __align__(4 * PER) Side {
    float v[PER];
};

// Passes a group's units through shared memory. `enter(unit, parts, x, scales, sums)` brings a tile's activations with what their
// results are scaled by, and `leave(unit, sums)` takes the sums of a unit: (team, warp, panel, result). See `ring_pass`.
template <u32 PARTS, u32 PER, bool early, class RowsOf, class Enter, class Leave>
DEVICE void stream(const RingTile* tiles, const u32* table, u32 stride, u32 units, const RingConstants& s, const RingCosts& costs,
                   RowsOf rows, Enter enter, Leave leave) {
    extern __shared__ __align__(128) u8 dynamic[];
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, all_warps = s.warps * s.teams;
    const u32 panel_bytes = s.piece_bytes << s.halvings, apart = rows_apart(s) * stride;
    const RowPlaces own_row = places_of(s, lane >> 2);
    float* const kept = (float*)(dynamic + RING_STAGES * s.teams * PANELS * panel_bytes);
    const u32 kept_floats = all_warps * PANELS * PARTS * RESULTS;
    float* const own_sums = kept + 2 * kept_floats + warp * (PARTS * Own::SUMS / 4);
    Side<PER>* const to = (Side<PER>*)(kept + warp * PANELS * PARTS * RESULTS) + lane;
    const u32 at = warp / s.warps * PANELS * panel_bytes + own_row.piece * s.piece_bytes + own_row.of_piece * stride +
                   warp % s.warps * Own::BYTES;
    // Whether both panels' instructions fit beside each other.
    constexpr bool roomy = PARTS == 1 || DTYPE == Q4_K;
    constexpr u32 at_once = roomy ? PANELS : 1;
    Own::X<PARTS> x;
    float scales[PARTS][2];
    auto begin = [&](const RingUnit& unit) {
        enter(unit, parts_of<PARTS>(unit), x, scales, own_sums);
        __syncwarp();
    };
    auto multiply = [&](const RingUnit& unit, u32 half, const u8* panels, auto between) {
        const bool one = parts_of<PARTS>(unit) == 1;
#pragma unroll at_once
        for (u32 m = 0; m < PANELS; m++) {
            const u8* low = panels + at + m * panel_bytes;
            float r[PARTS * 4];
            if (one) multiply_panel<1>(r, low, apart, x, scales, own_sums);
            else multiply_panel<PARTS>(r, low, apart, x, scales, own_sums);
            if (m == 0) between();
            Side<PER>* const own = to + (half * kept_floats + m * PARTS * RESULTS) / PER;
            auto put = [&](u32 first, u32 end) {
#pragma unroll
                for (u32 i = first; i < end; i += PER) {
                    Side<PER> side;
#pragma unroll
                    for (u32 k = 0; k < PER; k++) side.v[k] = r[i + k];
                    own[i / PER * 32] = side;
                }
            };
            put(0, 4);
            if (!one) put(4, PARTS * 4);
        }
    };
    auto end = [&](const RingUnit& unit, u32 half) { leave(unit, kept + half * kept_floats); };
    ring_pass<early, roomy>(dynamic, tiles, table, stride, units, s, costs, rows, begin, multiply, end);
}

// The results of a unit, by turns of warps: `store(token, row, sums)` of a row of the unit, of whose team's panels `own` belong
// together. WARPS is how many share a panel at most.
template <u32 PARTS, u32 PER, u32 own, u32 WARPS, class Store>
DEVICE void add_warps(const RingUnit& unit, const RingConstants& s, const float* sums, Store store) {
    const u32 lane = threadIdx.x & 31, panels = PANELS / own, parts = parts_of<PARTS>(unit);
    const u32 row = places_of(s, lane >> 2).row, apart = rows_apart(s);
    for (u32 task = threadIdx.x >> 5; task < s.teams * panels * parts * (4 / PER); task += s.warps * s.teams) {
        const u32 first = task % (4 / PER) * PER, rest = task / (4 / PER), n = parts == 2 ? rest & 1 : 0;
        const u32 panel = parts == 2 ? rest >> 1 : rest, of_team = panel / panels * s.warps * PANELS + panel % panels;
        const float* from = sums + (of_team * PARTS + n) * RESULTS + first * 32 + lane * PER;
        float v[PER][own] = {};
#pragma unroll
        for (u32 w = 0; w < WARPS; w++)
#pragma unroll
            for (u32 k = 0; k < own; k++) {
                if (w >= s.warps) continue;
                const Side<PER> side = *(const Side<PER>*)(from + (w * PANELS + k) * PARTS * RESULTS);
#pragma unroll
                for (u32 e = 0; e < PER; e++) v[e][k] += side.v[e];
            }
#pragma unroll
        for (u32 e = 0; e < PER; e++) {
            const u32 i = first + e, token = EIGHT * n + 2 * (lane & 3) + (i & 1);
            if (token < unit.count) store(token, panel * PANEL + row + apart * (i >> 1), v[e]);
        }
    }
}

#endif

struct StreamGateUpConstants {
    GateUpConstants product;
    RingConstants ring;
};

// Products of gate and up of the pairs of tiles, activated → out (places, inner). x (tokens, cols) in f16, with the
// scales of its rows.
template <u32 PARTS, u32 WARPS>
DEVICE void stream_gate_up(const uint4* x, const float* scale, const u32* list, const RingTile* tiles, const u8* slots,
                           const u32* table, const float* weights, float* out, const StreamGateUpConstants& constants) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    // Few tasks, so that more warps have one.
    constexpr u32 PER = 1;
    __shared__ float factors[2][PARTS * EIGHT];
    const GateUpConstants& c = constants.product;
    const RingConstants& s = constants.ring;
    const u32 inner = c.up.rows, cols = c.up.format.cols, own = (threadIdx.x >> 5) % s.warps, g = threadIdx.x >> 2 & 7;
    auto rows = [&](u32 slot, u32 index, u32 i) {
        return expert_row(slots, slot, i % PANELS ? c.up : c.gate, (index * s.teams + i / PANELS) * PANEL).plane[0];
    };
    auto enter = [&](const RingUnit& unit, u32 parts, Own::X<PARTS>& to, float (&scales)[PARTS][2], float* sums) {
        const bool has_factor = threadIdx.x < unit.count;
        float factor = 0.0f;
        if (has_factor) {
            const u32 pair = list[unit.first + threadIdx.x];
            factor = scale[pair / c.share] * (c.weighs ? weights[pair] : 1.0f);
        }
#pragma unroll
        for (u32 n = 0; n < PARTS; n++) {
            scales[n][0] = scales[n][1] = 1.0f;
            if (n >= parts) break;
            const u32 token = EIGHT * n + g;
            const bool present = token < unit.count;
            const u32 row = present ? list[unit.first + token] / c.share : 0;
            const uint4* from = x + (u64)row * (cols / 8) + own * (COLUMNS / 8);
            Own::enter(
                to, n, sums, [&](u32 e) { return present ? from[e] : make_uint4(0, 0, 0, 0); },
                [&](u32 e) { return present ? ((const uint2*)from)[e] : make_uint2(0, 0); });
        }
        // Last, so that nothing else waits for it.
        if (has_factor) factors[unit.turn & 1][threadIdx.x] = factor;
    };
    auto leave = [&](const RingUnit& unit, const float* sums) {
        float* const to = out + (u64)unit.first * inner + unit.index * s.teams * PANEL;
        add_warps<PARTS, PER, 2, WARPS>(unit, s, sums, [&](u32 token, u32 row, const float (&v)[2]) {
            const float factor = factors[unit.turn & 1][token];
            to[token * inner + row] = activation(v[0] * factor, v[1] * factor, c);
        });
    };
    const RingCosts costs = {19, PARTS == 1 ? 28u : 12u, 22};
    stream<PARTS, PER, false>(tiles, table, c.up.format.strides[0], inner / (PANEL * s.teams), s, costs, rows, enter, leave);
#endif
}

struct StreamDownConstants {
    Part part;
    RingConstants ring;
};

// Products of down: x (places, cols) → out (pairs, hidden). Each warp rounds its columns to f16 by a power of two of their own.
template <u32 PARTS>
DEVICE void stream_down(const float* x, const u32* list, const RingTile* tiles, const u8* slots, const u32* table, float* out,
                        const StreamDownConstants& c) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    constexpr u32 PER = PARTS == 1 ? 2 : 4;
    // Loads at once, of a tile's values, as far as registers allow.
    constexpr u32 AT_ONCE = PARTS == 1 ? 16 : 8;
    const RingConstants& s = c.ring;
    __shared__ u32 pairs[2][PARTS * EIGHT];
    const u32 hidden = c.part.rows, cols = c.part.format.cols, own = (threadIdx.x >> 5) % s.warps;
    const u32 g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
    auto rows = [&](u32 slot, u32 index, u32 i) {
        return expert_row(slots, slot, c.part, (index * s.teams * PANELS + i) * PANEL).plane[0];
    };
    auto enter = [&](const RingUnit& unit, u32 parts, Own::X<PARTS>& to, float (&scales)[PARTS][2], float* sums) {
        const u32 pair = threadIdx.x < unit.count ? list[unit.first + threadIdx.x] : 0;
#pragma unroll
        for (u32 n = 0; n < PARTS; n++) {
            if (n >= parts) break;
            const u32 token = EIGHT * n + g;
            const bool present = token < unit.count;
            const float4* from = (const float4*)(x + (u64)(unit.first + (present ? token : 0)) * cols + own * COLUMNS);
            float largest = 0.0f;
#pragma unroll AT_ONCE
            for (u32 i = t; i < COLUMNS / 4; i += 4) {
                const float4 v = from[i];
                largest = fmaxf(largest, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
            }
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
            // As in `blocks_of`.
            const u32 exponent = __float_as_uint(largest) >> 23;
            const bool plain = exponent > 20 && exponent < 250;
            const float up = plain ? __uint_as_float((263 - exponent) << 23) : 1.0f;
            const float down = plain ? __uint_as_float((exponent - 9) << 23) : 1.0f;
            scales[n][0] = __shfl_sync(0xffffffffu, down, 8 * t);
            scales[n][1] = __shfl_sync(0xffffffffu, down, 8 * t + 4);
            auto half_of = [&](u32 e) {
                const float4 v = from[e];
                return present ? make_uint2(h2_of(v.x * up, v.y * up), h2_of(v.z * up, v.w * up)) : make_uint2(0, 0);
            };
            auto load = [&](u32 e) {
                const uint2 a = half_of(2 * e), b = half_of(2 * e + 1);
                return make_uint4(a.x, a.y, b.x, b.y);
            };
            Own::enter(to, n, sums, load, half_of);
        }
        // Last, so that nothing else waits for it.
        if (threadIdx.x < unit.count) pairs[unit.turn & 1][threadIdx.x] = pair;
    };
    auto leave = [&](const RingUnit& unit, const float* sums) {
        float* const to = out + unit.index * s.teams * PANELS * PANEL;
        add_warps<PARTS, PER, 1, MOST_WARPS>(unit, s, sums, [&](u32 token, u32 row, const float (&v)[1]) {
            to[(u64)pairs[unit.turn & 1][token] * hidden + row] = v[0];
        });
    };
    const RingCosts costs = {19, PARTS == 1 ? 18u : 9u, 16};
    stream<PARTS, PER, true>(tiles, table, c.part.format.strides[0], hidden / (PANELS * PANEL * s.teams), s, costs, rows, enter, leave);
#endif
}

#define GATE_UP(name, parts, warps)                                                                                        \
    extern "C" __global__ void __launch_bounds__(32 * warps, 2 * MOST_WARPS / warps)                                       \
        NAME(name)(const uint4* x, const float* scale, const u32* list, const RingTile* tiles, const u8* slots,            \
                   const u32* table, const float* weights, float* out, const __grid_constant__ StreamGateUpConstants c) {  \
        stream_gate_up<parts, warps>(x, scale, list, tiles, slots, table, weights, out, c);                                \
    }
#define DOWN(name, parts, warps)                                                                                           \
    extern "C" __global__ void __launch_bounds__(32 * warps, 2)                                                            \
        NAME(name)(const float* x, const u32* list, const RingTile* tiles, const u8* slots, const u32* table, float* out,  \
                   const __grid_constant__ StreamDownConstants c) {                                                        \
        stream_down<parts>(x, list, tiles, slots, table, out, c);                                                          \
    }

// Tiles of up to eight tokens, and of up to sixteen.
GATE_UP(stream_gate_up_8, 1, MOST_WARPS)
GATE_UP(stream_gate_up_16, 2, MOST_WARPS)
GATE_UP(stream_gate_up_8_wide, 1, WIDE_WARPS)
GATE_UP(stream_gate_up_16_wide, 2, WIDE_WARPS)
DOWN(stream_down_8, 1, MOST_WARPS)
DOWN(stream_down_16, 2, MOST_WARPS)
DOWN(stream_down_16_few, 2, FEW_WARPS)

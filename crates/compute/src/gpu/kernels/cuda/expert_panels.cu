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
// Results of a warp, a panel and eight tokens: (result, lane).
const u32 RESULTS = 4 * 32;
const u32 MOST_WARPS = 8, THREADS = 32 * MOST_WARPS;
// Warps of a group whose threads have more registers.
const u32 FEW_WARPS = 6;
const float TWO_24 = 16777216.0f;

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
// A byte of `bytes` as f32, and 2^23 more.
DEVICE float biased_byte(u32 bytes, u32 i) { return __uint_as_float(__byte_perm(bytes, 0x4b000000, 0x7440 + i)); }

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
    template <u32 PARTS>
    struct X {
        // (part, 64 columns, low or high nibbles, word, register of b)
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
                x.b[n][j][high][w][0] = __byte_perm(v[w].x, v[w].y, 0x5410);
                x.b[n][j][high][w][1] = __byte_perm(v[w].x, v[w].y, 0x7632);
            }
            sums[block] = sum_of_quad(sum_of_4(v[0]) + sum_of_4(v[1]));
        }
        const float a = t & 2 ? (t & 1 ? sums[6] : sums[4]) : (t & 1 ? sums[2] : sums[0]);
        const float b = t & 2 ? (t & 1 ? sums[7] : sums[5]) : (t & 1 ? sums[3] : sums[1]);
        x.less[n] = h2_of(-a, -b);
    }
    // A row's scales: those of blocks 0..4 and 4..8, and what they are multiplied by for low and high nibbles.
    struct Scales {
        u32 first, last;
        float low, high;
    };
    static DEVICE Scales scales_of(const uint4& header) {
        const float d = f32_of_f16(header.x);
        return {header.y & 0x3f3f3f3f, (header.w & 0x0f0f0f0f) | (header.y >> 2 & 0x30303030), d * TWO_24, d * (TWO_24 / 16.0f)};
    }
    template <u32 block>
    static DEVICE float scale(const Scales& s) {
        const float d = block % 2 == 0 ? s.low : s.high;
        return __fmaf_rn(biased_byte(block < 4 ? s.first : s.last, block % 4), d, d * -8388608.0f);
    }
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
        const u32 minima[2] = {minima_of(l, t), minima_of(h, t)};
#pragma unroll
        for (u32 n = 0; n < N; n++) mma_1688(sums.v[n], minima[0], minima[1], x.less[n]);
        const Scales of_low = scales_of(l), of_high = scales_of(h);
        add_blocks<N, 0>(sums, low, high, of_low, of_high, x);
        add_blocks<N, 1>(sums, low, high, of_low, of_high, x);
        add_blocks<N, 2>(sums, low, high, of_low, of_high, x);
        add_blocks<N, 3>(sums, low, high, of_low, of_high, x);
    }
};

template <>
struct Columns256<Q6_K> {
    // (part, block of 16 columns, token): sums times −32 · 2^-24, in the order in which blocks are multiplied.
    static const u32 BYTES = 210, SUMS = 16 * 8 * 4;
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
        return ((quarter >= 2 ? low >> 4 : low) & 0x0f0f0f0f) | (top & ~0x0f0f0f0f);
    }
    template <u32 N, u32 half, u32 sixteen, u32 quarter, class X>
    static DEVICE void add_block(Sums<N>& sums, const u32 (&low)[3], const u32 (&high)[3], const u32 (&of_low)[2], const u32 (&of_high)[2],
                                 const X& x, const float* less) {
        const u32 l = integers<quarter>(low[0], low[1], low[2]), h = integers<quarter>(high[0], high[1], high[2]);
        const u32 a[4] = {l & 0x003f003f, h & 0x003f003f, l >> 8 & 0x003f003f, h >> 8 & 0x003f003f};
        const u32 block = 2 * quarter + sixteen;
        const float s[2] = {biased_byte(of_low[block / 4], block % 4) - 8388736.0f, biased_byte(of_high[block / 4], block % 4) - 8388736.0f};
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
        // Signed bytes, 128 more.
        const u8 *of_l = low + 192 + 8 * half, *of_h = high + 192 + 8 * half;
        const u32 of_low[2] = {word(of_l, selector) ^ 0x80808080, word(of_l + 4, selector) ^ 0x80808080};
        const u32 of_high[2] = {word(of_h, selector) ^ 0x80808080, word(of_h + 4, selector) ^ 0x80808080};
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
        // Rows g and g + 8 are alike within a word.
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

// Eights of tokens of a tile with up to `PARTS` of them.
template <u32 PARTS>
DEVICE u32 parts_of(const RingUnit& unit) {
    return PARTS == 2 && unit.count > EIGHT ? 2 : 1;
}

// A warp's part of a panel with N eights of tokens.
template <u32 N, u32 PARTS>
DEVICE void multiply_panel(float (&to)[PARTS * 4], const u8* low, u32 stride, const Own::X<PARTS>& x, const float (&scales)[PARTS][2],
                           const float* sums) {
    Sums<N> own = {};
    Own::multiply<N>(own, low, low + 8 * stride, x, sums);
#pragma unroll
    for (u32 n = 0; n < N; n++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) to[n * 4 + i] = own.v[n][i] * scales[n][i & 1];
}

// Passes a group's units through shared memory. `enter(unit, parts, x, scales, sums)` brings a tile's activations with what their
// results are scaled by, and `leave(unit, sums)` takes the sums of a unit: (team, warp, panel, result). See `ring_pass`.
template <u32 PARTS, bool early, class RowsOf, class Enter, class Leave>
DEVICE void stream(const RingTile* tiles, const u32* table, u32 stride, u32 units, const RingConstants& s, const RingCosts& costs,
                   RowsOf rows, Enter enter, Leave leave) {
    extern __shared__ __align__(128) u8 dynamic[];
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, all_warps = s.warps * s.teams;
    float* const kept = (float*)(dynamic + RING_STAGES * s.teams * PANELS * PANEL * stride);
    const u32 kept_floats = all_warps * PANELS * PARTS * RESULTS;
    float* const own_sums = kept + 2 * kept_floats + warp * (PARTS * Own::SUMS / 4);
    float* const to = kept + warp * PANELS * PARTS * RESULTS + lane;
    const u32 at = (warp / s.warps * PANELS * PANEL + (lane >> 2)) * stride + warp % s.warps * Own::BYTES;
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
            const u8* low = panels + at + m * PANEL * stride;
            float r[PARTS * 4];
            if (one) multiply_panel<1>(r, low, stride, x, scales, own_sums);
            else multiply_panel<PARTS>(r, low, stride, x, scales, own_sums);
            if (m == 0) between();
            float* const own = to + half * kept_floats + m * PARTS * RESULTS;
#pragma unroll
            for (u32 i = 0; i < 4; i++) own[i * 32] = r[i];
            if (one) continue;
#pragma unroll
            for (u32 i = 4; i < PARTS * 4; i++) own[i * 32] = r[i];
        }
    };
    auto end = [&](const RingUnit& unit, u32 half) { leave(unit, kept + half * kept_floats); };
    ring_pass<early, roomy>(dynamic, tiles, table, stride, units, s, costs, rows, begin, multiply, end);
}

// The results of a unit, by turns of warps: `store(token, row, sums)` of a row of the unit, of whose team's panels `own` belong
// together.
template <u32 PARTS, u32 own, class Store>
DEVICE void add_warps(const RingUnit& unit, const RingConstants& s, const float* sums, Store store) {
    const u32 lane = threadIdx.x & 31, panels = PANELS / own, parts = parts_of<PARTS>(unit);
    for (u32 task = threadIdx.x >> 5; task < s.teams * panels * parts * 4; task += s.warps * s.teams) {
        const u32 i = task & 3, rest = task >> 2, n = parts == 2 ? rest & 1 : 0, panel = parts == 2 ? rest >> 1 : rest;
        const float* from = sums + (panel / panels * s.warps * PANELS + panel % panels) * PARTS * RESULTS + (n * 4 + i) * 32 + lane;
        float v[own];
#pragma unroll
        for (u32 k = 0; k < own; k++) v[k] = 0.0f;
#pragma unroll
        for (u32 w = 0; w < MOST_WARPS; w++)
#pragma unroll
            for (u32 k = 0; k < own; k++)
                if (w < s.warps) v[k] += from[(w * PANELS + k) * PARTS * RESULTS];
        const u32 token = EIGHT * n + 2 * (lane & 3) + (i & 1);
        if (token < unit.count) store(token, panel * PANEL + (lane >> 2) + 8 * (i >> 1), v);
    }
}

#endif

struct StreamGateUpConstants {
    GateUpConstants product;
    RingConstants ring;
};

// Products of gate and up of the pairs of tiles, activated → out (places, inner). x (tokens, cols) in f16, with the
// scales of its rows.
template <u32 PARTS>
DEVICE void stream_gate_up(const uint4* x, const float* scale, const u32* list, const RingTile* tiles, const u8* slots,
                           const u32* table, const float* weights, float* out, const StreamGateUpConstants& constants) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
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
        add_warps<PARTS, 2>(unit, s, sums, [&](u32 token, u32 row, const float (&v)[2]) {
            const float factor = factors[unit.turn & 1][token];
            to[token * inner + row] = activation(v[0] * factor, v[1] * factor, c);
        });
    };
    const RingCosts costs = {19, PARTS == 1 ? 28u : 12u, 22};
    stream<PARTS, false>(tiles, table, c.up.format.strides[0], inner / (PANEL * s.teams), s, costs, rows, enter, leave);
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
#pragma unroll 8
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
        add_warps<PARTS, 1>(unit, s, sums, [&](u32 token, u32 row, const float (&v)[1]) {
            to[(u64)pairs[unit.turn & 1][token] * hidden + row] = v[0];
        });
    };
    const RingCosts costs = {19, PARTS == 1 ? 18u : 9u, 16};
    stream<PARTS, true>(tiles, table, c.part.format.strides[0], hidden / (PANELS * PANEL * s.teams), s, costs, rows, enter, leave);
#endif
}

#define GATE_UP(name, parts)                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                               \
        NAME(name)(const uint4* x, const float* scale, const u32* list, const RingTile* tiles, const u8* slots,            \
                   const u32* table, const float* weights, float* out, const __grid_constant__ StreamGateUpConstants c) {  \
        stream_gate_up<parts>(x, scale, list, tiles, slots, table, weights, out, c);                                       \
    }
#define DOWN(name, parts, warps)                                                                                           \
    extern "C" __global__ void __launch_bounds__(32 * warps, 2)                                                            \
        NAME(name)(const float* x, const u32* list, const RingTile* tiles, const u8* slots, const u32* table, float* out,  \
                   const __grid_constant__ StreamDownConstants c) {                                                        \
        stream_down<parts>(x, list, tiles, slots, table, out, c);                                                          \
    }

// Tiles of up to eight tokens, and of up to sixteen.
GATE_UP(stream_gate_up_8, 1)
GATE_UP(stream_gate_up_16, 2)
DOWN(stream_down_8, 1, MOST_WARPS)
DOWN(stream_down_16, 2, MOST_WARPS)
DOWN(stream_down_16_few, 2, FEW_WARPS)

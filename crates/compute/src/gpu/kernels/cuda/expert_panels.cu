// Products of some pairs with their experts on tensor cores, whose weights pass through shared memory (`ring.h`).
//
// Two panels of 16 rows make a unit, or two of eight that are multiplied as one. A warp multiplies 256 of a panel's columns, the last one
// what is left of them, by up to 16 tokens, whose activations it keeps in registers as long as the expert stays the same; sums of a
// panel's warps meet in shared memory.
//
// Compiled once for each encoding: DTYPE, with names that end in it: NAME(…).
#include "panel_codebooks.h"
#include "ring.h"

const u32 PANELS = RING_PANELS, EIGHT = 8, SIXTEEN = 16, COLUMNS = 256;
// Results of a warp, a panel and eight tokens: (4 / PER, lane, PER), of which a warp that adds them up takes PER of a lane at once.
const u32 RESULTS = 4 * 32;
// Warps of a group: of the widest rows, of those of which a multiprocessor has two groups, and of those whose threads have more
// registers.
const u32 WIDE_WARPS = 16, MOST_WARPS = 8, FEW_WARPS = 6;

typedef Columns256<DTYPE> Own;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Rows g of a panel go round its pieces, so that those that are read together meet different banks.
struct RowPlaces {
    u32 piece, of_piece, row;
};
template <u32 ROWS>
DEVICE RowPlaces places_of(const RingConstants& s, u32 g) {
    const u32 piece = g & ((1 << s.halvings) - 1), of_piece = (g >> s.halvings) * (ROWS == SIXTEEN ? Own::APART : 1);
    return {piece, of_piece, piece * (ROWS >> s.halvings) + of_piece};
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
                           const float* sums, u32 blocks, const Beside& beside) {
    Sums<N> own = {};
    Own::multiply<N>(own, low, low + apart, x, sums, blocks, beside);
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

// A panel of a unit: the matrix and its first row.
struct Panel {
    const Part& part;
    u32 row;
};

// Passes a group's units through shared memory. `panel_of(index, i)` is a unit's panel i; `enter(unit, parts, x, scales, sums)` brings
// a tile's activations with what their results are scaled by, and `leave(unit, sums)` takes the sums of a unit: (team, warp, panel,
// result), of panels of eight ROWS the first one's before the second one's. See `ring_pass`.
template <u32 PARTS, u32 PER, bool early, u32 ROWS, class PanelOf, class Enter, class Leave>
DEVICE void stream(const RingTile* tiles, const u8* slots, const u32* table, const Format& format, u32 units, const RingConstants& s,
                   const RingCosts& costs, PanelOf panel_of, Enter enter, Leave leave) {
    extern __shared__ __align__(128) u8 dynamic[];
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, all_warps = s.warps * s.teams;
    // Panels that a warp multiplies one after the other.
    constexpr u32 OWN_PANELS = ROWS == SIXTEEN ? PANELS : 1;
    const u32 stride = format.strides[0], panel_bytes = ring_panel_bytes<Own::PLANES>(s);
    const u32 apart = ROWS == SIXTEEN ? rows_apart(s) * stride : panel_bytes;
    const u32 blocks = Own::LOOSE ? min(format.cols - warp % s.warps * COLUMNS, COLUMNS) / 32 : COLUMNS / 32;
    const RowPlaces own_row = places_of<ROWS>(s, lane >> 2);
    float* const kept = (float*)(dynamic + RING_STAGES * s.teams * PANELS * panel_bytes);
    const u32 kept_floats = all_warps * OWN_PANELS * PARTS * RESULTS;
    float* const own_sums = kept + 2 * kept_floats + warp * (PARTS * Own::SUMS / 4);
    Side<PER>* const to = (Side<PER>*)(kept + warp * OWN_PANELS * PARTS * RESULTS) + lane;
    u32 first_panel = warp / s.warps * PANELS, column = warp % s.warps * COLUMNS;
    // The compiler would divide again for each panel.
    if (Own::PLANES > 1) asm("" : "+r"(first_panel), "+r"(column));
    const u32 of_row = own_row.piece * s.piece_bytes + own_row.of_piece * stride;
    const u32 at = first_panel * panel_bytes + of_row + column / COLUMNS * Own::BYTES;
    // Whether both panels' instructions fit beside each other.
    constexpr bool roomy = PARTS == 1 || DTYPE == Q4_K;
    constexpr u32 at_once = roomy ? OWN_PANELS : 1;
    Book<DTYPE>::fill();
    Own::X<PARTS> x;
    float scales[PARTS][2];
    auto begin = [&](const RingUnit& unit) {
        enter(unit, parts_of<PARTS>(unit), x, scales, own_sums);
        __syncwarp();
    };
    auto multiply = [&](const RingUnit& unit, u32 half, const u8* panels, auto between) {
        const bool one = parts_of<PARTS>(unit) == 1;
#pragma unroll at_once
        for (u32 m = 0; m < OWN_PANELS; m++) {
            const u8* low = panels + at + m * panel_bytes;
            Beside beside = {format, {}, own_row.row, ROWS == SIXTEEN ? rows_apart(s) : 0,
                             ROWS == SIXTEEN ? 0 : panel_bytes, column};
            if constexpr (Own::PLANES > 1) {
                const Panel own = panel_of(unit.index, first_panel + m);
                const u8* panel = panels + (first_panel + m) * panel_bytes + (s.piece_bytes << s.halvings);
#pragma unroll
                for (u32 p = 1; p < Own::PLANES; p++, panel += s.rooms[0])
                    beside.planes[p - 1] = panel + begin_of(own.part.format, p, own.row);
            }
            float r[PARTS * 4];
            if (one) multiply_panel<1>(r, low, apart, x, scales, own_sums, blocks, beside);
            else multiply_panel<PARTS>(r, low, apart, x, scales, own_sums, blocks, beside);
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
    auto row_of = [&](u32 slot, u32 index, u32 i) {
        const Panel panel = panel_of(index, i);
        return expert_row(slots, slot, panel.part, panel.row);
    };
    ring_pass<early, roomy, Own::PLANES, ROWS>(dynamic, tiles, table, stride, units, s, costs, row_of, begin, multiply, end);
}

// The results of a unit, by turns of warps: `store(token, row, sums)` of a row of the unit, of whose team's panels `own` belong
// together. WARPS is how many share a panel at most.
template <u32 PARTS, u32 PER, u32 own, u32 WARPS, u32 ROWS, class Store>
DEVICE void add_warps(const RingUnit& unit, const RingConstants& s, const float* sums, Store store) {
    constexpr bool whole = ROWS == SIXTEEN;
    // Of a warp; of results of a row with PER of a lane; and from those of a panel to what belongs with them.
    constexpr u32 OF_WARP = (whole ? PANELS : 1) * PARTS * RESULTS, OF_ROW = (whole ? 4 : 2) / PER;
    constexpr u32 NEXT = whole ? PARTS * RESULTS : RESULTS / 2;
    const u32 lane = threadIdx.x & 31, panels = PANELS / own, parts = parts_of<PARTS>(unit);
    const u32 row = places_of<ROWS>(s, lane >> 2).row, apart = rows_apart(s);
    for (u32 task = threadIdx.x >> 5; task < s.teams * panels * parts * OF_ROW; task += s.warps * s.teams) {
        const u32 first = task % OF_ROW * PER, rest = task / OF_ROW, n = parts == 2 ? rest & 1 : 0;
        const u32 panel = parts == 2 ? rest >> 1 : rest;
        const float* from = sums + panel / panels * s.warps * OF_WARP + (panel % panels * PARTS + n) * RESULTS +
                            first * 32 + lane * PER;
        float v[PER][own] = {};
#pragma unroll
        for (u32 w = 0; w < WARPS; w++)
#pragma unroll
            for (u32 k = 0; k < own; k++) {
                if (w >= s.warps) continue;
                const Side<PER> side = *(const Side<PER>*)(from + w * OF_WARP + k * NEXT);
#pragma unroll
                for (u32 e = 0; e < PER; e++) v[e][k] += side.v[e];
            }
#pragma unroll
        for (u32 e = 0; e < PER; e++) {
            const u32 i = first + e, token = EIGHT * n + 2 * (lane & 3) + (i & 1);
            if (token < unit.count) store(token, panel * ROWS + row + apart * (i >> 1), v[e]);
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
template <u32 PARTS, u32 WARPS, u32 ROWS>
DEVICE void stream_gate_up(const uint4* x, const float* scale, const u32* list, const RingTile* tiles, const u8* slots,
                           const u32* table, const float* weights, const float* gate_bias, const float* up_bias, float* out,
                           const StreamGateUpConstants& constants) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    // Few tasks, so that more warps have one.
    constexpr u32 PER = 1;
    __shared__ float factors[2][PARTS * EIGHT];
    const GateUpConstants& c = constants.product;
    const RingConstants& s = constants.ring;
    const u32 inner = c.up.rows, cols = c.up.format.cols, own = (threadIdx.x >> 5) % s.warps, g = threadIdx.x >> 2 & 7;
    auto panel_of = [&](u32 index, u32 i) {
        return Panel{i % PANELS ? c.up : c.gate, (index * s.teams + i / PANELS) * ROWS};
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
            const u32 last = Own::LOOSE ? cols - own * COLUMNS : COLUMNS;
            Own::enter(
                to, n, sums,
                [&](u32 e) { return present && (!Own::LOOSE || 8 * e < last) ? from[e] : make_uint4(0, 0, 0, 0); },
                [&](u32 e) { return present && 4 * e < last ? ((const uint2*)from)[e] : make_uint2(0, 0); }, c.up.format);
        }
        // Last, so that nothing else waits for it.
        if (has_factor) factors[unit.turn & 1][threadIdx.x] = factor;
    };
    auto leave = [&](const RingUnit& unit, const float* sums) {
        float* const to = out + (u64)unit.first * inner + unit.index * s.teams * ROWS;
        add_warps<PARTS, PER, 2, WARPS, ROWS>(unit, s, sums, [&](u32 token, u32 row, const float (&v)[2]) {
            const float factor = factors[unit.turn & 1][token];
            float gate = v[0] * factor, up = v[1] * factor;
            if (Own::LOOSE && c.has_bias) {
                const u32 at = unit.turn / RING_EXPERT * inner + unit.index * s.teams * ROWS + row;
                gate += gate_bias[at], up += up_bias[at];
            }
            to[token * inner + row] = activation(gate, up, c);
        });
    };
    const RingCosts costs = {19, PARTS == 1 ? 28u : 12u, 22};
    stream<PARTS, PER, false, ROWS>(tiles, slots, table, c.up.format, inner / (ROWS * s.teams), s, costs, panel_of, enter,
                                    leave);
#endif
}

struct StreamDownConstants {
    Part part;
    u32 has_bias;
    RingConstants ring;
};

// Products of down: x (places, cols) → out (pairs, hidden). Each warp rounds its columns to f16 by a power of two of their own.
template <u32 PARTS, u32 WARPS>
DEVICE void stream_down(const float* x, const u32* list, const RingTile* tiles, const u8* slots, const u32* table, const float* bias,
                        float* out, const StreamDownConstants& c) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    constexpr u32 PER = PARTS == 1 ? 2 : 4;
    // Loads at once, of a tile's values, as far as registers allow.
    constexpr u32 AT_ONCE = PARTS == 1 ? 16 : 8;
    const RingConstants& s = c.ring;
    __shared__ u32 pairs[2][PARTS * EIGHT];
    const u32 hidden = c.part.rows, cols = c.part.format.cols, own = (threadIdx.x >> 5) % s.warps;
    const u32 g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
    auto panel_of = [&](u32 index, u32 i) { return Panel{c.part, (index * s.teams * PANELS + i) * SIXTEEN}; };
    auto enter = [&](const RingUnit& unit, u32 parts, Own::X<PARTS>& to, float (&scales)[PARTS][2], float* sums) {
        const u32 pair = threadIdx.x < unit.count ? list[unit.first + threadIdx.x] : 0;
#pragma unroll
        for (u32 n = 0; n < PARTS; n++) {
            if (n >= parts) break;
            const u32 token = EIGHT * n + g;
            const bool present = token < unit.count;
            const float4* from = (const float4*)(x + (u64)(unit.first + (present ? token : 0)) * cols + own * COLUMNS);
            const u32 last = Own::LOOSE ? cols - own * COLUMNS : COLUMNS;
            float largest = 0.0f;
#pragma unroll AT_ONCE
            for (u32 i = t; i < COLUMNS / 4; i += 4) {
                const float4 v = !Own::LOOSE || 4 * i < last ? from[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
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
                if (Own::LOOSE && 4 * e >= last) return make_uint2(0, 0);
                const float4 v = from[e];
                return present ? make_uint2(h2_of(v.x * up, v.y * up), h2_of(v.z * up, v.w * up)) : make_uint2(0, 0);
            };
            auto load = [&](u32 e) {
                const uint2 a = half_of(2 * e), b = half_of(2 * e + 1);
                return make_uint4(a.x, a.y, b.x, b.y);
            };
            Own::enter(to, n, sums, load, half_of, c.part.format);
        }
        // Last, so that nothing else waits for it.
        if (threadIdx.x < unit.count) pairs[unit.turn & 1][threadIdx.x] = pair;
    };
    auto leave = [&](const RingUnit& unit, const float* sums) {
        float* const to = out + unit.index * s.teams * PANELS * SIXTEEN;
        add_warps<PARTS, PER, 1, WARPS, SIXTEEN>(unit, s, sums, [&](u32 token, u32 row, const float (&v)[1]) {
            float sum = v[0];
            if (Own::LOOSE && c.has_bias)
                sum += bias[unit.turn / RING_EXPERT * hidden + unit.index * s.teams * PANELS * SIXTEEN + row];
            to[(u64)pairs[unit.turn & 1][token] * hidden + row] = sum;
        });
    };
    const RingCosts costs = {19, PARTS == 1 ? 18u : 9u, 16};
    stream<PARTS, PER, true, SIXTEEN>(tiles, slots, table, c.part.format, hidden / (PANELS * SIXTEEN * s.teams), s, costs,
                                      panel_of, enter, leave);
#endif
}

#define GATE_UP(name, parts, warps, rows)                                                                                   \
    extern "C" __global__ void __launch_bounds__(32 * warps, 2 * MOST_WARPS / warps)                                        \
        NAME(name)(const uint4* x, const float* scale, const u32* list, const RingTile* tiles, const u8* slots,             \
                   const u32* table, const float* weights, const float* gate_bias, const float* up_bias, float* out,        \
                   const __grid_constant__ StreamGateUpConstants c) {                                                       \
        stream_gate_up<parts, warps, rows>(x, scale, list, tiles, slots, table, weights, gate_bias, up_bias, out, c);       \
    }
#define DOWN(name, parts, warps)                                                                                           \
    extern "C" __global__ void __launch_bounds__(32 * warps, warps == WIDE_WARPS ? 1 : 2)                                  \
        NAME(name)(const float* x, const u32* list, const RingTile* tiles, const u8* slots, const u32* table,              \
                   const float* bias, float* out, const __grid_constant__ StreamDownConstants c) {                         \
        stream_down<parts, warps == WIDE_WARPS ? WIDE_WARPS : MOST_WARPS>(x, list, tiles, slots, table, bias, out, c);     \
    }

// Tiles of up to eight tokens, and of up to sixteen.
GATE_UP(stream_gate_up_8, 1, MOST_WARPS, SIXTEEN)
GATE_UP(stream_gate_up_16, 2, MOST_WARPS, SIXTEEN)
GATE_UP(stream_gate_up_8_wide, 1, WIDE_WARPS, SIXTEEN)
GATE_UP(stream_gate_up_16_wide, 2, WIDE_WARPS, SIXTEEN)
GATE_UP(stream_gate_up_8_eights, 1, WIDE_WARPS, EIGHT)
GATE_UP(stream_gate_up_16_eights, 2, WIDE_WARPS, EIGHT)
DOWN(stream_down_8, 1, MOST_WARPS)
DOWN(stream_down_16, 2, MOST_WARPS)
DOWN(stream_down_16_few, 2, FEW_WARPS)
DOWN(stream_down_8_wide, 1, WIDE_WARPS)
DOWN(stream_down_16_wide, 2, WIDE_WARPS)

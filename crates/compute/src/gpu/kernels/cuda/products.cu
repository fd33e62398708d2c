// Products of batches with resident weights on tensor cores (`panels.h`). A block has rows of a weight and a tile of tokens; where
// those are too few to keep a device busy, blocks of a cluster have a slice of the columns each, and add up what they have in
// the order of slices.
//
// Compiled once for each encoding: DTYPE, with names that end in it: NAME(…).
#include "cluster.h"
#include "panels.h"

const u32 PANELS = 2, ROWS = PANELS * PANEL;
// Warps of a block, at most: more registers are left for encodings whose bytes take many.
const u32 MOST_WARPS = Weight::IS_LARGE ? 8 : 12;
// Chunks of columns whose activations are in shared memory at once.
const u32 STAGES = 3;
// Eights of tokens that are multiplied by turns, so that products do not wait for those before them.
const u32 AT_ONCE = 4;

// Products of one input that are one dispatch, as in `../few_rows.h`: `groups` clusters make each.
struct ProductPart {
    Format format;
    u32 planes[3];
    u32 bias;
    u32 rows;
    u32 groups, span;
};

const u32 WEIGHT_UNIT = 256, NONE = 0xffffffffu;

struct ProductsConstants {
    ProductPart parts[3];
    u32 tokens;
    // Teams of a block's warps that have rows of their own, warps of a team, which take 128 columns by turns, and how often each
    // does between barriers.
    u32 teams, team, turns;
    // Blocks of a cluster.
    u32 slices;
    u32 has_residual;
};

// d += a · b, which may be put in another order than it is written in.
DEVICE void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE float4 sum(const float4& a, const float4& b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Brings groups of a tile's tokens to shared memory: (groups, PARTS, 128) units. Tokens that are not there become zeros.
template <u32 PARTS>
DEVICE void copy_groups(u32 to, const uint4* x, u32 first, u32 count, u32 groups, u32 parts) {
    for (u32 i = threadIdx.x; i < count * PARTS * GROUP_UNITS; i += blockDim.x) {
        const u32 within = i % GROUP_UNITS, n = i / GROUP_UNITS % PARTS, group = i / (GROUP_UNITS * PARTS);
        const bool present = n < parts;
        const uint4* from = x + ((u64)(present ? n : 0) * groups + first + group) * GROUP_UNITS + within;
        copy_async_16(to + 16 * (i - within + place_of(within)), from, present);
    }
}

// Has the compiler not know what weights are, so that what it makes of them is not kept in registers beside them.
template <class T>
DEVICE void forget(T& raw) {
    u32* const words = (u32*)&raw;
#pragma unroll
    for (u32 i = 0; i < sizeof(T) / 4; i++) asm volatile("" : "+r"(words[i]));
}

// Products with two quarters of a group of columns, whose activations are at `x`.
template <u32 half, u32 PARTS>
DEVICE void add_half(Sums<PANELS, PARTS>& sums, const Columns (&w)[PANELS][2], const uint4* x) {
    const u32 g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
    for (int quarter = 2 * half; quarter < 2 * half + 2; quarter++) {
        u32 first[PANELS][4], second[PANELS][4];
#pragma unroll
        for (int m = 0; m < PANELS; m++) fragments(first[m], second[m], w, m, quarter);
#pragma unroll
        for (u32 from = 0; from < PARTS; from += AT_ONCE) {
            constexpr u32 COUNT = PARTS < AT_ONCE ? PARTS : AT_ONCE;
            uint4 b[COUNT];
#pragma unroll
            for (u32 n = 0; n < COUNT; n++) b[n] = x[(from + n) * GROUP_UNITS + place_of(g, t, quarter)];
#pragma unroll
            for (u32 n = 0; n < COUNT; n++)
#pragma unroll
                for (int m = 0; m < PANELS; m++) multiply_add(sums.v[m][from + n], first[m], b[n].x, b[n].y);
#pragma unroll
            for (u32 n = 0; n < COUNT; n++)
#pragma unroll
                for (int m = 0; m < PANELS; m++) multiply_add(sums.v[m][from + n], second[m], b[n].z, b[n].w);
        }
    }
}

// x (tokens, cols) · weightᵀ + bias + residual → out (tokens, rows), of up to three weights.
// Grid: (slices of clusters of all parts, tiles of 8 · PARTS tokens).
template <u32 PARTS>
DEVICE void products(const u8* weights, const uint4* x, const float* scale, const float* residual, float* const (&outs)[3],
                     const ProductsConstants& c) {
    extern __shared__ uint4 shared[];
    const u32 slice = blockIdx.x % c.slices;
    u32 cluster = blockIdx.x / c.slices, which = 0;
    while (which < 2 && cluster >= c.parts[which].groups) cluster -= c.parts[which++].groups;
    const ProductPart& part = c.parts[which];
    float* const out = which == 0 ? outs[0] : which == 1 ? outs[1] : outs[2];
    const Format& f = part.format;
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, team = warp / c.team, member = warp % c.team;
    const u32 block_row = cluster * c.teams * ROWS, first = blockIdx.y * EIGHT * PARTS;
    const u32 count = min(EIGHT * PARTS, c.tokens - first), parts = (count + EIGHT - 1) / EIGHT;
    const u32 groups = (f.cols + GROUP - 1) / GROUP;
    const u32 begin = groups * slice / c.slices, end = groups * (slice + 1) / c.slices;
    auto plane = [&](u32 at) { return weights + (u64)at * WEIGHT_UNIT; };
    Rows<PANELS> rows;
#pragma unroll
    for (u32 m = 0; m < PANELS; m++)
#pragma unroll
        for (u32 i = 0; i < 2; i++)
            rows.of[m][i] = row_address(plane(part.planes[0]), plane(part.planes[1]), plane(part.planes[2]), f,
                                        min(block_row + ROWS * team + PANEL * m + 8 * i + lane / 4, part.rows - 1));
    RawPanels<PANELS> raw;
    u32 group = begin + member;
    if (group < end) load_panels(raw, rows, group, f);

    after_previous();
    const u32 base = shared_address(shared), chunk = c.team * c.turns, stage_units = chunk * PARTS * GROUP_UNITS;
    const uint4* const tile = x + (u64)(first / EIGHT) * groups * GROUP_UNITS;
    auto copy = [&](u32 stage, u32 from) {
        if (from < end) copy_groups<PARTS>(base + 16 * stage * stage_units, tile, from, min(chunk, end - from), groups, parts);
        copy_async_commit();
    };
#pragma unroll
    for (u32 stage = 0; stage + 1 < STAGES; stage++) copy(stage, begin + stage * chunk);
    Sums<PANELS, PARTS> sums;
    clear(sums);
    u32 stage = 0;
#pragma unroll 1
    for (u32 at = begin; at < end; at += chunk) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        copy(stage == 0 ? STAGES - 1 : stage - 1, at + (STAGES - 1) * chunk);
        const uint4* own = shared + stage * stage_units + member * PARTS * GROUP_UNITS;
#pragma unroll 1
        for (const u32 last = min(at + chunk, end); group < last; group += c.team, own += c.team * PARTS * GROUP_UNITS) {
            Columns w[PANELS][2];
            unpack_panels(w, raw, group, f);
            add_half<0>(sums, w, own);
            forget(raw);
            unpack_panels(w, raw, group, f);
            if (group + c.team < end) load_panels(raw, rows, group + c.team, f);
            add_half<1>(sums, w, own);
        }
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }

    // Results of a team, (panel, part): four of each lane's.
    auto store = [&](u32 team, u32 m, u32 n, const float4& v) {
        const float four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 token = token_of(n, i), row = block_row + ROWS * team + PANEL * m + row_of(i);
            if (token >= count || row >= part.rows) continue;
            const u64 to = (u64)(first + token) * part.rows + row;
            float result = four[i] * scale[first + token];
            if (part.bias != NONE) result += ((const float*)plane(part.bias))[row];
            out[to] = c.has_residual ? result + residual[to] : result;
        }
    };
    auto own = [&](u32 m, u32 n) { return make_float4(sums.v[m][n][0], sums.v[m][n][1], sums.v[m][n][2], sums.v[m][n][3]); };
    // (teams, members but the first, panels, parts, lanes), then (teams, panels, parts, lanes).
    constexpr u32 RESULTS = PANELS * PARTS * 32;
    float4* const kept = (float4*)shared;
    float4* const of_members = kept + team * (c.team - 1) * RESULTS + lane;
    const u32 of_teams = c.teams * (c.team - 1) * RESULTS;
    copy_async_wait<0>();
    __syncthreads();
    if (member > 0) {
#pragma unroll
        for (u32 m = 0; m < PANELS; m++)
#pragma unroll
            for (u32 n = 0; n < PARTS; n++) of_members[(member - 1) * RESULTS + (m * PARTS + n) * 32] = own(m, n);
    }
    __syncthreads();
    if (member == 0) {
#pragma unroll
        for (u32 m = 0; m < PANELS; m++)
#pragma unroll
            for (u32 n = 0; n < PARTS; n++) {
                float4 v = own(m, n);
                for (u32 other = 0; other + 1 < c.team; other++) v = sum(v, of_members[other * RESULTS + (m * PARTS + n) * 32]);
                if (c.slices == 1) store(team, m, n, v);
                else kept[of_teams + team * RESULTS + (m * PARTS + n) * 32 + lane] = v;
            }
    }
    if (c.slices == 1) return;
    cluster_barrier();
    for (u32 task = slice + c.slices * warp; task < c.teams * PANELS * PARTS; task += c.slices * c.teams * c.team) {
        const u32 address = base + 16 * (of_teams + task * 32 + lane);
        float4 v = read_floats(0, address);
#pragma unroll 4
        for (u32 other = 1; other < c.slices; other++) v = sum(v, read_floats(other, address));
        store(task / (PANELS * PARTS), task / PARTS % PANELS, task % PARTS, v);
    }
    // Others read what is in this block's memory.
    cluster_barrier();
}

#define PRODUCTS(name, parts, warps, blocks)                                                                           \
    extern "C" __global__ void __launch_bounds__(32 * warps, blocks)                                                   \
        NAME(name)(const u8* weights, const uint4* x, const float* scale, const float* residual, float* out0, float* out1, \
                   float* out2, const __grid_constant__ ProductsConstants c) {                                         \
        products<parts>(weights, x, scale, residual, {out0, out1, out2}, c);                                           \
    }

PRODUCTS(panel_products_16, 2, 8, Weight::IS_LARGE ? 1 : 2)
PRODUCTS(panel_products_32, 4, MOST_WARPS, 1)
PRODUCTS(panel_products_64, 8, MOST_WARPS, 1)

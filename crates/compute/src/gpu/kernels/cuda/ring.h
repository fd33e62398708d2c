// Rows of experts' weights that pass through shared memory: copies bring the next ones while these are multiplied, and a
// group takes its share of all experts' rows one after the other. Plain CUDA C++ for compute capability 9.0 and later.
//
// A *panel* is 16 rows of a weight, or eight where they are wide. A *unit* is two panels of each *team* of warps that share their
// columns.
#pragma once
#include "ring_instructions.h"

constexpr unsigned RING_PANELS = 2, RING_STAGES = 2;

// Up to a number of pairs of one expert: those of a list from `first` on.
struct RingTile {
    unsigned expert, first, count;
    // Tiles before that have up to eight pairs, and 65536 times those with more.
    unsigned before;
};

struct RingConstants {
    // Entries of `tiles`, of which those with pairs come first.
    unsigned tiles;
    // Warps that share a panel, and teams of such warps.
    unsigned warps, teams;
    // How often panels are halved into pieces that are copied by themselves, each so many bytes behind the one before.
    unsigned halvings, piece_bytes;
    // Of encodings with several planes: bytes that a panel has in the second and third one, and the room for what is copied of them,
    // which begins and ends at multiples of 16.
    unsigned needs[2], rooms[2];
};

// What a group is at: a unit of a tile's. `turn` is which of two places is for what goes with the tile, BEGINS more where the group
// begins with the tile, and EXPERT times the expert more.
struct __align__(16) RingUnit {
    unsigned first, count, index, turn;
};

constexpr unsigned RING_BEGINS = 2, RING_EXPERT = 4;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// How long things take, in sixteenths of a unit of a tile with up to eight pairs: a unit of one with more, and to begin with either.
struct RingCosts {
    unsigned unit_of_many, enter_few, enter_many;
};

// Of a group's units, the first and what comes after the last: units of all tiles before, and of its own.
struct RingShare {
    unsigned first, end;
};

// Divides all units so that groups take equally long. Every thread of the group takes part.
static __device__ __forceinline__ RingShare ring_share(const RingTile* tiles, unsigned units, const RingConstants& s,
                                                       const RingCosts& costs) {
    __shared__ unsigned bounds[2], total;
    const unsigned few = costs.enter_few + 16 * units, many = costs.enter_many + costs.unit_of_many * units;
    auto start_of = [&](const RingTile& t) { return (t.before & 0xffff) * few + (t.before >> 16) * many; };
    if (threadIdx.x == 0) total = bounds[0] = bounds[1] = 0;
    __syncthreads();
    for (unsigned i = threadIdx.x; i < s.tiles; i += blockDim.x) {
        const RingTile own = tiles[i], next = i + 1 < s.tiles ? tiles[i + 1] : RingTile{};
        if (own.count != 0 && next.count == 0) total = start_of(own) + (own.count > 8 ? many : few);
    }
    __syncthreads();
    const unsigned long long all = total;
    const unsigned at[2] = {(unsigned)(all * blockIdx.x / gridDim.x), (unsigned)(all * (blockIdx.x + 1) / gridDim.x)};
    for (unsigned i = threadIdx.x; i < s.tiles; i += blockDim.x) {
        const RingTile own = tiles[i];
        if (own.count == 0) break;
        const bool much = own.count > 8;
        const unsigned start = start_of(own), end = start + (much ? many : few);
        const unsigned enter = much ? costs.enter_many : costs.enter_few, unit = much ? costs.unit_of_many : 16;
        for (unsigned k = 0; k < 2; k++) {
            // Nothing begins after the end of all.
            if (at[k] < start || (at[k] >= end && !(at[k] == end && end == total))) continue;
            const unsigned left = at[k] - start;
            bounds[k] = i * units + (left <= enter ? 0 : min((left - enter + unit - 1) / unit, units));
        }
    }
    __syncthreads();
    return {bounds[0], bounds[1]};
}

// Bytes of a panel in shared memory: pieces, and what it has in further planes.
template <unsigned planes>
static __device__ __forceinline__ unsigned ring_panel_bytes(const RingConstants& s) {
    return (s.piece_bytes << s.halvings) + (planes > 1 ? s.rooms[0] : 0) + (planes > 2 ? s.rooms[1] : 0);
}
// Starts to copy a unit's panels, of `rows` rows of `stride` bytes, which `bar` counts: `from(panel)` is where one begins in each plane.
// Pieces have a multiple of 16 bytes. Nothing reads them again before the next batch: the cache is to keep other things.
template <unsigned planes, unsigned rows, class From>
static __device__ __forceinline__ void ring_copy(unsigned bar, unsigned to, unsigned stride, const RingConstants& s, From from) {
    const unsigned panels = s.teams * RING_PANELS, bytes = (rows >> s.halvings) * stride;
    auto arrive = [&] { ring_arrive_with(bar, panels * rows * stride); };
    if (planes == 1) arrive();
    const unsigned long long once = ring_once();
    auto copy = [&](unsigned to, const unsigned char* piece, unsigned bytes) { ring_copy_bulk(to, piece, bytes, bar, once); };
    for (unsigned panel = 0; panel < panels; panel++) {
        const auto row = from(panel);
        const unsigned char* piece = row.plane[0];
        for (unsigned i = 0; i < 1u << s.halvings; i++, piece += bytes, to += s.piece_bytes) copy(to, piece, bytes);
#pragma unroll
        for (unsigned p = 1; p < planes; to += s.rooms[p - 1], p++) {
            if (s.needs[p - 1] == 0) continue;
            // From a multiple of 16 to another.
            const unsigned before = (unsigned)(unsigned long long)row.plane[p] % 16, all = (before + s.needs[p - 1] + 15) / 16 * 16;
            ring_expect(bar, all);
            copy(to, row.plane[p] - before, all);
        }
    }
    // Only now, since what is to be counted is known.
    if (planes > 1) arrive();
}

// The unit that is copied next.
struct RingAhead {
    unsigned tile, slot, index, turn, order;
};

// Passes a group's units through `memory`, RING_STAGES of them at a time. `units` of them make a tile's product, of rows of `stride`
// bytes. `row_of(slot, index, panel)` says where a panel of a unit begins in each plane; `enter(unit)` is called when a tile begins;
// `multiply(unit, half, panels, between)` makes the products of what is at `panels` and calls `between` once before it writes any,
// and `leave(unit, half)` is called when all warps have, `half` by turns 0 and 1. Whatever `enter` and `multiply` write is seen
// by `leave` of the same tile or unit, if it has a place for each turn or half. Warps wait for others as late as they can: for a
// unit's products when they have made some of the next one's.
//
// With `early`, copies begin before the kernel in front has ended, which must not write tiles, `table` or weights. A warp that starts
// copies is late; `by_turns` each does, else the first.
template <bool early, bool by_turns, unsigned planes, unsigned rows, class RowsOf, class Enter, class Multiply, class Leave>
static __device__ __forceinline__ void ring_pass(unsigned char* memory, const RingTile* tiles, const unsigned* table, unsigned stride,
                                                 unsigned units, const RingConstants& s, const RingCosts& costs, RowsOf row_of,
                                                 Enter enter, Multiply multiply, Leave leave) {
    // For each stage: its copy is there, all warps are done with it; for each half: all warps' products are.
    __shared__ unsigned long long full_bars[RING_STAGES], free_bars[RING_STAGES], made_bars[2];
    // Units from the one that warps are at to the one after that which is copied, by their order.
    __shared__ RingUnit described[4];
    __shared__ RingAhead ahead;
    const unsigned stage_bytes = s.teams * RING_PANELS * ring_panel_bytes<planes>(s);
    auto full = [&](unsigned stage) { return (unsigned)__cvta_generic_to_shared(full_bars + stage); };
    auto free = [&](unsigned stage) { return (unsigned)__cvta_generic_to_shared(free_bars + stage); };
    auto made = [&](unsigned half) { return (unsigned)__cvta_generic_to_shared(made_bars + half); };
    if (threadIdx.x == 0) {
        for (unsigned i = 0; i < RING_STAGES; i++) ring_bar(full(i), 1), ring_bar(free(i), s.warps * s.teams);
        for (unsigned i = 0; i < 2; i++) ring_bar(made(i), s.warps * s.teams);
        ring_bars_are_ready();
    }
    if (!early) ring_after_previous();
    const RingShare share = ring_share(tiles, units, s, costs);
    const unsigned count = share.end - share.first;
    // Copies the next unit, and says what comes after it.
    auto copy = [&] {
        RingAhead a = ahead;
        const unsigned slot = a.slot, index = a.index, stage = a.order % RING_STAGES;
        ahead.order = ++a.order;
        if (a.order < count) {
            a.turn &= 1;
            if (++a.index == units) {
                a.index = 0, a.turn = (a.turn ^ 1) | RING_BEGINS;
                ahead.tile = ++a.tile;
                ahead.slot = table[tiles[a.tile].expert];
            }
            const RingTile of = tiles[a.tile];
            described[a.order % 4] = {of.first, of.count, a.index, a.turn + RING_EXPERT * of.expert};
            ahead.index = a.index, ahead.turn = a.turn;
        }
        ring_copy<planes, rows>(full(stage), (unsigned)__cvta_generic_to_shared(memory) + stage * stage_bytes, stride, s,
                                [&](unsigned panel) { return row_of(slot, index, panel); });
    };
    if (threadIdx.x == 0 && count != 0) {
        const RingTile of = tiles[share.first / units];
        described[0] = {of.first, of.count, share.first % units, RING_BEGINS + RING_EXPERT * of.expert};
        ahead = {share.first / units, table[of.expert], share.first % units, RING_BEGINS, 0};
        for (unsigned i = 0; i < RING_STAGES && i < count; i++) copy();
    }
    if (early) ring_after_previous();
    __syncthreads();
    if (count == 0) return;
    RingUnit before = {};
#pragma unroll 1
    for (unsigned order = 0; order < count; order++) {
        const unsigned stage = order % RING_STAGES, half = order % 2;
        const RingUnit now = described[order % 4];
        if (now.turn & RING_BEGINS) enter(now);
        const unsigned next = order + RING_STAGES - 1, copier = by_turns ? order % (s.warps * s.teams) * 32 : 0;
        if (order > 0 && next < count && threadIdx.x == copier) {
            ring_wait(free(next % RING_STAGES), next / RING_STAGES - 1 & 1);
            copy();
        }
        __syncwarp();
        ring_wait(full(stage), order / RING_STAGES & 1);
        multiply(now, half, memory + stage * stage_bytes, [&] {
            if (order == 0) return;
            ring_wait(made(half ^ 1), (order - 1) / 2 & 1);
            leave(before, half ^ 1);
        });
        ring_arrive(free(stage));
        ring_arrive(made(half));
        before = now;
    }
    ring_wait(made((count - 1) % 2), (count - 1) / 2 & 1);
    leave(before, (count - 1) % 2);
}

#endif

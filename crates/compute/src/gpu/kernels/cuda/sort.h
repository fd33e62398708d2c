// Pairs sorted by expert, for tiles of products.
#pragma once
#include "tensor_core.h"

// Pairs of one expert: those of the list from `first` on.
struct Tile {
    u32 expert, first, count;
    // Tiles before that have up to eight pairs, and 65536 times those with more.
    u32 before;
};

struct SortConstants {
    u32 pairs, experts;
    // Entries of `tiles`; those that are not needed get count 0.
    u32 tiles;
    // Most pairs of a tile.
    u32 tokens;
    // Each expert's pairs begin at a multiple of `align` places of the list; what is left over of `places` is ABSENT.
    u32 align, places;
};

const u32 ABSENT = 0xffffffffu;

// Sorts pairs by expert, ids (pairs) → list, without those of absent experts, and cuts each expert's into tiles of
// about equal size. In what order an expert's pairs come is left open: no result depends on it. One block of 1024
// threads; experts ≤ 1024.
template <class Id>
DEVICE void sort_pairs(const u32* table, const Id* ids, u32* list, Tile* tiles, const SortConstants& c) {
    __shared__ u32 counts[1024], next[1024], warp_pairs[32], warp_tiles[32];
    const u32 expert = threadIdx.x, lane = expert & 31, warp = expert >> 5;
    counts[expert] = 0;
    __syncthreads();
    for (u32 p = threadIdx.x; p < c.pairs; p += 1024) atomicAdd(&counts[ids[p]], 1);
    __syncthreads();
    const u32 count = expert < c.experts && table[expert] != ABSENT ? counts[expert] : 0;
    const u32 parts = (count + c.tokens - 1) / c.tokens, room = (count + c.align - 1) / c.align * c.align;
    // Shares in whole groups of 16, which is what a product takes at once, or of eight where tiles have no more.
    const u32 group = min(c.tokens, 16u), groups = (count + group - 1) / group;
    auto share = [&](u32 i) { return min(groups * i / parts * group, count); };
    auto kind = [&](u32 i) { return share(i + 1) - share(i) > 8 ? 65536u : 1u; };
    u32 own_tiles = 0;
    for (u32 i = 0; i < parts; i++) own_tiles += kind(i);
    u32 pairs_end = room, tiles_end = own_tiles;
#pragma unroll
    for (u32 d = 1; d < 32; d *= 2) {
        const u32 more_pairs = __shfl_up_sync(0xffffffffu, pairs_end, d);
        const u32 more_tiles = __shfl_up_sync(0xffffffffu, tiles_end, d);
        if (lane >= d) pairs_end += more_pairs, tiles_end += more_tiles;
    }
    if (lane == 31) warp_pairs[warp] = pairs_end, warp_tiles[warp] = tiles_end;
    __syncthreads();
    u32 all_tiles = 0, all_places = 0;
    for (u32 i = 0; i < 32; i++) {
        if (i < warp) pairs_end += warp_pairs[i], tiles_end += warp_tiles[i];
        all_tiles += warp_tiles[i];
        all_places += warp_pairs[i];
    }
    const u32 first = pairs_end - room;
    u32 before = tiles_end - own_tiles;
    for (u32 i = first + count; i < pairs_end; i++) list[i] = ABSENT;
    for (u32 i = all_places + threadIdx.x; i < c.places; i += 1024) list[i] = ABSENT;
    next[expert] = first;
    counts[expert] = count;
    for (u32 i = 0; i < parts; i++) {
        const u32 at = (before & 0xffff) + (before >> 16);
        if (at < c.tiles) tiles[at] = {expert, first + share(i), share(i + 1) - share(i), before};
        before += kind(i);
    }
    for (u32 i = (all_tiles & 0xffff) + (all_tiles >> 16) + threadIdx.x; i < c.tiles; i += 1024) tiles[i] = {0, 0, 0, 0};
    __syncthreads();
    for (u32 p = threadIdx.x; p < c.pairs; p += 1024) {
        const u32 e = ids[p];
        if (counts[e] != 0) list[atomicAdd(&next[e], 1)] = p;
    }
}

// What experts of a batch start from: their tokens as `panels.h` says and row by row, and pairs sorted by expert.
#include "../routing.h"
// Functions of the dialect are of one file each; those of tensor cores are not.
#undef DEVICE
#include "blocks.h"
#include "sort.h"

// Pairs that are chosen here, at most.
const u32 MOST_PAIRS = 8192;

struct EnterExpertsConstants {
    u32 cols;
    NormConstants norm;
    SortConstants sort;
    // Whether experts are chosen here, by logits and as `warp_choose` does, and how; else `ids` says which they are.
    u32 routes;
    // Whether the kernel in front leaves x, its norm and what becomes of it alone: then rows enter while that runs.
    u32 early;
    RouteConstants route;
};

// Grid: a block that sorts, for which its warps choose for themselves, then one for each row of x, which writes ids and weights if
// experts are chosen.
extern "C" __global__ void __launch_bounds__(1024)
    enter_experts(const float* x, const float* weight, const u32* table, u32* ids, uint4* out, uint4* by_row, float* scale,
                  u32* list, Tile* tiles, const float* logits, float* weights,
                  const __grid_constant__ EnterExpertsConstants c) {
    const Ctx ctx;
    const u32 top_k = c.route.top_k;
    if (blockIdx.x == 0) {
        __shared__ u8 experts[MOST_PAIRS];
        after_previous();
        if (!c.routes) return sort_pairs(table, ids, list, tiles, c.sort);
        for (u32 row = ctx.warp(); row * top_k < c.sort.pairs; row += ctx.warps()) {
            const u32 chosen = warp_choose(ctx, c.route, logits + row * c.route.experts, top_k);
            if (ctx.lane() < top_k) experts[row * top_k + ctx.lane()] = (u8)chosen;
        }
        __syncthreads();
        return sort_pairs(table, experts, list, tiles, c.sort);
    }
    const u32 row = blockIdx.x - 1;
    if (!c.early) after_previous();
    make_blocks<32>(row, x + (u64)row * c.cols, weight, out, by_row, scale, c.cols, c.norm);
    if (c.early) after_previous();
    if (!c.routes) return;
    __shared__ __align__(16) float scores[WARP_EXPERTS];
    __shared__ __align__(16) u32 keys[WARP_EXPERTS], chosen[MAX_CHOSEN];
    const RouteMemory m = {scores, keys, keys, chosen};
    const float poison = choose(ctx, c.route, logits + row * c.route.experts, nullptr, m, true);
    if (ctx.thread() == 0) weigh_chosen(ctx, c.route, m, poison, ids + row * top_k, weights + row * top_k);
}

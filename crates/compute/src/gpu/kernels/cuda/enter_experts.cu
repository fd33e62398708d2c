// What experts of a batch start from: their tokens as `panels.h` says and row by row, and pairs sorted by expert.
#include "blocks.h"
#include "sort.h"

struct EnterExpertsConstants {
    u32 cols;
    NormConstants norm;
    SortConstants sort;
};

// Grid: a block that sorts, then one for each row of x.
extern "C" __global__ void __launch_bounds__(1024)
    enter_experts(const float* x, const float* weight, const u32* table, const u32* ids, uint4* out, uint4* by_row, float* scale,
                  u32* list, Tile* tiles, const __grid_constant__ EnterExpertsConstants c) {
    after_previous();
    if (blockIdx.x == 0) return sort_pairs(table, ids, list, tiles, c.sort);
    const u32 row = blockIdx.x - 1;
    make_blocks<32>(row, x + (u64)row * c.cols, weight, out, by_row, scale, c.cols, c.norm);
}

// Activations as `panels.h` says.
#include "blocks.h"

// Stands for a pair that is not there.
const u32 ABSENT = 0xffffffffu;

struct BlocksConstants {
    // Of x and of the result.
    u32 rows, cols;
    // 0 if rows stay as they are, ABSENT if those stay that the list has, else how many pairs of the list share a row of x.
    u32 share;
    NormConstants norm;
};

// Rows of x, or those of the list's pairs. Grid: rows.
extern "C" __global__ void __launch_bounds__(256)
    blocks_of(const float* x, const float* weight, const u32* list, uint4* out, float* scale,
              const __grid_constant__ BlocksConstants c) {
    after_previous();
    u32 own = blockIdx.x;
    if (c.share != 0) {
        const u32 pair = list[blockIdx.x];
        if (pair == ABSENT) return;
        if (c.share != ABSENT) own = pair / c.share;
    }
    make_blocks<8>(blockIdx.x, x + (u64)own * c.cols, weight, out, nullptr, scale, c.cols, c.norm);
}

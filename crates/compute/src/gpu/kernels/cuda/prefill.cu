// What surrounds products on tensor cores.
#include "tensor_core.h"

struct ToF16Constants {
    u32 rows, cols;
};

// x (rows, cols) f32 → out, f16, each row times a power of two that brings its largest value to 2^14..2^15;
// scale (rows) gets the inverse. A row that is not finite stays so. One warp a row, cols a multiple of 4.
extern "C" __global__ void __launch_bounds__(256)
    to_f16(const float* x, u16* out, float* scale, const __grid_constant__ ToF16Constants c) {
    const u32 row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x & 31;
    if (row >= c.rows) return;
    const float4* from = (const float4*)(x + (u64)row * c.cols);
    float largest = 0.0f;
    for (u32 i = lane; i < c.cols / 4; i += 32) {
        const float4 v = from[i];
        largest = fmaxf(largest, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
    }
#pragma unroll
    for (u32 mask = 16; mask > 0; mask >>= 1) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
    // 2^(exponent − 14) and its inverse from the exponent's bits; none for rows of zeros, subnormals and infinities.
    const u32 exponent = __float_as_uint(largest) >> 23;
    const bool plain = exponent > 20 && exponent < 250;
    const float up = plain ? __uint_as_float((268 - exponent) << 23) : 1.0f;
    if (lane == 0) scale[row] = plain ? __uint_as_float((exponent - 14) << 23) : 1.0f;
    uint2* to = (uint2*)(out + (u64)row * c.cols);
    for (u32 i = lane; i < c.cols / 4; i += 32) {
        const float4 v = from[i];
        to[i] = make_uint2(h2_of(v.x * up, v.y * up), h2_of(v.z * up, v.w * up));
    }
}

struct Tile {
    u32 expert, first, count, unused;
};

struct TilesConstants {
    u32 experts;
    // Entries of `tiles`; those that are not needed get count 0.
    u32 tiles;
    // Most pairs of a tile.
    u32 tokens;
};

// Cuts the pairs of each expert, start[e]..start[e + 1], into tiles of about equal size. One block of 1024 threads;
// experts ≤ 1024.
extern "C" __global__ void __launch_bounds__(1024)
    moe_tiles(const u32* start, Tile* tiles, const __grid_constant__ TilesConstants c) {
    __shared__ u32 warp_sum[32];
    const u32 expert = threadIdx.x, lane = expert & 31, warp = expert >> 5;
    const u32 first = expert < c.experts ? start[expert] : 0;
    const u32 count = expert < c.experts ? start[expert + 1] - first : 0;
    const u32 parts = (count + c.tokens - 1) / c.tokens;
    u32 sum = parts;
#pragma unroll
    for (u32 d = 1; d < 32; d *= 2) {
        const u32 other = __shfl_up_sync(0xffffffffu, sum, d);
        if (lane >= d) sum += other;
    }
    if (lane == 31) warp_sum[warp] = sum;
    __syncthreads();
    u32 before = 0, total = 0;
    for (u32 i = 0; i < 32; i++) {
        if (i < warp) before += warp_sum[i];
        total += warp_sum[i];
    }
    const u32 at = before + sum - parts;
    for (u32 i = 0; i < parts && at + i < c.tiles; i++) {
        // Shares in whole groups of 16, which is what a product takes at once.
        const u32 groups = (count + 15) / 16;
        const u32 from = min(groups * i / parts * 16, count), to = min(groups * (i + 1) / parts * 16, count);
        tiles[at + i] = {expert, first + from, to - from, 0};
    }
    for (u32 i = total + threadIdx.x; i < c.tiles; i += 1024) tiles[i] = {0, 0, 0, 0};
}

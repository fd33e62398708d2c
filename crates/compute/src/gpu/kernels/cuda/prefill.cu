// What surrounds products on tensor cores.
#include "sort.h"

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

// See `sort_pairs`.
extern "C" __global__ void __launch_bounds__(1024)
    tensor_sort(const u32* table, const u32* ids, u32* list, Tile* tiles, const __grid_constant__ SortConstants c) {
    sort_pairs(table, ids, list, tiles, c);
}

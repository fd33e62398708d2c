// A row of activations as panels take them.
#pragma once
#include "tensor_core.h"

// As in `../activations.h`.
struct NormConstants {
    // Root-mean-square norm: whether there is one, and its epsilon.
    u32 has_norm;
    float eps;
};

// A row of x (…, cols) f32, normalised if that is asked for → `row` of out, blocks of eight rows × eight columns as `panels.h` says,
// times a power of two that brings its largest value to 2^9..2^10, so that sums of a few are f16 too; scale (rows) by which its
// products are to be multiplied. With `by_row`, also to it, (rows, cols). A row that is not finite stays so. One block of
// 32 · WARPS threads; cols a multiple of 8.
template <u32 WARPS>
DEVICE void make_blocks(u32 row, const float* x, const float* weight, uint4* out, uint4* by_row, float* scale, u32 cols,
                        const NormConstants& norm_of) {
    __shared__ float of_warps[2][WARPS];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const float4* from = (const float4*)x;
    const float4* norm = (const float4*)weight;
    float largest = 0.0f, squares = 0.0f;
    for (u32 i = threadIdx.x; i < cols / 4; i += 32 * WARPS) {
        float4 v = from[i];
        if (norm_of.has_norm) {
            squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
            const float4 w = norm[i];
            v = make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w);
        }
        largest = fmaxf(largest, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
    }
#pragma unroll
    for (u32 mask = 16; mask > 0; mask >>= 1) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
        squares += __shfl_xor_sync(0xffffffffu, squares, mask);
    }
    if (lane == 0) of_warps[0][warp] = largest, of_warps[1][warp] = squares;
    __syncthreads();
    largest = squares = 0.0f;
#pragma unroll
    for (u32 i = 0; i < WARPS; i++) largest = fmaxf(largest, of_warps[0][i]), squares += of_warps[1][i];
    // 2^(exponent − 9) and its inverse from the exponent's bits; none for rows of zeros, subnormals and infinities.
    const u32 exponent = __float_as_uint(largest) >> 23;
    const bool plain = exponent > 20 && exponent < 250;
    const float up = plain ? __uint_as_float((263 - exponent) << 23) : 1.0f;
    // The norm's factor is the same for all of a row.
    const float factor = norm_of.has_norm ? rsqrtf(squares / (float)cols + norm_of.eps) : 1.0f;
    if (threadIdx.x == 0) scale[row] = (plain ? __uint_as_float((exponent - 9) << 23) : 1.0f) * factor;
    const u32 eights = (cols + 127) / 128 * 16;
    uint4* to = out + (u64)(row / 8) * eights * 8 + row % 8;
    for (u32 i = threadIdx.x; i < eights; i += 32 * WARPS) {
        uint4 units = make_uint4(0, 0, 0, 0);
        if (8 * i < cols) {
            float4 a = from[2 * i], b = from[2 * i + 1];
            if (norm_of.has_norm) {
                const float4 v = norm[2 * i], w = norm[2 * i + 1];
                a = make_float4(a.x * v.x, a.y * v.y, a.z * v.z, a.w * v.w);
                b = make_float4(b.x * w.x, b.y * w.y, b.z * w.z, b.w * w.w);
            }
            units = make_uint4(h2_of(a.x * up, a.y * up), h2_of(a.z * up, a.w * up), h2_of(b.x * up, b.y * up),
                               h2_of(b.z * up, b.w * up));
            if (by_row != nullptr) by_row[(u64)row * (cols / 8) + i] = units;
        }
        to[8 * i] = units;
    }
}

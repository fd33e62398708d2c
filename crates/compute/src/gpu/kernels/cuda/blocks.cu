// Activations as `panels.cu` takes them.
#include "tensor_core.h"

// Stands for a pair that is not there.
const u32 ABSENT = 0xffffffffu;

// As in `../activations.h`.
struct NormConstants {
    // Root-mean-square norm: whether there is one, and its epsilon.
    u32 has_norm;
    float eps;
};

struct BlocksConstants {
    // Of x and of the result.
    u32 rows, cols;
    // 0 if rows stay as they are, ABSENT if those stay that the list has, else how many pairs of the list share a row of x.
    u32 share;
    NormConstants norm;
};

// x (…, cols) f32, normalised if that is asked for → out, blocks of eight rows × eight columns as `panels.cu` takes them, each
// row times a power of two that brings its largest value to 2^9..2^10, so that sums of a few are f16 too; scale (rows) by which
// its products are to be multiplied. A row that is not finite stays so. Rows of the result are those of x, or those of the
// list's pairs. Grid: rows; cols a multiple of 8.
extern "C" __global__ void __launch_bounds__(256)
    blocks_of(const float* x, const float* weight, const u32* list, uint4* out, float* scale,
              const __grid_constant__ BlocksConstants c) {
    __shared__ float of_warps[2][8];
    const u32 row = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    after_previous();
    u32 own = row;
    if (c.share != 0) {
        const u32 pair = list[row];
        if (pair == ABSENT) return;
        if (c.share != ABSENT) own = pair / c.share;
    }
    const float4* from = (const float4*)(x + (u64)own * c.cols);
    const float4* norm = (const float4*)weight;
    float largest = 0.0f, squares = 0.0f;
    for (u32 i = threadIdx.x; i < c.cols / 4; i += 256) {
        float4 v = from[i];
        if (c.norm.has_norm) {
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
    for (u32 i = 0; i < 8; i++) largest = fmaxf(largest, of_warps[0][i]), squares += of_warps[1][i];
    // 2^(exponent − 9) and its inverse from the exponent's bits; none for rows of zeros, subnormals and infinities.
    const u32 exponent = __float_as_uint(largest) >> 23;
    const bool plain = exponent > 20 && exponent < 250;
    const float up = plain ? __uint_as_float((263 - exponent) << 23) : 1.0f;
    // The norm's factor is the same for all of a row.
    const float factor = c.norm.has_norm ? rsqrtf(squares / (float)c.cols + c.norm.eps) : 1.0f;
    if (threadIdx.x == 0) scale[row] = (plain ? __uint_as_float((exponent - 9) << 23) : 1.0f) * factor;
    const u32 eights = (c.cols + 127) / 128 * 16;
    uint4* to = out + (u64)(row / 8) * eights * 8 + row % 8;
    for (u32 i = threadIdx.x; i < eights; i += 256) {
        uint4 units = make_uint4(0, 0, 0, 0);
        if (8 * i < c.cols) {
            float4 a = from[2 * i], b = from[2 * i + 1];
            if (c.norm.has_norm) {
                const float4 v = norm[2 * i], w = norm[2 * i + 1];
                a = make_float4(a.x * v.x, a.y * v.y, a.z * v.z, a.w * v.w);
                b = make_float4(b.x * w.x, b.y * w.y, b.z * w.z, b.w * w.w);
            }
            units = make_uint4(h2_of(a.x * up, a.y * up), h2_of(a.z * up, a.w * up), h2_of(b.x * up, b.y * up),
                               h2_of(b.z * up, b.w * up));
        }
        to[8 * i] = units;
    }
}

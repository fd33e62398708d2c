// Products of many tokens with weights of f32 on tensor cores, for routers: each f32 is two tf32 of 11 bits, so that products
// lose less than sums of f32 do.
#include "tensor_core.h"

// As in `gemm.cu`.
struct Format {
    u32 kind, cols;
    u32 strides[3];
};

struct LinearConstants {
    Format weight;
    u32 rows, tokens;
    u32 has_bias, has_residual;
};

const u32 SIDE = 32;
const u32 STEP = 128;
const u32 STAGES = 3;
// Floats from a row to the next, so that a fragment's are in 32 banks.
const u32 STRIDE = STEP + 4;
const u32 STAGE_FLOATS = 2 * SIDE * STRIDE;
const u32 THREADS = 256;

DEVICE u32 tf32_of(float x) {
    u32 d;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(d) : "f"(x));
    return d;
}

// As `mma_16816`, of 8 columns of tf32: lane l holds of a rows l/4, l/4 + 8 at column l%4, then at l%4 + 4; of b the same
// columns of row l/4.
DEVICE void mma_1688(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Values as the sum of two tf32, up to 2^-22 of them.
template <int n>
struct Split {
    u32 high[n], low[n];
    DEVICE explicit Split(const float (&x)[n]) {
#pragma unroll
        for (int i = 0; i < n; i++) {
            high[i] = tf32_of(x[i]);
            low[i] = tf32_of(x[i] - __uint_as_float(high[i]));
        }
    }
};

// x (tokens, cols) · weightᵀ + bias + residual → out (tokens, rows). A block makes 32 × 32 results: two groups of 16 tokens by
// four warps each, which take a quarter of every step's columns; their sums are added in order. Grid: (rows / 32,
// tokens / 32); cols a multiple of 4.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    exact_linear(const float* x, const float* weight, const float* bias, const float* residual, float* out,
                 const __grid_constant__ LinearConstants c) {
    extern __shared__ __align__(16) float shared[];
    const u32 thread = threadIdx.x, lane = thread & 31, group = thread / 32 % 2, quarter = thread / 64;
    const u32 first_row = blockIdx.x * SIDE, first = blockIdx.y * SIDE;
    const u32 steps = (c.weight.cols + STEP - 1) / STEP;
    // Rows of a stage: tokens, then weights.
    auto copy = [&](u32 step) {
        const u32 to = shared_address(shared) + step % STAGES * STAGE_FLOATS * 4;
        const u32 column = step * STEP + lane * 4;
#pragma unroll
        for (u32 i = 0; i < 2 * SIDE / 8; i++) {
            const u32 line = thread / 32 + 8 * i;
            const bool of_x = i < SIDE / 8;
            const u32 row = of_x ? first + line : first_row + line - SIDE;
            const bool present = column < c.weight.cols && row < (of_x ? c.tokens : c.rows);
            copy_async_16(to + (line * STRIDE + lane * 4) * 4,
                          (of_x ? x : weight) + (present ? (u64)row * c.weight.cols + column : 0), present);
        }
        copy_async_commit();
    };

    float sum[4][4] = {}, rest[4][4] = {};
    for (u32 i = 0; i < STAGES - 1; i++) {
        if (i < steps) copy(i);
        else copy_async_commit();
    }
    for (u32 step = 0; step < steps; step++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < steps) copy(step + STAGES - 1);
        else copy_async_commit();
        const float* tile = shared + step % STAGES * STAGE_FLOATS + quarter * (STEP / 4) + lane % 4;
#pragma unroll
        for (u32 k = 0; k < STEP / 4; k += 8) {
            const float* from = tile + (group * 16 + lane / 4) * STRIDE + k;
            const float values[4] = {from[0], from[8 * STRIDE], from[4], from[8 * STRIDE + 4]};
            const Split<4> a(values);
#pragma unroll
            for (u32 n = 0; n < 4; n++) {
                const float* other = tile + (SIDE + n * 8 + lane / 4) * STRIDE + k;
                const float pair[2] = {other[0], other[4]};
                const Split<2> b(pair);
                mma_1688(rest[n], a.high, b.low);
                mma_1688(rest[n], a.low, b.high);
                mma_1688(sum[n], a.high, b.high);
            }
        }
    }
    copy_async_wait<0>();
    __syncthreads();
    float* sums = shared + (quarter * SIDE + group * 16 + lane / 4) * (SIDE + 1) + lane % 4 * 2;
#pragma unroll
    for (u32 n = 0; n < 4; n++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) sums[i / 2 * 8 * (SIDE + 1) + n * 8 + i % 2] = sum[n][i] + rest[n][i];
    __syncthreads();
    for (u32 i = thread; i < SIDE * SIDE; i += THREADS) {
        const u32 token = first + i / SIDE, row = first_row + i % SIDE;
        if (token >= c.tokens || row >= c.rows) continue;
        float all = 0.0f;
#pragma unroll
        for (u32 q = 0; q < 4; q++) all += shared[(q * SIDE + i / SIDE) * (SIDE + 1) + i % SIDE];
        const u64 at = (u64)token * c.rows + row;
        out[at] = all + (c.has_bias ? bias[row] : 0.0f) + (c.has_residual ? residual[at] : 0.0f);
    }
}

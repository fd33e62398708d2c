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

const u32 TOKENS = 32, STAGES = 3, THREADS = 512;
// Warps side by side for the columns of a step, of every 64 of which each takes eight.
const u32 PARTS = 8, RUN = 8 * PARTS;

// A tf32 keeps the upper 19 bits of an f32, and products leave the others out: the nearest one. What is not a number may become
// one, but then what is left of it is none.
DEVICE u32 tf32_of(float x) { return (__float_as_uint(x) + 0x1000) & 0xffffe000; }

// As `mma_16816`, of 8 columns of tf32: lane l holds of a rows l/4, l/4 + 8 at column l%4, then at l%4 + 4; of b the same
// columns of row l/4.
DEVICE void mma_1688(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Values as the sum of two tf32, up to 2^-21 of them.
template <int n>
struct Split {
    u32 high[n], low[n];
    DEVICE explicit Split(const float (&x)[n]) {
#pragma unroll
        for (int i = 0; i < n; i++) {
            high[i] = tf32_of(x[i]);
            low[i] = __float_as_uint(x[i] - __uint_as_float(high[i]));
        }
    }
};

// x (tokens, cols) · weightᵀ + bias + residual → out (tokens, rows). A block makes 32 tokens × ROWS rows, STEP columns at a time; a
// warp M · 16 tokens × 32 rows for its part of the columns, the sums of which are added in order. That order depends on neither.
template <u32 ROWS, u32 STEP, u32 M>
DEVICE void multiply(float* shared, const float* x, const float* weight, const float* bias, const float* residual, float* out,
                     const LinearConstants& c) {
    // Floats from a row to the next, so that a fragment's are in 32 banks.
    const u32 STRIDE = STEP + 4, STAGE_FLOATS = (TOKENS + ROWS) * STRIDE, LINES = STEP / 4;
    const u32 thread = threadIdx.x, lane = thread & 31, side = thread / 32 % 2, part = thread / 64;
    // Two warps share a part of the columns: halves of the tokens, or of the rows.
    const u32 first_token = M == 1 ? side * 16 : 0, half = M == 1 ? 0 : side * 32;
    const u32 first_row = blockIdx.x * ROWS, first = blockIdx.y * TOKENS;
    const u32 steps = (c.weight.cols + STEP - 1) / STEP;
    // Rows of a stage: tokens, then weights.
    auto copy = [&](u32 step) {
        const u32 to = shared_address(shared) + step % STAGES * STAGE_FLOATS * 4;
        const u32 own = thread % LINES * 4, column = step * STEP + own;
#pragma unroll
        for (u32 i = 0; i < (TOKENS + ROWS) * LINES / THREADS; i++) {
            const u32 line = thread / LINES + THREADS / LINES * i;
            const bool of_x = line < TOKENS;
            const u32 row = of_x ? first + line : first_row + line - TOKENS;
            const bool present = column < c.weight.cols && row < (of_x ? c.tokens : c.rows);
            copy_async_16(to + (line * STRIDE + own) * 4,
                          (of_x ? x : weight) + (present ? (u64)row * c.weight.cols + column : 0), present);
        }
        copy_async_commit();
    };

    float sum[M][4][4] = {}, rest[M][4][4] = {};
    for (u32 i = 0; i < STAGES - 1; i++) {
        if (i < steps) copy(i);
        else copy_async_commit();
    }
    for (u32 step = 0; step < steps; step++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < steps) copy(step + STAGES - 1);
        else copy_async_commit();
#pragma unroll
        for (u32 run = 0; run < STEP; run += RUN) {
            const float* tile = shared + step % STAGES * STAGE_FLOATS + run + part * 8 + lane % 4;
            u32 high[M][4], low[M][4];
#pragma unroll
            for (u32 m = 0; m < M; m++) {
                const float* from = tile + (first_token + m * 16 + lane / 4) * STRIDE;
                const float values[4] = {from[0], from[8 * STRIDE], from[4], from[8 * STRIDE + 4]};
                const Split<4> a(values);
#pragma unroll
                for (u32 i = 0; i < 4; i++) high[m][i] = a.high[i], low[m][i] = a.low[i];
            }
#pragma unroll
            for (u32 n = 0; n < 4; n++) {
                const float* other = tile + (TOKENS + half + n * 8 + lane / 4) * STRIDE;
                const float pair[2] = {other[0], other[4]};
                const Split<2> b(pair);
#pragma unroll
                for (u32 m = 0; m < M; m++) {
                    mma_1688(rest[m][n], high[m], b.low);
                    mma_1688(rest[m][n], low[m], b.high);
                    mma_1688(sum[m][n], high[m], b.high);
                }
            }
        }
    }
    copy_async_wait<0>();
    __syncthreads();
    float* sums = shared + (part * TOKENS + first_token + lane / 4) * (ROWS + 1) + half + lane % 4 * 2;
#pragma unroll
    for (u32 m = 0; m < M; m++)
#pragma unroll
        for (u32 n = 0; n < 4; n++)
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                sums[(m * 16 + i / 2 * 8) * (ROWS + 1) + n * 8 + i % 2] = sum[m][n][i] + rest[m][n][i];
    __syncthreads();
    for (u32 i = thread; i < TOKENS * ROWS; i += THREADS) {
        const u32 token = first + i / ROWS, row = first_row + i % ROWS;
        if (token >= c.tokens || row >= c.rows) continue;
        float all = 0.0f;
#pragma unroll
        for (u32 p = 0; p < PARTS; p++) all += shared[(p * TOKENS + i / ROWS) * (ROWS + 1) + i % ROWS];
        const u64 at = (u64)token * c.rows + row;
        out[at] = all + (c.has_bias ? bias[row] : 0.0f) + (c.has_residual ? residual[at] : 0.0f);
    }
}

extern __shared__ __align__(16) float shared[];

// Grid: (rows / 32, tokens / 32); cols a multiple of 4.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    exact_linear_32(const float* x, const float* weight, const float* bias, const float* residual, float* out,
                    const __grid_constant__ LinearConstants c) {
    multiply<32, 128, 1>(shared, x, weight, bias, residual, out, c);
}

// Grid: (rows / 64, tokens / 32); cols a multiple of 4.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    exact_linear_64(const float* x, const float* weight, const float* bias, const float* residual, float* out,
                    const __grid_constant__ LinearConstants c) {
    multiply<64, 64, 2>(shared, x, weight, bias, residual, out, c);
}

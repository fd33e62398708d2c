// Products of many tokens with quantised weights on tensor cores: out = x · weightᵀ, dense or grouped by expert.
//
// A block computes TOKENS × 128 results. Each step takes 64 columns: x comes as f16 through asynchronous copies, three
// steps deep; weights are unpacked from registers into shared memory, two steps deep, while the tensor cores work on the
// step before. Eight warps share a tile as 2 (tokens) × 4 (weight rows); groups of 16 tokens go to the two halves in
// turn, and those beyond the tile's tokens are left out, so that a tile of few tokens costs few products.
//
// The sum over columns runs in one order whatever else is in the batch: a token's result depends on its own row only.
// Compiled once for each encoding: DTYPE.
#pragma once
#include "matrices.h"

const u32 WEIGHT_ROWS = 128;
const u32 STEP = 64;
const u32 TOKENS = 128;
const u32 THREADS = 256;
const u32 X_STAGES = 3;
const u32 TILE_BYTES = 128 * STEP * 2;
const u32 SHARED_BYTES = (X_STAGES + 2) * TILE_BYTES;

// A tile's row is 128 bytes: eight pieces of 16, permuted so that eight rows' same piece is in eight banks' groups.
DEVICE u32 piece(u32 row, u32 column_16) { return row * 128 + ((column_16 ^ (row & 7)) << 4); }

struct Acc {
    float v[4][4][4]; // [groups of 16 tokens][groups of 8 weight rows][fragment]
};

// Products of one tile. `row_of(i)` is the row of x of token i < count; `address(r)` is where weight row r of the tile is.
template <class RowOf>
DEVICE void multiply(Acc& acc, u8* shared, const u16* x, u32 cols, u32 count, RowOf row_of, const RowAddress& weight,
                     u32 kind) {
    const u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const u32 base = shared_address(shared);
    const u32 steps = (cols + STEP - 1) / STEP;

    // Copies of x: this thread's piece of four rows.
    const u16* x_row[4];
    bool x_present[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 token = thread / 8 + 32 * i;
        x_present[i] = token < count;
        x_row[i] = x + (u64)row_of(x_present[i] ? token : 0) * cols + (thread % 8) * 8;
    }
    auto copy_x = [&](u32 step) {
        const u32 to = base + (step % X_STAGES) * TILE_BYTES;
        const u32 column = step * STEP;
        const bool within = column + (thread % 8) * 8 < cols;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const bool present = x_present[i] && within;
            copy_async_16(to + piece(thread / 8 + 32 * i, thread % 8), present ? x_row[i] + column : x, present);
        }
    };

    // Weights: this thread's half of row thread % 128.
    const u32 row = thread % 128, h = thread / 128;
    typename Weight::Raw raw;
    auto load_weight = [&](u32 step) {
        if (Weight::SPLIT || step * STEP + 32 * h < cols) Weight::load(raw, weight, step * STEP, h, kind);
    };
    auto unpack_weight = [&](u32 step) {
        Columns w;
        if (Weight::SPLIT || step * STEP + 32 * h < cols) {
            Weight::unpack(raw, step * STEP, h, w);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) w.a[i] = w.b[i] = 0;
        }
        const u32 to = base + (X_STAGES + step % 2) * TILE_BYTES;
        const u32 a = Weight::SPLIT ? 2 * h : 4 * h, b = Weight::SPLIT ? 4 + 2 * h : 4 * h + 2;
        store_shared_16(to + piece(row, a), w.a[0], w.a[1], w.a[2], w.a[3]);
        store_shared_16(to + piece(row, a + 1), w.a[4], w.a[5], w.a[6], w.a[7]);
        store_shared_16(to + piece(row, b), w.b[0], w.b[1], w.b[2], w.b[3]);
        store_shared_16(to + piece(row, b + 1), w.b[4], w.b[5], w.b[6], w.b[7]);
    };

    const u32 half = warp & 1, quarter = warp >> 1;
    auto product = [&](u32 step) {
        const u32 x_tile = base + (step % X_STAGES) * TILE_BYTES;
        const u32 w_tile = base + (X_STAGES + step % 2) * TILE_BYTES;
#pragma unroll
        for (u32 k = 0; k < STEP / 16; k++) {
            u32 b[2][4];
#pragma unroll
            for (u32 n = 0; n < 2; n++) {
                // Matrices: rows 0..8 at columns k, rows 0..8 at k + 8, rows 8..16 at k, rows 8..16 at k + 8.
                const u32 r = quarter * 32 + n * 16 + (lane & 7) + ((lane & 16) >> 1);
                ldmatrix_x4(b[n], w_tile + piece(r, 2 * k + ((lane >> 3) & 1)));
            }
#pragma unroll
            for (u32 m = 0; m < 4; m++) {
                const u32 first = (2 * m + half) * 16;
                if (first < count) {
                    u32 a[4];
                    ldmatrix_x4(a, x_tile + piece(first + (lane & 15), 2 * k + (lane >> 4)));
#pragma unroll
                    for (u32 n = 0; n < 4; n++)
                        mma_16816(acc.v[m][n], a, b[n / 2][2 * (n % 2)], b[n / 2][2 * (n % 2) + 1]);
                }
            }
        }
    };

    copy_x(0);
    copy_async_commit();
    if (steps > 1) copy_x(1);
    copy_async_commit();
    load_weight(0);
    unpack_weight(0);
    if (steps > 1) load_weight(1);
    for (u32 step = 0; step < steps; step++) {
        copy_async_wait<1>();
        // Now x and weights of this step are there for all, and nobody reads those of the step before.
        __syncthreads();
        if (step + 2 < steps) copy_x(step + 2);
        copy_async_commit();
        product(step);
        if (step + 1 < steps) unpack_weight(step + 1);
        if (step + 2 < steps) load_weight(step + 2);
    }
}

DEVICE void clear(Acc& acc) {
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc.v[m][n][i] = 0.0f;
}

// What latent attention adds to attention over the latents: queries into the latent space, results out of it.
#include "weights.h"

struct LatentConstants {
    Format weight;
    uint heads;
    // Rows of the weight from one head's to the next's, and the first that is used.
    uint head_rows, first_row;
    // Channels of a head that come in and go out, and those from a head's results to the next one's.
    uint in, out, stride;
    // Whether results are f16.
    uint halves;
};

DEVICE void store_result(GPTR(float) result, ulong index, float v, uint halves) {
    if (halves) GCAST(ushort, result)[index] = f32_to_f16(v);
    else result[index] = v;
}

// Each head's weight (in, out), transposed, · x (rows, heads · in) → out. A thread makes 8 outputs. Grid: (out / 8 /
// threads, heads, rows).
KERNEL(latent_transposed, LatentConstants, (const uchar, plane0), (const uchar, plane1), (const uchar, plane2),
       (const float, x), (float, result)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread(), head = ctx.group_y(), row = ctx.group_z();
    if (8 * i >= c.out) return;
    float sums[8];
    for (uint j = 0; j < 8; ++j) sums[j] = 0.0f;
    for (uint n = 0; n < c.in; ++n) {
        const float v = x[((ulong)row * c.heads + head) * c.in + n];
        const Row w = row_of(plane0, plane1, plane2, c.weight, head * c.head_rows + c.first_row + n);
        const Float8 values = load8<ANY>(c.weight, w, i);
        for (uint j = 0; j < 8; ++j) sums[j] += values.v[j] * v;
    }
    for (uint j = 0; j < 8 && 8 * i + j < c.out; ++j) {
        store_result(result, ((ulong)row * c.heads + head) * c.stride + 8 * i + j, sums[j], c.halves);
    }
}

// Each head's weight (out, in) · x (rows, heads · in) → out. A warp makes one output. Grid: (out / warps, heads, rows).
KERNEL(latent_matvec, LatentConstants, (const uchar, plane0), (const uchar, plane1), (const uchar, plane2),
       (const float, x), (float, result)) {
    const uint o = ctx.group_x() * ctx.warps() + ctx.warp(), head = ctx.group_y(), row = ctx.group_z();
    if (o >= c.out) return;
    const Row w = row_of(plane0, plane1, plane2, c.weight, head * c.head_rows + c.first_row + o);
    const float sum = lane_sum(ctx, lane_dot<ANY>(ctx, c.weight, w, x + ((ulong)row * c.heads + head) * c.in));
    if (ctx.lane() == 0) store_result(result, ((ulong)row * c.heads + head) * c.stride + o, sum, c.halves);
}

struct LatentWeightsConstants {
    Format weight;
    // Eights of values in all.
    uint count;
    uint head_rows, first_row;
    // Of a head's part: its rows and columns, in the end.
    uint out, in;
    // Whether the weight's rows are the part's columns.
    uint transposed;
};

// Each head's part of a weight → (heads, out, in) f16; in and out are multiples of eight. Eight values a thread.
KERNEL(latent_weights, LatentWeightsConstants, (const uchar, plane0), (const uchar, plane1), (const uchar, plane2),
       (ushort, result)) {
    const uint index = ctx.group_x() * ctx.threads() + ctx.thread();
    if (index >= c.count) return;
    // Threads side by side write side by side.
    const uint width = c.transposed ? c.in : c.in / 8, rest = index / width, column = index % width;
    const uint rows = c.transposed ? c.out / 8 : c.out, head = rest / rows, own = rest % rows;
    const uint first = head * c.head_rows + c.first_row;
    const Row w = row_of(plane0, plane1, plane2, c.weight, first + (c.transposed ? column : own));
    const Float8 values = load8<ANY>(c.weight, w, c.transposed ? own : column);
    if (c.transposed) {
        for (uint j = 0; j < 8; ++j)
            result[((ulong)head * c.out + 8 * own + j) * c.in + column] = f32_to_f16(values.v[j]);
        return;
    }
    uint pairs[4];
    for (uint j = 0; j < 4; ++j)
        pairs[j] = (uint)f32_to_f16(values.v[2 * j]) | (uint)f32_to_f16(values.v[2 * j + 1]) << 16;
    const Word4 packed = {pairs[0], pairs[1], pairs[2], pairs[3]};
    store_u32x4(GCAST(uchar, result) + 16 * (ulong)index, 0, packed);
}

struct CopyHeadsConstants {
    // Elements in all, those of a head, and where they go in a head's result.
    uint count, len, stride, start;
    // Whether results are f16.
    uint halves;
};

// x (heads, len) → elements start.. of each head's result.
KERNEL(copy_heads, CopyHeadsConstants, (const float, x), (float, result)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i < c.count) store_result(result, (ulong)(i / c.len) * c.stride + c.start + i % c.len, x[i], c.halves);
}

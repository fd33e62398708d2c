// What latent attention adds to attention over the latents: queries into the latent space, results out of it.
#include "weights.h"

struct LatentConstants {
    Format weight;
    uint heads;
    // Rows of the weight from one head's to the next's, and the first that is used.
    uint head_rows, first_row;
    // Channels of a head that come in and go out.
    uint in, out;
    // Elements of a head's result, of which `out` are written from `start` on.
    uint stride, start;
};

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
        result[((ulong)row * c.heads + head) * c.stride + c.start + 8 * i + j] = sums[j];
    }
}

// Each head's weight (out, in) · x (rows, heads · in) → out. A warp makes one output. Grid: (out / warps, heads, rows).
KERNEL(latent_matvec, LatentConstants, (const uchar, plane0), (const uchar, plane1), (const uchar, plane2),
       (const float, x), (float, result)) {
    const uint o = ctx.group_x() * ctx.warps() + ctx.warp(), head = ctx.group_y(), row = ctx.group_z();
    if (o >= c.out) return;
    const Row w = row_of(plane0, plane1, plane2, c.weight, head * c.head_rows + c.first_row + o);
    const float sum = lane_sum(ctx, lane_dot<ANY>(ctx, c.weight, w, x + ((ulong)row * c.heads + head) * c.in));
    if (ctx.lane() == 0) result[((ulong)row * c.heads + head) * c.stride + c.start + o] = sum;
}

struct CopyHeadsConstants {
    // Elements in all, those of a head, and where they go in a head's result.
    uint count, len, stride, start;
};

// x (heads, len) → elements start.. of each head's result.
KERNEL(copy_heads, CopyHeadsConstants, (const float, x), (float, result)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i < c.count) result[(ulong)(i / c.len) * c.stride + c.start + i % c.len] = x[i];
}

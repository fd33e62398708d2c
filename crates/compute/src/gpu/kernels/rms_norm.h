// Norms of rows and of parts of them.
#include "dialect.h"

struct RmsNormConstants {
    // Elements of a part.
    uint width;
    float eps;
    // Parts that follow each other with weights of their own: 1 if all have the same, 0 if there are none.
    uint weights;
};

// What a thread has of a row: columns thread + k · threads for k < HELD, which are on their way together. Wider rows are read as
// they are needed.
CONSTANT uint HELD = 24;

struct Held {
    float v[HELD];
};

DEVICE Held held_of(CTX, GPTR(const float) from, uint width) {
    Held h;
#pragma unroll
    for (uint k = 0; k < HELD; ++k) {
        const uint i = ctx.thread() + k * ctx.threads();
        h.v[k] = i < width ? (float)from[i] : 0.0f;
    }
    return h;
}

// A group normalises one part: x (parts, width) → out; weight (weights, width).
KERNEL(rms_norm, RmsNormConstants, (const float, x), (const float, weight), (float, out)) {
    SHARED(float, scratch, 32);
    const GPTR(const float) from = x + (ulong)ctx.group_x() * c.width;
    const GPTR(float) to = out + (ulong)ctx.group_x() * c.width;
    const GPTR(const float) own = weight + (c.weights == 0 ? 0 : ctx.group_x() % c.weights * c.width);
    const Held row = held_of(ctx, from, c.width), weights = held_of(ctx, own, c.weights == 0 ? 0 : c.width);
    const uint rest = ctx.thread() + HELD * ctx.threads();
    float sum = 0.0f;
#pragma unroll
    for (uint k = 0; k < HELD; ++k) sum += row.v[k] * row.v[k];
    for (uint i = rest; i < c.width; i += ctx.threads()) sum += from[i] * from[i];
    sum = group_sum(ctx, sum, scratch);
    const float factor = 1.0f / sqrt_of(sum / (float)c.width + c.eps);
#pragma unroll
    for (uint k = 0; k < HELD; ++k) {
        const uint i = ctx.thread() + k * ctx.threads();
        if (i < c.width) to[i] = c.weights == 0 ? row.v[k] * factor : row.v[k] * factor * weights.v[k];
    }
    for (uint i = rest; i < c.width; i += ctx.threads()) {
        to[i] = c.weights == 0 ? from[i] * factor : from[i] * factor * own[i];
    }
}

struct LayerNormConstants {
    uint width;
    float eps;
};

// A group normalises a row of x (rows, width) → out: (x − mean) / √(variance + eps) ⊙ weight + bias.
KERNEL(layer_norm, LayerNormConstants, (const float, x), (const float, weight), (const float, bias), (float, out)) {
    SHARED(float, scratch, 32);
    const GPTR(const float) from = x + (ulong)ctx.group_x() * c.width;
    const GPTR(float) to = out + (ulong)ctx.group_x() * c.width;
    const Held row = held_of(ctx, from, c.width);
    const Held weights = held_of(ctx, weight, c.width), biases = held_of(ctx, bias, c.width);
    const uint rest = ctx.thread() + HELD * ctx.threads();
    float total = 0.0f, squares = 0.0f;
#pragma unroll
    for (uint k = 0; k < HELD; ++k) total += row.v[k];
    for (uint i = rest; i < c.width; i += ctx.threads()) total += from[i];
    const float mean = group_sum(ctx, total, scratch) / (float)c.width;
#pragma unroll
    for (uint k = 0; k < HELD; ++k) {
        const float off = ctx.thread() + k * ctx.threads() < c.width ? row.v[k] - mean : 0.0f;
        squares += off * off;
    }
    for (uint i = rest; i < c.width; i += ctx.threads()) squares += (from[i] - mean) * (from[i] - mean);
    const float factor = 1.0f / sqrt_of(group_sum(ctx, squares, scratch) / (float)c.width + c.eps);
#pragma unroll
    for (uint k = 0; k < HELD; ++k) {
        const uint i = ctx.thread() + k * ctx.threads();
        if (i < c.width) to[i] = (row.v[k] - mean) * factor * weights.v[k] + biases.v[k];
    }
    for (uint i = rest; i < c.width; i += ctx.threads())
        to[i] = (from[i] - mean) * factor * weight[i] + bias[i];
}

// Norms of rows and of parts of them.
#include "quads.h"

struct RmsNormConstants {
    // Elements of a part.
    uint width;
    float eps;
    // Parts that follow each other with weights of their own: 1 if all have the same, 0 if there are none.
    uint weights;
};

// Fours that a thread has of a row in RMS norm, all on their way together; wider rows are read again.
CONSTANT uint HELD_QUADS = 6;

// What a thread has of a row in layer norm: columns thread + k · threads for k < HELD, which are on their way together. Wider rows are read as
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

// Four columns of a part as they come out.
DEVICE Float4 weighed4(const RmsNormConstants c, Float4 v, float factor, GPTR(const float) weight, uint i) {
    Float4 w = {1.0f, 1.0f, 1.0f, 1.0f};
    if (c.weights != 0) w = floats4(weight, i);
    return scaled4(v, factor, w);
}

// A group normalises one part: x (parts, width) → out; weight (weights, width). Four columns at a time, where widths allow.
KERNEL(rms_norm, RmsNormConstants, (const float, x), (const float, weight), (float, out)) {
    SHARED(float, scratch, 32);
    const GPTR(const float) from = x + (ulong)ctx.group_x() * c.width;
    const GPTR(float) to = out + (ulong)ctx.group_x() * c.width;
    const GPTR(const float) own = weight + (c.weights == 0 ? 0 : ctx.group_x() % c.weights * c.width);
    const uint quads = c.width % 4 == 0 ? c.width / 4 : 0;
    Float4 row[HELD_QUADS];
    float sum = 0.0f;
#pragma unroll
    for (uint k = 0; k < HELD_QUADS; ++k) {
        const uint i = ctx.thread() + k * ctx.threads();
        if (i < quads) row[k] = floats4(from, i);
    }
#pragma unroll
    for (uint k = 0; k < HELD_QUADS; ++k) {
        if (ctx.thread() + k * ctx.threads() < quads) sum += squares4(row[k]);
    }
    const uint rest = ctx.thread() + HELD_QUADS * ctx.threads();
    for (uint i = rest; i < quads; i += ctx.threads()) sum += squares4(floats4(from, i));
    for (uint i = 4 * quads + ctx.thread(); i < c.width; i += ctx.threads()) sum += from[i] * from[i];
    sum = group_sum(ctx, sum, scratch);
    const float factor = 1.0f / sqrt_of(sum / (float)c.width + c.eps);
#pragma unroll
    for (uint k = 0; k < HELD_QUADS; ++k) {
        const uint i = ctx.thread() + k * ctx.threads();
        if (i < quads) put4(to, i, weighed4(c, row[k], factor, own, i));
    }
    for (uint i = rest; i < quads; i += ctx.threads())
        put4(to, i, weighed4(c, floats4(from, i), factor, own, i));
    for (uint i = 4 * quads + ctx.thread(); i < c.width; i += ctx.threads())
        to[i] = c.weights == 0 ? from[i] * factor : from[i] * factor * own[i];
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

// Norms of rows and of parts of them.
#include "dialect.h"

struct RmsNormConstants {
    // Elements of a part.
    uint width;
    float eps;
    // Parts that follow each other with weights of their own: 1 if all have the same, 0 if there are none.
    uint weights;
};

// A group normalises one part: x (parts, width) → out; weight (weights, width).
KERNEL(rms_norm, RmsNormConstants, (const float, x), (const float, weight), (float, out)) {
    SHARED(float, scratch, 32);
    const GPTR(const float) from = x + (ulong)ctx.group_x() * c.width;
    const GPTR(float) to = out + (ulong)ctx.group_x() * c.width;
    float sum = 0.0f;
    for (uint i = ctx.thread(); i < c.width; i += ctx.threads()) sum += from[i] * from[i];
    sum = group_sum(ctx, sum, scratch);
    const GPTR(const float) own = weight + (c.weights == 0 ? 0 : ctx.group_x() % c.weights * c.width);
    const float factor = 1.0f / sqrt_of(sum / (float)c.width + c.eps);
    for (uint i = ctx.thread(); i < c.width; i += ctx.threads()) {
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
    float total = 0.0f, squares = 0.0f;
    for (uint i = ctx.thread(); i < c.width; i += ctx.threads()) total += from[i];
    const float mean = group_sum(ctx, total, scratch) / (float)c.width;
    for (uint i = ctx.thread(); i < c.width; i += ctx.threads()) squares += (from[i] - mean) * (from[i] - mean);
    const float factor = 1.0f / sqrt_of(group_sum(ctx, squares, scratch) / (float)c.width + c.eps);
    for (uint i = ctx.thread(); i < c.width; i += ctx.threads())
        to[i] = (from[i] - mean) * factor * weight[i] + bias[i];
}

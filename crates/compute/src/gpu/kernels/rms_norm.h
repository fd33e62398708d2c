// Root-mean-square norm of parts of rows.
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

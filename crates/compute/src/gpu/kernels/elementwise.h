// Operations on each element of rows.
#include "dialect.h"

struct ElementConstants {
    // Elements in all.
    uint count;
    // Clamp: the limit. Sigmoid gate: elements that share a gate, as an integer.
    float limit;
    uint shared;
};

KERNEL(add, ElementConstants, (const float, a), (const float, b), (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i < c.count) out[i] = a[i] + b[i];
}

KERNEL(swiglu, ElementConstants, (const float, gate), (const float, up), (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i < c.count) out[i] = silu(gate[i]) * up[i];
}

KERNEL(clamp_to, ElementConstants, (const float, x), (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i >= c.count) return;
    const float v = x[i];
    // In this form NaN stays NaN.
    out[i] = v > c.limit ? c.limit : v < -c.limit ? -c.limit : v;
}

KERNEL(sigmoid_gate, ElementConstants, (const float, x), (const float, gate), (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i < c.count) out[i] = x[i] * sigmoid(gate[i / c.shared]);
}

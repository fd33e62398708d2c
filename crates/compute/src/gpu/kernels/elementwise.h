// Operations on each element of rows.
#include "dialect.h"

struct ElementConstants {
    // Elements in all.
    uint count;
    // Clamp and limited SwiGLU: the limit. Scaled SiLU: the factor.
    float number;
    // Sigmoid gate: elements that share a gate.
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
    if (i < c.count) out[i] = clamped(x[i], c.number);
}

KERNEL(limited_swiglu, ElementConstants, (const float, gate), (const float, up), (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i >= c.count) return;
    const float g = gate[i];
    out[i] = silu(g > c.number ? c.number : g) * clamped(up[i], c.number);
}

KERNEL(scaled_silu, ElementConstants, (const float, x), (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i < c.count) out[i] = silu(c.number * x[i]);
}

KERNEL(sigmoid_gate, ElementConstants, (const float, x), (const float, gate), (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i < c.count) out[i] = x[i] * sigmoid(gate[i / c.shared]);
}

// Operations on each element of rows.
#include "activate.h"

struct ElementConstants {
    // Elements in all.
    uint count;
    // Clamp and soft cap: the limit. Scaled SiLU: the factor.
    float number;
    // Gates: elements that share a gate.
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

struct ActivateConstants {
    // Elements in all.
    uint count;
    Activation activation;
};

KERNEL(activate, ActivateConstants, (const float, gate), (const float, up), (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i < c.count) out[i] = activated(c.activation, gate[i], up[i]);
}

KERNEL(scaled_silu, ElementConstants, (const float, x), (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i < c.count) out[i] = silu(c.number * x[i]);
}

KERNEL(soft_cap, ElementConstants, (const float, x), (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    // tanh(x) = 2 sigmoid(2x) − 1.
    if (i < c.count) out[i] = c.number * (2.0f * sigmoid(2.0f * quotient(x[i], c.number)) - 1.0f);
}

KERNEL(sigmoid_gate, ElementConstants, (const float, x), (const float, gate), (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i < c.count) out[i] = x[i] * sigmoid(gate[i / c.shared]);
}

KERNEL(softplus_gate, ElementConstants, (const float, x), (const float, gate), (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i < c.count) out[i] = x[i] * softplus(gate[i / c.shared]);
}

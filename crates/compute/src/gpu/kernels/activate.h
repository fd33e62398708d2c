// What is done to the outputs of gate and up projections.
#pragma once
#include "dialect.h"

// Kinds of activation.
CONSTANT uint SWIGLU = 0, CLAMPED_SWIGLU = 1, LIMITED_SWIGLU = 2, CAPPED_SWIGLU = 3, SQUARED_RELU = 4;

struct Activation {
    uint kind;
    float alpha, limit;
};

// The product of gate and up; of a squared ReLU, whose experts have no gate, that of up. In these forms NaN stays NaN.
DEVICE float activated(const Activation how, float gate, float up) {
    if (how.kind == SWIGLU) return silu(gate) * up;
    if (how.kind == SQUARED_RELU) return up < 0.0f ? 0.0f : up * up;
    const float u = clamped(up, how.limit);
    if (how.kind == CAPPED_SWIGLU) {
        const float s = silu(gate);
        return (s > how.limit ? how.limit : s) * u;
    }
    const float g = gate > how.limit ? how.limit : gate;
    return how.kind == LIMITED_SWIGLU ? silu(g) * u : quotient(g, 1.0f + exponential(-(how.alpha * g))) * (u + 1.0f);
}

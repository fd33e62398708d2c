// What is done to the outputs of gate and up projections.
#pragma once
#include "dialect.h"

// Kinds of activation.
CONSTANT uint SWIGLU = 0, CLAMPED_SWIGLU = 1, LIMITED_SWIGLU = 2, CAPPED_SWIGLU = 3, SQUARED_RELU = 4, GEGLU = 5,
              BILINEAR = 6;

struct Activation {
    uint kind;
    float alpha, limit;
};

// x · sigmoid(√(8/π) · (x + 0.044715 x³)), from operations that all machines round alike.
DEVICE float gelu(float x) {
    const float logit = product_of(x, 1.5957691f + product_of(0.07135482f, product_of(x, x)));
    return quotient(x, 1.0f + exponential(-logit));
}

// The product of gate and up; of a squared ReLU, whose experts have no gate, that of up. In these forms NaN stays NaN.
DEVICE float activated(const Activation how, float gate, float up) {
    if (how.kind == SWIGLU) return silu(gate) * up;
    if (how.kind == SQUARED_RELU) return up < 0.0f ? 0.0f : up * up;
    if (how.kind == GEGLU) return gelu(gate) * up;
    if (how.kind == BILINEAR) return gate * up;
    const float u = clamped(up, how.limit);
    if (how.kind == CAPPED_SWIGLU) {
        const float s = silu(gate);
        return (s > how.limit ? how.limit : s) * u;
    }
    const float g = gate > how.limit ? how.limit : gate;
    return how.kind == LIMITED_SWIGLU ? silu(g) * u : quotient(g, 1.0f + exponential(-(how.alpha * g))) * (u + 1.0f);
}

// What is done to the outputs of gate and up projections.
#pragma once
#include "dialect.h"

// Kinds of activation.
CONSTANT uint SWIGLU = 0, CLAMPED_SWIGLU = 1, LIMITED_SWIGLU = 2, CAPPED_SWIGLU = 3, SQUARED_RELU = 4, GEGLU = 5,
              BILINEAR = 6, SITUGLU = 7, SITUGLU_PLAIN_UP = 8;

struct Activation {
    uint kind;
    // Of SiTU: the limits of gate and of up.
    float alpha, limit;
};

// x · sigmoid(√(8/π) · (x + 0.044715 x³)), from operations that all machines round alike.
DEVICE float gelu(float x) {
    const float logit = product_of(x, 1.5957691f + product_of(0.07135482f, product_of(x, x)));
    return quotient(x, 1.0f + exponential(-logit));
}

// limit · tanh(x / limit), with tanh(y) = e / (e + 2) for e = e²ʸ − 1: `soft_limit` of `cpu/vector.rs`, from operations that all
// machines round alike. e is made as in `exponential`, but for the one that is added there, so that small ones are exact too.
SELDOM float soft_limited(float x, float limit) {
    const float y = product_of(2.0f, quotient(x, limit));
    const float most = y < -20.0f ? -20.0f : y, t = most > 20.0f ? 20.0f : most;
    const float n = round_of(product_of(t, 1.44269504f));
    const float r = fma_of(n, 2.1219444e-4f, fma_of(n, -0.6933594f, t));
    float p = fma_of(1.9875691e-4f, r, 1.3982e-3f);
    p = fma_of(p, r, 8.333452e-3f);
    p = fma_of(p, r, 4.16658e-2f);
    p = fma_of(p, r, 0.16666666f);
    p = fma_of(p, r, 0.5f);
    p = fma_of(product_of(p, r), r, r);
    const float power = as_float((uint)((int)n + 127) << 23);
    const float e = fma_of(p, power, power - 1.0f);
    return product_of(limit, quotient(e, e + 2.0f));
}

// The product of gate and up; of a squared ReLU, whose experts have no gate, that of up. In these forms NaN stays NaN.
DEVICE float activated(const Activation how, float gate, float up) {
    if (how.kind == SWIGLU) return silu(gate) * up;
    if (how.kind == SQUARED_RELU) return up < 0.0f ? 0.0f : up * up;
    if (how.kind == GEGLU) return gelu(gate) * up;
    if (how.kind == BILINEAR) return gate * up;
    if (how.kind == SITUGLU || how.kind == SITUGLU_PLAIN_UP) {
        const float g = quotient(soft_limited(gate, how.alpha), 1.0f + exponential(-gate));
        return product_of(g, how.kind == SITUGLU ? soft_limited(up, how.limit) : up);
    }
    const float u = clamped(up, how.limit);
    if (how.kind == CAPPED_SWIGLU) {
        const float s = silu(gate);
        return (s > how.limit ? how.limit : s) * u;
    }
    const float g = gate > how.limit ? how.limit : gate;
    return how.kind == LIMITED_SWIGLU ? silu(g) * u : quotient(g, 1.0f + exponential(-(how.alpha * g))) * (u + 1.0f);
}

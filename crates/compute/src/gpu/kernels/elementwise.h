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

// What blocks are rounded to: floats of eight and of four bits with powers of two as scales, and of four with scales of eight.
CONSTANT uint E4M3_BLOCKS = 0, E2M1_BLOCKS = 1, E2M1_BLOCKS_BY_E4M3 = 2;

struct RoundConstants {
    // Elements in all, and those of a block.
    uint count, block;
    uint form;
};

DEVICE int exponent_of(float x) { return (int)(as_uint(x) >> 23 & 255) - 127; }

// 2ⁿ, a normal number.
DEVICE float power_of_two(int n) { return as_float((uint)((n < -126 ? -126 : n > 127 ? 127 : n) + 127) << 23); }

// The least power of two that is not below x, which is above 0.
DEVICE float power_above(float x) { return power_of_two(exponent_of(x) + ((as_uint(x) << 9) != 0 ? 1 : 0)); }

// x rounded to so many bits of mantissa, to fewer from the power `least` of two down; ties to even.
DEVICE float rounded_to(float x, int least, int mantissa) {
    const int own = exponent_of(x);
    const float step = power_of_two((own > least ? own : least) - mantissa);
    return product_of(round_of(quotient(x, step)), step);
}

// Elements rounded to floats of few bits, with a scale for each block → out.
KERNEL(round_blocks, RoundConstants, (const float, x), (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    // Beyond the last one, that again.
    const uint own = i < c.count ? i : c.count - 1;
    const float v = x[own];
    // What is not a number does not count.
    float largest = v == v ? abs_of(v) : 0.0f;
    if (c.block <= 32 && (c.block & (c.block - 1)) == 0) {
        for (uint mask = c.block / 2; mask > 0; mask /= 2) {
            const float other = lane_xor(ctx, largest, mask);
            largest = other > largest ? other : largest;
        }
    } else {
        for (uint first = own / c.block * c.block, n = 0; n < c.block; ++n) {
            const float other = abs_of(x[first + n]);
            largest = other > largest ? other : largest;
        }
    }
    const bool bytes = c.form == E4M3_BLOCKS;
    const float limit = bytes ? 448.0f : 6.0f, least = bytes ? 1e-4f : 0.0f;
    const float each = quotient(largest < least ? least : largest, limit);
    const float scale = c.form == E2M1_BLOCKS_BY_E4M3
                            ? rounded_to(each < 0.001953125f ? 0.001953125f : each > 448.0f ? 448.0f : each, -6, 3)
                            : power_above(each < 1.17549435e-38f ? 1.17549435e-38f : each);
    const float rounded = rounded_to(clamped(quotient(v, scale), limit), bytes ? -6 : 0, bytes ? 3 : 1);
    if (i < c.count) out[i] = product_of(rounded, scale);
}

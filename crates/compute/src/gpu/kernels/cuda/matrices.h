// Weights of one encoding, DTYPE, as matrices: dense ones, and those of experts in their slots.
#pragma once
#include "unpack.h"

typedef Encoding<DTYPE> Weight;

// A matrix (rows, cols) without its bytes, as in `../weights.h`.
struct Format {
    u32 kind, cols;
    u32 strides[3];
};

DEVICE RowAddress row_address(const u8* p0, const u8* p1, const u8* p2, const Format& f, u32 row) {
    const u32 scales_row = DTYPE != FP8 ? row : f.kind >> 26 & 1 ? 0 : f.kind >> 27 & 3 ? row : row / 128;
    // Bits of zero points before this row's.
    const u32 zero = has_zeros(f.kind) ? row * (f.kind >> 16 & 15) : 32 * row;
    return {{p0 + (u64)row * f.strides[0], p1 + (u64)scales_row * f.strides[1], p2 + (u64)(zero / 32) * f.strides[2]},
            zero % 32};
}

// Where one of an expert's matrices lies within its slot, as in `../moe.h`.
struct Part {
    Format format;
    u32 offsets[3];
    u32 rows;
};

DEVICE RowAddress expert_row(const u8* slots, u32 slot, const Part& part, u32 row) {
    const u8* base = slots + (u64)slot * 256;
    return row_address(base + part.offsets[0], base + part.offsets[1], base + part.offsets[2], part.format, row);
}

// Pairs of one expert: those of `list` from `first` on.
struct Tile {
    u32 expert, first, count, unused;
};

struct GateUpConstants {
    Part gate, up;
    // Pairs that share a row of x.
    u32 share;
    u32 has_bias;
    // See `../activate.h`.
    u32 activation;
    float alpha, limit;
    // Whether rows of x count as much as `weights` (pairs) says.
    u32 weighs;
};

// Kinds of activation.
const u32 SWIGLU = 0, LIMITED_SWIGLU = 2, CAPPED_SWIGLU = 3, SQUARED_RELU = 4, GEGLU = 5, BILINEAR = 6, SITUGLU = 7,
          SITUGLU_PLAIN_UP = 8;

// limit · tanh(x / limit). An exponential that is infinite makes the limit; NaN stays NaN.
DEVICE float soft_limited(float x, float limit) {
    return limit - 2.0f * limit / (1.0f + __expf(2.0f * x / limit));
}

DEVICE float activation(float gate, float up, const GateUpConstants& c) {
    if (c.activation == SWIGLU) return gate / (1.0f + __expf(-gate)) * up;
    // fminf would drop a NaN.
    if (c.activation == SQUARED_RELU) return up < 0.0f ? 0.0f : up * up;
    if (c.activation == GEGLU) {
        return gate / (1.0f + __expf(-gate * (1.5957691f + 0.07135482f * gate * gate))) * up;
    }
    if (c.activation == BILINEAR) return gate * up;
    if (c.activation >= SITUGLU) {
        const float g = soft_limited(gate, c.alpha) / (1.0f + __expf(-gate));
        return g * (c.activation == SITUGLU ? soft_limited(up, c.limit) : up);
    }
    const float u = up > c.limit ? c.limit : up < -c.limit ? -c.limit : up;
    if (c.activation == CAPPED_SWIGLU) {
        const float s = gate / (1.0f + __expf(-gate));
        return (s > c.limit ? c.limit : s) * u;
    }
    const float g = gate > c.limit ? c.limit : gate;
    return c.activation == LIMITED_SWIGLU ? g / (1.0f + __expf(-g)) * u : (u + 1.0f) * g / (1.0f + __expf(-c.alpha * g));
}

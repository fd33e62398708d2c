// Four columns at a time.
#pragma once
#include "dialect.h"

// Columns 4i..4i + 4 of a row, which begins at a multiple of 16 bytes.
DEVICE Float4 floats4(GPTR(const float) row, uint i) {
    const Word4 w = load_u32x4(GCAST(const uchar, row), 16 * i);
    Float4 r = {as_float(w.x), as_float(w.y), as_float(w.z), as_float(w.w)};
    return r;
}

DEVICE void put4(GPTR(float) row, uint i, Float4 v) {
    Word4 w = {as_uint(v.x), as_uint(v.y), as_uint(v.z), as_uint(v.w)};
    store_u32x4(GCAST(uchar, row), 16 * i, w);
}

DEVICE float squares4(Float4 v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }

// Times a factor and weights.
DEVICE Float4 scaled4(Float4 v, float factor, Float4 w) {
    Float4 r = {v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w};
    return r;
}

// sum + weight · v, rounded once.
DEVICE Float4 fma4(float weight, Float4 v, Float4 sum) {
    Float4 r = {fma_of(weight, v.x, sum.x), fma_of(weight, v.y, sum.y), fma_of(weight, v.z, sum.z),
                fma_of(weight, v.w, sum.w)};
    return r;
}

DEVICE Float4 sum4(Float4 a, Float4 b) {
    Float4 r = {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
    return r;
}

DEVICE Float4 lane_read4(CTX, Float4 v, uint lane) {
    Float4 r = {lane_read(ctx, v.x, lane), lane_read(ctx, v.y, lane), lane_read(ctx, v.z, lane), lane_read(ctx, v.w, lane)};
    return r;
}

DEVICE uint packed_halves(float a, float b) { return (uint)f32_to_f16(a) | (uint)f32_to_f16(b) << 16; }

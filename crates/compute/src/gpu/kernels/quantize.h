// Activations of eight bits: blocks of 32 columns with a scale d, kept with d · Σ q.
#pragma once
#include "dialect.h"

// Rows in eight bits: bytes (rows, cols), of each block of 32 its scale and scaled sum, and by what products of each row are to be
// multiplied.
struct RoundedRows {
    GPTR(uchar) bytes;
    GPTR(float) scales;
    GPTR(float) factors;
};

// Rounds a block, one element a lane, to eight bits.
DEVICE void quantize_block(CTX, float v, GPTR(uchar) bytes, GPTR(float) scales) {
    const uint most = lane_max(ctx, as_uint(v) & 0x7fffffffu);
    // NaN if an element is not finite.
    const float d = most >= 0x7f800000u ? not_a_number() : as_float(most) * (1.0f / 127.0f);
    const float inverse = most > 0 ? quotient(127.0f, as_float(most)) : 0.0f;
    const float q = round_of(v * inverse);
    const bool fits = q >= -127.0f && q <= 127.0f;
    const int code = fits ? (int)q : 0;
    bytes[ctx.lane()] = (uchar)(signed char)code;
    const float sum = (float)lane_add(ctx, code);
    if (ctx.lane() == 0) {
        scales[0] = d;
        scales[1] = d * sum;
    }
}

// The block of elements from `at` on, one a lane, of rows of `cols` that are rounded as they are.
DEVICE void round_block(CTX, float v, const RoundedRows to, ulong at, uint cols) {
    quantize_block(ctx, v, to.bytes + at, to.scales + at / 32 * 2);
    if (ctx.lane() == 0 && at % cols == 0) to.factors[at / cols] = 1.0f;
}

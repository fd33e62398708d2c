// Floats and their bits.
#pragma once

#include "machine.h"

#include <cmath>

namespace emulator {

inline float as_float(uint v) {
    float f;
    memcpy(&f, &v, 4);
    return f;
}
inline uint as_uint(float f) {
    uint v;
    memcpy(&v, &f, 4);
    return v;
}

inline float f16_to_f32(ushort bits) {
    const uint sign = (uint)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023;
    if (exponent == 31) return as_float(sign | 0x7f800000 | mantissa << 13);
    if (exponent) return as_float(sign | (exponent + 112) << 23 | mantissa << 13);
    const float small = (float)mantissa / 16777216.0f;
    return sign ? -small : small;
}

inline ushort f32_to_f16(float v) {
    const uint bits = as_uint(v), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (ushort)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return (ushort)(sign | 0x7c00);
    // Adding 0.5 makes the unit of the last place that of the smallest f16.
    if (magnitude < 0x38800000) return (ushort)(sign | (as_uint(as_float(magnitude) + 0.5f) - 0x3f000000));
    return (ushort)(sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

// Rounded once: a float between that is not the number itself has an odd last digit.
inline ushort f64_to_f16(double v) {
    float near = (float)v;
    if ((double)near != v && near == near) {
        uint bits = as_uint(near);
        // Towards zero, of numbers that are no infinity.
        if (std::fabs((double)near) > std::fabs(v)) --bits;
        near = as_float(bits | 1);
    }
    return f32_to_f16(near);
}

} // namespace emulator

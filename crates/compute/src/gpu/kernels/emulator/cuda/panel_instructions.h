// Stands in for `cuda/panel_instructions.h`.
#pragma once
#include "tensor_core.h"

DEVICE void mma_16816(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], const float (&c)[4]) {
    emulator::multiply_halves(d, a, b, c, 2);
}
DEVICE void mma_1688(float (&d)[4], u32 a0, u32 a1, u32 b) {
    const u32 a[2] = {a0, a1};
    emulator::multiply_halves(d, a, &b, d, 1);
}
DEVICE u32 chosen_bits(u32 mask, u32 a, u32 b) { return (mask & a) | (~mask & b); }
DEVICE float signed_byte(u32 bytes, u32 i) { return (float)(int8_t)(bytes >> 8 * i); }
DEVICE float unsigned_byte(u32 bytes, u32 i) { return (float)(bytes >> 8 * i & 255); }

// The exponent's bias is 7, of f16 15.
DEVICE u32 float_of_e4m3(u32 code) {
    const u32 sign = (code & 128) << 8, rest = code & 127;
    if (rest == 127) return sign | 0x7fff;
    return sign | f32_to_f16(f16_to_f32((u16)(rest << 7)) * 256.0f);
}
DEVICE u32 floats_of_2(u32 codes) { return float_of_e4m3(codes) | float_of_e4m3(codes >> 8) << 16; }
DEVICE void floats_of_4(u32& first, u32& second, u32 codes) { first = floats_of_2(codes), second = floats_of_2(codes >> 16); }
// Only the bytes themselves: others may be copied at the same time.
DEVICE u32 even_word(const u8* p, u32 selector) {
    const u16* const halves = (const u16*)(p + (selector & 2));
    return halves[0] | (u32)halves[1] << 16;
}

// What the emulator's dialect has for pointers of either kind: places of threads, kernels, lane operations and arithmetic.
#pragma once

#include "bits.h"
#include "machine.h"

#include <cmath>

#define DEVICE static inline
#define SELDOM static inline
#define CONSTANT static constexpr
#define CTX const Ctx& ctx

struct Ctx {
    UNREPORTED uint thread() const { return emulator::now.thread; }
    UNREPORTED uint threads() const { return emulator::threads(); }
    UNREPORTED uint lane() const { return emulator::now.thread % 32; }
    UNREPORTED uint warp() const { return emulator::now.thread / 32; }
    UNREPORTED uint warps() const { return emulator::threads() / 32; }
    UNREPORTED uint group_x() const { return emulator::group(0); }
    UNREPORTED uint group_y() const { return emulator::group(1); }
    UNREPORTED uint group_z() const { return emulator::group(2); }
    UNREPORTED uint groups_x() const { return emulator::groups(0); }
};

#define MF_ONE(index, pair) 1
#define KERNEL(...) MF_KERNEL(0, __VA_ARGS__)
#define KERNEL_AHEAD(...) MF_KERNEL(1, __VA_ARGS__)
#define MF_KERNEL(first, name, Constants, ...)                                                                 \
    static void name(const Ctx& ctx, const Constants& c, MF_EACH(MF_ARG, __VA_ARGS__));                        \
    UNREPORTED static void name##_bound(const emulator::Binding* bindings, const void* constants) {            \
        Constants c;                                                                                           \
        memcpy(&c, constants, sizeof c);                                                                       \
        const Ctx ctx{};                                                                                       \
        emulator::ahead[emulator::now.thread] = first;                                                         \
        name(ctx, c, MF_EACH(MF_BIND, __VA_ARGS__));                                                           \
    }                                                                                                          \
    static const int name##_buffers[] = {MF_EACH(MF_ONE, __VA_ARGS__)};                                        \
    static const emulator::Register name##_registered(mf_kernels, #name, name##_bound,                         \
                                                      sizeof name##_buffers / sizeof(int), sizeof(Constants)); \
    static void name(const Ctx& ctx, const Constants& c, MF_EACH(MF_ARG, __VA_ARGS__))

static inline void barrier(const Ctx&, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    emulator::wait_for_group(file, line);
}

UNREPORTED DEVICE void after_previous(CTX) { emulator::ahead[emulator::now.thread] = 0; }
UNREPORTED DEVICE void writes_apart(CTX) { emulator::ahead[emulator::now.thread] = 2; }

using emulator::as_float;
using emulator::as_uint;
using emulator::f16_to_f32;
using emulator::f32_to_f16;

DEVICE uint lane_read(CTX, uint v, uint lane) { return emulator::exchange(v, lane); }
DEVICE float lane_read(CTX, float v, uint lane) { return as_float(emulator::exchange(as_uint(v), lane)); }
DEVICE uint lane_xor(CTX, uint v, uint mask) { return emulator::exchange(v, ctx.lane() ^ mask); }
DEVICE float lane_xor(CTX, float v, uint mask) { return as_float(emulator::exchange(as_uint(v), ctx.lane() ^ mask)); }

DEVICE uint lane_max(CTX, uint v) {
    for (uint mask = 16; mask > 0; mask >>= 1) {
        const uint other = lane_xor(ctx, v, mask);
        v = other > v ? other : v;
    }
    return v;
}
DEVICE uint lane_min(CTX, uint v) { return ~lane_max(ctx, ~v); }

DEVICE int lane_add(CTX, int v) {
    for (uint mask = 16; mask > 0; mask >>= 1) v += (int)lane_xor(ctx, (uint)v, mask);
    return v;
}

DEVICE int dot4(uint a, uint b, int sum) {
    for (int i = 0; i < 32; i += 8) sum += (int)(int8_t)(a >> i) * (int)(int8_t)(b >> i);
    return sum;
}

DEVICE int dot4_unsigned(uint a, uint b, int sum) {
    for (int i = 0; i < 32; i += 8) sum += (int)(a >> i & 255) * (int)(int8_t)(b >> i);
    return sum;
}

DEVICE float exp_of(float x) { return std::exp(x); }
DEVICE float exp2_of(float x) { return std::exp2(x); }
DEVICE float log1p_of(float x) { return std::log1p(x); }
DEVICE float sqrt_of(float x) { return std::sqrt(x); }
DEVICE float inverse_sqrt(float x) { return 1.0f / std::sqrt(x); }
DEVICE float quotient(float a, float b) { return a / b; }
DEVICE float abs_of(float x) { return std::fabs(x); }
DEVICE float round_of(float x) { return std::nearbyint(x); }
DEVICE float fma_of(float a, float b, float d) { return std::fma(a, b, d); }
DEVICE float product_of(float a, float b) { return a * b; }
DEVICE bool is_finite(float x) { return std::isfinite(x); }
DEVICE float infinity() { return HUGE_VALF; }
DEVICE float not_a_number() { return NAN; }

struct Word4 {
    uint x, y, z, w;
};
struct Float4 {
    float x, y, z, w;
};

DEVICE uint pick(uint low, uint high, uint nibbles) {
    uint r = 0;
    for (uint i = 0; i < 4; ++i) {
        const uint at = nibbles >> (4 * i) & 7;
        r |= ((at < 4 ? low >> (8 * at) : high >> (8 * (at - 4))) & 255) << (8 * i);
    }
    return r;
}
DEVICE uint pick_positive(uint low, uint high, uint nibbles) {
    uint r = 0;
    for (uint i = 0; i < 4; ++i) {
        const uint nibble = nibbles >> (4 * i) & 15, at = nibble & 3;
        r |= (nibble < 4 ? low >> (8 * at) & 255 : nibble < 8 ? high >> (8 * at) & 255 : 0) << (8 * i);
    }
    return r;
}

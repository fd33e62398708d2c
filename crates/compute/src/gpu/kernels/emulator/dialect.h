// The emulator's side of the dialect: device code as ordinary C++ whose every access to memory is checked. Pointers know
// their allocation.
#pragma once

#include "bits.h"
#include "machine.h"

#include <atomic>
#include <cmath>

namespace emulator {

// A value in checked memory.
template <class T>
struct Reference {
    Memory* memory;
    uint64_t at;
    operator T() const {
        check(*memory, at, sizeof(T), false);
        T value;
        memcpy(&value, memory->data + at, sizeof(T));
        return value;
    }
    const Reference& operator=(T value) const {
        check(*memory, at, sizeof(T), true);
        memcpy(memory->data + at, &value, sizeof(T));
        return *this;
    }
    const Reference& operator=(const Reference& other) const { return *this = (T)other; }
    const Reference& operator+=(T value) const { return *this = (T)((T) * this + value); }
    const Reference& operator*=(T value) const { return *this = (T)((T) * this * value); }
};

// A checked pointer.
template <class T>
struct Pointer {
    typedef typename std::remove_const<T>::type Plain;
    Memory* memory;
    int64_t at;
    template <class I>
    auto operator[](I index) const {
        const Reference<Plain> place{memory, (uint64_t)(at + (int64_t)index * (int64_t)sizeof(T))};
        if constexpr (std::is_const<T>::value) return (Plain)place;
        else return place;
    }
    auto operator*() const { return (*this)[0]; }
    template <class I>
    Pointer operator+(I count) const {
        return Pointer{memory, at + (int64_t)count * (int64_t)sizeof(T)};
    }
    template <class I>
    Pointer& operator+=(I count) {
        return *this = *this + count;
    }
    operator Pointer<const T>() const { return Pointer<const T>{memory, at}; }
};

template <class To, class From>
Pointer<To> cast(Pointer<From> p) {
    return Pointer<To>{p.memory, p.at};
}

template <class W, class T>
W load(Pointer<T> p, uint offset) {
    return Reference<W>{p.memory, (uint64_t)(p.at + offset)};
}

} // namespace emulator

#define DEVICE static inline
#define SELDOM static inline
#define CONSTANT static constexpr
#define GPTR(T) emulator::Pointer<T>
#define SPTR(T) emulator::Pointer<T>
#define SHARED(T, name, count) \
    const emulator::Pointer<T> name{emulator::shared(#name, sizeof(T) * (count), sizeof(T)), 0}
#define GCAST(T, p) emulator::cast<T>(p)
#define CTX const Ctx& ctx

struct Ctx {
    uint thread() const { return emulator::now.thread; }
    uint threads() const { return emulator::threads(); }
    uint lane() const { return emulator::now.thread % 32; }
    uint warp() const { return emulator::now.thread / 32; }
    uint warps() const { return emulator::threads() / 32; }
    uint group_x() const { return emulator::group(0); }
    uint group_y() const { return emulator::group(1); }
    uint group_z() const { return emulator::group(2); }
    uint groups_x() const { return emulator::groups(0); }
};

#define MF_ARG_(T, name) emulator::Pointer<T> name
#define MF_ARG(index, pair) MF_ARG_ pair
#define MF_BIND_(T, name) emulator::Pointer<T>
#define MF_BIND(index, pair) \
    MF_BIND_ pair { bindings[index].memory, (int64_t)bindings[index].offset }
#define MF_ONE(index, pair) 1
#define KERNEL(...) MF_KERNEL(0, __VA_ARGS__)
#define KERNEL_AHEAD(...) MF_KERNEL(1, __VA_ARGS__)
#define MF_KERNEL(first, name, Constants, ...)                                                                 \
    static void name(const Ctx& ctx, const Constants& c, MF_EACH(MF_ARG, __VA_ARGS__));                        \
    static void name##_bound(const emulator::Binding* bindings, const void* constants) {                       \
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

DEVICE void after_previous(CTX) { emulator::ahead[emulator::now.thread] = 0; }
DEVICE void writes_apart(CTX) { emulator::ahead[emulator::now.thread] = 2; }

DEVICE uint tally(SPTR(uint) counter, uint number) { return emulator::tally(*counter.memory, counter.at, number); }
DEVICE uint tally_device(GPTR(uint) counter, uint number) { return emulator::tally(*counter.memory, counter.at, number); }

DEVICE void publish(CTX) { std::atomic_thread_fence(std::memory_order_seq_cst); }
DEVICE void tell(GPTR(uint) word) { emulator::tell(*word.memory, word.at); }
DEVICE uint nanoseconds() { return emulator::nanoseconds(); }
DEVICE bool told(GPTR(const uint) word, uint limit) { return emulator::told(*word.memory, word.at, limit); }

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
DEVICE uint load_u16(GPTR(const uchar) p, uint offset) { return emulator::load<ushort>(p, offset); }
DEVICE uint load_u32(GPTR(const uchar) p, uint offset) { return emulator::load<uint>(p, offset); }
DEVICE Word4 load_u32x4(GPTR(const uchar) p, uint offset) { return emulator::load<Word4>(p, offset); }
DEVICE void store_u32x4(GPTR(uchar) p, uint offset, Word4 v) {
    emulator::Reference<Word4>{p.memory, (uint64_t)(p.at + offset)} = v;
}
DEVICE Word4 peek4(GPTR(const uint) p) { return emulator::load<Word4>(p, 0); }
DEVICE Word4 load_loose(GPTR(const uchar) p, uint offset) {
    uint w[4];
    for (uint i = 0; i < 4; ++i) w[i] = load_u16(p, offset + 4 * i) | load_u16(p, offset + 4 * i + 2) << 16;
    return Word4{w[0], w[1], w[2], w[3]};
}
DEVICE Word4 load_any(GPTR(const uchar) p, uint offset) {
    uint w[4] = {0, 0, 0, 0};
    for (uint i = 0; i < 16; ++i) w[i / 4] |= (uint)p[offset + i] << (8 * (i % 4));
    return Word4{w[0], w[1], w[2], w[3]};
}
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
DEVICE void prefetch(GPTR(const uchar), uint) {}

DEVICE Word4 load_u32x4(SPTR(const uint) p, uint index) {
    if (index % 4) emulator::fail("%s: four words from %u on", p.memory->name, index);
    return Word4{p[index], p[index + 1], p[index + 2], p[index + 3]};
}

struct Float4 {
    float x, y, z, w;
};
DEVICE Float4 load_f32x4(SPTR(const float) p, uint index) {
    if (index % 4) emulator::fail("%s: four elements from %u on", p.memory->name, index);
    return Float4{p[index], p[index + 1], p[index + 2], p[index + 3]};
}

// The emulator's side of the dialect: device code as ordinary C++ whose every access to memory is checked.
//
// Pointers know their allocation. Reads of bytes that nothing has written, accesses outside the allocation, words at
// odd addresses and races (two threads of a group touching a byte with no barrier between, one of them writing; a
// thread reading what another group of the same dispatch wrote) stop the dispatch with a message. Threads are fibres:
// barriers and lane operations are where they switch, in random order.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long ulong;

namespace emulator {

// Who touched a byte last, and between which barriers.
struct Stamp {
    uint32_t group = 0, writer = 0, write_epoch = 0, reader = 0, read_epoch = 0;
};

// An allocation: a device buffer, or an array of one group's threadgroup memory.
struct Memory {
    uint8_t* data;
    // One byte for each: 1 if it was ever written.
    uint8_t* written;
    // One for each byte; of a device buffer, absent if kernels only read it.
    Stamp* stamps;
    uint64_t bytes;
    const char* name;
};

[[noreturn]] void fail(const char* format, ...);
void check(const Memory& memory, uint64_t at, uint64_t size, bool write);

// A value in checked memory.
template <class T> struct Reference {
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
    const Reference& operator+=(T value) const { return *this = (T)((T)*this + value); }
    const Reference& operator*=(T value) const { return *this = (T)((T)*this * value); }
};

// A checked pointer.
template <class T> struct Pointer {
    typedef typename std::remove_const<T>::type Plain;
    Memory* memory;
    int64_t at;
    template <class I> auto operator[](I index) const {
        const Reference<Plain> place{memory, (uint64_t)(at + (int64_t)index * (int64_t)sizeof(T))};
        if constexpr (std::is_const<T>::value) return (Plain)place;
        else return place;
    }
    auto operator*() const { return (*this)[0]; }
    template <class I> Pointer operator+(I count) const {
        return Pointer{memory, at + (int64_t)count * (int64_t)sizeof(T)};
    }
    template <class I> Pointer& operator+=(I count) { return *this = *this + count; }
    operator Pointer<const T>() const { return Pointer<const T>{memory, at}; }
};

template <class To, class From> Pointer<To> cast(Pointer<From> p) { return Pointer<To>{p.memory, p.at}; }

template <class W, class T> W load(Pointer<T> p, uint offset) {
    return Reference<W>{p.memory, (uint64_t)(p.at + offset)};
}

uint thread();
uint threads();
uint group(uint axis);
uint groups(uint axis);
void wait_for_group(const char* file, int line);
// Gives `value` to the warp and returns that of `lane`.
uint32_t exchange(uint32_t value, uint lane);
Memory* shared(const char* name, uint64_t bytes);

struct Binding {
    Memory* memory;
    uint64_t offset;
};

struct Kernel {
    const char* name;
    void (*run)(const Binding*, const void*);
    uint32_t buffers;
    uint32_t constant_bytes;
    const Kernel* next;
};

// Adds a kernel to its unit's list while the program starts.
struct Register : Kernel {
    Register(const Kernel*& list, const char* name, void (*run)(const Binding*, const void*), uint32_t buffers,
             uint32_t constant_bytes)
        : Kernel{name, run, buffers, constant_bytes, list} {
        list = this;
    }
};

} // namespace emulator

// Kernels of the unit that is being compiled.
static const emulator::Kernel* mf_kernels = nullptr;

#define DEVICE static inline
#define CONSTANT static constexpr
#define GPTR(T) emulator::Pointer<T>
#define SPTR(T) emulator::Pointer<T>
#define SHARED(T, name, count) \
    const emulator::Pointer<T> name{emulator::shared(#name, sizeof(T) * (count)), 0}
#define GCAST(T, p) emulator::cast<T>(p)
#define CTX const Ctx& ctx

struct Ctx {
    uint thread() const { return emulator::thread(); }
    uint threads() const { return emulator::threads(); }
    uint lane() const { return emulator::thread() % 32; }
    uint warp() const { return emulator::thread() / 32; }
    uint warps() const { return emulator::threads() / 32; }
    uint group_x() const { return emulator::group(0); }
    uint group_y() const { return emulator::group(1); }
    uint group_z() const { return emulator::group(2); }
    uint groups_x() const { return emulator::groups(0); }
};

#define MF_ARG_(T, name) emulator::Pointer<T> name
#define MF_ARG(index, pair) MF_ARG_ pair
#define MF_BIND_(T, name) emulator::Pointer<T>
#define MF_BIND(index, pair) MF_BIND_ pair {bindings[index].memory, (int64_t)bindings[index].offset}
#define MF_ONE(index, pair) 1
#define KERNEL(name, Constants, ...)                                                                     \
    static void name(const Ctx& ctx, const Constants& c, MF_EACH(MF_ARG, __VA_ARGS__));                  \
    static void name##_bound(const emulator::Binding* bindings, const void* constants) {                 \
        Constants c;                                                                                     \
        memcpy(&c, constants, sizeof c);                                                                 \
        const Ctx ctx{};                                                                                 \
        name(ctx, c, MF_EACH(MF_BIND, __VA_ARGS__));                                                     \
    }                                                                                                    \
    static const int name##_buffers[] = {MF_EACH(MF_ONE, __VA_ARGS__)};                                  \
    static const emulator::Register name##_registered(mf_kernels, #name, name##_bound,                   \
                                                      sizeof name##_buffers / sizeof(int), sizeof(Constants)); \
    static void name(const Ctx& ctx, const Constants& c, MF_EACH(MF_ARG, __VA_ARGS__))

static inline void barrier(const Ctx&, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    emulator::wait_for_group(file, line);
}

static inline float as_float(uint v) {
    float f;
    memcpy(&f, &v, 4);
    return f;
}
static inline uint as_uint(float f) {
    uint v;
    memcpy(&v, &f, 4);
    return v;
}

DEVICE uint lane_read(CTX, uint v, uint lane) { return emulator::exchange(v, lane); }
DEVICE float lane_read(CTX, float v, uint lane) { return as_float(emulator::exchange(as_uint(v), lane)); }
DEVICE uint lane_xor(CTX, uint v, uint mask) { return emulator::exchange(v, ctx.lane() ^ mask); }
DEVICE float lane_xor(CTX, float v, uint mask) { return as_float(emulator::exchange(as_uint(v), ctx.lane() ^ mask)); }

DEVICE float f16_to_f32(ushort bits) {
    const uint sign = (uint)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023;
    if (exponent == 31) return as_float(sign | 0x7f800000 | mantissa << 13);
    if (exponent) return as_float(sign | (exponent + 112) << 23 | mantissa << 13);
    const float small = (float)mantissa / 16777216.0f;
    return sign ? -small : small;
}

DEVICE ushort f32_to_f16(float v) {
    const uint bits = as_uint(v), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (ushort)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return (ushort)(sign | 0x7c00);
    // Adding 0.5 makes the unit of the last place that of the smallest f16.
    if (magnitude < 0x38800000) return (ushort)(sign | (as_uint(as_float(magnitude) + 0.5f) - 0x3f000000));
    return (ushort)(sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

DEVICE int dot4(uint a, uint b, int sum) {
    for (int i = 0; i < 32; i += 8) sum += (int)(int8_t)(a >> i) * (int)(int8_t)(b >> i);
    return sum;
}

DEVICE float exp_of(float x) { return std::exp(x); }
DEVICE float log1p_of(float x) { return std::log1p(x); }
DEVICE float sqrt_of(float x) { return std::sqrt(x); }
DEVICE float abs_of(float x) { return std::fabs(x); }
DEVICE float round_of(float x) { return std::nearbyint(x); }
DEVICE float fma_of(float a, float b, float d) { return std::fma(a, b, d); }
DEVICE bool is_finite(float x) { return std::isfinite(x); }
DEVICE float infinity() { return HUGE_VALF; }
DEVICE float not_a_number() { return NAN; }

struct Word4 { uint x, y, z, w; };
DEVICE uint load_u16(GPTR(const uchar) p, uint offset) { return emulator::load<ushort>(p, offset); }
DEVICE uint load_u32(GPTR(const uchar) p, uint offset) { return emulator::load<uint>(p, offset); }
DEVICE Word4 load_u32x4(GPTR(const uchar) p, uint offset) { return emulator::load<Word4>(p, offset); }

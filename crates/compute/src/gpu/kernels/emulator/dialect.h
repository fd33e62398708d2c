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

// Who wrote last: the group, numbered over all dispatches, and the thread with the stretch between barriers.
struct Stamp {
    uint32_t group, mark;
};

// What is running. A mark is a thread within a stretch between barriers: the same mark, the same thread and stretch.
struct Now {
    uint32_t group, first_group, epoch, thread;
    uint32_t mark() const { return epoch << 9 | (thread + 1); }
};
extern __thread Now now;

// An allocation: a device buffer, or an array of one group's threadgroup memory.
struct Memory {
    uint8_t* data;
    // Of a device buffer: 1 for each byte that was ever written.
    uint8_t* written;
    // Of a device buffer: the last write of each byte.
    Stamp* stamps;
    uint64_t bytes;
    const char* name;
    // Of a device buffer: `first_group` of the dispatch that wrote to it last.
    uint32_t writer;
    // Of threadgroup memory: bytes of an element, and marks of the last write and the last read of each.
    uint32_t element;
    uint32_t* writes;
    uint32_t* reads;
};

[[noreturn]] void fail(const char* format, ...);
[[noreturn]] void fail_access(const Memory& memory, uint64_t at, uint64_t size, bool write);

// Whether two marks are of different threads with no barrier between.
inline bool races(uint32_t a, uint32_t b) { return a != b && a >> 9 == b >> 9; }

inline bool all_written(const uint8_t* written, uint64_t size) {
    if (size == 4) {
        uint32_t flags;
        memcpy(&flags, written, 4);
        return flags == 0x01010101;
    }
    for (uint64_t i = 0; i < size; ++i) if (!written[i]) return false;
    return true;
}

// Whether the running thread may do this; fail_access says what is wrong if not.
inline bool allowed(Memory& memory, uint64_t at, uint64_t size, bool write) {
    if (at + size > memory.bytes || at + size < size || ((size & (size - 1)) == 0 && at % size)) return false;
    const uint32_t mark = now.mark();
    if (memory.element) {
        for (uint64_t i = at / memory.element; i * memory.element < at + size; ++i) {
            if (races(memory.writes[i], mark)) return false;
            if (!write) {
                if (memory.writes[i] == 0) return false;
                // Of several readers, any one that is not the writer to come.
                if (!races(memory.reads[i], mark)) memory.reads[i] = mark;
                continue;
            }
            if (races(memory.reads[i], mark)) return false;
            memory.writes[i] = mark;
        }
        return true;
    }
    if (!write && !all_written(memory.written + at, size)) return false;
    if (!write && memory.writer != now.first_group) return true;
    for (uint64_t i = at; i < at + size; ++i) {
        Stamp& stamp = memory.stamps[i];
        if (stamp.group >= now.first_group && (stamp.group != now.group || races(stamp.mark, mark))) return false;
        if (write) stamp = Stamp{now.group, mark};
    }
    if (write) {
        memset(memory.written + at, 1, size);
        memory.writer = now.first_group;
    }
    return true;
}

// Threads that run ahead of the dispatches before theirs.
extern __thread uint8_t ahead[256];
[[noreturn]] void fail_ahead(const Memory& memory);

inline void check(Memory& memory, uint64_t at, uint64_t size, bool write) {
    if (ahead[now.thread] && !memory.element) fail_ahead(memory);
    if (!allowed(memory, at, size, write)) fail_access(memory, at, size, write);
}

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

uint threads();
uint group(uint axis);
uint groups(uint axis);
void wait_for_group(const char* file, int line);
// Gives `value` to the warp and returns that of `lane`.
uint32_t exchange(uint32_t value, uint lane);
Memory* shared(const char* name, uint64_t bytes, uint32_t element);

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
#define MF_BIND(index, pair) MF_BIND_ pair {bindings[index].memory, (int64_t)bindings[index].offset}
#define MF_ONE(index, pair) 1
#define KERNEL(...) MF_KERNEL(0, __VA_ARGS__)
#define KERNEL_AHEAD(...) MF_KERNEL(1, __VA_ARGS__)
#define MF_KERNEL(first, name, Constants, ...)                                                           \
    static void name(const Ctx& ctx, const Constants& c, MF_EACH(MF_ARG, __VA_ARGS__));                  \
    static void name##_bound(const emulator::Binding* bindings, const void* constants) {                 \
        Constants c;                                                                                     \
        memcpy(&c, constants, sizeof c);                                                                 \
        const Ctx ctx{};                                                                                 \
        emulator::ahead[emulator::now.thread] = first;                                                   \
        name(ctx, c, MF_EACH(MF_BIND, __VA_ARGS__));                                                     \
    }                                                                                                    \
    static const int name##_buffers[] = {MF_EACH(MF_ONE, __VA_ARGS__)};                                  \
    static const emulator::Register name##_registered(mf_kernels, #name, name##_bound,                   \
                                                      sizeof name##_buffers / sizeof(int), sizeof(Constants)); \
    static void name(const Ctx& ctx, const Constants& c, MF_EACH(MF_ARG, __VA_ARGS__))

static inline void barrier(const Ctx&, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    emulator::wait_for_group(file, line);
}

DEVICE void after_previous(CTX) { emulator::ahead[emulator::now.thread] = 0; }

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
DEVICE float exp2_of(float x) { return std::exp2(x); }
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
DEVICE Word4 load_loose(GPTR(const uchar) p, uint offset) {
    uint w[4];
    for (uint i = 0; i < 4; ++i) w[i] = load_u16(p, offset + 4 * i) | load_u16(p, offset + 4 * i + 2) << 16;
    return Word4{w[0], w[1], w[2], w[3]};
}
DEVICE void prefetch(GPTR(const uchar), uint) {}

DEVICE Word4 load_u32x4(SPTR(const uint) p, uint index) {
    if (index % 4) emulator::fail("%s: four words from %u on", p.memory->name, index);
    return Word4{p[index], p[index + 1], p[index + 2], p[index + 3]};
}

struct Float4 { float x, y, z, w; };
DEVICE Float4 load_f32x4(SPTR(const float) p, uint index) {
    if (index % 4) emulator::fail("%s: four elements from %u on", p.memory->name, index);
    return Float4{p[index], p[index + 1], p[index + 2], p[index + 3]};
}

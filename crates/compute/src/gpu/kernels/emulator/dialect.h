// The emulator's side of the dialect: device code as ordinary C++ whose every access to memory is checked. Pointers know
// their allocation; those of text that is CUDA's alone are plain ones.
#pragma once

#include "operations.h"

#ifdef MOEFLUX_PLAIN_POINTERS
#include "cuda/pointers.h"
#else

#include <atomic>

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

#define GPTR(T) emulator::Pointer<T>
#define SPTR(T) emulator::Pointer<T>
#define SHARED(T, name, count) \
    const emulator::Pointer<T> name{emulator::shared(#name, sizeof(T) * (count), sizeof(T)), 0}
#define GCAST(T, p) emulator::cast<T>(p)

#define MF_ARG_(T, name) emulator::Pointer<T> name
#define MF_ARG(index, pair) MF_ARG_ pair
#define MF_BIND_(T, name) emulator::Pointer<T>
#define MF_BIND(index, pair) \
    MF_BIND_ pair { bindings[index].memory, (int64_t)bindings[index].offset }

DEVICE uint tally(SPTR(uint) counter, uint number) { return emulator::tally(*counter.memory, counter.at, number); }
DEVICE uint tally_device(GPTR(uint) counter, uint number) { return emulator::tally(*counter.memory, counter.at, number); }

DEVICE void publish(CTX) { std::atomic_thread_fence(std::memory_order_seq_cst); }
DEVICE void tell(GPTR(uint) word) { emulator::tell(*word.memory, word.at); }
DEVICE uint nanoseconds() { return emulator::nanoseconds(); }
DEVICE bool told(GPTR(const uint) word, uint limit) { return emulator::told(*word.memory, word.at, limit); }

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
DEVICE void prefetch(GPTR(const uchar), uint) {}

DEVICE Word4 load_u32x4(SPTR(const uint) p, uint index) {
    if (index % 4) emulator::fail("%s: four words from %u on", p.memory->name, index);
    return Word4{p[index], p[index + 1], p[index + 2], p[index + 3]};
}

DEVICE Float4 load_f32x4(SPTR(const float) p, uint index) {
    if (index % 4) emulator::fail("%s: four elements from %u on", p.memory->name, index);
    return Float4{p[index], p[index + 1], p[index + 2], p[index + 3]};
}

#endif

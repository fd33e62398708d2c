// Metal's side of the dialect.
//
// Every pointer has an address space, constants of a file are in `constant` memory, threadgroup memory can only be
// declared in a kernel itself, and a thread's place comes as parameters of the kernel. Compiled without fast math: NaN
// and infinity must pass.
#pragma once

#include <metal_stdlib>
using namespace metal;

#define DEVICE static inline
#define SELDOM static inline
#define CONSTANT static constant constexpr
template <class T>
using device_pointer = device T*;
template <class T>
using group_pointer = threadgroup T*;
#define GPTR(T) device_pointer<T>
#define SPTR(T) group_pointer<T>
#define GCAST(T, p) ((device T*)(p))
// Compilers that are not Metal's bring their own: see `emulator/metal/metal_stdlib` and `tools/metal/check_kernels.py`.
#ifndef MF_KERNEL
#define MF_KERNEL [[kernel, max_total_threads_per_threadgroup(256)]] void
#define MF_REGISTER(name, ...)
#define MF_CONSTANTS(T) constant T&
#define SHARED(T, name, count) threadgroup T name[count]
#endif

struct Ctx {
    uint3 group, groups;
    uint index, size;
    // `thread` is a word of the language; followed by brackets it is this method.
#define thread() place_in_group()
    uint thread() const { return index; }
    uint threads() const { return size; }
    uint lane() const { return index & 31; }
    uint warp() const { return index >> 5; }
    uint warps() const { return size >> 5; }
    uint group_x() const { return group.x; }
    uint group_y() const { return group.y; }
    uint group_z() const { return group.z; }
    uint groups_x() const { return groups.x; }
};

// `ctx` must be an object in functions, where it is a parameter, and in kernels, whose parameters are numbers and whose
// body is not ours to begin. So it stands for an overloaded call: in kernels these names are the parameters that say the
// thread's place; in functions `mf_place` is the object, and the others are the constants here.
CONSTANT uint mf_index = 0, mf_size = 0, mf_groups = 0;
DEVICE Ctx mf_context(uint3 group, uint index, uint3 size, uint3 groups) {
    Ctx made = {group, groups, index, size.x};
    return made;
}
DEVICE Ctx mf_context(Ctx given, uint, uint, uint) { return given; }
#define ctx mf_context(mf_place, mf_index, mf_size, mf_groups)
#define CTX const Ctx mf_place

#define MF_ARG_(T, name) device T* name
#define MF_ARG(index, pair) MF_ARG_ pair [[buffer(index)]]
// The constants' place among the buffers is the last that there is.
#define MF_HEAD(name, Constants, ...)                                                                              \
    MF_KERNEL name(MF_EACH(MF_ARG, __VA_ARGS__), MF_CONSTANTS(Constants) c [[buffer(30)]],                         \
                   uint3 mf_place [[threadgroup_position_in_grid]], uint mf_index [[thread_index_in_threadgroup]], \
                   uint3 mf_size [[threads_per_threadgroup]], uint3 mf_groups [[threadgroups_per_grid]])
#define KERNEL(name, Constants, ...)                         \
    MF_REGISTER(name, MF_HEAD(name, Constants, __VA_ARGS__)) \
    MF_HEAD(name, Constants, __VA_ARGS__)

// Dispatches of a queue follow each other: none begins early, and nothing is brought nearer ahead of use.
#define KERNEL_AHEAD(...) KERNEL(__VA_ARGS__)
#define after_previous(place)
#define writes_apart(place)
#define prefetch(from, bytes)

// Orders device memory within the group too, as CUDA's barrier does.
#define barrier(place) threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup)
DEVICE uint tally(SPTR(uint) counter, uint number) {
    return atomic_fetch_add_explicit((threadgroup atomic_uint*)counter, number, memory_order_relaxed);
}
DEVICE uint tally_device(GPTR(uint) counter, uint number) {
    return atomic_fetch_add_explicit((device atomic_uint*)counter, number, memory_order_relaxed);
}
// One memory: the processor shares no work of a dispatch.
#define publish(place)
DEVICE void tell(GPTR(uint) word) { *word = 1; }
DEVICE uint nanoseconds() { return 0; }
DEVICE bool told(GPTR(const uint) word, uint) { return *word == 1; }
DEVICE float lane_xor(CTX, float v, uint mask) { return simd_shuffle_xor(v, (ushort)mask); }
DEVICE uint lane_xor(CTX, uint v, uint mask) { return simd_shuffle_xor(v, (ushort)mask); }
DEVICE float lane_read(CTX, float v, uint lane) { return simd_shuffle(v, (ushort)lane); }
DEVICE uint lane_read(CTX, uint v, uint lane) { return simd_shuffle(v, (ushort)lane); }
DEVICE uint lane_max(CTX, uint v) {
    for (uint mask = 16; mask > 0; mask >>= 1) {
        const uint other = simd_shuffle_xor(v, (ushort)mask);
        v = other > v ? other : v;
    }
    return v;
}
DEVICE uint lane_min(CTX, uint v) { return ~lane_max(mf_place, ~v); }

DEVICE int lane_add(CTX, int v) {
    for (uint mask = 16; mask > 0; mask >>= 1) v += (int)simd_shuffle_xor((uint)v, (ushort)mask);
    return v;
}

DEVICE float as_float(uint v) { return as_type<float>(v); }
DEVICE uint as_uint(float v) { return as_type<uint>(v); }
DEVICE float f16_to_f32(ushort bits) { return (float)as_type<half>(bits); }
DEVICE ushort f32_to_f16(float v) { return as_type<ushort>((half)v); }
DEVICE int dot4(uint a, uint b, int sum) {
    for (uint shift = 0; shift < 32; shift += 8) {
        sum += ((int)(a << (24 - shift)) >> 24) * ((int)(b << (24 - shift)) >> 24);
    }
    return sum;
}
DEVICE int dot4_unsigned(uint a, uint b, int sum) {
    for (uint shift = 0; shift < 32; shift += 8) sum += (int)(a >> shift & 255) * ((int)(b << (24 - shift)) >> 24);
    return sum;
}

DEVICE float exp_of(float x) { return precise::exp(x); }
DEVICE float exp2_of(float x) { return precise::exp2(x); }
// ln(1 + x), which Metal lacks: the rounding of 1 + x is taken out by a quotient (Higham, Accuracy and Stability of
// Numerical Algorithms, 1.14.1).
DEVICE float log1p_of(float x) {
    const float u = 1.0f + x;
    return u == 1.0f ? x : precise::log(u) * (x / (u - 1.0f));
}
DEVICE float sqrt_of(float x) { return precise::sqrt(x); }
DEVICE float inverse_sqrt(float x) { return 1.0f / precise::sqrt(x); }
DEVICE float quotient(float a, float b) { return a / b; }
DEVICE float abs_of(float x) { return metal::fabs(x); }
DEVICE float round_of(float x) { return metal::rint(x); }
DEVICE float fma_of(float a, float b, float d) { return metal::fma(a, b, d); }
DEVICE float product_of(float a, float b) { return a * b; }
DEVICE bool is_finite(float x) { return (as_uint(x) & 0x7f800000u) != 0x7f800000u; }
DEVICE float infinity() { return as_float(0x7f800000u); }
DEVICE float not_a_number() { return as_float(0x7fc00000u); }

struct alignas(16) Word4 {
    uint x, y, z, w;
};
DEVICE uint load_u16(GPTR(const uchar) p, uint offset) { return *(device const ushort*)(p + offset); }
DEVICE uint load_u32(GPTR(const uchar) p, uint offset) { return *(device const uint*)(p + offset); }
DEVICE Word4 load_u32x4(GPTR(const uchar) p, uint offset) { return *(device const Word4*)(p + offset); }
DEVICE void store_u32x4(GPTR(uchar) p, uint offset, Word4 v) { *(device Word4*)(p + offset) = v; }
DEVICE Word4 peek4(GPTR(const uint) p) { return *(device const Word4*)p; }

DEVICE Word4 load_loose(GPTR(const uchar) p, uint offset) {
    const device ushort* from = (const device ushort*)(p + offset);
    Word4 v = {from[0] | (uint)from[1] << 16, from[2] | (uint)from[3] << 16, from[4] | (uint)from[5] << 16,
               from[6] | (uint)from[7] << 16};
    return v;
}
DEVICE Word4 load_any(GPTR(const uchar) p, uint offset) {
    uint w[4] = {0, 0, 0, 0};
    for (uint i = 0; i < 16; ++i) w[i / 4] |= (uint)p[offset + i] << (8 * (i % 4));
    Word4 v = {w[0], w[1], w[2], w[3]};
    return v;
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
DEVICE Word4 load_u32x4(SPTR(const uint) p, uint index) {
    Word4 v = {p[index], p[index + 1], p[index + 2], p[index + 3]};
    return v;
}

struct Float4 {
    float x, y, z, w;
};
DEVICE Float4 load_f32x4(SPTR(const float) p, uint index) {
    Float4 v = {p[index], p[index + 1], p[index + 2], p[index + 3]};
    return v;
}

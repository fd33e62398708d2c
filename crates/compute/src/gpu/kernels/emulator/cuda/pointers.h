// What the emulator has for text that is CUDA's alone: plain pointers, so the compiler is told to report every access to memory (see
// `runtime.cpp`), and what of CUDA C++ kernels use that the dialect has no name for.
#pragma once

#include "../operations.h"

template <class T>
using pointer = T*;
#define GPTR(T) pointer<T>
#define SPTR(T) pointer<T>
// Kernels take memory for what it was not declared as: every byte knows who wrote it.
#define SHARED(T, name, count) T* const name = (T*)emulator::shared_data(#name, sizeof(T) * (count), 1)
#define GCAST(T, p) ((T*)(p))

#define MF_ARG_(T, name) T* name
#define MF_ARG(index, pair) MF_ARG_ pair
#define MF_ADDRESS_(T, name) (T*)
#define MF_BIND(index, pair) MF_ADDRESS_ pair(bindings[index].memory->data + bindings[index].offset)

// What is read and written at once, at addresses that are a multiple of its size.
template <class Parts>
struct alignas(sizeof(Parts)) Vector : Parts {
    Vector() = default;
    Vector(const Parts& parts) : Parts(parts) {}
    Vector(const Vector& other) : Parts(other) { emulator::check_alignment(&other, sizeof(Parts)); }
    Vector& operator=(const Vector& other) {
        emulator::check_alignment(this, sizeof(Parts));
        Parts::operator=(other);
        return *this;
    }
};
struct Float2 {
    float x, y;
};
struct UintPair {
    uint x, y;
};
using uint4 = Vector<Word4>;
using float4 = Vector<Float4>;
using float2 = Vector<Float2>;
using uint2 = Vector<UintPair>;
DEVICE uint4 make_uint4(uint x, uint y, uint z, uint w) { return Word4{x, y, z, w}; }

DEVICE uint min(uint a, uint b) { return a < b ? a : b; }
DEVICE uint __popc(uint v) { return (uint)__builtin_popcount(v); }
// The lower word of both, shifted right.
DEVICE uint __funnelshift_r(uint low, uint high, uint by) { return (uint)(((uint64_t)high << 32 | low) >> (by & 31)); }
DEVICE void __syncwarp() { emulator::wait_for_warp(); }
DEVICE uint __ballot_sync(uint, bool v) { return emulator::ballot(v); }

DEVICE uint load_u16(const uchar* p, uint offset) { return *(const ushort*)(p + offset); }
DEVICE uint load_u32(const uchar* p, uint offset) { return *(const uint*)(p + offset); }
DEVICE Word4 load_u32x4(const uchar* p, uint offset) {
    const uint4 v = *(const uint4*)(p + offset);
    return Word4{v.x, v.y, v.z, v.w};
}
DEVICE void store_u32x4(uchar* p, uint offset, Word4 v) { *(uint4*)(p + offset) = make_uint4(v.x, v.y, v.z, v.w); }
DEVICE Word4 load_loose(const uchar* p, uint offset) {
    uint w[4];
    for (uint i = 0; i < 4; ++i) w[i] = load_u16(p, offset + 4 * i) | load_u16(p, offset + 4 * i + 2) << 16;
    return Word4{w[0], w[1], w[2], w[3]};
}
DEVICE Word4 load_any(const uchar* p, uint offset) {
    uint w[4] = {0, 0, 0, 0};
    for (uint i = 0; i < 16; ++i) w[i / 4] |= (uint)p[offset + i] << (8 * (i % 4));
    return Word4{w[0], w[1], w[2], w[3]};
}
DEVICE void prefetch(const uchar*, uint) {}

DEVICE Word4 load_u32x4(const uint* p, uint index) { return load_u32x4((const uchar*)p, 4 * index); }
DEVICE Float4 load_f32x4(const float* p, uint index) {
    const float4 v = *(const float4*)(p + index);
    return Float4{v.x, v.y, v.z, v.w};
}

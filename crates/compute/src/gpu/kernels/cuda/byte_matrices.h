// Products of 8-bit matrices by a warp, and loads that suit them: CUDA devices of compute capability 8.0 and later, and the
// emulator.
#pragma once
#include "../columns8.h"

// A lane's four results: with g = lane / 4 and t = lane % 4 of row g columns 2t and 2t + 1, then of row g + 8 the same.
struct Ints {
    int v[4];
};

// A lane's share of the rows g and g + 8 of a left matrix: four bytes of 16 columns, or of each half of 32. Which column
// stands where is free, as long as the right side agrees.
struct Ints4 {
    uint v[4];
};

#ifdef MOEFLUX_EMULATOR

// sum + a · b of (16, 32) and (32, 8).
DEVICE Ints multiply_bytes(CTX, const Ints4 a, uint b0, uint b1, Ints sum) {
    const uint b[2] = {b0, b1};
    emulator::multiply_bytes(sum.v, a.v, b, 2);
    return sum;
}
// sum + a · b of (16, 16) and (16, 8).
DEVICE Ints multiply_bytes(CTX, uint a0, uint a1, uint b, Ints sum) {
    const uint a[2] = {a0, a1};
    emulator::multiply_bytes(sum.v, a, &b, 1);
    return sum;
}
DEVICE Word2 load_u32x2(GPTR(const uchar) p, uint offset) { return emulator::load<Word2>(p, offset); }
DEVICE Word2 load_u32x2(SPTR(const uint) p, uint index) {
    if (index % 2) emulator::fail("%s: two words from %u on", p.memory->name, index);
    return Word2{p[index], p[index + 1]};
}
// Four bytes from any address.
DEVICE uint load_loose_u32(GPTR(const uchar) p, uint offset) {
    return (uint)p[offset] | (uint)p[offset + 1] << 8 | (uint)p[offset + 2] << 16 | (uint)p[offset + 3] << 24;
}
// Threadgroup memory that a dispatch asks for: `Dispatch::shared` bytes.
#define SHARED_ASKED(name) SHARED(uint, name, 57344)

#else

DEVICE Ints multiply_bytes(CTX, const Ints4 a, uint b0, uint b1, Ints sum) {
    Ints r;
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, "
        "%13};"
        : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3])
        : "r"(a.v[0]), "r"(a.v[1]), "r"(a.v[2]), "r"(a.v[3]), "r"(b0), "r"(b1), "r"(sum.v[0]), "r"(sum.v[1]),
          "r"(sum.v[2]), "r"(sum.v[3]));
    return r;
}
DEVICE Ints multiply_bytes(CTX, uint a0, uint a1, uint b, Ints sum) {
    Ints r;
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
        : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3])
        : "r"(a0), "r"(a1), "r"(b), "r"(sum.v[0]), "r"(sum.v[1]), "r"(sum.v[2]), "r"(sum.v[3]));
    return r;
}
DEVICE Word2 load_u32x2(const uchar* p, uint offset) {
    const uint2 v = __ldg((const uint2*)(p + offset));
    return Word2{v.x, v.y};
}
DEVICE Word2 load_u32x2(const uint* p, uint index) {
    const uint2 v = *(const uint2*)(p + index);
    return Word2{v.x, v.y};
}
DEVICE uint load_loose_u32(const uchar* p, uint offset) {
    const uint shift = (uint)(ulong)(p + offset) & 3;
    const uint* const from = (const uint*)(p + offset - shift);
    return __funnelshift_r(__ldg(from), shift ? __ldg(from + 1) : 0, 8 * shift);
}
#define SHARED_ASKED(name) extern __shared__ __align__(16) uint name[]

#endif

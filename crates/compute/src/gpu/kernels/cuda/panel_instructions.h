// Instructions of panels whose weights are in shared memory (`panel_columns.h`). The emulator has a file of its own in this one's place.
#pragma once
#include "tensor_core.h"

// d = a · b + c: a (16, 16), b (16, 8).
DEVICE void mma_16816(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
// d += a · b: a (16, 8), b (8, 8).
DEVICE void mma_1688(float (&d)[4], u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b));
}

// Bits of `a` where `mask` has ones, of `b` elsewhere.
DEVICE u32 chosen_bits(u32 mask, u32 a, u32 b) {
    u32 d;
    // The compiler makes two of it.
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(d) : "r"(mask), "r"(a), "r"(b));
    return d;
}
// Byte i of four as f32, by a conversion that takes any byte of a register.
DEVICE float signed_byte(u32 bytes, u32 i) {
    float f;
    asm("{ .reg .s32 byte; bfe.s32 byte, %1, %2, 8; cvt.rn.f32.s32 %0, byte; }" : "=f"(f) : "r"(bytes), "r"(8 * i));
    return f;
}
DEVICE float unsigned_byte(u32 bytes, u32 i) {
    float f;
    asm("{ .reg .u32 byte; bfe.u32 byte, %1, %2, 8; cvt.rn.f32.u32 %0, byte; }" : "=f"(f) : "r"(bytes), "r"(8 * i));
    return f;
}
// The lower two of four bytes of e4m3 as f16, which are exact, and all four.
DEVICE u32 floats_of_2(u32 codes) {
    u32 two;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }" : "=r"(two) : "r"(codes));
    return two;
}
DEVICE void floats_of_4(u32& first, u32& second, u32 codes) {
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
        : "=r"(first), "=r"(second)
        : "r"(codes));
}
// Four bytes from an even address: `selector` is of the words that `p` and the next are in.
DEVICE u32 even_word(const u8* p, u32 selector) { return __byte_perm(*(const u32*)p, *(const u32*)(p + 4), selector); }

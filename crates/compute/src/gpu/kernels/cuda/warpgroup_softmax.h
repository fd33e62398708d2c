// What kernels of attention by warp groups have in common: their products, waiting for copies and products, and batches.
#pragma once
#include "warpgroup.h"

const u32 PAGE_TOKENS = 64;

// Consecutive rows of the batch that belong to one sequence; `start` is the position of the first.
struct Sequence {
    u32 first_row, rows, start, read_slot, written_slot;
};

// Position of a row, and where its sequence's page numbers begin in `pages`.
struct Place {
    u32 position, first_page;
};

#if HAS_WARPGROUPS

DEVICE bool finite_pair(u32 w) { return (w & 0x7c00) != 0x7c00 && (w & 0x7c000000) != 0x7c000000; }
// Between ordinary stores or copies to shared memory and the products of warp groups that read them.
DEVICE void fence_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// An arrival once all copies of the thread until now have come.
DEVICE void barrier_arrive_after_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Waits until at most `n` of the committed groups of products are under way.
template <int n>
DEVICE void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory");
}
// Results are not read before this, nor written after it.
template <int n>
DEVICE void hold(float (&d)[n]) {
#pragma unroll
    for (int i = 0; i < n; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// As `matrix_at`, of a matrix whose rows are the product's sums and whose columns are its results, of which the next 64 are
// `next` bytes further on. 16 rows are 2048 bytes.
DEVICE u64 transposed_at(u32 address, u32 next) {
    return (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)(next >> 4) << 16 | (address & 0x3ffff) >> 4;
}

// score: as `WarpgroupProduct`, with both sides in shared memory, d = a · b unless it `adds`. mix: b (16, N) is row-major.
template <int N>
struct AttentionProduct;

#define ATTENTION_PRODUCT(half, p, a0, a1, a2, a3, m)                                                                  \
    template <>                                                                                                        \
    struct AttentionProduct<2 * half> {                                                                                \
        static DEVICE void score(float (&d)[half], u64 a, u64 b, u32 adds) {                                           \
            asm volatile("{ .reg .pred p;\nsetp.ne.b32 p, " p                                                          \
                         ", 0;\nwgmma.mma_async.sync.aligned.m64n" WIDTH_##half "k16.f32.f16.f16 {" REGISTERS_##half   \
                         "}, " a0 ", " a1 ", p, 1, 1, 0, 0; }"                                                         \
                         : RESULTS_##half                                                                              \
                         : "l"(a), "l"(b), "r"(adds));                                                                 \
        }                                                                                                              \
        static DEVICE void mix(float (&d)[half], const u32 (&a)[4], u64 b) {                                           \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" WIDTH_##half "k16.f32.f16.f16 {" REGISTERS_##half "}, {"  \
                         a0 ", " a1 ", " a2 ", " a3 "}, " m ", 1, 1, 1, 1;"                                            \
                         : RESULTS_##half                                                                              \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                        \
        }                                                                                                              \
    };
ATTENTION_PRODUCT(32, "%34", "%32", "%33", "%34", "%35", "%36")
ATTENTION_PRODUCT(64, "%66", "%64", "%65", "%66", "%67", "%68")
#undef ATTENTION_PRODUCT

#endif // HAS_WARPGROUPS

// A kernel's body, where the target has warp groups.
#if HAS_WARPGROUPS
#define WITH_WARPGROUPS(...) __VA_ARGS__
#else
#define WITH_WARPGROUPS(...)
#endif

// Copies of weights to shared memory that are under way while a group does something else. They are of compute capability 9.0;
// where this is compiled for less, threads copy.
#pragma once
#include "../dialect.h"

// Makes `bar` ready for copies of `count` warps.
DEVICE void expect_copies(ulong* bar, uint count) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"((uint)__cvta_generic_to_shared(bar)), "r"(count)
                 : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Waits for all of them; a bar that is used again has 0 and 1 for `parity` by turns.
DEVICE void await_copies(ulong* bar, uint parity = 0) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred done; again%=: mbarrier.try_wait.parity.shared.b64 done, [%0], %1; @!done bra again%=; }" ::"r"(
            (uint)__cvta_generic_to_shared(bar)),
        "r"(parity)
        : "memory");
#endif
}

// Stands for one of the copies that `bar` counts.
DEVICE void no_copy(CTX, ulong* bar) {
#if __CUDA_ARCH__ >= 900
    if (ctx.lane() != 0) return;
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"((uint)__cvta_generic_to_shared(bar)) : "memory");
#endif
}

// Starts to copy `bytes` bytes to shared memory, both a multiple of 16 as is where they come from. All lanes of a warp call
// this; it is one copy of those that `bar` counts.
DEVICE void copy_ahead(CTX, uchar* to, const uchar* from, uint bytes, ulong* bar) {
#if __CUDA_ARCH__ >= 900
    if (ctx.lane() != 0) return;
    const uint counter = (uint)__cvta_generic_to_shared(bar);
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(counter), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     (uint)__cvta_generic_to_shared(to)),
                 "l"(from), "r"(bytes), "r"(counter)
                 : "memory");
#else
    for (uint i = 16 * ctx.lane(); i < bytes; i += 16 * 32) *(uint4*)(to + i) = __ldg((const uint4*)(from + i));
#endif
}

// Words of a pair's activations in shared memory: `quad_at` keeps them within eight quads.
DEVICE uint pair_words(uint cols) { return (cols / 4 + 31) / 32 * 32; }

// Instructions that copy to shared memory while a group does something else, and the memory that a dispatch asks for. Bulk copies are
// of compute capability 9.0; where this is compiled for less, a warp's lanes copy 16 bytes each, and a warp awaits what it has asked for
// itself. The emulator has a file of its own in this one's place.
#pragma once
#include "../dialect.h"

// Whether the thread takes part in a warp's copies: one for all, or each.
DEVICE bool starts_copies(CTX) {
#if __CUDA_ARCH__ >= 900
    return ctx.lane() == 0;
#else
    return true;
#endif
}

// Makes `bar` ready for copies of `count` warps.
DEVICE void expect_copies(ulong* bar, uint count) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"((uint)__cvta_generic_to_shared(bar)), "r"(count)
                 : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Waits for all of them; a bar that is used again has 0 and 1 for `parity` by turns. All lanes of a warp call this.
DEVICE void await_copies(ulong* bar, uint parity = 0) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred done; again%=: mbarrier.try_wait.parity.shared.b64 done, [%0], %1; @!done bra again%=; }" ::"r"(
            (uint)__cvta_generic_to_shared(bar)),
        "r"(parity)
        : "memory");
#else
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
#endif
}

// The same for copies of all warps of a group, all of whose threads call this.
DEVICE void await_copies_of_all(CTX, ulong* bar) {
#if __CUDA_ARCH__ >= 900
    barrier(ctx);
    await_copies(bar);
#else
    await_copies(bar);
    barrier(ctx);
#endif
}

// Says how many bytes the copies of a warp bring, which are one of those that `bar` counts.
DEVICE void expect_bytes(ulong* bar, uint bytes) {
#if __CUDA_ARCH__ >= 900
    const uint counter = (uint)__cvta_generic_to_shared(bar);
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(counter), "r"(bytes) : "memory");
#endif
}

// Starts to copy `bytes` of them to shared memory, both a multiple of 16 as is where they come from.
DEVICE void copy_bulk(CTX, uchar* to, const uchar* from, uint bytes, ulong* bar) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     (uint)__cvta_generic_to_shared(to)),
                 "l"(from), "r"(bytes), "r"((uint)__cvta_generic_to_shared(bar))
                 : "memory");
#else
    for (uint i = 16 * ctx.lane(); i < bytes; i += 16 * 32)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint)__cvta_generic_to_shared(to + i)), "l"(from + i)
                     : "memory");
#endif
}

// Starts a thread's copy of 8 or 16 bytes to shared memory, and waits for all that it has started.
template <uint BYTES>
DEVICE void copy_async(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"((uint)__cvta_generic_to_shared(to)), "l"(from),
                 "n"(BYTES)
                 : "memory");
}
DEVICE void await_async() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Shared memory that a dispatch asks for: `Dispatch::shared` bytes.
#define ASKED_MEMORY(T, name) extern __shared__ __align__(128) T name[]

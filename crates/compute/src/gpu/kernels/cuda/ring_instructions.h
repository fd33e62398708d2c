// Instructions of `ring.h`. The emulator has a file of its own in this one's place.
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

static __device__ __forceinline__ void ring_bar(unsigned bar, unsigned count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
// A warp has arrived.
static __device__ __forceinline__ void ring_arrive(unsigned bar) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(bar) : "memory");
}
static __device__ __forceinline__ void ring_wait(unsigned bar, unsigned phase) {
    asm volatile(
        "{ .reg .pred done; again%=: mbarrier.try_wait.parity.shared.b64 done, [%0], %1; @!done bra again%=; }" ::"r"(bar),
        "r"(phase)
        : "memory");
}
// Bytes that `bar` is to count beside others; the warp that is to arrive has not.
static __device__ __forceinline__ void ring_expect(unsigned bar, unsigned bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// The same as the warp that is to arrive does.
static __device__ __forceinline__ void ring_arrive_with(unsigned bar, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// How caches keep what is read once.
static __device__ __forceinline__ unsigned long long ring_once() {
    unsigned long long once;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    return once;
}
static __device__ __forceinline__ void ring_copy_bulk(unsigned to, const unsigned char* piece, unsigned bytes, unsigned bar,
                                                      unsigned long long once) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(piece), "r"(bytes), "r"(bar), "l"(once)
        : "memory");
}
static __device__ __forceinline__ void ring_bars_are_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// The kernel in front has ended, and the next one may begin.
static __device__ __forceinline__ void ring_after_previous() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
}

#endif

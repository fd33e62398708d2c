// Products of warp groups, 128 threads each, and copies whose arrival barriers tell, of compute capability 9.0: plain PTX.
#pragma once
#include "tensor_core.h"

// Whether the compiler's target has them; kernels are empty where it has not, and never launched.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WARPGROUPS 1
#else
#define HAS_WARPGROUPS 0
#endif

#if HAS_WARPGROUPS

// A barrier is 8 bytes of shared memory. Its phase ends when `count` arrivals, and all bytes that are expected, are there.
DEVICE void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// After the barriers of a block are initialised, by the thread that did it.
DEVICE void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// One arrival, and so many bytes of copies that the phase waits for too.
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits until the phase of that parity has ended.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred p;\n"
        "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@p bra DONE;\n"
        "bra AGAIN;\n"
        "DONE: }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
// Copies a multiple of 16 bytes to shared memory in the background, and tells the barrier.
DEVICE void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// A matrix in shared memory: rows of 64 f16, 128 bytes apart, from a multiple of 1024 bytes on; piece p of 16 bytes of row r
// stands at p ^ (r % 8). Columns 16 further on are 2 more.
DEVICE u64 matrix_at(u32 address) { return (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)1 << 16 | (address & 0x3ffff) >> 4; }

// Before the first of several products, and after their registers were written.
DEVICE void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
DEVICE void warpgroup_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// add: d += a · b: a (64, 16) row-major f16 in registers, as `mma_16816` takes 16 rows of each warp; b (16, N) column-major
// f16 in shared memory; d (64, N) f32. Lane l of a warp holds of d its rows l/4 and l/4 + 8, columns 8n + 2(l%4) and the next:
// d[4n], d[4n + 1], and d[4n + 2], d[4n + 3].
template <int N>
struct WarpgroupProduct;

#define REGISTERS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define REGISTERS_32 REGISTERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_48 REGISTERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define REGISTERS_64 REGISTERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REGISTERS_72 REGISTERS_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define REGISTERS_80 REGISTERS_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define REGISTERS_88 REGISTERS_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D8(i) D4(i), D4(i + 4)
#define D16(i) D8(i), D8(i + 8)
#define RESULTS_16 D16(0)
#define RESULTS_32 RESULTS_16, D16(16)
#define RESULTS_48 RESULTS_32, D16(32)
#define RESULTS_64 RESULTS_48, D16(48)
#define RESULTS_72 RESULTS_64, D8(64)
#define RESULTS_80 RESULTS_72, D8(72)
#define RESULTS_88 RESULTS_80, D8(80)

// By half the width: how many registers d has.
#define WARPGROUP_PRODUCT(half, a0, a1, a2, a3, m)                                                                    \
    template <>                                                                                                       \
    struct WarpgroupProduct<2 * half> {                                                                               \
        static DEVICE void add(float (&d)[half], const u32 (&a)[4], u64 b) {                                          \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" WIDTH_##half "k16.f32.f16.f16 {" REGISTERS_##half "}, {" \
                         a0 ", " a1 ", " a2 ", " a3 "}, " m ", 1, 1, 1, 0;"                                           \
                         : RESULTS_##half                                                                             \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                       \
        }                                                                                                             \
    };
#define WIDTH_16 "32"
#define WIDTH_32 "64"
#define WIDTH_48 "96"
#define WIDTH_64 "128"
#define WIDTH_72 "144"
#define WIDTH_80 "160"
#define WIDTH_88 "176"
WARPGROUP_PRODUCT(16, "%16", "%17", "%18", "%19", "%20")
WARPGROUP_PRODUCT(32, "%32", "%33", "%34", "%35", "%36")
WARPGROUP_PRODUCT(48, "%48", "%49", "%50", "%51", "%52")
WARPGROUP_PRODUCT(64, "%64", "%65", "%66", "%67", "%68")
WARPGROUP_PRODUCT(72, "%72", "%73", "%74", "%75", "%76")
WARPGROUP_PRODUCT(80, "%80", "%81", "%82", "%83", "%84")
WARPGROUP_PRODUCT(88, "%88", "%89", "%90", "%91", "%92")
#undef WARPGROUP_PRODUCT

#endif // HAS_WARPGROUPS

// Blocks of a cluster, of compute capability 9.0 on; elsewhere a block is alone.
#pragma once
#include "tensor_core.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
DEVICE u32 rank_in_cluster() {
    u32 rank;
    asm("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    return rank;
}
// Waits for all blocks of the cluster, and sees what they wrote before.
DEVICE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// What is at an address of another block's shared memory.
DEVICE u32 address_in(u32 rank, u32 address) {
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
    return address;
}
DEVICE u32 read_word(u32 rank, u32 address) {
    u32 value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address_in(rank, address)) : "memory");
    return value;
}
DEVICE float4 read_floats(u32 rank, u32 address) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address_in(rank, address))
                 : "memory");
    return v;
}
#else
DEVICE u32 rank_in_cluster() { return 0; }
DEVICE void cluster_barrier() { __syncthreads(); }
DEVICE u32 read_word(u32, u32 address) {
    u32 value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}
DEVICE float4 read_floats(u32, u32 address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}
#endif

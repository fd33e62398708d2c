// Stands in for `cuda/cluster.h`: a block is alone, as where there are no clusters.
#pragma once
#include "tensor_core.h"

DEVICE u32 rank_in_cluster() { return 0; }
DEVICE void cluster_barrier() { __syncthreads(); }
DEVICE u32 read_word(u32 rank, u32 address) {
    if (rank) emulator::fail("a block of a cluster reads what another one has");
    return *(const u32*)emulator::at_shared_number(address);
}
DEVICE float4 read_floats(u32 rank, u32 address) {
    if (rank) emulator::fail("a block of a cluster reads what another one has");
    return *(const float4*)emulator::at_shared_number(address);
}

// Rows of experts' weights that pass through shared memory: copies bring the next ones while these are multiplied, and a
// group takes its share of all experts' rows one after the other. Plain CUDA C++, beside the common dialect or without it.
//
// A *panel* is 16 rows of a weight. A *unit* is two panels of each *team* of warps that share their columns.
#pragma once

constexpr unsigned RING_PANEL = 16, RING_PANELS = 2, RING_STAGES = 2;

// Up to a number of pairs of one expert: those of a list from `first` on.
struct RingTile {
    unsigned expert, first, count, unused;
};

struct RingConstants {
    // Entries of `tiles`, of which those with pairs come first.
    unsigned tiles;
    // Warps that share a panel, and teams of such warps.
    unsigned warps, teams;
};

// What a group is at: a unit of a tile's, where the tile's expert is, and which of two places is for what goes with the tile.
struct RingUnit {
    RingTile tile;
    unsigned slot, index, turn;
};

// Copies on their way to a stage of units. From compute capability 9.0 on a thread starts bulk copies, which `bar` counts; before,
// every thread copies its part.
struct RingCopies {
    unsigned bar;
    // How often the stage has been waited for, as a bit.
    unsigned phase;
};

static __device__ __forceinline__ RingCopies ring_copies(unsigned long long* bar) {
    const RingCopies copies = {(unsigned)__cvta_generic_to_shared(bar), 0};
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(copies.bar) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
#endif
    return copies;
}

// Starts to copy `panels` panels of `bytes` bytes, a multiple of 16: `from(panel)` is where one begins.
template <class From>
static __device__ __forceinline__ void ring_copy(const RingCopies& copies, unsigned to, unsigned panels, unsigned bytes, From from) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x != 0) return;
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(copies.bar), "r"(panels * bytes) : "memory");
    for (unsigned panel = 0; panel < panels; panel++)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to + panel * bytes),
                     "l"(from(panel)), "r"(bytes), "r"(copies.bar)
                     : "memory");
#else
    for (unsigned panel = 0; panel < panels; panel++) {
        const unsigned char* const own = from(panel);
        for (unsigned i = threadIdx.x; i < bytes / 16; i += blockDim.x)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + panel * bytes + 16 * i), "l"(own + 16 * i));
    }
    asm volatile("cp.async.commit_group;");
#endif
}

// Waits for them.
static __device__ __forceinline__ void ring_wait(RingCopies& copies) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred done; again%=: mbarrier.try_wait.parity.shared.b64 done, [%0], %1; @!done bra again%=; }" ::"r"(copies.bar),
        "r"(copies.phase)
        : "memory");
    copies.phase ^= 1;
#else
    asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
}

// Passes a group's units through `memory`, RING_STAGES of them at a time. `units` of them make a tile's product, of rows of `stride`
// bytes. `rows(unit, panel)` says where a panel begins; `enter(unit)` is called when a tile begins; `multiply(unit, half, panels)`
// makes the products of what is at `panels`, and `leave(unit, half)` is called when all warps have, `half` by turns 0 and 1. Whatever
// `enter` and `multiply` write is seen by `multiply` and `leave` of the same tile or unit, if it has a place for each turn or half.
template <class RowsOf, class Enter, class Multiply, class Leave>
static __device__ __forceinline__ void ring_pass(unsigned char* memory, const RingTile* tiles, const unsigned* table, unsigned stride,
                                                 unsigned units, const RingConstants& s, RowsOf rows, Enter enter,
                                                 Multiply multiply, Leave leave) {
    __shared__ unsigned long long bars[RING_STAGES];
    const unsigned panel_bytes = RING_PANEL * stride, stage_bytes = s.teams * RING_PANELS * panel_bytes;
    RingCopies even = ring_copies(bars), odd = ring_copies(bars + 1);
    unsigned count = 0;
    for (unsigned i = 0; i < s.tiles; i += blockDim.x)
        count += __syncthreads_count(i + threadIdx.x < s.tiles && tiles[i + threadIdx.x].count != 0);
    const unsigned long long all = (unsigned long long)count * units;
    const unsigned first = all * blockIdx.x / gridDim.x, end = all * (blockIdx.x + 1) / gridDim.x;
    if (first >= end) return;
    unsigned tile = first / units;
    RingUnit next = {tiles[tile], 0, first % units, 0};
    next.slot = table[next.tile.expert];
    auto copy = [&](unsigned half) {
        const unsigned to = (unsigned)__cvta_generic_to_shared(memory) + half * stage_bytes;
        ring_copy(half ? odd : even, to, s.teams * RING_PANELS, panel_bytes, [&](unsigned panel) { return rows(next, panel); });
    };
    copy(0);
    RingUnit now = next, before = next;
    bool begins = true;
#pragma unroll 1
    for (unsigned at = first, half = 0; at < end; at++, half ^= 1) {
        now = next;
        now.turn = before.turn;
        if (begins) {
            now.turn ^= 1;
            enter(now);
        }
        ring_wait(half ? odd : even);
        __syncthreads();
        begins = ++next.index == units;
        if (at + 1 < end) {
            if (begins) {
                next.index = 0;
                next.tile = tiles[++tile];
                next.slot = table[next.tile.expert];
            }
            copy(half ^ 1);
        }
        if (at > first) leave(before, half ^ 1);
        multiply(now, half, memory + half * stage_bytes);
        before = now;
    }
    __syncthreads();
    leave(before, (end - first - 1) & 1);
}

// The down products of a token's experts, whose weights are on their way before the dispatch in front has ended: warps
// choose the experts themselves, by the logits that the one before that wrote, and have bulk copies bring the weights to
// shared memory, so that they take no registers while they wait. What `down8` does, with the same bits.
//
// Those copies are of compute capability 9.0; where this is compiled for less, threads copy.
#define GROUPS_AT_ONCE 3
#define WEIGHTS_IN_SHARED_MEMORY
#define WITHOUT_KERNELS
#include "few_experts.h"

// Of one token's pairs, all of whose experts are there: rows are a multiple of the group's warps, and so many rows of an
// expert a multiple of 16 bytes.
struct EarlyDownConstants {
    Part part;
    uint top_k;
    uint has_residual, weighs;
    RouteConstants route;
};

// Part of a group's weights that one barrier counts, in bytes.
DEVICE void await_bytes(ulong* bar) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred done; again%=: mbarrier.try_wait.parity.shared.b64 done, [%0], 0; @!done bra again%=; }" ::"r"(
                     (uint)__cvta_generic_to_shared(bar))
                 : "memory");
#endif
}

// Starts copies of `bytes` bytes to shared memory, which `bar` counts. A lane does it for its warp; all of them call this.
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

// A row of each pair's down · x with the router's weights, from copies of the group's rows: N pairs a team at once.
template <uint D, uint N, uint TEAM>
DEVICE float early_row(CTX, const EarlyDownConstants& c, const DownBuffers& b, const uchar* rows, uint first) {
    constexpr uint TEAMS = 32 / TEAM, EACH = N * TEAMS;
    const uint pieces = pieces_of<D>(c.part.format), cols = c.part.format.cols, stride = c.part.format.strides[0];
    const uint lane = ctx.lane() % TEAM, own = ctx.lane() / TEAM, count = c.top_k;
    float total = 0.0f;
    for (uint k = 0; k < count; k += EACH) {
        const uint at = k + lane / (TEAM / N) * TEAMS + own;
        const float weight = at >= count ? 0.0f : c.weighs ? b.weights[first + at] : 1.0f;
        Sums<N> sums;
#pragma unroll
        for (uint n = 0; n < N; ++n) sums.v[n] = 0.0f;
        for (uint p = lane; p < pieces; p += TEAM) {
#pragma unroll
            for (uint n = 0; n < N; ++n) {
                const uint rank = k + n * TEAMS + own, pair = rank < count ? rank : count - 1;
                const Row row = {rows + (pair * ctx.warps() + ctx.warp()) * stride, nullptr, nullptr};
                const Activations x = {b.bytes + (first + pair) * cols, b.scales + (first + pair) * (cols / 32) * 2};
                sums.v[n] += piece_dot<D>(raw_of<D>(c.part.format, row, p), chunk_of<D>(x, p), p);
            }
        }
        const float sum = team_sums<N>(ctx, sums, TEAM);
#pragma unroll
        for (uint i = 0; i < EACH; ++i) {
            if (k + i >= count) break;
            const uint from = i % TEAMS * TEAM + i / TEAMS * (TEAM / N);
            total = fma_of(lane_read(ctx, weight, from), lane_read(ctx, sum, from), total);
        }
    }
    return total;
}

// Experts' down · x, x (pairs, cols), summed over each token's pairs with the router's weights, + residual → out (tokens,
// rows). A warp makes an output. `rows` holds top_k · warps rows. Grid: (rows / warps, tokens).
template <uint D> DEVICE void early_down8(CTX, const EarlyDownConstants& c, const DownBuffers& b, const float* logits, uchar* rows, ulong* bar) {
    const uint first_row = ctx.group_x() * ctx.warps(), row = first_row + ctx.warp(), token = ctx.group_y();
    const uint bytes = ctx.warps() * c.part.format.strides[0];
    if (ctx.thread() == 0) {
#if __CUDA_ARCH__ >= 900
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"((uint)__cvta_generic_to_shared(bar)), "r"(c.top_k) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    barrier(ctx);
    for (uint rank = ctx.warp(); rank < c.top_k; rank += ctx.warps()) {
        const uint last = warp_choose(ctx, c.route, logits + (ulong)token * c.route.experts, rank + 1);
        const uint slot = b.table[lane_read(ctx, last, rank)];
        copy_ahead(ctx, rows + rank * bytes, expert_row(b.slots, slot, c.part, first_row).plane0, bytes, bar);
    }
    after_previous(ctx);
#if __CUDA_ARCH__ < 900
    barrier(ctx);
#endif
    const ulong at = (ulong)token * c.part.rows + row;
    const float residual = c.has_residual ? b.residual[at] : 0.0f;
    await_bytes(bar);
    // Half a warp has enough lanes for a short row.
    const uint first = token * c.top_k;
    const float total = pieces_of<D>(c.part.format) <= 16 ? early_row<D, 4, 16>(ctx, c, b, rows, first)
                                                          : early_row<D, 4, 32>(ctx, c, b, rows, first);
    if (ctx.lane() == 0) b.out[at] = total + residual;
}

extern __shared__ __align__(128) uchar dynamic[];

#define EARLY_DOWN(name, D)                                                                                      \
    KERNEL_AHEAD(early_down8_##name, EarlyDownConstants, (const uchar, slots), (const uint, table), (const uchar, bytes), \
                 (const float, scales), (const float, weights), (const float, residual), (float, out),           \
                 (const float, logits)) {                                                                        \
        SHARED(ulong, bar, 1);                                                                                   \
        const DownBuffers b = {slots, table, nullptr, bytes, scales, weights, nullptr, residual, out};           \
        early_down8<D>(ctx, c, b, logits, dynamic, bar);                                                         \
    }

EARLY_DOWN(q4_k, Q4_K)
EARLY_DOWN(q5_k, Q5_K)
EARLY_DOWN(q6_k, Q6_K)
EARLY_DOWN(q8_0, Q8_0)

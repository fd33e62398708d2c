// Routed experts of 2 to 8 tokens, all of whose experts are there: one that several tokens chose is read once. What
// `few_experts.h` does, with the same bits. Groups choose the experts of all tokens for themselves, by the logits of the router.
#define WEIGHTS_IN_SHARED_MEMORY
#define WITHOUT_KERNELS
#include "few_experts.h"
#include "copies.h"

// Tokens, and their pairs, at most; warps of a group, and rows of an expert that it takes.
CONSTANT uint JOINT_TOKENS = 8, JOINT_PAIRS = JOINT_TOKENS * WARP_CHOSEN, JOINT_WARPS = 8, JOINT_ROWS = 8;
// Of those rows, what is copied at once.
CONSTANT uint HALF_ROWS = JOINT_ROWS / 2;

// The pairs of all tokens, those of an expert beside each other.
struct JointPairs {
    // (JOINT_PAIRS): the pair.
    uint* listed;
    // (JOINT_PAIRS): where its expert begins.
    uint* slots;
    // (JOINT_PAIRS): the experts of pairs, a byte each, by token and rank.
    uchar* experts;
};

#define JOINT_MEMORY(name)                             \
    SHARED(uint, name##_listed, JOINT_PAIRS);          \
    SHARED(uint, name##_slots, JOINT_PAIRS);           \
    SHARED(uint, name##_experts, JOINT_PAIRS / 4 + 4); \
    const JointPairs name = {name##_listed, name##_slots, (uchar*)name##_experts};

// How many bytes of w are less than those of e; all are less than 128.
DEVICE uint bytes_less(uint w, uint e) { return __popc(~((w | 0x80808080u) - e) & 0x80808080u); }

// Chooses for all tokens, by logits (tokens, experts), and lists the pairs. All threads of the group take part.
DEVICE void list_pairs(CTX, const RouteConstants& c, const uint* table, const float* logits, uint tokens,
                       const JointPairs& m) {
    const uint count = tokens * c.top_k, own = ctx.thread();
    if (ctx.warp() < tokens) {
        const uint chosen = warp_choose(ctx, c, logits + ctx.warp() * c.experts, c.top_k);
        if (ctx.lane() < c.top_k) m.experts[ctx.warp() * c.top_k + ctx.lane()] = (uchar)chosen;
    }
    // No expert has as high a number.
    if (own < 16 && count + own < (count + 15) / 16 * 16) m.experts[count + own] = 127;
    barrier(ctx);
    if (own < count) {
        const uint expert = m.experts[own], four = expert * 0x01010101u, slot = table[expert];
        uint less = 0, before = 0;
        for (uint i = 0; i < count; i += 16) {
            const uint4 w = *(const uint4*)(m.experts + i);
            const uint words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (uint k = 0; k < 4; ++k) {
                const uint at = i + 4 * k, known = own > at ? own - at : 0;
                less += bytes_less(words[k], four);
                // Of those before this pair.
                const uint kept = known >= 4 ? 0xffffffffu : (1u << 8 * known) - 1;
                before += __popc(~((words[k] ^ four) + 0x7f7f7f7fu) & 0x80808080u & kept);
            }
        }
        const uint to = less + before;
        m.listed[to] = own;
        m.slots[to] = slot;
    }
    barrier(ctx);
}

// Rows are a multiple of the group's warps, and so many rows of an expert a multiple of 16 bytes.
struct JointDownConstants {
    Part part;
    uint tokens;
    uint has_residual, weighs;
    RouteConstants route;
};

struct JointDownMemory {
    // (JOINT_WARPS): rows of an expert that a warp has or waits for, and for both halves who counts their copies.
    uchar* rows;
    ulong* bars;
    // (pairs, JOINT_ROWS): the product of each pair and row; (pairs): what pairs count.
    float* products;
    float* weights;
};

// Copies are of whole sixteen bytes: where half of the rows are not, the second half begins with bytes of the first.
struct HalfCopy {
    // Where it begins in the rows' bytes, how many it has, and where it lies in a warp's memory.
    uint from, bytes, to;
};

DEVICE HalfCopy half_copy(uint stride, uint half) {
    const uint middle = HALF_ROWS * stride, begin = middle & ~15u, end = (middle + 15) & ~15u;
    if (half == 0) return HalfCopy{0, end, 0};
    return HalfCopy{begin, JOINT_ROWS * stride - begin, end};
}

// Bytes of a warp's memory.
DEVICE uint warp_rows(uint stride) { return JOINT_ROWS * stride + 16; }

// HALF_ROWS rows of down · x from `first` on for a pair, of which a lane has piece `lane` of its activations: two rows a team at
// once.
template <uint D, uint TEAM>
DEVICE void pair_rows(CTX, const Part& part, const uchar* rows, uint first, const Chunk& k, float* products) {
    constexpr uint N = 2, TEAMS = 32 / TEAM;
    const uint lane = ctx.lane() % TEAM, stride = part.format.strides[0];
    const bool is_within = lane < pieces_of<D>(part.format);
    const PieceDots begun = begun_dots<D>(k);
#pragma unroll 1
    for (uint row = first + ctx.lane() / TEAM; row < first + HALF_ROWS; row += N * TEAMS) {
        Sums<N> sums;
#pragma unroll
        for (uint n = 0; n < N; ++n) {
            const Row own = {rows + (row + n * TEAMS) * stride, nullptr, nullptr};
            sums.v[n] = 0.0f;
            if (is_within) sums.v[n] += copied_dot<D>(copied_raw<D>(part.format, own, lane), k, begun, lane);
        }
        const float sum = team_sums<N>(ctx, sums, TEAM);
        if (lane % (TEAM / N) == 0) products[row + lane / (TEAM / N) * TEAMS] = sum;
    }
}

// Experts' down · x, x (pairs, cols), summed over each token's pairs with the router's weights, + residual → out (tokens, rows). A
// group makes JOINT_ROWS outputs of each token: a warp takes every eighth pair, waits for half of its expert's rows, and asks for
// those of its next one when it has multiplied them. Rows have 32 pieces at most. Grid: rows / JOINT_ROWS.
template <uint D>
DEVICE void joint_down8(CTX, const JointDownConstants& c, const DownBuffers& b, const float* logits,
                        const JointDownMemory& m, const JointPairs& pairs) {
    const uint count = c.tokens * c.route.top_k, stride = c.part.format.strides[0];
    const uint cols = c.part.format.cols, pieces = pieces_of<D>(c.part.format);
    uchar* const rows = m.rows + ctx.warp() * warp_rows(stride);
    ulong* const bars = m.bars + 2 * ctx.warp();
    if (ctx.thread() < 2 * JOINT_WARPS) expect_copies(m.bars + ctx.thread(), 1);
    list_pairs(ctx, c.route, b.table, logits, c.tokens, pairs);
    const auto ask = [&](uint at, uint half) {
        if (at >= count) return;
        const Row from = expert_row(b.slots, pairs.slots[at], c.part, ctx.group_x() * JOINT_ROWS);
        const HalfCopy copy = half_copy(stride, half);
        copy_ahead(ctx, rows + copy.to, from.plane0 + copy.from, copy.bytes, bars + half);
    };
    ask(ctx.warp(), 0);
    ask(ctx.warp(), 1);
    after_previous(ctx);
    if (ctx.thread() < count) m.weights[ctx.thread()] = c.weighs ? b.weights[ctx.thread()] : 1.0f;
    const ulong to = (ulong)ctx.lane() * c.part.rows + ctx.group_x() * JOINT_ROWS + ctx.warp();
    const float residual = ctx.lane() < c.tokens && c.has_residual ? b.residual[to] : 0.0f;
    // Half a warp has enough lanes for a short row.
    const bool is_short = pieces <= 16;
    const uint own = ctx.lane() % (is_short ? 16 : 32);
    const auto activations = [&](uint at) {
        Chunk k = {};
        if (at >= count || own >= pieces) return k;
        const uint pair = pairs.listed[at];
        const Activations x = {b.bytes + pair * cols, b.scales + pair * (cols / 32) * 2};
        return chunk_of<D>(x, own);
    };
    Chunk next = activations(ctx.warp());
    uint parity = 0;
    for (uint at = ctx.warp(); at < count; at += JOINT_WARPS) {
        const Chunk k = next;
        next = activations(at + JOINT_WARPS);
        float* const products = m.products + pairs.listed[at] * JOINT_ROWS;
#pragma unroll 1
        for (uint half = 0; half < 2; ++half) {
            await_copies(bars + half, parity);
            __syncwarp();
            const HalfCopy copy = half_copy(stride, half);
            const uchar* const own = rows + (copy.to - copy.from);
            if (is_short) pair_rows<D, 16>(ctx, c.part, own, half * HALF_ROWS, k, products);
            else pair_rows<D, 32>(ctx, c.part, own, half * HALF_ROWS, k, products);
            __syncwarp();
            ask(at + JOINT_WARPS, half);
        }
        parity ^= 1;
    }
    barrier(ctx);
    if (ctx.lane() >= c.tokens) return;
    float total = 0.0f;
    for (uint k = 0; k < c.route.top_k; ++k) {
        const uint pair = ctx.lane() * c.route.top_k + k;
        total = fma_of(m.weights[pair], m.products[pair * JOINT_ROWS + ctx.warp()], total);
    }
    b.out[to] = total + residual;
}

extern __shared__ __align__(128) uchar dynamic[];

// Dynamic memory: the warps' rows, and the products of all pairs.
#define JOINT_EXPERTS(name, D)                                                                                  \
    KERNEL_AHEAD(joint_down8_##name, JointDownConstants, (const uchar, slots), (const uint, table),             \
                 (const uchar, bytes), (const float, scales), (const float, weights), (const float, residual),  \
                 (float, out), (const float, logits)) {                                                         \
        SHARED(ulong, bars, 2 * JOINT_WARPS);                                                                   \
        SHARED(float, own_weights, JOINT_PAIRS);                                                                \
        JOINT_MEMORY(pairs);                                                                                    \
        const DownBuffers b = {slots, table, nullptr, bytes, scales, weights, nullptr, residual, nullptr, out}; \
        float* const products = (float*)(dynamic + JOINT_WARPS * warp_rows(c.part.format.strides[0]));          \
        const JointDownMemory m = {dynamic, bars, products, own_weights};                                       \
        joint_down8<D>(ctx, c, b, logits, m, pairs);                                                            \
    }

#define JOINT_OF_ONE(name, D, code, few, early, ...) IF_##early(JOINT_EXPERTS(name, D))
ENCODINGS(JOINT_OF_ONE)

// Routed experts of 2 to 8 tokens, all of whose experts are there: one that several tokens chose is read once. What
// `few_experts.h` does, with the same bits. Groups choose the experts of all tokens for themselves, by the logits of the router.
#define WEIGHTS_IN_SHARED_MEMORY
#define WITHOUT_KERNELS
#include "few_experts.h"
#include "copies.h"

// Tokens, and their pairs, at most; pairs of a stage.
CONSTANT uint JOINT_TOKENS = 8, JOINT_PAIRS = JOINT_TOKENS * WARP_CHOSEN, STAGE_PAIRS = 4;

// The pairs of all tokens, those of an expert beside each other, by stages.
struct JointPairs {
    // (JOINT_PAIRS): the pair, and in the upper half which one of its stage is the first of its expert.
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
        const uint to = less + before, stage = to / STAGE_PAIRS * STAGE_PAIRS;
        m.listed[to] = own | (less > stage ? less - stage : 0) << 16;
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

// Stages whose copies are under way at once.
template <uint D>
DEVICE constexpr uint stages_of() {
    return D == Q4_K ? 3 : 2;
}

// Starts to bring sixteen bytes to shared memory, and waits for all but the latest so many groups of such copies.
DEVICE void bring16(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"((uint)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
#else
    *(uint4*)to = *(const uint4*)from;
#endif
}
DEVICE void end_of_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <uint LEFT>
DEVICE void await_groups() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}

// What a group needs of a stage: eight rows of each of its pairs' experts, then words and scales of the pairs' activations.
struct Stage {
    uchar* rows;
    uint* words;
    float* scales;
};

struct JointDownMemory {
    uchar* stages;
    ulong* bars;
    // (pairs, 8): the product of each pair and row; (pairs): what pairs count.
    float* products;
    float* weights;
};

DEVICE uint stage_bytes(const Part& part) {
    return STAGE_PAIRS * (8 * part.format.strides[0] + 4 * pair_words(part.format.cols) + part.format.cols / 4);
}

DEVICE Stage stage_at(const Part& part, uchar* stages, uint s) {
    uchar* const rows = stages + s * stage_bytes(part);
    uint* const words = (uint*)(rows + STAGE_PAIRS * 8 * part.format.strides[0]);
    return {rows, words, (float*)(words + STAGE_PAIRS * pair_words(part.format.cols))};
}

// Starts to copy the weights of pairs `first` on: an expert's once.
DEVICE void copy_stage(CTX, const JointDownConstants& c, const uchar* slots, const JointPairs& pairs, uint count,
                       uint first, const Stage& to, ulong* bar) {
    if (ctx.warp() >= STAGE_PAIRS) return;
    const uint at = first + ctx.warp(), bytes = 8 * c.part.format.strides[0];
    if (at >= count || pairs.listed[at] >> 16 != ctx.warp()) return no_copy(ctx, bar);
    copy_ahead(ctx, to.rows + ctx.warp() * bytes, expert_row(slots, pairs.slots[at], c.part, ctx.group_x() * 8).plane0,
               bytes, bar);
}

// What a thread brings of a stage's activations: which pair's, and which sixteen bytes, of words or else of scales.
struct Bringing {
    uint own, line;
};

DEVICE Bringing bringing_of(const Part& part, uint i) {
    const uint lines = part.format.cols / 16 + part.format.cols / 64;
    return {i / lines, i % lines};
}

DEVICE void bring_line(const JointDownConstants& c, const DownBuffers& b, const JointPairs& pairs, uint count,
                       uint first, const Stage& to, const Bringing what) {
    const uint cols = c.part.format.cols, quads = cols / 16;
    if (what.own >= STAGE_PAIRS || first + what.own >= count) return;
    const uint pair = pairs.listed[first + what.own] & 0xffff;
    const uint at = what.line - quads;
    if (what.line < quads)
        bring16(to.words + what.own * pair_words(cols) + quad_at(what.line) * 4,
                b.bytes + (ulong)(pair * cols) + 16 * what.line);
    else bring16(to.scales + what.own * quads + 4 * at, b.scales + (ulong)(pair * quads) + 4 * at);
}

// Starts to bring a stage's activations; `mine` is what a thread brings of it first.
DEVICE void bring_stage(CTX, const JointDownConstants& c, const DownBuffers& b, const JointPairs& pairs, uint count,
                        uint first, const Stage& to, const Bringing mine) {
    bring_line(c, b, pairs, count, first, to, mine);
    const uint lines = STAGE_PAIRS * (c.part.format.cols / 16 + c.part.format.cols / 64);
    for (uint i = ctx.thread() + ctx.threads(); i < lines; i += ctx.threads())
        bring_line(c, b, pairs, count, first, to, bringing_of(c.part, i));
    end_of_group();
}

// Half of a stage's rows of down · x for one of its pairs, the activations of which lanes read once: N rows a team.
template <uint D, uint N, uint TEAM>
DEVICE void stage_rows(CTX, const Part& part, uint listed, uint own, const Stage& stage, float* products) {
    constexpr uint TEAMS = 32 / TEAM;
    const uint pieces = pieces_of<D>(part.format), cols = part.format.cols, stride = part.format.strides[0];
    const uint lane = ctx.lane() % TEAM, first = ctx.warp() / STAGE_PAIRS * 4 + ctx.lane() / TEAM;
    const uchar* const rows = stage.rows + ((listed >> 16) * 8 + first) * stride;
    const LocalActivations x = {stage.words + own * pair_words(cols), stage.scales + own * (cols / 16)};
    Sums<N> sums;
#pragma unroll
    for (uint n = 0; n < N; ++n) sums.v[n] = 0.0f;
    for (uint p = lane; p < pieces; p += TEAM) {
        const Chunk k = chunk_of<D>(x, p);
        const PieceDots begun = begun_dots<D>(k);
#pragma unroll
        for (uint n = 0; n < N; ++n) {
            const Row row = {rows + n * TEAMS * stride, nullptr, nullptr};
            sums.v[n] += copied_dot<D>(copied_raw<D>(part.format, row, p), k, begun, p);
        }
    }
    const float sum = team_sums<N>(ctx, sums, TEAM);
    if (lane % (TEAM / N) == 0) products[(listed & 0xffff) * 8 + first + lane / (TEAM / N) * TEAMS] = sum;
}

// Experts' down · x, x (pairs, cols), summed over each token's pairs with the router's weights, + residual → out (tokens, rows). A
// group makes eight outputs of each token. Grid: rows / 8.
template <uint D>
DEVICE void joint_down8(CTX, const JointDownConstants& c, const DownBuffers& b, const float* logits,
                        const JointDownMemory& m, const JointPairs& pairs) {
    constexpr uint STAGES = stages_of<D>();
    const Bringing mine = bringing_of(c.part, ctx.thread());
    const uint count = c.tokens * c.route.top_k, stages = (count + STAGE_PAIRS - 1) / STAGE_PAIRS;
    if (ctx.thread() < STAGES) expect_copies(m.bars + ctx.thread(), STAGE_PAIRS);
    list_pairs(ctx, c.route, b.table, logits, c.tokens, pairs);
#pragma unroll
    for (uint s = 0; s < STAGES; ++s) {
        if (s < stages)
            copy_stage(ctx, c, b.slots, pairs, count, s * STAGE_PAIRS, stage_at(c.part, m.stages, s), m.bars + s);
    }
    after_previous(ctx);
#pragma unroll
    for (uint s = 0; s < STAGES; ++s)
        bring_stage(ctx, c, b, pairs, count, s * STAGE_PAIRS, stage_at(c.part, m.stages, s), mine);
    if (ctx.thread() < count) m.weights[ctx.thread()] = c.weighs ? b.weights[ctx.thread()] : 1.0f;
    const ulong at = (ulong)ctx.lane() * c.part.rows + ctx.group_x() * 8 + ctx.warp();
    const float residual = ctx.lane() < c.tokens && c.has_residual ? b.residual[at] : 0.0f;
    uint place = 0, parity = 0;
    for (uint s = 0; s < stages; ++s) {
        const Stage stage = stage_at(c.part, m.stages, place);
        const uint first = s * STAGE_PAIRS, next = first + STAGES * STAGE_PAIRS;
        await_groups<STAGES - 1>();
        await_copies(m.bars + place, parity);
        barrier(ctx);
        // Half a warp has enough lanes for a short row.
        const uint own = ctx.warp() % STAGE_PAIRS;
        if (first + own < count) {
            const uint listed = pairs.listed[first + own];
            if (pieces_of<D>(c.part.format) <= 16) stage_rows<D, 2, 16>(ctx, c.part, listed, own, stage, m.products);
            else stage_rows<D, 4, 32>(ctx, c.part, listed, own, stage, m.products);
        }
        barrier(ctx);
        if (next < count) copy_stage(ctx, c, b.slots, pairs, count, next, stage, m.bars + place);
        bring_stage(ctx, c, b, pairs, count, next, stage, mine);
        place = place + 1 < STAGES ? place + 1 : 0;
        parity ^= place == 0 ? 1 : 0;
    }
    if (ctx.lane() >= c.tokens) return;
    float total = 0.0f;
    for (uint k = 0; k < c.route.top_k; ++k) {
        const uint pair = ctx.lane() * c.route.top_k + k;
        total = fma_of(m.weights[pair], m.products[pair * 8 + ctx.warp()], total);
    }
    b.out[at] = total + residual;
}

extern __shared__ __align__(128) uchar dynamic[];

// Dynamic memory of down: the stages, and the products of all pairs.
#define JOINT_EXPERTS(name, D)                                                                                  \
    KERNEL_AHEAD(joint_down8_##name, JointDownConstants, (const uchar, slots), (const uint, table),             \
                 (const uchar, bytes), (const float, scales), (const float, weights), (const float, residual),  \
                 (float, out), (const float, logits)) {                                                         \
        SHARED(ulong, bars, 4);                                                                                 \
        SHARED(float, own_weights, JOINT_PAIRS);                                                                \
        JOINT_MEMORY(pairs);                                                                                    \
        const DownBuffers b = {slots, table, nullptr, bytes, scales, weights, nullptr, residual, nullptr, out}; \
        float* const products = (float*)(dynamic + stages_of<D>() * stage_bytes(c.part));                       \
        const JointDownMemory m = {dynamic, bars, products, own_weights};                                       \
        joint_down8<D>(ctx, c, b, logits, m, pairs);                                                            \
    }

#define JOINT_OF_ONE(name, D, code, few, early, ...) IF_##early(JOINT_EXPERTS(name, D))
ENCODINGS(JOINT_OF_ONE)

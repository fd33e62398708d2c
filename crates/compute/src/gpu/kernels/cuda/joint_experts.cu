// Routed experts of 2 to 8 tokens whose weights pass through shared memory, and down projections of one: what `few_experts.h`
// does, with the same bits. Down projections are read once for all tokens that chose an expert; groups
// choose the experts of all tokens for themselves, by the logits of the router, or know them.
#define WEIGHTS_IN_SHARED_MEMORY
#define WITHOUT_KERNELS
#include "few_experts.h"
#include "copies.h"

// Tokens, and their pairs, at most; warps of a group, and rows of an expert that it takes.
CONSTANT uint JOINT_TOKENS = 8, JOINT_PAIRS = JOINT_TOKENS * WARP_CHOSEN, JOINT_WARPS = 8, JOINT_ROWS = 8;

// The pairs of all tokens, those of an expert beside each other.
struct JointPairs {
    // (JOINT_PAIRS): the pair.
    uint* listed;
    // (JOINT_PAIRS): where its expert begins.
    uint* slots;
    // (JOINT_PAIRS): the experts of pairs by token and rank, a byte each where they are chosen here, else two.
    uchar* experts;
};

#define JOINT_MEMORY(name)                             \
    SHARED(uint, name##_listed, JOINT_PAIRS);          \
    SHARED(uint, name##_slots, JOINT_PAIRS);           \
    SHARED(uint, name##_experts, JOINT_PAIRS / 2 + 4); \
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

// The same of experts that are known: ids (count).
DEVICE void list_known_pairs(CTX, const uint* table, const uint* ids, uint count, const JointPairs& m) {
    ushort* const experts = (ushort*)m.experts;
    const uint own = ctx.thread(), none = 0xffff, expert = own < count ? ids[own] : none;
    if (own < (count + 1) / 2 * 2) experts[own] = (ushort)expert;
    barrier(ctx);
    if (own < count) {
        const uint slot = table[expert];
        uint to = 0;
        for (uint i = 0; i < count; i += 2) {
            const uint two = *(const uint*)(experts + i), first = two & none, second = two >> 16;
            to += first < expert || (first == expert && i < own) ? 1 : 0;
            to += second < expert || (second == expert && i + 1 < own) ? 1 : 0;
        }
        m.listed[to] = own;
        m.slots[to] = slot;
    }
    barrier(ctx);
}

// Rows are a multiple of the group's warps, and so many rows of an expert a multiple of 16 bytes.
struct JointDownConstants {
    Part part;
    uint tokens, top_k;
    // Whether experts are chosen here, by `route`.
    uint routes;
    // Whether the pairs of a token are summed, whose experts are all there; else each that is there has an output of its own.
    uint summed;
    uint has_residual, weighs;
    // Whether a warp brings activations to shared memory; else it reads them where they are.
    uint brings;
    RouteConstants route;
};

// Takes pairs of absent experts from the list; gives how many are left. counts: (JOINT_WARPS).
DEVICE uint leave_absent(CTX, uint count, const JointPairs& m, uint* counts) {
    const uint own = ctx.thread(), lane = ctx.lane();
    const uint listed = own < count ? m.listed[own] : 0, slot = own < count ? m.slots[own] : ABSENT;
    const uint there = __ballot_sync(0xffffffffu, slot != ABSENT);
    if (lane == 0) counts[ctx.warp()] = __popc(there);
    barrier(ctx);
    uint to = __popc(there & ((1u << lane) - 1)), left = 0;
    for (uint w = 0; w < JOINT_WARPS; ++w) {
        to += w < ctx.warp() ? counts[w] : 0;
        left += counts[w];
    }
    if (slot != ABSENT) {
        m.listed[to] = listed;
        m.slots[to] = slot;
    }
    barrier(ctx);
    return left;
}

struct JointDownMemory {
    // (JOINT_WARPS): rows of an expert and activations that a warp has or waits for, and who counts copies of rows.
    uchar* rows;
    ulong* bars;
    // (pairs, JOINT_ROWS): the product of each pair and row; (pairs): what pairs count; (JOINT_WARPS): of those that are there.
    float* products;
    float* weights;
    uint* counts;
};

// Of a warp's memory: bytes of its rows, and of them with the activations of a pair and their scales.
DEVICE uint copied_rows(uint stride) { return JOINT_ROWS * stride + 16; }
DEVICE uint warp_bytes(uint stride, uint cols, bool brings) {
    return copied_rows(stride) + (brings ? padded_bytes(cols) + cols / 4 : 0);
}

// Piece 4i + t of a pair's activations.
template <uint D>
DEVICE Chunk piece_of(const PaddedActivations& x, uint i, uint t) { return padded_chunk<D>(x, i, t); }
template <uint D>
DEVICE Chunk piece_of(const Activations& x, uint i, uint t) { return chunk_of<D>(x, 4 * i + t); }

// Four lanes multiply a row: of t = lane % 4 pieces t, t + 4, …, its *leaves*. They are added as lanes with a piece each would add
// them in `team_sums`, where those half of the lanes apart meet first.
template <uint D, class X>
DEVICE float leaf_of(CTX, const Part& part, const uchar* rows, const X& x, uint i) {
    const uint t = ctx.lane() % 4, at = ctx.lane() / 4 * part.format.strides[0];
    const Chunk k = piece_of<D>(x, i, t);
    return 0.0f + copied_dot<D>(copied_raw<D>(part.format, rows, at, i, t), k, begun_dots<D>(k), t);
}

// Of COUNT leaves, four at most, that all lanes have.
template <uint D, uint COUNT, class X>
DEVICE float few_leaves(CTX, const Part& part, const uchar* rows, const X& x) {
    float of[4];
#pragma unroll
    for (uint i = 0; i < 4; ++i) of[i] = i < COUNT ? leaf_of<D>(ctx, part, rows, x, i) : 0.0f;
    return (of[0] + of[2]) + (of[1] + of[3]);
}

// Of as many as there are, eight at most.
template <uint D, class X>
DEVICE float leaves_of(CTX, const Part& part, const uchar* rows, const X& x, uint pieces) {
    const uint t = ctx.lane() % 4, half = pieces <= 16 ? 2 : 4;
    float two = 0.0f, four = 0.0f;
#pragma unroll 1
    for (uint i = 0; i < half; ++i) {
        // 0 and 1, or 0, 2, 1 and 3, each with the one half of them further.
        const uint first = half == 2 ? i : (i & 1) << 1 | i >> 1, second = first + half;
        const float low = 4 * first + t < pieces ? leaf_of<D>(ctx, part, rows, x, first) : 0.0f;
        const float high = 4 * second + t < pieces ? leaf_of<D>(ctx, part, rows, x, second) : 0.0f;
        if (i % 2 == 0) two = low + high;
        else if (i == 1) four = two + (low + high);
        else four = four + (two + (low + high));
    }
    return four;
}

// JOINT_ROWS rows of down · x for a pair, its activations in shared memory or not.
template <uint D>
DEVICE float pair_rows(CTX, const Part& part, const uchar* rows, const PaddedActivations& x) {
    const uint pieces = pieces_of<D>(part.format);
    if (pieces == 12) return few_leaves<D, 3>(ctx, part, rows, x);
    if (pieces == 8) return few_leaves<D, 2>(ctx, part, rows, x);
    return leaves_of<D>(ctx, part, rows, x, pieces);
}
template <uint D>
DEVICE float pair_rows(CTX, const Part& part, const uchar* rows, const Activations& x) {
    return leaves_of<D>(ctx, part, rows, x, pieces_of<D>(part.format));
}

// Experts' down · x, x (pairs, cols), summed over each token's pairs with the router's weights, + residual → out (tokens, rows), or
// as it is → out (pairs, rows). A group makes JOINT_ROWS outputs of each token or pair: a warp takes every eighth pair, waits for its
// expert's rows, and asks for those of its next one when it has multiplied them. Rows have 32 pieces at most. Grid: rows / JOINT_ROWS.
template <uint D>
DEVICE void joint_down8(CTX, const JointDownConstants& c, const DownBuffers& b, const float* logits,
                        const JointDownMemory& m, const JointPairs& pairs) {
    uint count = c.tokens * c.top_k;
    const uint stride = c.part.format.strides[0], cols = c.part.format.cols;
    uchar* const rows = m.rows + ctx.warp() * warp_bytes(stride, cols, c.brings);
    uchar* const own_bytes = rows + copied_rows(stride);
    float* const own_scales = (float*)(own_bytes + padded_bytes(cols));
    ulong* const bar = m.bars + ctx.warp();
    if (ctx.thread() < JOINT_WARPS) expect_copies(m.bars + ctx.thread(), 1);
    if (c.routes) list_pairs(ctx, c.route, b.table, logits, c.tokens, pairs);
    else list_known_pairs(ctx, b.table, b.ids, count, pairs);
    if (!c.summed) count = leave_absent(ctx, count, pairs, m.counts);
    const auto ask_rows = [&](uint at) {
        if (at >= count) return;
        const Row from = expert_row(b.slots, pairs.slots[at], c.part, ctx.group_x() * JOINT_ROWS);
        copy_ahead(ctx, rows, from.plane0, JOINT_ROWS * stride, bar);
    };
    const auto ask_activations = [&](uint at) {
        if (at >= count || !c.brings) return;
        const uint pair = pairs.listed[at], lane = ctx.lane();
        const uchar* const bytes = b.bytes + pair * cols;
#pragma unroll 1
        for (uint i = 16 * lane; i < cols; i += 16 * 32) copy_async<16>(own_bytes + padded_at(i), bytes + i);
        const float* const from = b.scales + pair * (cols / 16);
#pragma unroll 1
        for (uint i = 4 * lane; i < cols / 16; i += 4 * 32) copy_async<16>(own_scales + i, from + i);
    };
    ask_rows(ctx.warp());
    after_previous(ctx);
    ask_activations(ctx.warp());
    if (c.summed && ctx.thread() < count) m.weights[ctx.thread()] = c.weighs ? b.weights[ctx.thread()] : 1.0f;
    const ulong to = (ulong)ctx.lane() * c.part.rows + ctx.group_x() * JOINT_ROWS + ctx.warp();
    const float residual = c.summed && ctx.lane() < c.tokens && c.has_residual ? b.residual[to] : 0.0f;
    uint parity = 0;
    for (uint at = ctx.warp(); at < count; at += JOINT_WARPS) {
        await_async();
        await_copies(bar, parity);
        __syncwarp();
        const uint pair = pairs.listed[at];
        float sum;
        if (c.brings) {
            const PaddedActivations x = {own_bytes, own_scales};
            sum = pair_rows<D>(ctx, c.part, rows, x);
        } else {
            const Activations x = {b.bytes + pair * cols, b.scales + pair * (cols / 16)};
            sum = pair_rows<D>(ctx, c.part, rows, x);
        }
        sum += lane_xor(ctx, sum, 2);
        sum += lane_xor(ctx, sum, 1);
        if (ctx.lane() % 4 == 0) m.products[pair * JOINT_ROWS + ctx.lane() / 4] = sum;
        __syncwarp();
        ask_rows(at + JOINT_WARPS);
        ask_activations(at + JOINT_WARPS);
        parity ^= 1;
    }
    barrier(ctx);
    if (!c.summed) {
        for (uint i = ctx.thread(); i < count * JOINT_ROWS; i += ctx.threads()) {
            const uint pair = pairs.listed[i / JOINT_ROWS], row = i % JOINT_ROWS;
            b.out[(ulong)pair * c.part.rows + ctx.group_x() * JOINT_ROWS + row] = m.products[pair * JOINT_ROWS + row];
        }
        return;
    }
    if (ctx.lane() >= c.tokens) return;
    float total = 0.0f;
    for (uint k = 0; k < c.top_k; ++k) {
        const uint pair = ctx.lane() * c.top_k + k;
        total = fma_of(m.weights[pair], m.products[pair * JOINT_ROWS + ctx.warp()], total);
    }
    b.out[to] = total + residual;
}

// Rows of gate, and then of up, that a warp has in shared memory: those that it multiplies next.
CONSTANT uint COPIED_ROWS = 4;

// `gate_up8` of rows of 32 pieces at most, if a warp can choose or what was chosen is known: a warp takes its rows of a block
// from shared memory, four of gate and four of up by turns, and asks for the next ones as soon as it has them in registers, so
// that they come while it multiplies. `rows`: COPIED_ROWS a warp; `bars`: one a warp.
template <uint D>
DEVICE void copied_gate_up8(CTX, const GateUpConstants& c, const GateUpBuffers& b, const GateUpMemory& m, const RouteMemory& r,
                            uchar* rows, ulong* bars) {
    const uint stride = c.gate.format.strides[0];
    ulong* const bar = bars + ctx.warp();
    uchar* const mine = rows + ctx.warp() * COPIED_ROWS * stride;
    if (ctx.thread() < ctx.warps()) expect_copies(bars + ctx.thread(), 1);
    const GateUpGroup g = entered_group(ctx, c, b, m, r);
    if (g.blocks == 0) return;
    // Of block i / 2 rows of gate, or of up.
    const auto ask = [&](uint i) {
        const uint first = (g.first_block + i / 2) * 32 + ctx.warp() * COPIED_ROWS;
        const Row from = expert_row(b.slots, g.slot, i % 2 ? c.up : c.gate, first);
        copy_ahead(ctx, mine, from.plane0, COPIED_ROWS * stride, bar);
    };
    ask(0);
    const LocalActivations x = {m.words, m.scales};
    const bool is_within = ctx.lane() < pieces_of<D>(c.gate.format);
    const uint own = is_within ? ctx.lane() : 0;
    const Chunk k = chunk_of<D>(x, own);
    uint parity = 0;
#pragma unroll 1
    for (uint i = 0; i < 2 * g.blocks; ++i) {
        await_copies(bar, parity);
        parity ^= 1;
        Raws<4, 1> raws;
#pragma unroll
        for (uint n = 0; n < 4; ++n) raws.raw[n][0] = copied_raw<D>(c.gate.format, mine, n * stride, own / 4, own % 4);
        __syncwarp();
        if (i + 1 < 2 * g.blocks) ask(i + 1);
        const float sum = team_sums<4>(ctx, short_dots<D, 4, 1>(raws, k, own, is_within), 32);
        if (ctx.lane() % 8 == 0) m.block[i * 32 + ctx.warp() * COPIED_ROWS + ctx.lane() / 8] = sum;
    }
    write_group(ctx, c, b, m, g);
}

extern __shared__ __align__(128) uchar dynamic[];

// The widest rows of `copied_gate_up8`. Dynamic memory: the warps' rows.
CONSTANT uint COPIED_COLUMNS = 2048;
#define COPIED_EXPERTS(name, D)                                       \
    GATE_UP(copied_gate_up8_##name, COPIED_COLUMNS, WARP_EXPERTS,     \
            SHARED(ulong, bars, JOINT_WARPS);                         \
            copied_gate_up8<D>(ctx, c, b, m, r, dynamic, bars);)

// Dynamic memory: the warps' rows, and the products of all pairs.
#define JOINT_EXPERTS(name, D)                                                                                  \
    KERNEL_AHEAD(joint_down8_##name, JointDownConstants, (const uchar, slots), (const uint, table),             \
                 (const uint, ids), (const uchar, bytes), (const float, scales), (const float, weights),        \
                 (const float, residual), (float, out), (const float, logits)) {                                \
        SHARED(ulong, bars, JOINT_WARPS);                                                                       \
        SHARED(float, own_weights, JOINT_PAIRS);                                                                \
        SHARED(uint, counts, JOINT_WARPS);                                                                      \
        JOINT_MEMORY(pairs);                                                                                    \
        const DownBuffers b = {slots, table, ids, bytes, scales, weights, nullptr, residual, nullptr, out};     \
        const uint each = warp_bytes(c.part.format.strides[0], c.part.format.cols, c.brings);                   \
        float* const products = (float*)(dynamic + JOINT_WARPS * each);                                         \
        const JointDownMemory m = {dynamic, bars, products, own_weights, counts};                               \
        joint_down8<D>(ctx, c, b, logits, m, pairs);                                                            \
    }

#define JOINT_OF_ONE(name, D, code, few, early, ...) IF_##early(COPIED_EXPERTS(name, D) JOINT_EXPERTS(name, D))
ENCODINGS(JOINT_OF_ONE)

// Routed experts of up to 8 tokens whose weights pass through shared memory: what `few_experts.h`
// does, with the same bits. Down projections are read once for all tokens that chose an expert; groups
// choose the experts of all tokens for themselves, by the logits of the router, or know them.
#define WEIGHTS_IN_SHARED_MEMORY
#define WITHOUT_KERNELS
#include "few_experts.h"
#include "copies.h"

// Tokens, and their pairs, at most; warps of a group.
CONSTANT uint JOINT_TOKENS = 8, JOINT_PAIRS = JOINT_TOKENS * WARP_CHOSEN, JOINT_WARPS = 8;

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

// Lanes share a row, four or eight, and a warp has 32 / lanes rows of an expert at once: a *block*, of which there is a whole number,
// and which has a multiple of 16 bytes.
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
    uint lanes;
    // Of a block.
    FurtherPlanes further;
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
    // (2, pairs, rows): the product of each pair and row, of blocks by turns; (pairs): what pairs count; (JOINT_WARPS): of those that
    // are there.
    float* products;
    float* weights;
    uint* counts;
};

// Of a warp's memory: bytes of its rows, and of them with the activations of a pair and their scales.
DEVICE uint rows_bytes(const JointDownConstants& c) {
    return 32 / c.lanes * c.part.format.strides[0] + c.further.rooms[0] + c.further.rooms[1] + 16;
}
DEVICE uint warp_bytes(const JointDownConstants& c) {
    const uint cols = c.part.format.cols;
    return rows_bytes(c) + (c.brings ? padded_bytes(cols) + cols / 4 : 0);
}

// Piece 4i + t of a pair's activations.
template <uint D>
DEVICE Chunk piece_of(const PaddedActivations& x, uint i, uint t) { return padded_chunk<D>(x, i, t); }
template <uint D>
DEVICE Chunk piece_of(const Activations& x, uint i, uint t) { return chunk_of<D>(x, 4 * i + t); }

// A pair's rows and their activations, which are X.
template <class X>
struct JointPair {
    const JointDownConstants& c;
    CopiedRows rows;
    X x;
    uint pieces;
};

// LANES lanes multiply a row: of t = lane % LANES pieces t, t + LANES, …, its *leaves*. They are added as lanes with a piece each would
// add them in `team_sums`, where those half of the lanes apart meet first. With a second piece, 32 pieces on, a lane would begin.
template <uint D, uint LANES, class X>
DEVICE float leaf_of(CTX, const JointPair<X>& p, uint i) {
    const uint own = ctx.lane() % LANES, row = ctx.lane() / LANES, four = LANES / 4 * i + own / 4, t = own % 4;
    const auto dot = [&](uint four) {
        const Chunk k = piece_of<D>(p.x, four, t);
        return copied_dot<D>(copied_raw<D>(p.c.part.format, p.c.further, p.rows, row, four, t), k, begun_dots<D>(k), t);
    };
    const float first = 0.0f + dot(four);
    return small_pieces<D>() && 4 * (four + 8) + t < p.pieces ? first + dot(four + 8) : first;
}

// Of COUNT leaves, six at most, that all of four lanes have.
template <uint D, uint COUNT, class X>
DEVICE float few_leaves(CTX, const JointPair<X>& p) {
    float of[8];
#pragma unroll
    for (uint i = 0; i < 8; ++i) of[i] = i < COUNT ? leaf_of<D, 4>(ctx, p, i) : 0.0f;
    if (COUNT <= 4) return (of[0] + of[2]) + (of[1] + of[3]);
    return ((of[0] + of[4]) + of[2]) + ((of[1] + of[5]) + of[3]);
}

// Of as many as there are, eight at most of four lanes, four of eight.
template <uint D, class X>
DEVICE float leaves_of(CTX, const JointPair<X>& p) {
    const uint t = ctx.lane() % 4, half = p.pieces <= 16 ? 2 : 4;
    float two = 0.0f, four = 0.0f;
#pragma unroll 1
    for (uint i = 0; i < half; ++i) {
        // 0 and 1, or 0, 2, 1 and 3, each with the one half of them further.
        const uint first = half == 2 ? i : (i & 1) << 1 | i >> 1, second = first + half;
        const float low = 4 * first + t < p.pieces ? leaf_of<D, 4>(ctx, p, first) : 0.0f;
        const float high = 4 * second + t < p.pieces ? leaf_of<D, 4>(ctx, p, second) : 0.0f;
        if (i % 2 == 0) two = low + high;
        else if (i == 1) four = two + (low + high);
        else four = four + (two + (low + high));
    }
    return four;
}
template <uint D, class X>
DEVICE float leaves_of_eight(CTX, const JointPair<X>& p) {
    const uint t = ctx.lane() % 8;
    float sum = 0.0f;
#pragma unroll 1
    for (uint i = 0; i < 2; ++i) {
        const float low = 8 * i + t < p.pieces ? leaf_of<D, 8>(ctx, p, i) : 0.0f;
        const float high = 8 * (i + 2) + t < p.pieces ? leaf_of<D, 8>(ctx, p, i + 2) : 0.0f;
        sum = i == 0 ? low + high : sum + (low + high);
    }
    return sum;
}

// A block's rows of down · x for a pair, its activations in shared memory or not.
template <uint D, uint LANES>
DEVICE float pair_rows(CTX, const JointPair<PaddedActivations>& p) {
    if (LANES == 8) return leaves_of_eight<D>(ctx, p);
    if (small_pieces<D>() && p.pieces == 24) return few_leaves<D, small_pieces<D>() ? 6 : 1>(ctx, p);
    if (!small_pieces<D>() && p.pieces == 12) return few_leaves<D, 3>(ctx, p);
    if (!small_pieces<D>() && p.pieces == 8) return few_leaves<D, 2>(ctx, p);
    return leaves_of<D>(ctx, p);
}
template <uint D, uint LANES>
DEVICE float pair_rows(CTX, const JointPair<Activations>& p) {
    return LANES == 8 ? leaves_of_eight<D>(ctx, p) : leaves_of<D>(ctx, p);
}

// Experts' down · x, x (pairs, cols), summed over each token's pairs with the router's weights, + residual → out (tokens, rows), or
// as it is → out (pairs, rows). A group takes blocks as many apart as there are groups: a warp takes every eighth pair, waits for its
// expert's rows, and asks for those of its next one, or of the next block, when it has multiplied them. Rows have 32 pieces at most,
// 64 of 32 columns. IS_ONCE: there are as many groups as blocks. Grid: any.
template <uint D, uint LANES, bool IS_ONCE>
DEVICE void joint_down8(CTX, const JointDownConstants& c, const DownBuffers& b, const float* logits,
                        const JointDownMemory& m, const JointPairs& pairs) {
    constexpr uint ROWS = 32 / LANES;
    uint count = c.tokens * c.top_k;
    const uint stride = c.part.format.strides[0], cols = c.part.format.cols, blocks = c.part.rows / ROWS;
    uchar* const rows = m.rows + ctx.warp() * warp_bytes(c);
    uchar* const own_bytes = rows + rows_bytes(c);
    float* const own_scales = (float*)(own_bytes + padded_bytes(cols));
    ulong* const bar = m.bars + ctx.warp();
    if (ctx.thread() < JOINT_WARPS) expect_copies(m.bars + ctx.thread(), 1);
    if (c.routes) list_pairs(ctx, c.route, b.table, logits, c.tokens, pairs);
    else list_known_pairs(ctx, b.table, b.ids, count, pairs);
    if (!c.summed) count = leave_absent(ctx, count, pairs, m.counts);
    const auto rows_of = [&](uint block, uint at) {
        return expert_row(b.slots, pairs.slots[at], c.part, block * ROWS);
    };
    const auto ask_rows = [&](uint block, uint at) {
        if (at < count && block < blocks) copy_rows_ahead<D>(ctx, rows, rows_of(block, at), ROWS * stride, c.further, bar);
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
    ask_rows(ctx.group_x(), ctx.warp());
    after_previous(ctx);
    ask_activations(ctx.warp());
    if (c.summed && ctx.thread() < count) m.weights[ctx.thread()] = c.weighs ? b.weights[ctx.thread()] : 1.0f;
    uint parity = 0;
    const auto make = [&](uint block, uint next, uint turn) {
        float* const products = m.products + turn * c.tokens * c.top_k * ROWS;
        const bool sums = c.summed && ctx.lane() < c.tokens && ctx.warp() < ROWS;
        const ulong to = (ulong)ctx.lane() * c.part.rows + block * ROWS + ctx.warp();
        const float residual = sums && c.has_residual ? b.residual[to] : 0.0f;
        for (uint at = ctx.warp(); at < count; at += JOINT_WARPS) {
            const CopiedRows copied = copied_rows(rows, rows_of(block, at), ROWS * stride);
            const uint pair = pairs.listed[at], pieces = pieces_of<D>(c.part.format);
            await_async();
            await_copies(bar, parity);
            __syncwarp();
            float sum;
            if (c.brings) {
                sum = pair_rows<D, LANES>(ctx, JointPair<PaddedActivations>{c, copied, {own_bytes, own_scales}, pieces});
            } else {
                const Activations x = {b.bytes + pair * cols, b.scales + pair * (cols / 16)};
                sum = pair_rows<D, LANES>(ctx, JointPair<Activations>{c, copied, x, pieces});
            }
#pragma unroll
            for (uint apart = LANES / 2; apart > 0; apart /= 2) sum += lane_xor(ctx, sum, apart);
            if (ctx.lane() % LANES == 0) products[pair * ROWS + ctx.lane() / LANES] = sum;
            __syncwarp();
            const bool is_last = !IS_ONCE && at + JOINT_WARPS >= count;
            const uint following = is_last ? ctx.warp() : at + JOINT_WARPS, then = is_last ? next : block;
            ask_rows(then, following);
            // Of the only pair they stay.
            if (following != at && (IS_ONCE || then < blocks)) ask_activations(following);
            parity ^= 1;
        }
        barrier(ctx);
        if (!c.summed) {
            for (uint i = ctx.thread(); i < count * ROWS; i += ctx.threads()) {
                const uint pair = pairs.listed[i / ROWS], row = i % ROWS;
                b.out[(ulong)pair * c.part.rows + block * ROWS + row] = products[pair * ROWS + row];
            }
            return;
        }
        if (!sums) return;
        float total = 0.0f;
        for (uint k = 0; k < c.top_k; ++k) {
            const uint pair = ctx.lane() * c.top_k + k;
            total = fma_of(m.weights[pair], products[pair * ROWS + ctx.warp()], total);
        }
        b.out[to] = total + residual;
    };
    if (IS_ONCE) {
        make(ctx.group_x(), blocks, 0);
    } else {
        for (uint block = ctx.group_x(), turn = 0; block < blocks; block += ctx.groups_x(), turn ^= 1)
            make(block, block + ctx.groups_x(), turn);
    }
}

// Rows of gate, and then of up, that a warp has in shared memory at most: those that it multiplies next.
CONSTANT uint COPIED_ROWS = 4;

struct CopiedGateUpConstants {
    GateUpConstants base;
    // Of the rows that a warp has at once.
    FurtherPlanes further;
};

// A warp's sums of a group's rows, of up to 32 · P pieces: it takes N of gate and N of up by turns from shared memory, and asks for
// the next ones as soon as it has them in registers, so that they come while it multiplies.
template <uint D, uint N, uint P>
DEVICE void copied_sums(CTX, const CopiedGateUpConstants& all, const GateUpBuffers& b, const GateUpMemory& m, const GateUpGroup& g,
                        uchar* mine, ulong* bar, uint pieces) {
    constexpr uint TURNS = COPIED_ROWS / N;
    const GateUpConstants& c = all.base;
    const uint bytes = N * c.gate.format.strides[0];
    // Turn i of a block: of gate, then of up.
    const auto from = [&](uint i) {
        const uint first = (g.first_block + i / (2 * TURNS)) * 32 + ctx.warp() * COPIED_ROWS + i % TURNS * N;
        return expert_row(b.slots, g.slot, i / TURNS % 2 ? c.up : c.gate, first);
    };
    const auto ask = [&](uint i) { copy_rows_ahead<D>(ctx, mine, from(i), bytes, all.further, bar); };
    ask(0);
    const LocalActivations x = {m.words, m.scales};
    const Chunks<P> k = chunks_of<D, P>(x, ctx.lane(), pieces);
    uint parity = 0;
#pragma unroll 1
    for (uint i = 0; i < 2 * TURNS * g.blocks; ++i) {
        const CopiedRows rows = copied_rows(mine, from(i), bytes);
        await_copies(bar, parity);
        parity ^= 1;
        Raws<N, P> raws;
#pragma unroll
        for (uint j = 0; j < P; ++j) {
            const uint own = ctx.lane() + 32 * j < pieces ? ctx.lane() + 32 * j : 0;
#pragma unroll
            for (uint n = 0; n < N; ++n) raws.raw[n][j] = copied_raw<D>(c.gate.format, all.further, rows, n, own / 4, own % 4);
        }
        __syncwarp();
        if (i + 1 < 2 * TURNS * g.blocks) ask(i + 1);
        const float sum = team_sums<N>(ctx, short_dots<D, N, P>(raws, k, ctx.lane(), pieces), 32);
        const uint row = i / TURNS * 32 + ctx.warp() * COPIED_ROWS + i % TURNS * N;
        if (ctx.lane() % (32 / N) == 0) m.block[row + ctx.lane() / (32 / N)] = sum;
    }
}

// `gate_up8` if a warp can choose or what was chosen is known, of rows of up to 32 · P pieces, N at once. `memory`: rows of each warp;
// `bars`: one a warp.
template <uint D, uint N, uint P>
DEVICE void copied_gate_up8(CTX, const CopiedGateUpConstants& c, const GateUpBuffers& b, const GateUpMemory& m,
                            const RouteMemory& r, uchar* memory, ulong* bars) {
    const Format& f = c.base.gate.format;
    const uint pieces = pieces_of<D>(f), each = N * f.strides[0] + c.further.rooms[0] + c.further.rooms[1];
    if (ctx.thread() < ctx.warps()) expect_copies(bars + ctx.thread(), 1);
    const GateUpGroup g = entered_group(ctx, c.base, b, m, r);
    if (g.blocks == 0) return;
    copied_sums<D, N, P>(ctx, c, b, m, g, memory + ctx.warp() * each, bars + ctx.warp(), pieces);
    write_group(ctx, c.base, b, m, g);
}

// Columns of the widest rows. Dynamic memory: the warps' rows. Of rows of which a lane has twice as many pieces, a warp has half as
// many at once.
CONSTANT uint COPIED_COLUMNS = 2048, WIDE_COPIED_COLUMNS = 4096;
#define COPIED_KERNEL(name, columns, ...)                            \
    GATE_UP(name, CopiedGateUpConstants, columns, WARP_EXPERTS,      \
            SHARED(ulong, bars, JOINT_WARPS);                        \
            ASKED_MEMORY(uchar, dynamic);                            \
            copied_gate_up8<__VA_ARGS__>(ctx, c, b, m, r, dynamic, bars);)
#define COPIED_EXPERTS(name, D)                                                                                     \
    COPIED_KERNEL(copied_gate_up8_##name, COPIED_COLUMNS, D, COPIED_ROWS, takes_two<D>() ? 2 : 1)                  \
    COPIED_KERNEL(copied_gate_up8_wide_##name, WIDE_COPIED_COLUMNS, D, COPIED_ROWS / 2, takes_two<D>() ? 4 : 2)

// Dynamic memory: the warps' rows, and the products of all pairs. By themselves what groups do once, by turns, and with eight lanes a
// row: more code takes longer to come.
#define JOINT_DOWN(name, ...)                                                                                   \
    KERNEL_AHEAD(name, JointDownConstants, (const uchar, slots), (const uint, table), (const uint, ids),        \
                 (const uchar, bytes), (const float, scales), (const float, weights), (const float, residual),  \
                 (float, out), (const float, logits)) {                                                         \
        SHARED(ulong, bars, JOINT_WARPS);                                                                       \
        SHARED(float, own_weights, JOINT_PAIRS);                                                                \
        SHARED(uint, counts, JOINT_WARPS);                                                                      \
        JOINT_MEMORY(pairs);                                                                                    \
        ASKED_MEMORY(uchar, dynamic);                                                                           \
        const DownBuffers b = {slots, table, ids, bytes, scales, weights, nullptr, residual, nullptr, out};     \
        float* const products = (float*)(dynamic + JOINT_WARPS * warp_bytes(c));                                \
        const JointDownMemory m = {dynamic, bars, products, own_weights, counts};                               \
        joint_down8<__VA_ARGS__>(ctx, c, b, logits, m, pairs);                                                  \
    }
#define JOINT_EXPERTS(name, D)                       \
    JOINT_DOWN(joint_down8_##name, D, 4, true)       \
    JOINT_DOWN(joint_down8_turns_##name, D, 4, false) \
    JOINT_DOWN(joint_down8_eight_##name, D, 8, false)

#define JOINT_OF_ONE(name, D, code, few, early, ...) \
    IF_##early(COPIED_EXPERTS(name, D) JOINT_EXPERTS(name, D)) \
    IF_1(IN_PLANES(name), COPIED_EXPERTS(name, D) JOINT_EXPERTS(name, D))
ENCODINGS(JOINT_OF_ONE)

// Routed experts of few rows, with activations of eight bits.
#include "activations.h"
#include "experts.h"
#include "fetch.h"
#include "named.h"
#include "quantize.h"
#include "routing.h"

// Blocks of a group: a warp rounds each.
CONSTANT uint MOST_BLOCKS = 8;

// Encodings in several planes that `cuda/joint_experts.cu` copies ahead, beside those that `cuda/early.cu` does. Read as text by
// `gpu/encodings.rs`.
#define PLANES_nvfp4 ,
#define PLANES_affine4 ,
#define PLANES_affine8 ,
#define IN_PLANES(name) SECOND_OF(PLANES_##name 1, 0, )

struct GateUpConstants {
    Part gate, up;
    NormConstants norm;
    // Whether this chooses the experts, and how; else `ids` says which they are.
    uint routes;
    RouteConstants route;
    uint top_k;
    Activation activation;
    uint has_bias;
    // Whether the dispatch before leaves x and its norm alone: then they are made ready while it runs.
    uint early;
    // Whether rows of x count as much as `weights` says, which is then known.
    uint weighs;
    // Whether pairs count fastest in the grid.
    uint beside;
    // Blocks of 32 rows that a group makes, MOST_BLOCKS at most.
    uint blocks;
    // Groups, of those for each pair, that bring what is only needed later of an expert from host memory.
    uint bringing;
    Brought brought;
};

struct GateUpBuffers {
    GPTR(uchar) slots;
    GPTR(const uint) table;
    GPTR(const float) logits;
    GPTR(const float) correction;
    GPTR(uint) ids;
    GPTR(float) weights;
    GPTR(const float) x;
    GPTR(const float) norm;
    GPTR(const float) gate_bias;
    GPTR(const float) up_bias;
    GPTR(uchar) bytes;
    GPTR(float) scales;
    GPTR(const uint) fetches;
    GPTR(const uchar) host;
};

struct GateUpMemory {
    SPTR(uint) words;
    SPTR(float) scales;
    SPTR(float) scratch;
    // (blocks, 2, 32): sums of gates and ups.
    SPTR(float) block;
};

// Where the expert of a pair begins, or ABSENT, and which it is.
struct PairExpert {
    uint expert, slot;
};

// Table entries of experts lane + 32i.
struct LaneTable {
    uint entries[WARP_EXPERTS / 32];
};

DEVICE LaneTable lane_table(CTX, const GateUpConstants c, const GateUpBuffers b) {
    LaneTable t;
#pragma unroll
    for (uint i = 0; i < WARP_EXPERTS / 32; ++i) {
        const uint e = ctx.lane() + 32 * i;
        t.entries[i] = c.routes && e < c.route.experts ? b.table[e] : ABSENT;
    }
    return t;
}

DEVICE uint entry_of(CTX, const LaneTable t, uint expert) {
    uint entry = t.entries[0];
#pragma unroll
    for (uint i = 1; i < WARP_EXPERTS / 32; ++i) entry = expert / 32 == i ? t.entries[i] : entry;
    return lane_read(ctx, entry, expert % 32);
}

// The expert of a pair, chosen by all threads of the group or before.
DEVICE PairExpert expert_of(CTX, const GateUpConstants c, const GateUpBuffers b, const RouteMemory r, uint pair) {
    PairExpert of;
    if (c.routes) {
        choose(ctx, c.route, b.logits + (ulong)(pair / c.top_k) * c.route.experts, b.correction, r, false);
        of.expert = r.chosen[pair % c.top_k];
    } else {
        of.expert = b.ids[pair];
    }
    of.slot = b.table[of.expert];
    return of;
}

// The same, chosen by a warp.
DEVICE PairExpert expert_by_warp(CTX, const GateUpConstants c, const GateUpBuffers b, const LaneTable t, uint pair) {
    const uint rank = pair % c.top_k;
    const GPTR(const float) logits = b.logits + (ulong)(pair / c.top_k) * c.route.experts;
    PairExpert of;
    of.expert = lane_read(ctx, warp_choose(ctx, c.route, logits, rank + 1), rank);
    of.slot = entry_of(ctx, t, of.expert);
    return of;
}

// Whether there is a gate; else `gate` is up.
DEVICE bool has_gate(const GateUpConstants c) { return c.activation.kind != SQUARED_RELU; }

// `activated` where it is not what most models have.
SELDOM float activated_otherwise(const Activation how, float gate, float up) { return activated(how, gate, up); }

// The product of gate and up of a row from their sums.
DEVICE float gated(const GateUpConstants c, const GateUpBuffers b, uint expert, uint row, float gate, float up) {
    if (c.has_bias) {
        if (has_gate(c)) gate += b.gate_bias[expert * c.gate.rows + row];
        up += b.up_bias[expert * c.up.rows + row];
    }
    return c.activation.kind == SWIGLU ? silu(gate) * up : activated_otherwise(c.activation, gate, up);
}

// R rows of gate and of up, in turn; 2R of up if there is no gate.
template <uint R>
DEVICE Rows<2 * R> gate_up_rows(const GateUpConstants c, GPTR(const uchar) slots, uint slot, uint first) {
    Rows<2 * R> rows;
#pragma unroll
    for (uint n = 0; n < R; ++n) {
        rows.row[2 * n] = expert_row(slots, slot, c.gate, first + (has_gate(c) ? n : 2 * n));
        rows.row[2 * n + 1] = expert_row(slots, slot, c.up, first + (has_gate(c) ? n : 2 * n + 1));
    }
    return rows;
}

// Chooses the experts of a row, and writes ids and weights (top_k).
SELDOM void write_choice(CTX, const RouteConstants c, GPTR(const float) logits,
                         GPTR(const float) correction, const RouteMemory r, GPTR(uint) ids, GPTR(float) weights) {
    const float poison = choose(ctx, c, logits, correction, r, true);
    if (ctx.thread() == 0) weigh_chosen(ctx, c, r, poison, ids, weights);
}

// A warp's sums of rows of `blocks` blocks from `first_block` on: m.block gets 32 gates of each, then 32 ups. A lane reads P pieces
// of a row at once; where IS_SHORT, it has no more, and keeps their activations.
template <uint D, uint P, bool IS_SHORT>
DEVICE void gate_up_sums(CTX, const GateUpConstants c, const GateUpBuffers b, const GateUpMemory m, uint slot,
                         uint first_block, uint blocks) {
    const LocalActivations x = {m.words, m.scales};
    const bool gates = has_gate(c);
    const uint pieces = pieces_of<D>(c.gate.format), step = gates ? 2 : 4, which = ctx.lane() / 8;
    Chunks<P> k;
    if (IS_SHORT) k = chunks_of<D, P>(x, ctx.lane(), pieces);
    for (uint i = 0; i < 4 * blocks; i += step) {
        const uint in = ctx.warp() * 4 + i % 4;
        const Rows<4> rows = gate_up_rows<2>(c, b.slots, slot, (first_block + i / 4) * 32 + in);
        const Raws<4, P> raws = raws_of<D, 4, P>(c.gate.format, rows, ctx.lane());
        const Sums<4> dots = IS_SHORT ? short_dots<D, 4, P>(raws, k, ctx.lane(), pieces)
                                      : lane_dots<D, 4, P>(ctx, c.gate.format, rows, raws, x);
        const float sum = team_sums<4>(ctx, dots, 32);
        const uint to = gates ? which % 2 * 32 + which / 2 : 32 + which;
        if (ctx.lane() % 8 == 0) m.block[i / 4 * 64 + to + in] = sum;
    }
}

// Brings four rows of gate and of up nearer.
DEVICE void prefetch_rows(CTX, const GateUpConstants c, const GateUpBuffers b, uint slot, uint first) {
    const Row g = expert_row(b.slots, slot, c.gate, first), u = expert_row(b.slots, slot, c.up, first);
    warp_prefetch(ctx, g.plane0, 4 * c.gate.format.strides[0]);
    warp_prefetch(ctx, u.plane0, 4 * c.up.format.strides[0]);
}

// What a group of gate and up does: `blocks` blocks of 32 outputs of a pair, none where there is nothing to multiply.
struct GateUpGroup {
    uint pair, expert, slot, first_block, blocks;
    // What products are to be multiplied by.
    float factor;
};

// Brings, chooses and rounds what a group needs before its products.
DEVICE GateUpGroup entered_group(CTX, const GateUpConstants c, const GateUpBuffers b, const GateUpMemory m,
                                 const RouteMemory r) {
    GateUpGroup g = {0, 0, ABSENT, 0, 0, 1.0f};
    g.pair = c.beside ? ctx.group_x() : ctx.group_y();
    const uint number = c.beside ? ctx.group_y() : ctx.group_x();
    const uint token = g.pair / c.top_k, cols = c.gate.format.cols;
    if (number < c.bringing) {
        bring_rest(ctx, c.brought, b.fetches, b.host, b.slots, g.pair, number, c.bringing);
        return g;
    }
    const uint all = c.gate.rows / 32;
    g.first_block = (number - c.bringing) * c.blocks;
    if (g.first_block >= all) {
        after_previous(ctx);
        if (g.pair % c.top_k == 0)
            write_choice(ctx, c.route, b.logits + (ulong)token * c.route.experts, b.correction, r, b.ids + g.pair,
                         b.weights + g.pair);
        return g;
    }
    if (!c.early) after_previous(ctx);
    const GPTR(const float) from = b.x + (ulong)token * cols;
    g.factor = enter_bytes(ctx, c.norm, from, b.norm, cols, m.words, m.scales, m.scratch,
                           entering(ctx, c.norm, from, b.norm, cols));
    const LaneTable t = lane_table(ctx, c, b);
    if (c.early) after_previous(ctx);
    PairExpert of;
    if (c.routes && warp_chooses(c.route)) {
        // One warp for all.
        if (ctx.warp() == 0) {
            of = expert_by_warp(ctx, c, b, t, g.pair);
            if (ctx.lane() == 0) {
                r.chosen[0] = of.expert;
                r.chosen[1] = of.slot;
            }
        }
        barrier(ctx);
        of.expert = r.chosen[0];
        of.slot = r.chosen[1];
    } else {
        of = expert_of(ctx, c, b, r, g.pair);
    }
    if (of.slot == ABSENT) return g;
    g.expert = of.expert;
    g.slot = of.slot;
    if (c.weighs) g.factor *= b.weights[g.pair];
    g.blocks = all - g.first_block < c.blocks ? all - g.first_block : c.blocks;
    return g;
}

// Activates and rounds what a group has summed: a warp a block.
DEVICE void write_group(CTX, const GateUpConstants c, const GateUpBuffers b, const GateUpMemory m, const GateUpGroup g) {
    barrier(ctx);
    if (ctx.warp() >= g.blocks) return;
    const uint row = (g.first_block + ctx.warp()) * 32, own = ctx.warp() * 64 + ctx.lane();
    const float gate = has_gate(c) ? product_of(m.block[own], g.factor) : 0.0f;
    const float up = product_of(m.block[own + 32], g.factor);
    const ulong to = (ulong)g.pair * c.gate.rows + row;
    quantize_block(ctx, gated(c, b, g.expert, row + ctx.lane(), gate, up), b.bytes + to, b.scales + to / 32 * 2);
}

// activation(gate · x, up · x) of each pair → bytes and scales (pairs, rows): a group of 8 warps makes `blocks` of 32.
// x (tokens, cols), normalised if there is a norm. Where it chooses the experts, groups beyond the rows' write ids and
// weights. Where `place` did, groups before the rows' may bring the experts' last part, beside the others.
// Pairs of several tokens count fastest, so that an expert that some of them chose comes from memory once.
// Grid: (bringing groups, rows / 32 / blocks, and one if it chooses, pairs), or the other way round.
template <uint D>
DEVICE void gate_up8(CTX, const GateUpConstants c, const GateUpBuffers b, const GateUpMemory m, const RouteMemory r) {
    const GateUpGroup g = entered_group(ctx, c, b, m, r);
    if (g.blocks == 0) return;
    prefetch_rows(ctx, c, b, g.slot, g.first_block * 32 + ctx.warp() * 4);
    constexpr uint P = takes_two<D>() ? 2 : 1;
    const uint pieces = pieces_of<D>(c.gate.format);
    if (pieces <= 32) gate_up_sums<D, 1, true>(ctx, c, b, m, g.slot, g.first_block, g.blocks);
    else if (P == 2 && pieces <= 64) gate_up_sums<D, P, true>(ctx, c, b, m, g.slot, g.first_block, g.blocks);
    else gate_up_sums<D, P, false>(ctx, c, b, m, g.slot, g.first_block, g.blocks);
    write_group(ctx, c, b, m, g);
}

// A kernel of gate and up: with these constants, of rows of so many columns and so many experts to choose from at most.
#define GATE_UP(name, constants, columns, experts, ...)                                                           \
    KERNEL_AHEAD(name, constants, (uchar, slots), (const uint, table), (const float, logits),               \
                 (const float, correction), (uint, ids), (float, weights), (const float, x), (const float, norm), \
                 (const float, gate_bias), (const float, up_bias), (uchar, bytes), (float, scales),               \
                 (const uint, fetches), (const uchar, host)) {                                                    \
        SHARED(uint, words, (columns) / 4);                                                                       \
        SHARED(float, x_scales, (columns) / 16);                                                                  \
        SHARED(float, scratch, 8);                                                                                \
        SHARED(float, block, 64 * MOST_BLOCKS);                                                                   \
        SHARED(float, scores, experts);                                                                           \
        SHARED(uint, keys, experts);                                                                              \
        SHARED(uint, group_keys, experts);                                                                        \
        SHARED(uint, chosen, MAX_CHOSEN);                                                                         \
        const GateUpBuffers b = {slots, table,     logits,  correction, ids,    weights, x,                       \
                                 norm,  gate_bias, up_bias, bytes,      scales, fetches, host};                   \
        const GateUpMemory m = {words, x_scales, scratch, block};                                                 \
        const RouteMemory r = {scores, keys, group_keys, chosen};                                                 \
        __VA_ARGS__                                                                                               \
    }

struct DownConstants {
    Part part;
    uint top_k;
    // Whether the pairs of a token are summed; else each has an output of its own.
    uint fused;
    uint has_bias, has_residual;
    // Whether pairs count as much as `weights` says; else all the same.
    uint weighs;
    // Whether the outputs of pairs of absent experts are there, in `handed`.
    uint hands;
    // Whether tokens or pairs count fastest in the grid.
    uint beside;
};

struct DownBuffers {
    GPTR(const uchar) slots;
    GPTR(const uint) table;
    GPTR(const uint) ids;
    GPTR(const uchar) bytes;
    GPTR(const float) scales;
    GPTR(const float) weights;
    GPTR(const float) bias;
    GPTR(const float) residual;
    GPTR(const float) handed;
    GPTR(float) out;
};

// A row of each pair's down · x, of `count` pairs from `first` on, N pairs a team at once: TEAM lanes take a pair each.
// Returns the sum with the router's weights, or the only pair's product; `present` is whether all experts are.
struct Total {
    float sum;
    bool present;
};

template <uint D, uint N, uint TEAM>
DEVICE Total down_row(CTX, const DownConstants c, const DownBuffers b, uint row, uint first, uint count) {
    constexpr uint TEAMS = 32 / TEAM, EACH = N * TEAMS;
    const uint pieces = pieces_of<D>(c.part.format), cols = c.part.format.cols;
    const uint lane = ctx.lane() % TEAM, own = ctx.lane() / TEAM;
    Total total = {0.0f, true};
    for (uint k = 0; k < count; k += EACH) {
        Rows<N> rows;
        Sums<N> sums;
        uint pairs[N];
        uint missing = 0, elsewhere = 0;
        // Of N, those that are pairs of some team.
        const uint live = (count - k + TEAMS - 1) / TEAMS;
#pragma unroll
        for (uint n = 0; n < N; ++n) {
            // Beyond the last one, that again.
            const uint at = k + n * TEAMS + own;
            pairs[n] = first + (at < count ? at : count - 1);
            const uint slot = b.table[b.ids[pairs[n]]];
            missing |= slot == ABSENT ? 1 : 0;
            elsewhere |= slot == ABSENT ? 1u << n : 0;
            rows.row[n] = expert_row(b.slots, slot == ABSENT ? 0 : slot, c.part, row);
            sums.v[n] = 0.0f;
        }
        // Of all pairs of a token, or of the only one: then for all lanes.
        if (missing && !c.hands) {
            total.present = false;
            return total;
        }
        for (uint p = lane; p < pieces; p += TEAM) {
            Raw raw[N];
#pragma unroll
            for (uint n = 0; n < N; ++n) {
                if (n < live) raw[n] = raw_of<D>(c.part.format, rows.row[n], p);
            }
#pragma unroll
            for (uint n = 0; n < N; ++n) {
                if (n >= live) continue;
                const Activations x = {b.bytes + pairs[n] * cols, b.scales + pairs[n] * (cols / 32) * 2};
                sums.v[n] += piece_dot<D>(raw[n], chunk_of<D>(x, p), p);
            }
        }
        float sum = team_sums<N>(ctx, sums, TEAM);
        // The pair whose sum this lane has.
        const uint which = lane / (TEAM / N), at = k + which * TEAMS + own;
        if (elsewhere >> which & 1) sum = b.handed[(first + (at < count ? at : count - 1)) * c.part.rows + row];
        if (c.has_bias && at < count) sum += b.bias[b.ids[first + at] * c.part.rows + row];
        const float weight = !c.fused || at >= count ? 0.0f : c.weighs ? (float)b.weights[first + at] : 1.0f;
#pragma unroll
        for (uint i = 0; i < EACH; ++i) {
            if (k + i >= count) break;
            const uint from = i % TEAMS * TEAM + i / TEAMS * (TEAM / N);
            const float one = lane_read(ctx, sum, from);
            total.sum = c.fused ? fma_of(lane_read(ctx, weight, from), one, total.sum) : one;
        }
    }
    return total;
}

// down · x of each pair, x (pairs, cols): summed over each token's pairs with the router's weights, + residual → out
// (tokens, rows), or as it is → out (pairs, rows). A warp makes an output. Grid: (rows / warps, tokens or pairs), or
// the other way round.
template <uint D>
DEVICE void down8(CTX, const DownConstants c, const DownBuffers b) {
    const uint own = c.beside ? ctx.group_x() : ctx.group_y(), block = c.beside ? ctx.group_y() : ctx.group_x();
    const uint row = block * ctx.warps() + ctx.warp();
    if (row >= c.part.rows) return;
    const uint count = c.fused ? c.top_k : 1, first = own * count;
    const ulong at = (ulong)own * c.part.rows + row;
    const float residual = c.fused && c.has_residual ? (float)b.residual[at] : 0.0f;
    // Half a warp has enough lanes for a short row.
    Total total;
    if (pieces_of<D>(c.part.format) <= 16) total = down_row<D, 4, 16>(ctx, c, b, row, first, count);
    else total = down_row<D, 4, 32>(ctx, c, b, row, first, count);
    if (ctx.lane() == 0 && total.present) b.out[at] = total.sum + residual;
}

#ifndef WITHOUT_KERNELS
#define OF_EXPERTS(name, D)                                                                               \
    GATE_UP(gate_up8_##name, GateUpConstants, MOST_COLUMNS, MAX_EXPERTS, gate_up8<D>(ctx, c, b, m, r);)   \
    KERNEL(down8_##name, DownConstants, (const uchar, slots), (const uint, table), (const uint, ids),     \
           (const uchar, bytes), (const float, scales), (const float, weights), (const float, bias),      \
           (const float, residual), (const float, handed), (float, out)) {                                \
        const DownBuffers b = {slots, table, ids, bytes, scales, weights, bias, residual, handed, out};   \
        down8<D>(ctx, c, b);                                                                              \
    }

// A multiprocessor has three groups of encodings that take few registers: a token with four experts of 2880 outputs has more groups of
// 32 than would find room otherwise.
#define IF_LATE_yes(...)
#define IF_LATE_no(...) __VA_ARGS__
#define OF_EARLY(name, D, code, few, early, ...) IF_##early(IF_BYTES_##few(OF_EXPERTS(name, D)))
#define OF_PLANES(name, D, ...) IF_1(IN_PLANES(name), OF_EXPERTS(name, D))
#define OF_LATE(name, D, code, few, early, ...) \
    IF_LATE_##early(IF_BYTES_##few(IF_0(IN_PLANES(name), OF_EXPERTS(name, D))))
ENCODINGS(OF_EARLY)
ENCODINGS(OF_PLANES)
#undef GROUPS_AT_ONCE
#define GROUPS_AT_ONCE 3
ENCODINGS(OF_LATE)
#endif

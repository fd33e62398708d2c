// Routed experts of few rows, with activations of eight bits. A *pair* is a token with one of its experts.
#include "activations.h"
#include "quantize.h"
#include "routing.h"

CONSTANT uint SWIGLU = 0, ABSENT = 0xffffffffu, SLOT_UNIT = 256;

struct ExpertPart {
    Format format;
    uint offsets[3];
    uint rows;
};

DEVICE Row part_row(GPTR(const uchar) slots, uint slot, const ExpertPart part, uint row) {
    const GPTR(const uchar) base = slots + (ulong)slot * SLOT_UNIT;
    return row_of(base + part.offsets[0], base + part.offsets[1], base + part.offsets[2], part.format, row);
}

struct GateUpConstants {
    ExpertPart gate, up;
    NormConstants norm;
    // Whether this chooses the experts, and how; else `ids` says which they are.
    uint routes;
    RouteConstants route;
    uint top_k;
    uint activation;
    float alpha, limit;
    uint has_bias;
};

struct GateUpBuffers {
    GPTR(const uchar) slots;
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
};

struct GateUpMemory {
    SPTR(uint) words;
    SPTR(float) scales;
    SPTR(float) scratch;
    SPTR(float) block;
};

// activation(gate · x, up · x) of each pair → bytes and scales (pairs, rows): a group of 8 warps makes a block of 32.
// x (tokens, cols), normalised if there is a norm. Where it chooses the experts, groups beyond the rows' write ids and
// weights. Grid: (rows / 32, and one if it chooses, pairs).
template <uint D>
DEVICE void gate_up8(CTX, const GateUpConstants c, const GateUpBuffers b, const GateUpMemory m, const RouteMemory r) {
    const uint pair = ctx.group_y(), token = pair / c.top_k, cols = c.gate.format.cols;
    const GPTR(const float) logits = b.logits + (ulong)token * c.route.experts;
    if (ctx.group_x() == c.gate.rows / 32) {
        if (pair % c.top_k != 0) return;
        const float poison = choose(ctx, c.route, logits, b.correction, r, true);
        if (ctx.thread() == 0) weigh_chosen(ctx, c.route, r, poison, b.ids + pair, b.weights + pair);
        return;
    }
    const GPTR(const float) from = b.x + (ulong)token * cols;
    const Entering e = entering(ctx, c.norm, from, b.norm, cols);
    uint expert;
    if (c.routes) {
        choose(ctx, c.route, logits, b.correction, r, false);
        expert = r.chosen[pair % c.top_k];
    } else {
        expert = b.ids[pair];
    }
    const uint slot = b.table[expert];
    if (slot == ABSENT) return;
    const uint first = ctx.group_x() * 32 + ctx.warp() * 4;
    const Row g = part_row(b.slots, slot, c.gate, first), u = part_row(b.slots, slot, c.up, first);
    warp_prefetch(ctx, g.plane0, 4 * c.gate.format.strides[0]);
    warp_prefetch(ctx, u.plane0, 4 * c.up.format.strides[0]);
    const float factor = enter_bytes(ctx, c.norm, from, b.norm, cols, m.words, m.scales, m.scratch, e);
    const LocalActivations x = {m.words, m.scales};
    for (uint i = 0; i < 4; i += 2) {
        Rows<4> rows;
#pragma unroll
        for (uint n = 0; n < 2; ++n) {
            rows.row[2 * n] = part_row(b.slots, slot, c.gate, first + i + n);
            rows.row[2 * n + 1] = part_row(b.slots, slot, c.up, first + i + n);
        }
        // Gates in lanes 0 and 16, their ups eight lanes on.
        float gate = team_sums<4>(ctx, lane_dots_ahead<D, 4>(ctx, c.gate.format, rows, x), 32) * factor;
        const uint own = ctx.warp() * 4 + i + ctx.lane() / 16, row = ctx.group_x() * 32 + own;
        if (c.has_bias) {
            gate += ctx.lane() % 16 < 8 ? b.gate_bias[expert * c.gate.rows + row] : b.up_bias[expert * c.gate.rows + row];
        }
        const float up = lane_xor(ctx, gate, 8u);
        float v;
        if (c.activation == SWIGLU) {
            v = silu(gate) * up;
        } else {
            // In this form NaN stays NaN.
            const float a = gate > c.limit ? c.limit : gate;
            const float d = up > c.limit ? c.limit : up < -c.limit ? -c.limit : up;
            v = (d + 1.0f) * a * sigmoid(c.alpha * a);
        }
        if (ctx.lane() % 16 == 0) m.block[own] = v;
    }
    barrier(ctx);
    if (ctx.warp() != 0) return;
    const ulong to = (ulong)pair * c.gate.rows + ctx.group_x() * 32;
    quantize_block(ctx, m.block[ctx.lane()], b.bytes + to, b.scales + to / 32 * 2);
}

struct DownConstants {
    ExpertPart part;
    uint top_k;
    // Whether the pairs of a token are summed; else each has an output of its own.
    uint fused;
    uint has_bias, has_residual;
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
    GPTR(float) out;
};

// A row of each pair's down · x, from `begin` on, N pairs a team at once: `team` lanes take a pair each. Returns the sum so
// far, with the router's weights, or the only pair's product; `present` is whether all experts are.
struct Total {
    float sum;
    bool present;
};

template <uint D, uint N>
DEVICE Total down_row(CTX, const DownConstants c, const DownBuffers b, uint row, uint first, uint count, uint team) {
    const uint pieces = pieces_of<D>(c.part.format), cols = c.part.format.cols;
    const uint teams = 32 / team, lane = ctx.lane() % team, own = ctx.lane() / team, each = N * teams;
    Total total = {0.0f, true};
    for (uint k = 0; k < count; k += each) {
        Rows<N> rows;
        Sums<N> sums;
        ulong pairs[N];
        uint missing = 0;
#pragma unroll
        for (uint n = 0; n < N; ++n) {
            // Beyond the last one, that again.
            const uint at = k + n * teams + own;
            pairs[n] = first + (at < count ? at : count - 1);
            const uint slot = b.table[b.ids[pairs[n]]];
            missing |= slot == ABSENT ? 1 : 0;
            rows.row[n] = part_row(b.slots, slot == ABSENT ? 0 : slot, c.part, row);
            sums.v[n] = 0.0f;
        }
        // Of all pairs of a token, or of the only one: then for all lanes.
        if (missing) {
            total.present = false;
            return total;
        }
        for (uint p = lane; p < pieces; p += team) {
            Raw raw[N];
#pragma unroll
            for (uint n = 0; n < N; ++n) raw[n] = raw_of<D>(c.part.format, rows.row[n], p);
#pragma unroll
            for (uint n = 0; n < N; ++n) {
                const Activations x = {b.bytes + pairs[n] * cols, b.scales + pairs[n] * (cols / 32) * 2};
                sums.v[n] += piece_dot<D>(raw[n], chunk_of<D>(x, p), p);
            }
        }
        float sum = team_sums<N>(ctx, sums, team);
        // The pair whose sum this lane has.
        const uint at = k + lane / (team / N) * teams + own;
        if (c.has_bias && at < count) sum += b.bias[b.ids[first + at] * c.part.rows + row];
        for (uint i = 0; i < each && k + i < count; ++i) {
            const float one = lane_read(ctx, sum, i % teams * team + i / teams * (team / N));
            total.sum = c.fused ? fma_of(b.weights[first + k + i], one, total.sum) : one;
        }
    }
    return total;
}

// down · x of each pair, x (pairs, cols): summed over each token's pairs with the router's weights, + residual → out
// (tokens, rows), or as it is → out (pairs, rows). A warp makes an output. Grid: (rows / warps, tokens or pairs).
template <uint D> DEVICE void down8(CTX, const DownConstants c, const DownBuffers b) {
    const uint row = ctx.group_x() * ctx.warps() + ctx.warp();
    if (row >= c.part.rows) return;
    const uint count = c.fused ? c.top_k : 1, first = ctx.group_y() * count;
    // Half a warp has enough lanes for a short row.
    Total total;
    if (pieces_of<D>(c.part.format) <= 16) total = down_row<D, 4>(ctx, c, b, row, first, count, 16);
    else if (count > 4) total = down_row<D, 8>(ctx, c, b, row, first, count, 32);
    else total = down_row<D, 4>(ctx, c, b, row, first, count, 32);
    if (ctx.lane() != 0 || !total.present) return;
    const ulong at = (ulong)ctx.group_y() * c.part.rows + row;
    float sum = total.sum;
    if (c.fused && c.has_residual) sum += b.residual[at];
    b.out[at] = sum;
}

#define ENCODING(name, D)                                                                                      \
    KERNEL(gate_up8_##name, GateUpConstants, (const uchar, slots), (const uint, table), (const float, logits), \
           (const float, correction), (uint, ids), (float, weights), (const float, x), (const float, norm),    \
           (const float, gate_bias), (const float, up_bias), (uchar, bytes), (float, scales)) {                \
        SHARED(uint, words, MOST_COLUMNS / 4);                                                                 \
        SHARED(float, x_scales, MOST_COLUMNS / 16);                                                            \
        SHARED(float, scratch, 8);                                                                             \
        SHARED(float, block, 32);                                                                              \
        SHARED(float, scores, MAX_EXPERTS);                                                                    \
        SHARED(uint, keys, MAX_EXPERTS);                                                                       \
        SHARED(uint, group_keys, MAX_EXPERTS);                                                                 \
        SHARED(uint, chosen, MAX_CHOSEN);                                                                      \
        const GateUpBuffers b = {slots, table, logits, correction, ids, weights, x, norm, gate_bias, up_bias, bytes, scales}; \
        const GateUpMemory m = {words, x_scales, scratch, block};                                              \
        const RouteMemory r = {scores, keys, group_keys, chosen};                                              \
        gate_up8<D>(ctx, c, b, m, r);                                                                          \
    }                                                                                                          \
    KERNEL(down8_##name, DownConstants, (const uchar, slots), (const uint, table), (const uint, ids),          \
           (const uchar, bytes), (const float, scales), (const float, weights), (const float, bias),           \
           (const float, residual), (float, out)) {                                                            \
        const DownBuffers b = {slots, table, ids, bytes, scales, weights, bias, residual, out};                \
        down8<D>(ctx, c, b);                                                                                   \
    }

ENCODING(q4_k, Q4_K)
ENCODING(q5_k, Q5_K)
ENCODING(q6_k, Q6_K)
ENCODING(q8_0, Q8_0)
ENCODING(affine4, AFFINE)
ENCODING(affine8, AFFINE + 256)

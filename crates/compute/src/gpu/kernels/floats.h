// Products of few rows with weights that are unpacked to floats, of encodings that have no pieces to multiply with activations
// of eight bits: linear layers and routed experts. Activations are not rounded.
#include "activations.h"
#include "columns8.h"
#include "routing.h"
#include "tiles.h"

// Outputs of a warp of a linear layer; of experts' down projections twice as many.
CONSTANT uint ROWS = 2;

// Tokens that read a linear layer's weight once, at most.
CONSTANT uint JOINT_TOKENS = 8;

// Eight columns of a row, which `factor` makes what they are.
struct Eight {
    Float8 w;
    float factor;
};

// S is how scales of FP8 are stored.
template <uint D, uint S>
DEVICE Eight eight_of(const Format f, const Row row, uint i) {
    if (D == FP8) {
        const Eight r = {fp8_floats(row, i), fp8_factor<S>(f, row, i)};
        return r;
    }
    const Eight r = {columns8<D>(f, row, i), 1.0f};
    return r;
}

// sum + their product with x.
template <uint D>
DEVICE float with_eight(const Eight e, const Float8 x, float sum) {
    float own = D == FP8 ? 0.0f : sum;
#pragma unroll
    for (uint j = 0; j < 8; ++j) own = fma_of(e.w.v[j], x.v[j], own);
    return D == FP8 ? fma_of(own, e.factor, sum) : own;
}

// A lane's shares of the products of N rows with x, and of its squares if there is a norm.
template <uint N>
struct FloatDots {
    Sums<N> sums;
    float squares;
};

// Of x ⊙ norm if there is one; columns are a multiple of 8.
template <uint D, uint S, uint N>
DEVICE FloatDots<N> float_dots(CTX, const Format f, const Rows<N> rows, GPTR(const float) x, bool has_norm,
                               GPTR(const float) norm) {
    FloatDots<N> dots;
    dots.squares = 0.0f;
#pragma unroll
    for (uint n = 0; n < N; ++n) dots.sums.v[n] = 0.0f;
    // What Q3_K needs of four rows takes all registers.
    constexpr uint AHEAD = D == Q3_K ? 1 : D == FP8 && N == ROWS ? 4 : 2;
#pragma unroll AHEAD
    for (uint i = ctx.lane(); i < f.cols / 8; i += 32) {
        Float8 a = floats8(x, i);
        if (has_norm) {
            const Float8 weight = floats8(norm, i);
#pragma unroll
            for (uint j = 0; j < 8; ++j) {
                dots.squares = fma_of(a.v[j], a.v[j], dots.squares);
                a.v[j] = product_of(a.v[j], weight.v[j]);
            }
        }
#pragma unroll
        for (uint n = 0; n < N; ++n)
            dots.sums.v[n] = with_eight<D>(eight_of<D, S>(f, rows.row[n], i), a, dots.sums.v[n]);
    }
    return dots;
}

// Rows that a warp of a linear layer makes, the last ones again after its end.
DEVICE Rows<ROWS> rows_of_warp(const LinearConstants c, const Row weight, uint first) {
    Rows<ROWS> rows;
#pragma unroll
    for (uint n = 0; n < ROWS; ++n) {
        const uint row = first + n < c.rows ? first + n : first;
        rows.row[n] = row_of(weight.plane0, weight.plane1, weight.plane2, c.weight, row);
    }
    return rows;
}

// Asks for ROWS rows from `first` on, as far as there are any.
DEVICE void prefetch_some(CTX, const Row row, const Format f, uint first, uint rows) {
    if (first < rows) warp_prefetch(ctx, row.plane0, (first + ROWS <= rows ? ROWS : 1) * f.strides[0]);
}

// x (tokens, cols) · weightᵀ + bias + residual → out (tokens, rows): a warp makes ROWS outputs of one token.
// Grid: (tokens, rows / ROWS / warps of a group).
template <uint D, uint S>
DEVICE void float_linear(CTX, const LinearConstants c, const Row weight, GPTR(const float) x, GPTR(const float) bias,
                         GPTR(const float) residual, GPTR(float) out) {
    const uint first = (ctx.group_y() * ctx.warps() + ctx.warp()) * ROWS, token = ctx.group_x();
    const Rows<ROWS> rows = rows_of_warp(c, weight, first < c.rows ? first : 0);
    prefetch_some(ctx, rows.row[0], c.weight, first, c.rows);
    after_previous(ctx);
    if (first >= c.rows) return;
    const FloatDots<ROWS> dots = float_dots<D, S, ROWS>(ctx, c.weight, rows, x + (ulong)token * c.weight.cols, false, x);
    float sum = team_sums<ROWS>(ctx, dots.sums, 32);
    const uint row = first + ctx.lane() / (32 / ROWS);
    if (ctx.lane() % (32 / ROWS) != 0 || row >= c.rows) return;
    if (c.has_bias) sum += bias[row];
    const ulong at = (ulong)token * c.rows + row;
    if (c.has_residual) sum += residual[at];
    out[at] = sum;
}

// The same of up to JOINT_TOKENS tokens, with the same bits: a warp makes ROWS outputs of each.
// Grid: (tokens / JOINT_TOKENS, rows / ROWS / warps of a group).
template <uint D, uint S>
DEVICE void float_joint(CTX, const LinearConstants c, const Row weight, GPTR(const float) x, GPTR(const float) bias,
                        GPTR(const float) residual, GPTR(float) out) {
    constexpr uint N = ROWS * JOINT_TOKENS;
    const uint first = (ctx.group_y() * ctx.warps() + ctx.warp()) * ROWS, cols = c.weight.cols;
    const uint token0 = ctx.group_x() * JOINT_TOKENS, tokens = c.tokens - token0;
    const Rows<ROWS> rows = rows_of_warp(c, weight, first < c.rows ? first : 0);
    prefetch_some(ctx, rows.row[0], c.weight, first, c.rows);
    after_previous(ctx);
    if (first >= c.rows) return;
    Sums<N> sums;
#pragma unroll
    for (uint n = 0; n < N; ++n) sums.v[n] = 0.0f;
    for (uint i = ctx.lane(); i < cols / 8; i += 32) {
        Eight w[ROWS];
#pragma unroll
        for (uint n = 0; n < ROWS; ++n) w[n] = eight_of<D, S>(c.weight, rows.row[n], i);
#pragma unroll
        for (uint t = 0; t < JOINT_TOKENS; ++t) {
            if (t >= tokens) break;
            const Float8 a = floats8(x + (ulong)(token0 + t) * cols, i);
#pragma unroll
            for (uint n = 0; n < ROWS; ++n) sums.v[t * ROWS + n] = with_eight<D>(w[n], a, sums.v[t * ROWS + n]);
        }
    }
    float sum = team_sums<N>(ctx, sums, 32);
    const uint own = ctx.lane() / (32 / N), token = own / ROWS, row = first + own % ROWS;
    if (ctx.lane() % (32 / N) != 0 || row >= c.rows || token >= tokens) return;
    if (c.has_bias) sum += bias[row];
    const ulong at = (ulong)(token0 + token) * c.rows + row;
    if (c.has_residual) sum += residual[at];
    out[at] = sum;
}

// The same where there are so few rows that groups of 256 threads make ROWS of them, with other bits.
// Grid: (tokens / JOINT_TOKENS, rows / ROWS).
template <uint D, uint S>
DEVICE void float_group(CTX, const LinearConstants c, const Row weight, GPTR(const float) x, GPTR(const float) bias,
                        GPTR(const float) residual, SPTR(float) shares, GPTR(float) out) {
    constexpr uint N = ROWS * JOINT_TOKENS;
    const uint first = ctx.group_y() * ROWS, cols = c.weight.cols;
    const uint token0 = ctx.group_x() * JOINT_TOKENS, tokens = c.tokens - token0;
    const Rows<ROWS> rows = rows_of_warp(c, weight, first);
    Sums<N> sums;
#pragma unroll
    for (uint n = 0; n < N; ++n) sums.v[n] = 0.0f;
    Eight w[ROWS];
    uint i = ctx.thread();
#pragma unroll
    for (uint n = 0; n < ROWS; ++n) w[n] = eight_of<D, S>(c.weight, rows.row[n], i < cols / 8 ? i : 0);
    after_previous(ctx);
    while (i < cols / 8) {
#pragma unroll
        for (uint t = 0; t < JOINT_TOKENS; ++t) {
            if (t >= tokens) break;
            const Float8 a = floats8(x + (ulong)(token0 + t) * cols, i);
#pragma unroll
            for (uint n = 0; n < ROWS; ++n) sums.v[t * ROWS + n] = with_eight<D>(w[n], a, sums.v[t * ROWS + n]);
        }
        i += ctx.threads();
        if (i >= cols / 8) break;
#pragma unroll
        for (uint n = 0; n < ROWS; ++n) w[n] = eight_of<D, S>(c.weight, rows.row[n], i);
    }
    const float own = team_sums<N>(ctx, sums, 32);
    if (ctx.lane() % (32 / N) == 0) shares[ctx.lane() / (32 / N) * 8 + ctx.warp()] = own;
    barrier(ctx);
    const uint token = ctx.thread() / ROWS, row = first + ctx.thread() % ROWS;
    if (ctx.thread() >= N || row >= c.rows || token >= tokens) return;
    float sum = 0.0f;
    for (uint k = 0; k < ctx.warps(); ++k) sum += shares[ctx.thread() * 8 + k];
    if (c.has_bias) sum += bias[row];
    const ulong at = (ulong)(token0 + token) * c.rows + row;
    if (c.has_residual) sum += residual[at];
    out[at] = sum;
}

struct FloatGateUpConstants {
    Part gate, up;
    NormConstants norm;
    // Pairs that share a row of x.
    uint share;
    Activation activation;
    // Whether there are biases (experts, rows), and whether rows of x count as much as `weights` (pairs) says, which is then known.
    uint has_bias, weighs;
    // Whether this chooses the experts, as a warp can, and how; else `ids` says which they are.
    uint routes;
    RouteConstants route;
};

// The expert of a pair, chosen by one warp for its group, by logits (tokens, experts).
DEVICE uint chosen_expert(CTX, const FloatGateUpConstants c, GPTR(const float) logits, uint pair, SPTR(uint) chosen) {
    const uint rank = pair % c.share;
    if (ctx.warp() == 0) {
        const uint last = warp_choose(ctx, c.route, logits + (ulong)(pair / c.share) * c.route.experts, rank + 1);
        const uint expert = lane_read(ctx, last, rank);
        if (ctx.lane() == 0) chosen[0] = expert;
    }
    barrier(ctx);
    return chosen[0];
}

struct FloatGateUpBuffers {
    GPTR(const uchar) slots;
    GPTR(const float) x;
    // Of the norm.
    GPTR(const float) norm;
    GPTR(const float) gate_bias;
    GPTR(const float) up_bias;
    GPTR(float) out;
};

// The products of gate and up of a pair with x, normalised if there is a norm, activated → out (pairs, inner): a warp makes ROWS
// outputs; without a gate, of up alone. Where it chooses the experts, groups beyond the rows' write ids and weights.
// Grid: (pairs, inner / ROWS / warps of a group, and one if it chooses).
template <uint D, uint S>
DEVICE void float_gate_up(CTX, const FloatGateUpConstants c, const FloatGateUpBuffers b, uint slot, uint expert, uint pair,
                          float weight) {
    const uint first = (ctx.group_y() * ctx.warps() + ctx.warp()) * ROWS, inner = c.up.rows, cols = c.up.format.cols;
    const bool gates = c.activation.kind != SQUARED_RELU;
    if (first >= inner) return;
    // Of gate, then of up.
    Rows<2 * ROWS> rows;
#pragma unroll
    for (uint n = 0; n < ROWS; ++n) {
        const uint row = first + n < inner ? first + n : first;
        rows.row[ROWS + n] = expert_row(b.slots, slot, c.up, row);
        rows.row[n] = rows.row[ROWS + n];
        if (gates) rows.row[n] = expert_row(b.slots, slot, c.gate, row);
    }
    // What a warp reads of floats at once is enough.
    if (D == FP8) {
        prefetch_some(ctx, rows.row[ROWS], c.up.format, first, inner);
        if (gates) prefetch_some(ctx, rows.row[0], c.gate.format, first, inner);
    }
    const GPTR(const float) x = b.x + (ulong)(pair / c.share) * cols;
    const FloatDots<2 * ROWS> dots = float_dots<D, S, 2 * ROWS>(ctx, c.up.format, rows, x, c.norm.has_norm, b.norm);
    const float squares = lane_sum(ctx, dots.squares);
    const float factor = c.norm.has_norm ? inverse_sqrt(quotient(squares, (float)cols) + c.norm.eps) : 1.0f;
    // Lanes of gate's first row, its second one, up's first, its second.
    const float own = team_sums<2 * ROWS>(ctx, dots.sums, 32) * factor * weight;
    const float up = lane_xor(ctx, own, 16u);
    const uint n = ctx.lane() / (16 / ROWS), row = first + n;
    if (ctx.lane() % (16 / ROWS) != 0 || n >= ROWS || row >= inner) return;
    const uint at = expert * inner + row;
    const float g = c.has_bias && gates ? own + b.gate_bias[at] : own, u = c.has_bias ? up + b.up_bias[at] : up;
    b.out[(ulong)pair * inner + row] = activated(c.activation, gates ? g : u, u);
}

// A pair's expert's matrix · x → out (pairs, rows): a warp makes 2 · ROWS outputs.
// Grid: (pairs, rows / (2 · ROWS) / warps of a group).
template <uint D, uint S>
DEVICE void float_down(CTX, const ExpertConstants c, GPTR(const uchar) slots, uint slot, uint expert, uint pair,
                       GPTR(const float) x, GPTR(const float) bias, GPTR(float) out) {
    constexpr uint N = 2 * ROWS;
    const uint first = (ctx.group_y() * ctx.warps() + ctx.warp()) * N;
    if (first >= c.part.rows) return;
    Rows<N> rows;
#pragma unroll
    for (uint n = 0; n < N; ++n)
        rows.row[n] = expert_row(slots, slot, c.part, first + n < c.part.rows ? first + n : first);
    const GPTR(const float) from = x + (ulong)(pair / c.share) * c.part.format.cols;
    const float sum = team_sums<N>(ctx, float_dots<D, S, N>(ctx, c.part.format, rows, from, false, from).sums, 32);
    const uint row = first + ctx.lane() / (32 / N);
    if (ctx.lane() % (32 / N) != 0 || row >= c.part.rows) return;
    out[(ulong)pair * c.part.rows + row] = c.has_bias ? sum + bias[expert * c.part.rows + row] : sum;
}

struct FloatSumConstants {
    ExpertConstants down;
    uint top_k, has_residual;
    // Whether pairs count as much as `weights` says; else all the same.
    uint weighs;
};

struct FloatSumBuffers {
    GPTR(const uchar) slots;
    GPTR(const uint) table;
    GPTR(const uint) ids;
    GPTR(const float) x;
    GPTR(const float) bias;
    GPTR(const float) weights;
    GPTR(const float) residual;
    GPTR(float) out;
};

// `float_down` of all of a token's pairs, whose experts are there, and what `moe_combine` makes of them, with its bits: residual +
// Σ_k weights[k] · the k-th expert's matrix · x → out (tokens, rows). A warp makes an output.
// Grid: (tokens, rows / warps of a group).
template <uint D, uint S>
DEVICE void float_sum(CTX, const FloatSumConstants c, const FloatSumBuffers b) {
    constexpr uint N = 2 * ROWS;
    const Part part = c.down.part;
    const uint row = ctx.group_y() * ctx.warps() + ctx.warp(), token = ctx.group_x(), cols = part.format.cols;
    if (row >= part.rows) return;
    float total = 0.0f;
    for (uint k = 0; k < c.top_k; k += N) {
        const uint first = token * c.top_k + k;
        // Of a pair beyond the last, that again.
        const uint own = k + ctx.lane() < c.top_k ? ctx.lane() : c.top_k - 1 - k;
        const uint expert = b.ids[first + own], slot = b.table[expert];
        const float weight = c.weighs ? (float)b.weights[first + own] : 1.0f;
        Rows<N> rows;
        Sums<N> sums;
#pragma unroll
        for (uint n = 0; n < N; ++n) {
            rows.row[n] = expert_row(b.slots, lane_read(ctx, slot, n), part, row);
            sums.v[n] = 0.0f;
        }
#pragma unroll 3
        for (uint i = ctx.lane(); i < cols / 8; i += 32) {
#pragma unroll
            for (uint n = 0; n < N; ++n) {
                const uint pair = k + n < c.top_k ? first + n : first;
                const Float8 a = floats8(b.x + (ulong)pair * cols, i);
                sums.v[n] = with_eight<D>(eight_of<D, S>(part.format, rows.row[n], i), a, sums.v[n]);
            }
        }
        const float sum = team_sums<N>(ctx, sums, 32);
#pragma unroll
        for (uint n = 0; n < N; ++n) {
            float of_pair = lane_read(ctx, sum, n * (32 / N));
            const uint of = lane_read(ctx, expert, n);
            if (c.down.has_bias) of_pair += b.bias[of * part.rows + row];
            const float factor = lane_read(ctx, weight, n);
            if (k + n < c.top_k) total = fma_of(factor, of_pair, total);
        }
    }
    if (ctx.lane() != 0) return;
    const ulong at = (ulong)token * part.rows + row;
    b.out[at] = c.has_residual ? total + b.residual[at] : total;
}

// f of an encoding and of how its scales are stored, if it is FP8.
#define BY_SCALES(f, D, format, ...)                                                                              \
    {                                                                                                             \
        const uint stored = scales_of((format).kind);                                                             \
        if (D != FP8 || stored == SCALES_F32) return f<D, SCALES_F32>(__VA_ARGS__);                               \
        if (stored == SCALES_BF16) return f<D, D == FP8 ? SCALES_BF16 : SCALES_F32>(__VA_ARGS__);                 \
        return f<D, D == FP8 ? SCALES_E8M0 : SCALES_F32>(__VA_ARGS__);                                            \
    }
#define OF_LINEAR(name, product, D)                                                                               \
    KERNEL_AHEAD(name, LinearConstants, (const uchar, plane0), (const uchar, plane1), (const uchar, plane2),            \
           (const float, x), (const float, bias), (const float, residual), (float, out)) {                        \
        const Row weight = {plane0, plane1, plane2, 0};                                                           \
        BY_SCALES(product, D, c.weight, ctx, c, weight, x, bias, residual, out)                                   \
    }
#define FLOAT_LINEAR(name, D, ...) OF_LINEAR(float_linear_##name, float_linear, D)
#define FLOAT_JOINT(name, D, ...) OF_LINEAR(float_joint_##name, float_joint, D)
#define FLOAT_GROUP(name, D, ...)                                                                                 \
    KERNEL_AHEAD(float_group_##name, LinearConstants, (const uchar, plane0), (const uchar, plane1),               \
                 (const uchar, plane2), (const float, x), (const float, bias), (const float, residual), (float, out)) { \
        SHARED(float, shares, 8 * ROWS * JOINT_TOKENS);                                                           \
        const Row weight = {plane0, plane1, plane2, 0};                                                           \
        BY_SCALES(float_group, D, c.weight, ctx, c, weight, x, bias, residual, shares, out)                       \
    }
#define FLOAT_SUM(name, D, ...)                                                                                   \
    KERNEL(float_sum_##name, FloatSumConstants, (const uchar, slots), (const uint, table), (const uint, ids),     \
           (const float, x), (const float, bias), (const float, weights), (const float, residual), (float, out)) { \
        const FloatSumBuffers b = {slots, table, ids, x, bias, weights, residual, out};                           \
        BY_SCALES(float_sum, D, c.down.part.format, ctx, c, b)                                                    \
    }
#define FLOAT_GATE_UP(name, D, ...)                                                                               \
    KERNEL(float_gate_up_##name, FloatGateUpConstants, (const uchar, slots), (const uint, table),                 \
           (const float, logits), (uint, ids), (const float, x), (const float, norm), (float, weights),           \
           (const float, gate_bias), (const float, up_bias), (float, out)) {                                      \
        SHARED(uint, chosen, 1);                                                                                  \
        const uint pair = ctx.group_x();                                                                          \
        if (c.routes && ctx.group_y() * ctx.warps() * ROWS >= c.up.rows) {                                        \
            const GPTR(const float) own = logits + (ulong)(pair / c.share) * c.route.experts;                     \
            if (pair % c.share == 0 && ctx.warp() == 0) warp_route(ctx, c.route, own, ids + pair, weights + pair); \
            return;                                                                                               \
        }                                                                                                         \
        const uint expert = c.routes ? chosen_expert(ctx, c, logits, pair, chosen) : ids[pair];                   \
        const uint slot = table[expert];                                                                          \
        if (slot == ABSENT) return;                                                                               \
        const FloatGateUpBuffers b = {slots, x, norm, gate_bias, up_bias, out};                                   \
        const float weight = c.weighs ? weights[pair] : 1.0f;                                                     \
        BY_SCALES(float_gate_up, D, c.up.format, ctx, c, b, slot, expert, pair, weight)                           \
    }
#define FLOAT_DOWN(name, D, ...)                                                                                  \
    KERNEL(float_down_##name, ExpertConstants, (const uchar, slots), (const uint, table), (const uint, ids),      \
           (const float, x), (const float, bias), (float, out)) {                                                 \
        const uint pair = ctx.group_x(), expert = ids[pair], slot = table[expert];                                \
        if (slot == ABSENT) return;                                                                               \
        BY_SCALES(float_down, D, c.part.format, ctx, c, slots, slot, expert, pair, x, bias, out)                  \
    }
ENCODINGS(FLOAT_LINEAR)
ENCODINGS(FLOAT_JOINT)
ENCODINGS(FLOAT_GROUP)
#undef GROUPS_AT_ONCE
#define GROUPS_AT_ONCE 3
ENCODINGS(FLOAT_GATE_UP)
#undef GROUPS_AT_ONCE
#define GROUPS_AT_ONCE 2
ENCODINGS(FLOAT_DOWN)
ENCODINGS(FLOAT_SUM)

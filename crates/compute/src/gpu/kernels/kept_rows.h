// Products of few rows with weights of many rows of 16-bit floats, heads most of all: groups stay, keep what they multiply with in
// registers, and read the next rows of the weight while they multiply. Bits are those of `product_plain`.
#define WITHOUT_KERNELS
#include "few_rows.h"

struct KeptRowsConstants {
    ProductPart part;
    NormConstants norm;
    uint weight;
    uint tokens;
    uint has_residual;
};

// Columns 8i..8i + 8 of N rows of a weight, as they are stored.
template <uint N>
struct HalfRows {
    Word4 of[N];
};

template <uint N>
DEVICE HalfRows<N> half_rows(const ProductPart part, GPTR(const uchar) weights, uint row, uint i) {
    HalfRows<N> w;
#pragma unroll
    for (uint r = 0; r < N; ++r) {
        const uint own = row + r < part.rows ? row + r : part.rows - 1;
        w.of[r] =
            load_u32x4(weights + (ulong)part.planes[0] * WEIGHT_UNIT + (ulong)own * part.format.strides[0], 16 * i);
    }
    return w;
}

// x (tokens, cols), normalised if there is a norm, · weightᵀ + bias + residual → out (tokens, rows): a group makes N outputs at a
// time of T tokens, whose columns are P pieces a thread. `shares` has room for 2 · 8 · N · T sums. Grid: (any, tokens / T).
template <uint D, uint N, uint T, uint P>
DEVICE void kept_rows(CTX, const KeptRowsConstants c, GPTR(const uchar) weights, GPTR(const float) x,
                      GPTR(const float) residual, SPTR(float) squares, SPTR(float) shares, GPTR(float) out) {
    constexpr uint EACH = N * T, LANES = 32 / EACH;
    const uint cols = c.part.format.cols, pieces = cols / 8, step = ctx.groups_x() * N, token0 = ctx.group_y() * T;
    const uint count = c.tokens - token0 < T ? c.tokens - token0 : T;
    uint row = ctx.group_x() * N;
    if (row >= c.part.rows) return;
    HalfRows<N> ahead[P];
#pragma unroll
    for (uint p = 0; p < P; ++p) {
        const uint i = p * ctx.threads() + ctx.thread();
        ahead[p] = half_rows<N>(c.part, weights, row, i < pieces ? i : 0);
    }
    prefetch_norm(ctx, c.norm, vector_at(weights, c.weight), cols);
    after_previous(ctx);
    const GPTR(const float) norm = vector_at(weights, c.weight);
    Float8 v[T][P];
#pragma unroll
    for (uint t = 0; t < T; ++t) {
        float square = 0.0f;
#pragma unroll
        for (uint p = 0; p < P; ++p) {
            const uint i = p * ctx.threads() + ctx.thread();
            const Entering e =
                entering_at(ctx, c.norm, x + (ulong)(token0 + (t < count ? t : 0)) * cols, norm, cols, i);
#pragma unroll
            for (uint j = 0; j < 8; ++j) {
                square = fma_of(e.x.v[j], e.x.v[j], square);
                v[t][p].v[j] = product_of(e.x.v[j], e.weight.v[j]);
            }
        }
        square = lane_sum(ctx, square);
        if (ctx.lane() == 0) squares[8 * t + ctx.warp()] = square;
    }
    barrier(ctx);
    const uint own_token = ctx.thread() / N, own_row = ctx.thread() % N;
    const bool ends = own_token < count;
    const float factor = norm_factor(ctx, c.norm, cols, squares + 8 * (ends ? own_token : 0));
    for (uint turn = 0; row < c.part.rows; row += step, turn ^= 1) {
        Sums<EACH> sums;
#pragma unroll
        for (uint i = 0; i < EACH; ++i) sums.v[i] = 0.0f;
#pragma unroll
        for (uint p = 0; p < P; ++p) {
            const HalfRows<N> own = ahead[p];
            const uint i = p * ctx.threads() + ctx.thread();
            if (row + step < c.part.rows) ahead[p] = half_rows<N>(c.part, weights, row + step, i < pieces ? i : 0);
            if (i >= pieces) continue;
#pragma unroll
            for (uint r = 0; r < N; ++r) {
                const Float8 w = of_halves<D>(own.of[r]);
#pragma unroll
                for (uint t = 0; t < T; ++t) {
                    if (t >= count) break;
#pragma unroll
                    for (uint j = 0; j < 8; ++j)
                        sums.v[t * N + r] = fma_of(w.v[j], v[t][p].v[j], sums.v[t * N + r]);
                }
            }
        }
        const float all = team_sums<EACH>(ctx, sums, 32);
        const uint to = turn * 8 * EACH;
        if (ctx.lane() % LANES == 0) shares[to + ctx.lane() / LANES * 8 + ctx.warp()] = all;
        barrier(ctx);
        const uint own = row + own_row;
        if (!ends || own >= c.part.rows) continue;
        float sum = 0.0f;
        for (uint i = 0; i < ctx.warps(); ++i) sum += shares[to + ctx.thread() * 8 + i];
        sum = product_of(sum, factor);
        const ulong at = (ulong)(token0 + own_token) * c.part.rows + own;
        if (c.part.bias != NONE) sum += vector_at(weights, c.part.bias)[own];
        if (c.has_residual) sum += residual[at];
        out[at] = sum;
    }
}

#define KEPT_ROWS(name, D, N, T, P)                                                                                  \
    KERNEL_AHEAD(name, KeptRowsConstants, (const uchar, weights), (const float, x), (const float, residual),       \
                 (float, out)) {                                                                                     \
        SHARED(float, squares, 8 * T);                                                                               \
        SHARED(float, shares, 2 * 8 * N * T);                                                                        \
        kept_rows<D, N, T, P>(ctx, c, weights, x, residual, squares, shares, out);                                   \
    }
// Of one token and of several: the more columns, the fewer.
KEPT_ROWS(kept_rows_8x1_bf16, BF16, 2, 8, 1)
KEPT_ROWS(kept_rows_4x2_bf16, BF16, 2, 4, 2)
KEPT_ROWS(kept_rows_2x4_bf16, BF16, 2, 2, 4)
KEPT_ROWS(kept_rows_8x1_f16, F16, 2, 8, 1)
KEPT_ROWS(kept_rows_4x2_f16, F16, 2, 4, 2)
KEPT_ROWS(kept_rows_2x4_f16, F16, 2, 2, 4)
#undef GROUPS_AT_ONCE
#define GROUPS_AT_ONCE 3
KEPT_ROWS(kept_rows_1x1_bf16, BF16, 4, 1, 1)
KEPT_ROWS(kept_rows_1x2_bf16, BF16, 2, 1, 2)
KEPT_ROWS(kept_rows_1x4_bf16, BF16, 1, 1, 4)
KEPT_ROWS(kept_rows_1x1_f16, F16, 4, 1, 1)
KEPT_ROWS(kept_rows_1x2_f16, F16, 2, 1, 2)
KEPT_ROWS(kept_rows_1x4_f16, F16, 1, 1, 4)
#undef GROUPS_AT_ONCE
#define GROUPS_AT_ONCE 2

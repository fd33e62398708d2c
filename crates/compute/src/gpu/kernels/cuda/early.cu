// Products of few rows whose weights are on their way before the dispatch in front has ended: bulk copies bring them to
// shared memory, so that they take no registers while they wait. What the kernels of `few_rows.h` and `down8` do, with the
// same bits. Of a token's experts warps choose for themselves, by the logits that the dispatch before the one in front wrote.
//
// Those copies are of compute capability 9.0; see `instructions.h` for others.
#define WEIGHTS_IN_SHARED_MEMORY
#define WITHOUT_KERNELS
#include "few_experts.h"
#include "few_rows.h"
#include "copies.h"

// Of one token's pairs, all of whose experts are there: rows are a multiple of the group's warps, and so many rows of an
// expert a multiple of 16 bytes.
struct EarlyDownConstants {
    Part part;
    uint top_k;
    uint has_residual, weighs;
    RouteConstants route;
};

// Brings the activations of a token's pairs, from pair `first` on, to shared memory.
DEVICE void bring_pairs(CTX, const EarlyDownConstants& c, const DownBuffers& b, uint first, uint* words, float* scales) {
    const uint quads = c.part.format.cols / 16, stride = pair_words(c.part.format.cols);
    const uchar* const bytes = b.bytes + (ulong)first * c.part.format.cols;
    const float* const from = b.scales + (ulong)first * quads;
    for (uint i = ctx.thread(); i < c.top_k * quads; i += ctx.threads()) {
        const Word4 w = load_u32x4(bytes, 16 * i);
        *(uint4*)(words + i / quads * stride + quad_at(i % quads) * 4) = make_uint4(w.x, w.y, w.z, w.w);
        scales[i] = from[i];
    }
}

// A row of each pair's down · x with the router's weights, from copies of the group's rows and of the pairs' activations: N
// pairs a team at once.
template <uint D, uint N, uint TEAM>
DEVICE float early_row(CTX, const EarlyDownConstants& c, const DownBuffers& b, const uchar* rows, const uint* words,
                       const float* scales, uint first) {
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
                const LocalActivations x = {words + pair * pair_words(cols), scales + pair * (cols / 16)};
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
// rows). A warp makes an output. `rows` holds top_k · warps rows, then the activations of top_k pairs, words and scales. Grid:
// (rows / warps, tokens).
template <uint D>
DEVICE void early_down8(CTX, const EarlyDownConstants& c, const DownBuffers& b, const float* logits, uchar* rows,
                        ulong* bar) {
    const uint first_row = ctx.group_x() * ctx.warps(), row = first_row + ctx.warp(), token = ctx.group_y();
    const uint bytes = ctx.warps() * c.part.format.strides[0];
    if (ctx.thread() == 0) expect_copies(bar, c.top_k);
    barrier(ctx);
    for (uint rank = ctx.warp(); rank < c.top_k; rank += ctx.warps()) {
        const uint last = warp_choose(ctx, c.route, logits + (ulong)token * c.route.experts, rank + 1);
        const uint slot = b.table[lane_read(ctx, last, rank)];
        copy_ahead(ctx, rows + rank * bytes, expert_row(b.slots, slot, c.part, first_row).plane0, bytes, bar);
    }
    after_previous(ctx);
    const uint pairs = token * c.top_k, cols = c.part.format.cols;
    uint* const words = (uint*)(rows + c.top_k * bytes);
    float* const scales = (float*)(words + c.top_k * pair_words(cols));
    const ulong at = (ulong)token * c.part.rows + row;
    const float residual = c.has_residual ? b.residual[at] : 0.0f;
    bring_pairs(ctx, c, b, pairs, words, scales);
    await_copies_of_all(ctx, bar);
    // Half a warp has enough lanes for a short row.
    const float total = pieces_of<D>(c.part.format) <= 16 ? early_row<D, 4, 16>(ctx, c, b, rows, words, scales, pairs)
                                                          : early_row<D, 4, 32>(ctx, c, b, rows, words, scales, pairs);
    if (ctx.lane() == 0) b.out[at] = total + residual;
}

// The widest rows.
CONSTANT uint EARLY_COLUMNS = 2048;

// A group's outputs of one token, two at a time: a warp makes `span` of them, of which `mine` gets the weights. `bars`:
// one a warp.
template <uint D>
DEVICE void early_part(CTX, const ProductsConstants& c, const OwnPart& own, const ProductBuffers& b,
                       const ProductMemory& m, uchar* mine, ulong* bars) {
    constexpr uint N = 2, LANES = 32 / N;
    const ProductPart& part = own.part;
    const uint token = ctx.group_y(), cols = part.format.cols, stride = part.format.strides[0];
    const uint begin = (own.group * ctx.warps() + ctx.warp()) * part.span;
    const uint end = begin + part.span < part.rows ? begin + part.span : part.rows;
    ulong* const bar = bars + ctx.warp();
    if (ctx.thread() < ctx.warps()) expect_copies(bars + ctx.thread(), 1);
    barrier(ctx);
    if (begin < end) {
        const uchar* const from = b.weights + (ulong)part.planes[0] * WEIGHT_UNIT + (ulong)begin * stride;
        copy_ahead(ctx, mine, from, (end - begin) * stride, bar);
    }
    prefetch_norm(ctx, c.norm, vector_at(b.weights, c.weight), cols);
    after_previous(ctx);
    const float* const from = b.x + (ulong)token * cols;
    const float* const norm = vector_at(b.weights, c.weight);
    const float factor = enter_bytes(ctx, c.norm, from, norm, cols, m.words, m.scales, m.scratch,
                                     entering(ctx, c.norm, from, norm, cols));
    const LocalActivations x = {m.words, m.scales};
    if (begin >= end) return;
    const uint pieces = pieces_of<D>(part.format);
    const Chunks<1> k = chunks_of<D, 1>(x, ctx.lane(), pieces);
    await_copies(bar);
    for (uint row = begin; row < end; row += N) {
        Rows<N> rows;
#pragma unroll
        for (uint n = 0; n < N; ++n) {
            const Row copied = {mine + (row + n < end ? row + n - begin : 0) * stride, nullptr, nullptr};
            rows.row[n] = copied;
        }
        const Raws<N, 1> raws = raws_of<D, N, 1>(part.format, rows, ctx.lane());
        float sum = team_sums<N>(ctx, short_dots<D, N, 1>(raws, k, ctx.lane(), pieces), 32) * factor;
        const uint to = row + ctx.lane() / LANES;
        if (ctx.lane() % LANES != 0 || to >= end) continue;
        const ulong at = (ulong)token * part.rows + to;
        if (part.bias != NONE) sum += vector_at(b.weights, part.bias)[to];
        if (c.has_residual) sum += b.residual[at];
        own.out[at] = sum;
    }
}

// As `products_…`, of rows of up to EARLY_COLUMNS columns, of which a lane has a piece, a multiple of 16 bytes. Dynamic
// memory: `span` rows a warp.
#define EARLY_PRODUCTS(name, ...)                                                                    \
    KERNEL_AHEAD(early_products_##name, ProductsConstants, (const uchar, weights), (const float, x), \
                 (const float, residual), (float, out0), (float, out1), (float, out2)) {             \
        SHARED(uint, words, EARLY_COLUMNS / 4);                                                      \
        SHARED(float, scales, EARLY_COLUMNS / 16);                                                   \
        SHARED(float, scratch, 8);                                                                   \
        SHARED(ulong, bars, 8);                                                                      \
        ASKED_MEMORY(uchar, dynamic);                                                                \
        const ProductBuffers b = {weights, x, residual, out0, out1, out2};                           \
        const ProductMemory m = {words, scales, scratch};                                            \
        const OwnPart own = own_part(ctx, c, b);                                                     \
        uchar* const mine = dynamic + ctx.warp() * own.part.span * own.part.format.strides[0];       \
        __VA_ARGS__                                                                                  \
    }
#define EARLY_OF_ONE(name, D, code, few, early, ...) \
    IF_##early(EARLY_PRODUCTS(name, early_part<D>(ctx, c, own, b, m, mine, bars);))

ENCODINGS(EARLY_OF_ONE)
EARLY_PRODUCTS(mixed, {
    switch (own.part.format.kind & 255) {
    case Q4_K: return early_part<Q4_K>(ctx, c, own, b, m, mine, bars);
    case Q5_K: return early_part<Q5_K>(ctx, c, own, b, m, mine, bars);
    default: return early_part<Q6_K>(ctx, c, own, b, m, mine, bars);
    }
})

#define EARLY_DOWN(name, D)                                                                                    \
    KERNEL_AHEAD(early_down8_##name, EarlyDownConstants, (const uchar, slots), (const uint, table),            \
                 (const uchar, bytes), (const float, scales), (const float, weights), (const float, residual), \
                 (float, out), (const float, logits)) {                                                        \
        SHARED(ulong, bar, 1);                                                                                 \
        ASKED_MEMORY(uchar, dynamic);                                                                          \
        const DownBuffers b = {slots, table, nullptr, bytes, scales, weights, nullptr, residual, nullptr, out};\
        early_down8<D>(ctx, c, b, logits, dynamic, bar);                                                       \
    }

#define EARLY_DOWN_OF_ONE(name, D, code, few, early, ...) IF_##early(EARLY_DOWN(name, D))
ENCODINGS(EARLY_DOWN_OF_ONE)

// Products of up to 8 tokens that read a weight once for all of them, or a share that finds room, with the instructions and so the bits of `few_rows.h`.
// Activations come in eight bits from `batch_enter`.
#define WITHOUT_KERNELS
#include "few_rows.h"
#include "copies.h"
#include "expanded.h"

// Tokens, at most.
CONSTANT uint JOINT_TOKENS = 8;

struct JointProductsConstants {
    ProductPart parts[MOST_PARTS];
    uint tokens;
    uint has_residual;
};

struct JointProductBuffers {
    const uchar* weights;
    const uchar* bytes;
    const float* scales;
    const float* factors;
    const float* residual;
};

// Brings activations (tokens, cols) to shared memory: words, then scales. A warp asks for all of its tokens' before it waits.
DEVICE void enter_joint(CTX, const JointProductBuffers& b, uint cols, uint tokens, uint* words, float* scales) {
    for (uint token = ctx.warp(); token < tokens; token += ctx.warps()) {
        const uchar* const bytes = b.bytes + (ulong)token * cols;
        uint* const to = words + token * pair_words(cols);
        for (uint quad = ctx.lane(); quad < cols / 16; quad += 32)
            copy_async<16>(to + quad_at(quad) * 4, bytes + 16 * quad);
        const uint first = token * (cols / 16);
        for (uint i = 2 * ctx.lane(); i < cols / 16; i += 64) copy_async<8>(scales + first + i, b.scales + first + i);
    }
    await_async();
}

// Rows that a warp has asked for before it reads them.
CONSTANT uint ROWS_AHEAD = 8;

// Asks for rows from..to, of those before `end`.
DEVICE void ask_ahead(CTX, const ProductPart& part, const uchar* weights, uint from, uint to, uint end) {
    if (from >= end) return;
    warp_prefetch(ctx, rows_at<1>(part, weights, from).row[0].plane0,
                  ((to < end ? to : end) - from) * part.format.strides[0]);
}

// A group's outputs of `count` tokens: a warp makes `span` rows, N at a time, of which a lane reads the first P pieces ahead.
template <uint D, uint N, uint P>
DEVICE void joint_rows(CTX, const OwnPart& own, const JointProductBuffers& b, uint count, bool has_residual,
                       uint* words, float* scales) {
    constexpr uint T = JOINT_TOKENS;
    const ProductPart& part = own.part;
    const uint cols = part.format.cols, pieces = pieces_of<D>(part.format);
    const uint begin = (own.group * ctx.warps() + ctx.warp()) * part.span;
    const uint end = begin + part.span < part.rows ? begin + part.span : part.rows;
    Raws<N, P> raws = raws_of<D, N, P>(part.format, rows_at<N>(part, b.weights, begin), ctx.lane());
    ask_ahead(ctx, part, b.weights, begin, begin + ROWS_AHEAD, end);
    after_previous(ctx);
    enter_joint(ctx, b, cols, count, words, scales);
    barrier(ctx);
    constexpr uint LANES = 32 / (N * T);
    const uint token = ctx.lane() / LANES / N, which = ctx.lane() / LANES % N;
    const float factor = token < count ? b.factors[token] : 0.0f;
    for (uint row = begin; row < end; row += N) {
        ask_ahead(ctx, part, b.weights, row + ROWS_AHEAD, row + ROWS_AHEAD + N, end);
        const Rows<N> rows = rows_at<N>(part, b.weights, row);
        Sums<N * T> sums;
#pragma unroll
        for (uint i = 0; i < N * T; ++i) sums.v[i] = 0.0f;
        for (uint first = ctx.lane(); first < pieces; first += 32 * P) {
            if (first >= 32 * P) raws = raws_of<D, N, P>(part.format, rows, first);
#pragma unroll
            for (uint i = 0; i < P; ++i) {
                const uint p = first + 32 * i;
                if (p >= pieces) break;
                Raw own[N];
#pragma unroll
                for (uint n = 0; n < N; ++n) own[n] = expanded<D>(raws.raw[n][i]);
#pragma unroll
                for (uint t = 0; t < T; ++t) {
                    if (t >= count) break;
                    const LocalActivations x = {words + t * pair_words(cols), scales + t * (cols / 16)};
                    const Chunk k = expanded_chunk<D>(x, p);
#pragma unroll
                    for (uint n = 0; n < N; ++n) sums.v[t * N + n] += expanded_dot<D>(own[n], k, p);
                }
            }
        }
        // What is made next is read meanwhile.
        if (row + N < end) raws = raws_of<D, N, P>(part.format, rows_at<N>(part, b.weights, row + N), ctx.lane());
        float sum = product_of(team_sums<N * T>(ctx, sums, 32), factor);
        const uint to = row + which;
        if (ctx.lane() % LANES != 0 || to >= end || token >= count) continue;
        const ulong at = (ulong)token * part.rows + to;
        if (part.bias != NONE) sum += vector_at(b.weights, part.bias)[to];
        if (has_residual) sum += b.residual[at];
        own.out[at] = sum;
    }
}

template <uint D>
DEVICE void joint_part(CTX, const JointProductsConstants& c, const OwnPart& own, const JointProductBuffers& b,
                       uint* words) {
    const uint cols = own.part.format.cols, shares = ctx.groups_x();
    const uint each = (c.tokens + shares - 1) / shares, first = ctx.group_x() * each;
    if (first >= c.tokens) return;
    const uint count = min(each, c.tokens - first);
    float* const scales = (float*)(words + each * pair_words(cols));
    OwnPart mine = own;
    mine.out += (ulong)first * own.part.rows;
    const JointProductBuffers from = {b.weights, b.bytes + (ulong)first * cols, b.scales + (ulong)first * (cols / 16),
                                      b.factors + first, b.residual + (ulong)first * own.part.rows};
    const uint pieces = pieces_of<D>(own.part.format);
    // Two of long rows where a warp has several: activations are read for each, which takes longer than the weights.
    const bool has_two = own.part.span > 1;
    if (pieces <= 32 || (!small_pieces<D>() && has_two)) joint_rows<D, 2, 1>(ctx, mine, from, count, c.has_residual, words, scales);
    else if (takes_several<D>() && has_two)
        joint_rows<D, 2, takes_several<D>() ? 2 : 1>(ctx, mine, from, count, c.has_residual, words, scales);
    else if (in_three_turns<D>(pieces)) joint_rows<D, 1, 3>(ctx, mine, from, count, c.has_residual, words, scales);
    else joint_rows<D, 1, 2>(ctx, mine, from, count, c.has_residual, words, scales);
}

// x (tokens, cols), in eight bits with a factor each, · weightᵀ + bias + residual → out (tokens, rows), of up to three weights
// of one width: a warp makes `span` outputs of a share of the tokens. Dynamic memory: their activations. Grid: (shares, groups of
// all parts).
#define JOINT_PRODUCTS(name, ...)                                                                                      \
    KERNEL_AHEAD(joint_products_##name, JointProductsConstants, (const uchar, weights), (const uchar, bytes),          \
                 (const float, scales), (const float, factors), (const float, residual), (float, out0), (float, out1), \
                 (float, out2)) {                                                                                      \
        ASKED_MEMORY(uint, words);                                                                                     \
        const JointProductBuffers b = {weights, bytes, scales, factors, residual};                                     \
        OwnPart own = {c.parts[0], out0, ctx.group_y()};                                                               \
        if (own.group >= own.part.groups) own = {c.parts[1], out1, own.group - own.part.groups};                       \
        if (own.group >= own.part.groups) own = {c.parts[2], out2, own.group - own.part.groups};                       \
        __VA_ARGS__                                                                                                    \
    }
#define JOINT_OF_ONE(name, D, code, few, ...) \
    IF_BYTES_##few(JOINT_PRODUCTS(name, joint_part<D>(ctx, c, own, b, words);))

ENCODINGS(JOINT_OF_ONE)
// Of weights in several encodings of blocks of 256, as most files have them: the next kernel is twice as much code, and takes
// longer for it.
JOINT_PRODUCTS(k_quants, {
    switch (own.part.format.kind & 255) {
    case Q4_K: return joint_part<Q4_K>(ctx, c, own, b, words);
    case Q5_K: return joint_part<Q5_K>(ctx, c, own, b, words);
    default: return joint_part<Q6_K>(ctx, c, own, b, words);
    }
})
// Of weights in several encodings: those that `products_mixed` has.
JOINT_PRODUCTS(mixed, {
    const uint bits = own.part.format.kind >> 16 & 15;
    switch (own.part.format.kind & 255) {
    case Q4_K: return joint_part<Q4_K>(ctx, c, own, b, words);
    case Q5_K: return joint_part<Q5_K>(ctx, c, own, b, words);
    case Q6_K: return joint_part<Q6_K>(ctx, c, own, b, words);
    case Q8_0: return joint_part<Q8_0>(ctx, c, own, b, words);
    }
    if (bits == 4) joint_part<AFFINE4>(ctx, c, own, b, words);
    else joint_part<AFFINE8>(ctx, c, own, b, words);
})

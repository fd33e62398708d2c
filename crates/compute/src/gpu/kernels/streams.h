// Parallel residual streams: hyper-connections and gated streams. x (rows, streams · width).
#include "dialect.h"

CONSTANT uint MAX_STREAMS = 16;

struct HyperConstants {
    // Elements of all streams of a row.
    uint streams, width;
    float norm_eps, floor;
    uint iterations;
    // Whether there are weights of collapsing only, or of collapsing and of adding; else of mixing too.
    uint kind;
    // Largest weight of adding where there are none of mixing.
    float magnitude;
};

// Kinds of hyper-connections.
CONSTANT uint COLLAPSED = 0, INDEPENDENT = 1, MIXED = 2;

// Weights of a hyper-connection from their logits `mix` → out, both (rows, streams · (2 + streams)), without mixing (rows, 2 ·
// streams), or (rows, streams) for collapsing only: see `GraphBuilder::hyper_weights`. A group of 256 threads does a row; a thread has a weight of mixing.
KERNEL(hyper_weights, HyperConstants, (const float, x), (const float, mix), (const float, base), (const float, factors),
       (float, out)) {
    SHARED(float, scratch, 32);
    SHARED(float, mixing, MAX_STREAMS* MAX_STREAMS);
    SHARED(float, divisors, MAX_STREAMS);
    const uint n = c.streams, own = ctx.thread(), plain = c.kind == COLLAPSED ? n : 2 * n;
    const uint weights = c.kind == MIXED ? n * (2 + n) : plain;
    const ulong row = ctx.group_x();
    float squares = 0.0f;
    for (uint i = own; i < c.width; i += ctx.threads()) squares += x[row * c.width + i] * x[row * c.width + i];
    const float norm = 1.0f / sqrt_of(group_sum(ctx, squares, scratch) / (float)c.width + c.norm_eps);
    if (own < plain) {
        const float logit = mix[row * weights + own] * norm * factors[own / n] + base[own];
        const float weight = own < n               ? sigmoid(logit) + c.floor
                           : c.kind == INDEPENDENT ? c.magnitude * sigmoid(logit) + c.floor
                                                   : 2.0f * sigmoid(logit);
        out[row * weights + own] = weight;
    }
    if (c.kind != MIXED) return;
    // From stream to stream.
    const uint from = own / n, into = own % n, at = 2 * n + own;
    const bool active = own < n * n;
    if (active) mixing[own] = mix[row * weights + at] * norm * factors[2] + base[at];
    barrier(ctx);
    float best = -infinity(), sum = 0.0f, weight = 0.0f;
    for (uint i = 0; i < n && active; ++i) {
        const float logit = mixing[from * n + i];
        best = logit > best ? logit : best;
    }
    for (uint i = 0; i < n && active; ++i) sum += exp_of(mixing[from * n + i] - best);
    if (active) weight = exp_of(mixing[own] - best) / sum + c.floor;
    barrier(ctx);
    if (active) mixing[own] = weight;
    // Sums over the stream that is mixed from and over that mixed into, in turn.
    for (uint side = 1; side < 2 * (c.iterations > 0 ? c.iterations : 1); ++side) {
        barrier(ctx);
        if (own < n) {
            float total = 0.0f;
            for (uint i = 0; i < n; ++i) total += side % 2 == 1 ? mixing[i * n + own] : mixing[own * n + i];
            divisors[own] = total + c.floor;
        }
        barrier(ctx);
        if (active) mixing[own] = mixing[own] / divisors[side % 2 == 1 ? into : from];
    }
    if (active) out[row * weights + at] = mixing[own];
}

struct StreamConstants {
    // Elements of the result in all, streams, and the width of one.
    uint count, streams, width;
    // Elements of a row of weights.
    uint weights;
};

// Σ over streams of weight · stream → out (rows, width).
KERNEL(hyper_collapse, StreamConstants, (const float, x), (const float, weights), (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i >= c.count) return;
    const ulong row = i / c.width, column = i % c.width;
    float sum = 0.0f;
    for (uint s = 0; s < c.streams; ++s) {
        sum += weights[row * c.weights + s] * x[(row * c.streams + s) * c.width + column];
    }
    out[i] = sum;
}

// The streams after a block (rows, width): its result times its weight of adding, plus the mixture of all, or the stream
// itself where there are no weights of mixing → out (rows, streams · width).
KERNEL(hyper_expand, StreamConstants, (const float, x), (const float, block), (const float, weights), (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i >= c.count) return;
    const uint n = c.streams, column = i % c.width, into = i / c.width % n;
    const ulong row = i / (c.width * n);
    const GPTR(const float) own = weights + row * c.weights;
    float sum = 0.0f;
    if (c.weights == 2 * n) sum = x[i];
    else
        for (uint from = 0; from < n; ++from)
            sum += own[(2 + from) * n + into] * x[(row * n + from) * c.width + column];
    out[i] = sum + own[n + into] * block[row * c.width + column];
}

// Mean over streams of sigmoid(gate) ⊙ stream → out (rows, width).
KERNEL(gated_mean, StreamConstants, (const float, x), (const float, gate), (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i >= c.count) return;
    const ulong row = i / c.width, column = i % c.width;
    float sum = 0.0f;
    for (uint s = 0; s < c.streams; ++s) {
        const ulong at = (row * c.streams + s) * c.width + column;
        sum += x[at] * sigmoid(gate[at]);
    }
    out[i] = sum / (float)c.streams;
}

// The streams with 2 · sigmoid(logit / streams) · block (rows, width) added to each → out; logits (rows, streams).
KERNEL(stream_add, StreamConstants, (const float, x), (const float, block), (const float, logits), (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i >= c.count) return;
    const ulong row = i / (c.width * c.streams);
    const float logit = logits[i / c.width];
    out[i] = x[i] + 2.0f * sigmoid(logit / (float)c.streams) * block[row * c.width + i % c.width];
}

// For each stream the value (rows, width), gated by how well its key and its query fit → out (rows, streams · width). A
// group does a stream. Grid: (streams, rows).
KERNEL(stream_gate, StreamConstants, (const float, keys), (const float, queries), (const float, value), (float, out)) {
    SHARED(float, scratch, 32);
    const ulong row = ctx.group_y(), at = (row * c.streams + ctx.group_x()) * c.width;
    float dot = 0.0f;
    for (uint i = ctx.thread(); i < c.width; i += ctx.threads()) dot += keys[at + i] * queries[at + i];
    const float score = group_sum(ctx, dot, scratch) / sqrt_of((float)c.width), size = abs_of(score);
    const float root = sqrt_of(size < 1e-6f ? 1e-6f : size);
    const float gate = sigmoid(score > 0.0f ? root : score < 0.0f ? -root : score);
    for (uint i = ctx.thread(); i < c.width; i += ctx.threads()) out[at + i] = gate * value[row * c.width + i];
}

// Inputs of a dispatch that mixes values: logits of all terms, then as many values as find room.
CONSTANT uint MIX_INPUTS = 15;

struct MixConstants {
    // Terms in all, the first one whose value is here, and how many are.
    uint terms, first, values;
    uint width;
};

// Σ of values (rows, width), weighted by the softmax over all terms' logits (rows), added to what earlier terms make → out (rows,
// width), an element a thread. Grid: (rows, width / threads).
KERNEL(softmax_mix, MixConstants, (const float, x0), (const float, x1), (const float, x2), (const float, x3),
       (const float, x4), (const float, x5), (const float, x6), (const float, x7), (const float, x8), (const float, x9),
       (const float, x10), (const float, x11), (const float, x12), (const float, x13), (const float, x14), (float, out)) {
    SHARED(float, weights, MIX_INPUTS);
    const uint row = ctx.group_x(), column = ctx.group_y() * ctx.threads() + ctx.thread();
    const GPTR(const float) inputs[MIX_INPUTS] = {x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14};
    if (ctx.thread() == 0) {
        float logits[MIX_INPUTS];
        float best = -infinity(), total = 0.0f;
#pragma unroll
        for (uint i = 0; i < MIX_INPUTS; ++i) {
            logits[i] = i < c.terms ? (float)inputs[i][row] : -infinity();
            best = logits[i] > best ? logits[i] : best;
        }
#pragma unroll
        for (uint i = 0; i < MIX_INPUTS; ++i) {
            logits[i] = exp_of(logits[i] - best);
            total += logits[i];
        }
#pragma unroll
        for (uint i = 0; i < MIX_INPUTS; ++i) weights[i] = logits[i] / total;
    }
    barrier(ctx);
    if (column >= c.width) return;
    const ulong at = (ulong)row * c.width + column;
    float sum = c.first > 0 ? (float)out[at] : 0.0f;
#pragma unroll
    for (uint i = 0; i < MIX_INPUTS; ++i) {
        if (i >= c.terms && i < c.terms + c.values) sum = fma_of(weights[c.first + i - c.terms], inputs[i][at], sum);
    }
    out[at] = sum;
}

// What encoders of pictures have beside other graphs: attention of rows to all rows of their sequence, blocks of rows, and
// operations on single elements.
#include "activate.h"
#include "sequences.h"

struct StandardizeConstants {
    // Elements in all, and those of a row.
    uint count, width;
};

// (x − mean) · scale, column by column → out.
KERNEL(standardize, StandardizeConstants, (const float, x), (const float, mean), (const float, scale), (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i < c.count) out[i] = (x[i] - mean[i % c.width]) * scale[i % c.width];
}

struct LimitsConstants {
    uint count;
    float least, most;
};

// Elements within two limits → out. NaN stays NaN.
KERNEL(clamp_between, LimitsConstants, (const float, x), (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i < c.count) out[i] = x[i] < c.least ? c.least : x[i] > c.most ? c.most : (float)x[i];
}

struct GeluConstants {
    uint count;
    // Whether it is the form with the error function; else that with tanh.
    uint erf;
};

// 1 − erf(x) for x ≥ 0 to 1.2e-7 of itself: the Chebyshev fit of Press et al., Numerical Recipes, `erfcc`.
DEVICE float upper_tail(float x) {
    const float t = quotient(1.0f, 1.0f + 0.5f * x);
    float p = fma_of(t, 0.17087277f, -0.82215223f);
    p = fma_of(t, p, 1.48851587f);
    p = fma_of(t, p, -1.13520398f);
    p = fma_of(t, p, 0.27886807f);
    p = fma_of(t, p, -0.18628806f);
    p = fma_of(t, p, 0.09678418f);
    p = fma_of(t, p, 0.37409196f);
    p = fma_of(t, p, 1.00002368f);
    return t * exponential(fma_of(-x, x, fma_of(t, p, -1.26551223f)));
}

// gelu(x) (Hendrycks & Gimpel 2016) → out.
KERNEL(gelu_form, GeluConstants, (const float, x), (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i >= c.count) return;
    const float v = x[i], tail = 0.5f * upper_tail(0.70710678f * abs_of(v));
    out[i] = !c.erf ? gelu(v) : v * (v < 0.0f ? tail : 1.0f - tail);
}

struct BlockRowsConstants {
    // Elements of the result in all, those of a row of x, rows of a block.
    uint count, width, rows;
};

// The block that each row is in, `rows` rows of its sequence side by side with zeros behind the last one → out. `owners` are
// the rows' sequences.
KERNEL(block_rows, BlockRowsConstants, (const float, x), (const uint, owners), (const Sequence, sequences),
       (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread(), each = c.width * c.rows;
    if (i >= c.count) return;
    const uint row = i / each;
    const Sequence s = sequences[owners[row]];
    const uint local = row - s.first_row, from = local - local % c.rows + i % each / c.width;
    out[i] = from < s.rows ? (float)x[(ulong)(s.first_row + from) * c.width + i % c.width] : 0.0f;
}

// Queries and keys of a tile, channels whose products are made at once, keys whose values are added at once, and the most
// channels of a head, of which a thread has every sixteenth.
CONSTANT uint ROWS = 64, LINE = 65, CHANNELS = 16, VALUE_KEYS = 16, MOST_CHANNELS = 128, OWN_CHANNELS = 8;

struct BidirectionalConstants {
    // Channels of a row, and of a head.
    uint width, dim;
    float scale;
};

// Attention of every row to all rows of its sequence: q, k, v (rows, heads · dim) → out, all alike. A group of 256 threads
// makes 64 rows of a head, 64 keys at a time, with the softmax over all of them (Milakov & Gimelshein 2018). A thread has
// scores of rows thread / 16 + 16a with keys thread % 16 + 16b, and channels thread % 16 + 16n of the same rows. Keys come in
// order, whatever else is in the batch. Grid: (rows of the batch / 64, heads, sequences).
KERNEL(bidirectional_attention, BidirectionalConstants, (const float, q), (const float, k), (const float, v),
       (const Sequence, sequences), (float, out)) {
    // Channels of queries and keys, or values; weights of keys.
    SHARED(float, part, 2 * CHANNELS * LINE);
    SHARED(float, weights, ROWS * LINE);
    const Sequence s = sequences[ctx.group_z()];
    const uint row0 = ctx.group_x() * ROWS, first = ctx.group_y() * c.dim;
    if (row0 >= s.rows) return;
    const uint x = ctx.thread() % 16, y = ctx.thread() / 16, parts = (c.dim + 15) / 16;
    float sums[4][OWN_CHANNELS], best[4], total[4];
#pragma unroll
    for (uint a = 0; a < 4; ++a) {
        best[a] = -infinity();
        total[a] = 0.0f;
#pragma unroll
        for (uint n = 0; n < OWN_CHANNELS; ++n) sums[a][n] = 0.0f;
    }
    for (uint key0 = 0; key0 < s.rows; key0 += ROWS) {
        float scores[4][4];
#pragma unroll
        for (uint a = 0; a < 4; ++a)
#pragma unroll
            for (uint b = 0; b < 4; ++b) scores[a][b] = 0.0f;
        for (uint d0 = 0; d0 < c.dim; d0 += CHANNELS) {
            for (uint i = ctx.thread(); i < 2 * ROWS * CHANNELS; i += ctx.threads()) {
                const uint side = i / (ROWS * CHANNELS), own = i / CHANNELS % ROWS, d = i % CHANNELS;
                const uint row = (side == 0 ? row0 : key0) + own;
                const bool has = row < s.rows && d0 + d < c.dim;
                const ulong at = (ulong)(s.first_row + row) * c.width + first + d0 + d;
                float value = 0.0f;
                if (has) value = side == 0 ? q[at] * c.scale : (float)k[at];
                part[(side * CHANNELS + d) * LINE + own] = value;
            }
            barrier(ctx);
#pragma unroll 4
            for (uint d = 0; d < CHANNELS; ++d) {
                float own[4], keys[4];
#pragma unroll
                for (uint a = 0; a < 4; ++a) {
                    own[a] = part[d * LINE + y + 16 * a];
                    keys[a] = part[(CHANNELS + d) * LINE + x + 16 * a];
                }
#pragma unroll
                for (uint a = 0; a < 4; ++a)
#pragma unroll
                    for (uint b = 0; b < 4; ++b) scores[a][b] = fma_of(own[a], keys[b], scores[a][b]);
            }
            barrier(ctx);
        }
#pragma unroll
        for (uint a = 0; a < 4; ++a) {
            float most = best[a];
#pragma unroll
            for (uint b = 0; b < 4; ++b) {
                if (key0 + x + 16 * b >= s.rows) scores[a][b] = -infinity();
                most = scores[a][b] > most ? scores[a][b] : most;
            }
            // The sixteen threads of a row are neighbours.
            for (uint mask = 8; mask > 0; mask /= 2) {
                const float other = lane_xor(ctx, most, mask);
                most = other > most ? other : most;
            }
            const float factor = most > best[a] ? exp_of(best[a] - most) : 1.0f;
            best[a] = most;
            float sum = 0.0f;
#pragma unroll
            for (uint b = 0; b < 4; ++b) {
                const bool seen = key0 + x + 16 * b < s.rows;
                const float weight = seen ? exp_of(scores[a][b] - most) : 0.0f;
                weights[(y + 16 * a) * LINE + x + 16 * b] = weight;
                sum += weight;
            }
            for (uint mask = 8; mask > 0; mask /= 2) sum += lane_xor(ctx, sum, mask);
            total[a] = total[a] * factor + sum;
#pragma unroll
            for (uint n = 0; n < OWN_CHANNELS; ++n) sums[a][n] *= factor;
        }
        for (uint from = 0; from < ROWS && key0 + from < s.rows; from += VALUE_KEYS) {
            // Also the weights.
            barrier(ctx);
            for (uint i = ctx.thread(); i < VALUE_KEYS * 16 * parts; i += ctx.threads()) {
                const uint key = i / (16 * parts), d = i % (16 * parts), row = key0 + from + key;
                const ulong at = (ulong)(s.first_row + row) * c.width + first + d;
                part[key * MOST_CHANNELS + d] = row < s.rows && d < c.dim ? (float)v[at] : 0.0f;
            }
            barrier(ctx);
#pragma unroll 2
            for (uint key = 0; key < VALUE_KEYS; ++key) {
                float own[4];
#pragma unroll
                for (uint a = 0; a < 4; ++a) own[a] = weights[(y + 16 * a) * LINE + from + key];
#pragma unroll
                for (uint n = 0; n < OWN_CHANNELS; ++n) {
                    if (n >= parts) continue;
                    const float value = part[key * MOST_CHANNELS + x + 16 * n];
#pragma unroll
                    for (uint a = 0; a < 4; ++a) sums[a][n] = fma_of(own[a], value, sums[a][n]);
                }
            }
        }
        barrier(ctx);
    }
#pragma unroll
    for (uint a = 0; a < 4; ++a) {
        const uint row = row0 + y + 16 * a;
        if (row >= s.rows) continue;
#pragma unroll
        for (uint n = 0; n < OWN_CHANNELS; ++n) {
            const uint d = x + 16 * n;
            if (d < c.dim) out[(ulong)(s.first_row + row) * c.width + first + d] = sums[a][n] / total[a];
        }
    }
}

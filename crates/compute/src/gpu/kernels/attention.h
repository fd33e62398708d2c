// Causal attention over paged keys and values: grouped queries, and latents.
//
// A cache is (pages, heads, PAGE, dim). A row of `places` says where a row of the batch is: its position, and where its
// sequence's page numbers begin in `pages`.
#include "dialect.h"

CONSTANT uint PAGE = 64;
// Query heads that a group handles, and the most channels of a key.
CONSTANT uint QUERIES = 8, MAX_DIM = 640;

struct Place {
    uint position, first_page;
};

DEVICE ulong place_of(GPTR(const uint) pages, const Place at, uint position, uint heads, uint head) {
    const ulong page = pages[at.first_page + position / PAGE];
    return (page * heads + head) * PAGE + position % PAGE;
}

DEVICE float cached(GPTR(const uchar) cache, ulong index, uint is_f32) {
    return is_f32 ? GCAST(const float, cache)[index] : f16_to_f32(GCAST(const ushort, cache)[index]);
}

DEVICE void store_cached(GPTR(uchar) cache, ulong index, float v, uint is_f32) {
    if (is_f32) GCAST(float, cache)[index] = v;
    else GCAST(ushort, cache)[index] = f32_to_f16(v);
}

struct AppendConstants {
    // Heads of the cache, its channels, and the first and number of those that are written.
    uint heads, dim, start, len;
    // Whether the cache is f32, else f16.
    uint is_f32;
};

// x (rows, heads · len) → channels start..start + len of the cache at each row's position. A group does one row.
KERNEL(append, AppendConstants, (const float, x), (const Place, places), (const uint, pages), (uchar, cache)) {
    const uint row = ctx.group_x(), width = c.heads * c.len;
    const Place at = places[row];
    for (uint i = ctx.thread(); i < width; i += ctx.threads()) {
        const ulong to = place_of(pages, at, at.position, c.heads, i / c.len) * c.dim + c.start + i % c.len;
        store_cached(cache, to, x[(ulong)row * width + i], c.is_f32);
    }
}

struct AttendConstants {
    // Query heads, key heads, and groups of at most QUERIES query heads that share a key head.
    uint heads, kv_heads, chunks;
    // Channels of a key and of a value, and of a cached row of each.
    uint key_dim, value_dim, key_stride, value_stride;
    float scale;
    // Keys seen, at most: 0 for all.
    uint window;
    uint is_f32;
    // Parts that each row's keys are divided into.
    uint splits;
    // Whether `sinks` holds a logit for each head.
    uint has_sinks;
};

// Attention of queries q (rows, heads · key_dim), 128 threads a group. Grid: (kv_heads · chunks, splits, rows).
// With one split, `out` (rows, heads · value_dim) is the result. With more, `out` (rows, heads, splits, value_dim) is
// the sum of values weighted by e^(score − max), and `stats` (rows, heads, splits, 2) is that max and the sum of weights.
KERNEL(attend, AttendConstants, (const float, q), (const uchar, keys), (const uchar, values), (const Place, places),
       (const uint, pages), (const float, sinks), (float, stats), (float, out)) {
    SHARED(float, query, QUERIES * MAX_DIM);
    SHARED(float, scores, 128 * QUERIES);
    SHARED(float, factors, QUERIES);
    SHARED(float, maxima, QUERIES);
    SHARED(float, sums, QUERIES);
    const uint row = ctx.group_z(), split = ctx.group_y();
    const uint kv_head = ctx.group_x() / c.chunks, group = c.heads / c.kv_heads;
    const uint head0 = kv_head * group + ctx.group_x() % c.chunks * QUERIES;
    const uint left = (kv_head + 1) * group - head0;
    const uint queries = left < QUERIES ? left : QUERIES;
    const Place at = places[row];
    const uint seen = at.position + 1;
    const uint first = c.window != 0 && seen > c.window ? seen - c.window : 0;
    const uint part = (seen - first + c.splits - 1) / c.splits;
    const uint begin = first + split * part;
    const uint end = begin + part < seen ? begin + part : seen;

    for (uint i = ctx.thread(); i < queries * c.key_dim; i += ctx.threads()) {
        query[i] = q[((ulong)row * c.heads + head0) * c.key_dim + i] * c.scale;
    }
    if (ctx.thread() < QUERIES) {
        const bool sink = c.has_sinks && split == 0 && ctx.thread() < queries;
        maxima[ctx.thread()] = sink ? (float)sinks[head0 + ctx.thread()] : -infinity();
        sums[ctx.thread()] = sink ? 1.0f : 0.0f;
    }
    // Channels thread, thread + 128, … of each query's value.
    float mixed[QUERIES][4];
    for (uint h = 0; h < QUERIES; ++h) for (uint n = 0; n < 4; ++n) mixed[h][n] = 0.0f;
    barrier(ctx);

    for (uint tile = begin; tile < end; tile += 128) {
        // A thread scores one key.
        const uint position = tile + ctx.thread();
        if (position < end) {
            const ulong key = place_of(pages, at, position, c.kv_heads, kv_head) * c.key_stride;
            float dots[QUERIES];
            for (uint h = 0; h < QUERIES; ++h) dots[h] = 0.0f;
            for (uint d = 0; d < c.key_dim; ++d) {
                const float k = cached(keys, key + d, c.is_f32);
                for (uint h = 0; h < queries; ++h) dots[h] += query[h * c.key_dim + d] * k;
            }
            for (uint h = 0; h < queries; ++h) scores[h * 128 + ctx.thread()] = dots[h];
        }
        barrier(ctx);
        const uint count = end - tile < 128 ? end - tile : 128;
        // A warp turns the scores of every fourth query into weights.
        for (uint h = ctx.warp(); h < queries; h += 4) {
            float best = -infinity();
            bool poisoned = false;
            for (uint i = ctx.lane(); i < count; i += 32) {
                const float s = scores[h * 128 + i];
                best = s > best ? s : best;
                poisoned = poisoned || s != s;
            }
            // Read by the lane that writes it.
            const float old = lane_read(ctx, ctx.lane() == 0 ? (float)maxima[h] : 0.0f, 0);
            best = lane_max(ctx, best > old ? best : old);
            float sum = poisoned ? not_a_number() : 0.0f;
            for (uint i = ctx.lane(); i < count; i += 32) {
                const float weight = exp_of(scores[h * 128 + i] - best);
                scores[h * 128 + i] = weight;
                sum += weight;
            }
            sum = lane_sum(ctx, sum);
            if (ctx.lane() == 0) {
                factors[h] = best > old ? exp_of(old - best) : 1.0f;
                sums[h] = sums[h] * factors[h] + sum;
                maxima[h] = best;
            }
        }
        barrier(ctx);
        for (uint h = 0; h < queries; ++h) for (uint n = 0; n < 4; ++n) mixed[h][n] *= factors[h];
        for (uint i = 0; i < count; ++i) {
            const ulong value = place_of(pages, at, tile + i, c.kv_heads, kv_head) * c.value_stride;
            for (uint n = 0; n < 4; ++n) {
                const uint d = ctx.thread() + 128 * n;
                if (d >= c.value_dim) break;
                const float v = cached(values, value + d, c.is_f32);
                for (uint h = 0; h < queries; ++h) mixed[h][n] += scores[h * 128 + i] * v;
            }
        }
        barrier(ctx);
    }

    for (uint h = 0; h < queries; ++h) {
        const ulong head = (ulong)row * c.heads + head0 + h;
        const float divisor = c.splits == 1 ? (float)sums[h] : 1.0f;
        for (uint n = 0; n < 4; ++n) {
            const uint d = ctx.thread() + 128 * n;
            if (d < c.value_dim) out[(head * c.splits + split) * c.value_dim + d] = mixed[h][n] / divisor;
        }
        if (c.splits > 1 && ctx.thread() == 0) {
            stats[(head * c.splits + split) * 2] = maxima[h];
            stats[(head * c.splits + split) * 2 + 1] = sums[h];
        }
    }
}

struct CombineConstants {
    uint splits, value_dim;
};

// Puts the splits of each head together: parts (heads, splits, value_dim) and stats (heads, splits, 2) → out (heads,
// value_dim), heads being those of all rows. A group does one head.
KERNEL(combine, CombineConstants, (const float, parts), (const float, stats), (float, out)) {
    const ulong head = ctx.group_x();
    float best = -infinity(), sum = 0.0f;
    for (uint s = 0; s < c.splits; ++s) {
        const float m = stats[(head * c.splits + s) * 2];
        best = m > best ? m : best;
    }
    for (uint s = 0; s < c.splits; ++s) {
        const float m = stats[(head * c.splits + s) * 2];
        // A split without keys has weight 0; NaN passes.
        sum += m == -infinity() ? (float)stats[(head * c.splits + s) * 2 + 1] : stats[(head * c.splits + s) * 2 + 1] * exp_of(m - best);
    }
    for (uint d = ctx.thread(); d < c.value_dim; d += ctx.threads()) {
        float mixed = 0.0f;
        for (uint s = 0; s < c.splits; ++s) {
            const float m = stats[(head * c.splits + s) * 2];
            const float part = parts[(head * c.splits + s) * c.value_dim + d];
            mixed += m == -infinity() ? part : part * exp_of(m - best);
        }
        out[head * c.value_dim + d] = mixed / sum;
    }
}

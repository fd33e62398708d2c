// Causal attention over paged keys and values: grouped queries, and latents.
#include "cache.h"

// Query heads that a group handles, and the most channels of a key.
CONSTANT uint QUERIES = 8, MAX_DIM = 640;

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
#pragma unroll
    for (uint h = 0; h < QUERIES; ++h) {
#pragma unroll
        for (uint n = 0; n < 4; ++n) mixed[h][n] = 0.0f;
    }
    // Whether keys can be loaded eight at a time.
    const bool wide = !c.is_f32 && c.key_dim % 8 == 0 && c.key_stride % 8 == 0;
    barrier(ctx);

    for (uint tile = begin; tile < end; tile += 128) {
        // A thread scores one key.
        const uint position = tile + ctx.thread();
        if (position < end) {
            const ulong key = place_of(pages, at, position, c.kv_heads, kv_head) * c.key_stride;
            float dots[QUERIES];
#pragma unroll
            for (uint h = 0; h < QUERIES; ++h) dots[h] = 0.0f;
            if (wide) {
                const GPTR(const uchar) from = keys + key * 2;
                for (uint d = 0; d < c.key_dim; d += 8) {
                    const Word4 w = load_u32x4(from, 2 * d);
                    const float k0 = f16_to_f32((ushort)w.x), k1 = f16_to_f32((ushort)(w.x >> 16));
                    const float k2 = f16_to_f32((ushort)w.y), k3 = f16_to_f32((ushort)(w.y >> 16));
                    const float k4 = f16_to_f32((ushort)w.z), k5 = f16_to_f32((ushort)(w.z >> 16));
                    const float k6 = f16_to_f32((ushort)w.w), k7 = f16_to_f32((ushort)(w.w >> 16));
#pragma unroll
                    for (uint h = 0; h < QUERIES; ++h) {
                        if (h >= queries) continue;
                        const Float4 a = load_f32x4(query, h * c.key_dim + d);
                        const Float4 b = load_f32x4(query, h * c.key_dim + d + 4);
                        dots[h] += a.x * k0 + a.y * k1 + a.z * k2 + a.w * k3 + b.x * k4 + b.y * k5 + b.z * k6 + b.w * k7;
                    }
                }
            } else {
                for (uint d = 0; d < c.key_dim; ++d) {
                    const float k = cached(keys, key + d, c.is_f32);
#pragma unroll
                    for (uint h = 0; h < QUERIES; ++h) {
                        if (h < queries) dots[h] += query[h * c.key_dim + d] * k;
                    }
                }
            }
#pragma unroll
            for (uint h = 0; h < QUERIES; ++h) {
                if (h < queries) scores[h * 128 + ctx.thread()] = dots[h];
            }
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
#pragma unroll
        for (uint h = 0; h < QUERIES; ++h) {
            if (h >= queries) continue;
            const float factor = factors[h];
#pragma unroll
            for (uint n = 0; n < 4; ++n) mixed[h][n] *= factor;
        }
        for (uint i = 0; i < count;) {
            // As far as the page goes.
            const uint left = PAGE - (tile + i) % PAGE, stop = i + left < count ? i + left : count;
            ulong value = place_of(pages, at, tile + i, c.kv_heads, kv_head) * c.value_stride + ctx.thread();
#pragma unroll 4
            for (; i < stop; ++i, value += c.value_stride) {
#pragma unroll
                for (uint n = 0; n < 4; ++n) {
                    if (ctx.thread() + 128 * n >= c.value_dim) continue;
                    const float v = cached(values, value + 128 * n, c.is_f32);
#pragma unroll
                    for (uint h = 0; h < QUERIES; ++h) {
                        if (h < queries) mixed[h][n] += scores[h * 128 + i] * v;
                    }
                }
            }
        }
        barrier(ctx);
    }

#pragma unroll
    for (uint h = 0; h < QUERIES; ++h) {
        if (h >= queries) continue;
        const ulong head = (ulong)row * c.heads + head0 + h;
        const float divisor = c.splits == 1 ? (float)sums[h] : 1.0f;
#pragma unroll
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
// value_dim), heads being those of all rows. A split without keys counts nothing; NaN passes. A group does one head.
KERNEL(combine, CombineConstants, (const float, parts), (const float, stats), (float, out)) {
    // (4, 32): parts of sums.
    SHARED(float, sums, 128);
    constexpr uint AT_ONCE = 8;
    const ulong head = ctx.group_x();
    const uint channel = ctx.group_y() * 32 + ctx.lane(), each = (c.splits + 3) / 4, begin = ctx.warp() * each;
    const uint end = begin + each < c.splits ? begin + each : c.splits;
    const GPTR(const float) from = parts + head * c.splits * c.value_dim + (channel < c.value_dim ? channel : 0);
    // The first ones are on their way while it is found out what they count.
    float part[AT_ONCE];
#pragma unroll
    for (uint i = 0; i < AT_ONCE; ++i) part[i] = begin + i < end ? (float)from[(begin + i) * c.value_dim] : 0.0f;
    // What splits `lane` and 32 + lane count.
    float maxima[2], own[2], best = -infinity(), total = 0.0f;
#pragma unroll
    for (uint i = 0; i < 2; ++i) {
        const uint s = ctx.lane() + 32 * i;
        maxima[i] = s < c.splits ? (float)stats[(head * c.splits + s) * 2] : -infinity();
        own[i] = s < c.splits ? (float)stats[(head * c.splits + s) * 2 + 1] : 0.0f;
        best = maxima[i] > best ? maxima[i] : best;
    }
    best = lane_max(ctx, best);
#pragma unroll
    for (uint i = 0; i < 2; ++i) {
        maxima[i] = maxima[i] == -infinity() ? 1.0f : exp_of(maxima[i] - best);
        total += own[i] * maxima[i];
    }
    total = lane_sum(ctx, total);
    float mixed = 0.0f;
    for (uint base = begin; base < end; base += AT_ONCE) {
#pragma unroll
        for (uint i = 0; i < AT_ONCE; ++i) {
            if (base != begin) part[i] = base + i < end ? (float)from[(base + i) * c.value_dim] : 0.0f;
        }
#pragma unroll
        for (uint i = 0; i < AT_ONCE; ++i) {
            const uint s = base + i < end ? base + i : begin;
            mixed += part[i] * lane_read(ctx, s < 32 ? maxima[0] : maxima[1], s % 32);
        }
    }
    sums[ctx.thread()] = mixed;
    barrier(ctx);
    if (ctx.warp() != 0 || channel >= c.value_dim) return;
    mixed = 0.0f;
    for (uint i = 0; i < 4; ++i) mixed += sums[32 * i + ctx.lane()];
    out[head * c.value_dim + channel] = mixed / total;
}

struct PrepareConstants {
    // Query and key heads, channels of a head.
    uint heads, kv_heads, dim;
    // Whether heads of queries and keys are normalised first.
    uint q_norm, k_norm;
    float q_eps, k_eps;
    // Pairs that rotate, and whether channels 2i and 2i + 1 form one; else i and i + pairs.
    uint pairs, interleaved;
    uint is_f32;
};

// Per head: norm and rotation of queries (rows, heads · dim) → out, the same of keys (rows, kv_heads · dim) and values as
// they are → the caches. A group of 32 threads does a head. Grid: (heads + 2 · kv_heads, rows).
KERNEL(prepare, PrepareConstants, (const float, q), (const float, k), (const float, v), (const float, q_weight),
       (const float, k_weight), (const float, angles), (const Place, places), (const uint, pages), (uchar, keys),
       (uchar, values), (float, out)) {
    SHARED(float, head, MAX_DIM);
    const uint index = ctx.group_x(), row = ctx.group_y(), lane = ctx.lane();
    const bool is_query = index < c.heads, is_value = index >= c.heads + c.kv_heads;
    const uint own = is_query ? index : (index - c.heads) % c.kv_heads;
    const GPTR(const float) from = is_query ? q + ((ulong)row * c.heads + own) * c.dim
                                 : is_value ? v + ((ulong)row * c.kv_heads + own) * c.dim
                                            : k + ((ulong)row * c.kv_heads + own) * c.dim;
    const bool normed = is_query ? c.q_norm : !is_value && c.k_norm;
    float factor = 1.0f;
    if (normed) {
        float sum = 0.0f;
        for (uint i = lane; i < c.dim; i += 32) sum += from[i] * from[i];
        sum = lane_sum(ctx, sum);
        factor = 1.0f / sqrt_of(sum / (float)c.dim + (is_query ? c.q_eps : c.k_eps));
    }
    for (uint i = lane; i < c.dim; i += 32) {
        const float weight = !normed ? 1.0f : is_query ? (float)q_weight[i] : (float)k_weight[i];
        head[i] = normed ? from[i] * factor * weight : (float)from[i];
    }
    barrier(ctx);
    const Place at = places[row];
    const ulong to = is_query ? ((ulong)row * c.heads + own) * c.dim
                              : place_of(pages, at, at.position, c.kv_heads, own) * c.dim;
    for (uint i = lane; i < c.dim; i += 32) {
        float result = head[i];
        if (!is_value && i < 2 * c.pairs) {
            const uint pair = c.interleaved ? i / 2 : i % c.pairs;
            const bool second = c.interleaved ? i % 2 == 1 : i >= c.pairs;
            const uint step = c.interleaved ? 1 : c.pairs;
            const ulong angle = ((ulong)row * c.pairs + pair) * 2;
            const float cosine = angles[angle], sine = angles[angle + 1];
            result = second ? result * cosine + head[i - step] * sine : result * cosine - head[i + step] * sine;
        }
        if (is_query) out[to + i] = result;
        else store_cached(is_value ? values : keys, to + i, result, c.is_f32);
    }
}

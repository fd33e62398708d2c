// Causal attention over paged keys and values: grouped queries, and latents.
#include "cached8.h"
#include "quads.h"
#include "quantize.h"
#include "scores.h"
#include "seen.h"
#include "sequences.h"

struct AppendConstants {
    // Heads of the cache, its channels, and the first and number of those that are written.
    uint heads, dim, start, len;
    // What the cache is stored as.
    uint kv_type;
};

// x (rows, heads · len) → channels start..start + len of the cache at each row's position. A group does one row.
KERNEL(append, AppendConstants, (const float, x), (const Place, places), (const uint, pages), (uchar, cache)) {
    const uint row = ctx.group_x(), width = c.heads * c.len;
    const Place at = places[row];
    for (uint i = ctx.thread(); i < width; i += ctx.threads()) {
        const ulong to = place_of(pages, at, at.position, c.heads, i / c.len) * c.dim + c.start + i % c.len;
        store_cached(ctx, cache, to, x[(ulong)row * width + i], c.kv_type);
    }
}

struct AttendConstants {
    // Query heads, key heads, and groups of at most QUERIES query heads that share a key head.
    uint heads, kv_heads, chunks;
    // Channels of a key and of a value, and of a cached row of each.
    uint key_dim, value_dim, key_stride, value_stride;
    float scale;
    // See `first_seen`.
    uint window, chunk;
    uint kv_type;
    // Parts that each row's keys are divided into.
    uint splits;
    // Whether `sinks` holds a logit for each head.
    uint has_sinks;
    // Distances between a query and a key for which `added` holds a number.
    uint extent;
    // Whether it is only of rows that see keys after their own.
    uint ahead;
};

// Attention of queries q (rows, heads · key_dim), 128 threads a group; `added` (rows, heads · extent) to scores of keys that are
// so far behind their query; `sees` (rows): the last positions that rows see which look ahead. Grid: (kv_heads · chunks, splits,
// rows).
// With one split, `out` (rows, heads · value_dim) is the result; with more, see `end_scores`.
KERNEL(attend, AttendConstants, (const float, q), (const uchar, keys), (const uchar, values), (const float, added),
       (const Place, places), (const uint, sees), (const uint, pages), (const float, sinks), (float, stats),
       (float, out)) {
    SCORE_MEMORY(m);
    const uint row = ctx.group_z(), split = ctx.group_y();
    const uint kv_head = ctx.group_x() / c.chunks, group = c.heads / c.kv_heads;
    const uint head0 = kv_head * group + ctx.group_x() % c.chunks * QUERIES;
    const uint left = (kv_head + 1) * group - head0;
    const uint queries = left < QUERIES ? left : QUERIES;
    const Place at = places[row];
    const uint own = at.position + 1, seen = c.ahead ? sees[row] + 1 : own;
    if (c.ahead && seen <= own) return;
    const uint first = first_seen(at.position, c.window, c.chunk);
    const uint part = (seen - first + c.splits - 1) / c.splits;
    const uint begin = first + split * part;
    const uint end = begin + part < seen ? begin + part : seen;
    const ulong head = (ulong)row * c.heads + head0;

    begin_scores(ctx, m, q + head * c.key_dim, queries, c.key_dim, c.scale, sinks + (c.has_sinks ? head0 : 0),
                 c.has_sinks && split == 0);
    Mixed mixed = no_values();
    const bool wide = c.kv_type == KV_F16 && c.key_dim % 8 == 0 && c.key_stride % 8 == 0;
    barrier(ctx);
    for (uint tile = begin; tile < end; tile += KEYS) {
        const uint position = tile + ctx.thread();
        if (position < end) {
            const ulong key = place_of(pages, at, position, c.kv_heads, kv_head) * c.key_stride;
            score_key(ctx, m, keys, key, queries, c.key_dim, wide, c.kv_type);
            const uint distance = at.position - position;
            for (uint h = 0; h < queries && distance < c.extent; ++h) {
                m.scores[h * KEYS + ctx.thread()] += added[(head + h) * c.extent + distance];
            }
        }
        barrier(ctx);
        const uint count = end - tile < KEYS ? end - tile : KEYS;
        weigh_keys(ctx, m, queries, count);
        barrier(ctx);
        mixed = faded(m, mixed, queries);
        for (uint i = 0; i < count;) {
            // As far as the page goes.
            const uint rest = PAGE - (tile + i) % PAGE, stop = i + rest < count ? i + rest : count;
            ulong value = place_of(pages, at, tile + i, c.kv_heads, kv_head) * c.value_stride + ctx.thread();
#pragma unroll 4
            for (; i < stop; ++i, value += c.value_stride) {
                mixed = with_value(ctx, m, mixed, values, value, i, queries, c.value_dim, c.kv_type);
            }
        }
        barrier(ctx);
    }
    end_scores(ctx, m, mixed, head, queries, split, c.splits, c.value_dim, stats, out);
}

struct AttendChosenConstants {
    // Query heads, key heads, heads that share a key head and a choice, and groups of at most QUERIES of these.
    uint heads, kv_heads, share, chunks;
    // Channels of a key and of a value, and of a cached row of each.
    uint key_dim, value_dim, key_stride, value_stride;
    float scale;
    uint kv_type;
    // Parts that each row's keys are divided into.
    uint splits;
    // Whether `sinks` holds a logit for each head.
    uint has_sinks;
    // Choices of a row, columns of one, tokens of a block, and whether those of a block that is not complete are seen too.
    uint groups, top_k, block, tail;
};

// As `attend`, over the tokens that were chosen: `blocks` (rows, groups · top_k), each part ascending, then −1; not a number if
// nothing could be compared, which is then the result. Grid: (heads / share · chunks, splits, rows).
KERNEL(attend_chosen, AttendChosenConstants, (const float, q), (const uchar, keys), (const uchar, values),
       (const float, blocks), (const Place, places), (const uint, pages), (const float, sinks), (float, stats),
       (float, out)) {
    SCORE_MEMORY(m);
    // Where rows of the cache are.
    SHARED(ulong, starts, KEYS);
    const uint row = ctx.group_z(), split = ctx.group_y(),
               head0 = ctx.group_x() / c.chunks * c.share + ctx.group_x() % c.chunks * QUERIES;
    const uint left = (ctx.group_x() / c.chunks + 1) * c.share - head0;
    const uint queries = left < QUERIES ? left : QUERIES;
    const uint kv_head = head0 / (c.heads / c.kv_heads), choice = head0 / (c.heads / c.groups);
    const GPTR(const float) list = blocks + ((ulong)row * c.groups + choice) * c.top_k;
    const Place at = places[row];
    const uint seen = at.position + 1;
    // Blocks of the list, whose last one may go beyond the row.
    uint listed = 0, most = c.top_k;
    while (listed < most) {
        const uint middle = (listed + most) / 2;
        if (list[middle] >= 0.0f) listed = middle + 1;
        else most = middle;
    }
    const uint last = listed == 0 ? 0 : ((uint)(float)list[listed - 1] + 1) * c.block;
    const uint tokens = listed * c.block - (last > seen ? last - seen : 0);
    const uint tail = seen / c.block * c.block, count = tokens + (c.tail ? seen - tail : 0);
    const uint part = (count + c.splits - 1) / c.splits, begin = split * part;
    const uint end = begin + part < count ? begin + part : count;
    const ulong head = (ulong)row * c.heads + head0;

    begin_scores(ctx, m, q + head * c.key_dim, queries, c.key_dim, c.scale, sinks + (c.has_sinks ? head0 : 0),
                 c.has_sinks && split == 0);
    if (ctx.thread() < QUERIES && (list[0] != list[0] || (count == 0 && split == 0))) {
        // Of nothing, zeros.
        m.sums[ctx.thread()] = list[0] != list[0] ? not_a_number() : 1.0f;
    }
    Mixed mixed = no_values();
    const bool wide = c.kv_type == KV_F16 && c.key_dim % 8 == 0 && c.key_stride % 8 == 0;
    barrier(ctx);
    for (uint tile = begin; tile < end; tile += KEYS) {
        const uint i = tile + ctx.thread();
        if (i < end) {
            const uint position =
                i < tokens ? (uint)(float)list[i / c.block] * c.block + i % c.block : tail + i - tokens;
            const ulong start = place_of(pages, at, position, c.kv_heads, kv_head);
            starts[ctx.thread()] = start;
            score_key(ctx, m, keys, start * c.key_stride, queries, c.key_dim, wide, c.kv_type);
        }
        barrier(ctx);
        const uint count_now = end - tile < KEYS ? end - tile : KEYS;
        weigh_keys(ctx, m, queries, count_now);
        barrier(ctx);
        mixed = faded(m, mixed, queries);
        for (uint k = 0; k < count_now; ++k) {
            const ulong value = starts[k] * c.value_stride + ctx.thread();
            mixed = with_value(ctx, m, mixed, values, value, k, queries, c.value_dim, c.kv_type);
        }
        barrier(ctx);
    }
    end_scores(ctx, m, mixed, head, queries, split, c.splits, c.value_dim, stats, out);
}

struct CombineConstants {
    uint splits, value_dim;
    // Whether results are rounded to eight bits too, and heads of a row.
    uint rounds, heads;
};

// Puts the splits of each head together: parts (heads, splits, value_dim) and stats (heads, splits, 2) → out (heads,
// value_dim), heads being those of all rows; rounded as `bytes`, `scales` and `factors` say if `rounds`. A split without keys
// counts nothing; NaN passes. A group does 32 channels of a head.
KERNEL(combine, CombineConstants, (const float, parts), (const float, stats), (float, out), (uchar, bytes), (float, scales),
       (float, factors)) {
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
    const float v = mixed / total;
    const ulong at = head * c.value_dim + channel;
    out[at] = v;
    const RoundedRows rounded = {bytes, scales, factors};
    if (c.rounds) round_block(ctx, v, rounded, at - ctx.lane(), c.heads * c.value_dim);
}

struct PrepareConstants {
    // Query and key heads, channels of a head and of its value.
    uint heads, kv_heads, dim, value_dim;
    // Whether heads of queries and keys are normalised first.
    uint q_norm, k_norm;
    float q_eps, k_eps;
    // Pairs that rotate, and whether channels 2i and 2i + 1 form one; else i and i + pairs.
    uint pairs, interleaved;
    uint kv_type;
    // Whether `out` is f16.
    uint half_out;
};

// Heads that a group of `prepare` does, at most.
CONSTANT uint PREPARED = 8;

// Per head: norm and rotation of queries (rows, heads · dim) → out, the same of keys (rows, kv_heads · dim) and values
// (rows, kv_heads · value_dim) as they are → the caches. A warp does a head. Grid: (heads + 2 · kv_heads by a group's warps, rows).
KERNEL(prepare, PrepareConstants, (const float, q), (const float, k), (const float, v), (const float, q_weight),
       (const float, k_weight), (const float, angles), (const Place, places), (const uint, pages), (uchar, keys),
       (uchar, values), (float, out)) {
    SHARED(float, head, PREPARED* MAX_DIM);
    const uint index = ctx.group_x() * ctx.warps() + ctx.warp(), row = ctx.group_y(), lane = ctx.lane();
    const uint base = ctx.warp() * MAX_DIM;
    const bool is_present = index < c.heads + 2 * c.kv_heads;
    const bool is_query = index < c.heads, is_value = index >= c.heads + c.kv_heads;
    const uint own = !is_present ? 0 : index - (is_query ? 0 : is_value ? c.heads + c.kv_heads : c.heads);
    const uint dim = is_value ? c.value_dim : c.dim;
    const GPTR(const float) from = is_query ? q + ((ulong)row * c.heads + own) * dim
                            : is_value ? v + ((ulong)row * c.kv_heads + own) * dim
                                       : k + ((ulong)row * c.kv_heads + own) * dim;
    const bool normed = is_query ? c.q_norm : !is_value && c.k_norm;
    const Place at = places[row];
    const ulong to =
        is_query ? ((ulong)row * c.heads + own) * dim : place_of(pages, at, at.position, c.kv_heads, own) * dim;
#pragma unroll 4
    for (uint i = lane; i < dim; i += 32) head[base + i] = from[i];
    if (normed) {
        float sum = 0.0f;
#pragma unroll 4
        for (uint i = lane; i < dim; i += 32) sum += head[base + i] * head[base + i];
        sum = lane_sum(ctx, sum);
        const float factor = 1.0f / sqrt_of(sum / (float)dim + (is_query ? c.q_eps : c.k_eps));
        const GPTR(const float) weight = is_query ? q_weight : k_weight;
#pragma unroll 4
        for (uint i = lane; i < dim; i += 32) head[base + i] = head[base + i] * factor * weight[i];
    }
    barrier(ctx);
    if (!is_present) return;
#pragma unroll 4
    for (uint i = lane; i < dim; i += 32) {
        float result = head[base + i];
        if (!is_value && i < 2 * c.pairs) {
            const bool second = c.interleaved ? i % 2 == 1 : i >= c.pairs;
            const uint pair = c.interleaved ? i / 2 : second ? i - c.pairs : i;
            const uint step = c.interleaved ? 1 : c.pairs;
            const ulong angle = ((ulong)row * c.pairs + pair) * 2;
            const float cosine = angles[angle], sine = angles[angle + 1];
            result = second ? result * cosine + head[base + i - step] * sine
                            : result * cosine - head[base + i + step] * sine;
        }
        if (is_query && c.half_out) GCAST(ushort, out)[to + i] = f32_to_f16(result);
        else if (is_query) out[to + i] = result;
        else store_cached(ctx, is_value ? values : keys, to + i, result, c.kv_type);
    }
}

struct PrepareBuffers {
    GPTR(const float) q;
    GPTR(const float) k;
    GPTR(const float) v;
    GPTR(const float) q_weight;
    GPTR(const float) k_weight;
    GPTR(const float) angles;
    GPTR(const Place) places;
    GPTR(const uint) pages;
    GPTR(uchar) keys;
    GPTR(uchar) values;
    GPTR(float) out;
};

// Stores four elements a lane of a cache of Q8_0; eight lanes have a block. Those with nothing `stored` give none.
DEVICE void store_block_quad(CTX, GPTR(uchar) cache, ulong index, Float4 v, bool stored) {
    uint most =
        larger(larger(magnitude_bits(v.x), magnitude_bits(v.y)), larger(magnitude_bits(v.z), magnitude_bits(v.w)));
    most = quad_max(ctx, most);
    most = larger(most, lane_xor(ctx, most, 4u));
    if (!stored) return;
    const ushort scale = block_scale(most);
    const GPTR(ushort) block = GCAST(ushort, cache) + index / KV_BLOCK * KV_BLOCK_PAIRS;
    const uint at = 1 + (uint)(index % KV_BLOCK) / 2;
    block[at] = (ushort)(((uint)block_code(v.x, scale) & 255u) | (uint)block_code(v.y, scale) << 8);
    block[at + 1] = (ushort)(((uint)block_code(v.z, scale) & 255u) | (uint)block_code(v.w, scale) << 8);
    if (at == 1) block[0] = scale;
}

// The same for heads of up to 128 · QUADS channels, fours of which rotate or do not: a lane has channels 4i..4i + 4, and gets what
// they rotate with from another one.
template <uint QUADS>
DEVICE void prepare_by_quads(CTX, const PrepareConstants c, const PrepareBuffers b) {
    const uint index = ctx.group_x() * ctx.warps() + ctx.warp(), row = ctx.group_y();
    if (index >= c.heads + 2 * c.kv_heads) return;
    const bool is_query = index < c.heads, is_value = index >= c.heads + c.kv_heads;
    const uint own = index - (is_query ? 0 : is_value ? c.heads + c.kv_heads : c.heads);
    const uint dim = is_value ? c.value_dim : c.dim, quads = dim / 4;
    const GPTR(const float) from = is_query ? b.q + ((ulong)row * c.heads + own) * dim
                            : is_value ? b.v + ((ulong)row * c.kv_heads + own) * dim
                                       : b.k + ((ulong)row * c.kv_heads + own) * dim;
    const GPTR(const float) turns = b.angles + (ulong)row * c.pairs * 2;
    const bool normed = is_query ? c.q_norm : !is_value && c.k_norm;
    const uint turned = is_value ? 0 : c.pairs / 2, middle = c.pairs / 4;
    Float4 head[QUADS], first[QUADS], second[QUADS];
#pragma unroll
    for (uint n = 0; n < QUADS; ++n) {
        const uint i = ctx.lane() + 32 * n;
        const Float4 none = {0.0f, 0.0f, 0.0f, 0.0f};
        head[n] = none;
        first[n] = none;
        second[n] = none;
        if (i < quads) head[n] = floats4(from, i);
        // Cosines and sines of two pairs, and of the two that follow.
        const uint pair = c.interleaved ? i : 2 * (i < middle ? i : i - middle);
        if (i >= turned) continue;
        first[n] = floats4(turns, pair);
        if (!c.interleaved) second[n] = floats4(turns, pair + 1);
    }
    if (normed) {
        const GPTR(const float) weight = is_query ? b.q_weight : b.k_weight;
        float sum = 0.0f;
#pragma unroll
        for (uint n = 0; n < QUADS; ++n) sum += squares4(head[n]);
        sum = lane_sum(ctx, sum);
        const float factor = 1.0f / sqrt_of(sum / (float)dim + (is_query ? c.q_eps : c.k_eps));
#pragma unroll
        for (uint n = 0; n < QUADS; ++n) {
            const uint i = ctx.lane() + 32 * n;
            if (i < quads) head[n] = scaled4(head[n], factor, floats4(weight, i));
        }
    }
    const Place at = b.places[row];
    const ulong to =
        is_query ? ((ulong)row * c.heads + own) * dim : place_of(b.pages, at, at.position, c.kv_heads, own) * dim;
    Float4 results[QUADS];
#pragma unroll
    for (uint n = 0; n < QUADS; ++n) {
        const uint i = ctx.lane() + 32 * n;
        const Float4 x = head[n], one = first[n], two = second[n];
        if (c.interleaved) {
            Float4 r = {x.x * one.x - x.y * one.y, x.y * one.x + x.x * one.y, x.z * one.z - x.w * one.w,
                        x.w * one.z + x.z * one.w};
            results[n] = x;
            if (i < turned) results[n] = r;
            continue;
        }
        const bool later = i >= middle;
        const uint other = i >= turned ? i : later ? i - middle : i + middle;
        Float4 y = lane_read4(ctx, head[0], other % 32);
#pragma unroll
        for (uint m = 1; m < QUADS; ++m) {
            const Float4 z = lane_read4(ctx, head[m], other % 32);
            if (other / 32 == m) y = z;
        }
        const float sign = later ? 1.0f : -1.0f;
        Float4 r = {x.x * one.x + sign * (y.x * one.y), x.y * one.z + sign * (y.y * one.w),
                    x.z * two.x + sign * (y.z * two.y), x.w * two.z + sign * (y.w * two.w)};
        results[n] = x;
        if (i < turned) results[n] = r;
    }
#pragma unroll
    for (uint n = 0; n < QUADS; ++n) {
        const uint i = ctx.lane() + 32 * n;
        const Float4 r = results[n];
        if (!is_query && c.kv_type == KV_Q8_0) {
            store_block_quad(ctx, is_value ? b.values : b.keys, to + 4 * i, r, i < quads);
            continue;
        }
        if (i >= quads) continue;
        if (is_query ? c.half_out : c.kv_type == KV_F16) {
            const GPTR(uint) halves = is_query ? GCAST(uint, b.out) : GCAST(uint, is_value ? b.values : b.keys);
            halves[to / 2 + 2 * i] = packed_halves(r.x, r.y);
            halves[to / 2 + 2 * i + 1] = packed_halves(r.z, r.w);
        } else {
            put4((is_query ? b.out : GCAST(float, is_value ? b.values : b.keys)) + to, i, r);
        }
    }
}

KERNEL(prepare_quads, PrepareConstants, (const float, q), (const float, k), (const float, v), (const float, q_weight),
       (const float, k_weight), (const float, angles), (const Place, places), (const uint, pages), (uchar, keys),
       (uchar, values), (float, out)) {
    const PrepareBuffers b = {q, k, v, q_weight, k_weight, angles, places, pages, keys, values, out};
    if (c.dim <= 128 && c.value_dim <= 128) prepare_by_quads<1>(ctx, c, b);
    else prepare_by_quads<2>(ctx, c, b);
}

struct UnpackPagesConstants {
    // Elements of a page of each of both caches.
    uint elements;
    // See `first_seen`.
    uint window, chunk;
};

// Groups that share a page of one cache.
CONSTANT uint PAGE_PARTS = 4;

// Pages of Q8_0 that sequences of the batch see, as f16 in pages of the same numbers: keys, then values. Grid: (groups, sequences,
// caches).
KERNEL(unpack_pages, UnpackPagesConstants, (const uchar, keys), (const uchar, values), (const Sequence, sequences),
       (const Place, places), (const uint, pages), (uchar, unpacked_keys), (uchar, unpacked_values)) {
    const Sequence s = sequences[ctx.group_y()];
    const uint first_page = places[s.first_row].first_page, end = (s.start + s.rows + PAGE - 1) / PAGE;
    const uint first = first_seen(s.start, c.window, c.chunk) / PAGE, each = c.elements / 8;
    const GPTR(const uchar) from = ctx.group_z() == 0 ? keys : values;
    const GPTR(uchar) to = ctx.group_z() == 0 ? unpacked_keys : unpacked_values;
    for (uint n = ctx.group_x(); n < (end - first) * PAGE_PARTS; n += ctx.groups_x()) {
        const ulong page = (ulong)pages[first_page + first + n / PAGE_PARTS] * c.elements;
        for (uint i = n % PAGE_PARTS * ctx.threads() + ctx.thread(); i < each; i += PAGE_PARTS * ctx.threads()) {
            const Word4 codes = load_cached8<KV_Q8_0>(from, page + 8 * i);
            store_u32x4(to + 2 * (page + 8 * i), 0, packed8(cached_floats<KV_Q8_0>(codes)));
        }
    }
}

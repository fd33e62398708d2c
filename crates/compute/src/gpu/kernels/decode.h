// Attention of tokens that are each the newest of a sequence, as decoding has them: norms and rotations of heads,
// appending to the cache and attention in one dispatch. Several tokens of one sequence take two.
#include "cached8.h"
#include "heads.h"
#include "quantize.h"

// What a team of DIM / 8 lanes has gathered for G queries. U keys at a time have U · G scores; lane l of the team keeps the
// score of key s / G and query s % G, s = l / (TEAM / (U · G)).
template <uint G>
struct Gathered {
    // Channels 8l..8l + 8 of the queries' values.
    float mixed[G][8];
    // Of the lane's query: the largest score, in powers of two, and the weights of the lane's keys.
    float maximum, sum;
};

template <uint G>
struct Queries {
    float v[G][8];
};

template <uint U>
struct Loaded {
    Word4 key[U], value[U];
    bool seen[U];
};

// Adds U keys. NaN passes.
template <uint DIM, uint G, uint KV, uint U>
DEVICE Gathered<G> gather(CTX, const Queries<G> q, const Loaded<U> loaded, Gathered<G> g) {
    constexpr uint TEAM = DIM / 8, EACH = TEAM / (U * G);
    Sums<U * G> dots;
#pragma unroll
    for (uint u = 0; u < U; ++u) {
        const Float8 key = cached_floats<KV>(loaded.key[u]);
#pragma unroll
        for (uint h = 0; h < G; ++h) {
            float dot = 0.0f;
#pragma unroll
            for (uint j = 0; j < 8; ++j) dot += q.v[h][j] * key.v[j];
            dots.v[u * G + h] = dot;
        }
    }
    const float score = team_sums<U * G>(ctx, dots, TEAM);
    const uint own = ctx.lane() % TEAM / EACH / G, base = ctx.lane() - ctx.lane() % TEAM;
    bool seen = false;
#pragma unroll
    for (uint u = 0; u < U; ++u) seen = u == own ? loaded.seen[u] : seen;
    float best = seen && score > g.maximum ? score : g.maximum;
#pragma unroll
    for (uint mask = EACH * G; mask < TEAM; mask *= 2) {
        const float other = lane_xor(ctx, best, mask);
        best = other > best ? other : best;
    }
    const float factor = best > g.maximum ? exp2_of(g.maximum - best) : 1.0f;
    const float weight = seen ? exp2_of(score - best) : 0.0f;
    g.maximum = best;
    g.sum = g.sum * factor + weight;
#pragma unroll
    for (uint h = 0; h < G; ++h) {
        const float less = lane_read(ctx, factor, base + h * EACH);
#pragma unroll
        for (uint j = 0; j < 8; ++j) g.mixed[h][j] *= less;
    }
#pragma unroll
    for (uint u = 0; u < U; ++u) {
        const Float8 value = cached_floats<KV>(loaded.value[u]);
#pragma unroll
        for (uint h = 0; h < G; ++h) {
            const float w = lane_read(ctx, weight, base + (u * G + h) * EACH);
#pragma unroll
            for (uint j = 0; j < 8; ++j) g.mixed[h][j] += w * value.v[j];
        }
    }
    return g;
}

struct DecodeMemory {
    // (G + 2, DIM): queries, the new key and its value.
    SPTR(float) heads;
    // (8 warps, G, DIM), and of each warp and query maximum and sum.
    SPTR(float) mixed;
    SPTR(float) maxima;
    SPTR(float) sums;
};

// A group's keys of the cache: positions begin..end.
struct KeyRange {
    Place at;
    uint begin, end, kv_head;
};

// Keys `base` + u · teams + team, whose channels `own` and on are the lane's.
template <uint DIM, uint KV, uint U>
DEVICE Loaded<U> load_keys(CTX, const DecodeConstants c, const DecodeBuffers b, const KeyRange of, uint base,
                           uint own) {
    constexpr uint TEAM = DIM / 8, TEAMS = 32 / TEAM;
    Loaded<U> l;
#pragma unroll
    for (uint u = 0; u < U; ++u) {
        const uint position = base + u * TEAMS + ctx.lane() / TEAM;
        l.seen[u] = position < of.end;
        if (base >= of.end) continue;
        const ulong from =
            place_of(b.pages, of.at, l.seen[u] ? position : of.end - 1, c.kv_heads, of.kv_head) * DIM + own;
        l.key[u] = load_cached8<KV>(b.keys, from);
        l.value[u] = load_cached8<KV>(b.values, from);
    }
    return l;
}

// Brings nearer what `load_keys` will read from `base` on, as far as it is of one page: one lane asks for keys, one for values.
template <uint DIM, uint KV, uint U>
DEVICE void ask_keys(CTX, const DecodeConstants c, const DecodeBuffers b, const KeyRange of, uint base) {
    if (ctx.lane() >= 2 || base >= of.end) return;
    uint count = 32 / (DIM / 8) * U;
    if (count > of.end - base) count = of.end - base;
    if (count > PAGE - base % PAGE) count = PAGE - base % PAGE;
    prefetch((ctx.lane() == 0 ? b.keys : b.values)
                 + cached_bytes<KV>(place_of(b.pages, of.at, base, c.kv_heads, of.kv_head) * DIM),
             (uint)cached_bytes<KV>(count * DIM));
}

template <uint DIM, uint G, uint KV>
DEVICE void decode(CTX, const DecodeConstants c, const DecodeBuffers b, const RoundedRows rounded, const DecodeMemory m) {
    constexpr uint TEAM = DIM / 8, TEAMS = 32 / TEAM, AT_ONCE = G == 4 ? 2 : 4, WARPS = 8;
    constexpr float LOG2_E = 1.44269504f;
    const uint row = ctx.group_z(), split = ctx.group_y(), lane = ctx.lane(), warp = ctx.warp();
    const uint kv_head = ctx.group_x() / c.chunks, chunk = ctx.group_x() % c.chunks, group = c.heads / c.kv_heads;
    const uint head0 = kv_head * group + chunk * G, left = c.attends ? group - chunk * G : 0;
    const uint queries = left < G ? left : G;
    const Place at = b.places[row];
    // Keys that are in the cache, and the part of them that is this group's.
    const uint held = at.position;
    const uint first = first_seen(held, c.window, c.chunk);
    const uint part = (held - first + c.splits - 1) / c.splits;
    const uint begin = first + split * part, most = begin + part < held ? begin + part : held;
    const uint end = c.attends ? most : begin;
    const KeyRange keys = {at, begin, end, kv_head};
    const bool newest = split == c.splits - 1;
    const uint own = lane % TEAM * 8, step = ctx.warps() * TEAMS * AT_ONCE;
    // What is in the cache has been there since before this token, or since a dispatch that has ended.
    uint base = begin + warp * TEAMS * AT_ONCE;
    Loaded<AT_ONCE> l = load_keys<DIM, KV, AT_ONCE>(ctx, c, b, keys, base, own);
    ask_keys<DIM, KV, AT_ONCE>(ctx, c, b, keys, base + step);
    if (warp == 0 && c.q_norm) warp_prefetch(ctx, GCAST(const uchar, b.q_weight), 4 * DIM);
    if (warp == 1 && c.k_norm) warp_prefetch(ctx, GCAST(const uchar, b.k_weight), 4 * DIM);
    after_previous(ctx);

    const GPTR(const float) angles = b.angles + (ulong)row * c.pairs * 2;
    for (uint h = warp; h < G + 2; h += ctx.warps()) {
        if (h < queries) {
            prepare_head<DIM>(ctx, c, b.q + ((ulong)row * c.heads + head0 + h) * DIM, c.q_norm, b.q_weight, c.q_eps,
                              angles, m.heads + h * DIM);
        } else if (h == G && newest) {
            prepare_head<DIM>(ctx, c, b.k + ((ulong)row * c.kv_heads + kv_head) * DIM, c.k_norm, b.k_weight, c.k_eps,
                              angles, m.heads + h * DIM);
        } else if (h == G + 1 && newest) {
            const GPTR(const float) from = b.v + ((ulong)row * c.kv_heads + kv_head) * DIM;
            for (uint i = lane; i < DIM; i += 32) m.heads[h * DIM + i] = from[i];
        }
    }
    barrier(ctx);
    Queries<G> q;
    Gathered<G> g;
#pragma unroll
    for (uint h = 0; h < G; ++h) {
#pragma unroll
        for (uint j = 0; j < 8; ++j) {
            q.v[h][j] = h < queries ? m.heads[h * DIM + own + j] * (c.scale * LOG2_E) : 0.0f;
            g.mixed[h][j] = 0.0f;
        }
    }
    g.maximum = -infinity();
    g.sum = 0.0f;
    for (; base < end; base += step) {
        const Loaded<AT_ONCE> next = load_keys<DIM, KV, AT_ONCE>(ctx, c, b, keys, base + step, own);
        ask_keys<DIM, KV, AT_ONCE>(ctx, c, b, keys, base + 2 * step);
        g = gather<DIM, G, KV, AT_ONCE>(ctx, q, l, g);
        l = next;
    }
    // The last warp has the fewest keys of the cache.
    if (newest && warp == ctx.warps() - 1) {
        // The new key and value, as they will be read from the cache.
        Float8 key, value;
#pragma unroll
        for (uint j = 0; j < 8; ++j) {
            key.v[j] = m.heads[G * DIM + own + j];
            value.v[j] = m.heads[(G + 1) * DIM + own + j];
        }
        const Word4 cached_key = cached8_of<KV>(ctx, key), cached_value = cached8_of<KV>(ctx, value);
#pragma unroll
        for (uint u = 0; u < AT_ONCE; ++u) {
            l.key[u] = cached_key;
            l.value[u] = cached_value;
            l.seen[u] = u == 0 && lane < TEAM;
        }
        if (c.appends && chunk == 0 && lane < TEAM) {
            const ulong to = place_of(b.pages, at, at.position, c.kv_heads, kv_head) * DIM + own;
            store_cached8<KV>(b.keys, to, key, cached_key);
            store_cached8<KV>(b.values, to, value, cached_value);
        }
        g = gather<DIM, G, KV, AT_ONCE>(ctx, q, l, g);
    }
    if (!c.attends) return;
    // Maxima and sums of each query, in all lanes of a team; then the teams of a warp together.
    constexpr uint EACH = TEAM / (AT_ONCE * G);
    float maxima[G], sums[G];
#pragma unroll
    for (uint h = 0; h < G; ++h) {
        maxima[h] = lane_read(ctx, g.maximum, lane - lane % TEAM + h * EACH);
        sums[h] = 0.0f;
#pragma unroll
        for (uint u = 0; u < AT_ONCE; ++u) sums[h] += lane_read(ctx, g.sum, lane - lane % TEAM + (u * G + h) * EACH);
    }
#pragma unroll
    for (uint mask = TEAM; mask < 32; mask *= 2) {
#pragma unroll
        for (uint h = 0; h < G; ++h) {
            const float other = lane_xor(ctx, maxima[h], mask), other_sum = lane_xor(ctx, sums[h], mask);
            const float best = other > maxima[h] ? other : maxima[h];
            const float mine = maxima[h] < best ? exp2_of(maxima[h] - best) : 1.0f;
            const float its = other < best ? exp2_of(other - best) : 1.0f;
            maxima[h] = best;
            sums[h] = sums[h] * mine + other_sum * its;
#pragma unroll
            for (uint j = 0; j < 8; ++j) {
                const float v = lane_xor(ctx, g.mixed[h][j], mask);
                g.mixed[h][j] = g.mixed[h][j] * mine + v * its;
            }
        }
    }
    if (lane < TEAM) {
#pragma unroll
        for (uint h = 0; h < G; ++h) {
#pragma unroll
            for (uint j = 0; j < 8; ++j) m.mixed[(warp * G + h) * DIM + own + j] = g.mixed[h][j];
            if (lane == 0) {
                m.maxima[warp * G + h] = maxima[h];
                m.sums[warp * G + h] = sums[h];
            }
        }
    }
    barrier(ctx);
    for (uint i = ctx.thread(); i < queries * DIM; i += ctx.threads()) {
        const uint h = i / DIM, d = i % DIM;
        const bool sink = c.has_sinks && split == 0;
        float best = sink ? b.sinks[head0 + h] * LOG2_E : -infinity();
#pragma unroll
        for (uint w = 0; w < WARPS; ++w) best = m.maxima[w * G + h] > best ? (float)m.maxima[w * G + h] : best;
        float sum = sink ? exp2_of(b.sinks[head0 + h] * LOG2_E - best) : 0.0f, mixed = 0.0f;
#pragma unroll
        for (uint w = 0; w < WARPS; ++w) {
            const float own_max = m.maxima[w * G + h], factor = own_max < best ? exp2_of(own_max - best) : 1.0f;
            sum += m.sums[w * G + h] * factor;
            mixed += m.mixed[(w * G + h) * DIM + d] * factor;
        }
        const ulong head = (ulong)row * c.heads + head0 + h;
        const float v = c.splits == 1 ? mixed / sum : mixed;
        b.out[(head * c.splits + split) * DIM + d] = v;
        // A warp has a block.
        if (c.rounds) round_block(ctx, v, rounded, head * DIM + d - lane, c.heads * DIM);
        if (c.splits > 1 && d == 0) {
            b.stats[(head * c.splits + split) * 2] = best / LOG2_E;
            b.stats[(head * c.splits + split) * 2 + 1] = sum;
        }
    }
}

// q (rows, heads · DIM), k and v (rows, kv_heads · DIM), a cache of KV. A group, of eight warps, does G queries of a key head.
// Grid: (kv_heads · chunks, splits, rows). `out` and `stats` as those of `attend`, rounded as `bytes`, `scales` and `factors` say if
// `rounds`; the newest key is in the last split.
#define DECODE(kv, KV, DIM, G)                                                                                         \
    KERNEL_AHEAD(decode_##DIM##_##G##kv, DecodeConstants, (const float, q), (const float, k), (const float, v),        \
                 (const float, q_weight), (const float, k_weight), (const float, angles), (const Place, places),       \
                 (const uint, pages), (const float, sinks), (uchar, keys), (uchar, values), (float, stats),            \
                 (float, out), (uchar, bytes), (float, scales), (float, factors)) {                                    \
        SHARED(float, heads, (G + 2) * DIM);                                                                           \
        SHARED(float, mixed, 8 * G * DIM);                                                                             \
        SHARED(float, maxima, 8 * G);                                                                                  \
        SHARED(float, sums, 8 * G);                                                                                    \
        const DecodeBuffers b = {q, k, v, q_weight, k_weight, angles, places, pages, sinks, keys, values, stats, out}; \
        const DecodeMemory m = {heads, mixed, maxima, sums};                                                           \
        const RoundedRows rounded = {bytes, scales, factors};                                                          \
        decode<DIM, G, KV>(ctx, c, b, rounded, m);                                                                     \
    }

#define DECODES(kv, KV)    \
    DECODE(kv, KV, 64, 1)  \
    DECODE(kv, KV, 64, 4)  \
    DECODE(kv, KV, 128, 1) \
    DECODE(kv, KV, 128, 4) \
    DECODE(kv, KV, 256, 1) \
    DECODE(kv, KV, 256, 4)

DECODES(, KV_F16)
DECODES(_q8_0, KV_Q8_0)

// Attention of tokens that are each the newest of a sequence on tensor cores: what `decode.h` does, with up to eight queries of a
// key head at once.
//
// A warp takes 16 keys at a time. The fragments of keys and values come straight from the cache: which channel stands where in
// a product's sum is free as long as both sides agree, so that a lane reads eight elements that follow each other. Those of Q8_0
// become f16 in registers.
// A group of its own on a multiprocessor: registers for all keys and values that it has under way.
#define GROUPS_AT_ONCE 1
#include "cached8.h"
#include "heads.h"

CONSTANT uint QUERIES = 8, TILE_KEYS = 16;

// sum + a · b over 16: a (16, 16), b (16, 8).
// clang-format off
DEVICE void multiply(float (&sum)[4], const uint (&a)[4], uint b0, uint b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// clang-format on

// What a lane reads of a head: N times eight elements that follow each other.
template <uint KV, uint N>
struct Eights {
    uint4 v[N];
};

// Codes lie in words, in every other block from the middle of one to the middle of another.
template <uint N>
struct Eights<KV_Q8_0, N> {
    uint words[2 * N + 1], scale;
    bool shifted;
};

// Of the CACHE, by the path that is for what nobody writes meanwhile.
template <bool CACHE, typename T>
DEVICE T read(const uchar* from) {
    return CACHE ? __ldg((const T*)from) : *(const T*)from;
}

// Elements `channel` and on of a head that begins at `head`, a multiple of four bytes.
template <uint KV, uint N, bool CACHE>
DEVICE Eights<KV, N> load_eights(const uchar* head, uint channel) {
    Eights<KV, N> e;
    if constexpr (KV == KV_F16) {
#pragma unroll
        for (uint n = 0; n < N; ++n) e.v[n] = read<CACHE, uint4>(head + 2 * channel + 16 * n);
    } else {
        const uint block = channel / KV_BLOCK;
        const uchar* const from = head + block * (2 * KV_BLOCK_PAIRS);
        e.shifted = block % 2 == 0;
        e.scale = read<CACHE, ushort>(from);
        const uchar* const words = from + channel % KV_BLOCK + (e.shifted ? 0 : 2);
#pragma unroll
        for (uint n = 0; n < 2 * N; ++n) e.words[n] = read<CACHE, uint>(words + 4 * n);
        e.words[2 * N] = e.shifted ? read<CACHE, uint>(words + 8 * N) : 0;
    }
    return e;
}

// Two codes, of which 128 has been added to each, times their scale: the bits of a whole number below 1024 are an f16, 1024 more.
DEVICE uint scaled_codes(uint codes, uint scales) {
    uint scaled;
    asm("{.reg .b32 whole; sub.rn.f16x2 whole, %1, %2; mul.rn.f16x2 %0, whole, %3;}"
        : "=r"(scaled)
        : "r"(codes), "r"(0x64806480u), "r"(scales));
    return scaled;
}

// Eight of them as f16.
template <uint KV, uint N>
DEVICE uint4 eight(const Eights<KV, N>& e, uint n) {
    if constexpr (KV == KV_F16) {
        return e.v[n];
    } else {
        const uint middle = e.shifted ? 0x5432 : 0x3210, scales = e.scale | e.scale << 16;
        const uint low = __byte_perm(e.words[2 * n], e.words[2 * n + 1], middle) ^ 0x80808080u;
        const uint high = __byte_perm(e.words[2 * n + 1], e.words[2 * n + 2], middle) ^ 0x80808080u;
        return make_uint4(scaled_codes(__byte_perm(low, 0x64646464u, 0x4140), scales),
                          scaled_codes(__byte_perm(low, 0x64646464u, 0x4342), scales),
                          scaled_codes(__byte_perm(high, 0x64646464u, 0x4140), scales),
                          scaled_codes(__byte_perm(high, 0x64646464u, 0x4342), scales));
    }
}

// A lane's share of 16 keys and their values. With g = lane / 4 and t = lane % 4: of keys g and 8 + g, channels 32c + 8t and
// the seven that follow; of the values of keys 2t, 2t + 1, 8 + 2t and 9 + 2t, channels DIM / 8 · g and those that follow.
template <uint DIM, uint KV>
struct Tile {
    Eights<KV, 1> keys[2][DIM / 32];
    Eights<KV, DIM / 64> values[4];
};

// What a warp has gathered: of query 2t + i channel DIM / 8 · g + 2j + h in mixed[j][2h + i]; of query g the largest score, in
// powers of two, and the lane's share of the weights.
template <uint DIM>
struct Mixed {
    float mixed[DIM / 16][4];
    float maximum, sum;
};

template <uint DIM, uint KV>
DEVICE Tile<DIM, KV> load_tile(CTX, const DecodeConstants c, const DecodeBuffers b, Place at, uint kv_head, uint first,
                               uint end) {
    const uint g = ctx.lane() / 4, t = ctx.lane() % 4;
    Tile<DIM, KV> tile = {};
    if (first >= end) return tile;
#pragma unroll
    for (uint i = 0; i < 2; ++i) {
        const uint position = first + 8 * i + g;
        const ulong head = place_of(b.pages, at, position < end ? position : end - 1, c.kv_heads, kv_head) * DIM;
#pragma unroll
        for (uint j = 0; j < DIM / 32; ++j)
            tile.keys[i][j] = load_eights<KV, 1, true>(b.keys + cached_bytes<KV>(head), 32 * j + 8 * t);
    }
#pragma unroll
    for (uint i = 0; i < 4; ++i) {
        const uint position = first + 8 * (i / 2) + 2 * t + i % 2;
        const ulong head = place_of(b.pages, at, position < end ? position : end - 1, c.kv_heads, kv_head) * DIM;
        tile.values[i] = load_eights<KV, DIM / 64, true>(b.values + cached_bytes<KV>(head), DIM / 8 * g);
    }
    return tile;
}

// Brings keys first..first + 16 and their values nearer, half a key and half of its values a lane.
template <uint DIM, uint KV>
DEVICE void ask_tile(CTX, const DecodeConstants c, const DecodeBuffers b, Place at, uint kv_head, uint first,
                     uint end) {
    const uint position = first + ctx.lane() / 2;
    if (position >= end) return;
    const ulong head = place_of(b.pages, at, position, c.kv_heads, kv_head) * DIM;
    const ulong from = cached_bytes<KV>(head) + ctx.lane() % 2 * cached_bytes<KV>(DIM / 2);
    asm volatile("prefetch.global.L2 [%0];" ::"l"(b.keys + from));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(b.values + from));
}

DEVICE uint word(uint4 v, uint i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Adds the keys first..end of a tile. NaN passes.
template <uint DIM, uint KV>
DEVICE void gather(CTX, const uint4 (&q)[DIM / 32], const Tile<DIM, KV>& tile, uint first, uint end, Mixed<DIM>& m) {
    const uint t = ctx.lane() % 4;
    // Scores of query g: keys 2t, 2t + 1 of each half.
    float scores[2][4];
#pragma unroll
    for (uint i = 0; i < 2; ++i) {
#pragma unroll
        for (uint j = 0; j < 4; ++j) scores[i][j] = 0.0f;
#pragma unroll
        for (uint j = 0; j < DIM / 32; ++j) {
            const uint low[4] = {q[j].x, 0, q[j].y, 0}, high[4] = {q[j].z, 0, q[j].w, 0};
            const uint4 key = eight(tile.keys[i][j], 0);
            multiply(scores[i], low, key.x, key.y);
            multiply(scores[i], high, key.z, key.w);
        }
    }
    float best = m.maximum;
#pragma unroll
    for (uint i = 0; i < 4; ++i) {
        const bool seen = first + 8 * (i / 2) + 2 * t + i % 2 < end;
        const float score = scores[i / 2][i % 2];
        best = seen && score > best ? score : best;
    }
    best = quad_max(ctx, best);
    const float factor = best > m.maximum ? exp2_of(m.maximum - best) : 1.0f;
    m.maximum = best;
    m.sum *= factor;
    uint weights[2];
#pragma unroll
    for (uint i = 0; i < 2; ++i) {
        float w[2];
#pragma unroll
        for (uint j = 0; j < 2; ++j) {
            const bool seen = first + 8 * i + 2 * t + j < end;
            w[j] = seen ? exp2_of(scores[i][j] - best) : 0.0f;
            m.sum += w[j];
        }
        weights[i] = packed_halves(w[0], w[1]);
    }
    const float factors[2] = {lane_read(ctx, factor, 8 * t), lane_read(ctx, factor, 8 * t + 4)};
#pragma unroll
    for (uint n = 0; n < DIM / 64; ++n) {
        uint4 values[4];
#pragma unroll
        for (uint i = 0; i < 4; ++i) values[i] = eight(tile.values[i], n);
#pragma unroll
        for (uint j = 0; j < 4; ++j) {
            float (&mixed)[4] = m.mixed[4 * n + j];
#pragma unroll
            for (uint i = 0; i < 4; ++i) mixed[i] *= factors[i % 2];
            uint a[4];
#pragma unroll
            for (uint i = 0; i < 2; ++i) {
                const uint one = word(values[2 * i], j), other = word(values[2 * i + 1], j);
                a[2 * i] = __byte_perm(one, other, 0x5410);
                a[2 * i + 1] = __byte_perm(one, other, 0x7632);
            }
            multiply(mixed, a, weights[0], weights[1]);
        }
    }
}

// What `prepare_head` does, of a head whose channels lane + 32i are in `own`.
template <uint DIM>
DEVICE void place_head(CTX, const DecodeConstants c, const float (&own)[DIM / 32], bool normed, const float* weight,
                       float eps, const float* angles, float* to) {
    constexpr uint EACH = DIM / 32;
    float weights[EACH], cosines[EACH], sines[EACH], v[EACH], squares = 0.0f;
#pragma unroll
    for (uint i = 0; i < EACH; ++i) {
        const uint d = ctx.lane() + 32 * i, pair = c.interleaved ? d / 2 : d < c.pairs ? d : d - c.pairs;
        const bool rotates = d < 2 * c.pairs;
        weights[i] = normed ? weight[d] : 1.0f;
        cosines[i] = rotates ? angles[2 * pair] : 1.0f;
        sines[i] = rotates ? angles[2 * pair + 1] : 0.0f;
        squares += own[i] * own[i];
    }
    const float factor = normed ? inverse_sqrt(lane_sum(ctx, squares) * (1.0f / (float)DIM) + eps) : 1.0f;
#pragma unroll
    for (uint i = 0; i < EACH; ++i) to[ctx.lane() + 32 * i] = v[i] = own[i] * factor * weights[i];
    __syncwarp();
    float other[EACH];
#pragma unroll
    for (uint i = 0; i < EACH; ++i) {
        const uint d = ctx.lane() + 32 * i;
        const bool second = c.interleaved ? d % 2 == 1 : d >= c.pairs;
        const uint step = c.interleaved ? 1 : c.pairs;
        other[i] = d >= 2 * c.pairs ? 0.0f : second ? to[d - step] : -to[d + step];
    }
    __syncwarp();
#pragma unroll
    for (uint i = 0; i < EACH; ++i) to[ctx.lane() + 32 * i] = v[i] * cosines[i] + other[i] * sines[i];
}

// The newest key and value, which are in `key` and `value` as they will be in the cache, as key `place` of a tile.
template <uint DIM, uint KV>
DEVICE void put_newest(CTX, const uchar* key, const uchar* value, uint place, Tile<DIM, KV>& tile) {
    const uint g = ctx.lane() / 4, t = ctx.lane() % 4;
#pragma unroll
    for (uint i = 0; i < 2; ++i) {
        if (place != 8 * i + g) continue;
#pragma unroll
        for (uint j = 0; j < DIM / 32; ++j) tile.keys[i][j] = load_eights<KV, 1, false>(key, 32 * j + 8 * t);
    }
#pragma unroll
    for (uint i = 0; i < 4; ++i)
        if (place == 8 * (i / 2) + 2 * t + i % 2) tile.values[i] = load_eights<KV, DIM / 64, false>(value, DIM / 8 * g);
}

// q (rows, heads · DIM), k and v (rows, kv_heads · DIM), a cache of KV. A group does up to eight queries of a key head. Grid:
// (kv_heads · chunks, splits, rows). `out` and `stats` as those of `attend`; the newest key is in the last split.
template <uint DIM, uint KV>
DEVICE void tensor_decode(CTX, const DecodeConstants c, const DecodeBuffers b, float* heads, uchar* newest_head,
                          float* mixed, float* maxima, float* sums, float* factors) {
    constexpr float LOG2_E = 1.44269504f;
    // Lines of threadgroup memory, so that lanes of a warp meet different banks.
    constexpr uint HEAD_LINE = DIM + 4, MIXED_LINE = DIM + 20, HEAD_BYTES = cached_bytes<KV>(DIM);
    const uint row = ctx.group_z(), split = ctx.group_y(), lane = ctx.lane(), warp = ctx.warp(), g = lane / 4,
               t = lane % 4;
    const uint kv_head = ctx.group_x() / c.chunks, chunk = ctx.group_x() % c.chunks, group = c.heads / c.kv_heads;
    const uint head0 = kv_head * group + chunk * QUERIES;
    const uint left = c.attends ? group - chunk * QUERIES : 0, queries = left < QUERIES ? left : QUERIES;
    const Place at = b.places[row];
    const uint held = at.position;
    const uint oldest = first_seen(held, c.window, c.chunk);
    const uint part = (held - oldest + c.splits) / c.splits;
    const uint begin = oldest + split * part, end = begin + part < held + 1 ? begin + part : held + 1;
    const uint in_cache = end < held ? end : held;
    const bool newest = begin <= held && held < end;
    // What is in the cache has been there since before this token, or since a dispatch that has ended.
    uint first = c.attends ? begin + warp * TILE_KEYS : end;
    const uint step = ctx.warps() * TILE_KEYS;
    Tile<DIM, KV> tile = load_tile<DIM, KV>(ctx, c, b, at, kv_head, first, in_cache);
    ask_tile<DIM, KV>(ctx, c, b, at, kv_head, first + step, in_cache);
    if (warp == 0 && c.q_norm) warp_prefetch(ctx, (const uchar*)b.q_weight, 4 * DIM);
    if (warp == 1 && c.k_norm) warp_prefetch(ctx, (const uchar*)b.k_weight, 4 * DIM);
    after_previous(ctx);

    const float* const angles = b.angles + (ulong)row * c.pairs * 2;
    const float* const key = b.k + ((ulong)row * c.kv_heads + kv_head) * DIM;
    const float* const value = b.v + ((ulong)row * c.kv_heads + kv_head) * DIM;
    // The loads of both heads that the last warp may have are under way together.
    const bool keyed = newest && warp == QUERIES - 1;
    const float* const query = b.q + ((ulong)row * c.heads + head0 + (warp < queries ? warp : 0)) * DIM;
    float q_own[DIM / 32], k_own[DIM / 32], v_own[DIM / 32];
#pragma unroll
    for (uint i = 0; i < DIM / 32; ++i) {
        q_own[i] = query[lane + 32 * i];
        k_own[i] = keyed ? key[lane + 32 * i] : 0.0f;
        v_own[i] = keyed ? value[lane + 32 * i] : 0.0f;
    }
    if (warp < queries) place_head<DIM>(ctx, c, q_own, c.q_norm, b.q_weight, c.q_eps, angles, heads + warp * HEAD_LINE);
    uchar* const newest_key = newest_head;
    uchar* const newest_value = newest_head + HEAD_BYTES;
    if (keyed) {
        float* const placed = heads + QUERIES * HEAD_LINE;
        place_head<DIM>(ctx, c, k_own, c.k_norm, b.k_weight, c.k_eps, angles, placed);
#pragma unroll
        for (uint i = 0; i < DIM / 32; ++i) {
            store_cached(ctx, newest_key, lane + 32 * i, placed[lane + 32 * i], KV);
            store_cached(ctx, newest_value, lane + 32 * i, v_own[i], KV);
        }
    }
    barrier(ctx);
    uint4 q[DIM / 32];
#pragma unroll
    for (uint j = 0; j < DIM / 32; ++j) {
        const Float4 a = load_f32x4(heads, (g < queries ? g : 0) * HEAD_LINE + 32 * j + 8 * t);
        const Float4 e = load_f32x4(heads, (g < queries ? g : 0) * HEAD_LINE + 32 * j + 8 * t + 4);
        const float scale = g < queries ? c.scale * LOG2_E : 0.0f;
        const Float8 own = {
            {a.x * scale, a.y * scale, a.z * scale, a.w * scale, e.x * scale, e.y * scale, e.z * scale, e.w * scale}};
        const Word4 w = packed8(own);
        q[j] = make_uint4(w.x, w.y, w.z, w.w);
    }
    Mixed<DIM> m;
#pragma unroll
    for (uint j = 0; j < DIM / 16; ++j)
        for (uint i = 0; i < 4; ++i) m.mixed[j][i] = 0.0f;
    m.maximum = -infinity();
    m.sum = 0.0f;
    for (; first < end; first += step) {
        if (held < end && held < first + TILE_KEYS)
            put_newest<DIM, KV>(ctx, newest_key, newest_value, held - first, tile);
        gather<DIM, KV>(ctx, q, tile, first, end, m);
        tile = load_tile<DIM, KV>(ctx, c, b, at, kv_head, first + step, in_cache);
        ask_tile<DIM, KV>(ctx, c, b, at, kv_head, first + 2 * step, in_cache);
    }
    if (c.appends && newest && chunk == 0) {
        const ulong to = cached_bytes<KV>(place_of(b.pages, at, held, c.kv_heads, kv_head) * DIM);
        for (uint i = 4 * ctx.thread(); i < HEAD_BYTES; i += 4 * ctx.threads()) {
            *(uint*)(b.keys + to + i) = *(const uint*)(newest_key + i);
            *(uint*)(b.values + to + i) = *(const uint*)(newest_value + i);
        }
    }
    if (!c.attends) return;
    m.sum = quad_sum(ctx, m.sum);
    if (t == 0) {
        maxima[warp * QUERIES + g] = m.maximum;
        sums[warp * QUERIES + g] = m.sum;
    }
#pragma unroll
    for (uint i = 0; i < 2; ++i) {
#pragma unroll
        for (uint j = 0; j < DIM / 16; ++j) {
            float* const to = mixed + (warp * QUERIES + 2 * t + i) * MIXED_LINE + (DIM / 8 + 2) * g + 2 * j;
            *(float2*)to = make_float2(m.mixed[j][i], m.mixed[j][2 + i]);
        }
    }
    barrier(ctx);
    // What each warp's part counts, a thread each; then the parts together.
    if (ctx.thread() < 8 * QUERIES) {
        const uint h = ctx.thread() % QUERIES;
        const bool sink = c.has_sinks && split == 0 && h < queries;
        float best = sink ? b.sinks[head0 + h] * LOG2_E : -infinity();
#pragma unroll
        for (uint w = 0; w < 8; ++w) best = maxima[w * QUERIES + h] > best ? maxima[w * QUERIES + h] : best;
        float sum = sink ? exp2_of(b.sinks[head0 + h] * LOG2_E - best) : 0.0f, own_factor = 0.0f;
#pragma unroll
        for (uint w = 0; w < 8; ++w) {
            const float own_max = maxima[w * QUERIES + h], factor = own_max < best ? exp2_of(own_max - best) : 1.0f;
            sum += sums[w * QUERIES + h] * factor;
            own_factor = w == ctx.thread() / QUERIES ? factor : own_factor;
        }
        factors[ctx.thread()] = c.splits == 1 ? own_factor / sum : own_factor;
        if (c.splits > 1 && ctx.thread() < queries) {
            const ulong at_stats = (((ulong)row * c.heads + head0 + h) * c.splits + split) * 2;
            b.stats[at_stats] = best / LOG2_E;
            b.stats[at_stats + 1] = sum;
        }
    }
    barrier(ctx);
    for (uint i = ctx.thread(); i < queries * DIM; i += ctx.threads()) {
        const uint h = i / DIM, d = i % DIM;
        float sum = 0.0f;
#pragma unroll
        for (uint w = 0; w < 8; ++w)
            sum += mixed[(w * QUERIES + h) * MIXED_LINE + d + d / (DIM / 8) * 2] * factors[w * QUERIES + h];
        b.out[(((ulong)row * c.heads + head0 + h) * c.splits + split) * DIM + d] = sum;
    }
}

#define TENSOR_DECODE(name, DIM, KV)                                                                                   \
    KERNEL_AHEAD(tensor_decode_##name, DecodeConstants, (const float, q), (const float, k), (const float, v),          \
                 (const float, q_weight), (const float, k_weight), (const float, angles), (const Place, places),       \
                 (const uint, pages), (const float, sinks), (uchar, keys), (uchar, values), (float, stats),            \
                 (float, out)) {                                                                                       \
        SHARED(float, heads, (QUERIES + 1) * (DIM + 4));                                                               \
        SHARED(uchar, newest, 2 * cached_bytes<KV>(DIM));                                                              \
        SHARED(float, mixed, 8 * QUERIES * (DIM + 20));                                                                \
        SHARED(float, maxima, 8 * QUERIES);                                                                            \
        SHARED(float, sums, 8 * QUERIES);                                                                              \
        SHARED(float, factors, 8 * QUERIES);                                                                           \
        const DecodeBuffers b = {q, k, v, q_weight, k_weight, angles, places, pages, sinks, keys, values, stats, out}; \
        tensor_decode<DIM, KV>(ctx, c, b, heads, newest, mixed, maxima, sums, factors);                                \
    }

TENSOR_DECODE(64, 64, KV_F16)
TENSOR_DECODE(128, 128, KV_F16)
TENSOR_DECODE(64_q8_0, 64, KV_Q8_0)
TENSOR_DECODE(128_q8_0, 128, KV_Q8_0)
// The same for more groups than multiprocessors with few keys each, whose latency counts most: two at once, for a few registers
// that are kept in memory.
#undef GROUPS_AT_ONCE
#define GROUPS_AT_ONCE 2
TENSOR_DECODE(128_beside, 128, KV_F16)
TENSOR_DECODE(128_beside_q8_0, 128, KV_Q8_0)

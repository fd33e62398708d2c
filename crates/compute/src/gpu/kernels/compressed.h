// Attention over tokens and over entries that stand for windows of them: see `graph::CompressedAttention`.
//
// A page is PAGE tokens, then the entries that end in it, each with its key for the index.
#include "scores.h"
#include "routing.h"

struct Layout {
    // Elements of a page, of a token and of an entry, tokens that an entry stands for.
    uint page, token, entry, stride;
    // What elements are stored as.
    uint kv_type;
};

DEVICE ulong page_at(const Layout l, GPTR(const uint) pages, const Place at, uint position) {
    return (ulong)pages[at.first_page + position / PAGE] * l.page;
}

DEVICE ulong token_at(const Layout l, GPTR(const uint) pages, const Place at, uint position) {
    return page_at(l, pages, at, position) + position % PAGE * l.token;
}

DEVICE ulong entry_at(const Layout l, GPTR(const uint) pages, const Place at, uint entry) {
    const uint last = (entry + 1) * l.stride - 1, place = entry - last / PAGE * PAGE / l.stride;
    return page_at(l, pages, at, last) + PAGE * l.token + place * l.entry;
}

struct KeepConstants {
    Layout layout;
    // Elements of each input's row.
    uint first, second, third, fourth;
};

// Writes rows of a and b to their tokens, and of d and e to the entries that end with these tokens. A group does a row.
KERNEL(keep, KeepConstants, (const float, a), (const float, b), (const float, d), (const float, e),
       (const Place, places), (const uint, pages), (uchar, cache)) {
    const ulong row = ctx.group_x();
    const Place at = places[row];
    const ulong token = token_at(c.layout, pages, at, at.position);
    for (uint i = ctx.thread(); i < c.first; i += ctx.threads()) {
        store_cached(ctx, cache, token + i, a[row * c.first + i], c.layout.kv_type);
    }
    for (uint i = ctx.thread(); i < c.second; i += ctx.threads()) {
        store_cached(ctx, cache, token + c.first + i, b[row * c.second + i], c.layout.kv_type);
    }
    if ((at.position + 1) % c.layout.stride != 0) return;
    const ulong entry = entry_at(c.layout, pages, at, at.position / c.layout.stride);
    for (uint i = ctx.thread(); i < c.third; i += ctx.threads()) {
        store_cached(ctx, cache, entry + i, d[row * c.third + i], c.layout.kv_type);
    }
    for (uint i = ctx.thread(); i < c.fourth; i += ctx.threads()) {
        store_cached(ctx, cache, entry + c.third + i, e[row * c.fourth + i], c.layout.kv_type);
    }
}

struct IndexConstants {
    Layout layout;
    // Query heads, channels of a head and of a key, and where an entry's key begins.
    uint heads, dim, key;
    // Entries that a query sees, at most.
    uint top_k;
    float factor;
    // Whether heads have weights.
    uint weighs;
    // First row, choices of a row, and scores that each has room for.
    uint row, groups, room;
    // Tokens that are chosen together, and whether one that is not complete may be: then by its best token, and so many up to
    // the row's own whatever their score.
    uint block, by_token, local;
};

// The blocks that a row may choose from.
DEVICE uint choosable(const IndexConstants c, const Place at) {
    return c.by_token ? at.position / c.block + 1 : (at.position + 1) / c.block;
}

// The same if it has a choice: none if it sees all.
DEVICE uint entries_to_choose(const IndexConstants c, const Place at) {
    const uint entries = choosable(c, at);
    return entries > c.top_k ? entries : 0;
}

// Query heads, entries and channels of a tile of scores, and what lies between its rows in threadgroup memory.
CONSTANT uint TILE_HEADS = 32, TILE_ENTRIES = 128, TILE_CHANNELS = 32, TILE_STRIDE = TILE_CHANNELS + 4;

// Of a group's entries: keys, then the products of a tile's heads with them; queries; where keys begin.
struct IndexMemory {
    // (TILE_ENTRIES, TILE_STRIDE), then (TILE_HEADS, TILE_ENTRIES).
    SPTR(float) keys;
    // (TILE_HEADS, TILE_STRIDE).
    SPTR(float) queries;
    SPTR(ulong) starts;
};

// Products of heads warp + 8r of a tile with entries lane + 32s.
struct IndexDots {
    float v[4][4];
};

// Adds the products of a tile's channels.
DEVICE IndexDots with_channels(CTX, const IndexMemory m, IndexDots dots) {
    for (uint i = 0; i < TILE_CHANNELS; i += 4) {
        Float4 q[4], k[4];
#pragma unroll
        for (uint n = 0; n < 4; ++n) {
            q[n] = load_f32x4(m.queries, (ctx.warp() + 8 * n) * TILE_STRIDE + i);
            k[n] = load_f32x4(m.keys, (ctx.lane() + 32 * n) * TILE_STRIDE + i);
        }
#pragma unroll
        for (uint r = 0; r < 4; ++r) {
#pragma unroll
            for (uint s = 0; s < 4; ++s) {
                const float dot = fma_of(q[r].y, k[s].y, fma_of(q[r].x, k[s].x, dots.v[r][s]));
                dots.v[r][s] = fma_of(q[r].w, k[s].w, fma_of(q[r].z, k[s].z, dot));
            }
        }
    }
    return dots;
}

// Σ over heads of weight · relu(q · key) of each entry → scores (rows from c.row on, room). A group of 8 warps does
// TILE_ENTRIES entries of a row. Grid: (room / TILE_ENTRIES, rows).
KERNEL(index_scores, IndexConstants, (const float, q), (const float, weights), (const uchar, cache),
       (const Place, places), (const uint, pages), (float, scores)) {
    SHARED(float, keys, TILE_ENTRIES * TILE_STRIDE);
    SHARED(float, queries, TILE_HEADS * TILE_STRIDE);
    SHARED(ulong, starts, TILE_ENTRIES);
    const IndexMemory m = {keys, queries, starts};
    const uint first = ctx.group_x() * TILE_ENTRIES, row = c.row + ctx.group_y();
    const Place at = places[row];
    const uint entries = entries_to_choose(c, at);
    if (first >= entries) return;
    const uint own = first + ctx.thread();
    if (ctx.thread() < TILE_ENTRIES)
        m.starts[ctx.thread()] = entry_at(c.layout, pages, at, own < entries ? own : entries - 1) + c.key;
    float score = 0.0f;
    for (uint head = 0; head < c.heads; head += TILE_HEADS) {
        IndexDots dots;
#pragma unroll
        for (uint i = 0; i < 16; ++i) dots.v[i / 4][i % 4] = 0.0f;
        for (uint channel = ctx.lane(); channel < (c.dim + 31) / 32 * 32; channel += TILE_CHANNELS) {
            const bool there = channel < c.dim;
            barrier(ctx);
            for (uint e = ctx.warp(); e < TILE_ENTRIES; e += 8)
                m.keys[e * TILE_STRIDE + ctx.lane()] = there ? cached(cache, m.starts[e] + channel, c.layout.kv_type) : 0.0f;
            for (uint h = ctx.warp(); h < TILE_HEADS; h += 8) {
                const ulong from = ((ulong)row * c.heads + head + h) * c.dim + channel;
                m.queries[h * TILE_STRIDE + ctx.lane()] = there && head + h < c.heads ? q[from] : 0.0f;
            }
            barrier(ctx);
            dots = with_channels(ctx, m, dots);
        }
        barrier(ctx);
#pragma unroll
        for (uint r = 0; r < 4; ++r) {
            for (uint s = 0; s < 4; ++s) {
                // In this form NaN stays NaN.
                const float product = dots.v[r][s] < 0.0f ? 0.0f : dots.v[r][s];
                m.keys[(ctx.warp() + 8 * r) * TILE_ENTRIES + ctx.lane() + 32 * s] = product;
            }
        }
        barrier(ctx);
        if (ctx.thread() >= TILE_ENTRIES) continue;
        for (uint h = 0; h < TILE_HEADS && head + h < c.heads; ++h) {
            const float product = m.keys[h * TILE_ENTRIES + ctx.thread()];
            score += c.weighs ? weights[(ulong)row * c.heads + head + h] * product : product;
        }
    }
    if (ctx.thread() < TILE_ENTRIES && own < entries) scores[(ulong)ctx.group_y() * c.room + own] = score * c.factor;
}

// Channels of a query that `block_scores` has in threadgroup memory.
CONSTANT uint MOST_CHANNELS = 512;

// q · key over all channels in order; `wide` is whether a key can be loaded eight elements at a time.
DEVICE float scored(SPTR(const float) q, GPTR(const uchar) cache, ulong key, uint dim, bool wide, uint kv_type) {
    float dot = 0.0f;
    if (!wide) {
        for (uint i = 0; i < dim; ++i) dot = fma_of(q[i], cached(cache, key + i, kv_type), dot);
        return dot;
    }
    const GPTR(const uchar) from = cache + key * 2;
    for (uint i = 0; i < dim; i += 8) {
        const Word4 w = load_u32x4(from, 2 * i);
        const Float4 a = load_f32x4(q, i), b = load_f32x4(q, i + 4);
        dot = fma_of(a.x, f16_to_f32((ushort)w.x), dot);
        dot = fma_of(a.y, f16_to_f32((ushort)(w.x >> 16)), dot);
        dot = fma_of(a.z, f16_to_f32((ushort)w.y), dot);
        dot = fma_of(a.w, f16_to_f32((ushort)(w.y >> 16)), dot);
        dot = fma_of(b.x, f16_to_f32((ushort)w.z), dot);
        dot = fma_of(b.y, f16_to_f32((ushort)(w.z >> 16)), dot);
        dot = fma_of(b.z, f16_to_f32((ushort)w.w), dot);
        dot = fma_of(b.w, f16_to_f32((ushort)(w.w >> 16)), dot);
    }
    return dot;
}

// The largest q · key of each block's tokens up to the row → scores (rows from c.row on, groups, room), infinity for those that
// are always chosen. A warp does a block. Grid: (room / warps, groups, rows).
KERNEL(block_scores, IndexConstants, (const float, q), (const uchar, cache), (const Place, places), (const uint, pages),
       (float, scores)) {
    SHARED(float, own, MOST_CHANNELS);
    const uint first = ctx.group_x() * ctx.warps(), group = ctx.group_y(), row = c.row + ctx.group_z();
    const Place at = places[row];
    const uint blocks = entries_to_choose(c, at), block = first + ctx.warp();
    if (first >= blocks) return;
    const ulong from = ((ulong)row * c.heads + group) * c.dim;
    for (uint i = ctx.thread(); i < c.dim; i += ctx.threads()) own[i] = q[from + i];
    barrier(ctx);
    if (block >= blocks) return;
    const Layout l = c.layout;
    const bool wide = l.kv_type == KV_F16 && c.dim % 8 == 0 && c.key % 8 == 0 && l.page % 8 == 0 && l.token % 8 == 0
                   && l.entry % 8 == 0;
    const bool always = block + c.local > at.position / c.block;
    const uint begin = block * c.block, seen = at.position + 1, end = begin + c.block < seen ? begin + c.block : seen;
    float best = always ? infinity() : -infinity();
    uint poisoned = 0;
    for (uint token = begin + ctx.lane(); token < end && !always; token += 32) {
        const float dot = scored(own, cache, entry_at(l, pages, at, token) + c.key, c.dim, wide, l.kv_type);
        poisoned |= dot != dot ? 1 : 0;
        best = dot > best ? dot : best;
    }
    best = lane_max(ctx, best);
    poisoned = lane_max(ctx, poisoned);
    if (ctx.lane() != 0) return;
    scores[((ulong)ctx.group_z() * c.groups + group) * c.room + block] = poisoned ? not_a_number() : best;
}

CONSTANT uint MAX_CHOOSERS = 256;

// Threadgroup memory of a choice.
struct ChoiceMemory {
    // A float a warp.
    SPTR(float) scratch;
    // (MAX_CHOOSERS): of each thread's part, those that are chosen whatever others there are, and those of the least score that is.
    SPTR(uint) larger;
    SPTR(uint) equal;
};

// The `top_k` largest of `count` scores, the earlier of equal ones, ascending → to. All threads of a group take part; each has a
// part of the scores.
template <class T>
DEVICE void choose_best(CTX, const ChoiceMemory m, GPTR(const float) own, uint count, uint top_k, GPTR(T) to) {
    // The largest key that top_k entries reach, bit by bit.
    uint least = 0;
    for (uint bit = 0x80000000u; bit > 0; bit >>= 1) {
        float reach = 0.0f;
        for (uint i = ctx.thread(); i < count; i += ctx.threads())
            reach += key_of(own[i]) >= (least | bit) ? 1.0f : 0.0f;
        reach = group_sum(ctx, reach, m.scratch);
        if (reach < (float)top_k) continue;
        least |= bit;
        if (reach == (float)top_k) break;
    }
    const uint each = (count + ctx.threads() - 1) / ctx.threads(), begin = ctx.thread() * each;
    const uint end = begin + each < count ? begin + each : count;
    uint above = 0, same = 0;
    for (uint i = begin; i < end; ++i) {
        const uint key = key_of(own[i]);
        above += key > least ? 1 : 0;
        same += key == least ? 1 : 0;
    }
    m.larger[ctx.thread()] = above;
    m.equal[ctx.thread()] = same;
    barrier(ctx);
    // Those of the threads before, and of all.
    uint above_before = 0, same_before = 0, above_all = 0;
    for (uint t = 0; t < ctx.threads(); ++t) {
        above_before += t < ctx.thread() ? (uint)m.larger[t] : 0;
        same_before += t < ctx.thread() ? (uint)m.equal[t] : 0;
        above_all += m.larger[t];
    }
    const uint rest = top_k - above_all;
    uint at = above_before + (same_before < rest ? same_before : rest);
    for (uint i = begin; i < end; ++i) {
        const uint key = key_of(own[i]);
        const bool takes = key > least || (key == least && same_before < rest);
        same_before += key == least ? 1 : 0;
        if (takes) to[at++] = (T)i;
    }
}

// The entries of the largest scores → chosen (rows, top_k), for rows that have a choice. A group does a row.
KERNEL(choose_entries, IndexConstants, (const float, scores), (const Place, places), (uint, chosen)) {
    SHARED(float, scratch, 32);
    SHARED(uint, larger, MAX_CHOOSERS);
    SHARED(uint, equal, MAX_CHOOSERS);
    const ChoiceMemory m = {scratch, larger, equal};
    const uint row = c.row + ctx.group_x(), count = entries_to_choose(c, places[row]);
    if (count == 0) return;
    choose_best<uint>(ctx, m, scores + (ulong)ctx.group_x() * c.room, count, c.top_k, chosen + (ulong)row * c.top_k);
}

// The blocks of the largest scores, or all where there is no choice, then −1 → chosen (rows, groups, top_k); where scores cannot
// be compared, what is not a number. A group does a choice. Grid: (rows, groups).
KERNEL(choose_blocks, IndexConstants, (const float, scores), (const Place, places), (float, chosen)) {
    SHARED(float, scratch, 32);
    SHARED(uint, larger, MAX_CHOOSERS);
    SHARED(uint, equal, MAX_CHOOSERS);
    const ChoiceMemory m = {scratch, larger, equal};
    const uint row = c.row + ctx.group_x(), all = choosable(c, places[row]);
    const GPTR(float) to = chosen + ((ulong)row * c.groups + ctx.group_y()) * c.top_k;
    if (all <= c.top_k) {
        for (uint i = ctx.thread(); i < c.top_k; i += ctx.threads()) to[i] = i < all ? (float)i : -1.0f;
        return;
    }
    const GPTR(const float) own = scores + ((ulong)ctx.group_x() * c.groups + ctx.group_y()) * c.room;
    float poisoned = 0.0f;
    for (uint i = ctx.thread(); i < all; i += ctx.threads()) poisoned += own[i] != own[i] ? 1.0f : 0.0f;
    if (group_sum(ctx, poisoned, scratch) > 0.0f) {
        for (uint i = ctx.thread(); i < c.top_k; i += ctx.threads()) to[i] = not_a_number();
        return;
    }
    choose_best<float>(ctx, m, own, all, c.top_k, to);
}

struct AttendEntriesConstants {
    Layout layout;
    // Query heads, key heads, and groups of at most QUERIES query heads that share a key head.
    uint heads, kv_heads, chunks;
    uint dim;
    float scale;
    // Tokens seen, at most; with `grouped`, those of seen entries and those that no entry stands for yet.
    uint window, grouped;
    // Entries that are seen, at most: 0 for all.
    uint top_k;
    uint splits;
    uint has_sinks;
};

// Keys that a row sees, in order.
struct Seen {
    Place at;
    // Tokens before entries and the first one's position; with `grouped`, tokens of entries, then others from that position on.
    uint tokens, first;
    // Whether entries are those of a list.
    bool listed;
    uint count;
};

DEVICE Seen seen_by(const AttendEntriesConstants c, const Place at) {
    const uint entries = (at.position + 1) / c.layout.stride;
    const bool listed = c.top_k != 0 && entries > c.top_k;
    const uint taken = listed ? c.top_k : entries;
    if (c.grouped) {
        const uint tokens = taken * c.layout.stride, first = entries * c.layout.stride;
        const Seen seen = {at, tokens, first, listed, tokens + at.position + 1 - first};
        return seen;
    }
    const uint first = at.position + 1 > c.window ? at.position + 1 - c.window : 0, tokens = at.position + 1 - first;
    const Seen seen = {at, tokens, first, listed, tokens + taken};
    return seen;
}

// Where key i of those that a row sees begins; `list` are the entries of the row.
DEVICE ulong seen_at(const AttendEntriesConstants c, const Seen s, GPTR(const uint) list,
                     GPTR(const uint) pages, uint i) {
    if (c.grouped) {
        const uint stride = c.layout.stride;
        const uint entry = i < s.tokens ? (s.listed ? list[i / stride] : i / stride) : 0;
        return token_at(c.layout, pages, s.at, i < s.tokens ? entry * stride + i % stride : s.first + i - s.tokens);
    }
    if (i < s.tokens) return token_at(c.layout, pages, s.at, s.first + i);
    return entry_at(c.layout, pages, s.at, s.listed ? list[i - s.tokens] : i - s.tokens);
}

// Attention of queries q (rows, heads · dim), 128 threads a group; chosen (rows, top_k). Grid: (kv_heads · chunks, splits,
// rows). What `out` is, `end_scores` says.
KERNEL(attend_entries, AttendEntriesConstants, (const float, q), (const uchar, cache), (const uint, chosen),
       (const Place, places), (const uint, pages), (const float, sinks), (float, stats), (float, out)) {
    SCORE_MEMORY(m);
    SHARED(ulong, starts, KEYS);
    const uint row = ctx.group_z(), split = ctx.group_y();
    const uint kv_head = ctx.group_x() / c.chunks, group = c.heads / c.kv_heads;
    const uint head0 = kv_head * group + ctx.group_x() % c.chunks * QUERIES;
    const uint left = (kv_head + 1) * group - head0;
    const uint queries = left < QUERIES ? left : QUERIES;
    const Seen s = seen_by(c, places[row]);
    const GPTR(const uint) list = chosen + (ulong)row * c.top_k;
    const uint part = (s.count + c.splits - 1) / c.splits, begin = split * part;
    const uint end = begin + part < s.count ? begin + part : s.count;
    const ulong head = (ulong)row * c.heads + head0;
    // Keys of heads, then values of heads; else a key is its value.
    const uint value = c.grouped ? c.kv_heads * c.dim : 0;

    begin_scores(ctx, m, q + head * c.dim, queries, c.dim, c.scale, sinks + (c.has_sinks ? head0 : 0),
                 c.has_sinks && split == 0);
    Mixed mixed = no_values();
    const Layout l = c.layout;
    const bool wide =
        l.kv_type == KV_F16 && c.dim % 8 == 0 && l.page % 8 == 0 && l.token % 8 == 0 && (c.grouped || l.entry % 8 == 0);
    barrier(ctx);
    for (uint tile = begin; tile < end; tile += KEYS) {
        if (tile + ctx.thread() < end) {
            const ulong start = seen_at(c, s, list, pages, tile + ctx.thread()) + kv_head * c.dim;
            starts[ctx.thread()] = start;
            score_key(ctx, m, cache, start, queries, c.dim, wide, l.kv_type);
        }
        barrier(ctx);
        const uint count = end - tile < KEYS ? end - tile : KEYS;
        weigh_keys(ctx, m, queries, count);
        barrier(ctx);
        mixed = faded(m, mixed, queries);
        for (uint i = 0; i < count; ++i) {
            mixed = with_value(ctx, m, mixed, cache, starts[i] + value + ctx.thread(), i, queries, c.dim, l.kv_type);
        }
        barrier(ctx);
    }
    end_scores(ctx, m, mixed, head, queries, split, c.splits, c.dim, stats, out);
}

// Attention over keys that each row has chosen, all of whose heads share them: tokens of a latent cache (DeepSeek sparse attention,
// DeepSeek-V3.2-Exp, 2025), or a window of tokens and entries that stand for others (`graph::CompressedAttention`). A block's
// queries are heads of one row, and keys are gathered.
#include "latent_groups.h"

struct ChosenAttentionConstants {
    u32 heads, rows;
    // Parts that each row's keys are divided into.
    u32 splits;
    // Factor on scores times log2(e), positive.
    float scale;
    // If results are to be the f16 that `latent_products` takes, tokens of its tiles; else 0.
    u32 width;
    // Of 16 bytes: a page, one of its tokens, and one of its entries, which come behind the tokens. Tokens that an entry stands for.
    u32 page, token, entry, stride;
    // Tokens that are seen before entries, and entries that are seen, at most; 0: all.
    u32 window, top_k;
    // Whether lists of entries are floats, and whether `sinks` holds a logit for each head.
    u32 float_list, has_sinks;
};

#if HAS_WARPGROUPS

struct Arguments {
    const void* q;
    const u16* cache;
    // (rows, top_k): entries, ascending, of rows that do not see all.
    const u32* chosen;
    const Place* places;
    const u32* pages;
    const float* sinks;
    float *stats, *out;
};

// A block's work: heads of a row, and tiles of the keys that it sees.
template <bool FLOAT_QUERIES>
struct Listed {
    typedef ChosenAttentionConstants Constants;
    typedef ::Arguments Arguments;
    static const bool CONVERTS = FLOAT_QUERIES, CHECKS = false, SINKS = true;

    // The first query, how many there are, and its head; none: there is no such work.
    u32 query, count, head;
    u32 first_tile, tiles, split;
    // Keys that are seen; tokens before entries, and the position of the first one.
    u32 seen, tokens, first;
    // The entries, if not all are seen.
    const u32* list;
    const u32* pages;

    static DEVICE void add_works(const Arguments& g, const Constants& c, u32& works) {
        if (threadIdx.x == 0) works = c.rows * ((c.heads + QUERIES - 1) / QUERIES) * c.splits;
    }

    // The last rows have most keys: they go first, and who gets the first of one round gets the last of the next.
    static DEVICE Listed at(u32 round, const Arguments& g, const Constants& c, u32 all) {
        Listed w;
        w.count = w.tiles = w.split = w.first_tile = 0;
        const u32 place = round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
        if (place >= all) return w;
        const u32 index = all - 1 - place, chunks = (c.heads + QUERIES - 1) / QUERIES, row = index / (chunks * c.splits);
        const u32 position = __ldg(&g.places[row].position);
        w.split = index / chunks % c.splits;
        w.head = index % chunks * QUERIES;
        w.query = row * c.heads + w.head;
        w.count = min(QUERIES, c.heads - w.head);
        w.pages = g.pages + __ldg(&g.places[row].first_page);
        const u32 entries = (position + 1) / c.stride;
        const bool listed = c.top_k != 0 && entries > c.top_k;
        w.list = listed ? g.chosen + (u64)row * c.top_k : nullptr;
        w.first = position + 1 > c.window ? position + 1 - c.window : 0;
        w.tokens = position + 1 - w.first;
        w.seen = w.tokens + (listed ? c.top_k : entries);
        const u32 tiles = (w.seen + KEYS - 1) / KEYS, part = (tiles + c.splits - 1) / c.splits;
        w.first_tile = min(w.split * part, tiles);
        w.tiles = min(part, tiles - w.first_tile);
        return w;
    }

    DEVICE u32 position_of(u32, u32) const { return seen - 1; }
    DEVICE bool masks(u32 tile) const { return tile * KEYS + KEYS > seen; }

    // Where key i begins, in 16 bytes.
    DEVICE u64 start(const Constants& c, u32 i) const {
        if (i < tokens) {
            const u32 position = first + i;
            return (u64)__ldg(pages + position / PAGE_TOKENS) * c.page + position % PAGE_TOKENS * c.token;
        }
        u32 entry = i - tokens;
        if (list != nullptr) {
            const u32 word = __ldg(list + entry);
            entry = c.float_list ? (u32)__uint_as_float(word) : word;
        }
        const u32 last = (entry + 1) * c.stride - 1, page = last / PAGE_TOKENS;
        return (u64)__ldg(pages + page) * c.page + PAGE_TOKENS * c.token + (entry - page * PAGE_TOKENS / c.stride) * c.entry;
    }

    // A query's sum of weights with its sink's; `base` is the largest score.
    DEVICE float with_sink(const Arguments& g, const Constants& c, u32 query, float sum, float base) const {
        // What cannot be compared has no list; of nothing come zeros.
        if (list != nullptr && c.float_list && __uint_as_float(__ldg(list)) != __uint_as_float(__ldg(list)))
            return __int_as_float(0x7fc00000);
        if (tiles == 0) return 1.0f;
        if (!c.has_sinks) return sum;
        return sum + exp2_fast(__ldg(g.sinks + head + query) * 1.44269504f - (base == -INFINITY ? 0.0f : base));
    }
};

// The threads that bring queries and keys.
template <class S, class W>
struct Gatherer : Bringer<S> {
    const Arguments& g;
    const ChosenAttentionConstants& c;

    DEVICE void load_queries(const W& w) {
        this->wait_for_queries();
#pragma unroll 1
        for (u32 part = 0; part < S::PARTS; part++)
            if (this->piece(part) < S::PIECES) load_queries_of(w, part);
        if constexpr (W::CONVERTS) {
            fence_products();
            barrier_arrive(this->m.queries_full());
        }
    }

    // Those in f16 come with the tile that is loaded next.
    DEVICE void load_queries_of(const W& w, u32 part) {
#pragma unroll 1
        for (u32 row = this->first_row(); row < QUERIES; row += GROUP / 8) {
            const u32 to = this->place(this->m.queries, part, row);
            const u64 from = ((u64)w.query + (row < w.count ? row : 0)) * S::WIDTH + this->piece(part) * 8;
            if constexpr (W::CONVERTS) {
                const float4 *q = (const float4*)((const float*)g.q + from), a = __ldg(q), b = __ldg(q + 1);
                const bool here = row < w.count;
                store_shared_16(to, here ? h2_of(a.x, a.y) : 0, here ? h2_of(a.z, a.w) : 0, here ? h2_of(b.x, b.y) : 0,
                                here ? h2_of(b.z, b.w) : 0);
            } else {
                copy_async_16(to, (const u16*)g.q + from, row < w.count);
            }
        }
    }

    DEVICE void load(const W& w, u32 tile) {
        // Of this tile and, while others still read them, of the one before.
        __shared__ u64 starts[2][KEYS];
        u64* own = starts[this->loaded % 2];
        const u32 key = tile * KEYS + this->thread(), rows = w.seen - tile * KEYS;
        if (this->thread() < KEYS && key < w.seen) own[this->thread()] = w.start(c, key);
        asm volatile("bar.sync 1, %0;" ::"n"(GROUP) : "memory");
#pragma unroll 1
        for (u32 part = 0; part < S::PARTS; part++) {
            this->wait_for_room(part);
            const u32 piece = this->piece(part);
            if (piece < S::PIECES) {
#pragma unroll
                for (u32 row = this->first_row(); row < KEYS; row += GROUP / 8) {
                    // Rows that are not there are zeros.
                    const u64 from = row < rows ? own[row] + piece : 0;
                    copy_async_16(this->place(this->tile(), part, row), g.cache + from * 8, row < rows);
                }
            }
            barrier_arrive_after_copies(this->m.full(this->loaded, part));
        }
        this->loaded++;
    }

    DEVICE void run(u32 all, u32 rounds) {
        for (u32 round = 0; round < rounds; round++) {
            const W w = W::at(round, g, c, all);
            if (w.tiles == 0) continue;
            load_queries(w);
            for (u32 t = 0; t < w.tiles; t++) load(w, w.first_tile + t);
        }
    }
};

#endif // HAS_WARPGROUPS

// q (rows, heads, RANK + ROPE), f32 if there is no ROPE and f16 else; the cache is f16 with what the batch adds to it. With one
// split, `out` is (rows, heads, RANK) f32, or f16 as `latent_enter` writes it; with more, of each query RANK unscaled sums for
// each split, and `stats` largest score and sum of weights. Shared memory: a tile of queries, STAGES tiles of keys, and weights,
// from a multiple of 1024 bytes on.
// clang-format off
#define CHOSEN_ATTENTION(rank, rope)                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                          \
        chosen_attention_##rank##_##rope(const void* q, const u16* cache, const u32* chosen, const Place* places,     \
                                         const u32* pages, const float* sinks, float* stats, float* out,              \
                                         const __grid_constant__ ChosenAttentionConstants c) {                        \
        WITH_WARPGROUPS(extern __shared__ u8 shared[];                                                                \
            typedef Listed<rope == 0> W;                                                                              \
            typedef Shape<rank, rope> S;                                                                              \
            const Arguments g = {q, cache, chosen, places, pages, sinks, stats, out};                                 \
            attend<S, W, Gatherer<S, W>>(g, c, shared);)                                                              \
    }
// clang-format on

CHOSEN_ATTENTION(512, 64)
CHOSEN_ATTENTION(256, 64)
CHOSEN_ATTENTION(256, 32)
CHOSEN_ATTENTION(512, 0)

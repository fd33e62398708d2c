// Causal attention over latents: a block's queries are heads of one token or of several that follow each other, and tiles are
// pages. A token's result does not depend on how its sequence is cut into batches.
#include "latent_groups.h"

static_assert(KEYS == PAGE_TOKENS, "tiles are pages");

struct LatentAttentionConstants {
    u32 heads, rows, sequences;
    // Parts that each row's keys are divided into.
    u32 splits;
    // Factor on scores times log2(e), positive.
    float scale;
    // If results are to be the f16 that `latent_products` takes, tokens of its tiles; else 0.
    u32 width;
};

#if HAS_WARPGROUPS

struct Arguments {
    const u16 *q, *latents;
    const Sequence* sequences;
    const Place* places;
    const u32* pages;
    float *stats, *out;
};

// A block's work: queries, counted as (row, head), and the pages that some of them see.
struct Causal {
    typedef LatentAttentionConstants Constants;
    typedef ::Arguments Arguments;
    static const bool CONVERTS = false, CHECKS = true, SINKS = false;

    // The first query, how many there are, and its head; none: there is no such work.
    u32 query, count, head;
    // Of the first query, and how many positions there are keys of.
    u32 position, end;
    u32 first_tile, tiles;
    u32 split;
    const u32* pages;

    static DEVICE u32 tiles_of(const Sequence* s, const Constants& c) {
        return (__ldg(&s->rows) * c.heads + QUERIES - 1) / QUERIES;
    }

    // Adds up how many works there are, by all threads of a block.
    static DEVICE void add_works(const Arguments& g, const Constants& c, u32& works) {
        if (c.splits > 1) {
            if (threadIdx.x == 0) works = c.rows * ((c.heads + QUERIES - 1) / QUERIES) * c.splits;
        } else {
            for (u32 s = threadIdx.x; s < c.sequences; s += THREADS) atomicAdd(&works, tiles_of(g.sequences + s, c));
        }
    }

    DEVICE u32 position_of(u32 i, u32 heads) const { return position + (head + i) / heads; }

    // A block's work of a round, of `all`. The last queries have most keys: they go first, and who gets the first of one
    // round gets the last of the next.
    static DEVICE Causal at(u32 round, const Arguments& g, const Constants& c, u32 all) {
        Causal w;
        w.count = w.tiles = w.split = w.first_tile = 0;
        const u32 index = round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
        if (index >= all) return w;
        if (c.splits > 1) {
            const u32 chunks = (c.heads + QUERIES - 1) / QUERIES, row = index / (chunks * c.splits);
            const Place at = {__ldg(&g.places[row].position), __ldg(&g.places[row].first_page)};
            w.split = index / chunks % c.splits;
            w.head = index % chunks * QUERIES;
            w.query = row * c.heads + w.head;
            w.count = min(QUERIES, c.heads - w.head);
            w.position = at.position, w.end = at.position + 1;
            w.pages = g.pages + at.first_page;
            const u32 tiles = at.position / KEYS + 1, part = (tiles + c.splits - 1) / c.splits;
            w.first_tile = min(w.split * part, tiles);
            w.tiles = min(part, tiles - w.first_tile);
            return w;
        }
        u32 tile = all - 1 - index, s = 0;
        for (;; s++) {
            const u32 tiles = tiles_of(g.sequences + s, c);
            if (tile < tiles) break;
            tile -= tiles;
        }
        const Sequence* span = g.sequences + s;
        const u32 first_row = __ldg(&span->first_row), rows = __ldg(&span->rows), start = __ldg(&span->start);
        const u32 first = tile * QUERIES;
        w.query = first_row * c.heads + first;
        w.count = min(QUERIES, rows * c.heads - first);
        w.head = first % c.heads;
        w.position = start + first / c.heads;
        w.end = start + rows;
        w.pages = g.pages + __ldg(&g.places[first_row].first_page);
        w.tiles = w.position_of(w.count - 1, c.heads) / KEYS + 1;
        return w;
    }

    // Whether some of the queries do not see some of a page's keys.
    DEVICE bool masks(u32 tile) const { return tile * KEYS + KEYS - 1 > position; }
};

// The threads that bring queries and pages.
template <class S>
struct PageLoader : Bringer<S> {
    const Arguments& g;
    const LatentAttentionConstants& c;

    // Rows that are not there are zeros.
    DEVICE void load_part(u32 to, const u16* from, u32 part, u32 rows) {
        if (this->piece(part) >= S::PIECES) return;
#pragma unroll
        for (u32 row = this->first_row(); row < 64; row += GROUP / 8)
            copy_async_16(this->place(to, part, row), row < rows ? from + row * S::WIDTH + this->piece(part) * 8 : from,
                          row < rows);
    }

    // Comes with the page that is loaded next.
    DEVICE void load_queries(const Causal& w) {
        this->wait_for_queries();
#pragma unroll 1
        for (u32 part = 0; part < S::PARTS; part++)
            load_part(this->m.queries, g.q + (u64)w.query * S::WIDTH, part, w.count);
    }

    DEVICE void load(const Causal& w, u32 tile) {
        const u32 to = this->tile(), key = tile * KEYS;
        const u16* from = g.latents + (u64)__ldg(w.pages + tile) * KEYS * S::WIDTH;
        const bool checks = w.masks(tile);
#pragma unroll 1
        for (u32 part = 0; part < S::PARTS; part++) {
            this->wait_for_room(part);
            load_part(to, from, part, w.end - key);
            if (!checks) barrier_arrive_after_copies(this->m.full(this->loaded, part));
        }
        if (checks) check(to);
        this->loaded++;
    }

    // Zero times a value that is not finite is not zero: such values are taken out, and noted.
    DEVICE void check(u32 tile) {
        u32* spoiled = this->m.spoiled[this->loaded % STAGES];
        if (this->thread() < 2) spoiled[this->thread()] = 0;
        copy_async_commit();
        copy_async_wait<0>();
        asm volatile("bar.sync 1, %0;" ::"n"(GROUP) : "memory");
        const u32 row = this->thread() / 2;
#pragma unroll 2
        for (u32 part = 0; part < S::VALUES; part++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 at = tile + part * PART_BYTES + row * 128 + ((this->thread() % 2 * 4 + i) ^ row) % 8 * 16;
                uint4 v;
                asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                             : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                             : "r"(at));
                if (finite_pair(v.x) && finite_pair(v.y) && finite_pair(v.z) && finite_pair(v.w)) continue;
                store_shared_16(at, 0, 0, 0, 0);
                atomicOr(&spoiled[row / 32], 1u << row % 32);
            }
        }
        for (u32 part = 0; part < S::PARTS; part++) barrier_arrive(this->m.full(this->loaded, part));
    }

    DEVICE void run(u32 all, u32 rounds) {
        for (u32 round = 0; round < rounds; round++) {
            const Causal w = Causal::at(round, g, c, all);
            if (w.tiles == 0) continue;
            load_queries(w);
            for (u32 t = 0; t < w.tiles; t++) load(w, w.first_tile + t);
        }
    }
};

#endif // HAS_WARPGROUPS

// q (rows, heads, RANK + ROPE) f16; latents (pages, PAGE_TOKENS, RANK + ROPE) f16 with those of the batch appended. With one
// split, `out` is (rows, heads, RANK) f32, or f16 as `latent_enter` writes it; with more, of each query RANK unscaled sums for
// each split, and `stats` largest score and sum of weights. Shared memory: a tile of queries, STAGES pages, and weights, from a
// multiple of 1024 bytes on.
// clang-format off
#define LATENT_ATTENTION(rank, rope)                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                          \
        latent_attention_##rank##_##rope(const u16* q, const u16* latents, const Sequence* sequences,                 \
                                         const Place* places, const u32* pages, float* stats, float* out,             \
                                         const __grid_constant__ LatentAttentionConstants c) {                        \
        WITH_WARPGROUPS(extern __shared__ u8 shared[];                                                                \
            const Arguments g = {q, latents, sequences, places, pages, stats, out};                                   \
            attend<Shape<rank, rope>, Causal, PageLoader<Shape<rank, rope>>>(g, c, shared);)                          \
    }
// clang-format on

LATENT_ATTENTION(512, 64)
LATENT_ATTENTION(256, 64)
LATENT_ATTENTION(256, 32)

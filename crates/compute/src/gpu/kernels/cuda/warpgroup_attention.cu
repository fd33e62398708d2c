// Causal attention of many tokens over key-value pages by warp groups of compute capability 9.0, without storing scores
// (Shah et al., FlashAttention-3, 2024).
//
// A block takes 128 tokens of one head through the keys, two warp groups of 64 tokens each. A third one brings keys and values
// into a ring of shared memory. A group makes its softmax while it multiplies the weights of the keys before with values. A
// block goes on from tile to tile.
//
// Tiles of keys begin at multiples of their size, are visited in order from the first visible one, and one that a token does
// not see changes nothing of its sums: a token's result does not depend on how its sequence is cut into batches.
#include "warpgroup_softmax.h"

#include "seen.h"

const u32 GROUP_QUERIES = 64;
const u32 QUERIES = 2 * GROUP_QUERIES;
const u32 LOADERS = 128;
const u32 THREADS = LOADERS + 256;
// Tiles of keys or values in shared memory.
const u32 STAGES = 5;

struct WideAttentionConstants {
    u32 heads, kv_heads, sequences;
    // See `first_seen`.
    u32 window, chunk;
    // Factor on scores times log2(e), positive.
    float scale;
    // Whether `sinks` holds a logit for each head.
    u32 has_sinks;
};

#if HAS_WARPGROUPS

// A barrier of the threads that load.
DEVICE void loaders_meet() { asm volatile("bar.sync 1, %0;" ::"n"(LOADERS) : "memory"); }

template <u32 HEAD_DIM>
struct Shape {
    static const u32 KEYS = HEAD_DIM > 128 ? 64 : 128;
    // Of 16 bytes in a row.
    static const u32 PIECES = HEAD_DIM / 8;
    // Matrices of 64 columns in a tile.
    static const u32 PARTS = HEAD_DIM / 64;
    static const u32 STAGE_BYTES = KEYS * HEAD_DIM * 2;
    // Of a warp group's queries.
    static const u32 QUERY_BYTES = GROUP_QUERIES * HEAD_DIM * 2;
    // Tiles of queries in shared memory.
    static const u32 QUERY_STAGES = HEAD_DIM > 128 ? 1 : 2;

    // Where piece p of a row is in a tile of so many rows.
    static DEVICE u32 piece(u32 rows, u32 row, u32 p) {
        return p / 8 * rows * 128 + row * 128 + ((p ^ row) % 8) * 16;
    }
};

struct Arguments {
    const u16 *q, *keys, *values;
    const Sequence* sequences;
    const Place* places;
    const u32* pages;
    const float* sinks;
    float* out;
};

// A block's work: queries of a head, and the tiles of keys that some of them see.
struct Work {
    u32 row, count, position;
    u32 head, kv_head;
    // The first position that the last query sees, and how many there are keys of.
    u32 from, end;
    u32 first_tile, tiles;
    const u32* pages;

    // Of queries.
    static DEVICE u32 tiles_of(const Sequence* s) { return (__ldg(&s->rows) + QUERIES - 1) / QUERIES; }

    // A block's work of a round, of `all` tiles of queries. The last ones have most keys: they go first, and who gets the
    // first of one round gets the last of the next. No tiles of keys: there is no such work.
    template <u32 KEYS>
    static DEVICE Work at(u32 round, const Arguments& g, const WideAttentionConstants& c, u32 all) {
        Work w;
        w.tiles = 0;
        const u32 index = round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
        if (index >= all * c.heads) return w;
        u32 tile = all - 1 - index / c.heads, s = 0;
        w.head = index % c.heads, w.kv_head = w.head / (c.heads / c.kv_heads);
        for (;; s++) {
            const u32 tiles = tiles_of(g.sequences + s);
            if (tile < tiles) break;
            tile -= tiles;
        }
        const Sequence* span = g.sequences + s;
        const u32 first_row = __ldg(&span->first_row), rows = __ldg(&span->rows), start = __ldg(&span->start);
        w.row = first_row + tile * QUERIES;
        w.count = min(QUERIES, rows - tile * QUERIES);
        w.position = start + tile * QUERIES;
        w.end = start + rows;
        w.pages = g.pages + __ldg(&g.places[first_row].first_page);
        w.from = first_seen(w.position + w.count - 1, c.window, c.chunk);
        w.first_tile = first_seen(w.position, c.window, c.chunk) / KEYS;
        w.tiles = (w.position + w.count - 1) / KEYS + 1 - w.first_tile;
        return w;
    }

    // Whether some of the queries from position `first` on may not see some of a tile's keys.
    template <u32 KEYS>
    DEVICE bool masks(u32 tile, u32 first) const {
        return tile * KEYS + KEYS - 1 > first || tile * KEYS < from;
    }
};

// Where stages of keys and values are and those of queries, their barriers, and which keys of a stage have values that are
// not finite, a bit each.
struct Ring {
    u32 queries, stages, barriers;
    u32 (*spoiled)[4];

    template <u32 BYTES>
    DEVICE u32 at(u32 i) const { return stages + i % STAGES * BYTES; }
    DEVICE u32 full(u32 i) const { return barriers + i % STAGES * 8; }
    DEVICE u32 empty(u32 i) const { return barriers + (STAGES + i % STAGES) * 8; }
    // Of queries; they are there when the first keys are.
    DEVICE u32 done(u32 i) const { return barriers + (2 * STAGES + i) * 8; }
};

// The threads that bring keys and values, tile by tile: keys, then the values of the tile before.
template <u32 HEAD_DIM>
struct Loader {
    typedef Shape<HEAD_DIM> S;
    static const u32 ROWS_AT_ONCE = LOADERS / S::PIECES;

    const Arguments& g;
    const WideAttentionConstants& c;
    Ring ring;
    u32 loaded = 0, works = 0;

    // Comes with the keys that are loaded next; missing rows are zeros.
    DEVICE void load_queries(const Work& w) {
        const u32 piece = threadIdx.x % S::PIECES, first = threadIdx.x / S::PIECES, stage = works % S::QUERY_STAGES;
        if (works >= S::QUERY_STAGES) barrier_wait(ring.done(stage), (works / S::QUERY_STAGES - 1) & 1);
        works++;
        const u16* from = g.q + ((u64)(w.row + first) * c.heads + w.head) * HEAD_DIM + piece * 8;
        const u32 to = ring.queries + stage * 2 * S::QUERY_BYTES;
#pragma unroll 2
        for (u32 row = first; row < QUERIES; row += ROWS_AT_ONCE) {
            const u32 at = row / GROUP_QUERIES * S::QUERY_BYTES + S::piece(GROUP_QUERIES, row % GROUP_QUERIES, piece);
            copy_async_16(to + at, row < w.count ? from : g.q, row < w.count);
            from += ROWS_AT_ONCE * c.heads * HEAD_DIM;
        }
    }

    DEVICE void load(const Work& w, const u16* pool, u32 tile, bool checks) {
        const u32 piece = threadIdx.x % S::PIECES, first = threadIdx.x / S::PIECES;
        if (loaded >= STAGES) barrier_wait(ring.empty(loaded), (loaded / STAGES - 1) & 1);
        const u32 to = ring.template at<S::STAGE_BYTES>(loaded);
#pragma unroll
        for (u32 page = 0; page < S::KEYS / PAGE_TOKENS; page++) {
            const u32 key = tile * S::KEYS + page * PAGE_TOKENS;
            const u32 number = __ldg(w.pages + (key < w.end ? key : 0) / PAGE_TOKENS);
            const u16* from =
                pool + ((u64)number * c.kv_heads + w.kv_head) * PAGE_TOKENS * HEAD_DIM + first * HEAD_DIM + piece * 8;
#pragma unroll
            for (u32 row = 0; row < PAGE_TOKENS; row += ROWS_AT_ONCE)
                copy_async_16(to + S::piece(S::KEYS, page * PAGE_TOKENS + first + row, piece), from + row * HEAD_DIM,
                              key + first + row < w.end);
        }
        if (!checks) return barrier_arrive_after_copies(ring.full(loaded++));
        // Zero times a value that is not finite is not zero: such values are taken out, and noted.
        u32* spoiled = ring.spoiled[loaded % STAGES];
        if (threadIdx.x < 4) spoiled[threadIdx.x] = 0;
        copy_async_commit();
        copy_async_wait<0>();
        loaders_meet();
        for (u32 row = first; row < S::KEYS; row += ROWS_AT_ONCE) {
            const u32 at = to + S::piece(S::KEYS, row, piece);
            uint4 v;
            asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                         : "r"(at));
            if (finite_pair(v.x) && finite_pair(v.y) && finite_pair(v.z) && finite_pair(v.w)) continue;
            store_shared_16(at, 0, 0, 0, 0);
            atomicOr(&spoiled[row / 32], 1u << row % 32);
        }
        barrier_arrive(ring.full(loaded++));
    }

    DEVICE void run(u32 all, u32 rounds) {
        for (u32 round = 0; round < rounds; round++) {
            const Work w = Work::at<S::KEYS>(round, g, c, all);
            if (w.tiles == 0) continue;
            load_queries(w);
            for (u32 t = 0; t <= w.tiles; t++) {
                if (t < w.tiles) load(w, g.keys, w.first_tile + t, false);
                if (t == 0) continue;
                const u32 before = w.first_tile + t - 1;
                load(w, g.values, before, w.template masks<S::KEYS>(before, w.position));
            }
        }
    }
};

// A warp group that computes: 64 queries at a time.
template <u32 HEAD_DIM>
struct Computer {
    typedef Shape<HEAD_DIM> S;
    static const u32 MIXED = HEAD_DIM > 128 ? 128 : HEAD_DIM;

    const Arguments& g;
    const WideAttentionConstants& c;
    Ring ring;
    // 0 or 1.
    u32 group;
    u32 taken = 0, works = 0;
    // Of the thread's two tokens.
    u32 position[2];
    float largest[2], sum[2], keep[2];
    float o[HEAD_DIM / 2];
    float score[S::KEYS / 2];
    u32 weight[S::KEYS / 16][4];

    DEVICE u32 lane() const { return threadIdx.x & 31; }
    DEVICE u32 warp() const { return threadIdx.x / 32 % 4; }
    DEVICE bool visible(u32 i, u32 key) const {
        return key <= position[i] && key >= first_seen(position[i], c.window, c.chunk);
    }
    // Until so many stages from this one on are full.
    DEVICE void await(u32 stage, u32 count) const {
        for (u32 i = stage; i < stage + count; i++) barrier_wait(ring.full(i), i / STAGES & 1);
        fence_products();
    }
    DEVICE void release(u32 i) const {
        __syncwarp();
        if (lane() == 0) barrier_arrive(ring.empty(i));
    }

    DEVICE void finish_queries() const {
        if (lane() == 0) barrier_arrive(ring.done(works % S::QUERY_STAGES));
    }

    // Begins the scores of the keys of a stage.
    DEVICE void begin_scores(u32 stage) {
        const u32 keys = ring.template at<S::STAGE_BYTES>(stage);
        const u32 queries = ring.queries + (works % S::QUERY_STAGES * 2 + group) * S::QUERY_BYTES;
#pragma unroll
        for (u32 part = 0; part < S::PARTS; part++) {
            const u64 a = matrix_at(queries + part * GROUP_QUERIES * 128), b = matrix_at(keys + part * S::KEYS * 128);
#pragma unroll
            for (u32 k = 0; k < 4; k++) AttentionProduct<S::KEYS>::score(score, a + 2 * k, b + 2 * k, part + k);
        }
        warpgroup_commit();
    }

    // Begins to add the values of a stage.
    DEVICE void begin_values(u32 stage) {
        const u32 values = ring.template at<S::STAGE_BYTES>(stage);
#pragma unroll
        for (u32 k = 0; k < S::KEYS / 16; k++)
#pragma unroll
            for (u32 part = 0; part < HEAD_DIM; part += MIXED)
                AttentionProduct<MIXED>::mix(
                    *(float(*)[MIXED / 2])(o + part / 2), weight[k],
                    transposed_at(values + part / 64 * S::KEYS * 128 + k * 2048, S::KEYS * 128));
        warpgroup_commit();
    }

    // Softmax, with sums and largest scores that run on from tile to tile.
    DEVICE void soften(const Work& w, u32 tile) {
        const u32 first = w.position + group * GROUP_QUERIES;
        if (w.template masks<S::KEYS>(tile, first)) {
            const u32 from[2] = {first_seen(position[0], c.window, c.chunk),
                                 first_seen(position[1], c.window, c.chunk)};
#pragma unroll
            for (u32 n = 0; n < S::KEYS / 8; n++)
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    const u32 key = tile * S::KEYS + n * 8 + 2 * (lane() & 3) + (i & 1);
                    if (key < from[i / 2] || key > position[i / 2]) score[4 * n + i] = -INFINITY;
                }
        }
        // Of every other column, for shorter chains.
        float most[4] = {largest[0], -INFINITY, largest[1], -INFINITY}, more[4] = {}, next[2], base[2];
#pragma unroll
        for (u32 n = 0; n < S::KEYS / 8; n++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) most[i] = fmaxf(most[i], score[4 * n + i]);
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            next[i] = fmaxf(most[2 * i], most[2 * i + 1]);
            next[i] = fmaxf(next[i], __shfl_xor_sync(0xffffffffu, next[i], 1));
            next[i] = fmaxf(next[i], __shfl_xor_sync(0xffffffffu, next[i], 2));
            base[i] = next[i] == -INFINITY ? 0.0f : __fmul_rn(next[i], c.scale);
            // Exactly one where the largest score stays, so not by way of a sum that is rounded once.
            keep[i] = exp2_fast(__fmul_rn(largest[i], c.scale) - base[i]);
            largest[i] = next[i];
        }
#pragma unroll
        for (u32 n = 0; n < S::KEYS / 8; n++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                score[4 * n + i] = exp2_fast(fmaf(score[4 * n + i], c.scale, -base[i / 2]));
                more[i] += score[4 * n + i];
            }
#pragma unroll
        for (u32 i = 0; i < 2; i++) sum[i] = fmaf(sum[i], keep[i], more[2 * i] + more[2 * i + 1]);
    }

    DEVICE void pack() {
#pragma unroll
        for (u32 k = 0; k < S::KEYS / 16; k++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) weight[k][i] = h2_of(score[8 * k + 2 * i], score[8 * k + 2 * i + 1]);
    }

    // Tokens that see values which are not finite get sums that are not numbers.
    DEVICE void spoil(const Work& w, u32 tile, u32 stage) {
        if (!w.template masks<S::KEYS>(tile, w.position)) return;
        for (u32 part = 0; part < S::KEYS / 32; part++)
            for (u32 left = ring.spoiled[stage % STAGES][part]; left != 0; left &= left - 1)
                for (u32 i = 0; i < 2; i++)
                    if (visible(i, tile * S::KEYS + part * 32 + __ffs(left) - 1)) sum[i] = __int_as_float(0x7fc00000);
    }

    DEVICE void store(const Work& w) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
            float factor = 1.0f;
            if (c.has_sinks) {
                const float sink = g.sinks[w.head] * 1.44269504f, own = largest[i] * c.scale, base = fmaxf(own, sink);
                factor = exp2_fast(own - base);
                sum[i] = sum[i] * factor + exp2_fast(sink - base);
            }
            factor /= sum[i];
            const u32 row = group * GROUP_QUERIES + warp() * 16 + lane() / 4 + 8 * i;
            if (row >= w.count) continue;
            float* to = g.out + ((u64)(w.row + row) * c.heads + w.head) * HEAD_DIM + 2 * (lane() & 3);
#pragma unroll
            for (u32 n = 0; n < HEAD_DIM / 8; n++)
                *(float2*)(to + n * 8) = make_float2(o[4 * n + 2 * i] * factor, o[4 * n + 2 * i + 1] * factor);
        }
    }

    DEVICE void run(u32 all, u32 rounds) {
        for (u32 round = 0; round < rounds; round++) {
            const Work w = Work::at<S::KEYS>(round, g, c, all);
            if (w.tiles == 0) continue;
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                position[i] = w.position + group * GROUP_QUERIES + warp() * 16 + lane() / 4 + 8 * i;
                largest[i] = -INFINITY, sum[i] = 0.0f;
            }
#pragma unroll
            for (u32 i = 0; i < HEAD_DIM / 2; i++) o[i] = 0.0f;
            await(taken, 1);
            warpgroup_fence();
            begin_scores(taken);
            products_wait<0>();
            hold(score);
            release(taken++);
            if (w.tiles == 1) finish_queries();
            soften(w, w.first_tile);
            pack();
            for (u32 t = 1; t < w.tiles; t++) {
                // Keys of this tile, and values of the one before.
                await(taken, 2);
                hold(score);
                hold(o);
                warpgroup_fence();
                begin_scores(taken);
                begin_values(taken + 1);
                products_wait<1>();
                hold(score);
                release(taken);
                if (t + 1 == w.tiles) finish_queries();
                soften(w, w.first_tile + t);
                hold(score);
                // A branch between softmax and waiting also keeps the assembler from waiting first.
                spoil(w, w.first_tile + t - 1, taken + 1);
                products_wait<0>();
                hold(o);
                release(taken + 1);
                taken += 2;
                // Once the largest scores have been seen, nothing changes.
                if (__any_sync(0xffffffffu, keep[0] != 1.0f || keep[1] != 1.0f)) {
#pragma unroll
                    for (u32 i = 0; i < HEAD_DIM / 2; i++) o[i] *= keep[i / 2 % 2];
                }
                pack();
            }
            await(taken, 1);
            hold(o);
            warpgroup_fence();
            begin_values(taken);
            spoil(w, w.first_tile + w.tiles - 1, taken);
            products_wait<0>();
            hold(o);
            release(taken++);
            store(w);
            works++;
        }
    }
};

template <u32 HEAD_DIM>
DEVICE void attend(const Arguments& g, const WideAttentionConstants& c, u8* shared) {
    typedef Shape<HEAD_DIM> S;
    __shared__ __align__(8) u64 barriers[2 * STAGES + S::QUERY_STAGES];
    __shared__ u32 spoiled[STAGES][4], tiles;
    const u32 start = (shared_address(shared) + 1023) / 1024 * 1024;
    const Ring ring = {start, start + S::QUERY_STAGES * 2 * S::QUERY_BYTES, shared_address(barriers), spoiled};
    if (threadIdx.x == 0) {
        tiles = 0;
        for (u32 i = 0; i < STAGES; i++) {
            barrier_init(ring.full(i), LOADERS);
            barrier_init(ring.empty(i), 8);
        }
        for (u32 i = 0; i < S::QUERY_STAGES; i++) barrier_init(ring.done(i), 8);
        barriers_ready();
    }
    __syncthreads();
    after_previous();
    for (u32 s = threadIdx.x; s < c.sequences; s += THREADS) atomicAdd(&tiles, Work::tiles_of(g.sequences + s));
    __syncthreads();
    const u32 all = tiles, rounds = (all * c.heads + gridDim.x - 1) / gridDim.x;
    if (threadIdx.x < LOADERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        Loader<HEAD_DIM> loader{g, c, ring};
        loader.run(all, rounds);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        const u32 group = threadIdx.x / 128 - 1;
        Computer<HEAD_DIM> computer{g, c, ring, group};
        computer.run(all, rounds);
    }
}

#endif // HAS_WARPGROUPS

// q (rows, heads · HEAD_DIM) f16; keys and values (pages, kv_heads, PAGE_TOKENS, HEAD_DIM) f16 with those of the batch
// appended; out as q, f32. Shared memory: QUERY_STAGES tiles of queries and STAGES tiles of keys, from a multiple of 1024 bytes on.
// clang-format off
#define WIDE_ATTENTION(head_dim)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                         \
        wide_attention_##head_dim(const u16* q, const u16* keys, const u16* values, const Sequence* sequences,     \
                                  const Place* places, const u32* pages, const float* sinks, float* out,             \
                                  const __grid_constant__ WideAttentionConstants c) {                                \
        WITH_WARPGROUPS(extern __shared__ u8 shared[];                                                               \
            attend<head_dim>({q, keys, values, sequences, places, pages, sinks, out}, c, shared);)                   \
    }
// clang-format on

WIDE_ATTENTION(64)
WIDE_ATTENTION(128)
WIDE_ATTENTION(256)

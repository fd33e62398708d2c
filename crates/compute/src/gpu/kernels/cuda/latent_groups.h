// Attention whose heads share a key a token, the first channels of which are its value, by warp groups of compute capability
// 9.0 (multi-head latent attention, DeepSeek-V2, 2024). A file that includes this says which keys a block's queries see, and
// brings them.
//
// A block takes 64 queries through keys, 64 at a time. One warp group brings keys into shared memory, one makes scores and their
// softmax, two add values, half of the channels each: scores of a tile of keys are multiplied while the values of the one before
// are.
//
// Tiles are visited in order from the first one, and one that a query does not see changes nothing of its sums.
#pragma once
#include "warpgroup_softmax.h"

const u32 QUERIES = 64;
const u32 KEYS = 64;
const u32 GROUP = 128;
const u32 THREADS = 4 * GROUP;
// Tiles in shared memory.
const u32 STAGES = 2;
// Of 64 rows of 64 channels.
const u32 PART_BYTES = 64 * 64 * 2;

#if HAS_WARPGROUPS

// d = a · b unless it `adds`: a (64, 16) and b (16, N), both row-major f16 in shared memory.
template <int N>
struct MixingProduct;

#define MIXING_PRODUCT(half, a0, b0)                                                                                   \
    template <>                                                                                                        \
    struct MixingProduct<2 * half> {                                                                                   \
        static DEVICE void add(float (&d)[half], u64 a, u64 b) {                                                       \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" WIDTH_##half "k16.f32.f16.f16 {" REGISTERS_##half "}, "   \
                         a0 ", " b0 ", 1, 1, 1, 0, 1;"                                                                 \
                         : RESULTS_##half                                                                              \
                         : "l"(a), "l"(b));                                                                            \
        }                                                                                                              \
    };
MIXING_PRODUCT(64, "%64", "%65")
#undef MIXING_PRODUCT

template <u32 RANK, u32 ROPE>
struct Shape {
    static const u32 WIDTH = RANK + ROPE;
    // Of 16 bytes in a row.
    static const u32 PIECES = WIDTH / 8;
    // Matrices of up to 64 channels in a tile, and those that are values.
    static const u32 PARTS = (WIDTH + 63) / 64;
    static const u32 VALUES = RANK / 64;
    // Channels of values that a group adds.
    static const u32 HALF = RANK / 2;
    static const u32 TILE_BYTES = PARTS * PART_BYTES;
};

// Where queries, tiles and weights are in shared memory, and what tells who may go on. Which keys of a tile have values that
// are not finite, a bit each; by which sums before a tile's are multiplied, and at last all sums, of each query.
struct Memory {
    u32 queries, tiles, weights, barriers;
    u32 (*spoiled)[2];
    float *keep, (*factors)[QUERIES];

    static const u32 BARRIERS = STAGES * 9 + STAGES * 2 + 4;

    DEVICE u32 full(u32 i, u32 part) const { return barriers + (i % STAGES * 9 + part) * 8; }
    // Of each half of the values; channels that are none go with the second.
    DEVICE u32 empty(u32 i, u32 half) const { return barriers + (STAGES * 9 + i % STAGES * 2 + half) * 8; }
    // Queries have been used; they are there when the first tile is, or, where they are written one by one, when this says so.
    DEVICE u32 queries_done() const { return barriers + STAGES * 11 * 8; }
    DEVICE u32 queries_full() const { return barriers + (STAGES * 11 + 3) * 8; }
    DEVICE u32 weights_full() const { return barriers + (STAGES * 11 + 1) * 8; }
    DEVICE u32 weights_empty() const { return barriers + (STAGES * 11 + 2) * 8; }
};

DEVICE u32 lane() { return threadIdx.x & 31; }
DEVICE u32 warp_of_group() { return threadIdx.x / 32 % 4; }
// The first of the thread's two queries; the other is eight further on.
DEVICE u32 first_query() { return warp_of_group() * 16 + lane() / 4; }

// The warp group that makes scores and weights.
// W is a block's work: which queries and tiles, whether queries are written to shared memory one by one (CONVERTS), whether values
// that are not finite are taken out of tiles that not all queries see whole (CHECKS), whether there are sinks (SINKS).
template <class S, class W>
struct Scorer {
    const typename W::Arguments& g;
    const typename W::Constants& c;
    const Memory& m;
    u32 taken = 0, works = 0;
    // Of the thread's two queries.
    u32 position[2];
    float largest[2], sum[2], keep[2];
    float score[KEYS / 2];

    DEVICE void make_scores() {
        const u32 keys = m.tiles + taken % STAGES * S::TILE_BYTES;
#pragma unroll
        for (u32 part = 0; part < S::PARTS; part++) {
            barrier_wait(m.full(taken, part), taken / STAGES & 1);
            fence_products();
            warpgroup_fence();
            const u64 a = matrix_at(m.queries + part * PART_BYTES), b = matrix_at(keys + part * PART_BYTES);
#pragma unroll
            for (u32 k = 0; k < 4; k++)
                if (part * 64 + k * 16 < S::WIDTH) AttentionProduct<KEYS>::score(score, a + 2 * k, b + 2 * k, part + k);
        }
        warpgroup_commit();
        products_wait<0>();
        hold(score);
    }

    // Softmax, with sums and largest scores that run on from tile to tile.
    DEVICE void soften(const W& w, u32 tile) {
        if (w.masks(tile)) {
#pragma unroll
            for (u32 n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (u32 i = 0; i < 4; i++)
                    if (tile * KEYS + n * 8 + 2 * (lane() & 3) + (i & 1) > position[i / 2])
                        score[4 * n + i] = -INFINITY;
        }
        float most[4] = {largest[0], -INFINITY, largest[1], -INFINITY}, more[4] = {};
#pragma unroll
        for (u32 n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) most[i] = fmaxf(most[i], score[4 * n + i]);
        float base[2];
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            float next = fmaxf(most[2 * i], most[2 * i + 1]);
            next = fmaxf(next, __shfl_xor_sync(0xffffffffu, next, 1));
            next = fmaxf(next, __shfl_xor_sync(0xffffffffu, next, 2));
            base[i] = next == -INFINITY ? 0.0f : __fmul_rn(next, c.scale);
            // Exactly one where the largest score stays, so not by way of a sum that is rounded once.
            keep[i] = exp2_fast(__fmul_rn(largest[i], c.scale) - base[i]);
            largest[i] = next;
        }
#pragma unroll
        for (u32 n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                score[4 * n + i] = exp2_fast(fmaf(score[4 * n + i], c.scale, -base[i / 2]));
                more[i] += score[4 * n + i];
            }
#pragma unroll
        for (u32 i = 0; i < 2; i++) sum[i] = fmaf(sum[i], keep[i], more[2 * i] + more[2 * i + 1]);
        // Queries that see values which are not finite get sums that are not numbers.
        if constexpr (W::CHECKS) {
            if (!w.masks(tile)) return;
            for (u32 part = 0; part < KEYS / 32; part++)
                for (u32 left = m.spoiled[taken % STAGES][part]; left != 0; left &= left - 1)
                    for (u32 i = 0; i < 2; i++)
                        if (tile * KEYS + part * 32 + __ffs(left) - 1 <= position[i]) sum[i] = __int_as_float(0x7fc00000);
        }
    }

    // Hands weights over to those who add values, and what sums before are multiplied by.
    DEVICE void hand_over() {
        if (taken > 0) barrier_wait(m.weights_empty(), (taken - 1) & 1);
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 row = first_query() + 8 * i, at = m.weights + row * 128 + (lane() & 3) * 4;
#pragma unroll
            for (u32 n = 0; n < KEYS / 8; n++)
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + (n ^ row) % 8 * 16),
                             "r"(h2_of(score[4 * n + 2 * i], score[4 * n + 2 * i + 1]))
                             : "memory");
            if ((lane() & 3) == 0) m.keep[row] = keep[i];
        }
    }

    // The last sums: what results are multiplied by, or, of splits, what goes to `stats`.
    DEVICE void finish(const W& w) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
            const u32 row = first_query() + 8 * i;
            if constexpr (W::SINKS) {
                if (w.split == 0 && row < w.count) sum[i] = w.with_sink(g, c, row, sum[i], largest[i] * c.scale);
            }
            if ((lane() & 3) != 0) continue;
            m.factors[works % 2][row] = c.splits > 1 ? 1.0f : 1.0f / sum[i];
            if (c.splits == 1 || row >= w.count) continue;
            float* to = g.stats + ((u64)(w.query + row) * c.splits + w.split) * 2;
            to[0] = w.tiles == 0 ? -INFINITY : largest[i] * c.scale * 0.693147181f;
            to[1] = sum[i];
        }
    }

    DEVICE void run(u32 all, u32 rounds) {
        for (u32 round = 0; round < rounds; round++) {
            const W w = W::at(round, g, c, all);
            if (w.count == 0) continue;
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                position[i] = w.position_of(first_query() + 8 * i, c.heads);
                largest[i] = -INFINITY, sum[i] = 0.0f;
            }
            if (w.tiles == 0) {
                finish(w);
                continue;
            }
            if (W::CONVERTS) barrier_wait(m.queries_full(), works & 1);
            for (u32 t = 0; t < w.tiles; t++) {
                make_scores();
                if (t + 1 == w.tiles) barrier_arrive(m.queries_done());
                soften(w, w.first_tile + t);
                hand_over();
                if (t + 1 == w.tiles) finish(w);
                fence_products();
                __syncwarp();
                if (lane() == 0) barrier_arrive(m.weights_full());
                taken++;
            }
            works++;
        }
    }
};

// A warp group that adds values: half of the channels.
template <class S, class W>
struct Mixer {
    const typename W::Arguments& g;
    const typename W::Constants& c;
    const Memory& m;
    // 0 or 1.
    u32 half;
    u32 taken = 0, works = 0;
    float o[S::HALF / 2];

    DEVICE void add_tile() {
        barrier_wait(m.weights_full(), taken & 1);
        fence_products();
        const float keep[2] = {m.keep[first_query()], m.keep[first_query() + 8]};
        // Once the largest scores have been seen, nothing changes.
        if (__any_sync(0xffffffffu, keep[0] != 1.0f || keep[1] != 1.0f)) {
#pragma unroll
            for (u32 i = 0; i < S::HALF / 2; i++) o[i] *= keep[i / 2 % 2];
        }
        const u32 values = m.tiles + taken % STAGES * S::TILE_BYTES + half * (S::VALUES / 2) * PART_BYTES;
        hold(o);
        warpgroup_fence();
#pragma unroll
        for (u32 k = 0; k < KEYS / 16; k++)
#pragma unroll
            for (u32 at = 0; at < S::HALF; at += 128)
                MixingProduct<128>::add(*(float(*)[64])(o + at / 2), matrix_at(m.weights) + 2 * k,
                                        transposed_at(values + at / 64 * PART_BYTES + k * 2048, PART_BYTES));
        warpgroup_commit();
        products_wait<0>();
        hold(o);
        __syncwarp();
        if (lane() == 0) {
            barrier_arrive(m.weights_empty());
            barrier_arrive(m.empty(taken, half));
        }
        taken++;
    }

    DEVICE void store(const W& w) {
        const float* factors = m.factors[works % 2];
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 row = first_query() + 8 * i;
            if (row >= w.count) continue;
            const float factor = w.tiles == 0 ? 1.0f : factors[row];
            if (c.width != 0) {
                store_halves(w.query + row, i, factor);
                continue;
            }
            float* to = g.out + ((u64)(w.query + row) * c.splits + w.split) * (2 * S::HALF) + half * S::HALF
                      + 2 * (lane() & 3);
#pragma unroll
            for (u32 n = 0; n < S::HALF / 8; n++)
                *(float2*)(to + n * 8) = make_float2(o[4 * n + 2 * i] * factor, o[4 * n + 2 * i + 1] * factor);
        }
    }

    // As `latent_enter` writes rows. Of each 128 columns a lane has all of four pieces.
    DEVICE void store_halves(u32 query, u32 i, float factor) {
        const u32 token = query / c.heads, head = query % c.heads, first = token / c.width * c.width;
        const u32 eights = (min(c.width, c.rows - first) + 7) / 8;
        u8* to = (u8*)g.out + (u64)head * ((c.rows + 7) / 8 * 8) * (4 * S::HALF) + (u64)first * (4 * S::HALF)
               + (token - first) * 128;
#pragma unroll
        for (u32 step = 0; step < S::HALF / 128; step++)
#pragma unroll
            for (u32 x = 0; x < 4; x++) {
                u32 v[4];
#pragma unroll
                for (u32 q = 0; q < 4; q++) {
                    const u32 n = step * 16 + q * 4 + x;
                    v[q] = h2_of(o[4 * n + 2 * i] * factor, o[4 * n + 2 * i + 1] * factor);
                }
                const u32 piece = half * (S::HALF / 8) + step * 16 + x * 4 + (lane() & 3);
                *(uint4*)(to + piece / 8 * eights * 1024 + (piece ^ token) % 8 * 16) = make_uint4(v[0], v[1], v[2], v[3]);
            }
    }

    DEVICE void run(u32 all, u32 rounds) {
        for (u32 round = 0; round < rounds; round++) {
            const W w = W::at(round, g, c, all);
            if (w.count == 0) continue;
#pragma unroll
            for (u32 i = 0; i < S::HALF / 2; i++) o[i] = 0.0f;
            for (u32 t = 0; t < w.tiles; t++) add_tile();
            store(w);
            if (w.tiles != 0) works++;
        }
    }
};

// What brings queries and tiles: all of a tile's rows have S::PIECES pieces of 16 bytes.
template <class S>
struct Bringer {
    const Memory& m;
    u32 loaded = 0, works = 0;

    DEVICE u32 thread() const { return threadIdx.x; }
    // The thread's piece of rows of a part, eight lanes a row, and its first row; the others are GROUP / 8 apart.
    DEVICE u32 piece(u32 part) const { return part * 8 + thread() % 8; }
    DEVICE u32 first_row() const { return thread() / 8; }

    // Where the thread's piece of a row goes.
    DEVICE u32 place(u32 tile, u32 part, u32 row) const {
        return tile + part * PART_BYTES + row * 128 + (thread() % 8 ^ row) % 8 * 16;
    }

    // Waits until a part of the tile before the last has been used.
    DEVICE void wait_for_room(u32 part) const {
        if (loaded >= STAGES && (part == 0 || part == S::VALUES / 2))
            barrier_wait(m.empty(loaded, part == 0 ? 0 : 1), (loaded / STAGES - 1) & 1);
    }

    DEVICE void wait_for_queries() {
        if (works > 0) barrier_wait(m.queries_done(), (works - 1) & 1);
        works++;
    }

    DEVICE u32 tile() const { return m.tiles + loaded % STAGES * S::TILE_BYTES; }
};

// L brings what W says that a block's queries see.
template <class S, class W, class L>
DEVICE void attend(const typename W::Arguments& g, const typename W::Constants& c, u8* shared) {
    __shared__ __align__(8) u64 barriers[Memory::BARRIERS];
    __shared__ u32 spoiled[STAGES][2], works;
    __shared__ float keep[QUERIES], factors[2][QUERIES];
    const u32 start = (shared_address(shared) + 1023) / 1024 * 1024;
    const u32 tiles = start + S::TILE_BYTES, weights = tiles + STAGES * S::TILE_BYTES;
    const Memory m = {start, tiles, weights, shared_address(barriers), spoiled, keep, factors};
    if (threadIdx.x == 0) {
        works = 0;
        for (u32 i = 0; i < STAGES; i++) {
            for (u32 part = 0; part < S::PARTS; part++) barrier_init(m.full(i, part), GROUP);
            for (u32 half = 0; half < 2; half++) barrier_init(m.empty(i, half), 4);
        }
        barrier_init(m.queries_done(), GROUP);
        barrier_init(m.queries_full(), GROUP);
        barrier_init(m.weights_full(), 4);
        barrier_init(m.weights_empty(), 8);
        barriers_ready();
    }
    __syncthreads();
    after_previous();
    W::add_works(g, c, works);
    __syncthreads();
    const u32 all = works, rounds = (all + gridDim.x - 1) / gridDim.x;
    const u32 group = threadIdx.x / GROUP;
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        L loader{{m}, g, c};
        loader.run(all, rounds);
    } else if (group == 1) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 104;");
        Scorer<S, W> scorer{g, c, m};
        scorer.run(all, rounds);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 184;");
        Mixer<S, W> mixer{g, c, m, group - 2};
        mixer.run(all, rounds);
    }
}

#endif // HAS_WARPGROUPS

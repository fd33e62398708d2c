// Products of many tokens with quantised weights by warp groups of compute capability 9.0: out = x · weightᵀ, dense or
// grouped by expert.
//
// A tile is 192 weight rows × up to 160 tokens, of linear layers 176. Each of three warp groups unpacks 64 rows, 128 columns a step,
// straight into registers, as the left side of its products; tokens are the right side, in shared memory, where bulk copies put
// them two steps ahead. Groups wait for copies only, not for each other: while one unpacks, the others multiply. A block goes on
// from tile to tile, and loads the next one's weights and tokens before it stores results. Where tiles are too few to keep a device
// busy, the blocks of a cluster share one: each has a slice of the columns, and results of a part of the tokens.
//
// x comes as `wide_tokens.cu` writes it. The sum over columns, or over each slice of them and then over slices, runs in one order
// whatever else is in the batch: a token's result depends on its own row only. Compiled once for each encoding: DTYPE.
#pragma once
#include "cluster.h"
#include "matrices.h"
#include "warpgroup.h"

const u32 GROUPS = 3;
const u32 ROWS = GROUPS * 64;
const u32 THREADS = GROUPS * 128;
const u32 STEP = 128;
const u32 STAGES = 4;
// Results on their way out, of each warp: from a multiple of 1024 bytes on, after the stages.
const u32 STORED_TOKENS = 32;
const u32 STORED_STRIDE = 20;

#if HAS_WARPGROUPS

// The tokens of a tile, from a multiple of eight on.
struct Tokens {
    const u8* x;
    // 0 if there is no such tile.
    u32 count;

    // Of 128 columns, the first 64 of all tokens before the others; tokens are filled up to eights.
    DEVICE u32 bytes() const { return (count + 7) / 8 * 8 * STEP * 2; }
};

// Where stages of x and their barriers are in shared memory.
struct Stages {
    u32 x, barriers, bytes;

    DEVICE u32 at(u32 i) const { return x + i % STAGES * bytes; }
    DEVICE u32 full(u32 i) const { return barriers + i % STAGES * 8; }
    DEVICE u32 empty(u32 i) const { return barriers + (STAGES + i % STAGES) * 8; }
};

// What a lane of four that share two rows unpacks of a step of them: 32 columns of each.
struct Lane {
    u32 k, h;

    DEVICE explicit Lane(u32 step) : k(step * STEP + (threadIdx.x & 2) * 32), h(threadIdx.x & 1) {}
    DEVICE bool is_within(u32 cols) const { return k + (Weight::SPLIT ? 0 : 32 * h) < cols; }
};

typedef typename Weight::Raw Raws[2];

// Beyond the last column everything stays as it is: x is zero there.
DEVICE void load_rows(Raws& raw, const RowAddress (&rows)[2], u32 step, u32 cols, u32 kind) {
    const Lane lane(step);
    if (!lane.is_within(cols)) return;
    Weight::load(raw[0], rows[0], lane.k, lane.h, kind);
    Weight::load(raw[1], rows[1], lane.k, lane.h, kind);
}

// The left sides of a step's products, 16 columns each.
struct Fragments {
    u32 v[8][4];

    DEVICE Fragments(const Raws& raw, u32 step) {
        const Lane lane(step);
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            Columns w;
            Weight::unpack(raw[r], lane.k, lane.h, w);
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                v[i / 2][i % 2 * 2 + r] = w.a[i];
                v[4 + i / 2][i % 2 * 2 + r] = w.b[i];
            }
        }
    }
};

template <int n>
struct Width {
    static const int N = n;
};

// Of up to `most` tokens: registers for more would be taken from other things.
template <u32 most, class Run>
DEVICE void with_width(u32 tokens, Run& run) {
    if (tokens <= 32) run(Width<32>());
    else if (tokens <= 64) run(Width<64>());
    else if (tokens <= 96) run(Width<96>());
    else if (most <= 128 || tokens <= 128) run(Width<128>());
    else if (tokens <= 144) run(Width<144>());
    else if (most <= 160 || tokens <= 160) run(Width<160>());
    else run(Width<most>());
}

// What a block does: tiles from `first` on, `stride` apart, and of each the steps begin..end, a slice of all.
struct Share {
    u32 first, stride, begin, end;

    DEVICE Share(u32 steps, u32 slices) {
        const u32 rank = slices == 1 ? 0 : rank_in_cluster();
        first = blockIdx.x / slices;
        stride = gridDim.x / slices;
        begin = steps * rank / slices;
        end = steps * (rank + 1) / slices;
    }
};

// Feeds a block's tiles of x to shared memory; called by a warp.
template <class Job>
struct Feeder {
    const Job& job;
    Stages stages;
    Share share;
    u32 fed = 0, tile, step;
    Tokens tokens;

    DEVICE Feeder(const Job& job, Stages stages, Share share)
        : job(job),
          stages(stages),
          share(share),
          tile(share.first),
          step(share.begin),
          tokens(job.tokens(share.first)) {}

    DEVICE void next() {
        if (tokens.count == 0) return;
        if (fed >= STAGES) barrier_wait(stages.empty(fed), (fed / STAGES - 1) & 1);
        if ((threadIdx.x & 31) == 0) {
            const u32 bytes = tokens.bytes();
            barrier_expect(stages.full(fed), bytes);
            copy_bulk(stages.at(fed), tokens.x + (u64)step * bytes, bytes, stages.full(fed));
        }
        __syncwarp();
        fed++;
        if (++step < share.end) return;
        step = share.begin;
        tile += share.stride;
        tokens = job.tokens(tile);
    }
};

// Tokens of a tile whose results a block stores.
struct Range {
    u32 begin, end;
};

// Adds up what the blocks of a cluster have of a tile, each for some tokens of `count`; where stages of x were is room for it.
template <int N>
DEVICE Range add_slices(float (&d)[N / 2], u32 at, u32 slices, u32 count) {
    const u32 own = at + 16 * threadIdx.x, rank = rank_in_cluster(), eights = (count + 7) / 8;
    const u32 begin = eights * rank / slices, end = eights * (rank + 1) / slices;
    // Until all groups have read their last stage.
    __syncthreads();
#pragma unroll
    for (u32 n = 0; n < N / 8; n++)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(own + n * THREADS * 16), "f"(d[4 * n]),
                     "f"(d[4 * n + 1]), "f"(d[4 * n + 2]), "f"(d[4 * n + 3])
                     : "memory");
    cluster_barrier();
#pragma unroll
    for (u32 n = 0; n < N / 8; n++) {
        if (n < begin || n >= end) continue;
        float4 sum = read_floats(0, own + n * THREADS * 16);
#pragma unroll 4
        for (u32 i = 1; i < slices; i++) {
            const float4 v = read_floats(i, own + n * THREADS * 16);
            sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
        }
        d[4 * n] = sum.x, d[4 * n + 1] = sum.y, d[4 * n + 2] = sum.z, d[4 * n + 3] = sum.w;
    }
    // Others read what is in this block's memory.
    cluster_barrier();
    return {8 * begin, min(8 * end, count)};
}

// All tiles of a block. Of tile i, `job.tokens(i)` are the tokens, `job.rows(i, to)` makes the addresses of the two weight
// rows that this lane unpacks, `job.finish<N>(i, d, stored, of)` takes the results of tokens `of`; none has more tokens than
// `job.most()` says, and `Job::MOST`. `job.slices()` blocks share a tile; if these are several, a cluster has one tile.
template <class Job>
DEVICE void multiply(const Job& job, u8* shared, const Format& format) {
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    shared += (0u - shared_address(shared)) % 1024;
    // A stage is no larger than it must be: what is left of a multiprocessor's memory is a cache.
    const Stages stages = {shared_address(shared), shared_address(barriers), job.most() * STEP * 2};
    u8* const stored = shared + STAGES * stages.bytes;
    const u32 cols = format.cols;
    const Share share((cols + STEP - 1) / STEP, job.slices());
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < STAGES; i++) {
            barrier_init(stages.full(i), 1);
            barrier_init(stages.empty(i), GROUPS * 4);
        }
        barriers_ready();
    }
    __syncthreads();
    Feeder<Job> feeder(job, stages, share);
    if (threadIdx.x < 32)
        for (u32 i = 0; i < STAGES - 2; i++) feeder.next();

    u32 tile = share.first, taken = 0;
    Tokens tokens = job.tokens(tile);
    if (tokens.count == 0) return;
    RowAddress rows[2];
    Raws raw = {};
    job.rows(tile, rows);
    load_rows(raw, rows, share.begin, cols, format.kind);
    while (tokens.count != 0) {
        const Tokens following = job.tokens(tile + share.stride);
        auto run = [&](auto width) {
            constexpr int N = decltype(width)::N;
            float d[N / 2];
#pragma unroll
            for (int i = 0; i < N / 2; i++) d[i] = 0.0f;
            for (u32 step = share.begin; step < share.end; step++) {
                const Fragments a(raw, step);
                if (step + 1 < share.end) {
                    load_rows(raw, rows, step + 1, cols, format.kind);
                } else if (following.count != 0) {
                    job.rows(tile + share.stride, rows);
                    load_rows(raw, rows, share.begin, cols, format.kind);
                }
                barrier_wait(stages.full(taken), taken / STAGES & 1);
                const u64 left = matrix_at(stages.at(taken)), right = matrix_at(stages.at(taken) + tokens.bytes() / 2);
                warpgroup_fence();
#pragma unroll
                for (u32 i = 0; i < 8; i++) WarpgroupProduct<N>::add(d, a.v[i], (i < 4 ? left : right) + i % 4 * 2);
                warpgroup_commit();
                if (threadIdx.x < 32) feeder.next();
                warpgroup_wait();
                if ((threadIdx.x & 31) == 0) barrier_arrive(stages.empty(taken));
                taken++;
            }
            Range of = {0, tokens.count};
            if (job.slices() > 1) of = add_slices<N>(d, stages.x, job.slices(), tokens.count);
            job.template finish<N>(tile, d, stored, of);
        };
        with_width<Job::MOST>(tokens.count, run);
        tile += share.stride;
        tokens = following;
    }
}

// What a tile's token is in the results, and what they are multiplied by.
struct Result {
    u32 row;
    float factor;
};

// Calls each(result, its values of the warp's 16 rows) for tokens `of` of the tile, by four lanes each: `result(token)` tells
// what one is. 32 tokens at a time go through the warp's shared memory, so that this is compiled once for those.
template <int N, class ResultOf, class Each>
DEVICE void for_results(const float (&d)[N / 2], u8* stored, Range of, ResultOf result, Each each) {
    float* own = (float*)stored + threadIdx.x / 32 * (STORED_TOKENS * STORED_STRIDE);
    const u32 lane = threadIdx.x & 31;
    float* to = own + (lane & 3) * 2 * STORED_STRIDE + lane / 4;
    Result next = result(min(lane, of.end - 1));
#pragma unroll
    for (u32 first = 0; first < N; first += STORED_TOKENS) {
        if (first >= of.end) break;
        const Result now = next;
        next = result(min(first + STORED_TOKENS + lane, of.end - 1));
        if (first + STORED_TOKENS <= of.begin) continue;
        __syncwarp();
#pragma unroll
        for (u32 n = 0; n < STORED_TOKENS / 8 && first + n * 8 < N; n++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) to[(n * 8 + i % 2) * STORED_STRIDE + i / 2 * 8] = d[(first / 8 + n) * 4 + i];
        __syncwarp();
#pragma unroll 2
        for (u32 eight = 0; eight < STORED_TOKENS; eight += 8) {
            const u32 token = eight + lane / 4;
            const Result one = {__shfl_sync(0xffffffffu, now.row, token), __shfl_sync(0xffffffffu, now.factor, token)};
            const bool is_own = first + token >= of.begin && first + token < of.end;
            if (is_own) each(one, own + token * STORED_STRIDE);
        }
    }
}

// Four values to `to`, or as many as `left` says; `aligned` if rows of the result are at multiples of 16 bytes.
DEVICE void store_4(float* to, const float (&v)[4], u32 left, bool aligned) {
    if (aligned && left >= 4) {
        *(float4*)to = make_float4(v[0], v[1], v[2], v[3]);
        return;
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++)
        if (i < left) to[i] = v[i];
}

#endif // HAS_WARPGROUPS

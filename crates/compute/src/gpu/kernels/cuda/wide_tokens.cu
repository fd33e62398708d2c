// Tokens as `wide.h` takes them.
#include "blocks.h"
#include "cluster.h"

// Stands for a pair that is not there, and for a place without a pair.
const u32 ABSENT = 0xffffffffu;

// Pairs of one expert: those of the list from `first` on.
struct Tile {
    u32 expert, first, count, unused;
};

// As `tensor_sort`'s in `prefill.cu`.
struct SortConstants {
    u32 pairs, experts;
    u32 tiles;
    u32 tokens;
    u32 align, places;
};

// Where a token of a tile is: its place, and the eights of places that the tile begins at and takes, times 32 and plus.
struct Place {
    u32 place, tile;
};

// Sorts pairs by expert, ids (pairs) → list and tiles, as `tensor_sort` of `prefill.cu` does, and places (pairs). A cluster of blocks
// of 1024 threads, each with a run of the pairs; experts ≤ 1024.
extern "C" __global__ void __launch_bounds__(1024)
    wide_sort(const u32* table, const u32* ids, u32* list, Place* places, Tile* tiles,
              const __grid_constant__ SortConstants c) {
    __shared__ u32 own_counts[1024], counts[1024], starts[1024], next[1024], warp_pairs[32], warp_tiles[32];
    const u32 expert = threadIdx.x, lane = expert & 31, warp = expert >> 5;
    const u32 rank = rank_in_cluster(), blocks = gridDim.x;
    const u32 begin = (u64)c.pairs * rank / blocks, end = (u64)c.pairs * (rank + 1) / blocks;
    own_counts[expert] = 0;
    __syncthreads();
#pragma unroll 4
    for (u32 p = begin + threadIdx.x; p < end; p += 1024) atomicAdd(&own_counts[ids[p]], 1);
    cluster_barrier();
    // Pairs of the expert in all blocks, and in those before.
    u32 all = 0, before = 0;
    for (u32 i = 0; i < blocks; i++) {
        const u32 of_block = expert < c.experts ? read_word(i, shared_address(own_counts + expert)) : 0;
        all += of_block;
        before += i < rank ? of_block : 0;
    }
    counts[expert] = all;
    const u32 count = expert < c.experts && table[expert] != ABSENT ? all : 0;
    const u32 parts = (count + c.tokens - 1) / c.tokens, room = (count + c.align - 1) / c.align * c.align;
    u32 pairs_end = room, tiles_end = parts;
#pragma unroll
    for (u32 d = 1; d < 32; d *= 2) {
        const u32 more_pairs = __shfl_up_sync(0xffffffffu, pairs_end, d);
        const u32 more_tiles = __shfl_up_sync(0xffffffffu, tiles_end, d);
        if (lane >= d) pairs_end += more_pairs, tiles_end += more_tiles;
    }
    if (lane == 31) warp_pairs[warp] = pairs_end, warp_tiles[warp] = tiles_end;
    __syncthreads();
    u32 all_tiles = 0;
    for (u32 i = 0; i < 32; i++) {
        if (i < warp) pairs_end += warp_pairs[i], tiles_end += warp_tiles[i];
        all_tiles += warp_tiles[i];
    }
    const u32 first = pairs_end - room, at = tiles_end - parts;
    next[expert] = count == 0 ? ABSENT : first + before;
    starts[expert] = first;
    for (u32 i = first + count; rank == 0 && i < pairs_end; i++) list[i] = ABSENT;
    for (u32 i = 0; rank == 0 && i < parts && at + i < c.tiles; i++) {
        // Shares in whole groups of 16.
        const u32 groups = (count + 15) / 16;
        const u32 from = min(groups * i / parts * 16, count), to = min(groups * (i + 1) / parts * 16, count);
        tiles[at + i] = {expert, first + from, to - from, 0};
    }
    for (u32 i = all_tiles + threadIdx.x; rank == 0 && i < c.tiles; i += 1024) tiles[i] = {0, 0, 0, 0};
    // No block ends while others read its counts.
    cluster_barrier();
#pragma unroll 4
    for (u32 p = begin + threadIdx.x; p < end; p += 1024) {
        const u32 e = ids[p];
        if (next[e] == ABSENT) {
            places[p] = {ABSENT, 0};
            continue;
        }
        const u32 place = atomicAdd(&next[e], 1), parts = (counts[e] + c.tokens - 1) / c.tokens;
        list[place] = p;
        // Which of the expert's tiles has the place: those before end at `from`.
        const u32 groups = (counts[e] + 15) / 16, group = (place - starts[e]) / 16;
        u32 part = group * parts / groups, from, to;
        while (groups * (part + 1) / parts <= group) part++;
        from = groups * part / parts * 16, to = min(groups * (part + 1) / parts * 16, counts[e]);
        places[p] = {place, (starts[e] + from) / 8 * 32 + (to - from + 7) / 8};
    }
}

// Fours of columns that a thread of `wide_enter` holds, and places of a row that are looked up once.
const u32 HELD = 4, MOST_SHARED = 16;

struct WideEnterConstants {
    u32 cols;
    // Pairs that share a row of x, each with a place; 0: a row's place is its number, in tiles of `width` of all `rows`.
    u32 share;
    u32 width, rows;
    // How a lane's 32 columns of a step lie, see `unpack.h`.
    u32 split;
    NormConstants norm;
};

// Sum or maximum of a block of up to 256 threads. All take part.
template <class Join>
DEVICE float joined(float v, float (&of_warps)[8], Join join) {
#pragma unroll
    for (u32 mask = 16; mask > 0; mask >>= 1) v = join(v, __shfl_xor_sync(0xffffffffu, v, mask));
    if ((threadIdx.x & 31) == 0) of_warps[threadIdx.x / 32] = v;
    __syncthreads();
    v = of_warps[0];
    for (u32 i = 1; i < blockDim.x / 32; i++) v = join(v, of_warps[i]);
    return v;
}

// x (rows, cols) f32, normalised with `weight` if that is asked for → out: f16, each row times a power of two that brings its largest
// value to 2^14..2^15; scale (places)
// gets the inverse. A row that is not finite stays so. A tile's rows, filled up to eights, stand together, for each 64
// columns: of each row 128 bytes, pieces of 16 bytes permuted as `matrix_at` of `warpgroup.h` says. Of 128 columns, the ones
// that lane q of four unpacks are the products' columns 2q, 2q + 1, 2q + 8, 2q + 9 of each 16. Columns are filled up with
// zeros to a multiple of 128. A block a row, cols even; shared memory for the row as f16.
extern "C" __global__ void __launch_bounds__(256)
    wide_enter(const float* x, const float* weight, const Place* places, u8* out, float* scale,
               const __grid_constant__ WideEnterConstants c) {
    extern __shared__ __align__(16) u32 pairs[];
    __shared__ float squares_of[8], largest_of[8];
    __shared__ Place row_places[MOST_SHARED];
    const u32 row = blockIdx.x, thread = threadIdx.x, threads = blockDim.x, filled = (c.cols + 127) / 128 * 128;
    const float2* from = (const float2*)(x + (u64)row * c.cols);
    // Fours of columns, where they are a row.
    const u32 quads = c.cols % 4 == 0 ? c.cols / 4 : 0, copies = c.share == 0 ? 1 : c.share;
    float4 held[HELD];
#pragma unroll
    for (u32 k = 0; k < HELD; k++) {
        const u32 i = thread + k * threads;
        held[k] = i < quads ? ((const float4*)from)[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    for (u32 copy = thread; copy < min(copies, MOST_SHARED); copy += threads) {
        const u32 first = row / max(c.width, 1) * c.width;
        row_places[copy] = c.share != 0 ? places[row * copies + copy]
                                        : Place{row, first / 8 * 32 + (min(c.width, c.rows - first) + 7) / 8};
    }
    // Of two columns each, what is not held.
    const u32 rest = min(2 * quads, 2 * HELD * threads);
    float factor = 1.0f;
    if (c.norm.has_norm) {
        float squares = 0.0f;
#pragma unroll
        for (u32 k = 0; k < HELD; k++) {
            const float4 v = held[k];
            squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        }
        for (u32 i = rest + thread; i < c.cols / 2; i += threads) squares += from[i].x * from[i].x + from[i].y * from[i].y;
        squares = joined(squares, squares_of, [](float a, float b) { return a + b; });
        factor = 1.0f / sqrtf(squares / (float)c.cols + c.norm.eps);
#pragma unroll
        for (u32 k = 0; k < HELD; k++) {
            const u32 i = thread + k * threads;
            if (i >= quads) continue;
            const float4 v = held[k], w = ((const float4*)weight)[i];
            held[k] = make_float4(v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w);
        }
    }
    auto value_of = [&](u32 i) {
        const float2 v = from[i];
        if (!c.norm.has_norm) return v;
        const float2 w = ((const float2*)weight)[i];
        return make_float2(v.x * factor * w.x, v.y * factor * w.y);
    };
    float largest = 0.0f;
#pragma unroll
    for (u32 k = 0; k < HELD; k++)
        largest = fmaxf(fmaxf(fmaxf(largest, fabsf(held[k].x)), fabsf(held[k].y)),
                        fmaxf(fabsf(held[k].z), fabsf(held[k].w)));
    for (u32 i = rest + thread; i < c.cols / 2; i += threads) {
        const float2 v = value_of(i);
        largest = fmaxf(largest, fmaxf(fabsf(v.x), fabsf(v.y)));
    }
    largest = joined(largest, largest_of, [](float a, float b) { return fmaxf(a, b); });
    // 2^(exponent − 14) and its inverse from the exponent's bits; none for rows of zeros, subnormals and infinities.
    const u32 exponent = __float_as_uint(largest) >> 23;
    const bool plain = exponent > 20 && exponent < 250;
    const float up = plain ? __uint_as_float((268 - exponent) << 23) : 1.0f;
    const float down = plain ? __uint_as_float((exponent - 14) << 23) : 1.0f;
#pragma unroll
    for (u32 k = 0; k < HELD; k++) {
        const u32 i = thread + k * threads;
        const float4 v = held[k];
        if (i < quads) ((uint2*)pairs)[i] = make_uint2(h2_of(v.x * up, v.y * up), h2_of(v.z * up, v.w * up));
    }
    for (u32 i = rest + thread; i < filled / 2; i += threads) {
        const float2 v = i < c.cols / 2 ? value_of(i) : make_float2(0.0f, 0.0f);
        pairs[i] = h2_of(v.x * up, v.y * up);
    }
    __syncthreads();
    auto place_of = [&](u32 copy) { return copy < MOST_SHARED ? row_places[copy] : places[row * copies + copy]; };
    for (u32 i = thread; i < filled / 8; i += threads) {
        // Piece p of a step's 16: of each lane's 16 pairs one.
        const u32 p = i % 16;
        u32 v[4];
#pragma unroll
        for (u32 q = 0; q < 4; q++)
            v[q] = pairs[i / 16 * 64 + (c.split ? q / 2 * 32 + q % 2 * 8 + p / 8 * 16 + p % 8 : q * 16 + p)];
        for (u32 copy = 0; copy < copies; copy++) {
            const Place at = place_of(copy);
            if (at.place == ABSENT) continue;
            const u32 first = at.tile / 32, eights = at.tile % 32;
            u8* to = out + (u64)first * filled * 16 + i / 8 * eights * 1024 + (at.place - first * 8) * 128;
            to += (i ^ at.place) % 8 * 16;
            *(uint4*)to = make_uint4(v[0], v[1], v[2], v[3]);
        }
    }
    for (u32 copy = thread; copy < copies; copy += threads) {
        const u32 place = place_of(copy).place;
        if (place != ABSENT) scale[place] = down;
    }
}

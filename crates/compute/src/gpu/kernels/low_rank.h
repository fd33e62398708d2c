// What adapters add to products: low-rank updates (LoRA, Hu et al. 2021), scale · B(A x), in two products with f32 sums. A row
// has the adapter that its sequence names, or none; rows without one are neither read nor written.
//
// Groups take tiles of rows, so that matrices are read once for the rows of a tile that have the same adapter. The order in
// which a row's terms are added depends on no other row.
#include "row_dots.h"
#include "tiles.h"

// Rows of a tile, ranks whose inner values are in threadgroup memory at once, those that a group makes, the most warps of a group, and
// words of an entry of `updates`.
CONSTANT uint TILE_ROWS = 8, RANKS = 64, GROUP_RANKS = 4, GROUP_WARPS = 8, UPDATE_WORDS = 5;

struct LowRankConstants {
    // Where the entries of a product begin in `updates`, one for each of so many adapters.
    uint first, adapters;
    // Columns and rows of the product's weight.
    uint cols, rows;
    // Values of a row of `inner`: the largest rank.
    uint rank;
    // Rows of x, or pairs.
    uint count;
    // Pairs that share a row of x, and those of a token. One of rows.
    uint share, top_k;
    // Whether rows of x count as much as `weights` (pairs) says.
    uint weighs;
};

// An adapter's matrices beside a weight; a rank of zero stands for none.
struct Update {
    // Where A (experts · rank, cols) and B (experts · rows, rank) begin, in units of SLOT_UNIT bytes.
    uint a, b, rank;
    // Encodings of A, bits 0..8, and B.
    uint kinds;
    // Where the scale of each expert begins in `updates`.
    uint scales;
};

// Rows of a tile: those from `start` on, or those that a list has from there on. All of one expert.
struct TileOfRows {
    uint start, count, expert, listed;
};

DEVICE uint row_at(const TileOfRows tile, GPTR(const uint) list, uint i) {
    return tile.listed ? list[tile.start + i] : tile.start + i;
}

// Four values of a row.
struct Columns4 {
    float v[4];
};

// Columns i..i + 4 of a row of `cols` plain floats, zeros from its end on; i is a multiple of 4.
DEVICE Columns4 four_at(uint kind, GPTR(const uchar) row, uint cols, uint i) {
    Columns4 out;
    if (cols % 4 == 0) {
        if (kind == F32) {
            const Word4 w = load_u32x4(row, 4 * i);
            out.v[0] = as_float(w.x);
            out.v[1] = as_float(w.y);
            out.v[2] = as_float(w.z);
            out.v[3] = as_float(w.w);
        } else {
            const uint low = load_u32(row, 2 * i), high = load_u32(row, 2 * i + 4);
            const uint bits[4] = {low & 0xffff, low >> 16, high & 0xffff, high >> 16};
            for (uint j = 0; j < 4; ++j) out.v[j] = kind == F16 ? f16_to_f32((ushort)bits[j]) : bf16_to_f32(bits[j]);
        }
        return out;
    }
    for (uint j = 0; j < 4; ++j) {
        const uint col = i + j;
        out.v[j] = col >= cols  ? 0.0f
                 : kind == F32 ? as_float(load_u32(row, 4 * col))
                 : kind == F16 ? half_at(row, 2 * col)
                               : bf16_to_f32(load_u16(row, 2 * col));
    }
    return out;
}

// The start of a row of plain floats in the buffer of all weights.
DEVICE GPTR(const uchar) plain_row(GPTR(const uchar) all, uint unit, uint kind, uint cols, uint row) {
    return all + (ulong)unit * SLOT_UNIT + (ulong)row * cols * (kind == F32 ? 4 : 2);
}

// The update of the adapter of row `i` of a tile, and the rows that have it, as bits. None if an earlier row has the same.
struct Members {
    Update update;
    uint rows;
};

DEVICE Members members(const LowRankConstants c, GPTR(const uint) updates, GPTR(const uint) adapters,
                       const TileOfRows tile, GPTR(const uint) list, uint i) {
    Members own = {{0, 0, 0, 0, 0}, 0};
    const uint adapter = adapters[row_at(tile, list, i) / c.top_k];
    if (adapter >= c.adapters) return own;
    for (uint t = 0; t < tile.count; ++t) {
        if (adapters[row_at(tile, list, t) / c.top_k] != adapter) continue;
        if (t < i) return own;
        own.rows |= 1u << t;
    }
    const GPTR(const uint) entry = updates + c.first + adapter * UPDATE_WORDS;
    own.update.a = entry[0];
    own.update.b = entry[1];
    own.update.rank = entry[2];
    own.update.kinds = entry[3];
    own.update.scales = entry[4];
    return own;
}

// scale · A · x of a tile's rows → inner (count, rank): a group makes GROUP_RANKS values of each row, and its warps share the
// columns.
DEVICE void reduce_rows(CTX, const LowRankConstants c, const TileOfRows tile, GPTR(const uint) list,
                        GPTR(const uchar) all, GPTR(const uint) updates, GPTR(const uint) adapters,
                        GPTR(const float) x, GPTR(const float) weights, GPTR(float) inner, SPTR(float) parts) {
    const uint first = ctx.group_x() * GROUP_RANKS;
    for (uint i = 0; i < tile.count; ++i) {
        const Members m = members(c, updates, adapters, tile, list, i);
        const uint rank = m.update.rank, kind = m.update.kinds & 255;
        if (first >= rank) continue;
        const float scale = as_float(updates[m.update.scales + tile.expert]);
        Sums<GROUP_RANKS> sums[TILE_ROWS];
#pragma unroll
        for (uint t = 0; t < TILE_ROWS; ++t)
            for (uint r = 0; r < GROUP_RANKS; ++r) sums[t].v[r] = 0.0f;
        for (uint col = 4 * ctx.thread(); col < c.cols; col += 4 * ctx.threads()) {
            Columns4 w[GROUP_RANKS];
#pragma unroll
            for (uint r = 0; r < GROUP_RANKS; ++r) {
                // Of those that are beyond the rank, the first one.
                const uint at = tile.expert * rank + (first + r < rank ? first + r : first);
                w[r] = four_at(kind, plain_row(all, m.update.a, kind, c.cols, at), c.cols, col);
            }
#pragma unroll
            for (uint t = 0; t < TILE_ROWS; ++t) {
                if (!(m.rows >> t & 1)) continue;
                const ulong row = row_at(tile, list, t) / c.share;
                const Columns4 v = four_at(F32, GCAST(const uchar, x + row * c.cols), c.cols, col);
                for (uint r = 0; r < GROUP_RANKS; ++r)
                    for (uint j = 0; j < 4; ++j) sums[t].v[r] = fma_of(w[r].v[j], v.v[j], sums[t].v[r]);
            }
        }
        const uint own = ctx.lane() / (32 / GROUP_RANKS);
        // Those of the adapter before have been read.
        barrier(ctx);
#pragma unroll
        for (uint t = 0; t < TILE_ROWS; ++t) {
            if (!(m.rows >> t & 1)) continue;
            const float sum = team_sums<GROUP_RANKS>(ctx, sums[t], 32);
            if (ctx.lane() % (32 / GROUP_RANKS) == 0) parts[(ctx.warp() * TILE_ROWS + t) * GROUP_RANKS + own] = sum;
        }
        barrier(ctx);
        const uint t = ctx.thread() / GROUP_RANKS, r = ctx.thread() % GROUP_RANKS;
        if (t >= TILE_ROWS || !(m.rows >> (t & 31) & 1) || first + r >= rank) continue;
        float sum = 0.0f;
        for (uint warp = 0; warp < ctx.warps(); ++warp) sum += parts[(warp * TILE_ROWS + t) * GROUP_RANKS + r];
        const uint row = row_at(tile, list, t);
        inner[(ulong)row * c.rank + first + r] = sum * (c.weighs ? scale * weights[row] : scale);
    }
}

// B · inner of a tile's rows, added to out (count, rows): a thread makes one value of each row.
DEVICE void expand_rows(CTX, const LowRankConstants c, const TileOfRows tile, GPTR(const uint) list,
                        GPTR(const uchar) all, GPTR(const uint) updates, GPTR(const uint) adapters,
                        GPTR(const float) inner, GPTR(float) out, SPTR(float) held) {
    const uint own = ctx.group_x() * ctx.threads() + ctx.thread();
    for (uint i = 0; i < tile.count; ++i) {
        const Members m = members(c, updates, adapters, tile, list, i);
        const uint rank = m.update.rank, kind = m.update.kinds >> 8;
        if (rank == 0) continue;
        const uint at = tile.expert * c.rows + (own < c.rows ? own : 0);
        const GPTR(const uchar) b = plain_row(all, m.update.b, kind, rank, at);
        float sums[TILE_ROWS];
        for (uint t = 0; t < TILE_ROWS; ++t) sums[t] = 0.0f;
        for (uint first = 0; first < rank; first += RANKS) {
            barrier(ctx);
            for (uint k = ctx.thread(); k < TILE_ROWS * RANKS; k += ctx.threads()) {
                const uint t = k / RANKS, r = first + k % RANKS;
                const bool has = t < tile.count && (m.rows >> (t & 31) & 1) && r < rank;
                held[k] = has ? inner[(ulong)row_at(tile, list, t) * c.rank + r] : 0.0f;
            }
            barrier(ctx);
            for (uint r = 0; r < RANKS && first + r < rank; r += 4) {
                const Columns4 w = four_at(kind, b, rank, first + r);
#pragma unroll
                for (uint t = 0; t < TILE_ROWS; ++t) {
                    const Float4 v = load_f32x4(held, t * RANKS + r);
                    sums[t] = fma_of(w.v[0], v.x, sums[t]);
                    sums[t] = fma_of(w.v[1], v.y, sums[t]);
                    sums[t] = fma_of(w.v[2], v.z, sums[t]);
                    sums[t] = fma_of(w.v[3], v.w, sums[t]);
                }
            }
        }
        if (own >= c.rows) continue;
#pragma unroll
        for (uint t = 0; t < TILE_ROWS; ++t) {
            if (m.rows >> t & 1) out[(ulong)row_at(tile, list, t) * c.rows + own] += sums[t];
        }
    }
}

// Of a linear layer. Grids: (rank / GROUP_RANKS, count / TILE_ROWS), and (rows / threads, count / TILE_ROWS).
DEVICE TileOfRows rows_of(CTX, const LowRankConstants c) {
    const uint start = ctx.group_y() * TILE_ROWS, left = c.count - start;
    const TileOfRows tile = {start, left < TILE_ROWS ? left : TILE_ROWS, 0, 0};
    return tile;
}

KERNEL(low_rank_reduce, LowRankConstants, (const uchar, all), (const uint, updates), (const uint, adapters),
       (const float, x), (float, inner)) {
    SHARED(float, parts, GROUP_WARPS * TILE_ROWS * GROUP_RANKS);
    reduce_rows(ctx, c, rows_of(ctx, c), adapters, all, updates, adapters, x, x, inner, parts);
}

KERNEL(low_rank_expand, LowRankConstants, (const uchar, all), (const uint, updates), (const uint, adapters),
       (const float, inner), (float, out)) {
    SHARED(float, held, TILE_ROWS * RANKS);
    expand_rows(ctx, c, rows_of(ctx, c), adapters, all, updates, adapters, inner, out, held);
}

// Of routed experts: pairs come in blocks of one expert, as moe_bucket sorts them. Grids: as above, but (…, blocks,
// BLOCK_PAIRS / TILE_ROWS).
DEVICE TileOfRows pairs_of(CTX, GPTR(const Block) blocks, GPTR(const uint) grid) {
    TileOfRows tile = {0, 0, 0, 1};
    if (ctx.group_y() >= grid[1]) return tile;
    const Block block = blocks[ctx.group_y()];
    const uint first = ctx.group_z() * TILE_ROWS;
    if (first >= block.count) return tile;
    tile.start = block.start + first;
    tile.count = block.count - first < TILE_ROWS ? block.count - first : TILE_ROWS;
    tile.expert = block.expert;
    return tile;
}

KERNEL(expert_low_rank_reduce, LowRankConstants, (const uchar, all), (const uint, updates), (const uint, adapters),
       (const uint, list), (const Block, blocks), (const uint, grid), (const float, x), (const float, weights),
       (float, inner)) {
    SHARED(float, parts, GROUP_WARPS * TILE_ROWS * GROUP_RANKS);
    reduce_rows(ctx, c, pairs_of(ctx, blocks, grid), list, all, updates, adapters, x, weights, inner, parts);
}

KERNEL(expert_low_rank_expand, LowRankConstants, (const uchar, all), (const uint, updates), (const uint, adapters),
       (const uint, list), (const Block, blocks), (const uint, grid), (const float, inner), (float, out)) {
    SHARED(float, held, TILE_ROWS * RANKS);
    expand_rows(ctx, c, pairs_of(ctx, blocks, grid), list, all, updates, adapters, inner, out, held);
}

struct AdaptedIdsConstants {
    // Entries of `updates` from `first` on, one for each adapter, UPDATE_WORDS apart, of each of so many projections.
    uint first, adapters, projections;
    uint pairs, top_k;
    // What stands for an expert that is nowhere.
    uint nowhere;
};

// The experts of pairs whose row has an adapter with an update of one of the projections → out (pairs), `nowhere` for others.
KERNEL(adapted_ids, AdaptedIdsConstants, (const uint, updates), (const uint, adapters), (const uint, ids),
       (uint, out)) {
    const uint pair = ctx.group_x() * ctx.threads() + ctx.thread();
    if (pair >= c.pairs) return;
    const uint adapter = adapters[pair / c.top_k];
    uint rank = 0;
    for (uint p = 0; p < c.projections && adapter < c.adapters; ++p) {
        rank |= updates[c.first + (p * c.adapters + adapter) * UPDATE_WORDS + 2];
    }
    out[pair] = rank != 0 ? ids[pair] : c.nowhere;
}

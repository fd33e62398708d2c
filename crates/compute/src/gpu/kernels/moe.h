// Routed experts, for every encoding: products, what is between them, and sums.
#include "quads.h"
#include "tiles.h"

// Each pair's expert's matrix · x → out (pairs, rows): a warp makes one output of one pair. Grid: (rows / warps of a
// group, pairs).
KERNEL(moe_matvec_any, ExpertConstants, (const uchar, slots), (const uint, table), (const uint, ids), (const float, x),
       (const float, weights), (const float, bias), (float, out)) {
    const uint row = ctx.group_x() * ctx.warps() + ctx.warp(), pair = ctx.group_y();
    if (row >= c.part.rows) return;
    const uint expert = ids[pair], slot = table[expert];
    if (slot == ABSENT) return;
    const Row w = expert_row(slots, slot, c.part, row);
    const GPTR(const float) from = x + (ulong)(pair / c.share) * c.part.format.cols;
    float sum = lane_sum(ctx, lane_dot<ANY>(ctx, c.part.format, w, from));
    if (ctx.lane() != 0) return;
    if (c.weighs) sum *= weights[pair];
    if (c.has_bias) sum += bias[expert * c.part.rows + row];
    out[(ulong)pair * c.part.rows + row] = sum;
}

struct ActivateConstants {
    // Elements in all, and those of a pair.
    uint count, width;
    Activation activation;
};

// The product of gate and up (pairs, width) → out, where the expert is present.
KERNEL(moe_activate, ActivateConstants, (const uint, table), (const uint, ids), (const float, gate), (const float, up),
       (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i >= c.count || table[ids[i / c.width]] == ABSENT) return;
    out[i] = activated(c.activation, gate[i], up[i]);
}

struct IdentityConstants {
    // Those that compute something; the ids of others follow.
    uint experts, top_k, width;
};

// x (tokens, width) → out (pairs, width) of pairs whose expert returns what it takes. Grid: (pairs, width / threads).
KERNEL(moe_identity, IdentityConstants, (const uint, ids), (const float, x), (float, out)) {
    const uint pair = ctx.group_x(), i = ctx.group_y() * ctx.threads() + ctx.thread();
    if (i < c.width && ids[pair] >= c.experts) out[(ulong)pair * c.width + i] = x[(ulong)(pair / c.top_k) * c.width + i];
}

struct OutputNormConstants {
    uint width;
    float eps;
    // Devices among which experts are divided by their ids, and which this one is.
    uint devices, own;
};

// The norm of what an expert of this device returned, times `weight` (width), in place: outputs (pairs, width). Grid: (pairs).
KERNEL(moe_norm, OutputNormConstants, (const uint, ids), (const float, weight), (float, outputs)) {
    SHARED(float, scratch, 32);
    const uint pair = ctx.group_x();
    if (ids[pair] % c.devices != c.own) return;
    const GPTR(float) row = outputs + (ulong)pair * c.width;
    float squares = 0.0f;
    for (uint i = ctx.thread(); i < c.width; i += ctx.threads()) {
        const float v = row[i] * weight[i];
        squares += v * v;
    }
    const float factor = 1.0f / sqrt_of(group_sum(ctx, squares, scratch) / (float)c.width + c.eps);
    for (uint i = ctx.thread(); i < c.width; i += ctx.threads()) row[i] = row[i] * weight[i] * factor;
}

struct MoeCombineConstants {
    // Whether pairs count as much as `weights` says; else all the same.
    uint top_k, width, columns, has_residual, weighs;
};

// Pairs of a token whose outputs are on their way together.
CONSTANT uint COMBINED = 4;

// residual + Σ_k weights[k] · pairs[k] in the router's order → out (tokens, width), `columns` elements a thread, one or four. Grid:
// (tokens, width / columns / threads).
KERNEL(moe_combine, MoeCombineConstants, (const float, pairs), (const float, weights), (const float, residual),
       (float, out)) {
    const uint token = ctx.group_x(), i = (ctx.group_y() * ctx.threads() + ctx.thread()) * c.columns;
    if (i >= c.width) return;
    const ulong first = (ulong)token * c.top_k, at = (ulong)token * c.width + i;
    if (c.columns == 4) {
        Float4 sum = {0.0f, 0.0f, 0.0f, 0.0f}, rest = {0.0f, 0.0f, 0.0f, 0.0f};
        if (c.has_residual) rest = floats4(residual + at, 0);
        for (uint base = 0; base < c.top_k; base += COMBINED) {
            Float4 v[COMBINED];
            float weight[COMBINED];
#pragma unroll
            for (uint n = 0; n < COMBINED; ++n) {
                const ulong pair = first + (base + n < c.top_k ? base + n : base);
                v[n] = floats4(pairs + pair * c.width + i, 0);
                weight[n] = c.weighs ? (float)weights[pair] : 1.0f;
            }
#pragma unroll
            for (uint n = 0; n < COMBINED; ++n) {
                if (base + n < c.top_k) sum = fma4(weight[n], v[n], sum);
            }
        }
        if (c.has_residual) sum = sum4(sum, rest);
        return put4(out + at, 0, sum);
    }
    float sum = 0.0f;
    for (uint k = 0; k < c.top_k; ++k)
        sum = fma_of(c.weighs ? weights[first + k] : 1.0f, pairs[(first + k) * c.width + i], sum);
    if (c.has_residual) sum += residual[at];
    out[at] = sum;
}

struct BucketConstants {
    uint pairs, experts;
    // First axes of the two grids.
    uint tiles[2];
};

// Sorts pairs by expert: `list` (pairs), `blocks`, and two grids (tiles, number of blocks, 1). One group.
KERNEL(moe_bucket, BucketConstants, (const uint, table), (const uint, ids), (uint, list), (Block, blocks),
       (uint, grids)) {
    SHARED(uint, starts, 1025);
    SHARED(uint, first_blocks, 1025);
    for (uint e = ctx.thread(); e < c.experts; e += ctx.threads()) {
        uint count = 0;
        if (table[e] != ABSENT) {
            for (uint p = 0; p < c.pairs; ++p) count += ids[p] == e ? 1 : 0;
        }
        starts[e + 1] = count;
    }
    barrier(ctx);
    if (ctx.thread() == 0) {
        uint start = 0, block = 0;
        starts[0] = 0;
        first_blocks[0] = 0;
        for (uint e = 0; e < c.experts; ++e) {
            const uint count = starts[e + 1];
            start += count;
            block += (count + BLOCK_PAIRS - 1) / BLOCK_PAIRS;
            starts[e + 1] = start;
            first_blocks[e + 1] = block;
        }
        for (uint i = 0; i < 2; ++i) {
            grids[3 * i] = c.tiles[i];
            grids[3 * i + 1] = block;
            grids[3 * i + 2] = 1;
        }
    }
    barrier(ctx);
    for (uint e = ctx.thread(); e < c.experts; e += ctx.threads()) {
        const uint start = starts[e], count = starts[e + 1] - start;
        for (uint i = 0; i * BLOCK_PAIRS < count; ++i) {
            const uint left = count - i * BLOCK_PAIRS;
            Block block = {e, start + i * BLOCK_PAIRS, left < BLOCK_PAIRS ? left : BLOCK_PAIRS};
            blocks[first_blocks[e] + i] = block;
        }
        if (count == 0) continue;
        uint at = start;
        for (uint p = 0; p < c.pairs; ++p) {
            if (ids[p] == e) list[at++] = p;
        }
    }
}

// The same as moe_matvec_any for many tokens: a group of 256 threads makes a tile of 64 outputs of a block of pairs.
// Grid: (rows / 64, blocks), as moe_bucket says.
KERNEL(moe_matmul_any, ExpertConstants, (const uchar, slots), (const uint, table), (const uint, list),
       (const Block, blocks), (const uint, grid), (const float, x), (const float, weights), (const float, bias),
       (float, out)) {
    SHARED(float, tile_w, TILE_FLOATS);
    SHARED(float, tile_x, TILE_FLOATS);
    if (ctx.group_y() >= grid[1]) return;
    const Block block = blocks[ctx.group_y()];
    const uint row0 = ctx.group_x() * 64, line = ctx.thread() / 4;
    const bool has_row = row0 + line < c.part.rows, has_pair = line < block.count;
    const Row w = expert_row(slots, table[block.expert], c.part, has_row ? row0 + line : 0);
    const GPTR(
        const float) from = x + (ulong)(list[block.start + (has_pair ? line : 0)] / c.share) * c.part.format.cols;
    const TileSums sums = tile_sums(ctx, c.part.format, w, has_row, from, has_pair, tile_w, tile_x);
    for (uint b = 0; b < 4; ++b) {
        const uint own = ctx.thread() / 16 + 16 * b;
        if (own >= block.count) continue;
        const uint pair = list[block.start + own];
        const float factor = c.weighs ? weights[pair] : 1.0f;
        for (uint a = 0; a < 4; ++a) {
            const uint row = row0 + ctx.thread() % 16 + 16 * a;
            if (row >= c.part.rows) continue;
            const float sum = sums.v[a][b] * factor;
            out[(ulong)pair * c.part.rows + row] = c.has_bias ? sum + bias[block.expert * c.part.rows + row] : sum;
        }
    }
}

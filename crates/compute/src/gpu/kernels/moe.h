// Routed experts. A *pair* is a token with one of its experts; pair p belongs to token p / top_k.
//
// Experts live in slots of one buffer. `table` says for each expert of the layer where its slot begins, in units of
// SLOT_UNIT bytes, or ABSENT. Pairs of absent experts are left alone.
#include "weights.h"

CONSTANT uint ABSENT = 0xffffffffu, SLOT_UNIT = 256;
CONSTANT uint SWIGLU = 0, CLAMPED_SWIGLU = 1;

// Where one of an expert's matrices lies.
struct Part {
    Format format;
    // Bytes from the start of the slot to each plane.
    uint offsets[3];
    // Output features.
    uint rows;
};

DEVICE Row expert_row(GPTR(const uchar) slots, uint slot, const Part part, uint row) {
    const GPTR(const uchar) base = slots + (ulong)slot * SLOT_UNIT;
    return row_of(base + part.offsets[0], base + part.offsets[1], base + part.offsets[2], part.format, row);
}

struct MoeMatvecConstants {
    Part part;
    // Pairs that share a row of x: top_k if x is (tokens, cols), 1 if it is (pairs, cols).
    uint share;
    // Whether `bias` (experts, rows) is added.
    uint has_bias;
};

// Each pair's expert's matrix · x → out (pairs, rows): a warp makes one output of one pair. Grid: (rows / warps of a
// group, pairs).
KERNEL(moe_matvec_any, MoeMatvecConstants, (const uchar, slots), (const uint, table), (const uint, ids),
       (const float, x), (const float, bias), (float, out)) {
    const uint row = ctx.group_x() * ctx.warps() + ctx.warp(), pair = ctx.group_y();
    if (row >= c.part.rows) return;
    const uint expert = ids[pair], slot = table[expert];
    if (slot == ABSENT) return;
    const Row w = expert_row(slots, slot, c.part, row);
    const GPTR(const float) from = x + (ulong)(pair / c.share) * c.part.format.cols;
    float sum = lane_sum(ctx, lane_dot<ANY>(ctx, c.part.format, w, from));
    if (ctx.lane() != 0) return;
    if (c.has_bias) sum += bias[expert * c.part.rows + row];
    out[(ulong)pair * c.part.rows + row] = sum;
}

struct ActivateConstants {
    // Elements in all, and those of a pair.
    uint count, width;
    uint activation;
    float alpha, limit;
};

DEVICE float activated(uint activation, float alpha, float limit, float gate, float up) {
    if (activation == SWIGLU) return silu(gate) * up;
    // In this form NaN stays NaN.
    const float g = gate > limit ? limit : gate;
    const float u = up > limit ? limit : up < -limit ? -limit : up;
    return (u + 1.0f) * g * sigmoid(alpha * g);
}

// The product of gate and up (pairs, width) → out, where the expert is present.
KERNEL(moe_activate, ActivateConstants, (const uint, table), (const uint, ids), (const float, gate), (const float, up),
       (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i >= c.count || table[ids[i / c.width]] == ABSENT) return;
    out[i] = activated(c.activation, c.alpha, c.limit, gate[i], up[i]);
}

struct MoeCombineConstants {
    uint top_k, width, has_residual;
};

// residual + Σ_k weights[k] · pairs[k] in the router's order → out (tokens, width). A group does a token.
KERNEL(moe_combine, MoeCombineConstants, (const float, pairs), (const float, weights), (const float, residual),
       (float, out)) {
    const uint token = ctx.group_x();
    for (uint i = ctx.thread(); i < c.width; i += ctx.threads()) {
        float sum = 0.0f;
        for (uint k = 0; k < c.top_k; ++k) {
            const ulong pair = (ulong)token * c.top_k + k;
            sum = fma_of(weights[pair], pairs[pair * c.width + i], sum);
        }
        const ulong at = (ulong)token * c.width + i;
        if (c.has_residual) sum += residual[at];
        out[at] = sum;
    }
}

CONSTANT uint BLOCK_PAIRS = 64;

// Up to BLOCK_PAIRS pairs of one expert: `list` from `start` on.
struct Block {
    uint expert, start, count;
};

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
KERNEL(moe_matmul_any, MoeMatvecConstants, (const uchar, slots), (const uint, table), (const uint, list),
       (const Block, blocks), (const uint, grid), (const float, x), (const float, bias), (float, out)) {
    SHARED(float, tile_w, 32 * 65);
    SHARED(float, tile_x, 32 * 65);
    if (ctx.group_y() >= grid[1]) return;
    const Block block = blocks[ctx.group_y()];
    const uint row0 = ctx.group_x() * 64, cols = c.part.format.cols;
    // A thread loads 8 columns of one row of each tile, and sums 4 × 4 outputs.
    const uint load_row = ctx.thread() / 4, load_part = ctx.thread() % 4;
    const uint my_row = ctx.thread() % 16, my_pair = ctx.thread() / 16;
    float sums[4][4];
    for (uint a = 0; a < 4; ++a) for (uint b = 0; b < 4; ++b) sums[a][b] = 0.0f;
    const bool has_row = row0 + load_row < c.part.rows, has_pair = load_row < block.count;
    const Row w = expert_row(slots, table[block.expert], c.part, has_row ? row0 + load_row : 0);
    const uint pair = list[block.start + (has_pair ? load_row : 0)];
    const GPTR(const float) from = x + (ulong)(pair / c.share) * cols;
    for (uint col = 0; col < cols; col += 32) {
        const uint i = col / 8 + load_part;
        Float8 wv, xv;
        for (uint j = 0; j < 8; ++j) wv.v[j] = xv.v[j] = 0.0f;
        if (8 * i < cols) {
            if (has_row) wv = load8<ANY>(c.part.format, w, i);
            if (has_pair) xv = activations8(from, cols, i);
        }
        for (uint j = 0; j < 8; ++j) {
            tile_w[(8 * load_part + j) * 65 + load_row] = wv.v[j];
            tile_x[(8 * load_part + j) * 65 + load_row] = xv.v[j];
        }
        barrier(ctx);
        for (uint k = 0; k < 32; ++k) {
            float ws[4], xs[4];
            for (uint a = 0; a < 4; ++a) {
                ws[a] = tile_w[k * 65 + my_row + 16 * a];
                xs[a] = tile_x[k * 65 + my_pair + 16 * a];
            }
            for (uint a = 0; a < 4; ++a) for (uint b = 0; b < 4; ++b) sums[a][b] += ws[a] * xs[b];
        }
        barrier(ctx);
    }
    for (uint b = 0; b < 4; ++b) {
        if (my_pair + 16 * b >= block.count) continue;
        const ulong to = (ulong)list[block.start + my_pair + 16 * b] * c.part.rows;
        for (uint a = 0; a < 4; ++a) {
            const uint row = row0 + my_row + 16 * a;
            if (row >= c.part.rows) continue;
            out[to + row] = c.has_bias ? sums[a][b] + bias[block.expert * c.part.rows + row] : sums[a][b];
        }
    }
}

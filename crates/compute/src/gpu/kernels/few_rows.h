// Products of few rows with activations of eight bits: what decoding spends its time on.
//
// Activations come in blocks of 32 columns: their bytes, and for each block its scale d and d · Σ q. A warp makes an
// output; its lanes take *pieces* of the row: as many columns as one wide load of the weights brings.
#include "quantize.h"
#include "weights.h"

CONSTANT uint SWIGLU = 0, ABSENT = 0xffffffffu, SLOT_UNIT = 256;

struct QuantizeConstants {
    // Blocks in all.
    uint blocks;
};

// x → bytes and scales (blocks, 2). A warp does a block.
KERNEL(quantize, QuantizeConstants, (const float, x), (uchar, bytes), (float, scales)) {
    const uint block = ctx.group_x() * ctx.warps() + ctx.warp();
    if (block >= c.blocks) return;
    quantize_block(ctx, x[(ulong)block * 32 + ctx.lane()], bytes + (ulong)block * 32, scales + (ulong)block * 2);
}

struct NormConstants {
    uint width;
    float eps;
};

// Root-mean-square norm of rows whose width is a multiple of 32, as f32 and as bytes. A group of 256 does a row.
KERNEL(rms_norm_quantized, NormConstants, (const float, x), (const float, weight), (float, out), (uchar, bytes),
       (float, scales)) {
    SHARED(float, scratch, 32);
    const ulong row = ctx.group_x();
    const GPTR(const float) from = x + row * c.width;
    float sum = 0.0f;
    for (uint i = ctx.thread(); i < c.width; i += ctx.threads()) sum += from[i] * from[i];
    sum = group_sum(ctx, sum, scratch);
    const float factor = 1.0f / sqrt_of(sum / (float)c.width + c.eps);
    for (uint i = ctx.thread(); i < c.width; i += ctx.threads()) {
        const float v = from[i] * factor * weight[i];
        const ulong block = (row * c.width + i) / 32;
        out[row * c.width + i] = v;
        quantize_block(ctx, v, bytes + block * 32, scales + block * 2);
    }
}

struct Activations {
    GPTR(const uchar) bytes;
    GPTR(const float) scales;
};

DEVICE int dot16(const Word4 a, const Word4 b) {
    return dot4(a.x, b.x, dot4(a.y, b.y, dot4(a.z, b.z, dot4(a.w, b.w, 0))));
}

DEVICE Word4 and4(const Word4 a, uint mask) {
    Word4 r = {a.x & mask, a.y & mask, a.z & mask, a.w & mask};
    return r;
}

DEVICE Word4 shift4(const Word4 a, uint by) {
    Word4 r = {a.x >> by, a.y >> by, a.z >> by, a.w >> by};
    return r;
}

// Bits `bit` of each byte of `high` become bits 4 of `low`.
DEVICE Word4 fifth_bits(const Word4 low, const Word4 high, uint bit) {
    const Word4 h = and4(shift4(high, bit), 0x01010101u);
    Word4 r = {low.x | h.x << 4, low.y | h.y << 4, low.z | h.z << 4, low.w | h.w << 4};
    return r;
}

// Bytes of 0..64, less 32.
DEVICE uint less_32(uint q) { return (q + 0x60606060u) ^ 0x80808080u; }

DEVICE uint load_2x16(GPTR(const uchar) p, uint offset) { return load_u16(p, offset) | load_u16(p, offset + 2) << 16; }

// Elements 0, 2, 4, 6 of the eight bytes a, b, or 1, 3, 5, 7.
DEVICE uint even_bytes(uint a, uint b) {
    return (a & 255) | (a >> 8 & 0xff00) | (b & 255) << 16 | (b << 8 & 0xff000000u);
}
DEVICE uint odd_bytes(uint a, uint b) { return even_bytes(a >> 8, b >> 8); }

// Pieces of a row.
template <uint D> DEVICE uint pieces_of(const Format f) {
    return D == Q8_0 ? f.cols / 16 : D == F32 ? f.cols / 4 : D == F16 || D == BF16 ? f.cols / 8 : f.cols / 32;
}

// Product of piece p of a row with activations of eight bits.
template <uint D> DEVICE float piece_dot(const Format f, const Row row, const Activations x, uint p) {
    if (D == Q4_K || D == Q5_K) {
        // 16 bytes: sub-blocks 2j (low nibbles) and 2j + 1 (high ones), their first or second half.
        const uint head = D == Q4_K ? 16 : 48, j = p % 8 / 2, part = p % 2, s = 2 * j;
        const GPTR(const uchar) b = row.plane0 + (ulong)(p / 8) * (head + 128);
        const Word4 top = load_u32x4(b, 0), q = load_u32x4(b, head + 16 * (p % 8));
        const uint first = p / 8 * 8 + s, column = first * 32 + 16 * part;
        Word4 low = and4(q, 0x0f0f0f0fu), high = and4(shift4(q, 4), 0x0f0f0f0fu);
        if (D == Q5_K) {
            const Word4 fifth = load_u32x4(b, 16 + 16 * part);
            low = fifth_bits(low, fifth, s);
            high = fifth_bits(high, fifth, s + 1);
        }
        const float d = f16_to_f32((ushort)top.x), dmin = f16_to_f32((ushort)(top.x >> 16));
        const uint at = (s & 3) * 8;
        const uint u = top.y >> at & 0xffff, v = top.z >> at & 0xffff, w = top.w >> at & 0xffff;
        // Scales and minima of both sub-blocks, a byte each.
        const uint sc = s < 4 ? u & 0x3f3f : (w & 0x0f0f) | (u >> 2 & 0x3030);
        const uint m = s < 4 ? v & 0x3f3f : (w >> 4 & 0x0f0f) | (v >> 2 & 0x3030);
        const float dot0 = (float)dot16(low, load_u32x4(x.bytes, column));
        const float dot1 = (float)dot16(high, load_u32x4(x.bytes, column + 32));
        const float x0 = x.scales[2 * first], x1 = x.scales[2 * first + 2];
        float sum = d * ((float)(sc & 255) * dot0 * x0 + (float)(sc >> 8) * dot1 * x1);
        if (part == 0) {
            sum -= dmin * ((float)(m & 255) * x.scales[2 * first + 1] + (float)(m >> 8) * x.scales[2 * first + 3]);
        }
        return sum;
    }
    if (D == Q6_K) {
        // Eight columns of each quarter k of half n.
        const GPTR(const uchar) b = row.plane0 + (ulong)(p / 8) * 210;
        const uint n = p % 8 / 4, l = 8 * (p % 4), first = p / 8 * 8 + 4 * n;
        const float d = half_at(b, 208);
        float sum = 0.0f;
        uint low[4], high[2];
#pragma unroll
        for (uint i = 0; i < 2; ++i) {
            low[i] = load_2x16(b, 64 * n + l + 4 * i);
            low[2 + i] = load_2x16(b, 64 * n + 32 + l + 4 * i);
            high[i] = load_2x16(b, 128 + 32 * n + l + 4 * i);
        }
#pragma unroll
        for (uint k = 0; k < 4; ++k) {
            int dot = 0;
#pragma unroll
            for (uint i = 0; i < 2; ++i) {
                const uint q = (low[k % 2 * 2 + i] >> (k / 2 * 4) & 0x0f0f0f0fu) | (high[i] >> (2 * k) & 0x03030303u) << 4;
                dot = dot4(less_32(q), load_u32(x.bytes, (first + k) * 32 + l + 4 * i), dot);
            }
            const float sc = (float)(signed char)b[192 + 8 * n + 2 * k + l / 16];
            sum += sc * (float)dot * x.scales[2 * (first + k)];
        }
        return d * sum;
    }
    if (D == Q8_0) {
        const GPTR(const uchar) b = row.plane0 + (ulong)(p / 2) * 34;
        int dot = 0;
#pragma unroll
        for (uint i = 0; i < 4; ++i) {
            dot = dot4(load_2x16(b, 2 + 16 * (p % 2) + 4 * i), load_u32(x.bytes, 16 * p + 4 * i), dot);
        }
        return half_at(b, 0) * (float)dot * x.scales[p / 2 * 2];
    }
    // Affine of 4 bits (AFFINE) or 8 (AFFINE + 256): a block of 32 columns.
    const uint group = f.kind >> 8 & 255, at = 32 * p / group * 2;
    const float scale = scale_at(f.kind, row.plane1, at), bias = scale_at(f.kind, row.plane2, at);
    const float d = x.scales[2 * p], total = x.scales[2 * p + 1];
    const Word4 x0 = load_u32x4(x.bytes, 32 * p), x1 = load_u32x4(x.bytes, 32 * p + 16);
    if (D == AFFINE) {
        const Word4 q = load_u32x4(row.plane0, 16 * p);
        const Word4 low = and4(q, 0x0f0f0f0fu), high = and4(shift4(q, 4), 0x0f0f0f0fu);
        const Word4 even = {even_bytes(x0.x, x0.y), even_bytes(x0.z, x0.w), even_bytes(x1.x, x1.y), even_bytes(x1.z, x1.w)};
        const Word4 odd = {odd_bytes(x0.x, x0.y), odd_bytes(x0.z, x0.w), odd_bytes(x1.x, x1.y), odd_bytes(x1.z, x1.w)};
        return scale * d * (float)(dot16(low, even) + dot16(high, odd)) + bias * total;
    }
    // Unsigned bytes less 128.
    Word4 q0 = load_u32x4(row.plane0, 32 * p), q1 = load_u32x4(row.plane0, 32 * p + 16);
    const uint flip = 0x80808080u;
    q0.x ^= flip, q0.y ^= flip, q0.z ^= flip, q0.w ^= flip;
    q1.x ^= flip, q1.y ^= flip, q1.z ^= flip, q1.w ^= flip;
    return scale * (d * (float)(dot16(q0, x0) + dot16(q1, x1)) + 128.0f * total) + bias * total;
}

// One lane's share of the product of a row.
template <uint D> DEVICE float lane_dot8(CTX, const Format f, const Row row, const Activations x) {
    const uint pieces = pieces_of<D>(f);
    float sum = 0.0f;
#pragma unroll 2
    for (uint p = ctx.lane(); p < pieces; p += 32) sum += piece_dot<D>(f, row, x, p);
    return sum;
}

// The same for two rows.
struct Pair {
    float first, second;
};

template <uint D>
DEVICE Pair lane_dots8(CTX, const Format f, const Row a, const Format g, const Row b, const Activations x) {
    const uint pieces = pieces_of<D>(f);
    Pair sums = {0.0f, 0.0f};
#pragma unroll 2
    for (uint p = ctx.lane(); p < pieces; p += 32) {
        sums.first += piece_dot<D>(f, a, x, p);
        sums.second += piece_dot<D>(g, b, x, p);
    }
    return sums;
}

DEVICE Activations activations_of(GPTR(const uchar) bytes, GPTR(const float) scales, ulong row, uint cols) {
    Activations x = {bytes + row * cols, scales + row * (cols / 32) * 2};
    return x;
}

struct MatvecConstants {
    Format weight;
    uint rows;
    uint has_bias, has_residual;
};

// x (tokens, cols) · weightᵀ + bias + residual → out (tokens, rows): a warp makes two outputs of one token. Grid: (rows
// / 2 / warps, tokens).
template <uint D>
DEVICE void matvec8(CTX, const MatvecConstants c, const Row weight, const Activations all, GPTR(const float) bias,
                    GPTR(const float) residual, GPTR(float) out) {
    const uint row = 2 * (ctx.group_x() * ctx.warps() + ctx.warp()), token = ctx.group_y();
    if (row >= c.rows) return;
    const uint next = row + 1 < c.rows ? row + 1 : row;
    const Activations x = activations_of(all.bytes, all.scales, token, c.weight.cols);
    const Row a = row_of(weight.plane0, weight.plane1, weight.plane2, c.weight, row);
    const Row b = row_of(weight.plane0, weight.plane1, weight.plane2, c.weight, next);
    const Pair sums = lane_dots8<D>(ctx, c.weight, a, c.weight, b, x);
    const float first = lane_sum(ctx, sums.first), second = lane_sum(ctx, sums.second);
    const uint mine = ctx.lane() == 0 ? row : next;
    if (ctx.lane() > next - row) return;
    float sum = ctx.lane() == 0 ? first : second;
    const ulong at = (ulong)token * c.rows + mine;
    if (c.has_bias) sum += bias[mine];
    if (c.has_residual) sum += residual[at];
    out[at] = sum;
}

struct ExpertPart {
    Format format;
    uint offsets[3];
    uint rows;
};

DEVICE Row part_row(GPTR(const uchar) slots, uint slot, const ExpertPart part, uint row) {
    const GPTR(const uchar) base = slots + (ulong)slot * SLOT_UNIT;
    return row_of(base + part.offsets[0], base + part.offsets[1], base + part.offsets[2], part.format, row);
}

struct GateUpConstants {
    ExpertPart gate, up;
    uint top_k;
    uint activation;
    float alpha, limit;
    uint has_bias;
};

// activation(gate · x, up · x) of each pair → out (pairs, rows) as f32 and as bytes: a group of 8 warps makes a block of
// 32. Grid: (rows / 32, pairs).
template <uint D>
DEVICE void gate_up8(CTX, const GateUpConstants c, GPTR(const uchar) slots, GPTR(const uint) table,
                     GPTR(const uint) ids, const Activations all, GPTR(const float) gate_bias,
                     GPTR(const float) up_bias, SPTR(float) block, GPTR(float) out, GPTR(uchar) bytes,
                     GPTR(float) scales) {
    const uint pair = ctx.group_y(), expert = ids[pair], slot = table[expert];
    if (slot == ABSENT) return;
    const Activations x = activations_of(all.bytes, all.scales, pair / c.top_k, c.gate.format.cols);
    for (uint i = 0; i < 4; ++i) {
        const uint own = ctx.warp() * 4 + i, row = ctx.group_x() * 32 + own;
        const Row g = part_row(slots, slot, c.gate, row), u = part_row(slots, slot, c.up, row);
        const Pair sums = lane_dots8<D>(ctx, c.gate.format, g, c.up.format, u, x);
        float gate = lane_sum(ctx, sums.first), up = lane_sum(ctx, sums.second);
        if (c.has_bias) {
            gate += gate_bias[expert * c.gate.rows + row];
            up += up_bias[expert * c.gate.rows + row];
        }
        float v;
        if (c.activation == SWIGLU) {
            v = silu(gate) * up;
        } else {
            // In this form NaN stays NaN.
            const float a = gate > c.limit ? c.limit : gate;
            const float b = up > c.limit ? c.limit : up < -c.limit ? -c.limit : up;
            v = (b + 1.0f) * a * sigmoid(c.alpha * a);
        }
        if (ctx.lane() == 0) block[own] = v;
    }
    barrier(ctx);
    if (ctx.warp() != 0) return;
    const ulong first = (ulong)pair * c.gate.rows + ctx.group_x() * 32;
    const float v = block[ctx.lane()];
    out[first + ctx.lane()] = v;
    quantize_block(ctx, v, bytes + first, scales + first / 32 * 2);
}

struct DownConstants {
    ExpertPart part;
    uint top_k;
    // Whether the pairs of a token are summed; else each has an output of its own.
    uint fused;
    uint has_bias, has_residual;
};

// down · x of each pair, x (pairs, cols): summed over each token's pairs with the router's weights, + residual → out
// (tokens, rows), or as it is → out (pairs, rows). A warp makes an output. Grid: (rows / warps, tokens or pairs).
template <uint D>
DEVICE void down8(CTX, const DownConstants c, GPTR(const uchar) slots, GPTR(const uint) table, GPTR(const uint) ids,
                  const Activations all, GPTR(const float) weights, GPTR(const float) bias,
                  GPTR(const float) residual, GPTR(float) out) {
    const uint row = ctx.group_x() * ctx.warps() + ctx.warp();
    if (row >= c.part.rows) return;
    const uint count = c.fused ? c.top_k : 1;
    float total = 0.0f;
    for (uint k = 0; k < count; ++k) {
        const uint pair = ctx.group_y() * count + k, expert = ids[pair], slot = table[expert];
        if (slot == ABSENT) return;
        const Row w = part_row(slots, slot, c.part, row);
        const Activations x = activations_of(all.bytes, all.scales, pair, c.part.format.cols);
        float sum = lane_sum(ctx, lane_dot8<D>(ctx, c.part.format, w, x));
        if (c.has_bias) sum += bias[expert * c.part.rows + row];
        total = c.fused ? fma_of(weights[pair], sum, total) : sum;
    }
    if (ctx.lane() != 0) return;
    const ulong at = (ulong)ctx.group_y() * c.part.rows + row;
    if (c.fused && c.has_residual) total += residual[at];
    out[at] = total;
}

#define ENCODING(name, D)                                                                                      \
    KERNEL(matvec8_##name, MatvecConstants, (const uchar, plane0), (const uchar, plane1), (const uchar, plane2), \
           (const uchar, bytes), (const float, scales), (const float, bias), (const float, residual),          \
           (float, out)) {                                                                                     \
        const Row weight = {plane0, plane1, plane2};                                                           \
        const Activations x = {bytes, scales};                                                                 \
        matvec8<D>(ctx, c, weight, x, bias, residual, out);                                                    \
    }                                                                                                          \
    KERNEL(gate_up8_##name, GateUpConstants, (const uchar, slots), (const uint, table), (const uint, ids),     \
           (const uchar, x_bytes), (const float, x_scales), (const float, gate_bias), (const float, up_bias),  \
           (float, out), (uchar, bytes), (float, scales)) {                                                    \
        SHARED(float, block, 32);                                                                              \
        const Activations x = {x_bytes, x_scales};                                                             \
        gate_up8<D>(ctx, c, slots, table, ids, x, gate_bias, up_bias, block, out, bytes, scales);              \
    }                                                                                                          \
    KERNEL(down8_##name, DownConstants, (const uchar, slots), (const uint, table), (const uint, ids),          \
           (const uchar, bytes), (const float, scales), (const float, weights), (const float, bias),           \
           (const float, residual), (float, out)) {                                                            \
        const Activations x = {bytes, scales};                                                                 \
        down8<D>(ctx, c, slots, table, ids, x, weights, bias, residual, out);                                  \
    }

ENCODING(q4_k, Q4_K)
ENCODING(q5_k, Q5_K)
ENCODING(q6_k, Q6_K)
ENCODING(q8_0, Q8_0)
ENCODING(affine4, AFFINE)
ENCODING(affine8, AFFINE + 256)

// Products of plain floats with f32 activations, cols a multiple of 8: a warp makes an output of one token. Grid: (rows
// / warps, tokens).
template <uint D>
DEVICE void matvec_plain(CTX, const MatvecConstants c, GPTR(const uchar) weight, GPTR(const float) x,
                         GPTR(const float) bias, GPTR(const float) residual, GPTR(float) out) {
    const uint row = ctx.group_x() * ctx.warps() + ctx.warp(), token = ctx.group_y();
    if (row >= c.rows) return;
    const GPTR(const uchar) w = weight + (ulong)row * c.weight.strides[0];
    const GPTR(const uchar) from = GCAST(const uchar, x + (ulong)token * c.weight.cols);
    const uint pieces = c.weight.cols / 8;
    float sum = 0.0f;
    for (uint p = ctx.lane(); p < pieces; p += 32) {
        const Word4 a = load_u32x4(from, 32 * p), b = load_u32x4(from, 32 * p + 16);
        const Word4 q = load_u32x4(w, (D == F32 ? 32 : 16) * p);
        if (D == F32) {
            const Word4 r = load_u32x4(w, 32 * p + 16);
            sum += as_float(q.x) * as_float(a.x) + as_float(q.y) * as_float(a.y) + as_float(q.z) * as_float(a.z)
                 + as_float(q.w) * as_float(a.w) + as_float(r.x) * as_float(b.x) + as_float(r.y) * as_float(b.y)
                 + as_float(r.z) * as_float(b.z) + as_float(r.w) * as_float(b.w);
            continue;
        }
        const uint words[4] = {q.x, q.y, q.z, q.w};
        const uint values[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (uint i = 0; i < 4; ++i) {
            const float low = D == F16 ? f16_to_f32((ushort)words[i]) : as_float(words[i] << 16);
            const float high = D == F16 ? f16_to_f32((ushort)(words[i] >> 16)) : as_float(words[i] & 0xffff0000u);
            sum += low * as_float(values[2 * i]) + high * as_float(values[2 * i + 1]);
        }
    }
    sum = lane_sum(ctx, sum);
    if (ctx.lane() != 0) return;
    const ulong at = (ulong)token * c.rows + row;
    if (c.has_bias) sum += bias[row];
    if (c.has_residual) sum += residual[at];
    out[at] = sum;
}

#define PLAIN(name, D)                                                                                         \
    KERNEL(matvec_##name, MatvecConstants, (const uchar, weight), (const float, x), (const float, bias),       \
           (const float, residual), (float, out)) {                                                            \
        matvec_plain<D>(ctx, c, weight, x, bias, residual, out);                                               \
    }

PLAIN(f32, F32)
PLAIN(f16, F16)
PLAIN(bf16, BF16)

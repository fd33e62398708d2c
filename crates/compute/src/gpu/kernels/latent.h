// What latent attention adds to attention over the latents: queries into the latent space, results out of it.
#include "cache.h"
#include "weights.h"

// Tokens for which weights that have been read are used.
CONSTANT uint HEAD_TOKENS = 4;
// Threads of `latent_transposed`, which hold results of so many channels.
CONSTANT uint TRANSPOSED_THREADS = 256;

struct LatentConstants {
    Format weight;
    uint heads, rows;
    // Rows of the weight from one head's to the next's, and the first that is used.
    uint head_rows, first_row;
    // Channels of a head that come in, those from what comes in for a head to the next one's, and the same of what goes out.
    uint in, each, out, stride;
    // Whether results are f16.
    uint halves;
    // Outputs of a warp; transposed: threads side by side.
    uint span;
};

DEVICE void store_result(GPTR(float) result, ulong index, float v, uint halves) {
    if (halves) GCAST(ushort, result)[index] = f32_to_f16(v);
    else result[index] = v;
}

DEVICE uint two_u16(GPTR(const uchar) p, uint offset) { return load_u16(p, offset) | load_u16(p, offset + 2) << 16; }

// `load8` of whole eights, by words instead of bytes where the encoding is one that heads' weights often have.
template <uint D>
DEVICE Float8 load8_of_head(const Format f, const Row row, uint i) {
    const GPTR(const uchar) p = row.plane0;
    Float8 out;
    if (D == BF16) {
        const Word4 w = load_u32x4(p, 16 * i);
        const uint words[4] = {w.x, w.y, w.z, w.w};
        for (uint j = 0; j < 8; ++j) out.v[j] = bf16_to_f32(words[j / 2] >> (j % 2 * 16) & 0xffff);
    } else if (D == Q8_0) {
        const GPTR(const uchar) b = p + i / 4 * 34;
        const float d = half_at(b, 0);
        const uint at = 2 + 8 * (i % 4), words[2] = {two_u16(b, at), two_u16(b, at + 4)};
        for (uint j = 0; j < 8; ++j) out.v[j] = d * (float)(signed char)(words[j / 4] >> (j % 4 * 8) & 255);
    } else if (D == Q5_0) {
        const GPTR(const uchar) b = p + i / 4 * 22;
        const float d = half_at(b, 0);
        const uint high = two_u16(b, 2) >> (8 * (i % 4)), shift = i % 4 / 2 * 4;
        const uint at = 6 + 8 * (i % 2), words[2] = {two_u16(b, at) >> shift, two_u16(b, at + 4) >> shift};
        for (uint j = 0; j < 8; ++j) {
            const uint q = (words[j / 4] >> (j % 4 * 8) & 15) | (high >> j & 1) << 4;
            out.v[j] = d * (float)((int)q - 16);
        }
    } else if (D == Q4_K) {
        const GPTR(const uchar) b = p + i / 32 * 144;
        const uint s = i % 32 / 4, at = 16 + 32 * (s / 2) + i % 4 * 8, shift = s % 2 * 4;
        const float d = half_at(b, 0) * (float)k_scale(b + 4, s), m = half_at(b, 2) * (float)k_min(b + 4, s);
        const uint words[2] = {load_u32(b, at) >> shift, load_u32(b, at + 4) >> shift};
        for (uint j = 0; j < 8; ++j) out.v[j] = d * (float)(words[j / 4] >> (j % 4 * 8) & 15) - m;
    } else if (D == Q6_K) {
        const GPTR(const uchar) b = p + i / 32 * 210;
        const uint e = 8 * (i % 32), n = e / 128, k = e % 128 / 32, l = e % 32;
        const float d = half_at(b, 208) * (float)(signed char)b[192 + e / 16];
        const uint at = 64 * n + 32 * (k % 2) + l, high_at = 128 + 32 * n + l, shift = k / 2 * 4;
        const uint low[2] = {two_u16(b, at) >> shift, two_u16(b, at + 4) >> shift};
        const uint high[2] = {two_u16(b, high_at) >> (2 * k), two_u16(b, high_at + 4) >> (2 * k)};
        for (uint j = 0; j < 8; ++j) {
            const uint by = j % 4 * 8, q = (low[j / 4] >> by & 15) | (high[j / 4] >> by & 3) << 4;
            out.v[j] = d * (float)((int)q - 32);
        }
    } else if (D == FP8) {
        const float scale = fp8_scale(f.kind, row, 8 * i);
        const uint words[2] = {load_u32(p, 8 * i), load_u32(p, 8 * i + 4)};
        for (uint j = 0; j < 8; ++j) out.v[j] = e4m3(words[j / 4] >> (j % 4 * 8) & 255) * scale;
    } else {
        out = load8<ANY>(f, row, i);
    }
    return out;
}

// Elements 8i..8i + 8 of a head's channels.
template <uint D>
DEVICE Float8 channels8(GPTR(const float) x, uint in, uint i) {
    if (D == ANY) return activations8(x, in, i);
    const Word4 a = load_u32x4(GCAST(const uchar, x), 32 * i), b = load_u32x4(GCAST(const uchar, x), 32 * i + 16);
    Float8 out = {{as_float(a.x), as_float(a.y), as_float(a.z), as_float(a.w), as_float(b.x), as_float(b.y), as_float(b.z),
                   as_float(b.w)}};
    return out;
}

// A warp's outputs of one head for `count` tokens. A token's are the same whatever others there are.
template <uint D>
DEVICE void head_outputs(CTX, const LatentConstants c, const Row planes, GPTR(const float) x, GPTR(float) result) {
    const uint head = ctx.group_y(), first = ctx.group_z() * HEAD_TOKENS;
    const uint count = c.rows - first < HEAD_TOKENS ? c.rows - first : HEAD_TOKENS;
    // Lanes that share an output.
    const uint lanes = c.in <= 128 ? 16 : 32, lane = ctx.lane() % lanes;
    const uint begin = (ctx.group_x() * ctx.warps() + ctx.warp()) * c.span;
    const uint end = begin + c.span < c.out ? begin + c.span : c.out;
    for (uint base = begin; base < end; base += 32 / lanes) {
        const uint o = base + ctx.lane() / lanes, of = head * c.head_rows + c.first_row + (o < end ? o : end - 1);
        const Row w = row_of(planes.plane0, planes.plane1, planes.plane2, c.weight, of);
        float sums[HEAD_TOKENS];
        for (uint t = 0; t < HEAD_TOKENS; ++t) sums[t] = 0.0f;
#pragma unroll 1
        for (uint i = lane; 8 * i < c.in; i += lanes) {
            const Float8 values = load8_of_head<D>(c.weight, w, i);
#pragma unroll
            for (uint t = 0; t < HEAD_TOKENS; ++t) {
                if (t >= count) break;
                const Float8 a = channels8<D>(x + ((ulong)(first + t) * c.heads + head) * c.each, c.in, i);
                for (uint j = 0; j < 8; ++j) sums[t] = fma_of(values.v[j], a.v[j], sums[t]);
            }
        }
#pragma unroll
        for (uint t = 0; t < HEAD_TOKENS; ++t) {
            if (t >= count) break;
            float sum = sums[t];
            for (uint mask = lanes / 2; mask > 0; mask /= 2) sum += lane_xor(ctx, sum, mask);
            if (lane == 0 && o < end)
                store_result(result, ((ulong)(first + t) * c.heads + head) * c.stride + o, sum, c.halves);
        }
    }
}

// Each head's weight (out, in) · x (rows, heads · each) → out. Grid: (out / span / warps, heads, rows / HEAD_TOKENS).
KERNEL(latent_matvec, LatentConstants, (const uchar, plane0), (const uchar, plane1), (const uchar, plane2),
       (const float, x), (float, result)) {
    const Row planes = {plane0, plane1, plane2};
    switch (c.weight.kind & 255) {
        case BF16: return head_outputs<BF16>(ctx, c, planes, x, result);
        case Q8_0: return head_outputs<Q8_0>(ctx, c, planes, x, result);
        case Q5_0: return head_outputs<Q5_0>(ctx, c, planes, x, result);
        case Q4_K: return head_outputs<Q4_K>(ctx, c, planes, x, result);
        case Q6_K: return head_outputs<Q6_K>(ctx, c, planes, x, result);
        case FP8: return head_outputs<FP8>(ctx, c, planes, x, result);
    }
}

// The same for any encoding and width.
KERNEL(latent_matvec_any, LatentConstants, (const uchar, plane0), (const uchar, plane1), (const uchar, plane2),
       (const float, x), (float, result)) {
    const Row planes = {plane0, plane1, plane2};
    head_outputs<ANY>(ctx, c, planes, x, result);
}

// Eight outputs a thread, `span` threads side by side; the others take other rows of the weight.
template <uint D>
DEVICE void transposed_outputs(CTX, const LatentConstants c, const Row planes, GPTR(const float) x, GPTR(float) result,
                               SPTR(float) parts) {
    const uint head = ctx.group_y(), first = ctx.group_z() * HEAD_TOKENS;
    const uint count = c.rows - first < HEAD_TOKENS ? c.rows - first : HEAD_TOKENS;
    const uint place = ctx.thread() % c.span, slice = ctx.thread() / c.span, slices = ctx.threads() / c.span;
    const uint i = ctx.group_x() * c.span + place;
    float sums[HEAD_TOKENS][8];
    for (uint t = 0; t < HEAD_TOKENS; ++t)
        for (uint j = 0; j < 8; ++j) sums[t][j] = 0.0f;
#pragma unroll 1
    for (uint n = slice; n < c.in && 8 * i < c.out; n += slices) {
        const Row w = row_of(planes.plane0, planes.plane1, planes.plane2, c.weight, head * c.head_rows + c.first_row + n);
        const Float8 values = load8_of_head<D>(c.weight, w, i);
#pragma unroll
        for (uint t = 0; t < HEAD_TOKENS; ++t) {
            if (t >= count) break;
            const float v = x[((ulong)(first + t) * c.heads + head) * c.each + n];
            for (uint j = 0; j < 8; ++j) sums[t][j] = fma_of(values.v[j], v, sums[t][j]);
        }
    }
#pragma unroll
    for (uint t = 0; t < HEAD_TOKENS; ++t) {
        if (t >= count) break;
        barrier(ctx);
        for (uint j = 0; j < 8; ++j) parts[j * TRANSPOSED_THREADS + ctx.thread()] = sums[t][j];
        barrier(ctx);
        for (uint j = slice; j < 8 && 8 * i + j < c.out; j += slices) {
            float sum = 0.0f;
            for (uint s = 0; s < slices; ++s) sum += parts[j * TRANSPOSED_THREADS + s * c.span + place];
            store_result(result, ((ulong)(first + t) * c.heads + head) * c.stride + 8 * i + j, sum, c.halves);
        }
    }
}

// Each head's weight (in, out), transposed, · x (rows, heads · each) → out. Grid: (out / 8 / span, heads,
// rows / HEAD_TOKENS).
KERNEL(latent_transposed, LatentConstants, (const uchar, plane0), (const uchar, plane1), (const uchar, plane2),
       (const float, x), (float, result)) {
    SHARED(float, parts, 8 * TRANSPOSED_THREADS);
    const Row planes = {plane0, plane1, plane2};
    switch (c.weight.kind & 255) {
        case BF16: return transposed_outputs<BF16>(ctx, c, planes, x, result, parts);
        case Q8_0: return transposed_outputs<Q8_0>(ctx, c, planes, x, result, parts);
        case Q5_0: return transposed_outputs<Q5_0>(ctx, c, planes, x, result, parts);
        case Q4_K: return transposed_outputs<Q4_K>(ctx, c, planes, x, result, parts);
        case Q6_K: return transposed_outputs<Q6_K>(ctx, c, planes, x, result, parts);
        case FP8: return transposed_outputs<FP8>(ctx, c, planes, x, result, parts);
    }
}

// The same for any encoding and width.
KERNEL(latent_transposed_any, LatentConstants, (const uchar, plane0), (const uchar, plane1), (const uchar, plane2),
       (const float, x), (float, result)) {
    SHARED(float, parts, 8 * TRANSPOSED_THREADS);
    const Row planes = {plane0, plane1, plane2};
    transposed_outputs<ANY>(ctx, c, planes, x, result, parts);
}

struct LatentWeightsConstants {
    Format weight;
    // Eights of values in all.
    uint count;
    uint head_rows, first_row;
    // Of a head's part: its rows and columns, in the end.
    uint out, in;
    // Whether the weight's rows are the part's columns.
    uint transposed;
};

// Each head's part of a weight → (heads, out, in) f16; in and out are multiples of eight. Eight values a thread.
KERNEL(latent_weights, LatentWeightsConstants, (const uchar, plane0), (const uchar, plane1), (const uchar, plane2),
       (ushort, result)) {
    const uint index = ctx.group_x() * ctx.threads() + ctx.thread();
    if (index >= c.count) return;
    // Threads side by side write side by side.
    const uint width = c.transposed ? c.in : c.in / 8, rest = index / width, column = index % width;
    const uint rows = c.transposed ? c.out / 8 : c.out, head = rest / rows, own = rest % rows;
    const uint first = head * c.head_rows + c.first_row;
    const Row w = row_of(plane0, plane1, plane2, c.weight, first + (c.transposed ? column : own));
    const Float8 values = load8<ANY>(c.weight, w, c.transposed ? own : column);
    if (c.transposed) {
        for (uint j = 0; j < 8; ++j)
            result[((ulong)head * c.out + 8 * own + j) * c.in + column] = f32_to_f16(values.v[j]);
        return;
    }
    uint pairs[4];
    for (uint j = 0; j < 4; ++j)
        pairs[j] = (uint)f32_to_f16(values.v[2 * j]) | (uint)f32_to_f16(values.v[2 * j + 1]) << 16;
    const Word4 packed = {pairs[0], pairs[1], pairs[2], pairs[3]};
    store_u32x4(GCAST(uchar, result) + 16 * (ulong)index, 0, packed);
}

struct EnterLatentsConstants {
    // Query heads, their channels before those that are rotated, and these.
    uint heads, nope, rope;
    // Channels of a latent.
    uint rank;
    // Pairs that rotate, and whether channels 2i and 2i + 1 form one; else i and i + pairs.
    uint pairs, interleaved;
    // Of the norm of latents.
    float eps;
    // Whether queries are f16.
    uint halves;
    uint kv_type;
};

// A channel of a part that is rotated by a row's angles (pairs, 2), cosine and sine.
DEVICE float turned_channel(const EnterLatentsConstants c, GPTR(const float) from, GPTR(const float) angles, uint channel) {
    const float own = from[channel];
    if (channel >= 2 * c.pairs) return own;
    const uint pair = c.interleaved ? channel / 2 : channel % c.pairs, step = c.interleaved ? 1 : c.pairs;
    const bool second = c.interleaved ? channel % 2 == 1 : channel >= c.pairs;
    const float cosine = angles[2 * pair], sine = angles[2 * pair + 1];
    return second ? own * cosine + from[channel - step] * sine : own * cosine - from[channel + step] * sine;
}

// Of q (rows, heads · (nope + rope)) the rotated channels → the last of query (rows, heads, rank + rope); of kv (rows, rank + rope)
// the normed latent and the rotated key → the cache at each row's position. Grid: (rows, 1 + heads · rope / threads): the first group
// of a row is for kv.
KERNEL(enter_latents, EnterLatentsConstants, (const float, q), (const float, kv), (const float, weight), (const float, angles),
       (const Place, places), (const uint, pages), (uchar, cache), (float, query)) {
    SHARED(float, scratch, 32);
    const uint row = ctx.group_x(), width = c.rank + c.rope;
    const GPTR(const float) own = angles + (ulong)row * c.pairs * 2;
    if (ctx.group_y() > 0) {
        const uint i = (ctx.group_y() - 1) * ctx.threads() + ctx.thread(), channel = i % c.rope;
        if (i >= c.heads * c.rope) return;
        const ulong head = (ulong)row * c.heads + i / c.rope;
        const float v = turned_channel(c, q + head * (c.nope + c.rope) + c.nope, own, channel);
        store_result(query, head * width + c.rank + channel, v, c.halves);
        return;
    }
    const GPTR(const float) from = kv + (ulong)row * width;
    float squares = 0.0f;
    for (uint i = ctx.thread(); i < c.rank; i += ctx.threads()) squares += from[i] * from[i];
    const float factor = 1.0f / sqrt_of(group_sum(ctx, squares, scratch) / (float)c.rank + c.eps);
    const Place at = places[row];
    const ulong to = place_of(pages, at, at.position, 1, 0) * width;
    for (uint i = ctx.thread(); i < c.rank; i += ctx.threads())
        store_cached(ctx, cache, to + i, from[i] * factor * weight[i], c.kv_type);
    for (uint i = ctx.thread(); i < c.rope; i += ctx.threads())
        store_cached(ctx, cache, to + c.rank + i, turned_channel(c, from + c.rank, own, i), c.kv_type);
}

struct CopyHeadsConstants {
    // Elements in all, those of a head, and where they go in a head's result.
    uint count, len, stride, start;
    // Whether results are f16.
    uint halves;
};

// x (heads, len) → elements start.. of each head's result.
KERNEL(copy_heads, CopyHeadsConstants, (const float, x), (float, result)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i < c.count) store_result(result, (ulong)(i / c.len) * c.stride + c.start + i % c.len, x[i], c.halves);
}

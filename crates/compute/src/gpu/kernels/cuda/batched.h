// Products of 9 to 256 rows with 8-bit activations on the matrix units: a weight is read once for up to 16 rows, and results
// have the bits of `few_rows.h` and `few_experts.h`, whatever the number of rows.
//
// The whole numbers of a piece are exact in any order; their scaling is `scaled_dots`, and the sum over pieces is the tree
// that 32 lanes with a piece each make there: leaves are pieces p, p + 32, …, the halves of each level 16, 8, 4, 2 and 1
// pieces apart. A slice, pieces s, s + 4, …, makes the upper three levels. Of dense weights four warps share a tile of 16 rows,
// a slice each, and make the other two levels together; of experts, which have tiles enough, a warp makes all of a tile.
//
// Compiled for CUDA once for each encoding (DTYPE, SUFFIX), for the emulator with all.
#define WITHOUT_KERNELS
#include "../few_rows.h"
#include "../few_experts.h"
#include "byte_matrices.h"
#include "expanded.h"

// Rows of a tile, slices of its columns, and tiles that a group of eight warps makes at once with a warp a slice.
CONSTANT uint TILE_ROWS = 16, SLICES = 4, TILES = 2;
// Floats of a token's sums of a tile, so that lanes of a warp meet different banks.
CONSTANT uint SUMS_LINE = 20;

// The activations of T tokens in threadgroup memory: of each block of 32 columns eight words of each token; then of each block
// scale and scaled sum of each token.
struct BatchX {
    SPTR(const uint) words;
    SPTR(const float) scales;
    // Tokens that are there.
    uint count;
};

// A lane's share of a row's piece: what scales it, and its columns' bytes or nibbles.
struct Share {
    Raw head;
    uint w[4];
};

// Of t = lane % 4. The columns that a word of `bytes_of` holds are those that `dots` of a piece reads of the activations.
template <uint D>
DEVICE Share share_of(const Format f, const Row row, uint p, uint t) {
    Share s;
    if (D == Q4_K || D == Q5_K) {
        const uint head = D == Q4_K ? 16 : 48;
        const GPTR(const uchar) b = row.plane0 + (ulong)(p / 4) * (head + 128);
        s.head.a = load_u32x4(b, 0);
        const Word2 q = load_u32x2(b, head + 32 * (p % 4) + 8 * t);
        s.w[0] = q.x;
        s.w[1] = q.y;
        if (D == Q5_K) {
            const Word2 h = load_u32x2(b, 16 + 8 * t);
            s.w[2] = h.x;
            s.w[3] = h.y;
        }
    } else if (D == Q6_K) {
        const GPTR(const uchar) b = row.plane0 + (ulong)(p / 4) * 210;
        const uint n = p % 4 / 2, part = p % 2;
        s.w[0] = load_loose_u32(b, 64 * n + 16 * part + 4 * t);
        s.w[1] = load_loose_u32(b, 64 * n + 32 + 16 * part + 4 * t);
        s.w[2] = load_loose_u32(b, 128 + 32 * n + 16 * part + 4 * t);
        // Every other byte of eight.
        const uint low = load_loose_u32(b, 192 + 8 * n) >> 8 * part, high = load_loose_u32(b, 196 + 8 * n) >> 8 * part;
        s.head.bytes = (low & 255) | (low >> 8 & 0xff00) | (high & 255) << 16 | (high << 8 & 0xff000000u);
        s.head.scale = half_at(b, 208);
    } else if (D == Q2_K) {
        const GPTR(const uchar) b = row.plane0 + (ulong)(p / 4) * 84;
        const uint n = p % 4 / 2, part = p % 2;
        s.w[0] = load_u32(b, 16 + 32 * n + 16 * part + 4 * t);
        s.head.bytes = every_other(load_u32(b, 8 * n), load_u32(b, 8 * n + 4), part);
        s.head.scale = half_at(b, 80);
        s.head.bias = half_at(b, 82);
    } else if (D == Q3_K) {
        const GPTR(const uchar) b = row.plane0 + (ulong)(p / 4) * 110;
        const uint n = p % 4 / 2, part = p % 2;
        s.w[0] = load_loose_u32(b, 32 + 32 * n + 16 * part + 4 * t);
        s.w[1] = load_loose_u32(b, 16 * part + 4 * t);
        s.head.bytes = q3_scales(load_loose(b, 94), n, part);
        s.head.scale = half_at(b, 108);
    } else if (D == IQ4_XS) {
        const GPTR(const uchar) b = row.plane0 + (ulong)(p / 8) * 136;
        s.w[0] = load_u32(b, 8 + 16 * (p % 8) + 4 * t);
        s.head.scale = iq4_xs_scale(b, p % 8);
    } else if (D == IQ4_NL) {
        const GPTR(const uchar) b = row.plane0 + (ulong)p * 18;
        s.w[0] = load_loose_u32(b, 2 + 4 * t);
        s.head.scale = half_at(b, 0);
    } else if (is_coded<D>()) {
        s.head = raw_of<D>(f, row, p);
    } else if (D == Q8_0) {
        const GPTR(const uchar) b = row.plane0 + (ulong)p * 34;
        s.w[0] = load_loose_u32(b, 2 + 8 * t);
        s.w[1] = load_loose_u32(b, 6 + 8 * t);
        s.head.scale = half_at(b, 0);
    } else if (D == Q4_0 || D == Q5_0) {
        const uint head = D == Q4_0 ? 2 : 6;
        const GPTR(const uchar) b = row.plane0 + (ulong)p * (head + 16);
        s.w[0] = load_loose_u32(b, head + 4 * t);
        if (D == Q5_0) s.head.bytes = load_loose_u32(b, 2);
        s.head.scale = half_at(b, 0);
    } else if (D == MXFP4) {
        const GPTR(const uchar) b = row.plane0 + (ulong)p * 17;
        s.w[0] = load_loose_u32(b, 1 + 4 * t);
        s.head.scale = 0.5f * e8m0(b[0]);
    } else if (D == MXFP4_PLANES) {
        s.w[0] = load_u32(row.plane0, 16 * p + 4 * t);
        s.head.scale = 0.5f * e8m0(row.plane1[p]);
    } else if (D == NVFP4) {
        s.w[0] = load_u16(row.plane0, 16 * p + 2 * t);
        s.w[1] = load_u16(row.plane0, 16 * p + 8 + 2 * t);
        s.head.bytes = load_u16(row.plane1, 2 * p);
        s.head.stored = stored_factor(f.kind, row);
    } else {
        s.head.stored = stored_scales(f.kind, row, group_of_piece(f.kind, p));
        if (D == AFFINE4) {
            s.w[0] = load_u32(row.plane0, 16 * p + 4 * t);
        } else {
            const Word2 q = load_u32x2(row.plane0, 32 * p + 8 * t);
            s.w[0] = q.x;
            s.w[1] = q.y;
        }
    }
    return s;
}

// The low nibble of every byte in the lowest 16 bits.
DEVICE uint gathered_nibbles(uint w) {
    const uint pairs = (w & 0x000f000fu) | (w >> 4 & 0x00f000f0u);
    return (pairs & 255) | (pairs >> 8 & 0xff00u);
}

// A row's columns as signed bytes: of 64 columns both runs of 32, of quarters four of 16, else one of 32.
template <uint D>
DEVICE Ints4 bytes_of(const Share s, uint p, uint t) {
    Ints4 r = {{0, 0, 0, 0}};
    if (D == Q4_K || D == Q5_K) {
        r.v[0] = s.w[0] & 0x0f0f0f0fu;
        r.v[1] = s.w[1] & 0x0f0f0f0fu;
        r.v[2] = s.w[0] >> 4 & 0x0f0f0f0fu;
        r.v[3] = s.w[1] >> 4 & 0x0f0f0f0fu;
        if (D == Q5_K) {
            const uint at = p % 4 * 2;
            r.v[0] |= (s.w[2] >> at & 0x01010101u) << 4;
            r.v[1] |= (s.w[3] >> at & 0x01010101u) << 4;
            r.v[2] |= (s.w[2] >> (at + 1) & 0x01010101u) << 4;
            r.v[3] |= (s.w[3] >> (at + 1) & 0x01010101u) << 4;
        }
    } else if (D == Q6_K) {
        r.v[0] = less_32((s.w[0] & 0x0f0f0f0fu) | (s.w[2] & 0x03030303u) << 4);
        r.v[1] = less_32((s.w[1] & 0x0f0f0f0fu) | (s.w[2] >> 2 & 0x03030303u) << 4);
        r.v[2] = less_32((s.w[0] >> 4 & 0x0f0f0f0fu) | (s.w[2] >> 4 & 0x03030303u) << 4);
        r.v[3] = less_32((s.w[1] >> 4 & 0x0f0f0f0fu) | (s.w[2] >> 6 & 0x03030303u) << 4);
    } else if (D == Q2_K) {
#pragma unroll
        for (uint k = 0; k < 4; ++k) r.v[k] = s.w[0] >> (2 * k) & 0x03030303u;
    } else if (D == Q3_K) {
        const uint bit = p % 4 / 2 * 4;
#pragma unroll
        for (uint k = 0; k < 4; ++k)
            r.v[k] = less_4((s.w[0] >> (2 * k) & 0x03030303u) | (s.w[1] >> (bit + k) & 0x01010101u) << 2);
    } else if (is_non_linear<D>()) {
        r.v[0] = non_linear(gathered_nibbles(s.w[0]));
        r.v[1] = non_linear(gathered_nibbles(s.w[0] >> 4));
    } else if (has_two_scales<D>() && is_coded<D>()) {
        // Four columns of each half.
        const CodedBytes low = coded_bytes<D>(s.head, t / 2), high = coded_bytes<D>(s.head, 2 + t / 2);
        r.v[0] = t % 2 ? low.high : low.low;
        r.v[1] = t % 2 ? high.high : high.low;
    } else if (is_coded<D>()) {
        const CodedBytes own = coded_bytes<D>(s.head, t);
        r.v[0] = own.low;
        r.v[1] = own.high;
    } else if (D == Q8_0) {
        r.v[0] = s.w[0];
        r.v[1] = s.w[1];
    } else if (D == Q4_0 || D == Q5_0) {
        r.v[0] = s.w[0] & 0x0f0f0f0fu;
        r.v[1] = s.w[0] >> 4 & 0x0f0f0f0fu;
        if (D == Q5_0) {
            r.v[0] |= spread_bits(s.head.bytes >> 4 * t & 15) << 4;
            r.v[1] |= spread_bits(s.head.bytes >> (16 + 4 * t) & 15) << 4;
        }
    } else if (D == MXFP4) {
        r.v[0] = doubled_e2m1(gathered_nibbles(s.w[0]));
        r.v[1] = doubled_e2m1(gathered_nibbles(s.w[0] >> 4));
    } else if (D == MXFP4_PLANES) {
        r.v[0] = doubled_e2m1(s.w[0]);
        r.v[1] = doubled_e2m1(s.w[0] >> 16);
    } else if (D == NVFP4) {
        r.v[0] = doubled_e2m1(s.w[0]);
        r.v[1] = doubled_e2m1(s.w[1]);
    } else if (D == AFFINE4) {
        r.v[0] = first_nibbles(s.w[0]);
        r.v[1] = last_nibbles(s.w[0]);
    } else {
        r.v[0] = s.w[0] ^ 0x80808080u;
        r.v[1] = s.w[1] ^ 0x80808080u;
    }
    return r;
}

// Sums of 16 rows and eight tokens, four a lane, as `Ints`.
struct TileSums {
    float v[4];
};

// Words of block b of token g of a tile of eight that a lane multiplies.
template <uint T>
DEVICE Word2 columns_of(const BatchX x, uint b, uint token, uint t, bool halves) {
    const uint at = (b * T + token) * 8;
    if (!halves) return load_u32x2(x.words, at + 2 * t);
    Word2 r = {x.words[at + t], x.words[at + 4 + t]};
    return r;
}

// Adds piece p of a lane's two rows times T tokens.
template <uint D, uint T>
DEVICE void add_piece(CTX, const Share low, const Share high, uint p, const BatchX x, TileSums (&sums)[T / 8]) {
    const uint g = ctx.lane() / 4, t = ctx.lane() % 4;
    constexpr bool LONG = D == Q4_K || D == Q5_K, QUARTERED = is_quartered<D>();
    constexpr bool HALVES = D == Q4_0 || D == Q5_0 || D == MXFP4 || is_non_linear<D>();
    constexpr uint RUNS = LONG || has_two_scales<D>() ? 2 : QUARTERED ? 4 : 1;
    const uint block = LONG ? 2 * p : QUARTERED ? p / 2 * 4 : p;
    const Ints4 a = bytes_of<D>(low, p, t), b = bytes_of<D>(high, p, t);
    const PieceScales of_low = piece_scales<D>(low.head, p), of_high = piece_scales<D>(high.head, p);
#pragma unroll
    for (uint n = 0; n < T / 8; ++n) {
        if (8 * n >= x.count) break;
        Ints dots[RUNS], sums_of[RUNS];
        float scales[2][RUNS], totals[2][RUNS];
#pragma unroll
        for (uint k = 0; k < RUNS; ++k) {
            const Ints none = {{EXACT, EXACT, EXACT, EXACT}};
            if (QUARTERED) {
                const uint w = x.words[((block + k) * T + 8 * n + g) * 8 + 4 * (p % 2) + t], ones = 0x01010101u;
                dots[k] = multiply_bytes(ctx, a.v[k], b.v[k], w, none);
                if (D == Q2_K) sums_of[k] = multiply_bytes(ctx, ones, ones, w, none);
            } else if (has_two_scales<D>()) {
                const uint w = x.words[(block * T + 8 * n + g) * 8 + 4 * k + t];
                dots[k] = multiply_bytes(ctx, a.v[k], b.v[k], w, none);
            } else {
                const Word2 w = columns_of<T>(x, block + k, 8 * n + g, t, HALVES);
                const Ints4 rows = {{a.v[2 * k], b.v[2 * k], a.v[2 * k + 1], b.v[2 * k + 1]}};
                dots[k] = multiply_bytes(ctx, rows, w.x, w.y, none);
            }
            // Sixteen columns are half of a block.
            const uint of_run = has_two_scales<D>() ? block : block + k;
            const Float4 both = load_f32x4(x.scales, (of_run * T + 8 * n + 2 * t) * 2);
            scales[0][k] = both.x;
            totals[0][k] = both.y;
            scales[1][k] = both.z;
            totals[1][k] = both.w;
            // Of sixteen columns.
            if (D == Q2_K) {
                totals[0][k] = product_of(exact_float(sums_of[k].v[0]), both.x);
                totals[1][k] = product_of(exact_float(sums_of[k].v[1]), both.z);
            }
        }
#pragma unroll
        for (uint o = 0; o < 4; ++o) {
            BlockScales of;
            PieceDots whole;
#pragma unroll
            for (uint k = 0; k < RUNS; ++k) {
                of.scales[k] = scales[o % 2][k];
                of.sums[k] = totals[o % 2][k];
                whole.v[k] = dots[k].v[o];
            }
            sums[n].v[o] += scaled_dots<D>(o < 2 ? of_low : of_high, of, whole);
        }
    }
}

// Leaves in the order in which the tree adds them up: leaf i begins with piece s + SLICES · LEAF(i) of slice s.
DEVICE constexpr uint leaf(uint i) { return (i & 1) << 2 | (i & 2) | i >> 2; }

// The leaves of a slice that have pieces, in that order, four bits each.
DEVICE uint leaves_of(uint s, uint pieces) {
    uint leaves = 0, count = 0;
#pragma unroll
    for (uint i = 0; i < 8; ++i) {
        if (s + SLICES * leaf(i) < pieces) leaves |= leaf(i) << 4 * count++;
    }
    return leaves;
}

// Adds leaf i to what the tree has of the leaves before; after the last, `sums` are of all.
template <uint T>
DEVICE void add_levels(uint i, TileSums (&level)[3][T / 8], TileSums (&sums)[T / 8]) {
#pragma unroll
    for (uint n = 0; n < T / 8; ++n) {
#pragma unroll
        for (uint o = 0; o < 4; ++o) {
            float v = sums[n].v[o];
            if (i % 2 == 0) {
                level[0][n].v[o] = v;
            } else {
                v = level[0][n].v[o] + v;
                if (i % 4 == 1) {
                    level[1][n].v[o] = v;
                } else {
                    v = level[1][n].v[o] + v;
                    if (i == 3) level[2][n].v[o] = v;
                    else v = level[2][n].v[o] + v;
                }
            }
            sums[n].v[o] = v;
        }
    }
}

// A slice of the products of a lane's two rows of a tile with T tokens.
template <uint D, uint T>
DEVICE void slice_sums(CTX, const Format f, const Row low, const Row high, uint s, const BatchX x,
                       TileSums (&sums)[T / 8]) {
    const uint pieces = pieces_of<D>(f), t = ctx.lane() % 4;
    uint leaves = leaves_of(s, pieces);
    const uint begin = s + SLICES * (leaves & 15) < pieces ? s + SLICES * (leaves & 15) : 0;
    Share a = share_of<D>(f, low, begin, t), b = share_of<D>(f, high, begin, t);
    TileSums level[3][T / 8];
#pragma unroll
    for (uint i = 0; i < 8; ++i) {
#pragma unroll
        for (uint n = 0; n < T / 8; ++n) {
#pragma unroll
            for (uint o = 0; o < 4; ++o) sums[n].v[o] = 0.0f;
        }
        uint p = s + SLICES * leaf(i);
        if (p < pieces) {
            leaves >>= 4;
#pragma unroll 1
            do {
                // The piece after this one is read meanwhile; after the last, one that is there.
                const uint next = p + 32 < pieces ? p + 32 : s + SLICES * (leaves & 15);
                const Share next_a = share_of<D>(f, low, next, t), next_b = share_of<D>(f, high, next, t);
                add_piece<D, T>(ctx, a, b, p, x, sums);
                a = next_a;
                b = next_b;
                p += 32;
            } while (p < pieces);
        }
        add_levels<T>(i, level, sums);
    }
}

// The same of rows of 32 pieces, where every leaf is one: without a branch in between.
template <uint D, uint T>
DEVICE void even_slice_sums(CTX, const Format f, const Row low, const Row high, uint s, const BatchX x,
                            TileSums (&sums)[T / 8]) {
    const uint t = ctx.lane() % 4;
    Share a = share_of<D>(f, low, s, t), b = share_of<D>(f, high, s, t);
    TileSums level[3][T / 8];
#pragma unroll
    for (uint i = 0; i < 8; ++i) {
        const uint next = s + SLICES * leaf(i < 7 ? i + 1 : 7);
        const Share next_a = share_of<D>(f, low, next, t), next_b = share_of<D>(f, high, next, t);
#pragma unroll
        for (uint n = 0; n < T / 8; ++n) {
#pragma unroll
            for (uint o = 0; o < 4; ++o) sums[n].v[o] = 0.0f;
        }
        add_piece<D, T>(ctx, a, b, s + SLICES * leaf(i), x, sums);
        a = next_a;
        b = next_b;
        add_levels<T>(i, level, sums);
    }
}

// All slices of a tile by one warp.
template <uint D, uint T>
DEVICE void tile_sums(CTX, const Format f, const Row low, const Row high, const BatchX x, TileSums (&sums)[T / 8]) {
    TileSums one[T / 8], two[T / 8];
#pragma unroll 1
    for (uint k = 0; k < SLICES; ++k) {
        const uint s = (k & 1) << 1 | k >> 1;
        if (pieces_of<D>(f) == 32) even_slice_sums<D, T>(ctx, f, low, high, s, x, sums);
        else slice_sums<D, T>(ctx, f, low, high, s, x, sums);
#pragma unroll
        for (uint n = 0; n < T / 8; ++n) {
#pragma unroll
            for (uint o = 0; o < 4; ++o) {
                float v = sums[n].v[o];
                if (k % 2 == 0) {
                    one[n].v[o] = v;
                } else {
                    v = one[n].v[o] + v;
                    if (k == 1) two[n].v[o] = v;
                    else v = two[n].v[o] + v;
                }
                sums[n].v[o] = v;
            }
        }
    }
}

// Keeps a warp's sums for the others: (tiles, slices, tokens, rows).
template <uint T>
DEVICE void keep_sums(CTX, const TileSums (&sums)[T / 8], SPTR(float) kept) {
    const uint g = ctx.lane() / 4, t = ctx.lane() % 4;
#pragma unroll
    for (uint n = 0; n < T / 8; ++n) {
#pragma unroll
        for (uint o = 0; o < 4; ++o)
            kept[(ctx.warp() * T + 8 * n + 2 * t + o % 2) * SUMS_LINE + g + 8 * (o / 2)] = sums[n].v[o];
    }
}

// The sum of a row of a tile and a token over all slices.
template <uint T>
DEVICE float whole_sum(SPTR(const float) kept, uint tile, uint token, uint row) {
    const uint at = (tile * SLICES * T + token) * SUMS_LINE + row;
    const float s0 = kept[at], s1 = kept[at + T * SUMS_LINE], s2 = kept[at + 2 * T * SUMS_LINE];
    return (s0 + s2) + (s1 + kept[at + 3 * T * SUMS_LINE]);
}

// Brings activations to threadgroup memory: those of `row_of(token)` for each of count tokens, zeros for the others of T.
template <uint T, class RowOf>
DEVICE BatchX enter_batch(CTX, GPTR(const uchar) bytes, GPTR(const float) scales, uint cols, uint count, SPTR(uint) to,
                          RowOf row_of) {
    const uint blocks = cols / 32, lines = blocks * 2;
    const SPTR(float) to_scales = GCAST(float, to + blocks * T * 8);
    for (uint i = ctx.thread(); i < T * lines; i += ctx.threads()) {
        const uint token = i / lines, line = i % lines, at = (line / 2 * T + token) * 8 + line % 2 * 4;
        Word4 w = {0, 0, 0, 0};
        if (token < count) w = load_u32x4(bytes + (ulong)row_of(token) * cols, 16 * line);
        to[at] = w.x;
        to[at + 1] = w.y;
        to[at + 2] = w.z;
        to[at + 3] = w.w;
    }
    for (uint i = ctx.thread(); i < T * blocks; i += ctx.threads()) {
        const uint token = i / blocks, b = i % blocks;
        Word2 s = {0, 0};
        if (token < count) s = load_u32x2(GCAST(const uchar, scales + (ulong)row_of(token) * blocks * 2), 8 * b);
        to_scales[(b * T + token) * 2] = as_float(s.x);
        to_scales[(b * T + token) * 2 + 1] = as_float(s.y);
    }
    const BatchX x = {to, to_scales, count};
    return x;
}

struct BatchProductsConstants {
    ProductPart parts[MOST_PARTS];
    uint tokens;
    uint has_residual;
};

struct BatchProductBuffers {
    GPTR(const uchar) weights;
    GPTR(const uchar) bytes;
    GPTR(const float) scales;
    GPTR(const float) factors;
    GPTR(const float) residual;
    GPTR(float) out0;
    GPTR(float) out1;
    GPTR(float) out2;
};

// x (tokens, cols), in eight bits with a factor each, · weightᵀ + bias + residual → out (tokens, rows), of up to three weights
// of one width and encoding: a group makes 32 · span outputs of T tokens. Grid: (groups of all parts, tokens / T).
template <uint D, uint T>
DEVICE void batch_products(CTX, const BatchProductsConstants c, const BatchProductBuffers b, SPTR(uint) words,
                           SPTR(float) kept) {
    ProductPart part = c.parts[0];
    GPTR(float) out = b.out0;
    uint group = ctx.group_x();
    if (group >= part.groups) {
        group -= part.groups;
        part = c.parts[1];
        out = b.out1;
        if (group >= part.groups) {
            group -= part.groups;
            part = c.parts[2];
            out = b.out2;
        }
    }
    const uint token0 = ctx.group_y() * T, count = c.tokens - token0 < T ? c.tokens - token0 : T;
    const uint cols = part.format.cols, begin = group * TILES * TILE_ROWS * part.span;
    const uint end = begin + TILES * TILE_ROWS * part.span < part.rows ? begin + TILES * TILE_ROWS * part.span : part.rows;
    const Row first = rows_at<1>(part, b.weights, begin).row[0];
    if (ctx.warp() == 0) warp_prefetch(ctx, first.plane0, (end - begin) * part.format.strides[0]);
    after_previous(ctx);
    const BatchX x = enter_batch<T>(ctx, b.bytes, b.scales, cols, count, words, [=](uint i) { return token0 + i; });
    barrier(ctx);
    for (uint row0 = begin; row0 < end; row0 += TILES * TILE_ROWS) {
        const uint row = row0 + ctx.warp() / SLICES * TILE_ROWS + ctx.lane() / 4;
        TileSums sums[T / 8];
        slice_sums<D, T>(ctx, part.format, rows_at<1>(part, b.weights, row).row[0],
                         rows_at<1>(part, b.weights, row + 8).row[0], ctx.warp() % SLICES, x, sums);
        if (row0 > begin) barrier(ctx);
        keep_sums<T>(ctx, sums, kept);
        barrier(ctx);
        for (uint i = ctx.thread(); i < TILES * TILE_ROWS * count; i += ctx.threads()) {
            const uint own = i % (TILES * TILE_ROWS), token = i / (TILES * TILE_ROWS), to = row0 + own;
            if (to >= end) continue;
            const ulong at = (ulong)(token0 + token) * part.rows + to;
            float sum = product_of(whole_sum<T>(kept, own / TILE_ROWS, token, own % TILE_ROWS),
                                   b.factors[token0 + token]);
            if (part.bias != NONE) sum += vector_at(b.weights, part.bias)[to];
            if (c.has_residual) sum += b.residual[at];
            out[at] = sum;
        }
    }
}

// A tile of pairs: up to T pairs of `list` from `first` on, all of one expert. Four words.
struct BatchTile {
    uint expert, first, count;
};

DEVICE BatchTile batch_tile(CTX, GPTR(const uint) tiles) {
    const ulong at = (ulong)ctx.group_y() * 4;
    const BatchTile tile = {tiles[at], tiles[at + 1], tiles[at + 2]};
    return tile;
}

struct BatchGateUpConstants {
    Part gate, up;
    // Pairs that share a row of x.
    uint share;
    Activation activation;
    uint has_bias;
    // Whether rows of x count as much as `weights` (pairs) says.
    uint weighs;
    // How often a group makes a tile a warp.
    uint span;
};

struct BatchGateUpBuffers {
    GPTR(const uchar) x;
    GPTR(const float) x_scales;
    GPTR(const float) factors;
    GPTR(const uint) list;
    GPTR(const uint) tiles;
    GPTR(const uchar) slots;
    GPTR(const uint) table;
    GPTR(const float) weights;
    GPTR(const float) gate_bias;
    GPTR(const float) up_bias;
    GPTR(uchar) bytes;
    GPTR(float) scales;
};

// activation(gate · x, up · x) of each pair → bytes and scales (pairs, rows). A tile of 16 weight rows is eight of gate and
// the same of up, or 16 of up where there is no gate. Grid: (rows / 64 / span, or rows / 128 / span without a gate, tiles of
// pairs).
template <uint D, uint T>
DEVICE void batch_gate_up(CTX, const BatchGateUpConstants c, const BatchGateUpBuffers b, SPTR(uint) words,
                          SPTR(float) block, SPTR(float) factors, SPTR(uint) pairs) {
    constexpr uint LINE = 8 * TILE_ROWS + 1;
    after_previous(ctx);
    const BatchTile tile = batch_tile(ctx, b.tiles);
    if (tile.count == 0) return;
    const bool gated = c.activation.kind != SQUARED_RELU;
    const uint inner = c.up.rows, slot = b.table[tile.expert], g = ctx.lane() / 4, t = ctx.lane() % 4;
    // Outputs of a tile, and of all warps' tiles.
    const uint each = gated ? 8 : 16, all = each * 8, begin = ctx.group_x() * c.span * all;
    const uint ahead = begin + c.span * all < inner ? c.span * all : inner - begin;
    if (ctx.warp() == 0) {
        if (gated) warp_prefetch(ctx, expert_row(b.slots, slot, c.gate, begin).plane0, ahead * c.gate.format.strides[0]);
        warp_prefetch(ctx, expert_row(b.slots, slot, c.up, begin).plane0, ahead * c.up.format.strides[0]);
    }
    const BatchX x = enter_batch<T>(ctx, b.x, b.x_scales, c.up.format.cols, tile.count, words,
                                    [=](uint i) { return b.list[tile.first + i] / c.share; });
    if (ctx.thread() < tile.count) {
        const uint pair = b.list[tile.first + ctx.thread()];
        pairs[ctx.thread()] = pair;
        factors[ctx.thread()] = b.factors[pair / c.share] * (c.weighs ? (float)b.weights[pair] : 1.0f);
    }
    barrier(ctx);
    for (uint o = 0; o < c.span; ++o) {
        const uint first = begin + o * all;
        if (first >= inner) break;
        const uint own = ctx.warp() * each + g, row = first + own < inner ? first + own : inner - 1;
        const uint next = row + 8 < inner ? row + 8 : inner - 1;
        TileSums sums[T / 8];
        tile_sums<D, T>(ctx, c.up.format, expert_row(b.slots, slot, gated ? c.gate : c.up, row),
                        expert_row(b.slots, slot, c.up, gated ? row : next), x, sums);
#pragma unroll
        for (uint n = 0; n < T / 8; ++n) {
#pragma unroll
            for (uint j = 0; j < 2; ++j) {
                const uint token = 8 * n + 2 * t + j;
                if (token >= tile.count) continue;
                const float factor = factors[token];
                float low = product_of(sums[n].v[j], factor), high = product_of(sums[n].v[2 + j], factor);
                if (c.has_bias) {
                    const uint at = tile.expert * inner;
                    low += gated ? b.gate_bias[at + row] : b.up_bias[at + row];
                    high += b.up_bias[at + (gated ? row : next)];
                }
                if (gated) {
                    block[token * LINE + own] = activated(c.activation, low, high);
                } else {
                    block[token * LINE + own] = activated(c.activation, 0.0f, low);
                    block[token * LINE + own + 8] = activated(c.activation, 0.0f, high);
                }
            }
        }
        barrier(ctx);
        const uint blocks = (first + all < inner ? all : inner - first) / 32;
        for (uint i = ctx.warp(); i < tile.count * blocks; i += ctx.warps()) {
            const uint token = i / blocks, from = i % blocks * 32;
            const ulong to = (ulong)pairs[token] * inner + first + from;
            quantize_block(ctx, block[token * LINE + from + ctx.lane()], b.bytes + to, b.scales + to / 32 * 2);
        }
        barrier(ctx);
    }
}

struct BatchDownConstants {
    Part part;
    uint has_bias;
    // How often a group makes a tile a warp.
    uint span;
};

struct BatchDownBuffers {
    GPTR(const uchar) x;
    GPTR(const float) x_scales;
    GPTR(const uint) list;
    GPTR(const uint) tiles;
    GPTR(const uchar) slots;
    GPTR(const uint) table;
    GPTR(const float) bias;
    GPTR(float) out;
};

// down · x of each pair, x (pairs, cols) → out (pairs, rows). Grid: (rows / 128 / span, tiles of pairs).
template <uint D, uint T>
DEVICE void batch_down(CTX, const BatchDownConstants c, const BatchDownBuffers b, SPTR(uint) words) {
    constexpr uint ALL = 8 * TILE_ROWS;
    after_previous(ctx);
    const BatchTile tile = batch_tile(ctx, b.tiles);
    if (tile.count == 0) return;
    const uint rows = c.part.rows, slot = b.table[tile.expert], begin = ctx.group_x() * c.span * ALL;
    const uint ahead = begin + c.span * ALL < rows ? c.span * ALL : rows - begin;
    if (ctx.warp() == 0)
        warp_prefetch(ctx, expert_row(b.slots, slot, c.part, begin).plane0, ahead * c.part.format.strides[0]);
    const BatchX x = enter_batch<T>(ctx, b.x, b.x_scales, c.part.format.cols, tile.count, words,
                                    [=](uint i) { return b.list[tile.first + i]; });
    barrier(ctx);
    for (uint o = 0; o < c.span; ++o) {
        const uint low = begin + o * ALL + ctx.warp() * TILE_ROWS + ctx.lane() / 4, high = low + 8;
        if (low - ctx.lane() / 4 >= rows) break;
        TileSums sums[T / 8];
        tile_sums<D, T>(ctx, c.part.format, expert_row(b.slots, slot, c.part, low < rows ? low : rows - 1),
                        expert_row(b.slots, slot, c.part, high < rows ? high : rows - 1), x, sums);
#pragma unroll
        for (uint n = 0; n < T / 8; ++n) {
#pragma unroll
            for (uint i = 0; i < 4; ++i) {
                const uint token = 8 * n + 2 * (ctx.lane() % 4) + i % 2, to = i < 2 ? low : high;
                if (token >= tile.count || to >= rows) continue;
                float sum = sums[n].v[i];
                if (c.has_bias) sum += b.bias[tile.expert * rows + to];
                b.out[(ulong)b.list[tile.first + token] * rows + to] = sum;
            }
        }
    }
}

// clang-format off
#define BATCHED_OF(name, D, T) \
    KERNEL_AHEAD(batch_products_##T##_##name, BatchProductsConstants, (const uchar, weights), (const uchar, bytes), \
                 (const float, scales), (const float, factors), (const float, residual), (float, out0), (float, out1), \
                 (float, out2)) { \
        SHARED_ASKED(words); \
        SHARED(float, kept, 8 * T * SUMS_LINE); \
        const BatchProductBuffers b = {weights, bytes, scales, factors, residual, out0, out1, out2}; \
        batch_products<D, T>(ctx, c, b, words, kept); \
    } \
    KERNEL_AHEAD(batch_gate_up_##T##_##name, BatchGateUpConstants, (const uchar, x), (const float, x_scales), \
                 (const float, factors), (const uint, list), (const uint, tiles), (const uchar, slots), \
                 (const uint, table), (const float, weights), (const float, gate_bias), (const float, up_bias), \
                 (uchar, bytes), (float, scales)) { \
        SHARED_ASKED(words); \
        SHARED(float, block, T * (8 * TILE_ROWS + 1)); \
        SHARED(float, own_factors, T); \
        SHARED(uint, pairs, T); \
        const BatchGateUpBuffers b = {x, x_scales, factors, list, tiles, slots, table, weights, gate_bias, up_bias, bytes, scales}; \
        batch_gate_up<D, T>(ctx, c, b, words, block, own_factors, pairs); \
    } \
    KERNEL_AHEAD(batch_down_##T##_##name, BatchDownConstants, (const uchar, x), (const float, x_scales), \
                 (const uint, list), (const uint, tiles), (const uchar, slots), (const uint, table), \
                 (const float, bias), (float, out)) { \
        SHARED_ASKED(words); \
        const BatchDownBuffers b = {x, x_scales, list, tiles, slots, table, bias, out}; \
        batch_down<D, T>(ctx, c, b, words); \
    }
// clang-format on

#define BATCHED(name, D)   \
    BATCHED_OF(name, D, 8) \
    BATCHED_OF(name, D, 16)
#ifdef SUFFIX
BATCHED(SUFFIX, DTYPE)
#else
#define OF_EACH(name, D, code, few, ...) IF_BYTES_##few(BATCHED(name, D))
ENCODINGS(OF_EACH)
#endif

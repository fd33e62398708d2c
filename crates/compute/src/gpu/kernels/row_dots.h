// Products of several rows of weights by a warp: what a lane reads of them at once, its shares of the products, and their sums.
#pragma once
#include "pieces.h"

// Rows that a warp multiplies at once, and a lane's shares of their products.
template <uint N>
struct Rows {
    Row row[N];
};
template <uint N>
struct Sums {
    float v[N];
};

// P pieces of N rows that a lane has read: `first`, and those 32 lanes on. Beyond the end of a row, its first one.
template <uint N, uint P>
struct Raws {
    Raw raw[N][P];
};

template <uint D, uint N, uint P>
DEVICE Raws<N, P> raws_of(const Format f, const Rows<N> rows, uint first) {
    const uint pieces = pieces_of<D>(f);
    Raws<N, P> r;
#pragma unroll
    for (uint i = 0; i < P; ++i) {
        const uint p = first + 32 * i;
#pragma unroll
        for (uint n = 0; n < N; ++n) r.raw[n][i] = raw_of<D>(f, rows.row[n], p < pieces ? p : 0);
    }
    return r;
}

// A lane's shares of the products of N rows, of which it has read its first P pieces; it reads the others P at a time.
template <uint D, uint N, uint P, class X>
DEVICE Sums<N> lane_dots(CTX, const Format f, const Rows<N> rows, Raws<N, P> r, const X x) {
    const uint pieces = pieces_of<D>(f);
    Sums<N> sums;
#pragma unroll
    for (uint n = 0; n < N; ++n) sums.v[n] = 0.0f;
    for (uint first = ctx.lane(); first < pieces; first += 32 * P) {
        if (first >= 32 * P) r = raws_of<D, N, P>(f, rows, first);
#pragma unroll
        for (uint i = 0; i < P; ++i) {
            const uint p = first + 32 * i;
            if (p >= pieces) break;
            const Chunk k = chunk_of<D>(x, p);
#pragma unroll
            for (uint n = 0; n < N; ++n) sums.v[n] += piece_dot<D>(r.raw[n][i], k, p);
        }
    }
    return sums;
}

DEVICE float halved(CTX, const Sums<1> sums, uint mask) {
    float sum = sums.v[0];
    for (; mask > 0; mask /= 2) sum += lane_xor(ctx, sum, mask);
    return sum;
}

// Every lane keeps half of the values, and gets the other lane's share of them.
template <uint N>
DEVICE float halved(CTX, const Sums<N> sums, uint mask) {
    const bool upper = ctx.lane() & mask;
    Sums<N / 2> kept;
#pragma unroll
    for (uint i = 0; i < N / 2; ++i) {
        const float given = upper ? sums.v[i] : sums.v[i + N / 2];
        kept.v[i] = (upper ? sums.v[i + N / 2] : sums.v[i]) + lane_xor(ctx, given, mask);
    }
    return halved(ctx, kept, mask / 2);
}

// Sums over `team` lanes, a power of two, of N values, a power of two, with fewer exchanges than N sums take one by one
// and the same bits. Lane (lane % team) has the sum of value `lane % team / (team / N)`.
template <uint N>
DEVICE float team_sums(CTX, const Sums<N> sums, uint team) {
    return halved(ctx, sums, team / 2);
}

// Asks for `bytes` bytes from p on.
DEVICE void warp_prefetch(CTX, GPTR(const uchar) p, uint bytes) {
    if (ctx.lane() == 0) prefetch(p, bytes);
}

// Activations of a lane's P pieces of a row that has no more of them: `first`, and those 32 lanes on. Beyond the end of a row, its
// first one's.
template <uint P>
struct Chunks {
    Chunk of[P];
};

template <uint D, uint P, class X>
DEVICE Chunks<P> chunks_of(const X x, uint first, uint pieces) {
    Chunks<P> k;
#pragma unroll
    for (uint i = 0; i < P; ++i) k.of[i] = chunk_of<D>(x, first + 32 * i < pieces ? first + 32 * i : 0);
    return k;
}

// What `lane_dots` gives for rows of 32 · P pieces at most.
template <uint D, uint N, uint P>
DEVICE Sums<N> short_dots(const Raws<N, P> r, const Chunks<P> k, uint first, uint pieces) {
    Sums<N> sums;
#pragma unroll
    for (uint n = 0; n < N; ++n) sums.v[n] = 0.0f;
#pragma unroll
    for (uint i = 0; i < P; ++i) {
        const uint p = first + 32 * i;
        const bool is_within = p < pieces;
#pragma unroll
        for (uint n = 0; n < N; ++n) {
            const float sum = sums.v[n] + piece_dot<D>(r.raw[n][i], k.of[i], is_within ? p : 0);
            sums.v[n] = is_within ? sum : sums.v[n];
        }
    }
    return sums;
}

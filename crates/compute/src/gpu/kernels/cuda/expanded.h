// Codes of four bits as bytes in the order of their columns, for products of a weight's piece with several tokens: what is made of it
// once does not have to be made of every token's columns.
#pragma once
#include "../pieces.h"

// Twice the four-bit floats of the lowest four nibbles, a signed byte each.
DEVICE uint doubled_e2m1(uint nibbles) {
    const uint positive = pick(DOUBLED_LOW, DOUBLED_HIGH, nibbles), negative = pick(0xfdfeff00u, 0xf4f8fafcu, nibbles);
    return pick(positive, negative, (nibbles >> 1 & 0x4444u) | 0x3210u);
}

// Even nibbles of a word in order of their bytes, and odd ones: columns 0, 1, 2, 3, then 4, 5, 6, 7.
DEVICE uint first_nibbles(uint w) { return first_by_turns(w & 0x0f0f0f0fu, w >> 4 & 0x0f0f0f0fu); }
DEVICE uint last_nibbles(uint w) { return last_by_turns(w & 0x0f0f0f0fu, w >> 4 & 0x0f0f0f0fu); }
// Whether a piece's codes have another order than its columns, or are looked up.
template <uint D>
DEVICE constexpr bool is_expanded() {
    return D == AFFINE4 || D == NVFP4 || D == MXFP4 || D == MXFP4_PLANES || is_non_linear<D>();
}

// Two words of codes, of columns that take turns, in the order of columns: four of the first sixteen, and of the last.
struct Parted {
    uint first, last;
};
DEVICE Parted parted(uint low, uint high) { return {even_bytes(low, high), odd_bytes(low, high)}; }

// A piece with its codes as signed bytes, sixteen columns in `a` and in `b`.
template <uint D>
DEVICE Raw expanded(const Raw r) {
    if (!is_expanded<D>()) return r;
    Raw e = r;
    const uint words[4] = {r.a.x, r.a.y, r.a.z, r.a.w};
    uint to[8];
#pragma unroll
    for (uint i = 0; i < 4; ++i) {
        const uint w = words[i];
        if (D == AFFINE4) {
            to[2 * i] = first_nibbles(w);
            to[2 * i + 1] = last_nibbles(w);
        } else if (D == NVFP4 || D == MXFP4_PLANES) {
            to[2 * i] = doubled_e2m1(w);
            to[2 * i + 1] = doubled_e2m1(w >> 16);
        } else {
            const Parted p = D == MXFP4 ? parted(doubled_e2m1(w), doubled_e2m1(w >> 16))
                                        : parted(non_linear(w), non_linear(w >> 16));
            to[i] = p.first;
            to[4 + i] = p.last;
        }
    }
    e.a = {to[0], to[1], to[2], to[3]};
    e.b = {to[4], to[5], to[6], to[7]};
    return e;
}

// The activations that an expanded piece is multiplied by.
template <uint D, class X>
DEVICE Chunk expanded_chunk(const X x, uint p) {
    return is_expanded<D>() ? chunk_of<Q8_0>(x, p) : chunk_of<D>(x, p);
}

// `piece_dot` of an expanded piece, with the same bits: whole numbers are exact in any order.
template <uint D>
DEVICE float expanded_dot(const Raw r, const Chunk x, uint p) {
    if (!is_expanded<D>()) return piece_dot<D>(r, x, p);
    PieceDots dots = {{EXACT, EXACT, 0, 0}};
    dots.v[0] += dot16(r.a, x.a);
    dots.v[has_two_scales<D>() ? 1 : 0] += dot16(r.b, x.b);
    return scaled_dots<D>(piece_scales<D>(r, p), x.of, dots);
}

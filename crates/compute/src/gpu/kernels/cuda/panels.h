// Panels of weights of one encoding, DTYPE, on tensor cores: weights go from memory straight into registers, and a warp multiplies
// 16 weight rows by eights of tokens, which stand on the narrow side.
//
// Activations come as f16 in blocks of eight tokens × eight columns, 128 bytes each: (tokens / 8, columns / 8, 8, 8), with
// columns filled up with zeros to a multiple of 128; `blocks_of` has scaled each token by a power of two, and `scale` undoes
// it. Of 128 columns a lane unpacks 32 of both of its rows of a panel. In which order a product takes columns is free, as
// long as both sides agree.
#pragma once
#include "matrices.h"

// Rows of a panel, and tokens that a product takes at once.
const u32 PANEL = 16, EIGHT = 8;
// Columns that a warp takes at once, and units of 16 bytes that they are of eight tokens.
const u32 GROUP = 128, GROUP_UNITS = 128;

// A lane's rows of panels: g and g + 8, g = lane / 4.
template <int PANELS>
struct Rows {
    RowAddress of[PANELS][2];
};

template <int PANELS>
struct RawPanels {
    typename Weight::Raw of[PANELS][2];
};

// Sums of panels: rows g and g + 8 of tokens 2t and 2t + 1, t = lane % 4, of each eight.
template <int PANELS, u32 PARTS>
struct Sums {
    float v[PANELS][PARTS][4];
};

template <int PANELS, u32 PARTS>
DEVICE void clear(Sums<PANELS, PARTS>& sums) {
#pragma unroll
    for (int m = 0; m < PANELS; m++)
#pragma unroll
        for (u32 n = 0; n < PARTS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums.v[m][n][i] = 0.0f;
}

// Of result i of a part n: which token of the tile, and which row of the panel.
DEVICE u32 token_of(u32 n, u32 i) { return EIGHT * n + 2 * (threadIdx.x & 3) + (i & 1); }
DEVICE u32 row_of(u32 i) { return 8 * (i >> 1) + ((threadIdx.x & 31) >> 2); }

// Which eight columns of 128 a lane multiplies in a quarter.
DEVICE u32 eight_of(u32 t, u32 quarter) {
    return Weight::SPLIT ? 8 * (t >> 1) + 2 * (t & 1) + 4 * (quarter >> 1) + (quarter & 1) : 4 * t + quarter;
}

// Where unit `i` of a group's 128 is in shared memory: those of the eights that lanes read together are in banks of their own.
DEVICE u32 place_of(u32 i) {
    const u32 t = Weight::SPLIT ? i >> 5 & 2 | i >> 4 & 1 : i >> 5 & 3;
    return i ^ 2 * t;
}
// Where that of a lane's token and eight columns is.
DEVICE u32 place_of(u32 g, u32 t, u32 quarter) { return EIGHT * eight_of(t, quarter) + (g ^ 2 * t); }

DEVICE bool is_there(u32 group, u32 t, u32 cols) {
    return Weight::SPLIT || GROUP * group + 32 * t < cols;
}

template <int PANELS>
DEVICE void load_panels(RawPanels<PANELS>& raw, const Rows<PANELS>& rows, u32 group, const Format& f) {
    const u32 t = threadIdx.x & 3, step = GROUP * group + 64 * (t >> 1);
    if (!is_there(group, t, f.cols)) return;
#pragma unroll
    for (int m = 0; m < PANELS; m++) {
        Weight::load(raw.of[m][0], rows.of[m][0], step, t & 1, f.kind);
        Weight::load(raw.of[m][1], rows.of[m][1], step, t & 1, f.kind);
    }
}

template <int PANELS>
DEVICE void unpack_panels(Columns (&w)[PANELS][2], const RawPanels<PANELS>& raw, u32 group, const Format& f) {
    const u32 t = threadIdx.x & 3;
    const bool present = is_there(group, t, f.cols);
#pragma unroll
    for (int m = 0; m < PANELS; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (present) {
                Weight::unpack(raw.of[m][i], GROUP * group + 64 * (t >> 1), t & 1, w[m][i]);
            } else {
#pragma unroll
                for (int j = 0; j < 8; j++) w[m][i].a[j] = w[m][i].b[j] = 0;
            }
        }
}

// What a lane multiplies in a quarter of a group: columns of both rows of a panel, for a first and a second product.
template <int PANELS>
DEVICE void fragments(u32 (&first)[4], u32 (&second)[4], const Columns (&w)[PANELS][2], int m, int quarter) {
    const u32(&low)[8] = quarter < 2 ? w[m][0].a : w[m][0].b;
    const u32(&high)[8] = quarter < 2 ? w[m][1].a : w[m][1].b;
    const int at = 4 * (quarter & 1);
    first[0] = low[at], first[1] = high[at], first[2] = low[at + 1], first[3] = high[at + 1];
    second[0] = low[at + 2], second[1] = high[at + 2], second[2] = low[at + 3], second[3] = high[at + 3];
}

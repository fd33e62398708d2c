// Products of each head's part of a weight by warp groups of compute capability 9.0, as `wide.cu` makes those of whole weights:
// parts come as f16, as `latent_weights` of `../latent.h` unpacks them.
#define DTYPE F16
#include "wide.h"

struct LatentEnterConstants {
    u32 rows, heads, cols;
    // Columns from what a head takes to what the next one takes, even.
    u32 each;
    // Tokens of a tile.
    u32 width;
};

struct LatentProductsConstants {
    u32 heads, rows;
    // Channels of a head that come in and go out, and those from a head's results to the next one's.
    u32 in, out, stride;
    // Tokens of a tile, a multiple of eight.
    u32 width;
    // Whether rows of x were multiplied by what `scale` undoes, and whether results are f16.
    u32 scaled, halves;
};

#if HAS_WARPGROUPS

DEVICE u32 filled_up(u32 cols) { return (cols + STEP - 1) / STEP * STEP; }
// Rows of a head in x and `scale`.
DEVICE u32 room(u32 rows) { return (rows + 7) / 8 * 8; }

// Tiles in the order: rows of one tile of a head's tokens, then the next.
struct HeadsJob {
    static const u32 MOST = 160;

    const u8 *x, *weights;
    const float* scale;
    float* out;
    const LatentProductsConstants& c;

    DEVICE u32 slices() const { return 1; }
    DEVICE u32 most() const { return MOST; }
    DEVICE u32 row_tiles() const { return (c.out + ROWS - 1) / ROWS; }
    DEVICE u32 token_tiles() const { return (c.rows + c.width - 1) / c.width; }
    DEVICE u32 head(u32 tile) const { return tile / (row_tiles() * token_tiles()); }
    DEVICE u32 first(u32 tile) const { return tile / row_tiles() % token_tiles() * c.width; }
    DEVICE u32 row(u32 tile) const { return tile % row_tiles() * ROWS + threadIdx.x / 32 * 16; }
    DEVICE Tokens tokens(u32 tile) const {
        if (head(tile) >= c.heads) return {x, 0};
        const u32 from = first(tile);
        return {x + ((u64)head(tile) * room(c.rows) + from) * filled_up(c.in) * 2, min(c.width, c.rows - from)};
    }
    DEVICE RowAddress row_of(u32 tile, u32 row) const {
        const u8* at = weights + ((u64)head(tile) * c.out + min(row, c.out - 1)) * c.in * 2;
        return {{at, at, at}, 0};
    }
    DEVICE void rows(u32 tile, RowAddress (&to)[2]) const {
        const u32 r = row(tile) + threadIdx.x % 32 / 4;
        to[0] = row_of(tile, r);
        to[1] = row_of(tile, r + 8);
    }
    template <int N>
    DEVICE void finish(u32 tile, const float (&d)[N / 2], u8* stored, Range of) const {
        const u32 from = first(tile), own = head(tile), r = row(tile) + (threadIdx.x & 3) * 4;
        const u32 left = r < c.out ? c.out - r : 0;
        const auto result = [&](u32 token) {
            return Result{from + token, c.scaled ? scale[own * room(c.rows) + from + token] : 1.0f};
        };
        for_results<N>(d, stored, of, result, [&](const Result& result, const float* values) {
            const u64 at = ((u64)result.row * c.heads + own) * c.stride + r;
            float v[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) v[i] = values[(threadIdx.x & 3) * 4 + i] * result.factor;
            if (!c.halves) {
                store_4(out + at, v, left, c.stride % 4 == 0);
                return;
            }
            const u32 low = h2_of(v[0], v[1]), high = h2_of(v[2], v[3]);
            u16* to = (u16*)out + at;
            if (left >= 4 && c.stride % 4 == 0) {
                *(uint2*)to = make_uint2(low, high);
                return;
            }
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                if (i < left) to[i] = (u16)((i < 2 ? low : high) >> i % 2 * 16);
        });
    }
};

#endif // HAS_WARPGROUPS

// The first `cols` columns of each head in x (rows, heads, each) f32 → out and scale as `wide_enter` of `wide_tokens.cu` writes them, each head's rows for themselves:
// room for them up to a multiple of eight. A warp a row of a head; cols even.
extern "C" __global__ void __launch_bounds__(256)
    latent_enter(const float* x, u8* out, float* scale, const __grid_constant__ LatentEnterConstants c) {
    const u32 index = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x & 31;
    after_previous();
    if (index >= c.rows * c.heads) return;
    const u32 row = index / c.heads, head = index % c.heads, filled = (c.cols + 127) / 128 * 128;
    const float2* from = (const float2*)(x + (u64)index * c.each);
    // Of the four steps from `step` on, the pairs of pieces lane % 16 of steps lane / 16 and two further on.
    float2 v[2][4];
    const auto read = [&](u32 step) {
#pragma unroll
        for (u32 i = 0; i < 2; i++)
#pragma unroll
            for (u32 q = 0; q < 4; q++) {
                const u32 pair = (step + lane / 16 + 2 * i) * 64 + q * 16 + lane % 16;
                v[i][q] = pair < c.cols / 2 ? from[pair] : make_float2(0.0f, 0.0f);
            }
    };
    const u32 last = (filled / 128 - 1) / 4 * 4;
    float largest = 0.0f;
    for (u32 step = 0; step <= last; step += 4) {
        read(step);
#pragma unroll
        for (u32 i = 0; i < 2; i++)
#pragma unroll
            for (u32 q = 0; q < 4; q++) largest = fmaxf(largest, fmaxf(fabsf(v[i][q].x), fabsf(v[i][q].y)));
    }
#pragma unroll
    for (u32 mask = 16; mask > 0; mask >>= 1) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
    // As there.
    const u32 exponent = __float_as_uint(largest) >> 23;
    const bool plain = exponent > 20 && exponent < 250;
    const float up = plain ? __uint_as_float((268 - exponent) << 23) : 1.0f;
    const float down = plain ? __uint_as_float((exponent - 14) << 23) : 1.0f;
    const u32 first = row / c.width * c.width, eights = (min(c.width, c.rows - first) + 7) / 8;
    const u32 rows = (c.rows + 7) / 8 * 8;
    u8* to = out + ((u64)head * rows + first) * filled * 2 + (row - first) * 128;
    // From the last steps on, which are read.
    for (u32 step = last;; step -= 4) {
        if (step < last) read(step);
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 piece = (step + lane / 16 + 2 * i) * 16 + lane % 16;
            if (piece >= filled / 8) continue;
            u32 h[4];
#pragma unroll
            for (u32 q = 0; q < 4; q++) h[q] = h2_of(v[i][q].x * up, v[i][q].y * up);
            *(uint4*)(to + piece / 8 * eights * 1024 + (piece ^ row) % 8 * 16) = make_uint4(h[0], h[1], h[2], h[3]);
        }
        if (step == 0) break;
    }
    if (lane == 0) scale[head * rows + row] = down;
}

// x (rows, heads, in) as `latent_enter` writes it · each head's weights (heads, out, in) f16 → out (rows, heads, stride), of
// each head the first `out` channels, f32 or f16.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    latent_products(const u8* x, const float* scale, const u8* weights, float* out,
                    const __grid_constant__ LatentProductsConstants c) {
#if HAS_WARPGROUPS
    extern __shared__ u8 shared[];
    const HeadsJob job = {x, weights, scale, out, c};
    const Format format = {F16, c.in, {c.in * 2, 0, 0}};
    multiply(job, shared, format);
#endif
}

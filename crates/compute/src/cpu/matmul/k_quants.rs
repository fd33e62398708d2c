//! Decoders of Q4_K, Q5_K and Q6_K; layouts in [`crate::quant`].

use super::{
    int8::{Format, Tile},
    tile::{Block, TILE_COLS, TileRows},
};
use crate::cpu::simd::Isa;

/// Q4_K.
#[derive(Clone, Copy)]
pub(super) struct Q4K;

impl Format for Q4K {
    const ZERO: i32 = 0;
    const BIAS: bool = true;

    #[inline(always)]
    fn decode<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, _: usize, tile: &mut Tile) {
        let block = rows.plane(0).block::<144>(col / TILE_COLS * 144);
        scales_and_mins(isa, block, tile);
        let low = isa.splat_u(0x0f0f_0f0f);
        for pair in 0..4 {
            for half in 0..2 {
                let qs = block.words(isa, 16 + 32 * pair + 16 * half);
                for (k, qs) in qs.into_iter().enumerate() {
                    tile.codes_mut(2 * pair).put(isa, 4 * half + k, isa.and(qs, low));
                    tile.codes_mut(2 * pair + 1).put(isa, 4 * half + k, isa.and(isa.shr::<4>(qs), low));
                }
            }
        }
    }
}

/// Q5_K.
#[derive(Clone, Copy)]
pub(super) struct Q5K;

impl Format for Q5K {
    const ZERO: i32 = 0;
    const BIAS: bool = true;

    #[inline(always)]
    fn decode<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, _: usize, tile: &mut Tile) {
        let block = rows.plane(0).block::<176>(col / TILE_COLS * 176);
        scales_and_mins(isa, block, tile);
        let (low, fifth) = (isa.splat_u(0x0f0f_0f0f), isa.splat_u(0x1010_1010));
        for half in 0..2 {
            // Bit j of a byte belongs to sub-block j; two are used, then the next two move to their place.
            let mut high = block.words(isa, 16 + 16 * half);
            for pair in 0..4 {
                let qs = block.words(isa, 48 + 32 * pair + 16 * half);
                for (k, qs) in qs.into_iter().enumerate() {
                    let even = isa.and(isa.shl::<4>(high[k]), fifth);
                    let odd = isa.and(isa.shl::<3>(high[k]), fifth);
                    high[k] = isa.shr::<2>(high[k]);
                    let (even, odd) =
                        (isa.or(isa.and(qs, low), even), isa.or(isa.and(isa.shr::<4>(qs), low), odd));
                    tile.codes_mut(2 * pair).put(isa, 4 * half + k, even);
                    tile.codes_mut(2 * pair + 1).put(isa, 4 * half + k, odd);
                }
            }
        }
    }
}

/// Q6_K.
#[derive(Clone, Copy)]
pub(super) struct Q6K;

impl Format for Q6K {
    const ZERO: i32 = 32;
    const HALVES: bool = true;

    #[inline(always)]
    fn decode<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, _: usize, tile: &mut Tile) {
        let block = rows.plane(0).block::<210>(col / TILE_COLS * 210);
        // The last 16 bytes: two scales' worth that is ignored, and d on top.
        let d = isa.f16_to_f32(isa.shr::<16>(block.words(isa, 194)[3]));
        for (i, sc) in block.words(isa, 192).into_iter().enumerate() {
            let sc = [
                isa.sar::<24>(isa.shl::<24>(sc)),
                isa.sar::<24>(isa.shl::<16>(sc)),
                isa.sar::<24>(isa.shl::<8>(sc)),
                isa.sar::<24>(sc),
            ];
            for (j, sc) in sc.into_iter().enumerate() {
                tile.set_scale(isa, 4 * i + j, isa.mul(d, isa.to_f32(sc)));
            }
        }

        let (low, top) = (isa.splat_u(0x0f0f_0f0f), isa.splat_u(0x3030_3030));
        for n in 0..2 {
            for half in 0..2 {
                let a = block.words(isa, 64 * n + 16 * half);
                let c = block.words(isa, 64 * n + 32 + 16 * half);
                let h = block.words(isa, 128 + 32 * n + 16 * half);
                for k in 0..4 {
                    let codes = [
                        isa.or(isa.and(a[k], low), isa.and(isa.shl::<4>(h[k]), top)),
                        isa.or(isa.and(c[k], low), isa.and(isa.shl::<2>(h[k]), top)),
                        isa.or(isa.and(isa.shr::<4>(a[k]), low), isa.and(h[k], top)),
                        isa.or(isa.and(isa.shr::<4>(c[k]), low), isa.and(isa.shr::<2>(h[k]), top)),
                    ];
                    for (sub, codes) in codes.into_iter().enumerate() {
                        tile.codes_mut(4 * n + sub).put(isa, 4 * half + k, codes);
                    }
                }
            }
        }
    }
}

/// Decodes the 16-byte head d, dmin, s\[12\] of Q4_K and Q5_K blocks.
#[inline(always)]
fn scales_and_mins<I: Isa, const LEN: usize>(isa: I, block: Block<'_, LEN>, tile: &mut Tile) {
    let [d, a, b, c] = block.words(isa, 0);
    let dmin = isa.sub(isa.splat(0.0), isa.f16_to_f32(isa.shr::<16>(d)));
    let d = isa.f16_to_f32(d);
    let (six, low, top) = (isa.splat_u(0x3f3f_3f3f), isa.splat_u(0x0f0f_0f0f), isa.splat_u(0x3030_3030));
    // Four 6-bit values a word: of sub-blocks 0..4, then 4..8.
    let scales = [isa.and(a, six), isa.or(isa.and(c, low), isa.and(isa.shr::<2>(a), top))];
    let mins = [isa.and(b, six), isa.or(isa.and(isa.shr::<4>(c), low), isa.and(isa.shr::<2>(b), top))];
    for i in 0..2 {
        for (j, sc) in bytes(isa, scales[i]).into_iter().enumerate() {
            tile.set_scale(isa, 4 * i + j, isa.mul(d, sc));
        }
        for (j, m) in bytes(isa, mins[i]).into_iter().enumerate() {
            tile.set_bias(isa, 4 * i + j, isa.mul(dmin, m));
        }
    }
}

/// The four bytes of each lane as f32.
#[inline(always)]
fn bytes<I: Isa>(isa: I, v: I::U) -> [I::F; 4] {
    let byte = isa.splat_u(0xff);
    [
        isa.to_f32(isa.and(v, byte)),
        isa.to_f32(isa.and(isa.shr::<8>(v), byte)),
        isa.to_f32(isa.and(isa.shr::<16>(v), byte)),
        isa.to_f32(isa.shr::<24>(v)),
    ]
}

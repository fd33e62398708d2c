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
    const COLS: usize = TILE_COLS;
    const BYTES: usize = 144;
    const BIAS: bool = true;

    #[inline(always)]
    fn scales<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, _: usize, tile: &mut Tile) {
        scales_and_mins(isa, rows.plane(0).block::<144>(col / TILE_COLS * 144), tile);
    }

    #[inline(always)]
    fn codes<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, _: usize, tile: &mut Tile) {
        let block = rows.plane(0).block::<144>(col / TILE_COLS * 144);
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

    #[inline(always)]
    unsafe fn group<I: Isa>(self, isa: I, p: *const u8, group: usize) -> [I::U; 2] {
        let low = isa.splat_u(0x0f0f_0f0f);
        // SAFETY: the 4 · LANES bytes of this group's nibbles, by the caller.
        let qs = unsafe { isa.load_u(p.add(16 + 4 * I::LANES * group).cast()) };
        [isa.and(qs, low), isa.and(isa.shr::<4>(qs), low)]
    }

    #[inline(always)]
    fn subs(n_lanes: usize, group: usize) -> [[usize; 2]; 2] {
        nibble_subs(n_lanes, group)
    }
}

/// Q5_K.
#[derive(Clone, Copy)]
pub(super) struct Q5K;

impl Format for Q5K {
    const COLS: usize = TILE_COLS;
    const BYTES: usize = 176;
    const BIAS: bool = true;

    #[inline(always)]
    fn scales<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, _: usize, tile: &mut Tile) {
        scales_and_mins(isa, rows.plane(0).block::<176>(col / TILE_COLS * 176), tile);
    }

    #[inline(always)]
    fn codes<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, _: usize, tile: &mut Tile) {
        let block = rows.plane(0).block::<176>(col / TILE_COLS * 176);
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

    #[inline(always)]
    unsafe fn group<I: Isa>(self, isa: I, p: *const u8, group: usize) -> [I::U; 2] {
        let (low, fifth) = (isa.splat_u(0x0f0f_0f0f), isa.splat_u(0x1010_1010));
        // SAFETY: the 4 · LANES bytes of this group's nibbles and the 32 bytes of high bits, by the caller.
        let (qs, high) = unsafe {
            let qs = isa.load_u(p.add(48 + 4 * I::LANES * group).cast());
            (qs, isa.load_parts(p.add(16), p.add(16)))
        };
        let [[even, even_high], _] = Self::subs(I::LANES, group);
        let high = isa.shr_parts(high, even as u32, even_high as u32);
        [
            isa.or(isa.and(qs, low), isa.and(isa.shl::<4>(high), fifth)),
            isa.or(isa.and(isa.shr::<4>(qs), low), isa.and(isa.shl::<3>(high), fifth)),
        ]
    }

    #[inline(always)]
    fn subs(n_lanes: usize, group: usize) -> [[usize; 2]; 2] {
        nibble_subs(n_lanes, group)
    }
}

/// Q6_K.
#[derive(Clone, Copy)]
pub(super) struct Q6K;

impl Format for Q6K {
    const COLS: usize = TILE_COLS;
    const BYTES: usize = 210;
    const ZERO: i32 = 32;
    const HALVES: bool = true;

    #[inline(always)]
    fn scales<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, _: usize, tile: &mut Tile) {
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
    }

    #[inline(always)]
    fn codes<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, _: usize, tile: &mut Tile) {
        let block = rows.plane(0).block::<210>(col / TILE_COLS * 210);
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

    #[inline(always)]
    unsafe fn group<I: Isa>(self, isa: I, p: *const u8, group: usize) -> [I::U; 2] {
        let (low, top) = (isa.splat_u(0x0f0f_0f0f), isa.splat_u(0x3030_3030));
        // Half of the block and, with eight lanes, half of the half.
        let (n, i) = if I::LANES == 16 { (group, 0) } else { (group / 2, group % 2) };
        // SAFETY: 4 · LANES bytes of nibbles and 32 bytes of high bits, by the caller.
        let (ql, high) = unsafe {
            let high = p.add(128 + 32 * n);
            (isa.load_u(p.add(64 * n + 32 * i).cast()), isa.load_parts(high, high))
        };
        let shift = 2 * i as u32;
        let first = isa.shl::<4>(isa.shr_parts(high, shift, 2));
        let second = isa.shr_parts(high, shift, 2);
        [
            isa.or(isa.and(ql, low), isa.and(first, top)),
            isa.or(isa.and(isa.shr::<4>(ql), low), isa.and(second, top)),
        ]
    }

    #[inline(always)]
    fn subs(n_lanes: usize, group: usize) -> [[usize; 2]; 2] {
        if n_lanes == 16 {
            [[4 * group, 4 * group + 1], [4 * group + 2, 4 * group + 3]]
        } else {
            let first = group / 2 * 4 + group % 2;
            [[first; 2], [first + 2; 2]]
        }
    }
}

/// Sub-blocks of the low and of the high nibbles of Q4_K and Q5_K: each 32 bytes are a sub-block and the next.
#[inline(always)]
fn nibble_subs(n_lanes: usize, group: usize) -> [[usize; 2]; 2] {
    if n_lanes == 16 {
        [[4 * group, 4 * group + 2], [4 * group + 1, 4 * group + 3]]
    } else {
        [[2 * group; 2], [2 * group + 1; 2]]
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

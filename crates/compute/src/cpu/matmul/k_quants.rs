//! Decoders of ggml's k-quants; layouts in [`crate::quant`].

use super::{
    int8::{Ahead, Format, HalvesBiased, HalvesCentred, SuperBiased, Tile, Whole},
    tile::{Block, TILE_COLS, TileRows},
};
use crate::cpu::simd::Isa;

/// Q2_K.
#[derive(Clone, Copy)]
pub(super) struct Q2K;

impl Q2K {
    /// Scales and minima.
    #[inline(always)]
    fn four_bits<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize) -> Whole<I> {
        let block = rows.plane(0).block::<84>(col / TILE_COLS * 84);
        let d = block.words(isa, 68)[3];
        let low = isa.splat_u(0x0f0f_0f0f);
        let mut scales = block.words(isa, 0);
        let mut biases = scales;
        for i in 0..4 {
            biases[i] = isa.and(isa.shr::<4>(scales[i]), low);
            scales[i] = isa.and(scales[i], low);
        }
        Whole { scales, biases, factors: factors(isa, d) }
    }
}

impl Format for Q2K {
    type Shape = HalvesBiased;
    const COLS: usize = TILE_COLS;
    const RAW: bool = true;
    const BITS: u32 = 2;
    const BYTES: usize = 84;

    #[inline(always)]
    fn scales<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, _: usize, tile: &mut Tile) {
        self.four_bits(isa, rows, col).put(isa, self, tile);
    }

    #[inline(always)]
    fn whole<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize) -> Option<Whole<I>> {
        Some(self.four_bits(isa, rows, col))
    }

    #[inline(always)]
    fn codes<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, _: usize, tile: &mut Tile) {
        let block = rows.plane(0).block::<84>(col / TILE_COLS * 84);
        for n in 0..2 {
            for half in 0..2 {
                for (i, qs) in block.words(isa, 16 + 32 * n + 16 * half).into_iter().enumerate() {
                    for k in 0..4 {
                        tile.codes_mut(4 * n + k).put(isa, 4 * half + i, two_bits(isa, qs, k, k));
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn group<I: Isa>(self, isa: I, p: *const u8, _: &Ahead, group: usize) -> [I::U; 2] {
        // SAFETY: by the caller.
        self.expand(isa, unsafe { self.raw(isa, p, group) }, group)
    }

    #[inline(always)]
    unsafe fn raw<I: Isa>(self, isa: I, p: *const u8, group: usize) -> [I::U; 2] {
        let (n, _) = rows_of_32(I::LANES, group);
        // SAFETY: 32 bytes of two-bit values, by the caller.
        let qs = unsafe { isa.load_parts(p.add(16 + 32 * n), p.add(16 + 32 * n)) };
        [qs, isa.splat_u(0)]
    }

    #[inline(always)]
    fn expand<I: Isa>(self, isa: I, [qs, _]: [I::U; 2], group: usize) -> [I::U; 2] {
        let (_, [[a, b], [c, d]]) = rows_of_32(I::LANES, group);
        [two_bits(isa, qs, a, b), two_bits(isa, qs, c, d)]
    }
}

/// Q3_K.
#[derive(Clone, Copy)]
pub(super) struct Q3K;

impl Q3K {
    /// Scales.
    #[inline(always)]
    fn six_bits<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize) -> Whole<I> {
        let block = rows.plane(0).block::<110>(col / TILE_COLS * 110);
        let d = isa.f16_to_f32(isa.shr::<16>(block.words(isa, 94)[3]));
        let [_, a, b, c] = block.words(isa, 92);
        let (low, top) = (isa.splat_u(0x0f0f_0f0f), isa.splat_u(0x3030_3030));
        let mut scales = [
            isa.or(isa.and(a, low), isa.and(isa.shl::<4>(c), top)),
            isa.or(isa.and(b, low), isa.and(isa.shl::<2>(c), top)),
            isa.or(isa.and(isa.shr::<4>(a), low), isa.and(c, top)),
            isa.or(isa.and(isa.shr::<4>(b), low), isa.and(isa.shr::<2>(c), top)),
        ];
        for scales in &mut scales {
            // 32 is subtracted from bytes, whose top bits keep them apart.
            let (tops, offset) = (isa.splat_u(0x8080_8080), isa.splat_u(0x2020_2020));
            *scales = isa.xor(isa.sub_u(isa.or(*scales, tops), offset), tops);
        }
        Whole { scales, biases: [isa.splat_u(0); 4], factors: [d, isa.splat(0.0)] }
    }
}

impl Format for Q3K {
    type Shape = HalvesCentred;
    const COLS: usize = TILE_COLS;
    const RAW: bool = true;
    const BITS: u32 = 3;
    const BYTES: usize = 110;
    const ZERO: i32 = 4;
    const SIGNED: bool = true;

    #[inline(always)]
    fn scales<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, _: usize, tile: &mut Tile) {
        self.six_bits(isa, rows, col).put(isa, self, tile);
    }

    #[inline(always)]
    fn whole<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize) -> Option<Whole<I>> {
        Some(self.six_bits(isa, rows, col))
    }

    #[inline(always)]
    fn codes<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, _: usize, tile: &mut Tile) {
        let block = rows.plane(0).block::<110>(col / TILE_COLS * 110);
        for half in 0..2 {
            let high = block.words(isa, 16 * half);
            for n in 0..2 {
                for (i, qs) in block.words(isa, 32 + 32 * n + 16 * half).into_iter().enumerate() {
                    for k in 0..4 {
                        let codes = isa.or(two_bits(isa, qs, k, k), third_bit(isa, high[i], n, k, k));
                        tile.codes_mut(4 * n + k).put(isa, 4 * half + i, codes);
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn group<I: Isa>(self, isa: I, p: *const u8, _: &Ahead, group: usize) -> [I::U; 2] {
        // SAFETY: by the caller.
        self.expand(isa, unsafe { self.raw(isa, p, group) }, group)
    }

    #[inline(always)]
    unsafe fn raw<I: Isa>(self, isa: I, p: *const u8, group: usize) -> [I::U; 2] {
        let (n, _) = rows_of_32(I::LANES, group);
        // SAFETY: 32 bytes of two-bit values and 32 of third bits, by the caller.
        unsafe { [isa.load_parts(p.add(32 + 32 * n), p.add(32 + 32 * n)), isa.load_parts(p, p)] }
    }

    #[inline(always)]
    fn expand<I: Isa>(self, isa: I, [qs, high]: [I::U; 2], group: usize) -> [I::U; 2] {
        let (n, [[a, b], [c, d]]) = rows_of_32(I::LANES, group);
        [
            isa.or(two_bits(isa, qs, a, b), third_bit(isa, high, n, a, b)),
            isa.or(two_bits(isa, qs, c, d), third_bit(isa, high, n, c, d)),
        ]
    }
}

/// Half n of a Q2_K or Q3_K block that `group` belongs to, and which rows of 32 columns of it the vectors hold.
#[inline(always)]
fn rows_of_32(n_lanes: usize, group: usize) -> (usize, [[usize; 2]; 2]) {
    if n_lanes == 16 {
        (group, [[0, 1], [2, 3]])
    } else {
        let first = group % 2 * 2;
        (group / 2, [[first; 2], [first + 1; 2]])
    }
}

/// Bits 2k, 2k + 1 of each byte, with k = `low` in the lowest eight lanes and `high` above.
#[inline(always)]
fn two_bits<I: Isa>(isa: I, v: I::U, low: usize, high: usize) -> I::U {
    isa.and(isa.shr_parts(v, 2 * low as u32, 2 * high as u32), isa.splat_u(0x0303_0303))
}

/// Bit 4n + k of each byte, as bit 2, with k = `low` in the lowest eight lanes and `high` above.
#[inline(always)]
fn third_bit<I: Isa>(isa: I, v: I::U, n: usize, low: usize, high: usize) -> I::U {
    let bit = isa.shr_parts(v, (4 * n + low) as u32, (4 * n + high) as u32);
    isa.and(isa.shl::<2>(bit), isa.splat_u(0x0404_0404))
}

/// Q4_K.
#[derive(Clone, Copy)]
pub(super) struct Q4K;

impl Format for Q4K {
    type Shape = SuperBiased;
    const COLS: usize = TILE_COLS;
    const RAW: bool = true;
    const BITS: u32 = 4;
    const BYTES: usize = 144;

    #[inline(always)]
    fn scales<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, _: usize, tile: &mut Tile) {
        scales_and_mins(isa, rows.plane(0).block::<144>(col / TILE_COLS * 144)).put(isa, self, tile);
    }

    #[inline(always)]
    fn whole<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize) -> Option<Whole<I>> {
        Some(scales_and_mins(isa, rows.plane(0).block::<144>(col / TILE_COLS * 144)))
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
    unsafe fn group<I: Isa>(self, isa: I, p: *const u8, _: &Ahead, group: usize) -> [I::U; 2] {
        // SAFETY: by the caller.
        self.expand(isa, unsafe { self.raw(isa, p, group) }, group)
    }

    #[inline(always)]
    unsafe fn raw<I: Isa>(self, isa: I, p: *const u8, group: usize) -> [I::U; 2] {
        // SAFETY: the 4 · LANES bytes of this group's nibbles, by the caller.
        let qs = unsafe { isa.load_u(p.add(16 + 4 * I::LANES * group).cast()) };
        [qs, isa.splat_u(0)]
    }

    #[inline(always)]
    fn expand<I: Isa>(self, isa: I, [qs, _]: [I::U; 2], _: usize) -> [I::U; 2] {
        let low = isa.splat_u(0x0f0f_0f0f);
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
    type Shape = SuperBiased;
    const COLS: usize = TILE_COLS;
    const RAW: bool = true;
    const BITS: u32 = 5;
    const BYTES: usize = 176;

    #[inline(always)]
    fn scales<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, _: usize, tile: &mut Tile) {
        scales_and_mins(isa, rows.plane(0).block::<176>(col / TILE_COLS * 176)).put(isa, self, tile);
    }

    #[inline(always)]
    fn whole<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize) -> Option<Whole<I>> {
        Some(scales_and_mins(isa, rows.plane(0).block::<176>(col / TILE_COLS * 176)))
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
    unsafe fn group<I: Isa>(self, isa: I, p: *const u8, _: &Ahead, group: usize) -> [I::U; 2] {
        // SAFETY: by the caller.
        self.expand(isa, unsafe { self.raw(isa, p, group) }, group)
    }

    #[inline(always)]
    unsafe fn raw<I: Isa>(self, isa: I, p: *const u8, group: usize) -> [I::U; 2] {
        // SAFETY: the 4 · LANES bytes of this group's nibbles and the 32 bytes of high bits, by the caller.
        unsafe {
            let qs = isa.load_u(p.add(48 + 4 * I::LANES * group).cast());
            [qs, isa.load_parts(p.add(16), p.add(16))]
        }
    }

    #[inline(always)]
    fn expand<I: Isa>(self, isa: I, [qs, high]: [I::U; 2], group: usize) -> [I::U; 2] {
        let (low, fifth) = (isa.splat_u(0x0f0f_0f0f), isa.splat_u(0x1010_1010));
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

impl Q6K {
    /// Scales.
    #[inline(always)]
    fn eight_bits<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize) -> Whole<I> {
        let block = rows.plane(0).block::<210>(col / TILE_COLS * 210);
        // The last 16 bytes: two scales' worth that is ignored, and d on top.
        let d = isa.f16_to_f32(isa.shr::<16>(block.words(isa, 194)[3]));
        Whole { scales: block.words(isa, 192), biases: [isa.splat_u(0); 4], factors: [d, isa.splat(0.0)] }
    }
}

impl Format for Q6K {
    type Shape = HalvesCentred;
    const COLS: usize = TILE_COLS;
    const RAW: bool = true;
    const BITS: u32 = 6;
    const BYTES: usize = 210;
    const ZERO: i32 = 32;
    const SIGNED: bool = true;

    #[inline(always)]
    fn scales<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, _: usize, tile: &mut Tile) {
        self.eight_bits(isa, rows, col).put(isa, self, tile);
    }

    #[inline(always)]
    fn whole<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize) -> Option<Whole<I>> {
        Some(self.eight_bits(isa, rows, col))
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
    unsafe fn group<I: Isa>(self, isa: I, p: *const u8, _: &Ahead, group: usize) -> [I::U; 2] {
        // SAFETY: by the caller.
        self.expand(isa, unsafe { self.raw(isa, p, group) }, group)
    }

    #[inline(always)]
    unsafe fn raw<I: Isa>(self, isa: I, p: *const u8, group: usize) -> [I::U; 2] {
        // Half of the block and, with eight lanes, half of the half.
        let (n, i) = if I::LANES == 16 { (group, 0) } else { (group / 2, group % 2) };
        // SAFETY: 4 · LANES bytes of nibbles and 32 bytes of high bits, by the caller.
        unsafe {
            let high = p.add(128 + 32 * n);
            [isa.load_u(p.add(64 * n + 32 * i).cast()), isa.load_parts(high, high)]
        }
    }

    #[inline(always)]
    fn expand<I: Isa>(self, isa: I, [ql, high]: [I::U; 2], group: usize) -> [I::U; 2] {
        let (low, top) = (isa.splat_u(0x0f0f_0f0f), isa.splat_u(0x3030_3030));
        let shift = if I::LANES == 16 { 0 } else { 2 * (group % 2) as u32 };
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

/// The 16-byte head d, dmin, s\[12\] of Q4_K and Q5_K blocks.
#[inline(always)]
fn scales_and_mins<I: Isa, const LEN: usize>(isa: I, block: Block<'_, LEN>) -> Whole<I> {
    let [d, a, b, c] = block.words(isa, 0);
    let (none, six) = (isa.splat_u(0), isa.splat_u(0x3f3f_3f3f));
    let (low, top) = (isa.splat_u(0x0f0f_0f0f), isa.splat_u(0x3030_3030));
    // Four 6-bit values a word: of sub-blocks 0..4, then 4..8.
    let scales = isa.or(isa.and(c, low), isa.and(isa.shr::<2>(a), top));
    let biases = isa.or(isa.and(isa.shr::<4>(c), low), isa.and(isa.shr::<2>(b), top));
    Whole {
        scales: [isa.and(a, six), scales, none, none],
        biases: [isa.and(b, six), biases, none, none],
        factors: factors(isa, d),
    }
}

/// d and −dmin, the f16 in the low and the high halves of lanes.
#[inline(always)]
fn factors<I: Isa>(isa: I, d: I::U) -> [I::F; 2] {
    let [d, dmin] = isa.f16_pairs_to_f32(d);
    [d, isa.sub(isa.splat(0.0), dmin)]
}

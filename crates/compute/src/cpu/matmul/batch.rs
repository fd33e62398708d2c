//! Products of int8 activations of several tokens: columns of 2 · `LANES` rows are decoded once for up to
//! [`TOKEN_BLOCK`] tokens, whose activations are packed before, so that one pointer serves a group of tokens and each
//! load serves two vectors of rows.
#![allow(clippy::needless_range_loop, reason = "one index runs through several arrays of registers")]

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use super::{
    Job,
    int8::{Decoder, Shape, Tile, add_biases, add_products, begin, dot, end, x_sums, zero_point},
    tile::{FEW, NextBlock, NextRows, Sums, TILE_COLS, TileRows, of_all_terms, zeroed},
};
use crate::cpu::{
    activations::{BLOCK, Q8Block, Q8Rows},
    simd::{Isa, Kernel},
};

/// Terms of tokens that columns are decoded for at a time. Of 2048 columns their activations take half of a second-level cache
/// of 1 MiB.
const TOKEN_BLOCK: usize = 128;

/// Vectors of rows that are multiplied together.
const TILES: usize = 2;

/// Words of a sub-block's activations.
const WORDS: usize = BLOCK / 4;

/// Bytes that one thread needs for products of up to `tokens` tokens of `cols` columns.
pub(super) fn scratch_bytes(tokens: usize, cols: usize) -> usize {
    let a_block = BLOCK + MAX_FIELDS * size_of::<u32>();
    if tokens > FEW { tokens.min(TOKEN_BLOCK) * cols.div_ceil(BLOCK) * a_block } else { 0 }
}

/// Most [`fields`] of any format.
const MAX_FIELDS: usize = 5;

/// What a sub-block and token have besides integers, as many words as [`fields`] says: the scale; if there are biases,
/// the scaled sum, or those of both halves; if there is a zero point, what it adds to the product or, if there are scales
/// for 16 columns, to those of both halves.
const fn fields<S: Shape>() -> usize {
    let halves = if S::HALVES { 2 } else { 1 };
    1 + if S::BIAS { halves } else { 0 } + if has_start::<S>() { halves } else { 0 }
}

/// There may be a zero point.
const fn has_start<S: Shape>() -> bool {
    S::WIDE || !S::BIAS
}

/// Activations of some tokens in the order in which they are read: (256 columns, group of tokens, …).
struct Packed {
    /// (…, sub-block, four columns, token of the group), four i8 each.
    words: Vec<u32>,
    /// (…, sub-block, field, token of the group): [`fields`].
    fields: Vec<u32>,
}

/// Packs the terms of tokens `range` of a job.
struct Pack<'a, S> {
    shape: PhantomData<S>,
    job: &'a Job<'a>,
    x: &'a Q8Rows,
    /// What is subtracted from codes.
    zero: i32,
    range: std::ops::Range<usize>,
    packed: &'a mut Packed,
}

/// Most tokens that are multiplied together: their integer and float sums fit registers.
const fn most_tokens<I: Isa, S: Shape>() -> usize {
    if I::TOKENS < 4 {
        I::TOKENS
    } else if I::LANES == 16 && !S::HALVES {
        6
    } else {
        4
    }
}

/// Tokens of the next group if `left` are left: groups of about the same size, as a small one takes almost as long as a large
/// one.
#[inline(always)]
fn group_len<I: Isa, S: Shape>(left: usize) -> usize {
    let left = left as u32;
    left.div_ceil(left.div_ceil(const { most_tokens::<I, S>() as u32 })) as usize
}

/// Calls `$body` with `$n` and `$first` for groups of tokens that cover 0..`$len`.
macro_rules! for_groups {
    ($isa:ty, $shape:ty, $len:expr, $first:ident, $n:ident, $body:block) => {{
        let len: usize = $len;
        let mut $first = 0;
        while $first < len {
            for_groups!(@ $isa, $shape, len, $first, $n, $body, 1 2 3 4 5 6);
        }
    }};
    (@ $isa:ty, $shape:ty, $len:ident, $first:ident, $n:ident, $body:block, $($size:literal)*) => {
        match group_len::<$isa, $shape>($len - $first) {
            $(
                $size if const { $size <= most_tokens::<$isa, $shape>() } => {
                    const $n: usize = $size;
                    $body
                    $first += $n;
                }
            )*
            _ => unreachable!("groups are not larger than that"),
        }
    };
}

impl<S: Shape> Kernel for Pack<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, _: I) {
        let Self { job, x, zero, range, packed, .. } = self;
        let cols = job.w.cols();
        packed.words.clear();
        packed.words.resize(range.len() * cols / 4, 0);
        packed.fields.clear();
        packed.fields.resize(range.len() * cols / BLOCK * fields::<S>(), 0);
        let (mut words, mut fields) = (&mut packed.words[..], &mut packed.fields[..]);
        for col in (0..cols).step_by(TILE_COLS) {
            let n = TILE_COLS.min(cols - col);
            for_groups!(I, S, range.len(), first, N, {
                let mut rows = [&[][..]; N];
                let mut blocks = [&[][..]; N];
                for t in 0..N {
                    let term = job.term(range.start + first + t);
                    rows[t] = x.term(term)[col..col + n].as_chunks::<4>().0;
                    blocks[t] = &x.term_blocks(term)[col / BLOCK..(col + n) / BLOCK];
                }
                let (some, rest) = words.split_at_mut(N * n / 4);
                pack_words(rows, some.as_chunks_mut::<N>().0);
                words = rest;
                let (some, rest) = fields.split_at_mut(N * n / BLOCK * self::fields::<S>());
                pack_fields::<S, N>(blocks, zero, some.as_chunks_mut::<N>().0);
                fields = rest;
            });
        }
    }
}

/// Activations of `N` tokens, word by word.
#[inline(always)]
fn pack_words<const N: usize>(rows: [&[[i8; 4]]; N], to: &mut [[u32; N]]) {
    for t in 0..N {
        assert!(rows[t].len() == to.len(), "a word of each token");
    }
    for i in 0..to.len() {
        for t in 0..N {
            // SAFETY: i is below the length of this token's words.
            let word = unsafe { rows[t].as_ptr().cast::<u32>().add(i).read_unaligned() };
            to[i][t] = u32::from_le(word);
        }
    }
}

/// [`fields`] of `N` tokens.
#[inline(always)]
fn pack_fields<S: Shape, const N: usize>(blocks: [&[Q8Block]; N], zero: i32, to: &mut [[u32; N]]) {
    for (sub, to) in to.chunks_exact_mut(fields::<S>()).enumerate() {
        for t in 0..N {
            let block = &blocks[t][sub];
            to[0][t] = block.scale.to_bits();
            let mut next = 1;
            if S::BIAS {
                let sums = x_sums::<S>(block);
                to[next][t] = sums[0].to_bits();
                next += 1;
                if S::HALVES {
                    to[next][t] = sums[1].to_bits();
                    next += 1;
                }
            }
            if has_start::<S>() {
                let [first, second] = block.sums;
                if S::HALVES {
                    to[next][t] = (-zero * first) as u32;
                    to[next + 1][t] = (-zero * second) as u32;
                } else {
                    to[next][t] = (-zero * (first + second)) as u32;
                }
            }
        }
    }
}

/// Computes all of a job.
pub(super) struct Multiply<'a, S> {
    pub(super) shape: PhantomData<S>,
    pub(super) job: &'a Job<'a>,
    pub(super) x: &'a Q8Rows,
    pub(super) decode: Decoder<'a>,
    /// [`Format::ZERO`](super::int8::Format::ZERO).
    pub(super) zero: i32,
    /// Of [`TILE_COLS`] columns of a row, in the first plane.
    pub(super) bytes: usize,
}

impl<S: Shape> Kernel for Multiply<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { shape, job, x, decode, zero, bytes } = self;
        let (cols, n_terms) = (job.w.cols(), job.n_terms());
        let mut packed = Packed { words: vec![], fields: vec![] };
        let mut tiles = [MaybeUninit::uninit(), MaybeUninit::uninit()];
        let [first, second] = &mut tiles;
        let mut tiles = [Tile::clear(first, zero), Tile::clear(second, zero)];
        let mut sums = [MaybeUninit::uninit(); TOKEN_BLOCK];
        for start in (0..n_terms).step_by(TOKEN_BLOCK) {
            let range = start..(start + TOKEN_BLOCK).min(n_terms);
            isa.call(Pack {
                shape,
                job,
                x,
                zero: zero_point::<I, S>(zero),
                range: range.clone(),
                packed: &mut packed,
            });
            let mut row = job.rows.start;
            while row < job.rows.end {
                let rows = TileRows::new(job.w, I::LANES, row);
                let first = rows.lanes().len().min(job.rows.end - row);
                // Where no second tile is needed, its results are not written.
                let second = if row + first < job.rows.end { row + first } else { row };
                let rows = [rows, TileRows::new(job.w, I::LANES, second)];
                let second = rows[1].lanes().len().min(job.rows.end - row - first);
                let steps = steps::<I, S>(range.len());
                let mut next = NextRows::after(job, TILES * I::LANES, row + first + second, steps);
                let sums = zeroed(&mut sums, range.len());
                for col in (0..cols).step_by(TILE_COLS) {
                    let n = TILE_COLS.min(cols - col);
                    for (tile, rows) in tiles.iter_mut().zip(&rows) {
                        decode(rows, (col, n), tile);
                    }
                    let len = range.len();
                    let a_column = len * fields::<S>();
                    let fields = &packed.fields[a_column * col / BLOCK..][..a_column * n / BLOCK];
                    let words = &packed.words[len * col / 4..][..len * n / 4];
                    let next_block =
                        if col + n < cols { (job.w, row) } else { job.from(row + first + second) };
                    let at = if col + n < cols { (col + n) / TILE_COLS * bytes } else { 0 };
                    let block = NextBlock::new(next_block, (at, bytes), TILES * I::LANES, steps);
                    isa.call(MultiplyTiles {
                        shape,
                        tiles: [&*tiles[0], &*tiles[1]],
                        words,
                        fields,
                        ahead: Ahead { rows: &mut next, block },
                        sums,
                    });
                }
                for (token, sums) in sums.chunks_exact(1 << job.shift).enumerate() {
                    let token = (start >> job.shift) + token;
                    for (i, (row, n)) in [(row, first), (row + first, second)].into_iter().enumerate() {
                        let lane = rows[i].lanes().start;
                        let sum = of_all_terms(isa, sums, |sums| sums.get(isa, i));
                        job.out.store(isa, token, row, sum, lane..lane + n);
                    }
                }
                row += first + second;
            }
        }
    }
}

/// A tile times columns of one token.
pub(super) struct MultiplyOne<'a, S> {
    pub(super) shape: PhantomData<S>,
    pub(super) tile: &'a Tile,
    /// What is subtracted from codes.
    pub(super) zero: i32,
    /// (columns), in −127..=127.
    pub(super) x: &'a [i8],
    /// (columns / 32).
    pub(super) blocks: &'a [Q8Block],
    pub(super) sums: &'a mut Sums,
}

impl<S: Shape> Kernel for MultiplyOne<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let n_subs = self.blocks.len();
        let (mut words, mut fields) = ([[0]; TILE_COLS / 4], [[0]; TILE_COLS / BLOCK * MAX_FIELDS]);
        let words = &mut words[..n_subs * WORDS];
        let fields = &mut fields[..n_subs * self::fields::<S>()];
        pack_words([self.x.as_chunks::<4>().0], words);
        pack_fields::<S, 1>([self.blocks], self.zero, fields);
        let sums = std::array::from_mut(self.sums);
        multiply_group::<I, S, 1, 1>(
            isa,
            [self.tile],
            n_subs,
            (words.as_flattened(), fields.as_flattened()),
            None,
            sums,
            0,
        );
    }
}

/// Two tiles times columns of some tokens.
struct MultiplyTiles<'a, S> {
    shape: PhantomData<S>,
    tiles: [&'a Tile; TILES],
    /// As [`Packed::words`], of these columns.
    words: &'a [u32],
    /// As [`Packed::fields`], of these columns.
    fields: &'a [u32],
    ahead: Ahead<'a>,
    /// (tokens).
    sums: &'a mut [Sums],
}

/// What is fetched while tiles are multiplied, a little with every sub-block: all at once would keep a core from everything
/// else.
struct Ahead<'a> {
    rows: &'a mut NextRows,
    block: NextBlock,
}

/// How often [`Ahead::advance`] is called for a tile and so many tokens.
fn steps<I: Isa, S: Shape>(tokens: usize) -> usize {
    tokens.div_ceil(const { most_tokens::<I, S>() }) * (TILE_COLS / BLOCK)
}

impl Ahead<'_> {
    #[inline(always)]
    fn advance(&mut self) {
        self.rows.advance();
        self.block.advance();
    }
}

impl<S: Shape> Kernel for MultiplyTiles<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { tiles, mut words, mut fields, mut ahead, sums, .. } = self;
        let n_subs = words.len() / (sums.len() * WORDS);
        assert!(
            n_subs <= TILE_COLS / BLOCK && words.len() == sums.len() * n_subs * WORDS,
            "a tile's activations"
        );
        assert!(fields.len() == sums.len() * n_subs * self::fields::<S>(), "a tile's scales");
        for_groups!(I, S, sums.len(), first, N, {
            let some = sums[first..].first_chunk_mut::<N>().expect("a group of tokens");
            let (w, rest) = words.split_at(N * n_subs * WORDS);
            words = rest;
            let (f, rest) = fields.split_at(N * n_subs * self::fields::<S>());
            fields = rest;
            if const { I::LANES == 16 } {
                multiply_group::<I, S, 2, N>(isa, tiles, n_subs, (w, f), Some(&mut ahead), some, 0);
            } else {
                multiply_group::<I, S, 1, N>(isa, [tiles[0]], n_subs, (w, f), Some(&mut ahead), some, 0);
                multiply_group::<I, S, 1, N>(isa, [tiles[1]], n_subs, (w, f), None, some, 1);
            }
        });
    }
}

/// `R` tiles times `N` tokens; `which` of their sums is the first tile's.
#[inline(always)]
fn multiply_group<I: Isa, S: Shape, const R: usize, const N: usize>(
    isa: I,
    tiles: [&Tile; R],
    n_subs: usize,
    (words, fields): (&[u32], &[u32]),
    mut ahead: Option<&mut Ahead<'_>>,
    sums: &mut [Sums; N],
    which: usize,
) {
    let n_fields = self::fields::<S>();
    assert!(words.len() == N * n_subs * WORDS && fields.len() == N * n_subs * n_fields, "all sub-blocks");
    let mut acc = [[isa.splat(0.0); N]; R];
    for t in 0..N {
        for r in 0..R {
            acc[r][t] = begin::<I, S>(isa, sums[t].get(isa, which + r));
        }
    }
    for sub in 0..n_subs {
        if let Some(ahead) = &mut ahead {
            ahead.advance();
        }
        // SAFETY: sub-blocks have N · WORDS words and N · n_fields fields each.
        let (words, fields) =
            unsafe { (words.as_ptr().add(sub * N * WORDS), fields.as_ptr().add(sub * N * n_fields)) };
        // SAFETY: as above.
        let dots = unsafe { integer_products::<I, S, R, N>(isa, tiles, sub, words, fields) };
        for t in 0..N {
            // SAFETY: the first field, and t < N.
            let scale = isa.splat(f32::from_bits(unsafe { *fields.add(t) }));
            for r in 0..R {
                let dots = [isa.to_f32(dots[0][r][t]), isa.to_f32(dots[1][r][t])];
                acc[r][t] = add_products::<I, S>(isa, tiles[r], sub, dots, scale, acc[r][t]);
                if S::BIAS && !S::SUPER {
                    // SAFETY: the second field, and t < N.
                    let sums = [isa.splat(f32::from_bits(unsafe { *fields.add(N + t) })); 2];
                    acc[r][t] = add_biases::<I, S>(isa, tiles[r], sub, sums, acc[r][t]);
                }
            }
        }
    }
    let mut biases = [[isa.splat(0.0); N]; R];
    if S::BIAS && S::SUPER {
        for sub in 0..n_subs {
            for t in 0..N {
                let at = sub * N * n_fields + N + t;
                let x = [fields[at], fields[at + if S::HALVES { N } else { 0 }]];
                let x = [isa.splat(f32::from_bits(x[0])), isa.splat(f32::from_bits(x[1]))];
                for r in 0..R {
                    biases[r][t] = add_biases::<I, S>(isa, tiles[r], sub, x, biases[r][t]);
                }
            }
        }
    }
    for t in 0..N {
        for r in 0..R {
            let before = sums[t].get(isa, which + r);
            let sum = end::<I, S>(isa, tiles[r], [acc[r][t], biases[r][t]], before);
            sums[t].put(isa, which + r, sum);
        }
    }
}

/// Integer products of `R` tiles and `N` tokens in sub-block `sub`, with what zero points add: of all its columns or, if
/// there are scales for 16, of the first and the last 16.
///
/// # Safety
/// `words` and `fields` are those of the sub-block: N · [`WORDS`] and N · [`fields`].
#[inline(always)]
unsafe fn integer_products<I: Isa, S: Shape, const R: usize, const N: usize>(
    isa: I,
    tiles: [&Tile; R],
    sub: usize,
    words: *const u32,
    fields: *const u32,
) -> [[[I::U; N]; R]; 2] {
    let halves = if S::HALVES { 2 } else { 1 };
    let start = 1 + if S::BIAS { halves } else { 0 };
    let mut dots = [[[isa.splat_u(0); N]; R]; 2];
    for half in 0..halves {
        if has_start::<S>() {
            for t in 0..N {
                for r in 0..R {
                    // SAFETY: there are that many fields by the contract, and t < N.
                    dots[half][r][t] = isa.splat_u(unsafe { *fields.add((start + half) * N + t) });
                }
            }
        }
        for k in half * WORDS / halves..(half + 1) * WORDS / halves {
            let mut codes = [isa.splat_u(0); R];
            for r in 0..R {
                codes[r] = tiles[r].codes(sub).get(isa, k);
            }
            for t in 0..N {
                // SAFETY: k < WORDS and t < N.
                let x = isa.splat_u(unsafe { *words.add(k * N + t) });
                for r in 0..R {
                    dots[half][r][t] = dot::<I, S>(isa, dots[half][r][t], codes[r], x);
                }
            }
        }
    }
    dots
}

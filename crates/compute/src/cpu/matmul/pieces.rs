//! Products with the bits of GPUs' kernels for few rows: those of `piece_dot` in `gpu/kernels/pieces.h`.
//!
//! There a lane of a team multiplies every so many-th *piece* of a row (32 columns, or 64 that share a block) and the lanes'
//! sums are added up by halving the team. Integers are exact in any order, and every rounding of floats is written out; so
//! lanes here are rows, as everywhere in [`super`], with a sum for each lane of the team.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::{
    NextJob,
    affine::{Affine4, Affine8},
    codebooks::{Codebook, Coded, Iq1M, Iq1S, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs},
    int8::{DotRows, Format, Lanes, SUBS, Scales, Shape, Tile, dot, exact_dots, zero_point},
    integers::{Int4, Int4Zeros, Int8, Int8Zeros, Integers},
    k_quants::{Q2K, Q3K, Q4K, Q5K, Q6K},
    legacy::{Nibbles, Q4, Q5, Q8},
    mxfp4::{Mxfp4, Mxfp4Planes, Nvfp4},
    non_linear::{Iq4Nl, Iq4Xs},
    tile::{NextRows, TILE_COLS, TileRows, get, put},
};
use crate::cpu::{
    activations::{BLOCK, Q8Block, Q8Rows},
    simd::{Isa, Kernel, MAX_LANES, Simd, SimdLevel},
};
use crate::{DType, Error, Result, TensorView, Zeros};

/// Lanes of a warp, the largest team.
const WARP: usize = 32;

/// Whether [`multiply_pieces`] takes weights of this encoding, at this level: it must round products that are added up once.
pub(crate) fn has_pieces(simd: Simd, dtype: DType, cols: usize) -> bool {
    let known = matches!(
        dtype,
        DType::Q2_K
            | DType::Q3_K
            | DType::Q4_K
            | DType::Q5_K
            | DType::Q6_K
            | DType::Q8_0
            | DType::Q4_0
            | DType::Q5_0
            | DType::IQ1_S
            | DType::IQ1_M
            | DType::IQ2_XXS
            | DType::IQ2_XS
            | DType::IQ2_S
            | DType::IQ3_XXS
            | DType::IQ3_S
            | DType::IQ4_NL
            | DType::IQ4_XS
            | DType::MXFP4
            | DType::MXFP4_Planes
            | DType::NVFP4 { .. }
            | DType::Affine { bits: 4 | 8, .. }
            | DType::Int { bits: 4 | 8, .. }
    );
    known && simd.level() != SimdLevel::Portable && super::accepts_q8(dtype, cols)
}

/// Pieces of a row.
pub(crate) fn pieces_of(dtype: DType, cols: usize) -> usize {
    match dtype {
        DType::Q2_K | DType::Q3_K | DType::Q4_K | DType::Q5_K | DType::Q6_K => cols / 64,
        _ => cols / 32,
    }
}

/// Products of rows of weights with a row of activations that has one term.
pub(crate) struct PieceRows<'a> {
    /// The weights.
    pub(crate) w: TensorView<'a>,
    /// Which rows of them.
    pub(crate) rows: Range<usize>,
    /// The activations, and which row of them.
    pub(crate) x: &'a Q8Rows,
    pub(crate) row: usize,
    /// Lanes that share a row: 16 or 32.
    pub(crate) team: usize,
    /// Fetched while the last rows are multiplied.
    pub(crate) next: Option<NextJob<'a>>,
}

/// Writes the products of `job.rows` to `out`, which is as long.
///
/// # Errors
/// [`Error::Shape`] if sizes do not fit each other, [`Error::Unsupported`] for weights that [`has_pieces`] refuses.
pub(crate) fn multiply_pieces(simd: Simd, job: &PieceRows<'_>, out: &mut [f32]) -> Result<()> {
    let PieceRows { w, rows, x, row, team, .. } = job;
    let fits = |what, expected, got| Err(Error::Shape { op: "matmul", what, expected, got });
    if x.cols() != w.cols() || x.terms() != 1 {
        return fits("columns of the activations", w.cols(), x.cols());
    }
    if rows.end > w.rows() || *row >= x.n_rows() {
        return fits("end of the range of rows", w.rows(), rows.end);
    }
    if out.len() != rows.len() {
        return fits("rows of the output", rows.len(), out.len());
    }
    let dtype = w.dtype();
    if !has_pieces(simd, dtype, w.cols()) || ![16, WARP].contains(team) {
        return Err(Error::Unsupported { what: "a product by pieces", dtype });
    }
    match dtype {
        DType::Q2_K => simd.run(Multiply { job, format: Q2K, out }),
        DType::Q3_K => simd.run(Multiply { job, format: Q3K, out }),
        DType::Q4_K => simd.run(Multiply { job, format: Q4K, out }),
        DType::Q5_K => simd.run(Multiply { job, format: Q5K, out }),
        DType::Q6_K => simd.run(Multiply { job, format: Q6K, out }),
        DType::Q8_0 => simd.run(Multiply { job, format: Q8, out }),
        DType::Q4_0 => simd.run(Multiply { job, format: Q4, out }),
        DType::Q5_0 => simd.run(Multiply { job, format: Q5, out }),
        DType::IQ1_S => simd.run(Multiply { job, format: Coded(Iq1S), out }),
        DType::IQ1_M => simd.run(Multiply { job, format: Coded(Iq1M), out }),
        DType::IQ2_XXS => simd.run(Multiply { job, format: Coded(Iq2Xxs), out }),
        DType::IQ2_XS => simd.run(Multiply { job, format: Coded(Iq2Xs), out }),
        DType::IQ2_S => simd.run(Multiply { job, format: Coded(Iq2S), out }),
        DType::IQ3_XXS => simd.run(Multiply { job, format: Coded(Iq3Xxs), out }),
        DType::IQ3_S => simd.run(Multiply { job, format: Coded(Iq3S), out }),
        DType::IQ4_NL => simd.run(Multiply { job, format: Iq4Nl, out }),
        DType::IQ4_XS => simd.run(Multiply { job, format: Iq4Xs, out }),
        DType::MXFP4 => simd.run(Multiply { job, format: Mxfp4, out }),
        DType::NVFP4 { matrix } => simd.run(Multiply { job, format: Nvfp4::new(*w, matrix), out }),
        DType::Affine { bits: 4, group, scale } => {
            simd.run(Multiply { job, format: Affine4::new(group, scale), out });
        }
        DType::Affine { group, scale, .. } => {
            simd.run(Multiply { job, format: Affine8::new(group, scale), out })
        }
        DType::Int { bits, group, scale, zeros } => match (bits, zeros) {
            (4, Zeros::Middle) => simd.run(Multiply { job, format: Int4::new(group, scale), out }),
            (4, Zeros::Stored) => simd.run(Multiply { job, format: Int4Zeros::new(group, scale), out }),
            (_, Zeros::Middle) => simd.run(Multiply { job, format: Int8::new(group, scale), out }),
            (_, Zeros::Stored) => simd.run(Multiply { job, format: Int8Zeros::new(group, scale), out }),
        },
        _ => simd.run(Multiply { job, format: Mxfp4Planes, out }),
    }
    Ok(())
}

/// Sums of the lanes of a team, lanes of each being rows.
#[repr(C, align(64))]
struct Team([[f32; MAX_LANES]; WARP]);

/// What a tile's columns are multiplied with, and what has come of it: of each sub-block or, if the format has scales for 16
/// columns, of both its halves.
struct Columns<'a, I: Isa> {
    tile: &'a Tile,
    blocks: &'a [Q8Block],
    dots: &'a [[I::F; 2]; SUBS],
}

impl<I: Isa> Columns<'_, I> {
    /// Products of a sub-block or a half with its scale of x.
    #[inline(always)]
    fn scaled(&self, isa: I, sub: usize, half: usize) -> I::F {
        isa.mul(self.dots[sub][half], isa.splat(self.blocks[sub].scale))
    }
}

/// How a piece's product is made of whole numbers: as `scaled_dots` does.
trait Pieces: Format {
    /// Columns of a piece.
    const PIECE: usize = BLOCK;

    /// The product of piece `p` of a tile: here of 32 columns with a scale, or with one for each half.
    #[inline(always)]
    fn piece<I: Isa>(isa: I, columns: &Columns<'_, I>, p: usize) -> I::F {
        let [d, _] = columns.tile.factors(isa);
        let scale = |i: usize| {
            let own = columns.tile.scale(isa, i);
            if Self::Shape::SUPER { isa.mul(d, own) } else { own }
        };
        if !Self::Shape::HALVES {
            return isa.mul(scale(p), columns.scaled(isa, p, 0));
        }
        let first = isa.mul(scale(2 * p), columns.scaled(isa, p, 0));
        isa.mul_add(scale(2 * p + 1), columns.scaled(isa, p, 1), first)
    }
}

/// Two sub-blocks of a block that has integer scales and minima.
#[inline(always)]
fn two_sub_blocks<I: Isa>(isa: I, columns: &Columns<'_, I>, p: usize) -> I::F {
    let Columns { tile, blocks, .. } = columns;
    // That of minima is negative.
    let [d, less] = tile.factors(isa);
    let (low, high) = (2 * p, 2 * p + 1);
    let minimum = isa.mul(less, tile.bias(isa, high));
    let minima = isa.mul(minimum, isa.splat(blocks[high].sum));
    let minimum = isa.mul(less, tile.bias(isa, low));
    let minima = isa.mul_add(minimum, isa.splat(blocks[low].sum), minima);
    let scale = isa.mul(d, tile.scale(isa, high));
    let second = isa.mul_add(scale, columns.scaled(isa, high, 0), minima);
    let scale = isa.mul(d, tile.scale(isa, low));
    isa.mul_add(scale, columns.scaled(isa, low, 0), second)
}

impl Pieces for Q4K {
    const PIECE: usize = 64;

    #[inline(always)]
    fn piece<I: Isa>(isa: I, columns: &Columns<'_, I>, p: usize) -> I::F {
        two_sub_blocks(isa, columns, p)
    }
}

impl Pieces for Q5K {
    const PIECE: usize = 64;

    #[inline(always)]
    fn piece<I: Isa>(isa: I, columns: &Columns<'_, I>, p: usize) -> I::F {
        two_sub_blocks(isa, columns, p)
    }
}

/// Sixteen columns of each quarter of half a block that has integer scales, added to what is there already.
#[inline(always)]
fn quarters<I: Isa>(isa: I, columns: &Columns<'_, I>, p: usize, before: Option<I::F>) -> I::F {
    let (first, part) = (p / 2 * 4, p % 2);
    let [d, _] = columns.tile.factors(isa);
    let scale = |sub: usize| isa.mul(d, columns.tile.scale(isa, 2 * sub + part));
    let dots = |sub: usize| columns.scaled(isa, sub, part);
    let mut sum = match before {
        Some(before) => isa.mul_add(scale(first), dots(first), before),
        None => isa.mul(scale(first), dots(first)),
    };
    for sub in first + 1..first + 4 {
        sum = isa.mul_add(scale(sub), dots(sub), sum);
    }
    sum
}

impl Pieces for Q2K {
    const PIECE: usize = 64;

    #[inline(always)]
    fn piece<I: Isa>(isa: I, columns: &Columns<'_, I>, p: usize) -> I::F {
        let Columns { tile, blocks, .. } = columns;
        let (first, part) = (p / 2 * 4, p % 2);
        // That of minima is negative.
        let [_, less] = tile.factors(isa);
        let minimum = |sub: usize| isa.mul(less, tile.bias(isa, 2 * sub + part));
        let sum = |sub: usize| isa.splat(blocks[sub].sums[part] as f32 * blocks[sub].scale);
        let mut minima = isa.mul(minimum(first), sum(first));
        for sub in first + 1..first + 4 {
            minima = isa.mul_add(minimum(sub), sum(sub), minima);
        }
        quarters(isa, columns, p, Some(minima))
    }
}

impl Pieces for Q3K {
    const PIECE: usize = 64;

    #[inline(always)]
    fn piece<I: Isa>(isa: I, columns: &Columns<'_, I>, p: usize) -> I::F {
        quarters(isa, columns, p, None)
    }
}

impl Pieces for Q6K {
    const PIECE: usize = 64;

    #[inline(always)]
    fn piece<I: Isa>(isa: I, columns: &Columns<'_, I>, p: usize) -> I::F {
        quarters(isa, columns, p, None)
    }
}

impl Pieces for Q8 {}
impl Pieces for Iq4Nl {}
impl Pieces for Iq4Xs {}
impl<B: Codebook> Pieces for Coded<B> {}

impl<const BITS: u32, const BYTES: usize> Pieces for Nibbles<super::int8::Centred, BITS, BYTES> {
    #[inline(always)]
    fn piece<I: Isa>(isa: I, columns: &Columns<'_, I>, p: usize) -> I::F {
        without_zeros(isa, columns, p, Self::ZERO)
    }
}

/// Codes are multiplied as they are, and their zero point is subtracted with the sum of the activations.
#[inline(always)]
fn without_zeros<I: Isa>(isa: I, columns: &Columns<'_, I>, p: usize, zero: i32) -> I::F {
    let (scale, x) = (columns.tile.scale(isa, p), &columns.blocks[p]);
    let zeros = (zero * (x.sums[0] + x.sums[1])) as f32;
    let dots = isa.add(columns.dots[p][0], isa.splat(zeros));
    let sum = isa.mul(scale, isa.mul(dots, isa.splat(x.scale)));
    let less = isa.mul(isa.splat(-zero as f32), scale);
    isa.mul_add(less, isa.splat(x.sum), sum)
}

/// A scale and a bias of codes: of eight bits, these are multiplied less 128.
#[inline(always)]
fn biased<I: Isa>(isa: I, columns: &Columns<'_, I>, p: usize, bits: u32) -> I::F {
    let (scale, bias) = (columns.tile.scale(isa, p), columns.tile.bias(isa, p));
    let x = &columns.blocks[p];
    let (mut dots, mut more) = (columns.dots[p][0], bias);
    if bits == 8 {
        dots = isa.sub(dots, isa.splat((128 * (x.sums[0] + x.sums[1])) as f32));
        more = isa.mul_add(isa.splat(128.0), scale, bias);
    }
    let sum = isa.mul(scale, isa.mul(dots, isa.splat(x.scale)));
    isa.mul_add(more, isa.splat(x.sum), sum)
}

impl Pieces for Affine4 {
    #[inline(always)]
    fn piece<I: Isa>(isa: I, columns: &Columns<'_, I>, p: usize) -> I::F {
        biased(isa, columns, p, 4)
    }
}

impl Pieces for Affine8 {
    #[inline(always)]
    fn piece<I: Isa>(isa: I, columns: &Columns<'_, I>, p: usize) -> I::F {
        biased(isa, columns, p, 8)
    }
}

impl<S: Shape, const BITS: usize> Pieces for Integers<S, BITS> {
    #[inline(always)]
    fn piece<I: Isa>(isa: I, columns: &Columns<'_, I>, p: usize) -> I::F {
        match (S::BIAS, BITS) {
            (true, _) => biased(isa, columns, p, Self::BITS),
            // Sums of codes less 128 have no zero point left.
            (false, 8) => isa.mul(columns.tile.scale(isa, p), columns.scaled(isa, p, 0)),
            (false, _) => without_zeros(isa, columns, p, Self::ZERO),
        }
    }
}

impl Pieces for Nvfp4 {}
impl Pieces for Mxfp4 {}
impl Pieces for Mxfp4Planes {}

struct Multiply<'a, F> {
    job: &'a PieceRows<'a>,
    format: F,
    out: &'a mut [f32],
}

impl<F: Pieces> Kernel for Multiply<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { job, format, out } = self;
        let (w, cols) = (job.w, job.w.cols());
        let (x, blocks) = (job.x.term(job.row), job.x.term_blocks(job.row));
        let mut lanes = Lanes::zeroed();
        let mut tile = MaybeUninit::uninit();
        let tile = Tile::clear(&mut tile, F::ZERO);
        let mut row = job.rows.start;
        while row < job.rows.end {
            let rows = TileRows::new(w, I::LANES, row);
            let valid = rows.lanes().len().min(job.rows.end - row);
            let after = (w, row + I::LANES);
            let (next_w, next_row) = if after.1 < job.rows.end { after } else { job.next.unwrap_or(after) };
            let mut next = NextRows::new(next_w, I::LANES, next_row, next_w.rows(), NextRows::STEPS);
            let mut team = Team([[0.0; MAX_LANES]; WARP]);
            for col in (0..cols).step_by(TILE_COLS) {
                let n = TILE_COLS.min(cols - col);
                isa.call(Scales { format, rows: &rows, cols: (col, n), tile: &mut *tile });
                let blocks = &blocks[col / BLOCK..(col + n) / BLOCK];
                let x = &x[col..col + n];
                let first = col / F::PIECE;
                if n == TILE_COLS && F::GROUPS {
                    let plane = rows.plane(0);
                    let start = plane.span(col / F::COLS * F::BYTES, TILE_COLS / F::COLS * F::BYTES);
                    let stride = plane.stride();
                    let (x, next) = (x.as_ptr(), &mut next);
                    isa.call(DotRows { format, first: start, stride, x, lanes: &mut lanes, next });
                    let (format, lanes, team) = (PhantomData::<F>, &lanes, (&mut team, job.team));
                    isa.call(AddPieces { format, tile, lanes, blocks, first, team });
                } else {
                    format.codes(isa, &rows, col, n, tile);
                    let (format, team) = (PhantomData::<F>, (&mut team, job.team));
                    isa.call(AddColumns { format, tile, x, blocks, first, team });
                }
            }
            let mut half = job.team / 2;
            while half > 0 {
                for lane in 0..half {
                    let sum = isa.add(get(isa, &team.0[lane]), get(isa, &team.0[lane + half]));
                    put(isa, &mut team.0[lane], sum);
                }
                half /= 2;
            }
            let from = rows.lanes().start;
            out[row - job.rows.start..][..valid].copy_from_slice(&team.0[0][from..from + valid]);
            row += valid;
        }
    }
}

/// Adds what [`DotRows`] left to the sums of a team whose lane `first` takes the first piece.
struct AddPieces<'a, F> {
    format: PhantomData<F>,
    tile: &'a Tile,
    lanes: &'a Lanes,
    blocks: &'a [Q8Block],
    first: usize,
    team: (&'a mut Team, usize),
}

impl<F: Pieces> Kernel for AddPieces<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { tile, lanes, blocks, first, team, .. } = self;
        let dots = exact_dots::<I, F>(isa, tile, lanes, blocks);
        add::<I, F>(isa, &Columns { tile, blocks, dots: &dots }, TILE_COLS / F::PIECE, first, team);
    }
}

/// The same of a tile's codes: of columns that are no whole tile.
struct AddColumns<'a, F> {
    format: PhantomData<F>,
    tile: &'a Tile,
    x: &'a [i8],
    blocks: &'a [Q8Block],
    first: usize,
    team: (&'a mut Team, usize),
}

impl<F: Pieces> Kernel for AddColumns<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { tile, x, blocks, first, team, .. } = self;
        let zero = zero_point::<I, F::Shape>(F::ZERO);
        let mut dots = [[isa.splat(0.0); 2]; SUBS];
        for (sub, (x, block)) in x.as_chunks::<BLOCK>().0.iter().zip(blocks).enumerate() {
            let [first, second] = block.sums;
            let mut halves = [isa.splat_u((-zero * first) as u32), isa.splat_u((-zero * second) as u32)];
            for (k, [a, b, c, d]) in x.as_chunks::<4>().0.iter().enumerate() {
                let x = isa.splat_u(u32::from_le_bytes([*a as u8, *b as u8, *c as u8, *d as u8]));
                let half = &mut halves[k / 4];
                *half = dot::<I, F::Shape>(isa, *half, tile.codes(sub).get(isa, k), x);
            }
            dots[sub] = if F::Shape::HALVES {
                [isa.to_f32(halves[0]), isa.to_f32(halves[1])]
            } else {
                [isa.to_f32(isa.add_u(halves[0], halves[1])), isa.splat(0.0)]
            };
        }
        add::<I, F>(isa, &Columns { tile, blocks, dots: &dots }, x.len() / F::PIECE, first, team);
    }
}

/// Adds the products of a tile's pieces to the sums of the lanes that take them.
#[inline(always)]
fn add<I: Isa, F: Pieces>(
    isa: I,
    columns: &Columns<'_, I>,
    pieces: usize,
    first: usize,
    (team, size): (&mut Team, usize),
) {
    for p in 0..pieces {
        // Teams are powers of two.
        let sum = &mut team.0[(first + p) & (size - 1) & (WARP - 1)];
        put(isa, sum, isa.add(get(isa, sum), F::piece(isa, columns, p)));
    }
}

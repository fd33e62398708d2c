//! Sources of f32 weights that are not decoded from int8 codes: floats, and every encoding that only
//! has a scalar dequantiser.

use super::{
    float::{Source, Tile32},
    tile::{TILE_COLS, TileRows},
};
use crate::{Result, TensorView, cpu::simd::Isa, quant};

/// f32 weights.
pub(super) struct F32;

impl Source for F32 {
    #[inline(always)]
    fn decode<I: Isa>(
        &mut self,
        isa: I,
        rows: &TileRows<'_>,
        col: usize,
        n: usize,
        tile: &mut Tile32,
    ) -> Result<()> {
        let whole = n / 4 * 4;
        for c in (0..whole).step_by(4) {
            let words = rows.plane(0).block::<16>(4 * (col + c)).words(isa, 0);
            for (i, word) in words.into_iter().enumerate() {
                tile.put(isa, c + i, isa.of_bits(word));
            }
        }
        scalar::<I>(rows, col, whole, n, tile)
    }
}

/// f16 weights.
pub(super) struct F16;

impl Source for F16 {
    #[inline(always)]
    fn decode<I: Isa>(
        &mut self,
        isa: I,
        rows: &TileRows<'_>,
        col: usize,
        n: usize,
        tile: &mut Tile32,
    ) -> Result<()> {
        let whole = n / 8 * 8;
        for c in (0..whole).step_by(8) {
            let words = rows.plane(0).block::<16>(2 * (col + c)).words(isa, 0);
            for (i, word) in words.into_iter().enumerate() {
                tile.put(isa, c + 2 * i, isa.f16_to_f32(word));
                tile.put(isa, c + 2 * i + 1, isa.f16_to_f32(isa.shr::<16>(word)));
            }
        }
        scalar::<I>(rows, col, whole, n, tile)
    }
}

/// bfloat16 weights.
pub(super) struct Bf16;

impl Source for Bf16 {
    #[inline(always)]
    fn decode<I: Isa>(
        &mut self,
        isa: I,
        rows: &TileRows<'_>,
        col: usize,
        n: usize,
        tile: &mut Tile32,
    ) -> Result<()> {
        let (whole, high) = (n / 8 * 8, isa.splat_u(0xffff_0000));
        for c in (0..whole).step_by(8) {
            let words = rows.plane(0).block::<16>(2 * (col + c)).words(isa, 0);
            for (i, word) in words.into_iter().enumerate() {
                tile.put(isa, c + 2 * i, isa.of_bits(isa.shl::<16>(word)));
                tile.put(isa, c + 2 * i + 1, isa.of_bits(isa.and(word, high)));
            }
        }
        scalar::<I>(rows, col, whole, n, tile)
    }
}

/// Plain floats whose rows are stored as columns.
pub(super) struct Transposed;

impl Source for Transposed {
    #[inline(always)]
    fn decode<I: Isa>(
        &mut self,
        _: I,
        rows: &TileRows<'_>,
        col: usize,
        n: usize,
        tile: &mut Tile32,
    ) -> Result<()> {
        let w = rows.matrix();
        for c in 0..n {
            for lane in 0..I::LANES {
                let value = quant::float(w.dtype(), w.element(rows.row_of(lane), col + c))?;
                tile.put_one(c, lane, value);
            }
        }
        Ok(())
    }
}

/// Anything that [`quant::dequantize_row`] knows.
pub(super) struct Scalar;

impl Source for Scalar {
    #[inline(always)]
    fn decode<I: Isa>(
        &mut self,
        _: I,
        rows: &TileRows<'_>,
        col: usize,
        n: usize,
        tile: &mut Tile32,
    ) -> Result<()> {
        scalar::<I>(rows, col, 0, n, tile)
    }
}

/// Dequantises columns `col` + `from`..`col` + `to` to columns `from`..`to` of `tile`.
fn scalar<I: Isa>(rows: &TileRows<'_>, col: usize, from: usize, to: usize, tile: &mut Tile32) -> Result<()> {
    if from == to {
        return Ok(());
    }
    let w = rows.matrix();
    let (dtype, n) = (w.dtype(), to - from);
    let mut values = [0.0; TILE_COLS];
    for lane in 0..I::LANES {
        let mut planes = [&[] as &[u8]; 3];
        for (plane, slot) in planes.iter_mut().enumerate().take(dtype.planes()) {
            let start = dtype.row_bytes(plane, col + from)?;
            *slot = &w.row(plane, rows.row_of(lane))[start..start + dtype.row_bytes(plane, n)?];
        }
        quant::dequantize_row(TensorView::new(dtype, 1, n, &planes)?, 0, &mut values[..n])?;
        for (i, &value) in values[..n].iter().enumerate() {
            tile.put_one(from + i, lane, value);
        }
    }
    Ok(())
}

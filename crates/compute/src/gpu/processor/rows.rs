//! [`HandedRows`]: rows of activations in the form that a set's weights take.

use std::ops::Range;

use super::desk::{Desk, RowForm};
use crate::cpu::Simd;
use crate::cpu::activations::{BLOCK, Q8Rows, Q8Writer};
use crate::cpu::matmul::NextJob;
use crate::cpu::matmul::eights::{EightJob, EightRows, EightWriter, multiply_eights};
use crate::cpu::matmul::pieces::{PieceRows, multiply_pieces};
use crate::{Result, TensorView};

/// Rows of either form, of which one is in use.
#[derive(Debug)]
pub(super) struct HandedRows {
    form: RowForm,
    bytes: Q8Rows,
    floats: EightRows,
}

impl Default for HandedRows {
    fn default() -> Self {
        Self { form: RowForm::Bytes, bytes: Q8Rows::default(), floats: EightRows::default() }
    }
}

/// What rows of weights are to be multiplied with: a row of those that this is asked of.
pub(super) struct Product<'a> {
    pub(super) w: TensorView<'a>,
    pub(super) rows: Range<usize>,
    pub(super) row: usize,
    /// Lanes of a device that share a row of bytes: 16 or 32.
    pub(super) team: usize,
    /// Fetched while the last rows are multiplied.
    pub(super) next: Option<NextJob<'a>>,
}

impl HandedRows {
    /// Makes room for `n_rows` rows of `cols` columns.
    pub(super) fn resize(&mut self, form: RowForm, n_rows: usize, cols: usize) {
        self.form = form;
        match form {
            RowForm::Bytes => self.bytes.resize(n_rows, cols),
            RowForm::Floats => self.floats.resize(n_rows, cols),
        }
    }

    /// Brings the rows that are wanted from the desk, and what their products are multiplied with.
    pub(super) fn bring(
        &mut self,
        desk: &Desk,
        form: RowForm,
        cols: usize,
        wanted: &[bool],
        factors: &mut [f32],
    ) {
        self.resize(form, wanted.len(), cols);
        let writer = self.writer();
        for row in (0..wanted.len()).filter(|row| wanted[*row]) {
            match &writer {
                RowsWriter::Bytes(writer) => {
                    let from = desk.bytes(row, cols);
                    factors[row] = from.factor;
                    let blocks = from.codes.as_chunks::<BLOCK>().0.iter().zip(from.scales);
                    for (block, (codes, scale)) in blocks.enumerate() {
                        let codes = codes.map(|code| code as i8);
                        // SAFETY: one thread writes.
                        unsafe { writer.write_codes(row, block, &codes, f32::from_bits(scale[0])) };
                    }
                }
                RowsWriter::Floats(writer) => {
                    let (values, factor) = desk.floats(row, cols);
                    factors[row] = factor;
                    for (block, values) in values.as_chunks::<BLOCK>().0.iter().enumerate() {
                        // SAFETY: one thread writes.
                        unsafe { writer.write(row, block, &values.map(f32::from_bits)) };
                    }
                }
            }
        }
    }

    /// What several threads write rows by.
    pub(super) fn writer(&mut self) -> RowsWriter<'_> {
        match self.form {
            RowForm::Bytes => RowsWriter::Bytes(self.bytes.writer()),
            RowForm::Floats => RowsWriter::Floats(self.floats.writer()),
        }
    }

    /// Writes products to `out`, which is as long as there are rows of weights.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] and [`crate::Error::Unsupported`] if the weights are not what they were taken for.
    pub(super) fn multiply(&self, simd: Simd, product: &Product<'_>, out: &mut [f32]) -> Result<()> {
        let &Product { w, ref rows, row, team, next } = product;
        let rows = rows.clone();
        match self.form {
            RowForm::Bytes => {
                multiply_pieces(simd, &PieceRows { w, rows, x: &self.bytes, row, team, next }, out)
            }
            RowForm::Floats => multiply_eights(simd, &EightJob { w, rows, x: &self.floats, row, next }, out),
        }
    }
}

/// Writes blocks of [`HandedRows`] from several threads.
pub(super) enum RowsWriter<'a> {
    Bytes(Q8Writer<'a>),
    Floats(EightWriter<'a>),
}

impl RowsWriter<'_> {
    /// Writes 32 columns of a row, rounded if rows are bytes.
    ///
    /// # Safety
    /// No other call writes this block at the same time.
    pub(super) unsafe fn write(&self, row: usize, block: usize, values: &[f32; BLOCK]) {
        // SAFETY: by the caller.
        unsafe {
            match self {
                Self::Bytes(writer) => {
                    let (codes, d) = rounded(values);
                    writer.write_codes(row, block, &codes, d);
                }
                Self::Floats(writer) => writer.write(row, block, values),
            }
        }
    }
}

/// Rounds a block to eight bits, with its scale: `quantize_block` of `kernels/quantize.h`, whose bits differ from those of
/// [`Q8Rows::quantize_from`] in scales.
fn rounded(v: &[f32; BLOCK]) -> ([i8; BLOCK], f32) {
    /// What 1.5 · 2²³ is added to is rounded to a whole number, ties to even.
    const MAGIC: f32 = 12_582_912.0;
    let most = v.iter().map(|v| v.to_bits() & 0x7fff_ffff).max().unwrap_or(0);
    let d = if most >= 0x7f80_0000 { f32::NAN } else { f32::from_bits(most) * (1.0 / 127.0) };
    let inverse = if most > 0 { 127.0 / f32::from_bits(most) } else { 0.0 };
    let codes = v.map(|v| {
        let whole = (v * inverse + MAGIC) - MAGIC;
        if (-127.0..=127.0).contains(&whole) { whole as i8 } else { 0 }
    });
    (codes, d)
}

//! [`Columns`]: planes that files have transposed, and bringing their rows together after reading.
//!
//! GPTQ and AWQ store weights by input feature, so that an output feature, which is what a product reads, is scattered over
//! the whole plane. A plane has as many bytes either way, so it is brought into order where it was read to, by whoever has
//! read it. The price: a copy of the plane while that happens, and some tenths of a millisecond a megabyte.

/// What moves as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Unit {
    /// A 16-bit float.
    Half,
    /// A word of codes along a row, or of zero points along a column.
    Word,
    /// A word of zero points along a column that was made less by this, modulo 2³².
    Less(u32),
    /// A word of zero points of 4 bits along a column in AWQ's order: rows 0, 2, 4, 6, 1, 3, 5, 7.
    InterleavedZeros,
    /// A word of codes of 4 bits along a column in the same order, which becomes a word along a row.
    InterleavedCodes,
}

impl Unit {
    /// Bytes of one.
    pub(crate) const fn bytes(self) -> usize {
        if matches!(self, Self::Half) { 2 } else { 4 }
    }
}

/// A plane that is stored as the transpose of what is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Columns {
    /// Rows of units that are used.
    pub rows: usize,
    /// Units of such a row. Of [`Unit::InterleavedCodes`] both count units as they are used, so that `cols` · 8 are stored
    /// for each `rows` / 8.
    pub cols: usize,
    /// What moves as one.
    pub unit: Unit,
}

/// Rows and columns that are moved at a time: lines of the processor's cache.
const TILE: usize = 16;
/// Codes of a word.
const CODES: usize = 8;

impl Columns {
    /// Bytes of the plane; `None` if they are too many.
    pub(crate) fn bytes(&self) -> Option<usize> {
        self.rows.checked_mul(self.cols)?.checked_mul(self.unit.bytes())
    }

    /// Brings `plane` from the order of the file into that of rows; `scratch` gets a copy of it.
    ///
    /// # Panics
    /// If `plane` does not have [`Columns::bytes`] bytes.
    pub(crate) fn turn_to_rows(&self, plane: &mut [u8], scratch: &mut Vec<u8>) {
        assert_eq!(Some(plane.len()), self.bytes(), "a plane of this shape");
        scratch.clear();
        scratch.extend_from_slice(plane);
        let words = || scratch.as_chunks::<4>().0;
        match self.unit {
            Unit::Half => self.transpose(scratch.as_chunks::<2>().0, plane.as_chunks_mut().0, |half| half),
            Unit::Word => self.transpose(words(), plane.as_chunks_mut().0, |word| word),
            Unit::Less(less) => self.transpose(words(), plane.as_chunks_mut().0, |word| {
                u32::from_le_bytes(word).wrapping_add(less).to_le_bytes()
            }),
            Unit::InterleavedZeros => self.transpose(words(), plane.as_chunks_mut().0, |word| {
                in_order(u32::from_le_bytes(word)).to_le_bytes()
            }),
            Unit::InterleavedCodes => self.transpose_codes(words(), plane.as_chunks_mut().0),
        }
    }

    /// (cols, rows) → (rows, cols).
    fn transpose<const N: usize>(
        &self,
        from: &[[u8; N]],
        to: &mut [[u8; N]],
        f: impl Fn([u8; N]) -> [u8; N],
    ) {
        let Self { rows, cols, .. } = *self;
        for row in (0..rows).step_by(TILE) {
            for col in (0..cols).step_by(TILE) {
                for row in row..rows.min(row + TILE) {
                    for col in col..cols.min(col + TILE) {
                        to[row * cols + col] = f(from[col * rows + row]);
                    }
                }
            }
        }
    }

    /// (8 · cols, rows / 8) words along columns → (rows, cols) words along rows.
    fn transpose_codes(&self, from: &[[u8; 4]], to: &mut [[u8; 4]]) {
        let Self { rows, cols, .. } = *self;
        let blocks = rows / CODES;
        for first in (0..blocks).step_by(TILE) {
            for col in (0..cols).step_by(TILE) {
                for block in first..blocks.min(first + TILE) {
                    for col in col..cols.min(col + TILE) {
                        let word = |i: usize| u32::from_le_bytes(from[(CODES * col + i) * blocks + block]);
                        let codes = transposed(std::array::from_fn(word));
                        for (place, codes) in codes.into_iter().enumerate() {
                            let row = CODES * block + 2 * (place % 4) + place / 4;
                            to[row * cols + col] = codes.to_le_bytes();
                        }
                    }
                }
            }
        }
    }
}

/// Eight numbers of four bits from AWQ's order into that of rows.
fn in_order(word: u32) -> u32 {
    let apart = |four: u32| {
        let pairs = (four | four << 8) & 0x00ff_00ff;
        (pairs | pairs << 4) & 0x0f0f_0f0f
    };
    apart(word & 0xffff) | apart(word >> 16) << 4
}

/// The transpose of an 8 × 8 matrix of numbers of four bits, the first of a row in the lowest.
fn transposed(mut words: [u32; CODES]) -> [u32; CODES] {
    // Blocks beside the diagonal change places, first those of four numbers.
    for (apart, mask) in [(4, 0x0000_ffff), (2, 0x00ff_00ff), (1, 0x0f0f_0f0f_u32)] {
        let shift = 4 * apart;
        for low in (0..CODES).filter(|i| i & apart == 0) {
            let high = low + apart;
            let moved = (words[low] >> shift ^ words[high]) & mask;
            words[high] ^= moved;
            words[low] ^= moved << shift;
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

    /// Words of `bits`-wide numbers, (outer, inner) of them, consecutive ones of `inner` in a word.
    fn pack(outer: usize, inner: usize, bits: usize, number: impl Fn(usize, usize) -> u32) -> Vec<u8> {
        let per = 32 / bits;
        let mut out = vec![];
        for a in 0..outer {
            for b in (0..inner).step_by(per) {
                let word = (0..per).fold(0, |word, i| word | number(a, b + i) << (bits * i));
                out.extend_from_slice(&word.to_le_bytes());
            }
        }
        out
    }

    fn check(columns: Columns, stored: Vec<u8>, expected: &[u8]) {
        let (mut plane, mut scratch) = (stored, vec![1, 2, 3]);
        columns.turn_to_rows(&mut plane, &mut scratch);
        assert_eq!(plane, expected, "{columns:?}");
    }

    #[test]
    fn rows_come_together() {
        // Some that fill no tile.
        for (outputs, inputs) in [(8, 8), (40, 72), (136, 264)] {
            let code = |bits: usize| {
                move |row: usize, col: usize| (row * 7 + col * 13 + row * col % 5) as u32 & ((1 << bits) - 1)
            };
            for bits in [4, 8] {
                let (per, code) = (32 / bits, code(bits));
                // GPTQ: words along columns of the weight, which are rows of the file's matrix.
                let stored: Vec<u8> = (0..inputs / per)
                    .flat_map(|block| {
                        (0..outputs)
                            .flat_map(move |row| pack(1, per, bits, |_, i| code(row, per * block + i)))
                    })
                    .collect();
                let columns = Columns { rows: outputs, cols: inputs / per, unit: Unit::Word };
                check(columns, stored, &pack(outputs, inputs, bits, code));

                // Zero points: groups as columns.
                let groups = inputs / 8;
                let less = u32::MAX / ((1u32 << bits) - 1);
                // Zero points of zero borrow from the next.
                let stored = pack(groups, outputs, bits, |group, row| code(row, group));
                let stored: Vec<u8> = (stored.as_chunks().0.iter())
                    .flat_map(|word| u32::from_le_bytes(*word).wrapping_sub(less).to_le_bytes())
                    .collect();
                let expected: Vec<u8> = (0..outputs / per)
                    .flat_map(|block| {
                        (0..groups)
                            .flat_map(move |group| pack(1, per, bits, |_, i| code(per * block + i, group)))
                    })
                    .collect();
                let columns = Columns { rows: outputs / per, cols: groups, unit: Unit::Less(less) };
                check(columns, stored, &expected);
                if bits == 4 {
                    let stored =
                        pack(groups, outputs, 4, |group, at| code(at / 8 * 8 + ORDER[at % 8], group));
                    check(Columns { unit: Unit::InterleavedZeros, ..columns }, stored, &expected);
                    let stored = pack(inputs, outputs, 4, |col, at| code(at / 8 * 8 + ORDER[at % 8], col));
                    let columns = Columns { rows: outputs, cols: inputs / 8, unit: Unit::InterleavedCodes };
                    check(columns, stored, &pack(outputs, inputs, 4, code));
                }
            }
            let half = |row: usize, col: usize| ((row * 300 + col) as u16).to_le_bytes();
            let stored: Vec<u8> =
                (0..inputs).flat_map(|col| (0..outputs).flat_map(move |row| half(row, col))).collect();
            let expected: Vec<u8> =
                (0..outputs).flat_map(|row| (0..inputs).flat_map(move |col| half(row, col))).collect();
            check(Columns { rows: outputs, cols: inputs, unit: Unit::Half }, stored, &expected);
        }
    }
}

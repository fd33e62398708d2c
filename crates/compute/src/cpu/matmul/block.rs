//! The common form of quantised weights that integer dot products read, and how each encoding unpacks into it.

use crate::TensorView;
use crate::cpu::activations::{BLOCK, PART};
use crate::quant::{affine, half_le, k_quants, legacy};

/// 256 columns of one row: w = scale · q − min.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub struct WeightBlock {
    /// Unsigned values.
    pub q: [u8; BLOCK],
    /// Scale of each 16 columns.
    pub scale: [f32; BLOCK / PART],
    /// Minimum of each 16 columns.
    pub min: [f32; BLOCK / PART],
}

impl WeightBlock {
    /// All zero.
    pub const ZERO: Self = Self { q: [0; BLOCK], scale: [0.0; BLOCK / PART], min: [0.0; BLOCK / PART] };

    /// Takes signed values: q + offset is unsigned, and the minimum makes up for it.
    #[inline(always)]
    fn set_signed(&mut self, at: usize, q: &[i8], offset: u8) {
        for (to, from) in self.q[at..at + q.len()].iter_mut().zip(q) {
            *to = (*from as u8).wrapping_add(offset);
        }
    }
}

/// One row of a weight: its bytes in every plane.
#[derive(Debug, Clone, Copy)]
pub struct Row<'a> {
    planes: [&'a [u8]; 3],
    cols: usize,
}

impl<'a> Row<'a> {
    /// Row `row` of `weight`.
    #[inline(always)]
    pub fn new(weight: TensorView<'a>, row: usize) -> Self {
        let plane = |p: usize| if p < weight.dtype().planes() { weight.row(p, row) } else { &[] };
        Self { planes: [plane(0), plane(1), plane(2)], cols: weight.cols() }
    }

    /// Number of blocks, the last of which may be partly beyond the row.
    #[inline(always)]
    pub fn blocks(&self) -> usize {
        self.cols.div_ceil(BLOCK)
    }
}

/// An encoding's way into the common form.
pub trait Format: Copy {
    /// Whether every q is below 128, so that pairs of products with int8 fit 16 bits.
    const SMALL: bool;

    /// Unpacks columns 256 · `index` and on of `row`; what lies beyond the row is zero in `out` already.
    fn unpack(self, row: &Row<'_>, index: usize, out: &mut WeightBlock);
}

/// A super-block format of 256 columns: unpacks with a scale per 16 or 32 columns.
macro_rules! k_quant {
    ($name:ident, $bytes:literal, $scales:literal, $offset:literal, |$block:ident, $q:ident, $scale:ident, $min:ident| $unpack:expr) => {
        /// The encoding of this name.
        #[derive(Debug, Clone, Copy)]
        #[allow(non_camel_case_types)]
        pub struct $name;

        impl Format for $name {
            const SMALL: bool = true;

            #[inline(always)]
            fn unpack(self, row: &Row<'_>, index: usize, out: &mut WeightBlock) {
                let $block: &[u8; $bytes] =
                    row.planes[0][index * $bytes..(index + 1) * $bytes].try_into().expect("a whole block");
                let mut q = [0i8; BLOCK];
                let (mut scale, mut min) = ([0.0f32; $scales], [0.0f32; $scales]);
                {
                    let ($q, $scale, $min) = (&mut q, &mut scale, &mut min);
                    $unpack;
                }
                out.set_signed(0, &q, $offset);
                for part in 0..BLOCK / PART {
                    let from = part * $scales / (BLOCK / PART);
                    out.scale[part] = scale[from];
                    out.min[part] = min[from] + f32::from($offset as u8) * scale[from];
                }
            }
        }
    };
}

k_quant!(Q2_K, 84, 16, 0, |block, q, scale, min| k_quants::unpack_q2_k(block, q, scale, min));
k_quant!(Q3_K, 110, 16, 4, |block, q, scale, _min| k_quants::unpack_q3_k(block, q, scale));
k_quant!(Q4_K, 144, 8, 0, |block, q, scale, min| k_quants::unpack_q4_k(block, q, scale, min));
k_quant!(Q5_K, 176, 8, 0, |block, q, scale, min| k_quants::unpack_q5_k(block, q, scale, min));
k_quant!(Q6_K, 210, 16, 32, |block, q, scale, _min| k_quants::unpack_q6_k(block, q, scale));

/// A format of 32-column blocks with one scale.
macro_rules! legacy_quant {
    ($name:ident, $bytes:literal, $offset:literal, $small:literal, $unpack:path) => {
        /// The encoding of this name.
        #[derive(Debug, Clone, Copy)]
        #[allow(non_camel_case_types)]
        pub struct $name;

        impl Format for $name {
            const SMALL: bool = $small;

            #[inline(always)]
            fn unpack(self, row: &Row<'_>, index: usize, out: &mut WeightBlock) {
                let per_block = BLOCK / 32;
                let all = row.cols / 32;
                for i in 0..per_block.min(all - index * per_block) {
                    let at = (index * per_block + i) * $bytes;
                    let block: &[u8; $bytes] =
                        row.planes[0][at..at + $bytes].try_into().expect("a whole block");
                    let mut q = [0i8; 32];
                    let scale = $unpack(block, &mut q);
                    out.set_signed(i * 32, &q, $offset);
                    out.scale[2 * i..2 * i + 2].fill(scale);
                    out.min[2 * i..2 * i + 2].fill(scale * f32::from($offset as u8));
                }
            }
        }
    };
}

legacy_quant!(Q4_0, 18, 8, true, legacy::unpack_q4_0);
legacy_quant!(Q5_0, 22, 16, true, legacy::unpack_q5_0);
legacy_quant!(Q8_0, 34, 128, false, legacy::unpack_q8_0);

/// MLX affine of `BITS` bits.
#[derive(Debug, Clone, Copy)]
pub struct Affine<const BITS: usize> {
    /// Columns that share a scale and a bias.
    group: usize,
    half: crate::Half,
}

impl<const BITS: usize> Affine<BITS> {
    /// The encoding `dtype`, which is affine of these bits.
    pub fn new(group: u8, half: crate::Half) -> Self {
        Self { group: usize::from(group), half }
    }
}

impl<const BITS: usize> Format for Affine<BITS> {
    const SMALL: bool = BITS < 8;

    #[inline(always)]
    fn unpack(self, row: &Row<'_>, index: usize, out: &mut WeightBlock) {
        let start = index * BLOCK;
        let cols = BLOCK.min(row.cols - start);
        let packed = &row.planes[0][start / 8 * BITS..(start + cols) / 8 * BITS];
        if BITS == 8 {
            out.q[..cols].copy_from_slice(packed);
        } else if BITS == 4 {
            for (to, from) in out.q[..cols].chunks_exact_mut(2).zip(packed) {
                (to[0], to[1]) = (from & 15, from >> 4);
            }
        } else {
            for (to, from) in out.q[..cols].chunks_exact_mut(8).zip(packed.chunks_exact(BITS)) {
                to.copy_from_slice(&affine::unpack8::<BITS>(from.try_into().expect("bytes of 8 values")));
            }
        }
        for at in (0..cols).step_by(self.group) {
            let group = (start + at) / self.group;
            let value = |plane: usize| {
                let bytes = &row.planes[plane][2 * group..2 * group + 2];
                half_le(self.half, [bytes[0], bytes[1]])
            };
            // A group may begin before this block or end after it only if it is longer than 256 columns: it is not.
            let parts = at / PART..(at + self.group).min(cols) / PART;
            out.scale[parts.clone()].fill(value(1));
            out.min[parts].fill(-value(2));
        }
    }
}

/// Calls `$body` with the [`Format`] of a quantised dtype bound to `$format`.
macro_rules! with_format {
    ($dtype:expr, |$format:ident| $body:expr) => {{
        use $crate::DType;
        #[allow(clippy::wildcard_imports)]
        use $crate::cpu::matmul::block::*;
        match $dtype {
            DType::Q4_0 => {
                let $format = Q4_0;
                $body
            }
            DType::Q5_0 => {
                let $format = Q5_0;
                $body
            }
            DType::Q8_0 => {
                let $format = Q8_0;
                $body
            }
            DType::Q2_K => {
                let $format = Q2_K;
                $body
            }
            DType::Q3_K => {
                let $format = Q3_K;
                $body
            }
            DType::Q4_K => {
                let $format = Q4_K;
                $body
            }
            DType::Q5_K => {
                let $format = Q5_K;
                $body
            }
            DType::Q6_K => {
                let $format = Q6_K;
                $body
            }
            DType::Affine { bits: 2, group, scale } => {
                let $format = Affine::<2>::new(group, scale);
                $body
            }
            DType::Affine { bits: 3, group, scale } => {
                let $format = Affine::<3>::new(group, scale);
                $body
            }
            DType::Affine { bits: 4, group, scale } => {
                let $format = Affine::<4>::new(group, scale);
                $body
            }
            DType::Affine { bits: 5, group, scale } => {
                let $format = Affine::<5>::new(group, scale);
                $body
            }
            DType::Affine { bits: 6, group, scale } => {
                let $format = Affine::<6>::new(group, scale);
                $body
            }
            DType::Affine { bits: 8, group, scale } => {
                let $format = Affine::<8>::new(group, scale);
                $body
            }
            other => unreachable!("{other} takes no int8 activations"),
        }
    }};
}
pub(super) use with_format;

/// Unpacks all of one row, for tests.
#[cfg(test)]
pub(super) fn unpack_row(weight: TensorView<'_>, row: usize) -> Vec<WeightBlock> {
    let row = Row::new(weight, row);
    let mut blocks = vec![WeightBlock::ZERO; row.blocks()];
    with_format!(weight.dtype(), |format| for (i, block) in blocks.iter_mut().enumerate() {
        format.unpack(&row, i, block);
    });
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::quant::dequantize_row;

    #[test]
    fn unpacking_means_what_dequantising_means() {
        let formats = [
            DType::Q4_0,
            DType::Q5_0,
            DType::Q8_0,
            DType::Q2_K,
            DType::Q3_K,
            DType::Q4_K,
            DType::Q5_K,
            DType::Q6_K,
        ];
        let affine =
            [2, 3, 4, 5, 6, 8].map(|bits| DType::Affine { bits, group: 64, scale: crate::Half::BF16 });
        for dtype in formats.into_iter().chain(affine) {
            let cols = 3 * dtype.block_len().max(64);
            // Bytes below 60 keep f16 and bf16 scales finite and small.
            let bytes = |plane| -> Vec<u8> {
                let n = dtype.row_bytes(plane, cols).unwrap();
                (0..n).map(|i| (i * 31 % 60) as u8).collect()
            };
            let planes: Vec<Vec<u8>> = (0..dtype.planes()).map(bytes).collect();
            let slices: Vec<&[u8]> = planes.iter().map(|p| &p[..]).collect();
            let weight = TensorView::new(dtype, 1, cols, &slices).unwrap();
            let mut values = vec![0.0; cols];
            dequantize_row(weight, 0, &mut values).unwrap();
            let blocks = unpack_row(weight, 0);
            for (col, exact) in values.iter().enumerate() {
                let (block, at) = (&blocks[col / BLOCK], col % BLOCK);
                let (scale, min) = (block.scale[at / PART], block.min[at / PART]);
                let got = scale * f32::from(block.q[at]) - min;
                let size = (scale * f32::from(block.q[at])).abs() + min.abs();
                assert!((got - exact).abs() <= 1e-6 * size, "{dtype} column {col}: {got} {exact}");
            }
        }
    }
}

//! `DType`: every weight encoding and its block geometry.
//!
//! A weight matrix is stored in one *plane* of bytes (all GGUF encodings and plain floats: blocks carry
//! their own scales), in three (MLX affine: packed weights, scales, biases; NVFP4: weights, scales, the matrix's scale;
//! integers with zero points: weights, scales, zero points) or in two (FP8, other integers, and MXFP4 with scales apart:
//! weights, scales). Rows are stored one after the other in every plane, so a range of rows is a contiguous byte range of
//! each plane.
//!
//! A row of FP8's scales stands for [`FP8_BLOCK`] rows of weights or for all of them, one of zero points for as many as a
//! word has ([`DType::block_rows`]); the last one may stand for fewer. A range of rows then has the scales of all blocks
//! that it touches.

use std::fmt;

use crate::{Error, Result};

/// 16-bit float kinds that scales and biases of affine quantisation come in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Half {
    /// IEEE binary16.
    F16,
    /// bfloat16.
    BF16,
}

/// Rows and columns that share a scale in FP8 weights; blocks at the right and lower edges may be smaller.
pub const FP8_BLOCK: usize = 128;

/// Floats that the scales of FP8 blocks come in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockScale {
    /// IEEE binary32.
    F32,
    /// bfloat16.
    BF16,
    /// A power of two, 2^(byte − 127).
    E8M0,
}

impl BlockScale {
    /// Bytes of a scale.
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::BF16 => 2,
            Self::E8M0 => 1,
        }
    }
}

/// What the codes of integers are counted from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Zeros {
    /// The middle of their range: 8 of 4 bits, 128 of 8.
    Middle,
    /// A zero point for each group.
    Stored,
}

/// What the scale of a whole NVFP4 matrix does with those of its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MatrixScale {
    /// They are multiplied by it: ModelOpt's `weight_scale_2`.
    Factor,
    /// They are divided by it: compressed-tensors' `weight_global_scale`.
    Divisor,
}

/// Encoding of a weight matrix. GGUF encodings carry ggml's names.
#[allow(non_camel_case_types)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    BF16,
    /// 4-bit blocks of 32, one f16 scale.
    Q4_0,
    /// 4-bit blocks of 32, one f16 scale and minimum.
    Q4_1,
    /// 5-bit blocks of 32, one f16 scale.
    Q5_0,
    /// 5-bit blocks of 32, one f16 scale and minimum.
    Q5_1,
    /// 8-bit blocks of 32, one f16 scale.
    Q8_0,
    /// 2-bit super-blocks of 256 with 4-bit scales and minima.
    Q2_K,
    /// 3-bit super-blocks of 256 with 6-bit scales.
    Q3_K,
    /// 4-bit super-blocks of 256 with 6-bit scales and minima.
    Q4_K,
    /// 5-bit super-blocks of 256 with 6-bit scales and minima.
    Q5_K,
    /// 6-bit super-blocks of 256 with 8-bit scales.
    Q6_K,
    /// Codes of 11 bits for 8 columns of −1, 0, 1; super-blocks of 256 with 3-bit scales of 32 columns and a shift.
    IQ1_S,
    /// The same with scales of 16 columns and shifts of 8.
    IQ1_M,
    /// Codes of 8 bits for the magnitudes of 8 columns, super-blocks of 256 with 4-bit scales of 32 columns.
    IQ2_XXS,
    /// The same with codes of 9 bits and scales of 16 columns.
    IQ2_XS,
    /// The same with codes of 10 bits and all signs.
    IQ2_S,
    /// Codes of 8 bits for the magnitudes of 4 columns, super-blocks of 256 with 4-bit scales of 32 columns.
    IQ3_XXS,
    /// The same with codes of 9 bits and all signs.
    IQ3_S,
    /// 4-bit codes of unevenly spaced values in blocks of 32, one f16 scale.
    IQ4_NL,
    /// The same in super-blocks of 256 with 6-bit scales of 32 columns.
    IQ4_XS,
    /// 4-bit floats (E2M1) in blocks of 32 with one power of two (E8M0), interleaved in 17 bytes: ggml's layout of
    /// the Open Compute Project's MX format.
    MXFP4,
    /// The same values with scales in a plane of their own and elements in order, low nibble first: the layout of
    /// Hugging Face's gpt-oss and of MLX.
    MXFP4_Planes,
    /// 8-bit floats (e4m3) in blocks of 32 with one power of two (E8M0) in a plane of their own: the Open Compute Project's
    /// MX format.
    MXFP8_Planes,
    /// MLX affine: unsigned `bits`-wide values, w = q · scale + bias per group of `group` columns.
    Affine {
        /// 2, 3, 4, 5, 6 or 8.
        bits: u8,
        /// 32, 64 or 128 columns share a scale and a bias.
        group: u8,
        /// Encoding of scales and biases.
        scale: Half,
    },
    /// Unsigned integers, w = (code − zero) · scale per group of columns: `pack-quantized` of compressed-tensors, and what
    /// GPTQ and AWQ are when their matrices are transposed. Codes fill words of 32 bits along a row, zero points along a
    /// column, the first in the lowest bits.
    Int {
        /// 4 or 8.
        bits: u8,
        /// 32, 64 or 128 columns share a scale and a zero point; 0: all of a row do.
        group: u8,
        /// Encoding of scales.
        scale: Half,
        /// What codes are counted from.
        zeros: Zeros,
    },
    /// 4-bit floats (E2M1), low nibble first, times a scale (e4m3) for 16 columns and one (f32) for the matrix.
    NVFP4 {
        /// What the matrix's scale does.
        matrix: MatrixScale,
    },
    /// 8-bit floats (e4m3) times a scale for each block of 128 rows and 128 columns.
    Fp8 {
        /// Encoding of scales.
        scale: BlockScale,
    },
    /// 8-bit floats (e4m3) times a scale for each row.
    Fp8_Rows {
        /// Encoding of scales.
        scale: BlockScale,
    },
    /// 8-bit floats (e4m3) times one scale for the whole matrix.
    Fp8_Whole {
        /// Encoding of the scale.
        scale: BlockScale,
    },
}

impl DType {
    /// Columns per block; a row holds a whole number of blocks.
    pub const fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Fp8 { .. } | Self::Fp8_Rows { .. } | Self::Fp8_Whole { .. } => 1,
            Self::NVFP4 { .. } => 16,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::IQ4_NL => 32,
            Self::MXFP4 | Self::MXFP4_Planes | Self::MXFP8_Planes => 32,
            Self::Q2_K | Self::Q3_K | Self::Q4_K | Self::Q5_K | Self::Q6_K => 256,
            Self::IQ1_S | Self::IQ1_M | Self::IQ2_XXS | Self::IQ2_XS | Self::IQ2_S => 256,
            Self::IQ3_XXS | Self::IQ3_S | Self::IQ4_XS => 256,
            Self::Int { group: 0, .. } => 32,
            Self::Affine { group, .. } | Self::Int { group, .. } => group as usize,
        }
    }

    /// Rows of weights that one row of `plane` stands for; [`usize::MAX`] for however many there are.
    pub const fn block_rows(self, plane: usize) -> usize {
        match (self, plane) {
            (Self::Fp8 { .. }, 1) => FP8_BLOCK,
            (Self::Fp8_Whole { .. }, 1) | (Self::NVFP4 { .. }, 2) => usize::MAX,
            (Self::Int { bits: bits @ 1.., .. }, 2) => 32 / bits as usize,
            _ => 1,
        }
    }

    /// Bytes of one block in `plane` (0 weights, 1 scales, 2 biases); 0 for planes the encoding lacks.
    pub const fn block_bytes(self, plane: usize) -> usize {
        match (self, plane) {
            (Self::Affine { bits, group, .. }, 0) => group as usize * bits as usize / 8,
            (Self::Affine { .. }, 1 | 2) => 2,
            (Self::Int { bits, .. }, 0) => self.block_len() * bits as usize / 8,
            (Self::Int { .. }, 1) => 2,
            (Self::Int { zeros: Zeros::Stored, .. }, 2) => 4,
            (Self::NVFP4 { .. }, 0) => 8,
            (Self::NVFP4 { .. }, 1) => 1,
            (Self::NVFP4 { .. }, 2) => 4,
            (Self::Fp8 { .. } | Self::Fp8_Rows { .. } | Self::Fp8_Whole { .. }, 0) => 1,
            (Self::Fp8 { scale } | Self::Fp8_Rows { scale } | Self::Fp8_Whole { scale }, 1) => scale.bytes(),
            (Self::F32, 0) => 4,
            (Self::F16 | Self::BF16, 0) => 2,
            (Self::Q4_0, 0) => 18,
            (Self::Q4_1, 0) => 20,
            (Self::Q5_0, 0) => 22,
            (Self::Q5_1, 0) => 24,
            (Self::Q8_0, 0) => 34,
            (Self::MXFP4, 0) => 17,
            (Self::MXFP4_Planes, 0) => 16,
            (Self::MXFP8_Planes, 0) => 32,
            (Self::MXFP4_Planes | Self::MXFP8_Planes, 1) => 1,
            (Self::Q2_K, 0) => 84,
            (Self::Q3_K, 0) => 110,
            (Self::Q4_K, 0) => 144,
            (Self::Q5_K, 0) => 176,
            (Self::Q6_K, 0) => 210,
            (Self::IQ1_S, 0) => 50,
            (Self::IQ1_M, 0) => 56,
            (Self::IQ2_XXS, 0) => 66,
            (Self::IQ2_XS, 0) => 74,
            (Self::IQ2_S, 0) => 82,
            (Self::IQ3_XXS, 0) => 98,
            (Self::IQ3_S, 0) => 110,
            (Self::IQ4_NL, 0) => 18,
            (Self::IQ4_XS, 0) => 136,
            _ => 0,
        }
    }

    /// Planes that a weight of this encoding has.
    pub const fn planes(self) -> usize {
        match self {
            Self::Affine { .. } | Self::NVFP4 { .. } | Self::Int { zeros: Zeros::Stored, .. } => 3,
            Self::Fp8 { .. } | Self::Fp8_Rows { .. } | Self::Fp8_Whole { .. } => 2,
            Self::Int { .. } | Self::MXFP4_Planes | Self::MXFP8_Planes => 2,
            _ => 1,
        }
    }

    /// Bytes of one row of `cols` columns in `plane`; for FP8's scales, of a row of blocks.
    ///
    /// # Errors
    /// [`Error::RowLength`] if `cols` is not a whole number of blocks or the size overflows;
    /// [`Error::Unsupported`] for widths or groups of affine encodings and integers that do not exist.
    pub fn row_bytes(self, plane: usize, cols: usize) -> Result<usize> {
        if let Self::Affine { bits, group, .. } = self
            && !matches!((bits, group), (2..=6 | 8, 32 | 64 | 128))
        {
            return Err(Error::Unsupported { what: "this width or group size", dtype: self });
        }
        if let Self::Int { bits, group, .. } = self
            && !matches!((bits, group), (4 | 8, 0 | 32 | 64 | 128))
        {
            return Err(Error::Unsupported { what: "this width or group size", dtype: self });
        }
        let err = |reason| Error::RowLength { dtype: self, cols, reason };
        if !cols.is_multiple_of(self.block_len()) {
            return Err(err("not a whole number of blocks"));
        }
        let blocks = match (self, plane) {
            (Self::Fp8 { .. }, 1) => cols.div_ceil(FP8_BLOCK),
            (Self::Fp8_Rows { .. } | Self::Fp8_Whole { .. }, 1) | (Self::NVFP4 { .. }, 2) => 1,
            (Self::Int { group: 0, .. }, 1 | 2) => 1,
            _ => cols / self.block_len(),
        };
        blocks.checked_mul(self.block_bytes(plane)).ok_or(err("size overflows"))
    }

    /// Bytes of a `rows` × `cols` matrix in `plane`.
    ///
    /// # Errors
    /// As for [`DType::row_bytes`].
    pub fn plane_bytes(self, plane: usize, rows: usize, cols: usize) -> Result<usize> {
        let bytes = self.row_bytes(plane, cols)?.checked_mul(rows.div_ceil(self.block_rows(plane)));
        bytes.ok_or(Error::RowLength { dtype: self, cols, reason: "size overflows" })
    }

    /// Bytes of a `rows` × `cols` matrix over all planes.
    ///
    /// # Errors
    /// As for [`DType::row_bytes`].
    pub fn matrix_bytes(self, rows: usize, cols: usize) -> Result<usize> {
        (0..self.planes()).try_fold(0usize, |sum, plane| {
            let bytes = sum.checked_add(self.plane_bytes(plane, rows, cols)?);
            bytes.ok_or(Error::RowLength { dtype: self, cols, reason: "size overflows" })
        })
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Affine { bits, group, scale } => {
                write!(f, "affine {bits}-bit g{group} {}", if *scale == Half::F16 { "f16" } else { "bf16" })
            }
            Self::Fp8 { scale } => write!(f, "FP8 e4m3 {FP8_BLOCK}×{FP8_BLOCK} {scale:?}"),
            Self::Int { bits, group, scale, zeros } => {
                write!(f, "INT{bits} ")?;
                if *group > 0 {
                    write!(f, "g{group} ")?
                } else {
                    write!(f, "rows ")?
                }
                let zeros = if *zeros == Zeros::Stored { " with zero points" } else { "" };
                write!(f, "{}{zeros}", if *scale == Half::F16 { "f16" } else { "bf16" })
            }
            Self::NVFP4 { .. } => write!(f, "NVFP4"),
            Self::Fp8_Rows { scale } => write!(f, "FP8 e4m3 rows {scale:?}"),
            Self::Fp8_Whole { scale } => write!(f, "FP8 e4m3 {scale:?}"),
            Self::MXFP4_Planes => write!(f, "MXFP4"),
            Self::MXFP8_Planes => write!(f, "MXFP8"),
            other => write!(f, "{other:?}"),
        }
    }
}

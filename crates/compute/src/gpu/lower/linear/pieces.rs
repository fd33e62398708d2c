//! What kernels of few rows take of a row of weights at once.

use crate::DType;

/// Columns of which a warp's lanes read all pieces at once.
pub(in crate::gpu::lower) fn columns_at_once(dtype: DType) -> usize {
    if is_super_block(dtype) || takes_two(dtype) { 2048 } else { 1024 }
}

/// Whether a lane reads two pieces at once, as `takes_two` of `kernels/pieces.h` has it.
fn takes_two(dtype: DType) -> bool {
    matches!(dtype, DType::Affine { bits: 4, .. } | DType::Int { bits: 4, .. } | DType::NVFP4 { .. })
}

/// Of a warp's `span` rows of so many columns those that it multiplies at once, by one token or by several: `product_part` of
/// `kernels/few_rows.h`, `joint_part` of `kernels/cuda/joint_rows.cu`.
pub(super) fn rows_at_once(dtype: DType, cols: usize, tokens: Tokens, span: usize) -> usize {
    let is_long = cols > columns_at_once(dtype);
    let reads_two =
        is_super_block(dtype) || matches!(dtype, DType::Affine { bits: 4, .. } | DType::Int { bits: 4, .. });
    if is_long && !(tokens == Tokens::Several && reads_two && span > 1) { 1 } else { 2 }
}

/// What a product's weight is multiplied by once it has been read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tokens {
    One,
    Several,
}

/// Whether it is one of blocks of 256 columns, of which a lane takes 64 at once.
pub(super) fn is_super_block(dtype: DType) -> bool {
    matches!(dtype, DType::Q2_K | DType::Q3_K | DType::Q4_K | DType::Q5_K | DType::Q6_K)
}

/// What a row costs beside others: more where its bytes lie across words.
pub(super) fn cost(dtype: DType) -> usize {
    if dtype == DType::Q6_K { 2 } else { 1 }
}

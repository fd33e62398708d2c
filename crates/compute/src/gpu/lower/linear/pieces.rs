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

/// Whether it is one of blocks of 256 columns, of which a lane takes 64 at once.
pub(super) fn is_super_block(dtype: DType) -> bool {
    matches!(dtype, DType::Q2_K | DType::Q3_K | DType::Q4_K | DType::Q5_K | DType::Q6_K)
}

/// What a row costs beside others: more where its bytes lie across words.
pub(super) fn cost(dtype: DType) -> usize {
    if dtype == DType::Q6_K { 2 } else { 1 }
}

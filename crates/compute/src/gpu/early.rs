//! Lowering to the kernels of `kernels/cuda/early.cu`: products of few rows whose weights are copied to threadgroup memory
//! before the dispatch in front has ended.

use super::few_rows::{FewLinear, WARPS, columns_at_once};
use super::lower::Lowering;
use crate::DType;

/// The unit of these kernels, which wait for the dispatch before them by themselves, as the common ones do.
pub(super) const EARLY_UNIT: &str = "cuda/early";
/// Threadgroup memory for copies, at most: with what kernels have besides, no more than a group gets without asking.
pub(super) const MOST_COPIED: usize = 44 << 10;
/// Copies begin and end at such bytes.
pub(super) const COPY_UNIT: usize = 16;

impl Lowering<'_> {
    /// The kernel for products of one input, of `span` rows a warp each, and what it takes of threadgroup memory; nothing
    /// if they do not suit it.
    pub(super) fn early_products(&self, products: &[(FewLinear, usize)]) -> Option<(&'static str, u32)> {
        let mut most = 0;
        for (product, span) in products {
            let matrix = self.weight(product.weight).matrix;
            let stride = matrix.dtype.row_bytes(0, matrix.cols).ok()?;
            let fits = stride.is_multiple_of(COPY_UNIT) && matrix.cols <= columns_at_once(matrix.dtype);
            let copied = WARPS.checked_mul(*span)?.checked_mul(stride)?;
            if !fits || copied > MOST_COPIED {
                return None;
            }
            most = most.max(copied);
        }
        let mut dtypes = products.iter().map(|(product, _)| self.weight(product.weight).matrix.dtype);
        let first = dtypes.next().filter(|_| self.memory.copies_ahead)?;
        let blocks = |dtype: DType| matches!(dtype, DType::Q4_K | DType::Q5_K | DType::Q6_K);
        let mixes = blocks(first) && dtypes.clone().all(blocks);
        let kernel = match (first, dtypes.all(|dtype| dtype == first)) {
            (DType::Q4_K, true) => "early_products_q4_k",
            (DType::Q5_K, true) => "early_products_q5_k",
            (DType::Q6_K, true) => "early_products_q6_k",
            (DType::Q8_0, true) => "early_products_q8_0",
            (_, false) if mixes => "early_products_mixed",
            _ => return None,
        };
        Some((kernel, most as u32))
    }
}

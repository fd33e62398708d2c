//! Lowering to the kernels of `kernels/cuda/early.cu`: products of few rows whose weights are copied to threadgroup memory
//! before the dispatch in front has ended.

use super::pieces::{columns_at_once, is_super_block};
use crate::gpu::encodings::{FastPath, kernel_name};
use crate::gpu::lower::context::{Lowering, Product, WARPS};

/// Threadgroup memory for copies, at most: with what kernels have besides, no more than a group gets without asking.
const MOST_COPIED: usize = 44 << 10;
/// Copies begin and end at such bytes.
pub(in crate::gpu::lower) const COPY_UNIT: usize = 16;

impl Lowering<'_> {
    /// The end of the kernel's name for products of one input, of `span` rows a warp each, and what it takes of threadgroup
    /// memory; nothing if they do not suit it.
    pub(super) fn early_products(&self, products: &[(Product, usize)]) -> Option<(&'static str, u32)> {
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
        let names = dtypes.clone().map(|dtype| kernel_name(dtype, FastPath::Early));
        let names: Vec<&str> = names.collect::<Option<_>>().filter(|_| self.memory.info.copies_ahead)?;
        let first = *names.first()?;
        if names.iter().all(|name| *name == first) {
            return Some((first, most as u32));
        }
        dtypes.all(is_super_block).then_some(("mixed", most as u32))
    }
}

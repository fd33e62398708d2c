//! Lowering to the kernels of `kernels/kept_rows.h`: products of few rows with large weights of 16-bit floats, by groups that stay.

use crate::DType;
use crate::gpu::arguments::BatchPlainConstants;
use crate::gpu::device::Dispatch;
use crate::gpu::encodings::{FastPath, kernel_name};
use crate::gpu::lower::context::{Launch, Lowering, Product, named};

const THREADS: usize = 256;
/// Columns that a thread reads at once.
const COLUMNS: usize = 8;
/// Rows of a weight from which groups stay.
const LEAST_KEPT: usize = 8192;
/// Groups that a multiprocessor has at once: of a kernel for a single row, and of one for several.
const GROUPS: [usize; 2] = [3, 2];
/// Outputs that groups make at once of several rows.
const OUTPUTS: usize = 2;

/// The kernel for a row, with the outputs that its groups make at once; the one for several, with how many at most.
struct Kernels {
    one: (&'static str, usize),
    several: (&'static str, usize),
}

fn kernels(cols: usize) -> Option<Kernels> {
    Some(match cols.div_ceil(COLUMNS * THREADS) {
        1 => Kernels { one: ("kept_rows_1x1", 4), several: ("kept_rows_8x1", 8) },
        2 => Kernels { one: ("kept_rows_1x2", 2), several: ("kept_rows_4x2", 4) },
        3 | 4 => Kernels { one: ("kept_rows_1x4", 1), several: ("kept_rows_2x4", 2) },
        _ => return None,
    })
}

impl Lowering<'_> {
    /// A product with a weight of plain floats, if it suits these kernels.
    pub(super) fn kept_product(&self, p: &Product) -> Option<Dispatch> {
        let matrix = self.weight(p.weight).matrix;
        let kernels = kernels(matrix.cols)?;
        let suits = matches!(matrix.dtype, DType::BF16 | DType::F16)
            && matrix.rows >= LEAST_KEPT
            && self.memory.info.byte_matrices;
        let name = kernel_name(matrix.dtype, FastPath::Plain).filter(|_| suits)?;
        let (x, norm) = self.entering(p.x);
        let (kernel, outputs, tokens, at_once) = match (kernels, self.rows) {
            (Kernels { one: (kernel, outputs), .. }, 1) => (kernel, outputs, 1, GROUPS[0]),
            (Kernels { several: (kernel, tokens), .. }, _) => (kernel, OUTPUTS, tokens, GROUPS[1]),
        };
        let (part, weight) = (self.part(p, outputs, 1), self.norm_unit(norm));
        let constants = &BatchPlainConstants {
            part,
            norm: norm.into(),
            weight,
            tokens: self.rows,
            has_residual: p.residual.is_some(),
        };
        let residual = p.residual.map_or(self.input(0), |r| self.value(r));
        let buffers = [self.all_weights(p), x, residual, self.value(p.out)];
        let launch = Launch { unit: "kept_rows", kernel, buffers: &buffers, constants };
        let groups = part.groups.min(at_once * self.memory.info.multiprocessors);
        Some(named(launch.over([groups, self.rows.div_ceil(tokens), 1], THREADS as u32), name))
    }
}

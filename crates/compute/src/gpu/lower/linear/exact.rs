//! Lowering of products that round nothing: many rows with weights that are f32, or become it, to `kernels/cuda/exact.cu`.

use crate::DType;
use crate::gpu::arguments::{LinearConstants, UnpackConstants};
use crate::gpu::device::{Dispatch, Slice};
use crate::gpu::lower::context::{Launch, Lowering, Product};
use crate::gpu::memory::{DeviceWeight, unpacked_bytes};

/// Tokens of a group, and its threads.
const TOKENS: usize = 32;
const THREADS: u32 = 512;

/// Kernels by a group's outputs, with the same bits.
struct Tile {
    kernel: &'static str,
    rows: usize,
    /// Threadgroup memory: three stages of tokens and weights, so many columns each and four floats between rows.
    shared: u32,
}

const SMALL: Tile = Tile { kernel: "exact_linear_32", rows: 32, shared: 3 * (32 + 32) * (128 + 4) * 4 };
const LARGE: Tile = Tile { kernel: "exact_linear_64", rows: 64, shared: 3 * (32 + 64) * (64 + 4) * 4 };
/// Columns that a thread unpacks.
const UNPACKED_COLUMNS: usize = 8;

impl Lowering<'_> {
    /// A linear layer of many rows, after what unpacks its weight if that is not f32; nothing if the kernel does not suit it.
    pub(super) fn exact_linear(&self, p: &Product) -> Option<(Option<Dispatch>, Dispatch)> {
        let scratch = self.tensor_scratch()?;
        let weight = *self.weight(p.weight);
        let matrix = weight.matrix;
        if !matrix.cols.is_multiple_of(4) {
            return None;
        }
        let (unpack, plane) = if matrix.dtype == DType::F32 {
            (None, weight.planes[0])
        } else {
            unpacked_bytes(matrix, p.precision)?;
            let to = Slice::from(scratch.unpacked);
            (Some(self.unpack(&weight, to)), to)
        };
        let residual = p.residual.map_or(self.input(0), |r| self.value(r));
        let buffers = [self.value(p.x), plane, self.optional(p.bias), residual, self.value(p.out)];
        let constants = &LinearConstants {
            weight: weight.format,
            rows: matrix.rows,
            tokens: self.rows,
            has_bias: p.bias.is_some(),
            has_residual: p.residual.is_some(),
        };
        let grid = |tile: &Tile| [matrix.rows.div_ceil(tile.rows), self.rows.div_ceil(TOKENS), 1];
        // Large tiles where they are a turn of the multiprocessors or nearly.
        let groups: usize = grid(&LARGE).iter().product();
        let tile = if groups * 8 < self.memory.info.multiprocessors * 7 { SMALL } else { LARGE };
        let launch = Launch { unit: "cuda/exact", kernel: tile.kernel, buffers: &buffers, constants };
        Some((unpack, Dispatch { shared: tile.shared, ..launch.over(grid(&tile), THREADS) }))
    }

    fn unpack(&self, weight: &DeviceWeight, to: Slice) -> Dispatch {
        let [a, b, c] = weight.planes;
        let constants = &UnpackConstants { weight: weight.format, rows: weight.matrix.rows };
        Launch { unit: "linear", kernel: "unpack", buffers: &[a, b, c, to], constants }
            .each(weight.matrix.rows * weight.matrix.cols.div_ceil(UNPACKED_COLUMNS))
    }
}

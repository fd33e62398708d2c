//! What lowering to the kernels of `kernels/cuda/wide.cu` has in common, for devices with warp groups: products of many rows.
//!
//! As those of `tensor`, with activations as `wide_enter` writes them.

use super::context::{DeferredNorm, Launch, Lowering, named};
use crate::gpu::arguments::WideEnterConstants;
use crate::gpu::device::{Dispatch, Slice};
use crate::gpu::memory::{PANEL_COLUMNS, TensorScratch, WIDE_ROWS};

/// Weight rows of a tile.
pub(super) const TILE_ROWS: usize = 192;
/// Tokens of a tile, at most: of experts, and of linear layers.
pub(super) const MOST_TOKENS: usize = 160;
pub(super) const MOST_LINEAR_TOKENS: usize = 176;
const THREADS: u32 = 384;

/// Threadgroup memory for tiles of up to so many tokens: four stages of 128 columns of them, results of twelve warps, and what is lost
/// until a multiple of 1024.
pub(super) const fn shared_for(tokens: usize) -> u32 {
    4 * tokens as u32 * 128 * 2 + 12 * 32 * 20 * 4 + 1024
}

/// Whether the columns that a lane unpacks are 16 and, 32 further on, 16 more: `SPLIT` of `kernels/cuda/unpack.h`.
pub(super) fn splits(encoding: &str) -> bool {
    matches!(encoding, "q4_k" | "q5_k" | "q6_k")
}

/// Where rows go.
pub(super) enum WideRows {
    /// To tiles of so many.
    All { width: usize },
    /// Each to the places of so many pairs.
    Shared(usize),
}

impl Lowering<'_> {
    /// Memory for these kernels, if they are to be used for the batch.
    pub(super) fn wide_scratch(&self) -> Option<TensorScratch> {
        self.tensor_scratch().filter(|_| self.memory.info.warp_groups && self.rows >= WIDE_ROWS)
    }

    /// Writes x (rows, cols), normalised if that was left to its readers, as these kernels take it.
    pub(super) fn enter_wide(
        &self,
        scratch: TensorScratch,
        (x, norm): (Slice, Option<DeferredNorm>),
        [rows, cols]: [usize; 2],
        which: WideRows,
        split: bool,
    ) -> Dispatch {
        let weight = norm.map_or(self.input(0), |norm| self.vector(norm.weight));
        let buffers = [x, weight, scratch.places.into(), scratch.x.into(), scratch.scale.into()];
        let (share, width) = match which {
            WideRows::All { width } => (0, width),
            WideRows::Shared(pairs) => (pairs, 0),
        };
        let constants = &WideEnterConstants { cols, share, width, rows, split, norm: norm.into() };
        let threads = if cols > 1024 { 256 } else { 128 };
        let launch = Launch { unit: "cuda/wide_tokens", kernel: "wide_enter", buffers: &buffers, constants };
        Dispatch {
            shared: (cols.next_multiple_of(PANEL_COLUMNS) * 2) as u32,
            ..launch.over([rows, 1, 1], threads)
        }
    }

    /// A product in `tiles` tiles.
    pub(super) fn wide(&self, encoding: &str, launch: Launch<'_>, tiles: usize) -> Dispatch {
        named(self.in_tiles(launch, tiles), encoding)
    }

    /// The same by a kernel that no encoding is part of the name of.
    pub(super) fn in_tiles(&self, launch: Launch<'_>, tiles: usize) -> Dispatch {
        let groups = tiles.min(self.memory.info.multiprocessors);
        Dispatch { shared: shared_for(MOST_TOKENS), ..launch.over([groups, 1, 1], THREADS) }
    }
}

//! What lowering to the kernels of `kernels/cuda/panels.h` has in common, for devices with tensor cores: products of batches of
//! up to `PANEL_ROWS` rows.
//!
//! Activations enter as f16, each row scaled by a power of two, in blocks of eight rows × eight columns; weights are unpacked to
//! f16, sums are f32.

use super::context::{Launch, Lowering};
use crate::gpu::arguments::BlocksConstants;
use crate::gpu::device::{Dispatch, Slice};
use crate::gpu::kernels::BLOCKS_UNIT;
use crate::gpu::memory::PanelScratch;
use crate::graph::Value;

pub(super) const THREADS: u32 = 256;
/// Warps of a group.
pub(super) const GROUP_WARPS: usize = 8;
/// Weight rows of a panel.
pub(super) const PANEL: usize = 16;
/// Threadgroup memory of a group with tiles of 16 tokens: two chunks of four groups of columns.
pub(super) const PANEL_SHARED: u32 = 2 * 4 * 2 * 2048;
/// `ABSENT` of `kernels/cuda/blocks.cu`: rows stay where they are, but for those of pairs that are not there.
const IN_PLACE: u32 = u32::MAX;

/// Rows that become blocks.
pub(super) enum BlockRows {
    /// Those of a value.
    All,
    /// Of each place of a list the row that its pair shares with others.
    Shared(usize),
    /// Those of a list's places.
    Places,
}

impl Lowering<'_> {
    /// Memory for these kernels, if they are to be used for the batch.
    pub(super) fn panel_scratch(&self) -> Option<PanelScratch> {
        self.memory.scratch.panels.filter(|_| self.is_batch() && !self.memory.batch_invariant)
    }

    /// Writes x (rows, cols), normalised if that is left to its readers, as blocks.
    pub(super) fn enter_blocks(&mut self, scratch: PanelScratch, x: Value) -> Option<Dispatch> {
        if self.entered == Some(x) {
            return None;
        }
        self.entered = Some(x);
        Some(self.value_blocks(scratch, x, BlockRows::All, self.rows))
    }

    /// Writes rows of a value, normalised if that is left to its readers, as blocks.
    pub(super) fn value_blocks(
        &self,
        scratch: PanelScratch,
        x: Value,
        which: BlockRows,
        rows: usize,
    ) -> Dispatch {
        let (from, norm) = self.entering(x);
        let weight = norm.map_or(self.input(0), |norm| self.vector(norm.weight));
        let constants = BlocksConstants { rows, cols: x.width(), share: 0, norm: norm.into() };
        self.blocks(scratch, from, weight, which, constants)
    }

    /// Writes (places, cols) as blocks.
    pub(super) fn place_blocks(
        &self,
        scratch: PanelScratch,
        from: Slice,
        [rows, cols]: [usize; 2],
    ) -> Dispatch {
        let constants = BlocksConstants { rows, cols, ..BlocksConstants::default() };
        self.blocks(scratch, from, self.input(0), BlockRows::Places, constants)
    }

    fn blocks(
        &self,
        scratch: PanelScratch,
        from: Slice,
        weight: Slice,
        which: BlockRows,
        constants: BlocksConstants,
    ) -> Dispatch {
        let share = match which {
            BlockRows::All => 0,
            BlockRows::Shared(pairs) => u32::try_from(pairs).expect("few experts of a token"),
            BlockRows::Places => IN_PLACE,
        };
        let constants = &BlocksConstants { share, ..constants };
        let buffers = [from, weight, scratch.list.into(), scratch.x.into(), scratch.scale.into()];
        Launch { unit: BLOCKS_UNIT, kernel: "blocks_of", buffers: &buffers, constants }
            .over([constants.rows, 1, 1], THREADS)
    }
}

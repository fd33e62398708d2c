//! How groups divide experts' matrices that pass through threadgroup memory: `kernels/cuda/ring.h`.

use crate::DType;
use crate::gpu::arguments::RingConstants;
use crate::gpu::device::Dispatch;
use crate::gpu::lower::context::{Launch, Lowering, named};
use crate::gpu::lower::panels::PANEL;
use crate::gpu::memory::ExpertMatrix;

/// Warps of a group at most.
pub(super) const MOST_WARPS: usize = 8;
/// Panels of a team and unit, and units in threadgroup memory.
pub(super) const PANELS: usize = 2;
const STAGES: usize = 2;
/// Threadgroup memory of a multiprocessor less what is not to be had, and what a group has beside what it asks for.
const SHARED: usize = 227 << 10;
const SHARED_BESIDE: usize = 2 << 10;

/// How groups multiply a matrix.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ring {
    pub(super) constants: RingConstants,
    encoding: &'static str,
    shared: u32,
    /// Groups of a multiprocessor.
    groups: usize,
}

/// The end of the kernels' names for an encoding, if there are such kernels.
fn encoding(dtype: DType) -> Option<&'static str> {
    match dtype {
        DType::Q4_K => Some("q4_k"),
        DType::Q6_K => Some("q6_k"),
        _ => None,
    }
}

impl Ring {
    /// For a matrix of which a unit has `panels` panels a team and whose columns `warps` warps share, of which each needs `beside`
    /// bytes of threadgroup memory beside weights; nothing if it does not suit the kernels.
    pub(super) fn new(
        matrix: &ExpertMatrix,
        [panels, warps]: [usize; 2],
        tiles: usize,
        beside: usize,
    ) -> Option<Self> {
        let matrix = matrix.matrix;
        let encoding = encoding(matrix.dtype)?;
        let stride = matrix.dtype.row_bytes(0, matrix.cols).ok()?;
        let fits = |teams: &usize| {
            let rows = PANEL * panels * teams;
            matrix.rows.is_multiple_of(rows) && matrix.rows / rows >= 2
        };
        let teams = (1..=MOST_WARPS / warps.max(1)).rev().find(fits).filter(|_| warps > 0)?;
        let shared = STAGES * teams * PANELS * PANEL * stride + warps * teams * beside;
        let groups = (SHARED / (shared + SHARED_BESIDE)).min(2);
        let constants = RingConstants { tiles, warps, teams };
        (groups > 0).then_some(Self { constants, encoding, shared: shared as u32, groups })
    }

    /// Warps of a group.
    pub(super) fn warps(&self) -> usize {
        self.constants.warps * self.constants.teams
    }
}

impl Lowering<'_> {
    /// As many groups as the device runs at once.
    pub(super) fn over_ring(&self, launch: Launch<'_>, ring: &Ring) -> Dispatch {
        let groups = self.memory.info.multiprocessors * ring.groups;
        let threads = 32 * ring.warps();
        let dispatch = named(launch.over([groups, 1, 1], threads as u32), ring.encoding);
        Dispatch { shared: ring.shared, ..dispatch }
    }
}

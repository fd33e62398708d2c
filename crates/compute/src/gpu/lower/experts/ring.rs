//! How groups divide experts' matrices that pass through threadgroup memory: `kernels/cuda/ring.h`.

use crate::DType;
use crate::gpu::arguments::RingConstants;
use crate::gpu::device::Dispatch;
use crate::gpu::encodings::{self, FastPath};
use crate::gpu::lower::context::{Launch, Lowering, named};
use crate::gpu::memory::ExpertMatrix;
use crate::graph::MatrixSpec;

/// Warps of a group at most: of those of which a multiprocessor may have two, and of the only one.
pub(super) const MOST_WARPS: usize = 8;
pub(super) const WIDE_WARPS: usize = 16;
/// Rows of a panel where two of them are multiplied as one.
pub(super) const EIGHT: usize = 8;
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
    use DType::{Q2_K, Q3_K, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0};
    match dtype {
        Q2_K | Q3_K | Q4_K | Q5_K | Q6_K | Q8_0 | Q4_0 | DType::MXFP4 => encodings::common_name(dtype),
        DType::IQ4_NL | DType::IQ4_XS => encodings::common_name(dtype),
        _ if book_bytes(dtype) > 0 => encodings::common_name(dtype),
        _ if dtype.planes() > 1 => encodings::kernel_name(dtype, FastPath::Tensor),
        _ => None,
    }
}

/// Bytes of an encoding's codebook as a group has it: `SharedBook` of `kernels/cuda/panel_codebooks.h`.
fn book_bytes(dtype: DType) -> usize {
    match dtype {
        DType::IQ3_XXS => 256 * 4,
        DType::IQ3_S => 512 * 4,
        DType::IQ2_XXS => 256 * 8,
        DType::IQ2_XS => 512 * 8,
        DType::IQ2_S => 1024 * 8,
        DType::IQ1_S | DType::IQ1_M => 2048 * 4,
        _ => 0,
    }
}

/// Whether rows may have other columns than multiples of those of a warp, and experts biases.
pub(super) fn is_loose(dtype: DType) -> bool {
    matches!(dtype, DType::MXFP4 | DType::Q8_0 | DType::Q4_0 | DType::IQ4_NL) || dtype.planes() > 1
}

/// Of how many columns rows are a multiple that are loose.
pub(super) fn step_of(dtype: DType) -> usize {
    match dtype {
        // A lane has 64 side by side.
        DType::NVFP4 { .. } => 64,
        // Scales of 128 columns are read at once.
        DType::Affine { .. } | DType::Int { .. } => 128,
        _ => 32,
    }
}

/// Rows that a warp reads at once, and how many bytes of each from one lane's to the next one's, of which a lane reads so many.
fn reads_of(dtype: DType) -> [usize; 3] {
    match dtype {
        DType::NVFP4 { .. } => [2, 32, 16],
        DType::MXFP4 | DType::Q8_0 | DType::Q4_0 | DType::IQ4_NL | DType::MXFP4_Planes => [8, 4, 4],
        DType::Q2_K | DType::Q3_K | DType::IQ4_XS => [8, 4, 4],
        // Next to each other: two lanes' codes or signs.
        _ if book_bytes(dtype) > 0 => [8, 2, 4],
        // As many bytes side by side as a group allows.
        DType::Affine { bits: 4, group: 32, .. } | DType::Int { bits: 4, group: 32, .. } => [8, 4, 4],
        DType::Affine { bits: 4, group: 64, .. } | DType::Int { bits: 4, group: 64, .. } => [4, 8, 8],
        DType::Affine { bits: 4, .. } | DType::Int { bits: 4, .. } => [2, 16, 16],
        _ => [4, 8, 8],
    }
}

/// How often a panel of so many rows of `stride` bytes is halved into pieces that are copied by themselves, and how many bytes a piece
/// begins behind the one before.
///
/// Lanes read 32 bytes of four rows of Q4_K and Q5_K at once, one of each piece or every other one of the panel. Those are to lie in
/// different quarters of the 128 bytes that all banks of threadgroup memory have side by side.
fn pieces(dtype: DType, rows: usize, stride: usize) -> [usize; 2] {
    const QUARTER: usize = 32;
    if !matches!(dtype, DType::Q4_K | DType::Q5_K | DType::Q6_K) {
        return scattered(rows, stride, reads_of(dtype));
    }
    if dtype == DType::Q6_K || !stride.is_multiple_of(QUARTER) {
        return [0, rows * stride];
    }
    [2, (rows / 4 * stride - QUARTER).next_multiple_of(4 * QUARTER) + QUARTER]
}

/// Pieces of which the first rows, by turns one of each, are read where fewest banks are asked for several words.
fn scattered(rows: usize, stride: usize, reads: [usize; 3]) -> [usize; 2] {
    let of_halvings = |halvings: usize| {
        let bytes = (rows >> halvings) * stride;
        let suits = halvings == 0 || bytes.is_multiple_of(16) && ((8 >> halvings) * stride).is_multiple_of(4);
        let steps = if halvings == 0 { 0..1 } else { 0..8 };
        steps.filter(move |_| suits).map(move |step| [halvings, bytes + 16 * step])
    };
    let all = (0..3).flat_map(of_halvings);
    all.min_by_key(|&[halvings, bytes]| (most_of_a_bank(stride, [halvings, bytes], reads), bytes << halvings))
        .unwrap_or([0, rows * stride])
}

/// Words of one bank at most that lanes ask for at once, of those rows.
fn most_of_a_bank(
    stride: usize,
    [halvings, piece_bytes]: [usize; 2],
    [rows, apart, bytes]: [usize; 3],
) -> usize {
    const BANKS: usize = 32;
    let mut asked = [0; BANKS];
    for row in 0..rows {
        let begin = (row % (1 << halvings)) * piece_bytes + (row >> halvings) * stride;
        for lane in 0..4 {
            (0..bytes / 4).for_each(|word| asked[((begin + lane * apart) / 4 + word) % BANKS] += 1);
        }
    }
    asked.into_iter().max().unwrap_or(0)
}

/// Bytes of a row in a plane, none of one that is not there.
fn stride_of(matrix: MatrixSpec, plane: usize) -> usize {
    let planes = matrix.dtype.planes();
    matrix.dtype.row_bytes(plane, matrix.cols).ok().filter(|_| plane < planes).unwrap_or(0)
}

/// Bytes of a panel in the second and third plane, and the most that is copied for them: from a multiple of 16 to another.
pub(super) fn further_planes(matrix: &ExpertMatrix, panel: usize) -> [[usize; 2]; 2] {
    const UNIT: usize = 16;
    let MatrixSpec { dtype, rows, .. } = matrix.matrix;
    let of_plane = |plane: usize| {
        let stride = stride_of(matrix.matrix, plane);
        let in_a_row = dtype.block_rows(plane);
        let need = stride * (panel / in_a_row).max(1);
        let before = (0..rows / panel).map(|i| i * panel / in_a_row * stride % UNIT).max().unwrap_or(0);
        [need, (before + need).next_multiple_of(UNIT)]
    };
    let [second, third] = [of_plane(1), of_plane(2)];
    [[second[0], third[0]], [second[1], third[1]]]
}

impl Ring {
    /// For a matrix of which a unit has `panels` panels of so many rows a team and whose columns `warps` warps share, of which each
    /// needs `beside` bytes of threadgroup memory beside weights; nothing if it does not suit the kernels.
    pub(super) fn new(
        matrix: &ExpertMatrix,
        [panels, panel, warps]: [usize; 3],
        tiles: usize,
        beside: usize,
    ) -> Option<Self> {
        let [needs, rooms] = further_planes(matrix, panel);
        let matrix = matrix.matrix;
        let encoding = encoding(matrix.dtype)?;
        let stride = matrix.dtype.row_bytes(0, matrix.cols).ok()?;
        let fits = |teams: &usize| {
            let rows = panel * panels * teams;
            matrix.rows.is_multiple_of(rows) && matrix.rows / rows >= 2
        };
        let most_teams = (MOST_WARPS / warps.max(1)).max(usize::from(warps <= WIDE_WARPS));
        let teams = (1..=most_teams).rev().find(fits).filter(|_| warps > 0)?;
        let [halvings, piece_bytes] = pieces(matrix.dtype, panel, stride);
        let panel_bytes = (piece_bytes << halvings) + rooms.iter().sum::<usize>();
        let shared = STAGES * teams * PANELS * panel_bytes + warps * teams * beside;
        let groups = (SHARED / (shared + book_bytes(matrix.dtype) + SHARED_BESIDE))
            .min(if warps > MOST_WARPS { 1 } else { 2 });
        let constants = RingConstants { tiles, warps, teams, halvings, piece_bytes, needs, rooms };
        // Rows' scales begin at a multiple of 16 bytes in every panel.
        let aligned = matrix.dtype.block_rows(1) != 1 || (panel * stride_of(matrix, 1)).is_multiple_of(16);
        let suits = groups > 0 && aligned && piece_bytes.is_multiple_of(16);
        suits.then_some(Self { constants, encoding, shared: shared as u32, groups })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::arguments::PartConstants;
    use crate::gpu::lower::panels::PANEL;
    use crate::{BlockScale, Half, MatrixScale, Zeros};

    #[test]
    fn rows_that_are_read_at_once_lie_in_different_quarters() {
        for cols in (256..=2048).step_by(256) {
            let stride = DType::Q4_K.row_bytes(0, cols).unwrap();
            let [halvings, piece_bytes] = pieces(DType::Q4_K, PANEL, stride);
            assert!(piece_bytes >= (PANEL >> halvings) * stride && piece_bytes.is_multiple_of(16));
            for first in [0, 4] {
                let begin = |g: usize| (g % (1 << halvings)) * piece_bytes + (g >> halvings) * 2 * stride;
                let mut quarters: Vec<usize> = (first..first + 4).map(|g| begin(g) % 128 / 32).collect();
                quarters.sort_unstable();
                assert_eq!(quarters, [0, 1, 2, 3], "{cols} columns, rows from {first} on");
            }
        }
    }

    #[test]
    fn loose_rows_meet_few_others_in_a_bank() {
        let int = |group| DType::Int { bits: 4, group, scale: Half::F16, zeros: Zeros::Stored };
        let affine = |bits| DType::Affine { bits, group: 64, scale: Half::BF16 };
        for (dtype, cols, most) in [
            (DType::MXFP4, 2048, 1),
            (DType::MXFP4, 2880, 3),
            (DType::MXFP4, 288, 2),
            (DType::Q8_0, 768, 1),
            (DType::Q8_0, 2048, 2),
            (DType::MXFP4_Planes, 2048, 2),
            (DType::MXFP4_Planes, 2880, 1),
            (int(32), 2048, 2),
            (int(128), 2048, 1),
            (int(128), 768, 1),
            (affine(4), 2048, 1),
            (affine(8), 2048, 1),
            (DType::NVFP4 { matrix: MatrixScale::Factor }, 2048, 1),
            (DType::MXFP8_Planes, 768, 1),
        ] {
            let stride = dtype.row_bytes(0, cols).unwrap();
            let [halvings, piece_bytes] = pieces(dtype, PANEL, stride);
            assert!(piece_bytes >= (PANEL >> halvings) * stride && piece_bytes.is_multiple_of(16));
            // Rows eight apart, which a lane has, begin equally far from a word.
            assert!(((8 >> halvings) * stride).is_multiple_of(4));
            assert_eq!(
                most_of_a_bank(stride, [halvings, piece_bytes], reads_of(dtype)),
                most,
                "{dtype} {cols}"
            );
        }
    }

    #[test]
    fn further_planes_have_room_for_what_is_around_them() {
        let fp8 = DType::Fp8 { scale: BlockScale::F32 };
        let int = DType::Int { bits: 4, group: 128, scale: Half::F16, zeros: Zeros::Stored };
        for (dtype, rows, cols, expected) in [
            (DType::Q4_K, 768, 2048, [[0, 0], [0, 0]]),
            // Sixteen rows of 24 scales.
            (DType::MXFP8_Planes, 2048, 768, [[384, 0], [384, 0]]),
            // A row of six or sixteen f32 for every 128, from 24 or 64 bytes on by turns.
            (fp8, 2048, 768, [[24, 0], [32, 0]]),
            (fp8, 768, 2048, [[64, 0], [64, 0]]),
            (DType::Fp8_Whole { scale: BlockScale::F32 }, 2048, 768, [[4, 0], [16, 0]]),
            // Scales, and two rows of words with zero points.
            (int, 2048, 768, [[192, 48], [192, 48]]),
            (int, 2048, 640, [[160, 40], [160, 48]]),
        ] {
            let matrix = MatrixSpec { dtype, rows, cols };
            let part = PartConstants::default();
            assert_eq!(
                further_planes(&ExpertMatrix { matrix, part }, PANEL),
                expected,
                "{dtype} {rows} × {cols}"
            );
        }
    }
}

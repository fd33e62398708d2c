//! [`ExpertStore`]: where each routed expert's weights are in the checkpoint and how they lie in a slot.
//!
//! An expert is read as it is stored, without conversion or copy. Each of its byte ranges goes to a slot
//! position that is congruent to its file offset modulo 4096, so that the same slot serves reads that bypass the
//! page cache and must be aligned. The price is up to two pages a range.

use std::ops::Range;
use std::sync::Arc;

use moeflux_compute::TensorView;
use moeflux_compute::backend::ExpertView;
use moeflux_compute::graph::{ExpertSet, ExpertSetId, MatrixSpec};

use crate::checkpoint::ByteRange;
use crate::io::buffer::PAGE_BYTES;
use crate::io::file::CheckpointFile;
use crate::io::queue::ReadPart;
use crate::{Error, Result};

/// How an expert's gate and up projections are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ExpertForm {
    /// Apart.
    #[default]
    Separate,
    /// As the even and the odd rows of one matrix, which stands in place of gate.
    Interleaved,
    /// The same, each matrix stored with its columns as rows: gate and up (hidden_size, 2 · moe_intermediate_size), down
    /// (moe_intermediate_size, hidden_size).
    InterleavedTransposed,
}

/// Byte ranges of one expert: the planes of gate, up and down.
#[derive(Debug, Clone)]
pub struct ExpertLocation {
    /// How gate and up are stored.
    pub form: ExpertForm,
    /// Planes of the gate projection, or of both.
    pub gate: Vec<ByteRange>,
    /// Planes of the up projection, if it is stored apart.
    pub up: Vec<ByteRange>,
    /// Planes of the down projection.
    pub down: Vec<ByteRange>,
}

impl ExpertLocation {
    fn ranges(&self) -> impl Iterator<Item = &ByteRange> {
        self.gate.iter().chain(&self.up).chain(&self.down)
    }
}

/// All routed experts of a checkpoint.
#[derive(Debug, Default)]
pub struct ExpertStore {
    files: Vec<Arc<CheckpointFile>>,
    sets: Vec<(ExpertSet, Vec<ExpertLocation>)>,
}

/// Slot bytes that a range needs at most, wherever its offset lies within a page.
fn span_bytes(len: usize) -> usize {
    (len + PAGE_BYTES - 1).next_multiple_of(PAGE_BYTES)
}

/// Where each of an expert's ranges lies in its slot.
fn positions(location: &ExpertLocation) -> impl Iterator<Item = Range<usize>> {
    location.ranges().scan(0, |next, range| {
        let len = range.len as usize;
        let start = *next + (range.offset % PAGE_BYTES as u64) as usize;
        *next += span_bytes(len);
        Some(start..start + len)
    })
}

impl ExpertStore {
    /// Checks that every range has the size its matrix needs and lies in its file.
    ///
    /// # Errors
    /// [`Error::Tensor`] naming the first expert that does not fit.
    pub fn new(files: Vec<Arc<CheckpointFile>>, sets: Vec<(ExpertSet, Vec<ExpertLocation>)>) -> Result<Self> {
        for (set, experts) in &sets {
            for (expert, location) in experts.iter().enumerate() {
                let apart = location.form == ExpertForm::Separate;
                let both = MatrixSpec { rows: 2 * set.gate.rows, ..set.gate };
                let gate = if apart { ("gate", set.gate) } else { ("gate and up", both) };
                let matrices = [
                    Some((gate.0, gate.1, &location.gate)),
                    apart.then_some(("up", set.up, &location.up)),
                    Some(("down", set.down, &location.down)),
                ];
                for (name, matrix, ranges) in matrices.into_iter().flatten() {
                    check_ranges(&files, matrix, ranges).map_err(|(path, expected, got)| Error::Tensor {
                        path,
                        tensor: format!("layer {} expert {expert} {name}", set.layer),
                        expected,
                        got,
                    })?;
                }
            }
        }
        Ok(Self { files, sets })
    }

    /// A store of experts that are not there, to be sized but not read.
    pub fn outlined(sets: Vec<(ExpertSet, Vec<ExpertLocation>)>) -> Self {
        Self { files: vec![], sets }
    }

    /// Number of layers with routed experts.
    pub fn sets(&self) -> usize {
        self.sets.len()
    }

    /// What the experts of a layer look like.
    pub fn set(&self, set: ExpertSetId) -> &ExpertSet {
        &self.sets[set.0].0
    }

    /// Weight bytes of one expert.
    pub fn expert_bytes(&self, set: ExpertSetId) -> u64 {
        self.sets[set.0].1.first().map_or(0, |l| l.ranges().map(|r| r.len).sum())
    }

    /// Weight bytes of all experts of all layers.
    pub fn total_bytes(&self) -> u64 {
        self.sets.iter().flat_map(|(_, e)| e).flat_map(ExpertLocation::ranges).map(|r| r.len).sum()
    }

    /// Bytes of a slot that can hold any expert of the layer.
    pub fn slot_bytes(&self, set: ExpertSetId) -> usize {
        let first = self.sets[set.0].1.first();
        first.map_or(0, |l| l.ranges().map(|r| span_bytes(r.len as usize)).sum())
    }

    /// The reads that fill a slot with an expert.
    pub fn reads(&self, set: ExpertSetId, expert: u32) -> Vec<ReadPart> {
        let location = &self.sets[set.0].1[expert as usize];
        let part = |(range, at): (&ByteRange, Range<usize>)| ReadPart {
            file: Arc::clone(&self.files[range.file]),
            offset: range.offset,
            len: range.len as usize,
            at: at.start,
        };
        location.ranges().zip(positions(location)).map(part).collect()
    }

    /// The expert's weights in a slot that its reads have filled.
    ///
    /// # Errors
    /// None for a store that [`ExpertStore::new`] has checked and a slot of [`ExpertStore::slot_bytes`].
    pub fn view<'a>(&self, set: ExpertSetId, expert: u32, slot: &'a [u8]) -> Result<ExpertView<'a>> {
        let (spec, locations) = &self.sets[set.0];
        let location = &locations[expert as usize];
        let mut at = positions(location).map(|range| &slot[range]);
        let mut planes = |ranges: &[ByteRange]| -> Vec<&[u8]> { at.by_ref().take(ranges.len()).collect() };
        let (gate, up, down) = (planes(&location.gate), planes(&location.up), planes(&location.down));
        let matrix =
            |spec: MatrixSpec, planes: &[&'a [u8]]| TensorView::new(spec.dtype, spec.rows, spec.cols, planes);
        let MatrixSpec { dtype, rows, cols } = spec.gate;
        let ([gate, up], down) = match location.form {
            ExpertForm::Separate => {
                ([matrix(spec.gate, &gate)?, matrix(spec.up, &up)?], matrix(spec.down, &down)?)
            }
            ExpertForm::Interleaved => {
                (TensorView::interleaved(dtype, rows, cols, &gate)?, matrix(spec.down, &down)?)
            }
            ExpertForm::InterleavedTransposed => (
                TensorView::interleaved_transposed(dtype, rows, cols, gate[0])?,
                TensorView::transposed(spec.down.dtype, spec.down.rows, spec.down.cols, down[0])?,
            ),
        };
        Ok(ExpertView { id: expert, gate, up, down })
    }
}

type Mismatch = (std::path::PathBuf, String, String);

fn check_ranges(
    files: &[Arc<CheckpointFile>],
    matrix: MatrixSpec,
    ranges: &[ByteRange],
) -> Result<(), Mismatch> {
    let path = |range: Option<&ByteRange>| {
        range.and_then(|r| files.get(r.file)).map(|f| f.path().to_path_buf()).unwrap_or_default()
    };
    let planes = matrix.dtype.planes();
    if ranges.len() != planes {
        return Err((path(ranges.first()), format!("{planes} planes"), format!("{}", ranges.len())));
    }
    for (plane, range) in ranges.iter().enumerate() {
        let expected = matrix.dtype.plane_bytes(plane, matrix.rows, matrix.cols);
        let expected = expected.ok().map(|bytes| bytes as u64);
        if expected != Some(range.len) {
            let shape = format!("{} {}×{}", matrix.dtype, matrix.rows, matrix.cols);
            let expected = expected.map_or(shape, |bytes| format!("{bytes} bytes in plane {plane}"));
            return Err((path(Some(range)), expected, format!("{} bytes", range.len)));
        }
        let length = files.get(range.file).map_or(0, |f| f.length());
        if range.offset.checked_add(range.len).is_none_or(|end| end > length) {
            let got = format!("bytes {}..+{}", range.offset, range.len);
            return Err((path(Some(range)), format!("a range within the file's {length} bytes"), got));
        }
    }
    Ok(())
}

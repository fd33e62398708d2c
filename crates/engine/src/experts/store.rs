//! [`ExpertStore`]: where each routed expert's weights are in the checkpoint, and their layout in a slot.
//!
//! An expert is read as it is stored, without conversion or copy; planes that a file has by columns have their rows brought
//! together in the slot by whoever reads them. Ranges that are neighbours in the file are read in one
//! go. Each read goes to a slot position that is congruent to its file offset modulo 4096, so that the same slot serves
//! reads that bypass the page cache and must be aligned. The price is up to two pages per read.

use std::path::Path;
use std::sync::Arc;

use moeflux_compute::TensorView;
use moeflux_compute::backend::ExpertView;
use moeflux_compute::graph::{ExpertSet, ExpertSetId, MatrixSpec};

use super::slots::SetShape;
use crate::checkpoint::ByteRange;
use crate::io::buffer::PAGE_BYTES;
use crate::io::columns::Columns;
use crate::io::file::CheckpointFile;
use crate::io::queue::{MOST_THREADS, QueueKind, ReadPart};
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
    /// As the first and the second half of such columns.
    HalvesTransposed,
    /// Apart, and down with its columns as rows: (moe_intermediate_size, hidden_size).
    DownTransposed,
}

impl ExpertForm {
    /// Whether gate and up are stored apart.
    pub fn is_apart(self) -> bool {
        matches!(self, Self::Separate | Self::DownTransposed)
    }
}

/// Byte ranges of one expert: the planes of gate, up and down.
#[derive(Debug, Clone)]
pub struct ExpertLocation {
    /// How gate and up are stored.
    pub form: ExpertForm,
    /// Planes of the gate projection, or of both; none for experts without a gate.
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
    /// The same files elsewhere.
    mirrors: Vec<Vec<Arc<CheckpointFile>>>,
    sets: Vec<Stored>,
}

/// The experts of a layer.
#[derive(Debug)]
struct Stored {
    set: ExpertSet,
    experts: Vec<(ExpertLocation, SlotLayout)>,
    shape: SetShape,
}

/// How an expert lies in its slot.
#[derive(Debug)]
struct SlotLayout {
    /// What to read in one go, and where in the slot it begins.
    runs: Vec<(ByteRange, usize)>,
    /// Where each of the expert's ranges begins in the slot.
    at: Vec<usize>,
}

/// Reads that [`ExpertStore::sample`] makes, or one of each plane of each layer.
const MOST_SAMPLES: usize = 4096;

/// Ranges are read in one go if what lies between them is less than a page and than this part of what is read.
const GAP_PART: u64 = 16;

impl SlotLayout {
    /// Every run begins in the slot where it begins within a page of its file, with whole pages of its own, so that it
    /// can be read straight from the device.
    fn new(location: &ExpertLocation) -> Self {
        let ranges: Vec<&ByteRange> = location.ranges().collect();
        let mut order: Vec<usize> = (0..ranges.len()).collect();
        order.sort_by_key(|i| (ranges[*i].file, ranges[*i].offset));
        let mut layout = Self { runs: vec![], at: vec![0; ranges.len()] };
        let mut end = 0;
        for index in order {
            let range = ranges[index];
            let within = (range.offset % PAGE_BYTES as u64) as usize;
            let near = |(run, _): &&mut (ByteRange, usize)| {
                let gap = (PAGE_BYTES as u64 - 1).min(run.len / GAP_PART);
                run.file == range.file && range.offset - run.offset <= run.len.saturating_add(gap)
            };
            if let Some((run, at)) = layout.runs.last_mut().filter(near) {
                layout.at[index] = *at + (range.offset - run.offset) as usize;
                run.len = run.len.max(range.offset + range.len - run.offset);
            } else {
                layout.at[index] = end + within;
                layout.runs.push((*range, layout.at[index]));
            }
            let (run, at) = layout.runs.last().expect("a run for every range");
            end = (at + run.len as usize).next_multiple_of(PAGE_BYTES);
        }
        layout
    }

    /// Slot bytes that the runs need at most, wherever their offsets lie within a page: the same for all experts of a
    /// shape, so that they can share slots.
    fn slot_bytes(&self) -> usize {
        let span = |run: &ByteRange| (run.len as usize + PAGE_BYTES - 1).next_multiple_of(PAGE_BYTES);
        self.runs.iter().map(|(run, _)| span(run)).sum()
    }
}

impl ExpertStore {
    /// Checks that every range has the size its matrix needs and lies in its file.
    ///
    /// # Errors
    /// [`Error::Tensor`] naming the first expert that does not fit.
    pub fn new(files: Vec<Arc<CheckpointFile>>, sets: Vec<(ExpertSet, Vec<ExpertLocation>)>) -> Result<Self> {
        for (set, experts) in &sets {
            for (expert, location) in experts.iter().enumerate() {
                let apart = location.form.is_apart();
                let both = MatrixSpec { rows: 2 * set.up.rows, ..set.up };
                let gate = if apart {
                    set.gate.map(|gate| ("gate", gate, &location.gate))
                } else {
                    Some(("gate and up", both, &location.gate))
                };
                let matrices = [
                    gate,
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
        Ok(Self::outlined(files, sets))
    }

    /// As [`ExpertStore::new`], without checks: without `files`, a store that can be sized but not read.
    pub(crate) fn outlined(
        files: Vec<Arc<CheckpointFile>>,
        sets: Vec<(ExpertSet, Vec<ExpertLocation>)>,
    ) -> Self {
        let stored = |(set, experts): (ExpertSet, Vec<ExpertLocation>)| {
            let experts: Vec<_> =
                experts.into_iter().map(|l| (SlotLayout::new(&l), l)).map(|(l, e)| (e, l)).collect();
            let shape = SetShape {
                experts: set.experts,
                expert_bytes: experts.first().map_or(0, |(e, _)| e.ranges().map(|r| r.len).sum()),
                slot_bytes: experts.iter().map(|(_, layout)| layout.slot_bytes()).max().unwrap_or(0),
            };
            Stored { set, experts, shape }
        };
        Self { files, mirrors: vec![], sets: sets.into_iter().map(stored).collect() }
    }

    /// Number of layers with routed experts.
    pub fn sets(&self) -> usize {
        self.sets.len()
    }

    /// What the experts of a layer look like.
    pub fn set(&self, set: ExpertSetId) -> &ExpertSet {
        &self.sets[set.0].set
    }

    /// Numbers and sizes of every layer's experts.
    pub fn shapes(&self) -> Vec<SetShape> {
        self.sets.iter().map(|stored| stored.shape).collect()
    }

    /// Where an expert is.
    pub fn location(&self, set: ExpertSetId, expert: u32) -> &ExpertLocation {
        &self.sets[set.0].experts[expert as usize].0
    }

    /// Weight bytes of one expert.
    pub fn expert_bytes(&self, set: ExpertSetId) -> u64 {
        self.sets[set.0].shape.expert_bytes
    }

    /// Weight bytes of all experts of all layers.
    pub fn total_bytes(&self) -> u64 {
        let experts = self.sets.iter().flat_map(|stored| &stored.experts);
        experts.flat_map(|(location, _)| location.ranges()).map(|range| range.len).sum()
    }

    /// Bytes of a slot that can hold any expert of the layer.
    pub fn slot_bytes(&self, set: ExpertSetId) -> usize {
        self.sets[set.0].shape.slot_bytes
    }

    /// Adds a copy of the checkpoint from which experts are read, too: a folder with files of the same names, or the file.
    ///
    /// # Errors
    /// [`Error::Io`] if a file is not there; [`Error::Malformed`] if its length, its beginning or a sample of it differs.
    pub(crate) fn add_mirror(&mut self, path: &Path) -> Result<()> {
        let copy = self.files.iter().map(|file| {
            let name = file.path().file_name().unwrap_or_default();
            let place = if path.is_dir() {
                path.join(name)
            } else if self.files.len() == 1 {
                path.to_owned()
            } else {
                path.with_file_name(name)
            };
            let copy = CheckpointFile::open(&place)?;
            copy.expect_like(file, self.files.len())?;
            Ok(Arc::new(copy))
        });
        let copy = copy.collect::<Result<_>>()?;
        self.mirrors.push(copy);
        Ok(())
    }

    /// The checkpoint and its mirrors.
    pub fn copies(&self) -> usize {
        1 + self.mirrors.len()
    }

    /// The reads that fill a slot with an expert.
    pub fn reads(&self, set: ExpertSetId, expert: u32) -> Vec<ReadPart> {
        self.reads_from(0, set, expert)
    }

    /// The same from a copy: 0 is the checkpoint itself, mirrors follow.
    pub(crate) fn reads_from(&self, copy: usize, set: ExpertSetId, expert: u32) -> Vec<ReadPart> {
        let (_, layout) = &self.sets[set.0].experts[expert as usize];
        let files = if copy == 0 { &self.files } else { &self.mirrors[copy - 1] };
        let part = |(run, at): &(ByteRange, usize)| ReadPart {
            file: Arc::clone(&files[run.file]),
            offset: run.offset,
            len: run.len as usize,
            at: *at,
        };
        layout.runs.iter().map(part).collect()
    }

    /// The planes of an expert that are stored by columns, and where they begin in its slot.
    pub(crate) fn by_columns(&self, set: ExpertSetId, expert: u32) -> Vec<(usize, Columns)> {
        let (location, layout) = &self.sets[set.0].experts[expert as usize];
        let planes = layout.at.iter().zip(location.ranges());
        planes.filter_map(|(at, range)| Some((*at, range.by_columns?))).collect()
    }

    /// The queue that suits these experts, if not any does: threads that read bring rows together beside computing, and copy
    /// what is made.
    pub(crate) fn best_queue(&self) -> Option<QueueKind> {
        let by_threads = self.is_made() || self.most_by_columns() > 0;
        by_threads.then_some(QueueKind::Pread)
    }

    /// Whether experts are made, so that none is read from a disk.
    pub fn is_made(&self) -> bool {
        self.files.iter().any(|file| file.is_made())
    }

    /// Bytes that reading takes beside slots, with so many reads under way at once: a copy of a plane for each that brings
    /// rows together.
    pub(crate) fn reading_bytes(&self, depth: usize) -> u64 {
        self.most_by_columns().saturating_mul(depth.clamp(1, MOST_THREADS) as u64)
    }

    /// Bytes of the largest plane that is stored by columns; 0 without any.
    pub(crate) fn most_by_columns(&self) -> u64 {
        let experts = self.sets.iter().flat_map(|stored| &stored.experts);
        let ranges = experts.flat_map(|(location, _)| location.ranges());
        ranges.filter(|range| range.by_columns.is_some()).map(|range| range.len).max().unwrap_or(0)
    }

    /// Whether an expert's matrices are stored one by one, row after row.
    pub(crate) fn is_separate(&self, set: ExpertSetId, expert: u32) -> bool {
        self.location(set, expert).form == ExpertForm::Separate
    }

    /// The planes of gate, up and down in a slot, for writing; `None` if some share bytes.
    pub(crate) fn planes_mut<'a>(
        &self,
        set: ExpertSetId,
        expert: u32,
        slot: &'a mut [u8],
    ) -> Option<Vec<&'a mut [u8]>> {
        let (location, layout) = &self.sets[set.0].experts[expert as usize];
        let lengths = location.ranges().map(|range| range.len as usize);
        let mut order: Vec<(usize, usize, usize)> =
            layout.at.iter().zip(lengths).enumerate().map(|(plane, (at, len))| (*at, len, plane)).collect();
        order.sort_unstable();
        let mut planes: Vec<Option<&mut [u8]>> = order.iter().map(|_| None).collect();
        let (mut rest, mut start) = (slot, 0);
        for (at, len, plane) in order {
            let (_, from) = rest.split_at_mut_checked(at.checked_sub(start)?)?;
            let (found, after) = from.split_at_mut_checked(len)?;
            planes[plane] = Some(found);
            (rest, start) = (after, at + len);
        }
        planes.into_iter().collect()
    }

    /// Passes samples of up to `len` bytes of every layer's experts to `visit`: of experts spread over the layer, from
    /// the beginning of the first one's planes to the end of the last one's, after how each stores them. All is passed
    /// where experts are few and small; some thousand reads are made at most where they are not.
    ///
    /// # Errors
    /// [`Error::Read`] if the checkpoint cannot be read.
    pub fn sample(&self, len: usize, sets: usize, mut visit: impl FnMut(&[u8])) -> Result<()> {
        let sets = &self.sets[..sets.min(self.sets.len())];
        let each = MOST_SAMPLES / sets.len().max(1);
        let mut bytes = vec![0; len];
        for Stored { experts, .. } in sets {
            let planes = experts.first().map_or(0, |(location, _)| location.ranges().count());
            let count = (each / planes.max(1)).clamp(1, experts.len().max(1));
            let last = (count - 1).max(1);
            for index in 0..count.min(experts.len()) {
                let (location, _) = &experts[index * (experts.len() - 1) / last];
                visit(&[location.form as u8]);
                for range in location.ranges() {
                    let part = &mut bytes[..len.min(usize::try_from(range.len).unwrap_or(len))];
                    let room = range.len - part.len() as u64;
                    let at = (u128::from(room) * index as u128 / last as u128) as u64;
                    self.files[range.file].read_exact_at(range.offset + at, part)?;
                    visit(part);
                }
            }
        }
        Ok(())
    }

    /// The expert's weights in a slot that its reads have filled.
    ///
    /// # Errors
    /// None for a store that [`ExpertStore::new`] has checked and a slot of [`ExpertStore::slot_bytes`].
    pub fn view<'a>(&self, set: ExpertSetId, expert: u32, slot: &'a [u8]) -> Result<ExpertView<'a>> {
        let Stored { set: spec, experts, .. } = &self.sets[set.0];
        let (location, layout) = &experts[expert as usize];
        let mut at =
            location.ranges().zip(&layout.at).map(|(range, at)| &slot[*at..*at + range.len as usize]);
        let mut planes = |ranges: &[ByteRange]| -> Vec<&[u8]> { at.by_ref().take(ranges.len()).collect() };
        let (gate, up, down) = (planes(&location.gate), planes(&location.up), planes(&location.down));
        let matrix =
            |spec: MatrixSpec, planes: &[&'a [u8]]| TensorView::new(spec.dtype, spec.rows, spec.cols, planes);
        let MatrixSpec { dtype, rows, cols } = spec.up;
        let transposed = |spec: MatrixSpec, planes: &[&'a [u8]]| {
            TensorView::transposed(spec.dtype, spec.rows, spec.cols, planes[0])
        };
        let ([gate, up], down) = match location.form {
            ExpertForm::Separate | ExpertForm::DownTransposed => {
                let gate = spec.gate.map(|spec| matrix(spec, &gate)).transpose()?;
                let up = matrix(spec.up, &up)?;
                let down = match location.form {
                    ExpertForm::DownTransposed => transposed(spec.down, &down)?,
                    _ => matrix(spec.down, &down)?,
                };
                return Ok(ExpertView { id: expert, gate, up, down });
            }
            ExpertForm::Interleaved => {
                (TensorView::interleaved(dtype, rows, cols, &gate)?, matrix(spec.down, &down)?)
            }
            ExpertForm::InterleavedTransposed | ExpertForm::HalvesTransposed => (
                match location.form {
                    ExpertForm::HalvesTransposed => {
                        let both = TensorView::transposed(dtype, 2 * rows, cols, gate[0])?;
                        [both.rows_range(0..rows), both.rows_range(rows..2 * rows)]
                    }
                    _ => TensorView::interleaved_transposed(dtype, rows, cols, gate[0])?,
                },
                transposed(spec.down, &down)?,
            ),
        };
        Ok(ExpertView { id: expert, gate: Some(gate), up, down })
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Crafted files may have tensors in tensors; every range lies in the run that it is read with.
    #[test]
    fn a_run_covers_all_of_its_ranges() {
        let check = |ranges: [(u64, u64); 3], expected: &[(u64, u64)]| {
            let range = |(offset, len)| vec![ByteRange { file: 0, offset, len, by_columns: None }];
            let [gate, up, down] = ranges.map(range);
            let layout = SlotLayout::new(&ExpertLocation { form: ExpertForm::Separate, gate, up, down });
            let runs: Vec<(u64, u64)> = layout.runs.iter().map(|(run, _)| (run.offset, run.len)).collect();
            assert_eq!(runs, expected, "{ranges:?}");
            for ((offset, len), at) in ranges.into_iter().zip(&layout.at) {
                let covers = |(run, start): &&(ByteRange, usize)| {
                    let within = offset.wrapping_sub(run.offset);
                    within.saturating_add(len) <= run.len && *at == start + within as usize
                };
                assert!(layout.runs.iter().any(|run| covers(&run)), "{offset} +{len} of {ranges:?}");
            }
        };
        check([(0, 3000), (3000, 3000), (20_000, 500)], &[(0, 6000), (20_000, 500)]);
        check([(0, 9000), (100, 200), (5000, 3000)], &[(0, 9000)]);
        check([(100, 200), (0, 9000), (8000, 3000)], &[(0, 11_000)]);
        check([(0, 9000), (0, 10), (9100, 100)], &[(0, 9200)]);
    }
}

//! The most likely tokens of a batch's logits, found on the device: what crosses to the host is a few kilobytes a row.

use super::bytes_of;
use crate::Result;
use crate::backend::Candidates;
use crate::gpu::arguments::{CandidateConstants, SegmentConstants};
use crate::gpu::device::{BufferId, Device, Dispatch, Slice};
use crate::gpu::lower::Launch;

/// As in `kernels/candidates.h`.
const MOST_CANDIDATES: usize = 256;
const HEAD: usize = 4;
const ROW_WORDS: usize = HEAD + 2 * MOST_CANDIDATES;
/// Candidates of a row at least, where it has as many segments; and the most segments of a row, for which the kernels have
/// room.
const LEAST: usize = 128;
const SEGMENTS: usize = 512;
/// Elements that a segment is a multiple of.
const LANES: usize = 32;
const THREADS: u32 = 256;
const WARPS: usize = 8;

/// Memory for candidates, which grows with batches.
#[derive(Debug, Default)]
pub(super) struct CandidateBuffers {
    rows: usize,
    buffers: Option<[BufferId; 2]>,
}

/// Elements of a segment.
fn segment(vocab: usize) -> usize {
    vocab.div_ceil(SEGMENTS).next_multiple_of(LANES)
}

impl CandidateBuffers {
    /// Candidates among the first `tokens` of each of `rows` rows of `vocab` logits.
    pub(super) fn find(
        &mut self,
        device: &mut dyn Device,
        logits: Slice,
        rows: usize,
        [vocab, tokens]: [usize; 2],
    ) -> Result<Vec<Candidates>> {
        let segments = vocab.div_ceil(segment(vocab));
        let [maxima, results] = self.grown(device, rows, segments)?;
        device.run(&dispatches(logits, [maxima.into(), results.into()], rows, [vocab, tokens, segments]))?;
        let mut words = vec![0.0; rows * ROW_WORDS];
        device.download(results.into(), bytes_of(&mut words))?;
        Ok(words.chunks_exact(ROW_WORDS).map(of_row).collect())
    }

    fn grown(&mut self, device: &mut dyn Device, rows: usize, segments: usize) -> Result<[BufferId; 2]> {
        if let Some(buffers) = self.buffers.filter(|_| rows <= self.rows) {
            return Ok(buffers);
        }
        for buffer in self.buffers.take().into_iter().flatten() {
            device.free(buffer);
        }
        let room = rows.next_power_of_two();
        let maxima = device.alloc(room * segments * 8)?;
        let buffers = match device.alloc(room * ROW_WORDS * 4) {
            Ok(results) => [maxima, results],
            Err(error) => {
                device.free(maxima);
                return Err(error);
            }
        };
        // Places of candidates that are not there are read too.
        device.clear(buffers[1].into(), room * ROW_WORDS * 4)?;
        (self.buffers, self.rows) = (Some(buffers), room);
        Ok(buffers)
    }
}

fn dispatches(
    logits: Slice,
    [maxima, results]: [Slice; 2],
    rows: usize,
    [vocab, tokens, segments]: [usize; 3],
) -> [Dispatch; 2] {
    let each = segment(vocab);
    let of_segments = &SegmentConstants { vocab, segments, each, tokens };
    let of_rows = &CandidateConstants { vocab, segments, each, tokens, least: LEAST.min(segments) };
    let unit = "candidates";
    let (row, whole) = ([logits, maxima], [logits, maxima, results]);
    let parts = Launch { unit, kernel: "segment_maxima", buffers: &row, constants: of_segments };
    let all = Launch { unit, kernel: "candidates", buffers: &whole, constants: of_rows };
    [parts.over([segments.div_ceil(WARPS), rows, 1], THREADS), all.over([rows, 1, 1], THREADS)]
}

fn of_row(words: &[f32]) -> Candidates {
    let count = words[3].to_bits() as usize;
    let count = if count <= MOST_CANDIDATES { count } else { 0 };
    let (ids, logits) = words[HEAD..].split_at(MOST_CANDIDATES);
    let tokens = ids.iter().map(|id| id.to_bits()).zip(logits.iter().copied()).take(count).collect();
    Candidates { maximum: words[0], total: words[1], least: words[2], tokens }
}

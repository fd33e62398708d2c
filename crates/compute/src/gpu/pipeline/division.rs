//! Which layers each of several devices gets.
//!
//! As few of the devices as hold the whole model, in the order in which they are given: work passes from one to the next, so
//! that more of them make no token faster. Layers are divided so that what they have fills the memory of all devices alike;
//! where it does not fit, every device holds the same part of its experts.

use std::ops::Range;

use crate::Result;
use crate::backend::CompileOptions;
use crate::gpu::device::DeviceInfo;
use crate::gpu::memory::{Held, own_bytes, whole_memory};
use crate::gpu::steps::{buffers, steps};
use crate::graph::{Graph, Part};

/// A device to divide layers over: what it is, and bytes of its memory that may be used.
pub(in crate::gpu) struct Place {
    pub(in crate::gpu) info: DeviceInfo,
    pub(in crate::gpu) memory: u64,
}

/// Parts of `graph` for the first of `places`, one each; with `spread`, for all of them that there are layers for.
///
/// # Errors
/// [`crate::Error::RowLength`] if an encoding cannot store a weight's rows.
pub(in crate::gpu) fn divide(
    graph: &Graph,
    places: &[Place],
    options: &CompileOptions,
    spread: bool,
) -> Result<Vec<Part>> {
    let pieces = pieces(graph);
    let most = places.len().min(pieces.len());
    let sizes = pieces.iter().map(|piece| own_bytes(&graph.part_without_ends(piece.clone()).graph, options));
    let sizes = sizes.collect::<Result<Vec<_>>>()?;
    let of = |places: &[Place]| -> Result<Vec<Part>> {
        let whole = held(graph.part(0..graph.nodes().len()), &places[0], options)?;
        let fixed = whole.saturating_sub(sizes.iter().sum());
        let memories: Vec<u64> = places.iter().map(|place| place.memory).collect();
        let ends = balance(&sizes, fixed, &memories);
        let mut start = 0;
        let part = |end: usize| {
            let nodes = pieces[start].start..pieces[end - 1].end;
            start = end;
            graph.part(nodes)
        };
        Ok(ends.into_iter().map(part).collect())
    };
    if !spread {
        for count in 1..most {
            let parts = of(&places[..count])?;
            let mut fits = true;
            for (part, place) in parts.iter().zip(places) {
                fits &= held(part.clone(), place, options)? <= place.memory;
            }
            if fits {
                return Ok(parts);
            }
        }
    }
    of(&places[..most])
}

/// Bytes of a device's memory that hold all of a part.
fn held(part: Part, place: &Place, options: &CompileOptions) -> Result<u64> {
    let Part { graph, ends, .. } = part;
    let buffers = buffers(&graph, &ends, &steps(&graph, &ends));
    whole_memory(&place.info, &graph, &buffers, options, Held::ALL)
}

/// Nodes between the places where a graph can be cut.
fn pieces(graph: &Graph) -> Vec<Range<usize>> {
    let mut start = 0;
    let ends = graph.cuts().into_iter().chain([graph.nodes().len()]);
    ends.map(|end| std::mem::replace(&mut start, end)..end).collect()
}

/// Cuts pieces of `sizes` bytes into as many runs as there are memories, none of them empty, so that the fullest memory is as
/// empty as can be, where every one holds `fixed` bytes besides: where each run ends.
fn balance(sizes: &[u64], fixed: u64, memories: &[u64]) -> Vec<usize> {
    let (pieces, runs) = (sizes.len(), memories.len());
    let sums: Vec<u64> = std::iter::once(0)
        .chain(sizes.iter().scan(0u64, |sum, size| {
            *sum = sum.saturating_add(*size);
            Some(*sum)
        }))
        .collect();
    let filled = |from: usize, to: usize, run: usize| {
        (fixed + sums[to] - sums[from]) as f64 / memories[run].max(1) as f64
    };
    // Of the first pieces in the first runs: how full the fullest is, and where the last run begins.
    let mut best = vec![vec![(f64::INFINITY, 0); pieces + 1]; runs];
    for (to, first) in best[0].iter_mut().enumerate().skip(1) {
        *first = (filled(0, to, 0), 0);
    }
    for run in 1..runs {
        for to in run + 1..=pieces {
            for from in run..to {
                let fullest = best[run - 1][from].0.max(filled(from, to, run));
                if fullest < best[run][to].0 {
                    best[run][to] = (fullest, from);
                }
            }
        }
    }
    let mut ends = vec![pieces];
    for run in (1..runs).rev() {
        ends.push(best[run][ends[ends.len() - 1]].1);
    }
    ends.reverse();
    ends
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memories_are_filled_alike() {
        let check = |sizes: &[u64], fixed: u64, memories: &[u64], expected: &[usize]| {
            assert_eq!(balance(sizes, fixed, memories), expected, "{sizes:?}, {fixed}, {memories:?}");
        };
        check(&[10; 8], 0, &[100, 100], &[4, 8]);
        check(&[10; 9], 0, &[100, 50], &[6, 9]);
        check(&[10; 8], 0, &[100, 100, 100, 100], &[2, 4, 6, 8]);
        // A table of embeddings in front, and the head behind.
        check(&[50, 10, 10, 10, 10, 10], 0, &[100, 100], &[1, 6]);
        // What every device holds besides counts for more on a small one.
        check(&[10; 9], 45, &[100, 50], &[8, 9]);
        // No run is empty.
        check(&[1, 1, 1000], 0, &[10, 10, 10], &[1, 2, 3]);
        check(&[7], 3, &[10], &[1]);
    }
}

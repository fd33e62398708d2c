//! Makes weights in pieces on several threads and hands them over in file order.

use std::ops::Range;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

use super::weights::Weight;
use super::{Outcome, Plan};
use crate::Result;

/// Bytes of a piece, about: large writes, small enough that a few of them wait in memory.
const PIECE_BYTES: usize = 8 << 20;
/// Pieces that a thread may have ready.
const READY: usize = 2;

/// A part of the file that one thread makes.
#[derive(Debug, Clone)]
enum Piece {
    /// All planes of a small weight.
    Whole(usize),
    /// Rows of a plane of a large one.
    Rows { weight: usize, plane: usize, rows: Range<usize> },
}

/// The pieces of `weights`, in file order.
fn pieces(weights: &[Weight]) -> impl Iterator<Item = Piece> {
    weights.iter().enumerate().flat_map(|(index, weight)| {
        let whole = (!weight.is_random()).then_some(Piece::Whole(index));
        let planes = if weight.is_random() { weight.dtype.planes() } else { 0 };
        let rows = (0..planes).flat_map(move |plane| {
            let step = (PIECE_BYTES / weight.row_bytes(plane)).max(1);
            let all = weight.plane_rows(plane);
            let starts = (0..all).step_by(step);
            starts.map(move |start| Piece::Rows {
                weight: index,
                plane,
                rows: start..(start + step).min(all),
            })
        });
        whole.into_iter().chain(rows)
    })
}

/// The bytes of `piece`: of several planes, or of rows of one.
fn make(weights: &[Weight], seed: u64, piece: &Piece) -> Result<Vec<Vec<u8>>> {
    match piece {
        Piece::Whole(index) => weights[*index].whole([seed, *index as u64, 0]),
        Piece::Rows { weight: index, plane, rows } => {
            let weight = &weights[*index];
            // Scales and biases of an affine encoding belong together.
            let kind = u64::from(*plane > 0);
            let key = [seed, *index as u64, (rows.start as u64) << 1 | kind];
            let mut out = vec![0; rows.len() * weight.row_bytes(*plane)];
            weight.fill(*plane, rows.start, key, &mut out);
            Ok(vec![out])
        }
    }
}

/// Makes all weights of `plan` and hands their bytes to `write` in file order; each call is within one plane.
///
/// # Errors
/// Those of `write`.
pub(super) fn for_each(
    plan: &Plan,
    threads: usize,
    write: &mut dyn FnMut(&[u8]) -> Result<()>,
    progress: &mut dyn FnMut(u64) -> bool,
) -> Result<Outcome> {
    let (weights, seed) = (&plan.weights[..], plan.recipe.seed);
    let threads = threads.max(1);
    thread::scope(|scope| {
        // Thread i makes every threads-th piece from the i-th on, so taking turns restores the order. A thread ends
        // when its receiver is dropped.
        let workers: Vec<Receiver<Result<Vec<Vec<u8>>>>> = (0..threads)
            .map(|first| {
                let (sender, receiver) = sync_channel(READY);
                scope.spawn(move || {
                    for piece in pieces(weights).skip(first).step_by(threads) {
                        if sender.send(make(weights, seed, &piece)).is_err() {
                            return;
                        }
                    }
                });
                receiver
            })
            .collect();
        let mut written = 0;
        for worker in workers.iter().cycle() {
            let Ok(piece) = worker.recv() else { break };
            for bytes in piece? {
                write(&bytes)?;
                written += bytes.len() as u64;
            }
            if !progress(written) {
                return Ok(Outcome::Stopped);
            }
        }
        Ok(Outcome::Complete)
    })
}

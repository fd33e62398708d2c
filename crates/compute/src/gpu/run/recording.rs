//! Running lists of dispatches: as they are, or as a device has recorded them, and the host's part between them.

use std::collections::HashMap;

use crate::Result;
use crate::backend::ExpertSource;
use crate::gpu::device::{Device, Dispatch, RecordingId, Slice};
use crate::gpu::lower::{Piece, lower, meeting};
use crate::gpu::memory::{BATCH_ROWS, Ending, Exchange, FEW_ROWS, Memory, Shape};
use crate::gpu::processor::Beside;
use crate::gpu::steps::{Buffers, Step};
use crate::graph::Graph;

/// Pairs for each expert from which on all experts are taken to be chosen: at 4, chance leaves out one in fifty.
const ALL_CHOSEN: usize = 4;

/// Lists of dispatches that are kept, at most.
const MOST_RECORDINGS: usize = 128;

/// Dispatches of one batch shape, recorded once they have been used before.
type Recording = Vec<Piece<RecordingId>>;

/// What a batch runs, in order.
pub(in crate::gpu) enum Listed {
    Once(Vec<Piece<Vec<Dispatch>>>),
    Recorded(Recording),
}

impl Listed {
    /// Its pieces.
    pub(in crate::gpu) fn pieces(&self) -> usize {
        match self {
            Self::Once(pieces) => pieces.len(),
            Self::Recorded(pieces) => pieces.len(),
        }
    }
}

/// What is recorded, by batch shape; nothing yet for shapes that were seen once.
#[derive(Default)]
pub(super) struct Recordings {
    of: HashMap<Shape, Option<Recording>>,
    /// Whether the last batch was the replay of one that was there.
    replayed: bool,
}

impl Recordings {
    pub(super) fn replayed(&self) -> bool {
        self.replayed
    }

    /// Takes back what has run for a shape, to the end or not.
    pub(super) fn keep(&mut self, device: &mut dyn Device, shape: Shape, listed: Listed, ended: bool) {
        match listed {
            Listed::Recorded(recording) => {
                self.of.insert(shape, Some(recording));
            }
            Listed::Once(_) if ended && repeats(&shape) && !self.of.contains_key(&shape) => {
                if self.of.len() >= MOST_RECORDINGS {
                    self.forget(device);
                }
                self.of.insert(shape, None);
            }
            Listed::Once(_) => {}
        }
    }

    /// Forgets what was recorded: buffers have moved.
    pub(super) fn forget(&mut self, device: &mut dyn Device) {
        for recording in std::mem::take(&mut self.of).into_values().flatten().flatten() {
            let (Piece::Run(id) | Piece::Experts { body: id, .. }) = recording;
            device.forget(id);
        }
    }
}

/// A graph's steps with the device that they run on.
pub(super) struct Runner<'a> {
    pub(super) device: &'a mut dyn Device,
    pub(super) graph: &'a Graph,
    pub(super) steps: &'a [Step],
    pub(super) buffers: &'a Buffers,
    pub(super) memory: &'a mut Memory,
    pub(super) source: &'a mut dyn ExpertSource,
    pub(super) beside: Option<&'a mut Beside>,
}

impl Runner<'_> {
    /// What to run for this shape: once as it is, from its second use on as a recording. It is to be given to
    /// [`Recordings::keep`] when it has run.
    pub(super) fn list(&mut self, recordings: &mut Recordings, shape: Shape) -> Result<Listed> {
        recordings.replayed = matches!(recordings.of.get(&shape), Some(Some(_)));
        if !repeats(&shape) || !recordings.of.contains_key(&shape) {
            return Ok(self.once(shape));
        }
        let recording = recordings.of.get_mut(&shape).and_then(Option::take);
        recording.map_or_else(|| self.record(shape), Ok).map(Listed::Recorded)
    }

    /// What to run for this shape as it is.
    pub(super) fn once(&self, shape: Shape) -> Listed {
        Listed::Once(self.lower(shape))
    }

    /// Runs a piece of a list.
    pub(super) fn run_listed(&mut self, listed: &Listed, piece: usize) -> Result<()> {
        match listed {
            Listed::Once(pieces) => {
                self.run_piece(&pieces[piece], |device, list: &Vec<Dispatch>| device.run(list))
            }
            Listed::Recorded(pieces) => {
                self.run_piece(&pieces[piece], |device, id: &RecordingId| device.replay(*id))
            }
        }
    }

    fn lower(&self, shape: Shape) -> Vec<Piece<Vec<Dispatch>>> {
        let steps = match shape.ending {
            Ending::Logits => self.steps,
            // The head comes last.
            Ending::Hidden => &self.steps[..self.steps.len() - 1],
        };
        lower(self.graph, steps, self.buffers, self.memory, shape)
    }

    fn record(&mut self, shape: Shape) -> Result<Recording> {
        let mut recording = vec![];
        let pieces = self.lower(shape);
        let pieces = match &self.memory.exchange {
            Some(exchange) if self.device.waits_in_recordings() => vec![joined(pieces, exchange)],
            _ => pieces,
        };
        for piece in pieces {
            recording.push(match piece {
                Piece::Run(list) => Piece::Run(self.device.record(list)?),
                Piece::Experts { set, ids, pairs, hands, once, body } => {
                    Piece::Experts { set, ids, pairs, hands, once, body: self.device.record(body)? }
                }
            });
        }
        Ok(recording)
    }

    fn run_piece<D>(
        &mut self,
        piece: &Piece<D>,
        run: impl Fn(&mut dyn Device, &D) -> Result<()>,
    ) -> Result<()> {
        match piece {
            Piece::Run(list) => run(self.device, list),
            Piece::Experts { set, ids, pairs, hands, body, .. } => {
                let experts = self.graph.expert_sets()[set.0].experts;
                // So many tokens ask for every expert, or nearly: not worth waiting for their choice.
                let all = self.memory.experts.tiers().is_some() && *pairs >= ALL_CHOSEN * experts;
                let mut beside = self.beside.as_deref_mut().filter(|_| *hands);
                let mut ids = match &mut beside {
                    Some(beside) => beside.ids(self.device, *pairs)?,
                    None if all => (0..experts as u32).collect(),
                    None => ids_of(self.device, *ids, *pairs)?,
                };
                // Those beyond return what they take.
                ids.retain(|id| (*id as usize) < experts);
                if let Some((tiers, slots, _)) = self.memory.experts.tiers() {
                    let chosen = &mut ids;
                    chosen.sort_unstable();
                    chosen.dedup();
                    return tiers.stream(self.device, slots, *set, chosen, |device| run(device, body));
                }
                let experts = &mut self.memory.experts;
                experts.pass(self.device, (*set, &ids), self.source, beside, |device| run(device, body))
            }
        }
    }
}

/// Pieces that run without the host as one, in which devices meet.
fn joined(pieces: Vec<Piece<Vec<Dispatch>>>, exchange: &Exchange) -> Piece<Vec<Dispatch>> {
    let mut all = vec![];
    for piece in pieces {
        let (Piece::Run(list) | Piece::Experts { body: list, .. }) = piece;
        if !all.is_empty() {
            all.push(meeting(exchange));
        }
        all.extend(list);
    }
    Piece::Run(all)
}

/// Whether batches of a shape come again: prompts are seldom of one length twice.
fn repeats(shape: &Shape) -> bool {
    let decodes = shape.rows <= FEW_ROWS || shape.rows <= BATCH_ROWS && shape.rows == shape.sequences;
    decodes && shape.ending == Ending::Logits
}

/// The ids of a routing.
fn ids_of(device: &mut dyn Device, ids: Slice, pairs: usize) -> Result<Vec<u32>> {
    let mut bytes = vec![0; pairs * 4];
    device.download(ids, &mut bytes)?;
    Ok(bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect())
}

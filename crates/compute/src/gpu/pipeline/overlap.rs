//! Several batches under way: while the last device computes one, each of those before it computes another one.
//!
//! What chooses tokens is known only when a batch is to end, and must come before what is queued behind it on the last device.
//! So a batch is queued there once the one before is to end. Until then it is kept here, and its values wait where the device
//! before has left them; those behind it wait on the devices before that one.
//! Only where every expert has a place on its device for good: else the host is needed in the middle of a batch.

use std::collections::VecDeque;
use std::time::Instant;

use super::{PipelineExecutable, on_device};
use crate::backend::{Batch, Chosen, Embeddings, Executable, ExpertSource, Overlap, Span, StateSlots};
use crate::draw::Draw;
use crate::gpu::run::Way;
use crate::{Error, Result};

/// A batch that waits for a device.
#[derive(Debug)]
struct Waiting {
    tokens: Vec<u32>,
    spans: Vec<WaitingSpan>,
    outputs: Vec<u32>,
    rows: Vec<f32>,
    embeddings: (Vec<u32>, Vec<f32>),
    positions: Vec<[u32; 3]>,
    sees: Vec<u32>,
}

#[derive(Debug)]
struct WaitingSpan {
    rows: std::ops::Range<usize>,
    start: usize,
    pages: Vec<u32>,
    slots: StateSlots,
    adapter: Option<u32>,
}

/// Batches that have begun and not ended.
#[derive(Debug, Default)]
pub(super) struct UnderWay {
    /// Rows of the one on the last device.
    last: Option<usize>,
    /// Those behind it, the oldest first: its values are on the device before the last, those of the next on the one before that.
    waiting: VecDeque<Waiting>,
    /// When a batch ended, if all devices have had one since.
    ended: Option<Instant>,
}

impl Waiting {
    fn of(batch: &Batch<'_>) -> Self {
        let Batch { tokens, spans, outputs, rows, embeddings, positions, sees } = batch;
        let span = |span: &Span<'_>| WaitingSpan {
            rows: span.rows.clone(),
            start: span.start,
            pages: span.pages.to_vec(),
            slots: span.slots,
            adapter: span.adapter,
        };
        Self {
            tokens: tokens.to_vec(),
            spans: spans.iter().map(span).collect(),
            outputs: outputs.to_vec(),
            rows: rows.to_vec(),
            embeddings: (embeddings.rows.to_vec(), embeddings.values.to_vec()),
            positions: positions.to_vec(),
            sees: sees.to_vec(),
        }
    }

    /// Gives `run` the batch.
    fn with<T>(&self, run: impl FnOnce(&Batch<'_>) -> T) -> T {
        let Self { tokens, spans, outputs, rows, embeddings, positions, sees } = self;
        let spans: Vec<Span<'_>> = spans.iter().map(WaitingSpan::span).collect();
        let embeddings = Embeddings { rows: &embeddings.0, values: &embeddings.1 };
        run(&Batch { tokens, spans: &spans, outputs, rows, embeddings, positions, sees })
    }
}

impl WaitingSpan {
    fn span(&self) -> Span<'_> {
        let Self { rows, start, pages, slots, adapter } = self;
        Span { rows: rows.clone(), start: *start, pages, slots: *slots, adapter: *adapter }
    }
}

impl UnderWay {
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }
}

fn refused<T>(reason: &str) -> Result<T> {
    Err(Error::Device { reason: reason.to_owned() })
}

impl PipelineExecutable {
    /// Whether a device can go on with a batch while others have another one.
    fn overlaps(&self) -> bool {
        !self.first.is_empty() && self.stages().all(|stage| stage.executable.runs_alone())
    }

    /// As many batches as there are devices, if that is faster for so many sequences.
    pub(super) fn division_of(&self, sequences: usize) -> Option<Overlap> {
        let batches = self.first.len() + 1;
        if sequences > 1 && self.overlaps() { self.turns.overlap(batches, sequences) } else { None }
    }

    pub(super) fn expect_none_under_way(&self) -> Result<()> {
        match self.under_way.last {
            None => Ok(()),
            Some(_) => refused("another batch is under way"),
        }
    }

    /// After an error nothing is under way.
    pub(super) fn forgetting<T>(&mut self, outcome: Result<T>) -> Result<T> {
        if outcome.is_err() {
            self.under_way.forget();
        }
        outcome
    }

    pub(super) fn begin_batch(&mut self, batch: &Batch<'_>, experts: &mut dyn ExpertSource) -> Result<()> {
        if !self.overlaps() {
            return refused("batches one after the other only");
        }
        let free = self.first.len() - self.under_way.waiting.len();
        if free == 0 {
            return refused("every device has a batch under way");
        }
        self.advance(0..free, batch, experts)?;
        if self.under_way.last.is_some() {
            self.under_way.waiting.push_back(Waiting::of(batch));
            return Ok(());
        }
        self.ended = None;
        self.enter_last(batch, experts)
    }

    /// Queues on the last device what those before have queued.
    fn enter_last(&mut self, batch: &Batch<'_>, experts: &mut dyn ExpertSource) -> Result<()> {
        self.hand_over_to_last(batch.tokens.len())?;
        self.last.with(experts, |last, experts| last.start(batch, experts))?;
        self.under_way.last = Some(batch.tokens.len());
        Ok(())
    }

    /// Every batch that waits goes to the next device.
    fn follow(&mut self, experts: &mut dyn ExpertSource) -> Result<()> {
        let Some(next) = self.under_way.waiting.pop_front() else { return Ok(()) };
        next.with(|batch| self.enter_last(batch, experts))?;
        let waiting = std::mem::take(&mut self.under_way.waiting);
        for (behind, waiting) in waiting.iter().enumerate() {
            let to = self.first.len() - 1 - behind;
            waiting.with(|batch| {
                self.hand_over_to(to, batch.tokens.len())?;
                self.advance(to..to + 1, batch, experts)
            })?;
        }
        self.under_way.waiting = waiting;
        Ok(())
    }

    pub(super) fn end_batch(
        &mut self,
        draws: &mut dyn FnMut() -> Vec<Option<Draw>>,
        vocab_size: usize,
        experts: &mut dyn ExpertSource,
    ) -> Result<Vec<Chosen>> {
        let Some(rows) = self.under_way.last.take() else { return refused("no batch is under way") };
        let mut draws = draws();
        draws.resize(rows, None);
        let all_had_one = self.under_way.waiting.len() == self.first.len();
        let number = self.last.number;
        let queued = self.last.with(experts, |last, _| last.choose(&draws, vocab_size))?;
        // What follows overwrites logits.
        let (left, mut logits): (Vec<usize>, _) = (queued.left().collect(), VecDeque::new());
        for row in &left {
            let mut own = vec![];
            self.last.with(experts, |last, _| last.read_logits(*row, &mut own))?;
            logits.push_back(own);
        }
        self.follow(experts)?;
        let tokens = self.last.with(experts, |last, _| last.read_chosen(queued))?;
        let ended = Instant::now();
        if let Some(before) = self.under_way.ended.filter(|_| all_had_one) {
            self.turns.add(Way::Overlapped, rows, ended - before);
        }
        self.under_way.ended = all_had_one.then_some(ended);
        let chosen = tokens.into_iter().enumerate().map(|(row, token)| match token {
            Some(token) => Some(Chosen::Token(token)),
            None if left.contains(&row) => logits.pop_front().map(Chosen::Logits),
            None => None,
        });
        let none = || on_device(number, Error::Device { reason: "no token can be chosen".to_owned() });
        chosen.collect::<Option<Vec<_>>>().ok_or_else(none)
    }
}

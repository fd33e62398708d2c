//! Two batches under way: while the last device computes one, those before it compute the next.
//!
//! What chooses tokens waits for all that is queued on the last device, so a batch is queued there once the one before has ended.
//! Until then it is kept here, and its values wait where the device before has left them: a third batch would overwrite them.
//! Only where every expert has a place on its device for good: else the host is needed in between.

use std::time::Instant;

use super::PipelineExecutable;
use crate::backend::{Batch, Chosen, ExpertSource, Span, StateSlots};
use crate::draw::Draw;
use crate::gpu::run::Turns;
use crate::{Error, Result};

/// A batch that waits for the last device.
#[derive(Debug)]
struct Waiting {
    tokens: Vec<u32>,
    spans: Vec<WaitingSpan>,
    outputs: Vec<u32>,
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
    waiting: Option<Waiting>,
    /// When a batch ended behind which another one was under way.
    ended: Option<Instant>,
    turns: Turns,
}

impl Waiting {
    fn of(batch: &Batch<'_>) -> Self {
        let span = |span: &Span<'_>| WaitingSpan {
            rows: span.rows.clone(),
            start: span.start,
            pages: span.pages.to_vec(),
            slots: span.slots,
            adapter: span.adapter,
        };
        Self {
            tokens: batch.tokens.to_vec(),
            spans: batch.spans.iter().map(span).collect(),
            outputs: batch.outputs.to_vec(),
        }
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
        (self.last, self.waiting, self.ended) = (None, None, None);
    }
}

fn refused<T>(reason: &str) -> Result<T> {
    Err(Error::Device { reason: reason.to_owned() })
}

impl PipelineExecutable {
    /// Rows of each of two batches under way, for so many sequences.
    pub(super) fn rows_of_two(&self, sequences: usize) -> Option<usize> {
        let alone = !self.first.is_empty() && self.stages().all(|stage| stage.executable.runs_alone());
        (alone && sequences > 1).then(|| self.under_way.turns.decode_rows(sequences.div_ceil(2)))
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
        if self.rows_of_two(2).is_none() {
            return refused("batches one after the other only");
        }
        if self.under_way.waiting.is_some() {
            return refused("two batches are under way");
        }
        self.advance(batch, experts)?;
        if self.under_way.last.is_some() {
            self.under_way.waiting = Some(Waiting::of(batch));
            return Ok(());
        }
        self.enter_last(batch, experts)
    }

    /// Queues on the last device what those before have queued.
    fn enter_last(&mut self, batch: &Batch<'_>, experts: &mut dyn ExpertSource) -> Result<()> {
        self.hand_over_to_last(batch.tokens.len())?;
        self.last.with(experts, |last, experts| last.start(batch, experts))?;
        self.under_way.last = Some(batch.outputs.len());
        Ok(())
    }

    pub(super) fn end_batch(
        &mut self,
        draws: &mut dyn FnMut() -> Vec<Option<Draw>>,
        vocab_size: usize,
        experts: &mut dyn ExpertSource,
    ) -> Result<Vec<Chosen>> {
        let Some(rows) = self.under_way.last.take() else { return refused("no batch is under way") };
        let draws = draws();
        let chosen = self.last.with(experts, |last, _| last.choose(rows, &draws, vocab_size))?;
        let now = Instant::now();
        if let Some(before) = self.under_way.ended.take() {
            self.under_way.turns.add(rows, now - before);
        }
        if let Some(Waiting { tokens, spans, outputs }) = self.under_way.waiting.take() {
            let spans: Vec<Span<'_>> = spans.iter().map(WaitingSpan::span).collect();
            let batch = Batch { tokens: &tokens, spans: &spans, outputs: &outputs, ..Batch::default() };
            self.enter_last(&batch, experts)?;
            self.under_way.ended = Some(now);
        }
        Ok(chosen)
    }
}

//! Answers by two batches under way at once, where several GPUs have layers in a row.
//!
//! Only while nothing but next tokens of answers is to be evaluated: before anything else, the batch that has begun is ended.

use std::time::Instant;

use moeflux_compute::backend::Chosen;

use super::Worker;
use super::evaluate::{Row, draws, part_and_task};
use crate::batch::Part;
use crate::overlap::Begun;
use crate::scheduler::lock;
use crate::scheduler::sequence::{Kind, Sequence, Task};

/// A batch that has begun.
pub(super) struct Ahead {
    /// Its sequences.
    numbers: Vec<u64>,
    begun: Begun,
    since: Instant,
}

impl Ahead {
    pub(super) fn has(&self, sequence: &Sequence<'_>) -> bool {
        self.numbers.contains(&sequence.number)
    }
}

impl Worker<'_> {
    /// Whether a batch has begun and something else than next tokens may have to be done.
    pub(super) fn is_disturbed(&self) -> bool {
        if self.ahead.is_none() {
            return false;
        }
        let room = self.running.len() < self.engine.sequences();
        let waiting = !self.put_back.is_empty() || !lock(&self.shared.queue).jobs.is_empty();
        room && waiting || self.running.iter().any(Sequence::is_cancelled)
    }

    /// Begins a batch of sequences that none has begun for, and ends the one before; `false` if there are to be no two, and none has
    /// begun.
    pub(super) fn step_overlapped(&mut self) -> bool {
        let Some(chosen) = self.next_chosen() else {
            self.end_ahead();
            return false;
        };
        let before = self.ahead.take();
        if !chosen.is_empty() {
            let mut parts: Vec<Part<'_>> = vec![];
            for (index, sequence) in self.running.iter_mut().enumerate() {
                if chosen.contains(&index) {
                    parts.push(part_and_task(sequence, 1).0);
                }
            }
            let begun = self.engine.begin(&mut parts);
            let Ok(begun) = begun else {
                // It will be met again where batches are evaluated one after the other.
                self.forget(before);
                return false;
            };
            let of = |(index, sequence): (usize, &Sequence<'_>)| {
                chosen.contains(&index).then_some(sequence.number)
            };
            let numbers = self.running.iter().enumerate().filter_map(of).collect();
            self.ahead = Some(Ahead { numbers, begun, since: Instant::now() });
        }
        if let Some(before) = before {
            self.end(before);
        }
        true
    }

    /// Ends the batch that has begun, if one has.
    pub(super) fn end_ahead(&mut self) {
        if let Some(ahead) = self.ahead.take() {
            self.end(ahead);
        }
    }

    /// The sequences of the next of two batches: those that have waited longest for a token. `None` if there are to be no two.
    fn next_chosen(&self) -> Option<Vec<usize>> {
        let next = |s: &Sequence<'_>| s.kind() == Kind::Answers && s.pending() == 1;
        if !self.running.iter().all(next) {
            return None;
        }
        let rows = self.engine.overlapped_rows(self.running.len())?;
        let idle = |index: &usize| self.ahead.as_ref().is_none_or(|ahead| !ahead.has(&self.running[*index]));
        let mut chosen: Vec<usize> = (0..self.running.len()).filter(idle).collect();
        chosen.sort_by_key(|index| match &self.running[*index].task {
            Task::Answer(answering) => answering.last_token,
            Task::Embed(_) => None,
        });
        chosen.truncate(rows);
        let session = |index: &usize| &self.running[*index].session;
        let pages = chosen.iter().map(session).map(|s| s.pages_wanted(s.position(), s.position() + 1));
        (pages.sum::<usize>() <= self.engine.free_pages()).then_some(chosen)
    }

    fn end(&mut self, ahead: Ahead) {
        let given: Vec<usize> = self.running.iter().map(|s| usize::from(ahead.has(s))).collect();
        let vocab_size = self.shared.tokenizer.vocab_size();
        let (mut parts, mut tasks): (Vec<Part<'_>>, Vec<&mut Task<'_>>) = (self.running.iter_mut())
            .filter(|sequence| ahead.has(sequence))
            .map(|sequence| part_and_task(sequence, 1))
            .unzip();
        let mut draws = || draws(tasks.iter_mut().map(|task| (&mut **task, true)));
        let since = ahead.since;
        let ended = self.engine.end(ahead.begun, &mut parts, &mut draws, vocab_size);
        let rows = ended.map(|chosen| rows(chosen, &given));
        match &rows {
            Ok(_) => self.pace.add(given.iter().sum(), 0, since.elapsed()),
            // None is under way then.
            Err(_) => {
                let newer = self.ahead.take();
                self.forget(newer);
            }
        }
        self.conclude(Kind::Answers, &given, rows);
    }

    /// Leaves the sequences of a batch as they were before it began.
    fn forget(&mut self, ahead: Option<Ahead>) {
        let Some(ahead) = ahead else { return };
        let of_batch = self.running.iter_mut().filter(|sequence| ahead.has(sequence));
        let mut parts: Vec<Part<'_>> = of_batch.map(|sequence| part_and_task(sequence, 1).0).collect();
        self.engine.abandon(&mut parts);
    }
}

/// What all sequences got, of those that were given a token what was chosen.
fn rows(chosen: Vec<Chosen>, given: &[usize]) -> Vec<Row> {
    let mut chosen = chosen.into_iter();
    let row = |given: &usize| match if *given > 0 { chosen.next() } else { None } {
        Some(Chosen::Token(token)) => Row::Token(token),
        Some(Chosen::Logits(logits)) => Row::Logits(logits),
        None => Row::None,
    };
    given.iter().map(row).collect()
}

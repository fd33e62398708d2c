//! Answers by several batches under way at once, where several GPUs have layers in a row.
//!
//! Only while nothing but next tokens of answers is to be evaluated: before anything else, all batches that have begun are ended.

use std::time::Instant;

use moeflux_compute::backend::{Chosen, Overlap};

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
    fn has(&self, sequence: &Sequence<'_>) -> bool {
        self.numbers.contains(&sequence.number)
    }
}

impl Worker<'_> {
    /// Whether a sequence is in a batch that has begun.
    pub(super) fn is_ahead(&self, sequence: &Sequence<'_>) -> bool {
        self.ahead.iter().any(|ahead| ahead.has(sequence))
    }

    /// Whether a batch has begun and something else than next tokens may have to be done.
    pub(super) fn is_disturbed(&self) -> bool {
        if self.ahead.is_empty() {
            return false;
        }
        let room = self.running.len() < self.full_with.unwrap_or(self.engine.sequences());
        let waiting = || !self.put_back.is_empty() || !lock(&self.shared.queue).jobs.is_empty();
        room && waiting() || self.running.iter().any(Sequence::is_cancelled)
    }

    /// Begins a batch of sequences that are in none, and ends the oldest once there are as many as can be; `false` if none is to
    /// begin, and none is under way.
    pub(super) fn step_overlapped(&mut self) -> bool {
        let Some((batches, chosen)) = self.next_chosen() else {
            self.end_all_ahead();
            return false;
        };
        let whole = chosen.is_empty() || self.ahead.len() + 1 >= batches;
        if !chosen.is_empty() && !self.begin_ahead(&chosen) {
            return false;
        }
        if whole && !self.ahead.is_empty() {
            self.end_ahead();
        }
        true
    }

    /// Begins a batch of the sequences at these places; if that fails, no batch is under way, and it will fail again where
    /// batches are evaluated one after the other.
    fn begin_ahead(&mut self, chosen: &[usize]) -> bool {
        let since = Instant::now();
        let (mut parts, mut numbers): (Vec<Part<'_>>, Vec<u64>) = (vec![], vec![]);
        for (index, sequence) in self.running.iter_mut().enumerate() {
            if chosen.contains(&index) {
                numbers.push(sequence.number);
                parts.push(part_and_task(sequence, 1).0);
            }
        }
        match self.engine.begin(&mut parts) {
            Ok(begun) => self.ahead.push_back(Ahead { numbers, begun, since }),
            Err(_) => self.forget_ahead(),
        }
        !self.ahead.is_empty()
    }

    /// Ends all batches that have begun.
    pub(super) fn end_all_ahead(&mut self) {
        while !self.ahead.is_empty() {
            self.end_ahead();
        }
    }

    /// How many batches there may be, and the sequences of the next one: those that have waited longest for a token. `None` if
    /// batches are not to overlap.
    fn next_chosen(&mut self) -> Option<(usize, Vec<usize>)> {
        let next = |s: &Sequence<'_>| s.kind() == Kind::Answers && s.pending() == 1;
        if !self.running.iter().all(next) {
            return None;
        }
        let Overlap { batches, rows } = self.engine.overlap(self.running.len())?;
        let mut chosen: Vec<usize> =
            (0..self.running.len()).filter(|index| !self.is_ahead(&self.running[*index])).collect();
        chosen.sort_by_key(|index| match &self.running[*index].task {
            Task::Answer(answering) => answering.last_token,
            Task::Embed(_) => None,
        });
        chosen.truncate(rows);
        let session = |index: &usize| &self.running[*index].session;
        let pages = chosen.iter().map(session).map(|s| s.pages_wanted(s.position(), s.position() + 1)).sum();
        while self.engine.free_pages() < pages {
            if !self.prefixes.evict() {
                return None;
            }
        }
        Some((batches, chosen))
    }

    /// Ends the batch that began first.
    fn end_ahead(&mut self) {
        let Some(Ahead { numbers, begun, since }) = self.ahead.pop_front() else { return };
        let given: Vec<usize> =
            self.running.iter().map(|s| usize::from(numbers.contains(&s.number))).collect();
        let vocab_size = self.shared.tokenizer.vocab_size();
        let (mut parts, mut tasks): (Vec<Part<'_>>, Vec<&mut Task<'_>>) = (self.running.iter_mut())
            .zip(&given)
            .filter(|(_, given)| **given > 0)
            .map(|(sequence, _)| part_and_task(sequence, 1))
            .unzip();
        let mut draws = || draws(tasks.iter_mut().map(|task| (&mut **task, true)));
        let ended = self.engine.end(begun, &mut parts, &mut draws, vocab_size);
        match &ended {
            // Meanwhile all have had a batch.
            Ok(_) => self.pace.add(self.running.len(), 0, since.elapsed()),
            Err(_) => self.forget_ahead(),
        }
        let rows = ended.map(|chosen| rows(chosen, &given));
        let stats = self.engine.take_stats();
        self.conclude(Kind::Answers, &given, &stats, rows);
    }

    /// Leaves all sequences as they were before batches began that have not ended.
    fn forget_ahead(&mut self) {
        let ahead = std::mem::take(&mut self.ahead);
        let has = |sequence: &Sequence<'_>| ahead.iter().any(|ahead| ahead.has(sequence));
        let of_batches = self.running.iter_mut().filter(|sequence| has(sequence));
        let mut parts: Vec<Part<'_>> = of_batches.map(|sequence| part_and_task(sequence, 1).0).collect();
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

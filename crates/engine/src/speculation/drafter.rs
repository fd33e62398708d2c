//! [`Drafter`]: the layer of a checkpoint that drafts tokens, ready to run, and what it does for a session.
//!
//! Its experts come from the engine's cache, as the model's do, and its keys and values are in pages of its own with the numbers of
//! the session's.

use std::ops::Range;
use std::time::{Duration, Instant};

use moeflux_compute::Tensor;
use moeflux_compute::backend::{
    Backend, Batch, Compilation, CompileOptions, DraftMemory, Executable, ExpertSource, ExpertView,
    PAGE_TOKENS, Span,
};
use moeflux_compute::draw::Draw;
use moeflux_compute::graph::ExpertSetId;

use crate::Result;
use crate::engine::Engine;
use crate::experts::usage::Counting;
use crate::fingerprint::Fingerprint;
use crate::models::Draft;
use crate::session::{OwnPage, Session};
use crate::speculation::SpecType;

/// Positions that enter the layer together where it drafts always.
const ENTER_AT: usize = 16;
/// Where it drafts only if that gains, positions that it can still see when it begins to.
const SEEN: usize = 64;

/// Positions that a session keeps hidden states of, at most, besides those of one batch.
pub(crate) const KEPT_HIDDEN: usize = 2 * SEEN;

/// What is wanted of an entry besides that it is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Nothing,
    /// The token that it predicts.
    Token,
    /// That, and the logits that it is chosen by.
    Logits,
}

/// A compiled [`Draft`].
pub(crate) struct Drafter {
    pub(crate) executable: Box<dyn Executable>,
    first_set: usize,
    /// What its keys and values depend on besides the model's.
    pub(crate) fingerprint: String,
    /// Of the last batch, if they are here.
    logits: Vec<f32>,
    /// The token that the last batch predicts.
    best: Option<u32>,
    /// The batch's rows, (tokens, hidden_size).
    rows: Vec<f32>,
    /// Whether all batches of the last draft were of kinds for which everything is made ready.
    ready: bool,
}

impl Drafter {
    /// What a draft is compiled for beside a model: rows of one sequence, of which the last one's logits are wanted.
    pub(crate) fn options(model: CompileOptions) -> CompileOptions {
        CompileOptions { every_hidden: true, sequences: 1, outputs: 1, state_slots: 0, ..model }
    }

    /// Compiles `model`, and `draft` with its weights beside it if that may have the memory.
    ///
    /// # Errors
    /// As [`Backend::compile_with_draft`].
    pub(crate) fn compile(
        draft: &Draft,
        weights: Vec<Tensor>,
        backend: &dyn Backend,
        model: Compilation<'_>,
        memory: DraftMemory,
    ) -> moeflux_compute::Result<(Box<dyn Executable>, Option<Self>)> {
        let fingerprint = Fingerprint::of_layer(&draft.graph, &weights);
        let own = Compilation { graph: &draft.graph, weights, options: Self::options(model.options) };
        let compiled = backend.compile_with_draft(model, own, memory)?;
        let first_set = draft.first_set;
        let (logits, best, rows, ready) = (vec![], None, vec![], true);
        let made = |executable| Self { executable, first_set, fingerprint, logits, best, rows, ready };
        Ok((compiled.model, compiled.draft.map(made)))
    }

    /// As [`Executable::take_experts`].
    ///
    /// # Errors
    /// If an expert cannot be had.
    pub(crate) fn take_experts(&mut self, source: &mut dyn ExpertSource) -> Result<()> {
        Ok(self.executable.take_experts(&mut OwnSets { source, first: self.first_set })?)
    }

    /// Whether drafting as much again will take as long as the last time.
    pub(crate) fn was_ready(&self) -> bool {
        self.ready
    }

    /// Makes pages `0..pages` usable, and copies to those of `own` what they take the place of.
    ///
    /// # Errors
    /// If a device fails.
    pub(crate) fn reserve_pages(&mut self, pages: usize, own: &[OwnPage]) -> Result<()> {
        self.executable.reserve_pages(pages)?;
        let mut bytes = vec![];
        for page in own.iter().filter(|page| page.filled) {
            bytes.clear();
            self.executable.read_page(page.from, &mut bytes)?;
            self.executable.write_page(page.to, &bytes)?;
        }
        Ok(())
    }

    /// Runs `batch`, and finds the token that is likeliest after its output, if it has one; its logits are here afterwards if they
    /// are to be shown.
    fn run(
        &mut self,
        batch: &Batch<'_>,
        source: &mut dyn ExpertSource,
        shown: bool,
    ) -> moeflux_compute::Result<()> {
        let mut experts = OwnSets { source, first: self.first_set };
        let batch = Batch { rows: &self.rows, ..batch.clone() };
        if !shown && self.executable.draws_tokens() {
            let draws = &mut || vec![Some(Draw::default()); batch.outputs.len()];
            let drawn = self.executable.run_and_draw(&batch, &mut experts, draws, usize::MAX)?;
            self.best = drawn.last().copied().flatten();
        } else {
            self.executable.run(&batch, &mut experts, &mut self.logits)?;
            let best = self.logits.iter().enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b));
            self.best = best.map(|(token, _)| token as u32);
        }
        self.ready &= self.executable.was_ready();
        Ok(())
    }

    /// Makes the hidden state of row `row` of the last batch the next batch's.
    fn follow(&mut self, row: usize) -> Result<()> {
        let hidden = self.executable.every_hidden(row..row + 1)?;
        self.rows.clear();
        self.rows.extend_from_slice(hidden);
        Ok(())
    }
}

/// The sets of a draft among those of a store.
struct OwnSets<'a> {
    source: &'a mut dyn ExpertSource,
    first: usize,
}

impl OwnSets<'_> {
    fn of(&self, set: ExpertSetId) -> ExpertSetId {
        ExpertSetId(self.first + set.0)
    }
}

impl ExpertSource for OwnSets<'_> {
    fn announce(&mut self, set: ExpertSetId, experts: &[u32]) -> moeflux_compute::Result<()> {
        self.source.announce(self.of(set), experts)
    }

    fn announce_missing(
        &mut self,
        set: ExpertSetId,
        chosen: &[u32],
        missing: &[u32],
    ) -> moeflux_compute::Result<()> {
        self.source.announce_missing(self.of(set), chosen, missing)
    }

    fn worths(&self, set: ExpertSetId) -> &[f64] {
        self.source.worths(self.of(set))
    }

    fn give(
        &mut self,
        set: ExpertSetId,
        expert: u32,
        copy: &mut dyn FnMut(&mut [&mut [u8]]) -> moeflux_compute::Result<()>,
    ) -> moeflux_compute::Result<bool> {
        self.source.give(self.of(set), expert, copy)
    }

    fn arrived(&mut self) {
        self.source.arrived();
    }

    fn exchanged(&mut self, set: ExpertSetId, experts: &[u32]) {
        self.source.exchanged(self.of(set), experts);
    }

    fn visit(
        &mut self,
        set: ExpertSetId,
        experts: &[u32],
        visitor: &mut dyn FnMut(&[ExpertView<'_>]),
    ) -> moeflux_compute::Result<()> {
        self.source.visit(self.of(set), experts, visitor)
    }

    fn routed(&mut self, set: ExpertSetId, ids: &[u32], rows: usize) {
        self.source.routed(self.of(set), ids, rows);
    }
}

impl Engine {
    /// Runs entries of `session` from `first` on with the tokens that follow them; the rows are those of the drafter. What the last
    /// one predicts is the drafter's if that is asked for.
    fn run_draft(&mut self, session: &Session, first: usize, tokens: &[u32], wanted: Wanted) -> Result<()> {
        let Some(drafter) = &mut self.drafter else { return Ok(()) };
        let start = Instant::now();
        let base = session.drafts.base();
        let pages = &session.pages()[base / PAGE_TOKENS..];
        let span = Span { rows: 0..tokens.len(), start: first - base, pages, ..Span::default() };
        let last = [tokens.len() as u32 - 1];
        let outputs = if wanted == Wanted::Nothing { &[] } else { &last[..] };
        let batch = Batch { tokens, spans: &[span], outputs, ..Batch::default() };
        let mut source = Counting { source: &mut self.experts, uses: &self.expert_use, choices: None };
        let outcome = drafter.run(&batch, &mut source, wanted == Wanted::Logits);
        self.stats.cache += self.experts.take_stats();
        self.stats.time += start.elapsed();
        Ok(outcome?)
    }

    /// Makes entries of `session` that are missing, with the tokens that follow them; of the last one the drafter has what is
    /// wanted.
    fn enter(
        &mut self,
        session: &mut Session,
        entries: Range<usize>,
        tokens: &[u32],
        wanted: Wanted,
    ) -> Result<()> {
        // The first entry's page may be shared, where it is not that of positions evaluated since.
        self.reserve(session, entries.start, entries.end)?;
        let mut first = entries.start;
        for tokens in tokens.chunks(self.chunk()) {
            let next = first + tokens.len();
            if let Some(Drafter { rows, .. }) = &mut self.drafter {
                rows.clear();
                session.drafts.read(first..next, rows);
            }
            let wanted = if next == entries.end { wanted } else { Wanted::Nothing };
            self.run_draft(session, first, tokens, wanted)?;
            first = next;
        }
        Ok(())
    }

    /// Makes entries whose tokens are known, if they are many and tokens are drafted always: those of `session` and, from a position
    /// on, of `tokens`.
    pub(crate) fn enter_known(&mut self, session: &mut Session, (start, tokens): (usize, &[u32])) {
        if self.drafter.is_none() {
            return;
        }
        if self.spec_type() != SpecType::Mtp {
            return session.drafts.drop_old(SEEN);
        }
        let end = if tokens.is_empty() { session.position() } else { start + tokens.len() };
        let entries = session.drafts.missing(end.saturating_sub(1));
        if entries.len() < ENTER_AT {
            return;
        }
        let held = session.tokens();
        let token = |position: usize| match position.checked_sub(start).filter(|_| !tokens.is_empty()) {
            Some(index) => tokens[index],
            None => held[position],
        };
        let next: Vec<u32> = entries.clone().map(|entry| token(entry + 1)).collect();
        match self.enter(session, entries.clone(), &next, Wanted::Nothing) {
            Ok(()) => session.drafts.enter(entries.end, None),
            // What cannot be drafted from is no reason to fail.
            Err(_) => session.drafts.restart(end),
        }
    }

    /// `count` tokens that may follow those of `session` and `next`, none if they cannot be drafted; and in what time positions before
    /// the last one entered the layer.
    ///
    /// # Errors
    /// As [`Engine::draft_logits`].
    pub(super) fn draft_by_layer(
        &mut self,
        session: &mut Session,
        next: u32,
        count: usize,
    ) -> Result<(Vec<u32>, Duration)> {
        self.run_layer(session, next, count, Wanted::Token, |_| ())
    }

    /// What the checkpoint's layer that drafts says of what follows `next`, which is to follow the tokens of `session`: logits
    /// (count, vocab_size), those after the first each given that the token before it is the likeliest. Nothing if there is no such
    /// layer ([`SpecType::Mtp`]) or no token yet. The session stays as it is.
    ///
    /// # Errors
    /// [`crate::Error::Token`]; [`crate::Error::ContextFull`] if there is no room, or a failed read of an expert.
    pub fn draft_logits(&mut self, session: &mut Session, next: u32, count: usize) -> Result<Vec<f32>> {
        self.check_tokens(session.position(), &[next])?;
        let mut all = vec![];
        let show = |logits: &[f32]| all.extend_from_slice(logits);
        let outcome = self.run_layer(session, next, count, Wanted::Logits, show);
        session.release_pages();
        outcome.map(|_| all)
    }

    /// Drafts `count` tokens, and shows the logits that each is chosen by if those are wanted; the time is that of
    /// [`Engine::draft_by_layer`].
    fn run_layer(
        &mut self,
        session: &mut Session,
        next: u32,
        count: usize,
        wanted: Wanted,
        mut show: impl FnMut(&[f32]),
    ) -> Result<(Vec<u32>, Duration)> {
        let position = session.position();
        let entries = session.drafts.missing(position);
        if entries.is_empty() || count == 0 || self.drafter.is_none() {
            return Ok((vec![], Duration::ZERO));
        }
        let start = Instant::now();
        if let Some(drafter) = &mut self.drafter {
            drafter.ready = true;
        }
        // Those of drafted tokens are written too, to be written again.
        self.reserve(session, entries.start, position + count - 1)?;
        let mut tokens = session.tokens()[entries.start + 1..].to_vec();
        tokens.push(next);
        self.enter(session, entries, &tokens, wanted)?;
        session.drafts.enter(position, Some(next));
        // The last of them is part of drafting.
        let entered = start.elapsed() * (tokens.len() as u32 - 1) / tokens.len() as u32;
        let mut row = (tokens.len() - 1) % self.chunk();
        let mut drafted = vec![];
        for entry in position.. {
            let Some(drafter) = &mut self.drafter else { break };
            if wanted == Wanted::Logits {
                show(&drafter.logits);
            }
            let Some(token) = drafter.best else { break };
            drafted.push(token);
            if drafted.len() == count {
                break;
            }
            drafter.follow(std::mem::take(&mut row))?;
            self.run_draft(session, entry, &[token], wanted)?;
        }
        Ok((drafted, entered))
    }
}

//! [`Drafter`]: the layer of a checkpoint that drafts tokens, ready to run, and what it does for a session.
//!
//! Its experts come from the engine's cache, as the model's do, and its keys and values are in pages of its own with the numbers of
//! the session's.

use std::ops::Range;
use std::time::{Duration, Instant};

use moeflux_compute::Tensor;
use moeflux_compute::backend::{
    Backend, Batch, CompileOptions, Executable, ExpertSource, ExpertView, PAGE_TOKENS, Span,
};
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

/// A compiled [`Draft`].
pub(crate) struct Drafter {
    pub(crate) executable: Box<dyn Executable>,
    first_set: usize,
    /// What its keys and values depend on besides the model's.
    pub(crate) fingerprint: String,
    /// Of the last batch.
    logits: Vec<f32>,
    /// The batch's rows, (tokens, hidden_size).
    rows: Vec<f32>,
}

impl Drafter {
    /// Compiles `draft` with its weights as the model is with `compile`.
    ///
    /// # Errors
    /// As [`Backend::compile`].
    pub(crate) fn new(
        draft: &Draft,
        weights: Vec<Tensor>,
        backend: &dyn Backend,
        compile: CompileOptions,
    ) -> Result<Self> {
        let compile = CompileOptions { every_hidden: true, ..compile };
        let fingerprint = Fingerprint::of_layer(&draft.graph, &weights);
        let executable = backend.compile(&draft.graph, weights, compile)?;
        let (logits, rows) = (vec![], vec![]);
        Ok(Self { executable, first_set: draft.first_set, fingerprint, logits, rows })
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

    /// The token with the highest logit.
    fn best(&self) -> Option<u32> {
        let best = self.logits.iter().enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b));
        best.map(|(token, _)| token as u32)
    }

    /// Makes the hidden state of the last batch's last row the next batch's.
    fn follow(&mut self, width: usize) {
        let hidden = self.executable.every_hidden();
        self.rows.clear();
        self.rows.extend_from_slice(&hidden[hidden.len() - width..]);
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
    /// Runs entries of `session` from `first` on with the tokens that follow them; the rows are those of the drafter.
    fn run_draft(&mut self, session: &Session, first: usize, tokens: &[u32], outputs: &[u32]) -> Result<()> {
        let Some(drafter) = &mut self.drafter else { return Ok(()) };
        let start = Instant::now();
        let base = session.drafts.base();
        let pages = &session.pages()[base / PAGE_TOKENS..];
        let span = Span { rows: 0..tokens.len(), start: first - base, pages, ..Span::default() };
        let batch = Batch { tokens, spans: &[span], outputs, rows: &drafter.rows, ..Batch::default() };
        let mut source = Counting { source: &mut self.experts, uses: &self.expert_use, choices: None };
        let mut experts = OwnSets { source: &mut source, first: drafter.first_set };
        let outcome = drafter.executable.run(&batch, &mut experts, &mut drafter.logits);
        self.stats.cache += self.experts.take_stats();
        self.stats.time += start.elapsed();
        Ok(outcome?)
    }

    /// Makes entries of `session` that are missing, with the tokens that follow them; the logits of the last one are the drafter's if
    /// that is asked for.
    fn enter(
        &mut self,
        session: &mut Session,
        entries: Range<usize>,
        tokens: &[u32],
        last: bool,
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
            let is_last = last && next == entries.end;
            let outputs: &[u32] = if is_last { &[tokens.len() as u32 - 1] } else { &[] };
            self.run_draft(session, first, tokens, outputs)?;
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
        match self.enter(session, entries.clone(), &next, false) {
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
        self.run_layer(session, next, count, |_| ())
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
        let outcome = self.run_layer(session, next, count, |logits| all.extend_from_slice(logits));
        session.release_pages();
        outcome.map(|_| all)
    }

    /// Drafts `count` tokens, and shows the logits that each is chosen by; the time is that of [`Engine::draft_by_layer`].
    fn run_layer(
        &mut self,
        session: &mut Session,
        next: u32,
        count: usize,
        mut visit: impl FnMut(&[f32]),
    ) -> Result<(Vec<u32>, Duration)> {
        let position = session.position();
        let entries = session.drafts.missing(position);
        if entries.is_empty() || count == 0 || self.drafter.is_none() {
            return Ok((vec![], Duration::ZERO));
        }
        let start = Instant::now();
        // Those of drafted tokens are written too, to be written again.
        self.reserve(session, entries.start, position + count - 1)?;
        let mut tokens = session.tokens()[entries.start + 1..].to_vec();
        tokens.push(next);
        self.enter(session, entries, &tokens, true)?;
        session.drafts.enter(position, Some(next));
        // The last of them is part of drafting.
        let entered = start.elapsed() * (tokens.len() as u32 - 1) / tokens.len() as u32;
        let width = self.hidden_size();
        let mut drafted = vec![];
        for entry in position.. {
            let Some(drafter) = &mut self.drafter else { break };
            visit(&drafter.logits);
            let Some(token) = drafter.best() else { break };
            drafted.push(token);
            if drafted.len() == count {
                break;
            }
            drafter.follow(width);
            self.run_draft(session, entry, &[token], &[0])?;
        }
        Ok((drafted, entered))
    }
}

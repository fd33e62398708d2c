//! [`Engine`]: a loaded model with its memory.

mod options;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use moeflux_compute::backend::{
    Backend, Batch, Compilation, DeviceCounts, DraftMemory, Executable, ExpertSource, Span, StateSlots,
};
use moeflux_compute::draw::Draw;
use moeflux_compute::graph::ExpertSetId;
use moeflux_compute::profile::Profile;

use crate::adapters::AdapterPrint;
use crate::batch::Part;
use crate::checkpoint::Checkpoint;
use crate::experts::probe::{Probe, probe};
use crate::experts::routing::RouterChoices;
use crate::experts::trace::TraceHeader;
use crate::experts::usage::Counting;
use crate::experts::{CacheOptions, CacheStats, ExpertCache, ExpertUse};
use crate::fingerprint::Fingerprint;
use crate::io::buffer::HostBuffer;
use crate::io::file::ReadMode;
use crate::io::queue::{self, QueueKind, ReadQueue};
use crate::memory::Budget;
use crate::minima::Minima;
use crate::models::Model;
use crate::pictures::{Encoder, PictureRows, tokens::is_picture};
use crate::placement::{Placement, top_k};
use crate::session::{Pool, Reserved, Session, Slot};
use crate::speculation::{Drafter, Means, SpecType, Speculator};
use crate::{Error, Result};

pub use options::Options;

/// Lengths of the prompts that get a GPU ready, up to a chunk. Longer ones take other kernels than short ones, and move buffers.
const WARM_UP_PROMPTS: [usize; 2] = [usize::MAX, 64];

/// Which logits an evaluation returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outputs {
    /// Those of the last token.
    Last,
    /// Those of every token.
    All,
}

/// What an engine has done since it was opened or since [`Engine::take_stats`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Stats {
    /// Tokens evaluated, without those that were guessed and wrong.
    pub tokens: u64,
    /// Time spent evaluating.
    pub time: Duration,
    /// Tokens guessed and verified.
    pub drafted: u64,
    /// Of these, those that were right.
    pub accepted: u64,
    /// The expert cache's part.
    pub cache: CacheStats,
}

/// How experts are read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reads {
    /// What reads them; `None` for a queue of the caller's.
    pub queue: Option<QueueKind>,
    /// Past the page cache or through it.
    pub mode: ReadMode,
    /// What the mode was chosen by, if it was.
    pub probe: Option<Probe>,
    /// Whether bytes are made in memory, so that nothing is read from a disk.
    pub made: bool,
}

impl std::fmt::Display for Reads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.made {
            return f.write_str("random weights copied in memory, nothing read from a disk");
        }
        match self.queue {
            Some(queue) => write!(f, "{} reads, {queue}", self.mode)?,
            None => write!(f, "{} reads", self.mode)?,
        }
        match self.probe {
            Some(Probe { direct, buffered }) => {
                write!(f, " (probe: direct {:.2} GB/s, buffered {:.2} GB/s)", direct / 1e9, buffered / 1e9)
            }
            None => Ok(()),
        }
    }
}

/// A loaded model.
pub struct Engine {
    model: Model,
    pub(crate) executable: Box<dyn Executable>,
    /// What sessions in files must have been made with.
    pub(crate) fingerprint: Fingerprint,
    /// What tells the model's adapters from others.
    pub(crate) adapters: Vec<AdapterPrint>,
    /// The adapter of new sessions.
    adapter: Option<u32>,
    pub(crate) experts: ExpertCache,
    reads: Reads,
    budget: Budget,
    /// Whether the number of slots may change.
    adjustable: bool,
    backend: String,
    chunk: usize,
    context: usize,
    sequences: usize,
    pool: Arc<Pool>,
    pub(crate) expert_use: ExpertUse,
    /// What routers choose, a set each, while somebody asks for it.
    routing: Option<Vec<RouterChoices>>,
    pub(crate) stats: Stats,
    pub(crate) speculator: Speculator,
    /// The layer that drafts, if there is one.
    pub(crate) drafter: Option<Drafter>,
    /// What reads pictures, if it was asked for.
    pub(crate) encoder: Option<Encoder>,
    /// Of the last batch: its memory is used again.
    pub(crate) logits: Vec<f32>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Engine({}, {:?})", self.backend, self.budget)
    }
}

impl Engine {
    /// Opens the checkpoint at `path` and loads its resident weights; `progress` gets (bytes loaded, bytes in all).
    ///
    /// # Errors
    /// If the checkpoint is not one that can be run, or memory does not suffice.
    pub fn open(
        path: &Path,
        backend: &dyn Backend,
        options: &Options,
        progress: impl FnMut(u64, u64),
    ) -> Result<Self> {
        Self::of_checkpoint(Checkpoint::open(path)?, backend, options, progress)
    }

    /// As [`Engine::open`], of a checkpoint that is open.
    pub(crate) fn of_checkpoint(
        checkpoint: Checkpoint,
        backend: &dyn Backend,
        options: &Options,
        progress: impl FnMut(u64, u64),
    ) -> Result<Self> {
        let path = checkpoint.path().to_owned();
        let mut model = options.record(Arc::new(checkpoint), backend)?;
        model.adapt(&options.adapters)?;
        let kind = options.read_queue.or_else(|| model.experts.best_queue());
        let opened = queue::open(kind, options.read_depth);
        let (kind, queue) =
            opened.map_err(|source| Error::Io { action: "open a queue to read", path, source })?;
        let mut engine = Self::new(model, backend, options, queue, progress)?;
        engine.reads.queue = Some(kind);
        Ok(engine)
    }

    /// Loads a recorded model whose experts are read through `queue`.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub fn new(
        mut model: Model,
        backend: &dyn Backend,
        options: &Options,
        mut queue: Box<dyn ReadQueue>,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<Self> {
        let told = |model: &Model, error| Minima::told(error, model, backend, options);
        let placement = Placement::new(&model, backend, options).map_err(|error| told(&model, error))?;
        let compile = placement.compile_options(options);
        let Placement { budget, slots, chunk, context, pages, state_slots, kv_type, adjustable, .. } =
            placement;
        let encoder_place = placement.encoder;
        let trunk = model.trunk_bytes();

        let mut loaded = 0;
        let mut read = |bytes: u64| {
            loaded += bytes;
            progress(loaded, trunk);
        };
        let weights = model.load(&mut read)?;
        let draft_weights = model.load_draft(&weights, &mut read)?;
        let encoder = Encoder::new(&model, encoder_place, backend, options, &mut read)?;
        let (description, precision) = (backend.describe(), (options.activations, kv_type));
        let (own_graph, own_weights) = model.own_graph();
        let fingerprint = Fingerprint::new(&own_graph, &weights[..own_weights], &description, precision);
        let adapters = model.adapters.iter().map(|adapter| adapter.fingerprint(&weights)).collect();
        let compiled = match (&model.draft, draft_weights) {
            (Some(draft), Some(own)) => {
                let with = Compilation { graph: &model.graph, weights, options: compile };
                // Without being asked to, it takes nothing that the model's experts could have.
                let asked = options.spec_type == SpecType::Mtp;
                let memory = if asked { DraftMemory::Shared } else { DraftMemory::Spare };
                Drafter::compile(draft, own, backend, with, memory)
            }
            _ => backend.compile(&model.graph, weights, compile).map(|model| (model, None)),
        };
        let (mut executable, drafter) = compiled.map_err(|error| told(&model, error.into()))?;
        let description = match executable.division() {
            Some(division) => format!("{description}, {division}"),
            None => description,
        };
        let means = Means { rows: executable.single_step_rows(), layer: drafter.is_some() };
        let speculator = Speculator::new(options.spec_type, options.draft_max, means)?;
        let mut store = std::mem::take(&mut model.experts);
        options.mirrors.iter().try_for_each(|mirror| store.add_mirror(mirror))?;
        let expert_use = ExpertUse::new(&store);
        let no_memory = |source| Error::Io {
            action: "find memory for experts of",
            path: model.checkpoint().path().into(),
            source,
        };
        let made = store.is_made();
        let probe = if options.read_mode.is_none() && !made { probe(&store, &mut *queue) } else { None };
        let mode = options.read_mode.or(probe.map(|p| p.choice())).unwrap_or(ReadMode::Buffered);
        let reads = Reads { queue: None, mode, probe, made };
        let cache =
            CacheOptions { policy: options.cache_policy, prefetch: options.prefetch, read_mode: mode };
        let mut pin = |memory: &mut HostBuffer| {
            if let Some(pinned) = executable.pin(memory.as_mut_slice()) {
                memory.keep(pinned);
            }
        };
        let mut experts = ExpertCache::new(store, slots, queue, cache, &mut pin).map_err(no_memory)?;
        if adjustable {
            experts.limit(budget.experts);
        }
        let pool = Arc::new(Pool::new(pages, state_slots, options.checkpoints));
        Ok(Self {
            model,
            executable,
            fingerprint,
            adapters,
            adapter: None,
            experts,
            reads,
            budget,
            adjustable,
            backend: description,
            chunk,
            context,
            sequences: options.sequences.max(1),
            pool,
            expert_use,
            routing: None,
            stats: Stats::default(),
            speculator,
            drafter,
            encoder,
            logits: vec![],
        })
    }

    /// An empty sequence, with the adapter that [`Engine::set_adapter`] said.
    pub fn session(&self) -> Session {
        self.session_of(self.adapter)
    }

    /// An empty sequence that is evaluated with the adapter of this name, or with none.
    ///
    /// # Errors
    /// [`Error::Option`] if the model was opened without such an adapter.
    pub fn session_with(&self, adapter: Option<&str>) -> Result<Session> {
        Ok(self.session_of(self.adapter_number(adapter)?))
    }

    pub(crate) fn session_of(&self, adapter: Option<u32>) -> Session {
        let known = adapter.map(|number| (number, self.adapters[number as usize].root));
        Session::with_adapter(Arc::clone(&self.pool), known)
    }

    /// Says which adapter new sessions have, by its name, or that they have none.
    ///
    /// # Errors
    /// [`Error::Option`] if the model was opened without such an adapter.
    pub fn set_adapter(&mut self, adapter: Option<&str>) -> Result<()> {
        self.adapter = self.adapter_number(adapter)?;
        Ok(())
    }

    /// The number of the adapter that new sessions have.
    pub(crate) fn default_adapter(&self) -> Option<u32> {
        self.adapter
    }

    /// The number of the adapter of this name.
    pub(crate) fn adapter_number(&self, adapter: Option<&str>) -> Result<Option<u32>> {
        let Some(name) = adapter else { return Ok(None) };
        let number = self.model.adapter_names().position(|own| own == name);
        let number = number.ok_or_else(|| Error::Option {
            option: "adapter",
            expected: format!("one of {}", self.model.adapter_names().collect::<Vec<_>>().join(", ")),
            got: name.to_owned(),
        });
        number.map(|number| Some(number as u32))
    }

    /// Gets a GPU ready: experts that stay in its memory, room for all of the context, and the kernels of tokens and prompts.
    /// Without this the first evaluations do it, and pools of keys and values grow with the sessions. Does nothing on the processor.
    ///
    /// # Errors
    /// As [`Engine::eval`], and if a device has no room for the context.
    pub fn warm_up(&mut self) -> Result<()> {
        if !self.draws_tokens() {
            return Ok(());
        }
        self.executable.reserve_pages(self.pool.pages())?;
        self.executable.take_experts(&mut self.experts)?;
        let every_rule = Draw { temperature: 1.0, top_k: 40, top_p: 0.9, min_p: 0.1, ..Draw::default() };
        let most = self.chunk.min(self.context);
        // From disk a prompt may read all experts. Lists of kernels for a token are recorded when they are used for the second time.
        let prompts = WARM_UP_PROMPTS.iter().filter(|_| self.budget.needs.kept > 0).copied();
        let counts: Vec<usize> = prompts.chain([1, 1]).collect();
        for count in counts {
            let tokens = vec![0; most.min(count)];
            let part = Part { session: &mut self.session(), tokens: &tokens, outputs: Some(Outputs::Last) };
            let draw = &mut || vec![Some(every_rule.clone())];
            self.eval_and_draw(&mut [part], draw, self.model.graph.vocab_size())?;
        }
        self.warm_up_verifications()?;
        self.take_stats();
        Ok(())
    }

    /// Appends `tokens` to `session` and returns logits (outputs, vocab_size), row-major.
    ///
    /// After an error the session is as it was before the call.
    ///
    /// # Errors
    /// [`Error::Token`], [`Error::ContextFull`], [`Error::StatesFull`], [`Error::NotFinite`], or a failed read of an
    /// expert.
    pub fn eval(&mut self, session: &mut Session, tokens: &[u32], outputs: Outputs) -> Result<Vec<f32>> {
        let mut logits = vec![];
        self.eval_with(session, tokens, outputs, |engine, batch, first| {
            engine.append_logits(batch, first, &mut logits)
        })?;
        Ok(logits)
    }

    /// Appends `tokens` to `session`; every chunk is run by `run`, with the position of its first output.
    pub(crate) fn eval_with(
        &mut self,
        session: &mut Session,
        tokens: &[u32],
        outputs: Outputs,
        run: impl FnMut(&mut Self, &Batch<'_>, usize) -> Result<()>,
    ) -> Result<()> {
        let from = (session.position(), session.state().cloned());
        match self.eval_from(session, from, tokens, Some(outputs), run) {
            Ok(state) => session.extend(tokens, state),
            Err(error) => {
                session.release_pages();
                return Err(error);
            }
        }
        Ok(())
    }

    /// As [`Engine::eval`], and which experts every layer's router chose for each token, layers ascending.
    ///
    /// # Errors
    /// As [`Engine::eval`]; [`Error::Option`] if the backend does not tell what its routers choose, as GPUs do not.
    pub fn eval_with_routing(
        &mut self,
        session: &mut Session,
        tokens: &[u32],
        outputs: Outputs,
    ) -> Result<(Vec<f32>, Vec<RouterChoices>)> {
        let store = self.experts.store();
        let of_set = |set| RouterChoices {
            layer: store.set(ExpertSetId(set)).layer,
            experts: vec![],
            num_experts_per_tok: 0,
        };
        // Those of the layer that drafts are not the model's.
        self.routing = Some((0..self.model.graph.expert_sets().len()).map(of_set).collect());
        let before = session.position();
        let outcome = self.eval(session, tokens, outputs);
        let routing = self.routing.take().unwrap_or_default();
        let logits = outcome?;
        if !tokens.is_empty() && routing.iter().any(|choices| choices.experts.is_empty()) {
            self.truncate(session, before)?;
            return Err(Error::Option {
                option: "backend",
                expected: "one that tells what routers choose: the processor".to_owned(),
                got: self.backend.clone(),
            });
        }
        Ok((logits, routing))
    }

    /// Forgets the tokens of `session` from `position` on; does nothing if there are not that many. A recurrent state
    /// cannot be taken back: the nearest checkpoint is restored and the tokens from there on are evaluated again.
    ///
    /// After an error the session is as it was before the call.
    ///
    /// # Errors
    /// As [`Engine::eval`].
    pub fn truncate(&mut self, session: &mut Session, position: usize) -> Result<()> {
        if position >= session.position() {
            return Ok(());
        }
        if self.model.graph.states().is_empty() {
            session.cut(position, None);
            return Ok(());
        }
        let (start, state) = session.nearest(position);
        let again = session.tokens()[start..position].to_vec();
        let run =
            |engine: &mut Self, batch: &Batch<'_>, first| engine.append_logits(batch, first, &mut vec![]);
        session.cut_drafts(start);
        let state = self.eval_from(session, (start, state), &again, None, run)?;
        session.cut(position, state);
        Ok(())
    }

    /// Evaluates `tokens` as those of `session` after a position where its state was the given one, chunks by `run`, which gets
    /// the position of a chunk's first output; returns its state after them. The session gets pages and is otherwise left as
    /// it is.
    pub(crate) fn eval_from(
        &mut self,
        session: &mut Session,
        from: (usize, Option<Arc<Slot>>),
        tokens: &[u32],
        outputs: Option<Outputs>,
        run: impl FnMut(&mut Self, &Batch<'_>, usize) -> Result<()>,
    ) -> Result<Option<Arc<Slot>>> {
        let position = from.0;
        let outcome = self.eval_chunks(session, from, tokens, outputs, run);
        if outcome.is_err() {
            session.cut_drafts(position);
        }
        outcome
    }

    fn eval_chunks(
        &mut self,
        session: &mut Session,
        (mut position, mut state): (usize, Option<Arc<Slot>>),
        tokens: &[u32],
        outputs: Option<Outputs>,
        mut run: impl FnMut(&mut Self, &Batch<'_>, usize) -> Result<()>,
    ) -> Result<Option<Arc<Slot>>> {
        let start = position;
        self.check_tokens(position, tokens)?;
        if tokens.is_empty() {
            return Ok(state);
        }
        let mut slots = StateSlots::default();
        if !self.model.graph.states().is_empty() {
            let new = self.take_slot(session)?;
            let read = state.as_ref().map_or(new.number(), |slot| slot.number());
            slots = StateSlots { read, write: new.number() };
            state = Some(new);
        }
        while position - start < tokens.len() {
            let (before, next) = tokens.split_at(position - start);
            let chunk = &next[..self.uncut((session, start), (before, next), self.chunk)];
            self.reserve(session, position, position + chunk.len())?;
            let last = chunk.len() == next.len();
            let rows: Vec<u32> = match outputs {
                Some(Outputs::All) => (0..chunk.len() as u32).collect(),
                Some(Outputs::Last) if last => vec![chunk.len() as u32 - 1],
                _ => vec![],
            };
            let (pages, adapter) = (session.pages(), session.adapter());
            let spans = &[Span { rows: 0..chunk.len(), start: position, pages, slots, adapter }];
            let pictures = self.picture_rows(session, (start, tokens), position..position + chunk.len())?;
            let (embeddings, positions) = (pictures.embeddings(), pictures.positions());
            let batch = Batch {
                tokens: pictures.tokens(chunk),
                spans,
                outputs: &rows,
                embeddings,
                positions,
                sees: pictures.sees(),
                rows: &[],
            };
            run(self, &batch, position + chunk.len() - rows.len())?;
            self.note_rows(session, (position, chunk), 0);
            // The state before is kept; the new one belongs to this evaluation.
            slots.read = slots.write;
            position += chunk.len();
            self.enter_known(session, (start, &tokens[..position - start]));
        }
        Ok(state)
    }

    /// What positions `range` of a sequence need whose first `start` tokens are those of `session`, and the others `tokens`.
    fn picture_rows(
        &self,
        session: &Session,
        (start, tokens): (usize, &[u32]),
        range: Range<usize>,
    ) -> Result<PictureRows> {
        let mut pictures = PictureRows::default();
        if PictureRows::needed(std::iter::once((session, tokens))) {
            let next = &tokens[range.start - start..range.end - start];
            let before = &tokens[..range.start - start];
            self.add_picture_rows((session, start), (before, next), 0, &mut pictures)?;
        }
        Ok(pictures)
    }

    /// Runs a batch and appends its logits to `all`; `first` is the position of the first.
    pub(crate) fn append_logits(
        &mut self,
        batch: &Batch<'_>,
        first: usize,
        all: &mut Vec<f32>,
    ) -> Result<()> {
        let mut logits = std::mem::take(&mut self.logits);
        self.run(batch, &mut logits)?;
        self.check_finite(&logits, first)?;
        if all.is_empty() {
            std::mem::swap(all, &mut logits)
        } else {
            all.extend_from_slice(&logits)
        }
        self.logits = logits;
        Ok(())
    }

    /// Takes pages for positions `from..to` of `session`, and makes those that it shares its own. After an error it has
    /// what it had, and maybe pages beyond its position.
    pub(crate) fn reserve(&mut self, session: &mut Session, from: usize, to: usize) -> Result<()> {
        let Reserved { pages, own } = session.reserve(from, to)?;
        let mut bytes = vec![];
        let mut copied = || -> Result<()> {
            self.executable.reserve_pages(pages)?;
            for page in own.iter().filter(|page| page.filled) {
                bytes.clear();
                self.executable.read_page(page.from, &mut bytes)?;
                self.executable.write_page(page.to, &bytes)?;
            }
            match &mut self.drafter {
                Some(drafter) => drafter.reserve_pages(pages, &own),
                None => Ok(()),
            }
        };
        match copied() {
            Ok(()) => session.adopt(&own),
            Err(error) => {
                session.disown(&own);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Runs one batch, and counts what it did.
    pub(crate) fn run(&mut self, batch: &Batch<'_>, logits: &mut Vec<f32>) -> Result<()> {
        self.counted(batch.tokens.len(), |executable, experts| executable.run(batch, experts, logits))
    }

    /// As [`Engine::run`], but chooses tokens where the logits are.
    pub(crate) fn run_and_draw(
        &mut self,
        batch: &Batch<'_>,
        draws: &mut dyn FnMut() -> Vec<Option<Draw>>,
        vocab_size: usize,
    ) -> Result<Vec<Option<u32>>> {
        if batch.tokens.is_empty() {
            return Ok(vec![]);
        }
        self.counted(batch.tokens.len(), |executable, experts| {
            executable.run_and_draw(batch, experts, draws, vocab_size)
        })
    }

    /// Runs a batch of so many tokens by `run`, and counts what that did.
    pub(crate) fn counted<T>(
        &mut self,
        tokens: usize,
        run: impl FnOnce(&mut dyn Executable, &mut dyn ExpertSource) -> moeflux_compute::Result<T>,
    ) -> Result<T> {
        let start = Instant::now();
        let choices = self.routing.as_deref_mut();
        let mut experts = Counting { source: &mut self.experts, uses: &self.expert_use, choices };
        let outcome = run(&mut *self.executable, &mut experts);
        self.stats.cache += self.experts.take_stats();
        let made = outcome?;
        self.stats.tokens += tokens as u64;
        self.stats.time += start.elapsed();
        Ok(made)
    }

    /// The logits, (vocab_size), of an output of the last evaluation, if that was [`Engine::eval_and_draw`].
    ///
    /// # Errors
    /// If a device fails.
    pub fn read_logits(&mut self, output: usize) -> Result<Vec<f32>> {
        let mut logits = vec![];
        self.executable.read_logits(output, &mut logits)?;
        Ok(logits)
    }

    /// Refuses what is no token, and more than the context holds after position `from`.
    ///
    /// # Errors
    /// [`Error::Token`] and [`Error::ContextFull`].
    pub fn check_tokens(&self, from: usize, tokens: &[u32]) -> Result<()> {
        let vocab_size = self.model.graph.vocab_size();
        let pictures = self.encoder.is_some();
        let known = |token: u32| (token as usize) < vocab_size || (pictures && is_picture(token));
        if let Some(position) = tokens.iter().position(|token| !known(*token)) {
            return Err(Error::Token { token: tokens[position], position, vocab_size });
        }
        let wanted = from + tokens.len();
        if wanted > self.context { Err(Error::ContextFull { wanted, context: self.context }) } else { Ok(()) }
    }

    /// Corrupt weights must not become silent garbage. `first` is the position of the first row.
    pub(crate) fn check_finite(&self, logits: &[f32], first: usize) -> Result<()> {
        let mut rows = logits.chunks_exact(self.model.graph.vocab_size());
        // No early end within a row: so it becomes vector instructions.
        match rows.position(|row| row.iter().fold(false, |bad, l| bad | !l.is_finite())) {
            None => Ok(()),
            Some(bad) => Err(self.not_finite(first + bad)),
        }
    }

    /// What to say of logits that are not finite.
    pub(crate) fn not_finite(&self, position: usize) -> Error {
        let culprit = self.model.find_not_finite().or_else(|| self.experts.find_not_finite());
        let reason = culprit
            .unwrap_or_else(|| "values overflow, or an expert that has left the cache holds one".into());
        Error::NotFinite { path: self.model.checkpoint().path().into(), position, reason }
    }

    /// Takes a state slot for `session`.
    pub(crate) fn take_slot(&mut self, session: &mut Session) -> Result<Arc<Slot>> {
        let (slot, slots) = session.take_slot()?;
        self.executable.reserve_slots(slots)?;
        Ok(slot)
    }

    /// Calls `task` with 0, 1, … below `count` on the threads that compute.
    pub(crate) fn run_tasks(&self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        self.executable.run_tasks(count, task);
    }

    /// Starts measuring where the executable's time goes, or stops.
    pub fn set_profiling(&mut self, on: bool) {
        self.executable.set_profiling(on);
    }

    /// What was measured since the last call; `None` without profiling or from a backend that cannot.
    pub fn take_profile(&mut self) -> Option<Profile> {
        self.executable.take_profile()
    }

    /// What a GPU has done so far; `None` without one. Asking may wait for it.
    pub fn device_counts(&mut self) -> Option<DeviceCounts> {
        self.executable.device_counts()
    }

    /// Why mirrors are no longer read from, since the last call: the file and what failed.
    pub fn take_lost_mirrors(&mut self) -> Vec<Error> {
        self.experts.take_lost_mirrors()
    }

    /// Statistics since the last call.
    pub fn take_stats(&mut self) -> Stats {
        std::mem::take(&mut self.stats)
    }

    /// How memory is divided.
    pub fn budget(&self) -> Budget {
        self.budget
    }

    /// The least and the most memory that [`Engine::grant`] can make use of, in bytes: without an expert more than a token
    /// needs, and with as many as [`Options::memory_later`] made room for. Both are what is in use if the number of slots was
    /// given, or a device has slots of its own.
    pub fn grants(&self) -> (u64, u64) {
        let held = self.budget.needs.held();
        let (least, most) =
            if self.adjustable { self.experts.range() } else { (self.experts.bytes(), self.experts.bytes()) };
        (held.saturating_add(least), held.saturating_add(most))
    }

    /// Changes the memory budget to `memory` bytes, within [`Engine::grants`]: slots for experts are added, or taken away with
    /// the experts that are worth least. Results do not change.
    pub fn grant(&mut self, memory: u64) {
        if !self.adjustable {
            return;
        }
        let (least, most) = self.grants();
        let held = self.budget.needs.held();
        let total = memory.clamp(least, most);
        self.experts.limit(total - held);
        self.budget = Budget { total, experts: total - held, ..self.budget };
    }

    /// The expert cache, for its slots and the experts' sizes.
    pub fn experts(&self) -> &ExpertCache {
        &self.experts
    }

    /// Reads experts into memory that is set aside for them and still empty, so that what is measured afterwards does not
    /// depend on which tokens came before.
    ///
    /// # Errors
    /// If a device fails, or cannot have an expert that it has room for.
    pub fn fill_experts(&mut self) -> Result<()> {
        self.executable.take_experts(&mut self.experts)?;
        if let Some(drafter) = &mut self.drafter {
            drafter.take_experts(&mut self.experts)?;
        }
        self.experts.fill();
        self.stats.cache += self.experts.take_stats();
        Ok(())
    }

    /// How experts are read.
    pub fn reads(&self) -> Reads {
        self.reads
    }

    /// Records what routers ask for from now on.
    pub fn start_trace(&mut self) {
        self.experts.start_trace();
    }

    /// Ends the recording and returns the content of a trace file. `stats` are those of the tokens generated since it
    /// began, which a replay takes the machine's speed from.
    pub fn finish_trace(&mut self, stats: &Stats) -> Vec<u8> {
        let needs = self.budget.needs;
        let computing = stats.time.saturating_sub(stats.cache.stall).as_secs_f64();
        let header = TraceHeader {
            model: self.model.checkpoint().path().display().to_string(),
            sets: self.experts.store().shapes(),
            top_k: top_k(&self.model),
            needs: needs.held() - needs.kept,
            compute_seconds: computing / stats.tokens.max(1) as f64,
            bandwidth: stats.cache.bandwidth().unwrap_or(0.0),
        };
        self.experts.take_trace().unwrap_or_default().encode(&header)
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The backend's name and hardware.
    pub fn backend(&self) -> &str {
        &self.backend
    }

    /// Most tokens evaluated at once.
    pub fn chunk(&self) -> usize {
        self.chunk
    }

    /// Maximum positions of a sequence.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Pages of keys and values that no session holds.
    pub fn free_pages(&self) -> usize {
        self.pool.free_pages()
    }

    /// Total key-value pages, of [`PAGE_TOKENS`](moeflux_compute::backend::PAGE_TOKENS) positions each.
    pub fn pages(&self) -> usize {
        self.pool.pages()
    }

    /// Sequences that there is memory for at the same time.
    pub fn sequences(&self) -> usize {
        self.sequences
    }

    /// How often each expert was needed.
    pub fn expert_use(&self) -> &ExpertUse {
        &self.expert_use
    }
}

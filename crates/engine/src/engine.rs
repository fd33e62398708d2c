//! [`Engine`]: a loaded model with its memory.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use moeflux_compute::backend::{
    ActivationMode, Backend, Batch, CompileOptions, Executable, KvType, PAGE_TOKENS, Span, StateSlots,
};
use moeflux_compute::plan::Plan;

use crate::checkpoint::Checkpoint;
use crate::experts::{CacheStats, ExpertCache};
use crate::io::queue::{PreadPool, ReadQueue};
use crate::memory::Budget;
use crate::models::{self, Model};
use crate::placement::Placement;
use crate::session::{Pool, Session, Slot};
use crate::session_file;
use crate::{Error, Result};

/// How a model is opened. Nothing else changes behaviour: there are no environment variables and no globals.
#[derive(Debug, Clone)]
pub struct Options {
    /// Bytes for everything: resident weights, context, scratch, experts. By default what the system grants.
    pub memory: Option<u64>,
    /// Expert slots, in place of those that the memory budget leaves.
    pub expert_cache: Option<usize>,
    /// Most tokens evaluated at once. By default 512, or fewer if memory is short.
    pub chunk: Option<usize>,
    /// Positions of the context. By default what the model was made for, but at most 4096, or fewer if
    /// memory is short.
    pub context: Option<usize>,
    /// Precision of matrix products whose weights are quantised.
    pub activations: ActivationMode,
    /// Precision of cached keys and values. By default f16, and f32 when activations are f32.
    pub kv_type: Option<KvType>,
    /// Positions that a session keeps to come back to; of models with recurrent state each takes the memory of a state.
    pub checkpoints: usize,
    /// Reads under way at once.
    pub read_threads: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            memory: None,
            expert_cache: None,
            chunk: None,
            context: None,
            activations: ActivationMode::Int8,
            kv_type: None,
            checkpoints: 2,
            read_threads: 8,
        }
    }
}

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
    /// Tokens evaluated.
    pub tokens: u64,
    /// Time spent evaluating.
    pub time: Duration,
    /// The expert cache's part.
    pub cache: CacheStats,
}

/// A loaded model.
pub struct Engine {
    model: Model,
    pub(crate) executable: Box<dyn Executable>,
    /// Names the model in session files.
    pub(crate) fingerprint: String,
    experts: ExpertCache,
    budget: Budget,
    backend: String,
    chunk: usize,
    context: usize,
    pool: Arc<Pool>,
    stats: Stats,
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
        let checkpoint = Arc::new(Checkpoint::open(path)?);
        let queue = PreadPool::new(options.read_threads);
        let queue = queue.map_err(|source| Error::Io {
            action: "start threads to read",
            path: path.into(),
            source,
        })?;
        Self::new(models::record(checkpoint)?, backend, options, Box::new(queue), progress)
    }

    /// Loads a recorded model whose experts are read through `queue`.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub fn new(
        mut model: Model,
        backend: &dyn Backend,
        options: &Options,
        queue: Box<dyn ReadQueue>,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<Self> {
        let Placement { budget, slots, chunk, context, state_slots, kv_type } =
            Placement::new(&model, backend, options)?;
        let trunk = budget.needs.trunk;

        let resident = slots.holds_all(&model.experts);
        let plan = Plan::new(&model.graph, |_| resident);
        let mut loaded = 0;
        let weights = model.load(|bytes| {
            loaded += bytes;
            progress(loaded, trunk);
        })?;
        let compile = CompileOptions {
            activations: options.activations,
            kv_type,
            max_rows: chunk,
            pages: context.div_ceil(PAGE_TOKENS),
            state_slots,
        };
        let fingerprint = session_file::fingerprint(&model.graph, &weights);
        let executable = backend.compile(&model.graph, plan, weights, compile)?;
        let store = std::mem::take(&mut model.experts);
        let no_memory = |source| Error::Io {
            action: "find memory for experts of",
            path: model.checkpoint().path().into(),
            source,
        };
        let experts = ExpertCache::new(store, slots, queue).map_err(no_memory)?;
        let pool = Arc::new(Pool::new(context.div_ceil(PAGE_TOKENS), state_slots, options.checkpoints));
        let backend = backend.describe();
        Ok(Self {
            model,
            executable,
            fingerprint,
            experts,
            budget,
            backend,
            chunk,
            context,
            pool,
            stats: Stats::default(),
        })
    }

    /// An empty sequence.
    pub fn session(&self) -> Session {
        Session::new(Arc::clone(&self.pool))
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
        let from = (session.position(), session.state().cloned());
        let result = self.eval_from(session, from, tokens, Some(outputs), &mut logits);
        match result {
            Ok(state) => session.extend(tokens, state),
            Err(error) => {
                session.release_pages();
                return Err(error);
            }
        }
        Ok(logits)
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
        let state = self.eval_from(session, (start, state), &again, None, &mut vec![])?;
        session.cut(position, state);
        Ok(())
    }

    /// Evaluates `tokens` as those of `session` after a position where its state was the given one; returns its state
    /// after them. The session gets pages and is otherwise left as it is.
    fn eval_from(
        &mut self,
        session: &mut Session,
        (mut position, mut state): (usize, Option<Arc<Slot>>),
        tokens: &[u32],
        outputs: Option<Outputs>,
        all: &mut Vec<f32>,
    ) -> Result<Option<Arc<Slot>>> {
        let vocab_size = self.model.graph.vocab_size();
        if let Some(position) = tokens.iter().position(|t| *t as usize >= vocab_size) {
            return Err(Error::Token { token: tokens[position], position, vocab_size });
        }
        let wanted = position + tokens.len();
        if wanted > self.context {
            return Err(Error::ContextFull { wanted, context: self.context });
        }
        if tokens.is_empty() {
            return Ok(state);
        }
        let start = Instant::now();
        let mut slots = StateSlots::default();
        if !self.model.graph.states().is_empty() {
            let (new, count) = session.take_slot()?;
            self.executable.reserve_slots(count)?;
            let read = state.as_ref().map_or(new.number(), |slot| slot.number());
            slots = StateSlots { read, write: new.number() };
            state = Some(new);
        }
        let mut logits = vec![];
        for (index, chunk) in tokens.chunks(self.chunk).enumerate() {
            let pages = session.reserve(position + chunk.len())?;
            self.executable.reserve_pages(pages)?;
            let last = (index + 1) * self.chunk >= tokens.len();
            let rows: Vec<u32> = match outputs {
                Some(Outputs::All) => (0..chunk.len() as u32).collect(),
                Some(Outputs::Last) if last => vec![chunk.len() as u32 - 1],
                _ => vec![],
            };
            let span = Span { rows: 0..chunk.len(), start: position, pages: session.pages(), slots };
            let batch = Batch { tokens: chunk, spans: &[span], outputs: &rows };
            let outcome = self.executable.run(&batch, &mut self.experts, &mut logits);
            self.stats.cache += self.experts.take_stats();
            outcome?;
            self.check_finite(&logits, vocab_size, position, &rows)?;
            // The state before is kept; the new one belongs to this evaluation.
            slots.read = slots.write;
            position += chunk.len();
            self.stats.tokens += chunk.len() as u64;
            all.extend_from_slice(&logits);
        }
        self.stats.time += start.elapsed();
        Ok(state)
    }

    /// Corrupt weights must not become silent garbage.
    fn check_finite(&self, logits: &[f32], vocab_size: usize, start: usize, rows: &[u32]) -> Result<()> {
        let bad = logits.chunks_exact(vocab_size).position(|row| row.iter().any(|l| !l.is_finite()));
        let Some(bad) = bad else { return Ok(()) };
        let position = start + rows[bad] as usize;
        Err(Error::NotFinite { position, reason: self.model.find_not_finite() })
    }

    /// Statistics since the last call.
    pub fn take_stats(&mut self) -> Stats {
        std::mem::take(&mut self.stats)
    }

    /// How memory is divided.
    pub fn budget(&self) -> Budget {
        self.budget
    }

    /// The expert cache, for its slots and the experts' sizes.
    pub fn experts(&self) -> &ExpertCache {
        &self.experts
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

    /// Positions that a sequence may have.
    pub fn context(&self) -> usize {
        self.context
    }
}

//! [`Engine`]: a loaded model with its memory, and [`Session`]: one sequence of tokens on it.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use moeflux_compute::backend::{
    ActivationMode, Backend, Batch, CompileOptions, Executable, KvType, PAGE_TOKENS, Span, page_bytes,
};
use moeflux_compute::graph::{ExpertSetId, Op};
use moeflux_compute::plan::Plan;

use crate::checkpoint::Checkpoint;
use crate::experts::{CacheStats, ExpertCache, cache::SlotPlan};
use crate::io::queue::{PreadPool, ReadQueue};
use crate::memory::{self, Budget, Needs};
use crate::models::{self, Model};
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

/// Page numbers that no session holds.
#[derive(Debug)]
struct Pages {
    free: Vec<u32>,
    /// Pages that ever were in use; numbers from here on are unused.
    used: u32,
    limit: u32,
}

/// One sequence of tokens. Dropping it returns its pages.
#[derive(Debug)]
pub struct Session {
    pages: Vec<u32>,
    position: usize,
    pool: Arc<Mutex<Pages>>,
}

impl Session {
    /// Tokens evaluated so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Forgets the tokens from `position` on; does nothing if there are not that many.
    pub fn truncate(&mut self, position: usize) {
        self.position = self.position.min(position);
        let keep = self.position.div_ceil(PAGE_TOKENS);
        if keep < self.pages.len() {
            self.lock().free.extend(self.pages[keep..].iter());
            self.pages.truncate(keep);
        }
    }

    /// Takes pages for `positions` positions; returns the number of pages that must exist.
    fn reserve(&mut self, positions: usize) -> Result<usize> {
        let wanted = positions.div_ceil(PAGE_TOKENS);
        let pool = Arc::clone(&self.pool);
        let mut pool = pool.lock().unwrap_or_else(PoisonError::into_inner);
        while self.pages.len() < wanted {
            let page = match pool.free.pop() {
                Some(page) => page,
                None if pool.used < pool.limit => {
                    pool.used += 1;
                    pool.used - 1
                }
                None => {
                    let context = pool.limit as usize * PAGE_TOKENS;
                    return Err(Error::ContextFull { wanted: positions, context });
                }
            };
            self.pages.push(page);
        }
        Ok(pool.used as usize)
    }

    /// No code that can panic runs under this lock, so a poisoned lock still guards a consistent state.
    fn lock(&self) -> std::sync::MutexGuard<'_, Pages> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.truncate(0);
    }
}

/// A loaded model.
pub struct Engine {
    model: Model,
    executable: Box<dyn Executable>,
    experts: ExpertCache,
    budget: Budget,
    backend: String,
    chunk: usize,
    context: usize,
    pages: Arc<Mutex<Pages>>,
    stats: Stats,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Engine({}, {:?})", self.backend, self.budget)
    }
}

/// Tokens evaluated at once unless said otherwise, and the fewest that a small budget brings it down to.
const CHUNK: usize = 512;
const SMALLEST_CHUNK: usize = 32;
/// Positions of the context unless said otherwise, and the fewest that a small budget brings it down to.
const CONTEXT: usize = 4096;
const SMALLEST_CONTEXT: usize = 512;

fn positive(option: &'static str, value: Option<usize>) -> Result<Option<usize>> {
    match value {
        Some(0) => Err(Error::Option { option, expected: "a positive number".into(), got: "0".into() }),
        other => Ok(other),
    }
}

/// Where a model's parts will be and how big: all that is decided before anything is loaded.
#[derive(Debug, Clone)]
pub struct Placement {
    /// How memory is divided.
    pub budget: Budget,
    /// Slots for routed experts.
    pub slots: SlotPlan,
    /// Most tokens evaluated at once.
    pub chunk: usize,
    /// Positions that a sequence may have.
    pub context: usize,
    /// Precision of cached keys and values.
    pub kv_type: KvType,
}

impl Placement {
    /// Fits `model` into the memory that `options` allow.
    ///
    /// # Errors
    /// [`Error::Budget`] naming the least memory that works, [`Error::Option`] for zeros.
    pub fn new(model: &Model, backend: &dyn Backend, options: &Options) -> Result<Self> {
        let default_kv = if options.activations == ActivationMode::F32 { KvType::F32 } else { KvType::F16 };
        let kv_type = options.kv_type.unwrap_or(default_kv);
        let trunk = model.trunk_bytes();
        let total = options.memory.or_else(default_memory).unwrap_or(u64::MAX);
        let top_k = top_k(model);
        let mut context = positive("context", options.context)?.unwrap_or(model.context_length.min(CONTEXT));
        let mut chunk = positive("chunk", options.chunk)?.unwrap_or(CHUNK).min(context);
        let (budget, slots) = loop {
            let compile = CompileOptions { activations: options.activations, kv_type, max_rows: chunk };
            let plan = Plan::new(&model.graph, |_| true);
            let scratch = backend.scratch_bytes(&model.graph, &plan, compile) as u64;
            let pages = context.div_ceil(PAGE_TOKENS) as u64;
            let kv = (page_bytes(&model.graph, kv_type) as u64).saturating_mul(pages);
            let needs = Needs::new(trunk, kv, scratch, model.graph.vocab_size());
            match fit(model, options, total, needs, top_k) {
                Err(Error::Budget { .. }) if options.chunk.is_none() && chunk > SMALLEST_CHUNK => chunk /= 2,
                Err(Error::Budget { .. }) if options.context.is_none() && context > SMALLEST_CONTEXT => {
                    context /= 2;
                    chunk = chunk.min(context);
                }
                other => break other?,
            }
        };
        Ok(Self { budget, slots, chunk, context, kv_type })
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
        let Placement { budget, slots, chunk, context, kv_type } = Placement::new(&model, backend, options)?;
        let trunk = budget.needs.trunk;

        let resident = slots.holds_all(&model.experts);
        let plan = Plan::new(&model.graph, |_| resident);
        let mut loaded = 0;
        let weights = model.load(|bytes| {
            loaded += bytes;
            progress(loaded, trunk);
        })?;
        let compile = CompileOptions { activations: options.activations, kv_type, max_rows: chunk };
        let executable = backend.compile(&model.graph, plan, weights, compile)?;
        let store = std::mem::take(&mut model.experts);
        let no_memory = |source| Error::Io {
            action: "find memory for experts of",
            path: model.checkpoint().path().into(),
            source,
        };
        let experts = ExpertCache::new(store, slots, queue).map_err(no_memory)?;
        let limit = u32::try_from(context.div_ceil(PAGE_TOKENS)).unwrap_or(u32::MAX);
        let pages = Arc::new(Mutex::new(Pages { free: vec![], used: 0, limit }));
        let backend = backend.describe();
        Ok(Self {
            model,
            executable,
            experts,
            budget,
            backend,
            chunk,
            context,
            pages,
            stats: Stats::default(),
        })
    }

    /// An empty sequence.
    pub fn session(&self) -> Session {
        Session { pages: vec![], position: 0, pool: Arc::clone(&self.pages) }
    }

    /// Appends `tokens` to `session` and returns logits (outputs, vocab_size), row-major.
    ///
    /// After an error the session is as it was before the call.
    ///
    /// # Errors
    /// [`Error::Token`], [`Error::ContextFull`], [`Error::NotFinite`], or a failed read of an expert.
    pub fn eval(&mut self, session: &mut Session, tokens: &[u32], outputs: Outputs) -> Result<Vec<f32>> {
        let before = session.position;
        let mut logits = vec![];
        let result = self.eval_chunks(session, tokens, outputs, &mut logits);
        if result.is_err() {
            session.truncate(before);
        }
        result.map(|()| logits)
    }

    fn eval_chunks(
        &mut self,
        session: &mut Session,
        tokens: &[u32],
        outputs: Outputs,
        all: &mut Vec<f32>,
    ) -> Result<()> {
        let vocab_size = self.model.graph.vocab_size();
        if let Some(position) = tokens.iter().position(|t| *t as usize >= vocab_size) {
            return Err(Error::Token { token: tokens[position], position, vocab_size });
        }
        let wanted = session.position + tokens.len();
        if wanted > self.context {
            return Err(Error::ContextFull { wanted, context: self.context });
        }
        let start = Instant::now();
        let mut logits = vec![];
        for (index, chunk) in tokens.chunks(self.chunk).enumerate() {
            let pages = session.reserve(session.position + chunk.len())?;
            self.executable.reserve_pages(pages);
            let last = (index + 1) * self.chunk >= tokens.len();
            let rows: Vec<u32> = match outputs {
                Outputs::All => (0..chunk.len() as u32).collect(),
                Outputs::Last if last => vec![chunk.len() as u32 - 1],
                Outputs::Last => vec![],
            };
            let span = Span { rows: 0..chunk.len(), start: session.position, pages: &session.pages };
            let batch = Batch { tokens: chunk, spans: &[span], outputs: &rows };
            let outcome = self.executable.run(&batch, &mut self.experts, &mut logits);
            self.stats.cache += self.experts.take_stats();
            outcome?;
            self.check_finite(&logits, vocab_size, session.position, &rows)?;
            session.position += chunk.len();
            self.stats.tokens += chunk.len() as u64;
            all.extend_from_slice(&logits);
        }
        self.stats.time += start.elapsed();
        Ok(())
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

/// Nine tenths of what the system grants: the rest is for page tables, other programs and its own caches.
fn default_memory() -> Option<u64> {
    memory::available().map(|bytes| bytes / 10 * 9)
}

/// Experts that one token needs in a layer, at most.
fn top_k(model: &Model) -> usize {
    let route = |op: &Op| if let Op::Route { route, .. } = op { route.top_k } else { 0 };
    model.graph.nodes().iter().map(|n| route(&n.op)).max().unwrap_or(0)
}

/// Divides the budget and plans slots: as many as it holds, or as many as the options ask for.
fn fit(
    model: &Model,
    options: &Options,
    total: u64,
    needs: Needs,
    top_k: usize,
) -> Result<(Budget, SlotPlan)> {
    let store = &model.experts;
    if let Some(slots) = positive("expert_cache", options.expert_cache)? {
        let plan = SlotPlan::of_slots(store, slots);
        return Ok((Budget::divide(total, needs, plan.bytes())?, plan));
    }
    let largest = (0..store.sets()).map(|set| store.slot_bytes(ExpertSetId(set))).max().unwrap_or(0) as u64;
    let budget = Budget::divide(total, needs, largest * top_k as u64)?;
    match SlotPlan::within(store, budget.experts, top_k) {
        Ok(plan) => Ok((budget, plan)),
        Err(minimum) => Err(Budget::divide(total, needs, minimum).err().unwrap_or_else(|| Error::Budget {
            budget: total,
            minimum,
            parts: "experts".into(),
        })),
    }
}

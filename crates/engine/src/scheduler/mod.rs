//! [`Scheduler`]: one model, many requests at once, on a thread of its own.
//!
//! Every step evaluates one batch: a token of each answer that is being generated, and chunks of the prompts that are
//! being evaluated, so that experts which several of them need are loaded once. Requests are admitted in order of arrival.
//! When key-value pages run out, cached sessions are evicted first, then the newest request is preempted and re-evaluated
//! later; on the CPU that changes no bit of its answer.
//!
//! A request may have several answers: it waits as one, and after each that begins the others go to the end of the queue.
//!
//! Embeddings wait in the same queue and take pages from the same pool. Each input is a sequence of its own, whose session is
//! given up at the end; those of one request take turns with other requests. They are evaluated in batches of their own between
//! those of answers, without the head, and as long as there are answers with no more tokens than prompts beside them.
//!
//! What is no answer, such as logits, is computed between two steps: [`Scheduler::visit`].
//!
//! Nothing here is asynchronous: events go to a closure, or to the iterator [`Answer`].

mod answers;
mod blocks;
mod embed;
mod figures;
mod folder;
mod pace;
mod plan;
mod prefixes;
mod sequence;
mod visit;
mod worker;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use crate::chain::BLOCK_TOKENS;
use crate::chat_template::ChatTemplate;
use crate::decoding::{Constraint, Decoding, DecodingOptions, Piece};
use crate::engine::Engine;
use crate::experts::{CacheStats, ExpertUse};
use crate::generation::{ChatPrompt, EncodedChat, Finish, TextModel, encode_chat_within};
use crate::pictures::{self, Picture};
use crate::tokenizer::{AddSpecial, Tokenizer};
use crate::{Error, Result};

pub use answers::ManyRequest;
use answers::Waiting;
pub use blocks::{BlockEvent, BlockObserver};
pub use embed::EmbedRequest;
use embed::Inputs;
pub use figures::{Figures, Histogram, Memory};
pub use folder::SessionLimits;
pub use visit::Visit;
use visit::Visitor;

/// How requests are served. How many at once is [`Options::sequences`](crate::Options::sequences).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchedulerOptions {
    /// Most requests that wait. Together their prompts have no more tokens than that many of the context's length, unless only
    /// one waits.
    pub queue: usize,
    /// Maximum prompt tokens in a step that also decodes, and tokens of embeddings between two such steps: more is quicker
    /// for them, fewer keeps answers flowing. By default as many as a step's answers take to compute, unless so few tokens cost
    /// more than twice what many do.
    pub prefill_beside_decode: Option<usize>,
    /// Sessions cached after their answers, so that requests with the same prefix skip its evaluation.
    pub kept_sessions: usize,
    /// Folder where conversations with a key are kept on disk.
    pub sessions: Option<PathBuf>,
    /// What that folder may hold.
    pub session_limits: SessionLimits,
}

impl Default for SchedulerOptions {
    fn default() -> Self {
        let session_limits = SessionLimits::default();
        Self { queue: 64, prefill_beside_decode: None, kept_sessions: 16, sessions: None, session_limits }
    }
}

/// A prompt and how to answer it.
#[derive(Default)]
pub struct Request {
    /// Token ids of the prompt, at least one.
    pub prompt: Vec<u32>,
    /// How the answer is generated.
    pub options: DecodingOptions,
    /// Limits the answer, as a grammar does.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Names a conversation that is kept on disk, if [`SchedulerOptions::sessions`] is set.
    pub conversation: Option<String>,
    /// The adapter to answer with, by its name; by default that of [`Engine::set_adapter`].
    pub adapter: Option<String>,
    /// What the prompt shows: its ids that are beyond the vocabulary are theirs, one picture after the other.
    pub pictures: Vec<Arc<Picture>>,
}

impl std::fmt::Debug for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Request({} tokens, {:?})", self.prompt.len(), self.options)
    }
}

/// What happens to a request.
#[derive(Debug)]
pub enum Event {
    /// More of the prompt was evaluated; not sent for a prompt that takes a single step.
    Progress(Progress),
    /// A step of the answer.
    Piece(Piece),
    /// The answer is complete.
    Done(Done),
    /// The request failed; others continue.
    Failed(Error),
}

/// How far a prompt is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Tokens of the prompt.
    pub tokens: usize,
    /// Of these, tokens that an earlier request had left evaluated.
    pub cached: usize,
    /// Tokens evaluated so far, with the cached ones.
    pub evaluated: usize,
    /// Since submission.
    pub time: Duration,
}

/// How an answer ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Done {
    /// Why.
    pub finish: Finish,
    /// The stop text that was found.
    pub stopped_by: Option<String>,
    /// What it took.
    pub usage: Usage,
    /// Why the conversation could not be loaded or saved.
    pub warning: Option<String>,
}

/// What an answer took.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, tokens that an earlier request had left evaluated.
    pub cached_tokens: usize,
    /// Tokens of the answer, without the one that ends texts.
    pub completion_tokens: usize,
    /// Tokens guessed and verified.
    pub drafted_tokens: u64,
    /// Of these, those that were right.
    pub accepted_tokens: u64,
    /// From submission to admission.
    pub queued: Duration,
    /// From submission to the first token.
    pub first_token: Duration,
    /// From submission to the end.
    pub total: Duration,
    /// The request's share, by tokens, of what the batches it was in asked of the expert cache.
    pub experts: ExpertShare,
    /// The seed in use.
    pub seed: u64,
    /// Times that it was preempted because memory was short.
    pub preemptions: usize,
}

/// A request's part in what the expert cache did.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ExpertShare {
    /// Experts that were in memory when they were requested.
    pub hits: u64,
    /// Experts that were not.
    pub misses: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Time that computing stood still waiting for reads.
    pub stall: Duration,
}

impl ExpertShare {
    /// Adds a fraction of what was done for a batch.
    fn add(&mut self, all: &CacheStats, fraction: f64) {
        let of = |count: u64| (count as f64 * fraction).round() as u64;
        self.hits += of(all.hits);
        self.misses += of(all.misses);
        self.bytes_read += of(all.bytes_read);
        self.stall += all.stall.mul_f64(fraction);
    }
}

/// How often [`Scheduler::grant`] looks whether the engine's thread has ended.
const GRANT_LOOK: Duration = Duration::from_millis(100);

type Sink = Box<dyn FnMut(Event) + Send>;

/// What a request asks for.
enum Work {
    /// Answers.
    Answer(Box<Waiting>),
    /// Embeddings.
    Embed(Inputs),
}

impl Work {
    /// Tokens that wait with it.
    fn tokens(&self) -> usize {
        match self {
            Self::Answer(waiting) => waiting.tokens(),
            Self::Embed(inputs) => inputs.tokens(),
        }
    }
}

/// A request in the queue.
struct Job {
    work: Work,
    cancelled: Arc<AtomicBool>,
    submitted: Instant,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// Requests, and inputs of them, that have been taken from `jobs` and not ended.
    running: usize,
    /// Set when no more requests are taken.
    closed: bool,
    /// Set when those being answered are given up too.
    abandoned: bool,
    /// The memory budget that the engine is to have.
    grant: Option<u64>,
    /// Who wants the engine between two steps.
    visitors: VecDeque<Visitor>,
}

/// What the scheduler's thread and its users share.
struct Shared {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    options: SchedulerOptions,
    description: Description,
    queue: Mutex<Queue>,
    /// Signalled when the queue or its flags change.
    changed: Condvar,
    figures: Mutex<Figures>,
    expert_use: ExpertUse,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these locks guard is replaced or appended to in single steps.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is being served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// The backend's name and hardware.
    pub backend: String,
    /// Maximum positions of a sequence.
    pub context: usize,
    /// Sequences evaluated at the same time.
    pub sequences: usize,
    /// Pages of keys and values.
    pub pages: usize,
    /// Routed experts that the model has.
    pub experts: usize,
    /// Width of embeddings.
    pub hidden_size: usize,
    /// Tokens that the model knows; its tokenizer may have fewer.
    pub vocab_size: usize,
    /// Names of the adapters that requests may ask for.
    pub adapters: Vec<String>,
    /// Whether it reads pictures.
    pub reads_pictures: bool,
}

impl Description {
    fn new(engine: &Engine) -> Self {
        Self {
            backend: engine.backend().to_owned(),
            context: engine.context(),
            sequences: engine.sequences(),
            pages: engine.pages(),
            experts: engine.expert_use().layers().map(|(_, counts)| counts.len()).sum(),
            hidden_size: engine.hidden_size(),
            vocab_size: engine.model().graph.vocab_size(),
            adapters: engine.model().adapter_names().map(str::to_owned).collect(),
            reads_pictures: engine.reads_pictures(),
        }
    }
}

/// A model that answers many requests at once. Dropping it aborts those that are running.
pub struct Scheduler {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Scheduler({:?})", self.shared.description)
    }
}

impl Scheduler {
    /// Starts the thread that runs `model`.
    ///
    /// # Errors
    /// If the system has no thread, or the folder for sessions cannot be made or cleaned up.
    pub fn start(model: TextModel, options: SchedulerOptions) -> Result<Self> {
        Self::launch(model, options, None)
    }

    /// As [`Scheduler::start`]; `observer` is told after every step which blocks prompts can begin with. It is called on the
    /// engine's thread and must not wait.
    ///
    /// # Errors
    /// As [`Scheduler::start`].
    pub fn start_observed(
        model: TextModel,
        options: SchedulerOptions,
        observer: impl FnMut(Vec<BlockEvent>) + Send + 'static,
    ) -> Result<Self> {
        Self::launch(model, options, Some(Box::new(observer)))
    }

    fn launch(model: TextModel, options: SchedulerOptions, observer: Option<BlockObserver>) -> Result<Self> {
        if let Some(folder) = &options.sessions {
            let io = |source| Error::Io { action: "make", path: folder.clone(), source };
            std::fs::create_dir_all(folder).map_err(io)?;
            let io = |source| Error::Io { action: "clean up", path: folder.clone(), source };
            folder::prune(folder, options.session_limits).map_err(io)?;
        }
        let TextModel { engine, tokenizer, template } = model;
        let path = engine.model().checkpoint().path().to_owned();
        let shared = Arc::new(Shared {
            tokenizer,
            template,
            options,
            description: Description::new(&engine),
            queue: Mutex::default(),
            changed: Condvar::new(),
            figures: Mutex::new(Figures { memory: Memory::of(&engine), ..Figures::default() }),
            expert_use: engine.expert_use().clone(),
        });
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("moeflux-engine".into());
        let thread = thread.spawn(move || worker::run(&theirs, engine, observer));
        let thread = thread.map_err(|source| Error::Io { action: "start a thread for", path, source })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Queues a request; its events are what the returned iterator gives.
    ///
    /// # Errors
    /// As [`Scheduler::submit_to`].
    pub fn submit(&self, request: Request) -> Result<Answer> {
        let (sender, events) = mpsc::channel();
        let ticket = self.submit_to(request, move |event| drop(sender.send(event)))?;
        Ok(Answer { events, ticket })
    }

    /// Queues a request; its events go to `sink`, which is called on the engine's thread and must not wait.
    ///
    /// # Errors
    /// [`Error::QueueFull`], [`Error::ShuttingDown`]; [`Error::ContextFull`], [`Error::UnknownToken`] or [`Error::Option`]
    /// for a request that could not be answered.
    pub fn submit_to(&self, request: Request, sink: impl FnMut(Event) + Send + 'static) -> Result<Ticket> {
        let mut sink = sink;
        self.submit_many_to(request.into(), move |_, event| sink(event))
    }

    /// Queues a request for several answers, all or none; the events of each go to `sink` with its number, which counts
    /// through the answers to the first prompt, then those to the second. It is called on the engine's thread and must not
    /// wait.
    ///
    /// # Errors
    /// As [`Scheduler::submit_to`].
    pub fn submit_many_to(
        &self,
        request: ManyRequest,
        sink: impl FnMut(usize, Event) + Send + 'static,
    ) -> Result<Ticket> {
        self.check(&request)?;
        self.enqueue(Work::Answer(Box::new(Waiting::new(request, Box::new(sink)))))
    }

    /// The embeddings of all inputs, (hidden_size) each, of length 1; waits for them.
    ///
    /// # Errors
    /// As [`Scheduler::embed_to`], and the first input's that fails.
    pub fn embed(&self, request: EmbedRequest) -> Result<Vec<Vec<f32>>> {
        let mut embeddings = vec![vec![]; request.inputs.len()];
        let (sender, results) = mpsc::channel();
        let _ticket = self.embed_to(request, move |input, result| drop(sender.send((input, result))))?;
        for _ in 0..embeddings.len() {
            let (input, result) = results.recv().map_err(|_| Error::ShuttingDown)?;
            embeddings[input] = result?;
        }
        Ok(embeddings)
    }

    /// Queues a request for embeddings; each input's number and embedding go to `sink`, in any order, which is called on the
    /// engine's thread and must not wait. An input that fails leaves the others alone.
    ///
    /// # Errors
    /// [`Error::QueueFull`], [`Error::ShuttingDown`]; [`Error::ContextFull`], [`Error::Token`] or [`Error::Option`] for
    /// inputs that cannot be evaluated.
    pub fn embed_to(
        &self,
        request: EmbedRequest,
        sink: impl FnMut(usize, Result<Vec<f32>>) + Send + 'static,
    ) -> Result<Ticket> {
        let description = &self.shared.description;
        request.check(description.vocab_size, description.context)?;
        self.enqueue(Work::Embed(Inputs::new(request, Box::new(sink))))
    }

    fn enqueue(&self, work: Work) -> Result<Ticket> {
        let cancelled = Arc::new(AtomicBool::new(false));
        let ticket = Ticket { cancelled: Arc::clone(&cancelled), shared: Arc::clone(&self.shared) };
        let mut queue = lock(&self.shared.queue);
        if queue.closed {
            return Err(Error::ShuttingDown);
        }
        queue.jobs.retain(|job| !job.cancelled.load(Ordering::Relaxed));
        let waiting = queue.jobs.len();
        let Shared { options, description, .. } = &*self.shared;
        let tokens: usize = queue.jobs.iter().map(|job| job.work.tokens()).sum();
        let room = options.queue.saturating_mul(description.context);
        if waiting >= options.queue || (waiting > 0 && tokens.saturating_add(work.tokens()) > room) {
            drop(queue);
            let mut figures = lock(&self.shared.figures);
            figures.refused += 1;
            let rounds = waiting.div_ceil(description.sequences) as f64;
            let seconds = (figures.duration.mean() * rounds).clamp(1.0, 60.0);
            return Err(Error::QueueFull { waiting, retry_after: Duration::from_secs_f64(seconds) });
        }
        queue.jobs.push_back(Job { work, cancelled, submitted: Instant::now() });
        drop(queue);
        self.shared.changed.notify_all();
        Ok(ticket)
    }

    /// Refuses what could not be answered.
    fn check(&self, request: &ManyRequest) -> Result<()> {
        let Shared { tokenizer, description, .. } = &*self.shared;
        let ManyRequest { prompts, answers, options, adapter, pictures, .. } = request;
        let refuse = |option, expected: &str, got: &str| {
            Err(Error::Option { option, expected: expected.into(), got: got.into() })
        };
        if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
            return refuse("prompt", "at least one token", "none");
        }
        if let Some(adapter) = adapter.as_ref().filter(|name| !description.adapters.contains(name)) {
            return refuse("adapter", &format!("one of {}", description.adapters.join(", ")), adapter);
        }
        if *answers == 0 {
            return refuse("answers", "a positive number", "0");
        }
        if options.stop.iter().any(String::is_empty) {
            return refuse("stop", "non-empty strings", "\"\"");
        }
        for prompt in prompts {
            if prompt.len() >= description.context {
                // One position is for the answer.
                return Err(Error::ContextFull { wanted: prompt.len() + 1, context: description.context });
            }
            pictures::check_shown(prompt, pictures)?;
            // Checks the sampler's options and the prompt's tokens.
            Decoding::new(tokenizer, prompt, options.clone(), None)?;
        }
        Ok(())
    }

    /// Takes no more requests; those that have been taken are answered.
    pub fn drain(&self) {
        lock(&self.shared.queue).closed = true;
        self.shared.changed.notify_all();
    }

    /// Gives up every request at the next step, and takes no more.
    pub fn abandon(&self) {
        let mut queue = lock(&self.shared.queue);
        (queue.closed, queue.abandoned) = (true, true);
        drop(queue);
        self.shared.changed.notify_all();
    }

    /// Changes the engine's memory budget as [`Engine::grant`] does, between two steps; waits until that is done.
    pub fn grant(&self, memory: u64) {
        let mut queue = lock(&self.shared.queue);
        queue.grant = Some(memory);
        self.shared.changed.notify_all();
        while queue.grant.is_some() && self.is_alive() {
            let waited = self.shared.changed.wait_timeout(queue, GRANT_LOOK);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Whether nothing is waiting and nothing being answered, for good if requests are no longer taken.
    pub fn is_idle(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished) || {
            let queue = lock(&self.shared.queue);
            queue.jobs.is_empty() && queue.visitors.is_empty() && queue.running == 0
        }
    }

    /// Whether the engine's thread is there: it ends when the last request has been answered after [`Scheduler::drain`],
    /// or by a fault of its own.
    pub fn is_alive(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Whether requests are taken.
    pub fn is_open(&self) -> bool {
        !lock(&self.shared.queue).closed
    }

    /// The model's tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.shared.tokenizer
    }

    /// The model's chat template, if it has one.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.shared.template.as_ref()
    }

    /// Encodes a prompt.
    ///
    /// # Errors
    /// [`Error::Tokenizer`]; [`Error::ContextFull`] for a text that is too long by far, before it is tokenised whole.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let Shared { tokenizer, description, .. } = &*self.shared;
        tokenizer.encode_within(text, AddSpecial::Yes, description.context)
    }

    /// Renders and encodes a conversation.
    ///
    /// # Errors
    /// As [`encode_chat`](crate::generation::encode_chat) and [`Scheduler::encode`].
    pub fn encode_chat(&self, conversation: &ChatPrompt<'_>) -> Result<EncodedChat> {
        let Shared { tokenizer, template, description, .. } = &*self.shared;
        encode_chat_within(tokenizer, template.as_ref(), conversation, description.context)
    }

    /// What is being served.
    pub fn description(&self) -> &Description {
        &self.shared.description
    }

    /// What has been done so far, and the current state.
    pub fn figures(&self) -> Figures {
        let queue = lock(&self.shared.queue);
        let (waiting, running) = (queue.jobs.len(), queue.running);
        drop(queue);
        Figures { waiting, running, ..lock(&self.shared.figures).clone() }
    }

    /// How often each expert was needed.
    pub fn expert_use(&self) -> &ExpertUse {
        &self.shared.expert_use
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.abandon();
        if let Some(thread) = self.thread.take() {
            // A panic of that thread has been reported by then.
            let _ = thread.join();
        }
    }
}

/// A claim on a request. Dropping it cancels the request within one step.
pub struct Ticket {
    cancelled: Arc<AtomicBool>,
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Ticket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ticket(cancelled: {:?})", self.cancelled)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.cancelled.store(true, Ordering::Relaxed);
        self.shared.changed.notify_all();
    }
}

/// The events of a request as they come. Dropping it cancels the request.
#[derive(Debug)]
pub struct Answer {
    events: mpsc::Receiver<Event>,
    ticket: Ticket,
}

impl Iterator for Answer {
    type Item = Event;

    /// Waits for the next event; `None` after the last one.
    fn next(&mut self) -> Option<Event> {
        self.events.recv().ok()
    }
}

impl Answer {
    /// Waits for the whole answer.
    ///
    /// # Errors
    /// The request's, or [`Error::ShuttingDown`] if it was given up.
    pub fn text(self) -> Result<(String, Done)> {
        let mut text = String::new();
        for event in self.events.iter() {
            match event {
                Event::Progress(_) => {}
                Event::Piece(piece) => text.push_str(&piece.text),
                Event::Done(done) => return Ok((text, done)),
                Event::Failed(error) => return Err(error),
            }
        }
        drop(self.ticket);
        Err(Error::ShuttingDown)
    }
}

//! The scheduler's thread: admission, batches, what becomes of their results.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use moeflux_compute::draw::Draw;

use super::folder;
use super::prefixes::{self, Prefixes, common};
use super::{Done, Event, Job, Memory, Progress, Queue, Request, Shared, Sink, Usage, lock, plan};
use crate::batch::Part;
use crate::decoding::{Decoding, Piece};
use crate::engine::{Engine, Outputs, Stats};
use crate::generation::Finish;
use crate::session::Session;
use crate::{Error, Result};

/// A beginning that is worth waiting for while another request evaluates it.
const SHARED_PREFIX: usize = 64;

/// Serves until no more requests are taken and all are answered.
pub(super) fn run(shared: &Shared, engine: Engine) {
    // Whatever ends this thread, a panic included: nobody may wait for it any longer.
    let _closing = Closing(shared);
    let prefixes = Prefixes::new(shared.options.kept_sessions);
    let mut worker =
        Worker { shared, engine, running: vec![], put_back: VecDeque::new(), prefixes, admitted: 0, turn: 0 };
    while worker.wait() {
        worker.drop_cancelled();
        worker.admit();
        worker.step();
        worker.note();
    }
    worker.prefixes = Prefixes::new(0);
    worker.note();
}

struct Closing<'a>(&'a Shared);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        let mut queue = lock(&self.0.queue);
        queue.closed = true;
        queue.jobs.clear();
        queue.running = 0;
    }
}

/// What a sequence got of a batch.
enum Row {
    /// Nothing: it is in the middle of its prompt.
    None,
    Logits(Vec<f32>),
    /// The token that was chosen where the logits are.
    Token(u32),
}

impl Row {
    fn of(logits: Vec<f32>) -> Self {
        if logits.is_empty() { Self::None } else { Self::Logits(logits) }
    }
}

/// A request that has been admitted.
struct Sequence<'t> {
    /// Order of admission.
    number: u64,
    sink: Sink,
    cancelled: Arc<AtomicBool>,
    conversation: Option<String>,
    decoding: Decoding<'t>,
    /// Prompt and answer; those after the session's position have yet to be evaluated.
    tokens: Vec<u32>,
    session: Session,
    /// Position at which other requests are known to branch off.
    branch: Option<usize>,
    usage: Usage,
    submitted: Instant,
    last_token: Option<Instant>,
    warning: Option<String>,
}

impl Sequence<'_> {
    fn pending(&self) -> usize {
        self.tokens.len() - self.session.position()
    }

    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// The next step of the answer, by the logits of its last token.
    fn next(&mut self, logits: &[f32], context: usize) -> Result<Piece> {
        let piece = self.decoding.next(logits)?;
        self.unless_full(piece, context)
    }

    /// The same with a token that was chosen as its draw says.
    fn next_drawn(&mut self, token: u32, context: usize) -> Result<Piece> {
        let piece = self.decoding.next_drawn(token)?;
        self.unless_full(piece, context)
    }

    fn unless_full(&mut self, piece: Piece, context: usize) -> Result<Piece> {
        if piece.finish.is_none() && self.session.position() == context {
            self.decoding.finish(piece, Finish::ContextFull)
        } else {
            Ok(piece)
        }
    }

    /// Says how far the prompt is, unless it is read again.
    fn tell_progress(&mut self) {
        let (tokens, cached) = (self.usage.prompt_tokens, self.usage.cached_tokens);
        if self.usage.completion_tokens == 0 {
            let (evaluated, time) = (self.session.position(), self.submitted.elapsed());
            (self.sink)(Event::Progress(Progress { tokens, cached, evaluated, time }));
        }
    }

    /// Reading its prompt still, or again.
    fn is_reading(&self) -> bool {
        self.pending() > 1
    }
}

struct Worker<'t> {
    shared: &'t Shared,
    engine: Engine,
    running: Vec<Sequence<'t>>,
    /// Requests whose sessions were given up when memory ran short, oldest first.
    put_back: VecDeque<Sequence<'t>>,
    prefixes: Prefixes,
    admitted: u64,
    /// Which sequence comes first when a batch does not hold all.
    turn: usize,
}

impl<'t> Worker<'t> {
    /// Waits for something to do; false when there never will be.
    fn wait(&mut self) -> bool {
        let mut queue = lock(&self.shared.queue);
        loop {
            if queue.abandoned {
                return false;
            }
            if let Some(memory) = queue.grant {
                drop(queue);
                self.grant(memory);
                queue = lock(&self.shared.queue);
                continue;
            }
            if !self.running.is_empty() || !self.put_back.is_empty() || !queue.jobs.is_empty() {
                return true;
            }
            if queue.closed {
                return false;
            }
            queue = self.shared.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn grant(&mut self, memory: u64) {
        self.engine.grant(memory);
        lock(&self.shared.figures).memory = Memory::of(&self.engine);
        let mut queue = lock(&self.shared.queue);
        // Another one may have come meanwhile.
        queue.grant = queue.grant.filter(|newer| *newer != memory);
        drop(queue);
        self.shared.changed.notify_all();
    }

    fn drop_cancelled(&mut self) {
        let mut count = 0;
        lock(&self.shared.queue).jobs.retain(|job| {
            let gone = job.cancelled.load(Ordering::Relaxed);
            count += u64::from(gone);
            !gone
        });
        self.put_back.retain(|sequence| {
            count += u64::from(sequence.is_cancelled());
            !sequence.is_cancelled()
        });
        for sequence in self.running.extract_if(.., |sequence| sequence.is_cancelled()) {
            count += 1;
            self.prefixes.keep(sequence.session, None);
        }
        if count > 0 {
            lock(&self.shared.figures).cancelled += count;
        }
    }

    fn admit(&mut self) {
        while self.running.len() < self.engine.sequences() {
            let sequence = match self.put_back.pop_front() {
                Some(mut sequence) => {
                    sequence.session = self.begin(&sequence.tokens, None).0;
                    sequence
                }
                None => {
                    let Some(job) = self.next_job() else { return };
                    let Some(sequence) = self.start(job) else { continue };
                    sequence
                }
            };
            if !self.has_room(&sequence) {
                return self.postpone(sequence);
            }
            self.running.push(sequence);
        }
    }

    /// Whether what `sequence` and the running ones have yet to evaluate fits in memory, if need be without cached sessions.
    fn has_room(&mut self, sequence: &Sequence<'t>) -> bool {
        let wanted = |s: &Sequence<'_>| s.session.pages_wanted(s.session.position(), s.tokens.len() + 1);
        loop {
            let all = wanted(sequence) + self.running.iter().map(wanted).sum::<usize>();
            if all <= self.engine.free_pages() {
                return true;
            }
            if !self.prefixes.evict() {
                // One alone fits always.
                return self.running.is_empty();
            }
        }
    }

    /// Lets a request wait for memory, before any that came after it.
    fn postpone(&mut self, mut sequence: Sequence<'t>) {
        sequence.session = self.engine.session();
        sequence.branch = None;
        let after = self.put_back.iter().position(|other| other.number > sequence.number);
        self.put_back.insert(after.unwrap_or(self.put_back.len()), sequence);
    }

    /// The first request in the queue, but for those whose beginning is just being evaluated for another one.
    fn next_job(&self) -> Option<Job> {
        let mut queue: std::sync::MutexGuard<'_, Queue> = lock(&self.shared.queue);
        let index = queue.jobs.iter().position(|job| {
            let prompt = &job.request.prompt;
            let known = self.prefixes.longest(prompt);
            !self.running.iter().filter(|s| s.is_reading()).any(|s| {
                let shared = common(&s.tokens, prompt).min(prompt.len() - 1);
                shared >= known.max(s.session.position()) + SHARED_PREFIX
            })
        })?;
        queue.running += 1;
        queue.jobs.remove(index)
    }

    /// Makes a sequence of a request; `None` if it failed.
    fn start(&mut self, job: Job) -> Option<Sequence<'t>> {
        let Job { request, mut sink, cancelled, submitted } = job;
        let Request { prompt, options, constraint, conversation } = request;
        let decoding = match Decoding::new(&self.shared.tokenizer, &prompt, options, constraint) {
            Ok(decoding) => decoding,
            Err(error) => {
                lock(&self.shared.figures).failed += 1;
                sink(Event::Failed(error));
                return None;
            }
        };
        let mut warning = None;
        if let (Some(key), Some(folder)) = (&conversation, &self.shared.options.sessions)
            && !self.prefixes.has(key)
        {
            match prefixes::load(&mut self.engine, folder, key) {
                Ok(Some(session)) => self.prefixes.keep(session, conversation.clone()),
                Ok(None) => {}
                Err(error) => warning = Some(error.to_string()),
            }
        }
        let (session, branch) = self.begin(&prompt, Some(prompt.len() - 1));
        let usage = Usage {
            prompt_tokens: prompt.len(),
            cached_tokens: session.position(),
            queued: submitted.elapsed(),
            seed: decoding.seed(),
            ..Usage::default()
        };
        lock(&self.shared.figures).cached_tokens += session.position() as u64;
        self.admitted += 1;
        Some(Sequence {
            number: self.admitted,
            sink,
            cancelled,
            conversation,
            decoding,
            tokens: prompt,
            session,
            branch,
            usage,
            submitted,
            last_token: None,
            warning,
        })
    }

    /// A session with as much of `tokens` as is cached, except the last one; also the position at which a cached
    /// session could have branched off, had it kept its state there.
    fn begin(&mut self, tokens: &[u32], branch_before: Option<usize>) -> (Session, Option<usize>) {
        let tokens = &tokens[..tokens.len() - 1];
        let kept = self.prefixes.find(tokens);
        let position = |session: &Session| session.fork_position(common(session.tokens(), tokens));
        let sibling = self.running.iter().map(|s| &s.session).max_by_key(|session| position(session));
        let session = match (kept, sibling) {
            (Some(kept), Some(sibling)) if position(sibling) > kept.position() => {
                sibling.fork(position(sibling))
            }
            (Some(kept), _) => kept,
            (None, Some(sibling)) => sibling.fork(position(sibling)),
            (None, None) => self.engine.session(),
        };
        let branch = self.prefixes.longest(tokens);
        let known = session.position();
        let worth = branch_before.filter(|limit| branch >= known + SHARED_PREFIX && branch < *limit);
        (session, worth.map(|_| branch))
    }

    /// Evaluates one batch.
    fn step(&mut self) {
        if self.running.is_empty() {
            return;
        }
        let given = loop {
            let given = self.divide();
            let wanted: usize = self
                .running
                .iter()
                .zip(&given)
                .map(|(s, given)| (s.session.position(), given, s))
                .map(|(from, given, s)| s.session.pages_wanted(from, from + given))
                .sum();
            if wanted <= self.engine.free_pages() || !self.make_room() {
                break given;
            }
        };
        self.turn += 1;
        self.engine.take_stats();
        let result = match self.evaluate(&given) {
            Err(Error::StatesFull { .. }) if self.make_room() => return,
            other => other,
        };
        let stats = self.engine.take_stats();
        let tokens = given.iter().sum::<usize>().max(1);
        for (sequence, given) in self.running.iter_mut().zip(&given) {
            sequence.usage.experts.add(&stats.cache, *given as f64 / tokens as f64);
        }
        self.count(&stats, &given);
        let results = match result {
            Ok(results) => results.into_iter().map(Ok).collect(),
            // One of them is the cause: by themselves the others go on.
            Err(_) if self.running.len() > 1 => self.evaluate_one_by_one(&given),
            Err(error) => vec![Err(error)],
        };
        let mut outcomes = self.decode(results);
        for (index, given) in given.iter().enumerate().rev() {
            if let Some(outcome) = outcomes.pop()
                && *given > 0
            {
                self.settle(index, outcome);
            }
        }
    }

    /// Chooses the next token of every sequence that has logits, or takes that which was chosen. Sequences do not depend on
    /// each other, so they are spread over the threads that have just computed.
    fn decode(&mut self, results: Vec<Result<Row>>) -> Vec<Result<Option<Piece>>> {
        type Slot<'a, 't> = (&'a mut Sequence<'t>, Result<Row>, Result<Option<Piece>>);
        let context = self.engine.context();
        let slots: Vec<Mutex<Slot<'_, '_>>> = self
            .running
            .iter_mut()
            .zip(results)
            .map(|(sequence, result)| Mutex::new((sequence, result, Ok(None))))
            .collect();
        self.engine.run_tasks(slots.len(), &|index| {
            let (sequence, result, outcome) = &mut *lock(&slots[index]);
            *outcome = std::mem::replace(result, Ok(Row::None)).and_then(|row| match row {
                Row::None => Ok(None),
                Row::Logits(logits) => sequence.next(&logits, context).map(Some),
                Row::Token(token) => sequence.next_drawn(token, context).map(Some),
            });
        });
        let slots = slots.into_iter().map(|slot| slot.into_inner().unwrap_or_else(PoisonError::into_inner));
        slots.map(|(_, _, outcome)| outcome).collect()
    }

    fn divide(&self) -> Vec<usize> {
        let pending: Vec<usize> = self.running.iter().map(Sequence::pending).collect();
        let mut given =
            plan::divide(&pending, self.engine.chunk(), self.shared.options.prefill_beside_decode, self.turn);
        for (sequence, given) in self.running.iter().zip(&mut given) {
            if let Some(branch) = sequence.branch.filter(|branch| *branch > sequence.session.position()) {
                *given = (*given).min(branch - sequence.session.position());
            }
        }
        given
    }

    /// Evicts a cached session or, if there is none, preempts the newest request; false if there is only one.
    fn make_room(&mut self) -> bool {
        if self.prefixes.evict() {
            return true;
        }
        if self.running.len() < 2 {
            return false;
        }
        let last = (0..self.running.len()).max_by_key(|i| self.running[*i].number).expect("not empty");
        let mut sequence = self.running.remove(last);
        sequence.usage.preemptions += 1;
        self.postpone(sequence);
        lock(&self.shared.figures).preemptions += 1;
        true
    }

    fn evaluate(&mut self, given: &[usize]) -> Result<Vec<Row>> {
        let vocab_size = self.shared.tokenizer.vocab_size();
        let draws_tokens = self.engine.draws_tokens();
        let drawing = self.running.iter().filter(|_| draws_tokens);
        let draws: Vec<Option<Draw>> = drawing.map(|sequence| sequence.decoding.draw()).collect();
        let mut parts: Vec<Part<'_>> =
            self.running.iter_mut().zip(given).map(|(sequence, given)| part(sequence, *given)).collect();
        if !draws_tokens {
            return Ok(self.engine.eval_batch(&mut parts)?.into_iter().map(Row::of).collect());
        }
        let has_output: Vec<bool> =
            parts.iter().map(|part| part.outputs.is_some() && !part.tokens.is_empty()).collect();
        let chosen = self.engine.eval_and_draw(&mut parts, &draws, vocab_size)?;
        let mut rows = vec![];
        let mut outputs = 0;
        for (token, has_output) in chosen.into_iter().zip(has_output) {
            rows.push(match token {
                Some(token) => Row::Token(token),
                None if has_output => Row::Logits(self.engine.read_logits(outputs)?),
                None => Row::None,
            });
            outputs += usize::from(has_output);
        }
        Ok(rows)
    }

    fn evaluate_one_by_one(&mut self, given: &[usize]) -> Vec<Result<Row>> {
        let mut results = vec![];
        for (sequence, given) in self.running.iter_mut().zip(given) {
            let result = self.engine.eval_batch(&mut [part(sequence, *given)]);
            results.push(result.map(|mut logits| Row::of(logits.pop().unwrap_or_default())));
        }
        results
    }

    /// Goes on with a sequence after its part of a batch.
    fn settle(&mut self, index: usize, outcome: Result<Option<Piece>>) {
        let sequence = &mut self.running[index];
        if sequence.branch == Some(sequence.session.position()) {
            sequence.session.checkpoint();
            sequence.branch = None;
        }
        if sequence.usage.completion_tokens == 0 && !matches!(outcome, Ok(None)) {
            // Templates may show an answer otherwise once it is past: conversations go on from here.
            sequence.session.checkpoint();
        }
        match outcome {
            Ok(None) => sequence.tell_progress(),
            Ok(Some(piece)) => self.advance(index, piece),
            Err(error) => {
                let mut sequence = self.running.remove(index);
                (sequence.sink)(Event::Failed(error));
                lock(&self.shared.figures).failed += 1;
            }
        }
    }

    /// Takes a step of the answer to whoever asked.
    fn advance(&mut self, index: usize, piece: Piece) {
        let sequence = &mut self.running[index];
        let now = Instant::now();
        let mut figures = lock(&self.shared.figures);
        match sequence.last_token.replace(now) {
            Some(last) => figures.between_tokens.add((now - last).as_secs_f64()),
            None => {
                sequence.usage.first_token = sequence.submitted.elapsed();
                figures.first_token.add(sequence.usage.first_token.as_secs_f64());
            }
        }
        if let Some(token) = piece.token {
            sequence.tokens.push(token);
            sequence.usage.completion_tokens += 1;
            figures.generated_tokens += 1;
        }
        drop(figures);
        let finish = piece.finish;
        if piece.token.is_some() || !piece.text.is_empty() {
            (sequence.sink)(Event::Piece(piece));
        }
        if let Some(finish) = finish {
            let sequence = self.running.remove(index);
            self.complete(sequence, finish);
        }
    }

    fn complete(&mut self, sequence: Sequence<'t>, finish: Finish) {
        let Sequence { mut sink, mut usage, decoding, session, conversation, mut warning, submitted, .. } =
            sequence;
        if let (Some(key), Some(folder)) = (&conversation, &self.shared.options.sessions)
            && let Err(error) = self.save(&session, folder, key)
        {
            warning = Some(error.to_string());
        }
        usage.total = submitted.elapsed();
        let mut figures = lock(&self.shared.figures);
        figures.finished += 1;
        figures.duration.add(usage.total.as_secs_f64());
        drop(figures);
        self.prefixes.keep(session, conversation);
        let stopped_by = decoding.stopped_by().map(str::to_owned);
        sink(Event::Done(Done { finish, stopped_by, usage, warning }));
    }

    /// Saves a conversation, and removes what there is too much of.
    fn save(&self, session: &Session, folder: &Path, key: &str) -> Result<()> {
        self.engine.save(session, &prefixes::file_of(folder, key), key)?;
        let io = |source| Error::Io { action: "clean up", path: folder.to_owned(), source };
        folder::prune(folder, self.shared.options.session_limits).map_err(io)
    }

    /// Counts a batch.
    fn count(&self, stats: &Stats, given: &[usize]) {
        let reading = |(s, given): (&Sequence<'_>, &usize)| match s.usage.completion_tokens {
            0 => *given as u64,
            _ => 0,
        };
        let mut figures = lock(&self.shared.figures);
        figures.steps += 1;
        figures.prompt_tokens += self.running.iter().zip(given).map(reading).sum::<u64>();
        figures.busy_seconds += stats.time.as_secs_f64();
        figures.experts += stats.cache;
        figures.batch.add(given.iter().filter(|given| **given > 0).count() as f64);
    }

    /// Notes how things stand.
    fn note(&self) {
        let used = self.engine.pages() - self.engine.free_pages();
        let mut running: Vec<u32> = self.running.iter().flat_map(|s| s.session.pages()).copied().collect();
        running.sort_unstable();
        running.dedup();
        let mut figures = lock(&self.shared.figures);
        figures.pages_used = used;
        figures.pages_running = running.len();
        figures.kept_sessions = self.prefixes.len();
        drop(figures);
        lock(&self.shared.queue).running = self.running.len() + self.put_back.len();
    }
}

/// The next `given` tokens of a sequence, with logits if they are its last.
fn part<'a>(sequence: &'a mut Sequence<'_>, given: usize) -> Part<'a> {
    let from = sequence.session.position();
    let last = from + given == sequence.tokens.len();
    Part {
        tokens: &sequence.tokens[from..from + given],
        session: &mut sequence.session,
        outputs: last.then_some(Outputs::Last),
    }
}

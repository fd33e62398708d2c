//! The scheduler's thread: admission, batches, what becomes of their results.

mod evaluate;
mod overlap;
mod speculate;

use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use evaluate::Row;
use overlap::Ahead;

use super::blocks::{BlockObserver, Ledger};
use super::folder;
use super::pace::Pace;
use super::prefixes::{self, Prefixes, common};
use super::sequence::{Answering, Kind, Sequence, Task};
use super::{Done, Event, Job, Memory, Queue, Request, Shared, Sink, Usage, Visit, Work, lock, plan};
use crate::decoding::{Decoding, Piece};
use crate::engine::{Engine, Stats};
use crate::generation::Finish;
use crate::session::Session;
use crate::{Error, Result};

/// A beginning that is worth waiting for while another request evaluates it.
const SHARED_PREFIX: usize = 64;

/// Serves until no more requests are taken and all are answered.
pub(super) fn run(shared: &Shared, engine: Engine, observer: Option<BlockObserver>) {
    // Whatever ends this thread, a panic included: nobody may wait for it any longer.
    let _closing = Closing(shared);
    let prefixes = Prefixes::new(shared.options.kept_sessions);
    let mut worker = Worker {
        shared,
        engine,
        running: vec![],
        put_back: VecDeque::new(),
        prefixes,
        blocks: observer.map(Ledger::new),
        admitted: 0,
        turn: 0,
        pace: Pace::default(),
        ahead: VecDeque::new(),
        full_with: None,
    };
    while worker.wait() {
        if worker.is_disturbed() {
            worker.end_all_ahead();
        }
        worker.drop_cancelled();
        if worker.ahead.is_empty() {
            worker.admit();
        }
        if !worker.step_overlapped() {
            worker.step(Kind::Answers);
            worker.step(Kind::Embeddings);
        }
        worker.note();
    }
    worker.end_all_ahead();
    worker.prefixes = Prefixes::new(0);
    worker.running.clear();
    worker.note();
}

struct Closing<'a>(&'a Shared);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        let mut queue = lock(&self.0.queue);
        queue.closed = true;
        queue.jobs.clear();
        queue.visitors.clear();
        queue.running = 0;
    }
}

/// A sequence's tokens and task, its session and where others branch off.
type Started<'t> = (Vec<u32>, Task<'t>, (Session, Option<usize>));

struct Worker<'t> {
    shared: &'t Shared,
    engine: Engine,
    running: Vec<Sequence<'t>>,
    /// Requests whose sessions were given up when memory ran short, oldest first.
    put_back: VecDeque<Sequence<'t>>,
    prefixes: Prefixes,
    /// What of them others know, if anybody is told.
    blocks: Option<Ledger>,
    admitted: u64,
    /// Which sequence comes first when a batch does not hold all.
    turn: usize,
    /// What steps took.
    pace: Pace,
    /// Batches that have begun, the oldest first.
    ahead: VecDeque<Ahead>,
    /// How many sequences were running when one more had no room in memory.
    full_with: Option<usize>,
}

impl<'t> Worker<'t> {
    /// Waits for something to do; false when there never will be.
    fn wait(&mut self) -> bool {
        let mut queue = lock(&self.shared.queue);
        loop {
            if queue.abandoned {
                return false;
            }
            if !self.ahead.is_empty() && (queue.grant.is_some() || !queue.visitors.is_empty()) {
                drop(queue);
                self.end_all_ahead();
                queue = lock(&self.shared.queue);
                continue;
            }
            if let Some(memory) = queue.grant {
                drop(queue);
                self.grant(memory);
                queue = lock(&self.shared.queue);
                continue;
            }
            if let Some(visitor) = queue.visitors.pop_front() {
                drop(queue);
                visitor(&mut Visit { engine: &mut self.engine, prefixes: &mut self.prefixes });
                self.note();
                queue = lock(&self.shared.queue);
                // Answers have a step between two visits.
                if self.running.is_empty() && self.put_back.is_empty() && queue.jobs.is_empty() {
                    continue;
                }
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
            if gone {
                count += match &job.work {
                    Work::Answer(waiting) => waiting.left() as u64,
                    Work::Embed(inputs) => u64::from(inputs.results.give_up()),
                };
            }
            !gone
        });
        self.put_back.retain(|sequence| {
            let gone = sequence.is_cancelled();
            count += u64::from(gone && sequence.give_up());
            !gone
        });
        // Who has gone since batches were ended for that is in one still.
        let gone: Vec<u64> =
            self.running.iter().filter(|s| s.is_cancelled() && !self.is_ahead(s)).map(|s| s.number).collect();
        for sequence in self.running.extract_if(.., |sequence| gone.contains(&sequence.number)) {
            count += u64::from(sequence.give_up());
            if sequence.kind() == Kind::Answers {
                self.prefixes.keep(sequence.session, None);
            }
        }
        if count > 0 {
            lock(&self.shared.figures).cancelled += count;
        }
    }

    fn admit(&mut self) {
        self.full_with = None;
        while self.running.len() < self.engine.sequences() {
            let sequence = match self.put_back.pop_front() {
                Some(mut sequence) => {
                    if sequence.kind() == Kind::Answers {
                        let adapter = sequence.session.adapter();
                        sequence.session = self.begin(&sequence.tokens, adapter, None).0;
                    }
                    sequence
                }
                None => {
                    let Some(job) = self.next_job() else { return };
                    let Some(sequence) = self.start(job) else { continue };
                    sequence
                }
            };
            if !self.has_room(&sequence) {
                self.full_with = Some(self.running.len());
                return self.postpone(sequence);
            }
            self.running.push(sequence);
        }
    }

    /// Whether what `sequence` and the running ones have yet to evaluate fits in memory, if need be without cached sessions.
    fn has_room(&mut self, sequence: &Sequence<'t>) -> bool {
        loop {
            let all =
                sequence.pages_wanted() + self.running.iter().map(Sequence::pages_wanted).sum::<usize>();
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
        sequence.reset(self.engine.session_of(sequence.session.adapter()));
        let after = self.put_back.iter().position(|other| other.number > sequence.number);
        self.put_back.insert(after.unwrap_or(self.put_back.len()), sequence);
    }

    /// The first request in the queue, but for those whose beginning is just being evaluated for another one; of a request for
    /// embeddings its next input, while the others line up again.
    fn next_job(&self) -> Option<Job> {
        let mut queue: std::sync::MutexGuard<'_, Queue> = lock(&self.shared.queue);
        let index = queue.jobs.iter().position(|job| {
            let Work::Answer(waiting) = &job.work else { return true };
            let prompt = waiting.prompt();
            let adapter = self.adapter(waiting.adapter());
            let known = self.prefixes.longest(prompt, adapter);
            let same = |s: &&Sequence<'_>| s.is_reading() && s.session.adapter() == adapter;
            !self.running.iter().filter(same).any(|s| {
                let shared = common(&s.tokens, prompt).min(prompt.len() - 1);
                shared >= known.max(s.session.position()) + SHARED_PREFIX
            })
        })?;
        queue.running += 1;
        queue.jobs.remove(index)
    }

    /// Makes a sequence of a request's next answer or input; `None` if it failed.
    fn start(&mut self, job: Job) -> Option<Sequence<'t>> {
        let Job { work, cancelled, submitted } = job;
        let (tokens, task, (session, branch)) = match work {
            Work::Answer(mut waiting) => {
                let (request, sink) = waiting.take();
                if waiting.left() > 0 {
                    self.queue_again(Work::Answer(waiting), &cancelled, submitted);
                }
                self.start_answer(request, sink)?
            }
            Work::Embed(mut inputs) => {
                let (tokens, embedding) = inputs.take()?;
                if !inputs.is_empty() {
                    self.queue_again(Work::Embed(inputs), &cancelled, submitted);
                }
                (tokens, Task::Embed(embedding), (self.engine.session(), None))
            }
        };
        let usage = Usage {
            prompt_tokens: tokens.len(),
            cached_tokens: session.position(),
            queued: submitted.elapsed(),
            seed: match &task {
                Task::Answer(answering) => answering.decoding.seed(),
                Task::Embed(_) => 0,
            },
            ..Usage::default()
        };
        lock(&self.shared.figures).cached_tokens += session.position() as u64;
        self.admitted += 1;
        Some(Sequence { number: self.admitted, cancelled, task, tokens, session, branch, usage, submitted })
    }

    /// What is left of a request, of which a part has begun, lets others go first.
    fn queue_again(&self, work: Work, cancelled: &Arc<AtomicBool>, submitted: Instant) {
        let job = Job { work, cancelled: Arc::clone(cancelled), submitted };
        lock(&self.shared.queue).jobs.push_back(job);
    }

    /// The number of the adapter that a request asks for. Its name was checked when it was submitted.
    fn adapter(&self, name: Option<&str>) -> Option<u32> {
        let number = self.engine.adapter_number(name).ok().flatten();
        number.or(self.engine.default_adapter())
    }

    /// Tokens and task of a request for an answer, and where it begins; `None` if it failed.
    fn start_answer(&mut self, request: Request, mut sink: Sink) -> Option<Started<'t>> {
        let Request { prompt, options, constraint, conversation, adapter, pictures } = request;
        let adapter = self.adapter(adapter.as_deref());
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
            match prefixes::load(&mut self.engine, folder, key, adapter) {
                Ok(Some(session)) => self.prefixes.keep(session, conversation.clone()),
                Ok(None) => {}
                Err(error) => warning = Some(error.to_string()),
            }
        }
        let begun = self.begin(&prompt, adapter, Some(prompt.len() - 1));
        let answering =
            Answering { sink, conversation, decoding, last_token: None, warning, _pictures: pictures };
        Some((prompt, Task::Answer(Box::new(answering)), begun))
    }

    /// A session with as much of `tokens` as is cached, except the last one; also the position at which a cached
    /// session could have branched off, had it kept its state there.
    fn begin(
        &mut self,
        tokens: &[u32],
        adapter: Option<u32>,
        branch_before: Option<usize>,
    ) -> (Session, Option<usize>) {
        let tokens = &tokens[..tokens.len() - 1];
        let kept = self.prefixes.find(tokens, adapter);
        let position = |session: &Session| session.fork_position(common(session.tokens(), tokens));
        let siblings = self.running.iter().map(|s| &s.session).filter(|session| session.adapter() == adapter);
        let sibling = siblings.max_by_key(|session| position(session));
        let session = match (kept, sibling) {
            (Some(kept), Some(sibling)) if position(sibling) > kept.position() => {
                sibling.fork(position(sibling))
            }
            (Some(kept), _) => kept,
            (None, Some(sibling)) => sibling.fork(position(sibling)),
            (None, None) => self.engine.session_of(adapter),
        };
        let branch = self.prefixes.longest(tokens, adapter);
        let known = session.position();
        let worth = branch_before.filter(|limit| branch >= known + SHARED_PREFIX && branch < *limit);
        (session, worth.map(|_| branch))
    }

    /// Evaluates one batch of sequences of a kind, if there are any.
    fn step(&mut self, kind: Kind) {
        if self.running.iter().all(|s| s.kind() != kind) || self.speculate() {
            return;
        }
        let given = loop {
            let given = self.divide(kind);
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
        if given.iter().all(|given| *given == 0) {
            // The only ones of the kind have made room.
            return;
        }
        let of_kind = self.running.iter().zip(&given).filter(|(s, _)| s.kind() == kind);
        let given_of_kind: Vec<usize> = of_kind.map(|(_, given)| *given).collect();
        self.turn = plan::next_turn(self.turn, &given_of_kind);
        self.engine.take_stats();
        let of_prompts = |(s, given): (&Sequence<'_>, &usize)| if s.pending() > 1 { *given } else { 0 };
        let prompt: usize = self.running.iter().zip(&given).map(of_prompts).sum();
        let begun = Instant::now();
        let result = match self.evaluate(kind, &given) {
            Err(Error::StatesFull { .. }) if self.make_room() => return,
            other => other,
        };
        if result.is_ok() && kind == Kind::Answers {
            self.pace.add(given.iter().sum::<usize>() - prompt, prompt, begun.elapsed());
        }
        let stats = self.engine.take_stats();
        if result.is_ok() && kind == Kind::Answers && given == [1] {
            self.engine.note_single_step(stats.time);
        }
        self.conclude(kind, &given, &stats, result);
    }

    /// What becomes of sequences that were given so many tokens of a batch, with this result.
    fn conclude(&mut self, kind: Kind, given: &[usize], stats: &Stats, result: Result<Vec<Row>>) {
        let tokens = given.iter().sum::<usize>().max(1);
        for (sequence, given) in self.running.iter_mut().zip(given) {
            sequence.usage.experts.add(&stats.cache, *given as f64 / tokens as f64);
        }
        self.count(stats, given);
        let results = match result {
            Ok(results) => results.into_iter().map(Ok).collect(),
            // One of them is the cause: by themselves the others go on.
            Err(_) if self.running.len() > 1 => self.evaluate_one_by_one(kind, given),
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
                Row::Logits(logits) => sequence.next(context, |decoding| decoding.next(&logits)),
                Row::Token(token) => sequence.next(context, |decoding| decoding.next_drawn(token)),
            });
        });
        let slots = slots.into_iter().map(|slot| slot.into_inner().unwrap_or_else(PoisonError::into_inner));
        slots.map(|(_, _, outcome)| outcome).collect()
    }

    /// What every sequence gets of the next batch: those of another kind nothing. Between steps of answers, embeddings have as
    /// many tokens as prompts beside them would.
    fn divide(&self, kind: Kind) -> Vec<usize> {
        let generating =
            self.running.iter().filter(|s| s.kind() == Kind::Answers && s.pending() == 1).count();
        let beside = self.shared.options.prefill_beside_decode;
        let beside = beside.unwrap_or_else(|| self.pace.tokens(generating, self.engine.chunk()));
        let chunk = match kind {
            Kind::Embeddings if self.running.iter().any(|s| s.kind() == Kind::Answers) => {
                self.engine.chunk().min(beside.max(1))
            }
            _ => self.engine.chunk(),
        };
        let of_kind = || self.running.iter().filter(|s| s.kind() == kind);
        let pending: Vec<usize> = of_kind().map(Sequence::pending).collect();
        let generating = pending.iter().all(|pending| *pending == 1);
        let chunk = if generating { chunk.min(self.engine.decode_rows(pending.len())) } else { chunk };
        let mut shares = plan::divide(&pending, chunk, beside, self.turn).into_iter();
        let share = |sequence: &Sequence<'_>| {
            let given = if sequence.kind() == kind { shares.next().unwrap_or(0) } else { 0 };
            match sequence.branch.filter(|branch| *branch > sequence.session.position()) {
                Some(branch) => given.min(branch - sequence.session.position()),
                None => given,
            }
        };
        let mut all: Vec<usize> = self.running.iter().map(share).collect();
        self.keep_whole(&mut all);
        all
    }

    /// Gives sequences other shares where these would cut a picture whose tokens attend to each other: fewer tokens, or all of the
    /// picture if the batch has room for them.
    fn keep_whole(&self, shares: &mut [usize]) {
        for index in 0..shares.len() {
            let (sequence, share) = (&self.running[index], shares[index]);
            let position = sequence.session.position();
            let next = &sequence.tokens[position..];
            let whole = self.engine.uncut((&sequence.session, position), (&[], next), share);
            let others = shares.iter().sum::<usize>() - share;
            shares[index] = if whole + others <= self.engine.chunk() { whole } else { 0 };
        }
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
            Ok(None) if sequence.pending() == 0 => self.deliver(index),
            Ok(None) => sequence.tell_progress(),
            Ok(Some(piece)) => self.advance(index, piece),
            Err(error) => self.fail(index, error),
        }
    }

    /// Gives away an embedding all of whose tokens are evaluated.
    fn deliver(&mut self, index: usize) {
        let Sequence { task: Task::Embed(embedding), submitted, .. } = self.running.remove(index) else {
            unreachable!("the last token of an answer has a piece")
        };
        let completes = embedding.give();
        let mut figures = lock(&self.shared.figures);
        figures.embeddings += 1;
        if completes {
            figures.finished += 1;
            figures.duration.add(submitted.elapsed().as_secs_f64());
        }
    }

    /// Takes a step of the answer to whoever asked.
    fn advance(&mut self, index: usize, piece: Piece) {
        let sequence = &mut self.running[index];
        let Task::Answer(answering) = &mut sequence.task else { return };
        let now = Instant::now();
        let mut figures = lock(&self.shared.figures);
        match answering.last_token.replace(now) {
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
            (answering.sink)(Event::Piece(piece));
        }
        if let Some(finish) = finish {
            let sequence = self.running.remove(index);
            self.complete(sequence, finish);
        }
    }

    fn complete(&mut self, sequence: Sequence<'t>, finish: Finish) {
        let Sequence { task: Task::Answer(answering), mut usage, session, submitted, .. } = sequence else {
            return;
        };
        let Answering { mut sink, decoding, conversation, mut warning, .. } = *answering;
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
        figures.drafts += u64::from(stats.drafted > 0);
        figures.drafted_tokens += stats.drafted;
        figures.accepted_tokens += stats.accepted;
        figures.batch.add(given.iter().filter(|given| **given > 0).count() as f64);
    }

    /// Notes how things stand.
    fn note(&mut self) {
        if let Some(blocks) = &mut self.blocks {
            let answers =
                self.running.iter_mut().filter(|s| s.kind() == Kind::Answers).map(|s| &mut s.session);
            blocks.update(self.prefixes.sessions().chain(answers));
        }
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

//! The scheduler: answers do not depend on company, memory or order; cancelled work stops; nothing leaks.

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use moeflux::sampler::SamplerOptions;
use moeflux::scheduler::{Event, Figures};
use moeflux::{
    Constraint, Decoding, DecodingOptions, Error, Finish, Options, Outputs, Overlap, Request, Result,
    Scheduler, SchedulerOptions, TextModel, TokenSet,
};
use moeflux_compute::cpu::CpuBackend;
use moeflux_compute::gpu::emulator::Emulator;
use moeflux_compute::gpu::{GpuBackend, GpuDevice, GpuOptions};
use serde_json::json;

pub fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo/demo.gguf")
}

/// A model with recurrent state, in a folder with a tokenizer of as many tokens: one a byte.
pub fn recurrent(folder: &Path) -> PathBuf {
    bytewise(folder, "qwen3_next_basic")
}

/// The same of another fixture.
pub fn bytewise(folder: &Path, fixture: &str) -> PathBuf {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/hf");
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(fixtures.join(fixture).join(file), folder.join(file)).unwrap();
    }
    let text = std::fs::read_to_string(fixtures.join("qwen3_moe_tokenizer/tokenizer.json")).unwrap();
    let mut tokenizer: serde_json::Value = serde_json::from_str(&text).unwrap();
    tokenizer["added_tokens"] = json!([]);
    tokenizer["model"]["merges"] = json!([]);
    tokenizer["model"]["vocab"].as_object_mut().unwrap().retain(|_, id| id.as_u64().unwrap() < 101);
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    folder.into()
}

pub fn model(path: &Path, options: &Options) -> TextModel {
    TextModel::open(path, &CpuBackend::new(2, None).unwrap(), options, |_, _| ()).unwrap()
}

pub fn options() -> Options {
    Options { context: Some(256), sequences: 6, ..Options::default() }
}

pub fn start(path: &Path, options: &Options) -> Scheduler {
    Scheduler::start(model(path, options), SchedulerOptions::default()).unwrap()
}

/// Layers in a row over so many emulated devices.
fn emulators(count: usize) -> GpuBackend {
    let device = |number| GpuDevice::new("emulator", number, None, || Ok(Box::new(Emulator::new(5)) as _));
    let options = GpuOptions { spread: true, ..GpuOptions::default() };
    GpuBackend::of_devices((0..count).map(device).collect(), options)
}

fn chat(question: &str) -> Vec<serde_json::Value> {
    vec![json!({"role": "user", "content": question})]
}

/// Half of them are sampled, each by its own seed.
fn request(prompt: Vec<u32>, index: usize, max_tokens: usize) -> Request {
    let temperature = if index.is_multiple_of(2) { 0.0 } else { 1.0 };
    let sampler = SamplerOptions { temperature, seed: Some(index as u64), ..SamplerOptions::default() };
    Request {
        prompt,
        options: DecodingOptions { sampler, max_tokens, ..Default::default() },
        ..Default::default()
    }
}

const QUESTIONS: [&str; 7] = [
    "Tell me a short story about a fox.",
    "What is 17 + 25?",
    "Sort these numbers: 7 3 9 1",
    "Tell me a story about a bird and a boat.",
    "Hello!",
    "Reverse the word: lantern",
    "What is 12 + 30?",
];

/// The scheduler's figures once nothing is going on.
pub fn settled(scheduler: &Scheduler) -> Figures {
    let start = Instant::now();
    loop {
        let figures = scheduler.figures();
        if figures.running + figures.waiting == 0 {
            return figures;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "{figures:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Answers by a model that has nothing else to do.
fn alone(model: &mut TextModel, index: usize, max_tokens: usize) -> Vec<u32> {
    let prompt = model.encode_chat(&chat(QUESTIONS[index])).unwrap();
    let mut session = model.engine.session();
    let options = request(vec![], index, max_tokens).options;
    model.generate(&mut session, &prompt, options, |_| true).unwrap().tokens
}

fn tokens(answer: moeflux::scheduler::Answer) -> Vec<u32> {
    let mut tokens = vec![];
    for event in answer {
        match event {
            Event::Piece(piece) => tokens.extend(piece.token),
            Event::Progress(_) => {}
            Event::Done(_) => return tokens,
            Event::Failed(error) => panic!("{error}"),
        }
    }
    panic!("given up")
}

#[test]
fn answers_do_not_depend_on_company_or_memory() {
    let mut single = model(&demo(), &options());
    let expected: Vec<_> = (0..QUESTIONS.len()).map(|index| alone(&mut single, index, 95)).collect();
    drop(single);
    // Room for all; for about two at a time, so that some are put back; experts from disk.
    let tight = Options { context: Some(128), chunk: Some(24), kv_tokens: Some(192), ..options() };
    let streamed = Options { expert_cache: Some(20), ..options() };
    for (options, preempts) in [(options(), false), (tight, true), (streamed, false)] {
        let scheduler = start(&demo(), &options);
        for round in 0..2 {
            let answers: Vec<_> = (0..QUESTIONS.len())
                .map(|index| {
                    let conversation = chat(QUESTIONS[index]);
                    let conversation =
                        moeflux::generation::ChatPrompt { messages: &conversation, ..Default::default() };
                    let prompt = scheduler.encode_chat(&conversation).unwrap().tokens;
                    scheduler.submit(request(prompt, index, 95)).unwrap()
                })
                .collect();
            for (index, answer) in answers.into_iter().enumerate() {
                assert_eq!(tokens(answer), expected[index], "{} {round} {options:?}", QUESTIONS[index]);
            }
        }
        let figures = settled(&scheduler);
        assert_eq!((figures.finished, figures.failed, figures.pages_running), (14, 0, 0));
        assert_eq!(figures.preemptions > 0, preempts, "{figures:?}");
        assert!(figures.batch.mean() > 1.2, "{figures:?}");
        assert!(preempts || figures.cached_tokens > 0, "{figures:?}");
    }
}

/// Allows every third token, others after each.
#[derive(Clone)]
struct Thirds(u32);

impl Constraint for Thirds {
    fn allow(&mut self, tokens: &mut TokenSet) -> Result<()> {
        (self.0..4096).step_by(3).for_each(|token| tokens.insert(token));
        Ok(())
    }

    fn accept(&mut self, _: u32) -> Result<bool> {
        self.0 = (self.0 + 1) % 3;
        Ok(false)
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

/// A device gives the chosen tokens instead of all logits: by one caller and by several at once, tokens are those that all logits
/// give, under constraints too.
#[test]
fn answers_of_a_device_are_those_of_all_its_logits() {
    let folder = tempfile::tempdir().unwrap();
    let path = recurrent(folder.path());
    let open = |devices: usize| {
        let options = Options { context: Some(32), ..options() };
        TextModel::open(&path, &emulators(devices), &options, |_, _| ()).unwrap()
    };
    let sampled = |sampler: SamplerOptions| SamplerOptions { temperature: 1.0, seed: Some(3), ..sampler };
    let samplers = [
        SamplerOptions::default(),
        sampled(SamplerOptions { top_k: 3, ..Default::default() }),
        sampled(SamplerOptions { top_p: 0.3, ..Default::default() }),
        // All logits are needed.
        sampled(SamplerOptions::default()),
        SamplerOptions { logit_bias: [(7, 3.0)].into(), ..Default::default() },
    ];
    let prompt = |index: usize| vec![index as u32 + 40, 60];
    let of = |index: usize| DecodingOptions {
        sampler: samplers[index].clone(),
        max_tokens: 4,
        logprobs: (index == 0).then_some(2),
        ..Default::default()
    };

    let limits = |index: usize| (index % 2 == 1).then(|| Box::new(Thirds(1)) as Box<dyn Constraint>);

    let mut model = open(1);
    let mut expected = vec![];
    for index in 0..samplers.len() {
        let mut session = model.engine.session();
        let mut decoding = Decoding::new(&model.tokenizer, &prompt(index), of(index), limits(index)).unwrap();
        let mut next = prompt(index);
        loop {
            let logits = model.engine.eval(&mut session, &next, Outputs::Last).unwrap();
            let piece = decoding.next(&logits).unwrap();
            next = piece.token.into_iter().collect();
            if piece.finish.is_some() {
                break;
            }
        }
        expected.push(decoding.tokens().to_vec());
    }
    assert!(expected.iter().any(|tokens| tokens != &expected[0]), "{expected:?}");
    assert!(expected[1].iter().zip([1, 2, 0]).all(|(token, rest)| token % 3 == rest), "{expected:?}");
    for (index, expected) in expected.iter().enumerate().filter(|(index, _)| limits(*index).is_none()) {
        let mut session = model.engine.session();
        let got = model.generate(&mut session, &prompt(index), of(index), |_| true).unwrap().tokens;
        assert_eq!(got, *expected, "{:?}", samplers[index]);
    }
    // On several devices several batches are under way.
    for (model, overlap) in [(model, None), (open(3), Some([3, 2]))] {
        let divided = model.engine.overlap(5);
        assert_eq!(divided.map(|Overlap { batches, rows }| [batches, rows]), overlap);
        let scheduler = Scheduler::start(model, SchedulerOptions::default()).unwrap();
        let submit = |index: usize| {
            let (prompt, options, constraint) = (prompt(index), of(index), limits(index));
            scheduler.submit(Request { prompt, options, constraint, ..Default::default() }).unwrap()
        };
        for _ in 0..2 {
            let answers: Vec<_> = (0..samplers.len()).map(submit).collect();
            for (index, answer) in answers.into_iter().enumerate() {
                assert_eq!(tokens(answer), expected[index], "{:?}", samplers[index]);
            }
        }
        let figures = settled(&scheduler);
        assert_eq!((figures.finished, figures.failed, figures.pages_running), (10, 0, 0));
    }
}

/// Clients that go away while batches are under way, and requests that come then.
#[test]
fn batches_under_way_end_before_anything_else() {
    let folder = tempfile::tempdir().unwrap();
    let path = recurrent(folder.path());
    let model = TextModel::open(&path, &emulators(2), &options(), |_, _| ()).unwrap();
    let scheduler = Scheduler::start(model, SchedulerOptions::default()).unwrap();
    // Never ends by itself.
    let ask = |first: u32, max_tokens: usize| {
        let mut request = request(vec![40 + first, 60], first as usize, max_tokens);
        request.options.sampler.logit_bias =
            scheduler.tokenizer().eos_ids().iter().map(|id| (*id, f32::NEG_INFINITY)).collect();
        scheduler.submit(request).unwrap()
    };
    let mut answers: Vec<_> = (0..5).map(|first| ask(first, 100_000)).collect();
    for round in 0..4 {
        for answer in &mut answers {
            while !matches!(answer.next(), Some(Event::Piece(_))) {}
        }
        drop(answers.remove(round % 5));
        answers.push(ask(5 + round as u32, 100_000));
        assert_eq!(tokens(ask(20, 3)).len(), 3);
    }
    drop(answers);
    let figures = settled(&scheduler);
    assert_eq!((figures.cancelled, figures.finished, figures.failed), (9, 4, 0), "{figures:?}");
    assert_eq!(figures.pages_running, 0);
}

#[test]
fn memory_may_change_while_answers_run() {
    let streamed = Options { memory_later: Some(1 << 40), ..options() };
    let scheduler = start(&demo(), &streamed);
    let prompt = |index: usize| {
        let conversation = chat(QUESTIONS[index]);
        let conversation = moeflux::generation::ChatPrompt { messages: &conversation, ..Default::default() };
        scheduler.encode_chat(&conversation).unwrap().tokens
    };
    let (low, high) = scheduler.figures().memory.grants;
    let mut alone_with_all = model(&demo(), &options());
    let running: Vec<_> =
        (0..4).map(|index| scheduler.submit(request(prompt(index), index, 40)).unwrap()).collect();
    for memory in [low, high, 0, (low + high) / 2, u64::MAX, low] {
        scheduler.grant(memory);
        assert_eq!(scheduler.figures().memory.budget, memory.clamp(low, high));
    }
    let few = scheduler.figures().memory.expert_slots;
    for (index, answer) in running.into_iter().enumerate() {
        assert_eq!(tokens(answer), alone(&mut alone_with_all, index, 40), "{index}");
    }
    scheduler.grant(high);
    assert!(few < scheduler.figures().memory.expert_slots, "{few}");
    scheduler.abandon();
    scheduler.grant(low);
}

#[test]
fn a_conversation_goes_on_from_what_is_known() {
    let folder = tempfile::tempdir().unwrap();
    for path in [demo(), recurrent(folder.path())] {
        let scheduler = start(&path, &options());
        let prompt: Vec<u32> = (0..90).map(|i| (i * 7 % 90) as u32).collect();
        let first = scheduler.submit(request(prompt.clone(), 0, 5)).unwrap();
        let answer = tokens(first);
        let more = [&prompt[..], &answer, &[5, 6, 7]].concat();
        let (_, done) = scheduler.submit(request(more, 0, 3)).unwrap().text().unwrap();
        // All but the answer's last token, which nobody needed to evaluate.
        assert!(done.usage.cached_tokens >= 90 + answer.len().max(1) - 1, "{done:?}");

        // Two others that share a beginning: the second time the model knows where they part.
        let other = |i: u32| [&prompt[..80], &[i, i + 1, i + 2]].concat();
        let cached =
            |i| scheduler.submit(request(other(i), 0, 2)).unwrap().text().unwrap().1.usage.cached_tokens;
        let seen = [cached(40), cached(50), cached(60)];
        assert_eq!(seen[2], 80, "{seen:?}");
    }
}

#[test]
fn requests_at_once_read_a_common_beginning_once() {
    let scheduler = start(&demo(), &options());
    let prompt: Vec<u32> = (0..150).map(|i| 100 + (i * 7 % 90) as u32).collect();
    let answers: Vec<_> = (0..6).map(|i| scheduler.submit(request(prompt.clone(), i, 4)).unwrap()).collect();
    let cached: usize = answers.into_iter().map(|a| a.text().unwrap().1.usage.cached_tokens).sum();
    assert_eq!(cached, 5 * 149);
    let figures = settled(&scheduler);
    assert_eq!((figures.prompt_tokens, figures.cached_tokens), (6 * 150 - 5 * 149, 5 * 149));
}

/// Lets a request hold the engine up when its answer has so many pieces: says so, and waits to be let go.
pub fn hold_up(at: usize) -> (impl FnMut(Event) + Send + 'static, mpsc::Receiver<()>, mpsc::Sender<()>) {
    let (reached, is_reached) = mpsc::channel();
    let (go, wait) = mpsc::channel();
    let mut pieces = 0;
    let sink = move |event| {
        if matches!(event, Event::Failed(_)) {
            panic!("{event:?}");
        }
        pieces += usize::from(matches!(event, Event::Piece(_)));
        if pieces == at && matches!(event, Event::Piece(_)) {
            reached.send(()).unwrap();
            wait.recv().unwrap();
        }
    };
    (sink, is_reached, go)
}

/// A request whose answer is as long as it may be.
pub fn endless(scheduler: &Scheduler, prompt: Vec<u32>, max_tokens: usize) -> Request {
    let mut request = request(prompt, 0, max_tokens);
    request.options.sampler.logit_bias =
        scheduler.tokenizer().eos_ids().iter().map(|id| (*id, f32::NEG_INFINITY)).collect();
    request
}

#[test]
fn pages_that_requests_share_count_once() {
    const WAIT: Duration = Duration::from_secs(60);
    let scheduler = start(&demo(), &options());
    let prompt: Vec<u32> = (0..150).map(|i| 100 + (i * 7 % 90) as u32).collect();
    let ((first, first_reached, go), (second, reached, end)) = (hold_up(1), hold_up(4));
    let _first = scheduler.submit_to(endless(&scheduler, prompt.clone(), 40), first).unwrap();
    first_reached.recv_timeout(WAIT).unwrap();
    let _second = scheduler.submit_to(endless(&scheduler, prompt, 40), second).unwrap();
    go.send(()).unwrap();
    reached.recv_timeout(WAIT).unwrap();
    let figures = scheduler.figures();
    end.send(()).unwrap();
    // Two pages of the prompt, and one for each answer.
    assert_eq!((figures.running, figures.pages_running, figures.pages_used), (2, 4, 4));
    settled(&scheduler);
}

#[test]
fn cancelled_requests_stop_and_nothing_leaks() {
    let scheduler = start(&demo(), &options());
    let prompt: Vec<u32> = (0..100).map(|i| 100 + i as u32).collect();
    // Never ends by itself.
    let endless = |i: u32| {
        let mut request = request([&prompt[..], &[i]].concat(), 1, 100_000);
        request.options.sampler.logit_bias =
            scheduler.tokenizer().eos_ids().iter().map(|id| (*id, f32::NEG_INFINITY)).collect();
        request
    };
    let mut answers: Vec<_> = (0..20).map(|i| scheduler.submit(endless(i)).unwrap()).collect();
    for answer in &mut answers[..6] {
        assert!(matches!(answer.next(), Some(Event::Piece(_))));
    }
    assert_eq!(scheduler.figures().waiting, 14);
    drop(answers);
    let figures = settled(&scheduler);
    assert_eq!((figures.cancelled, figures.pages_running), (20, 0), "{figures:?}");
    // The next one is not delayed by them, and an answer that fills the context says so.
    let (_, done) = scheduler.submit(endless(77)).unwrap().text().unwrap();
    assert_eq!(done.finish, Finish::ContextFull);
    // What they had read is known.
    assert_eq!(done.usage.cached_tokens, prompt.len());
    assert_eq!(done.usage.completion_tokens + done.usage.prompt_tokens, 257);
}

#[test]
fn full_queues_and_bad_requests_are_refused() {
    let limited = SchedulerOptions { queue: 2, ..SchedulerOptions::default() };
    let scheduler =
        Scheduler::start(model(&demo(), &Options { sequences: 1, ..options() }), limited).unwrap();
    let refused = |request: Request| scheduler.submit(request).map(drop).unwrap_err();
    assert!(matches!(refused(request(vec![], 0, 5)), Error::Option { option: "prompt", .. }));
    assert!(matches!(refused(request(vec![1; 256], 0, 5)), Error::ContextFull { .. }));
    assert!(matches!(refused(request(vec![1_000_000], 0, 5)), Error::UnknownToken { .. }));
    let mut bad = request(vec![1], 0, 5);
    bad.options.sampler.temperature = -1.0;
    assert!(matches!(refused(bad), Error::Option { option: "temperature", .. }));
    let mut bad = request(vec![1], 0, 5);
    bad.options.stop = vec![String::new()];
    assert!(matches!(refused(bad), Error::Option { option: "stop", .. }));

    let mut first = scheduler.submit(request(vec![300; 4], 1, 250)).unwrap();
    assert!(first.next().is_some());
    let waiting: Vec<_> = (0..2).map(|_| scheduler.submit(request(vec![1], 0, 5)).unwrap()).collect();
    let error = refused(request(vec![1], 0, 5));
    assert!(
        matches!(error, Error::QueueFull { waiting: 2, retry_after } if retry_after.as_secs() >= 1),
        "{error}"
    );
    scheduler.drain();
    assert!(matches!(refused(request(vec![1], 0, 5)), Error::ShuttingDown));
    drop(first);
    for answer in waiting {
        assert!(answer.text().is_ok(), "those that were taken are answered");
    }
    settled(&scheduler);
    assert!(scheduler.is_idle());
}

#[test]
fn stop_texts_end_answers_and_are_left_out() {
    let scheduler = start(&demo(), &options());
    let conversation = chat(QUESTIONS[0]);
    let conversation = moeflux::generation::ChatPrompt { messages: &conversation, ..Default::default() };
    let prompt = scheduler.encode_chat(&conversation).unwrap().tokens;
    let answer = |stop: &[&str]| {
        let mut request = request(prompt.clone(), 0, 80);
        request.options.stop = stop.iter().map(|s| (*s).to_owned()).collect();
        scheduler.submit(request).unwrap().text().unwrap()
    };
    let (whole, _) = answer(&[]);
    let stop: String = whole.chars().skip(20).take(12).collect();
    let (text, done) = answer(&["never there", &stop]);
    assert_eq!(text, whole[..whole.find(&stop).unwrap()]);
    assert_eq!((done.finish, done.stopped_by), (Finish::Stopped, Some(stop)));
    assert_eq!(answer(&["never there"]).0, whole);
    // Of stop texts that are found at one place, the longest counts.
    let mut events = scheduler.submit(request(prompt.clone(), 0, 80)).unwrap();
    let piece = events.find_map(|event| match event {
        Event::Piece(piece) => Some(piece.text).filter(|text| text.len() > 1),
        _ => None,
    });
    let piece = piece.unwrap();
    let (text, done) = answer(&[&piece[..1], &piece]);
    assert!(whole.starts_with(&text) && whole[text.len()..].starts_with(&piece), "{text:?}");
    assert_eq!(done.stopped_by, Some(piece));
}

/// Allows two tokens in turn, then ends; fails when told to.
struct TwoTokens(usize, bool);

impl Constraint for TwoTokens {
    fn allow(&mut self, tokens: &mut TokenSet) -> Result<()> {
        if self.1 && self.0 == 1 {
            return Err(Error::Constraint { reason: "as told".into() });
        }
        let allowed = [500, 600][self.0 % 2];
        tokens.insert(allowed);
        Ok(())
    }

    fn accept(&mut self, _: u32) -> Result<bool> {
        self.0 += 1;
        Ok(self.0 == 4)
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(Self(self.0, self.1))
    }
}

#[test]
fn constraints_are_obeyed_and_a_failure_is_one_requests_own() {
    let scheduler = start(&demo(), &options());
    let other = scheduler.submit(request(vec![300; 4], 0, 40)).unwrap();
    let with =
        |fails| Request { constraint: Some(Box::new(TwoTokens(0, fails))), ..request(vec![300; 9], 1, 40) };
    let (good, bad) = (scheduler.submit(with(false)).unwrap(), scheduler.submit(with(true)).unwrap());
    assert_eq!(tokens(good), [500, 600, 500, 600]);
    assert!(matches!(bad.text(), Err(Error::Constraint { .. })));
    assert!(other.text().is_ok());
}

#[test]
fn conversations_are_found_again_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    for path in [demo(), recurrent(folder.path())] {
        let sessions = Some(folder.path().join("sessions"));
        let open = || {
            let options_ = SchedulerOptions { sessions: sessions.clone(), ..SchedulerOptions::default() };
            Scheduler::start(model(&path, &options()), options_).unwrap()
        };
        let ask = |scheduler: &Scheduler, prompt: &[u32], key: &str| {
            let request = Request { conversation: Some(key.into()), ..request(prompt.to_vec(), 0, 6) };
            let mut tokens = vec![];
            for event in scheduler.submit(request).unwrap() {
                match event {
                    Event::Piece(piece) => tokens.extend(piece.token),
                    Event::Progress(_) => {}
                    Event::Done(done) => return (tokens, done),
                    Event::Failed(error) => panic!("{error}"),
                }
            }
            panic!("given up")
        };
        let prompt: Vec<u32> = (0..80).map(|i| (i * 3 % 70) as u32).collect();
        let key = "../../any text / at all";
        let (answer, done) = ask(&open(), &prompt, key);
        assert_eq!(done.warning, None);
        let more = [&prompt[..], &answer, &[1, 2, 3]].concat();
        let (_, done) = ask(&open(), &more, key);
        assert!(done.usage.cached_tokens >= 80, "{done:?}");
        assert_eq!(ask(&open(), &more, "another").1.usage.cached_tokens, 0);
        // A damaged file is not used, and said to be so.
        for file in std::fs::read_dir(sessions.clone().unwrap()).unwrap() {
            std::fs::write(file.unwrap().path(), b"nonsense").unwrap();
        }
        let (_, done) = ask(&open(), &more, key);
        assert!(done.usage.cached_tokens == 0 && done.warning.is_some(), "{done:?}");
        std::fs::remove_dir_all(sessions.clone().unwrap()).unwrap();
    }
}

/// Three answers where memory has room for the beginnings of all and the rest of one: the request that came last gives its
/// pages up first, the first one never.
#[test]
fn the_newest_request_is_put_back_and_gives_its_pages() {
    let options = Options { context: Some(128), kv_tokens: Some(192), sequences: 3, ..options() };
    let scheduler = start(&demo(), &options);
    let (done, ends) = mpsc::channel();
    let submit = |index: u32, mut sink: Box<dyn FnMut(Event) + Send>| {
        let done = done.clone();
        let prompt = (0..40).map(|i| 100 + 50 * index + i).collect();
        let on = move |event| match event {
            Event::Done(end) => done.send((index, end.usage)).unwrap(),
            other => sink(other),
        };
        scheduler.submit_to(endless(&scheduler, prompt, 60), on).unwrap()
    };
    // The first one holds the engine up until the others are there.
    let (sink, _reached, go) = hold_up(1);
    let mut tickets = vec![submit(0, Box::new(sink))];
    tickets.extend((1..3).map(|index| submit(index, Box::new(hold_up(0).0))));
    go.send(()).unwrap();
    // Whatever ends the engine's thread ends the test.
    drop(done);
    let mut preemptions = [0; 3];
    for _ in 0..3 {
        let (index, usage) = ends.recv_timeout(Duration::from_secs(60)).unwrap();
        assert_eq!(usage.completion_tokens, 60);
        preemptions[index as usize] = usage.preemptions;
    }
    assert!(preemptions[0] == 0 && preemptions[2] > 0, "{preemptions:?}");
    assert_eq!(settled(&scheduler).preemptions, preemptions.iter().sum::<usize>() as u64);
}

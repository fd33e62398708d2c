//! Guessed tokens change no answer: sampled or greedy, with penalties, constraints, stop texts, in a small context, of models with
//! recurrent state too.

use std::path::Path;

use moeflux::sampler::SamplerOptions;
use moeflux::scheduler::{Done, Event, Scheduler, SchedulerOptions};
use moeflux::tokenizer::AddSpecial;
use moeflux::{
    Constraint, DecodingOptions, Error, Finish, Options, Outputs, Request, Result, SpecType, TextModel,
    TokenSet,
};
use moeflux_compute::backend::Backend;
use moeflux_compute::cpu::CpuBackend;
use moeflux_compute::gpu::emulator::Emulator;
use moeflux_compute::gpu::{GpuBackend, GpuOptions};

use crate::scheduler::{bytewise, demo, model, recurrent, settled, start};
use crate::support::cover::{check_each, cover};
use crate::support::{self, Fixture, is_tried};

/// A text that a model goes on with by repeating parts of it.
const TEXT: &str = "The fox saw a red boat. The fox saw a red bird. The fox saw a red house. The fox saw a";

pub fn options(spec_type: SpecType, draft_max: usize) -> Options {
    Options { context: Some(512), spec_type, draft_max, ..Options::default() }
}

/// What an answer is, and the logits that the session has for what comes after it.
#[derive(Debug, PartialEq)]
pub struct Outcome {
    tokens: Vec<u32>,
    text: String,
    finish: Finish,
    session: Vec<u32>,
    after: Vec<u32>,
}

/// Also how many tokens were guessed, and how many of them were right.
pub fn answer(model: &mut TextModel, text: &str, options: &DecodingOptions) -> (Outcome, [u64; 2]) {
    let prompt = model.tokenizer.encode(text, AddSpecial::Yes).unwrap();
    let mut session = model.engine.session();
    let mut text = String::new();
    let generated = model
        .generate(&mut session, &prompt, options.clone(), |piece| {
            text.push_str(piece);
            true
        })
        .unwrap();
    let held = session.tokens().to_vec();
    let after = if session.position() == model.engine.context() {
        vec![]
    } else {
        support::bits(&model.engine.eval(&mut session, &[5], Outputs::Last).unwrap())
    };
    let decode = generated.decode;
    assert!(decode.accepted <= decode.drafted);
    assert!(decode.tokens <= generated.tokens.len() as u64, "{decode:?}");
    let outcome = Outcome { tokens: generated.tokens, text, finish: generated.finish, session: held, after };
    (outcome, [decode.drafted, decode.accepted])
}

/// Compares answers with guesses, of a few lengths, with those without.
fn check(path: &Path, texts: &[&str], decoding: &[DecodingOptions]) -> [u64; 2] {
    let open = |spec_type, draft_max| model(path, &options(spec_type, draft_max));
    check_models(open, &[1, 4, 16], texts, decoding)
}

/// As [`check`], of models that `open` opens, with guesses of these lengths.
fn check_models(
    open: impl Fn(SpecType, usize) -> TextModel,
    lengths: &[usize],
    texts: &[&str],
    decoding: &[DecodingOptions],
) -> [u64; 2] {
    let mut plain = open(SpecType::Off, 1);
    let mut sums = [0; 2];
    for draft_max in lengths.iter().copied() {
        let mut guessing = open(SpecType::Ngram, draft_max);
        for text in texts {
            for decoding in decoding {
                let (expected, none) = answer(&mut plain, text, decoding);
                assert_eq!(none, [0; 2]);
                let (got, guessed) = answer(&mut guessing, text, decoding);
                assert_eq!(got, expected, "{draft_max} {decoding:?}");
                sums = [sums[0] + guessed[0], sums[1] + guessed[1]];
            }
        }
    }
    sums
}

pub fn greedy(max_tokens: usize) -> DecodingOptions {
    DecodingOptions { max_tokens, ..DecodingOptions::default() }
}

pub fn sampled(max_tokens: usize, sampler: SamplerOptions) -> DecodingOptions {
    DecodingOptions { max_tokens, sampler, ..DecodingOptions::default() }
}

#[test]
fn answers_are_those_of_single_steps() {
    let warm = SamplerOptions { temperature: 0.7, seed: Some(3), ..SamplerOptions::default() };
    let kinds = [
        greedy(150),
        greedy(3),
        sampled(100, SamplerOptions { top_p: 0.9, top_k: 30, ..warm.clone() }),
        sampled(60, SamplerOptions { frequency_penalty: 0.4, repetition_penalty: 1.1, ..warm.clone() }),
        sampled(60, SamplerOptions { min_p: 0.05, logit_bias: [(300, 2.0)].into(), ..warm }),
        DecodingOptions { stop: vec!["bird".into(), " the".into()], ..greedy(100) },
    ];
    let [drafted, accepted] = check(&demo(), &[TEXT], &kinds);
    assert!(accepted > 10 && drafted > accepted, "{drafted} {accepted}");
}

// The state before is taken up again where a guess is wrong.
#[test]
fn recurrent_states_are_taken_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = recurrent(folder.path());
    let kinds = [0, 1].map(|seed| {
        sampled(
            80,
            SamplerOptions {
                temperature: 1.0,
                logit_bias: [(65, 60.0), (66, 60.0)].into(),
                seed: Some(seed),
                ..SamplerOptions::default()
            },
        )
    });
    let [drafted, accepted] = check(&path, &["abcabcabc"], &[&kinds[..], &[greedy(80)]].concat());
    assert!(accepted > 0 && drafted > accepted, "{drafted} {accepted}");
}

#[test]
fn the_context_ends_answers_as_it_does_without() {
    for context in [40, 41, 42, 43] {
        let open = |spec_type| model(&demo(), &Options { context: Some(context), ..options(spec_type, 4) });
        let (expected, _) = answer(&mut open(SpecType::Off), TEXT, &greedy(400));
        let (got, _) = answer(&mut open(SpecType::Ngram), TEXT, &greedy(400));
        assert_eq!(got, expected, "{context}");
        assert_eq!(got.finish, Finish::ContextFull);
    }
}

/// What the rest of this relies on: batches of so many rows of a sequence, after so many tokens that come at once, have the bits
/// of single steps.
fn check_rows(fixture: &Fixture, backend: &dyn Backend, prefix: usize, batches: &[usize]) {
    let length = prefix + batches.iter().sum::<usize>();
    let options = Options {
        spec_type: SpecType::Auto,
        context: Some(length),
        kv_tokens: Some(2 * (length + 64)),
        ..Options::default()
    };
    let mut engine = support::open(&fixture.path, backend, &options);
    assert_eq!(engine.spec_type(), SpecType::Auto);
    let known = engine.model().graph.vocab_size().min(61) as u32;
    let tokens: Vec<u32> = (0..length as u32).map(|i| (i * i * 5 + i * 11 + 3) % known).collect();
    let (prefix, mut rest) = tokens.split_at(prefix);
    let (mut together, mut alone) = (engine.session(), engine.session());
    engine.eval(&mut together, prefix, Outputs::Last).unwrap();
    engine.eval(&mut alone, prefix, Outputs::Last).unwrap();
    for rows in batches {
        let next;
        (next, rest) = rest.split_at(*rows);
        let got = support::bits(&engine.eval(&mut together, next, Outputs::All).unwrap());
        let mut expected = vec![];
        for token in next {
            expected.extend(support::bits(&engine.eval(&mut alone, &[*token], Outputs::Last).unwrap()));
        }
        assert!(got == expected, "{}: {rows} rows on {}", fixture.name, backend.describe());
    }
}

fn emulator() -> GpuBackend {
    emulator_with(GpuOptions::default())
}

pub fn emulator_with(options: GpuOptions) -> GpuBackend {
    GpuBackend::new("emulator", options, || Ok(Box::new(Emulator::new(5)) as _))
}

#[test]
fn rows_of_every_family_have_the_bits_of_single_steps() {
    let backend = CpuBackend::new(2, None).unwrap();
    support::sample().iter().for_each(|fixture| check_rows(fixture, &backend, 40, &[5]));
}

// On a device up to eight, some across pages, of operations with each kind of what they take. Encodings make no difference to that, and
// are compared as operations.
#[test]
fn rows_of_every_operation_have_the_bits_of_single_steps_on_an_emulated_device() {
    let fixtures = support::sample().into_iter().filter(|fixture| fixture.kind == "hf");
    let batches: [&[usize]; 3] = [&[2, 3], &[5], &[8]];
    check_each(&cover(fixtures, |traits| traits.operations.clone()), |index, fixture| {
        if !is_tried(index, 2) {
            return;
        }
        let prefix = if is_tried(index, 8) { 62 } else { 10 };
        check_rows(fixture, &emulator(), prefix, batches[index / 2 % batches.len()]);
    });
}

// Of 257 keys each row makes more parts than of 256.
#[test]
fn rows_have_the_bits_of_single_steps_where_keys_are_cut_into_more_parts() {
    let names = ["gguf/qwen3_moe_q8_0", "hf/deepseek_v3_basic"].into_iter().enumerate();
    for (_, name) in names.filter(|(turn, _)| is_tried(*turn, 2)) {
        check_rows(&Fixture::named(name), &emulator(), 253, &[8]);
    }
}

// Tokens are chosen where the logits are, of all rows at once; where log-probabilities are asked for, of logits that come here.
#[test]
fn answers_on_a_gpu_are_those_of_single_steps() {
    let warm = SamplerOptions {
        temperature: 1.0,
        logit_bias: [(65, 60.0), (66, 60.0)].into(),
        seed: Some(1),
        ..SamplerOptions::default()
    };
    let kinds = [
        greedy(12),
        sampled(12, SamplerOptions { frequency_penalty: 0.4, top_k: 30, ..warm.clone() }),
        DecodingOptions { logprobs: Some(2), ..sampled(10, warm) },
    ];
    for fixture in ["qwen3_moe_basic", "qwen3_next_basic"] {
        let folder = tempfile::tempdir().unwrap();
        let path = bytewise(folder.path(), fixture);
        let open = |spec_type, draft_max| {
            let options = Options { context: Some(128), ..options(spec_type, draft_max) };
            TextModel::open(&path, &emulator(), &options, |_, _| ()).unwrap()
        };
        // More than there are rows with the bits of single steps.
        let [drafted, accepted] = check_models(open, &[16], &["abcabcabc"], &kinds);
        assert!(accepted > 0 && drafted > accepted, "{fixture}: {drafted} {accepted}");
    }
}

/// Allows a few tokens again and again, then fails or ends.
#[derive(Clone)]
struct Round {
    seen: usize,
    last: usize,
    fails: bool,
}

impl Constraint for Round {
    fn allow(&mut self, tokens: &mut TokenSet) -> Result<()> {
        if self.fails && self.seen == self.last {
            return Err(Error::Constraint { reason: "as told".into() });
        }
        let allowed = [50, 60, 70][self.seen % 3];
        tokens.insert(allowed);
        Ok(())
    }

    fn accept(&mut self, _: u32) -> Result<bool> {
        self.seen += 1;
        Ok(self.seen == self.last && !self.fails)
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

/// All that a request gets: pieces, and how it ends.
pub fn events(
    path: &Path,
    spec_type: SpecType,
    request: Request,
) -> (Vec<Event>, std::result::Result<Done, String>) {
    events_of(start(path, &options(spec_type, 4)), request)
}

fn events_of(scheduler: Scheduler, request: Request) -> (Vec<Event>, std::result::Result<Done, String>) {
    let mut pieces = vec![];
    for event in scheduler.submit(request).unwrap() {
        match event {
            Event::Piece(_) => pieces.push(event),
            Event::Progress(_) => {}
            Event::Done(done) => {
                let figures = settled(&scheduler);
                let counted = (figures.drafted_tokens, figures.accepted_tokens);
                assert_eq!(counted, (done.usage.drafted_tokens, done.usage.accepted_tokens));
                assert_eq!(figures.drafts > 0, figures.drafted_tokens > 0);
                return (pieces, Ok(done));
            }
            Event::Failed(error) => return (pieces, Err(error.to_string())),
        }
    }
    panic!("given up")
}

#[test]
fn a_scheduler_gives_the_same_pieces() {
    let tokenizer = model(&demo(), &options(SpecType::Off, 1)).tokenizer;
    let prompt = tokenizer.encode(TEXT, AddSpecial::Yes).unwrap();
    let round = |fails| Some(Box::new(Round { seen: 0, last: 17, fails }) as Box<dyn Constraint>);
    let make = |kind: usize| {
        let constraint = [None, None, round(false), round(true)].into_iter().nth(kind).flatten();
        let logprobs = (kind == 1).then_some(3);
        let stop = if kind == 1 { vec!["house".into()] } else { vec![] };
        let options = DecodingOptions { logprobs, stop, ..greedy(60) };
        Request { prompt: prompt.clone(), options, constraint, ..Request::default() }
    };
    for kind in 0..4 {
        let (expected, end) = events(&demo(), SpecType::Off, make(kind));
        let (got, guessed) = events(&demo(), SpecType::Ngram, make(kind));
        assert_eq!(format!("{got:?}"), format!("{expected:?}"), "{kind}");
        match (end, guessed) {
            (Ok(end), Ok(guessed)) => {
                assert_eq!((guessed.finish, guessed.stopped_by), (end.finish, end.stopped_by));
                assert_eq!(end.usage.drafted_tokens, 0);
                assert!(kind != 2 || guessed.usage.accepted_tokens > 0, "{kind}");
            }
            (end, guessed) => assert_eq!((end.err(), kind), (guessed.err(), 3)),
        }
    }
}

// Constraints of a device's draws, those of tokens that were guessed among them.
#[test]
fn a_scheduler_gives_the_same_pieces_on_a_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let path = bytewise(folder.path(), "qwen3_moe_basic");
    let open = |spec_type| TextModel::open(&path, &emulator(), &options(spec_type, 4), |_, _| ()).unwrap();
    let prompt = open(SpecType::Off).tokenizer.encode("abcabcabc", AddSpecial::Yes).unwrap();
    for fails in [false, true] {
        let [(expected, end), (got, guessed)] = [SpecType::Off, SpecType::Ngram].map(|spec_type| {
            let constraint = Some(Box::new(Round { seen: 0, last: 17, fails }) as Box<dyn Constraint>);
            let request =
                Request { prompt: prompt.clone(), options: greedy(60), constraint, ..Request::default() };
            events_of(Scheduler::start(open(spec_type), SchedulerOptions::default()).unwrap(), request)
        });
        assert_eq!(format!("{got:?}"), format!("{expected:?}"), "{fails}");
        match (end, guessed) {
            (Ok(end), Ok(guessed)) => {
                assert_eq!(guessed.finish, end.finish);
                assert!(!fails && guessed.usage.accepted_tokens > 0);
            }
            (end, guessed) => assert_eq!((end.err(), fails), (guessed.err(), true)),
        }
    }
}

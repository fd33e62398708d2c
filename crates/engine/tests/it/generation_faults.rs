//! Reads that fail in the middle of an answer: that answer ends with an error that names the expert, and the next one is
//! as if nothing had happened.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::support::faulty::{Fate, Fates, Faulty};
use moeflux::chat_template::ChatTemplate;
use moeflux::checkpoint::Checkpoint;
use moeflux::experts::{PolicyKind, Prefetch};
use moeflux::sampler::SamplerOptions;
use moeflux::scheduler::{Event, Ticket};
use moeflux::tokenizer::{AddSpecial, Tokenizer};
use moeflux::{
    DecodingOptions, Engine, Error, Options, Request, Scheduler, SchedulerOptions, TextModel, models,
};
use moeflux_compute::cpu::CpuBackend;
use serde_json::json;

const QUESTION: &str = "Once upon a time, there was a fox";

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo/demo.gguf")
}

/// Few slots, so that every token reads.
fn options() -> Options {
    Options {
        expert_cache: Some(6),
        cache_policy: PolicyKind::Lru,
        prefetch: Prefetch::Off,
        context: Some(256),
        sequences: 3,
        ..Options::default()
    }
}

/// The demo model, reading through a queue whose reads meet fates.
fn faulty() -> (TextModel, Fates) {
    let checkpoint = Arc::new(Checkpoint::open(&demo()).unwrap());
    let tokenizer = Tokenizer::from_checkpoint(&checkpoint).unwrap();
    let fates = Fates::default();
    let model = models::record(checkpoint).unwrap();
    let backend = CpuBackend::new(2, None).unwrap();
    let engine = Engine::new(model, &backend, &options(), Faulty::new(&fates), |_, _| ()).unwrap();
    (TextModel { engine, tokenizer, template: None }, fates)
}

fn decoding() -> DecodingOptions {
    let sampler = SamplerOptions { temperature: 0.0, ..SamplerOptions::default() };
    DecodingOptions { sampler, max_tokens: 24, ..Default::default() }
}

/// The tokens of an answer; `at` is called with how many texts have come.
fn answer(model: &mut TextModel, mut at: impl FnMut(usize)) -> Result<Vec<u32>, Error> {
    let prompt = model.tokenizer.encode(QUESTION, AddSpecial::Yes)?;
    let mut session = model.engine.session();
    let mut texts = 0;
    let generated = model.generate(&mut session, &prompt, decoding(), |_| {
        texts += 1;
        at(texts);
        true
    })?;
    Ok(generated.tokens)
}

fn is_about_an_expert(error: &Error) -> bool {
    matches!(error, Error::Compute(moeflux_compute::Error::Expert { .. }))
}

#[test]
fn a_failed_read_ends_one_generation() {
    let (mut model, fates) = faulty();
    let expected = answer(&mut model, |_| ()).unwrap();
    assert!(expected.len() > 12);
    for (token, read, fate) in [(1, 0, Fate::Failed), (5, 3, Fate::Short), (9, 1, Fate::Failed)] {
        let mut heard = 0;
        let error = answer(&mut model, |texts| {
            heard = texts;
            if texts == token {
                fates.nth(read, fate);
            }
        })
        .unwrap_err();
        assert!(is_about_an_expert(&error), "{error}");
        let reason = if fate == Fate::Failed { "the device is gone" } else { "failed after 1" };
        assert!(error.to_string().contains(reason), "{error}");
        assert!(heard >= token && heard < expected.len(), "it was in the middle");
        assert_eq!(answer(&mut model, |_| ()).unwrap(), expected);
    }
}

#[test]
fn a_file_that_is_cut_short_ends_one_generation() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("demo.gguf");
    let whole = std::fs::read(demo()).unwrap();
    std::fs::write(&path, &whole).unwrap();
    let mut model =
        TextModel::open(&path, &CpuBackend::new(2, None).unwrap(), &options(), |_, _| ()).unwrap();
    let expected = answer(&mut model, |_| ()).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    let error = answer(&mut model, |texts| {
        if texts == 6 {
            file.set_len(whole.len() as u64 / 2).unwrap();
        }
    })
    .unwrap_err();
    assert!(is_about_an_expert(&error) && error.to_string().contains("demo.gguf: read of"), "{error}");
    std::io::Write::write_all(&mut &file, &whole).unwrap();
    assert_eq!(answer(&mut model, |_| ()).unwrap(), expected);
}

/// What has become of a request.
#[derive(Default)]
struct Fortune {
    tokens: Vec<u32>,
    error: Option<Error>,
    done: bool,
}

/// A request that has been submitted, for as long as it is to be answered.
struct Asked(Arc<Mutex<Fortune>>, #[allow(dead_code)] Ticket);

/// Submits a request; `at` is called with how many tokens have come.
fn submit(scheduler: &Scheduler, max_tokens: usize, at: impl Fn(usize) + Send + 'static) -> Asked {
    let prompt = scheduler.tokenizer().encode(QUESTION, AddSpecial::Yes).unwrap();
    let fortune = Arc::<Mutex<Fortune>>::default();
    let own = Arc::clone(&fortune);
    let options = DecodingOptions { max_tokens, ..decoding() };
    let sink = move |event| {
        let mut own = own.lock().unwrap();
        match event {
            Event::Piece(piece) => {
                own.tokens.extend(piece.token);
                at(own.tokens.len());
            }
            Event::Progress(_) => {}
            Event::Done(_) => own.done = true,
            Event::Failed(error) => own.error = Some(error),
        }
    };
    let ticket = scheduler.submit_to(Request { prompt, options, ..Default::default() }, sink).unwrap();
    Asked(fortune, ticket)
}

/// Waits until it has come to an end.
fn wait(Asked(fortune, _): &Asked) {
    let over = || {
        let fortune = fortune.lock().unwrap();
        fortune.error.is_some() || fortune.done
    };
    while !over() {
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}

#[test]
fn failed_reads_end_only_requests_that_cannot_do_without_them() {
    let (model, fates) = faulty();
    let scheduler = Scheduler::start(model, SchedulerOptions::default()).unwrap();
    let first = submit(&scheduler, 24, |_| ());
    wait(&first);
    let expected = first.0.lock().unwrap().tokens.clone();
    assert!(expected.len() > 12);
    // One failure is got over, since everybody is tried alone then; many are not.
    for (failures, most) in [(1, 0), (30, 3)] {
        let failing = fates.clone();
        let at = move |tokens| {
            if tokens == 4 {
                failing.set(std::iter::repeat_n(Fate::Failed, failures));
            }
        };
        let requests: Vec<Asked> = std::iter::once(submit(&scheduler, 24, at))
            .chain((0..2).map(|_| submit(&scheduler, 24, |_| ())))
            .collect();
        requests.iter().for_each(wait);
        let mut failed = 0;
        for request in requests {
            let request = request.0.lock().unwrap();
            match &request.error {
                Some(error) => {
                    failed += 1;
                    assert!(is_about_an_expert(error), "{error}");
                    assert!(expected.starts_with(&request.tokens) && !request.done);
                }
                None => assert!(request.tokens == expected && request.done),
            }
        }
        assert!(failed <= most && (failed > 0) == (most > 0), "{failed} failed");
        fates.set([]);
        let next = submit(&scheduler, 24, |_| ());
        wait(&next);
        assert_eq!(next.0.lock().unwrap().tokens, expected);
    }
}

/// There are no logits to choose a first token by.
#[test]
fn a_prompt_without_tokens_is_refused() {
    let (mut model, _) = faulty();
    model.template = Some(ChatTemplate::new("empty.jinja", "{# nothing #}").unwrap());
    let error = model.encode_chat(&[json!({"role": "user", "content": "Hello"})]).unwrap_err();
    assert!(
        matches!(&error, Error::ChatTemplate { path, .. } if path == Path::new("empty.jinja")),
        "{error}"
    );
    let mut session = model.engine.session();
    let error = model.generate(&mut session, &[], decoding(), |_| true).unwrap_err();
    assert!(matches!(error, Error::Option { option: "prompt", .. }), "{error}");
    assert!(answer(&mut model, |_| ()).is_ok(), "the next one is answered");
}

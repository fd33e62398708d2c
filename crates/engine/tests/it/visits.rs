//! Visits of the scheduler's engine: what they compute, what they cache, and that answers go on beside them.

use std::path::Path;

use moeflux::scheduler::Visit;
use moeflux::{DecodingOptions, Error, Options, Outputs, Request, Result, Scheduler, Session};

use crate::scheduler::{demo, model, options, recurrent, settled, start};

fn request(prompt: Vec<u32>, max_tokens: usize) -> Request {
    Request { prompt, options: DecodingOptions { max_tokens, ..Default::default() }, ..Default::default() }
}

/// What `task` returns.
fn visit<T: Send + 'static>(
    scheduler: &Scheduler,
    task: impl FnOnce(&mut Visit<'_>) -> T + Send + 'static,
) -> T {
    scheduler.visit(task).unwrap().recv().unwrap()
}

fn evaluate(visit: &mut Visit<'_>, session: &mut Session, tokens: &[u32]) -> Result<Vec<f32>> {
    visit.with_room(session, tokens.len(), |engine, session| engine.eval(session, tokens, Outputs::Last))
}

#[test]
fn logits_beside_answers_are_those_of_an_idle_engine() {
    let mut single = model(&demo(), &options());
    let prompt = single.encode_chat(&[serde_json::json!({"role": "user", "content": "Hello!"})]).unwrap();
    let mut session = single.engine.session();
    let expected = single.engine.eval(&mut session, &prompt, Outputs::Last).unwrap();

    let scheduler = start(&demo(), &options());
    let mut endless = request(prompt.clone(), 200);
    let ends = scheduler.tokenizer().eos_ids().iter().map(|id| (*id, f32::NEG_INFINITY));
    endless.options.sampler.logit_bias = ends.collect();
    let mut answer = scheduler.submit(endless).unwrap();
    answer.next().unwrap();
    let tokens = prompt.clone();
    let logits = visit(&scheduler, move |visit| {
        let mut session = visit.engine.session();
        evaluate(visit, &mut session, &tokens)
    });
    assert_eq!(scheduler.figures().running, 1, "the answer is still being given");
    assert_eq!(logits.unwrap(), expected);
    assert_eq!(answer.text().unwrap().1.usage.completion_tokens, 200);
}

#[test]
fn sessions_come_from_and_go_to_the_cache() {
    let scheduler = start(&demo(), &options());
    let prompt = scheduler.encode("Once upon a time there was a fox.").unwrap();
    let tokens = prompt.clone();
    let known = visit(&scheduler, move |visit| {
        let mut session = visit.recall(&tokens);
        assert_eq!(session.position(), 0, "nothing is cached yet");
        evaluate(visit, &mut session, &tokens).unwrap();
        visit.keep(session.fork(session.position()));
        session
    });
    assert_eq!(known.tokens(), prompt);
    let longer = [&prompt[..], &prompt[1..]].concat();
    let (_, done) = scheduler.submit(request(longer.clone(), 4)).unwrap().text().unwrap();
    assert_eq!(done.usage.cached_tokens, prompt.len());
    let position = visit(&scheduler, move |visit| visit.recall(&longer).position());
    assert_eq!(position, 2 * prompt.len() - 1, "of the answer's prompt");
}

/// Cached sessions make room for visitors, what visitors hold makes room for nobody, and what does not fit is an error.
fn room(path: &Path, options: &Options) {
    let scheduler = start(path, options);
    let context = scheduler.description().context;
    let first: Vec<u32> = (0..context as u32 - 8).map(|i| i % 50 + 1).collect();
    for shift in 0..2 {
        let prompt = first.iter().map(|token| token + shift).collect();
        scheduler.submit(request(prompt, 2)).unwrap().text().unwrap();
    }
    settled(&scheduler);
    let tokens = first.clone();
    let held = visit(&scheduler, move |visit| {
        let mut session = visit.engine.session();
        evaluate(visit, &mut session, &tokens[2..]).map(|_| session)
    });
    let held = held.unwrap();
    let tokens = first.clone();
    let more = visit(&scheduler, move |visit| {
        let (mut session, more) = (visit.engine.session(), [&tokens[..], &tokens[..]].concat());
        evaluate(visit, &mut session, &more).map(drop)
    });
    assert!(matches!(more, Err(Error::ContextFull { .. })), "{more:?}");
    let (_, done) = scheduler.submit(request(first, 2)).unwrap().text().unwrap();
    assert!(done.usage.completion_tokens > 0);
    drop(held);
}

#[test]
fn cached_sessions_make_room() {
    // Pages for two contexts, so that two cached sessions and a visitor's have no room together.
    let options = Options { context: Some(128), sequences: 2, kv_tokens: Some(256), ..Options::default() };
    room(&demo(), &options);
    let folder = tempfile::tempdir().unwrap();
    let states = Options { checkpoints: 0, ..options };
    room(&recurrent(folder.path()), &states);
}

#[test]
fn a_scheduler_that_ends_tells_visitors() {
    let scheduler = start(&demo(), &options());
    scheduler.drain();
    assert!(matches!(scheduler.visit(|_| ()), Err(Error::ShuttingDown)));
    let scheduler = start(&demo(), &options());
    let (begun, has_begun) = std::sync::mpsc::channel();
    let (sender, go_on) = std::sync::mpsc::channel::<()>();
    let first = scheduler.visit(move |_| begun.send(()).is_ok() && go_on.recv().is_ok()).unwrap();
    has_begun.recv().unwrap();
    let second = scheduler.visit(|_| ()).unwrap();
    scheduler.abandon();
    sender.send(()).unwrap();
    assert!(first.recv().unwrap());
    assert!(second.recv().is_err(), "it was given up before");
}

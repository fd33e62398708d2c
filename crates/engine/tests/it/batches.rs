//! Several sequences in one batch: nobody's result depends on the others, and shared pages are never written.

use std::path::Path;

use moeflux::{Engine, Error, Options, Outputs, Part, Session};
use moeflux_compute::backend::ActivationMode;
use moeflux_compute::cpu::CpuBackend;

/// Keys and values with and without recurrent state, and latent ones; the last is quantised.
const MODELS: [&str; 4] =
    ["hf/qwen3_next_basic", "hf/qwen3_moe_basic", "hf/deepseek_v3_basic", "gguf/qwen3_moe_q4_k_m"];

fn open(name: &str, options: &Options) -> Engine {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    Engine::open(&path, &CpuBackend::new(2, None).unwrap(), options, |_, _| ()).unwrap()
}

fn options() -> Options {
    let activations = ActivationMode::Int8;
    Options { activations, context: Some(192), sequences: 4, expert_cache: Some(6), ..Options::default() }
}

fn tokens(from: usize, to: usize) -> Vec<u32> {
    (from..to).map(|i| ((i * i * 5 + i * 11 + 3) % 59) as u32).collect()
}

/// A message that does not fill screens.
fn assert_same(got: &[u32], expected: &[u32], what: &str) {
    let first = got.iter().zip(expected).position(|(a, b)| a != b);
    assert!(
        got == expected,
        "{what}: {} and {} values, different from {first:?} on",
        got.len(),
        expected.len()
    );
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|v| v.to_bits()).collect()
}

fn eval(engine: &mut Engine, session: &mut Session, tokens: &[u32]) -> Vec<u32> {
    bits(&engine.eval(session, tokens, Outputs::All).unwrap())
}

/// Logits of `tokens` by themselves.
fn alone(engine: &mut Engine, tokens: &[u32]) -> Vec<u32> {
    let mut session = engine.session();
    eval(engine, &mut session, tokens)
}

#[test]
fn a_part_does_not_depend_on_the_others() {
    for name in MODELS {
        let mut engine = open(name, &options());
        let width = engine.model().graph.vocab_size();
        let texts = [tokens(0, 100), tokens(50, 120), tokens(7, 90)];
        let expected: Vec<_> = texts.iter().map(|text| alone(&mut engine, text)).collect();
        // How far each sequence is after every batch: prompts in pieces beside single tokens.
        let progress = [[30, 0, 1], [31, 65, 2], [90, 66, 80], [91, 67, 81], [100, 70, 83]];
        let mut sessions = [engine.session(), engine.session(), engine.session()];
        for goals in progress {
            let starts: Vec<usize> = sessions.iter().map(Session::position).collect();
            let mut parts: Vec<Part<'_>> = sessions
                .iter_mut()
                .zip(&texts)
                .zip(goals)
                .map(|((session, text), goal)| {
                    let tokens = &text[session.position()..goal];
                    let outputs = Some(if goal % 2 == 0 { Outputs::All } else { Outputs::Last });
                    Part { session, tokens, outputs }
                })
                .collect();
            let logits = engine.eval_batch(&mut parts).unwrap();
            for (index, (goal, start)) in goals.into_iter().zip(starts).enumerate() {
                let from = if goal % 2 == 0 { start } else { goal - 1 };
                let from = from.max(start);
                assert_same(&bits(&logits[index]), &expected[index][from * width..goal * width], name);
                assert_eq!(sessions[index].position(), goal);
            }
        }
    }
}

#[test]
fn forks_share_pages_and_do_not_disturb_each_other() {
    for name in MODELS {
        let mut engine = open(name, &options());
        let recurrent = !engine.model().graph.states().is_empty();
        let width = engine.model().graph.vocab_size();
        let text = tokens(0, 130);
        let other = [&text[..100], &tokens(300, 330)].concat();
        let (plain, forked) = (alone(&mut engine, &text), alone(&mut engine, &other));
        let free = engine.free_pages();

        let mut session = engine.session();
        eval(&mut engine, &mut session, &text[..70]);
        session.checkpoint();
        eval(&mut engine, &mut session, &text[70..110]);
        let mut fork = session.fork(100);
        assert_eq!(fork.position(), if recurrent { 70 } else { 100 }, "{name}");
        assert_eq!(fork.tokens(), &text[..fork.position()]);
        assert_eq!(engine.free_pages(), free - 2, "{name}: shared");
        let from = fork.position();
        assert_same(&eval(&mut engine, &mut fork, &other[from..]), &forked[from * width..], name);
        assert_same(&eval(&mut engine, &mut session, &text[110..]), &plain[110 * width..], name);
        // Going back within a shared page must not change the other's past either.
        let mut third = session.fork(usize::MAX);
        engine.truncate(&mut third, 80).unwrap();
        eval(&mut engine, &mut third, &tokens(500, 520));
        engine.truncate(&mut session, 120).unwrap();
        assert_same(&eval(&mut engine, &mut session, &text[120..]), &plain[120 * width..], name);
        drop((session, fork, third));
        assert_eq!(engine.free_pages(), free, "{name}: every page came back");
    }
}

#[test]
fn a_batch_that_fails_changes_nothing() {
    for name in MODELS {
        let mut engine = open(name, &Options { chunk: Some(64), kv_tokens: Some(256), ..options() });
        let expected = alone(&mut engine, &tokens(0, 130));
        let width = engine.model().graph.vocab_size();
        let (mut a, mut b) = (engine.session(), engine.session());
        eval(&mut engine, &mut a, &tokens(0, 60));
        eval(&mut engine, &mut b, &tokens(0, 128));
        let free = engine.free_pages();
        let mut refused = |a_tokens: &[u32], b_tokens: &[u32]| {
            let outputs = Some(Outputs::Last);
            let mut parts = [
                Part { session: &mut a, tokens: a_tokens, outputs },
                Part { session: &mut b, tokens: b_tokens, outputs },
            ];
            let error = engine.eval_batch(&mut parts).unwrap_err();
            assert_eq!((a.position(), b.position(), engine.free_pages()), (60, 128, free), "{name}: {error}");
            error
        };
        assert!(matches!(refused(&tokens(0, 40), &tokens(0, 40)), Error::Option { option: "chunk", .. }));
        assert!(matches!(refused(&tokens(0, 9), &[1_000_000]), Error::Token { .. }));
        // No page is left for the second.
        let outputs = Some(Outputs::Last);
        let mut c = engine.session();
        eval(&mut engine, &mut c, &[1]);
        let mut parts = [
            Part { session: &mut c, tokens: &tokens(0, 4), outputs },
            Part { session: &mut b, tokens: &tokens(0, 4), outputs },
        ];
        let error = engine.eval_batch(&mut parts).unwrap_err();
        assert!(matches!(error, Error::ContextFull { .. }), "{name}: {error}");
        assert_eq!((b.position(), c.position()), (128, 1));
        drop((a, c));
        assert_same(&eval(&mut engine, &mut b, &tokens(128, 130)), &expected[128 * width..], name);
    }
}

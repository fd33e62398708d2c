//! Requests for several answers: they wait as one, let others go first, and each answer is what it would be alone.

use std::sync::mpsc;
use std::time::Duration;

use crate::scheduler::{demo, endless, hold_up, model, options, settled};
use moeflux::sampler::SamplerOptions;
use moeflux::scheduler::{Event, ManyRequest};
use moeflux::{DecodingOptions, Error, Options, Request, Scheduler, SchedulerOptions};

const WAIT: Duration = Duration::from_secs(60);

/// With room in the queue for so many, and one sequence at a time.
fn start(queue: usize) -> Scheduler {
    let options = Options { sequences: 1, ..options() };
    Scheduler::start(model(&demo(), &options), SchedulerOptions { queue, ..SchedulerOptions::default() })
        .unwrap()
}

/// Sampled, from this seed on.
fn sampled(seed: u64, max_tokens: usize) -> DecodingOptions {
    let sampler = SamplerOptions { temperature: 1.0, seed: Some(seed), ..SamplerOptions::default() };
    DecodingOptions { sampler, max_tokens, ..Default::default() }
}

fn prompts() -> Vec<Vec<u32>> {
    (0..3u32).map(|prompt| (0..20 + prompt).map(|i| 100 + (i * 7 + prompt * 11) % 90).collect()).collect()
}

#[test]
fn several_answers_wait_as_one() {
    let scheduler = start(2);
    let alone: Vec<String> = prompts()
        .iter()
        .flat_map(|prompt| (0..5).map(|answer| (prompt.clone(), sampled(30 + answer, 6))))
        .map(|(prompt, options)| {
            scheduler.submit(Request { prompt, options, ..Default::default() }).unwrap().text().unwrap().0
        })
        .collect();
    assert!(alone[0] != alone[1] && alone[0] != alone[5]);

    let (sink, reached, go) = hold_up(1);
    let held = scheduler.submit_to(endless(&scheduler, vec![300; 4], 3), sink).unwrap();
    reached.recv_timeout(WAIT).unwrap();
    let (sender, events) = mpsc::channel();
    let several = sender.clone();
    let request =
        ManyRequest { prompts: prompts(), answers: 5, options: sampled(30, 6), ..Default::default() };
    let many = scheduler.submit_many_to(request, move |n, event| drop(several.send((n, event)))).unwrap();
    let request = endless(&scheduler, vec![300; 5], 3);
    let other = scheduler.submit_to(request, move |event| drop(sender.send((99, event)))).unwrap();
    let refused = scheduler.submit(endless(&scheduler, vec![300; 5], 3)).map(drop).unwrap_err();
    assert!(matches!(refused, Error::QueueFull { waiting: 2, .. }), "{refused}");
    go.send(()).unwrap();

    let (mut texts, mut done) = (vec![String::new(); 15], vec![]);
    while done.len() < 16 {
        match events.recv_timeout(WAIT).unwrap() {
            (n, Event::Piece(piece)) if n < 15 => texts[n].push_str(&piece.text),
            (n, Event::Done(_)) => done.push(n),
            (_, Event::Failed(error)) => panic!("{error}"),
            _ => {}
        }
    }
    assert_eq!(texts, alone);
    assert_eq!(done[..3], [0, 99, 1], "the second answer comes after the other request");
    drop((held, many, other));
    assert_eq!(settled(&scheduler).finished, 15 + 1 + 16);
}

#[test]
fn what_waits_of_a_cancelled_request_is_counted_and_gone() {
    let scheduler = start(2);
    let (sink, reached, go) = hold_up(1);
    let held = scheduler.submit_to(endless(&scheduler, vec![300; 4], 3), sink).unwrap();
    reached.recv_timeout(WAIT).unwrap();
    let request =
        ManyRequest { prompts: prompts(), answers: 4, options: sampled(1, 9), ..Default::default() };
    drop(scheduler.submit_many_to(request, |_, event| panic!("{event:?}")).unwrap());
    go.send(()).unwrap();
    let figures = settled(&scheduler);
    assert_eq!((figures.finished, figures.cancelled), (1, 12));
    drop(held);
}

#[test]
fn prompts_that_wait_have_a_limit_together() {
    // Two times the context of 256.
    let scheduler = start(2);
    let (sink, reached, go) = hold_up(1);
    let held = scheduler.submit_to(endless(&scheduler, vec![300; 4], 3), sink).unwrap();
    reached.recv_timeout(WAIT).unwrap();
    let many = |prompts: usize| {
        let prompts = vec![vec![300; 200]; prompts];
        let request = ManyRequest { prompts, answers: 2, options: sampled(1, 2), ..Default::default() };
        scheduler.submit_many_to(request, |_, _| ())
    };
    // One is taken whatever it has.
    let first = many(3).unwrap();
    assert!(matches!(many(1), Err(Error::QueueFull { waiting: 1, .. })));
    drop(first);
    let second = many(1).unwrap();
    let third = many(1).unwrap();
    go.send(()).unwrap();
    settled(&scheduler);
    drop((held, second, third));
    let refuse = |request| scheduler.submit_many_to(request, |_, _| ()).map(drop).unwrap_err();
    let none = ManyRequest { prompts: vec![vec![300]], ..Default::default() };
    assert!(matches!(refuse(none), Error::Option { option: "answers", .. }));
    let long = ManyRequest { prompts: vec![vec![300], vec![300; 256]], answers: 1, ..Default::default() };
    assert!(matches!(refuse(long), Error::ContextFull { .. }));
}

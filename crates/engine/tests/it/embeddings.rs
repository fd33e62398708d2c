//! Requests for embeddings in the scheduler: they depend on nothing else that goes on, and hold nothing up.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::scheduler::{demo, endless, hold_up, model, options, recurrent, settled, start};
use crate::support::bits;
use moeflux::scheduler::{EmbedRequest, Event, Ticket};
use moeflux::{Error, Options, Pooling, Scheduler, SchedulerOptions, TextModel};
use moeflux_compute::gpu::emulator::Emulator;
use moeflux_compute::gpu::{GpuBackend, GpuOptions};
use safetensors::SafeTensors;

const WAIT: Duration = Duration::from_secs(60);

/// Texts of many lengths, the longest of 120 tokens, of ids below 100.
fn inputs() -> Vec<Vec<u32>> {
    let text = |length: u32| (0..length).map(|i| (i * i * 3 + i * 7 + length) % 97 + 1).collect();
    [1, 2, 30, 64, 65, 120, 9, 40, 3].into_iter().map(text).collect()
}

fn embed(scheduler: &Scheduler, inputs: &[Vec<u32>], pooling: Pooling) -> Vec<Vec<u32>> {
    let request = EmbedRequest { inputs: inputs.to_vec(), pooling };
    scheduler.embed(request).unwrap().iter().map(|embedding| bits(embedding)).collect()
}

#[test]
fn embeddings_do_not_depend_on_company_or_memory() {
    let folder = tempfile::tempdir().unwrap();
    for path in [demo(), recurrent(folder.path())] {
        let of = |pooling: Pooling| -> Vec<Vec<u32>> {
            let mut alone = model(&path, &options());
            inputs().iter().map(|input| bits(&alone.engine.embed(input, pooling).unwrap())).collect()
        };
        let expected = [(Pooling::Last, of(Pooling::Last)), (Pooling::Mean, of(Pooling::Mean))];
        assert_ne!(expected[0].1[5], expected[1].1[5]);
        // Room for all; for about two at a time, so that some are put back; experts from disk.
        let tight = Options { context: Some(128), chunk: Some(24), kv_tokens: Some(192), ..options() };
        let streamed = Options { expert_cache: Some(4), ..options() };
        for options in [options(), tight, streamed] {
            let scheduler = start(&path, &options);
            let answers: Vec<Ticket> = (0..2)
                .map(|i| {
                    let request = endless(&scheduler, vec![5 + i; 30], 60);
                    scheduler.submit_to(request, hold_up(usize::MAX).0).unwrap()
                })
                .collect();
            for (pooling, right) in &expected {
                assert_eq!(&embed(&scheduler, &inputs(), *pooling), right, "{pooling:?} {options:?}");
            }
            drop(answers);
            // Alone, one by one.
            for (input, right) in inputs().iter().zip(&expected[1].1) {
                assert_eq!(&embed(&scheduler, std::slice::from_ref(input), Pooling::Mean)[0], right);
            }
            let figures = settled(&scheduler);
            let count = inputs().len() as u64;
            assert_eq!((figures.embeddings, figures.failed), (3 * count, 0), "{figures:?}");
            assert_eq!(figures.finished + figures.cancelled, 2 + 2 + count, "{figures:?}");
            assert_eq!(figures.pages_running, 0);
        }
    }
}

/// On a device, beside answers whose tokens are drawn there.
#[test]
fn a_device_embeds_beside_answers() {
    let folder = tempfile::tempdir().unwrap();
    let path = recurrent(folder.path());
    let open = || {
        let device = || Ok(Box::new(Emulator::new(5)) as _);
        let backend = GpuBackend::new("emulator", GpuOptions::default(), device);
        let options = Options { context: Some(32), ..options() };
        TextModel::open(&path, &backend, &options, |_, _| ()).unwrap()
    };
    let inputs: Vec<Vec<u32>> = [3, 20, 1].map(|index| vec![index + 4; index as usize]).to_vec();
    let mut alone = open();
    let text = |scheduler: &Scheduler| {
        let answer = scheduler.submit(endless(scheduler, vec![40, 60], 6)).unwrap();
        answer.text().unwrap().0
    };
    let expected: Vec<Vec<f32>> =
        inputs.iter().map(|input| alone.engine.embed(input, Pooling::Mean).unwrap()).collect();
    let scheduler = Scheduler::start(alone, SchedulerOptions::default()).unwrap();
    let right = text(&scheduler);
    drop(scheduler);
    let scheduler = Scheduler::start(open(), SchedulerOptions::default()).unwrap();
    let (sender, results) = mpsc::channel();
    let request = EmbedRequest { inputs, pooling: Pooling::Mean };
    let _ticket = scheduler.embed_to(request, move |input, result| sender.send((input, result)).unwrap());
    assert_eq!(text(&scheduler), right);
    for (input, result) in results {
        let cosine: f32 = result.unwrap().iter().zip(&expected[input]).map(|(a, b)| a * b).sum();
        assert!((cosine - 1.0).abs() < 1e-3, "{input}: {cosine}");
    }
    assert_eq!(settled(&scheduler).embeddings, 3);
}

/// An answer that needs the page of a text which is being evaluated: the text gives it up, and begins again later.
#[test]
fn a_text_that_is_put_back_begins_again() {
    let options = Options {
        context: Some(128),
        kv_tokens: Some(128),
        sequences: 2,
        chunk: Some(8),
        checkpoints: 0,
        ..options()
    };
    let input = inputs()[3].clone();
    let right = bits(&model(&demo(), &options).engine.embed(&input, Pooling::Mean).unwrap());
    let scheduler = start(&demo(), &options);
    let (sink, reached, go) = hold_up(1);
    let _answer = scheduler.submit_to(endless(&scheduler, vec![7; 60], 30), sink).unwrap();
    reached.recv_timeout(WAIT).unwrap();
    let (sender, results) = mpsc::channel();
    let request = EmbedRequest { inputs: vec![input], pooling: Pooling::Mean };
    let _text = scheduler.embed_to(request, move |_, result| sender.send(result).unwrap()).unwrap();
    go.send(()).unwrap();
    assert_eq!(bits(&results.recv_timeout(WAIT).unwrap().unwrap()), right);
    let figures = settled(&scheduler);
    assert_eq!((figures.preemptions, figures.finished, figures.embeddings), (1, 2, 1), "{figures:?}");
    assert!(figures.prompt_tokens > 60 + 64, "{figures:?}");
}

/// A long text beside an answer: the answer gets a token for every few of the text's.
#[test]
fn answers_keep_flowing() {
    const BESIDE: usize = 4;
    let scheduling = SchedulerOptions { prefill_beside_decode: Some(BESIDE), ..SchedulerOptions::default() };
    let scheduler = Scheduler::start(model(&demo(), &options()), scheduling).unwrap();
    let pieces = Arc::new(AtomicUsize::new(0));
    let (mut hold, reached, go) = hold_up(1);
    let theirs = Arc::clone(&pieces);
    let sink = move |event: Event| {
        theirs.fetch_add(usize::from(matches!(event, Event::Piece(_))), Ordering::Relaxed);
        hold(event);
    };
    let answer = scheduler.submit_to(endless(&scheduler, vec![7; 9], 200), sink).unwrap();
    reached.recv_timeout(WAIT).unwrap();
    let (sender, results) = mpsc::channel();
    let request = EmbedRequest { inputs: vec![vec![9; 200]], pooling: Pooling::Mean };
    let seen = Arc::clone(&pieces);
    let ticket = scheduler.embed_to(request, move |_, result| {
        sender.send((seen.load(Ordering::Relaxed), result.is_ok())).unwrap();
    });
    let _ticket = ticket.unwrap();
    go.send(()).unwrap();
    let (count, is_ok) = results.recv_timeout(WAIT).unwrap();
    assert!(is_ok && (200 / BESIDE..=200 / BESIDE + 2).contains(&count), "{count} tokens meanwhile");
    drop(answer);
}

/// Inputs of a request take turns with what comes after it.
#[test]
fn many_inputs_let_others_in() {
    let scheduler = start(&demo(), &Options { sequences: 1, ..options() });
    let (order, results) = mpsc::channel();
    let inputs = vec![vec![3; 50]; 40];
    let first = order.clone();
    let sink = move |input: usize, _| first.send(input).unwrap();
    let _many = scheduler.embed_to(EmbedRequest { inputs, pooling: Pooling::Last }, sink).unwrap();
    let one = EmbedRequest { inputs: vec![vec![4; 3]], pooling: Pooling::Last };
    let _one = scheduler.embed_to(one, move |_, _| order.send(1000).unwrap()).unwrap();
    let order: Vec<usize> = (0..41).map(|_| results.recv_timeout(WAIT).unwrap()).collect();
    let place = order.iter().position(|input| *input == 1000).unwrap();
    assert!(place < 40, "{order:?}");
    assert_eq!(settled(&scheduler).finished, 2);
}

#[test]
fn cancelled_embeddings_stop_and_count_once() {
    let scheduler = start(&demo(), &Options { sequences: 3, ..options() });
    let (sender, results) = mpsc::channel();
    let sink = move |input, _| sender.send(input).unwrap();
    let inputs = vec![vec![3; 200]; 500];
    let ticket = scheduler.embed_to(EmbedRequest { inputs, pooling: Pooling::Last }, sink).unwrap();
    results.recv_timeout(WAIT).unwrap();
    drop(ticket);
    let figures = settled(&scheduler);
    assert_eq!((figures.cancelled, figures.finished, figures.failed), (1, 0, 0), "{figures:?}");
    assert_eq!((figures.pages_running, figures.pages_used), (0, 0), "{figures:?}");
    assert!(figures.embeddings < 500, "{figures:?}");
    assert_eq!(results.iter().count() as u64 + 1, figures.embeddings);
}

#[test]
fn bad_inputs_are_refused() {
    let limited = SchedulerOptions { queue: 1, ..SchedulerOptions::default() };
    let scheduler =
        Scheduler::start(model(&demo(), &Options { sequences: 1, ..options() }), limited).unwrap();
    let refused =
        |inputs: Vec<Vec<u32>>| scheduler.embed(EmbedRequest { inputs, pooling: Pooling::Last }).unwrap_err();
    assert!(matches!(refused(vec![]), Error::Option { option: "input", .. }));
    assert!(matches!(refused(vec![vec![1], vec![]]), Error::Option { option: "input", .. }));
    assert!(matches!(refused(vec![vec![1; 257]]), Error::ContextFull { wanted: 257, context: 256 }));
    assert!(matches!(refused(vec![vec![1, 1_000_000]]), Error::Token { position: 1, .. }));
    // One may fill the context.
    assert_eq!(embed(&scheduler, &[vec![1; 256]], Pooling::Mean).len(), 1);
    let (sink, reached, go) = hold_up(1);
    let _running = scheduler.submit_to(endless(&scheduler, vec![5; 4], 9), sink).unwrap();
    reached.recv_timeout(WAIT).unwrap();
    let one = || EmbedRequest { inputs: vec![vec![1]], pooling: Pooling::Last };
    let _waiting = scheduler.embed_to(one(), |_, _| ()).unwrap();
    assert!(matches!(scheduler.embed(one()).unwrap_err(), Error::QueueFull { waiting: 1, .. }));
    scheduler.drain();
    assert!(matches!(scheduler.embed(one()).unwrap_err(), Error::ShuttingDown));
    go.send(()).unwrap();
    let begun = Instant::now();
    while scheduler.is_alive() {
        assert!(begun.elapsed() < WAIT);
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(scheduler.figures().embeddings, 2, "what was taken is done");
}

/// A token whose embedding is not finite: inputs with it fail, each by itself, and those beside them do not.
#[test]
fn an_input_that_fails_leaves_the_others_alone() {
    const BAD: u32 = 77;
    let folder = tempfile::tempdir().unwrap();
    let path = recurrent(folder.path());
    let right = embed(&start(&path, &options()), &inputs()[..1], Pooling::Mean);
    let file = path.join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let (at, row) = {
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let table = tensors.tensor("model.embed_tokens.weight").unwrap();
        let row = table.data().len() / table.shape()[0];
        (table.data().as_ptr() as usize - bytes.as_ptr() as usize + BAD as usize * row, row)
    };
    // NaN in every float format.
    bytes[at..at + row].fill(0xff);
    std::fs::write(&file, bytes).unwrap();
    let scheduler = start(&path, &options());
    let (sender, results) = mpsc::channel();
    let good = inputs()[0].clone();
    let inputs = vec![good.clone(), vec![BAD; 3], good.clone(), vec![1, BAD], good];
    let sink = move |input, result| drop(sender.send((input, result)));
    let _ticket = scheduler.embed_to(EmbedRequest { inputs, pooling: Pooling::Mean }, sink).unwrap();
    let mut failed = vec![];
    for _ in 0..5 {
        match results.recv_timeout(WAIT).unwrap() {
            (_, Ok(embedding)) => assert_eq!(bits(&embedding), right[0]),
            (input, Err(error)) => {
                assert!(matches!(error, Error::NotFinite { .. }), "{error}");
                failed.push(input);
            }
        }
    }
    failed.sort_unstable();
    assert_eq!(failed, [1, 3]);
    let figures = settled(&scheduler);
    assert_eq!((figures.failed, figures.finished, figures.embeddings), (1, 0, 3), "{figures:?}");
}

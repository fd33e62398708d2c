//! Reads that fail, come back short, late or out of order, and files that change under the engine: a typed error at
//! worst, the session as it was before, and the right bits at the next try.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::faulty::{Fate, Fates, Faulty};
use crate::support::{Fixture, all, bits, expert_cache, golden_positions, is_tried, logits, open};
use moeflux::checkpoint::Checkpoint;
use moeflux::experts::{ExpertCache, PolicyKind, Prefetch};
use moeflux::io::file::ReadMode;
use moeflux::io::pread::PreadPool;
use moeflux::io::queue::{QueueKind, ReadDone, ReadQueue, ReadRequest};
use moeflux::{Engine, Error, Options, Outputs, models};
use moeflux_compute::backend::{Backend, ExpertSource};
use moeflux_compute::cpu::CpuBackend;
use moeflux_compute::graph::ExpertSetId;
use moeflux_compute::reference::Reference;

/// An engine with `slots` expert slots that reads through a faulty queue and keeps what was used last.
fn faulty(
    path: &Path,
    backend: &dyn Backend,
    (slots, chunk): (usize, usize),
    prefetch: Prefetch,
) -> (Engine, Fates) {
    let options = Options {
        expert_cache: Some(slots),
        chunk: Some(chunk),
        cache_policy: PolicyKind::Lru,
        prefetch,
        context: golden_positions(path),
        ..Options::default()
    };
    let checkpoint = Arc::new(Checkpoint::open(path).unwrap());
    let fates = Fates::default();
    let model = models::record_for(checkpoint, options.context).unwrap();
    let engine = Engine::new(model, backend, &options, Faulty::new(&fates), |_, _| ()).unwrap();
    (engine, fates)
}

/// Checks that `error` is about an expert whose read had this fate, and names it and its file.
#[track_caller]
fn assert_names_the_expert(error: &Error, fate: Fate, file: &str) {
    let Error::Compute(moeflux_compute::Error::Expert { layer, expert, .. }) = error else {
        panic!("not about an expert: {error}")
    };
    let text = error.to_string();
    assert!(text.contains(&format!("expert {expert} of layer {layer}: ")), "{text}");
    let reason = if fate == Fate::Failed { "the device is gone" } else { "failed after 1" };
    assert!(text.contains(reason) && text.contains(file), "{text} lacks {reason} or {file}");
}

/// Names of the files of a checkpoint have this in common.
fn extension(fixture: &Fixture) -> &'static str {
    if fixture.kind == "gguf" { ".gguf" } else { ".safetensors" }
}

#[test]
fn any_read_may_fail() {
    let backend = CpuBackend::new(2, None).unwrap();
    for name in ["hf/qwen3_moe_window", "gguf/olmoe_split_f16", "mlx/qwen3_moe_mixed"] {
        let fixture = Fixture::named(name);
        let tokens = &fixture.golden().tokens[..24];
        // The failing evaluation is in two chunks, after one that succeeds.
        let (head, tail) = tokens.split_at(8);
        let expected = bits(&logits(&mut open(&fixture.path, &backend, &Options::default()), tokens));
        for fate in [Fate::Failed, Fate::Short] {
            let mut failures = 0;
            for n in 0.. {
                let (mut engine, fates) = faulty(&fixture.path, &backend, (3, 9), Prefetch::Off);
                let mut session = engine.session();
                let mut got = bits(&engine.eval(&mut session, head, Outputs::All).unwrap());
                fates.nth(n, fate);
                match engine.eval(&mut session, tail, Outputs::All) {
                    Err(error) => assert_names_the_expert(&error, fate, extension(&fixture)),
                    Ok(_) => {
                        assert!(fates.left() > 0, "{name}: read {n} was {fate:?} and nobody noticed");
                        break;
                    }
                }
                failures += 1;
                assert_eq!(session.position(), head.len(), "{name}: the session is as it was");
                got.extend(bits(&engine.eval(&mut session, tail, Outputs::All).unwrap()));
                assert!(got == expected, "{name}: other bits after read {n} was {fate:?}");
            }
            assert!(failures > 3, "{name}: {failures} reads failed");
        }
    }
}

#[test]
fn every_read_may_be_late() {
    let backend = CpuBackend::new(2, None).unwrap();
    let mut random = 1u64;
    for (turn, fixture) in all().into_iter().enumerate() {
        // They choose most of the experts.
        let tokens = &fixture.golden().tokens[..16];
        let expected = bits(&logits(&mut open(&fixture.path, &backend, &Options::default()), tokens));
        let all_slots = [1, 2, 4, 1000].into_iter().enumerate();
        for (_, slots) in all_slots.filter(|(i, _)| is_tried(turn + i, 4)) {
            let (mut engine, fates) = faulty(&fixture.path, &backend, (slots, 16), Prefetch::Always);
            let all_late = slots == 4;
            fates.set((0..5000).map(|_| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                if all_late || random >> 63 == 1 { Fate::Late } else { Fate::Done }
            }));
            let got = bits(&logits(&mut engine, tokens));
            assert!(got == expected, "{}, {slots} slots", fixture.name);
            // Reads may be under way when it is dropped.
        }
    }
}

/// Evaluates the same tokens over and over while reads fail at random; then everything is as if nothing had happened.
fn many_faults(backend: &dyn Backend, fixture: &Fixture, slots: usize, faults: usize) {
    let tokens = &fixture.golden().tokens[..10];
    // Where all experts of a token fit, they are to stay: no guess may push them out.
    let prefetch = if slots < 8 { Prefetch::Always } else { Prefetch::Off };
    let (mut engine, fates) = faulty(&fixture.path, backend, (slots, 4), prefetch);
    let expected = bits(&logits(&mut engine, tokens));
    let mut random = slots as u64;
    let mut session = engine.session();
    let mut failed = 0;
    for _ in 0..faults {
        fates.set((0..6).map(|_| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            [Fate::Done, Fate::Done, Fate::Late, Fate::Late, Fate::Failed, Fate::Short]
                [(random >> 40) as usize % 6]
        }));
        let at = (random >> 50) as usize % 8;
        engine.truncate(&mut session, 0).unwrap();
        // Other experts each time, so that there is something to read whatever the cache holds.
        match engine.eval(&mut session, &tokens[at..], Outputs::Last) {
            Ok(_) => {}
            Err(Error::Compute(moeflux_compute::Error::Expert { .. })) => {
                failed += 1;
                assert_eq!(session.position(), 0);
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert!(failed > 0, "{}: reads failed", fixture.name);
    fates.set([]);
    drop(session);
    assert_eq!(bits(&logits(&mut engine, tokens)), expected, "{}, {slots} slots", fixture.name);
    // Every slot is still there: if one token's experts fit, they stay.
    let sets = engine.model().graph.expert_sets().len();
    if slots >= sets * 4 {
        logits(&mut engine, &tokens[..1]);
        engine.take_stats();
        logits(&mut engine, &tokens[..1]);
        let cache = engine.take_stats().cache;
        assert_eq!((cache.hits, cache.misses), (sets as u64 * 4, 0), "{}, {slots} slots", fixture.name);
    }
}

#[test]
fn a_thousand_faults_lose_no_slot() {
    let backend = CpuBackend::new(2, None).unwrap();
    // A token takes 4 experts in each of 2 layers.
    for slots in [1, 2, 3, 8] {
        many_faults(&backend, &Fixture::named("hf/mixtral_yarn"), slots, 250);
    }
    many_faults(&backend, &Fixture::named("gguf/qwen3_moe_mixed"), 2, 100);
}

/// A backend that does not announce which experts it will want.
#[test]
fn faults_without_announcement_lose_no_slot() {
    for slots in [1, 2, 3, 8] {
        many_faults(&Reference, &Fixture::named("hf/mixtral_yarn"), slots, 100);
    }
}

/// Writes `bytes` over the file without making a new one.
fn overwrite(path: &Path, bytes: &[u8]) {
    let mut file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    std::io::Write::write_all(&mut file, bytes).unwrap();
}

fn truncate(path: &Path, len: u64) {
    std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(len).unwrap();
}

#[test]
fn a_file_that_shrinks_is_an_error_until_it_is_whole_again() {
    let backend = CpuBackend::new(2, None).unwrap();
    for (name, file) in [
        ("hf/mixtral_window", "model-00003-of-00003.safetensors"),
        ("gguf/qwen3_moe_q8_0", "model.gguf"),
        ("mlx/mixtral_4bit", "model.safetensors"),
    ] {
        let fixture = Fixture::named(name);
        let copy = fixture.copy();
        let tokens = fixture.golden().tokens;
        let whole = std::fs::read(copy.file(file)).unwrap();
        for (len, read_mode) in
            [(0, ReadMode::Direct), (whole.len() / 3, ReadMode::Direct), (5000, ReadMode::Buffered)]
        {
            let read_queue = (len > 0).then_some(QueueKind::Pread);
            let reads = Options { read_mode: Some(read_mode), read_queue, ..Options::default() };
            let mut engine = open(copy.path(), &backend, &Options { expert_cache: Some(1), ..reads });
            let expected = bits(&logits(&mut engine, &tokens));
            truncate(&copy.file(file), len as u64);
            let mut session = engine.session();
            let error = engine.eval(&mut session, &tokens, Outputs::Last).unwrap_err();
            let text = error.to_string();
            assert!(matches!(error, Error::Compute(moeflux_compute::Error::Expert { .. })), "{text}");
            assert!(text.contains(file) && text.contains("at offset"), "{name}: {text}");
            overwrite(&copy.file(file), &whole);
            let got = bits(&engine.eval(&mut session, &tokens, Outputs::All).unwrap());
            assert!(got == expected, "{name}: other bits after the file was {len} bytes long");
        }
    }
}

#[test]
fn a_file_that_shrinks_before_its_weights_are_loaded_is_an_error() {
    let backend = CpuBackend::new(1, None).unwrap();
    for (name, file) in [("hf/qwen3_moe_basic", "model.safetensors"), ("gguf/mixtral_q8_0", "model.gguf")] {
        let copy = Fixture::named(name).copy();
        let model = models::record(Arc::new(Checkpoint::open(copy.path()).unwrap())).unwrap();
        let length = std::fs::metadata(copy.file(file)).unwrap().len();
        truncate(&copy.file(file), length / 2);
        let queue = Box::new(PreadPool::new(1).unwrap());
        let error = Engine::new(model, &backend, &Options::default(), queue, |_, _| ()).unwrap_err();
        assert!(matches!(&error, Error::Read { path, .. } if *path == copy.file(file)), "{name}: {error}");
    }
}

#[test]
fn a_file_that_is_removed_stays_readable() {
    let backend = CpuBackend::new(2, None).unwrap();
    let fixture = Fixture::named("hf/olmoe_dynamic");
    let tokens = fixture.golden().tokens;
    let copy = fixture.copy();
    let options = Options { expert_cache: Some(2), ..Options::default() };
    let mut engine = open(copy.path(), &backend, &options);
    let expected = bits(&logits(&mut engine, &tokens));
    drop(copy);
    assert_eq!(bits(&logits(&mut engine, &tokens)), expected);
}

/// A guess may fail: whoever asks for the expert has it read again.
#[test]
fn a_failed_guess_is_nobodys_error() {
    let fates = Fates::default();
    let mut cache = expert_cache("hf/qwen3_moe_basic", 4, Faulty::new(&fates));
    let ask = |cache: &mut ExpertCache, set, experts: &[u32]| {
        let mut seen = 0;
        cache.announce(ExpertSetId(set), experts).unwrap();
        cache.visit(ExpertSetId(set), experts, &mut |views| seen += views.len()).unwrap();
        assert_eq!(seen, experts.len());
    };
    for (round, fate) in [Fate::Failed, Fate::Short].into_iter().enumerate() {
        let experts = [2 * round as u32, 2 * round as u32 + 1];
        ask(&mut cache, 0, &experts);
        cache.take_stats();
        fates.nth(1, fate);
        cache.forecast(ExpertSetId(1), &experts);
        assert_eq!(fates.left(), 0, "both were read ahead");
        ask(&mut cache, 1, &experts);
        let stats = cache.take_stats();
        assert_eq!((stats.prefetches, stats.hits + stats.misses), (2, 2), "{stats:?}");
        // The other one came in time or late.
        assert_eq!(stats.misses - stats.late, 1, "{stats:?}");
    }
}

/// Counts requests that have not come back.
struct Counted {
    queue: PreadPool,
    under_way: Arc<AtomicUsize>,
}

impl Counted {
    fn back(&self, done: Option<ReadDone>) -> Option<ReadDone> {
        self.under_way.fetch_sub(usize::from(done.is_some()), Ordering::SeqCst);
        done
    }
}

impl ReadQueue for Counted {
    fn submit(&mut self, request: ReadRequest) {
        self.under_way.fetch_add(1, Ordering::SeqCst);
        self.queue.submit(request);
    }

    fn wait(&mut self) -> Option<ReadDone> {
        let done = self.queue.wait();
        self.back(done)
    }

    fn try_wait(&mut self) -> Option<ReadDone> {
        let done = self.queue.try_wait();
        self.back(done)
    }
}

#[test]
fn a_cache_that_is_dropped_waits_for_its_reads() {
    let under_way = Arc::<AtomicUsize>::default();
    let queue = Counted { queue: PreadPool::new(1).unwrap(), under_way: Arc::clone(&under_way) };
    let mut cache = expert_cache("hf/qwen3_moe_basic", 4, Box::new(queue));
    cache.announce(ExpertSetId(0), &[0, 1, 2]).unwrap();
    assert_eq!(under_way.load(Ordering::SeqCst), 3);
    drop(cache);
    assert_eq!(under_way.load(Ordering::SeqCst), 0);
}

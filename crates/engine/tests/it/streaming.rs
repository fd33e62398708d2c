//! Exact streaming: logits depend on the tokens alone, not on how many experts fit memory, how they are read, or how
//! many threads compute. All comparisons are of bits.

use std::sync::LazyLock;

use crate::support::cover::check_each;
use crate::support::{Fixture, all, bits, golden_positions, is_tried, logits, open, sample};
use moeflux::experts::{PolicyKind, Prefetch};
use moeflux::io::file::ReadMode;
use moeflux::io::queue::{self, QueueKind};
use moeflux::{Engine, Error, Options, Outputs, Session, Stats};
use moeflux_compute::backend::{ActivationMode, Backend, PAGE_TOKENS};
use moeflux_compute::cpu::CpuBackend;
use moeflux_compute::graph::{ExpertSetId, Op, RouteOp};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, TestRunner};

/// Backends of 1, 2 and 3 threads, made once.
static BACKENDS: LazyLock<[CpuBackend; 3]> =
    LazyLock::new(|| [1, 2, 3].map(|threads| CpuBackend::new(threads, None).expect("threads")));

const MODES: [ActivationMode; 2] = [ActivationMode::Int8, ActivationMode::F32];

fn options(activations: ActivationMode) -> Options {
    Options { activations, ..Options::default() }
}

/// Experts of all layers.
fn expert_count(engine: &Engine) -> usize {
    engine.model().graph.expert_sets().iter().map(|set| set.experts).sum()
}

/// Most experts that a token needs in one layer.
fn top_k(engine: &Engine) -> usize {
    let routes = engine.model().graph.nodes().iter();
    let top_k = |op: &Op| if let Op::Route(RouteOp { route, .. }) = op { route.top_k } else { 0 };
    routes.map(|node| top_k(&node.op)).max().expect("a model of experts")
}

/// Slots worth trying: fewer than a token needs, as many, a quarter, half, all but one, all.
fn slot_counts(engine: &Engine) -> Vec<usize> {
    let (top_k, all) = (top_k(engine), expert_count(engine));
    let mut counts = vec![1, top_k, all / 4, all / 2, all - 1, all];
    counts.retain(|n| *n > 0);
    counts.sort_unstable();
    counts.dedup();
    counts
}

/// The bits of all logits: prompt at once, of a page and more where there are so many tokens, then token by token, then a part
/// of it again after a truncation.
fn scenario(engine: &mut Engine, tokens: &[u32]) -> Vec<u32> {
    const SINGLE: usize = 6;
    let (prompt, rest) = tokens.split_at(tokens.len() * 2 / 3);
    let rest = &rest[..rest.len().min(SINGLE)];
    let mut session = engine.session();
    let eval = |engine: &mut Engine, session: &mut Session, tokens: &[u32], outputs| {
        bits(&engine.eval(session, tokens, outputs).unwrap_or_else(|e| panic!("{e}")))
    };
    let mut seen = eval(engine, &mut session, prompt, Outputs::All);
    let decoded: Vec<u32> =
        rest.iter().flat_map(|t| eval(engine, &mut session, &[*t], Outputs::Last)).collect();
    engine.truncate(&mut session, prompt.len() + 1).unwrap();
    let again = eval(engine, &mut session, &rest[1..], Outputs::All);
    let width = decoded.len() / rest.len();
    assert_eq!(again, decoded[width..], "what follows a truncation is what was there before");
    seen.extend(decoded);
    seen
}

/// Hits, misses and bytes of `stats` fit each other and the layers of `engine`; `batches` is how often layers ran.
fn check_stats(engine: &Engine, stats: Stats, what: &str) {
    let cache = stats.cache;
    let sizes: Vec<u64> = (0..engine.experts().store().sets())
        .map(|set| engine.experts().store().expert_bytes(ExpertSetId(set)))
        .collect();
    let (least, most) = (sizes.iter().min().expect("experts"), sizes.iter().max().expect("experts"));
    let reads = cache.misses - cache.late + cache.prefetches;
    // Gate and up in one matrix may have one scale, which is read once.
    let shared = size_of::<f32>() as u64;
    let (low, high) = (reads * least.saturating_sub(shared), reads * most);
    assert!((low..=high).contains(&cache.bytes_read), "{what}: {cache:?}, experts of {sizes:?} bytes");
}

#[test]
fn no_cache_size_and_no_number_of_threads_changes_a_bit() {
    for (turn, fixture) in sample().into_iter().enumerate() {
        let tokens = fixture.golden().tokens;
        // Neighbours, which are of one family mostly, have the other one.
        let mode = MODES[turn / 2 % MODES.len()];
        let mut resident = open(&fixture.path, &BACKENDS[0], &options(mode));
        assert_eq!(resident.experts().plan().slots(), expert_count(&resident), "all experts fit");
        let expected = scenario(&mut resident, &tokens);
        let stats = resident.take_stats();
        check_stats(&resident, stats, &fixture.name);
        let total = resident.experts().store().total_bytes();
        assert!(stats.cache.bytes_read <= total, "{}: no expert is read twice", fixture.name);

        // Some for each fixture: neighbours, which are of one family mostly, have the rest.
        let counts = slot_counts(&resident).into_iter().enumerate();
        for (i, slots) in counts.filter(|(i, _)| is_tried(i + turn, 3)) {
            let backend = &BACKENDS[i % 3];
            let read_depth = if i % 2 == 0 { 4 } else { 1 };
            let prefetch = [Prefetch::Always, Prefetch::Off, Prefetch::Auto][i % 3];
            let options = Options { expert_cache: Some(slots), read_depth, prefetch, ..options(mode) };
            let what = format!("{}, {mode:?}, {slots} slots, {}", fixture.name, backend.describe());
            let mut engine = open(&fixture.path, backend, &options);
            assert_eq!(engine.experts().plan().slots(), slots, "{what}");
            assert_eq!(scenario(&mut engine, &tokens), expected, "{what}");
            let streamed = engine.take_stats();
            check_stats(&engine, streamed, &what);
            let asked = |s: Stats| s.cache.hits + s.cache.misses;
            assert_eq!(asked(streamed), asked(stats), "{what}: requests do not depend on the cache");
            assert_eq!(streamed.tokens, stats.tokens, "{what}");
        }
    }
}

#[test]
fn one_slot_reads_every_expert_anew() {
    let fixture = Fixture::named("hf/olmoe_basic");
    let one = Options { expert_cache: Some(1), prefetch: Prefetch::Off, ..options(ActivationMode::F32) };
    let mut engine = open(&fixture.path, &BACKENDS[1], &one);
    let layers = engine.experts().store().sets() as u64;
    let top_k = top_k(&engine) as u64;
    logits(&mut engine, &[5]);
    let cache = engine.take_stats().cache;
    let expert = engine.experts().store().expert_bytes(ExpertSetId(0));
    assert_eq!((cache.hits, cache.misses), (0, layers * top_k));
    assert_eq!(cache.bytes_read, cache.misses * expert);
    assert_eq!(cache.hit_rate(), 0.0);
    assert_eq!(engine.take_stats(), Stats::default(), "statistics start again");
}

#[test]
fn filling_empty_slots_reads_as_many_experts_as_fit_and_changes_no_bit() {
    let fixture = Fixture::named("hf/qwen3_moe_basic");
    let tokens = fixture.golden().tokens;
    let open = |expert_cache| {
        open(&fixture.path, &BACKENDS[1], &Options { expert_cache, ..options(ActivationMode::Int8) })
    };
    let mut untouched = open(None);
    let all = expert_count(&untouched);
    let expected = bits(&logits(&mut untouched, &tokens));
    for slots in [1, all / 2, all] {
        let mut engine = open(Some(slots));
        engine.fill_experts().unwrap();
        engine.fill_experts().unwrap();
        let filled = engine.take_stats();
        check_stats(&engine, filled, "filled");
        assert_eq!(filled.cache.prefetches, slots as u64, "every slot is filled, and once");
        assert_eq!(bits(&logits(&mut engine, &tokens)), expected, "{slots} slots");
        let cache = engine.take_stats().cache;
        assert_eq!(cache.misses == 0, slots == all, "{slots} slots: {cache:?}");
    }
}

#[test]
fn a_second_run_of_a_resident_model_reads_nothing() {
    for fixture in all() {
        let tokens = fixture.golden().tokens;
        // A guess may still be on its way when the second run begins.
        let options = Options { prefetch: Prefetch::Off, ..options(ActivationMode::Int8) };
        let mut engine = open(&fixture.path, &BACKENDS[1], &options);
        let first = bits(&logits(&mut engine, &tokens));
        let missed = engine.take_stats().cache.misses;
        // Its tokens choose experts only that return what they take.
        if fixture.name == "hf/longcat_flash_zeros" {
            assert_eq!(missed, 0);
            continue;
        }
        assert!(missed > 0, "{}: experts are read when they are asked for", fixture.name);
        assert_eq!(bits(&logits(&mut engine, &tokens)), first, "{}", fixture.name);
        let cache = engine.take_stats().cache;
        assert_eq!((cache.misses, cache.bytes_read), (0, 0), "{}", fixture.name);
        assert!(cache.hits > 0 && cache.hit_rate() == 1.0, "{}", fixture.name);
    }
}

#[test]
fn interleaved_sessions_are_as_separate_ones() {
    for name in ["hf/qwen3_moe_window", "gguf/qwen3_moe_q4_k_m", "mlx/olmoe_8bit_tied"] {
        let fixture = Fixture::named(name);
        let tokens = fixture.golden().tokens;
        let reversed: Vec<u32> = tokens.iter().rev().copied().collect();
        let backend = &BACKENDS[1];
        // Both sessions' pages.
        let context = Some(2 * tokens.len().next_multiple_of(PAGE_TOKENS));
        let options = Options { context, ..options(ActivationMode::Int8) };
        let mut resident = open(&fixture.path, backend, &options);
        let expected = [bits(&logits(&mut resident, &tokens)), bits(&logits(&mut resident, &reversed))];

        let options = Options { expert_cache: Some(3), ..options };
        let mut engine = open(&fixture.path, backend, &options);
        let mut sessions = [engine.session(), engine.session()];
        let mut got = [vec![], vec![]];
        let steps = tokens.chunks(5).zip(reversed.chunks(5));
        for (a, b) in steps {
            for (which, part) in [a, b].into_iter().enumerate() {
                got[which].extend(bits(&engine.eval(&mut sessions[which], part, Outputs::All).unwrap()));
            }
        }
        assert_eq!(got, expected, "{name}");
        // Pages of a dropped session are used again, whatever is in them.
        drop(sessions);
        assert_eq!(bits(&logits(&mut engine, &reversed)), expected[1], "{name}");
    }
}

#[test]
fn sessions_share_the_context_and_give_it_back() {
    let fixture = Fixture::named("hf/mixtral_basic");
    let options = Options { context: Some(128), ..options(ActivationMode::F32) };
    let mut engine = open(&fixture.path, &BACKENDS[0], &options);
    let tokens: Vec<u32> = (0..129).map(|t| t % 99).collect();
    let mut first = engine.session();
    let error = engine.eval(&mut first, &tokens, Outputs::Last).unwrap_err();
    assert!(matches!(error, Error::ContextFull { wanted: 129, context: 128 }), "{error}");
    assert_eq!(first.position(), 0);
    engine.eval(&mut first, &tokens[..100], Outputs::Last).unwrap();
    // The second of two pages is taken: a second session finds none.
    let mut second = engine.session();
    let error = engine.eval(&mut second, &tokens[..1], Outputs::Last).unwrap_err();
    assert!(matches!(error, Error::ContextFull { .. }), "{error}");
    assert_eq!(second.position(), 0);
    // The first session goes on as if nothing had happened, and gives back what it no longer needs.
    let next = bits(&engine.eval(&mut first, &tokens[100..128], Outputs::Last).unwrap());
    engine.truncate(&mut first, 64).unwrap();
    engine.truncate(&mut first, 70).unwrap();
    assert_eq!(first.position(), 64);
    engine.eval(&mut second, &tokens[..1], Outputs::Last).unwrap();
    drop(second);
    assert_eq!(bits(&engine.eval(&mut first, &tokens[64..128], Outputs::Last).unwrap()), next);
}

/// The budget that an engine cannot do without, as its error says.
fn minimum(fixture: &Fixture, backend: &CpuBackend, options: &Options) -> u64 {
    let context = options.context.or_else(|| golden_positions(&fixture.path));
    let options = Options { memory: Some(1), context, ..options.clone() };
    match Engine::open(&fixture.path, backend, &options, |_, _| ()) {
        Err(Error::Budget { budget: 1, minimum, .. }) => minimum,
        Err(other) => panic!("{}: {other}", fixture.name),
        Ok(_) => panic!("{}: opened within a byte", fixture.name),
    }
}

#[test]
fn the_minimum_of_a_budget_is_enough_and_a_byte_less_is_not() {
    check_each(&all(), |turn, fixture| {
        let tokens = fixture.golden().tokens;
        // One of these for each of four neighbours, which are of one family mostly, and of what they have of experts below.
        let modes = [(ActivationMode::Int8, None), (ActivationMode::F32, Some(9))];
        let (mode, chunk) = modes[turn / 2 % modes.len()];
        let options = Options { chunk, context: golden_positions(&fixture.path), ..options(mode) };
        let minimum = minimum(fixture, &BACKENDS[0], &options);
        let below = Options { memory: Some(minimum - 1), ..options.clone() };
        let error = Engine::open(&fixture.path, &BACKENDS[0], &below, |_, _| ()).unwrap_err();
        let Error::Budget { minimum: again, .. } = error else { panic!("{}: {error}", fixture.name) };
        assert_eq!(again, minimum, "{}", fixture.name);
        assert!(error.to_string().contains("needs at least"), "{error}");

        let mut resident = open(&fixture.path, &BACKENDS[0], &options);
        let expected = scenario(&mut resident, &tokens);
        let all = resident.experts().store().total_bytes();
        // Of neighbours, which are of one family mostly, one has a quarter of all experts and the other half of them.
        let some = all / if turn.is_multiple_of(2) { 4 } else { 2 };
        let budgets = [minimum, minimum + some, minimum + 4 * all].into_iter().enumerate();
        for (_, memory) in budgets.filter(|(i, _)| *i == 0 || is_tried(turn + i, 3)) {
            let options = Options { memory: Some(memory), ..options.clone() };
            let mut engine = open(&fixture.path, &BACKENDS[0], &options);
            let (budget, plan) = (engine.budget(), engine.experts().plan());
            assert!(plan.bytes() <= budget.experts, "{}: {budget:?}, {plan:?}", fixture.name);
            assert!(plan.slots() >= top_k(&engine), "{}: {plan:?}", fixture.name);
            let needs = budget.needs;
            let parts = needs.trunk + needs.kv + needs.scratch + budget.experts;
            assert!(budget.total == memory && parts <= memory, "{}: {budget:?}", fixture.name);
            assert_eq!(scenario(&mut engine, &tokens), expected, "{}, {memory} bytes", fixture.name);
        }
    });
}

#[test]
fn options_that_cannot_be_used_are_refused() {
    let fixture = Fixture::named("hf/mixtral_basic");
    let check = |options: Options, expected: &str| {
        let error = Engine::open(&fixture.path, &BACKENDS[0], &options, |_, _| ()).expect_err(expected);
        assert!(error.to_string().contains(expected), "{error} lacks {expected}");
    };
    let none = Options::default();
    check(Options { chunk: Some(0), ..none.clone() }, "option chunk: expected a positive number, got 0");
    check(Options { context: Some(0), ..none.clone() }, "option context: expected a positive number");
    check(Options { expert_cache: Some(0), ..none.clone() }, "option expert_cache: expected a positive");
    check(Options { memory: Some(0), ..none.clone() }, "a memory budget of 0 B is too small");
    // Sizes beyond any memory, with and without a budget.
    for memory in [None, Some(1 << 40)] {
        for context in [1 << 50, usize::MAX / 2, usize::MAX] {
            let options = Options { context: Some(context), memory, ..none.clone() };
            check(options.clone(), "is too small for this model");
            check(Options { chunk: Some(usize::MAX), ..options }, "is too small for this model");
        }
    }
    let options = Options { expert_cache: Some(usize::MAX), read_depth: 0, ..none };
    let mut engine = open(&fixture.path, &BACKENDS[0], &options);
    assert_eq!(engine.experts().plan().slots(), expert_count(&engine), "no more slots than experts");
    logits(&mut engine, &[1, 2]);
}

/// One way to run a prompt.
#[derive(Debug, Clone)]
struct Way {
    fixture: usize,
    mode: usize,
    backend: usize,
    /// Expert slots, or a share of the memory between the minimum and enough for everything.
    room: Result<usize, f64>,
    chunk: usize,
    read_depth: usize,
    queue: QueueKind,
    read_mode: ReadMode,
    policy: PolicyKind,
    prefetch: Prefetch,
    /// Sizes of the parts that the tokens are evaluated in, over and over.
    parts: Vec<usize>,
}

fn ways(fixtures: usize) -> impl Strategy<Value = Way> {
    let room = prop_oneof![(1usize..40).prop_map(Ok), (0.0..1.2f64).prop_map(Err)];
    let parts = proptest::collection::vec(1usize..40, 1..6);
    let reads = (
        1usize..6,
        select(vec![QueueKind::Pread, any_queue()]),
        select(vec![ReadMode::Direct, ReadMode::Buffered]),
    );
    let policies = vec![
        PolicyKind::Lru,
        PolicyKind::Lfu { half_life: 8.0 },
        PolicyKind::Blend { long: 100.0, short: 2.0, part: 0.5 },
    ];
    let keeping = (select(policies), select(vec![Prefetch::Auto, Prefetch::Off, Prefetch::Always]));
    let compute = (0..fixtures, 0..MODES.len(), 0..BACKENDS.len());
    (compute, room, 1usize..50, reads, keeping, parts).prop_map(
        |(
            (fixture, mode, backend),
            room,
            chunk,
            (read_depth, queue, read_mode),
            (policy, prefetch),
            parts,
        )| Way {
            fixture,
            mode,
            backend,
            room,
            chunk,
            read_depth,
            queue,
            read_mode,
            policy,
            prefetch,
            parts,
        },
    )
}

/// The queue that this system gives.
fn any_queue() -> QueueKind {
    queue::open(None, 1).expect("a queue").0
}

#[test]
fn any_way_to_run_a_prompt_gives_the_same_bits() {
    let fixtures = all();
    let mut runner = TestRunner::new(Config { cases: 100, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&ways(fixtures.len()), |way| {
        let fixture = &fixtures[way.fixture];
        let tokens = fixture.golden().tokens;
        let mut options = Options {
            chunk: Some(way.chunk),
            read_depth: way.read_depth,
            read_queue: Some(way.queue),
            read_mode: Some(way.read_mode),
            cache_policy: way.policy,
            prefetch: way.prefetch,
            ..options(MODES[way.mode])
        };
        match way.room {
            Ok(slots) => options.expert_cache = Some(slots),
            Err(share) => {
                let experts =
                    std::fs::read_dir(&fixture.path).unwrap().map(|e| e.unwrap().metadata().unwrap().len());
                let all = experts.sum::<u64>();
                let minimum = minimum(fixture, &BACKENDS[way.backend], &options);
                options.memory = Some(minimum + (share * all as f64) as u64);
            }
        }
        let mut resident = open(&fixture.path, &BACKENDS[0], &self::options(MODES[way.mode]));
        let expected = bits(&logits(&mut resident, &tokens));
        let mut engine = open(&fixture.path, &BACKENDS[way.backend], &options);
        let mut session = engine.session();
        let (mut got, mut at) = (vec![], 0);
        for part in way.parts.iter().cycle() {
            let end = (at + part).min(tokens.len());
            got.extend(bits(&engine.eval(&mut session, &tokens[at..end], Outputs::All).unwrap()));
            at = end;
            if at == tokens.len() {
                break;
            }
        }
        prop_assert!(got == expected, "{}", fixture.name);
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

/// A budget may change between evaluations, from the least up to everything: the memory in use follows, no bit does.
#[test]
fn a_budget_may_change_while_a_sequence_runs() {
    for name in ["hf/qwen3_moe_basic", "gguf/qwen3_moe_q4_k_m", "hf/deepseek_v3_basic"] {
        let fixture = Fixture::named(name);
        let tokens: Vec<u32> = (3..15).collect();
        let mut resident = open(&fixture.path, &BACKENDS[0], &options(ActivationMode::Int8));
        let expected = bits(&logits(&mut resident, &tokens));

        let least = least_memory(&fixture);
        let growing =
            Options { memory: Some(least), memory_later: Some(1 << 40), ..options(ActivationMode::Int8) };
        let mut engine = open(&fixture.path, &BACKENDS[1], &growing);
        let (low, high) = engine.grants();
        assert_eq!(
            (engine.budget().total, engine.experts().bytes() + engine.budget().needs.held()),
            (least, low)
        );
        let all = expert_count(&engine);
        let mut session = engine.session();
        let mut seen = vec![];
        for (index, token) in tokens.iter().enumerate() {
            let memory = [high, low, (low + high) / 2, 0, u64::MAX, low + (high - low) / 3][index % 6];
            engine.grant(memory);
            let (wanted, held) = (memory.clamp(low, high), engine.budget().needs.held());
            assert_eq!(engine.budget().total, wanted, "{name}");
            assert!(engine.experts().bytes() <= wanted - held, "{name}: {memory}");
            assert_eq!(engine.experts().slots() == all, wanted == high, "{name}: {memory}");
            seen.extend(bits(&engine.eval(&mut session, &[*token], Outputs::Last).unwrap()));
        }
        assert!(seen == expected, "{name}");
    }
}

/// The memory that the error of a budget of nothing names.
fn least_memory(fixture: &Fixture) -> u64 {
    let context = golden_positions(&fixture.path);
    let options = Options { memory: Some(1), context, ..options(ActivationMode::Int8) };
    match Engine::open(&fixture.path, &BACKENDS[1], &options, |_, _| ()) {
        Err(Error::Budget { minimum, .. }) => minimum,
        other => panic!("{other:?}"),
    }
}

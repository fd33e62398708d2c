//! What the expert cache costs when every expert is in memory: the time for announcing and handing over experts, without
//! computing, as a part of a token's time.
//!
//!     cargo bench -p moeflux --bench expert_cache -- [MODEL]
//!
//! Evaluates tokens with everything in memory (the demo model unless another is given), then repeats their requests on a
//! cache whose visitor does nothing.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use moeflux::checkpoint::Checkpoint;
use moeflux::experts::trace::{Request, Trace};
use moeflux::experts::{CacheOptions, ExpertCache, SlotPlan};
use moeflux::io::queue;
use moeflux::synth::random_tokens;
use moeflux::{Engine, Options, Outputs, models};
use moeflux_compute::backend::ExpertSource;
use moeflux_compute::cpu::CpuBackend;
use moeflux_compute::graph::ExpertSetId;

const TOKENS: usize = 200;
const ROUNDS: usize = 9;

fn main() {
    let demo = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/demo/demo.gguf");
    let model = std::env::args().skip(1).find(|a| !a.starts_with("--")).map_or_else(demo, PathBuf::from);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let backend = CpuBackend::new(threads, None).expect("a backend");
    let mut engine = Engine::open(&model, &backend, &Options::default(), |_, _| ()).expect("a model");
    assert!(engine.experts().plan().holds_all(&engine.experts().store().shapes()), "all experts fit memory");

    let tokens = random_tokens(1, TOKENS, engine.model().graph.vocab_size());
    let mut seconds = vec![];
    let mut file = vec![];
    for _ in 0..=ROUNDS {
        let mut session = engine.session();
        engine.start_trace();
        let start = Instant::now();
        for token in &tokens {
            engine.eval(&mut session, &[*token], Outputs::Last).expect("logits");
        }
        seconds.push(start.elapsed().as_secs_f64());
        let stats = engine.take_stats();
        file = engine.finish_trace(&stats);
    }
    let token = median(&mut seconds[1..]) / TOKENS as f64;
    drop(engine);

    let trace = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(trace.path(), file).expect("a file");
    let (_, requests) = Trace::read(trace.path()).expect("a trace");
    let store =
        models::record(Arc::new(Checkpoint::open(&model).expect("a model"))).expect("a model").experts;
    let plan = SlotPlan::of_slots(&store.shapes(), usize::MAX);
    let (_, queue) = queue::open(None, 64).expect("a queue");
    let mut cache =
        ExpertCache::new(store, plan, queue, CacheOptions::default(), &mut |_| ()).expect("a cache");
    ask(&mut cache, &requests);
    let mut seconds: Vec<f64> = (0..ROUNDS).map(|_| ask(&mut cache, &requests)).collect();
    let cost = median(&mut seconds) / TOKENS as f64;
    println!(
        "a token takes {:.3} ms, of which the cache's part is {:.1} µs, {:.2} %",
        1e3 * token,
        1e6 * cost,
        100.0 * cost / token
    );
}

/// Seconds that the cache takes for `requests`.
fn ask(cache: &mut ExpertCache, requests: &[Request]) -> f64 {
    let start = Instant::now();
    for Request { set, rows, experts, .. } in requests {
        let set = ExpertSetId(*set);
        cache.routed(set, experts, *rows);
        cache.announce(set, experts).expect("no reads");
        cache.wants_forecast();
        let mut count = 0;
        cache.visit(set, experts, &mut |views| count += views.len()).expect("experts");
        assert_eq!(count, experts.len());
    }
    start.elapsed().as_secs_f64()
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

//! What evaluating several tokens of a sequence at once takes over one, as where guessed tokens are verified.
//!
//! `cargo run --release -p moeflux --example verification -- MODEL [--backend cpu|gpu] [--memory SIZE] [--device-memory SIZE |
//! --slots N] [--questions FILE [--every N]]`. Tokens are random unless there is a file of questions such as `models/demo/eval.jsonl`.
//! Experts are those of all layers that the rows choose, counted unless a GPU has all of them.

mod common;

use std::error::Error;
use std::time::Instant;

use common::Arguments;
use moeflux::{Options, Outputs, Part, SpecType};
use moeflux_compute::draw::Draw;

/// Tokens before, and tokens at once.
const DEPTHS: [usize; 2] = [128, 4096];
const ROWS: [usize; 5] = [1, 2, 3, 4, 8];
/// Rounds, of which each has every number of tokens.
const ROUNDS: usize = 24;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::read()?;
    let most = ROWS[ROWS.len() - 1] - 1;
    let options =
        Options { context: Some(5120), spec_type: SpecType::Ngram, draft_max: most, ..Options::default() };
    let mut model = arguments.open(options)?;
    let text = arguments.questions(&model)?.concat();
    let mut text = text.iter().copied().cycle();
    let engine = &mut model.engine;
    engine.warm_up()?;
    println!("{}", engine.backend());
    let vocab_size = engine.model().graph.vocab_size();
    let mut random = 1u64;
    let mut token = || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        text.next().unwrap_or((random >> 33) as u32 % vocab_size as u32)
    };
    for depth in DEPTHS {
        let mut session = engine.session();
        let prompt: Vec<u32> = (0..depth).map(|_| token()).collect();
        engine.eval(&mut session, &prompt, Outputs::Last)?;
        let mut times = vec![vec![]; ROWS.len()];
        let mut experts = vec![0; ROWS.len()];
        for _ in 0..ROUNDS {
            for (i, rows) in ROWS.into_iter().enumerate() {
                let tokens: Vec<u32> = (0..rows).map(|_| token()).collect();
                let before = engine.device_counts().unwrap_or_default();
                engine.take_stats();
                let start = Instant::now();
                if engine.draws_tokens() {
                    let outputs = Some(Outputs::All);
                    let part = Part { session: &mut session, tokens: &tokens, outputs };
                    engine.eval_and_draw(&mut [part], &mut || vec![Some(Draw::default())], vocab_size)?;
                } else {
                    engine.eval(&mut session, &tokens, Outputs::All)?;
                }
                times[i].push(start.elapsed().as_secs_f64() * 1e3);
                let counts = engine.device_counts().unwrap_or_default() - before;
                let cache = engine.take_stats().cache;
                experts[i] += counts.experts.max(cache.hits + cache.misses);
                engine.truncate(&mut session, depth)?;
            }
        }
        let median = |times: &mut Vec<f64>| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        };
        let times: Vec<f64> = times.iter_mut().map(median).collect();
        for (i, rows) in ROWS.into_iter().enumerate() {
            let over = times[i] / times[0];
            let counted = match experts[i] {
                0 => String::new(),
                experts => format!("; {:.0} experts", experts as f64 / ROUNDS as f64),
            };
            println!("after {depth:4}: {rows} rows {:7.3} ms, {over:5.2} of one{counted}", times[i]);
        }
    }
    Ok(())
}

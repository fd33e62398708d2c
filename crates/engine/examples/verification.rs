//! What evaluating several tokens of a sequence at once takes over one, as where guessed tokens are verified.
//!
//! `cargo run --release -p moeflux --example verification -- MODEL [DEVICE_MEMORY [MEMORY]]`, sizes in GiB.

use std::error::Error;
use std::time::Instant;

use moeflux::{OpenOptions, Options, Outputs, Part, SpecType};
use moeflux_compute::draw::Draw;

/// Tokens before, and tokens at once.
const DEPTHS: [usize; 2] = [128, 4096];
const ROWS: [usize; 5] = [1, 2, 3, 4, 8];
/// Rounds, of which each has every number of tokens.
const ROUNDS: usize = 24;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let model = arguments.next().ok_or("which model?")?;
    let most = ROWS[ROWS.len() - 1] - 1;
    let engine =
        Options { context: Some(5120), spec_type: SpecType::Ngram, draft_max: most, ..Options::default() };
    let mut options = OpenOptions::new().engine_options(engine);
    let mut bytes = || -> Result<Option<u64>, Box<dyn Error>> {
        let size = arguments.next().map(|text| text.parse::<f64>()).transpose()?;
        Ok(size.map(|size| (size * f64::from(1 << 30)) as u64))
    };
    if let Some(bytes) = bytes()? {
        options = options.device_memory(bytes);
    }
    if let Some(bytes) = bytes()? {
        options = options.memory(bytes);
    }
    let mut engine = options.open_engine(model, |_, _| ())?;
    engine.warm_up()?;
    println!("{}", engine.backend());
    let vocab_size = engine.model().graph.vocab_size();
    let mut random = 1u64;
    let mut token = || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as u32 % vocab_size as u32
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
                experts[i] += counts.experts;
                engine.truncate(&mut session, depth)?;
            }
        }
        let median = |times: &mut Vec<f64>| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        };
        let times: Vec<f64> = times.iter_mut().map(median).collect();
        for (i, rows) in ROWS.into_iter().enumerate() {
            let (time, experts) = (times[i], experts[i] as f64 / ROUNDS as f64);
            let over = time / times[0];
            println!(
                "after {depth:4}: {rows} rows {time:7.2} ms, {over:5.2} of one; {experts:.0} experts that may be elsewhere"
            );
        }
    }
    Ok(())
}

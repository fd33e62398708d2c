//! What guessing tokens gains: answers of one model with every way of guessing, which are checked to be the same.
//!
//! `cargo run --release -p moeflux --example speculation -- MODEL [DEVICE_MEMORY [TEMPERATURE …]]`, the memory in GiB, 0 for what is
//! there.

use std::error::Error;
use std::time::{Duration, Instant};

use moeflux::sampler::SamplerOptions;
use moeflux::{DecodingOptions, OpenOptions, Options, SpecType};

/// Answers of so many tokens each, to prompts of so many.
const ANSWERS: u64 = 8;
const TOKENS: usize = 192;
const PROMPT: usize = 32;
/// Ways of guessing, with the most tokens at a time; the first and the last are to be the same.
const KINDS: [(SpecType, usize); 8] = [
    (SpecType::Off, 4),
    (SpecType::Ngram, 4),
    (SpecType::Mtp, 1),
    (SpecType::Mtp, 2),
    (SpecType::Mtp, 3),
    (SpecType::Mtp, 4),
    (SpecType::Auto, 4),
    (SpecType::Off, 4),
];

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let model = arguments.next().ok_or("which model?")?;
    let gib: f64 = arguments.next().map_or(Ok(0.0), |text| text.parse())?;
    let mut temperatures: Vec<f32> = arguments.map(|text| text.parse()).collect::<Result<_, _>>()?;
    if temperatures.is_empty() {
        temperatures.push(0.0);
    }
    let mut expected: Vec<Vec<u32>> = vec![];
    println!("| guesses | temperature | tokens/s | right | answers |\n| :-- | --: | --: | --: | :-- |");
    for (spec_type, draft_max) in KINDS {
        let options = Options { context: Some(1024), spec_type, draft_max, ..Options::default() };
        let mut open = OpenOptions::new().engine_options(options);
        if gib > 0.0 {
            open = open.device_memory((gib * f64::from(1 << 30)) as u64);
        }
        let mut model = open.open(&model)?;
        model.engine.warm_up()?;
        let vocab_size = model.engine.model().graph.vocab_size() as u64;
        let mut answers = vec![];
        for temperature in &temperatures {
            let (mut time, mut tokens, mut drafted, mut accepted) = (Duration::ZERO, 0, 0, 0);
            for answer in 0..ANSWERS {
                let token = |i: u64| ((answer * 7_919 + i * 104_729) % vocab_size) as u32;
                let prompt: Vec<u32> = (0..PROMPT as u64).map(token).collect();
                let sampler = SamplerOptions {
                    temperature: *temperature,
                    seed: Some(answer),
                    ..SamplerOptions::default()
                };
                let decoding = DecodingOptions { sampler, max_tokens: TOKENS, ..DecodingOptions::default() };
                let mut session = model.engine.session();
                let mut first = None;
                let generated = model.generate(&mut session, &prompt, decoding, |text| {
                    first = first.or_else(|| (!text.is_empty()).then(Instant::now));
                    true
                })?;
                time += first.map_or(Duration::ZERO, |first| first.elapsed());
                tokens += generated.tokens.len() - 1;
                drafted += generated.decode.drafted;
                accepted += generated.decode.accepted;
                answers.push(generated.tokens);
            }
            let right = match drafted {
                0 => String::new(),
                _ => format!("{:.0} %", 100.0 * accepted as f64 / drafted as f64),
            };
            let from = answers.len() - ANSWERS as usize;
            let same = expected.is_empty() || answers[from..] == expected[from..from + ANSWERS as usize];
            let speed = tokens as f64 / time.as_secs_f64();
            let kind =
                if spec_type == SpecType::Mtp { format!("mtp {draft_max}") } else { spec_type.to_string() };
            let same = if same { "the same" } else { "DIFFERENT" };
            println!("| {kind} | {temperature} | {speed:.0} | {right} | {same} |");
        }
        if expected.is_empty() {
            expected = answers;
        }
    }
    Ok(())
}

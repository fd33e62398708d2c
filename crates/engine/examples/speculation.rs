//! What guessing tokens gains: answers of one model with every way of guessing, which are checked to be the same.
//!
//! `cargo run --release -p moeflux --example speculation -- MODEL [--backend cpu|gpu] [--memory SIZE] [--device-memory SIZE |
//! --slots N] [--questions FILE [--every N]] [TEMPERATURE …]`. Prompts are made up unless there is a file of questions such as
//! `models/demo/eval.jsonl`, of which every Nth is asked.

mod common;

use std::error::Error;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant};

use common::Arguments;
use moeflux::sampler::SamplerOptions;
use moeflux::{DecodingOptions, Options, SpecType};

/// Most tokens of an answer.
const TOKENS: usize = 192;
/// Prompts that are made up, of so many tokens each.
const PROMPTS: u64 = 8;
const PROMPT: u64 = 32;
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
    let arguments = Arguments::read()?;
    let temperatures = if arguments.numbers.is_empty() { &[0.0][..] } else { &arguments.numbers };
    let mut expected: Vec<Vec<Vec<u32>>> = vec![];
    let mut all_same = true;
    println!("| guesses | temperature | tokens | tokens/s | guessed | right | tokens a step | answers |");
    println!("| :-- | --: | --: | --: | --: | --: | --: | :-- |");
    for (spec_type, draft_max) in KINDS {
        let options = Options { context: Some(1024), spec_type, draft_max, ..Options::default() };
        let mut model = arguments.open(options)?;
        model.warm_up()?;
        let mut prompts = arguments.questions(&model)?;
        if prompts.is_empty() {
            let vocab_size = model.engine.model().graph.vocab_size() as u64;
            let token = |prompt, i| ((prompt * 7_919 + i * 104_729) % vocab_size) as u32;
            prompts = (0..PROMPTS).map(|prompt| (0..PROMPT).map(|i| token(prompt, i)).collect()).collect();
        }
        for (which, temperature) in temperatures.iter().enumerate() {
            let (mut time, mut tokens, mut drafted, mut accepted) = (Duration::ZERO, 0, 0, 0);
            let mut answers = vec![];
            for (seed, prompt) in (0..).zip(&prompts) {
                let sampler = SamplerOptions {
                    temperature: *temperature,
                    seed: Some(seed),
                    ..SamplerOptions::default()
                };
                let decoding = DecodingOptions { sampler, max_tokens: TOKENS, ..DecodingOptions::default() };
                let mut session = model.engine.session();
                let start = Instant::now();
                let generated = model.generate(&mut session, prompt, decoding, |_| true)?;
                time += start.elapsed().saturating_sub(generated.first_token);
                tokens += generated.tokens.len();
                drafted += generated.decode.drafted;
                accepted += generated.decode.accepted;
                answers.push(generated.tokens);
            }
            // The first token of an answer comes with its prompt.
            let later = (tokens - answers.iter().filter(|answer| !answer.is_empty()).count()) as f64;
            let kind =
                if spec_type == SpecType::Mtp { format!("mtp {draft_max}") } else { spec_type.to_string() };
            let speed = later / time.as_secs_f64();
            let right = match drafted {
                0 => String::new(),
                _ => format!("{:.0} %", 100.0 * accepted as f64 / drafted as f64),
            };
            let a_step = later / (later - accepted as f64);
            let same = expected.get(which).is_none_or(|expected| *expected == answers);
            all_same &= same;
            let same = if same { "the same" } else { "DIFFERENT" };
            println!(
                "| {kind} | {temperature} | {tokens} | {speed:.0} | {drafted} | {right} | {a_step:.2} | {same} |"
            );
            if which == expected.len() {
                expected.push(answers);
            }
        }
    }
    let mut hasher = DefaultHasher::new();
    expected.hash(&mut hasher);
    println!("\nAnswers: {:016x}", hasher.finish());
    if all_same { Ok(()) } else { Err("answers are not the same".into()) }
}

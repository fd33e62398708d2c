//! `moeflux trace`: records which experts a model asks for.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use moeflux::error::size;
use moeflux::sampler::SamplerOptions;
use moeflux::synth::random_tokens;
use moeflux::{DecodingOptions, Engine, Outputs, SpecType, Stats};
use serde_json::json;

use crate::engine_args::{Activations, EngineArgs};
use crate::model::ModelArg;

/// Record which experts a model uses, for `moeflux replay`.
#[derive(Debug, Args)]
pub struct TraceArgs {
    /// A GGUF file, a safetensors folder, `demo`, or a model on the Hub such as org/name:Q4_K_M
    model: ModelArg,
    /// The trace file to write
    out: PathBuf,
    /// What to answer; may be given several times, each a conversation of its own. Without it, random tokens
    #[arg(long, value_name = "TEXT")]
    prompt: Vec<String>,
    /// Most tokens to generate (of an answer), or random tokens to evaluate one by one
    #[arg(short = 'n', long, value_name = "N", default_value_t = 256)]
    tokens: usize,
    /// Random tokens to evaluate at once before those
    #[arg(short = 'p', long, value_name = "N", default_value_t = 0, conflicts_with = "prompt")]
    prefill: usize,
    /// Seed of the tokens
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    engine: EngineArgs,
}

pub fn run(args: &TraceArgs) -> Result<()> {
    if args.tokens == 0 {
        bail!("--tokens: expected a positive number, got 0");
    }
    let bytes = if args.prompt.is_empty() { random(args)? } else { answers(args)? };
    moeflux::io::atomic_file::write(&args.out, &bytes)
        .with_context(|| format!("cannot write {}", args.out.display()))?;
    eprintln!("{} in {}", size(bytes.len() as u64), args.out.display());
    Ok(())
}

fn bar(len: usize) -> Result<ProgressBar> {
    let style = ProgressStyle::with_template("recording {wide_bar} {pos}/{len} tokens {eta}")?;
    Ok(ProgressBar::new(len as u64).with_style(style))
}

/// Random tokens in one sequence.
fn random(args: &TraceArgs) -> Result<Vec<u8>> {
    let mut engine_args = args.engine.clone();
    engine_args.context.get_or_insert(args.prefill + args.tokens);
    let mut engine = engine_args.open(&args.model.path()?, Activations::Int8)?;
    let tokens = random_tokens(args.seed, args.prefill + args.tokens, engine.model().graph.vocab_size());
    let (prefill, rest) = tokens.split_at(args.prefill);
    let bar = bar(args.tokens)?;
    engine.start_trace();
    let mut session = engine.session();
    if !prefill.is_empty() {
        engine.eval(&mut session, prefill, Outputs::Last)?;
    }
    engine.take_stats();
    for token in rest {
        engine.eval(&mut session, &[*token], Outputs::Last)?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(finish(&mut engine, &mut Stats::default()))
}

/// Answers to the prompts, one after the other.
fn answers(args: &TraceArgs) -> Result<Vec<u8>> {
    // Guesses that are wrong would be part of the trace.
    let engine = EngineArgs { spec_type: SpecType::Off, ..args.engine.clone() };
    let mut model = engine.open_text(&args.model.path()?)?;
    let bar = bar(args.tokens * args.prompt.len())?;
    model.engine.start_trace();
    let mut decode = Stats::default();
    for (index, prompt) in args.prompt.iter().enumerate() {
        let tokens = model.encode_chat(&[json!({ "role": "user", "content": prompt })])?;
        let sampler = SamplerOptions { seed: Some(args.seed + index as u64), ..SamplerOptions::default() };
        let options = DecodingOptions { sampler, max_tokens: args.tokens, ..DecodingOptions::default() };
        let mut session = model.engine.session();
        let generated = model.generate(&mut session, &tokens, options, |_| {
            bar.inc(1);
            true
        })?;
        decode.tokens += generated.decode.tokens;
        decode.time += generated.decode.time;
        decode.cache += generated.decode.cache;
    }
    bar.finish_and_clear();
    Ok(finish(&mut model.engine, &mut decode))
}

fn finish(engine: &mut Engine, decode: &mut Stats) -> Vec<u8> {
    let last = engine.take_stats();
    decode.tokens += last.tokens;
    decode.time += last.time;
    decode.cache += last.cache;
    engine.finish_trace(decode)
}

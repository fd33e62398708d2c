//! Many prompts at once: experts that several need are loaded once.
//!
//! `cargo run --release -p moeflux --example batch -- models/demo/demo.gguf`

use std::error::Error;

use moeflux::generation::Conversation;
use moeflux::{DecodingOptions, Options, Request, Scheduler, SchedulerOptions, TextModel};
use moeflux_compute::cpu::CpuBackend;
use serde_json::json;

fn main() -> Result<(), Box<dyn Error>> {
    let model = open(&Options { sequences: 8, ..Options::default() })?;
    let scheduler = Scheduler::start(model, SchedulerOptions::default())?;
    let mut answers = vec![];
    for animal in ["fox", "bear", "bird", "cat", "dog", "fish", "owl", "hen"] {
        let messages =
            [json!({"role": "user", "content": format!("Tell me a short story about a {animal}.")})];
        let conversation = Conversation { messages: &messages, ..Conversation::default() };
        let prompt = scheduler.encode_chat(&conversation)?.tokens;
        let options = DecodingOptions { max_tokens: 60, ..DecodingOptions::default() };
        let request = Request { prompt, options, ..Request::default() };
        answers.push((animal, scheduler.submit(request)?));
    }
    for (animal, answer) in answers {
        let (text, done) = answer.text()?;
        println!("{animal}: {text}\n[{} tokens]\n", done.usage.completion_tokens);
    }
    let figures = scheduler.figures();
    eprintln!("{} tokens in {} steps", figures.generated_tokens, figures.steps);
    Ok(())
}

/// Opens the model that the command line names.
fn open(options: &Options) -> Result<TextModel, Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("expected the path of a model")?;
    let threads = std::thread::available_parallelism()?.get();
    let backend = CpuBackend::new(threads, None)?;
    Ok(TextModel::open(path.as_ref(), &backend, options, |_, _| ())?)
}

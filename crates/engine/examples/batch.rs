//! Many prompts at once: experts that several need are loaded once.
//!
//! `cargo run --release -p moeflux --example batch -- models/demo/demo.gguf`

use std::error::Error;

use moeflux::generation::ChatPrompt;
use moeflux::{DecodingOptions, OpenOptions, Request, Scheduler, SchedulerOptions};
use serde_json::json;

fn main() -> Result<(), Box<dyn Error>> {
    let model = std::env::args().nth(1).unwrap_or("demo".into());
    let model = OpenOptions::new().sequences(8).open(model)?;
    let scheduler = Scheduler::start(model, SchedulerOptions::default())?;
    let mut answers = vec![];
    for animal in ["fox", "bear", "bird", "cat", "dog", "fish", "owl", "hen"] {
        let messages =
            [json!({"role": "user", "content": format!("Tell me a short story about a {animal}.")})];
        let conversation = ChatPrompt { messages: &messages, ..ChatPrompt::default() };
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

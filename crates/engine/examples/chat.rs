//! A conversation in which every turn evaluates only what is new.
//!
//! `cargo run --release -p moeflux --example chat -- models/demo/demo.gguf`

use std::error::Error;

use moeflux::{DecodingOptions, Options, TextModel};
use moeflux_compute::cpu::CpuBackend;
use serde_json::json;

fn main() -> Result<(), Box<dyn Error>> {
    let mut model = open(&Options::default())?;
    let mut session = model.engine.session();
    let mut messages = vec![];
    for question in ["Tell me a short story about a fox.", "What is 17 + 25?", "Thank you!"] {
        messages.push(json!({"role": "user", "content": question}));
        let all = model.encode_chat(&messages)?;
        // The session holds the conversation so far; where the template shows it otherwise now, go back to there.
        let known = all.iter().zip(session.tokens()).take_while(|(a, b)| a == b).count();
        let known = known.min(all.len() - 1);
        model.engine.truncate(&mut session, known)?;

        let mut answer = String::new();
        let options = DecodingOptions { max_tokens: 200, ..DecodingOptions::default() };
        let generated = model.generate(&mut session, &all[known..], options, |text| {
            answer.push_str(text);
            true
        })?;
        println!("> {question}\n{answer}\n");
        eprintln!("[{known} tokens known, {} evaluated]", generated.prefill.tokens);
        messages.push(json!({"role": "assistant", "content": answer}));
    }
    Ok(())
}

/// Opens the model that the command line names.
fn open(options: &Options) -> Result<TextModel, Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("expected the path of a model")?;
    let threads = std::thread::available_parallelism()?.get();
    let backend = CpuBackend::new(threads, None)?;
    Ok(TextModel::open(path.as_ref(), &backend, options, |_, _| ())?)
}

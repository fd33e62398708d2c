//! A conversation in which every turn evaluates only what is new.
//!
//! `cargo run --release -p moeflux --example chat -- models/demo/demo.gguf`

use std::error::Error;

use moeflux::AnswerOptions;

fn main() -> Result<(), Box<dyn Error>> {
    let mut model = moeflux::open(std::env::args().nth(1).unwrap_or("demo".into()))?;
    let mut conversation = model.conversation();
    for question in ["Tell me a short story about a fox.", "What is 17 + 25?", "Thank you!"] {
        let answered = conversation.ask(&mut model, question, &AnswerOptions::default())?;
        println!("> {question}\n{}\n", answered.text);
        eprintln!("[{} tokens known, {} evaluated]", answered.reused, answered.generated.prefill.tokens);
    }
    Ok(())
}

//! One prompt, one answer, written as it comes.
//!
//! `cargo run --release -p moeflux --example one_shot -- models/demo/demo.gguf`

use std::error::Error;
use std::io::Write;

use moeflux::{AnswerOptions, Passage};

fn main() -> Result<(), Box<dyn Error>> {
    let mut model = moeflux::open(std::env::args().nth(1).unwrap_or("demo".into()))?;
    let mut conversation = model.conversation();
    let mut answer = conversation.stream(&mut model, "What is 17 + 25?", &AnswerOptions::default())?;
    for passage in &mut answer {
        if let Passage::Text(text) = passage? {
            print!("{text}");
            std::io::stdout().flush()?;
        }
    }
    println!();
    let answered = answer.finish();
    eprintln!("{} tokens, {:?}", answered.generated.tokens.len(), answered.generated.finish);
    Ok(())
}

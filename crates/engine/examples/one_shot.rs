//! One prompt, one answer, written as it comes.
//!
//! `cargo run --release -p moeflux --example one_shot -- models/demo/demo.gguf`

use std::error::Error;
use std::io::Write;

use moeflux::{DecodingOptions, Options, TextModel};
use moeflux_compute::cpu::CpuBackend;
use serde_json::json;

fn main() -> Result<(), Box<dyn Error>> {
    let mut model = open(&Options::default())?;
    let prompt = model.encode_chat(&[json!({"role": "user", "content": "What is 17 + 25?"})])?;
    let mut session = model.engine.session();
    let options = DecodingOptions { max_tokens: 100, ..DecodingOptions::default() };
    let generated = model.generate(&mut session, &prompt, options, |text| {
        print!("{text}");
        std::io::stdout().flush().is_ok()
    })?;
    println!();
    eprintln!("{} tokens, {:?}", generated.tokens.len(), generated.finish);
    Ok(())
}

/// Opens the model that the command line names.
fn open(options: &Options) -> Result<TextModel, Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("expected the path of a model")?;
    let threads = std::thread::available_parallelism()?.get();
    let backend = CpuBackend::new(threads, None)?;
    Ok(TextModel::open(path.as_ref(), &backend, options, |_, _| ())?)
}

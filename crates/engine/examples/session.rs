//! A session that is saved, loaded and gone on with.
//!
//! `cargo run --release -p moeflux --example session -- models/demo/demo.gguf`

use std::error::Error;

use moeflux::{Options, Outputs, TextModel};
use moeflux_compute::cpu::CpuBackend;
use serde_json::json;

fn main() -> Result<(), Box<dyn Error>> {
    let mut model = open(&Options::default())?;
    let path = std::env::temp_dir().join("moeflux-example.session");

    let prompt = model.encode_chat(&[json!({"role": "user", "content": "What is 17 + 25?"})])?;
    let mut session = model.engine.session();
    model.engine.eval(&mut session, &prompt[..prompt.len() - 1], Outputs::Last)?;
    model.engine.save(&session, &path, "anything you want to find again")?;
    let expected = model.engine.eval(&mut session, &prompt[prompt.len() - 1..], Outputs::Last)?;

    let mut loaded = model.engine.session();
    let note = model.engine.load(&mut loaded, &path)?;
    let logits = model.engine.eval(&mut loaded, &prompt[prompt.len() - 1..], Outputs::Last)?;
    assert_eq!(logits, expected, "bit for bit");
    println!("{} tokens came back, with the note {note:?}", loaded.position());
    std::fs::remove_file(path)?;
    Ok(())
}

/// Opens the model that the command line names.
fn open(options: &Options) -> Result<TextModel, Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("expected the path of a model")?;
    let threads = std::thread::available_parallelism()?.get();
    let backend = CpuBackend::new(threads, None)?;
    Ok(TextModel::open(path.as_ref(), &backend, options, |_, _| ())?)
}

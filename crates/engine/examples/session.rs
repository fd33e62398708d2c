//! A session that is saved, loaded and gone on with.
//!
//! `cargo run --release -p moeflux --example session -- models/demo/demo.gguf`

use std::error::Error;

use moeflux::Outputs;
use serde_json::json;

fn main() -> Result<(), Box<dyn Error>> {
    let model = std::env::args().nth(1).unwrap_or("demo".into());
    let mut model = moeflux::open(model)?;
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

//! Tokenizers that are missing, odd or of another model.

use std::path::Path;

use moeflux::checkpoint::gguf::{Array, Value};
use moeflux::tokenizer::AddSpecial;
use moeflux::{DecodingOptions, Error, Options, TextModel};
use moeflux_compute::cpu::CpuBackend;

use super::editor::files;
use super::supervisor::{supervise, unclear_message};
use crate::support::Fixture;

/// Opens the model at `path` and continues a text.
fn generate(path: &Path) -> Result<(), Error> {
    let backend = CpuBackend::new(1, None).expect("a thread");
    let mut model = TextModel::open(path, &backend, &Options::default(), |_, _| ())?;
    let prompt = model.tokenizer.encode("a b", AddSpecial::Yes)?;
    let mut session = model.engine.session();
    let options = DecodingOptions { max_tokens: 3, ..DecodingOptions::default() };
    model.generate(&mut session, &prompt, options, |_| true).map(drop)
}

#[track_caller]
fn check(case: &str, path: &Path, file: &Path, parts: &[&str]) {
    let error = generate(path).expect_err(case);
    for part in parts {
        assert_eq!(unclear_message(case, &error, file, part), None);
    }
}

#[test]
fn a_tokenizer_that_is_missing_or_anothers() {
    let plain = Fixture::named("hf/qwen3_moe_basic").copy();
    check("missing", plain.path(), &plain.file("tokenizer.json"), &["No such file"]);
    let other = Fixture::named("hf/qwen3_moe_tokenizer");
    std::fs::copy(other.path.join("tokenizer.json"), plain.file("tokenizer.json")).unwrap();
    check("of a larger vocabulary", plain.path(), plain.path(), &["tokenizer", "101 tokens"]);
    std::fs::write(plain.file("tokenizer.json"), "{}").unwrap();
    check("empty", plain.path(), &plain.file("tokenizer.json"), &["tokenizer"]);
}

/// Values that no key expects; nothing for a key that is left out.
fn odd_values() -> Vec<Option<Value>> {
    let texts = |n| Value::Array(Array::String(vec!["x".into(); n]));
    vec![
        None,
        Some(Value::U32(0)),
        Some(Value::U32(u32::MAX)),
        Some(Value::I32(-1)),
        Some(Value::F32(f32::NAN)),
        Some(Value::Bool(true)),
        Some(Value::String("odd".into())),
        Some(Value::String("{{ {% ".into())),
        Some(Value::Array(Array::U32(vec![]))),
        Some(Value::Array(Array::F32(vec![f32::NAN; 3]))),
        Some(texts(0)),
        Some(texts(3)),
        Some(texts(100_000)),
    ]
}

#[test]
fn every_key_of_a_vocabulary_may_be_odd() {
    let (mut unclear, mut refused) = (vec![], 0);
    supervise(
        |case| {
            for name in ["gguf/qwen3_moe_q8_0", "gguf/mixtral_q8_0"] {
                let copy = Fixture::named(name).copy();
                let file = files(&copy).remove(0);
                for (key, _) in file.metadata.iter().filter(|(key, _)| key.starts_with("tokenizer.")) {
                    for odd in odd_values() {
                        let changed = file.metadata.iter().filter_map(|(k, v)| {
                            if k == key {
                                Some((k.clone(), odd.clone()?))
                            } else {
                                Some((k.clone(), v.clone()))
                            }
                        });
                        file.write_with(&changed.collect::<Vec<_>>());
                        let text = format!("{odd:.40?}");
                        case(format!("{name} {key} = {}", &text[..text.len().min(60)]), &mut || {
                            (file.path.clone(), generate(copy.path()))
                        });
                    }
                }
            }
        },
        |case, (file, outcome)| {
            if let Err(error) = outcome {
                refused += 1;
                unclear.extend(unclear_message(case, &error, &file, ""));
            }
        },
    );
    assert!(refused > 50, "{refused}");
    assert!(unclear.is_empty(), "messages that do not say what is wrong: {unclear:#?}");
}

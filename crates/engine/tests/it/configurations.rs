//! Configurations of fixtures with keys in other places, left out, null or changed, against what transformers makes of
//! the same weights with them.

use std::path::{Path, PathBuf};

use moeflux::Options;
use moeflux::checkpoint::json;
use moeflux_compute::cpu::CpuBackend;
use safetensors::SafeTensors;
use serde_json::Value;

use crate::support::{Fixture, f32_options, logits, open, replace};

/// As of fixtures with their own configurations.
const RELATIVE_ERROR: f32 = 3e-5;

/// The files of changes, one a fixture.
fn files() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/configs");
    let entries = std::fs::read_dir(folder).expect("fixtures").map(|entry| entry.expect("entry").path());
    let mut files: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|e| e == "json")).collect();
    files.sort();
    files
}

/// `config` with the keys of the text model that `change` sets or removes.
fn changed(config: &Value, change: &Value) -> Value {
    let mut config = config.clone();
    let nested = config.get("text_config").is_some();
    let text = if nested { &mut config["text_config"] } else { &mut config };
    let text = text.as_object_mut().expect("an object");
    for key in change["unset"].as_array().expect("a list") {
        text.shift_remove(key.as_str().expect("a key"));
    }
    for (key, value) in change["set"].as_object().expect("an object") {
        text.insert(key.clone(), value.clone());
    }
    config
}

/// The elements of a tensor of four bytes each.
fn words<T>(file: &SafeTensors<'_>, name: &str, of: fn([u8; 4]) -> T) -> Vec<T> {
    let view = file.tensor(name).expect("a tensor");
    view.data().chunks_exact(4).map(|word| of(word.try_into().expect("four bytes"))).collect()
}

#[test]
fn are_read_as_transformers_reads_them() {
    let backend = CpuBackend::new(2, None).unwrap();
    let mut faults = vec![];
    for path in files() {
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let copy = Fixture::named(&format!("hf/{name}")).copy();
        let config: Value = json::from_slice(&std::fs::read(copy.file("config.json")).unwrap()).unwrap();
        let changes: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let bytes = std::fs::read(path.with_extension("safetensors")).unwrap();
        let golden = SafeTensors::deserialize(&bytes).unwrap();
        for (number, (what, change)) in changes.as_object().expect("an object").iter().enumerate() {
            let tokens = words(&golden, &format!("{number}.tokens"), u32::from_le_bytes);
            let expected = words(&golden, &format!("{number}.logits"), f32::from_le_bytes);
            replace(&copy.file("config.json"), changed(&config, change).to_string());
            let options = Options { context: Some(tokens.len()), ..f32_options() };
            let got = logits(&mut open(copy.path(), &backend, &options), &tokens);
            let got = &got[got.len() - expected.len()..];
            let largest = expected.iter().fold(0f32, |most, v| most.max(v.abs()));
            let error =
                got.iter().zip(&expected).fold(0f32, |most, (a, b)| most.max((a - b).abs())) / largest;
            if error.is_nan() || error >= RELATIVE_ERROR {
                faults.push(format!("{name}, {what}: relative error {error:.1e}"));
            }
        }
    }
    assert!(faults.is_empty(), "{} configurations are read otherwise:\n{}", faults.len(), faults.join("\n"));
}

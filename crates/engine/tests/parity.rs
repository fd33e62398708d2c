//! Logits of tiny random models against transformers' float32, for every fixture and backend.

use std::path::{Path, PathBuf};

use moeflux::{Engine, Options, Outputs};
use moeflux_compute::backend::{ActivationMode, Backend};
use moeflux_compute::cpu::{CpuBackend, SimdLevel};
use moeflux_compute::reference::Reference;
use safetensors::SafeTensors;

fn fixtures(kind: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(kind);
    let mut found: Vec<_> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    found.sort();
    assert!(!found.is_empty());
    found
}

struct Golden {
    tokens: Vec<u32>,
    logits: Vec<f32>,
}

fn golden(folder: &Path) -> Golden {
    let bytes = std::fs::read(folder.join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: &str| file.tensor(name).unwrap().data().to_vec();
    let (tokens, logits) = (words("tokens"), words("logits"));
    let width = tokens.len() / file.tensor("tokens").unwrap().shape()[0];
    let token = |b: &[u8]| u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    Golden {
        tokens: tokens.chunks_exact(width).map(token).collect(),
        logits: logits.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
    }
}

/// Largest difference relative to the largest golden logit.
fn relative_error(got: &[f32], golden: &[f32]) -> f32 {
    assert_eq!(got.len(), golden.len());
    let largest = golden.iter().fold(0f32, |m, v| m.max(v.abs()));
    got.iter().zip(golden).fold(0f32, |m, (a, b)| m.max((a - b).abs())) / largest
}

fn logits(path: &Path, backend: &dyn Backend, options: &Options, tokens: &[u32]) -> Vec<f32> {
    let mut engine = Engine::open(path, backend, options, |_, _| ()).unwrap();
    let mut session = engine.session();
    engine.eval(&mut session, tokens, Outputs::All).unwrap()
}

/// Every Hugging Face fixture, in f32, on `backend`.
fn check(backend: &dyn Backend, tolerance: f32) {
    for folder in fixtures("hf") {
        let golden = golden(&folder);
        let options = Options { activations: ActivationMode::F32, ..Options::default() };
        let got = logits(&folder, backend, &options, &golden.tokens);
        let error = relative_error(&got, &golden.logits);
        println!("{}: {error:.1e}", folder.file_name().unwrap().display());
        assert!(error < tolerance, "{}: {error:.1e}", folder.display());
    }
}

#[test]
fn reference_agrees_with_transformers() {
    check(&Reference, 1e-5);
}

#[test]
fn every_instruction_set_agrees_with_transformers() {
    for level in SimdLevel::available() {
        check(&CpuBackend::new(2, Some(level)).unwrap(), 1e-5);
    }
}

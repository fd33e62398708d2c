//! DeepSeek fixtures of every format: logits against transformers' float32 on the same (dequantised) weights, the same
//! bits however tokens are cut into batches and however few experts are in memory.

use std::path::{Path, PathBuf};

use moeflux::{Engine, Options, Outputs};
use moeflux_compute::backend::ActivationMode;
use moeflux_compute::cpu::CpuBackend;
use safetensors::SafeTensors;

/// The checkpoint in a fixture folder: the folder, or its GGUF file.
fn model(folder: &Path) -> PathBuf {
    let gguf = folder.join("model.gguf");
    if gguf.exists() { gguf } else { folder.into() }
}

fn golden(folder: &Path) -> (Vec<u32>, Vec<f32>) {
    let bytes = std::fs::read(folder.join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: &str| file.tensor(name).unwrap().data().as_chunks::<4>().0.to_vec();
    (
        words("tokens").into_iter().map(u32::from_le_bytes).collect(),
        words("logits").into_iter().map(f32::from_le_bytes).collect(),
    )
}

/// Logits of `tokens`, evaluated `step` at a time.
fn logits(folder: &Path, options: &Options, tokens: &[u32], step: usize) -> Vec<f32> {
    let backend = CpuBackend::new(2, None).unwrap();
    let mut engine = Engine::open(&model(folder), &backend, options, |_, _| ()).unwrap();
    let mut session = engine.session();
    let parts = tokens.chunks(step).map(|part| engine.eval(&mut session, part, Outputs::All).unwrap());
    parts.collect::<Vec<_>>().concat()
}

fn check(fixture: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(fixture);
    let (tokens, expected) = golden(&folder);
    for activations in [ActivationMode::F32, ActivationMode::Int8] {
        let options = Options { activations, ..Options::default() };
        let whole = logits(&folder, &options, &tokens, tokens.len());
        if activations == ActivationMode::F32 {
            assert_eq!(whole.len(), expected.len());
            let largest = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
            let error = whole.iter().zip(&expected).fold(0f32, |m, (a, b)| m.max((a - b).abs())) / largest;
            println!("{fixture}: {error:.1e}");
            assert!(error < 1e-5, "{fixture}: {error:.1e}");
        }
        let same = |options: &Options, step: usize| whole == logits(&folder, options, &tokens, step);
        assert!(same(&options, 7), "{fixture}, {activations:?}: in steps of 7");
        assert!(same(&options, 1), "{fixture}, {activations:?}: token by token");
        let few = Options { expert_cache: Some(4), ..options };
        assert!(same(&few, tokens.len()), "{fixture}, {activations:?}: with 4 experts in memory");
    }
}

#[test]
fn hugging_face() {
    for name in ["v3_basic", "v3_kimi", "v2_lite", "v2_groups"] {
        check(&format!("hf/deepseek_{name}"));
    }
}

#[test]
fn fp8() {
    check("hf/deepseek_v3_fp8");
}

#[test]
fn gguf() {
    check("gguf/deepseek_v3_q8_0");
    check("gguf/deepseek_v2_joint_f16");
}

#[test]
fn mlx() {
    check("mlx/deepseek_v3_4bit");
    check("mlx/deepseek_v2_8bit");
}

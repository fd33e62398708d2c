//! Packed copies: the same bits, one read an expert; and what fewer bits cost.

use std::path::Path;
use std::sync::Arc;

use crate::support::{all, bits, logits, open};
use moeflux::checkpoint::Checkpoint;
use moeflux::experts::{ExpertForm, Prefetch};
use moeflux::models::Model;
use moeflux::pack::{Loss, Outcome, Pack, PackOptions};
use moeflux::{Engine, Error, Options, models};
use moeflux_compute::cpu::CpuBackend;
use moeflux_compute::graph::ExpertSetId;

const LOSS: Loss = Loss { kl_divergence: 0.0, standard_error: 0.0, same_top: 1.0, tokens: 1 };

fn model(path: &Path) -> Model {
    models::record(Arc::new(Checkpoint::open(path).unwrap())).unwrap()
}

fn pack(pack: &Pack, out: &Path) {
    let outcome = pack.write(out, &mut |_| true, |_| Ok::<_, Error>(LOSS)).unwrap();
    assert_eq!(outcome, Outcome::Complete(pack.is_lossy().then_some(LOSS)));
}

/// Reads of every expert of every layer.
fn reads(model: &Model) -> Vec<usize> {
    let store = &model.experts;
    let sets = (0..store.sets()).map(ExpertSetId);
    sets.flat_map(|set| (0..store.set(set).experts as u32).map(move |e| store.reads(set, e).len())).collect()
}

fn is_interleaved(model: &Model) -> bool {
    model.experts.sets() > 0 && model.experts.location(ExpertSetId(0), 0).form != ExpertForm::Separate
}

#[test]
fn packed_copies_give_the_same_bits_with_one_read_an_expert() {
    let backend = CpuBackend::new(2, None).unwrap();
    let options = Options { expert_cache: Some(3), prefetch: Prefetch::Off, ..Options::default() };
    let mut packed_copies = 0;
    for fixture in all() {
        let original = model(&fixture.path);
        if is_interleaved(&original) || reads(&original).iter().all(|n| *n == 1) {
            continue;
        }
        packed_copies += 1;
        let golden = fixture.golden();
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("packed");
        pack(&Pack::new(&original, PackOptions::default()).unwrap(), &out);
        // In GGUF files experts as small as these have more filling between their pages than is worth reading.
        let one_read = fixture.kind == "gguf" || reads(&model(&out)).iter().all(|n| *n == 1);
        assert!(one_read, "{}", fixture.name);

        let options = Options { context: Some(golden.tokens.len()), ..options.clone() };
        let mut original = open(&fixture.path, &backend, &options);
        let mut packed = open(&out, &backend, &options);
        let (expected, got) = (logits(&mut original, &golden.tokens), logits(&mut packed, &golden.tokens));
        assert!(bits(&got) == bits(&expected), "{}", fixture.name);
        let total = |engine: &Engine| engine.experts().store().total_bytes();
        assert_eq!(total(&packed), total(&original));
    }
    assert!(packed_copies > 20, "{packed_copies} copies");
}

#[test]
fn experts_of_a_packed_model_take_one_read() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo/demo.gguf");
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("packed.gguf");
    let original = model(&demo);
    pack(&Pack::new(&original, PackOptions::default()).unwrap(), &out);
    assert!(reads(&original).iter().all(|n| *n == 3));
    assert!(reads(&model(&out)).iter().all(|n| *n == 1));
}

/// Fewer bits: smaller experts, and predictions that are further from the original's the fewer there are.
#[test]
fn fewer_bits_are_smaller_and_further_away() {
    let backend = CpuBackend::new(2, None).unwrap();
    for (name, widths) in [("gguf/glm4_moe_f16", &[8, 4][..]), ("mlx/olmoe_8bit_tied", &[6, 5, 4, 3, 2])] {
        let fixture = all().into_iter().find(|f| f.name == name).unwrap();
        let golden = fixture.golden();
        let expected = logits(&mut open(&fixture.path, &backend, &Options::default()), &golden.tokens);
        let original = model(&fixture.path);
        let (mut bytes, mut distance) = (original.experts.total_bytes(), 0.0);
        let folder = tempfile::tempdir().unwrap();
        for experts_bits in widths {
            let options = PackOptions { experts_bits: Some(*experts_bits), threads: 2 };
            let out = folder.path().join(format!("{experts_bits}"));
            pack(&Pack::new(&original, options).unwrap(), &out);
            let smaller = model(&out);
            assert!(smaller.experts.total_bytes() < bytes, "{name}, {experts_bits} bits");
            assert_eq!(smaller.trunk_bytes(), original.trunk_bytes());
            bytes = smaller.experts.total_bytes();
            let options = Options { context: Some(golden.tokens.len()), ..Options::default() };
            let got = logits(&mut open(&out, &backend, &options), &golden.tokens);
            let squares = expected.iter().zip(&got).map(|(a, b)| f64::from(a - b).powi(2));
            let away = squares.sum::<f64>();
            assert!(away > distance, "{name}, {experts_bits} bits: {away} after {distance}");
            distance = away;
        }
    }
}

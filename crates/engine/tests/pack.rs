//! Packed copies: the same bits, one read an expert.

mod support;

use std::path::Path;
use std::sync::Arc;

use moeflux::checkpoint::Checkpoint;
use moeflux::experts::Prefetch;
use moeflux::pack::{Outcome, Pack};
use moeflux::{Engine, Options, models};
use moeflux_compute::cpu::CpuBackend;
use moeflux_compute::graph::ExpertSetId;
use support::{all, bits, logits, open};

#[test]
fn packed_copies_give_the_same_bits_with_one_read_an_expert() {
    let backend = CpuBackend::new(2, None).unwrap();
    let options = Options { expert_cache: Some(3), prefetch: Prefetch::Off, ..Options::default() };
    for fixture in all().into_iter().filter(|f| f.kind == "gguf") {
        let tokens = fixture.golden().tokens;
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("packed.gguf");
        let pack = Pack::new(Arc::new(Checkpoint::open(&fixture.path).unwrap())).unwrap();
        assert_eq!(pack.write(&out, &mut |_| true).unwrap(), Outcome::Complete);

        let mut original = open(&fixture.path, &backend, &options);
        let mut packed = open(&out, &backend, &options);
        let (expected, got) = (logits(&mut original, &tokens), logits(&mut packed, &tokens));
        assert!(bits(&got) == bits(&expected), "{}", fixture.name);
        let total = |engine: &Engine| engine.experts().store().total_bytes();
        assert_eq!(total(&packed), total(&original));
    }
}

#[test]
fn experts_of_a_packed_model_take_one_read() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo/demo.gguf");
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("packed.gguf");
    let original = Arc::new(Checkpoint::open(&demo).unwrap());
    Pack::new(Arc::clone(&original)).unwrap().write(&out, &mut |_| true).unwrap();
    for (checkpoint, reads) in [(original, 3), (Arc::new(Checkpoint::open(&out).unwrap()), 1)] {
        let store = models::record(checkpoint).unwrap().experts;
        for set in (0..store.sets()).map(ExpertSetId) {
            let experts = 0..store.set(set).experts as u32;
            assert!(
                experts.into_iter().all(|expert| store.reads(set, expert).len() == reads),
                "{reads} reads"
            );
        }
    }
}

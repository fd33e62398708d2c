//! Experts read from several copies of a checkpoint at once.

use std::path::PathBuf;

use moeflux::{Engine, Error, Options};
use moeflux_compute::cpu::CpuBackend;

use crate::support::{Copied, Fixture, bits, f32_options, logits};

fn open(fixture: &Fixture, mirrors: Vec<PathBuf>) -> moeflux::Result<Engine> {
    let options = Options { mirrors, expert_cache: Some(4), context: Some(64), ..f32_options() };
    Engine::open(&fixture.path, &CpuBackend::new(2, None).unwrap(), &options, |_, _| ())
}

fn tokens() -> Vec<u32> {
    (0..60).map(|i| (i * i * 5 + i * 11 + 3) % 47).collect()
}

/// A file of several, of one, and the folder of one.
#[test]
fn mirrors_are_read_from_and_change_no_bit() {
    for (name, file) in [
        ("gguf/olmoe_split_f16", None),
        ("gguf/qwen3_moe_q8_0", None),
        ("hf/qwen3_moe_basic", Some("model.safetensors")),
    ] {
        let fixture = Fixture::named(name);
        let (first, second) = (fixture.copy(), fixture.copy());
        let place = |copy: &Copied| file.map_or(copy.path().to_owned(), |file| copy.file(file));
        let mut engine = open(&fixture, vec![place(&first), place(&second)]).unwrap();
        let mirrored = bits(&logits(&mut engine, &tokens()));
        let cache = engine.take_stats().cache;
        let part = cache.bytes_from_mirrors as f64 / cache.bytes_read as f64;
        assert!(part > 0.1 && part < 1.0, "{name}: {part} of what was read");
        let mut alone = open(&fixture, vec![]).unwrap();
        assert!(bits(&logits(&mut alone, &tokens())) == mirrored, "{name}");
        assert_eq!(alone.take_stats().cache.bytes_from_mirrors, 0);
    }
}

#[test]
fn a_mirror_that_breaks_is_left() {
    let fixture = Fixture::named("gguf/qwen3_moe_q8_0");
    let copy = fixture.copy();
    let mut engine = open(&fixture, vec![copy.path().to_owned()]).unwrap();
    for entry in std::fs::read_dir(copy.path()).unwrap() {
        std::fs::File::options().write(true).open(entry.unwrap().path()).unwrap().set_len(1).unwrap();
    }
    let got = bits(&logits(&mut engine, &tokens()));
    assert!(got == bits(&logits(&mut open(&fixture, vec![]).unwrap(), &tokens())));
    let first = engine.take_stats().cache;
    assert!(first.bytes_from_mirrors > 0 && first.mirrors_lost == 1, "{first:?}");
    let lost: Vec<String> = engine.take_lost_mirrors().iter().map(ToString::to_string).collect();
    let path = copy.path().to_string_lossy();
    assert!(lost.len() == 1 && lost[0].contains(&*path) && lost[0].contains("read"), "{lost:?}");
    logits(&mut engine, &tokens());
    assert!(engine.take_lost_mirrors().is_empty());
    let cache = engine.take_stats().cache;
    assert!(cache.bytes_from_mirrors == 0 && cache.mirrors_lost == 0 && cache.bytes_read > 0, "{cache:?}");
}

#[test]
fn what_is_no_copy_is_refused() {
    let fixture = Fixture::named("hf/qwen3_moe_basic");
    let refused = |change: &dyn Fn(&mut Vec<u8>)| {
        let copy = fixture.copy();
        let file = copy.file("model.safetensors");
        let mut bytes = std::fs::read(&file).unwrap();
        change(&mut bytes);
        std::fs::write(&file, bytes).unwrap();
        let error = open(&fixture, vec![copy.path().to_owned()]).unwrap_err();
        assert!(error.to_string().contains(&*file.to_string_lossy()), "{error}");
        error
    };
    let shorter = refused(&|bytes| bytes.truncate(bytes.len() - 1));
    assert!(matches!(&shorter, Error::Malformed { what, .. } if what == "length"), "{shorter}");
    let names = refused(&|bytes| bytes[20] ^= 1);
    assert!(matches!(&names, Error::Malformed { what, .. } if what == "content"), "{names}");
    let last = refused(&|bytes| *bytes.last_mut().unwrap() ^= 1);
    assert!(matches!(&last, Error::Malformed { what, .. } if what == "content"), "{last}");
    let missing = open(&fixture, vec![PathBuf::from("no/such/folder")]).unwrap_err();
    assert!(missing.to_string().contains("no/such/folder"), "{missing}");
}

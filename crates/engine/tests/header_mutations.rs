//! Random damage to valid headers: never a panic, never a range outside the file, and never more memory than
//! a small multiple of the file. One test only, because the memory is counted for the whole process.

use std::{alloc::System, path::Path};

use moeflux::checkpoint::{gguf, safetensors};
use proptest::{
    collection::vec,
    prelude::*,
    test_runner::{Config, TestRunner},
};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Bytes that parsing may allocate in all, beside `64` a byte of file: messages, maps, the sort buffer.
const FIXED_BYTES: usize = 1 << 16;

/// One piece of damage; positions wrap around.
#[derive(Debug, Clone)]
enum Damage {
    Byte(usize, u8),
    /// The value of a count, length or offset, biased to extremes.
    Word(usize, u64),
    Truncate(usize),
    Insert(usize, Vec<u8>),
    /// Copies bytes from one place over another.
    Copy(usize, usize, usize),
}

fn damage() -> impl Strategy<Value = Damage> {
    let extreme = prop_oneof![
        0u64..40,
        (0u32..64).prop_map(|shift| 1 << shift),
        (0u64..40).prop_map(|n| u64::MAX - n),
        any::<u64>(),
    ];
    prop_oneof![
        4 => (any::<usize>(), any::<u8>()).prop_map(|(at, byte)| Damage::Byte(at, byte)),
        4 => (any::<usize>(), extreme).prop_map(|(at, word)| Damage::Word(at, word)),
        1 => any::<usize>().prop_map(Damage::Truncate),
        1 => (any::<usize>(), vec(any::<u8>(), 1..40)).prop_map(|(at, bytes)| Damage::Insert(at, bytes)),
        2 => (any::<usize>(), any::<usize>(), 1usize..64).prop_map(|(from, to, n)| Damage::Copy(from, to, n)),
    ]
}

fn apply(bytes: &mut Vec<u8>, damage: &Damage) {
    let len = bytes.len();
    let overwrite = |bytes: &mut Vec<u8>, at: usize, new: &[u8]| {
        bytes[at..].iter_mut().zip(new).for_each(|(old, &new)| *old = new);
    };
    match damage {
        _ if len == 0 => {}
        Damage::Byte(at, byte) => bytes[at % len] = *byte,
        Damage::Word(at, word) => overwrite(bytes, at % len, &word.to_le_bytes()),
        Damage::Truncate(at) => bytes.truncate(at % len),
        Damage::Insert(at, new) => _ = bytes.splice(at % len..at % len, new.iter().copied()),
        Damage::Copy(from, to, n) => {
            let from = from % len;
            let piece = bytes[from..len.min(from + n)].to_vec();
            overwrite(bytes, to % len, &piece);
        }
    }
}

fn golden(name: &str) -> Vec<u8> {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/goldens/checkpoint"));
    std::fs::read(folder.join(name)).expect(name)
}

/// Bytes of all tensors that a header accepts, or `None` if it is refused.
type Parse = fn(&[u8]) -> Option<Vec<(u64, u64)>>;

fn parse_gguf(bytes: &[u8]) -> Option<Vec<(u64, u64)>> {
    let header = gguf::Header::read(bytes, bytes.len() as u64, Path::new("m")).ok()?;
    Some(header.tensors.iter().map(|t| (t.offset, t.len.unwrap_or(0))).collect())
}

fn parse_safetensors(bytes: &[u8]) -> Option<Vec<(u64, u64)>> {
    let header = safetensors::Header::read(bytes, bytes.len() as u64, Path::new("m")).ok()?;
    Some(header.tensors.iter().map(|t| (t.offset, t.len)).collect())
}

#[test]
fn damaged_headers_are_refused_or_harmless() {
    let cases: [(&[u8], Parse); 3] = [
        (&golden("single.gguf"), parse_gguf),
        (&golden("split-00002-of-00003.gguf"), parse_gguf),
        (&golden("mlx/model.safetensors"), parse_safetensors),
    ];
    for (valid, parse) in cases {
        assert!(parse(valid).is_some_and(|tensors| !tensors.is_empty()), "the undamaged file is accepted");
        // Damage to tensor data is no damage to the header: aim at the part before it.
        let header_end = parse(valid).and_then(|t| t.iter().map(|&(offset, _)| offset as usize).min());
        let header_end = header_end.expect("a tensor");
        let mut runner =
            TestRunner::new(Config { cases: 3000, failure_persistence: None, ..Config::default() });
        let result = runner.run(&vec(damage(), 1..4), |damages| {
            let mut header = valid[..header_end].to_vec();
            damages.iter().for_each(|d| apply(&mut header, d));
            header.extend_from_slice(&valid[header_end..]);
            let region = Region::new(ALLOCATOR);
            let tensors = parse(&header);
            let allocated = region.change().bytes_allocated;
            prop_assert!(allocated <= FIXED_BYTES + 64 * header.len(), "{allocated} bytes allocated");
            for (offset, len) in tensors.unwrap_or_default() {
                let end = offset.checked_add(len);
                prop_assert!(end.is_some_and(|end| end <= header.len() as u64), "{offset} + {len}");
            }
            Ok(())
        });
        result.expect("no damage does harm");
    }
}

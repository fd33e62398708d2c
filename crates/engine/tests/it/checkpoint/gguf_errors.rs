//! GGUF files that are wrong in one way each: the error says which.

use std::path::Path;

use moeflux::{Error, checkpoint::gguf::Header};

use super::support::{Folder, RawGguf, check_error, raw_string, raw_tensor};

fn read(bytes: &[u8]) -> Result<Header, Error> {
    Header::read(bytes, bytes.len() as u64, Path::new("bad.gguf"))
}

#[track_caller]
fn check(case: &str, raw: RawGguf, expected: &str) {
    check_error(case, read(&raw.bytes()), "bad.gguf", expected);
}

/// An array value: element type, count, elements.
fn array(element_type: u32, count: u64, elements: &[u8]) -> Vec<u8> {
    [&element_type.to_le_bytes()[..], &count.to_le_bytes(), elements].concat()
}

#[test]
fn the_unchanged_file_is_accepted() {
    let header = read(&RawGguf::valid().bytes()).expect("valid");
    assert_eq!(header.tensors[1].shape, [2, 64]);
    assert_eq!(header.metadata.u64("count").expect("an integer"), Some(7));
}

#[test]
fn truncation_anywhere_is_refused() {
    let raw = RawGguf::valid();
    let (bytes, header) = (raw.bytes(), raw.header().len());
    for len in 0..bytes.len() {
        let message = read(&bytes[..len]).expect_err("a tensor's data is cut at least").to_string();
        // A cut header is noticed at the cut, or before it by a count that no longer fits.
        let reasons =
            if len < header { &["left of the file", "by the file's length"][..] } else { &["data within"] };
        assert!(reasons.iter().any(|reason| message.contains(reason)), "cut to {len} bytes: {message:?}");
    }
}

#[test]
fn a_source_shorter_than_declared_is_a_read_error() {
    let bytes = RawGguf::valid().bytes();
    let result = Header::read(&bytes[..40], bytes.len() as u64, Path::new("bad.gguf"));
    assert!(matches!(result, Err(Error::Read { .. })), "{result:?}");
}

#[test]
fn header_fields() {
    let valid = RawGguf::valid;
    check("magic", valid().with(|r| r.magic = *b"GGML"), "magic: expected \"GGUF\", got \"GGML\"");
    check("magic bytes", valid().with(|r| r.magic = [0xff, 0, b'\n', b'x']), "magic");
    check("version 0", valid().with(|r| r.version = 0), "version: expected 2 or 3, little-endian, got 0");
    check("version 1", valid().with(|r| r.version = 1), "got 1 (an obsolete layout");
    check("version 4", valid().with(|r| r.version = 4), "got 4");
    check("big-endian", valid().with(|r| r.version = 3 << 24), "version 3 in big-endian byte order");
    check(
        "negative tensor count",
        valid().with(|r| r.tensor_count = Some(u64::MAX)),
        "tensor count: expected at",
    );
    check("huge tensor count", valid().with(|r| r.tensor_count = Some(1 << 40)), "got 1099511627776");
    check(
        "negative key count",
        valid().with(|r| r.value_count = Some(u64::MAX)),
        "key-value count: expected at",
    );
    check("one tensor too many", valid().with(|r| r.tensor_count = Some(3)), "tensor 2 of 3");
    check("one key too many", valid().with(|r| r.value_count = Some(3)), "");
}

#[test]
fn key_values() {
    let with = |value_type, value: &[u8]| RawGguf::valid().value("k", value_type, value);
    check("duplicate key", RawGguf::valid().value("count", 7, &[1]), "key \"count\": expected a unique key");
    check("unknown type", with(13, &[0; 8]), "key \"k\": value type: expected a number up to 12, got 13");
    check("boolean", with(7, &[2]), "key \"k\": boolean: expected 0 or 1, got 2");
    check("boolean in array", with(9, &array(7, 2, &[1, 9])), "boolean: expected 0 or 1, got 9");
    check(
        "huge string",
        with(8, &u64::MAX.to_le_bytes()),
        "key \"k\": string: expected 18446744073709551615 bytes",
    );
    check("long string", with(8, &400u64.to_le_bytes()), "key \"k\": string: expected 400 bytes");
    check("huge array", with(9, &array(4, u64::MAX, &[])), "array length: expected at most");
    check("long array", with(9, &array(10, 64, &[])), "array length: expected at most");
    check("huge string array", with(9, &array(8, 1 << 60, &[])), "array length: expected at most");
    check("huge nested array", with(9, &array(9, 1 << 60, &[])), "array length: expected at most");
    check(
        "element type",
        with(9, &array(99, 1, &[0; 8])),
        "array element type: expected a number up to 12, got 99",
    );
    let deep = (0..5).fold(array(0, 1, &[1]), |inner, _| array(9, 1, &inner));
    check("deep array", with(9, &deep), "nesting up to 4 deep");
    let bad_key = RawGguf::valid().with(|r| r.values[1].0 = vec![b'c', 0xff]);
    check("key not UTF-8", bad_key, "key-value 1 of 2: key: expected UTF-8, got \"c\\\\xff\"");
    let long_key = RawGguf::valid().with(|r| {
        r.values[1].0 = vec![b'x'; 70_000];
    });
    check("long key", long_key, "key: expected at most 65535 bytes, got 70000");
    let huge = (1u32 << 30).to_le_bytes();
    check(
        "alignment 2^30",
        RawGguf::valid().value("general.alignment", 4, &huge),
        "up to 2097152, got 1073741824",
    );
    check(
        "alignment 0",
        RawGguf::valid().value("general.alignment", 4, &[0; 4]),
        "a power of two up to 2097152, got 0",
    );
    check(
        "alignment 48",
        RawGguf::valid().value("general.alignment", 4, &[48, 0, 0, 0]),
        "a power of two up to 2097152, got 48",
    );
    check(
        "alignment text",
        RawGguf::valid().value("general.alignment", 8, &raw_string(b"32")),
        "unsigned integer",
    );
}

#[test]
fn text_values_may_be_any_bytes() {
    let raw = RawGguf::valid().value("k", 8, &raw_string(b"a\xffb"));
    let header = read(&raw.bytes()).expect("lossy text");
    assert_eq!(header.metadata.str("k").expect("a string"), Some("a\u{fffd}b"));
}

#[test]
fn tensors() {
    let with = |change: fn(&mut RawGguf)| RawGguf::valid().with(change);
    check(
        "rank",
        with(|r| r.tensors[0].rank = Some(5)),
        "tensor \"a\": number of dimensions: expected at most 4, got 5",
    );
    check("huge rank", with(|r| r.tensors[0].rank = Some(u32::MAX)), "number of dimensions");
    check(
        "zero dimension",
        with(|r| r.tensors[0].ne[1] = 0),
        "tensor \"a\": dimension: expected a positive number, got 0",
    );
    check(
        "negative dimension",
        with(|r| r.tensors[0].ne[1] = u64::MAX),
        "dimension: expected a positive number, got -1",
    );
    check("huge dimension", with(|r| r.tensors[0].ne[1] = 1 << 50), "data within");
    check("overflowing dimensions", with(|r| r.tensors[0].ne = vec![1 << 40; 2]), "fewer than 2^63 elements");
    check("overflowing bytes", with(|r| r.tensors[0].ne = vec![1 << 31, (1 << 32) - 1]), "size below 2^64");
    check(
        "ragged blocks",
        with(|r| r.tensors[1].ne = vec![48, 2]),
        "a multiple of 32 columns for Q8_0, got [48, 2]",
    );
    check(
        "misaligned",
        with(|r| r.tensors[1].offset = 72),
        "tensor b: expected a data offset that is a multiple of 32",
    );
    check("beyond the end", with(|r| r.tensors[1].offset = 96), "tensor b: expected data within");
    check(
        "far beyond the end",
        with(|r| r.tensors[1].offset = u64::MAX - 31),
        "tensor b: expected data within",
    );
    check("shortened data", with(|r| r.data -= 1), "tensor b: expected data within");
    check("overlap", with(|r| r.tensors[1].offset = 32), "tensor b: expected data after tensor a");
    check("same place", with(|r| r.tensors[1].offset = 0), "expected data after tensor");
    check("duplicate", with(|r| r.tensors[1].name = b"a".to_vec()), "tensor a: expected a unique name");
    check("name not UTF-8", with(|r| r.tensors[1].name = vec![0xc3]), "tensor 1 of 2: name: expected UTF-8");
}

#[test]
fn a_type_that_cannot_be_used_matters_only_when_asked_for() {
    let raw = RawGguf::valid().with(|r| {
        r.tensors.push(raw_tensor("ternary", &[256], 35, 224));
        r.tensors.push(raw_tensor("removed", &[256], 4, 384));
        r.data = 384 + 10;
    });
    let folder = Folder::new(&[("m.gguf", &raw.bytes())]);
    let checkpoint = folder.open("m.gguf").expect("open");
    checkpoint.tensor("b").expect("read").expect("there");
    for (name, got) in [("ternary", "got TQ2_0"), ("removed", "got unknown ggml type 4")] {
        check_error(name, checkpoint.weight(name), "m.gguf", &format!("tensor {name}: expected an encoding"));
        check_error(name, checkpoint.tensor(name), "m.gguf", got);
    }
}

/// Shard `no` (from 0) of `count`, with one tensor.
fn shard(no: u16, count: u16, tensors: i32) -> RawGguf {
    let mut raw = RawGguf::valid();
    raw.tensors = vec![raw_tensor(&format!("t{no}"), &[4], 0, 0)];
    raw.data = 16;
    raw.value("split.no", 2, &no.to_le_bytes()).value("split.count", 2, &count.to_le_bytes()).value(
        "split.tensors.count",
        5,
        &tensors.to_le_bytes(),
    )
}

#[test]
fn shards() {
    let [first, second] = [shard(0, 2, 2).bytes(), shard(1, 2, 2).bytes()];
    let (name1, name2) = ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf");
    let folder = Folder::new(&[(name1, &first), (name2, &second)]);
    for opened in [name1, name2, ""] {
        let checkpoint = folder.open(opened).expect(opened);
        assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["t0", "t1"]);
        assert_eq!(checkpoint.weight("t1").expect("t1").expect("there").planes[0].file, 1);
    }

    let check = |case: &str, files: &[(&str, &[u8])], open: &str, file: &str, expected: &str| {
        check_error(case, Folder::new(files).open(open), file, expected);
    };
    check("second missing", &[(name1, &first)], name1, name2, "cannot open");
    check("first missing", &[(name2, &second)], "", name1, "cannot open");
    check("renamed", &[("m.gguf", &first)], "m.gguf", "m.gguf", "PREFIX-0000n-of-00002.gguf");
    check(
        "other count in name",
        &[("m-00001-of-00003.gguf", &first)],
        "",
        "m-00001",
        "PREFIX-0000n-of-00002.gguf",
    );
    check("swapped", &[(name1, &second), (name2, &first)], name1, name1, "split.no: expected 0, got 1");
    check("same twice", &[(name1, &first), (name2, &first)], name1, name2, "split.no: expected 1, got 0");
    let other = shard(1, 3, 2).bytes();
    check("other count", &[(name1, &first), (name2, &other)], name1, name2, "split.count: expected 2, got 3");
    let whole = RawGguf::valid().bytes();
    check(
        "not a shard",
        &[(name1, &first), (name2, &whole)],
        name1,
        name2,
        "split.count: expected 2, got none",
    );
    let five = shard(0, 2, 5).bytes();
    check(
        "tensors",
        &[(name1, &five), (name2, &second)],
        name1,
        name1,
        "split.tensors.count: expected 5, got 2",
    );
    let same = shard(1, 2, 2).with(|r| r.tensors[0].name = b"t0".to_vec()).bytes();
    check("duplicate", &[(name1, &first), (name2, &same)], name1, name2, "tensor t0: expected a unique name");
    check("truncated", &[(name1, &first), (name2, &second[..50])], name1, name2, "by the file's length");
    let many = shard(0, u16::MAX, 2).bytes();
    let many_name = "m-00001-of-65535.gguf";
    check("many", &[(many_name, &many)], many_name, "m-00002-of-65535.gguf", "cannot open");
}
